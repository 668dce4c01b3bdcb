"""`eqfuse bench operator`: every program as an operator of torch: `opcheck`, graphs for 20 lengths, `vmap` against a loop.

`opcheck` is torch's own check of an operator in full: schema, registration with autograd, fakes, AOT compilation with symbolic sizes.
It is run on tensors that require no grad, and on those of real numbers that do. The graphs are those of
`torch.compile(fullgraph=True, dynamic=True)` for 20 lengths of the longest axis, forward and backward. `torch.func.vmap` runs
over all tensors, and over the gradients by those of real numbers; beside it stands a loop of calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import eqfuse as eq
from bench.report import Column, Options, Report, each, one_line, recorded
from bench.workloads import Case, Workload, select
from eqfuse.differentiate.gradient import differentiable, real_outputs
from eqfuse.operator.content import names_text

TITLE = "Programs as operators of torch"
LENGTHS = 20
BATCH = 3
ROUNDING = 1e-4
"""What a batch may differ by from its members, relative to the greatest: sums in another order. A digit of the coarsest dtype
besides."""

COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("opcheck forward", lambda row: f"{row['forward']} of {row['forward_checks']}"),
    Column("backward", lambda row: f"{row['backward']} of {row['backward_checks']}"),
    Column("graphs", lambda row: f"{row['graphs']} for {LENGTHS} lengths"),
    Column("error", lambda row: f"{row['graph_error']:.0e}"),
    Column("vmap", lambda row: f"{row['vmap']:.0e}"),
    Column("of gradients", lambda row: "-" if row["vmap_of_gradients"] is None else f"{row['vmap_of_gradients']:.0e}"),
    Column("s", lambda row: f"{row['seconds']:.0f}"),
)  # fmt: skip


def run(options: Options, report: Report) -> None:
    """Failures: a check that fails, another graph for another length, and a batch that is not its members."""
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            row = checked(workload)
            report.add(row)
            report.failures += [f"{workload.name}: {problem}" for problem in row["problems"]]
    for what in ("forward", "backward"):
        whole = [row for row in report.rows if row[what] == row[f"{what}_checks"]]
        report.summary.append(f"opcheck {what}: {len(whole)} of {len(report.rows)} programs in full")
    one = [row for row in report.rows if row["graphs"] == 1]
    report.summary.append(f"one graph for {LENGTHS} lengths: {len(one)} of {len(report.rows)} programs")


@dataclass(frozen=True)
class Call:
    """A kernel and what it is called with, but for its tensors. `real` are the inputs that have a gradient."""

    kernel: eq.Kernel
    rest: Mapping[str, Any]
    real: tuple[str, ...]

    def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        found = self.kernel(**{**tensors, **self.rest})
        return found if isinstance(found, tuple) else (found,)

    def total(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A number that depends on every output of real numbers."""
        real = real_outputs(self.kernel.program)
        outputs = zip(self.kernel.program.outputs, self(tensors), strict=True)
        parts = [value.float().sin().sum() for output, value in outputs if output.name in real]
        return torch.stack(parts).sum()

    def gradients(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Of the total, by all real inputs."""
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        leaves = {name: given[name].requires_grad_() for name in self.real}
        return torch.autograd.grad(self.total(given), tuple(leaves.values()))


def checked(workload: Workload) -> dict[str, Any]:
    """All checks of one program."""
    started = time.perf_counter()
    case = workload.cases["small"]
    kernel = eq.compile(workload.source, scalars=case.constants, native="off")
    inputs = workload.inputs(case)
    rest = {name: value for name, value in workload.arguments(case, inputs).items() if name not in inputs}
    possible = differentiable(kernel.program) if real_outputs(kernel.program) else ()
    real = tuple(name for name in possible if name in inputs and inputs[name].is_floating_point())
    call = Call(kernel, rest, real)
    row: dict[str, Any] = {"program": workload.name, "problems": []}
    for name, tracked in (("forward", ()), ("backward", real)):
        results = _opcheck(call, inputs, tracked)
        row[f"{name}_checks"] = len(results)
        row[name] = sum(result == "SUCCESS" for result in results.values())
        row["problems"] += [
            f"opcheck {name}, {test}: {one_line(result)}"
            for test, result in results.items()
            if isinstance(result, Exception)
        ]
    row["graphs"], row["graph_error"] = _graphs(workload, case, call)
    row["vmap"], row["vmap_of_gradients"] = _batched(workload, case, call)
    if row["graphs"] != 1:
        row["problems"].append(f"{row['graphs']} graphs for {LENGTHS} lengths")
    kinds = [value.dtype for value in (*inputs.values(), *call(inputs)) if value.is_floating_point()]
    allowed = max(ROUNDING, *(torch.finfo(kind).eps for kind in kinds))
    for what in ("graph_error", "vmap", "vmap_of_gradients"):
        if row[what] is not None and not row[what] <= allowed:
            row["problems"].append(f"{what} is {row[what]:.1e}")
    return {**row, "seconds": time.perf_counter() - started}


def _opcheck(call: Call, inputs: Mapping[str, Tensor], tracked: tuple[str, ...]) -> dict[str, Any]:
    tensors = {name: value.detach().requires_grad_(name in tracked) for name, value in inputs.items()}
    scalars = {name: value for name, value in call.rest.items() if name != "sizes"}
    integers = {name: value for name, value in scalars.items() if isinstance(value, int)}
    reals = {name: value for name, value in scalars.items() if isinstance(value, float)}
    sizes: Mapping[str, int] = call.rest.get("sizes", {})
    names = names_text(list(tensors), list(integers), list(reals), list(sizes))
    numbers = [*integers.values(), *sizes.values()]
    arguments = (call.kernel.content, names, list(tensors.values()), numbers, list(reals.values()))
    found: dict[str, Any] = dict(opcheck(torch.ops.eqfuse.call.default, arguments, raise_exception=False))
    return {test: result for test, result in found.items() if not _is_of_torch(result)}


def _is_of_torch(result: object) -> bool:
    """Whether torch's check has no operators for float8, which it compares inputs with."""
    return isinstance(result, NotImplementedError) and "Float8" in str(result)


def lengths(case: Case, number: int) -> Case:
    """The case at another length of its longest axis, and of those that are as long."""
    longest = max(case.sizes.values())
    sizes = {axis: number if size == longest else size for axis, size in case.sizes.items()}
    return replace(case, sizes=sizes)


def _graphs(workload: Workload, case: Case, call: Call) -> tuple[int, float]:
    """How many graphs Dynamo makes, and the largest difference from plain calls, gradients included."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return call(tensors)

    compiled: Callable[..., Any] = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    through = replace_call(call, compiled)
    worst = 0.0
    for number in range(LENGTHS):
        inputs = workload.inputs(lengths(case, 24 + 3 * number), seed=number)
        if call.real:
            found, expected = through.gradients(inputs), call.gradients(inputs)
        else:
            found, expected = compiled(inputs), call(inputs)
        worst = max(worst, _difference(found, expected))
    torch._dynamo.reset()
    return counter.frame_count, worst


def replace_call(call: Call, function: Callable[..., Any]) -> Call:
    """The call, made through another function of its tensors."""

    class Through(Call):
        def __call__(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            return function(tensors)  # type: ignore[no-any-return]

    return Through(call.kernel, call.rest, call.real)


def _batched(workload: Workload, case: Case, call: Call) -> tuple[float, float | None]:
    """The largest difference between `vmap` and a loop, of outputs and of gradients."""
    members = [workload.inputs(case, seed=seed) for seed in range(BATCH)]
    batch = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    together: Any = torch.func.vmap(call)(batch)
    outputs = _difference(together, _stacked([call(member) for member in members]))
    if not call.real:
        return outputs, None

    def gradients(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        def total(*leaves: Tensor) -> Tensor:
            return call.total({**tensors, **dict(zip(call.real, leaves, strict=True))})

        places = tuple(range(len(call.real)))
        return torch.func.grad(total, places)(*(tensors[name] for name in call.real))  # type: ignore[no-any-return]

    found = torch.func.vmap(gradients)(batch)
    return outputs, _difference(found, _stacked([call.gradients(member) for member in members]))


def _stacked(members: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(parts) for parts in zip(*members, strict=True))


def _difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The greatest, relative to the greatest number."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        wide, exact = one.detach().double(), other.detach().double()
        scale = float(exact.abs().max()) or 1.0
        worst = max(worst, float((wide - exact).abs().max()) / scale)
    return worst
