"""The merge of a group of reductions over one axis.

The group's reductions are put into an e-graph three times, over the parts A and B of the axis and over their union AB,
each as the program defines it, its producers over the same part (Neptune's tags). The values over A and B are free; what
extraction finds for the values over AB is the merge. It is saturated once per program, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse import limits
from eqfuse.rules.catalogue import MERGE
from eqfuse.rules.egraph.encode import Encoder, global_name
from eqfuse.rules.egraph.extract import UNPROVED_EXP, Extraction
from eqfuse.rules.egraph.ranges import Ranges
from eqfuse.rules.egraph.saturate import Graph, Node, Report, TooManyTerms
from eqfuse.rules.engine import PLAIN, Engine
from eqfuse.rules.guards import Guarded, finite_states, guard_body, guard_divisors, total_factors
from eqfuse.rules.losses import is_nan_at_first, shifts_that_drift, undefined_at_first
from eqfuse.rules.merge import Combine, Finish, Group, Merge, Obstacle, Part, State, Update
from eqfuse.rules.obstacles import INTEGERS, cancelling, obstacle, undefined_before, unrestored
from eqfuse.rules.scope import current
from eqfuse.rules.split import Split, reads_state
from eqfuse.rules.states import dims_of, kept_by_masks, name_auxiliaries, name_states, split_of
from eqfuse.rules.tables.union import union_rules
from eqfuse.terms.folds import fold_of, identity
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Local,
    Reduce,
    call,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.types import kind
from eqfuse.threads import cached

MAX_AUXILIARY_ROUNDS = 4
FEW_STATES = 16


@dataclass(frozen=True)
class _Attempt:
    merge: Merge | None
    obstacles: tuple[Obstacle, ...]
    missing: tuple[State, ...]


def derive_group(
    axis: str,
    reduces: Sequence[Reduce],
    order: Sequence[str],
    strict_casts: bool = False,
    suffix: str = "",
    engine: Engine = PLAIN,
    dtypes: Mapping[str, str] | None = None,
) -> tuple[Group, Report]:
    """The group of these reductions over `axis` (in dependency order) with its merge, or why it has none.
    `order` is the program's order of axes, `suffix` ends the names of states; `dtypes` has the tensors and scalars
    that are integers.

    Where the merge needs a reduction that is no state, that accumulator is added and the derivation
    starts again. Where the saturation's budget ends first, the group has no merge.
    """
    named = name_states(axis, reduces, order, suffix)
    flags = filter(None, (kept_by_masks(s, split_of(axis, named)) for s in named))
    states = named + name_auxiliaries(axis, suffix, order, named, flags)
    report = Report()
    try:
        for _ in range(MAX_AUXILIARY_ROUNDS):
            limits.check()
            attempt = _attempt(axis, states, order, strict_casts, suffix, report, engine)
            if not attempt.missing or report.stopped:
                break
            states = states + attempt.missing
    except TooManyTerms as many:
        report.stopped = str(many)
        attempt = _Attempt(None, (), ())
    merge, obstacles = attempt.merge, attempt.obstacles
    if merge is None and report.stopped:
        last = named[-1]
        obstacles = (Obstacle(Reduce(last.op, axis, last.body), last.body, report.stopped, unfinished=True),)
    if merge is not None:
        obstacles = tuple(_rounded(axis, states, merge, dtypes or {}))
    if merge is None or obstacles:
        states, merge = name_states(axis, reduces, order, suffix), None
    return Group(axis, states, merge, obstacles), report


def _rounded(
    axis: str, states: Sequence[State], merge: Merge, dtypes: Mapping[str, str]
) -> Iterator[Obstacle]:
    """Reductions of integers that the merge computes in real numbers, as quotients are."""
    known = dict(dtypes)
    updates = {update.state: update for update in merge.update}
    combines = {combine.state: combine.value for combine in merge.combine}
    finishes = {finish.state: finish.value for finish in merge.finish}
    for state in states:
        if kind(Reduce(state.op, axis, state.body), known) != "int":
            continue
        known |= dict.fromkeys((state.name + end for end in ("", "_new", "_a", "_b")), "i64")
        if fold_of(state.op) is not None:  # it is combined as it is registered
            continue
        update = updates[state.name]
        known |= {p.name: "i64" for p in update.parts if kind(Reduce(p.op, axis, p.body), known) == "int"}
        values = [update.value, combines[state.name], finishes.get(state.name, update.value)]
        if any(kind(value, known) == "real" for value in values):
            condition = f"the {state.op} over {axis} is an integer, and its merge a real number"
            yield Obstacle(Reduce(state.op, axis, state.body), state.body, condition, INTEGERS)


def _attempt(
    axis: str,
    states: tuple[State, ...],
    order: Sequence[str],
    strict_casts: bool,
    suffix: str,
    report: Report,
    engine: Engine,
) -> _Attempt:
    encoder = Encoder(strict_casts, axis)
    own = frozenset(state.name for state in states)

    def opaque(expr: Expr) -> bool:
        return isinstance(expr, Reduce) and expr.axis != axis and not reads_state(expr, own)

    rules = (*MERGE, *union_rules(Reduce(state.op, axis, state.body) for state in states))
    with engine.session(current().applied(rules)) as saturation:
        terms: dict[tuple[str, str], str] = {}
        for part in ("A", "B", "AB"):
            local: dict[str, str] = {}
            for state in states:
                body = encoder.encode(state.body, part, local, opaque)
                term = global_name(f"state_{state.name}_{part}")
                encoder.lines.append(f'(let {term} (Red "{state.op}" "{axis}" "{part}" {body}))')
                local[state.name] = terms[state.name, part] = term
        marks = [f"(state {terms[s.name, part]})" for s in states for part in ("A", "B")]
        marks += [
            f"(step {terms[s.name, 'AB']} {terms[s.name, part]})" for s in states for part in ("A", "B")
        ]
        saturation.run(encoder.lines + encoder.facts([axis]) + marks)
        saturation.saturate()
        graph = saturation.read()
        report.add(saturation.report)
        ranges = Ranges(graph, encoder)
        return _Search(axis, suffix, states, tuple(order), encoder, graph, ranges, engine).attempt()


@dataclass(frozen=True)
class _Search:
    """Extraction of the AB values from a saturated e-graph."""

    axis: str
    suffix: str
    states: tuple[State, ...]
    axes: tuple[str, ...]
    encoder: Encoder
    graph: Graph
    ranges: Ranges
    engine: Engine

    @cached
    def split(self) -> Split:
        return split_of(self.axis, self.states)

    def nonneg(self, value: Expr) -> bool:
        """Whether a fact says that a part of a body is at least 0. What another pass has made is a leaf of this
        e-graph, of which it knows nothing."""
        term = self.encoder.terms["A"][value]
        return self.graph.roots.get(term) in {row[0] for row in self.graph.facts["nonneg"]}

    def obstacle(self, state: State) -> Obstacle:
        return obstacle(state, self.split, self.nonneg)

    def partial(self, state: State) -> Iterator[Expr]:
        """Roots and logarithms of what states of this axis give, which may be negative before all of it is seen."""
        own = {s.name for s in self.states}
        for node in walk(state.body):
            match node:
                case Call("sqrt" | "rsqrt" | "log", (a,)) if (
                    self.axis not in free_axes(a)
                    and any(isinstance(n, Local) and n.name in own for n in walk(a))
                    and not self.nonneg(a)
                ):
                    yield node

    def undefined(self, merge: Merge) -> Iterator[tuple[State, Expr]]:
        """States that do not start, and what in them is NaN before anything is seen."""
        first = {s.name: identity(s.op).value for s in self.states}
        updates = {update.state: update.value for update in merge.update}
        combines = {combine.state: combine.value for combine in merge.combine}
        first_of_a = {f"{name}_a": value for name, value in first.items()}
        for state in self.states:
            if state.op in REDUCTIONS and (
                is_nan_at_first(updates[state.name], first)
                or is_nan_at_first(combines[state.name], first_of_a)
            ):
                parts = list(undefined_at_first(self.guarded(state).body, self.split))
                yield from ((state, part) for part in parts or [state.body])

    def root(self, state: State, part: str) -> int:
        return self.graph.roots[global_name(f"state_{state.name}_{part}")]

    def values(self, part: str, suffix: str) -> dict[int, Expr]:
        return {self.root(s, part): Local(s.name + suffix, s.dims) for s in self.states}

    def attempt(self) -> _Attempt:
        updates, stuck = self.order("update", {**self.values("A", "")}, parts=("B",))
        if stuck:
            missing, hopeless = self.missing_accumulators(stuck)
            return _Attempt(None, tuple(self.obstacle(s) for s in hopeless), missing)
        combines, stuck = self.order(
            "combine", {**self.values("A", "_a"), **self.values("B", "_b")}, parts=()
        )
        if stuck:
            return _Attempt(None, tuple(self.obstacle(s) for s in stuck), ())
        undefined = [(s, root) for s in self.states for root in self.partial(s)]
        if undefined:
            return _Attempt(None, tuple(undefined_before(self.axis, *found) for found in undefined), ())
        lost = [(s, total) for s in self.states if not s.auxiliary for total in self.guarded(s).lost]
        if lost:
            return _Attempt(None, tuple(unrestored(self.axis, *found) for found in lost), ())
        drifting = [(s, shift) for s in self.states for shift in shifts_that_drift(s.body, self.split)]
        if drifting:
            return _Attempt(None, tuple(cancelling(self.axis, *found) for found in drifting), ())
        folded: dict[Expr, Local] = {}
        merge = Merge(
            tuple(self.update(*found, folded) for found in updates),
            tuple(Combine(found[0].name, self.total(*found)) for found in combines),
            tuple(filter(None, (self.finish(s) for s in self.states if not s.auxiliary))),
            any(self.guarded(s).late for s in self.states if not s.auxiliary),
        )
        blank = tuple(undefined_before(self.axis, *found) for found in self.undefined(merge))
        if blank:
            return _Attempt(None, blank, ())
        return _Attempt(merge, (), ())

    def order(
        self, purpose: str, known: dict[int, Expr], parts: tuple[str, ...]
    ) -> tuple[list[tuple[State, Expr, bool]], tuple[State, ...]]:
        """The AB value of every state, in an order in which each reads only what is there, and whether all its
        exponents are at most 0; and the rest."""

        def allowed(node: Node) -> bool:
            return node.head != "Red" or node.words[1] != self.axis or node.words[2] in parts

        found: list[tuple[State, Expr, bool]] = []
        rest = list(self.states)
        while rest:
            best = Extraction(self.graph, self.encoder, self.ranges, known, allowed)
            costs = {s.name: cost for s in rest if (cost := best.cost(self.root(s, "AB"))) is not None}
            if not costs:
                break
            # in the program's order where the work is the same: forms of a sum differ by less than an operation
            ready = sorted(
                (s for s in rest if s.name in costs),
                key=lambda s: (costs[s.name][0], round(costs[s.name][1], 2)),
            )
            # of many states the cheapest ones together: an extraction for each takes minutes where there are a hundred
            for state in ready[: 1 if len(rest) <= FEW_STATES else len(rest) // 4]:
                key = self.root(state, "AB")
                chosen = self.as_written(state, self.repaired_from_own(state, best, known))
                self.engine.chose(f"{purpose} {state.name}", chosen, key)
                found.append((state, chosen.term(key), costs[state.name][0] < UNPROVED_EXP))
                known = {**known, key: Local(f"{state.name}_new", state.dims)}
                rest.remove(state)
        return found, tuple(rest)

    def repaired_from_own(self, state: State, best: Extraction, known: Mapping[int, Expr]) -> Extraction:
        """An extraction whose value of a state reads itself, what its body reads, and what was added to close the merge, if
        there is one: what it could be restored from besides may be NaN where the program is not."""
        key = self.root(state, "AB")
        needed = self.read_by(state)
        others = {s for s in self.states if s not in needed and not s.auxiliary}
        apart = {k for s in others for part in ("A", "B", "AB") if (k := self.root(s, part)) in known}
        if not apart or {known[k] for k in apart}.isdisjoint(walk(best.term(key))):
            return best
        own = replace(best, known={k: v for k, v in known.items() if k not in apart}, best={}, _risks={})
        cost = own.cost(key)
        return best if cost is None or cost[0] > best.best[key][0][0] else own

    def as_written(self, state: State, best: Extraction) -> Extraction:
        """An extraction that takes nothing out of the parts of a reduction whose body reads no state. What may leave it was
        decided where whole axes were looked at: what other passes have stored, which may keep it in range, is a leaf here."""
        if self.read_by(state) != {state} or state.body not in self.encoder.terms["B"]:
            return best
        folds = (node for node in walk(best.term(self.root(state, "AB"))) if isinstance(node, Reduce))
        if all(fold.axis != self.axis or fold.body == state.body for fold in folds):
            return best
        body = self.graph.roots.get(self.encoder.terms["B"][state.body])

        def allowed(node: Node) -> bool:
            own = node.head != "Red" or node.words[1] != self.axis or node.args[0] == body
            return own and best.allowed(node)

        own = replace(best, allowed=allowed, best={}, _risks={})
        return best if own.cost(self.root(state, "AB")) is None else own

    def read_by(self, state: State) -> set[State]:
        """A state and those whose values its body reads, and so on."""
        named = {s.name: s for s in self.states}
        found, rest = {state}, [state]
        while rest:
            for node in walk(rest.pop().body):
                if isinstance(node, Local) and (other := named.get(node.name)) and other not in found:
                    found.add(other)
                    rest.append(other)
        return found

    def missing_accumulators(self, stuck: tuple[State, ...]) -> tuple[tuple[State, ...], tuple[State, ...]]:
        """Reductions over A that would close the merge (their bodies read values over A alone); or else the states
        that no accumulator would help."""
        old = self.values("A", "")

        def over_a(node: Node) -> bool:
            return node.head != "Red" or node.words[1] != self.axis or node.words[2] == "A"

        inside = Extraction(self.graph, self.encoder, self.ranges, old, over_a)
        known = {**old, **self.values("AB", "_new")}

        def allowed(node: Node) -> bool:
            if node.head != "Red" or node.words[1] != self.axis:
                return True
            return node.words[2] == "B" or (node.words[2] == "A" and node.args[0] in inside.best)

        wanted: dict[Reduce, None] = {}
        hopeless: list[State] = []
        for state in stuck:
            key = self.root(state, "AB")
            others = {k: v for k, v in known.items() if k != key}
            best = Extraction(self.graph, self.encoder, self.ranges, others, allowed)
            if best.cost(key) is None:
                hopeless.append(state)
                continue
            for op, body in best.reductions(key, self.axis, "A", inside):
                wanted[Reduce(op, self.axis, body)] = None
        if hopeless:
            return (), tuple(hopeless)
        return name_auxiliaries(self.axis, self.suffix, self.axes, self.states, wanted), stuck

    def update(self, state: State, value: Expr, bounded: bool, folded: dict[Expr, Local]) -> Update:
        """Names the fresh reductions over the tile and makes everything total. `folded` has those of registered
        folds so far: their variables are folded together, and each is read by the updates of all."""
        parts: list[Part] = []

        def step(node: Expr) -> Expr:
            match node:
                case Reduce(op, axis, body) if axis == self.axis:
                    if node in folded:
                        return folded[node]
                    name = f"{state.name}_tile" + (str(len(parts) + 1) if parts else "")
                    if fold_of(op) is not None:
                        same = [s.name for s in self.states if s.op == op and s.body is state.body]
                        name = f"{same[0]}_tile" if same else name
                        folded[node] = Local(name, dims_of(node, self.axes))
                    parts.append(Part(name, op, guard_body(body, op, self.split).body))
                    return Local(name, dims_of(node, self.axes))
                case _:
                    return node

        named = transform(value, step)
        return Update(state.name, tuple(parts), self.total(state, named, bounded))

    def guarded(self, state: State) -> Guarded:
        return guard_body(state.body, state.op, self.split)

    def total(self, state: State, value: Expr, bounded: bool) -> Expr:
        if fold_of(state.op) is not None:  # its combination is total as it is written
            return value
        if self.guarded(state).inner:
            # an infinite sum stays as it is: what others would move it by may have the other sign
            others = [s.name for s in self.states if s.op == "sum" and s is not state]
            value = finite_states(value, frozenset(n + end for n in others for end in ("", "_a", "_b")))
        masked = kept_by_masks(state, self.split) is not None
        return total_factors(guard_divisors(value, self.split), state.op, bounded, masked)

    def finish(self, state: State) -> Finish | None:
        guarded = self.guarded(state)
        if not guarded.recovers:
            return None
        value = Local(state.name, state.dims)
        recovered = guarded.recovered(value)
        any_kept = kept_by_masks(state, self.split)
        if any_kept is not None:
            (flag,) = (s for s in self.states if s.auxiliary and (s.op, s.body) == ("max", any_kept.body))
            recovered = call("where", call("gt", Local(flag.name, flag.dims), Const(0)), recovered, value)
        return Finish(state.name, recovered)
