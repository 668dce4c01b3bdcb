"""Makes the operands of a kernel plain: see `nodes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from eqfuse.tile.native.nodes import Blocks, Define, Item, Put
from eqfuse.tile.native.sums import with_sums_of_dots
from eqfuse.tile.nodes import (
    Align,
    Bound,
    Carried,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Fill,
    FoldTile,
    For,
    Kernel,
    Lanes,
    Let,
    LoadTile,
    MergeTile,
    Op,
    Positions,
    RankTile,
    ReduceTile,
    Search,
    Start,
    Stmt,
    Store,
    Value,
)

FEW_COLUMNS = 16
"""Columns of a matrix below which a vector times it is a loop: the library adds one product after the other."""


def plain(kernel: Kernel, lengths: Mapping[str, int]) -> tuple[Item, ...]:
    """The statements of a kernel with plain operands, in order. `lengths` are positions of a block: whether products are
    work for a matrix library depends on them."""
    return with_sums_of_dots(_Plain(kernel, lengths).items(kernel.body))


def union(values: Iterable[Value | None]) -> tuple[str, ...]:
    """The dims of any of the values, each once."""
    return tuple(dict.fromkeys(dim for value in values if value is not None for dim in value.dims))


class _Plain:
    def __init__(self, kernel: Kernel, lengths: Mapping[str, int]) -> None:
        self._lengths = lengths
        self._values: dict[str, Value] = {}
        self._truths: dict[str, bool] = {}
        self._loaded: set[str] = set()

    def items(self, body: Sequence[Stmt]) -> tuple[Item, ...]:
        found: list[Item] = []
        for stmt in body:
            match stmt:
                case Let(value, op):
                    found += self._define(value, op)
                case Store(tensor, index, value, mask):
                    if mask is not None and self._truth(mask) is False:
                        continue
                    store = Store(tensor, self._all(index), self._plain(value), self._mask(mask))
                    found.append(Put(store, union((*store.index, store.value, store.mask))))
                case For():
                    found.append(self._blocks(stmt))
        return tuple(found)

    def _plain(self, value: Value) -> Value:
        return self._values[value.name]

    def _all(self, values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(map(self._plain, values))

    def _truth(self, value: Value) -> bool | None:
        return self._truths.get(self._plain(value).name)

    def _mask(self, mask: Value | None) -> Value | None:
        return None if mask is None or self._truth(mask) else self._plain(mask)

    def _blocks(self, loop: For[Stmt]) -> Blocks:
        inits = [self._plain(carried.init) for carried in loop.carried]
        for carried in loop.carried:
            self._values[carried.value.name] = carried.value
        items = self.items(loop.body)
        following = tuple(
            Carried(item.value, init, self._plain(item.next))
            for item, init in zip(loop.carried, inits, strict=True)
        )
        start, stop = self._plain(loop.start), self._plain(loop.stop)
        return Blocks(replace(loop, start=start, stop=stop, carried=following, body=()), items)

    # Definitions -----------------------------------------------------------------------------------

    def _define(self, value: Value, op: Op) -> list[Item]:
        match op:
            case Align(source):
                self._values[value.name] = self._plain(source)
                return []
            case Bound():
                return self._known(value, True)
            case Constant(number) | Fill(number):
                if value.dtype == "bool":
                    return self._known(value, bool(number))
                return self._keep(value, Constant(number), ())
            case Elementwise("and" | "or" | "not" as fn, args) if any(
                self._truth(arg) is not None for arg in args
            ):
                return self._logical(value, fn, args)
            case Elementwise("where", (condition, left, right)) if self._truth(condition) is not None:
                self._values[value.name] = self._plain(left if self._truth(condition) else right)
                return []
            case Elementwise(fn, args):
                kept = self._all(args)
                return self._keep(value, Elementwise(fn, kept), union(kept))
            case Cast(source, written):
                kept_one = self._plain(source)
                if kept_one.dtype == value.dtype and not written:
                    self._values[value.name] = kept_one
                    return []
                return self._keep(value, Cast(kept_one, written), kept_one.dims)
            case LoadTile(tensor, index, mask, other):
                if mask is not None and self._truth(mask) is False:
                    return self._keep(value, Constant(other), ())
                load = LoadTile(tensor, self._all(index), self._mask(mask), other)
                return self._keep(value, load, union((*load.index, load.mask)))
            case Search(tensor, index, place, stop, target, right):
                search = Search(
                    tensor, self._all(index), place, self._plain(stop), self._plain(target), right
                )
                return self._keep(value, search, ())
            case ReduceTile(fold, source, axis):
                kept_one = self._plain(source)
                return self._keep(value, ReduceTile(fold, kept_one, axis), kept_one.dims, axis)
            case FoldTile(fold, sources, axis):
                kept = self._all(sources)
                return self._keep(value, FoldTile(fold, kept, axis), union(kept), axis)
            case RankTile(fold, sources, axis, ranks):
                return self._whole(value, RankTile(fold, self._all(sources), axis, ranks), ranks)
            case MergeTile(fold, left, right, ranks):
                return self._whole(value, MergeTile(fold, self._all(left), self._all(right), ranks), ranks)
            case Dot():
                return self._dot(value, op)
            case Positions(axis) | Lanes(axis):
                return self._keep(value, op, (axis,))
            case Start(axis):
                return self._keep(value, op, ())
            case _:
                return self._keep(value, op, ())

    def _keep(self, value: Value, op: Op, dims: Sequence[str], folded: str | None = None) -> list[Item]:
        own = tuple(dim for dim in dims if dim != folded)
        around = own if folded is None else (*own, folded)
        self._values[value.name] = replace(value, dims=own)
        if isinstance(op, LoadTile):
            self._loaded.add(value.name)
        return [Define(self._values[value.name], op, around)]

    def _whole(self, value: Value, op: RankTile | MergeTile, ranks: str) -> list[Item]:
        """A list, which is made at once along its ranks."""
        self._values[value.name] = value
        return [Define(value, op, tuple(dim for dim in value.dims if dim != ranks))]

    def _dot(self, value: Value, op: Dot) -> list[Item]:
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
                Define(made, Dot(left, right, op.axis, None, *masks), batch),
                Define(total, Elementwise("add", (made, accumulator)), total.dims),
            ]
        return [Define(value, Dot(left, right, op.axis, accumulator, *masks), batch)]

    def _sum_of_products(
        self, value: Value, left: Value, right: Value, axis: str, accumulator: Value | None
    ) -> list[Item]:
        """A product of a vector and a matrix of few columns as a loop, which others may share."""
        items: list[Item] = []
        sides = []
        for side, operand in enumerate((left, right)):
            if operand.dtype != value.dtype:
                wide = Value(f"{value.name}%side{side}", operand.dims, value.dtype)
                items.append(Define(wide, Cast(operand), operand.dims))
                operand = wide
            sides.append(operand)
        dims = union(sides)
        product = Value(f"{value.name}%product", dims, value.dtype)
        items.append(Define(product, Elementwise("mul", tuple(sides)), dims))
        own = tuple(dim for dim in dims if dim != axis)
        total = Value(value.name if accumulator is None else f"{value.name}%sum", own, value.dtype)
        items.append(Define(total, ReduceTile("sum", product, axis), (*own, axis)))
        if accumulator is not None:
            both = (accumulator, total)
            total = replace(value, dims=union(both))
            items.append(Define(total, Elementwise("add", both), total.dims))
        self._values[value.name] = total
        return items

    def _known(self, value: Value, truth: bool) -> list[Item]:
        self._truths[value.name] = truth
        self._values[value.name] = replace(value, dims=())
        return [Define(self._values[value.name], Constant(truth), ())]

    def _logical(self, value: Value, fn: str, args: tuple[Value, ...]) -> list[Item]:
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
