"""Calls like the one before them: torch's own guards compare the tensors of a call with those of the last one, all at once.

A key (`arguments.call_key`) is made of seven things of each tensor, which takes longer than to launch a kernel. What the guards of
torch's compiler compare is more than what a key has: classes, dispatch keys, dtypes, devices, sizes and strides, whether
they require grad. Addresses and numbers are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from eqfuse.arguments import ALIGNMENT, is_traced
from eqfuse.threads import is_plain

Quick = Callable[[Mapping[str, Any], Any], Any]
"""The outputs of a call with these values and sizes, where it is like one that is known; else None."""


def _never(values: Mapping[str, Any], sizes: Any) -> None:
    return None


def quick(
    call: Callable[[Mapping[str, Any], list[int]], Any], values: Mapping[str, Any], sizes: Any
) -> Quick:
    """What runs calls like this one, which has a key, by `call`: none where torch has no such guards, or there is nothing to
    compare."""
    tensors = [place for place, value in enumerate(values.values()) if isinstance(value, torch.Tensor)]
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or not tensors or (sizes is not None and type(sizes) is not dict):
        return _never
    names, given = tuple(values), tuple(values.values())
    whole = {place: value for place, value in enumerate(given) if type(value) is int}
    real = [place for place, value in enumerate(given) if type(value) is float]
    kind, wanted = type(sizes), None if sizes is None else dict(sizes)
    take = itemgetter(*tensors) if len(tensors) > 1 else lambda given: (given[tensors[0]],)
    try:
        check = guards(*take(given), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError):  # another version's
        return _never
    unaligned = [each.data_ptr() & ALIGNMENT != 0 for each in take(given)]
    are_aligned = not any(unaligned)
    is_tracked = any(each.requires_grad for each in take(given))

    def run(values: Mapping[str, Any], sizes: Any) -> Any:
        if tuple(values) != names or type(sizes) is not kind or sizes != wanted:
            return None
        given = tuple(values.values())
        tensors = take(given)
        if not check(*tensors) or not is_plain() or is_traced():
            return None
        if maybe_current_level() is not None or forward_ad._current_level >= 0:
            return None
        if is_tracked and torch.is_grad_enabled():
            return None
        for place in real:
            if type(given[place]) is not float:
                return None
        for place, number in whole.items():
            if type(given[place]) is not int or given[place] != number:
                return None
        addresses = []
        together = 0
        for each in tensors:
            address = each.data_ptr()
            together |= address
            addresses.append(address)
        if together & ALIGNMENT if are_aligned else unaligned != [a & ALIGNMENT != 0 for a in addresses]:
            return None
        return call(values, addresses)

    return run
