"""Pairs of programs: a random one, and what an edit makes of it, of which it is known whether it changes anything.

An edit is made at one subexpression of an output. Edits that differ do so at one size, on one branch, at one magnitude, at one
position or by one constant; the others are identities of real numbers. `Pair.differ` decides in float64, at points built
for the edit: sizes that reach it, values on both sides of its threshold, large and small ones. An edit that makes no difference
there (`x - mean(x)` of a number more, the second of two equal limits), or of which that leaves it open, is made elsewhere, or
another one is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from itertools import product
from typing import Any

import numpy as np

from bench.judge import Disturbed
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.bounds import check_bounds
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS, COMPARISONS
from eqfuse.terms.interpreter import evaluate, evaluate_together
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    post_order,
    replaced,
    substitute_axes,
    walk,
)
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.types import kinds, program_dtypes
from eqfuse.verify.inputs import input_specs, small_integers

POINTS, SAME_POINTS, MORE_POINTS = 12, 20, 48
"""Points with values of any kind; where a pair is evaluated that should be equal, and one that should not, as long as none
shows it."""
TRIES = 8
"""Edits of one sort that are made until float64 tells that one does what it should."""
SCALES = (1.0, 1.0, 30.0, 1000.0)
"""Magnitudes of the values of a point, in turn."""
CLOSE, APART = 1e-7, 1e-4
"""Relative differences: below the first, rounding; above the second, none that rounding makes."""
ROUNDINGS = 1000.0
"""A difference is one of the programs where it is so many times what disturbed operations make."""
SATURATING = frozenset({"tanh", "erf", "sigmoid", "silu", "gelu"})
"""Functions that give 1 or 0 in float64 where no real number does."""
DISTURBED = 3
"""Runs with disturbed operations."""
MOST_ELEMENTS = 200_000
NEW_AXIS = "r9"

parsed = lru_cache(maxsize=64)(parse)

Node = tuple[Expr, tuple[str, ...]]
"""A subexpression, and the axes that it may be written with."""


@dataclass(frozen=True)
class Edit:
    """What stands for a subexpression; `least` are sizes that show it, `near` the number that values come close to;
    `renames` is the axis that has another name in it."""

    expr: Expr
    least: Mapping[str, int]
    near: float = 0.0
    renames: str = ""


Make = Callable[[Expr, tuple[str, ...], random.Random], Edit | None]


@dataclass(frozen=True)
class Pair:
    """Two programs as text; `kind` says what was done to the first, `equal` whether it should be the same function."""

    kind: str
    equal: bool
    left: str
    right: str
    least: Mapping[str, int]
    near: float
    renames: str = ""

    @property
    def programs(self) -> tuple[Program, Program]:
        return parsed(self.left), parsed(self.right)

    def differ(self, seed: int) -> bool | None:
        """Whether the programs have different values at some point; None where rounding or the range of float64
        leaves that open."""
        first, second = self.programs
        kinds: tuple[type[_Ranged], ...] = (_Ranged, _Uncast) if _has_casts(first, second) else (_Ranged,)
        open_, seen = False, False
        for number in range(SAME_POINTS if self.equal else MORE_POINTS):
            scale, domains = SCALES[number % len(SCALES)], [kind() for kind in kinds]
            found = [
                _difference(first, second, self, np.random.default_rng([seed, number]), scale, number, domain)
                for domain in domains
            ]
            known = [each for each in found if each is not None]
            if not known or any(domain.was_beyond for domain in domains):
                continue
            seen = True
            # What casts alone tell apart is rounding.
            if len(known) == len(found) and min(known) > APART:
                if not self._by_rounding(first, second, seed, scale, number, min(known)):
                    return True
                open_ = True
            open_ |= max(known) > CLOSE
        return None if open_ or not seen else False

    def _by_rounding(
        self, first: Program, second: Program, seed: int, scale: float, number: int, difference: float
    ) -> bool:
        """Whether a program, with casts as identities, has values that differ as much from those that it has where every
        operation is a unit of rounding off: roots of what is 0 but for rounding, as a variance of equal values."""
        for program, run in product((first, second), range(DISTURBED)):
            rng = partial(np.random.default_rng, [seed, number])
            usual, disturbed = _Uncast(), _UncastDisturbed("f64", DISTURBED * number + run)
            off = _difference(program, program, self, rng(), scale, number, usual, disturbed)
            if off is not None and ROUNDINGS * off >= difference:
                return True
        return False


def _has_casts(*programs: Program) -> bool:
    outputs = (output.expr for program in programs for output in program.outputs)
    return any(isinstance(node, Call) and node.fn in CASTS for node in walk(*outputs))


class _Ranged(FloatDomain):
    """float64 that notes whether a number became 0 or infinite that is none: an exponential of too large a one, a product
    that is too small, or that a function saturates at; and whether something was divided by 0, which has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.was_beyond = self.has_poles = False

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        found = np.asarray(self._called(fn, args))
        self.has_poles |= fn == "div" and bool((np.asarray(args[1]) == 0).any())
        if self.was_beyond:
            return found
        if fn in SATURATING:
            (arg,) = map(np.asarray, args)
            self.was_beyond |= bool(
                ((np.abs(found) == 1) | (found == 0) & (arg != 0) & np.isfinite(arg)).any()
            )
        if fn in ("exp", "mul", "div", "sq", "add", "sub") and not (np.isfinite(found) & (found != 0)).all():
            finite = reduce(np.logical_and, [np.isfinite(arg) for arg in args])
            gone = found == 0
            if fn in ("add", "sub"):
                gone = np.False_
            elif fn != "exp":
                gone = gone & (np.asarray(args[0]) != 0)
                gone = gone & (np.asarray(args[1]) != 0) if fn == "mul" else gone
            infinite = np.isinf(found) & (np.asarray(args[1]) != 0) if fn == "div" else np.isinf(found)
            self.was_beyond |= bool((finite & (gone | infinite)).any())
        return found

    def _called(self, fn: str, args: Sequence[Any]) -> Any:
        return super().call(fn, args)


