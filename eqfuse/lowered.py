"""A loop nest, lowered for a device: the tile program that is printed, and its form in roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eqfuse.compiled import Compiled
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.extract.devices import Device
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.terms.nodes import Program
from eqfuse.terms.sizes import places
from eqfuse.tile.check import TileError
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.storage import resolve_extents

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.tile.native.context import Interface
    from eqfuse.tile.roles.loads import Tensors
    from eqfuse.tile.roles.nodes import RolesProgram

Known = dict[tuple[int, KernelConfig], Kernel]
"""Kernels that were lowered, by their numbers in the nest and their blocks."""


def lower_nest(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    configs: Sequence[KernelConfig],
    device: Device,
    least_dot: int | None = None,
    known: Known | None = None,
) -> TileProgram:
    """The tile program of a nest, after the passes of the device. The CPU takes matrix products over shared leading
    axes; a GPU's matrix unit wants `least_dot` positions of every axis (the device's own minimum by default). `known` has kernels
    that were lowered with all but their blocks the same."""
    from eqfuse.extract.tile_sizes import TENSOR_CORE_MIN
    from eqfuse.tile.lower.program import lower as lower_tiles
    from eqfuse.tile.passes.pipeline import passes_for, run_passes

    on_cpu = device.kind == "cpu"
    smallest = least_dot or (1 if on_cpu else TENSOR_CORE_MIN)
    tiles = lower_tiles(
        nest, program, dtypes, tuple(configs), batched_dots=on_cpu, least_dot=smallest, known=known
    )
    return run_passes(tiles, passes_for(device.kind), dtypes)


def native_tiles(compiled: Compiled, program: Program) -> TileProgram:
    """The tile program of a shape in blocks for native code on a CPU."""
    from eqfuse.tile.native.blocks import native_configs

    chosen, sizes = compiled.chosen, _sizes(compiled)
    configs = native_configs(compiled.tile, chosen.plan.configs, sizes)
    return lower_nest(chosen.nest, program, compiled.dtypes, configs, compiled.device)


@dataclass(frozen=True)
class NativeSource:
    """The C++ of a tile program for contiguous tensors; `sizes` are those of its axes."""

    tiles: TileProgram
    interface: Interface
    sizes: Mapping[str, int]
    text: str


def native_source(compiled: Compiled, program: Program) -> NativeSource:
    """The C++ of a shape on a CPU, which is not compiled. Raises EqfuseError, which says why, where it has none."""
    from eqfuse.tile.native.context import Interface
    from eqfuse.tile.native.nodes import NotNative
    from eqfuse.tile.native.printer import source_of

    tiles, sizes = native_tiles(compiled, program), _sizes(compiled)
    ranks = {tensor.name: tensor.rank for tensor in program.tensors}
    rows = frozenset((name, rank - 1) for name, rank in ranks.items() if rank)
    interface = Interface.of(tiles, ranks, rows, sizes)
    try:
        return NativeSource(tiles, interface, sizes, source_of(tiles, interface, sizes))
    except NotNative as why:
        raise EqfuseError(f"there is no C++: {why}", hint="torch calls run the kernel on a CPU") from None


def _sizes(compiled: Compiled) -> dict[str, int]:
    """The size of every axis, and the numbers of shards."""
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    return resolve_extents(compiled.tile, compiled.extents, shards)


def in_roles(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    device: Device,
    roles: Sequence[Roles | None],
    configs: Sequence[KernelConfig] = (),
    least_dot: int | None = None,
    known: Known | None = None,
) -> RolesProgram:
    """A nest, its kernels divided into roles; those without are in the blocks of `configs`. `known` is as `lower_nest` takes it.
    Raises Unsuited."""
    import eqfuse.tile.roles.printer  # noqa: F401  (so that programs have a listing)
    from eqfuse.tile.roles.passes import with_roles

    chosen = [configs[n] if each is None else KernelConfig(each.blocks) for n, each in enumerate(roles)]
    tiles = lower_nest(nest, program, dtypes, chosen, device, least_dot, known)
    return with_roles(tiles, roles, tensors_of(program, tiles), finite=program.assume_finite)


def tensors_of(program: Program, tiles: TileProgram) -> Tensors:
    """The axes of the dims of every tensor, as far as they are known. All axes along which a dim is read have its extent."""
    from eqfuse.tile.roles.loads import Tensors

    axes: dict[str, list[str | None]] = {t.name: [*(t.axes or (None,) * t.rank)] for t in program.tensors}
    same = Tensors({}, dict(tiles.domains))
    for axis, tensor, dimension in places(program):
        known = axes[tensor][dimension]
        if known is None:
            axes[tensor][dimension] = axis
        else:
            same = same.equal(known, axis)
    whole = {name: tuple(each) for name, each in axes.items()}
    return replace(same, axes=whole | {buffer.name: buffer.axes for buffer in tiles.buffers})


@contextmanager
def faults() -> Iterator[None]:
    """A tile program that does not hold together is not verified: the program may run in another form."""
    try:
        yield
    except TileError as fault:
        raise VerificationError(
            f"the fused program was not verified: {fault.message}",
            hint="a fault of eqfuse, which the program does not cause: please report it with the program",
        ) from fault
