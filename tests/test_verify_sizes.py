"""Sizes to verify at fit every index of a program; what no sizes fit is an error of the program."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.terms.bounds import reads_outside
from eqfuse.terms.parser import parse
from eqfuse.verify.inputs import input_specs, small_shapes
from eqfuse.verify.joint import JointSizes
from eqfuse.verify.sizes import LARGEST_WORK, small_extents, work

equivalent = partial(eq.equivalent, prove=False)

CONVOLUTION = "z = sum[j](x[j])\ny[i] = sum[k](x[i+k] * w[k]) / z\nreturn y"


@pytest.mark.parametrize(
    "text",
    [
        CONVOLUTION,
        CONVOLUTION.replace("i+k", "2*i+k"),
        CONVOLUTION.replace("i+k", "(i+k)//2"),
        CONVOLUTION.replace("i+k", "(3*i+k)%4"),
        "z = sum[j](x[j] * u[j])\ny[i] = sum[k](x[i+k] * u[k+i+2]) / z",
        "z = sum[j](x[j])\ny[i] = x[N(j)-N(i)+i-3] + z",
        "y[i] = x[i] + x[10]",
        "y[i] = where(i > 1, where(i > 2, x[i-3], x[i-2]), 0) + x[i]",
        "y[i] = x[i] + x[max(i-1, 0)] + x[N(i)-1-i]",
        "x: f32[k]\ny[i] = x[i+0] - x[i+N(k)//2]",
        "y[i] = sum[j](x[j]) + where(i + 1 < N(i), x[i+1], 0) * x[i]",
    ],
)
def test_every_read_is_inside_at_the_sizes_used(text: str) -> None:
    program = parse(text)
    extents = small_extents(program)
    assert not list(reads_outside(program, small_shapes(program, extents), extents, {}))
    assert eq.compile(text, target="cpu").certificate.ok


def test_a_convolution_over_a_normalised_tensor_runs() -> None:
    x, w = torch.arange(5.0), torch.tensor([1.0, -2.0])
    found = eq.compile(CONVOLUTION, target="cpu")(x=x, w=w, sizes={"i": 4})
    assert torch.allclose(found, (x[:4] - 2 * x[1:]) / x.sum())


@pytest.mark.parametrize(
    ("read", "guard"),
    [
        ("x[i - 1]", "i - 1 >= 0"),
        ("x[2 * i]", "2 * i < N(i)"),
        ("x[N(i) - i]", "N(i) - i < N(i)"),
        ("x[2 * i - 1]", "(2 * i - 1 >= 0) & (2 * i - 1 < N(i))"),
    ],
)
def test_a_read_that_no_sizes_fit_is_an_error(read: str, guard: str) -> None:
    text = f"y[i] = {read} + x[i]"
    with pytest.raises(BindError) as caught:
        eq.compile(text, target="cpu")
    assert str(caught.value) == (
        f"{read} reads outside dimension 0 of 'x', whatever its size (line 1)\n"
        f"    {text}\n"
        f"           {'^' * len(read)}\n"
        f"guard the read: where({guard}, {read}, 0)"
    )
    x = torch.randn(5)
    guarded = f"y[i] = where({guard}, {read}, 0) + x[i]"
    found = eq.compile(guarded, target="cpu")(x=x)
    assert torch.allclose(found, torch.from_numpy(eq.reference(guarded)(x=x)).float())


GROUPED = "q: axis[4]\nm[g] = sum[q](x[g*4 + q])\ny[c] = m[c//4] * x[c]"
GROUP_NORM = """
q: axis[size]
m[n,g] = sum[q,h,w](x[n,g*size+q,h,w]) / (size * N(h) * N(w))
v[n,g] = sum[q,h,w](sq(x[n,g*size+q,h,w] - m[n,g])) / (size * N(h) * N(w))
y[n,c,h,w] = (x[n,c,h,w] - m[n,c//size]) / sqrt(v[n,c//size] + 1e-5) * gamma[c] + beta[c]
"""
PADDED_CONVOLUTION = """
y[n,o,h,w] = sum[c,r,s](
    where((h+r-1 >= 0) & (h+r-1 < N(h)) & (w+s-1 >= 0) & (w+s-1 < N(w)), x[n,c,h+r-1,w+s-1], 0) * k[o,c,r,s]
)
"""


@pytest.mark.parametrize(
    ("text", "scalars", "sizes"),
    [
        (GROUPED, {}, {}),
        (GROUPED + "\nreturn m, y", {}, {"g": 3}),
        (GROUPED.replace("4", "N(q)").replace("axis[N(q)]", "axis[4]"), {}, {}),
        (GROUPED.replace("*4", "*p").replace("//4", "//p"), {"p": 4}, {}),
        (GROUPED.replace("q: axis[4]\n", "").replace("*4", "*p").replace("//4", "//p"), {"p": 4}, {"q": 4}),
        (GROUPED.replace("q: axis[4]\n", ""), {}, {"q": 4}),
        (GROUPED.replace("4", "3"), {}, {}),
        ("q: axis[3]\nm[g] = sum[q](x[g+q])\ny[c] = m[max(c-2, 0)] * x[c]", {}, {}),
        ("y[c] = x[c//4*4 + 3 - c%4] + x[c]", {}, {}),
        ("y[c] = x[c + 1 - 2*(c%2)] * x[c]", {}, {}),
    ],
)
def test_an_index_that_never_leaves_the_tensor_is_accepted(
    text: str, scalars: dict[str, int], sizes: dict[str, int]
) -> None:
    x = torch.randn(12)
    found = eq.compile(text, target="cpu")(x=x, sizes=sizes, **scalars)
    expected = eq.reference(text)(x=x, sizes=sizes, **scalars)
    for one, other in zip(*((a if isinstance(a, tuple) else (a,)) for a in (found, expected)), strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other).float())


def test_windows_of_both_dimensions_of_a_square_image() -> None:
    text = "q: axis[2]\nr: axis[2]\np[i,j] = max[q,r](x[2*i+q,2*j+r])\ny[a,b] = x[a,b] - p[a//2,b//2] + p[b//2,a//2]"
    x = torch.randn(8, 8)
    pooled = torch.nn.functional.max_pool2d(x[None], 2)[0].repeat_interleave(2, 0).repeat_interleave(2, 1)
    torch.testing.assert_close(eq.compile(text, target="cpu")(x=x), x - pooled + pooled.T)


@pytest.mark.slow
def test_group_norm_over_channels_that_are_not_split() -> None:
    x, gamma, beta = torch.randn(2, 12, 3, 5), torch.randn(12), torch.randn(12)
    found = eq.compile(GROUP_NORM, target="cpu", scalars={"size": 4})(x=x, gamma=gamma, beta=beta)
    torch.testing.assert_close(found, torch.nn.functional.group_norm(x, 3, gamma, beta), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", [PADDED_CONVOLUTION, "r: axis[3]\ns: axis[3]" + PADDED_CONVOLUTION])
@pytest.mark.slow
def test_many_axes_have_compact_sizes(text: str) -> None:
    """Their product is what verification takes; axes of one tensor still differ, and have ragged last tiles."""
    program = parse(text)
    extents = small_extents(program)
    assert work(program, extents) <= LARGEST_WORK
    assert len({extents[axis] for axis in "nohw"}) == 4
    assert {extents[axis] % 4 for axis in "crs"} <= {1, 2, 3}
    both = JointSizes.of(program, program, {})
    assert both.work <= LARGEST_WORK
    x, k = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3)
    found = eq.compile(text, target="cpu")(x=x, k=k, sizes={"h": 6, "w": 5})
    torch.testing.assert_close(found, torch.nn.functional.conv2d(x, k, padding=1), rtol=1e-4, atol=1e-5)


def test_so_many_axes_that_all_are_as_short_as_can_be() -> None:
    inside = " & ".join(f"({a}+{b}-1 >= 0) & ({a}+{b}-1 < N({a}))" for a, b in ("dr", "hs", "wt"))
    product = f"where({inside}, x[n,c,d+r-1,h+s-1,w+t-1], 0) * k[o,c,r,s,t]"
    program = parse(f"r: axis[3]\ns: axis[3]\nt: axis[3]\ny[n,o,d,h,w] = sum[c,r,s,t]({product})")
    extents = small_extents(program)
    assert work(program, extents) <= LARGEST_WORK and min(extents[axis] for axis in "ndhwc") >= 3


def test_a_long_declared_axis_of_an_index_is_taken_once() -> None:
    program = parse(
        "q: axis[128]\ns[b,k] = max[q](w[b*128+q,k])\ny[i,k] = sum[j](x[i,j] * w[j,k] / s[j//128,k])"
    )
    extents = small_extents(program)
    assert extents["q"] == extents["j"] == 128


def test_without_verification_the_call_names_the_read() -> None:
    kernel = eq.compile("y[i] = x[2 * i] + x[i]", target="cpu", verify=False)
    with pytest.raises(BindError, match="reads positions 0 to 8 of dimension 0 of 'x', which has size 5"):
        kernel(x=torch.randn(5))


def test_every_axis_has_several_blocks_but_a_column_of_products() -> None:
    """A block of a grid axis that starts at the wrong position is seen only where there is a second one."""
    two = small_extents(parse("y[i,k] = sum[j](x[i,j] * w[j,k])"))
    assert min(two["i"], two["k"]) > 2
    alike = small_extents(parse("y[a,b,c] = x[a,b,c] + 1"))
    assert min(alike.values()) > 2
    heads = small_extents(
        parse("s[h,i,j] = sum[d](q[h,i,d] * k[h//2,j,d])\ny[h,i,e] = sum[j](exp(s[h,i,j]) * v[h//2,j,e])")
    )
    assert heads["e"] == 2 and sorted(heads.values()) == [2, 3, 5, 7, 11]
    assert heads["j"] < heads["d"]  # more is computed along j


def test_integers_that_index_two_dimensions_are_inside_the_shorter() -> None:
    """KTO and DPO: labels pick from a policy and from a reference, whose classes nothing says are as many."""
    text = "l: i64[b]\ny[b] = x[b,l[b]] - log(sum[v](exp(x[b,v]))) - (z[b,l[b]] - log(sum[u](exp(z[b,u]))))\n"
    program = parse(text)
    extents = small_extents(program)
    assert extents["u"] != extents["v"]
    assert input_specs(program, extents)["l"].values == (0, min(extents["u"], extents["v"]) - 1)
    assert eq.compile(text, target="cpu", native="off").certificate.ok


def test_no_size_to_try_is_another_than_the_declared_one_that_an_index_needs() -> None:
    """Groups of channels: with 16 groups of 4 among 16 channels, the gradient's sums read outside."""
    program = parse(
        "x: f32[i, j]\nm: axis[4]\nn: axis[N(j) // 4]\nt[i, m] = sum[n](x[i, m * (N(j) // 4) + n])\n"
        "y[i, j] = sum[m](where(j - m * (N(j) // 4) >= 0 and j - m * (N(j) // 4) < N(n), t[i, m] * x[i, j], 0))"
    )
    extents = small_extents(program, pinned={"m": 16, "j": 16})
    assert (extents["m"], extents["j"], extents["n"]) == (4, 16, 4)


@pytest.mark.parametrize(
    "text",
    [
        "u: f32[i1]\nm: i32[k]\ny[i, k] = where(i < m[k], z[k] + u[i + 1], -inf)",
        "x: f32[j]\nv: f32[j2]\nq: axis[2]\ny[j] = where(x[j] > j, x[j] - sum[q](v[j * 2 + q]), -inf)",
        "x: f32[j]\nh: f32[j2]\na = max[j](x[j])\ny = sum[j](where(j > x[j], x[j] - h[j + N(j)] - a, 0))",
    ],
)
def test_dimensions_of_axes_that_are_declared_alone_hold_what_conditions_on_data_may_let_through(
    text: str,
) -> None:
    program = parse(text)
    for length in (3, 5):
        extents = small_extents(program, pinned={"i" if "u:" in text else "j": length})
        assert extents.get("i1", 1 << 9) > extents.get("i", 0)
        assert extents.get("j2", 1 << 9) >= 2 * extents.get("j", 0)
    assert eq.compile(text, target="cpu", native="off").certificate.ok
    assert equivalent(text, text.replace("x[j] -", "-1 * (-x[j]) -").replace("z[k] +", "z[k] - (-1) *"))
