"""Expressions of the language, shared by every stage.

    expr ::= Const(value)                 a number, a truth value, or +-inf
           | Scalar(name)                 a run-time scalar
           | Axis(name)                   the position along an axis, an integer
           | Size(axis)                   the extent of an axis, an integer
           | Load(tensor, index)          one element; one index expression per dimension
           | Call(fn, args)               an elementwise function of terms/functions.py
           | Reduce(op, axis, body)       op over all positions of an axis, which it binds
           | Local(name, dims)            a value computed earlier by the loop nest (never in source programs)
           | Scan(fold, place, axis, body, first)
                                          at each position of the tile of an axis, one state variable of what a fold makes
                                          of the tile's positions up to it, in order (in loop nests alone); its body packs
                                          what one position contributes, as that of a reduction does (terms/folds.py);
                                          those before `first` contribute the identity

Nodes are interned: structurally equal expressions are the same object, so expressions are DAGs,
equality is identity, and every traversal can memoise on the node itself.

A reduction binds its axis lexically: in ``sum[j](x[i,j] / sum[j](x[i,j]))`` the two ``j`` differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, wraps
from itertools import count
from threading import RLock
from typing import Any, ClassVar, Literal, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from eqfuse.terms.functions import ARITY

REDUCTIONS: Mapping[str, float] = {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "prod": 1.0}
"""Built-in reductions and their identities. (`mean` is parsed as `sum / size`.)"""

COMBINE: Mapping[str, str] = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul"}
"""The binary function that a reduction folds with."""


INTERNING = RLock()
"""Held while a node is made, so that two threads make the same one; and while the process is forked."""
os.register_at_fork(
    before=INTERNING.acquire, after_in_parent=INTERNING.release, after_in_child=INTERNING.release
)


class _Interned(type):
    _pool: ClassVar[WeakValueDictionary[tuple[Any, ...], Any]] = WeakValueDictionary()

    def __call__(cls, *args: Any) -> Any:
        # repr of the leaf keeps 1, 1.0 and True apart; nodes are compared by identity.
        key = (cls, *(a if isinstance(a, (Expr, tuple)) else (type(a), repr(a)) for a in args))
        node = _Interned._pool.get(key)
        if node is None:
            with INTERNING:
                node = _Interned._pool.get(key)
                if node is None:
                    node = _Interned._pool[key] = super().__call__(*args)
        return node


class Expr(metaclass=_Interned):
    """Base class of all expression nodes. Construct with positional arguments only."""

    __slots__ = ("__weakref__",)

    @property
    def parts(self) -> tuple[Expr, ...]:
        """The direct subexpressions, left to right."""
        return ()

    def __str__(self) -> str:
        return _TEXT[-1](self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), tuple(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]


_TEXT: list[Callable[[Expr], str]] = [object.__repr__]


def set_text(show: Callable[[Expr], str]) -> None:
    """Makes `show` the text of every expression."""
    _TEXT[:] = [show]


@dataclass(frozen=True, eq=False, slots=True)
class Const(Expr):
    value: float | int | bool


@dataclass(frozen=True, eq=False, slots=True)
class Scalar(Expr):
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Axis(Expr):
    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Size(Expr):
    axis: str


@dataclass(frozen=True, eq=False, slots=True)
class Load(Expr):
    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Call(Expr):
    fn: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Reduce(Expr):
    op: str
    axis: str
    body: Expr

    @property
    def parts(self) -> tuple[Expr, ...]:
        return (self.body,)


@dataclass(frozen=True, eq=False, slots=True)
class Scan(Expr):
    fold: Fold
    place: int
    axis: str
    body: Expr
    first: int

    @property
    def parts(self) -> tuple[Expr, ...]:
        return (self.body,)


@dataclass(frozen=True, eq=False, slots=True)
class Local(Expr):
    name: str
    dims: tuple[str, ...]


# The slots themselves: expressions are walked more often than anything else is done with them.
Load.parts, Call.parts = Load.index, Call.args  # type: ignore[assignment, method-assign, misc]


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions, left to right."""
    return expr.parts


