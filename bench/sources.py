"""`python -m bench.sources FOLDER`: every source that is emitted, a file for each program, schedule and target.

With `--against OLDER`, the files that differ from those in an older folder are named, and the exit status is 1 where there are any: a
change that should leave sources as they are is run before and after, on one machine: blocks for the CPU depend on it. Programs for
GPUs are at their largest sizes, those for the CPU at small ones; the target `tiles` is the tile program that the CPU runs, for which
nothing is assumed to be finite.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.ahead import compile_ahead
from bench.report import each
from bench.workloads import Workload, select
from eqfuse import compiler
from eqfuse.compiled import Asked
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.loops.plan import SCHEDULES
from eqfuse.lowered import lower_nest
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.cpu.source import source_of
from eqfuse.tile.native.blocks import native_configs
from eqfuse.tile.native.context import Interface
from eqfuse.tile.native.printer import source_of as cpp_of
from eqfuse.tile.printer import show
from eqfuse.tile.storage import resolve_extents

TARGETS = ("sm_90", "gfx942")


def sources(workload: Workload) -> Iterator[tuple[str, str]]:
    """The names and texts of all sources of a program. What a schedule is refused for is its text."""
    case = workload.cases["cpu"] if not workload.paper_cases else workload.paper_cases[-1]
    for target in TARGETS:
        for schedule in (None, *SCHEDULES):
            name = f"{workload.name}.{target}.{schedule or 'chosen'}"
            try:
                made = compile_ahead(workload, case, target, schedule)
            except EqfuseError as error:
                yield name, str(error)
                continue
            yield name, made.source
            if made.compiled.roles is not None:
                yield f"{name}.gluon", compiler.emit_gluon(made.derived, made.compiled, made.name)
    yield from _for_cpu(workload)


def _for_cpu(workload: Workload) -> Iterator[tuple[str, str]]:
    """The tile programs of every candidate, and the torch code and the C++ that run them."""
    case, device = workload.cases["small"], device_named("cpu")
    derived: Derived = compiler.derive(workload.text(case), case.constants, strict_casts=False)
    shapes = {name: workload.shape(name, case) for name in workload.tensors}
    extents, dtypes = bind(derived.program, shapes, scalars=case.scalars), program_dtypes(derived.program)
    ranks = {tensor.name: tensor.rank for tensor in derived.program.tensors}
    found, _ = compiler.choose(derived, Asked(extents, dtypes, device))
    for candidate in sorted(found, key=lambda each: each.plan.schedule):
        tile = lower_nest(candidate.nest, derived.program, dtypes, candidate.plan.configs, device)
        name = f"{workload.name}.tiles.{candidate.plan.schedule}"
        yield name, show(tile)
        yield f"{name}.torch", source_of(tile)[0]
        shards = {axis: candidate.plan.shards for axis, _ in candidate.nest.shards}
        sizes = resolve_extents(tile, extents, shards)
        configs = native_configs(tile, candidate.plan.configs, sizes)
        blocked = lower_nest(candidate.nest, derived.program, dtypes, configs, device)
        rows = frozenset((name, rank - 1) for name, rank in ranks.items() if rank)
        yield f"{name}.cpp", cpp_of(blocked, Interface.of(blocked, ranks, rows, sizes), sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sources", description="Writes every emitted source."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", metavar="PREFIX,...", help="only programs whose name or family starts so")
    parser.add_argument("--against", type=Path, metavar="OLDER", help="name the files that differ from those")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    hashed, names = hashlib.sha256(), []
    for workload in each(select(options.only)):
        for name, text in sources(workload):
            names.append(name)
            hashed.update(f"{name}\n{text}".encode())
            (options.folder / name).write_text(text, encoding="utf-8")
    print(f"{len(names)} sources, sha256 {hashed.hexdigest()[:16]}")
    if options.against is None:
        return 0
    older = {path.name for path in options.against.iterdir()} if options.only is None else set(names)
    differ = [
        name
        for name in sorted(older | set(names))
        if not all((folder / name).exists() for folder in (options.folder, options.against))
        or (options.folder / name).read_bytes() != (options.against / name).read_bytes()
    ]
    print("\n".join(f"differs: {name}" for name in differ) or f"none differs from {options.against}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
