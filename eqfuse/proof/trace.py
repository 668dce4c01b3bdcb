"""From a compiled program to its derivation: the saturations again, recorded, and proofs of what they gave.

Compiling records nothing. What is derived here is what the kernel has: the same rules run over the same terms, and
each term that was extracted is proved equal to what it stands for by the steps that fired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.extract.kernel_shapes import Merges
from eqfuse.loops.plan import KernelPlan, Plan
from eqfuse.proof.congruence import Classes, Closure, Unproved
from eqfuse.proof.elaborate import MergeValues, merge_values, named, over_parts, reading
from eqfuse.proof.nodes import (
    Chain,
    GroupProof,
    KernelProof,
    Merged,
    Origin,
    OutputProof,
    Proof,
    StateProof,
    Stored,
    Walk,
)
from eqfuse.proof.positions import AxisNames
from eqfuse.proof.reassociation import reordered
from eqfuse.proof.record import Recorder, RuleSets, Tape
from eqfuse.proof.syntax import Term, term
from eqfuse.rules.egraph.encode import global_name
from eqfuse.rules.egraph.saturate import session
from eqfuse.rules.engine import Engine
from eqfuse.rules.merge import Group, Merge
from eqfuse.rules.merge_search import derive_group
from eqfuse.rules.prepare import prepare
from eqfuse.rules.rule import RuleSet
from eqfuse.rules.split import reads_state
from eqfuse.rules.states import axis_order
from eqfuse.terms.nodes import Call, Expr, Output, Program, reductions, walk
from eqfuse.terms.types import program_dtypes


@dataclass(frozen=True)
class PlanTerms:
    """How expressions of a plan are read as terms."""

    strict_casts: bool
    stored: frozenset[str]

    def whole(self, expr: Expr) -> Term:
        """Everything looked into; states and temporaries are names."""
        return reading(expr, stored=self.stored, strict_casts=self.strict_casts, indices=True)

    def inside(self, expr: Expr, axis: str, states: frozenset[str], leaves: dict[str, Expr]) -> Term:
        """As the rules see it that derive a merge over an axis: what does not read a state is a leaf."""
        return reading(
            expr,
            states=states,
            opaque=lambda reduce: reduce.axis != axis and not reads_state(reduce, states),
            split=axis,
            strict_casts=self.strict_casts,
            leaves=leaves,
        )


def temporaries(kernels: Sequence[KernelPlan]) -> frozenset[str]:
    """What one kernel stores and another may read."""
    return frozenset(output.name for kernel in kernels for output in kernel.outputs)


def claims(plan: Plan, strict_casts: bool) -> tuple[KernelProof, ...]:
    """What a derivation of this plan has to prove: everything of it but the steps."""
    names = PlanTerms(strict_casts, temporaries(plan.kernels))
    return tuple(_kernel(kernel, names) for kernel in plan.kernels)


def _kernel(kernel: KernelPlan, names: PlanTerms) -> KernelProof:
    leaves: dict[str, Expr] = {}
    groups = tuple(_group(g.group, names, leaves) for g in kernel.groups)
    walks = tuple(_walk(g.group, g.schedule) for g in kernel.groups)
    outputs = tuple(Stored(o.name, o.axes, names.whole(o.expr)) for o in kernel.outputs)
    meanings = {text: names.whole(expr) for text, expr in leaves.items()}
    named_leaves = {text: t for text, t in meanings.items() if t is not term("Leaf", (text,))}
    return KernelProof(
        kernel.name, outputs, named_leaves, groups, walks, kernel.in_order.axis if kernel.in_order else ""
    )


def _walk(group: Group, schedule: str) -> Walk:
    return Walk(group.axis, schedule, group.prefix.where(group.axis) if group.prefix is not None else "")


def group_claim(group: Group, names: PlanTerms) -> GroupProof:
    """What has to be proved of one group."""
    return _group(group, names, {})


def _group(group: Group, names: PlanTerms, leaves: dict[str, Expr]) -> GroupProof:
    own = frozenset(s.name for s in group.states)
    states = tuple(
        StateProof(s.name, s.op, names.inside(s.body, group.axis, own, leaves), s.auxiliary, None, None, None)
        for s in group.states
    )
    if group.merge is None:
        return GroupProof(group.axis, states, tuple(f"{o.factor}: {o.condition}" for o in group.obstacles))
    parts = over_parts(group.axis, ((s.name, s.op, s.body) for s in states))
    merge, axis = group.merge, group.axis
    return GroupProof(
        axis,
        tuple(_state(s, merge, parts["AB"][s.name], axis, own, names, leaves) for s in states),
        (),
    )


def _state(
    state: StateProof,
    merge: Merge,
    definition: Term,
    axis: str,
    own: frozenset[str],
    names: PlanTerms,
    leaves: dict[str, Expr],
) -> StateProof:
    (update,) = (u for u in merge.update if u.state == state.name)
    (combine,) = (c for c in merge.combine if c.state == state.name)
    finish = [f for f in merge.finish if f.state == state.name]
    parts = [part for other in merge.update for part in other.parts]
    tiles = frozenset(p.name for p in parts)
    known = own | tiles | {name + suffix for name in own for suffix in ("_new", "_a", "_b")}

    def inside(expr: Expr) -> Term:
        return names.inside(expr, axis, known, leaves)

    fresh = {p.name: term("Red", (p.op, axis, "B"), (inside(p.body),)) for p in parts}
    return replace(
        state,
        update=Merged(definition, (), named(inside(update.value), fresh)),
        combine=Merged(definition, (), inside(combine.value)),
        finish=inside(finish[0].value) if finish else None,
    )


# -- steps -----------------------------------------------------------------------------------------


@dataclass
class Tracer:
    """Records the saturations of one program and collects the chains, and what has none."""

    program: Program
    plan: Plan
    order: tuple[str, ...]
    groups: Merges
    recorder: Recorder
    gaps: list[str] = field(default_factory=list)
    classes: dict[str, Classes] = field(default_factory=dict)

    def trace_outputs(self) -> tuple[OutputProof, ...]:
        """The chain of every output from its definition to its prepared form."""
        strict = self.program.strict_casts
        proofs = [
            OutputProof(o.name, o.axes, reading(o.expr, strict_casts=strict), ())
            for o in self.program.outputs
        ]
        self.recorder.tapes.clear()
        program, form = self.program, self.plan.form
        if form == "reassociated":
            program = replace(program, outputs=self.plan.order)
            proofs = [self._reassociated(proof, o) for proof, o in zip(proofs, program.outputs, strict=True)]
        if form != "written":
            prepare(program, self.recorder.engine, apart=form == "apart")
        purposes = [f"out{index}" for index in range(len(proofs))]
        # One tape, or one for each output; that of an output that was too large has chosen nothing.
        for tape in self.recorder.tapes:
            chosen = [index for index, purpose in enumerate(purposes) if purpose in tape.choices]
            if not chosen:
                continue
            closure = Closure(tape)
            alone = "" if len(chosen) == len(proofs) else " of " + ", ".join(proofs[i].name for i in chosen)
            self.classes[f"whole axes{alone}"] = closure.classes()
            for index in chosen:
                proof, purpose = proofs[index], purposes[index]
                goal, what = tape.choices[purpose], f"output {proof.name}"
                steps = self._chain(closure, tape.names[global_name(purpose)], goal, what)
                proofs[index] = replace(proof, steps=(*proof.steps, *steps))
        return tuple(proofs)

    def _reassociated(self, proof: OutputProof, output: Output) -> OutputProof:
        """The steps from an output's definition to another order of its sums and products."""
        leaves: dict[str, Expr] = {}
        written = next(o.expr for o in self.program.outputs if o.name == output.name)
        goal, _ = (
            reading(each, strict_casts=self.program.strict_casts, leaves=leaves)
            for each in (output.expr, written)
        )
        dtypes = program_dtypes(self.program)
        try:
            names = AxisNames.of(self.program)
            computed = {
                reading(at, strict_casts=self.program.strict_casts, leaves=leaves): at
                for node in walk(written)
                if isinstance(node, Call) and node.fn == "eq"
                for at in node.args
                if reductions(at)
            }
            steps = reordered(proof.definition, goal, leaves, dtypes, names, computed)
            return replace(proof, steps=steps)
        except Unproved as error:
            self.gaps.append(f"order of output {proof.name}: {error}")
            return proof

    def trace_kernel(self, plan: KernelPlan, claim: KernelProof) -> KernelProof:
        """The chains of every state of a kernel."""
        groups = tuple(self._trace_group(g.group, c) for g, c in zip(plan.groups, claim.groups, strict=True))
        return replace(claim, groups=groups)

    def _trace_group(self, group: Group, claim: GroupProof) -> GroupProof:
        if group.merge is None:
            return claim
        key = next(key for key, known in self.groups.items() if known == group)
        axis, reduces, suffix, _ = key
        self.recorder.tapes.clear()
        derive_group(axis, reduces, self.order, self.program.strict_casts, suffix, self.recorder.engine)
        tape = self.recorder.tapes[-1]
        closure = Closure(tape)
        self.classes[f"{axis}: {', '.join(s.name for s in claim.states)}"] = closure.classes()
        known = merge_values(over_parts(axis, ((s.name, s.op, s.body) for s in claim.states)))
        return replace(claim, states=tuple(self._trace_state(s, known, tape, closure) for s in claim.states))

    def _trace_state(self, state: StateProof, known: MergeValues, tape: Tape, closure: Closure) -> StateProof:
        assert state.update is not None and state.combine is not None

        def proved(merged: Merged, purpose: str, values: Mapping[str, Term]) -> Merged:
            what = f"{purpose} {state.name}"
            if what not in tape.choices:
                self.gaps.append(f"{what}: extraction found no term")
                return merged
            goal = named(tape.choices[what], values)
            return replace(merged, steps=self._chain(closure, merged.definition, goal, what))

        return replace(
            state,
            update=proved(state.update, "update", known.update),
            combine=proved(state.combine, "combine", known.combine),
        )

    def _chain(self, closure: Closure, start: Term, goal: Term, what: str) -> Chain:
        try:
            return closure.chain(start, goal)
        except Unproved as error:
            self.gaps.append(f"{what}: {error}")
            return ()


