"""Every program that eqfuse is measured on, as data: source, tensors, sizes, unfused torch.

`WORKLOADS` is the whole table. A workload has cases: `small` (odd sizes, for interpreters and
verification), `cpu` (about a second unfused on a CPU), and the sizes of the papers' tables
(`workloads.json`), in the papers' dtypes.

Tensors are written `T[b, h, i, d]`: a dtype, where `T` is the case's, and one axis per dimension,
optionally `~ draw`: how random values are made. Draws are `normal` (the default for floats),
`weight` (normal, scaled by 1/sqrt of the last dimension), `positive` (uniform in 0.1 to 1.1),
`slope` (2 ** (-8 (n + 1) / size), ALiBi's), `index AXIS` (uniform integers below its size), `count AXIS` (likewise from 1 to its
size), `length AXIS` (log-normal ones from 1 to its size, of a heavy tail) and `first AXIS` (where the document of every position starts: documents of such
lengths, one after the other).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import eager
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.functions import CASTS

Number = int | float
Outputs = torch.Tensor | tuple[torch.Tensor, ...]

PAPERS: Mapping[str, Any] = json.loads(Path(__file__).with_name("workloads.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class TensorSpec:
    """One input; `dtype` None stands for the dtype of the case."""

    dtype: str | None
    axes: tuple[str, ...]
    draw: str

    @staticmethod
    def parse(text: str) -> TensorSpec:
        """From `T[b, h, i, d] ~ draw`; raises ValueError where the text is something else."""
        found = re.fullmatch(r"(\w+)\[([\w, ]+)\](?: ~ (\w+(?: \w+)?))?", text)
        if found is None:
            raise ValueError(f"not a tensor: {text!r}")
        dtype, axes, draw = found.groups()
        return TensorSpec(
            None if dtype == "T" else dtype, tuple(axes.replace(" ", "").split(",")), draw or "normal"
        )


@dataclass(frozen=True)
class Case:
    """One set of sizes of a workload. `constants` are known when compiling, `scalars` when calling."""

    name: str
    dtype: str
    sizes: Mapping[str, int]
    scalars: Mapping[str, Number]
    constants: Mapping[str, Number]


@dataclass(frozen=True)
class Workload:
    """A program with its inputs and its unfused form.

    `eager` takes tensors, scalars and constants by name and returns the outputs in program order. `refused` are the
    schedules that need a merge which the program has not, `checked` the papers' cases that `bench workloads` runs, as
    a CPU does them in seconds, `sized` the axes that no tensor determines.
    """

    name: str
    family: str
    source: str
    tensors: Mapping[str, TensorSpec]
    eager: Callable[..., Outputs]
    cases: Mapping[str, Case] = field(repr=False)
    refused: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    sized: tuple[str, ...] = ()

    @property
    def paper_cases(self) -> tuple[Case, ...]:
        return tuple(case for name, case in self.cases.items() if name not in ("small", "cpu", "long"))

    def dtype(self, tensor: str, case: Case) -> str:
        return self.tensors[tensor].dtype or case.dtype

    def shape(self, tensor: str, case: Case) -> tuple[int, ...]:
        return tuple(case.sizes[axis] for axis in self.tensors[tensor].axes)

    def text(self, case: Case) -> str:
        """The source with a declaration of every tensor, so that it compiles without tensors."""
        lines = [f"{name}: {self.dtype(name, case)}[{', '.join(t.axes)}]" for name, t in self.tensors.items()]
        return "\n".join([*lines, self.source])

    def inputs(self, case: Case, *, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Fresh random tensors: the same seed, the same values on every device."""
        made = self.drawn(case, torch.Generator().manual_seed(seed))
        return {name: tensor.to(device) for name, tensor in made.items()}

    def drawn(self, case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random tensors on the device of `generator`."""
        return {
            name: _draw(spec, self.shape(name, case), case, generator).to(
                TORCH_DTYPES[self.dtype(name, case)]
            )
            for name, spec in self.tensors.items()
        }

    def arguments(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What a kernel compiled with the case's constants is called with."""
        sizes = {axis: case.sizes[axis] for axis in self.sized}
        return {**inputs, **case.scalars, **({"sizes": sizes} if sizes else {})}

    @property
    def exact_source(self) -> str:
        """The source without its casts to narrower dtypes: what it computes but for rounding."""
        return re.sub(rf"\b({'|'.join(CASTS)})\(", "(", self.source)

    def run_exact(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the unfused program in float64, casts left out."""
        return self.run_eager(
            case, {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        )

    def run_eager(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the unfused program, always as a tuple."""
        result = self.eager(**inputs, **case.scalars, **case.constants)
        return result if isinstance(result, tuple) else (result,)


def _draw(spec: TensorSpec, shape: tuple[int, ...], case: Case, generator: torch.Generator) -> torch.Tensor:
    place = generator.device
    match spec.draw.split():
        case ["normal"]:
            return torch.randn(shape, generator=generator, device=place)
        case ["weight"]:
            return torch.randn(shape, generator=generator, device=place) / math.sqrt(shape[-1])
        case ["positive"]:
            return torch.rand(shape, generator=generator, device=place) + 0.1
        case ["slope"]:
            return torch.exp2(-8.0 * (torch.arange(shape[0], device=place) + 1) / shape[0])
        case ["index", axis]:
            return torch.randint(case.sizes[axis], shape, generator=generator, device=place)
        case ["count", axis]:
            return torch.randint(1, case.sizes[axis] + 1, shape, generator=generator, device=place)
        case ["length", axis]:
            return _lengths(shape, case.sizes[axis], generator)
        case ["first", axis]:
            ends = _lengths(shape, case.sizes[axis], generator).cumsum(0)
            at = torch.arange(shape[0], device=place)
            starts = torch.cat([at[:1], ends[ends < shape[0]]])
            return starts[torch.searchsorted(starts, at, right=True) - 1]
        case _:
            raise ValueError(f"unknown draw {spec.draw!r}")


def _lengths(shape: tuple[int, ...], most: int, generator: torch.Generator) -> torch.Tensor:
    """Integers from 1 to `most`, log-normal with a mean of about a sixteenth of it."""
    normal = torch.randn(shape, generator=generator, device=generator.device)
    return torch.exp(normal + math.log(most / 16) - 0.5).clamp(1, most).long()


WORKLOADS: dict[str, Workload] = {}


def _program(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _add(
    name: str,
    family: str,
    source: str,
    tensors: Mapping[str, str],
    run: Callable[..., Outputs],
    cases: Mapping[str, Mapping[str, int]],
    *,
    scalars: Callable[[Mapping[str, int]], Mapping[str, Number]] = lambda sizes: {},
    constants: Callable[[Mapping[str, int]], Mapping[str, Number]] = lambda sizes: {},
    dtype: str = "f16",
    refused: tuple[str, ...] = (),
    checked: tuple[str, ...] = (),
) -> None:
    """Enter a workload; `dtype` is that of the papers' cases (`small`, `cpu` and `long` are float32)."""

    def case(label: str, sizes: Mapping[str, int]) -> Case:
        kind = "f32" if label in ("small", "cpu", "long") else dtype
        return Case(label, kind, sizes, scalars(sizes), constants(sizes))

    specs = {tensor: TensorSpec.parse(text) for tensor, text in tensors.items()}
    entries = {label: case(label, sizes) for label, sizes in cases.items()}
    WORKLOADS[name] = Workload(name, family, _program(source), specs, run, entries, refused, checked)


def select(pattern: str | None, table: Mapping[str, Workload] = WORKLOADS) -> list[Workload]:
    """Workloads whose name or family starts with one of the comma-separated words; all where None."""
    if pattern is None:
        return list(table.values())
    words = tuple(word.strip() for word in pattern.split(","))
    return [w for w in table.values() if w.name.startswith(words) or w.family.startswith(words)]


# --- attention ---------------------------------------------------------------------------------

_SCORES = "S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale"
_CAPPED = "C[b,h,i,j] = cap * tanh(S[b,h,i,j] / cap)"


def _attention(*scores: str, grouped: bool = False, query: bool = True) -> str:
    """Scores S, the given definitions made from them, the softmax of the last one, the weighted sum.

    With `grouped`, `g` query heads share a head of keys and values. Without `query`, the one query
    of each head has no axis of its own (decoding).
    """
    last = scores[-1][0] if scores else "S"
    lines = (
        _SCORES,
        *scores,
        f"P[b,h,i,j] = exp({last}[b,h,i,j] - max[j]({last}[b,h,i,j]))",
        "O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])",
    )
    text = "\n".join(lines)
    if grouped:
        text = text.replace("K[b,h,", "K[b,h//g,").replace("V[b,h,", "V[b,h//g,")
    return text if query else text.replace("h,i,", "h,")


_QKV = {"Q": "T[b, h, i, d]", "K": "T[b, k, j, d]", "V": "T[b, k, j, e]"}
_QKV_SAME = {"Q": "T[b, h, i, d]", "K": "T[b, h, j, d]", "V": "T[b, h, j, e]"}
_ONE_QUERY = {"Q": "T[b, h, d]", "K": "T[b, k, j, d]", "V": "T[b, k, j, e]"}
_ONE_QUERY_SAME = {"Q": "T[b, h, d]", "K": "T[b, h, j, d]", "V": "T[b, h, j, e]"}


def _qkv(b: int, h: int, k: int, i: int, j: int, d: int) -> dict[str, int]:
    return {"b": b, "h": h, "k": k, "i": i, "j": j, "d": d, "e": d}


def _scale(sizes: Mapping[str, int]) -> dict[str, Number]:
    return {"scale": sizes["d"] ** -0.5}


def _group(sizes: Mapping[str, int]) -> dict[str, Number]:
    return {"g": sizes["h"] // sizes["k"]}


_NEPTUNE = PAPERS["neptune_attention"]


def _neptune(operator: str) -> dict[str, dict[str, int]]:
    """small, cpu, and one case per length of the paper."""
    table = _NEPTUNE["operators"][operator]
    q_heads, kv_heads, d = table["q_heads"], table["kv_heads"], table["d"]
    group = q_heads // kv_heads
    decoding = table.get("q") == 1
    lengths = [(f"n{n}", _qkv(1, q_heads, kv_heads, 1 if decoding else n, n, d)) for n in _NEPTUNE["lengths"]]
    small = _qkv(2, 2 * group, 2, 1 if decoding else 29, 37, 20)
    cpu = _qkv(1, 8, 8 // group, 1 if decoding else 1024, 8192 if decoding else 1024, 64)
    return {"small": small, "cpu": cpu, **dict(lengths)}


_LONG = {"long": _qkv(1, 4, 4, 8192, 8192, 64)}
"""Scores of 1 GB in float32: the case that shows what is never whole in memory."""

_PAST = "j <= i + N(j) - N(i)"
"""The causal predicate for queries that stand at the end of the keys (j <= i where lengths agree)."""

_CAUSAL = f"T[b,h,i,j] = where({_PAST}, S[b,h,i,j], -inf)"

_add(
    "global_prefill",
    "neptune",
    _attention(),
    _QKV_SAME,
    eager.global_attention,
    _neptune("global_prefill") | _LONG,
    scalars=_scale,
)
_add(
    "causal_prefill",
    "neptune",
    _attention(_CAUSAL),
    _QKV_SAME,
    eager.causal_attention,
    _neptune("causal_prefill") | _LONG,
    scalars=_scale,
)
_add(
    "gqa_prefill",
    "neptune",
    _attention(_CAUSAL, grouped=True),
    _QKV,
    eager.causal_attention,
    _neptune("gqa_prefill"),
    scalars=_scale,
    constants=_group,
)
_add(
    "alibi_prefill",
    "neptune",
    _attention(f"T[b,h,i,j] = where({_PAST}, S[b,h,i,j] + slope[h] * (j - i), -inf)"),
    _QKV_SAME | {"slope": "f32[h] ~ slope"},
    eager.alibi_attention,
    _neptune("alibi_prefill"),
    scalars=_scale,
)
_add(
    "softcap_prefill",
    "neptune",
    _attention(_CAPPED, f"T[b,h,i,j] = where({_PAST}, C[b,h,i,j], -inf)", grouped=True),
    _QKV,
    eager.softcap_attention,
    _neptune("softcap_prefill"),
    scalars=lambda sizes: {**_scale(sizes), "cap": 50.0},
    constants=_group,
)
_add(
    "window_prefill",
    "neptune",
    _attention(
        f"T[b,h,i,j] = where(({_PAST}) & (i + N(j) - N(i) - j < span), S[b,h,i,j], -inf)", grouped=True
    ),
    _QKV,
    eager.window_attention,
    _neptune("window_prefill"),
    scalars=_scale,
    # The paper's window is 4096; the two small cases have one that their lengths exceed.
    constants=lambda sizes: {**_group(sizes), "span": {37: 11, 1024: 256}.get(sizes["j"], 4096)},
)
_add(
    "causal_decode",
    "neptune",
    _attention(query=False),
    _ONE_QUERY_SAME,
    eager.decode,
    _neptune("causal_decode"),
    scalars=_scale,
)
_add(
    "gqa_decode",
    "neptune",
    _attention(grouped=True, query=False),
    _ONE_QUERY,
    eager.decode,
    _neptune("gqa_decode"),
    scalars=_scale,
    constants=_group,
)
_add(
    "alibi_decode",
    "neptune",
    _attention("T[b,h,i,j] = S[b,h,i,j] + slope[h] * (j - (N(j) - 1))", query=False),
    _ONE_QUERY_SAME | {"slope": "f32[h] ~ slope"},
    eager.alibi_decode,
    _neptune("alibi_decode"),
    scalars=_scale,
)
_add(
    "softcap_decode",
    "neptune",
    _attention(_CAPPED, grouped=True, query=False),
    _ONE_QUERY,
    eager.softcap_decode,
    _neptune("softcap_decode"),
    scalars=lambda sizes: {**_scale(sizes), "cap": 50.0},
    constants=_group,
)


def _tokens(n: int, h: int, k: int, d: int) -> dict[str, int]:
    return {"i": n, "j": n, "h": h, "k": k, "d": d, "e": d}


def _cache(b: int, h: int, k: int, j: int, s: int, d: int) -> dict[str, int]:
    return {"b": b, "h": h, "k": k, "j": j, "s": s, "d": d, "e": d}


_add(
    "varlen_prefill",
    "serving",
    """
    S[h,i,j] = sum[d](Q[i,h,d] * K[j,h//g,d]) * scale
    T[h,i,j] = where((first[i] <= j) & (j <= i), S[h,i,j], -inf)
    P[h,i,j] = exp(T[h,i,j] - max[j](T[h,i,j]))
    O[i,h,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[j,h//g,e])
    """,
    {"Q": "T[i, h, d]", "K": "T[j, k, d]", "V": "T[j, k, e]", "first": "i32[i] ~ first j"},
    eager.packed_attention,
    {
        "small": _tokens(67, 4, 2, 20),
        "cpu": _tokens(2048, 8, 2, 64),
        **{f"n{n}": _tokens(n, 32, 8, 128) for n in (8192, 32768)},
    },
    scalars=_scale,
    constants=_group,
)
_add(
    "paged_decode",
    "serving",
    """
    S[b,h,j] = sum[d](Q[b,h,d] * K[slot[b,j],h//g,d]) * scale
    T[b,h,j] = where(j < len[b], S[b,h,j], -inf)
    P[b,h,j] = exp(T[b,h,j] - max[j](T[b,h,j]))
    O[b,h,e] = sum[j](P[b,h,j] / sum[j](P[b,h,j]) * V[slot[b,j],h//g,e])
    """,
    {
        "Q": "T[b, h, d]",
        "K": "T[s, k, d]",
        "V": "T[s, k, e]",
        "slot": "i32[b, j] ~ index s",
        "len": "i32[b] ~ length j",
    },
    eager.paged_decode,
    {
        "small": _cache(5, 4, 2, 83, 131, 20),
        "cpu": _cache(16, 8, 2, 4096, 16384, 64),
        **{f"b{b}": _cache(b, 64, 8, 65536, 262144, 128) for b in (1, 64)},
    },
    scalars=_scale,
    constants=_group,
)


def _redfuser(table: str) -> dict[str, dict[str, int]]:
    """Rows of one of RedFuser's tables, each a mapping from column to number."""
    columns = PAPERS[table]["columns"]
    return {row: dict(zip(columns, values, strict=True)) for row, values in PAPERS[table]["rows"].items()}


def _redfuser_mha(decoding: bool) -> dict[str, dict[str, int]]:
    rows = _redfuser("redfuser_mha").items()
    return {
        name: _qkv(r["batch"], r["heads"], r["heads"], r["q"], r["kv"], r["d"])
        for name, r in rows
        if (r["q"] == 1) == decoding
    }


_add(
    "mha",
    "redfuser",
    _attention(),
    _QKV_SAME,
    eager.global_attention,
    {"small": _qkv(2, 3, 3, 19, 23, 12), "cpu": _qkv(4, 8, 8, 512, 512, 64)} | _redfuser_mha(decoding=False),
    scalars=_scale,
)
_add(
    "mha_decode",
    "redfuser",
    _attention(),
    _QKV_SAME,
    eager.global_attention,
    {"small": _qkv(2, 3, 3, 1, 41, 12), "cpu": _qkv(4, 16, 16, 1, 2048, 128)} | _redfuser_mha(decoding=True),
    scalars=_scale,
)


def _mla(b: int, h: int, j: int, d: int, r: int) -> dict[str, int]:
    return {"b": b, "h": h, "j": j, "d": d, "e": d, "r": r}


_add(
    "mla",
    "redfuser",
    """
    S[b,h,j] = (sum[d](Q[b,h,d] * C[b,j,d]) + sum[r](Qr[b,h,r] * R[b,j,r])) * scale
    P[b,h,j] = exp(S[b,h,j] - max[j](S[b,h,j]))
    O[b,h,e] = sum[j](P[b,h,j] / sum[j](P[b,h,j]) * C[b,j,e])
    """,
    {"Q": "T[b, h, d]", "Qr": "T[b, h, r]", "C": "T[b, j, d]", "R": "T[b, j, r]"},
    eager.mla_decode,
    {"small": _mla(2, 3, 37, 20, 6), "cpu": _mla(2, 16, 2048, 512, 64)}
    | {
        name: _mla(r["batch"], r["heads"], r["kv"], r["d"], r["rope_d"])
        for name, r in _redfuser("redfuser_mla").items()
    },
    scalars=lambda sizes: {"scale": (sizes["d"] + sizes["r"]) ** -0.5},
)


def _mirage(model: Mapping[str, int], mode: str) -> dict[str, dict[str, int]]:
    table = PAPERS["mirage"]["attention"]
    h, k, d, q, kv = model["heads"], model["kv_heads"], model["d"], table["q"][mode], table["kv"]
    group = h // k
    small_q = min(q, 13)
    cpu_heads = 8 if h % 8 == 0 else 9
    cpu_kv_heads = 1 if k == 1 else cpu_heads // min(group, cpu_heads)
    return {
        "small": _qkv(2, 2 * min(group, 3), 1 if k == 1 else 2, small_q, 43, 12),
        "cpu": _qkv(1, cpu_heads, cpu_kv_heads, q, kv, d),
    } | {f"b{b}": _qkv(b, h, k, q, kv, d) for b in table["batch"]}


for _kind in ("MHA", "GQA", "MQA"):
    _model = PAPERS["mirage"]["attention"][_kind]
    for _mode in PAPERS["mirage"]["attention"]["q"]:
        _add(
            f"{_kind.lower()}_{_mode}",
            "mirage",
            _attention(grouped=_kind != "MHA"),
            _QKV if _kind != "MHA" else _QKV_SAME,
            eager.global_attention,
            _mirage(_model, _mode),
            scalars=_scale,
            constants=_group if _kind != "MHA" else lambda sizes: {},
        )

_ATTENTION_CASES = {
    "small": _qkv(2, 3, 3, 19, 23, 12),
    "cpu": _qkv(1, 8, 8, 1024, 1024, 64),
    "n4096": _qkv(1, 32, 32, 4096, 4096, 128),
}
_add(
    "attention_lse",
    "common",
    _attention() + "\nL[b,h,i] = log(sum[j](P[b,h,i,j])) + max[j](S[b,h,i,j])",
    _QKV_SAME,
    eager.attention_lse,
    _ATTENTION_CASES,
    scalars=_scale,
)
_add(
    "qknorm_attention",
    "common",
    """
    q[b,h,i,d] = Q[b,h,i,d] / sqrt(sum[d](sq(Q[b,h,i,d])))
    k[b,h,j,d] = K[b,h,j,d] / sqrt(sum[d](sq(K[b,h,j,d])))
    S[b,h,i,j] = sum[d](q[b,h,i,d] * k[b,h,j,d]) * scale
    P[b,h,i,j] = exp(S[b,h,i,j] - max[j](S[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
    """,
    _QKV_SAME,
    eager.qknorm_attention,
    _ATTENTION_CASES,
    scalars=lambda sizes: {"scale": 10.0},
)


def _performer(b: int, h: int, n: int, d: int, f: int) -> dict[str, int]:
    return {"b": b, "h": h, "i": n, "j": n, "d": d, "e": d, "f": f}


_PERFORMER = PAPERS["neptune_other"]["performer"]
_add(
    "performer",
    "neptune",
    """
    u[b,h,i,f] = sum[d](Q[b,h,i,d] * W[f,d]) * c - sum[d](sq(Q[b,h,i,d])) * (c * c / 2)
    v[b,h,j,f] = sum[d](K[b,h,j,d] * W[f,d]) * c - sum[d](sq(K[b,h,j,d])) * (c * c / 2)
    q[b,h,i,f] = exp(u[b,h,i,f] - max[f](u[b,h,i,f]))
    k[b,h,j,f] = exp(v[b,h,j,f] - max[j, f](v[b,h,j,f]))
    A[b,h,f,e] = sum[j](k[b,h,j,f] * V[b,h,j,e])
    z[b,h,i] = sum[f](q[b,h,i,f] * sum[j](k[b,h,j,f]))
    O[b,h,i,e] = sum[f](q[b,h,i,f] * A[b,h,f,e]) / z[b,h,i]
    """,
    _QKV_SAME | {"W": "T[f, d]"},
    eager.performer,
    {"small": _performer(2, 2, 29, 12, 18), "cpu": _performer(1, 8, 2048, 64, 256)}
    | {
        f"n{n}": _performer(1, _PERFORMER["heads"], n, _PERFORMER["d"], _PERFORMER["features"])
        for n in _PERFORMER["lengths"]
    },
    scalars=lambda sizes: {"c": sizes["d"] ** -0.25},
)

# --- rows ----------------------------------------------------------------------------------------


def _rows(r: int, c: int) -> dict[str, int]:
    return {"r": r, "c": c}


def _neptune_rows(name: str) -> dict[str, dict[str, int]]:
    table = PAPERS["neptune_other"][name]
    return {f"{r}x{c}": _rows(r, c) for r in table["rows"] for c in table["cols"]}


_ROWS = {
    "small": _rows(5, 83),
    "cpu": _rows(1024, 8192),
    "8192x8192": _rows(8192, 8192),
    "16384x4096": _rows(16384, 4096),
}
_X = {"x": "T[r, c]"}

_add(
    "l2norm",
    "neptune",
    """
    m[r] = max[c](abs(x[r,c]))
    n[r] = m[r] * sqrt(sum[c](sq(x[r,c] / m[r])))
    """,
    _X,
    eager.l2norm,
    {"small": _rows(5, 83), "cpu": _rows(256, 32768)} | _neptune_rows("l2norm"),
)
_add(
    "rmsnorm_quant",
    "neptune",
    """
    s[r] = mean[c](sq(x[r,c]))
    y[r,c] = x[r,c] * rsqrt(s[r] + eps)
    m[r] = max[c](abs(y[r,c]))
    q[r,c] = f8e4m3(y[r,c] / m[r] * 448)
    return q, m
    """,
    _X,
    eager.rmsnorm_quant,
    {"small": _rows(5, 83), "cpu": _rows(256, 32768)} | _neptune_rows("rmsnorm_quant"),
    scalars=lambda sizes: {"eps": 1e-6},
)


def _gemm(i: int, n: int, k: int) -> dict[str, int]:
    return {"i": i, "n": n, "k": k}


_add(
    "quant_gemm",
    "redfuser",
    """
    s[i] = max[k](abs(A[i,k])) / 448
    C[i,n] = sum[k](f8e4m3(A[i,k] / s[i]) * W[n,k]) * s[i]
    """,
    {"A": "T[i, k]", "W": "f8e4m3[n, k]"},
    eager.quant_gemm,
    {"small": _gemm(7, 13, 41), "cpu": _gemm(1024, 1024, 1024)}
    | {name: _gemm(r["M"], r["N"], r["K"]) for name, r in _redfuser("redfuser_quant_gemm").items()},
    dtype="bf16",
)
_add(
    "variance",
    "redfuser",
    """
    m[r] = mean[c](x[r,c])
    v[r] = mean[c](sq(x[r,c] - m[r]))
    """,
    _X,
    eager.variance,
    {"small": _rows(5, 83), "cpu": _rows(256, 32768)}
    | {name: _rows(r["batch"], r["length"]) for name, r in _redfuser("redfuser_variance").items()},
    dtype="f32",
)


def _particles(b: int, p: int, d: int) -> dict[str, int]:
    return {"b": b, "p": p, "d": d}


_add(
    "inertia",
    "redfuser",
    """
    M[b] = sum[p](m[b,p])
    c[b,d] = sum[p](m[b,p] * x[b,p,d]) / M[b]
    I[b] = sum[p](m[b,p] * sum[d](sq(x[b,p,d] - c[b,d])))
    """,
    {"m": "T[b, p] ~ positive", "x": "T[b, p, d]"},
    eager.inertia,
    {"small": _particles(3, 59, 3), "cpu": _particles(128, 32768, 3)}
    | {
        name: _particles(r["batch"], r["particles"], r["dim"])
        for name, r in _redfuser("redfuser_inertia").items()
    },
    dtype="f32",
)
_add(
    "sum_sum",
    "redfuser",
    """
    m[r] = sum[c](sq(x[r,c]))
    s[r] = sum[c](x[r,c] * y[r,c] / sqrt(max(m[r] - 10, 0.000001)))
    """,
    {"x": "T[r, c]", "y": "T[r, c]"},
    eager.sum_sum,
    _ROWS,
    dtype="f32",
)
_add(
    "softmax",
    "common",
    """
    e[r,c] = exp(x[r,c] - max[c](x[r,c]))
    y[r,c] = e[r,c] / sum[c](e[r,c])
    """,
    _X,
    eager.softmax,
    _ROWS,
)
_add(
    "log_softmax",
    "common",
    """
    t[r,c] = x[r,c] - max[c](x[r,c])
    y[r,c] = t[r,c] - log(sum[c](exp(t[r,c])))
    """,
    _X,
    eager.log_softmax,
    _ROWS,
)
_add(
    "logsumexp",
    "common",
    """
    m[r] = max[c](x[r,c])
    y[r] = m[r] + log(sum[c](exp(x[r,c] - m[r])))
    """,
    _X,
    eager.logsumexp,
    _ROWS,
)
_add(
    "layernorm",
    "common",
    """
    m[r] = mean[c](x[r,c])
    v[r] = mean[c](sq(x[r,c] - m[r]))
    y[r,c] = (x[r,c] - m[r]) * rsqrt(v[r] + eps) * w[c] + b[c]
    """,
    _X | {"w": "T[c]", "b": "T[c]"},
    eager.layernorm,
    _ROWS,
    scalars=lambda sizes: {"eps": 1e-5},
)
_add(
    "cross_entropy",
    "common",
    """
    m[r] = max[c](x[r,c])
    L[r] = m[r] + log(sum[c](exp(x[r,c] - m[r]))) - x[r, label[r]]
    """,
    _X | {"label": "i64[r] ~ index c"},
    eager.cross_entropy,
    _ROWS,
)
_add(
    "softmax_entropy",
    "common",
    """
    t[r,c] = x[r,c] - max[c](x[r,c])
    l[r,c] = t[r,c] - log(sum[c](exp(t[r,c])))
    H[r] = -sum[c](exp(l[r,c]) * l[r,c])
    """,
    _X,
    eager.softmax_entropy,
    _ROWS,
)
_add(
    "weighted_variance",
    "common",
    """
    W[r] = sum[c](w[r,c])
    m[r] = sum[c](w[r,c] * x[r,c]) / W[r]
    v[r] = sum[c](w[r,c] * sq(x[r,c] - m[r])) / W[r]
    """,
    {"w": "T[r, c] ~ positive", "x": "T[r, c]"},
    eager.weighted_variance,
    _ROWS,
    dtype="f32",
)
_add(
    "covariance",
    "common",
    "v[r] = mean[c]((x[r,c] - mean[c](x[r,c])) * (y[r,c] - mean[c](y[r,c])))",
    {"x": "T[r, c]", "y": "T[r, c]"},
    eager.covariance,
    _ROWS,
    dtype="f32",
)
_add(
    "cosine_similarity",
    "common",
    "s[r] = sum[c](x[r,c] * y[r,c]) / (sqrt(sum[c](sq(x[r,c]))) * sqrt(sum[c](sq(y[r,c]))))",
    {"x": "T[r, c]", "y": "T[r, c]"},
    eager.cosine_similarity,
    _ROWS,
    dtype="f32",
)

# --- layers of two and three matrix products -----------------------------------------------------


def _layer(t: int, c: int, f: int) -> dict[str, int]:
    """Tokens, hidden features (`c` in, `o` out), features in between."""
    return {"t": t, "c": c, "o": c, "f": f}


_add(
    "lora",
    "mirage",
    "y[t,o] = sum[c](x[t,c] * W[o,c]) + sum[f](sum[c](x[t,c] * A[f,c]) * B[o,f])",
    {"x": "T[t, c]", "W": "T[o, c] ~ weight", "A": "T[f, c] ~ weight", "B": "T[o, f] ~ weight"},
    eager.lora,
    {
        "small": _layer(5, 37, 6),
        "cpu": _layer(16, 2048, 16),
        "b1": _layer(1, 4096, 16),
        "b16": _layer(16, 4096, 16),
    },
)
_add(
    "mlp",
    "mirage",
    """
    h[t,f] = relu(sum[c](x[t,c] * U[f,c]))
    y[t,o] = sum[f](h[t,f] * D[o,f]) + x[t,o]
    """,
    {"x": "T[t, c]", "U": "T[f, c] ~ weight", "D": "T[o, f] ~ weight"},
    eager.mlp,
    {
        "small": _layer(5, 37, 6),
        "cpu": _layer(16, 4096, 16),
        "b1": _layer(1, 4096, 16),
        "b16": _layer(16, 4096, 16),
    },
)
_add(
    "gated_mlp",
    "mirage",
    """
    h[t,f] = silu(sum[c](x[t,c] * G[f,c])) * sum[c](x[t,c] * U[f,c])
    y[t,o] = sum[f](h[t,f] * D[o,f])
    """,
    {"x": "T[t, c]", "G": "T[f, c] ~ weight", "U": "T[f, c] ~ weight", "D": "T[o, f] ~ weight"},
    eager.gated_mlp,
    # The papers' cases: Mixtral's experts, 4096 features and 14336 in between.
    {
        "small": _layer(5, 37, 22),
        "cpu": _layer(16, 1024, 3584),
        "b1": _layer(1, 4096, 14336),
        "b16": _layer(16, 4096, 14336),
    },
)

# --- routing to experts ----------------------------------------------------------------------------


def _experts(t: int, d: int, e: int, k: int) -> dict[str, int]:
    """Tokens, hidden features, experts, and how many of them a token goes to."""
    return {"t": t, "d": d, "e": e, "k": k}


_ROUTING: Mapping[str, Mapping[str, int]] = {
    "small": _experts(5, 19, 7, 3),
    "cpu": _experts(512, 768, 64, 6),
} | {
    name: _experts(row["tokens"], row["hidden"], row["experts"], row["topk"])
    for name, row in _redfuser("redfuser_moe_routing").items()
}

_add(
    "moe_routing",
    "redfuser",
    """
    k: axis[K]
    L[t,e] = sum[d](x[t,d] * W[e,d])
    P[t,e] = exp(L[t,e] - max[e](L[t,e])) / sum[e](exp(L[t,e] - max[e](L[t,e])))
    w[t,k], E[t,k] = topk[e,k](P[t,e])
    G[t,k] = w[t,k] / sum[k](w[t,k])
    return G, E
    """,
    {"x": "T[t, d]", "W": "T[e, d] ~ weight"},
    eager.moe_routing,
    _ROUTING,
    constants=lambda sizes: {"K": sizes["k"]},
    # what it ranks changes with the row's maximum and sum, by a factor that leaves no rank where it is not finite
    refused=("rolling", "split_k"),
    checked=tuple(_redfuser("redfuser_moe_routing")),
)
_add(
    "moe_routing_logits",
    "redfuser",
    """
    k: axis[K]
    L[t,e] = sum[d](x[t,d] * W[e,d])
    v[t,k], E[t,k] = topk[e,k](L[t,e])
    P[t,k] = exp(v[t,k] - max[k](v[t,k]))
    G[t,k] = P[t,k] / sum[k](P[t,k])
    return G, E
    """,
    {"x": "T[t, d]", "W": "T[e, d] ~ weight"},
    eager.moe_routing_logits,
    _ROUTING,
    constants=lambda sizes: {"K": sizes["k"]},
    checked=("R1", "R4", "R8"),
)
