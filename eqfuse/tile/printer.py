"""Tile programs as text: one line per value, its dtype and dims, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eqfuse.listed import text_of
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.printer import show as show_expr
from eqfuse.tile import nodes as ir

_INFIX = {**OPERATORS, "and": "&", "or": "|"}
_IRRATIONAL = {"log2_e": "log2(e)", "ln_2": "ln(2)"}


@text_of.register
def show(program: ir.TileProgram) -> str:
    """The program as text. Constants stand where they are used; the same program gives the same text."""
    lines = [f"after {name}" for name in program.passes]
    lines += map(show_buffer, program.buffers)
    for kernel in program.kernels:
        lines += ["", *KernelPrinter(kernel).lines()]
    return "\n".join(lines).lstrip("\n") + "\n"


class KernelPrinter:
    """A kernel as lines of text."""

    _shows_masks = True

    def __init__(self, kernel: ir.Kernel) -> None:
        self._kernel = kernel
        self._constants: dict[str, str] = {}

    def lines(self) -> Iterator[str]:
        axes = (f"{axis} backwards" if axis in self._kernel.backwards else axis for axis in self._kernel.grid)
        yield f"kernel {self._kernel.name}, grid ({', '.join(axes)}):"
        for block in self._kernel.blocks:
            yield f"    {show_block(block)}"
        yield from self._body(self._kernel.body, "    ")

    def _body(self, body: Iterable[Any], indent: str) -> Iterator[str]:
        for stmt in body:
            match stmt:
                case ir.Let(value, ir.Constant() | ir.Irrational() as op):
                    self._constants[value.name] = constant(op)
                case ir.Let(value, op):
                    yield f"{indent}{typed(value)} = {show_op(value, op, self._name)}"
                case ir.For(axis, start, stop, carried, inner, masked, rare):
                    kind = (" masked" if masked and self._shows_masks else "") + (" rare" if rare else "")
                    yield f"{indent}for {axis} in {self._name(start)}..{self._name(stop)}{kind}:"
                    yield from self._carrying(carried, inner, indent + "    ")
                case ir.If(condition, inner, results):
                    yield f"{indent}when {self._name(condition)}:"
                    yield from self._body(inner, indent + "    ")
                    for result in results:
                        taken, else_ = self._name(result.then), self._name(result.otherwise)
                        yield f"{indent}    gives {typed(result.value)} = {taken}, else {else_}"
                case ir.Store(tensor, index, value, mask):
                    where = "" if mask is None else f" where {self._name(mask)}"
                    yield f"{indent}store {tensor}[{self._list(index)}] = {self._name(value)}{where}"
                case _:
                    yield from self._other(stmt, indent)

    def _carrying(self, carried: Iterable[ir.Carried], body: Iterable[Any], indent: str) -> Iterator[str]:
        for item in carried:
            yield f"{indent}carry {typed(item.value)} = {self._name(item.init)}, then {self._name(item.next)}"
        yield from self._body(body, indent)

    def _other(self, stmt: object, indent: str) -> Iterator[str]:
        """A statement of a dialect, as text."""
        raise TypeError(stmt)

    def _list(self, values: Iterable[ir.Value]) -> str:
        return ", ".join(map(self._name, values))

    def _name(self, value: ir.Value) -> str:
        return self._constants.get(value.name, value.name)


def constant(op: ir.Constant | ir.Irrational) -> str:
    """A constant as it stands where it is used."""
    return str(op.number) if isinstance(op, ir.Constant) else _IRRATIONAL[op.name]


def show_op(value: ir.Value, op: ir.Op, name_of: Callable[[ir.Value], str]) -> str:
    """What a value is, given how the values that it is made of are called."""

    def where(mask: ir.Value | None) -> str:
        return "" if mask is None else f" where {name_of(mask)}"

    def listed(values: Iterable[ir.Value]) -> str:
        return ", ".join(map(name_of, values))

    match op:
        case ir.Constant(number) | ir.Fill(number):
            return str(number)
        case ir.Irrational(name):
            return _IRRATIONAL[name]
        case ir.Argument(name):
            return f"argument {name}"
        case ir.Extent(axis):
            return f"size({axis})"
        case ir.BlockSize(axis):
            return f"block({axis})"
        case ir.LaunchValue(name, expr):
            return f"launch {name} = {show_expr(expr)}"
        case ir.Start(axis):
            return f"start({axis})"
        case ir.Positions(axis):
            return f"positions({axis})"
        case ir.Lanes(axis):
            return f"lanes({axis})"
        case ir.Bound(axis, stop):
            return f"positions({axis}) < {name_of(stop)}"
        case ir.Elementwise(fn, (left, right), division) if fn in _INFIX:
            known = "" if division == "any" else f", {division}"
            return f"{name_of(left)} {_INFIX[fn]} {name_of(right)}{known}"
        case ir.Elementwise(fn, args):
            return f"{fn}({listed(args)})"
        case ir.Align(source):
            return f"align({name_of(source)}, [{', '.join(value.dims)}])"
        case ir.Cast(source):
            return f"{value.dtype}({name_of(source)})"
        case ir.FinitePart(source):
            return f"finite_part({name_of(source)})"
        case ir.LoadTile(tensor, index, mask, other):
            otherwise = "" if mask is None else f", else {other:g}"
            return f"load {tensor}[{listed(index)}]{where(mask)}{otherwise}"
        case ir.Search(tensor, index, place, stop, target, right):
            at = [name_of(value) for value in index]
            at.insert(place, f":{name_of(stop)}")
            return f"search {tensor}[{', '.join(at)}] for {'>' if right else '>='} {name_of(target)}"
        case ir.ReduceTile(fold, source, axis):
            return f"{fold}({name_of(source)}, over {axis})"
        case ir.FoldTile(fold, sources, axis):
            return f"{fold}({listed(sources)}, over {axis})"
        case ir.ScanTile(of, place, sources, axis):
            return f"scan.{of.state[place]}({listed(sources)}, along {axis})"
        case ir.RankTile(fold, sources, axis, ranks):
            return f"{fold}({listed(sources)}, over {axis}, as {ranks})"
        case ir.MergeTile(fold, left, right, ranks):
            return f"{fold}(({listed(left)}), ({listed(right)}), as {ranks})"
        case ir.Dot(left, right, axis, accumulator, left_mask, right_mask, precision, imprecise):
            start = "" if accumulator is None else f"{name_of(accumulator)} + "
            first = f"{name_of(left)}{where(left_mask)}"
            second = f"{name_of(right)}{where(right_mask)}"
            halves = ", as bf16x3" if precision == "bf16x3" else ""
            sums = "" if imprecise is None else f", {imprecise} summed imprecisely"
            return f"{start}dot({first}, {second}, over {axis}{halves}{sums})"
        case ir.NonFiniteCorrection(left, right, axis, total, left_mask, right_mask):
            first = f"{name_of(left)}{where(left_mask)}"
            second = f"{name_of(right)}{where(right_mask)}"
            return f"{name_of(total)} + rest_of_dot({first}, {second}, over {axis})"


def show_buffer(buffer: Buffer) -> str:
    kind = "output" if buffer.is_output else "temporary"
    return f"{kind} {buffer.name}: {buffer.dtype}[{', '.join(buffer.axes)}]"


def show_block(block: Block) -> str:
    match block.kind:
        case "grid" if block.size == 1:
            return f"{block.axis}: one position per instance"
        case "grid" if block.valid is not None:
            return f"{block.axis}: {block.valid} positions per instance, in blocks of {block.size}"
        case "grid":
            return f"{block.axis}: {block.size} positions per instance"
        case "loop":
            return f"{block.axis}: {block.size} positions per iteration"
        case "whole":
            return f"{block.axis}: all positions"
        case "unit":
            return f"{block.axis}: one position per iteration"


def typed(value: ir.Value) -> str:
    dims = f"[{', '.join(value.dims)}]" if value.dims else ""
    return f"{value.name}: {value.dtype}{dims}"
