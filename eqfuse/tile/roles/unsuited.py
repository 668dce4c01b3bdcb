"""Why a kernel has no roles."""

from __future__ import annotations


class Unsuited(Exception):
    """A kernel that cannot be divided into roles; the message says why, in a few words for users."""
