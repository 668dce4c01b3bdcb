"""Terms of a derivation as text, with some of them named and one of them marked."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eqfuse.proof.elaborate import AT, ONE
from eqfuse.proof.syntax import Position, Term
from eqfuse.terms.folds import PAIR
from eqfuse.terms.functions import FUNCTIONS, OPERATORS, VARIADIC
from eqfuse.terms.printer import ATOM, COMPARE, OR, PRODUCT, STRENGTH, SUM, UNARY
from eqfuse.terms.python import parsed

_SHORT = {fn: name for name, fn in VARIADIC.items()}
WRITTEN: Mapping[str, str] = {
    row.constructor: _SHORT.get(row.name, row.name)
    for row in FUNCTIONS.values()
    if row.constructor and not row.symbol
}
"""The name that each constructor is written with."""

BEGIN, END = "\ue000", "\ue001"
"""Around what is marked, in text that is still to be laid out (private-use characters)."""

Names = Mapping[Term, str]


Piece = tuple[str, int]
"""Text, and how strongly its outermost operator binds (terms/printer.py)."""


@dataclass(frozen=True)
class Notation:
    """Prints terms in the source language; a reduction over a part of its axis says which.

    Terms that are keys of `names` print as their name. Other notations replace how the pieces look.
    """

    names: Names = field(default_factory=dict)

    def show(self, root: Term, mark: Position | None = None) -> str:
        """The term as text, what stands at `mark` marked."""
        return self._show(root, mark)[0]

    def definition(self, root: Term) -> str:
        """The term that a name stands for: its own name is not used."""
        return type(self)({t: n for t, n in self.names.items() if t is not root}).show(root)

    def _show(self, node: Term, mark: Position | None) -> Piece:
        if node in self.names:
            shown = self.name(self.names[node]), ATOM
            return shown if mark is None else self.marked(shown)
        shown = self._whole(node, mark or None)
        return self.marked(shown) if mark == () else shown

    def _whole(self, node: Term, mark: Position | None) -> Piece:
        def arg(index: int) -> Piece:
            return self._show(node.args[index], _below(mark, index))

        def opened(head: str) -> Piece | None:
            """b, where the second argument is -b or 1/b and is not to be seen on its own."""
            second = node.args[1]
            if second.head != head or second in self.names or mark == (1,):
                return None
            return self._show(second.args[0], _below(_below(mark, 1), 0))

        match node.head, node.words:
            case (("Leaf" | "Num" | "Local"), (text,)):
                return self.atom(node.head, text)
            case "Add", _:
                taken = opened("Neg")
                return self.infix("-", arg(0), taken) if taken else self.infix("+", arg(0), arg(1))
            case "Mul", _:
                divisor = opened("Inv")
                return self.quotient(arg(0), divisor) if divisor else self.infix("*", arg(0), arg(1))
            case "Delta", _:
                return self.infix("-", arg(0), arg(1))
            case "Ratio", _:
                return self.quotient(arg(0), arg(1))
            case "Inv", _:
                return self.quotient(("1", ATOM), arg(0))
            case "Neg", _:
                return f"-{self.fit(arg(0), UNARY)}", UNARY
            case "Red", (op, axis, part):
                is_count = op == "sum" and node.args[0] is ONE
                return self.reduction(op, axis, part, None if is_count else arg(0)), ATOM
            case "Apply2", (fn,) if fn in STRENGTH:
                return self.operator(fn, arg(0), arg(1))
            case "Apply1", (fn,) if fn.endswith(AT):
                return self.load(fn.removesuffix(AT), self._index(node.args[0])), ATOM
        args = [arg(index) for index in range(len(node.args))]
        if node.head in ("Cast", "Apply1", "Apply2"):
            return self.function(node.words[0], (), args)
        return self.function(WRITTEN[node.head], node.words, args)

    def _index(self, packed: Term) -> Iterator[str]:
        while packed.head == "Apply2" and packed.words == (PAIR,):
            first, packed = packed.args
            yield self._show(first, None)[0]
        yield self._show(packed, None)[0]

    # -- how pieces look ---------------------------------------------------------------------------

    def name(self, text: str) -> str:
        return text

    def marked(self, piece: Piece) -> Piece:
        return f"{BEGIN}{piece[0]}{END}", piece[1]

    def fit(self, piece: Piece, least: int) -> str:
        """The text, in parentheses where it binds too weakly."""
        text, strength = piece
        return text if strength >= least else f"({text})"

    def atom(self, kind: str, text: str) -> Piece:
        """A leaf, a number or a state; indices stand close, so that lines break between terms."""
        return text.replace(", ", ","), strength_of(text)

    def infix(self, sign: str, a: Piece, b: Piece) -> Piece:
        strength = PRODUCT if sign == "*" else SUM
        return f"{self.fit(a, strength)} {sign} {self.fit(b, strength + 1)}", strength

    def quotient(self, a: Piece, b: Piece) -> Piece:
        return f"{self.fit(a, PRODUCT)} / {self.fit(b, PRODUCT + 1)}", PRODUCT

    def reduction(self, op: str, axis: str, part: str, body: Piece | None) -> str:
        """A reduction; without a body the number of positions."""
        over = axis if part == "ALL" else f"{axis} in {part}"
        return f"N({over})" if body is None else f"{op}[{over}]({body[0]})"

    def operator(self, fn: str, a: Piece, b: Piece) -> Piece:
        strength = STRENGTH[fn]
        least = strength + 1 if strength == COMPARE else strength
        return f"{self.fit(a, least)} {OPERATORS[fn]} {self.fit(b, strength + 1)}", strength

    def load(self, tensor: str, index: Iterable[str]) -> str:
        return f"{tensor}[{','.join(index)}]"

    def function(self, fn: str, words: Sequence[str], args: Sequence[Piece]) -> Piece:
        return f"{fn}({', '.join([*words, *(text for text, _ in args)])})", ATOM


def _below(mark: Position | None, index: int) -> Position | None:
    return mark[1:] if mark and mark[0] == index else None


def strength_of(text: str) -> int:
    """How strongly the outermost operator of a leaf's text binds."""
    try:
        node = parsed(text.rstrip("'"))
    except SyntaxError:
        return ATOM
    match node:
        case ast.BoolOp():
            return OR
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return COMPARE
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return SUM
        case ast.BinOp():
            return PRODUCT
        case ast.UnaryOp():
            return UNARY
    return ATOM
