"""The text of values that are kept between processes, and what is refused when it is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from eqfuse.codec import Codec, Malformed, Uncodable
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


CODEC = Codec({"rows": [Leaf, Tree]})
EXPRS = Codec({"rows": [Axis, Call, Const, Load, Local, Reduce, Scalar, Size]})

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
        {"rows": [], "root": 0},
        {"rows": [["Leaf", 1.0, []]], "root": True},
        {"rows": [["Leaf", 1.0, []]], "root": -1},
        {"rows": [["Leaf", 1.0]], "root": 0},
        {"rows": [["Leaf", "1", []]], "root": 0},
        {"rows": [["Leaf", True, []]], "root": 0},
        {"rows": [["Leaf", 1.0, [1]]], "root": 0},
        {"rows": [["Leaf", 1.0, "xy"]], "root": 0},
        {"rows": [["Tree", 0, [1, True], "a", {}, []]], "root": 0},
        {"rows": [["Tree", None, [1], "a", {}, []]], "root": 0},
        {"rows": [["Tree", None, [1, 1], "a", {}, []]], "root": 0},
        {"rows": [["Tree", None, [1, True], "c", {}, []]], "root": 0},
        {"rows": [["Tree", None, [1, True], "a", [["i", 1]], []]], "root": 0},
        {"rows": [["Tree", None, [1, True], "a", [[[], 1]], []]], "root": 0},
        {"rows": [["Tree", None, [1, True], "a", {"i": 1.5}, []]], "root": 0},
        {"rows": [["Tree", None, [1, True], "a", {}, [1]]], "root": 0},
        {"rows": [["Popen", "true"]], "root": 0},
        {"rows": ["Leaf"], "root": None},
        {**TEXT, "more": []},
        {**TEXT, "root": 0},  # a Leaf
    ],
)
def test_what_no_value_has_is_refused(text: object) -> None:
    with pytest.raises(Malformed):
        CODEC.decode(text, Tree)


@dataclass(frozen=True)
class Word:
    text: str


@dataclass(frozen=True)
class Pair:
    first: Word
    second: Word | str


@dataclass(frozen=True)
class Named:
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Page:
    title: Word
    parts: tuple[Named | Nothing, ...]


def word(text: str) -> Word:
    if not text:
        raise Malformed("a word is empty")
    return Word(text)


PAGES = Codec({"words": (Word,)}, objects=(Page, Named, Nothing), lists=(Pair,), make={Word: word})
PAGE = Page(Word("a"), (Named((Pair(Word("a"), "a"), Pair(Word("b"), Word("a")))), Nothing()))
PAGE_TEXT = {
    "root": {"title": 0, "parts": [{"pairs": [[0, "a"], [1, 0]]}, {}]},
    "words": [["a"], ["b"]],
}


def test_what_has_no_table_stands_where_it_is_read() -> None:
    assert PAGES.encode(PAGE) == PAGE_TEXT
    assert PAGES.opened(PAGE_TEXT, Page) == (PAGE, ())
    assert PAGES.opened(PAGE_TEXT | {"words": [["a"], ["b"], ["c"]]}, Page) == (PAGE, ("words[2]",))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"words": [["a"], [""]]}, "words[1]: a word is empty"),
        ({"words": [["a"], [1]]}, "words[1].text: a text was expected, not 1"),
        ({"words": [["a"], []]}, "words[1]: a list of 1 was expected, not of 0"),
        ({"words": [["a"]]}, "parts[0].pairs[1].first: 1 is none of the words before it"),
        ({"words": {}}, "words: a list was expected"),
        ({"root": {"title": 0}}, "the text: there is no 'parts'"),
        ({"root": {"title": 0, "parts": [], "more": 1}}, "the text: 'more' means nothing"),
        ({"root": {"title": 0, "parts": [{"pairs": [[0]]}]}}, "parts[0].pairs[0]: a list of 2 was expected"),
    ],
)
def test_what_is_malformed_is_refused_with_its_place(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(Malformed) as refused:
        PAGES.decode(PAGE_TEXT | changed, Page)
    assert str(refused.value).startswith(says)


def test_a_number_that_might_be_a_row_or_none_is_no_field() -> None:
    with pytest.raises(TypeError, match="row or none"):
        PAGES.decode({"root": 0, "words": [["a"]]}, Word | int)
    with pytest.raises(TypeError, match="any of the tables"):
        PAGES.decode({"root": 0, "words": [["a"]]}, object)


def test_a_key_that_is_no_text_has_no_text() -> None:
    with pytest.raises(Uncodable, match="a key"):
        CODEC.encode({1: 2})
