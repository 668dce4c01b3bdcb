"""From source text to `Program`: what the names are, every definition read, temporaries inlined."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from eqfuse.errors import BindError, ParseError, TypeCheckError, did_you_mean, locate
from eqfuse.terms.bounds import reads_beyond
from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.expressions import Bindings, Number, ProgramNames, Reader
from eqfuse.terms.extents import count_of, is_count, sizes_in
from eqfuse.terms.functions import CASTS, CONSTANTS, ROUNDINGS
from eqfuse.terms.inline import Inliner
from eqfuse.terms.integers import fits
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    InOrder,
    Load,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    Tensor,
    call,
    children,
    free_axes,
    post_order,
    replaced,
    walk,
)
from eqfuse.terms.positions import index_uses, integer_uses
from eqfuse.terms.promises import ascends
from eqfuse.terms.syntax import (
    MAX_DEPTH,
    TOO_DEEP,
    TOO_DEEP_HINT,
    Alias,
    Declaration,
    Definition,
    Extent,
    Length,
    Promise,
    Return,
    Source,
    Statement,
    selections,
    statements,
)
from eqfuse.terms.types import check_integers
from eqfuse.threads import deep

MAX_AXES = 16
"""Axes of a value: verification holds all of its positions, for two of each axis or more."""
SIZES = "sizes"
"""The keyword of a call that no input can have."""


@deep()
def parse(
    source: str,
    *,
    scalars: Mapping[str, Number] | None = None,
    strict_casts: bool = False,
    made: bool = False,
) -> Program:
    """The program of a source text.

    Names in `scalars` become constants; other free names are run-time scalars. What a text that is `made` does not
    declare is an integer in an index alone.
    Raises ParseError (not a program), TypeCheckError (ranks that do not agree), BindError (a name in
    `scalars` that the program does not have) and BudgetError (too large once inlined).
    """
    if not isinstance(source, str):
        raise ParseError(
            f"the source is {type(source).__name__}, not text", hint="pass the program as a string"
        )
    text = Source.of(source)
    try:
        return _program(text, scalars or {}, strict_casts, made)
    except RecursionError:
        raise text.error(TOO_DEEP, None, TOO_DEEP_HINT) from None


@dataclass(frozen=True)
class Texts:
    """A source text that was read: its names, the extents that axes share, and the definitions as `reader` has them."""

    source: Source
    statements: Sequence[Statement]
    names: ProgramNames
    domains: dict[str, str]
    reader: Reader
    computed: Mapping[str, Expr]
    dimensions: Mapping[str, tuple[str, int]]
    at_most: tuple[tuple[Expr, Expr], ...] = ()

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs, in program order."""
        return _output_names(self.source, self.statements, self.names, self.reader.read_names)


def texts(
    source: Source, scalars: Mapping[str, Number] | None = None, reader_of: type[Reader] = Reader
) -> Texts:
    """Every definition of a text, read by a `Reader`: the usual one writes temporaries out. Raises what `parse` does."""
    constants = _constants(scalars or {})
    written = statements(source)
    found = [_counted(statement, constants) for statement in written]
    lengths = _lengths(source, found)
    names = _names(source, found, constants, lengths)
    domains = _aliases(source, found)
    inliner = Inliner(re.findall(r"\w+", source.text), domains, names.lengths)
    reader = reader_of(source, names, inliner, mutual=_mutual(names.definitions))
    made = [statement for statement in found if isinstance(statement, Extent)]
    dimensions = _dimensions(source, names, made)
    computed = _computed(source, reader, [each for each in made if each.axis not in dimensions], lengths)
    reader.read_names.update(s.of for s in written if isinstance(s, Alias) and s.of in constants)
    for definition in names.definitions.values():
        reader.current = definition.name
        reader.done[definition.name] = _defined(source, reader, definition)
    declared = {*lengths, *domains, *computed}
    dimensions = {a: place for a, place in reader.spans.items() if a not in declared} | dimensions
    at_most = tuple(_promised(source, reader, each) for each in found if isinstance(each, Promise))
    return Texts(source, found, names, domains, reader, computed, dimensions, at_most)


