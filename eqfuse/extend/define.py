"""From the words of a registration to a reduction: every expression read, every name accounted for."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from eqfuse.errors import EqfuseError, ParseError, did_you_mean
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.expressions import Bindings, ProgramNames, Reader
from eqfuse.terms.folds import FOLDS, NOWHERE, folds_in
from eqfuse.terms.functions import CALLABLE, CONSTANTS, FUNCTIONS
from eqfuse.terms.inline import Inliner
from eqfuse.terms.nodes import COMBINE, REDUCTIONS, Call, Const, Expr, Fold, Local, call, walk
from eqfuse.terms.registry import ARGUMENT, AXIS, REGISTERED, Reduction, substituted
from eqfuse.terms.syntax import Declaration, Source
from eqfuse.terms.types import fold_kinds, kinds


@dataclass(frozen=True)
class Words:
    """A registration as it was written."""

    name: str
    args: str = "x"
    state: str = ""
    lift: str = ""
    identity: str = ""
    combine: str = ""
    result: str = ""
    commutative: bool = False
    why: str = ""
    unverified: str | None = None
    ranks: str = ""
    order: str = ""


@dataclass(frozen=True)
class Defined:
    """A registration that was read: the reduction, its fold where it has a state, and how a position enters it
    (over `Local` arguments and the axis). The arguments that are `whole` are integers: declared so, or taken as bits."""

    reduction: Reduction
    fold: Fold | None
    lift: tuple[Expr, ...]
    whole: frozenset[str] = frozenset()


SHIPPED_NAMES: set[str] = set()
"""Names of the reductions that come with the language."""


def define(words: Words) -> Defined:
    """What the words say, not yet registered nor checked against its laws. Its fold has a name that no other fold has:
    what was compiled before goes on with the fold that it was compiled with.

    Raises EqfuseError (with the text and a caret) for a name that is taken or no name, for a number of
    expressions that is not that of the state variables, and for names that mean nothing where they stand.
    """
    _check_name(words.name)
    (args, whole), (state, counted) = _typed(words.args, "args"), _typed(words.state, "state")
    for name in (*args, *state):
        if name == AXIS:
            raise _error(words.args if name in args else words.state, name, f"{AXIS!r} is the reduced axis")
    if words.order and not state:
        hint = "give its state, or leave the order out"
        raise EqfuseError(f"reduction {words.name!r} has an order and no state", hint=hint)
    if words.ranks:
        _check_ranks(words, state)
    for part in ("identity", "combine") if state and not words.order else ():
        _split(getattr(words, part), part, len(state))
    lifts = _split(words.lift, "lift", len(state)) if state else ()
    if words.ranks and (place := lifts[state.index(words.ranks)]) != AXIS:
        hint = f"lift it as {AXIS}, the position: of equal elements it tells which is which"
        raise _error(words.lift, place, f"ranks {words.ranks!r} is not the position", hint)
    given: dict[str, Expr] = {arg: Local(arg, ()) for arg in args}
    lift = tuple(_read(text, given, axis=True, where="lift", whole=whole) for text in lifts)
    found = kinds(lift, dict.fromkeys(whole, "i64"))
    whole_state = counted | {name for name, expr in zip(state, lift, strict=True) if found[expr] == "int"}
    fold = _named(_fold(words, state, whole_state)) if state else None
    name = fold.name if fold is not None else words.name
    values = {
        variable: _variable(name, fold, place, lifts)
        for place, variable in enumerate(state)
        if fold is not None
    }
    results = []
    if not words.result:
        raise EqfuseError(f"reduction {words.name!r} has no result", hint='say what it gives: result="v"')
    for text in _split(words.result, "result", None):
        if state:
            _read(
                text, {name: Local(name, ()) for name in state}, axis=False, where="result", whole=whole_state
            )
        else:
            _read(text, given, axis=True, where="result")
        results.append(substituted(text, values))
    if words.ranks and not any(f"{name}." in text for text in results):
        message = f"the result of reduction {words.name!r} reads no state variable"
        raise EqfuseError(message, source=words.result, hint='say what it gives: result="v"')
    if fold is not None:
        known = fold_kinds(fold, [found[expr] for expr in lift])
        for variable, kind, text in zip(state, known, lifts, strict=True):
            if variable in counted and kind != "int":
                hint = "lift, identity and combine have to be integers, as 1 << e is; or leave the dtype out"
                raise _error(words.lift, text, f"{variable!r} is not an integer everywhere", hint)
    own = fold if fold is not None and any(f"{name}." in text for text in values.values()) else None
    reduction = Reduction(words.name, args, tuple(results), own, words.why, words.unverified)
    return Defined(reduction, fold, lift, whole | _of_bits(lift))


def _of_bits(lift: Sequence[Expr]) -> frozenset[str]:
    """The arguments that functions of integers take."""
    calls = (node for node in walk(*lift) if isinstance(node, Call) and FUNCTIONS[node.fn].of_integers)
    return frozenset(arg.name for node in calls for arg in node.args if isinstance(arg, Local))


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise EqfuseError(f"{name!r} cannot be the name of a reduction", hint="use letters, digits and _")
    if name in REDUCTIONS:
        raise EqfuseError(f"reduction {name!r} is built in", hint="choose another name")
    if name in CALLABLE or name in CONSTANTS or name == "N":
        raise EqfuseError(f"{name!r} is a name of the language", hint="choose another name")


def _check_ranks(words: Words, state: Sequence[str]) -> None:
    if words.ranks not in state:
        raise _error(
            words.ranks, words.ranks, f"ranks {words.ranks!r} is no state variable", 'write ranks="k"'
        )
    if not words.order:
        message = f"reduction {words.name!r} has ranks and no order"
        raise EqfuseError(message, hint='say which comes first, as order="v, -k"')


def _names(text: str, what: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for place, name in enumerate(names):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise EqfuseError(f"{what} {text!r} is not a list of names", hint=f'write {what}="a, b"')
        if name in names[:place]:
            raise EqfuseError(f"{what} has {name!r} twice", hint="give each its own name")
    return names


def _typed(text: str, what: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of a list, and those that are declared to be integers: `e: i64`."""
    parts = [part.partition(":") for part in text.split(",")] if text else []
    names = _names(", ".join(name for name, _, _ in parts), what) if parts else ()
    for name, colon, dtype in parts:
        if colon and dtype.strip() != "i64":
            message = f"{what} {name.strip()!r} is declared {dtype.strip()!r}"
            raise EqfuseError(message, hint="write i64 for integers, and nothing for real numbers")
    return names, frozenset(name.strip() for name, colon, _ in parts if colon)


