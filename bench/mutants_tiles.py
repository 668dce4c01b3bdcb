"""Mistakes in tile programs: masks, padding, ranges of blocks, accumulators and the order of dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from bench.mutants_terms import MIRRORED, OFF_BY_ONE, OTHER_FOLD
from bench.mutation import Mutant, Same, in_bodies, in_statements, renamed, variants
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import (
    Align,
    BlockSize,
    Bound,
    Carried,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Fill,
    For,
    Let,
    LoadTile,
    Op,
    Positions,
    ReduceTile,
    Start,
    Stmt,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.walk import nested, operands

Statements = tuple[Stmt, ...]
Mutation = Callable[[TileProgram], Iterator[TileProgram]]
OTHER_NUMBER = {0.0: 1.0, 1.0: 0.0, math.inf: -1.0, -math.inf: 1.0}


def _on_ops(change: Callable[[Value, Op], Iterable[Op]]) -> Mutation:
    """The op of one value changed."""

    def statement(stmt: Stmt) -> Iterator[Statements]:
        if isinstance(stmt, Let):
            for op in change(stmt.value, stmt.op):
                yield (replace(stmt, op=op),)

    return in_statements(statement)


def _on_stores(change: Callable[[Store], Iterable[Store]]) -> Mutation:
    return in_statements(
        lambda stmt: ((store,) for store in change(stmt)) if isinstance(stmt, Store) else iter(())
    )


def _load_unmasked(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case LoadTile(mask=Value()):
            yield replace(op, mask=None)


def _store_unmasked(store: Store) -> Iterator[Store]:
    if store.mask is not None:
        yield replace(store, mask=None)


def _bound(fn: str, by: int) -> Mutation:
    """`positions < stop` becomes another comparison with `stop + by`."""

    def change(stmt: Stmt) -> Iterator[Statements]:
        match stmt:
            case Let(value, Bound(axis, stop)):
                at = renamed(value, "at", dtype=stop.dtype)
                offset, end = renamed(stop, f"{value.name}_by"), renamed(stop, f"{value.name}_end")
                yield (
                    Let(at, Positions(axis) if value.dims else Start(axis)),
                    Let(offset, Constant(by)),
                    Let(end, Elementwise("add", (stop, offset))),
                    Let(value, Elementwise(fn, (at, end))),
                )

    return in_statements(change)


def _defined(body: Statements) -> dict[str, Op]:
    return {stmt.value.name: stmt.op for stmt in nested(body) if isinstance(stmt, Let)}


def _padding_folded(program: TileProgram) -> Iterator[TileProgram | Same]:
    """A fold reads a tile as it was loaded or computed, without its identity past the end."""
    harmless: list[Same] = []

    def change(body: Statements) -> Iterator[Statements]:
        ops = _defined(body)

        def unfilled(value: Value) -> Value | None:
            match ops.get(value.name):
                case Elementwise("where", (_, inner, other)) if isinstance(
                    ops.get(other.name), Constant | Fill
                ):
                    return inner
            return None

        def fold(stmt: Stmt) -> Iterator[Statements]:
            match stmt:
                case Let(_, ReduceTile(fn, value, _) as op) if (inner := unfilled(value)) is not None:
                    if _identity_already(fn, inner, ops) or (
                        fn == "max" and _is_magnitude(inner, ops, program)
                    ):
                        harmless.append(Same("what is past the end is the identity already"))
                    else:
                        yield (replace(stmt, op=replace(op, value=inner)),)
                case Let(_, Dot(left, right, _, _) as op):
                    for side, value, other in (("left", left, right), ("right", right, left)):
                        if (inner := unfilled(value)) is not None:
                            if _is_zero(other, ops):
                                harmless.append(Same("the other operand is 0 past the end"))
                            else:
                                changed = (
                                    replace(op, left=inner) if side == "left" else replace(op, right=inner)
                                )
                                yield (replace(stmt, op=changed),)

        return variants(body, fold)

    yield from in_bodies(program, change)
    yield from harmless[:1]


def _is_zero(value: Value, ops: Mapping[str, Op]) -> bool:
    """Whether a value is 0 past the end because what it is loaded from is."""
    match ops.get(value.name):
        case LoadTile(_, _, Value(), 0.0):
            return True
        case Align(inner) | Cast(inner):
            return _is_zero(inner, ops)
        case Elementwise("mul", args):
            return any(_is_zero(arg, ops) for arg in args)
        case Elementwise("div" | "sq" | "abs" | "neg" | "round" | "finite", (arg, *_)):
            return _is_zero(arg, ops)
    return False


def _identity_already(fold: str, value: Value, ops: Mapping[str, Op]) -> bool:
    op = ops.get(value.name)
    magnitude = isinstance(op, Elementwise) and op.fn in ("abs", "sq")
    # A number that no position reaches is the least of the positions past the end.
    position = fold == "min" and value.dtype in INTEGERS
    return position or (_is_zero(value, ops) and (fold == "sum" or (fold == "max" and magnitude)))


def _is_magnitude(value: Value, ops: Mapping[str, Op], program: TileProgram) -> bool:
    """Whether a value is 0 past the end, and elsewhere what other kernels stored as a largest magnitude."""
    match ops.get(value.name):
        case LoadTile(tensor, _, Value(), 0.0):
            bodies = [kernel.body for kernel in program.kernels]
            stores = [
                (stmt.value, body)
                for body in bodies
                for stmt in nested(body)
                if isinstance(stmt, Store) and stmt.tensor == tensor
            ]
            return bool(stores) and all(_is_largest_magnitude(stored, body) for stored, body in stores)
    return False


def _is_largest_magnitude(value: Value, body: Statements) -> bool:
    """Whether a value is a maximum of magnitudes: not negative, unless there are none."""
    ops = _defined(body)
    following = {
        carried.value.name: carried.next
        for stmt in nested(body)
        if isinstance(stmt, For)
        for carried in stmt.carried
    }

    def found(value: Value, seen: frozenset[str]) -> bool:
        if value.name in seen:
            return False
        if value.name in following:
            return found(following[value.name], seen | {value.name})
        match ops.get(value.name):
            case Elementwise("abs" | "sq", _):
                return True
            case Elementwise("maximum", args):
                return any(found(arg, seen) for arg in args)
            case Elementwise("where", (_, inner, _)) | ReduceTile("max", inner, _):
                return found(inner, seen)
        return False

    return found(value, frozenset())


def _padding_of_ones(program: TileProgram) -> Iterator[TileProgram | Same]:
    """Masked loads of a kernel give 1 past the end."""

    def ones(body: Statements) -> Statements:
        return tuple(
            replace(stmt, body=ones(stmt.body))
            if isinstance(stmt, For)
            else replace(stmt, op=replace(stmt.op, other=1.0))
            if isinstance(stmt, Let) and isinstance(stmt.op, LoadTile)
            else stmt
            for stmt in body
        )

    def change(body: Statements) -> Iterator[Statements]:
        if _multiplies_loads(body):
            yield ones(body)

    yield from in_bodies(program, change)
    if not any(_multiplies_loads(kernel.body) for kernel in program.kernels):
        yield Same("no masked load is folded before its identity is filled in")


def _multiplies_loads(body: Statements) -> bool:
    """Whether both operands of a matrix product are loaded with 0 where the contracted axis has ended."""
    ops = _defined(body)
    bounds = {name: op.axis for name, op in ops.items() if isinstance(op, Bound)}

    def ends(value: Value, axis: str) -> bool:
        match ops.get(value.name):
            case Align(inner):
                return ends(inner, axis)
            case LoadTile(mask=Value() as mask):
                return limits(mask, axis)
        return False

    def limits(mask: Value, axis: str) -> bool:
        op = ops.get(mask.name)
        found = isinstance(op, Bound) and bounds[mask.name] == axis
        return found or (op is not None and any(limits(part, axis) for part in operands(op)))

    products = [op for op in ops.values() if isinstance(op, Dot)]
    return any(ends(op.left, op.axis) and ends(op.right, op.axis) for op in products)


def _number_changed(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case Fill(number) if number in OTHER_NUMBER:
            yield Fill(OTHER_NUMBER[number])


def _fold_changed(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case ReduceTile(fold, _, _):
            yield replace(op, op=OTHER_FOLD[fold])


def _accumulator_dropped(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case Dot(accumulator=Value()):
            yield replace(op, accumulator=None)


def _comparisons(names: Mapping[str, str]) -> Mutation:
    """All comparisons of one kind in a kernel: a condition is lowered once per part of a divided loop."""

    def kernels(body: Statements) -> Iterator[Statements]:
        for fn in dict.fromkeys(op.fn for op in _defined(body).values() if isinstance(op, Elementwise)):
            if fn in names:
                yield _replaced(body, fn, names[fn])

    return lambda program: in_bodies(program, kernels)


def _replaced(body: Statements, old: str, new: str) -> Statements:
    return tuple(
        replace(stmt, body=_replaced(stmt.body, old, new))
        if isinstance(stmt, For)
        else replace(stmt, op=replace(stmt.op, fn=new))
        if isinstance(stmt, Let) and isinstance(stmt.op, Elementwise) and stmt.op.fn == old
        else stmt
        for stmt in body
    )


def _sign_lost(value: Value, op: Op) -> Iterator[Op]:
    match op:
        case Elementwise("sub", _) if value.dims and value.dtype not in INTEGERS:
            yield replace(op, fn="add")


def _branches_swapped(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case Elementwise("where", (condition, a, b)):
            yield replace(op, args=(condition, b, a))


def _index_swapped(_: Value, op: Op) -> Iterator[Op]:
    match op:
        case LoadTile(_, (*first, a, b), _, _):
            yield replace(op, index=(*first, b, a))


def _stored_transposed(store: Store) -> Iterator[Store]:
    match store.index:
        case (*first, a, b):
            yield replace(store, index=(*first, b, a))


def _offset_lost(program: TileProgram) -> Iterator[TileProgram | Same]:
    """Positions count from 0 in every block."""
    whole = {block.axis for kernel in program.kernels for block in kernel.blocks if block.kind == "whole"}

    def change(stmt: Stmt) -> Iterator[Statements]:
        match stmt:
            case Let(value, Positions(axis)) if axis not in whole:
                raw, start = renamed(value, "raw"), renamed(value, "start", dims=())
                less = Elementwise("sub", (raw, start))
                yield Let(raw, Positions(axis)), Let(start, Start(axis)), Let(value, less)

    yield from in_statements(change)(program)
    if whole:
        yield Same("the only block of the axis starts at 0")


def _loops(change: Callable[[For[Stmt]], Iterable[Statements]]) -> Mutation:
    return in_statements(lambda stmt: change(stmt) if isinstance(stmt, For) else iter(()))


def _with_stop(body: Statements, axis: str, stop: Value) -> Statements:
    """A masked loop's body for another end of the loop."""
    return tuple(
        replace(stmt, op=Bound(axis, stop))
        if isinstance(stmt, Let) and isinstance(stmt.op, Bound) and stmt.op.axis == axis
        else replace(stmt, body=_with_stop(stmt.body, axis, stop))
        if isinstance(stmt, For)
        else stmt
        for stmt in body
    )


