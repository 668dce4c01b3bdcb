"""Device constants of the cost model, from kernels that were measured.

python -m bench.calibrate [bench/results/calibration_h200.json]
python -m bench.calibrate CALIBRATION.json --keep attention.json reductions.json      from runs of bundles

Every variant that was measured and has its `work` (`bench.bundling` writes it) is one equation: what the cost model
makes of the work, with other constants than it was recorded with, is what was measured. Least squares on the logarithms, by
Levenberg and Marquardt; a constant that the data says nothing about stays. What is printed is what the constants of
`extract/devices.py` and `extract/residuals.py` would become, and what that would do to ranks and choices: constants
that order plans worse than the ones there are no gain, however close their times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench.measured import MEASURED, good, spearman
from bench.work import RATES, Work, constants_of, predicted
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.extract.residuals import SLOWDOWNS

FITTED = (*(rate for rate in RATES if rate != "matrix_float"), "step", "launch", *SLOWDOWNS)
"""Constants that are fitted. No measured kernel multiplies float32 matrices."""

PRIOR = 0.3
"""How far off the recorded constants, which are of data sheets and of a copy and a product, are thought to be, as
a logarithm: what the data says nothing about stays."""

KEPT: Mapping[str, str] = dict.fromkeys(
    ("bandwidth", "cache_bandwidth", "step", "launch"),
    "as recorded: choices would be worse",
)
"""Constants that are not what the fit gives, and why. With the four fitted ones 9 of 330 choices were others: mla_L4
took 1.57 times as long and two inertia cells 1.15, against gains of 1.10 to 1.27 on four row kernels."""

ROUNDS = 20
STEP = 0.02
SETTLED = 2e-3

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """A variant of a cell: the work of its kernels, and seconds."""

    cell: str
    works: tuple[Work, ...]
    seconds: float


@dataclass(frozen=True)
class Quality:
    """Of predictions: the median factor they are off by, rank correlation over everything and within a cell (the
    median), and how much longer than the best variant the one with the least prediction took (mean and most)."""

    off: float
    overall: float
    within: float
    regret: float
    worst: float


@dataclass(frozen=True)
class Calibration:
    """What a calibration file has: the constants that work was recorded with, and the variants that ran, agreed
    and have their work."""

    recorded: Mapping[str, float]
    measured: Sequence[Measurement]

    @staticmethod
    def read(path: Path) -> Calibration:
        """Raises EqfuseError where a file is something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return Calibration(content["constants"], list(_of(content)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EqfuseError(f"{str(path)!r} is no calibration: {error}", hint=HINT) from None

    def predict(self, constants: Mapping[str, float]) -> Vector:
        """The seconds of each variant with these constants."""
        times = {name: constants[name] / self.recorded[name] for name in FITTED}
        launch = constants["launch"]
        return np.array([sum(predicted(work, times, launch) for work in m.works) for m in self.measured])


HINT = "measure bundles of this version, then python -m bench.calibrate FILE --keep RUN.json ..."


def _of(content: Mapping[str, Any]) -> Iterator[Measurement]:
    for row in content["rows"]:
        for variant in row["variants"]:
            if good(variant) and "work" in variant:
                yield Measurement(row["cell"], tuple(variant["work"]), 1e-3 * variant["ms"])


def kept(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A calibration file of what bundles measured that were made with the same constants."""
    constants = [run["bundle"].get("constants") for run in runs]
    if None in constants or any(each != constants[0] for each in constants):
        raise EqfuseError("the runs do not have the same constants", hint=HINT)
    rows = [
        {"cell": row["cell"], "variants": [{k: v[k] for k in KEYS if k in v} for v in row["variants"]]}
        for run in runs
        for row in run["rows"]
    ]
    return {"environment": runs[0]["environment"], "constants": constants[0], "rows": rows}


KEYS = ("ms", "agrees", "work")
"""What a calibration file has of a variant."""


def fit(calibration: Calibration) -> dict[str, float]:
    """The fitted constants."""
    recorded = np.log([calibration.recorded[name] for name in FITTED])
    seconds = np.log([m.seconds for m in calibration.measured])

    def constants(values: Vector) -> dict[str, float]:
        return {name: float(value) for name, value in zip(FITTED, np.exp(recorded + values), strict=True)}

    def residuals(values: Vector) -> Vector:
        return np.concatenate([np.log(calibration.predict(constants(values))) - seconds, values / PRIOR])

    logs, damping = np.zeros(len(FITTED)), 1.0
    here = residuals(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(residuals(logs + STEP * unit) - here) / STEP for unit in np.eye(len(FITTED))], 1)
        square = slopes.T @ slopes
        change = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ here)
        after = residuals(logs + change)
        if better := bool(after @ after < here @ here):
            logs, here = logs + change, after
            if float(np.abs(change).max()) < SETTLED:
                break
        damping *= 0.3 if better else 4.0  # another term of a kernel may have become the largest
    return constants(logs)


def quality(measured: Sequence[Measurement], seconds: Vector) -> Quality:
    """How good predictions are."""
    cells: dict[str, list[tuple[float, float]]] = {}
    for m, found in zip(measured, seconds, strict=True):
        cells.setdefault(m.cell, []).append((float(found), m.seconds))
    ranks = [spearman(*zip(*pairs, strict=True)) for pairs in cells.values() if len(pairs) > 2]
    regrets = [min(pairs)[1] / min(s for _, s in pairs) - 1 for pairs in cells.values()]
    actual = [m.seconds for m in measured]
    return Quality(
        float(np.exp(np.median(np.abs(np.log(seconds / np.array(actual)))))),
        spearman(list(seconds), actual),
        float(np.nanmedian(ranks)),
        float(np.mean(regrets)),
        max(regrets),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=MEASURED / "calibration_h200.json")
    parser.add_argument("--keep", type=Path, nargs="+", default=(), help="make the file of these runs first")
    parser.add_argument("--target", default="h200", help="the device that they were measured on")
    options = parser.parse_args()
    console = Console()
    try:
        if options.keep:
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in options.keep]
            options.file.write_text(json.dumps(kept(runs)), encoding="utf-8")
        calibration = Calibration.read(options.file)
    except EqfuseError as error:
        console.print(error, style="red", markup=False)
        return 1
    now, fitted = constants_of(device_named(options.target)), fit(calibration)
    measured = calibration.measured
    table = Table(title=f"{len(measured)} variants of {len({m.cell for m in measured})} cells")
    for heading in ("constant", "recorded", "fitted", "now", ""):
        table.add_column(heading, justify="right" if heading not in ("constant", "") else "left")
    for name in FITTED:
        values = (f"{of[name]:.3g}" for of in (calibration.recorded, fitted, now))
        table.add_row(name, *values, KEPT.get(name, ""))
    console.print(table)
    for label, constants in (("recorded", calibration.recorded), ("fitted", fitted), ("now", now)):
        found = quality(measured, calibration.predict(constants))
        console.print(
            f"{label}: off by {found.off:.2f}x (median), rank correlation {found.overall:.3f} overall and "
            f"{found.within:.2f} within a cell (median), regret {found.regret:.1%} (mean), {found.worst:.0%} (most)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
