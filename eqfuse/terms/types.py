"""Kinds of expressions (integer, truth value, real), dtypes of results, and checks of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from eqfuse.errors import EqfuseError, TypeCheckError, locate
from eqfuse.terms.dtypes import FLOAT8, INTEGERS, STORED
from eqfuse.terms.folds import contributions, fold_of, sides, unpacked
from eqfuse.terms.functions import (
    AMONG_INTEGERS,
    BITWISE,
    CASTS,
    COMPARISONS,
    DRAWN,
    LOGICAL,
    OF_INTEGERS,
    ON_BITS,
    OPERATORS,
    ROUNDINGS,
)
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    Scan,
    Size,
    Tensor,
    free_axes,
    once,
    walk,
)
from eqfuse.terms.positions import reason
from eqfuse.terms.printer import show

Kind = Literal["int", "bool", "real"]

TIGHT = "& and | bind more tightly than comparisons: write (a > 0) & (b > 0)"

KINDS: Mapping[str, Kind] = {**dict.fromkeys(INTEGERS, "int"), "bool": "bool"}
"""Kinds of the dtypes that are not real."""


def kinds(roots: Iterable[Expr], dtypes: Mapping[str, str]) -> dict[Expr, Kind]:
    """The kind of every subexpression. `dtypes` has tensors, scalars and locals; what it lacks is real."""
    found: dict[Expr, Kind] = {}
    for node in walk(*roots):
        found[node] = _kind(node, found, dtypes)
    return found


def kind(expr: Expr, dtypes: Mapping[str, str]) -> Kind:
    """The kind of one expression; see `kinds`."""
    return kinds([expr], dtypes)[expr]


def _kind(node: Expr, found: Mapping[Expr, Kind], dtypes: Mapping[str, str]) -> Kind:
    match node:
        case Const(value):
            return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "real"
        case Axis() | Size():
            return "int"
        case Load(name, _) | Scalar(name) | Local(name, _):
            return KINDS.get(dtypes.get(name, ""), "real")
        case Reduce(op, _, body):
            fold = fold_of(op)
            if fold is not None:
                return fold_kinds(fold[0], [found[part] for part in contributions(node)])[fold[1]]
            return "real" if found[body] == "real" else "int"
        case Scan(of, place, _, body, _):
            return fold_kinds(of, [found[part] for part in unpacked(body, len(of.state))])[place]
        case Call(fn, _) if (fold := fold_of(fn)) is not None:
            pairs = zip(*sides(node), strict=True)
            both: list[Kind] = ["real" if "real" in (found[a], found[b]) else "int" for a, b in pairs]
            return fold_kinds(fold[0], both)[fold[1]]
        case Call(fn, _) if fn in COMPARISONS or fn in LOGICAL:
            return "bool"
        case Call(fn, _) if fn in ROUNDINGS or fn in ON_BITS:
            return "int"
        case Call("stop", (part,)):
            return found[part]
        case Call("where", (_, left, right)) if found[left] == found[right]:
            return found[left]
        case Call(fn, args) if fn in AMONG_INTEGERS:
            values = args[1:] if fn == "where" else args
            return "real" if any(found[value] == "real" for value in values) else "int"
        case _:
            return "real"


def fold_kinds(fold: Fold, parts: Sequence[Kind]) -> tuple[Kind, ...]:
    """The kind of each state variable, given those of what a position contributes: real where a combination is."""
    kinds_now: list[Kind] = [
        "int" if part != "real" and (isinstance(c.value, int) or math.isinf(c.value)) else "real"
        for part, c in zip(parts, fold.identity, strict=True)
    ]
    while True:
        dtypes = {
            f"{name}{side}": "i64"
            for name, known in zip(fold.state, kinds_now, strict=True)
            for side in (1, 2)
            if known == "int"
        }
        joined = kinds(fold.combine, dtypes)
        after: list[Kind] = [
            "int" if known == "int" and joined[expr] == "int" else "real"
            for known, expr in zip(kinds_now, fold.combine, strict=True)
        ]
        if after == kinds_now:
            return tuple(after)
        kinds_now = after


def program_dtypes(program: Program, dtypes: Mapping[str, str] | None = None) -> dict[str, str]:
    """dtypes of all tensors and integer scalars of a program.

    `dtypes` are those of the tensors at hand; a tensor that it lacks has its declared dtype, or else i64
    where it serves as an integer, bool where it serves as a condition, and f32. Raises TypeCheckError where a
    declaration or its use says otherwise.
    """
    given = dict(dtypes or {})
    result: dict[str, str] = dict.fromkeys(program.integers, "i64")
    deciding = truths(program)
    for tensor in program.tensors:
        dtype = given.get(tensor.name)
        if dtype is not None and tensor.dtype is not None and dtype != tensor.dtype:
            message = f"{tensor.name!r} is declared {tensor.dtype}, the tensor given is {dtype}"
            hint = "convert the tensor, or change the declaration"
            raise _error(program, message, tensor.name, hint)
        if dtype is not None and tensor.name in program.integer_tensors and dtype not in KINDS:
            raise _not_an_integer(program, tensor, dtype)
        default = (
            "i64" if tensor.name in program.integer_tensors else "bool" if tensor.name in deciding else "f32"
        )
        result[tensor.name] = dtype or tensor.dtype or default
    known = given | result
    return {**state_dtypes(program, known), **known} if program.in_order else known


def output_dtypes(program: Program, dtypes: Mapping[str, str]) -> dict[str, str]:
    """The dtype of each output, from those of tensors and scalars."""
    known = {**state_dtypes(program, dtypes), **dtypes} if program.in_order else dtypes
    return {each.name: each.dtype or result_dtype(each.expr, known) for each in program.outputs}


def state_dtypes(program: Program, dtypes: Mapping[str, str]) -> dict[str, str]:
    """The dtype of each state of a recurrence in order: the narrowest one that its step gives again."""
    states = [output for output in program.outputs if output.name in program.states]
    found = {state.name: state.dtype or "i32" for state in states}
    while True:
        known = {**dtypes, **found}
        again = {state.name: state.dtype or result_dtype(state.expr, known) for state in states}
        if again == found:
            return found
        found = again


def _not_an_integer(program: Program, tensor: Tensor, dtype: str) -> EqfuseError:
    use = reason(program, tensor.name)
    assert use is not None
    message = f"{tensor.name!r} is {use.role}, so it holds integers; the tensor given is {dtype}"
    hint = "convert it to integers"
    if use.role not in ("used in an index", "promised to ascend"):
        hint += f", or declare it: {tensor.name}: {dtype}[{', '.join(axis or '...' for axis in tensor.axes)}]"
    return _error(program, message, use.where, hint)


@once
def truths(program: Program) -> frozenset[str]:
    """Tensors that stand as conditions themselves: where(mask[i], ...), mask[i] & ..."""
    found: set[str] = set()
    for node in walk(*_roots(program)):
        match node:
            case Call("where", (Load(name, _), _, _)):
                found.add(name)
            case Call(fn, args) if fn in LOGICAL:
                found.update(arg.tensor for arg in args if isinstance(arg, Load))
    return frozenset(found)


def _roots(program: Program) -> list[Expr]:
    return [output.expr for output in program.outputs]


def compute_dtype(dtypes: Iterable[str]) -> str:
    """The dtype of arithmetic on reals: f32, or f64 where any input is."""
    return "f64" if "f64" in set(dtypes) else "f32"


def result_dtype(expr: Expr, dtypes: Mapping[str, str]) -> str:
    """The dtype of an output: its outermost written cast, else torch's promotion of what it is made from.

    f8 gives way to any other floating dtype and counts as f32 alone; a real made from no floating
    input is f32. An element at a constant position gives way to others, as a tensor of no dimension does in torch. Integers are i64 unless made from i32 and narrower values alone, then i32.
    """
    match kind(expr, dtypes):
        case "bool":
            return "bool"
        case "int":
            if isinstance(expr, Call) and expr.fn in ROUNDINGS:
                return expr.fn
            made_from = _contributions(expr, dtypes, "int")
            return "i32" if made_from and made_from <= {"i32", *STORED} else "i64"
        case _ if isinstance(expr, Call) and expr.fn in CASTS:
            return expr.fn
        case _:
            wide = _contributions(expr, dtypes, "real", elements=False)
            return _promoted(wide or _contributions(expr, dtypes, "real"))


def _promoted(dtypes: frozenset[str]) -> str:
    if "f64" in dtypes:
        return "f64"
    wider = dtypes - FLOAT8.keys()
    return next(iter(wider)) if len(wider) == 1 else "f32"


def _contributions(
    root: Expr, dtypes: Mapping[str, str], wanted: Kind, *, elements: bool = True
) -> frozenset[str]:
    """dtypes of the values of a kind that `root` is made from: not of indices, nor of conditions, nor, where that is said, of `elements` at
    constant positions."""
    all_kinds = kinds([root], dtypes)
    found: dict[Expr, frozenset[str]] = {}
    for node in walk(root):
        match node:
            case Call(fn, _) if fn in CASTS:
                own = frozenset({fn})
            case Call(fn, _) if fn in ROUNDINGS:
                own = frozenset({fn} if wanted == "int" else ())
            case Call(fn, _) if fn in COMPARISONS or fn in LOGICAL:
                own = frozenset()
            case Call(fn, _) if (fold := fold_of(fn)) is not None:
                own = frozenset[str]().union(*(found[side[fold[1]]] for side in sides(node)))
            case Call(fn, args):
                own = frozenset[str]().union(*(found[arg] for arg in args))
            case Reduce(op, _, _) if (fold := fold_of(op)) is not None:
                selected = fold[0].selects(fold[1])
                parts = contributions(node)
                own = frozenset[str]().union(*(found[p] for p in ([parts[fold[1]]] if selected else parts)))
                own |= {"i64"} if wanted == "int" and not selected else frozenset()
            case Reduce(op, _, body):
                # Counting and adding up are exact: torch widens them to i64.
                own = found[body] | ({"i64"} if op in ("sum", "prod") and wanted == "int" else frozenset())
            case Scan(of, _, _, body, _):
                own = frozenset[str]().union(*(found[part] for part in unpacked(body, len(of.state))))
                own |= {"i64"} if wanted == "int" and {"sum", "prod"} & {*of.ops} else frozenset()
            case Load(_, index) if index and not elements and not free_axes(node):
                own = frozenset()
            case Load(name, _) | Local(name, _) if all_kinds[node] == wanted:
                own = frozenset({dtypes.get(name, "f32")})
            case Axis() | Size() | Scalar() if wanted == "int":
                own = frozenset({"i64"})
            case _:
                own = frozenset()
        found[node] = own
    return found[root]


def check_dtypes(program: Program, dtypes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The dtypes of all inputs, after checking that every expression makes sense with them.

    Raises TypeCheckError for a real index, a condition that is no truth value, arithmetic on truth
    values (they count as 0 and 1 in `sum` and in the branches of `where` only), and a declared dtype
    that the tensor given, or the value defined, does not have.
    """
    known = program_dtypes(program, dtypes)
    check_indices(program, known)
    roots = _roots(program)
    all_kinds = kinds(roots, known)
    for node in walk(*roots):
        _check(program, node, all_kinds)
    for output in program.outputs:
        expected = KINDS.get(output.dtype or "", "real")
        if output.dtype is not None and all_kinds[output.expr] != expected:
            message = f"{output.name!r} is declared {output.dtype}, its value is {_describe(all_kinds[output.expr])}"
            raise _error(program, message, output.name, "change the declaration")
    return known


