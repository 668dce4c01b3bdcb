"""Compiles C++ with the system's compiler, the one that torch.compile would use; what was compiled is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from eqfuse.cache.files import cache_home, write_whole
from eqfuse.tile.native.machine import cache_bytes
from eqfuse.tile.native.nodes import NotNative

FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-w", "-fopenmp"),
    # Products are not contracted with sums unless the text says so; integers wrap around, as torch's do.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-stack-protector"),
)
PRELUDE = ("vectors.h", "functions.h", "products.h")
SECONDS = 120
"""How long a compiler may take."""


@lru_cache
def compiler() -> str | None:
    """The path of the C++ compiler: `$CXX`, or g++, clang++ or c++; None where there is none."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else ["g++", "clang++", "c++"]))
    return next((path for path in found if path is not None), None)


@lru_cache
def prelude() -> str:
    """What every kernel's source begins with."""
    room = files("eqfuse.tile.native")
    texts = ((room / name).read_text(encoding="utf-8") for name in PRELUDE)
    return "\n".join([f"#define CACHE {cache_bytes()}LL", *texts])


@lru_cache
def features() -> str:
    """The names of the processor's instruction sets, as the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@lru_cache
def _machine() -> str:
    """What the compiled code depends on besides its source: the compiler and the processor."""
    path = compiler()
    if path is None:
        raise NotNative("there is no C++ compiler (g++, clang++ or $CXX)")
    try:
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNative(f"{path} failed: {error}") from None
    return f"{path}\n{version.stdout}\n{platform.machine()}\n{features()}"


def library_of(source: str, flags: tuple[str, ...] = ()) -> Path:
    """The compiled library of a source, from the disk where it is there. Raises NotNative with what the compiler said, or
    where the cache folder or the folder for temporary files cannot be written."""
    text = f"{prelude()}\n{source}"
    key = hashlib.sha256("\0".join([_machine(), *FLAGS, *flags, text]).encode()).hexdigest()[:32]
    path = cache_home() / "native" / f"{key}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(text, path, flags)
    except OSError as error:
        raise NotNative(f"the compiled kernel cannot be kept ($XDG_CACHE_HOME): {error}") from None
    return path


def _compile(text: str, path: Path, flags: tuple[str, ...]) -> None:
    found = compiler()
    assert found is not None  # or there would be no key
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(
                [found, *FLAGS, *flags, str(source), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotNative(f"{found} failed: {error}") from None
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
            raise NotNative(f"{found} failed: {said.strip()}")
        write_whole(path, made.read_bytes())


def load(path: Path) -> ctypes.CDLL:
    """The library. Raises NotNative where it cannot be loaded; it is compiled anew next time."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise NotNative(f"the compiled kernel cannot be loaded: {error}") from None
