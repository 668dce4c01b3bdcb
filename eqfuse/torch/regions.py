"""Regions of a graph that may become one kernel: around each reduction, and with the matrix products before and behind it.

A region starts at a reduction that is no matrix product (softmax, a norm, a sum). It grows over elementwise operators,
views and further reductions, as long as nothing outside reads what is inside. What remains of positions and constants
alone is copied into each region that reads it, masks and indices. From this core come up to five candidates: without
other reductions, as it is, with the matrix products that it reads, with those that read it, and with both; and each
without copies at its front. Prices decide between them (`prices.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from eqfuse.arguments import DTYPE_NAMES
from eqfuse.operator.shapes import hint
from eqfuse.torch.operators.products import ATTENTION
from eqfuse.torch.operators.table import TABLE, argument_names, packet

PRODUCTS = frozenset(
    f"aten.{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot")
)
REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "any", "all", "argmax", "argmin", "var", "std",
        "var_mean", "linalg_vector_norm", "norm", "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax",
        "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm", "topk",
        "nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss", *ATTENTION,
        "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    )
)  # fmt: skip
FREE = frozenset(
    ["", *(f"aten.{name}" for name in ("view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "select", "slice", "split",
     "split_with_sizes", "alias", "detach", "unbind"))]
)  # fmt: skip
"""Views, and the parts of results with several."""
SUMS_BY_KEY = frozenset(
    f"aten.{name}" for name in ("scatter_add", "index_add", "scatter_reduce", "index_reduce")
)
"""Reductions over positions that a tensor selects, which are sorted."""
SCANS = frozenset({"higher_order.scan", "higher_order.associative_scan"})
"""Recurrences, whose steps are graphs that they call."""
WRITES = frozenset(
    f"aten.{name}" for name in ("scatter", "index_put", "_unsafe_index_put", "index_copy", "index_fill")
)  # fmt: skip
"""Writes at positions of a tensor, of which every position of the result would look at all; torch goes to each once."""
CONVOLUTIONS = frozenset({"aten.convolution"})
"""Products over windows, for which torch has libraries."""
RANDOM = frozenset(f"aten.{name}" for name in ("dropout", "native_dropout", "rrelu_with_noise_functional"))
"""Operators that are in a graph where they draw numbers."""
COPIES = frozenset({"aten.clone"})
"""What flattening makes of a view that has gaps: labels beside logits."""

LARGEST = 64
"""Nodes of a region that compute: a larger one is no candidate."""


@dataclass(frozen=True)
class Region:
    """Nodes of a graph, in its order. `copied` are those that others outside read too, and that stay there."""

    nodes: tuple[fx.Node, ...]
    copied: frozenset[fx.Node]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        inside = set(self.nodes)
        read = dict.fromkeys(each for node in self.nodes for each in node.all_input_nodes)
        return tuple(node for node in read if node not in inside)

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        inside = set(self.nodes)
        return tuple(
            node
            for node in self.nodes
            if node not in self.copied and any(user not in inside for user in node.users)
        )

    def with_views_of(self, sources: Collection[fx.Node]) -> Region:
        """The region with the views of some inputs of the graph that it reads: it reads these inputs themselves then, as they lie."""
        views: set[fx.Node] = set()
        for node in self.inputs:
            chain = []
            while packet(node.target) in FREE and kind(node) == "other" and len(node.all_input_nodes) == 1:
                chain.append(node)
                (node,) = node.all_input_nodes
            if node in sources:
                views.update(chain)
        if not views:
            return self
        inside = views.union(self.nodes)
        nodes = tuple(node for node in self.nodes[0].graph.nodes if node in inside)
        return Region(nodes, self.copied | views)

    @property
    def form(self) -> str:
        """What regions have in common that are alike: operators and arguments, shapes and dtypes, in order."""
        places = {node: f"%{place}" for place, node in enumerate((*self.inputs, *self.nodes))}
        rows = [
            (
                graph.print_readable(print_output=False) if (graph := called(node)) else str(node.target),
                fx.map_arg((node.args, node.kwargs), places.__getitem__),
                _form(node.meta.get("val")),
            )
            for node in self.nodes
        ]
        given = [_form(node.meta["val"]) for node in self.inputs]
        copied = [places[node] for node in self.nodes if node in self.copied]
        return repr((given, rows, [places[node] for node in self.outputs], copied))

    @property
    def name(self) -> str:
        """The operators that compute, in order."""
        kept = [
            packet(node.target).rpartition(".")[2]
            for node in self.nodes
            if kind(node) in ("product", "reduction")
        ]
        return " + ".join(name.removeprefix("_") for name in kept)


def called(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node stands for, which an operator calls."""
    found = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def kind(node: fx.Node) -> str:
    """`product`, `reduction`, `other` (translated, and neither), or `no`."""
    if called(node):
        return "other"
    name = packet(node.target)
    if node.op != "call_function" or not _is_known(node):
        return "no"
    if name in PRODUCTS:
        return "product"
    if name in REDUCTIONS | SUMS_BY_KEY | SCANS or _adds(node):
        return "reduction"
    if (
        name in TABLE
        and name not in WRITES | CONVOLUTIONS | RANDOM
        or getattr(node.target, "__name__", "") == "getitem"
    ):
        return "other"
    return "no"


