"""Edits of a cache by somebody hostile: `python -m bench.hostile EDITS SEED` prints what came of them, as JSON.

A round begins with a cache that serves four programs, C++ included, and makes eight edits of files, folders and the cache itself. A
child then runs the programs: each has to give the right result, with a certificate. Files are cut, changed, exchanged,
linked, given away, opened to others, replaced by what is no file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.killed import PROGRAMS, SECONDS, Child

EDITS = 8
"""Edits of a round."""

STRANGER = 12345
"""A user that is not this one."""

Edit = Callable[[Path, random.Random], object]
"""What is done to a file."""


def _flipped(path: Path, chance: random.Random, count: int) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(count):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _other(path: Path, chance: random.Random) -> Path:
    """Another file of the cache, of the same kind where there is one."""
    alike = [each for each in path.parent.iterdir() if each != path and each.is_file()]
    files = [each for each in path.parent.parent.rglob("*") if each != path and each.is_file()]
    return chance.choice(alike if alike and chance.random() < 0.7 else files or [path])


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("a file")


FILES: Mapping[str, Edit] = {
    "empty": lambda path, chance: path.write_bytes(b""),
    "cut": lambda path, chance: os.truncate(path, chance.randrange(path.stat().st_size)),
    "cut to a page": lambda path, chance: os.truncate(path, min(4096, path.stat().st_size - 1)),
    "one bit": lambda path, chance: _flipped(path, chance, 1),
    "many bits": lambda path, chance: _flipped(path, chance, 100),
    "longer": lambda path, chance: path.write_bytes(path.read_bytes() + chance.randbytes(64)),
    "zeros": lambda path, chance: path.write_bytes(bytes(path.stat().st_size)),
    "another's content": lambda path, chance: path.write_bytes(_other(path, chance).read_bytes()),
    "another in its place": lambda path, chance: os.replace(_other(path, chance), path),
    "another's link": lambda path, chance: _instead(
        path, lambda here: here.hardlink_to(_other(here, chance))
    ),
    "a link": lambda path, chance: _instead(path, lambda here: here.symlink_to(_other(here, chance))),
    "a link to itself": lambda path, chance: _instead(path, lambda here: here.symlink_to(here)),
    "a link to a device": lambda path, chance: _instead(path, lambda here: here.symlink_to("/dev/zero")),
    "a folder": lambda path, chance: _instead(path, Path.mkdir),
    "a folder with files": lambda path, chance: _instead(path, _folder),
    "a pipe": lambda path, chance: _instead(path, os.mkfifo),
    "gone": lambda path, chance: path.unlink(),
    "writable by others": lambda path, chance: path.chmod(0o666),
    "closed": lambda path, chance: path.chmod(0),
    "another user's": lambda path, chance: _given(path),
}

FOLDERS: Mapping[str, Edit] = {
    "a folder writable by others": lambda path, chance: path.chmod(0o777),
    "a closed folder": lambda path, chance: path.chmod(0),
    "another user's folder": lambda path, chance: _given(path),
    "a file for a folder": lambda path, chance: _no_folder(path, Path.touch),
    "another kind's folder": lambda path, chance: _no_folder(
        path, lambda here: here.symlink_to(here.parent / "native")
    ),
    "a cache writable by others": lambda path, chance: path.parent.chmod(0o777),
    "another user's cache": lambda path, chance: _given(path.parent),
}


def _no_folder(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path)
    make(path)


def _given(path: Path) -> None:
    """Gives a file away; who is not root opens it to others."""
    if os.geteuid():
        path.chmod(0o777)
    else:
        os.chown(path, STRANGER, STRANGER)


def drill(count: int, seed: int, limit: float = float("inf")) -> dict[str, object]:
    """What came of so many edits, or of those that began within `limit` seconds: of programs, how many found a kept certificate;
    `kinds` of edits; and `faults`, of children that ended by a signal, hung, raised or computed something else."""
    import torch

    import eqfuse as eq

    torch.manual_seed(seed)
    x = torch.randn(5, 33)
    wanted = [torch.as_tensor(eq.reference(source)(x=x.numpy())) for source in PROGRAMS]

    def work(number: int) -> str:
        said = []
        for place, source in enumerate(PROGRAMS):
            kernel = eq.compile(source, native="wait")
            error = float((kernel(x=x).double() - wanted[place]).abs().max())
            if not kernel.certificate.ok or not error < 1e-4 or kernel.plan.code != "C++":
                return f"wrong: program {place}, error {error}, {kernel.plan.code}"
            said.append("cached" if kernel.certificate.cached else "made")
        return " ".join(said)

    chance, found, kinds, faults = random.Random(seed), Counter[str](), Counter[str](), list[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place, whole = Path(folder), Path(folder) / "whole"
        tempfile.tempdir = folder  # a private cache is below it, too
        os.environ |= {"XDG_CACHE_HOME": folder, "EQFUSE_CACHE": "on"}
        home = place / "eqfuse"
        faults += _ended(Child(work, 0), "the first child", found)
        shutil.copytree(home, whole, symlinks=True)
        done = 0
        while done < count and time.monotonic() - began < limit:
            for each in place.glob("eqfuse*"):
                shutil.rmtree(each)
            shutil.copytree(whole, home, symlinks=True)
            made = [_edit(home, chance) for _ in range(min(EDITS, count - done))]
            kinds.update(made)
            done += len(made)
            faults += _ended(Child(work, 0), f"edit {done}, {', '.join(made)}", found)
    return {
        "edits": done,
        "seconds": time.monotonic() - began,
        **found,
        "kinds": dict(kinds),
        "faults": faults,
    }


def _edit(home: Path, chance: random.Random) -> str:
    """One edit; every fifth or so is of a folder, half of the others of compiled libraries."""
    folders = sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink())
    files = sorted(path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    libraries = [path for path in files if path.suffix == ".so"]
    name, table, among = "", FILES, libraries if libraries and chance.random() < 0.5 else files
    if not among or (folders and chance.random() < 0.15):
        table, among = FOLDERS, folders
    while True:
        name, path = chance.choice(sorted(table)), chance.choice(among)
        try:
            table[name](path, chance)
        except (OSError, ValueError):  # an earlier edit has left nothing to change
            continue
        return name


def _ended(child: Child, about: str, found: Counter[str]) -> list[str]:
    """The faults of a child, once it has ended."""
    began = time.monotonic()
    while child.is_running():
        if time.monotonic() - began > SECONDS:
            child.kill("it hung")
        time.sleep(0.002)
    words = child.outcome.split()
    if not set(words) <= {"made", "cached"}:
        return [f"{about}: {child.outcome}"]
    found.update(words)
    return []


def main(words: list[str]) -> int:
    limit = float(words[2]) if len(words) > 2 else float("inf")
    print(json.dumps(drill(int(words[0]), int(words[1]), limit)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
