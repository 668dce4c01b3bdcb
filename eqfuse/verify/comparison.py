"""Compares the outputs of two forms of a program, and counts what was compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eqfuse.verify.certificate import (
    Counterexample,
)
from eqfuse.verify.field.array import OPEN, POLE, TWISTED, UNDEFINED, FieldArray
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.homomorphisms import HASHED_EXP, HASHED_POINT
from eqfuse.verify.field.modular import Truths
from eqfuse.verify.sampling import Inputs

ENOUGH = 2
"""Comparisons that every output position needs."""
STRAIGHT_ROUNDS = 6
"""Rounds at most while every position was compared, but some only with roots continued to non-squares."""
CLOSE = 1e-9
"""Relative difference of float64 shadows that rounding can explain."""
UNEXPLAINED = 1e-6
"""Relative difference of float64 shadows that no rounding explains at inputs of ordinary size."""
HASHED = 1e-5
"""Relative difference of shadows that hashes of uninterpreted functions make of equal real values."""
UNTOUCHED = frozenset({"tanh", HASHED_EXP, HASHED_POINT})
"""Those whose shadows are the real values."""
ERRORS = 4
"""So many times the bounds of both rounding errors may two shadows of one number be apart: they are bounds to first order."""


Special = Literal["kept", "lost", "ignored"]
"""What a stage does with infinities: what the program does, that or NaN, or anything."""


Defined = Literal["reference", "same", "common"]
"""Where two forms have to have values: the second wherever the first has, both at the same places, or anywhere (what
is compared is what both define)."""


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
    # Positions that differed where rounding leaves an order open: only elements without such an order count there.
    doubtful: dict[str, Truths] = field(default_factory=dict)
    failure: str = ""
    counterexample: Counterexample | None = None
    # Whether residues alone differ, where real values are equal as far as hashes let them be; or real values alone.
    hidden: bool = False
    real: bool = False

    def copied(self) -> Tally:
        """The same, to add to."""
        return replace(
            self,
            counts=dict(self.counts),
            straight=dict(self.straight),
            alive=dict(self.alive),
            finite=dict(self.finite),
            doubtful=dict(self.doubtful),
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
    input brought in. Elements without a value in the field are counted, not compared, but that of two programs their real
    values may not be further apart than rounding explains. What the reference makes finite, the candidate may not make
    infinite or NaN. Unless `special` is "ignored", infinities of the reference must be there too, and NaN where all inputs
    are finite (a tile that a condition rules out may be left out, and with it 0 times an infinity). Where a division by 0 makes NaN in the reference, an infinity will do: c in c * sum(m) may be infinite,
    and some m be 0; and so will what follows from one, as exp(-c * sum(m)) does. Where it is "lost", NaN will do for
    an infinity. `defined` says what to do where one side has a value and the other has none, as 0 / 0 has none.
    """
    if set(reference) != set(candidate):
        tally.failure = (
            f"outputs are {_names(candidate)} in stage {stage!r}, {_names(reference)} in the program"
        )
        return False
    for name, expected in reference.items():
        left, right = field_array(expected, domain), field_array(candidate[name], domain)
        if left.shape != right.shape:
            shapes = f"{right.shape[1:]} in stage {stage!r}, {left.shape[1:]} in the program"
            tally.failure = f"{name!r} has shape {shapes}"
            return False
        # Where reals have left the range of floats, orders tell nothing.
        lost = domain.beyond_floats if defined != "reference" else domain.beyond_floats & inputs.hard
        real: Truths | np.bool_ = np.False_
        apart = HASHED if domain.opaque - UNTOUCHED else CLOSE
        if defined != "reference":
            undefined = ~(left.lacks(UNDEFINED) & right.lacks(UNDEFINED)) & ~_of_trials(lost, left)
            real = undefined & _are_apart(left, right, apart) if undefined.any() else np.False_
        left, right = (_without(side, lost) for side in (left, right))
        open_ = ~(left.lacks(OPEN) & right.lacks(OPEN))
        if left.shape and domain.undecided.any():
            open_ |= _of_trials(domain.undecided, left)
        near = CLOSE if domain.opaque & {HASHED_EXP, HASHED_POINT} else None
        if not _compare_output(
            name,
            left,
            right,
            inputs,
            tally,
            stage,
            special,
            defined,
            near,
            apart,
            real,
            open_,
            domain.careful,
        ):
            return False
    return True


def _names(outputs: Mapping[str, Any]) -> str:
    return ", ".join(sorted(outputs)) or "missing"


def field_array(value: Any, domain: FieldDomain) -> FieldArray:
    """Integers and truth values as reals: a stage may compute as reals what the program computes as integers."""
    return value if isinstance(value, FieldArray) else domain.lift(np.asarray(value))


def _of_trials(trials: Truths, value: FieldArray) -> Truths:
    """By element, whether it is of one of the trials."""
    return np.broadcast_to(trials.reshape(-1, *(1,) * (len(value.shape) - 1)), value.shape)


