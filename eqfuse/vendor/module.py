"""A kernel and its gradient as one Python module that needs torch and triton alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from eqfuse import compiler
from eqfuse.differentiate.gradient import cotangents, differentiable
from eqfuse.errors import EqfuseError
from eqfuse.kernel import Kernel
from eqfuse.names import Names
from eqfuse.operator.content import Saving
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.storage import buffer_dtypes
from eqfuse.tile.triton.template import TORCH_DTYPES as NAMED
from eqfuse.tile.triton.template import extents_text, tuple_text


@dataclass(frozen=True)
class Differentiated:
    """A kernel with the gradient by its tensors of real numbers: `forward` is what a call runs, `backward` reads what it has saved."""

    kernel: Kernel
    names: tuple[str, ...]
    saving: Saving
    forward: Kernel
    backward: Kernel

    @property
    def results(self) -> tuple[str, ...]:
        """What the forward gives: the outputs, and what the gradient reads besides."""
        return (*(output.name for output in self.kernel.program.outputs), *self.saving.residuals)

    @classmethod
    def of(cls, kernel: Kernel, sizes: Mapping[str, int]) -> Differentiated | None:
        """With plans for these sizes; None where no output has a gradient. Raises EqfuseError where the gradient cannot be derived, or is not
        verified."""
        program = kernel.program
        tensors = {tensor.name for tensor in program.tensors}
        names = tuple(name for name in differentiable(program) if name in tensors)
        dtypes = {name: TORCH_DTYPES[program_dtypes(program)[name]] for name in names}
        if not names or not kernel.forward(names, dtypes).tracked:
            return None
        saving, backward = kernel.forward(names, dtypes), kernel.gradient(names, names, dtypes=dtypes)
        saved = kernel if saving.kernel is kernel else _planned(saving.kernel, sizes)  # type: ignore[arg-type]
        made = buffer_dtypes(saved.compiled.tile)
        made |= {of: made[name] for name, of in cotangents(program).items() if name in made}
        known = {tensor.name: made[tensor.name] for tensor in backward.program.tensors if tensor.name in made}
        return cls(kernel, names, saving, saved, _planned(backward, sizes, known))


def _planned(kernel: Kernel, sizes: Mapping[str, int], dtypes: Mapping[str, str] | None = None) -> Kernel:
    """The kernel with its plan for those of these sizes that it has, and dtypes. Raises EqfuseError where none fits."""
    axes = compiler.nominal_extents(kernel.program)
    own = {axis: size for axis, size in sizes.items() if axis in axes and axis not in kernel.program.domains}
    return fitting(kernel.planned(own, dtypes))


def fitting(kernel: Kernel) -> Kernel:
    """The kernel, where its plan fits the device. Raises EqfuseError."""
    if kernel.plan.reason:
        results = ", ".join(output.name for output in kernel.program.outputs)
        raise EqfuseError(
            f"no plan of {results} fits: {kernel.plan.reason}", hint="give other sizes, or another target"
        )
    return kernel


def triton_of(kernel: Kernel, sizes: Mapping[str, int]) -> str:
    """The Triton module of a kernel's plan; sizes of axes that no tensor has are as given, unless a call gives others."""
    return compiler.emit_triton(kernel.derived, kernel.compiled, kernel.name, given=sizes)


def module_of(made: Differentiated, name: str, sizes: Mapping[str, int]) -> str:
    """The module whose function `name` is differentiable."""
    texts = [triton_of(kernel, sizes) for kernel in (made.forward, made.backward)]
    # The docstrings as they stand, with what is escaped in them.
    first, second = (text.split('"""\n')[0].removeprefix('"""').strip() for text in texts)
    about = f'''"""{name}: Triton kernels and their gradient under torch's autograd. Needs torch and triton alone.

{first}

The gradient:

{second}
"""'''
    return f"{_without(merged(texts[0], texts[1], about), name)}\n\n\n{_function(made, name)}"


