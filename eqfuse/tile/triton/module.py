"""Triton emission: a tile program as one readable Python file that needs torch and triton alone.

The file holds tables (dtypes and axes of tensors, default block sizes), the helpers that its
kernels use, one `@triton.jit` function per kernel, and a launcher that reads sizes and strides off
its arguments, allocates what it has to, and calls the kernels in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eqfuse.errors import ScheduleError
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import axes_of
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.triton.functions import LIBRARY
from eqfuse.tile.triton.kernel import KernelText, write_kernel
from eqfuse.tile.triton.parameters import ALIGNMENT, INDEX, Names, Tables, TensorInfo
from eqfuse.tile.triton.runtime import (
    LIBRARY_IMPORTS,
    MULTIPLY,
    RECORDED,
    RECORDED_IMPORTS,
    RECORDED_MULTIPLY,
    RUNTIME,
    RUNTIME_NAMES,
)
from eqfuse.tile.triton.template import (
    LibraryCall,
    Template,
    calls_text,
    helpers,
    labels,
    launch_text,
    nested,
    shape,
    tuple_text,
)
from eqfuse.tile.triton.wrap import wrap


def emit(
    program: TileProgram,
    source: Program,
    dtypes: Mapping[str, str],
    configs: tuple[KernelConfig, ...],
    *,
    name: str,
    sizes: Mapping[str, int] | None = None,
    extents: Mapping[str, int] | None = None,
    recorded: str | None = None,
) -> str:
    """The source text of a module whose function `name` runs `program`.

    `dtypes` gives the dtype of every input tensor, `configs` (one per kernel, in order) warps and stages; block sizes
    are those of the tile program. `sizes` are defaults for extents that no tensor determines, such as the number of
    shards; `extents` are those that the plan was chosen for: an axis that is no power of two there gets no flag that
    says that it fills its block, which would be one more binary. With `recorded`, the dtype of positions (int32 or
    int64), torch records the launches of a call, whose sizes may be symbols, and calls remember nothing. Raises
    ScheduleError where a block that was lowered for a fixed size is too small for the dot that reads it.
    """
    module = TritonModule(program, source, dtypes, sizes or {}, name, extents or {}, recorded)
    every = module.kernels()
    kernels = [kernel for kernel in every if isinstance(kernel, KernelText)]
    calls = len(kernels) < len(every)
    used = helpers({key for kernel in kernels for key in kernel.helpers}, "@triton.jit")
    text = "\n".join(
        [
            *module.docstring(),
            "",
            *([] if recorded else ["import warnings"]),
            *(LIBRARY_IMPORTS if calls else ()),
            *([""] if calls or not recorded else []),
            "import torch",
            "import triton",
            "import triton.language as tl",
            *(RECORDED_IMPORTS if recorded else []),
            *([LIBRARY] if any("libdevice." in line for line in used) else []),
            "",
            *module.tables(kernels, [c for k, c in zip(every, configs, strict=True) if k in kernels]),
            *calls_text(every),
            *used,
            *functions_of(kernels),
            *(line for kernel in kernels for line in ("", "", *kernel.lines)),
            "",
            *(RECORDED if recorded else RUNTIME).rstrip().splitlines(),
            *(["", *(RECORDED_MULTIPLY if recorded else MULTIPLY).rstrip().splitlines()] if calls else []),
            *module.launcher(every),
            "",
        ]
    )
    return text


def functions_of(kernels: Iterable[KernelText]) -> list[str]:
    """The functions that kernels combine states of folds with."""
    found = {name: text for kernel in kernels for name, text in kernel.combines.items()}
    return [
        line
        for text in found.values()
        for line in ("", "", "@triton.jit", *(part for each in text.splitlines() for part in wrap(each)))
    ]


class TritonModule(Template[KernelText]):
    """A module of Triton kernels in parts."""

    RESERVED = RUNTIME_NAMES
    SETTINGS = "settings"
    NOTE = "Tensors may have any strides. Raises ValueError where arguments do not fit."

    def __init__(
        self,
        program: TileProgram,
        source: Program,
        dtypes: Mapping[str, str],
        sizes: Mapping[str, int],
        name: str,
        extents: Mapping[str, int],
        recorded: str | None = None,
    ) -> None:
        super().__init__(program.buffers, program.domains, source, dtypes, sizes, name)
        self._program, self._recorded = program, recorded
        self._ragged = frozenset(axis for axis, n in extents.items() if n < 2 or n & (n - 1))

    def kernels(self) -> list[KernelText | LibraryCall]:
        names = Names((self._name, *self.RESERVED))
        facts, found = self.facts(), list[KernelText | LibraryCall]()
        for kernel, after in zip(self._program.kernels, (*self._program.kernels[1:], None), strict=True):
            name = names.fresh(kernel.name)
            if kernel.library is not None:
                found.append(LibraryCall(name, kernel.library))
            else:
                leads = after is not None and after.library is None
                found.append(self.written(kernel, name, facts, waits=bool(found), leads=leads))
        return found

    def facts(self) -> Tables:
        """What the text of every kernel depends on."""
        tensors = {
            name: TensorInfo(self._dtypes[name], labels(axes), axes[-1] if axes else None)
            for name, axes in self._axes.items()
        }
        own = {self._root[axis] for axis in axes_of(self._source.outputs)}
        synthetic = {axis for b in self._temporaries for axis in self._axes[b.name] if axis not in own}
        shards = frozenset(axis for axis in synthetic if axis is not None)
        index = f"tl.{self._recorded}" if self._recorded else INDEX
        return Tables(tensors, self._root, shards, self._ragged, index)

    def written(self, kernel: Kernel, name: str, facts: Tables, *, waits: bool, leads: bool) -> KernelText:
        """The text of a kernel that comes after another one, and that leads to another one of Triton's. Raises ScheduleError."""
        flags = (*(("WAITS",) if waits else ()), *(("LEADS",) if leads else ()))
        text = write_kernel(kernel, name, facts, () if self._recorded else flags)
        for block, most in text.most.items():
            if text.least.get(block, 1) > most:
                raise ScheduleError(
                    f"{block} of kernel {text.name} is {most}, too small for a dot",
                    hint=f"choose at least {text.least[block]}, or a schedule without a dot over that axis",
                )
        return text

    # Text before the kernels --------------------------------------------------------------------

    def docstring(self) -> list[str]:
        schedule = [schedule_of(kernel) for kernel in self._program.kernels]
        return self._docstring("Triton kernels", "Schedule", schedule)

    def tables(self, kernels: Sequence[KernelText], configs: Sequence[KernelConfig]) -> list[str]:
        lines = [*self._tensors(), "", *self._extents()]
        lines += ["", "# Default block sizes, warps and stages."]
        lines += nested("CONFIGS", {k.name: config_of(k, c) for k, c in zip(kernels, configs, strict=True)})
        lines += [
            "",
            "# Least size of a block (for its dots), and greatest (where positions share a quotient).",
        ]
        lines += nested("LIMITS", {k.name: limits_of(k) for k in kernels})
        lines += ["", *self._kinds(kernels)]
        lines += ["", "# Tensors that the kernels take, and numbers; None where the number is made of sizes."]
        lines += nested("ARGUMENTS", {k.name: _arguments(k) for k in kernels})
        return lines

    # The launcher -------------------------------------------------------------------------------

    def _remembered(self, known: str, key: str) -> str:
        return f"{known} = {{}}" if self._recorded else super()._remembered(known, key)

    def _reused(self) -> str:
        return f": {', '.join(buffer.name + shape(buffer) for buffer in self._temporaries)}"

    def taken(self, kernel: KernelText) -> list[str]:
        return [tuple_text(list(kernel.parameters.pointers))]

    def _holds(self, condition: str) -> str:
        """Whether a condition on sizes holds; where they may be symbols, whether it does for all of them: it asks for none."""
        return f"statically_known_true({condition})" if self._recorded else condition

    def _divides(self, lengths: Sequence[str]) -> str:
        """Whether lengths are multiples of the alignment."""
        if self._recorded:
            return " and ".join(self._holds(f"{length} % {ALIGNMENT} == 0") for length in lengths)
        return f"not ({' or '.join(f'{length} % {ALIGNMENT}' for length in lengths)})"

    def computed(self, kernel: KernelText, items: str, integers: str, size: str, blocks: str) -> list[str]:
        parameters = kernel.parameters

        def extent(axis: str) -> str:
            return self._extent(size, axis)

        constants = {name: f'{blocks}["{name}"]' for name in parameters.blocks.values()}
        for axis, flag in parameters.even.items():
            constants[flag] = self._holds(f'{extent(axis)} == {blocks}["{parameters.blocks[axis]}"]')
        for axis, flag in parameters.aligned.items():
            lengths = [name for name, along in parameters.lengths.items() if along == axis]
            made = (launch_text(kernel.at_launch[name], extent) for name in lengths)
            constants[flag] = self._divides((extent(axis), *made))
        constants |= {} if parameters.stages is None else {parameters.stages: f'{blocks}["num_stages"]'}
        constants |= dict.fromkeys(parameters.flags, f"overlaps({self._outputs[0].name})")
        if parameters.index == INDEX:
            constants[INDEX] = f"index_dtype({', '.join(parameters.pointers)})"
        listed = ", ".join(f'"{name}": {text}' for name, text in constants.items())
        return [items, integers, f"{{{listed}}}"]


