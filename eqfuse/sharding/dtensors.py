"""DTensors as the arguments and the results of a sharded call. `torch.compile` traces what is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from eqfuse.errors import BindError


def placements(ranks: Iterable[str], dimensions: Mapping[int, str]) -> tuple[Placement, ...]:
    """For each dimension of the mesh, by name: sharded along the dimension of a tensor that has it, replicated where none has."""
    found: dict[str, Placement] = {mesh: Replicate() for mesh in ranks}
    found |= {mesh: Shard(dimension) for dimension, mesh in dimensions.items()}
    return tuple(found.values())


def local_parts(
    values: Mapping[str, Any], mesh: DeviceMesh, ranks: Sequence[str], sharded: Mapping[tuple[str, int], str]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The values with this rank's parts in place of DTensors, which are redistributed where they are placed otherwise, and the whole
    shapes of these. `sharded` has the dimension of the mesh of each sharded dimension of a tensor. Raises BindError where a DTensor is on another mesh."""
    local: dict[str, Any] = dict(values)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in values.items():
        if not isinstance(value, DTensor):
            continue
        if value.device_mesh != mesh:
            raise BindError(f"{name!r} is on another mesh", hint="give eq.shard the mesh of the DTensors")
        wanted = placements(ranks, {at: of for (tensor, at), of in sharded.items() if tensor == name})
        placed = value if tuple(value.placements) == wanted else value.redistribute(placements=wanted)
        local[name], shapes[name] = placed.to_local(), tuple(value.shape)
    return local, shapes


def from_local(
    value: torch.Tensor, mesh: DeviceMesh, where: Sequence[Placement], shape: Iterable[int]
) -> DTensor:
    """The contiguous DTensor of a whole shape of which this rank has a part."""
    whole = torch.Size(shape)
    strides = tuple(prod(whole[at + 1 :]) for at in range(len(whole)))
    return DTensor.from_local(value, mesh, where, run_check=False, shape=whole, stride=strides)
