"""From the items of a kernel to its loop tree.

Every item is put into the first loop over its dims that comes late enough, so that loops are shared wherever what is
read is already there. What a later loop reads of an earlier one is kept in memory, or computed again where that is
cheaper than a store and a load.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import FUNCTIONS
from eqfuse.tile import nodes as ir
from eqfuse.tile.native.nodes import Blocks, Define, Item, Leaf, Loop, Node, NotNative, Put, Walk, items_in
from eqfuse.tile.walk import operands

Path = tuple[Loop, ...]

AGAIN = 6.0
"""Vector operations that may be done again rather than keep their result in memory."""

EXP2 = 8.0
GATHER = 12.0


@dataclass(eq=False)
class Scope:
    """The body of a kernel or of a walk while it is built. `paths` are the loops around each definition."""

    parent: Scope | None
    body: list[Node] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    copies: dict[tuple[str, int], ir.Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Linear:
    """An index: the sum of `factors` times positions and of `numbers`, where it is `known` to be one."""

    factors: Mapping[str, int]
    numbers: tuple[ir.Value, ...]
    is_known: bool = True


class Tree:
    """`memory` are the values that are kept in memory, with the loops that all of their reads share; `direct` the loads
    that a matrix product reads where they are; `again` what is computed once more; `states` the names of the state
    variables that one fold computes; `into` the sums that matrix products, and sums of them, are added to at once; `stored`
    the stores of matrix products that nothing else reads: these are made where they are stored."""

    def __init__(
        self,
        items: Sequence[Item],
        depth: Mapping[str, int],
        unit: Container[tuple[str, int]],
        dtypes: Mapping[str, str],
    ) -> None:
        self.depth, self._unit, self._dtypes = depth, unit, dtypes
        self.memory: dict[str, Path] = {}
        self.direct: set[str] = set()
        self.again: set[str] = set()
        self.states: dict[str, list[str]] = {}
        self.defined: dict[str, Define] = {}
        self._folds: dict[object, str] = {}
        self._scopes: dict[str, Scope] = {}
        self._count = 0
        self.carried: set[str] = set()
        root = Scope(None)
        self._place_all(items, root)
        self.body = root.body
        _prune(self.body, self._needed())
        self.into = self._into()
        self.stored = self._stored()

    # Placing ---------------------------------------------------------------------------------------

    def _place_all(self, items: Sequence[Item], scope: Scope) -> None:
        for item in items:
            if isinstance(item, Blocks):
                self._walk(item, scope)
            else:
                self._place(item, scope)

    def _walk(self, blocks: Blocks, scope: Scope) -> None:
        walk, inner = Walk(blocks), Scope(scope)
        for carried in blocks.loop.carried:
            value = carried.value
            self.carried.add(value.name)
            self.defined[value.name] = Define(value, ir.Constant(0), value.dims)
            scope.paths[value.name] = ()
            self._scopes[value.name] = scope
            if value.dims:
                self.memory[value.name] = ()
                self._keep(carried.init, (), scope)
        scope.body.append(walk)
        self._place_all(blocks.items, inner)
        walk.body = inner.body
        for carried in blocks.loop.carried:
            if carried.value.dims:
                self._keep(carried.next, (), inner)

    def _place(self, item: Define | Put, scope: Scope) -> None:
        if isinstance(item, Define):
            self.defined[item.value.name] = item
            if self._is_sibling(item, scope):
                return
        dims = sorted(item.dims, key=self.depth.__getitem__)
        path, body = self._loops(dims, self._waits(item, dims, scope), scope)
        item = self._with_reads(item, path, body, scope)
        body.insert(self._first(item, path, body, scope), Leaf(item))
        if isinstance(item, Define):
            self._register(item, path, scope)

    def _register(self, item: Define, path: Path, scope: Scope) -> None:
        name = item.value.name
        self.defined[name] = item
        scope.paths[name] = path
        self._scopes[name] = scope
        match item.op:
            case ir.ReduceTile(axis=axis) | ir.FoldTile(axis=axis):
                if path[-1].axis != axis:
                    for state in self.states.get(name, [name]):
                        self.memory[state] = self._home(name)
            case ir.Dot() | ir.RankTile() | ir.MergeTile():
                for state in self.states.get(name, [name]):
                    self.memory[state] = path
            case _:
                pass

    def _is_sibling(self, item: Define, scope: Scope) -> bool:
        """Whether a fold is computed by another item already, of which it is a state variable."""
        op = item.op
        if not isinstance(op, ir.FoldTile | ir.RankTile | ir.MergeTile):
            return False
        found = fold_of(op.op)
        assert found is not None  # checked
        fold, place = found
        key = (fold.name, replace(op, op=""), id(scope))
        name = item.value.name
        if key not in self._folds:
            self._folds[key] = name
            self.states[name] = ["" for _ in fold.state]
            self.states[name][place] = name
            return False
        first = self._folds[key]
        self.states[first][place] = name
        scope.paths[name] = scope.paths[first]
        self._scopes[name] = scope
        if first in self.memory:
            self.memory[name] = self.memory[first]
        return True

    def _reads(self, item: Define | Put) -> tuple[ir.Value, ...]:
        """The values that an item waits for: a matrix product reads plain tiles of tensors where they are."""
        if isinstance(item, Define) and isinstance(item.op, ir.Dot):
            return tuple(read for v in operands(item.op) for read in self._read_of(v, item))
        return _all_reads(item)

    def _first(self, item: Define | Put, path: Path, body: Sequence[Node], scope: Scope) -> int:
        """Where in a body an item stands: behind what it reads, so that what reads it may share the loops behind it. Stores and
        reductions stand behind all that is there."""
        if isinstance(item, Put) or not isinstance(
            item.op, ir.Elementwise | ir.Cast | ir.Positions | ir.Constant
        ):
            return len(body)
        first = 0
        for read in operands(item.op):
            for name, leaf in self._leaves(read, scope):
                if leaf[: len(path)] == path:
                    first = max(
                        first, _index(body, leaf[len(path)] if len(leaf) > len(path) else None, name) + 1
                    )
        return first if any(isinstance(node, Loop) for node in body[first:]) else len(body)

    def _waits(self, item: Define | Put, dims: Sequence[str], scope: Scope) -> Iterable[ir.Value]:
        """The values that have to be there before an item: what will be computed again inside its loops is made of others."""
        reads = self._reads(item)
        if isinstance(item, Define) and isinstance(item.op, ir.Dot | ir.RankTile | ir.MergeTile):
            return reads
        return [value for read in reads for value in self._behind(read, dims, scope)]

    def _behind(self, value: ir.Value, dims: Sequence[str], scope: Scope) -> Iterable[ir.Value]:
        """A value, or what it is made of where it is in no register inside loops over these dims and cheap to compute again."""
        own = sorted(value.dims, key=self.depth.__getitem__)
        is_around = list(dims[: len(own)]) == own
        if is_around or value.name in self.memory or self._again(value, (), [], scope) > AGAIN:
            return (value,)
        made_of = operands(self.defined[value.name].op)
        return [part for operand in made_of for part in self._behind(operand, dims, scope)]

    def _read_of(self, value: ir.Value, item: Define) -> tuple[ir.Value, ...]:
        """What a matrix product waits for of an operand: of a plain tile of a tensor where it begins."""
        if not self._is_direct(value, item):
            return (value,)
        return self._begins(value)

    def _begins(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """The numbers that say where the tile of a load begins."""
        load = self.defined[value.name].op
        assert isinstance(load, ir.LoadTile)
        return tuple(number for at in load.index for number in self.linear(at).numbers)

    def _is_direct(self, value: ir.Value, dot: Define) -> bool:
        """Whether a matrix product can read an operand where it is: every axis moves along one dimension, one of the matrix's
        from neighbour to neighbour."""
        item = self.defined.get(value.name)
        assert isinstance(dot.op, ir.Dot)
        if item is None or value is dot.op.accumulator:
            return False
        if not isinstance(item.op, ir.LoadTile) or item.op.mask is not None:
            return False
        parts = [self.linear(at) for at in item.op.index]
        matrix = set(value.dims).difference(dot.dims)
        if value.dtype not in ("f32", "f64", "bf16") or not all(part.is_known for part in parts):
            return False
        axes = [axis for part in parts for axis in part.factors]
        near = (
            (item.op.tensor, place) in self._unit
            and any(axis in matrix and factor == 1 for axis, factor in part.factors.items())
            for place, part in enumerate(parts)
        )
        return len(set(axes)) == len(axes) and (not matrix or any(near))

    def linear(self, value: ir.Value) -> Linear:
        """An index as a sum of positions, each times a number, and of numbers that are in registers."""
        op = self.defined[value.name].op
        match op:
            case ir.Positions(axis):
                return Linear({axis: 1}, ())
            case _ if not value.dims:
                return Linear({}, (value,))
            case ir.Elementwise("add", (left, right)) if value.dtype in ("i32", "i64"):
                first, second = self.linear(left), self.linear(right)
                shared = first.factors.keys() & second.factors.keys()
                return Linear(
                    {**first.factors, **second.factors},
                    (*first.numbers, *second.numbers),
                    first.is_known and second.is_known and not shared,
                )
            case ir.Elementwise("mul", (left, right)) if value.dtype in ("i32", "i64"):
                for factor, other in ((left, right), (right, left)):
                    by = self.defined[factor.name].op
                    inner = self.linear(other)
                    if isinstance(by, ir.Constant) and inner.is_known and not inner.numbers and by.number > 0:
                        factors = {axis: int(by.number) * n for axis, n in inner.factors.items()}
                        return Linear(factors, ())
            case ir.Cast(source) if source.dtype in ("i32", "i64") and value.dtype in ("i32", "i64"):
                return self.linear(source)
        return Linear({}, (), False)

    def _axis_of(self, value: ir.Value) -> str | None:
        op = self.defined[value.name].op
        return op.axis if isinstance(op, ir.Positions) else None

    def _loops(self, dims: list[str], reads: Iterable[ir.Value], scope: Scope) -> tuple[Path, list[Node]]:
        """The loops over these dims, and their body, after everything that is read."""
        path: Path = ()
        body = scope.body
        for dim in dims:
            least, after = 0, -1
            for read in reads:
                for name, leaf in self._leaves(read, scope):
                    if leaf[: len(path)] != path:
                        continue
                    at = _index(body, leaf[len(path)] if len(leaf) > len(path) else None, name)
                    node = body[at]
                    shared = (
                        isinstance(node, Loop) and node.axis == dim and dim in self.defined[name].value.dims
                    )
                    if shared:
                        least = max(least, at)
                    else:
                        after = max(after, at)
            first = max(least, after + 1)
            loop = next((n for n in body[first:] if isinstance(n, Loop) and n.axis == dim), None)
            if loop is None:
                loop = Loop(dim)
                body.append(loop)
            path, body = (*path, loop), loop.body
        return path, body

    def _leaves(self, read: ir.Value, scope: Scope) -> Iterable[tuple[str, Path]]:
        """Where in this scope a value is computed: nowhere if it comes from outside."""
        name = read.name
        if name in scope.paths:
            first = next((n for n, states in self.states.items() if name in states), name)
            yield first, scope.paths[name]

    def _home(self, name: str) -> Path:
        """The loops inside which a definition's value is known: for a reduction those outside its axis."""
        path = self._scopes[name].paths[name]
        op = self.defined[name].op
        if isinstance(op, ir.ReduceTile | ir.FoldTile):
            return path[: [loop.axis for loop in path].index(op.axis)]
        return path

    # Reading ---------------------------------------------------------------------------------------

    def _with_reads(self, item: Define | Put, path: Path, body: list[Node], scope: Scope) -> Define | Put:
        """The item with what it reads at hand: in a register, in memory, or computed again."""
        if isinstance(item, Put):
            store = item.store
            return replace(
                item,
                store=replace(
                    store,
                    index=tuple(self._at_hand(v, path, body, scope) for v in store.index),
                    value=self._at_hand(store.value, path, body, scope),
                    mask=None if store.mask is None else self._at_hand(store.mask, path, body, scope),
                ),
            )
        match item.op:
            case ir.Dot() as op:
                for value in operands(op):
                    if self._is_direct(value, item):
                        self.direct.add(value.name)
                    else:
                        self._keep(value, path, scope)
                return item
            case ir.RankTile() | ir.MergeTile() as op:
                for value in operands(op):
                    self._keep(value, path, scope)
                return item
            case _:
                hand = {v.name: self._at_hand(v, path, body, scope) for v in operands(item.op)}
                return replace(item, op=_renamed(item.op, hand))

    def _at_hand(self, value: ir.Value, path: Path, body: list[Node], scope: Scope) -> ir.Value:
        if self._is_register(value, path, scope):
            return value
        cost = self._again(value, path, body, scope)
        if cost > AGAIN:
            self._keep(value, path, scope)
            return value
        return self._copy(value, path, body, scope)

    def _is_register(self, value: ir.Value, path: Path, scope: Scope) -> bool:
        """Whether a value is computed in a body around this place, so that it is in a register."""
        name = value.name
        owner = self._scopes[name]
        if not value.dims and name not in self.memory:
            return True
        if owner is not scope or name in self.memory:
            return False
        home = self._home(name)
        return path[: len(home)] == home

    def _again(self, value: ir.Value, path: Path, body: list[Node], scope: Scope) -> float:
        """Vector operations to compute a value in a body that does not have it."""
        name = value.name
        if (name, id(body)) in scope.copies or self._is_register(value, path, scope):
            return 0.0
        if name in self.memory:
            return 1.0
        item = self.defined[name]
        match item.op:
            case ir.Elementwise(fn, _):
                own = float(FUNCTIONS[fn].work) if fn in FUNCTIONS else EXP2
            case ir.LoadTile(index=index, mask=mask):
                axes = [self._axis_of(at) for at in index if at.dims]
                inner = max(value.dims, key=self.depth.__getitem__, default=None)
                plain = mask is None and None not in axes and inner in (None, *axes[-1:])
                return 1.0 if plain else GATHER
            case ir.Cast() | ir.Positions() | ir.Lanes():
                own = 1.0
            case _:
                return float("inf")
        return own + sum(self._again(arg, path, body, scope) for arg in operands(item.op))

    def _copy(self, value: ir.Value, path: Path, body: list[Node], scope: Scope) -> ir.Value:
        """The value, computed once more in a body that does not have it."""
        name = value.name
        if self._is_register(value, path, scope) or name in self.memory:
            return (
                self._at_hand(value, path, body, scope)
                if name not in self.memory
                else self._kept(value, path, scope)
            )
        key = (name, id(body))
        if key not in scope.copies:
            item = self.defined[name]
            hand = {v.name: self._copy(v, path, body, scope) for v in operands(item.op)}
            self._count += 1
            again = replace(value, name=f"{name}%{self._count}")
            self.again.add(again.name)
            copy = Define(again, _renamed(item.op, hand), item.dims)
            body.append(Leaf(copy))
            # A copy may lack loops of the body: it is computed in all of them.
            scope.copies[key] = again
            self._register(copy, path, scope)
        return scope.copies[key]

    def _kept(self, value: ir.Value, path: Path, scope: Scope) -> ir.Value:
        self._keep(value, path, scope)
        return value

    def _keep(self, value: ir.Value, path: Path, scope: Scope) -> None:
        """Keeps a value in memory for a read inside these loops."""
        name = value.name
        if not value.dims:
            return
        shared = self._home(name) if name not in self.memory else self.memory[name]
        if self._scopes[name] is not scope:
            shared = ()
        common = 0
        while common < min(len(shared), len(path)) and shared[common] is path[common]:
            common += 1
        self.memory[name] = shared[:common]
        if name in self.carried:
            self.memory[name] = ()

    def last(self, name: str) -> str:
        """The sum that a value is added to, if it is nothing else; or the value."""
        while name in self.into:
            name = self.into[name]
        return name

    def is_unit(self, tensor: str, place: int) -> bool:
        """Whether neighbours along a dimension of a tensor are neighbours in memory."""
        return (tensor, place) in self._unit

    def uses(self, name: str) -> int:
        """How often a value is read."""
        reads = [v.name for item in items_in(self.body) for v in _all_reads(item)]
        for walk in _walks(self.body):
            reads += [v.name for c in walk.blocks.loop.carried for v in (c.init, c.next)]
        return reads.count(name)

    def place(self, name: str) -> tuple[str, ...]:
        """The dims of a value in memory that loops around its definition and its reads do not share, the innermost last."""
        around = {loop.axis for loop in self.memory[name]}
        dims = self.defined[name].value.dims
        return tuple(sorted((d for d in dims if d not in around), key=self.depth.__getitem__))

    def _into(self) -> dict[str, str]:
        """For each matrix product that is read by a sum alone, in a loop around both, that sum; and for such a sum the next one
        in turn."""
        found: dict[str, str] = {}
        for item in items_in(self.body):
            if not (isinstance(item, Define) and isinstance(item.op, ir.ReduceTile) and item.op.op == "sum"):
                continue
            part, total = item.op.value, item.value
            if part.name not in self.memory or total.name not in self.memory or part.dtype != total.dtype:
                continue
            owner = self._scopes[total.name]
            made, around = self.defined[part.name].op, self._home(total.name)
            path = owner.paths[total.name]
            shared = path[: len(around) + 1]
            if self._scopes[part.name] is not owner or owner.paths[part.name][: len(shared)] != shared:
                continue
            begins = isinstance(made, ir.Dot) and (
                made.accumulator is None or self.is_nothing(made.accumulator)
            )
            alike = self.place(part.name) == self.place(total.name) and self.uses(part.name) == 1
            if (begins or part.name in found.values()) and alike:
                found[part.name] = total.name
        return found

    def _stored(self) -> dict[str, ir.Store]:
        """For each matrix product that is made once and only stored, its store: at plain positions, in its own dtype, to a
        tensor of which neighbours along the last dimension are neighbours in memory."""
        found = {}
        for item in items_in(self.body):
            if not isinstance(item, Put) or item.store.mask is not None:
                continue
            store, value = item.store, item.store.value
            made = self.defined[value.name].op
            places = [self.defined[at.name].op for at in store.index]
            axes = [at.axis if isinstance(at, ir.Positions | ir.Start) else None for at in places]
            plain = None not in axes and len(set(axes)) == len(axes) and set(value.dims) <= set(axes)
            dtype = self._dtypes.get(store.tensor)
            if not isinstance(made, ir.Dot) or not plain or self.uses(value.name) != 1:
                continue
            if made.accumulator is not None and not self.is_nothing(made.accumulator):
                continue
            path = self._scopes[value.name].paths[value.name]
            if path or dtype != value.dtype or (store.tensor, len(axes) - 1) not in self._unit:
                continue
            if dtype in ("f32", "f64"):
                found[value.name] = store
        return found

    def is_nothing(self, value: ir.Value) -> bool:
        """Whether a value is 0, and no loop changes it."""
        made = self.defined[value.name].op
        return isinstance(made, ir.Constant) and not made.number and value.name not in self.carried

    def stored_as(self, name: str, dtypes: Mapping[str, str]) -> set[str]:
        """The dtypes in which a value is stored to tensors; "" among them where it is read otherwise."""
        found: set[str] = set()
        for item in items_in(self.body):
            if isinstance(item, Put) and item.store.value.name == name:
                found.add(dtypes[item.store.tensor])
            elif any(read.name == name for read in _all_reads(item)):
                found.add("")
        return found

    # What is needed ----------------------------------------------------------------------------------

    def _needed(self) -> set[str]:
        """Names of the values that stores and walks depend on."""
        leaves = {i.value.name: i for i in items_in(self.body) if isinstance(i, Define)}
        primary = {state: name for name, states in self.states.items() for state in states}
        pending = [v.name for i in items_in(self.body) if isinstance(i, Put) for v in self._reads(i)]
        for walk in _walks(self.body):
            loop = walk.blocks.loop
            pending += [loop.start.name, loop.stop.name]
            pending += [v.name for c in loop.carried for v in (c.init, c.next)]
        needed: set[str] = set()
        while pending:
            name = pending.pop()
            name = primary.get(name, name)
            if name in needed:
                continue
            needed.add(name)
            if name in leaves:
                item = leaves[name]
                pending += [v.name for v in operands(item.op)] if not isinstance(item.op, ir.Dot) else []
                if isinstance(item.op, ir.Dot):
                    for value in operands(item.op):
                        # What one product reads where it is, another may add to.
                        if self._is_direct(value, item):
                            pending += [number.name for number in self._begins(value)]
                        else:
                            pending.append(value.name)
        return needed


