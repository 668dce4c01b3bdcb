"""Calling kernels as users do: kinds, dtypes, strides and sizes of tensors, many shapes, memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import eqfuse as eq
from eqfuse import compiler
from eqfuse.compiled import Compiled

SOFTMAX = "e[i,j] = exp(x[i,j] - max[j](x[i,j]))\ny[i,j] = e[i,j] / sum[j](e[i,j])"
softmax = eq.compile(SOFTMAX)


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> bool:
    found = found.double() if isinstance(found, torch.Tensor) else found
    return bool(np.allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("columns", [1, 2, 3, 17, 1000])
def test_odd_sizes(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    assert near(softmax(x=x), torch.softmax(x, 1))


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).normal(size=(5, 33)).astype(np.float32)
    exact = eq.reference(SOFTMAX)(x=x)
    for given in (x, x[::-1], x.T.copy().T, x.astype(">f4"), x.astype(np.float16), x.astype(np.float64)):
        found = softmax(x=given)
        assert isinstance(found, np.ndarray)
        assert found.dtype == given.dtype.newbyteorder("=")
        assert near(found, exact[::-1] if given.strides[0] < 0 else exact, 2e-3)


def test_fields_of_structures() -> None:
    rows = np.zeros((3, 7), [("flag", "i1"), ("x", "f4")])
    rows["x"] = np.random.default_rng(0).normal(size=(3, 7))
    assert near(softmax(x=rows["x"]), eq.reference(SOFTMAX)(x=rows["x"]))
    with pytest.raises(eq.EqfuseError, match="'x' has dtype .*, which the language does not have"):
        softmax(x=rows)


def test_read_only_and_broadcast_numpy_arrays(recwarn: pytest.WarningsRecorder) -> None:
    x = np.broadcast_to(np.arange(7, dtype=np.float32), (3, 7))
    assert near(softmax(x=x), eq.reference(SOFTMAX)(x=x))
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_outputs_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(5, 33).to(dtype)
    found = softmax(x=x)
    assert found.dtype == dtype
    assert near(found, torch.softmax(x.double(), 1), 1e-2 if dtype.itemsize == 2 else 1e-6)
    assert softmax(x=x[:, :0]).dtype == softmax(x=x[:0]).dtype == dtype


def test_strides_of_every_kind() -> None:
    x = torch.randn(12, 10)
    for given in (x.T, x[::2, 1::3], x[3].expand(4, 10), x[:, :1].expand(12, 5), x.reshape(2, 6, 10)[:, 2]):
        assert near(softmax(x=given), torch.softmax(given, 1))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Counting(TorchFunctionMode):
    """What anybody may put around calls of torch."""

    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "mode": Counting,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("columns", [40, 3000])
@pytest.mark.slow(but=["40-autocast"])
def test_what_torch_is_set_to_changes_nothing(around: str, columns: int) -> None:
    source = "e[i,j] = exp(sum[d](q[i,d] * k[d,j]))\ny[i] = sum[j](e[i,j] * gelu(v[j])) / sum[j](e[i,j])"
    given = {"q": torch.randn(50, 20), "k": torch.randn(20, columns), "v": torch.randn(columns)}
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    kernel = eq.compile(source)
    wanted, exact = kernel(**given), eq.reference(source)(**given)
    with AROUND[around]():
        for other in (kernel, eq.compile(source)):
            found = other(**given)
            assert found.dtype == wanted.dtype and found.device == wanted.device
            assert torch.equal(found, wanted)
            assert np.array_equal(other(**arrays), wanted.numpy())
        state = kernel.combine(kernel.init(), kernel.update(kernel.init(), **given))
        assert near(kernel.finish(state), wanted)
        assert np.array_equal(eq.reference(source)(**given), exact)
        assert kernel(q=given["q"][:0], k=given["k"], v=given["v"]).device.type == "cpu"


def test_empty_axes_give_identities_or_nothing() -> None:
    kernel = eq.compile(
        "a[i] = sum[j](x[i,j])\nb[i] = max[j](x[i,j])\nc[i] = prod[j](x[i,j])\nreturn c, a, b"
    )
    product, total, largest = kernel(x=torch.ones(2, 0))
    assert (product.tolist(), total.tolist(), largest.tolist()) == ([1, 1], [0, 0], [-np.inf, -np.inf])
    assert [tuple(t.shape) for t in kernel(x=torch.ones(0, 3))] == [(0,)] * 3
    assert [t.tolist() for t in kernel(x=torch.full((1, 2), 3.0))] == [[9], [6], [3]]


def test_scalars_in_and_out() -> None:
    kernel = eq.compile("y = sum[i](x[i]) * s")
    for scale in (2, 2.0, np.float32(2), np.array(2.0), torch.tensor(2.0)):
        found = kernel(x=torch.ones(3), s=scale)
        assert found.shape == () and found.item() == 6


@pytest.mark.slow
def test_integers_stay_exact_in_every_schedule() -> None:
    x = torch.randint(-(2**62), 2**62, (3, 3001), generator=torch.Generator().manual_seed(0))
    for prefer in ("rolling", "split_k", "resident", "multi_pass"):
        assert torch.equal(eq.compile("y[i] = min[j](x[i,j])", prefer=prefer)(x=x), x.amin(1))
        first = eq.compile("y[i] = min[j](where(x[i,j] > 0, j, N(j)))", prefer=prefer)
        assert torch.equal(first(x=x).long(), (x > 0).int().argmax(1))
    y = x.double()
    y[0, 2999] = y[1, 5] = 1e30
    for prefer in ("resident", "multi_pass"):
        assert torch.equal(eq.compile("y[i] = argmax[j](x[i,j])", prefer=prefer)(x=y).long(), y.argmax(1))


def test_undeclared_masks_are_truth_values() -> None:
    kernel = eq.compile("y[i] = sum[j](where(m[i,j], x[i,j], 0))")
    x, m = torch.randn(4, 9), torch.rand(4, 9) > 0.5
    assert near(kernel(x=x, m=m), (x * m).sum(1))


def test_a_plan_that_is_good_enough_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    pipeline = compiler.pipeline

    def counted(*args: Any) -> Compiled:
        planned.append(args[1])
        return pipeline(*args)

    monkeypatch.setattr(compiler, "pipeline", counted)
    kernel = eq.compile(SOFTMAX)
    planned.clear()
    for _ in range(3):
        for columns in range(1, 20):
            x = torch.randn(3, columns)
            assert near(kernel(x=x), torch.softmax(x, 1))
    assert planned[0]["j"] == 1
    assert len(planned) <= 5


MEMORY = """
import resource, torch, eqfuse as eq
k = eq.compile('''
    S[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d]) * 0.125
    P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
    O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h,j,e])
''')
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
k(**{n: torch.randn(4, 256, 64) for n in "QKV"})
before = peak()
given = {n: torch.randn(4, 8192, 64) for n in "QKV"}
out = k(**given)
print(peak() - before - 4 * out.nbytes)
"""


@pytest.mark.slow
def test_long_attention_needs_little_memory() -> None:
    """4 heads at length 8192: scores whole would be 1 GB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 20
