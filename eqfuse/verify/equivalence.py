"""Runs stages of the compiler, or two programs, on the same random inputs and compares what they give."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from eqfuse.errors import EqfuseError
from eqfuse.progress import progress
from eqfuse.terms.bounds import reads_outside
from eqfuse.terms.domain import Domain
from eqfuse.terms.interpreter import evaluate_together
from eqfuse.terms.intervals import Range
from eqfuse.terms.nodes import Call, Expr, Load, Local, Program, walk
from eqfuse.terms.parser import parse
from eqfuse.threads import cached
from eqfuse.verify.adversary import (
    MOST_ELEMENTS,
    Setting,
    Unseen,
    branches_on_data,
    constants,
    counted,
    few_or_none,
    hardened,
    indexing_tensors,
    settings,
)
from eqfuse.verify.bound import Bound, Difference, Side
from eqfuse.verify.branches import Branches, Untaken
from eqfuse.verify.certificate import (
    NO_THRESHOLDS,
    NOT_COVERED,
    REQUESTED,
    SAME_EVERYWHERE,
    Certificate,
    Counterexample,
    StageReport,
    allowed_texts,
)
from eqfuse.verify.degrees import Counted, count
from eqfuse.verify.field.casts import rounded_of
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.field.domain import (
    HASHED_EXP,
    HASHED_POINT,
    POLE,
    TWISTED,
    UNDEFINED,
    FieldArray,
    FieldDomain,
)
from eqfuse.verify.field.modular import Truths
from eqfuse.verify.joint import JointSizes
from eqfuse.verify.nearer import nearer_programs
from eqfuse.verify.sampling import Inputs, draw_scalars, draw_specs, full_entropy
from eqfuse.verify.shrink import smallest
from eqfuse.verify.sizes import (
    APART,
    InputSpec,
    constant_conditions,
    delimiting_scalars,
    extents_at,
    input_specs,
    small_integers,
    volume,
)

Run = Callable[[Inputs, Domain], Mapping[str, Any]]
"""Outputs by name: domain arrays (or numpy integers) with a leading trial dimension."""

ROUNDS = 24
"""Rounds of trials at most: more are drawn while some output position was not compared often enough."""
STRAIGHT_ROUNDS = 6
"""Rounds at most while every position was compared, but some only with roots continued to non-squares."""
ENOUGH = 2
"""Comparisons that every output position needs."""
SMALLEST_SCALE = 1e-6
"""Real inputs are drawn smaller, down to this, where most trials leave the range of float64."""
ELSEWHERE_TRIALS = 8
"""Trials at thresholds of stages at other sizes: each kind of value once."""
MOST_TRIALS, ELEMENTS = 256, 120_000
"""Trials that look for a difference at small sizes, and the elements of the largest value over all of them."""
MOST_APART = 6
"""So many branches are supposed one by one where all together differ."""
DRAWS, FEW = 4, 6
"""Integer scalars of two programs are drawn so often at the same sizes, all but the first time below the second."""
DRAWS_OF_SIZES = 3
"""Sizes beside one that is given are."""
LONGER, LATER = 4, 1000
"""Where two programs differ in orders of numbers that are supposed, so many times more trials look for numbers that are in
such an order; they have numbers from the second on."""
ORDERS = 4
"""Orders of all numbers that are supposed."""
MOST_OPEN = 0.5
"""Where rounding leaves more of the trials open, it explains nothing: programs that differ in them differ."""
MOST_ELSEWHERE = 200_000
"""Elements of the largest value over all trials there."""
SATURATED = 1e-5
"""Relative difference of shadows that functions which saturate make, of arguments that are one number in other terms."""
CLOSE = 1e-9
"""Relative difference of float64 shadows that rounding can explain."""


@dataclass(frozen=True)
class Stage:
    """One form of the program: how to run it, at which extents (all axes), and what to say about it
    (tile and shard sizes). A form in terms is a `program` too."""

    name: str
    run: Run
    extents: Mapping[str, int]
    detail: str = ""
    program: Program | None = None

    @classmethod
    def of_program(cls, name: str, program: Program, extents: Mapping[str, int]) -> Stage:
        """A program, run as written."""

        def run(inputs: Inputs, domain: Domain) -> Mapping[str, Any]:
            return _evaluated([program], extents, inputs, domain)[0]

        return cls(name, run, extents, program=program)


def _evaluated(
    programs: Sequence[Program], extents: Mapping[str, int], inputs: Inputs, domain: Domain
) -> list[dict[str, Any]]:
    return evaluate_together(programs, inputs.tensors, inputs.scalars, extents, domain, batch=inputs.trials)


Special = Literal["kept", "lost", "ignored"]
"""What a stage does with infinities: what the program does, that or NaN, or anything."""

Defined = Literal["reference", "same", "common"]
"""Where two forms have to have values: the second wherever the first has, both at the same places, or anywhere (what
is compared is what both define)."""

Draws = Literal["as usual", "at thresholds"]
"""How inputs are drawn where a difference is looked for."""

Domains = Literal["same", "common"]
"""Of these, what `equivalent` has."""

UNEXPLAINED = 1e-6
"""Relative difference of float64 shadows that no rounding explains at inputs of ordinary size."""


@dataclass
class Tally:
    """What has been compared so far of one stage's outputs."""

    compared: int = 0
    floats_only: int = 0
    undefined: int = 0
    special: int = 0
    twisted: int = 0
    signs: int = 0
    infinite: int = 0
    apart: int = 0
    # Per output: how often each position agreed, how often in residues without continued roots; whether it ever
    # had a value, and a finite one.
    counts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    straight: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    alive: dict[str, Truths] = field(default_factory=dict)
    finite: dict[str, Truths] = field(default_factory=dict)
    failure: str = ""
    counterexample: Counterexample | None = None

    def copied(self) -> Tally:
        """The same, to add to."""
        return replace(
            self,
            counts=dict(self.counts),
            straight=dict(self.straight),
            alive=dict(self.alive),
            finite=dict(self.finite),
        )

    def least(self) -> int:
        """How often the least compared position was compared, among those that the program defines."""
        found = [self.counts[name][alive].min() for name, alive in self.alive.items() if alive.any()]
        return int(min(found)) if len(found) == len(self.alive) and found else 0

    def least_straight(self) -> int | None:
        """The same of comparisons in which no root was continued to a non-square; None where all is infinite."""
        found = [self.straight[name][finite].min() for name, finite in self.finite.items() if finite.any()]
        return int(min(found)) if found else None

    def hopeless(self, rounds: float) -> bool:
        """Whether even the average position of some output would not be compared often enough without
        continued roots in all `STRAIGHT_ROUNDS`, if it goes on as in these rounds."""
        means = [self.straight[name][finite].mean() for name, finite in self.finite.items() if finite.any()]
        return bool(means) and bool(min(means) / rounds * STRAIGHT_ROUNDS < ENOUGH)


