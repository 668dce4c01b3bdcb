"""From a read to what is read: the cotangent of `x[f(i, j)]` as a cotangent of `x[p]`.

`x[p]` gets the sum over all i and j at which `f(i, j) == p`. Where the index can be solved, an axis is replaced
instead of being searched:

    x[j, i]         nothing is left to sum                       i := p1, j := p0
    x[i + k]        i := p - k, where that is a position of i     sum over k
    x[2 * i + k]    i := (p - k) // 2, where that divides         sum over k
    x[4 * i + k]    i := p // 4, k := p % 4, where k has 4 positions: nothing is left to sum
    x[j//4, j%4]    j := 4 * p0 + p1, where p1 < 4
    x[h//4]         h := 4 * p + u, with an axis u of 4           sum over u
    x[ids[t]]       sum over t of what is at ids[t] == p
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eqfuse.differentiate.polynomial import Polynomial, collected, substituted
from eqfuse.differentiate.steps import Steps
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Size, call, free_axes, substitute_axes
from eqfuse.terms.ranges import Affine, linear


@dataclass
class Pulled:
    """`value` over the axes of what is read and `over`, which are to be summed; `added` are those that are no loops."""

    value: Polynomial
    over: tuple[str, ...]
    added: tuple[str, ...]


def pulled(
    steps: Steps,
    value: Polynomial,
    index: Sequence[Expr],
    loops: Sequence[str],
    target: Sequence[str],
    reduced: Sequence[str],
) -> Pulled:
    """The cotangent `value` of a read at `index`, which stands inside of `loops`, as one of what is read, along
    `target`. Of the loops `reduced` are those that the reading step sums."""
    found = _Solution(steps, loops, target, frozenset(reduced))
    for dimension, part in enumerate(index):
        found.plain(dimension, part)
    found.quotients(index)
    for dimension, part in enumerate(index):
        found.digits(dimension, part)
    for dimension, part in enumerate(index):
        found.affine(dimension, part)
    for dimension, part in enumerate(index):
        found.search(dimension, part)
    left = [axis for axis in loops if axis not in found.solved]
    renamed = {axis: _apart(steps, axis, target) for axis in left}
    apart: dict[str, Expr] = {axis: Axis(name) for axis, name in renamed.items() if name != axis}
    at = apart | {axis: substitute_axes(to, apart) for axis, to in found.solved.items()}
    names: dict[str, Expr] = {_place(k): Axis(name) for k, name in enumerate(target)}
    masks = [substitute_axes(substitute_axes(mask, at), names) for mask in found.masks]
    moved = substituted(substituted(value, at), names)
    over = tuple(found.added) + tuple(renamed[axis] for axis in left)
    return Pulled(collected(term.masked(*masks) for term in moved), over, tuple(found.added))


def _place(dimension: int) -> str:
    """What stands for a position of what is read, until the loops' axes are gone: names of both may be the same."""
    return f"%{dimension}"


def _apart(steps: Steps, axis: str, target: Sequence[str]) -> str:
    """An axis of the same extent that is not one of `target`."""
    return axis if axis not in target else steps.another(axis)


