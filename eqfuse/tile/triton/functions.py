"""Elementwise functions and folds as Triton expressions.

Texts carry the precedence of their outermost operator, so parentheses appear only where Python
needs them. What is too long for one expression, or reads its operand twice, is a small
`@triton.jit` helper; a module prints the helpers that it uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eqfuse.terms.dtypes import FLOAT8, LIMITS
from eqfuse.terms.functions import DRAWN, FUNCTIONS, ROUNDINGS
from eqfuse.tile.dtypes import INTEGERS, LARGEST, LEAST_NORMAL
from eqfuse.tile.nodes import Division

COMPARE, OR, XOR, AND, SHIFT, ADD, MUL, UNARY, ATOM = range(9)
"""Precedences of Python's operators, loosest first."""

TRITON_DTYPES: Mapping[str, str] = {
    "f8e4m3": "tl.float8e4nv",
    "f8e5m2": "tl.float8e5",
    "f16": "tl.float16",
    "bf16": "tl.bfloat16",
    "f32": "tl.float32",
    "f64": "tl.float64",
    "i8": "tl.int8",
    "u8": "tl.uint8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "bool": "tl.int1",
}

IRRATIONAL = {"log2_e": "1.4426950408889634", "ln_2": "0.6931471805599453"}


@dataclass(frozen=True)
class Text:
    """A Python expression and the precedence of its outermost operator."""

    code: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The expression where an operator of this precedence binds at least as tightly."""
        return self.code if self.level >= level else f"({self.code})"


def number(value: float | bool) -> Text:
    """A literal; the infinities and NaN have none and are spelt as conversions."""
    if isinstance(value, float) and not math.isfinite(value):
        return Text(f'float("{value}")')
    return Text(repr(value), ATOM if value >= 0 else UNARY)


def exact(value: Text, dtype: str) -> Text:
    """An operand of a function in this dtype. Triton takes a literal for a float32 where that has it as a normal number or an
    infinity, else for a float64, unless an operator joins it to a tensor."""
    if not _LITERAL.fullmatch(value.code) or dtype in INTEGERS:
        return value
    return value if dtype != "f64" and _is_float32(_number(value)) else _as_scalar(value, dtype)


def _number(literal: Text) -> float:
    return float(literal.code.removeprefix('float("').removesuffix('")'))


def _is_float32(number: float) -> bool:
    return number == 0 or not math.isfinite(number) or LEAST_NORMAL <= abs(number) <= LARGEST


def _with_literal(fn: str, left: Text, right: Text, dtype: str) -> Text:
    """The left operand of two literals, which Python joins to one: of a dtype, where Triton would take that for another."""
    a, b = _number(left), _number(right)
    found = {"add": a + b, "sub": a - b, "mul": a * b}.get(fn, a / b if fn == "div" and b else 0.0)
    is_float32 = all(map(_is_float32, (a, b, found)))
    return left if dtype != "f64" and is_float32 else _as_scalar(left, dtype)


_LITERAL = re.compile(r'-?\d[\d.e+-]*|float\("-?\w+"\)')


_INFIX = {
    "add": ("+", ADD, MUL),
    "sub": ("-", ADD, MUL),
    "mul": ("*", MUL, UNARY),
    "div": ("/", MUL, UNARY),
    "lt": ("<", COMPARE, OR),
    "le": ("<=", COMPARE, OR),
    "gt": (">", COMPARE, OR),
    "ge": (">=", COMPARE, OR),
    "eq": ("==", COMPARE, OR),
    "ne": ("!=", COMPARE, OR),
    "and": ("&", AND, SHIFT),
    "or": ("|", OR, XOR),
    "bitand": ("&", AND, SHIFT),
    "bitor": ("|", OR, XOR),
    "bitxor": ("^", XOR, AND),
    "lshift": ("<<", SHIFT, ADD),
    "rshift": (">>", SHIFT, ADD),
}
"""Symbol, precedence, and the precedence that the right operand needs: tighter, for order is rounding."""

_PREFIX = {"neg": "-", "not": "~"}

_CALLS = {"exp2": "tl.exp2", **{row.name: row.triton for row in FUNCTIONS.values() if row.triton}}


def infix(fn: str, left: Text, right: Text) -> Text:
    """`left fn right` for the functions that Python has an operator for."""
    symbol, level, right_level = _INFIX[fn]
    left_level = OR if level == COMPARE else level
    return Text(f"{left.at(left_level)} {symbol} {right.at(right_level)}", level)


def call(fn: str, *args: Text | str) -> Text:
    return Text(f"{fn}({', '.join(a.code if isinstance(a, Text) else a for a in args)})")


def convert(value: Text, dtype: str, *, scalar: bool, use: Callable[[str], str]) -> Text:
    """`value` in another dtype, rounded half to even; float8 saturates."""
    if dtype in FLOAT8:
        return call(use(f"to_{dtype}"), value)
    if scalar:  # may be a plain number, which has no methods
        return call("tl.cast", value, TRITON_DTYPES[dtype])
    return Text(f"{value.at(ATOM)}.to({TRITON_DTYPES[dtype]})")


def elementwise(
    fn: str,
    args: Sequence[Text],
    dtype: str,
    *,
    division: Division,
    use: Callable[[str], str],
) -> Text:
    """An elementwise function as an expression.

    `dtype` is what it computes in, `division` what is known of the operands of a division of integers, `use`
    registers a helper and returns its name.
    """
    integer = dtype in INTEGERS
    if fn in ("lshift", "rshift") and not _is_count(args[1]):
        whole = (_as_scalar(arg, dtype) for arg in args)
        return call(use(fn), *whole)
    match fn:
        case _ if fn in DRAWN:
            drawn = call(use("rand"), *(_as_scalar(arg, "i64") for arg in args))
            return call("tl.cast", drawn, "tl.float64") if dtype == "f64" else drawn
        case _ if fn in ROUNDINGS:
            low, high = LIMITS[fn]
            if integer:
                return call("tl.minimum", call("tl.maximum", args[0], str(low)), str(high))
            use("round")
            return call(use("whole"), args[0], str(float(low)), str(float(high)))
        case _ if fn in _INFIX:
            joined = any(not _LITERAL.fullmatch(arg.code) for arg in args)
            first = args[0] if joined or integer else _with_literal(fn, args[0], args[1], dtype)
            return infix(fn, first, args[1])
        case _ if fn in _PREFIX:
            return Text(f"{_PREFIX[fn]}{args[0].at(UNARY)}", UNARY)
    if not integer and fn != "where" and all(_LITERAL.fullmatch(arg.code) for arg in args):
        args = [_as_scalar(args[0], dtype), *args[1:]]  # Python would compute what no float32 may be
    args = [exact(arg, dtype) for arg in args]
    match fn:
        case "floordiv" | "mod" if integer and division == "natural":
            symbol = "//" if fn == "floordiv" else "%"
            return Text(f"{args[0].at(MUL)} {symbol} {args[1].at(UNARY)}", MUL)
        case "floordiv" | "mod" if integer:
            return call(use(f"{fn}_int" if division == "positive" else f"{fn}_any"), *args)
        case "floordiv" | "mod":
            return call(use(f"{fn}_real"), *args)
        case "maximum" | "minimum" if integer:
            return call(f"tl.{fn}", *args)
        case "maximum" | "minimum":
            return call(use(fn), *args)
        case "relu" if integer:
            return call("tl.maximum", args[0], "0")
        case "relu":
            return call(use("maximum"), args[0], "0.0")
        case "sq" if args[0].code.isidentifier():
            return Text(f"{args[0].code} * {args[0].code}", MUL)
        case "sqrt":
            return call("tl.sqrt" if dtype == "f64" else "tl.sqrt_rn", *args)
        case "rsqrt" if dtype == "f64":
            return call("tl.rsqrt", *args)
        case "where" if integer and all(_LITERAL.fullmatch(arg.code) for arg in args[1:]):
            return call("tl.where", args[0], _as_scalar(args[1], dtype), args[2])
        case "where":
            return call("tl.where", *args)
        case "sign" if integer:
            return call(use("sign_int"), *args)
        case "tanh" if dtype == "f64":
            return call(use("tanh_f64"), *args)
        case _ if fn in _CALLS:
            return call(_CALLS[fn], *args)
        case _:
            return call(use(fn), *args)


def _as_scalar(value: Text, dtype: str) -> Text:
    """An operand of this dtype, which a literal has not."""
    return call("tl.full", "()", value, TRITON_DTYPES[dtype]) if _LITERAL.fullmatch(value.code) else value


def _is_count(count: Text) -> bool:
    """Whether a number of bits is known to be one that 32 bits have."""
    return count.code.isdigit() and int(count.code) < 32


def fold(op: str, value: Text, position: int, dtype: str, use: Callable[[str], str]) -> Text:
    """A reduction of a tile along one of its dims. Maxima and minima of reals propagate NaN."""
    if op == "sum" or (op in ("max", "min") and dtype in INTEGERS):
        return call(f"tl.{op}", value, str(position))
    combine = {"max": "maximum", "min": "minimum", "prod": "product"}[op]
    return call("tl.reduce", value, str(position), use(combine))


HELPERS: Mapping[str, str] = {
    "maximum": """
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "minimum": """
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "product": """
def product(a, b):
    return a * b
