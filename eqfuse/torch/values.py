"""A tensor of a graph, as what stands at a position.

A `Value` knows its shape, and gives an expression for a position of each dimension. Views give the expression of another
value at other positions; elementwise operators compute with expressions; a reduction, or what is read several times, is a
definition of the program, and is read by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eqfuse.terms.expressions import power_of
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Reduce, Scalar, Size, call, children
from eqfuse.torch.positions import Part, Position, Radix, is_real_size
from eqfuse.torch.positions import Size as Extent

Read = Callable[[tuple[Position, ...]], Expr]


@dataclass(frozen=True)
class Digit:
    """An axis of the program, and its extent."""

    axis: str
    size: Extent


Layout = tuple[tuple[Digit, ...] | None, ...]
"""For each dimension the axes that its positions are counted by; None where any will do (it is broadcast)."""


@dataclass
class Value:
    """`name` is that of the definition or input that the value is, where it is one; `is_choice` says that each of its
    numbers is one of named values, so that it is written out where it is read."""

    shape: tuple[Extent, ...]
    dtype: torch.dtype
    layout: Layout
    read: Read
    name: str = ""
    is_choice: bool = False
    memo: dict[tuple[Position, ...], Expr] = field(default_factory=dict)

    def at(self, positions: Sequence[Position]) -> Expr:
        """What stands at a position of each dimension."""
        key = tuple(() if n == 1 else p for n, p in zip(self.shape, positions, strict=True))
        if key not in self.memo:
            self.memo[key] = self.read(key)
        return self.memo[key]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_truth(self) -> bool:
        return self.dtype == torch.bool

    @property
    def is_real(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Line:
    """A definition of the program: names[axes] = text of `expr`, or a reduction of several values."""

    names: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    expr: Expr | None
    several: tuple[str, tuple[str, ...], tuple[Expr, ...]] | None = None


class Names:
    """Names of axes, one extent each, and of definitions."""

    LETTERS = "ijklmnpqrstuvwabcdefgh"

    def __init__(self, taken: Sequence[str]) -> None:
        self.taken = set(taken)
        self.sizes: dict[str, Extent] = {}
        self._count: dict[str, int] = {}

    def axis(self, size: Extent, avoid: Sequence[str] = ()) -> str:
        """An axis of this extent, other than those to avoid."""
        for name, known in self.sizes.items():
            if name not in avoid and known == size:
                return name
        for number in range(1000):
            for letter in self.LETTERS:
                name = f"{letter}{number}" if number else letter
                if name not in self.taken and name not in self.sizes:
                    self.sizes[name] = size
                    return name
        raise AssertionError("there are names enough")

    def definition(self, word: str) -> str:
        """A name for a definition, which ends with a number: so it is no function's."""
        while True:
            self._count[word] = self._count.get(word, 0) + 1
            name = f"{word}{self._count[word]}"
            if name not in self.taken and name not in self.sizes:
                self.taken.add(name)
                return name


