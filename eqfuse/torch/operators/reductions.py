"""Reductions: each a definition, over axes of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eqfuse.terms.integer_terms import divided, minus
from eqfuse.terms.nodes import REDUCTIONS, Axis, Const, Expr, Reduce, call
from eqfuse.torch.operators.pointwise import cast, check_wide
from eqfuse.torch.operators.table import (
    Made,
    Node,
    Unsupported,
    both,
    either,
    elementwise,
    negated,
    number,
    operator,
    stored,
    truth,
)
from eqfuse.torch.operators.views import reshaped
from eqfuse.torch.positions import Position, axes_read
from eqfuse.torch.values import Digit, Line, Value, axes_in, folded, position, power


def kept_shape(x: Value, dimensions: Sequence[int]) -> tuple[Any, ...]:
    """The shape of a reduction that keeps the reduced dimensions, with one position each."""
    return tuple(1 if d in dimensions else size for d, size in enumerate(x.shape))


def reduced(
    node: Node,
    x: Value,
    dimensions: Sequence[int],
    op: str,
    word: str,
    *,
    body: Callable[[Expr], Expr] = lambda e: e,
    after: Callable[[Expr], Expr] = lambda e: e,
    dtype: torch.dtype | None = None,
) -> Value:
    """`op` over dimensions of a value, which are kept with one position. A built-in reduction is an expression, which
    `after` may go on from; any other is a line of its own."""
    writer = node.writer
    groups = writer.axes(x.shape, x.layout)
    inside = body(number(x, x.at([position(group) for group in groups])))
    bound = [digit.axis for d in dimensions for digit in groups[d]]
    free = tuple(() if d in dimensions else group for d, group in enumerate(groups))
    like = Value(kept_shape(x, dimensions), dtype or x.dtype, free, x.read)
    if not bound and op in ("argmax", "argmin"):
        return Value(like.shape, like.dtype, free, lambda _: Const(0))
    if not bound:
        return Value(like.shape, like.dtype, free, lambda p: after(body(number(x, x.at(p)))))
    if op in REDUCTIONS:
        return writer.defined(like, free, after(folded(op, bound, inside)), word)
    name = writer.names.definition(word)
    writer.lines.append(Line((name,), (axes_in(free),), None, (op, tuple(bound), (inside,))))
    return writer.named(name, like, free)


def dropped(node: Node, kept: Value) -> Value:
    """A reduction with the reduced dimensions kept, in the shape of the node."""
    return kept if kept.shape == node.shape else reshaped(node, kept, node.shape)


def _simple(op: str, word: str, *names: str) -> None:
    @operator(*names)
    def entry(node: Node) -> Value:
        x = node.value("self")
        if node.dtype.is_floating_point and node.dtype != x.dtype:
            x = cast(x, node.dtype)
        dimensions = node.dimensions("dim", x.rank)
        kept = reduced(node, x, dimensions, op, word, after=lambda e: stored(node.dtype, e), dtype=node.dtype)
        return dropped(node, kept)


_simple("sum", "sum", "sum")
_simple("mean", "mean", "mean")
_simple("max", "max", "amax")
_simple("min", "min", "amin")
_simple("prod", "prod", "prod")
_simple("logsumexp", "lse", "logsumexp")


def _extreme(op: str) -> None:
    @operator(op)
    def entry(node: Node) -> Made:
        if node.has("other"):
            x, y = node.value("self"), node.value("other")
            fn = {"max": "maximum", "min": "minimum"}[op]
            return elementwise(
                node.shape,
                node.dtype,
                [x, y],
                lambda a, b: stored(node.dtype, call(fn, number(x, a), number(y, b))),
            )
        x = node.value("self")
        dimensions = node.dimensions("dim", x.rank)
        values = reduced(node, x, dimensions, op, op, after=lambda e: stored(node.dtype, e), dtype=node.dtype)
        values = dropped(node, values)
        if len(node.shapes) == 1:
            return values
        places = reduced(node, x, dimensions, f"arg{op}", f"arg{op}", dtype=torch.int64)
        return values, places if places.shape == node.shapes[1] else reshaped(node, places, node.shapes[1])


_extreme("max")
_extreme("min")


def _place(op: str) -> None:
    @operator(op)
    def entry(node: Node) -> Value:
        x = node.value("self")
        if node.given.get("dim") is None or not x.rank:
            x = reshaped(node, x, [math.prod(x.shape)])
        dimensions = node.dimensions("dim", x.rank)
        if len(node.writer.axes(x.shape, x.layout)[dimensions[0]]) > 1:
            x = Value(
                x.shape,
                x.dtype,
                tuple(None if d in dimensions else g for d, g in enumerate(x.layout)),
                x.read,
            )
        return dropped(node, reduced(node, x, dimensions, op, op, dtype=torch.int64))


_place("argmax")
_place("argmin")


def _some(op: str) -> None:
    @operator(op)
    def entry(node: Node) -> Value:
        x = node.value("self")
        held = elementwise(x.shape, torch.bool, [x], lambda e: truth(x, e))
        fold, sought = ("max", 1) if op == "any" else ("min", 1)
        kept = reduced(
            node, held, node.dimensions("dim", x.rank), fold, op, after=lambda e: call("eq", e, Const(sought)),
            dtype=torch.bool,
        )  # fmt: skip
        return dropped(node, kept)


_some("any")
_some("all")


def _variance(node: Node, x: Value, dimensions: Sequence[int], correction: Any) -> tuple[Value, Value]:
    """Mean and variance, with the reduced dimensions kept."""
    mean = reduced(node, x, dimensions, "mean", "mean")
    apart = elementwise(x.shape, x.dtype, [x, mean], lambda e, m: call("sq", call("sub", e, m)))
    if correction == 0:
        return mean, reduced(node, apart, dimensions, "mean", "var")
    count = node.writer.size_text(math.prod(x.shape[dimension] for dimension in dimensions))
    if isinstance(count, Const):  # torch divides by no negative number
        divisor: Expr = Const(float(max(count.value - correction, 0)))
    else:
        divisor = call("sub", count, Const(correction))
        divisor = divisor if correction <= 1 else call("maximum", divisor, Const(0))
    return mean, reduced(node, apart, dimensions, "sum", "var", after=lambda e: call("div", e, divisor))


def _correction(node: Node) -> Any:
    if "unbiased" in node.given:
        return 1 if node.given["unbiased"] else 0
    return node.get("correction", 1)


@operator("var")
def _(node: Node) -> Value:
    x = node.value("self")
    return dropped(node, _variance(node, x, node.dimensions("dim", x.rank), _correction(node))[1])


@operator("std")
def _(node: Node) -> Value:
    x = node.value("self")
    found = _variance(node, x, node.dimensions("dim", x.rank), _correction(node))[1]
    return dropped(node, elementwise(found.shape, found.dtype, [found], lambda e: call("root", e)))


@operator("var_mean")
def _(node: Node) -> Made:
    x = node.value("self")
    mean, var = _variance(node, x, node.dimensions("dim", x.rank), _correction(node))
    return dropped(node, var), dropped(node, mean)


def _norm(node: Node, x: Value, dimensions: Sequence[int], order: float) -> Value:
    """The norm of an order, with the reduced dimensions kept."""

    def over(op: str, body: Callable[[Expr], Expr], after: Callable[[Expr], Expr] = lambda e: e) -> Value:
        return reduced(node, x, dimensions, op, "norm", body=body, after=after)

    def absolute(e: Expr) -> Expr:
        return call("abs", e)

    match order:
        case 2.0:
            return over("sum", lambda e: call("sq", e), lambda e: call("root", e))
        case 1.0:
            return over("sum", absolute)
        case 0.0:
            return over("sum", lambda e: call("where", call("ne", e, Const(0)), Const(1.0), Const(0.0)))
        case math.inf:
            return over("max", absolute)
        case _ if order == -math.inf:
            return over("min", absolute)
        case _:
            return over("sum", lambda e: power(absolute(e), order), lambda e: power(e, 1 / order))


@operator("linalg_vector_norm", "norm")
def _(node: Node) -> Value:
    x = node.value("self")
    order = float(node.get("ord", node.get("p", 2)))
    return dropped(node, _norm(node, x, node.dimensions("dim", x.rank), order))


# -- softmax and norms -----------------------------------------------------------------------------


def softmax(node: Node, x: Value, dimensions: Sequence[int], *, safe: bool = False) -> Value:
    """Numbers relative to the sum of their exponentials; with `safe` 0 where all are -inf."""
    top = reduced(node, x, dimensions, "max", "max")
    raised = elementwise(x.shape, x.dtype, [x, top], lambda e, m: call("exp", call("sub", e, m)))
    total = reduced(node, raised, dimensions, "sum", "sum")
    if not safe:
        return elementwise(x.shape, x.dtype, [raised, total], lambda e, s: call("div", e, s))
    nothing = Const(float("-inf"))
    return elementwise(
        x.shape,
        x.dtype,
        [raised, total, top],
        lambda e, s, m: call("where", call("eq", m, nothing), Const(0.0), call("div", e, s)),
    )


def _prepared(node: Node) -> tuple[Value, tuple[int, ...]]:
    x = node.value("self")
    if node.dtype != x.dtype:
        x = cast(x, node.dtype)
    return x, node.dimensions("dim", x.rank)


@operator("softmax", "_softmax")
def _(node: Node) -> Value:
    return softmax(node, *_prepared(node))


@operator("_safe_softmax")
def _(node: Node) -> Value:
    return softmax(node, *_prepared(node), safe=True)


def log_softmax(node: Node, x: Value, dimensions: Sequence[int]) -> Value:
    """The logarithm of a softmax."""
    top = reduced(node, x, dimensions, "max", "max")
    apart = elementwise(x.shape, x.dtype, [x, top], lambda e, m: call("sub", e, m))
    total = reduced(node, apart, dimensions, "sum", "sum", body=lambda e: call("exp", e))
    return elementwise(x.shape, x.dtype, [apart, total], lambda e, s: call("sub", e, call("log", s)))


@operator("log_softmax", "_log_softmax")
def _(node: Node) -> Value:
    return log_softmax(node, *_prepared(node))


@operator("layer_norm", "native_layer_norm")
def _(node: Node) -> Made:
    x = node.value("input")
    count = len(node.given["normalized_shape"])
    dimensions = tuple(range(x.rank - count, x.rank))
    mean, var = _variance(node, x, dimensions, 0)
    eps = Const(float(node.get("eps", 1e-5)))
    scale = elementwise(var.shape, var.dtype, [var], lambda v: call("rsqrt", call("add", v, eps)))
    return _scaled(node, x, mean, scale)


def _scaled(node: Node, x: Value, mean: Value, scale: Value) -> Made:
    values = [x, mean, scale]
    parts = [name for name in ("weight", "bias") if node.has(name)]
    values += [node.value(name) for name in parts]

    def compute(e: Expr, m: Expr, s: Expr, *affine: Expr) -> Expr:
        found = call("mul", call("sub", e, m), s)
        for name, part in zip(parts, affine, strict=True):
            found = call("mul" if name == "weight" else "add", found, part)
        return found

    made = elementwise(x.shape, node.dtype, values, compute)
    return (made, mean, scale) if len(node.shapes) == 3 else made


@operator("rms_norm", "_fused_rms_norm")
def _(node: Node) -> Made:
    x = node.value("input")
    count = len(node.given["normalized_shape"])
    dimensions = tuple(range(x.rank - count, x.rank))
    eps = Const(float(node.get("eps", torch.finfo(x.dtype).eps)))
    square = reduced(node, x, dimensions, "mean", "mean", body=lambda e: call("sq", e))
    scale = elementwise(square.shape, x.dtype, [square], lambda v: call("rsqrt", call("add", v, eps)))
    values = [x, scale, *([node.value("weight")] if node.has("weight") else [])]

    def compute(e: Expr, s: Expr, *weight: Expr) -> Expr:
        found = call("mul", e, s)
        return call("mul", found, weight[0]) if weight else found

    made = elementwise(x.shape, node.dtype, values, compute)
    return (made, scale) if len(node.shapes) == 2 else made


@operator("group_norm", "native_group_norm")
def _(node: Node) -> Made:
    x = node.value("input")
    groups = node.given["num_groups"] if "num_groups" in node.given else node.given["group"]
    size = x.shape[1]
    each = size // groups if isinstance(size, int) else size / groups
    split = reshaped(node, x, [x.shape[0], groups, each, *x.shape[2:]])
    mean, var = _variance(node, split, tuple(range(2, split.rank)), 0)
    eps = Const(float(node.get("eps", 1e-5)))
    even = elementwise(
        split.shape, x.dtype, [split, mean, var],
        lambda e, m, v: call("mul", call("sub", e, m), call("rsqrt", call("add", v, eps))),
    )  # fmt: skip
    values = [reshaped(node, even, x.shape)]
    for name in ("weight", "bias"):
        if node.has(name):
            part = node.value(name)
            values.append(reshaped(node, part, [size, *([1] * (x.rank - 2))]))
    fns = ["mul"] * node.has("weight") + ["add"] * node.has("bias")

    def compute(e: Expr, *affine: Expr) -> Expr:
        for fn, part in zip(fns, affine, strict=True):
            e = call(fn, e, part)
        return e

    made = elementwise(x.shape, node.dtype, values, compute)
    if len(node.shapes) == 1:
        return made
    scale = elementwise(var.shape, x.dtype, [var], lambda v: call("rsqrt", call("add", v, eps)))
    return made, reshaped(node, mean, node.shapes[1]), reshaped(node, scale, node.shapes[2])


@operator("_native_batch_norm_legit_no_training", "batch_norm", "native_batch_norm")
def _(node: Node) -> Made:
    if node.get("training", False):
        raise Unsupported("batch norm in training, which changes its buffers (call .eval())")
    x = node.value("input")
    eps = Const(float(node.get("eps", 1e-5)))
    tail = [1] * (x.rank - 2)
    names = [name for name in ("running_mean", "running_var", "weight", "bias") if node.has(name)]
    parts = [reshaped(node, node.value(name), [x.shape[1], *tail]) for name in names]

    def compute(e: Expr, *given: Expr) -> Expr:
        known = dict(zip(names, given, strict=True))
        e = call(
            "mul",
            call("sub", e, known["running_mean"]),
            call("rsqrt", call("add", known["running_var"], eps)),
        )
        if "weight" in known:
            e = call("mul", e, known["weight"])
        return call("add", e, known["bias"]) if "bias" in known else e

    made = elementwise(x.shape, node.dtype, [x, *parts], compute)
    if len(node.shapes) == 1:
        return made
    empty = [
        Value(shape, node.dtype, (None,) * len(shape), lambda _: Const(0.0)) for shape in node.shapes[1:]
    ]
    return made, *empty


# -- prefixes and ranks ----------------------------------------------------------------------------


def _beside(
    node: Node, x: Value, dimension: int
) -> tuple[tuple[tuple[Digit, ...], ...], str, list[Position]]:
    """Axes of a value, a single one for a dimension; another axis of that dimension; and the positions with that one in its
    place."""
    writer = node.writer
    layout = tuple(None if d == dimension else digits for d, digits in enumerate(x.layout))
    groups = writer.axes(x.shape, layout)
    size = x.shape[dimension]
    other = writer.names.axis(size, axes_in(groups))
    writer.prefixes.add(other)
    places: list[Position] = [position(group) for group in groups]
    places[dimension] = position((Digit(other, size),))
    return groups, other, places


def _prefix(name: str, op: str, outside: Expr) -> None:
    """An operator that folds all positions up to each: as many steps as the square of the extent."""

    @operator(name)
    def entry(node: Node) -> Value:
        x = cast(node.value("self"), node.dtype)
        dimension = node.given["dim"] % max(x.rank, 1)
        if x.rank == 0 or x.shape[dimension] == 1:
            return x
        groups, inner, places = _beside(node, x, dimension)
        outer, writer = groups[dimension][0].axis, node.writer
        kept = call("where", call("le", Axis(inner), Axis(outer)), number(x, x.at(places)), outside)
        like = Value(x.shape, node.dtype, groups, x.read)
        if op in REDUCTIONS:
            return writer.defined(like, groups, Reduce(op, inner, kept), name)
        made = writer.names.definition(name)
        writer.lines.append(Line((made,), (axes_in(groups),), None, (op, (inner,), (kept,))))
        return writer.named(made, like, groups)


_prefix("cumsum", "sum", Const(0))
_prefix("cumprod", "prod", Const(1))
_prefix("logcumsumexp", "logsumexp", Const(-math.inf))


def outermost(x: Value, op: str) -> Expr:
    """The number of a value's dtype that no other one is beyond: what `max` or `min` of nothing is."""
    if x.is_real:
        return Const(-math.inf if op == "max" else math.inf)
    if x.is_truth:
        return Const(0 if op == "max" else 1)
    ends = torch.iinfo(x.dtype)
    return Const(ends.min if op == "max" else ends.max)


