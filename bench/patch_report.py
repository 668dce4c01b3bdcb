"""`eqfuse bench patch`: models of transformers with random weights in training: unpatched, `eq.patch`, `torch.compile`, and Liger's patch.

On a GPU five shapes in bfloat16, 8192 tokens a step and vocabularies of 128256 words; on a CPU tiny ones. Every way begins from the same weights and takes the same
steps of AdamW. `error` is that of the outputs before training, relative to the same weights in float32 (in float64 on the CPU), root mean square; `apart` is the
greatest difference of a loss from the unpatched model's of the same step, relative. Milliseconds are the median of the steps after the first ten, and memory is the
peak of these, weights and the optimizer's state included. With `--seconds`, no way begins later; `--small` takes 3 steps. Liger is run where it is installed.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, geometric_mean, shown
from eqfuse.measure import rms_error, synchronize

TITLE = "Patched models in training"
COLUMNS = (
    Column("model", lambda row: str(row["model"])),
    Column("way", lambda row: str(row["way"])),
    Column("error", lambda row: shown(row, "error", ".1e")),
    Column("first loss", lambda row: shown(row, "first_loss", ".4f")),
    Column("last loss", lambda row: shown(row, "last_loss", ".4f")),
    Column("apart", lambda row: shown(row, "apart", ".1e")),
    Column("step ms", lambda row: shown(row, "step_ms", ".2f")),
    Column("memory GB", lambda row: shown(row, "memory_gb", ".2f")),
    Column("first step s", lambda row: shown(row, "first_seconds", ".1f")),
    Column("", lambda row: str(row.get("failed", ""))),
)
STEPS, SKIPPED, BATCHES = 50, 10, 4
APART = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Above it the losses of a patched model are other ones, unless those of another way are half as far apart: rounding sends tokens to other
experts."""
MORE_ERROR = 2.0
"""How many times the unpatched model's error a patched one's may be, or the rounding of its dtype."""


@dataclass(frozen=True)
class Shape:
    """A model of transformers: names of its classes, and settings, those of a GPU and tiny ones."""

    config: str
    model: str
    medium: Mapping[str, Any]
    tiny: Mapping[str, Any]


_MEDIUM = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY = _MEDIUM | {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
_IMAGES = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096}
SHAPES = {
    "Llama": Shape("LlamaConfig", "LlamaForCausalLM", _MEDIUM, _TINY),
    "Qwen": Shape("Qwen3Config", "Qwen3ForCausalLM", _MEDIUM, _TINY),
    "Gemma": Shape("Gemma3TextConfig", "Gemma3ForCausalLM", _MEDIUM, _TINY),
    "GPT-OSS": Shape(
        "GptOssConfig",
        "GptOssForCausalLM",
        _MEDIUM | _EXPERTS | {"head_dim": 64, "intermediate_size": 2048},
        _TINY | _EXPERTS,
    ),
    "ViT": Shape(
        "ViTConfig",
        "ViTForImageClassification",
        _IMAGES | {"num_labels": 1000},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        | {"image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
}
Inputs = dict[str, Tensor]
Way = Callable[[nn.Module], AbstractContextManager[tuple[Callable[..., Any], str]]]
"""What a step calls in place of a model, and what was done to it."""


def run(options: Options, report: Report) -> None:
    """Failures: a patched model that does not run, outputs farther from the exact ones than the unpatched model's, losses that are other ones."""
    names = chosen_names(options.only, tuple(SHAPES))
    import transformers

    os.environ.setdefault("EQFUSE_NATIVE", "wait")  # what is timed is C++
    for name in names:
        model = built(transformers, SHAPES[name], options)
        batches = drawn(model, options)
        exact = outputs(_exact(model), batches[0])
        losses: list[float] = []
        for way, prepare in _ways(options):
            if report.is_late(options, f"{name}, {way}"):
                return _compare(report)
            ours = way in ("unpatched", "eqfuse")
            with report.row(f"{name}, {way}", fails=ours, model=name, way=way) as row:
                row |= _trained(copy.deepcopy(model), prepare, batches, exact, options)
                losses = losses or row["losses"]
                row["apart"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], losses, strict=True))
            if row.get("done"):
                print(row["done"], flush=True)
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()
        _judge(report, name, next(model.parameters()).dtype)
    _compare(report)


def built(transformers: Any, shape: Shape, options: Options) -> nn.Module:
    """A model with random weights, in training mode."""
    on_gpu = options.device.startswith("cuda")
    settings = shape.medium if on_gpu else shape.tiny
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model: nn.Module = getattr(transformers, shape.model)(getattr(transformers, shape.config)(**settings))
    return model.to(torch.bfloat16 if on_gpu else torch.float32).train()


