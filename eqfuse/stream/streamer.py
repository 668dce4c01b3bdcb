"""A stream: the derived merge of a kernel as a state that is begun, fed, merged with others and ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from eqfuse.arguments import DTYPE_NAMES, Arguments, Given, as_given
from eqfuse.devices import place_of
from eqfuse.errors import EqfuseError
from eqfuse.rules.merge import State
from eqfuse.stream.programs import COUNT, START, TOTAL, Stream
from eqfuse.terms.arguments import detached
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.folds import identity
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import axes_of
from eqfuse.terms.types import program_dtypes, result_dtype
from eqfuse.threads import Lock


@dataclass(frozen=True)
class StreamState:
    """What a stream has seen: the states by name, of the positions from `start` to `stop` of the axis.

    `total` is the extent of the whole axis, where the program reads it before its end. `values` is None while nothing
    was seen. `numpy` says that numpy arrays came in; `dtypes` are those of the tensors of the last chunk.
    """

    axis: str
    start: int
    stop: int
    values: Mapping[str, torch.Tensor] | None = None
    numpy: bool = False
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    total: int | None = None


class StreamKernel(Protocol):
    """A compiled text of the stream, as it is called."""

    @property
    def program(self) -> Program: ...

    def __call__(self, **values: Any) -> Any: ...


@dataclass
class Streamer:
    """Runs the programs of a stream of `program`. `compiled` makes a kernel of a text, while `lock` is held."""

    stream: Stream
    program: Program
    compiled: Callable[[str], StreamKernel]
    lock: Lock

    def __post_init__(self) -> None:
        self._kernels: dict[str, StreamKernel] = {}

    def kernel(self, text: str) -> StreamKernel:
        with self.lock:
            if text not in self._kernels:
                self._kernels[text] = self.compiled(text)
            return self._kernels[text]

    def init(self, start: int, total: int | None) -> StreamState:
        if not isinstance(start, int) or start < 0:
            raise EqfuseError(f"start is {start!r}", hint="give the position of the stream's first element")
        if self.stream.reads_total and total is None:
            axis = self.stream.axis
            message = (
                f"the program reads N({axis}), the number of positions of the whole stream, before its end"
            )
            raise EqfuseError(message, hint="say how many there will be: init(total=...)")
        return StreamState(self.stream.axis, start, start, total=total)

    def update(
        self, state: StreamState, values: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> StreamState:
        """The state with a chunk of the axis added at its end."""
        self._check(state)
        given = Arguments(self.program).given(values, sizes)
        return self._fed(self.stream.update, state, given, Arguments(self.program).extents(given))[0]

    def step(
        self, state: StreamState, values: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> tuple[StreamState, Any]:
        """The state with a chunk added at its end, and the outputs at the positions of the chunk."""
        if not self.stream.step:
            raise EqfuseError(
                "the program has no values for positions of the stream",
                hint="k.finish(state) gives its outputs",
            )
        self._check(state)
        given = Arguments(self.program).given(values, sizes)
        extents, dtypes = Arguments(self.program).bound(given)
        if extents[self.stream.axis] == 0:
            raise EqfuseError("the chunk has no positions", hint="step with one at least")
        after, outputs = self._fed(self.stream.step, state, given, extents)
        named = dict(zip(self.stream.outputs, outputs, strict=True))
        return after, as_given(self._typed(named, dtypes), given.numpy)

    def _fed(
        self, text: str, state: StreamState, given: Given, extents: Mapping[str, int]
    ) -> tuple[StreamState, tuple[torch.Tensor, ...]]:
        """The state after a chunk that a text is called with, and what the text gives beside it."""
        count = extents[self.stream.axis]
        known = state.values or self._nothing(extents, given.tensors)
        dtypes = {name: tensor.dtype for name, tensor in given.tensors.items()}
        after = replace(state, stop=state.stop + count, values=known, numpy=given.numpy, dtypes=dtypes)
        if count == 0:
            return after, ()
        states = _scalars(known, self.stream.states)
        made = self._called(
            text, {**given.tensors, **given.scalars, **states, START: state.stop, TOTAL: state.total}
        )
        return replace(after, values=self._stored(made[: len(states)])), made[len(states) :]

    def combine(self, left: StreamState, right: StreamState) -> StreamState:
        """The state of both parts, the left one first."""
        if not self.stream.combine:
            raise EqfuseError(
                "states of prefixes that others read are not combined",
                hint="step through the positions in order",
            )
        self._check(left)
        self._check(right)
        if left.values is None or right.values is None:
            return right if left.values is None else left
        if self.stream.reads_positions and left.stop != right.start:
            message = f"the left part ends at position {left.stop}, the right part starts at {right.start}"
            raise EqfuseError(
                message,
                hint=f"the program reads positions: begin the right part with init(start={left.stop})",
            )
        given: dict[str, Any] = {TOTAL: left.total}
        for side, state in (("_a", left), ("_b", right)):
            assert state.values is not None
            named = _scalars(state.values, self.stream.states)
            given |= {f"{name}{side}": value for name, value in named.items()}
        made = self._stored(self._called(self.stream.combine, given))
        count = right.stop - right.start
        return replace(left, stop=left.stop + count, values=made)

    def finish(self, state: StreamState, values: Mapping[str, Any]) -> Any:
        """The outputs of what the stream has seen, in the program's order, dtypes and kind of tensors."""
        if not self.stream.finish:
            raise EqfuseError(
                "the program has values for each position of the stream",
                hint="state, values = k.step(state, ...) gives those of a chunk",
            )
        self._check(state)
        if state.values is None:
            raise EqfuseError("nothing was streamed: the state is empty", hint="update it with a chunk first")
        made = self._called(
            self.stream.finish,
            {
                **_torch(values),
                **_scalars(state.values, self.stream.states),
                COUNT: state.stop - state.start,
            },
        )
        named = dict(zip(self.stream.outputs, made, strict=True))
        program = self.program
        if state.start == state.stop:
            axes = axes_of(program.outputs)
            extents = {axis: int(program.domains.get(axis, axis) != state.axis) for axis in axes}
            check_selections(program, extents, {})
        dtypes = program_dtypes(program) | {n: DTYPE_NAMES[dtype] for n, dtype in state.dtypes.items()}
        return as_given(self._typed(named, dtypes), state.numpy)

    def _typed(self, named: Mapping[str, torch.Tensor], dtypes: Mapping[str, str]) -> list[torch.Tensor]:
        """The outputs in the program's order and dtypes."""
        return [
            value.to(TORCH_DTYPES[output.dtype or result_dtype(output.expr, dtypes)])
            if value.is_floating_point()
            else value
            for output in self.program.outputs
            for value in (named[output.name],)
        ]

    def _check(self, state: Any) -> None:
        if not isinstance(state, StreamState) or state.axis != self.stream.axis:
            raise EqfuseError(
                f"{type(state).__name__} is no state of this kernel", hint="begin with k.init()"
            )

    def _called(self, text: str, values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """What a program gives for those of the values that it reads."""
        kernel = self.kernel(text)
        names = Arguments(kernel.program).names
        made = kernel(**{name: value for name, value in values.items() if name in names})
        return made if isinstance(made, tuple) else (made,)

    def _nothing(
        self, extents: Mapping[str, int], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The identities, as the states of no positions."""
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        device, program = place_of(tensors), self.kernel(self.stream.update).program
        integers = {tensor.name for tensor in program.tensors if tensor.dtype == "i64"}
        integers |= set(program.integers)
        found: dict[str, torch.Tensor] = {}
        for state in self.stream.states:
            shape = [extents[axis] for axis in state.dims]
            real = torch.float64 if wide else torch.float32
            dtype = torch.int64 if state.name in integers else real
            found[state.name] = nothing(state, shape, dtype, device)
        return found

    def _stored(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            state.name: value if value.is_floating_point() else value.to(torch.int64)
            for state, value in zip(self.stream.states, values, strict=True)
        }


def nothing(state: State, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A state of no positions: its identity, and of integers, which have no infinity, the farthest for one."""
    number = identity(state.op).value
    if dtype.is_floating_point:
        return torch.full(shape, float(number), dtype=dtype, device=device)
    bounds = torch.iinfo(dtype)
    whole = int(number) if abs(number) != float("inf") else bounds.max if number > 0 else bounds.min
    return torch.full(shape, whole, dtype=dtype, device=device)


def _torch(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raises BindError where a derivative is asked for: what was streamed has none."""
    return {
        name: detached(name, value)
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(value)
        if hasattr(value, "__array_interface__") and value.ndim
        else value
        for name, value in values.items()
    }


def _scalars(values: Mapping[str, torch.Tensor], states: Sequence[State]) -> dict[str, Any]:
    """States without axes as programs take them: integers as numbers, real ones as tensors of one, which have a dtype."""
    return {
        state.name: value if state.dims else value.reshape(1) if value.is_floating_point() else value.item()
        for state in states
        for value in (values[state.name],)
    }
