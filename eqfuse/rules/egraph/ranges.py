"""What taking a factor out of a sum does to the range of its partial sums.

`sum(x / max|x|)` adds numbers that are at most 1; `sum(x) / max|x|` is equal, and overflows where x is large. The
partial sums of a fused program shall stay where those of the program stay, so extraction charges a factor that was
taken out of a sum

- where what is left is of a higher degree in values that nothing bounds: `x / m`, which is bounded, leaves `x`;
  `exp(a - max a) / s * v` leaves `exp(a - max a) * v`, of the degree that it had;
- where it grows with something that it did not grow with as much, or faster than every sum of the program, or would if what grows
  were left: `x / max|x| * p * r` without `r / max|x|` is `x p`;
- where the factor, or one of its own factors, does not depend on a reduction over the same axis, so that no fusion needs it outside.
  That saves a multiplication, and is charged unless the sum loses an axis by it (q (k v) for (q k) v) or is a matrix product,
  whose operands stay as they are stored.

Products are charged that multiply what a scale was taken out of twice or more often with what the scales are then:
`(x / n) (z / m)` is in range where `x z` and `1 / (n m)` are not. Of forms over whole axes any value is charged that grows or falls
faster than all that the program computes, by each tensor, by all at once, or where all are tiny (`leaves_range`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.egraph.encode import Encoder
from eqfuse.rules.egraph.references import foreign_moves
from eqfuse.rules.egraph.saturate import Graph, Node
from eqfuse.terms.nodes import Call, Load, Reduce, Size, free_axes, walk
from eqfuse.threads import cached

UNKNOWN = math.inf
"""Degree of a class that has no finite term so far."""


Powers = Mapping[str | int, float]
"""By tensor, scalar, or class of what grows in its own way, and by `TOGETHER`."""
ALL = ""
"""All tensors at once: x - z grows with x, with z, and with both as either does. A scale made of squares does not count here: what is
divided by it is in half of the range by itself, and what that is multiplied by (weights, behind a norm) is near 1."""
TOGETHER = "/"
"""All tensors at once that the program divides by what it reduces, or reduces so."""
TINY = "<"
"""What a value is where all tensors are `LEAST`, as a power of that, below 0, and numbers are what they are: x / (max|x| + 1e-30) is no
scale there."""
LEAST = 1e-40


@dataclass(frozen=True)
class _Growth:
    """powers: how often values that nothing bounds are multiplied, less how often they divide where the program has them as
    a scale: a reduction that is made of no square. peak: the largest power of all that it is made of."""

    powers: Powers
    peak: float
    is_reduced: bool

    @cached
    def most(self) -> float:
        """The larger of how it grows with all of them, and with one, by absolute value."""
        return max((abs(power) for of, power in self.powers.items() if of != TINY), default=0.0)

    def size(self) -> tuple[float, float, float]:
        return self.most, self.peak, sum(map(abs, self.powers.values()))


class Ranges:
    """Degrees and axes of the classes of a saturated e-graph, and which products lose range. A sum has no digits left that is
    moved by one of `foreign`. `narrow` are tensors of fewer bits than float32 has: a matrix product reads them as they are stored.
    None where all are."""

    def __init__(self, graph: Graph, encoder: Encoder, narrow: frozenset[str] | None = None) -> None:
        self._narrow = narrow
        self._graph = graph
        self._encoder = encoder
        self._cascaded = graph.facts["reduces"]
        self._sums = {
            key: [(node.words[1:], node.args[0]) for node in nodes if _is_sum(node)]
            for key, nodes in graph.classes.items()
        }
        self._scalars = graph.facts["scalar"]
        self._limits: dict[int, set[int]] = {}
        for value, limit in graph.facts["within"]:
            if isinstance(value, int) and isinstance(limit, int):
                self._limits.setdefault(value, set()).add(limit)
        self._degrees = self._solved()
        self._written = {row[0] for row in graph.facts["written"] if isinstance(row[0], int)}
        self._scaled = frozenset(_scaled(encoder))
        self._powers = self._settled()
        self._reached = self._reach(
            key for key in graph.classes if key in self._written or self._is_leaf(key)
        )
        self._summed = self._reach(key for key in self._written if self._sums.get(key))
        self._axes: dict[int, frozenset[str]] = {}
        self.unstable: dict[tuple[bool, int], float] = {}
        self.foreign = foreign_moves(graph, encoder)

    def loses(self, key: int, node: Node) -> bool:
        """Whether `node`, of class `key`, is a factor times a sum that it was taken out of, at the cost of range."""
        match node:
            case Node("Mul", _, (factor, rest)):
                bodies = self._sums.get(key, ())
                return any(
                    any(along == domain for along, _ in bodies)
                    and self._is_lossy(
                        factor, rest, left, [body for along, body in bodies if along == domain], domain[0]
                    )
                    for domain, left in self._sums.get(rest, ())
                )
        return False

    def _is_lossy(self, factor: int, rest: int, left: int, bodies: Sequence[int], axis: str) -> bool:
        if self._degrees[left] > min(self._degrees[body] for body in bodies):
            return True
        if self._grows(left, bodies) or self._offsets(factor, left):
            return True
        if self._is_needed(factor, axis) or not self.axes(factor) <= self.axes(rest):
            return False
        return not self._is_matrix_product(left)

    def _reach(self, keys: Iterable[int]) -> Powers:
        """By what values grow, the largest power of these classes, up or down."""
        found: dict[str | int, float] = {}
        for key in keys:
            for of, power in self._powers[key].powers.items() if key in self._powers else ():
                found[of] = max(found.get(of, 0.0), abs(power))
        return found

    def leaves_range(self, key: int, node: Node) -> bool:
        """Whether a class grows or falls faster with something than all that the program computes, or a sum grows faster than all
        of its sums: where the program is in range, it may not be."""
        if key not in self._powers:
            return False
        powers = self._powers[key].powers.items()
        if any(abs(power) > self._reached.get(of, 0.0) for of, power in powers):
            return True
        if not _is_sum(node) or key in self._written:
            return False
        return key in self._left or any(power > self._summed.get(of, 0.0) for of, power in powers)

    @cached
    def _left(self) -> frozenset[int]:
        """Sums that a factor was taken out of at the cost of range, and none without, whatever they are multiplied by next."""
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for key, node in self._graph.forms:
            if node.head == "Mul" and self._is_taken_out(key, node.args[1]):
                found[self.loses(key, node)].add(node.args[1])
        return frozenset(found[True] - found[False])

    def _is_taken_out(self, key: int, rest: int) -> bool:
        """Whether a class has a sum along the same axis as one that is multiplied for it."""
        along = {domain for domain, _ in self._sums.get(key, ())}
        return any(domain in along for domain, _ in self._sums.get(rest, ()))

    def _is_leaf(self, key: int) -> bool:
        return any(node.head == "Leaf" for node in self._graph.classes[key])

    def _grows(self, left: int, bodies: Sequence[int]) -> bool:
        """Whether what is left of a body grows with something that the body does not grow with as much."""
        if left not in self._powers:
            return False
        body = min(
            (self._powers[key] for key in bodies if key in self._powers), key=_Growth.size, default=None
        )
        pairs = self._powers[left].powers.items()
        if body is None:
            return False
        most = {
            of: max(abs(body.powers.get(of, 0.0)), 0.0 if of == ALL else self._summed.get(of, 0.0))
            for of, _ in pairs
        }
        return any(abs(power) > most[of] for of, power in pairs)

    def _is_needed(self, factor: int, axis: str) -> bool:
        """Whether a fusion needs a factor out of the sum, all of it: it reduces along the axis, and each of its factors does."""
        if (factor, axis) not in self._cascaded or self._is_power_of_counts(factor):
            return False
        parts = (node.args for node in self._graph.classes[factor] if node.head == "Mul")
        return not any(
            (part, axis) not in self._cascaded and not self._is_scale(part) for args in parts for part in args
        )

    def _offsets(self, factor: int, left: int) -> bool:
        """Whether a factor is a product of a scale and of what grows, so that only both together leave a sum that does not grow:
        x / max|x| * p * r, without r / max|x|, is x p."""
        if left not in self._powers:
            return False
        grown = self._powers[left].powers
        return any(
            abs(power) > max(abs(power + by.get(of, 0.0)), 0.0 if of == ALL else self._summed.get(of, 0.0))
            for by in self._parts(factor)
            for of, power in grown.items()
        )

    def _parts(self, factor: int) -> Iterator[Powers]:
        """How the factors of a product grow, one at a time."""
        for node in self._graph.classes[factor]:
            if node.head == "Mul" and all(arg in self._powers for arg in node.args):
                yield from (self._powers[arg].powers for arg in node.args)

    def power(self, key: int) -> float:
        """How a class grows with what nothing bounds, all at once or one of them, by its absolute value. What is divided by a
        scale that grows as fast does not, and a square of it stays in range."""
        return self._powers[key].most if key in self._powers else 1.0

    def falls(self, key: int) -> bool:
        """Whether a class falls as something grows that nothing bounds, as 1 over a scale does."""
        return key in self._powers and any(
            power < 0 for of, power in self._powers[key].powers.items() if of != TINY
        )

    def cancels(self, node: Node) -> bool:
        """Whether a product is of what grows as a product of several and is not in the program, and what falls: either may be
        out of range where the product is not."""
        if any(arg not in self._powers for arg in node.args):
            return False
        one, other = node.args
        return self._takes_back(one, other) or self._takes_back(other, one)

    def _takes_back(self, falls: int, grows: int) -> bool:
        low, high = self._powers[falls], self._powers[grows]
        if not any(by < 0 and high.powers.get(of, 0.0) >= 2 for of, by in low.powers.items() if of != TINY):
            return False
        bodies = [n.args[0] for n in self._graph.classes[grows] if n.head == "Red"]
        return not self._written.intersection((grows, *bodies))

    def axes(self, key: int) -> frozenset[str]:
        """The axes that a value depends on, as far as its forms show."""
        if key not in self._axes:
            self._axes[key] = frozenset()  # of a form that contains itself
            forms = [self._axes_of(node) for node in self._graph.classes.get(key, ())]
            self._axes[key] = min(forms, key=lambda axes: (len(axes), sorted(axes)), default=frozenset())
        return self._axes[key]

    def _axes_of(self, node: Node) -> frozenset[str]:
        if node.head == "Leaf":
            return free_axes(self._encoder.leaves[node.words[0]])
        found = frozenset[str]().union(*map(self.axes, node.args))
        return found - {node.words[1]} if node.head == "Red" else found

    def _is_matrix_product(self, body: int) -> bool:
        """Whether two factors of a body have an axis each that the other has not, and are to stay as they are stored."""
        factors = list(self._factors(body, set()))
        if self._narrow is not None and self._narrow.isdisjoint(
            t for key in factors for t in self._tensors(key)
        ):
            return False
        kinds = {self.axes(factor) for factor in factors}
        return any(one - other and other - one for one in kinds for other in kinds)

    def _tensors(self, key: int) -> Iterator[str]:
        """What a factor is a cast, or an element, of."""
        for node in self._graph.classes[key]:
            match node:
                case Node("Leaf", (name,)):
                    yield from (n.tensor for n in walk(self._encoder.leaves[name]) if isinstance(n, Load))
                case Node("Cast", _, (arg,)):
                    yield from self._tensors(arg)

    def _is_power_of_counts(self, key: int) -> bool:
        """Whether a class is a product of numbers of positions or of their inverses: of squares of what is divided by one. A single
        one leaves a mean."""
        seen = set[int]()

        def is_count(part: int) -> bool:
            if part in seen:
                return False
            seen.add(part)
            return any(
                self._is_number(node) or (node.head in ("Inv", "Sq", "Mul") and all(map(is_count, node.args)))
                for node in self._graph.classes[part]
            )

        return not self._is_scale(key) and is_count(key)

    def _factors(self, key: int, seen: set[int]) -> Iterator[int]:
        products = [node for node in self._graph.classes.get(key, ()) if node.head == "Mul"]
        if key in seen or not products:
            yield key
            return
        seen.add(key)
        for arg in products[0].args:
            yield from self._factors(arg, seen)

    def _solved(self) -> Mapping[int, float]:
        """The least fixed point: a class has the degree of its best form."""
        degrees: dict[int, float] = dict.fromkeys(self._graph.classes, UNKNOWN)
        degrees |= {row[0]: 0.0 for row in self._graph.facts["bounded"] if isinstance(row[0], int)}

        def improved(key: int) -> bool:
            nodes = self._graph.classes[key]
            best = min((self._degree(node, degrees) for node in nodes), default=UNKNOWN)
            if is_better := best < degrees[key]:
                degrees[key] = best
            return is_better

        self._improve(improved)
        return degrees

    def _improve(self, improved: Callable[[int], bool]) -> None:
        """Calls `improved` for classes, in order, until nothing changes: for those again of which an argument has changed."""
        stale = set(self._graph.classes)
        while stale:
            for key in self._graph.classes:
                if key in stale:
                    stale.discard(key)
                    if improved(key):
                        stale.update(self._graph.forms[place][0] for place in self._graph.users.get(key, ()))

    def _settled(self) -> Mapping[int, _Growth]:
        """The growth of every class: of the form that grows and falls the least."""
        bounded = {row[0] for row in self._graph.facts["bounded"]}
        found: dict[int, _Growth] = {}

        def improved(key: int) -> bool:
            nodes = self._graph.classes[key]
            forms = [self._growth(key, node, found) for node in nodes if found.keys() >= set(node.args)]
            best = min(forms, key=_Growth.size, default=None)
            if best is not None and key in bounded:
                best = _Growth({of: power for of, power in best.powers.items() if of == TINY}, 0.0, False)
            if best is None or (key in found and best.size() >= found[key].size()):
                return False
            found[key] = best
            return True

        self._improve(improved)
        return found

    def _growth(self, key: int, node: Node, found: Mapping[int, _Growth]) -> _Growth:
        args = [found[arg] for arg in node.args]
        powers = {of: power for of, power in self._powers_of(key, node, args).items() if power}
        peak = max(abs(powers.get(ALL, 0.0)), *(arg.peak for arg in args), 0.0)
        return _Growth(powers, peak, node.head == "Red" or any(arg.is_reduced for arg in args))

    def _powers_of(self, key: int, node: Node, args: Sequence[_Growth]) -> Powers:
        powers = [arg.powers for arg in args]
        match node.head:
            case "Inv" if args[0].is_reduced:
                is_range = args[0].peak <= 1
                return {of: -power for of, power in powers[0].items() if is_range or of != ALL}
            case "Mul":
                return _added(*powers)
            case "Ratio":
                return _added(powers[0], {of: -power for of, power in powers[1].items()})
            case "Sq":
                return {of: 2 * power for of, power in powers[0].items()}
            case "Sqrt":
                return {of: power / 2 for of, power in powers[0].items()}
            case "Where":
                return _largest(powers[1:])
            case "Neg" | "Abs" | "Cast" | "Add" | "Delta" | "Max" | "Min" | "Finite" | "Red":
                return _largest(powers)
            case "Leaf" if isinstance(leaf := self._encoder.leaves[node.words[0]], Load):
                own: dict[str | int, float] = {leaf.tensor: 1.0, ALL: 1.0, TINY: -1.0}
                if leaf.tensor in self._scaled:
                    own[TOGETHER] = 1.0
                return own
            case "Num" if 0 < abs(number := self._encoder.numbers[node.words[0]].value) < math.inf:
                return {TINY: -math.log(abs(number)) / math.log(LEAST)}
            case _:
                return {key: self._degree(node, dict.fromkeys(node.args, 1.0))}

    def _degree(self, node: Node, degrees: Mapping[int, float]) -> float:
        args = [degrees.get(arg, UNKNOWN) for arg in node.args]
        match node.head:
            case "Num":
                return 0.0
            case "Leaf":
                return 0.0 if isinstance(self._encoder.leaves[node.words[0]], Size) else 1.0
            case "Mul":
                return 0.0 if self._is_share(*node.args) else sum(args)
            case "Inv" if any(map(self._is_number, self._graph.classes[node.args[0]])):
                return 0.0
            case "Sq":
                return 2 * args[0]
            case "Sqrt":
                return args[0] / 2
            case "Neg" | "Abs" | "Cast" | "Add" | "Max" | "Min" | "Finite" | "Red":
                return max(args)
            case "Where":
                return max(args[1:])
            case _:
                return 1.0 if UNKNOWN not in args else UNKNOWN

    def _is_share(self, value: int, inverse: int) -> bool:
        """Whether a product is a value over a multiple of what it is at most (a mean of which it is a part), or over
        that and a run-time number, which is small and positive in practice."""
        return any(
            limit in by.args
            and (by.head, True) in (("Mul", self._is_scale(rest)), ("Add", (rest,) in self._scalars))
            for limit in self._limits.get(value, ())
            for node in self._graph.classes[inverse]
            if node.head == "Inv"
            for by in self._graph.classes[node.args[0]]
            if by.head in ("Mul", "Add")
            for rest in by.args
            if rest != limit
        )

    def _is_scale(self, key: int) -> bool:
        """Whether a value is a number, a size, or the inverse of one."""
        return any(
            self._is_number(node)
            or (node.head == "Inv" and any(map(self._is_number, self._graph.classes[node.args[0]])))
            for node in self._graph.classes[key]
        )

    def _is_number(self, node: Node) -> bool:
        match node:
            case Node("Num"):
                return True
            case Node("Leaf", (name,)):
                return isinstance(self._encoder.leaves[name], Size)
            case Node("Red", ("sum", _, _), (body,)):
                return any(n.head == "Num" for n in self._graph.classes[body])
        return False


def _scaled(encoder: Encoder) -> Iterator[str]:
    """Tensors that a divisor of the program reduces, or that are divided by it."""
    for terms in encoder.terms.values():
        for expr in terms:
            match expr:
                case Call("div", (over, by)) | Call(
                    "mul", (over, Call("div", (_, by)) | Call("rsqrt", (by,)))
                ):
                    reduced = [n.body for n in walk(by) if isinstance(n, Reduce)]
                    yield from (
                        n.tensor for n in walk(*reduced, *([over] if reduced else [])) if isinstance(n, Load)
                    )


def _is_sum(node: Node) -> bool:
    return node.head == "Red" and node.words[0] == "sum"


def _added(one: Powers, other: Powers) -> Powers:
    return {of: one.get(of, 0.0) + other.get(of, 0.0) for of in (*one, *other)}


def _largest(powers: Sequence[Powers]) -> Powers:
    names = dict.fromkeys(of for some in powers for of in some)
    return {of: max((some.get(of, 0.0) for some in powers), key=abs if of != TINY else None) for of in names}
