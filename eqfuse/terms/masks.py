"""What a mask excludes from a sum of products never gets there, whatever the other factors are.

In `sum[j](exp(where(j <= i, s[i,j], -inf) - m[i]) * v[j])` the first factor is 0 wherever the mask is false, and 0 times
a NaN or an infinity in v would be NaN. So the other factors are read where the mask is true alone: v becomes
`where(j <= i, v[j], 0)`. That holds in every schedule, in the tiles that a loop skips as in those that it walks.

A mask is a condition on positions, sizes, integers and truth values; one that compares reals is data. What is NaN
because the mask leaves nothing in the row (exp(-inf - -inf)) stays so.

A product is one wherever a sum is linear in it: a term of a summand, one of its factors, or what is rounded; and inside of a
function that is 0 where the mask is false, as the magnitude of a product is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from eqfuse.terms.assume import is_zero_without
from eqfuse.terms.functions import CASTS, DRAWN, LOGICAL
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    call,
    children,
    expanded,
    free_axes,
    post_order,
    transform,
    walk,
)
from eqfuse.terms.types import KINDS


def masked(program: Program, values: Mapping[str, Expr] | None = None) -> Callable[[Expr], Expr]:
    """What reads every factor of a sum's product only where no mask makes another one 0, in expressions of the
    program; `values` are those of named values in them."""
    if program.assume_finite:
        return lambda expr: expr
    masks = _Masks(program, values or {})
    memo: dict[Expr, Expr] = {}
    return lambda expr: transform(expr, masks.step, memo)


def on_factors(program: Program, values: Mapping[str, Expr]) -> Callable[[Expr], Expr]:
    """What puts the mask of a product on one of its factors, where the sum of the product is a matrix product:
    `sum[k](where(k <= j, s[j,k] * v[k,e], 0))` is one of `where(k <= j, s[j,k], 0)` and v."""
    masks, memo = _Masks(program, values), dict[Expr, Expr]()
    return lambda expr: transform(expr, masks.on_factor, memo)


def is_mask(program: Program, condition: Expr) -> bool:
    """Whether a condition is a mask: it reads no real number."""
    return _Masks(program, {}).is_mask(condition)


def zero_without(expr: Expr, asked: Callable[[Expr], bool]) -> Iterator[Expr]:
    """Of the conditions in an expression that are asked for, outside of reductions, those without which it is 0, negated where it is 0 with them."""
    for condition in filter(asked, dict.fromkeys(_conditions(expr))):
        for value in (False, True):
            if is_zero_without(expr, condition, value):
                yield call("not", condition) if value else condition


class _Masks:
    def __init__(self, program: Program, values: Mapping[str, Expr]) -> None:
        self._integers = frozenset(program.integers)
        declared = (tensor.name for tensor in program.tensors if tensor.dtype in KINDS)
        self._discrete = frozenset((*declared, *program.integer_tensors))
        self._values = values

    def step(self, node: Expr) -> Expr:
        """A sum with its masks at every factor; any other node as it is."""
        if not isinstance(node, Reduce) or node.op != "sum":
            return node
        body = self._guarded(node.body, node.axis)
        return node if body is node.body else Reduce("sum", node.axis, body)

    def on_factor(self, node: Expr) -> Expr:
        """A sum with the mask of its product at the factor that has its axes; any other node as it is."""
        match node:
            case Reduce("sum", axis, Call("where", (condition, Call("mul") as body, Const(0)))) if (
                axis in free_axes(condition) and self.is_mask(condition)
            ):
                axes = {
                    factor: free_axes(self._written(factor, axis))
                    for factor in _factors(body)
                    if axis in free_axes(factor)
                }
                is_matrix = any(
                    not one <= other and not other <= one for one in axes.values() for other in axes.values()
                )
                if is_matrix and not _divides(body):
                    chosen = max(axes, key=lambda factor: len(axes[factor] & free_axes(condition)))
                    masked = {chosen: call("where", condition, chosen, Const(0))}
                    return Reduce("sum", axis, _rebuilt(body, masked))
        return node

    def _guarded(self, expr: Expr, axis: str) -> Expr:
        """A summand in which no mask excludes anything that is read: each of the terms that it is linear in on its own."""
        match expr:
            case Call("add" | "sub" | "neg" as fn, args):
                return call(fn, *(self._guarded(arg, axis) for arg in args))
            case Call("where", (condition, left, right)):
                return call("where", condition, self._guarded(left, axis), self._guarded(right, axis))
            case Call("mul" | "div", _):
                return self._product(expr, axis)
            case Call(fn, (arg,)) if fn in CASTS:
                return call(fn, self._guarded(arg, axis))
            case Call(fn, args) if self._zeros(expr, axis):
                return Call(fn, tuple(self._guarded(arg, axis) for arg in args))
        return expr

    def _product(self, expr: Expr, axis: str) -> Expr:
        factors = list(_factors(expr))
        zeros = {factor: self._zeros(factor, axis) for factor in factors}
        guarded: dict[Expr, Expr] = {}
        for factor in factors:
            inner = self._guarded(factor, axis)
            if axis in free_axes(factor) and _may_be_infinite(factor):
                others = dict.fromkeys(
                    mask for other in factors if other is not factor for mask in zeros[other]
                )
                for mask in others:
                    if mask not in zeros[factor]:
                        inner = call("where", mask, inner, Const(0))
            if inner is not factor:
                guarded[factor] = inner
        return _rebuilt(expr, guarded) if guarded else expr

    def _zeros(self, factor: Expr, axis: str) -> dict[Expr, None]:
        """Masks along the axis without which a factor is 0."""
        written = self._written(factor, axis)
        return dict.fromkeys(zero_without(written, lambda c: axis in free_axes(c) and self.is_mask(c)))

    def _written(self, expr: Expr, axis: str) -> Expr:
        """With values along the axis replaced by what they are; the others are the same whatever the mask is."""

        return expanded(expr, lambda local: self._values.get(local.name) if axis in local.dims else None)

    def is_mask(self, condition: Expr) -> bool:
        """Whether a condition reads no real number."""
        match condition:
            case Load():
                return True
            case Call(fn, args) if fn in LOGICAL:
                return all(map(self.is_mask, args))
            case _:
                return all(map(self._is_discrete, walk(condition)))

    def _is_discrete(self, node: Expr) -> bool:
        match node:
            case Load(tensor, _):
                return tensor in self._discrete
            case Scalar(name):
                return name in self._integers
            case Call(fn, _) if fn in DRAWN:  # a random number is a real one
                return False
            case _:
                return not isinstance(node, Local | Reduce)


def _conditions(expr: Expr) -> Iterator[Expr]:
    """Every condition of a `where`, outside of reductions."""
    for node in post_order([expr], lambda part: () if isinstance(part, Reduce) else children(part)):
        match node:
            case Call("where", (condition, _, _)):
                yield condition


def _may_be_infinite(factor: Expr) -> bool:
    return any(isinstance(node, Load | Local) for node in walk(factor))


def _factors(expr: Expr) -> Iterator[Expr]:
    """What is multiplied."""
    match expr:
        case Call("mul", (left, right)):
            yield from _factors(left)
            yield from _factors(right)
        case Call("div", (left, _)) | Call("neg", (left,)):
            yield from _factors(left)
        case _:
            yield expr


def _divides(expr: Expr) -> bool:
    """Whether something is divided in a product: what is 0 where a mask is false may be divided by 0."""
    match expr:
        case Call("mul", (left, right)):
            return _divides(left) or _divides(right)
        case Call("neg", (part,)):
            return _divides(part)
        case _:
            return isinstance(expr, Call) and expr.fn == "div"


def _rebuilt(expr: Expr, guarded: Mapping[Expr, Expr]) -> Expr:
    """A product with some of its factors replaced."""
    match expr:
        case Call("mul", (left, right)):
            return call("mul", _rebuilt(left, guarded), _rebuilt(right, guarded))
        case Call("div", (left, right)):
            return call("div", _rebuilt(left, guarded), right)
        case Call("neg", (part,)):
            return call("neg", _rebuilt(part, guarded))
        case _:
            return guarded.get(expr, expr)
