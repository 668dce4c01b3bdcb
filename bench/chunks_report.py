"""`eqfuse bench chunks`: attention by running sums in bf16, forward and backward, beside flash-linear-attention where it is installed.

Each program is called as a user does, on tensors [batch, position, head, feature], at the six shapes of flash-linear-attention's own benchmark
(`--small` or on a CPU: one short one). Errors are against a float64 loop over positions, of the first row and head, relative to the greatest value.
Its kernels choose among many configurations at the first call: `--examples N` leaves them N each, drawn at random, where the time is short.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, geometric_mean, recorded
from bench.scans_report import recurrent, shown, with_gradients
from bench.timing import in_turn

T = torch.Tensor
Tensors = dict[str, T]
TITLE = "Attention by running sums, in chunks"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("batch, positions, heads, features", lambda row: ", ".join(map(str, row["shape"]))),
    Column("plan", lambda row: str(row["plan"])),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("fla / ms", lambda row: shown(_ratio(row, "ms"), ".2f")),
    Column("with backward, ms", lambda row: f"{row['back_ms']:.3g}"),
    Column("fla / ms", lambda row: shown(_ratio(row, "back_ms"), ".2f")),
    Column("error", lambda row: f"{row['error']:.0e}"),
    Column("proved", lambda row: "yes" if row["proved"] else "NO"),
)
SHAPES = (
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 2048, 32, 256),
    (8, 1024, 8, 64),
)
SMALL = ((2, 512, 2, 64),)
MOST_ERROR = 2e-2
"""Of what bf16 rounds once or twice."""

SUM = "y: bf16[b, j, h, e]\nj: axis[k]\n"
RUNNING = SUM + "l: axis[k]\na[b,j,h] = sum[l](where(l <= j, g[b,l,h], 0))\n"
SCORES = "sum[d](q[b,j,h,d] * r[b,k,h,d])"


@dataclass(frozen=True)
class Case:
    """A program, what it reads beside q, r and v, the logarithm of its decay at each position, and what flash-linear-attention calls it."""

    text: str
    beside: Callable[[int, int, int], Tensors]
    gates: Callable[[Tensors], T]
    peer: Callable[[Tensors], T]


def _slopes(heads: int) -> T:
    """RetNet's decays, as positive rates."""
    return -torch.log1p(-torch.exp2(-5.0 - torch.arange(heads) * 8 / heads))


def _linear(t: Tensors) -> T:
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    return chunk_linear_attn(t["q"], t["r"], t["v"], scale=1.0, normalize=False)[0]  # type: ignore[no-any-return]


def _gated(t: Tensors) -> T:
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    own = {"g": t["g"]} if "g" in t else {"g_gamma": -t["s"].detach()}
    return chunk_simple_gla(t["q"], t["r"], t["v"], scale=1.0, **own)[0]  # type: ignore[no-any-return]


CASES = {
    "linear attention": Case(
        SUM + f"y[b,j,h,e] = sum[k](where(k <= j, {SCORES} * v[b,k,h,e], 0))",
        lambda batch, positions, heads: {},
        lambda t: torch.zeros(t["q"].shape[:3], device=t["q"].device),
        _linear,
    ),
    "RetNet": Case(
        SUM + f"y[b,j,h,e] = sum[k](where(k <= j, {SCORES} * exp((k - j) * s[h]) * v[b,k,h,e], 0))",
        lambda batch, positions, heads: {"s": _slopes(heads)},
        lambda t: -t["s"].expand(t["q"].shape[:3]),
        _gated,
    ),
    "gates of each head": Case(
        RUNNING + f"y[b,j,h,e] = sum[k](where(k <= j, {SCORES} * exp(a[b,j,h] - a[b,k,h]) * v[b,k,h,e], 0))",
        lambda batch, positions, heads: {"g": F.logsigmoid(torch.randn(batch, positions, heads)) / 16},
        lambda t: t["g"],
        _gated,
    ),
}


