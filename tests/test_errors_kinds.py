"""Arguments of the wrong kind, and numbers and names beyond all bounds: an error that says what to do, never a foreign
exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import LONGEST_LINE

SUM = "y[i] = sum[j](x[i, j])"
x = torch.ones(3, 4)
cases: dict[str, tuple[Callable[[], Any], str]] = {
    "an integer beyond all floats": (
        lambda: eq.compile(f"y[i] = sum[j](x[i, j]) * {2**1024}"),
        "it is beyond all numbers: write inf",
    ),
    "an axis beyond all memory": (
        lambda: eq.compile(f"k: axis[{2**1024}]\ny[i, k] = x[i]"),
        "axis 'k' is too long",
    ),
    "a constant beyond all floats": (
        lambda: eq.compile("y[i] = x[i] * s", scalars={"s": 10**400}),
        "scalar 's' does not fit 64 bits",
    ),
    "a scalar beyond all floats": (
        lambda: eq.compile("y[i] = x[i] * s", verify=False)(x=x[0], s=10**400),
        "'s' does not fit 64 bits",
    ),
    "a size beyond all memory": (
        lambda: eq.compile("y[t] = t * 1.0", verify=False)(sizes={"t": 10**30}),
        "the size of axis 't' is 1",
    ),
    "a name of many letters": (
        lambda: eq.compile(f"y[i] = sum[j]({'q' * 100_000}[i, j])"),
        "this name has 100000 letters",
    ),
    "more axes than can be verified": (
        lambda: eq.compile(
            f"y = sum[{', '.join(f'a{i}' for i in range(30))}](x[{', '.join(f'a{i}' for i in range(30))}])"
        ),
        "a value of 30 axes",
    ),
    "a sparse tensor": (
        lambda: eq.compile(SUM, verify=False)(x=x.to_sparse()),
        "'x' is a sparse_coo tensor\npass a dense one: x.to_dense()",
    ),
    "a sparse tensor of the reference": (
        lambda: eq.reference(SUM)(x=x.to_sparse()),
        "'x' is a sparse_coo tensor",
    ),
    "a tensor without values": (
        lambda: eq.compile(SUM, verify=False).bind(x=x.to("meta")),
        "'x' is on device 'meta'",
    ),
    "a tensor without values of the reference": (
        lambda: eq.reference(SUM)(x=x.to("meta")),
        "'x' is on device 'meta'",
    ),
    "a complex tensor": (
        lambda: eq.compile(SUM, verify=False)(x=x.to(torch.complex64)),
        "torch.complex64, which the language does not have",
    ),
    "tensors on several devices": (
        lambda: eq.compile("y[i] = x[i] * w[i]", verify=False)(x=x[0], w=x[0].to("meta")),
        "tensors are on different devices: x on cpu, w on meta",
    ),
    "tensors without names": (
        lambda: eq.compile("y[i] = sum[j](x[i, j]) * s", verify=False)(x, 2.0),
        "2 arguments without a name\npass each by its name: x=..., s=...",
    ),
    "a program that is none": (lambda: eq.equivalent(None, SUM), "not text"),  # type: ignore[arg-type]
    "a format that is no text": (
        lambda: eq.compile(SUM, verify=False).explain(3),  # type: ignore[arg-type]
        "format is a int, not text",
    ),
    "a rule of numbers": (
        lambda: eq.rule("double", 3, "a"),  # type: ignore[arg-type]
        'left is a int, not text\nwrite it as a string: left="..."',
    ),
    "a rule without a name": (
        lambda: eq.rule(3, "a + b", "b + a"),  # type: ignore[arg-type]
        "name is a int, not text",
    ),
    "a rule with a condition of no text": (
        lambda: eq.rule("swap", "a + b", "b + a", when=3),  # type: ignore[arg-type]
        "when is a int, not text",
    ),
    "a rule with a list of conditions of no text": (
        lambda: eq.rule("swap", "a + b", "b + a", when=[3]),  # type: ignore[list-item]
        "when is a int, not text",
    ),
    **{
        f"a reduction whose {what} is a number": (
            lambda what=what: eq.reduction(  # type: ignore[misc]
                **{
                    "name": "total",
                    "state": "a",
                    "lift": "x",
                    "identity": "0",
                    "combine": "a1 + a2",
                    "result": "a",
                    what: 3,
                }
            ),
            f"{what} is a int, not text",
        )
        for what in ("name", "state", "lift", "identity", "combine", "result", "args", "order", "ranks")
    },
}


@pytest.mark.parametrize("name", cases)
def test_what_is_of_the_wrong_kind_is_refused(name: str) -> None:
    run, text = cases[name]
    with pytest.raises(eq.EqfuseError) as refused:
        run()
    assert text in str(refused.value)
    assert max(map(len, str(refused.value).splitlines())) < 2 * LONGEST_LINE


NAMES = ("self", "state", "values", "start", "total", "seconds", "kernel", "x1", "args", "unnamed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow(but=["self", "kernel"])
def test_an_input_may_have_the_name_of_a_parameter(name: str) -> None:
    value = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    kernel = eq.compile(f"y[i] = sum[j]({name}[i, j])", verify=False)
    torch.testing.assert_close(kernel(**{name: value}), value.sum(1))
    scaled = eq.compile(f"y[i] = sum[j](t[i, j]) * {name}", verify=False)
    torch.testing.assert_close(scaled(t=value, **{name: 2.0}), 2 * value.sum(1))
    seen = kernel.update(kernel.update(kernel.init(), **{name: value[:, :3]}), **{name: value[:, 3:]})
    torch.testing.assert_close(kernel.finish(seen), value.sum(1))
    exact = eq.reference(f"y[i] = sum[j]({name}[i, j])")
    np.testing.assert_allclose(exact(**{name: value}), value.double().sum(1))


def test_names_that_a_call_cannot_tell_from_its_own() -> None:
    with pytest.raises(eq.EqfuseError, match="'sizes' is what a call gives the sizes of axes by"):
        eq.compile("y[i] = sum[j](sizes[i, j])")
    kernel = eq.compile("y[i] = sum[j](x[i, j]) * seconds", verify=False)
    with pytest.raises(eq.EqfuseError, match="tune takes 'seconds' for its own limit"):
        kernel.tune(x=x, seconds=2.0)


@pytest.mark.parametrize("axes", [5, 6])
def test_values_of_many_axes_are_verified(axes: int) -> None:
    names = ", ".join(f"a{i}" for i in range(axes))
    kernel = eq.compile(f"y = sum[{names}](x[{names}])")
    assert kernel.certificate.ok
    assert float(kernel(x=torch.ones((2,) * axes))) == 2**axes


def test_an_error_shows_the_place_in_a_long_line() -> None:
    terms = " + ".join(f"x{number}[i]" for number in range(40))
    with pytest.raises(eq.EqfuseError) as refused:
        eq.compile(f"y[i] = {terms} + expp(x0[i]) + {terms}")
    _, line, caret, *_ = str(refused.value).splitlines()
    assert line.startswith("    ... ") and line.endswith(" ...")
    assert line[caret.index("^") : caret.rindex("^") + 1] == "expp"


TERMS = {
    "a leaf without a text": ["Leaf", [], []],
    "a sum of one term": ["Add", [], [0]],
    "a reduction without an axis": ["Red", ["sum"], [0]],
    "an unknown constructor": ["Frob", ["a"], []],
    "a variable of a pattern": ["Var", ["a"], []],
    "a number that is none": ["Num", ["one"], []],
    "a leaf that is no expression": ["Leaf", ["x[i"], []],
}


@pytest.mark.parametrize("name", TERMS)
def test_a_derivation_with_a_term_that_is_none_is_malformed(name: str) -> None:
    data = json.loads(eq.compile(SUM, verify=False).derivation.to_json())
    data["terms"].append(TERMS[name])
    with pytest.raises(eq.EqfuseError, match="the derivation is malformed: term"):
        eq.Derivation.from_json(json.dumps(data))


def test_a_derivation_with_an_integer_of_thousands_of_digits() -> None:
    text = eq.compile("y[i] = sum[j](x[i, j] * s)", scalars={"s": 2}, verify=False).derivation.to_json()
    with pytest.raises(eq.EqfuseError, match="the derivation is not JSON"):
        eq.Derivation.from_json(text.replace('"s":2', '"s":' + "9" * 6000))
