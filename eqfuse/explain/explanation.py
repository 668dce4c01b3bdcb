"""The explanation of a kernel in every form: derivation, obstacles, plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from rich.text import Text

from eqfuse.errors import EqfuseError, did_you_mean, require_text
from eqfuse.explain import latex, text
from eqfuse.explain.notation import BEGIN, END
from eqfuse.explain.outline import Block, Code, Detail, Heading, Outline, Prose
from eqfuse.explain.page import page
from eqfuse.explain.why import Refusal, Unfinished, Unverified, plan_lines, predicted_for, refusals
from eqfuse.proof.check import known_rules, rules_for
from eqfuse.proof.derivation import Derivation
from eqfuse.terms.nodes import Reduce

if TYPE_CHECKING:
    from eqfuse.kernel import Kernel

Format = Literal["text", "latex", "html", "json"]


def explain(kernel: Kernel, format: str, detail: str) -> str:
    """The explanation as text of a format. Raises EqfuseError for an unknown format or detail."""
    require_text(format=format, detail=detail)
    chosen = _detail(detail)
    forms: Mapping[str, Callable[[], str]] = {
        "text": lambda: text.plain(blocks(kernel, chosen)),
        "latex": lambda: latex.document(blocks(kernel, chosen)),
        "html": lambda: page(kernel, derivation_blocks(kernel.derivation, chosen), why_not(kernel)),
        "json": lambda: kernel.derivation.to_json(),
    }
    if format not in forms:
        known = get_args(Format)
        raise EqfuseError(
            f"unknown format {format!r}", hint=did_you_mean(format, known) or f"formats: {', '.join(known)}"
        )
    return forms[format]()


def _detail(detail: str) -> Detail:
    match detail:
        case "short" | "full":
            return detail
    raise EqfuseError(f"unknown detail {detail!r}", hint="choose short or full")


def why_not(kernel: Kernel) -> tuple[Refusal | Unfinished | Unverified, ...]:
    """What of a kernel is not fused, and why."""
    derived = kernel.derived
    groups = [group.group for k in kernel.plan.kernels for group in k.groups]
    rules = rules_for(Reduce(state.op, group.axis, state.body) for group in groups for state in group.states)
    unfinished = (
        (Unfinished(derived.unfinished),) if derived.unfinished and kernel.plan.form != "written" else ()
    )
    unverified = (Unverified(kernel.refused),) if kernel.refused else ()
    return (
        unfinished
        + unverified
        + tuple(refusals(derived.program, kernel.plan, derived.groups, derived.order, rules))
    )


def derivation_blocks(derivation: Derivation, detail: Detail) -> list[Block]:
    """What a derivation says, and that it was replayed."""
    found = list(Outline(derivation, known_rules(derivation.proof), detail).blocks())
    verdict = derivation.check()
    said = f"{verdict.why}, each replayed without the e-graph" if verdict else f"REFUSED: {verdict.why}"
    return [*found, Heading("checked"), Prose(said)]


def blocks(kernel: Kernel, detail: Detail) -> Iterator[Block]:
    """Everything that the text and LaTeX forms say."""
    yield from derivation_blocks(kernel.derivation, detail)
    obstacles = why_not(kernel)
    if obstacles:
        yield Heading("why not")
        for obstacle in obstacles:
            yield Code(str(obstacle))
    yield Heading(f"why {kernel.plan.schedule}")
    yield Prose(predicted_for(kernel))
    yield Code("\n".join(plan_lines(kernel.plans(), kernel.plan)))


def coloured(kernel: Kernel, detail: str) -> Text:
    """The text form with its headings, rules and changed subterms in colour."""
    with kernel.derived.scope.entered():
        rows = list(text.lines(blocks(kernel, _detail(detail))))
    shown = Text()
    is_open = False
    for row in rows:
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
