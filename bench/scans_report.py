"""`eqfuse bench scans`: prefixes and recurrences, at some length and at twice that, beside torch.

Each program is called as a user does it. Times at n and 2 n say whether they are linear. torch computes what a person would write: its own
running operators, and products with a masked matrix where it has none. Errors are against float64, relative to the greatest value, at 100,000
positions of one row (`--small`: 2,000), where what is exact is a loop over positions if torch has no operator for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import eqfuse as eq
from bench.algebra_report import shaped
from bench.report import Column, Options, Report, chosen_names, geometric_mean, recorded
from bench.timing import in_turn, seconds_of
from eqfuse.terms.parser import parse

TITLE = "Prefixes and recurrences"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("plan", lambda row: str(row["plan"])),
    Column("n", lambda row: str(row["length"])),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("2n / n", lambda row: f"{row['longer']:.2f}"),
    Column("torch, ms", lambda row: f"{row['torch_ms']:.3g}"),
    Column("torch / ms", lambda row: f"{row['torch_ms'] / row['ms']:.2f}"),
    Column("backward, ms", lambda row: shown(row["back_ms"], ".3g")),
    Column("2n / n", lambda row: shown(row["back_longer"], ".2f")),
    Column(
        "torch / ms", lambda row: shown(row["torch_back_ms"] and row["torch_back_ms"] / row["back_ms"], ".2f")
    ),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("proved", lambda row: "yes" if row["proved"] else "NO"),
)
LONG, MOST_RATIO, MOST_ERROR = 100_000, 2.2, 1e-4
FEATURES = 64

WINDOW = 64
LONG_CALL = 0.5
"""Seconds of a call that is timed once."""

T = torch.Tensor
Values = Mapping[str, T]


@dataclass(frozen=True)
class Scan:
    """A program over rows of some length, what torch computes at that length, and what is exact at any; `rows` is how many there are,
    and `scaled` by what inputs are multiplied."""

    text: str
    torch: Callable[[Values], T]
    length: int = 4096
    rows: int = 256
    exact: Callable[[Values], T] | None = None
    scaled: Mapping[str, float] | None = None
    columns: str = "k"


def masked(q: T, r: T, decay: T | None = None) -> T:
    """The products of queries with the keys up to each of them."""
    scores = q @ r.mT
    return (scores if decay is None else scores * decay).tril()


def decays(gates: T) -> T:
    """exp(a[j] - a[k]) of running sums a."""
    a = gates.cumsum(1)
    return torch.exp((a[:, :, None] - a[:, None]).tril())


def recurrent(q: T, r: T, v: T, gates: T | None = None) -> T:
    """The state after each position, times its query."""
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], dtype=q.dtype, device=q.device)
    found = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    for at in range(q.shape[1]):
        if gates is not None:
            state *= torch.exp(gates[:, at, :, None] if gates.dim() == 3 else gates[:, at, None, None])
        state += r[:, at, :, None] * v[:, at, None]
        found[:, at] = (q[:, at, None] @ state)[:, 0]
    return found


def running(x: T, w: T, steps: T) -> T:
    """h = steps h + w x, after each position."""
    state = torch.zeros_like(x[:, 0])
    found = []
    for at in range(x.shape[1]):
        state = steps[:, at] * state + w[:, at] * x[:, at]
        found.append(state)
    return torch.stack(found, 1)


def longest(t: Values) -> T:
    """y = max(y + w, x), after each position."""
    state = torch.full_like(t["x"][:, 0], -math.inf)
    found = []
    for at in range(t["x"].shape[1]):
        state = torch.maximum(state + t["w"][:, at], t["x"][:, at])
        found.append(state)
    return torch.stack(found, 1)


def twice_running(t: Values) -> T:
    """Of two values before: y = w y' / 2 - y'' / 4 + x."""
    h = g = torch.zeros_like(t["x"][:, 0])
    found = []
    for at in range(t["x"].shape[1]):
        h, g = t["w"][:, at].sigmoid() * h / 2 - g / 4 + t["x"][:, at], h
        found.append(h)
    return torch.stack(found, 1)


def windows(x: T, fill: float) -> T:
    """The last positions up to each one."""
    return torch.nn.functional.pad(x, (WINDOW - 1, 0), value=fill).unfold(1, WINDOW, 1)


def counts(x: T) -> T:
    return torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)