class Writer:
    """The definitions of a program, as they are made."""

    def __init__(self, taken: Sequence[str]) -> None:
        self.names = Names(taken)
        self.lines: list[Line] = []
        self.radix = Radix(self.size_text)
        self.symbols: dict[Any, str] = {}
        self.ranks: dict[str, int] = {}
        self.prefixes: set[str] = set()
        self.extents: dict[Expr, Extent] = {}
        self._known: dict[Extent, Extent] = {}

    # -- sizes ------------------------------------------------------------------------------------

    def size_text(self, size: Extent) -> Expr:
        """An extent, as an expression: a number, or of the numbers of positions of axes."""
        if not isinstance(size, int | float):
            size = _plain(size)
        if isinstance(size, int | float):
            return Const(size)
        found = self._text(size)
        if not is_real_size(size):
            self.extents[found] = size
        return found

    def _text(self, size: Extent) -> Expr:
        if size in self.symbols:
            return Size(self.symbols[size])
        if is_real_size(size):
            return self._real_text(size)
        top, bottom = size.as_numer_denom()
        if bottom != 1:
            return call("floordiv", self.size_text(top), self.size_text(bottom))
        if type(size).__name__ == "Add":
            return self._sum(size)
        parts = [self.size_text(part) for part in size.args]
        match type(size).__name__, parts:
            case "Mul", [first, *rest]:
                return _folded("mul", first, rest)
            case "FloorDiv" | "CleanDiv", [left, right]:
                return call("floordiv", left, right)
            case "Mod" | "PythonMod", [left, right]:
                return call("mod", left, right)
            case "Max" | "Min" as fold, [first, *rest]:
                return _folded(FOLDED[fold], first, rest)
            case "Pow", [base, Const(int(power))] if 0 < power <= 4:
                return _folded("mul", base, [base] * (power - 1))
            case _:
                raise NotImplementedError(f"a size of the form {size}")

    def _real_text(self, size: Extent) -> Expr:
        """A real number that is made of sizes."""
        parts = [self.size_text(part) for part in size.args]
        match type(size).__name__.removeprefix("OpaqueUnaryFn_"), parts:
            case "ToFloat", [whole]:
                return whole
            case "IntTrueDiv" | "FloatTrueDiv", [left, right]:
                return call("div", left, right)
            case "FloatPow" | "Pow", [base, Const(int() | float() as exponent)]:
                return power(base, exponent)
            case "Add" | "Mul" | "Max" | "Min" as fold, [first, *rest]:
                return _folded(FOLDED[fold], first, rest)
            case "sqrt" | "exp" | "log" | "cos" | "sin" | "tanh" as fn, [of]:
                return call(fn, of)
            case _:
                raise NotImplementedError(f"a number of the form {size}")

    def _sum(self, size: Extent) -> Expr:
        """A sum, what is taken away behind what is added."""
        signs = [(term, term.could_extract_minus_sign()) for term in size.args]
        found: Expr | None = None
        for term, is_negative in sorted(signs, key=lambda pair: pair[1]):
            part = self.size_text(-term if is_negative else term)
            if found is None:
                found = call("neg", part) if is_negative else part
            else:
                found = call("sub" if is_negative else "add", found, part)
        assert found is not None
        return found

    def agree(self, one: Extent, other: Extent) -> bool:
        """Whether two extents are the same, as far as is known."""
        return bool(self.same(one) == self.same(other))

    def same(self, size: Extent) -> Extent:
        """What extents that are the same have in common: one of them."""
        return self._known.get(size, size)

    def equate(self, one: Extent, other: Extent) -> None:
        """Notes that two extents are the same where the graph is right."""
        one, other = self._known.get(one, one), self._known.get(other, other)
        if one != other:
            self._known |= {size: one for size, known in self._known.items() if known == other}
            self._known[other] = one

    def index(self, place: Position, size: Extent) -> Expr:
        """A position as an index of a dimension. An axis alone would say that it has the dimension's extent."""
        flat = self.radix.flat(place)
        if isinstance(flat, Axis) and not self.agree(self.names.sizes.get(flat.name, size), size):
            return call("add", flat, Const(0))
        return flat

    # -- positions --------------------------------------------------------------------------------

    def axes(
        self, shape: Sequence[Extent], layout: Layout, avoid: Sequence[str] = ()
    ) -> tuple[tuple[Digit, ...], ...]:
        """Distinct axes for every dimension, those of the layout where they are not taken."""
        used = list(avoid)
        found: list[tuple[Digit, ...]] = []
        for size, digits in zip(shape, layout, strict=True):
            group = []
            for digit in (Digit("", size),) if digits is None and size != 1 else digits or ():
                axis = digit.axis
                if not axis or axis in used:
                    axis = self.names.axis(digit.size, used)
                used.append(axis)
                group.append(Digit(axis, digit.size))
            found.append(tuple(group))
        return tuple(found)

    def digits_of(self, sizes: Sequence[Extent], position: Sequence[Digit]) -> tuple[tuple[Digit, ...], ...]:
        """How digits are grouped where a view counts their positions by other sizes."""
        parts = tuple(Part(Axis(digit.axis), digit.size) for digit in position)
        known = {part.index: digit for part, digit in zip(parts, position, strict=True)}
        found: list[tuple[Digit, ...]] = []
        used = [digit.axis for digit in position]
        for group in self.radix.regrouped(parts, sizes):
            digits = []
            for part in group:
                digit = known.get(part.index)
                if digit is None or digit.size != part.size:
                    digit = Digit(self.names.axis(part.size, used), part.size)
                    used.append(digit.axis)
                digits.append(digit)
            found.append(tuple(digits))
        return tuple(found)

    def rank_axis(self, count: int, avoid: Sequence[str]) -> str:
        """An axis of ranks, whose extent the program declares."""
        axis = next((a for a, n in self.ranks.items() if n == count and a not in avoid), None)
        if axis is None:
            axis = self.names.axis(("ranks", count, len(self.ranks)), avoid)
            self.ranks[axis] = count
            self.names.sizes[axis] = count
        return axis

    # -- definitions ------------------------------------------------------------------------------

    def define(self, value: Value, word: str) -> Value:
        """The value, as a definition of its own."""
        groups = self.axes(value.shape, value.layout)
        expr = value.at([position(group) for group in groups])
        return self.defined(value, groups, expr, word)

    def settled(self, value: Value, word: str) -> Value:
        """The value, as a definition where it computes a real number."""
        if value.name or value.is_choice or not value.is_real:
            return value
        groups = self.axes(value.shape, value.layout)
        expr = value.at([position(group) for group in groups])
        return value if is_view(expr) else self.defined(value, groups, expr, word)

    def defined(
        self, like: Value, groups: Sequence[Sequence[Digit]], expr: Expr, word: str, name: str = ""
    ) -> Value:
        name = name or self.names.definition(word)
        self.lines.append(Line((name,), (axes_in(groups),), expr))
        return self.named(name, like, groups)

    def named(self, name: str, like: Value, groups: Sequence[Sequence[Digit]]) -> Value:
        """What reads a definition by its name."""

        def read(positions: tuple[Position, ...]) -> Expr:
            index = [
                self.index(part, digit.size)
                for place, group in zip(positions, groups, strict=True)
                for part, digit in zip(
                    self.radix.regrouped(place, [digit.size for digit in group]), group, strict=True
                )
            ]
            return Load(name, tuple(index)) if index else Scalar(name)

        return Value(like.shape, like.dtype, tuple(map(tuple, groups)), read, name)


