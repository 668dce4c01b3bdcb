"""Writes at positions that a tensor holds: every number of the result looks for what goes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eqfuse.terms.integer_terms import plus, times
from eqfuse.terms.nodes import Const, Expr, call
from eqfuse.torch.operators.indices import broadcast_shape
from eqfuse.torch.operators.pointwise import cast
from eqfuse.torch.operators.reductions import dropped, outermost
from eqfuse.torch.operators.table import (
    Node,
    Unsupported,
    both,
    broadcast,
    elementwise,
    number,
    operator,
    stored,
    truth,
)
from eqfuse.torch.operators.views import reshaped
from eqfuse.torch.positions import Position, Size, axes_read
from eqfuse.torch.values import Layout, Value, axes_in, folded, position

Places = Sequence[Position]


@dataclass(frozen=True)
class Write:
    """Numbers of a shape that go to positions of `x`: `goes` says whether the one at `q` goes to position `p`, which is
    told by the dimensions `keys` of `x`; `given` is that number. Where `within` does not hold of `p` none goes there. `plain` is
    a dimension of `x` where only the one at the same position may go, if there is any."""

    x: Value
    shape: Sequence[Size]
    layout: Layout
    goes: Callable[[Places, Places], Expr]
    given: Callable[[Places, Places], Expr]
    keys: Sequence[int]
    plain: int | None = None
    within: Callable[[Places], Expr] = lambda _: Const(True)

    def at(self, q: Places, p: Places) -> Expr:
        """Whether the number at `q` goes to position `p`."""
        return both(self.within(p), self.goes(q, p))


@dataclass(frozen=True)
class Fold:
    """How the numbers that go to one position are folded (`op`), and joined with what stands there (`join`): if `with_own`, or
    else where none goes there. The mean is a sum that is divided by how many there are."""

    op: str
    join: str
    is_mean: bool = False
    with_own: bool = True

    def nothing(self, x: Value) -> Expr:
        """The fold of no numbers of a value's dtype."""
        return outermost(x, self.op) if self.op in ("max", "min") else Const(1 if self.op == "prod" else 0)


SUM = Fold("sum", "add")

FOLDS = {
    "add": SUM,
    "sum": SUM,
    "mean": Fold("sum", "add", is_mean=True),
    "multiply": Fold("prod", "mul"),
    "prod": Fold("prod", "mul"),
    "amax": Fold("max", "maximum"),
    "amin": Fold("min", "minimum"),
}
"""By torch's names."""


def written(node: Node, write: Write, fold: Fold | None = None) -> Value:
    """The value with the numbers in it, or folded with them. Without a fold the last of several that go to one position stays."""
    x, writer = write.x, node.writer

    def over(op: str, p: Places, body: Callable[[Places], Expr]) -> Expr:
        groups = writer.axes(write.shape, write.layout, axes_read(p))
        return folded(op, axes_in(groups), body([position(group) for group in groups]))

    def counted(q: Places) -> Expr:
        found: Expr = Const(0)
        for place, size in zip(q, write.shape, strict=True):
            found = plus(times(found, writer.size_text(size)), writer.radix.flat(place))
        return found

    def result(chosen: Callable[[Places], Expr]) -> Value:
        def read(positions: tuple[Position, ...]) -> Expr:
            found = chosen(positions)
            return stored(x.dtype, found)

        return Value(x.shape, x.dtype, x.layout, read)

    if write.plain is not None:
        (size,), dimension = write.shape, write.plain

        def direct(p: Places) -> Expr:
            q = [p[dimension]]
            held = write.goes(q, p)
            if not writer.agree(size, x.shape[dimension]):
                held = both(call("lt", writer.radix.flat(p[dimension]), writer.size_text(size)), held)
            own, given = number(x, x.at(p)), write.given(q, p)
            if fold is not None:
                return call(fold.join, own, call("where", held, given, fold.nothing(x)))
            return given if held == Const(True) else call("where", held, given, own)

        return result(direct)
    if fold is not None:
        nothing = fold.nothing(x)

        def joined_with_own(p: Places) -> Expr:
            found = over(fold.op, p, lambda q: call("where", write.at(q, p), write.given(q, p), nothing))
            own = number(x, x.at(p))
            joined = call(fold.join, own, found) if fold.with_own else found
            if fold.with_own and not fold.is_mean:
                return joined
            count = over("sum", p, lambda q: call("where", write.at(q, p), Const(1), Const(0)))
            if fold.is_mean:
                among = call("add", count, Const(1)) if fold.with_own else count
                joined = call("div" if x.is_real else "floordiv", joined, among)
            return call("where", call("gt", count, Const(0)), joined, own)

        return result(joined_with_own)
    groups = writer.axes([x.shape[d] for d in write.keys], tuple(x.layout[d] for d in write.keys))
    full: list[Position] = [()] * x.rank
    for d, group in zip(write.keys, groups, strict=True):
        full[d] = position(group)
    like = Value(tuple(x.shape[d] for d in write.keys), x.dtype, groups, x.read)
    latest = over("max", full, lambda q: call("where", write.at(q, full), counted(q), Const(-1)))
    last = writer.defined(like, groups, latest, "last")

    def is_last(q: Places, p: Places, at: Expr) -> Expr:
        return both(write.within(p), call("eq", counted(q), at))

    def choice(p: Places) -> Expr:
        at = last.at([p[d] for d in write.keys])
        found = over("sum", p, lambda q: call("where", is_last(q, p, at), write.given(q, p), Const(0)))
        return call("where", call("lt", at, Const(0)), number(x, x.at(p)), found)

    return result(choice)