def _ragged_block_missed(loop: For[Stmt]) -> Iterator[Statements]:
    if loop.masked:
        yield (replace(loop, start=loop.stop),)


def _block_late(loop: For[Stmt]) -> Iterator[Statements]:
    if not loop.masked:
        block, start = renamed(loop.start, "block"), renamed(loop.start, "late")
        yield (
            Let(block, BlockSize(loop.axis)),
            Let(start, Elementwise("add", (loop.start, block))),
            replace(loop, start=start),
        )


def _block_early(loop: For[Stmt]) -> Iterator[Statements]:
    block, stop = renamed(loop.stop, "block"), renamed(loop.stop, "early")
    yield (
        Let(block, BlockSize(loop.axis)),
        Let(stop, Elementwise("sub", (loop.stop, block))),
        replace(loop, stop=stop, body=_with_stop(loop.body, loop.axis, stop)),
    )


def _mask_ignored(loop: For[Stmt]) -> Iterator[Statements]:
    """The ragged block is taken for a whole one: every position of it is in."""
    if loop.masked:
        block, end = renamed(loop.stop, "block"), renamed(loop.stop, "end")
        yield (
            Let(block, BlockSize(loop.axis)),
            Let(end, Elementwise("add", (loop.stop, block))),
            *_past(loop, end),
        )


