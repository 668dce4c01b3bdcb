"""Runs a tile program as compiled C++."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from eqfuse.terms.bounds import outside_error
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.tile import nodes as ir
from eqfuse.tile.lower.types import POSITIONS
from eqfuse.tile.native.build import library_of
from eqfuse.tile.native.context import Interface
from eqfuse.tile.native.memory import outputs
from eqfuse.tile.native.printer import source_of
from eqfuse.tile.native.products import give
from eqfuse.tile.storage import SMALL_ELEMENTS, buffer_dtypes, buffers_for, loaded_dtypes, resolve_extents
from eqfuse.tile.walk import nested, ops_of

Unit = frozenset[tuple[str, int]]


class NativeProgram:
    """A tile program as C++, compiled for tensors of these ranks and one layout: `unit` are the dimensions along which
    neighbours are neighbours in memory. The sizes are given at each call; `extents` only decide how loops are nested."""

    def __init__(
        self,
        program: ir.TileProgram,
        ranks: Mapping[str, int],
        unit: Unit,
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        flags: tuple[str, ...] = (),
    ) -> None:
        self.program = program
        self.dtypes = buffer_dtypes(program)
        self.loaded = loaded_dtypes(program)
        self.sizes = resolve_extents(program, extents, shards)
        self.interface = Interface.of(program, ranks, unit, self.sizes)
        self.text = source_of(program, self.interface, self.sizes)
        self._library = library_of(self.text, flags)
        if any(isinstance(getattr(s, "op", None), ir.Dot) for k in program.kernels for s in nested(k.body)):
            give(self._library, flags)
        self.longest = longest(program)
        self._run = self._library.run
        self._run.restype = None

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        threads: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """The outputs by name, of tensors that are `prepared`; on as many threads as torch uses, unless told. Raises
        BindError where an index tensor points outside."""
        sizes = resolve_extents(self.program, extents, shards)
        buffers = buffers_for(self.program, sizes, self.dtypes, outputs().empty)
        self.into(tensors, buffers, scalars, sizes, threads)()
        return {buffer.name: buffers[buffer.name] for buffer in self.program.buffers if buffer.is_output}

    def buffers(self, extents: Mapping[str, int], shards: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Memory for all that the program writes at these sizes."""
        return buffers_for(self.program, resolve_extents(self.program, extents, shards), self.dtypes)

    def into(
        self,
        tensors: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int],
        threads: int | None = None,
    ) -> Callable[[], None]:
        """What runs the program on this memory, again and again. It raises BindError as a call does."""
        memory = [{**tensors, **buffers}[name] for name in self.interface.tensors]
        frame = self._frame(memory, sizes)
        addresses = frame.addresses(*(tensor.data_ptr() for tensor in memory))
        numbers = frame.numbers(scalars)

        def run(kept: object = memory) -> None:
            self._launch(frame, addresses, numbers, threads)

        return run

    def direct(
        self,
        names: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        wanted: Sequence[str],
    ) -> Callable[[Mapping[str, Any], Sequence[int]], Any]:
        """What runs calls whose tensors are like these: it takes the values of a call by name, and the addresses of its
        tensors, which are called `names`, and gives the `wanted` outputs."""
        sizes = resolve_extents(self.program, extents, shards)
        buffers = buffers_for(self.program, sizes, self.dtypes)
        frame = self._frame([{**tensors, **buffers}[name] for name in self.interface.tensors], sizes)
        makers = [outputs().maker(buffer.shape, buffer.dtype) for buffer in buffers.values()]
        places = {name: place for place, name in enumerate((*names, *buffers))}
        order = [places[name] for name in self.interface.tensors]
        ordered = itemgetter(*order) if len(order) > 1 else tuple
        results = [places[name] - len(names) for name in wanted]
        pack, launch = frame.addresses, self._launch
        numbers = None if frame.reals[0] or frame.integers[0] else frame.numbers({})

        def call(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            new = [make() for make in makers]
            known = (*addresses, *[tensor.data_ptr() for tensor in new])
            launch(frame, pack(*ordered(known)), numbers or frame.numbers(values), None)
            return new[results[0]] if len(results) == 1 else tuple([new[place] for place in results])

        def call_of_one(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            new = make()
            where = pack(*ordered((*addresses, new.data_ptr())))
            launch(frame, where, numbers or frame.numbers(values), None)
            return new

        if len(makers) > 1 or len(results) > 1:
            return call
        (make,) = makers
        return call_of_one

    def _frame(self, ordered: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> _Frame:
        order = self.interface
        layout = [n for t in ordered for pair in zip(t.stride(), t.shape, strict=True) for n in pair]
        return _Frame(
            (ctypes.c_longlong * len(layout))(*layout),
            (ctypes.c_longlong * len(order.axes))(*(sizes[axis] for axis in order.axes)),
            struct.Struct(f"{len(ordered)}P").pack,
            (order.reals, ctypes.c_double * len(order.reals)),
            (order.integers, ctypes.c_longlong * len(order.integers)),
            sum(tensor.numel() for tensor in ordered) < SMALL_ELEMENTS,
        )

    def _launch(self, frame: _Frame, addresses: Any, numbers: tuple[Any, Any], threads: int | None) -> None:
        failure = _Failure()
        threads = threads or (1 if frame.is_small else torch.get_num_threads())
        self._run(addresses, frame.layout, frame.axes, *numbers, threads, failure)
        if failure[0]:
            name = self.interface.tensors[failure[1]]
            raise outside_error(name, failure[2], failure[3])


_Failure = ctypes.c_longlong * 4


@dataclass(frozen=True)
class _Frame:
    """What calls on tensors of the same shapes and strides share: what the compiled function takes, but for addresses and
    numbers, of which the types are here. `is_small` if more threads than one are not worth waking."""

    layout: Any
    axes: Any
    addresses: Any
    reals: tuple[Sequence[str], Any]
    integers: tuple[Sequence[str], Any]
    is_small: bool

    def numbers(self, scalars: Mapping[str, Any]) -> tuple[Any, Any]:
        """Scalars of a call as the function takes them."""
        (reals, Reals), (integers, Integers) = self.reals, self.integers
        return Reals(*[float(scalars[n]) for n in reals]), Integers(*[int(scalars[n]) for n in integers])


def longest(program: ir.TileProgram) -> int:
    """The positions that an axis may have in C++, where positions, and what 32 bits are enough for at `POSITIONS` of them, are
    of 32 bits: their sums with others, and what they are multiplied with."""
    return min((_longest(kernel) for kernel in program.kernels), default=2**30)


def _longest(kernel: ir.Kernel) -> int:
    ops = ops_of(kernel.body)
    most = 1
    for let in (stmt for stmt in nested(kernel.body) if isinstance(stmt, ir.Let)):
        match let.op:
            case ir.Elementwise("mul" | "sq" | "lshift" as fn, args) if let.value.dtype == "i32":
                known = [
                    op for arg in args if isinstance(op := ops.get(arg.name), ir.BlockSize | ir.Constant)
                ]
                numbers = [int(abs(op.number)) for op in known if isinstance(op, ir.Constant)]
                if fn != "mul" or not known:
                    most = max(most, 2**31 // POSITIONS)
                elif numbers:
                    most = max(most, *numbers)
    return 2**30 // most


def unit_dims(tensors: Mapping[str, torch.Tensor]) -> Unit:
    """The dimensions of tensors, by name and place, whose stride is one element."""
    return frozenset(
        (name, place)
        for name, tensor in tensors.items()
        for place, stride in enumerate(tensor.stride())
        if stride == 1
    )


def prepared(tensor: torch.Tensor, wanted: str | None) -> torch.Tensor:
    """The tensor in the dtype that the program loads."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    dtype = tensor.dtype if wanted is None else TORCH_DTYPES[wanted]
    return tensor if dtype == tensor.dtype else tensor.to(dtype)
