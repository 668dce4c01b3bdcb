"""What attention is compared with on a GPU: torch's libraries and torch's compilers. Needs torch alone.

Every peer takes the inputs of a cell by name and gives its output, in the cell's own layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.attention_cells import HALF_BYTES, Cell
from bench.cells import Inputs, Peer, Run
from bench.running import compiled_for_one_shape
from bench.workloads import Outputs

SCORES_LIMIT = 6e9
"""Bytes of a half-precision score matrix above which the plain expression is not run: it keeps several."""

BACKENDS: Mapping[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Libraries behind scaled_dot_product_attention."""


def of(cell: Cell) -> list[Peer]:
    """The peers that can compute a cell."""
    peers = [Peer(name, "library", partial(_library, cell, name)) for name in BACKENDS if cell.is_plain]
    peers.append(Peer("flex", "compiler", partial(_flex, cell)))
    if score_bytes(cell) < SCORES_LIMIT:
        peers.append(Peer("inductor", "compiler", partial(_inductor, cell)))
    return peers


def score_bytes(cell: Cell) -> int:
    """Bytes of the scores of all pairs, in half precision."""
    sizes = cell.case.sizes
    return HALF_BYTES * sizes["b"] * sizes["h"] * sizes["i"] * sizes["j"]


def sdpa(cell: Cell) -> Run:
    """scaled_dot_product_attention with the library that torch chooses; biases and caps left out."""

    def run(inputs: Inputs) -> torch.Tensor:
        q, k, v = _four_dims(cell, inputs)
        return _shaped(cell, _sdpa(cell, q, k, v))

    return run


def _four_dims(cell: Cell, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = inputs["Q"]
    return q.unsqueeze(2) if cell.is_decode else q, inputs["K"], inputs["V"]


def _shaped(cell: Cell, out: torch.Tensor) -> torch.Tensor:
    return out.squeeze(2) if cell.is_decode else out


def _group(cell: Cell) -> int:
    return cell.case.sizes["h"] // cell.case.sizes["k"]


def _scale(cell: Cell) -> float:
    return float(cell.case.scalars["scale"])


def _sdpa(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=cell.is_causal, scale=_scale(cell), enable_gqa=_group(cell) > 1
    )


def _library(cell: Cell, backend: str, inputs: Inputs) -> Run:
    run = sdpa(cell)

    def chosen(inputs: Inputs) -> Outputs:
        with sdpa_kernel(BACKENDS[backend]):
            return run(inputs)

    return chosen


def _flex(cell: Cell, inputs: Inputs) -> Run:
    """Slopes are those of `inputs`: a closure over other tensors would be compiled again."""
    cap, span, slope = cell.cap, cell.span, inputs.get("slope")
    is_decode, last = cell.is_decode, cell.length - 1

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if slope is not None:
            s = s + slope[h] * (j - (last if is_decode else i))
        return s

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j if span is None else (i >= j) & (i - j < span)

    mask = None
    if cell.is_causal:
        device = str(inputs["Q"].device)
        mask = create_block_mask(visible, None, None, cell.length, cell.length, device=device)
    compiled = compiled_for_one_shape(flex_attention)
    modified = score if cap is not None or slope is not None else None

    def run(inputs: Inputs) -> torch.Tensor:
        q, k, v = _four_dims(cell, inputs)
        out: torch.Tensor = compiled(
            q, k, v, score_mod=modified, block_mask=mask, scale=_scale(cell), enable_gqa=_group(cell) > 1
        )
        return _shaped(cell, out)

    return run


def _inductor(cell: Cell, inputs: Inputs) -> Run:
    compiled = compiled_for_one_shape(_plain)
    scale, group = _scale(cell), _group(cell)

    def run(inputs: Inputs) -> torch.Tensor:
        q, k, v = _four_dims(cell, inputs)
        out: torch.Tensor = compiled(
            q, k, v, inputs.get("slope"), scale, group, cell.is_causal, cell.span, cell.cap
        )
        return _shaped(cell, out)

    return run


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope: torch.Tensor | None,
    scale: float,
    group: int,
    causal: bool,
    span: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Attention as it is written without fusing, in the form that Inductor's patterns are made for."""
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.transpose(-1, -2)) * scale
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
    j = torch.arange(k.shape[2], device=q.device)[None]
    if slope is not None:
        s = s + slope.to(s.dtype)[None, :, None, None] * (j - i)
    if causal:
        s = s.masked_fill(j > i, -torch.inf)
    if span is not None:
        s = s.masked_fill(i - j >= span, -torch.inf)
    return torch.softmax(s.float(), -1).to(q.dtype) @ v
