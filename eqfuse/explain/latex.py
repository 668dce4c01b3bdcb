"""An explanation as a LaTeX document that needs amsmath alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from eqfuse.proof.notation import Notation, Piece, strength_of
from eqfuse.proof.outline import Block, Code, Equation, Heading, Line, Prose
from eqfuse.terms.printer import ATOM, PRODUCT, STRENGTH, UNARY
from eqfuse.terms.python import parsed

COMPARISONS: Mapping[str, str] = {"le": r"\le", "ge": r"\ge", "lt": "<", "gt": ">", "eq": "=", "ne": r"\ne"}
_AST_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.LtE: r"\le",
    ast.GtE: r"\ge",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.Eq: "=",
    ast.NotEq: r"\ne",
}
_AST_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: r"\cdot",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: r"\bmod",
}
_SPECIAL = re.compile(r"[\\{}$&#%_^~]")

PREAMBLE = r"""\documentclass{article}
\usepackage{amsmath}
\usepackage[a4paper,landscape,margin=15mm]{geometry}
\allowdisplaybreaks
\setlength{\parindent}{0pt}
\begin{document}"""


def document(blocks: Iterable[Block]) -> str:
    """The whole document."""
    return "\n".join([PREAMBLE, *_body(blocks), r"\end{document}"])


def _body(blocks: Iterable[Block]) -> Iterator[str]:
    for is_formula, run in groupby(blocks, key=lambda block: isinstance(block, Equation | Line)):
        if is_formula:
            yield r"\begin{align*}"
            yield " \\\\\n".join(map(_row, run))
            yield r"\end{align*}"
            continue
        for block in run:
            match block:
                case Heading(text):
                    yield rf"\section*{{{escaped(text)}}}"
                case Prose(text):
                    yield escaped(text) + "\n"
                case Code(text):
                    inside = text.replace(
                        r"\end{verbatim}", r"\end {verbatim}"
                    )  # what alone means something there
                    yield "\\begin{verbatim}\n" + inside + "\n\\end{verbatim}"


def _row(block: Block) -> str:
    match block:
        case Equation(left, right, names, note):
            comment = rf" && \text{{{escaped(note)}}}" if note else ""
            prefix, _, target = left.rpartition("let ")
            shown = r"\text{let } " * bool(prefix or left.startswith("let ")) + _of_text(target)
            return f"{shown} &= {Latex(names).show(right)}{comment}"
        case Line() as line:
            reason = rf"\text{{by {escaped(', '.join(line.rules))}}}"
            return f"&= {Latex(line.names).show(line.right, line.changed)} && {reason}"
    raise TypeError(f"not a formula: {block!r}")


def escaped(text: str) -> str:
    """Text outside formulas."""
    names = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    plain = _SPECIAL.sub(lambda m: names.get(m[0], "\\" + m[0]), text)
    return plain.replace("<=", r"$\le$").replace(">=", r"$\ge$")


def name(text: str) -> str:
    """`max_j_new` as max with an index and a prime; `_a` and `_b` tell parts apart."""
    stem, *rest = text.split("_")
    suffix = {"new": "'", "a": "^{A}", "b": "^{B}"}.get(rest[-1], "") if rest else ""
    if suffix:
        rest = rest[:-1]
    match = re.fullmatch(r"([A-Za-z]+)(\d+)", stem)
    if match and not rest:
        stem, rest = match[1], [match[2]]
    base = stem if len(stem) == 1 else rf"\mathrm{{{stem}}}"
    index = "_{" + ",".join(rest) + "}" if rest else ""
    return base + index + suffix


class Latex(Notation):
    """Prints terms as formulas; what is marked is underlined."""

    def name(self, text: str) -> str:
        return name(text)

    def marked(self, piece: Piece) -> Piece:
        return rf"\underline{{{piece[0]}}}", piece[1]

    def fit(self, piece: Piece, least: int) -> str:
        text, strength = piece
        return text if strength >= least else rf"\left({text}\right)"

    def atom(self, kind: str, text: str) -> Piece:
        if kind == "Num":
            return text.replace("inf", r"\infty"), ATOM
        return (name(text), ATOM) if kind == "Local" else (_of_text(text), strength_of(text))

    def infix(self, sign: str, a: Piece, b: Piece) -> Piece:
        text, strength = super().infix(sign, a, b)
        if sign != "*":
            return text, strength
        return rf"{self.fit(a, strength)} \cdot {self.fit(b, strength + 1)}", strength

    def quotient(self, a: Piece, b: Piece) -> Piece:
        return rf"\frac{{{a[0]}}}{{{b[0]}}}", PRODUCT

    def reduction(self, op: str, axis: str, part: str, body: Piece | None) -> str:
        over = axis if part == "ALL" else rf"{axis} \in {part}"
        return rf"N({over})" if body is None else rf"{_big(op)}_{{{over}}} \left({body[0]}\right)"

    def operator(self, fn: str, a: Piece, b: Piece) -> Piece:
        sign = COMPARISONS.get(fn, rf"\mathbin{{\mathrm{{{fn}}}}}")
        return f"{self.fit(a, UNARY)} {sign} {self.fit(b, UNARY)}", STRENGTH[fn]

    def load(self, tensor: str, index: Iterable[str]) -> str:
        return rf"{name(tensor)}\left[{', '.join(index)}\right]"

    def function(self, fn: str, words: Sequence[str], args: Sequence[Piece]) -> Piece:
        texts = [*map(escaped, words), *(text for text, _ in args)]
        match fn:
            case "exp":
                return f"e^{{{texts[0]}}}", ATOM
            case "sq":
                return f"{self.fit(args[0], ATOM)}^{{2}}", PRODUCT
            case "sqrt":
                return rf"\sqrt{{{texts[0]}}}", ATOM
            case "abs":
                return rf"\left|{texts[0]}\right|", ATOM
        return rf"\operatorname{{{escaped(fn)}}}\left({', '.join(texts)}\right)", ATOM


def _big(op: str) -> str:
    """The sign of a reduction."""
    signs = {"sum": r"\sum", "prod": r"\prod", "max": r"\max", "min": r"\min"}
    return signs.get(op, rf"\operatorname*{{{escaped(op)}}}")


def _of_text(text: str) -> str:
    """A formula written in the source language."""
    try:
        return _of_ast(parsed(text.rstrip("'")))
    except SyntaxError:
        return rf"\text{{{escaped(text)}}}"


def _of_ast(node: ast.expr) -> str:
    match node:
        case ast.Name("inf"):
            return r"\infty"
        case ast.Name(text):
            return name(text)
        case ast.Constant(value):
            return repr(value)
        case ast.UnaryOp(op, a):
            return {ast.USub: "-", ast.Not: r"\lnot "}.get(type(op), "") + _of_ast(a)
        case ast.BinOp(a, op, b):
            sign = _AST_OPERATORS.get(type(op), r"\circ")
            return f"{_in_parentheses(a)} {sign} {_in_parentheses(b)}"
        case ast.BoolOp(op, values):
            return (r" \land " if isinstance(op, ast.And) else r" \lor ").join(map(_in_parentheses, values))
        case ast.Compare(a, ops, others):
            signs = (_AST_COMPARISONS.get(type(op), "?") for op in ops)
            return _of_ast(a) + "".join(f" {s} {_of_ast(b)}" for s, b in zip(signs, others, strict=True))
        case ast.Call(func=ast.Name("N"), args=[ast.Name(axis)]):
            return f"N_{{{axis}}}"
        case ast.Call(func=ast.Subscript(value=op, slice=axes), args=[body]):
            return rf"{_big(ast.unparse(op))}_{{{_of_ast(axes)}}} \left({_of_ast(body)}\right)"
        case ast.Call(func, args):
            inner = ", ".join(map(_of_ast, args))
            return rf"\operatorname{{{escaped(ast.unparse(func))}}}\left({inner}\right)"
        case ast.Subscript(ast.Name(tensor), index):
            base = tensor if len(tensor) == 1 else rf"\mathrm{{{escaped(tensor)}}}"
            return f"{base}_{{{_of_ast(index)}}}"
        case ast.Tuple(parts):
            return ",".join(map(_of_ast, parts))
    return rf"\text{{{escaped(ast.unparse(node))}}}"


def _in_parentheses(node: ast.expr) -> str:
    text = _of_ast(node)
    return rf"\left({text}\right)" if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp) else text
