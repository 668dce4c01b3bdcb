"""Functions that every emitted module has, whatever its kernels: sizes, settings, buffers, launches."""

from __future__ import annotations

from collections.abc import Iterable

RUNTIME = '''
CALLS = {}
MOST_CALLS = 1024


def settings(kernel, config, size):
    """Settings of one launch: the defaults, those in `config`, and the blocks of whole axes."""
    chosen = {**CONFIGS[kernel], **(config or {}).get(kernel, {})}
    if unknown := sorted(chosen.keys() - CONFIGS[kernel].keys()):
        raise ValueError(f"{kernel} has no setting {unknown[0]}, but {', '.join(CONFIGS[kernel])}")
    for block, axis in WHOLE[kernel].items():
        chosen[block] = triton.next_power_of_2(max(size[axis], 1))
    for block, (least, most) in LIMITS[kernel].items():
        chosen[block] = max(chosen[block], least)
        if most is not None and chosen[block] > most:
            raise ValueError(f"{block} of {kernel} may not be more than {most}")
    return chosen


def axis_sizes(tensors, sizes):
    """The extent of every axis, from `sizes` and the shapes of the tensors, which have to agree."""
    found = {**SIZES, **(sizes or {})}
    device = next(iter(tensors.values())).device if tensors else None
    for name, tensor in tensors.items():
        dtype, axes = TENSORS[name]
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; these kernels were made for {dtype}")
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} has {tensor.dim()} dims, not {len(axes)}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, other tensors are on {device}")
        for axis, extent in zip(axes, tensor.shape, strict=True):
            if axis is not None and found.setdefault(axis, extent) != extent:
                raise ValueError(f"{name} has {extent} positions of axis {axis}, not {found[axis]}")
    for axis in (axis for _, axes in TENSORS.values() for axis in axes):
        if axis is not None and axis not in found:
            raise ValueError(f"no tensor has the axis {axis}: give its extent, sizes={{{axis!r}: ...}}")
    return found


def buffer(name, tensor, size, device):
    """`tensor` if it fits, or a new one where it is None."""
    dtype, axes = TENSORS[name]
    shape = tuple(size[axis] for axis in axes)
    if tensor is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not {shape} of {dtype}")
    return tensor


def index_dtype(*tensors):
    """The dtype of positions: 64 bits where an element is 2**31 or more away from its tensor's first."""
    spans = (sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in tensors)
    return tl.int64 if max(spans) >= 2**31 else tl.int32


def overlaps(tensor):
    """Whether the device launches a kernel before the one before it has ended: NVIDIA's from Hopper on."""
    is_nvidia = tensor.is_cuda and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(tensor.device) >= (9, 0)


def call_key(tensors, sizes, config, *integers):
    """What the launches of a call depend on, besides addresses. These kernels have no derivative."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                raise ValueError("a tensor requires grad: call under torch.no_grad(), or detach it")
    kinds = [x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    return (*kinds, *(sizes or {}).items(), str(config), *integers)


def remembered(key):
    """Sizes and launches of earlier calls of this kind, by name; at the first one nothing."""
    if len(CALLS) >= MOST_CALLS:
        CALLS.clear()
    return CALLS.setdefault(key, {})


def launch(known, name, kernel, tensors, numbers, config, size, arguments):
    """Launches a kernel. `arguments` makes grid, integers and constants from settings, at the first call of a
    kind; later ones go straight to what Triton compiled. Its interpreter compiles nothing."""
    if name in known:
        compiled, grid, integers, _, constants = known[name]
        compiled[(grid, 1, 1)](*tensors, *integers, *numbers, *constants)
        return
    blocks = settings(name, config, size)
    grid, integers, constants = arguments(blocks)
    options = {"num_stages": blocks["num_stages"]}
    if constants.get("WAITS"):
        options["launch_pdl"] = True
    given = (*tensors, *integers, *numbers)
    planned, refused = blocks["num_warps"], None
    for warps in dict.fromkeys((planned, 4, 8, 2, 1)):
        try:
            compiled = kernel[(grid,)](*given, **constants, **options, num_warps=warps)
            break
        except RuntimeError as error:
            # Some layouts break a pass of Triton's (its issue 8257); the number of warps decides them.
            if "PassManager" not in str(error):
                raise
            refused = refused or error
    else:
        raise refused
    if warps != planned:
        text = f"Triton refuses {name} in {planned} warps ({refused}); it runs in {warps}"
        warnings.warn(text, stacklevel=2)
    if compiled is not None:
        known[name] = compiled, grid, integers, numbers, tuple(constants.values())
'''
"""Their source. The module has the tables TENSORS, SIZES, CONFIGS, LIMITS and WHOLE, and PRODUCTS where it calls the library."""

