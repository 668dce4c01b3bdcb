"""A field: its primes and keys, how numbers stand in it, and what is noted of the values that are made there."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from eqfuse.terms.floats import IRRATIONAL, FloatDomain
from eqfuse.verify.field.array import LEAST, POLE, UNDEFINED, FieldArray, joined_marks, marked
from eqfuse.verify.field.modular import PowerGroup, Reals, Residues, Truths, inverse, scramble
from eqfuse.verify.field.primes import P, Q, rational, root_of_minus_one
from eqfuse.verify.field.rounding import VANISHED
from eqfuse.verify.field.supposed import Supposed


class FieldState:
    """What one field is. `seed` chooses omega and the keys of the uninterpreted functions.

    `opaque` collects the functions that were evaluated as hashes; `strict_casts` makes casts opaque (they are
    identities otherwise). `beyond_floats` are the trials (all, where it is a single one) in which some real value
    overflowed or vanished, so that orders may be wrong; where it is `careful`, which costs time, also those in which
    rounding errors leave an order open, and not those in which a value `vanished`, which has an error there. Of these, `undecided`
    are those in which a condition or a step is open, which no element tells; numbers of which one was taken are marked `OPEN`.
    Signs of NaN, which are 0, are values where `signs_of_nan`, and undefined elsewhere. `trials` is their number, where it is known, and `first` the place of
    the first one in its round. `extremes` counts, per reduction of max or min, how often the extreme
    was in the first, middle and last part of the axis.
    """

    def __init__(
        self,
        p: int = P,
        q: int = Q,
        generator: int | None = None,
        seed: int = 0,
        *,
        strict_casts: bool = False,
    ) -> None:
        generator = pow(2, (p - 1) // q, p) if generator is None else generator
        if (p - 1) % q or not 2**8 < p < 2**31 or pow(generator, q, p) != 1 or generator % p in (0, 1):
            raise ValueError(f"need primes p = kq + 1 below 2**31 and a generator of order q, got {p}, {q}")
        self.p, self.q = p, q
        self.group = PowerGroup(p, q, generator)
        self.strict_casts = strict_casts
        self.careful = False
        self.signs_of_nan = False
        self.trials: int | None = None
        self.first = 0
        self.opaque: set[str] = set()
        self.interpreted: set[str] = set()
        self.extremes: dict[str, npt.NDArray[np.int64]] = {}
        self.beyond_floats: Truths = np.zeros(1, dtype=bool)
        self.undecided: Truths = np.zeros(1, dtype=bool)
        self.vanished: Truths = np.zeros(1, dtype=bool)
        self._seed = seed
        self.supposed = Supposed((p, q), seed)
        self._log_omega, self._turn = (int(n) for n in np.random.default_rng(seed).integers(1, q, 2))
        self._floats = FloatDomain("float64")
        self._i = root_of_minus_one(p) if p % 4 == 1 else 0

    @property
    def omega(self) -> int:
        return pow(self.group.generator, self._log_omega, self.p)

    def full(self, shape: tuple[int, ...], number: float) -> FieldArray:
        p, q = rational(number, self.p), rational(number, self.q)
        shadow = np.full(shape, float(number))
        return FieldArray(np.full(shape, p, dtype=np.int64), np.full(shape, q, dtype=np.int64), shadow)

    def lift(self, integers: npt.NDArray[Any]) -> FieldArray:
        exact = np.asarray(integers).astype(np.int64)
        return FieldArray(exact % self.p, exact % self.q, exact.astype(np.float64))

    def irrational(self, name: str, shape: tuple[int, ...]) -> FieldArray:
        """log2 e has residues at random, others in every trial, as no field has the number itself: what is right for
        all of them multiplies by it and divides by it in the right places. ln 2 is its inverse."""
        trials, rest = (
            self.first + np.arange(shape[0], dtype=np.int64) + 1,
            (shape[0], *(1,) * (len(shape) - 1)),
        )

        def residues(modulus: int, key: str) -> Residues:
            found = scramble(trials, self._key(key)) % (modulus - 1) + 1
            found = found if name == "log2_e" else inverse(found, modulus)
            return np.broadcast_to(found.reshape(rest), shape)

        p, q = residues(self.p, "log2_e modulo p"), residues(self.q, "log2_e modulo q")
        return FieldArray(p, q, np.full(shape, IRRATIONAL[name]), formal=True)

    def numbers(self, values: Reals) -> FieldArray:
        """These numbers themselves, each as its shortest decimal."""
        unique, at = np.unique(values, return_inverse=True)
        p, q = (
            np.array([rational(float(number), modulus) for number in unique], dtype=np.int64)[at].reshape(
                values.shape
            )
            for modulus in (self.p, self.q)
        )
        return FieldArray(p, q, np.asarray(values, dtype=np.float64))

    def draw(self, shadow: Reals, rng: np.random.Generator) -> FieldArray:
        """Random values with the given shadows: plus or minus a square modulo p, anything modulo q.

        0 and infinities have the residues 0.
        """
        positive = self.group.powers(rng.integers(1, self.p, size=shadow.shape))
        p = np.where(shadow < 0, self.p - positive, positive)
        q = rng.integers(1, self.q, shadow.shape)
        random = (shadow != 0) & np.isfinite(shadow)
        return FieldArray(np.where(random, p, 0), np.where(random, q, 0), shadow)

    def _key(self, fn: str) -> int:
        return crc32(fn.encode()) * 0x9E3779B97F4A7C15 + self._seed * 0xD1B54A32D192ED03 + 1

    def _note_beyond_floats(self, elements: Truths) -> None:
        """What has no dimension of trials counts for all of them."""
        if elements.any():
            self.beyond_floats = self.beyond_floats | self._by_trial(elements)

    def _note_undecided(self, elements: Truths) -> None:
        """Where rounding leaves a condition or a step open."""
        if elements.any():
            self._note_beyond_floats(elements)
            self.undecided = self.undecided | self._by_trial(elements)

    def _keep_vanished(self, result: FieldArray, vanished: Truths) -> None:
        """Gives what is 0 in float64, and not in reals, the least number of its sign. In which order such numbers are is not
        known, which only a `careful` domain keeps with them."""
        if not vanished.any():
            return
        result.shadow = np.where(vanished, np.copysign(LEAST, result.shadow), result.shadow)
        if result.error is not None:
            result.error = np.where(vanished, np.maximum(result.error, VANISHED), result.error)
        else:
            self._note_beyond_floats(vanished)
            self.vanished = self.vanished | self._by_trial(vanished)

    def _by_trial(self, elements: Truths) -> Truths:
        batched = elements.ndim and (self.trials is None or elements.shape[0] == self.trials)
        return (
            np.asarray(elements.reshape(elements.shape[0], -1).any(1)) if batched else np.ones(1, dtype=bool)
        )

    def _settle(
        self, result: FieldArray, *args: FieldArray, poles: Truths | np.bool_ | None = None
    ) -> FieldArray:
        """Marks overflow of the shadow, clears residues of infinities and NaN, joins the marks.

        `poles` are elements where finite arguments rightly give an infinity or NaN.
        """
        result.marks = joined_marks(result.marks, *(arg.marks for arg in args), shape=result.shape)
        result.rooted = result.rooted or any(arg.rooted for arg in args)
        finite = np.isfinite(result.shadow)
        if not finite.all():
            special = ~finite
            result.p = None if result.p is None else np.where(special, 0, result.p)
            result.q = None if result.q is None else np.where(special, 0, result.q)
            if result.error is not None:  # an infinity that is no overflow, which is noted below, is exact
                result.error = np.where(special, 0.0, result.error)
            made = special
            for arg in args:
                made = made & np.isfinite(arg.shadow)
            poles = made & (np.False_ if poles is None else poles)
            self._note_beyond_floats(made & ~poles)
            marks = marked(UNDEFINED, made & ~poles), marked(POLE, poles)
            result.marks = joined_marks(result.marks, *marks, shape=result.shape)
        return result
