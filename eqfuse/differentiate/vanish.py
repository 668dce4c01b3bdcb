"""Whether a value is 0 whatever the inputs are, tried in a finite field.

The cotangent of the maximum that a softmax is shifted by is `sum_j p_j dp_j - sum_j p_j * sum_j p_j dp_j`, of which no
rule of differentiation sees that it is 0. A polynomial that is not 0 is not 0 at random points (see
docs/verification.md), so it is evaluated. What was left out for it is checked once more: the certificate of a gradient
is one of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse import limits
from eqfuse.differentiate.shares import taken_apart
from eqfuse.differentiate.steps import Step, Steps, name_of, with_stops
from eqfuse.differentiate.text import text_of
from eqfuse.errors import EqfuseError
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import rank_axes
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    Tensor,
    call,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import parse
from eqfuse.verify.adversary import branches_on_data
from eqfuse.verify.field.array import TWISTED, UNDEFINED, FieldArray
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.inputs import input_specs, small_integers
from eqfuse.verify.sampling import draw_scalars, draw_specs
from eqfuse.verify.sizes import constant_conditions, small_extents, volume

TRIALS = 16
ROUNDS = 2
MOST_ROUNDS = 8
"""Integers are the same in all trials of a round: where those of the first rounds hide a position behind a mask, others
are drawn."""
ENOUGH = 4
"""Trials of a round that every position must have had a value in."""


SEEN = 1e-6
"""What a value is at least, relative to its terms, that rounding in float64 has not left."""
SCALES = (1.0, 0.05, 20.0)
"""Magnitudes of the inputs of values that turn on a comparison of reals."""

MOST_RANKS = 3
"""Ranks that lists have at the sizes of a trial."""


def few_ranks(*programs: Program) -> dict[str, int]:
    """The lengths of axes of ranks: lists of more ranks than there are positions end with infinities."""
    found: dict[str, int] = {}
    for program in programs:
        axes = rank_axes(*(output.expr for output in program.outputs))
        bases = {program.domains.get(axis, axis) for axis in axes}
        copies = {axis: base for axis, base in program.domains.items() if base in bases}
        for axis, base in {**{base: base for base in bases}, **copies}.items():
            found[axis] = min(program.lengths[base.rpartition(".")[2]], MOST_RANKS)
    return found


def is_zero(steps: Steps, step: Step, parts: Sequence[Step], of: str = "") -> bool:
    """Whether the value of a step over those so far is 0 in every trial, at sizes that show all of it, although each of
    its parts is not: at every position of the step some part of it is not 0 in some trial. So nothing counts as 0
    because a mask has left nothing. What is not made of the extreme `of` may be anything: what is 0 for whatever scores a
    softmax has is so for these. What is made of cotangents stays as it is. Where it is not 0 for anything, it may be for what it is
    made of: the sum of squares of a scaled norm, of which no maximum is part. Where that would take more than a gradient may, it
    counts as not 0: the gradient is longer then."""
    unrelated = _unrelated(steps, of)
    if _is_zero_for_any(steps, step, parts, unrelated):
        return True
    return bool(unrelated) and _is_zero_for_any(steps, step, parts, set())


def _is_zero_for_any(steps: Steps, step: Step, parts: Sequence[Step], given: set[str]) -> bool:
    """The same, whatever the steps `given` are."""
    program = with_stops(parse(text_of(steps, [step, *parts], given=given)), None)
    outputs = (replace(output, expr=taken_apart(output.expr)) for output in program.outputs)
    program = replace(program, outputs=tuple(outputs))
    nodes = walk(*(o.expr for o in program.outputs))
    if any(isinstance(node, Call) and node.fn in ANYTHING for node in nodes):
        program = _with_anything(program)
    return _vanishes(program, len(parts))


ANYTHING = ("log", "stop")
"""Functions of which a value that is 0 is so whatever they give: a field has logarithms in exponents alone, and what is 0
because something is what it was stopped at, as `x - stop(x)`, has derivatives that are not."""


def _with_anything(program: Program) -> Program:
    """The program with inputs in place of such functions."""
    names: dict[Expr, str] = {}
    tensors: list[Tensor] = []
    scalars: list[str] = []

    def replaced(node: Expr) -> Expr:
        axes = tuple(sorted(free_axes(node)))
        if not isinstance(node, Call) or node.fn not in ANYTHING or not (axes or node.fn == "stop"):
            return node
        if node not in names:
            names[node] = f"{node.fn}.{len(names)}"  # no name of a text
            if axes:
                tensors.append(Tensor(names[node], len(axes), "f32", axes))
            else:
                scalars.append(names[node])
        return Load(names[node], tuple(map(Axis, axes))) if axes else Scalar(names[node])

    outputs = tuple(replace(output, expr=transform(output.expr, replaced)) for output in program.outputs)
    every = (*program.tensors, *tensors)
    return replace(program, outputs=outputs, tensors=every, scalars=(*program.scalars, *scalars))


def _vanishes(program: Program, parts: int) -> bool:
    """Whether the first output is 0 in every trial, and each of the other `parts` is not everywhere."""
    given = dict(small_integers(program))
    try:
        extents = small_extents(program, given)
    except EqfuseError:
        return False
    extents |= {axis: count for axis, count in few_ranks(program).items() if axis in extents}
    if not limits.may_try(TRIALS * volume(program, extents)):
        return False
    if constant_conditions(program, extents, given) or _is_seen(program, extents, given):
        return False
    alive: list[Any] = [False] * parts
    for number in range(MOST_ROUNDS):
        if not limits.may_try(TRIALS * volume(program, extents)):
            return False
        if number >= ROUNDS and all(np.all(part) for part in alive):
            break
        rng = np.random.default_rng(number)
        domain = FieldDomain(seed=int(rng.integers(2**62)))
        tensors = draw_specs(input_specs(program, extents, given, None), domain, TRIALS, rng)
        scalars = draw_scalars([program], given, domain, TRIALS, rng)
        found = evaluate(program, tensors, scalars, extents, domain, batch=TRIALS)
        values = [found[output.name] for output in program.outputs]
        if not all(isinstance(value, FieldArray) and value.p is not None for value in values):
            return False
        if not _is_zero(values[0]):
            return False
        for k, value in enumerate(values[1:]):
            nonzero = _nonzero(value)
            seen = nonzero.any(axis=(0, *range(1 + len(program.outputs[0].axes), nonzero.ndim)))
            alive[k] = alive[k] | seen | _is_never_a_number(values[0])
    return all(np.all(part) for part in alive)


def _is_seen(program: Program, extents: Mapping[str, int], given: Mapping[str, int]) -> bool:
    """Whether floating point shows that the first output is not 0: at some position it is far more than what rounding makes
    of its terms. It does of most values, and takes a small part of the time of trials in a field. Where a value turns on a comparison of
    reals, inputs of several magnitudes are tried: at one of them a row may lie on one side of it in every trial."""
    tried = program.outputs[0]
    terms = replace(tried, name=f"{tried.name}.terms", expr=_magnitude(tried.expr, {}))  # no name of a text
    both = replace(program, outputs=(tried, terms))
    specs = input_specs(program, extents, given, None)
    for scale, trials in (
        (1.0, 1),
        *(((each, TRIALS) for each in SCALES) if branches_on_data(program) else ()),
    ):
        rng, domain = np.random.default_rng(0), FieldDomain(seed=0)
        drawn = draw_specs(specs, domain, trials, rng, scale=scale)
        numbers = draw_scalars([program], given, domain, trials, rng)
        for trial in range(trials):
            tensors, scalars = (
                {name: _real(value, trial) for name, value in each.items()} for each in (drawn, numbers)
            )
            with np.errstate(all="ignore"):
                found = evaluate(both, tensors, scalars, extents, FloatDomain())
                value, rounding = (np.asarray(found[output.name], float) for output in both.outputs)
                if (np.isfinite(rounding) & (np.abs(value) > SEEN * rounding)).any():
                    return True
    return False


def _magnitude(expr: Expr, known: dict[Expr, Expr]) -> Expr:
    """The sum of the absolute values of all terms of a value, relative to which it is rounded (Higham 2002, section 3.1)."""
    if expr not in known:
        match expr:
            case Reduce("sum", axis, body):
                known[expr] = Reduce("sum", axis, _magnitude(body, known))
            case Call("add" | "sub" | "mul" | "sq" as fn, args):
                known[expr] = call("add" if fn == "sub" else fn, *(_magnitude(arg, known) for arg in args))
            case Call("neg", (arg,)):
                known[expr] = _magnitude(arg, known)
            case Call("div", (over, under)):
                known[expr] = call("div", _magnitude(over, known), call("abs", under))
            case Call("where", (condition, *branches)):
                known[expr] = call("where", condition, *(_magnitude(part, known) for part in branches))
            case _:
                known[expr] = call("abs", expr)
    return known[expr]


def _real(value: Any, trial: int) -> Any:
    """What floating point sees of one trial of a value."""
    return value.shadow[trial] if isinstance(value, FieldArray) else value


def _unrelated(steps: Steps, of: str) -> set[str]:
    """The steps of real numbers that are made of inputs, but not of a step; none where that is no extreme."""
    if not any(step.name == of and step.is_extreme for step in steps.steps):
        return set()
    program = steps.program
    made = {*(tensor.name for tensor in program.tensors), *program.scalars}
    found: set[str] = set()
    for step in steps.steps:
        reads = {name_of(node) for node in walk(step.body)} - {None}
        if step.name != of and reads <= made:
            made.add(step.name)
            found.add(step.name)
    return {name for name in found if steps.dtypes[name] == "f32"}


def _usable(value: FieldArray) -> npt.NDArray[np.bool_]:
    usable: npt.NDArray[np.bool_] = np.isfinite(value.shadow)
    return usable & value.lacks(UNDEFINED) & value.lacks(TWISTED)


def _is_zero(value: FieldArray) -> bool:
    if value.p is None:
        return False
    usable = _usable(value)
    decided = (usable.sum(0) >= ENOUGH) | _is_never_a_number(value)
    return bool(decided.all()) and bool(usable.any()) and not value.p[usable].any()


def _is_never_a_number(value: FieldArray) -> npt.NDArray[np.bool_]:
    """Positions that no trial makes finite, as those of a row that a mask leaves nothing of: so is all made of them."""
    return ~np.asarray(np.isfinite(value.shadow).any(0))


def _nonzero(value: FieldArray) -> npt.NDArray[np.bool_]:
    usable = _usable(value)
    return np.zeros_like(usable) if value.p is None else usable & (value.p != 0)
