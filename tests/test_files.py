"""Files that are kept between processes, and what happens where they cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse.cache.files import write_whole
from eqfuse.tile.triton.launch import cache_folders, source_file


def full(*args: object) -> Any:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "kept", "one")
    write_whole(tmp_path / "kept", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "two")]


def interrupted(*args: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fail", [full, interrupted], ids=lambda fail: fail.__name__)
def test_a_file_that_cannot_be_put_in_its_place_leaves_nothing(
    fail: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_whole(tmp_path / "kept", "one")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((OSError, KeyboardInterrupt)):
        write_whole(tmp_path / "kept", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "one")]


def test_a_text_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "kept", "one \ud800")
    assert not list(tmp_path.iterdir())


def test_tuning_that_cannot_be_kept_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = eq.compile("y[i] = sum[j](x[i,j])")
    monkeypatch.setattr(os, "replace", full)
    tuning = kernel.tune(x=torch.ones(4, 8), seconds=0.2, plans=2)
    assert tuning.notes == ("not kept for the next process: [Errno 28] No space left on device",)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_sources_go_where_there_is_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked, spare = tmp_path / "blocked", tmp_path / "spare"
    blocked.write_text("a file where a folder should be")
    spare.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    path = source_file("x = 1\n")
    assert path.is_relative_to(spare) and path.read_text() == "x = 1\n"
    path.write_bytes(b"\xff")
    assert source_file("x = 1\n").read_text() == "x = 1\n"


def test_sources_without_a_place_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        eq.EqfuseError, match="cannot be written .*No space left on device.*\n.*XDG_CACHE_HOME"
    ):
        source_file("x = 1\n")
    assert all(folder.is_relative_to(tmp_path) for folder in cache_folders())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
