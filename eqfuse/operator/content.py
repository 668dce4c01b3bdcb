"""Kernels by content: a text that says all that a kernel is compiled from, so that a graph that holds it can be saved,
and run where the kernel was not made yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import quote, unquote
from weakref import WeakValueDictionary

import torch

from eqfuse.calls.call_cache import CachedCall
from eqfuse.errors import EqfuseError
from eqfuse.terms.nodes import Program
from eqfuse.threads import Lock


class Called(Protocol):
    """A kernel, as the operator calls it."""

    content: str
    scalars: Mapping[str, float]
    constants: tuple[str, ...]

    @property
    def program(self) -> Program: ...

    def extents(self, shapes: Mapping[str, Sequence[Any]], sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The extent of every axis in a call of tensors of these shapes, which may be symbols."""

    def shaped(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """The outputs of a call, holding nothing."""

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any: ...

    def cached(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> CachedCall | None:
        """What runs all calls like one that has run; None where they are looked at each time."""

    def run_cached(self, cached: CachedCall, values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        """The outputs of a call of a cached kind; None where it has to be looked at once more."""

    def forward(
        self,
        names: tuple[str, ...],
        dtypes: Mapping[str, torch.dtype] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Saving:
        """What a call, on inputs of these `dtypes`, runs of which gradients by some inputs may be asked. Where `shapes` of all tensors and
        `sizes` of axes are given, it may make the gradients itself."""

    def gradient(
        self,
        names: tuple[str, ...],
        of: tuple[str, ...] = (),
        alike: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
        scales: bool = False,
    ) -> Called:
        """The kernel of the gradient by some inputs: one that reads what the forward for gradients `of` inputs has saved,
        in the `dtypes` of the inputs where these are halves; or, without, one of inputs and cotangents alone. `alike`:
        dimensions that are divided alike are as long; `scales`: the forward has made the gradients."""

    def jvp(self, names: tuple[str, ...]) -> Called:
        """The kernel of the directional derivative along tangents of some inputs."""

    def outputs_by(self, names: tuple[str, ...]) -> frozenset[str]:
        """The outputs that have a derivative by some inputs."""

    def alike(self, source: str) -> Called:
        """The kernel of another text, compiled as this one is."""

    def opened(
        self,
        tensors: Mapping[str, torch.Tensor],
        numbers: Mapping[str, Any],
        sizes: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """The outputs of a call, by what it launches."""


def quoted(given: Mapping[str, Any]) -> str:
    """What a content is made of as text that stands between quotes in the code of any language: Inductor's C++ has it so."""
    text = json.dumps(given, sort_keys=True, default=lambda number: number.item())  # numpy's
    return quote(text, safe=" []{}()<>,.:;=+-*/|&^~!?@#$'")


def unquoted(content: str) -> dict[str, Any]:
    """What a content was made of."""
    return json.loads(unquote(content))  # type: ignore[no-any-return]


VISIBLE = quoted({"visible": True})[1:-1]
"""What the content of a kernel has whose calls compilers see into."""


@dataclass(frozen=True)
class Saving:
    """What a gradient reads of its forward: some `outputs`, and the `residuals` that `kernel` gives after the outputs.
    `tracked` are the outputs that have a gradient; `scales`: the residuals are gradients for a cotangent of 1."""

    kernel: Called
    outputs: tuple[str, ...]
    residuals: tuple[str, ...]
    tracked: frozenset[str]
    scales: bool = False


ADDED = "added"
"""What the digest of rules and reductions stands under."""
SHARDED, DERIVED = "sharded", "derived"
"""What the content of a kernel that `eq.shard` has made stands under, and of one that a method has made of that."""

Make = Callable[[Mapping[str, Any]], Called]

_lock = Lock()
_here: WeakValueDictionary[str, Called] = WeakValueDictionary()
_recorded: dict[str, Called] = {}
"""Kernels that some graph may hold, by content: they live as long as the process."""

_make: list[Make] = []


def set_make(make: Make) -> None:
    """How a kernel is made of what `written` was given."""
    _make[:] = [make]


def compiled(source: str, **options: Any) -> Any:
    """The kernel of a text, with the options of `eq.compile`, which stands above all rooms."""
    return _make[0]({"source": source, **options})


def written(given: Mapping[str, Any], added: Sequence[object]) -> str:
    """The content of a kernel: what it is compiled from, and a digest of the rules and reductions that it owes to this
    process, where there are any."""
    text = "\n".join(map(str, added))
    mark = {ADDED: hashlib.sha256(text.encode()).hexdigest()[:16]} if text else {}
    return quoted({**given, **mark})


def enrol(kernel: Called) -> None:
    """Lets the operator find a kernel, as long as it lives."""
    with _lock:
        _here[kernel.content] = kernel


def kernel_of(content: str) -> Called:
    """The kernel of a content: one that is here, or one that is compiled now. Raises EqfuseError."""
    found = _recorded.get(content)
    if found is None:
        with _lock:
            found = _recorded.get(content)
            if found is None:
                found = _recorded[content] = _here.get(content) or _made(content)
    return found


def _made(content: str) -> Called:
    given = {name: value for name, value in unquoted(content).items() if name != ADDED}
    if DERIVED in given:  # a graph that was compiled before asks for what tracing it would have made
        of, method, argument = given[DERIVED]
        derived: Called = getattr(kernel_of(of), method)(
            tuple(argument) if isinstance(argument, list) else argument
        )
        return derived
    if SHARDED in given:
        raise EqfuseError(
            "a graph calls a sharded kernel that this process does not have",
            hint="make it by eq.shard before the graph runs, with the same arguments and groups",
        )
    made = _make[0](given)
    if made.content != content:
        raise EqfuseError(
            "a graph calls a kernel that was compiled with rules or reductions which this process does not have",
            hint="register them first, or compile the kernel as the process did that made the graph",
        )
    return made


@lru_cache(maxsize=1024)
def names_in(names: str) -> tuple[tuple[str, ...], ...]:
    """The names of tensors, of integers, of reals, and of axes that have a size."""
    return tuple(tuple(part.split()) for part in names.split("|"))


def operator_of(content: str) -> Any:
    """The operator that a call of a kernel is: `eqfuse::call`, or `eqfuse::visible`."""
    return torch.ops.eqfuse.visible.default if VISIBLE in content else torch.ops.eqfuse.call.default


def names_text(*names: list[str]) -> str:
    """What `names_in` reads."""
    return "|".join(" ".join(part) for part in names)
