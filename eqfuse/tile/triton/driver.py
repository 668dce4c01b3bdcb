"""Loading and launching binaries through NVIDIA's driver, which every process with torch for CUDA has loaded."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import get_ident
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.threads import cached
from eqfuse.tile.triton.binaries import Binary

LANES = 32
"""Threads of a warp."""

SLOT = 8
"""Bytes of memory for an argument."""

MUCH_SHARED = 48 * 1024
"""Bytes of shared memory above which a function has to ask for them."""

_PREFER_SHARED, _MAX_SHARED, _OVERLAPS = 1, 8, 6  # CUfunc_cache, CUfunction_attribute, CUlaunchAttributeID
_NO_CONTEXT = 201

_TYPES: Mapping[str, Any] = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


_FORMATS: Mapping[str, str] = {"u8": "b7x", "u16": "h6x", "u32": "i4x", "u64": "q", "f32": "f4x", "f64": "d"}
"""As `struct` writes them, in `SLOT` bytes each."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_OVERLAPPING = (_Attribute * 1)(_Attribute(id=_OVERLAPS, value=1))


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver. Other threads of Python run meanwhile: a launch waits where the GPU has much to do. Raises OSError where there
    is none."""
    return ctypes.CDLL("libcuda.so.1")


def _checked(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(name))
        shown = (name.value or b"error").decode()
        raise EqfuseError(
            f"the driver cannot {what}: {shown} ({status})", hint="eqfuse cache clear, and call again"
        )


def _enter_context(device: int) -> None:
    """Torch's context of a device, which threads that have used no device lack."""
    cuda, context = library(), ctypes.c_void_p()
    _checked(cuda.cuCtxGetCurrent(ctypes.byref(context)), "look at contexts")
    if not context.value:
        _checked(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "enter a context")
        _checked(cuda.cuCtxSetCurrent(context), "enter a context")


class Loaded:
    """A binary on a device, the current one."""

    def __init__(self, binary: Binary, device: int) -> None:
        """Raises EqfuseError where the driver does not load it."""
        self.binary, self.device = binary, device
        cuda = library()
        _enter_context(device)
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _checked(cuda.cuModuleLoadData(ctypes.byref(self._module), binary.code), f"load {binary.name}")
        _checked(
            cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, binary.name.encode()),
            f"find {binary.name}",
        )
        if binary.shared > MUCH_SHARED:
            _checked(cuda.cuFuncSetCacheConfig(self._function, _PREFER_SHARED), "set shared memory")
            _checked(
                cuda.cuFuncSetAttribute(self._function, _MAX_SHARED, ctypes.c_int(binary.shared)),
                f"give {binary.name} {binary.shared} bytes of shared memory",
            )

    @cached
    def _places(self) -> Mapping[int, int]:
        """The places of the function's parameters in what the kernel is given."""
        return {place: number for number, place in enumerate(self.binary.places)}

    @cached
    def _packing(self) -> struct.Struct:
        """How arguments lie in memory: eight bytes for each."""
        return struct.Struct("<" + "".join(_FORMATS[kind] for kind in self.binary.types))

    def launcher(self, grid: int, given: Sequence[Any], varying: Sequence[int]) -> Callable[..., None]:
        """What launches so many blocks: it takes a stream, and the values of the arguments that are `varying`, by their
        places in all that the kernel is `given`; the others stay as they are."""
        binary, places = self.binary, self._places
        changed = [places[place] for place in varying if place in places]
        kept = [number for number, place in enumerate(varying) if place in places]
        values = [given[place] for place in binary.places]
        for number in changed:
            values[number] = 0
        for number, kind in enumerate(binary.types[: len(values)]):
            if kind == "f32":
                values[number] = ctypes.c_float(values[number]).value  # infinite where it is too large
        packed = self._packing.pack(*values, *(0,) * (len(binary.types) - len(values)))
        blocks: dict[int, _Launch] = {}
        run = library().cuLaunchKernelEx
        every = len(kept) == len(varying)

        def launch(stream: int, *values: Any) -> None:
            block = blocks.get(get_ident())
            if block is None:
                block = blocks[get_ident()] = _Launch(binary, grid, packed, changed)
            if not every:
                values = tuple(values[number] for number in kept)
            for cell, value in zip(block.varying, values, strict=True):
                cell.value = value
            block.config.stream = stream
            status = run(block.reference, self._function, block.cells, None)
            if status == _NO_CONTEXT:
                _enter_context(self.device)
                status = run(block.reference, self._function, block.cells, None)
            if status:
                _checked(status, f"launch {binary.name}")

        return launch


class _Launch:
    """The memory that the driver reads a launch from. Each thread has its own."""

    def __init__(self, binary: Binary, grid: int, packed: bytes, varying: Sequence[int]) -> None:
        count = len(binary.types)
        self._values = ctypes.create_string_buffer(packed, max(1, len(packed)))
        start = ctypes.addressof(self._values)
        self.varying = [_TYPES[binary.types[n]].from_address(start + SLOT * n) for n in varying]
        self.cells = (ctypes.c_void_p * count)(*range(start, start + SLOT * count, SLOT))
        self.config = _Config(
            grid=(grid, 1, 1),
            block=(LANES * binary.warps, 1, 1),
            shared=binary.shared,
            attributes=_OVERLAPPING,
            count=1 if binary.overlaps else 0,
        )
        self.reference = ctypes.byref(self.config)
