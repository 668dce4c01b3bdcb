"""Lengths and offsets that verification draws, and wrong ranges that it has to reject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.errors import VerificationError
from eqfuse.terms.nodes import Expr
from eqfuse.terms.parser import parse
from eqfuse.tile.lower.expressions import Expressions
from eqfuse.tile.lower.regions import Regions
from eqfuse.tile.nodes import Value
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.inputs import delimiting_scalars, input_specs
from eqfuse.verify.sampling import draw_scalars, draw_specs

LENGTH = "len: i32[b]\ny[b] = sum[j](where(j < len[b], x[b,j], 0))"
PACKED = "first: i32[i]\ny[i] = sum[j](where((first[i] <= j) & (j <= i), x[i,j], 0))"
SEGMENTS = "off: i32[n]\ny[s] = sum[j](where((off[s] <= j) & (j < off[s+1]), x[j], 0))"
SCALAR = "L: i32\ny[i] = sum[j](where(j < L, x[i,j], 0))"
SOFTMAX = """
    first: i32[i]
    s[i,j] = where((first[i] <= j) & (j <= i), x[i,j], -inf)
    p[i,j] = exp(s[i,j] - max[j](s[i,j]))
    o[i,d] = sum[j](p[i,j] * v[j,d]) / sum[j](p[i,j])
    """
DOCUMENTS = """
    doc: i32[j]
    at: i32[i]
    assert doc[j] <= doc[j+1]
    y[i] = sum[j](where(doc[j] == at[i], x[i,j], 0))
    """
BEHIND = """
    off: i32[n]
    assert off[s] <= off[s+1]
    y[j] = sum[s](where((off[s] <= j) & (j < off[s+1]), x[s], 0))
    """
ASCENDING = "doc: i32[b,j]\nassert doc[b,j] <= doc[b,j+1]\ny[b] = sum[j](where(doc[b,j] < n[b], x[b,j], 0))\nn: i32[b]"
PROGRAMS = {
    "length": LENGTH,
    "packed": PACKED,
    "segments": SEGMENTS,
    "scalar": SCALAR,
    "softmax": SOFTMAX,
    "documents": DOCUMENTS,
    "behind": BEHIND,
}


def drawn(source: str, name: str, extents: dict[str, int], rounds: int = 2) -> list[np.ndarray]:
    specs = input_specs(parse(source), extents)
    rng = np.random.default_rng(0)
    return [draw_specs(specs, FieldDomain(), 4, rng, number=number)[name] for number in range(rounds)]


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_lengths_are_none_one_all_and_between(rows: int) -> None:
    found = np.concatenate(drawn(LENGTH, "len", {"b": rows, "j": 7}))
    assert {0, 1, 7} <= set(found.tolist()) and set(found.tolist()) - {0, 1, 7}


def test_offsets_ascend_in_the_first_round_and_in_another_do_not() -> None:
    ascending, other, third = drawn(SEGMENTS, "off", {"s": 9, "j": 7}, 3)
    assert (np.diff(ascending) >= 0).all() and (np.diff(other) < 0).any() and (np.diff(third) < 0).any()
    assert ascending[0] == 0 and ascending[-1] == 7


def test_a_shift_is_within_what_it_shifts() -> None:
    specs = input_specs(
        parse("s: i32[b]\ny[b,i] = sum[j](where(j <= i + s[b], x[j], 0))"), {"b": 3, "i": 5, "j": 7}
    )
    assert specs["s"].values == (-4, 7) and specs["s"].delimits


def test_what_is_an_index_is_no_end_of_a_range() -> None:
    extents = {"b": 3, "j": 8, "n": 2, "d": 5}
    program = parse("len: i32[b]\ny[b] = sum[j](where(j < len[b], x[page[b,j//4],j%4], 0))")
    specs = input_specs(program, extents)
    assert specs["len"].delimits and not specs["page"].delimits


def test_a_key_may_select_no_position() -> None:
    source = "y[v] = sum[t](where(ids[t] == v, x[t], 0))"
    extents = {"t": 7, "v": 3}
    keys = input_specs(parse(f"ids: i64[t]\n{source}"), extents)["ids"]
    assert keys.values == (-1, 3) and not keys.delimits
    read_at = input_specs(parse(f"ids: i64[t]\n{source.replace('x[t]', 'x[t] * z[ids[t]] * z[v]')}"), extents)
    assert read_at["ids"].values == (0, 2)


def test_scalars_are_none_one_all_and_between() -> None:
    program = parse(SCALAR)
    ends = delimiting_scalars(program, {"i": 3, "j": 7})
    assert ends == {"L": (0, 7)}
    found = [
        draw_scalars([program], {}, FieldDomain(), 4, np.random.default_rng(n), ends, n)["L"]
        for n in range(4)
    ]
    assert found == [2, 0, 1, 7]


@pytest.mark.parametrize(
    "source",
    [
        "L: i32\ny[i] = sum[j](where(j < L, x[i,j] * L, 0))",
        "L: i32\ny[i] = sum[j](where(j < 4, x[i,j+L], 0))",
        "L: i32\ny[i] = sum[j](where(j // L < 2, x[i,j//L], 0))",
    ],
)
def test_scalars_that_something_else_reads_are_left_alone(source: str) -> None:
    assert delimiting_scalars(parse(source), {"i": 3, "j": 7}) == {}


Edge = Callable[..., Value]


def moved(by: int) -> Callable[[Edge], Edge]:
    def mutant(edge: Edge) -> Edge:
        def wrong(self: Regions, *given: Any, **named: Any) -> Value:
            found = edge(self, *given, **named)
            build = self._build
            return build.integer("add" if by > 0 else "sub", found, build.constant(abs(by), "i32"))

        return wrong

    return mutant


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["length", "packed", "segments", "scalar", "documents", "behind"])
def test_a_range_that_is_off_by_one_is_rejected(name: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = "_search" if name in ("documents", "behind") else "_edge"
    monkeypatch.setattr(Regions, edge, moved(by)(getattr(Regions, edge)))
    with pytest.raises(VerificationError):
        eq.compile(PROGRAMS[name], target="cpu", prefer="rolling")


@pytest.mark.parametrize("name", ["length", "packed", "segments", "softmax", "documents"])
def test_the_extremes_of_rows_taken_for_one_another_are_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extremes = Expressions.extremes

    def swapped(self: Expressions, value: Value, guards: tuple[Expr, ...]) -> tuple[Value, Value]:
        least, most = extremes(self, value, guards)
        return most, least

    monkeypatch.setattr(Expressions, "extremes", swapped)
    with pytest.raises(VerificationError):
        eq.compile(PROGRAMS[name], target="cpu", prefer="rolling")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["length", "packed", "segments", "softmax", "documents"])
def test_one_row_taken_for_all_is_rejected(name: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the rows for both ends, or the greatest."""
    extremes = Expressions.extremes
    monkeypatch.setattr(Expressions, "extremes", lambda self, *given: (extremes(self, *given)[which],) * 2)
    with pytest.raises(VerificationError):
        eq.compile(PROGRAMS[name], target="cpu", prefer="rolling")


