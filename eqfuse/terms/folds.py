"""Folds with a state of several values: what a registered reduction becomes in expressions.

A `Fold` is a monoid: the identity of every state variable, and how the states of two disjoint parts of an axis
become the state of their union. Each variable is a reduction of its own, `Reduce("argmax.k", axis, body)`, so that
states, loops and merges need no second kind of value; its body packs what one position contributes to all of
them: `pair(x[i, j], j)`, written `argmax.k[j](x[i, j], j)`. The variables of one fold over one body are folded
together wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    children,
    rebuild,
    replaced,
    walk,
)

PAIR = "pair"
"""The function that packs two values, right-nested for more: the body of a fold's reduction, and what its functions
take in a merge."""

NOWHERE = 2**31 - 1
"""A position that comes after every other; positions are kept in 32 bits."""


@dataclass(frozen=True)
class Fold:
    """`combine` gives each variable of the union, over `Local("v1", ())` of the left part and `Local("v2", ())` of
    the right. Where not `commutative`, parts are only ever combined in the order of their positions.
    A fold with an `order` keeps the one of both states that comes first in it: a key is a state variable and whether
    the greatest of it is first, else the least; later keys decide among equals, and NaN comes before all numbers.
    Every state variable is a key. `combine` says the same.
    A fold with an order may have `ranks`: the state variable that is a position. Its reductions come in a row, each of
    what the ones before it have not taken."""

    name: str
    state: tuple[str, ...]
    identity: tuple[Const, ...]
    combine: tuple[Expr, ...]
    commutative: bool = False
    order: tuple[tuple[str, bool], ...] = ()
    ranks: str = ""

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

    def left(self, taken: Expr, parts: Sequence[Expr]) -> tuple[Expr, ...]:
        """What one position contributes to a rank: the identity where earlier ones have taken it."""
        return tuple(
            call("where", taken, nothing, part) for nothing, part in zip(self.identity, parts, strict=True)
        )

    def next_of(self, states: Sequence[Sequence[Expr]], taken: Sequence[Expr]) -> tuple[Expr, ...]:
        """The first state whose position is none of those that are taken, of one state more than these are; the
        last one where there is no other."""
        place = self.state.index(self.ranks)
        *before, found = states
        for state in reversed(before):
            gone: Expr = call("eq", state[place], taken[0])
            for position in taken[1:]:
                gone = call("or", gone, call("eq", state[place], position))
            found = [call("where", gone, rest, own) for rest, own in zip(found, state, strict=True)]
        return tuple(found)

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


NEXT = ".next"
"""Ends the name of the function of ranks: `topk.v.next(states, positions)` is `Fold.next_of` for one variable. Both are
packed, the states of the last rank first, and so are the positions."""


def next_op(fn: str) -> tuple[Fold, int] | None:
    """The fold and the state variable that a function of ranks is of; None for any other function."""
    return fold_of(fn.removesuffix(NEXT)) if fn.endswith(NEXT) else None


def written_out(
    values: Iterable[tuple[str, Expr]], dims: Mapping[str, tuple[str, ...]]
) -> dict[str, list[tuple[str, Expr]]]:
    """The values of states in a merge, with the functions of folds replaced by what they stand for: by state, the
    steps (name, value) that end at its new value. What is left of ranks is read several times, so it is a step, and so
    is whether a rank is taken, which each later rank asks again."""
    known: dict[Expr, Expr] = {}
    found: dict[str, list[tuple[str, Expr]]] = {}

    def step(of: Expr, name: str, value: Expr) -> None:
        state = next(reversed(found))
        found[state].append((f"{state}_{name}{len(found[state]) + 1}", value))
        known[of] = Local(found[state][-1][0], dims[state])

    for state, value in values:
        found[state] = []
        memo: dict[Expr, Expr] = {}
        for node in walk(value):
            memo[node] = known.get(node) or combined(rebuild(node, tuple(memo[c] for c in children(node))))
            if isinstance(node, Call) and next_op(node.fn) and node not in known:
                for part in walk(memo[node]):
                    if isinstance(part, Call) and part.fn == "or" and part not in known:
                        step(part, "gone", rebuild(part, tuple(known.get(c, c) for c in part.args)))
                step(node, "left", replaced(memo[node], known))
                memo[node] = known[node]
        found[state].append((f"{state}_new", memo[value]))
    return found


def combined(node: Expr) -> Expr:
    """What a function of a fold stands for, on packed states; any other expression is itself."""
    match node:
        case Call(fn, (left, right)) if (found := fold_of(fn)) is not None:
            fold, index = found
            return fold.joined(*(unpacked(side, len(fold.state)) for side in (left, right)))[index]
        case Call(fn, (states, taken)) if (found := next_op(fn)) is not None:
            fold, index = found
            positions = listed(taken)
            rows = [unpacked(row, len(fold.state)) for row in unpacked(states, len(positions) + 1)]
            return fold.next_of(rows[::-1], positions[::-1])[index]
        case _:
            return node


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


def listed(body: Expr) -> tuple[Expr, ...]:
    """The values that are packed, none of which is a pack itself."""
    parts: list[Expr] = []
    while isinstance(body, Call) and body.fn == PAIR:
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
