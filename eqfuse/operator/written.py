"""How Inductor writes a call of `eqfuse::call`: as a call of a `Site`, not of the operator.

The operator takes Python twice through torch's dispatcher, with two strings, and looks at all tensors. Code that Inductor has written
knows what its tensors are: what is left for a site is to see which of them lie at multiples of 16 bytes, and, where their sizes
are symbols, how long they are this time. Code for C++, as that of packages, has the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from eqfuse.errors import EqfuseError

REGISTRY = "torch._inductor.codegen.custom_extern_kernel_codegen"
OPERATOR = "torch.ops.eqfuse.call.default"


def offer() -> None:
    """Tells Inductor, where it is loaded and asks how operators are written: versions before 2.11 do not."""
    module = sys.modules.get(REGISTRY)
    if module is not None and OPERATOR not in module.CUSTOM_EXTERN_KERNEL_CODEGEN:
        module.CUSTOM_EXTERN_KERNEL_CODEGEN[OPERATOR] = module.CustomCodegen(python=_write)


def check_outputs(outputs: int) -> None:
    """Raises EqfuseError where Inductor writes a call in C++ whose only output that would take for a pointer: the process would die
    of it. A package has the operator's outputs by another way."""
    module = sys.modules.get("torch._inductor.virtualized")
    graph = module.V.graph if module is not None else None
    if outputs == 1 and getattr(graph, "cpp_wrapper", False) and not getattr(graph, "aot_mode", True):
        raise EqfuseError(
            "torch's compiler cannot call this kernel from C++ (cpp_wrapper)",
            hint="compile the kernel with visible=True, or without cpp_wrapper",
        )


def _write(node: Any, writeline: Callable[[Any], None]) -> None:
    """Writes one call. `node` is Inductor's `FallbackKernel`."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    if getattr(V.graph, "fx_wrapper", False):  # it makes a graph of what is written
        writeline(ExternKernelAllocLine(wrapper, node))
        return
    given: list[str] = [*node.codegen_args(), *node.codegen_kwargs()]
    content, names, *rest = given
    site = f"eqfuse_{node.get_name()}"
    is_fixed = all(map(_is_fixed, node.inputs))
    wrapper.add_import_once("from eqfuse.operator.site import Site")
    wrapper.add_import_once(f"{site} = Site({content}, {names}, {is_fixed})")
    writeline(f"{wrapper.declare}{node.get_name()} = {site}({', '.join(rest)}){wrapper.ending}")


def _is_fixed(node: Any) -> bool:
    """Whether the sizes and strides of a tensor of the graph are numbers, as far as it has been laid out."""
    strides = node.maybe_get_stride()
    if strides is None:
        return False
    numbers: Sequence[Any] = (*node.get_size(), *strides)
    return all(getattr(number, "is_number", isinstance(number, int)) for number in numbers)
