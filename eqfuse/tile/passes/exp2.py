"""Exponentials to the base 2, which is what a GPU's special function unit computes.

`exp(x) = exp2(x * log2(e))`. Where everything that flows into the exponents is linear in a product
with a scalar (a scaled score, its maximum, their difference), the scalar takes the constant once, and
the values in between are kept multiplied: the result is rounded as often as before. Values that would
need a multiplication of their own at full size (a tile that is loaded) are left alone: there the
difference of two exact numbers is better taken first.

The same holds where a kernel takes exponentials of differences between what it computes from inputs, or from what was stored,
and what another kernel has made of that and stored, a maximum as a rule: `x - max x` is exactly 0 at the maximum, and it has to stay so. There, neither
what is stored nor what is subtracted is kept multiplied, for a product and its inverse are rounded. The same holds where a
number such as -1e30, by which a program masks, meets what is loaded: the maximum of a row that is masked wholly is that
number, and a compiler may round the product of the one and not that of the other, as it fuses it with the difference.

An input that is added to scores, or chosen in their place, may be such a mask too: its numbers are not known here, and the least
float32 would be -inf once it is multiplied, and so the maximum of a row of it. The difference with the maximum is multiplied there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Literal

from eqfuse.fast_dataclass import dataclass
from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import LARGEST
from eqfuse.tile.passes.draft import Draft, in_kernels
from eqfuse.tile.walk import defined, mapped, nested, operands, ops_of

_LINEAR = frozenset(("add", "sub", "neg", "abs", "relu", "maximum", "minimum", "finite"))
"""Functions f with f(c x, c y) = c f(x, y) for every c > 0."""

_TYPICAL_BLOCK = 64
_WORTH = 8
"""How many multiplications have to go for each one that comes."""


_MOST = LARGEST / math.log2(math.e)
"""Numbers beyond it are infinities of float32 once they are multiplied."""
_COARSE = 2.0**13
"""The product with log2 e of numbers beyond it is rounded by more than 2**-11 in float32, which is so much of an exponential."""
_UNCHANGED = (0.0, math.inf, -math.inf)
"""Constants that are themselves times any positive number."""


def base_2(program: ir.TileProgram, *, everywhere: bool) -> ir.TileProgram:
    """Exponentials of f32 as those to the base 2: `everywhere`, or only where no multiplication is added."""
    exact = _met_again(program)
    return in_kernels(program, lambda kernel: _Base2(kernel, everywhere, exact).run())


def _met_again(program: ir.TileProgram) -> frozenset[str]:
    """Buffers that are part of an exponent together with inputs, or with what they were made of."""
    made = {buffer.name for buffer in program.buffers}
    made_of: dict[str, set[str]] = {}
    exponents: list[set[str]] = []
    for kernel in program.kernels:
        sources = _Sources(kernel)
        for stmt in nested(kernel.body):
            if isinstance(stmt, ir.Let) and _is_exponential(stmt):
                exponents.append(sources.of(operands(stmt.op)[0]))
            elif isinstance(stmt, ir.Store):
                read = sources.of(stmt.value)
                before = (made_of.get(name, set()) for name in read)
                made_of[stmt.tensor] = made_of.get(stmt.tensor, set()).union(read, *before)
    return frozenset(
        name
        for read in exponents
        for name in read & made
        if read - made or made_of.get(name, set()) & (read - {name})
    )


class _Sources:
    """The tensors that each value of a kernel is made of."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self._reads: dict[str, tuple[ir.Value, ...]] = {}
        self._loads: dict[str, str] = {}
        for stmt in nested(kernel.body):
            match stmt:
                case ir.Let(value, op):
                    self._reads[value.name] = operands(op)
                    if isinstance(op, ir.LoadTile):
                        self._loads[value.name] = op.tensor
                case ir.For(carried=items):
                    for item in items:
                        self._reads[item.value.name] = (item.init, item.next)

    def of(self, value: ir.Value) -> set[str]:
        seen, stack = {value.name}, [value.name]
        while stack:
            for part in self._reads.get(stack.pop(), ()):
                if part.name not in seen:
                    seen.add(part.name)
                    stack.append(part.name)
        return {self._loads[name] for name in seen if name in self._loads}


def error(x: float, rounded: int) -> float:
    """How far, relative to it, `exp2` of a product in float32 may be from the exponential of x, in units of 2**-23: the
    product is rounded so many times, by half a unit of itself each, and `exp2` is off by two, as CUDA's is."""
    return 2.0 + abs(x) * 0.5 * rounded