def _past(loop: For[Stmt], end: Value) -> Statements:
    def change(body: Statements) -> Statements:
        result: list[Stmt] = []
        for stmt in body:
            match stmt:
                case Let(value, Bound(axis, _)) if axis == loop.axis:
                    at = renamed(value, "at", dtype=end.dtype)
                    result.append(Let(at, Positions(axis) if value.dims else Start(axis)))
                    result.append(Let(value, Elementwise("lt", (at, end))))
                case For():
                    result.append(replace(stmt, body=change(stmt.body)))
                case _:
                    result.append(stmt)
        return tuple(result)

    return (replace(loop, body=change(loop.body)),)


def _never_updated(program: TileProgram) -> Iterator[TileProgram]:
    """A carried tile keeps its first value, in all the loops that hand it on."""

    def chain(body: Statements, name: str) -> Statements:
        return tuple(
            replace(
                stmt,
                body=chain(stmt.body, name),
                carried=tuple(
                    replace(item, next=item.value) if root(item, body) == name else item
                    for item in stmt.carried
                ),
            )
            if isinstance(stmt, For)
            else stmt
            for stmt in body
        )

    def root(item: Carried, body: Statements) -> str:
        begun = {c.value.name: c for stmt in body if isinstance(stmt, For) for c in stmt.carried}
        while item.init.name in begun:
            item = begun[item.init.name]
        return item.value.name

    def kernels(body: Statements) -> Iterator[Statements]:
        for stmt in nested(body):
            for item in stmt.carried if isinstance(stmt, For) else ():
                changed = chain(body, item.value.name)
                if changed != body:
                    yield changed

    return in_bodies(program, kernels)


