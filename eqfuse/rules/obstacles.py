"""Why a group of reductions has no merge: what stands in the way, and the condition that no rule could meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from eqfuse.rules.merge import Obstacle, State
from eqfuse.rules.split import Split
from eqfuse.terms.folds import PAIR, contributions
from eqfuse.terms.nodes import Call, Expr, Local, Reduce, free_axes, walk
from eqfuse.terms.printer import show

INFINITIES, INTEGERS = "what is infinite or NaN would come out wrong", "integers would be rounded"
DIGITS = "no digit might be left of a small sum"
"""What merges that are derived, and refused, would not keep."""


def obstacle(state: State, split: Split, nonneg: Callable[[Expr], bool]) -> Obstacle:
    """The smallest part of the body that mixes a varying value with a state in a way no rule separates.
    `nonneg` tells of values that read states whether a fact says that they are at least 0."""
    axis = split.axis
    separable = {"add", "sub", "mul", "div", "neg", "abs", "sq", "sqrt", "rsqrt", "exp", "log", "where", PAIR}
    parts = [part for part in contributions(Reduce(state.op, axis, state.body)) if split.reads(part)]
    mixed = [
        node
        for node in walk(state.body)
        if isinstance(node, Call)
        and split.reads(node)
        and axis in free_axes(node)
        and node.fn not in separable
    ]
    factor = mixed[0] if mixed else parts[0] if parts else state.body
    unsigned = [
        part
        for part in _where_signs_matter(state)
        for part in _fixed_factors(part, split)
        if not nonneg(part)
    ]
    if mixed:
        condition = f"no rule separates what varies along {axis} from the value of {_producers(factor)} in it"
    elif unsigned:
        condition = (
            f"no fact says that {show(unsigned[0])} >= 0, so that it could leave the {state.op} over {axis}"
        )
    else:
        condition = f"no rule takes a factor or term of it out of the {state.op} over {axis}"
    return Obstacle(Reduce(state.op, axis, state.body), factor, condition)


def _where_signs_matter(state: State) -> Iterator[Expr]:
    """Expressions out of which nonnegative factors alone may be taken: bodies of maxima, arguments of roots."""
    if state.op in ("max", "min"):
        yield state.body
    for node in walk(state.body):
        match node:
            case Call("sqrt" | "rsqrt" | "log", (a,)):
                yield a


def _fixed_factors(expr: Expr, split: Split) -> Iterator[Expr]:
    """Factors and divisors of a product that read states and do not vary along the axis."""
    if split.hoists(expr):
        yield expr
        return
    match expr:
        case Call("mul" | "div", (a, b)):
            yield from _fixed_factors(a, split)
            yield from _fixed_factors(b, split)
        case Call("neg", (a,)):
            yield from _fixed_factors(a, split)


def unrestored(axis: str, state: State, total: Expr) -> Obstacle:
    """What a guarded sum cannot be given back at the end."""
    condition = (
        f"no repair of the sum over {axis} restores it where a value or {_producers(total)} is infinite"
    )
    return Obstacle(Reduce(state.op, axis, state.body), total, condition, INFINITIES)


def undefined_before(axis: str, state: State, root: Expr) -> Obstacle:
    """What has no value for a part of the axis, although it has for the whole."""
    condition = f"no fact says that {show(root)} is a number before all of {axis} is seen"
    return Obstacle(Reduce(state.op, axis, state.body), root, condition, INFINITIES)


def cancelling(axis: str, state: State, shift: Expr) -> Obstacle:
    """A sum around a shift that moves further than what it is a shift of."""
    condition = (
        f"the sum over {axis} would cancel where {_producers(shift)} changes: it is no mean and no extreme of what it "
        f"is added to"
    )
    return Obstacle(Reduce(state.op, axis, state.body), shift, condition, DIGITS)


def _producers(expr: Expr) -> str:
    names = dict.fromkeys(node.name for node in walk(expr) if isinstance(node, Local))
    return " and ".join(names)
