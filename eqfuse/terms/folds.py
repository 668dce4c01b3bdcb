"""Folds with a state of several values: what a registered reduction becomes in expressions.

A `Fold` is a monoid: the identity of every state variable, and how the states of two disjoint parts of an axis
become the state of their union. Each variable is a reduction of its own, `Reduce("argmax.k", axis, body)`, so that
states, loops and merges need no second kind of value; its body packs what one position contributes to all of
them: `pair(x[i, j], j)`, written `argmax.k[j](x[i, j], j)`. The variables of one fold over one body are folded
together wherever they are computed.

A fold with ranks keeps a list: the body of its reduction packs the axis of ranks first, `pair(k, pair(x[i, j], j))`,
written `topk.v[j, k](x[i, j], j)`; its value has a component for every rank. Two lists along an axis are merged by
`topk.v(pair(k, pair(v1, p1)), pair(v2, p2))`, written `topk.v[k](v1, p1, v2, p2)`: no function of one rank alone, so
that wherever it is computed, all of the axis of ranks is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from eqfuse.terms.nodes import (
    COMBINE,
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Reduce,
    Scan,
    call,
    children,
    transform,
    walk,
)
from eqfuse.terms.printer import WRITTEN

PAIR = "pair"
"""The function that packs two values, right-nested for more: the body of a fold's reduction, and what its functions
take in a merge."""

NOWHERE = 2**31 - 1
"""A position that comes after every other; positions are kept in 32 bits."""

MAX_RANKS = 256
"""Ranks that a list may have: all of it is kept on chip."""


FOLDS: dict[str, Fold] = {}
"""Every fold that a registered reduction has, by name."""


def fold_of(op: str) -> tuple[Fold, int] | None:
    """The fold and the state variable that a reduction's op stands for; None for a built-in one."""
    if "." not in op:
        return None
    name, _, variable = op.partition(".")
    fold = FOLDS.get(name)
    return (fold, fold.state.index(variable)) if fold is not None and variable in fold.state else None


def is_ranked(op: str) -> bool:
    """Whether a reduction's op, or a function of a merge, makes a list along an axis of ranks."""
    found = fold_of(op)
    return found is not None and found[0].ranks != ""


def ranks_of(expr: Expr) -> str | None:
    """The axis of ranks along which a reduction, or the merge of two lists, is a list; None for any other expression."""
    match expr:
        case Reduce(op, _, Call(fn, (Axis(ranks), _))) if fn == PAIR and is_ranked(op):
            return ranks
        case Call(op, (Call(fn, (Axis(ranks), _)), _)) if fn == PAIR and is_ranked(op):
            return ranks
        case _:
            return None


def rank_axes(*roots: Expr) -> frozenset[str]:
    """The axes along which the expressions make lists."""
    return frozenset(ranks for node in _paired(roots) if (ranks := ranks_of(node)) is not None)


