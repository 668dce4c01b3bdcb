"""One runner for all benchmarks: `eqfuse bench NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from rich.console import Console

from bench.gallery import GALLERY
from bench.gluon_cells import PROGRAMS as IN_ROLES
from bench.operators import OPERATORS
from bench.report import Options, Report
from bench.workloads import WORKLOADS, Workload, select
from eqfuse.errors import EqfuseError, did_you_mean

REPORTS: Mapping[str, str] = {
    "workloads": "every program: error of each schedule, certificate, Triton under its interpreter",
    "compile": "every program: e-nodes, rounds, milliseconds of each stage of compilation, memory",
    "start": "new processes: import, first compile with and without what an earlier one kept, first call",
    "cache": "ten processes that share a cache, half of them killed at random; hostile edits of a cache: wrong results, crashes",
    "emit": "every program compiled for sm_90 and gfx942: registers, spills, shared memory, instructions",
    "explain": "every program's derivation: steps, milliseconds, JSON size, checked, with each rule removed",
    "mutants": "wrong transformations of terms, merges, loops and tiles: what rejects each, at which trial",
    "lemmas": "shipped rules as lemmas for an SMT solver: which it proves for all sizes, which not and why",
    "audit": "examples that an audit of proofs found: refused with what shows it, or accepted",
    "pairs": "random programs and edits of them: what equivalence accepts and refuses wrongly",
    "fuzz": "random programs: fused, fallen back, refused, mismatches of any schedule against float64",
    "grad": "gradients of random programs against autograd of the float64 reference",
    "backward": "gradients of every program: kernels, schedule, what is not fused and why",
    "operator": "every program as an operator of torch: opcheck, graphs for 20 lengths, vmap against a loop",
    "models": "decoders with random weights: prefill and tokens a second of eager, torch.compile and the back end",
    "training": "forward and backward under autograd beside torch: attention, norms, losses; times, memory, errors",
    "attention": "attention beside torch's libraries and compilers on a GPU; ranks and regrets of the cost model",
    "reductions": "row kernels and cascades beside torch and torch.compile on a GPU: ratios, bandwidth, launches",
    "gluon": "attention in roles on a Hopper GPU beside Triton and torch's libraries; without one, registers and spills",
    "verify": "every program: milliseconds of verification, its part of compiling, trials, bound reached",
    "errors": "every program: errors of fused and unfused against float64, over kinds of inputs, special values, magnitudes",
    "sweep": "random reductions over any axes of any layout beside torch.compile: times, errors, what predictions are worth",
    "opinfo": "torch's own samples of its operators through from_torch: right, refused and why, wrong, raised",
    "kernelbench": "the problems of a checkout of KernelBench through from_torch and torch.compile: right, refused and why, wrong, raised",
    "scales": "random programs of scaled values at 12 magnitudes: what is accepted, and wrong where the program in float32 is right",
    "families": "five families of models through torch.compile: regions found, fused, refused; errors, graphs, breaks",
    "algebra": "orders of sums and products: chosen, as written and by hand in torch; costs, times, errors; random chains",
    "link": "the link between ranks: latency and bandwidth, kept for eq.shard's predictions",
    "shard": "programs over ranks by every strategy: predicted and measured times, errors, peers",
    "chunks": "attention by running sums in bf16, beside flash-linear-attention: times, errors, proofs",
    "scans": "prefixes and recurrences beside torch, at a length and at twice that: plans, proofs, times, errors",
    "ops": "the programs of eqfuse.ops beside torch and torch.compile, forward and backward: times, errors",
    "patch": "models of transformers in training, unpatched, by eq.patch, torch.compile and Liger: errors, losses, step times, memory",
    "beside": "everyday programs beside torch, torch.compile, FlexAttention, JAX and KeOps: first calls, times, errors",
    "install": "a wheel in fresh environments without constraints, by Python, torch and Triton: what works, what lacks",
    "keys": "reductions by key beside torch, at a number of positions and at twice that, and skewed: plans, times, errors",
    "lengths": "64 lengths of one kernel: regions, binaries, milliseconds of a new length, regret",
    "ragged": "packed documents and paged decode on a GPU beside FlexAttention and torch's varlen attention",
    "gallery": "the programs of docs/gallery beside torch and torch.compile; writes the table of docs/gallery.md",
    "cpu": "fused against torch eager and torch.compile on the CPU: times, errors, peak memory",
}
"""Names of benchmarks and what each one shows; `<name>_report.py` holds it."""

TABLES: Mapping[str, Mapping[str, Workload]] = {
    "cpu": {**WORKLOADS, **OPERATORS},
    "gallery": GALLERY,
    "gluon": IN_ROLES,
}
"""The programs of benchmarks that have others than those of the papers."""

OWN = frozenset(
    {
        "install",
        "grad",
        "keys",
        "shard",
        "ops",
        "patch",
        "scans",
        "chunks",
        "algebra",
        "opinfo",
        "kernelbench",
        "sweep",
        "lengths",
        "ragged",
        "models",
        "training",
        "families",
    }
)
"""Benchmarks with programs of their own, which look for names themselves."""

RESULTS = Path("bench/results")


def run(name: str, options: Options, *, output: Path | None = None, console: Console | None = None) -> int:
    """Run one benchmark, print its table, write JSON; 0 where nothing failed, else 1.

    Raises EqfuseError for an unknown benchmark or workload, and where a package is missing.
    """
    if name not in REPORTS:
        hint = did_you_mean(name, REPORTS) or "benchmarks: " + " ".join(REPORTS)
        raise EqfuseError(f"unknown benchmark {name!r}", hint=hint)
    table = TABLES.get(name, WORKLOADS)
    if name not in OWN and not select(options.only, table):
        names = " ".join(workload.name for workload in select(None, table))
        raise EqfuseError(f"no workload starts with {options.only!r}", hint=f"workloads: {names}")
    try:
        module = import_module(f"bench.{name}_report")
        report = Report(module.TITLE, module.COLUMNS, path=output or RESULTS / f"{name}.json")
        module.run(options, report)
    except ModuleNotFoundError as error:
        hint = "pip install -c constraints.txt -e '.[bench,models]' brings what the benchmarks need"
        raise EqfuseError(f"bench {name} needs {error.name}, which is not installed", hint=hint) from None
    report.write()
    shown = console or Console()
    report.print(shown)
    shown.print(f"written to {report.path}", markup=False)
    return 1 if report.failures else 0
