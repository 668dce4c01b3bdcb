"""What every well-formed nest satisfies, checked wherever one is made or handed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eqfuse.loops.nodes import Buffer, Carried, Dims, Kernel, Let, Loop, Nest, Stmt, Store
from eqfuse.loops.slots import expanded
from eqfuse.loops.walk import defined, statements
from eqfuse.terms.folds import PAIR, contributions, is_reduction, ranks_of, unpacked
from eqfuse.terms.functions import ARITY
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    Scan,
    Size,
    call,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.ranges import difference, linear


class NestError(Exception):
    """A loop nest that breaks a rule of its own language: a mistake of the compiler, not of a user."""


def check(nest: Nest, program: Program) -> None:
    """Raises NestError, naming kernel and statement, where the nest is not well-formed.

    Values are defined before they are read, where they are visible, with the dims they are read with.
    Every axis that an expression depends on is a position (parallel, or a unit loop) or a dim.
    A fold, or a scan, is the whole right-hand side of a `Let`. Each output and each temporary is stored by
    exactly one statement, no instance writes where another does, and a temporary is stored before
    it is loaded, by an earlier kernel. A kernel loads what it stores at each position of a loop at earlier positions alone, those that
    the same instance has stored. What a library is called for is what the kernel's body computes.
    """
    ranks = {tensor.name: tensor.rank for tensor in program.tensors}
    buffers = {buffer.name: buffer for buffer in nest.buffers}
    _check_names(nest, program, ranks)
    for kernel in map(expanded, nest.kernels):
        readable = dict(ranks)
        _KernelCheck(kernel, readable, buffers, frozenset(program.scalars)).run()
        _check_library(kernel, program.lengths)
        ranks |= {name: len(buffers[name].axes) for name in _stored(kernel)}
    _check_stores(nest)


def _stored(kernel: Kernel) -> list[str]:
    return [stmt.tensor for stmt in statements(kernel.body) if isinstance(stmt, Store)]


def _check_names(nest: Nest, program: Program, tensors: Mapping[str, int]) -> None:
    _unique((kernel.name for kernel in nest.kernels), "kernel")
    _unique((*tensors, *(buffer.name for buffer in nest.buffers)), "tensor")
    expected = [(output.name, output.axes) for output in program.returned]
    found = [(buffer.name, buffer.axes) for buffer in nest.buffers if buffer.is_output]
    if expected != found:
        raise NestError(f"the program's outputs are {expected}, the nest's are {found}")
    copies, shards = dict(nest.domains), dict(nest.shards)
    for axis, of in (*nest.domains, *nest.shards):
        # (The shards of a copy are of a length that the copy's own extent gives.)
        if of in shards or (of in copies and axis in copies):
            raise NestError(f"axis {axis!r} has the extent of {of!r}, which has none of its own")


def _check_stores(nest: Nest) -> None:
    times = Counter(name for kernel in nest.kernels for name in _stored(kernel))
    for buffer in nest.buffers:
        if times[buffer.name] != 1:
            raise NestError(f"{buffer.name!r} is stored by {times[buffer.name]} statements, not by one")


def _check_library(kernel: Kernel, lengths: Mapping[str, int]) -> None:
    if kernel.library is None:
        return
    values = {stmt.name: stmt.expr for stmt in kernel.body if isinstance(stmt, Let)}

    def inlined(node: Expr) -> Expr:
        return transform(values[node.name], inlined) if isinstance(node, Local) else node

    def position(axes: tuple[str, ...]) -> Expr:
        *outer, axis = axes
        if not outer:
            return Axis(axis)
        return call("add", call("mul", position(tuple(outer)), Const(lengths[axis])), Axis(axis))

    def read(tensor: str, dims: Dims) -> Load:
        return Load(tensor, tuple(map(position, dims)))

    last, product = kernel.body[-1], kernel.library
    made, left, right = (read(*side) for side in product.sides)
    body, summed = transform(last.expr, inlined) if isinstance(last, Store) else None, set[str]()
    while isinstance(body, Reduce) and body.op == "sum":
        summed.add(body.axis)
        body = body.body
    is_stored = isinstance(last, Store) and (last.tensor, last.index) == (made.tensor, made.index)
    is_product = body in (call("mul", left, right), call("mul", right, left))
    lacks = [{*product.axes(side)} - {*product.axes(0)} for side in (1, 2)]
    if not is_stored or not is_product or lacks != [summed, summed]:
        raise NestError(f"kernel {kernel.name!r}: its library computes {product}, its body does not")


def _unique(names: Iterable[str], kind: str) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise NestError(f"{times} {kind}s are called {name!r}")


@dataclass
class _KernelCheck:
    """Walks one kernel. `positions` are the axes that stand for one position, `fixed` those of them that
    stand for no other one in the same instance, `tiles` those of open loops over tiles; `visible` maps the names in scope to their dims, `parts`
    the axes of open loops to those whose positions each walk a part of them, `walked` the axes that are
    walked position by position, and `stored` what is stored at each."""

    kernel: Kernel
    readable: Mapping[str, int]
    buffers: Mapping[str, Buffer]
    scalars: frozenset[str]
    positions: set[str] = field(default_factory=set)
    tiles: set[str] = field(default_factory=set)
    visible: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    parts: dict[str, str] = field(default_factory=dict)
    walked: set[str] = field(default_factory=set)
    stored: dict[str, Store] = field(default_factory=dict)

    def run(self) -> None:
        _unique(self.kernel.parallel, f"parallel axes of {self.kernel.name!r}, which")
        _unique(defined(self.kernel.body), f"values of {self.kernel.name!r}, which")
        self.positions.update(self.kernel.parallel)
        for loop in (stmt for stmt in self.kernel.body if isinstance(stmt, Loop) and stmt.unit):
            self.walked.add(loop.axis)
            self.stored |= {stmt.tensor: stmt for stmt in statements(loop.body) if isinstance(stmt, Store)}
        self._body(self.kernel.body)

    def _fail(self, text: str) -> NestError:
        return NestError(f"kernel {self.kernel.name!r}: {text}")

    def _body(self, body: Iterable[Stmt]) -> None:
        for stmt in body:
            match stmt:
                case Let(name, dims, expr):
                    self._value(f"{name!r}", dims, expr)
                    self.visible[name] = dims
                case Store():
                    self._store(stmt)
                case Loop():
                    self._loop(stmt)

    def _value(self, name: str, dims: tuple[str, ...], expr: Expr) -> None:
        self._dims(name, dims)
        inner: tuple[Expr, ...] = (expr,)
        if isinstance(expr, Reduce):
            if not is_reduction(expr.op):
                raise self._fail(f"{name} folds with {expr.op!r}, which is not a reduction")
            if expr.axis in self.positions or expr.axis in dims:
                raise self._fail(
                    f"{name} folds axis {expr.axis!r}, of which it has one position or a component"
                )
            inner = contributions(expr)
            if (ranks := ranks_of(expr)) is not None:
                self._ranks(name, ranks)
        if isinstance(expr, Scan):
            if expr.axis not in dims:
                raise self._fail(f"{name} scans axis {expr.axis!r}, of which it has no component")
            inner = unpacked(expr.body, len(expr.fold.state))
        self._axes(name, dims, expr)
        for part in inner:
            self._expr(name, part)

    def _ranks(self, name: str, ranks: str) -> None:
        if ranks in self.positions | self.tiles:
            raise self._fail(f"{name} lists ranks along {ranks!r}, not all of which are at hand")

    def _dims(self, name: str, dims: tuple[str, ...]) -> None:
        _unique(dims, f"dims of {name} in {self.kernel.name!r}")
        if both := self.positions & set(dims):
            raise self._fail(f"{name} has dims {sorted(both)}, of which one position is at hand")

    def _axes(self, name: str, dims: Iterable[str], expr: Expr) -> None:
        if missing := free_axes(expr) - self.positions - set(dims):
            raise self._fail(f"{name} depends on axes {sorted(missing)}, which nothing provides")

    def _expr(self, name: str, expr: Expr) -> None:
        merges = [node for node in walk(expr) if isinstance(node, Call) and ranks_of(node) is not None]
        packs = {p for m in merges for p in walk(*m.args) if isinstance(p, Call) and p.fn == PAIR}
        for merge in merges:
            self._ranks(name, str(ranks_of(merge)))
        for node in walk(expr):
            match node:
                case Local(read, dims) if read not in self.visible:
                    raise self._fail(f"{name} reads {read!r}, which is not defined there")
                case Local(read, dims) if dims != self.visible[read]:
                    raise self._fail(
                        f"{name} reads {read!r} with dims {dims}, which has {self.visible[read]}"
                    )
                case Load(tensor, index) if tensor in self.stored:
                    self._stored_before(name, index, self.stored[tensor])
                case Load(tensor, _) if tensor not in self.readable:
                    raise self._fail(f"{name} loads {tensor!r}, which no earlier kernel stores")
                case Load(tensor, index) if len(index) != self.readable[tensor]:
                    raise self._fail(
                        f"{name} loads {tensor!r} with {len(index)} indices, of rank {self.readable[tensor]}"
                    )
                case Scalar(scalar) if scalar not in self.scalars:
                    raise self._fail(f"{name} reads the scalar {scalar!r}, which the program does not have")
                case Call() if node in packs or ranks_of(node) is not None:
                    pass
                case Call(fn, args) if ARITY.get(fn) != len(args):
                    raise self._fail(f"{name} calls {fn!r} with {len(args)} arguments")
                case Reduce(op, axis, _):
                    raise self._fail(f"{name} contains {op}[{axis}], which needs a name of its own")
                case Scan(_, _, axis):
                    raise self._fail(f"{name} contains a scan along {axis!r}, which needs a name of its own")
                case Axis() | Size() | Const() | Scalar() | Local() | Load() | Call():
                    pass

    def _stored_before(self, name: str, index: tuple[Expr, ...], store: Store) -> None:
        """Checks what reads a tensor that this kernel stores: the instance has stored it at an earlier position of the walk."""
        if len(index) != len(store.index):
            raise self._fail(
                f"{name} loads {store.tensor!r} with {len(index)} indices, of {len(store.index)}"
            )
        earlier = False
        for read, written in zip(index, store.index, strict=True):
            walked = free_axes(written) & self.walked
            if walked:
                (axis,) = walked
                form = difference(read, written)
                step = 1 if linear(written).atoms[Axis(axis)] == 1 else -1
                earlier = not form.atoms and form.constant * step < 0
            elif not free_axes(written).isdisjoint(self.kernel.parallel) and read is not written:
                raise self._fail(f"{name} loads what another instance stores to {store.tensor!r}")
        if not earlier:
            raise self._fail(f"{name} loads {store.tensor!r} at a position that is not stored before")

    def _store(self, stmt: Store) -> None:
        name = f"the store to {stmt.tensor!r}"
        if stmt.tensor not in self.buffers:
            raise self._fail(f"{name} has no buffer")
        rank = len(self.buffers[stmt.tensor].axes)
        if len(stmt.index) != rank:
            raise self._fail(f"{name} has {len(stmt.index)} indices, the buffer has rank {rank}")
        self._dims(name, stmt.dims)
        for expr in (*stmt.index, stmt.expr):
            self._axes(name, stmt.dims, expr)
            self._expr(name, expr)
        indexed = frozenset().union(*map(free_axes, stmt.index))
        indexed |= {self.parts[axis] for axis in indexed & self.parts.keys()}
        if racing := (self.positions - self.fixed | set(stmt.dims)) - indexed:
            raise self._fail(
                f"{name} does not depend on axes {sorted(racing)}: several values for one element"
            )

    def _loop(self, loop: Loop) -> None:
        name = f"the loop over {loop.axis!r}"
        if loop.axis in self.positions | self.tiles:
            raise self._fail(f"{name} is inside of what walks the same axis")
        for bound in (loop.start, loop.stop, *(loop.part or ())):
            self._axes(name, (), bound)
            self._expr(name, bound)
        for carried in loop.carried:
            self._carried_in(carried, loop)
        outer = dict(self.visible)
        self.visible.update({carried.name: carried.dims for carried in loop.carried})
        inside = self.positions if loop.unit else self.tiles
        inside.add(loop.axis)
        if loop.unit and loop.stop is call("add", loop.start, Const(1)):
            self.fixed.add(loop.axis)
        if loop.shard is not None:
            self.parts[loop.axis] = loop.shard
        self._body(loop.body)
        self.parts.pop(loop.axis, None)
        inside.remove(loop.axis)
        self.fixed.discard(loop.axis)
        lets = {stmt.name: stmt.dims for stmt in loop.body if isinstance(stmt, Let)}
        for carried in loop.carried:
            if lets.get(carried.next) != carried.dims:
                raise self._fail(
                    f"{name} does not compute {carried.next!r} with the dims of {carried.name!r}"
                )
        self.visible = outer | {carried.name: carried.dims for carried in loop.carried}

    def _carried_in(self, carried: Carried, loop: Loop) -> None:
        self._value(f"{carried.name!r}", carried.dims, carried.init)
        if loop.axis in carried.dims:
            raise self._fail(
                f"{carried.name!r} has a component for each position of the loop that carries it"
            )
