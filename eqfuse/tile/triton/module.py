"""Triton emission: a tile program as one readable Python file that needs torch and triton alone.

The file holds tables (dtypes and axes of tensors, default block sizes), the helpers that its
kernels use, one `@triton.jit` function per kernel, and a launcher that reads sizes and strides off
its arguments, allocates what it has to, and calls the kernels in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from eqfuse.errors import ScheduleError
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.bounds import selected_axes
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Call, Const, Expr, Program, Size
from eqfuse.terms.parser import axes_of
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.triton.functions import HELPERS, LIBRARY
from eqfuse.tile.triton.kernel import KernelText, write_kernel
from eqfuse.tile.triton.parameters import ALIGNMENT, Names, Tables, TensorInfo
from eqfuse.tile.triton.runtime import RUNTIME, RUNTIME_NAMES
from eqfuse.tile.triton.wrap import wrap

TORCH_DTYPES: Mapping[str, str] = {
    "f8e4m3": "torch.float8_e4m3fn",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    "i32": "torch.int32",
    "i64": "torch.int64",
    "bool": "torch.bool",
}

SIGNATURE_DTYPES: Mapping[str, str] = {
    "f8e4m3": "fp8e4nv",
    "f16": "fp16",
    "bf16": "bf16",
    "f32": "fp32",
    "f64": "fp64",
    "i32": "i32",
    "i64": "i64",
    "bool": "i1",
}


def emit(
    program: TileProgram,
    source: Program,
    dtypes: Mapping[str, str],
    configs: tuple[KernelConfig, ...],
    *,
    name: str,
    sizes: Mapping[str, int] | None = None,
    extents: Mapping[str, int] | None = None,
) -> str:
    """The source text of a module whose function `name` runs `program`.

    `dtypes` gives the dtype of every input tensor, `configs` (one per kernel, in order) warps and
    stages; block sizes are those of the tile program. `sizes` are defaults for extents that no
    tensor determines, such as the number of shards; `extents` are those that the plan was chosen for: an axis that is no
    power of two there gets no flag that says that it fills its block, which would be one more binary. Raises ScheduleError where a block that was
    lowered for a fixed size is too small for the dot that reads it.
    """
    module = _Module(program, source, dtypes, sizes or {}, name, extents or {})
    kernels = module.kernels()
    helpers = _helpers({key for kernel in kernels for key in kernel.helpers})
    text = "\n".join(
        [
            *module.docstring(),
            "",
            "import torch",
            "import triton",
            "import triton.language as tl",
            *([LIBRARY] if any("libdevice." in line for line in helpers) else []),
            "",
            *module.tables(kernels, configs),
            *helpers,
            *_functions(kernels),
            *(line for kernel in kernels for line in ("", "", *kernel.lines)),
            "",
            *RUNTIME.rstrip().splitlines(),
            *module.launcher(kernels),
            "",
        ]
    )
    return text


def _helpers(used: Iterable[str]) -> list[str]:
    wanted = set(used)
    return [
        line
        for key, text in HELPERS.items()
        if key in wanted
        for line in ("", "", "@triton.jit", *text.strip("\n").splitlines())
    ]


def _functions(kernels: Iterable[KernelText]) -> list[str]:
    found = {name: text for kernel in kernels for name, text in kernel.combines.items()}
    return [
        line
        for text in found.values()
        for line in ("", "", "@triton.jit", *(part for each in text.splitlines() for part in wrap(each)))
    ]


class _Module:
    def __init__(
        self,
        program: TileProgram,
        source: Program,
        dtypes: Mapping[str, str],
        sizes: Mapping[str, int],
        name: str,
        extents: Mapping[str, int],
    ) -> None:
        self._ragged = frozenset(axis for axis, n in extents.items() if n < 2 or n & (n - 1))
        self._program = program
        self._source = source
        self._name = name
        self._root = Root(program.domains)
        self._dtypes = dict(dtypes)
        self._axes: dict[str, tuple[str | None, ...]] = {}
        for tensor in source.tensors:
            axes = tensor.axes or (None,) * tensor.rank
            self._axes[tensor.name] = tuple(axis and self._root[axis] for axis in axes)
            if tensor.dtype is not None:
                self._dtypes.setdefault(tensor.name, tensor.dtype)
        for buffer in program.buffers:
            self._axes[buffer.name] = tuple(self._root[axis] for axis in buffer.axes)
            self._dtypes[buffer.name] = buffer.dtype or "f32"
        self._sizes = {self._root[axis]: size for axis, size in sizes.items()}
        self._outputs = [buffer for buffer in program.buffers if buffer.is_output]
        self._temporaries = [buffer for buffer in program.buffers if not buffer.is_output]
        self._inputs = [tensor.name for tensor in source.tensors]

    def kernels(self) -> list[KernelText]:
        names = Names((self._name, *RUNTIME_NAMES))
        tensors = {
            name: TensorInfo(self._dtypes[name], labels(axes), axes[-1] if axes else None)
            for name, axes in self._axes.items()
        }
        own = {self._root[axis] for axis in axes_of(self._source.outputs)}
        synthetic = {axis for b in self._temporaries for axis in self._axes[b.name] if axis not in own}
        shards = frozenset(axis for axis in synthetic if axis is not None)
        tables = Tables(tensors, self._root, shards, self._ragged)
        last = len(self._program.kernels) - 1
        found = [
            write_kernel(kernel, names.new(kernel.name), tables, _flags(first=place == 0, last=place == last))
            for place, kernel in enumerate(self._program.kernels)
        ]
        for kernel in found:
            for block, most in kernel.most.items():
                if kernel.least.get(block, 1) > most:
                    raise ScheduleError(
                        f"{block} of kernel {kernel.name} is {most}, too small for a dot",
                        hint=f"choose at least {kernel.least[block]}, or a schedule without a dot over that axis",
                    )
        return found

    # Text before the kernels --------------------------------------------------------------------

    def docstring(self) -> list[str]:
        lines = ["Triton kernels, generated from this program:", ""]
        lines += [f"    {line}".rstrip() for line in self._source.source.strip().splitlines()]
        lines += ["", "Schedule:", ""]
        lines += [f"    {_schedule(kernel)}" for kernel in self._program.kernels]
        result = ", ".join(buffer.name for buffer in self._outputs)
        lines += ["", "Call:", "", f"    {result} = {self._name}({', '.join(self._arguments())})"]
        text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        return f'"""{text}\n"""'.splitlines()

    def tables(self, kernels: Sequence[KernelText], configs: Sequence[KernelConfig]) -> list[str]:
        lines = ["# Dtype and axes of every tensor; None where no plain access names the axis of a dim."]
        lines.append("TENSORS = {")
        for name, axes in self._axes.items():
            shown = ", ".join("None" if axis is None else f'"{axis}"' for axis in axes)
            comma = "," if len(axes) == 1 else ""
            lines += wrap(f'    "{name}": ({TORCH_DTYPES[self._dtypes[name]]}, ({shown}{comma})),')
        lines += ["}", "", "# Extents of axes that no tensor has, unless given at the call."]
        lines.append(table("SIZES", {axis: str(size) for axis, size in self._sizes.items()}))
        lines += ["", "# Default block sizes, warps and stages."]
        lines += nested("CONFIGS", {k.name: _config(k, c) for k, c in zip(kernels, configs, strict=True)})
        lines += [
            "",
            "# Least size of a block (for its dots), and greatest (where positions share a quotient).",
        ]
        lines += nested("LIMITS", {k.name: _limits(k) for k in kernels})
        lines += ["", "# Axes that one block holds whole: it is the next power of two."]
        lines += nested("WHOLE", {k.name: self._whole(k) for k in kernels})
        lines += ["", "# Types of the kernels' parameters; strides are integers."]
        lines += nested("SIGNATURES", {k.name: self._signature(k) for k in kernels})
        lines += ["", "# Tensors that the kernels take, and numbers; None where the number is made of sizes."]
        lines += nested("ARGUMENTS", {k.name: _taken(k) for k in kernels})
        return lines

    def _whole(self, kernel: KernelText) -> dict[str, str]:
        axes = [block.axis for block in kernel.kernel.blocks if block.kind == "whole"]
        return {kernel.parameters.blocks[axis]: f'"{self._root[axis]}"' for axis in axes}

    def _signature(self, kernel: KernelText) -> dict[str, str]:
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

    def launcher(self, kernels: Sequence[KernelText]) -> list[str]:
        local = Names((*self._axes, *self._source.scalars, *RUNTIME_NAMES))
        known, size, blocks = local.new("known"), local.new("size"), local.new("blocks")
        out, workspace, sizes = local.new("out"), local.new("workspace"), local.new("sizes")
        config, device = local.new("config"), local.new("device")
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
        body.append(f"{known} = remembered(call_key({key}))")
        body.append(f'if "sizes" not in {known}:')
        body.append(f'    {known}["sizes"] = axis_sizes({{{given}}}, {sizes})')
        for axis, selecting in selected_axes(self._source).items():
            body.append(f'    if not {known}["sizes"]["{axis}"]:')
            body.append(
                f'        raise ValueError("axis {axis} is empty: {selecting} has no position to give")'
            )
        body.append(f'{size} = {known}["sizes"]')
        if self._inputs:
            body.append(f"{device} = {self._inputs[0]}.device")
        if len(self._outputs) == 1:
            name = self._outputs[0].name
            body.append(f'{name} = buffer("{name}", {out}, {size}, {device})')
        else:
            for place, buffer in enumerate(self._outputs):
                body.append(f'{buffer.name} = buffer("{buffer.name}", {out}[{place}], {size}, {device})')
        for buffer in self._temporaries:
            given = f'{workspace}.get("{buffer.name}")'
            body.append(f'{buffer.name} = buffer("{buffer.name}", {given}, {size}, {device})')
        body.append(f"with torch.cuda.device_of({self._outputs[0].name}):")
        for kernel in kernels:
            body += ["    " + line for line in self._launch(kernel, known, size, blocks, config)]
        body.append(f"return {', '.join(buffer.name for buffer in self._outputs)}")
        return [*lines, *(piece for line in body for piece in wrap(f"    {line}".rstrip()))]

    def _launcher_doc(self, out: str, workspace: str, sizes: str, config: str) -> list[str]:
        made = ", ".join(buffer.name + _shape(buffer) for buffer in self._outputs)
        several = "a tuple of tensors" if len(self._outputs) > 1 else "a tensor"
        lines = [f'"""Computes {made}.', ""]
        lines.append(f"`{out}`: {several} to write the result to.")
        if self._temporaries:
            shown = ", ".join(buffer.name + _shape(buffer) for buffer in self._temporaries)
            lines.append(f"`{workspace}`: temporaries by name, to reuse them between calls: {shown}.")
        lines.append(f"`{sizes}`: extents by axis, for axes that no tensor has.")
        lines.append(f"`{config}`: by kernel, settings that replace those of CONFIGS.")
        return [*lines, "Tensors may have any strides. Raises ValueError where arguments do not fit.", '"""']

    def _launch(self, kernel: KernelText, known: str, size: str, blocks: str, config: str) -> list[str]:
        parameters = kernel.parameters

        def extent(axis: str) -> str:
            return f'{size}["{self._root[axis]}"]'

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
        tensors = list(parameters.pointers)
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
        constants = {name: f'{blocks}["{name}"]' for name in parameters.blocks.values()}
        constants |= {
            flag: f'{extent(axis)} == {blocks}["{parameters.blocks[axis]}"]'
            for axis, flag in parameters.even.items()
        }
        if parameters.aligned is not None:
            rests = (f"{extent(axis)} % {ALIGNMENT}" for axis in parameters.divided)
            constants[parameters.aligned] = f"not ({' or '.join(rests)})"
        constants |= {} if parameters.stages is None else {parameters.stages: f'{blocks}["num_stages"]'}
        constants |= dict.fromkeys(parameters.flags, f"overlaps({self._outputs[0].name})")
        constants["INDEX"] = f"index_dtype({', '.join(tensors)})"
        made = ", ".join(f'"{name}": {text}' for name, text in constants.items())
        arguments = [
            " * ".join(counts) or "1",
            tuple_text(integers),
            f"{{{made}}}",
        ]
        given = [
            known,
            f'"{kernel.name}"',
            kernel.name,
            tuple_text(tensors),
            tuple_text(numbers),
            config,
            size,
        ]
        return [f"launch({', '.join(given)}, lambda {blocks}: {tuple_text(arguments)})"]


