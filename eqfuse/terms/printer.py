"""Expressions and programs as text of the language, as a person would have written them.

This module makes `str(expr)` the expression's text. Kinds of reductions and functions that are not built in add how
they are written to `WRITTEN` (terms/folds.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from eqfuse.terms.functions import FUNCTIONS, OPERATORS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    Scalar,
    Scan,
    Size,
    set_text,
    walk,
)

OR, AND, NOT, COMPARE, BITS_OR, BITS_XOR, BITS_AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(1, 13)
"""Binding strengths, weakest first."""

_OF_SYMBOL = {
    "or": OR,
    "and": AND,
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), COMPARE),
    "|": BITS_OR,
    "^": BITS_XOR,
    "&": BITS_AND,
    **dict.fromkeys(("<<", ">>"), SHIFT),
    **dict.fromkeys(("+", "-"), SUM),
    **dict.fromkeys(("*", "/", "//", "%"), PRODUCT),
}
STRENGTH: Mapping[str, int] = {fn: _OF_SYMBOL[symbol] for fn, symbol in OPERATORS.items()}

WRITTEN: list[Callable[[Expr, Callable[[Expr], str]], str | None]] = []
"""How reductions and functions that are not built in are written, as `name(...)`: each is given a node and what makes a
part of it text, and answers None where the node is none of its own."""


def show(expr: Expr) -> str:
    """The expression in the source language, with no more parentheses than its structure needs."""
    texts: dict[Expr, tuple[str, int]] = {}
    for node in walk(expr):
        texts[node] = _show(node, texts)
    return texts[expr][0]


def output_lines(outputs: Iterable[Output]) -> list[str]:
    """Outputs as text, each written in full."""
    return [f"{_left(output)} = {show(output.expr)}" for output in outputs]


def _left(output: Output) -> str:
    return f"{output.name}[{', '.join(output.axes)}]" if output.axes else output.name


def show_program(program: Program) -> str:
    """A source text that parses to the same program: declarations, then one definition per output."""
    lines = [f"{t.name}: {t.dtype}[{', '.join(a or '' for a in t.axes)}]" for t in program.tensors if t.dtype]
    lines += [f"{name}: i64" for name in program.integers]
    lines += [f"{axis}: axis[{of}]" for axis, of in program.domains.items()]
    lines += [f"{axis}: axis[{count}]" for axis, count in program.lengths.items()]
    lines += [f"{axis}: axis[{show(count)}]" for axis, count in program.computed.items()]
    plain = {
        (node.tensor, k)
        for node in walk(*(output.expr for output in program.outputs))
        if isinstance(node, Load)
        for k, at in enumerate(node.index)
        if isinstance(at, Axis)
    }
    lines += [
        f"{axis}: axis[N({tensor.name}, {k})]"
        for tensor in program.tensors
        for k, axis in enumerate(tensor.axes)
        if axis is not None and not tensor.dtype and (tensor.name, k) not in plain
    ]
    for output in program.outputs:
        left = _left(output)
        written = isinstance(output.expr, Call) and output.expr.fn == output.dtype
        if output.dtype is not None and not written:
            lines.append(f"{output.name}: {output.dtype}{left.removeprefix(output.name)}")
        lines.append(f"{left} = {show(output.expr)}")
    lines += [f"assert {show(left)} <= {show(right)}" for left, right in program.at_most]
    return "\n".join(lines)


def _show(node: Expr, texts: dict[Expr, tuple[str, int]]) -> tuple[str, int]:
    """Text and binding strength of a node whose children have theirs."""

    def text(part: Expr, least: int = OR) -> str:
        inner, strength = texts[part]
        return inner if strength >= least else f"({inner})"

    match node:
        case Const(value):
            return _number(value), UNARY if _is_negative(value) else ATOM
        case Scalar(name) | Axis(name) | Local(name, _):
            return name, ATOM
        case Size(axis):
            return f"N({axis})", ATOM
        case Load(tensor, ()):  # what another kernel has stored
            return tensor, ATOM
        case Load(tensor, index):
            return f"{tensor}[{', '.join(map(text, index))}]", ATOM
        case Reduce(op, _, _) | Call(op, _) if op not in REDUCTIONS and op not in FUNCTIONS:
            return _written(node, text), ATOM
        case Scan():
            return _written(node, text), ATOM
        case Reduce(op, axis, body):
            axes = [axis]
            while isinstance(body, Reduce) and body.op == op and body.axis not in axes:
                axes.append(body.axis)
                body = body.body
            return f"{op}[{', '.join(axes)}]({text(body)})", ATOM
        case Call("neg", (Const() as operand,)):
            return f"-({text(operand)})", UNARY
        case Call("neg", (operand,)):
            return f"-{text(operand, UNARY)}", UNARY
        case Call("not", (operand,)):
            return f"not {text(operand, NOT)}", NOT
        case Call("maximum" | "minimum" as fn, (left, right)):
            parts = [right]
            while isinstance(left, Call) and left.fn == fn:
                parts.append(left.args[1])
                left = left.args[0]
            return f"{fn[:3]}({', '.join(map(text, (left, *reversed(parts))))})", ATOM
        case Call(fn, (left, right)) if fn in STRENGTH:
            strength = STRENGTH[fn]
            # Operators group to the left; comparisons do not group at all.
            least = strength + 1 if strength == COMPARE else strength
            return f"{text(left, least)} {OPERATORS[fn]} {text(right, strength + 1)}", strength
        case Call(fn, args):
            return f"{fn}({', '.join(map(text, args))})", ATOM
        case _:
            raise TypeError(f"not an expression: {node!r}")


def _written(node: Expr, text: Callable[[Expr], str]) -> str:
    for write in WRITTEN:
        if (found := write(node, text)) is not None:
            return found
    match node:
        case Reduce(op, axis, body):
            return f"{op}[{axis}]({text(body)})"
        case Call(fn, args):
            return f"{fn}({', '.join(map(text, args))})"
    raise TypeError(f"not an expression: {node!r}")


def _is_negative(value: float | bool) -> bool:
    return math.copysign(1.0, value) < 0 and not math.isnan(value)


def _number(value: float | bool) -> str:
    return "pi" if value == math.pi else repr(value)


set_text(show)
