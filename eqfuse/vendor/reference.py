"""A program as plain numpy in float64, for tests beside emitted kernels.

Every axis of the program has a dimension of its own in all arrays, so that an expression is written as it stands and a reduction is over
one dimension.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.terms.definitions import definition
from eqfuse.terms.folds import PAIR, all_unpacked, fold_of
from eqfuse.terms.functions import FUNCTIONS, OPERATORS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    children,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import axes_of
from eqfuse.tile.triton.template import tuple_text

HELPERS: Mapping[str, str] = {
    "at": '''
def at(tensor, *index):
    """The elements at positions; those outside, which a mask has to exclude, are some element."""
    return tensor[tuple(np.clip(k, 0, size - 1) for k, size in zip(index, tensor.shape, strict=True))]
''',
    "laid": '''
def laid(value, places, shape):
    """A result with the dimensions at `places` alone, of this shape."""
    full = [1] * DIMENSIONS
    for place, size in zip(places, shape, strict=True):
        full[place] = size
    others = [place for place in range(DIMENSIONS) if place not in places]
    return np.broadcast_to(value, full).transpose(*places, *others).reshape(shape)
''',
    "folded": '''
def folded(parts, axis, count, start, combine):
    """The states of a reduction along an axis, from one position to the next."""
    parts = np.broadcast_arrays(*parts, np.zeros([1] * DIMENSIONS))[:-1]
    shape = [1 if place == axis else size for place, size in enumerate(parts[0].shape)]
    state = tuple(np.full(shape, first) for first in start)
    for place in range(count):
        state = combine(state, tuple(part.take([min(place, part.shape[axis] - 1)], axis) for part in parts))
    return state
''',
    "erf": """
