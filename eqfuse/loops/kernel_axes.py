"""On which axes the values of a kernel depend: the matrix products of its loop nest, and axes that can be packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from eqfuse.loops.contraction import Contraction, contraction, factors, unmasked
from eqfuse.loops.nodes import Kernel, Let, Loop, Stmt
from eqfuse.loops.walk import expressions, loops_in, rewritten, statements
from eqfuse.terms.folds import PAIR, contributions
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scan,
    children,
    free_axes,
    substitute_axes,
    walk,
)

KEPT = 256
"""Kernels of which what their text tells is remembered: the candidates of one program, and more."""


class KernelAxes:
    """On which axes the values of one kernel really depend: the dims of named values leave the parallel
    axes out, and the values that they are made from do not. With `vectors`, a vector times a matrix is a
    matrix product too. What `packed` axes are divided by holds whole blocks of them: quotients do not depend
    on them."""

    def __init__(
        self, kernel: Kernel, *, vectors: bool = False, packed: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._vectors = vectors
        self._packed = packed
        self._loops = tuple(loop.axis for loop in loops_in(kernel.body))
        self._places = {a: place for place, a in enumerate(dict.fromkeys((*kernel.parallel, *self._loops)))}
        self._defined = dict(_definitions(kernel.body, ()))
        self._named: dict[str, frozenset[str]] = {}
        self._memo: dict[Expr, frozenset[str]] = {}
        self._products: dict[Reduce, Contraction | None] = {}
        before = None
        while before != self._named:  # carried values depend on themselves
            before = dict(self._named)
            self._memo.clear()
            for stmt in statements(kernel.body):
                if isinstance(stmt, Let):
                    self._named[stmt.name] = self.of(stmt.expr)
                elif isinstance(stmt, Loop):
                    for value in stmt.carried:
                        later = self._named.get(value.next, frozenset())
                        self._named[value.name] = self.of(value.init) | (later - {stmt.axis})

    def of(self, expr: Expr) -> frozenset[str]:
        """The axes that the value of `expr` depends on."""
        if expr not in self._memo:
            self._memo[expr] = self._of(expr)
        return self._memo[expr]

    def _of(self, expr: Expr) -> frozenset[str]:
        match expr:
            case Axis(name):
                return frozenset({name})
            case Call("floordiv", (Axis(name), Const(int(by)))) if name in self._packed:
                return frozenset() if by % self._packed[name] == 0 else frozenset({name})
            case Local(name, dims):
                return self._named.get(name, frozenset()) | frozenset(dims)
            case Reduce(_, axis, body):
                return self.of(body) - {axis}
            case Scan(_, _, axis, body, _):
                return self.of(body) | {axis}
            case _:
                return frozenset().union(*map(self.of, children(expr)))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes in the order of the kernel's blocks: parallel ones, those of loops, then others."""
        last = len(self._places)
        return tuple(sorted(axes, key=lambda axis: (self._places.get(axis, last), axis)))

    def contraction(self, reduce: Reduce) -> Contraction | None:
        """How a reduction is a matrix product, or None."""
        if reduce not in self._products:
            self._products[reduce] = self._contraction(reduce)
        return self._products[reduce]

    def _contraction(self, reduce: Reduce) -> Contraction | None:
        if reduce.op != "sum":
            return None
        product = factors(reduce.body, lambda local: self._look(local, reduce.axis))
        found = contraction(product, reduce.axis, self.of, self.ordered)
        return found if found is not None and (found.rows or self._vectors) else None

    def _look(self, local: Local, axis: str) -> Expr | None:
        """The definition of a named value that means the same wherever the value is read: what it folds is an axis
        whose loop is around both."""
        definition, around = self._defined.get(local.name, (None, ()))
        if definition is None or axis not in self.of(local):
            return None
        folded = {node.axis for node in walk(definition) if isinstance(node, Reduce)}
        return None if folded & (set(self._loops) - set(around)) else definition

    def computed(self, expr: Expr) -> Iterator[Expr]:
        """Every distinct subexpression that a kernel computes; the products inside a matrix product are not."""
        seen: set[Expr] = set()
        stack = [expr]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if not (isinstance(node, Call) and node.fn == PAIR):  # packing is no operation
                yield node
            if isinstance(node, Reduce) and self.contraction(node) is not None:
                for factor in factors(node.body).parts:
                    value, mask = unmasked(factor, self.of)
                    stack.extend((value,) if mask is None else (value, mask))
            else:
                stack.extend(children(node))

    def folded(self, reduce: Reduce) -> frozenset[str]:
        """The axes over whose positions a reduction is given values."""
        return frozenset[str]().union(*map(self.of, contributions(reduce)))


