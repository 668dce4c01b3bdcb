"""The forms that a cell's kernel may have on a Hopper GPU: what calls run, other roles, and Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import eqfuse as eq
from bench.gluon_cells import AnyRolesCell as Cell
from eqfuse import compiler
from eqfuse.compiled import Compiled
from eqfuse.loops.plan import Roles
from eqfuse.specialize_warps import other_roles

OTHERS = 3
"""Roles beside the chosen ones, which differ from each other in more than their slots."""


@dataclass(frozen=True)
class Form:
    """A form of a kernel. `kind` is "roles" or "Triton", `chosen` says whether calls run it; `ms` are predicted, where the model of
    roles was asked."""

    kind: str
    chosen: bool
    code: str
    compiled: Compiled
    ms: float | None

    def entry(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "chosen": self.chosen, "code": self.code}
        found["predicted_ms"] = self.ms
        for roles in filter(None, self.compiled.chosen.plan.roles):
            found |= {"consumers": roles.consumers, "slots": roles.slots, "delayed": list(roles.delayed)}
            found |= {"persistent": roles.persistent, "ahead": roles.ahead, "blocks": blocks_of(roles)}
            found |= {"columns": roles.columns, "led": roles.led}
        return found

    def source(self, kernel: eq.Kernel) -> str:
        """The emitted module."""
        if self.compiled.roles is None:
            return self.triton(kernel)
        return compiler.emit_gluon(kernel.derived, self.compiled, kernel.name)

    def triton(self, kernel: eq.Kernel) -> str:
        """The emitted module without roles."""
        return compiler.emit_triton(kernel.derived, self.compiled, kernel.name)


def blocks_of(roles: Roles) -> str:
    """The sizes of a thread block."""
    return " ".join(f"{b.axis}={b.size}" for b in roles.blocks if b.size is not None and b.size > 1)


def short(form: Mapping[str, Any]) -> str:
    """Roles in a few characters: consumers, slots, what is delayed, blocks, persistence, what consumers share."""
    late = "".join(f" late {n + 1}" for n in form["delayed"])
    grid = " persistent" * form["persistent"] + " ahead" * form.get("ahead", False)
    kind = " columns" * form.get("columns", False) + " led" * form.get("led", False)
    return f"{form['consumers']}c{form['slots']}s{late} {form['blocks']}{grid}{kind}"


def kernel_of(cell: Cell, target: str = "auto", *, finite: bool = True) -> eq.Kernel:
    """A cell's program, compiled as a user does who knows that nothing is infinite, or who promises nothing."""
    case = cell.case
    return eq.compile(cell.workload.text(case), scalars=case.constants, target=target, assume_finite=finite)


def forms(kernel: eq.Kernel, compiled: Compiled, sizes: Mapping[str, int], count: int = OTHERS) -> list[Form]:
    """What calls run, the best other roles as they are predicted, so many of them, and Triton."""
    plan = compiled.chosen.plan
    mine, rest, seen = None, list[Form](), set[tuple[Roles | None, ...]]()
    for seconds, made in other_roles(kernel.derived, compiled, sizes):
        roles = made.chosen.plan.roles
        alike = tuple(each and replace(each, slots=0) for each in roles)
        if roles == plan.roles:
            mine = 1e3 * seconds
        elif len(rest) < count and alike not in seen:
            seen.add(alike)
            rest.append(Form("roles", False, made.chosen.plan.code, made, 1e3 * seconds))
    kind = "roles" if plan.roles else "Triton"
    found = [Form(kind, True, plan.code, compiled, mine), *rest]
    if plan.roles:
        without = replace(compiled.chosen, plan=replace(plan, roles=(), code="Triton"))
        found.append(Form("Triton", False, "Triton", replace(compiled, chosen=without, roles=None), None))
    return found
