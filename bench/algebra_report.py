"""`eqfuse bench algebra`: orders of sums and products, as they are written and as they are chosen, beside the best by hand in torch.

Each program is called as a user does it. "as written" and "by hand" are torch's: one operation a line in the order of the program, and
in the best order that is known. Errors are against float64, relative to the greatest value, beside those of what is
written in torch in float32. Random chains of products (`--examples`) are compared with the optimal path of opt_einsum, where that is
installed: by the elements that both visit and leave.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, recorded
from bench.timing import in_turn
from eqfuse.rules.reassociate import cheapest, visited
from eqfuse.terms.nodes import Axis, Expr, Load, Output, Program, Reduce, call, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import output_lines

TITLE = "Orders of sums and products"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("runs", lambda row: "\n".join(row["order"]) or "as written"),
    Column("elements, written", lambda row: f"{row['written']:.2e}"),
    Column("chosen", lambda row: f"{row['chosen']:.2e}"),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("torch, as written", lambda row: f"{row['written_ms']:.3g}"),
    Column("by hand", lambda row: f"{row['hand_ms']:.3g}"),
    Column("by hand / ms", lambda row: f"{row['hand_ms'] / row['ms']:.2f}"),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("as written", lambda row: f"{row['written_error']:.1e}"),
)
MOST_ERROR = 4.0
"""Of the error of what is written, or of float32's rounding of the sums, that an order may have."""

T = torch.Tensor
Torch = Callable[..., T]


@dataclass(frozen=True)
class Order:
    """A program, the sizes of its axes on a CPU, how many times as long those of `wide` are on a GPU, and torch's forms of it: as
    written, and by hand. `integers` are positions of an axis that tensors hold."""

    text: str
    sizes: Mapping[str, int]
    written: Torch
    hand: Torch
    wide: str = ""
    integers: Mapping[str, str] = field(default_factory=dict)


def _reduced_once_more(y: T) -> T:
    """Reductions over one position, each of which leaves it as it is."""
    y = y.amax(1, keepdim=True).mean(1, keepdim=True)
    return y.logsumexp(1, keepdim=True).logsumexp(1, keepdim=True)


def _attended(q: T, k: T, v: T) -> T:
    return (q @ k.mT) @ v


