"""What a call would take, before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MUCH = 1 << 30
"""Bytes of what kernels make for each other, up to which less is not worth a call in parts: a hundredth of a GPU's memory."""


@dataclass(frozen=True)
class CallEstimate:
    """What a call would take: `stored` bytes of tensors that its kernels make for each other, and the `axes` of these, of the
    largest first; `price` predicts its seconds; `replaces` says whether an output may lie in the memory of a tensor, by their names."""

    stored: float
    axes: tuple[str, ...]
    price: Callable[[], float] = field(compare=False)
    replaces: Callable[[str, str], bool] = field(compare=False, default=lambda output, tensor: False)

    @property
    def seconds(self) -> float:
        """The predicted seconds of the call."""
        return self.price()
