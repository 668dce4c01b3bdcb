"""One program by everything that computes it: the reference, torch's operations, C++, and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import eqfuse as eq
from eqfuse.terms.parser import parse
from eqfuse.tile.triton.launch import interpret


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def everywhere(
    source: str, sizes: Mapping[str, int] | None = None, **given: Any
) -> dict[str, tuple[torch.Tensor, ...]]:
    """The outputs of a program by what computed them, each dtype that of the kernel."""
    kernel = eq.compile(source, target="cpu", native="off")
    found = {"torch": tensors_of(kernel(sizes=sizes, **given))}
    assert kernel.certificate.ok
    found["native"] = tensors_of(
        eq.compile(source, target="cpu", native="wait", verify=False)(sizes=sizes, **given)
    )
    dtypes = [one.dtype for one in found["torch"]]
    exact = tensors_of(eq.reference(source)(sizes=sizes, **given))
    found["reference"] = tuple(torch.as_tensor(x).to(d) for x, d in zip(exact, dtypes, strict=True))
    emitted = eq.compile(source, target="sm_90", verify=False)
    program = parse(source)
    arguments = [given[name] for name in (*(tensor.name for tensor in program.tensors), *program.scalars)]
    outputs = interpret(emitted.triton, emitted.name, *arguments, **({"sizes": sizes} if sizes else {}))
    found["triton"] = tensors_of(outputs)
    assert all([one.dtype for one in each] == dtypes for each in found.values())
    return found


def assert_same(found: Mapping[str, tuple[torch.Tensor, ...]], tolerance: float = 0.0) -> None:
    for name, results in found.items():
        for one, exact in zip(results, found["reference"], strict=True):
            torch.testing.assert_close(
                one.double(), exact.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
            )
