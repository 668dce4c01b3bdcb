"""Emitted modules without Triton: their launchers are run as they are, their kernels are binaries that were kept."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from eqfuse.errors import EqfuseError
from eqfuse.terms.integers import power_of_two
from eqfuse.threads import Lock
from eqfuse.tile.triton import binaries
from eqfuse.tile.triton.driver import Loaded


class Missing(Exception):
    """No binary is kept for a launch."""


class _Name:
    """Stands for what a module takes from Triton's language, by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)

    def __str__(self) -> str:
        return self._name


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def module_of(source_text: str) -> ModuleType | None:
    """An emitted module whose kernels are kept binaries; None where it takes more of Triton than its language."""
    made = ModuleType("eqfuse_binaries")
    digest = binaries.digest(source_text)

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
        if function is None:
            return lambda given: jit(given, do_not_specialize=do_not_specialize)
        return Kernel(function, frozenset(do_not_specialize), digest, made)

    triton = ModuleType("triton")
    vars(triton).update(jit=jit, next_power_of_2=power_of_two, cdiv=cdiv, language=_Name("language"))

    def imported(
        name: str,
        into: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        taken: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if name == "triton" or name == "triton.language":
            return triton
        if name.startswith("triton.language."):
            return _Name(name)
        if name.startswith("triton"):
            raise ImportError(name)
        return __import__(name, into, local, taken or (), level)

    vars(made)["__builtins__"] = {**vars(builtins), "__import__": imported}
    try:
        exec(compile(source_text, "<eqfuse binaries>", "exec", dont_inherit=True), vars(made))  # noqa: S102  (text of our own printer)
    except ImportError:
        return None
    return made


class Kernel:
    """Stands for a `@triton.jit` function of a module."""

    def __init__(
        self, function: Callable[..., Any], free: frozenset[str], digest: str, module: ModuleType
    ) -> None:
        self.__name__ = function.__name__
        self._digest, self._module, self._lock = digest, module, Lock()
        parameters = inspect.signature(function).parameters
        kinds = {name: p.annotation for name, p in parameters.items() if p.annotation is not p.empty}
        self._constants = [name for name, kind in kinds.items() if str(kind) == "constexpr"]
        self._names = list(parameters)
        self._wide = {name for name, kind in kinds.items() if str(kind) == "float64"}
        self.free = [name in free for name in parameters]
        self.device_caches: dict[int, tuple[dict[Any, Loaded]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Launched]:
        def first(
            *arguments: Any, num_warps: int, num_stages: int, launch_pdl: bool = False, **constants: Any
        ) -> Launched:
            options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
            values = [*arguments, *(constants[name] for name in self._names[len(arguments) :])]
            given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
            found = Launched(self._loaded(values, given, options))
            found[grid](*values)
            return found

        return first

    def _loaded(self, values: Sequence[Any], given: Sequence[Any], options: Mapping[str, Any]) -> Loaded:
        kinds = [self._kind(*each) for each in zip(self._names, values, strict=True)]
        specialisation, places = binaries.specialised(kinds, given, self.free)
        device = torch.cuda.current_device()
        kept = self.device_caches.setdefault(device, ({},))[0]
        key = (*specialisation, *options.items())
        with self._lock:
            if key not in kept:
                kept[key] = self._read(specialisation, options, device, places)
        return kept[key]

    def _read(
        self, specialisation: Sequence[str], options: Mapping[str, Any], device: int, places: tuple[int, ...]
    ) -> Loaded:
        major, minor = torch.cuda.get_device_capability(device)
        key = binaries.key_of(
            self._digest, self.__name__, specialisation, options, f"sm_{10 * major + minor}"
        )
        binary = None if key is None else binaries.read(key)
        if binary is None or binary.places != places:
            raise Missing(self.__name__)
        try:
            return Loaded(binary, device)
        except (EqfuseError, OSError):
            raise Missing(self.__name__) from None

    def _kind(self, name: str, value: Any) -> str:
        if name in self._constants:
            return "constexpr"
        if isinstance(value, torch.Tensor):
            kind: str = self._module.SIGNATURES[self.__name__][name]
            return kind
        if isinstance(value, float):
            return "fp64" if name in self._wide else "fp32"
        return ""


class Launched:
    """What a first launch gives: launches of the same binary, as those of Triton's `CompiledKernel`."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*values: Any) -> None:
            given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
            launch = self.loaded.launcher(grid[0], given, ())
            launch(torch._C._cuda_getCurrentRawStream(self.loaded.device))

        return run
