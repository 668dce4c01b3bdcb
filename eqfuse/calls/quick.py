"""Calls like the one before them: torch's own guards compare the tensors of a call with those of the last one, all at once.

A key (`arguments.call_key`) is made of seven things of each tensor, which takes longer than to launch a kernel. What the guards of
torch's compiler compare is more than what a key has: classes, dispatch keys, dtypes, devices, sizes and strides, whether
they require grad. Dispatch keys are those of the thread too: those of a transform, of inference mode or of `torch.jit.trace` are others.
Addresses, numbers, modes and forward gradients are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch.autograd import forward_ad

from eqfuse.arguments import ALIGNMENT
from eqfuse.threads import is_plain

Quick = Callable[[Mapping[str, Any], Any], Any]
"""The outputs of a call with these values and sizes, where it is like one that is known; else None."""


def _never(values: Mapping[str, Any], sizes: Any) -> None:
    return None


def quick(
    call: Callable[[Mapping[str, Any], Sequence[int]], Any], values: Mapping[str, Any], sizes: Any
) -> Quick:
    """What runs calls like this one, which has a key, by `call`: none where torch has no such guards, or there is nothing to
    compare."""
    tensors = {f"v{n}": value for n, value in enumerate(values.values()) if isinstance(value, torch.Tensor)}
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or not tensors or (sizes is not None and type(sizes) is not dict):
        return _never
    try:
        check = guards(*tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError):  # another version's
        return _never
    # The guards read strides, and end the process where a tensor has none: only a tensor of the same class with memory, and that is
    # not nested, gets to them.
    classes = [f"type({name}) is not t{name} or {name}.is_nested" for name in tensors]
    others = ["not is_plain()", "forward_ad._current_level >= 0"]
    others += ["sizes is not None" if sizes is None else "type(sizes) is not dict or sizes != wanted"]
    whole = {}
    for place, value in enumerate(values.values()):
        if type(value) is int:
            whole[f"n{place}"] = value
            others.append(f"type(v{place}) is not int or v{place} != n{place}")
        elif type(value) is float:
            others.append(f"type(v{place}) is not float")
    if any(tensor.requires_grad for tensor in tensors.values()):
        others.append("not is_grad_enabled()" if torch.is_grad_enabled() else "is_grad_enabled()")
    unaligned = [name for name, tensor in tensors.items() if tensor.data_ptr() & ALIGNMENT]
    if unaligned:
        kept = [f"({'not ' * (name not in unaligned)}a{name} & {ALIGNMENT})" for name in tensors]
        aligned = " and ".join(kept)
    else:
        aligned = f"not ({' | '.join(f'a{name}' for name in tensors)}) & {ALIGNMENT}"
    aligned = " and ".join([*(f"a{name}" for name, each in tensors.items() if each.data_ptr()), aligned])
    lines = [
        "def run(values, sizes):",
        "    if tuple(values) != names:",
        "        return None",
        f"    {', '.join(f'v{n}' for n in range(len(values)))}, = values.values()",
        f"    if {' or '.join(classes)}:",
        "        return None",
        "    try:",
        *[f"        a{name} = {name}.data_ptr()" for name in tensors],
        "    except RuntimeError:",
        "        return None",
        f"    if not check({', '.join(tensors)}) or {' or '.join(others)}:",
        "        return None",
        f"    return call(values, ({', '.join(f'a{name}' for name in tensors)},)) if {aligned} else None",
    ]
    namespace = {
        "names": tuple(values),
        "wanted": None if sizes is None else dict(sizes),
        "call": call,
        "check": check,
        "is_plain": is_plain,
        "forward_ad": forward_ad,
        "is_grad_enabled": torch.is_grad_enabled,
        **{f"t{name}": type(tensor) for name, tensor in tensors.items()},
        **whole,
    }
    exec(_code("\n".join(lines)), namespace)  # noqa: S102  (the text above)
    found: Quick = namespace["run"]
    return found


@lru_cache(256)
def _code(text: str) -> CodeType:
    return compile(text, "<eqfuse call>", "exec")
