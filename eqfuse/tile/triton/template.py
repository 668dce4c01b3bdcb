"""What modules of Triton and of its dialect Gluon have in common: tables, and a launcher that reads sizes and strides off its
arguments, allocates what it has to, and calls the kernels in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer, Dims, LibraryProduct
from eqfuse.terms.bounds import longer_dimensions, selected_axes
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Call, Const, Expr, Program, Size
from eqfuse.terms.sizes import places
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.triton.functions import HELPERS
from eqfuse.tile.triton.parameters import Names
from eqfuse.tile.triton.wrap import wrap

TORCH_DTYPES: Mapping[str, str] = {
    "f8e4m3": "torch.float8_e4m3fn",
    "f8e5m2": "torch.float8_e5m2",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    "i8": "torch.int8",
    "u8": "torch.uint8",
    "i16": "torch.int16",
    "i32": "torch.int32",
    "i64": "torch.int64",
    "bool": "torch.bool",
}

SIGNATURE_DTYPES: Mapping[str, str] = {
    "f8e4m3": "fp8e4nv",
    "f8e5m2": "fp8e5",
    "f16": "fp16",
    "bf16": "bf16",
    "f32": "fp32",
    "f64": "fp64",
    "i8": "i8",
    "u8": "u8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "bool": "i1",
}


class Parameters(Protocol):
    """Names of a kernel's parameters, by what they stand for."""

    @property
    def pointers(self) -> Mapping[str, str]: ...
    @property
    def strides(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def extents(self) -> Mapping[str, str]: ...
    @property
    def scalars(self) -> Mapping[str, tuple[str, str]]: ...
    @property
    def blocks(self) -> Mapping[str, str]: ...


class Kernel(Protocol):
    """A kernel's grid and blocks."""

    @property
    def grid(self) -> tuple[str, ...]: ...
    @property
    def blocks(self) -> tuple[Block, ...]: ...


class Printed(Protocol):
    """A printed kernel and what launching it takes."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Kernel: ...
    @property
    def parameters(self) -> Parameters: ...
    @property
    def at_launch(self) -> Mapping[str, Expr]: ...


@dataclass(frozen=True)
class LibraryCall:
    """What the launcher calls torch's library of matrix products for, where other kernels are launched."""

    name: str
    product: LibraryProduct

    @property
    def given(self) -> str:
        """Each tensor and the axes of its dimensions."""

        def dims(of: Dims) -> str:
            return tuple_text([tuple_text([f'"{axis}"' for axis in axes]) for axes in of])

        return tuple_text([f'("{tensor}", {dims(of)})' for tensor, of in self.product.sides])

    @property
    def text(self) -> str:
        return f'multiply("{self.name}", {", ".join(name for name, _ in self.product.sides)})'


def calls_text(every: Sequence[Printed | LibraryCall]) -> list[str]:
    """The table of what a library is called for, and the order of all kernels, where there are such."""
    calls = {each.name: each.given for each in every if isinstance(each, LibraryCall)}
    if not calls:
        return []
    order = tuple_text([f'"{each.name}"' for each in every])
    rows = [row for name, given in calls.items() for row in wrap(f'    "{name}": {given},')]
    title = "# What the library of matrix products computes; all kernels in their order."
    return ["", title, "PRODUCTS = {", *rows, "}", f"ORDER = {order}"]


Text = TypeVar("Text", bound=Printed)


class Template(ABC, Generic[Text]):
    """A module in parts. `buffers` and `domains` are those of the program that the kernels are of."""

    RESERVED: ClassVar[Sequence[str]]
    """Names that the module has for itself."""
    SETTINGS: ClassVar[str]
    """What the launcher's `config` replaces."""
    NOTE: ClassVar[str]
    """How tensors may lie in memory, and what is raised."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        domains: Iterable[tuple[str, str]],
        source: Program,
        dtypes: Mapping[str, str],
        sizes: Mapping[str, int],
        name: str,
    ) -> None:
        self._source = source
        self._name = name
        self._root = Root(domains)
        self._dtypes = dict(dtypes)
        self._axes: dict[str, tuple[str | None, ...]] = {}
        for tensor in source.tensors:
            axes = tensor.axes or (None,) * tensor.rank
            self._axes[tensor.name] = tuple(axis and self._root[axis] for axis in axes)
            if tensor.dtype is not None:
                self._dtypes.setdefault(tensor.name, tensor.dtype)
        for buffer in buffers:
            self._axes[buffer.name] = tuple(self._root[axis] for axis in buffer.axes)
            self._dtypes[buffer.name] = buffer.dtype or "f32"
        self._sizes = {self._root[axis]: size for axis, size in sizes.items()}
        self._outputs = [buffer for buffer in buffers if buffer.is_output]
        self._temporaries = [buffer for buffer in buffers if not buffer.is_output]
        self._inputs = [tensor.name for tensor in source.tensors]

    def _docstring(self, kind: str, title: str, rows: Iterable[str]) -> list[str]:
        """Of `kind` of kernels, with rows on each under a title."""
        lines = [f"{kind}, generated from this program:", ""]
        lines += [f"    {line}".rstrip() for line in self._source.source.strip().splitlines()]
        lines += ["", f"{title}:", ""]
        lines += [f"    {row}" for row in rows]
        result = ", ".join(buffer.name for buffer in self._outputs)
        lines += ["", "Call:", "", f"    {result} = {self._name}({', '.join(self._arguments())})"]
        text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        return f'"""{text}\n"""'.splitlines()

    def _tensors(self) -> list[str]:
        lines = ["# Dtype and axes of every tensor; None where no plain access names the axis of a dim."]
        lines.append("TENSORS = {")
        for name, axes in self._axes.items():
            shown = ", ".join("None" if axis is None else f'"{axis}"' for axis in axes)
            comma = "," if len(axes) == 1 else ""
            lines += wrap(f'    "{name}": ({TORCH_DTYPES[self._dtypes[name]]}, ({shown}{comma})),')
        return [*lines, "}"]

    def _extents(self) -> list[str]:
        lines = ["# Extents of axes that no tensor has, unless given at the call."]
        return [*lines, table("SIZES", {axis: str(size) for axis, size in self._sizes.items()})]

    def _kinds(self, kernels: Sequence[Text]) -> list[str]:
        lines = ["# Axes that one block holds whole: it is the next power of two."]
        lines += nested("WHOLE", {k.name: self._whole(k) for k in kernels})
        lines += ["", "# Types of the kernels' parameters; strides are integers."]
        return [*lines, *nested("SIGNATURES", {k.name: self._signature(k) for k in kernels})]

    def _whole(self, kernel: Text) -> dict[str, str]:
        axes = [block.axis for block in kernel.kernel.blocks if block.kind == "whole"]
        return {kernel.parameters.blocks[axis]: f'"{self._root[axis]}"' for axis in axes}

    def _signature(self, kernel: Text) -> dict[str, str]:
        parameters = kernel.parameters
        types = {
            name: "*" + SIGNATURE_DTYPES[self._dtypes[tensor]] for tensor, name in parameters.pointers.items()
        }
        types |= dict.fromkeys(parameters.extents.values(), "i32")
        types |= {name: SIGNATURE_DTYPES[dtype] for name, dtype in parameters.scalars.values()}
        return {name: f'"{kind}"' for name, kind in types.items()}

    # The launcher -------------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        return [*self._inputs, *self._source.scalars]

    def launcher(self, kernels: Sequence[Text | LibraryCall]) -> list[str]:
        local = Names((*self._axes, *self._source.scalars, *self.RESERVED))
        known, size, blocks = local.fresh("known"), local.fresh("size"), local.fresh("blocks")
        out, workspace, sizes = local.fresh("out"), local.fresh("workspace"), local.fresh("sizes")
        config, device = local.fresh("config"), local.fresh("device")
        options = [f"{out}=None", f"{sizes}=None", f"{config}=None"]
        if self._temporaries:
            options.insert(1, f"{workspace}=None")
        if not self._inputs:
            options.append(f'{device}="cuda"')
        lines = ["", "", *wrap(f"def {self._name}({', '.join([*self._arguments(), '*', *options])}):")]
        body = [*self._launcher_doc(out, workspace, sizes, config)]
        if len(self._outputs) > 1:
            body.append(f"{out} = {out} or ({', '.join('None' for _ in self._outputs)})")
        if self._temporaries:
            body.append(f"{workspace} = {workspace} or {{}}")
        kinds = [*self._inputs, out if len(self._outputs) == 1 else f"*{out}"]
        kinds += [f'{workspace}.get("{buffer.name}")' for buffer in self._temporaries]
        integers = [name for name in self._source.scalars if name in self._source.integers]
        key = ", ".join([tuple_text(kinds), sizes, config, *integers])
        given = ", ".join(f'"{name}": {name}' for name in self._inputs)
        body.append(self._remembered(known, key))
        body.append(f'if "sizes" not in {known}:')
        body.append(f'    {known}["sizes"] = axis_sizes({{{given}}}, {extents_text(self._source, sizes)})')
        for axis, selecting in selected_axes(self._source).items():
            body.append(f'    if not {known}["sizes"]["{axis}"]:')
            body.append(
                f'        raise ValueError("axis {axis} is empty: {selecting} has no position to give")'
            )
        body.append(f'{size} = {known}["sizes"]')
        if self._inputs:
            body.append(f"{device} = {self._inputs[0]}.device")
        for place, buffer in enumerate(self._outputs):
            own = out if len(self._outputs) == 1 else f"{out}[{place}]"
            body.append(f'{buffer.name} = buffer("{buffer.name}", {own}, {size}, {device})')
        for buffer in self._temporaries:
            own = f'{workspace}.get("{buffer.name}")'
            body.append(f'{buffer.name} = buffer("{buffer.name}", {own}, {size}, {device})')
        body.append(f"with torch.cuda.device_of({self._outputs[0].name}):")
        for kernel in kernels:
            if isinstance(kernel, LibraryCall):
                launched = [kernel.text]
            else:
                launched = self._launch(kernel, known, size, blocks, config)
            body += ["    " + line for line in launched]
        body.append(f"return {', '.join(buffer.name for buffer in self._outputs)}")
        return [*lines, *(piece for line in body for piece in wrap(f"    {line}".rstrip()))]

    def _launcher_doc(self, out: str, workspace: str, sizes: str, config: str) -> list[str]:
        made = ", ".join(buffer.name + shape(buffer) for buffer in self._outputs)
        several = "a tuple of tensors" if len(self._outputs) > 1 else "a tensor"
        lines = [f'"""Computes {made}.', ""]
        lines.append(f"`{out}`: {several} to write the result to.")
        if self._temporaries:
            lines.append(f"`{workspace}`: temporaries by name, to reuse them between calls{self._reused()}.")
        lines.append(f"`{sizes}`: extents by axis, for axes that no tensor has.")
        lines.append(f"`{config}`: by kernel, {self.SETTINGS} that replace those of CONFIGS.")
        return [*lines, self.NOTE, '"""']

    def _remembered(self, known: str, key: str) -> str:
        """What the launcher knows of earlier calls of a kind."""
        return f"{known} = remembered(call_key({key}))"

    def _reused(self) -> str:
        """What the launcher's docstring adds on temporaries."""
        return ""

    def _extent(self, size: str, axis: str) -> str:
        return f'{size}["{self._root[axis]}"]'

    def _launch(self, kernel: Text, known: str, size: str, blocks: str, config: str) -> list[str]:
        parameters = kernel.parameters

        def extent(axis: str) -> str:
            return self._extent(size, axis)

        def count(block: Block) -> str:
            if block.axis not in parameters.blocks:
                return extent(block.axis)
            step = block.valid or f'{blocks}["{parameters.blocks[block.axis]}"]'
            return f"triton.cdiv({extent(block.axis)}, {step})"

        counts = [
            count(block)
            for axis in kernel.kernel.grid
            for block in kernel.kernel.blocks
            if block.axis == axis
        ]
        integers = [
            *(f"*{name}.stride()" for name, strides in parameters.strides.items() if strides),
            *(extent(axis) for axis in parameters.extents),
        ]
        numbers = [
            launch_text(kernel.at_launch[name], extent)
            if name in kernel.at_launch
            else f"{'int' if dtype in INTEGERS else 'float'}({name})"
            for name, (_, dtype) in parameters.scalars.items()
        ]
        items = " * ".join(counts) or "1"
        arguments = self.computed(kernel, items, tuple_text(integers), size, blocks)
        given = [
            known,
            f'"{kernel.name}"',
            kernel.name,
            *self.taken(kernel),
            tuple_text(numbers),
            *self.signs(kernel),
            config,
            size,
        ]
        return [f"{self.launching(kernel)}({', '.join(given)}, lambda {blocks}: {tuple_text(arguments)})"]

    def signs(self, kernel: Text) -> list[str]:
        """What a launch is given of numbers beside their values."""
        return []

    def launching(self, kernel: Text) -> str:
        """The name of the function that launches a kernel."""
        return "launch"

    @abstractmethod
    def taken(self, kernel: Text) -> list[str]:
        """The tensors that the function that launches a kernel is given."""

    @abstractmethod
    def computed(self, kernel: Text, items: str, integers: str, size: str, blocks: str) -> list[str]:
        """What is computed for a choice of blocks, from the number of blocks and the kernel's integers on."""


def extents_text(source: Program, sizes: str) -> str:
    """The text of the extents that are given, under the name `sizes`, with those of axes that share a dimension with others, or that it goes
    beyond: the table of axes does not have them."""
    root = Root(source.domains.items())
    known = {axis and root[axis] for tensor in source.tensors for axis in tensor.axes}
    found: dict[str, str] = {}
    for axis, tensor, dimension in places(source):
        found.setdefault(root[axis], f"{tensor}.shape[{dimension}]")
    for (tensor, dimension), reads in longer_dimensions(source).items():
        for axis, read in reads.items():
            text = (
                f"({tensor}.shape[{dimension}] - {read.offset})"
                if read.offset
                else f"{tensor}.shape[{dimension}]"
            )
            if not read.scalar:
                found.setdefault(
                    root[axis], f"{text} // {read.times + 1}" if read.times else text.strip("()")
                )
    read_off = ", ".join(f'"{axis}": {text}' for axis, text in found.items() if axis not in known)
    return f"{{{read_off}, **({sizes} or {{}})}}" if read_off else sizes


class Root(dict[str, str]):
    """Maps every axis to the one whose extent it has; axes that are not copies map to themselves."""

    def __init__(self, domains: Iterable[tuple[str, str]]) -> None:
        super().__init__(domains)

    def __getitem__(self, axis: str) -> str:
        while axis in self:
            axis = super().__getitem__(axis)
        return axis


def helpers(used: Collection[str], decorator: str, sources: Mapping[str, str] = HELPERS) -> list[str]:
    """Definitions of the helpers in use, of those that have sources."""
    return [
        line
        for key, text in sources.items()
        if key in used
        for line in ("", "", decorator, *text.strip("\n").splitlines())
    ]


def labels(axes: Sequence[str | None]) -> tuple[str, ...]:
    """What to call the strides of a tensor: by axis where every dim has its own, else by number."""
    if None in axes or len(set(axes)) < len(axes):
        return tuple(map(str, range(len(axes))))
    return tuple(axis for axis in axes if axis is not None)


def shape(buffer: Buffer) -> str:
    return f"[{', '.join(buffer.axes)}]" if buffer.axes else ""


def launch_text(expr: Expr, extent: Callable[[str], str]) -> str:
    """An integer made of sizes, given the text of a size."""
    match expr:
        case Size(axis):
            return extent(axis)
        case Const(number):
            return str(number)
        case Call(fn, args):
            return f"({f' {OPERATORS[fn]} '.join(launch_text(arg, extent) for arg in args)})"
    raise TypeError(f"{expr} is not known at a launch")


def tuple_text(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def table(name: str, entries: Mapping[str, str]) -> str:
    shown = ", ".join(f'"{key}": {value}' for key, value in entries.items())
    return f"{name} = {{{shown}}}"


def nested(name: str, tables: Mapping[str, Mapping[str, str]]) -> list[str]:
    rows = []
    for key, entries in tables.items():
        shown = ", ".join(f'"{entry}": {value}' for entry, value in entries.items())
        rows += wrap(f'    "{key}": {{{shown}}},')
    return [f"{name} = {{", *rows, "}"]