def _all_reads(item: Define | Put) -> tuple[ir.Value, ...]:
    return operands(item.op if isinstance(item, Define) else item.store)


def _renamed(op: ir.Op, hand: Mapping[str, ir.Value]) -> ir.Op:
    """The op with other operands."""
    match op:
        case ir.Elementwise(fn, args):
            return ir.Elementwise(fn, tuple(hand[v.name] for v in args))
        case ir.FoldTile(fold, values, axis):
            return ir.FoldTile(fold, tuple(hand[v.name] for v in values), axis)
        case ir.ReduceTile(fold, value, axis):
            return ir.ReduceTile(fold, hand[value.name], axis)
        case ir.Cast(value, written):
            return ir.Cast(hand[value.name], written)
        case ir.LoadTile(tensor, index, mask, other):
            at = tuple(hand[v.name] for v in index)
            return ir.LoadTile(tensor, at, None if mask is None else hand[mask.name], other)
        case _:
            return op


def _index(body: Sequence[Node], loop: Loop | None, name: str) -> int:
    for at, node in enumerate(body):
        if node is loop or (loop is None and name in _made(node)):
            return at
    raise NotNative(f"{name} is read before it is computed")


def _made(node: Node) -> list[str]:
    """The values that a node itself gives to what stands after it."""
    match node:
        case Leaf(Define(value)):
            return [value.name]
        case Walk(blocks):
            return [carried.value.name for carried in blocks.loop.carried]
        case _:
            return []


def _walks(body: Sequence[Node]) -> Iterable[Walk]:
    for node in body:
        if isinstance(node, Walk):
            yield node
        if isinstance(node, Loop | Walk):
            yield from _walks(node.body)


def _prune(body: list[Node], needed: set[str]) -> None:
    """Removes what nothing needs, and loops around nothing."""
    kept: list[Node] = []
    for node in body:
        if isinstance(node, Leaf):
            if isinstance(node.item, Put) or node.item.value.name in needed:
                kept.append(node)
            continue
        assert isinstance(node, Loop | Walk)
        _prune(node.body, needed)
        if node.body or isinstance(node, Walk):
            kept.append(node)
    body[:] = kept
