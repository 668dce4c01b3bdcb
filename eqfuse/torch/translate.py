"""A graph of ATen operators as definitions of a program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from keyword import kwlist
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.terms.dtypes import DTYPES
from eqfuse.terms.functions import CALLABLE, CONSTANTS
from eqfuse.terms.nodes import Const, Expr, Load, Scalar, call, walk
from eqfuse.terms.registry import reducers
from eqfuse.torch.draws import DRAWING, DROPOUTS, Draw, Maker, dropped, maker_of, order_of
from eqfuse.torch.operators import indices, pointwise, products, reductions, scans, views, windows, writes
from eqfuse.torch.operators.pointwise import NARROW
from eqfuse.torch.operators.table import TABLE, Made, Node, Unsupported, argument_names, packet
from eqfuse.torch.positions import Position, Size, whole
from eqfuse.torch.values import Digit, Value, Writer, constant, is_view, position

MODULES = (indices, pointwise, products, reductions, scans, views, windows, writes)
"""What enters operators into the table."""

LONGEST = 40
"""Nodes of an expression that is written out where it is read; a longer one gets a name."""


WRAPPING = frozenset(
    [
        "mm",
        "bmm",
        "matmul",
        "mv",
        "dot",
        "vdot",
        "addmm",
        "baddbmm",
        "linear",
        "einsum",
        "pow",
        "sum",
        "prod",
        "cumsum",
        "mul",
        "add",
        "sub",
        "rsub",
    ]
)
"""Operators that compute modulo powers of two where their result is a narrow integer."""


LEAVE_IT = (
    "leave it outside of the function, or write it with operators that have an entry in docs/pytorch.md"
)


@dataclass(frozen=True)
class Refused(Exception):
    """A node of a graph that is not translated, and why."""

    node: fx.Node
    why: str

    def error(self) -> EqfuseError:
        """As an error for whoever wrote the code."""
        line = user_line(self.node)
        where = f"\n    {line}" if line else ""
        return EqfuseError(
            f"{name_of(self.node)} is not expressible: {self.why}{where}",
            hint=LEAVE_IT,
        )


def name_of(node: fx.Node) -> str:
    """The operator of a node, as torch calls it."""
    target = node.target
    return str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else str(target)


def of_module(node: fx.Node) -> str:
    """The module of the model that a node comes from, as `, layers.0.norm`; nothing where it is in none."""
    found = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = re.sub(r"^L\[[^]]*\]\.?", "", found[-1]) if found else ""
    return f", {path}" if path else ""


def user_line(node: fx.Node) -> str:
    """Where in the user's code a node comes from: `file.py, line 7: the code`."""
    trace = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    for number in reversed(range(len(trace))):
        text = trace[number].strip()
        if text.startswith("File ") and "<eval_with_key>" not in text and number + 1 < len(trace):
            file, line, *_ = text.removeprefix("File ").split(", ")
            return f"{file.strip(chr(34))}, {line}: {trace[number + 1].strip()}"
    return ""


def size_of(size: Any) -> Size:
    """A size of a graph, or a number made of sizes: a number, or an expression of symbols."""
    if isinstance(size, int | float):
        return size
    expr = whole(size.node.expr)
    return int(expr) if expr.is_Integer else float(expr) if expr.is_Float else expr


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    return tuple(size_of(size) for size in value.shape)


