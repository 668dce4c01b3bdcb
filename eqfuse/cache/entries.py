"""Entries that are kept between processes: one JSON file each, found by what it was made for; compiled libraries beside
them.

A file is data that anything may have changed: `files` checks who wrote it and that it is whole, and one that does not fit is
as good as none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eqfuse.cache.files import Unfit, cache_home, keep_whole, read_whole, searched

Key = Mapping[str, Any]
"""What an entry is for: as JSON, and compared whole with the one that its file has."""

KINDS: Mapping[str, str] = {
    "rewritten": "programs, as rules rewrote them",
    "merged": "derived merges, and why there is none",
    "planned": "plans that the cost model chose for sizes",
    "reached": "how far plans serve longer sizes",
    "priced": "what regions of models are predicted to take, those that are left too",
    "differentiated": "gradients of regions of models, as programs",
    "certified": "certificates of loop nests",
    "tuned": "the fastest plans that `Kernel.tune` has found",
    "triton": "emitted modules, which Triton reads its kernels from",
    "binaries": "GPU kernels, as Triton has compiled them",
    "native": "C++ kernels, compiled for this machine",
    "sources": "digests of eqfuse's own source files, which entries are found by",
    "machine": "rates of this CPU, as `eqfuse doctor --measure` has measured them",
}
"""The folders below `cache_home()`, and what is in them."""


def place(kind: str, key: Key) -> Path:
    """The file for a key; need not exist. Raises OSError where there is no home."""
    return cache_home() / kind / _name(key)


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def keep(kind: str, key: Key, content: Mapping[str, Any]) -> None:
    """Writes the entry. Raises OSError."""
    keep_whole(place(kind, key), json.dumps({"key": key, **content}, indent=1).encode())


def read(kind: str, key: Key) -> dict[str, Any] | None:
    """The content of the entry for a key, where some folder has one. Raises Unfit where none has but one that cannot be
    read, or was made for another key."""
    unfit: Unfit | None = None
    for folder in searched():
        try:
            found = read_file(folder / kind / _name(key), key)
        except Unfit as why:
            unfit = unfit or why
        else:
            if found is not None:
                return found
    if unfit is not None:
        raise unfit
    return None


def read_file(path: Path, key: Key | None = None) -> dict[str, Any] | None:
    """The content of a file, of this key where one is given; None where there is no such file. Raises Unfit."""
    text = read_whole(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unfit(f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("key"), dict):
        raise Unfit("it is no entry")
    if key is not None and json.dumps(content["key"], sort_keys=True) != json.dumps(key, sort_keys=True):
        raise Unfit("it was made for something else")
    return content


@dataclass(frozen=True)
class Usage:
    """How many files of a kind there are, and their bytes."""

    kind: str
    what: str
    files: int
    size: int


def usage() -> Iterator[Usage]:
    """What is kept, kind by kind."""
    for kind, what in KINDS.items():
        sizes = [path.lstat().st_size for path in files(kind)]
        yield Usage(kind, what, len(sizes), sum(sizes))


def clear() -> int:
    """Deletes everything that is kept; the number of files. Raises OSError where one cannot be deleted. A process that
    runs a kernel has it in memory."""
    found = [path for kind in KINDS for path in files(kind)]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return len(found)


def files(kind: str, home: Path | None = None) -> list[Path]:
    """The files of a kind in a folder of entries, or in the one that is written to, whatever they are."""
    folder = (home or cache_home()) / kind
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__") if folder.is_dir() else []
