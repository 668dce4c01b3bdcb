"""Sums of products as dots: which factors of a reduction's body make up which operand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eqfuse.terms.nodes import Call, Const, Expr, Load, Local, call


@dataclass(frozen=True)
class DotRules:
    """What a device multiplies as matrices: operands that share dims, and that have none or several dims
    of their own (`batched`), and blocks of at least `smallest` positions of the reduced axis."""

    batched: bool
    smallest: int


@dataclass(frozen=True)
class Product:
    """`over[0] * over[1] * ... / under[0] / under[1] ...`"""

    over: tuple[Expr, ...]
    under: tuple[Expr, ...]

    def expr(self) -> Expr:
        """The product as one expression; 1 where it has no factor."""
        if not self.over and not self.under:
            return Const(1.0)
        value = self.over[0] if self.over else Const(1.0)
        for factor in self.over[1:]:
            value = call("mul", value, factor)
        for factor in self.under:
            value = call("div", value, factor)
        return value

    def times(self, other: Product) -> Product:
        return Product(self.over + other.over, self.under + other.under)

    def inverse(self) -> Product:
        return Product(self.under, self.over)

    @property
    def is_one(self) -> bool:
        return not self.over and not self.under


def factors(expr: Expr, look: Callable[[Local], Expr | None]) -> Product:
    """The factors of `expr`; `look` gives the definition of a named value where it may be looked through."""
    match expr:
        case Call("mul", (left, right)):
            return factors(left, look).times(factors(right, look))
        case Call("div", (left, right)):
            return factors(left, look).times(factors(right, look).inverse())
        case Call("neg", (part,)):
            return Product((Const(-1.0),), ()).times(factors(part, look))
        case Local():
            definition = look(expr)
            if isinstance(definition, Call) and definition.fn in ("mul", "div", "neg"):
                return factors(definition, look)
    return Product((expr,), ())


@dataclass(frozen=True)
class DotPlan:
    """`outside * sum over the axis of inside`, where `inside` is left * right.

    Dims of the operands: batch and `rows` (left), batch and `columns` (right), and the reduced axis in both.
    A mask of one side says where `inside` reads the other one, and has 0 where it does not.
    """

    outside: Product
    inside: Product
    left: Product
    right: Product
    left_masks: tuple[Expr, ...]
    right_masks: tuple[Expr, ...]
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the result."""
        return (*self.batch, *self.rows, *self.columns)


def plan_dot(
    product: Product,
    axis: str,
    dims: Callable[[Expr], frozenset[str]],
    order: Callable[[frozenset[str]], tuple[str, ...]],
    batched: bool,
) -> DotPlan | None:
    """How the sum of `product` over `axis` is a dot; None where it is not one.

    Both operands carry the axis, and each has exactly one further dim that the other lacks. With
    `batched`, further dims that they share are a batch, and it is enough that one has a dim that the
    other lacks: a vector becomes the left operand. Factors that fit either operand join one that is
    computed anyway, so that a plain load stays in its storage dtype. A factor under a mask of other dims
    (`where(mask, factor, 0)`) is on the side that has its own dims, the mask on either.
    """
    outside, whole = Product((), ()), Product((), ())
    inside, masks = (
        list[tuple[frozenset[str], Product]](),
        list[tuple[frozenset[str], frozenset[str], Expr]](),
    )
    for factor in (*(Product((e,), ()) for e in product.over), *(Product((), (e,)) for e in product.under)):
        if axis not in dims((factor.over or factor.under)[0]):
            outside = outside.times(factor)
            continue
        whole = whole.times(factor)
        match factor.over:
            case (Call("where", (mask, value, Const(0))),) if not dims(mask) <= dims(value) and axis in dims(
                value
            ):
                factor = Product((value,), ())
                masks.append((dims(value) - {axis}, dims(mask) - {axis}, mask))
        inside.append((dims((factor.over or factor.under)[0]) - {axis}, factor))
    sides = _sides({found for found, _ in inside})
    if sides is None:
        return None
    first, second = sides
    batch, rows, columns = order(first & second), order(first - second), order(second - first)
    if not batched and (batch or len(rows) != 1 or len(columns) != 1):
        return None
    if rows and order(frozenset({rows[0], columns[0]}))[0] != rows[0]:
        first, second, rows, columns = second, first, columns, rows
    if not all((own <= second and of <= first) or (own <= first and of <= second) for own, of, _ in masks):
        return None
    left, right, either = Product((), ()), Product((), ()), Product((), ())
    for found, factor in inside:
        if not found <= second:
            left = left.times(factor)
        elif not found <= first:
            right = right.times(factor)
        else:
            either = either.times(factor)
    if _is_load(left) and not _is_load(right):
        right = right.times(either)
    else:
        left = left.times(either)
    left_masks = tuple(mask for own, of, mask in masks if own <= second and of <= first)
    right_masks = tuple(mask for _, _, mask in masks if mask not in left_masks)
    return DotPlan(outside, whole, left, right, left_masks, right_masks, batch, rows, columns)


def _sides(kinds: set[frozenset[str]]) -> tuple[frozenset[str], frozenset[str]] | None:
    """The dims of the two operands, given those of every factor; None where they are not two. What has
    fewer dims than one widest factor makes up a vector, which comes first."""
    widest = [kind for kind in kinds if not any(kind < other for other in kinds)]
    if len(widest) == 1 and len(kinds) > 1:
        narrower = frozenset[str]().union(*(kind for kind in kinds if kind != widest[0]))
        return None if narrower == widest[0] else (narrower, widest[0])
    return (widest[0], widest[1]) if len(widest) == 2 else None


def _is_load(product: Product) -> bool:
    return len(product.over) == 1 and not product.under and isinstance(product.over[0], Load)
