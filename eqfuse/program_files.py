"""Programs as files: their text, the settings in their comments, and the programs that ship."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path

from rich.console import Console

import eqfuse as eq
from eqfuse import compiler
from eqfuse.errors import BindError, EqfuseError, did_you_mean
from eqfuse.names import Names
from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.integers import LONGEST
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Program, Tensor, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.syntax import selections
from eqfuse.terms.types import program_dtypes

Number = int | float

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"
"""Programs from papers, in a checkout."""

FIRST = """x: f32[i, j]
y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))
"""
"""What one may begin with."""


def read(file: str) -> str:
    """The text of a file, `-` of standard input. Raises EqfuseError."""
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise EqfuseError(
            f"cannot read {file!r}: {reason}", hint="FILE holds a program; - is standard input"
        ) from None


def numbers(settings: Sequence[str], flag: str) -> dict[str, Number]:
    """From `name=number` words; raises BindError."""
    found: dict[str, Number] = {}
    for word in settings:
        name, _, text = word.partition("=")
        try:
            found[name] = int(text) if flag == "--size" or text.lstrip("+-").isdigit() else float(text)
        except ValueError:
            raise BindError(
                f"{flag} {word!r} is not a name and a number", hint=f"write {flag} j=128"
            ) from None
    return found


def sizes_in(settings: Sequence[str]) -> dict[str, int]:
    """From words `i=128` or `i=128,j=64`; raises BindError."""
    words = [word for setting in settings for word in setting.replace(",", " ").split()]
    return {name: int(value) for name, value in numbers(words, "--size").items()}


def noted(source: str, what: str) -> list[str]:
    """The settings of a line `# sizes: i=128 j=64` on top of a file."""
    found = (line.partition(f"# {what}:") for line in source.splitlines() if line.startswith("#"))
    return [word for head, mark, words in found if mark and not head for word in words.split()]


def kernel_of(
    source: str,
    target: str,
    sizes: Mapping[str, int],
    constants: Mapping[str, Number] | None = None,
    prefer: str | None = None,
) -> tuple[eq.Kernel, dict[str, int]]:
    """The kernel of a text for a target and sizes, and all sizes: it may say some in a comment, as the gallery's do. Raises
    EqfuseError, as `eqfuse.compile` does."""
    known = {**numbers(noted(source, "constants"), "--constant"), **(constants or {})}
    axes = compiler.nominal_extents(parse(source, scalars=known))
    every = {**sizes_in(noted(source, "sizes")), **sizes}
    kernel = eq.compile(
        source,
        scalars=known,
        target=target,
        prefer=prefer,
        sizes={axis: size for axis, size in every.items() if axis in axes or axis in sizes},
    )
    return kernel, every


def shapes_of(program: Program, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a program's tensors for these sizes. Raises BindError where one is missing."""
    return {tensor.name: shape_of(program, tensor, sizes) for tensor in program.tensors}


