"""Roles as text: rings, then what each role does, consumers that do the same once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eqfuse.listed import text_of
from eqfuse.tile.nodes import PersistentLoop, Value
from eqfuse.tile.printer import KernelPrinter as TilePrinter
from eqfuse.tile.printer import show_block, show_buffer, typed
from eqfuse.tile.roles import nodes as warp


@text_of.register
def show(program: warp.RolesProgram) -> str:
    """The program as text; the same program gives the same text."""
    lines = [show_buffer(buffer) for buffer in program.buffers]
    for kernel in program.kernels:
        printed = _Printer(kernel) if isinstance(kernel, warp.RolesKernel) else TilePrinter(kernel)
        lines += ["", *printed.lines()]
    return "\n".join(lines).lstrip("\n") + "\n"


def line_of(kernel: warp.RolesKernel, stmt: warp.Stmt) -> str:
    """A statement that has no body, as text."""
    return _Printer(kernel).line(stmt)


class _Printer(TilePrinter):
    _shows_masks = False

    def __init__(self, kernel: warp.RolesKernel) -> None:
        self._divided = kernel
        self._constants: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        kernel = self._divided
        axes = (f"{axis} backwards" if axis in kernel.backwards else axis for axis in kernel.grid)
        walked = ", one thread block for each SM" if kernel.persistent else ""
        yield f"kernel {kernel.name}, grid ({', '.join(axes)}){walked}:"
        for block in kernel.blocks:
            divided = kernel.columns.axis if kernel.columns else kernel.rows
            shared = f", {kernel.consumers} consumers" if block.axis == divided else ""
            yield f"    {show_block(block)}{shared}"
        for ring in kernel.rings:
            parts = f", {ring.parts} parts" if ring.parts > 1 else ""
            source = f"of {ring.tensor}" if ring.tensor else "of the leader"
            yield f"    ring {typed(ring.tile)} {source}: {ring.slots} slots{parts}"
        for staging in kernel.staging:
            over = f", in {staging.over}" if staging.over else ""
            yield f"    staging {typed(staging.tile)} of {staging.tensor}{over}"
        if kernel.launch_constants:
            yield f"    known at launch: {', '.join(value.name for value in kernel.launch_constants)}"
        for roles in _alike(kernel.roles):
            parts = ", ".join(str(role.part) for role in roles if role.part is not None)
            yield f"  {roles[0].name}{f' {parts}' if parts else ''}:"
            yield from self._body(roles[0].body, "    ")

    def _other(self, stmt: object, indent: str) -> Iterator[str]:
        if isinstance(stmt, PersistentLoop):
            yield f"{indent}for every item of this thread block:"
            yield from self._carrying(stmt.carried, stmt.body, indent + "    ")
        else:
            yield indent + self.line(stmt)

    def line(self, stmt: object) -> str:
        match stmt:
            case warp.At(axis, start):
                return f"at {axis} = {self._name(start)}"
            case warp.AsyncCopy(ring, turn, index):
                tensor = self._divided.ring(ring).tensor
                return f"fill {ring}[{self._name(turn)}] from {tensor}[{self._index(index)}]"
            case warp.Wait(ring, end, turn, before):
                return f"wait {ring}[{self._name(turn)}] {end}{' before' if before else ''}"
            case warp.ReleaseSlot(ring, turn):
                return f"free {ring}[{self._name(turn)}]"
            case warp.StoreShared(ring, turn, value):
                return f"give {self._name(value)} to {ring}[{self._name(turn)}]"
            case warp.LoadShared(value, view):
                return f"{typed(value)} = read {self._operand(view)}"
            case warp.MmaAsync(pending, left, right, axis, accumulator):
                sums = "" if accumulator is None else f"{self._name(accumulator)} + "
                sides = f"{self._operand(left)}, {self._operand(right)}"
                return f"{typed(pending)} = {sums}issue dot({sides}, over {axis})"
            case warp.MmaWait(value, pending, behind):
                later = f", {behind} later under way" if behind else ""
                return f"{typed(value)} = await {self._name(pending)}{later}"
            case warp.AnyNonFinite(value, view):
                return f"{typed(value)} = any of {self._operand(view)} is not finite"
            case warp.ZeroNonFinite(view):
                return f"clear {self._operand(view)} of what is not finite"
            case warp.ConsumerBarrier(turn):
                return f"meet the other consumers, {self._name(turn)} times before"
            case warp.Column(value, tile, place):
                return f"{typed(value)} = column {self._name(place)} of {self._name(tile)}"
            case warp.Put(staging, tensor, index, value):
                return f"put {tensor}[{self._index(index)}] = {self._name(value)} by {staging}"
            case _:
                raise TypeError(stmt)

    def _operand(self, side: Value | warp.View) -> str:
        if isinstance(side, Value):
            return self._name(side)
        return f"{side.ring}[{self._name(side.turn)}] as [{', '.join(side.dims)}]"

    def _index(self, index: warp.Index) -> str:
        return ", ".join(self._place(place) for place in index)

    def _place(self, place: Value | warp.Along) -> str:
        if isinstance(place, Value):
            return self._name(place)
        offset = "" if place.offset is None else f" + {self._name(place.offset)}"
        return f"block of {place.axis}{offset}"


def _alike(roles: Iterable[warp.Role]) -> list[list[warp.Role]]:
    found: dict[tuple[str, tuple[warp.Stmt, ...]], list[warp.Role]] = {}
    for role in roles:
        found.setdefault((role.name, role.body), []).append(role)
    return list(found.values())
