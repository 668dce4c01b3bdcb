"""Kernels of several variants and what is predicted for them, for a machine that has torch and triton alone.

A cell has several variants: the choice of the cost model first, the cheapest plan of every other
schedule, and plans one step away from the choice: a block, the warps, the stages or the shards
doubled or halved.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.cells import Cell
from bench.work import constants_of, work_of
from eqfuse import compiler
from eqfuse.certification import Checks, verify
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.environment import installed
from eqfuse.errors import EqfuseError
from eqfuse.extract.candidates import Candidate, configured, shape_of, with_outputs
from eqfuse.extract.devices import Device
from eqfuse.extract.neighbours import neighbours, of_other_schedules
from eqfuse.extract.resources import bytes_read_again
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.walk import expressions
from eqfuse.lowered import lower_nest
from eqfuse.terms.nodes import Load, free_axes, walk
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Emitted:
    """A variant: its module's text, the function in it, and its entry in the manifest."""

    source: str
    entry: dict[str, Any]


ProgramKey = tuple[str, tuple[tuple[str, float], ...]]
"""What a program is derived from: its text and its constants."""


@dataclass
class Emitter:
    """Derives a program once, for all its cells; certifies a loop nest once."""

    device: Device

    def __post_init__(self) -> None:
        self._derived: dict[ProgramKey, Derived] = {}
        self._certified: dict[tuple[ProgramKey, Nest], bool] = {}

    def variants(self, cell: Cell, count: int) -> list[Emitted]:
        """At most `count` variants of a cell, the chosen plan first. Raises EqfuseError as compiling does."""
        derived = self._derive(cell)
        shapes = {name: cell.workload.shape(name, cell.case) for name in cell.workload.tensors}
        extents = bind(derived.program, shapes, scalars=cell.case.scalars)
        dtypes = program_dtypes(derived.program)
        compiled = compiler.pipeline(derived, extents, dtypes, self.device, None)
        kinds = with_outputs(derived.program, dtypes)
        candidates = [
            compiled.chosen,
            *of_other_schedules(compiled.candidates, compiled.chosen, extents, kinds),
            *neighbours(compiled.chosen, extents, kinds, self.device),
        ][:count]
        return [self._emit(cell, derived, compiled, c, number) for number, c in enumerate(candidates)]

    def _derive(self, cell: Cell) -> Derived:
        key = _program(cell)
        if key not in self._derived:
            self._derived[key] = compiler.derive(
                key[0], cell.case.constants, strict_casts=False, assume_finite=True
            )
        return self._derived[key]

    def _emit(
        self, cell: Cell, derived: Derived, compiled: Compiled, candidate: Candidate, number: int
    ) -> Emitted:
        plan, nest = candidate.plan, candidate.nest
        tile = lower_nest(nest, derived.program, compiled.dtypes, plan.configs, self.device)
        this = replace(compiled, chosen=candidate, tile=tile)
        name = f"{cell.name}_v{number}"
        shards = {axis: plan.shards for axis, _ in nest.shards}
        cost = plan.cost
        kinds = with_outputs(derived.program, compiled.dtypes)
        shape = shape_of(nest, compiled.extents, kinds, plan.shards)
        entry = {
            "file": f"{name}.py",
            "function": name,
            "schedule": plan.schedule,
            "kernels": len(nest.kernels),
            "shards": plan.shards,
            "configs": [shown(config) for config in plan.configs],
            "predicted_ms": 1e3 * cost.seconds if cost else None,
            "read_again_bytes": read_again(nest, shape, [tensor.name for tensor in derived.program.tensors]),
            "terms_ms": {term.name: 1e3 * term.seconds for term in cost.terms} if cost else {},
            "work": [
                work_of(kernel, config, shape, self.device)
                for kernel, config in zip(configured(nest, shape, self.device), plan.configs, strict=True)
            ],
            "sizes": {**compiled.extents, **shards},
            "outputs": [output.name for output in derived.program.outputs],
            "certificate": self._certify(cell, derived, compiled, nest),
        }
        in_roles = compiled.roles is not None and candidate is compiled.chosen
        emit = compiler.emit_gluon if in_roles else compiler.emit_triton
        return Emitted(emit(derived, this, name), entry | {"roles": in_roles})

    def _certify(self, cell: Cell, derived: Derived, compiled: Compiled, nest: Nest) -> bool:
        key = (_program(cell), nest)
        if key not in self._certified:
            certificate = verify(
                derived, nest, None, compiled.dtypes, self.device, Checks(16, scalars=cell.case.constants)
            )
            self._certified[key] = certificate.ok
        return self._certified[key]


def same_kernels(cell: Cell, variant: Emitted) -> str:
    """A text that variants of several cells share whose kernels and settings are the same."""
    module = ast.parse(variant.source.replace(cell.name, "cell"))
    return "\n".join(map(ast.unparse, module.body[1:]))  # without the docstring


def _program(cell: Cell) -> ProgramKey:
    return cell.workload.text(cell.case), tuple(sorted(cell.case.constants.items()))


def read_again(nest: Nest, shape: Shape, inputs: Sequence[str]) -> int:
    """Bytes of inputs that a later loop or kernel reads after an earlier one has."""
    total, before = 0.0, set[Load]()
    for kernel in nest.kernels:
        found = {n for expr in expressions(kernel.body) for n in walk(expr) if isinstance(n, Load)}
        loads = {load for load in found if load.tensor in inputs}
        total += bytes_read_again(kernel, shape) * shape.positions(frozenset(kernel.parallel))
        total += sum(shape.positions(free_axes(x)) * shape.itemsize(x.tensor) for x in loads & before)
        before |= loads
    return int(total)


def shown(config: KernelConfig) -> dict[str, int]:
    """Blocks by axis (whole axes left out), warps and stages."""
    blocks = {b.axis: b.size for b in config.blocks if b.size is not None and b.kind != "unit"}
    return {**blocks, "warps": config.warps, "stages": config.stages}


def write(folder: Path, cells: Sequence[Cell], target: str, count: int) -> list[str]:
    """Writes the modules and the manifest; returns what could not be compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    emitter = Emitter(device_named(target))
    entries: list[dict[str, Any]] = []
    failures: list[str] = []
    for cell in track(cells, console=Console(stderr=True), description="compiling"):
        try:
            variants = emitter.variants(cell, count)
        except EqfuseError as error:
            failures.append(f"{cell.name}: {error}")
            continue
        for variant in variants:
            (folder / variant.entry["file"]).write_text(variant.source, encoding="utf-8")
        entries.append({**cell.entry(), "variants": [variant.entry for variant in variants]})
    manifest = {
        "target": target,
        "constants": constants_of(emitter.device),
        "versions": {name: installed(name) for name in ("eqfuse", "egglog", "torch", "triton")},
        "cells": entries,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return failures


def arguments(description: str | None, variants: int) -> argparse.ArgumentParser:
    """The command line of a benchmark that makes a bundle."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200", help="the device whose rates plans are chosen by")
    parser.add_argument(
        "--only", default=None, help="operators or programs that start with one of these words"
    )
    parser.add_argument("--variants", type=int, default=variants, help="at most this many per cell")
    return parser


def write_bundle(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Writes a bundle and tells what could not be compiled: 1 where there is something."""
    failures = write(options.folder, cells, options.target, options.variants)
    console = Console(stderr=True)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0
