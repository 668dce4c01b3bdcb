"""Contractions: how a sum of products over an axis is a matrix product.

    sum[k](a * b / c)  =  outside * sum[k](left * right)

`outside` are the factors without the axis. Of the others, those with an axis of their own go to the left or to the
right operand. The cost model and lowering share this analysis. They differ in the axes that an expression has: lowering
knows the blocks, and an axis of which a block has one position is no dim of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.nodes import Call, Const, Expr, Load, Local, Size, call, free_axes, reductions

AxesOf = Callable[[Expr], frozenset[str]]
"""The axes that the value of an expression depends on."""

Ordered = Callable[[frozenset[str]], tuple[str, ...]]
"""Axes in the order of a kernel's blocks."""

Look = Callable[[Local], Expr | None]
"""The definition of a named value where it may be looked through."""

NEAR_ONE = 2.0**-16, 2.0**16
"""Constants that a sum is multiplied by, rather than its terms."""


@dataclass(frozen=True)
class Product:
    """`over[0] * over[1] * ... / under[0] / under[1] ...`"""

    over: tuple[Expr, ...] = ()
    under: tuple[Expr, ...] = ()

    def expr(self) -> Expr:
        """The product as one expression; 1 where it has no factor."""
        if not self.over and not self.under:
            return Const(1.0)
        value = self.over[0] if self.over else Const(1.0)
        under = list(self.under)
        for factor in self.over[1:]:  # in turn: quotients may stay in range where products do not
            if under:
                value = call("div", value, under.pop(0))
            value = call("mul", value, factor)
        for factor in under:
            value = call("div", value, factor)
        return value

    def times(self, other: Product) -> Product:
        return Product(self.over + other.over, self.under + other.under)

    def inverse(self) -> Product:
        return Product(self.under, self.over)

    def apart(self, wanted: Callable[[Expr], bool]) -> tuple[Product, Product]:
        """The product of the factors and divisors that are wanted, and that of the others."""
        over, under = (
            [[p for p in side if wanted(p) is w] for w in (True, False)] for side in (self.over, self.under)
        )
        return Product(tuple(over[0]), tuple(under[0])), Product(tuple(over[1]), tuple(under[1]))

    @property
    def parts(self) -> tuple[Expr, ...]:
        """Factors and divisors."""
        return self.over + self.under

    @property
    def is_one(self) -> bool:
        return not self.over and not self.under

    @property
    def load(self) -> Load | None:
        """The load that the product is, if it is one as it stands."""
        match self:
            case Product((Load() as load,), ()):
                return load
            case _:
                return None

    @property
    def read(self) -> Load | None:
        """The load of whose elements and 0 the product is made: `load`, also under masks (`where(mask, load, 0)`)."""
        return read_under_masks(self.over[0]) if len(self.over) == 1 and not self.under else None


def _nothing(_: Local) -> None:
    return None


def factors(expr: Expr, look: Look = _nothing) -> Product:
    """The factors of a product of products, quotients and negations."""
    match expr:
        case Const(1):  # as `Product.expr` writes the numerator of a reciprocal
            return Product()
        case Call("mul", (left, right)):
            return factors(left, look).times(factors(right, look))
        case Call("div", (left, right)):
            return factors(left, look).times(factors(right, look).inverse())
        case Call("neg", (part,)):
            return Product((Const(-1.0),)).times(factors(part, look))
        case Local():
            definition = look(expr)
            if isinstance(definition, Call) and definition.fn in ("mul", "div", "neg"):
                return factors(definition, look)
    return Product((expr,))


def read_under_masks(expr: Expr) -> Load | None:
    """The load that an expression is, but for masks under which it is 0; None where it is computed."""
    while True:
        match expr:
            case Load():
                return expr
            case Call("where", (_, value, Const(0))):
                expr = value
            case _:
                return None


def unmasked(factor: Expr, axes_of: AxesOf) -> tuple[Expr, Expr | None]:
    """A factor that is 0 where a mask with axes of its own is false, without the mask, and the mask."""
    match factor:
        case Call("where", (mask, value, Const(0))) if not axes_of(mask) <= axes_of(value):
            return value, mask
        case _:
            return factor, None


@dataclass(frozen=True)
class Contraction:
    """`outside * sum over the axis of inside`, where `inside` is left * right.

    Axes of the operands: batch and `rows` (left), batch and `columns` (right), and the contracted axis in both. A
    vector times a matrix has no rows. A mask of one side says where `inside` reads the other one, and has 0 where it
    does not.
    """

    axis: str
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
        """The axes of the result."""
        return (*self.batch, *self.rows, *self.columns)

    @property
    def apart(self) -> frozenset[str]:
        """Axes that one operand has alone."""
        return frozenset(self.rows + self.columns)


