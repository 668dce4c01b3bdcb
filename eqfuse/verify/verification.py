"""Rounds of trials in which stages of the compiler, or two programs, are run on the same random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import thread_time
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from eqfuse.limits import Limits
from eqfuse.terms.domain import JOINING
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import Call, Expr, Load, Local, walk
from eqfuse.terms.printer import show
from eqfuse.verify.adversary import (
    branches_on_data,
    hardened,
    with_numbers,
)
from eqfuse.verify.bound import Bound
from eqfuse.verify.branches import Branches, Goal, Untaken, conjunction
from eqfuse.verify.certificate import (
    NEVER,
    NO_THRESHOLDS,
    NOT_COVERED,
    SAME_EVERYWHERE,
    Certificate,
    Counterexample,
    StageReport,
)
from eqfuse.verify.comparison import ENOUGH, STRAIGHT_ROUNDS, Tally, compare, field_array
from eqfuse.verify.field.casts import rounded_of
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.inputs import indexing_tensors
from eqfuse.verify.sampling import Inputs, full_entropy
from eqfuse.verify.sizes import volume as largest_value
from eqfuse.verify.solve import is_dead, solved
from eqfuse.verify.source import Source, Stage

ROUNDS = 24
"""Rounds of trials at most: more are drawn while some output position was not compared often enough."""
SMALLEST_SCALE = 1e-6
"""Real inputs are drawn smaller, down to this, where most trials leave the range of float64."""
SMALL = 4096
"""Elements of inputs over all trials up to which a round takes what its operations take, however many elements they have."""
MOSTLY = 0.6
"""Share of values with roots of non-squares above which a round leaves too few others."""
MOST_APART = 6
"""So many branches are supposed one by one where all together differ."""
ORDERS = 4
"""Orders of all numbers that are supposed."""
MEASURED = 2**14
"""Where the largest value of a program, over all trials, has more elements, what the stages hold is counted beforehand."""
MOST_OPEN = 0.5
"""Where rounding leaves more of the trials open, it explains nothing: programs that differ in them differ."""


PATH_TRIALS = 64
"""Trials that tell whether usual ones meet what leads to a side of a branch."""
FOUND = 4
"""So many different numbers are looked for that take a side of a branch."""


Draws = Literal["as usual", "at thresholds"]
"""How inputs are drawn where a difference is looked for."""


class Verification:
    """Rounds of trials, each in a field of its own, and what they showed."""

    def __init__(
        self, trials: int, seed: int, field: FieldChoice, requested: float, limits: Limits | None = None
    ) -> None:
        if trials < 1:
            raise ValueError("at least one trial is needed")
        self._trials, self._seed, self._kind, self._requested = trials, seed, field, requested
        self._reports: list[StageReport] = []
        self._interpreted: set[str] = set()
        self._opaque: set[str] = set()
        self._extremes: dict[str, npt.NDArray[np.int64]] = {}
        self._primes = (0, 0)
        self._drawn = self._resampled = 0
        self._scale = 1.0
        self._within = False
        self._vanishing = False
        self._bounds: list[tuple[Bound, int, int, int]] = []
        self._constant: set[str] = set()
        self._untaken: set[str] = set()
        self._supposed: set[str] = set()
        self._unreached: set[str] = set()
        self._dead: dict[Goal, bool] = {}
        self.branches = Branches(field.p, field.q)
        self._thresholds: int | None = None
        self._searched: list[Mapping[str, int]] = []
        self.hidden: set[str] = set()
        self.unshown: Counterexample | None = None
        self.signs_of_nan = False
        self.limits = limits or Limits.of_environment()
        self._deadline = self.limits.deadline()
        self.over = ""
        self.reason = ""
        self.counterexample: Counterexample | None = None

    def run(
        self,
        stages: Sequence[Stage],
        source: Source,
        *,
        half: bool = False,
        numbers: Sequence[float] = (),
        hard: int = 0,
    ) -> None:
        """Compares the stages with the source until every output position was compared often enough, or
        never will be. With `half`, the first round has half as many trials, unless that is known to be too few; it has
        `hard` more at the thresholds of these numbers."""
        bounds = source.bounds(stages, self._kind)
        tallies = {stage.name: Tally() for stage in stages}
        least_rounds = source.least_rounds()
        usual = self._first(bounds, source) if half else self._trials
        drawn = total = 0
        for number in range(2 * ROUNDS):
            domain, rng = self._field(number)
            more = hard if number == 0 else 0
            start = total + usual if half else 0
            inputs = source.draw(
                domain, usual + more, rng, number, start=start, scale=self._scale, within=self._within
            )
            doubtful = any(tally.doubtful for tally in tallies.values())
            domain.careful = more > 0 or self._vanishing or doubtful
            if more:
                indices = frozenset(name for program in source.programs for name in indexing_tensors(program))
                inputs = hardened(inputs, source.specs, indices, numbers, domain, rng, usual)
            drawn += full_entropy(usual, start)
            total += usual
            self._drawn += usual
            self._resampled += usual if number >= least_rounds else 0
            rounds = total / self._trials
            # A wrong stage fails at once; the rounds go on for what was not compared.
            passed, beyond, vanished = True, 0, 0
            for part, state in self._parts(inputs, domain, stages, source, number):
                expected, known = source.evaluate(stages, part, state)
                self._note_extremes(state)
                for stage in stages:
                    outputs = expected, known[stage.name] if stage.name in known else stage.run(part, state)
                    tallies[stage.name] = self._tallied(
                        outputs, part, state, tallies[stage.name], stage, source, number
                    )
                    passed &= not tallies[stage.name].failure and not self.hidden
                self._interpreted |= state.interpreted
                self._opaque |= state.opaque
                beyond += int(np.broadcast_to(state.beyond_floats, part.trials).sum())
                vanished += int(np.broadcast_to(state.vanished, part.trials).sum())
                if not passed:
                    break
            if 2 * beyond > inputs.trials and self._scale > SMALLEST_SCALE:
                self._scale /= 10  # exp(x / 0.001) is no float at numbers near 1
                self._vanishing |= 2 * vanished > inputs.trials  # nor is exp(-1e30 - x) at any
            self._within = self._within or any(tally.least() < ENOUGH for tally in tallies.values())
            pairs = zip(tallies.values(), bounds, strict=True)
            if (
                not passed
                or self.over
                or (
                    number + 1 >= least_rounds
                    and all(self._enough(*pair, number + 1, drawn, rounds) for pair in pairs)
                )
                or rounds >= ROUNDS
            ):
                break
            if half and number + 1 >= least_rounds:
                usual = self._trials if number < least_rounds else 2 * self._trials
        for stage, bound in zip(stages, bounds, strict=True):
            self._report(stage, tallies[stage.name])
            least = tallies[stage.name].least_straight() or 0
            self._bounds.append((bound, least, drawn, number + 1))

    def probe(
        self,
        stages: Sequence[Stage],
        source: Source,
        numbers: Sequence[float],
        number: int,
        trials: int,
        kinds: Sequence[Draws] = get_args(Draws),
        found: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Compares stages with the source on draws that look for a difference, usual ones and such as are at thresholds, with
        numbers `found` in them; they are no part of the bound. Where all stages are programs, every trial has integers of its own."""
        varied = all(stage.program is not None for stage in stages)
        indices = frozenset(name for program in source.programs for name in indexing_tensors(program))
        for kind in kinds:
            run = 2 * ROUNDS + 2 * number + (kind == "at thresholds")
            domain, rng = self._field(run)
            inputs = source.draw(
                domain, trials, rng, number % 4, scale=self._scale, varied=varied, within=self._within
            )
            domain.careful = kind == "at thresholds" or self._vanishing
            if kind == "at thresholds":
                inputs = hardened(inputs, source.specs, indices, numbers, domain, rng)
            if found:
                domain.careful = True
                inputs = with_numbers(inputs, found, domain)
            for part, state in self._parts(inputs, domain, stages, source, run):
                noted: list[tuple[Expr, str, Sequence[Any]]] = []
                state.watch = lambda *what, noted=noted: noted.append(what)
                expected, known = source.evaluate(stages, part, state)
                for stage in stages:
                    outputs = expected, known[stage.name] if stage.name in known else stage.run(part, state)
                    tally = self._tallied(outputs, part, state, Tally(), stage, source, run)
                    if tally.failure:
                        self.reason, self.counterexample = tally.failure, tally.counterexample
                        return
                compared = ~np.broadcast_to(state.beyond_floats, part.trials)
                for what in noted:
                    self.branches.note(*what, compared)
                if kind == "at thresholds":
                    self._thresholds = (self._thresholds or 0) + int(compared.sum())
        integers = {name: n for name, n in source.scalars.items() if isinstance(n, int)}
        extents = {axis: n for stage in stages for axis, n in stage.extents.items()}
        searched = {**source.extents, **extents, **integers}
        if searched not in self._searched:
            self._searched.append(searched)

    def _parts(
        self,
        inputs: Inputs,
        domain: FieldDomain,
        stages: Sequence[Stage],
        source: Source,
        number: int,
        prepare: Callable[[Inputs, FieldDomain], None] = lambda inputs, domain: None,
    ) -> Iterator[tuple[Inputs, FieldDomain]]:
        """The trials of a round, and the field of this `number` that they were drawn in, as many at a time as there is memory
        for, each with a state of its own: together they give what all at once would. None once a limit is reached, which is
        noted. `prepare` is called for each."""
        at_once, volume = inputs.trials, 1
        for side in source.sides:
            volume = max(volume, largest_value(side.program, side.extents))
        if inputs.trials * volume > MEASURED:
            elements = source.elements(stages, self._kind)
            at_once = self.limits.trials(elements, inputs.trials)
            if not at_once:
                self.over = self.over or self.limits.too_large(elements)
        first = 0
        while first < inputs.trials and not self._is_over():
            part, state = inputs, domain
            if at_once < inputs.trials:
                part = inputs.part(first, first + at_once)
                state, _ = self._field(number)
                state.careful, state.trials, state.first = domain.careful, part.trials, first
                state.supposed.first = first
            prepare(part, state)
            yield part, state
            first += at_once

    def _is_over(self) -> bool:
        """Whether a limit is reached, of which that of time is looked at."""
        if not self.over and thread_time() > self._deadline:
            self.over = self.limits.too_long()
        return bool(self.over)

    def _tallied(
        self,
        outputs: tuple[Mapping[str, Any], Mapping[str, Any]],
        inputs: Inputs,
        domain: FieldDomain,
        tally: Tally,
        stage: Stage,
        source: Source,
        number: int,
    ) -> Tally:
        """The tally with the outputs of the source and of a stage. Where these differ, bounds of rounding errors tell whether
        orders were clear: the round is run again with them, without what they leave open. Between two programs that is whole trials,
        if those are not most; of a stage, elements that differ and depend on an open order, or on an open condition in the trial.
        Where they differ in residues of uninterpreted functions alone, that is noted: other trials may show it in real values."""
        again = tally.copied()
        compared = partial(
            compare, inputs=inputs, stage=stage.name, special=source.special, defined=source.defined
        )
        if compared(*outputs, domain=domain, tally=tally):
            return tally
        if self._is_hidden(tally, domain, source):
            return again
        if domain.careful:
            return tally
        first = domain.first
        domain, _ = self._field(number)
        domain.careful, domain.trials, domain.first = True, inputs.trials, first
        expected, known = source.evaluate([stage], inputs, domain)
        found = known[stage.name] if stage.name in known else stage.run(inputs, domain)
        open_ = np.broadcast_to(domain.beyond_floats, inputs.trials)
        if open_.mean() > MOST_OPEN and source.defined != "reference":
            return again if tally.real else tally
        before = again.copied()
        compared(expected, found, domain=domain, tally=again)
        return before if self._is_hidden(again, domain, source) else again

    def _is_hidden(self, tally: Tally, domain: FieldDomain, source: Source) -> bool:
        """Whether two programs differ in residues of uninterpreted functions alone, which is noted."""
        if not (tally.failure and tally.hidden and domain.opaque) or len(source.programs) < 2:
            return False
        self.hidden |= domain.opaque
        self.unshown = self.unshown or tally.counterexample
        return True

    def _first(self, bounds: Sequence[Bound], source: Source) -> int:
        """Trials of a first round: half of them; all where half would need another round, as a bound or roots that earlier
        stages took of non-squares tell; of small inputs twice as many where most values have such roots, which costs less than
        a second round."""
        half = (self._trials + 1) // 2
        twisted, compared = (sum(getattr(r, of) for r in self._reports) for of in ("twisted", "compared"))
        if twisted:
            elements = sum(math.prod(spec.shape) for spec in source.specs.values())
            small = 2 * self._trials * elements <= SMALL
            return 2 * self._trials if small and twisted > MOSTLY * compared else self._trials
        plain = full_entropy(half, half)
        return half if all(b.reaches(self._requested, plain, plain) for b in bounds) else self._trials

    def _enough(self, tally: Tally, bound: Bound, looks: int, drawn: int, rounds: float) -> bool:
        """Whether every position of a stage was compared, and the bound is reached, or given up, after so many looks at
        so many independent trials, which make up so many rounds."""
        least = tally.least()
        straight = tally.least_straight()
        if straight is None or (tally.twisted and (rounds >= STRAIGHT_ROUNDS or tally.hopeless(rounds))):
            return least >= ENOUGH
        if not bound.reaches(self._requested, straight, drawn, looks):
            return False
        return (straight if tally.twisted else least) >= ENOUGH

    def suppose(self, stages: Sequence[Stage], source: Source) -> None:
        """Notes the sides of branches on data of the programs and of the stages that no trial took, and compares the stages with
        the order of what they compare supposed, in all of them alike (see `eqfuse.verify.field.supposed`)."""
        found = self._untaken_of(source)
        inside = self.branches.of_stages(source.programs, [stage.written_out for stage in stages])
        found += inside
        # Of what conditions join, orders of single numbers tell too little.
        open_ = [each for each in found if each.kind == "real" and each.node.fn not in JOINING]
        if open_ and not self.reason:
            parts = [open_]
            if not self._agree(open_, stages, source):
                parts = [[each] for each in open_] if 1 < len(open_) <= MOST_APART else []
                parts = [part for part in parts if self._agree(part, stages, source)]
            self._supposed |= {each.said for part in parts for each in part}
            rest = [each for each in open_ if each.said not in self._supposed]
            self._supposed |= (
                {each.said for each in self._ranked(rest, stages, source) or ()} if rest else set()
            )
        # What is between the values of a loop nest, ranges of which are not known, is listed: a - b may never be positive.
        read = {tensor.name for program in source.programs for tensor in program.tensors}
        listed = {each.said for each in found if each.kind == "given"}
        listed |= {each.said for each in inside if any(_is_named(part, read) for part in walk(each.node))}
        self._unreached |= listed - self._supposed
        self._untaken |= {each.said for each in found} - listed - self._supposed

    def has_untaken(self, source: Source) -> bool:
        """Whether some side of a branch on data was taken by no trial yet."""
        return bool(self._untaken_of(source))

    def _untaken_of(self, source: Source, *, all_joined: bool = False) -> list[Untaken]:
        limits = frozenset(name for name, spec in source.specs.items() if spec.delimits)
        several = len(source.programs) > 1
        known = self.branches.one_sided(source.programs) if several else frozenset[int]()
        found = (
            each
            for program in source.programs
            for each in self.branches.untaken(program, limits, known, all_joined=all_joined)
        )
        return [each for each in found if not self._is_dead(each.goals, source)]

    def _is_dead(self, goals: Sequence[Goal], source: Source) -> bool:
        """Whether no numbers meet any of these goals, by proof."""
        variables = source.variables
        for goal in goals:
            if goal not in self._dead:
                self._dead[goal] = is_dead(goal, variables)
        return bool(goals) and all(self._dead[goal] for goal in goals)

    def goals(self, source: Source) -> list[Goal]:
        """What sides of branches on data ask for that no trial took yet, each once."""
        untaken = self._untaken_of(source, all_joined=True)
        found = dict.fromkeys(goal for each in untaken for goal in each.goals)
        return [goal for goal in found if not self._is_dead([goal], source)]

    def numbers_for(self, goal: Goal, source: Source) -> list[dict[str, float]]:
        """Numbers that meet a goal at the sizes of a source."""
        rng = np.random.default_rng(self._seed)
        extents = {axis: n for side in source.sides for axis, n in side.extents.items()}
        tries = (solved(goal, source.solvable, extents, source.fixed, rng) for _ in range(FOUND))
        return [numbers for numbers in tries if numbers is not None]

    def agrees_in_any_order(self, stages: Sequence[Stage], source: Source) -> bool:
        """Whether stages agree with the source whatever the numbers of all branches are to each other. Where they do not, some
        order tells them apart, though no numbers may be in it."""
        branches = self.branches.on_data(source.programs)
        if not branches or self.reason or self._agree(branches, stages, source):
            return True
        return self._ranked(branches, stages, source) is not None

    def _agree(self, branches: Sequence[Untaken], stages: Sequence[Stage], source: Source) -> bool:
        """Whether the stages agree with the source where the order of what these branches compare is supposed."""
        nodes = dict.fromkeys(node for each in branches for node in each.compared)
        tallies = {stage.name: Tally() for stage in stages}
        domain, rng = self._field(8 * ROUNDS)
        inputs = source.draw(domain, self._trials, rng, 0, scale=self._scale, within=self._within)

        def turn(part: Inputs, domain: FieldDomain) -> None:
            self._turn(nodes, stages, source, part, domain)
            domain.watch = None

        for part, state in self._parts(inputs, domain, stages, source, 8 * ROUNDS, turn):
            if not self._same_outputs(stages, source, part, state, tallies):
                return False
        return not self.over and all(tally.least() >= ENOUGH for tally in tallies.values())

    def _ranked(
        self, branches: Sequence[Untaken], stages: Sequence[Stage], source: Source
    ) -> list[Untaken] | None:
        """The branches that went both ways where the stages were compared with all numbers in some other order, those that
        comparisons for equality meet turned; None where stages differed from the source."""
        nodes = dict.fromkeys(node for each in branches for node in each.compared)
        equalities = [node for node in nodes if node.fn in ("eq", "ne")]
        went = {node: [False, False] for node in nodes if node not in equalities}
        tallies = {stage.name: Tally() for stage in stages}
        for number in range(ORDERS):
            domain, rng = self._field(8 * ROUNDS + 1 + number)
            inputs = source.draw(domain, self._trials, rng, 0, scale=self._scale, within=self._within)

            def turn(part: Inputs, domain: FieldDomain, number: int = number) -> None:
                domain.supposed.rank(number)
                self._turn(equalities, stages, source, part, domain)

                def noted(node: Expr, fn: str, parts: Sequence[Any]) -> None:
                    if isinstance(node, Call) and node in went:
                        reals = (rounded_of(field_array(part, domain)) for part in parts)
                        found = domain.supposed.sides(*reals)
                        went[node] = [had or has for had, has in zip(went[node], found, strict=True)]

                domain.watch = noted

            run = 8 * ROUNDS + 1 + number
            for part, state in self._parts(inputs, domain, stages, source, run, turn):
                if not self._same_outputs(stages, source, part, state, tallies):
                    return None
            if all(map(all, went.values())):
                break
        if self.over or any(tally.least() < ENOUGH for tally in tallies.values()):
            return None
        return [each for each in branches if all(node in went and all(went[node]) for node in each.compared)]

    def _same_outputs(
        self,
        stages: Sequence[Stage],
        source: Source,
        inputs: Inputs,
        domain: FieldDomain,
        tallies: Mapping[str, Tally],
    ) -> bool:
        expected, known = source.evaluate(stages, inputs, domain)
        for stage in stages:
            outputs = known[stage.name] if stage.name in known else stage.run(inputs, domain)
            agreed = (expected, outputs, inputs, domain, tallies[stage.name], stage.name)
            if not compare(*agreed, special="ignored", defined=source.defined):
                return False
        return True

    def _turn(
        self,
        nodes: Iterable[Expr],
        stages: Sequence[Stage],
        source: Source,
        inputs: Inputs,
        domain: FieldDomain,
    ) -> None:
        """Supposes the order of what these branches compare."""
        places = {node: place for place, node in enumerate(nodes)}

        def supposed(node: Expr, fn: str, parts: Sequence[Any]) -> None:
            if node in places:
                reals = [field_array(part, domain) for part in parts]
                domain.supposed.add(places[node], *(rounded_of(real) for real in reals))

        domain.watch = supposed
        for _ in range(min(2, len(places))):  # a supposed order may be part of what another branch compares
            _, known = source.evaluate(stages, inputs, domain)
            for stage in stages:
                if stage.name not in known:
                    stage.run(inputs, domain)

    def note_path(self, goal: Goal, source: Source) -> None:
        """What leads to a side of a branch and was neither found nor is impossible: it is a side that no trial took, where none of
        the usual ones meets it."""
        if self.reason or self._is_dead([goal], source):
            return
        domain, rng = self._field(8 * ROUNDS + ORDERS + 1)
        inputs = source.draw(domain, PATH_TRIALS, rng, 0, scale=self._scale, within=self._within)
        tensors = {name: getattr(value, "shadow", value) for name, value in inputs.tensors.items()}
        scalars = {name: getattr(value, "shadow", value) for name, value in inputs.scalars.items()}
        extents = {axis: n for side in source.sides for axis, n in side.extents.items()}
        env = Env(FloatDomain("float64"), tensors, scalars, extents, batch=inputs.trials)
        condition = conjunction(goal)
        if not np.asarray(evaluate_expr(condition, env).data).any():
            self._untaken.add(f"{show(condition)}{NEVER}true")

    def need_thresholds(self, source: Source) -> None:
        """Two programs with branches on data, of which no trial at thresholds could be compared, are not called equal."""
        if self._thresholds == 0 and any(map(branches_on_data, source.programs)):
            self._untaken.add(NO_THRESHOLDS)

    def note_constant(self, conditions: Iterable[str]) -> None:
        """Conditions on positions that have one value at the sizes used: the other side was not seen."""
        self._constant |= set(conditions)

    def note_unreached(self, texts: Iterable[str]) -> None:
        """What trials cannot draw: it is listed, and refuses nothing."""
        self._unreached |= set(texts)

    def _field(self, number: int) -> tuple[FieldDomain, np.random.Generator]:
        rng = np.random.default_rng([self._seed, number])
        domain = self._kind.domain(int(rng.integers(2**62)))
        domain.watch = self.branches.note
        domain.signs_of_nan = self.signs_of_nan
        self._primes = (domain.p, domain.q)
        return domain, rng

    def _note_extremes(self, domain: FieldDomain) -> None:
        for op, seen in domain.extremes.items():
            self._extremes[op] = self._extremes.get(op, 0) + seen.copy()

    def _report(self, stage: Stage, tally: Tally) -> None:
        self._reports.append(
            StageReport(
                stage.name,
                dict(stage.extents),
                stage.detail,
                tally.compared,
                tally.floats_only,
                tally.undefined,
                tally.special,
                tally.twisted,
                tally.signs,
                tally.infinite,
            )
        )
        if tally.failure and not self.reason:
            self.reason, self.counterexample = tally.failure, tally.counterexample
        elif tally.apart and not self.reason:
            self.reason = (
                f"stage {stage.name!r} agrees with the program modulo both primes, though their real values differ in "
                f"{tally.apart} elements: a constant is a multiple of a prime, or numbers are too large for float64"
            )
        elif tally.least() < ENOUGH and not self.reason and not self.hidden and not self.over:
            self.reason = (
                f"too little could be compared in stage {stage.name!r}: some output position was compared "
                f"{tally.least()} times in {self._drawn} trials ({tally.undefined} elements could not be "
                f"computed exactly, {tally.special} were infinite or NaN in the program itself, of {tally.signs} rounding does not "
                f"tell whether they are equal)"
            )

    def certificate(self) -> Certificate:
        """The verdict. The bound is that of the worst stage, at its least compared output position."""
        if not self._reports and not self.reason:
            self.reason = "nothing was compared"
        ended = bool(self.over) and not self.reason
        if ended:
            self.reason = f"a limit of verification was reached: {self.over}"
        if self.hidden and not self.reason:
            self.reason = hidden_difference(self.hidden)
        nothing = Bound(0, 0, 1.0, ""), 0, 0, 1
        worst, compared, drawn, looks = max(
            self._bounds, key=lambda found: found[0].after(*found[1:]), default=nothing
        )
        return Certificate(
            ok=not self.reason,
            trials=self._drawn,
            primes=self._primes,
            bound=worst.after(compared, drawn, looks) if not self.reason else 1.0,
            requested=self._requested,
            compared=compared,
            theorem=worst.theorem,
            degree=worst.degree,
            terms=worst.terms,
            exponent=worst.exponent,
            roots=worst.roots,
            calls=worst.calls,
            per_trial=worst.per_trial,
            interpreted=tuple(sorted(self._interpreted)),
            opaque=tuple(sorted(self._opaque)),
            stages=tuple(self._reports),
            undefined=sum(report.undefined for report in self._reports),
            resampled=self._resampled,
            extremes={op: (int(n[0]), int(n[1]), int(n[2])) for op, n in sorted(self._extremes.items())},
            searched=tuple(self._searched),
            counterexample=self.counterexample,
            reason=self.reason,
            over=self.over if ended else "",
            not_covered=(
                *NOT_COVERED,
                *((NO_THRESHOLDS,) if self._thresholds == 0 else ()),
                *(text + SAME_EVERYWHERE for text in sorted(self._constant)),
                *(
                    f"{text} in these trials"
                    for text in sorted(self._untaken - {NO_THRESHOLDS} | self._unreached)
                ),
            ),
            untaken=(*(text + SAME_EVERYWHERE for text in sorted(self._constant)), *sorted(self._untaken)),
            supposed=tuple(sorted(self._supposed)),
        )


def hidden_difference(opaque: Iterable[str]) -> str:
    """What is said of programs that no real values tell apart, though residues do."""
    return (
        "no trial told the programs apart, and none shows that they are equal: all that is known of "
        f"{', '.join(sorted(opaque))} is that equal arguments give equal values"
    )


def _is_named(node: Expr, read: Container[str]) -> bool:
    """Whether an expression is a value that a loop nest has a name for, inside of a kernel or between two."""
    return isinstance(node, Local) or (isinstance(node, Load) and node.tensor not in read)
