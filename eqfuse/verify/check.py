"""Compares stages of the compiler with the program as written, also at other sizes and at thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from eqfuse.errors import EqfuseError
from eqfuse.limits import Limits
from eqfuse.terms.nodes import Program
from eqfuse.verify.adversary import (
    ONES,
    Unseen,
    branches_on_data,
    constants,
    many_trials,
    settings,
)
from eqfuse.verify.bound import Side
from eqfuse.verify.certificate import (
    REQUESTED,
    Certificate,
)
from eqfuse.verify.comparison import Special
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.inputs import input_specs, small_integers
from eqfuse.verify.sizes import LARGEST_WORK, constant_conditions, small_extents, volume
from eqfuse.verify.source import Source, Stage
from eqfuse.verify.verification import Draws, Verification

ELSEWHERE_TRIALS = 8
"""Trials at thresholds of stages at other sizes: each kind of value once."""
MORE_LOOKS, MORE_TRIALS = 4, 64
"""Where a side of a branch was not taken, so many more draws, of so many trials, look for it where axes have one position."""
MOST_GOALS, SOLVED_LOOKS = 24, 2
"""Sides of branches that no trial took for which numbers are solved for, and how many such numbers are tried."""
MOST_ELSEWHERE = 200_000
"""Elements of the largest value over all trials there."""


Elsewhere = Callable[[Mapping[str, int], int], Sequence[Stage]]
"""Stages at other extents; the number is that of the run, for those that take turns."""


def check_stages(
    program: Program,
    stages: Sequence[Stage],
    *,
    trials: int = 16,
    seed: int = 0,
    dtypes: Mapping[str, str] | None = None,
    scalars: Mapping[str, object] | None = None,
    special: Special = "kept",
    bound: float = REQUESTED,
    elsewhere: Elsewhere | None = None,
    beside: Sequence[Program] = (),
    fitted: Callable[[Mapping[str, int]], Mapping[str, int]] | None = None,
    limits: Limits | None = None,
) -> Certificate:
    """Compares every stage with the program as written, on the same random inputs, at the stage's extents.

    Rounds of `trials` are added until the probability of accepting a wrong stage is at most `bound`, where a
    theorem gives one (see `Certificate.bound`). The first one has half as many where one trial computes very much.
    `dtypes` tells which tensors are integers or truth values; `scalars` fixes some of the scalars.
    Unless `special` is "ignored", some trials have -inf in one input, and infinities and NaN are compared too
    (see `compare`). With `elsewhere`, its stages are also compared where a difference may show: at other sizes and
    integers, and on inputs at the thresholds of the program (see `eqfuse.verify.adversary`). `beside` are programs that stages
    are made of, over other axes; `fitted` makes extents that these hold for of others. `limits` are those of the environment by default.
    """
    given = scalars or {}
    groups: dict[tuple[tuple[str, int], ...], list[Stage]] = {}
    for stage in stages:
        groups.setdefault(tuple(sorted(stage.extents.items())), []).append(stage)
    forms = (program, *beside, *(stage.program for stage in stages if stage.program is not None))
    verification = Verification(trials, seed, FieldChoice.of(*forms), bound, limits)
    first: tuple[Sequence[Stage], Source] | None = None
    for key, members in groups.items():
        extents = dict(key)
        specs = input_specs(program, extents, given, dtypes)
        source = Source((Side(program, extents),), specs, given, extents, special)
        first = first or (members, source)
        verification.run(members, source, half=volume(program, extents) > LARGEST_WORK)
        if elsewhere is None:
            integers = {**small_integers(program), **given}
            verification.note_constant(
                str(expr) for expr, _ in constant_conditions(program, extents, integers)
            )
    if elsewhere is not None and stages:
        _look_elsewhere(
            verification, program, elsewhere, stages, dtypes, given, special, seed, fitted or dict
        )
    if first is not None:
        verification.suppose(*first)
    return verification.certificate()


def _look_elsewhere(
    verification: Verification,
    program: Program,
    elsewhere: Elsewhere,
    stages: Sequence[Stage],
    dtypes: Mapping[str, str] | None,
    fixed: Mapping[str, object],
    special: Special,
    seed: int,
    fitted: Callable[[Mapping[str, int]], Mapping[str, int]],
) -> None:
    """Compares stages with the program at other sizes and integers than those of these, on inputs at its thresholds."""
    unseen = Unseen((program,))
    forms = (program, *(stage.program for stage in stages if stage.program is not None))
    numbers = constants(*forms)
    kind: Draws = "at thresholds" if any(map(branches_on_data, forms)) else "as usual"
    usual = {**small_integers(program), **fixed}
    unseen.look((stages[0].extents,), usual)
    rng = np.random.default_rng(seed)
    least_of_all: tuple[Sequence[Stage], Source] | None = None
    number = 0
    for number, setting in enumerate(settings((program,), fixed, rng, "stages")):
        values = {**usual, **setting.integers, **fixed}
        least = setting.least[0] if setting.least else {}
        try:
            found = fitted(small_extents(program, values, setting.choices(rng), least, setting.pinned))
        except EqfuseError:  # a read that is outside its tensor at these sizes
            continue
        size = volume(program, found)
        if verification.reason or verification.over or size > MOST_ELSEWHERE:
            continue
        specs = input_specs(program, found, values, dtypes)
        source = Source((Side(program, found),), specs, values, found, special)
        if number == 0:
            hard = ELSEWHERE_TRIALS if kind == "at thresholds" else 0
            verification.run(elsewhere(found, number), source, half=True, numbers=numbers, hard=hard)
        else:
            trials = min(
                max(ELSEWHERE_TRIALS, many_trials(size) // 8), max(1, MOST_ELSEWHERE // max(1, size))
            )
            source = replace(source, special="ignored", defined="common")
            compared = elsewhere(found, number)
            verification.probe(compared, source, numbers, number, trials, (kind,))
            if setting.choice is ONES:
                least_of_all = compared, source
            unseen.look((found,), values)
    if least_of_all is not None and kind == "at thresholds":
        for more in range(number + 1, number + 1 + MORE_LOOKS):
            if verification.reason or not verification.has_untaken(source):
                break
            verification.probe(*least_of_all, numbers, more, MORE_TRIALS, (kind,))
        number += MORE_LOOKS
        for goal in verification.goals(source)[:MOST_GOALS]:
            for found_there in verification.numbers_for(goal, least_of_all[1])[:SOLVED_LOOKS]:
                number += 1
                if not verification.reason:
                    numbers_there = [found_there]
                    verification.probe(*least_of_all, (), number, MORE_LOOKS, ("as usual",), numbers_there)
    verification.note_constant(unseen.everywhere())
