"""Gluon emission: a program in roles as one readable Python file that needs torch and triton alone.

The file is as one of Triton: tables, helpers, the functions of each kernel, and a launcher that reads sizes and strides off
its arguments. Its kernels are for Hopper GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.nodes import Program
from eqfuse.tile.gluon.functions import HELPERS
from eqfuse.tile.gluon.kernel import REGISTERS, SUMMED_BYTES, Descriptor, KernelText, write_kernel
from eqfuse.tile.gluon.runtime import RUNTIME
from eqfuse.tile.roles.nodes import RolesProgram
from eqfuse.tile.triton.parameters import Names, Tables, TensorInfo
from eqfuse.tile.triton.runtime import RUNTIME as TRITON_RUNTIME
from eqfuse.tile.triton.runtime import RUNTIME_NAMES, without
from eqfuse.tile.triton.template import Template, helpers, labels, nested, table, tuple_text


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
            *helpers({key for kernel in kernels for key in kernel.helpers}, "@gluon.jit", HELPERS),
            *(line for kernel in kernels for line in ("", "", *kernel.lines)),
            "",
            *without(TRITON_RUNTIME, ("launch", "index_dtype", "overlaps")).rstrip().splitlines(),
            "",
            *RUNTIME.rstrip().splitlines(),
            *module.launcher(kernels),
            "",
        ]
    )


class _Module(Template[KernelText]):
    RESERVED = (
        *RUNTIME_NAMES,
        "suits",
        "descriptor",
        "moved",
        "workers",
        "copy_in",
        "copy_out",
        "gl",
        "gluon",
    )
    SETTINGS = "block sizes"
    NOTE = "Raises ValueError where arguments do not fit: see suits() for how tensors may lie in memory."

    def __init__(
        self,
        program: RolesProgram,
        source: Program,
        dtypes: Mapping[str, str],
        sizes: Mapping[str, int],
        name: str,
    ) -> None:
        super().__init__(program.buffers, program.domains, source, dtypes, sizes, name)
        self._program = program

    def kernels(self) -> list[KernelText]:
        names = Names((self._name, *self.RESERVED))
        tensors = {name: TensorInfo(self._dtypes[name], labels(axes)) for name, axes in self._axes.items()}
        tables = Tables(tensors, self._root)
        return [write_kernel(kernel, names.new(kernel.name), tables) for kernel in self._program.kernels]

    def docstring(self) -> list[str]:
        roles = []
        for kernel in self._program.kernels:
            rings = ", ".join(f"{ring.slots} of {ring.tensor}" for ring in kernel.rings)
            roles.append(f"{kernel.name}: 1 producer, {kernel.consumers} consumers; slots: {rings}")
        return self._docstring("Gluon kernels for Hopper GPUs", "Roles", roles)

    def tables(self, kernels: Sequence[KernelText]) -> list[str]:
        copied = dict.fromkeys(d.tensor for k in kernels for d in k.parameters.descriptors.values())
        lines = [*self._tensors(), "", "# Tensors that the copy engine reads or writes."]
        lines.append(f"COPIED = {tuple_text([repr(name) for name in copied])}".replace("'", '"'))
        lines += ["", *self._extents(), "", "# Block sizes."]
        lines += nested("CONFIGS", {k.name: _config(k) for k in kernels})
        lines += ["", "# Least and greatest size of a block."]
        lines += nested("LIMITS", {k.name: self._limits(k) for k in kernels})
        lines += ["", *self._kinds(kernels)]
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
        widths = [d.dtype for d in kernel.parameters.descriptors.values() if d.dtype in BYTES]
        least = SUMMED_BYTES // min((BYTES[dtype] for dtype in widths), default=2)
        return {
            blocks[axis]: "(64, None)" if axis == rows else f"({least}, 256)"
            for axis in axes
            if axis in blocks
        }

    def _taken(self, kernel: KernelText) -> list[str]:
        descriptors = [descriptor.tensor for descriptor in kernel.parameters.descriptors.values()]
        return [tuple_text(descriptors), tuple_text(list(kernel.parameters.pointers))]

    def _computed(self, kernel: KernelText, items: str, integers: str, size: str, blocks: str) -> list[str]:
        parameters = kernel.parameters
        tiles = [tuple_text(self._sizes_of(kernel, d, blocks)) for d in parameters.descriptors.values()]
        made = ", ".join(f'"{name}": {blocks}["{name}"]' for name in parameters.blocks.values())
        if kernel.kernel.persistent:
            items = f"workers({items}, {self._outputs[0].name})"
        return [items, tuple_text(tiles), integers, f"{{{made}}}"]

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
