"""Sums of products in the order that costs least.

    mean[o](sum[k](x[b,k] * w[o,k]))  ->  sum[k](x[b,k] * mean[o](w[o,k]))

A block is a product of factors, summed over some axes, however sums and products are nested. All orders in which its factors
may be multiplied and its axes summed are equal (SPORES' identities: Wang et al., PVLDB 13(11), 2020), and the cheapest
is found by dynamic programming over subsets of the factors, as the order of a chain of matrix products is. What a block is not
made of (an exponential, a mask of data, a cast) is a factor as it stands, and has blocks of its own inside. Where a product with sums is divided by
a value, one of its factors is: one that has the value's axes.

A factor that is a sum of terms is multiplied out where that is cheaper: `(w + a b) x` as `w x + a (b x)`, under a mask or over a divisor too. Terms that are exact, that sum
nothing, stay together: a difference of exact numbers is rounded once, and a difference of their sums is not.
The absolute values of all terms are summed in each order alike, so that the bounds of rounding differ by the depths of the sums
alone (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2).

`rules/blocks.py` reads blocks, with sums over few positions and closed forms. Sums of which masks leave a few positions next to each
other are read at each of them.

A name that sums bind at several places of a block stands for several axes: all but one are given other names of the same extent
(`with_copies`), under which their sums commute too: `sum[k](sq(sum[j](a[j] * b[j,k])))` is one over `j` and `j_1`.

Costs are elements that reductions visit, and those of what they leave for others to read; the plan of each order is priced
as any other, by which one is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product

from eqfuse.fast_dataclass import dataclass
from eqfuse.names import Names
from eqfuse.rules.blocks import (
    NO_COPIES,
    Block,
    Copies,
    axes_of,
    block_of,
    closed,
    closed_sum,
    compared,
    completed,
    is_number,
    is_order,
    selected,
    sum_over,
    sums_inside,
    times,
    windowed,
)
from eqfuse.rules.windows import MOST_WIDTH, Window
from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    post_order,
    rebuild,
    reductions,
    replaced,
    total_of,
    transform,
    walk,
    without_names,
)
from eqfuse.terms.parser import sized_axes, spare_axes
from eqfuse.terms.prefixes import Extents, alike, form_of, scanned
from eqfuse.terms.types import kinds, program_dtypes

MOST_FACTORS = 8
"""Factors of a block of which all orders are looked at; one of more stays as it is written."""
MOST_OPEN = 6
"""Factors up to which products of them are also looked at before they are summed."""
MOST_KEPT = 4
"""Forms of the product of a subset that are kept."""
MOST_TERMS = 4
"""Terms of a factor up to which it is multiplied out."""
MOST_COPIES = 2
"""Other names of one axis that orders may use."""
STORED = 4.0
"""What an element that a reduction leaves for another to read costs, in elements that reductions visit."""
OF_SEVERAL = 2.0
"""How many times as much as an element of a product of two factors one of several costs to visit: no library multiplies those. What is
multiplied along fewer axes before is one factor."""
BEFORE = 6.0
"""What an element of a product of several factors costs that is multiplied along fewer axes before: it is made, stored and read."""
DEEPER = 2.0
"""How many times as many roundings as the order that is written another one may have, where orders are bounded."""
WORTH = 0.9
"""An order is another one where it costs at most this share of the order as it is written."""


def is_reassociable(program: Program) -> bool:
    """Whether some sum of products has another one in it, or is added to another one, so that there are orders to choose from; or is over
    positions alone; or, where all orders are allowed, is of squares of terms or of sums."""
    dtypes = program_dtypes(program)
    is_free = program.reassociate == "free"

    def has_orders(node: Expr) -> bool:
        match node:
            case Reduce("sum", axis, body):
                return (
                    sums_inside(body)
                    or (is_free and any(_square(f) is not None for f in block_of(node).factors))
                    or any(compared(part, axis) for part in walk(body))
                    or closed_sum(block := block_of(node), axis, dtypes) is not None
                    or windowed(block, axis) is not None
                )
            case Call("add" | "sub", (left, right)):
                return sums_inside(left) and sums_inside(right)
        return False

    return any(map(has_orders, walk(*(output.expr for output in program.outputs))))


def reassociated(
    program: Program, extents: Mapping[str, int], constants: Collection[str] = ()
) -> tuple[Output, ...]:
    """The outputs, each block of them in the order that costs least at these extents; none where all stay as they are written. What is
    made of tensors that are `constants` alone costs nothing."""
    if program.reassociate == "exact" and not _is_of_integers(program) or not is_reassociable(program):
        return ()
    is_free = program.reassociate == "free" or program.reassociate == "exact"
    same, copies = alike(program), Copies.of_program(program, is_free)
    dtypes = program_dtypes(program)
    ways = [Orders(extents, is_free, dtypes, constants, same)]
    # What sums share is known of whole outputs alone: blocks that are taken apart may share less.
    if copies.of:
        ways.append(Orders(extents, is_free, dtypes, constants, same, copies))
    if several := _read_twice(program.outputs):
        ways.append(Orders(extents, is_free, dtypes, constants, same, copies))
        ways[-1].share(*several)
    orders = [way.all(program.outputs) for way in ways]
    found = min(orders, key=lambda outputs: visited(outputs, extents, constants, same))
    costs = [visited(outputs, extents, constants, same) for outputs in (found, program.outputs)]
    if found == program.outputs or costs[0] > WORTH * costs[1]:
        return ()
    if not is_free and roundings(found, extents) > DEEPER * roundings(program.outputs, extents):
        return ()
    return found


def _read_twice(outputs: Sequence[Output]) -> list[Expr]:
    """The reductions that several expressions read."""
    readers: dict[Expr, int] = {}
    for node in walk(*(output.expr for output in outputs)):
        for part in dict.fromkeys(children(node)):
            readers[part] = readers.get(part, 0) + 1
    return [part for part, count in readers.items() if count > 1 and isinstance(part, Reduce)]


def cheapest(
    outputs: Sequence[Output],
    extents: Mapping[str, int],
    is_free: bool = False,
    dtypes: Mapping[str, str] | None = None,
    constants: Collection[str] = (),
    same: Extents | None = None,
    copies: Copies | None = None,
) -> tuple[Output, ...]:
    """The outputs, each block of them in the order that costs least; where it `is_free`, with sums of exact terms multiplied out.
    `dtypes` say which inputs are integers, and may be positions; what is made of `constants` alone costs nothing; a sum over a prefix
    costs what a scan does, of axes that have the `same` extents; `copies` are other names that axes may have. What an output before
    makes, but for the names of axes, costs nothing."""
    return Orders(extents, is_free, dtypes, constants, same, copies).all(outputs)


def visited(
    outputs: Sequence[Output],
    extents: Mapping[str, int],
    constants: Collection[str] = (),
    same: Extents | None = None,
) -> float:
    """What an order costs: the elements that its reductions visit, and those that they leave for others to read."""
    return Orders(extents, constants=constants, same=same).cost(*(output.expr for output in outputs))


def runners_up(
    program: Program, outputs: Sequence[Output], extents: Mapping[str, int], most: int
) -> list[tuple[Output, ...]]:
    """The orders of a program that cost least beside that of `outputs`: the best for each division of a block in two, and what is written."""
    same = alike(program)
    orders, own = Orders(extents, same=same), tuple(outputs)
    found = {_without_order(own): own, _without_order(program.outputs): program.outputs}
    for place, output in enumerate(own):
        for node in reductions(output.expr):
            block = block_of(node)
            if 2 < len(block.factors) <= MOST_FACTORS:
                for made in orders.contracted(block, apart=True):
                    other = replace(output, expr=replaced(output.expr, {node: made}))
                    each = (*own[:place], other, *own[place + 1 :])
                    found.setdefault(_without_order(each), each)
    del found[_without_order(own)]
    return sorted(found.values(), key=lambda each: visited(each, extents, same=same))[:most]


def _without_order(outputs: Sequence[Output]) -> tuple[Expr, ...]:
    """What is the same for outputs that differ in the order of the factors of single products."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("mul", args):
                return call("mul", *sorted(args, key=_nameless))
        return node

    return tuple(transform(output.expr, step) for output in outputs)


