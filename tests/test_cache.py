"""What is kept between processes, listed and cleared."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from eqfuse.cache import entries, files
from eqfuse.cache.files import Unfit
from eqfuse.cli import main
from eqfuse.tile.triton.launch import source_file

KEY = {"program": "y[i] = x[i]", "sizes": {"i": 3}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eqfuse"


def test_an_entry_is_found_by_its_key_alone(home: Path) -> None:
    assert entries.read("tuned", KEY) is None
    entries.keep("tuned", KEY, {"seconds": 2.0})
    assert entries.read("tuned", KEY) == {"key": KEY, "seconds": 2.0}
    assert entries.read("tuned", {**KEY, "sizes": {"i": 4}}) is None


def test_an_entry_in_the_place_of_another_is_unfit(home: Path) -> None:
    entries.keep("tuned", KEY, {})
    other = {**KEY, "sizes": {"i": 4}}
    here, there = entries.place("tuned", KEY), entries.place("tuned", other)
    content = here.read_bytes()
    here.rename(there)
    with pytest.raises(Unfit, match="digest is not that"):
        entries.read("tuned", other)
    files.keep_whole(there, content[: -len(files.SEAL) - 62])  # sealed by whoever moved it
    with pytest.raises(Unfit, match="made for something else"):
        entries.read("tuned", other)


def test_the_cache_is_for_this_user_alone(home: Path) -> None:
    home.mkdir(0o755)
    entries.keep("tuned", KEY, {})
    assert {oct(folder.stat().st_mode & 0o777) for folder in (home, home / "tuned")} == {"0o700"}
    assert entries.place("tuned", KEY).stat().st_mode & 0o777 == 0o600


def chowned(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o777), chowned], ids=["writable", "another user's"]
)
def test_a_cache_of_others_is_not_used_and_that_is_said_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entries.keep("tuned", KEY, {"seconds": 1.0})
    spoil(home)
    with pytest.warns(
        UserWarning, match="is not used: (others can write|it belongs to user 12345).*mode 700"
    ):
        assert entries.read("tuned", KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries.keep("tuned", KEY, {"seconds": 2.0})
        assert entries.place("tuned", KEY).is_relative_to(tmp_path / f"eqfuse-{os.geteuid()}")
    (tmp_path / f"eqfuse-{os.geteuid()}").chmod(0o777)
    with pytest.raises(OSError, match="not a folder of this user alone"):
        entries.place("tuned", KEY)


EDITS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "writable by others": lambda path: path.chmod(0o666),
    "another user's": chowned,
    "a link": lambda path: path.rename(path.with_name("x")) and path.symlink_to(path.with_name("x")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_not_as_it_was_kept_is_unfit_and_written_anew(home: Path, edit: str) -> None:
    entries.keep("tuned", KEY, {"seconds": 1.0})
    EDITS[edit](entries.place("tuned", KEY))
    with pytest.raises(Unfit):
        entries.read("tuned", KEY)
    entries.keep("tuned", KEY, {"seconds": 2.0})
    assert entries.read("tuned", KEY) == {"key": KEY, "seconds": 2.0}


def test_list_and_clear(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    assert f"{home}: 0 files, 0 KB" in capsys.readouterr().out.replace("\n", "")
    entries.keep("tuned", KEY, {})
    source_file("# a module\n")
    stranger = home / "notes.txt"
    stranger.write_text("not of the cache")
    assert main(["cache", "list"]) == 0
    shown = capsys.readouterr().out
    assert "2 files" in shown
    assert all(kind in shown for kind in entries.KINDS)
    assert main(["cache", "clear"]) == 0
    assert "2 files deleted" in capsys.readouterr().out
    assert [path for path in home.rglob("*") if path.is_file()] == [stranger]
    assert entries.read("tuned", KEY) is None


def test_a_file_that_cannot_be_deleted_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    entries.keep("tuned", KEY, {})
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 2
    assert "Permission denied" in capsys.readouterr().err
