"""How far from the float64 reference a fused program may be, position by position.

The yardstick is the unfused program's own error. It is measured twice: once as it happens in the kernel's
precision, and, because a single rounding error may be 0 by luck, as the largest deviation among runs in
which every operation of the unfused program is disturbed by one unit of rounding, at random, and so is every
operand of a sum or a difference: a value that is used twice may be computed in two ways, and what is reduced is, in
half of the runs, computed anew. A written cast rounds the
terms of what it is applied to as well, since a fused program may shift what it rounds. The latter
(Monte Carlo arithmetic: Parker, "Monte Carlo arithmetic: how to gamble with floating point and win", 2000)
scales with the condition of the program: where its operations cancel, or a comparison stands on the edge,
the runs differ, and only there a fused program may differ as much.

Where the unfused program leaves the range of the kernel's precision and float64 does not, a fused program may give
anything: in another order it may overflow elsewhere, or not at all. It shows by an infinity or NaN, or by an error
that rounding does not explain, or by an output that changes with the values that are out of range. Where the unfused one is right, the fused one must be,
but for headroom: a factor that does not vary along a sum may be applied after it, and the sum alone be out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eqfuse.terms.floats import TORCH_DTYPES, FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.interpreter import evaluate, reference
from eqfuse.terms.nodes import (
    Call,
    Expr,
    Load,
    Program,
    Reduce,
    Size,
    call,
    children,
    free_axes,
    rebuild,
    transform,
    walk,
)
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import kind

Array = npt.NDArray[Any]

RUNS = 8
MORE_RUNS = 128
"""Where a value seems wrong: few runs may all be on one side of where the greatest of disturbed values is another number."""
MOST_TILES = 64
"""Along an axis that is reduced: the sum of very many tiny ones is less exact, one by one."""
DISTURBED = 4.0
"""A fused error may be this many times the largest deviation of the disturbed runs."""
UNFUSED = 2.0
"""A fused error may be this many times the error of the unfused program in the kernel's precision."""
LAST_PLACES = 4.0
"""An error of this many units in the last place of the result always passes."""

APART = "'"
"""What ends the names of tensors that are read apart."""
HALVES = ("f16", "bf16")
NARROW = (*HALVES, "f8e4m3")
ROUNDING: Mapping[str, float] = {
    **{name: torch.finfo(TORCH_DTYPES[name]).eps / 2 for name in CASTS},
}
FLUSHED = ("exp", "sigmoid", "silu", "gelu", "tanh", "erf")
"""Functions that may give 0 below the least normal number: their kernels flush what is denormal."""
OUT_OF_RANGE = 1e-4
"""A relative error of the unfused program from which on it has left the range, if rounding makes none like it."""
SMALL, LEAST = 1e-6, 1e-37
"""A relative and an absolute change by which an output does not depend on what is out of range."""
EXACT = ("neg", "abs", "maximum", "minimum", "sign", "floor", "round", "relu", "finite", "invertible")


