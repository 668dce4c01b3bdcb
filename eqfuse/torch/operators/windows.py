"""Windows that slide over dimensions: convolutions, which are sums of products over them, and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any

import torch
from torch.utils._sympy.functions import FloorDiv

from eqfuse.terms.integer_terms import compared, divided, minus, plus, remaining, times
from eqfuse.terms.nodes import Const, Expr, call
from eqfuse.torch.operators.pointwise import divided_towards_zero
from eqfuse.torch.operators.products import contracted
from eqfuse.torch.operators.reductions import dropped, outermost, reduced
from eqfuse.torch.operators.table import Made, Node, Unsupported, both, elementwise, number, operator
from eqfuse.torch.operators.views import moved, reshaped
from eqfuse.torch.positions import FINEST, Part, Position, Size, exact_ratio, is_below
from eqfuse.torch.values import Value, Writer


@dataclass(frozen=True)
class Window:
    """`count` windows of `width` positions each in a dimension of `size` positions: position `k` of window `y` is
    `stride * y + dilation * k - padding`."""

    size: Size
    count: Size
    width: Size
    stride: Size = 1
    dilation: Size = 1
    padding: Size = 0
    ceil: bool = False

    def reaches_outside(self) -> bool:
        """Whether some windows have positions that the dimension has not."""
        return self.padding != 0 or self.ceil

    def last(self) -> Size:
        """The last position of the last window."""
        return self.stride * (self.count - 1) + self.dilation * (self.width - 1) - self.padding

    def place(self, writer: Writer, y: Expr, k: Expr) -> tuple[Expr, Expr]:
        """The position in the dimension, and whether it is inside."""
        stride, dilation, padding = map(writer.size_text, (self.stride, self.dilation, self.padding))
        padded = plus(times(y, stride), times(k, dilation))
        at = minus(padded, padding)
        inside: Expr = Const(True) if self.padding == 0 else compared("ge", padded, padding)
        if self.reaches_outside() and not is_below(self.last(), self.size):
            inside = both(inside, compared("lt", at, writer.size_text(self.size)))
        return at, inside

    def counted(self, writer: Writer, y: Expr, with_padding: bool) -> Expr:
        """How many positions of a window are inside, or in the padding if that counts."""
        text, padded = writer.size_text, self.padding != 0
        width = text(self.width)
        if not self.ceil and (with_padding or not padded):
            return width
        first = minus(times(y, text(self.stride)), text(self.padding))
        end = plus(text(self.size), text(self.padding if with_padding else 0))
        behind = call("minimum", plus(first, width), end)
        return minus(behind, first if with_padding or not padded else call("maximum", first, Const(0)))


class Transposed(Window):
    """The windows that a convolution transposes: position `k` of window `y` is the `p` with `y = stride * p + dilation * k -
    padding`, if there is one."""

    def reaches_outside(self) -> bool:
        return True

    def place(self, writer: Writer, y: Expr, k: Expr) -> tuple[Expr, Expr]:
        stride, dilation, padding = map(writer.size_text, (self.stride, self.dilation, self.padding))
        start, offset = plus(y, padding), times(k, dilation)
        scaled = minus(start, offset)
        inside: Expr = Const(True)
        if not is_below(self.dilation * (self.width - 1), self.padding + 1):
            inside = compared("ge", start, offset)
        if not is_below(self.count - 1 + self.padding, self.stride * self.size):
            inside = both(inside, compared("lt", scaled, writer.size_text(self.stride * self.size)))
        if self.stride != 1:
            inside = both(inside, compared("eq", remaining(scaled, stride), Const(0)))
        return divided(scaled, stride), inside


class Adaptive(Window):
    """Windows that cover a dimension as evenly as can be: window `y` begins at `y * size // count`."""

    def reaches_outside(self) -> bool:
        return True

    def ends(self, writer: Writer, y: Expr) -> tuple[Expr, Expr]:
        """The first position, and the one behind the last."""
        size, count = writer.size_text(self.size), writer.size_text(self.count)
        behind = plus(times(plus(y, Const(1)), size), minus(count, Const(1)))
        return divided(times(y, size), count), divided(behind, count)

    def place(self, writer: Writer, y: Expr, k: Expr) -> tuple[Expr, Expr]:
        first, behind = self.ends(writer, y)
        at = plus(first, k)
        return at, both(compared("lt", at, behind), compared("lt", at, writer.size_text(self.size)))

    def counted(self, writer: Writer, y: Expr, with_padding: bool) -> Expr:
        first, behind = self.ends(writer, y)
        return minus(behind, first)


def windowed(node: Node, x: Value, windows: Sequence[Window], outside: Expr) -> Value:
    """A value with its last dimensions as numbers of windows, and behind them positions in a window. `outside` stands where
    a window has a position that the dimension has not."""
    front, count, radix = x.rank - len(windows), len(windows), node.writer.radix

    def read(positions: tuple[Position, ...]) -> Expr:
        found = list(positions[:front])
        inside: Expr = Const(True)
        for d, window in enumerate(windows, start=front):
            y, k = radix.flat(positions[d]), radix.flat(positions[d + count])
            at, held = window.place(node.writer, y, k)
            found.append((Part(at, window.size),))
            inside = both(inside, held)
        own = x.at(found)
        return own if inside == Const(True) else call("where", inside, own, outside)

    shape = (*x.shape[:front], *(w.count for w in windows), *(w.width for w in windows))
    return Value(shape, x.dtype, (*x.layout[:front], *[None] * (2 * count)), read)


def _each(given: Any, count: int) -> list[Size]:
    """A number for each dimension, where one stands for all."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    return found * count if len(found) == 1 else found


