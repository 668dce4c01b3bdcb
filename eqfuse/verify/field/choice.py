"""Which field programs are run in: its primes, and whether casts or steps decide anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eqfuse.terms.functions import CIRCULAR
from eqfuse.terms.nodes import Call, Program, walk
from eqfuse.verify.field.casts import CastAware, decides_on_casts
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.primes import CIRCLE_P, CIRCLE_Q, P, Q


def primes_for(functions: Iterable[str]) -> tuple[int, int]:
    """p and q: those in which sines and cosines are coordinates of points, where there are some among these functions."""
    return (P, Q) if CIRCULAR.isdisjoint(functions) else (CIRCLE_P, CIRCLE_Q)


@dataclass(frozen=True)
class FieldChoice:
    """One field for all programs that are compared."""

    p: int = P
    q: int = Q
    strict_casts: bool = False
    cast_aware: bool = False

    @classmethod
    def of(cls, *programs: Program) -> FieldChoice:
        strict = any(program.strict_casts for program in programs)
        exprs = (output.expr for program in programs for output in program.outputs)
        p, q = primes_for(node.fn for node in walk(*exprs) if isinstance(node, Call))
        return cls(p, q, strict, decides_on_casts(*programs))

    def domain(self, seed: int) -> FieldDomain:
        """The field, with keys and bases of its own for each seed."""
        kind = CastAware if self.cast_aware else FieldDomain
        return kind(self.p, self.q, seed=seed, strict_casts=self.strict_casts)
