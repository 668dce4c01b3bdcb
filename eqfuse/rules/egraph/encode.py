"""Expressions to e-graph terms and back.

Subtraction, division and reciprocal roots have no constructor of their own: a - b is a + (-b), a / b
is a * inv(b), rsqrt(a) is inv(sqrt(a)). What the rules cannot look into (loads, positions,
predicates without reductions) becomes a leaf. A load whose index reads a state is a function of its index,
`Apply1 "W[]"`: its value is another one over another part of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from eqfuse.rules.guards import guarded
from eqfuse.rules.scope import current
from eqfuse.rules.split import reads_state
from eqfuse.terms.folds import PAIR, all_unpacked, fold_of, packed
from eqfuse.terms.functions import CASTS, FUNCTIONS
from eqfuse.terms.integers import in_short
from eqfuse.terms.nodes import (
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    walk,
)

_HEADS = {row.name: row.constructor for row in FUNCTIONS.values() if row.constructor}
_FUNCTIONS = {head: fn for fn, head in _HEADS.items()}

AT = "[]"
"""What follows a tensor's name in that of the function from an index, packed, to the tensor's element."""

ONE = '(Num "1")'
ZERO = '(Num "0")'
NUMBERS_OF_RULES = (0, 1, float("-inf"))
"""What the right sides of rules may bring in."""


def quote(text: str) -> str:
    """`text` as an egglog string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def global_name(name: str) -> str:
    """The egglog name of a global. egglog (13.2) puts a number behind a name where it needs a fresh one, one count for
    each name, so that `$t2` and `$t21` may meet, and one be taken for the other: a global's name ends in no digit."""
    return f"${name}_"


