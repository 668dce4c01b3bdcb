"""Why a reduction did not fuse, and why one plan was chosen before the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse import limits
from eqfuse.errors import EqfuseError, Span, VerificationError, locate, source_lines
from eqfuse.explain.report import Report
from eqfuse.extract.kernel_shapes import Merges
from eqfuse.limits import OverLimit
from eqfuse.loops.dominance import parted
from eqfuse.loops.lower import lower
from eqfuse.loops.nodes import Let
from eqfuse.loops.plan import KernelPlan, Plan
from eqfuse.loops.walk import loops_in
from eqfuse.proof.check import Statement, read_rule
from eqfuse.proof.congruence import Closure
from eqfuse.proof.elaborate import merge_values, named, over_parts
from eqfuse.proof.nodes import inferences
from eqfuse.proof.notation import Notation
from eqfuse.proof.record import Recorder
from eqfuse.proof.sentences import rule_text, sentence
from eqfuse.proof.syntax import Term
from eqfuse.proof.trace import PlanTerms, group_claim
from eqfuse.rules.merge import Group, Obstacle
from eqfuse.rules.merge_search import derive_group
from eqfuse.rules.reassociate import (
    WORTH,
    cheapest,
    reassociated,
    roundings,
    runners_up,
    visited,
    with_copies,
)
from eqfuse.rules.rule import Infer, Rewrite, Rule, RuleSet
from eqfuse.rules.tables.rescale import RESCALE
from eqfuse.terms.extents import with_domains
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    free_axes,
    replaced,
    tree_size,
    walk,
)
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import output_lines
from eqfuse.terms.recurrences import MOST_BEFORE, itself, unmerged
from eqfuse.terms.types import program_dtypes
from eqfuse.units import duration

RELAXED = frozenset({"nonneg", "nonpos", "positive", "constant", "scalar", "pole_safe", "masked"})
"""Conditions on values (not on what depends on what): without one of them a rule may have helped."""


APART = "the budget keeps large programs from taking the machine: compile parts of this one apart"
"""What to do where a saturation did not end."""


MASKING = -1e4
"""Numbers up to it stand for -inf where a mask puts them."""
LONGEST = 200
"""Operations of an expression that a message shows."""
RUNNERS_UP = 3
"""Orders that are shown beside the one that runs."""


@dataclass(frozen=True)
class Refusal:
    """Why one reduction is not fused: what stands in the way (None where it is the budget), where in the source, and what
    would have helped."""

    reduction: Expr
    factor: Expr | None
    condition: str
    source: str
    span: Span | None
    nearest: str

    def __str__(self) -> str:
        where = "" if self.factor is None else f"in {shortened(self.factor)}, "
        message = f"{shortened(self.reduction)} is not fused: {where}{self.condition}"
        return str(EqfuseError(message, source=self.source, span=self.span, hint=self.nearest))


@dataclass(frozen=True)
class Unfinished:
    """The rewriting of the whole program ended with its budget: a form that fuses more may not have been found."""

    stopped: str

    def __str__(self) -> str:
        return f"the program was rewritten as far as the budget goes: {self.stopped}\n{APART}"


@dataclass(frozen=True)
class Unbounded:
    """Another order of sums and products costs less, and may round more than what is allowed."""

    order: tuple[Output, ...]
    share: float
    roundings: tuple[float, float]

    def __str__(self) -> str:
        found, written = self.roundings
        text = "\n".join(_order_lines(self.order))
        return (
            f"an order of sums and products that costs {self.share:.2g} of the one that runs is not taken, for its rounding:\n{text}\n"
            f"it has {found:.3g} roundings on the way to an output, as written there are {written:.3g}, or sums apart what "
            'cancels, as exact terms or those of a square do;\nreassociate="free" takes it'
        )


@dataclass(frozen=True)
class Dearer:
    """Another order of sums and products costs less by what reductions visit, and its best plan is predicted to take longer."""

    order: tuple[Output, ...]
    share: float
    seconds: tuple[float, float]

    def __str__(self) -> str:
        other, chosen = self.seconds
        text = "\n".join(_order_lines(self.order))
        return (
            f"an order of sums and products that costs {self.share:.2g} of the one that runs is not taken:\n{text}\n"
            f"its best plan is predicted to take {duration(other)}, that of what is written {duration(chosen)}"
        )


@dataclass(frozen=True)
class Unverified:
    """The derived form was not verified, or not derived within its limits, so that the program runs as written."""

    error: VerificationError | OverLimit

    def __str__(self) -> str:
        certificate = self.error.certificate
        over = isinstance(self.error, OverLimit) or (certificate is not None and certificate.over)
        more = "" if over else "\nplease report this program: what rules derive has to be verified"
        return f"the program runs as written: {self.error}{more}"


@dataclass(frozen=True)
class Divided:
    """What one kernel stores for others, and what is known of plans with fewer kernels."""

    value: Expr
    maker: str
    stored: str
    readers: tuple[str, ...]
    source: str
    span: Span | None
    fewer: str

    def __str__(self) -> str:
        readers = " and ".join(self.readers)
        message = (
            f"{shortened(self.value)} is not in the kernel that reads it: "
            f"{self.maker} stores it, as {self.stored}, for {readers}"
        )
        return str(EqfuseError(message, source=self.source, span=self.span, hint=self.fewer))


@dataclass(frozen=True)
class Apart:
    """Two outputs that read the same tensors in kernels of their own; `walked` are the axes of each one's reductions."""

    outputs: tuple[Output, Output]
    kernels: tuple[str, str]
    read: tuple[str, ...]
    walked: tuple[tuple[str, ...], tuple[str, ...]]
    source: str

    def __str__(self) -> str:
        first, second = self.outputs
        if {*first.axes} != {*second.axes}:
            why = f"their axes are [{', '.join(first.axes)}] and [{', '.join(second.axes)}]"
        elif all(self.walked):
            why = f"one folds along {', '.join(self.walked[0])}, the other along {', '.join(self.walked[1])}"
        else:
            why = "one reads what the other does not where it is written, or a part of it in another loop"
        message = (
            f"{first.name} and {second.name} both read {', '.join(self.read)}, in {self.kernels[0]} and "
            f"{self.kernels[1]}: {why}"
        )
        hint = "outputs of the same axes that read the same elements share a kernel"
        span = locate(self.source, first.name)
        return str(EqfuseError(message, source=self.source, span=span, hint=hint))


