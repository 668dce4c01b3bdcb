"""Cheapest terms of a saturated e-graph, by a cost that puts stability before work.

A cost is (instability, work), compared in that order. Instability counts what can overflow, cancel
or leave a narrow format's range although an equal form does not; work counts weighted operations, those
inside a reduction once per position.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eqfuse.rules.encode import Encoder
from eqfuse.rules.saturate import Graph, Node
from eqfuse.terms.nodes import Expr

Cost = tuple[float, float]

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
CANCELLATION = 0.5
CAST_OUT_OF_RANGE = 0.1
UNBOUNDED_SQUARE = 0.01
"""A square of what nothing bounds can overflow; only a choice of whole-axis forms weighs it, a merge
keeps the squares that its states were given."""
NARROW = ("f8e4m3", "f16")


@dataclass
class Extraction:
    """Best node of every class, given which classes are free leaves and which nodes are allowed."""

    graph: Graph
    encoder: Encoder
    known: Mapping[int, Expr] = field(default_factory=dict)
    allowed: Callable[[Node], bool] = lambda node: True
    unbounded_square: float = 0.0
    best: dict[int, tuple[Cost, Node | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts = self.graph.facts
        self._nonpos = {row[0] for row in facts.get("nonpos", ())}
        self._bounded = {row[0] for row in facts.get("bounded", ())}
        self._aggregate = {row[0] for row in facts.get("aggregate", ())}
        self._solve()

    def _own(self, node: Node) -> Cost:
        return self._instability(node), WORK.get(node.head, 1)

    def _instability(self, node: Node) -> float:
        match node:
            case Node("Exp", _, (a,)) if a not in self._nonpos:
                return UNPROVED_EXP
            case Node("Sq", _, (a,)) if a not in self._bounded:
                return self.unbounded_square
            case Node("Mul", _, (a, b)) if a == b and a not in self._bounded:
                return self.unbounded_square
            case Node("Cast", (fn,), (a,)) if fn in NARROW and a not in self._bounded:
                return CAST_OUT_OF_RANGE
            case Node("Add", _, (a, b)) if a in self._aggregate:
                negated = (n.args[0] for n in self.graph.classes.get(b, ()) if n.head == "Neg")
                return CANCELLATION if any(c in self._aggregate for c in negated) else 0.0
        return 0.0

    def _cost(self, node: Node) -> Cost:
        unstable, work = self._own(node)
        times = POSITIONS if node.head == "Red" else 1.0
        for arg in node.args:
            child = self.best[arg][0]
            unstable += child[0]
            work += times * child[1]
        return unstable, work

    def _solve(self) -> None:
        """Knuth's generalisation of Dijkstra: classes are settled in order of cost."""
        users: dict[int, list[tuple[int, Node]]] = {}
        waiting: dict[tuple[int, Node], int] = {}
        queue: list[tuple[Cost, int, int, Node | None]] = []
        counter = 0
        for key in self.known:
            queue.append(((0.0, 0.5), counter, key, None))
            counter += 1
        for key in sorted(self.graph.classes):
            for node in self.graph.classes[key]:
                if not self.allowed(node):
                    continue
                distinct = set(node.args)
                waiting[key, node] = len(distinct)
                for arg in distinct:
                    users.setdefault(arg, []).append((key, node))
                if not distinct:
                    queue.append((self._own(node), counter, key, node))
                    counter += 1
        heapq.heapify(queue)
        while queue:
            cost, _, key, found = heapq.heappop(queue)
            if key in self.best:
                continue
            self.best[key] = (cost, found)
            for user, node in users.get(key, ()):
                waiting[user, node] -= 1
                if waiting[user, node] == 0 and user not in self.best:
                    heapq.heappush(queue, (self._cost(node), counter, user, node))
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
