"""Wrong rewrites of expressions. The same steps serve programs and loop nests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from bench.mutation import Mutant, Outputs, Step, everywhere
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Call, Const, Expr, Load, Reduce, Scalar, Size, call, free_axes, replaced, walk

OFF_BY_ONE: Mapping[str, str] = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
MIRRORED: Mapping[str, str] = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
OTHER_FOLD: Mapping[str, str] = {"max": "min", "min": "max", "sum": "max", "prod": "sum"}


def swapped_operands(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("sub" | "div" as fn, (a, b)):
            yield call(fn, b, a)


def _sign_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("sub", (a, b)):
            yield call("add", a, b)


def _quotient_turned_round(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("div", (a, b)):
            yield call("div", b, a)


def renamed(names: Mapping[str, str]) -> Step:
    """Calls of some functions become calls of others."""

    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Call(fn, args) if fn in names:
                yield call(names[fn], *args)

    return step


def without(*names: str) -> Step:
    """Calls of functions of one argument become their argument."""

    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Call(fn, (arg,)) if fn in names:
                yield arg

    return step


def condition_dropped(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("where", (_, chosen, _)):
            yield chosen


def branches_swapped(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("where", (condition, chosen, other)):
            yield call("where", condition, other, chosen)


def divisor_dropped(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("div", (dividend, _)):
            yield dividend


def fold_changed(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce(op, axis, body) if op in OTHER_FOLD:
            yield Reduce(OTHER_FOLD[op], axis, body)


def _epsilon_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("add", (kept, Const() | Scalar())) if any(isinstance(part, Load) for part in walk(kept)):
            yield kept


def _factor(body: Expr) -> tuple[Expr, Expr] | None:
    """A factor that reads no position, taken out of a body and of the branches of its conditions."""
    match body:
        case Call("mul", (a, b)) if not free_axes(b):
            return a, b
        case Call("mul", (a, b)) if not free_axes(a):
            return b, a
        case Call("where", (condition, chosen, Const() as other)):
            inner = _factor(chosen)
            return None if inner is None else (call("where", condition, inner[0], other), inner[1])
    return None


def _scale_after_maximum(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("max" | "min", axis, body) if (taken := _factor(body)) is not None:
            yield call("mul", taken[1], Reduce(node.op, axis, taken[0]))


def _sum_of_products_split(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (a, b))) if axis in free_axes(a) & free_axes(b):
            yield call("mul", Reduce("sum", axis, a), Reduce("sum", axis, b))


def _count_of_a_fixed_term_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("add" | "sub" as fn, (a, b))) if axis not in free_axes(b):
            yield call(fn, Reduce("sum", axis, a), b)
        case Reduce("sum", axis, Call("sq", (Call("sub", (a, b)),))) if axis not in free_axes(b):
            yield call("sub", Reduce("sum", axis, call("sq", a)), call("sq", b))


def _function_taken_out_of_a_sum(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("sq" | "abs" | "exp" as fn, (a,))):
            yield call(fn, Reduce("sum", axis, a))


def _fixed_factor_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, body):
            for part in walk(body):
                match part:
                    case Call("mul" | "div", (kept, factor)) if axis not in free_axes(factor):
                        yield Reduce("sum", axis, replaced(body, {part: kept}))


def _exponential_of_a_difference(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("exp", (Call("sub", (a, b)),)):
            yield call("sub", call("exp", a), call("exp", b))


def _count_off_by_one(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("div", (dividend, Size() as size)):
            yield call("div", dividend, call("sub", size, Const(1)))


def _identity_a_number(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("where", (condition, chosen, Const(value))) if abs(value) == float("inf"):
            yield call("where", condition, chosen, Const(0.0))


def _gather_stuck(node: Expr) -> Iterator[Expr]:
    """Index expressions that divide positions (pages of a table) read the first entry for all."""
    match node:
        case Load(tensor, index):
            for at, part in enumerate(index):
                if isinstance(part, Call) and part.fn == "floordiv":
                    yield Load(tensor, (*index[:at], Const(0), *index[at + 1 :]))


def _cast_moved_past_a_factor(node: Expr) -> Iterator[Expr]:
    match node:
        case Call(cast, (Call("mul" | "div" as fn, (a, b)),)) if cast in CASTS:
            yield call(fn, call(cast, a), b)


def _cast_moved_out_of_a_sum(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (Call(cast, (a,)), b))) if cast in CASTS:
            yield call(cast, Reduce("sum", axis, call("mul", a, b)))


def _cast_moved_to_the_other_operand(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("mul", (Call(cast, (a,)), b)) if cast in CASTS:
            yield call("mul", a, call(cast, b))


def in_outputs(step: Step) -> Callable[[Outputs], Iterator[Outputs]]:
    def mutate(outputs: Outputs) -> Iterator[Outputs]:
        for exprs in everywhere(step, tuple(output.expr for output in outputs)):
            yield tuple(replace(output, expr=e) for output, e in zip(outputs, exprs, strict=True))

    return mutate


def _mutant(name: str, what: str, step: Step, *, strict: bool = False) -> Mutant:
    return Mutant(name, "term", what, in_outputs(step), strict)


MUTANTS = (
    _mutant("sign lost", "a - b becomes a + b", _sign_lost),
    _mutant("quotient turned round", "a / b becomes b / a", _quotient_turned_round),
    _mutant("epsilon lost", "a constant added to values of tensors is dropped", _epsilon_lost),
    _mutant("scale after the maximum", "max(c x) becomes c max(x), whatever c's sign", _scale_after_maximum),
    _mutant("mask off by one", "< becomes <=, <= becomes <", renamed(OFF_BY_ONE)),
    _mutant("mask mirrored", "j <= i becomes j >= i", renamed(MIRRORED)),
    _mutant("mask dropped", "where(c, a, b) becomes a", condition_dropped),
    _mutant("branches swapped", "where(c, a, b) becomes where(c, b, a)", branches_swapped),
    _mutant("masked value a number", "where(c, a, -inf) becomes where(c, a, 0)", _identity_a_number),
    _mutant("reduction changed", "max becomes min, sum becomes max", fold_changed),
    _mutant("sum of products split", "sum(a b) becomes sum(a) sum(b)", _sum_of_products_split),
    _mutant("count of a fixed term lost", "sum(a + c) becomes sum(a) + c", _count_of_a_fixed_term_lost),
    _mutant("function taken out of a sum", "sum(f(a)) becomes f(sum(a))", _function_taken_out_of_a_sum),
    _mutant("fixed factor lost", "sum(a c) or sum(a / c) becomes sum(a)", _fixed_factor_lost),
    _mutant("exponential distributed", "exp(a - b) becomes exp(a) - exp(b)", _exponential_of_a_difference),
    _mutant("count off by one", "a / N becomes a / (N - 1)", _count_off_by_one),
    _mutant("division dropped", "a / b becomes a", divisor_dropped),
    _mutant(
        "function dropped",
        "f(a) becomes a, for roots, squares, logarithms",
        without("sqrt", "rsqrt", "sq", "log"),
    ),
    _mutant("absolute value dropped", "|a| becomes a", without("abs")),
    _mutant("rounding moved away", "round(a) becomes a", without("round", "floor")),
    _mutant("group confused with member", "h // g becomes h % g", renamed({"floordiv": "mod"})),
    _mutant("gather stuck", "table[j // p] becomes table[0]", _gather_stuck),
    _mutant("cast dropped", "cast(a) becomes a", without(*CASTS), strict=True),
    _mutant(
        "cast moved past a factor", "cast(a c) becomes cast(a) c", _cast_moved_past_a_factor, strict=True
    ),
    _mutant(
        "cast moved out of a sum",
        "sum(cast(a) b) becomes cast(sum(a b))",
        _cast_moved_out_of_a_sum,
        strict=True,
    ),
    _mutant(
        "cast moved across", "cast(a) b becomes a cast(b)", _cast_moved_to_the_other_operand, strict=True
    ),
)
