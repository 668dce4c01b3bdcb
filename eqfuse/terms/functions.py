"""The elementwise functions of the language: one row each, for every stage.

The parser, the printers, the types, the rules of the e-graph, the cost model, the scalar domains, the tile program's
writers and gradients read what they need from here. A new function is a row, and its name in each back end that has
one; one with a `definition` needs no more, in the finite field and in floats.

Texts of a row are expressions of the language over the row's `args`: `terms/definitions.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from eqfuse.terms.dtypes import FLOATS, STORED

Result = Literal["real", "integer", "like", "truth"]
"""`real` or an `integer` always; `like` the values: an integer where all of them are; `truth`: a truth value."""

Field = Literal["exact", "order", "exp", "log", "root", "logistic", "circle", "hash"]
"""What verification makes of a function in a finite field (see verify/field/domain.py): arithmetic of residues;
decided by the order of values; a homomorphism onto the squares, its inverse, a root; made of exponentials; a coordinate of a
point of a circle; a hash."""

NONNEGATIVE, NONPOSITIVE, POSITIVE = "nonneg", "nonpos", "positive"
BOUNDED, WITHIN, CONSTANT, SCALAR = "bounded", "within", "constant", "scalar"


@dataclass(frozen=True)
class Function:
    """One elementwise function.

    args: names of its arguments in the other texts. `p` is a truth value, others are numbers.
    derivative: the partial derivative by each argument; "" where the argument is a truth value or the result is one,
        where arguments are integers, and where it is stopped.
        Where left and right derivatives differ, a subgradient: the mean of both, as in torch. A cast counts as the
        identity, a step as 0.
    result: see `Result`.
    symbol: the operator that it is written as; "" for `name(args)`.
    of_integers: whether it takes integers alone.
    definition: the function in terms of others; "" for a primitive.
    notation: whether rules see the definition in place of the function.
    apart: whether derivatives alone tell it from its definition: a program that is run is read with that in its place.
    constructor: the e-graph's constructor for it; "" where rules know nothing of it but its arguments.
    order: for each argument whether the function grows ("+") or falls ("-") with it, else " "; "" where it does neither.
    holds: facts (rules/relations.py) that hold of every value, each with its reason.
    keeps: facts that hold of the value where they hold of every number among the arguments, each with its reason.
    zero_at_zero: 0 where all numbers among the arguments are 0.
    finite: finite where all arguments are, overflow apart.
    work: cost of one value in additions, about. What costs more than 1 is worth keeping rather than computing again,
        and runs on a GPU's special function units.
    field: see `Field`. parity: of what is hashed, whether f(-x) is f(x) ("even") or -f(x) ("odd").
    numpy, torch, triton: its name there; "" where a back end composes it.
    """

    name: str
    args: tuple[str, ...]
    derivative: tuple[str, ...]
    result: Result = "real"
    symbol: str = ""
    of_integers: bool = False
    definition: str = ""
    notation: bool = False
    apart: bool = False
    constructor: str = ""
    order: str = ""
    holds: Mapping[str, str] = field(default_factory=dict)
    keeps: Mapping[str, str] = field(default_factory=dict)
    zero_at_zero: bool = False
    finite: bool = False
    work: int = 1
    field: Field = "exact"
    parity: Literal["", "odd", "even"] = ""
    numpy: str = ""
    torch: str = ""
    triton: str = ""

    @property
    def is_comparison(self) -> bool:
        """Whether two numbers are compared."""
        return self.result == "truth" and self.args == ("x", "y")


_X, _XY = ("x",), ("x", "y")


def _comparison(name: str, symbol: str, numpy: str) -> Function:
    return Function(name, _XY, ("", ""), "truth", symbol, field="order", numpy=numpy)


def _rounding(dtype: str) -> Function:
    """Rounding to an integer that a dtype has: half to even, and beyond its ends the end; NaN is 0."""
    return Function(
        dtype,
        _X,
        ("0",),
        "integer",
        order="+",
        keeps={NONNEGATIVE: "rounding keeps the sign"}
        | ({} if dtype == "u8" else {NONPOSITIVE: "rounding keeps the sign"}),
        holds={NONNEGATIVE: "no number of the dtype is below 0"} if dtype == "u8" else {},
        zero_at_zero=True,
        finite=True,
        work=2,
        field="hash",
    )


def _bitwise(name: str, symbol: str, numpy: str) -> Function:
    """A function of integers as 64 bits, the sign in two's complement."""
    return Function(
        name,
        _XY,
        ("", ""),
        "like",
        of_integers=True,
        symbol=symbol,
        zero_at_zero=True,
        finite=True,
        field="hash",
        numpy=numpy,
    )


