"""Files for other projects: the plain reference is the program, modules and their tests run without eqfuse, and fail where a kernel is wrong."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import numpy as np
import pytest

import eqfuse as eq
from eqfuse.cli import main
from eqfuse.errors import EqfuseError
from eqfuse.program_files import kernel_of, noted, numbers, shapes_of, shipped
from eqfuse.terms.parser import parse
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.native.build import FLAGS
from eqfuse.vendor.files import _faster, _lines, _random, _scalars, _small, name_of
from eqfuse.vendor.module import fitting, merged, plain_module_of
from eqfuse.vendor.reference import reference

SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j])) * s\n"
ATTENTION = """
Q: f16[h, i, d]
K: f16[h, j, d]
V: f16[h, j, e]
O: f16[h, i, e]
S[h,i,j] = where(j <= i, sum[d](Q[h,i,d] * K[h,j,d]) * scale, -inf)
P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h,j,e])
"""
LISTS = {"knn", "moe_routing", "top_p", "ops.route"}
"""Programs with lists of the first few, of which there is no plain form."""

triton = needs.packages("triton")


# The reference -----------------------------------------------------------------------------------


@pytest.mark.slow(but=["rope", "chamfer", "ops.layer_norm", "ops.geglu", "paged]", "ops.quantize_rows"])
@pytest.mark.parametrize("name", sorted(shipped().keys() - LISTS - {"ops.paged_decode"}))
def test_the_plain_reference_is_the_program(name: str) -> None:
    source = shipped()[name]
    constants = numbers(noted(source, "constants"), "--constant")
    program = parse(source, scalars=constants)
    scope: dict[str, Any] = {"np": np, "math": math}
    exec(reference(program), scope)  # noqa: S102
    sizes, scalars = _small(program), _scalars(program)
    shapes, dtypes = shapes_of(program, sizes), program_dtypes(program)
    random = np.random.default_rng(0)
    texts = {each.name: _random(program, each.name, dtypes[each.name], shapes) for each in program.tensors}
    given = {each: eval(text, {"np": np, "random": random}) for each, text in texts.items()}
    assert {each: np.shape(value) for each, value in given.items()} == shapes
    known = {axis for tensor in program.tensors for axis in tensor.axes}
    unknown = {
        axis: size for axis, size in sizes.items() if axis not in known and axis not in program.computed
    }
    expected = eq.reference(source, scalars=constants)(**given, **scalars, sizes=unknown)
    with np.errstate(all="ignore"):
        found = scope["reference"](**given, **scalars, sizes=sizes)
    for one, other in zip(_several(found), _several(expected), strict=True):
        assert np.isfinite(other).any()
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "source",
    [
        "v[i] = argmax.v[j](x[i,j], j)\nk[i] = argmax[j](x[i,j])\nreturn v, k",
        "k[i] = argmin[j](x[i,j])\nm[i] = max[j](x[i,j])\nreturn k, m",
        "h[i,t] = a[i,t] * h[i,t-1] + x[i,t]",
        "y[i] = argmax[j](1)",
    ],
)
def test_the_plain_reference_of_reductions_with_states(source: str) -> None:
    scope: dict[str, Any] = {"np": np, "math": math}
    exec(reference(parse(source)), scope)  # noqa: S102
    random = np.random.default_rng(0)
    sizes = {"i": 3, "j": 5, "t": 5}
    given = {each.name: random.integers(0, 3, (3, 5)).astype(float) for each in parse(source).tensors}
    unknown = {} if given else {"i": 3, "j": 5}
    found, expected = scope["reference"](**given, sizes=sizes), eq.reference(source)(**given, sizes=unknown)
    for one, other in zip(_several(found), _several(expected), strict=True):
        np.testing.assert_allclose(one, other)


def _several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize(
    "source, what",
    [
        ("k: axis[2]\ny[i,k], p[i,k] = topk[j,k](x[i,j])", "topk.v[j, k](x[i, j], j)"),
        ("y[i] = sum[j](f8e4m3(x[i,j]))", "f8e4m3"),
        ("y[i] = x[i] * rand(s, i)", "rand"),
    ],
)
def test_what_has_no_plain_reference_is_said(
    source: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.eqf").write_text(source)
    assert main(["emit", str(tmp_path / "x.eqf"), "--output", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"there is no plain reference of {what}, for the test") and "kernel.py" in text
    assert not (tmp_path / "out").exists()


# Two modules as one ------------------------------------------------------------------------------

FIRST = '''"""One."""
import os

# What is made.
TABLE = {"a": 1}
CALLS = {}


def shared(x):
    return x + 1


def looked(x):
    return f"{x} of {TABLE['a']}", CALLS.setdefault(x, 1)


def first(x):
    return looked(shared(x))
'''


def test_what_two_modules_share_is_there_once() -> None:
    second = FIRST.replace('{"a": 1}', '{"a": 2}').replace("def first", "def second")
    text = merged(FIRST, second, '"""Both."""')
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert defined == ["shared", "looked", "first", "looked_backward", "second"]
    assert text.count("# What is made.") == 2 and text.startswith('"""Both."""')
    scope: dict[str, Any] = {}
    exec(text, scope)  # noqa: S102
    assert scope["first"](1) == ("2 of 1", 1) and scope["second"](1) == ("2 of 2", 1)
    assert scope["CALLS"] is not scope["CALLS_backward"]


def test_one_module_twice_keeps_its_state_apart() -> None:
    text = merged(FIRST, FIRST, '"""Both."""')
    assert "CALLS_backward = {}" in text and "first_backward" in text and "shared_backward" not in text


@pytest.mark.parametrize(
    "word, name",
    [
        ("rms-norm", "rms_norm"),
        ("class", "class_"),
        ("3d", "k3d"),
        ("été", "k_t_"),
        ("random", "random_"),
        ("torch", "torch_"),
    ],
)
def test_names_of_modules(word: str, name: str) -> None:
    assert name_of(word) == name


# Files -------------------------------------------------------------------------------------------


def emitted(folder: Path, name: str, source: str, *options: str) -> Path:
    """Where the files of a program are."""
    (folder / f"{name}.eqf").write_text(source)
    out = folder / "out"
    assert main(["emit", str(folder / f"{name}.eqf"), "--output", str(out), *options]) == 0
    (out / "conftest.py").write_text("import sys\nsys.modules['eqfuse'] = None\n")  # an import of it fails
    assert "import eqfuse" not in "".join(file.read_text() for file in out.iterdir())
    return out


def outcome(out: Path) -> str:
    """What pytest prints of the tests in a folder."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rsf",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(out),
        str(out),
    ]
    return subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, check=False).stdout


