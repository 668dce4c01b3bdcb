"""Statements of a source text, read with Python's own grammar.

    Q: f16[b, h, i, d]        Declaration of a tensor
    g: i32                    Declaration of a scalar
    k: axis[j]                Alias: axis k has the extent of axis j
    k: axis[8]                Length: axis k has 8 positions
    k: axis[N(j) // 2]        Extent: axis k has as many positions as this makes of sizes of other axes, N(x, 1) among
                              them, which is that of the declared axis of dimension 1 of x; axis[0:E] is axis[E]
    k: axis[N(x, 1)]          Extent: axis k has the extent of dimension 1 of x, which may be without a declaration
    S[i, j] = expression      Definition
    assert S[i, j] <= L[i]    Promise: it holds at every position, of whatever the program is called with
    return O, L               Return, at the end

Indentation has no meaning; a statement ends with its line unless a bracket is open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from eqfuse.errors import EqfuseError, ParseError, Span, did_you_mean, source_lines
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.dtypes import DTYPES, STORED
from eqfuse.terms.integers import LONGEST
from eqfuse.terms.python import module

MAX_DEPTH = 150
"""Levels of nesting that an expression may have, before and after temporaries are inlined."""

AXIS_KEYWORD = "axis"


@dataclass(frozen=True)
class Declaration:
    """`axes` is None for a scalar."""

    name: str
    dtype: str
    axes: tuple[str, ...] | None
    node: ast.AST


@dataclass(frozen=True)
class Alias:
    axis: str
    of: str
    node: ast.AST


@dataclass(frozen=True)
class Length:
    axis: str
    count: int
    node: ast.AST


@dataclass(frozen=True)
class Extent:
    axis: str
    count: ast.expr
    node: ast.AST


@dataclass(frozen=True)
class Definition:
    """`place` of `count` is which of the values of a reduction with several the name is for."""

    name: str
    axes: tuple[str, ...]
    value: ast.expr
    node: ast.AST
    place: int = 0
    count: int = 1

    @property
    def line(self) -> int:
        """1-based line of the definition."""
        return int(getattr(self.node, "lineno", 0))


@dataclass(frozen=True)
class Return:
    names: tuple[ast.Name, ...]


@dataclass(frozen=True)
class Promise:
    """`left` is at most `right`."""

    left: ast.expr
    right: ast.expr


Statement = Declaration | Alias | Length | Extent | Definition | Promise | Return


@dataclass(frozen=True)
class Source:
    """A source text, its lines, and the blanks that were cut from the front of each line."""

    text: str
    lines: tuple[str, ...]
    cut: tuple[int, ...]

    @staticmethod
    def of(text: str) -> Source:
        lines = source_lines(text)
        stripped = tuple(line.lstrip(" \t\f") for line in lines)
        return Source(text, stripped, tuple(len(a) - len(b) for a, b in zip(lines, stripped, strict=True)))

    def span(self, node: ast.AST) -> Span:
        """The place of a node; a node of several lines is cut at the end of its first."""
        line: int = getattr(node, "lineno", 1)
        raw = self.lines[line - 1].encode()
        start = len(raw[: getattr(node, "col_offset", 0)].decode())
        one_line = getattr(node, "end_lineno", line) == line
        stop = len(raw[: getattr(node, "end_col_offset", None)].decode()) if one_line else len(raw.decode())
        return Span(line, start + self.cut[line - 1], max(1, stop - start))

    def error(
        self, message: str, node: ast.AST | None, hint: str = "", kind: type[EqfuseError] = ParseError
    ) -> EqfuseError:
        """An error of this text that points at `node`."""
        return kind(message, source=self.text, span=None if node is None else self.span(node), hint=hint)

    def module(self) -> ast.Module:
        """The text as Python's syntax tree. Raises ParseError."""
        try:
            return module("\n".join(self.lines))
        except SyntaxError as error:
            raise self._syntax_error(error) from None
        except (RecursionError, MemoryError):
            raise self.error(TOO_DEEP, None, TOO_DEEP_HINT) from None
        except ValueError:
            raise self.error("the source text has characters that no program can have", None) from None

    def _syntax_error(self, error: SyntaxError) -> EqfuseError:
        message = error.msg
        if message.startswith("too many nested parentheses"):
            return self.error(TOO_DEEP, None, TOO_DEEP_HINT)
        line = min(max(error.lineno or 1, 1), len(self.lines))
        column = max((error.offset or 1) - 1, 0)
        length = (error.end_offset or 0) - (error.offset or 0) if error.end_lineno == error.lineno else 1
        span = Span(line, column + self.cut[line - 1], max(1, length))
        empty_index = re.search(r"\w+\s*\[\s*\]", self.lines[line - 1])
        hint = (
            "a result without axes is written without brackets: y = sum[i](x[i])"
            if empty_index
            else "a definition looks like S[i, j] = sum[d](Q[i, d] * K[j, d])"
        )
        return ParseError(f"syntax error: {message}", source=self.text, span=span, hint=hint)


