"""Constants of roles (`RolesResiduals`), from kernels that `eqfuse bench gluon --device cuda` timed.

python -m bench.gluon_fit RESULT.json ...      later files replace cells of earlier ones

Every form that was timed is one equation: what the model makes of its roles, at the cell's sizes, is what it took. Least squares
on the logarithms, by Levenberg and Marquardt; a constant that the data says little about stays near what it is. Printed are the
constants, errors by operator, and regrets: how much longer what the model chooses took than the best form that was timed, with
the constants as they are and as they would be.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.gluon_cells import AnyRolesCell, grid
from bench.gluon_forms import blocks_of, kernel_of
from bench.report import geometric_mean
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.extract.residuals import H200_ROLES, RolesResiduals
from eqfuse.extract.warp_schedules import Price, Pricing
from eqfuse.loops.plan import Roles
from eqfuse.specialize_warps import other_roles, pricing

DEVICE = "h200"
PRIOR = 0.5
"""How far off a constant is thought to be, as a logarithm."""
NOISE = 0.04
ROUNDS, STEP = 25, 0.02
FIXED = frozenset({"looked", "slots", "ahead"})
"""Constants that no form was timed for."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
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


def timed(paths: Sequence[Path]) -> list[Timed]:
    """All forms of the files' cells that were timed and agree with float64, and whose roles the compiler still makes."""
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    cells = {cell.name: cell for cell in grid()}
    found: list[Timed] = []
    kernels: dict[object, Any] = {}
    for row in rows:
        if row["cell"] in cells:
            found += _forms(cells[row["cell"]], row, kernels)
    return found


def _forms(cell: AnyRolesCell, row: Mapping[str, Any], kernels: dict[object, Any]) -> list[Timed]:
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
        found.append(Timed(cell.name, cell.operator, price, roles, form["ms"] / 1e3))
    return found


def _key(roles: Roles | None) -> tuple[object, ...]:
    assert roles is not None
    kind = roles.columns, roles.led
    grid = roles.persistent, roles.ahead
    return roles.consumers, roles.slots, roles.delayed, *grid, *kind, blocks_of(roles)


def _key_of(form: Mapping[str, Any]) -> tuple[object, ...]:
    kind = (form.get(name, False) for name in ("persistent", "ahead", "columns", "led"))
    return form["consumers"], form["slots"], tuple(form["delayed"]), *kind, form["blocks"]


# Fitting ------------------------------------------------------------------------------------------------


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


def errors(forms: Sequence[Timed], residuals: RolesResiduals) -> Vector:
    """Logarithms of predicted over measured."""
    return np.array([math.log(form.predicted(residuals) / form.seconds) for form in forms])


def fitted(forms: Sequence[Timed], start: RolesResiduals) -> RolesResiduals:
    names = list(numbers(start))
    first = np.log([numbers(start)[name] for name in names])

    def made(vector: Vector) -> RolesResiduals:
        return with_numbers(start, dict(zip(names, np.exp(vector), strict=True)))

    def misfit(vector: Vector) -> Vector:
        return np.concatenate([errors(forms, made(vector)) / NOISE, (vector - first) / PRIOR])

    here, damping = first, 1.0
    now = misfit(here)
    for _ in range(ROUNDS):
        slopes = np.stack([(misfit(here + STEP * one) - now) / STEP for one in np.eye(len(names))], axis=1)
        normal = slopes.T @ slopes
        there = here - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ now)
        then = misfit(there)
        if then @ then < now @ now:
            here, now, damping = there, then, damping / 3
        else:
            damping *= 4
    return made(here)


def regrets(forms: Sequence[Timed], residuals: RolesResiduals) -> dict[str, float]:
    """By cell: what the form that is predicted to be fastest took, over the best one."""
    found: dict[str, float] = {}
    for cell in dict.fromkeys(form.cell for form in forms):
        mine = [form for form in forms if form.cell == cell]
        chosen = min(mine, key=lambda form: form.predicted(residuals))
        found[cell] = chosen.seconds / min(form.seconds for form in mine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    forms = timed(parser.parse_args().results)
    console, new = Console(width=140), fitted(forms, H200_ROLES)
    for name, number in numbers(new).items():
        console.print(f"{name:18} {numbers(H200_ROLES)[name]:.4g} -> {number:.4g}")
    for what, residuals in (("as they are", H200_ROLES), ("fitted", new)):
        off, regret = errors(forms, residuals), regrets(forms, residuals)
        worst = max(regret, key=lambda cell: regret[cell])
        console.print(
            f"{what}: {len(forms)} forms, root mean square {np.sqrt(np.mean(off**2)):.1%}; regret of {len(regret)} choices "
            f"{geometric_mean(regret.values()) - 1:.1%}, worst {regret[worst] - 1:.0%} ({worst})"
        )
        for operator in dict.fromkeys(form.operator for form in forms):
            mine = np.array([form.operator == operator for form in forms])
            console.print(
                f"    {operator:18} {mine.sum():3} forms, {np.sqrt(np.mean(off[mine] ** 2)):.1%}, mean {off[mine].mean():+.1%}"
            )


if __name__ == "__main__":
    main()