@dataclass
class Translation:
    """Nodes of a graph, one after the other, as definitions of one program. `inputs` are named by the caller, but for random numbers,
    which are `draws`."""

    writer: Writer
    made: dict[fx.Node, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[Size, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)

    def read(self, node: fx.Node, name: str) -> None:
        """Enters a tensor, or a number, that the program is given."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            self.made[node] = self._input(name, shape_of(value), value.dtype)
        else:
            self.made[node] = size_of(value) if isinstance(value, torch.SymInt | int) else value

    def _input(self, name: str, shape: tuple[Size, ...], dtype: torch.dtype) -> Value:
        """A tensor that the program is given."""
        groups: list[tuple[Digit, ...]] = []
        used: list[str] = []
        for size in shape:
            axis = "" if size == 1 else self.writer.names.axis(size, used)
            used.append(axis)
            groups.append((Digit(axis, size),) if axis else ())
            if axis and not isinstance(size, int):
                self.writer.symbols.setdefault(size, axis)
        index = self.writer.index

        def at(positions: tuple[Position, ...]) -> Expr:
            places = tuple(index(place, size) for place, size in zip(positions, shape, strict=True))
            if not places and dtype == torch.bool:
                return call("ne", Scalar(name), Const(0))  # a scalar is a number
            return Load(name, places) if places else Scalar(name)

        self.shapes[name], self.dtypes[name] = shape, dtype
        return Value(shape, dtype, tuple(groups), at, name)

    def _drawn(self, node: fx.Node, called: Node, make: Maker) -> Made:
        """What an operator makes of random numbers that torch draws, which are an input of the program."""
        is_dropout = packet(node.target) in DROPOUTS
        name = self.writer.names.definition("dropout" if is_dropout else word_of(node))
        made = node.meta["val"]
        order = order_of(made[0] if isinstance(made, tuple | list) else made)
        self.draws.append(Draw(name, called.shape, order, make))
        given = self._input(name, called.shape, torch.bool if is_dropout else called.dtype)
        return dropped(called, given) if is_dropout else given

    def graph(self, node: fx.Node, module: Any) -> None:
        """Enters a graph that an operator calls."""
        self.made[node] = partial(self._inlined, module)

    def _inlined(self, module: fx.GraphModule, given: Sequence[Value]) -> tuple[Value, ...]:
        """What a graph computes from these values, written out where it is read."""
        nodes = list(module.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        self.made |= dict(zip(places, given, strict=True))
        for node in nodes:
            if node.op == "get_attr":
                raise Refused(node, "it calls another graph")
            if node.op == "call_function":
                self.call(node, inside=True)
        return tuple(self.made[each] for each in nodes[-1].args[0])

    def call(self, node: fx.Node, *, inside: bool = False) -> None:
        """Translates one call, or one `inside` of a graph that another one calls. Raises Refused."""
        if str(node.target).startswith("aten._assert"):
            return  # it computes nothing; the examples passed it, and a kernel checks what it reads
        try:
            found = self._called(node, inside)
            if isinstance(found, Value) and not inside:
                found = self._kept(node, found)
        except Unsupported as why:
            raise Refused(node, str(why)) from None
        except NotImplementedError as why:
            raise Refused(node, str(why)) from None
        self.made[node] = found

    def _called(self, node: fx.Node, inside: bool) -> Any:
        value = node.meta.get("val")
        if getattr(node.target, "__name__", "") == "getitem":
            of, place = node.args
            return self.made[of][place]  # type: ignore[index]
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise Unsupported("a number that is taken out of a tensor (keep it a tensor, without .item())")
        if isinstance(value, torch.SymInt | torch.SymFloat | int | float) and not isinstance(value, bool):
            return size_of(value)
        name = packet(node.target)
        if not name:
            raise Unsupported("it is no operator of ATen")
        values = value if isinstance(value, tuple | list) else (value,)
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        if any(each.dtype.is_complex for each in tensors):
            raise Unsupported("complex numbers")
        make = maker_of(name, self._arguments(node), tensors[0].dtype) if name in DRAWING else None
        if make is not None and inside:
            raise Unsupported("random numbers that each step draws (draw them before, and pass them)")
        if name not in TABLE and make is None:
            raise Unsupported(_why_untranslated(name.removeprefix("aten."), tensors))
        if not tensors or len(tensors) < len(values) and name not in PARTLY:
            raise Unsupported("its result is no tensor")
        shapes, dtypes = tuple(map(shape_of, tensors)), tuple(each.dtype for each in tensors)
        if dtypes and dtypes[0] in NARROW and name.removeprefix("aten.") in WRAPPING:
            raise Unsupported(f"arithmetic in {dtypes[0]}, which wraps around")
        if all(0 in shape for shape in shapes):  # there is nothing to compute
            empty = [
                Value(s, d, (None,) * len(s), constant(0, d).read)
                for s, d in zip(shapes, dtypes, strict=True)
            ]
            return tuple(empty) if isinstance(value, tuple | list) else empty[0]
        called = Node(self.writer, self._arguments(node), shapes, dtypes)
        return TABLE[name](called) if make is None else self._drawn(node, called, make)

    def _arguments(self, node: fx.Node) -> Mapping[str, Any]:
        given = dict(zip(argument_names(node.target), node.args, strict=False)) | dict(node.kwargs)
        return {name: self._resolved(argument) for name, argument in given.items()}

    def _resolved(self, argument: Any) -> Any:
        match argument:
            case fx.Node():
                return self.made[argument]
            case list() | tuple():
                return [self._resolved(part) for part in argument]
            case torch.SymInt() | torch.SymFloat():
                return size_of(argument)
            case _:
                return argument

    def _kept(self, node: fx.Node, value: Value) -> Value:
        """The value, as a definition where it is read several times, or is long, and more than a view."""
        if value.name or value.is_choice or not value.is_real or len(value.shape) == 0:
            return value
        groups = self.writer.axes(value.shape, value.layout)
        expr = value.at([position(group) for group in groups])
        size = 0
        for _ in walk(expr):
            size += 1
        if is_view(expr) or len(node.users) < 2 and size <= LONGEST:
            return value
        return self.writer.defined(value, groups, expr, word_of(node))


PARTLY = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
)
"""Operators some of whose results are no tensors."""


UNTRANSLATED: Mapping[str, tuple[str, ...]] = {
    "random numbers (draw them outside of the function, and pass them)": (
        "rand", "bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "poisson", "uniform",
    ),
    "a special function that the language lacks": (
        "lgamma", "digamma", "polygamma", "igamma", "erfc", "erfinv", "i0", "special_", "nextafter", "frexp",
    ),
    "it reads what is stored by strides, not positions of a tensor (write it with views: unfold, slices, permute)": ("as_strided",),
    "it aligns two sequences, which is no reduction along an axis (call it outside)": ("_ctc_loss", "ctc_loss"),
    "it decomposes a matrix, which the language cannot": ("linalg", "_linalg", "cholesky", "triangular_solve"),
}  # fmt: skip
"""Why operators are not translated, by how their names begin."""


def _why_untranslated(name: str, results: Sequence[torch.Tensor]) -> str:
    if any(map(free_unbacked_symbols, results)):
        return "its result has a size that depends on data"
    found = (why for why, beginnings in UNTRANSLATED.items() if name.startswith(beginnings))
    return next(found, "eqfuse has no translation of it")


def word_of(node: fx.Node) -> str:
    """What a definition is called after: the operator."""
    packet = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
    word = "".join(letter for letter in packet.lower() if letter.isalpha())
    return word or "value"


@lru_cache(maxsize=1)
def reserved() -> frozenset[str]:
    """Names that mean something in the language."""
    return frozenset({*CALLABLE, *CONSTANTS, *DTYPES, *reducers(), "N", "axis", "sizes", "return"})


def input_name(word: str, taken: Sequence[str]) -> str:
    """A name for an input, like what it is called in torch."""
    clean = "".join(letter if letter.isalnum() else "_" for letter in word).strip("_") or "x"
    if clean[0].isdigit():
        clean = f"x{clean}"
    return Names((*taken, *reserved(), *kwlist)).fresh(clean)