@dataclass
class _Solution:
    """What is known of the loops' axes in terms of positions of what is read."""

    steps: Steps
    loops: Sequence[str]
    target: Sequence[str]
    reduced: frozenset[str]
    solved: dict[str, Expr] = field(default_factory=dict)
    masks: list[Expr] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def plain(self, dimension: int, part: Expr) -> None:
        """`x[i]`"""
        if isinstance(part, Axis) and part.name in self.loops and part.name not in self.solved:
            position = Axis(_place(dimension))
            self.solved[part.name] = self._apart(part.name, dimension, position)
            if not self.steps.same_extent(part.name, self.target[dimension]):
                self.masks.append(call("lt", position, Size(part.name)))
            self.done.add(dimension)

    def quotients(self, index: Sequence[Expr]) -> None:
        """`x[j//4, j%4]` and `x[j//4]`"""
        for dimension, part in enumerate(index):
            match part:
                case Call("floordiv", (Axis(axis), divisor)) if self._is_open(axis, dimension):
                    pass
                case _:
                    continue
            position = Axis(_place(dimension))
            rest = Call("mod", (Axis(axis), divisor))
            others = [k for k, other in enumerate(index) if other is rest and k not in self.done]
            if others and _is_number(divisor):
                within: Expr = Axis(_place(others[0]))
                self.masks.append(call("lt", within, divisor))
                self.done.add(others[0])
            elif isinstance(divisor, Const) and type(divisor.value) is int and divisor.value > 0:
                name = self.steps.remainder(axis, divisor.value, self.loops)
                self.added.append(name)
                within = Axis(name)
            else:
                continue
            self.solved[axis] = call("add", call("mul", position, divisor), within)
            self.masks.append(call("lt", self.solved[axis], self._extent(axis)))
            self.done.add(dimension)

    def affine(self, dimension: int, part: Expr) -> None:
        """`x[2 * i + k]`"""
        form = linear(part)
        if dimension in self.done:
            return
        candidates = [
            axis
            for axis in self.loops
            if form.terms.get(Axis(axis))
            and axis not in self.solved
            and not any(axis in free_axes(other) for other in form.terms if other is not Axis(axis))
        ]
        if not candidates:
            return
        axis = min(
            candidates, key=lambda a: (a in self.reduced, abs(form.terms[Axis(a)]), self.loops.index(a))
        )
        factor = form.terms[Axis(axis)]
        ahead = self._ahead(dimension, form, {axis}, 1 if factor > 0 else -1)
        step = Const(abs(factor))
        value = ahead if step.value == 1 else call("floordiv", ahead, step)
        self.solved[axis] = self._apart(axis, dimension, value)
        if step.value != 1:
            self.masks.append(call("eq", call("mod", ahead, step), Const(0)))
        self._limit(ahead, axis, abs(factor))
        self.done.add(dimension)

    def digits(self, dimension: int, part: Expr) -> None:
        """`x[4 * i + k]` where k has 4 positions: both are digits of the position."""
        form = linear(part)
        if dimension in self.done:
            return
        factors = {
            term.name: count
            for term, count in form.atoms.items()
            if isinstance(term, Axis) and term.name in self.loops and term.name not in self.solved
        }
        others = [term for term in form.terms if not (isinstance(term, Axis) and term.name in factors)]
        if len(factors) < 2 or any(factors.keys() & free_axes(other) for other in others):
            return
        axes = sorted(factors, key=lambda axis: -factors[axis])
        counts = {axis: self._length(axis) or 0 for axis in axes}
        if factors[axes[-1]] < 1 or any(factors[a] != factors[b] * counts[b] for a, b in pairwise(axes)):
            return
        ahead = self._ahead(dimension, form, factors.keys(), 1)
        least = Const(factors[axes[-1]])
        if least.value != 1:
            self.masks.append(call("eq", call("mod", ahead, least), Const(0)))
        for number, axis in enumerate(axes):
            value = ahead if factors[axis] == 1 else call("floordiv", ahead, Const(factors[axis]))
            self.solved[axis] = call("mod", value, Const(counts[axis])) if number else value
        self._limit(ahead, axes[0], factors[axes[0]])
        self.done.add(dimension)

    def _limit(self, ahead: Expr, axis: str, factor: int) -> None:
        """Where `ahead`, of which the solution of an axis is the quotient by `factor`, gives a position of it."""
        form, count = linear(ahead), self._length(axis)
        behind = -form.constant
        position, plain = ahead, False
        if list(form.atoms.values()) == [1]:
            (position,) = form.atoms
            plain = True
        if not plain:
            self.masks.append(call("ge", self.solved[axis], Const(0)))
        elif behind > 0:
            self.masks.append(call("ge", position, Const(behind)))
        if plain and count is not None:
            self.masks.append(call("lt", position, Const(behind + factor * count)))
        else:
            self.masks.append(call("lt", self.solved[axis], self._extent(axis)))

    def _ahead(self, dimension: int, form: Affine, axes: Collection[str], sign: int) -> Expr:
        """The position less all of an affine form but its terms in some axes; `sign` times that."""
        others = {
            self._at(other): count
            for other, count in form.terms.items()
            if not (isinstance(other, Axis) and other.name in axes)
        }
        position = Affine({Axis(_place(dimension)): 1})
        return _sum(position.plus(Affine(others), -1).scaled(sign))

    def search(self, dimension: int, part: Expr) -> None:
        """`x[ids[t]]`"""
        if dimension not in self.done:
            self.masks.append(call("eq", part, Axis(_place(dimension))))
            self.done.add(dimension)

    def _extent(self, axis: str) -> Expr:
        """How many positions an axis has: the number that the text gives it, where it gives one."""
        count = self._length(axis)
        return Size(axis) if count is None else Const(count)

    def _length(self, axis: str) -> int | None:
        return self.steps.lengths.get(self.steps.domains.get(axis, axis))

    def _at(self, expr: Expr) -> Expr:
        return substitute_axes(expr, {a: to for a, to in self.solved.items() if to is not Axis(a)})

    def _apart(self, axis: str, dimension: int, value: Expr) -> Expr:
        """A solution that is no plain index where the axis and the dimension differ in their extents: such an index
        says that they do not."""
        is_plain = value is Axis(_place(dimension))
        if is_plain and not self.steps.same_extent(axis, self.target[dimension]):
            return call("add", value, Const(0))
        return value

    def _is_open(self, axis: str, dimension: int) -> bool:
        return dimension not in self.done and axis in self.loops and axis not in self.solved


def _is_number(expr: Expr) -> bool:
    return not free_axes(expr)


def _sum(form: Affine) -> Expr:
    """The affine form as an expression."""
    total: Expr | None = None
    for term, count in sorted(form.atoms.items(), key=lambda item: item[1] < 0):
        size = abs(count)
        part = term if size == 1 else call("mul", Const(size), term)
        if total is None:
            total = part if count > 0 else call("neg", part)
        else:
            total = call("add" if count > 0 else "sub", total, part)
    if total is None:
        return Const(form.constant)
    if not form.constant:
        return total
    return call("add" if form.constant > 0 else "sub", total, Const(abs(form.constant)))
