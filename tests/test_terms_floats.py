"""Float domains against torch: rounding, NaN, empty reductions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_functions import UNARY

from eqfuse.terms.domain import Domain
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.floats import PRIMITIVE, TORCH_DTYPES, FloatDomain
from eqfuse.terms.functions import CASTS, DRAWN, FUNCTIONS, ON_BITS, ROUNDINGS

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -2.5, 0.5, 1.5, 1e-9, 300.0, -700.0, 3e38, -3e38, np.inf, -np.inf, np.nan]
)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fn", UNARY)
def test_functions_agree_with_torch(fn: str, dtype: str) -> None:
    domain = FloatDomain(dtype)  # type: ignore[arg-type]
    x = SPECIAL.astype(dtype)
    result = domain.call(fn, [x])
    assert result.dtype == dtype
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(result, UNARY[fn](torch.tensor(x)).numpy(), rtol=tolerance, atol=tolerance)


def test_every_function_of_reals_exists() -> None:
    rows = {row.name for row in FUNCTIONS.values() if row.result != "truth" and not row.definition}
    assert rows - {*CASTS, *ROUNDINGS, *ON_BITS, *DRAWN} <= set(PRIMITIVE)


@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.parametrize("own", ["float64", "float32"])
def test_casts_round_as_torch(own: str, dtype: str) -> None:
    x = np.concatenate(
        [SPECIAL, np.random.default_rng(0).normal(scale=200, size=1000), [448, 464, 465, 70000]]
    )
    x = x.astype(own)
    result = FloatDomain(own).call(dtype, [x])  # type: ignore[arg-type]
    largest = FLOAT8.get(dtype, np.inf)
    expected = (
        torch.tensor(x).clamp(-largest, largest).to(TORCH_DTYPES[dtype]).to(torch.tensor(x).dtype).numpy()
    )
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == own


def test_a_cast_changes_values() -> None:
    domain = FloatDomain()
    assert domain.call("f16", [np.array(1 + 2.0**-12)]) == 1.0
    assert domain.call("f8e4m3", [np.array(17.0)]) == 16.0
    assert domain.call("f8e4m3", [np.array(np.inf)]) == 448.0  # of torch's versions some give NaN
    assert domain.call("f64", [np.array(1 + 2.0**-50)]) == 1 + 2.0**-50


def test_casts_take_broadcast_views() -> None:
    view = np.broadcast_to(np.array([1.1]), (3, 4))
    assert FloatDomain().call("f16", [view]).shape == (3, 4)
    assert FloatDomain().call("f16", [np.array(1.1)]).shape == ()


def test_repairs_are_total_and_keep_nan() -> None:
    domain = FloatDomain()
    x = np.array([0.0, 2.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(domain.call("finite", [x]), [0, 2, 0, 0, np.nan])
    np.testing.assert_array_equal(domain.call("invertible", [x]), [1, 2, 1, 1, np.nan])


def test_nan_wins_in_max_and_min() -> None:
    domain = FloatDomain()
    x = np.array([1.0, np.nan, 2.0])
    assert np.isnan(domain.reduce("max", x, 0)) and np.isnan(domain.reduce("min", x, 0))
    assert np.isnan(domain.call("maximum", [x, x[::-1]])[1])


def test_empty_reductions_give_the_identity() -> None:
    domain = FloatDomain("float32")
    empty = domain.full((3, 0), 1.0)
    for op, identity in {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}.items():
        folded = domain.reduce(op, empty, 1)
        assert folded.dtype == np.float32
        np.testing.assert_array_equal(folded, np.full(3, identity))


def test_it_is_a_domain() -> None:
    domain: Domain = FloatDomain("float32")
    assert domain.name == "float32"
    target = domain.full((2, 3), 0.0)
    domain.put(target, (0, slice(None)), domain.lift(np.arange(3)))
    np.testing.assert_array_equal(domain.take(target, (slice(None), 2)), [2, 0])
    assert domain.shape(domain.transpose(domain.broadcast(target, (4, 2, 3)), (2, 0, 1))) == (3, 4, 2)
    np.testing.assert_array_equal(domain.where(domain.compare("gt", target, 1.0), target, 9.0)[0], [9, 9, 2])
    assert domain.shape(domain.reshape(target, (3, 2))) == (3, 2)
