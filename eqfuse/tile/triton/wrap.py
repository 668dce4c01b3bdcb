"""Breaking long lines of generated Python the way a formatter would: brackets first, then commas, then operators."""

from __future__ import annotations

import re
from itertools import pairwise

LIMIT = 110
"""Columns of a generated line."""

_OPEN, _CLOSE = "([{", ")]}"
_OPERATORS = ((" | ",), (" & ",), (" + ", " - "), (" * ", " / "))
"""Binary operators at which a line may break, loosest first."""


def wrap(line: str) -> list[str]:
    """`line` as one or more lines of at most LIMIT columns, where its brackets and operators allow it."""
    if len(line) <= LIMIT:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    start = _value_start(line)
    if _split_operators(line[start:]) and not line.endswith(("(", "[", "{")):
        return [f"{line[:start]}(", *_body(line[start:], indent), f"{indent})"]
    pair = _longest_pair(line)
    if pair is None:
        return [line]
    opening, closing = pair
    return [line[: opening + 1], *_body(line[opening + 1 : closing], indent), f"{indent}{line[closing:]}"]


def _body(text: str, indent: str) -> list[str]:
    """What stands between two brackets that got lines of their own."""
    inner = indent + " " * 4
    text = text.strip().removesuffix(",")
    if len(inner) + len(text) <= LIMIT:
        return [inner + text]
    parts = _split(text, (", ",))
    if len(parts) > 1:
        return [piece for part in parts for piece in _with_comma(inner + part)]
    return [piece for part in _split_operators(text) or [text] for piece in wrap(inner + part)]


def _with_comma(line: str) -> list[str]:
    """One of several things between commas."""
    if len(line) < LIMIT:
        return [f"{line},"]
    indent = line[: len(line) - len(line.lstrip())]
    plain = _value_start(line) == len(indent)
    operands = _split_operators(line.strip()) if plain else []
    *first, last = [piece for part in operands for piece in wrap(indent + part)] or wrap(line)
    return [*first, f"{last},"]


def _split_operators(text: str) -> list[str]:
    """`a + b` as `a`, `+ b` at the loosest operator outside brackets; empty where there is none."""
    for operators in _OPERATORS:
        parts = _split(text, operators, keep=True)
        if len(parts) > 1:
            return parts
    return []


def _split(text: str, marks: tuple[str, ...], *, keep: bool = False) -> list[str]:
    parts, begin = [], 0
    for position, depth in _depths(text):
        mark = text[position : position + len(marks[0])]
        if depth == 0 and position > begin and mark in marks:
            parts.append(text[begin:position])
            begin = position + (1 if keep else len(mark))
    return [*parts, text[begin:]]


def _value_start(line: str) -> int:
    """Where the right side of an assignment, a keyword's argument, what follows an operator, or else the whole line begins."""
    target = re.match(r"\s*[\w, ]+ = |\s*\w+=(?!=)|\s*[-+*/|&] |\s*", line)
    return target.end() if target else 0


def _longest_pair(line: str) -> tuple[int, int] | None:
    """The outermost pair of brackets that holds the most text; the last one among equals."""
    edges = [(p, line[p] in _OPEN) for p, depth in _depths(line) if depth == 0 and line[p] in _OPEN + _CLOSE]
    pairs = [(left, right) for (left, opens), (right, _) in pairwise(edges) if opens and right > left + 1]
    return max(pairs, key=lambda pair: (pair[1] - pair[0], pair[0]), default=None)


def _depths(text: str) -> list[tuple[int, int]]:
    """Positions outside string literals with their bracket depth; a bracket has the depth around it."""
    found, depth, quote = [], 0, ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
            continue
        if char in "\"'":
            quote = char
            continue
        depth -= char in _CLOSE
        found.append((position, depth))
        depth += char in _OPEN
    return found
