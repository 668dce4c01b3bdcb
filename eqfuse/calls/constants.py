"""What a program makes of constant tensors alone: computed once for each value of them, and kept.

A call is divided into two programs. The first has as outputs the largest subexpressions that read constants alone and
reduce something; the second reads what the first has computed. Orders of sums and products are chosen with the first one free,
so that `sum[j](sum[k](x[b,k] * u[k,j]) * v[j,o])` multiplies `u` and `v` beforehand, where that leaves less for a call.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from eqfuse.arguments import Arguments, CallKey
from eqfuse.names import Names
from eqfuse.rules.reassociate import is_made_of, reassociated
from eqfuse.terms.extents import program_of
from eqfuse.terms.nodes import (
    Axis,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Scalar,
    Tensor,
    call,
    children,
    free_axes,
    replaced,
    walk,
)
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.printer import output_lines, show_program
from eqfuse.terms.types import kind, result_dtype
from eqfuse.threads import Lock

if TYPE_CHECKING:  # loaded by those who ask: every start would wait for it
    from eqfuse.differentiate.divide import Callee

LARGER = 2
"""How many times as many elements as the constants that it is made of a kept value may have."""
MOST_KEPT = 64
"""Values of the constants of which results are kept, the latest ones: layers that are alike may share a kernel."""
MOST_DIVIDED = 256
"""Kinds of calls of which it is known how they are divided."""


@dataclass(frozen=True)
class Part:
    """A part of a call: its kernel, the names of the inputs that it reads, integers that are sizes of axes it does not have, and the
    sizes of its own."""

    kernel: Callee
    names: tuple[str, ...]
    counts: Mapping[str, int]
    sizes: Mapping[str, int]

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self.kernel(sizes=self.sizes, **self.counts, **{name: values[name] for name in self.names})


@dataclass(frozen=True)
class Divided:
    """A call in two: what is kept, and the rest. `made_for` is what the kept values depend on beside the constants."""

    kept: Part
    rest: Part
    made_for: tuple[Any, ...]


class Constants:
    """What calls keep of constants.

    `make` compiles a text as the program is compiled, beside the lines of what is kept that it reads; `is_equal` says whether the program
    with other outputs is the same.
    """

    def __init__(
        self,
        program: Program,
        names: Collection[str],
        make: Callable[[str, tuple[str, ...]], Callee],
        is_equal: Callable[[tuple[Output, ...]], bool],
    ) -> None:
        self.names = tuple(tensor.name for tensor in program.tensors if tensor.name in names)
        self.latest: Divided | None = None
        """How the last call was divided; None where it ran as a whole."""
        self._program, self._make, self._is_equal = program, make, is_equal
        self._divided: OrderedDict[tuple[CallKey, tuple[str, ...]], Divided | None] = OrderedDict()
        self._kept: OrderedDict[tuple[Any, ...], tuple[list[ref[torch.Tensor]], Mapping[str, Any]]] = (
            OrderedDict()
        )
        self._kernels: dict[tuple[str, tuple[str, ...]], Callee] = {}
        self._lock = Lock()

    def call(
        self,
        key: CallKey | None,
        arguments: Arguments,
        values: Mapping[str, Any],
        sizes: Mapping[str, int] | None,
    ) -> Any:
        """The outputs of a call; None where nothing is kept of it: its key is None, as of arrays and of tensors that require grad, or
        constants were made in inference mode, where nothing counts their changes."""
        self.latest = None
        if key is None or not all(name in values for name in self.names):
            return None
        with self._lock:
            divided = self._divide(key, arguments, values, sizes)
            constants = {name: values[name] for name in self.names}
            if divided is None or any(tensor.is_inference() for tensor in constants.values()):
                return None
            if any(t.is_cuda for t in constants.values()) and torch.cuda.is_current_stream_capturing():
                return None  # a graph would read what calls outside of it replace
            kept = self._values(divided, constants)
        self.latest = divided
        return divided.rest({**values, **kept})

    def _values(self, divided: Divided, constants: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """What is kept of these constants, computed where no call of the same values was before."""
        on_gpu = any(t.is_cuda for t in constants.values())
        key = (
            (divided.made_for, torch.cuda.current_stream().cuda_stream if on_gpu else 0),
            *((id(t), t._version, t.data_ptr(), t.shape, t.stride()) for t in constants.values()),
        )
        found = self._kept.get(key)
        if found is None or any(one() is not t for one, t in zip(found[0], constants.values(), strict=True)):
            made = divided.kept({name: tensor.detach() for name, tensor in constants.items()})
            results = made if isinstance(made, tuple) else (made,)
            outputs = divided.kept.kernel.program.outputs
            values = {o.name: r if o.axes else r.item() for o, r in zip(outputs, results, strict=True)}
            self._forget()
            found = self._kept[key] = [ref(t) for t in constants.values()], values
        self._kept.move_to_end(key)
        return found[1]

    def _forget(self) -> None:
        """Drops what was made of constants that are gone, or have changed since; and the oldest."""
        for key, (tensors, _) in list(self._kept.items()):
            alive = [one() for one in tensors]
            if any(t is None or t._version != made[1] for t, made in zip(alive, key[1:], strict=True)):
                del self._kept[key]
        while len(self._kept) >= MOST_KEPT:
            self._kept.popitem(last=False)

    def _divide(
        self, key: CallKey, arguments: Arguments, values: Mapping[str, Any], sizes: Mapping[str, int] | None
    ) -> Divided | None:
        known = key, tuple(values)
        if known not in self._divided:
            given = arguments.given(values, sizes)
            extents, dtypes = arguments.bound(given)
            self._divided[known] = None if 0 in extents.values() else self._made(extents, dtypes)
            while len(self._divided) > MOST_DIVIDED:
                self._divided.popitem(last=False)
        return self._divided[known]

    def _made(self, extents: Mapping[str, int], dtypes: Mapping[str, str]) -> Divided | None:
        order = reassociated(self._program, extents, self.names)
        if order and not self._is_equal(order):
            order = ()
        parts = divided(self._program, order or self._program.outputs, self.names, extents, dtypes)
        if parts is None:
            return None
        first, second, counts = parts
        kept = self._part(first, (), counts, extents)
        rest = self._part(second, tuple(output_lines(first.outputs)), counts, extents)
        made_for = kept.kernel.program.source, tuple(kept.counts.items()), tuple(kept.sizes.items())
        return Divided(kept, rest, made_for)

    def _part(
        self, program: Program, lines: tuple[str, ...], counts: Mapping[str, str], extents: Mapping[str, int]
    ) -> Part:
        """A part of calls at these extents; its kernel is made once for each text."""
        text = show_program(program)
        if (text, lines) not in self._kernels:
            self._kernels[text, lines] = self._make(text, lines)
        kernel = self._kernels[text, lines]
        program = kernel.program
        names = (*(tensor.name for tensor in program.tensors), *program.scalars)
        own = dict.fromkeys(program.domains.get(axis, axis) for axis in sized_axes(program))
        return Part(
            kernel,
            tuple(name for name in names if name not in counts),
            {name: extents[counts[name]] for name in names if name in counts},
            {axis: extents[axis] for axis in own if axis not in {**program.lengths, **program.computed}},
        )


def divided(
    program: Program,
    outputs: Sequence[Output],
    constants: Collection[str],
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
) -> tuple[Program, Program, Mapping[str, str]] | None:
    """The program of what outputs make of constants alone, that of the rest, which reads it, and integers that they read, with the
    axes whose sizes these are; None where they reduce nothing of constants alone. Sums are kept as wide as a kernel accumulates them."""
    found = list(
        dict.fromkeys(part for o in outputs for part in _largest(o.expr, constants, extents, dtypes))
    )
    if not found:
        return None
    wide = "f64" if "f64" in dtypes.values() else "f32"
    names = Names({*dtypes, *program.scalars, *extents, *(o.name for o in outputs)})
    kept, reads, tensors = [], dict[Expr, Expr](), []
    for part in found:
        name = names.fresh("kept")
        axes = tuple(sorted(free_axes(part), key=list(extents).index))
        is_real = kind(part, dtypes) == "real"
        kept.append(Output(name, axes, call(wide, part) if is_real else part, wide if is_real else None))
        reads[part] = Load(name, tuple(map(Axis, axes))) if axes else Scalar(name)
        if axes:
            tensors.append(Tensor(name, len(axes), wide if is_real else result_dtype(part, dtypes), axes))
    rest = []
    for output in outputs:
        expr, dtype = replaced(output.expr, reads), output.dtype or result_dtype(output.expr, dtypes)
        is_narrower = kind(expr, dtypes) == "real" and expr is not output.expr and dtype != wide
        rest.append(
            replace(output, expr=call(dtype, expr), dtype=dtype)
            if is_narrower
            else replace(output, expr=expr)
        )
    counts = {axis: names.fresh(f"size_{axis}") for axis in extents}
    of = {name: axis for axis, name in counts.items()}
    return program_of(program, kept, (), counts), program_of(program, rest, tensors, counts), of


def _largest(
    expr: Expr, constants: Collection[str], extents: Mapping[str, int], dtypes: Mapping[str, str]
) -> list[Expr]:
    """The largest subexpressions that reduce something, of constants alone, and have at most `LARGER` times as many elements."""

    def size(part: Expr) -> int:
        return math.prod(extents[axis] for axis in free_axes(part))

    found: list[Expr] = []
    seen: set[Expr] = set()
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes = list(walk(node))
        reduces = any(isinstance(part, Reduce) for part in nodes) and is_made_of(node, constants)
        most = LARGER * sum(size(part) for part in nodes if isinstance(part, Load))
        if reduces and size(node) <= most and (free_axes(node) or kind(node, dtypes) == "real"):
            found.append(node)
        else:
            waiting += reversed(children(node))
    return found