def compare(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    inputs: Inputs,
    domain: FieldDomain,
    tally: Tally,
    stage: str = "candidate",
    *,
    special: Special = "kept",
    defined: Defined = "reference",
) -> bool:
    """Adds one round's outputs to the tally; False, with `tally.failure` set, where they differ.

    Outputs are equal where every residue known on both sides is, and where both are an infinity that a constant or an
    input brought in. Elements without a value in the field are counted, not compared. What the reference makes finite,
    the candidate may not make infinite or NaN. Unless `special` is "ignored", infinities of the reference must be there
    too, and NaN where all inputs are finite (a tile that a condition rules out may be left out, and with it 0 times an
    infinity). Where a division by 0 makes NaN in the reference, an infinity will do: c in c * sum(m) may be infinite,
    and some m be 0; and so will what follows from one, as exp(-c * sum(m)) does. Where it is "lost", NaN will do for
    an infinity. `defined` says what to do where one side has a value and the other has none, as 0 / 0 has none.
    """
    if set(reference) != set(candidate):
        tally.failure = (
            f"outputs are {_names(candidate)} in stage {stage!r}, {_names(reference)} in the program"
        )
        return False
    for name, expected in reference.items():
        left, right = _field_array(expected, domain), _field_array(candidate[name], domain)
        if left.shape != right.shape:
            shapes = f"{right.shape[1:]} in stage {stage!r}, {left.shape[1:]} in the program"
            tally.failure = f"{name!r} has shape {shapes}"
            return False
        # Where reals have left the range of floats, orders tell nothing.
        lost = domain.beyond_floats if defined != "reference" else domain.beyond_floats & inputs.hard
        left, right = (_without(side, lost) for side in (left, right))
        by_terms = bool(domain.opaque & {HASHED_EXP, HASHED_POINT})
        near = np.where(domain.saturated, SATURATED, CLOSE) if by_terms else None
        if not _compare_output(name, left, right, inputs, tally, stage, special, defined, near):
            return False
    return True


def _names(outputs: Mapping[str, Any]) -> str:
    return ", ".join(sorted(outputs)) or "missing"


def _field_array(value: Any, domain: FieldDomain) -> FieldArray:
    """Integers and truth values as reals: a stage may compute as reals what the program computes as integers."""
    return value if isinstance(value, FieldArray) else domain.lift(np.asarray(value))


def _without(value: FieldArray, trials: Truths) -> FieldArray:
    """The value with some trials left out."""
    if not trials.any() or not value.shape:
        return value
    out = np.broadcast_to(trials.reshape(-1, *(1,) * (len(value.shape) - 1)), value.shape) * UNDEFINED
    return replace(value, marks=out if value.marks is None else value.marks | out)