def is_made_of(expr: Expr, tensors: Collection[str]) -> bool:
    """Whether an expression reads some of these tensors, and nothing else that a call gives."""
    read = [node for node in walk(expr) if isinstance(node, Load | Scalar)]
    return bool(read) and all(isinstance(node, Load) and node.tensor in tensors for node in read)


def roundings(outputs: Sequence[Output], extents: Mapping[str, int]) -> float:
    """The most operations between an input and an output, each of which may round: times the unit of rounding, and the sum of the
    absolute values of all terms, they bound the error (Higham 2002, section 3.1). A sum takes one for each of its positions."""
    depth: dict[Expr, float] = {}
    for node in walk(*(output.expr for output in outputs)):
        own = extents[node.axis] if isinstance(node, Reduce) else isinstance(node, Call)
        depth[node] = float(own) + max((depth[child] for child in children(node)), default=0.0)
    return max(depth[output.expr] for output in outputs)


def _is_of_integers(program: Program) -> bool:
    """Whether all that a program reads and sums is integers, and no sum is divided but by a number: nothing is rounded then in any order."""
    if not all(
        tensor.dtype in LIMITS or tensor.name in program.integer_tensors for tensor in program.tensors
    ):
        return False
    roots = [output.expr for output in program.outputs]
    found = kinds(roots, program_dtypes(program) | dict.fromkeys(program.integer_tensors, "i64"))
    return not any(
        (isinstance(node, Reduce) and found[node.body] == "real")
        or (isinstance(node, Call) and node.fn == "div" and _is_quotient_of_sums(*node.args))
        for node in walk(*roots)
    )


