"""What generated CPU code calls besides torch itself: irregular accesses, and functions that torch lacks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch

from eqfuse.terms.bounds import outside_error
from eqfuse.terms.integers import PHILOX, ROUNDS, WEYL

Index = int | slice | torch.Tensor

FEW_COLUMNS = 16
"""Columns of a matrix below which a vector times it is no work for a matrix library."""


def finite(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Infinities become 0, NaN stays."""
    return torch.nan_to_num(x, nan=math.nan, posinf=0.0, neginf=0.0, out=out)


def invertible(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """0 and infinities become 1, NaN stays."""
    bad = (x == 0) | torch.isinf(x)
    return torch.where(bad, torch.ones((), dtype=x.dtype), x, out=out)


def recorded(tensor: torch.Tensor) -> bool:
    """Whether torch records what is called: nothing may depend on numbers then, and every way is taken for all."""
    return type(tensor) is not torch.Tensor


def masked_product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_mask: torch.Tensor | None,
    right_mask: torch.Tensor | None,
) -> torch.Tensor:
    """`left @ right`, where an operand takes no part at the positions of the other one that its mask excludes (it is 0
    there). Dims: left and its mask (*batch, rows, axis), right and its mask (*batch, axis, columns)."""
    if recorded(left):
        one, other = left.unsqueeze(-1), right.unsqueeze(-3)
        if left_mask is not None:
            other = torch.where(left_mask.unsqueeze(-1), other, 0.0)
        if right_mask is not None:
            one = torch.where(right_mask.unsqueeze(-3), one, 0.0)
        return (one * other).sum(-2)
    product = torch.matmul(left, right)
    if torch.isfinite(product.sum()):
        return product
    columns, rows = left.flatten(0, -2), right.movedim(-2, -1).flatten(0, -2)
    bad = ~(columns.isfinite().all(dim=0) & rows.isfinite().all(dim=0))
    good = (~bad).nonzero().flatten()
    product = torch.matmul(left.index_select(-1, good), right.index_select(-2, good))
    for k in bad.nonzero().flatten().tolist():
        one, other = left[..., :, k, None], right[..., None, k, :]
        if left_mask is not None:
            other = torch.where(left_mask[..., :, k, None], other, 0.0)
        if right_mask is not None:
            one = torch.where(right_mask[..., None, k, :], one, 0.0)
        product += one * other
    return product


def gelu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """With erf. Not torch's own, which is NaN of an infinity on some processors and not on others."""
    share = torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)
    return torch.mul(x, share, out=out)


