"""Constants of the cost model, from kernels that a GPU timed, and what the model chooses for these; no GPU is needed.

python -m bench.calibrate rates [CALIBRATION.json]      rates of a device, and slowdowns
python -m bench.calibrate rates CALIBRATION.json --keep attention.json reductions.json      from runs of bundles
python -m bench.calibrate roles RESULT.json ...         constants of roles, from `eqfuse bench gluon --device cuda`
python -m bench.calibrate choices                       what is chosen now for the cells that were timed

Every kernel that was timed is one equation: what the model predicts of it, with other constants than it was recorded with, is
what it took. Least squares on the logarithms, by Levenberg and Marquardt; a constant that the data says little about
stays near what it is. What is printed is what the constants of `extract/devices.py` and `extract/residuals.py` would become, and
what that would do to ranks and choices: constants that order plans worse than the ones there are no gain, however close their times.

`choices` compares a choice whose kernels, schedule, blocks, warps, stages and shards a run has timed with the best variant of its
cell, and with the choice at the time of the run; one that was not timed is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench import attention_cells, gluon_cells, reductions_cells
from bench.ahead import compile_ahead
from bench.bundling import shown
from bench.cells import Cell
from bench.gluon_cells import AnyRolesCell
from bench.gluon_forms import blocks_of, kernel_of
from bench.measured import MEASURED, good, spearman
from bench.report import geometric_mean
from bench.work import RATES, Work, constants_of, predicted
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.extract.candidates import Candidate
from eqfuse.extract.residuals import H200_ROLES, SLOWDOWNS, RolesResiduals
from eqfuse.extract.warp_schedules import Price, Pricing
from eqfuse.loops.plan import Roles
from eqfuse.specialize_warps import other_roles, pricing

ROUNDS = 25
STEP = 0.02
SETTLED = 2e-3

Vector = npt.NDArray[np.float64]


def least_squares(misfit: Callable[[Vector], Vector], count: int) -> Vector:
    """The `count` changes at which the sum of the squared misfits is least, from 0 on."""
    logs, damping = np.zeros(count), 1.0
    here = misfit(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(misfit(logs + STEP * unit) - here) / STEP for unit in np.eye(count)], 1)
        square = slopes.T @ slopes
        change = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ here)
        after = misfit(logs + change)
        if better := bool(after @ after < here @ here):
            logs, here = logs + change, after
            if float(np.abs(change).max()) < SETTLED:
                break
        damping *= 0.3 if better else 4.0  # another term of a kernel may have become the largest
    return logs


def regrets(cells: Iterable[str], predicted: Iterable[float], seconds: Iterable[float]) -> dict[str, float]:
    """By cell: how much longer the variant with the least prediction took than the best one, as a share."""
    found: dict[str, list[tuple[float, float]]] = {}
    for cell, guess, took in zip(cells, predicted, seconds, strict=True):
        found.setdefault(cell, []).append((float(guess), took))
    return {cell: min(pairs)[1] / min(took for _, took in pairs) - 1 for cell, pairs in found.items()}


def _read(path: Path) -> dict[str, Any]:
    """What a run wrote. Raises EqfuseError where a file is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EqfuseError(
            f"{str(path)!r} cannot be read: {error}", hint="name files that a run wrote"
        ) from None
    if not isinstance(content, dict) or "rows" not in content:
        raise EqfuseError(f"{str(path)!r} has no rows", hint="name files that a run wrote")
    return content


def _table(title: str, notes: Mapping[str, str], **constants: Mapping[str, float]) -> Table:
    """The constants that were fitted, of which `notes` say something."""
    table = Table(title=title)
    table.add_column("constant")
    for heading in constants:
        table.add_column(heading, justify="right")
    table.add_column("")
    for name in constants["fitted"]:
        table.add_row(name, *(f"{of[name]:.4g}" for of in constants.values()), notes.get(name, ""))
    return table


# Rates of a device, and slowdowns ---------------------------------------------------------------------

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


