"""Running rule sets to saturation under a budget, and reading the e-graph back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.egraph import client
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import RuleSet, prelude
from eqfuse.rules.scope import current
from eqfuse.threads import cached

MAX_MATCHES = 12_000
"""Matches of rules after which saturation is abandoned and reported; a match adds a node or a fact at most. The
largest program of the tests and benchmarks needs 2,700."""

MAX_TERMS = 1_700
"""Terms and facts that an e-graph starts with: 0.1 ms each, before any rule has run."""

MAX_ROUNDS = 100
"""Rounds after which it is, and one more for each term and fact at the start: facts climb a level of a term a round."""


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
    """A saturated e-graph: the nodes of every class, the facts, the classes of globals by their egglog names, and the forms
    that rules retired."""

    classes: Mapping[int, tuple[Node, ...]]
    facts: Mapping[str, frozenset[tuple[int | str, ...]]]
    roots: Mapping[str, int]
    retired: Mapping[int, tuple[Node, ...]]

    @property
    def size(self) -> int:
        return sum(map(len, self.classes.values()))

    @cached
    def forms(self) -> tuple[tuple[int, Node], ...]:
        """Every node with its class, classes in order."""
        return tuple((key, node) for key in sorted(self.classes) for node in self.classes[key])

    @cached
    def users(self) -> Mapping[int, Sequence[int]]:
        """By class, the places in `forms` of the nodes that have it as an argument."""
        found: dict[int, list[int]] = {}
        for place, (_, node) in enumerate(self.forms):
            for arg in set(node.args):
                found.setdefault(arg, []).append(place)
        return found


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

    graphs: client.Graphs
    rulesets: tuple[RuleSet, ...]
    report: Report = field(default_factory=Report)
    _terms: int = 0

    def run(self, program: Sequence[str]) -> None:
        """Terms and facts as egglog commands. Raises TooManyTerms."""
        self._terms += len(program)
        if self._terms > MAX_TERMS:
            raise TooManyTerms(f"{self._terms} terms and facts to begin with, more than {MAX_TERMS}")
        self.graphs.ask("run", tuple(self.commands(program)))

    def commands(self, program: Sequence[str]) -> Sequence[str]:
        """The egglog commands that state these terms and facts."""
        return program

    def saturate(self, most: int | None = None) -> None:
        """All rule sets, round after round, until none adds anything or the budget is spent, `most` matches or MAX_MATCHES: every
        equality and fact that is there then is one, and the report says how far it came.

        The first set (unit laws, which retire the longer form) runs to its fixed point before every step of
        another: 0 * a must be 0 before a rule can multiply it again.
        """
        report = self.report
        units, *others = (ruleset.name for ruleset in self.rulesets)
        rounds = MAX_ROUNDS + self._terms - report.rounds
        matches = (MAX_MATCHES if most is None else most) - sum(report.matches.values())
        is_done, took, found = self.graphs.ask("saturate", units, others, rounds, matches)
        report.add(Report(rounds=took, matches=found))
        if not is_done:
            matches = sum(report.matches.values())
            report.stopped = (
                f"saturation stopped after {report.rounds} rounds and {matches} matches"
                + current().blame(report.matches)
            )

    def read(self) -> Graph:
        """The e-graph as plain data. Retired forms are left out where their class has a term without them."""
        classes: dict[int, list[Node]] = {}
        retired: dict[int, list[Node]] = {}
        facts: dict[str, frozenset[tuple[int | str, ...]]] = {}
        roots: dict[str, int] = {}
        for name, _, sort, is_global, rows in self.graphs.ask("read"):
            if name in RELATIONS:
                facts[name] = frozenset(arguments for arguments, _, _ in rows)
            elif is_global:
                ((_, roots[name], _),) = rows
            elif sort == "E":
                for arguments, key, is_retired in rows:
                    words = tuple(x for x in arguments if isinstance(x, str))
                    args = tuple(x for x in arguments if isinstance(x, int))
                    target = retired if is_retired else classes
                    target.setdefault(key, []).append(Node(name, words, args))
        for key, nodes in retired.items():
            classes.setdefault(key, nodes)
        for key in retired.keys() - _with_a_term(classes):
            classes[key] = list(dict.fromkeys((*classes[key], *retired[key])))
        known, gone = ({key: tuple(nodes) for key, nodes in each.items()} for each in (classes, retired))
        graph = Graph(known, facts, roots, gone)
        self.report.enodes = graph.size
        return graph


def _with_a_term(classes: Mapping[int, Sequence[Node]]) -> set[int]:
    """The classes that stand for a finite term. Others have forms that contain themselves alone, as a is max(a, a)."""
    found: set[int] = set()
    users: dict[int, list[tuple[int, set[int]]]] = {}
    ready: list[int] = []
    for key, nodes in classes.items():
        for node in nodes:
            lacks = set(node.args)
            ready += [key] if not lacks else []
            for arg in lacks:
                users.setdefault(arg, []).append((key, lacks))
    while ready:
        key = ready.pop()
        if key not in found:
            found.add(key)
            for user, lacks in users.get(key, ()):
                lacks.discard(key)
                ready += [user] if not lacks else []
    return found


@contextmanager
def session(
    rulesets: tuple[RuleSet, ...], declarations: tuple[str, ...] | None = None
) -> Iterator[Saturation]:
    """A fresh e-graph under these rules, declared by `prelude` or by the commands that are given. Declaring rules
    costs more than running a program, so that declared e-graphs are kept, and what a program adds to one is taken
    out again. Sessions may be opened in several threads at once."""
    with client.opened((rulesets, declarations), lambda: declarations or prelude(rulesets)) as graphs:
        yield Saturation(graphs, rulesets)
