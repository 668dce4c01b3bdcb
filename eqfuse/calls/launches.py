"""Calls that are made ready beforehand: `Kernel.bind`, one call with its tensors fixed, and `Kernel.prepare`, which
compiles for shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from eqfuse.arguments import DTYPE_NAMES, Given
from eqfuse.calls.call_cache import Routed
from eqfuse.calls.specialization import Specializations
from eqfuse.compiled import Compiled
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.terms.types import program_dtypes
from eqfuse.threads import undisturbed

Shape = tuple[int, ...]


class Launch:
    """One call of a kernel, its tensors fixed. Calling it runs the kernel on what the tensors hold now, and gives the same
    output tensors each time, written over. On a GPU it launches on the current stream, and may be captured in a CUDA graph.

    `inputs` and `outputs` are the tensors by name, `scalars` the numbers, `compiled` is what runs. It keeps the tensors
    alive. Two threads, or two streams, that run one launch at the same time write to the same memory.
    """

    def __init__(
        self,
        name: str,
        compiled: Compiled,
        given: Given,
        outputs: Mapping[str, torch.Tensor],
        run: Callable[[], None],
    ) -> None:
        self.name = name
        self.compiled = compiled
        self.inputs: Mapping[str, torch.Tensor] = dict(given.tensors)
        self.scalars: Mapping[str, Any] = dict(given.scalars)
        self.outputs = dict(outputs)
        self._run = run
        self._places = [
            (tensor, tensor.data_ptr()) for tensor in (*given.tensors.values(), *outputs.values())
        ]
        made = tuple(outputs.values())
        self._made: Any = made[0] if len(made) == 1 else made

    def __call__(self) -> Any:
        """Runs, and gives the outputs: one tensor, or a tuple in program order. Raises BindError where a tensor's memory
        is another one by now (`resize_`, `set_`, `.data = `)."""
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                raise self._moved()
        self._run()
        return self._made

    def _moved(self) -> BindError:
        places = {id(tensor): place for tensor, place in self._places}
        tensors = {**self.inputs, **self.outputs}
        name = next(n for n, t in tensors.items() if t.data_ptr() != places[id(t)])
        return BindError(f"{name!r} was given other memory since it was bound", hint="bind again")

    def __repr__(self) -> str:
        numbers = [f"{name}={value!r}" for name, value in self.scalars.items()]
        taken, made = ", ".join([*map(_shown, self.inputs.items()), *numbers]), _listed(self.outputs)
        place = next(iter(self.outputs.values())).device
        return f"<eqfuse.Launch {self.name}: {taken} -> {made} on {place}>"


def _listed(tensors: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(map(_shown, tensors.items()))


def _shown(item: tuple[str, torch.Tensor]) -> str:
    name, tensor = item
    return f"{name}: {DTYPE_NAMES[tensor.dtype]}{list(tensor.shape)}"


Route = Callable[[Given], Routed]
"""Says what runs a call."""


def bind(
    name: str,
    shapes: Specializations,
    route: Route,
    values: Mapping[str, Any],
    sizes: Mapping[str, int] | None,
) -> Launch:
    """A launch on these tensors, which has run once. Raises BindError for what cannot be held: arrays, numbers inside of
    tensors, subclasses, tensors that require grad or stand for a negated copy."""
    program = shapes.derived.program
    arguments = shapes.arguments
    for each, value in values.items():
        _check_holdable(each, value)
    with undisturbed():
        given = arguments.given(values, sizes)
        routed = route(given)
        special, by = routed.special, routed.by
        results = by.prepared(routed)
        run = by.runners.held(special, routed.given, {o.name: results[o.name] for o in program.returned})
        if routed.as_taken is not None:
            run = _sorted_anew(run, routed.as_taken, given, routed.given)
        made = routed.apart(results)
        return Launch(name, special.compiled, given, {o.name: made[o.name] for o in program.returned}, run)


def _sorted_anew(
    run: Callable[[], None],
    as_taken: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    given: Given,
    taken: Given,
) -> Callable[[], None]:
    """What runs a launch on positions that are sorted by what the tensors hold then."""
    values = {**given.tensors, **given.scalars}
    made = [name for name in taken.tensors if name not in given.tensors]

    def launch() -> None:
        with undisturbed():
            found = as_taken(values)
            for name in made:
                taken.tensors[name].copy_(found[name])
        run()

    return launch


def _check_holdable(name: str, value: Any) -> None:
    what, hint = "", ""
    if isinstance(value, np.ndarray | np.generic):
        what, hint = "a numpy array", f"torch.from_numpy({name}) has the same memory"
    elif isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            what, hint = f"a {type(value).__name__}", "pass a plain tensor"
        elif not value.is_nested and value.layout == torch.strided and value.is_neg():
            what, hint = "a negated view", f"pass {name}.resolve_neg()"
        elif not value.ndim and not value.is_nested:
            what, hint = "a number in a tensor, which would be read once", f"pass {name}.item()"
    if what:
        raise BindError(f"{name!r} is {what}: a launch cannot hold it", hint=hint)


# -- before the first call ------------------------------------------------------------------------------


def prepare(
    shapes: Specializations,
    route: Route,
    wanted: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int] | None,
    device: str | torch.device | None,
) -> None:
    """Compiles and loads what calls of these shapes run: each is run once, on zeros where no tensor is given."""
    program = shapes.derived.program
    place = _place(shapes, wanted, device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BindError(
            "torch sees no GPU here, and prepare runs each call once",
            hint="`eqfuse prepare FILE --target h200` compiles for a GPU that is not here, `eqfuse emit` prints the kernel",
        )
    if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise EqfuseError(
            "a CUDA graph is being captured: nothing can be compiled now",
            hint="call prepare before the capture",
        )
    for each in wanted:
        values = _stand_ins(program, each, place)
        for name, value in values.items():
            _check_holdable(name, value)
        arguments = shapes.arguments
        with undisturbed():
            routed = route(arguments.given(values, sizes))
            routed.by.prepared(routed)


def _place(
    shapes: Specializations, wanted: Sequence[Mapping[str, Any]], device: str | torch.device | None
) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BindError(f"there is no device {device!r}", hint='give "cpu" or "cuda"') from error
    given = [value for each in wanted if isinstance(each, Mapping) for value in each.values()]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if tensors:
        return tensors[0].device
    on_gpu = torch.cuda.is_available() if shapes.target.auto else shapes.target.device.kind == "gpu"
    return torch.device("cuda" if on_gpu else "cpu")


def _stand_ins(program: Program, wanted: Mapping[str, Any], place: torch.device) -> dict[str, Any]:
    """Arguments of a call: zeros for a shape, the number 1 for a scalar of real numbers that is not given."""
    if not isinstance(wanted, Mapping):
        raise _unreadable(f"a {type(wanted).__name__}")
    tensors = {tensor.name for tensor in program.tensors}
    dtypes = program_dtypes(program)
    found: dict[str, Any] = {
        name: 1.0 for name in program.scalars if name not in wanted and name not in program.integers
    }
    for name, value in wanted.items():
        if name in tensors and not isinstance(value, torch.Tensor | np.ndarray):
            shape, dtype = _shape(name, value, TORCH_DTYPES[dtypes[name]])
            found[name] = torch.zeros(shape, dtype=dtype, device=place)
        else:
            found[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return found


def _shape(name: str, value: Any, dtype: torch.dtype) -> tuple[Shape, torch.dtype]:
    """A shape, or a pair of a shape and a dtype."""
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], tuple | list):
        value, dtype = value
        if isinstance(dtype, str) and dtype in TORCH_DTYPES:
            dtype = TORCH_DTYPES[dtype]
        if not isinstance(dtype, torch.dtype):
            raise _unreadable(f"{name!r} with the dtype {dtype!r}")
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise _unreadable(f"{name!r} as {value!r}")
    return tuple(value), dtype


def _unreadable(what: str) -> BindError:
    return BindError(
        f"prepare was given {what}",
        hint='give a mapping of names to shapes: {"x": (64, 1024)}, {"x": ((64, 1024), torch.float16)}, or tensors',
    )