def _without(module: str, name: str) -> str:
    """A module in which this name is free."""
    chunks = _chunks(module)
    return _with_names(module, {name: Names((*chunks, name)).fresh(name)} if name in chunks else {})


def merged(first: str, second: str, about: str) -> str:
    """Two modules as one, without their docstrings: what both define alike is there once, other names of the second that the first has too
    get another one."""
    chunks, others = _chunks(first), _chunks(second)
    both = {name for name in others if name in chunks}
    same = {name for name in both if others[name].text == chunks[name].text and not others[name].is_state}
    while changed := {name for name in same if others[name].reads & (both - same)}:
        same -= changed
    taken = Names((*chunks, *others))
    renamed = {name: taken.fresh(f"{name}_backward") for name in both - same}
    added = {name: chunk for name, chunk in _chunks(_with_names(second, renamed)).items() if name not in same}
    imports = dict.fromkeys((*_imports(first), *_imports(second)))
    parts = [about, "\n".join(imports)]
    parts += [chunk.text for chunk in (*chunks.values(), *added.values())]
    text = parts[0]
    for before, after in pairwise(parts):
        apart = (
            "\n\n\n"
            if any(re.search(r"^(def|@)", part, re.MULTILINE) for part in (before, after))
            else "\n\n"
        )
        text += apart + after
    return text


@dataclass(frozen=True)
class _Chunk:
    """A definition of a module with the comments above it; `reads` are the names in it. It `is_state` where calls fill it."""

    text: str
    reads: frozenset[str]
    is_state: bool


def _chunks(module: str) -> dict[str, _Chunk]:
    lines = module.splitlines()
    found: dict[str, _Chunk] = {}
    for node in ast.parse(module).body:
        match node:
            case ast.FunctionDef(name, decorator_list=decorators):
                start = min([node.lineno, *(each.lineno for each in decorators)])
            case ast.Assign([ast.Name(name)]):
                start = node.lineno
            case _:
                continue
        while lines[start - 2].startswith("#"):
            start -= 1
        reads = frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        is_state = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and not node.value.keys
        found[name] = _Chunk("\n".join(lines[start - 1 : node.end_lineno]), reads, is_state)
    return found


def _imports(module: str) -> list[str]:
    return [
        ast.unparse(node) for node in ast.parse(module).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def _with_names(module: str, renamed: Mapping[str, str]) -> str:
    """A module with other names of what it defines. Until Python 3.12 tokens end at formatted strings: names are replaced in those as words."""
    if not renamed:
        return module
    words = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, renamed))})(?!\w)")
    lines = module.splitlines(keepends=True)
    before, places = "", []
    for token in tokenize.generate_tokens(io.StringIO(module).readline):
        is_name = token.type == tokenize.NAME and token.string in renamed and before != "."
        if is_name or (token.type == tokenize.STRING and token.string[:1] in "fF"):
            places.append(token)
        before = token.string
    for token in reversed(places):
        row, start = token.start
        end = token.end[1]
        line = lines[row - 1]
        lines[row - 1] = line[:start] + words.sub(lambda m: renamed[m[1]], line[start:end]) + line[end:]
    return "".join(lines)


# The function of torch ---------------------------------------------------------------------------


