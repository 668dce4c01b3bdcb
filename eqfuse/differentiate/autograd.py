"""Kernels under torch's autograd: the gradient program of a kernel, compiled when a call first needs it.

A call on tensors that require grad is a `torch.autograd.Function`. Its backward calls the kernel of the gradient on what
the forward was called with, and on the cotangents. That kernel is called like any other, so that a second derivative is
the gradient of the gradient, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from eqfuse.differentiate.certify import certify_gradient
from eqfuse.differentiate.gradient import cotangent, differentiable, grad, real_outputs
from eqfuse.errors import VerificationError
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import axes_of
from eqfuse.terms.sizes import bind
from eqfuse.threads import cached
from eqfuse.verify.certificate import Certificate


class Compiled(Protocol):
    """A kernel, as it is called and differentiated."""

    @property
    def program(self) -> Program: ...

    @property
    def certificate(self) -> Certificate: ...

    @property
    def bound(self) -> float: ...

    def __call__(self, /, *unnamed: Any, sizes: Mapping[str, int] | None = None, **values: Any) -> Any: ...


@dataclass(frozen=True)
class GradientCertificate:
    """`adjoint`: that the program of the gradient is one (docs/gradients.md); `kernel`: that its kernel computes it."""

    adjoint: Certificate
    kernel: Certificate

    @property
    def ok(self) -> bool:
        return self.adjoint.ok and self.kernel.ok

    @property
    def bound(self) -> float:
        """The probability that a wrong gradient would have passed either."""
        return min(1.0, self.adjoint.bound + self.kernel.bound)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"the gradient's program:\n{self.adjoint}\nits kernel:\n{self.kernel}"


@dataclass
class Backward:
    """The gradient of a kernel by some of its inputs: `source`, its text, and `kernel`, which computes it."""

    program: Program
    constants: Mapping[str, float]
    source: str
    kernel: Compiled

    @cached
    def adjoint(self) -> Certificate:
        """That `source` is the gradient of the kernel's program."""
        return certify_gradient(
            self.program.source, self.source, scalars=self.constants, bound=self.kernel.bound
        )

    @property
    def certificate(self) -> GradientCertificate:
        """What was verified: that the program is the gradient, and that the kernel computes it."""
        return GradientCertificate(self.adjoint, self.kernel.certificate)

    def __getattr__(self, name: str) -> Any:
        """What a kernel shows: `plan`, `plans()`, `merge`, `loops`, `tile`, `triton`, `explain()`, `why_not()`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __repr__(self) -> str:
        return f"<gradient of {', '.join(output.name for output in self.program.outputs)}: {self.kernel!r}>"


@dataclass
class Gradients:
    """The gradients of one kernel, by the inputs that they are of. `compiled` makes a kernel of a text."""

    program: Program
    constants: Mapping[str, float]
    verifies: bool
    compiled: Callable[[str], Compiled]
    latest: Backward | None = None
    _known: dict[tuple[str, ...], Backward] = field(default_factory=dict)

    def by(self, names: tuple[str, ...]) -> Backward:
        """The gradient by these inputs. Raises VerificationError where the program of the gradient is not verified."""
        if names not in self._known:
            source = grad(self.program.source, names, scalars=self.constants)
            found = Backward(self.program, self.constants, source, self.compiled(source))
            if self.verifies and not found.adjoint.ok:
                raise VerificationError(
                    f"the gradient by {', '.join(names)} was not verified: {found.adjoint.reason}",
                    hint=str(
                        found.adjoint.counterexample or "no counterexample: too little could be compared"
                    ),
                    certificate=found.adjoint,
                )
            self._known[names] = found
        self.latest = self._known[names]
        return self.latest

    def shown(self) -> Backward:
        """The gradient of the last backward; before any, that by all tensors of real numbers."""
        if self.latest is not None:
            return self.latest
        tensors = {tensor.name for tensor in self.program.tensors}
        return self.by(tuple(name for name in differentiable(self.program) if name in tensors))


@dataclass(frozen=True)
class _Call:
    """One call: its kernel, its arguments that are no tensors, and the names of those that are."""

    kernel: Compiled
    gradients: Gradients
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    sizes: Mapping[str, int] | None

    def arguments(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        return {**self.constants, **dict(zip(self.names, tensors, strict=True))}


def differentiably(
    kernel: Compiled, gradients: Gradients, values: Mapping[str, Any], sizes: Mapping[str, int] | None
) -> Any:
    """The outputs of a kernel, as autograd sees them."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in values.items() if name not in tensors}
    call = _Call(kernel, gradients, tuple(tensors), constants, sizes)
    return _Differentiable.apply(call, *tensors.values())  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> Any:
        return call.kernel(**call.arguments(tensors), sizes=call.sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call, *tensors = inputs
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.call = call
        ctx.shapes = [(value.shape, value.dtype, value.device) for value in outputs]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(value for value in outputs if not value.is_floating_point()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        tensors: tuple[torch.Tensor, ...] = ctx.saved_tensors
        wanted = [name for name, needed in zip(call.names, ctx.needs_input_grad[1:], strict=True) if needed]
        found = dict(
            zip(wanted, _pulled_back(call, tensors, tuple(wanted), cotangents, ctx.shapes), strict=True)
        )
        return None, *(found.get(name) for name in call.names)


def _pulled_back(
    call: _Call,
    tensors: Sequence[torch.Tensor],
    wanted: tuple[str, ...],
    cotangents: Sequence[torch.Tensor | None],
    shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
) -> Iterator[torch.Tensor]:
    """The gradients by the inputs `wanted`, in their dtypes."""
    program = call.gradients.program
    backward = call.gradients.by(wanted)
    values = call.arguments(tensors)
    names = [output.name for output in program.outputs]
    real = real_outputs(program)
    for name, value, (shape, dtype, device) in zip(names, cotangents, shapes, strict=True):
        if name in real:
            zero = torch.zeros((), dtype=dtype, device=device)
            values[cotangent(name)] = zero.expand(shape) if value is None else value
    by_name = dict(zip(call.names, tensors, strict=True))
    known = backward.kernel.program
    reads = {*(tensor.name for tensor in known.tensors), *known.scalars}
    made = backward.kernel(
        **{name: value for name, value in values.items() if name in reads},
        sizes=_sizes(program, known, values, call.sizes, {cotangent(n): by_name[n] for n in wanted}),
    )
    for name, value in zip(wanted, made if isinstance(made, tuple) else (made,), strict=True):
        yield value.to(by_name[name].dtype).reshape(by_name[name].shape)


def _sizes(
    program: Program,
    gradient: Program,
    values: Mapping[str, Any],
    sizes: Mapping[str, int] | None,
    results: Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """The sizes of the axes of a gradient: those of the call, and of what it is the gradient of."""
    ranks = {tensor.name: tensor.rank for tensor in program.tensors}
    shapes = {name: tuple(values[name].shape) for name in ranks}
    scalars = {
        name: value.item() if isinstance(value, torch.Tensor) and name in program.integers else value
        for name, value in values.items()
        if name in program.scalars
    }
    extents = bind(program, shapes, sizes, scalars)
    axes = {gradient.domains.get(axis, axis) for axis in axes_of(gradient.outputs)}
    found = {
        axis: extent for axis, extent in extents.items() if axis in axes and axis not in gradient.lengths
    }
    for output in gradient.outputs:
        shape = results[output.name].shape if output.axes else ()
        found |= {gradient.domains.get(a, a): n for a, n in zip(output.axes, shape, strict=True)}
    return found