@dataclass(frozen=True)
class FiniteMask:
    """A mask by a number rather than by -inf whose loop visits what it covers: the maximum of what it leaves does not tell that
    this vanishes, as where the axis is divided into shards, each with a maximum of its own."""

    number: str
    axis: str
    is_divided: bool
    source: str

    def __str__(self) -> str:
        why = "no part of the axis has its maximum" if self.is_divided else "a value may be below it"
        message = f"positions of {self.axis} that a mask sets to {self.number} are visited: {why}"
        hint = "write -inf where they are left out: blocks of them are then passed over"
        return str(EqfuseError(message, source=self.source, span=_last(self.source, self.number), hint=hint))


@dataclass(frozen=True)
class Stepwise:
    """Definitions that are computed in order along an axis, as their steps have no merge: what stands in the way."""

    states: tuple[str, ...]
    axis: str
    why: str
    source: str

    def __str__(self) -> str:
        names = ", ".join(self.states)
        message = f"{names} {'is' if len(self.states) == 1 else 'are'} computed in order along {self.axis}, not scanned: {self.why}"
        hint = (
            "steps that merge are p * h + q, max(h + p, q) and min(h + p, q) of the value h before, where p and q do not read it, "
            "and p * h + q * g + r of the two before"
        )
        return str(
            EqfuseError(
                message, source=self.source, span=locate(self.source, f"{self.states[0]}["), hint=hint
            )
        )


Reason = Stepwise | Refusal | Divided | Apart | FiniteMask | Unfinished | Unverified | Unbounded | Dearer
"""Why something of a kernel is not fused."""


# -- where in the source ---------------------------------------------------------------------------


def place(source: str, factor: Expr, reduction: Reduce, states: Mapping[Expr, Expr]) -> Span | None:
    """Where the factor stands in the source: itself, else its function, else the reduction that it is in; what
    reads other reductions comes after them, so that the last place is meant."""
    function = getattr(factor, "fn", None)
    written = _written(factor, states)
    tries = [str(written)] if tree_size(written) <= len(source) else []  # no longer text is in it
    tries += [f"{function}("] if function else []
    called = f"{reduction.op.partition('.')[0]}[{reduction.axis}"
    tries += [f"{called}]", f"{called},"]  # of a list, the axis of its ranks follows
    found = (_last(source, text) for text in tries)
    return next((span for span in found if span is not None), None)


def _last(source: str, text: str) -> Span | None:
    """The last line in which `text` stands, and where."""
    lines = source_lines(source)
    for number in range(len(lines), 0, -1):
        if span := locate(lines[number - 1], text):
            return replace(span, line=number)
    return None


