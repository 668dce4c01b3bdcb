"""Writes at positions that a tensor holds: every number of the result looks for what goes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eqfuse.terms.nodes import Axis, Const, Expr, Reduce, call, walk
from eqfuse.torch.operators.indices import broadcast_shape
from eqfuse.torch.operators.pointwise import cast
from eqfuse.torch.operators.table import (
    Node,
    Unsupported,
    both,
    broadcast,
    elementwise,
    number,
    operator,
    truth,
)
from eqfuse.torch.positions import Position, Size, plus, times
from eqfuse.torch.values import Layout, Value, axes_in, position

Places = Sequence[Position]


@dataclass(frozen=True)
class Write:
    """Numbers of a shape that go to positions of `x`: `goes` says whether the one at `q` goes to position `p`, which is
    told by the dimensions `keys` of `x`; `given` is that number. `plain` is a dimension of `x` where only the one at the
    same position may go, if there is any."""

    x: Value
    shape: Sequence[Size]
    layout: Layout
    goes: Callable[[Places, Places], Expr]
    given: Callable[[Places, Places], Expr]
    keys: Sequence[int]
    plain: int | None = None


def written(node: Node, write: Write, *, adds: bool = False) -> Value:
    """The value with the numbers in it, or added to it. Of several that go to one position the last stays."""
    x, writer = write.x, node.writer

    def over(op: str, p: Places, body: Callable[[Places], Expr]) -> Expr:
        used = [
            axis.name for place in p for part in place for axis in walk(part.index) if isinstance(axis, Axis)
        ]
        groups = writer.axes(write.shape, write.layout, used)
        found = body([position(group) for group in groups])
        for axis in reversed(axes_in(groups)):
            found = Reduce(op, axis, found)
        return found

    def counted(q: Places) -> Expr:
        found: Expr = Const(0)
        for place, size in zip(q, write.shape, strict=True):
            found = plus(times(found, writer.size_text(size)), writer.radix.flat(place))
        return found

    def result(chosen: Callable[[Places], Expr]) -> Value:
        def read(positions: tuple[Position, ...]) -> Expr:
            found = chosen(positions)
            return call("ne", found, Const(0)) if x.is_truth else found

        return Value(x.shape, x.dtype, x.layout, read)

    if write.plain is not None:
        (size,), dimension = write.shape, write.plain

        def direct(p: Places) -> Expr:
            q = [p[dimension]]
            held = write.goes(q, p)
            if not writer.agree(size, x.shape[dimension]):
                held = both(call("lt", writer.radix.flat(p[dimension]), writer.size_text(size)), held)
            own, given = number(x, x.at(p)), write.given(q, p)
            if adds:
                return call("add", own, call("where", held, given, Const(0)))
            return given if held == Const(True) else call("where", held, given, own)

        return result(direct)
    if adds:
        return result(
            lambda p: call(
                "add", number(x, x.at(p)),
                over("sum", p, lambda q: call("where", write.goes(q, p), write.given(q, p), Const(0))),
            )
        )  # fmt: skip
    groups = writer.axes([x.shape[d] for d in write.keys], tuple(x.layout[d] for d in write.keys))
    full: list[Position] = [()] * x.rank
    for d, group in zip(write.keys, groups, strict=True):
        full[d] = position(group)
    like = Value(tuple(x.shape[d] for d in write.keys), x.dtype, groups, x.read)
    latest = over("max", full, lambda q: call("where", write.goes(q, full), counted(q), Const(-1)))
    last = writer.defined(like, groups, latest, "last")

    def choice(p: Places) -> Expr:
        at = last.at([p[d] for d in write.keys])
        found = over(
            "sum", p, lambda q: call("where", call("eq", counted(q), at), write.given(q, p), Const(0))
        )
        return call("where", call("lt", at, Const(0)), number(x, x.at(p)), found)

    return result(choice)


def _along(node: Node, x: Value, index: Value, source: Value | None, scale: Expr | None = None) -> Write:
    """Numbers that go to a position of one dimension that an index of one dimension, or of all, holds."""
    dimension = node.get("dim", 0) % max(x.rank, 1)
    if x.rank == 0:
        raise Unsupported("a write to a tensor without axes")
    is_list = index.rank <= 1

    def at(q: Places, p: Places) -> Places:
        return [*p[:dimension], *q, *p[dimension + 1 :]]

    def goes(q: Places, p: Places) -> Expr:
        held: Expr = call("eq", index.at(q if is_list else at(q, p)), node.writer.radix.flat(p[dimension]))
        if is_list:
            return held
        for d, (own, size) in enumerate(zip(index.shape, x.shape, strict=True)):
            if d != dimension and not node.writer.agree(own, size):
                held = both(call("lt", node.writer.radix.flat(p[d]), node.writer.size_text(own)), held)
        return held

    def given(q: Places, p: Places) -> Expr:
        found = number(source, source.at(at(q, p) if source.rank else ())) if source is not None else Const(0)
        return found if scale is None else call("mul", scale, found)

    place = 0 if is_list else dimension
    shape, layout = (index.shape[place],), (index.layout[place],)
    keys = (dimension,) if is_list else tuple(range(x.rank))
    return Write(x, shape, layout, goes, given, keys)


@operator("scatter", "index_copy", "index_fill")
def _(node: Node) -> Value:
    x = node.value("self")
    if node.has("reduce"):
        raise Unsupported(f"scatter with reduce={node.given['reduce']!r}")
    source = next(node.value(name) for name in ("src", "source", "value") if node.has(name))
    return written(node, _along(node, x, node.value("index"), cast(source, x.dtype)))


@operator("scatter_add", "index_add")
def _(node: Node) -> Value:
    source = node.value("src" if node.has("src") else "source")
    alpha = node.get("alpha", 1)
    scale = None if alpha == 1 else node.value("alpha").at(())
    return written(node, _along(node, node.value("self"), node.value("index"), source, scale), adds=True)


@operator("index_put", "_unsafe_index_put")
def _(node: Node) -> Value:
    x, values = node.value("self"), cast(node.value("values"), node.dtype)
    indices = [*node.given["indices"], *[None] * (x.rank - len(node.given["indices"]))]
    if any(index is not None and index.is_truth for index in indices):
        return _where_mask(node, x, indices, values)
    held = [d for d, index in enumerate(indices) if index is not None]
    shape = broadcast_shape([indices[d].shape for d in held])
    together = held == list(range(held[0], held[-1] + 1))
    front = held[0] if together else 0
    rest = [d for d in range(x.rank) if d not in held]
    radix, text = node.writer.radix, node.writer.size_text
    wide = {d: elementwise(shape, indices[d].dtype, [indices[d]], lambda e: e) for d in held}
    layout = next((each.layout for each in wide.values() if None not in each.layout), (None,) * len(shape))
    trial = node.writer.axes(shape, layout)
    plain = None
    if len(shape) == 1 and trial[0]:
        plain = next(
            (d for d in held if wide[d].at([position(trial[0])]) is radix.flat(position(trial[0]))), None
        )

    def goes(q: Places, p: Places) -> Expr:
        found: Expr = Const(True)
        for d in held:
            if d != plain:
                place = wide[d].at(q)
                place = call(
                    "where", call("lt", place, Const(0)), call("add", place, text(x.shape[d])), place
                )
                found = both(found, call("eq", place, radix.flat(p[d])))
        return found

    own = [x.shape[d] for d in rest]
    own[front:front] = shape
    _, moved = broadcast(values, own)

    def given(q: Places, p: Places) -> Expr:
        places = [p[d] for d in rest]
        places[front:front] = q
        return number(values, values.at(moved(places)))

    write = Write(x, shape, layout, goes, given, held, plain)
    return written(node, write, adds=node.get("accumulate", False))


def _where_mask(node: Node, x: Value, indices: Sequence[Value | None], values: Value) -> Value:
    """A value with numbers that do not depend on how many there are where a mask holds."""
    (place, mask), *others = [(d, index) for d, index in enumerate(indices) if index is not None]
    behind = x.rank - place - mask.rank
    counted = values.shape[: values.rank - behind]
    if others or node.get("accumulate", False) or any(size != 1 for size in counted):
        raise Unsupported("a write at a mask of as many numbers as it selects, which depends on data")

    def read(p: tuple[Position, ...]) -> Expr:
        tail = p[x.rank - behind :] if behind else ()
        spot = [*[()] * len(counted), *tail][-values.rank :] if values.rank else ()
        spot = [() if size == 1 else q for size, q in zip(values.shape, spot, strict=True)]
        held, given = mask.at(p[place : place + mask.rank]), values.at(spot)
        found = call("where", truth(mask, held), number(values, given), number(x, x.at(p)))
        return call("ne", found, Const(0)) if x.is_truth else found

    return Value(x.shape, x.dtype, x.layout, read)
