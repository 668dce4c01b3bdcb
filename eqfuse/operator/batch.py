"""The rule of `eqfuse::call` for `torch.vmap`: the program with one more axis, in front of all that depends on the batch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.operator.content import kernel_of, names_in, operator_of
from eqfuse.operator.derivative import untraced
from eqfuse.terms.nodes import Program, post_order
from eqfuse.terms.parser import parse
from eqfuse.terms.syntax import Declaration, Definition, Source, statements

BATCH = "batch"


@lru_cache(maxsize=1024)
def batched(
    source: str, names: tuple[str, ...], scalars: tuple[tuple[str, float], ...] = ()
) -> tuple[str, tuple[bool, ...]]:
    """The text of a program in which some inputs have one more axis, the first, and which of its outputs have it too.
    `scalars` are those that are known."""
    read = Source.of(source)
    found = statements(read)
    axis = _fresh(read)
    reads = {each.name: sorted(_names(each.value)) for each in found if isinstance(each, Definition)}

    def below(name: str) -> list[str]:
        return reads.get(name, [])

    grown = set(names)
    for name in reads:
        made_of: set[str] = set(post_order([name], below))
        grown |= set() if grown.isdisjoint(made_of) else {name}
    lines = [_line(node, axis, grown) for node in read.module().body]
    declared = {statement.name for statement in found if isinstance(statement, Declaration)}
    program = parse(source, scalars=dict(scalars))
    integers = [name for name in program.integers if name in grown and name not in declared]
    text = "\n".join([*(f"{name}: i64[{axis}]" for name in integers), *lines])
    return text, tuple(output.name in grown for output in program.returned)


def _fresh(source: Source) -> str:
    taken = {node.id for node in ast.walk(source.module()) if isinstance(node, ast.Name)}
    return Names(taken, between="").fresh(BATCH)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _line(node: ast.stmt, axis: str, grown: Collection[str]) -> str:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=dtype)) if name in grown:
            return f"{name}: {dtype}[{axis}]"
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if name in grown:
            return f"{name}: {ast.unparse(_Grow(axis, ()).indexed(annotation))}"
        case ast.AnnAssign(target=target, annotation=annotation):
            return f"{ast.unparse(target)}: {ast.unparse(_Grow(axis, grown).visit(annotation))}"
        case ast.Return():
            return ast.unparse(node)
        case _:
            return ast.unparse(_Grow(axis, grown).visit(node))


class _Grow(ast.NodeTransformer):
    """Puts an axis in front of the indices of names, and of their dimensions."""

    def __init__(self, axis: str, names: Collection[str]) -> None:
        self.axis, self.names = axis, names

    def indexed(self, node: ast.AST) -> ast.AST:
        """A name with the axis alone, or what has indices with it in front of them."""
        axis = ast.Name(self.axis, ast.Load())
        if not isinstance(node, ast.Subscript):
            return ast.Subscript(node, axis, ast.Load())  # type: ignore[arg-type]
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return ast.Subscript(node.value, ast.Tuple([axis, *parts], ast.Load()), node.ctx)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.names:
            return self.indexed(ast.Subscript(node.value, self.visit(node.slice), node.ctx))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(ast.Name("N"), [ast.Name(name) as of, ast.Constant(int(k))]) if name in self.names:
                return ast.Call(node.func, [of, ast.Constant(k + 1)], [])
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.indexed(node) if node.id in self.names else node


def rule(
    info: Any,
    dims: tuple[Any, ...],
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any] = (),
    reals: Sequence[Any] = (),
) -> tuple[list[torch.Tensor], list[int | None]]:
    """The outputs for a whole batch, and which of their dimensions it is."""
    of_tensors = names_in(names)[0]
    grown = tuple(n for n, dim in zip(of_tensors, dims[2], strict=True) if dim is not None)
    with untraced():
        kernel = kernel_of(content)
        constant = [name for name in grown if name not in _inputs(kernel.program)]
        if constant:
            raise EqfuseError(f"the program has no input {constant[0]!r}", hint="remove the argument")
        source, has = batched(kernel.program.source, grown, tuple(sorted(kernel.scalars.items())))
        wider = kernel.alike(source)
        kernel_of(wider.content)
    moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims[2], strict=True)]
    made = operator_of(wider.content)(wider.content, names, moved, integers, reals)
    return list(made), [0 if is_grown else None for is_grown in has]


def of_older_vmap(
    content: str,
    names: str,
    tensors: Sequence[torch.Tensor],
    integers: Sequence[Any] = (),
    reals: Sequence[Any] = (),
) -> list[torch.Tensor]:
    """The same for the vmap that `torch.autograd.functional` has with `vectorize=True`, and `gradcheck` for batched gradients."""
    with _level_of_older_vmap() as level:
        # Tensors of no batch get a dimension of one position; a batch of one is computed as none, which torch takes for all of it.
        first = [torch._remove_batch_dim(tensor, level, 1, 0) for tensor in tensors]
        dims = tuple(0 if len(each) != 1 else None for each in first)
        plain = [each if dim == 0 else each.squeeze(0) for each, dim in zip(first, dims, strict=True)]
        made, has = rule(None, (None, None, dims), content, names, plain, integers, reals)
        results = zip(made, has, strict=True)
        return [each if dim is None else torch._add_batch_dim(each, 0, level) for each, dim in results]


@contextmanager
def _level_of_older_vmap() -> Iterator[int]:
    """The level of the innermost one, which is left inside: what is called there is batched by those around it."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        yield level
    finally:
        torch._C._vmapmode_increment_nesting()


def _inputs(program: Program) -> set[str]:
    return {*(tensor.name for tensor in program.tensors), *program.scalars}
