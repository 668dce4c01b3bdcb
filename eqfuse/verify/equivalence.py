"""Whether two programs compute the same function of the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from typing import Literal, get_args

import numpy as np

from eqfuse.errors import EqfuseError
from eqfuse.progress import progress
from eqfuse.proof.meeting import met
from eqfuse.terms.nodes import Axis, Expr, Load, Program, Reduce, replaced, walk
from eqfuse.terms.parser import parse
from eqfuse.threads import cached, deep
from eqfuse.verify.adversary import (
    FAR_TRIALS,
    MOST_ELEMENTS,
    ONES,
    Setting,
    Unseen,
    branches_on_data,
    constants,
    counted,
    few_or_none,
    in_indices,
    many_trials,
    settings,
)
from eqfuse.verify.alike import alike
from eqfuse.verify.bound import Side
from eqfuse.verify.branches import Goal, paths
from eqfuse.verify.certificate import (
    NOT_PROVED,
    REQUESTED,
    Certificate,
    allowed_texts,
)
from eqfuse.verify.comparison import Defined, differs
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.inputs import roots, small_integers
from eqfuse.verify.joint import JointSizes
from eqfuse.verify.shrink import differ_in_floats, smallest
from eqfuse.verify.shrink_constants import shrink_constants
from eqfuse.verify.sizes import APART, SEARCHED
from eqfuse.verify.source import Source, Stage
from eqfuse.verify.steps import stepwise
from eqfuse.verify.verification import Verification, hidden_difference

DRAWS, FEW = 4, 6
"""Integer scalars of two programs are drawn so often at the same sizes, all but the first time below the second."""
DRAWS_OF_SIZES = 3
"""Sizes beside one that is given are."""
LONGER, LATER = 4, 1000
"""Where two programs differ in orders of numbers that are supposed, so many times more trials look for numbers that are in
such an order; they have numbers from the second on."""


Domains = Literal["same", "common"]
"""Of these, what `equivalent` has."""
MOST_GOALS, GOAL_TRIALS = 48, 8
"""Sides of branches that numbers are looked for, and trials with these."""


@deep()
def equivalent(
    left: str | Program,
    right: str | Program,
    *,
    trials: int = 16,
    seed: int = 0,
    scalars: Mapping[str, object] | None = None,
    bound: float = REQUESTED,
    domain: str = "same",
    allow: Sequence[str] | Literal["untaken"] = (),
    prove: bool = True,
) -> Certificate:
    """Whether two programs (or source texts) compute the same outputs from the same inputs, at any sizes.

    Outputs are matched by name. Programs whose outputs differ in name or shape, or which read a tensor differently, are
    not equivalent, and `reason` says so. Programs whose outputs meet in an e-graph are proved equal, by rules that `proof` names,
    and no trial is run; with `prove=False` trials alone decide. Both have to have values for the same inputs (`x / z * z` has none at z = 0,
    `x` has); `domain="common"` compares them where both have. Beside the trials that the bound counts, other sizes,
    integers and values at the thresholds of both are tried (see `eqfuse.verify.adversary`). A side of a branch that no
    trial took, and of which nothing shows that it makes no difference, is a reason to refuse; `allow` has those, as
    `reason` writes them, that are known to make none, or "untaken" for all. Raises EqfuseError for a text that is no program, and for another `domain`.
    """
    if domain not in get_args(Domains):
        raise EqfuseError(f"domain is {domain!r}", hint="give 'same' or 'common'")
    allowed = allowed_texts(allow)
    defined: Defined = "same" if domain == "same" else "common"
    first, second = (stepwise(each if isinstance(each, Program) else parse(each)) for each in (left, right))
    compared = _Comparison(first, second, trials, seed, scalars or {}, bound, defined, allowed)
    refused = compared.refused()
    if refused is not None:
        return refused
    proved = compared.proved() if prove else None
    return compared.tried() if proved is None else proved


@dataclass(frozen=True)
class _Comparison:
    """Two programs that are compared, and how."""

    first: Program
    second: Program
    trials: int
    seed: int
    scalars: Mapping[str, object]
    bound: float
    defined: Defined
    allowed: tuple[str, ...]

    @cached
    def given(self) -> Mapping[str, object]:
        """Scalars of the first run."""
        return {**small_integers(self.first, self.second), **self.scalars}

    @cached
    def pair(self) -> JointSizes:
        return JointSizes.of(self.first, self.second, self.given)

    def _verification(self, first: Program, second: Program) -> Verification:
        return Verification(self.trials, self.seed, FieldChoice.of(first, second), self.bound)

    def refused(self) -> Certificate | None:
        """The refusal of programs whose names or shapes differ."""
        verification = self._verification(self.first, self.second)
        verification.reason = _interface_difference(self.first, self.second) or self.pair.output_difference()
        return verification.certificate() if verification.reason else None

    def proved(self) -> Certificate | None:
        """That the programs are equal by rules; None where none was found."""
        with progress("verify"):
            rules = met(alike(self.first, self.second))
        if rules is None:
            return None
        proof = f"they met in the e-graph, by {', '.join(rules)}" if rules else "they are the same program"
        nothing = self._verification(self.first, self.second).certificate()
        return replace(
            nothing, ok=True, reason="", bound=0.0, not_covered=NOT_PROVED if rules else (), proof=proof
        )

    def tried(self) -> Certificate:
        """What trials say."""
        first, second, given = self.first, self.second, self.given
        rest = (given, self.scalars, self.defined, self.seed, self.trials)
        verification = self._verification(first, second)
        made = _compared(verification, self.pair, *rest)
        if made.at_sizes() and made.counterexample is None and not verification.hidden:
            shrunk = shrink_constants((first, second))
            if shrunk is not None:
                (one, two), numbers = shrunk
                sizes = JointSizes.of(one, two, given)
                if not sizes.output_difference():
                    made = made.with_shrunk(_compared(self._verification(one, two), sizes, *rest), numbers)
        hidden = verification.unshown
        if hidden is not None and made.counterexample is None and differ_in_floats(first, second, hidden):
            made = replace(made, counterexample=hidden, reason=differs(hidden.stage))
        made = made.located(first.source, second.source).accepted(self.allowed)
        if made.counterexample is None:
            return made
        shown = smallest(first, second, made.counterexample)
        finite = isfinite(shown.expected) and isfinite(shown.found)
        as_found = shown is made.counterexample and made.opaque and finite
        if as_found and differ_in_floats(first, second, shown) is False:
            return replace(made, counterexample=None, reason=hidden_difference(made.opaque))
        return replace(made, counterexample=shown)


def _compared(
    verification: Verification,
    pair: JointSizes,
    given: Mapping[str, object],
    fixed: Mapping[str, object],
    defined: Defined,
    seed: int,
    trials: int,
) -> Certificate:
    """What two programs showed, whatever no trial took."""
    unseen = Unseen((pair.first, pair.second))
    stages, source = _of_pair(pair, given, defined)
    verification.signs_of_nan = True
    with progress("verify"):
        verification.run(stages, source)
        unseen.look((pair.left, pair.right), given)
        _look_for_difference(verification, unseen, given, fixed, defined, seed, trials)
        _look_at_goals(verification, pair, source, given, fixed, defined)
        if not verification.agrees_in_any_order(stages, source):
            _look_for_difference(verification, unseen, given, fixed, defined, seed + 1, trials, LONGER)
        verification.suppose(stages, source)
        verification.need_thresholds(source)
    verification.note_constant(unseen.everywhere())
    verification.note_unreached(_gathers_of_one(pair.first, pair.second))
    return verification.certificate()


def _of_pair(
    pair: JointSizes, scalars: Mapping[str, object], defined: Defined
) -> tuple[Sequence[Stage], Source]:
    """The second program as a stage, and where its inputs come from. An infinite input may tell equal functions of real
    numbers apart: that is left to floats."""
    sides = (Side(pair.first, pair.left), Side(pair.second, pair.right))
    stage = Stage.of_program("second program", pair.second, pair.right)
    return [stage], Source(sides, pair.specs, scalars, pair.left, "ignored", defined=defined)


def _look_for_difference(
    verification: Verification,
    unseen: Unseen,
    usual: Mapping[str, object],
    fixed: Mapping[str, object],
    defined: Defined,
    seed: int,
    trials: int,
    times: int = 1,
) -> None:
    """Runs both programs at other sizes and integers, on inputs at the thresholds of both. `usual` are the scalars of
    the first run, `fixed` those that were given; in a second look there are so many `times` more trials, others."""
    first, second = unseen.programs
    numbers, rng = constants(first, second), np.random.default_rng(seed)
    free = counted(first, second)
    turning = (
        Setting(ONES if is_far else APART, {}, pinned=sizes, is_far=is_far)
        for sizes in unseen.turning({**usual, **fixed})
        for is_far in [max(sizes.values()) > SEARCHED]
    )
    for number, setting in enumerate(chain(settings((first, second), fixed, rng), turning)):
        if verification.reason or verification.over:
            return
        # Integer scalars are the same in all trials of a draw.
        exact = any(name not in fixed for name in setting.integers)
        for draw in range(
            1 if setting.is_far else DRAWS if exact else DRAWS_OF_SIZES if setting.choice is APART else 1
        ):
            few = {
                name: few_or_none(int(rng.integers(1, FEW)), rng)
                if name in free
                else int(rng.integers(1, FEW))
                for name in (setting.integers if draw else ())
            }
            values = {**usual, **setting.integers, **few, **fixed}
            try:
                choices = setting.choices(rng)
                pair = JointSizes.of(first, second, values, choices, setting.least, setting.pinned)
            except EqfuseError:  # a read that is outside its tensor at these sizes
                continue
            if verification.reason or pair.output_difference() or 2 * pair.volume > MOST_ELEMENTS:
                continue
            (stage,), source = _of_pair(pair, values, defined)
            count = min(max(trials, times * many_trials(pair.volume)), MOST_ELEMENTS // max(1, pair.volume))
            count = FAR_TRIALS if setting.is_far else -(-count // DRAWS) if exact else count
            verification.probe([stage], source, numbers, DRAWS * number + draw + LATER * (times > 1), count)
            unseen.look((pair.left, pair.right), values)


def _look_at_goals(
    verification: Verification,
    pair: JointSizes,
    source: Source,
    usual: Mapping[str, object],
    fixed: Mapping[str, object],
    defined: Defined,
) -> None:
    """Runs both programs on numbers that take sides of branches which no trial took yet, and on such as lead to the sides of
    choices in choices, at one position an axis. Of the latter those are noted that neither were found nor are impossible."""
    programs = pair.first, pair.second
    if verification.reason or not any(map(branches_on_data, programs)):
        return
    leading = dict.fromkeys(goal for program in programs for goal in paths(program))
    goals = dict.fromkeys((*verification.goals(source), *leading))
    free = {name for program in programs for name in program.integers if name not in fixed}
    free -= in_indices(*programs)
    for number, goal in enumerate([*goals][:MOST_GOALS]):
        # Integer scalars are solved for too, but where that makes sizes that do not fit.
        starts = ({name: n for name, n in usual.items() if name not in free}, usual)[: 1 + bool(free)]
        is_met = any(
            _meet(verification, pair, goal, start, usual, free, defined, LATER * 3 + number)
            for start in starts
        )
        if goal in leading and not is_met:
            verification.note_path(goal, source)


def _meet(
    verification: Verification,
    pair: JointSizes,
    goal: Goal,
    start: Mapping[str, object],
    usual: Mapping[str, object],
    free: AbstractSet[str],
    defined: Defined,
    number: int,
) -> bool:
    """Runs both programs on numbers that meet a goal; False where there are none. Scalars are as at the `start`, and `free` ones that
    it lacks as they are found."""
    programs = pair.first, pair.second
    is_met = False
    try:
        _, source = _of_pair(JointSizes.of(*programs, usual, (ONES,)), start, defined)
        by_scalars: dict[tuple[tuple[str, int], ...], list[dict[str, float]]] = {}
        for found in verification.numbers_for(goal, source):
            chosen = tuple((name, int(n)) for name, n in found.items() if name in free)
            by_scalars.setdefault(chosen, []).append(found)
        for scalars, numbers in by_scalars.items():
            values = {**usual, **dict(scalars)}
            sizes = JointSizes.of(*programs, values, (ONES,))
            if not sizes.output_difference() and 2 * sizes.volume <= MOST_ELEMENTS:
                (stage,), source = _of_pair(sizes, values, defined)
                is_met = True
                if not verification.reason:
                    verification.probe([stage], source, (), number, GOAL_TRIALS, ("as usual",), numbers)
    except EqfuseError:  # a read that is outside its tensor at these sizes
        pass
    return is_met


def _gathers_of_one(first: Program, second: Program) -> list[str]:
    """Gathers that one program has alone. A call refuses positions outside of what is read, and trials draw none: where the
    other program has a value for them, as a sum over a one-hot mask has, the two differ."""
    gathers = [_gathers(program) for program in (first, second)]
    return [
        f"a position outside of {load.tensor!r} in {load}, which calls refuse, was never drawn"
        for own, other in (gathers, reversed(gathers))
        for key, load in own.items()
        if key not in other
    ]


def _gathers(program: Program) -> dict[Expr, Load]:
    """Reads at positions in data, by the same read with its axes numbered as they occur."""
    found: dict[Expr, Load] = {}
    for load in walk(*roots(program)):
        if isinstance(load, Load) and any(isinstance(part, Load | Reduce) for part in walk(*load.index)):
            axes = dict.fromkeys(part for part in walk(load) if isinstance(part, Axis))
            found.setdefault(replaced(load, {axis: Axis(f"axis {n}") for n, axis in enumerate(axes)}), load)
    return found


def _interface_difference(first: Program, second: Program) -> str:
    """Why two programs cannot be equivalent, from their names and ranks alone; empty if they may be."""
    left, right = ([output.name for output in program.returned] for program in (first, second))
    if sorted(left) != sorted(right):
        return f"the programs have different outputs: {', '.join(left)} and {', '.join(right)}"
    axes = {output.name: output.axes for output in second.returned}
    for output in first.returned:
        if len(output.axes) != len(axes[output.name]):
            ranks = f"{len(output.axes)} and {len(axes[output.name])}"
            return f"output {output.name!r} has {ranks} dimensions"
    ranks_of = {tensor.name: tensor.rank for tensor in second.tensors}
    for tensor in first.tensors:
        if ranks_of.get(tensor.name, tensor.rank) != tensor.rank:
            return f"tensor {tensor.name!r} has {tensor.rank} and {ranks_of[tensor.name]} dimensions"
    for one, two in ((first, second), (second, first)):
        mixed = {tensor.name for tensor in one.tensors} & set(two.scalars)
        if mixed:
            return f"{min(mixed)!r} is a tensor in one program and a scalar in the other"
    return ""
