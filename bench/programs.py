"""Random well-typed reduction programs with tensors that fit them: a hypothesis strategy.

A program has one to four axes and a cascade of one to four reductions, or of up to ten layers, whose bodies are
drawn from the whole language: loads (permuted, broadcast, shifted, gathered; of reals and integers), earlier
results, what an earlier reduction was made of, masks, segments, casts, elementwise functions, registered
reductions, values scaled by their greatest, constants of every magnitude, functions of sizes, truth values that are
compared. Nothing is a template of a known program.

Every expression carries an interval that its values lie in. It keeps values in range: what is put under a
logarithm or a root is positive there, and nothing grows past `LIMIT`, or `WIDE_LIMIT` in one program out of
eight, where exponentials overflow float32. One program out of six is called with values of another magnitude,
denormal to 1e38, and one out of sixteen with infinities and NaN among its values: then the interval does not hold, and
what the unfused program makes of them is what is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

import eqfuse as eq
from bench.magnitudes import MAGNITUDES, factors
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.registry import REGISTERED

T = TypeVar("T")
Interval = tuple[float, float]

AXES = "ijkl"
TENSORS = "xyzw"
DEFINITIONS = "abcdefghmsABCDEFGIJK"
LIMIT, WIDE_LIMIT = 1e4, 1e60
NEGLIGIBLE = 0.05
"""A divisor stays this far from 0, mostly."""
SIZES = (3, 1, 2, 4, 5, 7, 8, 9, 19, 43, 0, 2100)
MOST_ELEMENTS = 20_000
MOST_LAYERS = 10
DTYPES = (("f32",),) * 5 + (("f16",), ("bf16",), ("f32", "f16"), ("bf16", "f32"), ("f64",), ("f64", "f32"))
"""Which dtypes the tensors of one program have."""

DRAWS: Mapping[str, Interval] = {
    "normal": (-3, 3),
    "positive": (0.1, 1.1),
    "close": (2.9, 3.1),
    "ties": (-2, 2),
    "zero rows": (-3, 3),
    "scores": (-80, 80),
    "holes": (-math.inf, 3),
}
"""Kinds of values of a tensor, and where they lie."""
INTEGERS: Interval = (-5, 5)
"""Where the values of a tensor of integers lie."""
MASKED = (
    "0",
    "0",
    "-inf",
    "-inf",
    "-1e9",
    "-1e30",
    "-3.4028234663852886e38",
    "an expression",
    "an expression",
)
"""What a mask puts in place of a value."""
GREAT = ("1e9", "1e18", "1e19", "1e30", "3.4028234663852886e38", "1e300")
"""Bounds that values are clamped to and compared with, far from all of them or beyond float32."""
ENDS = ("i32", "i32", "i64", "i16", "i8")
"""Dtypes of a tensor whose values are near the ends of its range; they are compared with positions, after arithmetic."""
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "offset")
SPECIAL = (math.inf, -math.inf, math.nan)
"""What values of a tensor are replaced by where its `magnitude` is "special"."""
TABLES, PLACES_OF_TABLES = "TW", "PR"
"""Tensors that are read at the integers of others, and these: both in programs that `gather`."""
LENGTH = "L"
"""A scalar that is not declared: it is compared with positions, and thereby an integer."""
HALVES = "H"
"""A tensor of two halves."""
PLACES = ("here",) * 37 + ("a thread", "threads", "a fork")
"""Where a program is compiled and called."""

OF_SIZES: Mapping[str, Callable[[int], int]] = {
    "N({}) // 3": lambda n: n // 3,
    "N({}) % 7": lambda n: n % 7,
    "max(N({}) - 40, 0)": lambda n: max(n - 40, 0),
    "min(N({}), 40)": lambda n: min(n, 40),
    "(N({}) >> 3)": lambda n: n >> 3,
    "abs(N({}) - 40)": lambda n: abs(n - 40),
}
"""Functions of the size of an axis that change their form at some size."""

USERS: Mapping[str, Mapping[str, Any]] = {
    "absmax": {"state": "m", "lift": "abs(x)", "identity": "0", "combine": "max(m1, m2)", "result": "m"},
    "sumsq": {"state": "s", "lift": "sq(x)", "identity": "0", "combine": "s1 + s2", "result": "s"},
    "span": {
        "state": "a, b",
        "lift": "x, x",
        "identity": "inf, -inf",
        "combine": "min(a1, a2), max(b1, b2)",
        "result": "b - a",
    },
    "last": {
        "state": "v, n",
        "lift": "x, 1",
        "identity": "0, 0",
        "combine": "where(n2 > 0, v2, v1), max(n1, n2)",
        "result": "v",
    },
}
"""Reductions that a user may register; the last one is not commutative."""


def registered(source: str) -> tuple[str, ...]:
    """The reductions of `USERS` that a program reads; makes sure that they are known."""
    read = tuple(name for name in USERS if re.search(rf"\b{name}\[", source))
    for name in read:
        if name not in REGISTERED:
            eq.reduction(name, **USERS[name])
    return read


FINITE: Interval = (-1e300, 1e300)


def _rising(function: Callable[[float], float]) -> Callable[[float, float], Interval]:
    return lambda low, high: (function(low), function(high))


def _between(low: float, high: float) -> Callable[[float, float], Interval]:
    return lambda _low, _high: (low, high)


def _magnitude(low: float, high: float) -> Interval:
    most = max(abs(low), abs(high))
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), most


def _square(low: float, high: float) -> Interval:
    least, most = _magnitude(low, high)
    return least * least, most * most


UNARY: Mapping[str, tuple[Interval, Callable[[float, float], Interval]]] = {
    "-": ((-1e300, math.inf), lambda low, high: (-high, -low)),
    "exp": ((-math.inf, 200), _rising(math.exp)),
    "sq": (FINITE, _square),
    "abs": (FINITE, _magnitude),
    "tanh": ((-math.inf, math.inf), _between(-1, 1)),
    "log": ((0.01, 1e300), _rising(math.log)),
    "sqrt": ((0, 1e300), _rising(math.sqrt)),
    "rsqrt": ((0.01, 1e300), lambda low, high: (high**-0.5, low**-0.5)),
    "relu": ((-math.inf, 1e300), lambda low, high: (max(low, 0), max(high, 0))),
    "sigmoid": ((-math.inf, math.inf), _between(0, 1)),
    "gelu": (FINITE, lambda low, high: (-0.2, max(high, 0))),
    "silu": (FINITE, lambda low, high: (-0.3, max(high, 0))),
    "erf": ((-math.inf, math.inf), _between(-1, 1)),
    "sin": (FINITE, _between(-1, 1)),
    "cos": (FINITE, _between(-1, 1)),
    "sign": ((-math.inf, math.inf), _between(-1, 1)),
    "floor": (FINITE, _rising(math.floor)),
    "round": (FINITE, _rising(round)),
    "f16": ((-3e4, 3e4), lambda low, high: (low, high)),
    "bf16": ((-math.inf, 1e300), lambda low, high: (low, high)),
    "f32": ((-math.inf, 1e300), lambda low, high: (low, high)),
    "stop": ((-math.inf, math.inf), lambda low, high: (low, high)),
    "log1p": ((-0.9, 1e300), _rising(math.log1p)),
    "expm1": ((-math.inf, 200), _rising(math.expm1)),
    "softplus": ((-math.inf, 1e300), lambda low, high: (0, max(high, 0) + 1)),
    "** 2": (FINITE, _square),
    "** 3": (FINITE, _rising(lambda x: x**3)),
    "** 1.5": ((0, 1e200), _rising(lambda x: x**1.5)),
    "** 0.5": ((0, 1e300), _rising(math.sqrt)),
    "** -1": ((0.05, 1e300), lambda low, high: (1 / high, 1 / low)),
    "// 2": (FINITE, _rising(lambda x: x // 2)),
    "% 3": (FINITE, _between(0, 3)),
}
"""Functions of one number: where the argument must lie, and where the result lies."""

BINARY = ("+", "*", "-", "/", "*", "-", "/", "max", "min")
REDUCERS = (
    *("sum", "max", "mean", "sum", "max", "sum", "min"),
    *("var", "std", "logsumexp", "prod", "argmax", "argmin", "any", "all"),
    *("argmax.v", "softmax_weighted"),
    *USERS,
)
"""What stands twice is drawn twice as often."""
ONE_AXIS = ("argmax", "argmin", "last", "argmax.v", "softmax_weighted")
"""Those of positions, which are along one axis."""


@dataclass(frozen=True)
class Value:
    """An expression, where its values lie, and what it can be read for again.

    `axes` are those that it is free in. `top` is the text of what it is the largest of.
    """

    text: str
    low: float
    high: float
    axes: frozenset[str] = frozenset()
    atom: bool = True
    top: str = ""

    @property
    def tight(self) -> str:
        """The text as an operand."""
        return self.text if self.atom else f"({self.text})"


@dataclass(frozen=True)
class Definition:
    """A line of the program. `body` is what it reduces, None for a line that does not."""

    name: str
    axes: tuple[str, ...]
    value: Value
    is_truth: bool = False
    body: Value | None = None

    @property
    def left(self) -> str:
        return self.name + _indexed(self.axes)


@dataclass(frozen=True)
class Input:
    """A tensor: the axis of each dimension, how its values are drawn and scaled, how it lies in memory.

    An axis `i+1` stands for one position more than `i` has, `i*2` for twice as many. `draw` of an integer tensor is `below AXIS` (an index
    into it), `up to AXIS` (a length), `parts of AXIS` (where segments begin and end) or `integers`.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    draw: str
    layout: str = "contiguous"
    magnitude: str = ""

    @property
    def declared(self) -> str:
        return f"{self.name}: {self.dtype}{_indexed(re.sub('[+*]', '', axis) for axis in self.axes)}"

    def tensor(self, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
        """Fresh values."""
        shape = tuple(_extent(axis, sizes) for axis in self.axes)
        found = self._values(shape, sizes, generator)
        if self.magnitude == "special":
            places = torch.randint(24, shape, generator=generator)
            for place, value in enumerate(SPECIAL):
                found = torch.where(places == place, value, found)
        elif self.magnitude:
            found = found.double() * factors(self.magnitude, shape, generator)
        found = found.to(TORCH_DTYPES[self.dtype])
        if not shape or self.layout == "contiguous":
            return found
        if self.layout == "transposed":
            return found.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "strided":
            wide = torch.stack([found, torch.full_like(found, 77)], -1)
            return wide.flatten(-2)[..., ::2]
        if self.layout == "offset":
            return torch.cat([torch.full_like(found[:1], 77), found])[1:] if shape[0] else found
        return found[:1].expand(shape) if shape[0] else found

    def _values(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        normal = torch.randn(shape, generator=generator).clamp(-3, 3)
        match self.draw.rsplit(" ", 1):
            case ["below", axis]:
                return torch.randint(sizes[axis], shape, generator=generator)
            case ["up to", axis]:
                return torch.randint(sizes[axis] + 1, shape, generator=generator)
            case ["parts of", axis]:
                return torch.randint(sizes[axis] + 1, shape, generator=generator).sort().values
            case ["near", "ends"]:
                span = torch.iinfo(TORCH_DTYPES[self.dtype])
                near = torch.tensor([span.min, span.min + 1, -1, 0, 1, 2, span.max - 1, span.max])
                return near[torch.randint(len(near), shape, generator=generator)]
            case ["integers"]:
                low, high = INTEGERS
                return torch.randint(int(low), int(high) + 1, shape, generator=generator)
            case ["positive"]:
                return torch.rand(shape, generator=generator) + 0.1
            case ["close"]:
                return 3 + 0.003 * normal
            case ["ties"]:
                return torch.randint(-2, 3, shape, generator=generator).float()
            case ["zero", "rows"]:
                rows = torch.rand(shape[:1], generator=generator) < 0.5
                return normal * rows.reshape(-1, *[1] * (len(shape) - 1))
            case ["true"]:
                return torch.rand(shape, generator=generator) < 0.6
            case ["holes"]:
                rows = torch.rand(shape[:1], generator=generator) < 0.2
                holes = torch.rand(shape, generator=generator) < 0.3
                return torch.where(holes | rows.reshape(-1, *[1] * (len(shape) - 1)), -math.inf, normal)
            case ["scores"]:
                return (25 * normal).clamp(-80, 80)
            case _:
                return normal


def _extent(axis: str, sizes: Mapping[str, int]) -> int:
    if axis.endswith("*2"):
        return 2 * sizes[axis.removesuffix("*2")]
    return sizes[axis.removesuffix("+1")] + axis.endswith("+1")


@dataclass(frozen=True)
class Example:
    """A program, what it is called with, the tiles and shards that it is cut into, and where it runs."""

    source: str
    inputs: tuple[Input, ...]
    sizes: Mapping[str, int]
    scalars: Mapping[str, float]
    block: int
    shards: int
    seed: int
    place: str = "here"

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, the same at each call."""
        generator = torch.Generator().manual_seed(self.seed)
        return {given.name: given.tensor(self.sizes, generator) for given in self.inputs}

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        tensors = ", ".join(
            " ".join(filter(None, (given.name, given.draw, given.magnitude, given.layout)))
            for given in self.inputs
        )
        scalars = "".join(f", {name} = {number}" for name, number in self.scalars.items())
        users = "".join(
            f"# eq.reduction({name!r}, {', '.join(f'{key}={word!r}' for key, word in USERS[name].items())})\n"
            for name in registered(self.source)
        )
        place = "" if self.place == "here" else f", in {self.place}"
        return (
            f"{users}{self.source}\n# sizes: {sizes}; tensors: {tensors}{scalars}\n"
            f"# tiles of {self.block}, {self.shards} shards, values of seed {self.seed}{place}"
        )


def _indexed(index: Iterable[str]) -> str:
    text = ",".join(index)
    return f"[{text}]" if text else ""


@dataclass
class _Writer:
    """Writes one program. `sizes` has every axis; `aliases` the axes that are as long as another one."""

    draw: st.DrawFn
    sizes: dict[str, int]
    aliases: Mapping[str, str]
    dtypes: tuple[str, ...]
    limit: float
    magnitudes: tuple[str, ...] = ()
    inputs: dict[str, Input] = field(default_factory=dict)
    definitions: list[Definition] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    pairs: bool = False
    gathers: bool = False

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options; a shrunk program has the first."""
        return self.draw(st.sampled_from(options))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def some(self, axes: Sequence[str], least: int, most: int) -> tuple[str, ...]:
        """Some of the axes, in any order."""
        count = self.draw(st.integers(min(least, len(axes)), min(most, len(axes))))
        return tuple(self.draw(st.permutations(list(axes)))[:count])

    # -- lines ---------------------------------------------------------------------------------------

    def reduction(self, rows: tuple[str, ...], main: str) -> None:
        """A line that reduces an expression over the main axis, or over another one."""
        over: tuple[str, ...] = (main,)
        others = [axis for axis in self.sizes if axis != main]
        if self.chance(20):
            over = self.some(list(self.sizes), 1, 2)
        axes = rows if self.chance(75) else self.some(list(self.sizes), 0, 3)
        if others and self.chance(12):  # the main axis is walked again, around another one
            over, axes = self.some(others, 1, 1), (*rows, main)
        axes = tuple(axis for axis in axes if axis not in over)
        self._define(axes, lambda: self.reduced(axes, over))

    def map(self, axes: tuple[str, ...]) -> None:
        """A line that reduces nothing, unless an expression of it does."""
        self._define(axes, lambda: (self.expression(frozenset(axes), 3), None, False))

    def layer(self, rows: tuple[str, ...], main: str) -> None:
        """A line that combines the line before it with a reduction of what that is made into."""
        axes = (*rows, main)

        def made() -> tuple[Value, None, bool]:
            before = self._readable(frozenset(axes))[-1:] or [self._load(frozenset(axes))]
            names = ["sq", "abs", "exp", "tanh", "-", "sigmoid", "relu"]
            body = self._applied(before[0], names) if self.chance(60) else before[0]
            folded = self._folded(self.one_of(["mean", "max", "sum", "var"]), (main,), body)
            if self.chance(20):
                folded = self._applied(folded, ["sqrt", "rsqrt", "abs", "sq"])
            return self.combined(before[0], folded), None, False

        self._define(axes, made)

    def _define(self, axes: tuple[str, ...], make: Callable[[], tuple[Value, Value | None, bool]]) -> None:
        value, body, is_truth = make()
        name = DEFINITIONS[len(self.definitions)]
        self.definitions.append(Definition(name, axes, value, is_truth, body))

    def reduced(self, axes: tuple[str, ...], over: tuple[str, ...]) -> tuple[Value, Value | None, bool]:
        """The reduction, what it reduces, and whether it is a truth value."""
        scope = frozenset((*axes, *over))
        op = self.one_of([op for op in REDUCERS if len(over) == 1 or op not in ONE_AXIS])
        if op in ("any", "all"):
            return Value(f"{op}[{','.join(over)}]({self.condition(scope)})", 0, 1), None, True
        body = self.expression(scope, 3)
        earlier = self._readable(scope)
        if earlier and self.chance(60):
            body = self.combined(body, self.one_of(earlier))
        if op == "softmax_weighted" and self.sizes[over[0]]:
            value = self.expression(scope, 1)
            if value.low > -math.inf:
                text = f"{op}[{over[0]}]({body.text}, {value.text})"
                free = (body.axes | value.axes) - set(over)
                return Value(text, value.low, value.high, free), body, False
        return self._folded(op, over, body), body, False

    def _folded(self, op: str, over: tuple[str, ...], body: Value) -> Value:
        """`op` of the body; another one where the values would leave their range."""
        count = math.prod(self.sizes[axis] for axis in over)
        low, high = body.low, body.high
        spans: dict[str, Interval] = {
            "max": (low, high),
            "argmax": (0, count),
            "argmax.v": (low, high),
        }
        if low > -math.inf:
            spans["min"] = (low, high)
            spans["argmin"] = (0, count)
            spans["sum"] = (min(count * low, 0) if count < 2 or low < 0 else low, max(count * high, high, 0))
            spans["mean"] = (low, high)
            spans["var"] = (0, (high - low) ** 2 / 4)
            spans["std"] = (0, (high - low) / 2)
            spans["absmax"] = _magnitude(low, high)
            spans["sumsq"] = (0, count * max(low * low, high * high))
            spans["span"] = (0, high - low)
            spans["last"] = (low, high)
        if high <= 100:
            spans["logsumexp"] = (low, high + math.log(max(1, count)))
        most = max(abs(low), abs(high), 1)
        if count * math.log(most) <= math.log(self.limit):
            spans["prod"] = (0 if low >= 0 else -(most**count), most**count)
        if not count:
            # An empty sum is 0; the extremes of no integers are those of int64, which no result need hold.
            spans = {"sum": (0, 0)}
        allowed = [name for name, span in spans.items() if self._fits(*span)]
        if op not in allowed:
            op = next(name for name in ("sum", "mean", "max") if name in allowed)
        text = f"{op}[{','.join(over)}]({body.text}{f', {over[0]}' if op == 'argmax.v' else ''})"
        span = spans[op]
        return Value(text, *span, body.axes - set(over), top=body.text if op == "max" else "")

    # -- expressions ---------------------------------------------------------------------------------

    def expression(self, scope: frozenset[str], depth: int) -> Value:
        """Any expression over some of the axes of `scope`."""
        kinds = ["leaf", "leaf", "unary", "binary", "binary"]
        kinds += ["masked", "cast", "reduced", "scaled", "clamped"] if depth > 1 else []
        match self.one_of(kinds) if depth else "leaf":
            case "unary":
                return self._applied(self.expression(scope, depth - 1), list(UNARY))
            case "cast":
                return self._applied(self.expression(scope, depth - 1), ["f16", "bf16", "f32"])
            case "binary":
                return self.combined(self.expression(scope, depth - 1), self.expression(scope, depth - 1))
            case "masked":
                return self._masked(scope, depth)
            case "scaled":
                return self._scaled(scope)
            case "clamped":
                value, bound = self.expression(scope, depth - 1), self.one_of(GREAT)
                form = self.one_of(["max({}, -{})", "min({}, {})"])
                return Value(form.format(value.text, bound), value.low, value.high, value.axes)
            case "reduced":
                axis = self.one_of(sorted(self.sizes))
                body = self.expression(scope | {axis}, depth - 2)
                return self._folded(self.one_of(["sum", "max", "mean", "min"]), (axis,), body)
            case _:
                return self._leaf(scope)

    def _fits(self, low: float, high: float) -> bool:
        return (low >= -self.limit or low == -math.inf) and high <= self.limit

    def _applied(self, value: Value, names: Sequence[str]) -> Value:
        spans: dict[str, Interval] = {}
        for name in names:
            (least, most), image = UNARY[name]
            if least <= value.low and value.high <= most:
                span = _image(image, value)
                if self._fits(*span):
                    spans[name] = span
        if not spans:
            return value
        name = self.one_of(list(spans))
        if not name.isidentifier() and name != "-":
            return Value(f"{value.tight} {name}", *spans[name], value.axes, atom=False)
        text = f"-{value.tight}" if name == "-" else f"{name}({value.text})"
        return Value(text, *spans[name], value.axes, atom=name != "-")

    def combined(self, left: Value, right: Value) -> Value:
        """Two expressions, combined by an operator that keeps them in range."""
        spans: dict[str, Interval] = {
            "max": (max(left.low, right.low), max(left.high, right.high)),
            "min": (min(left.low, right.low), min(left.high, right.high)),
            "-": (left.low - right.high, left.high - right.low),
        }
        if right.top == left.text:
            spans["-"] = (left.low - right.high, 0.0)
        if right.low > -math.inf:
            spans["+"] = (left.low + right.low, left.high + right.high)
            if left.low > -math.inf:
                ends = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
                spans["*"] = (min(ends), max(ends))
                least, _ = _magnitude(right.low, right.high)
                if least > NEGLIGIBLE:
                    ends = [a / b for a in (left.low, left.high) for b in (right.low, right.high)]
                    spans["/"] = (min(ends), max(ends))
        op = self.one_of([op for op in BINARY if op in spans and self._fits(*spans[op])])
        axes = left.axes | right.axes
        if op in ("max", "min"):
            return Value(f"{op}({left.text}, {right.text})", *spans[op], axes)
        return Value(f"{left.tight} {op} {right.tight}", *spans[op], axes, atom=False)

    def _scaled(self, scope: frozenset[str]) -> Value:
        """A value, or its distance from the mean, over the greatest magnitude along an axis."""
        value = self._load(scope) if scope else self._number(scope)
        if not value.axes or value.low == -math.inf:
            return value
        axis = self.one_of(sorted(value.axes))
        most = f"max[{axis}](abs({value.text}))"
        if self.chance(50):
            return Value(f"{value.tight} / {most}", -1, 1, value.axes, atom=False)
        return Value(f"({value.tight} - mean[{axis}]({value.text})) / {most}", -2, 2, value.axes, atom=False)

    def _masked(self, scope: frozenset[str], depth: int) -> Value:
        condition = self.condition(scope)
        kept = self.expression(scope, depth - 1)
        other = self.one_of(MASKED)
        if other == "an expression":
            value = self.expression(scope, depth - 1)
            span = min(kept.low, value.low), max(kept.high, value.high)
            return Value(
                f"where({condition}, {kept.text}, {value.text})", *span, kept.axes | value.axes | scope
            )
        least = 0.0 if other == "0" else -math.inf
        return Value(
            f"where({condition}, {kept.text}, {other})", min(kept.low, least), max(kept.high, least), scope
        )

    def condition(self, scope: frozenset[str]) -> str:
        """A truth value: affine in the axes, of parity, of a length, of data, or two of them."""
        axes = sorted(scope)
        first = self.one_of(axes) if axes else ""
        options = ["data"]
        if axes:
            options = [
                "compared",
                "compared",
                "affine",
                "affine",
                "parity",
                "length",
                "data",
                "both",
                "ends",
                "truths",
            ]
            options += ["segment"] * (len(axes) > 1)
        options += ["stored"] * (len(axes) > 0)
        options += ["key"] * (3 * self.gathers)
        options += ["known"] if self._readable(scope, truths=True) else []
        number = self.draw(st.integers(0, 4))
        match self.one_of(options):
            case "compared":
                return f"{first} {self.one_of(['<', '>=', '=='])} {number}"
            case "affine":
                second = self.one_of([axis for axis in axes if axis != first] or [f"N({first}) - 1"])
                form = self.one_of(
                    ["{a} <= {b}", "{a} - {b} < {n}", "{a} + {b} >= {n}", "{b} < {a} + {n}", "{a} != {b}"]
                )
                return form.format(a=first, b=second, n=number)
            case "parity":
                return f"({' + '.join(axes[:2])}) % 2 == 0"
            case "length":
                if self.chance(30):
                    self.scalars[LENGTH] = 3
                    return f"{first} < {LENGTH}"
                found = self._integers(scope - {first}, f"up to {first}")
                if not found:
                    return f"{first} < {number}"
                form = self.one_of(
                    ["{a} < {b}", "{a} < {b}", "{b} <= {a}", "{a} + {n} <= {b}", "{a} == {b}"]
                    + ["{n} * {a} < {b}", "{a} // 2 < {b}", "{a} < N({a}) - {b}"]
                )
                return form.format(a=first, b=found, n=number)
            case "ends":
                found = self._near_ends(scope - {first}) or f"{number}"
                form = self.one_of(
                    [
                        "{a} <= {b} + 1",
                        "{a} < {b} - 1",
                        "{a} - {b} < {n}",
                        "{b} + {b} >= {a}",
                        "{a} < abs({b})",
                    ]
                    + ["2 * {a} < {n} * {b}", "-{b} <= {a}"]
                )
                return form.format(a=first, b=found, n=number)
            case "truths":
                joint = self.one_of(["==", "!="])
                return f"({self.condition(frozenset({first}))}) {joint} ({self._leaf(scope).tight} > 0)"
            case "segment":
                second = self.one_of([axis for axis in axes if axis != first])
                found = self._parts(second, first)
                return found or f"{first} <= {second}"
            case "both":
                joint = self.one_of(["&", "|"])
                return f"({self.condition(frozenset({first}))}) {joint} ({self.condition(scope)})"
            case "stored":
                return self._stored(scope)
            case "key":
                found = first and self._places(scope - {first}, first)
                return f"{found} == {first}" if found else f"{number} == {number}"
            case "known":
                return self.one_of(self._readable(scope, truths=True)).text
            case _:
                bound = self.one_of(["> 0", "> 0", "< 0.5", ">= -1", "== 0", "> 100"])
                bound = bound if self.chance(85) else f"{self.one_of(['>', '!=', '< -'])}{self.one_of(GREAT)}"
                return f"{self._leaf(scope).tight} {bound}"

    # -- leaves --------------------------------------------------------------------------------------

    def _leaf(self, scope: frozenset[str]) -> Value:
        """A load, an earlier line, what an earlier line reduced, or a number."""
        earlier = self._readable(scope)
        again = [d.body for d in self.definitions if d.body is not None and d.body.axes <= scope]
        options = ["load"] * 4 + ["number"]
        options += ["looked up"] * (6 * self.gathers)
        options += ["line"] * 3 * bool(earlier) + ["again"] * 3 * bool(again)
        match self.one_of(options):
            case "line":
                return self.one_of(earlier)
            case "again":
                return self.one_of(again)
            case "looked up" if scope:
                return self._line_looked_up(scope) if earlier and self.chance(25) else self._looked_up(scope)
            case "load" if scope:
                return self._load(scope)
            case _:
                return self._number(scope)

    def _number(self, scope: frozenset[str]) -> Value:
        axes = sorted(scope)
        options = (
            ["0.5", "1", "2", "0.1", "-1", "3", "1e-9", "1e-30"] + ["scalar"] + ["axis", "size"] * bool(axes)
        )
        match self.one_of(options):
            case "scalar":
                self.scalars["r"] = 0.75
                return Value("r", 0.75, 0.75)
            case "axis":
                axis = self.one_of(axes)
                return Value(axis, 0, max(0, self.sizes[axis] - 1), frozenset({axis}))
            case "size":
                axis = self.one_of(axes)
                form, of = self.one_of(list(OF_SIZES.items())) if self.chance(50) else ("N({})", lambda n: n)
                value = of(self.sizes[axis])
                return Value(form.format(axis), value, value, atom=form.endswith(")"))
            case text:
                return Value(text, float(text), float(text), atom=not text.startswith("-"))

    def _readable(self, scope: frozenset[str], truths: bool = False) -> list[Value]:
        """Earlier lines, read at axes of `scope`."""
        found: list[Value] = []
        for line in self.definitions:
            if line.is_truth == truths:
                index = self._at(line.axes, scope)
                value = line.value
                if index is not None:
                    top = value.top if index == line.axes else ""
                    text = line.name + _indexed(index)
                    found.append(Value(text, value.low, value.high, frozenset(index), top=top))
        return found

    def _at(self, axes: tuple[str, ...], scope: frozenset[str]) -> tuple[str, ...] | None:
        """The axes, each as itself or as one of the same length that is in `scope`."""
        index: list[str] = []
        for axis in axes:
            others = [other for other in sorted(scope) if self._base(other) == self._base(axis)]
            if not others:
                return None
            index.append(axis if axis in others else others[0])
        return tuple(index)

    def _base(self, axis: str) -> str:
        return self.aliases.get(axis, axis)

    def _load(self, scope: frozenset[str]) -> Value:
        """A tensor that is there or a new one, read plainly, shifted, backwards, at half the pace or gathered."""
        known = [given for given in self.inputs.values() if given.name in TENSORS]
        there = [given for given in known if self._at(given.axes, scope) is not None]
        if not there and len(known) == len(TENSORS):
            return self._number(scope)
        if not there or (len(known) < len(TENSORS) and self.chance(50)):
            there = [self._new(scope, TENSORS[len(known)])]
        given = self.one_of(there)
        index = list(self._at(given.axes, scope) or ())
        low, high = DRAWS.get(given.draw, INTEGERS)
        way = self.one_of(
            ["plain"] * 12 + ["shifted", "ahead", "backwards", "half", "gathered", "next", "pairs", "halves"]
        )
        place = self.draw(st.integers(0, len(index) - 1)) if way != "plain" else 0
        axis = index[place]
        guard = ""
        match way:
            case "shifted":
                guard, index[place] = f"{axis} >= 1", f"{axis} - 1"
            case "ahead":
                guard, index[place] = f"{axis} + 2 < N({axis})", f"{axis} + 2"
            case "backwards":
                index[place] = f"N({axis}) - 1 - {axis}"
            case "half":
                index[place] = f"{axis}//2"
            case "next":
                return self._next(axis, scope)
            case "pairs":
                return self._pairs(axis)
            case "halves":
                return self._halves(axis)
            case "gathered":
                index[place] = self._integers(frozenset({axis}), f"below {self._base(axis)}") or axis
        text = given.name + _indexed(index)
        axes = frozenset(self._at(given.axes, scope) or ())
        if guard:
            return Value(f"where({guard}, {text}, 0)", min(low, 0), max(high, 0), axes)
        return Value(text, low, high, axes)

    def _looked_up(self, scope: frozenset[str]) -> Value:
        """An element of a table, at one or two positions that other tensors say."""
        if 0 in self.sizes.values():
            return self._load(scope)
        name = self.one_of(TABLES)
        if name not in self.inputs:
            looked_up = self.some(sorted(self.sizes), 1, 2 if self.chance(50) else 1)
            axes = (*looked_up, *self.some(sorted(scope - set(looked_up)), 0, 1))
            layout, draw = self.one_of(LAYOUTS), self.one_of(["normal", "positive", "ties"])
            self.inputs[name] = Input(name, self.one_of(self.dtypes), axes, draw, layout)
        given = self.inputs[name]
        index = [
            self._places(scope, axis) if place == 0 or axis not in scope else axis
            for place, axis in enumerate(given.axes)
        ]
        if not all(index):
            return self._load(scope)
        return self._guarded(name, index, *DRAWS[given.draw], scope)

    def _line_looked_up(self, scope: frozenset[str]) -> Value:
        """An earlier line at positions that a tensor says along one of its axes."""
        sized = "".join(
            line.value.text for line in self.definitions
        )  # a size has no meaning at other positions
        lines = [d for d in self.definitions if d.axes and not d.is_truth and f"N({d.axes[0]})" not in sized]
        line = self.one_of(lines) if lines else None
        rest = None if line is None else self._at(line.axes[1:], scope)
        place = "" if line is None else self._places(scope, line.axes[0])
        if line is None or rest is None or not place:
            return self._load(scope)
        return self._guarded(line.name, [place, *rest], line.value.low, line.value.high, scope)

    def _guarded(
        self, name: str, index: Sequence[str], low: float, high: float, scope: frozenset[str]
    ) -> Value:
        """What is read at an index whose first position is of data, now and then under a condition on that."""
        text = name + _indexed(index)
        if self.chance(80):
            return Value(text, low, high, scope)
        return Value(f"where({index[0]} >= 1, {text}, 0)", min(low, 0), max(high, 0), scope)

    def _places(self, scope: frozenset[str], axis: str) -> str:
        """Integers below the extent of an axis at positions of one or two others; empty where there can be none."""
        draw = f"below {self._base(axis)}"
        for name in PLACES_OF_TABLES:
            given = self.inputs.get(name)
            if given is None and scope and 0 not in self.sizes.values():
                axes = self.some(sorted(scope), 1, 2)
                given = Input(name, self.one_of(["i64", "i32"]), axes, draw, self.one_of(LAYOUTS))
                self.inputs[name] = given
            if given is not None and given.draw == draw and set(given.axes) <= scope:
                return name + _indexed(given.axes)
        return ""

    def _new(self, scope: frozenset[str], name: str) -> Input:
        axes = self.some(sorted(scope), 1, 3)
        layout = self.one_of(LAYOUTS)
        if self.chance(8):
            given = Input(name, self.one_of(["i32", "i64"]), axes, "integers", layout)
        else:
            draws = [draw for draw in DRAWS if draw != "scores" or self.chance(50)]
            dtype, draw = self.one_of(self.dtypes), self.one_of(draws)
            scaled = self.magnitudes if dtype != "f16" or "special" in self.magnitudes else ()
            given = Input(name, dtype, axes, draw, layout, self.one_of(("", *scaled)))
        self.inputs[name] = given
        return given

    def _next(self, axis: str, scope: frozenset[str]) -> Value:
        """A tensor of one position more than the axis has, read at the next one."""
        given = self.inputs.setdefault("u", Input("u", self.dtypes[0], (f"{axis}+1",), "normal"))
        there = given.axes[0].removesuffix("+1")
        if there not in scope:
            return self._number(scope)
        return Value(f"u[{there} + 1]", *DRAWS["normal"], frozenset({there}))

    def _parts(self, segment: str, axis: str) -> str:
        """Whether a position is within a segment of the axis; empty where there can be none."""
        draw = f"parts of {axis}"
        if 0 in self.sizes.values():
            return ""
        given = self.inputs.setdefault("o", Input("o", self.one_of(["i64", "i32"]), (f"{segment}+1",), draw))
        if given.draw != draw or given.axes != (f"{segment}+1",):
            return ""
        return f"(o[{segment}] <= {axis}) & ({axis} < o[{segment} + 1])"

    def _stored(self, scope: frozenset[str]) -> str:
        """A tensor of truth values."""
        given = self.inputs.get("t") or Input("t", "bool", self.some(sorted(scope), 1, 2), "true")
        index = self._at(given.axes, scope)
        if index is None:
            return f"{min(scope)} >= 1"
        self.inputs["t"] = given
        return f"t{_indexed(index)}"

    def _pairs(self, axis: str) -> Value:
        """A tensor of two positions for each of the axis, which are added up or read apart."""
        given = self.inputs.setdefault("v", Input("v", self.dtypes[0], (f"{axis}*2",), "normal"))
        there = given.axes[0].removesuffix("*2")
        low, high = DRAWS["normal"]
        if there != axis:
            return Value("1", 1, 1)
        if self.chance(50):
            return Value(f"v[2*{axis} + {self.one_of('01')}]", low, high, frozenset({axis}))
        self.pairs = True
        return Value(f"sum[q](v[{axis}*2 + q])", 2 * low, 2 * high, frozenset({axis}))

    def _halves(self, axis: str) -> Value:
        """A tensor twice as long as the axis, of which both halves are read at the same place."""
        given = self.inputs.setdefault(HALVES, Input(HALVES, self.dtypes[0], (f"{axis}*2",), "normal"))
        there = given.axes[0].removesuffix("*2")
        low, high = DRAWS["normal"]
        if there != axis:
            return Value("1", 1, 1)
        return Value(
            f"H[{axis}] - H[{axis} + N({axis})]", low - high, high - low, frozenset({axis}), atom=False
        )

    def _near_ends(self, scope: frozenset[str]) -> str:
        """A tensor of integers near the ends of their range, over one of the axes; empty where there can be none."""
        given = self.inputs.get("M")
        if given is None and scope:
            given = Input("M", self.one_of(ENDS), (min(scope),), "near ends", self.one_of(LAYOUTS))
            self.inputs["M"] = given
        return "" if given is None or not set(given.axes) <= scope else f"M{_indexed(given.axes)}"

    def _integers(self, scope: frozenset[str], draw: str) -> str:
        """An integer tensor over some of the axes; empty where there can be none."""
        if not scope or 0 in self.sizes.values():
            return ""
        for name, given in self.inputs.items():
            if given.draw == draw and given.axes and set(given.axes) <= scope:
                return name + _indexed(given.axes)
        name = "n" if draw.startswith("up") else "p"
        if name in self.inputs:
            return ""
        self.inputs[name] = Input(name, self.one_of(["i64", "i32"]), (min(scope),), draw)
        return name + _indexed((min(scope),))


def _image(image: Callable[[float, float], Interval], value: Value) -> Interval:
    """Where a function takes an interval, also one that starts at -inf."""
    low = -1e4 if value.low == -math.inf else value.low
    least, most = image(low, value.high)
    return (-math.inf if least == -1e4 else least), most


@st.composite
def programs(draw: st.DrawFn, gathers: bool = False) -> Example:
    """Programs with everything that they are called with; with `gathers`, most of them read elements at integers that a tensor holds, or reduce by
    such keys."""
    count = draw(st.integers(1, 4))
    sizes = {axis: draw(st.sampled_from(SIZES)) for axis in AXES[:count]}
    aliases: dict[str, str] = {}
    if count > 1 and draw(st.integers(0, 7)) == 7:
        aliases[AXES[count - 1]] = AXES[0]
        sizes[AXES[count - 1]] = sizes[AXES[0]]
    while math.prod(max(1, size) for size in sizes.values()) > MOST_ELEMENTS:
        sizes = {axis: min(size, max(sizes.values()) // 2) for axis, size in sizes.items()}
    limit = WIDE_LIMIT if draw(st.integers(0, 7)) == 7 else LIMIT
    magnitudes = tuple(MAGNITUDES) if draw(st.integers(0, 5)) == 5 else ()
    magnitudes = ("special",) if draw(st.integers(0, 15)) == 15 else magnitudes
    writer = _Writer(draw, sizes, aliases, draw(st.sampled_from(DTYPES)), limit, magnitudes, gathers=gathers)
    main = writer.one_of(list(sizes)[::-1])
    rows = writer.some([axis for axis in sizes if axis != main], 0, 2)
    if writer.chance(6):
        for _ in range(draw(st.integers(2, MOST_LAYERS))):
            writer.layer(rows, main)
        return _finished(writer)
    for _ in range(draw(st.integers(1, 4))):
        if writer.chance(25):
            writer.map((*rows, main))
        writer.reduction(rows, main)
    if writer.chance(50):
        writer.map((*rows, main) if writer.chance(70) else rows)
    return _finished(writer)


def _finished(writer: _Writer) -> Example:
    """The text of what was written: declarations, lines, and what is returned."""
    lines = [f"{line.left} = {line.value.text}" for line in writer.definitions]
    body = "\n".join(lines)
    inputs = tuple(given for given in writer.inputs.values() if _is_read(given.name, lines))
    head = [given.declared for given in inputs]
    head += [f"{name}: f32" for name in writer.scalars if name != LENGTH and _is_read(name, lines)]
    head += ["q: axis[2]"] * (writer.pairs and _is_read("q", lines))
    head += [
        f"{axis}: axis[{base}]" for axis, base in writer.aliases.items() if _is_read(axis, (*head, *lines))
    ]
    last = [d.name for n, d in enumerate(writer.definitions) if not _is_read(d.name, lines[n + 1 :])]
    returned = [d.name for d in writer.definitions if d.name in last or writer.chance(20)]
    if len(returned) > 1 and writer.chance(40):
        returned = list(writer.draw(st.permutations(returned)))
    if returned != last:
        lines.append(f"return {', '.join(returned)}")
    block, shards = writer.one_of([2, 3, 4, 8]), writer.one_of([2, 3])
    scalars = {name: number for name, number in writer.scalars.items() if _is_read(name, [body])}
    seed = writer.draw(st.integers(0, 3))
    place = writer.one_of(PLACES)
    return Example("\n".join([*head, *lines]), inputs, writer.sizes, scalars, block, shards, seed, place)


def _is_read(name: str, lines: Iterable[str]) -> bool:
    """Whether lines have a name, not as a state variable (`argmax.v`)."""
    return any(re.search(rf"(?<!\.)\b{name}\b", line) for line in lines)
