"""Where guarded states lose what the program computes: infinities, NaN and digits.

Guards are exact for numbers (rules/guards.py). A tag that is infinite in the end is outside of that theorem, and its recovery
needs the factor or term outside of the sum. These analyses find where a merge would differ from the program, and so
is refused or says so in its certificate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from eqfuse.rules.split import Split, at_first, reads_state, unguarded
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    children,
    free_axes,
    post_order,
    transform,
    walk,
)


def _sides(expr: Expr, *fns: str) -> Iterator[tuple[Expr, Expr]]:
    """The operands of every one of these binary operations in `expr`, either one first."""
    for node in walk(expr):
        if isinstance(node, Call) and node.fn in fns:
            a, b = node.args
            yield a, b
            yield b, a


def is_weighed(shift: Expr) -> bool:
    """Whether a state is multiplied with data, or divided by data: no state knows of a 0 or an infinity there."""
    return any(
        reads_state(a) and not reads_state(b) and any(isinstance(node, Load) for node in walk(b))
        for a, b in _sides(shift, "mul", "div")
    )


def late_shifts(body: Expr, split: Split) -> Iterator[Expr]:
    """Addends of varying values that are finite at first and may be infinite in the end although the values are
    finite. A mean of the values themselves is none."""
    for varying, fixed in _sides(body, "add", "sub"):
        if split.axis in free_axes(varying) and split.hoists(fixed) and not split.is_infinite(fixed):
            core = _varying_core(varying)
            if not any(core in walk(content) for content in _contents(fixed, split)):
                yield fixed


def shifts_that_drift(body: Expr, split: Split) -> Iterator[Expr]:
    """Shifts inside squares and products that are made of other values than what they shift: as such a shift moves, the
    sum may fall by any factor and cancel. A mean or an extreme of the values themselves moves no further than the values
    spread. A shift by a position drifts outside of products too."""
    match _varying_core(body):
        case Call("add" | "sub", addends):
            yield from (shift for shift in addends if split.hoists(shift) and split.jumps(shift))
    for node in walk(body):
        if isinstance(node, Call) and node.fn in ("sq", "mul"):
            for factor in map(_varying_core, node.args):
                match factor:
                    case Call("add" | "sub", (a, b)):
                        for varying, shift in ((a, b), (b, a)):
                            if split.hoists(shift) and _drifts(varying, shift, split):
                                yield shift


def _drifts(varying: Expr, shift: Expr, split: Split) -> bool:
    own = set(_sources(varying, split))
    alike = any(not own.isdisjoint(_sources(content, split)) for content in _contents(shift, split))
    return not alike or split.jumps(shift)


def _contents(expr: Expr, split: Split) -> Iterator[Expr]:
    """The bodies of the states that `expr` reads."""
    for node in walk(expr):
        if isinstance(node, Local) and node.name in split.contents:
            yield split.contents[node.name]


def _sources(expr: Expr, split: Split) -> Iterator[Expr]:
    """Tensors, positions and earlier values that a value is made of, those of the states that it reads included."""
    match expr:
        case Local(name, _) if name in split.contents:
            yield from _sources(split.contents[name], split)
        case Load() | Local() | Axis():
            yield expr
        case _:
            for child in children(expr):
                yield from _sources(child, split)


def _varying_core(expr: Expr) -> Expr:
    """A varying value without the masks, casts and signs around it."""
    match expr:
        case Call("where", (_, a, Const())):
            return _varying_core(a)
        case Call(fn, (a,)) if fn in CASTS or fn == "neg":
            return _varying_core(a)
        case _:
            return expr


def unrestored_sums(body: Expr, shifts: Mapping[Expr, Expr], split: Split) -> Iterator[Expr]:
    """Of sums and differences inside `body`, each with the addend in it that is guarded: those that may be infinite in the
    end, where the reduction of the guarded body gives NaN."""
    multiplied = any(
        _is_multiplied(total, body, split.axis, shifts)
        for total, shift in shifts.items()
        if not _is_finite(shift)
    )
    for total, shift in shifts.items():
        if multiplied or not (_is_finite(shift) or _is_own(total, shift, split)):
            yield total


def _is_finite(shift: Expr) -> bool:
    return isinstance(shift, Call) and shift.fn == "finite"


def _is_own(total: Expr, fixed: Expr, split: Split) -> bool:
    """Whether the difference `total` is NaN wherever `fixed`, one side of it, is infinite: each term of `fixed` is finite,
    the extreme of the other side (less what was taken off that before), or the logarithm of a sum that this extreme
    scales."""
    if not (isinstance(total, Call) and total.fn == "sub"):
        return False
    a, b = total.args
    varying = a if b is fixed else b
    taken: set[str] = set()
    while isinstance(varying, Call) and varying.fn == "sub" and split.is_infinite(varying.args[1]):
        taken |= {node.name for node in walk(varying.args[1]) if isinstance(node, Local)}
        varying = varying.args[0]
    rest: list[Expr] = []
    for term in _terms(fixed):
        if isinstance(term, Local) and split.bodies.get(term.name) is varying:
            taken.add(term.name)
        elif split.is_infinite(term):
            rest.append(term)
    return all(
        isinstance(term, Call)
        and term.fn == "log"
        and isinstance(term.args[0], Local)
        and split.scales.get(term.args[0].name) in taken
        for term in rest
    )


def _terms(expr: Expr) -> Iterator[Expr]:
    match expr:
        case Call("add", (a, b)):
            yield from _terms(a)
            yield from _terms(b)
        case _:
            yield unguarded(expr)


def _is_multiplied(total: Expr, body: Expr, axis: str, totals: Collection[Expr]) -> bool:
    """Whether a sum inside `body` is multiplied by what may be infinite for an infinite input: while the sum is 0, the
    product is NaN."""
    return any(total in walk(a) and _can_be_infinite(b, axis, totals) for a, b in _sides(body, "mul"))


def _can_be_infinite(factor: Expr, axis: str, totals: Collection[Expr]) -> bool:
    """Whether an infinite input may make `factor` infinite where none of `totals` is. Exponents in bodies are at most 0."""
    if factor in totals or axis not in free_axes(factor):
        return False
    match factor:
        case Call("exp", _):
            return False
        case Call(_, args):
            return any(_can_be_infinite(arg, axis, totals) for arg in args)
        case _:
            return True


def is_nan_at_first(value: Expr, identities: Mapping[str, float]) -> bool:
    """Whether the next value of a state is NaN because nothing has been seen."""
    return math.isnan(at_first(value, identities)) and not math.isnan(at_first(value, {}))


def undefined_at_first(body: Expr, split: Split) -> Iterator[Expr]:
    """The largest parts of a guarded body that read states, do not vary along the axis, and are NaN while nothing has
    been seen: the root of an infinity less itself, the cosine of one."""

    def parts(node: Expr) -> list[Expr]:
        return list(filter(split.reads, children(node))) if split.axis in free_axes(node) else []

    for node in post_order([body], parts):
        if split.hoists(node) and math.isnan(at_first(node, split.first)):
            yield transform(node, unguarded)
