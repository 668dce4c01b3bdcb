"""`eqfuse bench audit`: what an audit of proofs once found, each example and what is said of it now.

Rules and reductions that hold at small magnitudes and lengths alone, and programs that differ at one size, integer, branch or
magnitude, are refused with a counterexample; equal programs are accepted; legal programs compile; derivations that were
edited by hand are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import eqfuse as eq
from bench.report import Column, Options, Report
from eqfuse.errors import EqfuseError

TITLE = "An audit's examples"
COLUMNS = (
    Column("finding", lambda row: str(row["finding"])),
    Column("example", lambda row: _literal(row["example"])),
    Column("now", lambda row: str(row["now"])),
    Column("shown by", lambda row: _literal(row["why"])),
)
WIDEST = 90
"""Letters of a cell."""

Verdict = tuple[str, str]
"""refused, accepted or undecided; and what shows it."""


@dataclass(frozen=True)
class Example:
    """One example: what should be said of it, and how to ask."""

    finding: str
    example: str
    expected: str
    ask: Callable[[], Verdict]


RULES: Mapping[str, tuple[str, str, str]] = {
    "clamp10": ("min(a, 10)", "a", ""),
    "seven": ("sum[j](c)", "7 * c", "fixed(c, j)"),
    "nothing": ("relu(a - 20)", "0 * a", ""),
    "max500": ("max[j](min(a, 500))", "max[j](a)", ""),
    "explog": ("exp(log(a))", "a", ""),
    "roots": ("sqrt(a) * sqrt(a)", "a", ""),
    "ratio": ("a / a", "1", ""),
    "nearly": ("a * 1.0000000001", "a", ""),
}
REDUCTIONS: Mapping[str, Mapping[str, str]] = {
    "halved beyond 40": {
        "state": "s, n",
        "lift": "x, 1",
        "identity": "0, 0",
        "combine": "where(n1 + n2 > 40, (s1 + s2) / 2, s1 + s2), n1 + n2",
    },
    "identity 30 for min": {"identity": "30", "combine": "min(s1, s2)"},
    "min(s1 + s2, 1000)": {"identity": "0", "combine": "min(s1 + s2, 1000)"},
    "1 more beyond 100": {"identity": "0", "combine": "s1 + s2 + where(abs(s1) > 100, 1, 0)"},
    "identity -50 for max": {"identity": "-50", "combine": "max(s1, s2)"},
    "resets at 8": {"lift": "1 + 0 * x", "identity": "0", "combine": "where(s1 + s2 > 8, 0, s1 + s2)"},
}
ATTENTION = (
    "s[i,j] = sum[d](q[i,d] * k[j,d]) / sqrt({})\n"
    "o[i,e] = sum[j](exp(s[i,j] - max[j](s[i,j])) * v[j,e]) / sum[j](exp(s[i,j] - max[j](s[i,j])))"
)
DIFFERENT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "B1": (
        ("sum[j](x[i,j]) / N(j)", "sum[j](x[i,j]) / 7"),
        ("sum[j](x[i,j]) * N(i)", "sum[j](x[i,j]) * 3"),
        ("sum[j](x[i,j]) + x[i,N(j)-1]", "sum[j](x[i,j]) + x[i,6]"),
        (ATTENTION.format("N(d)"), ATTENTION.format("11")),
    ),
    "B2": (
        ("K[i//g]", "K[i//2]"),
        ("where(i < n, n * x[i], 0)", "where(i < n, 2 * x[i], 0)"),
        ("where(n > 5, 0, x[i])", "x[i]"),
    ),
    "B3": (
        ("where(N(j) > 100, 0, 1) * sum[j](x[i,j])", "sum[j](x[i,j])"),
        ("sum[j](where(j + g > 100, 0, x[i,j]))", "sum[j](x[i,j])"),
        ("sum[j](relu(j - 100) * x[i,j])", "sum[j](0 * x[i,j])"),
        ("sum[j](sign(j - 100) * x[i,j])", "sum[j](-1 * x[i,j])"),
        ("sum[j](floor(j / 100) * x[i,j])", "sum[j](0 * x[i,j])"),
        ("n: i32[i]\ny[i] = n[i] % 300", "n: i32[i]\ny[i] = n[i]"),
        ("n: i32[i]\ny[i] = n[i] * (n[i] - 1) * (n[i] - 2)", "n: i32[i]\ny[i] = 0 * n[i]"),
    ),
    "B4": (
        ("min(x[i], 100)", "x[i]"),
        ("where(x[i] > 0.1, x[i], 0)", "where(x[i] > 0, x[i], 0)"),
        ("where(abs(x[i]) < 0.15, 0, x[i])", "x[i]"),
        ("where(x[i] == 3, 1, 0)", "0 * x[i]"),
        ("where(x[i] >= c, 1, 0)", "where(x[i] > c, 1, 0)"),
        ("argmax[j](min(x[i,j], 5))", "argmax[j](x[i,j])"),
    ),
    "B5": (
        ("exp(log(x[i]))", "x[i]"),
        ("x[i]", "exp(log(x[i]))"),
        ("x[i] / z[i] * z[i]", "x[i] + 0 * z[i]"),
        ("x[i] + 0 * z[i]", "x[i] / z[i] * z[i]"),
        ("x[i] + 0 * log(z[i])", "x[i] + 0 * z[i]"),
        ("x[i] + 0 * z[i]", "x[i] + 0 * log(z[i])"),
    ),
    "B6": (("x[i] + 1932740039 * (966370019 * z[i])", "x[i] + 0 * z[i]"),),
    "B7": (("round(f16(x[i]))", "round(x[i])"), ("argmax[j](f16(x[i,j]))", "argmax[j](x[i,j])")),
}
EQUAL = (
    ("sqrt(sq(x[i] + z[i]))", "abs(x[i] + z[i])"),
    ("exp(sqrt(x[i] * x[i]))", "exp(abs(x[i]))"),
    ("floor(floor(x[i]))", "floor(x[i])"),
    ("max[j](floor(x[i,j]))", "floor(max[j](x[i,j]))"),
    ("x[i]**0", "1 + 0 * x[i]"),
    ("sin(x[i] + z[i])", "sin(x[i]) * cos(z[i]) + cos(x[i]) * sin(z[i])"),
)
MASKED = (
    "s[i,j] = where({}, sum[d](q[i,d] * k[j,d]), -inf)\n"
    "o[i,e] = sum[j](exp(s[i,j] - max[j](s[i,j])) * v[j,e]) / sum[j](exp(s[i,j] - max[j](s[i,j])))"
)
LEGAL = (
    *(MASKED.format(mask) for mask in ("j > i + 290", "(j >= 100) & (j < 103)", "j > 1000")),
    "y[i,j] = exp(x[i,j] / 0.001) / sum[j](exp(x[i,j] / 0.001))",
)
SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"


def examples() -> Iterator[Example]:
    """All of them, in the order of the audit."""
    for name, (left, right, when) in RULES.items():
        yield Example("A1", f"rule {left} -> {right}", "refused", partial(_rule, name, left, right, when))
    for what, words in REDUCTIONS.items():
        yield Example("A2", f"reduction {what}", "refused", partial(_reduction, words))
    for finding, pairs in DIFFERENT.items():
        for left, right in pairs:
            yield Example(finding, _both(left, right), "refused", partial(_pair, left, right))
    for left, right in EQUAL:
        yield Example("B, equal", _both(left, right), "accepted", partial(_pair, left, right))
    for source in LEGAL:
        yield Example("B, legal", source.partition("\n")[0], "accepted", partial(_compiled, source))
    for finding, what, tamper in TAMPERINGS:
        yield Example(finding, what, "refused", partial(_tampered, tamper))


def run(options: Options, report: Report) -> None:
    """Failures: an example of which anything else is said than should be."""
    for each in examples():
        now, why = each.ask()
        report.add({"finding": each.finding, "example": _short(each.example), "now": now, "why": _short(why)})
        if now != each.expected:
            report.failures.append(f"{each.finding}, {each.example}: {now}, {why}")
    said = [row["now"] for row in report.rows]
    report.summary.append(
        f"{said.count('refused')} refused, {said.count('accepted')} accepted, {len(said)} in all"
    )


def _literal(text: str) -> str:
    """A cell in which brackets are no markup."""
    return text.replace("[", r"\[")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDEST else line[: WIDEST - 3] + "..."


def _both(left: str, right: str) -> str:
    last = (text.splitlines()[0 if "sqrt(" in text and "\n" in text else -1] for text in (left, right))
    return " ~ ".join(last)


def _rule(name: str, left: str, right: str, when: str) -> Verdict:
    return _made(lambda: eq.rule(name, left, right, when=when))


def _reduction(words: Mapping[str, str]) -> Verdict:
    made: dict[str, Any] = {"state": "s", "lift": "x", "result": "s", **words}
    return _made(lambda: eq.reduction("audited", **made))


def _made(make: Callable[[], object]) -> Verdict:
    try:
        make()
    except EqfuseError as error:
        return "refused", str(error)
    return "accepted", ""


def _pair(left: str, right: str) -> Verdict:
    texts = [text if "\n" in text else f"y[i] = {text}" for text in (left, right)]
    certificate = eq.equivalent(texts[0], texts[1])
    if certificate.ok:
        return "accepted", f"{len(certificate.searched)} sizes, bound {certificate.bound:.0e}"
    shown = str(certificate.counterexample or certificate.reason).partition("\n")[0]
    return "refused", shown


def _compiled(source: str) -> Verdict:
    try:
        certificate = eq.compile(source, target="cpu", verify="again").certificate
    except EqfuseError as error:
        return "refused", str(error)
    near = f", {certificate.shrunk}" if certificate.shrunk else ""
    return "accepted", f"bound {certificate.bound:.0e}{near}"


# -- derivations that were edited ------------------------------------------------------------------

Data = dict[str, Any]
Edits = Callable[[Data], Iterator[Data | str]]
"""A derivation, edited at every place that there is, as data or as text."""


def _states(data: Data) -> list[Data]:
    return [state for kernel in data["kernels"] for group in kernel["groups"] for state in group["states"]]


def _guarded(head: str, kind: str) -> Edits:
    """A copy for each state whose whole next value has a guard around it."""

    def edited(data: Data) -> Iterator[Data | str]:
        for place, state in enumerate(_states(data)):
            if state[kind] is not None:
                copy = json.loads(json.dumps(data))
                merged = _states(copy)[place][kind]
                copy["terms"].append([head, [], [merged["value"]]])
                merged["value"] = len(copy["terms"]) - 1
                yield copy

    return edited


def _unfinished(data: Data) -> Iterator[Data | str]:
    for place, state in enumerate(_states(data)):
        if state["finish"] is not None:
            copy = json.loads(json.dumps(data))
            _states(copy)[place]["finish"] = None
            yield copy


def _edited(change: Callable[[Data], object]) -> Edits:
    def edited(data: Data) -> Iterator[Data | str]:
        copy = json.loads(json.dumps(data))
        change(copy)
        yield copy

    return edited


def _without_words(data: Data) -> None:
    row = next(row for row in data["terms"] if row[1])
    row[1] = [""] * len(row[1])


def _of_many_digits(data: Data) -> Iterator[Data | str]:
    yield json.dumps(data).replace('"version": 2', '"version": ' + "9" * 6000)


TAMPERINGS: tuple[tuple[str, str, Edits], ...] = (
    ("C1", "a guard around every update, Finite", _guarded("Finite", "update")),
    ("C1", "a guard around every update, Invertible", _guarded("Invertible", "update")),
    ("C1", "a guard around every combine, Finite", _guarded("Finite", "combine")),
    ("C1", "a guard around every combine, Invertible", _guarded("Invertible", "combine")),
    ("C2", "a state without its final value", _unfinished),
    ("C3", "other axes of an output", _edited(lambda d: d["kernels"][0]["outputs"][0]["axes"].reverse())),
    ("C3", "casts that are strict", _edited(lambda d: d["program"].update(strict_casts=True))),
    ("C3", "an output that is auxiliary", _edited(lambda d: _states(d)[0].update(auxiliary=True))),
    ("C3", "a key that is unknown", _edited(lambda d: d.update(more=1))),
    ("C4", "a term with empty words", _edited(_without_words)),
    ("C4", "an integer of 6000 digits", _of_many_digits),
)


def _tampered(tamper: Edits) -> Verdict:
    """Whether each edit is refused, by an error of eqfuse or by the checker."""
    text = eq.compile(SOFTMAX, target="cpu", verify=False).derivation.to_json()
    tried, why = 0, ""
    for edited in tamper(json.loads(text)):
        tried += 1
        try:
            verdict = eq.Derivation.from_json(
                edited if isinstance(edited, str) else json.dumps(edited)
            ).check()
        except EqfuseError as error:
            why = str(error)
            continue
        if verdict:
            return "accepted", ""
        why = verdict.why
    return ("refused", f"{tried} of {tried}: {why}") if tried else ("undecided", "nothing to edit")
