"""`eqfuse bench opinfo`: torch's own samples of its operators, through `eq.from_torch`.

torch tests each of its operators with samples of arguments (`torch.testing._internal`). `--examples` of those of each operator and
dtype (evenly spread; 5 where it is left out) are translated, and what the text means (`eq.reference`) is compared with
what torch computes; with `--native` the kernel runs instead. Random numbers, uninitialised tensors and ties are no failures.

  right      the same numbers and shapes
  refused    an EqfuseError; the table has the reason
  wrong      other numbers or shapes
  raised     another exception
"""

from __future__ import annotations

import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

import eqfuse as eq
from bench.measure import own_cores, time_limit
from bench.report import Column, Options, Report, one_line
from eqfuse.errors import EqfuseError

TITLE = "torch's samples of its operators, as programs"
COLUMNS = (
    Column("operator", lambda row: str(row["operator"])),
    Column("dtype", lambda row: str(row["dtype"])),
    Column("right", lambda row: str(row["right"])),
    Column("refused", lambda row: str(row["refused"])),
    Column("wrong", lambda row: str(row["wrong"])),
    Column("raised", lambda row: str(row["raised"])),
    Column("why", lambda row: str(row["why"])[:90]),
)
SAMPLES = 5
SECONDS = 60
DTYPES = (torch.float32, torch.int64, torch.bool)
VERDICTS = ("right", "refused", "wrong", "raised")
OPEN = ("empty", "rand", "kthvalue", "topk", "mode")
"""Parts of names of operators whose results torch leaves open: uninitialised, random, or which of several equal numbers it is."""


@dataclass(frozen=True)
class Batch:
    """Some of the samples of an operator, by its place in torch's list."""

    place: int
    dtype: torch.dtype
    samples: int
    native: bool


class Reference:
    """In place of the kernel of a program: what its text means."""

    def __init__(self, source: str) -> None:
        self.run = eq.reference(source)

    def __call__(self, **given: Any) -> Any:
        return pytree.tree_map(torch.as_tensor, self.run(**given))


@cache
def operators() -> tuple[Any, ...]:
    """torch's operators with their samples."""
    if find_spec("expecttest") is None:  # torch's own tests are made of its TestCase; samples are not
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(op_db)


def name_of(op: Any) -> str:
    """The operator, and which of its forms."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def verdict(op: Any, sample: Any, native: bool) -> tuple[str, str]:
    """What became of a sample, and why; empty where torch refuses it itself."""
    flat, form = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    given = [value.detach() for value in flat if isinstance(value, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        values = [next(left) if isinstance(value, torch.Tensor) else value for value in flat]
        args, kwargs = pytree.tree_unflatten(values, form)
        return op.op(*args, **kwargs)

    try:
        wanted = fn(*(tensor.clone() for tensor in given))
    except Exception:  # noqa: BLE001 - torch refuses its own sample
        return "", ""
    return judged(lambda: program_of(fn, given, native)(*given), wanted, native)


def program_of(fn: Any, given: Sequence[Any], native: bool) -> eq.torch.TorchProgram:
    """The program of a function, whose calls run the kernel, or with `native=False` what its text means."""
    program = eq.from_torch(fn, *given, native="off")
    if not native:
        program._kernel.append(Reference(program.source))  # type: ignore[arg-type]
    return program


def judged(compute: Callable[[], Any], wanted: Any, native: bool) -> tuple[str, str]:
    """What became of results that a program computes, and why."""
    try:
        found = compute()
    except EqfuseError as error:
        return "refused", one_line(error)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return "raised", f"{type(error).__name__}: {error}"
    return compared(found, wanted, native)


def compared(found: Any, wanted: Any, native: bool) -> tuple[str, str]:
    """Whether results are the same; their dtypes too where kernels made them."""
    found, wanted = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    if len(found) != len(wanted):
        return "wrong", f"{len(found)} results, torch has {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or native and one.dtype != other.dtype:
            return "wrong", f"{tuple(one.shape)} {one.dtype}, torch has {tuple(other.shape)} {other.dtype}"
        if not torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4, equal_nan=True):
            return "wrong", f"{one.flatten()[:3].tolist()}, torch has {other.flatten()[:3].tolist()}"
    return "right", ""


def explore(batch: Batch) -> dict[str, Any] | None:
    """A row of the table; None where torch has no samples."""
    op = operators()[batch.place]
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs("cpu", batch.dtype))
    except Exception:  # noqa: BLE001 - torch's generator needs what this machine lacks
        return None
    counts: Counter[str] = Counter()
    reasons: list[str] = []
    step = max(1, len(samples) // batch.samples)
    for sample in samples[::step]:
        try:
            with time_limit(SECONDS):
                what, why = verdict(op, sample, batch.native)
        except TimeoutError:
            what, why = "refused", f"more than {SECONDS} s"
        counts[what] += 1
        reasons += [why] if why else []
    row: dict[str, Any] = {"operator": name_of(op), "dtype": str(batch.dtype).removeprefix("torch.")}
    row |= {what: counts[what] for what in VERDICTS}
    return {**row, "why": reasons[0] if reasons else "", "reasons": list(dict.fromkeys(reasons))}


def batches(options: Options) -> Iterator[Batch]:
    """What is asked for, operator by operator."""
    samples = options.count(SAMPLES)
    chosen = tuple(options.only.split(",")) if options.only else ("",)
    if not any(name_of(op).startswith(chosen) for op in operators()):
        hint = "names are torch's: softmax, nn.functional.gelu"
        raise EqfuseError(f"no operator starts with {options.only!r}", hint=hint)
    for place, op in enumerate(operators()):
        if name_of(op).startswith(chosen):
            for dtype in DTYPES:
                if dtype in op.dtypes:
                    yield Batch(place, dtype, samples, options.native)


def run(options: Options, report: Report) -> None:
    """Adds a row for each operator and dtype; what is wrong or raised is a failure."""
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    asked = list(batches(options))
    with ProcessPoolExecutor(options.jobs or own_cores(), mp_context=get_context("spawn")) as pool:
        for row in pool.map(explore, asked):
            if row is None:
                continue
            report.add(row)
            counts.update({what: row[what] for what in VERDICTS})
            counts["operators"] += row["right"] > 0
            if (row["wrong"] or row["raised"]) and not any(part in row["operator"] for part in OPEN):
                report.failures.append(f"{row['operator']}, {row['dtype']}: {row['why']}")
            if time.monotonic() - begun > options.seconds:
                pool.shutdown(cancel_futures=True)
                break
    report.summary.append(
        ", ".join(f"{counts[what]} {what}" for what in VERDICTS)
        + f"; {counts['operators']} of {len(report.rows)} rows (operator and dtype) have a sample that is right"
    )
