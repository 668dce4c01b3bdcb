"""What one call to torch does together: a matrix product and its scalar factor, an operation and its store."""

from __future__ import annotations

from collections.abc import Mapping

from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.walk import nested, ops_of, uses_of


def dot_factors(kernel: ir.Kernel) -> Mapping[str, tuple[ir.Value, ir.Value]]:
    """By the name of a matrix product that nothing reads but its product with a scalar: that product, the scalar."""
    count = uses_of(kernel.body)
    lets = [stmt for stmt in nested(kernel.body) if isinstance(stmt, ir.Let)]
    dots = {
        let.value.name
        for let in lets
        if isinstance(let.op, ir.Dot) and let.op.accumulator is None and count[let.value.name] == 1
    }
    found: dict[str, tuple[ir.Value, ir.Value]] = {}
    for let in lets:
        match let.op:
            case ir.Elementwise("mul", (dot, scalar) | (scalar, dot)) if dot.name in dots:
                if not scalar.dims and scalar.dtype not in INTEGERS and let.value.dims == dot.dims:
                    found[dot.name] = let.value, scalar
    return found


def known_numbers(kernel: ir.Kernel) -> frozenset[str]:
    """Names of the scalars that the arguments alone decide."""
    found: set[str] = set()
    for stmt in kernel.body:
        match stmt:
            case ir.Let(value, ir.Argument() | ir.Constant() | ir.Irrational()):
                found.add(value.name)
            case ir.Let(value, ir.Elementwise(_, args)) if value.dtype not in INTEGERS:
                if all(arg.name in found for arg in args):
                    found.add(value.name)
    return frozenset(found)


def direct_stores(kernel: ir.Kernel) -> Mapping[str, ir.Store]:
    """By the name of a value that nothing reads but one store in the same body, of all its positions: that store."""
    count = uses_of(kernel.body)
    ops = ops_of(kernel.body)
    bodies = [kernel.body, *(stmt.body for stmt in nested(kernel.body) if isinstance(stmt, ir.For))]
    found: dict[str, ir.Store] = {}
    for body in bodies:
        here = {stmt.value.name for stmt in body if isinstance(stmt, ir.Let)}
        for stmt in body:
            if not isinstance(stmt, ir.Store) or stmt.value.name not in here or count[stmt.value.name] > 1:
                continue
            if stmt.mask is None or _is_bound(stmt.mask, ops):
                found[stmt.value.name] = stmt
    return found


def _is_bound(mask: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    """Whether a mask only leaves out what is past the end of an axis, which clipped blocks do not have."""
    match ops.get(mask.name):
        case ir.Bound():
            return True
        case ir.Align(source):
            return _is_bound(source, ops)
        case ir.Elementwise("and", parts):
            return all(_is_bound(part, ops) for part in parts)
        case _:
            return False