def shape_of(program: Program, tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor for these sizes. A dimension without an axis of its own is as long as the furthest read of it. Raises BindError
    where a size is missing."""
    behind = longer_dimensions(program)
    shape = []
    for number, named in enumerate(tensor.axes):
        reads = behind.get((tensor.name, number), {})
        axes = [named] if named else list(dict.fromkeys((*reads, *axes_along(program, tensor, number))))
        at = [] if named else _indexes(program, tensor, number)
        fixed = [int(index.value) + 1 for index in at if isinstance(index, Const)]
        if not axes and not fixed:
            hint = f"declare the tensor ({tensor.name}: f32[i, j]) to name its axes, or give it with --inputs FILE.npz"
            raise BindError(f"dimension {number + 1} of {tensor.name!r} has no axis of its own", hint=hint)
        lengths = [_extent(tensor.name, axis, sizes) for axis in axes]
        if not named:
            ends = zip(lengths, map(reads.get, axes), strict=True)
            lengths = [n if read is None else n * (read.times + 1) + read.offset for n, read in ends]
        shape.append(max((*lengths, *fixed)))
    return tuple(shape)


def axes_along(program: Program, tensor: Tensor, number: int) -> list[str]:
    """The axes whose positions are those of a dimension."""
    found = (index.name for index in _indexes(program, tensor, number) if isinstance(index, Axis))
    return list(dict.fromkeys(program.domains.get(axis, axis) for axis in found))


def _indexes(program: Program, tensor: Tensor, number: int) -> list[Expr]:
    """What a dimension is read at."""
    nodes = walk(*(output.expr for output in program.outputs))
    return [node.index[number] for node in nodes if isinstance(node, Load) and node.tensor == tensor.name]


def _extent(tensor: str, axis: str, sizes: Mapping[str, int]) -> int:
    if axis not in sizes:
        raise BindError(f"axis {axis!r} of {tensor!r} has no size", hint=f"add --size {axis}=128")
    if not 0 <= sizes[axis] <= LONGEST:
        hint = "a size is an integer, 0 or more, at most 2**48"
        raise BindError(f"the size of axis {axis!r} is {sizes[axis]!r:.40}", hint=hint)
    return sizes[axis]


def shipped() -> dict[str, str]:
    """The texts of the programs that ship, by name: those of the gallery in a checkout, and of `eqfuse.ops` as `ops.rms_norm`."""
    from eqfuse.ops import CATALOGUE, Op  # models and torch's parts are for those who ask

    def of(op: Op) -> str:
        about = cleandoc(op.__doc__ or "").partition("\n\n")[0].splitlines()
        return "".join(f"# {line}\n" for line in about) + op.text().strip() + "\n"

    gallery = {file.stem: file.read_text(encoding="utf-8") for file in sorted(GALLERY.glob("*.eqf"))}
    return {**gallery, **{f"ops.{op.name}": of(op) for op in CATALOGUE}}


def new(file: str, formula: str | None, name: str | None, console: Console) -> int:
    """Writes a program to a new file, from a formula or a program that ships, and prints what to try: 0. Raises EqfuseError where that
    does not compile, or the file is there."""
    text = FIRST if formula is None else of_formula(formula)
    if name is not None:
        programs = shipped()
        known = {short.removeprefix("ops."): whole for short, whole in programs.items()} | programs
        if name not in known:
            hint = did_you_mean(name, known) or f"programs: {' '.join(programs)}"
            raise EqfuseError(f"there is no program {name!r}", hint=hint)
        text = known[name]
    kernel, _ = kernel_of(text, "cpu", {})
    try:
        with open(file, "x", encoding="utf-8") as made:
            made.write(text)
    except FileExistsError:
        raise EqfuseError(f"{file!r} is there already", hint="name a file that is not") from None
    except OSError as error:
        raise EqfuseError(f"{file!r} cannot be written: {error.strerror}", hint="name another file") from None
    console.print(f"{text}\nwritten to {file}: {kernel!r}", markup=False, highlight=False, soft_wrap=True)
    quoted = shlex.quote(file)
    console.print("try")
    for command in ("watch", "explain", "play", "emit"):
        console.print(f"    eqfuse {command} {quoted}", markup=False, highlight=False, soft_wrap=True)
    return 0


def of_formula(formula: str) -> str:
    """The program of definitions, or of an expression, whose result is called y and has the axes that no reduction in it binds; with
    its tensors declared, and sizes to change. Raises EqfuseError."""
    lines = [line.strip() for line in formula.replace(";", "\n").splitlines() if line.strip()]
    text = "\n".join(lines) + "\n"
    value: ast.expr | None = None
    with suppress(SyntaxError, ValueError, RecursionError):  # definitions, or what `parse` refuses
        value = ast.parse(text.strip(), mode="eval").body
    if value is not None:
        result = Names(node.id for node in ast.walk(value) if isinstance(node, ast.Name)).fresh("y")
        axes = ",".join(dict.fromkeys(_free(value, frozenset())))
        text = f"{result}[{axes}] = {text}" if axes else f"{result} = {text}"
    program = parse(text)
    dtypes, sizes = program_dtypes(program), compiler.nominal_extents(program)
    noted_sizes = " ".join(f"{axis}={size}" for axis, size in sizes.items() if axis not in program.lengths)
    declared = {line.partition(":")[0] for line in lines}
    tensors = [
        f"{tensor.name}: {dtypes[tensor.name]}[{', '.join(map(str, tensor.axes))}]\n"
        for tensor in program.tensors
        if None not in tensor.axes and tensor.name not in declared
    ]
    return f"# sizes: {noted_sizes}\n" * bool(noted_sizes) + "".join(tensors) + text


def _free(node: ast.AST, bound: frozenset[str]) -> Iterator[str]:
    """The names in indexes of tensors that no reduction around them binds."""
    match node:
        case ast.Call(func=ast.Subscript(slice=index)):
            reduced = {axis.id for axis, _ in selections(index) if isinstance(axis, ast.Name)}
            for inside in (index, *node.args):
                yield from _free(inside, bound | reduced)
        case ast.Subscript(slice=index):
            for part in index.elts if isinstance(index, ast.Tuple) else [index]:
                if isinstance(part, ast.Name) and part.id not in bound:
                    yield part.id
                yield from _free(part, bound)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _free(child, bound)