def trace(
    program: Program,
    order: tuple[str, ...],
    groups: Merges,
    plan: Plan,
    origin: Origin,
    recorder: Recorder | None = None,
) -> tuple[Proof, Mapping[str, Classes]]:
    """The derivation of a plan, and the classes of the e-graphs that it is taken from. `order` is that of all axes. What
    no recorded step proves is listed in its gaps."""
    tracer = Tracer(program, plan, order, groups, recorder or Recorder())
    claimed = claims(plan, program.strict_casts)
    proofs = tracer.trace_outputs()
    kernels = tuple(tracer.trace_kernel(k, c) for k, c in zip(plan.kernels, claimed, strict=True))
    return Proof(origin, proofs, kernels, tuple(tracer.gaps)), tracer.classes


def without(rule: str) -> Callable[[RuleSets], RuleSets]:
    """Rule sets in which a rule does not exist."""
    return lambda rulesets: tuple(
        RuleSet(s.name, tuple(r for r in s.rules if r.name != rule)) for s in rulesets
    )


def survives(rule: str, program: Program, outputs: tuple[Output, ...], groups: Merges, plan: Plan) -> bool:
    """Whether the same kernels are derived where a rule does not exist, in another way."""
    rest = without(rule)
    engine = Engine(lambda rulesets: session(rest(rulesets)))
    prepared = replace(program, outputs=plan.order) if plan.form == "reassociated" else program
    if prepare(prepared, engine, apart=plan.form == "apart")[0] != outputs:
        return False
    order = axis_order(replace(program, outputs=outputs))
    for group in {g.group: None for k in plan.kernels for g in k.groups}:
        ((axis, reduces, suffix, _),) = (key for key, known in groups.items() if known is group)
        if derive_group(axis, reduces, order, program.strict_casts, suffix, engine)[0] != group:
            return False
    return True
