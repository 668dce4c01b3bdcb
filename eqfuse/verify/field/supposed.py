"""Orders of numbers that are supposed: for branches whose other side no real numbers take.

Whatever two numbers are, a program and a stage of it that compare the same two have to agree whichever is said to be the
greater. So where a branch went one way in all trials, it is said to go the other way in half of them, in program and stages
alike: wherever two numbers meet whose difference has the residue of one that the branch compared. All numbers of a branch
change places at once, so that what was below the others is above them, and maxima of them are still those of an order.
Programs that agree then agree on both sides of the branch, for all numbers. Those that do not may still be equal: the other
side may be one that nothing takes.

What one form takes an extreme of at once another may take in parts, and the extremes of these: numbers that change places with
one another alone are in no order then. So there is a second way, in which all numbers are `ranked`: by a hash of their
residues, wherever two of them meet. That is an order of all numbers, which no sum or product keeps.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from eqfuse.verify.field.modular import Reals, Residues, Truths, scramble


class Number(Protocol):
    """What is known of an array of numbers: residues modulo p and modulo q, where they are, and real values."""

    @property
    def p(self) -> Residues | None: ...
    @property
    def q(self) -> Residues | None: ...
    @property
    def shadow(self) -> Reals: ...


class Supposed:
    """Differences whose sign is supposed, by the modulus of their residues, with the branch that they are of: none at
    first."""

    def __init__(self, moduli: tuple[int, int], seed: int) -> None:
        self._moduli, self._key = moduli, seed * 0x9E3779B97F4A7C15 + 1
        self._known: list[Residues] = [np.zeros(0, np.int64)] * 2
        self._branches: list[Residues] = [np.zeros(0, np.int64)] * 2
        self._ranking: tuple[int, int] | None = None
        self.first = 0

    def __bool__(self) -> bool:
        return self.ranked or any(known.size for known in self._known)

    @property
    def ranked(self) -> bool:
        """Whether all numbers are in the order of a hash."""
        return self._ranking is not None

    def rank(self, number: int) -> None:
        """Ranks all numbers; every other order is the one before it, turned round."""
        self._ranking = self._key + number // 2, -1 if number % 2 else 1

    def ranks(self, residues: Residues) -> Reals:
        """The places of numbers in that order."""
        assert self._ranking is not None
        key, turn = self._ranking
        return turn * scramble(residues, key).astype(np.float64)

    def sides(self, x: Number, y: Number | None = None) -> tuple[bool, bool]:
        """Whether the first of two numbers (or one and 0) is anywhere below the second as they are ranked, and above."""
        below, apart = self._below(x, y)
        return bool((apart & below).any()), bool((apart & ~below).any())

    def _below(self, x: Number, y: Number | None) -> tuple[Truths, Truths]:
        """By rank, and where that is so: of two finite numbers that are not equal."""
        finite = np.isfinite(x.shadow) if y is None else np.isfinite(x.shadow) & np.isfinite(y.shadow)
        for mine, other in self._residues(x, y):
            if mine is not None and other is not None:
                return self.ranks(mine) < self.ranks(np.asarray(other)), finite & (mine != other)
        return np.zeros_like(finite), np.zeros_like(finite)

    def add(self, branch: int, x: Number, y: Number | None = None) -> None:
        """Supposes the order of two numbers, of one and 0, at all elements that are not equal."""
        for at, found in enumerate(self._differences(x, y)):
            if found is not None:
                finite = np.isfinite(x.shadow) if y is None else np.isfinite(x.shadow) & np.isfinite(y.shadow)
                new = np.unique(self._folded(found[np.broadcast_to(finite, found.shape)], at))
                all_ = np.concatenate([self._known[at], new[new != 0]])
                of = np.concatenate([self._branches[at], np.full(all_.size - self._known[at].size, branch)])
                self._known[at], first = np.unique(all_, return_index=True)
                self._branches[at] = of[first]

    def instead(self, below: Any, x: Number, y: Number | None = None) -> Truths:
        """Whether the first is below the second (or 0), or equal to it: as it is said, or as it is supposed."""
        said = np.asarray(below)
        if self.ranked:
            first, apart = self._below(x, y)
            return np.asarray(np.where(apart, first, said))
        return self.turned(said, x, y)

    def turned(self, said: Truths, x: Number, y: Number | None = None) -> Truths:
        """What is said of two numbers, or the contrary where their difference is one whose sign is supposed."""
        if not any(known.size for known in self._known):
            return said
        for at, found in enumerate(self._differences(x, y)):
            known = self._known[at]
            if found is None or not known.size:
                continue
            folded = self._folded(found, at)
            place = np.minimum(np.searchsorted(known, folded), known.size - 1)
            finite = np.isfinite(x.shadow) if y is None else np.isfinite(x.shadow) & np.isfinite(y.shadow)
            trial = (
                (self.first + np.arange(len(found))).reshape(-1, *(1,) * (found.ndim - 1))
                if found.ndim
                else 0
            )
            turned = scramble(self._branches[at][place] * 1024 + trial, self._key) & 1 == 1
            return np.asarray(said ^ (turned & (known[place] == folded) & finite))
        return said

    def _folded(self, differences: Residues, at: int) -> Residues:
        """Residues up to their sign."""
        return np.minimum(differences, self._moduli[at] - differences) % self._moduli[at]

    def _differences(self, x: Number, y: Number | None) -> tuple[Residues | None, Residues | None]:
        """Residues of the difference: modulo p, or modulo q where there is none."""
        for at, (mine, other) in enumerate(self._residues(x, y)):
            if mine is not None and other is not None:
                found = np.asarray((mine - other) % self._moduli[at])
                return (found, None) if at == 0 else (None, found)
        return None, None

    @staticmethod
    def _residues(x: Number, y: Number | None) -> list[tuple[Residues | None, Residues | int | None]]:
        """Of both numbers, the second of which may be 0, modulo p and modulo q."""
        return [(x.p, 0 if y is None else y.p), (x.q, 0 if y is None else y.q)]
