"""What the roles of a kernel are and how they came about, as text for explanations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eqfuse.extract.devices import Device
from eqfuse.extract.resources import LEADER_REGISTERS
from eqfuse.tile.nodes import Elementwise, For, If, Kernel, Let, PersistentLoop, ReduceTile, TileProgram
from eqfuse.tile.passes.pipeline import ROLES_PASSES
from eqfuse.tile.printer import typed
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.roles.printer import line_of
from eqfuse.tile.roles.rare import without_rare
from eqfuse.tile.roles.resources import held_by, needs
from eqfuse.tile.walk import nested
from eqfuse.units import duration


def account(
    tiles: Kernel,
    kernel: warp.RolesKernel,
    device: Device,
    extents: Mapping[str, int],
    predicted: tuple[float, float],
    undone: Mapping[str, float | None],
) -> Iterator[str]:
    """The roles of a kernel, what each pass made of its tile program, the steady state of its pipeline, and what
    it was `predicted` to take in roles and without, with each decision taken back: None where no SM holds that."""
    yield from _roles(kernel, device, extents)
    yield ""
    yield from _passes(tiles, kernel)
    yield ""
    yield from _steady(kernel)
    yield ""
    yield from _predicted(predicted, undone)


def _roles(kernel: warp.RolesKernel, device: Device, extents: Mapping[str, int]) -> Iterator[str]:
    filled = ", ".join(
        f"{ring.name} ({ring.slots} slot{'s' if ring.slots > 1 else ''} of {ring.tile.dtype}[{', '.join(ring.tile.dims)}]"
        + (f", {ring.parts} parts)" if ring.parts > 1 else ")")
        for ring in kernel.rings
        if ring.tensor
    )
    rows = next(block.size for block in kernel.blocks if block.axis == kernel.rows)
    yield f"producer: one warp, fills {filled}"
    what = f"each {(rows or 0) // kernel.row_parts} of {rows} positions of {kernel.rows}"
    if kernel.columns is not None:
        what = f"each all {rows} positions of {kernel.rows} and its part of {kernel.columns.axis}"
        what += ", but for the last, which computes for the others" if kernel.led else ""
    yield f"consumers: {kernel.consumers} warp groups, {what}"
    found = needs(kernel, extents, device)
    yield (
        f"an SM: {found.shared / 1024:.0f} of {device.shared / 1024:.0f} KB of shared memory; "
        f"about {found.registers} of {held_by(kernel)} registers of a consumer's thread"
        + (f", {found.leading} of {LEADER_REGISTERS} of the leader's" if kernel.led else "")
    )


def _passes(tiles: Kernel, kernel: warp.RolesKernel) -> Iterator[str]:
    """What each pass has changed, in their order."""
    program = TileProgram((without_rare(tiles),), ())
    for each in ROLES_PASSES:
        changed = each.run(program)
        if changed is not program:
            yield f"{each.name}: {_done(program.kernels[0], changed.kernels[0])}"
        program = changed
    before = sum(isinstance(stmt, For) for stmt in tiles.body)
    after = sum(isinstance(stmt, For) for stmt in nested(kernel.roles[0].body))
    if after < before:
        yield f"fused ranges: {before} loops became {after}"
    fills = sum(isinstance(stmt, warp.AsyncCopy) for stmt in nested(kernel.roles[0].body))
    yield f"producer split: {_count('copy', 'copies', fills)} to {_count('ring', 'rings', sum(bool(ring.tensor) for ring in kernel.rings))}"
    if kernel.columns is not None:
        given = ", ".join(typed(ring.tile) for ring in kernel.rings if not ring.tensor)
        which = f"{kernel.columns.parts} parts of {kernel.columns.axis}"
        by = (
            f"a leader computes what has none, and gives {given}"
            if kernel.led
            else "each computes what has none"
        )
        yield f"columns: {which}; {by}"
    behind = [s for s in nested(kernel.roles[1].body) if isinstance(s, For) and _is_behind(s)]
    yield f"pipeline: {_count('loop runs', 'loops run', len(behind))} products one block behind"
    for staging in kernel.staging:
        through = f"{staging.over}, which nobody reads any more" if staging.over else "memory of its own"
        yield f"stores: {staging.tensor} through {through}"
    yield f"persistence: {'one thread block for each SM' if kernel.persistent else 'none'}"


def _done(before: Kernel, after: Kernel) -> str:
    """What a pass has changed."""
    selects, maxima = _selects(before) - _selects(after), _changed(before, after)
    if selects > 0:
        return f"{selects} selects fewer"
    return _count("maximum", "maxima", maxima) if maxima else "done"


def _is_behind(loop: For[warp.Stmt]) -> bool:
    """Whether products of two blocks are under way at once."""
    started = {s.pending for s in loop.body if isinstance(s, warp.MmaAsync)}
    issued = [
        n for n, s in enumerate(loop.body) if isinstance(s, warp.MmaAsync) and s.accumulator not in started
    ]
    awaited = [n for n, stmt in enumerate(loop.body) if isinstance(stmt, warp.MmaWait)]
    return len(issued) > 1 and issued[1] < awaited[0]


def _selects(kernel: Kernel) -> int:
    return sum(
        isinstance(stmt, Let)
        and isinstance(stmt.op, Elementwise)
        and stmt.op.fn == "where"
        and bool(stmt.value.dims)
        for stmt in nested(kernel.body)
    )


def _changed(before: Kernel, after: Kernel) -> int:
    """Maxima that are taken of something else."""
    found = []
    for kernel in (before, after):
        lets = (s for s in nested(kernel.body) if isinstance(s, Let))
        found.append(
            {let.op.value.name for let in lets if isinstance(let.op, ReduceTile) and let.op.op == "max"}
        )
    return len(found[1] - found[0])


def _steady(kernel: warp.RolesKernel) -> Iterator[str]:
    """The loops of a consumer, all but the order of products and slots left out."""
    yield from _trips(kernel, kernel.roles[1], "consumer")
    if kernel.led:
        yield from _trips(kernel, kernel.roles[-1], "leader")


def _trips(kernel: warp.RolesKernel, role: warp.Role, who: str) -> Iterator[str]:
    yield f"a trip of a {who}'s loop:"
    for stmt in nested(role.body):
        if isinstance(stmt, For) and not stmt.rare:
            yield f"  for blocks of {stmt.axis}:"
            count = 0
            for inner in stmt.body:
                if isinstance(
                    inner, warp.MmaAsync | warp.MmaWait | warp.Wait | warp.ReleaseSlot | warp.StoreShared
                ):
                    if count:
                        yield f"    ... {_count('operation', 'operations', count)}"
                    count = 0
                    yield f"    {line_of(kernel, inner)}"
                else:
                    count += _size(inner)
            if count:
                yield f"    ... {_count('operation', 'operations', count)}"


def _size(stmt: warp.Stmt) -> int:
    """Operations on tiles."""
    inner = nested((stmt,)) if isinstance(stmt, If | PersistentLoop) else (stmt,)
    return sum(isinstance(each, Let) and bool(each.value.dims) for each in inner)


def _predicted(predicted: tuple[float, float], undone: Mapping[str, float | None]) -> Iterator[str]:
    mine, without = predicted
    yield f"predicted: {duration(mine)} in these roles, {duration(without)} without"
    for what, seconds in undone.items():
        if seconds is None:
            yield f"  {what}: no SM holds it"
        else:
            yield f"  {what}: {duration(seconds)} ({seconds / mine - 1:+.0%})"


def _count(one: str, many: str, number: int) -> str:
    return f"{number} {one if number == 1 else many}"
