"""Matrix products that a GPU's library computes (cuBLAS): which sums they are, what is stored around them, and what they take.

Tensor cores multiply half precision alone. Products of float32 and float64 run on the vector units, where the library's kernels, in assembly,
take 0.07 to 0.8 of the time of Triton's (H200). Such a product is a kernel of its own, so that what it multiplies is stored, and so is what
it gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from eqfuse.extract.devices import Device
from eqfuse.extract.shape import Shape
from eqfuse.loops.contraction import factors
from eqfuse.loops.nodes import Dims, LibraryProduct
from eqfuse.loops.plan import Term
from eqfuse.names import Names
from eqfuse.terms.masks import zero_without
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Output,
    Reduce,
    free_axes,
    reductions,
    replaced,
    walk,
)
from eqfuse.terms.types import result_dtype

DTYPES = ("f32", "f64")
"""Dtypes of which a library multiplies faster than Triton does."""

MUCH = 8
"""Times the positions of the largest tensor that a product reads, or that a program gives, up to which it is stored."""


def library_product(
    output: Output, dtypes: Mapping[str, str], lengths: Mapping[str, int]
) -> LibraryProduct | None:
    """The product that an output is: a sum, over one axis or several, of two tensors' elements at positions of axes, each at most once. Both have
    the summed axes; of its own axes those that both have come first, then those of one operand, then those of the other. A dimension may be of
    several axes whose `lengths` are known. None where it is none that a library has."""
    sides = _sides(output.expr)
    if sides is None:
        return None
    named = [_dims(side, lengths) for side in sides if isinstance(side, Load)]
    found = [(tensor, dims) for tensor, dims in named if all(dims)]
    acc = "f64" if "f64" in dtypes.values() else "f32"
    wide = len(found) == 2 and all(dtypes.get(tensor, acc) == acc for tensor, _ in found)
    if not wide or output.dtype not in (None, acc):
        return None
    if output.axes[-1] not in {axis for dim in found[1][1] for axis in dim}:
        found.reverse()
    product = LibraryProduct((output.name, tuple((axis,) for axis in output.axes)), *found)
    left, right = product.axes(1), product.axes(2)
    batch = [axis for axis in output.axes if axis in left and axis in right]
    rows = [axis for axis in output.axes if axis not in right]
    columns = [axis for axis in output.axes if axis not in left]
    summed = {*left, *right} - {*output.axes}
    several = {axis for _, dims in found for dim in dims for axis in dim if len(dim) > 1}
    once = len({*left}) == len(left) and len({*right}) == len(right) and summed.isdisjoint(several)
    is_product = once and rows and columns and summed <= {*left} & {*right}
    return product if is_product and (*batch, *rows, *columns) == output.axes else None


def _dims(side: Load, lengths: Mapping[str, int]) -> tuple[str, Dims]:
    """A tensor and the axes of its dimensions; a dimension without any is read in another way."""

    def axes(part: Expr) -> tuple[str, ...]:
        match part:
            case Axis(name):
                return (name,)
            case Call("add", (Call("mul", (outer, Const(by))), Axis(name))) if lengths.get(name) == by:
                return (*found, name) if (found := axes(outer)) else ()
        return ()

    return side.tensor, tuple(map(axes, side.index))


def _sides(expr: Expr) -> tuple[Expr, Expr] | None:
    """The two factors of a sum of products over axes that both have, each of which has axes of its own."""
    body, summed = expr, set[str]()
    while isinstance(body, Reduce) and body.op == "sum":
        summed.add(body.axis)
        body = body.body
    product = factors(body)
    if product.under or len(product.over) != 2:
        return None
    left, right = product.over
    both = free_axes(left) & free_axes(right)
    if not summed or not summed <= both or free_axes(left) <= both or free_axes(right) <= both:
        return None
    return left, right


def with_products(
    outputs: Sequence[Output], stem: str, extents: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[list[Output], frozenset[str]]:
    """The outputs of a program with those products stored that a library may compute, and what they multiply; and the names of products."""
    names = Names((output.name for output in outputs), between="")
    stored: dict[Expr, Output] = {}
    apart: set[str] = set()

    def store(expr: Expr, axes: tuple[str, ...]) -> Output:
        if expr not in stored:
            stored[expr] = Output(names.numbered(f"{stem}_product"), axes, expr)
        return stored[expr]

    every = dict.fromkeys(r for o in outputs for r in reductions(o.expr))
    inner = {reduce.body for reduce in every if _sides(reduce) is not None}  # of sums over several axes
    for reduce in every:
        sides = _sides(reduce)
        if sides is None or reduce in inner or reduce in stored:
            continue
        kinds = {result_dtype(side, dtypes) for side in sides}
        if len(kinds) > 1 or not kinds <= {*DTYPES}:
            continue
        if any(_is_masked(side) for side in sides):
            continue
        if any(is_much(each, sides, outputs, extents) for each in (reduce, *sides)):
            continue
        for side in sides:
            if not isinstance(side, Load):
                store(side, tuple(_axes_in_order([side], free_axes(side))))
        output = next((o for o in outputs if o.expr == reduce and o.dtype in (None, *kinds)), None)
        if output is None:
            both = free_axes(sides[0]) & free_axes(sides[1])
            own = free_axes(reduce)
            groups = (both & own, free_axes(sides[0]) - both, free_axes(sides[1]) - both)
            output = store(reduce, tuple(axis for group in groups for axis in _axes_in_order(sides, group)))
        apart.add(output.name)
    if not apart:
        return list(outputs), frozenset()
    made = (*stored.values(), *outputs)
    reads: dict[Expr, Expr] = {
        o.expr: Load(o.name, tuple(map(Axis, o.axes))) for o in made if o.name in apart or o.expr in stored
    }
    read = [{expr: load for expr, load in reads.items() if expr != o.expr} for o in made]
    return [replace(o, expr=replaced(o.expr, each)) for o, each in zip(made, read, strict=True)], frozenset(
        apart
    )


def _is_masked(side: Expr) -> bool:
    """Whether a factor is 0 where a mask leaves nothing: the other one is not read there, whatever it holds. A library reads all of it."""
    return any(zero_without(side, lambda condition: True))


def is_much(
    made: Expr | Output, factors: Iterable[Expr], outputs: Iterable[Output], extents: Mapping[str, int]
) -> bool:
    """Whether what would be stored is much larger than the tensors that its factors read, and than all outputs."""
    others: list[Expr | Output] = [*outputs, *(node for node in walk(*factors) if isinstance(node, Load))]
    return _positions(made, extents) > MUCH * max(_positions(each, extents) for each in others)


def _positions(of: Expr | Output, extents: Mapping[str, int]) -> int:
    axes = of.axes if isinstance(of, Output) else free_axes(of)
    return math.prod(extents.get(axis, 1) for axis in axes)


def _axes_in_order(sides: Sequence[Expr], axes: frozenset[str]) -> list[str]:
    """Axes in the order in which a tensor of one of these has them."""
    found = dict.fromkeys(
        at.name
        for side in sides
        for node in walk(side)
        if isinstance(node, Load)
        for part in node.index
        for at in walk(part)
        if isinstance(at, Axis)
    )
    return [*(axis for axis in found if axis in axes), *sorted(axes - found.keys())]


def library_terms(product: LibraryProduct, shape: Shape, device: Device) -> list[Term]:
    """What a call of the library takes, in seconds. Fitted to 75 products on an H200, of which 64 are predicted within 1.5: `step` for each
    position of the summed axes, which few thread blocks wait for, the arithmetic of at least 32 rows and columns, and memory. Vectors wait for
    memory alone."""
    out, left, right = ({*product.axes(side)} for side in range(3))
    batch, rows = shape.positions(frozenset(left & right & out)), shape.positions(frozenset(out - right))
    columns, depth = shape.positions(frozenset(out - left)), shape.positions(frozenset(left - out))
    rate, residuals = device.matrix_float * device.residuals.library_rate, device.residuals
    is_vector = min(rows, columns) <= residuals.library_vectors
    sides = (
        (rows, columns)
        if is_vector
        else (max(rows, residuals.library_rows), max(columns, residuals.library_rows))
    )
    memory = sum(
        shape.positions(frozenset(product.axes(side))) * shape.itemsize(tensor)
        for side, (tensor, _) in enumerate(product.sides)
    )
    return [
        Term("memory", memory / device.bandwidth),
        Term("matrix", 2 * batch * math.prod(sides) * depth / rate),
        Term("steps", 0.0 if is_vector else residuals.library_step * min(depth, residuals.library_depth)),
        Term("launch", device.launch + residuals.library_call),
    ]