def _cast(dtype: str) -> Function:
    """Rounding: the identity to the algebra."""
    return Function(
        dtype,
        _X,
        ("1",),
        order="+",
        keeps={
            NONNEGATIVE: "rounding keeps the sign",
            NONPOSITIVE: "rounding keeps the sign",
            BOUNDED: "same size",
        },
        zero_at_zero=True,
        finite=True,
    )


def _limit(name: str, extreme: str, holds: str, fails: str, numpy: str) -> Function:
    """An extreme of a number and a limit, whose derivative where both are equal is that of the number."""
    return Function(
        name,
        _XY,
        (f"where(x {holds} y, 1, 0)", f"where(x {fails} y, 1, 0)"),
        "like",
        definition=f"{extreme}(x, y)",
        notation=True,
        apart=True,
        order="++",
        zero_at_zero=True,
        finite=True,
        field="order",
        numpy=numpy,
    )


_ROWS = (
    # Arithmetic
    Function(
        "add",
        _XY,
        ("1", "1"),
        "like",
        "+",
        constructor="Add",
        order="++",
        keeps={NONNEGATIVE: "sums of nonnegatives", NONPOSITIVE: "a sum of nonpositives"},
        zero_at_zero=True,
        finite=True,
        numpy="add",
        torch="torch.add",
    ),
    Function(
        "sub",
        _XY,
        ("1", "-1"),
        "like",
        "-",
        definition="x + -y",
        notation=True,
        order="+-",
        zero_at_zero=True,
        finite=True,
        numpy="subtract",
        torch="torch.sub",
    ),
    Function(
        "mul",
        _XY,
        ("y", "x"),
        "like",
        "*",
        constructor="Mul",
        keeps={
            NONNEGATIVE: "products of nonnegatives",
            POSITIVE: "products of positives",
            CONSTANT: "of constants",
            BOUNDED: "a product of bounded values",
        },
        zero_at_zero=True,
        finite=True,
        numpy="multiply",
        torch="torch.mul",
    ),
    Function(
        "div",
        _XY,
        ("1 / y", "-x / sq(y)"),
        symbol="/",
        work=4,
        numpy="divide",
        torch="torch.div",
    ),
    Function(
        "floordiv",
        _XY,
        ("0", "0"),
        "like",
        "//",
        finite=True,
        work=4,
        field="hash",
        numpy="floor_divide",
        torch="torch.floor_divide",
    ),
    Function(
        "mod",
        _XY,
        ("1", "-floor(x / y)"),
        "like",
        "%",
        finite=True,
        work=4,
        field="hash",
        numpy="mod",
        torch="torch.remainder",
    ),
    Function(
        "neg",
        _X,
        ("-1",),
        "like",
        "-",
        constructor="Neg",
        order="-",
        keeps={CONSTANT: "of a constant", BOUNDED: "same size", WITHIN: "same size"},
        zero_at_zero=True,
        finite=True,
        numpy="negative",
        torch="torch.neg",
    ),
    Function(
        "maximum",
        _XY,
        ("where(x > y, 1, where(x == y, 0.5, 0))", "where(x < y, 1, where(x == y, 0.5, 0))"),
        "like",
        constructor="Max",
        order="++",
        zero_at_zero=True,
        finite=True,
        field="order",
        numpy="maximum",
        torch="torch.maximum",
    ),
    Function(
        "minimum",
        _XY,
        ("where(x < y, 1, where(x == y, 0.5, 0))", "where(x > y, 1, where(x == y, 0.5, 0))"),
        "like",
        constructor="Min",
        order="++",
        keeps={NONNEGATIVE: "min(a, b) is one of them"},
        zero_at_zero=True,
        finite=True,
        field="order",
        numpy="minimum",
        torch="torch.minimum",
    ),
    # Comparisons and logic
    _comparison("lt", "<", "less"),
    _comparison("le", "<=", "less_equal"),
    _comparison("gt", ">", "greater"),
    _comparison("ge", ">=", "greater_equal"),
    _comparison("eq", "==", "equal"),
    _comparison("ne", "!=", "not_equal"),
    Function("and", ("p", "q"), ("", ""), "truth", "and", field="order", numpy="logical_and"),
    Function("or", ("p", "q"), ("", ""), "truth", "or", field="order", numpy="logical_or"),
    Function("not", ("p",), ("",), "truth", "not", field="order", numpy="logical_not"),
    # Bits of integers
    _bitwise("bitand", "&", "bitwise_and"),
    _bitwise("bitor", "|", "bitwise_or"),
    _bitwise("bitxor", "^", "bitwise_xor"),
    _bitwise("lshift", "<<", ""),
    _bitwise("rshift", ">>", ""),
    # Random numbers
    Function(
        "rand",
        ("seed", "position"),
        ("", ""),
        of_integers=True,
        finite=True,
        work=40,
        field="hash",
    ),
    # Functions of one number
    Function(
        "abs",
        _X,
        ("sign(x)",),
        "like",
        constructor="Abs",
        holds={NONNEGATIVE: "|a| >= 0"},
        keeps={BOUNDED: "same size", WITHIN: "same size"},
        zero_at_zero=True,
        finite=True,
        field="order",
        numpy="abs",
        torch="torch.abs",
        triton="tl.abs",
    ),
    Function(
        "sign",
        _X,
        ("0",),
        "like",
        order="+",
        zero_at_zero=True,
        finite=True,
        field="order",
        torch="torch.sign",
    ),
    Function(
        "floor",
        _X,
        ("0",),
        order="+",
        zero_at_zero=True,
        finite=True,
        field="hash",
        numpy="floor",
        torch="torch.floor",
    ),
    Function(
        "round",
        _X,
        ("0",),
        order="+",
        zero_at_zero=True,
        finite=True,
        field="hash",
        numpy="rint",
        torch="torch.round",
    ),
    Function(
        "sq",
        _X,
        ("2 * x",),
        "like",
        definition="x * x",
        constructor="Sq",
        holds={NONNEGATIVE: "a^2 >= 0"},
        keeps={BOUNDED: "a square of a bounded value"},
        zero_at_zero=True,
        finite=True,
        numpy="square",
    ),
    Function(
        "sqrt",
        _X,
        ("0.5 / sqrt(x)",),
        constructor="Sqrt",
        order="+",
        holds={NONNEGATIVE: "the principal root"},
        keeps={POSITIVE: "a root has the sign of a"},
        zero_at_zero=True,
        work=6,
        field="root",
        numpy="sqrt",
        torch="torch.sqrt",
    ),
    Function(
        "rsqrt",
        _X,
        ("-0.5 * rsqrt(x) / x",),
        definition="1 / sqrt(x)",
        notation=True,
        order="-",
        work=6,
        field="root",
        torch="torch.rsqrt",
    ),
    Function(
        "exp",
        _X,
        ("exp(x)",),
        constructor="Exp",
        order="+",
        holds={NONNEGATIVE: "e^a > 0"},
        finite=True,
        work=8,
        field="exp",
        numpy="exp",
        torch="torch.exp",
        triton="tl.exp",
    ),
    Function(
        "log",
        _X,
        ("1 / x",),
        constructor="Log",
        order="+",
        work=8,
        field="log",
        numpy="log",
        torch="torch.log",
        triton="tl.log",
    ),
    # Kept apart from their definitions, which lose the digits of x near 0.
    Function(
        "log1p",
        _X,
        ("1 / (1 + x)",),
        definition="log(1 + x)",
        order="+",
        zero_at_zero=True,
        work=10,
        field="log",
        numpy="log1p",
        torch="torch.log1p",
    ),
    Function(
        "expm1",
        _X,
        ("exp(x)",),
        definition="exp(x) - 1",
        order="+",
        zero_at_zero=True,
        finite=True,
        work=10,
        field="exp",
        numpy="expm1",
        torch="torch.expm1",
    ),
    Function(
        "tanh",
        _X,
        ("1 - sq(tanh(x))",),
        order="+",
        zero_at_zero=True,
        finite=True,
        work=10,
        field="logistic",
        parity="odd",
        numpy="tanh",
        torch="torch.tanh",
    ),
    Function(
        "sigmoid",
        _X,
        ("sigmoid(x) * (1 - sigmoid(x))",),
        definition="1 / (1 + exp(-x))",
        order="+",
        finite=True,
        work=10,
        field="logistic",
        torch="torch.sigmoid",
    ),
    Function(
        "relu",
        _X,
        ("where(x > 0, 1, 0)",),
        "like",
        definition="max(x, 0)",
        notation=True,
        order="+",
        zero_at_zero=True,
        finite=True,
        field="order",
    ),
    Function(
        "gelu",
        _X,
        ("0.5 * (1 + erf(x * sqrt(0.5))) + x * exp(-0.5 * sq(x)) / sqrt(2 * pi)",),
        definition="x * ((1 + erf(x * sqrt(0.5))) / 2)",
        zero_at_zero=True,
        finite=True,
        work=10,
        field="hash",
    ),
    Function(
        "silu",
        _X,
        ("sigmoid(x) * (1 + x * (1 - sigmoid(x)))",),
        definition="x * sigmoid(x)",
        zero_at_zero=True,
        finite=True,
        work=10,
        field="logistic",
        torch="torch.nn.functional.silu",
    ),
    Function(
        "erf",
        _X,
        ("2 * exp(-sq(x)) / sqrt(pi)",),
        order="+",
        zero_at_zero=True,
        finite=True,
        work=10,
        field="hash",
        parity="odd",
        torch="torch.erf",
        triton="tl.erf",
    ),
    Function(
        "sin",
        _X,
        ("cos(x)",),
        zero_at_zero=True,
        finite=True,
        work=10,
        field="circle",
        parity="odd",
        numpy="sin",
        torch="torch.sin",
        triton="tl.sin",
    ),
    Function(
        "cos",
        _X,
        ("-sin(x)",),
        finite=True,
        work=10,
        field="circle",
        parity="even",
        numpy="cos",
        torch="torch.cos",
        triton="tl.cos",
    ),
    Function(
        "atan2",
        ("y", "x"),
        ("x / (sq(x) + sq(y))", "-y / (sq(x) + sq(y))"),
        zero_at_zero=True,
        finite=True,
        work=10,
        field="hash",
        numpy="arctan2",
        torch="torch.atan2",
    ),
    # Known to derivatives alone: the value, as a constant; a root whose derivative at 0 is 0, as a norm has it; limits at which
    # the derivative is that of the number, as a clamp has it.
    Function(
        "stop",
        _X,
        ("",),
        "like",
        definition="x",
        notation=True,
        apart=True,
        order="+",
        zero_at_zero=True,
        finite=True,
        numpy="positive",
    ),
    Function(
        "root",
        _X,
        ("where(x == 0, 0, 0.5 / root(x))",),
        definition="sqrt(x)",
        notation=True,
        apart=True,
        order="+",
        zero_at_zero=True,
        work=6,
        field="root",
    ),
    _limit("at_least", "max", ">=", "<", "maximum"),
    _limit("at_most", "min", "<=", ">", "minimum"),
    # Rounding
    *map(_cast, FLOATS),
    *map(_rounding, STORED),
    # Choice
    Function(
        "where",
        ("p", "x", "y"),
        ("", "where(p, 1, 0)", "where(p, 0, 1)"),
        "like",
        constructor="Where",
        keeps={
            NONNEGATIVE: "either branch",
            NONPOSITIVE: "either branch",
            BOUNDED: "either branch",
        },
        field="order",
        numpy="where",
        torch="torch.where",
        triton="tl.where",
    ),
    # Repairs of merges: `finite` maps the infinities to 0, `invertible` maps 0 and the infinities to 1; both keep NaN.
    Function("finite", _X, ("1",), constructor="Finite", zero_at_zero=True, finite=True, field="order"),
    Function("invertible", _X, ("1",), constructor="Invertible", finite=True, field="order"),
)

