"""The programs of docs/gallery: each compiles, is verified, gives what torch gives, and stands on the page with its derivation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench import gallery_page
from bench.gallery import FOLDER, GALLERY
from bench.measure import rounding
from bench.report import Options
from bench.runner import run
from eqfuse.cli import main
from eqfuse.errors import EqfuseError
from eqfuse.measure import as_tuple, worst_error

APART = {
    "kmeans": "argmin.k[k](sum[d](sq(x[n, d] - c[k, d])), k) is not in the kernel that reads it: "
    "kernel1 stores it, as stored1[n], for kernel2 and kernel3",
    "top_p": "G and t both read x, in kernel1 and kernel2: one folds along v, l, k, the other along v",
}
"""Why the outputs of a program have a kernel each."""


@pytest.mark.slow(but=["welford", "colbert"])
@pytest.mark.parametrize("name", GALLERY)
def test_a_program_is_verified_and_gives_what_torch_gives(name: str) -> None:
    entry = GALLERY[name]
    kernel = gallery_page.kernel.__wrapped__(name)  # one of its own: its calls plan for their sizes
    case = entry.cases["small"]
    assert kernel.plan.schedule == "rolling" and kernel.certificate.ok
    said = [reason.partition(" (line ")[0] for reason in kernel.why_not()]
    assert said == ([APART[name]] if name in APART else [])
    for seed in range(2):
        inputs = entry.inputs(case, seed=seed)
        exact = entry.run_exact(case, inputs)
        plain = entry.run_eager(case, inputs)
        allowed = max(2 * worst_error(plain, exact), 4 * rounding(plain))
        assert worst_error(as_tuple(kernel(**entry.arguments(case, inputs))), exact) <= allowed


def test_files_are_programs_of_five_to_ten_lines_with_a_paper() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(GALLERY) and len(GALLERY) == 20
    for entry in GALLERY.values():
        assert 3 <= len(entry.written.splitlines()) <= 10 and len(entry.about.split()) > 5
        assert re.search(r"\b(19|20)\d\d\b", entry.paper)
        assert set(entry.cases["small"].sizes) == set(entry.cases["cpu"].sizes)


@pytest.mark.slow
def test_the_page_is_made_of_the_programs_and_the_measurement(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        gallery_page.PAGE.write_text(gallery_page.text(), encoding="utf-8")
    assert gallery_page.PAGE.read_text(encoding="utf-8") == gallery_page.text()
    for name in GALLERY:
        assert gallery_page.derivation(name).check().ok


def test_the_command_line_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(FOLDER / "welford.eqf")
    assert main(["run", path, "--size", "r=3", "--size", "c=50"]) == 0
    assert "certificate ok" in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_times_a_program(tmp_path: Path) -> None:
    options: dict[str, Any] = {"small": True, "torch_compile": False}
    before = gallery_page.PAGE.read_text(encoding="utf-8")
    assert run("gallery", Options(only="chamfer", **options), output=tmp_path / "x.json") == 0
    assert '"program": "chamfer"' in (tmp_path / "x.json").read_text(encoding="utf-8")
    assert gallery_page.PAGE.read_text(encoding="utf-8") == before
    with pytest.raises(EqfuseError, match="no workload starts with 'softmax'"):
        run("gallery", Options(only="softmax", **options), output=tmp_path / "x.json")
