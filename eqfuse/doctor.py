"""`eqfuse doctor`: versions, devices, and which ways of running a kernel work on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import eqfuse as eq
from eqfuse.environment import environment
from eqfuse.extract import machine
from eqfuse.extract.machine import compiler
from eqfuse.measure import as_tuple
from eqfuse.tile.native import rates
from eqfuse.tile.native.nodes import NotNative

PROGRAM = "m[i] = max[j](x[i,j])\ns[i] = sum[j](exp(x[i,j] - m[i]))"


def doctor(console: Console, *, measure: bool = False) -> int:
    """Print the findings; 1 where the CPU cannot run and verify a kernel, else 0. With `measure` the CPU's rates are measured
    first and kept. Raises EqfuseError where they cannot be."""
    if measure:
        _measure()
    facts = Table(title="environment", title_justify="left", show_header=False)
    for name, value in environment().items():
        facts.add_row(name, str(value) if value is not None else "none")
    facts.add_row("C++ compiler", shlex.join(compiler() or ()) or "none")
    console.print(facts)
    console.print(_rates())

    checks = Table(title="what works", title_justify="left", show_header=False)
    problems = {name: _problem(check) for name, check in CHECKS.items()}
    for name, problem in problems.items():
        checks.add_row(name, "[green]yes[/]" if not problem else "no", problem)
    console.print(checks)
    return 1 if problems[CPU] else 0


def _measure() -> None:
    try:
        machine.keep(rates.measure())
    except NotNative as why:
        raise eq.EqfuseError(
            f"nothing is measured: {why}", hint="install a C++ compiler, or name one in $CXX"
        ) from None
    except OSError as why:
        raise eq.EqfuseError(f"what is measured cannot be kept: {why}", hint="see $XDG_CACHE_HOME") from None


def _rates() -> Table:
    """What the cost model takes the CPU to be."""
    found = machine.measured()
    how = "measured" if found else "assumed of its cores and vectors; --measure measures it"
    table = Table(title=f"the CPU: {how}", title_justify="left", show_header=False)
    shown = found or machine.assumed()
    for level, size in sorted(machine.cache_levels().items()):
        table.add_row(f"level {level} cache", f"{size >> 10} KB")
    table.add_row("lanes of float32", str(machine.lanes()))
    for name, rate, unit in (
        ("copies in memory", shown.bandwidth, "GB/s"),
        ("sums in second-level caches", shown.cache_bandwidth, "GB/s"),
        ("products of matrices", shown.matrix, "GFLOP/s"),
        ("sums and products of vectors", shown.elementwise, "GFLOP/s"),
        ("exponentials", shown.special, "10^9/s"),
    ):
        table.add_row(name, f"{rate / 1e9:.1f} {unit}")
    table.add_row("a call that wakes all threads", f"{1e6 * shown.launch:.1f} us")
    table.add_row("an operation of torch", f"{1e6 * shown.step:.1f} us")
    return table


def _problem(check: Callable[[], str]) -> str:
    """What stands against a check, in one line; empty where it passed."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is what does not work here)
        first, *_ = str(error).strip().splitlines() or ["no message"]
        return first if isinstance(error, eq.EqfuseError) else f"{type(error).__name__}: {first}"


def _cpu() -> str:
    kernel = eq.compile(PROGRAM, target="cpu")
    x = torch.randn(7, 33)
    value = as_tuple(kernel(x=x))[-1]
    right = torch.allclose(value, torch.exp(x - x.amax(1, keepdim=True)).sum(1))
    return "" if right and kernel.certificate.ok else "the kernel's result is wrong"


def _interpreter() -> str:
    from eqfuse.tile.triton.launch import interpret

    x = torch.randn(7, 33)
    kernel = eq.compile(PROGRAM, target="sm_90")
    value = as_tuple(interpret(kernel.triton, kernel.name, x=x))[-1]
    return (
        "" if torch.allclose(value, torch.exp(x - x.amax(1, keepdim=True)).sum(1)) else "the result is wrong"
    )


def _ahead_of_time(target: str) -> Callable[[], str]:
    def check() -> str:
        from eqfuse.tile.triton.aot import compile_for

        compile_for(eq.compile(PROGRAM, target=target).triton, target)
        return ""

    return check


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    x = torch.randn(7, 33, device="cuda")
    value = as_tuple(eq.compile(PROGRAM)(x=x))[-1]
    return (
        ""
        if torch.allclose(value, torch.exp(x - x.amax(1, keepdim=True)).sum(1), atol=1e-5)
        else "wrong result"
    )


def _cpp() -> str:
    kernel = eq.compile(PROGRAM, target="cpu", verify=False, native="wait")
    x = torch.randn(7, 33)
    right = torch.allclose(as_tuple(kernel(x=x))[-1], torch.exp(x - x.amax(1, keepdim=True)).sum(1))
    if kernel.plan.code != "C++":
        return f"they run as {kernel.plan.code}"
    return "" if right else "the result is wrong"


CPU = "kernels on the CPU, verified"
CHECKS: dict[str, Callable[[], str]] = {
    CPU: _cpu,
    "kernels on the GPU": _gpu,
    "Triton's interpreter": _interpreter,
    "compiling for sm_90 (H100, H200)": _ahead_of_time("sm_90"),
    "compiling for gfx942 (MI300)": _ahead_of_time("gfx942"),
    "kernels on the CPU as C++": _cpp,
}
