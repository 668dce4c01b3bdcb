"""What a region takes: as one kernel, by its plan; and as the compiler around would run it, by a roofline.

The other side is given the benefit of the doubt: every matrix product, every attention operator and every reduction with all
elementwise work around it is one launch that reads its inputs once and writes its outputs once, at the device's full rates.
Only rows that an SM cannot hold are read anew by every reduction that waits for another along them, and by what is computed
of them at last: so Inductor's loops run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from eqfuse import compiler, results
from eqfuse.arguments import DTYPE_NAMES
from eqfuse.compiled import Asked
from eqfuse.derived import Derived
from eqfuse.errors import EqfuseError
from eqfuse.extract.devices import Device
from eqfuse.limits import OverLimit
from eqfuse.operator.shapes import extents, hint
from eqfuse.rules.scope import current
from eqfuse.terms.nodes import Program
from eqfuse.terms.types import program_dtypes
from eqfuse.torch.operators.products import ATTENTION
from eqfuse.torch.operators.table import packet
from eqfuse.torch.regions import FREE, Region, added_by_key, arguments, kind, tensors_of

BLOCKS = 4
"""Thread blocks of 16 warps that fill an SM: a row that is larger than their share of it is not kept."""
AFTER_A_MAXIMUM = frozenset(
    f"aten.{name}"
    for name in (
        "softmax",
        "_softmax",
        "_safe_softmax",
        "log_softmax",
        "_log_softmax",
        "logsumexp",
        "cross_entropy_loss",
    )
)
"""Reductions that wait for one of their own: the sum for the maximum."""


def _bytes(tensor: torch.Tensor) -> float:
    # What is broadcast is read once.
    sizes = [
        hint(n)
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if hint(stride) != 0 or hint(n) == 1
    ]
    return float(math.prod(sizes) * tensor.element_size())


def _operations(node: fx.Node) -> float:
    """Multiplications and additions of a matrix product."""
    shapes = [
        [hint(n) for n in tensor.shape] for tensor in tensors_of(node.all_input_nodes) if tensor.dim() > 1
    ]
    if len(shapes) < 2:
        return 0.0
    if packet(node.target).removeprefix("aten.") in ATTENTION:
        q, k, v = (shapes + shapes[-1:])[:3]
        return 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    left, right = shapes[-2:]
    return 2.0 * math.prod(left) * right[-1]


def apart(region: Region, device: Device) -> float:
    """Seconds of a region outside of a kernel."""
    groups: list[list[fx.Node]] = []
    of: dict[fx.Node, int] = {}
    for node in region.nodes:
        alone = kind(node) == "product" or packet(node.target).removeprefix("aten.") in ATTENTION
        before = [of[each] for each in node.all_input_nodes if each in of]
        place = max(before, default=-1)
        if alone or place < 0 or _is_product(groups[place][0]):
            of[node] = len(groups)
            groups.append([node])
        else:
            of[node] = place
            groups[place].append(node)
    return sum(_seconds(group, device) for group in groups if any(_computes(node) for node in group))


def least(region: Region, device: Device) -> float:
    """Seconds that no kernel of a region can do without: to read its inputs, to multiply, and to write its outputs."""
    return _bound(region, device, tensors_of([*region.inputs, *region.outputs]), 1)


def least_backward(region: Region, device: Device) -> float:
    """Seconds that no kernel of its gradient can do without: it has a gradient for each input of real numbers to write, and
    each product is two."""
    read = tensors_of([*region.inputs, *region.outputs])
    wrote = [tensor for tensor in tensors_of(region.inputs) if tensor.is_floating_point()]
    return _bound(region, device, [*read, *wrote], 2)


def _bound(region: Region, device: Device, moved: Sequence[torch.Tensor], times: int) -> float:
    """Bytes and products at the device's full rates, side by side on a GPU. Under a condition a kernel may leave products out, and
    another order may have none of those that are added up or multiplied once more."""
    inside = tensors_of([*region.nodes, *region.inputs])
    whole = not any(tensor.dtype == torch.bool for tensor in inside) and not any(map(_is_cut, region.nodes))
    half = any(tensor.element_size() <= 2 for tensor in tensors_of(region.inputs))
    products = [node for node in region.nodes if _is_product(node) and not _may_be_spared(node, region)]
    work = times * sum(_operations(node) * _read(node, region) for node in products) if whole else 0.0
    terms = sum(map(_bytes, moved)) / device.bandwidth, work / _rate(device, half)
    return (max(terms) if device.kind == "gpu" else sum(terms)) + device.launch


def _read(node: fx.Node, region: Region) -> float:
    """The share of a value that is read: views may leave parts out."""
    if node in region.outputs or any(packet(user.target) not in FREE for user in node.users):
        return 1.0
    whole = max(1.0, sum(map(_bytes, tensors_of([node]))))
    shares = (_read(user, region) * sum(map(_bytes, tensors_of([user]))) / whole for user in node.users)
    return min(1.0, sum(shares)) if tensors_of([node]) else 1.0


LINEAR = frozenset(f"aten.{name}" for name in ("add", "sub", "rsub", "mul", "div", "neg", "_to_copy"))
"""Functions of which a sum is one of their sums, or may be."""


def _may_be_spared(product: fx.Node, region: Region) -> bool:
    """Whether what a region makes of a product is linear up to a sum or another product, so that orders may differ."""
    inside, seen, waiting = set(region.nodes), set[fx.Node](), [product]
    if kind(product) != "product":
        return False  # attention is linear in its values alone
    while waiting:
        for user in waiting.pop().users:
            name = packet(user.target)
            if user not in inside or user in seen:
                continue
            seen.add(user)
            if kind(user) == "product" or name in ("aten.sum", "aten.mean"):
                return True
            if name in LINEAR or name in FREE:
                waiting.append(user)
    return False


def _rate(device: Device, half: bool) -> float:
    return device.matrix_half if half else device.matrix_float


def _is_cut(node: fx.Node) -> bool:
    """Whether a node is attention that a mask or causal order may cut."""
    if packet(node.target).removeprefix("aten.") not in ATTENTION:
        return False
    given = arguments(node)
    return bool(given.get("is_causal")) or any(
        given.get(name) is not None for name in ("attn_mask", "attn_bias")
    )


def _is_product(node: fx.Node) -> bool:
    return kind(node) == "product" or packet(node.target).removeprefix("aten.") in ATTENTION


VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select",
        "split", "split_with_sizes", "alias", "detach", "clone",
    )
)  # fmt: skip


def _computes(node: fx.Node) -> bool:
    return packet(node.target) != "" and packet(node.target) not in VIEWS


def _seconds(group: Sequence[fx.Node], device: Device) -> float:
    inside = set(group)
    outside = dict.fromkeys(each for node in group for each in node.all_input_nodes if each not in inside)
    read = tensors_of(list(outside))
    wrote = [node for node in group if any(user not in inside for user in node.users)]
    moved = sum(map(_bytes, [*read, *tensors_of(wrote)])) + _again(group, read, wrote, device)
    added = [source for node in group if (source := added_by_key(node)) is not None]
    # Each is added to what is there, wherever that is: a GPU's caches do so.
    moved += (1 if device.kind == "gpu" else 2) * sum(map(_bytes, tensors_of(added)))
    half = any(tensor.element_size() <= 2 for tensor in read)
    work = sum(_operations(node) for node in group if _is_product(node))
    launches = max(1, sum(map(_steps, group)))
    return max(moved / device.bandwidth, work / _rate(device, half)) + launches * device.launch


def _steps(node: fx.Node) -> int:
    """How often torch runs the step of a scan: once for each position."""
    if packet(node.target) != "higher_order.scan":
        return 0
    return hint(arguments(node)["xs"][0].meta["val"].shape[0])


def _again(
    group: Sequence[fx.Node], read: Sequence[torch.Tensor], wrote: Sequence[fx.Node], device: Device
) -> float:
    """Bytes of rows that are read more than once."""
    waits: dict[fx.Node, int] = {}
    for node in group:
        before = max((waits.get(each, 0) for each in node.all_input_nodes), default=0)
        own = (1 + (packet(node.target) in AFTER_A_MAXIMUM)) if kind(node) == "reduction" else 0
        waits[node] = before + own
    found = 0.0
    for tensor in read:
        row = hint(tensor.shape[-1]) * tensor.element_size() if tensor.dim() > 1 else 0
        if row * BLOCKS > device.shared:
            passes = max(waits.values()) + any(waits[node] for node in wrote if _is_as_wide(node, tensor))
            found += max(0, passes - 1) * _bytes(tensor)
    return found


def _is_as_wide(node: fx.Node, tensor: torch.Tensor) -> bool:
    return any(each.numel() == tensor.numel() for each in tensors_of([node]))


def fused(
    program: Program,
    values: Sequence[tuple[str, torch.Tensor]],
    device: Device,
    derive: Callable[[], Derived],
    sizes: Mapping[str, int] | None = None,
) -> float:
    """Seconds of a program's kernel on tensors of these sizes, as the plan of its choice predicts, and as it is kept: what is
    known to be slow, or to have no plan, is derived by no later process. Raises EqfuseError."""
    names = {tensor.name for tensor in program.tensors}
    shapes = {name: tuple(map(hint, tensor.shape)) for name, tensor in values if name in names}
    dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in values if name in names}
    found = {axis: max(1, size) for axis, size in extents(program, shapes, sizes or {}).items()}
    key = program.source, tuple(found.items()), tuple(dtypes.items()), device.name
    if key not in _known:
        asked = Asked(found, program_dtypes(program, dtypes), device)
        subject = results.pricing(program, asked.extents, asked.dtypes, device.name, current())

        def make() -> float | str:
            try:
                derived = derive()
                ways = [compiler.predicted(derived, asked)]
                if (of_segments := compiler.of_segments(derived)) is not None:
                    ways.append(compiler.predicted_sorted(of_segments, asked))
                if (of_chunks := compiler.of_chunks(derived)) is not None:
                    ways.append(compiler.predicted_in_chunks(of_chunks, asked))
                return min(ways)
            except OverLimit:
                raise  # with more time there may be one
            except EqfuseError as error:
                return error.message

        _known[key], _ = results.kept("priced", subject, make)
    price = _known[key]
    if isinstance(price, str):
        raise EqfuseError(price)
    return price


_known: dict[object, float | str] = {}
"""Layers that are alike have one price."""
