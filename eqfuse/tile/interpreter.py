"""Runs a tile program literally, as a GPU would, in any scalar domain.

Blocks are padded: a ragged last block has its full size, its positions run past the end, masked loads
give `other`, and an unmasked load past the end of a tensor is an error. All program instances run at
once: a value is an array of shape (trials, instances, *dims) whose extents of 1 broadcast, and an
instance whose loop is over earlier than its neighbours' is inactive for the rest of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.terms import integers
from eqfuse.terms.domain import Domain, contract_masked, total
from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import COMPARISONS, DRAWN, LOGICAL
from eqfuse.terms.integers import is_exact
from eqfuse.terms.interpreter import Value as Dimensioned
from eqfuse.terms.interpreter import fold_states, merge_states, rank_states, scan_states
from eqfuse.terms.nodes import Fold, Program
from eqfuse.tile.check import TileError
from eqfuse.tile.dtypes import INTEGERS, NARROW
from eqfuse.tile.nodes import (
    Align,
    Argument,
    BlockSize,
    Bound,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Extent,
    Fill,
    FinitePart,
    FoldTile,
    For,
    If,
    Irrational,
    Kernel,
    Lanes,
    LaunchValue,
    Let,
    LoadTile,
    MergeTile,
    NonFiniteCorrection,
    Op,
    Positions,
    RankTile,
    ReduceTile,
    ScanTile,
    Search,
    Start,
    Stmt,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.storage import buffer_dtypes, launch_value, resolve_extents

Integers = npt.NDArray[Any]
"""Integers or truth values, with numpy's own arithmetic."""