def _program(source: Source, scalars: Mapping[str, Number], strict_casts: bool, made: bool) -> Program:
    read = texts(source, scalars)
    names, domains, reader = read.names, read.domains, read.reader
    _check_all_used(source, names, reader.read_names)
    _check_constants(source, names, reader.read_names)
    _check_reserved(source, reader.read_names - names.definitions.keys())
    outputs = tuple(_output(names.definitions[name], reader.done[name], names) for name in read.outputs)
    hidden = _hidden(outputs, read)
    outputs = (*outputs, *hidden)
    axes = axes_of(outputs)
    extents = {domains.get(axis, axis) for axis in axes}
    computed = {axis: count for axis, count in read.computed.items() if axis in extents}
    tensors = _tensors(outputs, names, domains)
    for axis, (name, dimension) in read.dimensions.items():
        tensors = tuple(
            _with_axis(source, each, dimension, axis, computed) if each.name == name else each
            for each in tensors
        )
    tensors = _with_sizes_written(tensors, read, extents | sizes_in(computed.values()))
    _check_promises(source, read, tensors)
    integers, integer_tensors = _integers(outputs, tensors, names, made, read.at_most)
    program = Program(
        source=source.text,
        tensors=tensors,
        scalars=_scalars(outputs),
        outputs=outputs,
        domains={axis: of for axis, of in domains.items() if axis in axes},
        strict_casts=strict_casts,
        integers=integers,
        integer_tensors=integer_tensors,
        lengths={axis: count for axis, count in names.lengths.items() if axis in extents},
        computed=computed,
        at_most=read.at_most,
        in_order=_in_order(outputs, reader.steps),
        hidden=len(hidden),
    )
    check_integers(program)
    return program


def sized_axes(program: Program) -> tuple[str, ...]:
    """Every axis of the outputs, those of whose sizes the program makes extents, those that dimensions are declared with, and those that
    have the extent of another one."""
    of_tensors = [axis for tensor in program.tensors for axis in tensor.axes if axis is not None]
    known = *axes_of(program.outputs), *sizes_in(program.computed.values()), *of_tensors, *program.domains
    return tuple(dict.fromkeys(known))


def axes_of(outputs: Iterable[Output]) -> tuple[str, ...]:
    """Every axis of the outputs: their own, reduced ones, and those of sizes, in order of appearance."""
    return _axes_of(tuple(outputs))


def spare_axes(program: Program) -> dict[str, str]:
    """Names of axes that no output has, each with the axis whose extent it has: an order of sums may use them."""
    own = axes_of(program.outputs)
    return {axis: of for axis, of in program.domains.items() if axis not in own}


@lru_cache(maxsize=1024)
def _axes_of(outputs: tuple[Output, ...]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for output in outputs:
        found.update(dict.fromkeys(output.axes))
        for node in walk(output.expr):
            match node:
                case Axis(name) | Size(name) | Reduce(_, name, _):
                    found[name] = None
    return tuple(found)


def _mutual(definitions: Mapping[str, Definition]) -> dict[str, frozenset[str]]:
    """For each definition that reads one which follows it and is made of it, all of those that read each other so."""
    places = {name: place for place, name in enumerate(definitions)}
    reads: dict[str, set[str]] = {}
    for name, definition in definitions.items():
        nodes = ast.walk(definition.value)
        reads[name] = {node.id for node in nodes if isinstance(node, ast.Name) and node.id in places}
    if all(places[of] <= places[name] for name, of_all in reads.items() for of in of_all):
        return {}

    def reached(name: str) -> frozenset[str]:
        return frozenset(post_order(reads[name], lambda each: sorted(reads[each])))

    found = {name: reached(name) for name in definitions}
    cycles = {name: frozenset(n for n in found[name] if name in found[n]) for name in definitions}
    return {name: cycle for name, cycle in cycles.items() if len(cycle) > 1}


def _hidden(outputs: Sequence[Output], read: Texts) -> tuple[Output, ...]:
    """The states that outputs read, and those that these read, as far as none is an output itself."""
    steps, names = read.reader.steps, read.names
    known = {output.name for output in outputs}

    def states(exprs: Iterable[Expr]) -> list[str]:
        return [n.tensor for n in walk(*exprs) if isinstance(n, Load) and n.tensor in steps]

    needed = set(post_order(states(o.expr for o in outputs), lambda name: states([read.reader.done[name]])))
    return tuple(
        _output(names.definitions[name], read.reader.done[name], names)
        for name in names.definitions
        if name in needed - known
    )


def _in_order(outputs: Sequence[Output], steps: Mapping[str, InOrder]) -> tuple[InOrder, ...]:
    """The recurrences that outputs are states of, those that others read before them."""
    made = {output.name for output in outputs}
    found = dict.fromkeys(each for name, each in steps.items() if name in made)
    return tuple(replace(each, states=tuple(n for n in each.states if n in made)) for each in found)


def _constants(scalars: Mapping[str, Number]) -> dict[str, Number]:
    if not isinstance(scalars, Mapping):
        raise BindError(f"scalars is a {type(scalars).__name__}", hint='pass a mapping: scalars={"g": 4}')
    constants: dict[str, Number] = {}
    for name, value in scalars.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, int | float):
            hint = "scalars are numbers; pass tensors when the kernel is called"
            raise BindError(f"scalar {name!r} is {type(value).__name__}, not a number", hint=hint)
        if not fits(plain):
            raise BindError(f"scalar {name!r} does not fit 64 bits", hint="give a float, as 1e30")
        constants[name] = plain
    return constants


