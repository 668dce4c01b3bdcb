"""Expressions as plain terms: what a derivation starts from and ends at.

a - b is a + (-b), a / b is a inv(b), rsqrt(a) is inv(sqrt(a)), relu(a) is maximum(a, 0); what the rules do not look
into (loads, positions, predicates without reductions) is a leaf, named by its text; a load at an index that is
looked into is a function of it, `Apply1 "W[]"` of the packed index. Written apart from the
e-graph's encoder, so that a checker does not share it.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, count

from eqfuse.proof.syntax import Term, number, term, transform, walk
from eqfuse.terms.folds import PAIR, fold_of, is_ranked, packed
from eqfuse.terms.functions import ARITY, CASTS, CONSTANTS, FUNCTIONS, OPERATORS
from eqfuse.terms.integers import in_short
from eqfuse.terms.nodes import REDUCTIONS, Call, Const, Expr, Load, Local, Reduce, Size, call
from eqfuse.terms.nodes import walk as subexpressions
from eqfuse.terms.prefixes import Extents, Prefix, positions_of
from eqfuse.terms.python import parsed

NAMES: Mapping[str, str] = {row.name: row.constructor for row in FUNCTIONS.values() if row.constructor}
"""Functions that have a constructor of their own."""

ONE, ZERO = number("1"), number("0")

AT = "[]"
"""What follows a tensor's name in that of the function from an index to the tensor's element."""


def reading(
    expr: Expr,
    *,
    states: Collection[str] | None = None,
    stored: Collection[str] = (),
    opaque: Callable[[Reduce], bool] = lambda reduce: False,
    split: str | None = None,
    strict_casts: bool = False,
    leaves: dict[str, Expr] | None = None,
    predicates: bool = False,
    indices: bool = False,
) -> Term:
    """The term of an expression, reductions over whole axes.

    Values named in `states` (any, where that is None) are `Local`; other local values, and reductions for which
    `opaque` holds, are leaves. Loads of `stored` temporaries are looked into like reductions are. Only the size of
    the `split` axis (of any, where that is None) depends on the part that is looked at.
    `leaves` collects what the leaves are made of. With `predicates`, every function is looked into.
    A load is looked into where its index reads a state that is named in `states`; with `indices`, wherever it is computed.
    """
    memo: dict[Expr, Term] = {}

    def computed(node: Expr, over: str | None = None) -> bool:
        """Whether a value reads a reduction (over an axis, where that is given), a state or a temporary."""
        return any(
            (isinstance(n, Reduce) and over in (None, n.axis))
            or isinstance(n, Local)
            or (isinstance(n, Load) and n.tensor in stored)
            for n in subexpressions(node)
        )

    def is_indexed(load: Load) -> bool:
        if indices:
            return any(map(computed, load.index))
        return any(isinstance(n, Local) and n.name in (states or ()) for n in subexpressions(load))

    def leaf(node: Expr) -> Term:
        if leaves is not None:
            leaves[str(node)] = node
        return term("Leaf", (str(node),))

    def make(node: Expr) -> Term:
        match node:
            case Const(value):
                return number(repr(in_short(value)))
            case Local(name, _) if states is None or name in states:
                return term("Local", (name,))
            case Reduce(op, axis, body) if not opaque(node):
                return term("Red", (op, axis, "ALL"), (visit(body),))
            case Call("div", (a, Size(axis))) if split in (None, axis) and computed(a, axis):
                count = term("Red", ("sum", axis, "ALL"), (ONE,))
                return term("Mul", (), (visit(a), term("Inv", (), (count,))))
            case Load(tensor, index) if is_indexed(node):
                return term("Apply1", (tensor + AT,), (visit(packed(index)),))
            case Call(fn, args):
                return _call(node, fn, args)
        return leaf(node)

    def _call(node: Expr, fn: str, args: tuple[Expr, ...]) -> Term:
        if fn in NAMES:
            return term(NAMES[fn], (), tuple(map(visit, args)))
        if fn in CASTS and not strict_casts:
            return term("Cast", (fn,), (visit(args[0]),))
        match fn:
            case "sub":
                return term("Add", (), (visit(args[0]), term("Neg", (), (visit(args[1]),))))
            case "div":
                return term("Mul", (), (visit(args[0]), term("Inv", (), (visit(args[1]),))))
            case "rsqrt":
                return term("Inv", (), (term("Sqrt", (), (visit(args[0]),)),))
            case "relu":
                return term("Max", (), (visit(args[0]), ZERO))
        if (fn != PAIR and not predicates and not computed(node)) or len(args) > 2:
            return leaf(node)
        return term(f"Apply{len(args)}", (fn,), tuple(map(visit, args)))

    def visit(node: Expr) -> Term:
        if node not in memo:
            memo[node] = make(node)
        return memo[node]

    return visit(expr)


def normal(root: Term, axis: str | None = None, *, guards: bool = True, ordered: bool = False) -> Term:
    """One form for terms that say the same in other notation: the order of two factors or two terms, a ratio and a
    division, a difference and a subtraction, N(j) and the number of positions of j. Parts are told apart of
    `axis` alone, where one is given.

    Without `guards`, the total repairs of rules/guards.py stand for what they guard: `finite(x)` and `invertible(x)`
    for x, `where(s == identity, identity, f s)` for f s, `where(x == x, x, 0)` for x; and what is multiplied by x/x or
    added to by x - x is itself.
    """

    def step(node: Term) -> Term:
        match node.head, node.words, node.args:
            case "Finite" | "Invertible", _, (a,) if not guards:
                return a
            case "Where", _, (Term(head="Apply2", words=("eq",), args=(s, i)), j, made) if (
                not guards and i is j and (made is s or (made.head == "Mul" and s in made.args))
            ):
                return made
            case "Where", _, (Term(head="Apply2", words=("eq",), args=(s, i)), made, j) if (
                not guards and s is i and made is s and j is ZERO
            ):
                return made
            case "Where", _, (_, a, b) if a is b and not guards:
                return a
            case "Exp", _, (a,) if a is ZERO:
                return ONE
            case (("Abs" | "Sq" | "Sqrt"), _, (a,)) if a is ONE:
                return ONE
            case "Neg", _, (a,) if a is ZERO:
                return ZERO
            case "Ratio", _, (a, b):
                return product(a, inverse(b))
            case "Inv", _, (a,):
                return inverse(a)
            case "Delta", _, (a, b):
                return total(a, opposite(b))
            case "Mul", _, (a, b):
                return product(a, b)
            case "Add", _, (a, b):
                return total(a, b)
            case "Red", ("sum", over, part), (a,) if a is ONE and part in ("ALL", "") and over != axis:
                return term("Leaf", (f"N({over})",))
            case "Red", (op, over, part), args if axis not in (None, over) and part != "ALL":
                return step(term("Red", (op, over, "ALL"), args))
        return node

    def inverse(a: Term) -> Term:
        return ONE if a is ONE else term("Inv", (), (a,))

    def opposite(a: Term) -> Term:
        return ZERO if a is ZERO else term("Neg", (), (a,))

    def product(a: Term, b: Term) -> Term:
        if a is ONE or b is ONE:
            return b if a is ONE else a
        if not guards:
            if a is inverse(b) or b is inverse(a):
                return ONE
            if a is ZERO or b is ZERO:
                return ZERO
        return term("Mul", (), (a, b) if ordered else tuple(sorted((a, b), key=id)))

    def total(a: Term, b: Term) -> Term:
        if a is ZERO or b is ZERO:
            return b if a is ZERO else a
        if not guards and (a is opposite(b) or b is opposite(a)):
            return ZERO
        if ordered:  # -a + b is written b - a
            return term("Add", (), (b, a) if a.head == "Neg" and b.head != "Neg" else (a, b))
        return term("Add", (), tuple(sorted((a, b), key=id)))

    return transform(root, step)


class Circular(Exception):
    """A name is defined by itself."""


def expanded(root: Term, values: Mapping[str, Term]) -> Term:
    """`root` with named values and leaves replaced by what they stand for, and what is in those likewise.
    Raises Circular where that has no end."""
    memo: dict[str, Term] = {}
    entered: set[str] = set()

    def step(node: Term) -> Term:
        if node.head not in ("Local", "Leaf") or node.words[0] not in values:
            return node
        name = node.words[0]
        if name not in memo:
            if values[name] is node:
                return node
            if name in entered:
                raise Circular(name)
            entered.add(name)
            memo[name] = transform(values[name], step)
        return memo[name]

    return transform(root, step)


def named(root: Term, values: Mapping[str, Term]) -> Term:
    """`root` with its `Local` values replaced."""
    return transform(root, lambda node: values.get(node.words[0], node) if node.head == "Local" else node)


def opened(root: Term) -> Term:
    """`root` with its leaves looked into: a predicate is a leaf where no reduction is in it, and none where a rule has
    taken the reduction away."""

    def step(node: Term) -> Term:
        if node.head != "Leaf" or node.words[0].endswith("'"):
            return node
        return reading(expression_of(parsed(node.words[0])), predicates=True)

    return transform(root, step)


_FUNCTION_OF = {symbol: fn for fn, symbol in OPERATORS.items()}
_SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "and",
    ast.Or: "or",
}


def expression_of(node: ast.expr) -> Expr:
    """The functions that a text is made of, around names for what else it reads."""
    match node:
        case ast.Constant(int() | float() as value):
            return Const(value)
        case ast.Name(name) if name in CONSTANTS:
            return Const(CONSTANTS[name])
        case ast.UnaryOp(ast.Not(), operand):
            return call("not", expression_of(operand))
        case ast.UnaryOp(ast.USub(), operand):
            inner = expression_of(operand)
            return Const(-inner.value) if isinstance(inner, Const) else call("neg", inner)
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]) if type(sign) in _SYMBOLS:
            return call(_FUNCTION_OF[_SYMBOLS[type(sign)]], expression_of(left), expression_of(right))
        case ast.BoolOp(sign, values):
            return reduce(partial(call, _FUNCTION_OF[_SYMBOLS[type(sign)]]), map(expression_of, values))
        case ast.Call(ast.Name("max" | "min" as name), values, []):
            return reduce(partial(call, f"{name}imum"), map(expression_of, values))
        case ast.Call(ast.Name(name), values, []) if ARITY.get(name) == len(values):
            return call(name, *map(expression_of, values))
        case _:
            return Local(ast.unparse(node), ())


def over_part(body: Term, part: str, values: Mapping[str, Term]) -> Term:
    """The body of a state as it is over one part of the axis: its reductions are, states are those of the part."""

    def step(node: Term) -> Term:
        match node.head, node.words:
            case "Local", (name,):
                return values.get(name, node)
            case "Red", (op, axis, "ALL"):
                return term("Red", (op, axis, part), node.args)
        return node

    return transform(body, step)


def over_parts(axis: str, states: Iterable[tuple[str, str, Term]]) -> dict[str, dict[str, Term]]:
    """The values of states (name, op, body; in order) over the parts A and B of an axis and over both."""
    found: dict[str, dict[str, Term]] = {part: {} for part in ("A", "B", "AB")}
    for name, op, body in states:
        for part, values in found.items():
            values[name] = term("Red", (op, axis, part), (over_part(body, part, values),))
    return found


def part_of(condition: Term, axis: str, extents: Extents) -> Prefix | None:
    """The part of an axis where a condition on positions holds; None of any other condition."""
    match condition.head, condition.words, condition.args:
        case "Apply2", (("le" | "lt" | "ge" | "gt") as fn,), (left, right):
            less, more = (left, right) if fn in ("le", "lt") else (right, left)
            terms = Counter(_linear(less))
            terms.subtract(_linear(more))
            terms[""] += fn in ("lt", "gt")
            sizes = {name: n for name, n in terms.items() if name.startswith("N(")}
            positions = {name: n for name, n in terms.items() if name not in sizes}
            return Prefix.of(positions, axis, {name[2:-1]: n for name, n in sizes.items()}, extents)
    return None


def _linear(root: Term) -> Mapping[str, int]:
    """How often each position counts in a sum of positions and whole numbers, and the number, by ""; what else there is
    counts by a name that is no axis."""
    match root.head, root.words, root.args:
        case (("Leaf" | "Local"), (name,), ()):
            return {name: 1}
        case "Num", (text,), () if text.lstrip("-").isdigit():
            return {"": int(text)}
        case "Neg", _, (a,):
            return {name: -n for name, n in _linear(a).items()}
        case "Add", _, (a, b):
            total = Counter(_linear(a))
            total.update(_linear(b))
            return total
    return {"?": 1}


def in_parts(root: Term, scans: Collection[tuple[str, str]], extents: Extents) -> Term:
    """`root`, its leaves looked into, with folds to which only those of their positions add that fulfil a condition as folds over this
    part, in which the condition holds. `scans` are axes with conditions on their positions; a fold may be over any axis of the same
    extent. Inner folds come first."""
    parts = [
        (axis, where, wanted)
        for axis, where in scans
        if (wanted := part_of(opened(term("Leaf", (where,))), axis, extents)) is not None
    ]

    def step(node: Term) -> Term:
        if node.head != "Red" or node.words[2] != "ALL":
            return node
        over = node.words[1]
        for axis, where, wanted in parts:
            if extents.get(over, over) == extents.get(axis, axis):
                made = _in_part(node, _with_names(where, {axis: over}), wanted, extents)
                if made is not node:
                    return made
        return node

    return transform(opened(root), step)


def _in_part(fold: Term, where: str, wanted: Prefix, extents: Extents) -> Term:
    """A fold over all of an axis as one over the part where the condition holds; itself where other positions add to it."""
    op, over, (body,) = fold.words[0], fold.words[1], fold.args
    positions = {normal(opened(reading(k))): reading(v) for k, v in positions_of(wanted, over).items()}

    def located(node: Term) -> Term:
        if node.head not in ("Local", "Add") or normal(node) not in positions:
            return node
        found = positions[normal(node)]
        return opened(
            transform(found, lambda n: term("Red", (*n.words[:2], where), n.args) if n.head == "Red" else n)
        )

    def supposed(holds: bool) -> Term:
        memo: dict[Term, Term] = {}
        for node in walk(body):
            args = tuple(memo[arg] for arg in node.args)
            if node.head == "Red" and extents.get(node.words[1], node.words[1]) == extents.get(over, over):
                memo[node] = node
            elif (part := part_of(node, over, extents)) in (wanted, wanted.complement):
                memo[node] = term("Bool", (str(holds is (part == wanted)),))
            else:
                memo[node] = _chosen(term(node.head, node.words, args) if args != node.args else node)
        return memo[body]

    def placed(root: Term) -> Term:
        """A body with the position `at` said by the part of the axis."""
        memo: dict[Term, Term] = {}

        def visit(node: Term) -> Term:
            if node not in memo:
                found = located(node)
                bound = node.head == "Red" and (node.words[1] == wanted.at or node.words[2] == where)
                if found is node and not bound:
                    found = term(node.head, node.words, tuple(map(visit, node.args)))
                memo[node] = found
            return memo[node]

        return visit(root)

    outside, held, none = _packed(supposed(False)), supposed(True), _identity(op)
    never = op == "max" and not wanted.exclusive and _is_below(outside[0], held, over)
    if not never and outside[: len(none)] != none:
        return fold
    return term("Red", (op, over, where), (placed(held),))


def _another(axis: str, taken: Collection[str], extents: dict[str, int | str]) -> str:
    """Another axis of the same extent; a new one where all are taken."""
    names = (f"{axis}_{number}" for number in count(1))
    name = next(
        name for name in chain(list(extents), names) if name not in taken and _fits(name, axis, extents)
    )
    extents[name] = extents.get(axis, axis)
    return name


def _fits(name: str, axis: str, extents: Extents) -> bool:
    return name not in extents or extents[name] == extents.get(axis, axis)


def with_axes(root: Term, names: Mapping[str, str], extents: dict[str, int | str]) -> Term:
    """A term with other names for some of its free axes; sizes keep theirs. A fold over one of the new names is over another axis of
    the same extent then, which is added to `extents` where there was none."""

    def bound(fold: Term, names: Mapping[str, str], _: int) -> str:
        axis, free = fold.words[1], _names_in(fold, ("Leaf", "Local"))
        if axis not in names.values() or free.isdisjoint(names):
            return axis
        return _another(axis, {*names.values(), *free}, extents)

    return _renamed(root, names, bound)


def without_names(root: Term, prefix: str) -> Term:
    """A term with numbers behind a prefix, which no name in it starts with, for the names of the axes that it folds over: two that differ in
    these alone are the same then."""
    return _renamed(root, {}, lambda fold, names, depth: f"{prefix}{depth}")


def _renamed(
    root: Term, names: Mapping[str, str], bound: Callable[[Term, Mapping[str, str], int], str]
) -> Term:
    """A term with other names for axes: free ones have those of `names`, and each fold is over what `bound` says of it, of the names that
    hold around it, and of how many folds are around it."""
    memo: dict[tuple[Term, frozenset[tuple[str, str]], int], Term] = {}

    def visit(node: Term, names: Mapping[str, str], depth: int) -> Term:
        key = node, frozenset(names.items()), depth
        if key not in memo:
            words, inner = node.words, names
            if node.head in ("Leaf", "Local"):
                words = (_with_names(node.words[0], names),)
            elif node.head == "Red":
                op, axis, where = node.words
                inner = {old: new for old, new in names.items() if old != axis}
                inner, depth = {**inner, axis: bound(node, inner, depth)}, depth + 1
                words = op, inner[axis], _with_names(where, inner)
            memo[key] = term(node.head, words, tuple(visit(each, inner, depth) for each in node.args))
        return memo[key]

    return visit(root, names, 0)


MOST_EXPONENTS = 64
"""Terms up to which an exponent is multiplied out."""


def with_exponents_as_sums(root: Term) -> Term:
    """A term whose exponents are sums of products, in one order of both."""

    def step(node: Term) -> Term:
        if node.head != "Exp":
            return node
        made = []
        for sign, factors in _summands(node.args[0]):
            product = reduce(lambda a, b: term("Mul", (), (a, b)), factors)
            made.append(product if sign > 0 else term("Neg", (), (product,)))
        made.sort(key=id)
        return term("Exp", (), (reduce(lambda a, b: term("Add", (), (a, b)), made),))

    return transform(root, step)


def _summands(root: Term) -> list[tuple[int, tuple[Term, ...]]]:
    """The products that a term is the sum of, with their signs."""
    match root.head, root.args:
        case "Add", (a, b):
            return _summands(a) + _summands(b)
        case "Neg", (a,):
            return [(-sign, factors) for sign, factors in _summands(a)]
        case "Mul", (a, b):
            left, right = _summands(a), _summands(b)
            if len(left) * len(right) <= MOST_EXPONENTS:
                return [
                    (s * t, tuple(sorted((*one, *other), key=id))) for s, one in left for t, other in right
                ]
    return [(1, (root,))]


def _with_names(text: str, names: Mapping[str, str]) -> str:
    """A text with other names for axes, none of which is a size's."""
    if not names or not any(name in text for name in names):
        return text
    tree = parsed(text.rstrip("'"))
    kept: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(fn) as called, args):
                kept |= {id(called), *(id(arg) for arg in args if fn == "N")}
            case ast.Subscript(ast.Name() as tensor):
                kept.add(id(tensor))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in kept:
            node.id = names.get(node.id, node.id)
    return ast.unparse(tree) + "'" * (len(text) - len(text.rstrip("'")))