@pytest.mark.parametrize("name", ["<", "<=", ">", ">=", "=="])
def test_the_other_side_of_what_is_equal_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends before the elements that are equal instead of behind them, or the other way round."""
    source = DOCUMENTS.replace("==", name)
    assert eq.compile(source, target="cpu", prefer="rolling").certificate.ok
    search = Regions._search
    monkeypatch.setattr(
        Regions, "_search", lambda self, op: search(self, dataclasses.replace(op, right=not op.right))
    )
    with pytest.raises(VerificationError):
        eq.compile(source, target="cpu", prefer="rolling", verify="again")


def test_what_is_promised_to_ascend_does_in_every_round() -> None:
    first, second, *others = drawn(ASCENDING, "doc", {"b": 4, "j": 9}, 6)
    assert all((np.diff(each, axis=1) >= 0).all() for each in (first, second, *others))
    assert (np.diff(first, axis=1) > 0).any()
    assert (second[:, :5] == second.min()).all() and (second[:, 5:] == second.max()).all()
    assert (np.diff(first, axis=0) < 0).any()


def test_integers_that_meet_a_number_are_equal_to_it_and_are_not() -> None:
    found = drawn(
        "k: i32[j]\ny[i] = sum[j](where((k[j] == 3) | (k[j] == 5), x[i,j], 0))", "k", {"i": 3, "j": 40}
    )[0]
    assert {3, 4, 5, 6} <= set(found.tolist())
