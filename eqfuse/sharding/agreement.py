"""What ranks say to each other before a call, so that all of them go on, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from eqfuse.errors import EqfuseError
from eqfuse.sharding.axes import Lengths
from eqfuse.sharding.exchange import Group

WORDS = 24
"""Numbers that a rank says: whether it failed, what it calls, and the lengths of sharded axes."""
MOST_AXES = 16


def agreed(
    groups: Sequence[Group],
    meshes: Mapping[str, str],
    device: torch.device,
    said: Mapping[str, int],
    own: Mapping[str, int],
    failed: EqfuseError | None,
) -> dict[str, Lengths]:
    """The lengths of every sharded axis on all ranks, from a rank's `own`. `meshes` are the dimensions of the mesh by axis, `said` is what
    all ranks have to say alike, `failed` why this one cannot go on. Raises EqfuseError on all ranks where they differ, or where one of them has
    failed."""
    found: dict[str, Lengths] = {}
    for group in groups:  # ranks along one dimension pass on what went wrong along those before
        axes = [axis for axis, mesh in meshes.items() if mesh == group.name and axis in own]
        row = [int(failed is not None), *said.values(), *(own[axis] for axis in axes)]
        row += [0] * (WORDS - len(row))
        rows = group.numbers(row, device)
        failed = failed or _difference(group, list(said), rows)
        for at, axis in enumerate(axes):
            found[axis] = tuple(int(other[1 + len(said) + at]) for other in rows)
    if failed is not None:
        raise failed
    return found


def _difference(group: Group, said: Sequence[str], rows: Sequence[Sequence[int]]) -> EqfuseError | None:
    """The error of a rank that has called as the program asks, where another one has not, or has called something else."""
    for rank, other in enumerate(rows):
        if other[0]:
            return EqfuseError(
                f"rank {rank} of {group.name!r} was not called as the program asks",
                hint="its own error says what is wrong there",
            )
        for what, here, there in zip(said, rows[group.rank][1:], other[1:], strict=False):
            if here != there:
                return EqfuseError(
                    f"rank {rank} of {group.name!r} differs from rank {group.rank} in its {what}",
                    hint="all ranks call the same program alike; only lengths of sharded axes may differ",
                )
    return None


def digest(value: Any) -> int:
    """63 bits of what a value looks like, the same in every process."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
