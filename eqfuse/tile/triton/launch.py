"""Loading emitted modules and calling them: on a GPU, or in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from eqfuse.cache.files import cache_home, write_whole
from eqfuse.errors import BindError, EqfuseError
from eqfuse.threads import Lock, cached
from eqfuse.tile.triton.direct import Kind, known_call


def cache_folders() -> list[Path]:
    """Where emitted modules are kept: `$XDG_CACHE_HOME/eqfuse/triton`, or a folder of temporary files where that
    cannot be written to."""
    folders = []
    with suppress(OSError):
        folders.append(cache_home() / "triton")
    return [*folders, Path(tempfile.gettempdir()) / f"eqfuse-{os.getuid()}" / "triton"]


def source_file(source_text: str) -> Path:
    """The file that holds a module's source, which Triton reads its kernels from. Named by its hash. Raises
    EqfuseError where there is no place for it."""
    name = f"{hashlib.sha256(source_text.encode()).hexdigest()[:24]}.py"
    problems: list[str] = []
    for folder in cache_folders():
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists() or path.read_bytes() != source_text.encode():
                write_whole(path, source_text)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            return path
    raise EqfuseError(
        f"the kernel's source cannot be written ({'; '.join(problems)})",
        hint="set XDG_CACHE_HOME to a folder with room",
    )


def load(source_text: str, *, interpreted: bool = False) -> ModuleType:
    """The module of an emitted source text. Loaded `interpreted`, its kernels run on CPU tensors,
    under `emulation.interpreter()`. Raises EqfuseError without Triton."""
    with _loading:  # Triton's settings are those of the whole process
        return _loaded(source_text, interpreted)


_loading = Lock()


@lru_cache(maxsize=256)
def _loaded(source_text: str, interpreted: bool) -> ModuleType:
    try:
        from triton import knobs
    except ImportError as error:
        raise EqfuseError("Triton is not installed", hint="install it, or run on the CPU") from error
    path = source_file(source_text)
    spec = importlib.util.spec_from_file_location(f"eqfuse_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise EqfuseError(f"cannot import {path}", hint="emitted modules are Python files")
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        if interpreted:
            knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class TritonProgram:
    """An emitted module and the name of its function; called as that function is."""

    source_text: str
    name: str

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs on the GPU that holds the tensors. Raises BindError where the arguments do not fit,
        and EqfuseError where Triton does not compile a kernel for the device."""
        try:
            return self._function(*args, **kwargs)
        except ValueError as error:
            raise BindError(str(error)) from error
        except Exception as error:
            from triton.errors import TritonError

            if not isinstance(error, TritonError | RuntimeError):
                raise
            if not isinstance(error, TritonError) and "PassManager" not in str(error):
                raise
            kernels = ", ".join(load(self.source_text).CONFIGS)
            raise EqfuseError(
                f"Triton refused a kernel of {self.name} ({kernels}): {error}",
                hint="smaller blocks or fewer stages may fit, see config=",
            ) from error

    @cached
    def _function(self) -> Callable[..., Any]:
        return getattr(load(self.source_text), self.name)  # type: ignore[no-any-return]

    def kind(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        integers: Sequence[str],
        sizes: Mapping[str, int],
        names: Sequence[str],
        outputs: Sequence[str],
    ) -> Kind | None:
        """What calls like one that has run have in common. `tensors` are in the program's order, `names` are theirs in the
        order of the call; None where nothing was compiled for them."""
        module = load(self.source_text)
        known = known_call(module, tensors, scalars, integers, sizes)
        place = next((tensor.device for tensor in tensors.values()), None)
        if place is None:
            return None
        kind = Kind(module, known, names, outputs, place)
        return kind if kind.is_compiled else None

    @property
    def compilations(self) -> int:
        """How many binaries Triton has compiled, or loaded, of the module's kernels, on all devices."""
        module = load(self.source_text)
        kernels = [getattr(module, name) for name in module.CONFIGS]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def interpret(source_text: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls function `name` of an emitted module in Triton's interpreter, on CPU tensors."""
    from eqfuse.tile.triton.interpret import interpreter

    function = getattr(load(source_text, interpreted=True), name)
    with interpreter():
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise BindError(str(error)) from error
