"""What one GPU program instance needs on chip: registers of a thread, and shared memory of a block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from eqfuse.extract.axes import KEPT, Contraction, kernel_axes, product_factors, widest_values
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel, Loop, Stmt
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Load, Local, Reduce, free_axes, walk

REGISTERS = 168
"""Values that a thread can hold besides addresses and what instructions take: up to here ptxas spilled
nothing in kernels compiled for sm_90 with 4 and 8 warps, blocks halved and doubled."""

FEW_REGISTERS = 128
"""Up to here 4 warps are enough, and more instances run side by side."""

WARPGROUP_ROWS = 64
"""Rows from which a matrix product reads its operands from shared memory (wgmma); with fewer, they pass
through registers."""

WIDEST, SECOND = 1.5, 0.5
"""How often the widest value that is computed counts, and the next one over other axes: a value is made
while another is used up. States are updated in place."""


@dataclass(frozen=True)
class Operand:
    """One side of a matrix product: `loaded` as it is or computed, `streamed` if a loop loads it anew."""

    axes: frozenset[str]
    loaded: bool
    streamed: bool


@dataclass(frozen=True)
class Product:
    """A matrix product; `node` is the reduction."""

    node: Reduce
    contraction: Contraction
    operands: tuple[Operand, ...]


@lru_cache(KEPT)
def products(kernel: Kernel) -> tuple[Product, ...]:
    """The matrix products of a kernel, with how their operands come about."""
    return tuple(dict.fromkeys(_products(kernel, kernel.body, frozenset())))


def _products(kernel: Kernel, body: tuple[Stmt, ...], around: frozenset[str]) -> Iterator[Product]:
    axes = kernel_axes(kernel)
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from _products(kernel, stmt.body, around | {stmt.axis})
            continue
        for node in walk(stmt.expr):
            found = axes.contraction(node) if isinstance(node, Reduce) else None
            if found is not None and isinstance(node, Reduce):
                yield Product(node, found, tuple(_operands(kernel, node, found, around)))


def _operands(kernel: Kernel, node: Reduce, found: Contraction, around: frozenset[str]) -> Iterator[Operand]:
    axes = kernel_axes(kernel)
    factors = [(axes.of(f), f) for f in product_factors(node.body)]
    for side in (found.left, found.right):
        parts = [f for own, f in factors if node.axis in own and own & side]
        loaded = len(parts) == 1 and isinstance(parts[0], Load)
        streamed = loaded and bool(free_axes(parts[0]) & around)
        yield Operand(side | found.shared | {found.axis}, loaded, streamed)


def shared_bytes(kernel: Kernel, blocks: Mapping[str, int], stages: int, shape: Shape) -> int:
    """Bytes of shared memory of the operands of all matrix products, those that loops load once for each
    stage, and so what computed operands are made from. A product that walks its own axis in steps streams both
    operands."""
    total = sum(
        stages * _size(free_axes(load), blocks) * shape.itemsize(load.tensor) for load in _streamed(kernel)
    )
    for product in products(kernel):
        axis = product.contraction.axis
        stepped = blocks.get(axis, 1) < shape.extents.get(axis, 1)
        left, right = _ordered(product, blocks)
        for operand in (left, right) if left.loaded else (right,):  # a computed left one is in registers
            copies = stages if operand.streamed or (operand.loaded and stepped) else 1
            total += copies * _size(operand.axes, blocks) * (2 if shape.is_half(product.node) else 4)
    return total


@lru_cache(KEPT)
def _streamed(kernel: Kernel) -> tuple[Load, ...]:
    """What loops around matrix products load anew at every step besides the operands themselves."""
    operands = {f for product in products(kernel) for f in product_factors(product.node.body)}
    found: dict[Load, None] = {}
    for loop in (s for s in statements(kernel.body) if isinstance(s, Loop) and operands):
        loads = (n for expr in expressions(loop.body) for n in walk(expr) if isinstance(n, Load))
        found |= dict.fromkeys(n for n in loads if n not in operands and loop.axis in free_axes(n))
    return tuple(found)


def _ordered(product: Product, blocks: Mapping[str, int]) -> list[Operand]:
    """The operands, rows first: the axis that comes first in the kernel's blocks is that of rows."""
    places = {axis: place for place, axis in enumerate(blocks)}
    own = product.contraction.shared | {product.contraction.axis}
    return sorted(product.operands, key=lambda o: min((places.get(a, -1) for a in o.axes - own), default=-1))


def registers(kernel: Kernel, blocks: Mapping[str, int], warps: int, lanes: int, shape: Shape) -> float:
    """32-bit values that a thread holds at once: what loops carry, the widest values that are computed,
    and operands of matrix products that pass through registers on their way to shared memory. Without
    tensor cores (float32) both operands are unrolled into them whole, with conversions of layout."""
    loops = {stmt.axis for stmt in kernel.body if isinstance(stmt, Loop)}
    states = [
        kernel_axes(kernel).of(Local(value.name, value.dims))
        for stmt in kernel.body
        if isinstance(stmt, Loop)
        for value in stmt.carried
    ]
    carried = sum(_size(axes, blocks) for axes in states)
    passing = 0.0
    for product in products(kernel):
        half = shape.is_half(product.node)
        stepped = blocks.get(product.contraction.axis, 1) < shape.extents.get(product.contraction.axis, 1)
        sides = _ordered(product, blocks)
        own = product.contraction.shared | {product.contraction.axis}
        rows = _size(sides[0].axes - own, blocks)
        if stepped and product.contraction.axis not in loops:  # its sums are carried from step to step
            carried += _size((sides[0].axes | sides[1].axes) - own, blocks)
        for side, operand in enumerate(sides):
            elements = _size(operand.axes, blocks)
            if not half:
                passing += 1.5 * elements
            elif not operand.loaded and side == 1:
                passing += elements / 2
            elif operand.loaded and (rows < WARPGROUP_ROWS or not (loops or stepped)):
                passing += elements / 4
    made = {axes for axes in widest_values(kernel) if axes not in states and (axes & loops or not loops)}
    widest, second = sorted((*(_size(axes, blocks) for axes in made), 1, 1))[:-3:-1]
    return (carried + WIDEST * widest + SECOND * second + passing) / (warps * lanes)


@lru_cache(KEPT)
def _read_again(kernel: Kernel) -> tuple[Load, ...]:
    """What a loop loads that a loop before it has loaded."""
    before: dict[Load, None] = {}
    found: dict[Load, None] = {}
    for loop in (stmt for stmt in kernel.body if isinstance(stmt, Loop)):
        loads = [n for expr in expressions(loop.body) for n in walk(expr) if isinstance(n, Load)]
        found |= dict.fromkeys(load for load in loads if load in before)
        before |= dict.fromkeys(loads)
    return tuple(found)


def bytes_read_again(kernel: Kernel, shape: Shape) -> float:
    """Bytes that one position of the parallel axes alone reads in a loop after another loop has read them."""
    return sum(
        shape.positions(free_axes(load) - frozenset(kernel.parallel)) * shape.itemsize(load.tensor)
        for load in _read_again(kernel)
        if free_axes(load) & frozenset(kernel.parallel)
    )


def _size(axes: frozenset[str], blocks: Mapping[str, int]) -> int:
    return math.prod(blocks.get(a, 1) for a in axes)
