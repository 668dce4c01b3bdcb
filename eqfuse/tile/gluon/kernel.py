"""One kernel in roles as Gluon functions: one for the producer, one for the consumers, one that starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eqfuse.extract.resources import CONSUMER_REGISTERS, LEADER_REGISTERS, LED_REGISTERS, PRODUCER_REGISTERS
from eqfuse.loops.blocks import Block
from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Expr
from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.gluon.expressions import GLUON_DTYPES, Expressions, Places
from eqfuse.tile.gluon.functions import OWN
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.triton.expressions import Piece
from eqfuse.tile.triton.functions import IRRATIONAL, Text, call
from eqfuse.tile.triton.parameters import Names, Tables
from eqfuse.tile.triton.template import launch_text
from eqfuse.tile.triton.wrap import wrap
from eqfuse.tile.walk import defined, nested, operands, ops_of

WARPS = 4
"""Warps of a consumer: a warp group, which multiplies matrices together."""

SUMMED_BYTES = 32
"""Bytes of a row of an operand that one matrix instruction multiplies."""

_INLINE_COLUMNS = 72
"""A longer expression gets a variable of its own."""


@dataclass(frozen=True)
class Descriptor:
    """What the copy engine is told of a tensor: the axis of its tile along each dim, None where that is one position; with
    `rows` divided among parts."""

    name: str
    tensor: str
    axes: tuple[str | None, ...]
    dtype: str


@dataclass
class Parameters:
    """Names of a kernel's parameters, in the order of its signature."""

    descriptors: dict[str, Descriptor] = field(default_factory=dict)  # by ring or staging
    pointers: dict[str, str] = field(default_factory=dict)
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    extents: dict[str, str] = field(default_factory=dict)  # by root axis
    scalars: dict[str, tuple[str, str]] = field(default_factory=dict)  # name and dtype
    blocks: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)  # by condition: those of integers
    signs: dict[str, str] = field(default_factory=dict)  # by condition: those of numbers

    @property
    def constants(self) -> list[str]:
        """What a binary has one value of."""
        return [*dict.fromkeys((*self.blocks.values(), *self.known.values(), *self.signs.values()))]

    def given(self) -> list[str]:
        """What a role is given of them."""
        return [
            *(descriptor.name for descriptor in self.descriptors.values()),
            *self.pointers.values(),
            *(name for names in self.strides.values() for name in names),
            *self.extents.values(),
            *(name for name, _ in self.scalars.values()),
        ]


@dataclass(frozen=True)
class KernelText:
    """A printed kernel and what launching it takes."""

    name: str
    kernel: warp.RolesKernel
    parameters: Parameters
    lines: tuple[str, ...]
    helpers: frozenset[str]
    at_launch: Mapping[str, Expr]
    at_call: Callable[[str, Callable[[str], str], Callable[[str], str]], str]
    """The text of a condition that it knows in a launcher, given the texts of a size and of the length of a block."""


def write_kernel(kernel: warp.RolesKernel, name: str, tables: Tables) -> KernelText:
    """The text of one kernel, called `name`."""
    return _Writer(kernel, name, tables).run()


