"""The text that Triton emission prints: golden files, formatting, and what it must be independent of."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton_nests import Case, attention, loop, paged_sum, pointwise, row_sum, softmax, split_log_sum, whole

from eqfuse.compiler import derive, emit_triton, pipeline
from eqfuse.devices import device_named
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.nodes import Axis, Const, Load, Reduce, call
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.triton.functions import HELPERS, helper_name
from eqfuse.tile.triton.launch import load, source_file
from eqfuse.tile.triton.wrap import LIMIT, wrap

INDEX = {"page": "i32", "length": "i32"}
CASES: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "softmax": (softmax, {"x": "f16"}),
    "row_sum": (lambda: row_sum(whole("j")), {"x": "f32"}),
    "attention": (attention, dict.fromkeys("QKV", "f16")),
    "split": (split_log_sum, {"x": "bf16"}),
    "paged": (paged_sum, {"x": "f32", **INDEX}),
}


@pytest.fixture(params=CASES)
def text(request: pytest.FixtureRequest) -> str:
    case, dtypes = CASES[request.param]
    return case().text(dtypes)


@pytest.mark.parametrize("name", ["softmax", "attention", "split"])
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    case, dtypes = CASES[name]
    golden(f"triton_{name}", case().text(dtypes, name))


def test_same_text_every_time(text: str, request: pytest.FixtureRequest) -> None:
    case, dtypes = CASES[request.node.callspec.params["text"]]
    assert case().text(dtypes) == text


def test_lines_are_short(text: str) -> None:
    assert max(map(len, text.splitlines())) <= LIMIT
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_needs_torch_and_triton_alone(text: str) -> None:
    modules = {
        name.name if isinstance(node, ast.Import) else "from"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert modules == {"warnings", "torch", "triton", "triton.language"}


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_passes_a_linter(tmp_path: Path) -> None:
    for name, (case, dtypes) in CASES.items():
        (tmp_path / f"{name}.py").write_text(case().text(dtypes))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_prints_only_helpers_in_use(text: str) -> None:
    tree = ast.parse(text)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    helpers = defined & set(map(helper_name, HELPERS))
    assert helpers <= read


def test_keys_are_loaded_in_the_order_of_the_dot() -> None:
    text = attention().text(dict.fromkeys("QKV", "f16"))
    assert "tl.trans" not in text
    assert (
        "K_ptr + b * K_stride_b + h * K_stride_h + j[None, :] * K_stride_j + d[:, None] * K_stride_d" in text
    )


def test_carried_values_are_updated_in_place() -> None:
    text = attention().text(dict.fromkeys("QKV", "f16"))
    assert "s = r * s + sum_j" in text
    assert "acc = tl.dot(p.to(tl.float16), v, r[:, None] * acc)" in text
    assert "m = m_new" in text  # the old maximum is read after the new one is known


def test_scaled_scores_take_the_constant_of_the_exponent() -> None:
    text = attention().text(dict.fromkeys("QKV", "f16"))
    assert "scale_arg_log2 = scale * 1.4426950408889634" in text and "dot * scale_arg_log2" in text
    assert "p = tl.exp2(x_now - finite_2[:, None])" in text
    assert text.count("1.4426950408889634") == 1


def test_loaded_exponents_are_subtracted_first() -> None:
    assert "tl.exp2((x_now - finite_2[:, None]) * 1.4426950408889634)" in softmax().text({"x": "f32"})


def test_loops_beside_each_other_share_their_variables() -> None:
    text = row_sum(loop("j", 8)).text({"x": "f32"})
    assert text.count("s = tl.zeros((BLOCK_I,), tl.float32)") == 1
    assert text.count("s = s + sum_j") == 2
    assert "s_2" not in text


def test_wide_tensors_get_wide_positions() -> None:
    module = load(row_sum(loop("j", 8)).text({"x": "f32"}))
    near, far = torch.empty(1).expand(2**20, 2**20), torch.empty(2).as_strided((3, 2), (0, 1))
    assert module.index_dtype(near, far) == tl.int32
    meta = torch.empty(2**16, 2**15 + 1, device="meta")
    assert module.index_dtype(near, meta) == tl.int64
    assert module.index_dtype(meta[: 2**15]) == tl.int32


def test_indices_that_are_loaded_become_wide() -> None:
    text = paged_sum().text({"x": "f32", **INDEX})
    assert "+ tl.cast(page_tile, INDEX)[:, None] * x_stride_0" in text
    assert "tl.cast" not in paged_sum().text({"x": "f32", "page": "i64", "length": "i32"})


@pytest.mark.parametrize("constant", [True, False])
def test_exponent_takes_the_constant_of_a_product(constant: bool) -> None:
    x = Load("x", (Axis("i"),))
    inner = call("mul", x, Const(0.5)) if constant else x
    text = pointwise(call("exp", inner), "y[i] = exp(x[i])").text({"x": "f32"})
    factor = "(0.5 * 1.4426950408889634)" if constant else "1.4426950408889634"
    assert f"tl.exp2(x_tile * {factor})" in text


def test_blocks_with_a_shared_quotient_are_not_enlarged() -> None:
    text = paged_sum().text({"x": "f32", **INDEX})
    module = load(text)
    assert module.settings("paged", {"paged": {"BLOCK_J": 4}}, {"d": 5})["BLOCK_J"] == 4
    assert module.settings("paged", None, {"d": 5})["BLOCK_D"] == 8


def test_names_that_collide() -> None:
    body = Reduce(
        "max", "max", call("mul", Load("tl", (Axis("i"), Axis("max"))), Load("BLOCK_I", (Axis("i"),)))
    )
    case = pointwise(body, "y[i] = max[max](tl[i,max] * BLOCK_I[i])")
    configs = (KernelConfig((*case.configs[0].blocks, whole("max")), 1, 1),)
    text = Case(case.source, case.nest, configs).text({"tl": "f32", "BLOCK_I": "f32"})
    compile(text, "emitted", "exec")
    assert "tl_ptr" in text and "BLOCK_I_ptr" in text


def test_source_text_is_quoted() -> None:
    case = pointwise(Load("x", (Axis("i"),)), 'y[i] = x[i] * 1.0  # """ and \\n')
    docstring = ast.get_docstring(ast.parse(case.text({"x": "f32"})))
    assert docstring is not None and '# """ and \\n' in docstring


