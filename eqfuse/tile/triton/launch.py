"""Loading emitted modules and calling them: on a GPU, or in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from eqfuse.cache.files import (
    Unfit,
    cache_home,
    is_off,
    made,
    private_home,
    read_plain,
    searched,
    write_whole,
)
from eqfuse.errors import BindError, EqfuseError
from eqfuse.threads import Lock, cached
from eqfuse.tile.triton import binaries, direct
from eqfuse.tile.triton.ahead import Ahead, is_aligned
from eqfuse.tile.triton.direct import Kind, known_call
from eqfuse.tile.triton.kept_module import Missing, module_of
from eqfuse.tile.triton.planned import Planned, Planner, planner_of


def cache_folders() -> list[Path]:
    """Where emitted modules are kept: `cache_home()`, or a folder of temporary files where that cannot be written to."""
    folders = []
    for home in (cache_home, private_home):
        with suppress(OSError):
            folders.append(home() / "triton")
    return folders


def source_file(source_text: str) -> Path:
    """The file of a module's source, for who reads what runs. Named by its hash. Raises EqfuseError where there is no place for it."""
    problems: list[str] = []
    for folder in cache_folders():
        path = module_path(folder, source_text.encode())
        try:
            made(folder)
            if not _is_there(path, source_text.encode()):
                write_whole(path, source_text)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            return path
    raise EqfuseError(
        f"the kernel's source cannot be written ({'; '.join(problems)})",
        hint="set XDG_CACHE_HOME to a folder with room",
    )


def module_path(folder: Path, text: bytes) -> Path:
    """The file of a module in a folder."""
    return folder / f"{hashlib.sha256(text).hexdigest()[:24]}.py"


def _is_there(path: Path, text: bytes) -> bool:
    try:
        return read_plain(path) == text
    except Unfit:
        return False


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
    module = ModuleType(f"eqfuse_{path.stem}")
    module.__file__ = str(path)
    # Triton reads kernels through `linecache`: the text that was asked for, whatever is in the file by then. Nothing imports it,
    # nor what Python would have compiled of it.
    lines = source_text.splitlines(keepends=True)
    linecache.cache[str(path)] = len(source_text), None, lines, str(path)
    with knobs.runtime.scope():
        if interpreted:
            knobs.runtime.interpret = True
        exec(compile(source_text, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102  (text of our own printer)
    return module


@dataclass(frozen=True)
class TritonProgram:
    """An emitted module and the name of its function; called as that function is. Where binaries were kept for all that a call
    launches, Triton is not even imported; else it compiles, and what it compiled is kept."""

    source_text: str
    name: str
    _modules: dict[str, ModuleType | None] = field(default_factory=dict, compare=False, repr=False)
    """Those that calls of this process have used: `kept`, whose kernels are binaries, where there are any, and `triton`."""

    _ahead: list[Ahead] = field(default_factory=list, compare=False, repr=False)
    """What compiles for a call that is to come."""

    _seen: set[int] = field(default_factory=set, compare=False, repr=False)
    """What Triton has compiled and was kept, or cannot be: by their ids, for Triton holds all of it."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs on the GPU that holds the tensors. Raises BindError where the arguments do not fit,
        and EqfuseError where Triton does not compile a kernel for the device."""
        is_kept = is_served((*args, *kwargs.values()))
        while self._ahead:
            self._ahead.pop().wait()
        try:
            if is_kept and (binaries_of := self._kept()) is not None:
                with suppress(Missing):
                    return getattr(binaries_of, self.name)(*args, **kwargs)
            made = self._function(*args, **kwargs)
        except ValueError as error:
            raise BindError(str(error)) from error
        except Exception as error:
            if isinstance(error, EqfuseError):
                raise
            from triton.errors import TritonError

            if not isinstance(error, TritonError | RuntimeError):
                raise
            if not isinstance(error, TritonError) and "PassManager" not in str(error):
                raise
            kernels = ", ".join(self._triton.CONFIGS)
            raise EqfuseError(
                f"Triton refused a kernel of {self.name} ({kernels}): {error}",
                hint="smaller blocks or fewer stages may fit, see config=; a newer Triton may compile it",
            ) from error
        if is_kept:
            self._keep()
        return made

    def begin(self, values: Mapping[str, Any]) -> None:
        """Begins to compile what a call of these arguments launches, where Triton has to: the call waits for it, and raises what it
        raised."""
        if self._kept() is None and is_aligned(values):
            self._ahead.append(Ahead(lambda: self._triton, self.name, values))

    def _kept(self) -> ModuleType | None:
        """The module of kept binaries, until Triton has to compile one; None where launches go through Triton."""
        if "triton" in self._modules or direct.is_watched():
            return None
        if "kept" not in self._modules:
            is_there = any((folder / binaries.KIND).is_dir() for folder in searched())
            self._modules["kept"] = module_of(self.source_text) if is_there else None
        return self._modules["kept"]

    def _keep(self) -> None:
        """Keeps what Triton has compiled."""
        module = self._triton
        caches = [c for name in module.CONFIGS for c in getattr(module, name).device_caches.values()]
        for each in (found for cache in caches for found in cache[0].values()):
            if id(each) not in self._seen:
                self._seen.add(id(each))
                entry = binaries.compiled(each, self._digest)
                if entry is not None:
                    with suppress(OSError):
                        binaries.keep(*entry)

    @cached
    def _digest(self) -> str:
        return binaries.digest(self.source_text)

    @property
    def _triton(self) -> ModuleType:
        found = self._modules.get("triton")
        if found is None:
            found = self._modules["triton"] = load(self.source_text)
        return found

    @property
    def _function(self) -> Callable[..., Any]:
        return getattr(self._triton, self.name)  # type: ignore[no-any-return]

    @cached
    def planner(self) -> Planner | None:
        """What finds the launches of a call from its sizes; None for other vendors' devices, whose binaries depend on more."""
        return None if torch.version.hip is not None else planner_of(self.source_text, self.name)

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
        place = next((tensor.device for tensor in tensors.values()), None)
        if place is None:
            return None
        for module in filter(None, self._modules.values()):
            known = known_call(module, tensors, scalars, integers, sizes)
            kind = Kind(module, known, names, outputs, place)
            if kind.is_compiled:
                return kind
        return None

    def planned(
        self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Planned | None:
        """What a call with these arguments, which were checked, launches; None where that is found as it runs."""
        planner = self.planner if tensors else None
        return None if planner is None else planner.planned(tensors, scalars, sizes)

    @property
    def compilations(self) -> int:
        """How many binaries Triton has compiled, or loaded, of the module's kernels, on all devices; those that were kept are
        counted where they are loaded."""
        kernels = [
            getattr(each, name) for each in filter(None, self._modules.values()) for name in each.CONFIGS
        ]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def is_served(given: Sequence[Any]) -> bool:
    """Whether kept binaries may run calls with these arguments: all tensors are on a device of NVIDIA's."""
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    on_gpu = bool(tensors) and all(tensor.device.type == "cuda" for tensor in tensors)
    return on_gpu and torch.version.hip is None and not is_off()


def interpret(source_text: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls function `name` of an emitted module in Triton's interpreter, on CPU tensors."""
    from eqfuse.tile.triton.interpret import interpreter

    function = getattr(load(source_text, interpreted=True), name)
    with interpreter():
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise BindError(str(error)) from error
