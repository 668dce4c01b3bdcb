"""Functions that every emitted module has beside those of Triton modules: descriptors for the copy engine, launches."""

from __future__ import annotations

RUNTIME = '''
GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
}


def suits(sizes=None, **tensors):
    """Whether the copy engine can address these tensors, by name, and those that a call makes at these sizes: whether they begin
    at multiples of 16 bytes and the positions of their last dim are next to each other, those of the others multiples of 16
    bytes apart."""
    known = sizes or {}
    if any(known.get(axis, unit) % unit for axis, unit in ENDS):
        return False
    return all(_suits(x) for name, x in tensors.items() if name in COPIED and x is not None)


def _suits(x):
    unit = 16 // x.element_size()
    if x.is_contiguous() and x.shape[-1] % unit == 0:
        return x.data_ptr() % 16 == 0 and x.numel() > 0
    rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    near = x.shape[-1] == 1 or x.stride(-1) == 1
    apart = all(extent == 1 or (step > 0 and step % unit == 0) for extent, step in rows)
    return near and apart and x.numel() > 0 and x.data_ptr() % 16 == 0


def descriptor(tensor, block):
    """What the copy engine is told of a tensor whose tiles are blocks of these sizes."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    unit = 16 // tensor.element_size()
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[tensor.dtype])
    steps = [unit if extent == 1 else step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*steps[:-1], 1], list(block), layout)


def workers(items, tensor):
    """Thread blocks of a persistent grid: one for each SM, or fewer where there are fewer items."""
    return min(items, torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def moved(known, tensor):
    """A descriptor as of an earlier call, of a tensor of the same shape and strides, which may be elsewhere."""
    if known.base is tensor:
        return known
    made = object.__new__(type(known))
    made.__dict__ = {**known.__dict__, "base": tensor}
    return made


def launch_roles(known, name, kernel, copied, tensors, numbers, signs, config, size, arguments):
    """Launches a kernel in roles. `signs` are conditions of numbers, each value of which is a binary. `arguments` makes grid,
    blocks of the copies, integers and constants from settings, at the first call of a kind; later ones go straight to what
    Triton compiled."""
    key = name, *signs
    if key in known:
        compiled, descriptors, integers, constants = known[key]
        descriptors = [moved(each, x) for each, x in zip(descriptors, copied, strict=True)]
        compiled(*descriptors, *tensors, *integers, *numbers, *constants)
        return
    blocks = settings(name, config, size)
    grid, tiles, integers, constants = arguments(blocks)
    constants |= zip(SIGNS[name], signs, strict=True)
    if not all(map(_suits, copied)):
        raise ValueError(f"the copy engine cannot address a tensor of {name}: see suits()")
    descriptors = [descriptor(x, tile) for x, tile in zip(copied, tiles, strict=True)]
    options = {"num_warps": 4, "maxnreg": REGISTERS[name]}
    compiled = kernel[(grid,)](*descriptors, *tensors, *integers, *numbers, **constants, **options)
    if compiled is not None:
        known[key] = compiled[(grid, 1, 1)], descriptors, integers, tuple(constants.values())
'''
"""Their source. The module has the tables of Triton modules, COPIED, ENDS, REGISTERS, TILES, SETTLED and SIGNS."""

NAMES = ("suits", "descriptor", "moved", "workers", "launch_roles", "copy_in", "copy_out", "gl", "gluon")
"""Names that no other global of such a module may have."""
