"""Compiles C++ with the system's compiler, the one that torch.compile would use; what was compiled is kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from eqfuse.cache.files import cache_home, write_whole
from eqfuse.extract.machine import cache_bytes, compiler, features, past_caches
from eqfuse.tile.native.nodes import NotNative

FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-w", "-fopenmp"),
    # Products are not contracted with sums unless the text says so; integers wrap around, as torch's do.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-stack-protector"),
)
PRELUDE = ("vectors.h", "functions.h", "calls.h")
SECONDS = 120
"""How long a compiler may take."""


def lacking() -> str:
    """What to say where there is no compiler."""
    wanted = os.environ.get("CXX", "")
    if wanted.strip():
        return f"$CXX is {wanted!r}, which is no command here"
    return "there is no C++ compiler (g++, clang++ or $CXX)"


@lru_cache
def prelude(headers: tuple[str, ...] = PRELUDE) -> str:
    """What a source begins with."""
    room = files("eqfuse.tile.native")
    texts = ((room / name).read_text(encoding="utf-8") for name in headers)
    sizes = (
        f"#define CACHE {cache_bytes()}LL\n#ifndef PAST_CACHES\n#define PAST_CACHES {past_caches()}LL\n#endif"
    )
    return "\n".join([sizes, *texts])


def _machine() -> str:
    """What the compiled code depends on besides its source: the compiler and the processor."""
    command = compiler()
    if command is None:
        raise NotNative(lacking())
    return f"{shlex.join(command)}\n{_version(command)}\n{platform.machine()}\n{features()}"


@lru_cache
def _version(command: tuple[str, ...]) -> str:
    done = _called(*command, "--version")
    if done.returncode:
        raise NotNative(f"{shlex.join(command)} failed: {_said(done)}")
    return done.stdout


def _called(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNative(f"{command[0]} failed: {error}") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """The line of what a compiler says that tells most."""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def library_of(source: str, flags: tuple[str, ...] = (), headers: tuple[str, ...] = PRELUDE) -> Path:
    """The compiled library of a source behind these headers, from the disk where it is there. Raises NotNative with what the compiler said, or
    where the cache folder or the folder for temporary files cannot be written."""
    text = f"{prelude(headers)}\n{source}"
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
    command = compiler()
    assert command is not None  # or there would be no key
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text, encoding="utf-8")
        done = _called(*command, *FLAGS, *flags, str(source), "-o", str(made))
        if done.returncode:
            raise NotNative(f"{shlex.join(command)} failed: {_said(done)}")
        write_whole(path, made.read_bytes())


def load(path: Path) -> ctypes.CDLL:
    """The library. Raises NotNative where it cannot be loaded; it is compiled anew next time."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise NotNative(f"the compiled kernel cannot be loaded: {error}") from None
