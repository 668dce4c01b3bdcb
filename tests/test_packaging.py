"""What a wheel holds: the package with its data files, and nothing beside it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_only_the_package_is_installed() -> None:
    patterns = SETTINGS["packages"]["find"]["include"]
    found = [init.parent.name for init in ROOT.glob("*/__init__.py")]
    assert [name for name in found if any(Path(name).match(pattern) for pattern in patterns)] == ["eqfuse"]


def test_every_file_of_the_package_is_installed() -> None:
    package, data = ROOT / "eqfuse", SETTINGS["package-data"]["eqfuse"]
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    assert others and all(any(path.match(pattern) for pattern in data) for path in others), others
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert all((package / folder / "__init__.py").exists() for folder in folders)