def _compare_output(
    name: str,
    expected: FieldArray,
    found: FieldArray,
    inputs: Inputs,
    tally: Tally,
    stage: str,
    special: Special,
    defined: Defined,
    near: npt.NDArray[np.float64] | None,
) -> bool:
    """Where `near` is given, by trial or for all, real values that are so near decide nothing against residues."""
    decided = expected.lacks(UNDEFINED) & found.lacks(UNDEFINED)
    straight = expected.lacks(TWISTED) & found.lacks(TWISTED)
    finite, finite_too = np.isfinite(expected.shadow), np.isfinite(found.shadow)
    no_elements = np.zeros(expected.shape, dtype=bool)
    usable = decided & finite & finite_too
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(expected.shadow), 1.0)
        close = np.abs(expected.shadow - found.shadow) <= CLOSE * scale
    both = ((expected.p, found.p), (expected.q, found.q))
    pairs = [(x, y) for x, y in both if x is not None and y is not None]
    same = np.ones(expected.shape, dtype=bool) if pairs else close
    for x, y in pairs:
        same = same & (x == y)
    undecided = no_elements
    if expected.rooted or found.rooted:
        # The sign of a root's residue is a convention: only together do residues and real values decide.
        undecided = usable & (same != close)
    if near is not None:  # what saturates is told apart by its argument's terms
        reach = near.reshape(-1, *(1,) * (expected.shadow.ndim - 1)) if expected.shadow.ndim else near[0]
        with np.errstate(invalid="ignore"):
            undecided = undecided | usable & (np.abs(expected.shadow - found.shadow) <= reach * scale) & ~same
    wrong = usable & ~same & ~undecided
    lost = gained = infinite = no_elements
    if not (finite.all() and finite_too.all()):
        misplaced = np.isinf(expected.shadow) & (found.shadow != expected.shadow)
        misplaced &= ~np.isnan(found.shadow) | (special != "lost")
        plain = inputs.finite.reshape(-1, *(1,) * (expected.shadow.ndim - 1))
        divided = ~expected.lacks(POLE) & (np.isinf(found.shadow) | ~found.lacks(POLE))
        misplaced |= np.isnan(expected.shadow) & ~np.isnan(found.shadow) & ~divided & plain
        hard = inputs.hard.reshape(-1, *(1,) * (expected.shadow.ndim - 1))
        misplaced &= decided & (special != "ignored") & ~hard
        lost = decided & finite & ~finite_too
        if special == "lost":  # what an infinity among the inputs was lost to may be divided by another one
            lost &= plain | ~np.isnan(found.shadow)
        gained = decided & finite_too & ~finite
        wrong |= (
            misplaced | {"reference": lost & ~hard, "same": lost | gained, "common": no_elements}[defined]
        )
        given = expected.lacks(POLE) & found.lacks(POLE)
        if (
            defined == "same"
        ):  # infinities that constants make are values, those that a division by 0 makes are none
            values = np.isinf(expected.shadow) & expected.lacks(POLE) | np.isinf(found.shadow) & found.lacks(
                POLE
            )
            wrong |= decided & values & (expected.shadow != found.shadow) & ~finite & ~finite_too
        infinite = decided & given & np.isinf(expected.shadow) & (expected.shadow == found.shadow)
    agreed = usable & same & (close | straight)
    tally.compared += int(agreed.sum()) + int(infinite.sum())
    tally.floats_only += 0 if pairs else int(agreed.sum())
    tally.twisted += int((agreed & ~straight).sum()) if pairs else 0
    tally.signs += int(undecided.sum())
    tally.infinite += int(infinite.sum())
    tally.undefined += int((~decided).sum())
    tally.special += int((decided & ~finite & ~infinite).sum())
    independent = inputs.independent
    residues = agreed & straight & bool(pairs)
    for counts, elements in ((tally.counts, agreed | infinite), (tally.straight, residues)):
        counts[name] = counts.get(name, 0) + elements[independent].sum(0)
    if defined != "reference" and not (expected.rooted or found.rooted):
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite reach allows everything
            reach = UNEXPLAINED * np.maximum(scale, np.abs(found.shadow))
            if expected.error is not None and found.error is not None:
                reach = 4 * (expected.error + found.error) + CLOSE * np.abs(expected.shadow)
            tally.apart += int((residues & (np.abs(expected.shadow - found.shadow) > reach)).sum())
    for known, elements in ((tally.alive, finite | infinite), (tally.finite, finite)):
        known[name] = np.logical_or(known.get(name, False), elements.any(0))
    if wrong.any():
        tally.failure = f"stage {stage!r} differs from the program"
        if not (wrong & ~lost & ~gained).any():
            tally.failure += ": only one of them has a value there"
        tally.counterexample = _counterexample(name, expected, found, wrong, close, inputs, stage)
        return False
    return True


def _counterexample(
    name: str,
    expected: FieldArray,
    found: FieldArray,
    wrong: Truths,
    close: Truths,
    inputs: Inputs,
    stage: str,
) -> Counterexample:
    visible = wrong & ~close
    trial, *position = map(int, np.argwhere(visible if visible.any() else wrong)[0])
    at = (trial, *position)
    residues = None
    if not visible.any():
        for x, y, prime in ((expected.p, found.p, "p"), (expected.q, found.q, "q")):
            if x is not None and y is not None and x[at] != y[at] and residues is None:
                residues = (int(y[at]), int(x[at]), prime)
    given: dict[str, Any] = {}
    for key, value in (*inputs.scalars.items(), *inputs.tensors.items()):
        if isinstance(value, FieldArray):
            given[key] = value.shadow[trial] if value.shadow.ndim else value.shadow
        elif inputs.varied and key in inputs.tensors:
            given[key] = value[trial]
        else:
            given[key] = value
    return Counterexample(
        stage,
        name,
        tuple(position),
        float(expected.shadow[at]),
        float(found.shadow[at]),
        given,
        residues,
        tuple(int(k) + 1 for k in np.flatnonzero(wrong.reshape(wrong.shape[0], -1).any(1))),
    )


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
) -> Certificate:
    """Compares every stage with the program as written, on the same random inputs, at the stage's extents.

    Rounds of `trials` are added until the probability of accepting a wrong stage is at most `bound`, where a
    theorem gives one (see `Certificate.bound`).
    `dtypes` tells which tensors are integers or truth values; `scalars` fixes some of the scalars.
    Unless `special` is "ignored", some trials have -inf in one input, and infinities and NaN are compared too
    (see `compare`). With `elsewhere`, its stages are also compared where a difference may show: at other sizes and
    integers, and on inputs at the thresholds of the program (see `eqfuse.verify.adversary`). `beside` are programs that stages
    are made of, over other axes.
    """
    given = scalars or {}
    groups: dict[tuple[tuple[str, int], ...], list[Stage]] = {}
    for stage in stages:
        groups.setdefault(tuple(sorted(stage.extents.items())), []).append(stage)
    forms = (program, *beside, *(stage.program for stage in stages if stage.program is not None))
    verification = Verification(trials, seed, FieldChoice.of(*forms), bound)
    first: tuple[Sequence[Stage], Source] | None = None
    for key, members in groups.items():
        extents = dict(key)
        specs = input_specs(program, extents, given, dtypes)
        source = Source((Side(program, extents),), specs, given, extents, special)
        first = first or (members, source)
        verification.run(members, source)
        if elsewhere is None:
            integers = {**small_integers(program), **given}
            verification.note_constant(
                str(expr) for expr, _ in constant_conditions(program, extents, integers)
            )
    if elsewhere is not None and stages:
        _look_elsewhere(verification, program, elsewhere, stages, dtypes, given, special, seed)
    if first is not None:
        verification.suppose(*first)
    return verification.certificate()