def scalar_factor(op: ir.Op) -> int | None:
    """Which operand of a product (or quotient) with a scalar is that scalar."""
    match op:
        case ir.Elementwise("mul", (left, right)):
            return 1 if not right.dims else 0 if not left.dims else None
        case ir.Elementwise("div", (_, right)) if not right.dims:
            return 1
        case _:
            return None


def _factor(op: ir.Op | None) -> tuple[ir.Value, ...]:
    """The scalar of a product with one, which takes the constant if the product is multiplied."""
    match op:
        case ir.Elementwise("mul", args) if (place := scalar_factor(op)) is not None:
            return (args[place],)
        case _:
            return ()


def scaled_operands(op: ir.Op) -> tuple[ir.Value, ...]:
    """The operands that are multiplied if the result is; none where the op has to take the constant itself."""
    match op:
        case ir.Elementwise("where", (_, left, right)):
            return (left, right)
        case ir.Elementwise(fn, args) if fn in _LINEAR:
            return args
        case ir.Align(source) | ir.ReduceTile("max" | "min" | "sum", source, _):
            return (source,)
        case _:
            return ()


@dataclass
class _Body:
    """Statements as they are made. `converted` are the other forms of what loops carry, made in this body."""

    stmts: list[ir.Stmt] = field(default_factory=list)
    converted: dict[tuple[str, str], ir.Value] = field(default_factory=dict)


class _Base2:
    """One kernel. A value of `scaled` keeps its name and is log2 e times what it was."""

    def __init__(self, kernel: ir.Kernel, everywhere: bool, exact: frozenset[str]) -> None:
        self._kernel = kernel
        self._everywhere = everywhere
        self._scaled = log2_scaled(kernel, exact)
        self._draft = Draft(kernel)
        self._ops = ops_of(kernel.body)
        self._constants: dict[str, ir.Value] = {}
        self._converted: dict[tuple[str, str], ir.Value] = {}

    def run(self) -> ir.Kernel:
        if not self._scaled and not (self._everywhere and any(map(_is_exponential, self._lets()))):
            return self._kernel
        return self._draft.kernel_of(self._body(self._kernel.body).stmts)

    def _lets(self) -> Iterator[ir.Let]:
        return (stmt for stmt in nested(self._kernel.body) if isinstance(stmt, ir.Let))

    def _body(self, body: Iterable[ir.Stmt]) -> _Body:
        made = _Body()
        for stmt in body:
            match stmt:
                case ir.Let():
                    self._let(stmt, made)
                case ir.For():
                    made.stmts.append(self._loop(stmt, made))
                case ir.Store():
                    made.stmts.append(replace(stmt, value=self._read(stmt.value, False, made)))
        return made

    def _loop(self, loop: ir.For[ir.Stmt], before: _Body) -> ir.For[ir.Stmt]:
        inits = [self._read(item.init, item.value.name in self._scaled, before) for item in loop.carried]
        body = self._body(loop.body)
        carried = tuple(
            ir.Carried(item.value, init, self._read(item.next, item.value.name in self._scaled, body))
            for item, init in zip(loop.carried, inits, strict=True)
        )
        return replace(loop, carried=carried, body=tuple(body.stmts))

    def _let(self, let: ir.Let, here: _Body) -> None:
        value, op = let.value, let.op
        if value.name not in self._scaled:
            here.stmts.append(ir.Let(value, self._plain(let, here)))
        elif scaled := scaled_operands(op):
            here.stmts.append(
                ir.Let(value, self._with(op, {v.name: self._read(v, True, here) for v in scaled}, here))
            )
        elif (place := scalar_factor(op)) is not None:
            assert isinstance(op, ir.Elementwise)
            scalar = op.args[place]
            # x / s * c = x / (s / c)
            factor = self._over(scalar, here) if op.fn == "div" else self._read(scalar, True, here)
            args = [self._read(arg, False, here) for arg in op.args]
            args[place] = factor
            here.stmts.append(ir.Let(value, replace(op, args=tuple(args))))
        else:
            plain = self._draft.new(f"{value.name}_plain", value.dims, value.dtype)
            here.stmts.append(ir.Let(plain, self._plain(let, here)))
            here.stmts.append(
                ir.Let(value, ir.Elementwise("mul", (plain, self._constant("log2_e", value.dtype))))
            )

    def _plain(self, let: ir.Let, here: _Body) -> ir.Op:
        """The op of a value that is not scaled."""
        if _is_exponential(let) and (self._everywhere or operands(let.op)[0].name in self._scaled):
            return ir.Elementwise("exp2", (self._read(operands(let.op)[0], True, here),))
        return self._with(let.op, {}, here)

    def _with(self, op: ir.Op, known: Mapping[str, ir.Value], here: _Body) -> ir.Op:
        """The op of these operands, of plain ones where none is given."""
        read = {v.name: known.get(v.name) or self._read(v, False, here) for v in operands(op)}
        return mapped(op, lambda value: read[value.name])

    def _read(self, value: ir.Value, scaled: bool, here: _Body) -> ir.Value:
        """The value times log2 e if `scaled` and plain if not, whichever of the two it is kept as."""
        if scaled == (value.name in self._scaled):
            return value
        op = self._ops.get(value.name)
        if isinstance(op, ir.Constant | ir.Fill) and (op.number in _UNCHANGED or math.isnan(op.number)):
            return value
        constant = self._constant("log2_e" if scaled else "ln_2", value.dtype)
        product = ir.Elementwise("mul", (value, constant))
        return self._form(value, "log2" if scaled else "plain", product, here)

    def _over(self, scalar: ir.Value, here: _Body) -> ir.Value:
        quotient = ir.Elementwise(
            "div", (self._read(scalar, False, here), self._constant("log2_e", scalar.dtype))
        )
        return self._form(scalar, "over_log2", quotient, here)

    def _form(self, value: ir.Value, suffix: str, op: ir.Op, here: _Body) -> ir.Value:
        """A form of a value, behind its definition; of one that a loop carries, where it is first read in a body."""
        is_carried = value.name not in self._ops
        made = here.converted if is_carried else self._converted
        key = value.name, suffix
        if key not in made:
            if is_carried:
                made[key] = self._draft.new(f"{value.name}_{suffix}", value.dims, value.dtype)
                here.stmts.append(ir.Let(made[key], op))
            else:
                made[key] = self._draft.behind(value, f"{value.name}_{suffix}", op)
        return made[key]

    def _constant(self, name: Literal["log2_e", "ln_2"], dtype: str) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._draft.new(name, (), dtype)
            self._draft.first.append(ir.Let(self._constants[name], ir.Irrational(name)))
        return self._constants[name]