FUNCTIONS: Mapping[str, Function] = {row.name: row for row in _ROWS}
"""Every elementwise function by its name in `Call`."""

CASTS = FLOATS
"""Floating dtypes, which can be written as functions; the cast `f16(x)` is `Call("f16", (x,))`."""

ROUNDINGS = STORED
"""dtypes of integers that can be written as functions. Unlike casts they are never the identity to the algebra."""

ARITY: Mapping[str, int] = {row.name: len(row.args) for row in _ROWS}
"""Number of arguments of every elementwise function."""

COMPARISONS = tuple(row.name for row in _ROWS if row.is_comparison)
LOGICAL = ("and", "or", "not")
CIRCULAR = frozenset(row.name for row in _ROWS if row.field == "circle")
"""Coordinates of points of a circle: made of the exponential of i times the argument."""

AMONG_INTEGERS = tuple(row.name for row in _ROWS if row.result == "like")
"""Functions whose result is an integer where all numbers among the arguments are."""

OF_INTEGERS = tuple(row.name for row in _ROWS if row.of_integers)
"""Functions that take integers alone."""

DRAWN = ("rand",)
"""Functions of integers that give reals: random numbers."""

ON_BITS = tuple(row.name for row in _ROWS if row.of_integers and row.result == "like")
"""Functions of integers as bits."""

