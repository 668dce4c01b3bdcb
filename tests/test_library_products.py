"""Matrix products that a GPU's library computes: which they are, when they are chosen, what is printed, and what is checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_gpu import Gpu, gpu

import eqfuse as eq
from eqfuse.errors import ScheduleError
from eqfuse.loops.check import NestError, check
from eqfuse.loops.nodes import LibraryProduct
from eqfuse.tile.triton.launch import interpret

__all__ = ["gpu"]

LINEAR = "y[t,f] = sum[c](x[t,c] * w[f,c])\nreturn y"
PROGRAMS: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "linear": (LINEAR, {"x": (5, 4), "w": (3, 4)}, "tc,fc->tf"),
    "turned": ("y[f,t] = sum[c](x[t,c] * w[f,c])\nreturn y", {"x": (5, 4), "w": (3, 4)}, "tc,fc->ft"),
    "batched": (
        "y[b,t,f] = sum[c](x[b,t,c] * w[b,c,f])\nreturn y",
        {"x": (2, 5, 4), "w": (2, 4, 3)},
        "btc,bcf->btf",
    ),
    "shared heads": (
        "s[b,h,g,i,j] = sum[d](q[b,h,g,i,d] * k[b,h,j,d])\nreturn s",
        {"q": (2, 2, 3, 5, 4), "k": (2, 2, 6, 4)},
        "bhgid,bhjd->bhgij",
    ),
    "two axes": (
        "y[b,t,f] = sum[h,d](x[b,h,t,d] * w[f,h,d])\nreturn y",
        {"x": (2, 3, 5, 4), "w": (6, 3, 4)},
        "bhtd,fhd->btf",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_printed_calls_compute_the_product(name: str, dtype: torch.dtype) -> None:
    source, shapes, equation = PROGRAMS[name]
    tensors = {each: torch.randn(shape, dtype=dtype) for each, shape in shapes.items()}
    named = {"f32": torch.float32, "f64": torch.float64}
    declared = next(short for short, each in named.items() if each == dtype)
    axes = {each: line.split(f"{each}[")[1].split("]")[0] for each in shapes for line in [source]}
    text = "".join(f"{each}: {declared}[{axes[each]}]\n" for each in shapes) + source
    kernel = eq.compile(text, target="h200", prefer="library")
    assert kernel.plan.schedule == "library" and kernel.certificate.ok
    assert "multiply(" in kernel.triton and "@triton.jit" not in kernel.triton
    expected = torch.einsum(equation, *tensors.values())
    torch.testing.assert_close(interpret(kernel.triton, kernel.name, **tensors), expected)
    out = torch.empty(tuple(reversed(expected.shape)), dtype=dtype).permute(*reversed(range(expected.ndim)))
    turned = {each: t.transpose(-1, -2).contiguous().transpose(-1, -2) for each, t in tensors.items()}
    interpret(kernel.triton, kernel.name, **turned, out=out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_like_an_earlier_one_go_straight_to_the_library(name: str, gpu: Gpu) -> None:
    source, shapes, equation = PROGRAMS[name]
    result = source.split("[")[0]
    axes = source.split("[")[1].split("]")[0]
    source = source.replace(f"return {result}", f"z[{axes}] = tanh({result}[{axes}]) + 1\nreturn {result}, z")
    kernel = eq.compile(source, target="h200", prefer="library", verify=False)

    def drawn() -> dict[str, torch.Tensor]:
        return {each: gpu.seen(torch.randn(shape)) for each, shape in shapes.items()}

    tensors = drawn()
    kernel(**tensors)
    turned = {name: gpu.seen(t.mT.contiguous()).mT for name, t in drawn().items()}
    for given in (drawn(), drawn(), turned, turned):
        made, fused = kernel(**given)
        expected = torch.einsum(equation, *given.values())
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(fused, torch.tanh(expected) + 1)
    assert len(gpu.straight) >= 3 and len(gpu.compiled) <= 2
    launch = kernel.bind(**tensors)
    expected = torch.einsum(equation, *tensors.values())
    torch.testing.assert_close(launch()[1], torch.tanh(expected) + 1)
    tensors[next(iter(tensors))].fill_(0.5)
    torch.testing.assert_close(launch()[0], torch.einsum(equation, *tensors.values()))


def test_what_is_around_a_product_is_fused_beside_it() -> None:
    source = """
h[t,f] = tanh(sum[c](x[t,c] * w[f,c]) + b[f])
y[t,d] = sum[f](h[t,f] * v[d,f]) * s
return y
"""
    kernel = eq.compile(source, target="h200", prefer="library")
    shapes = {"x": (7, 5), "w": (6, 5), "b": (6,), "v": (4, 6)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = interpret(kernel.triton, kernel.name, **tensors, s=2.0)
    x, w, b, v = tensors.values()
    torch.testing.assert_close(found, torch.tanh(x @ w.T + b) @ v.T * 2.0)
    assert kernel.certificate.ok and "library" in kernel.explain()


def test_a_dimension_may_be_of_several_axes() -> None:
    source = """
