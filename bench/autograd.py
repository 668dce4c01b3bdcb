"""The gradient of a program by torch's autograd over the unfused float64 reference: what gradients are compared with.

The interpreter of the language runs on torch tensors. A maximum passes its cotangent to the first of equals, a written
cast counts as the identity, as in `eq.grad`; everything else is what torch makes of its own functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.judge import EXACT, Disturbed
from eqfuse.differentiate.certify import without_folds
from eqfuse.differentiate.steps import with_stops
from eqfuse.terms.domain import Watch
from eqfuse.terms.floats import IRRATIONAL, TORCH_DTYPES, FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.interpreter import evaluate, reference
from eqfuse.terms.nodes import REDUCTIONS, Program
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.segments import Segments
from eqfuse.terms.sizes import bind

_F = torch.nn.functional
_CALLS: Mapping[str, Any] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "floordiv": lambda x, y: torch.floor(x / y),
    "mod": torch.remainder,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "round": torch.round,
    "sq": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "stop": torch.detach,
    "root": lambda x: torch.where(x == 0, 0.0, x).sqrt(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": _F.gelu,
    "silu": _F.silu,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan2": torch.atan2,
    "finite": lambda x: torch.where(torch.isinf(x), 0.0, x),
    "invertible": lambda x: torch.where((x == 0) | torch.isinf(x), 1.0, x),
}
_COMPARE: Mapping[str, Any] = {
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}


STEADY = 1e-3
"""What a gradient may change by, relative to its largest element, where its inputs change by their last digits."""


class TorchDomain:
    """Implements `terms.domain.Domain` with float64 tensors that autograd sees."""

    name = "torch"
    watch: Watch | None = None
    orders = True

    def full(self, shape: tuple[int, ...], number: float) -> torch.Tensor:
        return torch.full(shape, number, dtype=torch.float64)

    def irrational(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.full((1,) * len(shape), IRRATIONAL[name])

    def lift(self, integers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(integers).astype(np.float64))

    def call(self, fn: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
        if fn in CASTS:
            (value,) = args
            rounded = value.detach().to(TORCH_DTYPES[fn]).double()
            return torch.where(rounded == value.detach(), value, value + (rounded - value.detach()))
        result: torch.Tensor = _CALLS[fn](*args)
        return result

    def drawn(self, fn: str, integers: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(FloatDomain().drawn(fn, integers))

    def rounded(self, dtype: str, value: torch.Tensor) -> torch.Tensor:
        return value

    def compare(self, fn: str, left: torch.Tensor, right: torch.Tensor) -> np.ndarray:
        return np.asarray(_COMPARE[fn](left.detach(), right.detach()).numpy())

    def where(self, condition: np.ndarray, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.from_numpy(np.array(condition)), left, right)

    def reduce(self, op: str, value: torch.Tensor, axis: int) -> torch.Tensor:
        if value.shape[axis] == 0:
            return self.full(tuple(np.delete(value.shape, axis)), REDUCTIONS[op])
        if op in ("sum", "prod"):
            return value.sum(axis) if op == "sum" else value.prod(axis)
        first = np.argmax if op == "max" else np.argmin
        place = torch.from_numpy(np.expand_dims(first(value.detach().numpy(), axis=axis), axis))
        return torch.take_along_dim(value, place, axis).squeeze(axis)

    def contract(self, left: torch.Tensor, right: torch.Tensor, axis: int) -> torch.Tensor:
        return (left * right).sum(axis)

    def is_finite(self, value: torch.Tensor) -> bool:
        return bool(torch.isfinite(value).all())

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def reshape(self, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return value.reshape(shape)

    def transpose(self, value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return value.permute(tuple(order))

    def broadcast(self, value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return value.broadcast_to(shape)

    def take(self, value: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
        def part(place: Any) -> Any:
            if isinstance(place, slice) and place.step is not None:  # torch has no steps below 0
                return torch.arange(10**9)[place] if place.stop is not None else place
            return torch.from_numpy(np.array(place)) if isinstance(place, np.ndarray) else place

        found: torch.Tensor = value[tuple(map(part, index))]
        return found

    def put(self, target: torch.Tensor, index: tuple[Any, ...], value: torch.Tensor) -> None:
        raise NotImplementedError("the interpreter of terms stores nothing")


class DisturbedTorch(TorchDomain):
    """The same, in which every operation's result is off by a unit of rounding, up or down: what a gradient is made of by such
    noise alone, as the difference of numbers that are equal but for rounding, is then another one."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def _off(self, value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self._random) * 2 - 1
        return value * (1 + torch.finfo(torch.float64).eps * signs)

    def call(self, fn: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
        found = super().call(fn, args)
        return found if fn in EXACT or fn in CASTS else self._off(found)

    def reduce(self, op: str, value: torch.Tensor, axis: int) -> torch.Tensor:
        found = super().reduce(op, value, axis)
        return self._off(found) if op in ("sum", "prod") else found

    def contract(self, left: torch.Tensor, right: torch.Tensor, axis: int) -> torch.Tensor:
        return self._off(super().contract(left, right, axis))


@dataclass(frozen=True)
class Differentiated:
    """A program with inputs, cotangents of its outputs, and the gradients that autograd finds, by input; `has_values`:
    all outputs are numbers; `noise`: the seed of what every operation is off by, None where it is right."""

    program: Program
    tensors: Mapping[str, np.ndarray]
    scalars: Mapping[str, Any]
    extents: Mapping[str, int]
    cotangents: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    has_values: bool = True
    noise: int | None = None

    @staticmethod
    def of(
        source: str,
        tensors: Mapping[str, np.ndarray],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int],
        wrt: Sequence[str],
        seed: int = 0,
        constants: Mapping[str, Any] | None = None,
        noise: int | None = None,
    ) -> Differentiated:
        """Runs autograd; cotangents are drawn. Raises EqfuseError where the inputs do not fit."""
        program = with_stops(parse(source, scalars=constants), constants)
        axes = {program.domains.get(axis, axis) for axis in axes_of(program.outputs)}
        given = {axis: size for axis, size in sizes.items() if axis in axes}
        extents = bind(program, {name: array.shape for name, array in tensors.items()}, given, scalars)
        values: dict[str, Any] = {}
        for name, array in tensors.items():
            is_real = array.dtype.kind == "f"
            values[name] = torch.from_numpy(array.astype(np.float64)) if is_real else array
            if name in wrt:
                values[name].requires_grad_()
        numbers = dict(scalars)
        for name in wrt:
            if name in numbers:
                numbers[name] = torch.full(
                    (1,), float(numbers[name]), dtype=torch.float64, requires_grad=True
                )
        batch = 1 if any(isinstance(number, torch.Tensor) for number in numbers.values()) else None
        lifted = {
            name: value[None] if batch and isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        outputs = tuple(map(without_folds, program.outputs))
        found = evaluate(
            replace(program, outputs=outputs),
            lifted,
            numbers,
            extents,
            TorchDomain() if noise is None else DisturbedTorch(noise),
            batch=batch,
        )
        rng = np.random.default_rng(seed)
        cotangents: dict[str, np.ndarray] = {}
        total = torch.zeros((), dtype=torch.float64)
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                value = value[0] if batch else value
                is_none = torch.isnan(value.detach()).numpy()  # what it passes on is anything
                cotangents[name] = np.where(is_none, 0.0, rng.standard_normal(tuple(value.shape)))
                if value.requires_grad:
                    total = total + (value * torch.from_numpy(np.asarray(cotangents[name]))).sum()
        inputs = [values[name] if name in values else numbers[name] for name in wrt]
        grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if total.requires_grad:
            grads = torch.autograd.grad(total, inputs, allow_unused=True)
        gradients = {
            name: np.zeros(tuple(value.shape)) if grad is None else grad.numpy()
            for name, value, grad in zip(wrt, inputs, grads, strict=True)
        }
        for name in wrt:
            if name in numbers:
                gradients[name] = gradients[name][0]
        has_values = all(torch.isfinite(v).all() for v in found.values() if isinstance(v, torch.Tensor))
        return Differentiated(program, tensors, scalars, extents, cotangents, gradients, has_values, noise)

    def arguments(self, gradient: Program, constants: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a gradient of the program is called with: tensors, scalars and sizes."""
        known = {**self.tensors, **{f"d{name}": value for name, value in self.cotangents.items()}}
        tensors = {tensor.name: known[tensor.name] for tensor in gradient.tensors}
        numbers = {**self.scalars, **{name: float(v) for name, v in known.items() if v.ndim == 0}}
        scalars = {name: numbers[name] for name in gradient.scalars}
        axes = {gradient.domains.get(axis, axis) for axis in axes_of(gradient.outputs)}
        sizes = {axis: size for axis, size in self.extents.items() if axis in axes}
        for output in gradient.outputs:
            shape = np.shape(self.gradients[output.name.removeprefix("d")])
            sizes |= {gradient.domains.get(a, a): n for a, n in zip(output.axes, shape, strict=True)}
        return {"tensors": tensors, "scalars": scalars, "sizes": sizes}

    def found(self, gradient: Program, form: Segments | None = None) -> dict[str, np.ndarray]:
        """The gradients that a gradient program gives in float64, by input; in the order of its keys, where that is the `form`."""
        given = self.arguments(gradient)
        if self.noise is None and form is None:
            values = reference(gradient, **given)
            every = values if isinstance(values, tuple) else (values,)
            return {o.name.removeprefix("d"): v for o, v in zip(gradient.outputs, every, strict=True)}
        tensors, scalars = given["tensors"], given["scalars"]
        shapes = {name: array.shape for name, array in tensors.items()}
        extents = bind(gradient, shapes, given["sizes"], scalars)
        if form is not None:
            tensors, scalars = form.sampled(tensors, scalars, extents)
            gradient, extents = form.program, form.extents(extents)
        domain = FloatDomain() if self.noise is None else Disturbed("f64", self.noise)
        found = evaluate(gradient, tensors, scalars, extents, domain)
        return {o.name.removeprefix("d"): np.asarray(found[o.name]) for o in gradient.outputs}

    def error(
        self, gradient: Program, form: Segments | None = None, beside: Sequence[Differentiated] = ()
    ) -> float:
        """The largest difference of both, relative to the largest gradient; where autograd gives a number. NaN is right
        where an output is none. Only what stays the same for the inputs of all `beside` is compared."""
        worst = 0.0
        moved = [each.found(gradient, form) for each in beside]
        for name, value in self.found(gradient, form).items():
            expected = self.gradients[name]
            usable = np.isfinite(expected)
            if usable.any():
                scale = max(1.0, float(np.abs(expected[usable]).max()))
                for each, made in zip(beside, moved, strict=True):
                    usable = usable & (np.abs(each.gradients[name] - expected) <= STEADY * scale)
                    usable = usable & (np.abs(made[name] - value) <= STEADY * scale)
                if not self.has_values:
                    usable = usable & ~np.isnan(value)
                difference = np.abs(np.asarray(value, np.float64)[usable] - expected[usable])
                difference = np.where(np.isnan(difference), np.inf, difference)
                worst = max(worst, float(difference.max(initial=0.0)) / scale)
        return worst
