"""`eqfuse bench kernelbench FOLDER`: the problems of KernelBench, through `eq.from_torch` and `torch.compile`.

FOLDER is a checkout of `ScalingIntelligence/KernelBench`. Each problem of its levels 1 to 3 is a file with a `Model`, the numbers that
it is made with, and its inputs. The integers among its constants are made so small that it runs in a moment, and its model is translated in training and
in evaluation. What the text means (`eq.reference`) is compared with what torch computes, buffers that the model changes too; with `--native` the kernel
runs instead. Then it is called through `torch.compile(model, backend="eqfuse")`, where each region that can be one becomes a kernel: `kernels` says how
many of them.

  right, refused, wrong, raised      as for `eqfuse bench opinfo`
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from resource import RLIMIT_AS, getrlimit, setrlimit
from types import ModuleType
from typing import Any

import torch

import eqfuse as eq
from bench.measure import own_cores, time_limit
from bench.opinfo_report import VERDICTS, judged, program_of
from bench.report import Column, Options, Report, chosen_names, one_line
from eqfuse.errors import EqfuseError

TITLE = "KernelBench, as programs"
COLUMNS = (
    Column("problem", lambda row: str(row["problem"])),
    Column("mode", lambda row: str(row["mode"])),
    Column("program", lambda row: str(row["program"])),
    Column("back end", lambda row: str(row.get("back end", ""))),
    Column("kernels", lambda row: str(row.get("kernels", ""))),
    Column("why", lambda row: str(row["why"])[:110]),
)
LEVELS = ("level1", "level2", "level3")
SECONDS = 300
GIGABYTES = 8
KEPT = 12
"""Integers up to this one are kept, as sizes of windows, strides, groups are."""


@dataclass(frozen=True)
class Problem:
    """A problem of KernelBench."""

    path: Path
    native: bool
    compiles: bool


def flattened(number: int, kept: int = KEPT) -> int:
    """A number halved until its logarithm above that of `kept` is a quarter of what it was."""
    above = number.bit_length() - kept.bit_length()
    for _ in range(max(1, above - above // 4) if number > kept else 0):
        number = (number + 1) // 2
    return number


SMALLER: tuple[Callable[[int], int], ...] = (
    flattened,
    lambda number: -(-number // 4),
    partial(flattened, kept=16),
    partial(flattened, kept=24),
    partial(flattened, kept=32),
    partial(flattened, kept=224),
)
"""What becomes of integers above `KEPT`, so that equal ones stay equal: the first with which torch runs the model."""


def changed(value: Any, smaller: Callable[[int], int]) -> Any:
    """A constant with its integers made smaller."""
    if isinstance(value, tuple | list):
        return type(value)(changed(each, smaller) for each in value)
    return smaller(value) if type(value) is int and value > KEPT else value


def loaded(path: Path, smaller: Callable[[int], int]) -> ModuleType:
    """The module of a problem, with smaller integers."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if not name.startswith("_"):
            setattr(module, name, changed(value, smaller))
    for function in (module.get_inputs, module.get_init_inputs):
        constants = tuple(changed(each, smaller) for each in function.__code__.co_consts)
        function.__code__ = function.__code__.replace(co_consts=constants)
    return module


def made(path: Path) -> tuple[torch.nn.Module, list[Any]]:
    """The model of a problem and its inputs, as small as torch takes them."""
    for smaller in SMALLER:
        module = loaded(path, smaller)
        torch.manual_seed(0)
        with suppress(Exception), torch.no_grad():  # torch refuses some sizes
            model, given = module.Model(*module.get_init_inputs()), module.get_inputs()
            copy.deepcopy(model)(*given)
            return model, given
    raise EqfuseError(f"torch runs {path} at none of the smaller sizes", hint="check the checkout")


def with_buffers(model: torch.nn.Module, call: Callable[..., Any], given: list[Any]) -> Any:
    """The results of a call, and the buffers of its model behind it."""
    with torch.no_grad():
        return call(*given), [buffer.clone() for buffer in model.buffers()]


