"""The cells of the benchmark of roles: attention by head dim, length, mask and dtype, latent attention, and matrix products.

The most telling ones first: a run that is cut short has measured those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench import eager, peers
from bench.attention_cells import Cell as AttentionCell
from bench.cells import Cell as AnyCell
from bench.cells import Inputs, Peer, Run
from bench.reductions_cells import Cell as ReductionsCell
from bench.workloads import WORKLOADS, Case, TensorSpec, Workload
from eqfuse.terms.dtypes import BYTES

LENGTHS = (8192, 2048, 16384, 1024, 4096)
LONGEST = 32768
MASKED_LENGTHS = (8192, 2048)
SHAPES = ((8192, 8192, 8192), (4096, 7168, 2048), (4096, 4096, 7168), (4096, 24576, 1536))
"""Rows, columns and summed positions of products."""
LATENT = ("L2", "L6", "L4")
"""Cases of latent attention."""
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

    @property
    def sizes(self) -> Mapping[str, int]:
        """Extents of the program's axes."""
        return self.case.sizes

    @property
    def rows(self) -> int:
        return self.length

    def some(self, out: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last` of the output."""
        return out[:, :, first:last]

    @property
    def peers(self) -> list[Peer]:
        return peers.of(self)

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


@dataclass(frozen=True)
class ProductCell(AnyCell):
    """A matrix product whose rows and columns are scaled; operands of eight bits are summed exactly, but for `fast` peers."""

    i: int
    n: int
    p: int
    dtype: str

    @property
    def operator(self) -> str:
        return PRODUCT

    @property
    def name(self) -> str:
        return f"{PRODUCT}_{self.i}x{self.n}x{self.p}_{self.dtype}"

    @property
    def workload(self) -> Workload:
        return PROGRAMS[PRODUCT]

    @property
    def case(self) -> Case:
        return Case(self.name, self.dtype, self.sizes, {}, {})

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"i": self.i, "n": self.n, "p": self.p}

    @property
    def kernel(self) -> tuple[object, ...]:
        return PRODUCT, self.dtype

    @property
    def flops(self) -> int:
        return 2 * self.i * self.n * self.p

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype] * self.p * (self.i + self.n) + 2 * self.i * self.n

    def entry(self) -> dict[str, Any]:
        return {**asdict(self), "operator": PRODUCT}

    @property
    def rows(self) -> int:
        return self.i

    def some(self, out: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return out[first:last]

    def exact(self, inputs: Inputs, first: int, last: int) -> torch.Tensor:
        x, w, sx, sw = (inputs[name].double() for name in ("x", "w", "sx", "sw"))
        return x[first:last] @ w.T * sx[first:last, None] * sw

    @property
    def peers(self) -> list[Peer]:
        if self.dtype == "f8e4m3":
            kinds = (("cuBLAS", False), ("cuBLAS, fast sums", True))
            return [Peer(name, "library", partial(_scaled, fast)) for name, fast in kinds]
        return [Peer("cuBLAS", "library", lambda inputs: _multiplied)]


@dataclass(frozen=True)
class LatentCell(ReductionsCell):
    """Latent attention (MLA) of one query a sequence, at one of the paper's cases."""

    @property
    def operator(self) -> str:
        return self.program

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def kernel(self) -> tuple[object, ...]:
        return self.program, self.dtype

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.case.sizes

    @property
    def rows(self) -> int:
        return self.case.sizes["b"]

    def some(self, out: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return out[first:last]

    def exact(self, inputs: Inputs, first: int, last: int) -> torch.Tensor:
        (out,) = self.workload.run_exact(self.case, {name: x[first:last] for name, x in inputs.items()})
        return out

    @property
    def peers(self) -> list[Peer]:
        return []


def _scaled(fast: bool, inputs: Inputs) -> Run:
    """torch's product of operands of eight bits, which scales rows and columns."""

    def run(inputs: Inputs) -> torch.Tensor:
        scales = inputs["sx"][:, None], inputs["sw"][None]
        sides = inputs["x"], inputs["w"].T
        return torch._scaled_mm(*sides, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


def _multiplied(inputs: Inputs) -> torch.Tensor:
    """The product alone, without scales."""
    return inputs["x"] @ inputs["w"].T


def _unfused(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    return (eager.wide(x) @ eager.wide(w).T * sx[:, None] * sw).to(torch.bfloat16)


PRODUCT = "scaled_product"


def _product() -> Workload:
    source = "y[i,n] = bf16(sum[p](x[i,p] * w[n,p]) * sx[i] * sw[n])"
    tensors = {"x": "T[i, p]", "w": "T[n, p]", "sx": "f32[i] ~ positive", "sw": "f32[n] ~ positive"}
    specs = {name: TensorSpec.parse(text) for name, text in tensors.items()}
    return Workload(PRODUCT, "products", source, specs, _unfused, {})


def _prefixed() -> Workload:
    """Causal attention whose first positions everybody sees."""
    causal = WORKLOADS["causal_prefill"]
    source = causal.source.replace("(j <= i + N(j) - N(i),", f"((j <= i + N(j) - N(i)) | (j < {PREFIXED}),")
    assert source != causal.source
    return replace(causal, name=PREFIX, source=source)


PROGRAMS: Mapping[str, Workload] = {
    **{name: work for name, work in WORKLOADS.items() if name.endswith("_prefill") or name == "mla"},
    PREFIX: _prefixed(),
    PRODUCT: _product(),
}
"""Programs of the cells, by operator."""


AnyRolesCell = Cell | ProductCell | LatentCell


def grid(only: str | None = None, *, small: bool = False) -> list[AnyRolesCell]:
    """The cells of operators that start with one of the comma-separated words of `only`."""
    words = tuple(word.strip() for word in only.split(",")) if only else ("",)
    cells = (cell for cell in _all() if cell.operator.startswith(words))
    return list(dict.fromkeys(_small(cell) if small else cell for cell in cells))


def _small(cell: AnyRolesCell) -> AnyRolesCell:
    match cell:
        case Cell():
            return replace(cell, length=SMALL, batch=1)
        case LatentCell():
            return replace(cell, label=LATENT[-1])
        case ProductCell():
            return replace(cell, i=SMALL, n=SMALL, p=SMALL)


def _all() -> Iterator[AnyRolesCell]:
    for i, n, p in SHAPES[:2]:
        yield from (ProductCell(i, n, p, dtype) for dtype in ("bf16", "f8e4m3"))
    yield from (LatentCell("mla", label) for label in LATENT)
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
    for i, n, p in SHAPES[2:]:
        yield from (ProductCell(i, n, p, dtype) for dtype in ("f8e4m3", "bf16"))


def _lengths(operator: str, dim: int, lengths: tuple[int, ...]) -> Iterator[Cell]:
    for length in lengths:
        yield Cell(operator, length, batch=max(1, TOKENS // length), dim=dim)
