"""What distributions hold: the package with its data files, and nothing beside it; and that they work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import needs
import pytest

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


LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def built(what: str, source: Path, into: Path) -> Path:
    """A distribution, as a front end has the build backend make it."""
    into.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, what, str(into)]
    made = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return into / made.stdout.splitlines()[-1]


@pytest.mark.slow
def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    with zipfile.ZipFile(built("build_editable", tree, tmp_path / "dist")) as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" not in name}
    ((name, text),) = held.items()
    assert name.endswith(".pth") and Path(text.strip()).samefile(tree)
    assert (tree / "eqfuse" / "py.typed").exists()


@needs.site_packages("egglog", "torch", "pip", "jinja2")
@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_works_in_a_fresh_environment(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "tree", ignore=LEFT_OUT)
    with tarfile.open(built("build_sdist", tmp_path / "tree", tmp_path / "dist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not any((source / name).exists() for name in ("tests", "bench", "docs"))
    wheel = built("build_wheel", source, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    kept = (path for path in (ROOT / "eqfuse").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert held == {path.relative_to(ROOT).as_posix() for path in kept}

    venv.create(tmp_path / "venv", with_pip=False)
    fresh = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    # What eqfuse needs is that of this environment: nothing is fetched. Its own editable install is not seen from there.
    (fresh / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    python = tmp_path / "venv" / "bin" / "python"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "EQFUSE_NATIVE": "wait"}

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel)
    assert Path(run(python, "-c", "import eqfuse; print(eqfuse.__file__)").strip()).is_relative_to(fresh)
    assert "verified in" in run(fresh.parents[2] / "bin" / "eqfuse", "demo")
    (tmp_path / "softmax.eqf").write_text("y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])))", encoding="utf-8")
    page = run(python, "-m", "eqfuse.cli", "explain", "softmax.eqf", "--format", "html")
    assert "<html" in page and "Triton" in page
    command = [str(python), "-u", "-m", "eqfuse.cli", "play", "softmax.eqf"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as playing:
        try:
            assert playing.stdout is not None
            address = playing.stdout.readline().strip()
            with urlopen(address, timeout=60) as answer:
                assert "max[j](x[i,j])" in answer.read().decode()
            request = Request(
                f"{address}compile",
                json.dumps({"program": "y[i] = sum[j](x[i,j])"}).encode(),
                {"content-type": "application/json", "origin": address.rsplit("/", 2)[0]},
            )
            with urlopen(request, timeout=120) as answer:
                assert "<h2>C++</h2>" in json.loads(answer.read())["html"]
        finally:
            playing.terminate()
