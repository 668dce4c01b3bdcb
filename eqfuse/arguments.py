"""Arguments of a call: tensors, scalars and sizes by name, checked against the program, and results of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import _functorch
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from eqfuse.errors import BindError, locate
from eqfuse.terms.arguments import detached
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.integers import fits
from eqfuse.terms.interpreter import check_dense
from eqfuse.terms.nodes import Program
from eqfuse.terms.promises import ascending, check_ascending
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import check_dtypes
from eqfuse.threads import cached, is_plain

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Tensors = Mapping[str, torch.Tensor]
Scalars = Mapping[str, Any]
Sizes = Mapping[str, int] | None


CallKey = tuple[Any, ...]
"""What the checks and the launches of a call depend on: names, shapes, strides, dtypes, devices and alignment of tensors,
integers, kinds of numbers, and which tensors autograd has to see."""

ALIGNMENT = 15
"""The bits of an address that are 0 where loads may take 16 bytes."""


_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_SIZES = type(None), dict


class CallLike(NamedTuple):
    """What a call of plain dense tensors and numbers has in common with others, the addresses of its tensors, and whether autograd has
    to see it."""

    key: CallKey
    addresses: list[int]
    wants_gradient: bool


def call_key(values: Mapping[str, Any], sizes: Sizes) -> CallLike | None:
    """The key of a call with plain dense tensors and numbers; None for any other, which has to be looked at: tensors under a
    transform, arrays, subclasses, tensors that may stand for numbers, modes of torch, and what torch records. Integers are
    part of the key, for they may bound what is read."""
    if is_watched():
        return None
    parts: list[Any] = []
    addresses: list[int] = []
    is_recording, wants_gradient = torch.is_grad_enabled(), False
    for name, value in values.items():
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            if value.is_neg():
                return None
            try:
                address, shape, strides = value.data_ptr(), value.shape, value.stride()
            except RuntimeError:  # sparse, nested, or of nothing that is in memory
                return None
            if not shape:
                return None
            addresses.append(address)
            aligned = address & ALIGNMENT == 0 if address else None  # without memory: empty, or freed
            parts += name, shape, strides, value.dtype, value.device, aligned
            if is_recording and value.requires_grad:
                wants_gradient = True
                parts.append(True)
        elif kind is float:
            parts.append(name)
        elif kind is int:
            parts += name, value
        else:
            return None
    if sizes:
        if type(sizes) is not dict:
            return None
        parts.append(tuple(sizes.items()))
    return CallLike(tuple(parts), addresses, wants_gradient)


def is_watched() -> bool:
    """Whether torch has to see what is called now: a transform, forward gradients, a mode or `torch.jit.trace`."""
    return (
        maybe_current_level() is not None or forward_ad._current_level >= 0 or not is_plain() or _is_traced()
    )


def is_recording() -> bool:
    """Whether torch records what is called now: some mode looks at every operation, or `torch.jit.trace` runs."""
    return bool(torch._C._len_torch_dispatch_stack()) or _is_traced()


_tracing: Callable[[], Any] = torch._C._get_tracing_state


def _is_traced() -> bool:
    """Whether `torch.jit.trace` runs."""
    return _tracing() is not None


@dataclass(frozen=True)
class Given:
    """The arguments of one call, as torch tensors and plain numbers. `numpy` says that arrays came in, `is_run` whether
    the call follows: an estimate asks for its plan alone. `out` is memory for outputs, by name, which may be that of a tensor that is read."""

    tensors: Tensors
    scalars: Scalars
    sizes: Sizes
    numpy: bool
    is_run: bool = True
    out: Tensors | None = None

    def returned(self, results: Sequence[torch.Tensor]) -> Any:
        """Results as the call gives them: of the kind that came in, one alone or a tuple."""
        return as_given(results, self.numpy)


@dataclass(frozen=True)
class Arguments:
    """The arguments that a program takes."""

    program: Program
    _dtypes: dict[tuple[Any, ...], dict[str, str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the program's tensors and scalars."""
        return (*(tensor.name for tensor in self.program.tensors), *self.program.scalars)

    def given(self, values: Mapping[str, Any], sizes: Sizes = None, unnamed: Sequence[Any] = ()) -> Given:
        """Tensors and scalars apart. Raises BindError for what no program takes, for tensors that require grad, for
        arguments without a name, and for torch tensors mixed with numpy arrays."""
        self.all_named(unnamed)
        if sizes is not None and not isinstance(sizes, Mapping):
            raise BindError(f"sizes is a {type(sizes).__name__}", hint='pass a mapping: sizes={"i": 128}')
        names = self._tensors
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                check_dense(name, value)
            if isinstance(value, torch.Tensor) and (name in names or value.ndim):
                self._check_memory(name, value)
                plain = detached(name, value, self.program.source).resolve_neg()
                tensors[name], kinds[name] = plain, "torch"
            elif isinstance(value, np.ndarray) and (name in names or value.ndim):
                tensors[name], kinds[name] = _from_numpy(name, value), "numpy"
            elif name in names:
                message = f"{name!r} is a {type(value).__name__}, not a tensor"
                raise self._at(name, message, "pass a torch tensor or a numpy array")
            else:
                scalars[name] = self._number(name, value)
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
            raise BindError(f"torch tensors and numpy arrays are mixed: {listed}", hint="pass one kind")
        return Given(tensors, scalars, sizes, "numpy" in kinds.values())

    def plain(self, values: Mapping[str, Any], sizes: Sizes) -> Given | None:
        """The same for values that have a `call_key`, none of whose tensors is on the device `meta`; None where something is
        wrong with them."""
        if type(sizes) not in _SIZES:
            return None
        names = self._tensors
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for name, value in values.items():
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                tensors[name] = value.detach() if value.requires_grad else value
            elif name in names or not fits(value):
                return None
            else:
                scalars[name] = value
        return Given(tensors, scalars, sizes, numpy=False)

    @cached
    def _tensors(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.program.tensors)

    def extents(self, given: Given) -> dict[str, int]:
        """The extent of every axis. Raises BindError where the arguments do not fit each other or the program."""
        shapes = {name: tuple(tensor.shape) for name, tensor in given.tensors.items()}
        return bind(self.program, shapes, given.sizes, given.scalars)

    def bound(self, given: Given) -> tuple[dict[str, int], dict[str, str]]:
        """The extent of every axis, and the dtype of every tensor. Raises BindError and TypeCheckError, also where
        integers in the memory of a CPU do not ascend as the program says."""
        extents = self.extents(given)
        check_selections(self.program, extents, given.scalars)
        if (promised := ascending(self.program)) and not is_recording():
            known = {name: given.tensors[name] for name, _ in promised}.items()
            at_hand = {n: t.numpy() for n, t in known if type(t) is torch.Tensor and t.device.type == "cpu"}
            check_ascending(self.program, at_hand)
        key = tuple((name, tensor.dtype) for name, tensor in given.tensors.items())
        found = self._dtypes.get(key)
        if found is None:
            dtypes = {name: _dtype_name(name, tensor) for name, tensor in given.tensors.items()}
            found = self._dtypes[key] = check_dtypes(self.program, dtypes)
        return extents, found

    def _check_memory(self, name: str, tensor: torch.Tensor) -> None:
        """Raises BindError where the memory of a tensor was freed under it."""
        if _functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_meta or torch._is_zerotensor(tensor):
            return
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise self._at(
                name, f"{name!r} has no memory: it was freed", "call before it is, or make it anew"
            )

    def _number(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = detached(name, value, self.program.source)
        plain = value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) else value
        if not isinstance(plain, int | float):
            message = f"{name!r} is a {type(value).__name__}, not a number"
            raise self._at(name, message, "scalars are integers and floats")
        if not fits(plain):
            raise self._at(name, f"{name!r} does not fit 64 bits", "give a float, as 1e30")
        return plain

    def _at(self, name: str, message: str, hint: str) -> BindError:
        source = self.program.source
        return BindError(message, source=source, span=locate(source, name), hint=hint)

    def all_named(self, unnamed: Sequence[Any]) -> None:
        """Raises BindError for arguments without a name."""
        if unnamed:
            count, names = len(unnamed), ", ".join(f"{name}=..." for name in self.names)
            raise BindError(
                f"{count} argument{'s' * (count > 1)} without a name",
                hint=f"pass each by its name: {names}" if names else "the program has no inputs",
            )


