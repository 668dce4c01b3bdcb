"""The explanation of a kernel in every form: derivation, obstacles, plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from rich.text import Text

from eqfuse.errors import EqfuseError, did_you_mean, require_text
from eqfuse.explain import latex
from eqfuse.explain.page import page
from eqfuse.explain.report import Listings, Report
from eqfuse.explain.why import (
    Reason,
    Unfinished,
    Unverified,
    dearer,
    divisions,
    finite_masks,
    left_apart,
    order_said,
    orders_lost,
    plan_lines,
    predicted_for,
    refusals,
    stepwise,
    unbounded,
)
from eqfuse.proof.check import rules_for
from eqfuse.proof.derivation import Derivation
from eqfuse.proof.notation import BEGIN, END
from eqfuse.proof.outline import Block, Code, Detail, Heading, Prose
from eqfuse.proof.printer import lines, plain
from eqfuse.terms.nodes import Reduce
from eqfuse.terms.printer import output_lines

Format = Literal["text", "latex", "html", "json"]


def explain(
    report: Report,
    derivation: Callable[[], Derivation],
    listings: Callable[[], Listings],
    format: str,
    detail: str,
) -> str:
    """The explanation as text of a format; `derivation` and `listings` are called where the format has them.
    Raises EqfuseError for an unknown format or detail."""
    require_text(format=format, detail=detail)
    chosen = _detail(detail)
    forms: Mapping[str, Callable[[], str]] = {
        "text": lambda: plain(blocks(report, derivation(), chosen)),
        "latex": lambda: latex.document(blocks(report, derivation(), chosen)),
        "html": lambda: _page(report, derivation(), listings(), chosen),
        "json": lambda: derivation().to_json(),
    }
    if format not in forms:
        known = get_args(Format)
        raise EqfuseError(
            f"unknown format {format!r}", hint=did_you_mean(format, known) or f"formats: {', '.join(known)}"
        )
    return forms[format]()


def _page(report: Report, derivation: Derivation, listings: Listings, detail: Detail) -> str:
    return page(report, derivation, derivation.blocks(detail), why_not(report), listings)


def _detail(detail: str) -> Detail:
    match detail:
        case "short" | "full":
            return detail
    raise EqfuseError(f"unknown detail {detail!r}", hint="choose short or full")


def why_not(report: Report) -> tuple[Reason, ...]:
    """What of a program is not fused, or not in one kernel, and why."""
    groups = [group.group for k in report.plan.kernels for group in k.groups]
    rules = rules_for(Reduce(state.op, group.axis, state.body) for group in groups for state in group.states)
    is_rewritten = report.plan.form != "written"
    unfinished = (Unfinished(report.unfinished),) if report.unfinished and is_rewritten else ()
    unverified = (Unverified(report.refused),) if report.refused else ()
    refused = refusals(report.program, report.plan, report.merges, report.order, rules)
    divided = divisions(report.program, report.plan, report.plans)
    apart = left_apart(report.program, report.plan) if is_rewritten else ()
    return (
        unfinished
        + unverified
        + tuple(stepwise(report.program))
        + tuple(refused)
        + (*divided, *apart, *finite_masks(report.program, report.plan))
        + unbounded(report.program, report.plan)
        + dearer(report.program, report.plan, report.plans)
    )


def blocks(report: Report, derivation: Derivation, detail: Detail) -> Iterator[Block]:
    """Everything that the text and LaTeX forms say."""
    if report.views is not None:
        yield Heading("as it was called")
        yield Code("\n".join(output_lines(report.views.source.outputs)))
        yield Prose(f"It runs as the program below: {'; '.join(report.views.passes)}.")
    yield from derivation.blocks(detail)
    obstacles = why_not(report)
    if obstacles:
        yield Heading("why not")
        for obstacle in obstacles:
            yield Code(str(obstacle))
    if report.kept:
        yield Heading("kept of constants")
        yield Prose("Computed once for each value of the constants, and read by every call:")
        yield Code("\n".join(report.kept))
    if report.gradients:
        yield Heading("gradients")
        yield Prose(report.gradients)
    yield Heading("verification")
    yield Prose(f"What runs is {report.graded}.")
    if report.plan.order:
        yield Heading("order of sums and products")
        yield Prose(order_said(report.program, report.plan))
        yield Code("\n".join(output_lines(report.plan.order)))
        if lost := list(orders_lost(report.program, report.plan)):
            yield Prose("Other orders:")
            yield Code("\n".join(lost))
    yield Heading(f"why {report.plan.schedule}")
    yield Prose(predicted_for(report))
    yield Code("\n".join(plan_lines(report.plans, report.plan)))
    if divided := report.roles():
        yield Heading("roles")
        yield Code("\n".join(divided))


def coloured(report: Report, derivation: Derivation, detail: str) -> Text:
    """The text form with its headings, rules and changed subterms in colour."""
    shown = Text()
    is_open = False
    for row in lines(blocks(report, derivation, _detail(detail))):
        line = Text()
        for part in re.split(f"([{BEGIN}{END}])", row):
            if part in (BEGIN, END):
                is_open = part == BEGIN
            else:
                line.append(part, style="bold yellow" if is_open else "")
        if row and not row.startswith(" "):
            line.stylize("bold cyan")
        line.highlight_regex(r"(?<= by )[\w\-, ]+(?=:)", "green")
        line.highlight_regex(r"^ +as .*", "dim")
        shown.append_text(line).append("\n")
    return shown