""",
    "sq": """
def sq(x):
    return x * x
""",
    "finite": """
def finite(x):
    # Infinities become 0, NaN stays.
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)
""",
    "invertible": """
def invertible(x):
    # 0 and the infinities become 1, NaN stays.
    return tl.where((x == 0.0) | (tl.abs(x) == float("inf")), 1.0, x)
""",
    "sign": """
def sign(x):
    # 0 of NaN, as torch has it; of the dtype of x.
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, tl.where(x == x, x, 0.0)))
""",
    "sign_int": """
def sign_int(x):
    # Of the dtype of x, as numbers alone would not be.
    return tl.where(x == 0, x, tl.where(x > 0, 1 + 0 * x, -1 + 0 * x))
""",
    "round": """
def round_half_even(x):
    below = tl.floor(x)
    rest = x - below
    odd = below - 2.0 * tl.floor(0.5 * below) == 1.0
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)
""",
    "floordiv_int": """
def floordiv_int(a, b):
    # Triton's integer division rounds towards zero; b > 0.
    quotient = a // b
    return tl.where(quotient * b > a, quotient - 1, quotient)
""",
    "mod_int": """
def mod_int(a, b):
    # Triton's remainder has the sign of a; b > 0.
    remainder = a % b
    return tl.where(remainder < 0, remainder + b, remainder)
