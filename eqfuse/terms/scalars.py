"""Run-time scalars that are given as tensors of no dimension, which kernels read as elements of tensors.

A call that took them for numbers would wait until a GPU has computed them, and one with another integer would be looked at anew.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import torch

from eqfuse.terms.arguments import Absent
from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.nodes import Program, Scalar, once, walk
from eqfuse.terms.positions import integer_uses


def in_tensors(program: Program, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The scalars of a program that these values have as tensors of no dimension: real ones on a GPU, and integers that are values alone."""
    found = ((name, values.get(name)) for name in _readable(program))
    return tuple(name for name, value in found if _is_held(value, name in program.integers))


@once
def _readable(program: Program) -> tuple[str, ...]:
    """The scalars that may be elements of tensors: those that are no part of positions and extents, which a call has to know."""
    declared = {tensor.name: tensor.dtype in INTEGERS for tensor in program.tensors if tensor.dtype}
    declared |= {name: False for name in program.scalars if name not in program.integers}
    roots = [output.expr for output in program.outputs]
    counted = {node.name for node in walk(*program.computed.values()) if isinstance(node, Scalar)}
    counted |= integer_uses(roots, declared, program.at_most).keys()
    return tuple(name for name in program.scalars if name not in counted)


_PLAIN = (torch.Tensor, torch.nn.Parameter, Absent)
"""Classes of tensors of which a call may read elements: others take part in what torch records."""


def _is_held(value: Any, is_integer: bool) -> bool:
    """Whether an argument is a tensor of no dimension that is read as an element: of an integer, or of a number that a GPU holds. What it is
    otherwise is said where numbers are checked."""
    if type(value) not in _PLAIN or value.ndim or value.dtype.is_complex:
        return False
    return not value.dtype.is_floating_point if is_integer else value.is_cuda


def as_elements(source: str, names: Collection[str]) -> str:
    """The text of the same program, in which these scalars are elements of tensors of one position: `s` is `s[0]`."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    for token, after in reversed([*pairwise(tokens)]):
        if token.type != tokenize.NAME or token.string not in names:
            continue
        row, end = token.start[0] - 1, token.end[1]
        if after.string == ":" and not lines[row][: token.start[1]].strip():  # its declaration
            lines[row] = "\n"
        else:
            lines[row] = f"{lines[row][:end]}[0]{lines[row][end:]}"
    return "".join(lines)


def given_as_elements(program: Program, values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The arguments of that program for those of the first one: integers, and numbers in the precision that it computes in."""
    others = (v for name, v in values.items() if name not in names and isinstance(v, torch.Tensor))
    wide = torch.float64 if any(v.dtype == torch.float64 for v in others) else torch.float32
    dtypes = {name: torch.int64 if name in program.integers else wide for name in names}
    return {**values, **{name: values[name].to(dtype).reshape(1) for name, dtype in dtypes.items()}}
