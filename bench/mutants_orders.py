"""Wrong orders of sums and products: each rule of `rules/tables/reassociate.py`, and of closed forms, with one mistake."""

from __future__ import annotations

from collections.abc import Iterator

from bench.mutants_terms import in_outputs
from bench.mutation import Mutant, Outputs, Step
from eqfuse.rules.reassociate import cheapest
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Size,
    call,
    free_axes,
    replaced,
    substitute_axes,
    walk,
)
from eqfuse.terms.parser import axes_of

EXTENT = 256
"""Of every axis, where an order is chosen."""


def _at_first(expr: Expr, axis: str) -> Expr:
    return substitute_axes(expr, {axis: Const(0)})


def _has_sum(expr: Expr) -> bool:
    return any(isinstance(node, Reduce) for node in walk(expr))


def _varying_factor_taken_out(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (a, b))) if axis in free_axes(a) and not _has_sum(a):
            yield call("mul", _at_first(a, axis), Reduce("sum", axis, b))


def _factor_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (a, b))):
            yield Reduce("sum", axis, b if _has_sum(b) else a)


def _factor_twice(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (a, b))) if _has_sum(a) or _has_sum(b):
            yield Reduce("sum", axis, call("mul", node.body, a if _has_sum(b) else b))


def _factor_added(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, Call("mul", (a, b))):
            yield Reduce("sum", axis, call("add", a, b))


def _sum_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, body):
            yield _at_first(body, axis)


def _sum_twice(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, _):
            yield call("mul", node, Size(axis))


