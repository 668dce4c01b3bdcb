"""The table of workloads: every program parses, fits its tensors, and says what its unfused form computes."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from bench.measure import rounding
from bench.workloads import WORKLOADS, TensorSpec, Workload, select
from eqfuse.measure import as_tuple, worst_error
from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind

EVERY = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))

ISSUE = """
global_prefill causal_prefill gqa_prefill alibi_prefill softcap_prefill window_prefill
causal_decode gqa_decode alibi_decode softcap_decode performer l2norm rmsnorm_quant
mha mha_decode mla quant_gemm variance inertia sum_sum
mha_incremental mha_speculative mha_chunked_prefill gqa_incremental gqa_speculative gqa_chunked_prefill
mqa_incremental mqa_speculative mqa_chunked_prefill lora mlp gated_mlp
softmax log_softmax logsumexp layernorm cross_entropy softmax_entropy attention_lse qknorm_attention
weighted_variance covariance cosine_similarity moe_routing moe_routing_logits
varlen_prefill paged_decode
"""


def test_no_program_is_missing() -> None:
    assert sorted(WORKLOADS) == sorted(ISSUE.split())


def test_every_row_of_the_papers_tables_is_a_case() -> None:
    def cases(*names: str) -> set[str]:
        return {case.name for name in names for case in WORKLOADS[name].paper_cases}

    assert cases("mha", "mha_decode") == {f"H{n}" for n in range(1, 10)}
    assert cases("mla") == {f"L{n}" for n in range(1, 10)}
    assert cases("quant_gemm") == {f"Q{n}" for n in range(1, 11)}
    assert cases("variance") == {f"V{n}" for n in range(1, 9)}
    assert cases("inertia") == {f"I{n}" for n in range(1, 9)}
    assert cases("moe_routing") == set(WORKLOADS["moe_routing"].checked) == {f"R{n}" for n in range(1, 9)}
    assert cases("moe_routing_logits") > set(WORKLOADS["moe_routing_logits"].checked)
    assert len(cases("l2norm")) == 32
    assert cases("gqa_prefill") == {f"n{2**p}" for p in range(7, 16)}


def test_a_paper_case_has_the_papers_heads() -> None:
    case = WORKLOADS["gqa_prefill"].cases["n4096"]
    assert (case.sizes["h"], case.sizes["k"], case.sizes["d"], case.constants["g"]) == (64, 8, 128, 8)
    assert WORKLOADS["window_prefill"].cases["n32768"].constants["span"] == 4096


@EVERY
def test_source_parses_with_and_without_declarations(workload: Workload) -> None:
    for case in (workload.cases["small"], workload.cases["cpu"], *workload.paper_cases):
        bare = parse(workload.source, scalars=case.constants)
        declared = parse(workload.text(case), scalars=case.constants)
        assert {t.name: t.rank for t in bare.tensors} == {n: len(s.axes) for n, s in workload.tensors.items()}
        assert set(declared.scalars) == set(case.scalars)
        assert [output.expr for output in bare.outputs] == [output.expr for output in declared.outputs]


@EVERY
def test_every_case_fits_the_program(workload: Workload) -> None:
    for case in workload.cases.values():
        shapes = {name: workload.shape(name, case) for name in workload.tensors}
        bind(parse(workload.text(case), scalars=case.constants), shapes, scalars=case.scalars)


@EVERY
def test_unfused_torch_computes_what_the_source_says(workload: Workload) -> None:
    case = workload.cases["small"]
    inputs = workload.inputs(case)
    unfused = eq.reference(workload.exact_source, scalars=case.constants)
    reference = as_tuple(unfused(**inputs, **case.scalars))
    assert worst_error(workload.run_exact(case, inputs), reference) < 1e-12
    # In float32, with its casts, the unfused program is as far off as its coarsest format.
    coarsest = 2**-4 if "f8e4m3(" in workload.source else 2**-20
    assert 0 < worst_error(workload.run_eager(case, inputs), reference) < coarsest


@EVERY
@pytest.mark.slow(but=["mha_decode", "rmsnorm_quant", "softmax", "moe_routing"])
def test_the_chosen_plan_computes_what_the_source_says(workload: Workload) -> None:
    """On the CPU. Verification stops at the tile program: what is generated from it is tested here."""
    case = workload.cases["small"]
    inputs = workload.inputs(case)
    kernel = eq.compile(workload.text(case), scalars=case.constants, verify=False)
    fused = as_tuple(kernel(**workload.arguments(case, inputs)))
    reference = as_tuple(
        eq.reference(workload.exact_source, scalars=case.constants)(**inputs, **case.scalars)
    )
    unfused = workload.run_eager(case, inputs)
    assert worst_error(fused, reference) <= max(2 * worst_error(unfused, reference), rounding(unfused))


def test_exact_source_has_no_casts() -> None:
    assert "f8e4m3(" in WORKLOADS["quant_gemm"].source
    assert "sum[k]((A[i,k] / s[i]) * W[n,k])" in WORKLOADS["quant_gemm"].exact_source
    assert WORKLOADS["mlp"].exact_source == WORKLOADS["mlp"].source


def test_inputs_depend_on_the_seed_alone() -> None:
    workload = WORKLOADS["cross_entropy"]
    case = workload.cases["small"]
    first, again, other = workload.inputs(case), workload.inputs(case), workload.inputs(case, seed=1)
    assert torch.equal(first["x"], again["x"]) and not torch.equal(first["x"], other["x"])
    assert first["label"].dtype == torch.int64
    assert int(first["label"].min()) >= 0 and int(first["label"].max()) < case.sizes["c"]


def test_lengths_have_a_heavy_tail_and_documents_are_packed() -> None:
    decode = WORKLOADS["paged_decode"]
    lengths = decode.inputs(decode.cases["cpu"])["len"].float()
    assert float(lengths.min()) >= 1 and float(lengths.max()) > 4 * float(lengths.median())
    prefill = WORKLOADS["varlen_prefill"]
    first = prefill.inputs(prefill.cases["cpu"])["first"]
    starts = torch.unique(first)
    assert int(first[0]) == 0 and len(starts) > 4 and torch.equal(first[starts.long()], starts)
    assert bool((first.diff() >= 0).all()) and bool((first <= torch.arange(len(first))).all())


def test_weights_of_weighted_programs_are_positive() -> None:
    for name, tensor in (("inertia", "m"), ("weighted_variance", "w")):
        workload = WORKLOADS[name]
        assert float(workload.inputs(workload.cases["small"])[tensor].min()) > 0


def test_tensor_specs() -> None:
    assert TensorSpec.parse("i64[r] ~ index c") == TensorSpec("i64", ("r",), "index c")
    assert TensorSpec.parse("T[b, h]") == TensorSpec(None, ("b", "h"), "normal")
    with pytest.raises(ValueError, match="not a tensor"):
        TensorSpec.parse("T[b, h")


def test_select_by_name_and_family() -> None:
    assert [w.name for w in select("softmax")] == ["softmax", "softmax_entropy"]
    assert {w.family for w in select("redfuser,mirage")} == {"redfuser", "mirage"}
    assert select("nothing") == []
    assert len(select(None)) == len(WORKLOADS)