class _Uncast(_Ranged):
    """The same in which a cast is the identity, as it is to the algebra."""

    def _called(self, fn: str, args: Sequence[Any]) -> Any:
        return args[0] if fn in CASTS else super()._called(fn, args)


class _UncastDisturbed(Disturbed):
    """Operations that are a unit of rounding off, casts identities."""

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        return np.asarray(args[0]) if fn in CASTS else super().call(fn, args)


def _difference(
    first: Program,
    second: Program,
    pair: Pair,
    rng: np.random.Generator,
    scale: float,
    number: int,
    domain: FloatDomain,
    other: FloatDomain | None = None,
) -> float | None:
    """The largest relative difference at one point; None where nothing but NaN is there to compare. The second program
    is run in the `other` domain, where there is one."""
    names = dict.fromkeys((*axes_of(first.outputs), *axes_of(second.outputs)))
    sizes = {axis: int(rng.integers(1 if number >= POINTS else 2, 8)) for axis in names}
    if number % 3:
        domains = {**second.domains, **first.domains}
        sizes |= {domains.get(axis, axis): least for axis, least in pair.least.items()}
    for program in (first, second):
        sizes |= {axis: sizes.get(of, 3) for axis, of in program.domains.items()}
        sizes |= program.lengths
    if pair.renames:
        sizes[NEW_AXIS] = sizes[pair.renames]
    scalars = dict(small_integers(first, second))
    specs = input_specs(first, sizes, scalars)
    if sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in specs.values()) > MOST_ELEMENTS:
        return None
    shapes = {name: spec.shape for name, spec in specs.items()}
    try:
        for program in (first, second):
            check_bounds(program, shapes, sizes, scalars)
    except BindError:  # an edit reads what is not there at these sizes
        return None
    tensors = {}
    for name, spec in specs.items():
        if spec.kind == "real":
            tensors[name] = _reals(spec.shape, pair.near, scale, number, rng)
        elif spec.kind == "truth":
            tensors[name] = rng.random(spec.shape) < 0.5
        else:
            low, high = spec.values
            tensors[name] = rng.integers(low, high + 1, spec.shape)
    reals = {name: scale * rng.uniform(0.2, 1) for name in (*first.scalars, *second.scalars)}
    numbers = {**reals, **scalars}
    if other is None and first.integers == second.integers:
        left, right = evaluate_together([first, second], tensors, numbers, sizes, domain)
    else:
        left = evaluate(first, tensors, numbers, sizes, domain)
        right = evaluate(second, tensors, numbers, sizes, other or domain)
    worst: float | None = None
    for name, expected in left.items():
        a, b = np.asarray(expected, np.float64), np.asarray(right[name], np.float64)
        known = np.isfinite(a) & np.isfinite(b)
        # `where(c > 0, x, 0)` is 0 where c has no value; an infinity that is no overflow is a value.
        infinite = np.isinf(a) & np.isinf(b) & (a != b)
        # Where something is divided by 0, one of them may have no value: that tells no two programs apart.
        decides = pair.equal or not (isinstance(domain, _Ranged) and domain.has_poles)
        if decides and ((np.isfinite(a) != np.isfinite(b)).any() or infinite.any()):
            return float("inf")
        if np.isinf(a).any():
            worst = max(worst or 0.0, 0.0)
        if known.any():
            size = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-3)[known]
            worst = max(worst or 0.0, float((np.abs(a[known] - b[known]) / size).max()))
    return worst


