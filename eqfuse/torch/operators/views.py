"""Views, and operators that only put elements elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eqfuse.terms.integer_terms import compared, divided, minus, plus, remaining, times
from eqfuse.terms.nodes import Call, Const, Expr, call
from eqfuse.torch.operators.pointwise import cast
from eqfuse.torch.operators.table import (
    Made,
    Node,
    Unsupported,
    both,
    elementwise,
    number,
    operator,
    stored,
)
from eqfuse.torch.positions import Part, Position, Radix, Size, exact_ratio
from eqfuse.torch.values import Layout, Value, constant

Move = Callable[[tuple[Position, ...]], Sequence[Position]]


def moved(value: Value, shape: Sequence[Size], layout: Layout, move: Move) -> Value:
    """A value read at other positions."""
    return Value(tuple(shape), value.dtype, layout, lambda positions: value.at(move(positions)))


@operator("detach")
def _(node: Node) -> Value:
    return detached(node.value("self"))


def detached(x: Value) -> Value:
    """A value that gradients do not pass."""
    if not x.is_real:
        return x
    return Value(x.shape, x.dtype, x.layout, lambda positions: _stopped(x.at(positions)))


def _stopped(expr: Expr) -> Expr:
    is_constant = isinstance(expr, Const) or (isinstance(expr, Call) and expr.fn == "stop")
    return expr if is_constant else call("stop", expr)


@operator("clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh")
def _(node: Node) -> Value:
    return node.value("self")


@operator("dropout", "native_dropout")
def _(node: Node) -> Made:
    """What drops nothing or everything; any other one draws random numbers (draws.py)."""
    x = node.value("input")
    keeps = node.given["train"] is False or not node.given["p"]
    made = x if keeps else elementwise(x.shape, x.dtype, [x], lambda e: call("mul", e, Const(0.0)))
    if len(node.shapes) == 1:
        return made
    return made, Value(x.shape, node.dtypes[1], (None,) * x.rank, constant(keeps, node.dtypes[1]).read)


@operator("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze")
def _(node: Node) -> Value:
    return reshaped(node, node.value("self"), node.shape)


def reshaped(node: Node, x: Value, shape: Sequence[Size]) -> Value:
    """A value with its elements counted by other sizes."""
    writer = node.writer
    groups: list[tuple[list[int], list[int]]] = _groups(x.shape, shape)
    layout: list[Any] = [None] * len(shape)
    for old, new in groups:
        sizes = [shape[dimension] for dimension in new]
        if len(old) == len(new) == 1:
            layout[new[0]] = x.layout[old[0]]
        elif all(x.layout[dimension] is not None for dimension in old):
            digits = [digit for dimension in old for digit in x.layout[dimension] or ()]
            for dimension, group in zip(new, writer.digits_of(sizes, digits), strict=True):
                layout[dimension] = group

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        found: list[Position] = [()] * x.rank
        for old, new in groups:
            together = [part for dimension in new for part in positions[dimension]]
            sizes = [x.shape[dimension] for dimension in old]
            for dimension, position in zip(old, writer.radix.regrouped(together, sizes), strict=True):
                found[dimension] = position
        return found

    return moved(x, shape, tuple(layout), move)


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """The runs of dimensions of both that have the same number of elements: as short as can be."""
    found: list[tuple[list[int], list[int]]] = []
    a = [d for d, size in enumerate(old) if size != 1]
    b = [d for d, size in enumerate(new) if size != 1]
    while a or b:
        left, right = [a.pop(0)] if a else [], [b.pop(0)] if b else []
        count, other = _product(old, left), _product(new, right)
        while count != other:
            more_left = exact_ratio(other, count) is not None
            if a and (more_left or not b):
                left.append(a.pop(0))
                count = count * old[left[-1]]
            elif b:
                right.append(b.pop(0))
                other = other * new[right[-1]]
            else:
                break
        found.append((left, right))
    return found


def _product(sizes: Sequence[Size], dimensions: Sequence[int]) -> Size:
    count: Size = 1
    for dimension in dimensions:
        count = count * sizes[dimension]
    return count


@operator("permute", "transpose", "t", "numpy_T")
def _(node: Node) -> Value:
    x = node.value("self")
    if "dims" in node.given:
        order = [d % x.rank for d in node.given["dims"]]
    else:
        order = list(range(x.rank))
        if x.rank > 1:
            one, other = node.get("dim0", 0) % x.rank, node.get("dim1", 1) % x.rank
            order[one], order[other] = other, one
    return permuted(x, order)


def permuted(x: Value, order: Sequence[int]) -> Value:
    """A value with its dimensions in another order."""

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        found: list[Position] = [()] * x.rank
        for place, dimension in enumerate(order):
            found[dimension] = positions[place]
        return found

    return moved(x, [x.shape[d] for d in order], tuple(x.layout[d] for d in order), move)


@operator("diagonal")
def _(node: Node) -> Value:
    x, offset = node.value("self"), node.get("offset", 0)
    one, other = node.get("dim1", 0) % x.rank, node.get("dim2", 1) % x.rank
    rest = [d for d in range(x.rank) if d not in (one, other)]
    radix = node.writer.radix

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        found: list[Position] = [()] * x.rank
        for d, place in zip(rest, positions, strict=False):
            found[d] = place
        flat = radix.flat(positions[-1])
        found[one] = (Part(plus(flat, Const(max(-offset, 0))), x.shape[one]),)
        found[other] = (Part(plus(flat, Const(max(offset, 0))), x.shape[other]),)
        return found

    return moved(x, node.shape, (*(x.layout[d] for d in rest), None), move)


@operator("expand", "broadcast_to", "expand_as")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [node.value("self")], lambda e: e)


def along(x: Value, dimension: int, size: Size, index: Callable[[Position], Position]) -> Value:
    """A value that in one dimension has another size, and is read elsewhere."""
    shape = [size if d == dimension else own for d, own in enumerate(x.shape)]
    layout = tuple(None if d == dimension else digits for d, digits in enumerate(x.layout))
    return moved(x, shape, layout, lambda p: [index(q) if d == dimension else q for d, q in enumerate(p)])


def sliced(node: Node, x: Value, dimension: int, start: Size, step: int, size: Size) -> Value:
    """Every `step`th position of a dimension from `start` on."""
    own = x.shape[dimension]
    if start == 0 and step == 1 and size == own:
        return x
    radix = node.writer.radix

    def index(position: Position) -> Position:
        flat = plus(times(radix.flat(position), Const(step)), node.writer.size_text(start))
        return (Part(flat, own),)

    return along(x, dimension, size, index)


def start_of(start: Size, size: Size) -> Size:
    """Where a slice starts: from the front, and not behind the end."""
    if isinstance(start, int) and isinstance(size, int):
        return min(start, size) if start >= 0 else max(size + start, 0)
    if start >= 0 if isinstance(start, int) else start.is_nonnegative:
        return start
    if isinstance(start, int) or start.is_negative:
        found = size + start
        return int(found) if found.is_Integer else found
    raise Unsupported(f"a start at {start}, which may be counted from either end")


LAST = 2**63 - 1
"""How torch writes the end of a slice that has none."""


@operator("slice", "narrow")
def _(node: Node) -> Value:
    x = node.value("self")
    dimension = node.get("dim", 0) % x.rank
    own, size, step = x.shape[dimension], node.shape[dimension], node.get("step", 1)
    is_tail = step == 1 and isinstance(end := node.get("end", LAST), int) and end >= LAST
    start = node.get("start", 0)
    start = own - size if is_tail and not isinstance(start, int) else start_of(start, own)
    return sliced(node, x, dimension, start, step, size)


def chosen(held: Expr, one: Expr, other: Expr) -> Expr:
    """One of two, as a truth value says."""
    match held:
        case Const(bool(value)):
            return one if value else other
        case _:
            return call("where", held, one, other)


def inserted(
    node: Node,
    x: Value,
    dimension: int,
    inside: Callable[[Expr], Expr],
    own: Callable[[Sequence[Position]], Expr],
) -> Value:
    """A value in which some positions of a dimension, those `inside`, have numbers of another one."""

    def read(positions: tuple[Position, ...]) -> Expr:
        held = inside(node.writer.radix.flat(positions[dimension]))
        return x.at(positions) if held == Const(False) else chosen(held, own(positions), x.at(positions))

    return Value(x.shape, x.dtype, x.layout, read, is_choice=True)


def _parts(node: Node) -> tuple[Value, Value]:
    """What is written into, and what is written, as definitions."""
    return tuple(node.writer.settled(node.value(name), "part") for name in ("self", "src"))  # type: ignore[return-value]


@operator("slice_scatter")
def _(node: Node) -> Value:
    x, source = _parts(node)
    dimension, step = node.get("dim", 0) % x.rank, node.get("step", 1)
    start = start_of(node.get("start", 0), x.shape[dimension])
    size = source.shape[dimension]
    if node.writer.agree(size, x.shape[dimension]) and step == 1:
        return source
    radix, text = node.writer.radix, node.writer.size_text

    def inside(flat: Expr) -> Expr:
        first, apart = text(start), minus(flat, text(start))
        held = both(
            compared("ge", flat, first), compared("lt", flat, plus(first, times(text(size), Const(step))))
        )
        return held if step == 1 else both(held, compared("eq", remaining(apart, Const(step)), Const(0)))

    def own(positions: Sequence[Position]) -> Expr:
        spot = divided(minus(radix.flat(positions[dimension]), text(start)), Const(step))
        return source.at([*positions[:dimension], (Part(spot, size),), *positions[dimension + 1 :]])

    return inserted(node, x, dimension, inside, own)


@operator("select_scatter")
def _(node: Node) -> Value:
    x, source = _parts(node)
    dimension = node.given["dim"] % x.rank
    place = node.writer.size_text(start_of(node.given["index"], x.shape[dimension]))
    return inserted(
        node, x, dimension, lambda flat: compared("eq", flat, place),
        lambda positions: source.at([*positions[:dimension], *positions[dimension + 1 :]]),
    )  # fmt: skip


@operator("diagonal_scatter")
def _(node: Node) -> Value:
    x, source = _parts(node)
    offset = node.get("offset", 0)
    one, other = node.get("dim1", 0) % x.rank, node.get("dim2", 1) % x.rank
    radix = node.writer.radix

    def read(positions: tuple[Position, ...]) -> Expr:
        row, column = (
            plus(radix.flat(positions[d]), Const(max(shift, 0)))
            for d, shift in ((one, offset), (other, -offset))
        )
        spot = (Part(minus(row, Const(abs(offset))), source.shape[-1]),)
        own = source.at([*(p for d, p in enumerate(positions) if d not in (one, other)), spot])
        return chosen(compared("eq", row, column), own, x.at(positions))

    return Value(x.shape, x.dtype, x.layout, read, is_choice=True)


@operator("copy")
def _(node: Node) -> Value:
    source = cast(node.value("src"), node.dtype)
    return elementwise(node.shape, node.dtype, [source], lambda e: e)


@operator("select")
def _(node: Node) -> Value:
    x, dimension = node.value("self"), node.given["dim"] % node.value("self").rank
    index = node.given["index"]
    if isinstance(index, Value):
        raise Unsupported("select at a position that a tensor holds")
    place = node.writer.size_text(start_of(index, x.shape[dimension]))
    return selected(x, dimension, (Part(place, x.shape[dimension]),))


def selected(x: Value, dimension: int, place: Position) -> Value:
    """A value at one position of a dimension, which it loses."""
    rest = [d for d in range(x.rank) if d != dimension]
    return moved(
        x,
        [x.shape[d] for d in rest],
        tuple(x.layout[d] for d in rest),
        lambda positions: [*positions[:dimension], place, *positions[dimension:]],
    )


@operator("split_with_sizes", "split", "chunk", "unbind", "tensor_split")
def _(node: Node) -> tuple[Value, ...]:
    x = node.value("self")
    dimension = node.get("dim", 0) % x.rank
    found: list[Value] = []
    start: Size = 0
    for shape in node.shapes:
        if len(shape) < x.rank:
            place = (Part(node.writer.size_text(start), x.shape[dimension]),)
            found.append(selected(x, dimension, place))
            start = start + 1
        else:
            found.append(sliced(node, x, dimension, start, 1, shape[dimension]))
            start = start + shape[dimension]
    return tuple(found)


@operator("cat", "concat")
def _(node: Node) -> Value:
    tensors = [value for value in node.given["tensors"] if value.rank == len(node.shape)]
    dimension = node.get("dim", 0) % len(node.shape)
    return joined_along(node, tensors, dimension)


def joined_along(node: Node, tensors: Sequence[Value], dimension: int) -> Value:
    """Values one behind the other."""
    radix, text = node.writer.radix, node.writer.size_text
    if len(tensors) == 1:
        return tensors[0]
    layout = tuple(
        None if d == dimension else next((t.layout[d] for t in tensors if t.layout[d] is not None), None)
        for d in range(len(node.shape))
    )

    def read(positions: tuple[Position, ...]) -> Expr:
        flat = radix.flat(positions[dimension])
        ends: list[Size] = []
        total: Size = 0
        for tensor in tensors:
            total = total + tensor.shape[dimension]
            ends.append(total)
        found: Expr | None = None
        for place in reversed(range(len(tensors))):
            start = ends[place - 1] if place else 0
            inside = minus(flat, text(start))
            spot = (Part(inside, tensors[place].shape[dimension]),)
            own = number(
                tensors[place], tensors[place].at([*positions[:dimension], spot, *positions[dimension + 1 :]])
            )
            if found is None:
                found = own
                continue
            found = chosen(compared("lt", flat, text(ends[place])), own, found)
        assert found is not None
        return stored(node.dtype, found)

    return Value(node.shape, node.dtype, layout, read)


@operator("stack")
def _(node: Node) -> Value:
    dimension = node.get("dim", 0) % len(node.shape)
    wider = [
        reshaped(node, t, [*t.shape[:dimension], 1, *t.shape[dimension:]]) for t in node.given["tensors"]
    ]
    return joined_along(node, wider, dimension)


@operator("flip")
def _(node: Node) -> Value:
    x = node.value("self")
    radix, text = node.writer.radix, node.writer.size_text
    for dimension in (d % x.rank for d in node.given["dims"]):
        size = x.shape[dimension]

        def index(position: Position, size: Size = size) -> Position:
            return (Part(call("sub", text(size - 1), radix.flat(position)), size),)

        x = along(x, dimension, size, index)
    return x


@operator("roll")
def _(node: Node) -> Value:
    x, shifts = node.value("self"), node.given["shifts"]
    radix, text = node.writer.radix, node.writer.size_text
    if not node.get("dims"):
        flat = reshaped(node, x, [_product(x.shape, range(x.rank))])
        return reshaped(node, _rolled(radix, text, flat, 0, shifts[0]), x.shape)
    for shift, dimension in zip(shifts, node.given["dims"], strict=True):
        x = _rolled(radix, text, x, dimension % x.rank, shift)
    return x


def _rolled(radix: Radix, text: Callable[[Size], Expr], x: Value, dimension: int, shift: Size) -> Value:
    size = x.shape[dimension]

    def index(position: Position) -> Position:
        return (Part(remaining(minus(radix.flat(position), text(shift)), text(size)), size),)

    return along(x, dimension, size, index)


@operator("unfold")
def _(node: Node) -> Value:
    x, dimension, step = node.value("self"), node.given["dimension"], node.given["step"]
    if not x.rank:
        return reshaped(node, x, node.shape)
    dimension = dimension % x.rank
    radix, size = node.writer.radix, x.shape[dimension]

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        start = times(radix.flat(positions[dimension]), Const(step))
        place = (Part(plus(start, radix.flat(positions[-1])), size),)
        return [*positions[:dimension], place, *positions[dimension + 1 : -1]]

    layout = (*x.layout[:dimension], None, *x.layout[dimension + 1 :], None)
    return moved(x, node.shape, layout, move)


@operator("repeat", "tile")
def _(node: Node) -> Value:
    x = node.value("self")
    behind = len(node.shape) - x.rank
    wide = reshaped(node, x, [*([1] * behind), *x.shape]) if behind else x
    radix, text = node.writer.radix, node.writer.size_text

    def move(positions: tuple[Position, ...]) -> Sequence[Position]:
        found: list[Position] = []
        for own, size, place in zip(wide.shape, node.shape, positions, strict=True):
            found.append(
                place if own == size or own == 1 else (Part(call("mod", radix.flat(place), text(own)), own),)
            )
        return found

    layout = tuple(
        d if own == size else None for own, size, d in zip(wide.shape, node.shape, wide.layout, strict=True)
    )
    return moved(wide, node.shape, layout, move)


@operator("constant_pad_nd", "pad")
def _(node: Node) -> Value:
    x, pads = node.value("self"), list(node.given["pad"])
    if node.get("mode", "constant") != "constant":
        raise Unsupported(f"padding with mode={node.given['mode']!r}")
    kind = float if x.is_real else bool if x.is_truth else int
    filled = Const(kind(node.get("value", 0)))
    radix, text = node.writer.radix, node.writer.size_text

    def read(positions: tuple[Position, ...]) -> Expr:
        found, inside = list(positions), None
        for place in range(len(pads) // 2):
            dimension = x.rank - 1 - place
            before, after = pads[2 * place], pads[2 * place + 1]
            flat, size = radix.flat(positions[dimension]), x.shape[dimension]
            found[dimension] = (
                (Part(plus(flat, Const(-before)), size),) if before or after else positions[dimension]
            )
            if before:
                inside = both(inside or Const(True), call("ge", flat, Const(before)))
            if after:
                inside = both(inside or Const(True), call("lt", flat, plus(text(size), Const(before))))
        own = x.at(found)
        if x.is_truth:
            own, given = number(x, own), number(x, filled)
            return call("ne", own if inside is None else call("where", inside, own, given), Const(0))
        return own if inside is None else call("where", inside, own, filled)

    layout = tuple(
        d if own == size else None for own, size, d in zip(x.shape, node.shape, x.layout, strict=True)
    )
    return Value(node.shape, node.dtype, layout, read)


def _triangle(name: str, fn: str) -> None:
    @operator(name)
    def entry(node: Node) -> Value:
        x, shift = node.value("self"), node.get("diagonal", 0)
        radix = node.writer.radix

        def read(positions: tuple[Position, ...]) -> Expr:
            row, column = radix.flat(positions[-2]), radix.flat(positions[-1])
            kept = call(fn, column, plus(row, Const(shift)))
            if x.is_truth:
                return both(kept, x.at(positions))
            return call("where", kept, x.at(positions), Const(0.0 if x.is_real else 0))

        return Value(x.shape, x.dtype, x.layout, read)


_triangle("tril", "le")
_triangle("triu", "ge")


# -- made of nothing -------------------------------------------------------------------------------


@operator("arange")
def _(node: Node) -> Value:
    start, step = node.get("start", 0), node.get("step", 1)
    if not node.dtype.is_floating_point:  # torch rounds both towards 0
        start, step = (int(end) if isinstance(end, float) else end for end in (start, step))
    radix, text = node.writer.radix, node.writer.size_text

    def read(positions: tuple[Position, ...]) -> Expr:
        if isinstance(start, float) or isinstance(step, float):
            flat = radix.flat(positions[0])
            return call("add", call("mul", flat, Const(float(step))), Const(float(start)))
        return plus(times(radix.flat(positions[0]), text(step)), text(start))

    return Value(node.shape, node.dtype, (None,), read)


@operator("full", "full_like", "new_full", "scalar_tensor")
def _(node: Node) -> Value:
    value = node.given["s"] if "s" in node.given else node.given["fill_value"]
    if not isinstance(value, bool | int | float):
        scalar = node.value("s" if "s" in node.given else "fill_value")
        return elementwise(node.shape, node.dtype, [scalar], lambda e: e)
    return elementwise(node.shape, node.dtype, [constant(value, node.dtype)], lambda e: e)


@operator("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_permuted")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [constant(0, node.dtype)], lambda e: e)


@operator("ones", "ones_like", "new_ones")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [constant(1, node.dtype)], lambda e: e)