""",
    "floordiv_any": """
def floordiv_any(a, b):
    # Rounded down, whatever the signs; 0 where b is 0.
    by = tl.where(b == 0, 1, b)
    quotient = a // by
    above = (a % by != 0) & ((a < 0) != (by < 0))
    return tl.where(b == 0, 0, tl.where(above, quotient - 1, quotient))
""",
    "mod_any": """
def mod_any(a, b):
    # Of the sign of b; 0 where b is 0.
    by = tl.where(b == 0, 1, b)
    remainder = a % by
    above = (remainder != 0) & ((remainder < 0) != (by < 0))
    return tl.where(b == 0, 0, tl.where(above, remainder + by, remainder))
""",
    "floor": """
def floor(x):
    # The GPU's own takes a denormal number for 0.
    below = tl.floor(x)
    return tl.where((below == 0.0) & (x < 0.0), -1.0, below)
""",
    "floordiv_real": """
def floordiv_real(a, b):
    # Rounded down, as torch and numpy do it: a rounded quotient may be the integer above.
    rest = tl.where(tl.abs(a) < tl.abs(b), a, libdevice.fmod(a, b))
    if rest.dtype == tl.float64:
        plain, quotient = a / b, (a - rest) / b
    else:
        plain, quotient = tl.div_rn(a, b), tl.div_rn(a - rest, b)
    quotient = tl.where((rest != 0.0) & ((rest < 0.0) != (b < 0.0)), quotient - 1.0, quotient)
    below = tl.floor(quotient)
    return tl.where(b == 0.0, plain, tl.where(quotient - below > 0.5, below + 1.0, below))
