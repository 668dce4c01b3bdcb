"""The command line: what it prints, its exit status, and that errors of the user's have no stack trace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import eqfuse as eq
from bench.__main__ import main as bench
from eqfuse import demo, watch
from eqfuse.cli import main
from eqfuse.errors import VerificationError
from eqfuse.program_files import shipped

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))\n"


@pytest.fixture
def softmax(tmp_path: Path) -> str:
    file = tmp_path / "softmax.eq"
    file.write_text("x: f32[i, j]\n" + SOFTMAX)
    return str(file)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must fail prints to stderr."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_no_command_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: eqfuse" in capsys.readouterr().err


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "verify", "nowhere.eq") == (
        "cannot read 'nowhere.eq': No such file or directory\nFILE holds a program; - is standard input\n"
    )


def test_error_in_the_program_shows_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.eq"
    file.write_text("y[i] = sum[j](x[i,j]) * expp(2)\n")
    text = error_of(capsys, "emit", str(file))
    assert text.splitlines()[:3] == [
        "unknown function 'expp' (line 1)",
        "    y[i] = sum[j](x[i,j]) * expp(2)",
        "                            ^^^^",
    ]


def test_run_needs_sizes(softmax: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        error_of(capsys, "run", softmax, "--size", "i=4") == "axis 'j' of 'x' has no size\nadd --size j=128\n"
    )


def test_run_needs_numbers(softmax: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "run", softmax, "--size", "i=four") == (
        "--size 'i=four' is not a name and a number\nwrite --size j=128\n"
    )


def test_run_does_not_invent_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pick.eq"
    file.write_text("label: i64[i]\ny[i] = sum[j](x[i,j]) - x[i, label[i]]\n")
    assert error_of(capsys, "run", str(file), "--size", "i=3", "--size", "j=5") == (
        "'label' holds i64 values\ngive it with --inputs FILE.npz; random integers would mean nothing\n"
    )


def test_run_makes_a_tensor_longer_than_the_axis_that_it_is_read_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "differences.eq"
    file.write_text("y[i] = x[i+1] - x[i]\n")
    assert main(["run", str(file), "--size", "i=5"]) == 0
    assert "float32[5]" in capsys.readouterr().out


def test_run_on_arrays_of_a_file(softmax: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    out = tmp_path / "out.npz"
    assert main(["run", softmax, "--inputs", str(tmp_path / "in.npz"), "--output", str(out)]) == 0
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(np.load(out)["y"], e / e.sum(1, keepdims=True), rtol=1e-5)
    assert "certificate ok" in capsys.readouterr().out


def test_run_refuses_unknown_arrays(softmax: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", z=np.zeros(3, np.float32))
    text = error_of(
        capsys, "run", softmax, "--inputs", str(tmp_path / "in.npz"), "--size", "i=3", "--size", "j=4"
    )
    assert text == "the program has no tensor 'z'\ntensors: x\n"


def test_emit_writes_a_module(softmax: str, tmp_path: Path) -> None:
    out = tmp_path / "kernel.py"
    assert main(["emit", softmax, "--target", "sm_90", "--output", str(out)]) == 0
    text = out.read_text()
    compile(text, str(out), "exec")
    assert "@triton.jit" in text and "import eqfuse" not in text


def test_plans_are_those_of_given_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "softmax.eqf"
    text = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
    file.write_text(f"# sizes: i=4 j=262144 d=3\n{text}")
    shown = {}
    for sizes in ("", "j=512", "i=64,j=512"):
        chosen = ["--size", sizes] if sizes else []
        assert main(["explain", str(file), "--target", "h200", *chosen]) == 0
        shown[sizes] = capsys.readouterr().out
        assert main(["emit", str(file), "--target", "h200", *chosen]) == 0
        assert "@triton.jit" in capsys.readouterr().out
    assert "resident" not in shown[""].split("chosen")[0].splitlines()[0]
    assert len(set(shown.values())) == 3
    assert error_of(capsys, "explain", str(file), "--size", "k=3").startswith("the program has no axis 'k'")
    assert "is not a name and a number" in error_of(capsys, "emit", str(file), "--size", "j=x")
    assert "an integer, 1 or more" in error_of(capsys, "emit", str(file), "--size", "j=0")


def test_programs_of_a_folder_are_explained_in_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs, pages = tmp_path / "programs", tmp_path / "pages"
    programs.mkdir()
    assert "there is no program (*.eqf)" in error_of(capsys, "explain", str(programs))
    (programs / "index.eqf").write_text("# Sums & more\ny[i] = sum[j](x[i,j])\n")
    (programs / "b c.eqf").write_text("y[i] = max[j](x[i,j])\n")
    assert "give --output FOLDER" in error_of(capsys, "explain", str(programs))
    assert "give --output FOLDER" in error_of(
        capsys, "explain", str(programs), "--output", str(tmp_path / "a.html")
    )
    assert "pages are HTML, not 'json'" in error_of(
        capsys, "explain", str(programs), "--output", str(pages), "--format", "json"
    )
    assert not pages.exists()
    assert main(["explain", str(programs), "--output", str(pages)]) == 0
    index = (pages / "index.html").read_text()
    assert 'href="b%20c.eqf.html"' in index and ">index: Sums &amp; more</a>" in index
    assert "max[j](x[i,j])" in (pages / "b c.eqf.html").read_text()
    assert "sum[j](x[i,j])" in (pages / "index.eqf.html").read_text()
    (programs / "broken.eqf").write_text("y[i] = sum[j](x[i,j]\n")
    assert main(["explain", str(programs), "--output", str(pages)]) == 1
    assert "was never closed" in (pages / "index.html").read_text() and "broken: " in capsys.readouterr().out
    assert "name a file in it" in error_of(
        capsys, "explain", str(programs / "index.eqf"), "--output", str(pages)
    )


@pytest.mark.parametrize(
    "file, why", [(".", "is a folder"), ("missing/kernel.py", "there is no folder 'missing'")]
)
def test_output_that_cannot_be_written_is_refused_first(
    softmax: str, file: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", softmax, "--output", file])
    assert why in capsys.readouterr().err


def test_a_benchmark_names_the_package_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.fuzz_report", raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert bench(["fuzz"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("bench fuzz needs hypothesis, which is not installed\n")
    assert "pip install" in text


def test_verify_tells_equal_from_different(
    tmp_path: Path, softmax: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shifted, wrong = tmp_path / "shifted.eq", tmp_path / "wrong.eq"
    shifted.write_text("y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))\n")
    wrong.write_text("y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]) + 1)\n")
    assert main(["verify", softmax]) == 0
    assert main(["verify", softmax, "--against", str(shifted)]) == 0
    assert "in float32 they differ" in capsys.readouterr().out
    assert main(["verify", softmax, "--against", str(wrong)]) == 1
    assert "  x = [[" in capsys.readouterr().out


def test_verify_says_where_a_requested_bound_is_not_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "entropy.eq", tmp_path / "other.eq"
    file.write_text("y[i] = sum[j](exp(x[i,j]) * log(x[i,j]))\n")
    other.write_text("y[i] = -sum[j](exp(x[i,j]) * log(1 / x[i,j]))\n")
    assert main(["verify", str(file), "--against", str(other)]) == 0
    text = capsys.readouterr().out
    assert "no bound claimed (NOT the requested bound: at most 1e-12)" in text
    assert error_of(capsys, "verify", str(file), "--bound", "2").startswith("bound is 2.0")


def test_verify_of_a_wrong_stage_is_status_1(
    softmax: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise VerificationError("the fused program was not verified", hint="x = [1.0]")

    monkeypatch.setattr("eqfuse.certification.agreeing", refuse)
    assert main(["verify", softmax]) == 1
    assert "x = [1.0]" in capsys.readouterr().out


def test_rules_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    from eqfuse.rules.catalogue import MERGE

    assert main(["rules"]) == 0
    # Narrow columns fold: compare without blanks and lines.
    printed = re.sub(r"\W", "", capsys.readouterr().out)
    for rule in (rule for ruleset in MERGE for rule in ruleset.rules):
        assert re.sub(r"\W", "", rule.name)[:8] in printed


@pytest.mark.slow
def test_unknown_benchmark(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpus"]) == 2
    assert capfd.readouterr().err == "unknown benchmark 'cpus'\ndid you mean 'cpu'?\n"


@pytest.mark.slow
def test_benchmarks_have_options_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "usage: eqfuse bench" in capfd.readouterr().out


@pytest.mark.slow
def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    shutil.copytree(
        Path(eq.__file__).parent, tmp_path / "eqfuse", ignore=shutil.ignore_patterns("__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "-m", "eqfuse.cli", "bench", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("the benchmarks are not part of the installed package")
    assert "in a checkout of the source" in done.stderr


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"x": (5, 33)}, dict.fromkeys("QKV", (1, 2, 9, 4))
    examples = [replace(e, shapes=shapes) for e, shapes in zip(demo.EXAMPLES, small, strict=True)]
    monkeypatch.setattr(demo, "EXAMPLES", examples)


def test_the_demo_shows_every_stage(small_demo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--full"]) == 0
    shown = capsys.readouterr().out
    for title in ("program", "derived merge", "plans, by", "chosen loop nest", "certificate", "error  "):
        assert shown.count(title) >= 2, title


def test_the_demo_is_one_screen(small_demo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    for said in ("derived merge", "two parts a and b", "plan   ", "verified in", "time   ", "error  "):
        assert shown.count(said) == 2, said
    assert shown.count("\n") <= 40 and "demo --full" in shown and "what a loop has seen" not in shown


def test_the_demo_fails_where_a_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    softmax = replace(demo.EXAMPLES[0], shapes={"x": (5, 33)}, unfused=lambda x: torch.softmax(x, 0))
    monkeypatch.setattr(demo, "EXAMPLES", [softmax])
    assert main(["demo"]) == 1


def test_doctor_says_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing compiled before: compiling after Triton's interpreter ran in this process has to work too.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for check in ("kernels on the CPU", "Triton's interpreter", "sm_90", "gfx942"):
        assert any(check in line and " yes " in line for line in lines), check


def _npz(path: Path, **arrays: object) -> bytes:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path.read_bytes()


def _inputs(folder: Path) -> dict[str, Path]:
    """Files of tensors that are none."""
    files = {name: folder / f"{name}.npz" for name in ("strings", "truncated", "empty", "damaged", "swapped")}
    x = np.random.default_rng(1).standard_normal((30, 4)).astype(np.float32)
    _npz(files["strings"], x=np.array([["a", "b"]]))
    whole = _npz(files["truncated"], x=x)
    files["truncated"].write_bytes(whole[: len(whole) // 2])
    files["empty"].write_bytes(b"")
    files["damaged"].write_bytes(whole[:120] + b"x" * 60 + whole[180:])
    _npz(files["swapped"], x=x.astype(">f4"))
    files["single"] = folder / "single.npy"
    np.save(files["single"], x)
    return {**files, "folder": folder, "missing": folder / "missing.npz"}


@pytest.mark.parametrize(
    "name",
    ["strings", "truncated", "empty", "damaged", "swapped", "single", "folder", "missing"],
)
def test_files_that_hold_no_tensors(
    name: str, softmax: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = error_of(capsys, "run", softmax, "--inputs", str(_inputs(tmp_path)[name]))
    assert "internal" not in text and len(text.splitlines()) == 2


@pytest.mark.parametrize("device", ["xyz", "meta", "cuda:99", "cuda:-2"])
def test_devices_that_there_are_not(device: str, softmax: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = error_of(capsys, "run", softmax, "--size", "i=2", "--size", "j=3", "--device", device)
    assert repr(device) in text


@pytest.mark.parametrize("size", ["-4", "99999999999999999999", "1000000000000"])
def test_sizes_that_no_memory_holds(size: str, softmax: str, capsys: pytest.CaptureFixture[str]) -> None:
    error_of(capsys, "run", softmax, "--size", "i=300", "--size", f"j={size}")


def test_a_fault_of_the_compiler_has_no_stack_trace(
    softmax: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr("eqfuse.compile", fails)
    assert main(["emit", softmax]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("internal error: ZeroDivisionError: by 0\n")
    assert "Traceback" not in captured.err and "EQFUSE_LOG=stages" in captured.err
    monkeypatch.setenv("EQFUSE_LOG", "stages")
    with pytest.raises(ZeroDivisionError):
        main(["emit", softmax])


GATHER = "x: f32[s, d]\nt: i64[i]\ny[i] = sum[d](x[t[i], d])\n"


@pytest.mark.parametrize("target", ["sm_90", "h200", "gfx942"])
def test_prepare_compiles_for_a_gpu_that_is_not_here(
    target: str, softmax: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["prepare", softmax, "--target", target, "--size", "i=64,j=512"]) == 0
    shown = capsys.readouterr().out
    assert "kernel1" in shown and "registers" in shown
    assert "which torch does not see here" in shown and f"kept for {target}" in shown


def test_prepare_here_runs_calls_of_these_sizes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gather.eqf"
    file.write_text(GATHER)
    for note, more in (("", []), ("# sizes: s=9 d=8\n", []), ("# sizes: s=9 d=8\n", ["--size", "i=3,s=5"])):
        file.write_text(note + GATHER)
        assert main(["prepare", str(file), "--target", "cpu", *more]) == 0
        assert "<eqfuse.Kernel fused_y" in capsys.readouterr().out
    assert "no axis 'q'" in error_of(capsys, "prepare", str(file), "--size", "q=3")
    assert "unknown target 'h300'" in error_of(capsys, "prepare", str(file), "--target", "h300")


@pytest.mark.parametrize(
    "formula, written",
    [
        (
            "sum[j](x[i,j] * w[j]) + b",
            "# sizes: i=256 j=256\nx: f32[i, j]\nw: f32[j]\ny[i] = sum[j](x[i,j] * w[j]) + b\n",
        ),
        (
            "sum[k <= j](y[i,k] * exp(x[i,j]) / sum[j](exp(x[i,j])))",
            "# sizes: i=256 j=256 k=256\ny: f32[i, k]\nx: f32[i, j]\ny_2[i,j] = sum[k <= j](y[i,k] * exp(x[i,j]) / sum[j](exp(x[i,j])))\n",
        ),
        (
            "x: f16[i, j]; m[i] = max[j](x[i,j]); z[i] = sum[j](exp(x[i,j] - m[i])) * v[i]",
            "# sizes: i=256 j=256\nv: f32[i]\nx: f16[i, j]\nm[i] = max[j](x[i,j])\nz[i] = sum[j](exp(x[i,j] - m[i])) * v[i]\n",
        ),
        ("max[i](x[i])", "# sizes: i=256\nx: f32[i]\ny = max[i](x[i])\n"),
    ],
)
def test_new_writes_what_compiles(
    formula: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a program.eqf"
    assert main(["new", str(file), "--formula", formula]) == 0
    assert file.read_text() == written
    shown = capsys.readouterr().out
    assert written in shown and f"eqfuse watch '{file}'" in shown and "<eqfuse.Kernel fused_" in shown
    assert main(["explain", str(file)]) == 0 and capsys.readouterr().out
    assert "is there already" in error_of(capsys, "new", str(file)) and file.read_text() == written


def test_new_from_what_ships(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sigmoid", "ops.rms_norm", "swiglu"):
        file = tmp_path / f"{name}.eqf"
        assert main(["new", str(file), "--from", name]) == 0
        assert file.read_text() == (shipped()[name] if name in shipped() else shipped()[f"ops.{name}"])
        assert "try\n    eqfuse watch" in capsys.readouterr().out
    assert "did you mean 'rope'?" in error_of(capsys, "new", str(tmp_path / "x.eqf"), "--from", "roep")
    assert not (tmp_path / "x.eqf").exists()


@pytest.mark.parametrize(
    "formula, why",
    [
        ("sum[j](x[i,j]) + expp(2)", "unknown function 'expp' (line 1)\n    y[i] = sum[j]"),
        ("softmax(q k) v", "syntax error: "),
        (" ; ", "the program is empty"),
    ],
)
def test_new_writes_nothing_that_does_not_compile(
    formula: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, "new", str(tmp_path / "x.eqf"), "--formula", formula).startswith(why)
    assert "No such file" in error_of(capsys, "new", str(tmp_path / "no" / "x.eqf"))
    assert not list(tmp_path.iterdir())


def test_run_takes_the_settings_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.eqf"
    file.write_text("# sizes: i=3 j=5\n# scalars: b=2\n# constants: c=4\ny[i] = sum[j](x[i,j] * c) + b\n")
    assert main(["run", str(file), "--size", "i=2"]) == 0
    assert "y  float32[2]" in capsys.readouterr().out


def test_watch_says_what_each_text_is(
    softmax: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(softmax)
    screens: list[str] = []

    def edited(_: float) -> None:
        """Stands for the time between two looks: what was printed before is kept, and the file changed."""
        screens.append(capsys.readouterr().out)
        match len(screens):
            case 2:
                file.write_text("x: f32[i, j]\ny[i] = sum[j](")
            case 3:
                file.unlink()
            case 4:
                file.write_bytes(b"y[i] = \xff")
            case 5:
                file.write_text("y[i] = sum[j](x[i,j])")
            case 6:
                monkeypatch.setattr(eq, "compile", lambda *_, **__: 1 / 0)
                file.write_text("y[i] = 2 * x[i]")
            case 7:
                raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", edited)
    assert main(["watch", softmax, "--target", "h200", "--size", "i=4,j=512"]) == 0
    first, same, half, gone, binary, whole, fault = screens
    assert "two parts a and b:" in first and "at i=4 j=512 on h200" in first and "<- chosen" in first
    assert "bounded" in first and "what a loop has seen" not in first and first.count("\n") < 24
    assert same == "" and "(line 2)\n    y[i] = sum[j](\n" in half and "^" in half
    assert "No such file" in gone and "once it is there" in gone and "it is not UTF-8 text" in binary
    assert "sum_j_new = sum_j_a + sum_j_b" in whole
    assert "internal error: ZeroDivisionError" in fault and "Traceback" not in "".join(screens)


def test_watch_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "watch", "-").startswith("standard input does not change")


def test_run_takes_sizes_as_the_other_commands_do(softmax: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", softmax, "--size", "i=2,j=3"]) == 0
    assert "float32[2, 3]" in capsys.readouterr().out
