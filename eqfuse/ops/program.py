"""What a program of the library is: a text with options, compiled once for each of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from eqfuse import Kernel, compile
from eqfuse.errors import EqfuseError, did_you_mean
from eqfuse.operator.library import called

ROW = "b"
"""The first axis of texts that take rows: a call puts as many axes in its place as its tensors have dimensions there."""


Shaped = Callable[[dict[str, Any], dict[str, Any]], Callable[[Any], Any]]
"""Changes tensors and options of a call, by name; gives what changes its outputs."""


@dataclass(frozen=True)
class Op:
    """A program that is called with tensors, by position or name, and options by name.

    `name` is that of the function `write`, which gives the text; `tensors` are the names of what it takes, in order. `text(...)` is what it
    computes, to be changed and compiled as any other program; `kernel(...)` is what calls run, with its derivation, plan and certificate. Of the tensors in `rows`
    all dimensions but so many last ones are rows; `shaped` changes the shapes of others.
    """

    write: Callable[..., str]
    tensors: tuple[str, ...]
    rows: Mapping[str, int]
    shaped: Shaped | None = None
    _kernels: dict[str, Kernel] = field(default_factory=dict, compare=False, repr=False)
    _called: dict[tuple[Any, ...], Kernel] = field(default_factory=dict, compare=False, repr=False)
    _latest: list[Kernel | None] = field(default_factory=lambda: [None], compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.write.__doc__)

    @property
    def name(self) -> str:
        return self.write.__name__

    @property
    def options(self) -> tuple[str, ...]:
        """The options, by name."""
        return tuple(inspect.signature(self.write).parameters)[1:]

    @property
    def latest(self) -> Kernel:
        """What ran the last call, with its plan, derivation and certificate; of compiled code, the last one that was traced. Raises EqfuseError
        where there was none."""
        (kernel,) = self._latest
        if kernel is None:
            raise EqfuseError(f"{self.name} was not called", hint="kernel(...) gives one for options")
        return kernel

    def text(self, *, given: Collection[str] | None = None, **options: Any) -> str:
        """The program, of the tensors that are `given`: all of them by default."""
        for name in options:
            if name not in self.options:
                hint = did_you_mean(name, self.options) or f"options: {' '.join(self.options) or 'none'}"
                raise EqfuseError(f"{self.name} has no option {name!r}", hint=hint)
        return self.write(frozenset(self.tensors if given is None else given), **options)

    def kernel(self, *, given: Collection[str] | None = None, lead: int = 1, **options: Any) -> Kernel:
        """What runs calls of these tensors and options, of rows along `lead` dimensions."""
        text = _with_rows(self.text(given=given, **options), lead)
        if text not in self._kernels:
            self._kernels[text] = compile(text, at_once=False)  # the call plans
        return self._kernels[text]

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        if len(tensors) > len(self.tensors):
            raise EqfuseError(
                f"{self.name} takes {len(self.tensors)} tensors, not {len(tensors)}",
                hint=f"tensors: {' '.join(self.tensors)}; options are given by name",
            )
        values = dict(zip(self.tensors, tensors, strict=False))
        options: dict[str, Any] = {}
        for name, value in named.items():
            if name in values:
                raise EqfuseError(f"{self.name} is given {name!r} twice", hint="leave one out")
            (values if name in self.tensors else options)[name] = value
        values = {name: value for name, value in values.items() if value is not None}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise EqfuseError(
                    f"{name!r} is a {type(value).__name__} in {self.name}", hint="give tensors of torch"
                )
        try:
            restored = None if self.shaped is None else self.shaped(values, options)
        except KeyError as missing:
            hint = f"tensors: {' '.join(self.tensors)}"
            raise EqfuseError(f"{self.name} is not given {missing}", hint=hint) from None
        lead = self._lead(values)
        if is_dynamo_compiling():
            from torch.fx.experimental.symbolic_shapes import guard_scalar

            # A number that has changed between calls is one that Dynamo keeps open: compiled code is of this one.
            fixed = {n: guard_scalar(v) if isinstance(v, int | float) else v for n, v in options.items()}
            made = called(self._traced(tuple(values), lead, tuple(fixed.items())), values, None)
        else:
            kernel = self._latest[0] = self._of_call(values.keys(), lead, options)
            made = kernel(**values)
        return made if restored is None else restored(made)

    def _of_call(self, given: Collection[str], lead: int, options: Mapping[str, Any]) -> Kernel:
        """The kernel of a call. Its text is written once for the same options."""
        key = (*given, lead, *((name, type(value), value) for name, value in options.items()))
        try:
            known = self._called.get(key)
        except TypeError:  # an option without a hash
            known, key = None, ()
        if known is None:
            known = self.kernel(given=given, lead=lead, **options)
            if key:
                self._called[key] = known
        return known

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _traced(self, given: tuple[str, ...], lead: int, options: tuple[tuple[str, Any], ...]) -> str:
        """What the operator of a call needs. Dynamo runs this function, and traces none of a compilation."""
        kernel = self._latest[0] = self.kernel(given=given, lead=lead, **dict(options))
        return kernel.content

    def _lead(self, values: Mapping[str, torch.Tensor]) -> int:
        """How many dimensions are of rows; 1 where no tensor has any."""
        lead = None
        for name, kept in self.rows.items():
            value = values.get(name)
            if value is None:
                continue
            if value.ndim < kept:
                raise EqfuseError(
                    f"{name!r} has {value.ndim} dimensions in {self.name}", hint=f"it has {kept} at least"
                )
            own = value.shape[: value.ndim - kept]
            if lead is not None and own != lead:
                raise EqfuseError(
                    f"{name!r} has rows of shape {tuple(own)} in {self.name}, not {tuple(lead)}",
                    hint="give tensors with the same dimensions before the last",
                )
            lead = own
        return 1 if lead is None else len(lead)


def _with_rows(text: str, lead: int) -> str:
    """The program with so many axes of rows."""
    if lead == 1:
        return text
    axes = ",".join(f"{ROW}{place}" for place in range(lead))
    if axes:
        return re.sub(rf"\[{ROW}(?=[,\]])", f"[{axes}", text)
    return text.replace(f"[{ROW}]", "").replace(f"[{ROW},", "[")


def op(
    *tensors: str,
    rows: Mapping[str, int] | None = None,
    shaped: Shaped | None = None,
) -> Callable[[Callable[..., str]], Op]:
    """The op of a function that writes its text, from the names of the tensors that are given and options."""
    return lambda write: Op(write, tensors, rows or {}, shaped)
