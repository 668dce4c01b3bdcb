"""The facts that rules state and test: one row each, with what it means.

The signature of a relation names what it is about: lower-case letters are values; `X` is an axis; `P` an axis and the
part of it that is looked at (`A`, `B`, `AB`, or `ALL` of it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Relation:
    """`name(signature)`.

    meaning: what it says, with {0}, {1}, ... for its arguments; explanations print it.
    is_claim: whether it claims something about values, which can be tested on numbers; other facts say where the search
    is to look.
    """

    name: str
    signature: str
    meaning: str
    is_claim: bool = True
    sorts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        sorts: list[str] = []
        for name in self.signature.split(", "):
            sorts += ["E"] if name.islower() else ["String", "String"] if name == "P" else ["String"]
        object.__setattr__(self, "sorts", tuple(sorts))

    @property
    def is_along_axis(self) -> bool:
        """Whether it is about values along an axis, its last argument."""
        return self.sorts[-1] == "String"


_ROWS = (
    # Dependence on axes
    Relation("fixed", "e, X", "{0} does not vary with {1}"),
    Relation("varies", "e, X", "{0} varies with {1}", is_claim=False),
    Relation("plain", "e, X", "{0} has no reduction over {1} inside", is_claim=False),
    Relation("reduces", "e, X", "{0} has a reduction over {1} inside", is_claim=False),
    Relation("constant", "e", "{0} is a constant"),
    Relation("scalar", "e", "{0} is a run-time number", is_claim=False),
    # Sign, order and size
    Relation("positive", "e", "{0} > 0"),
    Relation("nonneg", "e", "{0} >= 0"),
    Relation("nonpos", "e", "{0} <= 0"),
    Relation("le", "e, f", "{0} <= {1}"),
    Relation("within", "e, m", "|{0}| <= {1}"),
    Relation("bounded", "e", "{0} is bounded"),
    Relation("exp_safe", "e", "exp({0}) cannot overflow", is_claim=False),
    Relation("unproved", "e", "nothing bounds {0}", is_claim=False),
    Relation("aggregate", "e", "{0} is a sum", is_claim=False),
    # Zeros, poles and masks
    Relation("vanishes_with", "n, m, X", "{0} is 0 only where {1} is 0 all along {2}"),
    Relation("pole_safe", "c, m, X", "{0} is infinite only where {1} is 0 all along {2}"),
    Relation("masked", "e, p", "{0} is made of what the mask {1} keeps"),
    # Ways to write a value
    Relation("want", "e, X", "{0} is part of a body", is_claim=False),
    Relation("factors", "e, c, m, X", "{0} = {1} * {2}, where {1} does not vary with {3}"),
    Relation("addends", "e, c, m, X", "{0} = {1} + {2}, where {1} does not vary with {3}"),
    Relation("spread", "e, f, g, X", "{0} = {1} + {2}"),
    Relation("shifted", "e, s, m, X", "{0} = exp({2}) * {1}, where {2} does not vary with {3}"),
    Relation("quotient", "q, a, n", "{0} = {1} / {2}"),
    Relation("count", "n, P", "{0} is the number of positions of {1}"),
    Relation("moment", "s, w, x, n, P", "{0} and {3} are the sums over {4} of {1} * {2} and of {1}"),
    Relation("written", "e", "{0} is written so in the program", is_claim=False),
    # Masks, read off their texts
    Relation("both", "q, r, s", "{0} holds where {1} and {2} do"),
    Relation("either", "q, r, s", "{0} holds where one of {1} and {2} does, which never hold together"),
    Relation(
        "selects", "q, f, r, g, X", "{0} holds at one position of {4} where {2} does, and {1} is {3} there"
    ),
    Relation("selects_one", "q, f, g, X", "{0} holds at one position of {3}, and {1} is {2} there"),
    Relation("renamed", "e, f", "{1} is {0} with another name for its axis"),
    Relation("totals", "e, f, X", "{1} is the sum of {0} over all positions of {2}"),
    # States of a merge
    Relation("state", "s", "{0} is a state", is_claim=False),
    Relation("step", "s, r", "{0} is the value of a state that had the value {1}", is_claim=False),
    Relation("factor", "f, h, X", "{1} is a factor of {0}", is_claim=False),
    Relation("reference_shift", "m, k, P", "a state has {0} shifted by {1}", is_claim=False),
    Relation(
        "parallel_axis",
        "e, s, d, c, k, P",
        "{0} = {1} + ({3} - {4}) * {2}, where {3} and {4} do not vary with {5}",
    ),
)

RELATIONS: Mapping[str, Relation] = {row.name: row for row in _ROWS}