def _ordered(node: Node, dimension: int) -> tuple[Value, int]:
    """What an operator compares along a dimension, and which that is. Raises Unsupported for what has no order here."""
    x = node.value("self")
    check_wide(x.dtype)
    if x.is_truth:
        raise Unsupported("an order of truth values")
    return x, dimension % max(x.rank, 1)


def _running(name: str, op: str) -> None:
    """The extreme of all positions up to each, and the last position where it stands."""

    @operator(name)
    def entry(node: Node) -> Made:
        x, dimension = _ordered(node, node.given["dim"])
        if x.rank == 0 or x.shape[dimension] == 1:
            return x, _first_places(x)
        groups, inner, places = _beside(node, x, dimension)
        held = call("le", Axis(inner), Axis(groups[dimension][0].axis))
        other = x.at(places)
        like = Value(x.shape, x.dtype, groups, x.read)
        values = node.writer.defined(
            like, groups, Reduce(op, inner, call("where", held, other, outermost(x, op))), name
        )
        found: Expr = call("eq", other, values.at(places))
        if x.is_real:
            found = either(found, call("ne", other, other))
        place = call("where", both(held, found), Axis(inner), Const(-1))
        like = Value(x.shape, torch.int64, groups, x.read)
        return values, node.writer.defined(like, groups, Reduce("max", inner, place), "place")


