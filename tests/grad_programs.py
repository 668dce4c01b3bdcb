"""Programs with inputs, for tests of gradients: every construct of the language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bench.programs import registered
from eqfuse.terms.parser import parse

SIZES: Mapping[str, int] = {
    "b": 2,
    "h": 4,
    "i": 5,
    "j": 6,
    "d": 3,
    "e": 2,
    "k": 3,
    "t": 7,
    "v": 8,
    "s": 3,
}

ATTENTION = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale
T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])
""".strip()


@dataclass(frozen=True)
class Case:
    """`sizes` are of axes and, as `x1`, of dimensions that no axis has; integer tensors are below `below`."""

    source: str
    wrt: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)

    @property
    def extents(self) -> dict[str, int]:
        return {**SIZES, **self.sizes}

    def tensors(self, seed: int = 0) -> dict[str, np.ndarray]:
        registered(self.source)
        rng = np.random.default_rng(seed)
        made: dict[str, np.ndarray] = {}
        for tensor in parse(self.source).tensors:
            names = [axis or f"{tensor.name}{k}" for k, axis in enumerate(tensor.axes)]
            shape = tuple(self.extents[name] for name in names)
            if tensor.name in self.below:
                made[tensor.name] = np.sort(rng.integers(0, self.below[tensor.name], shape))
            else:
                made[tensor.name] = rng.standard_normal(shape)
        return made


X = ("x",)

