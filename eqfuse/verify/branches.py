"""Which ways the branches of programs went: comparisons, limits and signs of real numbers.

Positions and sizes are looked at without running anything (`adversary.Unseen`). What depends on data is noted while the
programs run: a field domain tells `Branches` what every comparison, `max`, `min`, `abs`, `relu` and `sign` was given.
A side that no number can reach (`exp(x) < 0`) is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np

from eqfuse.terms.domain import JOINING
from eqfuse.terms.functions import COMPARISONS, LOGICAL
from eqfuse.terms.integers import as_integers
from eqfuse.terms.intervals import ABOVE, BELOW, EQUAL, HOLDS
from eqfuse.terms.masks import masked
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    call,
    children,
    walk,
)
from eqfuse.terms.printer import show
from eqfuse.verify.certificate import NEVER
from eqfuse.verify.field.array import FieldArray
from eqfuse.verify.field.casts import rounded_of
from eqfuse.verify.inputs import indexing_tensors
from eqfuse.verify.reals import Reals

_STRICT = BELOW | ABOVE
SIGNS = frozenset({"abs", "relu", "sign"})
"""Functions that compare their argument with 0."""
LIMITS = frozenset({"maximum", "minimum"})

MOST_PATHS = 256
"""Expressions with what leads to them that are looked at."""
MOST_OPERATIONS = 10_000
"""Of an expression that is written out."""

Goal = tuple[tuple[Expr, bool], ...]
"""Conditions that have to hold together, each with the truth that it has to have."""

Kind = Literal["real", "drawn", "given"]
"""What the numbers of a branch are, see `Untaken`."""


@dataclass(frozen=True)
class Untaken:
    """A branch of which a side was not taken, and what to say of it. The order of integers cannot be supposed: `drawn` are
    branches on integers of tensors that are drawn freely, so that trials should have taken both sides; `given` are those on
    integers that are computed, or that have to stay inside of what they are an index of. `goals` are what the sides that were
    not taken ask for."""

    node: Call
    said: str
    kind: Kind
    goals: tuple[Goal, ...] = ()

    @property
    def compared(self) -> list[Call]:
        """What decides it."""
        return _compared(self.node)


class Branches:
    """What the numbers of every branch were to each other, over all runs.

    Branches of two programs are the same where they compare the same numbers, in whatever words: `x > y`, `y < x`,
    `max(x, y)`; `abs(x)`, `max(x, -x)` and `x < 0`. The residues tell, in the first run of each.
    """

    def __init__(self, p: int, q: int) -> None:
        self._moduli = p, q
        self._seen: dict[Expr, int] = {}
        self._truths: dict[Expr, set[bool]] = {}
        self._numbers: dict[Expr, int] = {}
        self._integers: set[Expr] = set()

    def note(self, node: Expr, fn: str, parts: Sequence[Any], trials: Any = None) -> None:
        """What a function of the language was given, once: in these of the `trials`, where others were not compared."""
        if fn in JOINING:
            if len(had := self._truths.setdefault(node, set())) < 2:
                together = (np.logical_and if fn == "and" else np.logical_or)(*parts)
                together = together[_places(trials, together)]
                had |= {bool(value) for value in (together.any(), together.all()) if together.size}
            return
        seen = self._seen.get(node, 0)
        if _has_both_sides(fn, seen):
            return
        if node not in self._numbers:
            self._numbers[node] = _fingerprint(node, parts, self._moduli)
            if not any(isinstance(part, FieldArray) for part in parts):
                self._integers.add(node)
        left = _reals(parts[0])
        right = _reals(parts[1]) if len(parts) > 1 else 0.0
        # The limit of a number and an infinity is the number: parts of an axis without a position.
        counted = np.isfinite(left) & np.isfinite(right) if fn in LIMITS else np.array(True)
        counted = counted & _places(trials, np.asarray(left), np.asarray(right))
        with np.errstate(invalid="ignore"):
            if not seen & BELOW and np.any((left < right) & counted):
                seen |= BELOW
            if not seen & ABOVE and np.any((left > right) & counted):
                seen |= ABOVE
            if not seen & EQUAL and not _has_both_sides(fn, seen):
                equal = (left == right) & counted
                if np.any(equal) and np.any(equal & _same_residues(parts, self._moduli)):
                    seen |= EQUAL
        self._seen[node] = seen

    def one_sided(self, programs: Sequence[Program]) -> frozenset[int]:
        """What tells apart the numbers of which some program says, by how it writes them, that the first is never both below
        and above the second: a number and its maximum, which another program may take part by part."""
        found: set[int] = set()
        for program in programs:
            ranges = Reals(program.domains)
            for node in walk(*(output.expr for output in program.outputs)):
                if node in self._seen and isinstance(node, Call) and _depends_on_data(node):
                    possible = ranges.order(*_sides(node))
                    found |= {self._numbers[node]} if possible & _STRICT != _STRICT else set()
        return frozenset(found)

    def untaken(
        self,
        program: Program,
        limits: frozenset[str] = frozenset(),
        one_sided: frozenset[int] = frozenset(),
        *,
        all_joined: bool = False,
    ) -> list[Untaken]:
        """The data-dependent branches of a program of which a side was never taken, though it can be; of those that
        compare the same numbers the last. `limits` are integer tensors that are drawn as ends of ranges; see `one_sided`. Of conditions
        that join comparisons `all_joined` ones, or those of which each comparison went both ways."""
        fixed = indexing_tensors(program) | limits
        found: dict[int, Untaken] = {}
        together: list[Untaken] = []
        mask, ranges = masked(program), Reals(program.domains)
        for node in walk(*(mask(output.expr) for output in program.outputs)):
            if not isinstance(node, Call) or not _depends_on_data(node):
                continue
            if node in self._seen:
                seen, every = self._seen[node], BELOW | EQUAL | ABOVE
                if self._numbers[node] in one_sided and seen & _STRICT:
                    every = seen | EQUAL
                said = _missing(node, seen, ranges, every)
                if said:
                    goals = _goals(node, seen, ranges, every)
                    found[self._numbers[node]] = Untaken(node, said, self._kind(node, fixed), goals)
            elif len(had := self._truths.get(node, {True, False})) == 1:
                said = f"{_text(node)}{NEVER}{'false' if True in had else 'true'}"
                goals = (((node, True not in had),),)
                together.append(Untaken(node, said, self._kind(node, fixed), goals))
        alone = set() if all_joined else {each.node for each in found.values()}
        return [*found.values(), *(each for each in together if alone.isdisjoint(each.compared))]

    def on_data(self, programs: Sequence[Program]) -> list[Untaken]:
        """All branches of programs on real numbers that they read or compute, whatever of them was taken."""
        nodes = dict.fromkeys(
            node for program in programs for node in walk(*(o.expr for o in program.outputs))
        )
        seen = (node for node in nodes if node in self._seen and node not in self._integers)
        return [
            Untaken(node, "", "real") for node in seen if isinstance(node, Call) and _depends_on_data(node)
        ]

    def of_stages(
        self, programs: Sequence[Program], written_out: Iterable[Callable[[], Mapping[Expr, Expr]]]
    ) -> list[Untaken]:
        """The same of real numbers, of branches that none of the programs has: those of a stage that was made from them, as the
        greater of two parts of a row. What the stages' named values are may tell that nothing takes a side."""
        own: set[Expr] = set()
        for program in programs:
            mask = masked(program)
            for output in program.outputs:
                own.update(walk(output.expr, mask(output.expr)))
        numbers = {self._numbers[node] for node in own if node in self._numbers}
        ranges = Reals({axis: of for program in programs for axis, of in program.domains.items()})
        found: dict[int, Untaken] = {}
        for node, seen in self._seen.items():
            skipped = node in own or node in self._integers or self._numbers[node] in numbers
            if not skipped and isinstance(node, Call) and _depends_on_data(node):
                said = _missing(node, seen, ranges)
                if said:
                    found[self._numbers[node]] = Untaken(node, said, "real")
        if not found:
            return []
        whole = {node: other for known in written_out for node, other in known().items()}

        def is_possible(node: Call) -> bool:
            other = whole.get(node)
            return not isinstance(other, Call) or bool(_missing(other, self._seen[node], ranges))

        return [each for each in found.values() if is_possible(each.node)]

    def _kind(self, node: Call, fixed: frozenset[str]) -> Kind:
        """What the numbers of a branch are; `fixed` are integer tensors that are not drawn freely."""
        integers = [part for part in _compared(node) if part in self._integers and _depends_on_data(part)]
        if not integers:
            return "real"
        among = list(walk(*integers))
        computed = any(isinstance(part, Reduce | Scalar) for part in among)
        indices = any(isinstance(part, Load) and part.tensor in fixed for part in among)
        return "given" if computed or indices else "drawn"


