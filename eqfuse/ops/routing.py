"""Routing to experts, and numbers in few bits."""

from __future__ import annotations

from eqfuse.ops.program import op


@op("x", "w")
def route(given: frozenset[str], experts: int = 2, normalised: bool = True) -> str:
    """The `experts` best of each token, by the softmax of `x wᵀ`: x: [tokens, c], w: [all experts, c]. Returns their weights and indices:
    [tokens, experts], and the auxiliary loss that balances them (Fedus and others, 2021)."""
    weight = "p[t,k] / sum[k](p[t,k])" if normalised else "p[t,k]"
    return f"""
k: axis[{experts}]
s[t,e] = sum[c](x[t,c] * w[e,c])
L[t] = logsumexp[e](s[t,e])
best[t,k], index[t,k] = topk[e,k](s[t,e])
p[t,k] = exp(best[t,k] - L[t])
weight[t,k] = {weight}
share[e] = mean[t](sum[k](where(index[t,k] == e, 1, 0)))
auxiliary = N(e) * sum[e](share[e] * mean[t](exp(s[t,e] - L[t]))) / {experts}
return weight, index, auxiliary"""


@op("x", rows={"x": 1})
def quantize_rows(given: frozenset[str]) -> str:
    """Each row of x: [..., d] in 8 bits, `round(x / scale)` with the scale `max |x| / 127` of its row, which is returned too."""
    return """
scale[b] = max(max[d](abs(x[b,d])) / 127, 1e-12)
q[b,d] = i8(round(x[b,d] / scale[b]))
return q, scale"""


@op("x", "w", "w_scale", rows={"x": 1})
def quantized_linear(given: frozenset[str]) -> str:
    """`x wᵀ` with w: [o, d] in 8 bits, times w_scale: [o], and the rows of x: [..., d] quantised on the way: no copy of x in 8 bits is stored."""
    return """
w: i8[o, d]
scale[b] = max(max[d](abs(x[b,d])) / 127, 1e-12)
y[b,o] = sum[d](round(x[b,d] / scale[b]) * w[o,d]) * scale[b] * w_scale[o]"""
