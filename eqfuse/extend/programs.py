"""Rules and laws of folds as pairs of programs, which the search for differences between programs compares.

Samples meet the usual numbers and those that a text is written with. What is told apart by sizes, by thresholds after
operations, or by conditions together is found as it is between any two programs (`eqfuse.verify.adversary`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence

from eqfuse.errors import EqfuseError
from eqfuse.extend.patterns import expression
from eqfuse.rules.rule import PARTS
from eqfuse.rules.scope import Rule
from eqfuse.terms.functions import CONSTANTS
from eqfuse.terms.nodes import Axis, Const, Expr, Fold, Load, Local, transform, tree_size, walk
from eqfuse.terms.printer import show
from eqfuse.terms.syntax import Source
from eqfuse.verify.certificate import Certificate

LARGEST = 2000
"""Functions of a law, written out, up to which it is compared as programs."""
OUTER = "o_"
"""The axis of the instances."""

Pair = tuple[str, str]
"""Texts of two programs."""


def compared(pair: Pair) -> Certificate | None:
    """What tells two programs apart where both have values; None where one of the texts is no program."""
    from eqfuse.verify.equivalence import equivalent  # loaded at first use: every start would wait for it

    try:
        return equivalent(*pair, domain="common", prove=False)
    except EqfuseError:
        return None


# -- rules -----------------------------------------------------------------------------------------


def of_rule(rule: Rule) -> Pair | None:
    """Both sides as programs: a variable is a tensor along an axis of instances and along the axes of reductions that stand around
    it wherever it does, but for those that it is fixed along. None where the rule has parts of an axis, or conditions on values that
    a function of any number does not meet."""
    sides = [expression(Source.of(text)) for text in (rule.left, rule.right)]
    reading = _Reading.of(rule.when)
    if reading is None:
        return None
    for side in sides:
        reading.find(side, ())
    if reading.axes.keys() & set(PARTS):
        return None
    sized = "".join(f" + 0 * sum[{axis}](sizes_[{OUTER}, {axis}])" for axis in reading.axes)
    texts = [f"y_[{OUTER}] = ({ast.unparse(reading.visit(side))}){sized}" for side in sides]
    return texts[0], texts[1]


_SHAPED = {"nonneg": "abs", "positive": "exp"}
"""Functions of any number that meet a condition on values."""


class _Reading(ast.NodeTransformer):
    """What the names of a rule are: axes, and variables with the axes along which they vary."""

    def __init__(self, fixed: Mapping[str, set[str]], shaped: Mapping[str, str]) -> None:
        self.fixed, self.shaped = fixed, shaped
        self.axes: dict[str, None] = {}
        self.varying: dict[str, set[str]] = {}

    @classmethod
    def of(cls, when: str) -> _Reading | None:
        """With what conditions say; None where they say of values what cannot be had by a function."""
        fixed: dict[str, set[str]] = {}
        shaped: dict[str, str] = {}
        whole = expression(Source.of(f"({when},)")) if when.strip() else ast.Tuple(elts=[])
        assert isinstance(whole, ast.Tuple)
        for node in whole.elts:
            match node:
                case ast.Call(func=ast.Name(id="fixed"), args=[ast.Name(id=name), ast.Name(id=axis)]):
                    fixed.setdefault(name, set()).add(axis)
                case ast.Call(func=ast.Name(id=fact), args=[ast.Name(id=name)]) if fact in _SHAPED:
                    shaped[name] = _SHAPED[fact]
                case ast.Compare(left=ast.Name(id=one), ops=[ast.NotEq()]) if one.isupper():
                    pass
                case _:
                    return None
        return cls(fixed, shaped)

    def find(self, node: ast.AST, around: tuple[str, ...]) -> None:
        """Notes the axes and the variables of a side."""
        match node:
            case ast.Call(func=ast.Subscript(slice=ast.Name(id=axis)), args=args):
                self._axis(axis)
                for arg in args:
                    self.find(arg, (*around, axis))
            case ast.Call(func=ast.Name(id="N"), args=[ast.Name(id=axis)]):
                self._axis(axis)
            case ast.Call(args=args):
                for arg in args:
                    self.find(arg, around)
            case ast.Name(id=name) if name not in CONSTANTS:
                axes = set(around) - self.fixed.get(name, set())
                self.varying[name] = self.varying.get(name, axes) & axes
            case _:
                for child in ast.iter_child_nodes(node):
                    self.find(child, around)

    def _axis(self, name: str) -> None:
        self.axes[name] = None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="N")):
                return node
            case ast.Call(func=func, args=args):
                return ast.Call(func, [self.visit(arg) for arg in args], [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in CONSTANTS:
            return node
        axes = ", ".join([OUTER, *(axis for axis in self.axes if axis in self.varying[node.id])])
        read = f"{node.id}[{axes}]"
        function = self.shaped.get(node.id)
        return ast.parse(f"{function}({read})" if function else read, mode="eval").body


# -- folds -----------------------------------------------------------------------------------------


def of_fold(
    fold: Fold, lift: Sequence[Expr], axis: str, whole: Collection[str]
) -> Iterator[tuple[str, Pair, str, str]]:
    """The laws of a fold at three positions, each with what its sides say; none that are too large to be written out."""
    a, b, c = ([_at(expr, position, axis) for expr in lift] for position in range(3))
    nothing: list[Expr] = list(fold.identity)

    def join(left: Sequence[Expr], right: Sequence[Expr]) -> list[Expr]:
        sides = {f"{name}1": expr for name, expr in zip(fold.state, left, strict=True)}
        sides |= {f"{name}2": expr for name, expr in zip(fold.state, right, strict=True)}

        def step(node: Expr) -> Expr:
            return sides[node.name] if isinstance(node, Local) else node

        return [transform(expr, step) for expr in fold.combine]

    laws = [
        (
            "associative",
            join(join(a, b), c),
            join(a, join(b, c)),
            "combine(combine(a, b), c)",
            "combine(a, combine(b, c))",
        ),
        ("identity", join(nothing, a), a, "combine(identity, a)", "a"),
        ("identity", join(a, nothing), a, "combine(a, identity)", "a"),
    ]
    if fold.commutative:
        laws.append(("commutative", join(a, b), join(b, a), "combine(a, b)", "combine(b, a)"))
    for law, left, right, says, other in laws:
        if max(map(tree_size, (*left, *right))) <= LARGEST:
            yield law, (_text(fold, left, whole), _text(fold, right, whole)), says, other


def _at(expr: Expr, position: int, axis: str) -> Expr:
    """What a position contributes, of numbers of its own."""

    def step(node: Expr) -> Expr:
        match node:
            case Local(name, _):
                return Load(f"{name.strip('%')}_{position}", (Axis(OUTER),))
            case Axis(name) if name == axis:
                return Const(position)
        return node

    return transform(expr, step)


def _text(fold: Fold, state: Sequence[Expr], whole: Collection[str]) -> str:
    """A program whose outputs are the variables of a state; tensors of the arguments that are `whole` are of integers."""
    read = dict.fromkeys(node.tensor for node in walk(*state) if isinstance(node, Load))
    lines = [f"{name}: i64[{OUTER}]" for name in read if name.rpartition("_")[0] in whole]
    lines += (f"{name}_[{OUTER}] = {show(expr)}" for name, expr in zip(fold.state, state, strict=True))
    return "\n".join(lines)
