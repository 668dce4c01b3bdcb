"""Programs that fuse, programs that must not, and inputs for them; one list for all tests of derivation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eqfuse.terms.nodes import Axis, Load, Program, walk

Array = np.ndarray[Any, Any]

EXTENTS: Mapping[str, int] = {"i": 10, "j": 11, "d": 3, "e": 4, "n": 3}
SCALE = 0.3

FUSED: Mapping[str, str] = {
    "softmax": "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
    "naive_softmax": "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))",
    "scaled_softmax": """
        e[i,j] = exp(scale * (x[i,j] - max[j](x[i,j])))
        y[i,j] = e[i,j] / sum[j](e[i,j])
        """,
    "softmin": "y[i,j] = exp(min[j](x[i,j]) - x[i,j]) / sum[j](exp(min[j](x[i,j]) - x[i,j]))",
    "attention": """
        S[i,j] = where(j <= i + 1, sum[d](x[i,d] * K[j,d]) * scale, -inf)
        P[i,j] = exp(S[i,j] - max[j](S[i,j]))
        O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])
        """,
    "scaled_l2": """
        m[i] = max[j](abs(x[i,j]))
        n[i] = m[i] * sqrt(sum[j](sq(x[i,j] / m[i])))
        """,
    "quantise_gemm": """
        s[i] = max[j](abs(x[i,j])) / 448
        C[i,n] = sum[j](f8e4m3(x[i,j] / s[i]) * w[n,j]) * s[i]
        """,
    "variance": "v[i] = mean[j](sq(x[i,j] - mean[j](x[i,j])))",
    "weighted_variance": """
        W[i] = sum[j](sq(u[i,j]))
        m[i] = sum[j](sq(u[i,j]) * x[i,j]) / W[i]
        v[i] = sum[j](sq(u[i,j]) * sq(x[i,j] - m[i])) / W[i]
        """,
    "variance_of_what_a_mask_keeps": """
        m[i] = sum[j](where(u[i,j] > 0, x[i,j], 0)) / sum[j](where(u[i,j] > 0, 1, 0))
        v[i] = sum[j](where(u[i,j] > 0, sq(x[i,j] - m[i]), 0))
        """,
    "deviation_over_two_axes": "v[i] = std[n,j](x[i,j] * 0.5 + 0.1)",
    "covariance": "v[i] = mean[j]((x[i,j] - mean[j](x[i,j])) * (u[i,j] - mean[j](u[i,j])))",
    "third_moment": "v[i] = mean[j]((x[i,j] - mean[j](x[i,j]))**3)",
    "fourth_moment": "v[i] = mean[j]((x[i,j] - mean[j](x[i,j]))**4)",
    "inertia": """
        M[i] = sum[j](m[i,j])
        c[i,d] = sum[j](m[i,j] * z[i,j,d]) / M[i]
        I[i] = sum[j](m[i,j] * sum[d](sq(z[i,j,d] - c[i,d])))
        """,
    "layernorm_gemm": """
        m[i] = mean[j](x[i,j])
        r[i] = rsqrt(mean[j](sq(x[i,j] - m[i])) + 0.00001)
        y[i,n] = sum[j]((x[i,j] - m[i]) * r[i] * w[n,j])
        """,
    "softmax_variance": """
        e[i,j] = exp(x[i,j] - max[j](x[i,j]))
        p[i,j] = e[i,j] / sum[j](e[i,j])
        g[i] = sum[j](p[i,j] * u[i,j])
        v[i] = sum[j](p[i,j] * sq(u[i,j] - g[i]))
        """,
    "softmax_entropy": """
        t[i,j] = x[i,j] - max[j](x[i,j])
        l[i,j] = t[i,j] - log(sum[j](exp(t[i,j])))
        H[i] = -sum[j](exp(l[i,j]) * l[i,j])
        """,
    "logsumexp": """
        m[i] = max[j](x[i,j])
        y[i] = m[i] + log(sum[j](exp(x[i,j] - m[i])))
        """,
    "naive_logsumexp": "y[i] = log(sum[j](exp(x[i,j])))",
    "difference_of_moments": "v[i] = mean[j](sq(x[i,j])) - sq(mean[j](x[i,j]))",
    "rmsnorm_absmax": """
        s[i] = mean[j](sq(x[i,j]))
        m[i] = max[j](abs(x[i,j] * rsqrt(s[i] + 0.001)))
        """,
    "product": "y[i] = prod[j](x[i,j])",
    "min_scaled": """
        s[i] = mean[j](sq(x[i,j]))
        m[i] = min[j](x[i,j] * rsqrt(s[i] + 0.001))
        """,
    "min_shifted": """
        m[i] = min[j](x[i,j])
        n[i] = min[j](abs(u[i,j]) - m[i])
        """,
    "max_centred": "n[i] = max[j](x[i,j] - mean[j](x[i,j]))",
    "min_centred": "n[i] = min[j](x[i,j] - mean[j](x[i,j]))",
    "range": "n[i] = max[j](abs(x[i,j] - min[j](x[i,j])))",
    "standard_score": """
        m[i] = mean[j](x[i,j])
        s[i] = sqrt(mean[j](sq(x[i,j] - m[i])) + 0.00001)
        n[i] = max[j]((x[i,j] - m[i]) / s[i])
        p[i] = max[j](abs((x[i,j] - m[i]) / s[i]))
        """,
    "distances_from_the_largest": "y[i] = sum[j](sq(x[i,j] - max[j](x[i,j])))",
    "sum_below_the_largest": "y[i] = sum[j](u[i,j] - (max[j](x[i,j]) + 1))",
    "temperature": """
        e[i,j] = exp((x[i,j] - max[j](x[i,j])) / t)
        y[i,j] = e[i,j] / sum[j](e[i,j])
        """,
    "largest_share": "n[i] = max[j](abs(x[i,j]) / sum[j](abs(x[i,j])))",
    "smallest_share": "n[i] = min[j](abs(x[i,j]) / sum[j](sq(x[i,j])))",
    "scaled_by_the_least": "n[i] = max[j](abs(x[i,j]) / min[j](abs(x[i,j])))",
    "largest_probability": """
        e[i,j] = exp(x[i,j] - max[j](x[i,j]))
        n[i] = max[j](e[i,j] / sum[j](e[i,j]))
        """,
    "scaled_before_the_cast": """
        s[i] = 448 / max[j](abs(x[i,j]))
        C[i,n] = sum[j](f8e4m3(x[i,j] * s[i]) * w[n,j]) / s[i]
        """,
    "one_more_weight": """
        m[i] = max(max[j](x[i,j]), 0)
        e[i,j] = exp(x[i,j] - m[i])
        y[i,j] = e[i,j] / (exp(-m[i]) + sum[j](e[i,j]))
        """,
    "shifted_by_a_bound": """
        e[i,j] = exp(x[i,j] - sum[j](abs(x[i,j])))
        y[i,j] = e[i,j] / sum[j](e[i,j])
        """,
    "exponentials_around_the_mean": "y[i] = sum[j](exp(x[i,j] - mean[j](x[i,j])))",
    "unscaled_exponentials": "y[i] = sum[j](exp(x[i,j])) * exp(-max[j](x[i,j]))",
    "factors_of_a_softmax": """
        s[i] = sum[j](exp(x[i,j]))
        y[i,j] = 3 * exp(x[i,j]) * u[i,j] / s[i]
        z[i] = v[i] * sum[j](exp(x[i,j]) * u[i,j]) / s[i]
        w[i] = sum[j](exp(x[i,j]) * u[i,j]) * v[i] / s[i]
        q[i,j] = 1 / s[i] * (u[i,j] * exp(x[i,j]))
        p[i,j] = 1 / s[i] * (exp(x[i,j]) * v[i])
        t[i,j] = v[i] * exp(x[i,j]) / s[i]
        """,
    "exponentials_up_to_here": "y[i,n] = log(sum[j](where(j <= n, exp(x[i,j]), 0)))",
}
"""Every group of these has a merge."""

UNFUSED: Mapping[str, tuple[str, str]] = {
    "tanh": ("y[i] = sum[j](tanh(x[i,j] - max[j](x[i,j])))", "sum[j](tanh(x[i, j] - max_j))"),
    "round": (
        """
        s[i] = max[j](abs(x[i,j])) / 127
        C[i,n] = sum[j](round(x[i,j] / s[i]) * w[n,j]) * s[i]
        """,
        "sum[j](round(",
    ),
    "above_mean": ("c[i] = sum[j](x[i,j] > mean[j](x[i,j]))", "sum[j](x[i, j] > "),
    "median_like": ("c[i] = min[j](abs(sum[j](x[i,j] <= u[i]) - x[i,j]))", "min[j](abs(sum_j - x[i, j]))"),
    "distances_from_another": (
        "c[i] = sum[j](sq(u[i,j] - max[j](x[i,j])))",
        "sum[j](sq(u[i, j] - max_j))",
    ),
    "weighted_distances": (
        "c[i] = sum[j](u[i,j] * (x[i,j] - max[j](x[i,j])))",
        "sum[j](u[i, j] * (x[i, j] - max_j))",
    ),
    "squares_in_range": (
        "a[i] = min[j](x[i,j])\nc[i] = sum[j](sq((x[i,j] - a[i]) / (max[j](x[i,j]) - a[i])))",
        "sum[j](sq((x[i, j] - min_j) / (",
    ),
    "sign_unknown": ("c[i] = max[j](x[i,j] / sum[j](x[i,j]))", "max[j](x[i, j] / sum_j)"),
    "mean_deviation": ("c[i] = mean[j](abs(x[i,j] - mean[j](x[i,j])))", "sum[j](abs(x[i, j] - "),
}
"""Programs with a group that has no merge, and how the reduction that is in the way begins."""


VARIANCES: Mapping[str, str] = {
    "of_means": "mean[j](sq(x[i,j])) - sq(mean[j](x[i,j]))",
    "of_products": "mean[j](x[i,j] * x[i,j]) - mean[j](x[i,j]) * mean[j](x[i,j])",
    "divided_first": "1 / N(j) * sum[j](sq(x[i,j])) - sq(1 / N(j) * sum[j](x[i,j]))",
    "divided_inside": "sum[j](sq(x[i,j]) / N(j)) - sq(sum[j](x[i,j] / N(j)))",
    "of_sums": "(sum[j](sq(x[i,j])) - sq(sum[j](x[i,j])) / N(j)) / N(j)",
    "of_sums_divided_first": "(sum[j](sq(x[i,j])) - 1 / N(j) * sq(sum[j](x[i,j]))) / N(j)",
    "count_times_square": "(sum[j](sq(x[i,j])) - N(j) * sq(mean[j](x[i,j]))) / N(j)",
    "square_times_count": "(sum[j](sq(x[i,j])) - sq(mean[j](x[i,j])) * N(j)) / N(j)",
    "sum_times_mean": "(sum[j](sq(x[i,j])) - sum[j](x[i,j]) * mean[j](x[i,j])) / N(j)",
    "mean_times_sum": "(sum[j](sq(x[i,j])) - mean[j](x[i,j]) * sum[j](x[i,j])) / N(j)",
}
"""E[x^2] - E[x]^2, as people write it."""

COVARIANCES: Mapping[str, str] = {
    "of_means": "mean[j](x[i,j] * u[i,j]) - mean[j](x[i,j]) * mean[j](u[i,j])",
    "reversed": "mean[j](x[i,j] * u[i,j]) - mean[j](u[i,j]) * mean[j](x[i,j])",
    "of_sums": "(sum[j](x[i,j] * u[i,j]) - sum[j](x[i,j]) * sum[j](u[i,j]) / N(j)) / N(j)",
    "of_sums_reversed": "(sum[j](x[i,j] * u[i,j]) - sum[j](u[i,j]) * sum[j](x[i,j]) / N(j)) / N(j)",
}
"""E[x y] - E[x] E[y], likewise."""

_SHIFTED = "m[i] = max[j](-x[i,j])\na[i] = mean[j](x[i,j] + m[i])\n"

RULE_PROGRAMS: Mapping[str, str] = {
    "what_an_extreme_moves_by": f"{_SHIFTED}y[i] = sum[j](x[i,j] + (m[i] - a[i]))",
    "what_an_extreme_moves_by_at_last": f"{_SHIFTED}y[i] = sum[j](x[i,j] + (2 * a[i] + m[i]))",
    **{f"variance_{name}": f"v[i] = {form}" for name, form in VARIANCES.items()},
    **{f"covariance_{name}": f"v[i] = {form}" for name, form in COVARIANCES.items()},
    "weighted_variance_with_the_weights_last": """
        W[i] = sum[j](sq(u[i,j]))
        v[i] = 1 / W[i] * sum[j](sq(x[i,j]) * sq(u[i,j])) - sq(1 / W[i] * sum[j](sq(u[i,j]) * x[i,j]))
        """,
    "guards_as_written": "y[i] = sum[j](finite(x[i,j]) * invertible(u[i,j]) * invertible(max[j](x[i,j])))",
    "masked_naive_softmax": """
        e[i,j] = where(u[i,j] > 0, exp(x[i,j]), 0)
        y[i,j] = e[i,j] / sum[j](e[i,j])
        """,
    "weighted_naive_softmax": "O[i,e] = sum[j](V[j,e] * exp(x[i,j])) / sum[j](exp(x[i,j]))",
    "log_of_mean_exp": "y[i] = log(mean[j](exp(x[i,j])))",
    "weighted_moments": """
        W[i] = sum[j](u[i,j])
        v[i] = sum[j](u[i,j] * sq(x[i,j])) / W[i] - sq(sum[j](u[i,j] * x[i,j]) / W[i])
        """,
    "product_moments": "v[i] = mean[j](x[i,j] * u[i,j]) - mean[j](x[i,j]) * mean[j](u[i,j])",
    "masked_scalars": """
        y[i] = sum[j](where(u[i,j] > 0, x[i,j] * scale, 0))
        n[i] = max[j](where(u[i,j] > 0, x[i,j] + scale, -inf))
        """,
    "masked_variance": "v[i] = sum[j](where(u[i,j] > 0, sq(x[i,j] - mean[j](x[i,j])), 0))",
    "rounded_variance": "v[i] = sum[j](sq(f16(x[i,j] - mean[j](x[i,j]))))",
    "reversed_weights": """
        g[i] = sum[j](x[i,j] * u[i,j]) / sum[j](u[i,j])
        v[i] = sum[j]((x[i,j] - g[i]) * (x[i,j] - g[i]) * u[i,j])
        """,
    "commuted_weights": """
        g[i] = sum[j](x[i,j] * u[i,j]) / sum[j](u[i,j])
        v[i] = sum[j](u[i,j] * sq(x[i,j] - g[i]))
        """,
    "weights_last": """
        g[i] = sum[j](u[i,j] * x[i,j]) / sum[j](u[i,j])
        v[i] = sum[j](sq(x[i,j] - g[i]) * u[i,j])
        """,
    "inverse_weights": "y[i] = 1 / sum[j](exp(x[i,j])) * sum[j](exp(x[i,j]) * u[i,j])",
    "exponentials_that_cancel": "y[i] = sum[j](exp(x[i,j]) * exp(-x[i,j]) + exp(-u[i,j]) * exp(u[i,j]) * u[i,j])",
    "max_of_exponentials": """
        m[i] = max[j](x[i,j])
        n[i] = max[j](exp(x[i,j] - m[i]) * sq(u[i,j]))
        p[i] = min[j](exp(x[i,j] - m[i]) * sq(u[i,j]))
        """,
    "max_of_differences": """
        m[i] = max[j](x[i,j])
        n[i] = max[j](log(sq(u[i,j])) - m[i])
        p[i] = min[j](where(u[i,j] > 0, m[i] - x[i,j], m[i]))
        """,
    "roots_and_logarithms": """
        a[i] = sum[j](sqrt(sq(x[i,j]) + 1) / u[i,j] * log(sq(u[i,j]) + 1))
        b[i] = sum[j](sum[d](log(sq(z[i,j,d])) * sqrt(sq(z[i,j,d])) / z[i,j,d] * max(z[i,j,d], x[i,j]) * min(x[i,j], u[i,j])))
        """,
    "rounded_scalar": "y[i] = sum[j](exp(x[i,j]) * f16(scale))",
    "rounded_scale": "y[i] = sum[j](exp(x[i,j] - f16(max[j](x[i,j]))) * f16(scale))",
    "functions_of_sums": """
        y[i] = sum[j](tanh(sum[d](z[i,j,d])) * (sum[d](z[i,j,d]) > sum[d](sq(z[i,j,d]))))
        n[i] = tanh(sum[j](x[i,j])) * (sum[j](x[i,j]) > sum[j](u[i,j]))
        """,
    "comparisons_of_states": """
        m[i] = max[j](x[i,j])
        y[i] = sum[j](where(m[i] > 0, x[i,j], where(u[i,j] > 0, m[i], u[i,j])) * (m[i] > x[i,j]) * (x[i,j] > m[i]))
        """,
    "rounded_exponents": "y[i] = sum[j](exp(f16(where(u[i,j] > 0, x[i,j] - max[j](x[i,j]), -inf))))",
    "rounded_weights": "y[i] = sum[j](sqrt(f16(exp(x[i,j] - max[j](x[i,j])))) * where(u[i,j] > 0, sq(u[i,j]), 1))",
    "scaled_exponents": "y[i] = sum[j](exp((x[i,j] - max[j](x[i,j])) * 2 * 3 + (u[i,j] - max[j](u[i,j]))))",
    "scaled_exponents_left": "y[i] = sum[j](exp(0.5 * (x[i,j] - max[j](x[i,j]))))",
    "bounded_values": """
        s[i] = max[j](abs(x[i,j]))
        y[i] = sum[j](f8e4m3(3 * (abs(x[i,j]) / s[i]) * (x[i,j] / s[i])) * f8e4m3(where(u[i,j] > 0, x[i,j] / s[i], 0) * 3))
        z1[i] = sum[j](f8e4m3(abs(x[i,j] / s[i])) * max[j](x[i,j] / s[i]))
        """,
    "shares": """
        s[i] = max[j](abs(x[i,j]))
        y[i] = sum[j](f16(x[i,j]) / f16(s[i]) + (1 / s[i]) * -x[i,j] + where(u[i,j] > 0, x[i,j], 0) / s[i])
        z1[i] = sum[j](where(u[i,j] > 0, x[i,j] / max[j](where(u[i,j] > 0, abs(x[i,j]), 0)), 0))
        """,
    "terms": """
        s[i] = sum[j](abs(x[i,j]))
        t[i] = sum[j](sq(u[i,j]))
        a[i] = sum[j](u[i,j] * -where(u[i,j] > 0, f32(abs(x[i,j]) / s[i] + sq(u[i,j]) / t[i]), 0))
        b[i] = sum[j]((x[i,j] / s[i] - u[i,j] / t[i]) * x[i,j])
        c[i] = sum[j](u[i,j] * (x[i,j] / s[i] - u[i,j] / t[i]))
        d[i] = sum[j]((v[i] + x[i,j] / s[i]) * u[i,j])
        e[i] = sum[j]((x[i,j] / s[i] + v[i]) * u[i,j])
        """,
    "terms_of_choices": "y[i] = sum[j](where(u[i,j] > 0, x[i,j] / sum[j](abs(x[i,j])), u[i,j]) * x[i,j])",
    "shift_that_jumps": """
        p[i] = argmax[j](x[i,j])
        y[i] = mean[j](u[i,j] + p[i])
        """,
    "logarithmic_shift": "y[i] = sum[j](exp(x[i,j] - logsumexp[j](x[i,j])) * u[i,j])",
    "constants": "y[i] = sum[j](u[i] * 0 + exp(log(sq(x[i,j]))) + log(1 / sq(x[i,j])) - (-x[i,j]))",
    "fixed_extremes": "y[i] = max[j](v[i]) + min[j](v[i])",
    "nested_sums": """
        c[i,d] = mean[j](z[i,j,d])
        y[i] = sum[j](sum[d](sq(z[i,j,d] - c[i,d])))
        """,
    "root_scale": "y[i] = sum[j](x[i,j] / sqrt(sum[j](sq(x[i,j]))) * abs(sum[j](x[i,j])))",
    "root_mean_scale": "y[i] = sum[j](sqrt(sq(x[i,j]) * sum[j](sq(x[i,j]))) * sqrt(sum[j](sq(x[i,j]))))",
    "exponentials_over_the_largest": "y[i] = sum[j](exp(x[i,j])) / exp(max[j](x[i,j]))",
    "exponentials_times_another": "y[i] = exp(-max[j](x[i,j])) * sum[j](exp(x[i,j]))",
    "scalar_temperature": """
        e[i,j] = exp((x[i,j] - max[j](x[i,j])) / t)
        f[i,j] = exp(t * (x[i,j] - max[j](x[i,j])))
        y[i,j] = e[i,j] / sum[j](e[i,j]) + f[i,j] / sum[j](f[i,j])
        """,
    "squares_less_the_square": "y[i] = sum[j](sq(x[i,j])) - sq(sum[j](x[i,j])) / sum[j](1)",
    "squares_less_the_mean": "y[i] = sum[j](sq(x[i,j])) - sum[j](1) * sq(mean[j](x[i,j]))",
    "root_mean_square_scale": "n[i] = max[j](abs(x[i,j] * rsqrt(mean[j](sq(x[i,j])) + eps)))",
    "norms_of_products": "n[i] = max[j](abs(x[i,j] * u[i,j]) / (sqrt(sum[j](sq(x[i,j]))) * sum[j](abs(x[i,j]))))",
    "powers_and_inverses": "y[i] = sum[j](x[i,j] * x[i,j] * x[i,j] * x[i,j] / (1 / (1 / u[i,j])))",
    "sink_of_its_own": """
        m[i] = max(max[j](x[i,j]), s)
        e[i,j] = exp(x[i,j] - m[i])
        y[i] = sum[j](e[i,j] * u[i,j]) / (sum[j](e[i,j]) + exp(s - m[i]))
        z1[i] = sum[j](exp(u[i,j] - max(0, max[j](u[i,j]))))
        """,
    "shared_shifts": """
        m[i] = max[j](x[i,j])
        n[i] = max[j](where(u[i,j] > 0, x[i,j] - m[i], -inf))
        p[i] = min[j](where(u[i,j] > 0, x[i,j], 1) - m[i])
        """,
}
"""More programs, each for rules that no program above needs."""


def tensor_shapes(program: Program, extents: Mapping[str, int] = EXTENTS) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a program that is indexed by plain axes only."""
    found: dict[str, tuple[int, ...]] = {}
    for node in walk(*(output.expr for output in program.outputs)):
        if isinstance(node, Load):
            found[node.tensor] = tuple(extents[part.name] for part in node.index if isinstance(part, Axis))
    return found


