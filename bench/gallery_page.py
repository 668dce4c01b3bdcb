"""docs/gallery.md: every program with its derivation, and what `python -m bench gallery` measured.

The derivation is that of a plan that walks once and carries states, whatever plan is the fastest at these sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import eqfuse as eq
from bench.cpu_report import ratio
from bench.gallery import FOLDER, GALLERY, Entry
from bench.report import geometric_mean
from eqfuse import compiler
from eqfuse.kernel import Kernel
from eqfuse.loops.plan import Plan
from eqfuse.proof.printer import plain

PAGE = FOLDER.parent / "gallery.md"
MEASURED = Path("bench/results/gallery.json")

INTRODUCTION = """\
# Gallery

{count} programs from papers, five to ten lines each. Every one is a file of `docs/gallery`, with the sizes that it was
measured at; `eqfuse explain docs/gallery/{first}.eqf` and the other commands take it as it is (a scalar that is known
when compiling is given with `--constant`). The tests compile and verify each one, and compare its results with torch in float64.

Nothing in the compiler knows these programs. What stands under *Derivation* was found by the rules that `eqfuse rules` lists,
and checked without the e-graph that found it: how the states over one part of an axis become those over a longer one. It is
shown for a plan that walks the axis once (`rolling`), which is not always the fastest: the column *plan* says which one ran.

"""

MEASUREMENT = """\
## Measured

Medians of interleaved runs on fresh float32 inputs, on {cpu} ({cores} cores), {date}, torch {torch}, by `python -m bench gallery`. A
number above 1 says how many times faster eqfuse is; differences under a tenth mean little. Torch runs what a person would write: `scaled_dot_product_attention`,
`rms_norm`, `cdist`, `topk`, `logsumexp`. Errors are relative, against float64. The geometric mean is {eager:.2f} over eager and
{compiled:.2f} over `torch.compile`, the median {eager_median:.2f} and {compiled_median:.2f}.

"""


REMARKS: Mapping[str, str] = {
    "rope": "Keys are turned again for every block of queries, which torch does once; that costs more than it saves where "
    "`scaled_dot_product_attention` has a library's kernel.",
    "differential": "As it is written, no factor leaves the sum over the difference; the rule `distribute` takes it apart first. "
    "Torch calls its library's kernel twice.",
    "top_p": "The list of a row is searched once for each of the axes k and l, and once more for the tokens: to the compiler "
    "these are three reductions. torch's `topk` runs once.",
    "nbody": "The code of torch.compile is slower than eager here, which the geometric mean shows more than the median.",
    "knn": "Written with distances, `sum[d](sq(x[q,d] - y[n,d]))`, it fuses too, but is no matrix product.",
}
"""What the table does not say of a program."""


@cache
def kernel(name: str) -> Kernel:
    """That walks with states."""
    entry = GALLERY[name]
    case = entry.cases["cpu"]
    return eq.compile(entry.text(case), scalars=case.constants, target="cpu", prefer="rolling", native="off")


@cache
def derivation(name: str) -> eq.Derivation:
    """Of the plan with the fewest kernels, then the most groups of reductions that walk: one that no cost decides."""
    found = kernel(name)

    def rank(plan: Plan) -> tuple[int, int, str]:
        schedules = [group.schedule for each in plan.kernels for group in each.groups]
        return len(plan.kernels), -schedules.count("rolling"), str(schedules)

    plan = min((plan for plan in found.plans() if plan.schedule == "rolling"), key=rank)
    return compiler.derivation(found.derived, plan, dict(GALLERY[name].cases["cpu"].constants))


def text() -> str:
    """The page as it should be."""
    parts = [INTRODUCTION.format(count=len(GALLERY), first=next(iter(GALLERY)))]
    measured = json.loads((FOLDER.parents[1] / MEASURED).read_text(encoding="utf-8"))
    parts.append(table(measured))
    parts += ["\n".join(section(entry)) for entry in GALLERY.values()]
    return "\n".join(parts)


def table(measured: Mapping[str, Any]) -> str:
    """The rows of a run, and where they were measured."""
    rows, where = {row["program"]: row for row in measured["rows"]}, measured["environment"]
    eager, compiled = (
        [found for row in rows.values() if (found := ratio(row, other)) is not None]
        for other in ("eager", "torch.compile")
    )
    head = MEASUREMENT.format(
        cpu=where["cpu"],
        cores=where["cores"],
        torch=where["torch"],
        date=" and ".join(sorted({row["measured"] for row in rows.values()})),
        eager=geometric_mean(eager),
        eager_median=median(eager),
        compiled=geometric_mean(compiled),
        compiled_median=median(compiled),
    )
    lines = [
        "| program | plan | over torch | over torch.compile | error | torch's |",
        "|---|---|---|---|---|---|",
    ]
    for entry in GALLERY.values():
        row = rows[entry.name]
        errors = row["errors"]
        cells = (
            f"[{entry.title}](#{anchor(entry)})",
            row["schedule"],
            *(_times(row, other) for other in ("eager", "torch.compile")),
            f"{errors['fused']:.1e}",
            f"{errors['eager']:.1e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n"


def _times(row: Mapping[str, Any], other: str) -> str:
    found = ratio(row, other)
    return str(row["torch_compile_skipped"]).partition(": ")[2] if found is None else f"{found:.2f}"


def anchor(entry: Entry) -> str:
    """Of a heading, as GitHub and mkdocs make it."""
    kept = "".join(c for c in entry.title.lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def section(entry: Entry) -> Iterator[str]:
    """A program, what it is, and its derivation."""
    case = entry.cases["cpu"]
    numbers = {**case.constants, **case.scalars}
    sizes = ", ".join(f"{name} = {value}" for name, value in {**case.sizes, **numbers}.items())
    yield f"## {entry.title}"
    yield f"\n*{entry.paper}*\n"
    yield f"{entry.about}\n"
    yield f"```eqfuse\n{entry.written}\n```\n"
    yield f"Measured at {sizes}.\n"
    if entry.name in REMARKS:
        yield f"{REMARKS[entry.name]}\n"
    yield "<details markdown><summary>Derivation</summary>\n"
    yield f"```text\n{plain(derivation(entry.name).blocks())}\n```\n"
    for reason in kernel(entry.name).why_not():
        yield f"```text\n{reason}\n```\n"
    yield "</details>\n"