def _names(
    source: Source,
    found: Sequence[Statement],
    constants: Mapping[str, Number],
    lengths: Mapping[str, int],
) -> ProgramNames:
    definitions: dict[str, Definition] = {}
    declared: dict[str, Declaration] = {}
    for statement in found:
        if isinstance(statement, Definition):
            if statement.name in definitions:
                hint = f"it is defined on line {definitions[statement.name].line}; give this one another name"
                raise source.error(f"{statement.name!r} is defined twice", statement.node, hint)
            definitions[statement.name] = statement
        elif isinstance(statement, Declaration):
            if statement.name in declared:
                raise source.error(
                    f"{statement.name!r} is declared twice", statement.node, "remove one of the two"
                )
            declared[statement.name] = statement
    axes, subscripted = _bound_and_subscripted(found)
    names = ProgramNames(frozenset(axes), frozenset(subscripted), definitions, declared, constants, lengths)
    for name, node in [(name, statement.node) for name, statement in (declared | definitions).items()]:
        if name in CONSTANTS:
            raise source.error(f"{name!r} is a constant of the language", node, "choose another name")
        if name in axes:
            raise source.error(
                f"{name!r} is also the name of an axis", node, "choose another name for one of them"
            )
    return names


def _counted(statement: Statement, constants: Mapping[str, Number]) -> Statement:
    """`k: axis[K]` with the number that K is given as at compile time."""
    match statement:
        case Alias(axis, of, node) if type(constants.get(of)) is int and constants[of] > 0:
            return Length(axis, int(constants[of]), node)
        case _:
            return statement