def rebuild(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """`expr` with its direct subexpressions replaced."""
    match expr:
        case Load(tensor, _):
            return Load(tensor, parts)
        case Call(fn, _):
            return Call(fn, parts)
        case Reduce(op, axis, _):
            return Reduce(op, axis, parts[0])
        case Scan(fold, place, axis, _, first):
            return Scan(fold, place, axis, parts[0], first)
        case _:
            return expr


Node = TypeVar("Node", bound=Hashable)


def post_order(roots: Iterable[Node], below: Callable[[Node], Sequence[Node]]) -> Iterator[Node]:
    """Every distinct node that is reached from the roots, what is below a node before it."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((part, False) for part in reversed(below(node)))


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct subexpression of the roots, children before parents."""
    return iter(_walked(roots))


@lru_cache(4096)
def _walked(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """`post_order`, for what is walked most: pricing and checks walk the same expressions over and over."""
    return tuple(_post_order(roots))


def _post_order(roots: tuple[Expr, ...]) -> Iterator[Expr]:
    seen: set[Expr] = set()
    stack: list[Expr | None] = [*reversed(roots)]
    while stack:
        node = stack.pop()
        if node is None:  # what is below the next one has been visited
            yield stack.pop()  # type: ignore[misc]
        elif node not in seen:
            seen.add(node)
            if parts := node.parts:
                stack += (node, None, *reversed(parts))
            else:
                yield node


def ways(
    roots: Sequence[Expr],
    wanted: Callable[[Expr], bool],
    below: Callable[[Expr, tuple[Any, ...]], Iterable[tuple[Expr, tuple[Any, ...]]]],
) -> Iterator[tuple[Expr, tuple[Any, ...]]]:
    """The wanted nodes, with what each way from a root gathers: `below` gives the parts of a node, with what a way to it and on to the
    part has gathered."""
    above: set[Expr] = set()
    for node in walk(*roots):
        if wanted(node) or any(child in above for child in children(node)):
            above.add(node)
    seen: set[tuple[Expr, tuple[Any, ...]]] = set()
    stack: list[tuple[Expr, tuple[Any, ...]]] = [(root, ()) for root in reversed(roots)]
    while stack:
        node, gathered = stack.pop()
        if node not in above or (node, gathered) in seen:
            continue
        seen.add((node, gathered))
        if wanted(node):
            yield node, gathered
        stack.extend(reversed(list(below(node, gathered))))


def outside_loads(*roots: Expr) -> set[Expr]:
    """Every distinct subexpression that stands in no index of a load."""
    found: set[Expr] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += () if isinstance(node, Load) else children(node)
    return found


def tree_size(expr: Expr) -> int:
    """Nodes of an expression as a tree: those that are shared count wherever they stand."""
    sizes: dict[Expr, int] = {}
    for node in walk(expr):
        sizes[node] = 1 + sum(sizes[child] for child in children(node))
    return sizes[expr]


def transform(expr: Expr, step: Callable[[Expr], Expr], memo: dict[Expr, Expr] | None = None) -> Expr:
    """`expr` rebuilt bottom-up, `step` applied to every rebuilt node. Blind to binding of axes."""
    memo = {} if memo is None else memo
    for node in walk(expr):
        if node not in memo:
            memo[node] = step(rebuild(node, tuple(memo[c] for c in children(node))))
    return memo[expr]


def replaced(expr: Expr, values: Mapping[Any, Expr]) -> Expr:
    """`expr` with the subexpressions that are keys of `values` replaced, outermost first."""
    memo: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        if node not in memo:
            memo[node] = values[node] if node in values else rebuild(node, tuple(map(visit, children(node))))
        return memo[node]

    return visit(expr)


def expanded(expr: Expr, value_of: Callable[[Local], Expr | None]) -> Expr:
    """`expr` with named values replaced by what they are, and those in them likewise; one of None stays."""
    memo: dict[Expr, Expr] = {}

    def step(node: Expr) -> Expr:
        value = value_of(node) if isinstance(node, Local) else None
        return node if value is None else transform(value, step, memo)

    return transform(expr, step, memo)


def free_axes(expr: Expr) -> frozenset[str]:
    """Axes on whose position the value of `expr` depends."""
    memo = _FREE_AXES
    found = memo.get(expr)
    if found is None:
        match expr:
            case Axis(name):
                found = frozenset({name})
            case Local(_, dims):
                found = frozenset(dims)
            case Reduce(_, axis, body):
                found = free_axes(body) - {axis}
            case Scan(_, _, axis, body, _):
                found = free_axes(body) | {axis}
            case _:
                found = frozenset().union(*map(free_axes, children(expr)))
        memo[expr] = found
    return found


_FREE_AXES: WeakKeyDictionary[Expr, frozenset[str]] = WeakKeyDictionary()


def substitute_axes(expr: Expr, mapping: Mapping[str, Expr]) -> Expr:
    """`expr` with free axes replaced. Raises ValueError where a bound axis would capture a replacement."""
    return _substitute(expr, mapping, {})


def _substitute(expr: Expr, mapping: Mapping[str, Expr], memo: dict[Expr, Expr]) -> Expr:
    """`memo` holds what this very mapping made of nodes: a shared node is rebuilt once."""
    if not mapping or not (free_axes(expr) & mapping.keys()):
        return expr
    if expr not in memo:
        match expr:
            case Axis(name):
                memo[expr] = mapping.get(name, expr)
            case Reduce(op, axis, body):
                inner = {name: to for name, to in mapping.items() if name != axis and name in free_axes(body)}
                if any(axis in free_axes(to) for to in inner.values()):
                    raise ValueError(f"axis {axis!r} would capture; rename it first")
                memo[expr] = Reduce(op, axis, _substitute(body, inner, memo if inner == mapping else {}))
            case Local(name, _):
                raise ValueError(f"axes of the local value {name!r} cannot be replaced")
            case _:
                memo[expr] = rebuild(expr, tuple(_substitute(c, mapping, memo) for c in children(expr)))
    return memo[expr]


@lru_cache(4096)
def without_names(expr: Expr) -> tuple[Expr, tuple[str, ...]]:
    """An expression with numbers for the names of its axes, and its free ones in their order: two of the same form are equal but for the
    names. Sizes keep theirs."""
    free: dict[str, str] = {}
    memo: dict[tuple[Expr, tuple[tuple[str, str], ...]], Expr] = {}

    def visit(node: Expr, bound: Mapping[str, str]) -> Expr:
        own = free_axes(node)
        key = node, tuple(sorted((name, to) for name, to in bound.items() if name in own))
        if key not in memo:
            match node:
                case Axis(name):
                    found = bound.get(name) or free.setdefault(name, f"%{len(free)}")
                    memo[key] = Axis(found)
                case Reduce(op, axis, body):
                    inner = f"%_{len(bound)}"
                    memo[key] = Reduce(op, inner, visit(body, {**bound, axis: inner}))
                case _:
                    memo[key] = rebuild(node, tuple(visit(part, bound) for part in children(node)))
        return memo[key]

    form = visit(expr, {})
    return form, tuple(free)


def reductions(*roots: Expr) -> list[Reduce]:
    """Every distinct reduction in the roots, inner ones first."""
    return [node for node in walk(*roots) if isinstance(node, Reduce)]


def call(fn: str, *args: Expr) -> Call:
    """`Call` with its arguments spelt out; raises ValueError on an unknown function or a wrong count."""
    if ARITY.get(fn) != len(args):
        raise ValueError(f"{fn} does not take {len(args)} arguments")
    return Call(fn, args)


def total_of(terms: Iterable[tuple[bool, Expr]]) -> Expr:
    """What adds the terms that are true, and subtracts the others; there is one at least."""
    (is_added, total), *rest = terms
    total = total if is_added else call("neg", total)
    for is_added, part in rest:
        total = call("add" if is_added else "sub", total, part)
    return total


@dataclass(frozen=True)
class Fold:
    """`combine` gives each variable of the union, over `Local("v1", ())` of the left part and `Local("v2", ())` of
    the right. Where not `commutative`, parts are only ever combined in the order of their positions.
    A fold with an `order` keeps the one of both states that comes first in it: a key is a state variable and whether
    the greatest of it is first, else the least; later keys decide among equals, and NaN comes before all numbers.
    Every state variable is a key. `combine` says the same.
    Where `reductions` are given, the state variables are those of these ops: what the merge of a cascade folds them with.
    A fold with an order may have `ranks`: the state variable that is a position, another one for every position. Its
    state is then a list along an axis of ranks: the first of all positions, the first of the rest, and so on, and the
    identity where no more are left. Lists are merged, not combined one by one."""

    name: str
    state: tuple[str, ...]
    identity: tuple[Const, ...]
    combine: tuple[Expr, ...]
    commutative: bool = False
    order: tuple[tuple[str, bool], ...] = ()
    ranks: str = ""
    reductions: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The op of each state variable's reduction."""
        return self.reductions or tuple(f"{self.name}.{variable}" for variable in self.state)

    @property
    def temporaries(self) -> Iterator[str]:
        """Names for intermediate values in code that combines states, apart from those of the states."""
        taken = {f"{name}{side}" for name in self.state for side in (1, 2)}
        return (name for number in count(1) if (name := f"t{number}") not in taken)

    def combined(self, left: Sequence[Expr], right: Sequence[Expr]) -> tuple[Expr, ...]:
        """The state of a union from those of its two parts."""
        values = {Local(f"{v}1", ()): value for v, value in zip(self.state, left, strict=True)}
        values |= {Local(f"{v}2", ()): value for v, value in zip(self.state, right, strict=True)}
        return tuple(replaced(part, values) for part in self.combine)

    @property
    def of_first(self) -> tuple[Expr, ...]:
        """`combine` for derivatives: an extreme of both sides of a variable is that of the first of equals, as a reduction's is,
        so that what is rescaled by it has the same derivative of it."""

        def step(node: Expr) -> Expr:
            match node:
                case Call("maximum" | "minimum" as fn, (Local(left, _) as a, Local(right, _) as b)) if (
                    left[:-1] == right[:-1] and left[-1] != right[-1]
                ):
                    first, second = (a, b) if left[-1] == "1" else (b, a)
                    return call(
                        "where", call("ge" if fn == "maximum" else "le", first, second), first, second
                    )
            return node

        return tuple(transform(part, step) for part in self.combine)

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


@dataclass(frozen=True)
class Tensor:
    """An input or temporary. `dtype` is None until a tensor gives it; `axes` name the dimensions
    where the declaration or a plain access does, else None."""

    name: str
    rank: int
    dtype: str | None = None
    axes: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Output:
    """One result: `name[axes] = expr`, written in full over the inputs, and over states of recurrences in order."""

    name: str
    axes: tuple[str, ...]
    expr: Expr
    dtype: str | None = None


@dataclass(frozen=True)
class InOrder:
    """A recurrence whose steps do not merge: the outputs `states`, which read each other as `Load(state, index)` at earlier
    positions of `axis`, or at later ones where it goes `backwards`. A step reads 0 before the first position."""

    axis: str
    backwards: bool
    states: tuple[str, ...]

    @property
    def place(self) -> Expr:
        """The position of a step, by how many steps are before it."""
        last = call("sub", call("sub", Size(self.axis), Const(1)), Axis(self.axis))
        return last if self.backwards else Axis(self.axis)


Reassociate = Literal["exact", "bounded", "free"]


@dataclass(frozen=True)
class Program:
    """A parsed program with every temporary inlined (sharing is kept by interning).

    `domains` maps an axis that had to be renamed, or that an order of sums may rename, to the axis whose extent it has.
    `lengths` are the extents that the program itself declares as numbers, `computed` those that it makes of the sizes of
    axes that are neither renamed nor computed.
    `integers` are the scalars that are integers: declared so, or used as one (see `terms/positions.py`).
    `integer_tensors` are the undeclared tensors that are used as integers.
    `in_order` are the recurrences that are computed step by step, each after those that it reads. The last `hidden` outputs are
    states that no call returns.
    `at_most` are pairs of values, of which the text promises that the first is at most the second at every position.
    With `assume_finite`, what masks exclude holds no NaN and no infinity: it may be multiplied by 0.
    `reassociate` is which orders of sums and products are allowed (see `rules/reassociate.py`).
    """

    source: str
    tensors: tuple[Tensor, ...]
    scalars: tuple[str, ...]
    outputs: tuple[Output, ...]
    domains: Mapping[str, str]
    strict_casts: bool = False
    assume_finite: bool = False
    reassociate: Reassociate = "bounded"
    integers: tuple[str, ...] = ()
    integer_tensors: tuple[str, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, Expr] = field(default_factory=dict)
    at_most: tuple[tuple[Expr, Expr], ...] = ()
    in_order: tuple[InOrder, ...] = ()
    hidden: int = 0

    @property
    def states(self) -> frozenset[str]:
        """The outputs that are states of recurrences in order: expressions read them as tensors."""
        return frozenset(name for each in self.in_order for name in each.states)

    @property
    def returned(self) -> tuple[Output, ...]:
        """The outputs that calls return."""
        return self.outputs[: len(self.outputs) - self.hidden]

    def __getstate__(self) -> dict[str, Any]:
        """Without what was computed of it."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


Found = TypeVar("Found")


def once(compute: Callable[[Program], Found]) -> Callable[[Program], Found]:
    """A function of programs, computed once for each: what follows from a program alone is asked for at every call that
    has sizes of its own."""
    name = f"_{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def known(program: Program) -> Found:
        kept = program.__dict__
        if name not in kept:
            kept[name] = compute(program)
        found: Found = kept[name]
        return found

    return known