def _is_quotient_of_sums(over: Expr, by: Expr) -> bool:
    return not isinstance(by, Const | Size) and sums_inside(over)


def with_copies(program: Program) -> Program:
    """The program with other names for axes that a block binds, or reads and binds, at several places; a square of a sum is two."""
    is_free = program.reassociate == "free"
    roots, most = program.domains, MOST_COPIES + 1
    bound: dict[Expr, dict[str, int]] = {}
    wanted: dict[str, int] = {}
    for node in walk(*(output.expr for output in program.outputs)):
        found: dict[str, int] = {}
        times = 2 if is_free and isinstance(node, Call) and node.fn == "sq" else 1
        is_sum = isinstance(node, Call) and node.fn in ("add", "sub")
        for child in children(node):
            for axis, count in bound[child].items():
                more = max(found.get(axis, 0), count) if is_sum else found.get(axis, 0) + times * count
                found[axis] = min(most, more)
        if isinstance(node, Reduce):
            root = roots.get(node.axis, node.axis)
            found[root] = min(most, found.get(root, 0) + 1)
            if node.op == "sum":
                free = {roots.get(axis, axis) for axis in free_axes(node)}
                for axis, count in found.items():
                    wanted[axis] = max(wanted.get(axis, 0), count + (axis in free) - 1)
        bound[node] = found
    if not any(wanted.values()) or not is_reassociable(program):
        return program
    names = Names(
        (
            *(tensor.name for tensor in program.tensors),
            *program.scalars,
            *(output.name for output in program.outputs),
            *sized_axes(program),
            *program.domains.values(),
        )
    )
    have = [*spare_axes(program).values()]
    copies = {
        names.numbered(axis): axis
        for axis, count in wanted.items()
        for _ in range(min(count, MOST_COPIES) - have.count(axis))
    }
    return replace(program, domains={**program.domains, **copies})


