"""Kernels as Triton has compiled them, kept between processes: what a launch needs, and nothing of Triton.

Triton keeps its binaries itself, but looks them up by a digest of its own library, some hundreds of megabytes, and of the
source as it parses it: most of what the first call of a second process waits for. Here an entry is found by the emitted
module, by what Triton would specialise on, by the device, and by sizes and dates of Triton's files. A binary that is found
holds for arguments that are looked at anew. Any fault is a miss: Triton compiles.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from eqfuse.cache import entries
from eqfuse.cache.entries import Key
from eqfuse.cache.files import Unfit, is_off

KIND = "binaries"

WIDTHS: Mapping[str, int] = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8}
"""Bytes of a kernel's parameters, by their types in PTX."""

DIVISOR = 16
"""Triton compiles apart for integers and addresses that it divides."""

WIDE = 2**31
"""Integers from here on take 64 bits."""

_OPTIONS = ("num_warps", "num_stages", "launch_pdl")
_NOTHING = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
"""What a launch would have to do more for."""

_PARAMETER = re.compile(r"\.param\s+\.(?:align\s+\d+\s+)?\.?([usbf]\d+)\b[^,)]*")
_STAMPED = ("__init__.py", "_C/libtriton.so", "compiler/compiler.py", "backends/nvidia/compiler.py")


@dataclass(frozen=True)
class Binary:
    """`code` is what the driver loads, `name` its function's. `shared` are bytes of shared memory, `overlaps` says that it may be
    launched before the kernel before it has ended. `types` are those of the function's parameters in PTX; the first of
    them are arguments of the kernel, those at `places`, and the others are memory that it does not use."""

    name: str
    code: bytes
    shared: int
    warps: int
    overlaps: bool
    types: tuple[str, ...]
    places: tuple[int, ...]


def specialised(
    types: Sequence[str], values: Sequence[Any], free: Sequence[bool]
) -> tuple[list[str], tuple[int, ...]]:
    """What Triton compiles apart for, argument by argument, and the places of those that remain parameters. `types` are those
    of pointers and of numbers, "constexpr", or empty where the value decides; `free` arguments are not specialised on. A
    pointer is an address."""
    found, places = [], []
    for place, (kind, value, is_free) in enumerate(zip(types, values, free, strict=True)):
        if kind == "constexpr":
            found.append(f"={value}")
            continue
        if kind.startswith("*") or (not kind and type(value) is int):
            if not kind and not is_free and value == 1:
                found.append("=1")
                continue
            kind = kind or _integer(value)
            found.append(kind + ("D" if not is_free and value % DIVISOR == 0 else ""))
        else:
            found.append(kind or "fp32")
        places.append(place)
    return found, tuple(places)


def _integer(value: int) -> str:
    if -WIDE <= value < WIDE:
        return "i32"
    return "i64" if -(2**63) <= value < 2**63 else "u64"


def key_of(
    module: str, kernel: str, specialisation: Sequence[str], options: Mapping[str, Any], device: str
) -> Key | None:
    """What the binary of a kernel is found by: the digest of its module, its name, what it is specialised on, the options of
    its launch, and the device's architecture. None where nothing is kept."""
    stamps = triton_stamps()
    if stamps is None or is_off():
        return None
    return {
        "module": module,
        "kernel": kernel,
        "specialised": list(specialisation),
        "options": {name: options[name] for name in _OPTIONS},
        "device": device,
        "triton": stamps,
        "environment": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
    }


def digest(source_text: str) -> str:
    return hashlib.sha256(source_text.encode()).hexdigest()


def _matters(variable: str) -> bool:
    return variable.startswith(("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "DISABLE_")) and not variable.endswith(
        "_DIR"
    )


@lru_cache(maxsize=1)
def triton_stamps() -> list[list[Any]] | None:
    """Sizes and dates of Triton's files, which is not imported for it; None where it is not installed."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    home, stamps = Path(found.origin).parent, []
    for name in _STAMPED:
        try:
            stat = (home / name).stat()
        except OSError:
            return None
        stamps.append([name, stat.st_size, stat.st_mtime_ns])
    return stamps


def compiled(found: Any, module: str) -> tuple[Key, Binary] | None:
    """A binary of Triton's (`CompiledKernel`) of a module with that digest, and its key; None for what a plain launch cannot
    run: other vendors' devices, clusters, descriptors, memory that a launcher allocates."""
    source, metadata = found.src, found.metadata
    if metadata.target.backend != "cuda" or not all(
        hasattr(metadata, name) for name in (*_OPTIONS, *_NOTHING)
    ):
        return None
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name) for name in _NOTHING):
        return None
    signature = list(source.signature.values())
    if any(kind.startswith(("tensordesc", "nvTmaDesc")) for kind in signature if isinstance(kind, str)):
        return None
    if not all(isinstance(kind, str) for kind in signature):
        return None
    specialisation = [
        f"={source.constants[(place,)]}"
        if kind == "constexpr"
        else kind + ("D" if source.attrs.get((place,)) else "")
        for place, kind in enumerate(signature)
    ]
    places = tuple(place for place, kind in enumerate(signature) if kind != "constexpr")
    types = parameter_types(found.asm["ptx"], metadata.name)
    if types is None or len(types) < len(places):
        return None
    options = {name: getattr(metadata, name) for name in _OPTIONS}
    key = key_of(module, source.fn.__name__, specialisation, options, f"sm_{metadata.target.arch}")
    binary = Binary(
        metadata.name,
        found.asm["cubin"],
        metadata.shared,
        metadata.num_warps,
        bool(metadata.launch_pdl),
        types,
        places,
    )
    return None if key is None else (key, binary)


def parameter_types(ptx: str, name: str) -> tuple[str, ...] | None:
    """Types of the parameters of a function in PTX; None where one is none of `WIDTHS`."""
    _, _, rest = ptx.partition(f".entry {name}(")
    head, _, _ = rest.partition("\n)")
    if "[" in head:
        return None
    types = tuple(kind.replace("b", "u").replace("s", "u") for kind in _PARAMETER.findall(head))
    return types if head.count(".param") == len(types) and all(kind in WIDTHS for kind in types) else None


def keep(key: Key, binary: Binary) -> None:
    """Writes the entry. Raises OSError."""
    body = {**vars(binary), "code": base64.b64encode(zlib.compress(binary.code, 1)).decode()}
    entries.keep(KIND, key, {"binary": body})


def read(key: Key) -> Binary | None:
    """The binary for a key, where one is kept and whole."""
    try:
        content = entries.read(KIND, key)
        return None if content is None else _decoded(content)
    except Unfit:
        return None


def _decoded(content: Mapping[str, Any]) -> Binary:
    try:
        body = content["binary"]
        code = zlib.decompress(base64.b64decode(body["code"], validate=True))
        return Binary(
            **{**body, "code": code, "types": tuple(body["types"]), "places": tuple(body["places"])}
        )
    except (KeyError, TypeError, ValueError, zlib.error) as why:
        raise Unfit(f"it cannot be read: {why}") from None
