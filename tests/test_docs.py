"""The documentation is true: its Python runs, its links lead somewhere, the notebook prints what it shows, and the site
builds without a warning."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

import eqfuse as eq
from bench import beside_report, chart, performance, picture
from bench.runner import REPORTS
from eqfuse.cli import main
from eqfuse.extend.define import forget
from eqfuse.terms.parser import parse
from eqfuse.terms.registry import REGISTERED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])


@pytest.fixture
def tidy() -> Iterator[None]:
    """Forgets the reductions that a page registers."""
    before = set(REGISTERED)
    yield
    for name in set(REGISTERED) - before:
        forget(name)


def executed(cell: str, scope: dict[str, Any]) -> str:
    """What a cell of the notebook prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(cell, NOTEBOOK.name, "exec"), scope)  # noqa: S102
    return printed.getvalue()


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(pytestconfig: pytest.Config, tidy: None) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    scope: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = executed("".join(cell["source"]), scope)
            stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            fresh = [stream] if printed else []
            if pytestconfig.getoption("--update-golden"):
                cell["outputs"] = fresh
            assert cell["outputs"] == fresh
    if pytestconfig.getoption("--update-golden"):
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert "False" not in json.dumps([cell.get("outputs") for cell in notebook["cells"]])


PYTHON = re.compile(r"```python\n(.*?)```(?:\n\n((?:    (?!eqfuse )[^\n]*\n)+))?", re.DOTALL)
"""A block of code, and what it prints, where that is indented right after it."""

GIVEN: dict[str, dict[str, Any]] = {"pytorch.md": {"model": torch.nn.Softmax(-1)}}
"""What the blocks of a page do not say themselves."""

ELSEWHERE = "AutoModel"
"""Weights and a package that are not here: a block that names it is not run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name != "tutorial.md" and "```python" in page.read_text(encoding="utf-8")
    ],
    ids=lambda page: page.name,
)
def test_the_python_of_a_page_runs_and_prints_what_it_shows(
    page: Path, tidy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = dict(GIVEN.get(page.name, {}))
    blocks = PYTHON.findall(page.read_text(encoding="utf-8"))
    for code, shown in blocks:
        if ELSEWHERE in code:
            continue
        exec(compile(code, page.name, "exec"), scope)  # noqa: S102
        printed = capsys.readouterr().out
        if "print(" in code and shown:
            assert textwrap.dedent(shown).strip() == printed.strip()
    assert len(blocks) > sum(ELSEWHERE in code for code, _ in blocks)


def test_the_programs_of_pages_are_programs() -> None:
    blocks = [
        block
        for page in PAGES
        if page.name != "gallery.md"  # whose programs are run
        for block in re.findall(r"```eqfuse\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert len(blocks) > 10
    assert all(parse(block).outputs for block in blocks)


CODE = re.compile(r"^```.*?^```|`[^`\n]*`|^    [^\n]*$", re.DOTALL | re.MULTILINE)


def test_links_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(
            r"\]\((?!https://)([^)#\s]+)(?:#[\w-]*)?\)|src=\"([^\"]+)\"",
            CODE.sub("", page.read_text(encoding="utf-8")),
        )
    ]
    found = [(page, (page.parent / "".join(link)).exists()) for page, link in links]
    assert len(found) > 50 and all(there for _, there in found), [p for p, there in found if not there]


def undocumented(public: type) -> list[str]:
    """Attributes of a class that no text says anything of: no docstring, no line after a field, no `name` in the text of the class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(public))).body
    assert isinstance(tree, ast.ClassDef)
    said = {word for word in re.findall(r"`(\w+)", ast.get_docstring(tree) or "")}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            said.add(node.name)
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(node.target, ast.Name)
        ):
            said.add(node.target.id)
    own = {*vars(public), *getattr(public, "__annotations__", {})}
    return sorted(name for name in own - said if not name.startswith("_"))


