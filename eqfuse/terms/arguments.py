"""Tensors as arguments: what stands in them, and nothing that a derivative or a batch would be lost with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch._C import _functorch  # torch.func has no public name for "is this one of your tensors?"
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only

from eqfuse.errors import BindError, locate


def detached(name: str, tensor: torch.Tensor, source: str = "") -> torch.Tensor:
    """The tensor without its graph. Raises BindError where a derivative is asked for, or a transform of
    `torch.func` is under way: what is computed from it is not differentiable, and the derivative would be 0."""
    found = _transformed(tensor)
    if found:
        what, hint = found
        raise BindError(f"{name!r} {what}", source=source, span=locate(source, name), hint=hint)
    return tensor.detach()


def _transformed(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What would be lost, and what to do; None where nothing would."""
    is_batched = is_batched_by_older_vmap(tensor)
    if is_batched or _functorch.is_functorch_wrapped_tensor(tensor):
        if is_batched or _functorch.is_batchedtensor(tensor):
            return (
                "is batched by torch.vmap, and kernels have no batching rule",
                "give the batch an axis of the program, and call the kernel on the whole batch",
            )
        return (
            "is under a transform of torch.func, which only a call of a kernel has rules for",
            "transform a call of the kernel, or use it outside of the transform",
        )
    if has_tangent(tensor):
        return (
            "has a tangent (forward-mode differentiation), and only a call of a kernel has a derivative",
            "pass the tensor's .detach(), or its primal: torch.autograd.forward_ad.unpack_dual(tensor).primal",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        return (
            "requires grad, and only a call of a kernel has a derivative",
            "call it under torch.no_grad() or torch.inference_mode(), or pass the tensor's .detach()",
        )
    return None


_BATCHED = torch._C._dispatch_key_parse("Batched")


def is_batched_by_older_vmap(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a batch of the vmap that `torch.autograd.functional` has with `vectorize=True`."""
    return torch._C._dispatch_keys(tensor).has(_BATCHED)


_FUNCTIONALITY = torch._C.DispatchKey.AutogradFunctionality


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor is under forward-mode differentiation, of the level that is entered here or by `torch.func.jvp` in a graph."""
    return (
        (forward_ad._current_level >= 0 or is_transforming())
        and not torch.is_inference_mode_enabled()
        and tensor.is_floating_point()
        and not _functorch.is_batchedtensor(tensor)
        and not torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALITY)  # below autograd
        and torch._VF._unpack_dual(tensor, level=0).tangent is not None
    )


def without_tangent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the tangent that it may have."""
    return torch._VF._unpack_dual(tensor, level=0).primal if has_tangent(tensor) else tensor


def looking_at_tangents(does: bool) -> AbstractContextManager[None]:
    """Inside, torch differentiates in forward mode, or does not."""
    return forward_ad._set_fwd_grad_enabled(does)


def wants_gradient(values: Mapping[str, Any]) -> bool:
    """Whether a call has to be seen by autograd: some tensor requires grad, or is under `torch.func.grad` or `vjp`. Under
    `vmap`, and in forward mode, kernels have no rule."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    if not any(map(is_tracked, tensors)):
        return False
    return not any(map(has_tangent, tensors)) and all(map(_is_of_grad, _transforms()))


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether a gradient may be asked for by a tensor."""
    if not tensor.is_floating_point():
        return False
    requires = tensor.requires_grad and torch.is_grad_enabled()
    return requires or _functorch.is_functorch_wrapped_tensor(tensor)


def _transforms() -> Sequence[Any]:
    return [level.key() for level in _functorch.get_interpreter_stack() or ()]


def _is_of_grad(key: Any) -> bool:
    return bool(key == _functorch.TransformType.Grad)


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is under way, in which what is newly made are tensors of its own."""
    return _functorch.peek_interpreter_stack() is not None


def ordinary_tensors() -> AbstractContextManager[None]:
    """Inside, tensors are made and read as outside of any transform."""
    found: AbstractContextManager[None] = torch._C._DisableFuncTorch()
    return found


class Absent(torch.Tensor):
    """Stands for a tensor that a later call is given: on its device, with its shape, strides and dtype, without memory, at an address that 16
    divides. It may be viewed; `meta` is a tensor of the device of that name."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    @staticmethod
    def like(tensor: torch.Tensor) -> Absent:
        """What stands for a tensor like this one."""
        form = tensor.shape, tensor.stride()
        return Absent(torch.empty_strided(*form, dtype=tensor.dtype, device="meta"), tensor.device)

    def data_ptr(self) -> int:
        return 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        places = {each.device for each in tree_leaves(given) if isinstance(each, Absent)}
        inside = tree_map_only(Absent, lambda each: each.meta, (given, dict(named or {})))
        made = function(*inside[0], **inside[1])
        return tree_map_only(torch.Tensor, lambda each: Absent(each, next(iter(places))), made)