def paths(program: Program) -> list[Goal]:
    """What leads to the sides of choices inside of other choices, where two conditions on data or more do."""
    found: dict[Goal, None] = {}
    visited: set[tuple[Expr, Goal]] = set()
    waiting: list[tuple[Expr, Goal]] = [(output.expr, ()) for output in program.outputs]
    choices: dict[Expr, bool] = {}
    for node in walk(*(output.expr for output in program.outputs)):
        own = isinstance(node, Call) and node.fn == "where" and _depends_on_data(node.args[0])
        choices[node] = own or any(choices[child] for child in children(node))
    while waiting and len(visited) < MOST_PATHS:
        node, path = waiting.pop()
        if (node, path) in visited or not choices[node]:
            continue
        visited.add((node, path))
        match node:
            case Call("where", (condition, *sides)) if _depends_on_data(condition):
                waiting.append((condition, path))
                for truth, side in zip((True, False), sides, strict=True):
                    longer = path if (condition, truth) in path else (*path, (condition, truth))
                    if len(longer) > 1:
                        found[longer] = None
                    waiting.append((side, longer))
            case _:
                waiting += [(child, path) for child in children(node)]
    return list(found)


def conjunction(goal: Goal) -> Expr:
    """The condition that all of a goal is met."""
    parts: list[Expr] = [node if wanted else call("not", node) for node, wanted in goal]
    return reduce(lambda one, other: call("and", one, other), parts)


