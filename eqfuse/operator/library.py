"""What `eqfuse::call` does, and when a call becomes it.

    eqfuse::call(str kernel, str names, Tensor[] tensors, SymInt[] integers=[], float[] reals=[]) -> Tensor[]

`kernel` is a content (`content.py`). `names` are those of the tensors, of the scalars among the integers, of the reals, and
of the axes whose sizes are the last integers. A scalar that is a tensor is among the tensors; it is read when the
kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _functorch, _is_alias_of  # type: ignore[attr-defined]
from torch.compiler import is_dynamo_compiling

from eqfuse.arguments import is_recording
from eqfuse.errors import BindError
from eqfuse.operator.content import VISIBLE, Called, kernel_of, names_in, names_text, operator_of
from eqfuse.operator.written import check_outputs, offer
from eqfuse.terms.arguments import has_tangent, is_batched_by_older_vmap
from eqfuse.terms.interpreter import check_dense
from eqfuse.terms.nodes import Load, children

_OF_OPERATORS = (_functorch.TransformType.Vmap, _functorch.TransformType.Jvp)
"""Transforms that have a rule for the operator alone."""


def is_recorded(values: Mapping[str, Any]) -> bool:
    """Whether torch records what is called now, or some tensor holds no numbers, a batch of others, or a tangent."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    return bool(tensors) and (is_recording() or any(map(_is_stand_in, tensors)))


def _is_stand_in(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        is_batched = is_batched_by_older_vmap(tensor)
        return tensor.is_meta or is_batched or has_tangent(tensor) or _is_transformed(tensor)
    return _is_class_of_its_own(tensor)


def _is_class_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor are what its class makes of them."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Whether some transform around is `torch.vmap` or `torch.func.jvp`, and this tensor is under a transform."""
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return False
    levels = _functorch.get_interpreter_stack() or ()
    return any(level.key() in _OF_OPERATORS for level in levels)


def recorded(content: str, values: Mapping[str, Any], sizes: Mapping[str, Any] | None) -> Any:
    """The same outside of Dynamo. Raises BindError for nested and sparse tensors, and for classes of tensors that do not take
    operators that they do not know."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    try:
        return called(content, values, sizes)
    except (NotImplementedError, TypeError) as error:
        foreign = next((name for name, tensor in tensors.items() if _is_class_of_its_own(tensor)), None)
        if foreign is None or "eqfuse" not in str(error):
            raise
        kind = type(tensors[foreign]).__name__
        raise BindError(
            f"{foreign!r} is a {kind}, which does not take the operator of a kernel",
            hint="pass a plain tensor of what it holds",
        ) from None


def called(content: str, values: Mapping[str, Any], sizes: Mapping[str, Any] | None) -> Any:
    """The call of a kernel as the operator: its outputs, one tensor or a tuple. Dynamo reads this function."""
    tensors: list[torch.Tensor] = []
    integers: list[Any] = []
    reals: list[Any] = []
    of_tensors: list[str] = []
    of_integers: list[str] = []
    of_reals: list[str] = []
    axes: list[str] = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            of_tensors.append(name)
        elif isinstance(value, int | torch.SymInt):
            integers.append(value)
            of_integers.append(name)
        elif isinstance(value, float):
            if is_dynamo_compiling() and VISIBLE not in content and not _is_constant(value):
                # Dynamo would compile once for each number that it hands to an operator, not to arithmetic.
                tensors.append(torch.ones((), dtype=torch.float64) * value)
                of_tensors.append(name)
                continue
            reals.append(value)
            of_reals.append(name)
        else:
            raise BindError(
                f"{name!r} is a {type(value).__name__}, not a torch tensor or a number",
                hint="where torch records a call, tensors are torch's",
            )
    for axis, size in (sizes or {}).items():
        integers.append(size)
        axes.append(axis)
    names = names_text(of_tensors, of_integers, of_reals, axes)
    if integers or reals:
        made = operator_of(content)(content, names, tensors, integers, reals)
    else:
        made = operator_of(content)(content, names, tensors)
    return made[0] if len(made) == 1 else tuple(made)


def _is_constant(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # Dynamo has loaded it

    return has_static_value(value)


def arguments(
    names: str, tensors: Sequence[Any], integers: Sequence[Any], reals: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Tensors, numbers and sizes by name."""
    of_tensors, of_integers, of_reals, axes = names_in(names)
    count = len(of_integers)
    numbers = dict(zip(of_integers, integers[:count], strict=True)) | dict(zip(of_reals, reals, strict=True))
    sizes = dict(zip(axes, integers[count:], strict=True))
    return dict(zip(of_tensors, tensors, strict=True)), numbers, sizes


def run(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[int] = (),
    reals: Sequence[float] = (),
) -> list[torch.Tensor]:
    """The outputs, in memory of their own."""
    call = call_of(content, names)
    plain = tensors  # what is kept of constants is kept of these very tensors
    if not call.kernel.constants or torch.is_grad_enabled():
        plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    values: dict[str, Any] = dict(zip(call.tensors, plain, strict=True))
    if integers or reals:
        _, numbers, sizes = arguments(names, plain, integers, reals)
        found = call.kernel(**values, **numbers, sizes=sizes or None)
    else:
        found = call.kernel(**values)
    return owned(found, plain if call.copies else ())


def owned(made: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs as they are, or in memory of their own where that is not contiguous, or some input's."""
    outputs = list(made) if type(made) is tuple else [made]
    for place, output in enumerate(outputs):
        if not output.is_contiguous():
            outputs[place] = output.contiguous()
        elif inputs and any(_is_alias_of(output, tensor) for tensor in inputs):
            outputs[place] = output.clone()
    return outputs


@dataclass(frozen=True)
class Call:
    """What a call needs to know of its kernel; `copies`: some output is a tensor as it came in."""

    kernel: Called
    tensors: tuple[str, ...]
    copies: bool

    @staticmethod
    def of(content: str, names: str) -> Call:
        kernel = kernel_of(content)
        values = [output.expr for output in kernel.program.returned]
        copies = any(isinstance(node, Load) for value in values for node in (value, *children(value)))
        return Call(kernel, names_in(names)[0], copies)


_calls: dict[tuple[str, str], Call] = {}


def call_of(content: str, names: str) -> Call:
    """What a call needs to know."""
    key = content, names
    return _calls.get(key) or _calls.setdefault(key, Call.of(content, names))


def opened(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any] = (),
    reals: Sequence[Any] = (),
) -> list[torch.Tensor]:
    """The outputs, by what a call launches: what compilers see of `eqfuse::visible`."""
    values, numbers, sizes = arguments(names, tensors, integers, reals)
    return kernel_of(content).opened(values, numbers, sizes)


def shaped(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any] = (),
    reals: Sequence[Any] = (),
) -> list[torch.Tensor]:
    """Outputs that hold nothing."""
    kernel = kernel_of(content)
    offer()
    check_outputs(len(kernel.program.returned))
    return kernel.shaped(*arguments(names, tensors, integers, reals))
