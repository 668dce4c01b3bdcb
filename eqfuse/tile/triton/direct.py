"""Calls of a kind that an emitted module has run before: straight from addresses to what Triton compiled.

What a kind of call has in common (shapes, strides, dtypes, device, whether addresses are divisible by 16) decides
grids, strides, sizes and constants. They stand in the text of a function that is written for the kind; what is left for
a call is to allocate what it writes, and to launch. Kinds that launch the same binaries have the same text, with other constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from operator import itemgetter
from types import CodeType, ModuleType
from typing import Any

import torch

from eqfuse.loops.nodes import Dims
from eqfuse.tile.storage import contiguous
from eqfuse.tile.triton.driver import Loaded
from eqfuse.tile.triton.kept_module import Launched

Call = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""The outputs, for the values of a call by name and the addresses of its tensors in their order; None where it has to go
another way: another device is current, or somebody watches launches."""

Products = Mapping[str, tuple[tuple[str, Dims], ...]]
"""Of each kernel that is a product of the library, what is made and what is multiplied."""

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

    @property
    def binaries(self) -> tuple[Any, ...]:
        """What is launched, kernel by kernel."""
        return tuple(self.known[name][0] for name in self.module.CONFIGS)

    def layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of what the kernels write."""
        sizes = self.known["sizes"]
        shape = tuple([sizes[axis] for axis in self.module.TENSORS[name][1]])
        return shape, contiguous(shape)

    @property
    def products(self) -> Products:
        """What the library of matrix products computes, by kernel."""
        found: Products = getattr(self.module, "PRODUCTS", {})
        return found

    @property
    def held(self) -> tuple[str, ...]:
        """Temporaries that the library takes, as tensors."""
        given = {*self.inputs, *self.outputs}
        found = dict.fromkeys(name for sides in self.products.values() for name, _ in sides)
        return tuple(name for name in found if name not in given)

    @property
    def temporaries(self) -> tuple[str, ...]:
        """What the kernels write for each other, but for those."""
        given = {*self.inputs, *self.outputs, *self.held}
        return tuple(name for name in self.module.TENSORS if name not in given)

    @property
    def room(self) -> tuple[tuple[int, ...], int]:
        """Where each temporary starts in one piece of memory, and the bytes of all of it."""
        offsets, size = [], 0
        for name in self.temporaries:
            dtype, axes = self.module.TENSORS[name]
            count = dtype.itemsize * prod([self.known["sizes"][axis] for axis in axes])
            offsets.append(size)
            size += -(-count // ALIGNMENT) * ALIGNMENT
        return tuple(offsets), size


def known_call(
    module: ModuleType,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    integers: Sequence[str],
    sizes: Mapping[str, int],
) -> Mapping[str, Any]:
    """What the module's launcher has found out for calls like one that it has run; `tensors` are in the program's order."""
    made = [None] * (len(module.TENSORS) - len(tensors))
    key = module.call_key([*tensors.values(), *made], sizes, None, *(scalars[name] for name in integers))
    return dict(module.remembered(key))


def form_of(kind: Kind) -> Form:
    """What writes the functions of a kind, and of all others that launch the same binaries."""
    writer = _Writer(kind)
    writer.head("call(values, addresses)", "None")
    for place, name in enumerate(kind.inputs):
        writer.addresses[name] = f"addresses[{place}]"
        writer.tensors[name] = f"values[{name!r}]"
    for name in (*kind.outputs, *kind.held):
        shape, strides = writer.slots(2, partial(Kind.layout, name=name))
        made, dtype = writer.local(name), writer.constant(kind.module.TENSORS[name][0])
        writer.line(f"{made} = empty({shape}, {strides}, {dtype})")
        writer.addresses[name], writer.tensors[name] = f"{made}.data_ptr()", made
    temporaries = kind.temporaries
    if temporaries:
        room, *offsets = writer.slots(1 + len(temporaries), _room)
        writer.line(f"workspace = empty({room}, one, uint8)")
        writer.line("start = workspace.data_ptr()")
        writer.addresses |= {
            name: f"start + {offset}" for name, offset in zip(temporaries, offsets, strict=True)
        }
    writer.launches(lambda name, kind: f"{kind}(values[{name!r}])")
    writer.line(f"return {', '.join(map(writer.local, kind.outputs))}")
    return writer.form("call")


def _room(kind: Kind) -> Sequence[Any]:
    offsets, size = kind.room
    return (size,), *offsets


def direct(kind: Kind) -> Call:
    """What runs calls of a kind."""
    call: Call = form_of(kind)(kind)
    return call


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
    for name in kind.held:
        shape, strides = kind.layout(name)
        dtype = kind.module.TENSORS[name][0]
        memory[name] = torch.empty_strided(shape, strides, dtype=dtype, device=kind.device)
    offsets, size = kind.room
    workspace = torch.empty(size, dtype=torch.uint8, device=kind.device)
    starts = {name: tensor.data_ptr() for name, tensor in memory.items()}
    starts |= {n: workspace.data_ptr() + offset for n, offset in zip(kind.temporaries, offsets, strict=True)}
    writer.addresses |= {name: writer.constant(start) for name, start in starts.items()}
    writer.tensors |= {name: writer.constant(tensor) for name, tensor in memory.items()}
    writer.launches(lambda name, kind: writer.constant((int if kind == "int" else float)(scalars[name])))
    writer.line("return True")
    writer.constant(workspace)  # kept as long as the function is
    function: Callable[[], bool] = writer.form("call")(kind)
    return function


STREAM = object()
"""Stands for the current stream in what a launch is given."""


class _Grid(int):
    """Stands for the number of thread blocks."""


GRID = _Grid(1)


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
    if sum(part is grid for part in flat) != 1 and grid is GRID:
        return None
    return run.launch, noted[0]


def _through_triton(compiled: Any, count: int) -> tuple[Any, Sequence[Any]]:
    """What launches one of Triton's binaries, and what that is given."""
    compiled[(1, 1, 1)]  # loads the binary
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    straight = arguments_of_launch(run, GRID, function, packed, count)
    if straight is not None:
        return straight
    return run, (GRID, 1, 1, STREAM, function, packed, None, None, None, *map(Place, range(count)))


