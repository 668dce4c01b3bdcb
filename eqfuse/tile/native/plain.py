"""Makes the operands of a kernel plain: see `nodes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from eqfuse.tile import nodes as ir
from eqfuse.tile.native.nodes import Blocks, Define, Item, Put
from eqfuse.tile.native.sums import with_sums_of_dots

FEW_COLUMNS = 16
"""Columns of a matrix below which a vector times it is a loop: the library adds one product after the other."""


def plain(kernel: ir.Kernel, lengths: Mapping[str, int]) -> tuple[Item, ...]:
    """The statements of a kernel with plain operands, in order. `lengths` are positions of a block: whether products are
    work for a matrix library depends on them."""
    return with_sums_of_dots(_Plain(kernel, lengths).items(kernel.body))


def union(values: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """The dims of any of the values, each once."""
    return tuple(dict.fromkeys(dim for value in values if value is not None for dim in value.dims))


class _Plain:
    def __init__(self, kernel: ir.Kernel, lengths: Mapping[str, int]) -> None:
        self._lengths = lengths
        self._values: dict[str, ir.Value] = {}
        self._truths: dict[str, bool] = {}
        self._loaded: set[str] = set()

    def items(self, body: Sequence[ir.Stmt]) -> tuple[Item, ...]:
        found: list[Item] = []
        for stmt in body:
            match stmt:
                case ir.Let(value, op):
                    found += self._define(value, op)
                case ir.Store(tensor, index, value, mask):
                    if mask is not None and self._truth(mask) is False:
                        continue
                    store = ir.Store(tensor, self._all(index), self._plain(value), self._mask(mask))
                    found.append(Put(store, union((*store.index, store.value, store.mask))))
                case ir.For():
                    found.append(self._blocks(stmt))
        return tuple(found)

    def _plain(self, value: ir.Value) -> ir.Value:
        return self._values[value.name]

    def _all(self, values: Iterable[ir.Value]) -> tuple[ir.Value, ...]:
        return tuple(map(self._plain, values))

    def _truth(self, value: ir.Value) -> bool | None:
        return self._truths.get(self._plain(value).name)

    def _mask(self, mask: ir.Value | None) -> ir.Value | None:
        return None if mask is None or self._truth(mask) else self._plain(mask)

    def _blocks(self, loop: ir.For[ir.Stmt]) -> Blocks:
        inits = [self._plain(carried.init) for carried in loop.carried]
        for carried in loop.carried:
            self._values[carried.value.name] = carried.value
        items = self.items(loop.body)
        following = tuple(
            ir.Carried(item.value, init, self._plain(item.next))
            for item, init in zip(loop.carried, inits, strict=True)
        )
        start, stop = self._plain(loop.start), self._plain(loop.stop)
        return Blocks(replace(loop, start=start, stop=stop, carried=following, body=()), items)

    # Definitions -----------------------------------------------------------------------------------

    def _define(self, value: ir.Value, op: ir.Op) -> list[Item]:
        match op:
            case ir.Align(source):
                self._values[value.name] = self._plain(source)
                return []
            case ir.Bound():
                return self._known(value, True)
            case ir.Constant(number) | ir.Fill(number):
                if value.dtype == "bool":
                    return self._known(value, bool(number))
                return self._keep(value, ir.Constant(number), ())
            case ir.Elementwise("and" | "or" | "not" as fn, args) if any(
                self._truth(arg) is not None for arg in args
            ):
                return self._logical(value, fn, args)
            case ir.Elementwise("where", (condition, left, right)) if self._truth(condition) is not None:
                self._values[value.name] = self._plain(left if self._truth(condition) else right)
                return []
            case ir.Elementwise(fn, args):
                kept = self._all(args)
                return self._keep(value, ir.Elementwise(fn, kept), union(kept))
            case ir.Cast(source, written):
                kept_one = self._plain(source)
                if kept_one.dtype == value.dtype and not written:
                    self._values[value.name] = kept_one
                    return []
                return self._keep(value, ir.Cast(kept_one, written), kept_one.dims)
            case ir.LoadTile(tensor, index, mask, other):
                if mask is not None and self._truth(mask) is False:
                    return self._keep(value, ir.Constant(other), ())
                load = ir.LoadTile(tensor, self._all(index), self._mask(mask), other)
                return self._keep(value, load, union((*load.index, load.mask)))
            case ir.Search(tensor, index, place, stop, target, right, dtype):
                search = ir.Search(
                    tensor, self._all(index), place, self._plain(stop), self._plain(target), right, dtype
                )
                return self._keep(value, search, ())
            case ir.ReduceTile(fold, source, axis):
                kept_one = self._plain(source)
                return self._keep(value, ir.ReduceTile(fold, kept_one, axis), kept_one.dims, axis)
            case ir.FoldTile(fold, sources, axis):
                kept = self._all(sources)
                return self._keep(value, ir.FoldTile(fold, kept, axis), union(kept), axis)
            case ir.RankTile(fold, sources, axis, ranks):
                return self._whole(value, ir.RankTile(fold, self._all(sources), axis, ranks), ranks)
            case ir.MergeTile(fold, left, right, ranks):
                return self._whole(value, ir.MergeTile(fold, self._all(left), self._all(right), ranks), ranks)
            case ir.Dot():
                return self._dot(value, op)
            case ir.Positions(axis) | ir.Lanes(axis):
                return self._keep(value, op, (axis,))
            case ir.Start(axis):
                return self._keep(value, op, ())
            case _:
                return self._keep(value, op, ())

    def _keep(self, value: ir.Value, op: ir.Op, dims: Sequence[str], folded: str | None = None) -> list[Item]:
        own = tuple(dim for dim in dims if dim != folded)
        around = own if folded is None else (*own, folded)
        self._values[value.name] = replace(value, dims=own)
        if isinstance(op, ir.LoadTile):
            self._loaded.add(value.name)
        return [Define(self._values[value.name], op, around)]

    def _whole(self, value: ir.Value, op: ir.RankTile | ir.MergeTile, ranks: str) -> list[Item]:
        """A list, which is made at once along its ranks."""
        self._values[value.name] = value
        return [Define(value, op, tuple(dim for dim in value.dims if dim != ranks))]

    def _dot(self, value: ir.Value, op: ir.Dot) -> list[Item]:
        """A matrix product, which is made at once but for the dims that both operands have."""
        self._values[value.name] = value
        left, right = self._plain(op.left), self._plain(op.right)
        batch = tuple(dim for dim in value.dims if dim in op.left.dims and dim in op.right.dims)
        accumulator = None if op.accumulator is None else self._plain(op.accumulator)
        masks = (self._mask(op.left_mask), self._mask(op.right_mask))
        columns = prod(self._lengths[dim] for dim in value.dims if dim not in op.left.dims)
        if set(op.left.dims) <= {*batch, op.axis} and columns < FEW_COLUMNS and masks == (None, None):
            return self._sum_of_products(value, left, right, op.axis, accumulator)
        if accumulator is not None and accumulator.name in self._loaded:
            # It would be copied to where the product is made: it is rather added where the product is read.
            made = replace(value, name=f"{value.name}%product")
            total = replace(value, dims=union((made, accumulator)))
            self._values[value.name] = total
            return [
                Define(made, ir.Dot(left, right, op.axis, None, *masks), batch),
                Define(total, ir.Elementwise("add", (made, accumulator)), total.dims),
            ]
        return [Define(value, ir.Dot(left, right, op.axis, accumulator, *masks), batch)]

    def _sum_of_products(
        self, value: ir.Value, left: ir.Value, right: ir.Value, axis: str, accumulator: ir.Value | None
    ) -> list[Item]:
        """A product of a vector and a matrix of few columns as a loop, which others may share."""
        items: list[Item] = []
        sides = []
        for side, operand in enumerate((left, right)):
            if operand.dtype != value.dtype:
                wide = ir.Value(f"{value.name}%side{side}", operand.dims, value.dtype)
                items.append(Define(wide, ir.Cast(operand), operand.dims))
                operand = wide
            sides.append(operand)
        dims = union(sides)
        product = ir.Value(f"{value.name}%product", dims, value.dtype)
        items.append(Define(product, ir.Elementwise("mul", tuple(sides)), dims))
        own = tuple(dim for dim in dims if dim != axis)
        total = ir.Value(value.name if accumulator is None else f"{value.name}%sum", own, value.dtype)
        items.append(Define(total, ir.ReduceTile("sum", product, axis), (*own, axis)))
        if accumulator is not None:
            both = (accumulator, total)
            total = replace(value, dims=union(both))
            items.append(Define(total, ir.Elementwise("add", both), total.dims))
        self._values[value.name] = total
        return items

    def _known(self, value: ir.Value, truth: bool) -> list[Item]:
        self._truths[value.name] = truth
        self._values[value.name] = replace(value, dims=())
        return [Define(self._values[value.name], ir.Constant(truth), ())]

    def _logical(self, value: ir.Value, fn: str, args: tuple[ir.Value, ...]) -> list[Item]:
        """A logical function of conditions of which some are known."""
        truths = [self._truth(arg) for arg in args]
        decides = fn == "or"
        if fn == "not":
            return self._known(value, not truths[0])
        if decides in truths:
            return self._known(value, decides)
        unknown = [arg for arg, truth in zip(args, truths, strict=True) if truth is None]
        if not unknown:
            return self._known(value, not decides)
        self._values[value.name] = self._plain(unknown[0])
        return []
