"""`eqfuse watch`: a program compiled whenever its file changes, on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

import eqfuse as eq
from eqfuse import logs
from eqfuse.errors import EqfuseError
from eqfuse.explain.why import plan_lines, predicted_for
from eqfuse.program_files import read

EVERY = 0.2
"""Seconds between two looks at the file."""


def watch(file: str, compile: Callable[[str], eq.Kernel], console: Console) -> int:
    """Prints what `compile` makes of a file's text, and again after each change of it, until Ctrl-C: 0. Raises EqfuseError where the
    file is standard input."""
    if file == "-":
        raise EqfuseError("standard input does not change", hint="FILE is one that an editor writes")
    last = ""
    try:
        while True:
            try:
                source, missing = read(file), ""
            except EqfuseError as error:
                source, missing = "", f"{error.message}\nit is compiled once it is there"
            if last != (last := missing or f"\n{source}"):
                console.clear()
                shown = missing or described(source, compile)
                console.print(f"{file}, {time.strftime('%H:%M:%S')}", style="bold", markup=False)
                console.print(shown, markup=False, highlight=False, soft_wrap=True)
            time.sleep(EVERY)
    except KeyboardInterrupt:
        return 0


def described(source: str, compile: Callable[[str], eq.Kernel]) -> str:
    """The merge and the plans of a program and how sure its kernel is, or what is wrong with it."""
    try:
        kernel = compile(source)
        report = kernel.report
        plans = "\n".join(plan_lines(report.plans, report.plan))
        return f"{kernel.merge.of_parts}\n\n{predicted_for(report)}\n{plans}\n{kernel.graded}"
    except EqfuseError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (the next text may be well)
        return logs.fault(error)