class _Writer:
    def __init__(self, kernel: warp.RolesKernel, name: str, tables: Tables) -> None:
        self.kernel, self.name, self.tables = kernel, name, tables
        self.names = Names(
            (
                name,
                "copy_in",
                "copy_out",
                "gl",
                "gluon",
                "tma",
                "mbarrier",
                "PART",
                "ROWS",
                "MEMORY",
                "REGISTERS",
                *OWN,
            )
        )
        self.blocks: Mapping[str, Block] = {block.axis: block for block in kernel.blocks}
        statements = [stmt for role in kernel.roles for stmt in nested(role.body)]
        self.ops: Mapping[str, ir.Op] = ops_of(statements)
        self.parameters = self._parameters()
        self.tiles = {ring.name: self.names.fresh(f"{ring.name}") for ring in kernel.rings}
        self.full = {ring.name: self.names.fresh(f"{ring.name}_full") for ring in kernel.rings}
        filled_again = {
            stmt.ring
            for role in kernel.roles
            for stmt in nested(role.body)
            if isinstance(stmt, warp.ReleaseSlot)
        }
        self.empty = {
            ring.name: self.names.fresh(f"{ring.name}_empty")
            for ring in kernel.rings
            if ring.name in filled_again
        }
        meets = any(
            isinstance(stmt, warp.ConsumerBarrier) for role in kernel.roles for stmt in nested(role.body)
        )
        self.meeting = self.names.fresh("meeting") if meets else None
        self.staged = {s.name: self.names.fresh(s.name) for s in kernel.staging}
        tile_axes = {b.axis for b in kernel.blocks if _is_tile(b)}
        self.starts = {
            b.axis: self.names.fresh(f"{b.axis}_start" if b.axis in tile_axes else b.axis)
            for b in kernel.blocks
        }
        if kernel.columns is not None:
            self.starts[kernel.columns.part] = self.starts[kernel.columns.axis]
        self.helpers: set[str] = set()

    def _parameters(self) -> Parameters:
        kernel, names, found = self.kernel, self.names, Parameters()
        index: dict[str, warp.Index] = {}
        extents = [*kernel.grid[:-1]]
        extents += [axis for axis in kernel.grid[-1:] if axis in kernel.backwards or kernel.persistent]
        for role in kernel.roles:
            for stmt in nested(role.body):
                match stmt:
                    case warp.AsyncCopy(ring, _, at):
                        index[ring] = at
                    case warp.Put(staging, _, at, _):
                        index[staging] = at
                    case ir.Let(_, ir.LoadTile(tensor)) | ir.Store(tensor):
                        if tensor not in found.pointers:
                            labels = self.tables.tensors[tensor].labels
                            found.pointers[tensor] = names.fresh(f"{tensor}_ptr")
                            found.strides[tensor] = tuple(names.fresh(f"{tensor}_stride_{n}") for n in labels)
                    case ir.Let(value, ir.Argument(name) | ir.LaunchValue(name, _)) if (
                        name not in found.scalars
                    ):
                        found.scalars[name] = names.fresh(name), value.dtype
                    case ir.Let(_, ir.Extent(axis)):
                        extents.append(axis)
        for axis in dict.fromkeys(self.tables.root[axis] for axis in extents):
            found.extents[axis] = names.fresh(f"N_{axis}")
        copied: list[warp.Ring | warp.Staging] = [*kernel.rings, *kernel.staging]
        for each in copied:
            if each.name in index:
                axes = tuple(p.axis if isinstance(p, warp.Along) else None for p in index[each.name])
                name = names.fresh(f"{each.name}_desc")
                found.descriptors[each.name] = Descriptor(name, each.tensor, axes, each.tile.dtype)
        for block in filter(_is_tile, kernel.blocks):
            found.blocks[block.axis] = names.fresh(f"BLOCK_{block.axis.upper()}")
        for value in kernel.launch_constants:
            op = self.ops[value.name]
            assert isinstance(op, ir.Elementwise)
            kind = found.known if op.args[0].dtype in INTEGERS else found.signs
            same = next((name for known, name in kind.items() if self.ops[known] == op), None)
            kind[value.name] = same or names.fresh(value.name.upper())
        return found

    def at_call(self, condition: str, extent: Callable[[str], str], block: Callable[[str], str]) -> str:
        """The text of a condition that it knows in a launcher, given the texts of a size and of the length of a block."""

        def text(value: ir.Value) -> str:
            match self.ops[value.name]:
                case ir.Constant(number):
                    return repr(number)
                case ir.Irrational(name):
                    return IRRATIONAL[name]
                case ir.Argument(name):
                    return f"float({name})"
                case ir.Extent(axis):
                    return extent(axis)
                case ir.BlockSize(axis):
                    return block(axis)
                case ir.LaunchValue(_, expr):
                    return launch_text(expr, extent)
                case ir.Elementwise("minimum" | "maximum" as fn, args):
                    return f"{fn[:3]}({', '.join(map(text, args))})"
                case ir.Elementwise(fn, (left, right)):
                    return f"({text(left)} {OPERATORS[fn]} {text(right)})"
            raise TileError(f"{value.name} is not known at a launch")

        return text(ir.Value(condition, (), "bool"))

    # Functions ------------------------------------------------------------------------------------------

    def run(self) -> KernelText:
        producer, *consumers = self.kernel.roles
        shared = [*self.tiles.values(), *self.full.values(), *self.empty.values(), *self.staged.values()]
        shared += [self.meeting] if self.meeting else []
        starts = [] if self.kernel.persistent else [self.starts[axis] for axis in self.kernel.grid]
        given = [*self.parameters.given(), *shared, *starts]
        blocks = self.parameters.constants
        lines: list[str] = []
        lines += self._role(producer, f"{self.name}_producer", given, blocks)
        roles: list[str] = []
        written: dict[tuple[warp.Stmt, ...], str] = {}
        for consumer in consumers:
            if consumer.body not in written:
                name = written[consumer.body] = f"{self.name}_consumer" + (
                    f"_{len(written)}" if written else ""
                )
                lines += ["", "", *self._role(consumer, name, given, blocks)]
            name = f"{self.name}_consumer{consumer.part}"
            head = f"def {name}({', '.join([*given, *(f'{b}: gl.constexpr' for b in blocks)])}):"
            body = f"    {written[consumer.body]}({', '.join([str(consumer.part), *given, *blocks])})"
            lines += ["", "", "@gluon.jit", *wrap(head), *wrap(body)]
            roles.append(name)
        lines += ["", "", *self._start(roles, given, blocks)]
        at_launch = {
            stmt.op.name: stmt.op.expr
            for role in self.kernel.roles
            for stmt in nested(role.body)
            if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.LaunchValue)
        }
        helpers = frozenset(self.helpers)
        return KernelText(
            self.name, self.kernel, self.parameters, tuple(lines), helpers, at_launch, self.at_call
        )

    def _role(self, role: warp.Role, name: str, given: Sequence[str], blocks: Sequence[str]) -> list[str]:
        constants = [f"{block}: gl.constexpr" for block in blocks]
        part = ["PART: gl.constexpr"] if role.part is not None else []
        head = f"def {name}({', '.join([*part, *given, *constants])}):"
        text = _RoleText(self, role)
        body = text.lines()
        self.helpers |= text.expressions.helpers
        return ["@gluon.jit", *wrap(head), *(piece for line in body for piece in wrap(f"    {line}"))]

    def _start(self, roles: Sequence[str], given: Sequence[str], blocks: Sequence[str]) -> list[str]:
        kernel, parameters = self.kernel, self.parameters
        lines: list[str] = []
        for ring in kernel.rings:
            if not ring.tensor:
                lines.append(self._given(ring))
                continue
            desc, count = parameters.descriptors[ring.name].name, ring.slots * ring.parts
            lines.append(
                f"{self.tiles[ring.name]} = gl.allocate_shared_memory({desc}.dtype, [{count}] + {desc}.block_type.shape, {desc}.layout)"
            )
        for staging in kernel.staging:
            desc, name = parameters.descriptors[staging.name].name, self.staged[staging.name]
            apart = f"{name} = gl.allocate_shared_memory({desc}.dtype, [{kernel.consumers}] + {desc}.block_type.shape, {desc}.layout)"
            if staging.over is None:
                lines.append(apart)
                continue
            dims = zip(staging.tile.dims, kernel.ring(staging.over).tile.dims, strict=True)
            pairs = [(parameters.blocks[a], parameters.blocks[b]) for a, b in dims if a != b]
            shared = f"{name} = {self.tiles[staging.over]}"
            if not pairs:
                lines.append(shared)
                continue
            lines.append(f"if {' and '.join(f'{a} == {b}' for a, b in pairs)}:")
            lines += [f"    {shared}", "else:", f"    {apart}"]
        for ring in kernel.rings:
            ends = [(self.full[ring.name], 1)]
            if ring.name in self.empty:
                ends.append((self.empty[ring.name], ring.readers or kernel.consumers))
            for barrier, count in ends:
                lines.append(
                    f"{barrier} = gl.allocate_shared_memory(gl.int64, [{ring.slots}, 1], mbarrier.MBarrierLayout())"
                )
                lines.append(f"for slot in gl.static_range({ring.slots}):")
                lines.append(f"    mbarrier.init({barrier}.index(slot), count={count})")
        if self.meeting:
            lines.append(
                f"{self.meeting} = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())"
            )
            lines.append(f"mbarrier.init({self.meeting}, count={kernel.consumers})")
        if not kernel.persistent:
            lines += self.grid("gl.program_id(0)")
        passed = ", ".join([*given, *blocks])
        functions = [*roles, f"{self.name}_producer"]
        calls = ", ".join(f"({function}, ({passed}))" for function in functions)
        warps = ", ".join([*(str(WARPS) for _ in roles[1:]), "1"])
        counts = [CONSUMER_REGISTERS[kernel.consumers] for _ in roles]
        if kernel.led:
            counts = [*(LED_REGISTERS for _ in roles[1:]), LEADER_REGISTERS]
        held = ", ".join(map(str, [*counts[1:], PRODUCER_REGISTERS]))
        lines.append(f"gl.warp_specialize([{calls}], [{warps}], [{held}])")
        constants = [f"{block}: gl.constexpr" for block in blocks]
        head = f"def {self.name}({', '.join([*parameters.given(), *constants])}):"
        sizes = ", ".join(f'"{name}"' for name in parameters.extents.values())
        decorator = f"@gluon.jit(do_not_specialize=[{sizes}])" if sizes else "@gluon.jit"
        return [*wrap(decorator), *wrap(head), *(p for line in lines for p in wrap(f"    {line}"))]

    def _given(self, ring: warp.Ring) -> str:
        """The slots of tiles that a consumer gives: of operands of products, or of one number for each row."""
        axes = [self.parameters.blocks[self.kernel.whole(axis)] for axis in ring.tile.dims]
        dtype, shape = GLUON_DTYPES[ring.tile.dtype], ", ".join(axes)
        layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
        if len(axes) == 2:
            layout = f"gl.NVMMASharedLayout.get_default_for([{shape}], {dtype})"
        slots = f"[{ring.slots}, {shape}]"
        return f"{self.tiles[ring.name]} = gl.allocate_shared_memory({dtype}, {slots}, {layout})"

    def items(self) -> str:
        """How many items of work there are."""
        counts = []
        for axis in self.kernel.grid:
            extent, block = self.parameters.extents[self.tables.root[axis]], self.parameters.blocks.get(axis)
            counts.append(f"gl.cdiv({extent}, {block})" if block else extent)
        return " * ".join(counts) or "1"

    def grid(self, number: str) -> Iterator[str]:
        """The position of an item along every axis of the grid; the first axis varies fastest."""
        kernel, grid = self.kernel, self.kernel.grid
        if not grid:
            return
        yield f"pid = {number}"
        for place, axis in enumerate(grid):
            block = self.parameters.blocks.get(axis)
            last, backwards = place == len(grid) - 1, axis in kernel.backwards
            count = ""
            if not last or backwards:
                extent = self.parameters.extents[self.tables.root[axis]]
                count = f"gl.cdiv({extent}, {block})" if block else extent
            here = "pid" if last else f"pid % ({count})"
            if backwards:
                here = f"{count} - 1 - {here}"
            step = f" * {block}" if block else ""
            yield f"{self.starts[axis]} = ({here}){step}"
            if not last:
                yield f"pid = pid // ({count})"