def added_by_key(node: fx.Node) -> fx.Node | None:
    """What a node reduces by the positions that a tensor selects; None of others."""
    if packet(node.target) not in SUMS_BY_KEY and not _adds(node):
        return None
    given = arguments(node)
    source = next((given[name] for name in ("src", "source", "values") if name in given), None)
    return source if isinstance(source, fx.Node) else None


def _adds(node: fx.Node) -> bool:
    """Whether a write at positions adds to what is there."""
    is_put = packet(node.target) in ("aten.index_put", "aten._unsafe_index_put")
    return is_put and bool(arguments(node).get("accumulate", False))


def arguments(node: fx.Node) -> dict[str, Any]:
    """What an operator is given, by name."""
    return {**dict(zip(argument_names(node.target), node.args, strict=False)), **node.kwargs}


def _is_known(node: fx.Node) -> bool:
    """Whether the language has the dtypes of what a node reads and makes."""
    known = tensors_of([node, *node.all_input_nodes])
    return all(tensor.dtype in DTYPE_NAMES for tensor in known)


def computes(node: fx.Node) -> bool:
    """Whether a node is more than a view."""
    return packet(node.target) not in FREE


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node that is made of positions alone is better computed where it is read: a mask, an index, a number."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (not value.is_floating_point() or value.dim() == 0)