def test_the_reference_has_every_public_name_with_its_text_and_an_example() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = {path: resolved(path) for path in re.findall(r"^::: (eqfuse\.[\w.]+)$", page, re.MULTILINE)}
    code = "\n".join(block for block, _ in PYTHON.findall(page))
    assert set(eq.__all__) <= {path.rpartition(".")[2] for path in listed}
    assert [name for name in eq.__all__ if not re.search(rf"\beq\.{name}\b", code)] == []
    assert [path for path, public in listed.items() if not inspect.getdoc(public)] == []
    lacking = {path: undocumented(public) for path, public in listed.items() if inspect.isclass(public)}
    assert len(lacking) > 6 and not any(lacking.values()), lacking


def resolved(path: str) -> Any:
    """What a name of the reference stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class Untold:
    """It says what `said` is."""

    said: int
    silent: int
    told: int
    """After the field."""

    def method(self) -> None: ...


def test_what_is_public_and_has_no_text_is_found() -> None:
    assert undocumented(Untold) == ["method", "silent"]


needs_mkdocs = needs.packages("mkdocs", "material", "mkdocstrings")


def site_of(project: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a project's pages, strictly."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


@needs_mkdocs
@pytest.mark.slow
def test_the_site_builds_strictly_and_has_every_public_name(tmp_path: Path) -> None:
    built = site_of(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert not [name for name in eq.__all__ if not re.search(rf'id="eqfuse\.[\w.]*\b{name}"', api)]
    assert "picture.svg" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


@needs_mkdocs
@pytest.mark.slow
def test_a_link_to_nowhere_fails_the_site(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    (docs / "start.md").write_text("[nowhere](nowhere.md)\n", encoding="utf-8")
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    built = site_of(tmp_path, tmp_path / "site")
    assert built.returncode != 0 and "nowhere.md" in built.stderr


def test_the_picture_is_what_is_printed(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        picture.PICTURE.write_text(picture.svg(), encoding="utf-8")
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.svg()


def test_the_chart_is_of_the_committed_tables() -> None:
    means = chart.means()
    assert {"causal_prefill", "softmax", "mla"} <= set(means) and "H200" in chart.where()
    drawn = chart.CHART.read_text(encoding="utf-8")
    assert chart.where() in drawn and all(name.replace("_", " ") in drawn for name in means)


def test_measured_numbers_are_those_of_the_committed_files(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        performance.PAGE.write_text(performance.page(), encoding="utf-8")
    page = performance.page()
    assert performance.PAGE.read_text(encoding="utf-8") == page
    summary = " ".join(json.loads((ROOT / "bench/results/attention.json").read_text())["summary"])
    for number in re.findall(r"\*\*(\d\.\d\d)\*\*", (DOCS / "attention.md").read_text(encoding="utf-8")):
        assert f"{number}x" in summary
    assert not re.search(r"\d\.\d+ ?(x|times)\b", (ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_table_of_peers_is_of_the_committed_file() -> None:
    rows = json.loads((ROOT / "bench/results/beside.json").read_text(encoding="utf-8"))["rows"]
    assert beside_report.markdown(rows) in (DOCS / "when.md").read_text(encoding="utf-8")


def test_pages_name_what_there_is() -> None:
    start, commands = ((DOCS / page).read_text(encoding="utf-8") for page in ("start.md", "commands.md"))
    options = inspect.signature(eq.compile).parameters
    assert not [name for name in options if not re.search(rf"`eq\.compile\([^`]*\b{name}\b", start)]
    assert not [name for name in REPORTS if not re.search(rf"`eqfuse bench {name}\b|, `{name}`", commands)]
    listed = re.findall(r"^\| `eqfuse (\w+)", commands, re.MULTILINE)
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as printed:
        main(["--help"])
    known = re.findall(r"^    (\w+)\b", printed.getvalue(), re.MULTILINE)
    assert len(known) > 8 and set(listed) == set(known)


def test_readme_is_one_page_and_no_page_has_marks_of_a_merge() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 90
    marks = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert not [page for page in PAGES if marks.search(page.read_text(encoding="utf-8"))]
