"""The meaning of expressions: evaluation in any domain, with named dimensions.

Every value is a pair of dims (axis names) and an array with one dimension for each. Reals are arrays
of the domain; integers and truth values are numpy arrays, so a domain's own arrays must not be numpy
arrays of integers. The dimension `TRIAL`, first where present, holds independent trials.

A read outside its tensor gives 0: `where(i > 0, x[i - 1], 0)` may evaluate `x[-1]`, and drops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eqfuse.errors import BindError
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms import integers
from eqfuse.terms.arguments import detached
from eqfuse.terms.bounds import check_selections, guarded_reads, outside_error
from eqfuse.terms.domain import BRANCHING, JOINING, Domain, contract_masked
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import contributions, fold_of, rank_axes, ranks_of, sides, unpacked
from eqfuse.terms.functions import COMPARISONS, DRAWN
from eqfuse.terms.masks import masked
from eqfuse.terms.nodes import (
    COMBINE,
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    Scan,
    Size,
    children,
    free_axes,
    once,
    walk,
)
from eqfuse.terms.promises import check_ascending
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import KINDS, check_dtypes, output_dtypes, result_dtype, state_dtypes
from eqfuse.threads import undisturbed

TRIAL = "%trial"
"""Name of the dimension of independent trials; no axis can have it."""

MAX_ELEMENTS = 1 << 25
"""A reduction whose body has more elements than this is folded piece by piece."""


class Value(NamedTuple):
    """An array and the axis of each of its dimensions."""

    dims: tuple[str, ...]
    data: Any


@dataclass(frozen=True)
class Env:
    """What expressions are evaluated in.

    `positions` restricts axes to some of their positions, in order; other axes are whole. A `Reduce`
    folds over the positions that its axis has here. Real tensors, and no others, have `batch` trials
    as their first dimension where it is not None; real scalars of shape (batch,) likewise.
    """

    domain: Domain
    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]
    extents: Mapping[str, int]
    positions: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    locals: Mapping[str, tuple[tuple[str, ...], Any]] = field(default_factory=dict)
    batch: int | None = None

    def at(self, axis: str) -> npt.NDArray[np.int64]:
        """The positions of an axis."""
        found = self.positions.get(axis)
        return np.arange(self.extents[axis]) if found is None else np.atleast_1d(found)

    def length(self, dim: str) -> int:
        """Number of positions of an axis, or of trials."""
        if dim == TRIAL:
            return self.batch or 1
        found = self.positions.get(dim)
        return self.extents[dim] if found is None else np.size(found)


def evaluate_expr(expr: Expr, env: Env) -> Value:
    """The value of one expression; its dims are those axes that it depends on, in no particular order."""
    return evaluate_all([expr], env)[0]


def evaluate_all(exprs: Sequence[Expr], env: Env) -> list[Value]:
    """The values of several expressions, what they share computed once."""
    run = _Run(env, _shared(*exprs))
    return [run.value(expr) for expr in exprs]


@lru_cache(maxsize=1024)
def _shared(*exprs: Expr) -> frozenset[Expr]:
    """What several expressions of these read."""
    parents = Counter(child for node in walk(*exprs) for child in children(node))
    return frozenset(node for node, count in parents.items() if count > 1)


def expand(value: Value, dims: Sequence[str], env: Env) -> Any:
    """The array of `value` with exactly these dims, repeated along those that it lacks."""
    shape = tuple(env.length(dim) for dim in dims)
    return _broadcast(env.domain, aligned(value, dims, env.domain), shape)


def evaluate(
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    domain: Domain,
    *,
    batch: int | None = None,
) -> dict[str, Any]:
    """The outputs of the program as written, by name.

    Real tensors are arrays of the domain, integer tensors numpy arrays, scalars numbers or arrays of
    the domain. With `batch`, real tensors have a leading dimension of that many trials, and so has
    every output. Temporaries take their full size.
    """
    return evaluate_together([program], tensors, scalars, extents, domain, batch=batch)[0]


def evaluate_together(
    programs: Sequence[Program],
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    domain: Domain,
    *,
    batch: int | None = None,
) -> list[dict[str, Any]]:
    """As `evaluate`, for several forms of one program: what they share is computed once."""
    env = Env(domain, tensors, typed_scalars(programs[0], scalars), extents, batch=batch)
    if any(program.in_order for program in programs):
        return [_evaluated_in_order(program, env) for program in programs]
    exprs = [expr for program in programs for expr in _masked_outputs(program)]
    values = iter(evaluate_all(exprs, env))
    trials = () if batch is None else (TRIAL,)
    return [
        {output.name: expand(next(values), (*trials, *output.axes), env) for output in program.outputs}
        for program in programs
    ]


def _evaluated_in_order(program: Program, env: Env) -> dict[str, Any]:
    """The outputs of a program with states, which are computed position by position."""
    trials = () if env.batch is None else (TRIAL,)
    exprs = dict(zip((output.name for output in program.outputs), _masked_outputs(program), strict=True))
    axes = {output.name: (*trials, *output.axes) for output in program.outputs}
    found = states(program, env, 0.0)
    now = replace(env, tensors={**env.tensors, **found})
    for each in program.in_order:
        positions = range(env.extents[each.axis])
        for at in reversed(positions) if each.backwards else positions:
            step = replace(now, positions={each.axis: np.array([at])})
            values = evaluate_all([exprs[name] for name in each.states], step)
            for name, value in zip(each.states, values, strict=True):
                data = expand(value, axes[name], step)
                place = tuple(np.array([at]) if dim == each.axis else slice(None) for dim in axes[name])
                if integers.is_exact(found[name]):
                    found[name][place] = data
                else:
                    env.domain.put(
                        found[name], place, env.domain.lift(data) if integers.is_exact(data) else data
                    )
    rest = [name for name in axes if name not in found]
    values = evaluate_all([exprs[name] for name in rest], now)
    found |= {name: expand(value, axes[name], now) for name, value in zip(rest, values, strict=True)}
    return {output.name: found[output.name] for output in program.returned}


def states(program: Program, env: Env, fill: float) -> dict[str, Any]:
    """Arrays for the states of recurrences in order: `fill` in those of reals, 0 in those of integers."""
    exact = {name: integers.dtype_of(data) for name, data in env.tensors.items() if integers.is_exact(data)}
    dtypes = state_dtypes(program, {**exact, **dict.fromkeys(program.integers, "i64")})
    trials = () if env.batch is None else (env.batch,)
    shapes = {o.name: (*trials, *(env.extents[axis] for axis in o.axes)) for o in program.outputs}
    return {
        name: np.zeros(shapes[name], np.int64) if dtype in KINDS else env.domain.full(shapes[name], fill)
        for name, dtype in dtypes.items()
    }


@once
def _masked_outputs(program: Program) -> tuple[Expr, ...]:
    """What is evaluated for each output: without what masks exclude."""
    mask = masked(program)
    return tuple(mask(output.expr) for output in program.outputs)


def typed_scalars(program: Program, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars as the program types them: integers where it needs integers, else floats; arrays as they are."""
    typed = dict(scalars)
    for name, value in scalars.items():
        if name in program.integers:
            typed[name] = int(value)
        elif isinstance(value, Real):
            typed[name] = float(value)
    return typed


