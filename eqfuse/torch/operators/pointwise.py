"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from eqfuse.arguments import DTYPE_NAMES
from eqfuse.terms.functions import BITWISE
from eqfuse.terms.integer_terms import compared
from eqfuse.terms.nodes import Const, Expr, call
from eqfuse.torch.operators.table import (
    TABLE,
    Node,
    Unsupported,
    both,
    either,
    elementwise,
    negated,
    number,
    operator,
    stored,
    truth,
)
from eqfuse.torch.values import Value, is_number, power

Function = Callable[..., Expr]


def _c(fn: str) -> Function:
    return lambda *args: call(fn, *args)


def _add(a: Expr, b: Expr) -> Expr:
    return b if is_number(a, 0) else a if is_number(b, 0) else call("add", a, b)


def _mul(a: Expr, b: Expr) -> Expr:
    return b if is_number(a, 1) else a if is_number(b, 1) else call("mul", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    return a if is_number(b, 0) else call("sub", a, b)


def _div(a: Expr, b: Expr) -> Expr:
    return a if is_number(b, 1) else call("div", a, b)


def _select(c: Expr, a: Expr, b: Expr) -> Expr:
    return call("where", c, a, b)


def _asinh(x: Expr) -> Expr:
    """Of x from 0: log(x + sqrt(x x + 1)), exact near 0 and where x x is beyond float32."""
    square = call("sq", x)
    rest = call("div", square, call("add", call("sqrt", call("add", square, Const(1.0))), Const(1.0)))
    far = call("add", call("log", x), Const(math.log(2)))
    return _select(call("gt", x, Const(1e9)), far, call("log1p", call("add", x, rest)))


def _leg(x: Expr) -> Expr:
    """sqrt(x x - 1) of x from 1."""
    below, above = (call("sqrt", call(fn, x, Const(1.0))) for fn in ("sub", "add"))
    return call("mul", below, above)


def _opposite(x: Expr) -> Expr:
    """sqrt(1 - x x) of x from -1 to 1."""
    below, above = (call(fn, Const(1.0), x) for fn in ("sub", "add"))
    return call("sqrt", call("mul", below, above))


UNARY: dict[str, Function] = {
    "abs": _c("abs"), "neg": _c("neg"), "exp": _c("exp"), "log": _c("log"), "sqrt": _c("sqrt"),
    "rsqrt": _c("rsqrt"), "tanh": _c("tanh"), "sigmoid": _c("sigmoid"), "relu": _c("relu"), "silu": _c("silu"),
    "erf": _c("erf"), "sin": _c("sin"), "cos": _c("cos"), "sign": _c("sign"),
    "square": _c("sq"), "log1p": _c("log1p"), "expm1": _c("expm1"),
    "reciprocal": lambda x: call("div", Const(1.0), x),
    "log2": lambda x: call("mul", call("log", x), Const(1 / math.log(2))),
    "log10": lambda x: call("mul", call("log", x), Const(1 / math.log(10))),
    "exp2": lambda x: call("exp", call("mul", x, Const(math.log(2)))),
    "tan": lambda x: call("div", call("sin", x), call("cos", x)),
    "sinh": lambda x: call("mul", Const(0.5), call("sub", call("expm1", x), call("expm1", call("neg", x)))),
    "cosh": lambda x: call("mul", Const(0.5), call("add", call("exp", x), call("exp", call("neg", x)))),
    "atanh": lambda x: call("mul", Const(0.5), call("sub", call("log1p", x), call("log1p", call("neg", x)))),
    "asinh": lambda x: call("mul", call("sign", x), _asinh(call("abs", x))),
    "acosh": lambda x: call("log", call("add", x, _leg(x))),
    "sgn": _c("sign"),
    "atan": lambda x: call("atan2", x, Const(1.0)),
    "asin": lambda x: call("atan2", x, _opposite(x)),
    "acos": lambda x: call("atan2", _opposite(x), x),
}  # fmt: skip
"""Functions of one number."""

STEPS: dict[str, Function] = {
    "floor": _c("floor"),
    "ceil": lambda x: call("neg", call("floor", call("neg", x))),
    "trunc": lambda x: call("mul", call("sign", x), call("floor", call("abs", x))),
}
"""Functions of one number that leave integers as they are."""


COMPARED = {"le": "le", "lt": "lt", "ge": "ge", "gt": "gt", "eq": "eq", "ne": "ne"}


NARROW = (torch.int8, torch.uint8, torch.int16)
"""Integers that torch computes with modulo powers of two; the language has no arithmetic on them."""


def check_wide(dtype: torch.dtype) -> None:
    """Raises Unsupported for integers that wrap around."""
    if dtype in NARROW:
        raise Unsupported(f"arithmetic in {dtype}, which wraps around")


def _unary(name: str, fn: Function, *, keeps_integers: bool = False) -> None:
    @operator(name)
    def entry(node: Node) -> Value:
        x = node.value("self")
        check_wide(node.dtype)
        if keeps_integers and not x.is_real:
            return x
        return elementwise(node.shape, node.dtype, [x], lambda e: stored(node.dtype, fn(number(x, e))))


for _name, _fn in UNARY.items():
    _unary(_name, _fn)
for _name, _fn in STEPS.items():
    _unary(_name, _fn, keeps_integers=True)


@operator("round")
def _(node: Node) -> Value:
    x, decimals = node.value("self"), node.get("decimals", 0)
    if not x.is_real:
        return x
    apart, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    scale = Const(10.0 ** abs(decimals))

    def compute(e: Expr) -> Expr:
        return call(back, call("round", call(apart, e, scale)), scale) if decimals else call("round", e)

    return elementwise(node.shape, node.dtype, [x], compute)


def _comparison(name: str, fn: str) -> None:
    @operator(name)
    def entry(node: Node) -> Value:
        a, b = node.value("self"), node.value("other")
        as_they_are = a.is_truth and b.is_truth and fn in ("eq", "ne")

        def compute(x: Expr, y: Expr) -> Expr:
            return call(fn, x, y) if as_they_are else compared(fn, number(a, x), number(b, y))

        return elementwise(node.shape, node.dtype, [a, b], compute)


for _name, _symbol in COMPARED.items():
    _comparison(_name, _symbol)


def _arithmetic(node: Node, fn: Function, first: str = "self", second: str = "other") -> Value:
    a, b = node.value(first), node.value(second)
    alpha = node.get("alpha", 1)
    check_wide(node.dtype)

    def compute(x: Expr, y: Expr) -> Expr:
        return stored(node.dtype, fn(number(a, x), _mul(Const(alpha), number(b, y))))

    return elementwise(node.shape, node.dtype, [a, b], compute)


@operator("add")
def _(node: Node) -> Value:
    if node.dtype == torch.bool:
        a, b, alpha = node.value("self"), node.value("other"), bool(node.get("alpha", 1))
        return elementwise(
            node.shape, node.dtype, [a, b], lambda x, y: either(truth(a, x), both(Const(alpha), truth(b, y)))
        )
    return _arithmetic(node, _add)


@operator("sub")
def _(node: Node) -> Value:
    return _arithmetic(node, _sub)


@operator("rsub")
def _(node: Node) -> Value:
    return _arithmetic(node, lambda x, y: _sub(y, x)) if not node.has("alpha") else _reversed(node)


def _reversed(node: Node) -> Value:
    a, b, alpha = node.value("self"), node.value("other"), node.get("alpha", 1)
    return elementwise(
        node.shape, node.dtype, [a, b], lambda x, y: _sub(number(b, y), _mul(Const(alpha), number(a, x)))
    )


@operator("mul")
def _(node: Node) -> Value:
    return _logic(node, "and") if node.dtype == torch.bool else _arithmetic(node, _mul)


@operator("div", "true_divide")
def _(node: Node) -> Value:
    match node.get("rounding_mode"):
        case None:
            return _arithmetic(node, _div)
        case "floor" if not node.dtype.is_floating_point:
            return _arithmetic(node, _c("floordiv"))
        case "floor":
            return _arithmetic(node, lambda x, y: call("floor", call("div", x, y)))
        case _ if not node.dtype.is_floating_point:  # towards 0
            return _arithmetic(node, divided_towards_zero)
        case _:
            return _arithmetic(node, lambda x, y: STEPS["trunc"](call("div", x, y)))


def divided_towards_zero(x: Expr, y: Expr) -> Expr:
    """The quotient of integers, rounded towards 0."""
    size = call("floordiv", call("abs", x), call("abs", y))
    return call("mul", call("mul", call("sign", x), call("sign", y)), size)


@operator("floor_divide")
def _(node: Node) -> Value:
    if node.dtype.is_floating_point:
        return _arithmetic(node, lambda x, y: call("floor", call("div", x, y)))
    return _arithmetic(node, _c("floordiv"))


@operator("remainder")
def _(node: Node) -> Value:
    return _arithmetic(node, _c("mod"))


@operator("fmod")
def _(node: Node) -> Value:
    return _arithmetic(
        node, lambda x, y: call("mul", call("sign", x), call("mod", call("abs", x), call("abs", y)))
    )


@operator("hypot")
def _(node: Node) -> Value:
    return _arithmetic(node, lambda x, y: call("sqrt", call("add", call("sq", x), call("sq", y))))


@operator("atan2")
def _(node: Node) -> Value:
    return _arithmetic(node, _c("atan2"))


@operator("copysign")
def _(node: Node) -> Value:
    def compute(x: Expr, y: Expr) -> Expr:
        below = either(call("lt", y, Const(0)), call("lt", call("div", Const(1.0), y), Const(0)))  # of -0 too
        return _select(below, call("neg", call("abs", x)), call("abs", x))

    return _arithmetic(node, compute)


@operator("maximum")
def _(node: Node) -> Value:
    return _arithmetic(node, _c("maximum"))


@operator("minimum")
def _(node: Node) -> Value:
    return _arithmetic(node, _c("minimum"))


def _but_nan(fn: str) -> Function:
    """An extreme that is the other number where one is NaN."""

    def compute(x: Expr, y: Expr) -> Expr:
        found = call(fn, x, y)
        return _select(call("ne", x, x), y, _select(call("ne", y, y), x, found))

    return compute


@operator("fmax")
def _(node: Node) -> Value:
    return _arithmetic(node, _but_nan("maximum") if node.dtype.is_floating_point else _c("maximum"))


@operator("fmin")
def _(node: Node) -> Value:
    return _arithmetic(node, _but_nan("minimum") if node.dtype.is_floating_point else _c("minimum"))


LARGEST_EXPONENT = 64
"""Up to which a power is written by squaring."""


@operator("pow")
def _(node: Node) -> Value:
    exponent = node.given.get("exponent")
    base = node.value("self")
    if not isinstance(exponent, int | float) or isinstance(exponent, bool):
        if isinstance(node.given.get("self"), int | float) and node.given["self"] > 0:
            other, known = node.value("exponent"), math.log(float(node.given["self"]))
            return elementwise(node.shape, node.dtype, [other], lambda y: call("exp", _mul(Const(known), y)))
        if not node.dtype.is_floating_point:
            raise Unsupported("a power of integers whose exponent is a tensor")
        other = node.value("exponent")
        return elementwise(
            node.shape, node.dtype, [base, other], lambda x, y: raised(number(base, x), number(other, y))
        )
    if not abs(exponent) <= LARGEST_EXPONENT:
        raise Unsupported(f"the power {exponent}: exponents are numbers up to {LARGEST_EXPONENT}")
    return elementwise(node.shape, node.dtype, [base], lambda x: power(number(base, x), float(exponent)))


@operator("ldexp")
def _(node: Node) -> Value:
    x, y = node.value("self"), node.value("other")
    return elementwise(
        node.shape, node.dtype, [x, y], lambda a, b: call("mul", number(x, a), UNARY["exp2"](number(y, b)))
    )


def raised(x: Expr, y: Expr) -> Expr:
    """A power whose exponent varies: of a number below 0 it is a number where the exponent is an integer."""
    size = call("exp", call("mul", y, call("log", call("abs", x))))
    half = call("mul", y, Const(0.5))
    signed = _select(call("eq", call("floor", half), half), size, call("neg", size))
    below = _select(call("eq", call("floor", y), y), signed, Const(math.nan))
    found = _select(call("lt", x, Const(0)), below, size)
    return _select(call("eq", y, Const(0)), Const(1.0), found)


@operator("gelu")
def _(node: Node) -> Value:
    x = node.value("self")
    if node.get("approximate", "none") == "none":
        return elementwise(node.shape, node.dtype, [x], _c("gelu"))

    def compute(e: Expr) -> Expr:
        cubic = call("add", e, call("mul", Const(0.044715), call("mul", call("sq", e), e)))
        inner = call("tanh", call("mul", Const(math.sqrt(2 / math.pi)), cubic))
        return call("mul", call("mul", Const(0.5), e), call("add", Const(1.0), inner))

    return elementwise(node.shape, node.dtype, [x], compute)


@operator("leaky_relu")
def _(node: Node) -> Value:
    return _leaky(node, node.get("negative_slope", 0.01))


@operator("rrelu_with_noise_functional")
def _(node: Node) -> tuple[Value, ...]:
    if node.get("training", False):
        raise Unsupported("slopes that are random numbers (call .eval())")
    return _leaky(node, (node.get("lower", 1 / 8) + node.get("upper", 1 / 3)) / 2), node.value("noise")


def _leaky(node: Node, slope: float) -> Value:
    return elementwise(
        node.shape,
        node.dtype,
        [node.value("self")],
        lambda e: _select(call("gt", e, Const(0)), e, call("mul", e, Const(float(slope)))),
    )


@operator("elu")
def _(node: Node) -> Value:
    alpha, scale, inside = (float(node.get(n, 1)) for n in ("alpha", "scale", "input_scale"))

    def compute(e: Expr) -> Expr:
        low = call("mul", Const(alpha), call("expm1", _mul(e, Const(inside))))
        return _mul(Const(scale), _select(call("gt", e, Const(0)), e, low))

    return elementwise(node.shape, node.dtype, [node.value("self")], compute)


@operator("softplus")
def _(node: Node) -> Value:
    beta, threshold = (float(node.get(n, d)) for n, d in (("beta", 1), ("threshold", 20)))

    def compute(e: Expr) -> Expr:
        scaled = _mul(Const(beta), e)
        tail = call("log1p", call("exp", call("neg", call("abs", scaled))))
        soft = _div(call("add", call("maximum", scaled, Const(0)), tail), Const(beta))
        return _select(call("gt", scaled, Const(threshold)), e, soft)

    return elementwise(node.shape, node.dtype, [node.value("self")], compute)


@operator("clamp", "clamp_min", "clamp_max")
def _(node: Node) -> Value:
    x = node.value("self")
    values, ends = [x], []
    for end, fn, of_integers in (("min", "at_least", "maximum"), ("max", "at_most", "minimum")):
        if node.has(end):
            values.append(node.value(end))
            ends.append(fn if x.is_real else of_integers)

    def compute(*given: Expr) -> Expr:
        e, *bounds = map(number, values, given)
        for fn, bound in zip(ends, bounds, strict=True):
            e = call(fn, e, bound)
        return stored(node.dtype, e)

    return elementwise(node.shape, node.dtype, values, compute)


@operator("hardtanh")
def _(node: Node) -> Value:
    x = node.value("self")
    kind = float if x.is_real else int  # torch rounds the ends of integers towards 0
    low, high = (Const(kind(node.get(end, own))) for end, own in (("min_val", -1), ("max_val", 1)))

    def compute(e: Expr) -> Expr:  # torch's derivative at the ends is 0
        below, above = call("le", e, low), call("ge", e, high)
        return _select(below, low, _select(above, high, e))

    return elementwise(node.shape, node.dtype, [x], compute)


def _hard_sigmoid(e: Expr) -> Expr:
    """The sigmoid of straight lines; torch's derivative at -3 and 3 is that outside."""
    between = _div(call("add", e, Const(3.0)), Const(6.0))
    inside = _select(call("ge", e, Const(3.0)), Const(1.0), between)
    return _select(call("le", e, Const(-3.0)), Const(0.0), inside)


@operator("hardsigmoid")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [node.value("self")], _hard_sigmoid)


