"""Tile dims and dtypes of expressions, known before anything is emitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Let, Loop, Stmt, Store
from eqfuse.terms.dtypes import LIMITS, STORED
from eqfuse.terms.folds import contributions, fold_of, sides, unpacked
from eqfuse.terms.nodes import (
    REDUCTIONS,
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
    children,
    walk,
)
from eqfuse.terms.ranges import Range, Ranges, integer
from eqfuse.tile.dtypes import reduced_dtype, result_dtype

Type = tuple[frozenset[str], str]
"""Tile dims, unordered, and dtype."""

NO_DIMS: frozenset[str] = frozenset()

WORD = LIMITS["i32"]
POSITIONS = 1 << 24
"""Positions of an axis that products of positions have room for: up to a number that this proves to be below 2**31,
arithmetic on positions stays in the type of indices. What is made of more is i64."""


@dataclass
class Types:
    """Types in one kernel. `named` gives those of the nest's values; `aligned` are the axes whose
    blocks all start at a multiple of the block size."""

    blocks: Mapping[str, Block]
    tensors: Mapping[str, str]
    scalars: Mapping[str, str]
    accumulate: str
    named: Callable[[str], Type]
    aligned: Collection[str]
    is_tile: Callable[[str], bool]
    assumed: dict[str, Type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._integers = Integers(self.tensors)

    def of(self, expr: Expr) -> Type:
        memo: dict[Expr, Type] = {}
        for node in walk(expr):
            found = fold_of(node.op) if isinstance(node, Reduce) else None
            if isinstance(node, Reduce) and found is not None:
                dtypes = self.folded(found[0], [memo[part][1] for part in contributions(node)])
                memo[node] = memo[node.body][0] - {node.axis}, dtypes[found[1]]
                continue
            if isinstance(node, Scan):
                of = [memo[part][1] for part in unpacked(node.body, len(node.fold.state))]
                along = {node.axis} if self.is_tile(node.axis) else NO_DIMS
                memo[node] = memo[node.body][0] | along, self.folded(node.fold, of)[node.place]
                continue
            found = fold_of(node.fn) if isinstance(node, Call) else None
            if isinstance(node, Call) and found is not None:
                parts = [self._join(memo[a], memo[b])[1] for a, b in zip(*sides(node), strict=True)]
                dims = frozenset[str]().union(*(memo[child][0] for child in children(node)))
                memo[node] = dims, self.folded(found[0], parts)[found[1]]
                continue
            memo[node] = self._of(node, [memo[child] for child in children(node)])
        return memo[expr]

    def folded(self, fold: Fold, parts: Sequence[str]) -> tuple[str, ...]:
        """The dtype of each state variable, given those of what a position contributes: wide enough for every
        combination."""
        outer = self.assumed
        found = [
            reduced_dtype(op, part, self.accumulate)
            if isinstance(number.value, int) or math.isinf(number.value)
            else self.accumulate
            for op, part, number in zip(fold.ops, parts, fold.identity, strict=True)
        ]
        while True:
            sides = {
                f"{name}{side}": (NO_DIMS, dtype)
                for name, dtype in zip(fold.state, found, strict=True)
                for side in (1, 2)
            }
            self.assumed = {**outer, **sides}
            wider = [
                self._join((NO_DIMS, dtype), self.of(expr))[1]
                for dtype, expr in zip(found, fold.combine, strict=True)
            ]
            if wider == found:
                self.assumed = outer
                return tuple(found)
            found = wider

    def dims(self, expr: Expr) -> frozenset[str]:
        return self.of(expr)[0]

    def dtype(self, expr: Expr) -> str:
        return self.of(expr)[1]

    def _of(self, expr: Expr, parts: list[Type]) -> Type:
        dims = frozenset[str]().union(*(part[0] for part in parts))
        match expr:
            case Const(bool()):
                return NO_DIMS, "bool"
            case Const(int(number)):
                return NO_DIMS, "i32" if abs(number) < 2**31 else "i64"
            case Const():
                return NO_DIMS, self.accumulate
            case Scalar(name):
                return NO_DIMS, self.scalars[name]
            case Axis(name):
                return frozenset({name}) if self.is_tile(name) else NO_DIMS, "i32"
            case Load(tensor, _):
                return dims, self.tensors[tensor]
            case Local(name, _):
                return self.assumed.get(name) or self.named(name)
            case Reduce(op, axis, _):
                return dims - {axis}, reduced_dtype(op, parts[0][1], self.accumulate)
            case Call("floordiv", (part, Const(int(divisor)))) if self.is_uniform(part, divisor):
                return NO_DIMS, "i32"
            case Call(fn, _):
                dtype = result_dtype(fn, [part[1] for part in parts], self.accumulate)
                return dims, "i64" if dtype == "i32" and not self._integers.fit(expr) else dtype
            case _:
                return NO_DIMS, "i32"

    def is_uniform(self, expr: Expr, divisor: int) -> bool:
        """Whether `expr // divisor` is one number for a whole block: blocks that never straddle a multiple."""
        if not isinstance(expr, Axis) or not self.is_tile(expr.name):
            return False
        block = self.blocks[expr.name]
        starts_aligned = block.kind == "grid" or expr.name in self.aligned
        return starts_aligned and block.size is not None and divisor > 0 and divisor % block.step == 0

    def carried(self, loop: Loop) -> dict[str, Type]:
        """Types of a loop's carried values: wide enough for every `init` and every `next`.

        An `init` that is the identity of a reduction says nothing about the dtype: where what follows it
        are integers, the state is one too.
        """
        outer, found = self.assumed, {item.name: self._initial(item.init) for item in loop.carried}
        settled = False
        while not settled:
            self.assumed = {**outer, **found}
            self._assume(loop.body)
            wider = {
                item.name: self._join(found[item.name], self.assumed[item.next]) for item in loop.carried
            }
            settled, found = wider == found, wider
        self.assumed = outer
        return found

    def stored(self, body: tuple[Stmt, ...]) -> dict[str, str]:
        """The dtype of what a body stores, by tensor."""
        found: dict[str, str] = {}
        for stmt in body:
            match stmt:
                case Let(name, _, expr):
                    self.assumed[name] = self.of(expr)
                case Loop():
                    after = {**self.assumed, **self.carried(stmt)}
                    self.assumed = dict(after)
                    found |= self.stored(stmt.body)
                    self.assumed = after
                case Store(tensor, _, _, expr):
                    found[tensor] = self.dtype(expr)
        return found

    def _initial(self, init: Expr) -> Type:
        match init:
            case Const(float(number)) if number in REDUCTIONS.values():
                return NO_DIMS, "i32"
            case _:
                return self.of(init)

    def _assume(self, body: tuple[Stmt, ...]) -> None:
        for stmt in body:
            match stmt:
                case Let(name, _, expr):
                    self.assumed[name] = self.of(expr)
                case Loop():
                    self.assumed.update(self.carried(stmt))

    def _join(self, left: Type, right: Type) -> Type:
        return left[0] | right[0], result_dtype("where", ("bool", left[1], right[1]), self.accumulate)


class Integers(Ranges):
    """Integers whose parts are i32 or narrower, given the dtypes of tensors: an i32 that is read may be any, an axis has at most
    `POSITIONS`, or none."""

    otherwise = WORD  # of 32 bits as its parts are
    may_be_empty = True

    def __init__(self, tensors: Mapping[str, str]) -> None:
        super().__init__()
        self._tensors = tensors

    def leaf(self, node: Expr) -> Range:
        match node:
            case Axis() | Size():
                return integer(node, 0, POSITIONS)
            case Load(tensor, _) if self._tensors.get(tensor) in STORED:
                return integer(node, *LIMITS[self._tensors[tensor]])
        return integer(node, *WORD)

    def fit(self, expr: Expr) -> bool:
        """Whether 32 bits hold every value."""
        found = self.of(expr)
        return WORD[0] <= found.low and found.high <= WORD[1]