m: axis[4]
l: axis[3]
s[k,l,m] = sum[j](x[k,j] * w[l * 4 + m, j])
y[k,l,m] = s[k,l,m] - mean[m](s[k,l,m])
return y
"""
    kernel = eq.compile(source, target="h200", prefer="library")
    x, w = torch.randn(5, 6), torch.randn(14, 6)[:13]  # one row more than is read
    s = (x @ w[:12].T).reshape(5, 3, 4)
    sized = eq.compile("k: axis[640]\nj: axis[320]\n" + source, target="h200", prefer="library", verify=False)
    assert sized.plan.schedule == "library"
    made = interpret(kernel.triton, kernel.name, x=x, w=w[:12])
    torch.testing.assert_close(made, s - s.mean(-1, keepdim=True))
    assert kernel.certificate.ok
    with pytest.raises(ScheduleError, match="no library plan"):  # 5 rows apart are no axis of 4
        eq.compile(source.replace("l * 4", "l * 5"), target="h200", prefer="library")


@pytest.mark.parametrize(
    ("dtype", "is_chosen"), [("f32", True), ("f64", True), ("f16", False), ("bf16", False)]
)
def test_large_products_of_wide_floats_are_the_librarys(dtype: str, is_chosen: bool) -> None:
    axes = "t: axis[4096]\nf: axis[2048]\nc: axis[1024]\n"
    kernel = eq.compile(f"x: {dtype}[t,c]\nw: {dtype}[f,c]\n{axes}{LINEAR}", target="h200", verify=False)
    assert (kernel.plan.schedule == "library") == is_chosen
    assert ("library" in {plan.schedule for plan in kernel.plans()}) == is_chosen


@pytest.mark.parametrize(
    "source",
    [
        "y[t,f] = sum[c](where(c <= t, x[t,c] * w[f,c], 0))\nreturn y",
        "y[t,f] = max[c](x[t,c] * w[f,c])\nreturn y",
        "y[t] = sum[c](x[t,c] * w[c])\nreturn y",
        "y[t,f] = sum[c](x[t,c] * w[f,c] * s[c])\nreturn y",
        "y[t,f] = sum[c](x[t,c] * w[i[f],c])\nreturn y",
        "x: f16[t,c]\nw: f16[f,c]\n" + LINEAR,
        "y[t,f] = sum[c](where(c < n, x[t,c], 0) * w[f,c])\nreturn y",
        "y[t,f] = sum[c](exp(where(c < n, x[t,c], -inf)) * w[f,c])\nreturn y",
    ],
)
def test_what_no_library_has_is_none_of_its_products(source: str) -> None:
    with pytest.raises(ScheduleError, match="no library plan"):
        eq.compile(source, target="h200", prefer="library")


def test_a_cpu_has_its_own_way_to_libraries() -> None:
    with pytest.raises(ScheduleError, match="no library plan"):
        eq.compile(LINEAR, target="cpu", prefer="library")


def of(*sides: tuple[str, str]) -> LibraryProduct:
    return LibraryProduct(*((tensor, tuple((axis,) for axis in axes)) for tensor, axes in sides))


@pytest.mark.parametrize(
    "wrong",
    [
        of(("y", "tf"), ("x", "tc"), ("w", "cf")),
        of(("y", "ft"), ("x", "tc"), ("w", "fc")),
        of(("y", "tf"), ("x", "tc"), ("x", "fc")),
        of(("y", "tf"), ("w", "tc"), ("x", "fc")),
        of(("y", "t"), ("x", "tc"), ("w", "fc")),
    ],
)
def test_a_call_for_something_else_is_refused(wrong: LibraryProduct) -> None:
    kernel = eq.compile(LINEAR, target="h200", prefer="library")
    nest = kernel.loops
    check(nest, kernel.program)
    (only,) = nest.kernels
    with pytest.raises(NestError, match="its library computes"):
        check(replace(nest, kernels=(replace(only, library=wrong),)), kernel.program)


def test_a_temporary_that_is_much_larger_than_all_tensors_is_not_stored() -> None:
    source = """
d: axis[16]
i: axis[4096]
j: axis[4096]
s[i,j] = sum[d](q[i,d] * k[j,d])
o[i,e] = sum[j](exp(s[i,j] - logsumexp[j](s[i,j])) * v[j,e])
return o
"""
    with pytest.raises(ScheduleError, match="no library plan"):
        eq.compile(source, target="h200", prefer="library")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu_the_library_computes_them(name: str) -> None:
    source, shapes, equation = PROGRAMS[name]
    result, axes = source.split("[")[0], source.split("[")[1].split("]")[0]
    source = source.replace(f"return {result}", f"z[{axes}] = tanh({result}[{axes}]) + 1\nreturn {result}, z")
    kernel = eq.compile(source, prefer="library", target="h200")
    for count in range(4):
        tensors = {each: torch.randn(shape, device="cuda") for each, shape in shapes.items()}
        if count == 3:
            tensors = {
                each: t.transpose(-1, -2).contiguous().transpose(-1, -2) for each, t in tensors.items()
            }
        made, fused = kernel(**tensors)
        expected = torch.einsum(equation, *tensors.values())
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused, torch.tanh(expected) + 1, rtol=1e-4, atol=1e-5)
    x = {each: t.clone().requires_grad_() for each, t in tensors.items()}
    found = torch.autograd.grad(kernel(**x)[1].square().sum(), list(x.values()))
    wanted = torch.autograd.grad(
        (torch.tanh(torch.einsum(equation, *x.values())) + 1).square().sum(), list(x.values())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_recurrence_in_order_keeps_its_products() -> None:
    source = "h[b,t,i] = tanh(sum[j](W[i,j] * h[b,t-1,j]) + sum[k](U[i,k] * x[b,t,k]))\nreturn h"
    kernel = eq.compile(source, target="h200")
    assert kernel.certificate.ok and kernel.plan.schedule == "in_order"
