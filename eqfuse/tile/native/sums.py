"""Sums of matrix products, as of a convolution, as one product of which several axes are folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from eqfuse.tile.native.nodes import Blocks, Define, Item, Put, SumOfDots
from eqfuse.tile.native.order import flat
from eqfuse.tile.nodes import Constant, Dot, LoadTile, ReduceTile, Value
from eqfuse.tile.walk import operands


def with_sums_of_dots(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Sums of matrix products of plain tiles of tensors, which nothing else reads, as one product of more folded axes."""
    every = list(flat(items))
    read = Counter(value.name for item in every for value in _reads(item))
    blocks = list(_blocks(items))
    read.update(v.name for each in blocks for c in each.loop.carried for v in (c.init, c.next))
    carried = {c.value.name for each in blocks for c in each.loop.carried}
    defined = {item.value.name: item for item in every if isinstance(item, Define)}

    def is_nothing(value: Value | None) -> bool:
        made = None if value is None or value.name in carried else defined[value.name].op
        return value is None or (isinstance(made, Constant) and not made.number)

    def is_tile(value: Value) -> bool:
        made = None if value.name in carried else defined[value.name].op
        return isinstance(made, LoadTile) and made.mask is None

    def among(body: tuple[Item, ...]) -> tuple[Item, ...]:
        found: dict[str, Item] = {}
        for place, item in enumerate(body):
            match item:
                case Blocks(loop, inner):
                    found[f"{place} {loop.axis}"] = Blocks(loop, among(inner))
                case Define(total, ReduceTile("sum", part, axis), _) if read[part.name] == 1:
                    made = found.get(part.name)
                    match made:
                        case Define(_, Dot(left, right) as dot, dims) if (
                            axis in dims
                            and (dot.left_mask, dot.right_mask) == (None, None)
                            and total.dtype == part.dtype
                            and is_nothing(dot.accumulator)
                            and is_tile(left)
                            and is_tile(right)
                        ):
                            del found[part.name]
                            beside = dot.beside if isinstance(dot, SumOfDots) else ()
                            op = SumOfDots(left, right, dot.axis, None, beside=(*beside, axis))
                            item = Define(total, op, tuple(dim for dim in dims if dim != axis))
                    found[total.name] = item
                case Define(value):
                    found[value.name] = item
                case Put():
                    found[f"{place}"] = item
        return tuple(found.values())

    return among(items)


def _blocks(items: Iterable[Item]) -> Iterator[Blocks]:
    for item in items:
        if isinstance(item, Blocks):
            yield item
            yield from _blocks(item.items)


def _reads(item: Define | Put) -> tuple[Value, ...]:
    return operands(item.op if isinstance(item, Define) else item.store)
