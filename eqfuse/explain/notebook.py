"""Kernels, plans and derivations as HTML, for notebooks: what `repr` says and a page would, in one cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from eqfuse.explain.why import duration, predicted_for
from eqfuse.loops.plan import Plan
from eqfuse.proof.derivation import Derivation

if TYPE_CHECKING:
    from eqfuse.kernel import Kernel


def kernel_html(kernel: Kernel) -> str:
    """What a kernel computes, in which way and how surely, and behind headings its merge and its loop nest."""
    program, plan = kernel.derived.program, kernel.plan
    rows = [("program", _code(program.source.strip())), ("schedule", escape(plan.schedule))]
    if plan.cost is not None:
        rows.append(("predicted", f"{escape(duration(plan.cost.seconds))}; {escape(predicted_for(kernel))}"))
    if kernel.certified is not None:
        verdict = str(kernel.certified).splitlines()[0]
        rows.append(("certificate", escape(verdict)))
    body = "".join(f"<tr><th>{name}</th><td style='text-align:left'>{cell}</td></tr>" for name, cell in rows)
    folded = _folded("merge", str(kernel.merge)) + _folded("loops", kernel.loops)
    return f"<div><b>{escape(kernel.name)}</b><table>{body}</table>{folded}</div>"


def plans_html(plans: Sequence[Plan]) -> str:
    """A table of candidates: the terms of their predicted costs, in columns."""
    costs = [plan.cost for plan in plans if plan.cost is not None]
    names = dict.fromkeys(t.name for cost in costs for t in cost.terms if math.isfinite(t.seconds))
    heads = ("schedule", "shards", "kernels", "predicted", "measured", *names, "note")
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for plan in plans:
        parts = {term.name: term.seconds for term in (plan.cost.terms if plan.cost else ())}
        total = plan.cost.seconds if plan.cost else math.inf
        cells = [
            plan.schedule,
            str(plan.shards),
            str(len(plan.kernels)),
            duration(total) if math.isfinite(total) else "",
            duration(plan.measured) if plan.measured is not None else "",
            *(duration(parts[name]) if name in parts else "" for name in names),
            plan.reason,
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    at = next((plan.at_sizes for plan in plans if plan.sizes), "")
    caption = f"<caption>predicted{escape(at)}</caption>" if at else ""
    return f"<table>{caption}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def derivation_html(derivation: Derivation) -> str:
    """Whether the derivation holds, and behind a heading its steps."""
    from eqfuse.explain import text
    from eqfuse.explain.explanation import derivation_blocks  # which reads kernels

    verdict = derivation.check()
    said = f"derivation: {verdict.why}" if verdict else f"derivation REFUSED: {verdict.why}"
    steps = text.plain(derivation_blocks(derivation, "short"))
    return f"<div><b>{escape(said)}</b>{_folded('steps', steps)}</div>"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{_code(text)}</details>"


def _code(text: str) -> str:
    return f"<pre style='text-align:left'>{escape(text)}</pre>"