_running("cummax", "max")
_running("cummin", "min")


def _first_places(x: Value) -> Value:
    """The positions in a dimension that has one."""
    return Value(x.shape, torch.int64, x.layout, lambda _: Const(0))


@dataclass(frozen=True)
class Ranked:
    """The rank of each number along a dimension: how many stand before it, NaN being the greatest."""

    x: Value
    groups: tuple[tuple[Digit, ...], ...]
    inner: str
    places: Sequence[Position]
    rank: Value

    def picked(self, at: Expr) -> tuple[Expr, Expr]:
        """The number that has the rank `at`, and its position."""
        stands = call("eq", self.rank.at(self.places), at)

        def there(what: Expr) -> Expr:
            return Reduce("sum", self.inner, call("where", stands, what, Const(0)))

        return there(self.x.at(self.places)), there(Axis(self.inner))


def _ranked(node: Node, x: Value, dimension: int, descending: bool) -> Ranked:
    """The ranks along a dimension, in as many steps as the square of the extent."""
    groups, inner, places = _beside(node, x, dimension)
    outer = groups[dimension][0].axis
    own, other = x.at([position(group) for group in groups]), x.at(places)

    def is_less(a: Expr, b: Expr) -> Expr:
        less = call("lt", a, b)
        return either(less, both(call("ne", b, b), call("eq", a, a))) if x.is_real else less

    before, behind = is_less(other, own), is_less(own, other)
    if descending:
        before, behind = behind, before
    alike = both(call("lt", Axis(inner), Axis(outer)), negated(behind))
    count = call("where", either(before, alike), Const(1), Const(0))
    like = Value(x.shape, torch.int64, groups, x.read)
    rank = node.writer.defined(like, groups, Reduce("sum", inner, count), "rank")
    return Ranked(x, groups, inner, places, rank)


