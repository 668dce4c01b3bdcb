"""The C++ text of single operations; `vectors.h` and `functions.h` define what it calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from eqfuse.terms.dtypes import FLOAT8, LIMITS, STORED
from eqfuse.terms.functions import CASTS, DRAWN, ROUNDINGS
from eqfuse.terms.nodes import Call, Const, Expr, Fold, Local, walk
from eqfuse.terms.types import kinds
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.native.nodes import NotNative

KINDS: Mapping[str, str] = {
    "bool": "bool",
    **dict.fromkeys((*STORED, "i32"), "i32"),
    "i64": "i64",
    "f64": "f64",
}
"""The dtype that a value of a dtype is computed in; f32 for the others."""

SCALARS: Mapping[str, str] = {"bool": "bool", "i32": "int", "i64": "i64", "f64": "double", "f32": "float"}
VECTORS: Mapping[str, str] = {"bool": "I", "i32": "I", "i64": "L", "f64": "D", "f32": "F"}
ELEMENTS: Mapping[str, str] = {
    "bool": "u8",
    "i32": "int",
    "i64": "i64",
    "f64": "double",
    "f32": "float",
    "f16": "_Float16",
    "bf16": "u16",
    "f8e4m3": "u8",
    "f8e5m2": "u8",
    "i8": "i8",
    "u8": "u8",
    "i16": "i16",
}

_FUNCTIONS: Mapping[str, str] = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "sq": "square({0})",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "and": "both({0}, {1})",
    "or": "either({0}, {1})",
    "not": "negated({0})",
    "abs": "absolute({0})",
    "sign": "sign({0})",
    "relu": "relu({0})",
    "floordiv": "floor_quotient({0}, {1})",
    "mod": "floor_remainder({0}, {1})",
    "atan2": "angle({0}, {1})",
    "where": "choose({0}, {1}, {2})",
    "bitand": "({0} & {1})",
    "bitor": "({0} | {1})",
    "bitxor": "({0} ^ {1})",
    "lshift": "shifted_left({0}, {1})",
    "rshift": "shifted_right({0}, {1})",
    **{fn: f"{fn}({{0}}, {{1}})" for fn in ("lt", "le", "gt", "ge", "eq", "ne")},
}
_REALS: Mapping[str, str] = {
    "exp": "exponential",
    "exp2": "exponential2",
    "log": "logarithm",
    "log1p": "logarithm_of_1_and",
    "expm1": "exponential_less_1",
    "tanh": "tangent_hyperbolic",
    "sigmoid": "logistic",
    "erf": "error_function",
    "sqrt": "root",
    "rsqrt": "reciprocal_root",
    "silu": "silu",
    "gelu": "gelu",
    "sin": "sine",
    "cos": "cosine",
    "floor": "floor",
    "round": "nearest",
    "finite": "finite",
    "invertible": "invertible",
}


def kind(dtype: str) -> str:
    """The dtype that values of a dtype are computed in."""
    return KINDS.get(dtype, "f32")


def kept(dtype: str) -> str:
    """The dtype that memory of a thread keeps values of a dtype in, exactly. bfloat16 holds every float8."""
    return "bf16" if dtype == "bf16" or dtype in FLOAT8 else kind(dtype)


def type_of(dtype: str, wide: bool) -> str:
    return (VECTORS if wide else SCALARS)[kind(dtype)]


def number(value: float | bool, dtype: str) -> str:
    """A constant of a dtype."""
    match kind(dtype):
        case "bool":
            return "true" if value else "false"
        case "i32":
            return f"(int){int(value)}"
        case "i64":
            # The least integer has no literal of its own.
            return f"(i64)({int(value) + 1}LL - 1)" if value < 0 else f"(i64){int(value)}LL"
        case "f64":
            return _real(float(value), "", "__builtin_inf()")
        case _:
            return _real(float(value), "f", "INFINITY")


def _real(value: float, suffix: str, infinity: str) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return infinity if value > 0 else f"(-{infinity})"
    text = f"{value!r}{suffix}" if "e" in repr(value) or "." in repr(value) else f"{value!r}.{suffix}"
    return text if value >= 0 and math.copysign(1, value) > 0 else f"({text})"


def applied(fn: str, args: Sequence[str], dtypes: Sequence[str]) -> str:
    """An elementwise function of values computed in these dtypes."""
    if fn in CASTS:
        return rounded(converted(args[0], dtypes[0], fn), fn)
    if fn in ROUNDINGS:
        low, high = LIMITS[fn]
        return f"whole({args[0]}, {low}, {high})"
    if fn in DRAWN:
        return f"uniform({', '.join(args)})"
    if fn in _FUNCTIONS:
        return _FUNCTIONS[fn].format(*args)
    if fn not in _REALS or dtypes[0] in INTEGERS:
        raise NotNative(f"the function {fn} of {', '.join(dtypes)}")
    return f"{_REALS[fn]}({', '.join(args)})"


def converted(text: str, source: str, target: str) -> str:
    """A value of one dtype in another one, not yet rounded to a narrow one."""
    have, want = kind(source), kind(target)
    if have == want:
        return text
    if want == "bool" or (want in INTEGERS and have not in INTEGERS):
        raise NotNative(f"a conversion from {source} to {target}")
    return f"to_{want}({f'units({text})' if have == 'bool' else text})"


def rounded(text: str, dtype: str) -> str:
    return f"rounded_{dtype}({text})" if dtype in ("f16", "bf16", *FLOAT8) else text


def combination(
    fold: Fold, states: Sequence[str], others: Sequence[str], dtypes: Sequence[str], wide: bool
) -> list[str]:
    """The text of each variable of the union of two states, `dtypes` those of the variables."""
    variables = {f"{name}1": text for name, text in zip(fold.state, states, strict=True)}
    variables |= {f"{name}2": text for name, text in zip(fold.state, others, strict=True)}
    of = {
        f"{name}{side}": kind(dtype)
        for side in (1, 2)
        for name, dtype in zip(fold.state, dtypes, strict=True)
    }
    real = "f64" if "f64" in dtypes else "f32"
    known = kinds(fold.combine, of)
    found: dict[Expr, tuple[str, str]] = {}

    def given(expr: Expr, want: str) -> str:
        if isinstance(expr, Const):
            text = number(expr.value, want)
            return f"splat({text})" if wide else text
        return converted(*found[expr], want)

    def common(args: Sequence[Expr]) -> str:
        if any(known[arg] == "real" for arg in args):
            return real
        return "i64" if any(arg in found and found[arg][1] == "i64" for arg in args) else "i32"

    for node in walk(*fold.combine):
        match node:
            case Local(name, _):
                found[node] = variables[name], of[name]
            case Call("where", (condition, left, right)):
                want = "bool" if known[node] == "bool" else common((left, right))
                parts = [given(condition, "bool"), given(left, want), given(right, want)]
                found[node] = applied("where", parts, ["bool", want, want]), want
            case Call("and" | "or" | "not" as fn, args):
                found[node] = applied(fn, [given(a, "bool") for a in args], ["bool"] * len(args)), "bool"
            case Call(fn, args):
                want = real if known[node] == "real" else common(args)
                text = applied(fn, [given(a, want) for a in args], [want] * len(args))
                found[node] = text, "bool" if known[node] == "bool" else want
            case Const():
                continue
            case _:
                raise NotNative(f"a reduction whose combination has {type(node).__name__}")
    return [given(e, kind(dtype)) for e, dtype in zip(fold.combine, dtypes, strict=True)]
