"""Files that eqfuse keeps for itself between processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/eqfuse`, or `~/.cache/eqfuse`; need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqfuse"


def write_whole(path: Path, text: str) -> None:
    """Writes a file, of which another process never sees half. Raises OSError, and leaves nothing then."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
