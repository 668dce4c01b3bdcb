"""Gradients in chunks of an axis: their texts, that they are verified, what is refused, and what they give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import eqfuse as eq
from eqfuse.differentiate import divide
from eqfuse.differentiate.chunks import Undivided, certify_chunks, chunks_of
from eqfuse.differentiate.divide import Chunked, Chunker
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.extract import call_estimate
from eqfuse.extract.call_estimate import CallEstimate
from eqfuse.terms.parser import parse
from eqfuse.verify.certificate import REQUESTED

LOSS = """
x: bf16[i,d]
W: bf16[v,d]
label: i64[i]
L[i,v] = sum[d](x[i,d] * W[v,d])
loss[i] = max[v](L[i,v]) + log(sum[v](exp(L[i,v] - max[v](L[i,v])))) - L[i,label[i]]
"""
ATTENTION = """
S[i,j] = sum[d](Q[i,d] * K[j,d]) * scale
T[i,j] = where(j <= i, S[i,j], -inf)
P[i,j] = exp(T[i,j] - max[j](T[i,j]))
O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])
"""
MLP = """
h[i,f] = sum[d](x[i,d] * A[f,d])
y[i,e] = sum[f](sigmoid(h[i,f]) * B[f,e])
"""


def loss_gradient() -> str:
    halves = {"x": "bf16", "W": "bf16"}
    return saving_gradient(LOSS, ("x", "W"), halves=halves, saves="f32").backward


def test_a_chunk_goes_on_from_the_sums_of_those_before() -> None:
    chunks = chunks_of(loss_gradient(), "v")
    made = chunks.chunk.partition("L[i, v] =")[2]
    assert (
        "dL[i, v] = bf16(where(label[i] == v + v_start, -dloss[i], 0) + dloss[i] * exp(L[i, v] - lse[i]))"
        in made
    )
    assert "dx_sum[i, d] = dx_sum_before[i, d] + sum[v](dL[i, v] * W[v, d])" in made
    assert made.endswith("return dx_sum, dW")
    assert chunks.finish is None and chunks.totals == {"dx_sum": "dx"}
    assert chunks.inputs == {"W": (0,)} and chunks.outputs == {"dW": 0} and chunks.results == ("dx", "dW")


@pytest.mark.parametrize(
    ("source", "axis"),
    [
        (loss_gradient(), "v"),
        (loss_gradient(), "i"),
        (saving_gradient(ATTENTION, ("Q", "K", "V")).backward, "i"),
        (saving_gradient(ATTENTION, ("Q", "K", "V")).backward, "j"),
        (saving_gradient(MLP, ("x", "A", "B")).backward, "f"),
        ("y[j] = x[j] * sum[i](z[i] * j)\ns = sum[j](x[j] * w[t[j]])\nreturn y, s", "j"),
        (
            "t: i64[j]\ns = sum[j](where(t[j] == j, x[j], w[j % 3])) * sum[k](v[k])\nm = s * 2\nreturn m, s",
            "j",
        ),
    ],
    ids=["loss, v", "loss, i", "attention, i", "attention, j", "MLP", "a gather", "made of a sum"],
)
def test_chunks_are_verified(source: str, axis: str) -> None:
    found = certify_chunks(parse(source), chunks_of(source, axis), bound=REQUESTED)
    assert found.ok and found.bound <= REQUESTED, found


COUNTED = """
valid[i] = label[i] != 3
L[i,v] = sum[d](x[i,d] * W[v,d])
n = sum[i](where(valid[i], 1, 0))
of[v] = sum[i](where(label[i] == v, 1, 0))
loss = sum[i](where(valid[i], log(sum[v](exp(L[i,v]))) - L[i,label[i]], 0)) / max(n, 1)
mean[v] = sum[i](L[i,v]) / N(i) - sum[i](L[i,v] * x[i,0])
return loss, of, mean, n
"""


@pytest.mark.parametrize("length", [3, 7])
def test_chunks_count_and_know_the_length_of_the_whole_axis(length: int) -> None:
    torch.manual_seed(0)
    chunks = chunks_of(COUNTED, "i")
    assert chunks.added == ("sum_valid_sum", "n_sum") and "of_sum_before: i64[v]" in chunks.chunk
    certificate = certify_chunks(parse(COUNTED), chunks, bound=REQUESTED)
    assert certificate.ok
    wrong = replace(chunks, finish=(chunks.finish or "").replace("/ i_count", "* i_count"))
    assert not certify_chunks(parse(COUNTED), wrong, bound=REQUESTED).ok
    kernel, finish = (eq.compile(text, native="off") for text in (chunks.chunk, chunks.finish or ""))
    x, W = torch.randn(7, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    values = {"x": x, "W": W, "label": torch.tensor([0, 3, 1, 3, 4, 0, 2])}
    found = Chunked(chunks, kernel, finish, certificate)(values, {"i": 7, "d": 8, "v": 5}, length)
    for one, other in zip(found, eq.reference(COUNTED)(**values), strict=True):
        assert torch.allclose(one.double(), torch.as_tensor(other, dtype=torch.float64), rtol=1e-12)


WRONG = {
    "positions of the chunk": ("v + v_start", "v - v_start"),
    "only the last sum": ("dx_sum_before[i, d] + ", ""),
    "the first sum twice": ("dx_sum_before[i, d] + ", "2 * dx_sum_before[i, d] + "),
    "a sum of one position": ("sum[i](dL[i, v] * x[i, d])", "dL[0, v] * x[0, d]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chunks_are_refused(name: str) -> None:
    source = loss_gradient()
    chunks = chunks_of(source, "v")
    wrong = replace(chunks, chunk=chunks.chunk.replace(*WRONG[name]))
    assert wrong != chunks
    found = certify_chunks(parse(source), wrong, bound=REQUESTED)
    assert not found.ok and found.counterexample is not None


@pytest.mark.parametrize(
    ("source", "axis", "why"),
    [
        ("y[i] = max[j](x[i,j])", "j", "'y' is a reduction over 'j' that is no sum"),
        ("y[i,j] = x[i,j] / sum[j](x[i,j])", "j", "'y' needs all of 'j' first"),
        ("y[i] = sum[j](where(x[i,j] > 0, 1, 0))", "j", "'y' counts over 'j' by real numbers"),
        ("y[i] = x[i] + x[i + 1]", "i", "'x' is read at other positions than 'i'"),
        ("y[i,k] = x[i] - x[k]\nk: axis[i]", "i", "another axis is as long as 'i'"),
        ("n: axis[4]\ny[n] = s * n", "n", "no input has the axis 'n'"),
    ],
)
def test_what_does_not_run_in_chunks_says_why(source: str, axis: str, why: str) -> None:
    with pytest.raises(Undivided, match=why):
        chunks_of(source, axis)


@pytest.mark.parametrize("length", [7, 16, 40])
@pytest.mark.slow(but=["[7]"])
def test_chunks_give_the_gradient(length: int) -> None:
    torch.manual_seed(0)
    source = loss_gradient().replace("bf16[", "f64[").replace("bf16(", "f64(")
    chunks = chunks_of(source.replace("lse: f32", "lse: f64"), "v")
    kernel = eq.compile(chunks.chunk, native="off")
    chunked = Chunked(chunks, kernel, None, certify_chunks(parse(source), chunks, bound=REQUESTED))
    x, W = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 40))
    label, dloss = torch.randint(0, 40, (6,)), torch.randn(6, dtype=torch.float64)
    expected = torch.autograd.grad(F.cross_entropy(x @ W.mT, label, reduction="none"), (x, W), dloss)
    x, W = x.detach(), W.detach()
    values = {"x": x, "W": W, "label": label, "dloss": dloss, "lse": (x @ W.mT).logsumexp(-1)}
    found = chunked(values, {"i": 6, "d": 8, "v": 40}, length)
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_constants_and_dtypes_of_a_call_are_those_of_its_chunks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = MLP.replace("h[i,f] =", "h[i,f] = c *")
    kernel = eq.compile(source, native="off", scalars={"c": 0.5})
    values = {n: torch.randn(s, dtype=dtype) for n, s in {"x": (5, 8), "A": (30, 8), "B": (30, 4)}.items()}
    sizes = {"i": 5, "d": 8, "f": 30, "e": 4}

    def compiled(text: str) -> eq.Kernel:
        return eq.compile(text, native="off", verify=False)

    much = CallEstimate(1e12, ("i", "f"), lambda: 1e9)
    kinds = {"y": "bf16" if dtype == torch.bfloat16 else "f64"}
    found = Chunker(kernel.program, kernel.scalars, kernel.bound, compiled).of(much, values, sizes, kinds)
    assert found is not None and found.length in (3, 15)
    (made,) = found(values, sizes)
    expected = kernel(**values)
    assert made.dtype == expected.dtype == dtype
    assert torch.allclose(made, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-12)


@pytest.mark.slow
def test_a_backward_that_stores_much_runs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_estimate, "MUCH", 1000)
    monkeypatch.setattr(divide, "SHARE", 4.0)
    monkeypatch.setattr(divide, "SLOWER", 10.0)
    torch.manual_seed(0)
    shapes = {"x": (600, 160), "A": (512, 160), "B": (512, 128)}
    given = {name: (torch.randn(shape) * 0.1).requires_grad_() for name, shape in shapes.items()}
    kernel = eq.compile(MLP, native="off")
    found = torch.autograd.grad(kernel(**given).sum(), tuple(given.values()))
    expected = torch.autograd.grad(
        (torch.sigmoid(given["x"] @ given["A"].mT) @ given["B"]).sum(), tuple(given.values())
    )
    assert all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(found, expected, strict=True)
    )
    chunks = kernel.backward.chunks
    assert chunks is not None and chunks.divided.stored < chunks.whole.stored
    assert f"chunks of {chunks.length} positions of" in str(chunks)
    certificate = kernel.backward.certificate
    assert certificate.ok and len(certificate.chunks) == 2 and certificate.bound <= REQUESTED
    short = {name: value.detach()[:8].requires_grad_() for name, value in given.items()}
    torch.autograd.grad(kernel(**short).sum(), tuple(short.values()))
    assert kernel.backward.chunks is None