def variance(t: Values) -> T:
    mean = t["x"].cumsum(1) / counts(t["x"])
    return (t["x"] * t["x"]).cumsum(1) / counts(t["x"]) - mean * mean


def pooled(t: Values) -> T:
    top = torch.logcumsumexp(t["x"], 1)
    return torch.exp(torch.logcumsumexp(t["x"] + t["w"].abs().log(), 1) - top)


def moving(t: Values) -> T:
    n = t["x"].shape[1]
    at = torch.arange(n, dtype=t["x"].dtype, device=t["x"].device)
    return t["x"] @ torch.exp((at[None] - at[:, None]) * 0.1).triu() if n <= 1 << 14 else moving_exact(t)


def moving_exact(t: Values) -> T:
    return running(t["x"], torch.ones_like(t["x"]), torch.full_like(t["x"], math.exp(-0.1)))


def normalised(t: Values) -> T:
    weights = masked(t["q"].square(), t["r"].square())
    return weights @ t["v"] / weights.sum(2, keepdim=True)


def normalised_exact(t: Values) -> T:
    q, r = t["q"].square(), t["r"].square()
    return recurrent(q, r, t["v"]) / recurrent(q, r, torch.ones_like(t["v"][:, :, :1]))


def lstm(t: Values) -> T:
    """The state after each position, of which gates are read at the next one."""
    h = c = torch.zeros_like(t["xf"][:, 0])
    found = []
    for at in range(t["xf"].shape[1]):
        f, u, o, g = (h @ t["w" + gate].mT + t["x" + gate][:, at] for gate in "fuog")
        c = f.sigmoid() * c + u.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        found.append(h)
    return torch.stack(found, 1)


def gru(t: Values) -> T:
    h, found = torch.zeros_like(t["xz"][:, 0]), []
    for at in range(t["xz"].shape[1]):
        z = (h @ t["wz"].mT + t["xz"][:, at]).sigmoid()
        reset = (h @ t["wr"].mT + t["xr"][:, at]).sigmoid()
        new = (reset * (h @ t["wn"].mT) + t["xn"][:, at]).tanh()
        h = new + z * (h - new)
        found.append(h)
    return torch.stack(found, 1)


def delta_rule(t: Values) -> T:
    """The state after each position, times its query: gates of each row, or of each feature."""
    q, r, v, gates = t["q"], t["r"], t["v"], torch.exp(-t["g"].abs())
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    found = []
    for at in range(q.shape[1]):
        state = state * (gates[:, at, :, None] if gates.dim() == 3 else gates[:, at, None, None])
        key = r[:, at, :, None]
        new = t["b"][:, at, None, None].sigmoid() * (v[:, at, None] - key.mT @ state)
        state = state + key * new
        found.append((q[:, at, None] @ state)[:, 0])
    return torch.stack(found, 1)


PREFIX = "j: axis[k]\ny[i,j] = "
GATES = "j: axis[k]\nl: axis[k]\n"
ATTENTION: dict[str, Any] = {"length": 2048, "rows": 4, "scaled": {"g": 0.1}}

CELL: dict[str, Any] = {
    "length": 512,
    "rows": 32,
    "scaled": dict.fromkeys(("wf", "wu", "wo", "wg", "wz", "wr", "wn"), 0.1),
}
DELTA: dict[str, Any] = {"length": 512, "rows": 4, "scaled": {"g": 0.1, "r": 0.1}}
BEFORE = "sum[e](w{0}[d,e] * y[i,k-1,e]) + x{0}[i,k,d]"
ERASED = (
    "h[i,k,d,e] = p[i,k,d,e] + sigmoid(b[i,k]) * r[i,k,d] * (v[i,k,e] - sum[d_2](r[i,k,d_2] * p[i,k,d_2,e]))\n"
    "y[i,k,e] = sum[d](q[i,k,d] * h[i,k,d,e])\nreturn y"
)

