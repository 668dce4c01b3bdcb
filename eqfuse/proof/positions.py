"""Masks that select one position of an axis, read off the texts of leaves: what a checker takes as given of them."""

from __future__ import annotations

import ast
from collections.abc import Collection

from eqfuse.proof.elaborate import free_names
from eqfuse.proof.syntax import Term
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
    if axis in _names(at) or not _is_integer(at, integers, scalars):
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


class _Moved(ast.NodeTransformer):
    """Terms in which the positions of an axis are replaced."""

    def __init__(self, axis: str, at: ast.expr) -> None:
        self._axis, self._at, self._free = axis, at, _names(at)
        self._same: set[tuple[Term, Term]] = set()

    def same(self, value: Term, read: Term) -> bool:
        """Whether a term, with the positions replaced, is another one."""
        if (value, read) in self._same:
            return True
        if self._axis not in free_names(value, {}):
            return value is read
        match value.head, value.words:
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
        tree = parsed(text)
        if any(isinstance(part, ast.Call) and not isinstance(part.func, ast.Name) for part in ast.walk(tree)):
            return False  # a reduction binds axes of its own
        return ast.dump(self.visit(tree)) == ast.dump(parsed(read))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._at if node.id == self._axis else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return ast.Subscript(node.value, self.visit(node.slice), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "N":
            return node
        return ast.Call(node.func, list(map(self.visit, node.args)), node.keywords)
