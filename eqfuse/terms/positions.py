"""Which undeclared scalars and tensors hold integers, told from how a program uses them.

A name is an integer where it serves in an index, is divided (`//`, `%`) with a position, or is compared with a
position or added to one: `j < len[b]`, `j - first[i] <= w`; where it is shifted or taken as bits, and in `rand`. A product tells nothing, since a position may be
weighed by a real (`slope[h] * (j - i)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.folds import contributions, fold_of
from eqfuse.terms.functions import AMONG_INTEGERS, ARITY, COMPARISONS, OF_INTEGERS, ROUNDINGS
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Program, Reduce, Scalar, Size, children, walk
from eqfuse.terms.promises import ascends

Form = Literal["position", "integer", "open", "other"]
"""A position of an axis, shifted or scaled; another integer; a name that may be an integer, alone or computed with
integers; anything else."""

Role = Literal[
    "used in an index",
    "divided with a position",
    "compared with a position",
    "added to a position",
    "promised to ascend",
    "shifted, or taken as bits",
    "a seed or a position of random numbers",
]

_SAME = tuple(fn for fn in AMONG_INTEGERS if ARITY[fn] == 1)
_JOINED = tuple(fn for fn in AMONG_INTEGERS if ARITY[fn] == 2 and fn != "mul")


_TAKEN: Mapping[str, Role] = {"rand": "a seed or a position of random numbers"}


@dataclass(frozen=True)
class Use:
    """What makes a name an integer, and the expression that it stands in."""

    role: Role
    where: Expr


Promises = Sequence[tuple[Expr, Expr]]
"""Pairs of which a program says that the first is at most the second."""


def integer_uses(
    roots: Sequence[Expr], declared: Mapping[str, bool], promises: Promises = ()
) -> dict[str, Use]:
    """The undeclared scalars and tensors that hold integers, each with one use that tells.

    `declared` are the names that are declared, and whether as integers.
    """
    nodes = list(walk(*roots))
    found = index_uses(roots, declared, promises)
    while True:
        known = {**declared, **dict.fromkeys(found, True)}
        forms: dict[Expr, Form] = {}
        before = len(found)
        for node in nodes:
            forms[node] = _form(node, forms, known)
            for part, use in _wanted(node, forms):
                for name in _names(part, forms):
                    if name not in declared:
                        found.setdefault(name, use)
        if len(found) == before:
            return found


def index_uses(
    roots: Sequence[Expr], declared: Mapping[str, bool], promises: Promises = ()
) -> dict[str, Use]:
    """As `integer_uses`, but for what serves in an index, or is promised to ascend, alone."""
    uses = [(name, use) for node in walk(*roots) for name, use in _indexing(node)]
    for left, right in promises:
        if (found := ascends(left, right)) is not None:
            uses.append((found[0], Use("promised to ascend", left)))
    return {name: use for name, use in uses if name not in declared}


def reason(program: Program, name: str) -> Use | None:
    """Why a scalar or tensor of a program is an integer; None where it is declared so."""
    declared = {tensor.name: tensor.dtype in INTEGERS for tensor in program.tensors if tensor.dtype}
    declared |= dict.fromkeys(set(program.scalars) - set(program.integers), False)
    return integer_uses([output.expr for output in program.outputs], declared, program.at_most).get(name)


def _indexing(node: Expr) -> Iterator[tuple[str, Use]]:
    if isinstance(node, Load):
        for index in node.index:
            for part in _counting(index):
                yield _name(part), Use("used in an index", node)
    elif isinstance(node, Call) and node.fn in OF_INTEGERS:
        for arg in node.args:
            for part in _counting(arg):
                yield _name(part), Use(_TAKEN.get(node.fn, "shifted, or taken as bits"), node)


def _counting(index: Expr) -> Iterator[Load | Scalar]:
    """The names that an index is computed from as integers: not what a position is chosen by, nor what is rounded."""
    match index:
        case Load() | Scalar():
            yield index
        case Reduce(op, _, _) if fold_of(op) is not None:
            return
        case Call(fn, _) if fn in ROUNDINGS or fn in COMPARISONS or fold_of(fn) is not None:
            return
        case Call("where", (_, *branches)):
            for branch in branches:
                yield from _counting(branch)
        case _:
            for part in children(index):
                yield from _counting(part)


def _form(node: Expr, forms: Mapping[Expr, Form], known: Mapping[str, bool]) -> Form:
    match node:
        case Axis():
            return "position"
        case Size():
            return "integer"
        case Const(value):
            return "integer" if type(value) is int else "other"
        case Load() | Scalar():
            return (
                "open" if (integer := known.get(_name(node))) is None else "integer" if integer else "other"
            )
        case Reduce(op, _, body):
            fold = fold_of(op)
            if fold is None:
                return "integer" if forms[body] in ("position", "integer") else "other"
            part = forms[contributions(node)[fold[1]]]
            return part if part == "position" and fold[0].selects(fold[1]) else "other"
        case Call(fn, (_,)) if fn in ROUNDINGS:
            return "integer"
        case Call(fn, (part,)) if fn in _SAME:
            return forms[part]
        case Call(fn, args) if fn in _JOINED:
            return _joined([forms[arg] for arg in args])
        case Call("where", (_, left, right)):
            return _alternative({forms[left], forms[right]})
        case Call("mul", (left, right)):
            sides = forms[left], forms[right]
            if "open" in sides:
                return "open" if "integer" in sides and _is_number(left, right) else "other"
            return _joined(sides)
        case _:
            return "other"


def _joined(forms: Iterable[Form]) -> Form:
    found = set(forms)
    order: tuple[Form, ...] = ("other", "position", "open", "integer")
    return next(form for form in order if form in found)


def _alternative(forms: set[Form]) -> Form:
    """Either of two: where one may be no position, it tells nothing of what it meets."""
    return "open" if forms == {"position", "open"} else _joined(forms)


def _is_number(*sides: Expr) -> bool:
    return any(isinstance(side, Const) for side in sides)


def _wanted(node: Expr, forms: Mapping[Expr, Form]) -> Iterator[tuple[Expr, Use]]:
    """The parts of a node that are integers because of it."""
    match node:
        case Call("floordiv" | "mod", (left, right)):
            if _is_counted(left) or _is_counted(right):
                for part in walk(*(side for side in (left, right) if not _reads(side))):
                    yield part, Use("divided with a position", node)
            if forms[left] == "position":
                yield right, Use("divided with a position", node)
        case Call(fn, (left, right)) if fn in COMPARISONS or fn in _JOINED:
            role: Role = "added to a position" if fn in ("add", "sub") else "compared with a position"
            for one, other in ((left, right), (right, left)):
                if forms[one] == "position" and forms[other] == "open":
                    yield other, Use(role, node)


def _is_counted(expr: Expr) -> bool:
    """Whether an expression is made of axes, sizes, integers and scalars alone, and of the first two at all."""
    nodes = list(walk(expr))
    whole = all(type(node.value) is int for node in nodes if isinstance(node, Const))
    return whole and not _reads(expr) and any(isinstance(node, Axis | Size) for node in nodes)


def _reads(expr: Expr) -> bool:
    return any(isinstance(node, Load) for node in walk(expr))


def _names(part: Expr, forms: Mapping[Expr, Form]) -> Iterator[str]:
    """The names that a part that has to be an integer is computed from."""
    match part:
        case Load() | Scalar():
            yield _name(part)
        case Call("where", (_, *branches)):
            for branch in branches:
                yield from _names(branch, forms)
        case Call(fn, args) if forms[part] == "open" and (fn in _SAME or fn in _JOINED or fn == "mul"):
            for arg in args:
                yield from _names(arg, forms)


def _name(node: Load | Scalar) -> str:
    return node.tensor if isinstance(node, Load) else node.name
