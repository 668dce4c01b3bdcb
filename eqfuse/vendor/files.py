"""`eqfuse emit FILE --output FOLDER`: a kernel as files for other projects, which need nothing of eqfuse: the module, its test, and how it was
derived."""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from eqfuse import compiler
from eqfuse.differentiate.gradient import cotangents
from eqfuse.errors import EqfuseError
from eqfuse.kernel import Kernel
from eqfuse.program_files import Number, axes_along, noted, numbers, shapes_of, sizes_in
from eqfuse.terms.nodes import Call, Load, Program, walk
from eqfuse.terms.recurrences import check_merges
from eqfuse.terms.types import KINDS, program_dtypes
from eqfuse.tile.native.build import FLAGS
from eqfuse.tile.triton.template import TORCH_DTYPES, tuple_text
from eqfuse.vendor import cpp
from eqfuse.vendor.cpp import CFunction
from eqfuse.vendor.module import Differentiated, fitting, module_of, plain_module_of
from eqfuse.vendor.reference import reference

SMALL = (3, 5, 7, 4, 11, 6)
"""Sizes of the axes of a test, in turn, where the program's file says none."""

HALVES = frozenset({"f16", "bf16"})

IMPORTED = ("numpy", "pytest", "torch", "triton")
"""What the files import."""


def write(kernel: Kernel, sizes: Mapping[str, int], folder: Path, name: str) -> tuple[list[str], str]:
    """Writes NAME.py, or for a CPU NAME.cpp and NAME.h, and NAME_test.py and NAME.md to a folder, which is made where it is not there; gives
    their names, and why there is no gradient among them, if there is none. Raises EqfuseError where no plan fits, a test cannot be
    written, or the folder."""
    check_merges(
        kernel.program, "files of such a recurrence are not written", "call the kernel, or print k.triton"
    )
    made, why = None, "no output has one by a tensor of real numbers"
    fitting(kernel)
    try:
        made = Differentiated.of(kernel, sizes)
    except EqfuseError as error:
        why = error.message
    if kernel.compiled.device.kind == "cpu":
        functions = {name: CFunction(kernel, name)}
        if made is not None:
            forward = CFunction(made.forward, f"{name}_forward", made.results)
            functions |= {
                f"{name}_forward": forward,
                f"{name}_backward": CFunction(made.backward, f"{name}_backward"),
            }
        listed = list(functions.values())
        sources = {f"{name}.cpp": cpp.source(name, listed), f"{name}.h": cpp.header(name, listed)}
        test = _test_in_c(kernel.program, name, functions, made)
    else:
        module = plain_module_of(kernel, name, sizes) if made is None else module_of(made, name, sizes)
        sources, test = {f"{name}.py": module}, _test(kernel.program, name, made)
    page = "\n".join(_lines(kernel, name, made, why))
    texts = {**sources, f"{name}_test.py": test, f"{name}.md": page}
    return _written(folder, texts), why if made is None else ""


def _written(folder: Path, texts: Mapping[str, str]) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EqfuseError(
            f"{str(folder)!r} cannot be written: {error.strerror}", hint="name another folder"
        ) from None
    return list(texts)


def name_of(text: str) -> str:
    """A name of a function, a module and a file for a word: one that no other module has, which the files import."""
    found = re.sub(r"\W", "_", text, flags=re.ASCII)
    found = found if found[:1].isalpha() else f"k{found}"
    return (
        f"{found}_" if keyword.iskeyword(found) or found in (*sys.stdlib_module_names, *IMPORTED) else found
    )


# The test ----------------------------------------------------------------------------------------

TEST = '''"""Tests of {name}.py, against the program in float64, written plainly. Where there is no GPU, the kernels run in Triton's interpreter."""

{imports}
import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import {name}  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

SIZES = {sizes}
SCALARS = {scalars}
TOLERANCE = {tolerance}


def inputs(seed):
    """Random tensors by name; positions are inside of what they are read from."""
    random = np.random.default_rng(seed)
    return {{
{inputs}    }}


def exact(tensors):
    """The same numbers in float64."""
    return {{name: (x.double() if x.is_floating_point() else x).cpu().numpy() for name, x in tensors.items()}}


{reference}

def several(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@contextmanager
def kernels():
    """What Triton's interpreter does not know is no fault of the kernels."""
    try:
        yield
    except InterpreterError as error:
        pytest.skip(f"Triton's interpreter fails: {{error}}")


def check(found, expected):
    found = found.detach().double().cpu().numpy()
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1e-30)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * largest)


def test_outputs():
    for seed in range(3):
        tensors = inputs(seed)
        with kernels():
            found = several({name}.{name}(**tensors, **SCALARS, sizes=SIZES))
        with np.errstate(all="ignore"):
            expected = reference(**exact(tensors), **SCALARS, sizes=SIZES)
        for one, other in zip(found, several(expected), strict=True):
            check(one, other)
'''

