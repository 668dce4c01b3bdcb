"""Who reads each value of a kernel: what may be written in place of its name, or over an old variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eqfuse.fast_dataclass import dataclass
from eqfuse.tile import nodes as ir
from eqfuse.tile.walk import nested, operands

Readers = Mapping[str, list[tuple[ir.Value | None, ir.Op]]]
"""What reads a value, by its name: a value and its op, or no value where loops carry it."""

Path = tuple[int, ...]
"""Place of a statement: its index in the kernel's body, then in the loop's body, and so on."""


@dataclass(frozen=True)
class Reader:
    """A statement that reads a value; `once` where it does so as the operand of one op."""

    path: Path
    once: bool


class Uses:
    """Definitions and readers of every value of a kernel. Reads through `Align` count as reads of its operand."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.ops: dict[str, ir.Op] = {}
        self._paths: dict[str, Path] = {}
        self._casts: set[Path] = set()
        self._loops: dict[str, tuple[ir.For[ir.Stmt], Path]] = {}
        self._direct: dict[str, list[tuple[Reader, ir.Value | None]]] = {}
        for path, stmt in _statements(kernel.body):
            self._visit(path, stmt)

    def _visit(self, path: Path, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Let(value, op):
                self.ops[value.name] = op
                self._paths[value.name] = path
                if isinstance(op, ir.Cast):
                    self._casts.add(path)
                for operand in operands(op):
                    self._read(operand, Reader(path, True), value if isinstance(op, ir.Align) else None)
            case ir.Store():
                for operand in operands(stmt):
                    self._read(operand, Reader(path, True), None)
            case ir.For(_, start, stop, carried, body, _):
                end = (*path, len(body))
                reads = [(start, path), (stop, path)]
                for item in carried:
                    self._loops[item.value.name] = (stmt, path)
                    reads += [(item.init, path), (item.next, end)]
                for operand, place in reads:
                    self._read(operand, Reader(place, False), None)

    def _read(self, value: ir.Value, reader: Reader, through: ir.Value | None) -> None:
        self._direct.setdefault(value.name, []).append((reader, through))

    def readers(self, value: ir.Value) -> list[Reader]:
        """Every statement that reads the value, once for each time."""
        found: list[Reader] = []
        for reader, through in self._direct.get(value.name, []):
            found += [reader] if through is None else self.readers(through)
        return found

    def alignments(self, value: ir.Value) -> list[ir.Value] | None:
        """The aligned forms that the value is read as; None if anything reads the value itself."""
        found = [through for _, through in self._direct.get(value.name, [])]
        return None if None in found else [through for through in found if through is not None]

    def is_inlined(self, value: ir.Value) -> bool:
        """Whether the op can be written where it is read: read once, in the body that defines it.
        Of loads, only those whose element is converted are."""
        op = self.ops.get(value.name)
        match self.readers(value):
            case [Reader(path, True)] if isinstance(op, (ir.Elementwise, ir.Cast)):
                return path[:-1] == self._paths[value.name][:-1]
            case [Reader(path, True)] if isinstance(op, ir.LoadTile) and self.alignments(value) is None:
                return path in self._casts and path[:-1] == self._paths[value.name][:-1]
            case _:
                return False

    def _place(self, reader: Reader, depth: int, owner: dict[Path, ir.Value]) -> int:
        """Where in a loop body, by index, the text that holds this read ends up."""
        value = owner.get(reader.path)
        if value is not None and len(reader.path) == depth + 1 and self.is_inlined(value):
            return self._place(self.readers(value)[0], depth, owner)
        return reader.path[depth]

    def updates_in_place(self, loop: ir.For[ir.Stmt], path: Path, item: ir.Carried) -> bool:
        """Whether `next` can be assigned to the carried variable itself: nobody reads the old value later."""
        place = self._paths.get(item.next.name)
        if (
            place is None
            or place[:-1] != path
            or isinstance(self.ops[item.next.name], (ir.Align, ir.Positions))
        ):
            return False
        if sum(other.next == item.next for other in loop.carried) > 1 or self.is_inlined(item.next):
            return False
        depth = len(path)
        owner = {(*path, n): stmt.value for n, stmt in enumerate(loop.body) if isinstance(stmt, ir.Let)}
        inside = [r for r in self.readers(item.value) if r.path[:depth] == path and len(r.path) > depth]
        return all(self._place(reader, depth, owner) <= place[-1] for reader in inside)

    def continues(self, path: Path, item: ir.Carried) -> bool:
        """Whether a loop takes over the variable of an earlier loop beside it, which nothing else reads."""
        if item.init.name not in self._loops:
            return False
        _, earlier = self._loops[item.init.name]
        depth = len(earlier)
        outside = [
            r for r in self.readers(item.init) if not (r.path[:depth] == earlier and len(r.path) > depth)
        ]
        return earlier[:-1] == path[:-1] and len(outside) == 1

    def load_order(self, value: ir.Value) -> tuple[str, ...]:
        """The order of dims to load a tile in: the one that all its readers permute it to, if they agree."""
        aligned = self.alignments(value)
        if isinstance(self.ops.get(value.name), ir.LoadTile) and aligned:
            orders = {form.dims for form in aligned}
            if len(orders) == 1 and set(aligned[0].dims) == set(value.dims):
                return aligned[0].dims
        return value.dims


def _statements(body: Sequence[ir.Stmt], path: Path = ()) -> Iterator[tuple[Path, ir.Stmt]]:
    for number, stmt in enumerate(body):
        here = (*path, number)
        yield here, stmt
        if isinstance(stmt, ir.For):
            yield from _statements(stmt.body, here)


def readers_of(kernel: ir.Kernel) -> Readers:
    found: dict[str, list[tuple[ir.Value | None, ir.Op]]] = {}
    for stmt in nested(kernel.body):
        if isinstance(stmt, ir.Let):
            for operand in operands(stmt.op):
                found.setdefault(operand.name, []).append((stmt.value, stmt.op))
        elif isinstance(stmt, ir.For):
            for item in stmt.carried:
                for value in (item.init, item.next):
                    found.setdefault(value.name, []).append((None, ir.Constant(0)))
    return found


def is_number(op: ir.Op | None, number: float) -> bool:
    """Whether an op makes this number, or a tile of it."""
    return isinstance(op, ir.Constant | ir.Fill) and op.number == number