def schedule_of(kernel: Kernel) -> str:
    """The grid and the loops of a kernel, as a line of text."""
    kinds = {"grid": "grid", "loop": "loop", "whole": "whole", "unit": "loop by one"}
    if kernel.library is not None:
        return f"{kernel.name}: torch's library of matrix products"
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


def config_of(kernel: KernelText, config: KernelConfig) -> dict[str, str]:
    """A kernel's entry in CONFIGS."""
    names = kernel.parameters.blocks
    blocks = [block for block in kernel.kernel.blocks if block.axis in names and block.size is not None]
    sizes = {names[block.axis]: str(block.size) for block in blocks}
    return {**sizes, "num_warps": str(config.warps), "num_stages": str(config.stages)}


def limits_of(kernel: KernelText) -> dict[str, str]:
    """A kernel's entry in LIMITS."""
    blocks = [
        name for name in kernel.parameters.blocks.values() if name in kernel.least or name in kernel.most
    ]
    return {name: f"({kernel.least.get(name, 1)}, {kernel.most.get(name)})" for name in blocks}


def _arguments(kernel: KernelText) -> dict[str, str]:
    numbers = [None if name in kernel.at_launch else name for name in kernel.parameters.scalars]
    return {
        "tensors": tuple_text([f'"{name}"' for name in kernel.parameters.pointers]),
        "numbers": tuple_text(["None" if name is None else f'"{name}"' for name in numbers]),
    }
