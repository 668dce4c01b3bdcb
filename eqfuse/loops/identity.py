"""Whether a loop's update changes nothing where a predicate is false.

A tile in which the predicate is false everywhere may then be skipped. The proof is symbolic: the
predicate is replaced by false, the update is simplified, and must become the carried value itself.
Elements of input tensors are taken to be finite: what a mask excludes from a product reads no other
factor (`terms.masks`).
"""

from __future__ import annotations

from eqfuse.loops.guards import Guards, common, guarded
from eqfuse.loops.nodes import Let, Loop
from eqfuse.terms.assume import Supposed, simplified
from eqfuse.terms.nodes import Call, Expr, Local


def vanishes(loop: Loop, predicate: Expr, value: bool, *, supposed: Supposed | None = None) -> bool:
    """Whether every carried value keeps its old value where `predicate` has this truth value, and what is `supposed` (see
    `simplified`) holds.

    Also False where the loop stores anything, since a skipped tile would not be stored.
    """
    if not all(isinstance(stmt, Let) for stmt in loop.body):
        return False
    known: dict[str, Expr] = {}
    for stmt in loop.body:
        assert isinstance(stmt, Let)
        known[stmt.name] = simplified(stmt.expr, known, predicate, value, supposed=supposed)
    return all(known.get(item.next) is Local(item.name, ()) for item in loop.carried)


def predicates(loop: Loop) -> dict[Expr, Guards]:
    """Every distinct condition of a `where` in the statements of the loop itself, in order, with the conditions
    that hold wherever its value counts."""
    found: dict[Expr, Guards] = {}
    for stmt in loop.body:
        if isinstance(stmt, Let):
            for choice, guards in guarded(stmt.expr, _is_choice):
                assert isinstance(choice, Call)
                condition = choice.args[0]
                found[condition] = common(found.get(condition, guards), guards)
    return found


def _is_choice(node: Expr) -> bool:
    return isinstance(node, Call) and node.fn == "where"