PROGRAMS: Mapping[str, Order] = {
    "mean of a layer": Order(
        "y[b] = mean[o](sum[k](x[b,k] * w[o,k]))",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w: (x @ w.T).mean(1),
        lambda x, w: x @ w.mean(0),
        "bko",
    ),
    "sum of a layer with a bias": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) + s[o])",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w, s: (x @ w.T + s).sum(1),
        lambda x, w, s: x @ w.sum(0) + s.sum(),
        "bko",
    ),
    "KernelBench 2/14": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) / 2) * 1.5",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w: (x @ w.T / 2).sum(1) * 1.5,
        lambda x, w: x @ w.sum(0) * 0.75,
        "bko",
    ),
    "chain and a vector": Order(
        "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * c[k])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda a, b, c: (a @ b) @ c,
        lambda a, b, c: a @ (b @ c),
        "ijk",
    ),
    "vector and a chain": Order(
        "y[l] = sum[k](sum[j](sum[i](x[i] * a[i,j]) * b[j,k]) * c[k,l])",
        {"i": 1024, "j": 1024, "k": 1024, "l": 1024},
        lambda x, a, b, c: ((x @ a) @ b) @ c,
        lambda x, a, b, c: ((x @ a) @ b) @ c,
        "ijkl",
    ),
    "chain of four": Order(
        "y[i,m] = sum[l](sum[k](sum[j](a[i,j] * b[j,k]) * c[k,l]) * d[l,m])",
        {"i": 512, "j": 512, "k": 512, "l": 8, "m": 512},
        lambda a, b, c, d: ((a @ b) @ c) @ d,
        lambda a, b, c, d: (a @ (b @ c)) @ d,
        "ijkm",
    ),
    "attention without a softmax": Order(
        "y[i,e] = sum[j](sum[d](q[i,d] * k[j,d]) * v[j,e])",
        {"i": 2048, "j": 2048, "d": 64, "e": 64},
        _attended,
        lambda q, k, v: q @ (k.mT @ v),
        "ij",
    ),
    "Performer's quadratic form": Order(
        "y[i,e] = sum[j](sum[r](exp(p[i,r]) * exp(s[j,r])) * v[j,e]) / sum[j](sum[r](exp(p[i,r]) * exp(s[j,r])))",
        {"i": 1024, "j": 1024, "r": 32, "e": 64},
        lambda p, s, v: (p.exp() @ s.exp().mT) @ v / (p.exp() @ s.exp().mT).sum(1, keepdim=True),
        lambda p, s, v: (p.exp() @ (s.exp().mT @ v)) / (p.exp() @ s.exp().sum(0))[:, None],
        "ij",
    ),
    "identity and low rank": Order(
        "y[i] = sum[j]((where(i == j, 1, 0) + sum[r](u[i,r] * v[j,r])) * x[j])",
        {"i": 1024, "j": 1024, "r": 8},
        lambda u, v, x: (torch.eye(len(x), dtype=x.dtype, device=x.device) + u @ v.T) @ x,
        lambda u, v, x: x + u @ (v.T @ x),
        "ij",
    ),
    "adapter, one row": Order(
        "y[b,o] = sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))",
        {"b": 1, "k": 1024, "o": 1024, "r": 16},
        lambda x, w, u, v: x @ (w + u @ v).T,
        lambda x, w, u, v: x @ w.T + (x @ v.T) @ u.T,
        "ko",
    ),
    "adapter, many rows": Order(
        "y[b,o] = sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))",
        {"b": 1024, "k": 1024, "o": 1024, "r": 16},
        lambda x, w, u, v: x @ (w + u @ v).T,
        lambda x, w, u, v: x @ (w + u @ v).T,
        "bko",
    ),
    "ALS": Order(
        "y[i,r] = sum[j]((sum[s](u[i,s] * v[j,s]) - x[i,j]) * v[j,r])",
        {"i": 1024, "j": 1024, "s": 16, "r": 16},
        lambda u, v, x: (u @ v.T - x) @ v,
        lambda u, v, x: u @ (v.T @ v) - x @ v,
        "ij",
    ),
    "PNMF": Order(
        "y = sum[i](sum[j](sum[r](w[i,r] * h[r,j])))",
        {"i": 1024, "j": 1024, "r": 16},
        lambda w, h: (w @ h).sum(),
        lambda w, h: w.sum(0) @ h.sum(1),
        "ij",
    ),
    "MLR": Order(
        "y[r] = sum[i](x[i,r] * p[i] * (sum[s](x[i,s] * v[s]) - q[i] * sum[s](x[i,s] * v[s])))",
        {"i": 16384, "r": 64, "s": 64},
        lambda x, p, v, q: x.T @ (p * (x @ v - q * (x @ v))),
        lambda x, p, v, q: x.T @ (p * (x @ v) * (1 - q)),
        "i",
    ),
    "quadratic form": Order(
        "y = sum[i](x[i] * sum[j](sum[k](a[i,k] * b[k,j]) * x[j]))",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda x, a, b: x @ ((a @ b) @ x),
        lambda x, a, b: (x @ a) @ (b @ x),
        "ijk",
    ),
    "Kronecker and a vector": Order(
        "y[i,l] = sum[j](a[i,j] * sum[k](x[j,k] * b[l,k]))",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda a, x, b: a @ (x @ b.T),
        lambda a, x, b: a @ (x @ b.T),
        "ijkl",
    ),
    "sum of a Kronecker product": Order(
        "y[i] = sum[l](sum[j](a[i,j] * sum[k](x[j,k] * b[l,k])))",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda a, x, b: (a @ (x @ b.T)).sum(1),
        lambda a, x, b: a @ (x @ b.sum(0)),
        "ijkl",
    ),
    "trace of a product": Order(
        "y = sum[i](sum[k](sum[j](a[i,j] * b[j,k]) * c[k,i]))",
        {"i": 512, "j": 512, "k": 16},
        lambda a, b, c: ((a @ b) @ c).trace(),
        lambda a, b, c: ((a @ b) * c.T).sum(),
        "ij",
    ),
    "weights on rows, summed": Order(
        "y[o] = sum[b](p[b] * sum[k](x[b,k] * w[o,k]))",
        {"b": 1024, "k": 512, "o": 512},
        lambda p, x, w: p @ (x @ w.T),
        lambda p, x, w: (p @ x) @ w.T,
        "bko",
    ),
    "pooled outputs": Order(
        "y[b,o] = mean[t](sum[k](x[b,t,k] * w[o,k]))",
        {"b": 16, "t": 128, "k": 512, "o": 512},
        lambda x, w: (x @ w.T).mean(1),
        lambda x, w: x.mean(1) @ w.T,
        "tko",
    ),
    "mixture of values": Order(
        "y[b,e] = sum[d](sum[j](p[b,j] * sum[c](k[j,c] * w[c,d])) * z[d,e])",
        {"b": 64, "j": 1024, "c": 64, "d": 1024, "e": 64},
        lambda p, k, w, z: (p @ (k @ w)) @ z,
        lambda p, k, w, z: (p @ k) @ (w @ z),
        "jd",
    ),
    "LAAB, H'Hx": Order(
        "y[k] = sum[i](h[i,k] * sum[j](h[i,j] * x[j]))",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda h, x: (h.T @ h) @ x,
        lambda h, x: h.T @ (h @ x),
        "ijk",
    ),
    "LAAB, (H'H)x": Order(
        "y[k] = sum[j](sum[i](h[i,k] * h[i,j]) * x[j])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda h, x: (h.T @ h) @ x,
        lambda h, x: h.T @ (h @ x),
        "ijk",
    ),
    "LAAB, H'yx'H": Order(
        "z[k,l] = sum[j](sum[i](h[i,k] * y[i] * x[j]) * h[j,l])",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda h, y, x: (h.T @ torch.outer(y, x)) @ h,
        lambda h, y, x: torch.outer(h.T @ y, x @ h),
        "ijkl",
    ),
    "LAAB, AB + AC": Order(
        "y[i,k] = sum[j](a[i,j] * b[j,k]) + sum[j](a[i,j] * c[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda a, b, c: a @ b + a @ c,
        lambda a, b, c: a @ (b + c),
        "ijk",
    ),
    "LAAB, (A - H'H)x": Order(
        "y[k] = sum[j]((a[k,j] - sum[i](h[i,k] * h[i,j])) * x[j])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda a, h, x: (a - h.T @ h) @ x,
        lambda a, h, x: a @ x - h.T @ (h @ x),
        "ijk",
    ),
    "LAAB, A'BA'By": Order(
        "z[i] = sum[m](sum[l](sum[k](sum[j](a[j,i] * b[j,k]) * c[l,k]) * d[l,m]) * y[m])",
        {axis: 512 for axis in "ijklm"},
        lambda a, b, c, d, y: (((a.T @ b) @ c.T) @ d) @ y,
        lambda a, b, c, d, y: a.T @ (b @ (c.T @ (d @ y))),
        "ijklm",
    ),
    "LAAB, (A + B)[2,2]": Order(
        "y = sum[i](sum[j](where((i == 2) & (j == 2), a[i,j] + b[i,j], 0)))",
        {"i": 512, "j": 512},
        lambda a, b: (a + b)[2, 2],
        lambda a, b: a[2, 2] + b[2, 2],
        "ij",
    ),
    "LAAB, block diagonal": Order(
        "y[g,i,k] = sum[j](a[g,i,j] * b[g,j,k])",
        {"g": 2, "i": 512, "j": 512, "k": 512},
        lambda a, b: a @ b,
        lambda a, b: a @ b,
        "ijk",
    ),
    "LAAB, a diagonal": Order(
        "y[i,k] = sum[j](where(i == j, d[i], 0) * b[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda d, b: d.diag() @ b,
        lambda d, b: d[:, None] * b,
        "ijk",
    ),
    "a gate after the layer": Order(
        "y[b] = sum[o](g[o] * sum[k](x[b,k] * w[o,k]))",
        {"b": 256, "k": 1024, "o": 1024},
        lambda g, x, w: (x @ w.T) @ g,
        lambda g, x, w: x @ (w.T @ g),
        "bko",
    ),
    "KernelBench 1/12": Order(
        "y[i,k] = sum[j](where(i == j, d[i], 0) * b[j,k])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda d, b: d.diag() @ b,
        lambda d, b: d[:, None] * b,
        "ijk",
    ),
    "KernelBench 2/18": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) + s[o])",
        {"b": 128, "k": 1024, "o": 1024},
        lambda x, w, s: _reduced_once_more((x @ w.T + s).sum(1, keepdim=True))[:, 0],
        lambda x, w, s: x @ w.sum(0) + s.sum(),
        "bko",
    ),
    "KernelBench 2/51": Order(
        "y[b,p] = gelu(mean[o](sum[k](x[b,k] * w[o,k]) + s[o] - t[o])) + x[b,p]",
        {"b": 128, "k": 1024, "o": 1024, "p": 1024},
        lambda x, w, s, t: F.gelu((x @ w.T + s - t).mean(1, keepdim=True)) + x,
        lambda x, w, s, t: F.gelu((x @ w.mean(0) + (s.mean() - t.mean()))[:, None]) + x,
        "bkop",
    ),
    "KernelBench 2/98": Order(
        "y[b] = max[g](2 * gelu(mean[l](sum[k](x[b,k] * w[g,l,k]) + s[g,l])))",
        {"b": 128, "k": 1024, "g": 64, "l": 16},
        lambda x, w, s: (2 * F.gelu((torch.einsum("bk,glk->bgl", x, w) + s).mean(2))).amax(1),
        lambda x, w, s: (2 * F.gelu(x @ w.mean(1).T + s.mean(1))).amax(1),
        "bkg",
    ),
    "a product on both sides": Order(
        "y[i,l] = sum[k](sum[j](a[i,j] * x[j,k]) * b[l,k])",
        {"i": 64, "j": 1024, "k": 1024, "l": 16},
        lambda a, x, b: (a @ x) @ b.T,
        lambda a, x, b: a @ (x @ b.T),
        "jk",
    ),
    "one-hot gather": Order(
        "y[t,d] = sum[v](where(v == ids[t], e[v,d], 0))",
        {"t": 512, "v": 4096, "d": 128},
        lambda ids, e: F.one_hot(ids, e.shape[0]).to(e.dtype) @ e,
        lambda ids, e: e[ids],
        "tv",
        integers={"ids": "v"},
    ),
    "covariance, centred": Order(
        "y[i,j] = mean[b]((x[b,i] - mean[b](x[b,i])) * (x[b,j] - mean[b](x[b,j])))",
        {"b": 2048, "i": 128, "j": 128},
        lambda x: (x - x.mean(0)).T @ (x - x.mean(0)) / x.shape[0],
        lambda x: (z := x - x.mean(0)).T @ z / x.shape[0],
        "bij",
    ),
    "Gram matrices, summed": Order(
        "y = sum[i](sum[j](sum[k](a[i,k] * b[j,k]) * c[i,j]))",
        {"i": 1024, "j": 1024, "k": 16},
        lambda a, b, c: ((a @ b.T) * c).sum(),
        lambda a, b, c: ((c @ b) * a).sum(),
        "ij",
    ),
    "a sum of outer products": Order(
        "y[i] = sum[j](sum[r](u[i,r] * v[j,r]) * x[j]) + sum[j](a[i,j] * x[j])",
        {"i": 1024, "j": 1024, "r": 32},
        lambda u, v, x, a: (u @ v.T) @ x + a @ x,
        lambda u, v, x, a: u @ (v.T @ x) + a @ x,
        "ij",
    ),
    "two layers": Order(
        "y[b,p] = sum[o](sum[k](x[b,k] * w[o,k]) * z[p,o])",
        {"b": 2048, "k": 512, "o": 512, "p": 8},
        lambda x, w, z: (x @ w.T) @ z.T,
        lambda x, w, z: x @ (z @ w).T,
        "bko",
    ),
}


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, or whose error is over `MOST_ERROR` times that of what is written."""
    for name in chosen_names(options.only, tuple(PROGRAMS)):
        with recorded(report.failing(name)):
            report.add(row_of(name, PROGRAMS[name], options))
    for row in report.rows:
        if row["error"] > MOST_ERROR * max(row["written_error"], 1e-6):
            report.failures.append(f"{row['program']}: error {row['error']:.1e}")
    slower = [row["program"] for row in report.rows if row["ms"] > 1.3 * row["hand_ms"]]
    report.summary.append(
        f"{len(report.rows)} programs; over 1.3 of the best by hand: {', '.join(slower) or 'none'}"
    )
    report.summary += chains(options.count(1000), options.seed)


def row_of(name: str, order: Order, options: Options) -> dict[str, Any]:
    """One program, called on fresh inputs."""
    on_gpu, shrunk = options.device == "cuda", 8 if options.small else 1
    times = 4 if on_gpu else 1
    sizes = {a: max(1, n * (times if a in order.wide else 1) // shrunk) for a, n in order.sizes.items()}
    program = parse(order.text)
    torch.manual_seed(options.seed or 0)
    axes_of = shaped(program)

    def drawn() -> dict[str, Any]:
        shapes = {name: [sizes[axis] for axis in axes] for name, axes in axes_of.items()}
        return {
            n: torch.randint(0, sizes[order.integers[n]], s, device=options.device)
            if n in order.integers
            else torch.randn(s, device=options.device) / max(s[-1:] or [1]) ** 0.5
            for n, s in shapes.items()
        }

    kernel = eq.compile(order.text, native="wait")
    given = [drawn() for _ in range(3)]
    own = {axis for axes in axes_of.values() for axis in axes}
    known: dict[str, Any] = {"sizes": {axis: n for axis, n in sizes.items() if axis not in own}}
    exact = order.written(**{n: t if n in order.integers else t.double() for n, t in given[1].items()})
    calls: dict[str, Callable[[dict[str, Any]], T]] = {
        "ms": lambda values: kernel(**values, **known),
        "written_ms": lambda values: order.written(**values),
        "hand_ms": lambda values: order.hand(**values),
    }
    row: dict[str, Any] = {"program": name, "sizes": sizes, "text": order.text}
    found = {what: call(given[1]) for what, call in calls.items()}
    greatest = float(exact.abs().max())
    row["error"] = float((found["ms"] - exact).abs().max()) / greatest
    row["written_error"] = float((found["written_ms"] - exact).abs().max()) / greatest
    row |= in_turn(calls, given, options.device)
    plan = kernel.plan
    extents = {axis: n for axis, n in plan.sizes}
    row["order"], row["plan"] = output_lines(plan.order), repr(plan)
    row["written"] = visited(program.outputs, extents)
    row["chosen"] = visited(plan.order or program.outputs, extents)
    row["grade"], row["proved"] = kernel.certificate.graded, bool(kernel.derivation.check())
    return row


def shaped(program: Program) -> dict[str, list[str]]:
    """An axis for each dimension of each tensor, of those that index it."""
    loads = [node for node in walk(*(o.expr for o in program.outputs)) if isinstance(node, Load)]
    read = {
        (load.tensor, n): at.name for load in loads for n, at in enumerate(load.index) if isinstance(at, Axis)
    }
    return {t.name: [read[t.name, n] for n in range(t.rank)] for t in program.tensors}


# -- chains ----------------------------------------------------------------------------------------


def chains(count: int, seed: int) -> list[str]:
    """Random chains of 3 to 6 tensors: multiplications of the order that is chosen, and of opt_einsum's optimal path."""
    try:
        import opt_einsum  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        return ["opt_einsum is not installed: no chains were compared"]
    rng = random.Random(seed)
    dearer = cheaper = equal = 0
    for _ in range(count):
        tensors, sizes, kept = _chain(rng)
        inner = "".join(sorted({a for t in tensors for a in t} - set(kept)))
        body = " * ".join(f"t{n}[{','.join(axes)}]" for n, axes in enumerate(tensors))
        head = f"y[{','.join(kept)}]" if kept else "y"
        for axis in inner:
            body = f"sum[{axis}]({body})"
        program = parse(f"{head} = {body}")
        found = cheapest(program.outputs, sizes)
        shapes = [[sizes[a] for a in t] for t in tensors]
        path = opt_einsum.contract_path(
            f"{','.join(tensors)}->{kept}", *shapes, shapes=True, optimize="optimal"
        )
        own, best = (
            visited(found, sizes),
            visited([_along(path[0], program.outputs[0], tensors, kept)], sizes),
        )
        cheaper, equal, dearer = cheaper + (own < best), equal + (own == best), dearer + (own > best)
    return [
        f"{count} random chains beside opt_einsum's optimal path: {cheaper} cheaper, {equal} equal, {dearer} dearer"
    ]


