"""The axis that a merge splits into parts, and the states of its group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import fold_of, identity
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    free_axes,
    transform,
    walk,
)

GUARDS = ("finite", "invertible")
"""The retractions of rules/guards.py."""


def reads_state(expr: Expr, names: Collection[str] | None = None) -> bool:
    """Whether the value of `expr` depends on a named value, or on one of these."""
    return any(isinstance(node, Local) and (names is None or node.name in names) for node in walk(expr))


def unguarded(node: Expr) -> Expr:
    """What a guard is applied to; any other node as it is."""
    return node.args[0] if isinstance(node, Call) and node.fn in GUARDS else node


@dataclass(frozen=True)
class Split:
    """The split axis and the states of its group, by all names under which they are read. Any other named value was
    computed before, over its whole axis, and needs no guard.

    contents: the body of each state. bodies: those of maxima and minima alone.
    first: the identity of each state, its value while no element has been seen.
    scales: the maximum m of x for each sum of `exp(x - m)`, which is never 0 once an element has been seen.
    jumping: states of registered reductions whose value may go up and down.
    """

    axis: str
    names: frozenset[str]
    contents: Mapping[str, Expr]
    bodies: Mapping[str, Expr]
    scales: Mapping[str, str]
    first: Mapping[str, float]
    jumping: frozenset[str]

    @staticmethod
    def of(axis: str, states: Iterable[tuple[str, str, Expr]]) -> Split:
        """Of (name, op, body)."""
        contents: dict[str, Expr] = {}
        bodies: dict[str, Expr] = {}
        scales: dict[str, str] = {}
        first: dict[str, float] = {}
        jumping: set[str] = set()
        for name, op, body in states:
            names = [name + end for end in ("", "_new", "_a", "_b")]
            contents |= dict.fromkeys(names, body)
            if _jumps(op):
                jumping.update(names)
            for end in ("", "_new"):
                first[name + end] = identity(op).value
                if op in ("max", "min"):
                    bodies[name + end] = body
                match body:
                    case Call("exp", (Call("sub", (varying, shift)),)) if op == "sum":
                        m = unguarded(shift)
                        if isinstance(m, Local) and bodies.get(m.name) is varying:
                            scales[name + end] = m.name + end
        return Split(axis, frozenset(contents), contents, bodies, scales, first, frozenset(jumping))

    def reads(self, expr: Expr) -> bool:
        """Whether a value depends on a state."""
        return reads_state(expr, self.names)

    def hoists(self, expr: Expr) -> bool:
        """Whether a value depends on a state and not on the position along the axis."""
        return self.axis not in free_axes(expr) and self.reads(expr)

    def is_constant(self, expr: Expr) -> bool:
        """Whether a value neither depends on a state nor varies along the axis."""
        return self.axis not in free_axes(expr) and not self.reads(expr)

    def jumps(self, expr: Expr) -> bool:
        """Whether a value reads a state that may go up and down by any amount."""
        return reads_state(expr, self.jumping)

    def is_infinite(self, expr: Expr) -> bool:
        """Whether a value that does not vary along the axis may be infinite while nothing has been seen."""
        return reads_state(expr, self.bodies) or (self.reads(expr) and math.isinf(at_first(expr, self.first)))


def _jumps(op: str) -> bool:
    """Whether the value of a registered reduction may go up and down as more is seen: no extreme does."""
    found = fold_of(op)
    if found is None:
        return False
    fold, index = found
    variable = fold.state[index]
    match fold.combine[index]:
        case Call("maximum" | "minimum", (Local(), Local())):
            return False
        case _:
            return all(key != variable for key, _ in fold.order[:1])


def at_first(expr: Expr, identities: Mapping[str, float]) -> float:
    """The value of `expr` where these states are their identities. Whatever else it reads counts as 1."""

    def known(node: Expr) -> Expr:
        match node:
            case Local(name, _):
                return Const(identities.get(name, 1.0))
            case Load() | Scalar() | Axis() | Size():
                return Const(1.0)
            case Reduce(_, _, body):
                return body
            case _:
                return node

    env = Env(FloatDomain("float64"), {}, {}, {})
    return float(evaluate_expr(transform(expr, known), env).data)
