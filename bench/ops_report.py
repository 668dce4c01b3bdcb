"""`eqfuse bench ops`: the programs of eqfuse.ops beside torch and torch.compile, forward, and forward and backward.

Each is called as a user does, on the same inputs in turns; torch computes what a person would write (bench/library.py). Errors are against float64, of values and
of gradients, relative to the greatest of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from bench.algebra_report import timed
from bench.library import HELD, Case, Sizes, cases, drawn
from bench.report import Column, Options, Report, chosen_names, geometric_mean, recorded

TITLE = "The library of programs"
T = torch.Tensor
SIZES = Sizes(B=4, T=1024, D=512, V=8192, C=256, H=8, I=512, J=512, P=256)


def _ratio(of: str, ours: str) -> Callable[[Any], str]:
    return lambda row: "" if row.get(of) is None else f"{row[of] / row[ours]:.2f}"


COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("torch / ms", _ratio("torch_ms", "ms")),
    Column("compiled / ms", _ratio("compiled_ms", "ms")),
    Column("with backward, ms", lambda row: f"{row['back_ms']:.3g}"),
    Column("torch / ms", _ratio("torch_back_ms", "back_ms")),
    Column("compiled / ms", _ratio("compiled_back_ms", "back_ms")),
    Column("error", lambda row: f"{row['error']:.0e}"),
    Column("of gradients", lambda row: f"{row['gradient_error']:.0e}"),
    Column("verified", lambda row: "yes" if row["verified"] else "NO"),
)
MOST_ERROR = 1e-4


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, is not verified, or is wrong."""
    os.environ.setdefault("EQFUSE_NATIVE", "wait")  # what is timed is C++
    every = cases(Sizes() if options.small else SIZES)
    for name in chosen_names(options.only, tuple(every)):
        with recorded(report.failing(name)):
            report.add(row_of(name, every[name], options))
    for row in report.rows:
        if not row["verified"]:
            report.failures.append(f"{row['program']}: it is not verified")
        if max(row["error"], row["gradient_error"]) > MOST_ERROR:
            report.failures.append(
                f"{row['program']}: errors {row['error']:.1e}, {row['gradient_error']:.1e}"
            )
    for whose, keys in (
        ("torch's", ("torch_ms", "torch_back_ms")),
        ("torch.compile's", ("compiled_ms", "compiled_back_ms")),
    ):
        means = [
            geometric_mean([row[key] / row[ours] for row in report.rows if row.get(key) is not None])
            for key, ours in zip(keys, ("ms", "back_ms"), strict=True)
        ]
        report.summary.append(
            f"{len(report.rows)} programs; {whose} time over ours {means[0]:.2f} by geometric mean, with backward {means[1]:.2f}"
        )


def several(made: Any) -> tuple[T, ...]:
    return made if isinstance(made, tuple) else (made,)


def row_of(name: str, case: Case, options: Options) -> dict[str, Any]:
    """One program, its values and gradients checked, and timed."""
    tensors = {key: value.to(options.device) for key, value in case.tensors.items()}

    def ours(given: dict[str, T]) -> Any:
        return case.op(**given, **case.options)

    def torchs(given: dict[str, T]) -> Any:
        return case.torchs(**given)

    drawn_for: dict[Any, T] = {}

    def above(y: T) -> T:
        """What comes back to an output, the same for all who compute it; it is drawn before anything is timed."""
        kind = y.shape, y.dtype, y.device
        if kind not in drawn_for:
            drawn_for[kind] = drawn(*y.shape, seed=7).to(y.device, y.dtype)
        return drawn_for[kind]

    def with_backward(call: Callable[[dict[str, T]], Any]) -> Callable[[dict[str, T]], tuple[Any, list[T]]]:
        def both(given: dict[str, T]) -> tuple[Any, list[T]]:
            leaves = {
                k: t.detach().requires_grad_(k not in HELD) if t.is_floating_point() else t
                for k, t in given.items()
            }
            made = several(call(leaves))
            wanted = [t for t in leaves.values() if t.requires_grad]
            return made, list(torch.autograd.grad(made, wanted, [above(y) for y in made]))

        return both

    exact = {k: t.double() if t.is_floating_point() else t for k, t in case.tensors.items()}
    right, right_grads = with_backward(torchs)(exact)
    made, grads = with_backward(ours)(tensors)
    pairs = (zip(made, right, strict=True), zip(grads, right_grads, strict=True))
    errors = [
        max(
            float((found.detach().cpu() - of.detach()).abs().max() / of.detach().abs().max().clamp(1e-30))
            for found, of in each
        )
        for each in pairs
    ]
    kernel = case.op.latest
    calls: dict[str, Callable[[dict[str, T]], Any]] = {"ms": ours, "torch_ms": torchs}
    backward: dict[str, Callable[[dict[str, T]], Any]] = {
        "back_ms": with_backward(ours),
        "torch_back_ms": with_backward(torchs),
    }
    if options.torch_compile:
        torch._dynamo.reset()
        compiled = torch.compile(case.torchs, dynamic=False)
        calls["compiled_ms"] = lambda given: compiled(**given)
        backward["compiled_back_ms"] = with_backward(calls["compiled_ms"])
    on_gpu = options.device == "cuda"
    row = {"program": name, "op": case.op.name, "error": errors[0], "gradient_error": errors[1]}
    row |= timed(calls, [tensors], on_gpu) | timed(backward, [tensors], on_gpu)
    return row | {"plan": repr(kernel.plan), "verified": bool(kernel.certificate.ok)}
