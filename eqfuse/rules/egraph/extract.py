"""Cheapest terms of a saturated e-graph, by a cost that puts stability before work.

A cost is (instability, work), compared in that order. Instability counts what can overflow, cancel
or leave a narrow format's range although an equal form does not, once however often it is used; work counts
weighted operations, those inside a reduction once per position.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eqfuse import limits
from eqfuse.rules.egraph.encode import Encoder
from eqfuse.rules.egraph.ranges import Ranges
from eqfuse.rules.egraph.saturate import Graph, Node
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.nodes import Expr

Cost = tuple[float, float]
Risk = tuple[str, tuple[int, ...], float]
"""What is unstable (function and argument classes) and how much it counts."""

POSITIONS = 64.0
"""Positions of an axis that work inside a reduction is multiplied by, when sizes are not known."""

WORK: Mapping[str, float] = {
    "Exp": 8,
    "Log": 8,
    "Sqrt": 6,
    "Inv": 4,
    "Apply1": 10,
    "Ratio": 5,
    "Where": 1,
    "Num": 0,
    "Leaf": 1,
}
"""Work of one e-node in units of an addition (the default)."""

UNPROVED_EXP = 1.0
UNPROVED_REPAIR = 0.25
"""An exponential inside a loop that nothing bounds and that is repaired: it may overflow in between alone."""
UNPROVED_REWRITE = 0.5
"""An exponential inside a loop that nothing bounds and that the program does not have: its own is shifted better."""
CANCELLATION = 0.5
CAST_OUT_OF_RANGE = 0.1
UNBOUNDED_SQUARE = 0.01
LOST_RANGE = 0.02
"""A square of what nothing bounds can overflow, and so can a sum that a factor was taken out of. Only a choice of
whole-axis forms weighs squares, by how fast they grow with what nothing bounds; a merge keeps those of its states."""
MOST_DEGREE = 4
NARROW = (*FLOAT8, "f16")
UNWRITTEN = 1e-6
"""Work of a sum that is not put together as the program does it. Of forms that cost as much the program's is taken: its
difference of near numbers may be exact, and what is added before takes the digits."""


@dataclass
class Extraction:
    """Best node of every class, given which classes are free leaves and which nodes are allowed. `whole` says that
    forms over whole axes are chosen, and not a merge."""

    graph: Graph
    encoder: Encoder
    ranges: Ranges
    known: Mapping[int, Expr] = field(default_factory=dict)
    allowed: Callable[[Node], bool] = lambda node: True
    whole: bool = False
    best: dict[int, tuple[Cost, Node | None]] = field(default_factory=dict)
    _risks: dict[int, frozenset[Risk]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.graph.facts
        self._bounded = {row[0] for row in facts.get("bounded", ())}
        self._aggregate = {row[0] for row in facts.get("aggregate", ())}
        self._settled = {row[0] for row in facts.get("exp_safe", ())}
        self._varies = {row[0] for row in facts.get("varies", ())}
        self._cascaded = {row[0] for row in facts.get("reduces", ())}
        self._written = {row[0] for row in facts.get("written", ())}
        self._solve()

    def _instability(self, key: int, node: Node) -> float:
        match node:
            case Node("Exp", _, (a,)) if a not in self._settled and a in self._varies:
                repaired = UNPROVED_REPAIR if a in self._cascaded else 0.0
                return UNPROVED_EXP + repaired + (0.0 if key in self._written else UNPROVED_REWRITE)
            case Node("Exp", _, (a,)) if a not in self._settled:
                return UNPROVED_EXP
            case Node("Sq", _, (a,)) if self.whole and a in self._varies and a not in self._bounded:
                return UNBOUNDED_SQUARE * min(self.ranges.power(a), MOST_DEGREE)
            case Node("Mul", _, (a, b)) if (
                self.whole and a == b and a in self._varies and a not in self._bounded
            ):
                return UNBOUNDED_SQUARE * min(self.ranges.power(a), MOST_DEGREE)
            case Node("Sq" | "Mul") if not self.whole and self.ranges.falls(key):
                return UNBOUNDED_SQUARE
            case Node("Mul", _, args) if not self.ranges.foreign.isdisjoint(args):
                return CANCELLATION
            case Node("Mul") if self.ranges.loses(key, node) or self.ranges.cancels(node):
                return LOST_RANGE
            case Node("Cast", (fn,), (a,)) if (
                fn in NARROW and a not in self._bounded and key not in self._written
            ):
                return CAST_OUT_OF_RANGE
            case Node("Add", _, (a, b)) if a in self._aggregate:
                negated = (n.args[0] for n in self.graph.classes.get(b, ()) if n.head == "Neg")
                return CANCELLATION if any(c in self._aggregate for c in negated) else 0.0
        return 0.0

    def _cost(self, place: int) -> tuple[Cost, frozenset[Risk]]:
        key, node = self.graph.forms[place]
        own = self.ranges.unstable.get((self.whole, place))
        if own is None:
            own = self._instability(key, node)
            if (
                self.whole
                and node.head in ("Mul", "Sq", "Inv", "Red")
                and self.ranges.leaves_range(key, node)
            ):
                own += LOST_RANGE
            self.ranges.unstable[self.whole, place] = own
        risks = frozenset({(node.head, node.args, own)} if own else ())
        work: float = WORK.get(node.head, 1)
        if node.head == "Add" and key not in self._written:
            work += UNWRITTEN
        times = POSITIONS if node.head == "Red" else 1.0
        for arg in node.args:
            risks |= self._risks[arg]
            work += times * self.best[arg][0][1]
        return (round(sum(risk[2] for risk in risks), 6), work), risks

    def _solve(self) -> None:
        """Knuth's generalisation of Dijkstra: classes are settled in order of cost."""
        limits.check()
        forms, users = self.graph.forms, self.graph.users
        waiting: list[int] = []
        queue: list[tuple[Cost, int, int, Node | None, frozenset[Risk]]] = []
        counter = 0
        for key in self.known:
            queue.append(((0.0, 0.5), counter, key, None, frozenset()))
            counter += 1
        for place, (key, node) in enumerate(forms):
            is_allowed = self.allowed(node)
            waiting.append(len(set(node.args)) if is_allowed else -1)
            if is_allowed and not node.args:
                cost, risks = self._cost(place)
                queue.append((cost, counter, key, node, risks))
                counter += 1
        heapq.heapify(queue)
        while queue:
            cost, _, key, found, risks = heapq.heappop(queue)
            if key in self.best:
                continue
            self.best[key], self._risks[key] = (cost, found), risks
            for place in users.get(key, ()):
                waiting[place] -= 1
                user, node = forms[place]
                if waiting[place] == 0 and user not in self.best:
                    cost, risks = self._cost(place)
                    heapq.heappush(queue, (cost, counter, user, node, risks))
                    counter += 1

    def cost(self, key: int) -> Cost | None:
        """Cost of the best term of a class; None where there is none of finite cost."""
        found = self.best.get(key)
        return found and found[0]

    def reductions(self, key: int, axis: str, part: str, inside: Extraction) -> list[tuple[str, Expr]]:
        """(op, body) of the reductions over one part of an axis that the best term of a class uses; the
        bodies are the best terms of `inside`."""
        found: dict[tuple[str, Expr], None] = {}
        seen: set[int] = set()

        def visit(k: int) -> None:
            node = self.best[k][1]
            if k in seen or k in self.known or node is None:
                return
            seen.add(k)
            if node.head == "Red" and node.words[1:] == (axis, part):
                found[node.words[0], inside.term(node.args[0])] = None
                return
            for arg in node.args:
                visit(arg)

        visit(key)
        return list(found)

    def term(self, key: int) -> Expr:
        """The best term of a class."""
        memo: dict[int, Expr] = {}

        def build(k: int) -> Expr:
            if k not in memo:
                if k in self.known:
                    memo[k] = self.known[k]
                else:
                    node = self.best[k][1]
                    assert node is not None
                    memo[k] = self.encoder.decode(node.head, node.words, tuple(map(build, node.args)))
            return memo[k]

        return build(key)
