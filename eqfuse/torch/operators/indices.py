"""Reads at positions that a tensor holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eqfuse.terms.expressions import is_index
from eqfuse.terms.nodes import Axis, Const, Expr, Load, call, walk
from eqfuse.torch.operators.reductions import log_softmax, reduced
from eqfuse.torch.operators.table import (
    Made,
    Node,
    Unsupported,
    elementwise,
    number,
    operator,
    stored,
)
from eqfuse.torch.operators.views import reshaped
from eqfuse.torch.positions import Part, Position, axes_read
from eqfuse.torch.values import Layout, Value, axes_in, folded, position


def read_at(node: Node, x: Value, dimension: int, place: Expr, positions: Sequence[Position]) -> Expr:
    """What stands in a value where `place` is the position in one dimension, `positions` those in the others. A position
    that the program itself computes picks one of all positions, by a sum."""
    size = x.shape[dimension]
    computed = {line_name for line in node.writer.lines for line_name in line.names}
    if is_index(place) and not any(
        isinstance(part, Load) and part.tensor in computed for part in walk(place)
    ):
        return x.at([*positions[:dimension], (Part(place, size),), *positions[dimension + 1 :]])
    used = axes_read(positions)
    used += [part.name for part in walk(place) if isinstance(part, Axis)]
    layout = x.layout[dimension]
    group = node.writer.axes((size,), (layout,), used)[0]
    spot = position(group)
    held = call("eq", node.writer.radix.flat(spot), place)
    there = number(x, x.at([*positions[:dimension], spot, *positions[dimension + 1 :]]))
    return stored(x.dtype, folded("sum", axes_in([group]), call("where", held, there, Const(0))))


@operator("embedding")
def _(node: Node) -> Value:
    weight, ids = node.value("weight"), node.value("indices")
    layout: Layout = (*ids.layout, weight.layout[1])

    def read(positions: tuple[Position, ...]) -> Expr:
        return read_at(node, weight, 0, ids.at(positions[:-1]), [(), positions[-1]])

    return Value(node.shape, node.dtype, layout, read)


@operator("gather", "take_along_dim")
def _(node: Node) -> Value:
    x, index = node.value("self"), node.value("index")
    if not x.rank:
        return reshaped(node, x, node.shape)
    dimension = node.given["dim"] % x.rank

    def read(positions: tuple[Position, ...]) -> Expr:
        return read_at(node, x, dimension, index.at(positions), positions)

    return Value(node.shape, node.dtype, index.layout, read)


@operator("index_select")
def _(node: Node) -> Value:
    x, index = node.value("self"), node.value("index")
    if not x.rank:
        return reshaped(node, x, node.shape)
    dimension = node.given["dim"] % x.rank
    layout = tuple(index.layout[0] if d == dimension else digits for d, digits in enumerate(x.layout))

    def read(positions: tuple[Position, ...]) -> Expr:
        return read_at(node, x, dimension, index.at([positions[dimension]]), positions)

    return Value(node.shape, node.dtype, layout, read)


@operator("index", "_unsafe_index")
def _(node: Node) -> Value:
    x = node.value("self")
    given: list[Any] = list(node.given["indices"])
    given += [None] * (x.rank - len(given))
    held = [d for d, index in enumerate(given) if index is not None]
    if any(given[d].is_truth for d in held):
        raise Unsupported("selection by a mask, whose result has a size that depends on data")
    shape = broadcast_shape([given[d].shape for d in held])
    together = held == list(range(held[0], held[-1] + 1))
    front = held[0] if together else 0
    rest = [d for d in range(x.rank) if d not in held]
    layout: list[Any] = [x.layout[d] for d in rest]
    finest: list[Any] = [None] * len(shape)
    for d in held:
        for place, digits in enumerate(given[d].layout, start=len(shape) - given[d].rank):
            if (
                digits is not None
                and given[d].shape[place - len(shape) + given[d].rank] != 1
                and finest[place] is None
            ):
                finest[place] = digits
    layout[front:front] = finest

    def read(positions: tuple[Position, ...]) -> Expr:
        own = positions[front : front + len(shape)]
        others = [*positions[:front], *positions[front + len(shape) :]]
        places: list[Position] = [()] * x.rank
        for d, place in zip(rest, others, strict=True):
            places[d] = place
        indices = []
        for d in held:
            tensor = given[d]
            at = own[len(shape) - tensor.rank :]
            indices.append(tensor.at([() if n == 1 else p for n, p in zip(tensor.shape, at, strict=True)]))
        plain = [d for d, place in zip(held, indices, strict=True) if is_index(place)]
        if len(plain) == len(held) or len(held) == 1:
            if len(held) == 1:
                return read_at(node, x, held[0], indices[0], places)
            for d, place in zip(held, indices, strict=True):
                places[d] = (Part(place, x.shape[d]),)
            return x.at(places)
        raise Unsupported("several positions that the program computes")

    return Value(node.shape, node.dtype, tuple(layout), read)


@operator("searchsorted", "bucketize")
def _(node: Node) -> Value:
    """How many sorted numbers stand before each: those that are not at least it, or with `right` not greater."""
    x, ordered = (
        node.value("self"),
        node.value("boundaries" if "boundaries" in node.given else "sorted_sequence"),
    )
    if node.has("sorter"):
        raise Unsupported("a sequence that is sorted by positions")
    is_right = node.get("right", False) or node.get("side") == "right"
    size, layout = ordered.shape[-1], ordered.layout[-1]

    def read(positions: tuple[Position, ...]) -> Expr:
        own = x.at(positions)
        group = node.writer.axes((size,), (layout,), axes_read(positions))[0]
        places = [*(positions[:-1] if ordered.rank > 1 else ()), position(group)]
        is_behind = call("gt" if is_right else "ge", ordered.at(places), own)
        return folded("sum", axes_in([group]), call("where", is_behind, Const(0), Const(1)))

    return Value(node.shape, node.dtype, x.layout, read)


def broadcast_shape(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*wide, strict=True))


# -- losses ----------------------------------------------------------------------------------------


@operator("nll_loss_forward", "nll_loss", "nll_loss_nd", "nll_loss2d_forward", "nll_loss2d")
def _(node: Node) -> Made:
    return picked(node, node.value("self"))


@operator("cross_entropy_loss")
def _(node: Node) -> Made:
    x = node.value("self")
    return picked(node, log_softmax(node, x, (1 if x.rank > 1 else 0,)), node.get("label_smoothing", 0.0))


def picked(node: Node, x: Value, smoothing: float = 0.0) -> Made:
    """Minus the numbers that stand at the classes of a target, apart from those to ignore: each, their sum, or their mean.
    `smoothing` is the part of a class that all classes share."""
    target = node.value("target")
    dimension = 1 if x.rank > 1 else 0
    weight = node.value("weight") if node.has("weight") else None
    all_classes = x if weight is None else _weighed(x, weight, dimension)
    if target.is_real:
        return _expected(node, all_classes, target, dimension, smoothing)
    spread = reduced(node, all_classes, (dimension,), "mean", "mean") if smoothing else None
    ignored = Const(node.get("ignore_index", -100))
    reduction = node.get("reduction", 1)

    def kept(positions: tuple[Position, ...]) -> Expr:
        return call("ne", target.at(positions), ignored)

    def weighed(positions: tuple[Position, ...]) -> Expr:
        if weight is None:
            return Const(1.0)
        return read_at(node, weight, 0, target.at(positions), [()])

    def loss(positions: tuple[Position, ...]) -> Expr:
        places = [*positions[:dimension], (), *positions[dimension:]]
        found = call("neg", read_at(node, x, dimension, target.at(positions), places))
        if weight is not None:
            found = call("mul", weighed(positions), found)
        if spread is not None:
            rest = call("mul", Const(smoothing), spread.at(places))
            found = call("sub", call("mul", Const(1 - smoothing), found), rest)
        return call("where", kept(positions), found, Const(0.0))

    def count(positions: tuple[Position, ...]) -> Expr:
        return call("where", kept(positions), weighed(positions), Const(0.0))

    losses = Value(target.shape, x.dtype, target.layout, loss)
    counts = Value(target.shape, x.dtype, target.layout, count)
    every = tuple(range(target.rank))
    weights = dropped_all(node, reduced(node, counts, every, "sum", "count")) if every else counts
    if reduction == 0:
        made = losses
    else:
        made = dropped_all(node, reduced(node, losses, every, "sum", "sum")) if every else losses
        if reduction == 1:
            made = elementwise((), made.dtype, [made, weights], lambda e, n: call("div", e, n))
    return (made, weights) if len(node.shapes) == 2 else made


def _weighed(x: Value, weight: Value, dimension: int) -> Value:
    def read(positions: tuple[Position, ...]) -> Expr:
        return call("mul", weight.at([positions[dimension]]), x.at(positions))

    return Value(x.shape, x.dtype, x.layout, read)


def _expected(node: Node, x: Value, target: Value, dimension: int, smoothing: float) -> Made:
    """Cross-entropy with a target of probabilities: each, their sum, or their mean."""
    share = call("div", Const(smoothing), node.writer.size_text(x.shape[dimension]))

    def term(e: Expr, p: Expr) -> Expr:
        p = call("add", call("mul", Const(1 - smoothing), p), share) if smoothing else p
        return call("neg", call("mul", p, e))

    terms = elementwise(x.shape, x.dtype, [x, target], term)
    found = reduced(node, terms, (dimension,), "sum", "sum")
    found = reshaped(node, found, [n for d, n in enumerate(x.shape) if d != dimension])
    reduction = node.get("reduction", 1)
    if reduction == 0 or not found.rank:
        return found
    op = "mean" if reduction == 1 else "sum"
    return dropped_all(node, reduced(node, found, tuple(range(found.rank)), op, op))


def dropped_all(node: Node, kept: Value) -> Value:
    """A reduction over all dimensions, without any."""
    return reshaped(node, kept, ())
