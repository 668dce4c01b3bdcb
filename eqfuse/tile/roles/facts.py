"""What prices of roles need to know of a kernel: its products, what loops carry, and arithmetic beside them."""

from __future__ import annotations

from collections.abc import Iterator

from eqfuse.extract.unsuited import Unsuited
from eqfuse.extract.warp_schedules import POLYNOMIALS, Correction, Facts, Product
from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.functions import SPECIAL
from eqfuse.tile import nodes as ir
from eqfuse.tile.walk import lets_of, nested


def facts_of(tiles: ir.Kernel) -> Facts:
    """Those of a kernel as its roles are priced (`passes.prepared`). Raises Unsuited where no axis is that of the rows of products."""
    rows = rows_of(tiles)
    loops = [stmt for stmt in nested(tiles.body) if isinstance(stmt, ir.For)]
    products = tuple(tuple(map(_product, dots)) for dots in _products(tiles))
    special, others = _in_roles(tiles)
    stores = [BYTES[s.value.dtype] for s in tiles.body if isinstance(s, ir.Store) and len(s.value.dims) == 2]
    loads = [s for s in tiles.body if isinstance(s, ir.Let) and _is_tile(s)]
    return Facts(
        rows,
        products,
        frozenset(c.value.dims[1] for loop in loops for c in loop.carried if len(c.value.dims) == 2),
        walked_columns(tiles),
        frozenset(axis for let in lets_of(tiles.body) if _is_tile(let) for axis in let.value.dims),
        _reads_once(tiles),
        max(stores, default=0) > max((BYTES[let.value.dtype] for let in loads), default=0),
        special,
        others,
        tuple((loop.axis, _corrections(loop)) for loop in tiles.body if isinstance(loop, ir.For)),
    )


def _is_tile(let: ir.Let) -> bool:
    """Whether a tile of two dims is loaded."""
    return isinstance(let.op, ir.LoadTile) and len(let.value.dims) == 2


def _product(dot: ir.Dot) -> Product:
    return Product(dot.left.dims, dot.right.dims, BYTES[dot.left.dtype], dot.accumulator is not None)


def _corrections(loop: ir.For[ir.Stmt]) -> tuple[Correction, ...]:
    ops = [s.op for s in loop.body if isinstance(s, ir.Let) and isinstance(s.op, ir.NonFiniteCorrection)]
    return tuple(Correction(op.left.dims[0], op.right.dims, BYTES[op.right.dtype]) for op in ops)


def rows_of(tiles: ir.Kernel) -> str:
    """The axis of the rows of a kernel's products. Raises Unsuited."""
    dots = [dot for loop in _products(tiles) for dot in loop]
    rows = {dot.left.dims[0] for dot in dots if len(dot.left.dims) == 2}
    if len(rows) != 1:
        raise Unsuited("no loop multiplies matrices" if not dots else "products of no common rows")
    (axis,) = rows
    block = next((block for block in tiles.blocks if block.axis == axis and block.kind == "grid"), None)
    if block is None:
        raise Unsuited(f"each thread block has all of {axis}, the rows of products")
    if block.valid is not None:
        raise Unsuited(
            f"thread blocks take {block.valid} positions of {axis} at a time, the rows of products"
        )
    return axis


def _products(tiles: ir.Kernel) -> Iterator[list[ir.Dot]]:
    """The products of each loop."""
    for stmt in nested(tiles.body):
        if isinstance(stmt, ir.For):
            yield [s.op for s in stmt.body if isinstance(s, ir.Let) and isinstance(s.op, ir.Dot)]


def walked_columns(tiles: ir.Kernel) -> frozenset[str]:
    """Axes of columns of products whose blocks a loop walks that has the products' loops inside."""
    outer = {
        s.axis for s in tiles.body if isinstance(s, ir.For) and any(isinstance(i, ir.For) for i in s.body)
    }
    return frozenset(dot.right.dims[1] for dots in _products(tiles) for dot in dots) & outer


def _reads_once(tiles: ir.Kernel) -> bool:
    """Whether products of loops read tiles that are loaded outside of them."""
    names: set[str] = set()
    for stmt in tiles.body:
        match stmt:
            case ir.Let(value, ir.LoadTile()) if len(value.dims) == 2:
                names.add(value.name)
            case ir.Let(value, ir.Align(source)) if source.name in names:
                names.add(value.name)
    return any({dot.left.name, dot.right.name} & names for dots in _products(tiles) for dot in dots)


def _in_roles(tiles: ir.Kernel) -> tuple[float, float]:
    """Special functions, and other operations, that consumers compute for each one of a kernel without roles."""
    ops = [
        stmt.op.fn
        for loop in tiles.body
        if isinstance(loop, ir.For)
        for stmt in loop.body
        if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Elementwise) and len(stmt.value.dims) == 2
    ]
    special = sum(POLYNOMIALS.get(fn, (1, 0))[0] for fn in ops if fn in SPECIAL | {"exp2", "log2"})
    eased = [POLYNOMIALS[fn] for fn in ops if fn in POLYNOMIALS]
    if not eased:
        return 1.0, 1.0
    spared, more = sum(few for few, _ in eased), sum(many for _, many in eased)
    return 1 - spared / special, 1 + more / len(ops)