class _RoleText:
    """The body of one role, a line or two for each statement."""

    def __init__(self, writer: _Writer, role: warp.Role) -> None:
        self.writer, self.kernel, self.role = writer, writer.kernel, role
        parameters = writer.parameters
        whole = frozenset(b.axis for b in self.kernel.blocks if b.kind == "whole")
        root = writer.tables.root
        extents = {b.axis: parameters.extents.get(root[b.axis], "") for b in self.kernel.blocks}
        divided = {self.kernel.rows} if self.kernel.row_parts > 1 else set[str]()
        if (columns := self.kernel.columns) is not None:
            divided.add(columns.part)
            extents[columns.part] = extents[columns.axis]
            whole |= {columns.part} if columns.axis in whole else set()
        extents |= parameters.extents
        copied = {descriptor.tensor for descriptor in parameters.descriptors.values()}
        scalars = {name: text for name, (text, _) in parameters.scalars.items()}
        places = Places(
            extents,
            scalars,
            parameters.blocks,
            parameters.pointers,
            {
                name: (*steps[:-1], "1") if name in copied else steps
                for name, steps in parameters.strides.items()
            },
            writer.starts,
            whole,
        )
        part = "PART" if role.part is not None else "0"
        self.columns = self._columns()
        self.expressions = Expressions(places, self.kernel.rows, self.columns, part, frozenset(divided))
        self.operands = self._operands()
        self.reads = self._count_reads()
        self.out: list[str] = []
        self.indent = 0
        self.local = writer.names

    def lines(self) -> list[str]:
        with self.local.scope():
            if self.role.part is not None:
                self._layouts()
            self._body(self.role.body)
        return self.out or ["pass"]

    def _write(self, line: str) -> None:
        self.out.append("    " * self.indent + line)

    # Layouts --------------------------------------------------------------------------------------------

    def _tile_axes(self) -> list[str]:
        """The axes that tiles have beside the rows."""
        rows = self.kernel.rows
        found: dict[str, None] = {}
        for stmt in nested(self.role.body):
            values = [stmt.value] if isinstance(stmt, ir.Let | warp.LoadShared | warp.MmaWait) else []
            for value in (*values, *operands(stmt)):
                found |= dict.fromkeys(axis for axis in value.dims if axis != rows)
        return list(found)

    def _columns(self) -> str:
        """The axis along which most is reduced: values of rows are laid out for it."""
        for stmt in nested(self.role.body):
            match stmt:
                case ir.Let(_, ir.ReduceTile(_, _, axis)):
                    return axis
        axes = self._tile_axes()
        return axes[0] if axes else self.kernel.rows

    def _layouts(self) -> None:
        for axis in sorted(self.expressions.divided):
            block = self.writer.parameters.blocks[self.kernel.whole(axis)]
            self._write(f"PART_{axis.upper()}: gl.constexpr = {block} // {self.kernel.parts_of(axis)}")
        for axis in self._tile_axes():
            size, most = self.expressions.size(axis), columns_of(self.kernel)
            self._write(f"COLUMNS_{axis.upper()}: gl.constexpr = {size} if {size} < {most} else {most}")
            self._write(
                f"TILE_{axis.upper()}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [{WARPS}, 1], "
                f"[16, COLUMNS_{axis.upper()}, {self._summed()}])"
            )
        self._write(f"ROWS: gl.constexpr = gl.SliceLayout(1, TILE_{self.columns.upper()})")
        if any(len(v.dims) == 2 and v.dims[0] != self.kernel.rows for v in defined(self.role.body)):
            # eight threads read 64 bytes of a row of half precision; sums of rows need no shared memory
            self._write(f"MEMORY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, {WARPS}], [1, 0])")

    def _summed(self) -> int:
        """Positions that one instruction sums: 32 bytes of an operand."""
        operands = [
            ring.tile.dtype
            for stmt in nested(self.role.body)
            if isinstance(stmt, warp.MmaAsync)
            for ring in (self.kernel.ring(stmt.right.ring),)
        ]
        return SUMMED_BYTES // min((BYTES[dtype] for dtype in operands), default=2)

    def _operands(self) -> dict[str, str]:
        """Values that are nothing but left operands of products, with the layout that those want."""
        wanted: dict[str, str] = {}
        other: set[str] = set()
        links: list[tuple[str, str]] = []
        for stmt in nested(self.role.body):
            match stmt:
                case warp.MmaAsync(pending, ir.Value() as left, right, _, accumulator):
                    wanted[left.name] = f"gl.DotOperandLayout(0, TILE_{pending.dims[1].upper()}, 2)"
                    other |= {v.name for v in (right.turn, accumulator) if v is not None}
                case warp.Column(_, _, place):
                    other.add(place.name)
                case ir.For(_, start, stop, carried, _):
                    links += [(c.value.name, v.name) for c in carried for v in (c.init, c.next)]
                    other |= {start.name, stop.name}
                case ir.If(condition, _, results):
                    links += [(r.value.name, v.name) for r in results for v in (r.then, r.otherwise)]
                    other.add(condition.name)
                case _:
                    other |= {value.name for value in operands(stmt)}
        changed = True
        while changed:
            changed = False
            for value, source in links:
                if value in wanted and value not in other and source not in wanted:
                    wanted[source] = wanted[value]
                    changed = True
                elsewhere = value not in wanted or value in other
                if elsewhere and source in wanted and source not in other:
                    other.add(source)
                    changed = True
        return {name: layout for name, layout in wanted.items() if name not in other}

    def _count_reads(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stmt in nested(self.role.body):
            for value in operands(stmt):
                found[value.name] = found.get(value.name, 0) + 1
        return found

    # Statements -----------------------------------------------------------------------------------------

    def _body(self, body: Iterable[warp.Stmt]) -> None:
        for stmt in body:
            self._statement(stmt, body)

    def _statement(self, stmt: warp.Stmt, body: Iterable[warp.Stmt]) -> None:
        text = self.expressions
        match stmt:
            case ir.Let():
                self._let(stmt, body)
            case ir.For():
                self._loop(stmt)
            case ir.PersistentLoop():
                self._items(stmt)
            case ir.If():
                self._when(stmt)
            case warp.At(axis, start):
                self._write(f"{self.writer.starts[axis]} = {text.code(start)}")
            case warp.AsyncCopy(ring, turn, index):
                self._fill(self.kernel.ring(ring), turn, index)
            case warp.Wait(ring, end, turn, before):
                barrier = (self.writer.full if end == "full" else self.writer.empty)[ring]
                slot, phase = self._slot(ring, turn), self._phase(ring, turn, before)
                self._write(f"mbarrier.wait({barrier}.index({slot}), {phase})")
            case warp.ReleaseSlot(ring, turn):
                self._write(f"mbarrier.arrive({self.writer.empty[ring]}.index({self._slot(ring, turn)}))")
            case warp.StoreShared(ring, turn, value):
                tile = f"{self.writer.tiles[ring]}.index({self._slot(ring, turn)})"
                self._write(f"{tile}.store({text.full(text.read(value), value.dims, value.dtype)})")
                self._write("fence_async_shared()")
                self._write(f"mbarrier.arrive({self.writer.full[ring]}.index({self._slot(ring, turn)}))")
            case warp.LoadShared(value, view):
                self._define(
                    value, Piece(Text(f"{self._view(view)}.load({text.layout(value.dims)})"), value.dims)
                )
            case warp.MmaAsync():
                self._issue(stmt)
            case warp.MmaWait(value, pending, behind):
                waited = f"warpgroup_mma_wait({behind}, deps=({text.code(pending)},))"
                self._define(value, Piece(Text(waited), value.dims))
            case warp.AnyNonFinite(value, view):
                self._define(value, Piece(call(text.use("not_finite"), self._view(view))))
            case warp.ZeroNonFinite(view):
                self._write(call(text.use("clear_not_finite"), self._view(view)).code)
            case warp.ConsumerBarrier(turn):
                self._write(f"mbarrier.arrive({self.writer.meeting})")
                self._write(f"mbarrier.wait({self.writer.meeting}, {text.read(turn).text.at(4)} & 1)")
            case warp.Column(value, tile, place):
                layout = self.operands.get(tile.name, text.layout(tile.dims))
                column = call(text.use("column"), text.code(tile), text.code(place), layout, "ROWS")
                self._define(value, Piece(column, value.dims))
            case warp.Put():
                self._put(stmt)
            case ir.Store(tensor, index, value, mask):
                dims = value.dims
                arguments = [text.pointer(tensor, index, dims).code, text.code(value)]
                if mask is not None:
                    arguments.append(f"mask={text.aligned(text.read(mask), dims).text.code}")
                self._write(f"gl.store({', '.join(arguments)})")

    def _define(self, value: ir.Value, piece: Piece) -> None:
        """A variable for a value."""
        name = self.local.local(value.name)
        code = piece.text.code
        if value.name in self.operands:
            code = f"gl.convert_layout({self.expressions.full(piece, value.dims, value.dtype)}, {self.operands[value.name]})"
            piece = Piece(Text(code), value.dims)
        self._write(f"{name} = {code}")
        self.expressions.pieces[value.name] = Piece(Text(name), piece.dims, piece.thin)

    def _let(self, let: ir.Let, body: Iterable[warp.Stmt]) -> None:
        parameters = self.writer.parameters
        known = {**parameters.known, **parameters.signs}.get(let.value.name)
        if known is not None:
            self.expressions.pieces[let.value.name] = Piece(Text(known))
            return
        piece = self.expressions.op(let.value, let.op)
        if self._keeps_text(let, piece, body):
            self.expressions.pieces[let.value.name] = piece
        else:
            self._define(let.value, piece)

    def _keeps_text(self, let: ir.Let, piece: Piece, body: Iterable[warp.Stmt]) -> bool:
        """Whether the expression itself stands for the value, without a variable."""
        match let.op:
            case (
                ir.Constant()
                | ir.Irrational()
                | ir.Argument()
                | ir.Extent()
                | ir.BlockSize()
                | ir.LaunchValue()
                | ir.Fill()
            ):
                return True
            case _ if let.value.name in self.operands:
                return False
            case ir.Positions():
                return self.reads.get(let.value.name) == 1
            case ir.Align():
                return True
            case ir.Start():
                return True
            case ir.Elementwise() | ir.Cast():
                once = self.reads.get(let.value.name) == 1 and self._read_by_let(let.value, body)
                return once and len(piece.text.code) <= _INLINE_COLUMNS
            case _:
                return False

    def _read_by_let(self, value: ir.Value, body: Iterable[warp.Stmt]) -> bool:
        """Whether an op of the same body reads a value, with nothing in between that waits."""
        seen = False
        for stmt in body:
            if isinstance(stmt, ir.Let) and stmt.value.name == value.name:
                seen = True
            elif seen:
                if any(v.name == value.name for v in operands(stmt)):
                    return isinstance(stmt, ir.Let) and not isinstance(stmt.op, ir.Align)
                if not isinstance(stmt, ir.Let):
                    return False
        return False

    def _loop(self, loop: ir.For[warp.Stmt]) -> None:
        text = self.expressions
        for item in loop.carried:
            self._assign_new(item.value, item.init)
        axis = loop.axis
        block = self.writer.parameters.blocks.get(axis, "1")
        start, stop = text.code(loop.start), text.code(loop.stop)
        outside = {turn: text.pieces[turn] for turn in self._kept_turns(loop)}
        for turn in outside:
            self._define_anew(turn)
        self._write(f"for {self.writer.starts[axis]} in range({start}, {stop}, {block}):")
        self.indent += 1
        with self.local.scope():
            self._body(loop.body)
            self._moves(loop.carried)
        self.indent -= 1
        text.pieces.update(outside)

    def _kept_turns(self, loop: ir.For[warp.Stmt]) -> list[str]:
        """The turns of the slots that products of a loop read and the loop does not change."""
        sides = [
            side
            for stmt in nested(loop.body)
            if isinstance(stmt, warp.MmaAsync)
            for side in (stmt.left, stmt.right)
            if isinstance(side, warp.View) and self.kernel.ring(side.ring).slots > 1
        ]
        own = {value.name for value in defined((loop,))}
        return [turn for turn in dict.fromkeys(side.turn.name for side in sides) if turn not in own]

    def _define_anew(self, turn: str) -> None:
        """A variable of a loop's own. Where two loops compute the same addresses before they begin, ptxas (12.8) lets the
        second one read registers that the first one sets after its test for no trip."""
        text = self.expressions
        name = self.local.fresh(f"{turn}_of_loop")
        self._write(f"{name} = {call(text.use('anew'), text.pieces[turn].text).code}")
        text.pieces[turn] = Piece(Text(name))

    def _moves(self, carried: Sequence[ir.Carried]) -> None:
        """What a loop carries to its next trip."""
        text, names = self.expressions, {item.value.name for item in carried}
        moves: list[tuple[str, str]] = []
        for item in carried:
            new = text.full(text.read(item.next), item.value.dims, item.value.dtype)
            if item.next.name in names and item.next != item.value:  # before it is replaced itself
                name = self.local.fresh(f"{text.code(item.value)}_next")
                self._write(f"{name} = {new}")
                new = name
            moves.append((text.code(item.value), new))
        for old, new in moves:
            if old != new:
                self._write(f"{old} = {new}")

    def _items(self, items: ir.PersistentLoop[warp.Stmt]) -> None:
        for item in items.carried:
            self._assign_new(item.value, item.init)
        new = self.local.fresh
        number, turn, rounds = new("number"), new("round_of_items"), new("rounds")
        items_, workers, more = new("items"), new("workers"), new("more")
        here, back = new("here"), new("back")
        self._write(f"{items_} = {self.writer.items()}")
        self._write(f"{workers} = gl.num_programs(0)")
        self._write(f"{here} = gl.program_id(0)")
        self._write(f"{back} = {workers} - 1 - {here}")
        self._write(f"{rounds} = {items_} // {workers}")
        self._write(f"{more} = tl.where({rounds} % 2 == 0, {here}, {back}) < {items_} % {workers}")
        self._write(f"for {turn} in range({rounds} + {more}.to(tl.int32)):")
        place = f"tl.where({turn} % 2 == 0, {here}, {back})"
        self.indent += 1
        with self.local.scope():
            self._write(f"{number} = {turn} * {workers} + {place}")
            for line in self.writer.grid(number):
                self._write(line)
            self._body(items.body)
            self._moves(items.carried)
        self.indent -= 1
        if any(isinstance(stmt, warp.Put) for stmt in items.body):
            self._write("tma.store_wait(0)")

    def _assign_new(self, value: ir.Value, source: ir.Value) -> None:
        name = self.local.local(value.name)
        piece = self.expressions.read(source)
        code = self.expressions.full(piece, value.dims, value.dtype)
        if value.name in self.operands and source.name not in self.operands:
            code = f"gl.convert_layout({code}, {self.operands[value.name]})"
        if not value.dims and not piece.dims and code.lstrip("-").isdigit():
            code = f"gl.to_tensor({code})"
        self._write(f"{name} = {code}")
        self.expressions.pieces[value.name] = Piece(Text(name), value.dims)

    def _when(self, when: ir.If[warp.Stmt]) -> None:
        text = self.expressions
        for result in when.results:
            self._assign_new(result.value, result.otherwise)
        self._write(f"if {text.code(when.condition)}:")
        self.indent += 1
        with self.local.scope():
            rare, text.rare = text.rare, text.rare or any(map(_is_rare, when.body))
            self._body(when.body)
            text.rare = rare
            for result in when.results:
                new = text.full(text.read(result.then), result.value.dims, result.value.dtype)
                self._write(f"{text.code(result.value)} = {new}")
        self.indent -= 1

    # Slots ----------------------------------------------------------------------------------------------

    def _slot(self, ring: str, turn: ir.Value) -> str:
        slots = self.kernel.ring(ring).slots
        return "0" if slots == 1 else f"{self.expressions.read(turn).text.at(4)} % {slots}"

    def _phase(self, ring: str, turn: ir.Value, before: bool) -> str:
        slots = self.kernel.ring(ring).slots
        turns = self.expressions.read(turn).text.at(4)
        phase = f"{turns} & 1" if slots == 1 else f"{turns} // {slots} & 1"
        return f"({phase}) ^ 1" if before else phase

    def _view(self, view: warp.View) -> str:
        ring = self.kernel.ring(view.ring)
        slot = self._slot(view.ring, view.turn)
        if ring.parts > 1:
            slot = "PART" if slot == "0" else f"{slot} * {ring.parts} + PART"
        shape = self.expressions.shape(ring.tile.dims)
        code = f"{self.writer.tiles[view.ring]}.index({slot}).reshape({shape})"
        own = tuple(map(self.kernel.whole, view.dims))
        for axis in view.dims:
            if axis not in ring.tile.dims:  # a consumer's part
                size, place = self.expressions.size(axis), ring.tile.dims.index(self.kernel.whole(axis))
                code = f"{code}.slice(PART * {size}, {size}, {place})"
        return code if own == ring.tile.dims else f"{code}.permute((1, 0))"

    def _coordinates(self, index: warp.Index, part: str) -> str:
        text, found = self.expressions, []
        for place in index:
            if isinstance(place, ir.Value):
                found.append(text.code(place))
                continue
            whole = place.axis in text.places.whole
            terms = [] if whole else [text.places.starts[place.axis]]
            if self.kernel.parts_of(place.axis) > 1 and part != "0":
                size = f"{self.writer.parameters.blocks[self.kernel.whole(place.axis)]} // {self.kernel.consumers}"
                terms.append(f"{part} * ({size})")
            if place.offset is not None:
                terms.append(text.code(place.offset))
            found.append(" + ".join(terms) or "0")
        return ", ".join(found)

    def _fill(self, ring: warp.Ring, turn: ir.Value, index: warp.Index) -> None:
        desc = self.writer.parameters.descriptors[ring.name].name
        slot = self._slot(ring.name, turn)
        full = f"{self.writer.full[ring.name]}.index({slot})"
        bytes_ = (
            f"{desc}.block_type.nbytes" if ring.parts == 1 else f"{ring.parts} * {desc}.block_type.nbytes"
        )
        self._write(f"mbarrier.expect({full}, {bytes_})")
        for part in range(ring.parts):
            place = (
                slot if ring.parts == 1 else str(part) if slot == "0" else f"{slot} * {ring.parts} + {part}"
            )
            tile = f"{self.writer.tiles[ring.name]}.index({place})"
            at = self._coordinates(index, str(part))
            self._write(f"copy_in({desc}, [{at}], {full}, {tile})")

    def _issue(self, stmt: warp.MmaAsync) -> None:
        text, dims = self.expressions, stmt.pending.dims
        layout = text.layout(dims)
        left = self._view(stmt.left) if isinstance(stmt.left, warp.View) else text.code(stmt.left)
        if isinstance(stmt.left, ir.Value) and stmt.left.name not in self.operands:
            left = f"gl.convert_layout({left}, gl.DotOperandLayout(0, {layout}, 2))"
        if stmt.accumulator is None:
            start = f"gl.zeros({text.shape(dims)}, gl.float32, {layout}), use_acc=False"
        else:
            start = text.full(text.read(stmt.accumulator), dims, stmt.accumulator.dtype)
        name = self.local.local(stmt.pending.name)
        self._write(f"{name} = warpgroup_mma({left}, {self._view(stmt.right)}, {start}, is_async=True)")
        text.pieces[stmt.pending.name] = Piece(Text(name), dims)

    def _put(self, stmt: warp.Put) -> None:
        text = self.expressions
        staging = next(s for s in self.kernel.staging if s.name == stmt.staging)
        desc = self.writer.parameters.descriptors[stmt.staging].name
        tile = f"{self.writer.staged[staging.name]}.index(PART)"
        value = text.full(text.read(stmt.value), stmt.value.dims, stmt.value.dtype)
        if self.kernel.persistent:  # the tile of the item before is on its way
            self._write("tma.store_wait(0)")
        self._write(f"{tile}.reshape({text.shape(stmt.value.dims)}).store({value})")
        self._write("fence_async_shared()")
        at = self._coordinates(stmt.index, "PART")
        self._write(f"copy_out({desc}, [{at}], {tile})")
        if not self.kernel.persistent:
            self._write("tma.store_wait(0)")


def columns_of(kernel: warp.RolesKernel) -> int:
    """Columns of an instruction of a product: its sums fit the registers that a thread has when a block starts."""
    return 128 if kernel.led else 256


def _is_rare(stmt: warp.Stmt) -> bool:
    """Whether a branch that has a statement is hardly ever taken."""
    return isinstance(stmt, warp.ConsumerBarrier) or (isinstance(stmt, ir.For) and stmt.rare)


def _is_tile(block: Block) -> bool:
    return block.kind in ("loop", "whole") or (block.kind == "grid" and block.size != 1)
