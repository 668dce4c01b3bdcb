"""`eqfuse demo`: two programs on real tensors, with what was derived of them; `--full`: with what every stage made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import eqfuse as eq
from eqfuse.measure import as_tuple, interleaved, worst_error

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A program, the shapes of its tensors, its scalars, and what it is in torch without being fused."""

    name: str
    source: str
    shapes: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, float]
    unfused: Callable[..., torch.Tensor]

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Normal float32 values."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}


def softmax(x: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def causal_attention(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, scale: float) -> torch.Tensor:
    scores = Q @ K.transpose(-1, -2) * scale
    i, j = torch.arange(Q.shape[-2])[:, None], torch.arange(K.shape[-2])
    return softmax(torch.where(j <= i, scores, -torch.inf)) @ V


SOFTMAX = """
e[r,c] = exp(x[r,c] - max[c](x[r,c]))
y[r,c] = e[r,c] / sum[c](e[r,c])
"""

CAUSAL_ATTENTION = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""

EXAMPLES = (
    Example("softmax", SOFTMAX, {"x": (1024, 8192)}, {}, softmax),
    Example(
        "causal attention",
        CAUSAL_ATTENTION,
        dict.fromkeys("QKV", (1, 8, 1024, 64)),
        {"scale": 0.125},
        causal_attention,
    ),
)


def demo(console: Console, full: bool = False) -> int:
    """Print both programs and their kernels; 1 where a kernel's certificate or result is wrong, else 0."""
    passed = [_show(example, console, full) for example in EXAMPLES]
    if not full:
        console.print("\nevery stage: eqfuse demo --full; of a program of yours: eqfuse explain FILE")
    return 0 if all(passed) else 1


def _show(example: Example, console: Console, full: bool) -> bool:
    tensors, scalars = example.tensors(0), example.scalars
    kernel = eq.compile(example.source, target="cpu")

    def run(values: Tensors) -> object:
        given: dict[str, Any] = {**values, **scalars}
        return kernel(**given)

    result = as_tuple(run(tensors))

    console.rule(example.name)
    sizes = "float32 tensors " + ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.items())
    merge, certificate = str(kernel.merge), str(kernel.certificate)
    told = "derived merge: how the states of two parts of the axis become the state of both"
    if full:
        _section(console, "program", f"{example.source.strip()}\n\n{sizes}")
        _section(console, told, merge)
        console.print(_plans(kernel))
        _section(console, f"chosen loop nest ({kernel.plan.schedule})", kernel.loops)
        _section(console, "certificate", certificate)
        _section(console, "against the unfused program in torch", "")
    else:
        console.print(Text(f"{example.source.strip()}\n{sizes}"), soft_wrap=True)
        console.print(Text(f"{told}\n{kernel.merge.of_parts}"), soft_wrap=True)
        others = [plan.schedule for plan in kernel.plans() if plan.schedule != kernel.plan.schedule]
        console.print(f"plan   {kernel.plan.schedule}, priced before {', '.join(others)}")
        console.print(certificate.splitlines()[0], markup=False)

    exact = as_tuple(example.unfused(**{n: x.double() for n, x in tensors.items()}, **scalars))
    error = worst_error(result, exact)
    unfused = worst_error(as_tuple(example.unfused(**tensors, **scalars)), exact)
    times = interleaved(
        {
            "unfused": lambda values: example.unfused(**values, **scalars),
            "fused": run,
        },
        example.tensors,
        budget_seconds=4.0,
    )
    slow, fast = times.median("unfused"), times.median("fused")
    console.print(
        f"time   {1e3 * fast:.1f} ms, {1e3 * slow:.1f} ms unfused in torch: {slow / fast:.2f}x (medians of interleaved runs)\n"
        f"error  {error:.1e}, {unfused:.1e} unfused (relative, against float64)"
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