LONGEST_NAME = 200
TOO_DEEP = f"the program is nested more than {MAX_DEPTH} levels deep"
TOO_DEEP_HINT = "give parts of the expression names of their own"


def statements(source: Source) -> list[Statement]:
    """The statements of the text, in order. Raises ParseError."""
    found: list[Statement] = []
    # Python may write letters beyond ASCII as several.
    long_words = not source.text.isascii() or any(
        len(w) > LONGEST_NAME for w in re.findall(r"\w+", source.text)
    )
    for node in source.module().body:
        if found and isinstance(found[-1], Return):
            raise source.error("nothing may follow 'return'", node, "move 'return' to the end")
        if long_words:
            _check_names(source, node)
        found += _statement(source, node)
        _check_depth(source, node)
    if not any(isinstance(statement, Definition) for statement in found):
        message = "the program defines nothing" if found else "the program is empty"
        raise source.error(message, None, "write at least one definition, for example y[i] = sum[j](x[i, j])")
    _name_dimensions(source, found)
    return found


def _name_dimensions(source: Source, found: list[Statement]) -> None:
    """Puts for every `N(x, 1)` the axis that dimension 1 of x is declared with. Raises ParseError."""
    declared = {each.name: each.axes for each in found if isinstance(each, Declaration)}
    for statement in found:
        parts = [value for value in vars(statement).values() if isinstance(value, ast.AST)]
        for node in (node for part in parts for node in ast.walk(part)):
            match node:
                case ast.Call(func=ast.Name(id="N"), args=[ast.Name() as name, number]) if not (
                    isinstance(statement, Extent) and node is statement.count and name.id not in declared
                ):
                    node.args = [
                        ast.copy_location(ast.Name(_dimension(source, declared, name, number)), name)
                    ]


def _dimension(
    source: Source,
    declared: Mapping[str, tuple[str, ...] | None],
    tensor: ast.Name,
    number: ast.expr,
) -> str:
    axes = declared.get(tensor.id)
    if axes is None:
        hint = f"declare its axes, as {tensor.id}: f32[i, j], and write N(j)"
        raise source.error(f"the dimensions of {tensor.id!r} have no names", tensor, hint)
    try:
        place = ast.literal_eval(number)
    except ValueError:
        place = None
    if type(place) is not int or not -len(axes) <= place < len(axes):
        hint = f"they are {', '.join(f'{k} ({axis})' for k, axis in enumerate(axes))}"
        raise source.error(f"{tensor.id!r} has no dimension {ast.unparse(number)}", number, hint)
    return axes[place]


def _statement(source: Source, node: ast.stmt) -> list[Statement]:
    """The statement, or one definition for each name on its left side."""
    match node:
        case ast.AnnAssign(target=target, annotation=annotation, value=value):
            return [_declaration(source, node, target, annotation, value)]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value) if targets:
            count = len(targets)
            return [_definition(source, t, value, place, count) for place, t in enumerate(targets)]
        case ast.Assign(targets=[target], value=value):
            return [_definition(source, target, value)]
        case ast.Assign(targets=[target, *_]):
            hint = "write S[i, j] = ... for a result with axes, y = ... for one without"
            raise source.error("only one name can be defined at a time", target, hint)
        case ast.Return(value=ast.Name() as name):
            return [Return((name,))]
        case ast.Return(value=ast.Tuple(elts=names)) if names and all(isinstance(n, ast.Name) for n in names):
            return [Return(tuple(name for name in names if isinstance(name, ast.Name)))]
        case ast.Return():
            raise source.error("'return' takes the names of the outputs", node, "write return O, L")
        case ast.Assert(test=ast.Compare(left, [ast.LtE()], [right]), msg=None):
            return [Promise(left, right)]
        case ast.Assert(test=ast.Compare(left, [ast.GtE()], [right]), msg=None):
            return [Promise(right, left)]
        case ast.Assert(test=test):
            hint = "write assert S[i, j] <= L[i]"
            raise source.error("an assert says that one value is at most another", test, hint)
        case _:
            hint = "write declarations (x: f16[i, j]), definitions (y[i] = ...) and a final return"
            raise source.error("this is not a statement of the language", node, hint)


def _definition(
    source: Source, target: ast.expr, value: ast.expr, place: int = 0, count: int = 1
) -> Definition:
    match target:
        case ast.Name(id=name):
            return Definition(name, (), value, target, place, count)
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            axes = axis_names(source, index, "the left side")
            return Definition(name, axes, value, target, place, count)
    hint = "write S[i, j] = ... for a result with axes, y = ... for one without"
    raise source.error("this cannot be defined", target, hint)