@operator("hardswish")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [node.value("self")], lambda e: _mul(e, _hard_sigmoid(e)))


@operator("where")
def _(node: Node) -> Value:
    c, a, b = node.value("condition"), node.value("self"), node.value("other")
    plain = a.is_truth and b.is_truth

    def compute(p: Expr, x: Expr, y: Expr) -> Expr:
        p = truth(c, p)
        if isinstance(p, Const):
            return x if p.value else y
        return _select(p, x, y) if plain else _select(p, number(a, x), number(b, y))

    return elementwise(node.shape, node.dtype, [c, a, b], compute)


@operator("masked_fill")
def _(node: Node) -> Value:
    x, mask, value = node.value("self"), node.value("mask"), node.value("value")
    kind = truth if node.dtype == torch.bool else number
    return elementwise(
        node.shape, node.dtype, [x, mask, value], lambda e, p, v: _select(p, kind(value, v), kind(x, e))
    )


def _logic(node: Node, fn: str) -> Value:
    joins = both if fn == "and" else either
    a, b = node.value("self"), node.value("other")
    return elementwise(node.shape, node.dtype, [a, b], lambda x, y: joins(truth(a, x), truth(b, y)))


def _of_truths(node: Node, fn: str) -> Value:
    return _logic(node, fn) if node.value("self").is_truth else _bits(node, BITWISE[fn])


