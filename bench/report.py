"""What every benchmark hands back: rows for a table and for JSON, a summary, and what went wrong."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.workloads import Workload
from eqfuse.environment import environment
from eqfuse.errors import EqfuseError

if TYPE_CHECKING:
    from rich.console import Console


EXAMPLES = 500
"""How many random programs a report draws where `--examples` is left out and it has no number of its own."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for. `only` selects workloads as `workloads.select` does; `examples`,
    `seed`, `seconds`, `jobs` and `native` are of random programs (`examples` is None where each report has its own number), `measured` is the file of what a GPU elsewhere measured,
    `places` are those of a program where each mutant is made, `threads` the numbers of threads of `cpu`, empty for
    all cores and one, `folder` a checkout of what is measured; `resume` keeps what is in the output already."""

    only: str | None = None
    device: str = "cpu"
    small: bool = False
    torch_compile: bool = True
    memory: bool = True
    examples: int | None = None
    seed: int = 0
    seconds: float = math.inf
    jobs: int = 0
    places: int = 0
    resume: bool = False
    native: bool = False
    measured: Path | None = None
    threads: tuple[int, ...] = ()
    folder: Path | None = None

    def count(self, otherwise: int = EXAMPLES) -> int:
        """The number of examples, or this one where it was left out."""
        return otherwise if self.examples is None else self.examples


@dataclass(frozen=True)
class Column:
    """A column of the printed table: its heading and the text of its cell for a row."""

    heading: str
    cell: Callable[[Mapping[str, Any]], str]


@dataclass
class Report:
    """`rows` go to JSON whole; `columns` say which part of them is printed. No failures: exit status 0.

    With a `path`, every row that is added is written at once: a run that is stopped keeps what it had.
    """

    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    path: Path | None = None
    started: float = field(default_factory=time.perf_counter)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        self.write()

    def failing(self, subject: str) -> Callable[[str], None]:
        """Where `recorded` may put what broke about `subject`."""
        return lambda problem: self.failures.append(f"{subject}: {problem}")

    def is_late(self, options: Options, what: str) -> bool:
        """Whether the time that the options give is over; the summary says then that `what` was not begun."""
        late = time.perf_counter() - self.started > options.seconds
        if late:
            self.summary.append(f"{what} and what follows was not begun: out of time")
        return late

    @contextmanager
    def row(self, subject: str, *, fails: bool = True, **about: Any) -> Iterator[dict[str, Any]]:
        """A row to fill in, which is added and printed at the end. What breaks inside is said in the row, and is a failure of the
        report where it `fails` the subject: a peer that does not run is a result."""
        row: dict[str, Any] = about
        try:
            yield row
        except Exception as error:  # noqa: BLE001  (whatever it is, it is a result of the benchmark)
            row["failed"] = one_line(error)[:200]
            if fails:
                self.failures.append(f"{subject}: {one_line(error)}")
        self.add(row)
        print(in_one_line(row, self.columns), flush=True)

    def ratios(self, what: str, other: str, ours: str, *cell: str) -> list[float]:
        """`what` of one way over that of ours, for each cell whose rows, told apart by the keys `cell`, have both."""
        found: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in self.rows:
            if row.get(what) and "failed" not in row:
                found.setdefault(tuple(row[key] for key in cell), {})[row["way"]] = row[what]
        return [ways[other] / ways[ours] for ways in found.values() if {ours, other} <= ways.keys()]

    def print(self, console: Console) -> None:
        from rich.table import Table  # here, so that machines without rich can run what is reported on

        table = Table(title=self.title, title_justify="left")
        for n, column in enumerate(self.columns):
            table.add_column(column.heading, justify="left" if n == 0 else "right", no_wrap=n == 0)
        for row in self.rows:
            table.add_row(*(column.cell(row) for column in self.columns))
        console.print(table)
        for line in self.summary:
            console.print(line)
        if self.failures:
            console.print(f"[bold red]{len(self.failures)} failed[/]")
            for line in self.failures:
                console.print(f"  {line}", markup=False)

    def write(self) -> None:
        """As JSON, with the versions and the machine that it was measured on; nothing without a path."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "title": self.title,
            "environment": environment(),
            "summary": self.summary,
            "failures": self.failures,
            "rows": self.rows,
        }
        self.path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def each(items: Sequence[Workload]) -> Iterator[Workload]:
    """The workloads; a line on stderr says when each one is done, and how long it took."""
    for number, item in enumerate(items, start=1):
        started = time.perf_counter()
        yield item
        took = time.perf_counter() - started
        print(f"{number}/{len(items)} {item.name} {took:.1f} s", file=sys.stderr, flush=True)


def shown(row: Mapping[str, Any], key: str, form: str) -> str:
    """A number of a row in a format; empty where there is none."""
    return format(row[key], form) if row.get(key) is not None else ""


def chosen_names(only: str | None, names: Sequence[str]) -> list[str]:
    """The names that start with one of the comma-separated words; all where None. Raises EqfuseError where none does."""
    words = ("",) if only is None else tuple(word.strip() for word in only.split(","))
    found = [name for name in names if name.startswith(words)]
    if not found:
        raise EqfuseError(f"no program starts with {only!r}", hint=f"programs: {', '.join(names)}")
    return found


def in_one_line(row: Mapping[str, Any], columns: Iterable[Column]) -> str:
    """What the columns say of a row, as one line: for reports that print each row as it comes."""
    return ", ".join(f"{column.heading} {text}".strip() for column in columns if (text := column.cell(row)))


@contextmanager
def recorded(record: Callable[[str], object]) -> Iterator[None]:
    """Hand what breaks inside to `record` as one line: a benchmark goes on, and reports it as a failure."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a result of the benchmark)
        record(one_line(error))


def one_line(error: BaseException) -> str:
    """An error as one line of a report: the first line of its text, and the last of one from elsewhere, where processes say what they raised."""
    text = str(error).strip().splitlines()
    first = text[0] if text else "no message"
    if isinstance(error, EqfuseError):
        return first
    return f"{type(error).__name__}: {first}" + (f" … {text[-1]}" if len(text) > 1 else "")


def geometric_mean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = torch.tensor([float(v) for v in values], dtype=torch.float64).log()
    return float(logs.mean().exp())
