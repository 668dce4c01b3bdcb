"""`eqfuse::call` as torch knows it. It is registered where eqfuse is imported, so that saved graphs find it."""

from __future__ import annotations

import torch

from eqfuse.operator.batch import rule
from eqfuse.operator.content import Make, set_make
from eqfuse.operator.derivative import recorded
from eqfuse.operator.library import run, shaped

SCHEMA = "call(str kernel, str names, Tensor[] tensors, SymInt[] integers=[], float[] reals=[]) -> Tensor[]"
"""The numbers have defaults: torch converts no list that is not given, which is an eighth of what a call takes."""
NAME = "eqfuse::call"

_registered: list[object] = []
"""torch forgets what is registered with a library that nobody holds."""


def register_operator(make: Make) -> None:
    """Registers the operator; `make` compiles the kernel of a content that no kernel here has."""
    set_make(make)
    library = torch.library.Library("eqfuse", "DEF")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
    for key, implementation in (("CPU", run), ("CUDA", run), ("Autograd", recorded)):
        library.impl("call", implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(NAME, shaped, lib=library)
    torch.library.register_vmap(NAME, rule, lib=library)
    _registered.append(library)
