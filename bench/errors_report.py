"""`eqfuse bench errors`: errors of fused and unfused programs against float64, over several kinds of inputs.

Both run in the dtype of the case (float32) with the plan that is chosen by default. A row is a program, a kind
of inputs and an output. Special values (a zero or -inf line, an infinity, NaN, denormals, an empty axis) have rows
too: there every infinity and NaN must be where the unfused program has it, in float64 or in the kernel's precision.

Then the inputs are scaled, from the least denormal number to near the greatest, alike, by row and by element, at the
small sizes: there every schedule must be finite and within the judge's bound wherever the program as it is written, in
float32, is right. The ratio of those rows is that of the worst schedule, of its error to what is allowed.
`HEADROOM` names what is accepted.

A fused error above twice the unfused one is the program's own where a random rounding of every operation of the
unfused program makes as large a one: then the unfused run was lucky, and the row says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import eqfuse as eq
from bench import judge
from bench.magnitudes import MAGNITUDES, scaled
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import Case, Workload, select
from eqfuse.errors import ScheduleError
from eqfuse.loops.plan import SCHEDULES
from eqfuse.measure import as_tuple
from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import Axis, Call, Expr, Load, Program, Reduce, reductions, walk
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.verify.budget import FACTOR, FLOOR, Error, Measurement, distributions, same_special, special_sets

FEW, MANY = 4, 16
"""Inputs of every distribution that an error is taken over: many at small sizes, where few outputs have luck, and
where few do not show an error within twice the unfused one."""
NEAR = 1e-3
"""How far from the program without its special values an output may be that has not read them, relative to its size."""

DRAWN = ("normal", "weight", "positive")
"""Draws of tensors that other values may stand for."""
LARGE = ("1e37", "rows")
HEADROOM = {
    name: "the division by the sum of weights is delayed past the sum over values near the greatest number"
    for name in (
        *(
            "global_prefill",
            "causal_prefill",
            "gqa_prefill",
            "alibi_prefill",
            "softcap_prefill",
            "window_prefill",
        ),
        *("causal_decode", "gqa_decode", "alibi_decode", "softcap_decode", "mha", "mha_decode", "mla"),
        *("mha_incremental", "mha_speculative", "mha_chunked_prefill"),
        *("gqa_incremental", "gqa_speculative", "gqa_chunked_prefill"),
        *("mqa_incremental", "mqa_speculative", "mqa_chunked_prefill"),
        *("attention_lse", "qknorm_attention", "weighted_variance", "performer"),
    )
}
"""Programs that may overflow where values of `LARGE` are summed under weights, and why: N positions need N |v|."""

TITLE = "Errors against float64, relative to its rms"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("inputs", lambda row: str(row["inputs"])),
    Column("output", lambda row: str(row["output"])),
    Column("fused max", lambda row: f"{row['fused_max']:.1e}"),
    Column("rms", lambda row: f"{row['fused_rms']:.1e}"),
    Column("unfused max", lambda row: f"{row['unfused_max']:.1e}"),
    Column("rms", lambda row: f"{row['unfused_rms']:.1e}"),
    Column("ratio", lambda row: f"{row['ratio']:.2f}" if row["unfused_rms"] or row["scaled"] else "-"),
    Column("", lambda row: "; ".join(_remarks(row))),
)


def run(options: Options, report: Report) -> None:
    """Failures: an rms error above twice the unfused one, a unit in the last place and what rounding explains;
    special values elsewhere."""
    for workload in each(select(options.only)):
        case = workload.cases["small" if options.small else "cpu"]
        with recorded(report.failing(workload.name)):
            report.add(*_rows(workload, case, options.device))
            report.add(*_scaled_rows(workload, options.device))
    for row in report.rows:
        if row["misplaced"]:
            report.failures.append(f"{row['program']}, {row['inputs']}: {row['output']}: {row['misplaced']}")
        elif not row["within"] and row["scaled"]:
            report.failures.append(f"{row['program']}, {row['inputs']} ({row['schedule']}): {row['wrong']}")
        elif not row["within"]:
            report.failures.append(
                f"{row['program']}, {row['inputs']}: {row['output']} has error {row['fused_rms']:.2e}, "
                f"{row['unfused_rms']:.2e} unfused ({row['schedule']})"
            )
    cancelling = sum(row["cancels"] for row in report.rows)
    plain = [row for row in report.rows if not row["scaled"]]
    better = sum(row["ratio"] < 1 for row in plain if row["unfused_rms"])
    report.summary.append(
        f"{len(plain)} (program, inputs, output); the fused error is the smaller one in {better}; "
        f"the unfused program cancels in {cancelling}"
    )
    others = [row for row in report.rows if row["scaled"]]
    strict = [row for row in others if not row["wrong"]]
    if strict:
        worst = max(strict, key=lambda row: float(row["ratio"]))
        report.summary.append(
            f"{len(others)} (program, magnitude, output), every schedule: {len(strict)} within the bound, the worst ratio "
            f"{worst['ratio']:.2f} ({worst['program']}, {worst['inputs']}, {worst['schedule']}); "
            f"{sum(row['within'] for row in others) - len(strict)} need headroom"
        )


def _rows(workload: Workload, case: Case, device: str) -> Iterator[dict[str, Any]]:
    kernel = eq.compile(workload.text(case), scalars=case.constants)
    count = MANY if case.name == "small" else FEW
    for kind, draws, plain_inputs in _input_sets(workload, case, device, count):
        rows = list(_measured(workload, case, kernel, kind, draws, plain_inputs))
        if count < MANY and plain_inputs is None and not all(row["within"] for row in rows):
            many = _input_sets(workload, case, device, MANY)
            rows = list(_measured(workload, case, kernel, *next(found for found in many if found[0] == kind)))
        yield from rows
    yield from _empty_rows(workload, case, device, kernel)


def _scaled_rows(workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """A row for every magnitude and output, of the worst schedule."""
    case = workload.cases["small"]
    kernels: list[eq.Kernel] = []
    for prefer in SCHEDULES:
        with suppress(ScheduleError):
            kernels.append(eq.compile(workload.text(case), scalars=case.constants, prefer=prefer))
    program = kernels[0].derived.program
    own, dtypes = workload.inputs(case), program_dtypes(program)
    generator = torch.Generator().manual_seed(zlib.crc32(workload.name.encode()))
    for magnitude in MAGNITUDES:
        inputs = {
            name: scaled(x, magnitude, generator) if workload.tensors[name].draw in DRAWN else x
            for name, x in own.items()
        }
        outputs = judge.expected(program, inputs, case.scalars, {}, dtypes)
        there = {name: x.to(device) for name, x in inputs.items()}
        found = {str(k.plan.schedule): as_tuple(k(**workload.arguments(case, there))) for k in kernels}
        for number, output in enumerate(outputs):
            ratios = {name: output.ratios(made[number].cpu()) for name, made in found.items()}
            worst = {name: float(ratio.max(initial=0.0)) for name, ratio in ratios.items()}
            schedule = max(worst, key=worst.__getitem__)
            wrong = output.wrong(found[schedule][number].cpu())
            accepted = HEADROOM.get(workload.name, "") if wrong and magnitude in LARGE else ""
            yield {
                "program": workload.name,
                "inputs": f"scale {magnitude}",
                "output": output.name,
                "schedule": schedule,
                **_relative(output.exact, found[schedule][number].cpu().double().numpy(), "fused"),
                **_relative(output.exact, output.unfused, "unfused"),
                "ratio": worst[schedule],
                "cancels": False,
                "within": not wrong or bool(accepted),
                "rounding_rms": 0.0,
                "misplaced": "",
                "scaled": True,
                "wrong": wrong,
                "accepted": accepted,
                "judged": output.judged / max(1, output.exact.size),
            }


def _relative(exact: np.ndarray, found: np.ndarray, name: str) -> dict[str, float]:
    """Greatest and rms relative error, position by position, where both are finite: magnitudes may be mixed."""
    both = np.isfinite(exact) & np.isfinite(found) & (np.abs(exact) > np.finfo(np.float32).tiny)
    errors = np.abs(found[both] - exact[both]) / np.abs(exact[both])
    return {
        f"{name}_max": float(errors.max(initial=0.0)),
        f"{name}_rms": float(np.sqrt(np.mean(np.square(errors)))) if errors.size else 0.0,
    }


def _measured(
    workload: Workload,
    case: Case,
    kernel: eq.Kernel,
    kind: str,
    draws: Sequence[Mapping[str, torch.Tensor]],
    plain_inputs: Mapping[str, torch.Tensor] | None,
) -> Iterator[dict[str, Any]]:
    """A row for every output."""
    names = [output.name for output in kernel.derived.program.outputs]
    dtypes = program_dtypes(kernel.derived.program)
    exact_tensors = {name for name, dtype in dtypes.items() if dtype in INTEGERS or dtype == "bool"}
    expressions = [output.expr for output in kernel.derived.program.outputs]
    masked = any(_is_mask(node, exact_tensors) for node in walk(*expressions))
    exact = _stacked(workload.run_exact(case, inputs) for inputs in draws)
    unfused = _stacked(workload.run_eager(case, inputs) for inputs in draws)
    results = [as_tuple(kernel(**workload.arguments(case, inputs))) for inputs in draws]
    fused = _stacked(results)
    ordinary: list[np.ndarray] | list[None] = [None] * len(names)
    if plain_inputs and masked:
        ordinary = _stacked([workload.run_exact(case, plain_inputs)])
    units = [torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0.0 for x in results[0]]
    for name, unit, expected, plain, found, beside in zip(
        names, units, exact, unfused, fused, ordinary, strict=True
    ):
        # Where the unfused program overflows in its own precision, the fused one may.
        allowed = np.where(_kinds(found) == _kinds(plain), found, _single(expected))
        if beside is not None:  # what a mask excludes is not read where a whole tile is masked
            unread = np.abs(found - beside) <= NEAR * np.nanmax(np.abs(beside), initial=0.0)
            allowed = np.where(unread & ~np.isfinite(expected), found, allowed)
        special = same_special(allowed, found, shown=1)
        errors = Error.of(expected, found), Error.of(expected, plain)
        measured = Measurement(kind, name, *errors, special)
        luck = 0.0
        if not measured.within(FACTOR, unit) and special:
            luck = _rounding(kernel, case, draws, names.index(name), expected)
        yield _row(workload.name, str(kernel.plan.schedule), measured, unit, luck)


def _is_mask(node: Expr, exact_tensors: Collection[str]) -> bool:
    """Whether a choice depends on positions, and on tensors that hold no special values, alone."""
    match node:
        case Call("where", (condition, _, _)):
            loads = [inner for inner in walk(condition) if isinstance(inner, Load)]
            reduces = any(isinstance(inner, Reduce) for inner in walk(condition))
            return not reduces and all(load.tensor in exact_tensors for load in loads)
    return False


def _rounding(
    kernel: eq.Kernel,
    case: Case,
    draws: Sequence[Mapping[str, torch.Tensor]],
    output: int,
    expected: np.ndarray,
) -> float:
    """The largest rms error of an output of the unfused program, every operation off by half a unit."""
    program = kernel.derived.program
    name = program.outputs[output].name
    dtypes = program_dtypes(program)
    runs = []
    for inputs in draws:
        tensors = {key: tensor.cpu() for key, tensor in inputs.items()}
        extents = bind(program, {key: tuple(t.shape) for key, t in tensors.items()}, {}, case.scalars)
        runs.append([run[name] for run in judge.disturbed(program, tensors, case.scalars, extents, dtypes)])
    # The runs are off by whole units, and errors grow with them.
    return max(Error.of(expected, np.stack(run)).rms for run in zip(*runs, strict=True)) / 2


def _empty_rows(workload: Workload, case: Case, device: str, kernel: eq.Kernel) -> Iterator[dict[str, Any]]:
    """Every reduced axis without positions, where its length is not declared and no index goes along it."""
    program = kernel.derived.program
    reduced = {node.axis for output in program.outputs for node in reductions(output.expr)}
    indexed = {spec.draw.split()[-1] for spec in workload.tensors.values()}
    alike = _of_one_dimension(program)
    for axis in (a for a in case.sizes if a in reduced - indexed - program.lengths.keys()):
        empty = replace(case, sizes={**case.sizes, **dict.fromkeys(alike.get(axis, {axis}), 0)})
        inputs = workload.inputs(empty, device=device)
        exact = as_tuple(reference(program, inputs, case.scalars))
        found = as_tuple(kernel(**workload.arguments(empty, inputs)))
        for output, expected, fused in zip(
            program.outputs, _stacked([exact]), _stacked([found]), strict=True
        ):
            errors = Error.of(expected, fused), Error.of(expected, expected)
            measured = Measurement(f"no {axis}", output.name, *errors, same_special(fused, expected, shown=1))
            yield _row(workload.name, str(kernel.plan.schedule), measured, FLOOR, 0.0)


def _of_one_dimension(program: Program) -> dict[str, set[str]]:
    """For every axis, those that index a dimension of a tensor that it indexes too: they have one length."""
    found: dict[tuple[str, int], set[str]] = {}
    for output in program.outputs:
        for node in walk(output.expr):
            if isinstance(node, Load):
                for at, index in enumerate(node.index):
                    if isinstance(index, Axis):
                        found.setdefault((node.tensor, at), set()).add(index.name)
    alike: dict[str, set[str]] = {}
    for names in found.values():
        for name in names:
            alike.setdefault(name, set()).update(names)
    return alike


def _input_sets(
    workload: Workload, case: Case, device: str, count: int
) -> Iterator[tuple[str, list[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]]:
    """The workload's own integers and slopes; its other tensors of every distribution, and with special values: then
    also the inputs without those."""
    own = workload.inputs(case, device=device)
    rng = np.random.default_rng(zlib.crc32(workload.name.encode()))
    drawn = {name: spec.draw for name, spec in workload.tensors.items()}
    real = {name: tensor for name, tensor in own.items() if drawn[name] in DRAWN}
    for kind, draw in distributions().items():
        sets = [
            {name: _as_drawn(drawn[name], draw(tuple(x.shape), rng)) for name, x in real.items()}
            for _ in range(count)
        ]
        yield kind, [{**own, **_tensors(arrays, own)} for arrays in sets], None
    normal = {name: x.cpu().double().numpy() for name, x in real.items()}
    for kind, arrays in special_sets(normal).items():
        yield kind, [{**own, **_tensors(arrays, own)}], own


def _as_drawn(draw: str, array: np.ndarray) -> np.ndarray:
    """Values of a distribution with the scale or the sign that the workload's own values have."""
    match draw:
        case "weight":
            return np.asarray(array / np.sqrt(array.shape[-1]))
        case "positive":
            return np.asarray(np.abs(array) + 0.1)
        case _:
            return array