def _split(text: str, what: str, count: int | None) -> tuple[str, ...]:
    """The expressions of a list. Raises ParseError where they are no expressions, or not so many."""
    source = Source.of(text)
    module = source.module()
    match module.body:
        case [ast.Expr(value=ast.Tuple(elts=parts))]:
            found = tuple(ast.unparse(part) for part in parts)
        case [ast.Expr(value=value)]:
            found = (ast.unparse(value),)
        case _:
            raise ParseError(f"{what} is not an expression", source=text, hint=f'write {what}="a, b"')
    if count is not None and len(found) != count:
        have = f"{len(found)} expression" + ("" if len(found) == 1 else "s")
        need = f"{count} state variable" + ("" if count == 1 else "s")
        raise ParseError(
            f"{what} has {have} for {need}", source=text, hint="give one expression for each state variable"
        )
    return found


def _fold(words: Words, state: tuple[str, ...], whole: frozenset[str]) -> Fold:
    identity = []
    for text in _split(words.identity, "identity", len(state)):
        value = _read(text, {}, axis=False, where="identity")
        if isinstance(value, Call) and value.fn == "neg" and isinstance(value.args[0], Const):
            value = Const(-value.args[0].value)
        if not isinstance(value, Const) or isinstance(value.value, bool):
            raise _error(text, text, "an identity is a number", "write a number, inf or -inf")
        identity.append(value)
    if words.ranks:
        place = state.index(words.ranks)
        identity[place] = Const(round(max(-NOWHERE, min(identity[place].value, NOWHERE))))
    sides: dict[str, Expr] = {
        f"{name}{side}": Local(f"{name}{side}", ()) for side in (1, 2) for name in state
    }
    order = _order(words, state) if words.order else ()
    first = _comes_first(order)
    chosen = ", ".join(f"where({first}, {name}1, {name}2)" for name in state)
    combine = tuple(
        _read(
            text, sides, axis=False, where="combine", whole={name + side for name in whole for side in "12"}
        )
        for text in _split(chosen if order else words.combine, "combine", len(state))
    )
    return Fold(words.name, state, tuple(identity), combine, words.commutative, order, words.ranks)


def _named(fold: Fold) -> Fold:
    """The fold under its own name, or the first of `name_2`, `name_3`, ... that no other fold has."""
    numbers = count(2)
    name = fold.name
    while (known := FOLDS.get(name)) is not None and replace(known, name=fold.name) != fold:
        name = f"{fold.name}_{next(numbers)}"
    return replace(fold, name=name)


