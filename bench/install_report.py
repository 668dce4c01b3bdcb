"""`eqfuse bench install`: a wheel of this checkout in fresh environments, without constraints, and what works there.

Each Python that is here, with each torch, and with the newest torch each Triton: the wheel and what it brings are installed by pip, and
`bench/install_smoke.py` is run outside of the checkout. torch is a build for CPUs (`+cpu`, of the indexes that pip knows here), with `--device cuda` PyPI's, which is
some gigabytes. An environment of FOLDER (`build/install`) that has torch already keeps it: one may be filled by hand. What cannot be had is said, and is no failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Column, Options, Report, chosen_names
from eqfuse.errors import EqfuseError

ROOT = Path(__file__).parents[1]
SMOKE = Path(__file__).with_name("install_smoke.py")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6.0", "2.8.0", "2.11.0", "2.13.0")
TRITONS = ("3.4", "3.5", "3.6", "3.7", "3.8", "3.9")
SECONDS = 900
"""The longest that one installation, or its checks, may take."""

TITLE = "A wheel without constraints"
COLUMNS = (
    Column("environment", lambda row: str(row["environment"])),
    Column("torch", lambda row: str(row["versions"].get("torch") or "")),
    Column("triton", lambda row: str(row["versions"].get("triton") or "")),
    Column("", lambda row: str(row["result"])),
)


@dataclass(frozen=True)
class Cell:
    """A Python, a torch, and a Triton, or None for the one that pip chooses."""

    python: str
    torch: str
    triton: str | None = None

    def __str__(self) -> str:
        return f"{self.python}-torch-{self.torch}" + (f"-triton-{self.triton}" if self.triton else "")


CELLS = {
    str(cell): cell
    for cell in (
        *(Cell(python, torch) for python in PYTHONS for torch in TORCHES),
        *(Cell(PYTHONS[0], TORCHES[-1], triton) for triton in TRITONS),
    )
}


class Absent(Exception):
    """What an environment needs cannot be had here; the text says what."""


def run(options: Options, report: Report) -> None:
    """A row for each cell that `options.only` selects: what its environment holds, and what does not work there."""
    folder = (options.folder or ROOT / "build" / "install").resolve()
    chosen = chosen_names(options.only, list(CELLS))
    wheel = built(folder)
    for name in chosen:
        row: dict[str, Any] = {"environment": name, "versions": {}, "lacks": {}}
        try:
            python = environment(CELLS[name], wheel, folder / name, options.device)
            row |= checked(python, folder)
            row["result"] = "; ".join(f"lacks {n} ({why})" for n, why in row["lacks"].items()) or "works"
            report.failures += [f"{name}: {n}: {why}" for n, why in row["lacks"].items()]
        except Absent as absent:
            row["result"] = f"not here: {absent}"
        print(f"{name}: {row['result']}", file=sys.stderr, flush=True)
        report.add(row)


def built(folder: Path) -> Path:
    """A wheel of the package as it stands. Raises EqfuseError where pip cannot build it."""
    source, into = folder / "source", folder / "wheel"
    for each in (source, into):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(ROOT / "eqfuse", source / "eqfuse", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    done = _done([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", into, source])
    if done.returncode != 0:
        raise EqfuseError(
            f"pip builds no wheel: {_reason(done)}", hint="build it by hand: pip wheel --no-deps ."
        )
    (wheel,) = into.glob("*.whl")
    return wheel


def python_named(version: str) -> str | None:
    """An interpreter of this version: this one, one on the path, or one of pyenv's. None where there is none."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    others = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, others)):
        if found and _done([found, "-c", "import venv, ensurepip"]).returncode == 0:
            return found
    return None


def environment(cell: Cell, wheel: Path, folder: Path, device: str) -> Path:
    """The interpreter of a cell's environment with the wheel in it. Raises Absent where something cannot be had."""
    python = folder / "bin" / "python"
    if not python.exists():
        base = python_named(cell.python)
        if base is None:
            raise Absent(f"no Python {cell.python}")
        made = _done([base, "-m", "venv", folder])
        if made.returncode != 0:
            raise Absent(_reason(made))
    version = "import importlib.metadata as m; print(m.version('torch'))"
    there = _done([python, "-c", version]).stdout.strip()
    if there.split("+")[0] != cell.torch:
        there = cell.torch if device == "cuda" else f"{cell.torch}+cpu"
        _installed(python, f"torch=={there}")
    _installed(python, "--force-reinstall", "--no-deps", str(wheel))
    triton = [f"triton=={cell.triton}.*"] if cell.triton else []
    _installed(python, str(wheel), f"torch=={there}", *triton)
    return python


def checked(python: Path, folder: Path) -> Mapping[str, Any]:
    """What the checks print, run where no file of the checkout is imported; with nothing kept of other environments."""
    cache = python.parents[1] / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    kept = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = _done([python, "-I", SMOKE], cwd=folder, env={**os.environ, **kept})
    if done.returncode != 0:
        return {"lacks": {"everything": _reason(done)}}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _installed(python: Path, *words: str) -> None:
    """Without any constraints of this machine's. Raises Absent with pip's own reason."""
    done = _done(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words],
        env={**os.environ, "PIP_CONSTRAINT": os.devnull},
    )
    if done.returncode != 0:
        raise Absent(_reason(done))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of an error; of pip's the first one that is no list of versions."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    of_pip = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    errors = [line for line in of_pip if not line.startswith("Could not find")]
    return (errors[:1] or lines[-1:] or [f"exit status {done.returncode}"])[0][:200]


def _done(command: list[Any], **given: Any) -> subprocess.CompletedProcess[str]:
    """Raises Absent where it takes too long."""
    try:
        words = [str(word) for word in command]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS, **given)
    except subprocess.TimeoutExpired:
        raise Absent(f"not done after {SECONDS} s: {command[1:4]}") from None
