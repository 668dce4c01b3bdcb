"""Software pipelining of a consumer's loop: products are issued, awaited and, where asked, run one block behind.

Every statement of a loop's body has a stage, 0 or 1. In one trip, stage 0 works on a block and stage 1 on the block before
it. Products that are `delayed` have stage 1, and so has what follows from them in the same block; all else has stage 0.

    for j:                          stage 0 of the first block
      s = dot(q, k)                 for j, from the second block on:
      p = exp2(s)             ->      issue s = dot(q, k);  issue o = o + dot(p, v before);  await s
      o = o + dot(p, v)               p = exp2(s);  await o
                                    stage 1 of the last block

A product that starts from the result of another, which nothing else reads, is issued behind it without an await between them:
the matrix unit adds them up in order.

What stage 1 reads of stage 0 is carried. A statement may read a value that stage 1 leaves for the next block: it runs
after it in the same trip. Products are issued as early as what they read is there, awaited where their result is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.terms.dtypes import BYTES
from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.roles.nodes import (
    AnyNonFinite,
    At,
    LoadShared,
    MmaAsync,
    MmaWait,
    ReleaseSlot,
    Ring,
    Stmt,
    StoreShared,
    View,
    Wait,
    ZeroNonFinite,
)
from eqfuse.tile.walk import defined, defined_by, nested, operands, reads, renamed

Turns = Mapping[str, ir.Value]
"""The next turn of each ring."""


@dataclass(frozen=True)
class Source:
    """A value that is the tile in a slot, its dims in some order."""

    ring: Ring
    dims: tuple[str, ...]


def sources(body: Iterable[Stmt], rings: Mapping[str, Ring]) -> dict[str, Source]:
    """Which values of a body are tiles of rings, given the ring of each load: loads, and their transposes and parts."""
    found: dict[str, Source] = {}
    for stmt in body:
        match stmt:
            case ir.Let(value, ir.LoadTile()) if value.name in rings:
                found[value.name] = Source(rings[value.name], value.dims)
            case ir.Let(value, ir.Align(of)) if of.name in found and len(value.dims) == len(of.dims):
                found[value.name] = replace(found[of.name], dims=value.dims)
    return found


def pipelined(
    loop: ir.For[Stmt],
    rings: Mapping[str, Ring],
    outside: Mapping[str, Source],
    turns: Turns,
    delayed: frozenset[int],
    fresh: Fresh,
    zero: ir.Value,
) -> tuple[list[Stmt], dict[str, ir.Value]]:
    """A consumer's loop, and the turns of its rings after it. `outside` are tiles that are in slots before the loop, `zero`
    is the turn of those. Raises Unsuited."""
    return _Pipeline(loop, rings, outside, turns, delayed, fresh, zero).run()


def straight(body: Sequence[Stmt], found: Mapping[str, Source], turn: ir.Value, fresh: Fresh) -> list[Stmt]:
    """Statements outside of loops: every product is awaited at once."""
    made: list[Stmt] = []
    waited: set[str] = set()
    for stmt in body:
        read = _rings_read(stmt, found)
        if isinstance(stmt, ir.Let) and stmt.value.name in found:
            continue
        for ring in read:
            if ring not in waited:
                waited.add(ring)
                made.append(Wait(ring, "full", turn))
        views = {name: View(s.ring.name, turn, s.dims) for name, s in found.items()}
        if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot):
            pending = fresh.like(stmt.value, "pending")
            made += [_issue(pending, stmt.op, views, found), MmaWait(stmt.value, pending, 0)]
        else:
            made += [*_registers(stmt, views, made), stmt]
    return made


def _registers(stmt: Stmt, views: Mapping[str, View], before: Sequence[Stmt]) -> Iterator[Stmt]:
    """What brings the tiles of slots that a statement computes with to registers, under their own names."""
    there = {v.name for s in before for v in defined_by(s)}
    for value in reads((stmt,)):
        if value.name in views and value.name not in there:
            there.add(value.name)
            yield LoadShared(value, views[value.name])


def _rings_read(stmt: Stmt, found: Mapping[str, Source]) -> list[str]:
    return list(dict.fromkeys(found[v.name].ring.name for v in reads((stmt,)) if v.name in found))


def _issue(pending: ir.Value, op: ir.Dot, views: Mapping[str, View], found: Mapping[str, Source]) -> MmaAsync:
    if op.right.name not in views:
        raise Unsuited(f"the right operand {op.right.name} of a product is computed")
    left = views.get(op.left.name, op.left)
    if (
        BYTES[op.left.dtype] == 1
    ):  # such tiles are read along the positions that are summed, from shared memory alone
        if isinstance(left, ir.Value):
            raise Unsuited(f"the left operand {left.name} of a product of {left.dtype} is computed")
        for side, tile in ((left, op.left), (views[op.right.name], op.right)):
            ring = next(source.ring for source in found.values() if source.ring.name == side.ring)
            if ring.tile.dims[-1] != op.axis:
                raise Unsuited(f"{tile.name} is a tile of {tile.dtype} whose last dim is not {op.axis}")
    return MmaAsync(pending, left, views[op.right.name], op.axis, op.accumulator)


class _Pipeline:
    def __init__(
        self,
        loop: ir.For[Stmt],
        rings: Mapping[str, Ring],
        outside: Mapping[str, Source],
        turns: Turns,
        delayed: frozenset[int],
        fresh: Fresh,
        zero: ir.Value,
    ) -> None:
        self.loop, self.fresh, self.zero = loop, fresh, zero
        self.inside = sources(loop.body, rings)
        self.outside = outside
        self.body: list[Stmt] = [s for s in self._read_first(loop.body)]
        self.used = list(dict.fromkeys(s.ring.name for s in self.inside.values()))
        self.turns = dict(turns)
        first = {self.turns[ring] for ring in self.used}
        if len(first) > 1:
            raise Unsuited("loops fill rings in different turns")
        self.turn = first.pop() if first else zero
        self.definers = {v.name: n for n, s in enumerate(self.body) for v in defined_by(s)}
        self.carried = {item.value.name: item for item in loop.carried}
        products = [n for n, s in enumerate(self.body) if _is_product(s)]
        self.delayed = {products[number] for number in delayed if number < len(products)}
        self.stages = self._stages()
        self.chained = self._chained()
        self.order = list(self._order())

    def _read_first(self, body: Sequence[Stmt]) -> Iterator[Stmt]:
        """The body with reads of slots in the place of loads, where something computes with the tile."""
        tiles = {**self.outside, **self.inside}
        wanted = {
            value.name
            for stmt in body
            if not (isinstance(stmt, ir.Let) and stmt.value.name in self.inside)
            for each in nested((stmt,))
            for value in _in_registers(each)
        }
        done: set[str] = set()
        for stmt in body:
            for name in [value.name for value in reads((stmt,))]:
                if name in self.outside and name in wanted and name not in done:
                    raise Unsuited(f"{name} is read from shared memory in a loop")
            if isinstance(stmt, ir.Let) and stmt.value.name in self.inside:
                if stmt.value.name in wanted:
                    source = tiles[stmt.value.name]
                    done.add(stmt.value.name)
                    yield LoadShared(stmt.value, View(source.ring.name, self.zero, source.dims))
            else:
                yield stmt

    # Stages and order ---------------------------------------------------------------------------------

    def _reads(self, number: int) -> list[ir.Value]:
        stmt = self.body[number]
        own = {value.name for value in defined((stmt,))} if isinstance(stmt, ir.If) else set()
        return [value for value in reads((stmt,)) if value.name not in own]

    def _stages(self) -> list[int]:
        found: list[int] = []
        for number in range(len(self.body)):
            before = (self.definers.get(value.name) for value in self._reads(number))
            stage = max((found[n] for n in before if n is not None and n < number), default=0)
            found.append(1 if number in self.delayed else stage)
            if found[-1] and any(isinstance(each, AnyNonFinite) for each in nested((self.body[number],))):
                raise Unsuited("what a masked product leaves out follows from a product one block behind")
        return found

    def _leaves(self, name: str) -> int:
        """The stage that leaves a carried value for the next block."""
        following = self.carried[name].next.name
        if following in self.carried:
            return 0
        return self.stages[self.definers[following]] if following in self.definers else 0

    def _chained(self) -> dict[int, int]:
        """Products, and those from whose results they start, which nothing else reads."""
        ends = [item.next.name for item in self.loop.carried]
        read = [v.name for n in range(len(self.body)) for v in self._reads(n)] + ends
        found: dict[int, int] = {}
        for number, stmt in enumerate(self.body):
            if not (isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot) and stmt.op.accumulator):
                continue
            start = self.definers.get(stmt.op.accumulator.name)
            if (
                start is None
                or not _is_product(self.body[start])
                or self.stages[start] != self.stages[number]
            ):
                continue
            if read.count(stmt.op.accumulator.name) == 1:
                found[number] = start
        return found

    def _needs(self, number: int) -> Iterator[int]:
        """The statements that come before one in the same trip."""
        for value in self._reads(number):
            definer = self.definers.get(value.name)
            if definer is not None and definer == self.chained.get(number):
                continue  # issued before, not awaited
            if definer is not None and self.stages[definer] == self.stages[number]:
                yield definer
            elif value.name in self.carried and self.stages[number] == 0 and self._leaves(value.name) == 1:
                yield self.definers[self.carried[value.name].next.name]
        names = {value.name for value in defined_by(self.body[number])}
        if self.stages[number] == 0:  # registers that a product of the block before still reads
            yield from (
                n
                for n, s in enumerate(self.body)
                if self.stages[n] == 1 and isinstance(s, ir.Let) and isinstance(s.op, ir.Dot)
                if s.op.left.name in names
            )

    def _order(self) -> Iterator[tuple[str, int]]:
        """What happens in a trip, in order: ("do", n), ("issue", n), ("await", n)."""
        needs = {n: set(self._needs(n)) for n in range(len(self.body))}
        left, done, under_way = list(needs), set[int](), list[int]()
        late = self._columns()
        while left or under_way:
            products = [
                n
                for n in left
                if _is_product(self.body[n]) and needs[n] <= done and self.chained.get(n) not in left
            ]
            if products:
                number = min(products, key=lambda n: (self.stages[n], n))
                left.remove(number)
                under_way.append(number)
                yield "issue", number
                continue
            ready = [n for n in left if n not in late and needs[n] - done <= late]
            if ready:
                number = ready[0]
                for before in (*(n for n in left if n in self._before(number, needs, done)), number):
                    left.remove(before)
                    done.add(before)
                    yield "do", before
                continue
            waiting = [n for n in left if n not in late and needs[n] <= done | late | set(under_way)]
            if not waiting and left:
                raise Unsuited("the products of a loop wait for each other")
            wanted = needs[waiting[0]] - done - late if waiting else set(under_way)
            last = max(under_way.index(n) for n in wanted)
            for number in under_way[: last + 1]:
                done.add(number)
                yield "await", number
            under_way = under_way[last + 1 :]

    def _columns(self) -> set[int]:
        """What is read of slots for each column of tiles, and numbers of columns made of it: they are in registers only from where
        a tile is computed with them. No product is needed for them."""
        found: set[int] = set()
        for number, stmt in enumerate(self.body):
            if isinstance(stmt, ir.Let) and (len(stmt.value.dims) < 2 or isinstance(stmt.op, ir.Align)):
                definers = {self.definers.get(value.name) for value in self._reads(number)}
                if definers & found:
                    found.add(number)
            elif isinstance(stmt, LoadShared) and len(stmt.value.dims) == 1:
                found.add(number)
        return found

    @staticmethod
    def _before(number: int, needs: Mapping[int, set[int]], done: set[int]) -> set[int]:
        """What a statement needs, directly or not, that is not done."""
        found: set[int] = set()
        wanted = list(needs[number] - done)
        while wanted:
            each = wanted.pop()
            found.add(each)
            wanted += needs[each] - done - found
        return found

    # Text of one trip ---------------------------------------------------------------------------------

    def _copy(
        self, stage: int | None, env: Sequence[dict[str, ir.Value]], turns: Sequence[ir.Value]
    ) -> list[Stmt]:
        """The statements of a stage, or of both, with values as `env` of each stage calls them; what they define is
        added to it."""
        made: list[Stmt] = []
        waited: set[str] = set()
        chosen = [(what, n) for what, n in self.order if stage is None or self.stages[n] == stage]
        pending: dict[int, ir.Value] = {}
        for place, (what, number) in enumerate(chosen):
            at = self.stages[number]
            names, stmt = env[at], self.body[number]
            if what != "await":
                for ring in self._rings_of(number):
                    late = ring in waited or self._first_stage(ring) != at
                    if not late and not self._waits(number, ring):
                        waited.add(ring)
                        made.append(Wait(ring, "full", turns[at]))
            if what == "issue":
                assert isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot)
                op = stmt.op
                pending[number] = self.fresh.like(stmt.value, "pending")
                tiles = {**self.outside, **self.inside}
                views = {
                    name: View(s.ring.name, self.zero if name in self.outside else turns[at], s.dims)
                    for name, s in tiles.items()
                }
                start = None if op.accumulator is None else names.get(op.accumulator.name, op.accumulator)
                start = pending[self.chained[number]] if number in self.chained else start
                left = op.left if op.left.name in views else names.get(op.left.name, op.left)
                made.append(_issue(pending[number], replace(op, left=left, accumulator=start), views, tiles))
            elif number in self.chained.values():
                continue  # what starts from its result is awaited
            elif what == "await":
                assert isinstance(stmt, ir.Let)
                names[stmt.value.name] = self.fresh.like(stmt.value, "of") if stage != None else stmt.value
                later = sum(w == "issue" for w, _ in chosen[:place]) - sum(
                    w == "await" for w, _ in chosen[:place]
                )
                made.append(MmaWait(names[stmt.value.name], pending[number], later - 1))
            else:
                if stage is not None:
                    names |= {value.name: self.fresh.like(value, "of") for value in defined((stmt,))}
                if isinstance(stmt, StoreShared):
                    made.append(Wait(stmt.ring, "empty", turns[at], before=True))
                made.append(self._at_turn(renamed(stmt, names), turns[at]))
            if what != "issue":
                made += [
                    ReleaseSlot(ring, turns[at])
                    for ring in self._rings_of(number)
                    if self._is_last(ring, place, chosen, at)
                ]
        return made

    def _at_turn(self, stmt: Stmt, turn: ir.Value) -> Stmt:
        """A statement, and those inside of it, that read slots of the loop's rings: those of this turn."""
        match stmt:
            case LoadShared(view=view) | AnyNonFinite(view=view) | ZeroNonFinite(view):
                return replace(stmt, view=replace(view, turn=turn)) if view.ring in self.used else stmt
            case Wait() | StoreShared():
                return replace(stmt, turn=turn)
            case ir.If(body=body) | ir.For(body=body):
                return replace(stmt, body=tuple(self._at_turn(inner, turn) for inner in body))
            case _:
                return stmt

    def _rings_of(self, number: int) -> list[str]:
        stmt = self.body[number]
        views = [
            s.view.ring for s in nested((stmt,)) if isinstance(s, LoadShared | AnyNonFinite | ZeroNonFinite)
        ]
        before = self._rings_of(self.chained[number]) if number in self.chained else []
        return list(dict.fromkeys((*before, *views, *_rings_read(stmt, self.inside))))

    def _readers(self, ring: str) -> list[int]:
        return [n for n in range(len(self.body)) if ring in self._rings_of(n)]

    def _first_stage(self, ring: str) -> int:
        return min(self.stages[n] for n in self._readers(ring) if not self._waits(n, ring))

    def _waits(self, number: int, ring: str) -> bool:
        """Whether a statement waits for a ring by itself, where it reads it at all."""
        return any(isinstance(s, Wait) and s.ring == ring for s in nested((self.body[number],)))

    def _is_last(self, ring: str, place: int, chosen: Sequence[tuple[str, int]], stage: int) -> bool:
        """Whether nothing reads a ring's tile after this place."""
        if stage != max(self.stages[n] for n in self._readers(ring)):
            return False
        return not any(ring in self._rings_of(n) and self.stages[n] == stage for _, n in chosen[place + 1 :])

    # The loop -----------------------------------------------------------------------------------------

    def run(self) -> tuple[list[Stmt], dict[str, ir.Value]]:
        return self._in_step() if not any(self.stages) else self._behind()

    def _next_turn(self, turn: ir.Value, wanted: str) -> tuple[list[Stmt], ir.Value]:
        one = self.fresh.value("one", (), "i32")
        following = self.fresh.value(wanted, (), "i32")
        return [ir.Let(one, ir.Constant(1)), ir.Let(following, ir.Elementwise("add", (turn, one)))], following

    def _in_step(self) -> tuple[list[Stmt], dict[str, ir.Value]]:
        loop = self.loop
        turn = self.fresh.value("turn", (), "i32")
        env: dict[str, ir.Value] = {}
        body = self._copy(None, (env, env), (turn, turn))
        count, following = self._next_turn(turn, "turn_next")
        carried = [*loop.carried, *((ir.Carried(turn, self.turn, following),) if self.used else ())]
        made = replace(loop, carried=tuple(carried), body=(*body, *count))
        return [made], {**self.turns, **dict.fromkeys(self.used, turn)}

    def _behind(self) -> tuple[list[Stmt], dict[str, ir.Value]]:
        loop, fresh = self.loop, self.fresh
        size = fresh.value(f"{loop.axis}_step", (), "i32")
        second = fresh.value(f"{loop.axis}_second", (), "i32")
        some = fresh.value(f"{loop.axis}_some", (), "bool")

        begun: dict[str, ir.Value] = {name: item.init for name, item in self.carried.items()}
        first = self._copy(0, (begun, {}), (self.turn, self.turn))

        turn = fresh.value("turn", (), "i32")
        count, now = self._next_turn(turn, "turn_now")
        items: list[tuple[ir.Carried, str]] = []
        env: list[dict[str, ir.Value]] = [{}, {}]
        for name, item in self.carried.items():
            if self._leaves(name) == 0:
                here = fresh.like(item.value, "now")
                env[0][name] = here
                items.append((ir.Carried(here, self._after(item.next, begun), item.next), "0"))
            else:
                here = fresh.like(item.value, "before")
                env[1][name] = here
                items.append((ir.Carried(here, item.init, item.next), "1"))
        for value in self._crossing():
            here = fresh.like(value, "before")
            env[1][value.name] = here
            items.append((ir.Carried(here, begun.get(value.name, value), value), "0"))
        started = [dict(each) for each in env]
        body = self._steady(env, (now, turn))
        carried = [
            ir.Carried(item.value, item.init, self._after(item.next, env[0 if at == "0" else 1]))
            for item, at in items
        ]
        steady = ir.For(
            loop.axis,
            second,
            loop.stop,
            (*carried, ir.Carried(turn, self.turn, now)),
            (*count, *body),
        )
        ended = started[1]
        last = self._copy(1, ({}, ended), (turn, turn))
        count, after = self._next_turn(turn, "turn_after")
        end = fresh.value("turn_end", (), "i32")
        results = [ir.Result(end, after, self.turn)]
        for name, item in self.carried.items():
            final = started[0][name] if self._leaves(name) == 0 else self._after(item.next, ended)
            results.append(ir.Result(item.value, final, item.init))
        branch = (At(loop.axis, loop.start), *first, steady, *last, *count)
        made: list[Stmt] = [
            ir.Let(size, ir.BlockSize(loop.axis)),
            ir.Let(second, ir.Elementwise("add", (loop.start, size))),
            ir.Let(some, ir.Elementwise("lt", (loop.start, loop.stop))),
            ir.If(some, branch, tuple(results)),
        ]
        return made, {**self.turns, **dict.fromkeys(self.used, end)}

    def _after(self, value: ir.Value, names: Mapping[str, ir.Value]) -> ir.Value:
        return names.get(value.name, value)

    def _steady(self, env: list[dict[str, ir.Value]], turns: tuple[ir.Value, ir.Value]) -> list[Stmt]:
        """A trip: stage 0 of its block, stage 1 of the block before. What stage 1 leaves is what stage 0 reads."""
        for name, item in self.carried.items():
            if self._leaves(name) == 1:
                env[0][name] = item.next
        return self._copy(None, env, turns)

    def _crossing(self) -> list[ir.Value]:
        """What stage 1 reads of stage 0 of its block."""
        found: dict[str, ir.Value] = {}
        for number in range(len(self.body)):
            if self.stages[number] == 1:
                for value in self._reads(number):
                    definer = self.definers.get(value.name)
                    if definer is not None and self.stages[definer] == 0:
                        found[value.name] = value
                    elif value.name in self.carried and self._leaves(value.name) == 0:
                        raise Unsuited(f"{value.name} of the block before is read one block behind")
        return list(found.values())


def _in_registers(stmt: Stmt) -> Sequence[ir.Value]:
    """What a statement reads that has to be in registers: of a product, what it starts from."""
    if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot):
        return () if stmt.op.accumulator is None else (stmt.op.accumulator,)
    return operands(stmt)


def _is_product(stmt: Stmt) -> bool:
    return isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot)