GRADIENT = '''

def test_gradients():
    """Against differences of the program in float64, along random directions."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        tensors = inputs(seed)
        for name in {names}:
            tensors[name].requires_grad_()
        with kernels():
            found = several({name}.{name}(**tensors, **SCALARS, sizes=SIZES))
            real = [place for place, x in enumerate(found) if x.requires_grad]
            cotangents = [torch.tensor(random.normal(size=found[place].shape)).to(found[place]) for place in real]
            torch.autograd.backward([found[place] for place in real], cotangents)
        values = exact({{name: x.detach() for name, x in tensors.items()}})
        weights = {{place: x.double().cpu().numpy() for place, x in zip(real, cotangents, strict=True)}}
        for name in {names}:
            check_slope(tensors[name].grad.double().cpu().numpy(), values, weights, name, random)
'''

SLOPE = '''

def check_slope(gradient, values, weights, name, random):
    """Compares a gradient of weighed outputs, by their places, with differences along a random direction."""
    direction, sums = random.normal(size=values[name].shape), []
    for step in (1e-5, -1e-5):
        with np.errstate(all="ignore"):
            moved = {**values, name: values[name] + step * direction}
            outputs = several(reference(**moved, **SCALARS, sizes=SIZES))
        sums.append(sum(np.sum(outputs[place] * weight) for place, weight in weights.items()))
    slope = (sums[0] - sums[1]) / 2e-5
    size = max(np.linalg.norm(gradient), abs(slope))
    assert abs(np.sum(gradient * direction) - slope) <= 10 * TOLERANCE * size, name
'''


def _test(program: Program, name: str, made: Differentiated | None) -> str:
    dtypes = program_dtypes(program)
    text = TEST.format(
        **_of_program(
            program,
            lambda each, drawn: f"torch.tensor({drawn}).to(DEVICE, {TORCH_DTYPES[dtypes[each]]})",
            "import os",
            "from contextlib import contextmanager",
        ),
        name=name,
    )
    gradient = GRADIENT.format(name=name, names=_names(made.names)) if made is not None else ""
    return text + _compared(gradient, program.source)


def _of_program(program: Program, cast: Callable[[str, str], str], *imports: str) -> dict[str, object]:
    """What the test of a program has of it. `cast` makes a function's argument of its name and the text that draws it."""
    dtypes, sizes, written = program_dtypes(program), _small(program), reference(program)
    shapes = shapes_of(program, sizes)
    drawn = {each.name: _random(program, each.name, dtypes[each.name], shapes) for each in program.tensors}
    math_too = ["import math"] if "math." in written else []
    return {
        "imports": "\n".join([*sorted([*imports, *math_too], key=lambda line: (line[0] == "f", line)), ""]),
        "sizes": _table(sizes),
        "scalars": _table(_scalars(program)),
        "tolerance": _tolerance(program),
        "inputs": "".join(f'        "{each}": {cast(each, text)},\n' for each, text in drawn.items()),
        "reference": written,
    }


def _compared(test: str, program: str) -> str:
    """A test of a gradient with what it calls; nothing of one that is none."""
    if test and re.search(r"\bstop\(", program):
        return "\n\n# The gradient is not compared with differences: the program stops it.\n"
    return SLOPE + test if test else ""


def _names(names: Iterable[str]) -> str:
    return tuple_text([f'"{each}"' for each in names])