erf = np.vectorize(math.erf, otypes=[float])
""",
}
"""Functions that the text calls, by name."""

_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = {"i8": (-128, 127), "u8": (0, 255), "i16": (-(2**15), 2**15 - 1)}
_LOGIC = {"and": "np.logical_and", "or": "np.logical_or"}
_APART = {
    "not": "np.logical_not({})",
    "neg": "-{}",
    "sign": "np.sign({})",
    "exp2": "np.exp2({})",
    "erf": "erf({})",
    "finite": "np.where(np.isinf({0}), 0, {0})",
    "invertible": "np.where(({0} == 0) | np.isinf({0}), 1, {0})",
}


def reference(program: Program, name: str = "reference") -> str:
    """The text of a function of the program's tensors and scalars, as numpy arrays and numbers, and of `sizes`, by axis; with what it calls. It
    gives the outputs, in a tuple where there are several. Casts to float dtypes round nothing: differences of it are derivatives. Raises EqfuseError for
    what has no plain form: lists of the first few, random numbers, casts to float8."""
    return _Writer(program).text(name)


class _Writer:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._axes = axes_of(program.outputs)
        self._names = Names(["np", "math", "sizes", "DIMENSIONS", *HELPERS])
        inputs = (*(tensor.name for tensor in program.tensors), *program.scalars)
        self._inputs = {each: self._names.fresh(each) for each in inputs}
        self._at = {axis: self._names.fresh(axis) for axis in self._axes}
        self._texts: dict[Expr, str] = {}
        self._used: set[str] = set()
        self._folds: dict[str, Fold] = {}
        self._lines: list[str] = []

    def text(self, name: str) -> str:
        roots = [self._plain(output.expr) for output in self._program.outputs]
        parents = Counter(part for node in walk(*roots) for part in children(node))
        for node in walk(*roots):
            text = self._written(node)
            is_shared = (
                parents[node] > 1 and bool(children(node)) and not isinstance(node, Load) and bool(text)
            )
            if isinstance(node, Reduce) or is_shared:
                short = self._names.fresh("t")
                self._lines.append(f"{short} = {_bare(text)}")
                text = short
            self._texts[node] = text
        made = [self._laid(output, root) for output, root in zip(self._program.outputs, roots, strict=True)]
        head = [f"def {name}({', '.join([*self._inputs.values(), 'sizes'])}):"]
        head.append('    """The program in float64, unfused: every axis has a dimension of its own."""')
        if self._at:
            grids = tuple_text([f":{self._extent(axis)}" for axis in self._at])[1:-1]
            head.append(f"    {tuple_text([*self._at.values()])[1:-1]} = np.ogrid[{grids}]")
        body = [f"    {line}" for line in (*self._lines, f"return {', '.join(made)}")]
        used = [*map(self._combine, self._folds.values())]
        used = [*(text.strip() for key, text in HELPERS.items() if key in self._used), *used]
        constants = [f"DIMENSIONS = {len(self._axes)}"] if "laid" in self._used else []
        return "\n\n\n".join([*constants, *used, "\n".join([*head, *body])]) + "\n"

    def _plain(self, expr: Expr) -> Expr:
        """An expression with functions that have a definition, and no text here, written out."""

        def step(node: Expr) -> Expr:
            if isinstance(node, Call) and node.fn in FUNCTIONS and not _has_text(node.fn):
                found = definition(node)
                if found is not None:
                    return self._plain(found)
            return node

        return transform(expr, step)

    def _extent(self, axis: str) -> str:
        return f'sizes["{self._program.domains.get(axis, axis)}"]'

    def _laid(self, output: Output, root: Expr) -> str:
        self._used.add("laid")
        places = [self._axes.index(axis) for axis in output.axes]
        shape = [self._extent(axis) for axis in output.axes]
        return f"laid({_bare(self._texts[root])}, {tuple_text([*map(str, places)])}, {tuple_text(shape)})"

    def _written(self, node: Expr) -> str:
        parts = [self._texts[part] for part in children(node)]
        match node:
            case Const(value):
                return _number(value)
            case Scalar(name):
                return self._inputs[name]
            case Axis(name):
                return self._at[name]
            case Size(axis):
                return self._extent(axis)
            case Load(tensor, ()):
                return self._inputs[tensor]
            case Load(tensor, _):
                self._used.add("at")
                return f"at({', '.join([self._inputs[tensor], *map(_bare, parts)])})"
            case Reduce(op, axis, body) if op in REDUCTIONS:
                if axis in free_axes(body):
                    return f"np.{op}({_bare(parts[0])}, axis={self._axes.index(axis)}, keepdims=True)"
                many = {
                    "sum": f"({parts[0]} * {self._extent(axis)})",
                    "prod": f"({parts[0]} ** {self._extent(axis)})",
                }
                return many.get(op, parts[0])
            case Reduce(op, axis, body) if (found := fold_of(op)) is not None and not found[0].ranks:
                fold, place = found
                self._used.add("folded")
                name = self._combining(fold)
                made = tuple_text([_bare(self._texts[part]) for part in all_unpacked(body)])
                start = tuple_text([_number(first.value) for first in fold.identity])
                along = f"{self._axes.index(axis)}, {self._extent(axis)}"
                return f"folded({made}, {along}, {start}, {name})[{place}]"
            case Call(fn, _) if fn == PAIR:
                return ""  # a reduction reads its parts
            case Local(name, _):
                return name
            case Call(fn, _) if fn in FUNCTIONS:
                return self._called(fn, parts)
        raise _without(str(node))

    def _combining(self, fold: Fold) -> str:
        """The name of the function that combines states of a fold."""
        for name, known in self._folds.items():
            if known is fold:
                return name
        name = self._names.fresh(f"combined_{fold.name}")
        self._folds[name] = fold
        return name

    def _combine(self, fold: Fold) -> str:
        """The text of that function."""
        parts = [self._plain(part) for part in fold.combine]
        for node in walk(*parts):
            self._texts[node] = self._written(node)
        left, right = (tuple_text([f"{each}{side}" for each in fold.state]) for side in (1, 2))
        made = tuple_text([_bare(self._texts[part]) for part in parts])
        return (
            f"def {self._combining(fold)}(left, right):\n    {left}, {right} = left, right\n    return {made}"
        )

    def _called(self, fn: str, parts: Sequence[str]) -> str:
        self._used |= {fn} & HELPERS.keys()
        bare = list(map(_bare, parts))
        if fn in _APART:
            return _APART[fn].format(*(parts if _APART[fn].startswith("-") else bare))
        if fn in _LOGIC:
            return f"{_LOGIC[fn]}({', '.join(bare)})"
        if fn in OPERATORS:
            return f"({parts[0]} {OPERATORS[fn]} {parts[1]})"
        if fn in _FLOATS:
            return parts[0]
        if fn in _INTEGERS:
            least, most = _INTEGERS[fn]
            return f"np.clip(np.rint({bare[0]}), {least}, {most})"
        if FUNCTIONS[fn].numpy:
            return f"np.{FUNCTIONS[fn].numpy}({', '.join(bare)})"
        raise _without(fn)


def _without(what: str) -> EqfuseError:
    hint = "write the source alone: --output kernel.py"
    return EqfuseError(f"there is no plain reference of {what}, for the test", hint=hint)


def _has_text(fn: str) -> bool:
    row = FUNCTIONS[fn]
    return bool(row.numpy) or fn in _APART or fn in OPERATORS or fn in _FLOATS or fn in _INTEGERS


def _bare(text: str) -> str:
    """A text without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


def _number(value: float | bool) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "np.nan" if math.isnan(value) else "np.inf" if value > 0 else "-np.inf"
    return repr(value) if value >= 0 else f"({value!r})"
