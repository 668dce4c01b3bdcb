"""What passes between the stages of the pipeline, as logs of Python's `logging`, each by its name:

    regions      what `torch.compile(model, backend="eqfuse")` does with each region of a model, and how many are left
    stages       every stage as it ends, and its milliseconds
    program      the program, and its outputs as they were rewritten
    merge        the merge of every group of reductions, or why it has none
    plan         every plan with its predicted cost, and the loop nest of the chosen one
    tiles        the tile program, and the one in roles
    source       what is run of it: Triton, Gluon or CPU source, the loops of C++
    certificate  what was verified
    cache        what is not kept, or not read, and why

`EQFUSE_LOG=plan,merge` writes those to standard error, `EQFUSE_LOG=all` all of them, as `TORCH_LOGS` does for torch's. In a program,
`logging.getLogger("eqfuse.plan").setLevel(logging.DEBUG)` sends them to the handlers that it has.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from eqfuse.errors import EqfuseError, did_you_mean

NAMES = ("regions", "stages", "program", "merge", "plan", "tiles", "source", "certificate", "cache")

_loggers = {name: logging.getLogger(f"eqfuse.{name}") for name in NAMES}


class _ToError(logging.Handler):
    """Writes to standard error as it is now."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"-- {record.getMessage()}", file=sys.stderr)


_handler = _ToError(logging.DEBUG)
_read = ""


def _configure() -> None:
    """Gives the loggers that `EQFUSE_LOG` names the handler, where that has changed. Raises EqfuseError for names that are none."""
    global _read
    text = os.environ.get("EQFUSE_LOG", "")
    if text == _read:
        return
    wanted = {name.strip() for name in text.split(",")} - {""}
    for name in sorted(wanted - {*NAMES, "all"}):
        hint = did_you_mean(name, NAMES) or f"logs: {' '.join(NAMES)} all"
        raise EqfuseError(f"EQFUSE_LOG names {name!r}, which is no log", hint=hint)
    _read = text
    for name, logger in _loggers.items():
        is_wanted = name in wanted or "all" in wanted
        if is_wanted and _handler not in logger.handlers:
            logger.addHandler(_handler)
            logger.setLevel(logging.DEBUG)
        elif not is_wanted and _handler in logger.handlers:
            logger.removeHandler(_handler)
            logger.setLevel(logging.NOTSET)


def is_on(name: str) -> bool:
    """Whether a log is written. Raises EqfuseError where `EQFUSE_LOG` names what is no log."""
    _configure()
    return _loggers[name].isEnabledFor(logging.DEBUG)


def show(name: str, title: str, text: Callable[[], object]) -> None:
    """Logs a titled text; `text` is only called where it is."""
    if is_on(name):
        _loggers[name].debug("%s\n%s\n", title, text())


def note(name: str, line: str) -> None:
    """Logs one line."""
    if is_on(name):
        _loggers[name].debug("%s", line)


def fault(error: Exception) -> str:
    """What is said of a fault of eqfuse's own; raises it where stages are logged."""
    if is_on("stages"):
        raise error
    return f"internal error: {type(error).__name__}: {error}\nthis is a fault of eqfuse; with EQFUSE_LOG=stages it shows where"
