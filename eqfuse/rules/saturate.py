"""Running rule sets to saturation under a budget, and reading the e-graph back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eqfuse.errors import EqfuseError
from eqfuse.rules.rule import RELATIONS, RuleSet, prelude
from eqfuse.rules.scope import current

if TYPE_CHECKING:
    from egglog import bindings

MAX_MATCHES = 12_000
"""Matches of rules after which saturation is abandoned and reported; a match adds a node or a fact at most. The
largest program of the tests and benchmarks needs 2,700."""

MAX_TERMS = 1_500
"""Terms and facts that an e-graph starts with; declaring them takes time that grows with their square."""

MAX_ROUNDS = 100
"""Rounds after which it is, and one more for each term and fact at the start: facts climb a level of a term a round."""

MAX_DECLARED = 12
"""Declared e-graphs that are kept: those of compiling, of explaining, and a few of changed rule sets."""


class TooManyTerms(Exception):
    """What was to be put into an e-graph at once is too much for it."""


@dataclass(frozen=True)
class Node:
    """One e-node: constructor, its string arguments, its argument classes."""

    head: str
    words: tuple[str, ...]
    args: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A saturated e-graph: the nodes of every class, the facts, and the classes of globals by their egglog names."""

    classes: Mapping[int, tuple[Node, ...]]
    facts: Mapping[str, frozenset[tuple[int | str, ...]]]
    roots: Mapping[str, int]

    @property
    def size(self) -> int:
        return sum(map(len, self.classes.values()))


@dataclass
class Report:
    """What saturation took: e-nodes, rounds, matches per rule. `stopped` says how its budget ended before it reached a
    fixed point; empty where it did."""

    enodes: int = 0
    rounds: int = 0
    stopped: str = ""
    matches: dict[str, int] = field(default_factory=dict)

    @property
    def saturated(self) -> bool:
        return not self.stopped

    def add(self, other: Report) -> None:
        self.enodes = max(self.enodes, other.enodes)
        self.rounds += other.rounds
        self.stopped = self.stopped or other.stopped
        for name, count in other.matches.items():
            self.matches[name] = self.matches.get(name, 0) + count


