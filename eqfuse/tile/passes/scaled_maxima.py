"""Scales behind maxima: what is scaled before a maximum is taken and subtracted, is scaled where it is subtracted.

    t = x * c;  m = max(t);  s = t - b      ->      m = max(x) * c;  s = x * c - b

saves a multiplication of each element, since a product and a difference are one instruction. That is so for c > 0, of which
order is kept and rounding too; of other scales the sign goes to x, in a branch that is hardly ever taken:

    y = where(c <= 0, x * where(c = 0, 0, -1), x);  d = where(c = 0, 1, abs(c))      so that  y * d = x * c  and  d > 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eqfuse.tile import nodes as ir
from eqfuse.tile.def_use import Readers, is_number, readers_of
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.walk import defined, lets_of, ops_of


@dataclass(frozen=True)
class _Scale:
    """A scale's sign and size, made once; `is_rare` where elements take the sign."""

    is_rare: ir.Value
    sign: ir.Value
    size: ir.Value


def scaled_last(kernel: ir.Kernel) -> ir.Kernel:
    """No element is scaled for a maximum alone."""
    ops, readers = ops_of(kernel.body), readers_of(kernel)
    inside = {v.name for stmt in kernel.body if isinstance(stmt, ir.For) for v in defined((stmt,))}
    draft, scales = Draft(kernel), dict[str, _Scale]()

    def scaled_by(value: ir.Value, op: ir.Op) -> tuple[ir.Value, ir.Value] | None:
        scaled = _scaled(value, op, inside)
        return scaled if scaled is not None and for_a_maximum(value, readers, ops) else None

    pairs = ((let.value.name, scaled_by(let.value, let.op)) for let in lets_of(kernel.body))
    found = {name: each for name, each in pairs if each is not None}
    if not found:
        return kernel

    unscaled: dict[str, tuple[ir.Value, _Scale]] = {}  # what stands for a scaled value, by its name

    def one(let: ir.Let) -> Sequence[ir.Stmt]:
        match let.op:
            case _ if let.value.name in found:
                factor, scale = found[let.value.name]
                if scale.name not in scales:
                    scales[scale.name] = _signs(draft, scale)
                signs = scales[scale.name]
                turned = draft.new(f"{factor.name}_turned", factor.dims, factor.dtype)
                plain = draft.new(f"{factor.name}_by_size", factor.dims, factor.dtype)
                unscaled[let.value.name] = plain, signs
                return (
                    ir.Let(turned, ir.Elementwise("mul", (factor, signs.sign))),
                    ir.Let(plain, ir.Elementwise("where", (signs.is_rare, turned, factor))),
                )
            case ir.Elementwise("where", (mask, inner, other)) if inner.name in unscaled:
                plain, signs = unscaled[inner.name]
                unscaled[let.value.name] = let.value, signs
                return (ir.Let(let.value, ir.Elementwise("where", (mask, plain, other))),)
            case ir.ReduceTile("max", source, axis) if source.name in unscaled:
                plain, signs = unscaled[source.name]
                most = draft.new(f"{let.value.name}_by_size", let.value.dims, let.value.dtype)
                product = ir.Elementwise("mul", (most, signs.size))
                return ir.Let(most, ir.ReduceTile("max", plain, axis)), ir.Let(let.value, product)
            case ir.Elementwise("sub", (left, shift)) if left.name in unscaled:
                plain, signs = unscaled[left.name]
                again = draft.new(f"{left.name}_scaled", left.dims, left.dtype)
                return (
                    ir.Let(again, ir.Elementwise("mul", (plain, signs.size))),
                    ir.Let(let.value, ir.Elementwise("sub", (again, shift))),
                )
            case _:
                return (let,)

    return draft.kernel_of(changed(kernel.body, one))


def _scaled(value: ir.Value, op: ir.Op, inside: set[str]) -> tuple[ir.Value, ir.Value] | None:
    """A tile, and the scalar from outside of all loops that it is multiplied by."""
    match op:
        case ir.Elementwise("mul", (left, right)) if len(value.dims) == 2 and value.dtype == "f32":
            for tile, scale in ((left, right), (right, left)):
                if tile.dims == value.dims and not scale.dims and scale.name not in inside:
                    return tile, scale
    return None


def for_a_maximum(value: ir.Value, readers: Readers, ops: Mapping[str, ir.Op]) -> bool:
    """Whether a value is masked, its maximum taken, and something subtracted from it, and nothing else."""
    folded = False
    pending = [value]
    while pending:
        here = pending.pop()
        for reader, op in readers.get(here.name, []):
            match op:
                case ir.Elementwise("where", (_, inner, other)) if reader is not None and inner == here:
                    if not is_number(ops.get(other.name), -math.inf):
                        return False
                    pending.append(reader)
                case ir.ReduceTile("max", _, _):
                    folded = True
                case ir.Elementwise("sub", (left, right)) if left == here and right != here:
                    pass
                case _:
                    return False
    return folded


def _signs(draft: Draft, scale: ir.Value) -> _Scale:
    zero, one, less = (draft.new(n, (), scale.dtype) for n in ("no_scale", "scale_of_1", "scale_of_minus_1"))
    draft.first += [
        ir.Let(zero, ir.Constant(0.0)),
        ir.Let(one, ir.Constant(1.0)),
        ir.Let(less, ir.Constant(-1.0)),
    ]
    name = scale.name
    flag = ir.Value("", (), "bool")
    is_rare = draft.behind(scale, f"{name}_turns", ir.Elementwise("le", (scale, zero)), flag)
    is_none = draft.behind(scale, f"{name}_is_0", ir.Elementwise("eq", (scale, zero)), flag)
    sign = draft.behind(scale, f"{name}_sign", ir.Elementwise("where", (is_none, zero, less)))
    size = draft.behind(scale, f"{name}_abs", ir.Elementwise("abs", (scale,)))
    kept = draft.behind(scale, f"{name}_size", ir.Elementwise("where", (is_none, one, size)))
    return _Scale(is_rare, sign, kept)
