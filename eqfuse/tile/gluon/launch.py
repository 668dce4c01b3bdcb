"""Calling emitted Gluon modules, and the program's Triton form where the copy engine cannot address a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eqfuse.threads import cached
from eqfuse.tile.triton.launch import TritonProgram, load


@dataclass(frozen=True)
class GluonProgram:
    """An emitted Gluon module and the name of its function; called as that function is. `emit_triton` gives the module of the same program for
    tensors that begin or step at other places than multiples of 16 bytes."""

    source_text: str
    name: str
    emit_triton: Callable[[], str]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs on the GPU that holds the tensors; raises what `TritonProgram` does."""
        return self.form(kwargs)(*args, **kwargs)

    def begin(self, values: Mapping[str, Any]) -> None:
        """As `TritonProgram.begin`."""
        self.form(values).begin(values)

    def form(self, tensors: Mapping[str, Any]) -> TritonProgram:
        """What runs calls with these tensors, by name; other arguments may be among them, `sizes` are those of the call."""
        return self._program if self._suits(**tensors) else self.otherwise

    @cached
    def _suits(self) -> Callable[..., bool]:
        return load(self.source_text).suits  # type: ignore[no-any-return]

    @cached
    def _program(self) -> TritonProgram:
        return TritonProgram(self.source_text, self.name)

    @cached
    def otherwise(self) -> TritonProgram:
        return TritonProgram(self.emit_triton(), self.name)

    @property
    def compilations(self) -> int:
        """How many binaries of either form were compiled, or loaded."""
        has_both = "otherwise" in vars(self)
        return self._program.compilations + (self.otherwise.compilations if has_both else 0)
