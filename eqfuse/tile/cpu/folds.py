"""Registered folds in generated CPU code: a function that combines two states, and the calls that fold with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eqfuse.terms.dtypes import FLOAT8, LIMITS
from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import CASTS, COMPARISONS, LOGICAL, ROUNDINGS
from eqfuse.terms.nodes import Call, Const, Expr, Fold, Local, walk
from eqfuse.terms.types import kinds
from eqfuse.tile.cpu.elementwise import INTEGER_TILES, REAL
from eqfuse.tile.cpu.values import TORCH, Item
from eqfuse.tile.cpu.writer import Writer
from eqfuse.tile.dtypes import INTEGERS, identity
from eqfuse.tile.lower.types import POSITIONS
from eqfuse.tile.nodes import FoldTile, MergeTile, RankTile, Value


def folded(w: Writer, value: Value, op: FoldTile) -> Item:
    """One state variable of a fold over one dim of its tiles; what its siblings read is computed once."""
    found = fold_of(op.op)
    assert found is not None  # checked
    fold, place = found
    dtypes = tuple(source.dtype for source in op.values)
    items = [w.plain(w.read(source)) for source in op.values]
    texts = [w.expanded(item, {op.axis}) for item in items]
    key = (fold.name, *(source.name for source in op.values), op.axis)
    if key not in w.folds:
        numbers = [repr(identity(o, dtype)) for o, dtype in zip(fold.ops, dtypes, strict=True)]
        parts, fills = (f"({', '.join(each)},)" for each in (texts, numbers))
        dim = items[0].dims.index(op.axis)
        if fold.order:
            parts = f"({', '.join(map(_narrow, texts, items, dtypes))},)"
            keys = tuple((fold.state.index(name), greatest) for name, greatest in fold.order)
            call = f"fold_first({parts}, {keys!r}, {fills}, {dim})"
        else:
            combine = w.function(f"combine_{fold.name}", combine_source(fold, dtypes))
            call = f"fold_pairwise({combine}, {parts}, {fills}, {dim}, ordered={not fold.commutative})"
        w.folds[key] = w.let(f"{fold.name}_state", call)
    text = f"{w.folds[key]}[{place}]"
    if not value.dims and value.dtype in INTEGERS:
        return w.scalar(value, f"int({text})", data=True)
    full = frozenset[str]().union(*(item.full for item in items)) - {op.axis}
    return Item(w.let(value.name, text), value.dims, value.dtype, full)


def ranked(w: Writer, value: Value, op: RankTile) -> Item:
    """One state variable of the list of what comes first along one dim of its tiles."""
    return _list(w, value, op.op, (op.values,), op.axis, op.ranks)


def merged(w: Writer, value: Value, op: MergeTile) -> Item:
    """One state variable of two lists, merged."""
    return _list(w, value, op.op, (op.left, op.right), op.ranks, op.ranks)


def _list(
    w: Writer, value: Value, op: str, groups: Sequence[tuple[Value, ...]], axis: str, ranks: str
) -> Item:
    """One state variable of a list; what its siblings read is computed once."""
    found = fold_of(op)
    assert found is not None  # checked
    fold, place = found
    items = [[w.plain(w.read(source)) for source in group] for group in groups]
    key = (fold.name, *(source.name for group in groups for source in group), axis, ranks)
    if key not in w.folds:
        parts = ", ".join(f"({', '.join(w.expanded(item, {axis}) for item in group)},)" for group in items)
        dtypes = [source.dtype for source in groups[0]]
        fills = ", ".join(repr(identity(o, dtype)) for o, dtype in zip(fold.ops, dtypes, strict=True))
        keys = tuple((fold.state.index(name), greatest) for name, greatest in fold.order)
        keys = keys[: 1 + [name for name, _ in keys].index(fold.state.index(fold.ranks))]
        dim = items[0][0].dims.index(axis)
        w.folds[key] = w.let(
            f"{fold.name}_state", f"first_ranks(({parts},), {keys!r}, ({fills},), {dim}, {w.size(ranks)})"
        )
    full = frozenset[str]().union(*(item.full for group in items for item in group)) - {axis}
    return Item(w.let(value.name, f"{w.folds[key]}[{place}]"), value.dims, value.dtype, full | {ranks})


def _narrow(text: str, item: Item, dtype: str) -> str:
    """An operand as i32 where it is known to fit: positions are i64 in torch, whose extremes take ten times as long. What is made
    of positions is known to fit for axes of up to `POSITIONS`."""
    return f"narrowed({text}, sizes, {POSITIONS})" if dtype == "i32" and item.dims else text


def combine_source(fold: Fold, dtypes: Sequence[str]) -> str:
    """The body of a function of both states, as tensors of these dtypes, that gives the state of their union."""
    real = "f64" if "f64" in dtypes else "f32"
    sides = {
        f"{name}{side}": dtype for side in (1, 2) for name, dtype in zip(fold.state, dtypes, strict=True)
    }
    known = kinds(fold.combine, sides)
    texts: dict[Expr, str] = {}
    lines = []
    names = fold.temporaries

    def converted(expr: Expr, wanted: str) -> str:
        if isinstance(expr, Const):
            dtype = TORCH[real] if wanted == "real" else "torch.bool" if wanted == "bool" else "torch.int64"
            number = float(expr.value) if wanted == "real" else expr.value
            return f"torch.tensor({number!r}, dtype={dtype})"
        return f"{texts[expr]}.to({TORCH[real]})" if known[expr] != wanted == "real" else texts[expr]

    for node in walk(*fold.combine):
        match node:
            case Local(name, _):
                texts[node] = name
            case Call(fn, args):
                texts[node] = next(names)
                lines.append(f"    {texts[node]} = {_applied(fn, args, known, converted, real)}")
    results = [
        converted(e, "real" if d == real else "int") for e, d in zip(fold.combine, dtypes, strict=True)
    ]
    arguments = ", ".join(f"{name}{side}" for side in (1, 2) for name in fold.state)
    return "\n".join([f"({arguments}):", *lines, f"    return ({', '.join(results)},)"])


def _applied(fn: str, args: tuple[Expr, ...], known: Mapping[Expr, str], converted: object, real: str) -> str:
    assert callable(converted)
    if fn == "where":
        branch = "real" if any(known[arg] == "real" for arg in args[1:]) else known[args[1]]
        return f"torch.where({', '.join([converted(args[0], 'bool'), *(converted(a, branch) for a in args[1:])])})"
    kind = "bool" if fn in LOGICAL else "real" if any(known[arg] == "real" for arg in args) else "int"
    if kind == "int" and fn not in INTEGER_TILES:
        kind = "real"
    texts = [converted(arg, kind) for arg in args]
    if fn in ROUNDINGS:
        low, high = LIMITS[fn]
        return f"to_whole({texts[0]}, {low}, {high})"
    if kind != "real" or fn in COMPARISONS:
        return INTEGER_TILES[fn].format(*texts)
    if fn in CASTS:
        narrow = f"{texts[0]}.to({TORCH[fn]})"
        if fn in FLOAT8:
            narrow = f"to_float8({texts[0]}, {TORCH[fn]}, {FLOAT8[fn]!r})"
        return f"{narrow}.to({TORCH[real]})"
    match fn:
        case "sq":
            return f"{texts[0]} * {texts[0]}"
        case "relu":
            return f"torch.clamp_min({texts[0]}, 0.0)"
        case _:
            return f"{REAL[fn]}({', '.join(texts)})"
