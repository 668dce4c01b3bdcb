"""Gluon emission: a program in roles as one readable Python file that needs torch and triton alone.

The file is as one of Triton: tables, helpers, the functions of each kernel, and a launcher that reads sizes and strides off
its arguments. Kernels in roles are for Hopper GPUs, and in Gluon; those without are Triton's, as they are in its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eqfuse.extract.resources import START_REGISTERS
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.nodes import Program
from eqfuse.tile.check import TileError
from eqfuse.tile.gluon.functions import OWN
from eqfuse.tile.gluon.kernel import SUMMED_BYTES, Descriptor, KernelText, write_kernel
from eqfuse.tile.gluon.runtime import NAMES, RUNTIME
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.roles.nodes import RolesKernel, RolesProgram
from eqfuse.tile.triton.functions import LIBRARY
from eqfuse.tile.triton.kernel import KernelText as TritonText
from eqfuse.tile.triton.module import TritonModule, config_of, functions_of, limits_of, schedule_of
from eqfuse.tile.triton.parameters import Names, Tables, TensorInfo
from eqfuse.tile.triton.runtime import LIBRARY_IMPORTS, MULTIPLY, RUNTIME_NAMES, without
from eqfuse.tile.triton.runtime import RUNTIME as TRITON_RUNTIME
from eqfuse.tile.triton.template import (
    LibraryCall,
    Template,
    calls_text,
    helpers,
    labels,
    nested,
    table,
    tuple_text,
)
from eqfuse.tile.triton.wrap import wrap

MOST_COLUMNS = 1024
"""Positions of a tile along the last dim, of which the copy engine moves so many at a time as shared memory is laid out by."""

AnyText = KernelText | TritonText
"""A printed kernel of either language."""


def emit(
    program: RolesProgram,
    source: Program,
    dtypes: Mapping[str, str],
    configs: Sequence[KernelConfig] = (),
    *,
    name: str,
    sizes: Mapping[str, int] | None = None,
    extents: Mapping[str, int] | None = None,
) -> str:
    """The source text of a module whose function `name` runs `program`.

    `dtypes` gives the dtype of every input tensor, `configs` (one for each kernel, in order) warps and stages of those without
    roles, `sizes` are defaults for extents that no tensor determines, `extents` those that the plan was chosen for.
    """
    module = _Module(program, source, dtypes, configs, sizes or {}, extents or {}, name)
    every = module.kernels()
    kernels = [kernel for kernel in every if not isinstance(kernel, LibraryCall)]
    calls = len(kernels) < len(every)
    specialized, others = module.specialized(kernels), module.others(kernels)
    shared = helpers({key for kernel in kernels for key in kernel.helpers}, "@triton.jit")
    own = helpers({key for kernel in specialized for key in kernel.helpers}, "@gluon.jit", OWN)
    unused = ("index_dtype", "overlaps") if not others else ()
    return "\n".join(
        [
            *module.docstring(),
            "",
            *(["import warnings"] if others else []),
            *(LIBRARY_IMPORTS if calls else ()),
            *([""] if others or calls else []),
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
            *([LIBRARY] if any("libdevice." in line for line in shared) else []),
            "",
            "# Triton 3.9 calls the copies so.",
            'copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared',
            'copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global',
            "",
            *module.tables(kernels),
            *calls_text(every),
            *shared,
            *own,
            *functions_of(others),
            *(line for kernel in kernels for line in ("", "", *kernel.lines)),
            "",
            *without(TRITON_RUNTIME, (*unused, *(() if others else ("launch",)))).rstrip().splitlines(),
            "",
            *RUNTIME.rstrip().splitlines(),
            *(["", *MULTIPLY.rstrip().splitlines()] if calls else []),
            *module.launcher(every),
            "",
        ]
    )


class _Module(Template[AnyText]):
    RESERVED = (*RUNTIME_NAMES, *NAMES)
    SETTINGS = "settings"
    NOTE = "Raises ValueError where arguments do not fit: see suits() for how tensors may lie in memory."

    def __init__(
        self,
        program: RolesProgram,
        source: Program,
        dtypes: Mapping[str, str],
        configs: Sequence[KernelConfig],
        sizes: Mapping[str, int],
        extents: Mapping[str, int],
        name: str,
    ) -> None:
        super().__init__(program.buffers, program.domains, source, dtypes, sizes, name)
        self._program, self._configs = program, configs
        without_roles = tuple(k for k in program.kernels if not isinstance(k, RolesKernel))
        tiles = TileProgram(without_roles, program.buffers, program.domains, program.shards)
        self._triton = TritonModule(tiles, source, dtypes, sizes, name, extents)

    def kernels(self) -> list[AnyText | LibraryCall]:
        names = Names((self._name, *self.RESERVED))
        tensors = {name: TensorInfo(self._dtypes[name], labels(axes)) for name, axes in self._axes.items()}
        tables, facts = Tables(tensors, self._root), self._triton.facts()
        found: list[AnyText | LibraryCall] = []
        following = (*self._program.kernels[1:], None)
        for kernel, after in zip(self._program.kernels, following, strict=True):
            name = names.fresh(kernel.name)
            if isinstance(kernel, RolesKernel):
                found.append(write_kernel(kernel, name, tables))
            elif kernel.library is not None:
                found.append(LibraryCall(name, kernel.library))
            else:
                leads = after is not None and not isinstance(after, RolesKernel) and after.library is None
                found.append(self._triton.written(kernel, name, facts, waits=bool(found), leads=leads))
        return found

    def specialized(self, kernels: Sequence[AnyText]) -> list[KernelText]:
        """Those in roles."""
        return [kernel for kernel in kernels if isinstance(kernel, KernelText)]

    def others(self, kernels: Sequence[AnyText]) -> list[TritonText]:
        """Those of Triton."""
        return [kernel for kernel in kernels if isinstance(kernel, TritonText)]

    def docstring(self) -> list[str]:
        roles = []
        for kernel in self._program.kernels:
            if isinstance(kernel, RolesKernel):
                rings = ", ".join(f"{ring.slots} of {ring.tensor}" for ring in kernel.rings)
                roles.append(f"{kernel.name}: 1 producer, {kernel.consumers} consumers; slots: {rings}")
            else:
                roles.append(f"{schedule_of(kernel)} (Triton)")
        return self._docstring("Gluon kernels for Hopper GPUs", "Roles", roles)

    def tables(self, kernels: Sequence[AnyText]) -> list[str]:
        specialized = self.specialized(kernels)
        copied = dict.fromkeys(d.tensor for k in specialized for d in k.parameters.descriptors.values())
        lines = [*self._tensors(), "", "# Tensors that the copy engine reads or writes."]
        lines.append(f"COPIED = {tuple_text([repr(name) for name in copied])}".replace("'", '"'))
        lines += [
            "",
            "# Last axes of those that a call makes, and the positions that lengths are to be multiples of.",
        ]
        lines.append(f"ENDS = {tuple_text(self._ends(copied))}")
        lines += [
            "",
            *self._extents(),
            "",
            "# Default block sizes; warps and stages of kernels without roles.",
        ]
        configs = dict(zip((k.name for k in self._program.kernels), self._configs, strict=False))
        lines += nested(
            "CONFIGS",
            {
                k.name: _config(k) if isinstance(k, KernelText) else config_of(k, configs[k.name])
                for k in kernels
            },
        )
        lines += ["", "# Least and greatest size of a block."]
        lines += nested(
            "LIMITS",
            {k.name: self._limits(k) if isinstance(k, KernelText) else limits_of(k) for k in kernels},
        )
        lines += ["", *self._kinds(kernels)]
        lines += ["", "# Registers of a thread when a block starts, before roles share them out."]
        lines.append(
            table("REGISTERS", {k.name: str(START_REGISTERS[k.kernel.consumers]) for k in specialized})
        )
        lines += [
            "",
            "# Conditions that a launch knows: of sizes, and of numbers. Each value of one is a binary.",
        ]
        lines += nested_tuples(
            "SETTLED", {k.name: dict.fromkeys(k.parameters.known.values()) for k in specialized}
        )
        lines += nested_tuples(
            "SIGNS", {k.name: dict.fromkeys(k.parameters.signs.values()) for k in specialized}
        )
        lines += ["", "# Dtype and sizes of the tiles that descriptors are of."]
        lines += nested("TILES", {k.name: self._tiles(k) for k in specialized})
        return lines

    def _ends(self, copied: Iterable[str]) -> list[str]:
        made = {buffer.name for buffer in (*self._outputs, *self._temporaries)} & set(copied)
        ends = {(self._axes[name][-1], 16 // BYTES[self._dtypes[name]]): None for name in sorted(made)}
        return [f'("{axis}", {unit})' for axis, unit in ends]

    def _tiles(self, kernel: KernelText) -> dict[str, str]:
        return {
            d.name: f'("{_SIGNED[d.dtype]}", {tuple_text([f"{n!r}".replace(chr(39), chr(34)) for n in _tile(kernel, d)])})'
            for d in kernel.parameters.descriptors.values()
        }

    def _limits(self, kernel: KernelText) -> dict[str, str]:
        """Blocks along which tiles are copied or multiplied."""
        rows = kernel.kernel.rows
        described = [d.axes for d in kernel.parameters.descriptors.values()]
        axes = dict.fromkeys(a for each in described for a in each if a)
        inner = {a for each in described for a in each[:-1] if a}
        blocks = kernel.parameters.blocks
        widths = [d.dtype for d in kernel.parameters.descriptors.values() if d.dtype in BYTES]
        least = SUMMED_BYTES // min((BYTES[dtype] for dtype in widths), default=2)
        return {
            blocks[axis]: "(64, None)"
            if axis == rows
            else f"({least}, {256 if axis in inner else MOST_COLUMNS})"
            for axis in axes
            if axis in blocks
        }

    def launching(self, kernel: AnyText) -> str:
        return "launch_roles" if isinstance(kernel, KernelText) else "launch"

    def taken(self, kernel: AnyText) -> list[str]:
        if not isinstance(kernel, KernelText):
            return self._triton.taken(kernel)
        descriptors = [descriptor.tensor for descriptor in kernel.parameters.descriptors.values()]
        return [tuple_text(descriptors), tuple_text(list(kernel.parameters.pointers))]

    def signs(self, kernel: AnyText) -> list[str]:
        if not isinstance(kernel, KernelText):
            return []

        def unknown(axis: str) -> str:
            raise TileError(f"a sign depends on {axis}")

        conditions = {name: condition for condition, name in kernel.parameters.signs.items()}
        return [tuple_text([kernel.at_call(each, unknown, unknown) for each in conditions.values()])]

    def computed(self, kernel: AnyText, items: str, integers: str, size: str, blocks: str) -> list[str]:
        if not isinstance(kernel, KernelText):
            return self._triton.computed(kernel, items, integers, size, blocks)
        parameters = kernel.parameters
        tiles = [tuple_text(self._sizes_of(kernel, d, blocks)) for d in parameters.descriptors.values()]

        def extent(axis: str) -> str:
            return self._extent(size, axis)

        def length(axis: str) -> str:
            return f'{blocks}["{parameters.blocks[axis]}"]' if axis in parameters.blocks else "1"

        constants = {name: f'{blocks}["{name}"]' for name in parameters.blocks.values()}
        constants |= {
            name: kernel.at_call(condition, extent, length) for condition, name in parameters.known.items()
        }
        made = ", ".join(f'"{name}": {text}' for name, text in constants.items())
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
            parts = kernel.kernel.parts_of(axis)
            found.append(f"{size} // {parts}" if parts > 1 else size)
        return found


def nested_tuples(name: str, rows: Mapping[str, Iterable[str]]) -> list[str]:
    """A table of tuples of names."""
    found = {key: tuple_text([f'"{each}"' for each in names]) for key, names in rows.items()}
    return wrap(table(name, found))


_SIGNED = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "i32": "i32", "f8e4m3": "fp8e4nv"}


def _tile(kernel: KernelText, descriptor: Descriptor) -> list[str | tuple[str, int] | int]:
    """The sizes of a tile: 1, the name of a block, or that and what it is divided by."""
    blocks, shared = kernel.parameters.blocks, kernel.kernel
    return [
        1
        if axis is None
        else (blocks[axis], shared.parts_of(axis))
        if shared.parts_of(axis) > 1
        else blocks[axis]
        for axis in descriptor.axes
    ]


def _config(kernel: KernelText) -> dict[str, str]:
    blocks = kernel.parameters.blocks
    return {
        blocks[b.axis]: str(b.size) for b in kernel.kernel.blocks if b.axis in blocks and b.size is not None
    }