_INTEGER_REDUCTIONS: Mapping[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def run(
    program: TileProgram,
    source: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    domain: Domain,
    *,
    shards: Mapping[str, int],
    batch: int | None = None,
) -> dict[str, Any]:
    """The outputs of `program`, computed in `domain` with padded blocks of the sizes that `Block` says.

    Integer tensors are numpy integers of the tensor's shape. Tensors of reals are the domain's arrays,
    with a leading dimension of `batch` independent trials unless `batch` is None; so are all outputs,
    integer ones included. A scalar is a number, or a domain array of shape () or (batch,). `extents`
    gives every axis that `program.domains` does not rename, `shards` every shard axis.
    Elements that nothing was stored to are NaN. Raises TileError where the program is wrong.
    """
    sizes = resolve_extents(program, extents, shards)
    memory = memory_of(program.buffers, buffer_dtypes(program), source, tensors, sizes, domain, batch)
    for kernel in program.kernels:
        Instances(kernel, memory, scalars, sizes, domain, batch or 1).run()
    return outputs_of(program.buffers, memory, domain, batch)


def memory_of(
    buffers: Iterable[Buffer],
    dtypes: Mapping[str, str],
    source: Program,
    tensors: Mapping[str, Any],
    sizes: Mapping[str, int],
    domain: Domain,
    batch: int | None,
) -> dict[str, Memory]:
    """What a program reads and writes: its inputs, and buffers of NaN."""
    memory = {
        tensor.name: Memory.of_input(tensor.name, tensors[tensor.name], tensor.rank, domain, batch)
        for tensor in source.tensors
        if tensor.name in tensors
    }
    for buffer in buffers:
        memory[buffer.name] = Memory.of_buffer(buffer, dtypes[buffer.name], sizes, domain, batch or 1)
    return memory


def outputs_of(
    buffers: Iterable[Buffer], memory: Mapping[str, Memory], domain: Domain, batch: int | None
) -> dict[str, Any]:
    """The outputs by name; without their dimension of trials where `batch` is None."""
    outputs = {}
    for buffer in buffers:
        if buffer.is_output:
            array = memory[buffer.name].array
            integer = memory[buffer.name].integer
            outputs[buffer.name] = (
                array if batch is not None else array[0] if integer else domain.take(array, (0,))
            )
    return outputs


def _tiled(active: npt.NDArray[np.bool_], rank: int) -> npt.NDArray[np.bool_]:
    """Instances (1, count), or (trials, count) where a loop's bounds are computed, as a mask of tiles of a rank."""
    return active.reshape(*active.shape, *(1,) * rank)


@lru_cache(maxsize=4096)
def _alignment(
    own: tuple[str, ...], dims: tuple[str, ...]
) -> tuple[tuple[int, ...] | None, tuple[int | None, ...]] | None:
    """How an array with dims of its own, after the two of instances, is brought to `dims`: the order of its dimensions (None: as they
    are) and for each of `dims` the dimension that has its extent, None where it has none; nothing where it would lose one."""
    if not set(own) <= set(dims):
        return None
    places = tuple(2 + own.index(dim) if dim in own else None for dim in dims)
    order = (0, 1, *(place for place in places if place is not None))
    return None if order == tuple(sorted(order)) else order, places


def accumulates(op: Op) -> bool:
    return isinstance(op, Dot) or (isinstance(op, Elementwise) and op.fn in ("add", "mul"))


@dataclass
class Memory:
    """A tensor of shape (trials or 1, *shape). `written` and `owner` are kept for buffers only."""

    name: str
    array: Any
    shape: tuple[int, ...]
    dtype: str | None = None
    written: npt.NDArray[np.bool_] | None = None

    @property
    def integer(self) -> bool:
        """Whether it holds exact integers or truth values, not a domain's numbers."""
        return is_exact(self.array)

    @classmethod
    def of_input(cls, name: str, tensor: Any, rank: int, domain: Domain, batch: int | None) -> Memory:
        if isinstance(tensor, np.ndarray) and tensor.dtype.kind in "iub":
            return cls(name, tensor[None], tensor.shape)
        shape = domain.shape(tensor)
        if batch is None:
            tensor, shape = domain.reshape(tensor, (1, *shape)), (1, *shape)
        if len(shape) != rank + 1:
            raise TileError(f"tensor {name!r} has shape {shape}; expected (trials, ...) of rank {rank + 1}")
        return cls(name, tensor, shape[1:])

    @classmethod
    def of_buffer(
        cls, buffer: Buffer, dtype: str, sizes: Mapping[str, int], domain: Domain, trials: int
    ) -> Memory:
        shape = tuple(sizes[axis] for axis in buffer.axes)
        full = (trials, *shape)
        array = np.zeros(full, dtype=np.int64) if dtype in INTEGERS else domain.full(full, math.nan)
        return cls(buffer.name, array, shape, dtype, np.zeros(full, dtype=np.bool_))


class Instanced(Protocol):
    """What the instances of a kernel are known by."""

    @property
    def name(self) -> str: ...
    @property
    def grid(self) -> tuple[str, ...]: ...
    @property
    def blocks(self) -> tuple[Block, ...]: ...
    @property
    def backwards(self) -> tuple[str, ...]: ...


class Instances:
    """All program instances of one kernel: of a tile program, of which `run` runs the body."""

    def __init__(
        self,
        kernel: Instanced,
        memory: Mapping[str, Memory],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int],
        domain: Domain,
        trials: int,
    ) -> None:
        self.kernel, self.memory, self.scalars, self.sizes, self.domain = (
            kernel,
            memory,
            scalars,
            sizes,
            domain,
        )
        self.trials = trials
        self.values: dict[str, Any] = {}
        self.folded: (
            tuple[FoldTile | ScanTile | RankTile | MergeTile, list[Any], tuple[Dimensioned, ...]] | None
        ) = None
        self.blocks = {block.axis: self._padded(block) for block in kernel.blocks}
        steps = {block.axis: block.step for block in kernel.blocks}
        counts = [-(-sizes[axis] // steps[axis]) for axis in kernel.grid]
        self.count = math.prod(counts)
        whole = np.zeros((1, 1), dtype=np.int64)
        self.starts: dict[str, Integers] = {b.axis: whole for b in kernel.blocks if b.kind == "whole"}
        rest = np.arange(self.count, dtype=np.int64)[None]
        for axis, count in zip(kernel.grid, counts, strict=True):
            if count:
                place = rest % count
                self.starts[axis] = (count - 1 - place if axis in kernel.backwards else place) * steps[axis]
                rest = rest // count
        self.owner: dict[str, npt.NDArray[np.int64]] = {}

    def _padded(self, block: Block) -> int:
        if block.kind == "whole":
            # A power of two above the extent, not at it: masks are needed at every size, and seen at every size.
            return 1 << self.sizes[block.axis].bit_length()
        return 1 if block.kind == "unit" or block.size is None else block.size

    def run(self) -> None:
        assert isinstance(self.kernel, Kernel)
        if self.count:
            with np.errstate(all="ignore"):
                self._body(self.kernel.body, np.ones((1, self.count), dtype=np.bool_))

    def _body(self, body: Sequence[Stmt], active: npt.NDArray[np.bool_]) -> None:
        for stmt in body:
            match stmt:
                case Let(value, op):
                    self.values[value.name] = self._evaluate(value, op, active)
                case For():
                    self._loop(stmt, active)
                case If():
                    self._if(stmt, active)
                case Store():
                    self._store(stmt, active)

    def _loop(self, loop: For[Stmt], active: npt.NDArray[np.bool_]) -> None:
        step = self.blocks[loop.axis]
        position, stop = self.values[loop.start.name], self.values[loop.stop.name]
        for carried in loop.carried:
            self.values[carried.value.name] = self._converted(carried.init, carried.value.dtype)
        while (running := active & (position < stop)).any():
            self.starts[loop.axis] = position
            self._body(loop.body, running)
            self._advance(loop, running, everywhere=bool(running.all()))
            position = position + step

    def _if(self, branch: If[Stmt], active: npt.NDArray[np.bool_]) -> None:
        taken = self.values[branch.condition.name]
        self._body(branch.body, active)
        for value, then, otherwise in ((r.value, r.then, r.otherwise) for r in branch.results):
            mask = _tiled(taken, len(value.dims))
            self.values[value.name] = self._chosen(mask, self.values[then.name], self.values[otherwise.name])

    def _advance(self, loop: For[Stmt], running: npt.NDArray[np.bool_], *, everywhere: bool) -> None:
        advanced = {}
        totals = {stmt.value.name for stmt in loop.body if isinstance(stmt, Let) and accumulates(stmt.op)}
        for carried in loop.carried:
            name, rank = carried.value.name, len(carried.value.dims)
            following = self._converted(carried.next, carried.value.dtype)
            if carried.next.name in totals and not is_exact(following):
                following = total(self.domain, following)
            if not everywhere:
                following = self._chosen(_tiled(running, rank), following, self.values[name])
            advanced[name] = following
        self.values |= advanced

    # Values

    def _evaluate(self, value: Value, op: Op, active: npt.NDArray[np.bool_]) -> Any:
        rank = len(value.dims)
        match op:
            case Elementwise(fn, args, division):
                if division != "any":
                    return self._divided(value, op)
                return self._elementwise(value, fn, args)
            case Constant(number) | Fill(number):
                return self._number(number, value.dtype, (1,) * (rank + 2))
            case Irrational(name):
                return self.domain.irrational(name, (self.trials, 1))
            case Argument(name):
                return self._argument(name, value)
            case Extent(axis):
                return self._integer(self.sizes[axis])
            case BlockSize(axis):
                return self._integer(self._block_size(axis))
            case LaunchValue(_, expr):
                return self._integer(launch_value(expr, self.sizes))
            case Start(axis):
                return self.starts[axis]
            case Positions(axis):
                return self._positions(axis, rank)
            case Lanes(axis):
                return self._lanes(axis).reshape(1, 1, -1)
            case Bound(axis, stop):
                return self._positions(axis, rank) < self._aligned(stop, value.dims)
            case Align(operand):
                return self._aligned(operand, value.dims)
            case Cast(operand, written):
                return self._converted(operand, value.dtype, written)
            case FinitePart(operand):
                return self._finite_part(self.values[operand.name])
            case LoadTile():
                return self._load(value, op, active)
            case Search():
                return self._search(value, op, active)
            case ReduceTile(reduction, operand, axis):
                return self._reduce(reduction, operand, axis)
            case FoldTile() | ScanTile() | RankTile() | MergeTile():
                return self._state(op)
            case Dot():
                return self._dot(value, op)
            case NonFiniteCorrection():
                return self._rest_of_product(value, op)

    def _number(self, number: float, dtype: str, shape: tuple[int, ...]) -> Any:
        if dtype in INTEGERS:
            return np.full(shape, number, dtype=np.bool_ if dtype == "bool" else np.int64)
        return self.domain.full(shape, float(number))

    def _integer(self, number: int) -> Integers:
        return np.full((1, 1), number, dtype=np.int64)

    def _argument(self, name: str, value: Value) -> Any:
        given = self.scalars[name]
        if isinstance(given, (bool, int, float, np.number, np.bool_)):
            return self._number(
                float(given) if value.dtype not in INTEGERS else int(given), value.dtype, (1, 1)
            )
        if value.dtype in INTEGERS:
            return np.asarray(given).reshape(-1, 1)
        return self.domain.reshape(given, (math.prod(self.domain.shape(given)), 1))

    def _positions(self, axis: str, rank: int) -> Integers:
        start = self.starts[axis]
        return start[..., None] + self._lanes(axis) if rank else start

    def _lanes(self, axis: str) -> Integers:
        return np.arange(self.blocks[axis], dtype=np.int64)

    def _block_size(self, axis: str) -> int:
        return self.blocks[axis]

    def _aligned(self, value: Value, dims: tuple[str, ...]) -> Any:
        """The value with its dims permuted to the order of `dims`, of extent 1 where it has none."""
        array = self.values[value.name]
        if value.dims == dims:
            return array
        found = _alignment(value.dims, dims)
        if found is None:
            missing = sorted(set(value.dims) - set(dims))
            raise TileError(f"{value.name} in {self.kernel.name} has dims {missing} that {dims} lack")
        order, places = found
        exact = is_exact(array)
        old = array.shape if exact else self.domain.shape(array)
        shape = (*old[:2], *(1 if place is None else old[place] for place in places))
        if order is not None:
            array = array.transpose(order) if exact else self.domain.transpose(array, order)
        return array.reshape(shape) if exact else self.domain.reshape(array, shape)

    def _converted(self, value: Value, dtype: str, written: bool = False) -> Any:
        """The value in another dtype; rounded where that is narrower, or where the program has the cast."""
        array = self.values[value.name]
        if dtype == value.dtype and not written:
            return array
        if dtype in INTEGERS:
            if value.dtype not in INTEGERS:
                raise TileError(f"{value.name} in {self.kernel.name} is real and cannot become {dtype}")
            if not is_exact(array):  # what a field makes of rounded numbers
                return array
            return array.astype(np.bool_ if dtype == "bool" else np.int64)
        real = self._real(array)
        if written:
            return self.domain.call(dtype, [real])
        narrower = dtype in NARROW or (dtype == "f32" and value.dtype == "f64")
        return self.domain.rounded(dtype, real) if narrower else real

    def _real(self, array: Any) -> Any:
        return self.domain.lift(array) if is_exact(array) else array

    def _chosen(self, condition: npt.NDArray[np.bool_], left: Any, right: Any) -> Any:
        if is_exact(left) and is_exact(right):
            return np.where(condition, left, right)
        return self.domain.where(condition, self._real(left), self._real(right))

    def _elementwise(self, value: Value, fn: str, args: Sequence[Value]) -> Any:
        arrays = [self._aligned(arg, value.dims) for arg in args]
        if fn == "where":
            return self._chosen(arrays[0], arrays[1], arrays[2])
        among_integers = all(map(is_exact, arrays))
        if among_integers and (fn in LOGICAL or fn in COMPARISONS or value.dtype in INTEGERS):
            return integers.call(fn, tuple(arrays))
        if fn in DRAWN and among_integers:
            return self.domain.drawn(fn, np.broadcast_arrays(*arrays))
        reals = list(map(self._real, arrays))
        if fn in COMPARISONS:
            return self.domain.compare(fn, *reals)
        return self.domain.call(fn, reals)

    def _divided(self, value: Value, op: Elementwise) -> Any:
        """A division as a machine does it, of what is said to be not below 0, and by what is said to be above it."""
        left, right = (self._aligned(arg, value.dims) for arg in op.args)
        if not is_exact(left) or not is_exact(right):
            return self.domain.call(op.fn, [self._real(left), self._real(right)])
        if (right <= 0).any():
            raise TileError(f"{value.name} in {self.kernel.name} divides by what is not above 0")
        if op.division == "positive":
            return integers.call(op.fn, (left, right))
        quotient = np.sign(left) * (np.abs(left) // right)
        return quotient if op.fn == "floordiv" else left - quotient * right

    def _reduce(self, op: str, value: Value, axis: str) -> Any:
        array = self.values[value.name]
        place = 2 + value.dims.index(axis)
        integer = is_exact(array)
        shape = list(array.shape if integer else self.domain.shape(array))
        shape[place] = self.blocks[axis]
        if integer:
            return _INTEGER_REDUCTIONS[op](np.broadcast_to(array, shape).astype(np.int64), axis=place)
        return self.domain.reduce(op, self.domain.broadcast(array, tuple(shape)), place)

    def _state(self, op: FoldTile | ScanTile | RankTile | MergeTile) -> Any:
        """A state variable of a fold; those of one fold, which follow one another, are made together."""
        if isinstance(op, ScanTile):
            fold, place = op.fold, op.place
        else:
            found = fold_of(op.op)
            assert found is not None  # checked
            fold, place = found
        tiles = (*op.left, *op.right) if isinstance(op, MergeTile) else op.values
        key = replace(op, place=0) if isinstance(op, ScanTile) else replace(op, op=fold.name)
        arrays = [self.values[tile.name] for tile in tiles]
        known, sources, states = self.folded or (None, [], ())
        if key != known or any(a is not b for a, b in zip(arrays, sources, strict=True)):
            states = self._states(fold, op)
            self.folded = key, arrays, states
        return states[place].data

    def _states(self, fold: Fold, op: FoldTile | ScanTile | RankTile | MergeTile) -> tuple[Dimensioned, ...]:
        match op:
            case FoldTile(_, sources, axis):
                return fold_states(fold, self._parts(sources, axis), axis, self.domain)
            case ScanTile(_, _, sources, axis):
                return scan_states(fold, self._parts(sources, axis), axis, self.domain)
            case RankTile(_, sources, axis, ranks):
                count = self.blocks[ranks]
                return rank_states(fold, self._parts(sources, axis), axis, ranks, count, self.domain)
            case MergeTile(_, left, right, ranks):
                sides = self._parts(left, ranks), self._parts(right, ranks)
                return merge_states(fold, *sides, ranks, self.domain)

    def _parts(self, sources: tuple[Value, ...], axis: str) -> list[Dimensioned]:
        """The tiles of all state variables of a fold, whole along an axis."""
        arrays = [self.values[source.name] for source in sources]
        shapes = [a.shape if is_exact(a) else self.domain.shape(a) for a in arrays]
        shape = list(np.broadcast_shapes(*shapes))
        shape[2 + sources[0].dims.index(axis)] = self.blocks[axis]
        dims = ("%trial", "%instance", *sources[0].dims)
        return [
            Dimensioned(
                dims,
                np.broadcast_to(array, shape)
                if is_exact(array)
                else self.domain.broadcast(array, tuple(shape)),
            )
            for array in arrays
        ]

    def _dot(self, value: Value, op: Dot) -> Any:
        left, right = self._factors(value, op)
        if op.precision == "bf16x3":
            total = self._of_halves(left, right, len(value.dims) + 2)
        else:
            masks = self._masks(value, op)
            total = contract_masked(self.domain, left, right, *masks, len(value.dims) + 2)
        if op.accumulator is None:
            return total
        return self.domain.call("add", [self._aligned(op.accumulator, value.dims), total])

    def _factors(self, value: Value, op: Dot | NonFiniteCorrection) -> tuple[Any, Any]:
        """The operands of a product, with the dims of the result and the axis that is summed over, whole along it."""
        dims = (*value.dims, op.axis)
        left, right = (self._real(self._aligned(v, dims)) for v in (op.left, op.right))
        return self._spread(left, self.blocks[op.axis]), self._spread(right, self.blocks[op.axis])

    def _masks(self, value: Value, op: Dot | NonFiniteCorrection) -> tuple[Any, Any]:
        dims = (*value.dims, op.axis)
        left, right = (
            None if mask is None else self._aligned(mask, dims) for mask in (op.left_mask, op.right_mask)
        )
        return left, right

    def _of_halves(self, left: Any, right: Any, axis: int) -> Any:
        """The sum of the products over an axis, of numbers as sums of two bf16, without the products of the lesser
        ones. In a domain that does not round, the number itself is the greater one."""
        high, other = (self.domain.rounded("bf16", side) for side in (left, right))
        if high is left and other is right:
            return self.domain.contract(left, right, axis)
        low, rest = (
            self.domain.rounded("bf16", self.domain.call("sub", [side, part]))
            for side, part in ((left, high), (right, other))
        )
        lesser = [self.domain.contract(a, b, axis) for a, b in ((low, other), (high, rest))]
        return self.domain.call(
            "add", [self.domain.call("add", lesser), self.domain.contract(high, other, axis)]
        )

    def _is_finite(self, array: Any) -> Any:
        """Which elements are neither an infinity nor NaN: those that are 0 less themselves."""
        zero = self.domain.full((1,) * len(self.domain.shape(array)), 0.0)
        return self.domain.compare("eq", self.domain.call("sub", [array, array]), zero)

    def _finite_part(self, array: Any) -> Any:
        if self.domain.is_finite(array):
            return array
        zero, one, negative = (
            self.domain.full((1,) * len(self.domain.shape(array)), number) for number in (0.0, 1.0, -1.0)
        )
        is_below, is_above = (self.domain.compare(fn, array, zero) for fn in ("lt", "gt"))
        sign = self.domain.where(is_above, one, self.domain.where(is_below, negative, zero))
        return self.domain.where(self._is_finite(array), array, sign)

    def _rest_of_product(self, value: Value, op: NonFiniteCorrection) -> Any:
        total = self._aligned(op.total, value.dims)
        left, right = self._factors(value, op)
        if self.domain.is_finite(left) and self.domain.is_finite(right):
            return total
        left_mask, right_mask = self._masks(value, op)
        axis = len(value.dims) + 2
        zero = self.domain.full((1,) * (axis + 1), 0.0)
        one = left if right_mask is None else self.domain.where(right_mask, left, zero)
        other = right if left_mask is None else self.domain.where(left_mask, right, zero)
        finite = self._is_finite(one) & self._is_finite(other)
        products = self.domain.where(finite, zero, self.domain.call("mul", [one, other]))
        return self.domain.call("add", [total, self.domain.reduce("sum", products, axis)])

    def _spread(self, array: Any, count: int) -> Any:
        """The array with so many positions of its last dim."""
        return self.domain.broadcast(array, (*self.domain.shape(array)[:-1], count))

    # Memory

    def _guarded(
        self,
        what: str,
        tensor: Memory,
        index: Sequence[Integers],
        required: npt.NDArray[np.bool_],
    ) -> list[Integers]:
        """The index with every unrequired element made harmless; TileError where a required one is outside."""
        if len(index) != len(tensor.shape):
            raise TileError(f"{what} has {len(index)} index expressions for {len(tensor.shape)} dimensions")
        safe = []
        for place, (positions, extent) in enumerate(zip(index, tensor.shape, strict=True)):
            outside = (positions < 0) | (positions >= extent)
            wrong = required & outside
            if wrong.any() and self.domain.orders:
                example = np.broadcast_to(positions, wrong.shape)[wrong][0]
                raise TileError(
                    f"{what} is out of range in dimension {place}: position {example} of {extent} is not masked"
                )
            safe.append(np.where(outside, 0, positions))
        return safe

    def _load(self, value: Value, op: LoadTile, active: npt.NDArray[np.bool_]) -> Any:
        tensor = self.memory[op.tensor]
        rank = len(value.dims)
        index = [self._aligned(v, value.dims) for v in op.index]
        required = _tiled(active, rank)
        mask = None
        if op.mask is not None:
            mask = self._aligned(op.mask, value.dims)
            required = required & mask
        what = f"load {value.name} = {op.tensor}[{', '.join(v.name for v in op.index)}] in {self.kernel.name}"
        safe = self._guarded(what, tensor, index, required)
        other = self._number(op.other, value.dtype, (1,) * (rank + 2))
        if math.prod(tensor.shape) == 0:
            return other
        where: tuple[Any, ...]
        if not safe:
            where = (slice(None), *(None,) * (rank + 1))
        elif all(positions.shape[0] == 1 for positions in safe):
            where = (slice(None), *(positions[0] for positions in safe))
        else:
            trials = np.arange(
                tensor.written.shape[0] if tensor.written is not None else self._trials(tensor)
            )
            where = (trials.reshape(-1, *(1,) * (rank + 1)), *safe)
        if tensor.integer:
            if tensor.written is not None and (required & ~tensor.written[where]).any():
                raise TileError(f"{what} reads integers that nothing stored")
            found = tensor.array[where]
            return found if mask is None else np.where(mask, found, other)
        found = self.domain.take(tensor.array, where)
        return found if mask is None else self._chosen(mask, found, other)

    def _search(self, value: Value, op: Search, active: npt.NDArray[np.bool_]) -> Integers:
        tensor, stop = self.memory[op.tensor], self.values[op.stop.name]
        longest = tensor.shape[op.place]
        what = f"search {value.name} of {op.tensor} in {self.kernel.name}"
        wrong = active & (stop > longest)
        if wrong.any():
            raise TileError(f"{what} reads {stop.max()} of {longest} elements")
        fixed = [self.values[at.name][..., None] for at in op.index]
        at = [*fixed[: op.place], np.arange(longest).reshape(1, 1, -1), *fixed[op.place :]]
        safe = self._guarded(what, tensor, at, _tiled(active, 1))
        found = tensor.array[(0, *safe)]
        target = self.values[op.target.name][..., None]
        below = (found <= target if op.right else found < target) & (np.arange(longest) < stop[..., None])
        return np.asarray(below.sum(-1), dtype=np.int64)

    def _trials(self, tensor: Memory) -> int:
        return int(tensor.array.shape[0] if tensor.integer else self.domain.shape(tensor.array)[0])

    def _store(self, stmt: Store, active: npt.NDArray[np.bool_]) -> None:
        tensor, value = self.memory[stmt.tensor], stmt.value
        what = f"store {stmt.tensor}[{', '.join(v.name for v in stmt.index)}] in {self.kernel.name}"
        if tensor.written is None:
            raise TileError(f"{what} writes to an input")
        index = [self._aligned(v, value.dims) for v in stmt.index]
        mask = None if stmt.mask is None else self._aligned(stmt.mask, value.dims)
        self._write(what, tensor, value, index, mask, active)

    def _write(
        self,
        what: str,
        tensor: Memory,
        value: Value,
        index: Sequence[Integers],
        mask: npt.NDArray[np.bool_] | None,
        active: npt.NDArray[np.bool_],
    ) -> None:
        """Stores a tile where the mask is true."""
        assert tensor.written is not None
        array = self._converted(value, tensor.dtype) if tensor.dtype else self.values[value.name]
        shape = (self._trials(tensor), self.count, *(self.blocks[d] for d in value.dims))
        selected = np.broadcast_to(_tiled(active, len(value.dims)), shape)
        if mask is not None:
            selected = selected & mask
        safe = self._guarded(what, tensor, index, selected)
        chosen = np.nonzero(selected)
        target = (chosen[0], *(np.broadcast_to(positions, shape)[chosen] for positions in safe))
        self._claim(what, tensor, target, chosen[1])
        tensor.written[target] = True
        if tensor.integer and not is_exact(array):  # rounded numbers in a field
            tensor.array = self.domain.lift(tensor.array)
        if tensor.integer:
            tensor.array[target] = np.broadcast_to(array, shape)[chosen]
        else:
            stored = self.domain.broadcast(self._real(array), shape)
            self.domain.put(tensor.array, target, self.domain.take(stored, chosen))

    def _claim(self, what: str, tensor: Memory, target: Any, instance: Integers) -> None:
        """TileError where two program instances store to one element: the order would decide."""
        assert tensor.written is not None
        owner = self.owner.setdefault(tensor.name, np.full(tensor.written.shape, -1, dtype=np.int64))
        before = owner[target]
        owner[target] = instance
        if ((before >= 0) & (before != instance)).any() or (owner[target] != instance).any():
            raise TileError(f"{what} writes one element from two program instances")
