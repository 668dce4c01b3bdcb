"""How the loops of a tree are run: in vectors, with sums in registers, several positions at once. The printer decides nothing of it.

A pass takes a body and gives another one with the same items; what comes out of each is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from eqfuse.terms.folds import fold_of
from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.native.nodes import (
    Begin,
    Define,
    End,
    Jam,
    Leaf,
    Loop,
    Nest,
    Node,
    Place,
    Put,
    RegisterTile,
    Vectors,
    Walk,
    folds_along,
    items_in,
)
from eqfuse.tile.native.tree import Tree
from eqfuse.tile.walk import operands

JAMMED = 4
"""Positions of a folded axis that a loop of vectors along another axis takes at once."""

HELD = 8
"""Vectors of sums that are in registers at once: an addition takes four cycles, and two begin in each."""

UNROLLED = 4
"""Vectors that a loop takes at once where it folds: so many sums are under way side by side. They come from so many parts
of the axis: memory is read faster in several places at once, and a processor looks ahead to the end of a page."""


def scheduled(tree: Tree) -> list[Node]:
    """The body of a tree as it is printed. Raises TileError where a pass has made what is none."""
    body, wanted = tree.body, Counter(map(id, items_in(tree.body)))
    for pass_ in PASSES:
        body = pass_.run(body, tree)
        left = Counter(map(id, items_in(body)))
        done = {id(item) for item in items_in(tree.body) if _is_done(item, tree)}
        if {n: k for n, k in wanted.items() if n not in done} != {
            n: k for n, k in left.items() if n not in done
        }:
            raise TileError(f"{pass_.name} has lost an item, or made one twice")
        check(body)
    return body


@dataclass(frozen=True)
class Pass:
    """A pass over the loops of a body; `why` is one line."""

    name: str
    run: Callable[[list[Node], Tree], list[Node]]
    why: str


def _changed(body: Sequence[Node], change: Callable[[Loop], Sequence[Node]]) -> list[Node]:
    """A body whose plain loops are changed, those inside of others first."""
    found: list[Node] = []
    for node in body:
        match node:
            case Loop():
                found += change(Loop(node.axis, _changed(node.body, change)))
            case Walk():
                found.append(Walk(node.blocks, _changed(node.body, change)))
            case _:
                found.append(node)
    return found


# What is done already ---------------------------------------------------------------------------------


def _is_done(item: Define | Put, tree: Tree) -> bool:
    """Whether an item is a sum of what has been added to it already, or a store of a product that is made there."""
    if isinstance(item, Put):
        return item.store.value.name in tree.stored
    return isinstance(item.op, ir.ReduceTile) and tree.into.get(item.op.value.name) == item.value.name


def _all_done(node: Nest, tree: Tree) -> bool:
    return all(_is_done(item, tree) for item in items_in(node.body))


def _without_done_items(body: Sequence[Node], tree: Tree) -> list[Node]:
    found: list[Node] = []
    for node in body:
        match node:
            case Leaf(item) if _is_done(item, tree):
                continue
            case Loop() | Vectors() | Jam() | RegisterTile() if _all_done(node, tree):
                continue
            case Loop() | Walk():
                found.append(replace(node, body=_without_done_items(node.body, tree)))
            case Vectors():
                found.append(_vectors_without(node, tree))
            case Jam() | RegisterTile():
                found.append(replace(node, vectors=_vectors_without(node.vectors, tree)))
            case _:
                found.append(node)
    return found


def _vectors_without(loop: Vectors, tree: Tree) -> Vectors:
    return replace(loop, body=[leaf for leaf in loop.body if not _is_done(leaf.item, tree)])


# Vectors ------------------------------------------------------------------------------------------------


def _in_vectors(body: list[Node], tree: Tree) -> list[Node]:
    def change(loop: Loop) -> Sequence[Node]:
        leaves = [node for node in loop.body if isinstance(node, Leaf)]
        if len(leaves) < len(loop.body) or not all(_suits(leaf.item, loop.axis, tree) for leaf in leaves):
            return (loop,)
        if folds_along(loop):
            return (Vectors(loop.axis, leaves, UNROLLED),)
        return (Vectors(loop.axis, leaves, aligned=_first_streamed(leaves, loop.axis, tree)),)

    return _changed(body, change)


def _suits(item: Define | Put, axis: str, tree: Tree) -> bool:
    """Whether an item may be made for a vector of positions along an axis."""
    match item:
        case Define(op=ir.RankTile() | ir.MergeTile()):
            return _lists_in_lanes(item, axis, tree)
        case Define(op=ir.FoldTile(op=op)):
            found = fold_of(op)
            return found is not None and found[0].commutative
        case Define(op=ir.ReduceTile() | ir.Elementwise() | ir.Cast() | ir.LoadTile()):
            return True
        case Define(op=ir.Positions() | ir.Lanes() | ir.Constant()):
            return True
        case _:
            return isinstance(item, Put)


def _lists_in_lanes(item: Define, axis: str, tree: Tree) -> bool:
    """Whether lists are made side by side, one in each lane: all that is put into them is in memory, neighbours along the
    axis next to each other."""
    states = (name for name in tree.states[item.value.name] if name)
    every = [*operands(item.op), *(tree.defined[name].value for name in states)]
    return all(
        value.dtype != "bool"
        and value.name in tree.memory
        and (axis not in value.dims or tree.place(tree.last(value.name))[-1:] == (axis,))
        for value in every
    )


def _first_streamed(body: Sequence[Leaf], axis: str, tree: Tree) -> Put | None:
    """The first store of whole vectors that may go past the caches."""
    for leaf in body:
        item = leaf.item
        if not isinstance(item, Put) or item.store.mask is not None:
            continue
        index = [tree.defined[at.name].op for at in item.store.index]
        plain = all(isinstance(op, ir.Positions | ir.Start) for op in index)
        along = bool(index) and isinstance(index[-1], ir.Positions | ir.Start) and index[-1].axis == axis
        if plain and along and tree.is_unit(item.store.tensor, len(index) - 1):
            return item
    return None


# Sums in registers --------------------------------------------------------------------------------------


def _folded_across(loop: Loop, tree: Tree) -> tuple[list[Leaf], Vectors] | None:
    """The numbers for each position of a loop and the loop of vectors of another axis behind them, where that folds all that the
    loop folds, and there is nothing else in it."""
    *before, inner = loop.body
    leaves = [node for node in before if _is_number(node, loop, tree)]
    if not folds_along(loop) or not isinstance(inner, Vectors) or folds_along(inner):
        return None
    return (leaves, inner) if len(leaves) == len(before) else None


def _register_tiled(body: list[Node], tree: Tree) -> list[Node]:
    def change(loop: Loop) -> Sequence[Node]:
        found = _folded_across(loop, tree)
        if found is None or any(_is_loaded(leaf.item, found[1].axis) for leaf in found[1].body):
            return (loop,)
        leaves, vectors = found
        sums = sum(len(tree.states.get(item.value.name, [item])) for item in folds_along(loop))
        several = max(1, HELD // sums)
        counts = tuple(dict.fromkeys((several, max(1, several // 2), 1)))
        return (RegisterTile(loop.axis, leaves, vectors, counts),)

    return _changed(body, change)


def _is_number(node: Node, loop: Loop, tree: Tree) -> TypeGuard[Leaf]:
    """Whether a node is one number for each position of a loop."""
    return (
        isinstance(node, Leaf)
        and isinstance(node.item, Define)
        and node.item not in folds_along(loop)
        and node.item.value.name not in tree.memory
    )


def _is_loaded(item: Define | Put, axis: str) -> bool:
    """Whether an item is a load along an axis: a tensor is rather read row by row."""
    return isinstance(item, Define) and isinstance(item.op, ir.LoadTile) and axis in item.value.dims


def _jammed(body: list[Node], tree: Tree) -> list[Node]:
    def change(loop: Loop) -> Sequence[Node]:
        found = _folded_across(loop, tree)
        return (loop,) if found is None else (Jam(loop.axis, JAMMED, *found),)

    return _changed(body, change)


def _accumulated(body: Sequence[Node], tree: Tree) -> list[Node]:
    found: list[Node] = []
    for node in body:
        match node:
            case Walk() | Loop():
                made: Node = replace(node, body=_accumulated(node.body, tree))
            case _:
                made = node
        if isinstance(node, Loop | Vectors | Jam) and not _all_done(node, tree):
            places = {item: _place(item, node) for item in folds_along(node)}
            begun = {item: place for item, place in places.items() if item.value.name not in tree.into}
            ended = {item: place for item, place in places.items() if place != "memory"}
            found += [Begin(*each) for each in begun.items()]
            found.append(made)
            found += [End(*each) for each in ended.items()]
        else:
            found.append(made)
    return found


def _place(item: Define, loop: Loop | Vectors | Jam) -> Place:
    """Registers hold a fold's states where the loop over its axis is the innermost one around it."""
    if not any(isinstance(node, Leaf) and node.item is item for node in loop.body):
        return "memory"
    return "lanes" if isinstance(loop, Vectors) else "register"


