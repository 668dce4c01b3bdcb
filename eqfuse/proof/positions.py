"""Masks that select one position of an axis, and other names of axes, read off the texts of leaves: what a checker takes as given of them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice, permutations

from eqfuse.names import Names
from eqfuse.proof.elaborate import AT, axes_in, expression_of, free_names, reading
from eqfuse.proof.syntax import Term, number, term, walk
from eqfuse.terms.folds import PAIR, fold_of, is_ranked
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import sized_axes, spare_axes
from eqfuse.terms.prefixes import Extents, alike
from eqfuse.terms.python import parsed


def conjuncts(text: str) -> list[str]:
    """What all holds where a condition does, each as a tree."""
    return list(map(ast.dump, _conjuncts(parsed(text))))


def _conjuncts(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.BoolOp(ast.And(), values):
            return [part for value in values for part in _conjuncts(value)]
    return [node]


def selects(
    text: str,
    value: Term,
    inside: str,
    read: Term,
    axis: str,
    integers: Collection[str],
    scalars: Collection[str],
) -> bool:
    """Whether a condition says that the position of `axis` is some integer, `inside` whether that is a position of the axis, and
    `read` is `value` at it. `integers` are the tensors and scalars that hold integers."""
    match parsed(text):
        case ast.Compare(ast.Name(name), [ast.Eq()], [at]) if name == axis:
            pass
        case ast.Compare(at, [ast.Eq()], [ast.Name(name)]) if name == axis:
            pass
        case _:
            return False
    if axis in axes_in(ast.unparse(at)) or not _is_integer(at, integers, scalars):
        return False
    wanted = f"{ast.unparse(at)} < N({axis})"
    match at:
        case ast.Name(name) if name not in scalars:
            at = ast.BinOp(at, ast.Add(), ast.Constant(0))
        case ast.Constant(int(number)) if number >= 0:
            pass
        case _:
            wanted = f"0 <= {ast.unparse(at)} and {wanted}"
    return conjuncts(inside) == conjuncts(wanted) and _Moved(axis, at).same(value, read)


MOST_WAYS = 720
"""Ways to name the axes of a term that are compared."""


def selects_computed(mask: Term, value: Term, inside: Term, read: Term, axis: str) -> bool:
    """The same of a condition that compares the position of `axis` with one that a reduction finds, as the rules look into them."""
    match mask:
        case Term(head="Apply2", words=("eq",), args=(one, two)):
            at = two if one is term("Leaf", (axis,)) else one
        case _:
            return False
    own, size = term("Leaf", (axis,)), term("Leaf", (f"N({axis})",))
    wanted = term(
        "Apply2",
        ("and",),
        (term("Apply2", ("le",), (number("0"), at)), term("Apply2", ("lt",), (at, size))),
    )
    return (
        {*mask.args} == {own, at}
        and axis not in free_names(at, {})
        and _is_found_position(at)
        and inside is wanted
        and _MovedTo(axis, at).same(value, read)
    )


def _is_found_position(at: Term) -> bool:
    """Whether a term is a position that a reduction over its axis keeps, if it keeps one."""
    if at.head != "Red" or (found := fold_of(at.words[0])) is None:
        return False
    (fold, place), parts, rest = found, list[Term](), at.args[0]
    while rest.head == "Apply2" and rest.words == (PAIR,):
        parts.append(rest.args[0])
        rest = rest.args[1]
    parts = [*parts, rest][1 if is_ranked(at.words[0]) else 0 :]
    return bool(fold.order) and place < len(parts) and parts[place] is term("Leaf", (at.words[1],))


@dataclass(frozen=True)
class AxisNames:
    """The `axes` of a program, which of them have one extent, and all `names` that it gives a meaning. A name `j_1` that is none of these
    is one more for axis `j`."""

    axes: frozenset[str] = frozenset()
    extents: Extents = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program) -> AxisNames:
        """Those of a program, without the names that it has for orders alone."""
        known = {*sized_axes(program), *program.domains.values(), *program.lengths}
        axes = frozenset(known - spare_axes(program).keys())
        tensors, outputs = (t.name for t in program.tensors), (o.name for o in program.outputs)
        return AxisNames(axes, alike(program), axes.union(program.scalars, tensors, outputs))

    def extent(self, name: str) -> int | str | None:
        """What all axes of one extent have in common; None of a name of no axis."""
        if name not in self.names:
            name, _, number = name.rpartition("_")
            if not number.isdecimal():
                return None
        return self.extents.get(name, name) if name in self.axes else None

    def alike(self, axis: str) -> frozenset[str]:
        """The other axes of the program that have the extent of one."""
        found = self.extent(axis)
        return frozenset(
            each for each in self.axes if each != axis and self.extent(each) == found is not None
        )

    def root(self, name: str) -> str:
        """The axis of the program of which this is a name."""
        return name if name in self.names else name.rpartition("_")[0]

    def fresh(self, axis: str, taken: Collection[str]) -> str:
        """A name for an axis that is none of these, and none of the program."""
        return Names({*self.names, *taken}).numbered(self.root(axis))

    def first(self, axes: Sequence[str], taken: Collection[str]) -> list[tuple[str, ...]]:
        """The ways to give axes the first names of their extents that are not taken: all, up to MOST_WAYS."""
        ways: list[dict[str, str]] = [{}]
        for extent in dict.fromkeys(map(self.extent, axes)):
            own = [axis for axis in axes if self.extent(axis) == extent]
            names = sorted(axis for axis in self.axes if self.extent(axis) == extent and axis not in taken)
            while len(names) < len(own):
                names.append(self.fresh(min(map(self.root, own)), {*taken, *names}))
            most = max(1, MOST_WAYS // len(ways))
            orders = islice(permutations(names[: len(own)]), most)
            given = [dict(zip(own, each, strict=True)) for each in orders]
            ways = [{**way, **each} for way in ways for each in given]
        return [tuple(way[axis] for axis in axes) for way in ways]

    def selects_one(self, text: str, value: Term, read: Term, axis: str) -> bool:
        """Whether a condition says that two axes of one extent have the same position, and `read` is `value` with that of the other axis
        in place of that of `axis`."""
        match parsed(text):
            case ast.Compare(ast.Name(one), [ast.Eq()], [ast.Name(two)]) if axis in (one, two) and one != two:
                other = two if one == axis else one
                found = self.extent(axis)
                same = found is not None and found == self.extent(other)
                return same and _Moved(axis, parsed(other), is_name=True).same(value, read)
        return False

    def is_renamed(self, fold: Term, other: Term) -> bool:
        """Whether a fold over an axis is another one over an axis of the same extent, at whose positions it reads."""
        match fold, other:
            case Term(head="Red", words=(op, axis, "ALL")), Term(head="Red", words=(again, name, "ALL")):
                (value,), (read,) = fold.args, other.args
                return (
                    op == again
                    and (extent := self.extent(axis)) is not None
                    and extent == self.extent(name)
                    and name not in free_names(value, {})
                    and _Moved(axis, parsed(name), is_name=True).same(value, read)
                )
        return False


def _is_integer(node: ast.expr, integers: Collection[str], scalars: Collection[str]) -> bool:
    """Whether an index is made of positions, sizes and integers."""
    match node:
        case ast.Constant(int(value)):
            return not isinstance(value, bool)
        case ast.Name(name):
            return name in integers or name not in scalars
        case ast.Subscript(ast.Name(name)):
            return name in integers
        case ast.Call(ast.Name("N"), [ast.Name()]):
            return True
        case ast.UnaryOp(ast.USub(), inner):
            return _is_integer(inner, integers, scalars)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod(), right):
            return _is_integer(left, integers, scalars) and _is_integer(right, integers, scalars)
    return False


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _says(value: Term, node: ast.expr) -> bool:
    """Whether a term is an index, whose sums and products it may look into."""
    match value, node:
        case Term(head="Leaf", words=(text,)), _:
            return ast.dump(parsed(text)) == ast.dump(node)
        case Term(head="Num", words=(text,)), ast.Constant(int(number)):
            return float(text) == number
        case Term(head="Neg", args=(inner,)), ast.UnaryOp(ast.USub(), of):
            return _says(inner, of)
        case Term(head="Add", args=(one, Term(head="Neg", args=(other,)))), ast.BinOp(left, ast.Sub(), right):
            return _says(one, left) and _says(other, right)
        case (Term(head="Add", args=(one, other)), ast.BinOp(left, ast.Add(), right)) | (
            Term(head="Mul", args=(one, other)),
            ast.BinOp(left, ast.Mult(), right),
        ):
            return _says(one, left) and _says(other, right)
    return False


class _Captured(Exception):
    """A reduction would bind an axis of a position, or make a list along what is no axis."""


class _Moved(ast.NodeTransformer):
    """Terms in which the positions of an axis are replaced: by those of another axis of its extent, where it `is_name`."""

    def __init__(self, axis: str, at: ast.expr, is_name: bool = False) -> None:
        self._axis, self._at, self._free, self._is_name = axis, at, _names(at), is_name
        self._same: set[tuple[Term, Term]] = set()

    def same(self, value: Term, read: Term) -> bool:
        """Whether a term, with the positions replaced, is another one."""
        if (value, read) in self._same:
            return True
        if self._axis not in free_names(value, {}):
            return value is read
        match value.head, value.words:
            case "Leaf", (text,) if text == self._axis and not self._is_name:
                found = _says(read, self._at)
            case "Leaf", (text,):
                found = read.head == "Leaf" and self._leaf(text, read.words[0])
            case "Red", (_, bound, _) if bound in self._free:
                found = False  # it would bind an axis of the position
            case _:
                alike = (value.head, value.words, len(value.args)) == (read.head, read.words, len(read.args))
                found = alike and all(map(self.same, value.args, read.args))
        if found:
            self._same.add((value, read))
        return found

    def _leaf(self, text: str, read: str) -> bool:
        if "'" in text + read:
            return False  # what a merge has named
        try:
            return ast.dump(self.visit(parsed(text))) == ast.dump(parsed(read))
        except _Captured:
            return False

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._at if node.id == self._axis else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return ast.Subscript(node.value, self.visit(node.slice), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node.func:
            case ast.Name("N"):
                return node
            case ast.Subscript(op, axes):
                own = axes.elts if isinstance(axes, ast.Tuple) else [axes]
                ranks = own[-1:] if is_ranked(ast.unparse(op)) else []
                bound = set[str]().union(*map(_names, own[: len(own) - len(ranks)]))
                if self._axis in bound:
                    return node
                is_list = any(self._axis in _names(each) for each in ranks)
                if bound & self._free or (is_list and not self._is_name):
                    raise _Captured
                func = ast.Subscript(op, self.visit(axes), node.func.ctx)
                return ast.Call(func, list(map(self.visit, node.args)), node.keywords)
        return ast.Call(node.func, list(map(self.visit, node.args)), node.keywords)


class _MovedTo:
    """Terms in which the positions of an axis are one that a reduction finds: in leaves, its text."""

    def __init__(self, axis: str, at: Term) -> None:
        self._axis, self._at, self._free = axis, unordered(at), free_names(at, {})

    def same(self, value: Term, read: Term) -> bool:
        """Whether a term, with the positions replaced, is another one."""
        if self._axis not in free_names(value, {}):
            return value is read
        match value.head, value.words:
            case "Leaf", (text,) if text == self._axis:
                return unordered(read) == self._at
            case "Leaf", (text,):
                return (
                    read.head == "Leaf"
                    and "'" not in text + read.words[0]
                    and self._text(text, read.words[0])
                )
            case "Red", (_, bound, _) if bound in self._free:
                return False  # it would bind an axis of the position
        alike = (value.head, value.words, len(value.args)) == (read.head, read.words, len(read.args))
        return alike and all(map(self.same, value.args, read.args))

    def _text(self, text: str, read: str) -> bool:
        """The same of the element of a tensor that is read at positions."""
        match parsed(text), parsed(read):
            case ast.Subscript(ast.Name(tensor), index), ast.Subscript(ast.Name(other), place):
                sides = [each.elts if isinstance(each, ast.Tuple) else [each] for each in (index, place)]
                return tensor == other and len(sides[0]) == len(sides[1]) and all(map(self._part, *sides))
        return False

    def _part(self, index: ast.expr, read: ast.expr) -> bool:
        if isinstance(index, ast.Name) and index.id == self._axis:
            found = term_of(read)
            return found is not None and unordered(found) == self._at
        return self._axis not in _names(index) and ast.dump(index) == ast.dump(read)


def term_of(node: ast.expr) -> Term | None:
    """The term of a text, reductions looked into; None of sums and products of other functions of these."""
    match node:
        case ast.Call(ast.Subscript(op, axes), args):
            name, own = ast.unparse(op), axes.elts if isinstance(axes, ast.Tuple) else [axes]
            parts = [term_of(each) for each in ([own.pop()] if is_ranked(name) else []) + args]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            found = packed(known)
            for axis in reversed(own):
                found = term("Red", (name, ast.unparse(axis), "ALL"), (found,))
            return found
        case ast.BinOp(left, (ast.Add() | ast.Mult()) as sign, right):
            one, two = term_of(left), term_of(right)
            head = "Add" if isinstance(sign, ast.Add) else "Mul"
            return None if one is None or two is None else term(head, (), (one, two))
        case ast.Name() | ast.Constant() | ast.Subscript():
            return reading(expression_of(node), states=())
    return None


def computed_load(text: str) -> Term | None:
    """The term of the text of a load at an index that a reduction computes, the index looked into; None of another text."""
    match parsed(text.rstrip("'")):
        case ast.Subscript(ast.Name(tensor), index):
            parts = [term_of(part) for part in (index.elts if isinstance(index, ast.Tuple) else [index])]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts) and any(node.head == "Red" for node in walk(*known)):
                return term("Apply1", (tensor + AT,), (packed(known),))
    return None


def packed(parts: Sequence[Term]) -> Term:
    """Terms as one."""
    return reduce(lambda behind, part: term("Apply2", (PAIR,), (part, behind)), reversed(parts))


def unordered(value: Term) -> str:
    """What is the same of terms that differ in the order of factors and of addends."""
    if value.head in ("Mul", "Add"):
        parts, waiting = [], [value]
        while waiting:
            part = waiting.pop()
            if part.head == value.head:
                waiting += part.args
            else:
                parts.append(unordered(part))
        return f"{value.head}({', '.join(sorted(parts))})"
    return f"{value.head}({', '.join([*value.words, *map(unordered, value.args)])})"
