"""Compiles C++ with the system's compiler, the one that torch.compile would use; what was compiled is kept on disk."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from eqfuse import logs
from eqfuse.cache.files import Unfit, cache_home, keep_whole, read_whole
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

KIND = "native"
"""The folder of compiled libraries, in the cache's."""


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
    return "\n".join([*_defined("CACHE", cache_bytes()), *_defined("PAST_CACHES", past_caches()), *texts])


def _defined(name: str, number: int) -> tuple[str, str, str]:
    """A number of bytes, unless the compiler is given another one."""
    return f"#ifndef {name}", f"#define {name} {number}LL", "#endif"


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
    """Runs a command in a process group of its own, which ends with it: a compiler's parts do not outlive it, nor this process."""
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        raise NotNative(f"{command[0]} failed: {error}") from None
    _running.add(process)
    try:
        said, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotNative(f"{command[0]} failed: {error}") from None
    finally:  # an interrupt too
        _end(process)
        _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


_running: set[subprocess.Popen[str]] = set()


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a process group."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@atexit.register
def _end_all() -> None:
    """A thread that waits for a compiler does not keep the process from ending."""
    for process in list(_running):
        _end(process)


os.register_at_fork(after_in_child=_running.clear)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """The line of what a compiler says that tells most."""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if "error" in line), lines[0]).strip()


def library_of(source: str, flags: tuple[str, ...] = (), headers: tuple[str, ...] = PRELUDE) -> ctypes.CDLL:
    """The compiled library of a source behind these headers: the one that is kept, else compiled now, and kept where the cache can
    be written. Raises NotNative with what the compiler said, or where what it made cannot be loaded."""
    text = f"{prelude(headers)}\n{source}"
    key = hashlib.sha256("\0".join([_machine(), *FLAGS, *flags, text]).encode()).hexdigest()[:32]
    try:
        path = cache_home() / KIND / f"{key}.so"
        if (kept := read_whole(path)) is not None:
            return load(kept)
    except OSError as why:
        path = None
        logs.note("cache", f"{KIND}: not kept: {why}")
    except (Unfit, NotNative) as why:
        logs.note("cache", f"{KIND}: a library is not used: {why}")
    code = _compiled(text, flags)
    found = load(code)
    if path is not None:
        try:
            keep_whole(path, code)
        except OSError as why:
            logs.note("cache", f"{KIND}: not kept: {why}")
    return found


def _compiled(text: str, flags: tuple[str, ...]) -> bytes:
    """What the compiler makes of a text."""
    command = compiler()
    assert command is not None  # or there would be no key
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text, encoding="utf-8")
            done = _called(*command, *FLAGS, *flags, str(source), "-o", str(made))
            if done.returncode:
                raise NotNative(f"{shlex.join(command)} failed: {_said(done)}")
            return made.read_bytes()
    except OSError as error:
        raise NotNative(f"the compiled kernel cannot be read: {error}") from None


def load(code: bytes) -> ctypes.CDLL:
    """The library of this code, loaded from a file that is made for it and gone before the first call: what stands in the cache is
    not what is mapped, and may change. Raises NotNative where it cannot be loaded."""
    problem = ""
    for folder in _folders():
        try:
            # The loader takes a path that it knows for the library that it has: the digest makes that the same one.
            name = hashlib.sha256(code).hexdigest()
            with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".so", dir=folder) as file:
                file.write(code)
                file.flush()
                return ctypes.CDLL(file.name)
        except OSError as error:
            problem = problem or str(error)
    raise NotNative(f"the compiled kernel cannot be loaded: {problem}")


def _folders() -> Iterator[Path]:
    """Where a library may be loaded from, tried in turn: code in temporary files may be forbidden."""
    with suppress(OSError):
        yield Path(tempfile.gettempdir())
    with suppress(OSError):
        yield cache_home()
