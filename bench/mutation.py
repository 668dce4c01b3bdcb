"""What a wrong transformation is, and how to make one of any intermediate language.

A mutant changes one place of an IR (everywhere that the place is shared). It knows no program: it is a
function from an IR to every IR that differs from it by this one mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from eqfuse.loops.nodes import Loop
from eqfuse.terms.nodes import Call, Expr, Output, Reduce, children, replaced, walk
from eqfuse.tile.nodes import For, Value

Level = Literal["term", "order", "merge", "loop", "tile", "pass", "roles"]
"""Where a mistake is made: outputs, those in another order of sums and products, derived merges, loop nest, tile program; that after a GPU's passes; its roles."""

Outputs = tuple[Output, ...]
Step = Callable[[Expr], Iterable[Expr]]
"""What a wrong rewrite makes of a node: nothing where it does not match."""


@dataclass(frozen=True)
class Same:
    """Stands for a mutated IR that computes the same function as the right one, and says why."""

    why: str


@dataclass(frozen=True)
class Mutant:
    """`mutate` yields an IR of `level` per place where the mistake can be made, or `Same` where it is none.
    `strict`: a mistake with casts, which only programs with opaque casts can show."""

    name: str
    level: Level
    what: str
    mutate: Callable[[Any], Iterable[Any]]
    strict: bool = False


def everywhere(step: Step, exprs: tuple[Expr, ...]) -> Iterator[tuple[Expr, ...]]:
    """The expressions with one node of theirs changed, wherever it occurs; one result per node and change."""
    for node in walk(*exprs):
        for new in step(node):
            if new is not node:
                yield tuple(replaced(expr, {node: new}) for expr in exprs)


def even_in(expr: Expr, part: Expr) -> bool:
    """Whether `expr` stays the same, by its form, when `part` changes its sign."""
    parity: dict[Expr, int | None] = {}  # 1: even, -1: odd, None: neither is known
    for node in walk(expr):
        parts = [parity[child] for child in children(node)]
        match node:
            case _ if node is part:
                parity[node] = -1
            case Call("mul" | "div", _) if None not in parts:
                parity[node] = -1 if parts.count(-1) == 1 else 1
            case Call("add" | "sub", (_, _)) if parts[0] == parts[1]:
                parity[node] = parts[0]
            case Call("neg" | "finite", (_,)) | Reduce("sum", _, _):
                parity[node] = parts[0]
            case Call("sq" | "abs", (_,)) if None not in parts:
                parity[node] = 1
            case _:
                parity[node] = 1 if all(sign == 1 for sign in parts) else None
    return parity[expr] == 1


def variants(body: tuple[Any, ...], change: Callable[[Any], Iterable[tuple[Any, ...]]]) -> Iterator[Any]:
    """A body with one of its statements, those of inner loops included, replaced by what `change` yields."""
    for at, stmt in enumerate(body):
        before, after = body[:at], body[at + 1 :]
        for new in change(stmt):
            if new != (stmt,):
                yield (*before, *new, *after)
        if isinstance(stmt, Loop | For):
            for inner in variants(stmt.body, change):
                yield (*before, replace(stmt, body=inner), *after)


def in_bodies(ir: Any, change: Callable[[tuple[Any, ...]], Iterable[tuple[Any, ...]]]) -> Iterator[Any]:
    """A nest or tile program with the body of one kernel changed."""
    for at, kernel in enumerate(ir.kernels):
        for body in change(kernel.body):
            yield replace(ir, kernels=(*ir.kernels[:at], replace(kernel, body=body), *ir.kernels[at + 1 :]))


def in_statements(
    change: Callable[[Any], Iterable[tuple[Any, ...]]],
) -> Callable[[Any], Iterator[Any]]:
    """A mutation of nests or tile programs that replaces one statement."""
    return lambda ir: in_bodies(ir, lambda body: variants(body, change))


def renamed(value: Value, suffix: str, **changes: Any) -> Value:
    """A value of a name that neither lowering nor a pass gives."""
    return replace(value, name=f"{value.name}__{suffix}", **changes)