HINT = "measure bundles of this version, then python -m bench.calibrate rates FILE --keep RUN.json ..."


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
    recorded = np.array([calibration.recorded[name] for name in FITTED])
    seconds = np.log([m.seconds for m in calibration.measured])

    def constants(logs: Vector) -> dict[str, float]:
        return dict(zip(FITTED, map(float, recorded * np.exp(logs)), strict=True))

    def misfit(logs: Vector) -> Vector:
        return np.concatenate([np.log(calibration.predict(constants(logs))) - seconds, logs / PRIOR])

    return constants(least_squares(misfit, len(FITTED)))


def quality(measured: Sequence[Measurement], seconds: Vector) -> Quality:
    """How good predictions are."""
    cells: dict[str, list[tuple[float, float]]] = {}
    for m, found in zip(measured, seconds, strict=True):
        cells.setdefault(m.cell, []).append((float(found), m.seconds))
    ranks = [spearman(*zip(*pairs, strict=True)) for pairs in cells.values() if len(pairs) > 2]
    actual = [m.seconds for m in measured]
    regret = regrets((m.cell for m in measured), seconds, actual).values()
    return Quality(
        float(np.exp(np.median(np.abs(np.log(seconds / np.array(actual)))))),
        spearman(list(seconds), actual),
        float(np.nanmedian(ranks)),
        float(np.mean(list(regret))),
        max(regret),
    )


def _rates(options: argparse.Namespace, console: Console) -> None:
    if options.keep:
        runs = [_read(path) for path in options.keep]
        options.file.write_text(json.dumps(kept(runs)), encoding="utf-8")
    calibration = Calibration.read(options.file)
    measured = calibration.measured
    constants = {
        "recorded": calibration.recorded,
        "fitted": fit(calibration),
        "now": constants_of(device_named(options.target)),
    }
    title = f"{len(measured)} variants of {len({m.cell for m in measured})} cells"
    console.print(_table(title, KEPT, **constants))
    for label, each in constants.items():
        found = quality(measured, calibration.predict(each))
        console.print(
            f"{label}: off by {found.off:.2f}x (median), rank correlation {found.overall:.3f} overall and "
            f"{found.within:.2f} within a cell (median), regret {found.regret:.1%} (mean), {found.worst:.0%} (most)"
        )


# Constants of roles -----------------------------------------------------------------------------------

DEVICE = "h200"
ROLES_PRIOR = 0.5
"""How far off a constant is thought to be, as a logarithm."""
NOISE = 0.04
FIXED = frozenset({"looked", "slots", "ahead"})
"""Constants that no form was timed for."""


@dataclass(frozen=True)
class TimedForm:
    """A form of a cell: its roles, none for Triton, what they do, and seconds."""

    cell: str
    operator: str
    pricing: Pricing
    roles: Roles | None
    seconds: float

    @cached_property
    def _price(self) -> Price:
        assert self.roles is not None
        shared = self.roles.columns and not self.roles.led
        return Price(self.pricing.facts, self.pricing.outlook, self.roles.blocks, columns=shared)

    def predicted(self, residuals: RolesResiduals) -> float:
        if self.roles is None:
            return self.pricing.seconds(None, residuals)
        return self._price.seconds(self.roles, residuals)


def timed_forms(paths: Sequence[Path]) -> list[TimedForm]:
    """All forms of the files' cells that were timed and agree with float64, and whose roles the compiler still makes."""
    rows = [row for path in paths for row in _read(path)["rows"]]
    cells = {cell.name: cell for cell in gluon_cells.grid()}
    found: list[TimedForm] = []
    kernels: dict[object, Any] = {}
    for row in rows:
        if row["cell"] in cells:
            found += _forms(cells[row["cell"]], row, kernels)
    return found


