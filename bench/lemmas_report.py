"""`eqfuse bench lemmas`: which of the shipped rules an SMT solver proves of real numbers, for axes of any size.

Each rule becomes lemmas in SMT-LIB (`bench.lemmas`), written to a folder beside the results, which z3 is given. A rule is
`proved` where every one of its lemmas is; `not proved` where the solver finds a case that the lemma does not exclude, or
gives up; `no lemma` where it is about what a value depends on, or speaks of what no real number is. Field trials and
floats try all of them (docs/verification.md).
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.lemmas import NoLemma, lemmas, proved, split_lemma
from bench.report import Column, Options, Report
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.rule import Rule

FOLDER = Path("bench/results/lemmas")
EXPECTED: dict[str, str] = {
    "vanishes-add-scalar": "k < 0 makes n + k 0 for one value of n: the rule says so",
}
"""Rules that are not proved, and why."""

TITLE = "Shipped rules as lemmas for an SMT solver"
COLUMNS = (
    Column("rule", lambda row: str(row["rule"])),
    Column("verdict", lambda row: str(row["verdict"])),
    Column("lemmas", lambda row: str(row["lemmas"])),
    Column("ms", lambda row: f"{row['ms']:.0f}"),
    Column("why", lambda row: str(row["why"])),
)


def run(options: Options, report: Report) -> None:
    """Failures: a rule that is not proved, though it has lemmas, without a reason that is known."""
    for lemma in split_lemma():
        if proved(lemma) is not True:
            report.failures.append(f"reductions may be split: {lemma.step} is not proved")
    rules = list(dict.fromkeys(rule for ruleset in EVERY for rule in ruleset.rules))
    report.rows = [judge(rule) for rule in rules]
    counts = Counter(row["verdict"] for row in report.rows)
    report.summary.append(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for why, count in Counter(
        row["why"] for row in report.rows if row["verdict"] == "no lemma"
    ).most_common():
        report.summary.append(f"no lemma, {count}: {why}")
    for row in report.rows:
        if row["verdict"] == "not proved" and row["rule"] not in EXPECTED:
            report.failures.append(f"{row['rule']}: {row['why']}")


def judge(rule: Rule, folder: Path | None = FOLDER) -> dict[str, Any]:
    """The verdict about a rule; its lemmas are written to the folder."""
    started = time.perf_counter()
    try:
        made = lemmas(rule)
    except NoLemma as why:
        return {"rule": rule.name, "verdict": "no lemma", "lemmas": 0, "ms": 0.0, "why": str(why)}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rule.name}.smt2").write_text("(reset)\n".join(map(str, made)), encoding="utf-8")
    left = [lemma for lemma in made if proved(lemma) is not True]
    return {
        "rule": rule.name,
        "verdict": "not proved" if left else "proved",
        "lemmas": len(made),
        "ms": 1000 * (time.perf_counter() - started),
        "why": EXPECTED.get(rule.name, f"left: {left[0].step}") if left else "",
    }