def _tensors(arrays: Mapping[str, np.ndarray], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(like[name]) for name, array in arrays.items()}


def _stacked(results: Iterable[Sequence[torch.Tensor]]) -> list[np.ndarray]:
    """Every output in float64, the draws side by side."""
    return [
        np.stack([tensor.detach().cpu().double().numpy() for tensor in draws])
        for draws in zip(*results, strict=True)
    ]


def _single(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32).astype(np.float64)


def _kinds(array: np.ndarray) -> np.ndarray:
    """0 for a finite number, 1 and -1 for infinities, 2 for NaN."""
    return np.where(np.isnan(array), 2.0, np.where(np.isinf(array), np.sign(array), 0.0))


def _row(program: str, schedule: str, measured: Measurement, unit: float, luck: float) -> dict[str, Any]:
    """`unit`: an rms error that always passes; `luck`: what rounding alone makes, where it was asked."""
    fused, unfused = measured.fused, measured.unfused
    return {
        "program": program,
        "inputs": measured.distribution,
        "output": measured.output,
        "schedule": schedule,
        "fused_max": fused.max,
        "fused_rms": fused.rms,
        "unfused_max": unfused.max,
        "unfused_rms": unfused.rms,
        "ratio": fused.rms / unfused.rms if unfused.rms else float(fused.rms > 0),
        "cancels": measured.cancels(unit),
        "within": measured.within(FACTOR, unit) or (bool(measured.special) and fused.rms <= luck),
        "rounding_rms": luck,
        "misplaced": "" if measured.special else str(measured.special),
        "scaled": False,
        "wrong": "",
        "accepted": "",
    }


def _remarks(row: Mapping[str, Any]) -> list[str]:
    marks = (("cancels", "cancellation"), ("misplaced", "[red]special values[/]"))
    found = [text for key, text in marks if row[key]]
    if row["rounding_rms"] and row["within"]:
        found.append(
            f"over {FACTOR:g} times: lucky unfused run, rounding alone makes {row['rounding_rms']:.1e}"
        )
    if row["scaled"]:
        return (
            [f"needs headroom: {row['accepted']}"]
            if row["accepted"]
            else ["[red]out of range[/]"] * bool(row["wrong"])
        )
    return found if row["within"] or row["misplaced"] else [*found, f"[red]over {FACTOR:g} times[/]"]
