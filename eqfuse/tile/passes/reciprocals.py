"""Tiles divided by a number of the program or of the call are multiplied by its reciprocal, which is taken once.

    x / s -> x * (1 / s)      x * c / s -> x * (c / s)

A division takes a GPU some eight instructions, and Triton's own rounds no better than this. The reciprocal of a
number outside 2**-126 to 2**126 is no normal number: a divisor is taken to be inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eqfuse.tile import nodes as ir
from eqfuse.tile.def_use import Uses
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import nested, pruned

ERROR = 2.01
"""How far a product with a reciprocal in f32 may be from the quotient, relative to it, in units of 2**-24: both are
rounded, by one unit each. A quotient of a product with a number is rounded as often as before."""


def by_reciprocals(program: ir.TileProgram) -> ir.TileProgram:
    """Divisions of f32 tiles by numbers become products."""
    return in_kernels(program, lambda kernel: _Reciprocals(kernel).run() if any(_divided(kernel)) else kernel)


def _divided(kernel: ir.Kernel) -> Iterator[bool]:
    """For every value of a kernel whether it is a tile over a scalar."""
    for stmt in nested(kernel.body):
        if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Elementwise) and stmt.op.fn == "div":
            yield stmt.value.dims != () and stmt.op.args[1].dims == ()


class _Reciprocals:
    def __init__(self, kernel: ir.Kernel) -> None:
        self._kernel = kernel
        self._uses = Uses(kernel)
        self._draft = Draft(kernel)
        self._order = {name: place for place, name in enumerate(self._uses.ops)}
        self._one: ir.Value | None = None
        self._made: dict[tuple[str, str], ir.Value] = {}

    def run(self) -> ir.Kernel:
        body = changed(self._kernel.body, self._let)
        if not self._made:
            return self._kernel
        made = self._draft.kernel_of(body)
        return replace(made, body=pruned(made.body))

    def _let(self, let: ir.Let) -> Sequence[ir.Stmt]:
        match let.op:
            case ir.Elementwise("div", (tile, divisor)) if (
                let.value.dims and let.value.dtype == "f32" and self._is_number(divisor)
            ):
                factor = None
                match self._uses.ops.get(tile.name):
                    case ir.Elementwise("mul", (left, right)) if (
                        left.dims and self._is_number(right) and self._uses.is_inlined(tile)
                    ):
                        tile, factor = left, right
                quotient = self._quotient(factor, divisor)
                return (ir.Let(let.value, ir.Elementwise("mul", (tile, quotient))),)
        return (let,)

    def _quotient(self, factor: ir.Value | None, divisor: ir.Value) -> ir.Value:
        over = factor or self._unit()
        key = over.name, divisor.name
        if key not in self._made:
            op = ir.Elementwise("div", (over, divisor))
            later = factor is not None and self._order[factor.name] > self._order[divisor.name]
            place = factor if later and factor is not None else divisor
            name = f"{divisor.name}_inverse" if factor is None else f"{factor.name}_over_{divisor.name}"
            self._made[key] = self._draft.behind(place, name, op)
        return self._made[key]

    def _unit(self) -> ir.Value:
        if self._one is None:
            self._one = self._draft.new("one", (), "f32")
            self._draft.first.append(ir.Let(self._one, ir.Constant(1.0)))
        return self._one

    def _is_number(self, value: ir.Value) -> bool:
        """Whether a value is a number of the program or of the call, or that and log2 e."""
        match self._uses.ops.get(value.name):
            case ir.Constant() | ir.Argument() | ir.Irrational():
                return value.dtype == "f32"
            case ir.Elementwise("mul" | "div", (number, factor)):
                return isinstance(self._uses.ops.get(factor.name), ir.Irrational) and self._is_number(number)
            case _:
                return False