def _of_groups(node: Node, x: Value, weight: Value) -> Value:
    """What each channel of the result reads: the channels of its group."""
    channels, radix, text = weight.shape[0], node.writer.radix, node.writer.size_text

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        batch, made, read, *rest = positions
        group = divided(times(radix.flat(made), Const(node.given["groups"])), text(channels))
        at = plus(times(group, text(weight.shape[1])), radix.flat(read))
        return [batch, (Part(at, x.shape[1]),), *rest]

    shape = (x.shape[0], channels, weight.shape[1], *x.shape[2:])
    return moved(x, shape, (x.layout[0], *weight.layout[:2], *x.layout[2:]), move)


@operator("convolution")
def _(node: Node) -> Value:
    x, weight = node.value("input"), node.value("weight")
    groups, is_transposed, count = node.given["groups"], node.given["transposed"], x.rank - 2
    given = (_each(node.given[name], count) for name in ("stride", "dilation", "padding"))
    kind, outside = Transposed if is_transposed else Window, Const(0.0 if x.is_real else 0)
    windows = [
        kind(*each) for each in zip(x.shape[2:], node.shape[2:], weight.shape[2:], *given, strict=True)
    ]
    y, k = [f"window {d}" for d in range(count)], [f"position {d}" for d in range(count)]
    if not is_transposed and exact_ratio(node.shape[1], groups) is None:
        operands = [
            (
                ("batch", "out", "in", *y, *k),
                windowed(node, _of_groups(node, x, weight), windows, outside),
            ),
            (("out", "in", *k), weight),
        ]
        found = contracted(node, operands, ("batch", "out", *y))
    else:
        inner = weight.shape[1]
        outer = exact_ratio(weight.shape[0], groups) or FloorDiv(weight.shape[0], groups)
        read = outer if is_transposed else inner
        labels = ("in", "out") if is_transposed else ("out", "in")
        grouped = reshaped(node, x, [x.shape[0], groups, read, *x.shape[2:]])
        kernel = reshaped(node, weight, [groups, outer, inner, *weight.shape[2:]])
        operands = [
            (("batch", "group", "in", *y, *k), windowed(node, grouped, windows, outside)),
            (("group", *labels, *k), kernel),
        ]
        found = reshaped(node, contracted(node, operands, ("batch", "group", "out", *y)), node.shape)
    if not node.has("bias"):
        return found
    bias = reshaped(node, node.value("bias"), [node.shape[1], *[1] * count])
    return elementwise(node.shape, node.dtype, [found, bias], lambda e, b: call("add", e, b))


# -- pooling ---------------------------------------------------------------------------------------


def _sliding(node: Node, count: int) -> list[Window]:
    """The windows of an operator that pools the last `count` dimensions."""
    x, widths = node.value("self"), _each(node.given["kernel_size"], count)
    given = (
        _each(node.get(name) or default, count)
        for name, default in (("stride", widths), ("dilation", 1), ("padding", 0))
    )
    ceil = node.get("ceil_mode", False)
    each = zip(x.shape[-count:], node.shape[-count:], widths, *given, [ceil] * count, strict=True)
    return [Window(*sizes) for sizes in each]


