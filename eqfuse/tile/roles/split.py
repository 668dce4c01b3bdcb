"""A tile program as roles: one producer that copies tiles to rings, consumers that share the rows of the block.

Looks at loads, products and carried values alone. A kernel that has no roles says why: `Unsuited`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import Roles
from eqfuse.terms.dtypes import BYTES
from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.roles.columns import copies
from eqfuse.tile.roles.corrections import Corrections
from eqfuse.tile.roles.loads import Tensors, copied, ends_early, put
from eqfuse.tile.roles.pipeline import Source, pipelined, sources, straight
from eqfuse.tile.roles.rare import Axes, Rare, with_rare
from eqfuse.tile.roles.sharing import Led, led, shared, shared_axis
from eqfuse.tile.walk import defined, defined_by, nested, operands, ops_of, pruned, reads

STAGED_BYTES = 2
"""Bytes of the widest numbers of outputs that go through shared memory."""

GIVEN_SLOTS = 1
"""Slots of what a leader gives: it computes the next while the others multiply this."""

MULTIPLIED = ("f16", "bf16", "f8e4m3")
"""Dtypes whose products have roles."""


@dataclass(frozen=True)
class Setting:
    """What a kernel is divided for: its roles; whether all that is stored is `finite`; new names; and the
    rare loops that it has besides."""

    schedule: Roles
    tensors: Tensors
    finite: bool
    fresh: Fresh
    rares: tuple[Rare, ...] = ()

    @staticmethod
    def of(
        kernel: ir.Kernel, schedule: Roles, tensors: Tensors, rares: tuple[Rare, ...] = (), *, finite: bool
    ) -> Setting:
        theirs = [stmt for rare in rares for stmt in (*rare.lets, rare.loop)]
        names = (value.name for value in (*reads(kernel.body), *defined((*kernel.body, *theirs))))
        return Setting(schedule, tensors, finite, Fresh(names), rares)


def split(kernel: ir.Kernel, setting: Setting) -> tuple[warp.RolesKernel, dict[str, str]]:
    """The roles of a kernel, and the axes along which they go position by position, with what they are positions of. Raises
    Unsuited."""
    made = _Split(kernel, setting)
    return made.run(), made.units | made.rare.units | made.rare.steps


@dataclass(frozen=True)
class _Copy:
    """A load that the producer does."""

    ring: warp.Ring
    index: warp.Index


class _Split:
    def __init__(self, kernel: ir.Kernel, setting: Setting) -> None:
        self.kernel, self.schedule, self.fresh = kernel, setting.schedule, setting.fresh
        self.tensors, self.finite = setting.tensors, setting.finite
        self.units: dict[str, str] = {}
        self.body: tuple[warp.Stmt, ...] = kernel.body
        self.ops = ops_of(self.body)
        self.rows = self._rows()
        self._supported()
        self.columns = self._columns() if self.schedule.columns else None
        self.led: Led | None = None
        self.copies: dict[str, _Copy] = {}
        self.looped: dict[tuple[str, tuple[str, ...], str, int], warp.Ring] = {}
        """Rings of tiles in loops, by tensor, dims, dtype, and the number of the tile in its loop."""
        self._find_copies(self.body, in_loop=False)
        self.filled = self.body
        if self.columns is not None:
            self._share(self.columns)
        self.staging: dict[str, warp.Staging] = {}
        if setting.rares and self.columns is not None:
            raise Unsuited("consumers that share columns, and a rare loop")
        self.rare = Axes()
        self.body = with_rare(self.body, setting.rares, self.fresh, self.rare)

    def _rows(self) -> str:
        """The axis of the rows of all products, which the consumers share."""
        dots = [op for op in self.ops.values() if isinstance(op, ir.Dot)]
        in_loops = [s for s in self.body if isinstance(s, ir.For)]
        if not any(isinstance(op, ir.Dot) for loop in in_loops for op in ops_of((loop,)).values()):
            raise Unsuited("no loop multiplies matrices")
        for op in dots:
            if op.left.dtype not in MULTIPLIED:
                raise Unsuited(f"products of {op.left.dtype}")
            if op.left_mask or op.right_mask:
                raise Unsuited("products with masks")
            if len(op.left.dims) != 2 or len(op.right.dims) != 2:
                raise Unsuited("products of batches")
        if len({BYTES[op.left.dtype] for op in dots}) > 1:
            raise Unsuited("products of bytes and of wider numbers")
        rows = {op.left.dims[0] for op in dots}
        if len(rows) > 1:
            raise Unsuited(f"products with rows along {' and '.join(sorted(rows))}")
        (found,) = rows
        block = next(b for b in self.kernel.blocks if b.axis == found)
        if block.kind != "grid" or block.valid is not None:
            raise Unsuited(f"the rows {found} of products are not divided among thread blocks")
        parts = 1 if self.schedule.columns else self.schedule.consumers
        if block.size is None or block.size % parts:
            raise Unsuited(f"{block.size} rows are not divided by {parts}")
        return found

    def _supported(self) -> None:
        for op in self.ops.values():
            match op:
                case ir.Search(tensor):
                    raise Unsuited(f"a search in {tensor!r}")
                case ir.FoldTile() | ir.RankTile() | ir.MergeTile():
                    raise Unsuited(f"the reduction {op.op.partition('.')[0]}")
                case ir.ScanTile(_, _, _, axis):
                    raise Unsuited(f"a scan along {axis}")
                case ir.ReduceTile(_, _, axis) if axis == self.rows:
                    raise Unsuited(f"a reduction over the rows {axis}")

    def _columns(self) -> warp.Columns:
        axis = shared_axis(self.body, self.rows)
        parts = self.schedule.consumers - self.schedule.led
        return warp.Columns(axis, self.fresh.value(f"{axis}_part", (), "i32").name, parts)

    def _share(self, columns: warp.Columns) -> None:
        """What consumers do that share columns, in the place of what the tiles of the kernel do."""
        block = next(b for b in self.kernel.blocks if b.axis == columns.axis)
        if block.size is not None and block.size % columns.parts:
            raise Unsuited(f"{block.size} columns are not divided by {columns.parts}")
        self.body = shared(self.body, columns, self.copies, self.fresh)
        self.ops = ops_of(self.body)
        self.tensors = replace(self.tensors, root={**self.tensors.root, columns.part: columns.axis})
        if self.schedule.led:
            turn = self.fresh.value("turn_given", (), "i32")
            self.led = led(self.body, columns, self.copies, GIVEN_SLOTS, turn)

    # What the producer copies ---------------------------------------------------------------------------

    def _find_copies(self, body: Sequence[warp.Stmt], *, in_loop: bool) -> None:
        seen: dict[str, int] = {}
        is_outer = in_loop and any(isinstance(stmt, ir.For) for stmt in body)
        for stmt in body:
            match stmt:
                case ir.Let(value, ir.LoadTile(tensor) as op) if len(value.dims) == 2:
                    if not in_loop and not self._is_multiplied(value):
                        continue
                    if is_outer:
                        raise Unsuited(f"{tensor} is loaded in a loop beside an inner one")
                    whole = self.finite or self._is_operand(value)
                    index = copied(value, op, self.ops, self.tensors, whole=whole)
                    number = seen[tensor] = seen.get(tensor, 0) + 1
                    self.copies[value.name] = _Copy(self._ring(value, tensor, number, in_loop), index)
                case ir.Let(value, ir.LoadTile(tensor) as op) if (
                    in_loop and not is_outer and self._is_column(value, op)
                ):
                    index = copied(value, op, self.ops, self.tensors, whole=True)
                    number = seen[tensor] = seen.get(tensor, 0) + 1
                    self.copies[value.name] = _Copy(self._ring(value, tensor, number, in_loop), index)
                case ir.Let(value, ir.LoadTile(tensor)) if len(value.dims) > 2:
                    raise Unsuited(f"the load of {tensor} has {len(value.dims)} dims")
                case ir.For():
                    self._find_copies(stmt.body, in_loop=True)

    def _is_multiplied(self, value: ir.Value) -> bool:
        """Whether a product reads a tile. What is only computed with, once, consumers load where it is."""
        readers = [s for s in nested(self.body) if any(v.name == value.name for v in operands(s))]
        aligned = [s.value for s in readers if isinstance(s, ir.Let) and isinstance(s.op, ir.Align)]
        multiplied = (
            isinstance(s, ir.Let) and isinstance(s.op, ir.Dot | ir.NonFiniteCorrection) for s in readers
        )
        return any(multiplied) or any(map(self._is_multiplied, aligned))

    def _is_column(self, value: ir.Value, op: ir.LoadTile) -> bool:
        """Whether a load is of a number for each column of tiles, which the copy engine can copy: what consumers load themselves
        takes registers from before the products of a block until it is used."""
        return (
            len(value.dims) == 1 and value.dims != (self.rows,) and copies(value, op, self.ops, self.tensors)
        )

    def _is_operand(self, value: ir.Value) -> bool:
        """Whether products alone read a tile, of which those that sum along an axis whose positions are masked take it on their
        right: these add what is not finite by themselves, and others leave it in rows or columns that are masked later."""
        early = {axis for bound in self._bounds(value) for axis in bound.dims}
        for stmt in nested(self.body):
            if not any(v.name == value.name for v in operands(stmt)):
                continue
            match stmt:
                case ir.Let(same, ir.Align()):
                    if not self._is_operand(same):
                        return False
                case ir.Let(_, ir.Dot(left, _, axis)):
                    if left.name == value.name and axis in early:
                        return False
                case ir.Let(_, ir.NonFiniteCorrection(left)) if left.name != value.name:
                    pass
                case _:
                    return False
        return True

    def _bounds(self, value: ir.Value) -> list[ir.Value]:
        """The bounds in the mask of a tile, its dims in any order, that end before its tensor does."""
        match self.ops[value.name]:
            case ir.Align(source):
                return self._bounds(source)
            case ir.LoadTile() as load:
                return ends_early(load, value, self.ops, self.tensors)
        return []

    def _ring(self, value: ir.Value, tensor: str, number: int, in_loop: bool) -> warp.Ring:
        """The ring of the n-th tile of a tensor: one for all loops that have such a tile, and each tile outside of loops has its own."""
        kind = tensor, value.dims, value.dtype, number
        if in_loop and kind in self.looped:
            return self.looped[kind]
        of_tensor = [ring for ring in self.looped.values() if ring.tensor == tensor]
        number = len(of_tensor) + 1 if in_loop else number
        name = f"{tensor}_tiles" if in_loop else f"{tensor}_tile"
        name += "" if number == 1 else f"_{number}"
        slots = self.schedule.slots if in_loop else 2 if self.schedule.ahead else 1
        parts = self.schedule.consumers if self.rows in value.dims and self.columns is None else 1
        ring = warp.Ring(name, tensor, value, slots, parts, in_loop)
        if in_loop:
            self.looped[kind] = ring
        return ring

    # Roles ----------------------------------------------------------------------------------------------

    def run(self) -> warp.RolesKernel:
        kernel, schedule = self.kernel, self.schedule
        persistent = schedule.persistent
        producer = self._role(self._producer)
        rings = tuple(dict.fromkeys(copy.ring for copy in self.copies.values()))
        if self.led is None:
            body = self._consuming(self.body)
            consumers = [warp.Role("consumer", part, body) for part in range(schedule.consumers)]
        else:
            others, leader = self._consuming(self.led.others), self._consuming(self.led.leader)
            consumers = [warp.Role("consumer", part, others) for part in range(schedule.consumers - 1)]
            consumers.append(warp.Role("leader", schedule.consumers - 1, leader))
            rings = tuple(
                replace(ring, readers=_readers(ring, consumers))
                for ring in (*rings, *self.led.given.values())
            )
        # Items of like lengths run side by side: the axis along which they differ varies slowest.
        grid = sorted(kernel.grid, key=kernel.backwards.__contains__) if persistent else kernel.grid
        roles = (warp.Role("producer", None, producer), *consumers)
        return warp.RolesKernel(
            kernel.name,
            tuple(grid),
            (*kernel.blocks, *(Block(unit, "unit", 1) for unit in self.units), *self.rare.blocks),
            kernel.backwards,
            self.rows,
            schedule.consumers,
            rings,
            tuple(self.staging.values()),
            roles,
            persistent,
            columns=self.columns,
        )

    def _consuming(self, body: tuple[warp.Stmt, ...]) -> tuple[warp.Stmt, ...]:
        """A consumer's role, which does what a body says."""
        self.body = body
        made = self._role(self._consumer)
        self._in_registers(made)
        return made

    def _role(
        self, make: Callable[[ir.Value, ir.Value, ir.Value], tuple[list[warp.Stmt], ir.Value, ir.Value]]
    ) -> tuple[warp.Stmt, ...]:
        """A role's body: `make` gives that of one item, the next turn of the rings that loops fill, and how often consumers have
        met, from the turns of rings that loops do not fill and of those that they do, and from how often they had met."""
        zero = self.fresh.value("no_turn", (), "i32")
        if not self.schedule.persistent:
            return pruned((ir.Let(zero, ir.Constant(0)), *make(zero, zero, zero)[0]))
        item, turn, met, one, following = (
            self.fresh.value(n, (), "i32") for n in ("item", "turn_of_item", "met", "one", "item_next")
        )
        body, last, met_after = make(item, turn, met)
        count = (ir.Let(one, ir.Constant(1)), ir.Let(following, ir.Elementwise("add", (item, one))))
        carried = (
            ir.Carried(item, zero, following),
            ir.Carried(turn, zero, last),
            ir.Carried(met, zero, met_after),
        )
        return pruned((ir.Let(zero, ir.Constant(0)), ir.PersistentLoop(carried, (*body, *count))))

    def _in_registers(self, body: Sequence[warp.Stmt]) -> None:
        """Raises Unsuited for a tile that no part of the rows has."""
        rare = {id(s) for loop in nested(body) if isinstance(loop, ir.For) and loop.rare for s in loop.body}
        for stmt in nested(body):
            for value in defined_by(stmt) if id(stmt) not in rare else ():
                if len(value.dims) > 2 or (len(value.dims) == 2 and value.dims[0] != self.rows):
                    raise Unsuited(f"it computes with a tile of {', '.join(value.dims)}")

    def _producer(
        self, item: ir.Value, turn: ir.Value, met: ir.Value
    ) -> tuple[list[warp.Stmt], ir.Value, ir.Value]:
        """The copies, in the order of the loads, and the integers that they need."""
        turns: dict[str, ir.Value] = {}
        made: list[warp.Stmt] = []
        for stmt in self.filled:
            match stmt:
                case ir.Let(value, ir.LoadTile()) if value.name in self.copies:
                    copy = self.copies[value.name]
                    if self.schedule.persistent:
                        made.append(warp.Wait(copy.ring.name, "empty", item, before=True))
                    made.append(warp.AsyncCopy(copy.ring.name, item, copy.index))
                case ir.Let(_, op) if not isinstance(op, ir.Dot):
                    made.append(stmt)
                case ir.For():
                    made += self._filled(stmt, turns, turn)
        return made, self._last(turns, turn), met

    def _last(self, turns: Mapping[str, ir.Value], turn: ir.Value) -> ir.Value:
        """The next turn of all rings that loops fill, which is one in a persistent grid."""
        looped = {c.ring.name for c in self.copies.values() if c.ring.name not in self._outside()}
        last = {turns.get(ring, turn) for ring in looped}
        if self.led is not None and len(last) > 1:  # rings that others read
            last -= {turn}
        if len(last) > 1 and self.schedule.persistent:
            raise Unsuited("loops fill rings in different turns")
        return last.pop() if last else turn

    def _outside(self) -> set[str]:
        """The rings of loads outside of loops."""
        loads = {s.value.name for s in self.filled if isinstance(s, ir.Let)}
        return {copy.ring.name for name, copy in self.copies.items() if name in loads}

    def _filled(
        self, loop: ir.For[warp.Stmt], turns: dict[str, ir.Value], zero: ir.Value
    ) -> Iterator[warp.Stmt]:
        """The producer's form of a loop; `turns` are the next ones of the rings."""
        if _is_outer(loop):
            yield self._filled_inside(loop, turns, zero)
            return
        lets = [s for s in loop.body if isinstance(s, ir.Let)]
        copies = [self.copies[let.value.name] for let in lets if let.value.name in self.copies]
        if not copies:
            return
        begin = {turns.get(copy.ring.name, zero) for copy in copies}
        if len(begin) > 1:
            raise Unsuited("loops fill rings in different turns")
        turn, one, following = (self.fresh.value(n, (), "i32") for n in ("turn", "one", "turn_next"))
        fills: list[warp.Stmt] = []
        for copy in copies:
            fills.append(warp.Wait(copy.ring.name, "empty", turn, before=True))
            fills.append(warp.AsyncCopy(copy.ring.name, turn, copy.index))
        count = (ir.Let(one, ir.Constant(1)), ir.Let(following, ir.Elementwise("add", (turn, one))))
        offsets = (s for s in lets if not isinstance(s.op, ir.Dot | ir.LoadTile) or not s.value.dims)
        carried = (ir.Carried(turn, begin.pop(), following),)
        yield ir.For(loop.axis, loop.start, loop.stop, carried, (*offsets, *fills, *count))
        turns |= dict.fromkeys((copy.ring.name for copy in copies), turn)

    def _filled_inside(
        self, loop: ir.For[warp.Stmt], turns: dict[str, ir.Value], zero: ir.Value
    ) -> warp.Stmt:
        """The same for a loop of loops, which carries the turns of the rings that they fill."""
        rings = self._inside(loop)
        turn = self.fresh.value("turn_of_block", (), "i32")
        inside, body = dict.fromkeys(rings, turn), list[warp.Stmt]()
        for stmt in loop.body:
            if isinstance(stmt, ir.For):
                body += self._filled(stmt, inside, turn)
            elif isinstance(stmt, ir.Let) and not (isinstance(stmt.op, ir.LoadTile) and stmt.value.dims):
                body.append(stmt)
        carried = ir.Carried(
            turn, _one_turn(turns.get(ring, zero) for ring in rings), _one_turn(inside.values())
        )
        turns |= dict.fromkeys(rings, turn)
        return ir.For(loop.axis, loop.start, loop.stop, (carried,), tuple(body))

    def _inside(self, loop: ir.For[warp.Stmt]) -> list[str]:
        """The rings that the loops inside of a loop fill."""
        names = (s.value.name for s in nested(loop.body) if isinstance(s, ir.Let))
        return list(dict.fromkeys(self.copies[name].ring.name for name in names if name in self.copies))

    def _pipelined_inside(
        self,
        loop: ir.For[warp.Stmt],
        rings: Mapping[str, warp.Ring],
        outside: Mapping[str, Source],
        turns: Mapping[str, ir.Value],
        item: ir.Value,
    ) -> tuple[list[warp.Stmt], dict[str, ir.Value]]:
        """A consumer's form of a loop of loops, and the turns of its rings after it."""
        used = self._inside(loop)
        beside = [stmt for stmt in loop.body if not isinstance(stmt, ir.For)]
        for name in [v.name for stmt in nested(beside) for v in operands(stmt)]:
            if name in outside or name in rings:
                raise Unsuited(f"{name} is read from shared memory beside an inner loop")
        turn = self.fresh.value("turn_of_block", (), "i32")
        inside: dict[str, ir.Value] = {**turns, **dict.fromkeys(used, turn)}
        body: list[warp.Stmt] = []
        for stmt in loop.body:
            if isinstance(stmt, ir.For):
                made, inside = pipelined(stmt, rings, outside, inside, frozenset(), self.fresh, item)
                body += made
            else:
                body.append(stmt)
        last = _one_turn(inside[ring] for ring in used)
        carried = (*loop.carried, ir.Carried(turn, _one_turn(turns[ring] for ring in used), last))
        return [replace(loop, carried=carried, body=tuple(body))], {**turns, **dict.fromkeys(used, turn)}

    def _consumer(
        self, item: ir.Value, turn: ir.Value, met: ir.Value
    ) -> tuple[list[warp.Stmt], ir.Value, ir.Value]:
        rings = {name: copy.ring for name, copy in self.copies.items()}
        rings |= {} if self.led is None else self.led.given
        corrections = Corrections(self.ops, rings, self.fresh)
        top = [stmt for stmt in self.body if not isinstance(stmt, ir.For)]
        outside = sources(top, rings)
        turns: dict[str, ir.Value] = {}
        waited: set[str] = set()
        made: list[warp.Stmt] = []
        run: list[warp.Stmt] = []
        for stmt in self.body:
            if isinstance(stmt, warp.StoreShared):
                if self.schedule.persistent:  # an item before has filled the slot
                    run.append(warp.Wait(stmt.ring, "empty", item, before=True))
                run.append(replace(stmt, turn=item))
                continue
            if not isinstance(stmt, ir.For):
                run += self._stored(stmt)
                continue
            made += straight(run, outside, item, self.fresh)
            waited |= _waits(run, outside)
            run = []
            for ring in dict.fromkeys(s.ring.name for s in outside.values()):
                if ring not in waited and _reads(stmt, outside, ring):
                    waited.add(ring)
                    made.append(warp.Wait(ring, "full", item))
            known = {ring.name: turns.get(ring.name, turn) for ring in rings.values()}
            if _is_outer(stmt):
                body, turns = self._pipelined_inside(stmt, rings, outside, known, item)
                made += body
                continue
            delayed = frozenset(self.schedule.delayed)
            loop, met = corrections.loop(stmt, met, item)
            body, turns = pipelined(loop, rings, outside, known, delayed, self.fresh, item)
            made += body
        after = straight(run, outside, item, self.fresh)
        if self.schedule.persistent:
            late = [ring for ring in sorted(waited | _waits(run, outside))]
            if any(_reads_any(run, outside, ring) for ring in late):
                raise Unsuited("a tile is read behind all loops")
            made += [warp.ReleaseSlot(ring, item) for ring in late]
        self.units |= corrections.units
        return [*made, *after], self._last(turns, turn), met

    def _stored(self, stmt: warp.Stmt) -> list[warp.Stmt]:
        """A store of a tile of two dims goes through shared memory, where the copy engine can put it. Of wide numbers, those that
        four threads hold beside each other fill a sector of memory anyway."""
        if (
            not isinstance(stmt, ir.Store)
            or len(stmt.value.dims) != 2
            or BYTES[stmt.value.dtype] > STAGED_BYTES
        ):
            return [stmt]
        # Consumers that share columns have no room beside tiles of so many: they store rows of their part.
        index = None if self.columns else put(stmt, self.ops, self.tensors)
        if index is None:
            return [stmt]
        name = self.fresh.value(f"{stmt.tensor}_staging", (), "i32").name
        over = None if self.schedule.persistent else self._finished(stmt.value, index)
        self.staging[name] = warp.Staging(name, stmt.tensor, stmt.value, over)
        return [warp.Put(name, stmt.tensor, index, stmt.value)]

    def _finished(self, tile: ir.Value, index: warp.Index) -> str | None:
        """A ring of one such tile, which is not filled again and whose part this consumer alone reads. Whether both have as
        many positions may be known at launch alone."""
        taken = {staging.over for staging in self.staging.values()}
        blocks = {b.axis: b.size for b in self.kernel.blocks}
        for copy in self.copies.values():
            ring = copy.ring
            alike = ring.slots == 1 and ring.parts > 1 and ring.tile.dtype == tile.dtype
            alike = alike and [isinstance(p, warp.Along) for p in copy.index] == [
                isinstance(p, warp.Along) for p in index
            ]
            if alike and ring.name in self._outside() and ring.name not in taken:
                sizes = [
                    (blocks.get(a), blocks.get(b)) for a, b in zip(ring.tile.dims, tile.dims, strict=True)
                ]
                if all(a == b or None in (a, b) for a, b in sizes):
                    return ring.name
        return None


