"""Which passes a kernel goes through on its way into roles, in order: those of tile programs, those before it is divided among
roles, and those of its roles.

Every row is named in certificates where it changed a kernel. What has gone through them is checked and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from eqfuse.loops.plan import Roles
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.passes.pipeline import PRICED_PASSES, ROLES_PASSES, run_passes
from eqfuse.tile.roles.branches import branched
from eqfuse.tile.roles.check import check
from eqfuse.tile.roles.columns import masked_behind
from eqfuse.tile.roles.corrections import corrections_first
from eqfuse.tile.roles.cut import cut
from eqfuse.tile.roles.fuse_ranges import fuse_ranges, inner_ranges_fused, supported
from eqfuse.tile.roles.launch_constants import launch_constants
from eqfuse.tile.roles.loads import Tensors
from eqfuse.tile.roles.nodes import RolesKernel, RolesProgram, Stmt
from eqfuse.tile.roles.rare import rare_loops, without_rare
from eqfuse.tile.roles.sharing import of_part
from eqfuse.tile.roles.split import Setting, split
from eqfuse.tile.storage import buffer_dtypes
from eqfuse.tile.walk import pruned

K = TypeVar("K", Kernel, RolesKernel)


@dataclass(frozen=True)
class Row(Generic[K]):
    """A pass of one kernel, for the roles that it gets. `run` gives an equal kernel where there is nothing to do, and raises
    Unsuited where the kernel has no such roles. `why` is one line; `field` says what a run in the finite field decides of it."""

    name: str
    run: Callable[[K, Setting], K]
    why: str
    field: str = "exact there: the same sums, products and quotients of residues"


def _corrections_first(kernel: Kernel, setting: Setting) -> Kernel:
    return kernel if setting.finite else corrections_first(kernel, setting.tensors, setting.fresh)


def _fused_ranges(kernel: Kernel, setting: Setting) -> Kernel:
    supported(kernel.body)
    schedule, fresh = setting.schedule, setting.fresh
    # Nothing is under way at the end of loops without delayed products or a leader: a branch in each trip is not worth it there.
    behind = bool(schedule.delayed) or schedule.led
    body = inner_ranges_fused(kernel.body, fresh, behind=bool(schedule.delayed))
    return replace(kernel, body=fuse_ranges(body, fresh, branches=behind))


def _branches(kernel: Kernel, setting: Setting) -> Kernel:
    return replace(kernel, body=branched(kernel.body))


def _masked_columns(kernel: Kernel, setting: Setting) -> Kernel:
    return replace(kernel, body=masked_behind(kernel.body, setting.tensors, setting.fresh))


def _cut_loops(kernel: RolesKernel, setting: Setting) -> RolesKernel:
    return _with_bodies(kernel, lambda body: pruned(cut(body, setting.fresh)))


def _stored_once(kernel: RolesKernel, setting: Setting) -> RolesKernel:
    if kernel.columns is None or kernel.led:
        return kernel
    columns, roles = kernel.columns, kernel.roles
    own = (replace(r, body=of_part(r.body, columns, r.part)) if r.part else r for r in roles)
    return replace(kernel, roles=tuple(own))


def _constants(kernel: RolesKernel, setting: Setting) -> RolesKernel:
    return replace(kernel, launch_constants=launch_constants(kernel.roles))


def _with_bodies(kernel: RolesKernel, change: Callable[[tuple[Stmt, ...]], tuple[Stmt, ...]]) -> RolesKernel:
    """A kernel with the bodies of its consumers changed, one that several have once."""
    made = {id(role.body): change(role.body) for role in kernel.roles[1:]}
    return replace(kernel, roles=tuple(replace(r, body=made.get(id(r.body), r.body)) for r in kernel.roles))


BEFORE_ROLES: tuple[Row[Kernel], ...] = (
    Row(
        "corrections first",
        _corrections_first,
        "what is not finite is added before a product, so that the product's operands can be cleared",
        "infinities and NaN of masked operands get where the program has them, and nowhere else",
    ),
    Row("fused ranges", _fused_ranges, "a pipeline of one loop does not drain where masks begin"),
    Row("branches", _branches, "a tile that is hardly ever another one is made where it is"),
    Row("masked columns", _masked_columns, "the copy engine has no masks: they are selects behind its loads"),
)
"""Passes of kernels that will be divided, in regions."""

OF_ROLES: tuple[Row[RolesKernel], ...] = (
    Row("cut loops", _cut_loops, "a branch in a loop keeps instructions on either side apart"),
    Row("columns stored once", _stored_once, "what consumers share they all compute, and one stores"),
    Row("launch constants", _constants, "a binary has one value of each condition that a launch knows"),
)
"""Passes of kernels in roles."""

SPLIT = "roles"
"""The name of what divides a kernel, between them."""


def with_roles(
    program: TileProgram,
    schedules: Sequence[Roles | None],
    tensors: Tensors,
    *,
    finite: bool,
) -> RolesProgram:
    """The program with the kernels' roles, one schedule for each; kernels without one stay as they are. `tensors` has the axes
    of every tensor's dims, as far as they are known; `finite` says that all that is stored is finite. Raises Unsuited."""
    chosen = [n for n, schedule in enumerate(schedules) if schedule is not None]
    ordinary = tuple(without_rare(program.kernels[n]) for n in chosen)
    first = run_passes(replace(program, kernels=ordinary), ROLES_PASSES)
    kernels: list[RolesKernel | Kernel] = list(program.kernels)
    names, units = dict.fromkeys(first.passes), dict[tuple[str, str], None]()
    for place, kernel in zip(chosen, first.kernels, strict=True):
        schedule = schedules[place]
        assert schedule is not None
        setting = Setting.of(kernel, schedule, tensors, rare_loops(program.kernels[place]), finite=finite)
        kernel = _run(BEFORE_ROLES, kernel, setting, names)
        divided, own = split(kernel, setting)
        names[SPLIT] = None
        kernels[place] = _run(OF_ROLES, divided, setting, names)
        units |= dict.fromkeys(own.items())
    dtypes = buffer_dtypes(program)
    buffers = tuple(replace(buffer, dtype=dtypes[buffer.name]) for buffer in program.buffers)
    domains = (*program.domains, *units)
    made = RolesProgram(tuple(kernels), buffers, domains, program.shards, tuple(names))
    check(made)
    return made


def _run(rows: Iterable[Row[K]], kernel: K, setting: Setting, names: dict[str, None]) -> K:
    """The kernel after these passes; the names of those that changed it are added."""
    for row in rows:
        after = row.run(kernel, setting)
        if after != kernel:
            names[row.name] = None
        kernel = after
    return kernel


def prepared(kernel: Kernel) -> Kernel:
    """A kernel as its roles are priced: its products computed the way they are stored, its sums from where they start."""
    program = TileProgram((without_rare(kernel),), ())
    for each in PRICED_PASSES:
        program = each.run(program)
    return program.kernels[0]
