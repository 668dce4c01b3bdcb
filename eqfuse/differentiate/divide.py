"""Whether a call runs in chunks of an axis, and of which: where what its kernels store for each other takes much memory.

A plan may store a large tensor between kernels, as the gradient by the logits of a vocabulary, because it would take longer
to compute its elements again. Chunk by chunk, as much is computed, and only a chunk of it is there at a time. What that
takes is predicted, like any plan: sums are read and written once a chunk, and kernels of short chunks leave SMs idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from eqfuse.differentiate.chunks import Chunks, Undivided, certify_chunks, chunks_of
from eqfuse.extract import call_estimate
from eqfuse.extract.call_estimate import CallEstimate
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.types import program_dtypes
from eqfuse.verify.certificate import Certificate

SHARE = 1.0
"""What kernels may store for each other, relative to the largest tensor that the call reads."""
SLOWER = 1.05
"""How many times longer chunks may be predicted to take."""
MOST = 64
"""Chunks at most."""
ALIGNED = 16
"""Bytes that the memory of an output begins at a multiple of."""
WHOLE_TILES = 128
"""Positions that the length of chunks is a multiple of, where they are longer: blocks of tiles."""


class Callee(Protocol):
    """A kernel that is called."""

    @property
    def program(self) -> Program: ...

    @property
    def certificate(self) -> Certificate: ...

    @property
    def bound(self) -> float: ...

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any: ...


class EstimatedCallee(Callee, Protocol):
    """A kernel that is called, and that says what a call would take."""

    def estimate(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> CallEstimate: ...

    def into(
        self, out: Mapping[str, torch.Tensor], values: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Mapping[str, torch.Tensor]: ...


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Chunked:
    """A program in chunks: `kernel` computes one of them, `finish` what is made at the end; `certificate` says that these
    give what the program gives. `narrow`: sums that are outputs are taken on in their dtypes."""

    chunks: Chunks
    kernel: EstimatedCallee
    finish: EstimatedCallee | None
    certificate: Certificate
    narrow: bool = False

    @property
    def certificates(self) -> tuple[Certificate, ...]:
        """That of the chunks, and those of their kernels."""
        finish = () if self.finish is None else (self.finish.certificate,)
        return self.certificate, self.kernel.certificate, *finish

    def extent(self, values: Values) -> int:
        """Positions of the axis."""
        name, dims = next(iter(self.chunks.inputs.items()))
        return int(values[name].shape[dims[0]])

    def part(self, values: Values, start: int, length: int) -> dict[str, Any]:
        """The inputs of a chunk, but for what sums go on from."""
        found = _read_by(self.kernel.program, values)
        for name, dims in self.chunks.inputs.items():
            for dimension in dims:
                found[name] = found[name].narrow(dimension, start, length)
        numbers = {self.chunks.start: start, self.chunks.count: self.extent(values)}
        return found | _read_by(self.kernel.program, numbers)

    def sizes(self, sizes: Mapping[str, int], length: int) -> dict[str, int]:
        """The sizes of a chunk."""
        return _own(self.kernel.program, {**sizes, self.chunks.axis: length})

    def zeros(self, sizes: Mapping[str, int], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """What sums begin with."""
        found = {}
        for output in self.kernel.program.outputs:
            before = self.chunks.sums.get(output.name)
            if before is not None:
                program = self.kernel.program
                known = {**sizes, **program.lengths}
                shape = [known[program.domains.get(axis, axis)] for axis in output.axes]
                dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
                declared = output.dtype or program_dtypes(program).get(before, "")
                found[before] = torch.zeros(
                    shape, dtype=TORCH_DTYPES.get(declared, dtype), device=like.device
                )
        return found

    def __call__(self, values: Values, sizes: Mapping[str, int], length: int) -> tuple[torch.Tensor, ...]:
        """The outputs, in chunks of so many positions."""
        chunks, count = self.chunks, self.extent(values)
        carried = self.zeros(sizes, _widest(values))
        made: dict[str, torch.Tensor] = {}
        for start in range(0, count, length):
            here = min(length, count - start)
            given = {**self.part(values, start, here), **carried}
            places = {
                name: made[name].narrow(dimension, start, here)
                for name, dimension in chunks.outputs.items()
                if name in made
            }
            out = {name: x for name, x in places.items() if x.is_contiguous() and x.data_ptr() % ALIGNED == 0}
            out |= {name: carried[before] for name, before in chunks.sums.items()}
            by_name = self.kernel.into(out, given, self.sizes(sizes, here))
            carried = {before: by_name[name] for name, before in chunks.sums.items()}
            for name in chunks.added:
                made[name] = made[name] + by_name[name] if name in made else by_name[name]
            for name, dimension in chunks.outputs.items():
                part = by_name[name]
                if name not in made:
                    shape = [*part.shape]
                    shape[dimension] = count
                    made[name] = part.new_empty(shape)
                place = made[name].narrow(dimension, start, here)
                if place.data_ptr() != part.data_ptr():
                    place.copy_(part)
        made |= {name: carried[before] for name, before in chunks.sums.items()}
        if self.finish is not None:
            known = self.finish.program
            numbers = {name: made[name].reshape(1) for name in chunks.added} | {chunks.count: count}
            given = _read_by(known, {**values, **made, **numbers})
            made |= _outputs(self.finish, given, _own(known, sizes))
        made |= {
            name: made[total]
            for total, name in chunks.totals.items()
            if total in made and name in chunks.results
        }
        return tuple(made[name] for name in chunks.results)


def _own(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a program's axes."""
    axes = {*sized_axes(program), *program.domains.values()} - program.lengths.keys()
    return {axis: size for axis, size in sizes.items() if axis in axes}