def _written(expr: Expr, states: Mapping[Expr, Expr]) -> Expr:
    """With states replaced by the reductions that they are."""
    while any(isinstance(node, Local) and node in states for node in walk(expr)):
        expr = replaced(expr, states)
    return expr


def shortened(expr: Expr) -> str:
    """The text of an expression, or its start where all of it would be too long to read."""
    if isinstance(expr, Reduce) and tree_size(expr) > LONGEST:
        return f"{expr.op}[{expr.axis}](...)"
    return str(expr) if tree_size(expr) <= LONGEST else "..."


# -- what would have helped ------------------------------------------------------------------------


def _without(rule: Rule, dropped: frozenset[str]) -> Rule | None:
    """The rule without these conditions; None where it would no longer say what its variables are."""
    reading = read_rule(rule)
    kept = tuple(text for text, s in zip(rule.when, reading.when, strict=True) if s.relation not in dropped)
    if kept == rule.when:
        return rule
    bare: Rule = replace(rule, when=kept)
    left = replace(bare, right=bare.left) if isinstance(bare, Rewrite) else None
    bound = read_rule(left).variables if left else _bound(bare)
    return bare if bound >= reading.variables else None


def _bound(rule: Rule) -> frozenset[str]:
    """Variables that the conditions of an inference bind, or the term that it is about."""
    assert isinstance(rule, Infer)
    about = read_rule(Infer(rule.name, rule.fact)).fact
    subject = about.args[0] if about else ""
    own = Statement("", (subject,)) if isinstance(subject, Term) and subject.head != "Var" else None
    statements = [*read_rule(rule).when, *([own] if own else [])]
    return frozenset().union(*(s.variables for s in statements))


def _relaxed(rulesets: tuple[RuleSet, ...]) -> tuple[RuleSet, ...]:
    """The rule sets in which every rewrite or separation has lost its conditions on values."""

    def loose(rule: Rule) -> Rule:
        separates = isinstance(rule, Infer) and rule.fact.startswith(("factors(", "addends("))
        if not isinstance(rule, Rewrite) and not separates:
            return rule
        return _without(rule, RELAXED) or rule

    return tuple(RuleSet(s.name, tuple(map(loose, s.rules))) for s in rulesets)


def nearest(
    axis: str,
    reduces: tuple[Reduce, ...],
    suffix: str,
    order: Sequence[str],
    strict_casts: bool,
    rules: Mapping[str, Rule],
) -> str | None:
    """The rule that would have fused these reductions but for a condition on a value, and that condition; None where none is
    found within the limits of a derivation."""
    recorder = Recorder(_relaxed)
    try:
        with limits.derivation():
            group, _ = derive_group(axis, reduces, order, strict_casts, suffix, recorder.engine)
    except OverLimit:
        return None
    if group.merge is None:
        return None
    tape = recorder.tapes[-1]
    closure = Closure(tape)
    claim = group_claim(group, PlanTerms(strict_casts, frozenset()))
    parts = over_parts(axis, ((s.name, s.op, s.body) for s in claim.states))
    values = merge_values(parts).update
    shown = {value: name for name, value in values.items()}
    for state in claim.states:
        goal = named(tape.choices[f"update {state.name}"], values)
        for inference in inferences(closure.chain(parts["AB"][state.name], goal)):
            full = rules[inference.rule]
            for statement in read_rule(full).when:
                ground = statement.at(inference.values)
                if statement.relation in RELAXED and not closure.holds(ground.relation, ground.args):
                    needed = sentence(ground, Notation(shown))
                    return f"nearest rule: {full.name}: {rule_text(full)}\n  it needs {needed}, which nothing proves"
    return None


def _by_operation(obstacle: Obstacle) -> str:
    """The repair that a reduction of this kind would have needed."""
    assert isinstance(obstacle.reduction, Reduce)
    op, axis = obstacle.reduction.op, obstacle.reduction.axis
    repairs = [r for r in RESCALE.rules if isinstance(r, Rewrite) and r.left.startswith(f"{op}[")]
    if not repairs:
        return f"no rule repairs a {op} over {axis} once what it reads has changed"
    rule = repairs[0]
    part, joined = ("factor", "times") if rule.when[0].startswith("factors") else ("term", "plus")
    return (
        f"nearest rule: {rule.name}: {rule_text(rule)}\n"
        f"  it needs a {part} of {obstacle.factor} that does not vary with {axis} "
        f"{joined} one without a state; no rule takes it apart"
    )


