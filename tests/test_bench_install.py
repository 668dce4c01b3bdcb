"""`eqfuse bench install`: what is asked of an installation holds here, and what lacks or cannot be had is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest

from bench import install_report
from bench.install_report import COLUMNS, ROOT, SMOKE, TORCHES, Absent, Cell
from bench.install_smoke import failed
from bench.report import Options, Report


@needs.cxx
@needs.packages("triton")
@pytest.mark.slow
def test_what_is_asked_of_an_installation_holds_here(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SMOKE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["lacks"] == {}


def test_what_fails_is_one_line() -> None:
    def wrong() -> None:
        assert not str

    def raises() -> None:
        raise KeyError("first\nsecond")

    assert failed(lambda: None) is None
    assert (failed(wrong) or "").startswith("AssertionError: ")
    assert failed(raises) == r"KeyError: 'first\nsecond'"


def test_what_lacks_is_a_failure_and_what_cannot_be_had_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def environment(cell: Cell, *given: Any) -> Path:
        if cell.torch == TORCHES[0]:
            raise Absent("no build")
        return tmp_path / cell.torch

    def checked(python: Path, folder: Path) -> dict[str, Any]:
        lacks = {"back end": "ImportError: x"} if python.name == TORCHES[1] else {}
        return {"versions": {"torch": python.name}, "lacks": lacks}

    monkeypatch.setattr(install_report, "built", lambda folder: folder)
    monkeypatch.setattr(install_report, "environment", environment)
    monkeypatch.setattr(install_report, "checked", checked)
    report = Report("", COLUMNS)
    install_report.run(Options(only="3.11-torch-2.6,3.11-torch-2.8,3.12-torch-2.11", folder=tmp_path), report)
    assert [row["result"] for row in report.rows] == [
        "not here: no build",
        "lacks back end (ImportError: x)",
        "works",
    ]
    assert report.failures == [f"3.11-torch-{TORCHES[1]}: back end: ImportError: x"]


def test_a_python_that_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert install_report.python_named("{}.{}".format(*sys.version_info)) == sys.executable
    with pytest.raises(Absent, match=r"no Python 3\.99"):
        install_report.environment(Cell("3.99", "2.13.0"), tmp_path, tmp_path / "environment", "cpu")


def test_an_environment_that_breaks_lacks_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "smoke.py").write_text("import nowhere_to_be_found", encoding="utf-8")
    monkeypatch.setattr(install_report, "SMOKE", tmp_path / "smoke.py")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    lacks = install_report.checked(python, tmp_path)["lacks"]
    assert "nowhere_to_be_found" in lacks["everything"]
