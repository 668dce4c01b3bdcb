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

from eqfuse.tile.def_use import Readers, readers_of
from eqfuse.tile.nodes import (
    Constant,
    Elementwise,
    Fill,
    For,
    Kernel,
    Let,
    Op,
    ReduceTile,
    Stmt,
    Value,
)
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.walk import defined, lets_of, ops_of


@dataclass(frozen=True)
class _Scale:
    """A scale's sign and size, made once; `is_rare` where elements take the sign."""

    is_rare: Value
    sign: Value
    size: Value


def scaled_last(kernel: Kernel) -> Kernel:
    """No element is scaled for a maximum alone."""
    ops, readers = ops_of(kernel.body), readers_of(kernel)
    inside = {v.name for stmt in kernel.body if isinstance(stmt, For) for v in defined((stmt,))}
    draft, scales = Draft(kernel), dict[str, _Scale]()

    def scaled_by(value: Value, op: Op) -> tuple[Value, Value] | None:
        scaled = _scaled(value, op, inside)
        return scaled if scaled is not None and for_a_maximum(value, readers, ops) else None

    pairs = ((let.value.name, scaled_by(let.value, let.op)) for let in lets_of(kernel.body))
    found = {name: each for name, each in pairs if each is not None}
    if not found:
        return kernel

    unscaled: dict[str, tuple[Value, _Scale]] = {}  # what stands for a scaled value, by its name

    def one(let: Let) -> Sequence[Stmt]:
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
                    Let(turned, Elementwise("mul", (factor, signs.sign))),
                    Let(plain, Elementwise("where", (signs.is_rare, turned, factor))),
                )
            case Elementwise("where", (mask, inner, other)) if inner.name in unscaled:
                plain, signs = unscaled[inner.name]
                unscaled[let.value.name] = let.value, signs
                return (Let(let.value, Elementwise("where", (mask, plain, other))),)
            case ReduceTile("max", source, axis) if source.name in unscaled:
                plain, signs = unscaled[source.name]
                most = draft.new(f"{let.value.name}_by_size", let.value.dims, let.value.dtype)
                product = Elementwise("mul", (most, signs.size))
                return Let(most, ReduceTile("max", plain, axis)), Let(let.value, product)
            case Elementwise("sub", (left, shift)) if left.name in unscaled:
                plain, signs = unscaled[left.name]
                again = draft.new(f"{left.name}_scaled", left.dims, left.dtype)
                return (
                    Let(again, Elementwise("mul", (plain, signs.size))),
                    Let(let.value, Elementwise("sub", (again, shift))),
                )
            case _:
                return (let,)

    return draft.kernel_of(changed(kernel.body, one))


def _scaled(value: Value, op: Op, inside: set[str]) -> tuple[Value, Value] | None:
    """A tile, and the scalar from outside of all loops that it is multiplied by."""
    match op:
        case Elementwise("mul", (left, right)) if len(value.dims) == 2 and value.dtype == "f32":
            for tile, scale in ((left, right), (right, left)):
                if tile.dims == value.dims and not scale.dims and scale.name not in inside:
                    return tile, scale
    return None


def for_a_maximum(value: Value, readers: Readers, ops: Mapping[str, Op]) -> bool:
    """Whether a value is masked, its maximum taken, and something subtracted from it, and nothing else."""
    folded = False
    pending = [value]
    while pending:
        here = pending.pop()
        for reader, op in readers.get(here.name, []):
            match op:
                case Elementwise("where", (_, inner, other)) if reader is not None and inner == here:
                    if not _is_least(ops.get(other.name)):
                        return False
                    pending.append(reader)
                case ReduceTile("max", _, _):
                    folded = True
                case Elementwise("sub", (left, right)) if left == here and right != here:
                    pass
                case _:
                    return False
    return folded


def _is_least(op: Op | None) -> bool:
    return isinstance(op, Constant | Fill) and op.number == -math.inf


def _signs(draft: Draft, scale: Value) -> _Scale:
    zero, one, less = (draft.new(n, (), scale.dtype) for n in ("no_scale", "scale_of_1", "scale_of_minus_1"))
    draft.first += [Let(zero, Constant(0.0)), Let(one, Constant(1.0)), Let(less, Constant(-1.0))]
    name = scale.name
    flag = Value("", (), "bool")
    is_rare = draft.behind(scale, f"{name}_turns", Elementwise("le", (scale, zero)), flag)
    is_none = draft.behind(scale, f"{name}_is_0", Elementwise("eq", (scale, zero)), flag)
    sign = draft.behind(scale, f"{name}_sign", Elementwise("where", (is_none, zero, less)))
    size = draft.behind(scale, f"{name}_abs", Elementwise("abs", (scale,)))
    kept = draft.behind(scale, f"{name}_size", Elementwise("where", (is_none, one, size)))
    return _Scale(is_rare, sign, kept)
