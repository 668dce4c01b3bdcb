"""Mistakes of sharded programs: in their steps, and in what ranks do with them. Verification has to refuse each.

A mutant of steps makes of a `ShardPlan` every one that differs from it by this one mistake. A mutant of the engine
changes, while it is entered, how all ranks run steps or are answered; it is tried where a plan has the step that it
is about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import eqfuse as eq
from eqfuse.certification import Checks
from eqfuse.rules.merge import State
from eqfuse.sharding import check, engine, exchange
from eqfuse.sharding.nodes import (
    PASSED,
    RANK,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Grouped,
    Line,
    Ring,
    ShardPlan,
    Step,
    Tree,
    flat,
    own_rank,
    shown,
    start_of,
    total_of,
)
from eqfuse.sharding.sharded import Sharded
from eqfuse.terms.folds import identity, only_where
from eqfuse.terms.nodes import (
    COMBINE,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    call,
    replaced,
    transform,
    walk,
)
from eqfuse.verify.certificate import Certificate


@dataclass(frozen=True)
class Mutant:
    """`steps` yields plans with the mistake. `engine` enters the mistake for every plan that `has` a place for it."""

    name: str
    what: str
    steps: Callable[[ShardPlan], Iterable[ShardPlan]] | None = None
    engine: Callable[[], Any] | None = None
    has: Callable[[ShardPlan], bool] = lambda plan: True


# Mistakes in steps --------------------------------------------------------------------------------


def _each(change: Callable[[Step], Iterable[Step]]) -> Callable[[ShardPlan], Iterator[ShardPlan]]:
    """One step changed."""

    def made(plan: ShardPlan) -> Iterator[ShardPlan]:
        for at, step in enumerate(plan.steps):
            for new in change(step):
                if new != step:
                    yield replace(plan, steps=(*plan.steps[:at], new, *plan.steps[at + 1 :]))

    return made


def _lines(change: Callable[[Line], Iterable[Line]]) -> Callable[[ShardPlan], Iterator[ShardPlan]]:
    """One line of one step changed."""

    def in_step(step: Step) -> Iterator[Step]:
        match step:
            case Compute(lines, _):
                yield from (replace(step, lines=new) for new in _one(lines, change))
            case Grouped(_, _, Compute(lines, _) as inner, _):
                yield from (replace(step, compute=replace(inner, lines=new)) for new in _one(lines, change))
            case Tree(_, _, lines):
                yield from (replace(step, merge=new) for new in _one(lines, change))
            case Ring(_, _, _, lines):
                yield from (replace(step, update=new) for new in _one(lines, change))

    return _each(in_step)


def _one(lines: Sequence[Line], change: Callable[[Line], Iterable[Line]]) -> Iterator[tuple[Line, ...]]:
    for at, line in enumerate(lines):
        for new in change(line):
            yield (*lines[:at], new, *lines[at + 1 :])


def _scalars(starts: str, change: Callable[[Scalar], Expr]) -> Callable[[ShardPlan], Iterator[ShardPlan]]:
    """One scalar of a line changed, of those whose names start so."""

    def made(line: Line) -> Iterator[Line]:
        for node in walk(line.value):
            if isinstance(node, Scalar) and node.name.startswith(starts):
                yield replace(line, value=replaced(line.value, {node: change(node)}))

    return _lines(made)


def _over_ranks(line: Line, change: Callable[[Reduce], Expr]) -> Iterator[Line]:
    """Each reduction over the ranks changed."""
    for node in walk(line.value):
        if isinstance(node, Reduce) and node.axis == RANK:
            yield replace(line, value=replaced(line.value, {node: change(node)}))


def _without_factor(line: Line) -> Iterator[Line]:
    """A share `x * factor`, or `x + more`, that is `x`."""
    for node in walk(line.value):
        if not (isinstance(node, Reduce) and node.axis == RANK or line.name.endswith("_share")):
            continue
        body = node.body if isinstance(node, Reduce) else node
        if isinstance(body, Call) and body.fn in ("mul", "add", "where"):
            part = next((arg for arg in body.args if _is_state(arg)), None)
            if part is not None:
                new = Reduce(node.op, node.axis, part) if isinstance(node, Reduce) else part
                yield replace(line, value=replaced(line.value, {node: new}))


def _is_state(expr: Expr) -> bool:
    return isinstance(expr, Load | Local)


def _swapped(step: Step) -> Iterator[Step]:
    if isinstance(step, Tree):
        ends = {f"{name}_{a}": f"{name}_{b}" for name in step.values for a, b in ("ab", "ba")}

        def change(node: Expr) -> Expr:
            match node:
                case Load(tensor, index) if tensor in ends:
                    return Load(ends[tensor], index)
                case Local(name, dims) if name in ends:
                    return Local(ends[name], dims)
            return node

        yield replace(
            step, merge=tuple(replace(each, value=transform(each.value, change)) for each in step.merge)
        )


def _swapped_state(step: Step) -> Iterator[Step]:
    """One state of the merge from the other side."""
    if isinstance(step, Tree):
        for at, line in enumerate(step.merge):
            nodes = list(walk(line.value))
            for name in step.values:
                if all(any(_names(node, f"{name}_{end}") for node in nodes) for end in "ab"):
                    new = replace(line, value=_from_one(line.value, name))
                    yield replace(step, merge=(*step.merge[:at], new, *step.merge[at + 1 :]))


def _from_one(value: Expr, name: str) -> Expr:
    return transform(value, lambda node: _named(node, f"{name}_b", f"{name}_a"))


def _named(node: Expr, old: str, new: str) -> Expr:
    match node:
        case Load(tensor, index) if tensor == old:
            return Load(new, index)
        case Local(name, dims) if name == old:
            return Local(new, dims)
    return node


def _among(node: Reduce, relation: str) -> Reduce:
    """A fold over the ranks that have this relation to rank 0."""
    return Reduce(node.op, node.axis, only_where(call(relation, Axis(RANK), Const(0.0)), node.op, node.body))


def _first_rank_missing(line: Line) -> Iterator[Line]:
    return _over_ranks(line, lambda node: _among(node, "gt"))


def _first_rank_twice(line: Line) -> Iterator[Line]:
    """What rank 0 gives a sum or a product, once more."""
    for new in _over_ranks(
        line, lambda r: call(COMBINE[r.op], r, _among(r, "eq")) if r.op in ("sum", "prod") else r
    ):
        if new != line:
            yield new


def _other_op(step: Step) -> Iterator[Step]:
    if isinstance(step, AllReduce):
        yield replace(step, op={"sum": "max", "prod": "max"}.get(step.op, "sum"))


def _with_own_rank(line: Line) -> Iterator[Line]:
    wider = {"lt": "le", "gt": "ge"}

    def change(node: Expr) -> Expr:
        match node:
            case Call(fn, (Axis(axis), Scalar(name)) as args) if (
                fn in wider and axis == RANK and name.startswith(RANK)
            ):
                return call(wider[fn], *args)
        return node

    yield replace(line, value=transform(line.value, change))


def _without_ranks_before(line: Line) -> Iterator[Line]:
    """No rank is before any: prefixes start anew on each."""
    own = own_rank("")

    def change(node: Expr) -> Expr:
        match node:
            case Call("lt" | "gt", (Axis(axis), Scalar(name))) if axis == RANK and name.startswith(own):
                return call("lt", Const(1.0), Const(0.0))
        return node

    yield replace(line, value=transform(line.value, change))


def _prefix_is_whole(line: Line) -> Iterator[Line]:
    """The positions up to each one without their condition."""
    if line.is_prefix and isinstance(line.value, Reduce):
        match line.value.body:
            case Call("where", (_, inner, _)):
                yield replace(line, value=Reduce(line.value.op, line.value.axis, inner))


def _finish_skipped(line: Line) -> Iterator[Line]:
    """A value that is exact as it is carried."""
    if line.name.endswith("_final"):
        carried = line.name.removesuffix("_final")
        dims = tuple(map(Axis, line.axes))
        yield replace(line, value=Load(carried, dims) if dims else Local(carried, ()))


def _merge_skipped(line: Line) -> Iterator[Line]:
    """The states of one rank in place of all."""
    return _over_ranks(line, lambda node: _among(node, "eq"))


def _exchange_skipped(plan: ShardPlan) -> Iterator[ShardPlan]:
    """What a rank has in place of what all have reduced."""
    for at, step in enumerate(plan.steps):
        if isinstance(step, AllReduce | Tree):
            lines = tuple(
                Line(
                    f"{name}_all",
                    plan.dims[name],
                    Load(name, tuple(map(Axis, plan.dims[name]))) if plan.dims[name] else Local(name, ()),
                )
                for name in step.values
            )
            own = Compute(lines, tuple(line.name for line in lines))
            yield replace(plan, steps=(*plan.steps[:at], own, *plan.steps[at + 1 :]))


def _update_forgets(step: Step) -> Iterator[Step]:
    """A ring whose state is what its last operands make of it."""
    if isinstance(step, Ring):
        for state in step.states:
            update = tuple(
                replace(line, value=_without(line.value, state)) if line.name == f"{state.name}_new" else line
                for line in step.update
            )
            yield replace(step, update=update)


def _without(value: Expr, state: State) -> Expr:
    """With nothing seen in place of a state."""
    return transform(value, lambda node: identity(state.op) if _names(node, state.name) else node)


def _names(node: Expr, name: str) -> bool:
    return isinstance(node, Load) and node.tensor == name or isinstance(node, Local) and node.name == name


# Mistakes of the engine ---------------------------------------------------------------------------


@contextmanager
def _answers(change: Callable[[Any, int, Any], Any]) -> Iterator[None]:
    """Other answers than the right ones: `change(requests, rank, right)`."""
    right = exchange.answer

    def wrong(requests: Sequence[Any], rank: int, arrays: Any) -> Any:
        return change(requests, rank, lambda asked=requests, of=rank: right(asked, of, arrays))

    with patch.object(exchange, "answer", wrong):
        yield


def _of(kind: type, change: Callable[[Any, int, Any], Any]) -> Callable[[], Any]:
    return lambda: _answers(
        lambda requests, rank, right: (
            change(requests, rank, right) if isinstance(requests[rank], kind) else right()
        )
    )


def _reversed(requests: Sequence[Any], rank: int, right: Any) -> Any:
    return right(list(reversed(requests)), len(requests) - 1 - rank)


def _of_next_rank(requests: Sequence[Any], rank: int, right: Any) -> Any:
    """The rows of the next rank, where it has as many."""
    lengths, to = requests[rank].lengths, (rank + 1) % len(requests)
    return right(requests, to if lengths[to] == lengths[rank] else rank)


def _first_of_all(requests: Sequence[Any], rank: int, right: Any) -> Any:
    """Rank 0's for the last rank's."""
    return right([*requests[:-1], requests[0]], rank)


def _last_missing(requests: Sequence[Any], rank: int, right: Any) -> Any:
    return right(requests[:-1], rank) if rank < len(requests) - 1 else right()


def _starts_at(change: Callable[[int], int]) -> Callable[[], Any]:
    """The positions that ranks read; what they hold stays."""
    scalars = engine.Place.scalars

    def wrong(self: engine.Place) -> dict[str, int]:
        starts = start_of("")
        return {n: change(v) if n.startswith(starts) else v for n, v in scalars(self).items()}

    return lambda: patch.object(engine.Place, "scalars", wrong)


def _ring_skips(turn: int) -> Callable[[], Any]:
    """Rings whose operands are not computed with in a turn."""
    return lambda: patch.object(check, "run", _without_turn(turn))


def _without_turn(skipped: int) -> Callable[..., Any]:
    def run(plan: ShardPlan, place: Any, given: Any, machine: Any) -> Any:
        return engine.run(plan, place, given, _Skipping(machine, skipped))

    return run


class _Skipping:
    """A machine that leaves out a turn of each ring."""

    def __init__(self, machine: Any, skipped: int) -> None:
        self.machine, self.skipped, self.turns = machine, skipped, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def compute(self, lines: Any, gives: Any, values: Any, place: Any) -> Any:
        if start_of(PASSED) in values:
            self.turns += 1
            if self.turns - 1 == self.skipped:
                return {name: values[name.removesuffix("_new")] for name in gives}
        return self.machine.compute(lines, gives, values, place)


def _ring_stays() -> Any:
    """Operands that say that they start where this rank's do."""

    def run(plan: ShardPlan, place: Any, given: Any, machine: Any) -> Any:
        return engine.run(plan, place, given, _Staying(machine))

    return patch.object(check, "run", run)