def _bits(node: Node, fn: str) -> Value:
    a, b = node.value("self"), node.value("other")
    if a.is_real or b.is_real:
        raise Unsupported("bits of reals")
    return elementwise(node.shape, node.dtype, [a, b], lambda x, y: call(fn, number(a, x), number(b, y)))


@operator("logical_and")
def _(node: Node) -> Value:
    return _logic(node, "and")


@operator("logical_or")
def _(node: Node) -> Value:
    return _logic(node, "or")


@operator("logical_xor")
def _(node: Node) -> Value:
    a, b = node.value("self"), node.value("other")
    return elementwise(node.shape, node.dtype, [a, b], lambda x, y: call("ne", truth(a, x), truth(b, y)))


@operator("bitwise_xor", "__xor__")
def _(node: Node) -> Value:
    a, b = node.value("self"), node.value("other")
    if not (a.is_truth and b.is_truth):
        return _bits(node, "bitxor")
    return elementwise(node.shape, node.dtype, [a, b], _c("ne"))


@operator("bitwise_right_shift", "__rshift__")
def _(node: Node) -> Value:
    return _bits(node, "rshift")


@operator("bitwise_left_shift", "__lshift__")
def _(node: Node) -> Value:
    if node.dtype != torch.int64:
        raise Unsupported(f"a shift to the left in {node.dtype}, which loses bits")
    return _bits(node, "lshift")