@dataclass(frozen=True)
class _Part:
    """A product of some factors of a block: what it costs, and the axes that it has. One that `is_open` has several factors, and is not
    summed."""

    cost: float
    value: Expr
    axes: frozenset[str]
    is_open: bool = False


class Orders:
    """The cheapest orders at some extents."""

    def __init__(
        self,
        extents: Mapping[str, int],
        is_free: bool = False,
        dtypes: Mapping[str, str] | None = None,
        constants: Collection[str] = (),
        same: Extents | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._extents = extents
        self._copies = copies or NO_COPIES
        self._same = same
        self._dtypes = dtypes or {}
        self._constants = constants
        self._are_constant: dict[Expr, bool] = {}
        self._is_free = is_free
        self._best: dict[Expr, Expr] = {}
        self._shared: set[object] = set()
        self._forms: dict[Expr, object] = {}
        self._cheapest: dict[tuple[Block, int, int], Expr | None] = {}

    def all(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """The outputs, each block of them in the order that costs least."""
        found: list[Output] = []
        for output in outputs:
            found.append(replace(output, expr=self.best(output.expr)))
            self.share(found[-1].expr)
        return tuple(found)

    def share(self, *exprs: Expr) -> None:
        """Makes the reductions of expressions free for what is ordered from now on."""
        self._shared |= {self._form(node) for node in reductions(*exprs)}
        self._cheapest.clear()

    def _form(self, expr: Expr) -> object:
        """What is the same for expressions that differ in the names of axes."""
        if expr not in self._forms:
            self._forms[expr], _ = form_of(expr, self._same or {})
        return self._forms[expr]

    def best(self, expr: Expr) -> Expr:
        """The expression, its blocks in the order that costs least."""
        if expr not in self._best:
            self._best[expr] = expr  # of one that is met again inside of its own terms
            self._best[expr] = self._ordered(expr)
        return self._best[expr]

    def cost(self, *exprs: Expr) -> float:
        """Elements that the reductions of expressions visit, each once, and that they leave for others to read."""
        nodes = [n for n in post_order(exprs, self._parts) if not self._costs_nothing(n)]
        inner = {node.body for node in nodes if isinstance(node, Reduce) and isinstance(node.body, Reduce)}
        found = sum(self.size(free_axes(expr)) for expr in exprs)
        folds = [node for node in nodes if isinstance(node, Reduce)]
        if len(folds) > 1:  # what is the same but for the names of axes is computed once
            folds = list({self._form(node): node for node in folds}.values())
        for node in folds:
            if not isinstance(node.body, Reduce):
                operands = _operands(node.body)
                found += (OF_SEVERAL if len(operands) > 2 else 1.0) * self.size(self.visited(node))
                found += BEFORE * sum(self.size(free_axes(each)) for each in operands if _is_product(each))
            found += STORED * self.size(free_axes(node)) * (node not in inner)
        return found

    def visited(self, fold: Reduce) -> frozenset[str]:
        """The axes whose positions a reduction visits: a scan is at one position of the axis of its prefixes at a time."""
        while isinstance(fold.body, Reduce):
            fold = fold.body
        scan = None if self._same is None else scanned(fold, self._same)
        return free_axes(fold.body) - ({scan.prefix.at} if scan is not None else frozenset())

    def _parts(self, expr: Expr) -> tuple[Expr, ...]:
        return () if self._costs_nothing(expr) else children(expr)

    def _costs_nothing(self, expr: Expr) -> bool:
        """Whether an expression is computed anyway, or once for all calls."""
        is_shared = bool(self._shared) and isinstance(expr, Reduce) and self._form(expr) in self._shared
        return is_shared or self._is_constant(expr)

    def _is_constant(self, expr: Expr) -> bool:
        """Whether an expression is made of constants alone: it is computed once, for all calls."""
        if not self._constants:
            return False
        if expr not in self._are_constant:
            self._are_constant[expr] = is_made_of(expr, self._constants)
        return self._are_constant[expr]

    def size(self, axes: frozenset[str]) -> float:
        """How many elements there are along axes."""
        return math.prod(float(self._extents[axis]) for axis in axes)

    def _ordered(self, expr: Expr) -> Expr:
        found = [rebuild(expr, tuple(map(self.best, children(expr))))]
        block = block_of(expr, self._copies)
        if block.axes and block.factors != (expr,):
            found += self._orders(block, MOST_TERMS)
        if isinstance(expr, Call) and expr.fn in ("add", "sub"):
            found += self._factored(terms_of(expr))
        return min(found, key=self.cost)  # of equal ones the first

    def _factored(self, terms: Sequence[tuple[bool, Expr]]) -> Iterator[Expr]:
        """Two terms that have a factor and all axes in common, as one: `sum(a b) + sum(a c)` is `sum(a (b + c))`."""
        if len(terms) > MOST_TERMS:
            return
        for (one, (is_added, left)), (other, (too, right)) in combinations(enumerate(terms), 2):
            first, second = block_of(left, self._copies), block_of(right, self._copies)
            alike = replace(second, factors=first.factors) == first
            shared = [factor for factor in first.factors if factor in second.factors]
            if (
                not alike
                or not first.axes
                or not shared
                or not len(first.factors) == len(second.factors) == 2
            ):
                continue
            rests = [next(f for f in each.factors if f is not shared[0]) for each in (first, second)]
            joined = call("add" if is_added == too else "sub", *rests)
            made = self._cheapest_of(replace(first, factors=(shared[0], joined)), 1)
            if made is None:
                continue
            rest = [(sign, self.best(part)) for n, (sign, part) in enumerate(terms) if n not in (one, other)]
            yield total_of([(is_added, made), *rest])

    def _cheapest_of(self, block: Block, terms: int, reads: int = MOST_WIDTH) -> Expr | None:
        """The order of a block that costs least, of equal ones the first; None where it has too many factors."""
        key = block, terms, reads
        if key not in self._cheapest:
            self._cheapest[key] = min(self._orders(block, terms, reads), key=self.cost, default=None)
        return self._cheapest[key]

    def _orders(self, block: Block, terms: int, reads: int = MOST_WIDTH) -> Iterator[Expr]:
        """Other orders of a block: a factor of up to `terms` terms is multiplied out, windows of up to `reads` positions are read at each."""
        same = self._same or {}
        block = closed(selected(block, self._dtypes, self._copies, same), self._extents, self._dtypes, same)
        factors = tuple(map(self.best, block.factors))
        if 0 < len(factors) <= MOST_FACTORS:
            yield from self.contracted(replace(block, factors=factors))
        for axis in reversed(block.axes):  # inner sums first, as proofs do
            if (few := windowed(block, axis)) is not None and few[0].width <= min(
                reads, self._extents[axis] // 2
            ):
                yield from self._read_at_each(*few, terms, reads // few[0].width)
        for place, factor in enumerate(block.factors):
            if self._is_free and (square := _square(factor)) is not None:
                yield from self._orders(self._opened(block, place, call("mul", square, square)), terms)
            others = (*block.factors[:place], *block.factors[place + 1 :])
            is_contracted = any(not free_axes(other).isdisjoint(block.axes) for other in others)
            added = _spread(factor) if is_contracted else terms_of(factor)
            parts = added if self._is_free else _exact_as_one(added)
            if 1 < len(parts) <= terms:
                made = self._multiplied_out(block, place, parts, terms - len(parts) + 1)
                if made is not None:
                    yield made

    def _read_at_each(self, few: Window, block: Block, terms: int, reads: int) -> Iterator[Expr]:
        """A sum over a few positions of an axis, as one term for each of them; nothing where a term has too many factors."""
        masks = (call("where", few.is_at(number), Const(1), Const(0)) for number in range(few.width))
        parts = [replace(block, factors=(mask, *block.factors)) for mask in masks]
        made = [self._cheapest_of(part, terms, reads) for part in parts]
        known = [(True, each) for each in made if each is not None]
        if len(known) == few.width:
            yield total_of(known)

    def _multiplied_out(
        self, block: Block, place: int, parts: Sequence[tuple[bool, Expr]], terms: int
    ) -> Expr | None:
        """None where a term has too many factors."""
        made_of: list[tuple[bool, Expr]] = []
        for is_added, part in parts:
            best = self._cheapest_of(self._opened(block, place, part), terms)
            if best is None:
                return None
            made_of.append((is_added, best))
        return total_of(made_of)

    def _opened(self, block: Block, place: int, factor: Expr) -> Block:
        """A block with the factors of another one in place of one of its own."""
        before, after = block.factors[:place], block.factors[place + 1 :]
        rest, inner = replace(block, factors=(*before, *after)), block_of(factor, self._copies)
        apart = self._copies.apart(inner, axes_of(rest)) if inner.factors else None
        inner = Block((factor,)) if apart is None else apart
        return replace(rest.times(inner), factors=(*before, *inner.factors, *after))

    def contracted(self, block: Block, *, apart: bool = False) -> Iterator[Expr]:
        """The cheapest order of all, by dynamic programming over the subsets of the factors: of each subset the product, summed
        over the axes that no other factor has, or not yet summed over them, where that is cheaper later. Where factors are the same but
        for the names of axes, also the product of the best of each two parts, which may be the same: `a' b` is computed once in
        `(b' a) (a' b)`; with `apart` in any case."""
        factors, summed = block.factors, frozenset(block.axes)
        axes_of = [free_axes(factor) for factor in factors]
        everything = (1 << len(factors)) - 1
        varying = sum(1 << n for n, factor in enumerate(factors) if not self._is_constant(factor))

        def axes(members: int) -> frozenset[str]:
            return frozenset[str]().union(*(a for n, a in enumerate(axes_of) if members >> n & 1))

        def unsummed(members: int, cost: float, value: Expr, had: frozenset[str]) -> _Part:
            return _Part(cost, value, had, is_open=members & (members - 1) != 0)

        def made(members: int, cost: float, value: Expr, had: frozenset[str], is_of_several: bool) -> _Part:
            """A product of some factors that has the axes `had`, summed over those that no other factor has."""
            left = axes(members) - (summed - axes(everything & ~members))
            if left == had:
                return unsummed(members, cost, value, had)
            value = sum_over(value, had - left, block)
            if not members & varying:
                return _Part(cost, value, left)
            stored = STORED * self.size(left)
            fold = value
            while isinstance(fold, Call):  # a mean of some axes
                fold = fold.args[0]
            walked = had & self.visited(fold) if isinstance(fold, Reduce) else had
            visited = self.size(walked) * (OF_SEVERAL if is_of_several else 1.0)
            return _Part(cost + visited + stored, value, left)

        def parts_of(
            members: int, cost: float, value: Expr, had: frozenset[str], is_of_several: bool = False
        ) -> list[_Part]:
            found = made(members, cost, value, had, is_of_several)
            may_stay = members != everything and found.axes != had and len(factors) <= MOST_OPEN
            return [found, unsummed(members, cost, value, had)] if may_stay else [found]

        best = {1 << n: parts_of(1 << n, 0.0, factor, axes_of[n]) for n, factor in enumerate(factors)}
        for count in range(2, len(factors) + 1):
            for chosen in combinations(range(len(factors)), count):
                members = sum(1 << number for number in chosen)
                cheapest: dict[tuple[frozenset[str], bool], _Part] = {}
                part = (members - 1) & members
                while part:
                    if part & members & -members:  # each division into two once
                        for one, other in product(best[part], best[members ^ part]):
                            joined, cost = times(one.value, other.value), one.cost + other.cost
                            had, several = one.axes | other.axes, False
                            for each in (one, other):
                                several |= each.is_open and each.axes == had
                                cost += BEFORE * self.size(each.axes) * (each.is_open and each.axes != had)
                            for each in parts_of(members, cost, joined, had, several):
                                key = each.axes, each.is_open
                                if key not in cheapest or each.cost < cheapest[key].cost:
                                    cheapest[key] = each
                    part = (part - 1) & members
                best[members] = sorted(cheapest.values(), key=lambda each: (len(each.axes), each.cost))[
                    :MOST_KEPT
                ]
        yield completed(best[everything][0].value, block)
        if apart or len({self._form(factor) for factor in factors}) < len(factors):
            for part in range(1, everything // 2 + 1):
                half, rest = best[part][0], best[everything ^ part][0]
                first, second = sorted(map(_twin, (half.value, rest.value)), key=str)
                whole = made(everything, 0.0, times(first, second), half.axes | rest.axes, False)
                yield completed(whole.value, block)


def _twin(expr: Expr) -> Expr:
    """A sum of products with the factors of each in an order that knows no names of axes, so that two that are equal but for these have
    the same form. What factors are made of stays."""
    match expr:
        case Reduce("sum", axis, body):
            return Reduce("sum", axis, _twin(body))
        case Call("div", (value, Size() as count)):
            return call("div", _twin(value), count)
        case Call("mul", args):
            return call("mul", *sorted(map(_twin, args), key=_nameless))
    return expr


@lru_cache(4096)
def _nameless(expr: Expr) -> str:
    return str(without_names(expr)[0])


def _operands(expr: Expr, axes: frozenset[str] | None = None) -> list[Expr]:
    """The factors of a product, under its masks; those that are products along fewer axes are computed before, and one factor."""
    match expr:
        case Call("where", (_, value, zero)) if is_number(zero, 0):
            return _operands(value, axes)
        case Call("mul", (left, right)) if axes in (None, own := free_axes(expr)):
            return _operands(left, own) + _operands(right, own)
    return [expr]


def _is_product(expr: Expr) -> bool:
    return isinstance(expr, Call) and expr.fn == "mul"


def terms_of(expr: Expr) -> list[tuple[bool, Expr]]:
    """What an expression adds and subtracts."""
    match expr:
        case Call("add", (left, right)):
            return terms_of(left) + terms_of(right)
        case Call("sub", (left, right)):
            return terms_of(left) + [(not is_added, part) for is_added, part in terms_of(right)]
        case Call("neg", (inner,)):
            return [(not is_added, part) for is_added, part in terms_of(inner)]
    return [(True, expr)]


def _spread(factor: Expr) -> list[tuple[bool, Expr]]:
    """What a factor adds and subtracts, under its masks and over its divisors."""
    match factor:
        case Call("where", (condition, inner, zero)) if is_order(condition) and is_number(zero, 0):
            return [(is_added, call("where", condition, part, zero)) for is_added, part in _spread(inner)]
        case Call("div", (inner, by)):
            return [(is_added, call("div", part, by)) for is_added, part in _spread(inner)]
    return terms_of(factor)


def _square(factor: Expr) -> Expr | None:
    """What a factor is the square of, where that is a sum."""
    match factor:
        case Call("sq", (inner,)) if len(terms_of(inner)) > 1 or _has_sum(inner):
            return inner
    return None


def _exact_as_one(terms: Sequence[tuple[bool, Expr]]) -> list[tuple[bool, Expr]]:
    """The terms, those that sum nothing as one of them, where the first of those stands."""
    exact = [(is_added, part) for is_added, part in terms if not _has_sum(part)]
    if len(exact) < 2:
        return list(terms)
    first = exact[0][0]
    whole = first, total_of([(is_added == first, part) for is_added, part in exact])
    found = [whole if term == exact[0] else term for term in terms]
    return [term for term in found if term is whole or term not in exact]


def _has_sum(expr: Expr) -> bool:
    """Whether a term is rounded by a sum of its own."""
    return bool(block_of(expr).axes)
