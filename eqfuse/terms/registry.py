"""Reductions as data: what `name[axes](arguments)` stands for, as text of the language.

A registered reduction is text over its arguments and the axis `j`, which stands for the axes that a program reduces
over: `sum[j](x) / N(j)`. As a value, `j` is the position. Where it has a state, the text reads its variables as
reductions of the fold: `argmax.k[j](x, j)`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from eqfuse.terms.nodes import REDUCTIONS, Fold
from eqfuse.terms.python import parsed

AXIS = "j"
"""The name that the reduced axes have in the text of a reduction."""

ARGUMENT = "%"
"""Starts the name of an argument inside the text of a reduction: no name of a program does."""


@dataclass(frozen=True)
class Reduction:
    """`results` are its values as text over `args` and `AXIS`; `fold` is its state, if it has one of its own.
    Where the fold has ranks, the reduction has a second axis, along which it lists the positions that come first."""

    name: str
    args: tuple[str, ...]
    results: tuple[str, ...]
    fold: Fold | None = None
    why: str = ""
    unverified: str | None = None

    @property
    def is_ranked(self) -> bool:
        return self.fold is not None and self.fold.ranks != ""

    @property
    def reads_position(self) -> bool:
        """Whether a value depends on where along the axis something is: such a reduction takes one axis."""
        return any(_Uses.position(parsed(text)) for text in self.results)


REGISTERED: dict[str, Reduction] = {}
"""Every reduction that is not built in, by name."""


def reducers() -> tuple[str, ...]:
    """Names of all reductions."""
    return (*REDUCTIONS, *REGISTERED)


@cache
def instance(text: str, args: tuple[str, ...], axes: tuple[str, ...]) -> ast.expr:
    """The syntax of a reduction's text over these axes; an argument `x` reads as the name `%x`."""
    tree = _Instance(args, axes).visit(parsed(text))
    assert isinstance(tree, ast.expr)
    return ast.fix_missing_locations(tree)


class _Instance(ast.NodeTransformer):
    def __init__(self, args: Sequence[str], axes: Sequence[str]) -> None:
        self.args, self.axes = args, axes

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        names = [name for part in parts for name in self._axes(part)]
        return ast.Subscript(node.value, ast.Tuple([ast.Name(n) for n in names]), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="N"), args=[ast.Name(id=name)]) if name == AXIS:
                sizes: list[ast.expr] = [ast.Call(node.func, [ast.Name(axis)], []) for axis in self.axes]
                product = sizes[0]
                for size in sizes[1:]:
                    product = ast.BinOp(product, ast.Mult(), size)
                return product
        func = self.visit(node.func) if isinstance(node.func, ast.Subscript) else node.func
        return ast.Call(func, [self.visit(arg) for arg in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.args:
            return ast.Name(ARGUMENT + node.id)
        return ast.Name(self.axes[0]) if node.id == AXIS else node

    def _axes(self, part: ast.expr) -> tuple[str, ...]:
        assert isinstance(part, ast.Name)
        return tuple(self.axes) if part.id == AXIS else (part.id,)


class _Uses(ast.NodeVisitor):
    """Whether `AXIS` is read as a value."""

    def __init__(self) -> None:
        self.found = False

    @staticmethod
    def position(node: ast.expr) -> bool:
        visitor = _Uses()
        visitor.visit(node)
        return visitor.found

    def visit_Subscript(self, node: ast.Subscript) -> None:
        return

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(id="N"):
                return
        for arg in node.args:
            self.visit(arg)

    def visit_Name(self, node: ast.Name) -> None:
        self.found |= node.id == AXIS


def substituted(text: str, values: Mapping[str, str]) -> str:
    """`text` with names replaced by other text, as operands."""

    class Names(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return parsed(values[node.id]) if node.id in values else node

    return ast.unparse(Names().visit(parsed(text)))
