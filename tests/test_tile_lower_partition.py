"""Cutting loop ranges: what may be skipped, what is proved, and that every position is still visited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eqfuse.loops.blocks import Block
from eqfuse.loops.identity import vanishes
from eqfuse.loops.nodes import Buffer, Carried, Kernel, Let, Loop, Nest, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.assume import folded
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Program, Reduce, Scalar, Size, call
from eqfuse.terms.parser import parse
from eqfuse.terms.ranges import FiniteInputs
from eqfuse.tile import nodes as tile
from eqfuse.tile.interpreter import run
from eqfuse.tile.lower.program import lower
from eqfuse.tile.walk import nested

LOW = Const(-math.inf)
ZERO = Const(0.0)
i, j = Axis("i"), Axis("j")
m, new = Local("m", ()), Local("m_new", ())
x = Load("x", (i, j))
even = call("eq", call("mod", j, Const(2)), Const(0))
RNG = np.random.default_rng(3)


class Exact(FloatDomain):
    """float64 in which casts do not round."""

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        return args[0] if fn in CASTS else super().call(fn, args)


def masked_sum(mask: Expr) -> Loop:
    """s = sum of x where the mask holds."""
    tile_sum = Reduce("sum", "j", call("where", mask, x, ZERO))
    update = Let("s_new", (), call("add", Local("s", ()), tile_sum))
    return Loop("j", Const(0), Size("j"), False, (Carried("s", (), ZERO, "s_new"),), (update,))


CONFIG = KernelConfig((Block("i", "grid", 4), Block("j", "loop", 4)))


def nest_of(loop: Loop) -> Nest:
    """y[i] = the state s after the loop."""
    store = Store("y", (i,), (), Local("s", ()))
    return Nest((Kernel("rows", ("i",), (loop, store)),), (Buffer("y", ("i",), None, True),))


def lowered(mask: Expr, text: str) -> tuple[Program, tile.TileProgram]:
    source = parse(f"y[i] = sum[j](where({text}, x[i,j], 0))")
    return source, lower(nest_of(masked_sum(mask)), source, {"x": "f32"}, (CONFIG,))


def parts(program: tile.TileProgram) -> list[tile.For]:
    return [stmt for stmt in nested(program.kernels[0].body) if isinstance(stmt, tile.For)]


MASKS: dict[str, tuple[Expr, str, Any]] = {
    "upper": (call("le", j, i), "j <= i", lambda i, j: j <= i),
    "strict": (call("lt", j, i), "j < i", lambda i, j: j < i),
    "lower": (call("gt", j, i), "j > i", lambda i, j: j > i),
    "reversed": (call("ge", i, j), "i >= j", lambda i, j: i >= j),
    "shifted": (call("le", call("add", j, Const(3)), i), "j + 3 <= i", lambda i, j: j + 3 <= i),
    "scaled": (call("le", j, call("mul", Const(2), i)), "j <= 2 * i", lambda i, j: j <= 2 * i),
    "band": (
        call("and", call("lt", call("sub", i, j), Const(3)), call("lt", call("sub", j, i), Const(2))),
        "(i - j < 3) & (j - i < 2)",
        lambda i, j: (i - j < 3) & (j - i < 2),
    ),
    "outside": (
        call("or", call("lt", j, call("sub", i, Const(4))), call("gt", j, call("add", i, Const(4)))),
        "(j < i - 4) | (j > i + 4)",
        lambda i, j: (j < i - 4) | (j > i + 4),
    ),
    "twice": (
        call("and", call("ge", j, i), call("ge", j, Const(5))),
        "(j >= i) & (j >= 5)",
        lambda i, j: (j >= i) & (j >= 5),
    ),
    "quotient": (
        call("le", call("mul", call("floordiv", i, Const(3)), Const(3)), j),
        "i // 3 * 3 <= j",
        lambda i, j: i // 3 * 3 <= j,
    ),
    "minimum": (
        call("lt", j, call("minimum", i, Const(5))),
        "j < min(i, 5)",
        lambda i, j: j < np.minimum(i, 5),
    ),
    "size": (call("lt", j, call("sub", Size("j"), i)), "j < N(j) - i", lambda i, j: j < j.size - i),
    "nothing": (call("lt", j, Const(0)), "j < 0", lambda i, j: (j < 0) & (i >= 0)),
    "diagonal": (call("eq", j, i), "j == i", lambda i, j: j == i),
    "or the diagonal": (
        call("or", call("lt", j, call("sub", i, Const(4))), call("eq", j, i)),
        "(j < i - 4) | (j == i)",
        lambda i, j: (j < i - 4) | (j == i),
    ),
    "or half": (
        call("or", call("lt", j, Const(2)), call("and", call("lt", j, Const(9)), even)),
        "(j < 2) | ((j < 9) & (j % 2 == 0))",
        lambda i, j: ((j < 2) | ((j < 9) & (j % 2 == 0))) & (i >= 0),
    ),
    "half or a part": (
        call("or", call("and", even, call("ge", j, i)), call("gt", j, Const(8))),
        "((j % 2 == 0) & (j >= i)) | (j > 8)",
        lambda i, j: ((j % 2 == 0) & (j >= i)) | (j > 8),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [1, 4, 6, 11])
def test_every_selected_position_is_summed(name: str, n: int) -> None:
    mask, text, truth = MASKS[name]
    source, program = lowered(mask, text)
    value = RNG.normal(size=(n, n))
    got = run(program, source, {"x": value}, {}, {"i": n, "j": n}, Exact(), shards={})["y"]
    at = np.arange(n)
    want = np.where(truth(at[:, None], at[None, :]), value, 0).sum(axis=1)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "loops"),
    [
        ("upper", 2),
        ("strict", 2),
        ("reversed", 2),
        ("lower", 3),
        ("quotient", 3),
        ("band", 3),
        ("scaled", 2),
        ("diagonal", 2),
    ],
)
def test_number_of_parts(name: str, loops: int) -> None:
    _, program = lowered(*MASKS[name][:2])
    found = parts(program)
    assert len(found) == loops
    assert [part.masked for part in found] == [True, False, True][-loops:]


def conditions(part: tile.For) -> set[str]:
    """Comparisons and choices in a body."""
    functions = {s.op.fn for s in part.body if isinstance(s, tile.Let) and isinstance(s.op, tile.Elementwise)}
    return functions & {"le", "lt", "gt", "ge", "eq", "where"}


def test_the_interior_has_no_predicate() -> None:
    for name in ("upper", "lower", "band", "quotient", "minimum"):
        interior = parts(lowered(*MASKS[name][:2])[1])[-2]
        assert not interior.masked and not conditions(interior), name
    interior = parts(lowered(*MASKS["diagonal"][:2])[1])[-2]
    assert conditions(interior) == {"eq", "where"}, "an equality is not a range of this analysis"


def test_empty_tiles_are_not_visited() -> None:
    """NaN times a masked 0 would show, had a tile without any selected position been visited."""
    n, at = 11, np.arange(11)
    for name in ("upper", "lower", "band", "minimum", "nothing"):
        mask, text, truth = MASKS[name]
        weighted = call("mul", call("where", mask, x, ZERO), Load("z", (i, j)))
        update = Let("s_new", (), call("add", Local("s", ()), Reduce("sum", "j", weighted)))
        loop = Loop("j", Const(0), Size("j"), False, (Carried("s", (), ZERO, "s_new"),), (update,))
        source = parse(f"y[i] = sum[j](where({text}, x[i,j], 0) * z[i,j])")
        program = lower(nest_of(loop), source, {"x": "f32", "z": "f32"}, (CONFIG,))
        selected = truth(at[:, None], at[None, :])
        tiles = np.add.reduceat(np.add.reduceat(selected, [0, 4, 8], axis=0), [0, 4, 8], axis=1) > 0
        assert not tiles.all()
        value, weights = RNG.normal(size=(n, n)), RNG.normal(size=(n, n))
        want = np.where(selected, value * weights, 0).sum(axis=1)
        weights[~tiles.repeat(4, 0).repeat(4, 1)[:n, :n]] = np.nan
        got = run(program, source, {"x": value, "z": weights}, {}, {"i": n, "j": n}, Exact(), shards={})["y"]
        np.testing.assert_allclose(got, want, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["scalar", "load"])
def test_ranges_from_run_time_integers(kind: str) -> None:
    n, at = 11, np.arange(11)
    if kind == "scalar":
        count: Expr = Scalar("count")
        source = parse("count: i32\ny[i] = sum[j](where(j < count, x[i,j], 0))")
    else:
        count = Load("count", (Const(0),))
        source = parse("y[i] = sum[j](where(j < count[0], x[i,j], 0))")
    program = lower(
        nest_of(masked_sum(call("lt", j, count))), source, {"x": "f32", "count": "i64"}, (CONFIG,)
    )
    assert not conditions(parts(program)[-2])
    value = RNG.normal(size=(n, n))
    tensors, scalars = {"x": value, "count": np.array([6])}, {"count": 6}
    got = run(program, source, tensors, scalars, {"i": n, "j": n}, Exact(), shards={})["y"]
    np.testing.assert_allclose(got, np.where(at < 6, value, 0).sum(axis=1), atol=1e-12)


def test_a_real_threshold_is_not_a_range() -> None:
    """`j * 0.5 <= i` is a comparison of reals: it stays a mask."""
    mask = call("le", call("mul", j, Const(0.5)), i)
    _, program = lowered(mask, "j * 0.5 <= i")
    assert all("where" in conditions(part) for part in parts(program))


# When an update is the identity -------------------------------------------------------------------

P = call("le", j, i)


def loop_of(*lets: tuple[str, Expr], init: Expr = ZERO, state: str = "s") -> Loop:
    body = tuple(Let(name, (), expr) for name, expr in lets)
    return Loop("j", Const(0), Size("j"), False, (Carried(state, (), init, lets[-1][0]),), body)


def plus(value: Expr) -> Expr:
    return call("add", Local("s", ()), Reduce("sum", "j", value))


@pytest.mark.parametrize(
    ("value", "skips"),
    [
        (call("where", P, x, ZERO), True),
        (call("where", P, x, Const(0)), True),
        (call("where", P, x, Const(1.0)), False),
        (call("mul", call("where", P, x, ZERO), x), True),
        (call("sq", call("where", P, x, ZERO)), True),
        (call("f16", call("where", P, x, ZERO)), True),
        (call("cos", call("where", P, x, ZERO)), False),
        (call("exp", call("where", P, x, LOW)), True),
        (call("exp", call("sub", call("where", P, x, LOW), call("finite", Local("r", ())))), True),
        (call("exp", call("sub", call("where", P, x, LOW), Local("r", ()))), False),
        (call("exp", call("neg", call("where", P, x, LOW))), False),
        (call("mul", call("where", P, x, ZERO), Local("r", ())), False),
        (call("div", call("where", P, x, ZERO), call("invertible", Local("r", ()))), True),
        (call("div", call("where", P, x, ZERO), Local("r", ())), False),
        (call("where", call("and", P, call("lt", x, ZERO)), x, ZERO), True),
        (call("where", call("or", P, call("lt", x, ZERO)), x, ZERO), False),
        (call("where", call("not", P), x, ZERO), False),
        (x, False),
    ],
    ids=str,
)
def test_what_is_the_identity_without_the_predicate(value: Expr, skips: bool) -> None:
    assert vanishes(loop_of(("s_new", plus(value))), P, value=False) == skips


def test_repairs_cancel_only_under_guards() -> None:
    score = call("where", P, x, LOW)
    maximum = ("m_new", call("maximum", m, Reduce("max", "j", score)))
    carried = (Carried("m", (), LOW, "m_new"), Carried("s", (), ZERO, "s_new"))

    def loop(guard: bool) -> Loop:
        old, now = (call("finite", e) if guard else e for e in (m, new))
        repaired = call("mul", call("exp", call("sub", old, now)), Local("s", ()))
        weight = Reduce("sum", "j", call("exp", call("sub", score, call("finite", new))))
        body = (Let(maximum[0], (), maximum[1]), Let("s_new", (), call("add", repaired, weight)))
        return Loop("j", Const(0), Size("j"), False, carried, body)

    assert vanishes(loop(guard=True), P, value=False)
    assert not vanishes(loop(guard=True), P, value=True)
    assert not vanishes(loop(guard=False), P, value=False)


def test_stores_are_never_skipped() -> None:
    loop = Loop("j", Const(0), Size("j"), False, (), (Store("y", (i, j), ("j",), call("where", P, x, ZERO)),))
    assert not vanishes(loop, P, value=False)


def test_finite() -> None:
    bounded: tuple[Expr, ...] = (
        call("finite", m),
        call("exp", x),
        call("div", x, Size("j")),
        call("invertible", m),
    )
    for expr in bounded:
        assert FiniteInputs().is_finite(expr), str(expr)
    unbounded: tuple[Expr, ...] = (
        m,
        LOW,
        call("exp", m),
        call("add", x, m),
        call("div", x, x),
        call("log", x),
    )
    for expr in unbounded:
        assert not FiniteInputs().is_finite(expr), str(expr)


def test_folding_predicates() -> None:
    choice = call("where", call("and", P, call("lt", x, ZERO)), x, LOW)
    assert folded(choice, {P: True}) is call("where", call("lt", x, ZERO), x, LOW)
    assert folded(choice, {P: False}) is LOW
    assert folded(call("where", call("not", P), x, LOW), {P: False}) is x