def random_tensors(program: Program, seed: int = 0) -> dict[str, Array]:
    """Standard normal values; those of `m` are positive, for they are weights."""
    rng = np.random.default_rng(seed)
    found = {name: rng.standard_normal(shape) for name, shape in sorted(tensor_shapes(program).items())}
    return found | {name: np.abs(value) + 0.1 for name, value in found.items() if name == "m"}


SPECIAL_ROWS: Mapping[str, int] = {
    "ordinary": 0,
    "prefix of -inf": 1,
    "whole row -inf": 2,
    "whole row 0": 3,
    "one +inf": 4,
    "NaN first": 5,
    "NaN last": 6,
    "prefix of 0": 7,
    "whole row +inf": 8,
    "both infinities": 9,
}


def with_special_rows(values: Array) -> Array:
    """A copy with the rows of SPECIAL_ROWS; `values` has at least ten rows and any number of columns."""
    x, half = np.array(values), values.shape[1] // 2
    x[1, :half] = -np.inf
    x[2] = -np.inf
    x[3] = 0
    x[4, half] = np.inf
    x[5, 0] = np.nan
    x[6, -1] = np.nan
    x[7, :half] = 0
    x[8] = np.inf
    x[9, 0], x[9, -1] = np.inf, -np.inf
    return x
