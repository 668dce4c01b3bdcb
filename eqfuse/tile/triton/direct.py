"""Calls of a kind that an emitted module has run before: straight from addresses to what Triton compiled.

What a kind of call has in common (shapes, strides, dtypes, device, whether addresses are divisible by 16) decides
grids, strides, sizes and constants. They stand in the text of a function that is written for the kind; what is left for
a call is to allocate what it writes, and to launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from types import CodeType, ModuleType
from typing import Any

import torch

from eqfuse.tile.triton.stand_in import Launched

Call = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""The outputs, for the values of a call by name and the addresses of its tensors in their order; None where it has to go
another way: another device is current, or somebody watches launches."""

ALIGNMENT = 256
"""Bytes that temporaries in one piece of memory start at multiples of."""


@dataclass(frozen=True)
class Kind:
    """What calls have in common: the module, what its launcher has found out for one of them (`remembered`), and the names
    of tensors, of the program's outputs, and of what the tensors are on."""

    module: ModuleType
    known: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    device: torch.device

    @property
    def is_compiled(self) -> bool:
        """Whether there is something to launch: Triton's interpreter compiles nothing."""
        return all(name in self.known for name in self.module.CONFIGS)


def known_call(
    module: ModuleType,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    integers: Sequence[str],
    sizes: Mapping[str, int],
    config: Mapping[str, Mapping[str, int]] | None = None,
) -> Mapping[str, Any]:
    """What the module's launcher has found out for calls like one that it has run; `tensors` are in the program's order."""
    made = [None] * (len(module.TENSORS) - len(tensors))
    key = module.call_key([*tensors.values(), *made], sizes, config, *(scalars[name] for name in integers))
    return dict(module.remembered(key))


def direct(kind: Kind) -> Call:
    """What runs calls of a kind."""
    writer = _Writer(kind)
    writer.head("call(values, addresses)", "None")
    for place, name in enumerate(kind.inputs):
        writer.addresses[name] = f"addresses[{place}]"
    for name in kind.outputs:
        shape, strides, dtype = map(writer.constant, writer.layout(name))
        made = writer.local(name)
        writer.line(f"{made} = empty({shape}, {strides}, {dtype})")
        writer.addresses[name] = f"{made}.data_ptr()"
    offsets, size = writer.offsets()
    if offsets:
        room = writer.constant((size,))
        writer.line(f"workspace = empty({room}, one, uint8)")
        writer.line("start = workspace.data_ptr()")
        writer.addresses |= {name: f"start + {writer.constant(offset)}" for name, offset in offsets.items()}
    writer.launches(lambda name, kind: f"{kind}(values[{name!r}])")
    writer.line(f"return {', '.join(map(writer.local, kind.outputs))}")
    function: Call = writer.function("call")
    return function


def bound(
    kind: Kind,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
) -> Callable[[], bool]:
    """What runs one call again, on the same memory: whether it has; see `Call`."""
    writer = _Writer(kind)
    writer.head("call()", "False")
    memory = {**tensors, **outputs}
    offsets, size = writer.offsets()
    workspace = torch.empty(size, dtype=torch.uint8, device=kind.device)
    starts = {name: tensor.data_ptr() for name, tensor in memory.items()}
    starts |= {name: workspace.data_ptr() + offset for name, offset in offsets.items()}
    writer.addresses |= {name: writer.constant(start) for name, start in starts.items()}
    writer.launches(lambda name, kind: writer.constant((int if kind == "int" else float)(scalars[name])))
    writer.line("return True")
    writer.constant(workspace)  # kept as long as the function is
    function: Callable[[], bool] = writer.function("call")
    return function


@dataclass(frozen=True)
class Text:
    """What is written into the text of a function, and no value."""

    code: str


STREAM = object()
"""Stands for the current stream in what a launch is given."""


@dataclass(frozen=True)
class Place:
    """Stands for an argument of the kernel."""

    number: int


def arguments_of_launch(
    run: Any, grid: int, function: Any, packed: Any, count: int
) -> tuple[Callable[..., Any], Sequence[Any]] | None:
    """The function in C that Triton's launcher calls, and what it gives that; None where the launcher has more to do, such as
    to allocate memory. It is asked once, with `Place`s for the kernel's arguments and something that notes what arrives."""
    if getattr(run, "launch", None) is None or not hasattr(run, "launch_pdl"):
        return None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return None
    noted: list[tuple[Any, ...]] = []
    asked = copy(run)
    asked.launch = lambda *arguments: noted.append(arguments)
    places = list(map(Place, range(count)))
    asked(grid, 1, 1, STREAM, function, packed, None, None, None, *places)
    if len(noted) != 1:
        return None
    flat = [part for each in noted[0] for part in (each if isinstance(each, tuple) else (each,))]
    if [part for part in flat if isinstance(part, Place)] != places or flat.count(STREAM) != 1:
        return None
    return run.launch, noted[0]