def alone() -> None:
    """Gives a process one thread, and so much memory that another one is left some."""
    torch.set_num_threads(1)
    setrlimit(RLIMIT_AS, (GIGABYTES << 30, getrlimit(RLIMIT_AS)[1]))


def explore(problem: Problem) -> list[dict[str, Any]]:
    """A row for each mode of the model."""
    name = f"{problem.path.parent.name}/{problem.path.stem}"
    try:
        original, given = made(problem.path)
    except EqfuseError as error:
        return [{"problem": name, "mode": "", "program": "", "why": one_line(error)}]
    rows = []
    for mode in ("training", "evaluation"):
        original.train(mode == "training")
        models = [copy.deepcopy(original) for _ in range(3)]
        torch.manual_seed(1)
        wanted = with_buffers(models[0], models[0], given)

        def translated(model: torch.nn.Module = models[1]) -> Any:
            program = program_of(model, given, problem.native)
            torch.manual_seed(1)
            return with_buffers(model, program, given)

        def compiled(model: torch.nn.Module = models[2]) -> Any:
            torch.manual_seed(1)
            native = "wait" if problem.native else "off"
            options: dict[str, Any] = {"take": "always", "rest": "aot_eager", "native": native}
            return with_buffers(model, torch.compile(model, backend="eqfuse", options=options), given)

        row: dict[str, Any] = {"problem": name, "mode": mode}
        reasons = []
        for way, compute in {"program": translated, "back end": compiled}.items():
            if way == "back end" and not problem.compiles:
                continue
            try:
                with time_limit(SECONDS):
                    row[way], why = judged(compute, wanted, problem.native)
            except TimeoutError:
                row[way], why = "raised", f"more than {SECONDS} s"
            reasons += [why] if why else []
        if problem.compiles:
            regions = eq.torch.report(measure=False, reset=True)
            row["kernels"] = f"{len(regions.taken)} of {len(regions.regions)}"
            row["left"] = [str(entry) for entry in regions.regions if not entry.taken]
            torch._dynamo.reset()
        rows.append({**row, "why": "; ".join(reasons)})
    return rows


def problems(options: Options) -> Iterator[Problem]:
    """What is asked for, in order."""
    if options.folder is None:
        raise EqfuseError(
            "bench kernelbench needs a folder",
            hint="eqfuse bench kernelbench FOLDER, a checkout of KernelBench",
        )
    found = (
        (level, path)
        for level in LEVELS
        for folder in (options.folder / level, options.folder / "KernelBench" / level)
        for path in sorted(folder.glob("[0-9]*_*.py"), key=lambda each: int(each.stem.partition("_")[0]))
    )
    paths = {f"{level}/{path.stem}": path for level, path in found}
    if not paths:
        raise EqfuseError(
            f"{options.folder} has no level1/*.py",
            hint="FOLDER is a checkout of ScalingIntelligence/KernelBench",
        )
    for name in chosen_names(options.only, list(paths)):
        yield Problem(paths[name], options.native, options.torch_compile)


def run(options: Options, report: Report) -> None:
    """Adds a row for each problem and mode; what is wrong or raised is a failure."""
    counts: Counter[tuple[str, ...]] = Counter()
    processes, context = options.jobs or own_cores(), get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=alone) as pool:
        for row in (row for rows in pool.map(explore, list(problems(options))) for row in rows):
            report.add(row)
            level = row["problem"].partition("/")[0]
            for way in ("program", "back end"):
                counts[level, way, row["mode"], row.get(way, "")] += 1
                if row.get(way) in ("wrong", "raised"):
                    report.failures.append(f"{row['problem']}, {row['mode']}, {way}: {row['why']}")
    for which in dict.fromkeys(key[:3] for key in counts):
        found = [(what, counts[*which, what]) for what in VERDICTS]
        if any(count for _, count in found):
            report.summary.append(", ".join(which) + ": " + ", ".join(f"{n} {what}" for what, n in found))
