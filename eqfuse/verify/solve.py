"""Numbers that take one side of a branch, found by intervals; or a proof that no numbers do.

A goal is a set of conditions that have to hold together. Every number that is read has an interval, which each condition
narrows, forwards through the functions above it and backwards through their inverses, until nothing changes; an empty one
proves that no numbers meet the goal. Else one number after the other is chosen from its interval, at random, and the rest is narrowed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import COMPARISONS, FUNCTIONS, LOGICAL
from eqfuse.terms.intervals import (
    ALL,
    HOLDS,
    MIRRORED,
    NEGATED,
    Interval,
    minus,
    orders,
    outward,
    over,
    plus,
    reduced,
    times,
)
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    call,
    transform,
    walk,
)
from eqfuse.terms.ranges import ends_of, linear
from eqfuse.verify.branches import Goal
from eqfuse.verify.reals import computed, number_of

Kind = Literal["real", "integer", "truth"]

ATTEMPTS, ROUNDS = 24, 30
"""Times that numbers are chosen anew, and that all conditions narrow them at most."""
MOST_WAYS = 64
"""Ways in which a goal with alternatives can be met, up to which it is proved that none of them is possible."""
SMALL_WHOLE = 16
"""Every other whole number that is chosen is as small, where it may be."""
STEPS = 80
"""Halvings of an interval until a monotone function has the value wanted."""
MOST_NODES = 400
"""Functions of a goal; larger ones are not solved."""
LARGEST = 2.0**53
"""Integers that are solved for are no larger."""
_FARTHEST = 1e300
_FLOATS = FloatDomain("float64")


class _Empty(Exception):
    """No number is left for some part."""


@dataclass(frozen=True)
class Variable:
    """What a number may be."""

    kind: Kind = "real"
    values: Interval = ALL

    @classmethod
    def of_dtype(cls, dtype: str | None, kind: Kind = "real") -> Variable:
        """A number of a dtype, or of a kind where that is open."""
        if kind == "truth":
            return cls(kind, (0.0, 1.0))
        if kind == "integer":
            low, high = LIMITS.get(dtype or "i64", LIMITS["i64"])
            return cls(kind, (float(low), float(high)))
        return cls()

    def within(self, low: float, high: float) -> Variable:
        """One of integers with narrower limits."""
        if self.kind != "integer":
            return self
        return Variable(self.kind, (max(self.values[0], low), min(self.values[1], high)))


def is_dead(goal: Goal, variables: Mapping[str, Variable]) -> bool:
    """Whether no numbers meet a goal, by proof. Every element that is read is a number of its own, at axes of any size."""
    if not _is_small(goal):
        return False
    known: dict[Expr, Variable] = {
        node: variables.get(node.tensor if isinstance(node, Load) else node.name, Variable())
        for node in walk(*(node for node, _ in goal))
        if isinstance(node, Load | Scalar)
    }
    for count, ways in enumerate(_alternatives(goal)):
        if count >= MOST_WAYS:
            return False
        try:
            _Narrowing(known, ways).settle()
        except _Empty:
            continue
        if not _has_cycle(ways):
            return False
    return True


def solved(
    goal: Goal,
    variables: Mapping[str, Variable],
    extents: Mapping[str, int],
    fixed: Mapping[str, float],
    rng: np.random.Generator,
) -> dict[str, float] | None:
    """Numbers that meet a goal, one for all elements of each tensor, and one for each scalar that is not `fixed`, by name; None
    where none are found. `extents` are the sizes of axes, at positions of which the goal has to be met somewhere."""
    if not _is_small(goal):
        return None
    goal = tuple((_at_sizes(node, extents, fixed), wanted) for node, wanted in goal)
    known: dict[Expr, Variable] = {}
    for node in walk(*(node for node, _ in goal)):
        if isinstance(node, Local):
            known[node] = variables.get(node.name, Variable())
        elif isinstance(node, Axis):
            known[node] = Variable("integer", (0.0, float(extents.get(node.name, 1) - 1)))
    order = np.array([*known, None], dtype=object)[:-1]
    for _ in range(ATTEMPTS):
        try:
            narrowing = _Narrowing(known, list(_one_way(goal, rng)), rng)
            narrowing.settle()
            for node in rng.permutation(order):
                narrowing.choose(node)
        except _Empty:
            continue
        if narrowing.is_met():
            values = {node.name: narrowing.values[node][0] for node in known if isinstance(node, Local)}
            return values if all(map(math.isfinite, values.values())) else None
    return None


def _is_small(goal: Goal) -> bool:
    return sum(1 for _ in walk(*(node for node, _ in goal))) <= MOST_NODES


def _at_sizes(node: Expr, extents: Mapping[str, int], fixed: Mapping[str, float]) -> Expr:
    """A condition on numbers that are the same at all positions: a sum along an axis is so many times its body."""

    def step(part: Expr) -> Expr:
        match part:
            case Load(name, _):
                return Local(name, ())
            case Scalar(name):
                return Const(fixed[name]) if name in fixed else Local(name, ())
            case Size(axis) if axis in extents:
                return Const(extents[axis])
            case Reduce("sum", axis, body) if axis in extents:
                return body if extents[axis] == 1 else call("mul", body, Const(extents[axis]))
            case Reduce("max" | "min", _, body):
                return body
            case Reduce("prod", axis, body) if extents.get(axis) == 1:
                return body
        return part

    return transform(node, step)


# -- alternatives ----------------------------------------------------------------------------------


def _alternatives(goal: Goal) -> Iterator[list[tuple[Expr, bool]]]:
    """All ways to meet a goal, each as comparisons and truth values alone."""
    for parts in product(*(list(_ways(node, wanted)) for node, wanted in goal)):
        yield [literal for part in parts for literal in part]


def _ways(node: Expr, wanted: bool) -> Iterator[list[tuple[Expr, bool]]]:
    match node:
        case Call("not", (inner,)):
            yield from _ways(inner, not wanted)
        case Call("and" | "or" as fn, args) if (fn == "and") == wanted:
            yield from _alternatives(tuple((arg, wanted) for arg in args))
        case Call("and" | "or", args):
            for arg in args:
                yield from _ways(arg, wanted)
        case _:
            yield [(node, wanted)]


def _one_way(goal: Iterable[tuple[Expr, bool]], rng: np.random.Generator) -> Iterator[tuple[Expr, bool]]:
    """One of them, at random."""
    for node, wanted in goal:
        match node:
            case Call("not", (inner,)):
                yield from _one_way([(inner, not wanted)], rng)
            case Call("and" | "or" as fn, args) if (fn == "and") == wanted:
                yield from _one_way([(arg, wanted) for arg in args], rng)
            case Call("and" | "or", args):
                yield from _one_way([(args[int(rng.integers(len(args)))], wanted)], rng)
            case _:
                yield node, wanted


# -- differences -----------------------------------------------------------------------------------


def _has_cycle(literals: Iterable[tuple[Expr, bool]]) -> bool:
    """Whether differences of two numbers that are wanted add up to nothing around a cycle: `x < y`, `y < z`, `z < x`."""
    edges: list[tuple[Expr, Expr, float, bool]] = []
    for node, wanted in literals:
        if isinstance(node, Call) and node.fn in COMPARISONS:
            fn = node.fn if wanted else NEGATED[node.fn]
            left, right = node.args
            for low, high in [(left, right)] * (fn in ("lt", "le", "eq")) + [(right, left)] * (
                fn in ("gt", "ge", "eq")
            ):
                (one, more), (other, less) = _offset(low), _offset(high)
                edges.append((one, other, less - more, fn in ("lt", "gt")))
    parts = {part for edge in edges for part in edge[:2]}
    # Least distances, and of paths of the same length those with a strict edge first (Bellman and Ford).
    reach: dict[Expr, tuple[float, int]] = dict.fromkeys(parts, (0.0, 0))
    for _ in range(len(parts) + 1):
        before = dict(reach)
        for one, other, most, strict in edges:  # one <= other + most
            reach[one] = min(reach[one], (reach[other][0] + most, reach[other][1] - strict))
        if reach == before:
            return False
    return True


def _offset(node: Expr) -> tuple[Expr, float]:
    """An expression as another one and a whole number that is added to it."""
    form = linear(node)
    match [*form.atoms.items()]:
        case []:
            return _NOTHING, form.constant
        case [(part, 1)]:
            return part, form.constant
    return node, 0


_NOTHING = Const(0)


# -- narrowing -------------------------------------------------------------------------------------


@dataclass
class _Narrowing:
    """Intervals of the numbers that are read, as far as conditions have narrowed them. With random numbers, of the ways in which a
    value can come about one is taken; without, only what all of them have in common is used."""

    known: Mapping[Expr, Variable]
    literals: list[tuple[Expr, bool]]
    rng: np.random.Generator | None = None
    values: dict[Expr, Interval] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = {node: each.values for node, each in self.known.items()}
        self._ways: dict[Expr, int] = {}
        self._has_nan = False

    def settle(self) -> None:
        """Narrows until nothing changes."""
        for _ in range(ROUNDS):
            before = dict(self.values)
            for node, wanted in list(self.literals):
                self._memo: dict[Expr, Interval] = dict(self.values)
                self._literal(node, wanted)
            if self.values == before:
                return

    def choose(self, node: Expr) -> None:
        """Takes one number from the interval of what is read, and narrows the others."""
        assert self.rng is not None
        low, high = self.values[node]
        if low < high:
            number = _picked(low, high, self.known[node].kind != "real", self.rng)
            self.values[node] = number, number
            self.settle()

    def is_met(self) -> bool:
        """Whether no condition is broken by the numbers that were chosen."""
        self._memo, self._has_nan = dict(self.values), False
        return (
            all(self._truth(node) in (wanted, None) for node, wanted in self.literals) and not self._has_nan
        )

    def _truth(self, node: Expr) -> bool | None:
        """What a condition is by the intervals that are known; None where that is open."""
        match node:
            case Const(value):
                return bool(value)
            case Call("not", (inner,)):
                found = self._truth(inner)
                return None if found is None else not found
            case Call("and" | "or" as fn, args):
                truths = [self._truth(arg) for arg in args]
                ends = fn == "or"
                return ends if ends in truths else None if None in truths else not ends
            case Call(fn, (left, right)) if fn in COMPARISONS:
                seen, holds = orders(self._forward(left), self._forward(right)), HOLDS[fn]
                return True if not seen & ~holds else False if not seen & holds else None
            case _ if node in self.values:
                low, high = self.values[node]
                return bool(low) if low == high else None
        return None

    def _literal(self, node: Expr, wanted: bool) -> None:
        match node:
            case Const(value):
                if bool(value) != wanted:
                    raise _Empty
            case Call(fn, (left, right)) if fn in COMPARISONS:
                self._compare(fn if wanted else NEGATED[fn], left, right)
            case Call(fn, _) if fn in LOGICAL:  # what another choice depends on
                for each, truth in _one_way([(node, wanted)], self.rng) if self.rng is not None else ():
                    self._literal(each, truth)
            case _ if node in self.values:
                self._narrow(node, (1.0, 1.0) if wanted else (0.0, 0.0))

    def _compare(self, fn: str, left: Expr, right: Expr) -> None:
        if fn in ("gt", "ge"):
            fn, left, right = MIRRORED[fn], right, left
        (low, high), (least, most) = self._forward(left), self._forward(right)
        match fn:
            case "eq":
                both = _both((low, high), (least, most))
                self._narrow(left, both)
                self._narrow(right, both)
            case "ne":
                if low == high == least == most or left is right:
                    raise _Empty
            case _:
                strict = fn == "lt"
                if left is right and strict:
                    raise _Empty
                self._narrow(left, (-math.inf, outward(most, -1) if strict else most))
                self._narrow(right, (outward(low, 1) if strict else low, math.inf))

    def _forward(self, root: Expr) -> Interval:
        for node in walk(root):
            if node not in self._memo:
                self._memo[node] = self._range(node)
        return self._memo[root]

    def _range(self, node: Expr) -> Interval:
        match node:
            case Const(value):
                return float(value), float(value)
            case Axis() | Size():
                return 0.0, math.inf
            case Reduce(op, _, body):
                return reduced(op, (0.0, math.inf), self._memo[body])
            case Call(fn, args) if fn in FUNCTIONS and fn not in COMPARISONS and fn not in LOGICAL:
                if fn == "where" and (truth := self._truth(args[0])) is not None:
                    return self._memo[args[1 if truth else 2]]
                if fn == "where" and (side := number_of(args[1:])) is not None:
                    return self._memo[args[1 + side]]
                parts = [self._memo[arg] for arg in args]
                if fn != "where" and all(low == high for low, high in parts):
                    with np.errstate(all="ignore"):
                        found = float(_FLOATS.call(fn, [np.asarray(float(low)) for low, _ in parts]))
                    self._has_nan = self._has_nan or math.isnan(found)
                    return ALL if math.isnan(found) else (found, found)
                low, high = ends_of(fn, args, parts, value=computed)
                return _floats(low, high)
        return ALL

    def _narrow(self, node: Expr, wanted: Interval) -> None:
        """The node has a value in this interval: narrows what it is made of."""
        had = self._forward(node)
        new = _both(had, wanted)
        if node in self.values:
            if self.known[node].kind != "real":
                new = _both((float(math.ceil(new[0])), float(math.floor(new[1]))), new)
            self.values[node] = self._memo[node] = new
            return
        if new == had:
            return
        self._memo[node] = new
        if isinstance(node, Call):
            self._backward(node, new)
        elif isinstance(node, Reduce) and node.op in ("max", "min"):
            low, high = new  # no element is beyond its extreme
            self._narrow(node.body, (-math.inf, high) if node.op == "max" else (low, math.inf))

    def _backward(self, node: Call, wanted: Interval) -> None:
        low, high = wanted
        match node:
            case Call("add", (left, right)):
                self._narrow(left, _outward(*minus(wanted, self._forward(right))))
                self._narrow(right, _outward(*minus(wanted, self._forward(left))))
            case Call("sub", (left, right)):
                self._narrow(left, _outward(*plus(wanted, self._forward(right))))
                self._narrow(right, _outward(*minus(self._forward(left), wanted)))
            case Call("neg", (inner,)):
                self._narrow(inner, (-high, -low))
            case Call("mul", (left, right)) if left is right:
                self._symmetric(node, left, *(_root(end) for end in wanted))
            case Call("sq", (inner,)):
                self._symmetric(node, inner, *(_root(end) for end in wanted))
            case Call("abs", (inner,)):
                self._symmetric(node, inner, low, high)
            case Call("mul", (left, right)):
                for one, other in ((left, right), (right, left)):
                    self._narrow(one, _over(wanted, self._forward(other)))
            case Call("div", (left, right)):
                self._narrow(left, _outward(*times(wanted, self._forward(right))))
                self._narrow(right, _over(self._forward(left), wanted))
            case Call("maximum" | "minimum", args):
                self._limit(node, args, wanted)
            case Call("relu", (inner,)):
                self._limit(node, (inner, Const(0)), wanted)
            case Call("where", (condition, left, right)):
                self._branch(node, condition, left, right, wanted)
            case Call("floordiv", (inner, Const(by))) if by > 0:
                least = math.ceil(low) * by if math.isfinite(low) else low
                most = outward((float(np.floor(high)) + 1) * by, -1) if math.isfinite(high) else high
                self._narrow(inner, (_outward(least, 0.0)[0], most))
            case Call("rshift", (inner, Const(int(by)))) if 0 <= by < 62:
                self._backward(call("floordiv", inner, Const(2**by)), wanted)
            case Call(fn, (inner,)) if (row := FUNCTIONS.get(fn)) is not None and row.order in ("+", "-"):
                self._narrow(inner, _inverse(fn, row.order == "+", wanted, self._forward(inner)))

    def _way(self, node: Expr, count: int) -> int | None:
        """Which of several ways is taken, as before; None where all of them count."""
        if self.rng is None:
            return None
        return self._ways.setdefault(node, int(self.rng.integers(count)))

    def _symmetric(self, node: Expr, inner: Expr, low: float, high: float) -> None:
        """The absolute value of a number is in an interval."""
        have = self._forward(inner)
        low = max(low, 0.0)
        way = self._way(node, 2) if have[0] < 0 < have[1] and low > 0 else None
        if have[0] >= 0 or way == 0 or have[0] > -low:
            self._narrow(inner, (low, high))
        elif have[1] <= 0 or way == 1 or have[1] < low:
            self._narrow(inner, (-high, -low))
        else:
            self._narrow(inner, (-high, high))

    def _limit(self, node: Call, args: Sequence[Expr], wanted: Interval) -> None:
        low, high = wanted
        greatest = node.fn != "minimum"
        for arg in args:
            self._narrow(arg, (-math.inf, high) if greatest else (low, math.inf))
        able = [a for a in args if (self._forward(a)[1] >= low if greatest else self._forward(a)[0] <= high)]
        if not able:
            raise _Empty
        way = 0 if len(able) == 1 else self._way(node, len(args))
        if way is not None:
            self._narrow(able[way % len(able)], (low, math.inf) if greatest else (-math.inf, high))

    def _branch(self, node: Call, condition: Expr, left: Expr, right: Expr, wanted: Interval) -> None:
        able = [truth for truth, side in ((True, left), (False, right)) if _meet(self._forward(side), wanted)]
        if not able:
            raise _Empty
        way = 0 if len(able) == 1 else self._way(node, 2)
        if way is not None:
            truth = able[way % len(able)]
            self._narrow(left if truth else right, wanted)
            self._literal(condition, truth)


def _both(one: Interval, other: Interval) -> Interval:
    found = max(one[0], other[0]), min(one[1], other[1])
    if not found[0] <= found[1]:
        raise _Empty
    return found


def _meet(one: Interval, other: Interval) -> bool:
    return max(one[0], other[0]) <= min(one[1], other[1])


def _outward(low: float, high: float) -> Interval:
    """An interval that holds one whose ends were rounded; whole numbers below 2^53 were not."""
    return low if _is_whole(low) else outward(low, -1, 2), high if _is_whole(high) else outward(high, 1, 2)


def _floats(low: float, high: float) -> Interval:
    """An interval around one whose ends may be integers; all numbers where they are the wrong way round."""
    ends = float(low), float(high)
    return ALL if not low <= high else ends if ends == (low, high) else _outward(*ends)


def _is_whole(number: float) -> bool:
    return math.isfinite(number) and abs(number) < 2**53 and number == int(number)


def _over(one: Interval, other: Interval) -> Interval:
    """Quotients of two intervals; any number where the divisor may be 0."""
    return ALL if other[0] <= 0 <= other[1] else _outward(*over(one, other))


def _root(number: float) -> float:
    return math.sqrt(number) if number > 0 else 0.0


def _inverse(fn: str, grows: bool, wanted: Interval, have: Interval) -> Interval:
    """Where a monotone function has a value in an interval: an interval around all such numbers."""

    def value(at: float) -> float:
        found = computed(fn, at)
        return found if grows else -found  # or NaN, which is no number in any interval

    low, high = wanted if grows else (-wanted[1], -wanted[0])
    return _first(lambda at: value(at) >= low, have, True), _first(lambda at: value(at) > high, have, False)


def _first(is_beyond: Callable[[float], bool], have: Interval, before: bool) -> float:
    """About the first number of an interval from which on a condition holds: one `before` it, or one after."""
    low, high = (max(min(end, _FARTHEST), -_FARTHEST) for end in have)
    if is_beyond(low):
        return have[0] if before else low
    if not is_beyond(high):
        return high if before else have[1]
    for _ in range(STEPS):
        middle = _middle(low, high)
        if not low < middle < high:
            break
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return low if before else high


def _middle(low: float, high: float) -> float:
    """A number between two, half way in magnitude where they are far apart."""
    if low < 0 < high:
        return 0.0
    small, large = sorted((abs(low), abs(high)))
    if large <= 4 * small or large < 1e-290:
        return low + (high - low) / 2
    return math.copysign(large * 1e-8 if small == 0 else math.sqrt(small) * math.sqrt(large), low + high)


def _picked(low: float, high: float, whole: bool, rng: np.random.Generator) -> float:
    """A number of an interval: at its ends, near a finite end, or of any magnitude."""
    if math.isfinite(low) and math.isfinite(high):
        wide = high - low > 1e3 * max(1.0, min(abs(low), abs(high)))
        near = 10.0 ** rng.uniform(-1, 4) if wide else (high - low) * rng.uniform(0.02, 0.98)
        found = low + near if rng.random() < 0.5 else high - near
        found = min(max(found, low), high)
    elif math.isfinite(low) or math.isfinite(high):
        end, way = (low, 1.0) if math.isfinite(low) else (high, -1.0)
        found = end + way * 10.0 ** rng.uniform(-2, 2) * (max(1.0, abs(end)) if rng.random() < 0.3 else 1.0)
    else:
        found = rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-2, 2)
    if whole:
        near = round(found) if rng.random() < 0.5 else int(rng.integers(-SMALL_WHOLE, SMALL_WHOLE + 1))
        return float(min(max(near, low), high))
    short = float(f"{found:.5g}")
    return short if low <= short <= high else float(found)