def _lengths(source: Source, found: Sequence[Statement]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for statement in found:
        if isinstance(statement, Length):
            if statement.axis in lengths:
                hint = "declare the extent of each axis once"
                raise source.error(
                    f"the extent of axis {statement.axis!r} is declared twice", statement.node, hint
                )
            lengths[statement.axis] = statement.count
    return lengths


def _check_constants(source: Source, names: ProgramNames, read: set[str]) -> None:
    scalars = read - names.subscripted - names.definitions.keys()
    for name, value in names.constants.items():
        if name in names.axes:
            hint = "give sizes of axes where tensors are given; a size in an expression is N(axis)"
            raise BindError(f"scalar {name!r} is an axis of the program", hint=hint)
        if name not in read:
            known = "scalars: " + " ".join(sorted(scalars)) if scalars else "it reads no scalars"
            raise BindError(f"the program has no scalar {name!r}", hint=did_you_mean(name, scalars) or known)
        declaration = names.declared.get(name)
        if declaration is not None and declaration.dtype in INTEGERS and not isinstance(value, int):
            message = f"{name!r} is declared {declaration.dtype}, its value is {value!r}"
            raise source.error(message, declaration.node, "give it an integer", BindError)


def _bound_and_subscripted(found: Sequence[Statement]) -> tuple[set[str], set[str]]:
    axes: set[str] = set()
    subscripted: set[str] = set()
    for statement in found:
        match statement:
            case Declaration(axes=names):
                axes.update(names or ())
            case Alias(axis, of):
                axes.update((axis, of))
            case Length(axis):
                axes.add(axis)
            case Extent(axis, count):
                axes.update((axis, *(each.id for each in _arguments(count))))
            case Definition(axes=names, value=value):
                axes.update(names)
                nodes = list(ast.walk(value))
                axes.update(_reduced(nodes))
                reduced = {node.func for node in nodes if isinstance(node, ast.Call)}
                subscripted.update(
                    node.value.id
                    for node in nodes
                    if isinstance(node, ast.Subscript)
                    and node not in reduced
                    and isinstance(node.value, ast.Name)
                )
    return axes, subscripted


def _arguments(node: ast.AST) -> Iterator[ast.Name]:
    """The axes that an expression has the sizes of, as `N(axis)`."""
    for part in ast.walk(node):
        match part:
            case ast.Call(ast.Name("N"), [ast.Name() as axis]):
                yield axis


Dimensions = dict[str, tuple[str, int]]
"""Axes that are declared to have the extent of a dimension of a tensor."""


def _dimensions(source: Source, names: ProgramNames, found: Sequence[Extent]) -> Dimensions:
    dimensions: Dimensions = {}
    for each in found:
        match each.count:
            case ast.Call(ast.Name("N"), [ast.Name(name), ast.Constant(int(dimension))]):
                if name not in names.subscripted or name in names.definitions:
                    hint = f"write {each.axis}: axis[N(x, 1)] for the extent of dimension 1 of an input x"
                    raise source.error(f"{name!r} is no tensor that is given", each.count, hint)
                dimensions[each.axis] = name, dimension
    return dimensions


def _computed(
    source: Source, reader: Reader, found: Sequence[Extent], lengths: dict[str, int]
) -> dict[str, Expr]:
    """The extents of axes that are made of the sizes of others, those of axes without one; what are numbers become
    `lengths`."""
    domains = reader.inliner.domains
    made: dict[str, Expr] = {}
    for each in found:
        if each.axis in made or each.axis in lengths or each.axis in domains:
            hint = "declare the extent of each axis once"
            raise source.error(f"the extent of axis {each.axis!r} is declared twice", each.node, hint)
        reader.current = ""
        expr = reader.read(each.count, Bindings(frozenset()))
        if not is_count(expr):
            hint = f"write {each.axis}: axis[N(j) // 2 + 1], with +, -, *, // and %"
            raise source.error("an extent is made of sizes of axes and integers", each.count, hint)
        values: dict[Expr, Expr] = {}
        for axis in sizes_in([expr]):
            base = domains.get(axis, axis)
            values[Size(axis)] = made.get(base) or (Const(lengths[base]) if base in lengths else Size(base))
        made[each.axis] = replaced(expr, values)
        if not sizes_in([made[each.axis]]):
            lengths[each.axis] = count_of(made.pop(each.axis), {}) or 0
            if lengths[each.axis] <= 0:
                raise source.error(f"axis {each.axis!r} has no positions", each.node, "give it one or more")
    for each in found:
        if each.axis in lengths:
            continue
        for axis in sizes_in([made[each.axis]]) & made.keys():
            hint = f"declare {axis!r} before, and of other axes"
            raise source.error(f"the extent of {each.axis!r} is made of that of {axis!r}", each.node, hint)
    return made


def _reduced(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The axes that reductions among some nodes bind."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield from (axis.id for axis, _ in selections(node.func.slice) if isinstance(axis, ast.Name))


def _promised(source: Source, reader: Reader, promise: Promise) -> tuple[Expr, Expr]:
    """Both sides of a promise. What it alone reads counts as read by nobody."""
    known = set(reader.read_names)
    reader.current = ""
    sides: list[Expr] = []
    for side in (promise.left, promise.right):
        names = {node.id for node in ast.walk(side) if isinstance(node, ast.Name)}
        scope = Bindings(frozenset((names & reader.names.axes) - set(_reduced(ast.walk(side)))))
        sides.append(reader.read(side, scope))
        if _depth(sides[-1]) > MAX_DEPTH:
            raise source.error(TOO_DEEP, side, "assert something of the temporaries that it is made of")
    reader.read_names = known
    return sides[0], sides[1]


def _check_promises(source: Source, read: Texts, tensors: Sequence[Tensor]) -> None:
    known = {tensor.name for tensor in tensors}
    promises = [each for each in read.statements if isinstance(each, Promise)]
    for promise, sides in zip(promises, read.at_most, strict=True):
        for node in walk(*sides):
            if isinstance(node, Load) and node.tensor not in known:
                hint = "assert something of what the outputs are made of, or remove the line"
                raise source.error(f"no output reads {node.tensor!r}", promise.left, hint)
        ascending = ascends(*sides)
        declared = None if ascending is None else read.names.declared.get(ascending[0])
        if declared is not None and declared.dtype not in INTEGERS:
            message = f"{declared.name!r} is promised to ascend, and declared {declared.dtype}"
            hint = "integers that ascend bound ranges of positions, and nothing else would read this: remove the line"
            raise source.error(message, promise.left, hint, TypeCheckError)


def _aliases(source: Source, found: Sequence[Statement]) -> dict[str, str]:
    domains: dict[str, str] = {}
    for alias in (statement for statement in found if isinstance(statement, Alias)):
        of = domains.get(alias.of, alias.of)
        if alias.axis in domains or alias.axis == of or alias.axis in domains.values():
            hint = "declare the extent of each axis once, from one axis that has it"
            raise source.error(f"the extent of axis {alias.axis!r} is declared twice", alias.node, hint)
        domains[alias.axis] = of
    return domains


def _defined(source: Source, reader: Reader, definition: Definition) -> Expr:
    values = reader.values(definition.value, Bindings(frozenset(definition.axes)))
    if len(values) != definition.count:
        given = "1 name" if definition.count == 1 else f"{definition.count} names"
        of = "1 value" if len(values) == 1 else f"{len(values)} values"
        hint = "the left side has a name for each value: v[i], k[i] = ..."
        raise source.error(f"{given} for {of}", definition.value, hint)
    expr = reader.recurrence(definition, values[definition.place])
    declaration = reader.names.declared.get(definition.name)
    if declaration is not None:
        if (declaration.axes or ()) != definition.axes:
            axes = f"[{', '.join(declaration.axes)}]" if declaration.axes else ""
            hint = f"it is declared {definition.name}: {declaration.dtype}{axes}"
            message = f"{definition.name!r} is declared with other axes"
            raise source.error(message, definition.node, hint, TypeCheckError)
        outermost = expr.fn if isinstance(expr, Call) else None
        if declaration.dtype in (*CASTS, *ROUNDINGS) and declaration.dtype != outermost:
            expr = call(declaration.dtype, expr)
    most = max((free_axes(node) for node in walk(expr)), key=len)
    if len(most | set(definition.axes)) > MAX_AXES:
        message = (
            f"{definition.name!r} has, or is made of, a value of {len(most | set(definition.axes))} axes"
        )
        raise source.error(
            message, definition.node, f"a value has at most {MAX_AXES} axes; split the program in two"
        )
    if _depth(expr) > MAX_DEPTH:
        raise source.error(
            TOO_DEEP, definition.node, "with its temporaries inlined; split the program in two"
        )
    return expr


def _depth(expr: Expr) -> int:
    depths: dict[Expr, int] = {}
    for node in walk(expr):
        depths[node] = 1 + max((depths[child] for child in children(node)), default=0)
    return depths[expr]


def _check_reserved(source: Source, inputs: Collection[str]) -> None:
    if SIZES in inputs:
        message = f"{SIZES!r} is what a call gives the sizes of axes by"
        raise ParseError(
            message, source=source.text, span=locate(source.text, SIZES), hint="choose another name"
        )


def _check_all_used(source: Source, names: ProgramNames, read: set[str]) -> None:
    for name, declaration in names.declared.items():
        if name not in read and name not in names.definitions:
            guess = did_you_mean(name, read - names.declared.keys())
            hint = guess or "remove the declaration"
            raise source.error(f"{name!r} is declared but never read", declaration.node, hint)


def _output_names(
    source: Source, found: Sequence[Statement], names: ProgramNames, read: set[str]
) -> list[str]:
    last = found[-1]
    if not isinstance(last, Return):
        return [name for name in names.definitions if name not in read]
    returned: list[str] = []
    for node in last.names:
        if node.id not in names.definitions:
            if node.id in names.subscripted or node.id in names.declared:
                raise source.error(f"{node.id!r} is an input", node, "return names that the program defines")
            hint = did_you_mean(node.id, names.definitions) or "the program defines " + " ".join(
                names.definitions
            )
            raise source.error(f"output {node.id!r} is never defined", node, hint)
        if node.id in returned:
            raise source.error(f"{node.id!r} is returned twice", node, "name each output once")
        returned.append(node.id)
    return returned


def _output(definition: Definition, expr: Expr, names: ProgramNames) -> Output:
    declaration = names.declared.get(definition.name)
    cast = expr.fn if isinstance(expr, Call) and expr.fn in (*CASTS, *ROUNDINGS) else None
    return Output(definition.name, definition.axes, expr, declaration.dtype if declaration else cast)


def _tensors(
    outputs: tuple[Output, ...], names: ProgramNames, domains: Mapping[str, str]
) -> tuple[Tensor, ...]:
    """The tensors that are read."""
    states = {output.name for output in outputs}
    beyond = {  # the dimensions that are longer than an axis that indexes them
        (r.load.tensor, r.dimension, domains.get(r.axis, r.axis))
        for r in reads_beyond(outputs, tuple(domains.items()))
        if r.load.tensor not in states
    }
    loads: dict[str, list[Load]] = {}
    for node in walk(*(output.expr for output in outputs)):
        if isinstance(node, Load) and node.tensor not in states:
            loads.setdefault(node.tensor, []).append(node)
    tensors = []
    for name in dict.fromkeys((*(name for name in names.declared if name in loads), *loads)):
        declaration = names.declared.get(name)
        rank = len(loads[name][0].index)
        if declaration is not None and declaration.axes is not None:
            tensors.append(Tensor(name, rank, declaration.dtype, declaration.axes))
        else:
            axes = tuple(_plain_axis(loads[name], position, domains, beyond) for position in range(rank))
            tensors.append(Tensor(name, rank, None, axes))
    return tuple(tensors)


def _with_axis(
    source: Source, tensor: Tensor, dimension: int, axis: str, computed: dict[str, Expr]
) -> Tensor:
    """The tensor with a dimension that is declared to have the extent of an axis; where another one has, the axis is as long."""
    if dimension >= tensor.rank:
        message, span = f"{tensor.name!r} has no dimension {dimension}", locate(source.text, axis)
        raise TypeCheckError(message, source=source.text, span=span, hint="dimensions are counted from 0")
    known = tensor.axes[dimension]
    if known is not None and known != axis:
        computed[axis] = Size(known)
        return tensor
    axes = (*tensor.axes[:dimension], axis, *tensor.axes[dimension + 1 :])
    return replace(tensor, axes=axes)


def _with_sizes_written(
    tensors: tuple[Tensor, ...], read: Texts, needed: Collection[str]
) -> tuple[Tensor, ...]:
    """The tensors with the axes that definitions read them along: those `needed` axes that no dimension has once the
    definitions are written out where they are read, at computed positions."""
    given = {axis for tensor in tensors for axis in tensor.axes}
    left = {axis for axis in needed if axis not in given and axis not in read.names.lengths}
    left -= read.computed.keys()
    if not left:
        return tensors
    outputs = tuple(
        Output(name, definition.axes, read.reader.done[name])
        for name, definition in read.names.definitions.items()
    )
    written = {tensor.name: tensor.axes for tensor in _tensors(outputs, read.names, read.domains)}
    return tuple(
        replace(
            tensor,
            axes=tuple(
                of if axis is None and of in left else axis
                for axis, of in zip(tensor.axes, written[tensor.name], strict=True)
            ),
        )
        for tensor in tensors
    )


def _plain_axis(
    loads: Sequence[Load], position: int, domains: Mapping[str, str], beyond: Collection[tuple[str, int, str]]
) -> str | None:
    """The one axis that all plain accesses of a dimension use and that has its extent; None where they differ or there
    is none."""
    index = [load.index[position] for load in loads]
    axes = {domains.get(part.name, part.name) for part in index if isinstance(part, Axis)}
    axes = {axis for axis in axes if (loads[0].tensor, position, axis) not in beyond}
    return axes.pop() if len(axes) == 1 else None


def _integers(
    outputs: Sequence[Output],
    tensors: Sequence[Tensor],
    names: ProgramNames,
    made: bool,
    at_most: Sequence[tuple[Expr, Expr]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The scalars that hold integers, and the undeclared tensors that do."""
    declared = {name: each.dtype in INTEGERS for name, each in names.declared.items()}
    uses = (index_uses if made else integer_uses)([output.expr for output in outputs], declared, at_most)
    scalars = _scalars(outputs)
    of_tensors = [tensor.name for tensor in tensors if tensor.name in uses]
    return tuple(name for name in scalars if name in uses or declared.get(name, False)), tuple(of_tensors)


def _scalars(outputs: Sequence[Output]) -> tuple[str, ...]:
    nodes = walk(*(output.expr for output in outputs))
    return tuple(dict.fromkeys(node.name for node in nodes if isinstance(node, Scalar)))
