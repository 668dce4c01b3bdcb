"""Masked products whose operands in memory may not be finite, where masks end or numbers are masked.

A matrix unit multiplies all of both operands, and 0 times NaN is NaN. So what is not finite in a tile that masked rows multiply is
added by hand where the mask holds, position by position, and is 0 in the slot when the product reads it:

    x = a + dot(p where m, v)    ->    when any of v is not finite:
                                         for each position of v:  b = a + p[position] * v[position] where m, if not finite
                                         meet the other consumers;  clear v
                                       x = b + dot(p, v)            b is a where all of v is finite

Only loops whose blocks are masked look at their tiles: of a causal mask those are one or two blocks of each row of blocks. A load
whose mask ends before the tensor does is copied whole, and is such an operand: its mask is one of the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.roles.loads import Tensors, ends_early
from eqfuse.tile.roles.nodes import (
    AnyNonFinite,
    Column,
    ConsumerBarrier,
    Ring,
    Stmt,
    View,
    Wait,
    ZeroNonFinite,
)
from eqfuse.tile.walk import ops_of, pruned, uses_of


def corrections_first(kernel: ir.Kernel, tensors: Tensors, fresh: Fresh) -> ir.Kernel:
    """The kernel with what masked products leave out added before them, to what they are added to. Raises Unsuited."""
    ops, uses = ops_of(kernel.body), uses_of(kernel.body)
    rests = {op.total.name: op for op in ops.values() if isinstance(op, ir.NonFiniteCorrection)}
    draft = Draft(kernel, fresh)

    def product(value: ir.Value, dot: ir.Dot, rest: ir.NonFiniteCorrection | None) -> list[ir.Let]:
        """A product, and what is added before it; nothing where no mask is needed."""
        made: list[ir.Let] = []
        right = dot.right if rest is None else rest.right
        mask = None if rest is None else rest.left_mask
        for bound in _early(right, dot.axis, ops, tensors):
            dims = dot.left.dims
            wide = draft.new(f"{bound.name}_of_rest", dims, "bool")
            made.append(ir.Let(wide, ir.Align(bound)))
            both = wide if mask is None else draft.new(f"{mask.name}_of_rest", dims, "bool")
            if mask is not None:
                made.append(ir.Let(both, ir.Elementwise("and", (mask, wide))))
            mask = both
        if mask is None:
            return []
        start = dot.accumulator
        if start is None:
            start = draft.new(f"{value.name}_none", value.dims, value.dtype)
            made.append(ir.Let(start, ir.Fill(0.0)))
        added = draft.new(f"{value.name}_rest", value.dims, value.dtype)
        made.append(ir.Let(added, ir.NonFiniteCorrection(dot.left, right, dot.axis, start, mask, None)))
        return [*made, ir.Let(value, replace(dot, right=right, accumulator=added))]

    def one(let: ir.Let) -> Sequence[ir.Stmt]:
        match let.op:
            case ir.NonFiniteCorrection(total=total) as rest:
                dot = ops.get(total.name)
                if rest.right_mask is not None or not isinstance(dot, ir.Dot) or uses[total.name] > 1:
                    raise Unsuited("a product whose right operand is masked")
                return product(let.value, dot, rest)
            case ir.Dot() if let.value.name in rests:
                return ()
            case ir.Dot() as dot:
                return product(let.value, dot, None) or (let,)
            case _:
                return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else draft.kernel_of(pruned(body))


def _early(right: ir.Value, axis: str, ops: Mapping[str, ir.Op], tensors: Tensors) -> list[ir.Value]:
    """The bounds of an axis, in the mask of a tile that is loaded, that end before its tensor does."""
    match ops.get(right.name):
        case ir.Align(source):
            return _early(source, axis, ops, tensors)
        case ir.LoadTile() as load:
            return [bound for bound in ends_early(load, right, ops, tensors) if bound.dims == (axis,)]
        case _:
            return []


class Corrections:
    """Adds what masked products leave out by hand. `ops` are those of a kernel's body, `rings` those of its loads; `units` are
    the axes along which that goes position by position, and what they are positions of."""

    def __init__(self, ops: Mapping[str, ir.Op], rings: Mapping[str, Ring], fresh: Fresh) -> None:
        self.ops, self.rings, self.fresh = ops, rings, fresh
        self.units: dict[str, str] = {}

    def loop(self, loop: ir.For[Stmt], met: ir.Value, zero: ir.Value) -> tuple[ir.For[Stmt], ir.Value]:
        """A loop, and how often consumers have met after it; `met` is how often they have before."""
        filled = {s.value.name for s in loop.body if isinstance(s, ir.Let) and s.value.name in self.rings}
        here = self.fresh.value("met", (), "i32")
        body, after = self._body(loop.body, here, filled, zero)
        if after == here:
            return loop, met
        return replace(loop, carried=(*loop.carried, ir.Carried(here, met, after)), body=tuple(body)), here

    def _body(
        self, body: Sequence[Stmt], met: ir.Value, filled: set[str], zero: ir.Value
    ) -> tuple[list[Stmt], ir.Value]:
        made: list[Stmt] = []
        for stmt in body:
            match stmt:
                case ir.Let(value, ir.NonFiniteCorrection() as rest):
                    after = self.fresh.value("met_then", (), "i32")
                    made += self._rest(value, rest, met, after, filled, zero)
                    met = after
                case ir.If(condition, inner, results):
                    new, last = self._body(inner, met, filled, zero)
                    if last != met:
                        after = self.fresh.value("met_then", (), "i32")
                        results = (*results, ir.Result(after, last, met))
                        met = after
                    made.append(ir.If(condition, tuple(new), results))
                case _:
                    made.append(stmt)
        return made, met

    def _rest(
        self,
        value: ir.Value,
        rest: ir.NonFiniteCorrection,
        met: ir.Value,
        after: ir.Value,
        filled: set[str],
        zero: ir.Value,
    ) -> list[Stmt]:
        """Looks at the right operand, and adds what of its products is not finite."""
        name, load = self._load(rest.right)
        ring = self.rings.get(name)
        if ring is None or name not in filled or ring.parts > 1:
            raise Unsuited(f"the right operand {rest.right.name} of a masked product is no tile of the loop")
        if self._is_loaded(rest.left) or rest.left_mask is None:
            raise Unsuited(f"the left operand {rest.left.name} of a masked product is in memory")
        view = View(ring.name, zero, ring.tile.dims)
        found = self.fresh.value(f"{rest.right.name}_not_finite", (), "bool")
        one, more = (self.fresh.value(n, (), "i32") for n in ("one", "met_more"))
        by_hand, total = self._by_hand(rest, load)
        branch: tuple[Stmt, ...] = (
            *by_hand,
            ConsumerBarrier(met),
            ZeroNonFinite(view),
            ir.Let(one, ir.Constant(1)),
            ir.Let(more, ir.Elementwise("add", (met, one))),
        )
        results = ir.Result(value, total, rest.total), ir.Result(after, more, met)
        return [Wait(ring.name, "full", zero), AnyNonFinite(found, view), ir.If(found, branch, results)]

    def _by_hand(self, rest: ir.NonFiniteCorrection, load: ir.LoadTile) -> tuple[list[Stmt], ir.Value]:
        """The loop over single positions, and the sums that it leaves."""
        axis, fresh = rest.axis, self.fresh
        unit = f"{axis}_one"
        self.units[unit] = axis
        start, size, stop, at, place = (
            fresh.value(f"{axis}_{n}", (), "i32") for n in ("from", "count", "to", "single", "place")
        )
        alone = _Alone(axis, at, self.ops, fresh)
        kept = alone.value(rest.left_mask) if rest.left_mask is not None else None
        rows, columns = rest.total.dims
        row = fresh.value(f"{load.tensor}_row", (columns,), rest.right.dtype)
        index = tuple(alone.value(v) for v in load.index)
        mask = None if load.mask is None else alone.value(load.mask)
        made = fresh.like

        def tile(source: ir.Value) -> ir.Value:
            """A value as a tile of the sums."""
            if not source.dims:
                return source
            wide = replace(made(source, "wide"), dims=(rows, columns))
            lets.append(ir.Let(wide, ir.Align(source)))
            return wide

        lets: list[Stmt] = [*alone.lets, ir.Let(row, ir.LoadTile(load.tensor, index, mask, load.other))]
        other = replace(made(row, "f32"), dtype="f32")
        itself = made(other, "less_itself")
        none = fresh.value("nothing", (), "f32")
        finite = replace(made(row, "finite"), dtype="bool")
        column = fresh.value(f"{rest.left.name}_column", (rows,), "f32")
        lets += [
            ir.Let(other, ir.Cast(row)),
            ir.Let(itself, ir.Elementwise("sub", (other, other))),
            ir.Let(none, ir.Constant(0.0)),
            ir.Let(finite, ir.Elementwise("eq", (itself, none))),
            Column(column, rest.left, place),
        ]
        sums, product, plain, chosen, following = (
            made(rest.total, n) for n in ("by_hand", "product", "not_finite", "kept", "by_hand_next")
        )
        one, both, is_finite = tile(column), tile(other), tile(finite)
        lets += [
            ir.Let(product, ir.Elementwise("mul", (one, both))),
            ir.Let(plain, ir.Elementwise("where", (is_finite, none, product))),
        ]
        if kept is not None:
            lets.append(ir.Let(chosen, ir.Elementwise("where", (tile(kept), plain, none))))
        lets.append(ir.Let(following, ir.Elementwise("add", (sums, chosen if kept is not None else plain))))
        loop = ir.For(
            unit,
            start,
            stop,
            (ir.Carried(sums, rest.total, following),),
            (ir.Let(at, ir.Start(unit)), ir.Let(place, ir.Elementwise("sub", (at, start))), *lets),
        )
        return [
            ir.Let(start, ir.Start(axis)),
            ir.Let(size, ir.BlockSize(axis)),
            ir.Let(stop, ir.Elementwise("add", (start, size))),
            loop,
        ], sums

    def _load(self, value: ir.Value) -> tuple[str, ir.LoadTile]:
        """The load that a value is, its dims in some order."""
        match self.ops.get(value.name):
            case ir.Align(source):
                return self._load(source)
            case ir.LoadTile() as load:
                return value.name, load
        raise Unsuited(f"the right operand {value.name} of a product is computed")

    def _is_loaded(self, value: ir.Value) -> bool:
        op = self.ops.get(value.name)
        return isinstance(op, ir.LoadTile) or (isinstance(op, ir.Align) and self._is_loaded(op.value))


class _Alone:
    """Values of a body at a single position of an axis: `lets` make them."""

    def __init__(self, axis: str, at: ir.Value, ops: Mapping[str, ir.Op], fresh: Fresh) -> None:
        self.axis, self.at, self.ops, self.fresh = axis, at, ops, fresh
        self.lets: list[ir.Let] = []
        self._known: dict[str, ir.Value] = {}

    def value(self, value: ir.Value) -> ir.Value:
        """A value at the position: of its other dims, or a scalar that stands for all of them."""
        if self.axis not in value.dims:
            return value
        if value.name not in self._known:
            self._known[value.name] = self._made(value)
        return self._known[value.name]

    def _made(self, value: ir.Value) -> ir.Value:
        dims = tuple(axis for axis in value.dims if axis != self.axis)
        match self.ops.get(value.name):
            case ir.Positions():
                return self.at
            case ir.Bound(_, stop):
                return self._let(value, (), ir.Elementwise("lt", (self.at, stop)))
            case ir.Align(source):
                inner = self.value(source)
                return inner if inner.dims in ((), dims) else self._let(value, dims, ir.Align(inner))
            case ir.Cast(source, written):
                inner = self.value(source)
                return self._let(value, inner.dims, ir.Cast(inner, written))
            case ir.Elementwise(fn, args, division):
                inner_args = tuple(map(self.value, args))
                wide = dims if any(arg.dims for arg in inner_args) else ()
                return self._let(value, wide, ir.Elementwise(fn, inner_args, division))
            case ir.LoadTile(tensor, index, mask, other):
                places = tuple(map(self.value, index))
                inside = None if mask is None else self.value(mask)
                return self._let(value, dims, ir.LoadTile(tensor, places, inside, other))
        raise Unsuited(f"the mask {value.name} of a product is computed from tiles")

    def _let(self, value: ir.Value, dims: tuple[str, ...], op: ir.Op) -> ir.Value:
        made = replace(self.fresh.like(value, "single"), dims=dims)
        self.lets.append(ir.Let(made, op))
        return made