class Disturbed(FloatDomain):
    """float64 in which every operation's result is off by half to one unit of rounding of `dtype`, up or down, and by its
    least number where it is denormal."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__("float64")
        self.unit = 2 * ROUNDING[dtype]
        self.most = torch.finfo(TORCH_DTYPES[dtype]).max
        self.normal = torch.finfo(TORCH_DTYPES[dtype]).smallest_normal
        self.least = self.normal * self.unit
        self.random = np.random.default_rng(seed)

    def _off(self, value: Array, most: float) -> Array:
        signs = self.random.integers(0, 2, value.shape) * 2 - 1
        unit = most * self.random.uniform(
            0.5, 1.0, value.shape
        )  # of one size, two of them are as often equal as not
        with np.errstate(all="ignore"):
            size = np.abs(value)
            change = np.where((size < self.normal) & (size > 0), self.least, size * unit)
            changed = np.where(np.isinf(value), value, value + change * signs)
            return np.where(np.abs(changed) > self.most, np.copysign(np.inf, changed), changed)

    def _flushed(self, value: Array) -> Array:
        gone = (np.abs(value) < self.normal) & (self.random.integers(0, 2, value.shape) > 0)
        return np.where(gone, 0.0, value)

    def call(self, fn: str, args: Sequence[Any]) -> Array:
        if fn in CASTS:
            value = self._off(np.asarray(args[0]), 2 * ROUNDING[fn])
            tiny = torch.finfo(TORCH_DTYPES[fn]).smallest_normal * 2 * ROUNDING[fn]
            return super().call(fn, [value + tiny * self.random.integers(-1, 2, value.shape)])
        if fn in ("add", "sub"):
            args = [self._off(np.asarray(arg), self.unit) for arg in args]
        found = super().call(fn, args)
        if fn == "gelu":  # x (1 + erf(x / sqrt 2)) / 2: for negative x the sum cancels, in torch as here
            return np.asarray(found + self._off(np.asarray(args[0]), self.unit) - args[0])
        if fn in FLUSHED:
            found = self._flushed(found)
        return found if fn in EXACT else self._off(found, self.unit)

    def reduce(self, op: str, value: Any, axis: int) -> Array:
        if op in ("max", "min"):
            return super().reduce(op, value, axis)
        value = self._off(value, self.unit)
        found = self._off(super().reduce(op, value, axis), self.unit)
        return found + self._of_tiles(value, axis) if op == "sum" else found

    def _of_tiles(self, value: Array, axis: int) -> Array:
        """What a sum is off by that is added up from tiles one by one: each sum so far is rounded, of equal terms as well."""
        count = value.shape[axis]
        starts = np.arange(min(count, MOST_TILES)) * count // max(1, min(count, MOST_TILES))
        if len(starts) < 3:
            return np.zeros(())
        with np.errstate(all="ignore"):
            so_far = np.cumsum(np.add.reduceat(value, starts, axis), axis)
            off = (so_far * self.random.uniform(-self.unit / 2, self.unit / 2, so_far.shape)).sum(axis)
        return np.where(np.isfinite(off), off, 0.0)


class Precise(FloatDomain):
    """float64 in which sums are added up in more, where the machine has it."""

    def __init__(self) -> None:
        super().__init__("float64")

    def reduce(self, op: str, value: Any, axis: int) -> Array:
        if op != "sum":
            return super().reduce(op, value, axis)
        with np.errstate(all="ignore"):
            return np.asarray(np.add.reduce(value, axis, np.longdouble), self.dtype)


class Ranged(FloatDomain):
    """float64 in which what is out of the range of `dtype` is any number of that range. `was_beyond` tells whether
    anything was."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__("float64")
        self.most = torch.finfo(TORCH_DTYPES[dtype]).max
        self.was_beyond = False
        self.seed = seed
        self.random = np.random.default_rng(seed)

    def _within(self, value: Array) -> Array:
        beyond = np.isfinite(value) & (np.abs(value) > self.most)
        if not beyond.any():
            return value
        self.was_beyond = True
        return np.where(beyond, self._any(value), value)

    def _any(self, value: Array) -> Array:
        """Infinities in the first run, which numbers of the range need not show."""
        if self.seed == 0:
            return np.copysign(np.inf, value)
        return self.random.uniform(-self.most, self.most, value.shape)

    def call(self, fn: str, args: Sequence[Any]) -> Array:
        return self._within(super().call(fn, args))

    def reduce(self, op: str, value: Any, axis: int) -> Array:
        found = super().reduce(op, value, axis)
        if op == "prod":  # in another order its great factors may come first, and be infinite before a 0
            great = np.maximum(np.abs(value), 1.0)
            with np.errstate(all="ignore"):
                beyond = np.isfinite(found) & (np.multiply.reduce(great, axis) > self.most)
            found = np.where(beyond, np.copysign(2 * self.most, found), found)
        if (
            op == "sum"
        ):  # in another order its great terms of one sign may come first, and then those of the other
            with np.errstate(all="ignore"):
                beyond = np.isfinite(found) & (np.add.reduce(np.abs(value), axis) > self.most)
            self.was_beyond |= bool(beyond.any())
            found = np.where(beyond, math.nan if self.seed == 0 else np.copysign(2 * self.most, found), found)
        return self._within(found)