@triton
@pytest.mark.slow(but=["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "name, source, count",
    [
        ("softmax", SOFTMAX, 2),
        ("attention", ATTENTION, 2),
        ("sigmoid", "y[i] = sum[j](sigmoid(x[i,j]) * w[j])", 2),  # the name of a function of the module
        ("pair", "y[i] = sum[j](x[i] * x[j] * exp(-sq(x[i] - x[j])))", 2),
        ("difference", "y[i] = x[i+1] - x[i]\nn[i] = sum[j](where(w[i,j] > 0, 1, 0))\nreturn y, n", 2),
        ("count", "n[i] = sum[j](where(x[i,j] > 0, 1, 0))", 1),
        ("loss", shipped()["ops.linear_cross_entropy"], 2),
        ("straight", "y[i] = sum[j](x[i,j] + stop(round(x[i,j]) - x[i,j]))", 1),
        ("random", '# """ \\ \\N*/\ny[i] = sum[j](x[i,j])', 2),
        ("row", "y[j] = x[j] * rsqrt(mean[j](sq(x[j])) + 1)", 2),  # what it saves has no axes
    ],
)
def test_modules_pass_their_tests_without_eqfuse(name: str, source: str, count: int, tmp_path: Path) -> None:
    out = emitted(tmp_path, name, source, "--target", "h200")
    assert {file.name for file in out.iterdir()} >= {
        f"{name_of(name)}{end}" for end in (".py", "_test.py", ".md")
    }
    shown = outcome(out)
    assert re.search(rf"^{count} passed", shown, re.MULTILINE), shown


@triton
@pytest.mark.parametrize(
    "right, wrong, test",
    [
        ("/ sum_j * s", "/ sum_j * s * 1.01", "test_outputs"),
        ("t2 - sum_j * t1", "t2 + sum_j * t1", "test_gradients"),
    ],
)
def test_a_wrong_kernel_fails_its_test(right: str, wrong: str, test: str, tmp_path: Path) -> None:
    out = emitted(tmp_path, "softmax", SOFTMAX, "--target", "h200")
    text = (out / "softmax.py").read_text()
    broken = text.replace(right, wrong)
    assert broken != text
    (out / "softmax.py").write_text(broken)
    shown = outcome(out)
    assert f"FAILED softmax_test.py::{test}" in shown and "1 failed, 1 passed" in shown


def test_the_page_has_the_derivation_and_the_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = emitted(tmp_path, "softmax", f"# sizes: i=64 j=4096\n{SOFTMAX}")
    text = (out / "softmax.md").read_text()
    for part in (
        "# softmax",
        "for sm_90, with the plan for i=64 j=4096",
        "## Derivation",
        "max_j_new =",
        "verified in",
    ):
        assert part in text
    assert "## Gradient by x" in text and "sum_dy_y[i]" in text
    assert capsys.readouterr().out.splitlines() == [
        f"written to {out / file}" for file in ("softmax.py", "softmax_test.py", "softmax.md")
    ]
    out = emitted(tmp_path / "out", "count", "n[i] = sum[j](where(x[i,j] > 0, 1, 0))")
    assert "without a gradient: no output has one" in capsys.readouterr().out
    assert "There is no gradient: no output has one" in (out / "count.md").read_text()


def test_the_order_of_the_given_sizes_is_written() -> None:
    source, sizes = "y[i] = sum[j](sum[l](A[i,l] * B[l,j]) * v[j])", {"i": 1024, "l": 1024, "j": 1024}
    kernel, known = kernel_of(source, "h200", sizes)
    text = "\n".join(_lines(kernel, "chain", None, "it was not asked for"))
    assert "in another order of sums and products" in text and "eq.compile" not in text
    module = plain_module_of(kernel, "chain", known)
    assert "tl.dot" not in module  # A (B v) has no product of matrices


def test_the_page_says_which_form_calls_run() -> None:
    linear = "j: axis[i]\ny[i,e] = sum[j](where(j <= i, sum[d](q[i,d] * k[j,d]), 0) * v[j,e])"
    kernel, _ = kernel_of(linear, "h200", {"i": 8192, "d": 64, "e": 64})
    (line,) = _faster(kernel, "linear")
    assert line.startswith("Calls of `eq.compile` run linear with axes in chunks at these sizes")
    kernel, _ = kernel_of(linear, "h200", {"i": 40, "d": 64, "e": 64})
    assert not list(_faster(kernel, "linear"))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    kernel, _ = kernel_of(SOFTMAX, "h200", {})
    assert fitting(kernel) is kernel
    unfit: Any = SimpleNamespace(
        plan=replace(kernel.plan, reason="kernel1 needs 9 MB"), program=kernel.program
    )
    with pytest.raises(EqfuseError, match="no plan of y fits: kernel1 needs 9 MB"):
        fitting(unfit)


@pytest.mark.slow
def test_a_gradient_whose_plan_does_not_fit_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted(tmp_path, "block_list", shipped()["block_list"], "--target", "h200")
    assert "without a gradient: no plan of dQ, dK, dV fits: kernel1 needs" in capsys.readouterr().out


@pytest.mark.parametrize("file, why", [("no/out", "there is no folder"), ("x.eqf/out", "there is no folder")])
def test_a_folder_that_cannot_be_had(
    file: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.eqf").write_text(SOFTMAX)
    with pytest.raises(SystemExit, match="2"):
        main(["emit", str(tmp_path / "x.eqf"), "--output", str(tmp_path / file)])
    assert why in capsys.readouterr().err


def test_sizes_that_no_tensor_has_are_those_that_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pair.eqf"
    file.write_text("k: i32\ny[i] = sum[j](x[t[i] + k + j])\nt: i32[i]\n")
    assert main(["emit", str(file), "--size", "i=9,j=7"]) == 0
    assert 'SIZES = {"j": 7}' in capsys.readouterr().out


def test_sizes_of_a_dimension_that_is_read_along_two_axes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call of the module needs no sizes, and commands take those that they are given."""
    file = tmp_path / "pair.eqf"
    file.write_text("y[i] = sum[j](x[i] * x[j])\n")
    assert main(["emit", str(file)]) == 0
    assert '{"i": x.shape[0], "j": x.shape[0], **(sizes or {})}' in capsys.readouterr().out
    assert main(["run", str(file), "--size", "i=9,j=9"]) == 0 and "float32[9]" in capsys.readouterr().out
    assert main(["prepare", str(file), "--size", "i=9,j=9"]) == 0
    file.write_text("y[i] = x[0] * x[i] + w[2] - z[i + 1] * z[i]\n")
    assert main(["run", str(file), "--size", "i=9"]) == 0
    assert main(["emit", str(file)]) == 0 and '"i": z.shape[0] - 1' not in capsys.readouterr().out
    file.write_text(
        "y[i] = z[i + 1] * z[i] + w[c] * w[c + N(c)]\n".replace(
            "w[c] * w[c + N(c)]", "sum[c](w[c] * w[c + N(c)])"
        )
    )
    assert main(["emit", str(file)]) == 0
    assert '{"i": z.shape[0] - 1, "c": w.shape[0] // 2, **(sizes or {})}' in capsys.readouterr().out


def test_source_for_the_cpu_is_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.eqf").write_text(SOFTMAX)
    assert main(["emit", str(tmp_path / "x.eqf"), "--target", "cpu"]) == 0
    assert 'extern "C" void run(' in capsys.readouterr().out


# In C++ ------------------------------------------------------------------------------------------


@needs.cxx
@pytest.mark.slow(but=["half", "named"])
@pytest.mark.parametrize(
    "name, source, count",
    [
        ("softmax", SOFTMAX, 4),
        ("attention", ATTENTION.replace("f16", "f32"), 4),
        ("half", ATTENTION, 4),
        (
            "named",
            "F: f32[c]\nsize: i32\nc: axis[N(j) // 2 + 1]\ny[i] = sum[j](new[i,j] * I[j] * F[j//2]) * auto + size",
            4,
        ),
        ("pair", "y[i] = sum[j](x[i] * x[j])\nn[i] = sum[j](where(x[j] > x[i], 1, 0))\nreturn y, n", 4),
        ("difference", "y[i] = x[i+1] - x[i]", 4),
        ("comment", '# """ \\ */\ny[i] = sum[j](x[i,j])', 4),
        ("count", "n[i] = sum[j](where(x[i,j] > 0, 1, 0))", 2),
        ("variance", "m[i] = mean[j](x[i,j])\ny = sum[i,j](sq(x[i,j] - m[i]))", 4),
        ("row", "y[j] = x[j] * rsqrt(mean[j](sq(x[j])) + 1)", 4),
    ],
)
def test_cpp_passes_its_test(name: str, source: str, count: int, tmp_path: Path) -> None:
    out = emitted(tmp_path, name, source, "--target", "cpu")
    assert {file.name for file in out.iterdir()} >= {
        f"{name}{end}" for end in (".cpp", ".h", "_test.py", ".md")
    }
    shown = outcome(out)
    assert f"{count} passed" in shown, shown


