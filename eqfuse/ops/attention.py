"""Attention, with what people add to it; and one query over a cache in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op


def _mask(given: frozenset[str], causal: bool, window: int | None) -> str:
    """The condition under which key j is seen by query i: the last queries are beside the last keys."""
    seen = []
    at = "i + N(j) - N(i)"
    if causal:
        seen.append(f"(j <= {at})")
    if window is not None:
        seen.append(f"({at} - j < {window})")
        if not causal:
            seen.append(f"(j - ({at}) < {window})")
    if "documents" in given:
        seen.append("(documents[b,i] == documents[b,j])")
    if "mask" in given:
        seen.append("(mask[i,j] != 0)")
    if "lengths" in given:
        seen.append("(j < lengths[b])")
    return " & ".join(seen)


def _grouped(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    if values["k"].ndim != 4 or values["q"].ndim != 4:
        raise EqfuseError(
            f"q has {values['q'].ndim} and k {values['k'].ndim} dimensions in attention",
            hint="q: [b, heads, i, d], k: [b, key heads, j, d]",
        )
    heads, shared = values["q"].shape[1], values["k"].shape[1]
    if shared == 0 or heads % shared:
        raise EqfuseError(
            f"{heads} heads of queries do not share {shared} heads of keys",
            hint="the second dimension of q is a multiple of that of k",
        )
    options["group"] = heads // shared
    return lambda made: made


@op("q", "k", "v", "sink", "bias", "gate", "documents", "mask", "lengths", shaped=_grouped)
def attention(
    given: frozenset[str],
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sigmoid: bool = False,
    statistics: bool = False,
    group: int = 1,
) -> str:
    """Attention of q: [b, heads, i, d] over k: [b, key heads, j, d] and v: [b, key heads, j, e], scores times `scale` (d ** -0.5).

    `causal` and `window` hide keys by their distance, `documents`: [b, j] those of other documents, `mask`: [i, j] where it is 0, `lengths`: [b] those
    behind. `sink`: [heads] are logits that take a share and give nothing (Xiao and others, 2023); `bias`: [heads, i, j] is added to scores; `gate`: [b,
    heads, i, e] multiplies outputs by its sigmoid (Qiu and others, 2025). Scores are capped at `soft_cap` by a tanh. With `sigmoid` weights are those of
    scores less log(N(j)), instead of a softmax (Ramapuram and others, 2024). `statistics` returns the greatest score of each query and the entropy of
    its weights too: [b, heads, i].
    """
    if sigmoid and ("sink" in given or statistics):
        raise EqfuseError("weights by a sigmoid have no sink and no statistics", hint="leave them out")
    head = f"h//{group}" if group > 1 else "h"
    factor = "" if scale == 1 else f" * {scale!r}" if scale is not None else " / sqrt(N(d))"
    score = f"sum[d](q[b,h,i,d] * k[b,{head},j,d]){factor}"
    if soft_cap is not None:
        score = f"{soft_cap!r} * tanh(({score}) / {soft_cap!r})"
    if "bias" in given:
        score += " + bias[h,i,j]"
    seen = _mask(given, causal, window)
    lines: list[str] = []
    gated = " * sigmoid(gate[b,h,i,e])" if "gate" in given else ""
    value = f"v[b,{head},j,e]"
    if sigmoid:
        weight = f"sigmoid({score} - log(N(j)))"
        lines += [
            f"p[b,h,i,j] = {f'where({seen}, {weight}, 0)' if seen else weight}",
            f"y[b,h,i,e] = sum[j](p[b,h,i,j] * {value}){gated}",
            "return y",
        ]
        return "\n".join(lines)
    sink = "sink" in given
    lines += [
        f"s[b,h,i,j] = {f'where({seen}, {score}, -inf)' if seen else score}",
        f"m[b,h,i] = {'max(max[j](s[b,h,i,j]), sink[h])' if sink else 'max[j](s[b,h,i,j])'}",
        "p[b,h,i,j] = exp(s[b,h,i,j] - finite(m[b,h,i]))",
        f"l[b,h,i] = sum[j](p[b,h,i,j]){' + exp(sink[h] - finite(m[b,h,i]))' if sink else ''}",
        f"y[b,h,i,e] = sum[j](p[b,h,i,j] * {value}) / l[b,h,i]{gated}",
    ]
    if not statistics:
        return "\n".join([*lines, "return y"])
    lines += [
        "top[b,h,i] = max[j](s[b,h,i,j])",
        "entropy[b,h,i] = log(l[b,h,i]) + finite(m[b,h,i]) - sum[j](where(p[b,h,i,j] > 0, p[b,h,i,j] * s[b,h,i,j], 0)) / l[b,h,i]",
    ]
    return "\n".join([*lines, "return y, top, entropy"])


@op("q1", "k1", "q2", "k2", "v", "weight")
def differential_attention(given: frozenset[str], scale: float | None = None, causal: bool = True) -> str:
    """The difference of two softmaxes over the same values, the second times weight: [heads] (Ye and others, 2024): q1 and q2: [b, heads, i, d], k1 and k2:
    [b, heads, j, d], v: [b, heads, j, e]."""
    factor = f" * {scale!r}" if scale is not None else " / sqrt(N(d))"
    lines = []
    for number in (1, 2):
        score = f"sum[d](q{number}[b,h,i,d] * k{number}[b,h,j,d]){factor}"
        score = f"where(j <= i + N(j) - N(i), {score}, -inf)" if causal else score
        lines += [
            f"s{number}[b,h,i,j] = {score}",
            f"p{number}[b,h,i,j] = exp(s{number}[b,h,i,j] - max[j](s{number}[b,h,i,j]))",
            f"a{number}[b,h,i,e] = sum[j](p{number}[b,h,i,j] * v[b,h,j,e]) / sum[j](p{number}[b,h,i,j])",
        ]
    return "\n".join([*lines, "y[b,h,i,e] = a1[b,h,i,e] - weight[h] * a2[b,h,i,e]", "return y"])


@op("q", "k", "v", "decay", "gate", "gates", shaped=_grouped)
def linear_attention(
    given: frozenset[str], scale: float | None = None, normalised: bool = False, group: int = 1
) -> str:
    """Causal attention without a softmax, q: [b, heads, i, d] over k: [b, key heads, i, d] and v: [b, key heads, i, e], scores times `scale` (1): linear in the
    length (Katharopoulos and others, 2020).

    Scores fall with the distance by `decay`: [heads], logarithms that are at most 0 (RetNet, Sun and others, 2023); by the sum of `gate`: [b, heads, i] between the
    positions (Mamba-2, Dao and Gu, 2024); or by that of `gates`: [b, heads, i, d] for each feature (gated linear attention, Yang and others, 2024).
    `normalised` divides by the sum of the scores, which features that are positive make positive.
    """
    if len({"decay", "gate", "gates"} & given) == 3:  # every name, as for the text of all
        given = given - {"decay", "gates"}
    if len({"decay", "gate", "gates"} & given) > 1:
        raise EqfuseError("decay, gate and gates are ways to say one thing", hint="give one of them")
    head = f"h//{group}" if group > 1 else "h"
    product, lines = f"q[b,h,i,d] * k[b,{head},j,d]", ["j: axis[i]"]
    factor = "" if scale in (None, 1) else f" * {scale!r}"
    if "gates" in given:
        lines.append("a[b,h,i,d] = sum[j](where(j <= i, gates[b,h,j,d], 0))")
        product += " * exp(a[b,h,i,d] - a[b,h,j,d])"
    score = f"sum[d]({product}){factor}"
    if "gate" in given:
        lines.append("a[b,h,i] = sum[j](where(j <= i, gate[b,h,j], 0))")
        score += " * exp(a[b,h,i] - a[b,h,j])"
    if "decay" in given:
        score += " * exp((i - j) * decay[h])"
    lines += [
        f"s[b,h,i,j] = where(j <= i, {score}, 0)",
        f"y[b,h,i,e] = sum[j](s[b,h,i,j] * v[b,{head},j,e]){' / sum[j](s[b,h,i,j])' if normalised else ''}",
    ]
    return "\n".join([*lines, "return y"])


def _paged(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    if values["k"].ndim != 4 or values["q"].ndim != 3:
        raise EqfuseError(
            f"q has {values['q'].ndim} and k {values['k'].ndim} dimensions in paged_decode",
            hint="q: [b, heads, d], k: [pages, positions, key heads, d]",
        )
    values["table"] = values["table"].to(torch.int32)
    options["page"] = values["k"].shape[1]
    options["group"] = values["q"].shape[1] // max(values["k"].shape[2], 1)
    return lambda made: made


@op("q", "k", "v", "table", "lengths", shaped=_paged)
def paged_decode(given: frozenset[str], scale: float | None = None, page: int = 16, group: int = 1) -> str:
    """One query a sequence, q: [b, heads, d], over caches in pages, k: [pages, positions, key heads, d] and v: [pages, positions, key heads, e]: the pages
    of a sequence are table: [b, pages of a sequence], and lengths: [b] of its positions are there (Kwon and others, 2023)."""
    factor = f" * {scale!r}" if scale is not None else " / sqrt(N(d))"
    head = f"h//{group}"
    at = f"table[b,j//{page}],j%{page},{head}"
    return f"""
table: i32[b, n]
j: axis[N(n) * {page}]
s[b,h,j] = where(j < lengths[b], sum[d](q[b,h,d] * k[{at},d]){factor}, -inf)
p[b,h,j] = exp(s[b,h,j] - finite(max[j](s[b,h,j])))
y[b,h,e] = sum[j](p[b,h,j] * v[{at},e]) / sum[j](p[b,h,j])
return y"""
