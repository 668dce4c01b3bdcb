"""Gluon emission: a program in roles as one readable Python file that needs torch and triton alone.

The file is as one of Triton: tables, helpers, the functions of each kernel, and a launcher that reads sizes and strides off
its arguments. Its kernels are for Hopper GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eqfuse.loops.blocks import Block
from eqfuse.terms.bounds import selected_axes
from eqfuse.terms.nodes import Program
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.gluon.kernel import REGISTERS, Descriptor, KernelText, write_kernel
from eqfuse.tile.gluon.runtime import RUNTIME
from eqfuse.tile.roles.nodes import RolesProgram
from eqfuse.tile.triton.functions import HELPERS
from eqfuse.tile.triton.module import (
    SIGNATURE_DTYPES,
    TORCH_DTYPES,
    Root,
    labels,
    launch_text,
    nested,
    table,
    tuple_text,
)
from eqfuse.tile.triton.parameters import Names, Tables, TensorInfo
from eqfuse.tile.triton.runtime import RUNTIME as TRITON_RUNTIME
from eqfuse.tile.triton.runtime import RUNTIME_NAMES, without
from eqfuse.tile.triton.wrap import wrap

NAMES = (*RUNTIME_NAMES, "suits", "descriptor", "moved", "workers", "copy_in", "copy_out", "gl", "gluon")


def emit(
    program: RolesProgram,
    source: Program,
    dtypes: Mapping[str, str],
    *,
    name: str,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The source text of a module whose function `name` runs `program`.

    `dtypes` gives the dtype of every input tensor, `sizes` are defaults for extents that no tensor determines.
    """
    module = _Module(program, source, dtypes, sizes or {}, name)
    kernels = module.kernels()
    return "\n".join(
        [
            *module.docstring(),
            "",
            "import torch",
            "import triton",
            "import triton.language as tl",
            "from triton.experimental import gluon",
            "from triton.experimental.gluon import language as gl",
            "from triton.experimental.gluon.language.nvidia.hopper import (",
            "    fence_async_shared,",
            "    mbarrier,",
            "    tma,",
            "    warpgroup_mma,",
            "    warpgroup_mma_wait,",
            ")",
            "",
            "# Triton 3.9 calls the copies so.",
            'copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared',
            'copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global',
            "",
            *module.tables(kernels),
            *_helpers({key for kernel in kernels for key in kernel.helpers}),
            *(line for kernel in kernels for line in ("", "", *kernel.lines)),
            "",
            *without(TRITON_RUNTIME, ("launch", "index_dtype", "overlaps")).rstrip().splitlines(),
            "",
            *RUNTIME.rstrip().splitlines(),
            *module.launcher(kernels),
            "",
        ]
    )


def _helpers(used: set[str]) -> list[str]:
    return [
        line
        for key, text in HELPERS.items()
        if key in used
        for line in ("", "", "@gluon.jit", *text.strip("\n").splitlines())
    ]


