"""Compiling emitted Gluon kernels for a Hopper GPU that is not there, and reading off what they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from eqfuse.errors import EqfuseError
from eqfuse.tile.gluon.machine_code import unset_registers
from eqfuse.tile.triton.aot import KernelReport, aligned, last_strides, report_of
from eqfuse.tile.triton.launch import load

TARGET = "cuda", 90, 32
"""Backend, architecture and threads per warp."""

MACHINE_INSTRUCTIONS = ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "STL", "LDL")
"""Instructions worth knowing about: products, copies to and from shared memory, registers moved between roles, spills."""


@dataclass(frozen=True)
class RolesReport:
    """What a kernel needs, and how many of each of `MACHINE_INSTRUCTIONS` it has."""

    kernel: KernelReport
    machine: Mapping[str, int]


def compile_for_hopper(source_text: str, *, sizes: Mapping[str, int] | None = None) -> list[RolesReport]:
    """Compiles every kernel in roles of an emitted Gluon module for sm_90; `compile_for` does those without. Sizes and strides are
    multiples of 16, last dims are contiguous, and none of the conditions that a launch knows holds; `sizes` are
    extents of axes that one block holds whole (64 where not given). Raises EqfuseError for what Triton cannot compile, and where
    the assembler's code reads a register that it may not have set."""
    module = load(source_text)
    return [_compile(module, name, sizes or {}) for name in module.TILES]


def _compile(module: ModuleType, name: str, sizes: Mapping[str, int]) -> RolesReport:
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(module, name)
    known = {**module.SIZES, **sizes}
    extents = {axis: known.get(axis, 64) for axis in module.WHOLE[name].values()}
    constants = {
        key: value for key, value in module.settings(name, None, extents).items() if key in kernel.arg_names
    }
    constants |= dict.fromkeys((*module.SETTLED[name], *module.SIGNS[name]), False)
    constants |= dict.fromkeys(last_strides(kernel.arg_names, module.SIGNATURES[name]), 1)
    signature = {
        key: "constexpr" if key in constants else module.SIGNATURES[name].get(key, "i32")
        for key in kernel.arg_names
    }
    signature |= {desc: _described(module, tile, constants) for desc, tile in module.TILES[name].items()}
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    try:
        source = GluonASTSource(kernel, signature, places, aligned(kernel, signature))
        options = {"num_warps": 4, "maxnreg": module.REGISTERS[name]}
        compiled = triton_compile(source, target=GPUTarget(*TARGET), options=options)
    except Exception as error:  # the front end, MLIR passes and assemblers share no base class
        detail = str(error).strip() or type(error).__name__
        raise EqfuseError(
            f"Triton cannot compile the roles of {name} for sm_90: {detail}",
            hint="smaller blocks or fewer slots may fit",
        ) from error
    machine = _machine_code(compiled.asm["cubin"])
    unset = unset_registers(machine)
    if unset:
        raise EqfuseError(
            f"the machine code of {name} reads a register that it may not have set: {unset[0]}",
            hint="a fault of ptxas: other blocks or another version may not have it",
        )
    counts = {
        instruction: len(re.findall(rf"\b{instruction}\b", machine)) for instruction in MACHINE_INSTRUCTIONS
    }
    return RolesReport(report_of(name, compiled), counts)


def _machine_code(binary: bytes) -> str:
    """The instructions of a binary as text: Triton's own listing ends after 64 KB of them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _described(module: ModuleType, tile: tuple[str, tuple[object, ...]], blocks: Mapping[str, int]) -> str:
    """The type of a descriptor of tiles of these sizes."""
    from triton.experimental.gluon import language as gl

    dtype, sizes = tile

    def number(size: object) -> int:
        match size:
            case int():
                return size
            case str():
                return blocks[size]
            case (str(block), int(parts)):
                return blocks[block] // parts
        raise TypeError(size)

    block = [number(size) for size in sizes]
    element = next(t for t, name in module.DTYPE_NAMES.items() if name == dtype)
    layout = gl.NVMMASharedLayout.get_default_for(block, module.GLUON_DTYPES[element])
    return f"tensordesc<{dtype}{block},{layout!r}>"