@needs.cxx
def test_wrong_cpp_fails_its_test(tmp_path: Path) -> None:
    out = emitted(tmp_path, "softmax", SOFTMAX, "--target", "cpu")
    text = (out / "softmax.cpp").read_text()
    first, forward, backward = text.split("  return failure[0]")[:3]
    wrong = f"{first}  y[0] += 0.01;\n  return failure[0]{forward}  return failure[0]{backward}  dx[1] *= 2;\n  return failure[0] ? 1 : 0;\n}}\n"
    (out / "softmax.cpp").write_text(wrong)
    shown = outcome(out)
    assert "4 failed" in shown and "Not equal to tolerance" in shown and "check_slope" in shown


@needs.cxx
def test_functions_in_c_link_with_each_other_and_tell_of_positions_outside(tmp_path: Path) -> None:
    out = emitted(tmp_path, "gather", "t: i32[i]\nx: f32[s, d]\ny[i] = sum[d](x[t[i],d])", "--target", "cpu")
    emitted(tmp_path, "product", "y[i,k] = sum[j](a[i,j] * b[j,k])", "--target", "cpu")
    emitted(tmp_path, "other", "y[i,k] = sum[j](a[i,j] * b[j,k])", "--target", "cpu")
    (out / "user.c").write_text("""
#include "gather.h"
#include "other.h"
#include "product.h"
int main() {
  float x[6] = {1, 2, 3, 4, 5, 6}, y[2];
  int32_t inside[2] = {2, 0}, outside[2] = {0, 3};
  if (gather(inside, x, y, 2, 2, 3, 1) || y[0] != 11 || y[1] != 3) return 1;
  if (!gather(outside, x, y, 2, 2, 3, 1)) return 2;
  float z[1];
  return product(x, x, z, 1, 3, 1, 1) || z[0] != 14 || other(x, x, z, 1, 3, 1, 1) ? 3 : 0;
}
""")
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-std=c++17")]
    for command in (
        ["cc", "-c", "user.c", "-o", "user.o"],
        ["c++", *flags, "gather.cpp", "product.cpp", "other.cpp", "user.o", "-o", "user"],
        ["./user"],
    ):
        subprocess.run(command, cwd=out, check=True)


def test_elements_that_c_has_not_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.eqf").write_text("x: bf16[i, j]\ny[i] = sum[j](x[i,j])")
    assert main(["emit", str(tmp_path / "x.eqf"), "--target", "cpu", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("C has no elements of bf16, which x is made of")