def as_given(results: Sequence[torch.Tensor], numpy: bool) -> Any:
    """Results as torch tensors or numpy arrays: one alone, or a tuple."""
    made: tuple[Any, ...] = tuple(map(to_numpy, results)) if numpy else tuple(results)
    return made[0] if len(made) == 1 else made


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """numpy has no bfloat16 and no float8: those become float32."""
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.float()
    result: np.ndarray[Any, np.dtype[Any]] = tensor.numpy()
    return result


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    found = DTYPE_NAMES.get(tensor.dtype)
    if found is None:
        raise BindError(
            f"{name!r} has dtype {tensor.dtype}, which the language does not have",
            hint=f"convert it to one of {', '.join(TORCH_DTYPES)}",
        )
    return found


def _from_numpy(name: str, array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """A view of the array; a copy where torch has no such view (negative strides, those of a field of structures, foreign byte
    order)."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 or stride % (array.itemsize or 1) for stride in array.strides):
        array = np.ascontiguousarray(array)
    if array.dtype.kind in "fiub" and not array.flags.writeable:
        array = np.asarray(_Lent(array))
    try:
        return torch.as_tensor(array)
    except TypeError:
        raise BindError(
            f"{name!r} has dtype {array.dtype}, which the language does not have",
            hint=f"convert it to one of {', '.join(TORCH_DTYPES)}",
        ) from None


class _Lent:
    """A read-only array as one that torch takes without a warning: a kernel only reads its inputs."""

    def __init__(self, array: np.ndarray[Any, np.dtype[Any]]) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self._array = array
