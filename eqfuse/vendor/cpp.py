"""A kernel as C++ with a header in C, which need a compiler alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from eqfuse.errors import EqfuseError
from eqfuse.kernel import Kernel
from eqfuse.lowered import native_source
from eqfuse.names import Names
from eqfuse.tile.native.build import FLAGS, PRELUDE, prelude
from eqfuse.tile.nodes import Dot
from eqfuse.tile.storage import buffer_dtypes
from eqfuse.tile.walk import nested

TYPES: Mapping[str, tuple[str, str]] = {
    "f16": ("uint16_t", "np.float16"),
    "f32": ("float", "np.float32"),
    "f64": ("double", "np.float64"),
    "i8": ("int8_t", "np.int8"),
    "u8": ("uint8_t", "np.uint8"),
    "i16": ("int16_t", "np.int16"),
    "i32": ("int32_t", "np.int32"),
    "i64": ("int64_t", "np.int64"),
    "bool": ("uint8_t", "np.bool_"),
}
"""What an element is in C, and in numpy."""

SHARED = ("product", "masked", "several")
"""Functions of the library of matrix products, which kernels call through pointers."""


KEYWORDS = [
    "alignas",
    "alignof",
    "asm",
    "auto",
    "bool",
    "break",
    "case",
    "catch",
    "char",
    "char16_t",
    "char32_t",
    "const",
    "constexpr",
    "const_cast",
    "continue",
    "decltype",
    "default",
    "delete",
    "do",
    "double",
    "dynamic_cast",
    "else",
    "enum",
    "explicit",
    "export",
    "extern",
    "float",
    "for",
    "friend",
    "goto",
    "if",
    "inline",
    "int",
    "long",
    "mutable",
    "namespace",
    "new",
    "noexcept",
    "nullptr",
    "operator",
    "private",
    "protected",
    "public",
    "register",
    "reinterpret_cast",
    "restrict",
    "return",
    "run",
    "short",
    "signed",
    "sizeof",
    "static",
    "static_assert",
    "static_cast",
    "struct",
    "switch",
    "template",
    "this",
    "thread_local",
    "throw",
    "typedef",
    "typeid",
    "typename",
    "union",
    "unsigned",
    "using",
    "virtual",
    "void",
    "volatile",
    "wchar_t",
    "while",
]
"""Names that no argument has."""


class CFunction:
    """A function in C around the kernels of a shape. Its arguments are the tensors of the program and its outputs, contiguous; the sizes of
    axes, and of dimensions without one; the scalars; and how many threads to take."""

    def __init__(self, kernel: Kernel, name: str, results: Sequence[str] = ()) -> None:
        """Of a kernel; `results` are names of its outputs, where they are not the program's."""
        self._native = native_source(kernel.compiled, kernel.program)
        self._name, self._program = name, kernel.program
        tiles, interface = self._native.tiles, self._native.interface
        self._dtypes = {**kernel.compiled.dtypes, **interface.dtypes, **buffer_dtypes(tiles)}
        for each in interface.tensors:
            if self._dtypes[each] not in TYPES:
                message = f"C has no elements of {self._dtypes[each]}, which {each} is made of"
                raise EqfuseError(message, hint="--target sm_90 writes Triton")
        self._inputs = [tensor.name for tensor in kernel.program.tensors]
        self._outputs = [buffer.name for buffer in tiles.buffers if buffer.is_output]
        self._made = [buffer for buffer in tiles.buffers if not buffer.is_output]
        self._axes = {buffer.name: tuple(buffer.axes) for buffer in tiles.buffers}
        names = Names((*KEYWORDS, "threads", "failure", name))
        words = (*interface.tensors, *interface.reals, *interface.integers)
        self._known = dict(zip(self._outputs, results or self._outputs, strict=True))
        self._called = {each: names.fresh(self._known.get(each, each)) for each in words}
        self._dims: dict[str, list[str]] = {}
        own = {axis for axis in interface.axes if axis in kernel.compiled.extents}
        given = sorted(own - kernel.program.domains.keys() - kernel.program.lengths.keys())
        self._sizes = {axis: names.fresh(axis) for axis in given}
        for tensor in kernel.program.tensors:
            for place, axis in enumerate(tensor.axes):
                text = self._size(axis) if axis else names.fresh(f"{tensor.name}_{place}")
                self._dims.setdefault(tensor.name, []).append(text)
                if not axis:
                    self._sizes[text] = text

    @property
    def sizes(self) -> dict[str, str]:
        """What sizes of axes are called."""
        return {axis: text for axis, text in self._sizes.items() if text not in self.dimensions}

    @property
    def numbers(self) -> dict[str, str]:
        """The types of scalars, as in ctypes."""
        interface = self._native.interface
        return {
            **dict.fromkeys(interface.reals, "ctypes.c_double"),
            **dict.fromkeys(interface.integers, "ctypes.c_int64"),
        }

    def _size(self, axis: str) -> str:
        """The text of a size: an argument, or a number."""
        root = axis
        while root in (domains := {**dict(self._native.tiles.domains), **self._program.domains}):
            root = domains[root]
        return self._sizes.get(root) or str(self._native.sizes[root])

    def _shape(self, tensor: str) -> Sequence[str]:
        return [*map(self._size, self._axes[tensor])] if tensor in self._axes else self._dims.get(tensor, [])

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """What they are called, and their types."""
        interface = self._native.interface
        given = [(each, f"const {TYPES[self._dtypes[each]][0]}*") for each in self._inputs]
        given += [(each, f"{TYPES[self._dtypes[each]][0]}*") for each in self._outputs]
        numbers = [(each, "double") for each in interface.reals]
        numbers += [(each, "int64_t") for each in interface.integers]
        sizes = [(each, "int64_t") for each in self._sizes.values()]
        tensors, scalars = ([(self._called[each], kind) for each, kind in part] for part in (given, numbers))
        return [*tensors, *sizes, *scalars, ("threads", "int")]

    @property
    def results(self) -> dict[str, tuple[str, Sequence[str]]]:
        """The dtypes of outputs, as in numpy, and the names of their sizes."""
        return {
            self._known[each]: (TYPES[self._dtypes[each]][1], self._shape(each)) for each in self._outputs
        }

    @property
    def inputs(self) -> dict[str, str]:
        """The dtypes of inputs, as in numpy."""
        return {each: TYPES[self._dtypes[each]][1] for each in self._inputs}

    @property
    def dimensions(self) -> dict[str, tuple[str, int]]:
        """Sizes of dimensions without an axis: the tensor, and which dimension."""
        found = {}
        for tensor in self._program.tensors:
            for place, axis in enumerate(tensor.axes):
                if not axis:
                    found[self._dims[tensor.name][place]] = tensor.name, place
        return found

    def declaration(self) -> str:
        """The head of the function in C."""
        return f"int {self._name}({', '.join(f'{kind} {name}' for name, kind in self.arguments)})"

    def comment(self) -> str:
        """What the function computes, as a comment in C."""
        every = (*self._inputs, *self._outputs)
        shapes = [f"{self._called[each]}[{', '.join(self._shape(each))}]" for each in every]
        program = self._program.source.strip().replace("*/", "* /")
        for name, known in self._known.items():
            program = re.sub(rf"\b{name}\b", known, program)
        lines = [
            f"/* On contiguous arrays {', '.join(shapes)}:",
            "",
            *(f"     {line}".rstrip() for line in program.splitlines()),
        ]
        return "\n".join([*lines, "*/"])

    @property
    def calls_products(self) -> bool:
        """Whether the library of matrix products is needed."""
        statements = (stmt for kernel in self._native.tiles.kernels for stmt in nested(kernel.body))
        return any(isinstance(getattr(stmt, "op", None), Dot) for stmt in statements)

    def definition(self) -> str:
        """The kernels, and the function that runs them."""
        inside = f"namespace {self._name}_kernels {{\n{self._native.text}}}\n"
        body = "\n".join(self._body())
        return f'{inside}\nextern "C" {self.declaration()} {{\n{body}\n}}\n'

    def _body(self) -> Iterator[str]:
        interface = self._native.interface
        if self.calls_products:
            for each in SHARED:
                listed = ", ".join(f"(void*)products::{each}_{dtype}" for dtype in ("f32", "f64", "bf16"))
                yield f"  void* {each}_functions[] = {{{listed}}};"
            given = ", ".join(f"{each}_functions" for each in SHARED)
            yield f"  use_products({given}, (void*)products::exchange_threads);"
        for buffer in self._made:
            count = " * ".join([*self._shape(buffer.name), f"sizeof({TYPES[self._dtypes[buffer.name]][0]})"])
            yield f"  void* {self._called[buffer.name]} = __builtin_malloc({count});"
        yield f"  void* all_tensors[] = {{{', '.join(f'(void*){self._called[each]}' for each in interface.tensors)}, 0}};"
        layout = [text for each in interface.tensors for text in _layout(self._shape(each))]
        yield f"  const long long all_strides[] = {{{', '.join([*layout, '0'])}}};"
        yield f"  const long long all_sizes[] = {{{', '.join([*map(self._size, interface.axes), '0'])}}};"
        yield f"  const double all_reals[] = {{{', '.join([*map(self._called.__getitem__, interface.reals), '0'])}}};"
        yield f"  const long long all_integers[] = {{{', '.join([*map(self._called.__getitem__, interface.integers), '0'])}}};"
        yield "  long long failure[4] = {0, 0, 0, 0};"
        yield f"  {self._name}_kernels::run(all_tensors, all_strides, all_sizes, all_reals, all_integers, threads, failure);"
        yield from (f"  __builtin_free({self._called[buffer.name]});" for buffer in self._made)
        yield "  return failure[0] ? 1 + (int)failure[1] : 0;"


