"""What a call launches, found from its sizes alone: the launcher of an emitted module is run, and what it would launch noted.

Triton compiles apart for constants, for integers that are 1 or divisible by 16, for wide ones, and for addresses that 16 divides.
Calls that agree in these launch the same binaries, whatever their sizes. Once one of them has run, the others need neither
Triton nor what the module's launcher checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from eqfuse.terms.integers import power_of_two
from eqfuse.tile.storage import contiguous
from eqfuse.tile.triton.binaries import DIVISOR, WIDE
from eqfuse.tile.triton.direct import Form, Kind, Take, form_of, taker
from eqfuse.tile.triton.kept_module import module_of

Class = tuple[Any, ...]
"""What decides a binary: the kernel, the device that it is loaded on, options, constants (a place among them is always of one
type: no flag is taken for a number), and what of its arguments Triton looks at."""


class _Layout:
    """Stands for a tensor of a call, or one that a launcher allocates: what is read of it, read once."""

    is_cuda = False

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], span: int
    ) -> None:
        self.device, self.shape, self._strides, self.span = device, shape, strides, span

    def stride(self) -> tuple[int, ...]:
        return self._strides


def _given(tensor: torch.Tensor) -> _Layout:
    strides = tensor.stride()
    span = sum([(n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)])
    return _Layout(tensor.device, tensor.shape, strides, span)


def _made(shape: tuple[int, ...], device: torch.device) -> _Layout:
    strides = contiguous(shape)
    return _Layout(device, shape, strides, shape[0] * strides[0] - 1 if shape else 0)


class _Sizes(dict[str, int]):
    """The sizes of a call, and the launches that are noted for it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.known: dict[str, Any] = {}


@dataclass(frozen=True)
class Planned:
    """The launches of a call: grid, integers and numbers of each kernel, and the class of its binary."""

    sizes: Mapping[str, int]
    launches: Mapping[str, tuple[int, tuple[int, ...], tuple[Any, ...]]]
    classes: Mapping[str, Class]