class _Module:
    def __init__(
        self,
        program: RolesProgram,
        source: Program,
        dtypes: Mapping[str, str],
        sizes: Mapping[str, int],
        name: str,
    ) -> None:
        self._program, self._source, self._name = program, source, name
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
        names = Names((self._name, *NAMES))
        tensors = {name: TensorInfo(self._dtypes[name], labels(axes)) for name, axes in self._axes.items()}
        tables = Tables(tensors, self._root)
        return [write_kernel(kernel, names.new(kernel.name), tables) for kernel in self._program.kernels]

    def docstring(self) -> list[str]:
        lines = ["Gluon kernels for Hopper GPUs, generated from this program:", ""]
        lines += [f"    {line}".rstrip() for line in self._source.source.strip().splitlines()]
        lines += ["", "Roles:", ""]
        for kernel in self._program.kernels:
            rings = ", ".join(f"{ring.slots} of {ring.tensor}" for ring in kernel.rings)
            lines.append(f"    {kernel.name}: 1 producer, {kernel.consumers} consumers; slots: {rings}")
        result = ", ".join(buffer.name for buffer in self._outputs)
        arguments = ", ".join([*self._inputs, *self._source.scalars])
        lines += ["", "Call:", "", f"    {result} = {self._name}({arguments})"]
        text = "\n".join(lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        return f'"""{text}\n"""'.splitlines()

    def tables(self, kernels: Sequence[KernelText]) -> list[str]:
        lines = ["# Dtype and axes of every tensor; None where no plain access names the axis of a dim."]
        lines.append("TENSORS = {")
        for name, axes in self._axes.items():
            shown = ", ".join("None" if axis is None else f'"{axis}"' for axis in axes)
            comma = "," if len(axes) == 1 else ""
            lines += wrap(f'    "{name}": ({TORCH_DTYPES[self._dtypes[name]]}, ({shown}{comma})),')
        copied = dict.fromkeys(d.tensor for k in kernels for d in k.parameters.descriptors.values())
        lines += ["}", "", "# Tensors that the copy engine reads or writes."]
        lines.append(f"COPIED = {tuple_text([repr(name) for name in copied])}".replace("'", '"'))
        lines += ["", "# Extents of axes that no tensor has, unless given at the call."]
        lines.append(table("SIZES", {axis: str(size) for axis, size in self._sizes.items()}))
        lines += ["", "# Block sizes."]
        lines += nested("CONFIGS", {k.name: _config(k) for k in kernels})
        lines += ["", "# Least and greatest size of a block."]
        lines += nested("LIMITS", {k.name: self._limits(k) for k in kernels})
        lines += ["", "# Axes that one block holds whole: it is the next power of two."]
        lines += nested("WHOLE", {k.name: self._whole(k) for k in kernels})
        lines += ["", "# Types of the kernels' parameters; strides are integers."]
        lines += nested("SIGNATURES", {k.name: self._signature(k) for k in kernels})
        lines += ["", "# Registers of a thread when a block starts, before roles share them out."]
        lines.append(table("REGISTERS", {k.name: str(REGISTERS[k.kernel.consumers][0]) for k in kernels}))
        lines += ["", "# Dtype and sizes of the tiles that descriptors are of."]
        lines += nested("TILES", {k.name: self._tiles(k) for k in kernels})
        return lines

    def _tiles(self, kernel: KernelText) -> dict[str, str]:
        return {
            d.name: f'("{_SIGNED[d.dtype]}", {tuple_text([f"{n!r}".replace(chr(39), chr(34)) for n in _tile(kernel, d)])})'
            for d in kernel.parameters.descriptors.values()
        }

    def _limits(self, kernel: KernelText) -> dict[str, str]:
        """Blocks along which tiles are copied or multiplied."""
        rows = kernel.kernel.rows
        axes = dict.fromkeys(a for d in kernel.parameters.descriptors.values() for a in d.axes if a)
        blocks = kernel.parameters.blocks
        return {
            blocks[axis]: "(64, None)" if axis == rows else "(16, 256)" for axis in axes if axis in blocks
        }

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

    # The launcher -----------------------------------------------------------------------------------------

    def launcher(self, kernels: Sequence[KernelText]) -> list[str]:
        arguments = [*self._inputs, *self._source.scalars]
        local = Names((*self._axes, *self._source.scalars, *NAMES))
        known, size, blocks = local.new("known"), local.new("size"), local.new("blocks")
        out, workspace, sizes = local.new("out"), local.new("workspace"), local.new("sizes")
        config, device = local.new("config"), local.new("device")
        options = [f"{out}=None", f"{sizes}=None", f"{config}=None"]
        if self._temporaries:
            options.insert(1, f"{workspace}=None")
        lines = ["", "", *wrap(f"def {self._name}({', '.join([*arguments, '*', *options])}):")]
        made = ", ".join(f"{b.name}[{', '.join(b.axes)}]" for b in self._outputs)
        body = [f'"""Computes {made}.', ""]
        several = "a tuple of tensors" if len(self._outputs) > 1 else "a tensor"
        body.append(f"`{out}`: {several} to write the result to.")
        if self._temporaries:
            body.append(f"`{workspace}`: temporaries by name, to reuse them between calls.")
        body.append(f"`{sizes}`: extents by axis, for axes that no tensor has.")
        body.append(f"`{config}`: by kernel, block sizes that replace those of CONFIGS.")
        body += [
            "Raises ValueError where arguments do not fit: see suits() for how tensors may lie in memory.",
            '"""',
        ]
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
        body.append(f"{device} = {self._inputs[0]}.device")
        for place, buffer in enumerate(self._outputs):
            own = out if len(self._outputs) == 1 else f"{out}[{place}]"
            body.append(f'{buffer.name} = buffer("{buffer.name}", {own}, {size}, {device})')
        for buffer in self._temporaries:
            own = f'{workspace}.get("{buffer.name}")'
            body.append(f'{buffer.name} = buffer("{buffer.name}", {own}, {size}, {device})')
        body.append(f"with torch.cuda.device_of({self._outputs[0].name}):")
        for kernel in kernels:
            body += ["    " + line for line in self._launch(kernel, known, size, blocks, config)]
        body.append(f"return {', '.join(buffer.name for buffer in self._outputs)}")
        return [*lines, *(piece for line in body for piece in wrap(f"    {line}".rstrip()))]

    def _launch(self, kernel: KernelText, known: str, size: str, blocks: str, config: str) -> list[str]:
        parameters = kernel.parameters

        def extent(axis: str) -> str:
            return f'{size}["{self._root[axis]}"]'

        def count(block: Block) -> str:
            if block.axis not in parameters.blocks:
                return extent(block.axis)
            return f'triton.cdiv({extent(block.axis)}, {blocks}["{parameters.blocks[block.axis]}"])'

        grid = kernel.kernel.grid
        counts = [count(b) for axis in grid for b in kernel.kernel.blocks if b.axis == axis]
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
        descriptors = list(parameters.descriptors.values())
        tiles = [
            tuple_text(
                [
                    n if isinstance(n, str) and not n.startswith("BLOCK") else str(n)
                    for n in self._sizes_of(kernel, d, blocks)
                ]
            )
            for d in descriptors
        ]
        made = ", ".join(f'"{name}": {blocks}["{name}"]' for name in parameters.blocks.values())
        items = " * ".join(counts) or "1"
        if kernel.kernel.persistent:
            items = f"workers({items}, {self._outputs[0].name})"
        arguments = [items, tuple_text(tiles), tuple_text(integers), f"{{{made}}}"]
        given = [
            known,
            f'"{kernel.name}"',
            kernel.name,
            tuple_text([d.tensor for d in descriptors]),
            tuple_text(list(parameters.pointers)),
            tuple_text(numbers),
            config,
            size,
        ]
        return [f"launch({', '.join(given)}, lambda {blocks}: {tuple_text(arguments)})"]

    def _sizes_of(self, kernel: KernelText, descriptor: Descriptor, blocks: str) -> list[str]:
        found = []
        for axis in descriptor.axes:
            if axis is None:
                found.append("1")
                continue
            size = f'{blocks}["{kernel.parameters.blocks[axis]}"]'
            shared = axis == kernel.kernel.rows
            found.append(f"{size} // {kernel.kernel.consumers}" if shared else size)
        return found


_SIGNED = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "i32": "i32", "f8e4m3": "fp8e4nv"}


def _tile(kernel: KernelText, descriptor: Descriptor) -> list[str | tuple[str, int] | int]:
    """The sizes of a tile: 1, the name of a block, or that and what it is divided by."""
    blocks, shared = kernel.parameters.blocks, kernel.kernel
    return [
        1 if axis is None else (blocks[axis], shared.consumers) if axis == shared.rows else blocks[axis]
        for axis in descriptor.axes
    ]


def _config(kernel: KernelText) -> dict[str, str]:
    blocks = kernel.parameters.blocks
    return {
        blocks[b.axis]: str(b.size) for b in kernel.kernel.blocks if b.axis in blocks and b.size is not None
    }
