"""Pieces of HTML that notebooks show."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def listing(text: str) -> str:
    """Text with its line breaks."""
    return f"<pre style='text-align:left'>{escape(text)}</pre>"


def folded(title: str, text: str) -> str:
    """Text behind a heading that opens it."""
    return f"<details><summary>{escape(title)}</summary>{listing(text)}</details>"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    """A table of plain texts."""
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    shown = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{shown}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