def header(name: str, functions: Sequence[CFunction]) -> str:
    """The header of several functions."""
    guard, flags = f"{name.upper()}_H", " ".join(flag for flag in FLAGS if flag != "-w")
    lines = [
        f"/* Compile {name}.cpp by g++ or clang++ {flags}",
        "   Functions run on so many threads. They give 0, or where a position in data is outside of what it is read from 1 + the number of that array. */",
        f"#ifndef {guard}",
        f"#define {guard}",
        "#include <stdint.h>",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
    ]
    for function in functions:
        lines += ["", function.comment(), f"{function.declaration()};"]
    return "\n".join([*lines, "", "#ifdef __cplusplus", "}", "#endif", "#endif", ""])


def source(name: str, functions: Sequence[CFunction]) -> str:
    """The C++ of several functions."""
    parts = [f'#include "{name}.h"\n', prelude(PRELUDE)]
    if any(function.calls_products for function in functions):
        # A library of its own, whose functions have the names of the pointers to them.
        parts += ["namespace products {", prelude(("products.h",)), "}"]
    parts += [function.definition() for function in functions]
    return "\n".join(parts).replace('extern "C" void', "static void")


def _layout(shape: Sequence[str]) -> Iterator[str]:
    """Stride and size of each dimension of a contiguous tensor."""
    for place, size in enumerate(shape):
        yield " * ".join(shape[place + 1 :]) or "1"
        yield size