@lru_cache(4096)
def _paired(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """What reads a number with an axis of ranks: `ranks_of` knows whether it is of a fold with ranks."""
    return tuple(
        node
        for node in walk(*roots)
        if any(isinstance(part, Call) and part.fn == PAIR for part in children(node))
    )


def sides(merge: Call) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """The states that a function of a fold, on packed states, makes one of."""
    found = fold_of(merge.fn)
    assert found is not None
    count = len(found[0].state)
    left, right = merge.args
    return unpacked(_listed(left, found[0]), count), unpacked(right, count)


def _listed(body: Expr, fold: Fold) -> Expr:
    """What is packed behind the axis of ranks, where the fold has them."""
    if not fold.ranks:
        return body
    assert isinstance(body, Call) and body.fn == PAIR
    return body.args[1]


def written_out(value: Expr) -> Expr:
    """A value of a merge with the functions of folds replaced by what they stand for; that of a list, which merges all
    of it at once, stays."""
    return transform(value, combined)


def combined(node: Expr) -> Expr:
    """What a function of a fold stands for, on packed states; any other expression is itself."""
    match node:
        case Call(fn, _) if (found := fold_of(fn)) is not None and not found[0].ranks:
            fold, index = found
            return fold.combined(*sides(node))[index]
        case _:
            return node


def is_reduction(op: str) -> bool:
    """Whether `op` is a built-in reduction or a state variable of a fold."""
    return op in REDUCTIONS or fold_of(op) is not None


def identity(op: str) -> Const:
    """What a reduction of nothing gives."""
    found = fold_of(op)
    return Const(REDUCTIONS[op]) if found is None else found[0].identity[found[1]]


def whole_identity(op: str) -> Const:
    """`identity`, as an integer where it is one: beside integers it is no real number then."""
    number = identity(op)
    return Const(int(number.value)) if float(number.value).is_integer() else number


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


def all_unpacked(body: Expr) -> tuple[Expr, ...]:
    """What is packed, however many values these are."""
    parts: list[Expr] = []
    while isinstance(body, Call) and body.fn == PAIR:
        first, body = body.args
        parts.append(first)
    return (*parts, body)


def only_where(condition: Expr, op: str, body: Expr) -> Expr:
    """The body of a reduction, which contributes nothing where a condition does not hold."""
    found = fold_of(op)
    nothing = map(whole_identity, (op,) if found is None else found[0].ops)
    return packed([call("where", condition, *each) for each in zip(all_unpacked(body), nothing, strict=True)])


def contributions(reduce: Reduce) -> tuple[Expr, ...]:
    """What one position contributes: to every state variable of a fold, or to a built-in reduction."""
    found = fold_of(reduce.op)
    if found is None:
        return (reduce.body,)
    return unpacked(_listed(reduce.body, found[0]), len(found[0].state))


def contribution(reduce: Reduce) -> Expr:
    """What one position contributes to the state variable that a reduction gives: its value over that position alone."""
    found = fold_of(reduce.op)
    return reduce.body if found is None else contributions(reduce)[found[1]]


def over_union(reduce: Reduce, left: Mapping[str, Expr], right: Mapping[str, Expr]) -> Expr:
    """The value of a reduction over a union, given by op the values of every variable of its fold over the parts."""
    found = fold_of(reduce.op)
    if found is None:
        return call(COMBINE[reduce.op], left[reduce.op], right[reduce.op])
    fold, index = found
    ranks = ranks_of(reduce)
    parts = [[side[op] for op in fold.ops] for side in (left, right)]
    return fold.combined(*parts)[index] if ranks is None else merged(reduce.op, ranks, *parts)


def merged(op: str, ranks: str, left: Sequence[Expr], right: Sequence[Expr]) -> Expr:
    """A state variable of two lists along an axis of ranks, merged to one."""
    return Call(op, (ranked(ranks, left), packed(right)))


def ranked(ranks: str, parts: Sequence[Expr]) -> Expr:
    """The body of a reduction to a list along an axis of ranks, from what one position contributes to each state
    variable."""
    return packed((Axis(ranks), *parts))


def siblings(reduce: Reduce) -> tuple[Reduce, ...]:
    """The reductions of every state variable of the same fold, this one among them."""
    found = fold_of(reduce.op)
    return (reduce,) if found is None else tuple(Reduce(o, reduce.axis, reduce.body) for o in found[0].ops)


def folds_in(*roots: Expr) -> tuple[Fold, ...]:
    """The folds whose state variables the expressions reduce with."""
    ops = dict.fromkeys(node.op for node in walk(*roots) if isinstance(node, Reduce))
    return tuple(dict.fromkeys(found[0] for op in ops if (found := fold_of(op)) is not None))


def _written(node: Expr, text: Callable[[Expr], str]) -> str | None:
    """How a reduction, a merge or a pair is written."""
    match node:
        case Reduce(op, axis, _) if fold_of(op) is not None:
            axes = [axis] if (ranks := ranks_of(node)) is None else [axis, ranks]
            return f"{op}[{', '.join(axes)}]({', '.join(map(text, contributions(node)))})"
        case Call(fn, (left, right)) if fn == PAIR:
            packed = isinstance(right, Call) and right.fn == PAIR
            return f"({text(left)}, {text(right)[1:-1] if packed else text(right)})"
        case Scan(fold, place, axis, body, first):
            parts = ", ".join(map(text, unpacked(body, len(fold.state))))
            return f"scan.{fold.state[place]}[{axis}{f' from {first}' if first else ''}]({parts})"
        case Call(fn, _) if (ranks := ranks_of(node)) is not None:
            states = [part for side in sides(node) for part in side]
            return f"{fn}[{ranks}]({', '.join(map(text, states))})"
        case _:
            return None


WRITTEN.append(_written)