def _read_by(program: Program, values: Values) -> dict[str, Any]:
    """Those of the values that are inputs of a program."""
    names = {*(tensor.name for tensor in program.tensors), *program.scalars}
    return {name: value for name, value in values.items() if name in names}


def _outputs(kernel: EstimatedCallee, given: Values, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The outputs of a call, by name."""
    found = kernel(**given, sizes=sizes)
    names = [output.name for output in kernel.program.outputs]
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))


def _widest(values: Values) -> torch.Tensor:
    """The tensor of the widest real numbers."""
    return max((v for v in values.values() if isinstance(v, torch.Tensor)), key=_width)


def _width(tensor: torch.Tensor) -> int:
    return tensor.element_size() if tensor.is_floating_point() else 0


@dataclass(frozen=True)
class ChunkedCall:
    """How calls that are alike are divided: chunks of so many positions; the dtypes of outputs; estimates of the whole,
    and of all chunks."""

    chunked: Chunked
    length: int
    dtypes: Sequence[torch.dtype]
    whole: CallEstimate
    divided: CallEstimate

    def __call__(self, values: Values, sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        found = self.chunked(values, sizes, self.length)
        return tuple(value.to(dtype) for value, dtype in zip(found, self.dtypes, strict=True))

    @property
    def certificates(self) -> tuple[Certificate, ...]:
        """That of the chunks, and those of their kernels."""
        return self.chunked.certificates

    def __str__(self) -> str:
        return (
            f"chunks of {self.length} positions of {self.chunked.chunks.axis}: "
            f"{self.divided.stored / 1e6:.3g} MB stored between kernels instead of {self.whole.stored / 1e6:.3g}, "
            f"{1e3 * self.divided.seconds:.3g} ms predicted instead of {1e3 * self.whole.seconds:.3g}"
        )


@dataclass
class Chunker:
    """The ways to divide the program of a kernel. `compiled` makes a kernel of a text; `refused` are axes along which there
    is none, each with the reason."""

    program: Program
    scalars: Mapping[str, float]
    bound: float
    compiled: Callable[[str], EstimatedCallee]
    refused: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[str, str | None, bool], Chunked | None] = field(default_factory=dict)

    def of(
        self, whole: CallEstimate, values: Values, sizes: Mapping[str, int], dtypes: Mapping[str, str]
    ) -> ChunkedCall | None:
        """How a call is divided whose estimate is `whole`; None where it runs as that. `sizes` are those of all axes, `dtypes`
        those of outputs."""
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        room = max(call_estimate.MUCH, SHARE * max(map(_bytes, tensors), default=0))
        if whole.stored <= room:
            return None
        made = tuple(TORCH_DTYPES[o.dtype or dtypes[o.name]] for o in self.program.outputs)
        saves = (
            "f32" if {_width(tensor) for tensor in tensors} & {1, 2} and _width(_widest(values)) < 8 else None
        )
        found: list[ChunkedCall] = []
        for axis in whole.axes:
            for narrow in (False, True):
                chunked = self._chunked(axis, saves, narrow)
                parts = None if chunked is None else self._parts(chunked, values, sizes, room)
                if chunked is not None and parts is not None:
                    length, divided = parts
                    if divided.seconds <= SLOWER * whole.seconds:
                        found.append(ChunkedCall(chunked, length, made, whole, divided))
                    break
        return min(found, key=lambda call: call.divided.seconds, default=None)

    def _chunked(self, axis: str, saves: str | None, narrow: bool) -> Chunked | None:
        """The program in chunks of an axis; None where there is none, or it is not verified."""
        key = axis, saves, narrow
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, axis: str, saves: str | None, narrow: bool) -> Chunked | None:
        try:
            chunks = chunks_of(self.program.source, axis, self.scalars, saves=saves, narrow=narrow)
        except Undivided as why:
            self.refused[axis] = str(why)
            return None
        if narrow and (wide := self._chunked(axis, saves, False)) is not None and chunks == wide.chunks:
            return None
        certificate = certify_chunks(self.program, chunks, bound=self.bound)
        if not certificate.ok:
            self.refused[axis] = f"chunks of {axis!r} were not verified: {certificate.reason}"
            return None
        finish = None if chunks.finish is None else self.compiled(chunks.finish)
        return Chunked(chunks, self.compiled(chunks.chunk), finish, certificate, narrow)

    def _parts(
        self, chunked: Chunked, values: Values, sizes: Mapping[str, int], room: float
    ) -> tuple[int, CallEstimate] | None:
        """The length of the fewest chunks that have room, and what they take; None where no number of them has it."""
        count, chunks = chunked.extent(values), 2
        while chunks <= min(MOST, count):
            length = math.ceil(count / chunks)
            if length > WHOLE_TILES:
                length = math.ceil(length / WHOLE_TILES) * WHOLE_TILES
            found = self._estimate(chunked, values, sizes, length)
            if found.stored <= room:
                return length, found
            chunks *= 2
        return None

    def _estimate(
        self, chunked: Chunked, values: Values, sizes: Mapping[str, int], length: int
    ) -> CallEstimate:
        """What all chunks take, and store: sums are there twice, before and after a chunk, unless one may replace the other, and outputs of a chunk
        beside the whole ones. What is an output itself in the end is not stored for others."""
        widest = _widest(values)
        like = torch.empty(0, dtype=widest.dtype, device="meta")
        shapes = chunked.zeros(sizes, like)
        carried = {
            name: torch.empty((), dtype=x.dtype, device=widest.device).expand(x.shape)
            for name, x in shapes.items()
        }
        given = {**chunked.part(values, 0, length), **carried}
        one = chunked.kernel.estimate(given, chunked.sizes(sizes, length))
        times = math.ceil(chunked.extent(values) / length)
        own = {**sizes, **chunked.kernel.program.lengths, chunked.chunks.axis: length}
        outputs = (o for o in chunked.kernel.program.outputs if o.name in chunked.chunks.outputs)
        parts = sum(math.prod(own.get(axis, 1) for axis in o.axes) for o in outputs) * like.element_size()
        sums = 0
        for name, before in chunked.chunks.sums.items():
            is_output = chunked.narrow and chunked.chunks.totals[name] in chunked.chunks.results
            copies = (1 if one.replaces(name, before) else 2) - is_output
            sums += copies * _bytes(shapes[before])
        return CallEstimate(one.stored + sums + parts, one.axes, lambda: times * one.seconds)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
