"""What derivation hands to the planner: the states of a cascaded group, and how they merge.

A group is a set of reductions over one axis, in dependency order. Its merge says how the states of
two disjoint parts of the axis become the state of their union; it is derived, never written.

Names of values inside these expressions (all `Local`):

    m          in a body:    the exact value of state `m` over the whole axis
               in an update: the state of what the loop has seen        (Neptune's r)
               in a finish:  the state of the whole axis, possibly guarded
    m_new      the state once the current tile (or the other part) is merged in (Neptune's r')
    m_tile     in an update: a fresh reduction over the current tile; `m_tile2`... further ones. Of a
               registered fold, every variable's: each is a part of the first update that reads it
    m_a, m_b   in a combine: the states of the two parts

Values call the functions of registered folds as one function, `argmax.v((v, k), (v, k))`, on packed states
(see terms/folds.py: `written_out`).
"""

from __future__ import annotations

from eqfuse.fast_dataclass import dataclass
from eqfuse.hashed import Hashed, hash_of
from eqfuse.terms.nodes import Expr
from eqfuse.terms.prefixes import Prefix


@dataclass(frozen=True)
class State:
    """`name[dims] = op over axis of body`; the body reads earlier states of the group as `Local`."""

    name: str
    op: str
    body: Expr
    dims: tuple[str, ...]
    auxiliary: bool = False  # synthesised to close the merge; no output needs its value


@dataclass(frozen=True)
class Part:
    """A reduction over the current tile alone: `name = op over the tile of body`."""

    name: str
    op: str
    body: Expr


@dataclass(frozen=True)
class Update:
    """One step of a rolling loop: first the parts, then `<state>_new = value`."""

    state: str
    parts: tuple[Part, ...]
    value: Expr


@dataclass(frozen=True)
class Combine:
    """`<state>_new = value`, from the states `_a` and `_b` of two parts."""

    state: str
    value: Expr


@dataclass(frozen=True)
class Finish:
    """The exact value of a state from the carried one, where a guard made them differ
    (a maximum that stayed -inf, a scale that stayed 0)."""

    state: str
    value: Expr


@dataclass(frozen=True)
class Merge:
    """`loses_infinities` says that a state may be NaN in the end where the program has an infinity."""

    update: tuple[Update, ...]
    combine: tuple[Combine, ...]
    finish: tuple[Finish, ...]
    loses_infinities: bool = False


@dataclass(frozen=True)
class Obstacle:
    """Why a group has no merge: the reduction, the factor or term that depends on other states,
    and the condition that no rule could meet. Where there is a merge, `refused` says what would not survive it; where
    the saturation's budget ended before one was found, it is `unfinished`."""

    reduction: Expr
    factor: Expr
    condition: str
    refused: str = ""
    unfinished: bool = False


@dataclass(frozen=True)
class Group(Hashed):
    """Cascaded reductions over `axis`, in dependency order. `merge` is None where there is an obstacle. With a `prefix`, states
    stand for that part of the axis at every position."""

    axis: str
    states: tuple[State, ...]
    merge: Merge | None
    obstacles: tuple[Obstacle, ...] = ()
    prefix: Prefix | None = None

    __hash__ = hash_of
