"""On which axes the values of a kernel depend, and which of its reductions are matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from eqfuse.loops.nodes import Kernel, Let, Loop
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Axis, Call, Expr, Local, Reduce, children, walk

KEPT = 256
"""Kernels of which what their text tells is remembered: the candidates of one program, and more."""


@dataclass(frozen=True)
class Contraction:
    """A sum of products over `axis`: the axes that only the left or only the right factor has."""

    axis: str
    left: frozenset[str]
    right: frozenset[str]
    shared: frozenset[str]


def product_factors(expr: Expr) -> list[Expr]:
    """The factors of a product; divisors stay with their quotient."""
    match expr:
        case Call("mul", (a, b)):
            return product_factors(a) + product_factors(b)
        case _:
            return [expr]


class KernelAxes:
    """On which axes the values of one kernel really depend: the dims of named values leave the parallel
    axes out, and the values that they are made from do not. With `vectors`, a vector times a matrix is a
    matrix product too."""

    def __init__(self, kernel: Kernel, *, vectors: bool = False) -> None:
        self._vectors = vectors
        self._named: dict[str, frozenset[str]] = {}
        self._memo: dict[Expr, frozenset[str]] = {}
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
            case Local(name, dims):
                return self._named.get(name, frozenset()) | frozenset(dims)
            case Reduce(_, axis, body):
                return self.of(body) - {axis}
            case _:
                return frozenset().union(*map(self.of, children(expr)))

    def contraction(self, reduce: Reduce) -> Contraction | None:
        """How a reduction is a matrix product, or None."""
        if reduce.op != "sum":
            return None
        factors = {axes for f in product_factors(reduce.body) if reduce.axis in (axes := self.of(f))}
        sides = [axes for axes in factors if not any(axes < other for other in factors)]
        if self._vectors and len(sides) == 1:
            vector = frozenset[str]().union(*(axes for axes in factors if axes not in sides))
            sides += [vector] if vector and vector not in sides else []
        if len(sides) != 2:
            return None
        left, right = sorted(sides, key=sorted)
        return Contraction(reduce.axis, left - right, right - left, (left & right) - {reduce.axis})

    def computed(self, expr: Expr) -> Iterator[Expr]:
        """Every distinct subexpression that a kernel computes; the products inside a matrix product are not."""
        seen: set[Expr] = set()
        stack = [expr]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            yield node
            if isinstance(node, Reduce) and self.contraction(node) is not None:
                stack.extend(product_factors(node.body))
            else:
                stack.extend(children(node))


@lru_cache(KEPT)
def kernel_axes(kernel: Kernel, *, vectors: bool = False) -> KernelAxes:
    """The axes of a kernel's values, found once per kernel."""
    return KernelAxes(kernel, vectors=vectors)


@lru_cache(KEPT)
def contractions(kernel: Kernel, *, vectors: bool = False) -> tuple[Contraction, ...]:
    """The matrix products of a kernel."""
    axes = kernel_axes(kernel, vectors=vectors)
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
                found.append(axes.of(node) if axes.contraction(node) else axes.of(node.body))
    return tuple(found)
