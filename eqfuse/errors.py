"""Errors that the person who wrote the expression can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """A place in the source text: 1-based line, 0-based column, length in characters."""

    line: int
    column: int
    length: int = 1


class EqfuseError(Exception):
    """Base class of every error that a user can cause.

    The text names what is wrong, shows the source line with a caret under the place (where there
    is one), and ends with what to do::

        unknown name 'scal' (line 2)
            S[i,j] = sum[d](Q[i,d] * K[j,d]) * scal
                                               ^^^^
        expected a tensor, an earlier definition or a scalar; did you mean 'scale'?
    """

    def __init__(self, message: str, *, source: str = "", span: Span | None = None, hint: str = "") -> None:
        self.message = message
        self.source = source
        self.span = span
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.message]
        source = source_lines(self.source)
        if self.span is not None and self.span.line <= len(source):
            text = source[self.span.line - 1]
            body = text.strip().expandtabs(1)
            column = min(max(0, self.span.column - (len(text) - len(text.lstrip()))), len(body))
            length = max(1, min(self.span.length, len(body) - column))
            body, column, length = _window(body, column, length)
            lines[0] += f" (line {self.span.line})"
            lines.append(f"    {body}")
            lines.append("    " + " " * column + "^" * length)
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)


class ParseError(EqfuseError):
    """The source text is not a program of the language."""


class TypeCheckError(EqfuseError):
    """The program is well-formed but its axes, ranks or dtypes do not agree."""


class BindError(EqfuseError):
    """The tensors, scalars or sizes given do not fit the program."""


class BudgetError(EqfuseError):
    """The program is too large for a declared budget (e-nodes, rounds, memory)."""


class ScheduleError(EqfuseError):
    """The schedule asked for does not exist for this program."""


class VerificationError(EqfuseError):
    """A stage of the pipeline does not compute what the source says, or nothing could tell. `certificate` (an
    `eqfuse.Certificate`, or None) is what verification found, its counterexample if there is one."""

    def __init__(self, message: str, *, hint: str = "", certificate: Any = None) -> None:
        self.certificate = certificate
        super().__init__(message, hint=hint)


LONGEST_LINE = 160
"""Characters of a source line that an error shows."""


def _window(line: str, column: int, length: int) -> tuple[str, int, int]:
    """The part of a long line around a place, and where the place is in it."""
    if len(line) <= LONGEST_LINE:
        return line, column, length
    start = max(0, min(column - LONGEST_LINE // 4, len(line) - LONGEST_LINE))
    stop = min(len(line), start + LONGEST_LINE)
    before, after = "... " if start else "", " ..." if stop < len(line) else ""
    return before + line[start:stop] + after, column - start + len(before), min(length, stop - column)


def require_text(**given: object) -> None:
    """Raises EqfuseError for the first argument that is no text."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise EqfuseError(
                f"{name} is a {type(value).__name__}, not text", hint=f'write it as a string: {name}="..."'
            )


def source_lines(source: str) -> list[str]:
    """The lines of a source text, as Python's parser counts them."""
    return re.split(r"\r\n|\r|\n", source)


def locate(source: str, text: str) -> Span | None:
    """The first place outside comments where `text` stands as whole words, blanks ignored; None if nowhere."""
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        return None
    start, stop = (r"\b" if re.match(r"\w", word) else "" for word in (words[0], words[-1]))
    pattern = re.compile(start + r"\s*".join(map(re.escape, words)) + stop)
    for number, line in enumerate(source_lines(source), start=1):
        if found := pattern.search(line.partition("#")[0]):
            return Span(number, found.start(), found.end() - found.start())
    return None


LONGEST_WORD = 64
"""Letters of a name that another name may have been meant by: comparing two takes the product of their lengths."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be: alike, and a mistake for each four letters away at most."""
    if len(name) > LONGEST_WORD:
        return None
    alike = difflib.get_close_matches(name, sorted(word for word in known if len(word) <= LONGEST_WORD))
    return next((other for other in alike if _mistakes(name, other) <= max(1, len(name) // 4)), None)


def _mistakes(written: str, meant: str) -> int:
    """Letters left out, put in, replaced or swapped with the next one, to write one word for the other."""
    rows = [list(range(len(meant) + 1))]
    for i, letter in enumerate(written, start=1):
        row = [i]
        for j, other in enumerate(meant, start=1):
            fewest = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter + written[i - 2] == meant[j - 2] + other:
                fewest = min(fewest, rows[-2][j - 2] + 1)
            row.append(fewest)
        rows.append(row)
    return rows[-1][-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'scale'?``, or nothing where no known name is close."""
    match = closest(name, known)
    return f"did you mean {match!r}?" if match else ""
