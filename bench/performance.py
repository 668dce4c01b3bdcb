"""`python -m bench.performance`: docs/performance.md and README's chart, from what is kept in `bench/results`.

The GPU's table has a line for every family of cells of `attention.json` and `reductions.json`, the chart a point for every program of the
same files; the CPU's is of `gallery.json`. No number of the page comes from anywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import chart
from bench.cpu_report import ratio
from bench.report import geometric_mean

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
LONG_ROW = 8192
"""Elements of a row from which on it is walked, and not held."""
FAMILIES: Mapping[str, str] = {
    "variance": "variance",
    "inertia": "inertia",
    "routing": "routing to experts",
    "performer": "Performer",
    "mha": "multi-head attention of RedFuser's table",
    "gqa": "Mirage's grouped-query attention",
    "mla": "latent attention (decode)",
    "quant_gemm": "quantise + matrix product",
    "layers": "LoRA, MLP",
}
"""Families of `reductions.json`, beside those of rows, as the page names them."""

TEXT = """\
# Performance

Times are measured beside peers in one run, with results compared with float64 in that run. A number above 1 says how many times
faster eqfuse was. The tables and README's chart are what `python -m bench.performance` makes of the files in `bench/results`.

## On a GPU

One {where}, torch {torch}, Triton {triton}, without tuning: medians of CUDA-graph replays (`attention_h200.json`, `reductions_h200.json`), geometric means and the
least. A cell counts where a peer of the kind agreed with float64: compilers are torch.compile and FlexAttention, libraries cuDNN, FlashAttention
and torch's own kernels. [attention.md](attention.md) and [reductions.md](reductions.md) say how it was measured and what changed it; prefill runs in
[roles](roles.md) since, which this run had not.

| | over the best compiler | over the best library |
|---|---|---|
{gpu}

Programs whose mean is below 1: {behind}.

## On a CPU

The [gallery](gallery.md) has {count} programs beside torch and `torch.compile`, on {cpu} ({cores} cores), {days}, torch
{cpu_torch} (`gallery.json`).

| | geometric mean | median | below 1 |
|---|---|---|---|
{cpu_rows}

`eqfuse bench cpu` measures the papers' programs and torch's own operators, `training`, `models`, `ragged` and `gluon` what their names
say ([commands.md](commands.md)); their runs are not kept here.

## What a call costs

[calls.md](calls.md) says what happens at a first call, at a new length, and in a loop; [cache.md](cache.md) what later processes are
spared; [cost_model.md](cost_model.md) how plans are priced.
"""


def page() -> str:
    run, gallery = _content("attention_h200")["environment"], _content("gallery")
    days = sorted({row["measured"] for row in gallery["rows"]})
    below = [
        f"{name.replace('_', ' ')} {_share(mean)} of the best {kind.removeprefix('over_')}"
        for name, means in chart.means().items()
        for kind, mean in means.items()
        if round(mean, 2) < 1
    ]
    return TEXT.format(
        where=chart.where(),
        torch=run["torch"].partition("+")[0],
        triton=run["triton"],
        gpu="\n".join(_gpu()),
        behind=", ".join(below),
        count=len(gallery["rows"]),
        cpu=gallery["environment"]["cpu"],
        cores=gallery["environment"]["cores"],
        days=" and ".join(days),
        cpu_torch=gallery["environment"]["torch"],
        cpu_rows="\n".join(_cpu(gallery["rows"])),
    )


def _gpu() -> Iterator[str]:
    attention, others = _content("attention")["rows"], _content("reductions")["rows"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in attention:
        kind = "prefill" if row["operator"].endswith("prefill") else "decode"
        groups.setdefault(f"attention, {kind}", []).append(row)
    for row in others:
        if row["family"] == "rows":
            length = "over" if row["row_length"] > LONG_ROW else "up to"
            name = f"rows {length} {LONG_ROW}: softmax, norms, cross-entropy"
        else:
            name = FAMILIES[row["family"]]
        groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        yield f"| {name} | {_over(rows, 'over_compiler')} | {_over(rows, 'over_library')} |"


def _over(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    found = {row["cell"]: row[kind] for row in rows if row[kind] is not None}
    if not found:
        return ""
    least = min(found, key=lambda cell: found[cell])
    mean = geometric_mean(list(found.values()))
    return f"{_share(mean)} ({len(found)} cells), {_share(found[least])} for {least}"


def _cpu(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for other, name in (("eager", "torch"), ("torch.compile", "torch.compile")):
        found = {row["program"]: over for row in rows if (over := ratio(row, other)) is not None}
        below = ", ".join(f"{name} {_share(over)}" for name, over in found.items() if round(over, 2) < 1)
        ratios = list(found.values())
        yield f"| over {name} | {_share(geometric_mean(ratios))} | {_share(median(ratios))} | {below} |"


def _share(number: float) -> str:
    return f"{number:.2f}"


def _content(table: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / f"bench/results/{table}.json").read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    chart.draw(chart.CHART)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {chart.CHART} and {PAGE}")
