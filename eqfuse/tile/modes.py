"""Whether kernels on a CPU become C++."""

from __future__ import annotations

import os
from typing import Literal, get_args

from eqfuse.errors import EqfuseError

Mode = Literal["background", "wait", "off"]
"""Whether kernels become C++: compiled in the background while calls run as torch calls, before the first call
returns, or never."""


def mode_named(name: str | None) -> Mode:
    """A mode by its name; `$EQFUSE_NATIVE`, or "background", where that is None. Raises EqfuseError for another name."""
    name = os.environ.get("EQFUSE_NATIVE", "background") if name is None else name
    for mode in get_args(Mode):
        if mode == name:
            return mode  # type: ignore[no-any-return]
    raise EqfuseError(f"native is {name!r}", hint=f"choose one of {', '.join(get_args(Mode))}")
