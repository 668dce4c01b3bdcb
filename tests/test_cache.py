"""What is kept between processes, listed and cleared."""

from __future__ import annotations

from pathlib import Path

import pytest

from eqfuse.cache import entries
from eqfuse.cache.entries import Unfit
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
    entries.place("tuned", KEY).rename(entries.place("tuned", other))
    with pytest.raises(Unfit, match="made for something else"):
        entries.read("tuned", other)


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