@operator("sort")
def _(node: Node) -> Made:
    x, dimension = _ordered(node, node.get("dim", -1))
    if x.rank == 0 or x.shape[dimension] == 1:
        return x, _first_places(x)
    found = _ranked(node, x, dimension, node.get("descending", False))
    groups = found.groups
    values, places = found.picked(Axis(groups[dimension][0].axis))
    like, of_places = (Value(x.shape, dtype, groups, x.read) for dtype in (x.dtype, torch.int64))
    return (
        node.writer.defined(like, groups, values, "sorted"),
        node.writer.defined(of_places, groups, places, "place"),
    )


def _of_rank(node: Node, x: Value, dimension: int, rank: Callable[[Ranked], Expr]) -> tuple[Value, Value]:
    """The number of a rank that each row has, and its position; the dimension is kept."""
    if x.rank == 0 or x.shape[dimension] == 1:
        return x, _first_places(x)
    found = _ranked(node, x, dimension, descending=False)
    groups = tuple(() if d == dimension else group for d, group in enumerate(found.groups))
    values, places = found.picked(rank(found))
    shape = kept_shape(x, (dimension,))
    like, of_places = (Value(shape, dtype, groups, x.read) for dtype in (x.dtype, torch.int64))
    writer = node.writer
    return writer.defined(like, groups, values, "ranked"), writer.defined(of_places, groups, places, "place")