PASSES = (
    Pass(
        "vectorize", _in_vectors, "an innermost loop whose items have vector forms takes vectors of positions"
    ),
    Pass(
        "tile registers",
        _register_tiled,
        "sums across vectors stay in registers while what is added is in tiles",
    ),
    Pass("jam", _jammed, "sums across vectors stay in registers for some positions of the folded axis"),
    Pass("accumulate", _accumulated, "where the states of folds are, and that lanes are combined afterwards"),
    Pass(
        "drop items",
        _without_done_items,
        "a product is made where the sums and stores that read it would put it: they still say where it begins",
    ),
)


# What every body satisfies ------------------------------------------------------------------------------


def check(body: Sequence[Node], around: Collection[str] = ()) -> None:
    """Raises TileError unless every item is inside loops over its dims, each axis of them once, and accumulators are begun in the
    body in which they end."""
    started: dict[str, Begin] = {}
    for node in body:
        match node:
            case Begin(item, _):
                started[item.value.name] = node
            case End(item, place):
                begun = started.pop(item.value.name, None)
                if begun is None or begun.place != place or place == "memory":
                    raise TileError(f"{item.value.name} ends in {place}, where it has not begun")
            case Leaf(item):
                if missing := set(item.dims) - set(around):
                    raise TileError(f"an item outside loops over {', '.join(sorted(missing))}")
            case Walk():
                check(node.body, around)
            case _:
                axes = (node.axis, node.vectors.axis) if isinstance(node, RegisterTile) else (node.axis,)
                if set(axes) & set(around) or len(set(axes)) < len(axes):
                    raise TileError(f"a loop over {node.axis} inside of one")
                inner = [*node.before, *node.vectors.body] if isinstance(node, RegisterTile) else node.body
                check(inner, (*around, *axes))
    if left := [name for name, begin in started.items() if begin.place != "memory"]:
        raise TileError(f"accumulators of {', '.join(left)} do not end")
