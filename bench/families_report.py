"""`python -m bench families`: five families of models through `torch.compile(model, backend="eqfuse")`.

The models are small, of random weights, in float64, made by transformers. Every region that compiles is taken, whatever it is
predicted to gain, so that the table shows what can be; the reasons of those that are refused stand below it. The error is
the greatest over hidden states or logits, relative to the greatest of them, at `LENGTHS`, which one graph has to serve.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters

from bench.families import FAMILIES, Family
from bench.report import Column, Options, Report, chosen_names
from eqfuse.torch import outcome
from eqfuse.torch.backend import eqfuse as backend

TITLE = "Families of models through the back end, every region that compiles taken"
LENGTHS = (9, 12, 17)
ROUNDING = 1e-6
"""An error above it fails. What float64 leaves is below 1e-12; embeddings of positions are made in float32."""

COLUMNS = (
    Column("family", lambda row: str(row["family"])),
    Column("regions", lambda row: str(row["regions"])),
    Column("fused", lambda row: str(row["fused"])),
    Column("refused", lambda row: str(row["refused"])),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("graphs", lambda row: str(row["graphs"])),
    Column("breaks", lambda row: str(row["breaks"])),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
)

TAKEN: dict[str, Any] = {"rest": "aot_eager", "take": "always", "native": "off"}


def run(options: Options, report: Report) -> None:
    names = chosen_names(options.only, list(FAMILIES))
    import transformers  # noqa: F401  where it is missing, the command says so

    for name in names:
        try:
            row = covered(FAMILIES[name])
        except Exception as error:  # noqa: BLE001  one family that breaks is a row of the report
            report.failures.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            continue
        report.add({"family": name, **row})
        for why, count in row["why"].items():
            report.summary.append(f"{name}: {count} x {why}")
        if row["error"] > ROUNDING or row["graphs"] != 1 or row["breaks"]:
            report.failures.append(
                f"{name}: error {row['error']:.1e}, {row['graphs']} graphs, {row['breaks']} breaks"
            )


def covered(family: Family) -> Mapping[str, Any]:
    """What becomes of one family."""
    model = family.made()
    torch._dynamo.reset()
    counters.clear()
    outcome.report(measure=False, reset=True)
    call: Any = torch.compile(model, backend=backend, dynamic=True, options=TAKEN)
    start, error = time.process_time(), 0.0
    for length in LENGTHS:
        ids = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            found, expected = call(input_ids=ids)[0], model(input_ids=ids)[0]
        error = max(error, float((found - expected).abs().max() / expected.abs().max()))
    seconds = time.process_time() - start
    regions = outcome.report(measure=False, reset=True)
    left = Counter(f"{entry.name}: {entry.why}" for entry in regions.regions if not entry.taken)
    left.update(regions.left)
    return {
        "regions": len(regions.regions),
        "fused": len(regions.taken),
        "refused": len(regions.regions) - len(regions.taken),
        "error": error,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": seconds,
        "why": dict(left),
        "taken": dict(Counter(entry.name for entry in regions.taken)),
    }