Read = Callable[[Kind], Sequence[Any]]
"""What a kind of call has of its own, in the order of the names that stand for it."""


@dataclass(frozen=True)
class Form:
    """The functions of all kinds of call that launch the same binaries: one text, in which names stand for all that depends on
    sizes. `make` takes what these stand for, in the order in which `slots` read it off a kind."""

    make: Callable[..., Any]
    slots: Sequence[Read]

    def __call__(self, kind: Kind) -> Any:
        """The function of one kind."""
        return self.make(*[value for read in self.slots for value in read(kind)])


class _Writer:
    """Writes the form of a kind of call."""

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
        self._slots: list[tuple[Sequence[str], Read]] = []
        """Names that each kind has its own values of, and what reads them."""
        self._count = 0
        self.addresses: dict[str, str] = {}
        self.tensors: dict[str, str] = {}

    def head(self, signature: str, otherwise: str) -> None:
        self._lines.append(f"def {signature}:")
        self.line("if current_device() != index or watched():")
        self.line(f"    return {otherwise}")
        self.line("stream = current_stream(index)")

    def line(self, text: str) -> None:
        self._lines.append("    " + text)

    def _name(self) -> str:
        self._count += 1
        return f"c{self._count}"

    def constant(self, value: Any) -> str:
        """A name for a value that all kinds of the form have."""
        name = self._name()
        self._names[name] = value
        return name

    def slots(self, count: int, read: Read) -> list[str]:
        """Names for values that each kind has its own of."""
        names = [self._name() for _ in range(count)]
        self._slots.append((names, read))
        return names

    def local(self, name: str) -> str:
        return f"made_{[*self._kind.outputs, *self._kind.held].index(name)}"

    def launches(self, number: Callable[[str, str], str]) -> None:
        """Launches of all kernels; `number` gives the text of a scalar of a call, by name and by int or float."""
        arguments, products = self._kind.module.ARGUMENTS, self._kind.products
        for kernel in getattr(self._kind.module, "ORDER", arguments):
            if kernel in products:
                multiply = self.constant(partial(self._kind.module.multiply, kernel))
                self.line(f"{multiply}({', '.join(self.tensors[name] for name, _ in products[kernel])})")
                continue
            taken = arguments[kernel]
            compiled, _, integers, numbers, constants = self._kind.known[kernel]
            pointers = [self.addresses[name] for name in taken["tensors"]]
            texts = dict(enumerate(pointers))
            for place, (name, value) in enumerate(
                zip(taken["numbers"], numbers, strict=True), len(pointers) + len(integers)
            ):
                if name is not None:
                    texts[place] = number(name, type(value).__name__)
            given = _Given(kernel, len(pointers))
            count = len(pointers) + len(integers) + len(numbers) + len(constants)
            if isinstance(compiled, Launched):
                varying, loaded = sorted(texts), compiled.loaded
                launch = self.slots(1, given.launcher(loaded, varying))
                template: Sequence[Any] = (STREAM, *map(Place, varying))
            else:
                run, template = _through_triton(compiled, count)
                launch = [self.constant(run)]
            self.line(f"{launch[0]}({', '.join(self._filled(template, texts, given))})")

    def _filled(self, template: Sequence[Any], texts: Mapping[int, str], given: _Given) -> list[str]:
        """The text of what a launch is given: the stream, the arguments that each call has of its own, and what a kind of calls
        has in common, neighbours of which are one tuple."""
        runs: list[list[Any]] = []
        found: list[str | int] = []
        for each in template:
            if each is STREAM:
                found.append("stream")
            elif isinstance(each, Place) and each.number in texts:
                found.append(texts[each.number])
            elif isinstance(each, tuple) and any(isinstance(part, Place) for part in each):
                found.append(f"({', '.join(self._filled(each, texts, given))},)")
            elif found and isinstance(found[-1], int):
                runs[-1].append(each)
            else:
                found.append(len(runs))
                runs.append([each])
        names = self.slots(len(runs), given.reader(runs)) if runs else []
        return [each if isinstance(each, str) else f"*{names[each]}" for each in found]

    def form(self, name: str) -> Form:
        slots = ", ".join(name for names, _ in self._slots for name in names)
        lines = [f"def make({slots}):", *("    " + line for line in self._lines), f"    return {name}"]
        namespace = dict(self._names)
        exec(_code("\n".join(lines)), namespace)  # noqa: S102  (text that this class wrote)
        return Form(namespace["make"], tuple(read for _, read in self._slots))


