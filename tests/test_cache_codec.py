"""The text of values that are kept between processes, and what is refused when it is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from eqfuse.cache.codec import Codec, Malformed, Uncodable
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Reduce, Scalar, Size


@dataclass(frozen=True)
class Leaf:
    number: float
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tree:
    left: Leaf | None
    pair: tuple[int, bool]
    kind: Literal["a", "b"]
    sizes: dict[str, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()


CODEC = Codec([Leaf, Tree])
EXPRS = Codec([Axis, Call, Const, Load, Local, Reduce, Scalar, Size])

TREE = Tree(Leaf(1.5, ("x", "y")), (3, True), "a", {"j": 2, "i": 1}, frozenset({"q", "p"}))


def through(codec: Codec, value: object, hint: Any) -> Any:
    return codec.decode(json.loads(json.dumps(codec.encode(value))), hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (TREE, Tree),
        (Tree(None, (0, False), "b"), Tree),
        ((TREE, TREE), tuple[Tree, ...]),
        (Leaf(math.inf), Leaf),
        (Leaf(-0.0), Leaf),
        ({"a": (1, 2.5)}, dict[str, tuple[int, float]]),
        (None, Leaf | None),
    ],
)
def test_a_value_comes_back(value: object, hint: Any) -> None:
    found = through(CODEC, value, hint)
    assert found == value
    assert repr(found) == repr(value) or "frozenset" in repr(value)  # which has no order


def test_order_of_mappings_is_kept() -> None:
    assert list(through(CODEC, TREE, Tree).sizes) == ["j", "i"]


def test_equal_values_have_equal_text() -> None:
    one = Leaf(1.0)
    shared, apart = (one, one), (Leaf(1.0), Leaf(1.0))
    assert json.dumps(CODEC.encode(shared)) == json.dumps(CODEC.encode(apart))
    assert json.dumps(CODEC.encode(Leaf(1))) != json.dumps(CODEC.encode(Leaf(1.0)))


def test_expressions_come_back_as_the_same_objects_with_their_sharing() -> None:
    expr: Expr = Load("x", (Axis("i"), Axis("j")))
    for _ in range(3000):
        expr = Call("add", (expr, expr))  # 2**3000 nodes as a tree, and deeper than Python recurses
    kept = Reduce("sum", "j", expr)
    text = EXPRS.encode((kept, Const(1), Const(1.0), Const(True)))
    assert len(text["rows"]) < 3010
    found = EXPRS.decode(text, tuple[Expr, ...])
    assert found == (kept, Const(1), Const(1.0), Const(True))
    assert [part is whole for part, whole in zip(found, (kept, Const(1), Const(1.0)), strict=False)] == [
        True
    ] * 3


def test_other_classes_have_no_text() -> None:
    with pytest.raises(Uncodable, match="Leaf"):
        EXPRS.encode(Leaf(1.0))
    with pytest.raises(Uncodable, match="list"):
        CODEC.encode([1])
    with pytest.raises(Uncodable, match="object"):
        CODEC.encode(Leaf(object()))  # type: ignore[arg-type]

    class Leafy(Leaf):
        pass

    with pytest.raises(Uncodable):
        CODEC.encode(Leafy(1.0))


TEXT = CODEC.encode(TREE)


@pytest.mark.parametrize(
    "text",
    [
        None,
        [],
        {},
        {"rows": [], "root": {"node": 0}},
        {"rows": [["Leaf", 1.0, []]], "root": {"node": True}},
        {"rows": [["Leaf", 1.0, []]], "root": {"node": -1}},
        {"rows": [["Leaf", 1.0]], "root": {"node": 0}},
        {"rows": [["Leaf", "1", []]], "root": {"node": 0}},
        {"rows": [["Leaf", True, []]], "root": {"node": 0}},
        {"rows": [["Leaf", 1.0, [1]]], "root": {"node": 0}},
        {"rows": [["Leaf", 1.0, "xy"]], "root": {"node": 0}},
        {"rows": [["Tree", {"node": 0}, [1, True], "a", {"map": []}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1], "a", {"map": []}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, 1], "a", {"map": []}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, True], "c", {"map": []}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, True], "a", {"map": [["i"]]}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, True], "a", {"map": [[[], 1]]}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, True], "a", {"map": [["i", 1.5]]}, {"set": []}]], "root": {"node": 0}},
        {"rows": [["Tree", None, [1, True], "a", {"map": []}, {"set": [1]}]], "root": {"node": 0}},
        {"rows": [["Popen", "true"]], "root": {"node": 0}},
        {"rows": ["Leaf"], "root": None},
        {**TEXT, "root": {"node": 0, "map": []}},
        {**TEXT, "root": {"node": 0}},  # a Leaf
    ],
)
def test_what_no_value_has_is_refused(text: object) -> None:
    with pytest.raises(Malformed):
        CODEC.decode(text, Tree)
