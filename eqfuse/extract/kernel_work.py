"""What a kernel computes, loads and stores: read off its loop nest once, priced at many sizes and blocks (cost.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from eqfuse.extract.resources import sharded_axes
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.contraction import Contraction
from eqfuse.loops.kernel_axes import KEPT, divisors, kernel_axes, widest_values
from eqfuse.loops.nodes import Kernel, Loop, Stmt, Store
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.functions import SPECIAL
from eqfuse.terms.nodes import Axis, Call, Expr, Fold, Load, Reduce, Scan, free_axes, walk

Axes = frozenset[str]

SCAN_PASSES = 2
"""How often a scan of a tile combines each position's states: with those of its thread, and with what the others have before."""


@dataclass(frozen=True)
class MatrixProduct:
    """A sum of products as a matrix product: `axes` are those of its multiplications."""

    node: Reduce
    contraction: Contraction
    axes: Axes


@dataclass(frozen=True)
class Access:
    """A load: the axes that it moves along, the loops around it (the outermost first), axes of which `alike` positions
    read the same element, and whether an access before it in the kernel has read the same."""

    load: Load
    used: Axes
    around: tuple[str, ...]
    alike: Mapping[str, int]
    again: bool


@dataclass(frozen=True)
class Written:
    """A store: the tensor, its positions, and the axes that these are made of."""

    tensor: str
    index: tuple[Expr, ...]
    axes: Axes


@dataclass(frozen=True)
class Step:
    """What per-step overhead is of: a loop over `axis` with those inside; without an axis, `operations` one by one, and
    products that walk `walked` axes themselves."""

    axis: str | None
    unit: bool
    inside: tuple[Step, ...]
    operations: int
    walked: tuple[str, ...]


@dataclass(frozen=True)
class KernelWork:
    """`elementwise` and `special` count operations by the axes over whose positions they run; `sharded` are looped axes
    with the parallel axis that counts their shards."""

    products: tuple[MatrixProduct, ...]
    elementwise: tuple[tuple[Axes, int], ...]
    special: tuple[tuple[Axes, int], ...]
    loads: tuple[Access, ...]
    stores: tuple[Written, ...]
    steps: tuple[Step, ...]
    loops: tuple[str, ...]
    has_loop: bool
    values: tuple[Axes, ...]
    stores_rows: bool
    sharded: Mapping[str, str]


@lru_cache(KEPT)
def work_of(kernel: Kernel, *, on_cpu: bool) -> KernelWork:
    """The work of a kernel. On a CPU a vector times a matrix is a matrix product, and lists are selected at once."""
    sharded = sharded_axes(kernel)

    def with_shards(axes: Axes) -> Axes:
        return axes | {by for axis, by in sharded.items() if axis in axes}

    products: list[MatrixProduct] = []
    elementwise, special = Counter[Axes](), Counter[Axes]()
    for node, contraction, axes in _operations(kernel, on_cpu):
        if contraction is not None and isinstance(node, Reduce):
            products.append(MatrixProduct(node, contraction, with_shards(axes) | {contraction.axis}))
        else:
            elementwise[with_shards(axes)] += 1
            if isinstance(node, Call) and node.fn in SPECIAL:
                special[with_shards(axes)] += 1
    stores = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Store)]
    looped = {loop.axis for loop in loops_in(kernel.body)}
    alone = {p.node: p.contraction.axis for p in products if p.contraction.axis not in looped}
    return KernelWork(
        tuple(products),
        tuple(elementwise.items()),
        tuple(special.items()),
        tuple(_accesses(kernel, with_shards)),
        tuple(Written(store.tensor, store.index, _axes_in(store.index)) for store in stores),
        tuple(_steps(kernel.body, alone)),
        tuple(loop.axis for loop in loops_in(kernel.body) if not loop.unit),
        bool(looped),
        widest_values(kernel, vectors=on_cpu),
        any(store.dims for store in stores),
        sharded,
    )


def _operations(kernel: Kernel, on_cpu: bool) -> Iterator[tuple[Expr, Contraction | None, Axes]]:
    """Every operation of the bodies, with the axes over whose positions it runs."""
    axes = kernel_axes(kernel, vectors=on_cpu)
    scans = set[tuple[Fold, Expr]]()
    for expr in expressions(kernel.body):
        for node in axes.computed(expr):
            if isinstance(node, Reduce):
                found = axes.contraction(node)
                runs = axes.folded(node) if on_cpu else axes.of(node.body)
                yield node, found, axes.of(node) if found else runs
            elif isinstance(node, Call):
                yield node, None, axes.of(node)
            elif isinstance(node, Scan) and (node.fold, node.body) not in scans:
                scans.add((node.fold, node.body))
                combine = [part for part in walk(*node.fold.combine) if isinstance(part, Call)]
                yield from ((part, None, axes.of(node)) for part in combine * SCAN_PASSES)


def _accesses(kernel: Kernel, with_shards: Callable[[Axes], Axes]) -> Iterator[Access]:
    before = set[Load]()
    for load, around in _loads(kernel.body, ()):
        alike = {axis: by for axis, by in divisors(load.index).items()}
        yield Access(load, with_shards(free_axes(load)), around, alike, load in before)
        before.add(load)


def _loads(body: tuple[Stmt, ...], around: tuple[str, ...]) -> Iterator[tuple[Load, tuple[str, ...]]]:
    """Every distinct load with the loops around it, the outermost first."""
    seen: set[Load] = set()
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from _loads(stmt.body, (*around, stmt.axis))
            continue
        for node in walk(stmt.expr):
            if isinstance(node, Load) and node not in seen:
                seen.add(node)
                yield node, around


def _steps(body: tuple[Stmt, ...], alone: Mapping[Reduce, str]) -> Iterator[Step]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield Step(stmt.axis, stmt.unit, tuple(_steps(stmt.body, alone)), 0, ())
        else:
            nodes = list(walk(stmt.expr))
            walked = dict.fromkeys(alone[n] for n in nodes if isinstance(n, Reduce) and n in alone)
            operations = sum(1 for n in nodes if isinstance(n, Call | Reduce))
            yield Step(None, False, (), operations, tuple(walked))


def _axes_in(index: tuple[Expr, ...]) -> Axes:
    return frozenset(node.name for part in index for node in walk(part) if isinstance(node, Axis))
