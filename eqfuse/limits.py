"""How much memory and time a verification may take, and a derivation.

What one trial of a verification holds is counted beforehand, on degrees in place of numbers (`degrees.count`): a round of trials
goes through the stages so many at a time as memory has room for, and a trial that alone has none is not begun.

A derivation is the rewriting of one program, the merges and the plan of one shape, or one gradient. What it calls asks
`check()` now and then, which ends it. Its e-graphs live in a process of their own, which the system ends where it takes more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import thread_time

from eqfuse.errors import EqfuseError

MEGABYTES, SECONDS = 2048, 120
"""Of memory, and of processor time, for one verification, where `EQFUSE_VERIFY_MB` and `EQFUSE_VERIFY_SECONDS` say nothing
else; and for one derivation, where `EQFUSE_DERIVE_MB` and `EQFUSE_DERIVE_SECONDS` do not."""
BYTES = 56
"""An element of a value: two residues, a real number and its error, marks, and its part of what an operation makes on the way."""
SHARE = 0.15
"""Of the memory, what several trials at a time may take."""
TRYING = 0.5
"""Of the seconds of a gradient, after which nothing more is tried that would only make it shorter."""


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


class OverLimit(EqfuseError):
    """A derivation that has reached its limit of memory or time; there is no certificate of what it would have given."""

    certificate = None


@dataclass
class Derivation:
    """One that runs: `megabytes` for the process of its e-graphs, `seconds` of processor time of its thread and of that process
    together, `elsewhere` those that the process has taken. It `is_cut` where something was left out for time."""

    megabytes: int
    seconds: int
    elsewhere: float = 0.0
    is_cut: bool = False
    began: float = field(default_factory=thread_time)

    @property
    def left(self) -> float:
        """Seconds, less than 0 once it is over."""
        return self.seconds - (thread_time() - self.began) - self.elsewhere

    def too_long(self) -> OverLimit:
        """What is raised where time has passed."""
        return OverLimit(
            f"it took longer to derive than EQFUSE_DERIVE_SECONDS = {self.seconds} of processor time",
            hint="give it more, as EQFUSE_DERIVE_SECONDS=600, or compile parts of the program apart",
        )

    def too_large(self) -> OverLimit:
        """What is raised where an e-graph has no room."""
        return OverLimit(
            f"its e-graph needs more memory than EQFUSE_DERIVE_MB = {self.megabytes}",
            hint="give it more, as EQFUSE_DERIVE_MB=8192, or compile parts of the program apart",
        )


_running: ContextVar[Derivation | None] = ContextVar("derivation", default=None)


@contextmanager
def derivation() -> Iterator[None]:
    """Inside, a derivation runs, of the limits of the environment; one inside of another is part of it."""
    if _running.get() is not None:
        yield
        return
    limits = Derivation(
        _number("EQFUSE_DERIVE_MB", MEGABYTES, "megabytes"),
        _number("EQFUSE_DERIVE_SECONDS", SECONDS, "seconds"),
    )
    token = _running.set(limits)
    try:
        yield
    finally:
        _running.reset(token)


def running() -> Derivation | None:
    """The derivation that runs here, if one does."""
    return _running.get()


def check() -> None:
    """Ends the derivation that runs here where its time has passed: raises OverLimit."""
    now = _running.get()
    if now is not None and now.left < 0:
        raise now.too_long()


def may_try(elements: int) -> bool:
    """Whether there is time, and memory for values of so many elements, for what a gradient can do without."""
    now = _running.get()
    if now is None:
        return True
    fits = BYTES * elements <= SHARE * now.megabytes * 2**20
    if fits and now.left > (1 - TRYING) * now.seconds:
        return True
    now.is_cut = True
    return False


def was_cut() -> bool:
    """Whether the derivation that runs here has left something out."""
    now = _running.get()
    return now is not None and now.is_cut


def _number(name: str, default: int, unit: str) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise EqfuseError(f"{name} is {text!r}", hint=f"give a number of {unit}, as {name}={default}")
    return int(text)