def _restarted(program: TileProgram) -> Iterator[TileProgram]:
    """A loop that goes on where another stopped starts over."""

    def change(body: Statements) -> Iterator[Statements]:
        begun: dict[str, Value] = {}
        for stmt in nested(body):
            if isinstance(stmt, For):
                begun |= {item.value.name: item.init for item in stmt.carried}

        def restart(stmt: Stmt) -> Iterator[Statements]:
            if isinstance(stmt, For):
                for at, item in enumerate(stmt.carried):
                    if item.init.name in begun:
                        new = replace(item, init=begun[item.init.name])
                        yield (replace(stmt, carried=(*stmt.carried[:at], new, *stmt.carried[at + 1 :])),)

        return variants(body, restart)

    return in_bodies(program, change)


def _wrong_permutation(stmt: Stmt) -> Iterator[Statements]:
    """A tile is said to have its last two dims in the other order."""
    match stmt:
        case Let(Value(_, (*first, a, b), _) as value, Align()):
            yield (replace(stmt, value=replace(value, dims=(*first, b, a))),)


def _mutant(name: str, what: str, mutate: Callable[[TileProgram], Iterable[TileProgram | Same]]) -> Mutant:
    return Mutant(name, "tile", what, mutate)


MUTANTS = (
    _mutant("load unmasked", "a load has no mask", _on_ops(_load_unmasked)),
    _mutant("store unmasked", "a store has no mask", _on_stores(_store_unmasked)),
    _mutant("bound one too far", "positions <= stop", _bound("le", 0)),
    _mutant("bound one short", "positions < stop - 1", _bound("lt", -1)),
    _mutant("ragged block taken for whole", "a masked loop's bounds are true", _loops(_mask_ignored)),
    _mutant("ragged block missed", "a masked loop runs no iteration", _loops(_ragged_block_missed)),
    _mutant("first block missed", "a loop over whole blocks starts one late", _loops(_block_late)),
    _mutant("last block missed", "a loop stops one block early", _loops(_block_early)),
    _mutant("padding folded", "a fold reads past the end instead of its identity", _padding_folded),
    _mutant("padding of ones", "masked loads give 1 past the end", _padding_of_ones),
    _mutant("wrong fill", "tiles of 0 become 1, of -inf become 1", _on_ops(_number_changed)),
    _mutant("fold of a tile changed", "max becomes min, sum becomes max", _on_ops(_fold_changed)),
    _mutant("accumulator dropped", "a matrix product starts from 0", _on_ops(_accumulator_dropped)),
    _mutant("comparison off by one", "< becomes <=, <= becomes <", _comparisons(OFF_BY_ONE)),
    _mutant("comparison mirrored", "<= becomes >=", _comparisons(MIRRORED)),
    _mutant("sign lost in a tile", "a - b becomes a + b", _on_ops(_sign_lost)),
    _mutant("selection turned round", "where(c, a, b) becomes where(c, b, a)", _on_ops(_branches_swapped)),
    _mutant("tile loaded transposed", "x[i, j] becomes x[j, i]", _on_ops(_index_swapped)),
    _mutant("tile stored transposed", "y[i, j] becomes y[j, i]", _on_stores(_stored_transposed)),
    _mutant(
        "wrong permutation", "dims of an aligned tile in the wrong order", in_statements(_wrong_permutation)
    ),
    _mutant("offset of the block lost", "every block has the first one's positions", _offset_lost),
    _mutant("state never updated", "a carried tile keeps its first value", _never_updated),
    _mutant("state restarted", "the ragged block starts over", _restarted),
)