def _is_exponential(let: ir.Let) -> bool:
    return isinstance(let.op, ir.Elementwise) and let.op.fn == "exp" and let.value.dtype == "f32"


def log2_scaled(kernel: ir.Kernel, exact: frozenset[str]) -> frozenset[str]:
    """Names of the values of `kernel` to keep multiplied by log2(e): none that is loaded from a buffer of `exact` or
    stored in one."""
    great = _made_of_great_numbers(kernel)
    flow = _Flow(great)
    for stmt in nested(kernel.body):
        flow.add(stmt)
    found: set[str] = set()
    kept = _kept_exact(kernel, exact) | great
    for group in flow.groups():
        if group & kept or flow.meets_loaded(group) or flow.adds_inputs(group):
            continue
        removed = sum(_elements(arg) for arg in flow.exponents if arg.name in group)
        added = sum(_elements(flow.values[name]) for name in group if flow.costs(name, group))
        if removed >= _WORTH * added:
            found |= group
    return frozenset(found)


def _kept_exact(kernel: ir.Kernel, exact: frozenset[str]) -> set[str]:
    """Names of the values that are loaded from these buffers or stored in them, as another shape or dtype or as they
    are."""
    found: set[str] = set()
    alike: dict[str, str] = {}
    for stmt in nested(kernel.body):
        match stmt:
            case ir.Let(value, ir.LoadTile(tensor, _, _, _)) if tensor in exact:
                found.add(value.name)
            case ir.Let(value, ir.Align(source) | ir.Cast(source)):
                alike[value.name] = source.name
                if source.name in found:
                    found.add(value.name)
            case ir.Store(tensor, _, value, _) if tensor in exact:
                name: str | None = value.name
                while name is not None:
                    found.add(name)
                    name = alike.get(name)
    return found


def _made_of_great_numbers(kernel: ir.Kernel) -> set[str]:
    """Names of the values that would have to multiply a number which float32 does not hold log2 e times."""
    great: set[str] = set()
    found: set[str] = set()
    for stmt in nested(kernel.body):
        match stmt:
            case ir.Let(value, ir.Constant(number) | ir.Fill(number)) if _MOST < abs(number) < math.inf:
                great.add(value.name)
            case ir.Let(value, op) if any(
                part.name in great for part in (*scaled_operands(op), *_factor(op))
            ):
                found.add(value.name)
            case ir.For(carried=items):
                found |= {item.value.name for item in items if item.init.name in great}
    return found


def _elements(value: ir.Value) -> int:
    return int(_TYPICAL_BLOCK ** len(value.dims))