@operator("kthvalue")
def _(node: Node) -> Made:
    x, dimension = _ordered(node, node.get("dim", -1))
    rank = minus(node.writer.size_text(node.given["k"]), Const(1))
    values, places = _of_rank(node, x, dimension, lambda _: rank)
    return reshaped(node, values, node.shapes[0]), reshaped(node, places, node.shapes[1])


def _median(name: str, *, skips_nan: bool) -> None:
    """The lower of the numbers in the middle: NaN where there is any, or with `skips_nan` where there is nothing else."""

    @operator(name)
    def entry(node: Node) -> Made:
        x, dimension = _ordered(node, node.get("dim", 0))
        if not node.has("dim"):
            x = reshaped(node, x, [math.prod(x.shape)])

        def rank(found: Ranked) -> Expr:
            count = node.writer.size_text(x.shape[dimension])
            if not x.is_real:
                return divided(minus(count, Const(1)), Const(2))
            each = x.at(found.places)
            nans = Reduce("sum", found.inner, call("where", call("ne", each, each), Const(1), Const(0)))
            numbers = minus(count, nans)
            if skips_nan:
                return call("maximum", divided(minus(numbers, Const(1)), Const(2)), Const(0))
            return call(
                "where", call("lt", numbers, count), numbers, divided(minus(count, Const(1)), Const(2))
            )

        values, places = _of_rank(node, x, dimension, rank)
        if len(node.shapes) == 1:
            return dropped(node, values)
        return reshaped(node, values, node.shapes[0]), reshaped(node, places, node.shapes[1])


