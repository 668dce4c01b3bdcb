"""What an explanation says, before it has a form: headings, sentences, equations and steps.

The short form folds unit laws and like steps into one line, names long terms once, and leaves out conditions that
only say when a rule is tried; the full form has every step and why each condition holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eqfuse.loops.plan import WAYS
from eqfuse.proof.check import Statement
from eqfuse.proof.elaborate import named, over_parts, reading
from eqfuse.proof.nodes import (
    Chain,
    Equal,
    GroupProof,
    Holds,
    Inference,
    KernelProof,
    Merged,
    OutputProof,
    Proof,
    StateProof,
    Step,
    Walk,
)
from eqfuse.proof.notation import Names, Notation
from eqfuse.proof.sentences import conditions, sentence
from eqfuse.proof.syntax import Position, Term, term, transform, walk
from eqfuse.rules.egraph.encode import Encoder
from eqfuse.rules.repairs import FREE, Repairs, written_name
from eqfuse.rules.rule import Rule
from eqfuse.rules.split import reads_state
from eqfuse.rules.tables import algebra
from eqfuse.terms.folds import fold_of
from eqfuse.terms.nodes import Const, Expr, Local, Scalar

Detail = Literal["short", "full"]

LONG = 18
"""Characters from which a term that is repeated gets a name."""
SAVED = 30
"""Characters that a name has to save."""
MOST_NAMES = 9

GUARDS = "where a factor has no inverse yet, the state is the identity and any finite factor is right"
"""Why a value may be run with guards (docs/repairs.md): no equality, so a step of its own kind."""

HELPERS = frozenset(rule.name for rule in (*algebra.SIMPLIFY.rules, *algebra.EXPAND.rules))
"""Unit laws and quotients or differences of like forms: consecutive ones make one line of the short form."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Prose:
    text: str