@dataclass(frozen=True)
class Expected:
    """One output: its value in float64, in the kernel's precision unfused, and how far it may be off.

    `tolerance` is inf where the disturbed runs do not agree on whether the value is finite, and where the unfused
    program leaves the range.
    `others` are values of the disturbed runs, whose NaN and infinities are as good as the exact ones.
    """

    name: str
    exact: Array
    unfused: Array
    others: tuple[Array, ...]
    tolerance: Array

    def wrong(self, found: torch.Tensor, infinities: bool = True) -> str:
        """Where and how an output of the fused program is wrong; empty where it is right. Without `infinities`, NaN
        may stand for one."""
        got = _as_float64(found)
        if got.shape != self.exact.shape:
            return f"{self.name} has shape {got.shape}, not {self.exact.shape}"
        exact = self._rounded(found.dtype)
        bad = np.argwhere(~(self.ratios(found, infinities) <= 1))
        if not len(bad):
            return ""
        at = tuple(int(k) for k in bad[0])
        return (
            f"{self.name}{list(at)} is {got[at]:.9g}, not {exact[at]:.9g} (unfused {self.unfused[at]:.9g}, "
            f"tolerance {self.tolerance[at]:.1e}); {len(bad)} of {got.size} positions"
        )

    def ratios(self, found: torch.Tensor, infinities: bool = True) -> Array:
        """The error at every position over what is allowed there: 0 where anything is, inf for a wrong special value."""
        got, exact = _as_float64(found), self._rounded(found.dtype)
        rounding, tiny, most = 0.0, 0.0, np.inf
        if found.dtype.is_floating_point:
            info = torch.finfo(found.dtype)
            rounding, tiny, most = info.eps, info.smallest_normal, info.max
        with np.errstate(all="ignore"):
            allowed = self.tolerance + LAST_PLACES * rounding * np.abs(exact) + tiny
            error = np.fmin(np.abs(got - exact), np.abs(got - self.unfused))
            beyond = np.isinf(got) & (np.abs(exact) + allowed > most)
            ratios = np.where((error == 0) | beyond, 0.0, error / allowed)
        same = [_kinds(got) == _kinds(value) for value in (exact, self.unfused, *self.others)]
        special = np.logical_or.reduce(same) & (_kinds(got) > 0)
        if not infinities:
            special |= np.isnan(got) & (_kinds(exact) > 0)
        return np.where(special | np.isinf(self.tolerance), 0.0, np.where(np.isnan(ratios), np.inf, ratios))

    def _rounded(self, dtype: torch.dtype) -> Array:
        """The exact values in the dtype of an output."""
        if not dtype.is_floating_point:
            return self.exact
        return _as_float64(torch.from_numpy(np.array(self.exact, np.float64)).to(dtype))

    @property
    def judged(self) -> int:
        """Positions at which a wrong value would be seen: not so ill-conditioned that anything passes."""
        with np.errstate(all="ignore"):
            return int(np.sum(~(self.tolerance > 0.1 * np.maximum(np.abs(self.exact), 1e-3))))

    def is_well_conditioned(self, most: float) -> Array:
        """Positions of finite values of which the tolerance is at most so large a part."""
        with np.errstate(all="ignore"):
            return np.isfinite(self.exact) & (self.tolerance <= most * np.abs(self.exact))


def expected(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, float],
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    times: int = RUNS,
    headroom: bool = True,
) -> tuple[Expected, ...]:
    """What the program's outputs must be, by so many disturbed runs. Without `headroom`, factors that are the same along a sum may not be applied after it
    where that leaves the range. Raises EqfuseError where the inputs do not fit the program."""
    exact = reference(program, tensors, scalars, sizes)
    exact = exact if isinstance(exact, tuple) else (exact,)
    arithmetic = _arithmetic(dtypes)
    extents = bind(program, {name: tuple(t.shape) for name, t in tensors.items()}, sizes, scalars)
    wide = _wide(tensors)
    narrow = (
        wide
        if arithmetic == "f64"
        else {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in wide.items()}
    )
    domain = FloatDomain("float64" if arithmetic == "f64" else "float32")
    unfused = evaluate(program, narrow, scalars, extents, domain)
    if arithmetic == "f64":  # what `reference` gives is no more exact than the kernel is
        precise = evaluate(program, wide, scalars, extents, Precise())
        exact = tuple(precise[output.name] for output in program.outputs)
    positions = [o.name for o in program.outputs if kind(o.expr, dtypes) != "real"]
    ranged = list(_ranged(program, wide, scalars, extents, arithmetic))
    if headroom and (later := factors_later(program)) is not program:
        ranged += _ranged(later, wide, scalars, extents, arithmetic)
    runs = disturbed(program, tensors, scalars, extents, dtypes, times)
    once = multiplied(program, extents)
    by_products = evaluate(once, wide, scalars, extents, Precise()) if once is not program else None
    return tuple(
        _expected(
            output.name,
            value,
            unfused[output.name],
            # An output may be right by luck where what it is made of is out of range.
            [run[output.name] for run in ranged],
            [run[output.name] for run in runs],
            output.name in positions,
            value if by_products is None else by_products[output.name],
        )
        for output, value in zip(program.outputs, exact, strict=True)
    )


