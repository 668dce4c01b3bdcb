"""An explanation as one HTML page that needs nothing but itself, and its parts as the playground shows them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from eqfuse.explain.report import Listings, Report
from eqfuse.explain.why import Reason, plan_lines, predicted_for
from eqfuse.loops.plan import Plan
from eqfuse.proof.congruence import Classes
from eqfuse.proof.derivation import Derivation
from eqfuse.proof.nodes import Proof
from eqfuse.proof.notation import BEGIN, END, Notation
from eqfuse.proof.outline import Block, Code, Equation, Heading, Line, Prose

COLOURS = 8
"""State colours that the template has; further states share them."""

MOST_CLASSES, MOST_TERMS, MOST_CHARACTERS = 60, 8, 160
"""How much of an e-graph the page shows."""


def page(
    report: Report,
    derivation: Derivation,
    blocks: Sequence[Block],
    obstacles: Sequence[Reason],
    listings: Listings,
) -> str:
    """The page of a kernel."""
    paint = _painter(derivation.proof)
    return template("page").render(
        nonce="",
        title=", ".join(output.name for output in report.program.outputs),
        source=report.program.source.strip("\n"),
        roles="\n".join(report.roles()),
        graphs=[(name, _classes(classes, paint)) for name, classes in derivation.classes.items()],
        **_parts(report, derivation, blocks, obstacles, listings),
    )


def fragment(
    report: Report,
    derivation: Derivation,
    blocks: Sequence[Block],
    obstacles: Sequence[Reason],
    listings: Listings,
    merge: str,
) -> str:
    """What the playground shows of a kernel: HTML for a page that has the style of `page`."""
    return template("fragment").render(
        merge=_painter(derivation.proof)(merge),
        predicted=predicted_for(report),
        **_parts(report, derivation, blocks, obstacles, listings),
    )


@dataclass(frozen=True)
class Entry:
    """A program in a list of pages: the file of its page, and its plan in a line; or `why` it has none."""

    title: str
    file: str = ""
    plan: str = ""
    why: str = ""


def contents(title: str, entries: Sequence[Entry]) -> str:
    """The page that lists others, which lie beside it, and shows one of them."""
    first = next((each.file for each in entries if not each.why), "")
    return template("pages").render(nonce="", title=title, entries=entries, first=first)


def _parts(
    report: Report,
    derivation: Derivation,
    blocks: Sequence[Block],
    obstacles: Sequence[Reason],
    listings: Listings,
) -> dict[str, Any]:
    """What both have."""
    paint = _painter(derivation.proof)
    codes = {"loop nest": listings.loops, "tile program": listings.tile, **listings.sources}
    return {
        "verdict": derivation.check(),
        "rows": list(_rows(blocks, paint)),
        "obstacles": [str(obstacle) for obstacle in obstacles],
        "legend": [(name, paint(name)) for name in _states(derivation.proof)],
        "codes": [(name, paint(code)) for name, code in codes.items()],
        "bars": _bars(report.plans, report.plan),
        "terms": _term_names(report.plans),
        "certificate": listings.certificate,
    }


@cache
def template(name: str) -> Template:
    """A template of this folder. `nonce` is that of a policy about what the page may load, empty where there is none."""
    loader = PackageLoader("eqfuse.explain", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(f"{name}.html.j2")


# -- colours of states -----------------------------------------------------------------------------


def _states(proof: Proof) -> list[str]:
    """Names of all states, in order."""
    return list(dict.fromkeys(s.name for k in proof.kernels for g in k.groups for s in g.states))


Paint = Callable[[str], Markup]


def _painter(proof: Proof) -> Paint:
    """Text as HTML, every name of a state (or of a value of it) in its colour, marks as marks."""
    colours = {name: index % COLOURS for index, name in enumerate(_states(proof))}
    longest_first = sorted(colours, key=len, reverse=True)
    pattern = re.compile(
        rf"\b({'|'.join(map(re.escape, longest_first))})(_new|_tile\d*|_a|_b|_seen|_partial|_final)?\b"
        if colours
        else r"(?!)"
    )

    def paint(text: str) -> Markup:
        escaped = html.escape(text)
        painted = pattern.sub(lambda m: f'<span class="s{colours[m[1]]}">{m[0]}</span>', escaped)
        return Markup(painted.replace(BEGIN, "<mark>").replace(END, "</mark>"))

    return paint


# -- the derivation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One element of the derivation: its kind and its texts, as HTML."""

    kind: str
    text: Markup
    reason: str = ""
    conditions: tuple[Markup, ...] = ()
    proofs: tuple[Markup, ...] = ()


def _rows(blocks: Sequence[Block], paint: Paint) -> Iterator[Row]:
    for block in blocks:
        match block:
            case Heading(text):
                yield Row("heading", Markup(html.escape(text)))
            case Prose(text):
                yield Row("prose", paint(text))
            case Equation(left, right, names, note):
                yield Row("equation", paint(f"{left} = {Notation(names).show(right)}"), note)
            case Line() as line:
                yield Row(
                    "step",
                    paint("= " + Notation(line.names).show(line.right, line.changed)),
                    f"{', '.join(line.rules)}: {'; '.join(line.whys)}",
                    tuple(map(paint, line.conditions)),
                    tuple(map(paint, line.proofs)),
                )
            case Code(text):
                yield Row("code", paint(text))


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A plan as a bar: (start, width, term) in percent of the dearest, and what it says beside it."""

    label: str
    parts: tuple[tuple[float, float, int], ...]
    is_chosen: bool


def _term_names(plans: Sequence[Plan]) -> list[str]:
    return list(
        dict.fromkeys(t.name for p in plans if p.cost for t in p.cost.terms if math.isfinite(t.seconds))
    )


def _bars(plans: Sequence[Plan], chosen: Plan) -> list[Bar]:
    names = _term_names(plans)
    finite = [p.cost.seconds for p in plans if p.cost and math.isfinite(p.cost.seconds)]
    scale = 100 / max(finite, default=1.0) if max(finite, default=0.0) > 0 else 0.0
    bars: list[Bar] = []
    for plan, label in zip(plans, plan_lines(plans, chosen), strict=True):
        totals: dict[str, float] = {}
        if plan.cost and math.isfinite(plan.cost.seconds):
            for part in plan.cost.terms:
                totals[part.name] = totals.get(part.name, 0.0) + part.seconds * scale
        start, parts = 0.0, []
        for name in names:
            width = totals.get(name, 0.0)
            parts.append((round(start, 3), round(width, 3), names.index(name) % COLOURS))
            start += width
        bars.append(Bar(label, tuple(parts), plan is chosen))
    return bars


# -- the e-graph -----------------------------------------------------------------------------------


def _classes(classes: Classes, paint: Paint) -> list[Mapping[str, object]]:
    """The largest classes: how many terms, and the shortest of them."""
    notation = Notation()
    found: list[Mapping[str, object]] = []
    for members in sorted(classes, key=len, reverse=True)[:MOST_CLASSES]:
        texts = sorted(dict.fromkeys(map(notation.show, members)), key=lambda text: (len(text), text))
        shown = [t for t in texts if len(t) <= MOST_CHARACTERS][:MOST_TERMS]
        if len(shown) > 1:
            found.append({"count": len(members), "terms": [paint(text) for text in shown]})
    return found