def _reals(shape: tuple[int, ...], near: float, scale: float, number: int, rng: np.random.Generator) -> Any:
    """Values of that size, three of ten near a number; at later points in turn more of them, all of one sign, or small
    whole numbers."""
    drawn = scale * rng.uniform(-1, 1, shape)
    close, share = near + rng.choice([0.0, 0.5, -0.5], shape), 0.3
    if number >= POINTS:
        match number % 5:
            case 0:
                share = 0.9
            case 1:
                drawn, close = np.abs(drawn), np.abs(close)
            case 2:
                drawn, close = -np.abs(drawn), near - rng.choice([0.0, 0.5], shape)
            case 3:
                drawn = rng.integers(-3, 4, shape).astype(np.float64)
    return np.where(rng.random(shape) < share, close, drawn)


# -- where -----------------------------------------------------------------------------------------


def _places(program: Program) -> Iterator[Node]:
    """Real subexpressions that are no part of an index, a condition or a registered reduction, with the axes around."""
    found = kinds([output.expr for output in program.outputs], program_dtypes(program))

    def below(node: Expr) -> Sequence[Expr]:
        match node:
            case Load():
                return ()
            case Reduce(op, _, _) if "." in op or found[node] != "real":
                return ()
            case Call(fn, _) if fn in COMPARISONS or "." in fn:
                return ()
        return children(node)

    for output in program.outputs:
        scope = frozenset(output.axes) | {n.axis for n in walk(output.expr) if isinstance(n, Reduce)}
        for node in post_order([output.expr], below):
            if found[node] == "real" and not isinstance(node, Const):
                yield node, tuple(sorted(free_axes(node) & scope))


# -- edits that change the function -------------------------------------------------------------------


