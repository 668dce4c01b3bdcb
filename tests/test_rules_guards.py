"""Guards are retractions onto groups, and repairs with them are exact without a condition (docs/repairs.md)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from eqfuse.rules.guards import SCALES, SHIFTS, RepairGroup, guard_body, guarded
from eqfuse.rules.split import Split, at_first
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, call

INF = math.inf
EXTENDED = (-INF, -3.0, -1.0, 0.0, 0.25, 2.0, INF)
IN_GROUP = {SHIFTS: math.isfinite, SCALES: lambda a: math.isfinite(a) and a != 0}
T = Local("t", ())


def value(expr: Expr, **states: float) -> float:
    with np.errstate(all="ignore"):
        return at_first(expr, states)


@pytest.mark.parametrize("group", [SHIFTS, SCALES], ids=lambda group: group.guard)
def test_a_guard_is_a_retraction_onto_its_group(group: RepairGroup) -> None:
    for a in EXTENDED:
        kept = value(call(group.guard, T), t=a)
        assert IN_GROUP[group](kept)
        assert kept == a or not IN_GROUP[group](a)
    assert math.isnan(value(call(group.guard, T), t=math.nan))


@pytest.mark.parametrize(
    ("fn", "source", "target"),
    [
        ("exp", SHIFTS, SCALES),
        *((fn, SHIFTS, SHIFTS) for fn in SHIFTS.functions if fn not in CASTS),
        *((fn, SCALES, SCALES) for fn in SCALES.functions if fn not in CASTS and fn != "neg"),
    ],
)
def test_functions_of_the_table_are_homomorphisms(fn: str, source: RepairGroup, target: RepairGroup) -> None:
    """f(a b) = f(a) f(b), and a guard inside f gives elements of the group that f leads to."""
    positive = fn in ("sqrt", "rsqrt")
    inside = [a for a in EXTENDED if IN_GROUP[source](a) and not (positive and a < 0)]
    u = Local("u", ())
    joined, apart = call(fn, call(source.join, T, u)), call(target.join, call(fn, T), call(fn, u))
    for a, b in itertools.product(inside, inside):
        assert math.isclose(value(joined, t=a, u=b), value(apart, t=a, u=b), rel_tol=1e-12)
    for a in EXTENDED:
        if not (positive and value(call(source.guard, T), t=a) < 0):
            assert IN_GROUP[target](value(call(fn, call(source.guard, T)), t=a))


def test_a_state_that_is_the_identity_has_finite_factors() -> None:
    """What a repair moves a state by is a number, whatever the tags are, identities included."""
    old, new = Local("m", ()), Local("m_new", ())
    shift = call("sub", guarded("finite", old), guarded("finite", new))
    scale = call("div", guarded("invertible", old), guarded("invertible", new))
    for a, b in itertools.product(EXTENDED, EXTENDED):
        assert math.isfinite(value(shift, m=a, m_new=b))
        assert math.isfinite(value(scale, m=a, m_new=b)) and value(scale, m=a, m_new=b) != 0


def test_sums_and_products_of_states_are_guarded_part_by_part() -> None:
    a, b = Local("a", ()), Local("b", ())
    assert str(guarded("finite", call("sub", a, b))) == "finite(a) - finite(b)"
    assert str(guarded("finite", call("mul", a, b))) == "finite(finite(a) * finite(b))"
    assert str(guarded("finite", call("mul", Const(2), a))) == "finite(2 * a)"
    assert str(guarded("invertible", call("div", a, b))) == "invertible(a) / invertible(b)"
    assert guarded("finite", guarded("finite", a)) is guarded("finite", a)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_masks_drop_to_what_a_group_leaves_alone(op: str) -> None:
    """0 under scales, -inf under shifts: only so is a masked value times h the masked product."""
    x = Load("x", (Axis("j"),))
    m = Local("m", ())
    split = Split.of("j", [("m", "max", x)])
    mask = call("lt", Axis("j"), Const(3))
    scaled = call("where", mask, call("div", x, m), Const(0))
    assert guard_body(scaled, op, split).factor is not None
    shifted = call("exp", call("where", mask, call("sub", x, m), Const(-INF)))
    factor = guard_body(shifted, op, split).factor
    assert isinstance(factor, Call) and str(factor) == "exp(finite(m) - m)"


def test_a_mask_around_a_term_of_a_sum_is_no_mask_of_its_shift() -> None:
    """A sum moves by its shift as often as the mask keeps a position: none may be kept, and the shift NaN."""
    x, m = Load("x", (Axis("j"),)), Local("m", ())
    split = Split.of("j", [("m", "max", Load("z", (Axis("j"),)))])
    masked = call("where", call("lt", Axis("j"), Const(3)), call("sub", x, m), Const(-INF))
    found = guard_body(masked, "sum", split)
    assert found.factor is None and found.lost == (call("sub", x, m),)
    assert guard_body(masked, "max", split).lost == ()