_median("median", skips_nan=False)
_median("nanmedian", skips_nan=True)


@operator("histc")
def _(node: Node) -> Value:
    """How many numbers are in each of equal bins, of which the last one has its end; others are in none."""
    x, bins = node.value("self"), node.get("bins", 100)
    ends = tuple(float(node.get(end, 0)) for end in ("min", "max"))
    x = reshaped(node, x, [math.prod(x.shape)])
    low, high = map(Const, ends) if ends[0] != ends[1] else _range_of(node, x)
    writer = node.writer

    def read(positions: tuple[Position, ...]) -> Expr:
        here = writer.radix.flat(positions[0])
        groups = writer.axes(x.shape, x.layout, axes_read(positions))
        e = x.at([position(group) for group in groups])
        scaled = call("div", call("mul", call("sub", e, low), Const(float(bins))), call("sub", high, low))
        place = call("minimum", call("floor", scaled), Const(float(bins - 1)))
        inside = both(call("ge", e, low), call("le", e, high))
        counted = call("where", both(inside, call("eq", place, here)), Const(1.0), Const(0.0))
        return folded("sum", axes_in(groups), counted)

    return Value(node.shape, node.dtype, (None,), read)


def _range_of(node: Node, x: Value) -> Iterator[Expr]:
    """The least and the greatest number, or where they are equal 1 less and 1 more."""
    ends = [reduced(node, x, (0,), op, op) for op in ("min", "max")]
    for place, (word, fn) in enumerate((("low", "sub"), ("high", "add"))):

        def end(least: Expr, most: Expr, place: int = place, fn: str = fn) -> Expr:
            own = (least, most)[place]
            return call("where", call("eq", least, most), call(fn, own, Const(1.0)), own)

        yield node.writer.define(
            elementwise((), x.dtype, [reshaped(node, each, ()) for each in ends], end), word
        ).at(())


