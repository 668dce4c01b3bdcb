"""What ranks ask of each other, and who answers: the ranks of a process group, or simulated ones.

A rank's program is a generator: it yields requests and is sent their answers. So one program runs on every rank of
`torch.distributed`, and on ranks that one process simulates, of torch tensors or of the arrays of a finite field.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from eqfuse.errors import EqfuseError

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The one that torch has not deprecated."""


LARGE = 1 << 20
"""Bytes above which tensors travel apart: a copy to one message takes longer than another message."""


@dataclass(frozen=True)
class Gather:
    """Every rank's tensors, of the same shapes on all; the answer has a first dimension of ranks for each."""

    mesh: str
    tensors: tuple[Any, ...]


@dataclass(frozen=True)
class Join:
    """Every rank's tensors, of different lengths along a dimension; the answer has the ranks' parts of each."""

    mesh: str
    tensors: tuple[Any, ...]
    dimensions: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Total:
    """Tensors folded over the ranks by "sum", "prod", "max" or "min"."""

    mesh: str
    op: str
    tensors: tuple[Any, ...]


@dataclass(frozen=True)
class Parts:
    """This rank's part along a dimension of every rank's tensors, which are cut alike; the answer has a first dimension of ranks."""

    mesh: str
    tensors: tuple[Any, ...]
    dimensions: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """A rank's tensors from `sources[rank]`, None where it gets nothing; what it gets has the shapes `like`. The answer is a function
    that waits for them."""

    mesh: str
    tensors: tuple[Any, ...]
    sources: tuple[int | None, ...]
    like: tuple[tuple[int, ...], ...]


Request = Gather | Join | Total | Parts | Pass
Run = Generator[Request, Any, dict[str, Any]]
"""A rank's program: the outputs by name."""


class Arrays(Protocol):
    """What simulated ranks do with the arrays that they hold; dimensions are those of one array."""

    def stack(self, arrays: Sequence[Any]) -> Any: ...

    def join(self, arrays: Sequence[Any], dimension: int) -> Any: ...

    def part(self, array: Any, dimension: int, start: int, length: int) -> Any: ...

    def fold(self, op: str, arrays: Sequence[Any]) -> Any: ...


Rank = Mapping[str, int]
"""A rank's numbers along the dimensions of the mesh."""


def simulated(ranks: Sequence[tuple[Run, Rank]], arrays: Arrays) -> list[dict[str, Any]]:
    """What ranks make that run in turn, from one exchange to the next."""
    results: list[dict[str, Any]] = []
    answers: list[Any] = [None] * len(ranks)
    while True:
        requests: list[Request] = []
        for got, (run, _) in zip(answers, ranks, strict=True):
            try:
                requests.append(run.send(got))
            except StopIteration as end:
                results.append(end.value)
        if not requests:
            return results
        if len(requests) < len(ranks) or len({(type(each), each.mesh) for each in requests}) > 1:
            raise EqfuseError("ranks are at different exchanges", hint="a fault of eqfuse: please report it")
        mesh = requests[0].mesh
        numbers = [rank for _, rank in ranks]
        answers = []
        for rank in numbers:
            peers = [at for at, each in enumerate(numbers) if {**each, mesh: 0} == {**rank, mesh: 0}]
            peers.sort(key=lambda at: numbers[at][mesh])
            answers.append(answer([requests[at] for at in peers], rank[mesh], arrays))


def answer(requests: Sequence[Any], rank: int, arrays: Arrays) -> Any:
    """What a rank gets for its request, from those of all ranks along a dimension of the mesh."""
    first = requests[rank]
    columns = list(zip(*(each.tensors for each in requests), strict=True))
    match first:
        case Gather():
            return [arrays.stack(column) for column in columns]
        case Join():
            return columns
        case Total():
            return [arrays.fold(first.op, column) for column in columns]
        case Parts():
            start = sum(first.lengths[:rank])
            return [
                arrays.stack([arrays.part(x, dimension, start, first.lengths[rank]) for x in column])
                for column, dimension in zip(columns, first.dimensions, strict=True)
            ]
        case Pass():
            source = first.sources[rank]
            got = None if source is None else list(requests[source].tensors)
            return lambda: got


class InTurn:
    """What runs in the order in which it is written."""

    @contextmanager
    def aside(self) -> Iterator[Callable[[Sequence[Any]], Callable[[], None]]]:
        yield lambda arrays: lambda: None


