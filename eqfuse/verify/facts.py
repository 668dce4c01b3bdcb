"""What sizes to verify at depend on in a program, whatever these sizes are: found once for each program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.terms.folds import contributions, fold_of
from eqfuse.terms.functions import COMPARISONS, ON_BITS, ROUNDINGS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    free_axes,
    once,
    outside_loads,
    transform,
    walk,
)
from eqfuse.terms.types import kinds

LARGEST_OFFSET = 16
"""Axes are longer than numbers up to this size that their positions are compared with."""
POSITIONAL = frozenset(
    {*COMPARISONS, *ON_BITS, *ROUNDINGS}
    | {"floordiv", "mod", "maximum", "minimum", "abs", "relu", "sign", "floor", "round"}
)
"""Functions that may do one thing at all positions of short axes, and another at those of longer ones."""


@dataclass(frozen=True)
class Compared:
    """Axes whose positions are compared, and how long they have to be to reach past the numbers that they are compared with."""

    axes: frozenset[str]
    reach: int


@dataclass(frozen=True)
class Condition:
    """A function of positions or sizes, and of nothing that is read; the scalars in it, and the axes. One of sizes alone is the same at all
    positions. Whole numbers that a reduction makes stand for positions."""

    node: Call
    scalars: frozenset[str]
    axes: frozenset[str]
    is_of_sizes: bool


@dataclass(frozen=True)
class Facts:
    """Sets of axes that values vary along, with the number of values; the same of the values that combine states of folds; axes that are reduced; those of numerators, with their
    divisors; what is compared; conditions, in the order in which they are evaluated."""

    varying: tuple[tuple[frozenset[str], int], ...]
    combined: tuple[tuple[frozenset[str], int], ...]
    reduced: frozenset[str]
    divided: tuple[tuple[frozenset[str], Expr], ...]
    compared: tuple[Compared, ...]
    comparisons: tuple[Call, ...]
    conditions: tuple[Condition, ...]


@once
def facts(program: Program) -> Facts:
    """The facts of a program."""
    varying: Counter[frozenset[str]] = Counter()
    combined: dict[tuple[str, Expr], tuple[frozenset[str], int]] = {}
    reduced: set[str] = set()
    divided: list[tuple[frozenset[str], Expr]] = []
    compared: list[Compared] = []
    comparisons: list[Call] = []
    conditions: list[Condition] = []
    counts = whole_reductions(program)
    for node in walk(*(output.expr for output in program.outputs)):
        varying[free_axes(node)] += 1
        match node:
            case Reduce(op, axis, body):
                reduced.add(axis)
                if (found := fold_of(op)) is not None:
                    operations = sum(isinstance(part, Call) for part in walk(*found[0].combine))
                    combined[found[0].name, body] = free_axes(body) | {axis}, operations
            case Call("floordiv" | "mod", (left, right)):
                divided.append((frozenset(part.name for part in walk(left) if isinstance(part, Axis)), right))
            case Call(fn, (left, right)) if fn in COMPARISONS:
                compared.append(_compared(left, right))
                comparisons.append(node)
        if (
            isinstance(node, Call)
            and node.fn in POSITIONAL
            and (condition := _condition(node, counts)) is not None
        ):
            conditions.append(condition)
    return Facts(
        tuple(varying.items()),
        tuple(combined.values()),
        frozenset(reduced),
        tuple(divided),
        tuple(compared),
        tuple(comparisons),
        tuple(conditions),
    )


def _compared(left: Expr, right: Expr) -> Compared:
    parts = outside_loads(left, right)
    numbers = [part.value for part in parts if isinstance(part, Const)]
    near = [int(abs(number)) + 2 for number in numbers if abs(number) <= LARGEST_OFFSET]
    return Compared(frozenset(part.name for part in parts if isinstance(part, Axis)), max(near, default=0))


def _condition(written: Call, counts: frozenset[Expr]) -> Condition | None:
    def step(node: Expr) -> Expr:
        return Axis(node.axis) if node in counts and isinstance(node, Reduce) else _of_sizes(node)

    node = call(written.fn, *(transform(arg, step) for arg in written.args))
    parts = list(walk(node))
    if any(isinstance(part, Load | Reduce) for part in parts):
        return None
    positions = frozenset(part.name for part in parts if isinstance(part, Axis))
    sizes = frozenset(part.axis for part in parts if isinstance(part, Size))
    if not positions and not sizes:
        return None
    scalars = frozenset(part.name for part in parts if isinstance(part, Scalar))
    return Condition(node, scalars, positions | sizes, not positions)


@once
def whole_reductions(program: Program) -> frozenset[Expr]:
    """Reductions whose values are whole numbers up to about the size of their axis: positions of extremes, and how many there are of
    something."""
    roots = [output.expr for output in program.outputs]
    reductions = [node for node in walk(*roots) if isinstance(node, Reduce)]
    if not reductions:
        return frozenset()
    dtypes = {name: "i64" for name in (*program.integers, *program.integer_tensors)}
    known = kinds(roots, {tensor.name: tensor.dtype for tensor in program.tensors if tensor.dtype} | dtypes)
    return frozenset(node for node in reductions if known[node] == "int" and _counts(node, known))


def _counts(node: Reduce, known: Mapping[Expr, str]) -> bool:
    """Whether a reduction of whole numbers is one of numbers that are chosen, or of positions."""
    match node:
        case Reduce("sum", _, Call("where", (_, Const(), Const()))):
            return True
        case Reduce(op, axis, _) if fold_of(op) is not None:
            return any(part == Axis(axis) for part in contributions(node))
    return False


def _of_sizes(node: Expr) -> Expr:
    """A reduction of what is made of numbers and sizes is made of them: `sum[i](2)` is 2 N(i)."""
    match node:
        case Reduce("sum" | "max" | "min" as op, axis, body) if all(
            isinstance(part, Const | Size | Call) for part in walk(body)
        ):
            return call("mul", body, Size(axis)) if op == "sum" else body
        case _:
            return node