def _one_size(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    if not axes:
        return None
    axis, size = rng.choice(axes), rng.choice((1, 2, 9, 17, 40, 100))
    fn = rng.choice(("eq", "gt"))
    hit = call("where", call(fn, Size(axis), Const(size)), call("add", node, Const(1)), node)
    return Edit(hit, {axis: size + (fn == "gt")})


def _size_for_number(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    sizes = [n for n in walk(node) if isinstance(n, Size)]
    if not sizes:
        return None
    return Edit(replaced(node, {rng.choice(sizes): Const(rng.choice((3, 5, 7, 11, 16)))}), {})


def _one_branch(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    number = rng.choice((0.25, 1.5, 2, 3, 10, 50))
    condition = call(rng.choice(("gt", "eq", "ge")), node, Const(number))
    return Edit(call("where", condition, call("mul", node, Const(2)), node), {}, number)


def _equality(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    """What a threshold does at equality."""
    found = [
        (n, n.args[1].value)
        for n in walk(node)
        if isinstance(n, Call) and n.fn in ("lt", "le", "gt", "ge") and isinstance(n.args[1], Const)
    ]
    if not found:
        return None
    old, value = rng.choice(found)
    other = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}[old.fn]
    return Edit(replaced(node, {old: call(other, *old.args)}), {}, float(value))


def _one_magnitude(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    number = rng.choice((5, 100, 500))
    if rng.random() < 0.5:
        return Edit(call("minimum", node, Const(number)), {}, number)
    return Edit(call("maximum", node, Const(-number)), {}, -number)


def _one_position(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    if not axes:
        return None
    axis, at = rng.choice(axes), rng.choice((0, 1, 5, 37, 100, -1))
    place: Expr = Const(at) if at >= 0 else call("sub", Size(axis), Const(1))
    hit = call("where", call("eq", Axis(axis), place), call("add", node, Const(1)), node)
    return Edit(hit, {axis: at + 2})


def _one_constant(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    numbers = [n for n in walk(node) if isinstance(n, Const) and not isinstance(n.value, bool)]
    numbers = [n for n in numbers if np.isfinite(n.value)]
    if not numbers or rng.random() < 0.3:
        return Edit(call("mul", node, Const(rng.choice((1.01, 0.999, 2)))), {})
    old = rng.choice(numbers)
    new = Const(old.value + 1) if isinstance(old.value, int) else Const(old.value * 1.01 + 0.01)
    return Edit(replaced(node, {old: new}), {})


# -- edits that do not -----------------------------------------------------------------------------


def _commuted(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Call("add" | "mul" | "maximum" | "minimum" as fn, (a, b)) if a is not b:
            return Edit(call(fn, b, a), {})
    return None


def _associated(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Call("add" | "mul" as fn, (Call(inner, (a, b)), c)) if fn == inner:
            return Edit(call(fn, a, call(fn, b, c)), {})
        case Call("sub", (a, b)):
            return Edit(call("add", a, call("neg", b)), {})
        case Call("div", (a, b)) if not isinstance(b, Const):
            return Edit(call("mul", a, call("div", Const(1), b)), {})
    return None


def _distributed(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Call("mul", (Call("add" | "sub" as fn, (a, b)), c)) | Call(
            "mul", (c, Call("add" | "sub" as fn, (a, b)))
        ):
            return Edit(call(fn, call("mul", a, c), call("mul", b, c)), {})
    return None


def _split_sum(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Reduce("sum", axis, Call("add" | "sub" as fn, (a, b))):
            return Edit(call(fn, Reduce("sum", axis, a), Reduce("sum", axis, b)), {})
        case Reduce("sum", axis, body):
            first = call("lt", Axis(axis), Const(rng.choice((1, 2, 4))))
            kept = call("where", first, body, Const(0)), call("where", first, Const(0), body)
            return Edit(call("add", Reduce("sum", axis, kept[0]), Reduce("sum", axis, kept[1])), {})
        case Reduce("max" | "min" as op, axis, body):
            first = call("lt", Axis(axis), Const(2))
            nothing = Const(-np.inf if op == "max" else np.inf)
            kept = call("where", first, body, nothing), call("where", first, nothing, body)
            both = Reduce(op, axis, kept[0]), Reduce(op, axis, kept[1])
            return Edit(call("maximum" if op == "max" else "minimum", *both), {})
    return None


def _renamed_axis(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Reduce(op, axis, body) if (
            "." not in op
            and not any(isinstance(n, Size | Reduce) and n.axis == axis for n in walk(body))
            and any(isinstance(n, Load) and Axis(axis) in n.index for n in walk(body))
        ):
            return Edit(Reduce(op, NEW_AXIS, substitute_axes(body, {axis: Axis(NEW_AXIS)})), {}, renames=axis)
    return None


def _shifted(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Call("exp", (a,)):
            number = Const(rng.choice((1, 2, 0.5)))
            return Edit(call("mul", call("exp", call("sub", a, number)), call("exp", number)), {})
        case Reduce("max" | "min" as op, axis, body):
            number = Const(rng.choice((1, 3, 0.5)))
            return Edit(call("sub", Reduce(op, axis, call("add", body, number)), number), {})
    return None


def _equal_threshold(node: Expr, axes: tuple[str, ...], rng: random.Random) -> Edit | None:
    match node:
        case Call("where", (Call("lt" | "le" | "gt" | "ge" as fn, (a, b)), x, y)):
            other = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[fn]
            return Edit(call("where", call(other, b, a), x, y), {})
        case Call("where", (condition, x, y)):
            return Edit(call("where", call("not", condition), y, x), {})
        case Call("relu", (a,)):
            return Edit(call("where", call("gt", a, Const(0)), a, Const(0)), {})
        case Call("abs", (a,)):
            return Edit(call("maximum", a, call("neg", a)), {})
    return None


DIFFERENT: Mapping[str, Make] = {
    "one size": _one_size,
    "a number for a size": _size_for_number,
    "one branch": _one_branch,
    "a threshold at equality": _equality,
    "one magnitude": _one_magnitude,
    "one position": _one_position,
    "one constant": _one_constant,
}
SAME: Mapping[str, Make] = {
    "commuted": _commuted,
    "associated": _associated,
    "distributed": _distributed,
    "split sums": _split_sum,
    "renamed axis": _renamed_axis,
    "shifted": _shifted,
    "equal threshold": _equal_threshold,
}


def pairs_of(source: str, seed: int) -> Iterator[Iterator[Pair]]:
    """Pairs of each sort from a random program, those that differ and those that do not: the first that does what it should
    is the one to judge."""
    rng = random.Random(seed)
    whole = parse(source)
    one = replace(whole, outputs=(rng.choice(whole.outputs),))
    left = _declared(one)
    try:
        program = parsed(left)
    except EqfuseError:  # an axis that only another output has, and whose size this one reads
        return
    places = list(_places(program))

    def made(equal: bool, edits: Mapping[str, Make]) -> Iterator[Pair]:
        seen: set[str] = set()
        for _ in range(TRIES):
            for kind in rng.sample(sorted(edits), len(edits)):
                found = _edited(program, places, edits[kind], rng)
                if found is not None and found[0] not in seen:
                    right, edit = found
                    seen.add(right)
                    yield Pair(kind, equal, left, right, edit.least, edit.near, edit.renames)
                    break

    yield made(False, DIFFERENT)
    yield made(True, SAME)


def _declared(program: Program) -> str:
    """The text of a program, of the tensors that it still reads."""
    nodes = list(walk(*(output.expr for output in program.outputs)))
    read = {n.tensor for n in nodes if isinstance(n, Load)}
    scalars = {n.name for n in nodes if isinstance(n, Scalar)}
    axes = set(axes_of(program.outputs))
    return show_program(
        replace(
            program,
            tensors=tuple(tensor for tensor in program.tensors if tensor.name in read),
            scalars=tuple(name for name in program.scalars if name in scalars),
            integers=tuple(name for name in program.integers if name in scalars),
            lengths={axis: size for axis, size in program.lengths.items() if axis in axes},
            domains={axis: of for axis, of in program.domains.items() if axis in axes},
        )
    )


def _is_dimension(program: Program, node: Expr, axis: str) -> bool:
    """Whether a tensor tells the size of an axis below a node: an index `k + 1` of `o: i32[n]` leaves it open."""
    declared = {tensor.name: tensor.axes for tensor in program.tensors}
    names = (None, axis, program.domains.get(axis, axis))
    return any(
        Axis(axis) == part and dim in names
        for load in walk(node)
        if isinstance(load, Load)
        for part, dim in zip(load.index, declared[load.tensor], strict=True)
    )


def _edited(
    program: Program, places: Sequence[Node], make: Make, rng: random.Random
) -> tuple[str, Edit] | None:
    """The text of the program with one edit of a kind; None where it has no place for one."""
    for node, axes in rng.sample(places, len(places)):
        edit = make(node, axes, rng)
        if edit is None or edit.expr is node:
            continue
        (output,) = program.outputs
        made = replace(program, outputs=(replace(output, expr=replaced(output.expr, {node: edit.expr})),))
        if edit.renames:
            whole = program.domains.get(edit.renames, edit.renames)
            if not _is_dimension(program, node, edit.renames):
                continue
            if whole in axes_of(made.outputs):
                made = replace(made, domains={**made.domains, NEW_AXIS: whole})
        try:
            text = _declared(made)
            parsed(text)
        except EqfuseError:
            continue
        return text, edit
    return None
