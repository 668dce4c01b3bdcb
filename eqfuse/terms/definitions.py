"""The texts of the table of functions as expressions: what a function is in terms of others, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from eqfuse.terms.expressions import Reader
from eqfuse.terms.functions import FUNCTIONS
from eqfuse.terms.nodes import Call, Const, Expr, Scalar, children, replaced, walk
from eqfuse.terms.parser import texts
from eqfuse.terms.syntax import Source

Number = TypeVar("Number")
"""A value of some arithmetic."""


class KeepingStops(Reader):
    """Reads a text with the functions that derivatives alone know."""

    keeps_stops = True


@cache
def _expression(text: str) -> Expr:
    """A text of the table; the arguments of its row are scalars."""
    return texts(Source.of(f"value = {text}"), None, KeepingStops).reader.done["value"]


def _instance(text: str, fn: str, args: Sequence[Expr]) -> Expr:
    names = map(Scalar, FUNCTIONS[fn].args)
    return replaced(_expression(text), dict(zip(names, args, strict=True)))


def definition(node: Call) -> Expr | None:
    """A call in terms of other functions; None for a primitive."""
    text = FUNCTIONS[node.fn].definition
    return _instance(text, node.fn, node.args) if text else None


def derivatives(node: Call) -> tuple[Expr | None, ...]:
    """The partial derivative of a call by each of its arguments, over the same arguments; None where there is none: by
    a truth value, or of one, and where it is stopped."""
    texts = FUNCTIONS[node.fn].derivative
    return tuple(_instance(text, node.fn, node.args) if text else None for text in texts)


def evaluated(
    text: str,
    fn: str,
    args: Sequence[Number],
    number: Callable[[float], Number],
    call: Callable[[str, list[Number]], Number],
) -> Number:
    """A text of the row of `fn` on values: numbers of it and calls in it are what `number` and `call` make of them."""
    values: dict[Expr, Number] = dict(zip(map(Scalar, FUNCTIONS[fn].args), args, strict=True))
    expr = _expression(text)
    for node in walk(expr):
        match node:
            case Const(value):
                values[node] = number(value)
            case Call(name, _):
                values[node] = call(name, [values[part] for part in children(node)])
    return values[expr]