@dataclass
class Saturation:
    """An e-graph with its rules declared, ready for one program's terms."""

    graph: bindings.EGraph
    rulesets: tuple[RuleSet, ...]
    report: Report = field(default_factory=Report)
    _exhausted: bool = False
    _terms: int = 0
    _commands: dict[str, Any] = field(default_factory=dict)

    def run(self, program: Sequence[str]) -> None:
        """Terms and facts as egglog commands. Raises TooManyTerms."""
        self._terms += len(program)
        if self._terms > MAX_TERMS:
            raise TooManyTerms(f"{self._terms} terms and facts to begin with, more than {MAX_TERMS}")
        self.graph.run_program(*self.graph.parse_program("\n".join(program)))

    def saturate(self) -> None:
        """All rule sets, round after round, until none adds anything or the budget is spent: every equality and fact
        that is there then is one, and the report says how far it came.

        The first set (unit laws, which retire the longer form) runs to its fixed point before every step of
        another: 0 * a must be 0 before a rule can multiply it again.
        """
        updated = True
        while updated and self.report.rounds < MAX_ROUNDS + self._terms and not self._exhausted:
            steps = [self._step(ruleset) for ruleset in self.rulesets[1:]]  # every set, every round
            updated = any(steps)
            self.report.rounds += 1
        if updated or self._exhausted:
            matches = sum(self.report.matches.values())
            self.report.stopped = (
                f"saturation stopped after {self.report.rounds} rounds and {matches} matches"
                + current().blame(self.report.matches)
            )

    def _step(self, ruleset: RuleSet) -> bool:
        """Unit laws to their fixed point, then one step of a rule set; whether that added anything."""
        while self._run(self.rulesets[0]):
            pass
        return self._run(ruleset)

    def _run(self, ruleset: RuleSet) -> bool:
        if self._exhausted:
            return False
        if ruleset.name not in self._commands:
            (self._commands[ruleset.name],) = self.graph.parse_program(f"(run-schedule (run {ruleset.name}))")
        (output,) = self.graph.run_program(self._commands[ruleset.name])
        run: bindings.RunReport = output.report  # type: ignore[union-attr]  # a run's output is a report
        for name, count in run.num_matches_per_rule.items():
            self.report.matches[name] = self.report.matches.get(name, 0) + count
        self._exhausted = sum(self.report.matches.values()) > MAX_MATCHES
        return run.updated

    def read(self) -> Graph:
        """The e-graph as plain data. Retired forms are left out where their class has a term without them."""
        classes: dict[int, list[Node]] = {}
        retired: dict[int, list[Node]] = {}
        facts: dict[str, frozenset[tuple[int | str, ...]]] = {}
        roots: dict[str, int] = {}
        ids: dict[bindings.Value, int] = {}
        strings: dict[bindings.Value, str] = {}

        def value(sort: str, v: bindings.Value) -> int | str:
            if sort == "String":
                if v not in strings:
                    strings[v] = self.graph.value_to_string(v)
                return strings[v]
            return ids.setdefault(v, len(ids))

        for name, function in self.graph.freeze().functions.items():
            rows = [(tuple(map(value, function.input_sorts, row.inputs)), row) for row in function.rows]
            if name in RELATIONS:
                facts[name] = frozenset(inputs for inputs, _ in rows)
            elif function.is_let_binding:
                for _, row in rows:
                    roots[name] = ids.setdefault(row.output, len(ids))
            elif function.output_sort == "E":
                for inputs, row in rows:
                    words = tuple(x for x in inputs if isinstance(x, str))
                    args = tuple(x for x in inputs if isinstance(x, int))
                    target = retired if row.subsumed else classes
                    target.setdefault(ids.setdefault(row.output, len(ids)), []).append(
                        Node(name, words, args)
                    )
        for key, nodes in retired.items():
            classes.setdefault(key, nodes)
        for key in retired.keys() - _with_a_term(classes):
            classes[key] = list(dict.fromkeys((*classes[key], *retired[key])))
        graph = Graph({key: tuple(nodes) for key, nodes in classes.items()}, facts, roots)
        self.report.enodes = graph.size
        return graph


def _with_a_term(classes: Mapping[int, Sequence[Node]]) -> set[int]:
    """The classes that stand for a finite term. Others have forms that contain themselves alone, as a is max(a, a)."""
    found: set[int] = set()
    waiting = dict(classes)
    while ready := {
        key for key, nodes in waiting.items() if any(found.issuperset(node.args) for node in nodes)
    }:
        found |= ready
        waiting = {key: nodes for key, nodes in waiting.items() if key not in ready}
    return found


_declared: dict[tuple[tuple[RuleSet, ...], str | None], bindings.EGraph] = {}
_lock = threading.RLock()


@contextmanager
def session(rulesets: tuple[RuleSet, ...], declarations: str | None = None) -> Iterator[Saturation]:
    """A fresh e-graph under these rules, declared by `prelude` or by the text that is given. Declaring rules
    costs more than running a program, so the last `MAX_DECLARED` declared e-graphs are kept and what a program
    adds to one is popped afterwards."""
    key = rulesets, declarations
    with _lock:
        if key not in _declared:
            try:
                from egglog import bindings
            except ImportError as error:  # emitted sources and benchmarks run where egglog does not
                raise EqfuseError("egglog is not installed", hint="pip install egglog") from error
            fresh = bindings.EGraph()
            fresh.run_program(*fresh.parse_program(declarations or prelude(rulesets)))
            while len(_declared) >= MAX_DECLARED:
                del _declared[next(iter(_declared))]
            _declared[key] = fresh
        graph = _declared[key] = _declared.pop(key)  # the last one used is dropped last
        graph.run_program(*graph.parse_program("(push)"))
        try:
            yield Saturation(graph, rulesets)
        finally:
            graph.run_program(*graph.parse_program("(pop)"))