BITWISE: Mapping[str, str] = {"and": "bitand", "or": "bitor", "not": "bitxor"}
"""What `&`, `|` and `~` (with -1) are where they stand between integers."""

APART = tuple(row.name for row in _ROWS if row.apart)
"""Functions that derivatives alone tell from their definitions."""

OPERATORS: Mapping[str, str] = {row.name: row.symbol for row in _ROWS if row.symbol and len(row.args) == 2}
"""Functions that are written between their arguments."""

CALLABLE = tuple(row.name for row in _ROWS if not row.symbol)
"""Functions that can be called by name."""

VARIADIC: Mapping[str, str] = {"max": "maximum", "min": "minimum"}
"""Calls of two or more arguments, and the function that folds them."""

ABBREVIATIONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "clip": (("x", "low", "high"), "at_most(at_least(x, low), high)"),
    "atan": (("x",), "atan2(x, 1)"),
    "asin": (("x",), "atan2(x, sqrt((1 - x) * (1 + x)))"),
    "acos": (("x",), "atan2(sqrt((1 - x) * (1 + x)), x)"),
    "softplus": (("x",), "max(x, 0) + log1p(exp(-abs(x)))"),
}
"""Calls that are read as what they stand for: the names of their arguments, and the text."""

CONSTANTS: Mapping[str, float] = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
"""Numbers that have names."""

SPECIAL = frozenset(row.name for row in _ROWS if row.work > 1 and row.result == "real")
"""Functions that a GPU's special function units compute, or several instructions."""