def _function(made: Differentiated, name: str) -> str:
    """A function of autograd, and the one that is called."""
    forward, backward = made.forward.program, made.backward.program
    tensors, scalars = [tensor.name for tensor in forward.tensors], list(forward.scalars)
    outputs = [output.name for output in made.kernel.program.outputs]
    kept = (*made.saving.outputs, *made.saving.residuals)
    dtypes = made.backward.compiled.dtypes
    local = Names(
        (*tensors, *scalars, *outputs, *kept, *(tensor.name for tensor in backward.tensors), "torch")
    )
    ctx, sizes, size = (local.fresh(word) for word in ("ctx", "sizes", "size"))
    every = ", ".join(made.results)
    named = cotangents(made.kernel.program)
    above = [named[each] if each in named else local.fresh("_") for each in outputs]
    constant = [each for each in outputs if each not in made.saving.tracked]
    saved = [*tensors, *(each for each in kept if each not in tensors)]
    numbers = {each for each, output in zip(made.results, forward.outputs, strict=True) if not output.axes}
    read = [*(tensor.name for tensor in backward.tensors), *backward.scalars]
    read = [f"{each}.reshape(1)" if each in numbers else each for each in read]
    cast = [
        f"{each} = {each}.to({NAMED[dtypes[each]]}){'' if output.axes else '.reshape(1)'}"
        for each, output in zip(above, made.kernel.program.outputs, strict=True)
        if each in dtypes
    ]
    gradients = [named[each] for each in made.names]
    given = {each: f"{named[each]}.to({each}.dtype).reshape({each}.shape)" for each in made.names}
    lines = [
        "class _Function(torch.autograd.Function):",
        "    @staticmethod",
        f"    def forward({', '.join([ctx, sizes, *tensors, *scalars])}):",
        f"        {every} = {made.forward.name}({', '.join([*tensors, *scalars])}, sizes={sizes})",
        f"        {ctx}.save_for_backward({', '.join(saved)})",
        f"        {ctx}.given = {sizes}, {tuple_text(scalars)}",
        *([f"        {ctx}.mark_non_differentiable({', '.join(constant)})"] if constant else []),
        f"        return {', '.join(outputs)}",
        "",
        "    @staticmethod",
        "    @torch.autograd.function.once_differentiable",
        f"    def backward({', '.join([ctx, *above])}):",
        f"        {tuple_text(saved)[1:-1]} = {ctx}.saved_tensors",
        f"        {sizes}, {tuple_text(scalars) if scalars else '_'} = {ctx}.given",
        f"        {size} = axis_sizes({{{', '.join(_entry(each) for each in tensors)}}}, {extents_text(forward, sizes)})",
        *(f"        {line}" for line in cast),
        f"        {sizes} = {{{', '.join(_sizes(made, size))}}}",
        f"        {tuple_text(gradients)[1:-1] if len(gradients) > 1 else gradients[0]} = {made.backward.name}({', '.join(read)}, sizes={sizes})",
        f"        return {', '.join(['None', *(given.get(each, 'None') for each in (*tensors, *scalars))])}",
        "",
        "",
        f"def {name}({', '.join([*tensors, *scalars, '*', f'{sizes}=None'])}):",
        f'    """{", ".join(outputs)}, differentiable by {", ".join(made.names)}, once.',
        "",
        f"    `{sizes}`: extents by axis, for axes that no tensor has.",
        "    Tensors may have any strides. Raises ValueError where arguments do not fit.",
        '    """',
        f"    return _Function.apply({', '.join([sizes, *tensors, *scalars])})",
        "",
    ]
    return "\n".join(lines)


def _entry(name: str) -> str:
    return f'"{name}": {name}'


def _sizes(made: Differentiated, size: str) -> list[str]:
    """The sizes that the gradient's kernel is given: those of the forward, and of what it is the gradient of."""
    forward, backward = made.forward.program, made.backward.program
    known = {forward.domains.get(axis, axis) for axis in sized_axes(forward)}
    wanted = {backward.domains.get(axis, axis): "" for axis in sized_axes(backward)}
    found = {axis: f'{size}["{axis}"]' for axis in wanted if axis in known and axis not in backward.lengths}
    for name, output in zip(made.names, backward.outputs, strict=True):
        for place, axis in enumerate(output.axes):
            found.setdefault(backward.domains.get(axis, axis), f"{name}.shape[{place}]")
    return [f'"{axis}": {text}' for axis, text in found.items() if axis not in backward.lengths]


def plain_module_of(kernel: Kernel, name: str, sizes: Mapping[str, int]) -> str:
    """The module of a kernel without a gradient, whose function `name` has the launcher's arguments."""
    return f"{_without(triton_of(kernel, sizes), name).rstrip()}\n\n\n{name} = {kernel.name}\n"