def _order(words: Words, state: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """The keys of an order, and whether the greatest of each comes first."""
    if words.combine:
        raise EqfuseError(f"reduction {words.name!r} has an order and a combine", hint="give one of them")
    parts = [part.strip() for part in words.order.split(",")]
    keys = tuple((part.removeprefix("-").strip(), not part.startswith("-")) for part in parts)
    if sorted(name for name, _ in keys) != sorted(state):
        hint = f'name each state variable once, as order="{", ".join(state)}"; "-" puts the least first'
        raise _error(words.order, words.order, f"order {words.order!r} is no order of the state", hint)
    return keys


def _comes_first(keys: Sequence[tuple[str, bool]]) -> str:
    """Whether the left of two states comes first in an order, as text."""
    text = ""
    for name, greatest in reversed(keys):
        left, right = f"{name}1", f"{name}2"
        better = ">" if greatest else "<"
        if text:
            text = (
                f"({left} {better} {right}) | (({left} == {right}) & ({text})) | "
                f"(({left} != {left}) & (({right} == {right}) | ({text})))"
            )
        else:
            text = f"({left} {better}= {right}) | ({left} != {left})"
    return text


def _variable(name: str, fold: Fold, place: int, lifts: Sequence[str]) -> str:
    """A state variable over the whole axis, as text: a built-in reduction where it is one, else of the fold."""
    for op, fn in COMBINE.items():
        sides = [Local(f"{fold.state[place]}{side}", ()) for side in (1, 2)]
        same = fold.combine[place] in (call(fn, *sides), call(fn, *reversed(sides)))
        if same and float(fold.identity[place].value) == REDUCTIONS[op]:
            return f"{op}[{AXIS}]({lifts[place]})"
    return f"{fold.ops[place]}[{AXIS}]({', '.join(lifts)})"


def _read(
    text: str, names: Mapping[str, Expr], *, axis: bool, where: str, whole: Collection[str] = ()
) -> Expr:
    """The term of one expression over these names, of which some are `whole` numbers; `axis` says whether the position along
    the axis is one."""
    source = Source.of(text)
    (statement,) = source.module().body
    assert isinstance(statement, ast.Expr)
    _check_names(source, statement.value, names, axis, where)
    tree = _Arguments(names).visit(statement.value)
    axes = frozenset({AXIS}) if axis or where == "result" else frozenset[str]()
    declared = {name: Declaration(name, "i64", None, source.module()) for name in whole}
    reader = Reader(source, ProgramNames(axes, frozenset(), {}, declared, {}), Inliner((), {}))
    return reader.read(tree, Bindings(axes, {ARGUMENT + name: value for name, value in names.items()}))


class _Arguments(ast.NodeTransformer):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Name(ARGUMENT + node.id), node) if node.id in self.names else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(arg) for arg in node.args]
        return node


def _check_names(source: Source, root: ast.expr, names: Mapping[str, Expr], axis: bool, where: str) -> None:
    """Raises EqfuseError for the first name that means nothing here."""
    calls = [node for node in ast.walk(root) if isinstance(node, ast.Call)]
    functions = {id(node.func) for node in calls}
    if where == "result":  # the number of positions is known by then
        functions |= {id(node.args[0]) for node in calls if ast.unparse(node) == f"N({AXIS})"}
    subscripts = [node for node in ast.walk(root) if isinstance(node, ast.Subscript)]
    functions |= {id(part) for node in subscripts for part in ast.walk(node)}
    for node in ast.walk(root):
        match node:
            case ast.Name(id="stop") if id(node) in functions and where == "combine":
                raise source.error(
                    "combine may not stop gradients", node, "write stop in lift or result", EqfuseError
                )
            case ast.Name(id=name) if id(node) in functions or name in names or name in CONSTANTS:
                continue
            case ast.Name(id=name) if name == AXIS and axis:
                continue
            case ast.Name(id=name) if name == AXIS:
                hint = "let lift put the position into the state"
                raise source.error(f"{where} may not read the axis", node, hint, EqfuseError)
            case ast.Name(id=name):
                known = f"{where} may read " + (" ".join(names) if names else "numbers alone")
                hint = did_you_mean(name, names) or known
                raise source.error(f"unknown name {name!r} in {where}", node, hint, EqfuseError)
            case ast.Subscript() if id(node) not in {id(n) for n in functions_of(root)} or where != "result":
                hint = (
                    "read the arguments by name" if where == "lift" else "state variables are single values"
                )
                raise source.error(f"{where} may not index or reduce", node, hint, EqfuseError)


def functions_of(root: ast.expr) -> list[ast.expr]:
    """What is called, anywhere in an expression."""
    return [node.func for node in ast.walk(root) if isinstance(node, ast.Call)]


def _error(text: str, place: str, message: str, hint: str = "choose another name") -> EqfuseError:
    source = Source.of(text)
    for node in ast.walk(source.module()):
        if isinstance(node, ast.expr) and ast.unparse(node) == place:
            return source.error(message, node, hint, EqfuseError)
    return EqfuseError(message, source=text, hint=hint)


def register(reduction: Reduction) -> None:
    """From here on, programs may use the reduction."""
    if reduction.fold is not None:
        FOLDS[reduction.fold.name] = reduction.fold
    REGISTERED[reduction.name] = reduction


def admit(reduction: Reduction) -> None:
    """Registers a reduction that came with a kernel. Raises EqfuseError where its name stands for another one here."""
    if REGISTERED.get(reduction.name, reduction) != reduction:
        raise EqfuseError(
            f"the kernel uses a reduction {reduction.name!r} that is not the one registered here",
            hint="register the same one, or load the kernel before another one is registered",
        )
    register(reduction)


def registered_in(*exprs: Expr) -> tuple[Reduction, ...]:
    """The registered reductions whose states are in these expressions."""
    folds = folds_in(*exprs)
    return tuple(reduction for reduction in REGISTERED.values() if reduction.fold in folds)


def forget(name: str) -> None:
    """Programs that are read from here on do not know the reduction."""
    known = REGISTERED.pop(name, None)
    if known is not None and known.fold is not None:
        FOLDS.pop(known.fold.name, None)
