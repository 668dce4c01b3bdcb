"""Writes a tile program as straight Python over torch CPU tensors.

Blocks are clipped: the last one is smaller, so every `Bound` holds and costs nothing. Accesses by
plain positions are slices, affine ones strided views, only the rest gathers. A value that nothing
reads any more is overwritten in place, or deleted. Each kernel becomes a function of the tensors,
the scalars, the sizes, and the blocks of the grid that it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.terms.floats import IRRATIONAL
from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.cpu.access import load, searched, store
from eqfuse.tile.cpu.elementwise import dot, elementwise, reduced
from eqfuse.tile.cpu.factors import known_numbers
from eqfuse.tile.cpu.folds import folded, merged, ranked
from eqfuse.tile.cpu.values import (
    TORCH,
    Affine,
    Item,
    Line,
    Storage,
    names_in,
    needed,
    rendered,
)
from eqfuse.tile.cpu.writer import Identifiers, Writer
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.walk import used

HEADER = """\
from math import inf, nan

import torch

from eqfuse.tile.cpu.torch_ops import checked, finite, first_ranks, fold_empty, fold_first, fold_pairwise
from eqfuse.tile.cpu.torch_ops import from_float8, gather, gelu, integer_quotient, integer_remainder, invertible
from eqfuse.tile.cpu.torch_ops import masked_product, narrowed, scatter, search, shifted_left, shifted_right, strided
from eqfuse.tile.cpu.torch_ops import to_float8, to_whole, uniform, vector_product, wrapped
"""


def source_of(program: ir.TileProgram) -> tuple[str, tuple[str, ...]]:
    """Python source for `program`, and the names of its functions in the order in which to call them.

    Each function takes (tensors, scalars, sizes, blocks) and writes the buffers. The first three are mappings by name:
    input and buffer tensors, run-time scalars as Python numbers, and the extent of every axis. `blocks` are the blocks
    of the grid to run: an iterable of their first positions, in the order of the kernel's grid.
    """
    texts, names = [HEADER], []
    taken = Identifiers(names_in(HEADER))
    for kernel in program.kernels:
        name = taken.fresh(kernel.name)
        names.append(name)
        texts.append(_kernel_source(kernel, program, taken.taken, name))
    return "\n\n".join(texts), tuple(names)


def _kernel_source(kernel: ir.Kernel, program: ir.TileProgram, taken: set[str], name: str) -> str:
    w = Writer(kernel, program, taken)
    body: list[Line] = []
    starts = [w.block(axis, w.size(axis), body) for axis in kernel.grid]
    # Scalars first: a matrix product takes one as its factor.
    known = known_numbers(kernel)
    ordered = sorted(kernel.body, key=lambda s: not (isinstance(s, ir.Let) and s.value.name in known))
    w.open(ordered, body, ())
    _body(w, ordered)
    positions = f"{', '.join(starts)}{',' if len(starts) == 1 else ''}" if starts else "_"
    outer = [Line(f"for {positions} in blocks:", body=body)]
    kept = needed(w.head + outer)
    functions = "".join(f"def {each}{text}\n\n\n" for text, each in w.functions.items())
    return functions + (
        f"def {name}(tensors, scalars, sizes, blocks):\n" + "\n".join(rendered(kept) or ["    pass"]) + "\n"
    )


def _body(w: Writer, body: Sequence[ir.Stmt]) -> None:
    scope = w.scopes[-1]
    for scope.index, stmt in enumerate(body):
        match stmt:
            case ir.Let(value, op):
                w.define(value, _operation(w, value, op))
            case ir.For():
                _loop(w, stmt)
            case ir.Store():
                store(w, stmt)
        w.release(scope)


def _loop(w: Writer, loop: ir.For[ir.Stmt]) -> None:
    start, stop = w.python(w.items[loop.start.name]), w.python(w.items[loop.stop.name])
    if stop != w.size(loop.axis):
        stop = w.let(f"{loop.axis}_end", f"min({stop}, {w.size(loop.axis)})")
    inside = used(loop.body)
    claimed: set[Storage] = set()
    for carried in loop.carried:
        name = w.fresh(carried.value.name)
        init = w.read(carried.init)
        w.emit(w.carry(carried.value, init, claimed, inside), name)
        w.items[carried.value.name] = _carried(carried.value, name)
    body: list[Line] = []
    header = w.walk(loop.axis, start, stop, body)
    w.open(loop.body, body, [carried.next.name for carried in loop.carried])
    for carried in loop.carried:
        w.hold(carried.value)
    _body(w, loop.body)
    w.scopes[-1].index = len(loop.body)
    _advance(w, loop, body)
    w.scopes.pop()
    w.scopes[-1].lines.append(Line(header, body=body))
    for carried in loop.carried:
        w.hold(carried.value)


def _carried(value: ir.Value, text: str) -> Item:
    if not value.dims and value.dtype in INTEGERS:
        return Item(text, (), value.dtype, affine=Affine(text, data=True))
    return Item(text, value.dims, value.dtype, frozenset(value.dims))


def _advance(w: Writer, loop: ir.For[ir.Stmt], body: list[Line]) -> None:
    """Carried variables take their next contents, at once where one is the next content of another."""
    claimed: set[Storage] = set()
    pairs = []
    for carried in loop.carried:
        item = w.read(carried.next)
        text = w.carry(carried.value, item, claimed, ())
        pairs.append((w.items[carried.value.name].text, text))
    pairs = [(name, text) for name, text in pairs if name != text]
    names = {name for name, _ in pairs}
    if any(names & names_in(text) for _, text in pairs):
        body.append(Line(f"{', '.join(name for name, _ in pairs)} = {', '.join(text for _, text in pairs)}"))
    else:
        body += [Line(f"{name} = {text}", name) for name, text in pairs]


def _operation(w: Writer, value: ir.Value, op: ir.Op) -> Item:
    match op:
        case ir.Constant(number) if value.dtype in INTEGERS:
            truth = bool(number) if value.dtype == "bool" else None
            text = repr(int(number) if truth is None else truth)
            return Item(text, (), value.dtype, affine=Affine(text), truth=truth)
        case ir.Constant(number) | ir.Fill(number):
            return w.filled(value, number)
        case ir.Irrational(name):
            return w.filled(value, IRRATIONAL[name])
        case ir.Argument(name) if value.dtype in INTEGERS:
            text = w.at_head(value.name, f"{'bool' if value.dtype == 'bool' else 'int'}(scalars[{name!r}])")
            return Item(text, (), value.dtype, affine=Affine(text, data=True))
        case ir.Argument(name):
            text = f"torch.tensor(float(scalars[{name!r}]), dtype={TORCH[value.dtype]})"
            return Item(w.at_head(value.name, text), (), value.dtype, head=True)
        case ir.Extent(axis):
            return w.scalar(value, w.size(axis))
        case ir.BlockSize(axis):
            size = w.blocks[axis].size
            return w.scalar(value, w.size(axis) if size is None else repr(size))
        case ir.LaunchValue(name, expr):
            text = w.at_head(name, w.launch_text(expr))
            return Item(text, (), value.dtype, affine=Affine(text))
        case ir.Start(axis):
            return replace(w.scalar(value, w.start(axis)), affine=Affine(w.start(axis), pure=axis))
        case ir.Positions(axis):
            return _positions(w, value, axis)
        case ir.Lanes(axis):
            text = w.let(value.name, f"torch.arange({w.length(axis)})")
            affine = Affine("0", {axis: "1"})
            return Item(text, value.dims, value.dtype, frozenset(value.dims), affine=affine)
        case ir.Bound():
            # A clipped block has no position past its stop: the extent, or the loop's own stop.
            return Item("True", value.dims, "bool", truth=True)
        case ir.Align(source):
            return w.aligned(w.read(source), value.dims, value.name)
        case ir.Cast(source):
            return w.converted(w.read(source), value.dtype, value.name)
        case ir.Elementwise():
            return _elementwise(w, value, op)
        case ir.LoadTile():
            return load(w, value, op)
        case ir.Search():
            return searched(w, value, op)
        case ir.ReduceTile(reduction, source, axis):
            return reduced(w, value, reduction, w.read(source), axis)
        case ir.FoldTile():
            return folded(w, value, op)
        case ir.RankTile():
            return ranked(w, value, op)
        case ir.MergeTile():
            return merged(w, value, op)
        case ir.Dot():
            return dot(w, value, op)
        case ir.FinitePart() | ir.NonFiniteCorrection():
            raise TileError(f"{value.name} is for a matrix unit: a CPU's products have masks")
        case ir.ScanTile():
            raise TileError(f"{value.name} is for threads that share a tile: a CPU's scans have positions")


def _elementwise(w: Writer, value: ir.Value, op: ir.Elementwise) -> Item:
    """An elementwise function, or what a matrix product has made of it already."""
    if value.name in w.made:
        return w.made[value.name]
    return elementwise(w, value, op.fn, [w.read(arg) for arg in op.args], op.division)


def _positions(w: Writer, value: ir.Value, axis: str) -> Item:
    if not value.dims:
        return Item(w.start(axis), (), value.dtype, affine=Affine(w.start(axis), pure=axis))
    affine = Affine(w.start(axis), {axis: "1"}, pure=axis)
    text = w.let(value.name, f"torch.arange({w.start(axis)}, {w.stop(axis)})")
    return Item(text, value.dims, value.dtype, frozenset(value.dims), affine=affine)