def _definitions(
    body: tuple[Stmt, ...], around: tuple[str, ...]
) -> Iterator[tuple[str, tuple[Expr, tuple[str, ...]]]]:
    """What every named value is, and the axes of the loops around that."""
    for stmt in body:
        if isinstance(stmt, Let):
            yield stmt.name, (stmt.expr, around)
        elif isinstance(stmt, Loop):
            yield from _definitions(stmt.body, (*around, stmt.axis))


@lru_cache(KEPT)
def kernel_axes(kernel: Kernel, *, vectors: bool = False) -> KernelAxes:
    """The axes of a kernel's values, found once per kernel."""
    return KernelAxes(kernel, vectors=vectors, packed={} if vectors else packed_axes(kernel))


@lru_cache(KEPT)
def packed_axes(kernel: Kernel) -> Mapping[str, int]:
    """Parallel axes of which several positions read the same elements (`K[h // 5]`), and how many of them a
    block may take together as the rows of matrix products; none where there are products without that."""
    ranges = [free_axes(loop.start) | free_axes(loop.stop) for loop in loops_in(kernel.body)]
    alone = frozenset(kernel.parallel).difference(*ranges)
    packed = {a: n for a, n in quotients(kernel).items() if a in alone and n > 1}
    if not packed or _contractions(kernel, KernelAxes(kernel)):
        return {}
    return packed if _contractions(kernel, KernelAxes(kernel, packed=packed)) else {}


def narrowed(kernel: Kernel, extents: Mapping[str, int]) -> Kernel:
    """The kernel without its parallel axes of one position where other axes can be packed then: one row would
    fill a matrix product no better than none. Its blocks are right for the kernel: those axes have one position."""
    single = frozenset(a for a in kernel.parallel if extents[a] == 1)
    if not single or packed_axes(kernel):
        return kernel
    rest = _without(kernel, single)
    return rest if packed_axes(rest) else kernel


@lru_cache(KEPT)
def _without(kernel: Kernel, axes: frozenset[str]) -> Kernel:
    """The kernel at position 0 of some parallel axes."""
    first = dict.fromkeys(axes, Const(0))
    parallel = tuple(a for a in kernel.parallel if a not in axes)
    body = rewritten(kernel.body, lambda expr: substitute_axes(expr, first))
    return replace(kernel, parallel=parallel, body=body)


def valid_positions(together: int, size: int) -> int | None:
    """How many positions of a block of `size` are taken of those that read the same elements: as many as divide
    them evenly; None where that is the whole block."""
    most = max(n for n in range(1, min(together, size) + 1) if together % n == 0)
    return most if most < size else None


def quotients(kernel: Kernel) -> dict[str, int]:
    """Axes that loads divide, always by the same constant (`K[h // 4]`), and that constant: what is loaded
    is the same for all positions of a block of that many."""
    loads = (n for expr in expressions(kernel.body) for n in walk(expr) if isinstance(n, Load))
    return divisors(part for load in loads for part in load.index)


def divisors(index: Iterable[Expr]) -> dict[str, int]:
    """Axes that parts of an index divide, always by the same constant, and that constant."""
    found: dict[str, int | None] = {}
    for part in walk(*index):
        match part:
            case Call("floordiv", (Axis(name), Const(int(by)))) if found.get(name, by) == by:
                found[name] = by
            case Call("floordiv" | "mod", _):
                found |= dict.fromkeys(free_axes(part))
    return {name: by for name, by in found.items() if by is not None}


@lru_cache(KEPT)
def contractions(kernel: Kernel, *, vectors: bool = False) -> tuple[Contraction, ...]:
    """The matrix products of a kernel."""
    return _contractions(kernel, kernel_axes(kernel, vectors=vectors))


def _contractions(kernel: Kernel, axes: KernelAxes) -> tuple[Contraction, ...]:
    found = [
        axes.contraction(node)
        for expr in expressions(kernel.body)
        for node in walk(expr)
        if isinstance(node, Reduce)
    ]
    return tuple(c for c in found if c is not None)


@lru_cache(KEPT)
def widest_values(kernel: Kernel, *, vectors: bool = False) -> tuple[frozenset[str], ...]:
    """Axes of every value that a body computes elementwise; a matrix product counts as its result."""
    axes = kernel_axes(kernel, vectors=vectors)
    found: list[frozenset[str]] = []
    for expr in expressions(kernel.body):
        for node in axes.computed(expr):
            if isinstance(node, Call):
                found.append(axes.of(node))
            elif isinstance(node, Reduce):
                found.append(axes.of(node) if axes.contraction(node) else axes.folded(node) | {node.axis})
    return tuple(found)