class _Staying:
    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def compute(self, lines: Any, gives: Any, values: Any, place: Any) -> Any:
        if start_of(PASSED) in values:
            values = {**values, start_of(PASSED): 0}
        return self.machine.compute(lines, gives, values, place)


def _has(*kinds: type) -> Callable[[ShardPlan], bool]:
    return lambda plan: any(isinstance(step, kinds) for step in flat(plan.steps))


def _reads(name: str) -> Callable[[ShardPlan], bool]:
    def found(plan: ShardPlan) -> bool:
        lines = [line for step in flat(plan.steps) for line in _lines_of(step)]
        nodes = walk(*(line.value for line in lines))
        return any(isinstance(node, Scalar) and node.name.startswith(name) for node in nodes)

    return found


def _lines_of(step: Step) -> tuple[Line, ...]:
    match step:
        case Compute(lines, _) | Tree(_, _, lines) | Ring(_, _, _, lines):
            return lines
    return ()


MUTANTS: tuple[Mutant, ...] = (
    Mutant("sides of a merge", "the merge of two parts has them the other way round", _each(_swapped)),
    Mutant("one side of a merge", "a merge reads one state of the other part twice", _each(_swapped_state)),
    Mutant("a shard left out", "a fold over the ranks leaves out the first", _lines(_first_rank_missing)),
    Mutant("a shard twice", "a fold over the ranks has the first twice", _lines(_first_rank_twice)),
    Mutant("one shard alone", "the first rank's state in place of all", _lines(_merge_skipped)),
    Mutant("no exchange", "a rank's own state in place of that of all", _exchange_skipped),
    Mutant(
        "share without its factor", "a rank's part is not scaled to the state of all", _lines(_without_factor)
    ),
    Mutant("another reduction", "an all-reduce by MAX of sums, by SUM of others", _each(_other_op)),
    Mutant(
        "start one further",
        "a rank's positions count from one further on",
        _scalars(start_of(""), lambda n: call("add", n, Const(1.0))),
    ),
    Mutant("start at 0", "every rank's positions count from 0", _scalars(start_of(""), lambda n: Const(0.0))),
    Mutant(
        "total less one",
        "the extent over all ranks is one less",
        _scalars(total_of(""), lambda n: call("sub", n, Const(1.0))),
    ),
    Mutant("own rank before", "what is carried into a rank has the rank's own state", _lines(_with_own_rank)),
    Mutant("nothing carried", "prefixes start anew on every rank", _lines(_without_ranks_before)),
    Mutant("prefixes that see all", "positions after each one are in its prefix", _lines(_prefix_is_whole)),
    Mutant("no finish", "a state is taken as it is carried", _lines(_finish_skipped)),
    Mutant("a ring that forgets", "an update of a ring starts from nothing", _each(_update_forgets)),
    Mutant(
        "gathered in another order",
        "the states of all ranks, the last first",
        engine=_of(exchange.Gather, _reversed),
        has=_has(AllGather),
    ),
    Mutant(
        "joined in another order",
        "the operands of all ranks, the last first",
        engine=_of(exchange.Join, _reversed),
        has=_has(Concatenate),
    ),
    Mutant(
        "the last one's operands",
        "rank 0's operands in place of the last rank's",
        engine=_of(exchange.Join, _first_of_all),
        has=_has(Concatenate),
    ),
    Mutant(
        "the last one's state",
        "rank 0's state in place of the last rank's",
        engine=_of(exchange.Gather, _first_of_all),
        has=_has(AllGather),
    ),
    Mutant(
        "a total of fewer",
        "an all-reduce without the last rank",
        engine=_of(exchange.Total, _last_missing),
        has=_has(AllReduce),
    ),
    Mutant(
        "rows of another rank",
        "an all-to-all gives the rows of the next rank",
        engine=_of(exchange.Parts, _of_next_rank),
        has=_has(AllToAll),
    ),
    Mutant(
        "rows of too few",
        "an all-to-all has rank 0's part in place of the last one's",
        engine=_of(exchange.Parts, _first_of_all),
        has=_has(AllToAll),
    ),
    Mutant(
        "a ring without its first turn",
        "a rank's own operands are not in its state",
        engine=_ring_skips(0),
        has=_has(Ring),
    ),
    Mutant(
        "a ring without its last turn",
        "the next rank's operands are not in its state",
        engine=_ring_skips(2),
        has=_has(Ring),
    ),
    Mutant(
        "a ring that passes nothing on",
        "every turn has a rank's own operands",
        engine=_of(exchange.Pass, lambda requests, rank, right: lambda: list(requests[rank].tensors)),
        has=_has(Ring),
    ),
    Mutant(
        "operands of a ring start at 0",
        "passed operands say that they are the first",
        engine=_ring_stays,
        has=lambda plan: _has(Ring)(plan) and _reads(start_of(PASSED))(plan),
    ),
    Mutant(
        "a scan that counts back",
        "positions before the first",
        engine=_starts_at(lambda start: start - 1),
        has=_reads(start_of("")),
    ),
)