def _along(
    node: Node, x: Value, index: Value, source: Value, fold: Fold | None = None, scale: Expr | None = None
) -> Value:
    """A value with numbers that go to a position of one dimension that an index of one dimension, or of all, holds."""
    x, index = (value if value.rank else reshaped(node, value, [1]) for value in (x, index))
    dimension = node.get("dim", 0) % x.rank
    is_list = index.rank == 1

    def at(q: Places, p: Places) -> Places:
        return [*p[:dimension], *q, *p[dimension + 1 :]]

    def goes(q: Places, p: Places) -> Expr:
        return call("eq", index.at(q if is_list else at(q, p)), node.writer.radix.flat(p[dimension]))

    def within(p: Places) -> Expr:
        held: Expr = Const(True)
        for d, (own, size) in enumerate(zip(index.shape, x.shape, strict=True)) if not is_list else ():
            if d != dimension and not node.writer.agree(own, size):
                held = both(held, call("lt", node.writer.radix.flat(p[d]), node.writer.size_text(own)))
        return held

    def given(q: Places, p: Places) -> Expr:
        found = number(source, source.at(at(q, p) if source.rank else ()))
        return found if scale is None else call("mul", scale, found)

    place = 0 if is_list else dimension
    shape, layout = (index.shape[place],), (index.layout[place],)
    keys = (dimension,) if is_list else tuple(range(x.rank))
    return dropped(node, written(node, Write(x, shape, layout, goes, given, keys, within=within), fold))


@operator("scatter", "index_copy", "index_fill")
def _(node: Node) -> Value:
    x = node.value("self")
    source = next(node.value(name) for name in ("src", "source", "value") if node.has(name))
    fold = FOLDS[node.given["reduce"]] if node.has("reduce") else None
    return _along(node, x, node.value("index"), cast(source, x.dtype), fold)


@operator("scatter_reduce", "index_reduce")
def _(node: Node) -> Value:
    x, source = node.value("self"), node.value("src" if node.has("src") else "source")
    fold = replace(FOLDS[node.given["reduce"]], with_own=node.get("include_self", True))
    return _along(node, x, node.value("index"), source, fold)


@operator("scatter_add", "index_add")
def _(node: Node) -> Value:
    source = node.value("src" if node.has("src") else "source")
    alpha = node.get("alpha", 1)
    scale = None if alpha == 1 else node.value("alpha").at(())
    return _along(node, node.value("self"), node.value("index"), source, SUM, scale)


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
    return written(node, write, SUM if node.get("accumulate", False) else None)


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
        return stored(x.dtype, found)

    return Value(x.shape, x.dtype, x.layout, read)
