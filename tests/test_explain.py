"""Printed forms of derivations: text, LaTeX, JSON; why not, and why this plan."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import Golden
from rich.console import Console

import eqfuse as eq
from eqfuse.cli import main
from eqfuse.explain.explanation import coloured
from eqfuse.explain.latex import document
from eqfuse.explain.why import divisions, plan_lines, worst_term
from eqfuse.kernel import Kernel
from eqfuse.loops.plan import Cost, Plan
from eqfuse.loops.plan import Term as CostTerm
from eqfuse.proof.notation import BEGIN, END, Notation
from eqfuse.proof.outline import Code, Prose, abbreviations
from eqfuse.proof.syntax import number, term

ATTENTION = """Q: f16[b,h,i,d]
K: f16[b,h,j,d]
V: f16[b,h,j,e]
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
return O"""

SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"

MEDIAN = """x: f32[i,j]
k: axis[j]
r[i,j] = sum[k](where(x[i,k] < x[i,j], 1, 0))
m[i] = min[j](where(2 * r[i,j] >= N(j) - 1, x[i,j], inf))
return m"""

UNFUSED = {
    "tanh": (
        "x: f32[i,j]\na[i] = sum[j](x[i,j])\nb[i] = sum[j](tanh(x[i,j] - a[i]))\nreturn b",
        "tanh(x[i, j] - sum_j)",
        "    b[i] = sum[j](tanh(x[i,j] - a[i]))\n                  ^^^^^",
        "nearest rule: rescale:",
    ),
    "sign": (
        "x: f32[i,j]\ny: f32[i,j]\na[i] = sum[j](y[i,j])\nm[i] = max[j](x[i,j] * a[i])\nreturn m",
        "x[i, j] * sum_j",
        "    m[i] = max[j](x[i,j] * a[i])\n           ^^^^^^",
        "it needs sum_j_new >= 0, which nothing proves",
    ),
    "median": (
        MEDIAN,
        "no state smaller than the row holds them",
        "    r[i,j] = sum[k](where(x[i,k] < x[i,j], 1, 0))\n             ^^^^^^",
        "nearest rule: interchange-plain",
    ),
}
"""A program, what is in the way, its place, and the rule that would have helped."""


@cache
def kernel(source: str, prefer: str | None = None) -> Kernel:
    return eq.compile(source, target="cpu", verify=False, prefer=prefer)


# -- text ------------------------------------------------------------------------------------------


def test_attention_fits_on_two_screens() -> None:
    lines = kernel(ATTENTION, "rolling").explain().splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100


def test_the_text_has_every_part() -> None:
    text = kernel(ATTENTION, "rolling").explain()
    for part in (
        "O[b,h,i,e] as it is written",
        "let t1 = where(j <= i, sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale, -inf)",
        "by hoist-factor: sum of c m = c sum of m",
        "rolling: one loop, whose states the merge repairs at every tile",
        "= exp(max_j - max_j_new) * sum_j + sum[j in B](exp(t1 - max_j_new) * V[b,h,j,e])",
        "by guards: ",
        "each replayed without the e-graph",
        "<- chosen",
    ):
        assert part in text, part
    assert text.count("let t1 =") == 1


def test_steps_of_the_short_form(golden: Golden) -> None:
    golden("explain_softmax", kernel(SOFTMAX, "rolling").explain().partition("\n\nwhy ")[0])


def test_the_full_form_has_every_step_and_why_conditions_hold() -> None:
    found = kernel(SOFTMAX, "rolling")
    short, full = found.explain(), found.explain(detail="full")
    assert len(full) > len(short)
    assert sum(line.lstrip().startswith("by ") for line in full.splitlines()) > found.derivation.steps
    assert "does not vary with j: fixed-" in full
    assert ": given" in full


def test_split_k_shows_how_parts_are_combined() -> None:
    text = kernel(SOFTMAX, "split_k").explain()
    assert "= exp(finite(max_j_a) - finite(max_j_new)) * sum_j_a + sum[j in B]" in text
    assert "split_k: such a loop for each shard" in text


def test_text_is_the_same_each_time() -> None:
    again = eq.compile(SOFTMAX, target="cpu", verify=False, prefer="rolling")
    assert again.explain() == kernel(SOFTMAX, "rolling").explain()
    assert again.derivation.to_json() == kernel(SOFTMAX, "rolling").derivation.to_json()


def test_a_program_without_reductions() -> None:
    found = kernel("y[i] = x[i] * 2")
    assert found.derivation.check()
    assert "y[i] = x[i] * 2" in found.explain()


@pytest.mark.parametrize("asked", [{"format": "pdf"}, {"detail": "long"}])
def test_unknown_forms_are_refused(asked: dict[str, str]) -> None:
    with pytest.raises(eq.EqfuseError, match="unknown"):
        kernel(SOFTMAX).explain(**asked)


def test_colour_marks_what_changed() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120, color_system="standard")
    console.print(coloured(kernel(SOFTMAX, "rolling").report, kernel(SOFTMAX, "rolling").derivation, "short"))
    assert "\x1b[1;33mmax(max_j, max[j in B](x[i,j]))\x1b[0m" in shown.getvalue()
    assert BEGIN not in shown.getvalue() and END not in shown.getvalue()


# -- notation --------------------------------------------------------------------------------------

A, B = term("Leaf", ("a",)), term("Leaf", ("b + c",))


def test_notation_has_the_parentheses_that_it_needs() -> None:
    total = term("Add", (), (A, term("Neg", (), (B,))))
    assert Notation().show(total) == "a - (b + c)"
    assert (
        Notation().show(term("Mul", (), (total, term("Inv", (), (total,)))))
        == "(a - (b + c)) / (a - (b + c))"
    )
    assert Notation({total: "t1"}).show(term("Exp", (), (total,))) == "exp(t1)"


def test_notation_marks_a_position() -> None:
    total = term("Add", (), (A, term("Neg", (), (B,))))
    assert Notation().show(total, (0,)) == f"{BEGIN}a{END} - (b + c)"
    assert Notation().show(total, (1, 0)) == f"a - ({BEGIN}b + c{END})"
    assert Notation().show(total, ()) == f"{BEGIN}a - (b + c){END}"


def test_long_repeated_terms_get_one_name() -> None:
    long = term("Exp", (), (term("Leaf", ("some_tensor[i, j, k]",)),))
    root = term("Add", (), (long, term("Mul", (), (long, term("Sq", (), (long,))))))
    assert abbreviations([root]) == {long: "t1"}
    assert abbreviations([term("Add", (), (A, number("1")))]) == {}


# -- LaTeX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [ATTENTION, SOFTMAX, UNFUSED["sign"][0]])
def test_latex_is_a_document_with_balanced_groups(source: str) -> None:
    text = kernel(source).explain("latex", "full")
    assert text.startswith(r"\documentclass") and text.endswith(r"\end{document}")
    outside = re.sub(r"\\begin\{verbatim\}.*?\\end\{verbatim\}", "", text, flags=re.DOTALL)
    depth = 0
    for character in re.findall(r"(?<!\\)[{}]", outside):
        depth += 1 if character == "{" else -1
        assert depth >= 0
    assert depth == 0
    for opening, closing in ((r"\left", r"\right"), (r"\begin{", r"\end{")):
        assert outside.count(opening) - outside.count(r"\leftarrow") == outside.count(closing)
    formulas = "".join(re.findall(r"\\begin\{align\*\}(.*?)\\end\{align\*\}", outside, re.DOTALL))
    assert not re.search(r"(?<!\\)[#%]", formulas)
    assert BEGIN not in text and END not in text


def test_latex_formulas() -> None:
    text = kernel(ATTENTION, "rolling").explain("latex")
    assert r"\underline{e^{\mathrm{max}_{j} - \mathrm{max}_{j}'}} \cdot \mathrm{sum}_{j}" in text
    assert r"O_{b,h,i,e} &= \frac{\mathrm{sum}_{j}}{\mathrm{sum}_{j2}}" in text
    assert r"\text{by split-max}" in text


# -- why not, and why this -------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNFUSED)
def test_why_not_has_the_factor_its_place_and_the_nearest_rule(name: str) -> None:
    source, factor, place, rule = UNFUSED[name]
    (text,) = kernel(source).why_not()
    for part in ("is not fused: in ", factor, place, rule):
        assert part in text, text
    explained = kernel(source).explain()
    assert "\nwhy not\n" in explained and all(line in explained for line in text.splitlines())


def test_why_not_says_where_no_rule_repairs_a_reduction() -> None:
    source = "x: f32[i,j]\na[i] = sum[j](x[i,j])\nb[i] = prod[j](sin(x[i,j] + a[i]))\nreturn b"
    (text,) = kernel(source).why_not()
    assert "    b[i] = prod[j](sin(x[i,j] + a[i]))\n                   ^^^^" in text
    assert text.endswith("no rule repairs a prod over j once what it reads has changed")


def test_why_not_says_that_a_merge_would_lose_infinities() -> None:
    source = "y[i] = sum[j](u[i,j] * (x[i,j] - max[j](x[i,j])))"
    (text,) = kernel(source).why_not()
    assert "no repair of the sum over j restores it where a value or max_j is infinite (line 1)" in text
    assert text.endswith("a merge was derived, and refused: what is infinite or NaN would come out wrong")


def test_why_not_with_a_factor_that_another_pass_made() -> None:
    source = "a[i] = sum[d](u[i,d])\nm[i] = max[j](x[i,j])\ny[i] = max[j](round(x[i,j] - m[i]) * sqrt(a[i]))"
    (text,) = kernel(source).why_not()
    assert "in round(x[i, j] - max_j), no rule separates what varies along j from the value of max_j" in text


def test_why_not_says_that_what_a_number_masks_is_visited() -> None:
    """Shards, and masks of data: elsewhere the maxima of rows tell what vanishes."""
    masked = ATTENTION.replace("-inf", "-1e30")
    assert kernel(masked).why_not() == ()
    (text,) = kernel(masked, prefer="split_k").why_not()
    assert text.startswith(
        "positions of j that a mask sets to -1e30 are visited: no part of the axis has its maximum (line "
    )
    assert "^^^^^\nwrite -inf where they are left out" in text


def test_why_not_is_empty_where_all_is_fused() -> None:
    assert kernel(ATTENTION).why_not() == ()


def test_why_not_says_what_costs_divide_among_kernels() -> None:
    """Both sums are fused: computing the first again in every block costs more than storing it."""
    source = "h[t,f] = silu(sum[c](x[t,c] * G[f,c]))\ny[t,o] = sum[f](h[t,f] * D[o,f])\nreturn y"
    halves = "x: bf16[t,c]\nG: bf16[f,c]\nD: bf16[o,f]\n"
    found = eq.compile(halves + source, target="sm_90", verify=False)
    assert len(found.plan.kernels) == 2
    (text,) = found.why_not()
    assert text.startswith(
        "silu(sum[c](x[t, c] * G[f, c])) is not in the kernel that reads it: kernel1 stores it, as"
    )
    assert "as stored2[t, f], for kernel2 (line 4)\n    h[t,f] = silu(sum[c](x[t,c] * G[f,c]))\n" in text
    one = min((p for p in found.plans() if len(p.kernels) == 1 and p.cost), key=lambda p: p.cost.seconds)  # type: ignore[union-attr]
    (said,) = plan_lines([one], found.plan)
    assert text.endswith(f"the cheapest plan of fewer kernels: {said}")
    assert "\nwhy not\n" in found.explain() and "kernel1 stores it" in found.explain()


def test_what_is_asked_for_as_one_kernel_is_not_divided() -> None:
    source = "h[t,f] = silu(sum[c](x[t,c] * G[f,c]))\ny[t,o] = sum[f](h[t,f] * D[o,f])\nreturn y"
    kernels = eq.compile(source, target="sm_90", verify=False)
    (one, *_) = [plan for plan in kernels.plans() if len(plan.kernels) == 1]
    assert list(divisions(kernels.program, one, kernels.plans())) == []


def test_plans_say_by_how_much_and_on_which_term() -> None:
    chosen = Plan("rolling", (), Cost((CostTerm("bytes", 1e-6), CostTerm("launch", 2e-6))))
    other = Plan("split_k", (), Cost((CostTerm("bytes", 1e-6), CostTerm("launch", 5e-6))), shards=4)
    unfit = Plan(
        "resident", (), Cost((CostTerm("does not fit", float("inf")),)), reason="kernel1 needs 300 KB"
    )
    assert worst_term(other, chosen) == ("launch", pytest.approx(3e-6))
    lines = list(plan_lines([chosen, other, unfit], chosen))
    assert lines[0].endswith("3 us   <- chosen")
    assert lines[1] == "split_k in 4 shards, 0 kernel: 6 us, 2.00 x: +3 us, most of it launch (+3 us)"
    assert lines[2].endswith("does not fit: kernel1 needs 300 KB")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "softmax.txt"
    program.write_text(SOFTMAX)
    assert main(["explain", str(program)]) == 0
    printed = capsys.readouterr().out
    assert "by split-max: a maximum over a disjoint union" in printed
    target = tmp_path / "derivation.json"
    assert main(["explain", str(program), "--format", "json", "--output", str(target)]) == 0
    assert eq.Derivation.from_json(target.read_text()).check(SOFTMAX)
    assert main(["explain", str(program), "--format", "pdf"]) == 2
    assert "unknown format 'pdf'" in capsys.readouterr().err


def test_latex_ends_where_it_ends_whatever_a_reason_says() -> None:
    blocks = [Prose(r"100% of $x_1$ \end{document}"), Code(r"a reason \end{verbatim} \input{secrets}")]
    text = document(blocks)
    assert text.count(r"\end{verbatim}") == text.count(r"\end{document}") == 1
    assert r"100\% of \$x\_1\$ \textbackslash{}end\{document\}" in text
