"""Kernels of several variants and what is predicted for them, for a machine that has torch and triton alone.

A cell has several variants: the choice of the cost model first, the cheapest plan of every other
schedule, and plans one step away from the choice: a block, the warps, the stages or the shards
doubled or halved.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.cells import Cell
from bench.report import installed
from eqfuse import compiler
from eqfuse.compiler import Compiled, Derived
from eqfuse.errors import EqfuseError
from eqfuse.extract.choose import Candidate, shape_of, with_outputs
from eqfuse.extract.configure import TENSOR_CORE_MIN
from eqfuse.extract.cost import kernel_terms, total
from eqfuse.extract.devices import Device
from eqfuse.extract.footprint import bytes_read_again, shared_bytes
from eqfuse.extract.plans import SCHEDULES, AxisBlock, KernelConfig
from eqfuse.extract.shape import BYTES, Shape
from eqfuse.loops.nodes import Nest
from eqfuse.loops.walk import expressions
from eqfuse.terms.nodes import Load, Program, free_axes, walk
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes

MANIFEST = "manifest.json"
WARPS, STAGES = (1, 32), (1, 5)
"""Least and most of what a step may reach."""

SPILLED = 0.5
"""Part of the predicted time above which a plan whose blocks do not fit on chip is not measured: Triton needs
minutes to compile one."""
TEMPORARIES = 10e9
"""Bytes of temporaries above which a plan is not measured."""


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
        compiled = compiler.compile_for(derived, extents, dtypes, self.device, None)
        chosen = [compiled.chosen, *_of_other_schedules(compiled)]
        near = sorted(neighbours(compiled, derived.program, self.device), key=_seconds)
        candidates = [*chosen, *near][:count]
        return [self._emit(cell, derived, compiled, c, number) for number, c in enumerate(candidates)]

    def _derive(self, cell: Cell) -> Derived:
        key = _program(cell)
        if key not in self._derived:
            self._derived[key] = compiler.derive(key[0], cell.case.constants, strict_casts=False)
        return self._derived[key]

    def _emit(
        self, cell: Cell, derived: Derived, compiled: Compiled, candidate: Candidate, number: int
    ) -> Emitted:
        plan, nest = candidate.plan, candidate.nest
        tile = compiler.lower_nest(nest, derived.program, compiled.dtypes, plan.configs, self.device)
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
            "configs": [_shown(config) for config in plan.configs],
            "predicted_ms": 1e3 * cost.seconds if cost else None,
            "read_again_bytes": read_again(nest, shape, [tensor.name for tensor in derived.program.tensors]),
            "terms_ms": {term.name: 1e3 * term.seconds for term in cost.terms} if cost else {},
            "sizes": {**compiled.extents, **shards},
            "outputs": [output.name for output in derived.program.outputs],
            "certificate": self._certify(cell, derived, compiled, nest),
        }
        return Emitted(compiler.emit_triton(derived, this, name), entry)

    def _certify(self, cell: Cell, derived: Derived, compiled: Compiled, nest: Nest) -> bool:
        key = (_program(cell), nest)
        if key not in self._certified:
            certificate = compiler.verify(
                derived, nest, compiled.dtypes, self.device, trials=16, scalars=cell.case.constants
            )
            self._certified[key] = certificate.ok
        return self._certified[key]


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


def neighbours(compiled: Compiled, program: Program, device: Device) -> Iterator[Candidate]:
    """Plans one step away from the chosen one, priced; those that do not fit the device left out."""
    plan, nest = compiled.chosen.plan, compiled.chosen.nest
    dtypes = with_outputs(program, compiled.dtypes)
    shape = shape_of(nest, compiled.extents, dtypes, plan.shards)
    prices = [
        sum(term.seconds for term in kernel_terms(kernel, config, shape, device))
        for kernel, config in zip(nest.kernels, plan.configs, strict=True)
    ]
    chief = prices.index(max(prices))
    steps = [(configs, plan.shards) for configs in _stepped(plan.configs, chief)]
    if nest.shards:
        steps += [(plan.configs, shards) for shards in (2 * plan.shards, plan.shards // 2) if shards > 1]
    for configs, shards in steps:
        shape = shape_of(nest, compiled.extents, dtypes, shards)
        terms = []
        for kernel, config in zip(nest.kernels, configs, strict=True):
            blocks = {b.axis: b.size or shape.extents[b.axis] for b in config.blocks}
            if shared_bytes(kernel, blocks, config.stages, shape) > device.shared:
                break
            terms.append(kernel_terms(kernel, config, shape, device))
        else:
            yield Candidate(replace(plan, configs=configs, shards=shards, cost=total(terms)), nest)


def _stepped(configs: Sequence[KernelConfig], chief: int) -> Iterator[tuple[KernelConfig, ...]]:
    """The configurations with one setting of the kernel changed that takes longest."""
    config = configs[chief]

    def changed(**settings: Any) -> tuple[KernelConfig, ...]:
        return (*configs[:chief], replace(config, **settings), *configs[chief + 1 :])

    for warps in (config.warps * 2, config.warps // 2):
        if WARPS[0] <= warps <= WARPS[1]:
            yield changed(warps=warps)
    for stages in (config.stages + 1, config.stages - 1):
        if STAGES[0] <= stages <= STAGES[1]:
            yield changed(stages=stages)
    for place, block in enumerate(config.blocks):
        if block.kind in ("grid", "loop") and block.size is not None and block.size >= TENSOR_CORE_MIN:
            for size in (block.size * 2, block.size // 2):
                if size >= TENSOR_CORE_MIN:
                    blocks = [*config.blocks]
                    blocks[place] = AxisBlock(block.axis, block.kind, size)
                    yield changed(blocks=tuple(blocks))


def _of_other_schedules(compiled: Compiled) -> list[Candidate]:
    """The cheapest plan of every schedule but the chosen one's that fits the device."""
    found: list[Candidate] = []
    for schedule in SCHEDULES:
        if schedule != compiled.chosen.plan.schedule:
            options = [
                c
                for c in compiled.candidates
                if c.plan.schedule == schedule
                and _spilled(c) < SPILLED * _seconds(c) < math.inf
                and _temporaries(c, compiled) <= TEMPORARIES
            ]
            found += sorted(options, key=_seconds)[:1]
    return sorted(found, key=_seconds)


def _seconds(candidate: Candidate) -> float:
    return candidate.plan.cost.seconds if candidate.plan.cost else math.inf


def _spilled(candidate: Candidate) -> float:
    terms = candidate.plan.cost.terms if candidate.plan.cost else ()
    return sum(term.seconds for term in terms if term.name == "spill")


def _temporaries(candidate: Candidate, compiled: Compiled) -> int:
    """Bytes that the kernels of a plan hand on to each other."""
    shape = shape_of(candidate.nest, compiled.extents, compiled.dtypes, candidate.plan.shards)
    return sum(
        BYTES[shape.dtypes[buffer.name]] * math.prod(shape.extents[axis] for axis in buffer.axes)
        for buffer in candidate.nest.buffers
        if not buffer.is_output
    )


def _shown(config: KernelConfig) -> dict[str, int]:
    """Blocks by axis (whole axes left out), warps and stages."""
    blocks = {b.axis: b.size for b in config.blocks if b.size is not None and b.kind != "unit"}
    return {**blocks, "warps": config.warps, "stages": config.stages}


def write(folder: Path, cells: Sequence[Cell], target: str, count: int) -> list[str]:
    """Writes the modules and the manifest; returns what could not be compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    emitter = Emitter(compiler.device_named(target))
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
