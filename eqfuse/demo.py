"""`eqfuse demo`: two programs on real tensors, with what every stage of the compiler made of them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

import eqfuse as eq
from bench.measure import as_tuple, interleaved, worst_error
from bench.workloads import WORKLOADS, Workload

PROGRAMS = ("softmax", "causal_prefill")


def demo(console: Console) -> int:
    """Print both programs and their kernels; 1 where a kernel's certificate or result is wrong, else 0."""
    passed = [_show(WORKLOADS[name], console) for name in PROGRAMS]
    return 0 if all(passed) else 1


def _show(workload: Workload, console: Console) -> bool:
    case = workload.cases["cpu"]
    inputs = workload.inputs(case)
    kernel = eq.compile(workload.source, scalars=case.constants, target="cpu")
    result = as_tuple(kernel(**workload.arguments(case, inputs)))

    console.rule(workload.name)
    sizes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in inputs.items())
    _section(console, "program", f"{workload.source}\n\nfloat32 tensors {sizes}")
    _section(
        console,
        "derived merge: how the states of two parts of the axis become the state of both",
        kernel.merge,
    )
    console.print(_plans(kernel))
    _section(console, f"chosen loop nest ({kernel.plan.schedule})", kernel.loops)
    _section(console, "certificate", kernel.certificate)

    exact = workload.run_exact(case, inputs)
    error, unfused = worst_error(result, exact), worst_error(workload.run_eager(case, inputs), exact)
    times = interleaved(
        {
            "unfused": lambda values: workload.run_eager(case, values),
            "fused": lambda values: kernel(**workload.arguments(case, values)),
        },
        lambda index: workload.inputs(case, seed=index),
        budget_seconds=4.0,
    )
    slow, fast = times.median("unfused"), times.median("fused")
    _section(
        console,
        "against the unfused program in torch",
        f"time   {1e3 * fast:.1f} ms, {1e3 * slow:.1f} ms unfused: {slow / fast:.2f}x (medians of interleaved runs)\n"
        f"error  {error:.1e}, {unfused:.1e} unfused (relative, against float64)",
    )
    return bool(kernel.certificate.ok) and error <= 2 * unfused


def _section(console: Console, title: str, content: object) -> None:
    console.print(f"\n[bold]{title}[/]")
    console.print(Text(str(content)), soft_wrap=True)


def _plans(kernel: eq.Kernel) -> Table:
    table = Table(title="plans, by predicted cost", title_justify="left")
    for heading in ("schedule", "predicted ms", "made of", ""):
        table.add_column(heading)
    for plan in kernel.plans():
        terms = plan.cost.terms if plan.cost else ()
        parts = ", ".join(f"{term.name} {1e3 * term.seconds:.3f}" for term in terms if term.seconds > 0)
        chosen = "chosen" if plan.schedule == kernel.plan.schedule else ""
        table.add_row(plan.schedule, f"{1e3 * plan.cost.seconds:.3f}" if plan.cost else "-", parts, chosen)
    return table
