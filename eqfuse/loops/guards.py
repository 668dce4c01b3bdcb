"""Which conditions hold wherever the value of an expression counts: those of every `where` on the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from eqfuse.loops.nodes import Kernel, Let, Loop, Stmt, Store
from eqfuse.loops.walk import statements
from eqfuse.terms.assume import conjuncts
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    call,
    children,
    free_axes,
    walk,
    ways,
)

Guards = tuple[Expr, ...]


def guarded(expr: Expr, wanted: Callable[[Expr], bool]) -> Iterator[tuple[Expr, Guards]]:
    """The wanted subexpressions, each with the conditions under which each way leads to it."""
    return ways((expr,), wanted, _below)


def _below(node: Expr, guards: Guards) -> Iterator[tuple[Expr, Guards]]:
    """What an expression reads, and the conditions under which it does; of the body of a reduction, conditions on another position of
    its axis say nothing."""
    match node:
        case Call("where", (condition, left, right)):
            yield condition, guards
            yield left, (*guards, *conjuncts(condition, True))
            yield right, (*guards, *conjuncts(condition, False))
        case Call("and" | "or" as fn, (left, right)):
            yield left, guards
            yield right, (*guards, *conjuncts(left, fn == "and"))
        case Reduce(_, axis, body):
            yield body, tuple(guard for guard in guards if axis not in free_axes(guard))
        case _:
            yield from ((child, guards) for child in children(node))


def common(left: Guards, right: Guards) -> Guards:
    """The conditions that hold in both places."""
    return tuple(guard for guard in left if guard in right)


def places(program: Program, wanted: Callable[[Expr], bool]) -> dict[Load, tuple[Guards, ...]]:
    """The conditions of each place where the program reads each wanted element."""
    found: dict[Load, dict[Guards, None]] = {}
    for output in program.outputs:
        for load, guards in guarded(output.expr, wanted):
            assert isinstance(load, Load)
            found.setdefault(load, {})[tuple(dict.fromkeys(guards))] = None
    return {load: tuple(each) for load, each in found.items()}


def own(load: Load, guards: Guards) -> Guards:
    """The conditions on an element's own positions that mention no computed value: a loop nest has them wherever it reads
    the element."""
    axes = free_axes(load)
    return tuple(
        guard
        for guard in guards
        if free_axes(guard) <= axes and not any(isinstance(node, Reduce) for node in walk(guard))
    )


def kept(load: Load, places: Sequence[Guards]) -> Guards:
    """The conditions of those that are an element's `own` under which alone the program reads it, from those of each place that
    does: those of all, and that those of one of them hold that are about its computed positions. A loop nest may compute what
    it does not need, and read the element elsewhere."""
    return _of_all(load, list(dict.fromkeys(own(load, guards) for guards in places)))


def is_guarded(load: Load, places: Sequence[Guards], known: Guards) -> bool:
    """Whether conditions that are `known`, those `kept` among them, tell that one of the places that read an element would: of
    places of which all other conditions are known, those of an element's own positions are kept if these are all places."""
    reached: list[Guards] = []
    for guards in places:
        kept_anyway = own(load, guards)
        if all(follows(guard, known) for guard in guards if guard not in kept_anyway):
            reached.append(guards)
    return len(reached) == len(places) or any(all(follows(g, known) for g in guards) for guards in reached)


MOST_PLACES = 8
"""Places that read one element up to which the conditions of one or another of them are kept."""


def _of_all(load: Load, places: Sequence[Guards]) -> Guards:
    """The conditions that hold wherever an element is read."""
    shared = reduce(common, places)
    computed = frozenset[str]().union(*(free_axes(i) for i in load.index if not isinstance(i, Axis)))
    rest = [[g for g in guards if g not in shared and free_axes(g) & computed] for guards in places]
    if not all(rest) or len(rest) > MOST_PLACES:
        return shared
    alternatives = (reduce(lambda a, b: call("and", a, b), guards) for guards in rest)
    return (*shared, reduce(lambda a, b: call("or", a, b), alternatives))


def follows(guard: Expr, known: Guards) -> bool:
    """Whether a condition, taken apart, is among those known to hold."""
    match guard:
        case Call("or", (left, right)) if guard not in known:
            return follows(left, known) or follows(right, known)
        case Call("and", (left, right)) if guard not in known:
            return follows(left, known) and follows(right, known)
        case _:
            return guard in known


def needed(kernel: Kernel) -> dict[str, Guards]:
    """For every named value of a kernel the conditions without which nothing reads it, of those on its own positions
    that mention no named value."""
    dims = {stmt.name: stmt.dims for stmt in statements(kernel.body) if isinstance(stmt, Let)}
    carried = {
        item.next for stmt in statements(kernel.body) if isinstance(stmt, Loop) for item in stmt.carried
    }
    found: dict[str, Guards] = dict.fromkeys(carried, ())
    # What reads a value comes after it: its own conditions are known by then.
    for stmt in reversed(list(statements(kernel.body))):
        for expr in _evaluated(stmt):
            bound = {node.axis for node in walk(expr) if isinstance(node, Reduce)}
            outer = found.get(stmt.name, ()) if isinstance(stmt, Let) else ()
            outer = tuple(guard for guard in outer if not free_axes(guard) & bound)
            for local, guards in guarded(expr, lambda node: isinstance(node, Local)):
                assert isinstance(local, Local)
                own = frozenset((*kernel.parallel, *dims.get(local.name, ())))
                here = tuple(
                    guard
                    for guard in dict.fromkeys((*outer, *guards))
                    if free_axes(guard) <= own and not any(isinstance(node, Local) for node in walk(guard))
                )
                found[local.name] = common(found[local.name], here) if local.name in found else here
    return found


def _evaluated(stmt: Stmt) -> tuple[Expr, ...]:
    """What a statement itself evaluates, not those inside of it."""
    match stmt:
        case Let(_, _, expr):
            return (expr,)
        case Store(_, index, _, expr):
            return *index, expr
        case Loop(_, start, stop, _, carried, _, _, part):
            return start, stop, *(part or ()), *(value.init for value in carried)