TRIALS = 16

ATTENTION = """
s[i,j] = sum[d](Q[i,d] * K[j,d])
m[i] = max[j](s[i,j])
O[i,e] = sum[j](exp(s[i,j] - m[i]) * V[j,e]) / sum[j](exp(s[i,j] - m[i]))
return O
"""
CAUSAL = ATTENTION.replace(
    "= sum[d](Q[i,d] * K[j,d])", "= where(j <= i + N(j) - N(i), sum[d](Q[i,d] * K[j,d]), -inf)"
)

SUBJECTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "attention": (ATTENTION, ("j",), ()),
    "attention, rows of outputs": (ATTENTION, ("j",), ("i",)),
    "causal attention": (CAUSAL, ("i", "j"), ()),
    "mean and deviation": (
        """
        m[i] = mean[j](x[i,j])
        v[i] = mean[j](sq(x[i,j] - m[i]))
        y[i,j] = (x[i,j] - m[i]) * rsqrt(v[i] + 1)
        return y
        """,
        ("j",),
        (),
    ),
    "positions": ("a[i] = argmax[j](x[i,j])\ny[i] = sum[j](x[i,j] * j)\nreturn a, y", ("j",), ()),
    "the end of a recurrence": ("y[i] = linear_recurrence[t](a[i,t], b[i,t])\nreturn y", ("t",), ()),
    "prefix sums": ("i: axis[j]\ny[i,d] = sum[j <= i](x[j,d])\nreturn y", ("j",), ()),
    "suffix sums": ("i: axis[j]\ny[i,d] = sum[j >= i](x[j,d] * j)\nreturn y", ("j",), ()),
    "recurrence": ("h[t,d] = a[t,d] * h[t-1,d] + b[t,d]\nreturn h", ("t",), ()),
}
"""Program, sharded axes, and those of outputs alone."""