class TorchArrays(InTurn):
    """Torch tensors of simulated ranks."""

    def stack(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(arrays))

    def join(self, arrays: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
        first = arrays[0]
        if len(arrays) == 1:
            return first
        rows = [each.shape[0] if each.ndim else 1 for each in arrays]
        places = [first.data_ptr() + sum(rows[:at]) * first[:1].nbytes for at in range(len(arrays))]
        apart = any(
            each.data_ptr() != at or not each.is_contiguous() for each, at in zip(arrays, places, strict=True)
        )
        if (
            dimension
            or apart
            or first.untyped_storage().data_ptr() != arrays[-1].untyped_storage().data_ptr()
        ):
            return torch.cat(_widened(arrays), dimension).view(first.dtype)
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())  # they lie end to end

    def part(self, array: torch.Tensor, dimension: int, start: int, length: int) -> torch.Tensor:
        return array.narrow(dimension, start, length)

    def fold(self, op: str, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(list(arrays))
        match op:
            case "sum":
                return stacked.sum(0)
            case "prod":
                return stacked.prod(0)
            case _:
                return stacked.amax(0) if op == "max" else stacked.amin(0)


class Group:
    """A process group, which answers the requests of this rank's program. All parts of a request travel in one message."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group, self.name = group, name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._on_hosts = dist.get_backend(group) == "gloo"

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where the group's library exchanges it: gloo does so in the memory of the hosts."""
        return tensor.cpu() if self._on_hosts else tensor

    def answer(self, request: Request) -> Any:
        with self._ended(type(request).__name__.lower()):
            return self._answered(request)

    @contextmanager
    def _ended(self, what: str) -> Iterator[None]:
        """Says which exchange did not end, where torch says that one did not. Raises EqfuseError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise EqfuseError(
                f"rank {self.rank} waited in vain for the others over {self.name!r} ({what}): {first}",
                hint="another rank has ended, or has not made this call before the group's time-out",
            ) from error

    def _answered(self, request: Request) -> Any:
        match request:
            case Gather(_, tensors):
                return self._gathered(tensors)
            case Join(_, tensors, dimensions, lengths):
                return self._joined(tensors, dimensions, lengths)
            case Total(_, op, tensors):
                return self._totals(op, tensors)
            case Parts(_, tensors, dimensions, lengths):
                return self._parts(tensors, dimensions, lengths)
            case Pass(_, tensors, sources, like):
                return self._passed(tensors, sources, like)

    def numbers(self, own: Sequence[int], device: torch.device) -> list[list[int]]:
        """Integers of every rank, as many on each."""
        with self._ended("what every rank is called with"):
            sent = torch.tensor(own, dtype=torch.int64, device="cpu" if self._on_hosts else device)
            got = sent.new_empty(self.size * len(own))
            _all_gather(got, sent, group=self.group)
            rows: list[list[int]] = got.view(self.size, -1).tolist()
            return rows

    def _gathered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if sum(tensor.nbytes for tensor in tensors) > LARGE and len(tensors) > 1:
            return [each for tensor in tensors for each in self._gathered([tensor])]
        sent = self._sent(_packed(tensors))
        got = sent.new_empty((self.size, sent.numel()))
        _all_gather(got.view(-1), sent, group=self.group)
        return _unpacked(got.to(tensors[0].device), [(t.dtype, t.shape) for t in tensors])

    def _joined(
        self, tensors: Sequence[torch.Tensor], dimensions: Sequence[int], lengths: Sequence[tuple[int, ...]]
    ) -> list[list[torch.Tensor]]:
        """Parts of one length each travel as they lie; others filled up to the longest."""
        padded = []
        for tensor, dimension, each in zip(tensors, dimensions, lengths, strict=True):
            missing = max(each) - tensor.shape[dimension]
            shape = [missing if at == dimension else size for at, size in enumerate(tensor.shape)]
            padded.append(torch.cat([tensor, tensor.new_empty(shape)], dimension) if missing else tensor)
        return [
            [part.narrow(dimension, 0, length) for part, length in zip(stacked, each, strict=True)]
            for stacked, dimension, each in zip(self._gathered(padded), dimensions, lengths, strict=True)
        ]

    def _totals(self, op: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ops = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT}
        ops |= {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        ordered = op in ("max", "min")
        found: list[torch.Tensor | None] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            at = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sent = torch.cat([tensors[number].reshape(-1) for number in at])
            keys = _keys(sent, op) if ordered and dtype.is_floating_point else sent
            keys = self._sent(keys)
            dist.all_reduce(keys, op=ops[op], group=self.group)
            keys = keys.to(sent.device)
            got = _of_keys(keys, dtype) if ordered and dtype.is_floating_point else keys
            parts = torch.split(got, [tensors[number].numel() for number in at])
            for number, part in zip(at, parts, strict=True):
                found[number] = part.reshape(tensors[number].shape)
        return [tensor for tensor in found if tensor is not None]

    def _parts(
        self, tensors: Sequence[torch.Tensor], dimensions: Sequence[int], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        cut = [
            torch.split(tensor, list(lengths), dim) for tensor, dim in zip(tensors, dimensions, strict=True)
        ]
        sent = [_packed(column) for column in zip(*cut, strict=True)]
        own = [parts[self.rank] for parts in cut]
        whole = self._sent(torch.cat(sent))
        got = whole.new_empty(self.size * sent[self.rank].numel())
        sizes = [each.numel() for each in sent]
        each = [sizes[self.rank]] * self.size
        dist.all_to_all_single(got, whole, each, sizes, group=self.group)
        return _unpacked(
            got.to(tensors[0].device).view(self.size, sent[self.rank].numel()),
            [(t.dtype, t.shape) for t in own],
        )

    def _passed(
        self,
        tensors: Sequence[torch.Tensor],
        sources: Sequence[int | None],
        like: Sequence[tuple[int, ...]],
    ) -> Any:
        source = sources[self.rank]
        sent = [self._sent(tensor.contiguous()) for tensor in tensors]
        got = None if source is None else [t.new_empty(s) for t, s in zip(sent, like, strict=True)]
        ops: list[dist.P2POp] = []
        for to, of in enumerate(sources):
            if of == self.rank:
                peer = dist.get_global_rank(self.group, to)
                ops += [dist.P2POp(dist.isend, each, peer, self.group) for each in sent if each.numel()]
        if got is not None and source is not None:
            peer = dist.get_global_rank(self.group, source)
            ops += [dist.P2POp(dist.irecv, each, peer, self.group) for each in got if each.numel()]
        waiting = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> list[torch.Tensor] | None:
            with self._ended("pass"):
                for each in waiting:
                    each.wait()
            return got and [each.to(tensor.device) for each, tensor in zip(got, tensors, strict=True)]

        return wait


def _widened(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one dtype as 64-bit numbers, where these lie side by side in all of them: a copy of parts, which computes the place of
    each number, takes a fourth of the time of 16-bit numbers."""
    times = 8 // tensors[0].element_size()
    if times < 2 or not tensors[0].ndim:
        return list(tensors)
    places = [n for t in tensors for n in (t.shape[-1], t.storage_offset(), *t.stride()[:-1])]
    if any(t.stride(-1) != 1 for t in tensors) or any(n % times for n in places):
        return list(tensors)
    return [tensor.view(torch.int64) for tensor in tensors]


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors, one after the other; the widest elements first, so that all are aligned."""
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    parts = [tensors[number].contiguous().reshape(-1).view(torch.uint8) for number in order]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpacked(rows: torch.Tensor, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[torch.Tensor]:
    """The tensors of each row of bytes."""
    order = sorted(range(len(kinds)), key=lambda number: -kinds[number][0].itemsize)
    sizes = [kinds[number][0].itemsize * kinds[number][1].numel() for number in order]
    found: dict[int, torch.Tensor] = {}
    for number, part in zip(order, torch.split(rows, sizes, 1), strict=True):
        dtype, shape = kinds[number]
        whole = part.reshape(-1).view(dtype) if part.numel() else part.new_empty(0, dtype=dtype)
        found[number] = whole.reshape(rows.shape[0], *shape)
    return [found[number] for number in range(len(kinds))]


def _keys(values: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of floats, NaN beyond all others: libraries differ in what the maximum of NaN is."""
    integers = {4: torch.int32, 8: torch.int64}[values.element_size()]
    most = torch.iinfo(integers).max
    bits = values.view(integers)
    keys = torch.where(bits < 0, bits ^ most, bits)
    return torch.where(values.isnan(), most if op == "max" else -most - 1, keys).contiguous()


def _of_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    integers = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    most = torch.iinfo(integers).max
    nan = (keys == most) | (keys == -most - 1)
    bits = torch.where(keys < 0, keys ^ most, keys)
    return torch.where(nan, float("nan"), bits.view(dtype))