def _declaration(
    source: Source, node: ast.AST, target: ast.expr, annotation: ast.expr, value: ast.expr | None
) -> Declaration | Alias | Length | Extent:
    if not isinstance(target, ast.Name):
        hint = "write the axes after the dtype: x: f16[i, j]"
        raise source.error("a declaration starts with a name", target, hint)
    if value is not None:
        hint = "write the declaration and the definition on two lines"
        raise source.error("a declaration has no value", value, hint)
    match annotation:  # `axis[0:E]` is `axis[E]`
        case ast.Subscript(value=ast.Name(id="axis"), slice=ast.Slice(lower, upper, step) as given):
            if upper is None or step is not None or not _is_zero(lower):
                hint = f"write {target.id}: axis[N(j) // 2], and add to it what it begins at where it is read"
                raise source.error("the positions of an axis are counted from 0", given, hint)
            annotation.slice = upper
    match annotation:
        case ast.Name(id=dtype):
            axes = None
        case ast.Subscript(value=ast.Name(id="axis"), slice=ast.Constant(value=int(count))):
            if count > LONGEST:
                hint = f"an axis has at most 2**48 positions, {LONGEST}"
                raise source.error(f"axis {target.id!r} is too long", annotation, hint)
            return Length(target.id, count, target)
        case ast.Subscript(value=ast.Name(id="axis"), slice=ast.BinOp() | ast.Call() as of):
            return Extent(target.id, of, target)
        case ast.Subscript(value=ast.Name(id=dtype), slice=index):
            axes = axis_names(source, index, "a declaration")
        case _:
            hint = "write x: f16[i, j] for a tensor, eps: f32 for a scalar"
            raise source.error("this is not a dtype", annotation, hint)
    if dtype == AXIS_KEYWORD:
        if axes is None or len(axes) != 1:
            hint = (
                f"write {target.id}: axis[j] to say that {target.id!r} has the extent of 'j', {target.id}: axis[8], "
                f"or {target.id}: axis[N(j) + 1]"
            )
            raise source.error("'axis' takes the axis that has the same extent", annotation, hint)
        return Alias(target.id, axes[0], target)
    if dtype not in DTYPES:
        guess = did_you_mean(dtype, DTYPES)
        hint = f"{guess} dtypes: {' '.join(DTYPES)}".strip()
        raise source.error(f"unknown dtype {dtype!r}", annotation, hint)
    if dtype in STORED and axes is None:
        hint = f"declare it i32: {target.id}: i32"
        raise source.error(f"{dtype} is a dtype of tensors alone", annotation, hint)
    if dtype == "bool" and axes is None:
        hint = f"declare it i32, and compare it: {target.id} != 0"
        raise source.error("a scalar is a number", annotation, hint)
    return Declaration(target.id, dtype, axes, target)


def _is_zero(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value == 0)


def axis_names(source: Source, index: ast.expr, where: str) -> tuple[str, ...]:
    """The distinct axis names of an index list. Raises ParseError."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    names: list[str] = []
    for part in parts:
        if not isinstance(part, ast.Name):
            hint = "index expressions belong on the right side of a definition"
            if where == "a reduction":
                hint = "write an axis, or a condition that begins with it: k <= j"
            raise source.error(f"{where} takes axis names only", part, hint)
        if part.id in names:
            raise source.error(
                f"axis {part.id!r} is repeated", part, "each dimension needs an axis of its own"
            )
        names.append(part.id)
    if not names:
        raise source.error(f"{where} takes at least one axis", index)
    return tuple(names)


def selections(index: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a reduction is over: its axes, each with a condition where it has one. `k <= j`, and conditions of one axis that are
    joined, begin with the axis that they are of."""
    for part in index.elts if isinstance(index, ast.Tuple) else [index]:
        first = part
        while not isinstance(first, ast.Name):
            match first:
                case ast.Compare(left=left) | ast.BinOp(left=left, op=ast.BitAnd()):
                    first = left
                case ast.BoolOp(op=ast.And(), values=[left, *_]):
                    first = left
                case _:
                    break
        yield (first, part) if isinstance(first, ast.Name) and first is not part else (part, None)


def _check_names(source: Source, root: ast.AST) -> None:
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and len(node.id) > LONGEST_NAME:
            message = f"this name has {len(node.id)} letters"
            raise source.error(message, node, f"a name has at most {LONGEST_NAME}")


def _check_depth(source: Source, root: ast.AST) -> None:
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise source.error(TOO_DEEP, root, TOO_DEEP_HINT)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