def _without(value: FieldArray, trials: Truths) -> FieldArray:
    """The value with some trials left out."""
    if not trials.any() or not value.shape:
        return value
    out = _of_trials(trials, value) * UNDEFINED
    return replace(value, marks=out if value.marks is None else value.marks | out)


def _are_apart(expected: FieldArray, found: FieldArray, apart: float) -> Truths:
    """Where real values differ by more than rounding, and what hashes make of equal numbers, can explain."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.maximum(np.maximum(np.abs(expected.shadow), np.abs(found.shadow)), 1.0)
        differ: Truths = np.abs(expected.shadow - found.shadow) > max(apart, UNEXPLAINED) * size
    return (
        differ & np.isfinite(expected.shadow) & np.isfinite(found.shadow) & ~_within_errors(expected, found)
    )


def _compare_output(
    name: str,
    expected: FieldArray,
    found: FieldArray,
    inputs: Inputs,
    tally: Tally,
    stage: str,
    special: Special,
    defined: Defined,
    near: float | None,
    apart: float,
    real: Truths | np.bool_,
    open_: Truths,
    careful: bool,
) -> bool:
    """Where `near` is given, real values that are so near decide nothing against residues. What is further `apart` is no
    hash's doing. Elements of which real values tell that they differ, and no residue, are `real`. An order was taken for those
    that are `open_` that rounding does not tell: they may differ, and where they do other open elements of the position count for
    nothing. A domain that is not `careful` does not tell which are open."""
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
    if not pairs or expected.rooted or found.rooted:  # nor where rounding explains that real values differ
        undecided = undecided | usable & ~same & _within_errors(expected, found)
    if near is not None:
        with np.errstate(invalid="ignore"):
            undecided = undecided | usable & (np.abs(expected.shadow - found.shadow) <= near * scale) & ~same
    if open_.any():
        undecided = undecided | usable & ~same & open_
    wrong = usable & ~same & ~undecided | real
    lost = gained = infinite = no_elements
    told = decided & ~open_
    if not (finite.all() and finite_too.all()):
        misplaced = np.isinf(expected.shadow) & (found.shadow != expected.shadow)
        misplaced &= ~np.isnan(found.shadow) | (special != "lost")
        plain = inputs.finite.reshape(-1, *(1,) * (expected.shadow.ndim - 1))
        divided = ~expected.lacks(POLE) & (np.isinf(found.shadow) | ~found.lacks(POLE))
        misplaced |= np.isnan(expected.shadow) & ~np.isnan(found.shadow) & ~divided & plain
        hard = inputs.hard.reshape(-1, *(1,) * (expected.shadow.ndim - 1))
        misplaced &= told & (special != "ignored") & ~hard
        lost = told & finite & ~finite_too
        if special == "lost":  # what an infinity among the inputs was lost to may be divided by another one
            lost &= plain | ~np.isnan(found.shadow)
        gained = told & finite_too & ~finite
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
            wrong |= told & values & (expected.shadow != found.shadow) & ~finite & ~finite_too
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
    differing = (open_ & decided & (usable & ~same | (finite != finite_too))).any(0)
    doubted = tally.doubtful.get(name, np.zeros((), dtype=bool))
    doubtful = doubted | differing
    if doubtful.any():
        tally.doubtful[name] = doubtful
    counted = ~doubtful | ~open_ & careful
    for counts, elements in ((tally.counts, agreed | infinite), (tally.straight, residues)):
        so_far = np.where(differing & ~doubted, 0, counts.get(name, 0))
        counts[name] = so_far + (elements & counted)[independent].sum(0)
    if defined != "reference" and not (expected.rooted or found.rooted):
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite reach allows everything
            reach = UNEXPLAINED * np.maximum(scale, np.abs(found.shadow))
            if expected.error is not None and found.error is not None:
                reach = ERRORS * (expected.error + found.error) + CLOSE * np.abs(expected.shadow)
            tally.apart += int((residues & (np.abs(expected.shadow - found.shadow) > reach)).sum())
    for known, elements in ((tally.alive, finite | infinite), (tally.finite, finite)):
        known[name] = np.logical_or(known.get(name, False), elements.any(0))
    if wrong.any():
        tally.failure = differs(stage)
        if not (wrong & ~lost & ~gained).any():
            tally.failure += ": only one of them has a value there"
        with np.errstate(invalid="ignore"):
            near_by = (np.abs(expected.shadow - found.shadow) <= apart * scale) & finite & finite_too
        tally.hidden, tally.real = bool((near_by | ~wrong).all()), bool((real | ~wrong).all())
        shown = close if tally.hidden else near_by
        tally.counterexample = _counterexample(name, expected, found, wrong, shown, inputs, stage)
        return False
    return True


def differs(stage: str) -> str:
    """What is said of a stage that differs."""
    return f"stage {stage!r} differs from the program"


def _within_errors(expected: FieldArray, found: FieldArray) -> Truths:
    """Where real values are no further apart than rounding may take them, as far as that is known."""
    reach = sum(ERRORS * side.error for side in (expected, found) if side.error is not None)
    with np.errstate(invalid="ignore"):
        within: Truths = np.abs(expected.shadow - found.shadow) <= reach
    return within


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