@operator("bitwise_and", "__and__")
def _(node: Node) -> Value:
    return _of_truths(node, "and")


@operator("bitwise_or", "__or__")
def _(node: Node) -> Value:
    return _of_truths(node, "or")


@operator("logical_not")
def _(node: Node) -> Value:
    x = node.value("self")
    return elementwise(node.shape, node.dtype, [x], lambda e: negated(truth(x, e)))


@operator("bitwise_not")
def _(node: Node) -> Value:
    x = node.value("self")
    if x.is_truth:
        return elementwise(node.shape, node.dtype, [x], negated)
    every = 255 if node.dtype == torch.uint8 else -1
    return elementwise(node.shape, node.dtype, [x], lambda e: call("bitxor", e, Const(every)))


@operator("isinf")
def _(node: Node) -> Value:
    x = node.value("self")
    return elementwise(
        node.shape,
        node.dtype,
        [x],
        lambda e: call("eq", call("abs", e), Const(math.inf)) if x.is_real else Const(False),
    )


@operator("isnan")
def _(node: Node) -> Value:
    return elementwise(node.shape, node.dtype, [node.value("self")], lambda e: call("ne", e, e))


@operator("_to_copy", "to", "type_as")
def _(node: Node) -> Value:
    return cast(node.value("self"), node.dtype)


