"""Derivations: every chain is replayed, JSON goes round, and what is not a derivation is refused with the place."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from rich.console import Console

import eqfuse as eq
from bench.programs import Example, programs
from bench.report import Options
from bench.runner import run as bench
from bench.workloads import WORKLOADS
from eqfuse.kernel import Kernel
from eqfuse.proof.check import known_rules, read_rule
from eqfuse.proof.examine import examine
from eqfuse.proof.nodes import inferences, rests_on
from eqfuse.proof.outline import Outline
from eqfuse.proof.printer import plain
from eqfuse.proof.record import Recorder
from eqfuse.proof.trace import survives, trace, without
from eqfuse.rules.egraph import saturate

QUICK = (
    "softmax",
    "causal_prefill",
    "gqa_decode",
    "variance",
    "rmsnorm_quant",
    "quant_gemm",
    "l2norm",
    "softmax_entropy",
    "inertia",
    "gated_mlp",
)
"""Programs that are checked here; `eqfuse bench explain` checks all."""

RECURRENCE = """x: f32[i,j]
a[i] = sum[j](x[i,j])
b[i] = sum[j](tanh(x[i,j] - a[i]))
return b"""


@cache
def kernel(name: str) -> Kernel:
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    return eq.compile(workload.text(case), scalars=case.constants, target="cpu", verify=False)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow(but=["softmax", "rmsnorm", "variance"])
def test_every_step_is_replayed(name: str) -> None:
    derivation = kernel(name).derivation
    assert derivation.proof.gaps == ()
    verdict = derivation.check()
    assert verdict, verdict.why
    assert verdict.why.startswith(f"{derivation.steps} steps, ")
    again = eq.Derivation.from_json(derivation.to_json())
    assert again.check().why == verdict.why
    assert again.to_json() == derivation.to_json()
    assert again.check(kernel(name).derived.program.source)


@settings(
    max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(programs())
@pytest.mark.slow
def test_random_programs_are_derived(example: Example) -> None:
    try:
        found = eq.compile(example.source, target="cpu", verify=False)
    except eq.EqfuseError:  # a refusal is for the fuzzing report to judge
        reject()
    verdict = found.derivation.check(example.source)
    assert verdict, verdict.why
    assert found.explain() and found.explain("latex")


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow(but=["softmax", "variance", "rmsnorm", "l2norm", "gated"])
def test_chains_run_from_the_program_to_the_merge(name: str) -> None:
    """Every output and every state of a fused group has its chain, and the values are those of `merge`."""
    found = kernel(name)
    proof = found.derivation.proof
    assert [o.name for o in proof.outputs] == [o.name for o in found.derived.program.outputs]
    for mine, plan in zip(proof.kernels, found.plan.kernels, strict=True):
        for group, chosen in zip(mine.groups, plan.groups, strict=True):
            assert [s.name for s in group.states] == [s.name for s in chosen.group.states]
            assert group.is_fused == (chosen.group.merge is not None)
            for state in group.states if group.is_fused else ():
                assert state.update is not None and state.update.steps
                assert state.combine is not None and state.combine.steps
        assert [walk.schedule for walk in mine.walks] == [g.schedule for g in plan.groups]


def test_the_rules_named_are_those_that_fired() -> None:
    derivation = kernel("softmax").derivation
    assert {"split-max", "split-sum", "rescale", "ratio-exp"} <= set(derivation.rules)
    assert set(derivation.rules) <= known_rules().keys()
    assert "recentre-sum" in kernel("variance").derivation.rules


@pytest.mark.parametrize("name", ["softmax", "quant_gemm"])
def test_a_removed_rule_makes_the_derivation_unavailable(name: str) -> None:
    proof = kernel(name).derivation.proof
    for rule in proof.rules:
        rest = {known: text for known, text in known_rules(proof).items() if known != rule}
        verdict = examine(proof, rules=rest)
        assert not verdict and f"there is no rule {rule!r}" in verdict.why


@pytest.mark.slow
def test_without_a_rule_the_kernels_are_others_or_follow_in_another_way() -> None:
    found = kernel("softmax")
    derived, plan = found.derived, found.plan
    for rule in ("split-sum", "rescale", "ratio-exp"):
        assert not survives(rule, derived.program, derived.outputs, derived.groups, plan), rule
    (spare,) = [rule for rule in ("plain-cast",) if rule not in found.derivation.rules]
    assert survives(spare, derived.program, derived.outputs, derived.groups, plan)
    origin = found.derivation.proof.origin
    proof, _ = trace(
        derived.program,
        derived.order,
        derived.groups,
        plan,
        origin,
        Recorder(without(spare)),
    )
    assert examine(proof, claims=found.derivation.claims)


def test_a_renamed_rule_changes_the_text() -> None:
    rules = known_rules()
    renamed = {**rules, "split-max": replace(rules["split-max"], why="another reason")}
    derivation = kernel("softmax").derivation
    assert "another reason" in plain(Outline(derivation.proof, renamed).blocks())
    assert "another reason" not in plain(Outline(derivation.proof, rules).blocks())


def test_a_changed_rule_refuses_the_derivation() -> None:
    """The checker reads rules from their text: the derivation is no instance of another text."""
    proof = kernel("softmax").derivation.proof
    rules = known_rules()
    wrong = replace(rules["split-max"], right="minimum(max[A](e), max[B](e))")  # type: ignore[call-arg]
    verdict = examine(proof, rules={**rules, "split-max": wrong})
    assert not verdict and "step 1 of update of max_c in kernel1" in verdict.why


def test_a_derivation_of_another_program_is_refused() -> None:
    derivation = kernel("softmax").derivation
    verdict = derivation.check("y[r,c] = x[r,c] / sum[c](x[r,c])")
    assert not verdict and "another program" in verdict.why
    with pytest.raises(eq.EqfuseError):
        derivation.check("y[r,c] = ")


def test_a_derivation_of_another_kernel_is_refused() -> None:
    softmax, other = kernel("softmax").derivation, kernel("variance").derivation
    verdict = replace(softmax, claims=other.claims).check()
    assert not verdict and "kernel" in verdict.why


def test_what_is_not_fused_has_its_chain_and_says_so() -> None:
    found = eq.compile(RECURRENCE, target="cpu", verify=False)
    derivation = found.derivation
    assert derivation.check()
    (group,) = derivation.proof.kernels[0].groups
    assert not group.is_fused and "tanh" in group.obstacles[0]
    assert "NOT FUSED" in found.explain()


def test_gaps_make_a_derivation_falsy() -> None:
    derivation = kernel("softmax").derivation
    gap = replace(derivation, proof=replace(derivation.proof, gaps=("update max_c: nothing connects it",)))
    assert (
        not gap.check()
        and gap.check().why == "the derivation: not derived: update max_c: nothing connects it"
    )


def test_every_rule_can_be_read_by_the_checker() -> None:
    for rule in known_rules().values():
        reading = read_rule(rule)
        assert (reading.sides is None) != (reading.fact is None)
        assert len(reading.when) == len(rule.when)


def test_a_normal_compile_records_nothing() -> None:
    assert not eq.compile("y[i] = sum[j](x[i,j])", target="cpu", verify=False).derived.derivations


def data(name: str = "softmax") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel(name).derivation.to_json())
    return found


MALFORMED: dict[str, tuple[Any, str]] = {
    "empty": ("", "not JSON"),
    "not an object": ([], "an object was expected"),
    "another format": ({"format": "x", "version": 2}, "this is the format 'x', not version 2"),
    "an older version": (data() | {"version": 1}, "this is version 1 of"),
    "a newer version": (data() | {"version": 3}, "not version 2"),
    "no outputs": ({k: v for k, v in data().items() if k != "outputs"}, "there is no 'outputs'"),
    "a term that is none": (
        data() | {"terms": [["Num", "1"]]},
        "terms[0]: a list of 3 was expected, not of 2",
    ),
    "a later term": (
        data() | {"terms": [["Neg", [], [0]]]},
        "terms[0].args[0]: 0 is none of the terms before it",
    ),
    "a later inference": (
        data() | {"inferences": [["split-max", {}, [{"chain": [[0, True, [], 0, 0]]}]]]},
        "inferences[0].premises[0].chain[0].inference: 0 is none of the inferences before it",
    ),
    "a strange condition": (
        data() | {"inferences": [["split-max", {}, [{"since": 1}]]]},
        "inferences[0].premises[0]: there is no 'fact'",
    ),
    "a position of text": (
        data() | {"outputs": [{"name": "y", "axes": [], "definition": 0, "steps": [[0, True, ["x"], 0, 0]]}]},
        "outputs[0].steps[0].position[0]: an integer was expected",
    ),
    "a direction that is none": (
        data() | {"outputs": [{"name": "y", "axes": [], "definition": 0, "steps": [[0, 1, [], 0, 0]]}]},
        "true or false",
    ),
    "a source of numbers": (
        data() | {"program": {"source": 1, "scalars": {}, "strict_casts": False}},
        "program.source: a text",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_text_is_refused_with_the_place(what: str) -> None:
    value, says = MALFORMED[what]
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(eq.EqfuseError, match="derivation") as error:
        eq.Derivation.from_json(text)
    assert says in str(error.value)


def test_a_source_that_is_no_program_is_refused() -> None:
    changed = data()
    changed["program"]["source"] = "y = "
    verdict = eq.Derivation.from_json(json.dumps(changed)).check()
    assert not verdict and "not a program" in verdict.why


def test_names_that_are_defined_by_each_other_are_refused() -> None:
    changed = data("causal_prefill")
    changed["terms"].append(["Leaf", ["x1"], []])
    for part in changed["kernels"]:
        part["leaves"] = {"x1": len(changed["terms"]) - 1, **part["leaves"]}
    changed["terms"].append(["Neg", [], [len(changed["terms"]) - 1]])
    changed["kernels"][0]["leaves"]["x1"] = len(changed["terms"]) - 1
    for output in changed["kernels"][0]["outputs"]:
        output["value"] = len(changed["terms"]) - 2
    verdict = eq.Derivation.from_json(json.dumps(changed)).check()
    assert not verdict and "defined by itself" in verdict.why


@pytest.mark.parametrize(("head", "text"), [("Leaf", "x["), ("Leaf", "a b"), ("Num", "one"), ("Exp", "")])
def test_names_that_are_none_are_refused(head: str, text: str) -> None:
    changed = data()
    for row in changed["terms"]:
        if row[0] == "Leaf":
            row[:2] = head, [text]
    with pytest.raises(eq.EqfuseError, match=r"the derivation is malformed: terms\[0\]: "):
        eq.Derivation.from_json(json.dumps(changed)).check()


def test_a_rule_of_ones_own_is_replayed_where_it_is_in_force() -> None:
    own = eq.rule("log-of-square", "log(sq(exp(a)))", "a + a", why="the logarithm of e^2a is 2 a")
    with eq.rules(own):
        found = eq.compile("y[i] = sum[j](log(sq(exp(x[i,j]))))", target="cpu", verify=False)
    assert "log-of-square" in found.derivation.rules
    assert found.derivation.check()
    assert "by log-of-square: the logarithm of e^2a is 2 a" in found.explain()
    again = eq.Derivation.from_json(found.derivation.to_json())
    assert "there is no rule 'log-of-square'" in again.check().why
    with eq.rules(own):
        assert again.check()


def test_a_reduction_with_a_state_is_combined_as_it_is_defined() -> None:
    found = eq.compile("a[i] = argmax[j](x[i,j])", target="cpu", verify=False)
    assert {"split-argmax.k", "split-argmax.v"} <= set(found.derivation.rules)
    assert found.derivation.check()
    assert "argmax of a disjoint union: the state that comes first, by v, -k" in found.explain()
    found = eq.compile("a[i], b[i] = mean_var[j](x[i,j])", target="cpu", verify=False)
    assert found.derivation.check()
    assert "by definition: the combination written out" in found.explain()


@pytest.mark.parametrize(
    "source",
    [
        "x: f32[j]\nr: f32\na = all[j](r < 0.5)\nb[j] = x[j]",
        "x: f32[j]\na[k] = any[j]((-1.5 < 0.5) & (k < 2) | ~(k*2 == -3))\nb[j,k] = x[j]",
        "c: f32[k]\na[k] = where(max[j](c[k]) < 0.5, c[k], -inf)\nb[j] = j",
        "x: f32[j]\na[k,j] = max[l](f16(0.5)) < max(x[j], 1) / 2\nb[l,k] = l + k",
    ],
)
def test_predicates_and_numbers_that_reductions_leave(source: str) -> None:
    """What is left of `any[j](p)` where p does not vary along j has no reduction in it."""
    verdict = eq.compile(source, verify=False).derivation.check(source)
    assert verdict, verdict.why


def test_numpy_scalars_become_numbers() -> None:
    found = eq.compile(
        "y[i] = sum[j](x[i,j] * c)", scalars={"c": np.float32(0.5)}, target="cpu", verify=False
    )
    assert json.loads(found.derivation.to_json())["program"]["scalars"] == {"c": 0.5}
    assert eq.Derivation.from_json(found.derivation.to_json()).check()


def test_groups_are_walked_each_in_its_way() -> None:
    """What is fused is walked with a state although another group of its kernel is not fused."""
    source = (
        "a[i] = sum[j](x[i,j])\nb[i] = sum[j](tanh(x[i,j] - a[i]))\nc[i] = sum[k](b[i] * y[k])\nreturn b, c"
    )
    x, y = np.zeros((2, 9), np.float32), np.zeros(5000, np.float32)
    found = eq.compile(source, target="cpu", verify=False)
    found(x=x, y=y)
    verdict = found.derivation.check()
    assert verdict, verdict.why


def test_proofs_rest_on_earlier_instances_alone() -> None:
    proof = kernel("causal_prefill").derivation.proof
    order = {i: n for n, i in enumerate(inferences(*(chain for _, chain in proof.chains())))}
    assert all(order[below] < order[above] for above in order for below in rests_on(above))


def test_the_benchmark_takes_every_rule_away(tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    assert bench("explain", Options(only="gated_mlp"), output=path, console=Console(file=io.StringIO())) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["checked"] and row["steps"] == kernel("gated_mlp").derivation.steps
    assert row["refused"] == row["rules"] == row["another_way"] + row["no_way"] > 0


def long_mask(output: str, terms: int) -> str:
    mask = " | ".join(f"(j == {k})" if k % 2 else f"(j + i == {k})" for k in range(terms))
    return f"{output}[i] = sum[j](where({mask}, {output}x[i,j], 0))"


def test_programs_near_the_budget_are_explained() -> None:
    """What is recorded beside the terms counts in no budget."""
    found = eq.compile(long_mask("a", 80), target="cpu", verify=False)
    assert found.derived.unfinished == "" and found.derivation.proof.gaps == ()
    assert found.derivation.check(found.program.source) and found.explain()


def test_outputs_with_e_graphs_of_their_own_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output's steps are read off the e-graph that it came from; one that has none stays as it is."""
    source = f"{long_mask('a', 30)}\n{long_mask('b', 2)}\n{long_mask('c', 3)}"
    monkeypatch.setattr(saturate, "MAX_TERMS", 70)
    found = eq.compile(source, target="cpu", verify=False)
    assert "more than 70" in found.derived.unfinished
    derivation = found.derivation
    assert derivation.proof.gaps == () and derivation.check(source)
    assert set(derivation.classes) >= {"whole axes of b", "whole axes of c"}


@pytest.mark.parametrize("divided", ["exp(L[i,v] - lse[i])", "sq(L[i,v])"])
@pytest.mark.parametrize("by", ["N(i)", "N(v)", "(N(i) * N(d))"])
def test_what_divides_by_a_number_of_positions_is_derived(divided: str, by: str) -> None:
    """N(v) is a sum of ones where it divides a sum over v alone: that of another axis is a number."""
    kernel = eq.compile(
        f"L[i,v] = sum[d](x[i,d] * W[v,d])\nP[i,v] = {divided} / {by}{' - lse[i]' * ('lse' not in divided)}\n"
        "dx[i,d] = sum[v](P[i,v] * W[v,d])",
        verify=False,
    )
    assert kernel.derivation.check().ok
