"""The programs of docs/gallery, each beside what a person would write for it in torch.

A file has a comment on top (the name, the paper, what it computes), the sizes that it is measured at, small odd ones that
it is tested at, and the values of scalars; then declarations of its tensors; then the program. The torch functions are
written with torch's own operators (`scaled_dot_product_attention`, `cdist`, `topk`), not from the programs: they are
compared with them in float64, and timed beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.workloads import Case, Number, Outputs, TensorSpec, Workload

FOLDER = Path(__file__).parent.parent / "docs" / "gallery"

DECLARATION = re.compile(r"(\w+): (\w+\[[\w, ]+\])")
"""Of a tensor; one of an axis (`k: axis[K]`) is part of the program."""


@dataclass(frozen=True)
class Entry(Workload):
    """A program of the gallery: `about` is its comment, of which the first lines are `title` and `paper`."""

    title: str = ""
    paper: str = ""
    about: str = ""
    written: str = ""
    """The declarations and the program, as the file has them."""

    def arguments(self, case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """With the sizes of axes that no tensor has."""
        given = {axis for tensor in self.tensors.values() for axis in tensor.axes}
        declared = set(re.findall(r"^(\w+): axis", self.source, re.MULTILINE))
        free = {axis: size for axis, size in case.sizes.items() if axis not in given | declared}
        return {**super().arguments(case, inputs), **({"sizes": free} if free else {})}


def _turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


def rope(Q: Tensor, K: Tensor, V: Tensor, c: Tensor, s: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(_turned(Q, c, s), _turned(K, c, s), V, is_causal=True, scale=scale)


def _before(length: int) -> Tensor:
    at = torch.arange(length)
    return at[:, None] - at


def sinks(Q: Tensor, K: Tensor, V: Tensor, sink: Tensor, scale: float, w: int) -> Tensor:
    back = _before(Q.shape[2])
    scores = (Q @ K.mT * scale).masked_fill((back < 0) | (back >= w), -torch.inf)
    logits = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    return logits.softmax(-1)[..., :-1] @ V


def differential(
    Q1: Tensor, Q2: Tensor, K1: Tensor, K2: Tensor, V: Tensor, scale: float, lam: float
) -> Tensor:
    one = F.scaled_dot_product_attention(Q1, K1, V, is_causal=True, scale=scale)
    return one - lam * F.scaled_dot_product_attention(Q2, K2, V, is_causal=True, scale=scale)


def sigmoid(Q: Tensor, K: Tensor, V: Tensor, scale: float) -> Tensor:
    return torch.sigmoid(Q @ K.mT * scale - torch.log(torch.tensor(float(K.shape[2])))) @ V


def mla(Q: Tensor, T: Tensor, C: Tensor, R: Tensor, scale: float) -> Tensor:
    query, key = torch.cat((Q, T), -1), torch.cat((C, R), -1)
    weights = torch.softmax(query @ key.mT * scale, -1)
    return weights @ C


def block_list(Q: Tensor, K: Tensor, V: Tensor, count: Tensor, block: Tensor, scale: float, B: int) -> Tensor:
    keys, values = (x[:, block].flatten(2, 3) for x in (K, V))
    seen = torch.arange(keys.shape[2]) < (count * B)[:, None]
    return F.scaled_dot_product_attention(Q, keys, values, attn_mask=seen[:, None], scale=scale)


def paged(Q: Tensor, K: Tensor, V: Tensor, page: Tensor, len: Tensor, scale: float, g: int, B: int) -> Tensor:
    keys, values = (x[page].flatten(1, 2).transpose(1, 2) for x in (K, V))
    seen = torch.arange(keys.shape[2]) < len[:, None]
    out = F.scaled_dot_product_attention(
        Q[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )
    return out[:, :, 0]


def retention(Q: Tensor, K: Tensor, V: Tensor, rate: Tensor, scale: float) -> Tensor:
    back = _before(Q.shape[2])
    decay = torch.exp(-back * rate[:, None, None]).masked_fill(back < 0, 0)
    scores = Q @ K.mT * scale * decay
    return scores @ V / scores.sum(-1, keepdim=True).abs().clamp(min=1)


def qk_norm(Q: Tensor, K: Tensor, V: Tensor, v: Tensor, w: Tensor, scale: float, eps: float) -> Tensor:
    q, k = F.rms_norm(Q, v.shape, v, eps), F.rms_norm(K, w.shape, w, eps)
    return F.scaled_dot_product_attention(q, k, V, is_causal=True, scale=scale)


def rmsnorm_linear(x: Tensor, g: Tensor, W: Tensor, eps: float) -> Tensor:
    return F.linear(F.rms_norm(x, g.shape, g, eps), W)


def linear_cross_entropy(x: Tensor, W: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, W), label, reduction="none")


def moe_routing(x: Tensor, W: Tensor, K: int) -> Outputs:
    values, experts = F.linear(x, W).topk(K)
    return values.softmax(-1), experts


def colbert(Q: Tensor, D: Tensor, len: Tensor) -> Tensor:
    absent = torch.arange(D.shape[1]) >= len[:, None]
    return (Q @ D.mT).masked_fill(absent[:, None], -torch.inf).amax(-1).sum(-1)


def knn(x: Tensor, y: Tensor, K: int) -> Outputs:
    distances, at = torch.cdist(x, y).square().topk(K, largest=False)
    return distances, at


def kmeans(x: Tensor, c: Tensor) -> Outputs:
    nearest = torch.cdist(x, c).argmin(1)
    sums = torch.zeros_like(c).index_add(0, nearest, x)
    return nearest, sums / torch.bincount(nearest, minlength=c.shape[0]).clamp(min=1)[:, None]


def sinkhorn(x: Tensor, y: Tensor, g: Tensor, eps: float) -> Tensor:
    cost = torch.cdist(x, y).square() / 2
    uniform = torch.log(torch.tensor(float(y.shape[0]), dtype=x.dtype))
    return eps * (uniform - torch.logsumexp((g - cost) / eps, 1))


def chamfer(x: Tensor, y: Tensor) -> Tensor:
    distances = torch.cdist(x, y).square()
    return distances.amin(2).mean(1) + distances.amin(1).mean(1)


def welford(x: Tensor) -> Outputs:
    variance, mean = torch.var_mean(x, 1, correction=0)
    return mean, variance


def top_p(x: Tensor, p: float, K: int) -> Outputs:
    likeliest, tokens = x.softmax(-1).topk(K)
    kept = likeliest.masked_fill(likeliest.cumsum(-1) - likeliest >= p, 0)
    return kept / kept.sum(-1, keepdim=True), tokens


def nbody(x: Tensor, m: Tensor, eps: float) -> Tensor:
    apart = x - x[:, None]
    return (m[:, None] * apart * torch.rsqrt(apart.square().sum(-1, keepdim=True) + eps) ** 3).sum(1)


DRAWS: Mapping[str, Mapping[str, str]] = {
    "block_list": {"block": "index t", "count": "count n"},
    "paged": {"page": "index s", "len": "count j"},
    "retention": {"rate": "slope"},
    "linear_cross_entropy": {"W": "weight", "label": "index v"},
    "rmsnorm_linear": {"W": "weight"},
    "moe_routing": {"W": "weight"},
    "colbert": {"len": "count j"},
    "welford": {"x": "positive"},
    "nbody": {"m": "positive"},
}
"""How values are drawn that are not normal, as in `bench.workloads`."""

_TORCH: tuple[Callable[..., Outputs], ...] = (
    rope,
    sinks,
    differential,
    sigmoid,
    mla,
    block_list,
    paged,
    retention,
    qk_norm,
    rmsnorm_linear,
    linear_cross_entropy,
    moe_routing,
    colbert,
    knn,
    kmeans,
    sinkhorn,
    chamfer,
    welford,
    top_p,
    nbody,
)


def _numbers(words: str) -> dict[str, Number]:
    """From `b=1 scale=0.125`."""
    pairs = (word.partition("=") for word in words.split())
    return {name: int(text) if text.isdecimal() else float(text) for name, _, text in pairs}


def _entry(run: Callable[..., Outputs]) -> Entry:
    name = run.__name__
    lines = (FOLDER / f"{name}.eqf").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    written = [line for line in lines if not line.startswith("#")]
    settings = {m[1]: _numbers(m[2]) for m in (re.match(r"(\w+): (\w+=.*)", line) for line in comment) if m}
    about = " ".join(line for line in comment[2:] if line.partition(":")[0] not in settings)
    declared = {m[1]: m[2] for m in map(DECLARATION.fullmatch, written) if m and not m[2].startswith("axis")}
    drawn = {
        t: text + (f" ~ {how}" if (how := DRAWS.get(name, {}).get(t)) else "") for t, text in declared.items()
    }

    def case(label: str, sizes: str) -> Case:
        axes = {axis: int(size) for axis, size in settings[sizes].items()}
        return Case(label, "f32", axes, settings.get("scalars", {}), settings.get("constants", {}))

    return Entry(
        name,
        "gallery",
        "\n".join(line for line in written if not DECLARATION.fullmatch(line) or ": axis" in line),
        {tensor: TensorSpec.parse(text) for tensor, text in drawn.items()},
        run,
        {"small": case("small", "small"), "cpu": case("cpu", "sizes")},
        title=comment[0],
        paper=comment[1],
        about=about,
        written="\n".join(written),
    )


GALLERY: Mapping[str, Entry] = {run.__name__: _entry(run) for run in _TORCH}