# -- programs --------------------------------------------------------------------------------------


def _states(plan: Plan) -> dict[Expr, Expr]:
    """The reductions that the states of a plan are."""
    return {
        Local(s.name, s.dims): Reduce(s.op, g.group.axis, s.body)
        for k in plan.kernels
        for g in k.groups
        for s in g.group.states
    }


def refusals(
    program: Program,
    plan: Plan,
    groups: Merges,
    order: Sequence[str],
    rules: Mapping[str, Rule],
) -> Iterator[Refusal]:
    """What in a plan is not fused, and why; nothing of one that was asked for as it is written."""
    if plan.form == "written":
        return
    states = _states(plan)
    for group in dict.fromkeys(g.group for k in plan.kernels for g in k.groups):
        keys = [key for key, known in groups.items() if known == group]  # that of a kept plan is a copy
        for obstacle in group.obstacles:
            (axis, reduces, suffix, _), *_ = keys
            helped: str | None
            if obstacle.unfinished:
                helped = APART
            elif obstacle.refused:
                helped = f"a merge was derived, and refused: {obstacle.refused}"
            else:
                helped = nearest(axis, reduces, suffix, order, program.strict_casts, rules)
            assert isinstance(obstacle.reduction, Reduce)
            yield Refusal(
                obstacle.reduction,
                None if obstacle.unfinished else obstacle.factor,
                obstacle.condition,
                program.source,
                place(program.source, obstacle.factor, obstacle.reduction, states),
                helped or _by_operation(obstacle),
            )
        yield from _second_passes(program, plan, group, states)


def order_said(program: Program, plan: Plan) -> str:
    """What the order of sums and products that a plan runs costs beside the one that is written."""
    extents = _extents(program, plan)
    depths = [roundings(each, extents) for each in (program.outputs, plan.order)]
    written, runs = (_elements(program, each, extents) for each in (program.outputs, plan.order))
    return (
        f"As written, reductions visit and leave {written:.3g} elements{plan.at_sizes}; in this order {runs:.3g}. "
        f"On the way to an output there are at most {depths[0]:.3g} roundings as written, and {depths[1]:.3g} in this order."
    )


def orders_lost(program: Program, plan: Plan) -> Iterator[str]:
    """The orders that cost least but for the one that runs, each with how many times as much it costs."""
    extents = _extents(program, plan)
    own = _elements(program, plan.order, extents)
    for order in runners_up(program, plan.order, extents, RUNNERS_UP):
        cost = _elements(program, order, extents)
        yield f"{cost:.3g} elements, {cost / own:.3g} x{', as written' if order == program.outputs else ''}"
        yield from _order_lines(order)


def _order_lines(order: Sequence[Output]) -> list[str]:
    """An order, but for expressions that are too long to show."""
    short = (tree_size(output.expr) <= LONGEST for output in order)
    return [f"  {line}" for line in output_lines(order)] if all(short) else ["  ..."]


def _elements(program: Program, outputs: Sequence[Output], extents: Mapping[str, int]) -> float:
    return visited(outputs, extents, same=alike(program))


def _extents(program: Program, plan: Plan) -> dict[str, int]:
    """What a plan was priced for."""
    return with_domains(program, dict(plan.sizes))


def unbounded(program: Program, plan: Plan) -> tuple[Unbounded, ...]:
    """A cheaper order that its rounding keeps from being taken."""
    if program.reassociate == "free" or plan.form == "written":
        return ()
    anywhere = with_copies(replace(program, reassociate="free"))
    extents = _extents(anywhere, plan)
    order = reassociated(anywhere, extents)
    share = _share(anywhere, plan, order, extents)
    if share > WORTH or order == reassociated(program, extents):
        return ()
    if order == cheapest(program.outputs, extents, dtypes=program_dtypes(program), same=alike(program)):
        return ()  # no rounding keeps it: orders of such programs are not looked for
    return (Unbounded(order, share, (roundings(order, extents), roundings(program.outputs, extents))),)


def dearer(program: Program, plan: Plan, plans: Sequence[Plan]) -> tuple[Dearer, ...]:
    """An order that visits less than the one that is written and runs, and is predicted to take longer."""
    other = next((each for each in plans if each.order and each.cost is not None), None)
    if plan.order or plan.form == "written" or plan.cost is None or other is None or other.cost is None:
        return ()
    share = _share(program, plan, other.order, _extents(program, plan))
    return (Dearer(other.order, share, (other.cost.seconds, plan.cost.seconds)),)