@operator("convert_element_type")
def _(node: Node) -> Value:
    return cast(node.value("a"), node.dtype)


TABLE["prims.convert_element_type"] = TABLE.pop("aten.convert_element_type")


def cast(x: Value, dtype: torch.dtype) -> Value:
    """The value in another dtype. Where that is wider nothing is written: arithmetic is in float32 or wider."""
    if dtype == torch.bool:
        return elementwise(x.shape, dtype, [x], lambda e: truth(x, e))
    if not dtype.is_floating_point:
        if x.is_real and dtype in NARROW:  # towards 0; beyond its ends torch leaves open what it is
            toward_zero = STEPS["trunc"]
            return elementwise(x.shape, dtype, [x], lambda e: call(DTYPE_NAMES[dtype], toward_zero(e)))
        if x.is_real or (dtype in NARROW and not x.is_truth and x.dtype != dtype):
            raise Unsupported(f"rounding to {dtype}")
        return elementwise(x.shape, dtype, [x], lambda e: number(x, e))
    if dtype not in DTYPE_NAMES:
        raise Unsupported(f"the dtype {dtype}")
    if not x.is_real or torch.finfo(dtype).bits >= torch.finfo(x.dtype).bits and dtype != torch.bfloat16:
        return elementwise(x.shape, dtype, [x], lambda e: number(x, e))
    name = DTYPE_NAMES[dtype]
    return elementwise(x.shape, dtype, [x], lambda e: call(name, e))
