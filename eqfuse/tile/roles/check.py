"""What every well-formed program in roles satisfies; what depends on time, its interpreter shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eqfuse.tile.check import TileError
from eqfuse.tile.nodes import Dot, For, If, Let, PersistentLoop, Store, Value
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.walk import defined, defined_by, nested, operands


def check(program: warp.RolesProgram) -> None:
    """Raises TileError where the program does not hold together."""
    for kernel in program.specialized:
        _check_kernel(kernel)


def _check_kernel(kernel: warp.RolesKernel) -> None:
    blocks = {block.axis: block for block in kernel.blocks}
    rows = blocks[kernel.rows].size
    if rows is None or rows % kernel.row_parts:
        raise TileError(f"kernel {kernel.name!r}: {rows} rows for {kernel.row_parts} consumers")
    names = [*(ring.name for ring in kernel.rings), *(staging.name for staging in kernel.staging)]
    if len(set(names)) < len(names):
        raise TileError(f"kernel {kernel.name!r}: two rings of one name among {names}")
    for ring in kernel.rings:
        if ring.slots < 1 or ring.parts != (kernel.row_parts if kernel.rows in ring.tile.dims else 1):
            raise TileError(f"kernel {kernel.name!r}: {ring.slots} slots, {ring.parts} parts of {ring.name}")
    rings = {ring.name: ring for ring in kernel.rings}
    for staging in kernel.staging:
        if staging.over is not None:
            over = rings.get(staging.over)
            own = over is not None and (over.slots, over.parts) == (1, kernel.consumers)
            if not own or kernel.persistent:
                raise TileError(
                    f"kernel {kernel.name!r}: {staging.name} in {staging.over}, which others read"
                )
    parts = [role.part for role in kernel.roles]
    if parts != [None, *range(kernel.consumers)]:
        raise TileError(f"kernel {kernel.name!r} has the roles {parts}")
    for role in kernel.roles:
        _Check(kernel, role).body(role.body, {})


class _Check:
    def __init__(self, kernel: warp.RolesKernel, role: warp.Role) -> None:
        self.kernel, self.role = kernel, role
        self.rings = {ring.name: ring for ring in kernel.rings}
        self.names: set[str] = set()
        self.given = {stmt.ring for stmt in nested(role.body) if isinstance(stmt, warp.StoreShared)}

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            part = "" if self.role.part is None else f" {self.role.part}"
            raise TileError(f"{self.role.name}{part} of kernel {self.kernel.name!r}: {message}")

    def body(self, body: Sequence[warp.Stmt], outside: Mapping[str, Value]) -> dict[str, Value]:
        """What is visible at the end of a body. Every product that it issues it awaits."""
        visible = dict(outside)
        pending: dict[str, warp.MmaAsync] = {}
        for stmt in body:
            self._statement(stmt, visible, pending)
        self.require(not pending, f"nothing awaits {', '.join(pending)}")
        return visible

    def _statement(
        self, stmt: warp.Stmt, visible: dict[str, Value], pending: dict[str, warp.MmaAsync]
    ) -> None:
        match stmt:
            case For(_, start, stop, carried, inner):
                self._read((start, stop, *(item.init for item in carried)), visible)
                here = {**visible, **self._defined(item.value for item in carried)}
                ended = self.body(inner, here)
                self._read((item.next for item in carried), ended)
                for item in carried:
                    kinds = {(v.dims, v.dtype) for v in (item.value, item.init, item.next)}
                    self.require(len(kinds) == 1, f"{item.value.name} changes its dims or dtype")
                self._replaced_early(stmt)
            case PersistentLoop(carried, inner):
                self.require(self.kernel.persistent, "walks items of a grid that is not persistent")
                self._read((item.init for item in carried), visible)
                ended = self.body(inner, {**visible, **self._defined(item.value for item in carried)})
                self._read((item.next for item in carried), ended)
            case If(condition, inner, results):
                self._read((condition, *(result.otherwise for result in results)), visible)
                self.require(condition.dims == (), f"{condition.name} is no scalar")
                ended = self.body(inner, visible)
                self._read((result.then for result in results), ended)
            case warp.MmaWait(_, issued, _):
                self.require(issued.name in pending, f"{issued.name} is not under way")
                del pending[issued.name]
            case _:
                self._read(operands(stmt), visible)
        self._kinds(stmt)
        if isinstance(stmt, warp.MmaAsync):
            if stmt.accumulator is not None:  # one that starts from a result that is not awaited
                pending.pop(stmt.accumulator.name, None)
            pending[stmt.pending.name] = stmt
        if not isinstance(stmt, For | PersistentLoop):
            self._defined(defined_by(stmt))
        visible |= {value.name: value for value in defined_by(stmt)}

    def _read(self, values: Iterable[Value], visible: Mapping[str, Value]) -> None:
        for value in values:
            self.require(visible.get(value.name) == value, f"{value.name} is read where it is not defined")

    def _defined(self, values: Iterable[Value]) -> dict[str, Value]:
        found = {value.name: value for value in values}
        for name in found:
            self.require(name not in self.names, f"{name} is defined twice")
        self.names |= found.keys()
        return found

    def _kinds(self, stmt: warp.Stmt) -> None:
        """Who may do what."""
        produces = self.role.part is None
        match stmt:
            case Let(value, op):
                self.require(not isinstance(op, Dot), f"the product {value.name} is not issued")
            case warp.AsyncCopy(ring, _, _):
                copied = ring in self.rings and bool(self.rings[ring].tensor)
                self.require(produces and copied, f"fills {ring}")
            case warp.Wait(ring, end, _, before):
                self.require(ring in self.rings, f"waits for {ring}, which is no ring")
                fills = produces if self.rings[ring].tensor else ring in self.given
                self.require((end == "empty") == fills == before, f"waits until {ring} is {end}")
            case warp.StoreShared(ring, _, value):
                known = not produces and ring in self.rings and not self.rings[ring].tensor
                self.require(known and self.rings[ring].tile.dims == value.dims, f"gives {ring}")
            case (
                warp.ReleaseSlot(ring, _)
                | warp.LoadShared(_, warp.View(ring, _, _))
                | warp.MmaAsync(_, _, warp.View(ring, _, _), _, _)
                | warp.AnyNonFinite(_, warp.View(ring, _, _))
                | warp.ZeroNonFinite(warp.View(ring, _, _))
            ):
                self.require(not produces and ring in self.rings, f"reads {ring}")
            case warp.Put() | Store():
                self.require(not produces, f"stores {stmt.tensor}")
            case warp.ConsumerBarrier():
                self.require(not produces, "meets the consumers")
            case warp.Column(value, tile, place):
                rows = len(tile.dims) == 2 and value.dims == tile.dims[:1] and not place.dims
                self.require(rows and value.dtype == "f32", f"{value.name} is no column of {tile.name}")
        if isinstance(stmt, warp.MmaAsync):
            for side in (stmt.left, stmt.right):
                dims = side.dims
                self.require(
                    len(dims) == 2 and stmt.axis in dims, f"{stmt.pending.name} of [{', '.join(dims)}]"
                )

    def _replaced_early(self, loop: For[warp.Stmt]) -> None:
        """A product reads its operands until it is awaited: registers of a carried one get their next value after that."""
        following = {item.value.name: item.next.name for item in loop.carried}
        under_way: dict[str, str] = {}
        for stmt in loop.body:
            match stmt:
                case warp.MmaAsync(pending, Value() as left, _, _, _) if left.name in following:
                    under_way[pending.name] = following[left.name]
                case warp.MmaWait(_, pending, _):
                    under_way.pop(pending.name, None)
                case _:
                    for value in defined((stmt,)):
                        early = value.name in under_way.values()
                        self.require(not early, f"{value.name} replaces an operand that is still read")
