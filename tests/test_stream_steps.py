"""Streams of prefixes: the outputs at the next positions, from the state that those before have left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError

SCORES = "sum[d](q[i,j,d] * r[i,k,d])"
GATES = "A[i,j] = sum[k](where(k <= j, g[i,k], 0))\n"
PROGRAMS = {
    "a running sum": "y[i,j] = sum[k <= j](x[i,k])",
    "of the positions before": "y[i,j] = sum[k < j](x[i,k])",
    "a running product": "y[i,j] = prod[k <= j](x[i,k] + 1)",
    "a running log-sum-exp": "y[i,j] = logsumexp[k](where(k <= j, x[i,k], -inf))",
    "a running variance": "y[i,j] = var[k <= j](x[i,k])",
    "places of the greatest": "y[i,j] = argmax[k](where(k <= j, x[i,k], -inf))",
    "a mean by positions": "y[i,j] = sum[k <= j](x[i,k]) / (j + 1)",
    "pooling": "y[i,j,e] = sum[k <= j](exp(x[i,k]) * v[i,k,e]) / sum[k <= j](exp(x[i,k]))",
    "attention": f"y[i,j,e] = sum[k <= j]({SCORES} * v[i,k,e])",
    "retention": f"y[i,j,e] = sum[k <= j]({SCORES} * exp((k - j) * h[i]) * v[i,k,e])",
    "gates": f"{GATES}y[i,j,e] = sum[k <= j]({SCORES} * exp(A[i,j] - A[i,k]) * v[i,k,e])",
    "two outputs": f"{GATES}z[i,j] = max[k](where(k <= j, x[i,k], -inf))\ny[i,j] = z[i,j] + A[i,j]",
}


def text_of(source: str) -> str:
    return f"j: axis[k]\n{source}\nreturn y"


RECURRENCE = "y[i,t] = a[i,t] * y[i,t-1] + x[i,t]\nreturn y"
SECOND = "y[i,t] = a[i,t] * y[i,t-1] - 0.5 * y[i,t-2] + x[i,t]\nreturn y"
TEXTS = {name: text_of(source) for name, source in PROGRAMS.items()}
TEXTS |= {"a recurrence": RECURRENCE, "a recurrence of two values": SECOND}


def inputs(text: str, n: int = 19) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (2, n),
        "q": (2, n, 3),
        "r": (2, n, 3),
        "v": (2, n, 4),
        "g": (2, n),
        "h": (2,),
        "a": (2, n),
    }
    found = {name: torch.randn(*shape, generator=generator) / 2 for name, shape in shapes.items()}
    found["h"], found["g"] = found["h"].abs(), -found["g"].abs()
    return {name: value for name, value in found.items() if f"{name}[i" in text}


def stepped(
    kernel: eq.Kernel, values: dict[str, Any], chunks: list[int], state: Any = None, at: int = 0
) -> Any:
    state = kernel.init() if state is None else state
    made = []
    for count in chunks:
        chunk = {n: v[:, at : at + count] if v.ndim > 1 else v for n, v in values.items()}
        state, y = kernel.step(state, **chunk)
        made.append(y)
        at += count
    return state, made


@pytest.mark.parametrize(
    "chunks", [[19], [1] * 19, [7, 1, 1, 10]], ids=["at once", "one by one", "in chunks"]
)
@pytest.mark.parametrize("name", TEXTS)
def test_steps_give_what_a_call_gives(name: str, chunks: list[int]) -> None:
    values = inputs(TEXTS[name])
    kernel = eq.compile(TEXTS[name], native="off")
    _, made = stepped(kernel, values, chunks)
    wanted = torch.from_numpy(eq.reference(TEXTS[name])(**values))
    torch.testing.assert_close(torch.cat(made, 1).double(), wanted.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["a running log-sum-exp", "attention", "a recurrence", "gates"])
def test_a_prompt_is_seen_at_once(name: str) -> None:
    values = inputs(TEXTS[name])
    kernel = eq.compile(TEXTS[name], native="off")
    state = kernel.update(kernel.init(), **{n: v[:, :15] for n, v in values.items()})
    _, made = stepped(kernel, values, [1, 3], state, 15)
    wanted = torch.from_numpy(eq.reference(TEXTS[name])(**values))[:, 15:]
    torch.testing.assert_close(torch.cat(made, 1).double(), wanted, rtol=1e-4, atol=1e-5)


def test_states_of_two_parts_are_combined() -> None:
    text = TEXTS["attention"]
    values = inputs(text)
    kernel = eq.compile(text, native="off")
    parts = (
        kernel.update(kernel.init(), **{n: v[:, part] for n, v in values.items()})
        for part in (slice(0, 6), slice(6, 18))
    )
    _, (y,) = stepped(kernel, values, [1], kernel.combine(*parts), 18)
    wanted = torch.from_numpy(eq.reference(text)(**values))[:, 18:]
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-5)


def test_arrays_halves_and_doubles_stay_what_they_are() -> None:
    text = TEXTS["attention"]
    kernel, values = eq.compile(text, native="off"), inputs(text)
    wanted = eq.reference(text)(**values)
    _, (y,) = stepped(kernel, {n: v.numpy() for n, v in values.items()}, [19])
    assert isinstance(y, np.ndarray) and y.dtype == np.float32
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.1)):
        state, made = stepped(kernel, {n: v.to(dtype) for n, v in values.items()}, [18, 1])
        assert {y.dtype for y in made} == {dtype}
        assert all(v.dtype in (torch.float32, torch.float64) for v in state.values.values())
        exact = torch.from_numpy(wanted) if dtype is not torch.float64 else kernel_in_doubles(text, values)
        torch.testing.assert_close(torch.cat(made, 1).double(), exact, rtol=tolerance, atol=tolerance)


def kernel_in_doubles(text: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(eq.reference(text)(**{n: v.double() for n, v in values.items()}))


def test_integers_are_exact() -> None:
    text = "x: i64[i, k]\n" + TEXTS["a running sum"]
    kernel = eq.compile(text, native="off")
    x = torch.randint(-(2**60), 2**60, (2, 6))
    _, made = stepped(kernel, {"x": x}, [1, 2, 3])
    assert torch.equal(torch.cat(made, 1), x.cumsum(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y[i] = sum[k](x[i,k])", "no values for positions of the stream"),
        (text_of("y[i,j] = sum[k >= j](x[i,k])"), "what comes some positions after it"),
        (text_of("y[i,j] = sum[k <= j - 3](x[i,k])"), "what comes some positions before it"),
        (text_of("y[i,j] = sum[k <= j](x[i,k]) / sum[k](x[i,k])"), "over all of the stream"),
        (text_of("y[i,j] = sum[k <= j](x[i,k]) + where(j > 0, x[i,j-1], 0)"), "may lie in another chunk"),
    ],
)
def test_what_has_no_steps_says_why(text: str, message: str) -> None:
    kernel = eq.compile(text, native="off")
    with pytest.raises(EqfuseError, match=message):
        kernel.step(kernel.init(), x=torch.randn(2, 5))


def test_what_a_stream_of_prefixes_has_not_says_what_to_do() -> None:
    kernel, values = eq.compile(TEXTS["gates"], native="off"), inputs(TEXTS["gates"])
    state, _ = stepped(kernel, values, [3])
    with pytest.raises(EqfuseError, match=r"a value|values for each position.*\n.*k\.step"):
        kernel.finish(state)
    with pytest.raises(EqfuseError, match="not combined"):
        kernel.combine(state, state)
    with pytest.raises(EqfuseError, match="no positions"):
        kernel.step(state, **{n: v[:, :0] for n, v in values.items()})
    with pytest.raises(EqfuseError, match="no state of this kernel"):
        kernel.step(None, **values)  # type: ignore[arg-type]