IN_C = '''"""Tests of {name}.cpp, against the program in float64, written plainly; $CXX, or c++, compiles it."""

{imports}
import numpy as np
import pytest

SIZES = {sizes}
SCALARS = {scalars}
TOLERANCE = {tolerance}


# Of each function: arrays, results with their dtypes and shapes, sizes, and numbers with their types.
FUNCTIONS = {{
{functions}}}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The compiled functions."""
    library = tmp_path_factory.mktemp("{name}") / "{name}.so"
    source = Path(__file__).parent / "{name}.cpp"
    command = [*shlex.split(os.environ.get("CXX", "c++")), *{flags}, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def inputs(seed):
    """Random arrays by name; positions are inside of what they are read from."""
    random = np.random.default_rng(seed)
    return {{
{inputs}    }}


{reference}

def several(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def call(library, name, values, threads):
    """The results of a function, by name."""
    arrays, results, sizes, numbers = FUNCTIONS[name]
    made = {{each: np.empty(shape, dtype) for each, (dtype, shape) in results.items()}}
    memory = [values[each] for each in arrays] + list(made.values())
    given = [each.ctypes.data_as(ctypes.c_void_p) for each in memory]
    given += [ctypes.c_int64(size) for size in sizes]
    given += [kind(values[each]) for each, kind in numbers.items()]
    assert getattr(library, name)(*given, threads) == 0
    return made


def exact(arrays):
    """The same numbers in float64."""
    return {{name: x.astype(float) if x.dtype.kind == "f" else x for name, x in arrays.items()}}


@pytest.mark.parametrize("threads", [1, 3])
def test_outputs(library, threads):
    for seed in range(3):
        given = inputs(seed)
        made = call(library, "{name}", {{**given, **SCALARS}}, threads)
        with np.errstate(all="ignore"):
            expected = several(reference(**exact(given), **SCALARS, sizes=SIZES))
        for found, other in zip(made.values(), expected, strict=True):
            largest = np.max(np.abs(other), where=np.isfinite(other), initial=1e-30)
            np.testing.assert_allclose(found.astype(float), other, rtol=TOLERANCE, atol=TOLERANCE * largest)
'''

GRADIENT_IN_C = '''

@pytest.mark.parametrize("threads", [1, 3])
def test_gradients(library, threads):
    """Against differences of the program in float64, along random directions."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        given = inputs(seed)
        values = {{**given, **SCALARS}}
        values |= call(library, "{name}_forward", values, threads)
        weights = {{}}
        for place, (output, above) in {real}.items():
            cotangent = np.asarray(random.normal(size=values[output].shape)).astype(values[output].dtype)
            values[above] = cotangent.reshape(-1)
            weights[place] = np.asarray(cotangent, float)
        made = call(library, "{name}_backward", values, threads)
        for name, gradient in {gradients}.items():
            check_slope(made[gradient].astype(float).reshape(given[name].shape), exact(given), weights, name, random)
'''


def _test_in_c(
    program: Program, name: str, functions: Mapping[str, CFunction], made: Differentiated | None
) -> str:
    sizes = _small(program)
    shapes = shapes_of(program, sizes)
    if made is not None:
        for each, output in zip(made.names, made.backward.program.outputs, strict=True):
            sizes = {**dict(zip(output.axes, shapes[each], strict=True)), **sizes}
        for each, output in zip(made.results, made.forward.program.outputs, strict=True):
            domains = made.forward.program.domains
            shapes[each] = tuple(sizes[domains.get(axis, axis)] for axis in output.axes)
        shapes |= {of: shapes[each] for each, of in cotangents(program).items() if each in shapes}
    listed = "".join(
        f'    "{each}": {_row(function, sizes, shapes)},\n' for each, function in functions.items()
    )
    text = IN_C.format(
        **_of_program(
            program,
            lambda each, drawn: f"np.asarray({drawn}).astype({functions[name].inputs[each]})",
            *(f"import {module}" for module in ("ctypes", "os", "shlex", "subprocess")),
            "from pathlib import Path",
        ),
        name=name,
        flags=list(FLAGS),
        functions=listed,
    )
    if made is None:
        return text
    named, tracked = cotangents(program), made.saving.tracked
    outputs = ((place, each.name) for place, each in enumerate(program.outputs))
    real = {place: (each, named[each]) for place, each in outputs if each in named and each in tracked}
    gradients = {each: named[each] for each in made.names}
    gradient = GRADIENT_IN_C.format(name=name, gradients=gradients, real=real)
    return text + _compared(gradient, program.source)


