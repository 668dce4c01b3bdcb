"""A derivation: how the kernels of a program follow from its definitions, and whether that holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eqfuse.proof.congruence import Classes
from eqfuse.proof.examine import Verdict, examine
from eqfuse.proof.nodes import KernelProof, Proof
from eqfuse.proof.serialise import from_json, to_json
from eqfuse.rules.scope import RuleScope, current
from eqfuse.terms.parser import parse

if TYPE_CHECKING:
    from eqfuse.proof.outline import Block, Detail


@dataclass(frozen=True)
class Derivation:
    """The chain of every output from its definition to its prepared form, and of every state to its merge.

    `proof` is the data; `claims` what the compiled kernel runs and `classes` the e-graphs that the proof was
    taken from, where the derivation comes from a kernel. `scope` has the rules that it was derived with (those in
    force when it is checked, where that is None).
    """

    proof: Proof
    claims: tuple[KernelProof, ...] | None = None
    classes: Mapping[str, Classes] = field(default_factory=dict)
    scope: RuleScope | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that it rests on."""
        return self.proof.rules

    @property
    def steps(self) -> int:
        """Steps of all chains, those that only prove conditions not counted."""
        return sum(len(chain) for _, chain in self.proof.chains())

    def check(self, program: str | None = None) -> Verdict:
        """Replays every step by matching, without the e-graph; falsy where one is refused, `why` then names it.

        A derivation taken from a kernel has to prove what that kernel runs; with `program` (a source
        text) it has to be of that program. Raises ParseError where `program` is none.
        """
        origin = self.proof.origin
        other = program and parse(program, scalars=dict(origin.scalars), strict_casts=origin.strict_casts)
        with (self.scope or current()).entered():
            return examine(self.proof, other or None, self.claims)

    def to_json(self) -> str:
        """The derivation as JSON text: `from_json` reads it back."""
        return to_json(self.proof)

    @staticmethod
    def from_json(text: str) -> Derivation:
        """The derivation that a text holds. Raises EqfuseError where it is malformed, naming the place."""
        return Derivation(from_json(text))

    def blocks(self, detail: Detail = "short") -> list[Block]:
        """What the derivation says, to be printed, and whether its replay agrees."""
        from eqfuse.proof.check import known_rules
        from eqfuse.proof.outline import Code, Heading, Outline, Prose  # printing is for those who ask

        found = list(Outline(self.proof, known_rules(self.proof), detail).blocks())
        verdict = self.check()
        said = f"{verdict.why}, each replayed without the e-graph" if verdict else f"REFUSED: {verdict.why}"
        used = frozenset(self.rules)
        added = [str(rule) for rule in (self.scope or current()).added if rule.name in used]
        mine: list[Block] = [Heading("added rules"), Code("\n".join(added))] if added else []
        return [*found, *mine, Heading("checked"), Prose(said)]

    def _repr_html_(self) -> str:
        """Whether the derivation holds, and behind a heading its steps."""
        from html import escape

        from eqfuse.html import folded
        from eqfuse.proof.printer import plain

        return f"<div><b>{escape(str(self))}</b>{folded('steps', plain(self.blocks()))}</div>"

    def __str__(self) -> str:
        verdict = self.check()
        return f"derivation: {verdict.why}" if verdict else f"derivation REFUSED: {verdict.why}"
