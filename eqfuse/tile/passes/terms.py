"""Integers of a kernel as terms of the language, and what is known of their ranges."""

from __future__ import annotations

import math

from eqfuse.terms.functions import FUNCTIONS
from eqfuse.terms.nodes import Call, Const, Expr, Local, Size
from eqfuse.terms.ranges import UNKNOWN, Range, Ranges, integer
from eqfuse.tile import nodes as tile
from eqfuse.tile.nodes import Elementwise, Kernel, LaunchValue, Value
from eqfuse.tile.walk import ops_of


class Terms(Ranges):
    """Values of a kernel. No axis of a kernel that runs is empty. What a loop carries has no op, and is any number."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.ops = ops_of(kernel.body)
        self._terms: dict[str, Expr] = {}

    def term(self, value: Value) -> Expr:
        """A value as a term over sizes and numbers; what is none stands for itself, by its name."""
        name = value.name
        if name not in self._terms:
            match self.ops.get(name):
                case tile.Extent(axis):
                    self._terms[name] = Size(axis)
                case tile.Constant(number):
                    self._terms[name] = Const(number)
                case LaunchValue(_, expr):
                    self._terms[name] = expr
                case tile.Align(source):
                    self._terms[name] = self.term(source)
                case Elementwise(fn, args) if fn in FUNCTIONS:
                    self._terms[name] = Call(fn, tuple(map(self.term, args)))
                case _:
                    self._terms[name] = Local(name, value.dims)
        return self._terms[name]

    def range(self, value: Value) -> Range:
        return self.of(self.term(value))

    def leaf(self, node: Expr) -> Range:
        match self.ops.get(node.name) if isinstance(node, Local) else node:
            case Size() | tile.BlockSize():
                return integer(node, 1, math.inf)
            case tile.Start() | tile.Positions() | tile.Lanes():
                return integer(node, 0, math.inf)
        return UNKNOWN