def _share(program: Program, plan: Plan, order: tuple[Output, ...], extents: Mapping[str, int]) -> float:
    """What an order costs of the one that a plan runs; infinite for none."""
    runs = plan.order or program.outputs
    return _elements(program, order, extents) / _elements(program, runs, extents) if order else math.inf


def _second_passes(
    program: Program, plan: Plan, group: Group, states: Mapping[Expr, Expr]
) -> Iterator[Refusal]:
    """Reductions over a copy of a group's axis with a value for each of its positions: another pass for each."""
    stored = {o.name: o.expr for k in plan.kernels for o in k.outputs}
    for state in group.states:
        inner = [n for n in walk(state.body) if isinstance(n, Reduce)]
        inner += [
            made
            for n in walk(state.body)
            if isinstance(n, Load) and n.tensor in stored
            for made in (_written(stored[n.tensor], states),)
            if isinstance(made, Reduce)
        ]
        for reduce in inner:
            same = program.domains.get(reduce.axis, reduce.axis) == program.domains.get(
                group.axis, group.axis
            )
            if same and group.axis in free_axes(reduce):
                yield Refusal(
                    Reduce(state.op, group.axis, state.body),
                    reduce,
                    f"there is a value for every position of {group.axis}, each made of the whole row: "
                    "no state smaller than the row holds them",
                    program.source,
                    place(program.source, reduce, reduce, states),
                    "nearest rule: interchange-plain: sums of sums commute; "
                    f"what {state.op} folds here is no sum of {reduce.op}s",
                )


def divisions(program: Program, plan: Plan, plans: Sequence[Plan]) -> Iterator[Divided]:
    """What kernels of a plan store for each other, with the cheapest plan of fewer kernels; nothing of one that was
    asked for as it is written."""
    if plan.form == "written" or len(plan.kernels) == 1:
        return
    fewer = [p for p in plans if len(p.kernels) < len(plan.kernels) and p.cost is not None]
    best = min(fewer, key=lambda p: p.cost.seconds if p.cost else math.inf, default=None)
    hint = "of the ways to divide the program that were priced, none has fewer kernels"
    if best is not None:
        hint = f"the cheapest plan of fewer kernels: {next(plan_lines([best], plan))}"
    states = _states(plan)
    for kernel in plan.kernels:
        for output in kernel.outputs:
            readers = tuple(k.name for k in plan.kernels if k is not kernel and _reads(k, output.name))
            if readers:
                value = _written(output.expr, states)
                folds = [node for node in walk(value) if isinstance(node, Reduce)]
                span = place(program.source, value, folds[-1], states) if folds else None
                stored = f"{output.name}[{', '.join(output.axes)}]" if output.axes else output.name
                yield Divided(value, kernel.name, stored, readers, program.source, span, hint)


def left_apart(program: Program, plan: Plan) -> Iterator[Apart]:
    """Pairs of outputs that read the same tensors and have kernels of their own, because one of them has no reduction, or because
    neither reads what the other's kernel stores and their axes, or the axes of their reductions, differ."""
    inputs = {tensor.name for tensor in program.tensors}
    wanted = {output.name for output in program.outputs}
    kernels = [(k, {name for name in inputs if _reads(k, name)}) for k in plan.kernels]
    for place, (one, reads) in enumerate(kernels):
        for other, others in kernels[place + 1 :]:
            mine, theirs = ([o for o in k.outputs if o.name in wanted] for k in (one, other))
            if not (mine and theirs and reads & others):
                continue
            walked = tuple(g.group.axis for g in one.groups), tuple(g.group.axis for g in other.groups)
            if all(walked):
                is_read = any(_reads(other, o.name) for o in one.outputs)
                alike = {*mine[0].axes} == {*theirs[0].axes} and {*walked[0]} == {*walked[1]}
                if is_read or alike:
                    continue
            read = tuple(tensor.name for tensor in program.tensors if tensor.name in reads & others)
            yield Apart((mine[0], theirs[0]), (one.name, other.name), read, walked, program.source)


