"""Settings that a search has found, kept between processes: one JSON file for each program, shape and device.

What a file says is checked against the candidates of the program that it is read for, and one that does not fit is as
good as none. The merges are never in it: the loop nest of its plan is
derived and certified as any other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from eqfuse.cache import entries
from eqfuse.cache.entries import Key
from eqfuse.cache.files import Unfit
from eqfuse.extract.candidates import MAX_SHARDS, Candidate, shape_of
from eqfuse.extract.devices import Device
from eqfuse.extract.neighbours import STAGES, WARPS, changed, may_become
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel, Nest
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.loops.printer import show

KIND = "tuned"


@dataclass(frozen=True)
class Found:
    """A plan of a file, and the seconds that it and the plan chosen without a search took when it was found."""

    candidate: Candidate
    seconds: float
    chosen_seconds: float


def place(key: Key) -> Path:
    """The file for a key; need not exist."""
    return entries.place(KIND, key)


def keep(key: Key, found: Found) -> None:
    """Writes the file. Raises OSError."""
    plan = found.candidate.plan
    content = {
        "nest": _digest(found.candidate.nest),
        "schedule": plan.schedule,
        "shards": plan.shards,
        "kernels": [
            {
                "blocks": {b.axis: b.size for b in config.blocks},
                "warps": config.warps,
                "stages": config.stages,
            }
            for config in plan.configs
        ],
        "roles": [None if roles is None else _told(roles) for roles in plan.roles],
        "seconds": found.seconds,
        "chosen_seconds": found.chosen_seconds,
    }
    entries.keep(KIND, key, content)


def read(
    key: Key,
    candidates: Sequence[Candidate],
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
) -> Found | None:
    """What the file for a key says, where there is one. `candidates` are the program's for these extents.

    Raises Unfit for one that cannot be read or says something that no search would have written.
    """
    content = entries.read(KIND, key)
    if content is None:
        return None
    same = [
        c
        for c in candidates
        if c.plan.schedule == content.get("schedule") and _digest(c.nest) == content.get("nest")
    ]
    if not same:
        raise Unfit("none of the program's loop nests is the one that it names")
    shards = content.get("shards")
    if not _is_power(shards, 1, 2 * MAX_SHARDS if same[0].nest.shards else 1):
        raise Unfit(f"{shards!r} is no number of shards")
    kernels = content.get("kernels")
    if not isinstance(kernels, list) or len(kernels) != len(same[0].plan.configs):
        raise Unfit(f"it does not have settings for {len(same[0].plan.configs)} kernels")
    shape = shape_of(same[0].nest, extents, dtypes, shards)
    configs = tuple(
        _config(settings, kernel, own, shape)
        for settings, kernel, own in zip(kernels, same[0].nest.kernels, same[0].plan.configs, strict=True)
    )
    found = changed(same[0], configs, shards, extents, dtypes, device)
    if found is None:
        raise Unfit(f"its blocks do not fit {device.name}")
    told = content.get("roles")
    if not isinstance(told, list) or len(told) not in (0, len(configs)):
        raise Unfit(f"it does not have roles for {len(configs)} kernels")
    if told:
        roles = [None if each is None else _roles(each, own) for each, own in zip(told, configs, strict=True)]
        names = (kernel.name for kernel in found.nest.kernels)
        codes = [
            (name, "Triton: as it was timed" if each is None else f"Gluon: {each}")
            for name, each in zip(names, roles, strict=True)
        ]
        found = replace(found, plan=found.plan.with_roles(roles, codes))
    return Found(found, _seconds(content, "seconds"), _seconds(content, "chosen_seconds"))


def _config(settings: object, kernel: Kernel, own: KernelConfig, shape: Shape) -> KernelConfig:
    """Settings of one kernel; `own` are those that the cost model chose, of the same axes and kinds."""
    if not isinstance(settings, dict) or not isinstance(settings.get("blocks"), dict):
        raise Unfit("settings of a kernel have no blocks")
    sizes, warps, stages = settings["blocks"], settings.get("warps"), settings.get("stages")
    if list(sizes) != [b.axis for b in own.blocks]:
        raise Unfit(f"its blocks are not those of {', '.join(b.axis for b in own.blocks)}")
    for block in own.blocks:
        size = sizes[block.axis]
        if size != block.size and not (_is_integer(size) and may_become(kernel, block, size, shape)):
            raise Unfit(f"{size!r} is no block of {block.axis}")
    if not _is_power(warps, *WARPS):
        raise Unfit(f"{warps!r} is no number of warps")
    if not (_is_integer(stages) and STAGES[0] <= stages <= STAGES[1]):
        raise Unfit(f"{stages!r} is no number of stages")
    return KernelConfig(tuple(replace(b, size=sizes[b.axis]) for b in own.blocks), warps, stages)


def _told(roles: Roles) -> dict[str, Any]:
    return {
        "blocks": {b.axis: b.size for b in roles.blocks},
        "consumers": roles.consumers,
        "slots": roles.slots,
        "delayed": list(roles.delayed),
        "persistent": roles.persistent,
        "ahead": roles.ahead,
        "columns": roles.columns,
        "led": roles.led,
    }


def _roles(told: object, config: KernelConfig) -> Roles:
    """Roles of a kernel with blocks of the same axes and kinds as a configuration."""
    if not isinstance(told, dict) or not isinstance(told.get("blocks"), dict):
        raise Unfit("roles have no blocks")
    sizes, delayed = told["blocks"], told.get("delayed")
    if list(sizes) != [b.axis for b in config.blocks]:
        raise Unfit("the blocks of its roles are not those of the kernel")
    numbers = [told.get("consumers"), told.get("slots"), *(n for n in sizes.values() if n is not None)]
    if not all(_is_integer(n) and 0 < n <= 1024 for n in numbers):
        raise Unfit(f"{told!r} are no roles")
    if not isinstance(delayed, list) or not all(map(_is_integer, delayed)):
        raise Unfit(f"{delayed!r} are no products")
    blocks = tuple(replace(b, size=sizes[b.axis]) for b in config.blocks)
    persistent, ahead = told.get("persistent") is True, told.get("ahead") is True
    if ahead and not persistent:
        raise Unfit("tiles of the next item are ahead, and there is none")
    columns = told.get("columns") is True
    led = told.get("led") is True
    return Roles(blocks, told["consumers"], told["slots"], tuple(delayed), persistent, ahead, columns, led)


def _digest(nest: Nest) -> str:
    """Names a loop nest by its text: a later version that lowers otherwise finds other settings."""
    return hashlib.sha256(show(nest).encode()).hexdigest()[:16]


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_power(value: Any, least: int, most: int) -> TypeGuard[int]:
    """Whether a value is a power of two between these."""
    return _is_integer(value) and least <= value <= most and value & (value - 1) == 0


def _seconds(content: Mapping[str, Any], name: str) -> float:
    value = content.get(name)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise Unfit(f"{name} is {value!r}")
    return value
