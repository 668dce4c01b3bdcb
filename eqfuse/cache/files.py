"""Files that eqfuse keeps for itself between processes."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

OFF = "off"
"""`$EQFUSE_CACHE` that keeps and reads nothing."""


def is_off() -> bool:
    """Whether nothing is kept, nor read."""
    return os.environ.get("EQFUSE_CACHE") == OFF


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/eqfuse`, or `~/.cache/eqfuse`; need not exist. Raises OSError where nobody knows what `~` is."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqfuse"
    except RuntimeError as error:
        raise OSError(f"there is no home: {error}") from None


def searched() -> list[Path]:
    """Where entries are looked for, in order: the folders of `$EQFUSE_CACHE_PATH`, which are only read (see
    `eqfuse cache pack`), then `cache_home()`, where there is one."""
    folders = [Path(part) for part in os.environ.get("EQFUSE_CACHE_PATH", "").split(os.pathsep) if part]
    with suppress(OSError):
        folders.append(cache_home())
    return folders


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, of which no other thread or process ever sees half. Raises OSError, and leaves nothing then."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
