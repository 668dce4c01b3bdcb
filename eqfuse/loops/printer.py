"""Loop nests as text: what a person would have written in the margin of a paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eqfuse.listed import text_of
from eqfuse.loops.nodes import Carried, Kernel, Let, Loop, Nest, Stmt, Store
from eqfuse.loops.slots import expanded
from eqfuse.terms import printer
from eqfuse.terms.integers import in_short
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Scalar, transform

INDENT = "    "


@text_of.register
def show(nest: Nest) -> str:
    """The nest in Python-like code, temporaries and renamed axes first; ends without a newline."""
    head = [
        f"{buffer.name}: {buffer.dtype or 'promoted'}[{', '.join(buffer.axes)}]"
        for buffer in nest.buffers
        if not buffer.is_output
    ]
    head += [f"N({axis}) = N({of})" for axis, of in nest.domains]
    head += [f"N({shard}) = number of shards of {axis}" for shard, axis in nest.shards]
    ascending = dict.fromkeys(each for kernel in nest.kernels for each in kernel.ascending)
    head += [f"{tensor} ascends along dimension {place}" for tensor, place in ascending]
    parts = [head, *(list(_kernel(kernel)) for kernel in nest.kernels)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _kernel(kernel: Kernel) -> Iterator[str]:
    yield f"kernel {kernel.name}:"
    body = _body(expanded(kernel).body)
    if kernel.parallel:
        yield f"{INDENT}parallel for {', '.join(kernel.parallel)}:"
        body = _indented(body)
    yield from _indented(body)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)


def _body(body: Iterable[Stmt]) -> Iterator[str]:
    for stmt in body:
        match stmt:
            case Let(name, dims, expr):
                yield f"{_indexed(name, dims)} = {_expr(expr)}"
            case Store(tensor, index, _, expr):
                yield f"{_element(tensor, index)} = {_expr(expr)}"
            case Loop():
                yield from _loop(stmt)


def _loop(loop: Loop) -> Iterator[str]:
    yield from (f"{_indexed(value.name, value.dims)} = {_expr(value.init)}" for value in loop.carried)
    start, stop = _expr(loop.start), _expr(loop.stop)
    if not isinstance(loop.start, Const):
        first, last = f"{loop.axis}_start", f"{loop.axis}_stop"
        yield f"{first} = {start}"
        yield f"{last} = {_expr(_abbreviated(loop.stop, loop.start, first))}"
        start, stop = first, last
    yield f"for {loop.axis} in {'range' if loop.unit else 'tiles'}({start}, {stop}):"
    yield from _indented(_body(loop.body))
    if loop.carried:
        yield INDENT + _step(loop.carried)


def _abbreviated(expr: Expr, part: Expr, name: str) -> Expr:
    return transform(expr, lambda node: Scalar(name) if node is part else node)


def _step(carried: tuple[Carried, ...]) -> str:
    return f"{', '.join(value.name for value in carried)} = {', '.join(value.next for value in carried)}"


def _indexed(name: str, dims: tuple[str, ...]) -> str:
    return f"{name}[{', '.join(dims)}]" if dims else name


def _element(tensor: str, index: tuple[Expr, ...]) -> str:
    return _indexed(tensor, tuple(map(_expr, index)))


def _expr(expr: Expr) -> str:
    """The expression, its values written with their dims."""

    def with_dims(node: Expr) -> Expr:
        match node:
            case Local(name, dims) if dims:
                return Load(name, tuple(map(Axis, dims)))
            case Const(float(value)):
                return Const(in_short(value))
            case _:
                return node

    return printer.show(transform(expr, with_dims))
