"""`eqfuse::call` as torch knows it. It is registered where eqfuse is imported, so that saved graphs find it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from eqfuse.operator.batch import of_older_vmap, rule
from eqfuse.operator.content import Make, set_make
from eqfuse.operator.derivative import recorded
from eqfuse.operator.library import opened, run, shaped

SCHEMA = "(str kernel, str names, Tensor[] tensors, SymInt[] integers=[], float[] reals=[]) -> Tensor[]"
"""The numbers have defaults: torch converts no list that is not given, which is an eighth of what a call takes."""
NAMES = ("call", "visible")

OF_KEYS = (("CPU", run), ("CUDA", run), ("Autograd", recorded), ("Batched", of_older_vmap))

_registered: list[object] = []
"""torch forgets what is registered with a library that nobody holds."""


def register_operator(make: Make) -> None:
    """Registers the operator; `make` compiles the kernel of a content that no kernel here has."""
    set_make(make)
    library = torch.library.Library("eqfuse", "DEF")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    for name in NAMES:
        library.define(name + SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
        for key, implementation in OF_KEYS:
            library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"eqfuse::{name}", shaped, lib=library)
        torch.library.register_vmap(f"eqfuse::{name}", rule, lib=library)
    torch.library.register_torch_dispatch("eqfuse::visible", FunctionalTensorMode, _open, lib=library)
    _registered.append(library)


def _open(mode: Any, op: Any, types: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Puts in place of the operator what it launches; `torch.export` keeps it, until its graph is compiled."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    if custom_triton_ops_decomposition_disabled():  # type: ignore[no-untyped-call]
        return mode.__torch_dispatch__(op, types, arguments, named)
    with mode:
        return opened(*arguments, **named)
