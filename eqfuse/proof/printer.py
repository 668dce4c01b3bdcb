"""An explanation as text for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from eqfuse.proof.notation import BEGIN, END, Notation
from eqfuse.proof.outline import Block, Code, Equation, Heading, Line, Prose

WIDTH = 100


def lines(blocks: Iterable[Block]) -> Iterator[str]:
    """The lines; what a step changed stands between BEGIN and END."""
    first = True
    for block in blocks:
        match block:
            case Heading(text):
                if not first:
                    yield ""
                yield text
            case Prose(text):
                yield from _wrapped(text, "  ", "    ")
            case Equation(left, right, names, note):
                shown = f"{left} = {Notation(names).show(right)}"
                yield from _wrapped(shown + (f"    # {note}" if note else ""), "    ", "        ")
            case Line() as line:
                yield from _step(line)
            case Code(text):
                yield from (f"    {row}" for row in text.splitlines())
        first = False


def _step(line: Line) -> Iterator[str]:
    shown = Notation(line.names).show(line.right, line.changed)
    yield from _wrapped(f"= {shown}", "      ", "          ")
    reason = f"by {', '.join(line.rules)}: {'; '.join(line.whys)}"
    yield from _wrapped(reason, "          ", "            ")
    if line.conditions:
        yield from _wrapped(f"as {'; '.join(line.conditions)}", "          ", "             ")
    for proof in line.proofs:
        indent = " " * (14 + len(proof) - len(proof.lstrip()))
        yield from _wrapped(proof.lstrip(), indent, indent + "    ")


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(blocks: Iterable[Block]) -> str:
    """Text without colour."""
    return "\n".join(lines(blocks)).replace(BEGIN, "").replace(END, "")