def check_integers(program: Program) -> None:
    """Raises TypeCheckError where declarations alone tell that a function of integers is given something else."""
    known = {tensor.name: tensor.dtype for tensor in program.tensors if tensor.dtype is not None}
    known |= dict.fromkeys((*program.integers, *program.integer_tensors), "i64")
    nodes = list(walk(*_roots(program)))
    if not any(isinstance(node, Call) and node.fn in OF_INTEGERS for node in nodes):
        return
    all_kinds = kinds(_roots(program), known)
    for node in nodes:
        if isinstance(node, Call) and node.fn in OF_INTEGERS:
            told = [part for part in node.args if all_kinds[part] != "real" or _inputs(part) <= known.keys()]
            _check_integers(program, node.fn, told, all_kinds)


def _inputs(expr: Expr) -> set[str]:
    loads = {node.tensor for node in walk(expr) if isinstance(node, Load)}
    return loads | {node.name for node in walk(expr) if isinstance(node, Scalar)}


def check_indices(program: Program, dtypes: Mapping[str, str]) -> None:
    """Raises TypeCheckError for an index that is no integer."""
    roots = _roots(program)
    all_kinds = kinds(roots, dtypes)
    loads = [node for node in walk(*roots) if isinstance(node, Load)]
    for node in loads:
        for part in node.index:
            if all_kinds[part] != "int":
                message = f"an index of {node.tensor!r} is {_describe(all_kinds[part])}: {show(part)}"
                raise _error(program, message, node, "an index is made of integers")


