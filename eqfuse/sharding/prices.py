"""What a strategy sends and holds, and how long its exchanges take by the model of a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from eqfuse.extract.devices import Device
from eqfuse.sharding.kernels import groups_of
from eqfuse.sharding.links import Link
from eqfuse.sharding.nodes import (
    PASSED,
    RANK,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Exchange,
    Grouped,
    Line,
    Narrow,
    Ring,
    Sharding,
    ShardPlan,
    Tree,
)
from eqfuse.terms.nodes import Call, Load, Program, Reduce, free_axes, walk
from eqfuse.terms.sizes import places


@dataclass(frozen=True)
class Price:
    """Of one rank: bytes that it sends, bytes that it holds beside its shards, exchanges, the seconds that these take by the model
    of the link, and those of its computations by the rates of the device."""

    sent: float
    held: float
    exchanges: int
    exchanging: float
    computing: float

    @property
    def seconds(self) -> float:
        return self.exchanging + self.computing


@dataclass(frozen=True)
class Sizes:
    """The extents of axes over all ranks, numbers of ranks by dimension of the mesh, and bytes of an element."""

    program: Program
    sharding: Sharding
    extents: Mapping[str, int]
    ranks: Mapping[str, int]
    itemsize: int = 4

    def of(self, axis: str) -> float:
        found = self.sharding.classes.get(axis)
        count = self.extents.get(axis, 1)
        return count if found is None else count / self.ranks[self.sharding.meshes[found]]


def price(plan: ShardPlan, sizes: Sizes, link: Link, device: Device) -> Price:
    """The price of a strategy."""
    sent = held = exchanging = computing = 0.0
    exchanges = 0
    for step in plan.steps:
        if isinstance(step, Grouped):
            size, kept, each = _exchange(step.fetch, plan, sizes, link, device, sizes.ranks[step.fetch.mesh])
            work = device.launch + _computing(step.compute.lines, plan, sizes, device)
            sent, held, computing, exchanges = sent + size, held + kept, computing + work, exchanges + 1
            groups = groups_of(size / max(1, sizes.ranks[step.fetch.mesh] - 1)) if device.kind == "gpu" else 1
            exchanging += max(each / groups, each - work * (groups - 1) / groups)
        elif isinstance(step, Compute):
            computing += device.launch + _computing(step.lines, plan, sizes, device)
        elif not isinstance(step, Narrow):
            n = sizes.ranks[step.mesh]
            size, kept, each = _exchange(step, plan, sizes, link, device, n)
            sent, held, exchanging, exchanges = sent + size, held + kept, exchanging + each, exchanges + 1
            if isinstance(step, Ring):
                computing += n * (device.launch + _computing(step.update, plan, sizes, device))
    return Price(sent, held, exchanges, exchanging, computing)


def _exchange(
    step: Exchange, plan: ShardPlan, sizes: Sizes, link: Link, device: Device, n: int
) -> tuple[float, float, float]:
    """Bytes sent, bytes held and seconds of one exchange."""
    match step:
        case AllGather(_, values):
            size = sum(_bytes(plan, name, sizes) for name in values)
            return size * (n - 1), size * n, link.all_gather(n, size)
        case AllReduce(_, _, values):
            size = sum(_bytes(plan, name, sizes) for name in values)
            return 2 * size * (n - 1) / n, size, link.all_reduce(n, size)
        case AllToAll(_, values, _):
            size = sum(_bytes(plan, name, sizes) for name in values)
            return size * (n - 1) / n, 2 * size, link.all_to_all(n, size)
        case Tree(_, values, _):
            size = sum(_bytes(plan, name, sizes) for name in values)
            return 2 * size, 2 * size, link.tree(n, size)
        case Concatenate(_, tensors):
            size = sum(_operand(plan, tensor, sizes) for tensor, *_ in tensors)
            return size * (n - 1), size * n, link.all_gather(n, size)
        case Ring(_, states, tensors, update):
            size = sum(_operand(plan, tensor, sizes) for tensor, *_ in tensors)
            update_seconds = device.launch + _computing(update, plan, sizes, device)
            kept = sum(_bytes(plan, state.name, sizes) for state in states)
            ring = link.ring(n, size, update_seconds)
            return size * (n - 1), 2 * size + kept, ring - (n - 1) * update_seconds


def _bytes(plan: ShardPlan, name: str, sizes: Sizes) -> float:
    """Of a state: four for an element."""
    return 4 * prod(_extent(plan, axis, sizes) for axis in plan.dims[name] if axis != RANK)


def _extent(plan: ShardPlan, axis: str, sizes: Sizes) -> float:
    if axis == RANK:
        return max(sizes.ranks.values())
    of = plan.every.get(axis)
    return sizes.extents.get(of, 1) if of else sizes.of(axis.removesuffix(f"_{PASSED}"))


def _operand(plan: ShardPlan, name: str, sizes: Sizes) -> float:
    if name in plan.dims:
        return _bytes(plan, name, sizes)
    tensor = next(each for each in sizes.program.tensors if each.name == name)
    axes = {at: axis for axis, of, at in places(sizes.program) if of == name}
    return sizes.itemsize * prod(sizes.of(axes.get(at, "")) for at in range(tensor.rank))


def _computing(lines: Sequence[Line], plan: ShardPlan, sizes: Sizes, device: Device) -> float:
    """An operation for each position of the axes that a reduction's body varies with, two at the rate of matrix products for a sum of
    products. What lines share is computed once."""
    seconds = 0.0
    seen: set[Reduce] = set()
    for line in lines:
        for node in walk(line.value):
            if not isinstance(node, Reduce) or node in seen:
                continue
            seen.add(node)
            axes = {*free_axes(node.body), node.axis}
            if line.is_prefix and node is line.value:
                axes -= {node.axis}
            count = prod(_extent(plan, axis, sizes) for axis in axes)
            factors = [part for part in node.body.parts if isinstance(part, Load | Reduce | Call)]
            is_product = node.op == "sum" and isinstance(node.body, Call) and node.body.fn == "mul"
            apart = is_product and len(factors) == 2 and free_axes(factors[0]) ^ free_axes(factors[1])
            seconds += 2 * count / device.matrix_half if apart else count / device.elementwise
    return seconds


def table(
    prices: Mapping[str, Price],
    refused: Mapping[str, str],
    link: Link,
    ranks: Mapping[str, int],
    extents: Mapping[str, int],
) -> str:
    """Strategies with their prices, the cheapest first, and why there are no others."""
    over = " x ".join(f"{n} {mesh}" for mesh, n in ranks.items())
    rates = f"{1e6 * link.latency:.3g} us a message, {1e-9 / link.byte:.3g} GB/s"
    lines = [
        f"{over} ranks, {link.name}: {rates} ({link.of})",
        "  ".join(f"{axis}={extents[axis]}" for axis in extents),
        f"{'strategy':28} {'exchanges':>9} {'sent':>10} {'held':>10} {'exchanging':>13} {'computing':>13}",
    ]
    lines += [
        f"{name:28} {each.exchanges:9} {_amount(each.sent):>10} {_amount(each.held):>10}"
        f" {1e6 * each.exchanging:10.1f} us {1e6 * each.computing:10.1f} us"
        for name, each in sorted(prices.items(), key=lambda row: (row[1].seconds, row[0]))
    ]
    return "\n".join([*lines, *(f"{name:28} not: {why}" for name, why in refused.items())])


def _amount(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
