"""Compiling what a call will launch before it does: its kernels at the same time as each other, and as what the caller does meanwhile.

The launcher of an emitted module is run on tensors without memory, and what it would launch is compiled instead (`JITFunction.warmup`), each kernel
by a thread: Triton's passes and assemblers run without Python's lock. What is compiled is found by the launch as if an earlier one had compiled it.
Nothing is raised here: a launch compiles what could not be compiled ahead once more, and says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from threading import Thread
from types import FunctionType, ModuleType
from typing import Any

import torch

from eqfuse import logs
from eqfuse.threads import Lock, cores

ALIGNMENT = 16
"""Bytes of which addresses are multiples where tensors without memory, at address 0, stand for them."""


ATTEMPTS = 4
"""How often a kernel is compiled whose text Python's parser mistakes while it reads another one."""


class Ahead:
    """The compilation of what a call of function `name` of a module launches, begun in threads. `load` gives the module."""

    def __init__(self, load: Callable[[], ModuleType], name: str, values: Mapping[str, Any]) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(max_workers=cores(), thread_name_prefix="eqfuse compiles")
        self._kernels: list[Future[None]] = []
        given = {name: _stand_in(value) for name, value in values.items()}
        place = next(value.device for value in values.values() if isinstance(value, torch.Tensor))
        self._launcher = self._threads.submit(self._launch, load, name, given, place)

    def wait(self) -> None:
        """Returns once all is compiled, or cannot be. In a forked child, which has none of the threads, at once."""
        if os.getpid() == self._process:
            problems = [self._launcher.exception()]  # once it has ended there are no more kernels
            problems += [kernel.exception() for kernel in self._kernels]
            for why in filter(None, problems):
                logs.note("source", f"not compiled ahead: {why}")

    def _launch(
        self, load: Callable[[], ModuleType], name: str, given: Mapping[str, Any], place: torch.device
    ) -> None:
        def begin(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            def compile_it() -> None:
                hash_library()
                with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
                    for left in reversed(range(ATTEMPTS)):
                        try:
                            kernel.warmup(*arguments, grid=grid, **constants)
                        except SystemError:  # `ast.parse` in two threads at once (CPython's issue 106905)
                            if not left:
                                raise
                        else:
                            break

            self._kernels.append(self._threads.submit(compile_it))

        try:
            _launching(load(), begin, place)[name](**given)
        finally:
            self._threads.shutdown(wait=False)  # each thread ends once there is nothing to compile


_hashing = Lock()


def hash_library() -> None:
    """Triton looks binaries up by a hash of its own library, hundreds of megabytes, which it makes once in a process: of several threads that
    ask at once the others wait."""
    from triton.compiler import compiler
    from triton.runtime import cache

    with _hashing:
        for module in (cache, compiler):  # versions of Triton have it in one or the other
            if hasattr(module, "triton_key"):
                module.triton_key()


def hasten() -> None:
    """Begins to hash Triton's library in a thread, where a GPU is used: reading and hashing run without Python's lock."""
    if torch.cuda.is_initialized() and find_spec("triton") is not None:  # type: ignore[no-untyped-call]
        Thread(target=hash_library, name="eqfuse hashes Triton").start()


def is_aligned(values: Mapping[str, Any]) -> bool:
    """Whether tensors without memory may stand for these."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)


def _stand_in(value: Any) -> Any:
    """A tensor of the same shape, strides and dtype without memory; numbers and sizes as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _Kernel:
    """Stands for a kernel of a module: a launch begins its compilation."""

    def __init__(self, kernel: Any, begin: Callable[..., None]) -> None:
        self._kernel, self._begin = kernel, begin

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._begin(self._kernel, grid, *arguments, **constants)


def _launching(module: ModuleType, begin: Callable[..., None], place: torch.device) -> dict[str, Any]:
    """The module's functions, that begin to compile kernels where they launch them, for tensors on a device."""
    own = vars(module)
    at_place = torch.empty(0, device=place)

    def asked_there(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*given[:-1], at_place)

    made = dict(own)
    for name, value in own.items():
        if isinstance(value, FunctionType) and value.__globals__ is own:
            bound = FunctionType(value.__code__, made, name, value.__defaults__, value.__closure__)
            bound.__kwdefaults__ = value.__kwdefaults__
            made[name] = bound
    made |= {name: _Kernel(own[name], begin) for name in own["CONFIGS"]}
    made |= {name: asked_there(own[name]) for name in ("overlaps", "workers") if name in own}
    made["CALLS"] = {}
    if "multiply" in own:
        made["multiply"] = lambda *given: None
    return made