@dataclass
class Planner:
    """The launcher of an emitted module whose functions are those of `planner_of`."""

    module: ModuleType
    launcher: Callable[..., Any]
    _integers: dict[str, tuple[Take, Take]] = field(default_factory=dict)
    """By kernel, what takes the integers of all that it is given besides tensors, and those that may be specialised on."""
    _binaries: dict[Class, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)
    _forms: dict[Any, Form] = field(default_factory=dict)

    def planned(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> Planned:
        """What a call launches. Its arguments have been checked, and `sizes` are all of its sizes."""
        noted = _Sizes(sizes)
        given = {name: _given(tensor) for name, tensor in tensors.items()}
        self.launcher(**given, **scalars, sizes=noted)
        aligned = {name: not tensor.data_ptr() % DIVISOR for name, tensor in tensors.items()}
        device = next(iter(given.values())).device
        launches, classes = {}, {}
        for name, taken in self.module.ARGUMENTS.items():
            grid, integers, numbers, constants, options = noted.known[name]
            launches[name] = grid, integers, numbers
            pointers = tuple([aligned.get(tensor) for tensor in taken["tensors"]])
            looked_at = self._looked_at(name, (*integers, *numbers))
            classes[name] = name, device, options, constants, pointers, looked_at
        noted.known.clear()  # it holds the sizes, too: what goes round in a cycle has to be collected
        return Planned(noted, launches, classes)

    def _looked_at(self, kernel: str, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """What Triton looks at of what a kernel is given besides tensors: of integers whether they are wide, and, but for those
        that it is told not to specialise on, whether they are 1 or divisible by 16; of others, nothing."""
        take = self._integers.get(kernel)
        if take is None:
            first = len(self.module.ARGUMENTS[kernel]["tensors"])
            is_free = getattr(self.module, kernel).free[first:]
            places = [place for place, number in enumerate(numbers) if type(number) is int]
            looked_at = [place for place in places if not is_free[place]]
            take = self._integers[kernel] = taker(places), taker(looked_at)
        whole = take[0](numbers)
        found = [number & DIVISOR - 1 and 1 + (number == 1) for number in take[1](numbers)]
        if whole and (min(whole) < -WIDE or max(whole) >= WIDE):
            return *found, tuple([-WIDE <= number < WIDE for number in whole])
        return tuple(found)

    def learn(self, planned: Planned, known: Mapping[str, Any]) -> None:
        """Notes which binaries a call has launched: `known` is what the module that ran it remembers of it."""
        for name, each in planned.classes.items():
            if name in known:
                compiled, *_, constants = known[name]
                self._binaries[each] = compiled, constants

    def kind(
        self, planned: Planned, inputs: Sequence[str], outputs: Sequence[str], device: torch.device
    ) -> Kind | None:
        """What calls like a planned one have in common; None where one of the binaries has not run yet."""
        found: dict[str, Any] = {"sizes": planned.sizes}
        for name, each in planned.classes.items():
            binary = self._binaries.get(each)
            if binary is None:
                return None
            compiled, constants = binary
            found[name] = compiled, *planned.launches[name], constants
        return Kind(self.module, found, inputs, outputs, device)

    def form(self, kind: Kind) -> Form:
        """What writes the functions of calls that launch the binaries of a kind."""
        key = (tuple(kind.inputs), tuple(kind.outputs), kind.device, *map(id, kind.binaries))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = form_of(kind)
        return form


def planner_of(source_text: str, name: str) -> Planner | None:
    """The planner of an emitted module whose launcher has that name; None where the module takes more of Triton than its
    language."""
    module = module_of(source_text)
    if module is None:
        return None
    functions = vars(module)
    tables, settings, overlaps = functions["TENSORS"], functions["settings"], functions["overlaps"]
    overlapping: dict[torch.device, bool] = {}

    blocks_of: dict[tuple[Any, ...], tuple[Mapping[str, int], tuple[int, int]]] = {}
    whole = {name: tuple(axes.values()) for name, axes in functions["WHOLE"].items()}

    def buffer(name: str, tensor: None, size: Mapping[str, int], device: torch.device) -> _Layout:
        return _made(tuple([size[axis] for axis in tables[name][1]]), device)

    def overlap(made: _Layout) -> bool:
        if made.device not in overlapping:
            stand_in = SimpleNamespace(is_cuda=made.device.type == "cuda", device=made.device)
            overlapping[made.device] = overlaps(stand_in)
        return overlapping[made.device]

    def launch(
        known: dict[str, Any],
        name: str,
        kernel: Any,
        tensors: Any,
        numbers: tuple[Any, ...],
        config: None,
        size: Mapping[str, int],
        arguments: Callable[[Mapping[str, int]], Any],
    ) -> None:
        held = (name, *[power_of_two(size[axis]) for axis in whole[name]])
        found = blocks_of.get(held)
        if found is None:
            blocks = settings(name, config, size)
            found = blocks_of[held] = blocks, (blocks["num_warps"], blocks["num_stages"])
        grid, integers, constants = arguments(found[0])
        known[name] = grid, integers, numbers, tuple(constants.values()), found[1]

    def index_dtype(*tensors: _Layout) -> str:
        return "int64" if max([tensor.span for tensor in tensors]) >= WIDE else "int32"

    functions |= {
        "call_key": lambda tensors, sizes, *others: sizes.known,
        "remembered": lambda known: known,
        "axis_sizes": lambda tensors, sizes: sizes,
        "buffer": buffer,
        "overlaps": overlap,
        "index_dtype": index_dtype,
        "launch": launch,
    }
    if (product := functions.get("multiply")) is not None:
        # What stands for tensors has nothing to multiply; calls of the kinds that are found do.
        functions["multiply"] = lambda name, made, *sides: (
            None if isinstance(made, _Layout) else product(name, made, *sides)
        )
    return Planner(module, functions[name])
