"""Mistakes in roles: barriers, phases, slots, stages, products under way, and bounds that only one role has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch

from bench.mutation import Mutant
from eqfuse.tile.nodes import BlockSize, Constant, Elementwise, For, If, Let, PersistentLoop, Result, Value
from eqfuse.tile.roles.nodes import (
    Along,
    AnyNonFinite,
    AsyncCopy,
    At,
    Column,
    ConsumerBarrier,
    MmaAsync,
    MmaWait,
    ReleaseSlot,
    Role,
    RolesKernel,
    RolesProgram,
    Stmt,
    StoreShared,
    View,
    Wait,
    ZeroNonFinite,
)
from eqfuse.tile.walk import nested

Body = tuple[Stmt, ...]
Change = Callable[[Stmt], Iterable[Body]]
Mutation = Callable[[RolesProgram], Iterator[RolesProgram]]


def _bodies(body: Body, change: Callable[[Body], Iterable[Body]]) -> Iterator[Body]:
    """A body changed, or one inside of it."""
    yield from change(body)
    for at, stmt in enumerate(body):
        if isinstance(stmt, For | PersistentLoop | If):
            for inner in _bodies(stmt.body, change):
                yield (*body[:at], replace(stmt, body=inner), *body[at + 1 :])


def _in_roles(change: Callable[[Body], Iterable[Body]], wanted: Callable[[Role], bool]) -> Mutation:
    """One role changed: a mistake of all consumers alike shows in the first of them."""

    def mutate(program: RolesProgram) -> Iterator[RolesProgram]:
        for place, kernel in enumerate(program.kernels):
            for at, role in enumerate(kernel.roles if isinstance(kernel, RolesKernel) else ()):
                if wanted(role):
                    for body in _bodies(role.body, change):
                        assert isinstance(kernel, RolesKernel)
                        roles = (*kernel.roles[:at], replace(role, body=body), *kernel.roles[at + 1 :])
                        kernels = list(program.kernels)
                        kernels[place] = replace(kernel, roles=roles)
                        yield replace(program, kernels=tuple(kernels))

    return mutate


def _produces(role: Role) -> bool:
    return role.part is None


def _consumes(role: Role) -> bool:
    return role.part == 1


def _leads(role: Role) -> bool:
    return role.name == "leader"


def _first_consumes(role: Role) -> bool:
    return role.part == 0


def _each(change: Change, wanted: Callable[[Role], bool]) -> Mutation:
    """One statement changed."""

    def bodies(body: Body) -> Iterator[Body]:
        for at, stmt in enumerate(body):
            for new in change(stmt):
                yield (*body[:at], *new, *body[at + 1 :])

    return _in_roles(bodies, wanted)


def _dropped(kind: type[Stmt]) -> Change:
    return lambda stmt: [()] if isinstance(stmt, kind) else []


def _flipped(wanted: Callable[[Role], bool]) -> Mutation:
    """A wait for the other phase: that of a turn as many further on as there are slots."""

    def mutate(program: RolesProgram) -> Iterator[RolesProgram]:
        slots = {ring.name: ring.slots for kernel in program.specialized for ring in kernel.rings}

        def change(stmt: Stmt) -> Iterator[Body]:
            if isinstance(stmt, Wait):
                before, other = _other_turn(stmt, slots[stmt.ring])
                yield (*before, replace(stmt, turn=other))

        yield from _each(change, wanted)(program)

    return mutate


def _other_turn(stmt: Stmt, by: int) -> tuple[Body, Value]:
    turn = next(v for v in _turns(stmt))
    step, other = Value("turn_step", (), "i32"), Value("turn_other", (), "i32")
    return (Let(step, Constant(by)), Let(other, Elementwise("add", (turn, step)))), other


def _turns(stmt: Stmt) -> Iterator[Value]:
    match stmt:
        case AsyncCopy() | Wait() | ReleaseSlot():
            yield stmt.turn
        case MmaAsync(right=right):
            yield right.turn


def _shifted(kind: type[Stmt], by: int) -> Change:
    """A statement of another turn, of a ring that loops fill: others have one slot."""

    def change(stmt: Stmt) -> Iterator[Body]:
        ring = stmt.right.ring if isinstance(stmt, MmaAsync) else getattr(stmt, "ring", "")
        if isinstance(stmt, kind) and ring.rstrip("_0123456789").endswith("_tiles"):
            before, other = _other_turn(stmt, by)
            match stmt:
                case AsyncCopy() | Wait() | ReleaseSlot():
                    yield (*before, replace(stmt, turn=other))
                case MmaAsync(right=View() as right):
                    yield (*before, replace(stmt, right=replace(right, turn=other)))

    return change


def _freed_early(body: Body) -> Iterator[Body]:
    """A slot is freed before the product that reads it is awaited."""
    for at, stmt in enumerate(body):
        if isinstance(stmt, ReleaseSlot):
            awaited = max((n for n in range(at) if isinstance(body[n], MmaWait)), default=None)
            if awaited is not None:
                yield (*body[:awaited], stmt, *body[awaited:at], *body[at + 1 :])


def _freed_twice(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, ReleaseSlot):
        yield (stmt, stmt)


def _awaited_late(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, MmaWait):
        yield (replace(stmt, behind=stmt.behind + 1),)


def _sums_dropped(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, MmaAsync) and stmt.accumulator is not None:
        yield (replace(stmt, accumulator=None),)


def _bound(by: int) -> Change:
    """A loop of one role that ends a position, or so many, elsewhere."""

    def change(stmt: Stmt) -> Iterator[Body]:
        if isinstance(stmt, For):
            step, stop = Value("stop_step", (), "i32"), Value("stop_other", (), "i32")
            yield (
                Let(step, Constant(by)),
                Let(stop, Elementwise("add", (stmt.stop, step))),
                replace(stmt, stop=stop),
            )

    return change


def _not_taken(stmt: Stmt) -> Iterator[Body]:
    """A branch whose result is that of not taking it."""
    if isinstance(stmt, If):
        for at, result in enumerate(stmt.results):
            new = Result(result.value, result.otherwise, result.otherwise)
            yield (replace(stmt, results=(*stmt.results[:at], new, *stmt.results[at + 1 :])),)


def _met_more(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, ConsumerBarrier):
        one, more = Value("met_step", (), "i32"), Value("met_other", (), "i32")
        yield Let(one, Constant(1)), Let(more, Elementwise("add", (stmt.turn, one))), replace(stmt, turn=more)


def _unseen(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, AnyNonFinite):
        yield (Let(stmt.value, Constant(False)),)


def _last_column(stmt: Stmt) -> Iterator[Body]:
    if isinstance(stmt, Column):
        size, one, last = (Value(name, (), "i32") for name in ("all_places", "one_place", "last_place"))
        count = Let(size, BlockSize(stmt.tile.dims[1])), Let(one, Constant(1))
        yield *count, Let(last, Elementwise("sub", (size, one))), replace(stmt, place=last)


def _dropped_by_all(kind: type[Stmt]) -> Mutation:
    """No consumer has statements of a kind."""

    def without(body: Body) -> Body:
        kept = (stmt for stmt in body if not isinstance(stmt, kind))
        return tuple(
            replace(s, body=without(s.body)) if isinstance(s, For | PersistentLoop | If) else s for s in kept
        )

    def mutate(program: RolesProgram) -> Iterator[RolesProgram]:
        if any(
            isinstance(s, kind)
            for kernel in program.specialized
            for r in kernel.roles
            for s in nested(r.body)
        ):
            kernels = (
                replace(kernel, roles=tuple(replace(role, body=without(role.body)) for role in kernel.roles))
                if isinstance(kernel, RolesKernel)
                else kernel
                for kernel in program.kernels
            )
            yield replace(program, kernels=tuple(kernels))

    return mutate


def _again(body: Body) -> Iterator[Body]:
    """The pipelined loop begins with the block that its first stage has begun with."""
    for at, stmt in enumerate(body):
        begun = [s for s in body[:at] if isinstance(s, At)]
        if isinstance(stmt, For) and begun:
            yield (*body[:at], replace(stmt, start=begun[-1].start), *body[at + 1 :])


def _kept(pattern: str) -> Change:
    """What a loop carries stays as it is, where its name matches the pattern."""

    def change(stmt: Stmt) -> Iterator[Body]:
        if isinstance(stmt, For):
            for at, item in enumerate(stmt.carried):
                if fnmatch(item.value.name, pattern):
                    new = replace(item, next=item.value)
                    yield (replace(stmt, carried=(*stmt.carried[:at], new, *stmt.carried[at + 1 :])),)

    return change


def _elsewhere(stmt: Stmt) -> Iterator[Body]:
    """A copy of the block of positions one further on."""
    if isinstance(stmt, AsyncCopy):
        one = Value("one_on", (), "i32")
        for at, place in enumerate(stmt.index):
            if isinstance(place, Along) and place.offset is None:
                index = (*stmt.index[:at], Along(place.axis, one), *stmt.index[at + 1 :])
                yield (Let(one, Constant(1)), replace(stmt, index=index))


def _through(program: RolesProgram) -> Iterator[RolesProgram]:
    """A tile is stored through a slot that other roles read or fill."""
    for place, kernel in enumerate(program.kernels):
        if not isinstance(kernel, RolesKernel):
            continue
        for at, staging in enumerate(kernel.staging):
            for ring in kernel.rings:
                if ring.slots > 1 and staging.over is not None:
                    new = replace(staging, over=ring.name)
                    kernels = list(program.kernels)
                    kernels[place] = replace(
                        kernel, staging=(*kernel.staging[:at], new, *kernel.staging[at + 1 :])
                    )
                    yield replace(program, kernels=tuple(kernels))


def _stored_by_all(program: RolesProgram) -> Iterator[RolesProgram]:
    """What one consumer stores for all, another one stores too."""
    for place, kernel in enumerate(program.kernels):
        if isinstance(kernel, RolesKernel) and kernel.columns is not None and not kernel.led:
            producer, first, second, *others = kernel.roles
            roles = (producer, first, replace(first, part=second.part), *others)
            kernels = list(program.kernels)
            kernels[place] = replace(kernel, roles=roles)
            yield replace(program, kernels=tuple(kernels))


def _whole_part(program: RolesProgram) -> Iterator[RolesProgram]:
    """Consumers that share columns have fewer or more parts than they are."""
    for place, kernel in enumerate(program.kernels):
        if isinstance(kernel, RolesKernel) and kernel.columns is not None:
            for consumers in (kernel.consumers // 2, kernel.consumers * 2):
                kernels = list(program.kernels)
                kernels[place] = replace(kernel, consumers=consumers)
                yield replace(program, kernels=tuple(kernels))


def _awaited_between(stmt: Stmt) -> Iterator[Body]:
    """A product that another one starts from starts from nothing."""
    if isinstance(stmt, For):
        started = {
            s.accumulator.name for s in stmt.body if isinstance(s, MmaAsync) and s.accumulator is not None
        }
        for inner in stmt.body:
            if isinstance(inner, MmaAsync) and inner.pending.name in started:
                last = next(
                    s for s in stmt.body if isinstance(s, MmaAsync) and s.accumulator == inner.pending
                )
                body = tuple(
                    replace(s, accumulator=None) if s == last else s for s in stmt.body if s != inner
                )
                yield (replace(stmt, body=body),)


MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(name, "roles", what, mutate)
    for name, what, mutate in (
        ("a slot is never freed", "a consumer does not arrive", _each(_dropped(ReleaseSlot), _consumes)),
        ("a slot is freed twice", "a consumer arrives for the other one too", _each(_freed_twice, _consumes)),
        ("a slot is freed early", "before its product is awaited", _in_roles(_freed_early, _consumes)),
        ("another slot is freed", "that of the next turn", _each(_shifted(ReleaseSlot, 1), _consumes)),
        ("a tile is not waited for", "no wait until full", _each(_dropped(Wait), _consumes)),
        ("a slot is overwritten", "no wait until empty", _each(_dropped(Wait), _produces)),
        ("a consumer's phase is flipped", "full, of the other phase", _flipped(_consumes)),
        ("the producer's phase is flipped", "empty, of the other phase", _flipped(_produces)),
        ("the producer waits a turn behind", "for another slot", _each(_shifted(Wait, -1), _produces)),
        (
            "a copy goes to the next slot",
            "than the one that was waited for",
            _each(_shifted(AsyncCopy, 1), _produces),
        ),
        ("a copy of other positions", "one further on", _each(_elsewhere, _produces)),
        ("a copy is left out", "no fill", _each(_dropped(AsyncCopy), _produces)),
        ("a product reads the next slot", "its stage is another", _each(_shifted(MmaAsync, 1), _consumes)),
        ("a product reads the slot before", "its stage is another", _each(_shifted(MmaAsync, -1), _consumes)),
        ("a product is not awaited", "one more may be under way", _each(_awaited_late, _consumes)),
        ("sums start again", "no accumulator", _each(_sums_dropped, _consumes)),
        ("a consumer stops early", "its loop alone", _each(_bound(-2), _consumes)),
        ("the producer stops early", "its loop alone", _each(_bound(-2), _produces)),
        ("the producer goes on", "its loop alone", _each(_bound(2), _produces)),
        ("a branch gives what it replaces", "masks, last stages", _each(_not_taken, _consumes)),
        ("the first block twice", "by the pipelined loop too", _in_roles(_again, _consumes)),
        ("a consumer's turn stays", "slots do not advance", _each(_kept("turn*"), _consumes)),
        ("the producer's turn stays", "slots do not advance", _each(_kept("turn*"), _produces)),
        ("a tile is stored through another slot", "one that is filled again", _through),
        ("a stage reads old values", "of the first block", _each(_kept("*_before"), _consumes)),
        (
            "consumers do not meet",
            "one clears what the other has to see",
            _each(_dropped(ConsumerBarrier), _consumes),
        ),
        ("consumers have met once more", "one goes on at once", _each(_met_more, _consumes)),
        ("what is not finite stays", "a product reads it", _dropped_by_all(ZeroNonFinite)),
        ("nobody looks", "what is not finite is not found", _each(_unseen, _consumes)),
        ("another column", "of the weights, by hand", _each(_last_column, _first_consumes)),
        ("two consumers store what they share", "each has its part of the columns alone", _stored_by_all),
        ("parts of another size", "than consumers have of the columns", _whole_part),
        (
            "nothing is given",
            "by the leader",
            _each(_dropped(StoreShared), _leads),
        ),
        (
            "what is given is overwritten",
            "no wait until empty, or full",
            _each(_dropped(Wait), _leads),
        ),
        (
            "something is given twice",
            "to one slot",
            _each(lambda stmt: [(stmt, stmt)] if isinstance(stmt, StoreShared) else [], _leads),
        ),
        (
            "the leader's phase is flipped",
            "of a slot that it fills, or reads",
            _flipped(_leads),
        ),
        (
            "a product under way is left out",
            "that another one starts from",
            _each(_awaited_between, _consumes),
        ),
    )
)
