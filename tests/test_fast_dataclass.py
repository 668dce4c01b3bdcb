"""Dataclasses of `eqfuse.fast_dataclass` beside those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any, ClassVar

import pytest

from eqfuse import fast_dataclass
from eqfuse.hashed import Hashed, hash_of


def _classes(dataclass: Any) -> list[tuple[type, list[dict[str, Any]]]]:
    @dataclass(frozen=True)
    class Frozen:
        """A docstring."""

        a: int
        b: tuple[str, ...] = ()
        c: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
        d: int = field(init=False, default=4)
        kept: ClassVar[int] = 3

        def __post_init__(self) -> None:
            object.__setattr__(self, "seen", True)

    @dataclass
    class Open:
        a: float
        b: list[int] = field(default_factory=list)
        c: str = field(init=False, default="c", repr=False)

    @dataclass(frozen=True, repr=False)
    class Own:
        a: int = 1

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @dataclass(frozen=True)
    class Kept(Hashed):
        a: int
        b: int = 2
        __hash__ = hash_of

    @dataclass(frozen=True)
    class Empty:
        pass

    given: list[list[dict[str, Any]]] = [
        [{"a": 1}, {"a": 1, "c": {"x": 1}}, {"a": 2, "b": ("x",)}],
        [{"a": 1.0}, {"a": float("nan"), "b": [3]}],
        [{}, {"a": 2}],
        [{"a": 1}, {"a": 1, "b": 3}],
        [{}],
    ]
    return list(zip([Frozen, Open, Own, Kept, Empty], given, strict=True))


PAIRS = [
    (ours, theirs, given)
    for (ours, given), (theirs, _) in zip(
        _classes(fast_dataclass.dataclass), _classes(dataclasses.dataclass), strict=True
    )
]


@pytest.mark.parametrize(("ours", "theirs", "given"), PAIRS, ids=[pair[0].__name__ for pair in PAIRS])
def test_they_are_as_those_of_the_standard_library(ours: Any, theirs: Any, given: Any) -> None:
    mine, others = ([cls(**each) for each in given] for cls in (ours, theirs))
    assert [[a == b for a in mine] for b in mine] == [[a == b for a in others] for b in others]
    assert not any(a == b for a, b in zip(mine, others, strict=True) if ours.__name__ != "Own")
    for a, b in zip(mine, others, strict=True):
        assert ours.__name__ == "Own" or repr(a) == repr(b)
        assert vars(a).keys() == vars(b).keys()
        assert vars(dataclasses.replace(a)).keys() == vars(a).keys()
        assert copy.deepcopy(a).__dict__.keys() == a.__dict__.keys()
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    assert ours.__match_args__ == theirs.__match_args__
    if theirs.__hash__ is None:
        assert ours.__hash__ is None
    else:
        assert list(map(hash, mine)) == list(map(hash, others))


def test_frozen_ones_are_not_written_to() -> None:
    frozen = PAIRS[0][0](1)
    for change in (
        lambda: setattr(frozen, "a", 2),
        lambda: delattr(frozen, "a"),
        lambda: setattr(frozen, "z", 2),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert frozen.seen and frozen.a == 1 and frozen.d == 4
    for wrong in ({}, {"a": 1, "z": 2}, {"a": 1, "d": 2}):
        with pytest.raises(TypeError):
            PAIRS[0][0](**wrong)


def test_defaults_are_made_anew_for_each() -> None:
    made = PAIRS[1][0]
    first, second = made(1.0), made(1.0)
    first.b.append(1)
    assert second.b == [] and first != second


@fast_dataclass.dataclass(frozen=True)
class Pickled:
    a: int
    b: tuple[int, ...] = (1, 2)


def test_they_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Pickled(3))) == Pickled(3)
