"""Matrix products, and attention, which is made of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eqfuse.terms.nodes import Const, Expr, Reduce, call
from eqfuse.torch.operators.pointwise import cast
from eqfuse.torch.operators.reductions import softmax
from eqfuse.torch.operators.table import (
    Made,
    Node,
    Unsupported,
    check_broadcast,
    elementwise,
    number,
    operator,
)
from eqfuse.torch.operators.views import permuted, reshaped
from eqfuse.torch.positions import Position, Size
from eqfuse.torch.values import Value, axes_in, position

Labels = tuple[Any, ...]
"""What the dimensions of a value are called in a contraction."""


def contracted(node: Node, operands: Sequence[tuple[Labels, Value]], kept: Labels) -> Value:
    """The sum of products of values over all labels but those kept. Dimensions with one label have one size, or are
    broadcast."""
    writer = node.writer
    sizes: dict[Any, Size] = {}
    layouts: dict[Any, Any] = {}
    for labels, value in operands:
        for label, size, digits in zip(labels, value.shape, value.layout, strict=True):
            known = sizes.setdefault(label, size)
            check_broadcast(known, size)
            check_broadcast(size, known)
            if known == 1:
                sizes[label], layouts[label] = size, digits
            elif size != 1:
                writer.equate(known, size)
                layouts[label] = max(
                    (each for each in (layouts.get(label), digits) if each is not None), key=len, default=None
                )
    order = (*kept, *(label for label in sizes if label not in kept))
    groups = writer.axes([sizes[label] for label in order], tuple(layouts.get(label) for label in order))

    def product(places: Sequence[Position]) -> Expr:
        at = dict(zip(order, places, strict=True))
        found: Expr | None = None
        for labels, value in operands:
            spots = [() if n == 1 else at[label] for n, label in zip(value.shape, labels, strict=True)]
            own = number(value, value.at(spots))
            found = own if found is None else call("mul", found, own)
        assert found is not None
        return found

    shape = tuple(sizes[label] for label in kept)
    outer, inner = groups[: len(kept)], groups[len(kept) :]
    if not axes_in(inner):
        return Value(shape, node.dtype, outer, lambda p: product([*p, *[()] * len(inner)]))
    expr = product([position(group) for group in groups])
    for axis in reversed(axes_in(inner)):
        expr = Reduce("sum", axis, expr)
    like = Value(shape, node.dtype, outer, operands[0][1].read)
    return writer.defined(like, outer, expr, "dot")


def product(node: Node, left: Value, right: Value) -> Value:
    """The matrix product of two values whose other dimensions are the same, or are broadcast:
    sum over the last of `left` and the last but one of `right`."""
    batch = tuple(range(left.rank - 2))
    operands = [((*batch, "row", "inner"), left), ((*batch, "inner", "column"), right)]
    return contracted(node, operands, (*batch, "row", "column"))


@operator("einsum")
def _(node: Node) -> Value:
    left, arrow, right = node.given["equation"].replace(" ", "").partition("->")
    values = node.given["tensors"]
    operands = [
        (_labels(text, value.rank), value) for text, value in zip(left.split(","), values, strict=True)
    ]
    every = [label for labels, _ in operands for label in labels]
    if arrow:
        kept = _labels(right, len(node.shape))
    else:
        once = sorted(label for label in every if isinstance(label, str) and every.count(label) == 1)
        kept = (*sorted({label for label in every if isinstance(label, int)}), *once)
    while len(operands) > 2:  # one after the other, as torch does
        (one, a), (other, b), *rest = operands
        wanted = {*kept, *(label for labels, _ in rest for label in labels)}
        joint = tuple(label for label in dict.fromkeys((*one, *other)) if label in wanted)
        operands = [(joint, contracted(node, [(one, a), (other, b)], joint)), *rest]
    return contracted(node, operands, kept)


def _labels(text: str, rank: int) -> Labels:
    """The letters of a term; dimensions under its ellipsis are numbered from the last, which is -1."""
    before, dots, after = text.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return (*before, *range(-hidden, 0), *after)


@operator("mm", "bmm")
def _(node: Node) -> Value:
    return product(node, node.value("self"), node.value("mat2"))


@operator("matmul")
def _(node: Node) -> Value:
    left, right = node.value("self"), node.value("other" if "other" in node.given else "tensor2")
    return _matmul(node, left, right)


def _matmul(node: Node, left: Value, right: Value) -> Value:
    one, other = left, right
    if left.rank == 1:
        one = reshaped(node, left, [1, *left.shape])
    if right.rank == 1:
        other = reshaped(node, right, [*right.shape, 1])
    rank = max(one.rank, other.rank)
    one = reshaped(node, one, [*([1] * (rank - one.rank)), *one.shape])
    other = reshaped(node, other, [*([1] * (rank - other.rank)), *other.shape])
    found = product(node, one, other)
    return found if found.shape == node.shape else reshaped(node, found, node.shape)


@operator("mv")
def _(node: Node) -> Value:
    return _matmul(node, node.value("self"), node.value("vec"))


@operator("dot", "vdot")
def _(node: Node) -> Value:
    return _matmul(node, node.value("self"), node.value("tensor" if "tensor" in node.given else "other"))


@operator("addmm", "baddbmm")
def _(node: Node) -> Value:
    names = ("mat1", "mat2") if "mat1" in node.given else ("batch1", "batch2")
    made = product(node, node.value(names[0]), node.value(names[1]))
    alpha, beta = node.get("alpha", 1), node.get("beta", 1)

    def compute(found: Expr, added: Expr) -> Expr:
        scaled = found if alpha == 1 else call("mul", Const(alpha), found)
        if beta == 0:
            return scaled
        return call("add", scaled, added if beta == 1 else call("mul", Const(beta), added))

    return elementwise(node.shape, node.dtype, [made, node.value("self")], compute)


@operator("linear")
def _(node: Node) -> Value:
    x, weight = node.value("input"), node.value("weight")
    turned = permuted(weight, list(reversed(range(weight.rank))))
    made = _matmul(node, x, turned) if weight.rank == 2 else _matmul(node, x, weight)
    if not node.has("bias"):
        return made
    return elementwise(node.shape, node.dtype, [made, node.value("bias")], lambda a, b: call("add", a, b))


ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@operator(*ATTENTION)
def _(node: Node) -> Made:
    """Attention, as torch documents it: a mask that is added, or of truth values, or causal from the upper left."""
    q, k, v = node.value("query"), node.value("key"), node.value("value")
    if node.get("dropout_p", 0.0):
        raise Unsupported("attention with dropout (call .eval(), or set its probability to 0)")
    width = node.writer.size_text(q.shape[-1])
    scale: Any = node.get("scale")
    factor: Expr = Const(float(scale)) if scale is not None else call("div", Const(1.0), call("sqrt", width))
    if scale is None and isinstance(q.shape[-1], int):
        factor = Const(1 / math.sqrt(q.shape[-1]))
    heads = [_repeated(node, part, q) for part in (k, v)]
    turned = permuted(heads[0], [*range(k.rank - 2), k.rank - 1, k.rank - 2])
    dot = _aligned(node, q, turned)
    scores = elementwise(dot.shape, dot.dtype, [dot], lambda e: call("mul", e, factor))
    masked = _masked(node, scores)
    weights = softmax(node, masked, (masked.rank - 1,), safe=node.has("attn_mask"))
    made = cast(_aligned(node, weights, heads[1]), node.dtype)
    if len(node.shapes) == 1:
        return made
    return made, *_Rest.of(node)


class _Rest:
    """What attention returns beside its output: read, it is refused."""

    @staticmethod
    def of(node: Node) -> tuple[Value, ...]:
        def refuse(_: Any) -> Expr:
            raise Unsupported("what attention keeps for its gradient")

        return tuple(
            Value(s, d, (None,) * len(s), refuse)
            for s, d in zip(node.shapes[1:], node.dtypes[1:], strict=True)
        )


def _aligned(node: Node, left: Value, right: Value) -> Value:
    rank = max(left.rank, right.rank)
    one = reshaped(node, left, [*([1] * (rank - left.rank)), *left.shape])
    other = reshaped(node, right, [*([1] * (rank - right.rank)), *right.shape])
    return product(node, one, other)


def _repeated(node: Node, part: Value, q: Value) -> Value:
    """Heads of keys or values, each for a group of queries' heads. What torch takes its attention apart to reads them so
    with no word in its arguments."""
    if min(part.rank, q.rank) < 4:
        return part
    own, wanted = part.shape[-3], q.shape[-3]
    if own in (1, wanted) or wanted == 1:
        return part
    if not (isinstance(own, int) and isinstance(wanted, int)):
        raise Unsupported("grouped queries with a number of heads that is not constant")
    shape = [*part.shape[:-3], own, 1, *part.shape[-2:]]
    wide = [*part.shape[:-3], own, wanted // own, *part.shape[-2:]]
    grouped = elementwise(wide, part.dtype, [reshaped(node, part, shape)], lambda e: e)
    return reshaped(node, grouped, [*part.shape[:-3], wanted, *part.shape[-2:]])


def _masked(node: Node, scores: Value) -> Value:
    nothing = Const(float("-inf"))
    mask = node.given.get("attn_mask", node.given.get("attn_bias"))
    if mask is not None:
        if mask.is_truth:
            return elementwise(
                scores.shape, scores.dtype, [scores, mask], lambda e, p: call("where", p, e, nothing)
            )
        scores = elementwise(scores.shape, scores.dtype, [scores, mask], lambda e, m: call("add", e, m))
    if not node.get("is_causal", False):
        return scores
    radix = node.writer.radix

    def read(positions: tuple[Position, ...]) -> Expr:
        row, column = radix.flat(positions[-2]), radix.flat(positions[-1])
        return call("where", call("le", column, row), scores.at(positions), nothing)

    return Value(scores.shape, scores.dtype, scores.layout, read)
