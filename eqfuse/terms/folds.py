"""Folds with a state of several values: what a registered reduction becomes in expressions.

A `Fold` is a monoid: the identity of every state variable, and how the states of two disjoint parts of an axis
become the state of their union. Each variable is a reduction of its own, `Reduce("argmax.k", axis, body)`, so that
states, loops and merges need no second kind of value; its body packs what one position contributes to all of
them: `pair(x[i, j], j)`, written `argmax.k[j](x[i, j], j)`. The variables of one fold over one body are folded
together wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from eqfuse.terms.nodes import (
    COMBINE,
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Local,
    Reduce,
    call,
    replaced,
    walk,
)

PAIR = "pair"
"""The function that packs two values, right-nested for more; only ever the body of a fold's reduction."""


@dataclass(frozen=True)
class Fold:
    """`combine` gives each variable of the union, over `Local("v1", ())` of the left part and `Local("v2", ())` of
    the right. Where not `commutative`, parts are only ever combined in the order of their positions.
    A fold with an `order` keeps the one of both states that comes first in it: a key is a state variable and whether
    the greatest of it is first, else the least; later keys decide among equals, and NaN comes before all numbers.
    Every state variable is a key. `combine` says the same."""

    name: str
    state: tuple[str, ...]
    identity: tuple[Const, ...]
    combine: tuple[Expr, ...]
    commutative: bool = False
    order: tuple[tuple[str, bool], ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The op of each state variable's reduction."""
        return tuple(f"{self.name}.{variable}" for variable in self.state)

    @property
    def temporaries(self) -> Iterator[str]:
        """Names for intermediate values in code that combines states, apart from those of the states."""
        taken = {f"{name}{side}" for name in self.state for side in (1, 2)}
        return (name for number in count(1) if (name := f"t{number}") not in taken)

    def joined(self, left: Sequence[Expr], right: Sequence[Expr]) -> tuple[Expr, ...]:
        """The state of a union from those of its two parts."""
        values = {Local(f"{v}1", ()): value for v, value in zip(self.state, left, strict=True)}
        values |= {Local(f"{v}2", ()): value for v, value in zip(self.state, right, strict=True)}
        return tuple(replaced(part, values) for part in self.combine)

    def selects(self, index: int) -> bool:
        """Whether a variable of the union is that of one of its parts, so that nothing is computed."""
        return _selects(self.combine[index], self.state[index])


def _selects(expr: Expr, variable: str) -> bool:
    match expr:
        case Local(name, _):
            return name in (f"{variable}1", f"{variable}2")
        case Call("where", (_, left, right)) | Call("maximum" | "minimum", (left, right)):
            return _selects(left, variable) and _selects(right, variable)
        case _:
            return False


FOLDS: dict[str, Fold] = {}
"""Every fold that a registered reduction has, by name."""


def fold_of(op: str) -> tuple[Fold, int] | None:
    """The fold and the state variable that a reduction's op stands for; None for a built-in one."""
    name, dot, variable = op.partition(".")
    fold = FOLDS.get(name) if dot else None
    return (fold, fold.state.index(variable)) if fold is not None and variable in fold.state else None


def is_reduction(op: str) -> bool:
    """Whether `op` is a built-in reduction or a state variable of a fold."""
    return op in REDUCTIONS or fold_of(op) is not None


def identity(op: str) -> Const:
    """What a reduction of nothing gives."""
    found = fold_of(op)
    return Const(REDUCTIONS[op]) if found is None else found[0].identity[found[1]]


def packed(parts: Sequence[Expr]) -> Expr:
    """The body of a fold's reduction, from what one position contributes to each state variable."""
    *first, body = parts
    for part in reversed(first):
        body = Call(PAIR, (part, body))
    return body


def unpacked(body: Expr, size: int) -> tuple[Expr, ...]:
    """What one position contributes to each of `size` state variables."""
    parts: list[Expr] = []
    while len(parts) < size - 1:
        assert isinstance(body, Call) and body.fn == PAIR
        first, body = body.args
        parts.append(first)
    return (*parts, body)


def contributions(reduce: Reduce) -> tuple[Expr, ...]:
    """What one position contributes: to every state variable of a fold, or to a built-in reduction."""
    found = fold_of(reduce.op)
    return (reduce.body,) if found is None else unpacked(reduce.body, len(found[0].state))


def joined(op: str, left: Mapping[str, Expr], right: Mapping[str, Expr]) -> Expr:
    """The value of one op over a union, given by op the values of every variable of its fold over the parts."""
    found = fold_of(op)
    if found is None:
        return call(COMBINE[op], left[op], right[op])
    fold, index = found
    return fold.joined([left[o] for o in fold.ops], [right[o] for o in fold.ops])[index]


def siblings(reduce: Reduce) -> tuple[Reduce, ...]:
    """The reductions of every state variable of the same fold, this one among them."""
    found = fold_of(reduce.op)
    return (reduce,) if found is None else tuple(Reduce(o, reduce.axis, reduce.body) for o in found[0].ops)


def folds_in(*roots: Expr) -> tuple[Fold, ...]:
    """The folds whose state variables the expressions reduce with."""
    ops = dict.fromkeys(node.op for node in walk(*roots) if isinstance(node, Reduce))
    return tuple(dict.fromkeys(found[0] for op in ops if (found := fold_of(op)) is not None))
