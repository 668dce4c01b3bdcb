"""Files that eqfuse keeps for itself between processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/eqfuse`, or `~/.cache/eqfuse`; need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqfuse"


def write_whole(path: Path, text: str) -> None:
    """Writes a file, of which another process never sees half. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
