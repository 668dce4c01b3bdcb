"""A workload compiled for a device that need not be here, at the extents of one case."""

from __future__ import annotations

from dataclasses import dataclass

from bench.workloads import Case, Workload
from eqfuse import compiler
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes


@dataclass(frozen=True)
class Ahead:
    """`source` is the Triton module, `name` its function; `sizes` are what the function is called with."""

    derived: Derived
    compiled: Compiled
    name: str
    source: str

    @property
    def schedule(self) -> str:
        return self.compiled.chosen.plan.schedule

    @property
    def sizes(self) -> dict[str, int]:
        """Extents of all axes, and the number of shards."""
        chosen = self.compiled.chosen
        return {**self.compiled.extents, **{axis: chosen.plan.shards for axis, _ in chosen.nest.shards}}


def compile_ahead(workload: Workload, case: Case, target: str, prefer: str | None = None) -> Ahead:
    """Raises EqfuseError as `eqfuse.compile` does; nothing is verified."""
    derived = compiler.derive(workload.text(case), case.constants, strict_casts=False, assume_finite=True)
    shapes = {name: workload.shape(name, case) for name in workload.tensors}
    extents = bind(derived.program, shapes, scalars=case.scalars)
    device = device_named(target)
    compiled = compiler.pipeline(derived, extents, program_dtypes(derived.program), device, prefer)
    name = f"{workload.name}_{case.name}".replace("-", "_").lower()
    return Ahead(derived, compiled, name, compiler.emit_triton(derived, compiled, name))
