"""A kernel's stream as an aggregation of data engines: states are Arrow records, which other processes read, merge and end.

A record has one row (`schema`): the version of eqfuse, the hash of the program, digests of the values that every chunk has,
what a `StreamState` has, and of each tensor of the state its name, dtype, shape and bytes (little endian, in C order). States are
values and functions are pure, so that a task that failed may run again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib import import_module
from typing import Any

import numpy as np
import torch

from eqfuse.arguments import DTYPE_NAMES
from eqfuse.errors import EqfuseError, did_you_mean
from eqfuse.extend.define import SHIPPED_NAMES, admit, registered_in
from eqfuse.rules.scope import RuleScope
from eqfuse.stream.programs import Stream
from eqfuse.stream.streamer import Streamer, StreamState
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.folds import NOWHERE, fold_of, is_ranked
from eqfuse.terms.nodes import Axis, Const, Load, Program, Reduce, Size, free_axes, transform, walk
from eqfuse.terms.registry import REGISTERED, Reduction
from eqfuse.terms.types import program_dtypes, result_dtype
from eqfuse.threads import Lock

Record = Any
"""A pyarrow.RecordBatch of one row, or its bytes (an Arrow IPC stream)."""

Columns = str | Mapping[str, str] | None
"""The column of each tensor in a table, or one for all: of structs, with a field for each, or that of the only tensor."""

_lock = Lock()
_streamers: dict[tuple[str, str], Streamer] = {}
"""What this process has compiled, by what the kernel is compiled from and the hash of the program."""


def package(name: str) -> Any:
    """A module of an optional package. Raises EqfuseError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        message = f"{name.partition('.')[0]} cannot be imported: {error}"
        raise EqfuseError(message, hint="pip install 'eqfuse[data]'") from error


