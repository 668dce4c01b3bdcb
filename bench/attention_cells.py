"""The cells of the attention benchmark: Neptune's ten operators by length, GQA decoding by batch; and, apart from
them, other head dims and groups of heads.

Shared by the machine that emits kernels and by the one that runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.cells import Cell as AnyCell
from bench.workloads import WORKLOADS, Case, Workload

LENGTHS = (8192, 2048, 512, 32768)
"""The most telling length first: a run that is cut short has measured that one."""

BATCHES = (2, 4, 8, 16, 32)
BATCHED = ("gqa_decode", 8192)
"""Operator and length that larger batches are measured at."""

OPERATORS = tuple(
    f"{mask}_{phase}"
    for phase, masks in (
        ("prefill", ("global", "causal", "gqa", "alibi", "softcap", "window")),
        ("decode", ("causal", "gqa", "alibi", "softcap")),
    )
    for mask in masks
)

DIMS = (64, 72, 80, 96, 128, 192, 256)
DIMS_OF = ("causal_prefill", 8192)
GROUPS = (4, 5, 6, 7, 8, 16)
GROUPS_OF = ("gqa_decode", 32768)
"""Head dims and heads that read the same keys, with the operator and length that they are measured at."""

HALF_BYTES = 2


@dataclass(frozen=True)
class Cell(AnyCell):
    """One operator at one length and batch, in float16. `dim` and `group` replace the paper's head dim, and its
    number of heads that read the same keys."""

    operator: str
    length: int
    batch: int = 1
    dim: int | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        batch = f"_b{self.batch}" if self.batch > 1 else ""
        shape = f"_d{self.dim}" if self.dim else f"_g{self.group}" if self.group else ""
        return f"{self.operator}_n{self.length}{batch}{shape}"

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.operator]

    @property
    def case(self) -> Case:
        """The paper's case, at this length and batch, of this head dim and group."""
        case = self.workload.cases["n512"]
        queries = 1 if self.is_decode else self.length
        sizes, constants = {**case.sizes, "b": self.batch, "i": queries, "j": self.length}, case.constants
        if self.dim:
            sizes |= {"d": self.dim, "e": self.dim}
        if self.group:
            sizes["h"], constants = self.group * sizes["k"], {**constants, "g": self.group}
        return replace(case, name=self.name, sizes=sizes, constants=constants)

    @property
    def is_decode(self) -> bool:
        """One query per head, at the end of the keys."""
        return self.operator.endswith("_decode")

    @property
    def is_causal(self) -> bool:
        return not self.is_decode and self.operator != "global_prefill"

    @property
    def span(self) -> int | None:
        """Keys that a query sees, where that is fewer than the causal mask leaves."""
        span = self.case.constants.get("span")
        return int(span) if span is not None and span < self.length else None

    @property
    def cap(self) -> float | None:
        cap = self.case.scalars.get("cap")
        return float(cap) if cap is not None else None

    @property
    def has_slope(self) -> bool:
        return "slope" in self.workload.tensors

    @property
    def is_plain(self) -> bool:
        """Whether torch's scaled_dot_product_attention computes it."""
        return self.cap is None and self.span is None and not self.has_slope

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        if not self.is_causal:
            return self.length * (1 if self.is_decode else self.length)
        span = self.span or self.length
        return span * (span + 1) // 2 + (self.length - span) * span

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two matrix products, over visible pairs."""
        sizes = self.case.sizes
        return 2 * sizes["b"] * sizes["h"] * self.pairs * (sizes["d"] + sizes["e"])

    @property
    def bytes(self) -> int:
        """Q, K and V read once, O written once."""
        sizes = self.case.sizes
        queries = sizes["b"] * sizes["h"] * sizes["i"]
        keys = sizes["b"] * sizes["k"] * sizes["j"]
        return HALF_BYTES * (queries + keys) * (sizes["d"] + sizes["e"])

    def entry(self) -> dict[str, Any]:
        return asdict(self)


def cell_of(entry: Mapping[str, Any]) -> Cell:
    """The cell of an entry of a manifest, or of a row that was measured."""
    fields = ("operator", "length", "batch", "dim", "group")
    return Cell(**{field: entry[field] for field in fields if field in entry})


def grid(only: str | None = None, lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    """All cells; with `only`, those of operators that start with one of its comma-separated words."""
    words = tuple(word.strip() for word in only.split(",")) if only else ("",)
    chosen = [operator for operator in OPERATORS if operator.startswith(words)]
    cells = [Cell(operator, length) for length in lengths for operator in chosen]
    operator, length = BATCHED
    if operator in chosen and length in lengths:
        cells += [Cell(operator, length, batch) for batch in BATCHES]
    return cells


def shapes() -> list[Cell]:
    """Other head dims and groups, none of the grid's cells."""
    dims = [Cell(*DIMS_OF, dim=dim) for dim in DIMS]
    return dims + [Cell(*GROUPS_OF, group=group) for group in GROUPS]
