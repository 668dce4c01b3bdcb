"""The derivative of `eqfuse::call`: the same operator, of the gradient's kernel.

It is registered below torch's transforms, at the key of autograd, so that a compiler that traces a joint graph, and
`torch.func` at any depth, find it. A forward derivative is refused by torch, since there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

from eqfuse.operator.content import Called, kernel_of, names_in
from eqfuse.operator.library import arguments, called, run
from eqfuse.operator.shapes import Size, extents
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import axes_of


@contextmanager
def apart() -> Iterator[None]:
    """Inside, torch computes numbers, whatever records or transforms what is called around it."""
    with torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield


def recorded(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any],
    reals: Sequence[Any],
) -> Sequence[torch.Tensor]:
    """The operator at autograd's key."""
    for tensor in tensors:
        if tensor.requires_grad or type(tensor) is not torch.Tensor or tensor.is_meta:
            break
    else:
        if not torch._C._len_torch_dispatch_stack() and maybe_current_level() is None:
            return run(content, names, tensors, integers, reals)
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not tracked:
        with torch._C._AutoDispatchBelowAutograd():
            return _operator(content, names, tensors, integers, reals)
    with enable_single_level_autograd_function():
        made = _Recorded.apply(content, names, integers, reals, *tensors)  # type: ignore[attr-defined]
    return list(made)


def _operator(
    content: str, names: str, tensors: Sequence[torch.Tensor], integers: Sequence[Any], reals: Sequence[Any]
) -> Sequence[torch.Tensor]:
    found: Sequence[torch.Tensor] = torch.ops.eqfuse.call.default(content, names, tensors, integers, reals)
    return found


class _Recorded(_SingleLevelFunction):
    """One level of autograd: transforms of `torch.func` have unwrapped their own when it is reached."""

    @staticmethod
    def forward(
        ctx: Any,
        content: str,
        names: str,
        integers: Sequence[Any],
        reals: Sequence[Any],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _operator(content, names, list(tensors), integers, reals)
        ctx.call = content, names, integers, reals
        ctx.shapes = [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        content, names, integers, reals = ctx.call
        tensors, numbers, sizes = arguments(names, ctx.saved_tensors, integers, reals)
        needed = zip(names_in(names)[0], ctx.needs_input_grad[4:], strict=True)
        wanted = tuple(name for name, is_needed in needed if is_needed)
        with apart():
            kernel = kernel_of(content)
            gradient = kernel.gradient(wanted)
            kernel_of(gradient.content)
        filled = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if value is None else value
            for value, (shape, dtype, device) in zip(cotangents, ctx.shapes, strict=True)
        ]
        found = pulled_back(kernel, gradient, wanted, tensors, numbers, sizes, filled)
        return None, None, None, None, *(found.get(name) for name in names_in(names)[0])


def pulled_back(
    kernel: Called,
    gradient: Called,
    wanted: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
    cotangents: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients by the inputs `wanted`, in their shapes and dtypes."""
    from eqfuse.differentiate.gradient import cotangent, real_outputs  # derivatives are for those who ask

    program, known = kernel.program, gradient.program
    real = real_outputs(program)
    given: dict[str, Any] = {**tensors, **numbers}
    for output, value in zip(program.outputs, cotangents, strict=True):
        if output.name in real:
            given[cotangent(output.name)] = value
    reads = {*(tensor.name for tensor in known.tensors), *known.scalars}
    values = {name: value for name, value in given.items() if name in reads}
    made = called(gradient.content, values, gradient_sizes(program, known, tensors, sizes, wanted))
    results = made if isinstance(made, tuple) else (made,)
    return {
        name: value.to(tensors[name].dtype).reshape(tensors[name].shape)
        for name, value in zip(wanted, results, strict=True)
    }


def gradient_sizes(
    program: Program,
    gradient: Program,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Size],
    wanted: Sequence[str],
) -> dict[str, Size]:
    """The sizes of the axes of a gradient: those of the call, and of what it is the gradient of."""
    from eqfuse.differentiate.gradient import cotangent

    shapes = {tensor.name: tuple(tensors[tensor.name].shape) for tensor in program.tensors}
    axes = {gradient.domains.get(axis, axis) for axis in axes_of(gradient.outputs)}
    found = {
        axis: size
        for axis, size in extents(program, shapes, sizes).items()
        if axis in axes and axis not in gradient.lengths
    }
    results = {cotangent(name): tensors[name] for name in wanted}
    for output in gradient.outputs:
        shape = results[output.name].shape if output.axes else ()
        found |= {gradient.domains.get(a, a): n for a, n in zip(output.axes, shape, strict=True)}
    return found
