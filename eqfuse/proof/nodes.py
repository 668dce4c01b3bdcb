"""Derivations as data: from the definitions of a program to what its kernels run.

derivation ::= Derivation(program, outputs, kernels)
output     ::= OutputProof(name, definition, steps)         to the prepared form
kernel     ::= KernelProof(name, outputs, leaves, groups, walks)
group      ::= GroupProof(axis, states, obstacles)          what one pass over an axis keeps
state      ::= StateProof(name, op, body, update, combine, finish)
merged     ::= Merged(definition, steps, value)             over two parts: by rewrites, then guards

chain      ::= Step*                    each step's `after` is the next one's `before`
Step       ::= one instance of a rewrite, at a position of `before`, read forward or backward
Inference  ::= a rule, the values of its variables, and one premise for each of its conditions
Premise    ::= Holds(fact, moves)       a fact that was inferred or given, its arguments moved to those that
                                        the condition has, each by a chain
             | Equal(chain)             two terms are equal
             | Differ()                 two terms or names are not the same
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eqfuse.proof.syntax import Position, Term
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Call, Program, post_order
from eqfuse.terms.nodes import walk as subexpressions


@dataclass(frozen=True)
class Fact:
    """`relation` holds of `args`: by an inference, or given (by the program's syntax alone) where that is None."""

    relation: str
    args: tuple[Term | str, ...]
    inference: Inference | None


@dataclass(frozen=True)
class Holds:
    """`moves` has one chain per argument that is a term: from the condition's argument to the fact's."""

    fact: Fact
    moves: tuple[Chain, ...]


@dataclass(frozen=True)
class Equal:
    chain: Chain


@dataclass(frozen=True)
class Differ:
    pass


Premise = Holds | Equal | Differ


@dataclass(frozen=True, eq=False)
class Inference:
    """An instance of a rule. Inferences are shared: compared by identity."""

    rule: str
    values: Mapping[str, Term | str]
    premises: tuple[Premise, ...]


@dataclass(frozen=True)
class Step:
    inference: Inference
    forward: bool
    position: Position
    before: Term
    after: Term


Chain = tuple[Step, ...]


@dataclass(frozen=True)
class OutputProof:
    """`name[axes]` from its definition to its prepared form: what the steps end at, `definition` without any."""

    name: str
    axes: tuple[str, ...]
    definition: Term
    steps: Chain

    @property
    def prepared(self) -> Term:
        return self.steps[-1].after if self.steps else self.definition


@dataclass(frozen=True)
class Merged:
    """A state over the union of two parts. The steps lead from its definition to its value in terms of states over
    parts; `value` is that value as it is run, states named, repairs guarded."""

    definition: Term
    steps: Chain
    value: Term

    @property
    def derived(self) -> Term:
        return self.steps[-1].after if self.steps else self.definition


@dataclass(frozen=True)
class StateProof:
    """`name = op over the axis of body`. `update` is of what a loop has seen and the next tile, `combine` of two
    parts, both None where the group is not fused; `finish` is the exact value where guards made the carried one differ."""

    name: str
    op: str
    body: Term
    auxiliary: bool
    update: Merged | None
    combine: Merged | None
    finish: Term | None


@dataclass(frozen=True)
class GroupProof:
    """What is kept while an axis is walked. `obstacles` say why it is not fused."""

    axis: str
    states: tuple[StateProof, ...]
    obstacles: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        return all(s.update is not None and s.combine is not None for s in self.states)


@dataclass(frozen=True)
class Walk:
    """How a kernel walks an axis, by a name of loops.plan.WAYS. `where` is the condition on its positions, in terms of an axis of the
    kernel's outputs, under which the states of a scan stand for a part of it."""

    axis: str
    schedule: str
    where: str = ""


@dataclass(frozen=True)
class Stored:
    """`name[axes] = value`: an output or a temporary of a kernel, in terms of its states and earlier temporaries."""

    name: str
    axes: tuple[str, ...]
    value: Term


@dataclass(frozen=True)
class KernelProof:
    """`leaves` says what names that the rules did not look into stand for. With `in_order`, an axis, it stores its outputs position
    by position of that one, from those that it has stored before."""

    name: str
    outputs: tuple[Stored, ...]
    leaves: Mapping[str, Term]
    groups: tuple[GroupProof, ...]
    walks: tuple[Walk, ...]
    in_order: str


@dataclass(frozen=True)
class Origin:
    """The program that a derivation is of. Casts are strict only where the program has one."""

    source: str
    scalars: Mapping[str, float]
    strict_casts: bool

    @staticmethod
    def of(program: Program, scalars: Mapping[str, float]) -> Origin:
        return Origin(program.source, scalars, program.strict_casts and has_casts(program))


def has_casts(program: Program) -> bool:
    """Whether a cast is written in the program."""
    roots = (output.expr for output in program.outputs)
    return any(isinstance(node, Call) and node.fn in CASTS for node in subexpressions(*roots))


@dataclass(frozen=True)
class Proof:
    """All of a derivation. `gaps` say what could not be derived; a proof with gaps is none. `unread` are the rows of a text
    that nothing in it refers to."""

    origin: Origin
    outputs: tuple[OutputProof, ...]
    kernels: tuple[KernelProof, ...]
    gaps: tuple[str, ...]
    unread: tuple[str, ...] = ()

    def chains(self) -> Iterator[tuple[str, Chain]]:
        """Every chain with what it is of."""
        for output in self.outputs:
            yield f"output {output.name}", output.steps
        for kernel in self.kernels:
            for group in kernel.groups:
                for state in group.states:
                    for kind, merged in (("update", state.update), ("combine", state.combine)):
                        if merged:
                            yield f"{kind} of {state.name} in {kernel.name}", merged.steps

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that it rests on, in order of use."""
        used = inferences(*(chain for _, chain in self.chains()))
        return tuple(dict.fromkeys(inference.rule for inference in used))


def rests_on(inference: Inference) -> Iterator[Inference]:
    """The inferences that an inference's conditions name directly."""
    for premise in inference.premises:
        match premise:
            case Holds(fact, moves):
                if fact.inference is not None:
                    yield fact.inference
                for chain in moves:
                    yield from (step.inference for step in chain)
            case Equal(chain):
                yield from (step.inference for step in chain)


def inferences(*chains: Chain) -> Iterator[Inference]:
    """Every inference that chains rest on, premises first."""
    used = (step.inference for chain in chains for step in chain)
    return post_order(used, lambda inference: tuple(rests_on(inference)))
