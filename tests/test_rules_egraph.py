"""What goes into an e-graph and what is read back."""

from __future__ import annotations

from typing import Any

import pytest

import eqfuse as eq
from eqfuse.rules.catalogue import PREPARE
from eqfuse.rules.egraph.encode import global_name
from eqfuse.rules.egraph.ranges import Ranges
from eqfuse.rules.egraph.saturate import session


def test_globals_are_told_apart_however_often_they_were_used() -> None:
    short, longer = global_name("t2"), [global_name(f"t2{n}") for n in range(1, 60)]
    with session(PREPARE) as saturation:
        saturation.run([f'(let {name} (Leaf "{name}"))' for name in (short, *longer)])
        for name in longer * 10:
            saturation.run([f"(positive (Max {short} {name}))"])
        graph = saturation.read()
    pairs = {node.args for nodes in graph.classes.values() for node in nodes if node.head == "Max"}
    assert pairs == {(graph.roots[short], graph.roots[name]) for name in longer}


def test_a_class_whose_other_forms_contain_it_keeps_its_retired_form() -> None:
    # 0.1 * 1 is 0.1, so that a / (0.1 * 1) = (a / 0.1) / 1 retires a / 0.1 in favour of itself.
    kernel = eq.compile("x: f32[i]\na = max[i](0.1)\nb = max[i](min[i](x[i]) / 0.1)", target="cpu")
    assert kernel.certificate.ok


def test_how_a_class_grows_is_looked_at_again_where_an_argument_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[float] = []
    growth, begin = Ranges._growth, Ranges.__init__

    def counted(self: Ranges, *of: Any) -> Any:
        looked[-1] += 1 / self._graph.size
        return growth(self, *of)

    def begun(self: Ranges, *of: Any) -> None:
        looked.append(0.0)
        begin(self, *of)

    monkeypatch.setattr(Ranges, "_growth", counted)
    monkeypatch.setattr(Ranges, "__init__", begun)
    eq.compile("y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j] * 0.731)", target="cpu", verify=False)
    assert looked and max(looked) < 2
