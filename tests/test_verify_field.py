"""The finite-field domain by itself: which laws hold in it, what it marks, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.verify.field.array import SIGNED, TWISTED, UNDEFINED, FieldArray, extreme
from eqfuse.verify.field.casts import CastAware
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.modular import PowerGroup, inverse, power
from eqfuse.verify.field.primes import CIRCLE_P, CIRCLE_Q, P, Q
from eqfuse.verify.field.rounding import unclear

SHAPE = (16, 3, 7)
Law = Callable[..., FieldArray]


@pytest.fixture
def domain() -> FieldDomain:
    return FieldDomain(seed=5)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def drawn(domain: FieldDomain, rng: np.random.Generator, *, positive: bool = False) -> FieldArray:
    shadow = rng.normal(size=SHAPE)
    return domain.draw(np.abs(shadow) if positive else shadow, rng)


def agree(left: FieldArray, right: FieldArray, *, straight: bool = True) -> bool:
    """Every residue known on both sides is equal, there is one, and so are the shadows."""
    usable = left.lacks(UNDEFINED) & right.lacks(UNDEFINED)
    if straight:
        usable &= left.lacks(TWISTED) & right.lacks(TWISTED)
    pairs = [(x, y) for x, y in ((left.p, right.p), (left.q, right.q)) if x is not None and y is not None]
    assert pairs and usable.any()
    close = np.allclose(left.shadow, right.shadow, equal_nan=True)
    return close and all(np.array_equal(x[usable], y[usable]) for x, y in pairs)


def test_the_prime_is_safe_and_small_numbers_are_squares() -> None:
    assert P == 2 * Q + 1
    assert pow(P - 1, Q, P) == P - 1
    assert all(pow(n, Q, P) == 1 for n in range(1, 67))


def test_modular_inverse_and_power(rng: np.random.Generator) -> None:
    values = rng.integers(0, P, (3, 1001))
    values[0, :5] = 0
    found = inverse(values, P)
    assert np.array_equal(values * found % P, (values != 0).astype(np.int64))
    assert [int(power(np.array(n), 12345, P)) for n in (2, 7, P - 1)] == [
        pow(n, 12345, P) for n in (2, 7, P - 1)
    ]


def test_discrete_logarithm_inverts_exponentiation(rng: np.random.Generator) -> None:
    group = PowerGroup(P, Q, 4)
    exponents = rng.integers(0, Q, (5, 11))
    assert np.array_equal(group.log(group.exp(exponents)), exponents)
    assert int(group.exp(np.array(77))) == pow(4, 77, P)


@pytest.mark.parametrize("p", [263, 1019, 2027, 2147483579])
def test_discrete_logarithm_modulo_other_safe_primes(p: int, rng: np.random.Generator) -> None:
    group = PowerGroup(p, p // 2, 4)
    exponents = rng.integers(0, group.q, 500)
    assert np.array_equal(group.log(group.exp(exponents)), exponents)


def test_discrete_logarithm_where_minus_one_has_a_root(rng: np.random.Generator) -> None:
    group = FieldDomain(CIRCLE_P, CIRCLE_Q).group
    exponents = rng.integers(0, group.q, (3, 50))
    assert np.array_equal(group.log(group.exp(exponents)), exponents)
    one, other = rng.integers(1, group.p, (2, 50))
    both = (group.log(one) + group.log(other)) % group.q
    assert np.array_equal(group.log(one * other % group.p), both)
    assert np.array_equal(group.log(group.p - one), group.log(one))


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="generator of order q"):
        FieldDomain(p=101, q=50)
    with pytest.raises(ValueError, match="generator of order q"):
        FieldDomain(generator=P - 1)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda c, x, y: c("exp", c("add", x, y)), lambda c, x, y: c("mul", c("exp", x), c("exp", y))),
        (lambda c, x, y: c("log", c("mul", c("exp", x), c("exp", y))), lambda c, x, y: c("add", x, y)),
        (lambda c, x, y: c("sqrt", c("sq", x)), lambda c, x, y: c("abs", x)),
        (lambda c, x, y: c("mul", c("div", x, y), y), lambda c, x, y: x),
        (lambda c, x, y: c("sub", c("add", x, y), y), lambda c, x, y: x),
        (
            lambda c, x, y: c("maximum", x, y),
            lambda c, x, y: c("neg", c("minimum", c("neg", x), c("neg", y))),
        ),
        (
            lambda c, x, y: c("sqrt", c("mul", c("sq", x), c("sq", y))),
            lambda c, x, y: c("mul", c("abs", x), c("abs", y)),
        ),
        (lambda c, x, y: c("sq", c("rsqrt", c("exp", x))), lambda c, x, y: c("exp", c("neg", x))),
        (lambda c, x, y: c("tanh", c("neg", x)), lambda c, x, y: c("neg", c("tanh", x))),
        (lambda c, x, y: c("erf", c("neg", x)), lambda c, x, y: c("neg", c("erf", x))),
        (lambda c, x, y: c("cos", c("neg", x)), lambda c, x, y: c("cos", x)),
        (lambda c, x, y: c("mul", x, c("sigmoid", x)), lambda c, x, y: c("silu", x)),
        (
            lambda c, x, y: c("div", c("exp", x), c("add", c("exp", x), c("exp", c("sub", x, x)))),
            lambda c, x, y: c("sigmoid", x),
        ),
        (lambda c, x, y: c("f16", x), lambda c, x, y: x),
    ],
)
def test_laws_hold(left: Law, right: Law, domain: FieldDomain, rng: np.random.Generator) -> None:
    x, y = drawn(domain, rng), drawn(domain, rng)

    def call(fn: str, *args: FieldArray) -> FieldArray:
        return domain.call(fn, args)

    assert agree(left(call, x, y), right(call, x, y))


def test_false_laws_do_not_hold(domain: FieldDomain, rng: np.random.Generator) -> None:
    x, y = drawn(domain, rng), drawn(domain, rng)
    exp_x, exp_y = domain.call("exp", [x]), domain.call("exp", [y])
    assert not np.any(
        domain.call("add", [exp_x, exp_y]).p == domain.call("exp", [domain.call("add", [x, y])]).p
    )
    assert not np.any(domain.call("tanh", [x]).p == x.p)
    rounded = domain.call("round", [domain.call("mul", [x, domain.full((), 40.0)])])
    assert np.allclose(rounded.shadow, np.rint(40.0 * x.shadow), rtol=1e-6, atol=0)
    assert not np.any(rounded.p[rounded.shadow != 0] == (np.rint(40.0 * x.shadow) % P)[rounded.shadow != 0])


@pytest.mark.parametrize("fn", ["floor", "erf", "tanh", "sigmoid"])
def test_values_that_are_one_number_in_floats_have_an_order_that_sums_and_multiples_keep(
    fn: str, domain: FieldDomain, rng: np.random.Generator
) -> None:
    large = domain.draw(rng.uniform(40.2, 40.8, (8, 50)), rng)
    values = domain.call(fn, [large])
    shift, scale = domain.full((), 0.7), domain.call("exp", [domain.full((), 1.3)])
    greatest = domain.reduce("max", values, 1)
    for change, operand in (("add", shift), ("mul", scale)):
        changed = domain.reduce("max", domain.call(change, [values, operand]), 1)
        assert agree(changed, domain.call(change, [greatest, operand]))
    if fn in ("tanh", "erf"):
        negated = domain.call(fn, [domain.call("neg", [large])])
        assert np.array_equal(negated.shadow, -values.shadow)


def test_exponentials_of_values_without_exponent_residue_telescope(
    domain: FieldDomain, rng: np.random.Generator
) -> None:
    norm = domain.call("sqrt", [domain.reduce("sum", domain.call("sq", [drawn(domain, rng)]), 2)])
    value = domain.call("div", [drawn(domain, rng), domain.reshape(norm, (16, 3, 1))])
    assert value.q is None
    low, high = (domain.take(value, (slice(None), slice(None), slice(at, at + 1))) for at in (0, 4))
    direct = domain.call("exp", [domain.call("sub", [value, high])])
    by_steps = [domain.call("exp", [domain.call("sub", pair)]) for pair in ([value, low], [low, high])]
    assert agree(direct, domain.call("mul", by_steps), straight=False)
    negated = domain.call("add", [domain.call("neg", [high]), value])
    assert agree(direct, domain.call("exp", [negated]), straight=False)


def test_sums_and_products_over_an_axis(domain: FieldDomain, rng: np.random.Generator) -> None:
    x, c = drawn(domain, rng), drawn(domain, rng)
    first = domain.take(c, (slice(None), slice(None), slice(0, 1)))
    scaled = domain.reduce("sum", domain.call("mul", [first, x]), 2)
    hoisted = domain.call("mul", [domain.reshape(first, (16, 3)), domain.reduce("sum", x, 2)])
    assert agree(scaled, hoisted)
    product = domain.reduce("prod", domain.call("exp", [x]), 2)
    assert agree(product, domain.call("exp", [domain.reduce("sum", x, 2)]))
    empty = domain.full((2, 0), 1.0)
    assert [float(domain.reduce(op, empty, 1).shadow[0]) for op in ("sum", "prod", "max", "min")] == [
        0.0,
        1.0,
        -np.inf,
        np.inf,
    ]


def test_the_shadow_decides_order_and_ties_keep_residues(
    domain: FieldDomain, rng: np.random.Generator
) -> None:
    x = drawn(domain, rng)
    largest = domain.reduce("max", x, 2)
    at = x.shadow.argmax(2)[..., None]
    assert np.array_equal(largest.p, np.take_along_axis(x.p, at, 2)[..., 0])
    spread = domain.broadcast(domain.reshape(largest, (16, 3, 1)), SHAPE)
    assert domain.compare("eq", x, spread).sum() == 16 * 3
    assert domain.compare("le", x, spread).all()
    assert not domain.compare("lt", spread, x).any()


def test_infinities(domain: FieldDomain, rng: np.random.Generator) -> None:
    x, low = drawn(domain, rng), domain.full(SHAPE, -np.inf)
    assert agree(domain.call("maximum", [low, x]), x)
    assert np.array_equal(domain.call("exp", [low]).p, np.zeros(SHAPE))
    assert np.isneginf(domain.call("add", [low, x]).shadow).all()
    difference = domain.call("sub", [low, low])
    assert np.isnan(difference.shadow).all() and difference.lacks(UNDEFINED).all()
    assert np.isnan(domain.call("mul", [domain.full(SHAPE, 0.0), low]).shadow).all()
    assert agree(domain.call("finite", [low]), domain.full(SHAPE, 0.0))
    assert agree(domain.call("invertible", [low]), domain.full(SHAPE, 1.0))
    assert agree(domain.call("invertible", [x]), x)
    assert np.array_equal(domain.call("div", [x, low]).p, np.zeros(SHAPE))
    assert np.isinf(domain.call("div", [x, domain.full((), 0.0)]).shadow).all()
    picked = domain.where(x.shadow > 0, x, low)
    assert np.isneginf(picked.shadow).any() and agree(
        domain.reduce("max", picked, 2), domain.reduce("max", picked, 2)
    )


def test_elements_without_a_value_are_marked(domain: FieldDomain) -> None:
    one = domain.full((2,), 1.0)
    accident = FieldArray(np.array([0, 5]), np.array([3, 5]), np.array([1.0, 1.0]))
    assert domain.call("div", [one, accident]).lacks(UNDEFINED).tolist() == [False, True]
    assert not domain.call("exp", [domain.full((2,), 1e4)]).lacks(UNDEFINED).any()
    negative = domain.call("sqrt", [domain.full((2,), -4.0)])
    assert np.isnan(negative.shadow).all() and negative.lacks(UNDEFINED).all()
    root = domain.call("sqrt", [domain.full((), 67.0)])
    assert not root.lacks(TWISTED).any() and domain.call("sqrt", [domain.full((), 64.0)]).lacks(TWISTED).all()


@pytest.mark.parametrize("careful", [False, True])
def test_what_is_too_small_for_floats_has_a_value_and_a_sign_and_no_order(
    careful: bool, domain: FieldDomain
) -> None:
    domain.careful, domain.trials = careful, 2
    small = domain.call("exp", [domain.full((2,), -1e4)])
    negative = domain.call("mul", [small, domain.full((), -0.25)])
    for value, sign in ((small, 1.0), (negative, -1.0), (domain.call("div", [small, negative]), -1.0)):
        assert value.lacks(UNDEFINED).all() and (np.sign(value.shadow) == sign).all() and value.p is not None
    assert (small.p * (domain.p - 1) % domain.p == 4 * negative.p % domain.p).all()  # type: ignore[operator]
    assert domain.beyond_floats.any() == domain.vanished.any() == (not careful)
    domain.call("log", [small])
    assert domain.beyond_floats.all()


def test_tanh_has_a_value_where_an_exponential_has_none(
    domain: FieldDomain, rng: np.random.Generator
) -> None:
    x = domain.draw(np.array([1e5, -1e5, 2.0]), rng)
    assert not domain.call("exp", [x]).lacks(UNDEFINED)[:1].any()
    for fn in ("tanh", "sigmoid"):
        assert domain.call(fn, [x]).lacks(UNDEFINED).all()
    odd = domain.call("add", [domain.call("tanh", [x]), domain.call("tanh", [domain.call("neg", [x])])])
    assert not odd.p.any() and not odd.shadow.any()


@pytest.mark.parametrize("fn", ["tanh", "sigmoid"])
def test_what_is_nearly_1_keeps_its_order(fn: str, domain: FieldDomain, rng: np.random.Generator) -> None:
    """As it is in every other order of additions: floats make some of them 1, others one step less."""
    numbers = np.concatenate([np.linspace(0.1, 40.0, 200), np.geomspace(41.0, 1e5, 100)])
    found = domain.call(fn, [domain.draw(numbers, rng)]).shadow
    assert (np.diff(found) > 0).all() and (found < 1).all()
    assert np.allclose(
        found, {"tanh": np.tanh(numbers), "sigmoid": 1 / (1 + np.exp(-numbers))}[fn], atol=3e-7
    )
    assert domain.call(fn, [domain.full((2,), math.inf)]).shadow.tolist() == [1.0, 1.0]


def test_maxima_of_what_saturates_are_compared() -> None:
    """Sums of a block are rounded in another order: the greatest of numbers near 1 was another one, and the program refused."""
    source = """
        Q: f32[b,d]
        K: f32[b,j,d]
        m[b] = max[j](c * tanh(sum[d](Q[b,d] * K[b,j,d])))
        s[b] = sum[j](exp(c * tanh(sum[d](Q[b,d] * K[b,j,d])) - m[b]))
        return m, s"""
    assert eq.compile(source).certificate.ok


def test_what_is_read_of_many_places_is_what_is_read_of_few(
    domain: FieldDomain, rng: np.random.Generator
) -> None:
    x = drawn(domain, rng)
    x.marks = rng.integers(0, 2, SHAPE).astype(np.uint8)
    rows, columns = rng.integers(0, 3, (90, 1)), rng.integers(0, 7, (1, 80))
    found = domain.take(x, (slice(None), rows, columns))
    for at in ((0, 0), (37, 61), (89, 79)):
        one = domain.take(x, (slice(None), rows[at[0], 0], columns[0, at[1]]))
        for many, few in zip(parts_of(found), parts_of(one), strict=True):
            assert (many[:, at[0], at[1]] == few).all()
    ends = np.full((90, 1), -1)  # counted from the end
    assert (domain.take(x, (slice(None), ends, columns)).shadow == x.shadow[:, ends, columns]).all()
    with pytest.raises(IndexError):
        domain.take(x, (slice(None), rows + 1, columns))


def parts_of(x: FieldArray) -> list[np.ndarray[Any, Any]]:
    return [part for part in (x.p, x.q, x.shadow, x.marks) if part is not None]


def test_marks_travel_with_elements(domain: FieldDomain) -> None:
    value = FieldArray(np.array([1, 2, 3]), None, np.array([1.0, 2.0, 3.0]), np.array([0, 1, 0], np.uint8))
    other = domain.full((3,), 2.5)
    assert domain.call("add", [value, other]).lacks(UNDEFINED).tolist() == [True, False, True]
    assert domain.call("maximum", [value, other]).lacks(UNDEFINED).all()
    assert not domain.reduce("sum", value, 0).lacks(UNDEFINED)
    assert domain.reduce("max", value, 0).lacks(UNDEFINED)
    target = domain.full((4,), 0.0)
    domain.put(target, (slice(1, 4),), value)
    assert target.lacks(UNDEFINED).tolist() == [True, True, False, True]
    assert target.q is None
    row, column = domain.full((1, 4), 1.0), domain.full((3, 1), 2.0)
    column.marks = np.array([[0], [1], [0]], np.uint8)
    chosen = domain.where(np.array([[False], [False], [True]]), row, column)
    assert domain.take(chosen, (slice(None), 3)).lacks(UNDEFINED).tolist() == [True, False, True]


def test_cancelled_differences_are_exactly_zero(domain: FieldDomain, rng: np.random.Generator) -> None:
    x, y = drawn(domain, rng), drawn(domain, rng)
    difference = domain.call("sub", [domain.call("sub", [domain.call("add", [x, y]), x]), y])
    assert np.array_equal(difference.shadow, np.zeros(SHAPE))


def test_constants_are_their_shortest_decimals(domain: FieldDomain) -> None:
    tenth = domain.full((), 0.1)
    assert int(tenth.p) * 10 % P == 1 and int(tenth.q) * 10 % Q == 1
    assert agree(
        domain.lift(np.array([3, -2])),
        FieldArray(np.array([3, P - 2]), np.array([3, Q - 2]), np.array([3.0, -2])),
    )


def test_strict_casts_are_opaque(rng: np.random.Generator) -> None:
    strict = FieldDomain(seed=1, strict_casts=True)
    x = drawn(strict, rng)
    cast = strict.call("f16", [x])
    assert not np.any(cast.p == x.p)
    assert np.allclose(cast.shadow, x.shadow.astype(np.float16).astype(np.float64), rtol=1e-6, atol=0)
    assert "f16" in strict.opaque


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_extreme_of_rounded_numbers_among_which_one_has_no_value_has_none(
    op: str, rng: np.random.Generator
) -> None:
    aware = CastAware(seed=1)
    x = aware.draw(np.array([[1.0, np.inf], [0.5, 1.0]]), rng)
    rounded = aware.call("f16", [x])
    difference = aware.call("sub", [rounded, aware.full((2, 1), np.inf)])
    found = aware.reduce(op, difference, 1)
    assert np.isnan(found.shadow[0]) and np.isneginf(found.shadow[1])


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("joint", ["maximum", "max"])
def test_a_rounded_number_is_equal_to_a_sum_in_any_order(
    joint: str, pieces: int, rng: np.random.Generator
) -> None:
    """Ten tenths are 1 in pieces of five, and in floats a little less one by one. 0.999 is rounded to 1."""
    aware = CastAware(seed=1)
    tenth, one = aware.full((1, 1), 0.1), aware.full((1, 1), 1.0)
    piece = reduce(lambda x, y: aware.call("add", [x, y]), [tenth] * (10 // pieces))
    total = reduce(lambda x, y: aware.call("add", [x, y]), [piece] * pieces)
    assert (total.shadow == 1) == (pieces == 2) and (total.p == one.p).all()
    x = aware.call("bf16", [aware.draw(np.array([[0.999]]), rng)])
    if joint == "maximum":
        found = aware.call("maximum", [x, total])
    else:
        both = aware.where(np.array([[True, False]]), x, total)
        found = aware.reduce("max", both, 1)
    assert (found.p == one.p).all()


def test_the_greater_of_numbers_whose_rounded_forms_have_no_value_is_that_of_the_numbers(
    rng: np.random.Generator,
) -> None:
    """1 / f16(1e-9) divides by 0: the greater of two such numbers is the same in either order."""
    aware = CastAware(seed=1)
    number = aware.draw(np.array([[0.5, 2.0]]), rng)
    lost = aware.call("bf16", [aware.full((1, 2), np.nan)])
    x, y = (
        replace(aware.take(number, (slice(None), [at])), rounded=aware.take(lost, (slice(None), [0])))
        for at in (0, 1)
    )
    for parts in ([x, y], [y, x]):
        assert aware.call("maximum", parts).shadow == 2.0 and aware.call("minimum", parts).shadow == 0.5


def test_seeds_change_omega_and_the_opaque_functions() -> None:
    first, second = FieldDomain(seed=1), FieldDomain(seed=2)
    assert first.omega != second.omega and pow(first.omega, Q, P) == 1
    x = first.full((1,), 0.75)
    assert first.call("erf", [x]).p != second.call("erf", [x]).p
    assert first.call("erf", [x]).p == FieldDomain(seed=1).call("erf", [x]).p


def test_a_logarithm_of_a_non_square_has_lost_a_sign_that_only_its_exponential_shows(
    domain: FieldDomain, rng: np.random.Generator
) -> None:
    x, y = drawn(domain, rng, positive=True), drawn(domain, rng, positive=True)
    total = domain.call("add", [x, y])
    log = domain.call("log", [total])
    assert log.lacks(TWISTED).all() and not log.lacks(SIGNED).all() and not log.rooted
    halves = domain.call(
        "add", [domain.call("log", [domain.call("div", [total, y])]), domain.call("log", [y])]
    )
    np.testing.assert_array_equal(log.q, halves.q)
    back = domain.call("exp", [log])
    np.testing.assert_array_equal(back.p == total.p, log.lacks(SIGNED))
    np.testing.assert_array_equal(back.lacks(TWISTED), log.lacks(SIGNED))
    assert back.rooted


def test_errors_whose_sum_overflows_leave_everything_open() -> None:
    greatest = np.full(2, 1.7e308)
    with np.errstate(all="raise"):
        found = unclear(np.array([1.0, np.inf]), np.array([2.0, 1.0]), greatest, greatest)
    assert found is not None and found.tolist() == [True, False]


@pytest.mark.parametrize("op", ["max", "min"])
def test_of_equal_residues_the_first_is_the_extreme(op: str) -> None:
    """Whatever their shadows, which are rounded: three sums of the same numbers in other orders."""
    sign = 1 if op == "max" else -1
    shadow = sign * np.array([[0.3, 0.3 + 1e-16, 0.1], [0.1, 0.3, np.nextafter(0.3, 1)]])
    residue = np.array([[7, 7, 2], [2, 7, 9]])
    value = FieldArray(residue, None, shadow)
    assert extreme(op, value, 1).tolist() == [0, 2]
    infinite = FieldArray(
        residue, None, np.array([[-np.inf * sign, 0.3 * sign, np.inf * sign], [0.0, 0.0, 0.0]])
    )
    assert extreme(op, infinite, 1).tolist()[0] == 2