def _even(node: Node, count: int) -> list[Window]:
    """The windows of an operator that pools the last `count` dimensions to sizes that it is given."""
    found: list[Window] = []
    for size, windows in zip(node.value("self").shape[-count:], node.shape[-count:], strict=True):
        if (width := exact_ratio(size, windows)) is not None:
            found.append(Window(size, windows, width, width))
        else:
            found.append(Adaptive(size, windows, FloorDiv(size, windows) + 2))
    return found


def _greatest(node: Node, windows: Sequence[Window]) -> Made:
    """The greatest number of each window, and its position in the last dimensions together."""
    x, count, writer = node.value("self"), len(windows), node.writer
    seen = windowed(node, x, windows, outermost(x, "max"))
    inside = range(x.rank, seen.rank)
    found = dropped(node, reduced(node, seen, inside, "max", "max", dtype=node.dtype))
    width = prod(window.width for window in windows)
    flat = reshaped(node, seen, [*seen.shape[: x.rank], width])
    places = reduced(node, flat, [x.rank], "argmax", "argmax", dtype=torch.int64)
    first = reshaped(node, places, x.shape[:-count] + seen.shape[x.rank - count : x.rank])

    def read(positions: tuple[Position, ...]) -> Expr:
        within = writer.radix.regrouped((Part(first.at(positions), width),), [w.width for w in windows])
        at: Expr = Const(0)
        for window, y, k in zip(windows, positions[-count:], within, strict=True):
            place, _ = window.place(writer, writer.radix.flat(y), writer.radix.flat(k))
            at = plus(times(at, writer.size_text(window.size)), place)
        return at

    return found, Value(first.shape, torch.int64, first.layout, read)


def _averaged(
    node: Node, windows: Sequence[Window], with_padding: bool = True, divisor: int | None = None
) -> Value:
    """The sum of each window, divided by a number, or by how many positions of it count."""
    x, writer = node.value("self"), node.writer
    divide = partial(call, "div") if x.is_real else divided_towards_zero
    seen = windowed(node, x, windows, Const(0.0 if x.is_real else 0))
    total = dropped(node, reduced(node, seen, range(x.rank, seen.rank), "sum", "sum"))

    def read(positions: tuple[Position, ...]) -> Expr:
        places = positions[-len(windows) :]
        each = (
            window.counted(writer, writer.radix.flat(y), with_padding)
            for window, y in zip(windows, places, strict=True)
        )
        count = Const(divisor) if divisor else reduce(times, each)
        return divide(total.at(positions), count)

    return Value(total.shape, node.dtype, total.layout, read)


def _pooling(count: int) -> None:
    @operator(f"max_pool{count}d_with_indices")
    def entry(node: Node) -> Made:
        return _greatest(node, _sliding(node, count))

    @operator(f"adaptive_max_pool{count}d")
    def entry_adaptive(node: Node) -> Made:
        return _greatest(node, _even(node, count))

    @operator(f"avg_pool{count}d")
    def entry_average(node: Node) -> Value:
        with_padding, divisor = node.get("count_include_pad", True), node.given.get("divisor_override")
        return _averaged(node, _sliding(node, count), with_padding, divisor)


def _averaging(count: int) -> None:
    @operator(f"adaptive_avg_pool{count}d", f"_adaptive_avg_pool{count}d")
    def entry(node: Node) -> Value:
        return _averaged(node, _even(node, count))


for _count in (2, 3):
    _pooling(_count)
for _count in (1, 2, 3):
    _averaging(_count)


# -- resampling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resampling:
    """A dimension of `size` positions by `count` of them, `step / of` positions apart; with `aligns` the last ones of both meet."""

    size: Size
    count: Size
    step: Size
    of: Size
    aligns: bool

    def source(self, writer: Writer, y: Expr) -> tuple[Expr, Expr]:
        """Where position `y` lies between those of the dimension, as a ratio: torch's `area_pixel_compute_source_index`."""
        if self.aligns:
            return times(y, writer.size_text(self.size - 1)), writer.size_text(self.count - 1)
        doubled = times(plus(times(y, Const(2)), Const(1)), writer.size_text(self.step))
        return minus(doubled, writer.size_text(self.of)), writer.size_text(2 * self.of)


Tap = tuple[Expr, Expr | None]
"""A position of a dimension, which may be outside, and its weight; None is 1."""


def _nearest(writer: Writer, y: Expr, along: Resampling) -> Sequence[Tap]:
    return [(divided(times(y, writer.size_text(along.step)), writer.size_text(along.of)), None)]


def _nearest_to_middle(writer: Writer, y: Expr, along: Resampling) -> Sequence[Tap]:
    doubled = times(plus(times(y, Const(2)), Const(1)), writer.size_text(along.step))
    return [(divided(doubled, writer.size_text(2 * along.of)), None)]


