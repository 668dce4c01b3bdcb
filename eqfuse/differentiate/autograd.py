"""Kernels under torch's autograd: the gradient program of a kernel, compiled when a call first needs it.

A call on tensors that require grad is a `torch.autograd.Function`. Its forward also computes what the gradient reads of it
(`saved`). Its backward calls the kernel of the gradient on what the forward was called with, on what it saved and on the
cotangents. With `create_graph` it reads the inputs and cotangents alone: that kernel is called like any other, so that a
second derivative is the gradient of the gradient, and so on.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._functorch import maybe_current_level

from eqfuse.differentiate.certify import certify_gradient, certify_jvp
from eqfuse.differentiate.chunks import divisible
from eqfuse.differentiate.divide import Callee, ChunkedCall
from eqfuse.differentiate.gradient import (
    as_read,
    cotangents,
    differentiable,
    divided,
    grad,
    gradient_sizes,
    jvp,
    outputs_by,
    saving_gradient,
    scaled_gradient,
)
from eqfuse.differentiate.saved import Saved, most_stored, saves_time
from eqfuse.errors import EqfuseError
from eqfuse.extract.call_estimate import MUCH
from eqfuse.terms.arguments import Absent, is_batched_by_older_vmap, is_tracked
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.sizes import bind, check_ranks
from eqfuse.threads import Lock, cached, cores, undisturbed
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.equivalence import equivalent
from eqfuse.verify.refusal import refused


class ChunkedCallee(Callee, Protocol):
    """A kernel that is called, that is made ready for a call of such tensors and numbers, and that says how its last call ran in chunks."""

    def make_ready(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> None: ...

    def extents(self, shapes: Mapping[str, Sequence[Any]], sizes: Mapping[str, Any]) -> dict[str, Any]: ...

    def shaped(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> list[torch.Tensor]: ...

    def into(
        self, out: Mapping[str, torch.Tensor], values: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Mapping[str, torch.Tensor]: ...

    @property
    def chunks(self) -> ChunkedCall | None: ...


@dataclass(frozen=True)
class GradientCertificate:
    """`adjoint`: that the program of the gradient is one (docs/gradients.md); `kernel`: that its kernel computes it;
    `forward`: that what it reads of the forward is what that computes, where it saves anything but outputs; `chunks`, of a
    call that ran in chunks: that they give the same, and that their kernels compute them; `loss`, where the forward makes the gradient: that
    its program gives the outputs of the source."""

    adjoint: Certificate
    kernel: Certificate
    forward: Certificate | None = None
    chunks: tuple[Certificate, ...] = ()
    loss: Certificate | None = None

    @property
    def ok(self) -> bool:
        return all(part.ok for part in self._parts)

    @property
    def bound(self) -> float:
        """The probability that a wrong gradient would have passed all of them."""
        return min(1.0, sum(part.bound for part in self._parts))

    @property
    def _parts(self) -> tuple[Certificate, ...]:
        parts = (self.adjoint, self.kernel, self.forward, self.loss, *self.chunks)
        return tuple(part for part in parts if part is not None)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        text = f"the gradient's program:\n{self.adjoint}\nits kernel:\n{self.kernel}"
        text += "" if self.forward is None else f"\nthe kernel of what it saves:\n{self.forward}"
        text += "" if self.loss is None else f"\nthe outputs of that program:\n{self.loss}"
        return text + "".join(f"\nchunks:\n{part}" for part in self.chunks)


@dataclass
class Backward:
    """The gradient of a kernel by some of its inputs: `source`, its text, and `kernel`, which computes it.

    `saved` are the outputs and residuals of the forward that it reads. `forward` is the kernel that gives the residuals
    after the outputs; None where there are none. `whole` is the source with the definitions of what is saved. Where there are `units`, the
    forward has made the gradients, for a cotangent of 1: what is saved of each, by the name of the gradient."""

    program: Program
    constants: Mapping[str, float]
    source: str
    whole: str
    saved: tuple[str, ...]
    forward: ChunkedCallee | None
    kernel: ChunkedCallee
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def scales(self) -> bool:
        """Whether the forward has made the gradients."""
        return bool(self.units)

    @cached
    def loss(self) -> Certificate | None:
        """That the program of a forward which makes the gradient gives the outputs of the kernel's."""
        if self.forward is None or not self.scales:
            return None
        known = {"scalars": self.constants, "bound": self.kernel.bound}
        return same_outputs(self.program, self.forward.program, **known)  # type: ignore[arg-type]

    @cached
    def adjoint(self) -> Certificate:
        """That `whole` is the gradient of the kernel's program."""
        return certify_gradient(
            self.program.source, self.whole, scalars=self.constants, bound=self.kernel.bound
        )

    @property
    def certificate(self) -> GradientCertificate:
        """What was verified: that the program is the gradient, and that the kernels compute it."""
        forward = None if self.forward is None else self.forward.certificate
        kernels = (self.kernel,) if self.forward is None else (self.kernel, self.forward)
        chunked = [kernel.chunks for kernel in kernels if kernel.chunks is not None]
        chunks = tuple(part for call in chunked for part in call.certificates)
        return GradientCertificate(self.adjoint, self.kernel.certificate, forward, chunks, self.loss)

    @property
    def said(self) -> str:
        """How the gradient is made, in a sentence."""
        names = ", ".join(output.name for output in self.kernel.program.returned)
        if self.scales:
            return f"The forward makes {names} for a cotangent of 1; the backward multiplies."
        return f"The backward makes {names}" + (
            f", and reads {', '.join(self.saved)} of the forward." if self.saved else "."
        )

    def __getattr__(self, name: str) -> Any:
        """What a kernel shows: `plan`, `plans()`, `merge`, `loops`, `tile`, `triton`, `explain()`, `why_not()`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __repr__(self) -> str:
        made = ", made with the forward" if self.scales else ""
        return f"<gradient of {', '.join(output.name for output in self.program.returned)}{made}: {self.kernel!r}>"


def same_outputs(
    program: Program, other: Program, *, scalars: Mapping[str, float], bound: float
) -> Certificate:
    """Whether another program, which gives more, gives the outputs of a program."""
    own = {output.name for output in program.outputs}
    alike = replace(other, outputs=tuple(output for output in other.outputs if output.name in own))
    return equivalent(program, alike, scalars=scalars, bound=bound, allow="untaken", prove=False)


Halves = tuple[tuple[str, str], ...]
"""Inputs of half precision, each with its dtype."""

_HALVES: Mapping[torch.dtype, str] = {torch.float16: "f16", torch.bfloat16: "bf16"}


def saves_in(dtypes: Iterable[torch.dtype]) -> str | None:
    """The dtype of what is saved for inputs of these: float64 where one has it, as what is made of sizes alone would not; float32 where outputs
    may be halves; None where it is that of outputs."""
    found = set(dtypes)
    if torch.float64 in found:
        return "f64"
    return None if found.isdisjoint(_HALVES) else "f32"


def halves_in(dtypes: Mapping[str, torch.dtype]) -> Halves:
    """The inputs of half precision among these."""
    return tuple((name, _HALVES[dtype]) for name, dtype in dtypes.items() if dtype in _HALVES)


@dataclass(frozen=True)
class Forward:
    """What a call runs whose gradient may be asked for: `kernel` gives the `residuals` after the outputs; it is None where
    there are none. `outputs` are those that are saved too. `scales`: the residuals are gradients for a cotangent of 1."""

    kernel: ChunkedCallee | None = None
    outputs: tuple[str, ...] = ()
    residuals: tuple[str, ...] = ()
    scales: bool = False


class Extents(NamedTuple):
    """The sizes of a call: the extents of axes, and the positions of the inputs that gradients are asked by."""

    of: Mapping[str, int]
    positions: int


@dataclass
class Gradients:
    """The gradients of one kernel, by the inputs that they are of. `compiled` makes a kernel of a text."""

    program: Program
    constants: Mapping[str, float]
    verifies: bool
    compiled: Callable[[str], ChunkedCallee]
    latest: Backward | None = None
    calls: dict[tuple[object, ...], Pulled] = field(default_factory=dict)
    _known: dict[tuple[object, ...], Backward] = field(default_factory=dict)
    _outputs_by: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict)
    _saved: dict[tuple[object, ...], Saved | None] = field(default_factory=dict)
    _forwards: dict[tuple[object, ...], Forward] = field(default_factory=dict)
    _along: dict[tuple[str, ...], ChunkedCallee] = field(default_factory=dict)
    begun: set[tuple[object, ...]] = field(default_factory=set)
    """The kinds of calls whose backward was made ready beforehand."""
    lock: Lock = field(default_factory=Lock, repr=False)
    """Held by whoever makes a gradient."""

    @cached
    def outputs(self) -> tuple[str, ...]:
        """The names of the program's outputs."""
        return tuple(output.name for output in self.program.returned)

    def outputs_by(self, names: tuple[str, ...]) -> frozenset[str]:
        """Those that have a gradient by some of these inputs."""
        if names not in self._outputs_by:
            self._outputs_by[names] = outputs_by(self.program, names, self.constants)
        return self._outputs_by[names]

    def extents(
        self,
        kernel: ChunkedCallee,
        names: tuple[str, ...],
        shapes: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int] | None,
    ) -> Extents | None:
        """What decides whether the forward of a call makes the gradients by these inputs; None where it makes none, and where tensors are
        missing, as the call says. Raises BindError for ranks and sizes that do not fit."""
        known = {tensor.name for tensor in self.program.tensors}
        if not known <= shapes.keys() or not self.is_of_loss(names):
            return None
        own = {name: tuple(shapes[name]) for name in known}
        check_ranks(self.program, own)
        return Extents(kernel.extents(own, sizes or {}), sum(math.prod(shapes[name]) for name in names))

    def is_of_loss(self, names: tuple[str, ...]) -> bool:
        """Whether gradients by these inputs are of one output, and it has no axes."""
        found = self.outputs_by(names)
        return len(found) == 1 and not any(o.axes for o in self.program.returned if o.name in found)

    @cached
    def real(self) -> frozenset[str]:
        """The inputs that have a gradient."""
        return frozenset(differentiable(self.program))

    def forward(
        self,
        names: tuple[str, ...],
        saves: str | None = None,
        halves: Halves = (),
        extents: Extents | None = None,
    ) -> Forward:
        """What saves what gradients by these inputs read, residuals in the dtype `saves` where it is given. What has no
        gradient saves nothing: its backward says so. It makes the gradients itself where that takes less in a call of these `extents`."""
        with self.lock:
            scaled = None if extents is None else self._pays(names, saves, halves, extents)
            key = names, saves, None if scaled is None else halves
            if key not in self._forwards:
                saved = scaled or self._plain(names, saves)
                kernel = self.compiled(saved.forward) if saved is not None and saved.residuals else None
                outputs, residuals = ((), ()) if saved is None else (saved.outputs, saved.residuals)
                self._forwards[key] = Forward(kernel, outputs, residuals, scaled is not None)
            return self._forwards[key]

    def _pays(
        self, names: tuple[str, ...], saves: str | None, halves: Halves, extents: Extents
    ) -> Saved | None:
        """The gradient that the forward makes, where it is predicted to take less than one that computes products of the forward again."""
        saved = self._plain(names, saves)
        if saved is None or not saves_time(saved.again, extents.of, extents.positions):
            return None
        scaled = self._scaled(names, None, saves, halves)
        if scaled is None or most_stored(saved.again, extents.of) <= MUCH:
            return scaled
        return scaled if divisible(scaled.forward, saved.again, self.constants) else None

    def _plain(self, names: tuple[str, ...], saves: str | None) -> Saved | None:
        """The gradient that reads what is cheaper to save than to make again; None where there is no gradient."""
        key = names, saves
        if key not in self._saved:
            self._saved[key] = None
            with suppress(EqfuseError):  # the backward says why
                self._saved[key] = self._saving(names, saves=saves)
        return self._saved[key]

    def _scaled(
        self, of: tuple[str, ...], names: tuple[str, ...] | None, saves: str | None, halves: Halves
    ) -> Saved | None:
        """The gradient by the inputs `names` that the forward for gradients `of` inputs has made; None where it makes none."""
        key = of, names, saves, halves
        if key not in self._saved:
            options = {"scalars": self.constants, "strict_casts": self.program.strict_casts}
            options |= {"halves": dict(halves), "saves": saves}
            self._saved[key] = None
            with suppress(EqfuseError):  # the other gradient is there
                self._saved[key] = scaled_gradient(self.program.source, of, names, **options)  # type: ignore[arg-type]
        return self._saved[key]

    def by(
        self,
        names: tuple[str, ...],
        of: tuple[str, ...],
        alike: bool,
        halves: Halves = (),
        saves: str | None = None,
        scales: bool = False,
    ) -> Backward:
        """The gradient by the inputs `names`, which reads what the forward for gradients `of` more inputs has saved;
        `alike`: dimensions that are divided alike are as long; `halves` are those among the inputs `names`. Where it `scales`, that forward has
        made it, and `halves` are those among the inputs that this was `of`. Raises VerificationError where the program of the gradient is not verified."""
        key = names, of, alike and not scales, halves, saves, scales
        with self.lock:
            if key not in self._known:
                if scales:
                    forward, saved = self._forwards[of, saves, halves], self._scaled(of, names, saves, halves)
                else:
                    forward = self.forward(of, saves)
                    saved = self._saving(names, {*forward.outputs, *forward.residuals}, alike, halves)
                assert saved is not None
                read = (*saved.outputs, *saved.residuals)
                kernel = forward.kernel if saved.residuals else None
                self._known[key] = self._made(names, saved.backward, saved.whole, read, kernel, saved.units)
            return self._known[key]

    def alone(self, names: tuple[str, ...]) -> Backward:
        """The gradient by these inputs from inputs alone, which has a gradient itself."""
        with self.lock:
            if names not in self._known:
                source = grad(self.program.source, names, scalars=self.constants)
                self._known[names] = self._made(names, source, source, (), None)
            return self._known[names]

    def jvp(self, names: tuple[str, ...]) -> ChunkedCallee:
        """The directional derivative along tangents of these inputs. Raises VerificationError where its program is not verified."""
        if names not in self._along:
            source = jvp(self.program.source, names, scalars=self.constants)
            kernel = self.compiled(source)
            if self.verifies:
                known = {"scalars": self.constants, "bound": kernel.bound}
                certificate = certify_jvp(self.program.source, source, names, **known)  # type: ignore[arg-type]
                if not certificate.ok:
                    raise refused(
                        f"the directional derivative by {', '.join(names)}", certificate, gradient=True
                    )
            self._along[names] = kernel
        return self._along[names]

    def shown(self) -> Backward:
        """The gradient of the last backward; before any, that by all tensors of real numbers."""
        if self.latest is not None:
            return self.latest
        tensors = {tensor.name for tensor in self.program.tensors}
        names = tuple(name for name in differentiable(self.program) if name in tensors)
        return self.by(names, names, alike=True)

    def _saving(
        self,
        names: tuple[str, ...],
        only: Collection[str] | None = None,
        alike: bool = False,
        halves: Halves = (),
        saves: str | None = None,
    ) -> Saved:
        source, strict = self.program.source, self.program.strict_casts
        options = {"only": only, "strict_casts": strict, "alike": alike, "halves": dict(halves)}
        options["saves"] = saves
        return saving_gradient(source, names, scalars=self.constants, **options)  # type: ignore[arg-type]

    def _made(
        self,
        names: tuple[str, ...],
        source: str,
        whole: str,
        saved: tuple[str, ...],
        forward: ChunkedCallee | None,
        units: Mapping[str, str] | None = None,
    ) -> Backward:
        kernel = self.compiled(source)
        found = Backward(self.program, self.constants, source, whole, saved, forward, kernel, units or {})
        if self.verifies and not found.adjoint.ok:
            raise refused(f"the gradient by {', '.join(names)}", found.adjoint, gradient=True)
        if self.verifies and found.loss is not None and not found.loss.ok:
            raise refused("the loss with its gradients", found.loss, gradient=True)
        return found


