"""Block sizes, warps and stages of one kernel, from its loop nest, extents and device.

One idea for every kernel: the widest value that is computed (its product of blocks) should fill what
one program instance keeps on chip, the axis that memory is contiguous along first; matrix products
get a row and a column axis of at least 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from eqfuse.extract.devices import Device
from eqfuse.extract.plans import AxisBlock, KernelConfig, Kind
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel, Let, Loop
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Axis, Call, Expr, Load, Local, Reduce, children, free_axes, walk

GPU_TILE = 4096
"""Elements of the widest elementwise tile of a GPU program instance."""

CPU_TILE = 1 << 18
"""Elements of the widest tile on the CPU: a megabyte of float32, which stays in a core's cache while the
overhead of a tile operation is a small part of its time."""

GPU_LIVE = 52 << 10
"""Elements that a GPU program instance can hold in registers."""

GPU_ROWS, GPU_COLUMNS, GPU_DEPTH = 128, 64, 64
"""Blocks of a matrix product on a GPU: rows, columns, and the contracted axis when it is a loop."""

GPU_WHOLE = 256
"""Positions of a contracted axis that a GPU block keeps whole; longer ones are walked in steps."""

CPU_WHOLE = 4096
CPU_MATRIX = 256
"""Block of each axis of a matrix product on the CPU: enough for the library's full rate."""