def drawn(model: Any, options: Options) -> list[Inputs]:
    """Inputs of steps, which take turns."""
    generator = torch.Generator().manual_seed(options.seed)
    on_gpu, config = options.device.startswith("cuda"), model.config
    found = []
    for _ in range(BATCHES):
        if hasattr(config, "image_size"):
            count = 64 if on_gpu else 3
            pixels = torch.randn(count, 3, config.image_size, config.image_size, generator=generator)
            labels = torch.randint(0, config.num_labels, (count,), generator=generator)
            given = {"pixel_values": pixels.to(next(model.parameters()).dtype), "labels": labels}
        else:
            ids = torch.randint(3, config.vocab_size, (4, 2048) if on_gpu else (2, 16), generator=generator)
            given = {"input_ids": ids, "labels": ids}
        found.append({key: value.to(options.device) for key, value in given.items()})
    return found


def _exact(model: Any) -> nn.Module:
    """The same weights in float32, or in float64."""
    found = copy.deepcopy(model)
    if hasattr(found, "set_experts_implementation"):
        found.set_experts_implementation("eager")  # grouped products are of no float64
    half = next(model.parameters()).dtype == torch.bfloat16
    exact: nn.Module = found.to(torch.float32 if half else torch.float64)
    return exact


def outputs(model: Callable[..., Any], given: Inputs) -> Tensor:
    """The logits of the first of a batch."""
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else None
    first = {
        key: value[:1].to(dtype) if dtype is not None and value.is_floating_point() else value[:1]
        for key, value in given.items()
        if key != "labels"
    }
    with torch.no_grad():
        logits: Tensor = model(**first).logits
    return logits


def _ways(options: Options) -> Iterator[tuple[str, Way]]:
    yield "unpatched", lambda model: nullcontext((model, ""))
    yield "eqfuse", _by_eqfuse
    yield "Liger", _by_liger
    if options.torch_compile:
        yield "torch.compile", _compiled


@contextmanager
def _by_eqfuse(model: Any) -> Iterator[Any]:
    with eq.patch(model) as patched:
        yield model, str(patched)


@contextmanager
def _compiled(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile(model, dynamic=False), ""


@contextmanager
def _by_liger(model: Any) -> Iterator[Any]:
    """Liger's patch of a model. It also replaces functions of the model's module, which come back at the end."""
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        _apply_liger_kernel_to_instance,
    )

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise eq.EqfuseError(f"Liger has no patch of {kind}")
    module = vars(sys.modules[type(model).__module__])
    before = dict(module)
    try:
        _apply_liger_kernel_to_instance(model=model)
        yield model, ""
    finally:
        module.update(before)


def _trained(
    model: Any, prepare: Way, batches: list[Inputs], exact: Tensor, options: Options
) -> dict[str, Any]:
    on_gpu = options.device.startswith("cuda")
    steps = 3 if options.small else STEPS
    skipped = min(SKIPPED, steps - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    row: dict[str, Any] = {}
    losses: list[Tensor] = []
    seconds: list[float] = []
    with prepare(model) as (called, row["done"]):
        found = outputs(called, batches[0])
        row["error"] = rms_error(found, exact)
        for step in range(steps):
            if on_gpu and step == skipped:
                torch.cuda.reset_peak_memory_stats()
            synchronize(options.device)
            start = time.perf_counter()
            loss = called(**batches[step % len(batches)]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(options.device)
            seconds.append(time.perf_counter() - start)
            losses.append(loss.detach())
    row["losses"] = [float(loss) for loss in losses]
    row |= {
        "first_loss": row["losses"][0],
        "last_loss": row["losses"][-1],
        "step_ms": 1e3 * statistics.median(seconds[skipped:]),
        "first_seconds": seconds[0],
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }
    return row


def _judge(report: Report, name: str, dtype: torch.dtype) -> None:
    """Adds what is wrong with a patched model."""
    rows = {row["way"]: row for row in report.rows if row["model"] == name and "failed" not in row}
    own, patched = rows.get("unpatched"), rows.get("eqfuse")
    if own is None or patched is None:
        return
    if not patched["error"] <= MORE_ERROR * max(own["error"], torch.finfo(dtype).eps):
        report.failures.append(f"{name}: an error of {patched['error']:.1e}, unpatched {own['error']:.1e}")
    others = [row["apart"] for way, row in rows.items() if way not in ("unpatched", "eqfuse")]
    if not patched["apart"] <= max([APART[dtype], *(2 * each for each in others)]):
        report.failures.append(f"{name}: losses are apart by {patched['apart']:.1e}")


def _compare(report: Report) -> None:
    for what, label in (("step_ms", "step"), ("memory_gb", "memory")):
        for other in ("unpatched", "Liger", "torch.compile"):
            if ratios := report.ratios(what, other, "eqfuse", "model"):
                mean = geometric_mean(ratios)
                report.summary.append(
                    f"{label}: {other} over eqfuse {mean:.2f}, geometric mean of {len(ratios)}"
                )