class _Writer:
    """Writes the function of one kind of call. All that depends on sizes is a constant with a name, so that the text is
    the same for all kinds that launch the same kernels, and compiled once."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._lines: list[str] = []
        self._names: dict[str, Any] = {
            "uint8": torch.uint8,
            "one": (1,),
            "empty": _allocator(kind.device),
            "current_device": _current_device(),
            "current_stream": _current_stream(),
            "watched": _watched(),
            "index": 0 if kind.device.index is None else kind.device.index,
        }
        self.addresses: dict[str, str] = {}

    def head(self, signature: str, otherwise: str) -> None:
        self._lines.append(f"def {signature}:")
        self.line("if current_device() != index or watched():")
        self.line(f"    return {otherwise}")
        self.line("stream = current_stream(index)")

    def line(self, text: str) -> None:
        self._lines.append("    " + text)

    def constant(self, value: Any) -> str:
        """A name for a value that is the same in each call."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def local(self, name: str) -> str:
        return f"made_{list(self._kind.outputs).index(name)}"

    def layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Shape, strides and dtype of what the kernels write."""
        dtype, axes = self._kind.module.TENSORS[name]
        shape = tuple(self._kind.known["sizes"][axis] for axis in axes)
        return shape, tuple(prod(shape[place + 1 :]) for place in range(len(shape))), dtype

    def offsets(self) -> tuple[dict[str, int], int]:
        """Where each temporary starts in one piece of memory, and the bytes of all of it."""
        found: dict[str, int] = {}
        size = 0
        given = {*self._kind.inputs, *self._kind.outputs}
        for name in self._kind.module.TENSORS:
            if name not in given:
                shape, _, dtype = self.layout(name)
                found[name] = size
                size += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return found, size

    def launches(self, number: Callable[[str, str], str]) -> None:
        """Launches of all kernels; `number` gives the text of a scalar of a call, by name and by int or float."""
        for kernel, taken in self._kind.module.ARGUMENTS.items():
            compiled, grid, integers, numbers, constants = self._kind.known[kernel]
            pointers = [self.addresses[name] for name in taken["tensors"]]
            given: list[Text | Any] = [*map(Text, pointers), *integers]
            given += [
                value if name is None else Text(number(name, type(value).__name__))
                for name, value in zip(taken["numbers"], numbers, strict=True)
            ]
            given += constants
            if isinstance(compiled, Launched):
                varying = [place for place, value in enumerate(given) if isinstance(value, Text)]
                launch: Any = compiled.loaded.launcher(grid, given, varying)
                template: Sequence[Any] = (STREAM, *map(Place, varying))
            else:
                launch, template = self._through_triton(compiled, grid, len(given))
            self.line(f"{self.constant(launch)}({', '.join(self._filled(template, given))})")

    def _through_triton(self, compiled: Any, grid: int, count: int) -> tuple[Any, Sequence[Any]]:
        """What launches one of Triton's binaries, and what that is given."""
        compiled[(grid, 1, 1)]  # loads the binary
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        straight = arguments_of_launch(run, grid, function, packed, count)
        if straight is not None:
            return straight
        return run, (grid, 1, 1, STREAM, function, packed, None, None, None, *map(Place, range(count)))

    def _filled(self, template: Sequence[Any], given: Sequence[Text | Any]) -> Iterator[str]:
        """The text of what a launch is given: the stream, the kernel's own arguments, and what never changes, neighbours of
        which are one tuple."""
        parts: list[Any] = []
        for each in template:
            if each is STREAM:
                parts.append(Text("stream"))
            elif isinstance(each, Place):
                parts.append(given[each.number])
            elif isinstance(each, tuple) and any(isinstance(part, Place) for part in each):
                parts.append(Text(f"({', '.join(self._filled(each, given))},)"))
            else:
                parts.append(each)
        for is_text, run in groupby(parts, lambda part: isinstance(part, Text)):
            neighbours = tuple(run)
            if is_text:
                yield from (part.code for part in neighbours)
            else:
                yield f"*{self.constant(neighbours)}"

    def function(self, name: str) -> Any:
        namespace = dict(self._names)
        exec(_code("\n".join(self._lines)), namespace)  # noqa: S102  (text that this class wrote)
        return namespace[name]


@lru_cache(256)
def _code(text: str) -> CodeType:
    return compile(text, "<eqfuse launch>", "exec")


def _allocator(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """`torch.empty_strided` on a device, which is the current one: in fewer steps where torch has the function that the code
    of its own compiler calls."""
    short: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if short is not None and device.type == "cuda":
        return short
    empty = torch.empty_strided
    return lambda shape, strides, dtype: empty(shape, strides, dtype=dtype, device=device)


def _current_device() -> Callable[[], int]:
    """The index of the current device. Triton's own function for it goes on to initialise CUDA, which has been done."""
    found: Callable[[], int] = torch._C._cuda_getDevice
    return found


def _current_stream() -> Callable[[int], int]:
    """The address of a device's current stream."""
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def is_watched() -> bool:
    """Whether somebody has hooks around Triton's launches, as profilers do."""
    return "triton" in sys.modules and _watched()()


def _watched() -> Callable[[], bool]:
    """What says whether somebody has such hooks, again and again."""
    modules = sys.modules
    if "triton" not in modules:
        return lambda: "triton" in modules and is_watched()
    from triton import knobs

    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if enter is None or leave is None:
        return lambda: not (runtime.launch_enter_hook is runtime.launch_exit_hook is None)
    before, after = enter.calls, leave.calls
    return lambda: bool(
        before or after or runtime.launch_enter_hook is not enter or runtime.launch_exit_hook is not leave
    )
