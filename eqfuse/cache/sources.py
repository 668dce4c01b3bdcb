"""The digest of source files, which entries are found by: files are read again only where one of them was touched.

To read all of eqfuse's takes 10 ms, as long as all else that a second process does for a program; to look at their dates takes 2.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress

from eqfuse.cache import entries, files
from eqfuse.cache.files import Unfit

KIND = "sources"

SETTLED = 2.0
"""Seconds that nothing was written for, before what files hold is remembered: what is written twice within a tick of the clock
has one date."""


def digest_of(home: str) -> str:
    """The digest of the Python files below a folder, by their names and texts: as an earlier process found it, if none has
    another size or date since."""
    before, latest = _touched(home)
    key = {"home": home, "files": before}
    if not files.is_off():
        with suppress(Unfit):
            content = entries.read(KIND, key)
            if content is not None:
                return str(content["digest"])
    found = read_all(home)
    if not files.is_off() and _touched(home)[0] == before and time.time() - latest > SETTLED:
        with suppress(OSError):
            entries.keep(KIND, key, {"digest": found})
    return found


def read_all(home: str) -> str:
    """The same, from what is in the files now."""
    found = hashlib.blake2b(digest_size=16)
    for path, name, _ in sorted(_sources(home, "")):
        with open(path, "rb", buffering=0) as file:
            text = file.read()
        found.update(f"{name} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


def _touched(home: str) -> tuple[str, float]:
    """The digest of what changes when a file is written: its size, and when its text and it itself were changed last; and the
    time of the latest change."""
    seen = [
        (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for _, name, entry in _sources(home, "")
        for status in (entry.stat(),)
    ]
    latest = max((max(times) for _, _, *times in seen), default=0)
    return hashlib.blake2b(repr(sorted(seen)).encode(), digest_size=16).hexdigest(), latest / 1e9


def _sources(folder: str, inner: str) -> Iterator[tuple[str, str, os.DirEntry[str]]]:
    """The Python files below a folder: path, path from the outermost folder on, and what the system says of each."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(".py"):
                yield entry.path, inner + entry.name, entry
            elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path, f"{inner}{entry.name}/")
