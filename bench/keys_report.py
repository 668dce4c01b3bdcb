"""`eqfuse bench keys`: reductions over the positions that a key selects, at some number of them and at twice that, beside torch.

Each program is called as a user does it; keys are uniform, or `skewed`: a quarter of all positions have one key. Sorting is part of each
call. torch adds to a tensor of zeros wherever that is (`index_add`, `scatter_reduce`), or runs the operator that it has. Errors are against
float64, relative to the greatest value. The bits of repeated calls on skewed keys are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, recorded
from bench.scans_report import summarise
from bench.timing import in_turn

TITLE = "Reductions by key"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("plan", lambda row: str(row["plan"])),
    Column("positions", lambda row: str(row["positions"])),
    Column("keys", lambda row: str(row["keys"])),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("2n / n", lambda row: f"{row['longer']:.2f}"),
    Column("skewed", lambda row: f"{row['skewed']:.3g}"),
    Column("torch, ms", lambda row: f"{row['torch_ms']:.3g}"),
    Column("torch / ms", lambda row: f"{row['torch_ms'] / row['ms']:.2f}"),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("same bits", lambda row: f"{row['same']} of {RUNS}"),
)
MOST_RATIO, MOST_ERROR = 2.5, 1e-4
RUNS = 100
"""Calls whose bits are compared."""
GROUPS = 16
"""Values of the key of "sums by two keys" that is no node."""

T = torch.Tensor
Values = Mapping[str, T]


@dataclass(frozen=True)
class ByKey:
    """A program, the axes of its tensors, and what torch computes; there are `positions` along e, `keys` along n, and `features` along d.
    A tensor is a "key", integers below the number of keys, or a "group", integers below `GROUPS`."""

    text: str
    tensors: Mapping[str, str]
    torch: Callable[[Values, int], T]
    positions: int = 1 << 16
    keys: int = 4096
    features: int = 64


def zeros(t: T, keys: int) -> T:
    return t.new_zeros((keys, *t.shape[1:]))


def messages(t: Values) -> T:
    return t["x"][t["src"]] * t["w"][:, None]


def extreme(t: T, key: T, keys: int) -> T:
    index = key if t.dim() == 1 else key[:, None].expand(t.shape)
    return torch.full_like(zeros(t, keys), -math.inf).scatter_reduce(0, index, t, "amax")


def attention(t: Values, keys: int) -> T:
    weights = (t["a"] - extreme(t["a"], t["dst"], keys)[t["dst"]]).exp()
    sums = zeros(weights, keys).index_add(0, t["dst"], weights)
    return zeros(t["x"], keys).index_add(0, t["dst"], t["x"][t["src"]] * (weights / sums[t["dst"]])[:, None])


def variance(t: Values, keys: int) -> T:
    def added(value: T) -> T:
        return zeros(value, keys).index_add(0, t["dst"], value)

    count = added(torch.ones_like(t["w"]))
    mean = added(t["w"]) / count
    return added((t["w"] - mean[t["dst"]]).square()) / count


EDGES = "src: i64[e]\ndst: i64[e]\n"
EMBEDDING = ByKey(
    "dst: i64[e]\ny[n,d] = sum[e](where(dst[e] == n, v[e,d], 0))",
    {"dst": "key", "v": "e,d"},
    lambda t, keys: torch.ops.aten.embedding_dense_backward(t["v"], t["dst"], keys, -1, False),
    positions=1 << 13,
    keys=32000,
    features=256,
)
OF_EDGES = {"x": "n,d", "w": "e", "src": "key", "dst": "key"}

PROGRAMS: dict[str, ByKey] = {
    "gradient of an embedding": EMBEDDING,
    "gradient of an embedding, wide": replace(EMBEDDING, positions=1 << 12, features=2048),
    "messages": ByKey(
        f"{EDGES}y[n,d] = sum[e](where(dst[e] == n, x[src[e],d] * w[e], 0))",
        OF_EDGES,
        lambda t, keys: zeros(t["x"], keys).index_add(0, t["dst"], messages(t)),
    ),
    "greatest message": ByKey(
        f"{EDGES}y[n,d] = max[e](where(dst[e] == n, x[src[e],d] * w[e], -inf))",
        OF_EDGES,
        lambda t, keys: extreme(messages(t), t["dst"], keys),
    ),
    "attention to neighbours": ByKey(
        f"{EDGES}m[n] = max[e](where(dst[e] == n, a[e], -inf))\np[e] = exp(a[e] - m[dst[e]])\n"
        "z[n] = sum[e](where(dst[e] == n, p[e], 0))\n"
        "y[n,d] = sum[e](where(dst[e] == n, p[e] / z[dst[e]] * x[src[e],d], 0))\nreturn y",
        {"x": "n,d", "a": "e", "src": "key", "dst": "key"},
        attention,
    ),
    "sums of numbers": ByKey(
        "dst: i64[e]\ny[n] = sum[e](where(dst[e] == n, w[e], 0))",
        {"dst": "key", "w": "e"},
        lambda t, keys: zeros(t["w"], keys).index_add(0, t["dst"], t["w"]),
        positions=1 << 20,
    ),
    "variance": ByKey(
        "dst: i64[e]\nc[n] = sum[e](where(dst[e] == n, 1, 0))\nm[n] = sum[e](where(dst[e] == n, w[e], 0)) / c[n]\n"
        "y[n] = sum[e](where(dst[e] == n, sq(w[e] - m[n]), 0)) / c[n]\nreturn y",
        {"dst": "key", "w": "e"},
        variance,
        positions=1 << 20,
    ),
    "sums by two keys": ByKey(
        "src: i64[e]\ndst: i64[e]\ny[m,n] = sum[e](where((src[e] == m) & (dst[e] == n), w[e], 0))",
        {"src": "group", "dst": "key", "w": "e"},
        lambda t, keys: (
            t["w"].new_zeros((GROUPS, keys)).index_put((t["src"], t["dst"]), t["w"], accumulate=True)
        ),
        positions=1 << 18,
    ),
    "rows of messages": ByKey(
        "dst: i64[e]\ny[h,n] = sum[e](where(dst[e] == n, u[h,e], 0))",
        {"dst": "key", "u": "h,e"},
        lambda t, keys: t["u"].new_zeros((t["u"].shape[0], keys)).index_add(1, t["dst"], t["u"]),
    ),
}


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, is wrong, or has other bits in another call."""
    for name in chosen_names(options.only, tuple(PROGRAMS)):
        with recorded(report.failing(name)):
            report.add(row := row_of(name, PROGRAMS[name], options))
            if row["same"] < RUNS:
                report.failures.append(f"{name}: {RUNS - row['same']} of {RUNS} calls gave other bits")
    summarise(report, "twice the positions", MOST_RATIO, MOST_ERROR)