def _check(program: Program, node: Expr, all_kinds: Mapping[Expr, Kind]) -> None:
    match node:
        case Call("where", (condition, _, _)) if all_kinds[condition] != "bool":
            hint = f"compare it: where({show(condition)} != 0, ...)"
            raise _error(program, f"a condition is {_describe(all_kinds[condition])}", condition, hint)
        case Call(fn, args) if fn in LOGICAL:
            for part in args:
                if all_kinds[part] != "bool":
                    message = f"{fn!r} takes truth values, this is {_describe(all_kinds[part])}"
                    hint = TIGHT if isinstance(part, Const) else f"compare it: ({show(part)} != 0)"
                    raise _error(program, message, part, hint)
        case Call(fn, args) if fn in OF_INTEGERS:
            _check_integers(program, fn, args, all_kinds)
        case Call("eq" | "ne", (left, right)) if all_kinds[left] == all_kinds[right]:
            pass
        case Call(fn, args) if fn != "where" and fn not in CASTS and fn not in ROUNDINGS:
            _check_numbers(program, args, all_kinds)
        case Reduce("max" | "min" | "prod" as op, axis, body) if all_kinds[body] == "bool":
            instead = "any" if op == "max" else "all"
            hint = f"write {instead}[{axis}](...)"
            raise _error(program, f"{op!r} takes numbers, this is a truth value", node, hint)


