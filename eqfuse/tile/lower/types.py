"""Tile dims and dtypes of expressions, known before anything is emitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Let, Loop, Stmt, Store
from eqfuse.records import dataclass
from eqfuse.terms.dtypes import LIMITS, STORED
from eqfuse.terms.folds import Fold, contributions, fold_of, sides
from eqfuse.terms.functions import ROUNDINGS
from eqfuse.terms.integers import BITS, identity
from eqfuse.terms.intervals import Range, chosen
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    children,
    walk,
)
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

    def of(self, expr: Expr) -> Type:
        memo: dict[Expr, Type] = {}
        for node in walk(expr):
            found = fold_of(node.op) if isinstance(node, Reduce) else None
            if isinstance(node, Reduce) and found is not None:
                dtypes = self.folded(found[0], [memo[part][1] for part in contributions(node)])
                memo[node] = memo[node.body][0] - {node.axis}, dtypes[found[1]]
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
            reduced_dtype(fold.name, part, self.accumulate)
            if isinstance(number.value, int) or math.isinf(number.value)
            else self.accumulate
            for part, number in zip(parts, fold.identity, strict=True)
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
                return dims, "i64" if dtype == "i32" and not fits(span(expr, self.tensors)) else dtype
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


def fits(span: Range) -> bool:
    """Whether 32 bits hold every integer of a range."""
    return span[0] >= WORD[0] and span[1] <= WORD[1]


def span(expr: Expr, tensors: Mapping[str, str], positions: int = POSITIONS) -> Range:
    """The range of an integer expression whose parts are i32 or narrower, given the dtypes of tensors: an i32 that is
    read may be any, an axis has at most so many `positions`."""

    def of(part: Expr) -> Range:
        return span(part, tensors, positions)

    match expr:
        case Const(number):
            return int(number), int(number)
        case Axis() | Size():
            return 0, positions
        case Load(tensor, _) if tensors.get(tensor) in STORED:
            return LIMITS[tensors[tensor]]
        case Call("mul", (Axis(axis), Call("floordiv", (whole, Size(size))))) if axis == size:
            return of(whole)  # where the axis's share of it starts
        case Call("add" | "sub" | "mul" | "neg" | "sq" | "abs" | "lshift" as fn, args):
            return _ends(fn, [of(arg) for arg in args])
        case Call("mod", (_, divisor)):
            return _below(of(divisor))
        case Call("floordiv", (operand, Const(int(divisor)))) if divisor:
            low, high = of(operand)
            return min(low // divisor, high // divisor), max(low // divisor, high // divisor)
        case Call("floordiv", (operand, divisor)):
            low, high = of(operand)
            most = max(-low, high)
            return (min(low, 0), max(high, 0)) if of(divisor)[0] >= 0 else (-most, most)
        case Call("bitand", (Const(int(mask)), _) | (_, Const(int(mask)))) if mask >= 0:
            return 0, mask
        case Call("bitand" | "bitor" | "bitxor", args) if all(of(arg)[0] >= 0 for arg in args):
            return 0, (1 << max(of(arg)[1].bit_length() for arg in args)) - 1
        case Call("rshift", (operand, _)):
            low, high = of(operand)
            return min(low, 0), max(high, 0)
        case Call("maximum" | "minimum", args) | Call("where", (_, *args)):
            parts = [of(arg) for arg in args]
            return min(part[0] for part in parts), max(part[1] for part in parts)
        case Call(fn, _) if fn in ROUNDINGS:
            return LIMITS[fn]
        case Reduce() if (part := chosen(expr)) is not None:
            low, high = of(part)
            empty = _empty(expr)
            return min(low, empty), max(high, empty)
        case _:  # of 32 bits as its parts are
            return WORD


def _empty(reduction: Reduce) -> int:
    """What a reduction that chooses gives where an axis has no positions."""
    found = fold_of(reduction.op)
    number = REDUCTIONS[reduction.op] if found is None else found[0].identity[found[1]].value
    return identity(number, "i32")


def _below(divisor: Range) -> Range:
    """The remainders by divisors of a range."""
    return min(divisor[0] + 1, 0), max(divisor[1] - 1, 0)


def _ends(fn: str, args: Sequence[Range]) -> Range:
    """The range of a function that is monotonic in each argument, but at 0."""
    match fn, args:
        case "neg", [(low, high)]:
            return -high, -low
        case "abs", [(low, high)]:
            return 0, max(-low, high)
        case "sq", [(low, high)]:
            return 0, max(low * low, high * high)
        case "add", [(a, b), (c, d)]:
            return a + c, b + d
        case "sub", [(a, b), (c, d)]:
            return a - d, b - c
        case "lshift", [(a, b), (_, by)]:
            return min(a << min(max(by, 0), BITS), 0), max(b << min(max(by, 0), BITS), 0)
        case _, [left, right]:
            products = [a * b for a in left for b in right]
            return min(products), max(products)
    raise TypeError(fn)