def _readers(ring: warp.Ring, consumers: Sequence[warp.Role]) -> int:
    """How many consumers free the slots of a ring; 0 for all of them, or where none are freed."""
    freeing = sum(
        any(isinstance(s, warp.ReleaseSlot) and s.ring == ring.name for s in nested(r.body))
        for r in consumers
    )
    return 0 if freeing == len(consumers) else freeing


def _waits(run: Sequence[warp.Stmt], outside: Mapping[str, Source]) -> set[str]:
    return {source.ring.name for source in outside.values() if _reads_any(run, outside, source.ring.name)}


def _reads_any(run: Sequence[warp.Stmt], outside: Mapping[str, Source], ring: str) -> bool:
    return any(
        _reads(stmt, outside, ring)
        for stmt in run
        if not (isinstance(stmt, ir.Let) and stmt.value.name in outside)
    )


def _reads(stmt: warp.Stmt, outside: Mapping[str, Source], ring: str) -> bool:
    return any(v.name in outside and outside[v.name].ring.name == ring for v in reads((stmt,)))


def _is_outer(loop: ir.For[warp.Stmt]) -> bool:
    """Whether a loop has loops inside."""
    return any(isinstance(stmt, ir.For) for stmt in loop.body)


def _one_turn(turns: Iterable[ir.Value]) -> ir.Value:
    """The turn that rings have in common. Raises Unsuited."""
    found = set(turns)
    if len(found) != 1:
        raise Unsuited("loops fill rings in different turns")
    return found.pop()