def _has_both_sides(fn: str, seen: int) -> bool:
    """Whether more of a branch says nothing more: both of its sides were taken."""
    if fn in HOLDS:
        return bool(seen & HOLDS[fn] and seen & ~HOLDS[fn])
    return seen & _STRICT == _STRICT


def _compared(node: Call) -> list[Call]:
    """What decides a branch: itself, or the comparisons that a condition joins."""
    return list(_joined(node)) if node.fn in JOINING else [node]


def _joined(node: Call) -> Iterator[Call]:
    """The comparisons that a condition is made of."""
    for part in node.args:
        if isinstance(part, Call) and part.fn in COMPARISONS:
            yield part
        elif isinstance(part, Call) and part.fn in LOGICAL:
            yield from _joined(part)


def _same_residues(parts: Sequence[Any], moduli: tuple[int, int]) -> Any:
    """Where what is compared is equal as far as residues know: real values may be so by rounding."""
    known = [_residues(part) for part in parts]
    for at, modulus in enumerate(moduli):
        residues = [pair[at] for pair in known]
        if all(residue is not None for residue in residues):
            return (residues[0] - (residues[1] if len(residues) > 1 else 0)) % modulus == 0
    return True


def _residues(part: Any) -> tuple[Any, Any]:
    """Modulo p and modulo q: integers are their own, and truth values are 0 and 1."""
    if not isinstance(part, FieldArray):
        return (as_integers(part),) * 2
    rounded = rounded_of(part)
    return rounded.p, rounded.q


