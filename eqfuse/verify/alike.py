"""Outputs of two programs in the same names, so that what both write alike is one expression.

Dimensions of an output are named by their places, axes of reductions by their extents: the same name where both programs give
them one extent, whatever the sizes, and one more where such an axis is free inside. What is computed among integers, which
wraps, is one value of that name: no algebra of real numbers is for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eqfuse.terms.functions import ROUNDINGS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Size,
    children,
    free_axes,
    rebuild,
    replaced,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import axes_of
from eqfuse.terms.types import KINDS, kinds, program_dtypes
from eqfuse.verify.joint import joined_axes
from eqfuse.verify.sizes import AxisClasses

Pair = tuple[Expr, Expr]
"""An output of the first program, and of the second."""

MOST_NODES = 1000
"""Nodes of programs that are compared so."""


def alike(first: Program, second: Program) -> list[Pair]:
    """The outputs in pairs; none where the programs read a tensor as numbers of two kinds, read different elements, make extents of sizes,
    or are too large."""
    programs = first, second
    if any(program.computed for program in programs) or not _is_small(*programs):
        return []
    dtypes = [program_dtypes(program) for program in programs]
    if any(
        KINDS.get(dtypes[0][name]) != KINDS.get(dtypes[1][name])
        for name in dtypes[0].keys() & dtypes[1].keys()
    ):
        return []
    names = _Names(*programs)
    others = {output.name: output for output in second.outputs}
    pairs = [
        (names.renamed("first", output), names.renamed("second", others[output.name]))
        for output in first.outputs
    ]
    reads = [frozenset(map(names.read, walk(*side))) for side in zip(*pairs, strict=True)]
    if reads[0] != reads[1]:
        return []
    whole = _Integers({**dtypes[1], **dtypes[0]}, names.prefix)
    return [(whole.named(one), whole.named(other)) for one, other in pairs]


def _is_small(*programs: Program) -> bool:
    return all(
        sum(1 for _ in walk(*(output.expr for output in program.outputs))) <= MOST_NODES
        for program in programs
    )


class _Names:
    """Names of axes that both programs have in common."""

    def __init__(self, first: Program, second: Program) -> None:
        self._classes: AxisClasses = joined_axes(first, second)
        self._extents: dict[object, str] = {}
        self._extent_of: dict[str, str] = {}
        self.prefix = "_"
        while any(name.startswith(self.prefix) for name in _names(first, second)):
            self.prefix += "_"

    def renamed(self, label: str, output: Output) -> Expr:
        """An output in these names."""
        rows: dict[str, Expr] = {
            axis: Axis(self._named(f"{self.prefix}row{place}", self._extent(label, axis)))
            for place, axis in enumerate(output.axes)
        }

        def step(node: Expr) -> Expr:
            match node:
                case Size(axis):
                    return Size(self._extent(label, axis))
                case Reduce(op, axis, body):
                    name = self._bound(self._extent(label, axis), axis, body)
                    return Reduce(op, name, substitute_axes(body, {axis: Axis(name)}))
            return node

        return transform(substitute_axes(output.expr, rows), step)

    def read(self, node: Expr) -> Expr | None:
        """An element that is read, as far as its axes have extents of their own; None of what reads nothing."""
        if not isinstance(node, Load):
            return None
        axes = {part: Axis(self._extent_of[part.name]) for part in walk(node) if isinstance(part, Axis)}
        return replaced(node, axes)

    def _extent(self, label: str, axis: str) -> str:
        """The name of all axes that are as long."""
        key = self._classes.find((label, axis))
        return self._extents.setdefault(key, f"{self.prefix}{len(self._extents)}")

    def _named(self, axis: str, extent: str) -> str:
        self._extent_of[axis] = extent
        return axis

    def _bound(self, extent: str, axis: str, body: Expr) -> str:
        """The first name of an axis of that extent that means no other one inside of a body, nor is bound around its own uses."""
        inside = [node for node in walk(body) if isinstance(node, Reduce) and axis in free_axes(node)]
        taken = (free_axes(body) - {axis}) | {node.axis for node in inside}
        number = 0
        while (name := f"{extent}_{number}" if number else extent) in taken:
            number += 1
        return self._named(name, extent)


def _names(*programs: Program) -> Iterator[str]:
    for program in programs:
        yield from (tensor.name for tensor in program.tensors)
        yield from program.scalars
        yield from axes_of(program.outputs)


class _Integers:
    """Names of what is computed among integers."""

    def __init__(self, dtypes: Mapping[str, str], prefix: str) -> None:
        self._dtypes, self._prefix = dtypes, prefix
        self._known: dict[Expr, Expr] = {}

    def named(self, expr: Expr) -> Expr:
        """An expression with its integers as elements of such names."""
        kind_of = kinds([expr], self._dtypes)
        made: dict[Expr, Expr] = {}
        for node in walk(expr):
            made[node] = rebuild(node, tuple(made[part] for part in children(node)))
            if kind_of[node] == "int" and _wraps(node):
                made[node] = self._name(made[node])
        return made[expr]

    def _name(self, value: Expr) -> Expr:
        if value not in self._known:
            axes = tuple(Axis(axis) for axis in sorted(free_axes(value)))
            self._known[value] = Load(f"{self._prefix}integer{len(self._known)}", axes)
        return self._known[value]


def _wraps(node: Expr) -> bool:
    match node:
        case Call(fn, _):
            return fn not in ROUNDINGS
        case Reduce(op, _, _):
            return op in REDUCTIONS
    return False
