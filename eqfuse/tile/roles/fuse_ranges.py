"""One loop instead of several over consecutive ranges of an axis, whose bodies differ by masks.

Where lowering cuts the range of a loop, blocks that no predicate cuts have a body of their own without masks. A pipeline
would drain at the end of each range. The body with masks is right for all blocks; so it runs over both ranges, and its
selects are branches that the blocks of the other range do not take:

    for j in a..b:  ... x ...          ->   for j in a..c:
    for j in b..c:  y = where(m, x, -inf)       when j >= b:  y = where(m, x, -inf), else x

A range with masks before one without, as windows have, is joined in the same way: its selects are for the blocks before b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from eqfuse.extract.unsuited import Unsuited
from eqfuse.tile.names import Fresh
from eqfuse.tile.nodes import (
    Dot,
    Elementwise,
    For,
    If,
    Let,
    LoadTile,
    NonFiniteCorrection,
    Op,
    Result,
    Start,
    Stmt,
    Store,
    Value,
)
from eqfuse.tile.roles.launch_constants import is_launch_constant
from eqfuse.tile.walk import mapped, nested, operands, ops_of, reads, renamed


def fuse_ranges(body: tuple[Stmt, ...], fresh: Fresh, *, branches: bool = True) -> tuple[Stmt, ...]:
    """The body with loops joined, two at a time from the first on; without `branches` those alone that need none."""
    places = [n for n, stmt in enumerate(body) if isinstance(stmt, For)]
    ops = ops_of(body)
    for join in (_both, _early):
        for at, then in pairwise(places):
            first, second = body[at], body[then]
            assert isinstance(first, For) and isinstance(second, For)
            between = body[at + 1 : then]
            made = None
            if _follows(first, second, (*between, *body[then + 1 :]), ops):
                made = join(first, second, fresh, ops)
            if made is not None and (branches or not any(isinstance(s, If) for s in made.body)):
                whole = (*body[:at], *between, made, *body[then + 1 :])
                return fuse_ranges(whole, fresh, branches=branches)
    return body


def inner_ranges_fused(body: tuple[Stmt, ...], fresh: Fresh, *, behind: bool) -> tuple[Stmt, ...]:
    """The body with the loops inside of loops fused, where products are not one block behind. Raises Unsuited."""

    def one(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For) or not any(isinstance(inner, For) for inner in stmt.body):
            return stmt
        if behind:
            raise Unsuited("products of a loop inside of a loop one block behind")
        return replace(stmt, body=fuse_ranges(stmt.body, fresh, branches=False))

    return tuple(map(one, body))


def supported(body: Sequence[Stmt], depth: int = 0) -> None:
    """Raises Unsuited for loops that no role walks."""
    for loop in (stmt for stmt in body if isinstance(stmt, For)):
        if any(isinstance(each, For) for each in loop.body):
            lets = [each.op for each in loop.body if isinstance(each, Let)]
            if depth or any(isinstance(op, Dot | NonFiniteCorrection) for op in lets):
                raise Unsuited("a loop inside of a loop, beside products or another one")
        if any(isinstance(each, Store) for each in loop.body):
            raise Unsuited("a store inside of a loop")
        supported(loop.body, depth + 1)


def _follows(first: For[Stmt], second: For[Stmt], others: Sequence[Stmt], ops: Mapping[str, Op]) -> bool:
    """Whether two loops are over consecutive ranges, and the second goes on with what the first has carried."""
    ends = {item.value.name: place for place, item in enumerate(first.carried)}
    match ops.get(first.stop.name):
        case Elementwise("minimum", (left, right)):  # where the second range may be empty
            meets = {left, right} == {second.start, second.stop}
        case _:
            meets = False
    return (
        first.axis == second.axis
        and (first.stop == second.start or meets)
        and [ends.get(item.init.name) for item in second.carried] == list(range(len(ends)))
        and not any(value.name in ends for stmt in others for value in reads((stmt,)))
    )


def _both(first: For[Stmt], second: For[Stmt], fresh: Fresh, ops: Mapping[str, Op]) -> For[Stmt] | None:
    """The two loops as one, where the second has masks that the first has not."""
    if first.stop != second.start or not all(isinstance(s, Let) for s in (*first.body, *second.body)):
        return None
    match = _Match(first, second)
    for old, new in zip(first.carried, second.carried, strict=True):
        if not match.same(old.next, new.next):
            return None
    start, late = fresh.value(f"{second.axis}_at", (), "i32"), fresh.value(f"{second.axis}_late", (), "bool")
    guarded = _guarded(second, match.selects, late, fresh)
    if guarded is None:
        return None
    carried = tuple(
        replace(new, init=old.init) for old, new in zip(first.carried, second.carried, strict=True)
    )
    test = [Let(start, Start(second.axis)), Let(late, Elementwise("ge", (start, second.start)))]
    some = Let(
        fresh.value(f"{second.axis}_some_late", (), "bool"), Elementwise("lt", (second.start, second.stop))
    )
    if is_launch_constant(some.value, {**ops, some.value.name: some.op}):
        guarded = tuple(_where_some(stmt, some.value, fresh) for stmt in guarded)
        test.append(some)
    return For(first.axis, first.start, second.stop, carried, (*test, *guarded))


def _where_some(stmt: Stmt, some: Value, fresh: Fresh) -> Stmt:
    """A branch for late blocks, where there are some."""
    if not isinstance(stmt, If):
        return stmt
    inner = [replace(result, value=fresh.like(result.value, "some")) for result in stmt.results]
    outer = [replace(old, then=new.value) for old, new in zip(stmt.results, inner, strict=True)]
    return If(some, (replace(stmt, results=tuple(inner)),), tuple(outer))


def _early(first: For[Stmt], second: For[Stmt], fresh: Fresh, ops: Mapping[str, Op]) -> For[Stmt] | None:
    """The two loops as one, where the first has masks that the second has not; the second may have branches."""
    if not all(isinstance(stmt, Let) for stmt in first.body):
        return None
    plain = _without_branches(second)
    match = _Match(plain, first)
    if not all(match.same(old.next, new.next) for old, new in zip(plain.carried, first.carried, strict=True)):
        return None
    start, early = fresh.value(f"{first.axis}_at", (), "i32"), fresh.value(f"{first.axis}_early", (), "bool")
    guarded = _guarded(first, match.selects, early, fresh)
    if guarded is None:
        return None
    body = list(second.body)
    nexts = {item.value.name: item.next for item in second.carried}
    for when in (stmt for stmt in guarded if isinstance(stmt, If)):
        (result,) = when.results
        here = match.counterparts.get(result.value.name)
        read = {v.name: match.matched[v.name] for v in _sides(when) if v.name in match.matched}
        places = [n for n, s in enumerate(body) if isinstance(s, Let) and s.value in (here, *read.values())]
        place = max(places, default=None)
        readers = [s for s in first.body if isinstance(s, Let) and result.otherwise in operands(s.op)]
        alone = all(s.value.name in match.selects for s in readers)
        if here is None or place is None or not alone:
            return None
        masked = fresh.like(here, "early")
        branch = renamed(when, {**read, result.otherwise.name: here})
        assert isinstance(branch, If)
        branch = replace(branch, results=(Result(masked, branch.results[0].then, here),))
        later = [renamed(stmt, {here.name: masked}) for stmt in body[place + 1 :]]
        body = [*body[: place + 1], branch, *later]
        nexts = {name: masked if value == here else value for name, value in nexts.items()}
    carried = tuple(
        replace(new, init=old.init, next=nexts[new.value.name])
        for old, new in zip(first.carried, second.carried, strict=True)
    )
    test = Let(start, Start(first.axis)), Let(early, Elementwise("lt", (start, second.start)))
    return For(first.axis, first.start, second.stop, carried, (*test, *body))


def _sides(when: If[Stmt]) -> list[Value]:
    """The operands of products of which a branch adds the rest."""
    ops = [stmt.op for stmt in when.body if isinstance(stmt, Let)]
    return [v for op in ops if isinstance(op, NonFiniteCorrection) for v in (op.left, op.right)]


def _without_branches(loop: For[Stmt]) -> For[Stmt]:
    """The loop as it is for blocks that take no branch."""
    names: dict[str, Value] = {}
    body: list[Stmt] = []
    for stmt in loop.body:
        if isinstance(stmt, If):
            names |= {r.value.name: names.get(r.otherwise.name, r.otherwise) for r in stmt.results}
        else:
            body.append(renamed(stmt, names))
    carried = tuple(replace(item, next=names.get(item.next.name, item.next)) for item in loop.carried)
    return replace(loop, body=tuple(body), carried=carried)


@dataclass
class _Match:
    """Whether values of two loop bodies are the same but for selects of the second, which are kept by name."""

    first: For[Stmt]
    second: For[Stmt]
    selects: dict[str, Value] = field(default_factory=dict)  # what a select is where its mask holds
    counterparts: dict[str, Value] = field(default_factory=dict)  # what of the first body a select stands for
    matched: dict[str, Value] = field(default_factory=dict)  # what of the first body a value of the second is

    def __post_init__(self) -> None:
        self._ops = [ops_of(self.first.body), ops_of(self.second.body)]
        pairs = zip(self.first.carried, self.second.carried, strict=True)
        self._same: dict[tuple[str, str], bool] = {(a.value.name, b.value.name): True for a, b in pairs}

    def same(self, left: Value, right: Value) -> bool:
        key = left.name, right.name
        if key not in self._same:
            self._same[key] = self._compare(left, right)
            if self._same[key]:
                self.matched[right.name] = left
        return self._same[key]

    def _compare(self, left: Value, right: Value) -> bool:
        one, other = self._ops[0].get(left.name), self._ops[1].get(right.name)
        if one is None and other is None:
            return left == right
        if one is not None and other is not None and self._alike(one, other):
            return True
        match other:
            case Elementwise("where", (_, inner, _)) if self.same(left, inner):
                self.selects[right.name] = inner
                self.counterparts[right.name] = left
                return True
            case NonFiniteCorrection(total=total) if self.same(left, total):
                self.selects[right.name] = total
                self.counterparts[right.name] = left
                return True
        return False

    def _alike(self, one: Op, other: Op) -> bool:
        if isinstance(one, LoadTile) and isinstance(other, LoadTile):
            same = one.tensor == other.tensor and one.other == other.other
            sides = one.index, other.index
        else:
            same = _without_operands(one) == _without_operands(other)
            sides = operands(one), operands(other)
        return same and len(sides[0]) == len(sides[1]) and all(map(self.same, *sides))


_NOTHING = Value("", (), "bool")


def _without_operands(op: Op) -> Op:
    """What an op is, apart from what it reads."""
    return mapped(op, lambda _: _NOTHING)


def _guarded(
    loop: For[Stmt], selects: Mapping[str, Value], late: Value, fresh: Fresh
) -> tuple[Stmt, ...] | None:
    """The loop's body with its selects in branches. A select of a select is one branch. None where a mask is not
    made of positions alone."""
    ops = {stmt.value.name: stmt for stmt in loop.body if isinstance(stmt, Let)}
    inner = {name for name, of in selects.items() if _only_for_selects(loop, name, selects)}
    made: list[Stmt] = []
    for stmt in loop.body:
        if not isinstance(stmt, Let) or stmt.value.name not in selects:
            made.append(stmt)
            continue
        name = stmt.value.name
        if name in inner:
            continue
        chain = [name]
        while (of := selects[chain[-1]].name) in inner:
            chain.append(of)
        plain = selects[chain[-1]]
        body: list[Let] = []
        for link in reversed(chain):
            select = ops[link]
            body += [*_slice(_condition(select.op), ops, body), select]
        if any(isinstance(let.op, LoadTile | Dot) for let in body):
            return None
        names = {let.value.name: fresh.like(let.value, "late") for let in body}
        branch = tuple(renamed(let, names) for let in body)
        made.append(If(late, branch, (Result(stmt.value, names[name], plain),)))
    needed = _needed(made, {item.next.name for item in loop.carried})
    return tuple(s for s in made if not isinstance(s, Let) or s.value.name in needed)


def _condition(op: Op) -> Value:
    """The mask of a select, or of a product of which it is the rest."""
    mask = op.left_mask if isinstance(op, NonFiniteCorrection) else operands(op)[0]
    assert mask is not None
    return mask


def _needed(body: Sequence[Stmt], roots: set[str]) -> set[str]:
    found = set(roots)
    for stmt in reversed(body):
        match stmt:
            case Let(value, op) if value.name in found:
                found |= {v.name for v in operands(op)}
            case If(condition, inner, results):
                found.add(condition.name)
                found |= {v.name for r in results for v in (r.then, r.otherwise)}
                found |= {v.name for s in nested(inner) for v in operands(s)}
    return found


def _only_for_selects(loop: For[Stmt], name: str, selects: Mapping[str, Value]) -> bool:
    """Whether only selects read a select."""
    readers = [s for s in loop.body if isinstance(s, Let) and any(v.name == name for v in operands(s.op))]
    return bool(readers) and all(
        r.value.name in selects and selects[r.value.name].name == name for r in readers
    )


def _slice(value: Value, ops: Mapping[str, Let], known: Sequence[Let]) -> list[Let]:
    """The statements of a body that make a value, but for those that are there."""
    found: dict[str, Let] = {}
    there = {let.value.name for let in known}

    def visit(name: str) -> None:
        if name in ops and name not in found and name not in there:
            for operand in operands(ops[name].op):
                visit(operand.name)
            found[name] = ops[name]

    visit(value.name)
    return list(found.values())