def _ranged(
    program: Program,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, float],
    extents: Mapping[str, int],
    arithmetic: str,
) -> Iterator[dict[str, Array]]:
    """The outputs of `RUNS` runs with any numbers for those out of range; none where there are none."""
    for seed in range(RUNS):
        domain = Ranged(arithmetic, seed)
        outputs = evaluate(program, tensors, scalars, extents, domain)
        if not domain.was_beyond:
            return
        yield outputs


def factors_later(program: Program) -> Program:
    """The program with what its sums multiply every term by applied to them: factors that do not vary along the sum, and
    are no reductions, which are in the sum to keep it in range."""

    def step(node: Expr) -> Expr:
        if not isinstance(node, Reduce) or node.op != "sum":
            return node
        body, outside = _without(node.body, node.axis)
        return outside(Reduce("sum", node.axis, body))

    later = tuple(replace(o, expr=transform(o.expr, step)) for o in program.outputs)
    return program if later == program.outputs else replace(program, outputs=later)


def multiplied(program: Program, extents: Mapping[str, int]) -> Program:
    """The program with each sum of equal terms, as over an axis that the terms do not vary along, the term times their count, and
    their mean the term: the variance along such an axis is 0 then, and no square of a rounding error."""

    def step(node: Expr) -> Expr:
        match node:
            case Reduce("sum", axis, body) if extents[axis] and axis not in free_axes(body):
                return call("mul", body, Size(axis))
            case Call("div", (Call("mul", (term, Size() as count)), divisor)) if divisor is count:
                return term
        return node

    made = tuple(replace(o, expr=transform(o.expr, step)) for o in program.outputs)
    return program if made == program.outputs else replace(program, outputs=made)


def _without(body: Expr, axis: str) -> tuple[Expr, Callable[[Expr], Expr]]:
    """A product without the factors that are the same along an axis, and what applies them."""

    def is_same(factor: Expr) -> bool:
        return axis not in free_axes(factor) and not any(isinstance(n, Reduce) for n in walk(factor))

    match body:
        case Call("mul", (a, b)) if is_same(a):
            rest, outside = _without(b, axis)
            return rest, lambda total: call("mul", a, outside(total))
        case Call("mul" | "div" as fn, (a, b)) if is_same(b):
            rest, outside = _without(a, axis)
            return rest, lambda total: call(fn, outside(total), b)
        case Call("neg", (a,)):
            rest, outside = _without(a, axis)
            return rest, lambda total: call("neg", outside(total))
        case _:
            return body, lambda total: total


def disturbed(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, float],
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    times: int = RUNS,
) -> list[dict[str, Array]]:
    """The outputs of so many runs in which every operation is off by a unit of the kernel's rounding; in every other one what
    is reduced is computed apart from the same value elsewhere."""
    rounded, wide = _with_rounded_operands(program, dtypes), _wide(tensors)
    forms = rounded, computed_apart(rounded)
    wide |= {name + APART: wide[name] for name in wide}
    arithmetic = _arithmetic(dtypes)
    return [evaluate(forms[n % 2], wide, scalars, extents, Disturbed(arithmetic, n)) for n in range(times)]