def _forms(cell: AnyRolesCell, row: Mapping[str, Any], kernels: dict[object, Any]) -> list[TimedForm]:
    kernel = kernels.setdefault(cell.kernel, None) or kernel_of(cell, DEVICE)
    kernels[cell.kernel] = kernel
    dtypes = {name: cell.workload.dtype(name, cell.case) for name in cell.workload.tensors}
    sizes = cell.case.sizes
    compiled = compiler.pipeline(kernel.derived, sizes, dtypes, device_named(DEVICE))
    if len(compiled.tile.kernels) > 1:  # their times are not apart
        return []
    known = {
        _key(made.chosen.plan.roles[0]): made for _, made in other_roles(kernel.derived, compiled, sizes)
    }
    price = pricing(kernel.derived, compiled, sizes)
    found = []
    for form in row.get("forms", ()):
        if "ms" not in form or not form.get("agrees", True):
            continue
        roles = None
        if form["kind"] == "roles":
            made = known.get(_key_of(form))
            if made is None:  # the compiler makes it no more
                continue
            (roles,) = made.chosen.plan.roles
        found.append(TimedForm(cell.name, cell.operator, price, roles, form["ms"] / 1e3))
    return found


def _key(roles: Roles | None) -> tuple[object, ...]:
    assert roles is not None
    kind = roles.columns, roles.led
    grid = roles.persistent, roles.ahead
    return roles.consumers, roles.slots, roles.delayed, *grid, *kind, blocks_of(roles)


def _key_of(form: Mapping[str, Any]) -> tuple[object, ...]:
    kind = (form.get(name, False) for name in ("persistent", "ahead", "columns", "led"))
    return form["consumers"], form["slots"], tuple(form["delayed"]), *kind, form["blocks"]


def numbers(residuals: RolesResiduals) -> dict[str, float]:
    """The constants by name, those of a tuple or mapping each by its own."""
    found: dict[str, float] = {}
    for item in fields(residuals):
        value = getattr(residuals, item.name)
        match value:
            case tuple():
                found |= {f"{item.name}.{n}": number for n, number in enumerate(value)}
            case Mapping():
                found |= {f"{item.name}.{key}": number for key, number in value.items()}
            case frozenset():  # names of kinds
                pass
            case _:
                found[item.name] = float(value)
    return {name: number for name, number in found.items() if name.partition(".")[0] not in FIXED}


def with_numbers(residuals: RolesResiduals, new: Mapping[str, float]) -> RolesResiduals:
    """The constants with others, by name."""
    changes: dict[str, Any] = {}
    for item in fields(residuals):
        value = getattr(residuals, item.name)
        if item.name in new:
            changes[item.name] = new[item.name]
        elif isinstance(value, tuple) and f"{item.name}.0" in new:
            changes[item.name] = tuple(new[f"{item.name}.{n}"] for n in range(len(value)))
        elif isinstance(value, Mapping) and any(f"{item.name}.{key}" in new for key in value):
            changes[item.name] = {key: new.get(f"{item.name}.{key}", number) for key, number in value.items()}
    return replace(residuals, **changes)


def errors(forms: Sequence[TimedForm], residuals: RolesResiduals) -> Vector:
    """Logarithms of predicted over measured."""
    return np.array([math.log(form.predicted(residuals) / form.seconds) for form in forms])


def fitted(forms: Sequence[TimedForm], start: RolesResiduals) -> RolesResiduals:
    """The fitted constants."""
    first = numbers(start)

    def made(logs: Vector) -> RolesResiduals:
        return with_numbers(start, dict(zip(first, np.array([*first.values()]) * np.exp(logs), strict=True)))

    def misfit(logs: Vector) -> Vector:
        return np.concatenate([errors(forms, made(logs)) / NOISE, logs / ROLES_PRIOR])

    return made(least_squares(misfit, len(first)))


def roles_regrets(forms: Sequence[TimedForm], residuals: RolesResiduals) -> dict[str, float]:
    """By cell: how much longer the form that is predicted to be fastest took than the best one, as a share."""
    predictions = (form.predicted(residuals) for form in forms)
    return regrets((form.cell for form in forms), predictions, (form.seconds for form in forms))


