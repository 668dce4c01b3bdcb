"""What the text of a program promises of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.errors import BindError, locate
from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Program, call, once
from eqfuse.terms.printer import show


def ascends(left: Expr, right: Expr) -> tuple[str, int] | None:
    """The tensor and the dimension of which `left <= right` says that elements do not fall: `t[b, j] <= t[b, j+1]`."""
    match left, right:
        case Load(tensor, first), Load(other, second) if tensor == other and len(first) == len(second):
            if not all(isinstance(at, Axis) for at in first) or len(set(first)) < len(first):
                return None
            moved = [place for place, at in enumerate(first) if second[place] is not at]
            if len(moved) == 1:
                at, following = first[moved[0]], second[moved[0]]
                if following in (call("add", at, Const(1)), call("add", Const(1), at)):
                    return tensor, moved[0]
    return None


@once
def ascending(program: Program) -> tuple[tuple[str, int], ...]:
    """The tensors whose integers do not fall along a dimension, and which dimension."""
    found = (ascends(left, right) for left, right in program.at_most)
    return tuple(dict.fromkeys(each for each in found if each is not None))


@once
def longer(program: Program) -> tuple[tuple[str, int, str, int], ...]:
    """Dimensions along which a tensor ascends that have more elements than an axis has positions: how many more, by what is
    read behind the last position, as `off[s+1]` is."""
    reads = longer_dimensions(program)
    return tuple(
        (tensor, place, axis, read.offset)
        for tensor, place in ascending(program)
        for axis, read in reads.get((tensor, place), {}).items()
    )


def read_along(load: Load, place: int, axis: str) -> int | None:
    """How many positions behind an axis an element is read along a dimension; None where it is not read along it."""
    match load.index[place]:
        case Axis(name) if name == axis:
            return 0
        case Call("add", (Axis(name), Const(int(by)))) | Call("add", (Const(int(by)), Axis(name))) if (
            name == axis and by > 0
        ):
            return by
    return None


def check_ascending(program: Program, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises BindError for an array of integers that falls along a dimension where the program says that it does not."""
    for left, right in program.at_most:
        found = ascends(left, right)
        if found is None or found[0] not in arrays:
            continue
        name, place = found
        falls = np.argwhere(np.diff(arrays[name], axis=place) < 0)
        if len(falls):
            at = ", ".join(map(str, falls[0]))
            following = ", ".join(str(n + (k == place)) for k, n in enumerate(falls[0]))
            raise BindError(
                f"{name}[{following}] is less than {name}[{at}], and the program says that {name} ascends",
                source=program.source,
                span=locate(program.source, f"{show(left)} <= {show(right)}") or locate(program.source, name),
                hint=f"sort {name!r}, or remove the assert",
            )