def reference(
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """The outputs of the unfused program in float64: a numpy array, or a tuple of them in program order.

    Takes numpy arrays or torch tensors, and numbers. Integer and truth-valued results are exact; one that is i32 in a
    kernel has the lowest 32 bits, as there.
    Raises BindError where the inputs do not fit the program, ask for a derivative or hold a position that is outside of
    what it is read from, TypeCheckError where their types do not fit.
    """
    domain = FloatDomain("float64")
    with undisturbed():
        arrays = {name: _as_array(name, value) for name, value in tensors.items()}
        numbers = {name: _as_number(name, value) for name, value in (scalars or {}).items()}
        extents = bind(program, {name: array.shape for name, array in arrays.items()}, sizes, numbers)
        check_selections(program, extents, numbers)
        dtypes = check_dtypes(program, _dtypes(program, arrays))
        check_ascending(program, arrays)
        check_gathers(program, Env(domain, arrays, typed_scalars(program, numbers), extents))
        results = evaluate(program, arrays, numbers, extents, domain)
        made = output_dtypes(program, dtypes)
        outputs = tuple(
            integers.stored(np.array(results[each.name]), made[each.name]) for each in program.returned
        )
        return outputs[0] if len(outputs) == 1 else outputs


def check_gathers(program: Program, env: Env) -> None:
    """Raises BindError where a position in data, or one that a reduction finds, is outside of what it is read from and no
    condition guards it, as a kernel does."""
    for load, guards in guarded_reads(_masked_outputs(program)):
        if load.tensor in program.states:
            continue  # a recurrence reads 0 outside of its state
        for part, size in zip(load.index, np.shape(env.tensors[load.tensor]), strict=True):
            if not any(isinstance(node, Load | Reduce) for node in walk(part)):
                continue  # that sizes decide
            index = evaluate_expr(part, env)
            beyond = (index.data < 0) | (index.data >= size)
            if not np.any(beyond):
                continue
            conditions = [(evaluate_expr(guard.condition, env), guard.holds) for guard in guards]
            dims = _union([index, *(value for value, _ in conditions)])
            wrong = aligned(Value(index.dims, beyond), dims, env.domain)
            for value, holds in conditions:
                wrong = wrong & (aligned(value, dims, env.domain) == holds)
            if wrong.any():
                at = np.broadcast_to(aligned(index, dims, env.domain), wrong.shape)
                raise outside_error(load.tensor, int(at[wrong][0]), size)


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises BindError for a sparse or nested tensor."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise BindError(f"{name!r} is a {kind} tensor", hint=f"pass a dense one: {name}.to_dense()")


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        check_dense(name, value)
        if value.is_meta:
            raise BindError(
                f"{name!r} is on device 'meta': it has no values", hint="pass a tensor with values"
            )
        tensor = detached(name, value).cpu()
        value = (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        message = f"{name!r} has elements of type {array.dtype}, not numbers"
        raise BindError(message, hint="pass a tensor of floats, integers or truth values")
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _as_number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = detached(name, value)
    if isinstance(value, np.ndarray | np.generic | torch.Tensor) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, int | float):
        raise BindError(f"scalar {name!r} is {type(value).__name__}, not a number", hint=f"pass {name}=1.0")
    return value


def _dtypes(program: Program, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    """dtypes as far as this float64 evaluation cares: the declared one wherever the kind is the same."""
    declared = {tensor.name: tensor.dtype for tensor in program.tensors if tensor.dtype is not None}
    given = {n: "f64" if array.dtype.kind == "f" else integers.dtype_of(array) for n, array in arrays.items()}
    for name, dtype in declared.items():
        if name in given and KINDS.get(dtype) == KINDS.get(given[name]):
            given[name] = dtype
    return given


def aligned(value: Value, dims: Sequence[str], domain: Domain) -> Any:
    """The array of `value` with its dims in the order of `dims`, of length 1 where it lacks one."""
    if dims and value.dims == dims:
        return value.data
    order, places = _alignment(value.dims, tuple(dims))
    data, exact = value.data, integers.is_exact(value.data)
    if order:
        data = np.transpose(data, order) if exact else domain.transpose(data, order)
    if len(value.dims) == len(dims):
        return data
    lengths = data.shape if exact else domain.shape(data)
    shape = tuple([1 if place is None else lengths[place] for place in places])
    return data.reshape(shape) if exact else domain.reshape(data, shape)


@lru_cache(maxsize=4096)
def _alignment(own: tuple[str, ...], dims: tuple[str, ...]) -> tuple[list[int], tuple[int | None, ...]]:
    """How the dims of a value are transposed (not where empty), and which of them each of `dims` is then."""
    order = [own.index(dim) for dim in dims if dim in own]
    counted = iter(range(len(order)))
    places = tuple(next(counted) if dim in own else None for dim in dims)
    return [] if order == list(range(len(order))) else order, places


def _broadcast(domain: Domain, data: Any, shape: tuple[int, ...]) -> Any:
    if integers.is_exact(data):
        return np.broadcast_to(data, shape)
    return data if domain.shape(data) == shape else domain.broadcast(data, shape)


def _union(values: Sequence[Value]) -> tuple[str, ...]:
    """All dims of the values, trials first."""
    return _joined(tuple([value.dims for value in values]))


@lru_cache(maxsize=4096)
def _joined(each: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    dims = dict.fromkeys(dim for own in each for dim in own)
    return tuple(sorted(dims, key=lambda dim: dim != TRIAL))


@dataclass
class _Run:
    """One evaluation. `kept` are the nodes with several readers, whose values `memo` remembers.

    Axes are bound lexically, yet a node has one value: every binder of an axis folds the same positions.
    """

    env: Env
    kept: frozenset[Expr]
    memo: dict[Expr, Value] = field(default_factory=dict)
    folds: dict[tuple[str, str, Expr], tuple[Value, ...]] = field(default_factory=dict)
    merges: dict[tuple[str, tuple[Expr, ...]], tuple[Value, ...]] = field(default_factory=dict)

    def value(self, node: Expr) -> Value:
        found = self.memo.get(node)
        if found is None:
            found = self._evaluate(node)
            if node in self.kept:
                self.memo[node] = found
        return found

    def _evaluate(self, node: Expr) -> Value:
        env = self.env
        match node:
            case Call(fn, args):
                if "." in fn and (ranks := ranks_of(node)) is not None:
                    return self._merge(node, ranks)
                values = [self.value(arg) for arg in args]
                if env.domain.watch is not None and (fn in BRANCHING or fn in JOINING):
                    dims = _union(values)
                    env.domain.watch(node, fn, [aligned(value, dims, env.domain) for value in values])
                return self._call(fn, values)
            case Const(value):
                return Value((), self._number(value))
            case Scalar(name):
                return self._scalar(env.scalars[name])
            case Axis(name):
                return Value((name,), env.at(name))
            case Size(axis):
                return Value((), np.asarray(env.extents[axis]))
            case Local(name, _):
                return Value(*env.locals[name])
            case Load():
                return self._load(node)
            case Reduce():
                return self._reduce(node)
            case Scan():
                return self._scan(node)[node.place]
            case _:
                raise TypeError(f"not an expression: {node!r}")

    def _number(self, value: float | bool) -> Any:
        return self.env.domain.full((), value) if isinstance(value, float) else np.asarray(value)

    def _scalar(self, value: Any) -> Value:
        if isinstance(value, int | float | np.generic):
            return Value((), self._number(value.item() if isinstance(value, np.generic) else value))
        shape = value.shape if integers.is_exact(value) else self.env.domain.shape(value)
        return Value((TRIAL,) if len(shape) == 1 else (), value)

    def _real(self, data: Any) -> Any:
        return self.env.domain.lift(data) if integers.is_exact(data) else data

    def _call(self, fn: str, args: Sequence[Value]) -> Value:
        domain = self.env.domain
        dims = _union(args)
        parts = [aligned(arg, dims, domain) for arg in args]
        if fn == "where":
            condition, *branches = parts
            if all(map(integers.is_exact, branches)):
                return Value(dims, integers.call(fn, tuple(parts)))
            return Value(dims, domain.where(condition, *map(self._real, branches)))
        exact = fn in integers.INTEGER_FUNCTIONS or fn in integers.TRUTH_FUNCTIONS
        if exact and all(map(integers.is_exact, parts)):
            return Value(dims, integers.call(fn, tuple(parts)))
        if fn in DRAWN and all(map(integers.is_exact, parts)):
            return Value(dims, domain.drawn(fn, np.broadcast_arrays(*parts)))
        reals = [self._real(part) for part in parts]
        if fn in COMPARISONS:
            return Value(dims, np.asarray(domain.compare(fn, reals[0], reals[1])))
        return Value(dims, domain.call(fn, reals))

    def _load(self, node: Load) -> Value:
        env = self.env
        data = env.tensors[node.tensor]
        exact = integers.is_exact(data)
        # Integer inputs are the same in every trial; integers that a nest has stored are not.
        is_batched = env.batch is not None and (not exact or data.ndim > len(node.index))
        trials = (TRIAL,) if is_batched else ()
        shape = (data.shape if exact else env.domain.shape(data))[len(trials) :]
        names = [index.name for index in node.index if isinstance(index, Axis)]
        plain = len(names) == len(node.index) == len(set(names))
        if plain and all(
            axis not in env.positions and env.extents[axis] == size
            for axis, size in zip(names, shape, strict=True)
        ):
            return Value((*trials, *names), data)
        index = [self.value(part) for part in node.index]
        dims = _union([Value(trials, None), *index])
        parts = [np.asarray(aligned(part, dims, env.domain)) for part in index]
        counts = tuple(env.length(dim) for dim in dims)
        inside = np.ones((1,) * len(dims), bool)
        for part, size in zip(parts, shape, strict=True):
            inside = inside & (part >= 0) & (part < size)
        if not env.domain.orders and min(shape, default=1) > 0:
            inside = np.ones_like(inside)  # any position does
        if not inside.any():
            zero = np.zeros(counts, data.dtype) if exact else env.domain.full(counts, 0.0)
            return Value(dims, zero)
        selection = [np.clip(part, 0, size - 1) for part, size in zip(parts, shape, strict=True)]
        if trials:
            selection.insert(0, aligned(Value(trials, np.arange(env.batch or 1)), dims, env.domain))
        taken = np.asarray(data[tuple(selection)]) if exact else env.domain.take(data, tuple(selection))
        if not inside.all():
            if exact:
                taken = np.where(inside, taken, np.zeros((), data.dtype))
            else:
                taken = env.domain.where(inside, taken, env.domain.full((), 0.0))
        return Value(dims, _broadcast(env.domain, taken, counts))

    def _reduce(self, node: Reduce) -> Value:
        env, axis = self.env, node.axis
        axes = free_axes(node.body) | {axis}
        count = env.length(axis)
        elements = prod(env.length(dim) for dim in axes) * (env.batch or 1)
        whole = fold_of(node.op) is not None or axis in rank_axes(node.body)
        if elements <= MAX_ELEMENTS or count < 2 or whole:
            return self._fold(node)
        pieces = np.array_split(env.at(axis), min(count, -(-elements // MAX_ELEMENTS)))
        # A piece restricts the axis, also for an inner reduction that binds the same name: those have one
        # value for all positions, made before.
        for part in walk(node.body):
            if isinstance(part, Reduce) and part.axis == axis:
                self.memo[part] = self.value(part)
        outside = {part: value for part, value in self.memo.items() if axis not in free_axes(part)}
        total: Value | None = None
        for piece in pieces:
            restricted = replace(env, positions={**env.positions, axis: piece})
            folded = _Run(restricted, self.kept, dict(outside))._fold(node)
            total = folded if total is None else self._call(COMBINE[node.op], [total, folded])
        return total if total is not None else self._fold(node)

    def _fold(self, node: Reduce) -> Value:
        domain = self.env.domain
        found = fold_of(node.op)
        if found is not None:
            fold, index = found
            key = (fold.name, node.axis, node.body)
            if key not in self.folds:
                self.folds[key] = self._states(fold, node)
            return self.folds[key][index]
        match node:
            case Reduce("sum", axis, Call("mul", (left, right)) as product) if product not in self.kept:
                (one, right_mask), (two, left_mask) = self._unmasked(left), self._unmasked(right)
                dims = _union([v for v in (one, two, left_mask, right_mask) if v is not None])
                if axis in dims and not all(integers.is_exact(side.data) for side in (one, two)):
                    sides = [self._real(aligned(side, dims, domain)) for side in (one, two)]
                    masks = [m and aligned(m, dims, domain) for m in (left_mask, right_mask)]
                    place = dims.index(axis)
                    total = contract_masked(domain, sides[0], sides[1], masks[0], masks[1], place)
                    return Value(dims[:place] + dims[place + 1 :], total)
        body = self.value(node.body)
        if node.axis not in body.dims:
            dims = (*body.dims, node.axis)
            body = Value(dims, expand(body, dims, self.env))
        dimension = body.dims.index(node.axis)
        dims = body.dims[:dimension] + body.dims[dimension + 1 :]
        if integers.is_exact(body.data):
            dtype = "i64" if body.data.shape[dimension] else self._integer_dtype(node.body)
            return Value(dims, integers.fold(node.op, body.data, dimension, dtype))
        return Value(dims, domain.reduce(node.op, body.data, dimension))

    def _unmasked(self, factor: Expr) -> tuple[Value, Value | None]:
        """A factor, without a mask that has axes which it lacks, and that mask: it is the other factor's as well."""
        match factor:
            case Call("where", (mask, value, Const(0))) if not free_axes(mask) <= free_axes(value):
                return self.value(value), self.value(mask)
            case _:
                return self.value(factor), None

    def _integer_dtype(self, expr: Expr) -> str:
        """i32 where an integer is made from i32 and narrower values alone."""
        tensors = {name: data for name, data in self.env.tensors.items() if integers.is_exact(data)}
        return result_dtype(expr, {name: integers.dtype_of(data) for name, data in tensors.items()})

    def _states(self, fold: Fold, node: Reduce) -> tuple[Value, ...]:
        """Every state variable of a fold over the positions of an axis."""
        parts = [self.value(part) for part in contributions(node)]
        dims = _union([*parts, Value((node.axis,), None)])
        whole = [Value(dims, expand(part, dims, self.env)) for part in parts]
        dtypes = [self._integer_dtype(part) for part in contributions(node)]
        ranks = ranks_of(node)
        if ranks is None:
            return fold_states(fold, whole, node.axis, self.env.domain, dtypes)
        return rank_states(fold, whole, node.axis, ranks, self.env.length(ranks), self.env.domain, dtypes)

    def _scan(self, node: Scan) -> tuple[Value, ...]:
        """Every state variable of a fold over the positions up to each one."""
        fold, axis, domain = node.fold, node.axis, self.env.domain
        key = (fold.name, axis, node.body)
        if key not in self.folds:
            parts = [self.value(part) for part in unpacked(node.body, len(fold.state))]
            dims = _union([*parts, Value((axis,), None)])
            whole = [Value(dims, expand(part, dims, self.env)) for part in parts]
            is_there = (self.env.at(axis) >= node.first).reshape([-1 if dim == axis else 1 for dim in dims])
            if not is_there.all():
                whole = [
                    Value(dims, np.where(is_there, part.data, integers.identity(nothing.value, "i64")))
                    if integers.is_exact(part.data)
                    else Value(dims, domain.where(is_there, part.data, domain.full((), nothing.value)))
                    for part, nothing in zip(whole, fold.identity, strict=True)
                ]
            self.folds[key] = scan_states(fold, whole, axis, domain)
        return self.folds[key]

    def _merge(self, node: Call, ranks: str) -> Value:
        """A state variable of two lists, merged."""
        found = fold_of(node.fn)
        assert found is not None
        fold, index = found
        key = fold.name, node.args
        if key not in self.merges:
            parts = [[self.value(part) for part in side] for side in sides(node)]
            dims = _union([*parts[0], *parts[1], Value((ranks,), None)])
            left, right = ([Value(dims, expand(part, dims, self.env)) for part in side] for side in parts)
            self.merges[key] = merge_states(fold, left, right, ranks, self.env.domain)
        return self.merges[key][index]


def fold_states(
    fold: Fold, parts: Sequence[Value], axis: str, domain: Domain, dtypes: Sequence[str] | None = None
) -> tuple[Value, ...]:
    """Every state variable of a fold, from what each position contributes (arrays of all of the same dims, integers
    of these dtypes).

    Neighbours are combined pair by pair, the order of positions kept, until one is left.
    """
    dims, place = parts[0].dims, parts[0].dims.index(axis)
    count = _length(parts[0].data, place, domain)
    size = max(2, integers.power_of_two(count))  # a combination decides which variables are real
    states = [
        Value(dims, _filled(part.data, place, size, identity.value, domain, dtype))
        for part, identity, dtype in zip(parts, fold.identity, dtypes or ["i64"] * len(parts), strict=True)
    ]
    while size > 1:
        sides = [
            [Value(dims, _taken(v.data, place, slice(first, None, 2), domain)) for v in states]
            for first in (0, 1)
        ]
        states, size = _combined(fold, sides[0], sides[1], domain), size // 2
        dims = states[0].dims
    rest = dims[:place] + dims[place + 1 :]
    return tuple(Value(rest, _taken(value.data, place, 0, domain)) for value in states)


def scan_states(fold: Fold, parts: Sequence[Value], axis: str, domain: Domain) -> tuple[Value, ...]:
    """Every state variable of a fold over the positions up to each one: what each position contributes is combined with what is
    one, two, four, ... before it (Hillis and Steele, "Data parallel algorithms", 1986)."""
    dims, place = parts[0].dims, parts[0].dims.index(axis)
    at = np.arange(_length(parts[0].data, place, domain))
    shape = [-1 if dim == axis else 1 for dim in dims]
    states, apart = list(parts), 1
    while apart < len(at):
        before = [Value(dims, _taken(v.data, place, np.maximum(at - apart, 0), domain)) for v in states]
        is_after = (at >= apart).reshape(shape)
        states = [
            Value(
                dims,
                (np.where if integers.is_exact(new.data) else domain.where)(is_after, new.data, old.data),
            )
            for new, old in zip(_combined(fold, before, states, domain), states, strict=True)
        ]
        apart *= 2
    return tuple(states)


def rank_states(
    fold: Fold,
    parts: Sequence[Value],
    axis: str,
    ranks: str,
    count: int,
    domain: Domain,
    dtypes: Sequence[str] | None = None,
) -> tuple[Value, ...]:
    """The first so many states along an axis, in order, as a list along `ranks` in its place: every state variable.

    Lists of neighbours are merged, each twice as long as the ones before it, but never longer than what is wanted.
    """
    dims, place = parts[0].dims, parts[0].dims.index(axis)
    size = integers.power_of_two(max(2, _length(parts[0].data, place, domain)))
    longest = integers.power_of_two(max(1, count))
    states = [
        Value(dims, _filled(part.data, place, max(size, longest), identity.value, domain, dtype))
        for part, identity, dtype in zip(parts, fold.identity, dtypes or ["i64"] * len(parts), strict=True)
    ]
    length = 1
    while length < _length(states[0].data, place, domain):
        states = _merged(fold, states, place, length, min(2 * length, longest), domain)
        length = min(2 * length, longest)
    renamed = tuple(ranks if dim == axis else dim for dim in dims)
    return tuple(Value(renamed, _taken(v.data, place, slice(0, count), domain)) for v in states)


def merge_states(
    fold: Fold, left: Sequence[Value], right: Sequence[Value], ranks: str, domain: Domain
) -> tuple[Value, ...]:
    """The list of the first states of two lists along `ranks`, of their length."""
    dims, place = left[0].dims, left[0].dims.index(ranks)
    shape = np.broadcast_shapes(*(_shape(value.data, domain) for value in (*left, *right)))
    count = shape[place]
    size = integers.power_of_two(max(1, count))
    lists = [
        [
            Value(
                dims, _filled(_broadcast(domain, v.data, shape), place, size, identity.value, domain, "i64")
            )
            for v, identity in zip(side, fold.identity, strict=True)
        ]
        for side in (left, right)
    ]
    last_first = np.arange(size)[::-1]
    turned = [Value(dims, _taken(value.data, place, last_first, domain)) for value in lists[1]]
    states = _ordered(fold, _combined(fold, lists[0], turned, domain), place, size, domain)
    return tuple(Value(dims, _taken(value.data, place, slice(0, count), domain)) for value in states)


def _merged(
    fold: Fold, states: Sequence[Value], place: int, length: int, kept: int, domain: Domain
) -> list[Value]:
    """Lists of so many states, one after the other along a dimension, merged two by two; the first `kept` of each."""
    size = _length(states[0].data, place, domain)
    at = np.arange(size)
    # The second list backwards: the first of each pair are the first half, and what comes last the second.
    partner = at - at % (2 * length) + (2 * length - 1 - at % (2 * length))
    states = _exchanged(fold, states, partner, at % (2 * length) < length, place, domain)
    if kept == length:
        first = np.flatnonzero(at % (2 * length) < length)
        states = [Value(v.dims, _taken(v.data, place, first, domain)) for v in states]
    return _ordered(fold, states, place, length, domain)


def _ordered(fold: Fold, states: Sequence[Value], place: int, length: int, domain: Domain) -> list[Value]:
    """Lists that go up and then down, or down and then up, in order: Batcher's merging network."""
    at = np.arange(_length(states[0].data, place, domain))
    while length > 1:
        length //= 2
        states = _exchanged(fold, states, at ^ length, at & length == 0, place, domain)
    return list(states)


def _exchanged(
    fold: Fold,
    states: Sequence[Value],
    partner: npt.NDArray[np.int64],
    first: npt.NDArray[np.bool_],
    place: int,
    domain: Domain,
) -> list[Value]:
    """Each state or its partner: where `first`, the one that comes first of them, else the other."""
    others = [Value(v.dims, _taken(v.data, place, partner, domain)) for v in states]
    position = fold.state.index(fold.ranks)
    (before,) = _combined(fold, states, others, domain, [fold.combine[position]])
    mine = np.asarray(before.data) == np.asarray(states[position].data)
    shape = [-1 if dim == place else 1 for dim in range(len(states[0].dims))]
    keeps = mine == first.reshape(shape)
    found = []
    for state, other in zip(states, others, strict=True):
        exact = integers.is_exact(state.data)
        chosen = (np.where if exact else domain.where)(keeps, state.data, other.data)
        found.append(Value(state.dims, chosen))
    return found


def _combined(
    fold: Fold,
    left: Sequence[Value],
    right: Sequence[Value],
    domain: Domain,
    wanted: Sequence[Expr] | None = None,
) -> list[Value]:
    """One combination of states, each variable with all of the dims and of the kind that it had; of some of the variables, where
    they are `wanted` alone."""
    values = {f"{name}1": value for name, value in zip(fold.state, left, strict=True)}
    values |= {f"{name}2": value for name, value in zip(fold.state, right, strict=True)}
    env = Env(domain, {}, {}, {}, locals={name: tuple(value) for name, value in values.items()})
    dims = left[0].dims
    shape = _shape(left[0].data, domain)
    found = []
    combine = fold.of_first if getattr(domain, "of_first", False) else fold.combine
    for value in evaluate_all(combine if wanted is None else wanted, env):
        found.append(Value(dims, _broadcast(domain, aligned(value, dims, domain), shape)))
    return found


def _shape(data: Any, domain: Domain) -> tuple[int, ...]:
    return tuple(data.shape) if integers.is_exact(data) else domain.shape(data)


def _length(data: Any, place: int, domain: Domain) -> int:
    return _shape(data, domain)[place]


def _taken(data: Any, place: int, which: slice | int | npt.NDArray[np.int64], domain: Domain) -> Any:
    index = (slice(None),) * place + (which,)
    return np.asarray(data[index]) if integers.is_exact(data) else domain.take(data, index)


def _filled(data: Any, place: int, size: int, number: float, domain: Domain, dtype: str) -> Any:
    """`data` with so many positions along one dimension, the further ones of one number; `dtype` is of integers."""
    shape = _shape(data, domain)
    count = shape[place]
    if count == size:
        return data
    exact = integers.is_exact(data)
    fill = np.asarray(integers.identity(number, dtype)) if exact else domain.full((), number)
    if count == 0:
        full = (*shape[:place], size, *shape[place + 1 :])
        return _broadcast(domain, fill if exact else domain.reshape(fill, (1,) * len(full)), full)
    inside = np.arange(size) < count
    taken = _taken(data, place, np.minimum(np.arange(size), count - 1), domain)
    inside = inside.reshape([size if dim == place else 1 for dim in range(len(shape))])
    return np.where(inside, taken, fill) if exact else domain.where(inside, taken, fill)
