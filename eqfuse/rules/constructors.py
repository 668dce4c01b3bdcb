"""What terms of the e-graph are made of: functions of the language that rules know, and the rules' own.

    E ::= Num(text) | Leaf(text)          a number; what rules do not look into
        | Head(E, ...)                    a function of the table of functions, or Inv, Ratio, Delta
        | Cast(dtype, E)                  a written cast
        | Apply1(fn, E) | Apply2(fn, E, E)  any other function
        | Red(op, axis, part, E)          a reduction over a part of an axis

A difference is `a + -b`, a quotient `a * inv(b)`. `ratio(a, b)` is a/b and `delta(a, b)` is a - b, between the values
that a merge moves a state from and to; they are made total where they are run (rules/guards.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eqfuse.terms.functions import CONSTANT, FUNCTIONS, NONNEGATIVE, POSITIVE, SCALAR, Function


@dataclass(frozen=True)
class Constructor:
    """A constructor of terms, and what rules of facts are generated from.

    title: its name in names of rules. head: its egglog name. pattern: how rules write it, over `args`; `words` are its
    string arguments.
    separates: whether e = c * m or e = c + m under it can be told from what is inside.
    of_fixed: whether rules make it of fixed values alone, so that it never varies.
    order, holds, keeps: as in the table of functions.
    """

    title: str
    head: str
    pattern: str
    args: tuple[str, ...]
    words: int = 0
    separates: bool = False
    of_fixed: bool = False
    order: str = ""
    holds: Mapping[str, str] = field(default_factory=dict)
    keeps: Mapping[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Its arguments but for the condition of a choice."""
        return tuple(arg for arg in self.args if arg != "p")


_SEPARATES = ("neg", "exp", "log", "sqrt", "abs", "sq")
_VARIABLES = {"x": "a", "y": "b", "p": "p"}
"""Names of arguments in the table of functions, and in rules."""


def _of_function(row: Function) -> Constructor:
    args = tuple(_VARIABLES[arg] for arg in row.args)
    pattern = f"{row.name}({', '.join(args)})"
    if row.symbol:
        pattern = f"{args[0]} {row.symbol} {args[1]}" if len(args) == 2 else f"{row.symbol}{args[0]}"
    return Constructor(
        row.name,
        row.constructor,
        pattern,
        args,
        separates=row.name in _SEPARATES,
        order=row.order,
        holds=row.holds,
        keeps=row.keeps,
    )


_CAST = FUNCTIONS["f16"]

CONSTRUCTORS: tuple[Constructor, ...] = (
    *(_of_function(row) for row in FUNCTIONS.values() if row.constructor),
    Constructor(
        "inv",
        "Inv",
        "inv(a)",
        ("a",),
        separates=True,
        keeps={
            NONNEGATIVE: "1/a has the sign of a",
            POSITIVE: "1/a has the sign of a",
            CONSTANT: "of a constant",
            SCALAR: "of a run-time number",
        },
    ),
    Constructor(
        "cast",
        "Cast",
        "cast(T, a)",
        ("a",),
        words=1,
        separates=True,
        order=_CAST.order,
        holds=_CAST.holds,
        keeps=_CAST.keeps,
    ),
    Constructor(
        "ratio",
        "Ratio",
        "ratio(a, b)",
        ("a", "b"),
        of_fixed=True,
        keeps={NONNEGATIVE: "quotients of nonnegatives"},
    ),
    Constructor("delta", "Delta", "delta(a, b)", ("a", "b"), of_fixed=True),
    Constructor("apply1", "Apply1", "apply1(F, a)", ("a",), words=1),
    Constructor("apply2", "Apply2", "apply2(F, a, b)", ("a", "b"), words=1),
)

HEADS: Mapping[str, str] = {row.title: row.head for row in CONSTRUCTORS}
"""The egglog name of each constructor by the name that rules write."""


def _datatype() -> str:
    rows = (f"({row.head}{' String' * row.words}{' E' * len(row.args)})" for row in CONSTRUCTORS)
    return f"(datatype E\n  (Num String) (Leaf String) {' '.join(rows)}\n  (Red String String String E))\n"


DATATYPE = _datatype()
"""Terms as egglog declares them."""