@dataclass(frozen=True, eq=False)
class DifferentiableCall:
    """What runs calls of a kind that autograd sees: the kernel, the names of tensors and of numbers, and of the tensors those that
    gradients may be asked by."""

    kernel: ChunkedCallee
    gradients: Gradients
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    tracked: tuple[str, ...]
    sizes: Mapping[str, int] | None
    saves: str | None
    halves: Halves
    extents: Extents | None
    pulled: dict[tuple[tuple[bool, ...], bool], Pulled] = field(default_factory=dict)
    """What backwards have run, by which tensors need a gradient and whether that may be differentiated again."""
    beforehand: list[Future[None]] = field(default_factory=list)
    """What makes the backward ready before it is called."""

    @staticmethod
    def of(
        kernel: ChunkedCallee,
        gradients: Gradients,
        values: Mapping[str, Any],
        sizes: Mapping[str, int] | None,
    ) -> DifferentiableCall:
        """What runs a call, and others with tensors of the same shapes and dtypes and with the same integers."""
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        numbers = tuple(name for name in values if name not in tensors)
        real = gradients.real
        tracked = tuple(name for name, tensor in tensors.items() if is_tracked(tensor) and name in real)
        saves = saves_in(tensor.dtype for tensor in tensors.values())
        halves = halves_in({name: tensors[name].dtype for name in tracked if name in tensors})
        sizes = None if sizes is None else dict(sizes)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        # Under transforms of `torch.func` what is saved counts as a constant, and is not read.
        extents = gradients.extents(kernel, tracked, shapes, sizes) if maybe_current_level() is None else None
        return DifferentiableCall(
            kernel, gradients, tuple(tensors), numbers, tracked, sizes, saves, halves, extents
        )

    def __call__(self, values: Mapping[str, Any], addresses: Sequence[int] = ()) -> Any:
        """The outputs of a call, as autograd sees them."""
        numbers = {name: values[name] for name in self.numbers}
        # torch looks at the signature of a function with a context apart, at every call: only its transforms need that.
        is_transformed = maybe_current_level() is not None
        function = _Transformed if is_transformed else _Differentiable
        if not (self.beforehand or self.pulled or is_transformed) and self._is_worth_it(values):
            with suppress(Exception), undisturbed():  # what is wrong with its arguments the call raises
                ready = partial(copy_context().run, self._make_ready, self._absent(values))
                self.beforehand.append(_Prepares.thread.submit(ready))
        found = function.apply(self, numbers, *[values[name] for name in self.names])  # type: ignore[no-untyped-call]
        outputs = found[: len(self.gradients.program.returned)]
        return outputs if len(outputs) > 1 else outputs[0]

    @cached
    def forward(self) -> Forward:
        return self.gradients.forward(self.tracked, self.saves, self.halves, self.extents)

    @cached
    def _runs(self) -> tuple[ChunkedCallee, Mapping[str, int] | None]:
        """The kernel of outputs and residuals, and the sizes that it is given."""
        kernel = self.forward.kernel
        if kernel is None:
            return self.kernel, self.sizes
        axes = {*sized_axes(kernel.program), *kernel.program.domains.values()}
        sizes = {axis: size for axis, size in (self.sizes or {}).items() if axis in axes}
        return kernel, sizes or None

    def _is_worth_it(self, values: Mapping[str, Any]) -> bool:
        """Whether the backward of a call is made ready while its forward is: where both are compiled for a GPU, and no call like it was."""
        tensors = [values[name] for name in self.names]
        if not any(tensor.is_cuda for tensor in tensors) or cores() < LEAST_CORES:
            return False
        sizes = tuple(sorted((self.sizes or {}).items()))
        like = (self.names, self.tracked, sizes, *((x.shape, x.stride(), x.dtype, x.device) for x in tensors))
        begun = self.gradients.begun
        if like in begun:
            return False
        if len(begun) >= MOST_CALLS:
            begun.clear()
        begun.add(like)
        return True

    def _absent(self, values: Mapping[str, Any]) -> Pullback:
        """What the backward of a call is given, without memory."""
        kernel, sizes = self._runs
        tensors = [Absent.like(values[name]) for name in self.names]
        numbers = {name: values[name] for name in self.numbers}
        named = {name: each.meta for name, each in zip(self.names, tensors, strict=True)}
        shaped = kernel.shaped(named, numbers, sizes or {})
        made = [Absent(each, tensors[0].device) for each in shaped]
        every = (*tensors, *(made[place] for place in self.saved.values()))
        return Pullback(every, made[: len(self.gradients.outputs)], numbers)

    def _make_ready(self, given: Pullback) -> None:
        """Derives, plans, verifies and begins to compile the backward of a call by all of its tracked inputs. What goes wrong the backward
        meets again, and raises."""
        if threading.main_thread().is_alive():  # else Python ends, and waits for this thread
            known = _known(self, given, self.tracked, False)
            read = known.read(given)
            tensors = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
            numbers = {name: value for name, value in read.items() if name not in tensors}
            known.backward.kernel.make_ready(tensors, numbers, known.sizes)

    @cached
    def saved(self) -> Mapping[str, int]:
        """What the gradient reads of a forward: its places among what that gives, by name."""
        places = {name: place for place, name in enumerate(self.gradients.outputs)}
        count = len(places)
        residuals = {name: count + place for place, name in enumerate(self.forward.residuals)}
        return {**{name: places[name] for name in self.forward.outputs}, **residuals}

    @cached
    def constant(self) -> tuple[int, ...]:
        """The places of what a forward gives that has no gradient."""
        outputs, differentiable = self.gradients.outputs, self.gradients.outputs_by(self.tracked)
        every = range(len(outputs) + len(self.forward.residuals))
        return tuple(
            place for place in every if place >= len(outputs) or outputs[place] not in differentiable
        )

    def made(self, numbers: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs and the residuals."""
        kernel, sizes = self._runs
        values = dict(zip(self.names, tensors, strict=True))
        found = kernel(**values, **numbers, sizes=sizes)
        return found if isinstance(found, tuple) else (found,)


LEAST_CORES = 4
"""Cores below which backwards are not made ready beforehand: forwards would wait for them."""


class _Prepares:
    """Makes backwards ready while forwards are compiled: one at a time, as Python runs one thread at a time."""

    thread: ThreadPoolExecutor

    @classmethod
    def start(cls) -> None:
        cls.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eqfuse prepares")


_Prepares.start()
os.register_at_fork(after_in_child=_Prepares.start)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: DifferentiableCall, numbers: Mapping[str, Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = call.made(numbers, tensors)
        _keep(ctx, call, numbers, tensors, made)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        return _backward(ctx, cotangents, replaces=not keeps)


class _Transformed(torch.autograd.Function):
    """The same under transforms of `torch.func`."""

    @staticmethod
    def forward(
        call: DifferentiableCall, numbers: Mapping[str, Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return call.made(numbers, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        call, numbers, *tensors = inputs
        _keep(ctx, call, numbers, tensors, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, cotangents)


def _keep(
    ctx: Any,
    call: DifferentiableCall,
    numbers: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
) -> None:
    """Keeps what the gradient reads."""
    ctx.call, ctx.numbers = call, numbers
    ctx.forms = [(value.shape, value.dtype, value.device) for value in made[: len(call.gradients.outputs)]]
    ctx.save_for_backward(*tensors, *[made[place] for place in call.saved.values()])
    if call.constant:
        ctx.mark_non_differentiable(*[made[place] for place in call.constant])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, cotangents: Sequence[torch.Tensor | None], replaces: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The gradients by the inputs that need one, in their dtypes. Where they may be differentiated again, nothing that was saved
    is read: it would count as a constant. `replaces`: no other backward will read what was saved, so that gradients may take its memory."""
    call: DifferentiableCall = ctx.call
    above = [
        torch.zeros((), dtype=dtype, device=device).expand(shape) if value is None else value
        for value, (shape, dtype, device) in zip(cotangents, ctx.forms, strict=False)
    ]
    given = Pullback(ctx.saved_tensors, above, ctx.numbers)  # a checkpoint gives them once
    key = ctx.needs_input_grad[2:], torch.is_grad_enabled()
    known = call.pulled.get(key)
    if known is None:
        for each in call.beforehand:
            each.cancel()  # where it has not begun
        wanted = tuple(name for name, is_needed in zip(call.names, key[0], strict=True) if is_needed)
        known = call.pulled[key] = _known(call, given, wanted, key[1])
    call.gradients.latest = known.backward
    kernel, values = known.backward.kernel, known.read(given)
    is_plain = maybe_current_level() is None and not any(map(is_batched_by_older_vmap, above))
    out = known.replaced(given) if replaces and is_plain else {}
    if out:
        by_name = kernel.into(out, values, known.sizes)
        made = tuple(by_name[output.name] for output in kernel.program.returned)
    else:
        made = kernel(**values, sizes=known.sizes)
    found: list[torch.Tensor | None] = [None] * len(call.names)
    for place, value in zip(known.results, made if isinstance(made, tuple) else (made,), strict=True):
        like = given.tensors[place]
        value = value if value.dtype == like.dtype else value.to(like.dtype)
        found[place] = value if value.shape == like.shape else value.reshape(like.shape)
    return None, None, *found


MOST_CALLS = 1024

LEAST_REPLACED = 1 << 20
"""Bytes of a saved gradient whose memory the gradient takes: a call that writes to memory of its caller is looked at each time."""


class Pullback(NamedTuple):
    """What a backward is given: the `tensors` of the call and what is saved of its forward, a cotangent for each output, and numbers by name."""

    tensors: Sequence[torch.Tensor]
    cotangents: Sequence[torch.Tensor]
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Pulled:
    """What the backward of calls that are alike runs, and what its kernel reads by name: places of tensors, of cotangents, and numbers. It is given
    `sizes`; `results` are the places of the inputs that its gradients are by."""

    backward: Backward
    tensors: tuple[tuple[str, int], ...]
    cotangents: tuple[tuple[str, int], ...]
    numbers: tuple[str, ...]
    sizes: Mapping[str, int]
    results: tuple[int, ...]

    def replaced(self, given: Pullback) -> dict[str, torch.Tensor]:
        """The memory of saved gradients for a cotangent of 1, by the names of those which are multiples of them, where that is much."""
        places, units = dict(self.tensors), self.backward.units
        names = (output.name for output in self.backward.kernel.program.returned)
        found = dict[str, torch.Tensor]()
        for name, like in zip(names, self.results, strict=True):
            unit = given.tensors[places[units[name]]] if name in units else None
            if unit is not None and unit.is_cuda and unit.nbytes >= LEAST_REPLACED:
                found |= {name: unit} if unit.dtype == given.tensors[like].dtype else {}
        return found

    def read(self, given: Pullback) -> dict[str, Any]:
        """The arguments of the kernel."""
        program = self.backward.kernel.program
        found: dict[str, Any] = {}
        for name, place in self.tensors:
            found[name] = as_read(program, name, given.tensors[place])
        for name, place in self.cotangents:
            found[name] = as_read(program, name, given.cotangents[place])
        for name in self.numbers:
            found[name] = given.numbers[name]
        return found


def _known(
    call: DifferentiableCall, given: Pullback, wanted: tuple[str, ...], is_differentiated: bool
) -> Pulled:
    """What the backward of a call runs; found once for calls that are alike."""
    gradients, program = call.gradients, call.gradients.program
    values = {**given.numbers, **dict(zip(call.names, given.tensors, strict=False))}
    integers = [(n, _number(values[n])) for n in program.integers if n in values]
    kinds = tuple((values[name].shape, values[name].dtype) for name in call.names)
    sizes = tuple(sorted((call.sizes or {}).items()))
    scales = not is_differentiated and call.forward.scales
    key = (*integers, call.names, kinds, sizes, call.tracked, wanted, is_differentiated, scales)
    found = gradients.calls.get(key)
    if found is None:
        alike = all(len({values[name].shape[k] for name, k in group}) == 1 for group in divided(program))
        if is_differentiated:
            backward = gradients.alone(wanted)
        else:
            halves = call.halves if scales else halves_in({name: values[name].dtype for name in wanted})
            backward = gradients.by(wanted, call.tracked, alike, halves, call.saves, scales)
        known, named = backward.kernel.program, cotangents(program)
        results = {named[name]: values[name] for name in wanted}
        shapes = {tensor.name: tuple(values[tensor.name].shape) for tensor in program.tensors}
        scalars = {
            name: _number(values[name]) if name in program.integers else values[name]
            for name in program.scalars
            if name in values
        }
        extents = bind(program, shapes, call.sizes, scalars)
        own = gradient_sizes(known, extents, {name: each.shape for name, each in results.items()})
        if len(gradients.calls) >= MOST_CALLS:
            gradients.calls.clear()
        reads = (*(tensor.name for tensor in known.tensors), *known.scalars)
        places = {name: place for place, name in enumerate((*call.names, *call.saved))}
        above = {named[name]: place for place, name in enumerate(gradients.outputs) if name in named}
        found = gradients.calls[key] = Pulled(
            backward,
            tuple((name, places[name]) for name in reads if name in places),
            tuple((name, above[name]) for name in reads if name in above),
            tuple(name for name in reads if name in given.numbers),
            own,
            tuple(call.names.index(name) for name in wanted),
        )
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