@dataclass
class _Flow:
    """`great` are values that are not multiplied: what they are made of need not be multiplied with others that are."""

    great: set[str]
    values: dict[str, ir.Value] = field(default_factory=dict)
    ops: dict[str, ir.Op] = field(default_factory=dict)
    carried: dict[str, ir.Carried] = field(default_factory=dict)
    readers: dict[str, list[str | None]] = field(default_factory=dict)  # None: not scaled, whoever it is
    exponents: list[ir.Value] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)  # what rare loops carry that multiply nothing

    def add(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Let(value, op):
                self.values[value.name] = value
                self.ops[value.name] = op
                if isinstance(op, ir.Elementwise) and op.fn == "exp" and value.dtype == "f32":
                    self.exponents.append(op.args[0])
                    return
                for operand in operands(op):
                    self._read(operand, value.name)
            case ir.Store():
                for operand in operands(stmt):
                    self._read(operand, None)
            case ir.For(carried=items):
                is_great = stmt.rare and any(value.name in self.great for value in defined((stmt,)))
                for item in items:
                    self.values[item.value.name] = item.value
                    self.carried[item.value.name] = item
                    self._read(item.init, None if is_great else item.value.name)
                    self._read(item.next, item.value.name)
                self.apart |= {item.value.name for item in items if is_great}

    def _read(self, value: ir.Value, reader: str | None) -> None:
        self.readers.setdefault(value.name, []).append(reader)

    def _sources(self, name: str) -> tuple[ir.Value, ...]:
        """The values that are multiplied if this one is; none where it takes the constant itself."""
        if name in self.great:
            return ()
        if name in self.apart:
            return (self.carried[name].next,)
        if name in self.carried:
            return (self.carried[name].init, self.carried[name].next)
        return scaled_operands(self.ops[name])

    def _sources_scaled(self, name: str) -> Iterator[str]:
        for value in self._sources(name):
            if not isinstance(self.ops.get(value.name), (ir.Constant, ir.Fill)):
                yield value.name

    def groups(self) -> Iterator[frozenset[str]]:
        """Sets of values that are multiplied together or not at all, in the order of their exponents."""
        links: dict[str, set[str]] = {}
        stack = [arg.name for arg in self.exponents if arg.dtype == "f32"]
        while stack:
            name = stack.pop()
            if name in links or isinstance(self.ops.get(name), (ir.Constant, ir.Fill)):
                continue
            links[name] = set(self._sources_scaled(name))
            stack += links[name]
        neighbours: dict[str, set[str]] = {name: set(found) for name, found in links.items()}
        for name, found in links.items():
            for source in found:
                neighbours[source].add(name)
        seen: set[str] = set()
        for arg in self.exponents:
            if arg.name in links and arg.name not in seen:
                group = _reached(arg.name, neighbours)
                seen |= group
                if all(self.values[name].dtype == "f32" for name in group):
                    yield frozenset(group)

    def meets_loaded(self, group: frozenset[str]) -> bool:
        """Whether what is multiplied is made of tiles that are loaded and of numbers whose product would be coarse."""
        parts = (part.name for name in group for part in (*self._sources(name), *_factor(self.ops.get(name))))
        return any(isinstance(self.ops.get(name), ir.LoadTile) for name in group) and any(
            isinstance(op, ir.Constant | ir.Fill) and _COARSE < abs(op.number) < math.inf
            for op in map(self.ops.get, parts)
        )

    def adds_inputs(self, group: frozenset[str]) -> bool:
        """Whether what is multiplied has an input as a summand, or as a choice, before it is an exponent. In the sum that an
        exponent is, an infinity does no harm: nothing is subtracted from it."""
        sums = group - {arg.name for arg in self.exponents}
        return any(
            isinstance(op, ir.Elementwise)
            and op.fn in ("add", "sub", "where")
            and any(self._is_input(arg) for arg in scaled_operands(op))
            for op in map(self.ops.get, sums)
        )

    def _is_input(self, value: ir.Value) -> bool:
        """Whether a value is loaded or an argument, in another shape or dtype or with another sign too."""
        match self.ops.get(value.name):
            case ir.LoadTile() | ir.Argument():
                return True
            case ir.Align(source) | ir.Cast(source) | ir.Elementwise("neg" | "finite", (source,)):
                return self._is_input(source)
            case _:
                return False

    def costs(self, name: str, group: frozenset[str]) -> bool:
        """Whether keeping the value multiplied takes a multiplication: to make it, or to undo it for a reader."""
        made = not self._sources(name) and scalar_factor(self.ops[name]) is None
        undone = any(reader not in group for reader in self.readers.get(name, []))
        return made or undone


def _reached(start: str, neighbours: Mapping[str, set[str]]) -> set[str]:
    found, stack = {start}, [start]
    while stack:
        for name in neighbours[stack.pop()] - found:
            found.add(name)
            stack.append(name)
    return found