class Root(dict[str, str]):
    """Maps every axis to the one whose extent it has; axes that are not copies map to themselves."""

    def __init__(self, domains: Iterable[tuple[str, str]]) -> None:
        super().__init__(domains)

    def __getitem__(self, axis: str) -> str:
        while axis in self:
            axis = super().__getitem__(axis)
        return axis


def _flags(*, first: bool, last: bool) -> tuple[str, ...]:
    """Those of a kernel in a sequence of them."""
    return (*(() if first else ("WAITS",)), *(() if last else ("LEADS",)))


def labels(axes: Sequence[str | None]) -> tuple[str, ...]:
    """What to call the strides of a tensor: by axis where every dim has its own, else by number."""
    if None in axes or len(set(axes)) < len(axes):
        return tuple(map(str, range(len(axes))))
    return tuple(axis for axis in axes if axis is not None)


def _schedule(kernel: Kernel) -> str:
    kinds = {"grid": "grid", "loop": "loop", "whole": "whole", "unit": "loop by one"}
    parts = []
    for kind, shown in kinds.items():
        axes = [
            block.axis if block.size in (None, 1) else f"{block.axis} by {block.step}"
            for block in kernel.blocks
            if block.kind == kind
        ]
        if axes:
            parts.append(f"{shown} {', '.join(axes)}")
    return f"{kernel.name}: {'; '.join(parts)}" if parts else kernel.name


def _shape(buffer: Buffer) -> str:
    return f"[{', '.join(buffer.axes)}]" if buffer.axes else ""


def _config(kernel: KernelText, config: KernelConfig) -> dict[str, str]:
    names = kernel.parameters.blocks
    blocks = [block for block in kernel.kernel.blocks if block.axis in names and block.size is not None]
    sizes = {names[block.axis]: str(block.size) for block in blocks}
    return {**sizes, "num_warps": str(config.warps), "num_stages": str(config.stages)}


def _limits(kernel: KernelText) -> dict[str, str]:
    blocks = [
        name for name in kernel.parameters.blocks.values() if name in kernel.least or name in kernel.most
    ]
    return {name: f"({kernel.least.get(name, 1)}, {kernel.most.get(name)})" for name in blocks}


def _taken(kernel: KernelText) -> dict[str, str]:
    numbers = [None if name in kernel.at_launch else name for name in kernel.parameters.scalars]
    return {
        "tensors": tuple_text([f'"{name}"' for name in kernel.parameters.pointers]),
        "numbers": tuple_text(["None" if name is None else f'"{name}"' for name in numbers]),
    }


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
