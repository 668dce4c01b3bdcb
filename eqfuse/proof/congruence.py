"""Proofs from recorded firings: congruence closure that remembers why.

The firings of a saturation are replayed in an order in which each finds its premises already there. Every one that
does is stamped, so are the equalities that follow by congruence, and a proof rests on smaller stamps alone: proofs
are well founded. Which equations connect two terms is then a shortest path, where a congruence is as long
as the paths between its arguments.

After Nieuwenhuis and Oliveras, "Proof-producing congruence closure" (RTA 2005), and Flatt et al.,
"Small proofs from congruence closure" (FMCAD 2022).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eqfuse.proof.nodes import Chain, Differ, Equal, Fact, Holds, Inference, Premise, Step
from eqfuse.proof.record import Atom, Firing, Tape
from eqfuse.proof.syntax import Position, Term, instance, replaced_at, walk, word_instance

BACKWARD = 1.25
"""Length of a step that reads its rule from right to left, where a forward step has length 1."""


class Unproved(Exception):
    """Two terms that the recorded steps do not connect."""


@dataclass(frozen=True)
class _Edge:
    """Two equal terms: by a firing (whose rule reads `left` to `right`), or by congruence where that is None."""

    left: int
    right: int
    firing: int | None
    stamp: int


@dataclass(frozen=True)
class _Known:
    """A fact: of which terms, by which firing (None: given), since when."""

    args: tuple[Term | str, ...]
    firing: int | None
    stamp: int


Classes = tuple[tuple[Term, ...], ...]
"""Classes of equal terms."""

Move = tuple[Position, int, bool]
"""A step inside a term: where, which firing, whether forward."""


@dataclass
class Closure:
    """The equalities and facts of one recorded saturation, each with its proof."""

    tape: Tape
    pending: list[int] = field(default_factory=list)
    _ids: dict[Term, int] = field(default_factory=dict)
    _terms: list[Term] = field(default_factory=list)
    _leader: list[int] = field(default_factory=list)
    _members: dict[int, list[int]] = field(default_factory=dict)
    _users: dict[int, list[int]] = field(default_factory=dict)
    _signatures: dict[tuple[object, ...], int] = field(default_factory=dict)
    _edges: list[list[_Edge]] = field(default_factory=list)
    _facts: dict[tuple[object, ...], list[_Known]] = field(default_factory=dict)
    _stamp: int = 0
    _stamps: dict[int, int] = field(default_factory=dict)
    _premises: list[tuple[Atom, ...]] = field(default_factory=list)
    _paths: dict[tuple[int, int, int], tuple[float, tuple[Move, ...]] | None] = field(default_factory=dict)
    _inferences: dict[int, Inference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for root in self.tape.names.values():
            self._add(root)
        for atom in self.tape.given:
            self._learn(atom, None)
        self._premises = [
            tuple(_ground(atom, firing) for atom in firing.clause.premises) for firing in self.tape.firings
        ]
        self._replay()

    # -- replay ------------------------------------------------------------------------------------

    def _replay(self) -> None:
        waiting = list(range(len(self.tape.firings)))
        while waiting:
            rest = [number for number in waiting if not self._accept(number)]
            if len(rest) == len(waiting):
                break
            waiting = rest
            self._rekey()
        self.pending = waiting

    def _rekey(self) -> None:
        """Facts by the classes that their arguments are in now."""
        facts: dict[tuple[object, ...], list[_Known]] = {}
        for (relation, *_), known in self._facts.items():
            facts.setdefault(self._key(str(relation), known[0].args), []).extend(known)
        self._facts = facts

    def _accept(self, number: int) -> bool:
        if not all(self._is_met(atom) for atom in self._premises[number]):
            return False
        firing = self.tape.firings[number]
        conclusion = _ground(firing.clause.conclusion, firing)
        self._stamps[number] = self._tick()
        if conclusion.name == "=":
            left, right = map(self._add, conclusion.args)
            self._union(_Edge(left, right, number, self._stamp))
        else:
            self._learn(conclusion, number)
        return True

    def _is_met(self, atom: Atom) -> bool:
        match atom:
            case Atom("=", (a, b)):
                return self._find(self._add(a)) == self._find(self._add(b))
            case Atom("!=", (a, b)):
                return a is not b if isinstance(a, Term) else a != b
        return self._key(atom.name, atom.args) in self._facts

    def _learn(self, atom: Atom, firing: int | None) -> None:
        key = self._key(atom.name, atom.args)
        if key not in self._facts:
            self._facts[key] = [_Known(atom.args, firing, self._stamp)]

    def _key(self, relation: str, args: Iterable[Term | str]) -> tuple[object, ...]:
        return (relation, *(a if isinstance(a, str) else self._find(self._add(a)) for a in args))

    def _tick(self) -> int:
        self._stamp += 1
        return self._stamp

    # -- classes -----------------------------------------------------------------------------------

    def _add(self, root: Term | str) -> int:
        assert isinstance(root, Term)
        if root in self._ids:
            return self._ids[root]
        for node in walk(root):
            if node in self._ids:
                continue
            key = self._ids[node] = len(self._terms)
            self._terms.append(node)
            self._leader.append(key)
            self._members[key] = [key]
            self._edges.append([])
            for arg in dict.fromkeys(node.args):
                self._users.setdefault(self._find(self._ids[arg]), []).append(key)
            twin = self._signatures.setdefault(self._signature(key), key)
            if twin != key:
                self._union(_Edge(twin, key, None, self._tick()))
        return self._ids[root]

    def _signature(self, key: int) -> tuple[object, ...]:
        node = self._terms[key]
        return (node.head, node.words, *(self._find(self._ids[arg]) for arg in node.args))

    def _find(self, key: int) -> int:
        while self._leader[key] != key:
            self._leader[key] = self._leader[self._leader[key]]
            key = self._leader[key]
        return key

    def _union(self, first: _Edge) -> None:
        queue = [first]
        while queue:
            edge = queue.pop()
            self._edges[edge.left].append(edge)
            self._edges[edge.right].append(edge)
            small, large = self._find(edge.left), self._find(edge.right)
            if small == large:
                continue
            if len(self._members[small]) > len(self._members[large]):
                small, large = large, small
            self._leader[small] = large
            self._members[large] += self._members.pop(small)
            users = self._users.pop(small, [])
            self._users.setdefault(large, []).extend(users)
            for user in users:
                twin = self._signatures.setdefault(self._signature(user), user)
                if twin != user:
                    queue.append(_Edge(twin, user, None, self._tick()))

    def classes(self) -> Classes:
        """The recorded terms of every class that has more than one, as they came up."""
        return tuple(
            tuple(self._terms[key] for key in sorted(members))
            for _, members in sorted(self._members.items())
            if len(members) > 1
        )

    # -- proofs ------------------------------------------------------------------------------------

    def equal(self, a: Term, b: Term) -> bool:
        return self._find(self._add(a)) == self._find(self._add(b))

    def holds(self, relation: str, args: tuple[Term | str, ...]) -> bool:
        """Whether a fact is known of terms equal to these."""
        return self._key(relation, args) in self._facts

    def chain(self, a: Term, b: Term) -> Chain:
        """The shortest chain of recorded steps from a term to an equal one. Raises Unproved where there is none."""
        for term in (a, b):
            self._add(term)
        self._rekey()
        return self._chain(a, b, self._tick())

    def _chain(self, a: Term, b: Term, before: int) -> Chain:
        """The shortest chain among steps that are stamped earlier."""
        found = self._path(self._add(a), self._add(b), before)
        if found is None:
            raise Unproved("no recorded steps connect the two terms")
        steps: list[Step] = []
        current = a
        for position, number, forward in found[1]:
            firing = self.tape.firings[number]
            conclusion = _ground(firing.clause.conclusion, firing)
            made = conclusion.args[1 if forward else 0]
            assert isinstance(made, Term)
            after = replaced_at(current, position, made)
            steps.append(Step(self._inference(number), forward, position, current, after))
            current = after
        return _without_detours(steps)

    def _path(self, start: int, goal: int, before: int) -> tuple[float, tuple[Move, ...]] | None:
        if start == goal:
            return 0.0, ()
        key = start, goal, before
        if key not in self._paths:
            self._paths[key] = self._search(start, goal, before)
        return self._paths[key]

    def _search(self, start: int, goal: int, before: int) -> tuple[float, tuple[Move, ...]] | None:
        """Dijkstra over the terms of a class."""
        best: dict[int, tuple[float, tuple[Move, ...]]] = {}
        queue: list[tuple[float, int, int, tuple[Move, ...]]] = [(0.0, 0, start, ())]
        count = 0
        while queue:
            length, _, key, moves = heapq.heappop(queue)
            if key in best:
                continue
            best[key] = length, moves
            if key == goal:
                return best[key]
            for edge in self._edges[key]:
                other = edge.right if edge.left == key else edge.left
                if edge.stamp >= before or other in best:
                    continue
                more = self._crossing(edge, key, other)
                count += 1
                heapq.heappush(queue, (length + more[0], count, other, moves + more[1]))
        return None

    def _crossing(self, edge: _Edge, start: int, goal: int) -> tuple[float, tuple[Move, ...]]:
        if edge.firing is not None:
            forward = start == edge.left
            return (1.0 if forward else BACKWARD), (((), edge.firing, forward),)
        total, moves = 0.0, []
        pairs = zip(self._terms[start].args, self._terms[goal].args, strict=True)
        for index, (a, b) in enumerate(pairs):
            found = self._path(self._ids[a], self._ids[b], edge.stamp)
            assert found is not None
            total += found[0]
            moves += [((index, *position), number, forward) for position, number, forward in found[1]]
        return total, tuple(moves)

    def _inference(self, number: int) -> Inference:
        if number not in self._inferences:
            firing, stamp = self.tape.firings[number], self._stamps[number]
            premises = tuple(self._premise(atom, stamp) for atom in self._premises[number])
            self._inferences[number] = Inference(firing.clause.name, dict(firing.values), premises)
        return self._inferences[number]

    def _premise(self, atom: Atom, before: int) -> Premise:
        match atom:
            case Atom("!=", _):
                return Differ()
            case Atom("=", (Term() as a, Term() as b)):
                return Equal(self._chain(a, b, before))
        known = self._nearest(atom, before)
        moves = tuple(self._chain(a, b, before) for a, b in _pairs(atom, known))
        inference = None if known.firing is None else self._inference(known.firing)
        return Holds(Fact(atom.name, known.args, inference), moves)

    def _nearest(self, atom: Atom, before: int) -> _Known:
        """The fact known earlier whose arguments are fewest steps away."""
        found: list[tuple[float, int, _Known]] = []
        for known in self._facts[self._key(atom.name, atom.args)]:
            paths = [self._path(self._ids[a], self._ids[b], before) for a, b in _pairs(atom, known)]
            if known.stamp < before and None not in paths:
                found.append((sum(path[0] for path in paths if path), known.stamp, known))
        return min(found, key=lambda item: item[:2])[2]


def _pairs(atom: Atom, known: _Known) -> list[tuple[Term, Term]]:
    both = zip(atom.args, known.args, strict=True)
    return [(a, b) for a, b in both if isinstance(a, Term) and isinstance(b, Term)]


def _ground(atom: Atom, firing: Firing) -> Atom:
    return Atom(
        atom.name,
        tuple(
            word_instance(a, firing.values) if isinstance(a, str) else instance(a, firing.values)
            for a in atom.args
        ),
    )


def _without_detours(steps: Sequence[Step]) -> Chain:
    """The chain without what returns to a term that it already had."""
    kept: list[Step] = []
    places: dict[Term, int] = {}
    for step in steps:
        if step.before is step.after:
            continue
        places[step.before] = len(kept)
        kept.append(step)
        if step.after in places:
            for dropped in kept[places[step.after] :]:
                del places[dropped.before]
            del kept[len(places) :]
    return tuple(kept)