def _ratio(row: Any, what: str) -> float | None:
    return row[f"peer_{what}"] / row[what] if row.get(f"peer_{what}") else None


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, is not proved, or is wrong."""
    on_gpu = options.device == "cuda"
    if options.examples:
        _fewer_configurations(options.examples, options.seed or 0)
    for name in chosen_names(options.only, tuple(CASES)):
        for shape in SHAPES if on_gpu and not options.small else SMALL:
            with recorded(report.failing(f"{name} {shape}")):
                report.add(row_of(name, shape, options))
    for row in report.rows:
        if not row["proved"]:
            report.failures.append(f"{row['program']} {row['shape']}: its derivation does not hold")
        if row["error"] > MOST_ERROR:
            report.failures.append(f"{row['program']} {row['shape']}: error {row['error']:.1e}")
        if row.get("peer"):
            report.summary.append(f"{row['program']} {row['shape']}: {row['peer']}")
    for name in CASES:
        for what, said in (("ms", "forward"), ("back_ms", "with backward")):
            found = [_ratio(row, what) for row in report.rows if row["program"] == name]
            ratios = [ratio for ratio in found if ratio is not None]
            if ratios:
                mean = geometric_mean(ratios)
                report.summary.append(
                    f"{name}, {said}: flash-linear-attention takes {mean:.2f} of our time (geometric mean of {len(ratios)})"
                )


def _fewer_configurations(count: int, seed: int) -> None:
    """Triton's tuner tries that many configurations of each kernel, of those with 4 or 8 warps and 2 or 3 stages where there are some."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        usual = [c for c in configs if c.num_warps in (4, 8) and c.num_stages in (2, 3)] or configs
        if len(configs) > count:
            configs = random.Random(seed).sample(usual, min(count, len(usual)))
        original(self, fn, names, configs, *args, **kwargs)

    autotuner.Autotuner.__init__ = init


def row_of(name: str, shape: tuple[int, int, int, int], options: Options) -> dict[str, Any]:
    case, (batch, positions, heads, features) = CASES[name], shape
    torch.manual_seed(options.seed or 0)

    def drawn() -> Tensors:
        sizes = (batch, positions, heads, features)
        scales = {"q": features**-0.5, "r": 1.0, "v": 1.0}
        made = {n: scale * torch.randn(sizes, device=options.device) for n, scale in scales.items()}
        made = {n: t.bfloat16() for n, t in made.items()} | case.beside(batch, positions, heads)
        return {n: t.to(options.device or "cpu") for n, t in made.items()}

    kernel: Any = eq.compile(case.text, native="wait")
    given = [drawn() for _ in range(2)]
    row: dict[str, Any] = {"program": name, "shape": shape, "text": case.text}
    calls: dict[str, Callable[[Tensors], T]] = {"ms": lambda t: kernel(**t)}
    if options.device == "cuda":
        try:
            case.peer(given[0])
            calls["peer_ms"] = case.peer
        except ImportError as error:
            row["peer"] = f"no flash-linear-attention: {error}"
    found = kernel(**given[0])
    row |= in_turn(calls, given, options.device)
    row["plan"], row["proved"] = kernel.plan.schedule, bool(kernel.derivation.check())
    first = {n: t[:1, :, 0].double() for n, t in given[0].items() if n in "qrv"}
    exact = recurrent(first["q"], first["r"], first["v"], case.gates(given[0])[:1, :, 0].double())
    row["error"] = float((found[:1, :, 0].double() - exact).abs().max() / exact.abs().max())
    backward = {
        f"{'peer_' if what == 'peer_ms' else ''}back_ms": with_gradients(call, but=("s",))
        for what, call in calls.items()
    }
    try:
        for call in list(backward.values())[1:]:
            call(given[0])
    except RuntimeError as error:  # a peer that refuses its own backward for this version of Triton
        row["peer"] = str(error).splitlines()[0]
        del backward["peer_back_ms"]
    return row | in_turn(backward, given, options.device)
