"""Emitted kernels compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
from triton_nests import attention, loop, row_sum, softmax, split_log_sum

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.tile.triton.aot import TARGETS, compile_for

QKV = dict.fromkeys("QKV", "f16")
MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_matrix_instructions_and_does_not_spill(target: str) -> None:
    case = attention() if target in ("sm_90", "gfx942") else attention(64, 32, 4)
    (report,) = compile_for(case.text(QKV), target, sizes={"d": 64, "e": 64})
    assert report.name == "attend"
    assert MATRIX[target] in report.instructions
    assert report.spilled_bytes == 0
    assert 0 < report.registers <= (512 if target == "gfx942" else 255)
    assert report.shared_bytes > 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_kernel_of_a_module_is_reported(target: str) -> None:
    reports = compile_for(split_log_sum().text({"x": "bf16"}), target)
    assert [report.name for report in reports] == ["partial", "merge"]
    assert all(
        report.spilled_bytes == 0 and not report.instructions & set(MATRIX.values()) for report in reports
    )


def test_float32_dots_are_exact() -> None:
    (report,) = compile_for(
        attention(32, 32, 4).text(dict.fromkeys("QKV", "f32")), "sm_90", sizes={"d": 32, "e": 32}
    )
    assert not report.instructions & {"mma", "wgmma"}


@pytest.mark.parametrize("divisible", [True, False])
def test_wide_loads_need_aligned_rows(divisible: bool) -> None:
    (report,) = compile_for(
        softmax().text({"x": "f32"}),
        "sm_90",
        {"softmax_rows": {"BLOCK_J": 256, "num_stages": 1}},
        divisible=divisible,
    )
    assert ("ld.global.v" in report.assembly) == divisible


def test_rows_that_fill_their_block_have_no_masks() -> None:
    source = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
    text = eq.compile(source, target="sm_90", prefer="resident", verify=False).triton
    full, cut = (compile_for(text, "sm_90", sizes={"j": length})[0].assembly for length in (1024, 1008))
    assert full.count("selp") < cut.count("selp") / 2
    assert full.count(";\n") < 0.9 * cut.count(";\n")


def test_settings_override_defaults() -> None:
    text = row_sum(loop("j", 16)).text({"x": "f32"})
    small, large = (
        compile_for(text, "sm_90", {"sums": {"BLOCK_J": size, "num_warps": 1}})[0] for size in (16, 1024)
    )
    assert small.registers < large.registers


def test_unknown_target() -> None:
    with pytest.raises(EqfuseError, match="unknown target 'sm_1'"):
        compile_for(softmax().text({"x": "f32"}), "sm_1")


def test_refusal_names_the_kernel() -> None:
    text = row_sum(loop("j", 16)).text({"x": "f32"})
    with pytest.raises(EqfuseError, match="cannot compile kernel sums for sm_90"):
        compile_for(text, "sm_90", {"sums": {"BLOCK_J": 24}})


def test_wide_positions_compile() -> None:
    (report,) = compile_for(attention(64, 32, 4).text(QKV), "sm_90", wide=True)
    assert report.spilled_bytes == 0 and "wgmma" in report.instructions


@pytest.mark.parametrize(("target", "has"), [("sm_90", "wgmma"), ("gfx942", "mfma")])
@pytest.mark.slow(but=["sm_90"])
def test_eight_bit_floats(target: str, has: str) -> None:
    text = attention(64, 64, 4).text({"Q": "f8e4m3", "K": "f8e4m3", "V": "f16"})
    (report,) = compile_for(text, target)
    assert has in report.instructions


def test_missing_hardware_support_is_an_error() -> None:
    text = attention(64, 64, 4).text({"Q": "f8e4m3", "K": "f8e4m3", "V": "f16"})
    with pytest.raises(EqfuseError, match="(?s)cannot compile kernel attend for sm_80.*fp8e4nv"):
        compile_for(text, "sm_80")


def test_sums_of_products_of_many_axes_are_no_products_of_matrices_to_triton() -> None:
    """Of u[:, None, None, :] * v[None, :, :, :] Triton makes a product of matrices, which does not compile."""
    text = "u: f32[i,e]\nv: f32[j,k,e]\ny[i] = sum[j](sum[k](relu(sum[e](u[i,e] * v[j,k,e]))))"
    sizes = {"i": 4096, "j": 16, "k": 16, "e": 32}
    kernel = eq.compile(text, target="h200", sizes=sizes, verify=False)
    (report,) = compile_for(kernel.triton, "sm_90", sizes=sizes)
    assert not report.instructions & {"wgmma", "mma"}