@dataclass(frozen=True)
class _Factor:
    """A factor that has the contracted axis, as it is `written` and without its mask: the `axes` of its value besides
    that one, and those of its mask."""

    written: Product
    product: Product
    axes: frozenset[str]
    mask: Expr | None
    mask_axes: frozenset[str]


def contraction(product: Product, axis: str, axes_of: AxesOf, ordered: Ordered) -> Contraction | None:
    """How the sum of `product` over `axis` is a matrix product; None where it is not one.

    Both operands have the axis, and one has an axis that the other lacks. Of the operands the one whose own axes come
    first in the kernel's order is left. Factors that fit either operand join one that is computed anyway, so that a
    plain load stays in its storage dtype. A factor under a mask of other axes (`where(mask, factor, 0)`) is on the side
    that has its own axes, the mask on either.
    """
    varying = [*_factors_over(product, axis, axes_of)]
    sides = _sides({factor.axes for factor in varying})
    if sides is None:
        return None
    first, second = sides
    batch, rows, columns = ordered(first & second), ordered(first - second), ordered(second - first)
    if rows and ordered(frozenset({rows[0], columns[0]}))[0] != rows[0]:
        first, second, rows, columns = second, first, columns, rows
    left_masks, right_masks = list[Expr](), list[Expr]()
    for factor in varying:
        if factor.mask is None:
            continue
        if factor.axes <= second and factor.mask_axes <= first:
            left_masks.append(factor.mask)
        elif factor.axes <= first and factor.mask_axes <= second:
            right_masks.append(factor.mask)
        else:
            return None
    left, right, inside = Product(), Product(), Product()
    either = list[_Factor]()
    for factor in varying:
        inside = inside.times(factor.written)
        if not factor.axes <= second:
            left = left.times(factor.product)
        elif not factor.axes <= first:
            right = right.times(factor.product)
        else:
            either.append(factor)
    joins_right = left.load is not None and right.load is None
    for factor in either:
        # A mask of one side guards what is read on the other: on its own side a factor keeps it.
        own = right_masks if joins_right else left_masks
        joined = factor.written if factor.mask in own else factor.product
        if joins_right:
            right = right.times(joined)
        else:
            left = left.times(joined)
    outside = Product(
        tuple(e for e in product.over if axis not in axes_of(e)),
        tuple(e for e in product.under if axis not in axes_of(e)),
    )
    return Contraction(
        axis, outside, inside, left, right, tuple(left_masks), tuple(right_masks), batch, rows, columns
    )


def tiled_axes(exprs: Iterable[Expr]) -> frozenset[str]:
    """The axes of the rows, the columns and the terms of matrix products, which are read in tiles along them: those over which none
    is batched."""
    tiled, batch = set[str](), set[str]()
    for reduce in reductions(*exprs):
        if reduce.op == "sum":
            made = contraction(factors(reduce.body), reduce.axis, free_axes, lambda axes: tuple(sorted(axes)))
            if made is not None:
                tiled |= {reduce.axis, *made.rows, *made.columns}
                batch.update(made.batch)
    return frozenset(tiled - batch)


def scaled(plan: Contraction, axes_of: AxesOf, is_rounded: bool) -> Contraction:
    """The plan with the factors outside of it on its operands, but for constants: a product without them may be out of range where
    it is not with them. Where operands that have factors `is_rounded`, only several divisors are worth
    it, of which each operand has one: then neither is stored in less than it is computed in."""
    sides: tuple[frozenset[str], ...] = (
        frozenset((*plan.batch, *plan.rows)),
        frozenset((*plan.batch, *plan.columns)),
    )
    found = [Product(), Product()]
    outside, either = Product(), list[Product]()
    for factor in (
        *(Product((e,)) for e in plan.outside.over),
        *(Product((), (e,)) for e in plan.outside.under),
    ):
        (expr,) = factor.parts
        fitting = [n for n in (0, 1) if axes_of(expr) <= sides[n]]
        if isinstance(expr, Const) or not fitting:
            outside = outside.times(factor)
        elif len(fitting) == 2:
            either.append(factor)
        else:
            found[fitting[0]] = found[fitting[0]].times(factor)
    for factor in either:  # on the one that has less
        place = min((0, 1), key=lambda n: len(found[n].parts))
        found[place] = found[place].times(factor)
    left, right = found
    if not (left.under and right.under) if is_rounded else left.is_one and right.is_one:
        return plan
    inside = plan.inside.times(left).times(right)
    return replace(
        plan, outside=outside, inside=inside, left=plan.left.times(left), right=plan.right.times(right)
    )