def schema() -> Any:
    """The schema of a record (pyarrow.Schema)."""
    pa = package("pyarrow")
    text, number = pa.string(), pa.int64()
    tensor = {"name": text, "dtype": text, "shape": pa.list_(number), "data": pa.large_binary()}
    fields = {"version": text, "program": text, "given": pa.map_(text, text), "axis": text}
    fields |= {"start": number, "stop": number, "total": number, "numpy": pa.bool_()}
    return pa.schema(fields | {"dtypes": pa.map_(text, text), "states": pa.list_(pa.struct(tensor))})


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The stream of a kernel (`k.aggregate`) for data engines. It may be pickled: each process compiles the program from its text
    once, with the rules and registered reductions that came with it.

    States are Arrow records of one row (pyarrow.RecordBatch); every method takes their bytes too (`to_bytes`). A state of
    another program, of other given values or of another version of eqfuse raises EqfuseError, which says of which.
    """

    content: str
    make: Callable[[str], Any] = field(repr=False)
    scope: RuleScope = field(repr=False)
    reductions: tuple[Reduction, ...] = field(repr=False)
    layout: Stream = field(repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.layout.finish and self.layout.combine):
            message = "a program of prefixes has values for each position, and no aggregate"
            raise EqfuseError(message, hint="step through its positions in order: k.step")

    @property
    def program(self) -> str:
        """The hash of the program: of its merge as text, and of the registered reductions that it uses."""
        layout = self.layout
        states = [(state.name, state.op, state.dims) for state in layout.states]
        texts = layout.axis, states, layout.update, layout.combine, layout.finish, layout.outputs
        return hashlib.sha256(repr((texts, self.reductions)).encode()).hexdigest()

    def given(self, **values: Any) -> Aggregate:
        """The same with tensors and scalars that every chunk has, by name: queries, weights, a scale. They travel with the
        aggregate, and a state tells whether it was made with them."""
        digests = {**self.digests, **{name: _digest(value) for name, value in values.items()}}
        return replace(self, values={**self.values, **values}, digests=digests)

    # -- states ------------------------------------------------------------------------------------

    def zero(self, start: int = 0, total: int | None = None) -> Record:
        """The state of no positions; the next one is `start`. `total` is the number of positions of the whole axis: `finish`
        refuses a state that has not seen as many. Programs that read positions need the start of every part, those that read
        the extent of the axis need the total."""
        return self.write(self._streamer.init(start, total))

    def reduce(self, state: Record, chunk: Any, columns: Columns = None) -> Record:
        """The state with a chunk of the streamed axis at its end. A chunk is a mapping of tensors by name, numpy or torch, as
        `k.update` takes them; or a table (Arrow, pandas, anything with Arrow's C interface) whose rows are the positions, with
        a column for each tensor that has the axis: of numbers, or of lists of equal length for its other axes. `columns` names
        the column of each tensor, by default its own name. Raises EqfuseError for what does not fit, and for missing values."""
        before = self.read(state)
        if not isinstance(chunk, Mapping):
            table = package("pyarrow").table(chunk)
            if not table.num_rows:
                return self.write(before)
            chunk = self._tensors(table, columns)
        place = next((v.device for v in chunk.values() if isinstance(v, torch.Tensor)), None)
        if place is not None and before.values is not None:
            before = replace(before, values={name: v.to(place) for name, v in before.values.items()})
        after = self._streamer.update(before, {**self.values, **chunk}, None)
        if after.stop > NOWHERE and any(is_ranked(each.op) for each in self.layout.states):
            raise EqfuseError(f"ranks tell {NOWHERE} positions apart, and the stream has {after.stop}")
        return self.write(after)

    def merge(self, *states: Record) -> Record:
        """The state of adjacent parts of the axis, in their order. Raises EqfuseError where the program reads positions
        and they are not adjacent."""
        parts = [self.read(state) for state in states]
        if len(totals := {part.total for part in parts}) != 1:
            raise EqfuseError(
                f"parts of one axis have the totals {totals}", hint="give all parts the same total"
            )
        return self.write(reduce(self._streamer.combine, parts))

    def finish(self, state: Record) -> Any:
        """The outputs of what the state has seen, as `k.finish` gives them: numpy arrays where numpy arrays or tables came in.
        Raises EqfuseError where nothing was seen, or another number of positions than the `total` of `zero`."""
        found = self.read(state)
        if found.total is not None and found.stop - found.start != found.total:
            message = f"the state has seen {found.stop - found.start} positions of {found.total}"
            raise EqfuseError(message, hint="a part is missing, or was merged twice")
        return self._streamer.finish(found, self.values)

    def write(self, state: StreamState) -> Record:
        """A state of the stream as a record."""
        arrays = {name: value.detach().cpu().numpy() for name, value in (state.values or {}).items()}
        states = [
            {"name": name, "dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes()}
            for name, array in arrays.items()
        ]
        row = {
            "version": package("eqfuse").__version__,
            "program": self.program,
            "given": dict(self.digests),
            **{name: getattr(state, name) for name in ("axis", "start", "stop", "total", "numpy")},
            "dtypes": {name: DTYPE_NAMES[dtype] for name, dtype in state.dtypes.items()},
            "states": None if state.values is None else states,
        }
        return package("pyarrow").RecordBatch.from_pylist([row], schema=schema())

    def to_bytes(self, state: Record) -> bytes:
        """A record as bytes, which every method takes: an Arrow IPC stream."""
        sink = package("pyarrow").BufferOutputStream()
        with package("pyarrow.ipc").new_stream(sink, state.schema) as writer:
            writer.write_batch(state)
        return bytes(sink.getvalue())

    def read(self, state: Record) -> StreamState:
        """The state of the stream that a record or its bytes stand for, which `k.update` and the like go on with.
        Raises EqfuseError for what is no record, or one of another program, version or given values."""
        pa, version = package("pyarrow"), package("eqfuse").__version__
        if isinstance(state, bytes | bytearray | memoryview):
            try:
                state = package("pyarrow.ipc").open_stream(state).read_all()
            except (pa.ArrowException, OSError) as error:
                raise EqfuseError(f"the bytes are no state: {error}", hint="begin with zero()") from error
        is_table = isinstance(state, pa.RecordBatch | pa.Table) and state.num_rows == 1
        row = state.to_pylist()[0] if is_table else {}
        if row.get("version", version) != version:
            message = f"the state was made by eqfuse {row['version']}, and this is eqfuse {version}"
            raise EqfuseError(message, hint="use one version for all parts, or make the state again")
        if not row or not state.schema.equals(schema()):
            raise EqfuseError(f"this {type(state).__name__} is no state", hint="begin with zero()")
        if row["program"] != self.program:
            message = f"the state is of program {row['program'][:12]}, and this is {self.program[:12]}"
            raise EqfuseError(message, hint="merge and finish states with the aggregate that has made them")
        for name, _ in sorted({*row["given"]} ^ {*self.digests.items()}):
            message = f"the state was made with another {name!r} than this aggregate is given"
            raise EqfuseError(message, hint=f"give all parts the same: k.aggregate.given({name}=...)")
        values = row["states"] and {
            each["name"]: torch.from_numpy(
                np.frombuffer(each["data"], each["dtype"]).reshape(each["shape"]).copy()
            )
            for each in row["states"]
        }
        dtypes = {name: TORCH_DTYPES[dtype] for name, dtype in row["dtypes"]}
        return StreamState(row["axis"], row["start"], row["stop"], values, row["numpy"], dtypes, row["total"])

    # -- engines -----------------------------------------------------------------------------------

    def dask(self, axis: int | None = None, like: Any = None) -> dict[str, Any]:
        """Keyword arguments of `dask.array.reduction`: `da.reduction(x, **k.aggregate.dask(), axis=0, dtype=x.dtype)`, for
        programs with one streamed tensor and one output, which has that tensor's other axes in their order. `axis` is the
        dimension that is reduced; with it, `da.reduction` needs none. `like` is the array, or one of its shape, chunks and
        dtype: it says where chunks start, which programs that read positions need, the number of positions, which is checked
        then, and the dtype. Raises EqfuseError for other programs (see `delayed`).
        """
        program, ((tensor, dim), *more) = self._streamer.program, self._streamed.items()
        axes = next(each for each in program.tensors if each.name == tensor).axes
        output, rest = program.outputs[0], {place: name for place, name in enumerate(axes) if place != dim}
        if more or len(program.outputs) != 1 or output.axes != tuple(rest.values()):
            message = "da.reduction takes a streamed tensor, and gives an output that has its other axes"
            raise EqfuseError(message, hint="use k.aggregate.delayed(chunks)")
        if axis is not None and axis % len(axes) != dim:
            raise EqfuseError(
                f"the program reduces dimension {dim} of {tensor!r}, not {axis}", hint=f"give axis={dim}"
            )
        is_whole = like is not None and all(n == 1 for place, n in enumerate(like.numblocks) if place != dim)
        apart = not _reads_along(program, tensor, rest)
        if not apart and not is_whole:
            message = f"the program reads along other axes of {tensor!r}, which may be in chunks too"
            raise EqfuseError(message, hint=f"chunk it in dimension {dim} alone, and say so: dask(like=x)")
        found: dict[str, Any] = {} if axis is None else {"axis": axis}
        if like is None:
            self._check_positions("give the array that is reduced: dask(like=x)")
        else:
            if np.isnan(like.shape[dim]):
                raise EqfuseError("sizes of chunks are not known", hint="x.compute_chunk_sizes() finds them")
            if self.layout.reads_positions:
                empty = np.empty((0,) * like.ndim, np.int64)
                blocks = partial(package("dask.array").map_blocks, _dask_starts, dim, chunks=like.chunks)
                found["weights"] = blocks(dtype=empty.dtype, meta=empty)
            arrays = {**self.values, tensor: np.empty(0, like.dtype)}
            known = {
                name: DTYPE_NAMES[torch.as_tensor(v).dtype]
                for name, v in arrays.items()
                if hasattr(v, "dtype")
            }
            name = output.dtype or result_dtype(output.expr, program_dtypes(program, known))
            found["dtype"] = torch.empty(0, dtype=TORCH_DTYPES[name]).numpy().dtype
        return found | {
            "chunk": partial(_dask_chunk, self, tensor, dim, None if like is None else like.shape, apart),
            "combine": partial(_dask_combine, self),
            "aggregate": partial(_dask_aggregate, self, dim),
            "concatenate": False,
        }

    def delayed(
        self,
        chunks: Iterable[Any],
        lengths: Sequence[int] | None = None,
        columns: Columns = None,
        split_every: int = 8,
    ) -> Any:
        """The outputs as a `dask.delayed` value: chunks as `reduce` takes them, or delayed ones, in the order of the axis,
        merged `split_every` at a time in that order. `lengths` are their numbers of positions, which are checked; programs that
        read positions need them. Raises EqfuseError for what does not fit."""
        delayed, parts = package("dask").delayed, list(chunks)
        if lengths is None:
            self._check_positions("say how many positions each chunk has: delayed(chunks, lengths=[...])")
        elif len(lengths) != len(parts):
            raise EqfuseError(
                f"there are {len(parts)} chunks and {len(lengths)} lengths", hint="give one for each"
            )
        if split_every < 2:
            raise EqfuseError(f"split_every is {split_every}", hint="merge 2 at a time, or more")
        total = None if lengths is None else int(sum(lengths))
        held = delayed(self, traverse=False)  # a value of its own, which travels once to each worker
        counts = [None] * len(parts) if lengths is None else list(map(int, lengths))
        states, start = [], 0
        for part, length in zip(parts, counts, strict=True):
            states.append(delayed(_part)(held, start, total, length, part, columns))
            start += length or 0
        while len(states) > 1:
            groups = (states[at : at + split_every] for at in range(0, len(states), split_every))
            states = [delayed(_dask_combine)(held, group) for group in groups]
        return delayed(_finished)(held, states[0] if states else self.zero(total=total))

    def ray(self, columns: Columns = None, total: int | None = None, name: str = "") -> Any:
        """A `ray.data.aggregate.AggregateFnV2`: `ds.aggregate(k.aggregate.ray(columns="x"))["y"]`, or after `groupby`. Blocks
        are tables as `reduce` takes them. The result is called `name`, by default after the outputs: an array, or where there are
        several outputs lists by their names. `total` is the number of rows (of a group), which is checked then.

        Raises EqfuseError for programs that read positions, or whose merge depends on the order of its parts: Ray keeps none.
        """
        of_bytes, outputs = self._in_any_order("Ray Data", columns, total), self.layout.outputs
        base, block_of = (
            package("ray.data.aggregate").AggregateFnV2,
            package("ray.data.block").BlockAccessor.for_block,
        )

        def finalize(_: Any, state: bytes) -> Any:
            made = of_bytes.finish(state)
            return made if len(outputs) == 1 else {n: v.tolist() for n, v in zip(outputs, made, strict=True)}

        methods = {
            "aggregate_block": lambda _, block: of_bytes.reduce(of_bytes.zero(), block_of(block).to_arrow()),
            "combine": lambda _, left, right: of_bytes.merge(left, right),
            "finalize": finalize,
        }
        names = (
            columns
            if isinstance(columns, str)
            else {(columns or {}).get(tensor, tensor) for tensor in self._streamed}
        )
        on = names if isinstance(names, str) else names.pop() if len(names) == 1 else None
        kind = type(base)("EqfuseAggregate", (base,), methods)
        return kind(name or ", ".join(outputs), of_bytes.zero, on=on, ignore_nulls=False)

    def spark(self, columns: Columns = None, total: int | None = None) -> InAnyOrder:
        """The functions of Spark's `Aggregator` on bytes: `zero()`, `reduce(state, chunk)` of a table or a mapping,
        `merge(a, b)`, `finish(state)`. Raises EqfuseError as `ray` does: Spark merges partitions in any order."""
        return self._in_any_order("Spark", columns, total)

    def _in_any_order(self, engine: str, columns: Columns, total: int | None) -> InAnyOrder:
        folds = [found[0] for state in self.layout.states if (found := fold_of(state.op)) is not None]
        if self.layout.reads_positions or not all(fold.commutative for fold in folds):
            why = "reads positions" if self.layout.reads_positions else "depends on the order of positions"
            hint = "have the position in a column, and reduce it with the values"
            raise EqfuseError(f"the program {why}, and {engine} merges parts in any order", hint=hint)
        return InAnyOrder(self, columns, self.to_bytes(self.zero(total=total)))

    def _check_positions(self, hint: str) -> None:
        if self.layout.reads_positions or self.layout.reads_total:
            raise EqfuseError(
                "the program reads positions, and a chunk does not say where it starts", hint=hint
            )

    # -- the program -------------------------------------------------------------------------------

    @property
    def _streamer(self) -> Streamer:
        key = self.content, self.program
        with _lock:
            if key not in _streamers:
                for reduction in self.reductions:
                    admit(reduction)
                with self.scope.entered():
                    _streamers[key] = replace(self.make(self.content).stream, stream=self.layout)
            return _streamers[key]

    @property
    def _streamed(self) -> dict[str, int]:
        """The tensors that have the streamed axis and are not given, and which dimension it is."""
        program = self._streamer.program
        return {
            node.tensor: dim
            for node in walk(*(output.expr for output in program.outputs))
            if isinstance(node, Load) and node.tensor not in self.values
            for dim, part in enumerate(node.index)
            if isinstance(part, Axis) and program.domains.get(part.name, part.name) == self.layout.axis
        }

    def _tensors(self, table: Any, columns: Columns) -> dict[str, np.ndarray[Any, Any]]:
        """The streamed tensors in a table of their rows."""
        streamed, pa = self._streamed, package("pyarrow")
        if isinstance(columns, str):
            if columns in table.column_names and pa.types.is_struct(table.schema.field(columns).type):
                table, columns = pa.Table.from_struct_array(table.column(columns)), None
            else:
                columns = dict.fromkeys(streamed, columns)
        found = {}
        for name, dim in streamed.items():
            column = (columns or {}).get(name, name)
            if column not in table.column_names:
                hint = did_you_mean(column, table.column_names) or f"it has {', '.join(table.column_names)}"
                raise EqfuseError(f"the table has no column {column!r} for tensor {name!r}", hint=hint)
            found[name] = np.moveaxis(_rows(column, table.column(column)), 0, dim)
        return found


@dataclass(frozen=True)
class InAnyOrder:
    """An aggregate on bytes, for engines that merge parts in any order."""

    aggregate: Aggregate
    columns: Columns
    nothing: bytes = field(repr=False)

    def zero(self) -> bytes:
        """The state of no rows."""
        return self.nothing

    def reduce(self, state: bytes, chunk: Any) -> bytes:
        """The state with the rows of a chunk: see `Aggregate.reduce`."""
        return self.aggregate.to_bytes(self.aggregate.reduce(state, chunk, self.columns))

    def merge(self, left: bytes, right: bytes) -> bytes:
        """The state of the rows of both."""
        return self.aggregate.to_bytes(self.aggregate.merge(left, right))

    def finish(self, state: bytes) -> Any:
        """The outputs: see `Aggregate.finish`."""
        return self.aggregate.finish(state)


def aggregate_of(
    content: str, make: Callable[[str], Any], scope: RuleScope, program: Program, stream: Stream
) -> Aggregate:
    """The aggregate of a kernel's stream: `make` gives the kernel of its content in any process. Raises EqfuseError."""
    used = registered_in(*(output.expr for output in program.outputs))
    reductions = tuple(dict.fromkeys((*used, *_named_in(program.source))))
    states = tuple(
        replace(state, body=Const(0)) for state in stream.states
    )  # what they fold stands in the texts
    return Aggregate(content, make, scope, reductions, replace(stream, states=states))


def _named_in(source: str) -> tuple[Reduction, ...]:
    """The registered reductions that a text may call, and those that they do, but the shipped ones."""
    found: dict[str, Reduction] = {}
    texts = [source]
    while texts:
        words = {*re.findall(r"[^\W\d]\w*", texts.pop())} - SHIPPED_NAMES - found.keys()
        new = {name: REGISTERED[name] for name in sorted(words & REGISTERED.keys())}
        texts += [text for reduction in new.values() for text in reduction.results]
        found |= new
    return tuple(found.values())


def _reads_along(program: Program, tensor: str, axes: Mapping[int, str | None]) -> bool:
    """Whether an output depends on where along these dimensions of a tensor it is, or on what is elsewhere there."""
    names, exprs = {*axes.values()}, [output.expr for output in program.outputs]
    for node in walk(*(transform(expr, lambda n: Const(0) if isinstance(n, Load) else n) for expr in exprs)):
        match node:
            case Axis(name) | Size(name) | Reduce(_, name, _) if program.domains.get(name, name) in names:
                return True
    for node in walk(*exprs):
        match node:
            case Load(name, index) if name == tensor:
                if any(index[place] is not Axis(axis) for place, axis in axes.items() if axis):
                    return True
            case Load(_, index) if any(free_axes(part) & names for part in index):
                return True
    return False


def _digest(value: Any) -> str:
    """Of a tensor its dtype, shape and bytes, of a number itself."""
    data = memoryview(b"")
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    head = f"{value.dtype}{tuple(value.shape)}" if hasattr(value, "dtype") and data.nbytes else repr(value)
    return hashlib.sha256(head.encode() + data).hexdigest()


def _rows(name: str, column: Any) -> np.ndarray[Any, Any]:
    """A column of numbers, or of lists of equal length, as an array with a row for each. Raises EqfuseError."""
    types, compute = package("pyarrow.types"), package("pyarrow.compute")
    array, shape = package("pyarrow").concat_arrays(column.chunks), [len(column)]
    while array.null_count == 0 and types.is_nested(array.type):
        lengths = compute.unique(compute.list_value_length(array)).to_pylist()
        if len(lengths) != 1:
            hint = "a tensor has rows of one length"
            raise EqfuseError(f"column {name!r} has lists of different lengths", hint=hint)
        shape.append(*lengths)
        array = array.flatten()
    if array.null_count:
        raise EqfuseError(f"column {name!r} has missing values", hint="fill them, or leave their rows out")
    if hasattr(array, "to_numpy_ndarray"):  # tensors
        return array.to_numpy_ndarray()  # type: ignore[no-any-return]
    return array.to_numpy(zero_copy_only=False).reshape(shape)  # type: ignore[no-any-return]


# -- tasks of Dask ---------------------------------------------------------------------------------


def _dask_starts(dim: int, block_info: Any = None) -> Any:
    """The position of a chunk's first element, in the shape of the chunk."""
    chunk = block_info[None]
    return np.broadcast_to(np.int64(chunk["array-location"][dim][0]), chunk["chunk-shape"])


def _dask_chunk(
    aggregate: Aggregate,
    tensor: str,
    dim: int,
    shape: tuple[int, ...] | None,
    apart: bool,
    x: Any,
    starts: Any = None,
    axis: Sequence[int] = (),
    keepdims: bool = True,
    computing_meta: bool = False,
) -> Any:
    if computing_meta:
        return x
    if tuple(axis) != (dim,):
        raise EqfuseError(
            f"the program reduces dimension {dim} of {tensor!r}, not {axis}", hint=f"give axis={dim}"
        )
    total = None if shape is None else shape[dim]
    if (
        not apart
        and shape is not None
        and {*enumerate(x.shape)} - {*enumerate(shape)} - {(dim, x.shape[dim])}
    ):
        message = f"a chunk of {tensor!r} has shape {x.shape}, and the program reads along all of {shape}"
        raise EqfuseError(message, hint=f"chunk it in dimension {dim} alone")
    if total and not x.shape[dim]:
        return aggregate.zero(total=total)
    start = 0 if starts is None or not x.size else int(starts.flat[0])
    return aggregate.reduce(aggregate.zero(start, total), {tensor: x})


def _dask_combine(
    aggregate: Aggregate, parts: Any, axis: Any = (), keepdims: bool = True, computing_meta: bool = False
) -> Any:
    return parts if computing_meta else aggregate.merge(*(parts if isinstance(parts, list) else [parts]))


def _dask_aggregate(
    aggregate: Aggregate,
    dim: int,
    parts: Any,
    axis: Any = (),
    keepdims: bool = False,
    dtype: Any = None,
    computing_meta: bool = False,
) -> Any:
    if computing_meta:
        return np.empty((0,) * (parts.ndim - (not keepdims)), dtype)
    made = np.asarray(aggregate.finish(_dask_combine(aggregate, parts))).astype(dtype, casting="same_kind")
    return np.expand_dims(made, dim) if keepdims else made


def _part(
    aggregate: Aggregate, start: int, total: int | None, length: int | None, chunk: Any, columns: Columns
) -> Record:
    made = aggregate.reduce(aggregate.zero(start, total), chunk, columns)
    count = made.column("stop")[0].as_py() - start
    if length is not None and count != length:
        raise EqfuseError(
            f"the chunk at position {start} has {count} positions, not {length}", hint="give its length"
        )
    return made


def _finished(aggregate: Aggregate, state: Record) -> Any:
    return aggregate.finish(state)