@dataclass
class Encoder:
    """Encodes expressions of one program; remembers what each leaf and number stands for, and by part the term of each
    expression.

    Casts are transparent unless `strict_casts`. `axis` is the one that is split, None where all are whole. `is_deep` looks into
    functions that read no reduction, and takes a factor that is written as 0 for one.
    """

    strict_casts: bool = False
    axis: str | None = None
    is_deep: bool = False
    leaves: dict[str, Expr] = field(default_factory=dict)
    numbers: dict[str, Const] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    terms: dict[str, dict[Expr, str]] = field(default_factory=dict)

    def leaf(self, expr: Expr) -> str:
        name = str(expr)
        while self.leaves.setdefault(name, expr) is not expr:
            name += "'"
        return f"(Leaf {quote(name)})"

    def number(self, value: float | bool) -> str:
        number = in_short(value)
        text = repr(number)
        self.numbers.setdefault(text, Const(number))
        return f'(Num "{text}")'

    def encode(
        self,
        expr: Expr,
        part: str = "ALL",
        local: Mapping[str, str] | None = None,
        opaque: Callable[[Expr], bool] = lambda expr: False,
    ) -> str:
        """The name of the term of `expr`; the commands that define it are added to `lines`.

        Reductions of an axis are over its `part`. `local` gives the terms of states by name;
        subexpressions for which `opaque` holds become leaves.
        """
        terms = self.terms.setdefault(part, {})
        stack = [expr]
        while stack:
            node = stack[-1]
            if node in terms:
                stack.pop()
                continue
            below = () if opaque(node) else [c for c in self._parts(node, local or {}) if c not in terms]
            if below:
                stack.extend(below)
                continue
            terms[node] = self._define(node, terms, part, local or {}, opaque)
        return terms[expr]

    @staticmethod
    def _parts(expr: Expr, local: Mapping[str, str]) -> tuple[Expr, ...]:
        return children(expr) if isinstance(expr, Call | Reduce) or _reads_at(expr, local) else ()

    def _define(
        self,
        expr: Expr,
        terms: Mapping[Expr, str],
        part: str,
        local: Mapping[str, str],
        opaque: Callable[[Expr], bool],
    ) -> str:
        match expr:
            case Const(value):
                return self.number(value)
            case Local(name, _) if name in local:
                return local[name]
            case Reduce(op, axis, body) if not opaque(expr):
                text = f'(Red "{op}" "{axis}" "{part}" {terms[body]})'
            case Call("div", (a, Size(axis))) if (
                self.axis in (None, axis) and not opaque(expr) and _folds(a, axis, local)
            ):
                # a mean: what divides a sum over a part is the number of positions of that part
                text = f'(Mul {terms[a]} (Inv (Red "sum" "{axis}" "{part}" {ONE})))'
            case Call(fn, args) if not opaque(expr):
                text = self._call(expr, fn, [terms[a] for a in args])
            case Load(tensor, index) if _reads_at(expr, local):
                *first, inner = [terms[part] for part in index]
                for part_of in reversed(first):
                    inner = f'(Apply2 "{PAIR}" {part_of} {inner})'
                text = f'(Apply1 "{tensor}{AT}" {inner})'
            case _:
                return self.leaf(expr)
        name = global_name(f"t{len(self.lines)}")
        self.lines.append(f"(let {name} {text})")
        if text.startswith(("(Cast", "(Exp", "(Add", "(Mul", "(Sq ", "(Red")):
            self.lines.append(f"(written {name})")
        return name

    def _call(self, expr: Call, fn: str, args: list[str]) -> str:
        match fn:
            case "sub":
                return f"(Add {args[0]} (Neg {args[1]}))"
            case "div":
                return f"(Mul {args[0]} (Inv {args[1]}))"
            case "rsqrt":
                return f"(Inv (Sqrt {args[0]}))"
            case "relu":
                return f"(Max {args[0]} {ZERO})"
        if fn in _HEADS and (self.is_deep or not (fn == "mul" and _has_zero(expr))):
            return f"({_HEADS[fn]} {' '.join(args)})"
        if fn in CASTS and not self.strict_casts:
            return f'(Cast "{fn}" {args[0]})'
        if fn != PAIR and not self.is_deep and not _reads_reduction(expr):
            return self.leaf(expr)
        match args:
            case [a]:
                return f'(Apply1 "{fn}" {a})'
            case [a, b]:
                return f'(Apply2 "{fn}" {a} {b})'
        return self.leaf(expr)

    def facts(self, axes: Iterable[str]) -> list[str]:
        """Dependence of every leaf and number on every axis, and signs of numbers."""
        for value in (*NUMBERS_OF_RULES, *current().numbers):
            self.number(value)
        lines: list[str] = []
        for text, const in self.numbers.items():
            term = f'(Num "{text}")'
            lines += [f'(fixed {term} "{axis}") (plain {term} "{axis}")' for axis in axes]
            if abs(const.value) != float("inf"):
                lines.append(f"(constant {term})")
            if 0 < const.value < float("inf"):
                lines.append(f"(positive {term})")
            if const.value >= 0:
                lines.append(f"(nonneg {term})")
            if const.value <= 0:
                lines.append(f"(nonpos {term})")
        for name, expr in self.leaves.items():
            free = free_axes(expr)
            term = f"(Leaf {quote(name)})"
            for axis in axes:
                lines.append(
                    f'({"varies" if axis in free else "fixed"} {term} "{axis}") (plain {term} "{axis}")'
                )
            if isinstance(expr, Size):
                lines.append(f"(nonneg {term}) (positive {term})")
                if self.axis is None:
                    lines.append(f'(count {term} "{expr.axis}" "ALL")')
            if isinstance(expr, Scalar):
                lines.append(f"(scalar {term})")
        return lines

    def decode(self, head: str, words: tuple[str, ...], args: tuple[Expr, ...]) -> Expr:
        """The expression of one e-node, its children decoded already."""
        match head, words, args:
            case "Num", (text,), ():
                return self.numbers[text]
            case "Leaf", (name,), ():
                return self.leaves[name]
            case "Add", (), (a, Call("neg", (b,))):
                return call("sub", a, b)
            case "Add", (), (Call("neg", (a,)), b):
                return call("sub", b, a)
            case "Mul", (), (a, Call("div", (Const(1), b))):
                return call("div", a, b)
            case "Mul", (), (Call("div", (Const(1), a)), b):
                return call("div", b, a)
            case "Inv", (), (Call("sqrt", (a,)),):
                return call("rsqrt", a)
            case "Inv", (), (a,):
                return call("div", Const(1), a)
            case "Max", (), (a, Const(0)):
                return call("relu", a)
            case "Cast", (fn,), (a,):
                return call(fn, a)
            case "Ratio", (), (a, b) if not reads_state(a) and not reads_state(b):
                return call("div", a, b)  # known before anything is seen: what is 0 or infinite stays so
            case "Ratio", (), (a, b):  # total: where a factor is 0 or infinite, 1 stands for it
                safe = guarded("invertible", a)
                return safe if b is Const(1) else call("div", safe, guarded("invertible", b))
            case "Delta", (), (a, b):  # total: where a term is infinite, 0 stands for it
                safe = guarded("finite", a)
                return safe if b is Const(0) else call("sub", safe, guarded("finite", b))
            case "Apply1", (fn,), (a,) if fn.endswith(AT):
                return Load(fn.removesuffix(AT), all_unpacked(a))
            case "Apply2", (fn,), (a, b) if fn == PAIR:
                return packed((a, b))
            case "Apply2", (fn,), _ if fold_of(fn):
                return Call(fn, args)
            case "Apply1" | "Apply2", (fn,), _:
                return call(fn, *args)
            case "Red", ("sum", axis, "ALL"), (Const(1),):
                return Size(axis)
            case "Red", (op, axis, _), (body,):
                return Reduce(op, axis, body)
        return call(_FUNCTIONS[head], *args)


def _folds(expr: Expr, axis: str, local: Mapping[str, str]) -> bool:
    """Whether `expr` reads a reduction over `axis`, as itself or as one of these states."""
    return any(
        (isinstance(node, Reduce) and node.axis == axis) or (isinstance(node, Local) and node.name in local)
        for node in walk(expr)
    )


def _reads_at(expr: Expr, local: Mapping[str, str]) -> bool:
    """Whether an expression is a load at an index that reads one of these states."""
    return (
        bool(local)
        and isinstance(expr, Load)
        and any(isinstance(node, Local) and node.name in local for node in walk(*expr.index))
    )


def _has_zero(expr: Call) -> bool:
    """Whether 0 is a factor as it is written: rules take 0 a for 0, which is NaN where a is infinite."""
    return any(isinstance(arg, Const) and arg.value == 0 for arg in expr.args)


def _reads_reduction(expr: Expr) -> bool:
    return any(isinstance(node, Reduce | Local) for node in walk(expr))