def as_written(plan: Contraction, body: Expr, look: Look, axes_of: AxesOf) -> Contraction | None:
    """The plan of a body with operands that multiply and divide in the body's order, by all but constants near 1: what the program
    keeps in range by a scale stays there. A factor that fits either operand joins one that is computed anyway; a length that all
    is multiplied by multiplies the sum. Where the last of several vectors is multiplied, the others join the matrix, as they do in
    the body. Plans with masks are `scaled`. None where one operand would have no position of the axis."""
    if plan.left_masks or plan.right_masks:
        return scaled(plan, axes_of, False)
    sides: tuple[frozenset[str], ...] = (
        frozenset((*plan.batch, *plan.rows, plan.axis)),
        frozenset((*plan.batch, *plan.columns, plan.axis)),
    )
    vector = frozenset[str]() if plan.rows and plan.columns else min(sides, key=len)
    found, outside, either = [Product(), Product()], Product(), list[Product]()

    def is_whole(expr: Expr) -> bool:
        """Whether a product or quotient is of one operand, and none of its factors a constant or a vector that is the other one."""
        if not isinstance(expr, Call) or any(isinstance(arg, Const) for arg in expr.args):
            return False
        parts = factors(expr).parts
        return any(axes_of(expr) <= side for side in sides) and not any(
            plan.axis in axes_of(part) <= vector for part in parts
        )

    def is_vector(expr: Expr) -> bool:
        return plan.axis in axes_of(expr) <= vector

    def place(expr: Expr, is_under: bool) -> None:
        nonlocal outside
        made = Product((), (expr,)) if is_under else Product((expr,))
        fitting = [n for n in (0, 1) if axes_of(expr) <= sides[n]]
        match expr:
            case Const(1):
                pass
            case Const(value) if NEAR_ONE[0] <= abs(value) <= NEAR_ONE[1]:
                outside = outside.times(made)
            case Call("mul", (a, b)) if not is_whole(expr):
                place(a, is_under)
                place(b, is_under)
            case Call("div", (a, b)) if not is_whole(expr):
                place(a, is_under)
                place(b, not is_under)
            case Call("neg", (a,)):
                outside = outside.times(Product((Const(-1.0),)))
                place(a, is_under)
            case Local() if not fitting and (definition := look(expr)) is not None:
                place(definition, is_under)
            case _ if len(fitting) == 1:
                found[fitting[0]] = found[fitting[0]].times(made)
            case _:
                either.append(made)

    while isinstance(body, Call) and body.fn == "mul" and isinstance(body.args[1], Size):
        outside, body = outside.times(Product((body.args[1],))), body.args[0]
    match body:
        case Call("mul", (rest, last)) if is_vector(last) and any(map(is_vector, factors(rest, look).over)):
            of_vector = sides.index(vector)
            found[of_vector], found[1 - of_vector] = Product((last,)), Product((rest,))
        case _:
            place(body, False)
    for product in either:
        plain = [n for n in (0, 1) if found[n].load is not None]
        place_of = 1 - plain[0] if len(plain) == 1 else min((0, 1), key=lambda n: len(found[n].parts))
        found[place_of] = found[place_of].times(product)
    left, right = found
    if not all(any(plan.axis in axes_of(part) for part in side.parts) for side in found):
        return None
    return replace(plan, outside=outside, inside=left.times(right), left=left, right=right)


def _factors_over(product: Product, axis: str, axes_of: AxesOf) -> Iterator[_Factor]:
    for expr in product.over:
        if axis in axes_of(expr):
            value, mask = unmasked(expr, axes_of)
            if mask is None or axis not in axes_of(value):
                written = Product((expr,))
                yield _Factor(written, written, axes_of(expr) - {axis}, None, frozenset())
            else:
                axes, mask_axes = axes_of(value) - {axis}, axes_of(mask) - {axis}
                yield _Factor(Product((expr,)), Product((value,)), axes, mask, mask_axes)
    for expr in product.under:
        if axis in axes_of(expr):
            written = Product((), (expr,))
            yield _Factor(written, written, axes_of(expr) - {axis}, None, frozenset())


def _sides(kinds: set[frozenset[str]]) -> tuple[frozenset[str], frozenset[str]] | None:
    """The axes of the two operands, given those of every factor; None where they are not two. What has
    fewer axes than one widest factor makes up a vector, which comes first."""
    widest = sorted((kind for kind in kinds if not any(kind < other for other in kinds)), key=sorted)
    if len(widest) == 1 and len(kinds) > 1:
        narrower = frozenset[str]().union(*(kind for kind in kinds if kind != widest[0]))
        return None if narrower == widest[0] else (narrower, widest[0])
    return (widest[0], widest[1]) if len(widest) == 2 else None