def integer_quotient(x: int | torch.Tensor, by: int | torch.Tensor) -> int | torch.Tensor:
    """Quotients of integers, rounded down; 0 where the divisor is 0."""
    if isinstance(by, torch.Tensor):
        return torch.where(by == 0, 0, x // torch.where(by == 0, 1, by))
    return x // by if by else x * 0


def integer_remainder(x: int | torch.Tensor, by: int | torch.Tensor) -> int | torch.Tensor:
    """Remainders of integers, of the sign of the divisor; 0 where it is 0."""
    if isinstance(by, torch.Tensor):
        return torch.where(by == 0, 0, x % torch.where(by == 0, 1, by))
    return x % by if by else x * 0


def wrapped(x: int, bits: int = 64) -> int:
    """The lowest bits of an integer, in two's complement."""
    half = 1 << (bits - 1)
    return (x + half) % (2 * half) - half


def to_whole(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Reals rounded half to even to integers between two ends; NaN is 0."""
    if not x.is_floating_point():
        return x.clamp(low, high)
    return torch.nan_to_num(x.round(), nan=0.0).clamp(low, high).to(torch.int64)


def uniform(seed: int | torch.Tensor, position: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers from 0 to 1: the upper 24 bits of the first word of Philox 4x32-10, the position its counter, the
    seed its key. Products of words wrap around, and their upper halves are right."""
    low = 0xFFFFFFFF
    p, s = _tensor(position), _tensor(seed)
    c0, c1, k0, k1 = p & low, (p >> 32) & low, s & low, (s >> 32) & low
    c2 = c3 = torch.zeros_like(p)
    for _ in range(ROUNDS):
        one, two = c0 * PHILOX[0], c2 * PHILOX[1]
        c0, c1, c2, c3 = ((two >> 32) & low) ^ c1 ^ k0, two & low, ((one >> 32) & low) ^ c3 ^ k1, one & low
        k0, k1 = (k0 + WEYL[0]) & low, (k1 + WEYL[1]) & low
    return (c0 >> 8).to(dtype) * 2.0**-24


def shifted_left(x: int | torch.Tensor, by: int | torch.Tensor) -> int | torch.Tensor:
    """`x << by` in 64 bits; 0 by a count below 0 or beyond them."""
    if isinstance(by, torch.Tensor):
        inside = (by >= 0) & (by < 64)
        return torch.where(inside, torch.bitwise_left_shift(_tensor(x), torch.where(inside, by, 0)), 0)
    if not 0 <= by < 64:
        return x * 0
    if isinstance(x, torch.Tensor):
        return torch.bitwise_left_shift(x, by)
    number = (x << by) & (2**64 - 1)
    return number - 2**64 if number >> 63 else number


def shifted_right(x: int | torch.Tensor, by: int | torch.Tensor) -> int | torch.Tensor:
    """`x >> by`, the sign moved in; the sign alone by a count below 0 or beyond 64 bits."""
    if isinstance(by, torch.Tensor):
        return torch.bitwise_right_shift(_tensor(x), torch.where((by < 0) | (by > 63), 63, by))
    count = by if 0 <= by < 64 else 63
    return torch.bitwise_right_shift(x, count) if isinstance(x, torch.Tensor) else x >> count


def _tensor(x: int | torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def to_float8(x: torch.Tensor, dtype: torch.dtype, largest: float) -> torch.Tensor:
    """A float8 dtype, rounded half to even; beyond the largest number is that number, whichever version of torch runs."""
    return x.clamp(-largest, largest).to(dtype)


def from_float8(x: torch.Tensor) -> torch.Tensor:
    """float8 as float32, from a table of all its values: torch's own conversion takes ten times as long."""
    table = torch.arange(256, dtype=torch.uint8).view(x.dtype).to(torch.float32)
    return table.index_select(0, x.view(torch.uint8).to(torch.int32).reshape(-1)).view(x.shape)


def fold_empty(op: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """max or min over a dimension that may have no positions."""
    if x.shape[dim]:
        return torch.amax(x, dim) if op == "max" else torch.amin(x, dim)
    shape = [extent for place, extent in enumerate(x.shape) if place != dim % x.dim()]
    return x.new_full(shape, _last(x.dtype, op == "max"))


def narrowed(integers: torch.Tensor, sizes: Mapping[str, int], longest: int) -> torch.Tensor:
    """Integers in 32 bits, where no axis has more positions than 32 bits are known to be enough for."""
    return integers.to(torch.int32) if max(sizes.values(), default=0) <= longest else integers


def fold_first(
    parts: Sequence[torch.Tensor], keys: Sequence[tuple[int, bool]], identity: Sequence[float], dim: int
) -> tuple[torch.Tensor, ...]:
    """The first of the states along one dimension, in the order of a fold: by key after key, each the place of a
    tensor and whether its greatest comes first. Among those that share the keys before it, the next one decides.
    """
    states: Sequence[torch.Tensor] = torch.broadcast_tensors(*parts)  # type: ignore[no-untyped-call]
    if states[0].shape[dim] == 0:
        return _of_nothing(states, identity, dim)
    found: dict[int, torch.Tensor] = {}
    among: torch.Tensor | None = None
    for place, greatest in keys:
        x = states[place]
        candidates = x if among is None else torch.where(among, x, _last(x.dtype, greatest))
        best = (torch.amax if greatest else torch.amin)(candidates, dim, keepdim=True)
        found[place] = best.squeeze(dim)
        if len(found) < len(keys):
            same = x == best
            if x.is_floating_point() and (recorded(x) or best.isnan().any()):  # which equals nothing
                same |= x.isnan() & best.isnan()
            among = same if among is None else among & same
    return tuple(found[place] for place in range(len(states)))


def first_ranks(
    groups: Sequence[Sequence[torch.Tensor]],
    keys: Sequence[tuple[int, bool]],
    identity: Sequence[float],
    dim: int,
    count: int,
) -> tuple[torch.Tensor, ...]:
    """The first so many states along one dimension, of all groups, in the order of a fold: by key after key, each the
    place of a tensor and whether its greatest comes first; the identity where there are no more."""
    parts: list[Sequence[torch.Tensor]] = [torch.broadcast_tensors(*group) for group in groups]  # type: ignore[no-untyped-call]
    states = [torch.cat(each, dim) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
    missing = count - states[0].shape[dim]
    if missing > 0:
        shape = [missing if place == dim else extent for place, extent in enumerate(states[0].shape)]
        states = [
            torch.cat((x, x.new_full(shape, number)), dim) for x, number in zip(states, identity, strict=True)
        ]
    place = _places(states, keys, dim, count)
    return tuple(x.gather(dim, place) for x in states)


def _places(
    states: Sequence[torch.Tensor], keys: Sequence[tuple[int, bool]], dim: int, count: int
) -> torch.Tensor:
    """Where the first so many states are along one dimension.

    torch selects by the first key; which of equal ones it takes it does not say. Only where more are equal to the last
    one that it took do the other keys decide among all.
    """
    if count == 0:
        return torch.zeros_like(states[0].narrow(dim, 0, 0), dtype=torch.int64)
    first, greatest = keys[0]
    x = _first_greatest(states[first], greatest).movedim(dim, -1)
    rows = [state.movedim(dim, -1).reshape(-1, x.shape[-1]) for state in states]
    x = x.reshape(-1, x.shape[-1])
    if recorded(x):
        place = _selected(rows, keys, count)
        return place.view(*(n for at, n in enumerate(states[0].shape) if at != dim), count).movedim(-1, dim)
    found = x.topk(count)
    last = found.values[:, -1:]
    clear = (x == last).sum(-1) == (found.values == last).sum(-1)
    clear &= ~last.isnan().squeeze(-1)
    among = [row.gather(-1, found.indices) for row in rows]
    place = found.indices.gather(-1, _sorted(among, keys))
    if not clear.all():
        left = (~clear).nonzero().squeeze(-1)
        place[left] = _selected([row[left] for row in rows], keys, count)
    shape = [extent for at, extent in enumerate(states[0].shape) if at != dim]
    return place.view(*shape, count).movedim(-1, dim)


def _sorted(states: Sequence[torch.Tensor], keys: Sequence[tuple[int, bool]]) -> torch.Tensor:
    """The order of states along their last dimension, by all keys."""
    place: torch.Tensor | None = None
    for key, greatest in reversed(keys):
        x = states[key] if place is None else states[key].gather(-1, place)
        by = torch.sort(_first_greatest(x, greatest), dim=-1, descending=True, stable=True).indices
        place = by if place is None else place.gather(-1, by)
    assert place is not None
    return place


def _selected(states: Sequence[torch.Tensor], keys: Sequence[tuple[int, bool]], count: int) -> torch.Tensor:
    """Where the first so many states are along their last dimension, whatever is equal."""
    (first, high), *others = keys
    if states[first].dtype in (torch.float32, torch.int32) and len(others) == 1:
        # One number of 64 bits, in the order of both keys: then a selection does, and no sort.
        ((second, low),) = others
        key = (_rank_of(states[first], high) << 32) + _rank_of(states[second], low)
        return key.topk(count).indices
    return _sorted(states, keys).narrow(-1, 0, count)


def _first_greatest(x: torch.Tensor, greatest: bool) -> torch.Tensor:
    """Numbers of which the greatest comes first, NaN before all."""
    return x if greatest else -x if x.is_floating_point() else ~x


def _rank_of(x: torch.Tensor, greatest: bool) -> torch.Tensor:
    """Integers of 32 bits, in 64, that are greater the earlier a number comes; NaN first of all."""
    if x.is_floating_point():
        bits = (x + 0.0).view(torch.int32)  # -0.0 is 0.0
        bits = bits ^ (bits >> 31 & 0x7FFFFFFF)
        bits = bits if greatest else ~bits
        return torch.where(x.isnan(), 0x7FFFFFFF, bits).to(torch.int64)
    return (x if greatest else ~x).to(torch.int64)


def _last(dtype: torch.dtype, greatest: bool) -> float:
    """What comes last among the numbers of a dtype where the greatest, or else the least, comes first."""
    if dtype.is_floating_point:
        return -math.inf if greatest else math.inf
    bounds = torch.iinfo(dtype)
    return bounds.min if greatest else bounds.max


def _of_nothing(
    states: Sequence[torch.Tensor], identity: Sequence[float], dim: int
) -> tuple[torch.Tensor, ...]:
    """A fold's identity, in the shape of its states without one dimension."""
    shape = [extent for place, extent in enumerate(states[0].shape) if place != dim]
    return tuple(x.new_full(shape, number) for x, number in zip(states, identity, strict=True))


def fold_pairwise(
    combine: Callable[..., tuple[torch.Tensor, ...]],
    parts: Sequence[torch.Tensor],
    identity: Sequence[float],
    dim: int,
    *,
    ordered: bool,
) -> tuple[torch.Tensor, ...]:
    """Folds tensors together over one dimension, halving it with `combine` of two states until one is left.

    `ordered`: neighbours are combined, so that parts keep their order; else whole halves, which are contiguous.
    """
    states: Sequence[torch.Tensor] = torch.broadcast_tensors(*parts)  # type: ignore[no-untyped-call]
    count = states[0].shape[dim]
    if count == 0:
        return _of_nothing(states, identity, dim)
    while count > 1:
        half = count // 2
        if ordered:
            even = [x.narrow(dim, 0, 2 * half).movedim(dim, -1) for x in states]
            sides = [[x[..., side::2].movedim(-1, dim) for x in even] for side in (0, 1)]
        else:
            sides = [[x.narrow(dim, side * half, half) for x in states] for side in (0, 1)]
        joined = torch.broadcast_tensors(*combine(*sides[0], *sides[1]), sides[0][0])[:-1]  # type: ignore[no-untyped-call]
        if count % 2:
            last = [x.narrow(dim, count - 1, 1) for x in states]
            joined = [torch.cat((x, y.to(x.dtype)), dim) for x, y in zip(joined, last, strict=True)]
        states, count = joined, half + count % 2
    return tuple(x.select(dim, 0).clone() for x in states)


def vector_product(vector: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``sum[k](vector[..., k] * matrix[..., k, n])``. For few columns the matrix library adds one product
    after the other, which is slower than torch's own sum, and less exact where there are many."""
    if matrix.shape[-1] < FEW_COLUMNS:
        return (vector.unsqueeze(-1) * matrix).sum(-2)
    return torch.matmul(vector.unsqueeze(-2), matrix).squeeze(-2)


def checked(what: str, index: Index, extent: int, mask: torch.Tensor | None = None) -> Index:
    """`index` where it is within an extent; where `mask` is off, any position. BindError if it is outside."""
    if isinstance(index, slice):
        return index
    if isinstance(index, int):
        if not 0 <= index < extent and (mask is None or bool(mask.any())):
            raise outside_error(what, index, extent)
        return min(max(index, 0), extent - 1)
    if not index.numel():
        return index
    if recorded(index):
        wrong = (index < 0) | (index >= extent)
        wrong = wrong if mask is None else wrong & mask
        torch._assert_async(~wrong.any(), f"{what}: a position is outside a dimension of {extent}")
        return index.clamp(0, extent - 1)
    low, high = index.aminmax()
    if low >= 0 and high < extent:
        return index
    wrong = (index < 0) | (index >= extent)
    if mask is not None:
        wrong = wrong & mask
    if wrong.any():
        raise outside_error(what, int(index.expand(wrong.shape)[wrong][0]), extent)
    return index.clamp(0, extent - 1)


def strided(
    what: str,
    source: torch.Tensor,
    starts: Sequence[int],
    steps: Sequence[Sequence[int]],
    sizes: Sequence[int],
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``source[starts[p] + sum(steps[p][d] * t[d])]`` for every ``t`` within `sizes`, as a view where that can be.

    Positions that `mask` (broadcastable to `sizes`) excludes may be outside: any element stands there.
    """
    inside = all(size > 0 for size in sizes)
    for start, step, extent in zip(starts, steps, source.shape, strict=True):
        reach = [s * (size - 1) for s, size in zip(step, sizes, strict=True)]
        low = start + sum(r for r in reach if r < 0)
        high = start + sum(r for r in reach if r > 0)
        inside = inside and low >= 0 and high < extent
    strides = [
        sum(step[d] * s for step, s in zip(steps, source.stride(), strict=True)) for d in range(len(sizes))
    ]
    if inside and all(stride >= 0 for stride in strides):
        offset = source.storage_offset() + sum(a * s for a, s in zip(starts, source.stride(), strict=True))
        return source.as_strided(sizes, strides, offset)
    tile = [torch.arange(size).view(-1, *(1,) * (len(sizes) - d - 1)) for d, size in enumerate(sizes)]
    index = [
        torch.tensor(start).view((1,) * len(sizes)) + sum(s * t for s, t in zip(step, tile, strict=True) if s)
        for start, step in zip(starts, steps, strict=True)
    ]
    return gather(what, source, index, (), tuple(range(len(sizes))), mask).expand(sizes)


def gather(
    what: str,
    source: torch.Tensor,
    index: Sequence[Index],
    sliced: tuple[int, ...],
    order: tuple[int, ...],
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``source[index]`` for tensors of positions, all of the tile's rank, mixed with plain positions and slices.

    `sliced` are the places in the tile of the dims that a slice stands for (extent 1 in every tensor of
    positions), `order` the permutation from (other dims, sliced dims in the order of `source`) to the tile.
    """
    if 0 in source.shape and mask is not None and (recorded(source) or not mask.any()):
        shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            mask.shape, *(i.shape for i in index if isinstance(i, torch.Tensor))
        )
        return source.new_zeros(shape)
    safe = [checked(what, at, extent, mask) for at, extent in zip(index, source.shape, strict=True)]
    view = source[tuple(slice(None) if isinstance(at, torch.Tensor) else at for at in safe)]
    kept = [at for at in safe if not isinstance(at, int)]
    irregular = [place for place, at in enumerate(kept) if isinstance(at, torch.Tensor)]
    regular = [place for place, at in enumerate(kept) if not isinstance(at, torch.Tensor)]
    positions = [at.squeeze(sliced) for at in kept if isinstance(at, torch.Tensor)]
    view = view.permute(irregular + regular)
    if len(positions) == 1 and positions[0].dim() == 1:
        found = view.index_select(0, positions[0])
    elif positions:
        found = view[tuple(positions)]
    else:
        found = view.reshape((1,) * (len(order) - view.dim()) + tuple(view.shape))
    return found.permute(order)


def search(elements: torch.Tensor, stop: int, target: int, *, right: bool) -> int:
    """How many of the first `stop` elements, which ascend, are below `target`, or with `right` at most `target`."""
    find = bisect_right if right else bisect_left
    return find(range(stop), target, key=lambda at: int(elements[at]))


def scatter(
    what: str,
    target: torch.Tensor,
    index: Sequence[int | torch.Tensor],
    value: torch.Tensor,
    sizes: Sequence[int],
    mask: torch.Tensor | None = None,
) -> None:
    """``target[index] = value`` at the positions of a tile of shape `sizes` where `mask` is on.

    Tensors among the indices, the value and the mask broadcast to `sizes`. Nothing else is touched.
    """
    selected = torch.ones((), dtype=torch.bool).expand(sizes) if mask is None else mask.expand(sizes)
    places = tuple(
        torch.as_tensor(checked(what, at, extent, selected)).expand(sizes)[selected]
        for at, extent in zip(index, target.shape, strict=True)
    )
    target[places] = value.expand(sizes)[selected].to(target.dtype)