def _inner_sum_of_one(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", _, body):
            for part in walk(body):
                if isinstance(part, Reduce):
                    yield replaced(node, {part: _at_first(part.body, part.axis)})


def _operand_transposed(node: Expr) -> Iterator[Expr]:
    match node:
        case Load(tensor, (one, other)) if one is not other:
            yield Load(tensor, (other, one))


def _index_of_another_axis(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, body):
            for other in sorted(free_axes(body) - {axis}):
                yield Reduce("sum", axis, substitute_axes(body, {axis: Axis(other)}))


def _one_term_not_multiplied(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("add" | "sub" as fn, (one, Reduce("sum", axis, Call("mul", (a, b))))):
            yield call(fn, one, Reduce("sum", axis, a))
            yield call(fn, one, Reduce("sum", axis, b))


def _term_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("add" | "sub", (a, b)) if _has_sum(b):
            yield a
            yield b


def _sign_of_a_term(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("add", (a, b)) if _has_sum(b):
            yield call("sub", a, b)
        case Call("sub", (a, b)) if _has_sum(b):
            yield call("add", a, b)


def _divisor_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("div", (over, Size())):
            yield over


def _divisor_twice(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("div", (_, Size() as size)):
            yield call("div", node, size)


def _last_position_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("where", (Call("lt", (at, Size() as size)), read, zero)):
            yield call("where", call("lt", at, call("sub", size, Const(1))), read, zero)


def _selected_next(node: Expr) -> Iterator[Expr]:
    match node:
        case Load(tensor, index):
            for place, at in enumerate(index):
                if isinstance(at, Call) and at.fn == "add":
                    moved = call("sub", at.args[0], Const(1))
                    yield Load(tensor, (*index[:place], moved, *index[place + 1 :]))


def _one_more(node: Expr) -> Iterator[Expr]:
    """min(i, N - 1) + 1 without the 1."""
    match node:
        case Call("add", (Call("minimum"), Const(1))):
            yield node.args[0]


def _least_dropped(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("minimum", args):
            yield from args


def _empty_counted(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("where", (Call("lt", (_, end)), value, Const(0))) if not isinstance(end, Size):
            yield value


def _first_powers_wrong(node: Expr) -> Iterator[Expr]:
    """n (n - 1) / 2 becomes n (n + 1) / 2, or n n / 2."""
    match node:
        case Call("floordiv", (Call("mul", (n, Call("sub", (m, Const(1))))), by)):
            yield call("floordiv", call("mul", n, call("add", m, Const(1))), by)
            yield call("floordiv", call("mul", n, m), by)


def _divided_wrong(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("floordiv", (over, Const(int(by)))):
            yield call("floordiv", over, Const(by + 1))
            yield over


def _first_position_kept(node: Expr) -> Iterator[Expr]:
    """The positions before the first one are not subtracted."""
    match node:
        case Call("sub", (end, _)) if isinstance(end, Call) and end.fn in ("floordiv", "add", "minimum"):
            yield end
        case Call("sub", (Size() as end, _)):
            yield end


def _window_position_lost(node: Expr) -> Iterator[Expr]:
    match node:
        case Call("add", (Call("where") | Call("add") as first, Call("where") as last)) if not _has_sum(node):
            yield first
            yield last


def _window_moved(node: Expr) -> Iterator[Expr]:
    """All that is read of one position is that of the next one."""
    match node:
        case Call("where", (Call("and"), value, zero)):
            for part in walk(value):
                if isinstance(part, Load) and isinstance(part.index[-1], Call):
                    moved = Load(part.tensor, (*part.index[:-1], call("add", part.index[-1], Const(1))))
                    yield call("where", node.args[0], replaced(value, {part: moved}), zero)


def _mutant(name: str, what: str, step: Step) -> Mutant:
    def mutate(outputs: Outputs) -> Iterator[Outputs]:
        order = cheapest(outputs, dict.fromkeys(axes_of(outputs), EXTENT))
        return in_outputs(step)(order)

    return Mutant(name, "order", what, mutate)


MUTANTS = (
    _mutant("varying factor taken out", "sum(a b) becomes a[0] sum(b)", _varying_factor_taken_out),
    _mutant("factor lost", "sum(a b) becomes sum(a)", _factor_lost),
    _mutant("factor twice", "sum(a s) becomes sum(a a s)", _factor_twice),
    _mutant("factor added", "sum(a b) becomes sum(a + b)", _factor_added),
    _mutant("sum lost", "sum(f) becomes f[0]", _sum_lost),
    _mutant("sum twice", "sum(f) becomes N sum(f)", _sum_twice),
    _mutant("inner sum of one term", "sum(a sum(b)) becomes sum(a b[0])", _inner_sum_of_one),
    _mutant("operand transposed", "a[i, j] becomes a[j, i]", _operand_transposed),
    _mutant("index of another axis", "sum[j](f) reads the position of i", _index_of_another_axis),
    _mutant("a term not multiplied", "a c + b c becomes a c + b", _one_term_not_multiplied),
    _mutant("term lost", "a c + b c becomes a c", _term_lost),
    _mutant("sign of a term", "a c + b c becomes a c - b c", _sign_of_a_term),
    _mutant("divisor of a mean lost", "s / N becomes s", _divisor_lost),
    _mutant("divisor of a mean twice", "s / N becomes s / N / N", _divisor_twice),
    _mutant("last selected position lost", "i < N(j) becomes i < N(j) - 1", _last_position_lost),
    _mutant("neighbour selected", "f[i] becomes f[i - 1]", _selected_next),
    _mutant("count one less", "min(i, N - 1) + 1 becomes min(i, N - 1)", _one_more),
    _mutant("count beyond the bound", "min(i, N) becomes i, or N", _least_dropped),
    _mutant("empty range counted", "where(0 < n, n, 0) becomes n", _empty_counted),
    _mutant("first powers wrong", "n (n - 1) / 2 becomes n (n + 1) / 2", _first_powers_wrong),
    _mutant("divisor of powers wrong", "n (n - 1) / 2 becomes n (n - 1) / 3", _divided_wrong),
    _mutant("position of a window lost", "f[i - 1] + f[i] becomes f[i]", _window_position_lost),
    _mutant("position of a window moved", "f[i - 1] + f[i] becomes f[i] + f[i]", _window_moved),
    _mutant("first positions kept", "the sum from i on becomes that from 0 on", _first_position_kept),
)