""",
    "mod_real": """
def mod_real(a, b):
    # Exact, of the sign of b. The GPU's fmod takes a denormal number for 0.
    rest = tl.where(tl.abs(a) < tl.abs(b), a, libdevice.fmod(a, b))
    return tl.where((rest != 0.0) & ((rest < 0.0) != (b < 0.0)), rest + b, rest)
""",
    "rsqrt": """
def rsqrt(x):
    # The GPU's own takes a denormal number for 0.
    small = x < 1.1754943508222875e-38
    return tl.rsqrt(tl.where(small, x * 16777216.0, x)) * tl.where(small, 4096.0, 1.0)
""",
    "sigmoid": """
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
""",
    "silu": """
def silu(x):
    return x / (1.0 + tl.exp(-x))
""",
    "gelu": """
def gelu(x):
    return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
""",
    "log1p": """
def log1p(x):
    return libdevice.log1p(x)
""",
    "expm1": """
def expm1(x):
    return libdevice.expm1(x)
""",
    "atan2": """
def atan2(y, x):
    return libdevice.atan2(y, x)
""",
    "tanh": """
def tanh(x):
    # 1 - 2 / (1 + exp(2 x)), the division as a root of a square: one instruction where a quotient takes eight.
    # Near 0 that would cancel, so there an odd polynomial takes over: the best one to x**9 below 0.5.
    d = 1.0 + tl.exp2(x * 2.8853900817779268)
    s = x * x
    tail = s * (0.1332598744771635 + s * (-0.05305296073958027 + s * 0.017257011546749024))
    series = x + x * (s * (-0.3333314838499458 + tail))
    return tl.where(s < 0.25, series, 1.0 - 2.0 * tl.rsqrt(d * d))
""",
    "tanh_f64": """
def tanh_f64(x):
    # tanh(a) = -m / (2 + m) with m = exp(-2a) - 1; (e - 1) / log(e) cancels the rounding of e.
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    m = tl.where(e == 1.0, -2.0 * a, tl.where(e < 1e-8, e - 1.0, (e - 1.0) * (-2.0 * a) / tl.log(e)))
    return tl.where(x < 0.0, m / (2.0 + m), -m / (2.0 + m))
""",
    "to_f8e4m3": """
def to_f8e4m3(x):
    # Beyond the largest number is that number, on every target, as in torch.
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
""",
    "to_f8e5m2": """
def to_f8e5m2(x):
    # Beyond the largest number is that number, on every target.
    return tl.clamp(x, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)
""",
    "whole": """
def whole(x, low, high):
    # Rounded half to even, between the ends; NaN is 0.
    return round_half_even(tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), low), high)).to(tl.int32)
""",
    "lshift": """
def shifted_left(x, by):
    # 0 by a count below 0 or beyond all bits.
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    inside = (by >= 0) & (by < BITS)
    return tl.where(inside, x << tl.where(inside, by, 0), 0)
""",
    "rshift": """
def shifted_right(x, by):
    # The sign alone by a count below 0 or beyond all bits.
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    return x >> tl.where((by >= 0) & (by < BITS), by, BITS - 1)
""",
    "rand": """