def _reals(part: Any) -> Any:
    return rounded_of(part).shadow if isinstance(part, FieldArray) else np.asarray(part)


def _depends_on_data(node: Expr) -> bool:
    return any(isinstance(part, Load | Reduce | Scalar | Local) for part in walk(node))


def _places(trials: Any, *parts: Any) -> Any:
    """Which elements of parts, of which the first dimension may be that of trials, are of these trials."""
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    if trials is None or not shape or shape[0] != len(trials):
        return np.ones(shape, dtype=bool)
    return np.broadcast_to(trials.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _fingerprint(node: Expr, parts: Sequence[Any], moduli: tuple[int, int]) -> int:
    """A number for the differences between what is compared, up to their sign and however they are repeated."""
    known = [_residues(part) for part in parts]
    for at, modulus in enumerate(moduli):
        residues = [pair[at] for pair in known]
        if all(residue is not None for residue in residues):
            first, *rest = residues
            found = (first - rest[0] if rest else first) % modulus
            if not rest or np.array_equal(residues[1], -first % modulus):  # max(x, -x) is abs(x)
                found = first % modulus
            return hash(np.unique(np.minimum(found, modulus - found)).tobytes())
    return hash(node)


def _missing(node: Call, seen: int, ranges: Reals, every: int = BELOW | EQUAL | ABOVE) -> str:
    """What of a branch was not seen, though it is possible, among `every` way there may be; empty where nothing is."""
    gone = [said for _, said in _sides_left(node, seen, ranges, every)]
    return f"{_text(node.args[0] if node.fn in SIGNS else node)}{NEVER}{' nor '.join(gone)}" if gone else ""


def _sides(node: Call) -> tuple[Expr, Expr]:
    """The two numbers that a branch compares."""
    return (node.args[0], node.args[1]) if len(node.args) > 1 else (node.args[0], Const(0))


def _goals(node: Call, seen: int, ranges: Reals, every: int) -> tuple[Goal, ...]:
    """What the sides of a branch ask for that were not seen."""
    left, right = _sides(node)
    is_comparison = node.fn in COMPARISONS

    def wanted(bits: int) -> tuple[Expr, bool]:
        if is_comparison:
            return node, bool(bits & HOLDS[node.fn])
        return call("lt" if bits == BELOW else "gt", left, right), True

    return tuple((wanted(bits),) for bits, _ in _sides_left(node, seen, ranges, every))


def _sides_left(node: Call, seen: int, ranges: Reals, every: int) -> list[tuple[int, str]]:
    """The sides of a branch that were not seen, though they are possible."""
    possible = ranges.order(*_sides(node)) & every
    if node.fn in COMPARISONS:
        true, false = HOLDS[node.fn], 7 & ~HOLDS[node.fn]
        sides = [(true, "true"), (false, "false")]
    elif node.fn in SIGNS:
        sides = [(BELOW, "below 0"), (ABOVE, "above 0")]
    elif seen & ~EQUAL == 0:  # of equal numbers either will do
        return []
    else:
        sides = [(BELOW, "with the first below the second"), (ABOVE, "with the first above the second")]
    return [(bits, said) for bits, said in sides if not seen & bits and possible & bits]


def _text(node: Expr) -> str:
    """An expression as a person reads it; of one that shares its parts so often that its text has no end, how large it is."""
    sizes: dict[Expr, int] = {}
    for part in walk(node):
        sizes[part] = 1 + sum(sizes.get(child, 0) for child in children(part))
    if sizes[node] <= MOST_OPERATIONS:
        return show(node)
    return f"{node.fn if isinstance(node, Call) else type(node).__name__} of {sizes[node]:.3g} operations"
