"""Steps of what is moved by whole numbers, in one form: `floor(x + 3)` is `floor(x) + 3`.

Steps are hashes in the field, of which nothing but their order is known. What holds of them for all real numbers is written in the
same way in both of two programs, before they are compared.
"""

from __future__ import annotations

from dataclasses import replace

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.functions import ROUNDINGS
from eqfuse.terms.nodes import Call, Const, Expr, Program, call, once, transform


@once
def stepwise(program: Program) -> Program:
    """The program with its steps in that form; itself where it has none that changes."""
    memo: dict[Expr, Expr] = {}
    outputs = tuple(replace(each, expr=transform(each.expr, _moved, memo)) for each in program.outputs)
    changed = any(one.expr is not other.expr for one, other in zip(outputs, program.outputs, strict=True))
    return replace(program, outputs=outputs) if changed else program


def _moved(node: Expr) -> Expr:
    """A step without what moves its argument by whole steps, or what it does itself."""
    match node:
        case Call("floor", (inner,)):
            part, by = _apart(inner, 1)
            return call("add", call("floor", part), Const(by)) if by else node
        case Call("floordiv", (inner, Const(int(size)) as steps)) if size > 0:
            part, by = _apart(inner, size)
            return call("add", call("floordiv", part, steps), Const(by)) if by else node
        case Call("mod", (inner, Const(int(size)) as steps)) if size > 0:
            part, by = _apart(inner, size)
            return call("mod", part, steps) if by else node
        case Call(fn, (inner,)) if fn in ROUNDINGS:
            part = _rounded_by(fn, inner)
            return node if part is inner else call(fn, part)
    return node


def _apart(node: Expr, size: int) -> tuple[Expr, int]:
    """What a multiple of a size is added to, and how many times the size."""
    match node:
        case Call("add", (part, Const(int(number)))) | Call("add", (Const(int(number)), part)):
            sign = 1
        case Call("sub", (part, Const(int(number)))):
            sign = -1
        case _:
            return node, 0
    if isinstance(number, bool) or number % size:
        return node, 0
    inner, by = _apart(part, size)
    return inner, by + sign * number // size


def _rounded_by(dtype: str, node: Expr) -> Expr:
    """What is rounded to an integer dtype, without limits that are no narrower than the dtype's, and without being rounded before."""
    low, high = LIMITS[dtype]
    match node:
        case Call("round", (part,)):
            return _rounded_by(dtype, part)
        case Call("minimum", (part, Const(limit))) | Call("minimum", (Const(limit), part)) if limit >= high:
            return _rounded_by(dtype, part)
        case Call("maximum", (part, Const(limit))) | Call("maximum", (Const(limit), part)) if limit <= low:
            return _rounded_by(dtype, part)
    return node
