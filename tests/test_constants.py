"""What is made of constant tensors alone is computed once for each value of them."""

from __future__ import annotations

import gc
import pickle
from weakref import ref

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError

MEAN = "y[b] = mean[o](sum[k](x[b,k] * w[o,k]))"
TWO = "y[b,o] = sum[j](sum[k](x[b,k] * u[k,j]) * v[j,o])"
NORM = "y[b,o] = sum[k](x[b,k] * w[o,k]) / sqrt(sum[k](w[o,k] * w[o,k])) / sum[i](g[i])"
HOT = "ids: i64[b]\ny[b,o] = sum[k](where(ids[b] == k, 1, 0) * (w[k,o] - mean[k](w[k,o])))"


def kernel(text: str, *names: str, **options: object) -> eq.Kernel:
    return eq.compile(text, target="cpu", native="off", constants=names, **options)  # type: ignore[arg-type]


def test_a_value_is_made_once_and_again_where_it_changes() -> None:
    k = kernel(MEAN, "w")
    x, w = torch.randn(9, 40), torch.randn(70, 40)

    def check(w: torch.Tensor) -> None:
        torch.testing.assert_close(k(x=x, w=w), (x @ w.T).mean(1), rtol=1e-4, atol=1e-5)

    check(w)
    divided = k._constants.latest  # type: ignore[union-attr]
    assert divided is not None
    made = []
    object.__setattr__(divided.kept, "kernel", _Counted(divided.kept.kernel, made))
    check(w)
    x = torch.randn(9, 40)
    check(w)
    assert made == []
    w.mul_(2)
    check(w)
    assert len(made) == 1
    other = torch.randn(70, 40)
    check(other)
    check(w)
    assert len(made) == 2
    w[3] = 0
    check(w)
    check(w.clone())
    assert len(made) == 4


class _Counted:
    """A kernel whose calls are counted."""

    def __init__(self, inner: object, calls: list[None]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __call__(self, **values: object) -> object:
        self._calls.append(None)
        return self._inner(**values)  # type: ignore[operator]


def test_no_constant_outlives_its_owner() -> None:
    k = kernel(MEAN, "w")
    w = torch.randn(70, 40)
    alive = ref(w)
    k(x=torch.randn(9, 40), w=w)
    del w
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("rows", "inner", "merged"), [(512, 256, True), (64, 4, False)])
def test_products_of_constants_are_made_where_calls_take_less(rows: int, inner: int, merged: bool) -> None:
    k = kernel(TWO, "u", "v")
    x, u, v = torch.randn(rows, 64), torch.randn(64, inner), torch.randn(inner, 64)
    torch.testing.assert_close(k(x=x, u=u, v=v), x @ u @ v, rtol=1e-3, atol=1e-3)
    assert (k._constants.latest is not None) == merged  # type: ignore[union-attr]
    assert ("kept of constants" in k.explain()) == merged
    assert k.certificate.ok and k.derivation.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("text", "names"), [(MEAN, "w"), (NORM, "wg"), (HOT, "w")])
def test_outputs_are_those_without_constants(text: str, names: str, dtype: torch.dtype) -> None:
    plain = eq.compile(text, target="cpu", native="off")
    k = kernel(text, *names)
    given = {
        "x": torch.randn(6, 32).to(dtype),
        "w": torch.randn(32, 32).to(dtype),
        "g": torch.rand(5).to(dtype),
        "ids": torch.randint(-1, 34, (6,)),
    }
    given = {name: given[name] for name in (t.name for t in plain.program.tensors)}
    found, wanted = k(**given), plain(**given)
    assert k._constants.latest is not None and found.dtype == wanted.dtype  # type: ignore[union-attr]
    torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-4)


def test_calls_that_nothing_is_kept_of_run_as_usual() -> None:
    k = kernel(MEAN, "w")
    x, w = torch.randn(9, 40), torch.randn(70, 40)
    wanted = (x @ w.T).mean(1)
    torch.testing.assert_close(torch.as_tensor(k(x=x.numpy(), w=w.numpy())), wanted, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(k(x=x, w=w.clone()), wanted, rtol=1e-4, atol=1e-5)
    assert k._constants.latest is None  # type: ignore[union-attr]
    for shape in ((0, 40), (9, 0)):
        assert torch.equal(k(x=torch.ones(shape), w=torch.ones(70, shape[1])), torch.zeros(shape[0]))
    trained = w.clone().requires_grad_()
    k(x=x, w=trained).sum().backward()
    torch.testing.assert_close(trained.grad, x.sum(0).expand(70, 40) / 70, rtol=1e-4, atol=1e-5)
    again = pickle.loads(pickle.dumps(k))
    torch.testing.assert_close(again(x=x, w=w), wanted, rtol=1e-4, atol=1e-5)
    assert again._constants.latest is not None


@pytest.mark.parametrize(
    ("constants", "options", "message"),
    [
        ({"v"}, {}, "the program has no tensor 'v' to be constant"),
        ("w", {}, "constants is 'w'"),
        ({"w"}, {"prefer": "rolling"}, "leave out prefer= or constants="),
    ],
)
def test_what_is_no_constant_is_refused(constants: object, options: dict[str, str], message: str) -> None:
    with pytest.raises(EqfuseError) as refused:
        eq.compile(MEAN, constants=constants, **options)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_names_of_the_program_are_its_own() -> None:
    k = kernel("size_o: f32\ny[b] = size_o * mean[o](sum[k](x[b,k] * w[o,k]))", "w")
    x, w = torch.randn(5, 32), torch.randn(16, 32)
    found = k(x=x, w=w, size_o=3.0)
    torch.testing.assert_close(found, 3 * (x @ w.T).mean(1), rtol=1e-4, atol=1e-5)
    assert k._constants.latest is not None  # type: ignore[union-attr]


def test_calls_of_other_lengths_share_what_is_kept() -> None:
    k = kernel(MEAN, "w")
    w = torch.randn(70, 40)
    for rows in range(1, 20):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(k(x=x, w=w), (x @ w.T).mean(1), rtol=1e-4, atol=1e-5)
    constants = k._constants
    assert constants is not None and len(constants._kernels) == 2 and len(constants._kept) == 1


def test_no_value_is_kept_that_is_much_larger_than_its_constants() -> None:
    k = kernel("m[i] = max[j](x[j] + sum[d](q[i,d] * p[j,d]))", "q", "p")
    x, q, p = torch.randn(90), torch.randn(80, 3), torch.randn(90, 3)
    torch.testing.assert_close(k(x=x, q=q, p=p), (x + q @ p.T).amax(1), rtol=1e-4, atol=1e-5)
    assert k._constants.latest is None  # type: ignore[union-attr]