Elsewhere = Callable[[Mapping[str, int], int], Sequence[Stage]]
"""Stages at other extents; the number is that of the run, for those that take turns."""


def _look_elsewhere(
    verification: Verification,
    program: Program,
    elsewhere: Elsewhere,
    stages: Sequence[Stage],
    dtypes: Mapping[str, str] | None,
    fixed: Mapping[str, object],
    special: Special,
    seed: int,
) -> None:
    """Compares stages with the program at other sizes and integers than those of these, on inputs at its thresholds."""
    unseen = Unseen((program,))
    forms = (program, *(stage.program for stage in stages if stage.program is not None))
    numbers = constants(*forms)
    kind: Draws = "at thresholds" if any(map(branches_on_data, forms)) else "as usual"
    usual = {**small_integers(program), **fixed}
    unseen.look((stages[0].extents,), usual)
    rng = np.random.default_rng(seed)
    for number, setting in enumerate(settings((program,), fixed, rng, "stages")):
        values = {**usual, **setting.integers, **fixed}
        least = setting.least[0] if setting.least else {}
        try:
            found = extents_at(program, values, setting.choice, least, setting.pinned)
        except EqfuseError:  # a read that is outside its tensor at these sizes
            continue
        size = volume(program, found)
        if verification.reason or size > MOST_ELSEWHERE:
            continue
        specs = input_specs(program, found, values, dtypes)
        source = Source((Side(program, found),), specs, values, found, special)
        if number == 0:
            hard = ELSEWHERE_TRIALS if kind == "at thresholds" else 0
            verification.run(elsewhere(found, number), source, half=True, numbers=numbers, hard=hard)
        else:
            trials = min(max(ELSEWHERE_TRIALS, _many(size) // 8), max(1, MOST_ELSEWHERE // max(1, size)))
            source = replace(source, special="ignored", defined="common")
            verification.probe(elsewhere(found, number), source, numbers, number, trials, (kind,))
        unseen.look((found,), values)
    verification.note_constant(unseen.everywhere())


@dataclass(frozen=True)
class Source:
    """Where a group's inputs come from, and what the stages are compared with: the first program, where `expected` is
    none."""

    sides: tuple[Side, ...]
    specs: Mapping[str, InputSpec]
    scalars: Mapping[str, object]
    extents: Mapping[str, int]
    special: Special
    expected: Stage | None = None
    defined: Defined = "reference"

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(side.program for side in self.sides)

    @property
    def reference(self) -> Stage:
        """What the stages are compared with."""
        return self.expected or Stage.of_program("program", self.sides[0].program, self.sides[0].extents)

    def bounds(self, stages: Sequence[Stage], field: FieldChoice) -> list[Bound]:
        """What one trial can miss, for every stage."""
        integers = small_integers(*self.programs)
        names = dict.fromkeys(name for program in self.programs for name in program.scalars)
        scalars = {name: self.scalars.get(name, integers.get(name)) for name in names}

        def counted(stage: Stage) -> Counted:
            return count(stage.run, self.specs, scalars, self.extents, strict_casts=field.strict_casts)

        expected = counted(self.reference)
        difference = Difference.of(self.sides, expected, field.q, strict_casts=field.strict_casts)
        alone = difference.worst(expected)
        if alone.per_trial >= 1.0:  # nor is it told from another, which need not be counted
            return [alone] * len(stages)
        return [difference.worst(counted(stage)) for stage in stages]

    def evaluate(
        self, stages: Sequence[Stage], inputs: Inputs, domain: Domain
    ) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
        """The outputs of the reference, and by name of those stages that are programs of the same axes and
        integers: what they share is evaluated once."""
        if self.expected is not None:
            return self.expected.run(inputs, domain), {}
        first = self.sides[0]
        same = {
            stage.name: stage.program
            for stage in stages
            if stage.program is not None
            and stage.program.integers == first.program.integers
            and stage.extents == first.extents
        }
        expected, *others = _evaluated([first.program, *same.values()], first.extents, inputs, domain)
        return expected, dict(zip(same, others, strict=True))

    def draw(
        self,
        domain: FieldDomain,
        trials: int,
        rng: np.random.Generator,
        number: int,
        *,
        start: int = 0,
        scale: float = 1.0,
        varied: bool = False,
    ) -> Inputs:
        """The inputs of a round, by the patterns from `start` on; real values of tensors are multiplied by `scale`. Where
        they are `varied`, every trial has integers of its own."""
        infinities = self.special != "ignored"
        domain.trials = trials
        tensors = draw_specs(
            self.specs,
            domain,
            trials,
            rng,
            infinities=infinities,
            number=number,
            start=start,
            scale=scale,
            varied=varied,
        )
        scalars = draw_scalars(self.programs, self.scalars, domain, trials, rng, self.ends_of_ranges, number)
        return Inputs(tensors, scalars, self.extents, trials, first=start, varied=varied)

    @cached
    def ends_of_ranges(self) -> Mapping[str, Range]:
        """The scalars that positions are compared with in every program that has them, and what they may be."""
        found: dict[str, Range] = {}
        each = [
            (program, delimiting_scalars(program, extents, self.scalars))
            for program, extents in ((side.program, side.extents) for side in self.sides)
        ]
        for name in dict.fromkeys(name for _, ends in each for name in ends):
            ranges = [ends.get(name) for program, ends in each if name in program.scalars]
            known = [values for values in ranges if values is not None]
            if len(known) == len(ranges):
                values = min(low for low, _ in known), max(high for _, high in known)
                if all(self._reads_inside({name: end}) for end in range(values[0], values[1] + 1)):
                    found[name] = values
        return found

    def _reads_inside(self, integers: Mapping[str, int]) -> bool:
        """Whether all programs read within their tensors where these scalars have these values."""
        given = {**small_integers(*self.programs), **self.scalars, **integers}
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        return not any(
            any(True for _ in reads_outside(side.program, shapes, side.extents, given)) for side in self.sides
        )

    def least_rounds(self) -> int:
        """Integers are the same in all trials of a round, so they get a second one, ends of ranges a third, and
        scalars that end ranges one for each kind of length."""
        if self.ends_of_ranges:
            return 4
        if any(spec.delimits for spec in self.specs.values()):
            return 3
        return 2 if any(spec.kind != "real" for spec in self.specs.values()) else 1


class Verification:
    """Rounds of trials, each in a field of its own, and what they showed."""

    def __init__(self, trials: int, seed: int, field: FieldChoice, requested: float) -> None:
        if trials < 1:
            raise ValueError("at least one trial is needed")
        self._trials, self._seed, self._kind, self._requested = trials, seed, field, requested
        self._reports: list[StageReport] = []
        self._interpreted: set[str] = set()
        self._opaque: set[str] = set()
        self._extremes: dict[str, npt.NDArray[np.int64]] = {}
        self._primes = (0, 0)
        self._drawn = self._resampled = 0
        self._scale = 1.0
        self._bounds: list[tuple[Bound, int, int, int]] = []
        self._constant: set[str] = set()
        self._untaken: set[str] = set()
        self._supposed: set[str] = set()
        self._unreached: set[str] = set()
        self.branches = Branches(field.p, field.q)
        self._thresholds: int | None = None
        self._searched: list[Mapping[str, int]] = []
        self.reason = ""
        self.counterexample: Counterexample | None = None

    def run(
        self,
        stages: Sequence[Stage],
        source: Source,
        *,
        half: bool = False,
        numbers: Sequence[float] = (),
        hard: int = 0,
    ) -> None:
        """Compares the stages with the source until every output position was compared often enough, or
        never will be. With `half`, the first round has half as many trials, unless that is known to be too few; it has
        `hard` more at the thresholds of these numbers."""
        bounds = source.bounds(stages, self._kind)
        tallies = {stage.name: Tally() for stage in stages}
        least_rounds = source.least_rounds()
        usual = self._half(bounds) if half else self._trials
        drawn = total = 0
        for number in range(2 * ROUNDS):
            domain, rng = self._field(number)
            more = hard if number == 0 else 0
            start = total + usual if half else 0
            inputs = source.draw(domain, usual + more, rng, number, start=start, scale=self._scale)
            domain.careful = more > 0
            if more:
                indices = frozenset(name for program in source.programs for name in indexing_tensors(program))
                inputs = hardened(inputs, source.specs, indices, numbers, domain, rng, usual)
            drawn += full_entropy(usual, start)
            total += usual
            expected, known = source.evaluate(stages, inputs, domain)
            self._note_extremes(domain)
            self._drawn += usual
            self._resampled += usual if number >= least_rounds else 0
            rounds = total / self._trials
            # A wrong stage fails at once; the rounds go on for what was not compared.
            passed = True
            for stage in stages:
                outputs = expected, known[stage.name] if stage.name in known else stage.run(inputs, domain)
                tallies[stage.name] = self._tallied(
                    outputs, inputs, domain, tallies[stage.name], stage, source, number
                )
                passed &= not tallies[stage.name].failure
            self._interpreted |= domain.interpreted
            self._opaque |= domain.opaque
            if np.mean(domain.beyond_floats) > 0.5 and self._scale > SMALLEST_SCALE:
                self._scale /= 10  # exp(x / 0.001) is no float at numbers near 1
            pairs = zip(tallies.values(), bounds, strict=True)
            if (
                not passed
                or (
                    number + 1 >= least_rounds
                    and all(self._enough(*pair, number + 1, drawn, rounds) for pair in pairs)
                )
                or rounds >= ROUNDS
            ):
                break
            if half and number + 1 >= least_rounds:
                usual = self._trials if number < least_rounds else 2 * self._trials
        for stage, bound in zip(stages, bounds, strict=True):
            self._report(stage, tallies[stage.name])
            least = tallies[stage.name].least_straight() or 0
            self._bounds.append((bound, least, drawn, number + 1))

    def probe(
        self,
        stages: Sequence[Stage],
        source: Source,
        numbers: Sequence[float],
        number: int,
        trials: int,
        kinds: Sequence[Draws] = get_args(Draws),
    ) -> None:
        """Compares stages with the source on draws that look for a difference, usual ones and such as are at thresholds;
        they are no part of the bound. Where all stages are programs, every trial has integers of its own."""
        varied = all(stage.program is not None for stage in stages)
        indices = frozenset(name for program in source.programs for name in indexing_tensors(program))
        for kind in kinds:
            run = 2 * ROUNDS + 2 * number + (kind == "at thresholds")
            domain, rng = self._field(run)
            inputs = source.draw(domain, trials, rng, number % 4, scale=self._scale, varied=varied)
            if kind == "at thresholds":
                domain.careful = True
                inputs = hardened(inputs, source.specs, indices, numbers, domain, rng)
            expected, known = source.evaluate(stages, inputs, domain)
            for stage in stages:
                outputs = expected, known[stage.name] if stage.name in known else stage.run(inputs, domain)
                tally = self._tallied(outputs, inputs, domain, Tally(), stage, source, run)
                if tally.failure:
                    self.reason, self.counterexample = tally.failure, tally.counterexample
                    return
            if kind == "at thresholds":
                left_out = np.broadcast_to(domain.beyond_floats, trials)
                self._thresholds = (self._thresholds or 0) + int((~left_out).sum())
        integers = {name: n for name, n in source.scalars.items() if isinstance(n, int)}
        extents = {axis: n for stage in stages for axis, n in stage.extents.items()}
        searched = {**source.extents, **extents, **integers}
        if searched not in self._searched:
            self._searched.append(searched)

    def _tallied(
        self,
        outputs: tuple[Mapping[str, Any], Mapping[str, Any]],
        inputs: Inputs,
        domain: FieldDomain,
        tally: Tally,
        stage: Stage,
        source: Source,
        number: int,
    ) -> Tally:
        """The tally with the outputs of the source and of a stage. Where two programs differ, bounds of rounding errors tell
        whether orders were clear: the round is run again with them, without the trials that they leave open, if those are not most."""
        again = tally.copied()
        compared = partial(
            compare, inputs=inputs, stage=stage.name, special=source.special, defined=source.defined
        )
        if compared(*outputs, domain=domain, tally=tally) or domain.careful or source.defined == "reference":
            return tally
        domain, _ = self._field(number)
        domain.careful, domain.trials = True, inputs.trials
        expected, known = source.evaluate([stage], inputs, domain)
        found = known[stage.name] if stage.name in known else stage.run(inputs, domain)
        open_ = np.broadcast_to(domain.beyond_floats, inputs.trials)
        if open_.mean() > MOST_OPEN:
            return tally
        compared(expected, found, domain=domain, tally=again)
        return again

    def _half(self, bounds: Sequence[Bound]) -> int:
        """Half of the trials; all of them where half would need another round, as a bound or roots that earlier stages
        took of non-squares tell."""
        half = (self._trials + 1) // 2
        plain = full_entropy(half, half)
        enough = all(bound.reaches(self._requested, plain, plain) for bound in bounds)
        return half if enough and not any(report.twisted for report in self._reports) else self._trials

    def _enough(self, tally: Tally, bound: Bound, looks: int, drawn: int, rounds: float) -> bool:
        """Whether every position of a stage was compared, and the bound is reached, or given up, after so many looks at
        so many independent trials, which make up so many rounds."""
        least = tally.least()
        straight = tally.least_straight()
        if straight is None or (tally.twisted and (rounds >= STRAIGHT_ROUNDS or tally.hopeless(rounds))):
            return least >= ENOUGH
        if not bound.reaches(self._requested, straight, drawn, looks):
            return False
        return (straight if tally.twisted else least) >= ENOUGH

    def suppose(self, stages: Sequence[Stage], source: Source) -> None:
        """Notes the sides of branches on data of the programs and of the stages that no trial took, and compares the stages with
        the order of what they compare supposed, in all of them alike (see `eqfuse.verify.field.supposed`)."""
        limits = frozenset(name for name, spec in source.specs.items() if spec.delimits)
        found = [each for program in source.programs for each in self.branches.untaken(program, limits)]
        inside = self.branches.of_stages(source.programs)
        found += inside
        open_ = [each for each in found if each.kind == "real"]
        if open_ and not self.reason:
            parts = [open_]
            if not self._agree(open_, stages, source):
                parts = [[each] for each in open_] if 1 < len(open_) <= MOST_APART else []
                parts = [part for part in parts if self._agree(part, stages, source)]
            self._supposed |= {each.said for part in parts for each in part}
            rest = [each for each in open_ if each.said not in self._supposed]
            self._supposed |= (
                {each.said for each in self._ranked(rest, stages, source) or ()} if rest else set()
            )
        # What is between the values of a loop nest, ranges of which are not known, is listed: a - b may never be positive.
        read = {tensor.name for program in source.programs for tensor in program.tensors}
        listed = {each.said for each in found if each.kind == "given"}
        listed |= {each.said for each in inside if any(_is_named(part, read) for part in walk(each.node))}
        self._unreached |= listed - self._supposed
        self._untaken |= {each.said for each in found} - listed - self._supposed

    def agrees_in_any_order(self, stages: Sequence[Stage], source: Source) -> bool:
        """Whether stages agree with the source whatever the numbers of all branches are to each other. Where they do not, some
        order tells them apart, though no numbers may be in it."""
        branches = self.branches.on_data(source.programs)
        if not branches or self.reason or self._agree(branches, stages, source):
            return True
        return self._ranked(branches, stages, source) is not None

    def _agree(self, branches: Sequence[Untaken], stages: Sequence[Stage], source: Source) -> bool:
        """Whether the stages agree with the source where the order of what these branches compare is supposed."""
        nodes = dict.fromkeys(node for each in branches for node in each.compared)
        tallies = {stage.name: Tally() for stage in stages}
        domain, rng = self._field(8 * ROUNDS)
        inputs = source.draw(domain, self._trials, rng, 0, scale=self._scale)
        self._turn(nodes, stages, source, inputs, domain)
        domain.watch = None
        return self._same_outputs(stages, source, inputs, domain, tallies) and all(
            tally.least() >= ENOUGH for tally in tallies.values()
        )

    def _ranked(
        self, branches: Sequence[Untaken], stages: Sequence[Stage], source: Source
    ) -> list[Untaken] | None:
        """The branches that went both ways where the stages were compared with all numbers in some other order, those that
        comparisons for equality meet turned; None where stages differed from the source."""
        nodes = dict.fromkeys(node for each in branches for node in each.compared)
        equalities = [node for node in nodes if node.fn in ("eq", "ne")]
        went = {node: [False, False] for node in nodes if node not in equalities}
        tallies = {stage.name: Tally() for stage in stages}
        for number in range(ORDERS):
            domain, rng = self._field(8 * ROUNDS + 1 + number)
            inputs = source.draw(domain, self._trials, rng, 0, scale=self._scale)
            domain.supposed.rank(number)
            self._turn(equalities, stages, source, inputs, domain)

            def noted(node: Expr, fn: str, parts: Sequence[Any], domain: FieldDomain = domain) -> None:
                if isinstance(node, Call) and node in went:
                    found = domain.supposed.sides(*(rounded_of(_field_array(part, domain)) for part in parts))
                    went[node] = [had or has for had, has in zip(went[node], found, strict=True)]

            domain.watch = noted
            if not self._same_outputs(stages, source, inputs, domain, tallies):
                return None
            if all(map(all, went.values())):
                break
        if any(tally.least() < ENOUGH for tally in tallies.values()):
            return None
        return [each for each in branches if all(node in went and all(went[node]) for node in each.compared)]

    def _same_outputs(
        self,
        stages: Sequence[Stage],
        source: Source,
        inputs: Inputs,
        domain: FieldDomain,
        tallies: Mapping[str, Tally],
    ) -> bool:
        expected, known = source.evaluate(stages, inputs, domain)
        for stage in stages:
            outputs = known[stage.name] if stage.name in known else stage.run(inputs, domain)
            agreed = (expected, outputs, inputs, domain, tallies[stage.name], stage.name)
            if not compare(*agreed, special="ignored", defined=source.defined):
                return False
        return True

    def _turn(
        self,
        nodes: Iterable[Expr],
        stages: Sequence[Stage],
        source: Source,
        inputs: Inputs,
        domain: FieldDomain,
    ) -> None:
        """Supposes the order of what these branches compare."""
        places = {node: place for place, node in enumerate(nodes)}

        def supposed(node: Expr, fn: str, parts: Sequence[Any]) -> None:
            if node in places:
                reals = [_field_array(part, domain) for part in parts]
                domain.supposed.add(places[node], *(rounded_of(real) for real in reals))

        domain.watch = supposed
        for _ in range(min(2, len(places))):  # a supposed order may be part of what another branch compares
            _, known = source.evaluate(stages, inputs, domain)
            for stage in stages:
                if stage.name not in known:
                    stage.run(inputs, domain)

    def need_thresholds(self, source: Source) -> None:
        """Two programs with branches on data, of which no trial at thresholds could be compared, are not called equal."""
        if self._thresholds == 0 and any(map(branches_on_data, source.programs)):
            self._untaken.add(NO_THRESHOLDS)

    def note_constant(self, conditions: Iterable[str]) -> None:
        """Conditions on positions that have one value at the sizes used: the other side was not seen."""
        self._constant |= set(conditions)

    def _field(self, number: int) -> tuple[FieldDomain, np.random.Generator]:
        rng = np.random.default_rng([self._seed, number])
        domain = self._kind.domain(int(rng.integers(2**62)))
        domain.watch = self.branches.note
        self._primes = (domain.p, domain.q)
        return domain, rng

    def _note_extremes(self, domain: FieldDomain) -> None:
        for op, seen in domain.extremes.items():
            self._extremes[op] = self._extremes.get(op, 0) + seen.copy()

    def _report(self, stage: Stage, tally: Tally) -> None:
        self._reports.append(
            StageReport(
                stage.name,
                dict(stage.extents),
                stage.detail,
                tally.compared,
                tally.floats_only,
                tally.undefined,
                tally.special,
                tally.twisted,
                tally.signs,
                tally.infinite,
            )
        )
        if tally.failure and not self.reason:
            self.reason, self.counterexample = tally.failure, tally.counterexample
        elif tally.apart and not self.reason:
            self.reason = (
                f"stage {stage.name!r} agrees with the program modulo both primes, though their real values differ in "
                f"{tally.apart} elements: a constant is a multiple of a prime, or numbers are too large for float64"
            )
        elif tally.least() < ENOUGH and not self.reason:
            self.reason = (
                f"too little could be compared in stage {stage.name!r}: some output position was compared "
                f"{tally.least()} times in {self._drawn} trials ({tally.undefined} elements had no value in "
                f"the field, {tally.special} were infinite or NaN in the program itself, {tally.signs} have other residues "
                f"though the same real values)"
            )

    def certificate(self) -> Certificate:
        """The verdict. The bound is that of the worst stage, at its least compared output position."""
        if not self._reports and not self.reason:
            self.reason = "nothing was compared"
        nothing = Bound(0, 0, 1.0, ""), 0, 0, 1
        worst, compared, drawn, looks = max(
            self._bounds, key=lambda found: found[0].after(*found[1:]), default=nothing
        )
        return Certificate(
            ok=not self.reason,
            trials=self._drawn,
            primes=self._primes,
            bound=worst.after(compared, drawn, looks) if not self.reason else 1.0,
            requested=self._requested,
            compared=compared,
            theorem=worst.theorem,
            degree=worst.degree,
            terms=worst.terms,
            exponent=worst.exponent,
            roots=worst.roots,
            calls=worst.calls,
            per_trial=worst.per_trial,
            interpreted=tuple(sorted(self._interpreted)),
            opaque=tuple(sorted(self._opaque)),
            stages=tuple(self._reports),
            undefined=sum(report.undefined for report in self._reports),
            resampled=self._resampled,
            extremes={op: (int(n[0]), int(n[1]), int(n[2])) for op, n in sorted(self._extremes.items())},
            searched=tuple(self._searched),
            counterexample=self.counterexample,
            reason=self.reason,
            not_covered=(
                *NOT_COVERED,
                *((NO_THRESHOLDS,) if self._thresholds == 0 else ()),
                *(text + SAME_EVERYWHERE for text in sorted(self._constant)),
                *(
                    f"{text} in these trials"
                    for text in sorted(self._untaken - {NO_THRESHOLDS} | self._unreached)
                ),
            ),
            untaken=(*(text + SAME_EVERYWHERE for text in sorted(self._constant)), *sorted(self._untaken)),
            supposed=tuple(sorted(self._supposed)),
        )


def _is_named(node: Expr, read: Container[str]) -> bool:
    """Whether an expression is a value that a loop nest has a name for, inside of a kernel or between two."""
    return isinstance(node, Local) or (isinstance(node, Load) and node.tensor not in read)


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
) -> Certificate:
    """Whether two programs (or source texts) compute the same outputs from the same inputs, at any sizes.

    Outputs are matched by name. Programs whose outputs differ in name or shape, or which read a tensor differently, are
    not equivalent, and `reason` says so. Both have to have values for the same inputs (`x / z * z` has none at z = 0,
    `x` has); `domain="common"` compares them where both have. Beside the trials that the bound counts, other sizes,
    integers and values at the thresholds of both are tried (see `eqfuse.verify.adversary`). A side of a branch that no
    trial took, and of which nothing shows that it makes no difference, is a reason to refuse; `allow` has those, as
    `reason` writes them, that are known to make none, or "untaken" for all. Raises EqfuseError for a text that is no program, and for another `domain`.
    """
    if domain not in get_args(Domains):
        raise EqfuseError(f"domain is {domain!r}", hint="give 'same' or 'common'")
    allowed = allowed_texts(allow)
    defined: Defined = "same" if domain == "same" else "common"
    first, second = (each if isinstance(each, Program) else parse(each) for each in (left, right))
    given = {**small_integers(first, second), **(scalars or {})}
    verification = Verification(trials, seed, FieldChoice.of(first, second), bound)
    verification.reason = _interface_difference(first, second)
    if verification.reason:
        return verification.certificate()
    pair = JointSizes.of(first, second, given)
    verification.reason = pair.output_difference()
    if verification.reason:
        return verification.certificate()

    made = _compared(verification, pair, given, scalars or {}, defined, seed, trials)
    if made.at_sizes() and made.counterexample is None:
        brought = nearer_programs((first, second))
        if brought is not None:
            (one, two), numbers = brought
            near = Verification(trials, seed, FieldChoice.of(one, two), bound)
            sizes = JointSizes.of(one, two, given)
            if not sizes.output_difference():
                found = _compared(near, sizes, given, scalars or {}, defined, seed, trials)
                made = made.with_nearer(found, numbers)
    made = made.located(first.source, second.source).accepted(allowed)
    if made.counterexample is None:
        return made
    return replace(made, counterexample=smallest(first, second, made.counterexample))


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
    with progress("verify"):
        verification.run(stages, source)
        unseen.look((pair.left, pair.right), given)
        _look_for_difference(verification, unseen, given, fixed, defined, seed, trials)
        if not verification.agrees_in_any_order(stages, source):
            _look_for_difference(verification, unseen, given, fixed, defined, seed + 1, trials, LONGER)
        verification.suppose(stages, source)
        verification.need_thresholds(source)
    verification.note_constant(unseen.everywhere())
    return verification.certificate()


def _many(volume: int) -> int:
    """Trials of programs that are small: a branch and what shows it are rarely met together."""
    return min(MOST_TRIALS, ELEMENTS // max(1, volume))


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
    turning = (Setting(APART, {}, pinned=sizes) for sizes in unseen.turning({**usual, **fixed}))
    for number, setting in enumerate(chain(settings((first, second), fixed, rng), turning)):
        # Integer scalars are the same in all trials of a draw.
        exact = any(name not in fixed for name in setting.integers)
        for draw in range(DRAWS if exact else DRAWS_OF_SIZES if setting.choice is APART else 1):
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
            count = min(max(trials, times * _many(pair.volume)), MOST_ELEMENTS // max(1, pair.volume))
            count = -(-count // DRAWS) if exact else count
            verification.probe([stage], source, numbers, DRAWS * number + draw + LATER * (times > 1), count)
            unseen.look((pair.left, pair.right), values)


def _interface_difference(first: Program, second: Program) -> str:
    """Why two programs cannot be equivalent, from their names and ranks alone; empty if they may be."""
    left, right = ([output.name for output in program.outputs] for program in (first, second))
    if sorted(left) != sorted(right):
        return f"the programs have different outputs: {', '.join(left)} and {', '.join(right)}"
    axes = {output.name: output.axes for output in second.outputs}
    for output in first.outputs:
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
