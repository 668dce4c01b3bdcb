"""Rules as people write them, in the expression language, to the patterns that rules/rule.py compiles.

Names are pattern variables; the axis of a reduction is a domain variable (`A`, `B` and `AB` are the two parts of a split
axis and their union). Functions without a constructor of their own, comparisons and registered reductions are
written as in programs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from eqfuse.errors import EqfuseError, did_you_mean
from eqfuse.rules.constructors import HEADS
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import PARTS
from eqfuse.terms.expressions import COMPARE
from eqfuse.terms.folds import FOLDS, PAIR, fold_of
from eqfuse.terms.functions import ARITY, CASTS, CONSTANTS, VARIADIC
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.terms.python import parsed
from eqfuse.terms.registry import ARGUMENT, REGISTERED, instance, reducers
from eqfuse.terms.syntax import Source


@dataclass(frozen=True)
class Pattern:
    """A pattern's text for the rule compiler, its expression variables and its domains."""

    text: str
    variables: frozenset[str]
    domains: frozenset[str]


def term(source: Source, node: ast.expr) -> Pattern:
    """The pattern of an expression. Raises EqfuseError with a caret at what is no pattern."""
    reader = _Reader(source)
    text = ast.unparse(reader.read(node))
    return Pattern(text, frozenset(reader.variables), frozenset(reader.domains))


def conditions(text: str) -> tuple[Pattern, ...]:
    """The facts of a side condition, separated by commas. Raises EqfuseError."""
    if not text.strip():
        return ()
    source = Source.of(text)
    node = expression(source)
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(_condition(source, part) for part in parts)


def expression(source: Source) -> ast.expr:
    """The one expression of a text. Raises EqfuseError."""
    match source.module().body:
        case [ast.Expr(value=value)]:
            return value
        case _:
            raise EqfuseError(
                "this is not an expression", source=source.text, hint="write one side of an equation"
            )


