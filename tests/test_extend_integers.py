"""States of integers: bits, and what registration says of those that are none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.extend.define import forget

SET = {"identity": "0", "result": "u", "commutative": True, "why": "a set as bits"}
FOLDS = {
    "shifts": ({"args": "e", "state": "u", "lift": "1 << e", "combine": "u1 | u2"}, np.bitwise_or, True),
    "declared": (
        {"args": "e: i64", "state": "u: i64", "lift": "e", "combine": "u1 | u2"},
        np.bitwise_or,
        False,
    ),
    "parity": ({"args": "e: i64", "state": "u", "lift": "e", "combine": "u1 ^ u2"}, np.bitwise_xor, False),
}


@pytest.fixture
def name() -> Iterator[str]:
    yield "bits_of_tests"
    forget("bits_of_tests")


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "multi_pass"])
@pytest.mark.parametrize("fold", FOLDS)
def test_bits_of_integers_are_combined(name: str, fold: str, prefer: str) -> None:
    words, ufunc, shifted = FOLDS[fold]
    eq.reduction(name, **words, **SET)
    source = f"e: i64[i,j]\ny[i] = {name}[j](e[i,j])"
    kernel = eq.compile(source, target="cpu", native="off", prefer=prefer)
    e = np.random.default_rng(0).integers(0, 50, (4, 70))
    expected = ufunc.reduce(np.left_shift(1, e) if shifted else e, 1)
    assert kernel.certificate.ok and kernel(e=e).dtype == np.int64
    np.testing.assert_array_equal(kernel(e=e), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"args": "e", "lift": "1 << e", "combine": "u1 | u2 | 1"}, "identity"),
        ({"args": "e: i64", "lift": "e", "combine": "(u1 | u2) & 31"}, "identity"),
        ({"args": "e: i64", "lift": "e", "combine": "u1 - u2"}, "associative"),
        ({"args": "x", "lift": "x * 0.5", "state": "u: i64", "combine": "u1 + u2"}, "'u' is not an integer"),
        ({"args": "x: f32", "lift": "x", "combine": "u1 + u2"}, "args 'x' is declared 'f32'"),
    ],
)
def test_what_is_no_reduction_of_integers_is_refused(name: str, words: dict[str, str], message: str) -> None:
    with pytest.raises(eq.EqfuseError, match=message):
        eq.reduction(name, **{"state": "u", **words, **SET})


def test_the_largest_integer_is_an_identity(name: str) -> None:
    eq.reduction(
        name,
        args="x, e: i64",
        state="v, e",
        lift="x, e",
        identity=f"inf, {2**63 - 1}",
        order="-v, -e",
        result="e",
        commutative=True,
    )
    kernel = eq.compile(f"e: i64[n]\np = {name}[n](x[n], e[n])\nreturn p")
    x, labels = np.array([3.0, 1.0, 1.0, 2.0], np.float32), np.array([7, 2**62, 5, -9])
    assert kernel(x=x, e=labels) == 5
    assert kernel(x=x[:0], e=labels[:0]) == 2**63 - 1