def computed_apart(program: Program) -> Program:
    """The program with what is reduced read from tensors of other names, so that what is inside and outside of a reduction
    shares no operation: `x - max(x)` is never 0 but for rounding, as where a fused program has the maximum from elsewhere."""
    forms: tuple[dict[Expr, Expr], dict[Expr, Expr]] = {}, {}
    for node in walk(*(output.expr for output in program.outputs)):
        for apart, form in enumerate(forms):
            inner = forms[1 - apart] if isinstance(node, Reduce) else form
            made = rebuild(node, tuple(inner[child] for child in children(node)))
            form[node] = Load(made.tensor + APART, made.index) if apart and isinstance(made, Load) else made
    return replace(program, outputs=tuple(replace(o, expr=forms[0][o.expr]) for o in program.outputs))


def _arithmetic(dtypes: Mapping[str, str]) -> str:
    return "f64" if "f64" in dtypes.values() else "f32"


def _wide(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {n: _as_float64(t) if t.is_floating_point() else t.numpy() for n, t in tensors.items()}


def _expected(
    name: str,
    exact: Array,
    unfused: Array,
    ranged: Sequence[Array],
    runs: Sequence[Array],
    is_position: bool,
    by_products: Array,
) -> Expected:
    """Where one of `ranged` is another value than `exact`, which rounding does not explain, the unfused program has left
    the range. Where `by_products`, the value with its sums of equal terms multiplied, is finite and `exact` is not, or the
    other way round, float64 is not precise enough to tell."""
    value = np.asarray(exact, np.float64)
    plain = np.asarray(unfused, np.float64)
    others = tuple(np.asarray(run, np.float64) for run in runs)
    with np.errstate(all="ignore"):
        finite = np.isfinite(value)
        deviation = np.max([np.abs(run - value) for run in others], axis=0)
        own = np.abs(plain - value)
        strayed = (own > OUT_OF_RANGE * np.abs(value)) & (own > DISTURBED * deviation)
        explained = (
            np.zeros_like(value) if is_position else DISTURBED * deviation + SMALL * np.abs(value) + LEAST
        )
        for run in ranged:
            strayed |= finite & ~(np.abs(np.asarray(run, np.float64) - value) <= explained)
        own = np.where(np.isfinite(plain) & ~strayed, own, np.inf)
        tolerance = np.where(finite, DISTURBED * deviation + UNFUSED * own, 0.0)
        multiplied_out = np.asarray(by_products, np.float64)
        tolerance = np.where(_kinds(multiplied_out) == _kinds(value), tolerance, np.inf)
    return Expected(name, value, plain, others, np.where(np.isnan(tolerance), np.inf, tolerance))


def _with_rounded_operands(program: Program, dtypes: Mapping[str, str]) -> Program:
    """The program with what a half-precision tensor is multiplied by rounded to that precision: matrix
    units take both operands in one dtype, which is the documented policy. The terms of what is cast are cast too."""

    def half(expr: Expr) -> str | None:
        dtype = dtypes.get(expr.tensor) if isinstance(expr, Load) else None
        return dtype if dtype in HALVES else None

    def step(node: Expr) -> Expr:
        match node:
            case Call("mul", (left, right)) if half(left) or half(right):
                to_left, to_right = half(right), half(left)
                return call(
                    "mul",
                    call(to_left, left) if to_left and not half(left) else left,
                    call(to_right, right) if to_right and not half(right) else right,
                )
            case Call(fn, (value,)) if fn in NARROW:
                return call(fn, _cast_by_terms(fn, value))
        return node

    return replace(program, outputs=tuple(replace(o, expr=transform(o.expr, step)) for o in program.outputs))


def _cast_by_terms(fn: str, value: Expr) -> Expr:
    """A value with the terms that it is the sum or the extreme of cast, one by one."""
    match value:
        case Call("add" | "sub" | "maximum" | "minimum" as joint, (a, b)):
            return call(joint, *(call(fn, _cast_by_terms(fn, part)) for part in (a, b)))
        case Call("where", (condition, a, b)):
            return call("where", condition, _cast_by_terms(fn, a), _cast_by_terms(fn, b))
        case Call("neg", (a,)):
            return call("neg", _cast_by_terms(fn, a))
        case _:
            return value


def _as_float64(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.detach().double().numpy())


def _kinds(values: Array) -> Array:
    """0 for a number, 1 for NaN, 2 for inf, 3 for -inf."""
    return np.select([np.isnan(values), values == np.inf, values == -np.inf], [1, 2, 3], 0)