@dataclass
class Finder:
    """Candidates of one graph. `taken` are nodes that are part of a kernel already."""

    graph: fx.Graph
    taken: set[fx.Node]

    def __post_init__(self) -> None:
        self.order = {node: place for place, node in enumerate(self.graph.nodes)}
        self.fixed = {node for node in self.graph.nodes if self._is_fixed(node)}

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether a node is made of positions and constants alone, or only views an input."""
        pending, seen = [node], set()
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            if each.op == "placeholder":
                if isinstance(each.meta.get("val"), torch.Tensor):
                    return False
            elif kind(each) != "other" and not isinstance(each.meta.get("val"), torch.SymInt | int):
                return False
            pending += each.all_input_nodes
        return True

    def seeds(self) -> Iterator[fx.Node]:
        """Reductions that are in no kernel yet, in order."""
        for node in self.graph.nodes:
            if kind(node) == "reduction" and node not in self.taken:
                yield node

    def candidates(self, seed: fx.Node) -> list[Region]:
        """The regions around a reduction, the largest first."""
        core = self._grown({seed})
        tight = self._grown({seed}, ("other",))
        before = self._with(core, self._products_before(core))
        behind = self._with(core, self._products_behind(core))
        wide = self._with(before, self._products_behind(before))
        found: dict[tuple[fx.Node, ...], Region] = {}
        for nodes in (wide, before, behind, core, tight):
            for outside in (FREE, FREE | COPIES):
                region = self._region(self._without(outside, nodes))
                if region is not None:
                    found.setdefault(region.nodes, region)
        return list(found.values())

    def _grown(self, nodes: set[fx.Node], kinds: tuple[str, ...] = ("other", "reduction")) -> set[fx.Node]:
        """With all that may be computed where the nodes are: what only they read, and what only reads them."""
        found = set(nodes)
        while sum(map(computes, found)) < LARGEST:
            more = {
                each
                for node in found
                for each in (*node.all_input_nodes, *node.users)
                if each not in found and each not in self.taken and kind(each) in kinds
            }
            more = {each for each in more if self._joins(each, found)}
            if not more:
                break
            found |= more
        return found

    def _joins(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        """Whether nothing outside stands between a node and a region: it is read there alone, or all that it computes
        with comes from there or from before the region."""
        if node in self.fixed:
            return False
        if all(user in nodes for user in node.users):
            return not self._depends(node, nodes)
        reads = [each for each in node.all_input_nodes if each in nodes]
        if not reads:
            return False
        return not any(self._depends(each, nodes) for each in node.all_input_nodes if each not in nodes)

    def _depends(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        """Whether something on the way to a node, outside of a region, is computed from it."""
        first = min(self.order[each] for each in nodes)
        pending, seen = [node], set()
        while pending:
            each = pending.pop()
            if each in seen or self.order[each] < first:
                continue
            seen.add(each)
            for before in each.all_input_nodes:
                if before in nodes and each is not node:
                    return True
                if before not in nodes:
                    pending.append(before)
        return False

    def _products_before(self, nodes: set[fx.Node]) -> set[fx.Node]:
        return self._neighbours(nodes, forward=False)

    def _products_behind(self, nodes: set[fx.Node]) -> set[fx.Node]:
        return self._neighbours(nodes, forward=True)

    def _neighbours(self, nodes: set[fx.Node], *, forward: bool) -> set[fx.Node]:
        """Matrix products next to a region, with the views between."""
        found: set[fx.Node] = set()
        for node in nodes:
            way: list[fx.Node] = []
            each = node
            while True:
                near = [n for n in (each.users if forward else each.all_input_nodes) if n not in nodes]
                for product in near:
                    if kind(product) == "product" and product not in self.taken:
                        found |= {product, *way}
                views = [
                    n for n in near if kind(n) == "other" and n not in self.fixed and n not in self.taken
                ]
                if len(views) != 1 or len(way) > 6:
                    break
                each = views[0]
                way.append(each)
        return found

    def _with(self, nodes: set[fx.Node], more: set[fx.Node]) -> set[fx.Node]:
        return self._grown(nodes | more) if more else nodes

    def _region(self, nodes: set[fx.Node]) -> Region | None:
        """A region that can be computed at one place, with what it copies; None where there is no such."""
        copied: set[fx.Node] = set()
        pending = [each for node in nodes for each in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in self.fixed and node not in nodes and (_is_cheap(node) or called(node)):
                nodes = nodes | {node}
                copied.add(node)
                pending += node.all_input_nodes
        if not any(kind(node) == "reduction" for node in nodes):
            return None
        ordered = tuple(sorted(nodes, key=lambda node: self.order[node]))
        region = Region(ordered, frozenset(copied))
        if any(self._depends(node, nodes) or self._computed_from(node, nodes) for node in region.inputs):
            return None
        return region if sum(map(computes, ordered)) <= LARGEST and region.outputs else None

    def _without(self, outside: frozenset[str], nodes: set[fx.Node]) -> set[fx.Node]:
        """A region without such nodes at its front: views cost nothing outside, and the copy of a view is read by plain
        positions."""
        while front := {
            n for n in nodes if packet(n.target) in outside and not any(b in nodes for b in n.all_input_nodes)
        }:
            nodes = nodes - front
        return nodes

    def _computed_from(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        return any(each in nodes for each in node.all_input_nodes)


def _form(value: Any) -> Any:
    """Of a value: sizes as they are written, and as the example has them."""
    if isinstance(value, torch.Tensor):
        sizes = [(str(size), hint(size)) for size in (*value.shape, *value.stride())]
        return str(value.dtype), value.device.type, sizes
    if isinstance(value, list | tuple):
        return [_form(each) for each in value]
    return type(value).__name__, str(value)


def tensors_of(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    """What nodes are, where they are tensors."""
    values = (node.meta.get("val") for node in nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]
