"""Why a kernel has no roles."""

from __future__ import annotations


class Unsuited(Exception):
    """A kernel that cannot be divided into roles; the message says why, in a few words for users. `at_every_size` says that sizes
    change nothing: its form cannot be divided."""

    def __init__(self, why: str, *, at_every_size: bool = False) -> None:
        super().__init__(why)
        self.at_every_size = at_every_size