@dataclass(frozen=True)
class _Given:
    """What a kind of calls gives a kernel, but for pointers."""

    kernel: str
    pointers: int

    def __call__(self, kind: Kind) -> tuple[int, list[Any]]:
        """The number of thread blocks, and the arguments in order."""
        _, grid, integers, numbers, constants = kind.known[self.kernel]
        return grid, [*(None,) * self.pointers, *integers, *numbers, *constants]

    def launcher(self, loaded: Loaded, varying: Sequence[int]) -> Read:
        """What reads the launch of a binary that the driver has loaded."""
        return lambda kind: [loaded.launcher(*self(kind), varying)]

    def reader(self, runs: Sequence[Sequence[Any]]) -> Read:
        """What reads parts of what a launch is given, with a kind's own numbers: each part is a tuple."""
        fixed = [part for run in runs for part in run if part is not GRID and not isinstance(part, Place)]
        numbers = iter(range(len(fixed)))

        def place(part: Any, count: int) -> int:
            if isinstance(part, Place):
                return part.number
            return count if part is GRID else count + 1 + next(numbers)

        taken: list[Take] = []

        def read(kind: Kind) -> list[tuple[Any, ...]]:
            grid, given = self(kind)
            if not taken:
                places = [[place(part, len(given)) for part in run] for run in runs]
                taken.extend(map(taker, places))
            pool = [*given, grid, *fixed]
            return [take(pool) for take in taken]

        return read


Take = Callable[[Sequence[Any]], tuple[Any, ...]]


def taker(places: Sequence[int]) -> Take:
    """What takes the elements at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda pool: tuple([pool[place] for place in places])


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
