"""Calls like the last one: run without a look at each tensor, and only where nothing of a call is another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import eqfuse as eq
from eqfuse.arguments import call_key
from eqfuse.calls.quick import quick

SCALED = "n: i32\ny[i] = sum[j](where(j < n, x[i,j], 0)) * a"


def made(values: Mapping[str, Any], addresses: Sequence[int]) -> list[int]:
    return list(addresses)


X, OTHER = torch.randn(4, 8), torch.randn(4, 8)
GIVEN = {"x": X, "a": 0.5, "n": 3}
BASE = torch.randn(40)


def freed() -> torch.Tensor:
    """As FSDP frees parameters between uses."""
    x = torch.randn(4, 8)
    x.untyped_storage().resize_(0)
    return x


class Tracked(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_what_differs_in_memory_and_numbers_alone_is_alike() -> None:
    found = quick(made, GIVEN, None)
    assert found(GIVEN, None) == [X.data_ptr()]
    assert found({**GIVEN, "x": OTHER, "a": -1.5}, None) == [OTHER.data_ptr()]


def test_addresses_that_16_does_not_divide_are_a_kind() -> None:
    given = {"x": X, "y": BASE[1:33].view(4, 8)}
    found = quick(made, given, None)
    assert found({"x": OTHER, "y": BASE[2:34].view(4, 8)}, None) == [OTHER.data_ptr(), BASE.data_ptr() + 8]
    assert found({"x": OTHER, "y": X}, None) is found({**given, "x": BASE[3:35].view(4, 8)}, None) is None


OTHERS: dict[str, dict[str, Any]] = {
    "another number": {**GIVEN, "n": 4},
    "a truth": {**GIVEN, "n": True},
    "a float for an integer": {**GIVEN, "n": 3.0},
    "an integer for a float": {**GIVEN, "a": 1},
    "another order": {"a": 0.5, "x": X, "n": 3},
    "one more": {**GIVEN, "b": 1.0},
    "one less": {"x": X, "a": 0.5},
    "another dtype": {**GIVEN, "x": X.double()},
    "another shape": {**GIVEN, "x": torch.randn(4, 9)},
    "another layout": {**GIVEN, "x": torch.randn(8, 4).T},
    "numpy's": {**GIVEN, "x": X.numpy()},
    "a number for a tensor": {**GIVEN, "x": 1.0},
    "no numbers": {**GIVEN, "x": X.to("meta")},
    "sparse": {**GIVEN, "x": X.to_sparse()},
    "nested": {**GIVEN, "x": torch.nested.nested_tensor([X[0], X[1]])},
    "nested, jagged": {**GIVEN, "x": torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)},
    "sparse rows": {**GIVEN, "x": X.to_sparse_csr()},
    "mkldnn's": {**GIVEN, "x": X.to_mkldnn()},
    "without memory": {**GIVEN, "x": freed()},
    "negated": {**GIVEN, "x": torch._neg_view(X)},
    "a parameter": {**GIVEN, "x": torch.nn.Parameter(X)},
    "one that requires grad": {**GIVEN, "x": X.clone().requires_grad_()},
    "a subclass": {**GIVEN, "x": X.as_subclass(Tracked)},
    "another alignment": {**GIVEN, "x": BASE[1:33].view(4, 8)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_otherwise_is_looked_at(name: str) -> None:
    assert quick(made, GIVEN, None)(OTHERS[name], None) is None


REFUSED = {
    "nested": "is a nested tensor",
    "nested, jagged": "is a nested tensor",
    "sparse": "is a sparse_coo tensor",
    "sparse rows": "is a sparse_csr tensor",
    "mkldnn's": "is a _mkldnn tensor",
    "masked": "is a MaskedTensor, which does not take the operator of a kernel",
    "quantized": "has dtype torch.qint8, which the language does not have",
    "without memory": "has no memory: it was freed",
}
FOREIGN = {name: OTHERS[name]["x"] for name in OTHERS.keys() & REFUSED.keys()} | {
    "masked": torch.masked.masked_tensor(X, X > 0),
    "quantized": torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("native", ["off", "wait"])
def test_what_is_no_plain_tensor_is_refused_cold_and_warm(native: str) -> None:
    kernel = eq.compile(SCALED, native=native, verify=False)
    for warm in (False, True):
        for name, why in REFUSED.items():
            with pytest.raises(eq.EqfuseError, match=f"'x' {why}"):
                kernel(x=FOREIGN[name], a=0.5, n=3)
        for _ in range(0 if warm else 4):
            kernel(**GIVEN)
    assert kernel._calls.quick is not None


@pytest.mark.parametrize("native", ["off", "wait"])
def test_what_holds_no_numbers_or_is_a_subclass_works_cold_and_warm(native: str) -> None:
    kernel = eq.compile(SCALED, native=native, verify=False)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    for _ in range(4):
        for given in (X.to("meta"), fake):
            made = kernel(x=given, a=0.5, n=3)
            assert made.shape == (4,) and type(made) is type(given)
        torch.testing.assert_close(kernel(x=X.as_subclass(Tracked), a=0.5, n=3), X[:, :3].sum(1) * 0.5)
        kernel(**GIVEN)


def test_sizes_are_compared() -> None:
    found = quick(made, GIVEN, {"i": 4})
    assert found(GIVEN, {"i": 4}) is not None
    assert found(GIVEN, {"i": 5}) is found(GIVEN, None) is None


@pytest.mark.parametrize(
    "around", [Functions, Dispatches, forward_ad.dual_level, torch.inference_mode, nullcontext], ids=str
)
def test_modes_of_torch_are_seen(around: Callable[[], AbstractContextManager[Any]]) -> None:
    found = quick(made, GIVEN, None)
    with around():
        values = {**GIVEN, "x": torch.randn(4, 8)}
        assert (found(values, None) is None) is (around is not nullcontext)
        assert (call_key(values, None) is None) is (around not in (nullcontext, torch.inference_mode))


def test_transforms_of_torch_are_seen() -> None:
    found, seen = quick(made, GIVEN, None), []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((found({**GIVEN, "x": x}, None), found(GIVEN, None)))
        return x.sum()

    torch.func.grad(function)(X)
    torch.func.vmap(function)(torch.stack([X, X]))
    torch.func.jvp(function, (X,), (X,))
    torch.func.functionalize(function)(X)
    assert seen == [(None, None)] * 4
    seen.clear()
    torch.jit.trace(function, X, check_trace=False)
    assert (None, None) in seen


def test_gradients_are_asked_for_between_calls_without() -> None:
    kernel = eq.compile(SCALED)
    weights = torch.nn.Parameter(X.clone())
    for _ in range(4):
        with torch.no_grad():
            assert not kernel(x=weights, a=0.5, n=3).requires_grad
    assert kernel._calls.quick is not None
    assert kernel(x=weights, a=0.5, n=3).requires_grad


def test_calls_in_turn_are_right() -> None:
    kernel = eq.compile(SCALED, native="off")
    wide = torch.randn(4, 50)
    for _ in range(3):
        for x, a, n in ((X, 0.5, 3), (X, 2.0, 3), (OTHER, 2.0, 3), (wide, 2.0, 3), (X, 2.0, 5)):
            for _ in range(3):
                torch.testing.assert_close(kernel(x=x, a=a, n=n), x[:, :n].sum(1) * a)
                assert kernel.compiled.device.kind == "cpu"
