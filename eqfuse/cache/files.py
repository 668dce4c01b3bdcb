"""Files that eqfuse keeps for itself between processes, in a folder that is this user's alone.

A kept file ends with a digest of its place and its content, which is checked before anything else of it is looked at: damage,
and a file that belongs elsewhere, are told from what was written there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

OFF = "off"
"""`$EQFUSE_CACHE` that keeps and reads nothing."""

SEAL = "\n# sha256 {}\n"
"""How a kept file ends."""

_SEALED = len(SEAL.format("")) + 64

_told: set[Path] = set()
"""Folders of which it was said that they are not used."""


class Unfit(Exception):
    """Why a file is not used."""


def is_off() -> bool:
    """Whether nothing is kept, nor read."""
    return os.environ.get("EQFUSE_CACHE") == OFF


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/eqfuse`, or `~/.cache/eqfuse`; need not exist. Where it is another user's, or others can write to it,
    `private_home()`, and a warning says why. Raises OSError where nobody knows what `~` is."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqfuse"
    except RuntimeError as error:
        raise OSError(f"there is no home: {error}") from None
    try:
        status = os.stat(home)
    except OSError:  # it is made when something is kept
        return home
    why = _strangers(status)
    if not why and status.st_mode & 0o077:  # others may read it; none has written to it
        with suppress(OSError):
            os.chmod(home, 0o700)
    if not why:
        return home
    try:
        return private_home()
    finally:
        if home not in _told:
            _told.add(home)
            remedy = f"Delete it, give it to user {os.geteuid()} with mode 700, or set XDG_CACHE_HOME"
            warnings.warn(f"the cache {home} is not used: {why}. {remedy}", stacklevel=2)


def private_home() -> Path:
    """A folder of temporary files that is this user's alone. Raises OSError where there is no place for one."""
    folder = Path(tempfile.gettempdir()) / f"eqfuse-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or _strangers(status):
        raise OSError(f"{folder} is not a folder of this user alone")
    return folder


def _strangers(status: os.stat_result) -> str:
    """Who besides this user may have written a file or to a folder; empty where nobody may."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def named() -> list[Path]:
    """The folders of `$EQFUSE_CACHE_PATH`, which are only read. Whose they are is up to whoever names them."""
    return [Path(part) for part in os.environ.get("EQFUSE_CACHE_PATH", "").split(os.pathsep) if part]


def searched() -> list[Path]:
    """Where entries are looked for, in order: `named()` folders (see `eqfuse cache pack`), then `cache_home()`, where there
    is one."""
    folders = named()
    with suppress(OSError):
        folders.append(cache_home())
    return folders


def read_plain(path: Path) -> bytes | None:
    """The bytes of a plain file that this user alone can have written, unless it is in a `named()` folder; None where there is
    no file. Raises Unfit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Unfit(f"it cannot be read: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unfit("it is not a plain file")
        if (why := _strangers(status)) and path.parent.parent not in named():
            raise Unfit(why)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except (OSError, MemoryError) as error:
        raise Unfit(f"it cannot be read: {error}") from None
    finally:
        os.close(descriptor)


def read_whole(path: Path) -> bytes | None:
    """What `keep_whole` has kept in that place; None where there is nothing. Raises Unfit for anything else that is there."""
    found = read_plain(path)
    if found is None:
        return None
    content, seal = found[:-_SEALED], found[-_SEALED:]
    if seal != _seal(path, content):
        raise Unfit("its digest is not that of what it holds")
    return content


def keep_whole(path: Path, content: bytes) -> None:
    """Keeps a file of a kind: `path` is `cache_home() / kind / name`. Raises OSError."""
    made(path.parent)
    write_whole(path, content + _seal(path, content))


def made(folder: Path) -> None:
    """Makes a folder of the cache, and the cache, for this user alone. Raises OSError."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)


def _seal(path: Path, content: bytes) -> bytes:
    """A file that is moved to another name, or to the files of another kind, has another one."""
    found = hashlib.sha256(f"{path.parent.name}/{path.name}\n".encode())
    found.update(content)
    return SEAL.format(found.hexdigest()).encode()


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, of which no other thread or process ever sees half. Raises OSError, and leaves nothing then."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        with suppress(OSError):
            os.rmdir(path)  # an empty folder in its place
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