@cache
def subjects() -> dict[str, Sharded]:
    return {
        name: eq.shard(eq.compile(source), 4, dict.fromkeys(axes, "r"), out=dict.fromkeys(out, "r"))
        for name, (source, axes, out) in SUBJECTS.items()
    }


@dataclass(frozen=True)
class Same:
    """Places where a mutant changes nothing that is computed in exact arithmetic: its name, the subject, and the
    changed lines with the strategy behind, all as patterns. Some of them are refused all the same: by which sides
    of a mask trials have seen."""

    mutant: str
    subject: str
    changed: str
    why: str


MAXIMA = "softmax is the same about any maximum"
DEVIATIONS = "sums of deviations from the mean are 0, but for rounding"

SAME: tuple[Same, ...] = (
    Same(
        "sides of a merge",
        "(causal )?attention.*|mean and deviation|positions",
        "",
        "sums and maxima have no order",
    ),
    Same("one side of a merge", "mean and deviation", r"aux_j2_new\[i\] = aux_j2_a.*\(aux_j2_a", DEVIATIONS),
    Same(
        "one side of a merge",
        "mean and deviation",
        r"sum_j2_new\[i\] = .*\* aux_j2_a.*\* aux_j2_a",
        DEVIATIONS,
    ),
    Same(
        "one side of a merge",
        "positions",
        r"argmax_v_j_new.*argmax_k_j_a\[i\] <= argmax_k_j_a",
        "of equal values either is the maximum",
    ),
    Same(
        "share without its factor",
        "mean and deviation",
        r"sum_j2\[i\] \+ (aux|\(finite[^*]*\) \* \(aux)",
        DEVIATIONS,
    ),
    Same("a shard left out|a shard twice", "suffix sums", "carry", "no rank is before rank 0"),
    Same("start one further|start at 0|total less one", "causal attention", "^max_j_tile", MAXIMA),
    Same("start one further|start at 0", "positions", r"= argmax\.v", "a maximum, whatever its position"),
    Same(
        "no finish",
        "(causal )?attention(, rows of outputs)?",
        "sum_j2?_.*final",
        "it is of rows of -inf alone, which no field has",
    ),
    Same(
        "gathered in another order",
        "attention.*|mean and deviation|positions",
        "",
        "sums and maxima have no order",
    ),
    Same("the last one's state", "prefix sums|recurrence", "carry", "no rank is behind the last"),
)


