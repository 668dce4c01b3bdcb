"""`eqfuse bench ops`: the programs of eqfuse.ops beside torch, torch.compile and Liger, forward, and forward and backward.

Each is called as a user does, on the same inputs in turns; torch computes what a person would write (bench/library.py), and Liger's kernels what is the same
operation. Errors are against float64, of values and of gradients, relative to the greatest of each. On a GPU tensors are in bfloat16, calls are launched without
waiting for each, and memory is the peak of forward and backward over inputs. With `--seconds`, no program begins later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bench.library import HELD, Case, Sizes, cases, drawn
from bench.report import Column, Options, Report, chosen_names, geometric_mean, in_one_line, recorded, shown
from bench.timing import in_turn, peak_gb, series

TITLE = "The library of programs"
T = torch.Tensor
Given = dict[str, T]
SIZES = Sizes(B=4, T=1024, D=512, V=8192, C=256, H=8, I=512, J=512, P=256, E=64, R=512, L=256)
ON_GPU = Sizes(B=4, T=2048, D=4096, V=128256, C=2048, H=16, I=2048, J=2048, P=2048, E=128, R=128, L=256)


def _ratio(of: str, ours: str) -> Callable[[Any], str]:
    return lambda row: "" if row.get(of) is None else f"{row[of] / row[ours]:.2f}"


COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("torch / ms", _ratio("torch_ms", "ms")),
    Column("compiled / ms", _ratio("compiled_ms", "ms")),
    Column("Liger / ms", _ratio("liger_ms", "ms")),
    Column("with backward, ms", lambda row: f"{row['back_ms']:.3g}"),
    Column("torch / ms", _ratio("torch_back_ms", "back_ms")),
    Column("compiled / ms", _ratio("compiled_back_ms", "back_ms")),
    Column("Liger / ms", _ratio("liger_back_ms", "back_ms")),
    Column("GB", lambda row: shown(row, "memory_gb", ".3f")),
    Column("torch's GB", lambda row: shown(row, "torch_memory_gb", ".3f")),
    Column("error", lambda row: f"{row['error']:.0e}"),
    Column("of gradients", lambda row: f"{row['gradient_error']:.0e}"),
    Column("torch's", lambda row: f"{row['torch_error']:.0e} {row['torch_gradient_error']:.0e}"),
    Column("verified", lambda row: "yes" if row["verified"] else "NO"),
    Column("", lambda row: str(row.get("failed", ""))),
)
MOST_ERROR = 1e-4
TIMES_TORCHS = 10.0
"""An error may be MOST_ERROR, or so many times torch's own in the same dtype."""


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, is not verified, or is wrong."""
    os.environ.setdefault("EQFUSE_NATIVE", "wait")  # what is timed is C++
    on_gpu = options.device.startswith("cuda")
    with torch.device(options.device):
        every = cases(Sizes() if options.small else ON_GPU if on_gpu else SIZES)
    for name in chosen_names(options.only, tuple(every)):
        if report.is_late(options, name):
            break
        with recorded(report.failing(name)):
            row = row_of(name, every[name], options)
            report.add(row)
            print(in_one_line(row, COLUMNS), flush=True)
    for row in report.rows:
        if not row["verified"]:
            report.failures.append(f"{row['program']}: it is not verified")
        for what in ("error", "gradient_error"):
            if not row[what] <= max(MOST_ERROR, TIMES_TORCHS * row[f"torch_{what}"]):
                report.failures.append(f"{row['program']}: {what} {row[what]:.1e}")
    for whose, key in (("torch's", "torch"), ("torch.compile's", "compiled"), ("Liger's", "liger")):
        rows = [row for row in report.rows if row.get(f"{key}_back_ms") is not None]
        if rows:
            forward, both = (
                geometric_mean(row[f"{key}_{of}"] / row[of] for row in rows) for of in ("ms", "back_ms")
            )
            report.summary.append(
                f"{len(rows)} programs; {whose} time over ours {forward:.2f} by geometric mean, with backward {both:.2f}"
            )


def several(made: Any) -> tuple[T, ...]:
    return made if isinstance(made, tuple) else (made,)


def ligers(case: str) -> Callable[..., Any] | None:
    """Liger's kernel for a case, where it is installed and has the same operation."""
    try:
        from liger_kernel.transformers import functional as liger  # type: ignore[import-not-found]
    except ImportError:
        return None
    loss, linear = liger.liger_cross_entropy, liger.liger_fused_linear_cross_entropy
    found: Mapping[str, Callable[..., Any]] = {
        "rms norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
        "rms norm, Gemma's": lambda x, w: liger.liger_rms_norm(x, w, 1e-5, 1.0, "gemma", False),
        "added rms norm": lambda x, residual, w: liger.liger_fused_add_rms_norm(
            x, residual, w, 1e-6, in_place=False
        ),
        "layer norm": lambda x, w, bias: liger.liger_layer_norm(x, w, bias, 1e-5),
        "swiglu": lambda gate, up: liger.liger_swiglu(gate, up),
        "swiglu of halves": lambda gate: liger.liger_swiglu(*gate.chunk(2, -1)),
        "geglu by tanh": lambda gate: liger.liger_geglu(*gate.chunk(2, -1)),
        "cross-entropy": lambda logits, label: loss(logits, label),
        "smoothed cross-entropy": lambda logits, label: loss(
            logits, label, reduction="none", label_smoothing=0.1, lse_square_scale=0.01
        ),
        "linear cross-entropy": lambda x, w, label, bias: linear(x, w, label, bias),
        "capped linear cross-entropy": lambda x, w, label: linear(
            x, w, label, lse_square_scale=0.1, reduction="sum", softcap=3.0
        ),
    }
    return found.get(case)


