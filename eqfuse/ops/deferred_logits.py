"""Logits of a linear layer that are not computed before something reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from eqfuse.errors import EqfuseError

T = torch.Tensor
aten = torch.ops.aten

PROPERTIES = (
    "shape dtype device ndim requires_grad grad_fn is_leaf layout is_cuda is_sparse is_nested is_meta"
)
METHODS = (
    "size dim numel is_floating_point is_complex __len__ float tanh div mul __truediv__ __mul__ __rmul__"
)
KEPT = frozenset(
    {
        *(getattr(T, name).__get__ for name in PROPERTIES.split()),
        *(getattr(T, name) for name in METHODS.split()),
        *(torch.tanh, torch.div, torch.mul, torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
"""Functions of torch that read no values of logits, or are deferred as they are."""

STEPS: Mapping[Any, str] = {
    aten._to_copy.default: "float",
    aten.div.Tensor: "divide",
    aten.mul.Tensor: "multiply",
    aten.tanh.default: "tanh",
}
"""Operators whose results are deferred."""


@dataclass
class Source:
    """Where logits come from: x: [..., c], w: [vocabulary, c], the operators applied since and their numbers. `read` is told the name of the function that
    first reads the values."""

    x: T
    w: T
    bias: T | None
    steps: tuple[tuple[str, float | None], ...]
    compute: Callable[[], T]
    read: Callable[[str], None]
    value: T | None = None

    def values(self, reader: str | None) -> T:
        """For a function of this name; None: for a step."""
        if self.value is None:
            if reader is not None:
                self.read(reader)
            self.value = self.compute()
        return self.value


class DeferredLogits(torch.Tensor):
    """A tensor with a shape, a history of autograd, and values that are computed when something first reads them.

    Raises EqfuseError where the weights were changed before that.
    """

    source: Source
    _plain: T | None

    @staticmethod
    def __new__(cls, source: Source, shape: torch.Size, dtype: torch.dtype) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.x.device)
        made.source, made._plain = source, None
        return made

    def plain(self, reader: str) -> T:
        """An ordinary tensor of the values, with the history of this one."""
        if self._plain is not None:
            return self._plain
        made: T = _Read.apply(self, reader)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            self._plain = made
        return made

    @property
    def is_capped(self) -> bool:
        """Whether the values are unread, and the steps are none or cap them by a tanh."""
        steps = self._steps()
        return self.source.value is None and (not steps or self.soft_cap is not None)

    @property
    def soft_cap(self) -> float | None:
        """The number at which the steps cap the values by a tanh."""
        match self._steps():
            case [("divide", float(cap)), ("tanh", None), ("multiply", float(same))] if cap == same > 0:
                return cap
        return None

    def _steps(self) -> list[tuple[str, float | None]]:
        """The steps in arithmetic of any precision."""
        return [step for step in self.source.steps if step[0] != "float"]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in KEPT:
            name = getattr(func, "__name__", str(func))
            args, named = tree_map_only(cls, lambda logits: logits.plain(name), (args, named))
            return func(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func is aten.detach.default:
            return cls(own.source, own.shape, own.dtype)
        if own is not None and own.source.value is None:
            match STEPS.get(func), args[1:], named:
                case "float", (), {"dtype": torch.float32, **others} if not others:
                    return _then(own, func, "float", (), named)
                case "tanh", (), {}:
                    return _then(own, func, "tanh", (), named)
                case ("divide" | "multiply") as step, (int() | float(),) as numbers, {}:
                    return _then(own, func, step, numbers, named)
        args, named = tree_map_only(cls, lambda logits: logits.source.values(str(func)), (args, named))
        return func(*args, **named)


def _then(
    own: DeferredLogits, func: Any, step: str, numbers: tuple[float, ...], named: Mapping[str, Any]
) -> DeferredLogits:
    """The logits after one more step."""
    before = own.source
    steps = (*before.steps, (step, float(numbers[0]) if numbers else None))

    def compute() -> T:
        made: T = func(before.values(None), *numbers, **named)
        return made

    source = Source(before.x, before.w, before.bias, steps, compute, before.read)
    return DeferredLogits(source, own.shape, torch.float32 if step == "float" else own.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, reader: str) -> T:
        values = logits.source.values(reader)
        alias: T = aten._unsafe_view.default(
            values, values.shape
        )  # which may be changed in place, as no view may
        return alias

    @staticmethod
    def backward(ctx: Any, *grads: T) -> tuple[T, None]:
        return grads[0], None


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, w: T, bias: T | None, source: Source) -> DeferredLogits:
        ctx.save_for_backward(x, w)
        ctx.has_bias = bias is not None
        return DeferredLogits(source, torch.Size((*x.shape[:-1], w.shape[0])), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: T) -> tuple[T | None, T | None, T | None, None]:
        x, w = ctx.saved_tensors
        of_x, of_w, of_bias, _ = ctx.needs_input_grad
        rows = grads[0].reshape(-1, w.shape[0])
        return (
            grads[0] @ w if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_w else None,
            rows.sum(0) if ctx.has_bias and of_bias else None,
            None,
        )


def deferred_logits(x: T, w: T, bias: T | None, read: Callable[[str], None]) -> DeferredLogits:
    """`x wᵀ + bias` of x: [..., c], w: [vocabulary, c], bias: [vocabulary], computed when something reads it; `read` is told what does."""
    weights = [t for t in (x, w, bias) if t is not None]
    versions = [t._version for t in weights]

    def compute() -> T:
        if versions != [t._version for t in weights]:
            raise EqfuseError(
                "the logits of a patched model are read after its weights were changed",
                hint="read them before the optimizer's step, or undo() the patch",
            )
        with torch.no_grad():
            return F.linear(x, w, bias)

    source = Source(x, w, bias, (), compute, read)
    made: DeferredLogits = _Defer.apply(x, w, bias, source)  # type: ignore[no-untyped-call]
    return made