def _condition(source: Source, node: ast.expr) -> Pattern:
    reader = _Reader(source)
    match node:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            if isinstance(op, ast.NotEq) and all(
                isinstance(n, ast.Name) and n.id.isupper() for n in (left, right)
            ):
                return Pattern(ast.unparse(node), frozenset(), frozenset({left.id, right.id}))  # type: ignore[attr-defined]
            sides = [reader.read(side) for side in (left, right)]
            text = (
                f"{ast.unparse(sides[0])} {'==' if isinstance(op, ast.Eq) else '!='} {ast.unparse(sides[1])}"
            )
        case ast.Call(func=ast.Name(id=relation), args=args):
            if relation not in RELATIONS:
                hint = did_you_mean(relation, RELATIONS) or "conditions: " + " ".join(RELATIONS)
                raise source.error(f"unknown condition {relation!r}", node.func, hint, EqfuseError)
            sorts = RELATIONS[relation].sorts
            width = len(sorts) - (sorts[-2:] == ("String", "String"))
            if len(args) != width:
                message = f"{relation} takes {width} arguments, {len(args)} given"
                raise source.error(message, node, "write what it is about, then the axis", EqfuseError)
            texts = []
            for sort, arg in zip(sorts, args, strict=False):
                if sort == "E":
                    texts.append(ast.unparse(reader.read(arg)))
                else:
                    texts.append(reader.domain(arg))
            text = f"{relation}({', '.join(texts)})"
        case _:
            hint = "write fixed(c, j), nonneg(c), p == q or p != q"
            raise source.error("this is not a condition", node, hint, EqfuseError)
    return Pattern(text, frozenset(reader.variables), frozenset(reader.domains))


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.variables: set[str] = set()
        self.domains: set[str] = set()
        self.arguments: dict[str, ast.expr] = {}

    def _error(self, message: str, node: ast.AST, hint: str) -> EqfuseError:
        return self.source.error(message, node, hint, EqfuseError)

    def domain(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name)]):
                self.domains.add(name)
                return name
        raise self._error(
            "a domain is a name", node, "write sum[j](...), or A, B, AB for the parts of a split axis"
        )

    def read(self, node: ast.expr) -> ast.expr:
        """The same in the notation of rules/rule.py."""
        match node:
            case ast.Name(id=name) if name in self.arguments:
                return self.arguments[name]
            case ast.Name(id="inf"):
                return node
            case ast.Name(id=name) if name in CONSTANTS:
                return ast.Constant(CONSTANTS[name])
            case ast.Name(id=name):
                self.variables.add(name)
                return node
            case ast.Constant(value=bool()) | ast.Constant(value=str()):
                raise self._error("this is not a number", node, "patterns are made of names and numbers")
            case ast.Constant(value=int() | float()):
                return node
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return ast.UnaryOp(ast.USub(), self.read(operand))
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=2)):
                return _call("sq", self.read(left))
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
                return ast.BinOp(self.read(left), op, self.read(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                return self._opaque(COMPARE[type(op)], [left, right])
            case ast.Call(func=ast.Name(id="N"), args=[axis]):
                return _reduce("sum", self.domain(axis), ast.Constant(1))
            case ast.Call(func=ast.Name(id=fn), args=args):
                return self._call(fn, args, node)
            case ast.Call(func=ast.Subscript(value=head, slice=axis), args=args):
                return self._reduction(head, axis, args, node)
        raise self._error(
            "this is not a pattern", node, "patterns are made of names, numbers, functions and reductions"
        )

    def _opaque(self, fn: str, args: list[ast.expr]) -> ast.expr:
        return _call(f"apply{len(args)}", ast.Constant(fn), *map(self.read, args))

    def _call(self, fn: str, args: list[ast.expr], node: ast.Call) -> ast.expr:
        match fn, args:
            case ("rsqrt", [a]):
                return _call("inv", _call("sqrt", self.read(a)))
            case ("relu", [a]):
                return _call("maximum", self.read(a), ast.Constant(0))
            case ("max" | "min", [a, b]):
                return _call(VARIADIC[fn], self.read(a), self.read(b))
            case ("inv" | "ratio" | "delta", _) if len(args) == (1 if fn == "inv" else 2):
                return _call(fn, *map(self.read, args))
        if fn == "stop":
            raise self._error("a rule is of values, which a stop does not change", node, "leave the stop out")
        if fn not in ARITY:
            known = (*(name for name in ARITY if name.isidentifier()), "inv", "ratio", "delta")
            hint = did_you_mean(fn, known) or "functions: " + " ".join(sorted(known))
            raise self._error(f"unknown function {fn!r}", node.func, hint)
        if len(args) != ARITY[fn]:
            message = f"{fn} takes {ARITY[fn]} arguments, {len(args)} given"
            raise self._error(
                message.replace("1 arguments", "1 argument"), node, "give it as many as it takes"
            )
        if fn in CASTS:
            raise self._error(
                "a rule is of real numbers, which a cast does not change", node, "leave the cast out"
            )
        if fn in HEADS:
            return _call(fn, *map(self.read, args))
        return self._opaque(fn, args)

    def _reduction(self, head: ast.expr, index: ast.expr, args: list[ast.expr], node: ast.Call) -> ast.expr:
        axis = self.domain(index)
        match head:
            case ast.Name(id=op) if op in REDUCTIONS and len(args) == 1:
                return _reduce(op, axis, self.read(args[0]))
            case ast.Name(id=name) if name in REGISTERED:
                return self._registered(name, axis, args, node)
            case ast.Attribute(value=ast.Name(id=name), attr=variable) if name in FOLDS and fold_of(
                f"{name}.{variable}"
            ):
                if len(args) != len(FOLDS[name].state):
                    message = f"{name}.{variable} takes {len(FOLDS[name].state)} arguments, {len(args)} given"
                    raise self._error(message, node, "give one for each state variable")
                return _reduce(f"{name}.{variable}", axis, self._packed(args))
        text = ast.unparse(head)
        if text in REDUCTIONS:
            raise self._error(f"{text} takes 1 argument, {len(args)} given", node, "reduce one expression")
        hint = did_you_mean(text, reducers()) or "reductions: " + " ".join(reducers())
        raise self._error(f"unknown reduction {text!r}", head, hint)

    def _packed(self, args: list[ast.expr]) -> ast.expr:
        *first, body = map(self.read, args)
        for part in reversed(first):
            body = _call("apply2", ast.Constant(PAIR), part, body)
        return body

    def _registered(self, name: str, axis: str, args: list[ast.expr], node: ast.Call) -> ast.expr:
        reduction = REGISTERED[name]
        if len(args) != len(reduction.args) or len(reduction.results) != 1:
            message = (
                f"{name} takes {len(reduction.args)} arguments and gives {len(reduction.results)} values"
            )
            raise self._error(
                message, node, "patterns have reductions of one value, with all their arguments"
            )
        if reduction.reads_position:
            raise self._error(
                f"{name} reads positions, which are no part of a pattern", node, "write a rule of its state"
            )
        values = {ARGUMENT + arg: self.read(value) for arg, value in zip(reduction.args, args, strict=True)}
        outer, self.arguments = self.arguments, values
        found = self.read(instance(reduction.results[0], reduction.args, (axis,)))
        self.arguments = outer
        return found


def _call(fn: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(fn), list(args), [])


def _reduce(op: str, axis: str, body: ast.expr) -> ast.expr:
    return ast.Call(ast.Subscript(parsed(op), ast.Name(axis)), [body], [])


def named_domains(pattern: Pattern) -> Iterator[str]:
    """Domain variables of a pattern: the parts of a split axis are none."""
    return (name for name in sorted(pattern.domains) if name not in PARTS)