def _check_numbers(program: Program, args: Iterable[Expr], all_kinds: Mapping[Expr, Kind]) -> None:
    for part in args:
        if all_kinds[part] == "bool":
            hint = f"write where({show(part)}, 1, 0)"
            raise _error(program, "a truth value stands where a number is expected", part, hint)


def _check_integers(program: Program, fn: str, args: Sequence[Expr], all_kinds: Mapping[Expr, Kind]) -> None:
    written = OPERATORS.get(fn, fn)
    for part in args:
        if all_kinds[part] != "int":
            hint = "its arguments are a seed and a position: rand(seed, i*N(j) + j)"
            if fn not in DRAWN:
                hint = "round it first: i8(...), u8(...) or i16(...)"
            if fn in BITWISE.values():
                hint += f". {TIGHT}"
            message = f"{written!r} takes integers, this is {_describe(all_kinds[part])}"
            raise _error(program, message, part, hint)


def _describe(found: Kind) -> str:
    return {"int": "an integer", "bool": "a truth value", "real": "a real number"}[found]


def _error(program: Program, message: str, place: Expr | str, hint: str) -> EqfuseError:
    """An error that points at a name, or at an expression where its text (or a tensor of it) is in the source."""
    texts = [place] if isinstance(place, str) else [show(place), *_names(place)]
    spans = (locate(program.source, text) for text in texts)
    span = next((span for span in spans if span is not None), None)
    return TypeCheckError(message, source=program.source, span=span, hint=hint)


def _names(place: Expr) -> list[str]:
    return [node.tensor for node in walk(place) if isinstance(node, Load)]