def test_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = source_file("x = 1\n")
    assert path.is_relative_to(tmp_path) and path.read_text() == "x = 1\n"
    path.write_text("x =")  # what an interrupted write of another tool would leave
    assert source_file("x = 1\n").read_text() == "x = 1\n"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "line",
    [
        "    x = f(" + ", ".join(f"argument_{n}={n}" for n in range(12)) + ")",
        "    value = " + " + ".join(f"base_{n} * stride_{n}" for n in range(12)),
        "    x = tl.load(p, mask=" + " & ".join(f"(i_{n} < N_{n})" for n in range(12)) + ", other=0.0)",
        "    " + "tl.store(" + " + ".join(f"p_{n} * s_{n}" for n in range(14)) + ", value, mask=a & b)",
        '    raise ValueError("' + "(" * 30 + '", ' + ", ".join(f"{n}" for n in range(40)) + ")",
    ],
)
def test_long_lines_are_broken(line: str) -> None:
    lines = wrap(line)
    assert len(lines) > 1 and max(map(len, lines)) <= LIMIT
    broken, whole = (ast.dump(ast.parse("if 1:\n" + text)) for text in ("\n".join(lines), line))
    assert broken == whole


def test_loaded_tiles_are_not_folded_along_their_last_dim() -> None:
    """Triton's pass for what loops add up of them, with other dims that memory is contiguous along, is wrong."""
    derived = derive("y[k,j] = max[i](x[k,j,i])\nz[k] = sum[i](w[k,i])", None, False)
    extents, dtypes = {"k": 64000, "j": 9, "i": 300}, dict.fromkeys(program_dtypes(derived.program), "f32")
    compiled = pipeline(derived, extents, dtypes, device_named("h200"), "rolling")
    text = emit_triton(derived, compiled, "folds")
    assert (
        re.search(r"reduce\(tl.(trans|permute)\(x_tile.*0, maximum", text)
        and "tl.sum(tl.trans(w_tile), 0)" in text
    )
    assert not re.search(r"(reduce|sum)\([xw]_tile,", text)