PROGRAMS: dict[str, Scan] = {
    "cumsum": Scan(f"{PREFIX}sum[k](where(k <= j, x[i,k], 0))", lambda t: t["x"].cumsum(1)),
    "cumsum, first axis": Scan(
        "i: axis[k]\ny[i,j] = sum[k](where(k <= i, x[k,j], 0))", lambda t: t["x"].cumsum(0), columns="j"
    ),
    "cumsum, one row": Scan(
        f"{PREFIX}sum[k](where(k <= j, x[i,k], 0))", lambda t: t["x"].cumsum(1), length=1 << 20, rows=1
    ),
    "cumsum from the end": Scan(
        f"{PREFIX}sum[k](where(k >= j, x[i,k], 0))", lambda t: t["x"].flip(1).cumsum(1).flip(1)
    ),
    "cumsum before": Scan(f"{PREFIX}sum[k](where(k < j, x[i,k], 0))", lambda t: t["x"].cumsum(1) - t["x"]),
    "cumprod": Scan(
        f"{PREFIX}prod[k](where(k <= j, exp(x[i,k]), 1))",
        lambda t: t["x"].exp().cumprod(1),
        scaled={"x": 1e-3},
    ),
    "cummax": Scan(f"{PREFIX}max[k](where(k <= j, x[i,k], -inf))", lambda t: t["x"].cummax(1).values),
    "place of the maximum": Scan(
        f"{PREFIX}argmax[k](where(k <= j, x[i,k], -inf))", lambda t: t["x"].cummax(1).indices
    ),
    "logcumsumexp": Scan(
        f"{PREFIX}logsumexp[k](where(k <= j, x[i,k], -inf))", lambda t: t["x"].logcumsumexp(1)
    ),
    "running mean": Scan(
        f"{PREFIX}sum[k](where(k <= j, x[i,k], 0)) / (j + 1)", lambda t: t["x"].cumsum(1) / counts(t["x"])
    ),
    "running variance": Scan(
        "j: axis[k]\nm[i,j] = sum[k](where(k <= j, x[i,k], 0)) / (j + 1)\n"
        "y[i,j] = sum[k](where(k <= j, sq(x[i,k] - m[i,j]), 0)) / (j + 1)",
        variance,
    ),
    "softmax pooling": Scan(
        "j: axis[k]\ns[i,j,k] = where(k <= j, x[i,k], -inf)\nm[i,j] = max[k](s[i,j,k])\n"
        "p[i,j,k] = exp(s[i,j,k] - m[i,j])\ny[i,j] = sum[k](p[i,j,k] * abs(w[i,k])) / sum[k](p[i,j,k])",
        pooled,
    ),
    "cumsum of a softmax": Scan(
        "j: axis[k]\nm[i] = max[k](x[i,k])\nz[i] = sum[k](exp(x[i,k] - m[i]))\n"
        "y[i,j] = sum[k](where(k <= j, exp(x[i,k] - m[i]) / z[i], 0))",
        lambda t: t["x"].softmax(1).cumsum(1),
    ),
    "exponential average": Scan(
        f"{PREFIX}sum[k](where(k <= j, x[i,k] * exp((k - j) * 0.1), 0))", moving, exact=moving_exact
    ),
    "h = exp(-|w|) h + x": Scan(
        f"{GATES}a[i,j] = sum[l](where(l <= j, -abs(w[i,l]), 0))\n"
        "y[i,j] = sum[k](where(k <= j, x[i,k] * exp(a[i,j] - a[i,k]), 0))",
        lambda t: (decays(-t["w"].abs()) @ t["x"][..., None])[..., 0],
        length=1024,
        exact=lambda t: running(t["x"], torch.ones_like(t["x"]), torch.exp(-t["w"].abs())),
    ),
    "y = sigmoid(w) y + x": Scan(
        "y[i,k] = sigmoid(w[i,k]) * y[i,k-1] + x[i,k]",
        lambda t: running(t["x"], torch.ones_like(t["x"]), t["w"].sigmoid()),
        length=1024,
    ),
    "of two values before": Scan(
        "y[i,k] = sigmoid(w[i,k]) * y[i,k-1] / 2 - y[i,k-2] / 4 + x[i,k]", twice_running, length=1024
    ),
    "longest path, y = max(y + w, x)": Scan("y[i,k] = max(y[i,k-1] + w[i,k], x[i,k])", longest, length=1024),
    "sum of a window": Scan(
        f"{PREFIX}sum[k <= j, k > j - {WINDOW}](x[i,k])", lambda t: windows(t["x"], 0).sum(2)
    ),
    "maximum of a window": Scan(
        f"{PREFIX}max[k <= j, k > j - {WINDOW}](x[i,k])", lambda t: windows(t["x"], -math.inf).amax(2)
    ),
    "its gradient": Scan(
        "j: axis[k]\nz[i,k] = sum[j](where(k <= j, x[i,j], 0))",
        lambda t: t["x"].flip(1).cumsum(1).flip(1),
        columns="j",
    ),
    "linear attention": Scan(
        "j: axis[k]\ny[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * v[i,k,e], 0))",
        lambda t: masked(t["q"], t["r"]) @ t["v"],
        exact=lambda t: recurrent(t["q"], t["r"], t["v"]),
        **ATTENTION,
    ),
    "Performer": Scan(
        "j: axis[k]\nw[i,j,k] = where(k <= j, sum[d](sq(q[i,j,d]) * sq(r[i,k,d])), 0)\n"
        "y[i,j,e] = sum[k](w[i,j,k] * v[i,k,e]) / sum[k](w[i,j,k])",
        normalised,
        exact=normalised_exact,
        **ATTENTION,
    ),
    "RetNet, Mamba-2": Scan(
        f"{GATES}a[i,j] = sum[l](where(l <= j, -abs(g[i,l]), 0))\n"
        "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d]) * exp(a[i,j] - a[i,k]) * v[i,k,e], 0))",
        lambda t: masked(t["q"], t["r"], decays(-t["g"].abs())) @ t["v"],
        exact=lambda t: recurrent(t["q"], t["r"], t["v"], -t["g"].abs()),
        **ATTENTION,
    ),
    "linear attention, its state": Scan(
        "h[i,k,d,e] = h[i,k-1,d,e] + r[i,k,d] * v[i,k,e]\ny[i,k,e] = sum[d](q[i,k,d] * h[i,k,d,e])\nreturn y",
        lambda t: masked(t["q"], t["r"]) @ t["v"],
        exact=lambda t: recurrent(t["q"], t["r"], t["v"]),
        **ATTENTION,
    ),
    "gated linear attention": Scan(
        f"{GATES}a[i,j,d] = sum[l](where(l <= j, -abs(g[i,l,d]), 0))\n"
        "y[i,j,e] = sum[k](where(k <= j, sum[d](q[i,j,d] * r[i,k,d] * exp(a[i,j,d] - a[i,k,d])) * v[i,k,e], 0))",
        lambda t: recurrent(t["q"], t["r"], t["v"], -t["g"].abs()),
        **ATTENTION,
    ),
    "LSTM": Scan(
        f"f[i,k,d] = sigmoid({BEFORE.format('f')})\nu[i,k,d] = sigmoid({BEFORE.format('u')})\n"
        f"o[i,k,d] = sigmoid({BEFORE.format('o')})\ng[i,k,d] = tanh({BEFORE.format('g')})\n"
        "c[i,k,d] = f[i,k,d] * c[i,k-1,d] + u[i,k,d] * g[i,k,d]\ny[i,k,d] = o[i,k,d] * tanh(c[i,k,d])\nreturn y",
        lstm,
        **CELL,
    ),
    "GRU": Scan(
        f"z[i,k,d] = sigmoid({BEFORE.format('z')})\nr[i,k,d] = sigmoid({BEFORE.format('r')})\n"
        "n[i,k,d] = tanh(r[i,k,d] * sum[e](wn[d,e] * y[i,k-1,e]) + xn[i,k,d])\n"
        "y[i,k,d] = n[i,k,d] + z[i,k,d] * (y[i,k-1,d] - n[i,k,d])\nreturn y",
        gru,
        **CELL,
    ),
    "gated delta rule": Scan(f"p[i,k,d,e] = exp(-abs(g[i,k])) * h[i,k-1,d,e]\n{ERASED}", delta_rule, **DELTA),
    "KDA": Scan(f"p[i,k,d,e] = exp(-abs(g[i,k,d])) * h[i,k-1,d,e]\n{ERASED}", delta_rule, **DELTA),
}


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, is not proved, or is wrong."""
    for name in chosen_names(options.only, tuple(PROGRAMS)):
        with recorded(report.failing(name)):
            report.add(row_of(name, PROGRAMS[name], options))
    for row in report.rows:
        if not row["proved"]:
            report.failures.append(f"{row['program']}: its derivation does not hold")
    summarise(report, "twice the length", MOST_RATIO, MOST_ERROR)


def summarise(report: Report, longer: str, most_ratio: float, most_error: float) -> None:
    """Adds what rows say together, beside torch: failures of those that are wrong, and those that take more than `most_ratio` times as
    long at `longer`."""
    for row in report.rows:
        if row["error"] > most_error:
            report.failures.append(f"{row['program']}: error {row['error']:.1e}")
    slow = [row["program"] for row in report.rows if row["longer"] > most_ratio]
    ratios = [row["torch_ms"] / row["ms"] for row in report.rows]
    mean = geometric_mean(ratios) if ratios else 1.0
    report.summary.append(
        f"{len(report.rows)} programs; torch's time over ours {mean:.2f} by geometric mean, {min(ratios, default=1):.2f} at the least; "
        f"over {most_ratio} at {longer}: {', '.join(slow) or 'none'}"
    )


def shown(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def with_gradients(
    call: Callable[[dict[str, T]], T], but: Collection[str] = ()
) -> Callable[[dict[str, T]], T]:
    """A call, and its gradients by all inputs but these."""

    def run(t: dict[str, T]) -> T:
        leaves = {n: v.detach().requires_grad_(n not in but) for n, v in t.items()}
        y = call(leaves)
        torch.autograd.grad(y, [v for v in leaves.values() if v.requires_grad], torch.ones_like(y))
        return y

    return run


def backward_of(
    calls: Mapping[str, Callable[[dict[str, T]], T]],
    given: list[dict[str, T]],
    twice: list[dict[str, T]],
    device: str,
) -> dict[str, float | None]:
    """Forward and backward, of what has one: what torch writes to in place, or finds a position by, has none. What takes long is
    called twice alone."""
    found: dict[str, float | None] = {"back_ms": None, "back_longer": None, "torch_back_ms": None}
    both = {"back_ms": with_gradients(calls["ms"]), "torch_back_ms": with_gradients(calls["torch_ms"])}
    short = dict(both)
    for what, call in both.items():
        try:
            call(given[0])
        except RuntimeError:
            del short[what]
            continue
        if (once := seconds_of(partial(call, given[0]), device)[1]) > LONG_CALL:
            del short[what]
            found[what] = 1e3 * once
    found |= in_turn(short, given, device)
    if found["back_ms"] is not None:
        both["back_ms"](twice[0])
        longer = 1e3 * seconds_of(partial(both["back_ms"], twice[0]), device)[1]
        if "back_ms" in short:
            longer = in_turn({"back_ms": both["back_ms"]}, twice, device)["back_ms"]
        found["back_longer"] = longer / found["back_ms"]
    return found


def row_of(name: str, scan: Scan, options: Options) -> dict[str, Any]:
    """One program, called on fresh inputs."""
    length, rows = (scan.length // 16, max(1, scan.rows // 16)) if options.small else (scan.length, scan.rows)
    features = FEATURES // 8 if options.small else FEATURES
    # A recurrence reads what it is given at copies of its axis: `k_1`.
    axes_of = {
        n: [str(axis).partition("_")[0] for axis in axes] for n, axes in shaped(parse(scan.text)).items()
    }
    walked = {"k", "j", "l"} if scan.columns == "k" else {"j"} if name == "its gradient" else {"i", "k"}
    torch.manual_seed(options.seed or 0)

    def drawn(count: int, along: int, wide: int = features) -> dict[str, T]:
        def size(axis: str) -> int:
            return along if axis in walked else wide if axis in ("d", "e") else count

        found = {
            n: torch.randn([size(of) for of in axes], device=options.device) for n, axes in axes_of.items()
        }
        return {n: t * (scan.scaled or {}).get(n, 1.0) for n, t in found.items()}

    kernel: Any = eq.compile(scan.text, native="wait")
    calls: dict[str, Callable[[dict[str, T]], T]] = {"ms": lambda t: kernel(**t), "torch_ms": scan.torch}
    given = [drawn(rows, length) for _ in range(3)]
    row: dict[str, Any] = {"program": name, "text": scan.text, "length": length, "rows": rows}
    kernel(**given[0])
    row |= in_turn(calls, given, options.device)
    row["merge"], row["proved"] = str(kernel.merge), bool(kernel.derivation.check())
    row["plan"] = kernel.plan.schedule + (", reassociated" if kernel.plan.form == "reassociated" else "")
    twice = [drawn(rows, 2 * length) for _ in range(3)]
    kernel(**twice[0])
    row["longer"] = in_turn({"ms": calls["ms"]}, twice, options.device)["ms"] / row["ms"]
    row |= backward_of(calls, given, twice, options.device)
    long = drawn(1, LONG // 50 if options.small else LONG, min(features, 16))
    exact = (scan.exact or scan.torch)({n: t.double().cpu() for n, t in long.items()})
    row["error"] = float((kernel(**long).cpu() - exact).abs().max() / exact.abs().max())
    return row
