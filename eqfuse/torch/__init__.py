"""PyTorch's programs in, eqfuse's out: `eq.from_torch`, `torch.compile(model, backend="eqfuse")`, and what they are made of.

positions.py   positions in a dimension, as digits: views of a tensor are maps of positions
values.py      a tensor of a graph: what stands at a position
operators/     what each ATen operator computes, as values
translate.py   a graph of ATen operators as values
stops.py       what gradients do not pass
text.py        values as the text of a program
guards.py      sizes that a function asked about, checked at each call
program.py     `eq.from_torch`: a text that is called as the function is
backend.py     `torch.compile(model, backend="eqfuse")`; regions.py, which parts of a graph; prices.py, which are worth it;
               outcome.py, what came of each
attention.py   attention as transformers calls it
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
