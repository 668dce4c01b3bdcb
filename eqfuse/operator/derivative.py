"""The derivative of `eqfuse::call`: the same operator, of the gradient's kernel.

It is registered below torch's transforms, at the key of autograd, so that a compiler that traces a joint graph, and
`torch.func` at any depth, find it. In forward mode it is the operator of the directional derivative's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

from eqfuse.operator.content import Called, kernel_of, names_in, names_text, operator_of
from eqfuse.operator.library import arguments, called, run
from eqfuse.operator.shapes import Size, has_hint, hint
from eqfuse.terms.arguments import has_tangent, looking_at_tangents, without_tangent
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import sized_axes

Form = tuple[torch.Size, torch.dtype]
"""The shape and the dtype of a tensor."""


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, torch computes numbers, whatever records or transforms what is called around it."""
    with torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield


def as_below() -> AbstractContextManager[None]:
    """Inside, transforms of `torch.func` that are further out look at tangents again: a function of autograd looks at none."""
    return looking_at_tangents(True) if maybe_current_level() is not None else nullcontext()


def recorded(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any] = (),
    reals: Sequence[Any] = (),
) -> Sequence[torch.Tensor]:
    """The operator at autograd's key."""
    for tensor in tensors:
        if tensor.requires_grad or type(tensor) is not torch.Tensor or tensor.is_meta or has_tangent(tensor):
            break
    else:
        if not torch._C._len_torch_dispatch_stack() and maybe_current_level() is None:
            return run(content, names, tensors, integers, reals)
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    moved = tuple(n for n, t in zip(names_in(names)[0], tensors, strict=True) if has_tangent(t))
    if not tracked and not moved:
        with torch._C._AutoDispatchBelowAutograd():
            return _operator(content, names, tensors, integers, reals)
    with enable_single_level_autograd_function():
        made = _Recorded.apply(content, names, integers, reals, moved, *tensors)  # type: ignore[attr-defined]
    return list(made[: len(kernel_of(content).program.returned)])


def _operator(
    content: str, names: str, tensors: Sequence[torch.Tensor], integers: Sequence[Any], reals: Sequence[Any]
) -> Sequence[torch.Tensor]:
    found: Sequence[torch.Tensor] = operator_of(content)(content, names, tensors, integers, reals)
    return found


