"""Guards: relations of sizes at which an exported program is that of the function.

Where code asks about a size, as `range(n // 4)` and `if n > m` do, torch decides at the sizes of the examples, and
records what it decided. Guards about how a tensor lies in memory are left out: no position depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from eqfuse.torch.positions import Size

LAYOUT = (
    "is_contiguous", "check_contiguous_sizes_strides", "are_strides_like_channels_last", "are_strides_like_channels_last_or_false",
    "_reshape_view_helper_core_alg", "_collapse_view_helper", "_broadcast_in_dim_meta",
)  # fmt: skip
"""Functions of torch that ask about sizes to know how a tensor lies in memory."""

INDEXING = "_compute_slice_index", "__torch_function__"
"""Functions in which torch asks whether a slice ends inside of a dimension, and whether an index does."""


@dataclass(frozen=True)
class Guard:
    """A relation of symbols that are sizes, with its text: `(x.shape[0]//4) == 2`."""

    relation: Any
    text: str

    def holds(self, sizes: Mapping[Any, int]) -> bool:
        return str(self.relation.subs(sizes)) != "False"


def equate_alike(nodes: Iterable[Any]) -> None:
    """Makes one size of two that are as long in the examples, where a guard says that something made of them is equal and it is
    for any size that both have: `(a + 1)//2 == (b + 1)//2` of first halves, `a*b == c*d` of flat views. A call in which they differ is
    refused, as torch.compile compiles one anew: what is read along both would not be inside for all that solve the equation."""
    import sympy

    sizes = {size.node.expr: size for size in _symbolic(nodes) if size.node.expr.is_Symbol}
    if not sizes:
        return
    environment = next(iter(sizes.values())).node.shape_env
    for guard in list(environment.guards):
        relation = environment.replace(guard.expr)
        if not isinstance(relation, sympy.Eq) or not relation.free_symbols <= sizes.keys():
            continue
        if not _decides_code(guard):
            continue
        left, right = (
            sorted(side.free_symbols - other.free_symbols, key=str)
            for side, other in ((relation.lhs, relation.rhs), (relation.rhs, relation.lhs))
        )
        for chosen in permutations(left, len(right)) if len(left) == len(right) else ():
            pairs = dict(zip(right, chosen, strict=True))
            alike = all(sizes[one].node.hint == sizes[other].node.hint for one, other in pairs.items())
            if alike and sympy.expand(relation.lhs - relation.rhs.xreplace(pairs)) == 0:
                for one, other in pairs.items():
                    _any(torch)._check(sizes[one] == sizes[other])
                break


def guards_of(
    nodes: Iterable[Any], shapes: Iterable[tuple[str, tuple[Size, ...] | None]]
) -> tuple[Guard, ...]:
    """The guards of an exported program with the placeholders `nodes`, whose inputs have these names and shapes."""
    import sympy

    symbolic = next(_symbolic(nodes), None)
    if symbolic is None:
        return ()
    names: dict[Any, Any] = {}
    for name, shape in shapes:
        for dimension, size in enumerate(shape or ()):
            if not isinstance(size, int) and size.is_Symbol:
                names.setdefault(size, sympy.Symbol(f"{name}.shape[{dimension}]", integer=True))
    found: dict[Any, Guard] = {}
    environment = symbolic.node.shape_env
    for guard in environment.guards:
        relation = environment.replace(guard.expr)
        if relation.free_symbols and relation.free_symbols <= names.keys() and _decides_code(guard):
            found.setdefault(relation, Guard(relation, _text(relation.xreplace(names))))
    return tuple(found.values())


def _symbolic(nodes: Iterable[Any]) -> Iterator[Any]:
    """The sizes of placeholders that are no numbers."""
    for node in nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            yield from (size for size in map(_any, value.shape) if isinstance(size, torch.SymInt))


def _any(value: Any) -> Any:
    """A value of which type checkers know nothing: a size is said to be an int, which has no symbols."""
    return value


def _decides_code(guard: Any) -> bool:
    """Whether results depend on it. All guards of code outside of torch do; of torch's own the equations, as of the
    number of parts that `split` makes, and ends of indexing, and not what it asks to choose between ways to the same result."""
    import sympy

    place = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    inside = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    if not str(getattr(place, "filename", inside[0])).startswith(inside):
        return True
    name = getattr(place, "name", None)
    if isinstance(guard.expr, sympy.Eq):
        return name not in LAYOUT
    return name in INDEXING and not isinstance(guard.expr, sympy.Ne)


def _text(relation: Any) -> str:
    sign = {"Equality": "==", "Unequality": "!="}.get(type(relation).__name__)
    return f"{relation.lhs} {sign} {relation.rhs}" if sign else str(relation)
