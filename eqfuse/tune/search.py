"""A bounded search for the fastest plan: the best of those that were timed, and what is one step away from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.extract.candidates import Candidate
from eqfuse.extract.neighbours import seconds as predicted
from eqfuse.loops.plan import Plan

WORTH = 0.98
"""Part of the chosen plan's time that another one may take at most to be preferred: less of a difference is noise."""

HOPELESS = 8.0
"""How much longer than the chosen plan another one may be predicted to take to be tried."""


@dataclass(frozen=True)
class Trial:
    """A plan that was tried: timed (`plan.measured`, in seconds), or refused for a `problem`."""

    plan: Plan
    problem: str = ""


class Refused(Exception):
    """Why a plan cannot win: it does not compile, or it computes something else."""


@dataclass
class Budget:
    """No trial is begun that would end after `seconds` if it took as long as the longest so far, nor more than
    `plans` of them. The chosen plan is always tried: without it there is nothing to compare with."""

    seconds: float
    plans: int
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _longest: float = 0.0

    def __post_init__(self) -> None:
        self._started = self.clock()

    def allows(self, tried: int) -> bool:
        return tried < self.plans and self.clock() - self._started + self._longest <= self.seconds

    def note(self, since: float) -> None:
        """A trial that began at `since` has ended."""
        self._longest = max(self._longest, self.clock() - since)


@dataclass
class TimedSearch:
    """`prepare` compiles a candidate and compares what it computes with what the chosen one does; it raises
    Refused, or what a call of the chosen one raises. `measure` gives the seconds that a prepared candidate takes,
    and may be coarse about one that takes far longer than the seconds it is given."""

    prepare: Callable[[Candidate], None]
    measure: Callable[[Candidate, float], float]
    budget: Budget
    trials: list[Trial] = field(default_factory=list)
    times: dict[Candidate, float] = field(default_factory=dict)
    _tried: set[Candidate] = field(default_factory=set)

    def run(
        self,
        chosen: Candidate,
        others: Sequence[Candidate],
        near: Callable[[Candidate], Sequence[Candidate]],
    ) -> Candidate:
        """The winner, which is one of `times`.

        The chosen plan is tried first, then `others`, then what is `near` the best so far, until that is better
        than all that is near it or the budget is spent. Where another plan has won, both are timed again, and it
        is preferred where it wins again.
        """
        limit = HOPELESS * predicted(chosen)
        self.prepare(chosen)
        self._time(chosen)
        for candidate in others:
            self._try(candidate, limit)
        centre = None
        while centre is not self._best:
            centre = self._best
            for candidate in near(centre):
                self._try(candidate, limit)
        winner = self._best
        if winner is not chosen:
            first, second = self.measure(chosen, math.inf), self.measure(winner, math.inf)
            winner = winner if second < WORTH * first else chosen
        return winner

    @property
    def _best(self) -> Candidate:
        return min(self.times, key=self.times.__getitem__)

    def _try(self, candidate: Candidate, limit: float) -> None:
        if (
            candidate in self._tried
            or predicted(candidate) > limit
            or not self.budget.allows(len(self.trials))
        ):
            return
        began = self.budget.clock()
        try:
            self.prepare(candidate)
            self._time(candidate)
        except Refused as refused:
            self._tried.add(candidate)
            self.trials.append(Trial(candidate.plan, str(refused)))
        self.budget.note(began)

    def _time(self, candidate: Candidate) -> None:
        seconds = self.measure(candidate, min(self.times.values(), default=math.inf))
        self._tried.add(candidate)
        self.times[candidate] = seconds
        self.trials.append(Trial(timed(candidate, seconds).plan))


def timed(candidate: Candidate, seconds: float) -> Candidate:
    """A candidate with what was measured."""
    return replace(candidate, plan=replace(candidate.plan, measured=seconds))