_MATRICES = '''
def form(dims, *groups):
    """How a tensor gets one dimension for each group of axes: its dims that have several axes, the order of its axes, and
    how many each group has; None where nothing is done. `dims` are the axes of its own."""
    own = [axis for axes in dims for axis in axes]
    order = [own.index(axis) for group in groups for axis in group]
    several = [(place, axes) for place, axes in reversed(list(enumerate(dims))) if len(axes) > 1]
    counts = [len(group) for group in groups]
    is_same = order == sorted(order)
    return several, None if is_same else order, None if len(order) == len(groups) else counts


def matrices(tensor, form, sizes):
    """The tensor with one dimension for each group of axes of a form."""
    several, order, counts = form
    for place, axes in several:
        extents = [sizes[axis] for axis in axes]
        tensor = tensor.narrow(place, 0, prod(extents)).unflatten(place, extents)
    if order is not None:
        tensor = tensor.permute(order)
    if counts is None:
        return tensor
    extents = iter(tensor.shape)
    return tensor.reshape([prod(next(extents) for _ in range(count)) for count in counts])


@lru_cache(maxsize=None)
def product_of(name):
    """The function of torch's library that computes a product, the axes of what it makes, and the forms of that and of its
    operands."""
    (_, out), (_, first), (_, second) = PRODUCTS[name]
    whole, own, other = ([axis for axes in dims for axis in axes] for dims in (out, first, second))
    batch = [axis for axis in whole if axis in own and axis in other]
    rows = [axis for axis in whole if axis not in other]
    columns = [axis for axis in whole if axis not in own]
    summed = [axis for axis in own if axis not in whole]
    groups = [batch] if batch else []
    forms = form(out, *groups, rows, columns), form(first, *groups, rows, summed), form(second, *groups, summed, columns)
    return torch.bmm if batch else torch.mm, whole, *forms


def multiply(name, made, left, right):
    """`made` becomes the sums of products of two tensors over the axes that it lacks, by torch's library of matrix
    products."""
    product, whole, out, first, second = product_of(name)
    sizes = dict(zip(whole, made.shape))
    one, two = matrices(left, first, sizes), matrices(right, second, sizes)
'''

LIBRARY_IMPORTS = ("from functools import lru_cache", "from math import prod")

MULTIPLY = (
    _MATRICES
    + """    if made.is_contiguous():
        product(one, two, out=matrices(made, out, sizes))
    else:
        made.copy_(product(one, two).view(made.shape))
"""
)
"""What modules have where the library computes products."""

RECORDED_MULTIPLY = f"{_MATRICES}    made.copy_(product(one, two).view(made.shape))\n"
"""The same where launches are recorded."""

RUNTIME_NAMES = (
    *("settings", "axis_sizes", "buffer", "index_dtype", "overlaps", "call_key", "remembered", "launch"),
    *("multiply", "matrices", "form", "product_of", "prod", "lru_cache"),
    *("wrap_triton", "statically_known_true"),
)
"""Names of the functions; no other global of a module may have them."""


RECORDED_IMPORTS = (
    "from torch.fx.experimental.symbolic_shapes import statically_known_true",
    "from torch.library import wrap_triton",
)
_LAUNCHES = '''
def launch(known, name, kernel, tensors, numbers, config, size, arguments):
    """A launch that torch records, as those who compile or export a call see it."""
    blocks = settings(name, config, size)
    grid, integers, constants = arguments(blocks)
    options = {"num_warps": blocks["num_warps"], "num_stages": blocks["num_stages"]}
    wrap_triton(kernel)[(grid,)](*tensors, *integers, *numbers, **constants, **options)
'''


def without(source: str, names: Iterable[str]) -> str:
    """The source without the functions of these names."""
    parts = source.split("\n\n\n")
    return "\n\n\n".join(p for p in parts if not p.startswith(tuple(f"def {name}(" for name in names)))


_KEPT = ("index_dtype", "overlaps", "call_key", "remembered", "launch")
RECORDED = without(RUNTIME.partition("\n\n\n")[2], _KEPT).rstrip() + "\n\n" + _LAUNCHES
"""What modules have instead whose launches are recorded: nothing of a call is kept."""
