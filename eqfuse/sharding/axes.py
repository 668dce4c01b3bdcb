"""Which axes of a program are sharded over which ranks: what `eq.shard` was given, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from eqfuse.errors import BindError, EqfuseError, did_you_mean
from eqfuse.sharding.nodes import Sharding
from eqfuse.terms.extents import axes_along
from eqfuse.terms.nodes import Program
from eqfuse.terms.prefixes import alike
from eqfuse.terms.sizes import check_names, check_ranks

Mesh = DeviceMesh | dist.ProcessGroup | int | Mapping[str, int]
Lengths = tuple[int, ...]


def even(count: int, ranks: int) -> Lengths:
    """The lengths of shards as DTensor cuts them: all as long as the first, the last ones shorter or empty."""
    return tuple(share(count, ranks, rank) for rank in range(ranks))


def share(count: Any, ranks: int, rank: int) -> Any:
    """The length of one of these; the count may be a symbol."""
    each = -(-count // ranks)
    return torch.sym_max(0, torch.sym_min(each, count - rank * each))  # type: ignore[no-untyped-call]


_groups: dict[str, list[dist.ProcessGroup]] = {}
"""Process groups that something was sharded over, by name: a group that is made anew may have the name of one that is gone."""


def names_of_groups(mesh: Mesh) -> list[str]:
    """A name for the process group of each dimension, the same on all ranks and in all processes that make the same groups in the
    same order."""
    if not isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        return []
    groups = [mesh] if isinstance(mesh, dist.ProcessGroup) else mesh.get_all_groups()
    found = []
    for group in groups:
        known = _groups.setdefault(group.group_name, [])
        at = next((at for at, each in enumerate(known) if each is group), len(known))
        if at == len(known):
            known.append(group)
        found.append(f"{group.group_name}.{at}")
    return found


def own_lengths(
    program: Program,
    sharding: Sharding,
    along: Mapping[tuple[str, int], str],
    shapes: Mapping[str, tuple[int, ...]],
    known: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    some: bool = False,
) -> dict[str, int]:
    """The positions of every sharded axis on this rank: by the shapes of its tensors, of which `along` has the axes of sharded dimensions, or by
    `sizes`. With `some`, shapes may lack tensors, and axes are left out that nothing gives. Raises BindError where tensors and sizes differ, a
    tensor lacks dimensions, or nothing gives an axis that is not `known`."""
    if not some:
        check_names(program, shapes, dict.fromkeys(program.scalars, 0))
        check_ranks(program, shapes)
    found: dict[str, tuple[int, str]] = {}
    for (tensor, dimension), axis in along.items():
        shape = shapes.get(tensor)
        if shape is None or len(shape) <= dimension or axis in sharding.outputs:
            continue
        length, first = found.setdefault(axis, (shape[dimension], repr(tensor)))
        if length != shape[dimension]:
            raise BindError(
                f"this rank has {length} positions of {axis!r} in {first}, {shape[dimension]} in {tensor!r}",
                hint="give every tensor the same positions",
            )
    for axis, size in (sizes or {}).items():
        of = sharding.classes.get(axis)
        if of is not None and of not in sharding.outputs:
            length, first = found.setdefault(of, (size, "sizes"))
            if length != size:
                raise BindError(
                    f"this rank has {length} positions of {of!r} in {first}, {size} in sizes",
                    hint="leave sizes out that tensors have",
                )
    for axis in () if some else sharding.meshes:
        if axis not in found and axis not in sharding.outputs and axis not in (known or {}):
            raise BindError(
                f"no tensor has the sharded axis {axis!r}",
                hint="shard axes that tensors are read along, or give this rank's positions in sizes",
            )
    return {axis: length for axis, (length, _) in found.items()}


def ranks_of(mesh: Mesh) -> dict[str, int]:
    """The numbers of ranks by dimension of the mesh; one of any name is ""."""
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise EqfuseError(
                "the mesh has no names of dimensions", hint='init_device_mesh(..., mesh_dim_names=("cp",))'
            )
        return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    found: dict[str, int] | None = (
        {"": dist.get_world_size(mesh)}
        if isinstance(mesh, dist.ProcessGroup)
        else {"": mesh}
        if isinstance(mesh, int)
        else dict(mesh)
        if isinstance(mesh, Mapping)
        else None
    )
    if not found or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in found.values()):
        raise EqfuseError(
            f"mesh is {mesh!r}", hint="give a DeviceMesh, a process group, or a number of ranks to simulate"
        )
    return found


def sharding_of(
    program: Program, sizes: dict[str, int], axes: Mapping[str, str], out: Mapping[str, str]
) -> Sharding:
    for given in (axes, out):
        if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in (*given, *given.values())):
            raise EqfuseError(f"axes are {given!r}", hint='map axes to dimensions of the mesh: {"j": "cp"}')
    if not axes and not out:
        raise EqfuseError("no axes are sharded", hint='map axes to dimensions of the mesh: {"j": "cp"}')
    same = alike(program)
    known = {*same, *axes_along(program.outputs, program.tensors)}
    if "" in sizes:
        names = dict.fromkeys([*axes.values(), *out.values()])
        if len(names) > 1:
            raise EqfuseError(
                f"the ranks have one dimension, not {len(names)}", hint="give a DeviceMesh, or {name: ranks}"
            )
        sizes[next(iter(names))] = sizes.pop("")
    meshes: dict[str, str] = {}
    for axis, mesh in (*axes.items(), *out.items()):
        if axis not in known:
            hint = did_you_mean(axis, known) or f"its axes are {', '.join(sorted(known))}"
            raise EqfuseError(f"the program has no axis {axis!r}", hint=hint)
        if mesh not in sizes:
            hint = did_you_mean(mesh, sizes) or f"its dimensions are {', '.join(sizes)}"
            raise EqfuseError(f"the mesh has no dimension {mesh!r}", hint=hint)
        of = str(same.get(axis, axis))
        if meshes.setdefault(of, mesh) != mesh:
            raise EqfuseError(
                f"{axis!r} is as long as an axis over {meshes[of]!r}", hint="shard both over one dimension"
            )
    of_outputs = {axis: str(same.get(axis, axis)) for axis in out}
    for axis, of in of_outputs.items():
        if any(str(same.get(each, each)) == of for each in axes):
            raise EqfuseError(f"{axis!r} is sharded in tensors already", hint="leave it out of `out`")
        if not any(axis in output.axes for output in program.outputs):
            raise EqfuseError(f"no output has the axis {axis!r}", hint="`out` has axes of outputs")
    meshes = dict(sorted(meshes.items()))  # in an order that all ranks have
    classes = {
        axis: str(same.get(axis, axis)) for axis in sorted(known) if str(same.get(axis, axis)) in meshes
    }
    for output in program.outputs:
        over = [meshes[classes[axis]] for axis in output.axes if axis in classes]
        if len(set(over)) < len(over):
            twice = next(mesh for mesh in over if over.count(mesh) > 1)
            raise EqfuseError(
                f"{output.name!r} has two axes over {twice!r}",
                hint="shard one of them, or over another dimension",
            )
    return Sharding(classes, meshes, frozenset(of_outputs.values()))


def link_of(mesh: Mesh) -> str:
    if isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group(0)
        if dist.get_backend(group) != "nccl":
            return "gloo"
        hosts = torch.cuda.device_count() or 1
        return "nvlink" if dist.get_world_size() <= hosts else "infiniband"
    return "nvlink"
