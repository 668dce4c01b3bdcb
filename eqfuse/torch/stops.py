"""Where a function of torch stops gradients: `detach`, blocks without gradients, and what torch does not record of them.

`torch.export` keeps `detach` as an operator, and a block under `torch.no_grad()` as a graph of its own, which its
decompositions write out again: here its results are detached before. What it does not record at all is seen while the
function runs: `x.data`, gradients that the function takes itself, hooks, functions with a derivative of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from eqfuse.errors import EqfuseError
from eqfuse.torch.translate import Refused

_DETACH, _DETACH_IN_PLACE = torch.ops.aten.detach.default, torch.ops.aten.detach_.default
_BLOCK = torch.ops.higher_order.wrap_with_set_grad_enabled


@dataclass
class Seen(TorchFunctionMode):
    """What runs while a function is exported, some functions of torch with others `instead`. `own` is whether some of it has
    a derivative that is not torch's."""

    instead: Mapping[Any, Callable[..., Any]]
    own: bool = False
    _enabled: list[bool] = field(default_factory=lambda: [torch.is_grad_enabled()])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            self._enabled.append(args[0])
        elif torch.is_inference_mode_enabled():
            raise EqfuseError("it runs under torch.inference_mode", hint="write torch.no_grad()")
        elif self._enabled[-1] and not torch.is_grad_enabled():
            self.own = True  # the forward of a torch.autograd.Function: nothing else is silent about it
        if getattr(func, "__self__", None) is torch.Tensor.data:
            return args[0].detach()
        if func in (torch.Tensor.register_hook, torch.Tensor.backward, torch.autograd.backward):
            name = func.__name__
            raise EqfuseError(
                f"it calls {name!r}", hint="a program has no effects: call it outside of the function"
            )
        found = self.instead.get(func, func)(*args, **kwargs)
        if func is torch.autograd.grad and not kwargs.get("create_graph", False):
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)
        return found


def with_detached_blocks(exported: Any) -> Any:
    """An exported program in which everything that a gradient does not pass is behind a `detach`. Raises EqfuseError for
    what changes a tensor behind the back of its gradient."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in _in_place(module.graph):
                _check_change(node, module is exported.graph_module)
            _out_of_place(module.graph, exported.graph_signature.output_specs)
            for node in module.graph.nodes:
                if node.target is _BLOCK and not node.args[0]:
                    block = getattr(module, node.args[1].target)
                    for inner in _in_place(block.graph):
                        origin, _ = _origin(inner.args[0])
                        _check_block(inner, origin, block.graph, node.args[2:])
                    _detach_outputs(block)
            module.recompile()
    return exported


def _in_place(graph: fx.Graph) -> Iterator[fx.Node]:
    """What changes a tensor."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield node


def _origin(node: Any) -> tuple[Any, bool]:
    """The node that made the elements which another one is a view of, and whether some view of them is detached."""
    is_detached = False
    while isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None:
            break
        is_detached |= node.target is _DETACH
        node = node.args[0]
    return node, is_detached


_BEHIND = "it changes elements of a tensor that a gradient passes, where none is recorded"


def _check_change(node: fx.Node, is_whole: bool) -> None:
    origin, is_detached = _origin(node.args[0])
    is_input = is_whole and isinstance(origin, fx.Node) and origin.op == "placeholder"
    if is_detached and not is_input:
        raise Refused(node, _BEHIND).error()


def _check_block(node: fx.Node, origin: Any, graph: fx.Graph, given: tuple[Any, ...]) -> None:
    if isinstance(origin, fx.Node) and origin.op == "placeholder":
        places = [each for each in graph.nodes if each.op == "placeholder"]
        of = given[places.index(origin)]
        if not isinstance(of, fx.Node) or of.op != "placeholder":  # that is refused as a change of an input
            raise Refused(node, _BEHIND).error()


def _out_of_place(graph: fx.Graph, outputs: list[Any]) -> None:
    """What reads a tensor that is detached in place reads a detached one from there on."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is _DETACH_IN_PLACE:
            node.target = _DETACH
            of = node.args[0]
            of.replace_all_uses_with(node, lambda user, node=node: order[user] > order[node])
            for spec in outputs:
                if getattr(spec.arg, "name", None) == of.name:
                    spec.arg.name = node.name


def _detach_outputs(block: fx.GraphModule) -> None:
    (last,) = [node for node in block.graph.nodes if node.op == "output"]

    def detached(value: fx.Node) -> fx.Node:
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        with block.graph.inserting_before(last):
            made = block.graph.call_function(_DETACH, (value,))
        made.meta = dict(value.meta)
        return made

    last.args = (fx.map_arg(last.args[0], detached),)
    block.recompile()
