"""Positions of an axis that masks leave, where they are a window of constant width: a few positions next to each other.

    abs(i - j) <= 1                    ->  j is i - 1, i or i + 1
    (2 * i <= j) & (j < 2 * i + 2)     ->  j is 2 * i or 2 * i + 1

Integers are those of positions and sizes, which no sum of a few takes out of range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.integer_terms import minus, plus, times
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Size, call, free_axes, walk
from eqfuse.terms.ranges import Affine, difference

MOST_WIDTH = 9
"""Positions up to which a window is read at each of them."""

Bound = tuple[Affine, float, float]
"""An integer without its constant, and what the position of an axis less that integer is at least and at most."""


@dataclass(frozen=True)
class Window:
    """The positions of an axis from `first` on, `width` of them; `places` say which of the conditions leave no other ones."""

    axis: str
    first: Expr
    width: int
    places: tuple[int, ...]

    def position(self, number: int) -> Expr:
        """One of them, counted from 0."""
        return plus(self.first, Const(number))

    def is_at(self, number: int) -> Expr:
        """The condition that selects one of them."""
        return call("eq", Axis(self.axis), self.position(number))

    def since(self, number: int) -> Expr:
        """The condition that leaves this one and those after it."""
        if number == self.width - 1:
            return self.is_at(number)
        first, last = self.position(number), self.position(self.width - 1)
        return call("and", call("le", first, Axis(self.axis)), call("le", Axis(self.axis), last))


def window(conditions: Sequence[Expr], axis: str) -> Window | None:
    """The window of an axis that conditions which all hold leave; None where they leave none of 2 to `MOST_WIDTH` positions."""
    found: dict[frozenset[tuple[Expr, int]], list[tuple[int, Bound]]] = {}
    for place, condition in enumerate(conditions):
        for bound in _bounds(condition, axis):
            found.setdefault(frozenset(bound[0].terms.items()), []).append((place, bound))
    for bounds in found.values():
        low, high = max(low for _, (_, low, _) in bounds), min(high for _, (_, _, high) in bounds)
        if 2 <= high - low + 1 <= MOST_WIDTH:
            first = plus(_expression(bounds[0][1][0]), Const(int(low)))
            places = tuple(dict.fromkeys(place for place, _ in bounds))
            return Window(axis, first, int(high - low) + 1, places)
    return None


def _bounds(condition: Expr, axis: str) -> Iterator[Bound]:
    """What a comparison of positions bounds an axis by: at most one integer."""
    match condition:
        case Call("lt" | "le" as fn, (left, right)) | Call("gt" | "ge" as fn, (right, left)):
            pass
        case _:
            return
    if not all(isinstance(node, Axis | Size | Const | Call) for node in walk(condition)):
        return
    form = difference(left, right)  # at most 0, or less
    most = -form.constant - (fn in ("lt", "gt"))
    low: float = -math.inf
    high: float = most
    match tuple(form.atoms.items()):
        case ((Call("abs", (inner,)), 1),):
            form = difference(inner, Const(0))
            low, high = -most - form.constant, most - form.constant
    sign = form.terms.get(Axis(axis), 0)
    rest = {atom: -sign * count for atom, count in form.atoms.items() if atom != Axis(axis)}
    if abs(sign) != 1 or any(axis in free_axes(atom) for atom in rest) or not _are_whole(rest, low, high):
        return
    yield Affine(rest), *((low, high) if sign > 0 else (-high, -low))


def _are_whole(terms: dict[Expr, int], *ends: float) -> bool:
    """Whether positions and sizes are added up, a whole number of times each."""
    return all(isinstance(n, int) or abs(n) == math.inf for n in (*terms.values(), *ends)) and all(
        isinstance(atom, Axis | Size) for atom in terms
    )


def _expression(form: Affine) -> Expr:
    """A sum of positions and sizes, those that are added first."""
    total: Expr = Const(0)
    for atom, count in sorted(form.atoms.items(), key=lambda term: (term[1] < 0, str(term[0]))):
        total = (plus if count > 0 else minus)(total, times(Const(abs(count)), atom))
    return total