def row_of(name: str, of: ByKey, options: Options) -> dict[str, Any]:
    """One program, called on fresh inputs."""
    on_gpu = options.device == "cuda"
    scale = (32 if options.small else 1) / (16 if on_gpu and not options.small else 1)
    positions, keys = int(of.positions / scale), int(of.keys / scale)
    torch.manual_seed(options.seed or 0)

    def drawn(count: int, skewed: bool = False) -> dict[str, T]:
        size = {"e": count, "n": keys, "d": of.features, "h": 8}

        def one(axes: str) -> T:
            if axes == "group":
                return torch.randint(GROUPS, (count,), device=options.device)
            if axes != "key":
                return torch.randn([size[axis] for axis in axes.split(",")], device=options.device)
            found = torch.randint(keys, (count,), device=options.device)
            # None is empty where there are enough.
            found[:keys] = torch.arange(min(keys, count), device=options.device)
            found[: count // 4 if skewed else 0] = 3
            return found[torch.randperm(count, device=options.device)]

        return {tensor: one(axes) for tensor, axes in of.tensors.items()}

    kernel: Any = eq.compile(of.text, native="wait")
    sizes = {"n": keys, "m": GROUPS} if "[m," in of.text else {"n": keys}
    calls: dict[str, Callable[[dict[str, T]], T]] = {
        "ms": lambda t: kernel(**t, sizes=sizes),
        "torch_ms": lambda t: of.torch(t, keys),
    }
    given = [drawn(positions) for _ in range(3)]
    row: dict[str, Any] = {"program": name, "text": of.text, "positions": positions, "keys": keys}
    calls["ms"](given[0])
    row |= in_turn(calls, given, options.device)
    by = "sorted" if "sorted positions" in str(kernel.certificate) else "as written"
    row["plan"] = f"{kernel.plan.schedule}, {by}"
    for what, others in (
        ("longer", [drawn(2 * positions) for _ in range(3)]),
        ("skewed", [drawn(positions, True) for _ in range(3)]),
    ):
        calls["ms"](others[0])
        row[what] = in_turn({"ms": calls["ms"]}, others, options.device)["ms"]
    row["longer"] /= row["ms"]
    values = drawn(positions, skewed=True)
    first = calls["ms"](values)
    row["same"] = sum(torch.equal(first, calls["ms"](values)) for _ in range(RUNS))
    values = drawn(positions)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}
    exact, found = of.torch(wide, keys), calls["ms"](values)
    differs = (found - exact).abs()[exact.isfinite()]
    row["error"] = float(differs.max() / exact[exact.isfinite()].abs().max())
    if not torch.equal(found.isfinite(), exact.isfinite()):
        row["error"] = math.inf
    return row
