"""What eqfuse needs beside torch, triton and numpy, in one folder, for a machine without a network.

python -m bench.gpu_site FOLDER [--python 3.12]                              here: downloads with pip, about 20 MB
PYTHONPATH=FOLDER:. python -m pytest -m gpu                                  there, from a copy of this repository
PYTHONPATH=FOLDER:. python -m eqfuse.cli bench fuzz --device cuda            there
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PACKAGES = ("rich", "jinja2", "pytest", "hypothesis")
"""What eqfuse, its benchmarks and its tests import, without what the machine has."""
EGGLOG = "egglog"
"""Of egglog only the extension module is imported, and that is mostly debugging symbols."""
MOST_BYTES = 48 << 20


def make(folder: Path, python: str) -> int:
    """Fills the folder, which is made anew; the bytes in it. Raises CalledProcessError where pip or strip fails."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    wheels = ["--python-version", python, "--only-binary=:all:", "-c", str(CONSTRAINTS), "--quiet"]
    wheels += [word for platform in PLATFORMS for word in ("--platform", platform)]
    _pip(["install", *wheels, "--target", str(folder), *PACKAGES])
    with tempfile.TemporaryDirectory() as there:
        _pip(["download", *wheels, "--no-deps", "--dest", there, EGGLOG])
        (wheel,) = Path(there).glob("*.whl")
        with ZipFile(wheel) as content:
            (module,) = (n for n in content.namelist() if n.startswith(f"{EGGLOG}/") and n.endswith(".so"))
            content.extract(module, folder)
    (folder / EGGLOG / "__init__.py").touch()
    subprocess.run(["strip", str(folder / module)], check=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)
    announce(folder)
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def announce(folder: Path) -> None:
    """Puts down eqfuse's name, version and entry points, as an installation would: by these torch knows the back end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (about / "entry_points.txt").write_text("\n".join(lines))


def _pip(arguments: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of Python there")
    options = parser.parse_args()
    size = make(options.folder, options.python)
    print(f"{options.folder}: {size / 1e6:.1f} MB")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
