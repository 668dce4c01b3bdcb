"""PyTorch's programs in, eqfuse's out: `eq.from_torch`, `torch.compile(model, backend="eqfuse")`, and what they are made of.

graphs.py      a function or module as a graph of ATen operators
positions.py   positions in a dimension, as digits: views of a tensor are maps of positions
values.py      a tensor of a graph: what stands at a position
operators/     what each ATen operator computes, as values
writer.py      a graph as the text of a program
program.py     `eq.from_torch`: a text that is called as the function is
"""

from __future__ import annotations