FOLDED = {"Add": "add", "Mul": "mul", "Max": "maximum", "Min": "minimum"}


def _plain(size: Extent) -> Extent:
    return int(size) if size.is_Integer else float(size) if size.is_Float else size


def power(x: Expr, exponent: float) -> Expr:
    """A power with a constant exponent: by squaring where that is an integer or a half, else by a logarithm."""
    if exponent == -0.5:
        return call("rsqrt", x)
    if exponent % 0.5:
        return call("exp", call("mul", call("log", x), Const(float(exponent))))
    if exponent < 0:
        return call("div", Const(1.0), power(x, -exponent))
    return Const(1.0) if exponent == 0 else power_of(x, float(exponent))


def _folded(fn: str, first: Expr, rest: Sequence[Expr]) -> Expr:
    for part in rest:
        first = call(fn, first, part)
    return first


def position(group: Sequence[Digit]) -> Position:
    """The position that axes have."""
    return tuple(Part(Axis(digit.axis), digit.size) for digit in group)


def folded(op: str, axes: Sequence[str], body: Expr) -> Expr:
    """A reduction over axes, the last one innermost."""
    for axis in reversed(axes):
        body = Reduce(op, axis, body)
    return body


def axes_in(groups: Sequence[Sequence[Digit]]) -> tuple[str, ...]:
    return tuple(digit.axis for group in groups for digit in group)


def constant(number: float | bool, dtype: torch.dtype) -> Value:
    """A number, as a tensor without axes."""
    if dtype == torch.bool:
        plain: float | int | bool = bool(number)
    else:
        plain = float(number) if dtype.is_floating_point else int(number)
    return Value((), dtype, (), lambda _: Const(plain))


def is_view(expr: Expr) -> bool:
    """Whether an expression is one element of an input or a definition, or a number."""
    return isinstance(expr, Load | Scalar | Axis) or not children(expr)


def is_number(expr: Expr, number: float) -> bool:
    return isinstance(expr, Const) and expr.value == number and not isinstance(expr.value, bool)
