"""The cells of the reductions benchmark: rows of many lengths, and the cascades of the papers' tables.

Shared by the machine that emits kernels and by the one that runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from bench.cells import Cell as AnyCell
from bench.workloads import WORKLOADS, Case, Workload
from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.parser import parse
from eqfuse.terms.types import program_dtypes, result_dtype

COUNTS = (32, 64, 128, 256)
LENGTHS = tuple(1 << n for n in range(10, 18))
"""Rows and columns of the papers' tables of row kernels."""

COVERING = (
    *(
        (32, 1 << 10),
        (32, 1 << 13),
        (32, 1 << 15),
        (32, 1 << 17),
        (64, 1 << 11),
        (64, 1 << 14),
        (128, 1 << 12),
    ),
    *((128, 1 << 16), (256, 1 << 10), (256, 1 << 13), (256, 1 << 14), (256, 1 << 17)),
)
"""Those that are measured unless all are asked for: every length, and every count of rows, at least once."""

LARGE = ((8192, 8192), (16384, 4096), (4096, 32768), (2048, 128256))
"""More than a cache holds; the last one is a vocabulary."""

LONG = 8192
"""Positions above which a row is long."""

Sizes = Mapping[str, int]


def _two_products(s: Sizes) -> int:
    return 2 * s["b"] * s["h"] * s["i"] * s["j"] * (s["d"] + s["e"])


def _latent(s: Sizes) -> int:
    return 2 * s["b"] * s["h"] * s["j"] * (s["d"] + s["r"] + s["e"])


def _features(s: Sizes) -> int:
    return 2 * s["b"] * s["h"] * (s["i"] + s["j"]) * s["f"] * (s["d"] + s["e"])


def _low_rank(s: Sizes) -> int:
    return 2 * s["t"] * (s["c"] * s["o"] + s["f"] * (s["c"] + s["o"]))


def _two_layers(s: Sizes) -> int:
    return 2 * s["t"] * s["f"] * (s["c"] + s["o"])


def _gated(s: Sizes) -> int:
    return 2 * s["t"] * s["f"] * (2 * s["c"] + s["o"])


def _routing(s: Sizes) -> int:
    return 2 * math.prod(s[axis] for axis in ("t", "d", "e"))


@dataclass(frozen=True)
class Family:
    """Programs that are reported together, and the floating-point operations of their matrix products."""

    name: str
    workloads: tuple[str, ...]
    flops: Callable[[Sizes], int] | None = None

    @property
    def is_rows(self) -> bool:
        return self.name == "rows"


FAMILIES = (
    Family("variance", ("variance",)),
    Family("inertia", ("inertia",)),
    Family("quant_gemm", ("quant_gemm",), lambda s: 2 * s["i"] * s["n"] * s["k"]),
    Family("mla", ("mla",), _latent),
    Family("mha", ("mha", "mha_decode"), _two_products),
    Family("performer", ("performer",), _features),
    Family("layers", ("lora",), _low_rank),
    Family("layers", ("mlp",), _two_layers),
    Family("layers", ("gated_mlp",), _gated),
    Family("gqa", ("gqa_incremental", "gqa_speculative", "gqa_chunked_prefill"), _two_products),
    Family("routing", ("moe_routing",), _routing),
    Family("rows", ("l2norm", "rmsnorm_quant", "layernorm", "softmax", "log_softmax", "cross_entropy")),
)
"""In the order that they are measured in; what is not among `workloads.WORKLOADS` is not."""

FAMILY: dict[str, Family] = {name: family for family in FAMILIES for name in family.workloads}

OTHERS = Family("others", tuple(name for name in WORKLOADS if name not in FAMILY))
"""Programs that belong to other benchmarks or to none: measured where they are asked for as `others`."""
FAMILY |= dict.fromkeys(OTHERS.workloads, OTHERS)


@dataclass(frozen=True)
class Cell(AnyCell):
    """A program at one of its papers' cases, or at `<rows>x<columns>`."""

    program: str
    label: str

    @property
    def name(self) -> str:
        return f"{self.program}_{self.label}"

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.program]

    @property
    def family(self) -> Family:
        return FAMILY[self.program]

    @cached_property
    def case(self) -> Case:
        cases = self.workload.cases
        if self.label in cases:
            return cases[self.label]
        rows, columns = (int(n) for n in self.label.split("x"))
        return replace(self.workload.paper_cases[0], name=self.label, sizes={"r": rows, "c": columns})

    @cached_property
    def bytes(self) -> int:
        workload, case = self.workload, self.case
        program = parse(workload.text(case), scalars=case.constants)
        dtypes = program_dtypes(program)
        moved = [(dtypes[name], workload.shape(name, case)) for name in workload.tensors]
        for output in program.outputs:
            shape = tuple(case.sizes[program.domains.get(axis, axis)] for axis in output.axes)
            moved.append((result_dtype(output.expr, dtypes), shape))
        return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in moved)

    @property
    def flops(self) -> int:
        return self.family.flops(self.case.sizes) if self.family.flops else 0

    @property
    def row_length(self) -> int | None:
        """Positions that one result of a row kernel is made from."""
        return self.case.sizes["c"] if self.family.is_rows else None

    @property
    def is_large(self) -> bool:
        return self.family.is_rows and (self.case.sizes["r"], self.case.sizes["c"]) in LARGE

    def entry(self) -> dict[str, Any]:
        return asdict(self)


def grid(only: str | None = None, *, every: bool = False) -> list[Cell]:
    """The cells, the covering ones or all; with `only`, of programs or families that start with one of its
    comma-separated words."""
    words = tuple(word.strip() for word in only.split(",")) if only else ("",)
    sizes = tuple(product(COUNTS, LENGTHS)) if every else COVERING
    cells: list[Cell] = []
    for family in FAMILIES:
        for name in family.workloads:
            if name in WORKLOADS and (name.startswith(words) or family.name.startswith(words)):
                labels = (
                    [f"{r}x{c}" for r, c in (*LARGE, *sizes)]
                    if family.is_rows
                    else [case.name for case in WORKLOADS[name].paper_cases]
                )
                cells += [Cell(name, label) for label in labels]
    if only and OTHERS.name.startswith(words):
        for name in OTHERS.workloads:
            cases = WORKLOADS[name].paper_cases or (WORKLOADS[name].cases["cpu"],)
            cells += [Cell(name, case.name) for case in cases]
    return cells