CASES: Mapping[str, Case] = {
    "angles": Case("y[i] = sum[j](atan2(x[i,j], w[j]) * x[i,j])", ("x", "w")),
    "sum": Case("y[i] = sum[j](sq(x[i,j])) * s", ("x", "s"), scalars={"s": 0.7}),
    "softmax": Case("y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))", X),
    "attention": Case(ATTENTION, ("Q", "K", "V", "scale"), {"K1": 2, "V1": 2}, {"g": 2, "scale": 0.5}),
    "rmsnorm": Case(
        "y[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + eps) * w[j]", ("x", "w", "eps"), scalars={"eps": 0.1}
    ),
    "layernorm": Case(
        "y[i,j] = (x[i,j] - mean[j](x[i,j])) * rsqrt(var[j](x[i,j]) + eps) * w[j] + c[j]",
        ("x", "w", "c"),
        scalars={"eps": 0.1},
    ),
    "linear cross-entropy": Case(
        "L[t] = logsumexp[v](sum[d](h[t,d] * W[v,d])) - sum[d](h[t,d] * W[y[t],d])",
        ("h", "W"),
        below={"y": 8},
    ),
    "strided window": Case("k: axis[3]\ny[i] = sum[k](x[2*i + k] * w[k])", ("x", "w"), {"x0": 11, "i": 5}),
    "max and min": Case("y[i] = max[j](x[i,j]) * min[j](sq(x[i,j]))", X),
    "max over two axes": Case("y[i] = max[k,j](x[k,j] + w[i])", ("x", "w")),
    "prod": Case("y[i] = prod[j](x[i,j])", X),
    "prod, a zero": Case("y[i] = prod[j](where(j == 2, 0, x[i,j]) + w[j])", ("x", "w")),
    "topk": Case("k: axis[3]\nv[i,k], p[i,k] = topk[j,k](x[i,j])\ny[i] = sum[k](sq(v[i,k]) * (k + 1.5))", X),
    "topk, what it chooses": Case(
        "k: axis[3]\nv[i,k], p[i,k] = topk[j,k](x[i,j])\ny[i] = sum[k,j](where(p[i,k] == j, z[j], 0) * v[i,k])",
        ("x", "z"),
    ),
    "a fold with a state": Case("m[i], s[i] = mean_var[j](x[i,j])", X),
    "a fold that is not commutative": Case("y[i] = last[j](sq(x[i,j]))", X),
    "a fold of what does not vary": Case(
        "a = sum[i](x[i])\nb = sum[i](sq(x[i]))\nd = last[i](b - a) + sum[i](a * x[i])", X
    ),
    "masks that cancel": Case(
        "y[i] = sum[j](where(i > 1, where(j > 1, x[i], 0), 0) - where(j > 1, where(i > 1, x[i], 0), 0)"
        " + z[i,j])",
        ("x", "z"),
    ),
    "extremes of a user": Case("y[i] = span[j](x[i,j]) * absmax[j](x[i,j]) + sumsq[j](x[i,j])", X),
    "steps": Case("y[i] = sum[j](round(x[i,j]) * x[i,j] * floor(z[i]) * sign(z[i]))", ("x", "z")),
    "functions": Case(
        "y[i] = max(x[i], 0.5) + relu(x[i]) * abs(x[i]) + sigmoid(x[i]) * tanh(x[i]) + gelu(x[i])"
        " + silu(x[i]) * sin(x[i]) * cos(x[i]) + erf(x[i]) + min(x[i], -0.5)",
        X,
    ),
    "masked poles": Case("y[i] = where(x[i] > 0, log(x[i]), 0) + where(x[i] > 0, sqrt(x[i]), x[i])", X),
    "transposed": Case("y[i] = sum[j](x[i,j] * z[j,i]) + x[i,i]", ("x", "z"), {"i": 5, "j": 5, "x1": 5}),
    "split positions": Case(
        "y[i] = x[i//4, i%4] * 2 + z[i//2]", ("x", "z"), {"i": 7, "x0": 2, "x1": 4, "z0": 4}
    ),
    "shifted and reversed": Case("y[i] = where(i > 0, x[i-1], 0) * x[N(i)-1-i]", X, {"x0": 5}),
    "one more": Case("y[i] = u[i+1] * u[i]", ("u",), {"u0": 6}),
    "digits": Case(
        "n: axis[2]\np: axis[3]\ny[i,n] = sum[p](x[i, n*3 + p + 1] * w[p])",
        ("x", "w"),
        {"x1": 8, "p": 3, "n": 2},
    ),
    "heads in one matrix": Case(
        """
        p: axis[3]
        a[i,d] = sum[k](x[i,k] * w[d,k])
        s[h,i,j] = sum[p](a[i, h*3 + p] * a[j, h*3 + p + 6])
        y[i,h] = sum[j](tanh(s[h,i,j]))
        """,
        ("x", "w"),
        {"w0": 12, "h": 2, "p": 3, "x0": 5, "j": 5},
    ),
    "chosen by a position": Case(
        "y[i] = where(argmax[j](x[i,j]) > 2, z[i] * z[i], z[i]) * sum[j](x[i,j])", ("x", "z")
    ),
    "to a number": Case("y = sum[i,j](x[i,j] * s)", ("x", "s"), scalars={"s": 2.0}),
    "several outputs": Case(
        "a = sum[i](sq(x[i]))\ny[i] = x[i] / sqrt(a)\nz = a * 2\nn = argmax[i](x[i])\nreturn y, z, n", X
    ),
    "an output that is read": Case(
        "m[i] = max[j](x[i,j])\ny[i] = sum[j](exp(x[i,j] - m[i]) * x[i,j]) / sum[j](exp(x[i,j] - m[i]))\n"
        "z[i] = m[i] * 2\nreturn y, z, m",
        X,
    ),
    "weighted": Case("y[i] = softmax_weighted[j](x[i,j], v[j])", ("x", "v")),
    "std": Case("y[i] = std[j](x[i,j])", X),
    "a state variable": Case("y[i] = argmax.v[j](x[i,j], j) * 3", X),
    "two gathers": Case(
        "a: i64[t]\nb: i64[t]\ny[t,d] = E[a[t],b[t],d] * w[t]",
        ("E", "w"),
        sizes={"t": 11, "d": 3, "E0": 4, "E1": 3},
        below={"a": 4, "b": 3},
    ),
    "segments": Case(
        "y[s,d] = sum[j](where((o[s] <= j) & (j < o[s+1]), x[j,d] * S[s], 0))",
        ("x", "S"),
        {"o0": 4},
        below={"o": 7},
    ),
    "constant positions": Case("y[i,j] = x[i,j] - x[j,i] * x[0,1]", X, {"i": 5, "j": 5, "x0": 5, "x1": 5}),
    "an offset from a tensor": Case("y[i] = x[i + off[i]] * 3", X, {"x0": 7}, below={"off": 2}),
    "pages": Case(
        "y[h,j] = sum[d](Q[h,d] * K[pg[j//4], j%4, d])",
        ("Q", "K"),
        {"j": 8, "K0": 3, "K1": 4, "pg0": 2},
        below={"pg": 3},
    ),
    "casts": Case("y[i] = f16(x[i]) * x[i]", X),
    "remainders": Case("y[i] = x[i] % 2.5 + x[i] // 0.3 * x[i]", X),
    "alias": Case("k: axis[i]\ny[i] = sum[k](x[i] * x[k] * w[k])", ("x", "w"), {"k": 5}),
    "shadowed": Case("y[i,j] = x[i,j] / sum[j](sq(x[i,j]))", X),
    "broadcast": Case("y[i,j] = (a[i] + c[j]) * exp(a[i] * c[j])", ("a", "c")),
}
