"""Run-time scalars that a device holds: a call that took them for numbers would wait until the device has computed them."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import torch

from eqfuse.terms.arguments import Absent
from eqfuse.terms.nodes import Program


def on_device(program: Program, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The real scalars of a program that these values have as tensors of no dimension on a GPU."""
    names = (name for name in program.scalars if name not in program.integers)
    found = ((name, values.get(name)) for name in names)
    return tuple(name for name, value in found if _is_held(value))


_PLAIN = (torch.Tensor, torch.nn.Parameter, Absent)
"""Classes of tensors of which a call may read elements: others take part in what torch records."""


def _is_held(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_cuda and not value.ndim


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


def given_as_elements(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The arguments of that program for those of the first one: in the precision that it computes in."""
    others = (v for name, v in values.items() if name not in names and isinstance(v, torch.Tensor))
    wide = torch.float64 if any(v.dtype == torch.float64 for v in others) else torch.float32
    return {**values, **{name: values[name].to(wide).reshape(1) for name in names}}
