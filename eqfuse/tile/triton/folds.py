"""Registered folds in Triton: a `@triton.jit` function that combines two states, and the call that folds with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqfuse.terms.functions import CASTS, COMPARISONS, LOGICAL
from eqfuse.terms.nodes import Call, Const, Expr, Fold, Local, walk
from eqfuse.terms.types import kinds
from eqfuse.tile.dtypes import INTEGERS, identity, widest_integer
from eqfuse.tile.triton.functions import Text, call, convert, elementwise, exact, number


def combine_name(fold: Fold, dtypes: Sequence[str]) -> str:
    """The name of the function that combines states of these dtypes."""
    return "_".join(("combine", fold.name, *dtypes))


def combine_source(fold: Fold, dtypes: Sequence[str], use: Callable[[str], str]) -> str:
    """That function; `use` registers the helpers that it calls."""
    sides = {
        f"{name}{side}": dtype for side in (1, 2) for name, dtype in zip(fold.state, dtypes, strict=True)
    }
    known = kinds(fold.combine, sides)
    real = "f64" if "f64" in dtypes else "f32"
    integer = widest_integer([dtype for dtype in dtypes if dtype in INTEGERS])
    texts: dict[Expr, Text] = {}
    lines: list[str] = []
    names = fold.temporaries

    def converted(expr: Expr, wanted: str) -> Text:
        """An operand in the kind that is computed with; plain numbers are of any."""
        if isinstance(expr, Const):
            return number(float(expr.value) if wanted == "real" else expr.value)
        if wanted == "real" and known[expr] != "real":
            return convert(texts[expr], real, scalar=True, use=use)
        return texts[expr]

    def applied(fn: str, args: tuple[Expr, ...]) -> Text:
        values = args[1:] if fn == "where" else args
        reals = any(known[arg] == "real" for arg in values)
        if fn not in LOGICAL and fn not in COMPARISONS and fn != "where":
            reals |= known[Call(fn, args)] == "real"
        kind = "bool" if fn in LOGICAL else "real" if reals else "int"
        operands = [converted(arg, kind) for arg in values]
        if fn == "where":
            branches = [exact(operand, real) for operand in operands] if kind == "real" else operands
            return call("tl.where", converted(args[0], "bool"), *branches)
        if fn in CASTS:
            return convert(convert(operands[0], fn, scalar=True, use=use), real, scalar=True, use=use)
        divisor = args[-1]
        return elementwise(
            fn,
            operands,
            real if kind == "real" else integer,
            division="positive" if isinstance(divisor, Const) and divisor.value > 0 else "any",
            use=use,
        )

    for node in walk(*fold.combine):
        match node:
            case Local(name, _):
                texts[node] = Text(name)
            case Call(fn, args):
                text = applied(fn, args)
                texts[node] = Text(next(names))
                lines.append(f"    {texts[node].code} = {text.code}")
    results = [
        convert(converted(expr, "int" if dtype in INTEGERS else "real"), dtype, scalar=True, use=use).code
        for expr, dtype in zip(fold.combine, dtypes, strict=True)
    ]
    arguments = ", ".join(f"{name}{side}" for side in (1, 2) for name in fold.state)
    head = f"def {combine_name(fold, dtypes)}({arguments}):"
    returned = ", ".join(results)
    return "\n".join([head, *lines, f"    return {returned}"])


def ranks_name(fold: Fold, dtypes: Sequence[str], rank: int, place: int) -> str:
    """The name of the function that lists what comes first of states along one of their dims."""
    return "_".join(("ranks", fold.name, *dtypes, str(rank), str(place)))


def ranks_source(fold: Fold, dtypes: Sequence[str], rank: int, place: int) -> str:
    """That function: one rank after the other takes what comes first, by its position, from what is left."""
    lists = [f"{name}_list" for name in fold.state]
    first = [f"{name}_first" for name in fold.state]
    nothing = [number(identity(op, dtype)).code for op, dtype in zip(fold.ops, dtypes, strict=True)]
    lanes = ", ".join(":" if dim == place else "None" for dim in range(rank))
    spread = ", ".join("None" if dim == place else ":" for dim in range(rank))
    names = ", ".join(fold.state)
    lines = [
        f"def {ranks_name(fold, dtypes, rank, place)}({names}, count, ranks: tl.constexpr):",
        f"    lane = tl.arange(0, ranks){f'[{lanes}]' if rank > 1 else ''}",
    ]
    for name, own, none in zip(lists, fold.state, nothing, strict=True):
        line = f"tl.max({own}, {place}, keep_dims=True)"  # it has the other dims, and the dtype
        lines.append(f"    {name} = tl.where(lane < 0, {line}, {none})")
    lines.append("    for rank in range(count):")
    lines.append(f"        {', '.join(first)} = tl.reduce(({names}), {place}, {combine_name(fold, dtypes)})")
    if rank > 1:
        lines += [f"        {name} = {name}[{spread}]" for name in first]
    for name, own in zip(lists, first, strict=True):
        lines.append(f"        {name} = tl.where(lane == rank, {own}, {name})")
    lines.append(f"        taken = {fold.ranks} == {fold.ranks}_first")
    for name, none in zip(fold.state, nothing, strict=True):
        lines.append(f"        {name} = tl.where(taken, {none}, {name})")
    lines.append(f"    return {', '.join(lists)}")
    return "\n".join(lines)


def exchange_name(fold: Fold, dtypes: Sequence[str]) -> str:
    """The name of the function that puts states in order that are some way apart."""
    return "_".join(("exchange", fold.name, *dtypes))


def exchange_source(fold: Fold, dtypes: Sequence[str]) -> str:
    """That function: of each two states, `apart` along the middle one of three dims, the one that comes first is put
    first."""
    names = ", ".join(fold.state)
    left, right, first, last = (
        [f"{name}_{end}" for name in fold.state] for end in ("a", "b", "first", "last")
    )
    sizes = "before: tl.constexpr, ranks: tl.constexpr, after: tl.constexpr, apart: tl.constexpr"
    lines = [f"def {exchange_name(fold, dtypes)}({names}, {sizes}):"]
    for name, one, other in zip(fold.state, left, right, strict=True):
        pairs = f"tl.reshape({name}, (before, ranks // (2 * apart), 2, apart * after))"
        lines.append(f"    {one}, {other} = tl.split(tl.permute({pairs}, (0, 1, 3, 2)))")
    both = ", ".join((*left, *right))
    lines.append(f"    {', '.join(first)} = {combine_name(fold, dtypes)}({both})")
    lines.append(f"    kept = {fold.ranks}_first == {fold.ranks}_a")
    for one, other, gone in zip(left, right, last, strict=True):
        lines.append(f"    {gone} = tl.where(kept, {other}, {one})")
    for name, one, other in zip(fold.state, first, last, strict=True):
        pairs = f"tl.permute(tl.join({one}, {other}), (0, 1, 3, 2))"
        lines.append(f"    {name} = tl.reshape({pairs}, (before, ranks, after))")
    lines.append(f"    return {names}")
    return "\n".join(lines)


SWAP = "swap"
SWAP_SOURCE = """def swap(x, before: tl.constexpr, ranks: tl.constexpr, after: tl.constexpr, apart: tl.constexpr):
    pairs = tl.reshape(x, (before, ranks // (2 * apart), 2, apart * after))
    first, last = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(last, first), (0, 1, 3, 2)), (before, ranks, after))"""
"""Elements that are so far apart along the middle one of three dims change places. (`tl.flip` fails in Triton's
interpreter for tiles.)"""


def merge_name(fold: Fold, dtypes: Sequence[str], rank: int, place: int) -> str:
    """The name of the function that merges two lists along one of their dims."""
    return "_".join(("merge", fold.name, *dtypes, str(rank), str(place)))


def merge_source(fold: Fold, dtypes: Sequence[str], rank: int, place: int, most: int) -> str:
    """That function, for lists of up to `most` ranks: the second list backwards, of each two states the one that comes
    first, and Batcher's network puts them in order."""
    left, right = ([f"{name}{side}" for name in fold.state] for side in (1, 2))
    names = ", ".join(fold.state)
    dims = [f"n{dim}" for dim in range(rank)]
    sizes = ", ".join(f"{name}: tl.constexpr" for name in dims)
    before, after = (" * ".join(part) or "1" for part in (dims[:place], dims[place + 1 :]))
    lines = [f"def {merge_name(fold, dtypes, rank, place)}({', '.join((*left, *right))}, {sizes}):"]
    flat = f"({before}, n{place}, {after})"
    lines += [f"    {name} = tl.reshape({name}, {flat})" for name in (*left, *right)]
    steps = [1 << step for step in reversed(range((most - 1).bit_length()))]
    for apart in steps:
        lines.append(f"    if n{place} > {apart}:")
        given = f"{before}, n{place}, {after}, {apart}"
        lines += [f"        {name} = {SWAP}({name}, {given})" for name in right]
    lines.append(f"    {names} = {combine_name(fold, dtypes)}({', '.join((*left, *right))})")
    for apart in steps:
        lines.append(f"    if n{place} > {apart}:")
        given = f"{before}, n{place}, {after}, {apart}"
        lines.append(f"        {names} = {exchange_name(fold, dtypes)}({names}, {given})")
    shape = f"({', '.join(dims)}{',' if rank == 1 else ''})"
    lines.append("    return " + ", ".join(f"tl.reshape({name}, {shape})" for name in fold.state))
    return "\n".join(lines)
