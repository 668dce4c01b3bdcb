"""How much memory and time a verification may take.

What one trial holds is counted beforehand, on degrees in place of numbers (`degrees.count`): a round of trials goes through the
stages so many at a time as memory has room for, and a trial that alone has none is not begun.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import thread_time

from eqfuse.errors import EqfuseError

MEGABYTES, SECONDS = 2048, 120
"""Of memory, and of processor time, for one verification, where `EQFUSE_VERIFY_MB` and `EQFUSE_VERIFY_SECONDS` say nothing else."""
BYTES = 56
"""An element of a value: two residues, a real number and its error, marks, and its part of what an operation makes on the way."""
SHARE = 0.15
"""Of the memory, what several trials at a time may take."""


@dataclass(frozen=True)
class Limits:
    """`megabytes` of memory beside what the process has, and `seconds` of one thread."""

    megabytes: int = MEGABYTES
    seconds: int = SECONDS

    @classmethod
    def of_environment(cls) -> Limits:
        """What the environment says. Raises EqfuseError where it says no number."""
        return cls(
            _number("EQFUSE_VERIFY_MB", MEGABYTES, "megabytes"),
            _number("EQFUSE_VERIFY_SECONDS", SECONDS, "seconds"),
        )

    def trials(self, elements: int, wanted: int) -> int:
        """How many trials of so many elements run at once; 0 where there is no room for one."""
        room = self.megabytes * 2**20 / (BYTES * max(1, elements))
        return 0 if room < 1 else max(1, min(wanted, int(SHARE * room)))

    def deadline(self) -> float:
        """When the time of a verification that begins now has passed, by the clock of its thread."""
        return thread_time() + self.seconds

    def too_large(self, elements: int) -> str:
        """What is said of trials for which there is no room."""
        needed = elements * BYTES / 2**20
        return f"one trial needs about {needed:.0f} MB at the smallest sizes, more than EQFUSE_VERIFY_MB = {self.megabytes}"

    def too_long(self) -> str:
        """What is said where time has passed."""
        return f"trials took longer than EQFUSE_VERIFY_SECONDS = {self.seconds} of processor time"


def _number(name: str, default: int, unit: str) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise EqfuseError(f"{name} is {text!r}", hint=f"give a number of {unit}, as {name}={default}")
    return int(text)
