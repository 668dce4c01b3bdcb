"""Registered folds in Triton: a `@triton.jit` function that combines two states, and the call that folds with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqfuse.terms.folds import Fold
from eqfuse.terms.nodes import CASTS, COMPARISONS, LOGICAL, Call, Const, Expr, Local, walk
from eqfuse.terms.types import kinds
from eqfuse.tile.dtypes import INTEGERS, widest_integer
from eqfuse.tile.triton_functions import Text, call, convert, elementwise, exact, number


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
            non_negative=False,
            positive=isinstance(divisor, Const) and divisor.value > 0,
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
