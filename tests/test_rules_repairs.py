"""The notation of printed repairs says what a merge computes, wherever a part has seen something."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from rules_merges import Derivation, derivation
from rules_programs import EXTENTS, FUSED, RULE_PROGRAMS

from eqfuse.rules.guards import guarded
from eqfuse.rules.printer import MergeText
from eqfuse.rules.repairs import NEW, OLD, Repairs, written_name
from eqfuse.rules.split import at_first
from eqfuse.terms.nodes import Call, Expr, Local, Scalar, call, replaced, transform, walk
from eqfuse.terms.printer import show

PROGRAMS = {**FUSED, **RULE_PROGRAMS}


@cache
def derived(name: str) -> Derivation:
    return derivation(PROGRAMS[name], EXTENTS)


def spelt_out(value: Expr, repairs: Repairs) -> Expr:
    """A value in the notation, its forms in place of their names."""
    forms = {name: form for form, name in repairs.names.items()}

    def step(node: Expr) -> Expr:
        if isinstance(node, Call) and written_name(node.fn) in forms and written_name(node.fn) != node.fn:
            old, new = node.args
            return replaced(forms[written_name(node.fn)], {OLD: old, NEW: new})
        return node

    return transform(value, step)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["softmax", "variance", "scaled_l2", "softmax_entropy", "max_centred"])
def test_the_notation_says_what_is_computed(name: str) -> None:
    """The printed value, its forms written out, is that of the merge for states that are numbers."""
    rng = np.random.default_rng(0)
    for group in derived(name).groups:
        if group.merge is None:
            continue
        repairs = Repairs()
        for value in [c.value for c in group.merge.combine] + [u.value for u in group.merge.update]:
            shown = spelt_out(repairs.shown(value), repairs)
            names = {node.name for node in walk(value) if isinstance(node, Local)}
            for _ in range(5):
                states = {name: float(rng.uniform(0.5, 2)) for name in sorted(names)}
                assert math.isclose(at_first(shown, states), at_first(value, states), rel_tol=1e-12)


@pytest.mark.parametrize(
    ("value", "shown", "form"),
    [
        ("exp", "ratio(m, m_new)", "exp(old - new)"),
        ("scaled", "ratio(m, m_new)", "exp(t * (old - new))"),
        ("sq", "ratio(m, m_new)", "sq(old / new)"),
        ("back", "ratio(m, m_new)", "exp(new - old)"),
        ("sub", "shift(m, m_new)", "old - new"),
    ],
)
def test_forms(value: str, shown: str, form: str) -> None:
    old, new = Local("m", ()), Local("m_new", ())
    shift = call("sub", guarded("finite", old), guarded("finite", new))
    made = {
        "exp": call("finite", call("exp", shift)),
        "scaled": call("exp", call("mul", Scalar("t"), shift)),
        "sq": call("finite", call("sq", call("div", guarded("invertible", old), guarded("invertible", new)))),
        "back": call("exp", call("sub", guarded("finite", new), guarded("finite", old))),
        "sub": shift,
    }
    repairs = Repairs()
    found = repairs.shown(made[value])
    assert show(found) == shown
    assert [show(form) for _, form in repairs.forms([found])] == [form]


def test_two_forms_have_two_names() -> None:
    text = str(MergeText(derived("softmax_entropy").groups))
    assert "ratio(old, new) = exp(old - new)  " in text and "ratio2(old, new) = old / new  " in text


def test_what_is_no_repair_keeps_its_guards() -> None:
    """A guard around one state, or around states of which one is read without a guard."""
    old, new = Local("m", ()), Local("m_new", ())
    for value in (guarded("finite", old), call("sub", guarded("finite", old), new), call("sub", old, new)):
        assert Repairs().shown(value) is value
