"""What row kernels and cascades are compared with on a GPU: unfused torch, torch.compile, and library calls.

Every program has the form in which a person who knows torch writes it: library calls where torch has
one, else one operation a line. torch.compile gets the same form. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from bench.cells import Inputs, Peer, Run
from bench.peers import BACKENDS
from bench.reductions_cells import Cell
from bench.running import compiled_for_one_shape
from bench.workloads import Outputs

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def layernorm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def cross_entropy(x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(x, label, reduction="none")


def variance(x: Tensor) -> Tensor:
    return torch.var(x, -1, unbiased=False)


def rmsnorm_quant(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    top = y.abs().amax(-1, keepdim=True)
    return (y / top * FLOAT8_MAX).to(FLOAT8), top.squeeze(-1).to(x.dtype)


def quant_gemm(A: Tensor, W: Tensor) -> Tensor:
    """The library's product of float8 matrices, a scale for each row."""
    scale = A.abs().amax(-1, keepdim=True).float() / FLOAT8_MAX
    quantised = (A.float() / scale).to(FLOAT8)
    ones = torch.ones(1, W.shape[0], device=W.device)
    return torch._scaled_mm(quantised, W.t(), scale, ones, out_dtype=A.dtype)


def attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, g: int = 1) -> Tensor:
    """In the form that Inductor's patterns are made for."""
    K, V = K.repeat_interleave(g, 1), V.repeat_interleave(g, 1)
    return torch.softmax((Q @ K.transpose(-1, -2)).float() * scale, -1).to(Q.dtype) @ V


def latent_attention(Q: Tensor, Qr: Tensor, C: Tensor, R: Tensor, scale: float) -> Tensor:
    scores = Q @ C.transpose(-1, -2) + Qr @ R.transpose(-1, -2)
    return torch.softmax(scores.float() * scale, -1).to(Q.dtype) @ C


def routing(x: Tensor, W: Tensor, K: int) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax((x @ W.t()).float(), -1)
    chosen, experts = torch.topk(probabilities, K, -1)
    return (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype), experts


FORMS: Mapping[str, Callable[..., Outputs]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "layernorm": layernorm,
    "cross_entropy": cross_entropy,
    "variance": variance,
    "rmsnorm_quant": rmsnorm_quant,
    "quant_gemm": quant_gemm,
    "mha": attention,
    "mha_decode": attention,
    "gqa_incremental": attention,
    "gqa_speculative": attention,
    "gqa_chunked_prefill": attention,
    "mla": latent_attention,
    "moe_routing": routing,
}
"""Where it is another one than that of `workloads`."""

LIBRARY_CALLS: Mapping[str, str] = {
    "softmax": "torch.softmax",
    "log_softmax": "torch.log_softmax",
    "layernorm": "layer_norm",
    "cross_entropy": "cross_entropy",
    "variance": "torch.var",
    "quant_gemm": "_scaled_mm",
}
"""Programs whose form is one library call, or has its weight in one."""


def of(cell: Cell) -> list[Peer]:
    """The peers that can compute a cell."""
    call = LIBRARY_CALLS.get(cell.program)
    peers = [Peer(call or "eager", "library" if call else "eager", partial(_eager, cell))]
    peers.append(Peer("inductor", "compiler", partial(_inductor, cell)))
    if cell.is_large:
        tuned = partial(_inductor, cell, mode="max-autotune-no-cudagraphs")
        peers.append(Peer("inductor max-autotune", "compiler", tuned, tuned=True))
    if FORMS.get(cell.program) is attention:
        peers += [Peer(name, "library", partial(_library, cell, name)) for name in BACKENDS]
    return peers


def form(cell: Cell) -> Callable[..., Outputs]:
    """The program in torch, of tensors, scalars and constants by name."""
    return FORMS.get(cell.program, cell.workload.eager)


def _numbers(cell: Cell) -> dict[str, Any]:
    return {**cell.case.scalars, **cell.case.constants}


def _eager(cell: Cell, inputs: Inputs) -> Run:
    function, numbers = form(cell), _numbers(cell)
    return lambda inputs: function(**inputs, **numbers)


def _inductor(cell: Cell, inputs: Inputs, mode: str | None = None) -> Run:
    function, numbers = compiled_for_one_shape(form(cell), mode=mode), _numbers(cell)
    return lambda inputs: function(**inputs, **numbers)


def _library(cell: Cell, backend: str, inputs: Inputs) -> Run:
    scale, grouped = float(cell.case.scalars["scale"]), cell.case.sizes["h"] != cell.case.sizes["k"]

    def run(inputs: Inputs) -> Outputs:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(
                inputs["Q"], inputs["K"], inputs["V"], scale=scale, enable_gqa=grouped
            )

    return run
