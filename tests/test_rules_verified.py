"""Programs whose infinities a merge could get wrong: every schedule that there is agrees with the program in the field,
on lines of -inf too, and what is not fused says why."""

from __future__ import annotations

import pytest

import eqfuse as eq
from eqfuse.errors import ScheduleError

FUSED = {
    "0 times a maximum in an exponent": "y = sum[j](exp(max[j](x[j]) * 0 + x[j]))",
    "0 times what may be infinite": "y = sum[j](max[j](x[j]) * 0 + x[j])",
    "root of an infinity less itself": """
        s = std[j](min[j](x[j]))
        y = max[j](where(x[j] > 0, s - x[j], -inf) - s)
        """,
    "factor under a mask": """
        c = min[j](x[j])
        e = sum[j](where(x[j] > 0, x[j] * c, 0))
        """,
    "offset of the scores": "a[i] = logsumexp[k](x[i,k] - y[i])",
    "sum with a maximum": """
        a[j,i] = where(N(j) > 0, max[i](-1), sq(gelu(x[j,i])))
        b[j] = sum[i](max[i](1 + x[j,i]) + a[j,i])
        """,
    "distances from the largest": "y[i] = sum[j](sq(x[i,j] - max[j](x[i,j])))",
    "distances from another": "y[i] = sum[j](u[i,j] - max[j](x[i,j]))",
    "temperature": """
        e[i,j] = exp((x[i,j] - max[j](x[i,j])) / t)
        y[i,j] = e[i,j] / sum[j](e[i,j])
        """,
    "masks beside what is not masked": """
        s[i] = max[j](abs(x[i,j]))
        y[i] = sum[j](x[i,j] / s[i] * where(u[i,j] > 0, x[i,j] / s[i], 0))
        """,
    "product of states that are infinite and 0 at first": """
        a = max[j](x[j]) * sum[j](y[j])
        b = sum[j](y[j] - a)
        c = sum[j](exp(x[j] - max[j](x[j])) * a)
        """,
    "maximum of positions": """
        m = max[j](x[j])
        d = logsumexp[j](j)
        """,
    "factor that is a quotient of states": """
        a = var[j](x[j])
        b = max[j](where(j + 2 < N(j), x[j + 2], 0) * a)
        """,
    "equal shadows of different residues": "d = argmax[j](floor(erf(x[j] * y[j]) * 2))",
    "greatest of a rounded value less a fixed one": "d = max[j](floor(x[j] / y[j]) - sum[j](y[j]))",
    "greatest of a rounded value times a fixed one": "d = max[j](floor(x[j] * y[j]) * sq(min[j](x[j])))",
    "a class that is the maximum of itself": """
        a = max[i](0.1)
        b = logsumexp[i](min[i](x[i]) / 0.1)
        """,
    "factor that is a quotient by 0": "d = sum[j](max[j](x[j]) * max[j](rsqrt(x[j])) + x[j])",
    "exponent that shards store as a difference": "b = softmax_weighted[j](exp(x[j]) - round(x[j]), x[j])",
    "deviation over two axes": "a = std[i,j]((sq(0.1) * (x[j] * 0.5)) + 0.1)",
}

UNFUSED = {
    "term under another mask": (
        """
        c = min[j](x[j])
        e = sum[j](where(x[j] > 0, -(x[j] + c), 0))
        """,
        "no rule takes a factor or term of it out of the sum over j",
    ),
    "squared distances from another": (
        "y[i] = sum[j](sq(u[i,j] - max[j](x[i,j])))",
        "no repair of the sum over j restores it where a value or max_j is infinite",
    ),
    "logarithm of a maximum that is negative at first": (
        "y = max[j](where(j % 2 == 0, log(max[j](x[j])), -inf) - max[j](x[j]))",
        "no fact says that log(max_j) is a number before all of j is seen",
    ),
    "root of a sum that is negative at first": (
        "y = sum[j](u[j] - sqrt(sum[j](x[j])))",
        "no fact says that sqrt(sum_j) is a number before all of j is seen",
    ),
    "cosine of a minimum that is infinite at first": (
        "y = sum[j](x[j] - cos(min[j](x[j])))",
        "no fact says that cos(min_j) is a number before all of j is seen",
    ),
    "integers whose merge divides": (
        "y = max[j](j * where(j < 3, sum[j](2), 0))",
        "the max over j is an integer, and its merge a real number",
    ),
    "squared distances from the mean of another": (
        "y[i] = sum[j](sq(u[i,j] - mean[j](x[i,j])))",
        "the sum over j would cancel where sum_j changes",
    ),
    "weighted distances": (
        "y[i] = sum[j](u[i,j] * (x[i,j] - max[j](x[i,j])))",
        "no repair of the sum over j restores it where a value or max_j is infinite",
    ),
}


@pytest.mark.parametrize("schedule", ["rolling", "split_k", "resident"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.slow(
    but=[
        "infinity less",
        "temperature",
        "masks beside",
        "product of states",
        "greatest of a rounded value less",
        "a class",
        "deviation",
        "0 times a maximum",
    ]
)
def test_what_is_fused_is_verified(name: str, schedule: str) -> None:
    assert eq.compile(FUSED[name], target="cpu", prefer=schedule).certificate.ok


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.slow(but=["another mask", "root of a sum", "integers"])
def test_what_is_not_fused_says_why(name: str) -> None:
    source, condition = UNFUSED[name]
    with pytest.raises(ScheduleError, match="there is no rolling plan") as caught:
        eq.compile(source, target="cpu", prefer="rolling")
    assert condition in str(caught.value)
    kernel = eq.compile(source, target="cpu")
    assert kernel.certificate.ok
    assert any(condition in sentence for sentence in kernel.why_not())


def test_squares_around_a_registered_value_that_jumps() -> None:
    eq.reduction(
        "latest",
        state="v, n",
        lift="x, 1",
        identity="0, 0",
        combine="where(n2 > 0, v2, v1), max(n1, n2)",
        result="v",
    )
    source = "y[i] = sum[j](sq(x[i,j] - latest[j](x[i,j])))"
    with pytest.raises(ScheduleError, match="the sum over j would cancel where latest_v_j changes"):
        eq.compile(source, target="cpu", prefer="rolling")
