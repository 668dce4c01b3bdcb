"""A kernel as HTML, for notebooks: what `repr` says and a page would, in one cell."""

from __future__ import annotations

from html import escape

from eqfuse.explain.report import Report
from eqfuse.explain.why import predicted_for
from eqfuse.html import folded, listing
from eqfuse.units import duration
from eqfuse.verify.certificate import Certificate


def kernel_html(report: Report, merge: str, loops: str, certificate: Certificate | None) -> str:
    """What a kernel computes, in which way and how surely, and behind headings its merge and its loop nest."""
    plan = report.plan
    rows = [("program", listing(report.program.source.strip())), ("schedule", escape(plan.schedule))]
    if plan.cost is not None:
        rows.append(("predicted", f"{escape(duration(plan.cost.seconds))}; {escape(predicted_for(report))}"))
    if certificate is not None:
        rows.append(("certificate", escape(str(certificate).splitlines()[0])))
    body = "".join(f"<tr><th>{name}</th><td style='text-align:left'>{cell}</td></tr>" for name, cell in rows)
    shown = folded("merge", merge) + folded("loops", loops)
    return f"<div><b>{escape(report.name)}</b><table>{body}</table>{shown}</div>"
