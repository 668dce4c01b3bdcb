"""A rank's computations on torch tensors: kernels of what it computes between two exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eqfuse.arguments import DTYPE_NAMES, Arguments, Given
from eqfuse.devices import place_of
from eqfuse.kernel import Kernel
from eqfuse.rules.merge import State
from eqfuse.sharding.engine import Place
from eqfuse.sharding.exchange import Join, Pass, Request, Run, TorchArrays, answer
from eqfuse.sharding.nodes import Line, ShardPlan
from eqfuse.sharding.texts import Texts
from eqfuse.stream.streamer import nothing
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.sizes import undetermined

LARGE, GROUPS = 1 << 26, 4
"""Bytes of a group of tensors that become whole, and how many groups there are at most: a smaller one is no longer on its way than its
kernel has a tail."""


def groups_of(size: float) -> int:
    """How many groups operands of so many bytes become whole in."""
    return max(1, min(GROUPS, int(size / LARGE)))


class Answers(Protocol):
    def answer(self, request: Request) -> Any: ...


def driven(program: Run, group: Callable[[str], Answers]) -> dict[str, Any]:
    """What a rank's program makes, whose requests the ranks along a dimension of the mesh answer."""
    got: Any = None
    while True:
        try:
            request = program.send(got)
        except StopIteration as end:
            result: dict[str, Any] = end.value
            return result
        got = group(request.mesh).answer(request)


@dataclass(frozen=True)
class Alone:
    """Answers of the right shapes with no other rank: what a rank runs once with, so that its kernels are compiled."""

    place: Place
    mesh: str

    def answer(self, request: Request) -> Any:
        n, rank = self.place.size[self.mesh], self.place.rank[self.mesh]
        if isinstance(request, Pass):
            got = [t.new_zeros(shape) for t, shape in zip(request.tensors, request.like, strict=True)]
            return lambda: None if request.sources[rank] is None else got
        if not isinstance(request, Join):
            return answer([request] * n, rank, TorchArrays())
        operands = zip(request.tensors, request.dimensions, request.lengths, strict=True)
        return [
            [
                tensor.new_zeros(
                    [length if at == dimension else size for at, size in enumerate(tensor.shape)]
                )
                for length in each
            ]
            for tensor, dimension, each in operands
        ]


class Kernels(TorchArrays):
    """A rank's computations, by kernels of the texts of a plan's steps, for tensors of the dtypes and the device of those given."""

    def __init__(self, kernel: Kernel, plan: ShardPlan, given: Given) -> None:
        self.kernel, self.plan, self.device = kernel, plan, place_of(given.tensors)
        dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in given.tensors.items()}
        self._texts = Texts(kernel.program, plan, dtypes)
        self._aside: torch.cuda.Stream | None = None
        self._made: dict[
            tuple[str, ...], tuple[AbstractSet[str], Kernel, tuple[str, ...], tuple[str, ...]]
        ] = {}

    def compute(
        self, lines: Sequence[Line], gives: Sequence[str], values: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        key = tuple(gives)
        if key not in self._made:
            text = self._texts.text(lines, gives)
            kernel = self.kernel.made(text.source)
            names = Arguments(kernel.program).names
            self._made[key] = text.single, kernel, names, undetermined(kernel.program)
        single, kernel, names, lacking = self._made[key]
        read = {name: values[name].reshape(1) if name in single else values[name] for name in names}
        sizes = None
        if lacking:
            extents = place.local() | {own: place.extents[of] for own, of in self.plan.every.items()}
            sizes = {axis: extents[axis] for axis in lacking}
        made = kernel(**read, sizes=sizes)
        return dict(zip(gives, made if isinstance(made, tuple) else (made,), strict=True))

    def groups(self, arrays: Sequence[torch.Tensor]) -> int:
        return groups_of(sum(each.nbytes for each in arrays)) if self.device.type == "cuda" else 1

    @contextmanager
    def aside(self) -> Iterator[Callable[[Sequence[torch.Tensor]], Callable[[], None]]]:
        """On a GPU, a stream of its own, which waits for what is in the current one before."""
        if self.device.type != "cuda":
            yield lambda arrays: lambda: None
            return
        current = torch.cuda.current_stream(self.device)
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._aside.wait_stream(current)

        def after(arrays: Sequence[torch.Tensor]) -> Callable[[], None]:
            done = torch.cuda.current_stream(self.device).record_event()
            for array in arrays:
                array.record_stream(current)
            return lambda: current.wait_event(done)

        with torch.cuda.stream(self._aside):
            yield after

    def nothing(self, state: State, values: Mapping[str, Any], place: Place) -> torch.Tensor:
        extents = place.local()
        dtype = TORCH_DTYPES[self._texts.kept[self._texts.kinds[state.name]]]
        return nothing(state, [extents[axis] for axis in state.dims], dtype, self.device)

    def shape(self, array: torch.Tensor) -> tuple[int, ...]:
        return tuple(array.shape)