def _is_below(number: Term, value: Term, axis: str) -> bool:
    """Whether a number is at most what a term may be: of whole numbers, and positions of an axis."""

    def least(node: Term) -> float:
        match node.head, node.words, node.args:
            case "Num", (text,), ():
                return float(text)
            case (("Leaf" | "Local"), (name,), ()) if name == axis:
                return 0.0
            case "Where", _, (_, a, b):
                return min(least(a), least(b))
        return -math.inf

    return number.head == "Num" and least(number) <= least(value)


def _packed(body: Term) -> tuple[Term, ...]:
    if body.head == "Apply2" and body.words == (PAIR,):
        return (body.args[0], *_packed(body.args[1]))
    return (body,)


def _identity(op: str) -> tuple[Term, ...]:
    """What a position has to contribute that adds nothing: to a fold with an order, what comes last by its first key."""
    found = fold_of(op)
    if found is None:
        return (number(repr(in_short(REDUCTIONS[op]))),)
    return tuple(number(repr(in_short(c.value))) for c in found[0].identity)[: 1 if found[0].order else None]


def _chosen(node: Term) -> Term:
    """A term in which it is known whether a condition holds."""
    low = number("-inf")
    match node.head, node.words, node.args:
        case "Where", _, (Term(head="Bool", words=(holds,)), a, b):
            return a if holds == "True" else b
        case "Apply2", (("and" | "or") as fn,), (a, b) if "Bool" in (a.head, b.head):
            known, other = (a, b) if a.head == "Bool" else (b, a)
            return known if (known.words[0] == "True") is (fn == "or") else other
        case "Apply1", ("not",), (Term(head="Bool", words=(holds,)),):
            return term("Bool", (str(holds != "True"),))
        case "Exp", _, (a,) if a is low:
            return ZERO
        case "Add", _, (a, b) if a is low or b is low:
            return low
        case "Mul", _, (a, b) if a is ZERO or b is ZERO:
            return ZERO
        case "Cast", _, (a,) if a is ZERO or a is low:
            return a
        case "Red", (op, *_), (a,) if op in REDUCTIONS and a is _identity(op)[0]:
            return a
    return node