@dataclass(frozen=True)
class Equation:
    """`left = right`, the first line of a chain where steps follow."""

    left: str
    right: Term
    names: Names
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One line of a chain: the term that the rules give, what changed in it, and why that may be."""

    right: Term
    changed: Position | None
    rules: tuple[str, ...]
    whys: tuple[str, ...]
    conditions: tuple[str, ...]
    proofs: tuple[str, ...]
    names: Names


@dataclass(frozen=True)
class Code:
    """Text that is printed as it is."""

    text: str


Block = Heading | Prose | Equation | Line | Code


@dataclass
class Outline:
    """The blocks of one derivation."""

    proof: Proof
    rules: Mapping[str, Rule]
    detail: Detail = "short"
    abbreviations: dict[Term, str] = field(default_factory=dict)
    _introduced: set[str] = field(default_factory=set)
    _repeats: int = 0
    _repairs: Repairs = field(default_factory=Repairs)
    _unread: dict[Term, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        proof = self.proof
        roots = [o.definition for o in proof.outputs]
        roots += [o.prepared for o in proof.outputs if o.steps]
        roots += [s.body for k in proof.kernels for g in k.groups for s in g.states]
        self.abbreviations = abbreviations(roots)

    def blocks(self) -> Iterator[Block]:
        """Everything in order: outputs, then kernels."""
        proof = self.proof
        for output in proof.outputs:
            yield from self._output(output)
        for kernel in proof.kernels:
            yield from self._kernel(kernel)
        for gap in proof.gaps:
            yield Prose(f"NOT DERIVED: {gap}")

    # -- whole axes --------------------------------------------------------------------------------

    def _output(self, output: OutputProof) -> Iterator[Block]:
        names = self.abbreviations
        left = f"{output.name}[{','.join(output.axes)}]" if output.axes else output.name
        yield Heading(f"{left} as it is written")
        terms = [output.definition, *(step.after for step in output.steps)]
        yield from self._new_names(terms if self.detail == "full" else [terms[0], terms[-1]])
        yield Equation(left, output.definition, names)
        yield from self._chain(output.steps, names)

    # -- parts of an axis --------------------------------------------------------------------------

    def _kernel(self, kernel: KernelProof) -> Iterator[Block]:
        yield Heading(f"{kernel.name}: {self._what(kernel)}")
        for group, way in zip(kernel.groups, kernel.walks, strict=True):
            yield from self._group(group, way)
        if kernel.in_order:
            yield Prose(f"in_order: {WAYS['in_order'].what}, along {kernel.in_order}")
        yield Prose("what it writes:" if kernel.groups else "it writes, position by position:")
        yield from self._new_names([o.value for o in kernel.outputs])
        for output in kernel.outputs:
            left = f"{output.name}[{','.join(output.axes)}]" if output.axes else output.name
            yield Equation(left, output.value, self.abbreviations)

    @staticmethod
    def _what(kernel: KernelProof) -> str:
        made = ", ".join(output.name for output in kernel.outputs)
        walks = [(w.axis, w.schedule) for w in kernel.walks]
        walks += [(kernel.in_order, "in_order")] if kernel.in_order else []
        ways = ", ".join(f"{axis} {schedule}" for axis, schedule in walks)
        return f"{made}" + (f" ({ways})" if ways else "")

    def _group(self, group: GroupProof, walked: Walk) -> Iterator[Block]:
        names = self.abbreviations
        yield Prose(f"One pass over {group.axis} keeps")
        yield from self._new_names([s.body for s in group.states])
        for state in group.states:
            note = "added to close the merge" if state.auxiliary else ""
            yield Equation(state.name, term("Red", (state.op, group.axis, "ALL"), (state.body,)), names, note)
        if not group.is_fused:
            yield Prose("NOT FUSED, so that each is a pass of its own:")
            for obstacle in group.obstacles:
                yield Prose(f"  {obstacle}")
            return
        values = over_parts(group.axis, ((s.name, s.op, s.body) for s in group.states))
        part = f", over {walked.where}" if walked.where else ""
        yield from (
            Prose(f"{name}: {way.what}{part}") for name, way in WAYS.items() if name == walked.schedule
        )
        in_steps = walked.schedule == "split_k" or self.detail == "full"
        yield Prose(
            f"what a loop has seen ({group.axis} in A) and the next tile ({group.axis} in B); _new is over both:"
        )
        seen = self._names_over(values, {"A": "", "AB": "_new"})
        for state in group.states:
            assert state.update is not None
            yield from self._merged(state, state.update, seen)
        yield Prose("two parts, each with a state of its own, merge likewise:")
        parts = self._names_over(values, {"A": "_a", "B": "_b", "AB": "_new"})
        for state in group.states:
            assert state.combine is not None
            if in_steps:
                yield from self._merged(state, state.combine, parts)
            else:
                yield from self._result(state, state.combine)
        yield from self._forms(group)
        finishes = [s for s in group.states if s.finish is not None]
        if finishes:
            yield Prose("at the end, where a factor never had an inverse, what the unfused program gives:")
            for state in finishes:
                assert state.finish is not None
                yield Equation(state.name, state.finish, names)

    def _names_over(
        self, values: Mapping[str, Mapping[str, Term]], suffixes: Mapping[str, str]
    ) -> dict[Term, str]:
        found: dict[Term, str] = dict(self.abbreviations)
        for part, suffix in suffixes.items():
            for name, value in values[part].items():
                found.setdefault(value, name + suffix)
        return found

    def _merged(self, state: StateProof, merged: Merged, names: Names) -> Iterator[Block]:
        own = {t: n for t, n in names.items() if t is not merged.definition}
        value = self._repaired(merged.value)
        shorter = self._repeated([*(step.after for step in merged.steps), value], own)
        own = {**shorter, **own}
        yield from self._lets(shorter, own)
        yield Equation(f"{state.name}_new", merged.definition, own)
        yield from self._chain(merged.steps, own)
        if any(n.head in ("Finite", "Invertible") for n in walk(merged.value)):
            yield Line(value, None, ("guards",), (GUARDS,), (), (), own)
        elif (combined := _combined(merged.value)) is not merged.value:
            yield Line(combined, None, ("definition",), ("the combination written out",), (), (), own)

    def _result(self, state: StateProof, merged: Merged) -> Iterator[Block]:
        """What a chain ends at, and its rules, without its steps."""
        value = self._repaired(merged.value)
        shorter = self._repeated([value], self.abbreviations)
        own = {**shorter, **self.abbreviations}
        used = ", ".join(_names_of(merged.steps))
        yield from self._lets(shorter, own)
        yield Equation(f"{state.name}_new", value, own, f"by {used}" if used else "")

    def _repaired(self, value: Term) -> Term:
        """A value of a merge in the notation of rules/repairs.py."""
        shown = self._repairs.shown(self._expression(value))
        return self._term(shown) if self._repairs.forms([shown]) else value

    def _forms(self, group: GroupProof) -> Iterator[Block]:
        """What the repairs of a group are."""
        merged = [m for s in group.states for m in (s.update, s.combine) if m is not None]
        shown = [self._repairs.shown(self._expression(m.value)) for m in merged]
        for name, form in self._repairs.forms(shown):
            yield Equation(name, self._term(form), self.abbreviations, FREE)

    def _expression(self, root: Term) -> Expr:
        """The expression of a term, where what reads no state is a scalar."""
        encoder = Encoder()
        found: dict[Term, Expr] = {}
        for node in walk(root):
            args = tuple(found[arg] for arg in node.args)
            match node.head, node.words:
                case "Local", (name,):
                    found[node] = Local(name, ())
                case "Num", (text,):
                    found[node] = Const(float(text))
                case _ if node.head not in ("Leaf", "Red") and any(map(reads_state, args)):
                    found[node] = encoder.decode(node.head, node.words, args)
                case _:
                    found[node] = self._unread.setdefault(node, Scalar(f"?{len(self._unread)}"))
        return found[root]

    def _term(self, expr: Expr) -> Term:
        unread = {scalar.name: root for root, scalar in self._unread.items()}

        def step(node: Term) -> Term:
            match node.head, node.words:
                case "Leaf", (text,):
                    return unread.get(text, node)
                case "Apply2", (fn,):
                    return term("Apply2", (written_name(fn),), node.args)
                case _:
                    return node

        return transform(reading(expr), step)

    def _repeated(self, roots: Sequence[Term], known: Names) -> dict[Term, str]:
        """Names for what is repeated in these terms: r1, r2, ... through the whole outline."""
        found = abbreviations(roots, "r", known, self._repeats, within_one=True)
        self._repeats += len(set(found.values()))
        return found

    def _lets(self, shorter: Names, names: Names) -> Iterator[Block]:
        introduced: set[str] = set()
        for root, name in shorter.items():
            if name not in introduced:
                introduced.add(name)
                yield Equation(f"let {name}", root, {t: n for t, n in names.items() if n != name})

    # -- steps -------------------------------------------------------------------------------------

    def _chain(self, steps: Chain, names: Names) -> Iterator[Line]:
        notation = Notation(names)
        for run in _folded(steps) if self.detail == "short" else ([s] for s in steps):
            last = run[-1]
            changed = _common([step.position for step in run])
            rules = tuple(dict.fromkeys(("" if s.forward else "back: ") + s.inference.rule for s in run))
            whys = tuple(dict.fromkeys(self.rules[s.inference.rule].why for s in run))
            found = [c for s in run for c in conditions(s.inference, self.rules, notation)]
            shown = dict.fromkeys(c.text for c in found if self.detail == "full" or not c.is_control)
            proofs = tuple(self._proofs(last.inference, notation)) if self.detail == "full" else ()
            yield Line(last.after, changed, rules, whys, tuple(shown), proofs, names)

    def _proofs(self, inference: Inference, notation: Notation) -> Iterator[str]:
        """Why every condition of an instance holds, indented by how far down the reason is."""
        seen: set[Inference] = set()

        def reasons(below: Inference, depth: int) -> Iterator[str]:
            for premise in below.premises:
                match premise:
                    case Holds(fact, moves):
                        said = sentence(Statement(fact.relation, fact.args), notation)
                        moved = [s for chain in moves for s in chain]
                        equal = f", equal by {', '.join(_names_of(moved))}" if moved else ""
                        why = "given" if fact.inference is None else self._because(fact.inference)
                        yield f"{'  ' * depth}{said}: {why}{equal}"
                        if fact.inference is not None and fact.inference not in seen:
                            seen.add(fact.inference)
                            yield from reasons(fact.inference, depth + 1)
                    case Equal(chain) if chain:
                        yield f"{'  ' * depth}equal by {', '.join(_names_of(chain))}"

        return reasons(inference, 0)

    def _because(self, inference: Inference) -> str:
        return f"{inference.rule} ({self.rules[inference.rule].why})"

    # -- names -------------------------------------------------------------------------------------

    def _new_names(self, roots: Sequence[Term]) -> Iterator[Block]:
        """Definitions of the abbreviations that these terms need and that were not introduced yet."""
        used = [t for t in self.abbreviations if any(t in set(walk(root)) for root in roots)]
        for root in used:
            name = self.abbreviations[root]
            if name in self._introduced:
                continue
            self._introduced.add(name)
            own = {t: n for t, n in self.abbreviations.items() if n != name}
            yield Equation(f"let {name}", root, own)


def _combined(root: Term) -> Term:
    """With the combinations of registered folds written out; an order is said by its name alone."""

    def step(node: Term) -> Term:
        found = fold_of(node.words[0]) if node.head == "Apply2" else None
        if found is None or found[0].order:
            return node
        fold, index = found
        values: dict[str, Term] = {}
        for side, packed in enumerate(node.args, start=1):
            for name in fold.state[:-1]:
                values[f"{name}{side}"], packed = packed.args
            values[f"{fold.state[-1]}{side}"] = packed
        return named(reading(fold.combine[index]), values)

    return transform(root, step)


def _names_of(steps: Iterable[Step]) -> list[str]:
    return list(dict.fromkeys(step.inference.rule for step in steps))


def _common(positions: Sequence[Position]) -> Position:
    """The position that all of these are at or below."""
    shared: list[int] = []
    for indices in zip(*positions, strict=False):
        if len(set(indices)) > 1:
            break
        shared.append(indices[0])
    return tuple(shared)


def _folded(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Runs of steps that make one line: helpers together, and one rule at several positions."""
    run: list[Step] = []
    for step in steps:
        if run and not _joins(run[-1].inference.rule, step.inference.rule):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _joins(before: str, after: str) -> bool:
    return before == after or {before, after} <= HELPERS


