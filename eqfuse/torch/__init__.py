"""PyTorch's programs in, eqfuse's out: `eq.from_torch`, `torch.compile(model, backend="eqfuse")`, and what they are made of.

graphs.py      a function or module as a graph of ATen operators
positions.py   positions in a dimension, as digits: views of a tensor are maps of positions
values.py      a tensor of a graph: what stands at a position
operators/     what each ATen operator computes, as values
writer.py      a graph as the text of a program
program.py     `eq.from_torch`: a text that is called as the function is
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eqfuse.torch.attention import register_attention
    from eqfuse.torch.outcome import report
    from eqfuse.torch.program import from_torch

_AT_FIRST_USE = {"from_torch": "program", "register_attention": "attention", "report": "outcome"}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'eqfuse.torch' has no attribute {name!r}")
    return getattr(import_module(f"eqfuse.torch.{_AT_FIRST_USE[name]}"), name)


__all__ = ["from_torch", "register_attention", "report"]