@dataclass(frozen=True)
class MergeValues:
    """What the names in a merge stand for: in an `update` of what a loop has seen, in a `combine` of two parts."""

    update: Mapping[str, Term]
    combine: Mapping[str, Term]


def merge_values(parts: Mapping[str, Mapping[str, Term]]) -> MergeValues:
    """The names of a merge, for the values that `over_parts` gives (see rules/merge.py)."""
    new = {f"{name}_new": value for name, value in parts["AB"].items()}
    left = {f"{name}_a": value for name, value in parts["A"].items()}
    right = {f"{name}_b": value for name, value in parts["B"].items()}
    return MergeValues({**parts["A"], **new}, {**left, **right, **new})


def free_names(root: Term, values: Mapping[str, Term]) -> frozenset[str]:
    """Names that the value of a term may depend on: axes of its leaves that no reduction around them binds."""
    return _names_in(expanded(root, values), ("Leaf",))


def _names_in(root: Term, heads: Collection[str]) -> frozenset[str]:
    """Names that terms of these heads have, and that no reduction around them binds."""
    memo: dict[Term, frozenset[str]] = {}
    for node in walk(root):
        below = frozenset().union(*(memo[arg] for arg in node.args))
        match node.head, node.words:
            case head, (text,) if head in heads:
                below = axes_in(text)
            case "Red", (_, axis, part):
                below = (below | (axes_in(part) if " " in part else frozenset())) - {axis}
        memo[node] = below
        last = below
    return last


def axes_in(text: str) -> frozenset[str]:
    """Names that the value of a leaf may depend on, read off its text: all but those of tensors, functions, sizes and the
    axes that its reductions bind."""
    return _names(parsed(text.rstrip("'")))


def _names(node: ast.expr) -> frozenset[str]:
    match node:
        case ast.Name(name):
            return frozenset({name})
        case ast.Call(func=ast.Name("N")):
            return frozenset()
        case ast.Call(func=ast.Subscript(value=op, slice=axes), args=args) if is_ranked(ast.unparse(op)):
            *bound, ranks = axes.elts if isinstance(axes, ast.Tuple) else [axes]
            inside = frozenset().union(*map(_names, args))
            return inside.difference(*map(_names, bound)) | _names(ranks)
        case ast.Call(func=ast.Subscript(slice=bound), args=args):
            return frozenset().union(*map(_names, args)) - _names(bound)
        case ast.Call(args=args):
            return frozenset().union(*map(_names, args))
        case ast.Subscript(slice=index):
            return _names(index)
    below = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return frozenset().union(*map(_names, below))