def _roles(options: argparse.Namespace, console: Console) -> None:
    forms = timed_forms(options.results)
    new = fitted(forms, H200_ROLES)
    console.print(_table(f"{len(forms)} forms", {}, recorded=numbers(H200_ROLES), fitted=numbers(new)))
    for what, residuals in (("as they are", H200_ROLES), ("fitted", new)):
        off, regret = errors(forms, residuals), roles_regrets(forms, residuals)
        worst = max(regret, key=lambda cell: regret[cell])
        console.print(
            f"{what}: root mean square {np.sqrt(np.mean(off**2)):.1%}; regret of {len(regret)} choices "
            f"{geometric_mean(1 + each for each in regret.values()) - 1:.1%}, worst {regret[worst]:.0%} ({worst})"
        )
        for operator in dict.fromkeys(form.operator for form in forms):
            mine = np.array([form.operator == operator for form in forms])
            console.print(
                f"    {operator:18} {mine.sum():3} forms, {np.sqrt(np.mean(off[mine] ** 2)):.1%}, mean {off[mine].mean():+.1%}"
            )


# Choices ----------------------------------------------------------------------------------------------

RUNS = ("attention_h200.json", "reductions_h200.json")

Variant = Mapping[str, Any]


def variants_of_runs() -> dict[str, Sequence[Variant]]:
    """The variants of every cell of the runs; the first is what was chosen then."""
    runs = (json.loads((MEASURED / name).read_text(encoding="utf-8")) for name in RUNS)
    return {row["cell"]: row["variants"] for run in runs for row in run["rows"]}


def time_of(variants: Sequence[Variant], chosen: Candidate) -> float | None:
    """Milliseconds of the variant that is this plan; None where there is none that agreed."""
    plan = chosen.plan
    same = (
        plan.schedule,
        plan.shards,
        len(chosen.nest.kernels),
        [shown(config) for config in plan.configs],
    )
    for variant in variants:
        if good(variant) and same == tuple(variant[k] for k in ("schedule", "shards", "kernels", "configs")):
            return float(variant["ms"])
    return None


def _cells(known: Mapping[str, Any]) -> Iterator[Cell]:
    cells: tuple[Cell, ...] = (*attention_cells.grid(), *reductions_cells.grid(every=True))
    return (cell for cell in cells if cell.name in known)


def _choices(options: argparse.Namespace, console: Console) -> None:
    known = variants_of_runs()
    longer: list[float] = []
    changes: list[float] = []
    for cell in _cells(known):
        variants = known[cell.name]
        chosen = compile_ahead(cell.workload, cell.case, options.target).compiled.chosen
        ms, times = time_of(variants, chosen), [float(v["ms"]) for v in variants if good(v)]
        if ms is None:
            console.print(f"{cell.name}: not measured: {chosen.plan}", markup=False)
            continue
        longer.append(ms / min(times) - 1)
        if good(variants[0]):
            changes.append(ms / float(variants[0]["ms"]))
        if changes and abs(changes[-1] - 1) > 0.02:
            console.print(f"{cell.name}: {changes[-1]:.3f} of the time of the choice then", markup=False)
    console.print(
        f"{len(longer)} of {len(known)} choices were measured: regret {statistics.median(longer):.1%} (median), "
        f"{statistics.mean(longer):.2%} (mean), {max(longer):.0%} (most); at most {max(changes):.3f} times as long as "
        "the choice then"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    rates = commands.add_parser("rates", help="fit the rates of a device, and slowdowns")
    rates.add_argument("file", type=Path, nargs="?", default=MEASURED / "calibration_h200.json")
    rates.add_argument("--keep", type=Path, nargs="+", default=(), help="make the file of these runs first")
    rates.add_argument("--target", default="h200", help="the device that they were measured on")
    rates.set_defaults(run=_rates)
    roles = commands.add_parser(
        "roles", help="fit the constants of roles; later files replace cells of earlier ones"
    )
    roles.add_argument("results", nargs="+", type=Path)
    roles.set_defaults(run=_roles)
    choices = commands.add_parser("choices", help="compare what is chosen now with what was timed")
    choices.add_argument("--target", default="h200", help="the device that plans are chosen for")
    choices.set_defaults(run=_choices)
    options, console = parser.parse_args(), Console(width=140)
    try:
        options.run(options, console)
    except EqfuseError as error:
        console.print(error, style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
