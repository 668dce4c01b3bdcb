"""A call in the code that Inductor has written (`written.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eqfuse.arguments import ALIGNMENT
from eqfuse.calls.call_cache import CachedCall
from eqfuse.operator.content import Called, names_in, operator_of
from eqfuse.operator.library import arguments, call_of, owned
from eqfuse.threads import is_plain

MOST_KINDS = 64
"""How many kinds of calls a site knows at once."""


class Site:
    """One call of the graph. Its tensors have the same dtypes and are on the same device each time; with `is_fixed`, the same
    shapes and strides too. Calls go straight to what has run one of their kind; the first go through the operator."""

    def __init__(self, content: str, names: str, is_fixed: bool) -> None:
        self.content, self.names, self.is_fixed = content, names, is_fixed
        self._tensors, *self._numbers = names_in(names)
        self._kernel: Called | None = None
        self._copies = True
        self._cached: dict[tuple[Any, ...], CachedCall] = {}

    def __call__(
        self, tensors: Sequence[torch.Tensor], integers: Sequence[int] = (), reals: Sequence[float] = ()
    ) -> Sequence[torch.Tensor]:
        addresses = [tensor.data_ptr() for tensor in tensors]
        kind: tuple[Any, ...] = (*[address & ALIGNMENT == 0 for address in addresses], *integers)
        if not self.is_fixed:
            kind += tuple([part for tensor in tensors for part in (tensor.shape, tensor.stride())])
        cached = self._cached.get(kind)
        if cached is None or not is_plain():
            return self._looked_at(kind, tensors, integers, reals)
        values: dict[str, Any] = dict(zip(self._tensors, tensors, strict=True))
        if integers or reals:
            values |= zip(self._numbers[0], integers, strict=False)
            values |= zip(self._numbers[1], reals, strict=True)
        assert self._kernel is not None
        made = self._kernel.run_cached(cached, values, addresses)
        if made is None:
            self._cached.pop(kind, None)
            return self._looked_at(kind, tensors, integers, reals)
        return owned(made, tensors if self._copies else ())

    def _looked_at(
        self,
        kind: tuple[Any, ...],
        tensors: Sequence[torch.Tensor],
        integers: Sequence[int],
        reals: Sequence[float],
    ) -> Sequence[torch.Tensor]:
        """A call of the operator. What then runs calls like it is kept."""
        made: Sequence[torch.Tensor] = operator_of(self.content)(
            self.content, self.names, tensors, integers, reals
        )
        if is_plain():
            call = call_of(self.content, self.names)
            self._kernel = call.kernel
            self._copies = call.copies and any(tensor.device.type == "cpu" for tensor in tensors)
            values, numbers, sizes = arguments(self.names, tensors, integers, reals)
            with torch.no_grad():
                cached = call.kernel.cached({**values, **numbers}, sizes or None)
            if cached is not None:
                if len(self._cached) >= MOST_KINDS:
                    self._cached.clear()
                self._cached[kind] = cached
        return made