def uniform(seed, position):
    # Random numbers from 0 to 1: the upper 24 bits of the first word of Philox 4x32-10 (Salmon et al., SC 2011), the
    # position its counter, the seed its key.
    p, s = tl.cast(position, tl.uint64), tl.cast(seed, tl.uint64)
    c0, c1 = p.to(tl.uint32), (p >> 32).to(tl.uint32)
    k0, k1 = s.to(tl.uint32), (s >> 32).to(tl.uint32)
    c2, c3 = c0 ^ c0, c0 ^ c0
    by_c0, by_c2 = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    to_k0, to_k1 = tl.full((), 0x9E3779B9, tl.uint32), tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        one, two = c0, c2
        c0, c2 = tl.umulhi(two, by_c2) ^ c1 ^ k0, tl.umulhi(one, by_c0) ^ c3 ^ k1
        c1, c3 = two * by_c2, one * by_c0
        k0, k1 = k0 + to_k0, k1 + to_k1
    return (c0 >> 8).to(tl.float32) * 5.9604644775390625e-08
""",
    "is_finite": """
def is_finite(x):
    # The difference of an infinity or a NaN from itself is NaN.
    y = x.to(tl.float32) if x.dtype.is_fp8() else x
    return y - y == 0
""",
    "finite_part": """
def finite_part(x):
    y = x.to(tl.float32) if x.dtype.is_fp8() else x
    sign = tl.where(y > 0, 1.0, tl.where(y < 0, -1.0, 0.0))  # 0 of NaN
    return tl.where(is_finite(x), x, sign.to(x.dtype))
""",
    "search": """
def search(elements, stride, stop, target, RIGHT: tl.constexpr):
    # How many of the first `stop` elements, which ascend, are below target, or at most target: of up to 128 equal parts
    # the last elements are read at once, and those before the target counted, until a part has no other element.
    PARTS: tl.constexpr = 128
    lanes = tl.arange(0, PARTS)
    first = tl.full([], 0, tl.int32)
    size = first + stop
    while size > 0:
        part = (size + PARTS - 1) // PARTS
        ends = (lanes + 1) * part
        there = ends <= size
        last = tl.load(elements + (first + ends - 1).to(tl.int64) * stride, mask=there, other=0)
        before = last <= target if RIGHT else last < target
        count = tl.sum((there & before).to(tl.int32), 0)
        first += count * part
        size = tl.minimum(part - 1, size - count * part)
    return first
""",
    "rest_of_product": """
def rest_of_product(left, right, left_mask, right_mask, total):
    # total + left @ right, for what of them is no finite number: an operand is read where the mask of the other one
    # is true. There is hardly ever anything to add.
    found = 0
    if left_mask is not None:
        found += tl.max(tl.max((~is_finite(right)).to(tl.int32), 1), 0)
    if right_mask is not None:
        found += tl.max(tl.max((~is_finite(left)).to(tl.int32), 1), 0)
    if found > 0:
        SIZE: tl.constexpr = left.shape[1]
        at = tl.arange(0, SIZE)
        for k in range(SIZE):
            column, row = (at == k)[None, :], (at == k)[:, None]
            # converted first: sums of tiles in half precision lost NaN on Hopper (Triton 3.6)
            one = tl.sum(tl.where(column, left.to(total.dtype), 0.0), 1)[:, None]
            other = tl.sum(tl.where(row, right.to(total.dtype), 0.0), 0)[None, :]
            if left_mask is not None:
                kept = tl.max(tl.where(column, left_mask.to(tl.int32), 0), 1)[:, None]
                other = tl.where(kept != 0, other, 0.0)
            if right_mask is not None:
                kept = tl.max(tl.where(row, right_mask.to(tl.int32), 0), 0)[None, :]
                one = tl.where(kept != 0, one, 0.0)
            total += tl.where(is_finite(one) & is_finite(other), 0.0, one * other)
    return total
""",
}
"""Helper sources by the function that they stand for, in the order in which a module prints them."""


LIBRARY = "from triton.language.extra import libdevice"
"""What a module imports where a helper calls the GPU vendor's functions."""


def helper_name(key: str) -> str:
    """The name that a helper's source defines."""
    return HELPERS[key].strip().removeprefix("def ").partition("(")[0]