@dataclass(frozen=True)
class _Forward:
    """What a call runs whose gradient may be asked for by the inputs `by`, or that has tangents: the operator of the kernel, or of one that gives
    more after its `count` outputs, of which those at `constant` places have no gradient. `saved` are the places, by name, of
    what is kept for the gradient; `scales`: these are gradients for a cotangent of 1."""

    content: str
    by: tuple[str, ...]
    count: int
    constant: tuple[int, ...]
    saved: Mapping[str, int]
    scales: bool

    @staticmethod
    def of(
        content: str,
        names: str,
        moved: tuple[str, ...],
        tensors: Sequence[torch.Tensor],
        integers: Sequence[Any],
        reals: Sequence[Any],
    ) -> _Forward:
        from eqfuse.differentiate.gradient import differentiable  # derivatives are for those who ask

        with untraced():
            kernel = kernel_of(content)
            real = differentiable(kernel.program)
            given = zip(names_in(names)[0], tensors, strict=True)
            by = tuple(name for name, tensor in given if tensor.requires_grad and name in real)
            by_name, _, sizes = arguments(names, tensors, integers, reals)
            dtypes = {name: tensor.dtype for name, tensor in by_name.items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in by_name.items()}
            if moved or not all(map(has_hint, (*sizes.values(), *chain(*shapes.values())))):
                saving = kernel.forward(by, dtypes)
            else:
                examples = {name: [hint(size) for size in shape] for name, shape in shapes.items()}
                lengths = {axis: hint(size) for axis, size in sizes.items()}
                saving = kernel.forward(by, dtypes, examples, lengths)
            kernel_of(saving.kernel.content)
            tracked = saving.tracked | kernel.outputs_by(tuple(name for name in moved if name in real))
        outputs = [output.name for output in kernel.program.returned]
        every = (*outputs, *saving.residuals)
        saved = {name: every.index(name) for name in (*saving.outputs, *saving.residuals)}
        constant = tuple(place for place, name in enumerate(outputs) if name not in tracked)
        return _Forward(saving.kernel.content, by, len(outputs), constant, saved, saving.scales)

    def __call__(
        self, names: str, tensors: Sequence[torch.Tensor], integers: Sequence[Any], reals: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        """The outputs, and what is saved besides."""
        of_tensors, of_integers, of_reals, axes = names_in(names)
        known = kernel_of(self.content).program
        own = {*sized_axes(known), *known.domains.values()}
        sizes = dict(zip(axes, integers[len(of_integers) :], strict=True))
        kept = {axis: size for axis, size in sizes.items() if axis in own}
        names = names_text(list(of_tensors), list(of_integers), list(of_reals), list(kept))
        return _operator(self.content, names, tensors, [*integers[: len(of_integers)], *kept.values()], reals)


class _Recorded(_SingleLevelFunction):
    """One level of autograd: transforms of `torch.func` have unwrapped their own when it is reached."""

    @staticmethod
    def forward(
        ctx: Any,
        content: str,
        names: str,
        integers: Sequence[Any],
        reals: Sequence[Any],
        moved: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        forward = _Forward.of(content, names, moved, tensors, integers, reals)
        with torch._C._AutoDispatchBelowAutograd(), as_below():
            every = forward(names, list(tensors), integers, reals)
        outputs = every[: forward.count]
        ctx.call = content, names, integers, reals, forward
        ctx.shapes = [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.save_for_backward(*tensors, *(every[place] for place in forward.saved.values()))
        ctx.save_for_forward(*tensors)
        ctx.residuals = len(every) - forward.count
        ctx.mark_non_differentiable(*(outputs[k] for k in forward.constant), *every[forward.count :])
        ctx.set_materialize_grads(False)
        return tuple(every)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from eqfuse.differentiate.gradient import as_read  # derivatives are for those who ask

        content, names, integers, reals, forward = ctx.call
        of_tensors = names_in(names)[0]
        every = ctx.saved_tensors
        tensors, numbers, sizes = arguments(names, every[: len(of_tensors)], integers, reals)
        needed = zip(of_tensors, ctx.needs_input_grad[5:], strict=True)
        wanted = tuple(name for name, is_needed in needed if is_needed)
        # What may be differentiated again reads nothing that was saved: that would count as a constant.
        of = () if torch.is_grad_enabled() else forward.by
        kept = dict(zip(forward.saved, every[len(of_tensors) :], strict=True)) if of else {}
        with untraced():
            kernel = kernel_of(content)
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            alike = _are_alike(kernel.program, tensors)
            gradient = kernel.gradient(wanted, of, alike, dtypes, bool(of) and forward.scales)
            kernel_of(gradient.content)
        saved = {name: as_read(gradient.program, name, value) for name, value in kept.items()}
        filled = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if value is None else value
            for value, (shape, dtype, device) in zip(cotangents[: forward.count], ctx.shapes, strict=True)
        ]
        found = pulled_back(kernel, gradient, wanted, tensors, {**numbers, **saved}, sizes, filled)
        return None, None, None, None, None, *(found.get(name) for name in of_tensors)

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> tuple[torch.Tensor | None, ...]:
        content, names, integers, reals, _ = ctx.call
        of_tensors = names_in(names)[0]
        moved = {n: t for n, t in zip(of_tensors, given[5:], strict=True) if t is not None}
        with as_below():
            primals = [without_tangent(tensor) for tensor in ctx.saved_tensors[: len(of_tensors)]]
            tensors, numbers, sizes = arguments(names, primals, integers, reals)
            forms = [(shape, dtype) for shape, dtype, _ in ctx.shapes]
            found = pushed_forward(content, tensors, moved, numbers, sizes, forms)
        return *found, *[None] * ctx.residuals


def _are_alike(program: Program, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether dimensions that are divided alike are known to be as long."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    from eqfuse.differentiate.gradient import divided

    groups = ([tensors[name].shape[k] for name, k in group] for group in divided(program))
    return all(statically_known_true(size == first) for first, *rest in groups for size in rest)


def pulled_back(
    kernel: Called,
    gradient: Called,
    wanted: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
    given: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients by the inputs `wanted`, in their shapes and dtypes, of outputs with cotangents `given`; `numbers` are all other
    values by name."""
    from eqfuse.differentiate.gradient import as_read, cotangents  # derivatives are for those who ask

    named = cotangents(kernel.program)
    above = {
        o.name: value for o, value in zip(kernel.program.returned, given, strict=True) if o.name in named
    }
    values = {named[name]: as_read(gradient.program, named[name], value) for name, value in above.items()}
    like = {named[name]: (tensors[name].shape, tensors[name].dtype) for name in wanted}
    made = _derived(kernel, gradient, tensors, {**numbers, **values}, sizes, like)
    return dict(zip(wanted, made, strict=True))


def pushed_forward(
    content: str,
    tensors: Mapping[str, torch.Tensor],
    moved: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
    forms: Sequence[Form],
) -> list[torch.Tensor | None]:
    """The tangents of the outputs, which have these `forms`, along those of inputs that are `moved`; None of outputs that have none."""
    from eqfuse.differentiate.gradient import differentiable, tangents  # derivatives are for those who ask

    with untraced():
        kernel = kernel_of(content)
        real = differentiable(kernel.program)
        by = tuple(name for name in moved if name in real)
        reached = kernel.outputs_by(by) if by else frozenset()
        along = kernel.jvp(by) if reached else kernel
        kernel_of(along.content)
    outputs = [output.name for output in kernel.program.returned]
    if not reached:
        return [None] * len(outputs)
    named = tangents(kernel.program)
    like = {named[name]: form for name, form in zip(outputs, forms, strict=True) if name in reached}
    directions = {named[name]: moved[name] for name in by}
    made = _derived(kernel, along, tensors, {**numbers, **directions}, sizes, like)
    found = dict(zip((output.name for output in along.program.returned), made, strict=True))
    return [found.get(named.get(name, "")) for name in outputs]


def _derived(
    kernel: Called,
    derivative: Called,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
    like: Mapping[str, Form],
) -> list[torch.Tensor]:
    """The outputs of a kernel that was derived from another one, for that one's arguments and what it reads besides, in the forms that
    they have by name."""
    program, known = kernel.program, derivative.program
    reads = {*(tensor.name for tensor in known.tensors), *known.scalars}
    values = {name: value for name, value in {**tensors, **numbers}.items() if name in reads}
    shapes = {name: shape for name, (shape, _) in like.items()}
    found = kernel.extents(
        {tensor.name: tuple(tensors[tensor.name].shape) for tensor in program.tensors}, sizes
    )
    from eqfuse.differentiate.gradient import gradient_sizes  # derivatives are for those who ask

    made = called(derivative.content, values, gradient_sizes(known, found, shapes))
    results = made if isinstance(made, tuple) else (made,)
    outputs = (like[output.name] for output in known.returned)
    return [r.to(dtype).reshape(shape) for r, (shape, dtype) in zip(results, outputs, strict=True)]
