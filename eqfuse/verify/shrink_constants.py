"""Large constants that positions are compared with (`j > i + 290`), replaced by small ones.

Every whole number that a position or a size is compared with, limited to or divided by, is a name for a place on an axis: what a
compiler makes of a program may not depend on which place it is, as long as the order of such numbers is kept. So the program
and each of its stages can be compared with all of them shrunk alike, to the order and the gaps between them, and a mask far
out is seen at small sizes. Where the stages then differ although they did not before (a number was computed from
another while compiling), nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from eqfuse.loops.nodes import Nest, Store
from eqfuse.loops.walk import statements
from eqfuse.terms.functions import COMPARISONS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Size,
    outside_loads,
    transform,
    walk,
)
from eqfuse.verify.facts import LARGEST_OFFSET
from eqfuse.verify.inputs import roots

NEAREST, GAP = 5, 3
"""The place of the first large number, and the most that lies between two that follow each other."""
_DIVISIONS = ("floordiv", "mod")
_OF_POSITIONS = ("maximum", "minimum", "abs", "relu", "sign", "floor", "round")

T = TypeVar("T")


@dataclass(frozen=True)
class ShrunkConstants:
    """A program and what was made of it, with small constants for large ones: `numbers` maps each large one to its small one."""

    program: Program
    outputs: tuple[Output, ...]
    nest: Nest
    numbers: Mapping[int, int]

    @classmethod
    def of(cls, program: Program, outputs: tuple[Output, ...], nest: Nest) -> ShrunkConstants | None:
        """None where positions meet no large number."""
        numbers = _small_numbers([*roots(program), *(output.expr for output in outputs), *_exprs(nest)])
        if not numbers:
            return None
        changed = _change(numbers)
        return cls(_with_numbers(program, numbers, changed), changed(outputs), changed(nest), numbers)

    def __str__(self) -> str:
        return _said(self.numbers)


def shrink_constants(programs: tuple[Program, Program]) -> tuple[tuple[Program, Program], str] | None:
    """Two programs with their large constants replaced by small ones, alike in both, and which stands for which; None where
    positions meet no large number."""
    numbers = _small_numbers([root for program in programs for root in roots(program)])
    if not numbers:
        return None
    changed = _change(numbers)
    first, second = (_with_numbers(program, numbers, changed) for program in programs)
    return (first, second), _said(numbers)


def are_places(program: Program) -> bool:
    """Whether the large numbers of a program are nothing but places on axes, so that any in the same order serve: extents are none, nor what
    positions are multiplied or divided by, which products of others may be equal to."""
    nodes = walk(*roots(program))
    scaled = any(
        isinstance(node, Call)
        and (node.fn in _DIVISIONS or (node.fn == "mul" and all(map(_is_of_places, walk(node)))))
        for node in nodes
    )
    return not (scaled or program.lengths or program.computed)


def _is_of_places(node: Expr) -> bool:
    return not isinstance(node, Load | Reduce)


def _said(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"{far} as {near}" for far, near in numbers.items())


def _small_numbers(exprs: Sequence[Expr]) -> dict[int, int]:
    """What stands for each large number that positions meet in some expression."""
    far = sorted({number for expr in exprs for number in _far(expr)})
    numbers: dict[int, int] = {}
    place = NEAREST
    for before, number in zip([*far[:1], *far], far, strict=False):
        place += min(number - before, GAP)
        numbers[number] = place
    return numbers


def _change(numbers: Mapping[int, int]) -> Callable[[T], T]:
    def step(node: Expr) -> Expr:
        match node:
            case Const(int() as value) if abs(value) in numbers:
                return Const(numbers[abs(value)] if value > 0 else -numbers[abs(value)])
        return node

    memo: dict[Expr, Expr] = {}

    def changed(value: T) -> T:
        return cast(T, _mapped(value, lambda expr: transform(expr, step, memo)))

    return changed


def _with_numbers(program: Program, numbers: Mapping[int, int], changed: Callable[[T], T]) -> Program:
    lengths = {axis: numbers.get(length, length) for axis, length in program.lengths.items()}
    return replace(program, outputs=cast(Any, changed)(program.outputs), lengths=lengths)


def _mapped(value: Any, change: Any) -> Any:
    """A value with every expression in it replaced."""
    match value:
        case Expr():
            return change(value)
        case tuple():
            return tuple(_mapped(part, change) for part in value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
            return replace(value, **{name: _mapped(part, change) for name, part in parts.items()})
    return value


def _exprs(nest: Nest) -> Sequence[Expr]:
    found: list[Expr] = []
    for kernel in nest.kernels:
        for stmt in statements(kernel.body):
            found += [
                part for part in (getattr(stmt, name, None) for name in ("expr", "start", "stop")) if part
            ]
            found += stmt.index if isinstance(stmt, Store) else ()
    return found


def _limits(node: Call) -> bool:
    """Whether positions or sizes alone are limited, rounded, or taken without their sign."""
    return node.fn in _OF_POSITIONS and not any(isinstance(p, Load | Reduce) for p in walk(node))


def _far(root: Expr) -> set[int]:
    """Large whole numbers that positions or sizes are compared with, limited to or divided by."""
    found: set[int] = set()
    for node in walk(root):
        if isinstance(node, Call) and (node.fn in COMPARISONS or node.fn in _DIVISIONS or _limits(node)):
            parts = outside_loads(node)
            if any(isinstance(part, Axis | Size) for part in parts):
                found |= {
                    abs(part.value)
                    for part in parts
                    if isinstance(part, Const)
                    and type(part.value) is int
                    and abs(part.value) > LARGEST_OFFSET
                }
    return found