@operator("_cdist_forward")
def _(node: Node) -> Value:
    """Distances of all rows of one to all rows of another."""
    one, other, order = node.value("x1"), node.value("x2"), float(node.given["p"])
    shape = (*node.shape, one.shape[-1])
    rows, columns = (
        reshaped(node, each, [*each.shape[: each.rank - 2], *middle, each.shape[-1]])
        for each, middle in ((one, (one.shape[-2], 1)), (other, (1, other.shape[-2])))
    )
    apart = elementwise(shape, node.dtype, [rows, columns], lambda e, f: call("sub", e, f))
    return dropped(node, _norm(node, apart, (len(shape) - 1,), order))


@operator("topk")
def _(node: Node) -> Made:
    x, count = node.value("self"), node.given["k"]
    if not isinstance(count, int):
        raise Unsupported("topk with a number of ranks that is not constant")
    if x.rank == 0:
        return reshaped(node, x, node.shapes[0]), reshaped(node, _first_places(x), node.shapes[1])
    dimension, greatest = node.get("dim", -1) % x.rank, node.get("largest", True)
    writer = node.writer
    layout = tuple(None if d == dimension else digits for d, digits in enumerate(x.layout))
    groups = list(writer.axes(x.shape, layout))
    inside = number(x, x.at([position(group) for group in groups]))
    inside = inside if greatest else call("neg", inside)
    bound = groups[dimension][0].axis
    rank = writer.rank_axis(count, axes_in(groups))
    groups[dimension] = (Digit(rank, count),)
    names = writer.names.definition("top"), writer.names.definition("place")
    axes = axes_in(groups)
    writer.lines.append(Line(names, (axes, axes), None, ("topk", (bound, rank), (inside,))))
    like = Value(node.shapes[0], x.dtype, tuple(groups), x.read)
    values = writer.named(names[0], like, groups)
    if not greatest:
        values = elementwise(values.shape, values.dtype, [values], lambda e: call("neg", e))
    places = Value(node.shapes[1], torch.int64, tuple(groups), writer.named(names[1], like, groups).read)
    return values, places