TENSOR_CORE_MIN = 16


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
    axes out, and the values that they are made from do not."""

    def __init__(self, kernel: Kernel) -> None:
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


def contractions(kernel: Kernel) -> list[Contraction]:
    """The matrix products of a kernel."""
    axes = KernelAxes(kernel)
    found = [
        axes.contraction(node)
        for expr in expressions(kernel.body)
        for node in walk(expr)
        if isinstance(node, Reduce)
    ]
    return [c for c in found if c is not None]


@dataclass(frozen=True)
class _Roles:
    """What each axis of a kernel is for, before sizes are chosen."""

    parallel: tuple[str, ...]
    loops: tuple[str, ...]
    units: tuple[str, ...]
    single: frozenset[
        str
    ]  # parallel axes of one position per instance: a loop's range or a division needs it
    inner: tuple[str, ...]  # axes that are whole, or walked inside a body
    steps: frozenset[str]  # those of them that only matrix products contract: they may be walked in steps

    @classmethod
    def of(cls, kernel: Kernel) -> _Roles:
        loops = {s.axis: s.unit for s in statements(kernel.body) if isinstance(s, Loop)}
        dims: dict[str, None] = {}
        for stmt in statements(kernel.body):
            if isinstance(stmt, Loop):
                dims |= dict.fromkeys(d for c in stmt.carried for d in c.dims)
            else:
                dims |= dict.fromkeys(stmt.dims)
        bound: dict[str, bool] = {}
        axes = KernelAxes(kernel)
        for expr in expressions(kernel.body):
            for node in walk(expr):
                if isinstance(node, Reduce):
                    bound[node.axis] = bound.get(node.axis, True) and axes.contraction(node) is not None
        ranges = [
            free_axes(s.start) | free_axes(s.stop) for s in statements(kernel.body) if isinstance(s, Loop)
        ]
        taken = {*kernel.parallel, *loops}
        inner = tuple(a for a in {**dims, **bound} if a not in taken)
        return cls(
            kernel.parallel,
            tuple(a for a, unit in loops.items() if not unit),
            tuple(a for a, unit in loops.items() if unit),
            divided_axes(kernel).union(*ranges) & frozenset(kernel.parallel),
            inner,
            frozenset(a for a in inner if a not in dims and bound.get(a, False)),
        )


def widest_values(kernel: Kernel) -> list[frozenset[str]]:
    """Axes of every value that a body computes elementwise; a matrix product counts as its result."""
    axes = KernelAxes(kernel)
    found: list[frozenset[str]] = []
    for expr in expressions(kernel.body):
        for node in axes.computed(expr):
            if isinstance(node, Call):
                found.append(axes.of(node))
            elif isinstance(node, Reduce):
                found.append(axes.of(node) if axes.contraction(node) else axes.of(node.body))
    return found


def contiguous_axes(kernel: Kernel) -> list[str]:
    """Axes that some load has last, most frequent first: memory is contiguous along them."""
    count: dict[str, int] = {}
    for expr in expressions(kernel.body):
        for node in walk(expr):
            if isinstance(node, Load) and node.index and isinstance(node.index[-1], Axis):
                name = node.index[-1].name
                count[name] = count.get(name, 0) + 1
    return sorted(count, key=lambda a: -count[a])


def divided_axes(kernel: Kernel) -> frozenset[str]:
    """Axes that some load divides (`K[h // g]`): a block of them would gather instead of slice."""
    found: set[str] = set()
    for expr in expressions(kernel.body):
        for node in walk(expr):
            if isinstance(node, Load):
                for part in walk(*node.index):
                    if isinstance(part, Call) and part.fn in ("floordiv", "mod"):
                        found |= free_axes(part)
    return frozenset(found)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def configure(kernel: Kernel, shape: Shape, device: Device) -> KernelConfig:
    """Blocks for one kernel. Every axis that the kernel walks gets one."""
    roles = _Roles.of(kernel)
    return (_for_cpu if device.kind == "cpu" else _for_gpu)(kernel, roles, shape, device)


def shared_bytes(kernel: Kernel, blocks: Mapping[str, int], stages: int, shape: Shape) -> int:
    """Bytes of shared memory that the operands of the largest matrix product take, pipeline stages counted."""
    axes = KernelAxes(kernel)
    most = 0
    for expr in expressions(kernel.body):
        for node in walk(expr):
            found = axes.contraction(node) if isinstance(node, Reduce) else None
            if found is None:
                continue
            common = math.prod(blocks.get(a, 1) for a in found.shared) * blocks.get(found.axis, 1)
            sides = sum(math.prod(blocks.get(a, 1) for a in side) for side in (found.left, found.right))
            most = max(most, common * sides * (2 if shape.is_half(node) else 4))
    looped = any(isinstance(s, Loop) for s in kernel.body)
    return most * (max(1, stages - 1) if looped else 1)


def live_elements(kernel: Kernel, blocks: Mapping[str, int]) -> int:
    """Elements that one program instance holds at once, about: what its loops carry, and twice the widest
    value that they compute."""
    carried = sum(
        math.prod(blocks.get(a, 1) for a in value.dims) * _rows(kernel, blocks)
        for stmt in kernel.body
        if isinstance(stmt, Loop)
        for value in stmt.carried
    )
    widest = max((math.prod(blocks.get(a, 1) for a in v) for v in widest_values(kernel)), default=1)
    return carried + 2 * widest


def _rows(kernel: Kernel, blocks: Mapping[str, int]) -> int:
    return math.prod(blocks.get(a, 1) for a in kernel.parallel)


def _fill(
    blocks: dict[str, int],
    order: Iterable[str],
    values: list[frozenset[str]],
    limits: Mapping[str, int],
    budget: int,
) -> None:
    """Grows blocks in `order` by doubling while every value that has the axis stays within the budget."""

    def widest(axis: str) -> int:
        sizes = [math.prod(blocks.get(a, 1) for a in v) for v in values if axis in v]
        return max(sizes, default=0)

    for axis in order:
        while blocks[axis] < limits[axis] and widest(axis) * 2 <= budget:
            blocks[axis] = min(blocks[axis] * 2, limits[axis])


def _for_cpu(kernel: Kernel, roles: _Roles, shape: Shape, device: Device) -> KernelConfig:
    extents = shape.extents
    values = widest_values(kernel) or [frozenset(roles.parallel)]
    whole = {a for a in roles.inner if a not in roles.steps or extents[a] <= CPU_WHOLE}
    blocks = {a: extents[a] for a in whole} | {a: 1 for a in roles.units}
    for axis in (*roles.parallel, *roles.loops, *(a for a in roles.inner if a not in whole)):
        blocks[axis] = 1
    limits = {a: 1 if a in roles.single else max(1, extents[a]) for a in blocks}
    near = [a for a in contiguous_axes(kernel) if a in blocks and a not in whole]
    walked = [a for a in blocks if a not in whole and a not in roles.units and limits[a] > 1]
    starts: list[str] = []
    single: set[str] = set()
    for c in contractions(kernel):  # a matrix product has one row axis and one column axis; more are a batch
        for side in (c.left, c.right):
            if not any(a in whole or a in starts for a in side):
                options = [a for a in walked if a in side]
                starts += sorted(options, key=lambda a: -limits[a])[:1]
            single |= {a for a in side if a not in whole and a not in starts}
        if c.axis in walked and c.axis not in starts:
            starts.append(c.axis)
    for axis in starts:
        blocks[axis] = min(limits[axis], CPU_MATRIX)
    for axis in walked:
        if axis in near and axis not in starts:
            blocks[axis] = min(limits[axis], 2048)
    order = [a for a in (*reversed(roles.parallel), *roles.loops) if a not in single]
    _fill(blocks, order, values, limits, CPU_TILE)
    _spread(blocks, roles, extents, 2 * device.units)
    kinds = _kinds(roles, whole)
    return KernelConfig(tuple(AxisBlock(a, kinds[a], None if a in whole else blocks[a]) for a in blocks))


def _spread(blocks: dict[str, int], roles: _Roles, extents: Mapping[str, int], instances: int) -> None:
    """Halves parallel blocks until there are enough program instances for every unit."""
    while math.prod(math.ceil(extents[a] / blocks[a]) for a in roles.parallel) < instances:
        splittable = [a for a in roles.parallel if blocks[a] > 1]
        if not splittable:
            return
        axis = max(splittable, key=lambda a: blocks[a])
        blocks[axis] = (blocks[axis] + 1) // 2


def _for_gpu(kernel: Kernel, roles: _Roles, shape: Shape, device: Device) -> KernelConfig:
    extents = shape.extents
    values = widest_values(kernel) or [frozenset(roles.parallel)]
    whole = {a for a in roles.inner if a not in roles.steps or extents[a] <= GPU_WHOLE}
    limits = {
        a: power_of_two(extents[a]) for a in (*roles.parallel, *roles.loops, *roles.inner, *roles.units)
    }
    limits |= dict.fromkeys(roles.single, 1)
    blocks = {a: limits[a] if a in whole else 1 for a in limits}
    matrix = contractions(kernel)
    tiled: list[str] = []
    for c in matrix:
        for side, size in ((c.left, GPU_ROWS), (c.right, GPU_COLUMNS)):
            if any(a in whole or a in tiled for a in side):
                continue
            options = [a for a in (*roles.parallel, *roles.loops) if a in side and a not in roles.single]
            wide = [a for a in options if extents[a] > 1] or options
            if wide:
                axis = wide[-1]
                tiled.append(axis)
                blocks[axis] = max(TENSOR_CORE_MIN, min(limits[axis], size))
        if c.axis not in whole and c.axis not in tiled:
            tiled.append(c.axis)
            blocks[c.axis] = max(TENSOR_CORE_MIN, min(limits[c.axis], GPU_DEPTH))
    rest = [a for a in (*roles.loops, *roles.parallel) if a not in tiled]
    near = [a for a in contiguous_axes(kernel) if a in rest]
    order = [*near, *[a for a in reversed(rest) if a not in near and a in roles.loops]]
    order += [a for a in reversed(roles.parallel) if a not in tiled and a not in order]
    if not matrix:
        caps = {a: min(limits[a], GPU_TILE if a in roles.loops else 1024) for a in limits}
        _fill(blocks, order, values, caps, GPU_TILE)
    else:
        for axis in (a for a in rest if a in roles.loops):
            blocks[axis] = min(limits[axis], GPU_COLUMNS)
    stages = 3 if matrix and roles.loops else 2

    def fits() -> bool:
        return (
            max(math.prod(blocks.get(a, 1) for a in v) for v in values) <= 4 * GPU_TILE
            and live_elements(kernel, blocks) <= GPU_LIVE
            and shared_bytes(kernel, blocks, stages, shape) <= device.shared
        )

    while matrix and not fits():
        shrinkable = [a for a in tiled if blocks[a] > TENSOR_CORE_MIN]
        if not shrinkable:
            break
        blocks[max(shrinkable, key=lambda a: blocks[a])] //= 2
    kinds = _kinds(roles, whole)
    biggest = max(math.prod(blocks.get(a, 1) for a in v) for v in values)
    warps = 8 if biggest > 2 * GPU_TILE else 4
    return KernelConfig(
        tuple(AxisBlock(a, kinds[a], None if a in whole else blocks[a]) for a in blocks), warps, stages
    )


def _kinds(roles: _Roles, whole: set[str]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    kinds.update(dict.fromkeys(roles.parallel, "grid"))
    kinds.update(dict.fromkeys(roles.loops, "loop"))
    kinds.update(dict.fromkeys(roles.units, "unit"))
    kinds.update({a: "whole" if a in whole else "loop" for a in roles.inner})
    return kinds


def tiny(kernel: Kernel, block: int = 2) -> KernelConfig:
    """Blocks smaller than any axis of a verification run, so that there are several and a ragged last one."""
    roles = _Roles.of(kernel)
    kinds = _kinds(roles, {a for a in roles.inner if a not in roles.steps})
    sizes: dict[Kind, int | None] = {"grid": block, "loop": block, "unit": 1, "whole": None}
    return KernelConfig(
        tuple(AxisBlock(a, kind, 1 if a in roles.single else sizes[kind]) for a, kind in kinds.items())
    )
