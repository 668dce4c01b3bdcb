"""Compiling emitted kernels for a GPU that is not there, and reading off what they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.tile.triton.launch import load

TARGETS: Mapping[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and threads per warp of every target."""

_MATRIX_INSTRUCTIONS: Mapping[str, str] = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "mfma": r"\bv_mfma_",
    "cp.async": r"\bcp\.async\.c",
}
"""Instructions worth knowing about, by the pattern that finds them in assembly."""


@dataclass(frozen=True)
class KernelReport:
    """What a compiled kernel needs.

    `registers` per thread, `spilled_bytes` of local memory per thread, `shared_bytes` per block,
    `instructions` of `_MATRIX_INSTRUCTIONS` that it has, `assembly` the PTX or AMD assembly.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: frozenset[str]
    assembly: str


def compile_for(
    source_text: str,
    target: str,
    config: Mapping[str, Mapping[str, int]] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    divisible: bool = True,
    wide: bool = False,
) -> list[KernelReport]:
    """Compiles every kernel of an emitted module for `target`, one of TARGETS; of a Gluon module, those without roles.

    `config` overrides CONFIGS as at a call; `sizes` are extents of axes that one block holds whole (the program's own,
    else 64, where not given). With `divisible`, sizes and strides are multiples of 16 and last dims are contiguous, as
    they are for most tensors; `wide` is for tensors of 2**31 elements or more. Raises EqfuseError for an unknown
    target, and for a kernel that Triton cannot compile.
    """
    if target not in TARGETS:
        raise EqfuseError(f"unknown target {target!r}", hint=f"one of {', '.join(TARGETS)}")
    module = load(source_text)
    in_roles = getattr(module, "TILES", {})
    names = [name for name in module.SIGNATURES if name not in in_roles]
    return [_compile(module, name, target, config, sizes or {}, divisible, wide) for name in names]


def _compile(
    module: ModuleType,
    name: str,
    target: str,
    config: Mapping[str, Mapping[str, int]] | None,
    sizes: Mapping[str, int],
    divisible: bool,
    wide: bool,
) -> KernelReport:
    from triton import compile as triton_compile
    from triton import language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, name)
    known = {**module.SIZES, **sizes}
    extents = {axis: known.get(axis, 64) for axis in module.WHOLE[name].values()}
    chosen = module.settings(name, config, extents)
    chosen["INDEX"] = language.int64 if wide else language.int32
    options = {key: chosen.pop(key) for key in ("num_warps", "num_stages")}
    backend, architecture, _ = TARGETS[target]
    overlaps = backend == "cuda" and int(architecture) >= 90
    constants = {
        **chosen,
        "STAGES": options["num_stages"],
        "WAITS": overlaps,
        "LEADS": overlaps,
        **{name: divisible for name in kernel.arg_names if name.startswith("ALIGNED_")},
    }
    for block, axis in module.WHOLE[name].items():
        constants[block.replace("BLOCK", "EVEN", 1)] = extents[axis] == chosen[block]
    if divisible:
        constants |= dict.fromkeys(last_strides(kernel.arg_names, module.SIGNATURES[name]), 1)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        key: "constexpr" if key in constants else module.SIGNATURES[name].get(key, "i32")
        for key in kernel.arg_names
    }
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(key),): value for key, value in constants.items()},
        aligned(kernel, signature) if divisible else {},
    )
    try:
        compiled = triton_compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    except Exception as error:  # Triton's front end, MLIR passes and assemblers share no base class
        detail = str(error).strip() or type(error).__name__
        raise EqfuseError(
            f"Triton cannot compile kernel {name} for {target}: {detail}",
            hint="smaller blocks, or another target, may work",
        ) from error
    return report_of(name, compiled)


def aligned(kernel: Any, signature: Mapping[str, str]) -> dict[tuple[int], list[list[object]]]:
    """What Triton knows of pointers and integers that are multiples of 16, by their places."""
    places = (
        place
        for place, kind in enumerate(signature.values())
        if not kernel.params[place].do_not_specialize and (kind.startswith("*") or kind in ("i32", "i64"))
    )
    return {(place,): [["tt.divisibility", 16]] for place in places}


def last_strides(arguments: list[str], types: Mapping[str, str]) -> list[str]:
    """The stride parameter of the last dim of every tensor: the last one that bears the tensor's name."""
    tensors = [
        argument.removesuffix("_ptr") for argument in arguments if types.get(argument, "").startswith("*")
    ]
    strides = [[a for a in arguments if a.startswith(f"{tensor}_stride_")] for tensor in tensors]
    return [found[-1] for found in strides if found]


def report_of(name: str, compiled: Any) -> KernelReport:
    if "amdgcn" in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", assembly)
        spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)  # scalar ones go to vector registers
    else:
        assembly = compiled.asm["ptx"]
        usage = _resource_usage(compiled.asm["cubin"])
        registers, spilled = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)
    found = {key for key, pattern in _MATRIX_INSTRUCTIONS.items() if re.search(pattern, assembly)}
    return KernelReport(name, registers, spilled, compiled.metadata.shared, frozenset(found), assembly)


def _resource_usage(cubin: bytes) -> str:
    """What the bundled cuobjdump says of a cubin's registers and stack."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise EqfuseError(f"cuobjdump failed: {done.stderr.strip()}", hint="check the installation of Triton")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0