def abbreviations(
    roots: Sequence[Term],
    prefix: str = "t",
    known: Names | None = None,
    first: int = 0,
    within_one: bool = False,
) -> dict[Term, str]:
    """Names for long terms that are repeated (`within_one` of the roots, or in all together), inner ones first:
    t1, t2, ...; `known` ones have theirs."""
    has = dict(known or {})
    chosen: dict[Term, str] = {}
    distinct = list(dict.fromkeys(roots))
    while len(chosen) < MOST_NAMES:
        notation = Notation({**has, **chosen})
        times: dict[Term, int] = {}
        for together in [[root] for root in distinct] if within_one else [distinct]:
            for node, count in _occurrences(together, notation.names).items():
                times[node] = max(count, times.get(node, 0))
        gains = {
            node: (count - 1) * (len(notation.definition(node)) - 3)
            for node, count in times.items()
            if count > 1
            and node.args
            and node.head not in ("Neg", "Inv")  # these print as part of a difference or a quotient
            and node not in notation.names
            and len(notation.definition(node)) >= LONG
        }
        best = max(gains, key=lambda node: gains[node], default=None)
        if best is None or gains[best] < SAVED:
            break
        chosen[best] = prefix
    found: dict[Term, str] = {}
    spelt: dict[str, str] = {}
    for node in walk(*distinct):  # what is used before what uses it
        if node in chosen:
            text = Notation({**has, **found}).show(node)
            found[node] = spelt.setdefault(text, f"{prefix}{first + len(spelt) + 1}")
    return found


def _occurrences(roots: Sequence[Term], named_terms: Names) -> dict[Term, int]:
    """How often each term is printed in these, where named ones are their names."""
    times: dict[Term, int] = dict.fromkeys(walk(*roots), 0)
    for root in roots:
        times[root] += 1
    for node in reversed(list(walk(*roots))):  # readers before what they read
        for arg in node.args if node not in named_terms else ():
            times[arg] += times[node]
    return times
