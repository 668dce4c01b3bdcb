"""The cells of the benchmark of roles: attention by head dim, length, mask and dtype.

The most telling ones first: a run that is cut short has measured those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from bench import eager
from bench.attention_cells import Cell as AttentionCell
from bench.cells import Inputs
from bench.workloads import WORKLOADS, Case, Workload

LENGTHS = (8192, 2048, 16384, 1024, 4096)
LONGEST = 32768
MASKED_LENGTHS = (8192, 2048)
SMALL = 1024
"""The length of `--small`, which checks that everything runs."""
TOKENS = 4096
"""Positions of a batch, but for longer sequences: short ones come in batches."""

PREFIX = "prefix_prefill"
PREFIXED = 256
"""Positions at the start that every query sees."""


@dataclass(frozen=True)
class Cell(AttentionCell):
    """One operator in some dtype. `dim` is always given."""

    dtype: str = "bf16"

    @property
    def name(self) -> str:
        group = f"_g{self.group}" if self.group else ""
        return f"{self.operator}_d{self.dim}{group}_n{self.length}_b{self.batch}_{self.dtype}"

    @property
    def workload(self) -> Workload:
        return PROGRAMS[self.operator]

    @property
    def case(self) -> Case:
        case = super().case
        assert self.dim is not None
        return replace(case, dtype=self.dtype, scalars={**case.scalars, "scale": self.dim**-0.5})

    @property
    def is_plain(self) -> bool:
        return super().is_plain and self.operator != PREFIX

    @property
    def pairs(self) -> int:
        seen = super().pairs
        short = min(PREFIXED, self.length)
        return seen + short * (short - 1) // 2 if self.operator == PREFIX else seen

    @property
    def kernel(self) -> tuple[object, ...]:
        """What cells that one compiled program serves have in common."""
        return self.operator, self.dim, self.group, self.dtype

    def exact(self, inputs: Inputs, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` of the output, in float64."""
        case = self.case
        group = case.sizes["h"] // case.sizes["k"]
        q = inputs["Q"][:, :, first:last].double()
        k, v = (eager.heads(inputs[name].double(), group) for name in ("K", "V"))
        s = eager.scores(q, k, float(case.scalars["scale"]))
        if self.cap is not None:
            s = eager.softcap(s, self.cap)
        i = torch.arange(first, last, device=s.device)[:, None]
        j = torch.arange(self.length, device=s.device)[None]
        if self.has_slope:
            s = s + inputs["slope"].double()[:, None, None] * (j - i)
        return torch.softmax(s.masked_fill(~self._visible(i, j), -torch.inf), -1) @ v

    def _visible(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if not self.is_causal:
            return torch.ones_like(i + j, dtype=torch.bool)
        seen = j <= i
        if self.operator == PREFIX:
            seen = seen | (j < PREFIXED)
        return seen if self.span is None else seen & (i - j < self.span)


def _prefixed() -> Workload:
    """Causal attention whose first positions everybody sees."""
    causal = WORKLOADS["causal_prefill"]
    source = causal.source.replace("(j <= i + N(j) - N(i),", f"((j <= i + N(j) - N(i)) | (j < {PREFIXED}),")
    assert source != causal.source
    return replace(causal, name=PREFIX, source=source)


PROGRAMS: Mapping[str, Workload] = {
    **{name: work for name, work in WORKLOADS.items() if name.endswith("_prefill")},
    PREFIX: _prefixed(),
}
"""Programs of the cells, by operator."""


def grid(only: str | None = None, *, small: bool = False) -> list[Cell]:
    """The cells of operators that start with one of the comma-separated words of `only`."""
    words = tuple(word.strip() for word in only.split(",")) if only else ("",)
    cells = (cell for cell in _all() if cell.operator.startswith(words))
    if small:
        cells = (replace(cell, length=SMALL, batch=1) for cell in cells)
    return list(dict.fromkeys(cells))


def _all() -> Iterator[Cell]:
    for dim in (128, 64):
        for operator in ("causal_prefill", "global_prefill"):
            yield from _lengths(operator, dim, LENGTHS)
    for operator in ("alibi_prefill", "softcap_prefill", "gqa_prefill", "window_prefill", PREFIX):
        yield from _lengths(operator, 128, MASKED_LENGTHS)
    for dim in (96, 256, 72):
        for operator in ("causal_prefill", "global_prefill"):
            yield from _lengths(operator, dim, MASKED_LENGTHS)
    for group in (4, 7):
        yield Cell("gqa_prefill", 8192, dim=128, group=group)
    for operator in ("alibi_prefill", "softcap_prefill", "window_prefill"):
        yield from _lengths(operator, 64, MASKED_LENGTHS)
    for operator in ("causal_prefill", "global_prefill"):
        yield Cell(operator, 8192, dim=128, dtype="f16")
        yield Cell(operator, 8192, batch=8, dim=128)
        yield from (Cell(operator, LONGEST, dim=dim) for dim in (128, 64))


def _lengths(operator: str, dim: int, lengths: tuple[int, ...]) -> Iterator[Cell]:
    for length in lengths:
        yield Cell(operator, length, batch=max(1, TOKENS // length), dim=dim)