def stepwise(program: Program) -> Iterator[Stepwise]:
    """The recurrences of a program that are computed in order, and why."""
    for each in program.in_order:
        outputs = [output for output in program.outputs if output.name in each.states]
        if len(outputs) > 1:
            why = (
                f"{' and '.join(each.states)} read each other, and steps of several states have no merge here"
            )
        else:
            (output,) = outputs
            before = [
                itself(output.name, each.axis, each.backwards, far) for far in range(1, MOST_BEFORE + 1)
            ]
            reads = [n for n in walk(output.expr) if isinstance(n, Load) and n.tensor == output.name]
            names: dict[Expr, Expr] = {
                node: before[0]
                for node in walk(output.expr)
                if isinstance(node, Call) and node.fn == "where" and node.args[1] in reads
            }
            part = unmerged(replaced(output.expr, names), before)
            text = shortened(replaced(part, {before[0]: reads[0]})) if part is not None else str(reads[0])
            what = "has no merge" if part is not None else "is at other positions than its own"
            why = f"a step with {text} {what}"
        yield Stepwise(each.states, each.axis, why, program.source)


def finite_masks(program: Program, plan: Plan) -> Iterator[FiniteMask]:
    """Masks by a large negative number along an axis whose greatest value is taken, as in a softmax, that loops do not leave out."""
    seen: set[tuple[float, str]] = set()
    nest = lower(plan, program)
    for kernel in nest.kernels:
        for loop in loops_in(kernel.body):
            lets = [stmt.expr for stmt in loop.body if isinstance(stmt, Let)]
            folds = {node.op for node in walk(*lets) if isinstance(node, Reduce) and node.axis == loop.axis}
            if "max" not in folds or parted(loop, program, kernel.ascending) is not None:
                continue
            axis = dict(nest.domains).get(loop.axis, loop.axis)
            for node in walk(*lets):
                match node:
                    case Call("where", (condition, _, Const(number))) if -math.inf < number <= MASKING:
                        if loop.axis in free_axes(condition) and (number, axis) not in seen:
                            seen.add((number, axis))
                            written = re.findall(r"-\d[\d.]*(?:e[+-]?\d+)?", program.source)
                            text = next((text for text in written if float(text) == number), f"{number:g}")
                            yield FiniteMask(text, axis, loop.shard is not None, program.source)


def _reads(kernel: KernelPlan, tensor: str) -> bool:
    exprs = [o.expr for o in kernel.outputs] + [s.body for g in kernel.groups for s in g.group.states]
    return any(isinstance(node, Load) and node.tensor == tensor for node in walk(*exprs))


# -- plans -----------------------------------------------------------------------------------------


def predicted_for(report: Report) -> str:
    """What sizes and device the costs of plans are predicted for."""
    assumed = "" if report.was_called else ", sizes that are assumed until a call gives others"
    return f"costs are predicted{report.plan.at_sizes} on {report.device.name}{assumed}"


def plan_lines(plans: Sequence[Plan], chosen: Plan) -> Iterator[str]:
    """One line per candidate: its predicted cost, what a search has measured, and by how much and on which term
    the prediction loses."""
    for plan in plans:
        label = plan.schedule + (f" in {plan.shards} shards" if plan.shards > 1 else "")
        label += f" shared out evenly over {', '.join(plan.evened)}" if plan.evened else ""
        label += f", {len(plan.kernels)} kernel" + "s" * (len(plan.kernels) > 1)
        label += ", reassociated" if plan.order else ""
        if plan.cost is None or math.isinf(plan.cost.seconds):
            yield f"{label}: does not fit: {plan.reason}"
            continue
        cost = f"{label}: {duration(plan.cost.seconds)}"
        if plan.measured is not None:
            cost += f" (measured {duration(plan.measured)})"
        if plan is chosen or chosen.cost is None:
            yield f"{cost}   <- chosen"
            continue
        extra = plan.cost.seconds - chosen.cost.seconds
        name, most = worst_term(plan, chosen)
        if extra == 0:
            yield f"{cost}, the same as the chosen one"
        else:
            ratio = plan.cost.seconds / chosen.cost.seconds if chosen.cost.seconds else math.inf
            yield f"{cost}, {ratio:.2f} x: {duration(extra, '+')}, most of it {name} ({duration(most, '+')})"


def worst_term(plan: Plan, chosen: Plan) -> tuple[str, float]:
    """The cost term on which a plan differs most from the chosen one in the direction of the total, and by how
    many seconds."""
    mine, its = _terms(plan), _terms(chosen)
    direction = sum(mine.values()) - sum(its.values())
    gaps = {name: mine.get(name, 0.0) - its.get(name, 0.0) for name in {**mine, **its}}
    name = max(gaps, key=lambda n: math.copysign(1.0, direction) * gaps[n])
    return name, gaps[name]


def _terms(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in plan.cost.terms if plan.cost else ():
        found[part.name] = found.get(part.name, 0.0) + part.seconds
    return found
