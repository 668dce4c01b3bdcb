"""Expressions over positions as ops on tiles.

The method is Neptune's (section 5.1): each value carries the order of its dims, and operands are
permuted and expanded to a common order, that of the kernel's blocks. A sum of products whose
factors fall into two sides becomes a dot; no pattern of known operators is looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from eqfuse.loops import nodes as loops
from eqfuse.loops.contraction import (
    Contraction,
    Product,
    as_written,
    contraction,
    factors,
    read_under_masks,
    scaled,
)
from eqfuse.loops.guards import Guards, follows
from eqfuse.terms.assume import conjuncts, folded, is_zero_without
from eqfuse.terms.bounds import is_telling, tells
from eqfuse.terms.folds import contributions, fold_of, over_union, ranks_of, siblings, sides, unpacked
from eqfuse.terms.functions import CASTS, FUNCTIONS
from eqfuse.terms.intervals import NEGATED
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Load,
    Local,
    Reduce,
    Scalar,
    Scan,
    Size,
    call,
    children,
    expanded,
    free_axes,
    rebuild,
    walk,
)
from eqfuse.terms.promises import read_along
from eqfuse.terms.ranges import difference, linear
from eqfuse.tile.check import TileError
from eqfuse.tile.dtypes import INTEGERS, NARROW, dot_dtype, identity, result_dtype
from eqfuse.tile.lower.builder import Binding, Builder
from eqfuse.tile.lower.dot import DotRules
from eqfuse.tile.lower.reads import Reads, is_position, is_quotient, is_shift, may_be_outside
from eqfuse.tile.lower.types import Types
from eqfuse.tile.nodes import (
    Argument,
    Dot,
    Elementwise,
    FoldTile,
    LoadTile,
    MergeTile,
    RankTile,
    ReduceTile,
    ScanTile,
    Value,
)


class Expressions:
    """Lowers the expressions of one kernel, each once per level of loops that it depends on.

    `reads` counts the places that read each named value. `walk_loop` lowers a loop of the nest;
    a fold over an axis that no open loop walks becomes one. `needed` are the conditions without which
    nothing reads a named value, `elements` has those without which the program does not read an element that may be outside,
    `ascending` tensors and the dimension along which their integers do not fall.
    """

    def __init__(
        self,
        build: Builder,
        types: Types,
        reads: Counter[str],
        walk_loop: Callable[[loops.Loop], None],
        dots: DotRules,
        needed: Mapping[str, Sequence[Expr]],
        elements: Reads,
        ascending: Collection[tuple[str, int]] = (),
    ) -> None:
        self._build = build
        self._types = types
        self._reads = reads
        self._walk_loop = walk_loop
        self._dots = dots
        self._needed = needed
        self._elements = elements
        self._ascending = ascending
        self._proven: Mapping[Expr, bool] = {}
        self._guards: tuple[Expr, ...] = ()
        self._zero: dict[str, frozenset[str]] = {}
        self._loaded: set[str] = set()
        self._fresh = 0

    def value(self, expr: Expr, hint: str = "") -> Value:
        """The value of an expression in its own dtype, computed once per level that it depends on."""
        guards = self._guards if any(isinstance(node, Load) for node in walk(expr)) else ()
        memo = self._build.scopes[self._level(expr, *guards)].values
        key = (expr, guards)
        if key not in memo:
            memo[key] = self._lowered(expr, hint)
        return memo[key]

    def _level(self, *exprs: Expr) -> int:
        """The innermost loop that expressions depend on, folds over its tile included."""
        levels = [0]
        for node in walk(*exprs):
            match node:
                case Axis(axis) | Reduce(_, axis, _) | Scan(_, _, axis):
                    levels.append(self._build.level_of_axis(axis))
                case Local(name, _):
                    binding = self._build.binding(name)
                    levels.append(self._build.level_of_name(name))
                    if binding.value is None and binding.expr is not None:
                        levels.append(self._level(binding.expr))
        return max(levels)

    def _lowered(self, expr: Expr, hint: str) -> Value:
        build = self._build
        match expr:
            case Const(number):
                return build.constant(number, self._types.dtype(expr))
            case Scalar(name):
                return build.emit(Argument(name), (), self._types.scalars[name], f"{name}_arg")
            case Axis(name):
                return build.positions(name) if build.is_tile(name) else build.start(name)
            case Size(axis):
                return build.extent(axis)
            case Local(name, _):
                binding = self._build.binding(name)
                if binding.value is not None:
                    return binding.value
                assert binding.expr is not None
                return self.named(name, binding.expr, name)
            case Load(tensor, index):
                # What is stored or carried may be computed where nothing reads it.
                kept = self._elements.kept.get(expr, ())
                more = self._telling(g for g in kept if not follows(g, self._guards))
                inside = self._elements.inside(expr, (*self._guards, *kept), self._proven)
                with self.under((*self._guards, *more, *inside)):
                    return self._load(tensor, index, inside, hint)
            case Reduce():
                # Conditions on a position of the same name outside are not about the one bound here.
                with self.under(tuple(g for g in self._guards if expr.axis not in self.free(g))):
                    return self._reduce(expr, hint)
            case Scan():
                return self._scan(expr, hint)
            case Call(fn, args):
                return self._call(expr, fn, args, hint)
        raise TypeError(f"not an expression: {expr!r}")

    def _call(self, expr: Call, fn: str, args: tuple[Expr, ...], hint: str) -> Value:
        build = self._build
        match fn, args:
            case _ if fn in CASTS:
                value = self.value(args[0])
                return self._zeros_as(build.cast(value, fn, hint, written=True), value)
            case "where", (condition, left, right):
                truth = self.value(condition)
                with self.under((*self._guards, *conjuncts(condition, True))):
                    first = self.value(left)
                with self.under((*self._guards, *conjuncts(condition, False))):
                    second = self.value(right)
                return build.elementwise("where", (truth, first, second), hint or "chosen")
            case "and", (left, right):
                first = self.value(left)
                with self.under((*self._guards, *conjuncts(left, True))):
                    return build.elementwise("and", (first, self.value(right)), hint or "both")
            case "add", (left, right):
                dot = self._accumulated(right, left, hint) or self._accumulated(left, right, hint)
                if dot is not None:
                    return dot
            case "floordiv" | "mod", (Axis(axis) as position, Const(int(divisor))) if self._types.is_uniform(
                position, divisor
            ):
                by = build.constant(divisor, "i32")
                quotient = build.elementwise("floordiv", (build.start(axis), by), hint or "quotient")
                if fn == "floordiv":
                    return quotient
                first = build.elementwise("mul", (quotient, by), "first")
                return build.elementwise("sub", (build.positions(axis), first), hint or "remainder")
        if (ranks := ranks_of(expr)) is not None:
            return self._merge(expr, ranks, hint)
        operands = [self.value(arg) for arg in args]
        if self._types.dtype(expr) == "i64":
            operands = [build.cast(operand, "i64") for operand in operands]
        value = build.elementwise(fn, operands, hint or fn)
        if (row := FUNCTIONS.get(fn)) is not None and row.zero_at_zero:
            common = [self._zero.get(operand.name, frozenset()) for operand in operands]
            self._zero[value.name] = frozenset.intersection(*common)
        return value

    def named(self, name: str, expr: Expr, hint: str) -> Value:
        """The value of what a name of the nest stands for."""
        with self.under(self._telling(self._needed.get(name, ()))):
            return self.value(expr, hint)

    def _telling(self, guards: Iterable[Expr]) -> tuple[Expr, ...]:
        """The conditions that are about positions that exist here, and not known to hold."""
        unproven = (folded(guard, self._proven) for guard in guards)
        return tuple(
            guard
            for guard in unproven
            if not isinstance(guard, Const) and all(map(self._build.is_open, free_axes(guard)))
        )

    @contextmanager
    def proving(self, proven: Mapping[Expr, bool]) -> Iterator[None]:
        """Lowers where these predicates have these truth values."""
        outer, self._proven = self._proven, {**self._proven, **proven}
        yield
        self._proven = outer

    @contextmanager
    def under(self, guards: tuple[Expr, ...]) -> Iterator[None]:
        """Lowers under these conditions: accesses need be valid only where all of them hold."""
        outer, self._guards = self._guards, guards
        yield
        self._guards = outer

    def index(self, expr: Expr) -> Value:
        value = self.value(expr)
        if value.dtype not in INTEGERS:
            raise TileError(f"an index is a {value.dtype}, not an integer: {expr}")
        return value

    def _load(self, tensor: str, index: tuple[Expr, ...], inside: Guards, hint: str) -> Value:
        values = tuple(self.index(expr) for expr in index)
        dims = tuple(dict.fromkeys(axis for value in values for axis in value.dims))
        guards = self._relevant(tuple(g for g in self._guards if g not in inside), dims, index)
        guards = (*guards, *inside)
        # Conditions say something of positions that exist.
        wider = {axis for guard in guards for axis in self._types.dims(guard)}
        mask = self.mask((*dims, *sorted(wider - {*dims})), guards)
        op = LoadTile(tensor, values, mask, 0.0)
        dims = dims if mask is None else (*dims, *(axis for axis in mask.dims if axis not in dims))
        name = hint or (tensor.lower() if tensor.lower() != tensor else f"{tensor}_tile")
        value = self._build.emit(op, dims, self._types.tensors[tensor], name)
        self._loaded.add(value.name)
        self._zero[value.name] = frozenset(filter(self._build.is_ragged, dims))
        return value

    def _relevant(
        self, guards: Sequence[Expr], dims: tuple[str, ...], index: tuple[Expr, ...]
    ) -> Sequence[Expr]:
        """The conditions under which an access is read: those on its own positions; where nothing is shifted and no index
        is data, only those that compare its positions with data, or are about the positions of a quotient. For a
        shifted index that they do not bound, and for a position that is a number, all that may keep it inside, though that
        widens the access."""
        own = [guard for guard in guards if self._types.dims(guard) <= set(dims)]
        if any(map(is_position, index)):
            return [guard for guard in guards if may_keep_inside(guard, index)]
        if not any(map(may_be_outside, walk(*index))):
            divided = set().union(*(self.free(part) for part in walk(*index) if is_quotient(part)))
            # A quotient may be one number for a whole tile, which then has no dimension of the axis that is divided.
            near = [guard for guard in guards if self._types.dims(guard) <= {*dims, *divided}]
            return [
                guard
                for guard in near
                if (guard in own and self._cuts(guard, index)) or any(tells(guard, axis) for axis in divided)
            ]
        if (own and _bounds_shifts(own, index)) or not any(map(is_shift, walk(*index))):
            return own
        connected = [guard for guard in self._connected(guards, index) if may_keep_inside(guard, index)]
        return [guard for guard in guards if guard in own or guard in connected]

    def _cuts(self, guard: Expr, index: Sequence[Expr]) -> bool:
        """Whether a condition compares positions that an access is made at with data, or what ascends along them."""
        axes = frozenset[str]().union(*map(free_axes, index))
        nodes = list(walk(guard))
        if any(isinstance(node, Load | Scalar) for node in nodes) and any(
            tells(guard, axis) for axis in axes
        ):
            return True
        return any(
            tensor == node.tensor and read_along(node, place, axis) is not None
            for node in nodes
            if isinstance(node, Load)
            for tensor, place in self._ascending
            for axis in axes
        )

    def _connected(self, guards: Sequence[Expr], index: tuple[Expr, ...]) -> list[Expr]:
        """The conditions that may bound an index: those on the axes of what is shifted or data in it, and on axes that such
        conditions compare them with."""
        parts = [part for part in index if any(map(may_be_outside, walk(part)))]
        if any(isinstance(node, Load | Local) for node in walk(*parts)):
            return list(guards)
        axes = set().union(*map(self.free, parts))
        found: list[Expr] = []
        left = list(guards)
        while more := [guard for guard in left if not self.free(guard) or axes & self.free(guard)]:
            found += more
            axes = axes.union(*map(self.free, more))
            left = [guard for guard in left if guard not in more]
        return [guard for guard in guards if guard in found]

    def mask(self, dims: Iterable[str], guards: Sequence[Expr] = ()) -> Value | None:
        """Which elements of a tile exist; None if all do."""
        build = self._build
        found: Value | None = None
        parts = [build.bound(axis) for axis in build.ordered(dims) if build.is_ragged(axis)]
        for guard in guards:
            # A condition may itself read a tensor, under the conditions that stand before it alone.
            with self.under(self._guards[: self._guards.index(guard)]):
                parts.append(build.truth(self.value(guard)))
        for part in parts:
            found = part if found is None else build.elementwise("and", (found, part), "mask")
        return found

    # Reductions ---------------------------------------------------------------------------------

    def _reduce(self, expr: Reduce, hint: str) -> Value:
        build, op, axis = self._build, expr.op, expr.axis
        if build.blocks[axis].kind == "grid":
            raise TileError(
                f"a reduction folds over axis {axis!r}, whose positions program instances share out"
            )
        found = fold_of(op)
        if found is not None:
            return self._fold(expr, *found, hint)
        plan = self._dot_plan(expr)
        if plan is not None and not plan.outside.is_one:
            inner = Reduce(op, axis, plan.inside.expr())
            outside = plan.outside
            return self.value(Product((inner, *outside.over), outside.under).expr(), hint)
        if not build.is_open(axis):
            return self._folded(expr, hint)
        if plan is not None and (dot := self._dot(plan, axis, None, hint)) is not None:
            return dot
        value = self.value(expr.body)
        dtype = self._types.dtype(expr)
        value = self._zeros_as(build.cast(value, dtype), value)
        if not build.is_tile(axis):
            return value
        if axis not in value.dims:
            value = build.align(value, build.ordered((*value.dims, axis)))
        value = self._padded(value, axis, identity(op, dtype))
        dims = tuple(dim for dim in value.dims if dim != axis)
        return build.emit(ReduceTile(op, value, axis), dims, dtype, hint or f"{op}_{axis}")

    def _fold(self, expr: Reduce, fold: Fold, place: int, hint: str) -> Value:
        """A state variable of a registered fold, from the tiles that all of them are made of."""
        build, axis = self._build, expr.axis
        if not build.is_open(axis):
            return self._folded(expr, hint)
        parts = [self.value(part) for part in contributions(expr)]
        dtypes = self._types.folded(fold, [part.dtype for part in parts])
        parts = [build.cast(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        ranks = ranks_of(expr)
        if not build.is_tile(axis):
            return parts[place] if ranks is None else self._alone(expr.op, ranks, parts[place])
        dims = build.ordered({axis}.union(*(part.dims for part in parts)))
        tiles = tuple(
            self._padded(build.align(part, dims), axis, identity(op, part.dtype))
            for part, op in zip(parts, fold.ops, strict=True)
        )
        rest = tuple(dim for dim in dims if dim != axis)
        stem = f"{fold.name}_{fold.state[place]}_{axis}"
        if ranks is not None:
            rest = tuple(ranks if dim == axis else dim for dim in dims)
            found = build.emit(RankTile(expr.op, tiles, axis, ranks), rest, dtypes[place], hint or stem)
            return build.align(found, build.ordered(rest))
        return build.emit(FoldTile(expr.op, tiles, axis), rest, dtypes[place], hint or stem)

    def _scan(self, expr: Scan, hint: str) -> Value:
        """A state variable at each position of the tile that a loop is at, or at the position."""
        build, fold, axis = self._build, expr.fold, expr.axis
        parts = [self.value(part) for part in unpacked(expr.body, len(fold.state))]
        dtypes = self._types.folded(fold, [part.dtype for part in parts])
        parts = [build.cast(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        if not build.is_tile(axis):
            return parts[expr.place]
        dims = build.ordered({axis}.union(*(part.dims for part in parts)))
        if expr.first:
            least = build.constant(expr.first, "i32")
            is_there = build.elementwise("ge", (build.positions(axis), least), "is_there")
            nothing = (build.constant(identity(op, d), d) for op, d in zip(fold.ops, dtypes, strict=True))
            parts = [
                build.reconciled("where", (is_there, part, none), part.dtype, part.name)
                for part, none in zip(parts, nothing, strict=True)
            ]
        tiles = tuple(build.align(part, dims) for part in parts)
        return build.emit(ScanTile(fold, expr.place, tiles, axis), dims, dtypes[expr.place], hint)

    def _alone(self, op: str, ranks: str, value: Value) -> Value:
        """The list of one position: the identity after it."""
        build = self._build
        first = build.elementwise("eq", (build.positions(ranks), build.constant(0, "i32")), "first")
        nothing = build.constant(identity(op, value.dtype), value.dtype)
        return build.elementwise("where", (first, value, nothing), f"{value.name}_list")

    def _merge(self, expr: Call, ranks: str, hint: str) -> Value:
        """A state variable of two lists, merged."""
        build = self._build
        found = fold_of(expr.fn)
        assert found is not None  # it has ranks
        fold, place = found
        lists = [[self.value(part) for part in side] for side in sides(expr)]
        both = [
            result_dtype("where", ("bool", a.dtype, b.dtype), build.accumulate)
            for a, b in zip(*lists, strict=True)
        ]
        dtypes = self._types.folded(fold, both)
        dims = build.ordered({ranks}.union(*(value.dims for side in lists for value in side)))
        left, right = (
            tuple(
                self._padded(build.align(build.cast(value, dtype), dims), ranks, identity(op, dtype))
                for value, dtype, op in zip(side, dtypes, fold.ops, strict=True)
            )
            for side in lists
        )
        stem = f"{fold.name}_{fold.state[place]}_{ranks}"
        return build.emit(MergeTile(expr.fn, left, right, ranks), dims, dtypes[place], hint or stem)

    def _folded(self, expr: Reduce, hint: str) -> Value:
        """A fold over an axis that no open loop walks: a loop of its own, with one carried value."""
        axis = expr.axis
        body = self.closed(expr.body, axis)
        seen, tiles, carried = {}, {}, []
        for each in siblings(expr):
            self._fresh += 1
            name = hint or f"{each.op.replace('.', '_')}_{axis}"
            state, new = f"{name}%{self._fresh}", f"{name}_new%{self._fresh}"
            seen[each.op], tiles[each.op] = Local(state, ()), Reduce(each.op, axis, body)
            init = Const(identity(each.op, self._types.dtype(each)))
            carried.append(loops.Carried(state, (), init, new))
        unit = self._build.blocks[axis].kind == "unit"
        updates = tuple(
            loops.Let(item.next, (), over_union(each, seen, tiles))
            for each, item in zip(siblings(expr), carried, strict=True)
        )
        self._walk_loop(loops.Loop(axis, Const(0), Size(axis), unit, tuple(carried), updates))
        value = self._build.binding(seen[expr.op].name).value
        assert value is not None
        return value

    def extremes(self, value: Value, guards: Sequence[Expr]) -> tuple[Value, Value]:
        """Least and greatest element of a tile of integers, those left out that are past the end of an axis or at
        which a guard does not hold; the identities of minimum and maximum where none is left."""
        build = self._build
        found = []
        for op in ("min", "max"):
            nothing = build.constant(identity(op, value.dtype), value.dtype)
            least = value
            for guard in guards:
                holds = build.truth(self.value(guard))
                least = build.elementwise("where", (holds, least, nothing), f"{value.name}_held")
            for axis in least.dims:
                least = self._padded(least, axis, identity(op, value.dtype))
                rest = tuple(dim for dim in least.dims if dim != axis)
                least = build.emit(ReduceTile(op, least, axis), rest, value.dtype, f"{value.name}_{op}")
            found.append(least)
        return found[0], found[1]

    def anywhere(self, condition: Expr) -> Value:
        """Whether a condition holds at some position of those that the blocks have: a scalar."""
        build = self._build
        found = build.cast(build.truth(self.value(condition)), "i32", "some")
        for axis in reversed(found.dims):
            found = self._padded(found, axis, 0)
            rest = tuple(dim for dim in found.dims if dim != axis)
            found = build.emit(ReduceTile("max", found, axis), rest, "i32", f"some_{axis}")
        return build.truth(found)

    def _padded(self, value: Value, axis: str, number: float) -> Value:
        """`value` with `number` at positions past the end of the axis."""
        build = self._build
        if not build.is_ragged(axis) or (number == 0 and axis in self._zero.get(value.name, ())):
            return value
        bound = build.align(build.bound(axis), value.dims)
        fill = build.constant(number, value.dtype)
        op = Elementwise("where", (bound, value, fill))
        masked = build.emit(op, value.dims, value.dtype, f"{value.name}_in")
        if number == 0:
            self._zero[masked.name] = self._zero.get(value.name, frozenset()) | {axis}
        return masked

    def _zeros_as(self, value: Value, source: Value) -> Value:
        """Notes that `value` is 0 past the end where `source` is."""
        self._zero.setdefault(value.name, self._zero.get(source.name, frozenset()))
        return value

    # Dots ---------------------------------------------------------------------------------------

    def _dot_plan(self, expr: Reduce) -> Contraction | None:
        """How a reduction is a dot of reals; None where it is not one."""
        if expr.op != "sum" or not self._build.is_tile(expr.axis):
            return None
        look = partial(self._look, axis=expr.axis)
        plan = contraction(factors(expr.body, look), expr.axis, self._types.dims, self._build.ordered)
        if plan is None or not self._dots.allow(plan, self._build.blocks[expr.axis].size):
            return None
        both = [self._types.dtype(side.expr()) for side in (plan.left, plan.right)]
        if set(both) == {self._build.accumulate}:
            plan = as_written(plan, expr.body, look, self._types.dims)
        elif {*both} <= {
            self._build.accumulate,
            "bf16",
        }:  # sums of products of f16 have more range than they need
            plan = scaled(plan, self._types.dims, True)
        return None if plan is None or all(dtype in INTEGERS for dtype in both) else plan

    def _look(self, local: Local, axis: str) -> Expr | None:
        """The definition of a named value that means the same here as where it was computed."""
        level = self._build.level_of_name(local.name)
        definition = self._build.scopes[level].names[local.name].expr
        if definition is None or axis not in self._types.dims(local):
            return None
        opened = {scope.axis for scope in self._build.scopes[level + 1 :]}
        bound = {node.axis for node in walk(definition) if isinstance(node, Reduce)}
        return None if opened & bound else definition

    def _dot(self, plan: Contraction, axis: str, accumulator: Value | None, hint: str) -> Value | None:
        """The dot; None where a guard of an access has widened an operand by dims of the other one."""
        build = self._build
        left = self._as_stored(plan.left, self.value(self._without(plan.left.expr(), plan.left_masks)))
        right = self._as_stored(plan.right, self.value(self._without(plan.right.expr(), plan.right_masks)))
        left_dims, right_dims = (*plan.batch, *plan.rows, axis), (*plan.batch, axis, *plan.columns)
        if not (set(left.dims) <= set(left_dims) and set(right.dims) <= set(right_dims)):
            return None
        dtype = build.accumulate
        if plan.rows:  # a vector is not rounded: no matrix unit wants it narrow
            loaded = (left.name in self._loaded, right.name in self._loaded)
            dtype = dot_dtype(left.dtype, right.dtype, *loaded, build.accumulate)
        left = self._operand(left, axis, dtype, left_dims)
        right = self._operand(right, axis, dtype, right_dims)
        op = Dot(
            left,
            right,
            axis,
            accumulator,
            self._mask_of(plan.left_masks, left_dims),
            self._mask_of(plan.right_masks, right_dims),
        )
        return build.emit(op, plan.dims, build.accumulate, hint or "dot")

    def _as_stored(self, side: Product, value: Value) -> Value:
        """One side of a dot in the narrow dtype of the tensor whose elements, or 0, it is made of."""
        load = read_under_masks(self._written(side.expr()))
        dtype = None if load is None else self._types.tensors[load.tensor]
        if dtype not in NARROW or value.dtype == dtype:
            return value
        value = self._build.cast(value, dtype)
        self._loaded.add(value.name)
        return value

    def _without(self, operand: Expr, masks: Sequence[Expr]) -> Expr:
        """One side of a dot with 0 times itself where its masks are false and it is not that by itself."""
        for mask in masks:
            condition, value = (
                (mask.args[0], True) if isinstance(mask, Call) and mask.fn == "not" else (mask, False)
            )
            if not is_zero_without(self._written(operand), condition, value):
                operand = call("where", mask, operand, call("mul", operand, Const(0.0)))
        return operand

    def _written(self, expr: Expr) -> Expr:
        """With named values replaced by what they are, but for carried ones and folds."""

        def value_of(local: Local) -> Expr | None:
            value = self._build.binding(local.name).expr
            return None if isinstance(value, Reduce) else value

        return expanded(expr, value_of)

    def _mask_of(self, masks: Sequence[Expr], dims: tuple[str, ...]) -> Value | None:
        """The masks of one side of a dot, in its order."""
        if not masks:
            return None
        truths = [self._build.truth(self.value(mask)) for mask in masks]
        whole = truths[0]
        for truth in truths[1:]:
            whole = self._build.elementwise("and", (whole, truth), "mask")
        return self._build.align(whole, dims)

    def _operand(self, value: Value, axis: str, dtype: str, dims: tuple[str, ...]) -> Value:
        """One side of a dot: 0 past the end of the axis, in the dtype that is multiplied, in the dot's order."""
        build = self._build
        if value.dtype in INTEGERS:
            value = self._zeros_as(build.cast(value, self._build.accumulate), value)
        value = self._padded(value, axis, 0.0)
        return build.align(build.cast(value, dtype), dims)

    def _accumulated(self, term: Expr, other: Expr, hint: str) -> Value | None:
        """`other + term` as one dot with an accumulator, if `term` is a dot that nothing else reads."""
        reduce: Expr | None = term
        if isinstance(term, Local):
            level = self._build.level_of_name(term.name)
            reduce = self._build.scopes[level].names[term.name].expr
            if level != self._build.level or self._reads[term.name] != 1:
                return None
        if not isinstance(reduce, Reduce) or not self._build.is_open(reduce.axis):
            return None
        plan = self._dot_plan(reduce)
        if plan is None or not plan.outside.is_one:
            return None
        if not self._types.dims(other) <= set(plan.dims):
            return None
        value = self._build.cast(self.value(other), self._build.accumulate)
        return self._dot(plan, reduce.axis, self._build.align(value, plan.dims), hint)

    def closed(self, expr: Expr, axis: str) -> Expr:
        """`expr` for use inside a loop over `axis`: its folds over the whole axis computed before."""
        memo: dict[Expr, Expr] = {}
        for node in walk(expr):
            again = rebuild(node, tuple(memo[child] for child in children(node)))
            if isinstance(again, Reduce) and again.axis == axis:
                self._fresh += 1
                name = f"{again.op}_{axis}%{self._fresh}"
                self._build.bind(name, Binding(self.value(again), again))
                again = Local(name, ())
            memo[node] = again
        return memo[expr]

    def free(self, expr: Expr) -> frozenset[str]:
        """Axes that `expr` depends on, those of deferred values included."""
        memo: dict[Expr, frozenset[str]] = {}
        for node in walk(expr):
            found = frozenset[str]().union(*(memo[child] for child in children(node)))
            match node:
                case Axis(axis):
                    found = frozenset({axis})
                case Reduce(_, axis, _):
                    found -= {axis}
                case Scan(_, _, axis):
                    found |= {axis}
                case Local(name, _):
                    binding = self._build.binding(name)
                    if binding.value is None and binding.expr is not None:
                        found = self.free(binding.expr)
            memo[node] = found
        return memo[expr]


