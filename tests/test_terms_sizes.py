"""Extents from tensors, declarations and sizes; reads outside a tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqfuse.errors import BindError
from eqfuse.terms.bounds import reads_outside
from eqfuse.terms.nodes import Axis, Const, Expr, Scalar, Size, call
from eqfuse.terms.parser import parse
from eqfuse.terms.ranges import Box
from eqfuse.terms.sizes import bind
from eqfuse.verify.inputs import input_specs, small_shapes
from eqfuse.verify.sizes import small_extents

GQA = "S[h, i, j] = sum[d](Q[h, i, d] * K[h // g, j, d]) * scale"
SHAPES = {"Q": (8, 5, 16), "K": (2, 7, 16)}
SCALARS = {"g": 4, "scale": 0.5}


def test_every_axis_gets_its_extent() -> None:
    assert bind(parse(GQA), SHAPES, None, SCALARS) == {"h": 8, "i": 5, "j": 7, "d": 16}


def test_renamed_axes_have_the_extent_of_the_original() -> None:
    program = parse("T[i] = sum[j](x[i, j])\ny[j] = T[j]")
    assert bind(program, {"x": (4, 4)}) == {"j": 4, "j_1": 4}
    with pytest.raises(BindError, match="axis 'j' has size 4 in x .dimension 0. and 3 in x .dimension 1."):
        bind(program, {"x": (4, 3)})


def test_declared_axes_count() -> None:
    program = parse("K: f16[hk, j]\ny[h, j] = K[h // 2, j]")
    assert bind(program, {"K": (3, 5)}, {"h": 6}) == {"hk": 3, "j": 5, "h": 6}


def test_sizes_for_axes_that_no_tensor_determines() -> None:
    program = parse("y[t] = sum[k](x[2 * t + k])")
    assert bind(program, {"x": (9,)}, {"t": 4, "k": 3}) == {"t": 4, "k": 3}


ERRORS = [
    (
        "y[i, j] = x[i, j] * z[j]",
        {"x": (2, 64), "z": (128,)},
        {},
        {},
        (
            "axis 'j' has size 64 in x (dimension 1) and 128 in z (dimension 0) (line 1)\n"
            "    y[i, j] = x[i, j] * z[j]\n"
            "                        ^\n"
            "pass tensors whose sizes agree, or name the axes differently"
        ),
    ),
    (
        "y[t] = x[t // 2]",
        {"x": (4,)},
        {},
        {},
        (
            "nothing gives axis 't' a size (line 1)\n"
            "    y[t] = x[t // 2]\n"
            "      ^\n"
            'no tensor has it as a plain index; pass sizes={"t": ...}'
        ),
    ),
    (
        "y[i] = x[i] + z[i]",
        {"x": (4,), "zz": (4,)},
        {},
        {},
        "tensor 'z' is not given (line 1)\n    y[i] = x[i] + z[i]\n                  ^\ndid you mean 'zz'?",
    ),
    ("y[i] = x[i]", {"x": (4,), "mask": (4,)}, {}, {}, "the program has no input 'mask'\ninputs: x"),
    (
        "y[i] = x[i] * scal",
        {"x": (4,)},
        {},
        {"scale": 1},
        (
            "unknown name 'scal' (line 1)\n"
            "    y[i] = x[i] * scal\n"
            "                  ^^^^\n"
            "expected a tensor, an earlier definition or a scalar; did you mean 'scale'?"
        ),
    ),
    (
        "y[i] = x[i] * eps",
        {"x": (4,)},
        {},
        {},
        "scalar 'eps' is not given (line 1)\n    y[i] = x[i] * eps\n                  ^^^\npass eps=...",
    ),
    (
        "y[i] = x[i] * eps",
        {"x": (4,), "eps": ()},
        {},
        {},
        (
            "'eps' is a scalar, a tensor is given (line 1)\n"
            "    y[i] = x[i] * eps\n"
            "                  ^^^\n"
            "pass a number"
        ),
    ),
    (
        "y[i] = x[i]",
        {},
        {},
        {"x": 3},
        "'x' is a tensor, a number is given (line 1)\n    y[i] = x[i]\n           ^\npass a tensor",
    ),
    (
        "y[i] = x[i, 0]",
        {"x": (4,)},
        {},
        {},
        (
            "'x' has 2 dimensions, the tensor given has shape (4,) (line 1)\n"
            "    y[i] = x[i, 0]\n"
            "           ^\n"
            "the program reads x[i, ...]"
        ),
    ),
    (
        "y[i, j] = x[i, j // g]",
        {"x": (4, 4)},
        {"j": 4},
        {"g": 2.5},
        (
            "scalar 'g' is 2.5, not an integer (line 1)\n"
            "    y[i, j] = x[i, j // g]\n"
            "                        ^\n"
            "it is used in an index: x[i, j // g]"
        ),
    ),
    ("y[i] = x[i]", {"x": (4,)}, {"k": 3}, {}, "the program has no axis 'k'\naxes: i"),
    (
        "y[i] = x[i]",
        {"x": (4,)},
        {"i": 3},
        {},
        "axis 'i' has size 4 in x (dimension 0) and 3 in sizes\nleave 'i' out of sizes",
    ),
    (
        "y[t] = 1",
        {},
        {"t": -1},
        {},
        "the size of axis 't' is -1\na size is an integer, 0 or more, at most 2**48",
    ),
    (
        "y[i] = x[i + 1] - z[i]",
        {"x": (5,), "z": (5,)},
        {},
        {},
        (
            "x[i + 1] reads positions 1 to 5 of dimension 0 of 'x', which has size 5 (line 1)\n"
            "    y[i] = x[i + 1] - z[i]\n"
            "           ^^^^^^^^\n"
            "give tensors that fit, or guard the read: where(i + 1 < 5, x[i + 1], 0)"
        ),
    ),
    (
        "y[i] = x[3, i]",
        {"x": (3, 5)},
        {},
        {},
        (
            "x[3, i] reads position 3 of dimension 0 of 'x', which has size 3 (line 1)\n"
            "    y[i] = x[3, i]\n"
            "           ^^^^^^^\n"
            "give a tensor that fits"
        ),
    ),
    (
        "y[i, j] = x[i - j] * z[i, j]",
        {"x": (5,), "z": (9, 2)},
        {},
        {},
        (
            "x[i - j] reads positions -1 to 8 of dimension 0 of 'x', which has size 5 (line 1)\n"
            "    y[i, j] = x[i - j] * z[i, j]\n"
            "              ^^^^^^^^\n"
            "give tensors that fit, or guard the read: where((i - j >= 0) & (i - j < 5), x[i - j], 0)"
        ),
    ),
]


def test_a_condition_keeps_inside_what_is_behind_a_multiple_of_an_axis() -> None:
    source = "H: f32[k2]\ny[k] = where(k + 1 < N(k), H[k + 1 + N(k)], 0) * z[k]"
    shapes = {"H": (10,), "z": (5,)}
    assert bind(parse(source), shapes)["k"] == 5
    with pytest.raises(BindError, match="reads positions"):
        bind(parse(source), {"H": (9,), "z": (5,)})
    with pytest.raises(BindError, match="reads positions 6 to 10"):
        bind(parse("H: f32[k2]\ny[k] = H[k + 1 + N(k)] * z[k]"), shapes)


def test_division_by_zero_is_refused() -> None:
    with pytest.raises(BindError) as caught:
        bind(parse(GQA), SHAPES, None, {"g": 0, "scale": 1})
    assert str(caught.value) == (
        "h // g divides by 0 (line 1)\n"
        "    S[h, i, j] = sum[d](Q[h, i, d] * K[h // g, j, d]) * scale\n"
        "                                       ^^^^^^\n"
        "give a divisor above 0"
    )


@pytest.mark.parametrize(("source", "shapes", "sizes", "scalars", "text"), ERRORS)
def test_error_texts(
    source: str,
    shapes: dict[str, tuple[int, ...]],
    sizes: dict[str, int],
    scalars: dict[str, float],
    text: str,
) -> None:
    with pytest.raises(BindError) as caught:
        bind(parse(source), shapes, sizes, scalars)
    assert str(caught.value) == text


ACCEPTED = [
    "y[i] = where(i > 0, x[i - 1], 0) * x[i]",
    "y[i] = where(not i <= 0, x[i - 1], 0) * x[i]",
    "y[i] = where(i == 0, 0, x[i - 1]) * x[i]",
    "y[i] = where((i > 0) & (x[i - 1] > 0), x[i - 1], 0) * x[i]",
    "y[i] = where(i == 0 or x[i - 1] > 0, x[i], 0)",
    "y[i] = where(i + 1 < N(i), x[i + 1], 0) * x[i]",
    "y[i] = sum[k](where((i + k < N(i)) & (k < 3), x[i + k], 0) * z[k]) * x[i]",
    "y[i] = x[max(i - 1, 0)] * x[i]",
    "y[i] = x[(i + 1) % N(i)] * x[i]",
    "y[i] = x[i // 2 * 2 + i % 2] * x[i]",
    "y[i] = x[page[i] + 100] * x[i]",
    "y[i] = where(x[i] > 0, where(i >= 5, x[i - 5], 0), 0)",
    "y[i] = sum[j](where((i > 0) & (j > 0), sum[j](x[i - 1] * x[j]), 0)) * x[i]",
    "y[i] = sum[j](where((j == 0) | (i == 0), 0, sum[j](x[i - 1] * x[j]))) * x[i]",
    "y[i] = sum[j](where(not (i == 0 or j == 0), sum[j](x[i - 1] * x[j]), 0)) * x[i]",
    "y[i] = x[abs(i - 2)] * x[i]",
]
REFUSED = [
    "y[i] = where(i >= 0, x[i - 1], 0) * x[i]",
    "y[i] = where(i > 0, 0, x[i - 1]) * x[i]",
    "y[i] = where((i > 0) | (i < 9), x[i - 1], 0) * x[i]",
    "y[i] = where(i > 0, sum[i](x[i - 1] * x[i]), 0)",
    "y[i] = sum[j](where((i > 0) | (j > 0), sum[j](x[i - 1] * x[j]), 0)) * x[i]",
    "y[i] = sum[j](where((i > 0) & (j > 0), sum[j](x[j - 1] * x[j]), 0)) * x[i]",
    "y[i] = where(i + 1 <= N(i), x[i + 1], 0) * x[i]",
    "y[i] = x[min(i + 1, N(i))] * x[i]",
    "y[i] = x[(i + 1) % (N(i) + 1)] * x[i]",
    "y[i] = x[i // 2 * 2 + 1] * x[i]",
    "y[i] = x[abs(i - 20)] * x[i]",
]


def shapes_of(source: str) -> dict[str, tuple[int, ...]]:
    """Every tensor has 11 positions, an odd number."""
    return {tensor.name: (11,) for tensor in parse(source).tensors}


@pytest.mark.parametrize("source", ACCEPTED)
def test_guarded_and_undecidable_reads_are_accepted(source: str) -> None:
    bind(parse(source), shapes_of(source))


@pytest.mark.parametrize("source", REFUSED)
def test_reads_outside_are_refused(source: str) -> None:
    with pytest.raises(BindError, match="reads position"):
        bind(parse(source), shapes_of(source))


def test_large_guards_are_proved_not_tried() -> None:
    source = "y[i, j] = where(j <= i, x[i - j] * z[i, j], 0)"
    n = 1 << 20
    assert bind(parse(source), {"x": (n,), "z": (n, n)}) == {"i": n, "j": n}
    with pytest.raises(BindError, match="reads positions -1048575 to 1048575"):
        bind(parse("y[i, j] = x[i - j] * z[i, j]"), {"x": (n,), "z": (n, n)})


def test_positions_that_are_compared_with_data_are_not_decided() -> None:
    bind(parse("y[i] = where(i < n[0], x[i + 1], 0) + x[i]"), {"x": (5,), "n": (1,)})


SEGMENTS = "y[s] = sum[j](where((off[s] <= j) & (j < off[s+1]), x[j], 0))"


@pytest.mark.parametrize(
    ("source", "shapes", "expected"),
    [
        (SEGMENTS, {"off": (5,), "x": (12,)}, {"s": 4, "j": 12}),
        ("y[s] = off[s+1] - off[s]", {"off": (5,)}, {"s": 4}),
        ("y[i] = x[i+2] - 2*x[i+1] + x[i]", {"x": (7,)}, {"i": 5}),
        ("y[i] = x[i+1] * z[i]", {"x": (7,), "z": (6,)}, {"i": 6}),
        ("y[i] = x[i+1] * z[i]", {"x": (9,), "z": (6,)}, {"i": 6}),
        ("y[i] = where(x[i] > 0, x[i+1], 0)", {"x": (7,)}, {"i": 6}),
        ("y[i,t] = where(off[t] > 0, off[i+1], 0)", {"off": (7,)}, {"i": 6, "t": 7}),
        ("x: f32[i]\ny[i] = where(i + 1 < N(i), x[i+1], 0) + x[i]", {"x": (7,)}, {"i": 7}),
        ("y[i] = where(i < N(i) - 1, x[i+1], 0) + x[i]", {"x": (7,)}, {"i": 7}),
    ],
)
def test_a_dimension_is_as_much_longer_than_an_axis_as_is_read_behind_it(
    source: str, shapes: dict[str, tuple[int, ...]], expected: dict[str, int]
) -> None:
    program = parse(source)
    assert bind(program, shapes) == expected
    small = small_extents(program)
    assert not list(reads_outside(program, small_shapes(program, small), small, {}))


@pytest.mark.parametrize(
    ("source", "shapes"),
    [
        ("y[i] = x[i+1] * z[i]", {"x": (6,), "z": (6,)}),
        ("y[i] = where(z[i] > 0, x[i+1], 0)", {"x": (6,), "z": (6,)}),
        ("x: f32[i]\ny[i] = x[i+1] + x[i]", {"x": (6,)}),
    ],
)
def test_a_dimension_that_is_too_short_for_what_is_read_behind_an_axis_is_an_error(
    source: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(
        BindError, match=r"x\[i \+ 1\] reads positions 1 to 6 of dimension 0 of 'x', which has size 6"
    ):
        bind(parse(source), shapes)


def test_a_condition_on_data_does_not_keep_a_read_inside() -> None:
    with pytest.raises(BindError, match="reads positions -1 to 3 of dimension 0"):
        bind(parse("y[i] = where(m[i] > 0, x[i - 1], 0) + x[i]"), {"x": (5,), "m": (5,)})


def test_empty_axes_read_nothing() -> None:
    assert bind(parse("y[i] = x[i + 1] * z[i]"), {"x": (0,), "z": (0,)}) == {"i": 0}


I, J = Axis("i"), Axis("j")
EXTENTS = {"i": 5, "j": 3}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (I, (0, 4)),
        (call("sub", J, I), (-4, 2)),
        (call("sub", I, I), (0, 0)),
        (call("add", call("mul", Const(3), I), Scalar("p")), (10, 22)),
        (call("floordiv", I, Const(2)), (0, 2)),
        (call("mod", I, Const(3)), (0, 2)),
        (call("mod", J, Const(4)), (0, 2)),
        (call("mul", Size("j"), Const(2)), (6, 6)),
        (call("maximum", call("neg", I), Const(-2)), (-2, 0)),
        (call("abs", call("sub", I, Const(1))), (0, 3)),
        (Scalar("unknown"), None),
        (Const(1.5), None),
        (call("floordiv", I, call("sub", J, Const(1))), None),
    ],
)
def test_index_range(expr: Expr, expected: tuple[int, int] | None) -> None:
    assert Box.at(EXTENTS, {"p": 10}).whole(expr) == expected


def test_index_range_of_an_empty_axis() -> None:
    assert Box.at({"i": 0}, {}).whole(call("add", I, Const(1))) is None


FNS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "maximum": max,
    "minimum": min,
}
Exprs = st.recursive(
    st.sampled_from([I, J, Const(2), Const(-3), Const(5), Size("j")]),
    lambda inner: st.builds(call, st.sampled_from(sorted(FNS)), inner, inner),
    max_leaves=6,
)


def evaluated(expr: Expr, i: int, j: int) -> int:
    """The value at one position; raises ZeroDivisionError."""
    match expr:
        case Axis("i"):
            return i
        case Axis():
            return j
        case Const(value):
            return int(value)
        case Size(axis):
            return EXTENTS[axis]
    left, right = (evaluated(arg, i, j) for arg in expr.args)  # type: ignore[attr-defined]
    return FNS[expr.fn](left, right)  # type: ignore[attr-defined,no-any-return]


@settings(max_examples=300, deadline=None)
@given(Exprs)
def test_index_range_holds_every_value(expr: Expr) -> None:
    found = Box.at(EXTENTS, {}).whole(expr)
    if found is not None:
        values = [evaluated(expr, i, j) for i, j in itertools.product(range(5), range(3))]
        assert found[0] <= min(values) and max(values) <= found[1]


def test_positions_that_two_tensors_are_read_at_are_in_both() -> None:
    program = parse("y[i] = a[e[i]] * b[e[i]] + max[j](a[j]) + sum[k, l](b[k] * w[k, l])")
    extents = small_extents(program)
    assert extents["j"] != extents["k"]
    assert input_specs(program, extents)["e"].values == (0, min(extents["j"], extents["k"]) - 1)
