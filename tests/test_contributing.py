"""The worked examples of CONTRIBUTING.md: applied to a copy of the repository, their tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("\n## Add something\n") :].partition("\n## Test\n")[0]
DIFF = re.compile(r"^```diff\n\+\+\+ (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^    pytest (tests/\S+) -k (\S+)$", re.MULTILINE)
COPIED = (
    "eqfuse",
    "bench",
    "tests",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs",
)


def apply(root: Path, name: str, diff: str) -> None:
    """Changes a file as a block says, whose hunks `@@` divides. What a hunk finds or removes stands in the file once; a block
    without such lines is a new file."""
    file = root / name
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        if not before:
            assert not file.exists(), name
            file.write_text(after, encoding="utf-8")
            continue
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has {text.count(before)} times:\n{before}"
        file.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the repository with all examples."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results", "golden")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path)
    for name, diff in DIFF.findall(SECTION):
        apply(tmp_path, name, diff)
    return tmp_path


def test_every_room_has_an_example() -> None:
    rooms = set(re.findall(r"^### .*\((.*)\)$", SECTION, re.MULTILINE))
    named = {room for found in rooms for room in re.findall(r"`(\w+)/`", found)}
    wanted = {
        "terms",
        "rules",
        "extend",
        "loops",
        "extract",
        "tile",
        "verify",
        "differentiate",
        "torch",
        "bench",
    }
    assert named == wanted
    assert all(COMMAND.search(part) and DIFF.search(part) for part in SECTION.split("\n### ")[1:])


def test_every_block_finds_its_place(tmp_path: Path) -> None:
    for name, diff in DIFF.findall(SECTION):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists() and not (tmp_path / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
        apply(tmp_path, name, diff)
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
    with pytest.raises(AssertionError, match="0 times"):
        apply(tmp_path, "eqfuse/terms/functions.py", " _NO_ROWS = (\n+    1,\n")


@pytest.mark.slow
def test_the_tests_of_the_examples_pass(changed: Path) -> None:
    commands = COMMAND.findall(SECTION)
    words = " or ".join(dict.fromkeys(word for _, word in commands))
    files = dict.fromkeys(file for file, _ in commands)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, "-k", words],
        check=False,
        cwd=changed,
        env={**os.environ, "PYTHONPATH": str(changed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for file, word in commands:
        assert re.search(rf"^{file}::.*{word}.* PASSED", done.stdout, re.MULTILINE), (file, word)