def _linear(writer: Writer, y: Expr, along: Resampling) -> Sequence[Tap]:
    top, bottom = along.source(writer, y)
    top = top if along.aligns else call("maximum", top, Const(0))
    first = divided(top, bottom)
    behind = call("div", remaining(top, bottom), bottom)
    return [(first, call("sub", Const(1.0), behind)), (plus(first, Const(1)), behind)]


def _cubic(writer: Writer, y: Expr, along: Resampling) -> Sequence[Tap]:
    """Keys' convolution (1981) with a = -3/4, as torch has it."""
    top, bottom = along.source(writer, y)
    first, behind = divided(top, bottom), call("div", remaining(top, bottom), bottom)
    ahead = call("sub", Const(1.0), behind)

    def cubic(x: Expr, *coefficients: float) -> Expr:
        found: Expr = Const(coefficients[0])
        for each in coefficients[1:]:
            found = call("mul", found, x) if each == 0 else call("add", call("mul", found, x), Const(each))
        return found

    near, far = (1.25, -2.25, 0.0, 1.0), (-0.75, 3.75, -6.0, 3.0)
    weights = (
        cubic(call("add", behind, Const(1.0)), *far), cubic(behind, *near), cubic(ahead, *near),
        cubic(call("add", ahead, Const(1.0)), *far),
    )  # fmt: skip
    return [(plus(first, Const(step)), weight) for step, weight in zip((-1, 0, 1, 2), weights, strict=True)]


def _resamplings(node: Node, x: Value, count: int) -> list[Resampling]:
    """Of the last dimensions. Raises Unsupported for a scale that is no ratio of small integers."""
    names = ("scale_factors", "scales", "scales_d", "scales_h", "scales_w")
    given = [node.given[name] for name in names if node.has(name)]
    scales = [scale for each in given for scale in (each if isinstance(each, list | tuple) else [each])]
    found = []
    for d, scale in zip(range(x.rank - count, x.rank), scales or [None] * count, strict=True):
        step, of = x.shape[d], node.shape[d]
        if scale is not None:
            of, step = float(scale).as_integer_ratio()
            if step > FINEST:
                raise Unsupported(f"a scale of {scale}, which is no multiple of 1/{FINEST} (give the size)")
        found.append(Resampling(x.shape[d], node.shape[d], step, of, node.get("align_corners", False)))
    return found


def _resampled(node: Node, count: int, taps: Callable[[Writer, Expr, Resampling], Sequence[Tap]]) -> Value:
    """The last dimensions of a value by other numbers of positions. What lies outside is the nearest position inside."""
    x, writer = node.value("self" if "self" in node.given else "input"), node.writer
    if not x.is_real and taps in (_linear, _cubic):
        raise Unsupported("means of integers")
    behind = x.rank - count
    resamplings = _resamplings(node, x, count)

    def inside(place: Expr, size: Size) -> Expr:
        lowest = call("maximum", place, Const(0)) if taps is _cubic else place
        return call("minimum", lowest, writer.size_text(size - 1))

    def along(positions: Sequence[Position], places: Sequence[Position]) -> Expr:
        d = len(places)
        if d == x.rank:
            return number(x, x.at(places))
        one = resamplings[d - behind]
        if one.size == 1 or one.count == 1 and one.aligns:
            return along(positions, [*places, (Part(Const(0), one.size),)])
        found: Expr | None = None
        for place, weight in taps(writer, writer.radix.flat(positions[d]), one):
            part = along(positions, [*places, (Part(inside(place, one.size), one.size),)])
            part = part if weight is None else call("mul", weight, part)
            found = part if found is None else call("add", found, part)
        assert found is not None
        return found

    def read(positions: tuple[Position, ...]) -> Expr:
        return along(positions, positions[:behind])

    return Value(node.shape, node.dtype, (*x.layout[:behind], *[None] * count), read)


def _resampling(name: str, count: int, taps: Callable[[Writer, Expr, Resampling], Sequence[Tap]]) -> None:
    @operator(name)
    def entry(node: Node) -> Value:
        return _resampled(node, count, taps)


_resampling("upsample_bicubic2d", 2, _cubic)
for _count, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _resampling(f"upsample_nearest{_count}d", _count, _nearest)
    _resampling(f"_upsample_nearest_exact{_count}d", _count, _nearest_to_middle)
    _resampling(f"upsample_{_name}", _count, _linear)