def _along(path: Sequence[tuple[int, ...]], output: Output, tensors: Sequence[str], kept: str) -> Output:
    """A chain along a path of opt_einsum."""
    parts: list[tuple[Expr, set[str]]] = [
        (Load(f"t{n}", tuple(map(Axis, axes))), set(axes)) for n, axes in enumerate(tensors)
    ]
    for step in path:
        taken = [parts[n] for n in step]
        parts = [part for n, part in enumerate(parts) if n not in step]
        value, axes = taken[0]
        for other, more in taken[1:]:
            value, axes = call("mul", value, other), axes | more
        outside = set(kept).union(*(more for _, more in parts))
        for axis in sorted(axes - outside):
            value = Reduce("sum", axis, value)
        parts.append((value, axes & outside))
    return replace(output, expr=parts[0][0])


def _chain(rng: random.Random) -> tuple[list[str], dict[str, int], str]:
    count = rng.randint(3, 6)
    axes = "abcdefg"[: count + 1]
    tensors = [axes[n] + axes[n + 1] for n in range(count)]
    if rng.random() < 0.3:
        tensors[rng.randrange(count)] += "z"
        tensors[rng.randrange(count)] += "z"
    tensors = ["".join(dict.fromkeys(t)) for t in tensors]
    sizes = {a: rng.choice([1, 2, 8, 32, 100, 256]) for a in {*axes, "z"}}
    kept = "".join(sorted(set(rng.choice([axes[0] + axes[-1], axes[0], axes[-1], "", axes[0] + axes[2]]))))
    return tensors, sizes, kept
