"""A decoder trained for 200 steps by the back end and by torch.compile: the loss of every step, and seconds a step.

    python examples/training.py                                         on a GPU: 125M weights, bfloat16 products
    python examples/training.py --model tiny --batch 4 --length 32      on a CPU

Weights, batches and the order of both are the same; AdamW, weights in float32. The text is made: every token is one of two that
follow the token before it, so that a model learns. The exit status is 1 where the two curves part by more than `--tolerance`,
relative to the loss, as the mean over any 20 steps. Sums that a GPU makes in no fixed order, as those of an embedding's gradient, part
them too: `--twice` tells by how much torch.compile parts from itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench stands beside the examples

import eqfuse as eq
from bench.decoder import SHAPES, Decoder

WINDOW = 20
"""Steps that are averaged before curves are compared."""


def batches(vocabulary: int, batch: int, length: int, count: int) -> list[Tensor]:
    """Token ids, [batch, length + 1]: after each token one of two, by a fixed table and a coin."""
    draw = torch.Generator().manual_seed(1)
    table = torch.randint(0, vocabulary, (vocabulary, 2), generator=draw)
    found = []
    for _ in range(count):
        ids = [torch.randint(0, vocabulary, (batch,), generator=draw)]
        for coin in torch.randint(0, 2, (length, batch), generator=draw):
            ids.append(table[ids[-1], coin])
        found.append(torch.stack(ids, -1))
    return found


class Training(torch.nn.Module):
    """The loss of a batch."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.norm(self.model.hidden(ids[:, :-1]))
        logits = self.model.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


def trained(
    name: str, data: Sequence[Tensor], compiler: Callable[..., Any], device: str, rate: float
) -> tuple[list[float], float]:
    """The loss of every step, and the median seconds of one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Training(Decoder(SHAPES[name])).to(device)
    step = compiler(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    halves = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    losses: list[Tensor] = []
    seconds: list[float] = []
    for ids in data:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with halves:
            loss = step(ids.to(device))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return [float(loss) for loss in losses], sorted(seconds)[len(seconds) // 2]


def parted(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two curves part at most, relative, averaged over `WINDOW` steps."""
    count = min(WINDOW, len(one))
    first, second = (torch.tensor(losses).unfold(0, count, 1).mean(-1) for losses in (one, other))
    return float(((first - second).abs() / second).max())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="model_125m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--take", choices=("predicted", "always"), default="predicted")
    parser.add_argument("--native", choices=("background", "wait", "off"), default=None)
    parser.add_argument("--rest", choices=("inductor", "aot_eager"), default=None)
    parser.add_argument("--peer", choices=("inductor", "aot_eager", "eager"), default="inductor")
    parser.add_argument("--twice", action="store_true", help="runs the peer once more, beside itself")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = batches(SHAPES[given.model].vocabulary, given.batch, given.length, given.steps)
    options = {"take": given.take, "rest": given.rest, "native": given.native}
    ways: dict[str, Callable[..., Any]] = {
        f"torch.compile, {given.peer}": lambda model: torch.compile(model, backend=given.peer, dynamic=False),
        "eqfuse": lambda model: torch.compile(model, backend="eqfuse", dynamic=False, options=options),
    }
    if given.twice:
        ways[f"torch.compile, {given.peer}, again"] = ways[f"torch.compile, {given.peer}"]
    curves, times = [], []
    for way, compiler in ways.items():
        losses, seconds = trained(given.model, data, compiler, device, given.rate)
        curves.append(losses)
        times.append(seconds)
        shown = ", ".join(f"{losses[n]:.4f}" for n in range(0, given.steps, max(1, given.steps // 10)))
        print(f"{way}: {1e3 * seconds:.1f} ms a step; losses {shown}, {losses[-1]:.4f}", flush=True)
    print(eq.torch.report(measure=False))
    apart = parted(curves[1], curves[0])
    print(
        f"the curves part by {apart:.1e} at most, the time is {times[0] / times[1]:.2f} of {next(iter(ways))}"
    )
    if given.twice:
        print(f"the peer's two curves part by {parted(curves[2], curves[0]):.1e} at most")
    return int(not apart <= given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
