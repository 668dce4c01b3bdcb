"""What passes between the stages of the pipeline, on standard error: `EQFUSE_DEBUG=1` to `6`, each with all before it.

1   every stage as it ends, and its milliseconds
2   the program, and its outputs as they were rewritten
3   the merge of every group of reductions, or why it has none
4   every plan with its predicted cost, and the loop nest of the chosen one
5   the tile program
6   what is run of it: Triton or CPU source, the loops of C++, and the certificate
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from eqfuse.errors import EqfuseError

MOST = 6


def level() -> int:
    """The level that is asked for; 0 prints nothing. Raises EqfuseError where `EQFUSE_DEBUG` is no level."""
    text = os.environ.get("EQFUSE_DEBUG") or "0"
    if not text.isdecimal() or int(text) > MOST:
        raise EqfuseError(
            f"EQFUSE_DEBUG is {text!r}", hint=f"give a level from 0 (nothing) to {MOST} (everything)"
        )
    return int(text)


def show(least: int, title: str, text: Callable[[], object]) -> None:
    """Prints a titled text where the level is at least `least`; `text` is only called then."""
    if level() >= least:
        print(f"-- {title}\n{text()}\n", file=sys.stderr)


def note(line: str) -> None:
    """Prints one line at every level but 0."""
    if level():
        print(f"-- {line}", file=sys.stderr)