def _row(function: CFunction, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a test calls a function with: a tuple of the names of arrays, results, sizes and numbers."""
    extents = {text: sizes[axis] for axis, text in function.sizes.items()}
    # What has no axes is one element in memory.
    extents |= {
        text: (shapes[tensor] or (1,))[place] for text, (tensor, place) in function.dimensions.items()
    }
    results = [
        f'"{each}": ({dtype}, {tuple_text([str(extents.get(size, size)) for size in shape])})'
        for each, (dtype, shape) in function.results.items()
    ]
    numbers = [f'"{each}": {kind}' for each, kind in function.numbers.items()]
    arrays = list(function.inputs)
    return f"({arrays}, {{{', '.join(results)}}}, {list(extents.values())}, {{{', '.join(numbers)}}})"


def _tolerance(program: Program) -> str:
    """Of results, as a part of the largest one."""
    dtypes = program_dtypes(program)
    casts = (node.fn for node in walk(*(output.expr for output in program.outputs)) if isinstance(node, Call))
    is_half = not HALVES.isdisjoint((*(dtypes[tensor.name] for tensor in program.tensors), *casts))
    return "2e-2" if is_half else "1e-4"


def _table(entries: Mapping[str, Number]) -> str:
    return "{" + ", ".join(f'"{key}": {value!r}' for key, value in entries.items()) + "}"


def _small(program: Program) -> dict[str, int]:
    """Sizes of a test."""
    said = sizes_in(noted(program.source, "small"))
    axes = compiler.nominal_extents(program)
    free = [axis for axis in axes if axis not in {*program.domains, *program.lengths, *program.computed}]
    chosen = {axis: SMALL[place % len(SMALL)] for place, axis in enumerate(free)}
    chosen |= {axis: size for axis, size in said.items() if axis in chosen}
    for tensor in program.tensors:
        for place in range(tensor.rank):
            first, *others = [axis for axis in axes_along(program, tensor, place) if axis in chosen] or [""]
            chosen |= {axis: chosen[first] for axis in others}
    found = compiler.nominal_extents(program, chosen)
    return {axis: size for axis, size in found.items() if axis not in program.domains}


def _scalars(program: Program) -> dict[str, Number]:
    """Numbers for the scalars of a test: those of a line `# scalars:`, else one that is no special case."""
    said = numbers(noted(program.source, "scalars"), "--scalar")
    return {name: said.get(name, 2 if name in program.integers else 0.625) for name in program.scalars}


def _random(program: Program, name: str, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The text of random values of a tensor: normal numbers, or integers."""
    shape = tuple_text(list(map(str, shapes[name])))
    if dtype == "bool":
        return f"random.random(size={shape}) < 0.5"
    if dtype not in KINDS:
        return f"random.normal(size={shape})"
    reads = [node for node in walk(*(output.expr for output in program.outputs)) if isinstance(node, Load)]
    most = [
        shapes[load.tensor][place] if isinstance(index, Load) else 1  # of a sum with others, 0 is safe alone
        for load in reads
        for place, index in enumerate(load.index)
        if any(isinstance(part, Load) and part.tensor == name for part in walk(index))
    ]
    longest = max(size for each in shapes.values() for size in (*each, 1))
    text = f"random.integers(0, {min(most, default=longest + 1)}, size={shape})"
    promised = {node.tensor for pair in program.at_most for node in walk(*pair) if isinstance(node, Load)}
    return f"np.sort({text})" if name in promised else text


# The page ----------------------------------------------------------------------------------------


def _faster(kernel: Kernel, called: str) -> Iterator[str]:
    """The forms in which calls of a kernel are predicted to take less: they change tensors first, and are not written."""
    derived, asked = kernel.derived, kernel.compiled.asked
    forms = (
        ("with axes in chunks", compiler.of_chunks, compiler.predicted_in_chunks),
        ("on sorted positions", compiler.of_segments, compiler.predicted_sorted),
    )
    for form, make, predicted in forms:
        other = make(derived)
        seconds = math.inf if other is None else predicted(other, asked)
        if seconds < compiler.predicted(derived, asked):
            yield f"Calls of `eq.compile` run {called} {form} at these sizes, predicted to take {seconds:.3g} s; that form is not among these files."


def _lines(kernel: Kernel, name: str, made: Differentiated | None, why: str) -> Iterator[str]:
    yield f"# {name}\n"
    yield f"```text\n{kernel.program.source.strip()}\n```\n"
    cost = kernel.plan.cost
    seconds = f", predicted to take {cost.seconds:.3g} s" if cost and math.isfinite(cost.seconds) else ""
    sizes = " ".join(f"{axis}={size}" for axis, size in kernel.compiled.extents.items())
    order = ", in another order of sums and products" if kernel.plan.form == "reassociated" else ""
    yield f"`{name}.{'py' if kernel.compiled.device.kind == 'gpu' else 'cpp'}` was made for {kernel.compiled.device.name}, with the plan for {sizes}: {kernel.plan.schedule}{order}{seconds}."
    yield f"`{name}_test.py` compares it with the program in float64.\n"
    parts = [("", kernel)] if made is None else [("", made.forward), ("the gradient of ", made.backward)]
    yield from (f"{line}\n" for of, each in parts for line in _faster(each, of + name))
    yield f"## Derivation\n\n```text\n{kernel.explain().strip()}\n```\n"
    yield f"## Certificate\n\n```text\n{kernel.certificate}\n```\n"
    if made is None:
        yield f"There is no gradient: {why}.\n"
        return
    yield f"## Gradient by {', '.join(made.names)}\n"
    yield f"```text\n{made.backward.program.source.strip()}\n```\n"
    yield f"```text\n{made.backward.merge}\n```\n"
    yield f"```text\n{made.backward.certificate}\n```\n"