Call = Callable[[Given], Any]


def row_of(name: str, case: Case, options: Options) -> dict[str, Any]:
    """One program, its values and gradients checked, and timed. A peer that does not run is said so."""
    on_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tensors = {key: t.to(dtype) if t.is_floating_point() else t for key, t in case.tensors.items()}
    with_backward = _Backward(dtype, options.device)
    ways: dict[str, Call] = {
        "": lambda given: case.op(**given, **case.options),
        "torch_": lambda given: case.torchs(**given),
    }
    row: dict[str, Any] = {"program": name, "op": case.op.name}
    right = with_backward.of(
        ways["torch_"], {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
    )
    for label, call in ways.items():
        errors = _errors(with_backward.of(call, tensors), right)
        row |= {f"{label}error": errors[0], f"{label}gradient_error": errors[1]}
    del right
    kernel = case.op.latest
    row |= {"plan": repr(kernel.plan), "verified": bool(kernel.certificate.ok)}
    if options.torch_compile:
        torch._dynamo.reset()
        compiled = torch.compile(case.torchs, dynamic=False)
        ways["compiled_"] = lambda given: compiled(**given)
    if not on_gpu:
        forward = {f"{label}ms": call for label, call in ways.items()}
        both = {f"{label}back_ms": partial(with_backward.of, call) for label, call in ways.items()}
        return row | in_turn(forward, [tensors], options.device) | in_turn(both, [tensors], options.device)
    if (liger := ligers(name)) is not None:
        own = {key: t.clone() for key, t in tensors.items()}  # it writes gradients over its inputs
        ways["liger_"] = lambda given: liger(**given)
    failed: list[str] = []
    for label, call in ways.items():
        with recorded(lambda problem, label=label: failed.append(f"{label or 'eqfuse '}{problem}")):  # type: ignore[misc]
            row |= _on_gpu(label, call, with_backward, own if label == "liger_" else tensors)
    return row | ({"failed": "; ".join(failed)[:200]} if failed else {})


def _on_gpu(label: str, call: Call, with_backward: _Backward, given: Given) -> dict[str, float]:
    """Milliseconds of calls that are launched without waiting, and gigabytes."""

    def both() -> object:
        return with_backward.of(call, given)

    both()
    return {
        f"{label}memory_gb": peak_gb(both),
        f"{label}ms": series(lambda: call(given), "cuda"),
        f"{label}back_ms": series(both, "cuda"),
    }


class _Backward:
    """Calls with gradients by all inputs that are not held. What comes back to an output is the same for all who compute it, and drawn once."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.drawn: dict[Any, T] = {}

    def _above(self, y: T) -> T:
        kind = y.shape, y.dtype
        if kind not in self.drawn:
            with torch.device(self.device):
                self.drawn[kind] = drawn(*y.shape, seed=7).to(self.dtype).to(y.dtype)
        return self.drawn[kind]

    def of(self, call: Call, given: Given) -> tuple[list[T], list[T]]:
        """Outputs and gradients."""
        leaves = {
            k: t.detach().requires_grad_(k not in HELD) if t.is_floating_point() else t
            for k, t in given.items()
        }
        made = several(call(leaves))
        wanted = [t for t in leaves.values() if t.requires_grad]
        return list(made), list(torch.autograd.grad(made, wanted, [self._above(y) for y in made]))


def _errors(found: tuple[list[T], list[T]], right: tuple[list[T], list[T]]) -> list[float]:
    """The greatest differences of outputs and of gradients, over the greatest value of each."""
    return [
        max(
            float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp(1e-30))
            for a, b in zip(*each, strict=True)
        )
        for each in zip(found, right, strict=True)
    ]
