"""The rooms of the package: `[tool.importlinter]` in pyproject.toml says which may import which, and this that they do."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp")
pytest.importorskip("importlinter")

ROOT = Path(__file__).parent.parent
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    shown = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", LINT],
        check=False,
        cwd=folder,
        env=shown,
        capture_output=True,
        text=True,
    )


def test_every_contract_is_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


UPWARD, APART, PASSES, CIRCLE = (
    "No import runs upward",
    "Printers of tile programs know nothing of each other",
    "Printers of tile programs run no pass",
    "No circle inside a room",
)


@pytest.mark.parametrize(
    "contract, room, line",
    [
        (UPWARD, "errors.py", "from eqfuse.verify.certificate import Certificate"),
        (UPWARD, "terms/nodes.py", "from eqfuse.rules.merge import Merge"),
        (APART, "tile/cpu/run.py", "from eqfuse.tile.triton import launch"),
        (PASSES, "tile/triton/kernel.py", "from eqfuse.tile.passes.pipeline import run_passes"),
        (CIRCLE, "loops/nodes.py", "from eqfuse.loops import printer"),
    ],
)
def test_an_import_that_runs_upward_or_in_a_circle_is_found(
    contract: str, room: str, line: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "eqfuse", tmp_path / "eqfuse", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "eqfuse" / room
    file.write_text(file.read_text() + f"\n\ndef wrong() -> None:\n    {line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and f"{contract} BROKEN" in done.stdout, done.stdout


def test_only_programs_use_the_package_as_users_do() -> None:
    graph = grimp.build_graph("eqfuse", cache_dir=None)
    importers = graph.find_modules_that_directly_import("eqfuse")
    assert importers == {
        "eqfuse.cli",
        "eqfuse.demo",
        "eqfuse.doctor",
        "eqfuse.ops.program",
        "eqfuse.program_files",
        "eqfuse.watch",
    }


def test_nothing_in_the_package_imports_the_benchmarks() -> None:
    graph = grimp.build_graph("eqfuse", include_external_packages=True, cache_dir=None)
    assert "bench" not in graph.modules


@pytest.mark.parametrize(
    "name", ["functools.cached_property", "platform.processor", "threading.Lock", "threading.RLock"]
)
def test_no_lock_is_held_by_a_thread_that_a_forked_child_does_not_have(name: str) -> None:
    """`eqfuse.threads` has the locks that open in a child; `terms/nodes.py` holds its own while the process is forked. The
    processor's name is a cached property of the standard library, computed by another process."""
    allowed = {"eqfuse/threads.py", "eqfuse/terms/nodes.py"} if name.startswith("threading") else set()
    assert {
        str(file.relative_to(ROOT)) for file in (ROOT / "eqfuse").rglob("*.py") if name in _taken(file, name)
    } <= allowed


def _taken(file: Path, name: str) -> set[str]:
    """What a file takes from other modules, `module.attribute` or an import of it; nothing if the attribute's name is not there."""
    text = file.read_text(encoding="utf-8")
    if name.rpartition(".")[2] not in text:
        return set()
    nodes = list(ast.walk(ast.parse(text)))
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {
        f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
    }