@dataclass(frozen=True)
class Place:
    """A mutant in a plan: `changed` are its wrong lines, or the strategy. `same` is why it is no mistake there, ""
    where it is one."""

    subject: str
    strategy: str
    changed: str
    same: str
    certificate: Certificate

    @property
    def is_refused(self) -> bool:
        """Whether a call of this plan raises."""
        found = self.certificate
        return found.counterexample is not None or not found.ok and bool(found.over)


def mutated(mutant: Mutant, plan: ShardPlan) -> Iterator[ShardPlan]:
    """The plans with a mistake in their steps, those that differ alone."""
    if mutant.steps is not None:
        yield from (found for found in mutant.steps(plan) if found.steps != plan.steps)


def certificate(sharded: Sharded, plan: ShardPlan) -> Certificate:
    return check.certified(sharded.kernel.program, plan, sharded.sharding, {}, Checks(TRIALS))


def places(mutant: Mutant) -> Iterator[Place]:
    """Where a mutant can be made, and what verification says of it there."""
    for name, sharded in subjects().items():
        for plan in sharded.strategies:
            if mutant.engine is not None and mutant.has(plan):
                with mutant.engine():
                    found = certificate(sharded, plan)
                yield Place(name, plan.strategy, plan.strategy, _same(mutant, name, plan.strategy), found)
            for wrong in mutated(mutant, plan):
                before = shown(plan.steps).splitlines()
                changed = "\n".join(
                    line.strip() for line in shown(wrong.steps).splitlines() if line not in before
                )
                why = _same(mutant, name, f"{changed}\n{plan.strategy}")
                yield Place(name, plan.strategy, changed, why, certificate(sharded, wrong))


def _same(mutant: Mutant, subject: str, changed: str) -> str:
    for same in SAME:
        if (
            re.fullmatch(same.mutant, mutant.name)
            and re.fullmatch(same.subject, subject)
            and re.search(same.changed, changed, re.MULTILINE)
        ):
            return same.why
    return ""