def may_keep_inside(guard: Expr, index: Sequence[Expr]) -> bool:
    """Whether a condition may keep an index inside of its tensor: one that is data may be kept there by any."""
    if any(isinstance(node, Load | Local) for node in walk(*index)):
        return True
    return is_telling(guard, frozenset[str]().union(*map(free_axes, index)))


def _bounds_shifts(guards: Sequence[Expr], index: Sequence[Expr]) -> bool:
    """Whether conditions may bound each position of an index that is shifted by a number, on the side that it is shifted to."""
    for part in index:
        form = linear(part)
        match list(form.atoms.items()):
            case [(Axis(axis), 1)] if form.constant:
                is_above = form.constant > 0
                if not any(is_above in _sides(guard, axis) for guard in guards):
                    return False
    return True


def _sides(guard: Expr, axis: str) -> set[bool]:
    """The sides on which a condition may bound a position: True is above."""
    match guard:
        case Call("not", (Call(fn, args),)) if fn in NEGATED:
            guard = call(NEGATED[fn], *args)
    match guard:
        case Call("lt" | "le" | "gt" | "ge" | "eq" | "ne" as fn, (left, right)):
            form = difference(left, right)
            factor = form.terms.get(Axis(axis), 0)
            if any(axis in free_axes(atom) for atom in form.atoms if atom is not Axis(axis)):
                return {True, False}
            if fn == "ne" and form.atoms.keys() == {Axis(axis)} and form.constant == 0:
                return {False}  # it is not 0
            if fn in ("eq", "ne"):
                return {True, False} if factor else set()
            return {(factor > 0) == (fn in ("lt", "le"))} if factor else set()
    return {True, False}
