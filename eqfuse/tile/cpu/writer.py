"""The state of the CPU code generator in one kernel: variables, scopes, and who may overwrite what.

Everything here writes lines or answers questions about values; what the ops mean is elsewhere.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.names import Names
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Call, Const, Expr, Size
from eqfuse.tile.check import TileError
from eqfuse.tile.cpu.factors import direct_stores, dot_factors
from eqfuse.tile.cpu.values import TORCH, Affine, Item, Line, Storage, join
from eqfuse.tile.dtypes import INTEGERS, NARROW
from eqfuse.tile.nodes import Kernel, Stmt, TileProgram, Value
from eqfuse.tile.storage import buffer_dtypes
from eqfuse.tile.walk import used


class Identifiers(Names):
    """Names of Python."""

    def fresh(self, wanted: str) -> str:
        base = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in wanted)
        return super().fresh(
            f"v_{base}" if not base or base[0].isdigit() or keyword.iskeyword(base) else base
        )


def _conversion(item: Item, dtype: str) -> str:
    """An expression for a tensor in another dtype."""
    if item.dtype in FLOAT8 and dtype == "f32":
        return f"from_float8({item.text})"
    if dtype in FLOAT8:
        number = f"from_float8({item.text})" if item.dtype in FLOAT8 else item.text
        return f"to_float8({number}, {TORCH[dtype]}, {FLOAT8[dtype]!r})"
    return f"{item.text}.to({TORCH[dtype]})"


@dataclass
class Scope:
    """A body while it is written: where each value is read last, and the memory allocated in it."""

    last: Mapping[str, int]
    lines: list[Line] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    index: int = 0


class Writer:
    """Writes the body of one kernel. `taken` are identifiers that no variable may have.

    `made` are the products that a matrix product with a factor already is, `stored` the values that the operation
    itself wrote to their tensor.
    """

    def __init__(self, kernel: Kernel, program: TileProgram, taken: Iterable[str]) -> None:
        self.kernel = kernel
        self.blocks = {block.axis: block for block in kernel.blocks}
        self.domains = dict(program.domains)
        self.buffers = {buffer.name for buffer in program.buffers}
        self.fresh = Identifiers((*taken, *dir(builtins), "tensors", "scalars", "sizes", "blocks")).fresh
        self.head: list[Line] = []
        self.items: dict[str, Item] = {}
        self.inputs: dict[str, str] = {}
        self.sizes: dict[str, str] = {}
        self.constants: dict[tuple[str, str], str] = {}
        self.starts: dict[str, str] = {}
        self.stops: dict[str, str] = {}
        self.scopes: list[Scope] = []
        self.folds: dict[tuple[str, ...], str] = {}
        self.functions: dict[str, str] = {}
        self.factors = dot_factors(kernel)
        self.made: dict[str, Item] = {}
        self.stores = direct_stores(kernel)
        self.stored: set[str] = set()
        self.stored_dtypes = buffer_dtypes(program)

    # Variables ----------------------------------------------------------------------------------

    def emit(self, text: str, target: str | None = None) -> None:
        self.scopes[-1].lines.append(Line(text if target is None else f"{target} = {text}", target))

    def let(self, wanted: str, text: str) -> str:
        """A new variable for an expression."""
        name = self.fresh(wanted)
        self.emit(text, name)
        return name

    def at_head(self, wanted: str, text: str) -> str:
        """A new variable for an expression of the arguments alone."""
        name = self.fresh(wanted)
        self.head.append(Line(f"{name} = {text}", name))
        return name

    def function(self, wanted: str, body: str) -> str:
        """The name of a function of the module, from its arguments and body."""
        if body not in self.functions:
            self.functions[body] = self.fresh(wanted)
        return self.functions[body]

    def tensor(self, name: str) -> str:
        if name not in self.inputs:
            self.inputs[name] = self.at_head(name, f"tensors[{name!r}]")
        return self.inputs[name]

    def size(self, axis: str) -> str:
        axis = self.domains.get(axis, axis)
        if axis not in self.sizes:
            self.sizes[axis] = self.at_head(f"n_{axis}", f"sizes[{axis!r}]")
        return self.sizes[axis]

    def launch_text(self, expr: Expr) -> str:
        """An integer made of sizes."""
        match expr:
            case Size(axis):
                return self.size(axis)
            case Const(number):
                return repr(number)
            case Call(fn, args):
                return f"({f' {OPERATORS[fn]} '.join(map(self.launch_text, args))})"
        raise TypeError(f"{expr} is not known at a launch")

    def constant(self, number: float, dtype: str) -> str:
        """A variable with a tensor of one number, made once."""
        key = (repr(number), dtype)
        if key not in self.constants:
            shown = repr(number).replace("-", "minus_").replace("+", "").replace(".0", "").replace(".", "_")
            text = f"torch.tensor({number!r}, dtype={TORCH[dtype]})"
            self.constants[key] = self.at_head(f"c_{shown}_{dtype}", text)
        return self.constants[key]

    def walk(self, axis: str, start: str, stop: str, body: list[Line]) -> str:
        """The header of a loop over the blocks of an axis."""
        first = self.block(axis, stop, body)
        step = self._step(axis)
        return f"for {first} in range({start}, {stop}{f', {step}' if step > 1 else ''}):"

    def block(self, axis: str, stop: str, body: list[Line]) -> str:
        """The variable of a block's first position; where the block ends is computed in `body`."""
        step = self._step(axis)
        first = self.starts[axis] = self.fresh(f"{axis}_start" if step > 1 else f"{axis}_at")
        last = self.stops[axis] = self.fresh(f"{axis}_stop")
        end = f"min({first} + {step}, {stop})" if step > 1 else f"{first} + 1"
        body.append(Line(f"{last} = {end}", last))
        return first

    def _step(self, axis: str) -> int:
        return self.blocks[axis].step

    def start(self, axis: str) -> str:
        return "0" if self.blocks[axis].kind == "whole" else self.starts[axis]

    def stop(self, axis: str) -> str:
        return self.size(axis) if self.blocks[axis].kind == "whole" else self.stops[axis]

    def length(self, axis: str) -> str:
        return join(self.stop(axis), "-", self.start(axis)).strip("()")

    def lengths(self, dims: Sequence[str]) -> str:
        return "(" + "".join(f"{self.length(axis)}, " for axis in dims).rstrip(" ") + ")"

    # Lifetimes --------------------------------------------------------------------------------

    def open(self, body: Sequence[Stmt], lines: list[Line], kept: Iterable[str]) -> None:
        last = {name: index for index, stmt in enumerate(body) for name in used((stmt,))}
        self.scopes.append(Scope({**last, **dict.fromkeys(kept, len(body))}, lines))

    def define(self, value: Value, item: Item) -> None:
        """Gives a value its item, the memory of which it now reads."""
        if value.dtype in NARROW and item.wide is None:
            # A dot multiplies in f32; a loop around it should not convert again and again.
            text = self.let(f"{value.name}_wide", _conversion(item, "f32"))
            item = replace(item, wide=self.owned(replace(item, text=text, dtype="f32"), value.name))
        self.items[value.name] = item
        for storage in (*item.storage, *(item.wide.storage if item.wide else ())):
            storage.names.add(value.name)

    def owned(self, item: Item, name: str) -> Item:
        """The item as the only holder of newly allocated memory."""
        storage = Storage(len(self.scopes), {name}, [item.text])
        self.scopes[-1].storages.append(storage)
        return replace(item, storage=frozenset({storage}), fresh=True)

    def is_dead(self, storage: Storage) -> bool:
        scope = self.scopes[-1]
        here = storage.depth == len(self.scopes)
        return here and all(scope.last.get(name, -1) <= scope.index for name in storage.names)

    def release(self, scope: Scope) -> None:
        """Deletes the tiles that died in the statement just written."""
        dead = [storage for storage in scope.storages if self.is_dead(storage)]
        texts = dict.fromkeys(
            text
            for storage in dead
            if any(len(self.items[name].dims) > 1 for name in storage.names if name in self.items)
            for text in storage.texts
        )
        scope.storages = [storage for storage in scope.storages if storage not in dead]
        for storage in scope.storages:  # a name may stand for one of two tiles, and is deleted once
            storage.texts[:] = [text for text in storage.texts if text not in texts]
        if texts:
            scope.lines.append(Line("", forgets=tuple(texts)))

    def reusable(self, item: Item, others: Sequence[Item], full: frozenset[str], dtype: str) -> bool:
        """Whether the result of an operation may overwrite this operand of it."""
        if (
            not item.fresh
            or len(item.storage) != 1
            or item.full != full
            or item.dtype != dtype
            or not item.dims
        ):
            return False
        shared = any(item.storage & other.storage and other.text != item.text for other in others)
        return not shared and self.is_dead(next(iter(item.storage)))

    def carry(self, value: Value, item: Item, claimed: set[Storage], read: Iterable[str]) -> str:
        """An expression for the next content of a carried variable, in memory that is its own."""
        if item.is_python:
            return item.text
        item = self.plain(item)
        if item.number is not None:
            sizes = self.lengths(value.dims)
            return f"torch.full({sizes}, {item.number!r}, dtype={TORCH[value.dtype]})"
        own = item.fresh and len(item.storage) == 1 and item.full == frozenset(value.dims)
        if own:
            (storage,) = item.storage
            own = self.is_dead_but(storage, read) and storage not in claimed
            claimed.add(storage)
        return item.text if own else f"{self.expanded(item, value.dims)}.clone()"

    def hold(self, value: Value) -> None:
        """Makes a carried variable the holder of its memory in the current scope."""
        item = self.items[value.name]
        if not item.is_python:
            storage = Storage(len(self.scopes), {value.name})
            self.items[value.name] = replace(item, storage=frozenset({storage}), fresh=True)

    def is_dead_but(self, storage: Storage, read: Iterable[str]) -> bool:
        return self.is_dead(storage) and not storage.names & set(read)

    # Values -----------------------------------------------------------------------------------

    def read(self, value: Value) -> Item:
        return self.items[value.name]

    def dot_factor(self, dot: Value) -> tuple[Value, str] | None:
        """What a matrix product is multiplied by at once, as a Python number, and the value that it thereby
        becomes; None where there is no such factor, or it is not known when the kernel starts."""
        product, scalar = self.factors.get(dot.name, (dot, dot))
        if scalar is dot or scalar.name not in self.items:
            return None
        item = self.read(scalar)
        if item.number is not None:
            return product, repr(item.number)
        if not item.head:
            return None
        return product, self.at_head(f"{item.text}_number", f"{item.text}.item()")

    def scalar(self, value: Value, text: str, *, data: bool = False) -> Item:
        """A Python int or bool, under a name unless it is one already."""
        if not (text.isidentifier() or text.isdigit()):
            text = self.let(value.name, text)
        return Item(text, (), value.dtype, affine=Affine(text, data=data))

    def python(self, item: Item) -> str:
        if not item.is_python:
            raise TileError(f"kernel {self.kernel.name!r}: {item.text} is not a scalar integer")
        return item.text

    def filled(self, value: Value, number: float) -> Item:
        constant = self.constant(int(number) if value.dtype in INTEGERS else float(number), value.dtype)
        if not value.dims:
            return Item(constant, (), value.dtype, number=number)
        text = self.let(value.name, f"{constant}.view({', '.join('1' for _ in value.dims)})")
        return Item(text, value.dims, value.dtype, number=number)

    def plain(self, item: Item) -> Item:
        """The item with a condition that is known written out."""
        if item.truth is None:
            return item
        ones = ", ".join("1" for _ in item.dims)
        text = f"torch.full(({ones},), {item.truth})" if item.dims else repr(item.truth)
        return Item(text, item.dims, "bool", affine=None if item.dims else Affine(text))

    def aligned(self, item: Item, dims: tuple[str, ...], name: str) -> Item:
        if item.dims == dims:
            return item
        if item.truth is not None:
            return Item(item.text, dims, "bool", truth=item.truth)
        if item.is_python:
            text = self.let(name, f"torch.full({(1,) * len(dims)}, {item.text}, dtype={TORCH[item.dtype]})")
            return Item(text, dims, item.dtype, affine=item.affine)
        if not item.dims:
            text = self.let(name, f"{item.text}.view({', '.join('1' for _ in dims)})")
            return self.alias(replace(item, text=text, dims=dims, wide=None))
        if missing := set(item.dims) - set(dims):
            raise TileError(
                f"kernel {self.kernel.name!r}: {item.text} cannot lose the dims {sorted(missing)}"
            )
        order = [item.dims.index(dim) for dim in dims if dim in item.dims]
        view = ""
        if order != sorted(order):
            view += ".t()" if order == [1, 0] else f".permute({', '.join(map(str, order))})"
        view += "".join(f".unsqueeze({place})" for place, dim in enumerate(dims) if dim not in item.dims)
        text = self.let(name, item.text + view)
        wide = item.wide
        if wide is not None:
            wide = self.alias(replace(wide, text=self.let(f"{name}_wide", wide.text + view), dims=dims))
        return self.alias(replace(item, text=text, dims=dims, wide=wide))

    def alias(self, item: Item) -> Item:
        for storage in item.storage:
            if storage.depth == len(self.scopes):
                storage.texts.append(item.text)
        return item

    def converted(self, item: Item, dtype: str, name: str) -> Item:
        if item.dtype == dtype:
            return item
        if item.truth is not None:
            number = int(item.truth)
            if dtype not in INTEGERS:
                return self.filled(Value(name, item.dims, dtype), float(number))
            return self.aligned(Item(repr(number), (), dtype, affine=Affine(repr(number))), item.dims, name)
        if item.wide is not None and item.wide.dtype == dtype:
            return item.wide
        if item.is_python:
            if (item.dtype, dtype) == ("i64", "i32"):
                return self.scalar(Value(name, (), dtype), f"wrapped({item.text}, 32)", data=True)
            if dtype in INTEGERS:
                text = item.text if item.dtype != "bool" else f"int({item.text})"
                return replace(
                    item, text=text, dtype=dtype, affine=item.affine and replace(item.affine, constant=text)
                )
            text = self.let(name, f"torch.tensor({item.text}, dtype={TORCH[dtype]})")
            return Item(text, (), dtype)
        if item.number is not None and dtype not in NARROW:
            return self.filled(Value(name, item.dims, dtype), item.number)
        if TORCH[dtype] == TORCH[item.dtype]:
            return replace(item, dtype=dtype)
        if not item.dims and dtype in INTEGERS:
            return self.scalar(Value(name, (), dtype), f"int({item.text})", data=True)
        text = self.let(name, _conversion(item, dtype))
        return self.owned(Item(text, item.dims, dtype, item.full), name)

    def expanded(self, item: Item, dims: Iterable[str]) -> str:
        """The tensor with its whole extent along `dims`."""
        if set(dims) <= item.full or not item.dims:
            return item.text
        sizes = (self.length(d) if d in dims and d not in item.full else "-1" for d in item.dims)
        return f"{item.text}.expand({', '.join(sizes)})"
