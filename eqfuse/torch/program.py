"""`eq.from_torch`: the program of a function or module, as text; and a call that runs it as the function is called."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from eqfuse.errors import BindError, EqfuseError
from eqfuse.kernel import Kernel
from eqfuse.operator.content import compiled
from eqfuse.terms.arguments import has_tangent, is_tracked
from eqfuse.terms.nodes import Load, Scalar, walk
from eqfuse.threads import cached, deep
from eqfuse.torch.draws import Draw
from eqfuse.torch.guards import Guard, equate_alike, guards_of
from eqfuse.torch.operators.scans import traced_scans
from eqfuse.torch.operators.table import Unsupported
from eqfuse.torch.operators.views import detached
from eqfuse.torch.positions import Size, is_real_size
from eqfuse.torch.stops import Seen, with_detached_blocks
from eqfuse.torch.text import Text, text_of
from eqfuse.torch.translate import LEAVE_IT, Refused, Translation, input_name, reserved, shape_of, size_of
from eqfuse.torch.values import Value, Writer


@dataclass(frozen=True)
class _Known:
    """What calls of the same sizes have in common: extents of axes, scalars that are extents, shapes of random numbers, and what is
    written and returned, with numbers in place of sizes."""

    sizes: Mapping[str, int] | None
    numbers: Mapping[str, int]
    drawn: tuple[torch.Size, ...]
    changed: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass
class TorchProgram:
    """A program that was a function of torch. `source` is its text; a call takes what the function takes."""

    source: str
    _text: Text
    _tensors: Mapping[str, Callable[[], torch.Tensor]]
    _arguments: tuple[tuple[str, tuple[Size, ...] | None, Any], ...]
    _outputs: tuple[Any, ...]
    _takes: Any
    _gives: Any
    _compile: Callable[[], Kernel]
    _has_own: bool
    _guards: tuple[Guard, ...] = ()
    _changed: Mapping[str, Any] = field(default_factory=dict)
    _draws: tuple[Draw, ...] = ()
    _calls: dict[tuple[int, ...], _Known] = field(default_factory=dict)
    _kernel: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read = {name: read for name, read in self._tensors.items() if name in self._text.inputs}

    @property
    def kernel(self) -> Kernel:
        """The kernel of the program, compiled at the first request."""
        if not self._kernel:
            self._kernel.append(self._compile())
        return self._kernel[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives. Raises BindError for arguments that differ from the examples in more than sizes that
        were found to be symbols."""
        flat, takes = pytree.tree_flatten((args, kwargs))
        if takes != self._takes:
            raise BindError(
                "the arguments are of another form than the examples", hint="call it as the examples were"
            )
        values, symbols = self._bound(flat)
        key = tuple(symbols.values())
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = self._known(symbols)
        values |= {name: read() for name, read in self._read.items()}
        is_differentiable = any(is_tracked(each) or has_tangent(each) for each in values.values())
        if is_differentiable and self._has_own:
            raise EqfuseError(
                "it has a torch.autograd.Function inside, whose derivative is not that of what it computes",
                hint="call it under torch.no_grad(), or write the function with detach: f(x) + (g(x) - f(x)).detach()",
            )
        if is_differentiable:
            # A backward may read what was there, and autograd counts changes of all that it keeps.
            for name in self._changed.keys() & values.keys():
                values[name] = values[name].clone() if name in self._returned else values[name].data
        place = next((value.device for value in values.values()), torch.get_default_device())
        for draw, shape in zip(self._draws, known.drawn, strict=True):
            # Drawn also where no output reads it: what torch draws next depends on it.
            drawn = draw.drawn(shape, place)
            values |= {draw.name: drawn} if draw.name in self._text.inputs else {}
        made = self.kernel(**values, **known.numbers, sizes=known.sizes)
        results = made if isinstance(made, tuple) else (made,)
        if known.changed:
            with torch.no_grad():
                found = [_output(each, results, flat) for each in known.changed]
                torch._foreach_copy_([self._tensors[name]() for name in self._changed], found)
        return pytree.tree_unflatten([_output(each, results, flat) for each in known.outputs], self._gives)

    @cached
    def _returned(self) -> frozenset[str]:
        """The inputs that what is returned is made of."""
        outputs = self.kernel.program.returned
        exprs = [outputs[place].expr for kind, place, *_ in self._outputs if kind == "result"]
        nodes = list(walk(*exprs))
        tensors = {node.tensor for node in nodes if isinstance(node, Load)}
        return frozenset(tensors | {node.name for node in nodes if isinstance(node, Scalar)})

    def _known(self, symbols: Mapping[Any, int]) -> _Known:
        """What calls of these sizes have in common. Raises BindError where the function may compute something else there."""
        for guard in self._guards:
            if not guard.holds(symbols):
                raise BindError(
                    f"the program was made where {guard.text}: at these sizes the function may compute something else",
                    hint="make another program: eq.from_torch with examples of these sizes",
                )
        sizes = {axis: _number(size, symbols) for axis, size in self._text.sizes.items()}
        numbers = {name: _number(size, symbols) for name, size in self._text.numbers.items()}
        drawn = tuple(torch.Size([_number(size, symbols) for size in draw.shape]) for draw in self._draws)
        changed = tuple(_at(each, symbols) for each in self._changed.values())
        outputs = tuple(_at(each, symbols) for each in self._outputs)
        return _Known(sizes or None, numbers, drawn, changed, outputs)

    def _bound(self, flat: list[Any]) -> tuple[dict[str, Any], dict[Any, int]]:
        values: dict[str, Any] = {}
        symbols: dict[Any, int] = {}
        for (name, shape, example), value in zip(self._arguments, flat, strict=True):
            if shape is None:
                if isinstance(value, torch.Tensor) or value != example:
                    raise BindError(
                        f"{name!r} is {value!r:.60}, the program was made for {example!r:.60}",
                        hint="make another program: eq.from_torch with examples of these arguments",
                    )
                continue
            if not isinstance(value, torch.Tensor):
                raise BindError(f"{name!r} is a {type(value).__name__}, not a tensor", hint="pass a tensor")
            if value.dim() != len(shape):
                raise BindError(
                    f"{name!r} has {value.dim()} dimensions, the example has {len(shape)}",
                    hint="make another program: eq.from_torch with such an example",
                )
            for dimension, (own, size) in enumerate(zip(value.shape, shape, strict=True)):
                if not isinstance(size, int) and size.is_Symbol:
                    size = symbols.setdefault(size, own)
                if isinstance(size, int) and own != size:
                    raise BindError(
                        f"dimension {dimension} of {name!r} is {own}, the program was made for {size}",
                        hint="make another program: eq.from_torch with an example of that size",
                    )
            if name in self._text.inputs:
                values[name] = value
        return values, symbols

    def __repr__(self) -> str:
        return f"<eqfuse program of torch>\n{self.source}"


def _at(kind: Any, symbols: Mapping[Any, int]) -> Any:
    """What is returned, with numbers in place of sizes."""
    match kind:
        case ("result", place, shape, dtype):
            return ("result", place, torch.Size([_number(size, symbols) for size in shape]), dtype)
        case ("number", size):
            return ("constant", _number(size, symbols))
    return kind


def _output(kind: Any, results: tuple[Any, ...], flat: list[Any]) -> Any:
    """What is returned, of the outputs of a kernel and the arguments."""
    match kind:
        case ("result", place, shape, dtype):  # integers are i64 where they are not declared
            found = results[place]
            found = found if found.shape == shape else found.reshape(shape)
            return found if found.dtype == dtype or found.is_floating_point() else found.to(dtype)
        case ("argument", place):
            return flat[place]
        case (_, value):
            return value
    raise AssertionError(kind)


def _number(size: Size, symbols: Mapping[Any, int]) -> Any:
    if isinstance(size, int | float):
        return size
    found = size.subs(symbols)
    return float(found) if is_real_size(size) else int(found)


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@deep()
def from_torch(
    fn: Callable[..., Any], *examples: Any, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> TorchProgram:
    """The program of a function or `nn.Module` of torch: `p.source` is its text, and `p(*args)` runs it as `fn` is called.

    `examples` are arguments of `fn`, and `kwargs` those by name. Sizes of the tensors among them are symbols, unless the
    code needs a number, or they are 0 or 1; other arguments are constants. Parameters, buffers and tensors that `fn`
    closes over are inputs of the program; `p` reads them where they are, so that training goes on, and writes buffers that
    `fn` changes. `options` are those of `eq.compile`; with `constants=True` what is made of parameters and buffers alone is kept
    until torch counts a change of one, which it does not of changes through `.data`. Raises EqfuseError, with the operator and the
    line of code, for what the language cannot express, for what torch cannot export, and for functions that change their arguments.
    """
    if not callable(fn):
        raise EqfuseError(
            f"{type(fn).__name__} is no function of torch", hint="pass a function or an nn.Module"
        )
    exported, has_own = _exported(fn, *pytree.tree_map(_own, (examples, dict(kwargs or {}))))
    graph, inputs = exported.graph_module.graph, exported.graph_signature
    if changed := inputs.user_inputs_to_mutate.values():
        raise EqfuseError(
            f"it changes {', '.join(map(repr, changed))}",
            hint="a program changes no argument: return the new value",
        )
    arguments, takes = pytree.tree_flatten((examples, dict(kwargs or {})))
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    equate_alike(nodes)
    names: dict[str, str] = {}
    for node, spec in zip(nodes, inputs.input_specs, strict=True):
        word = spec.target or node.name
        names[node.name] = input_name(word.removeprefix("function."), list(names.values()))
    translation = Translation(Writer([*names.values(), *reserved()]))
    tensors: dict[str, Callable[[], torch.Tensor]] = {}
    taken: list[tuple[str, tuple[Size, ...] | None, Any]] = []
    user = iter(arguments)
    for node, spec in zip(nodes, inputs.input_specs, strict=True):
        name = names[node.name]
        if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            tensors[name] = _tensor(fn, exported, spec.target)
            translation.read(node, name)
        elif spec.kind.name == "TOKEN":  # what an operator with effects takes, which is refused by its name
            translation.made[node] = None
        elif spec.kind.name == "USER_INPUT":
            example = next(user)
            value = node.meta.get("val")
            is_tensor = isinstance(value, torch.Tensor)
            taken.append((name, shape_of(value) if is_tensor else None, example))
            if is_tensor:
                translation.read(node, name)
            else:
                translation.made[node] = example
        else:
            raise EqfuseError(
                f"it has an input of the kind {spec.kind.name}", hint="pass tensors and numbers"
            )
    try:
        for node in graph.nodes:
            if node.op == "call_function":
                translation.call(node)
            elif node.op == "get_attr":
                translation.graph(node, getattr(exported.graph_module, node.target))
        text, outputs = _written(translation, graph, len(inputs.buffers_to_mutate), taken, names)
    except Refused as refused:
        raise refused.error() from None
    buffers = {spec.target: names[node.name] for node, spec in zip(nodes, inputs.input_specs, strict=True)}
    written = [buffers[target] for target in inputs.buffers_to_mutate.values()]
    if options.get("constants") is True:
        options["constants"] = tuple(n for n in tensors if n in text.tensors and n not in written)
    return TorchProgram(
        text.source, text, tensors, tuple(taken), outputs[len(written) :], takes, exported.call_spec.out_spec,
        lambda: compiled(text.source, **options), has_own, guards_of(nodes, [each[:2] for each in taken]),
        dict(zip(written, outputs, strict=False)), tuple(translation.draws),
    )  # fmt: skip


def _own(example: Any) -> Any:
    """An example as a tensor of its own: one that is given twice, or read besides, is another input each time."""
    if not isinstance(example, torch.Tensor):
        return example
    return example.detach().requires_grad_(example.requires_grad)


def _exported(fn: Callable[..., Any], examples: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The exported program, and whether some of it has a derivative of its own."""
    module = fn if isinstance(fn, torch.nn.Module) else _Module(fn)
    if isinstance(fn, FunctionType):
        # torch keeps the places in the code of functions of this name, and names inputs as its arguments.
        code = fn.__code__.replace(co_name="forward")
        renamed = FunctionType(code, fn.__globals__, "forward", fn.__defaults__, fn.__closure__)
        renamed.__kwdefaults__ = fn.__kwdefaults__
        module.forward = renamed

    def dynamic(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {d: torch.export.Dim.AUTO for d in range(value.dim()) if value.shape[d] > 1}
        return None

    shapes: Any = pytree.tree_map(dynamic, (examples, kwargs))
    try:
        given = signature(module.forward).bind(*shapes[0], **shapes[1]).arguments
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), _quiet():
            warnings.simplefilter("ignore")
            with Seen(INSTEAD) as seen, traced_scans(Seen):
                exported = torch.export.export(
                    module, examples, kwargs or None, dynamic_shapes=given, strict=False
                )
            with torch.no_grad():
                return with_detached_blocks(exported).run_decompositions(decompositions()), seen.own
    except EqfuseError:
        raise
    except Unsupported as why:
        raise EqfuseError(f"{why}{_place(why)}", hint=LEAVE_IT) from None
    except GuardOnDataDependentSymNode as error:
        raise EqfuseError(
            f"torch cannot export it: it asks what number a tensor holds{_place(error)}",
            hint="choose by torch.where, and give sizes as numbers: F.one_hot(x, 5), not F.one_hot(x)",
        ) from error
    except Exception as error:
        line = str(error).strip().splitlines()
        raise EqfuseError(
            f"torch cannot export it: {line[0] if line else type(error).__name__}{_place(error)}",
            hint="a program has no control flow that depends on data; see torch.export",
        ) from error


def covariance(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.cov`, without its look at the numbers of the weights."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [each for each in (fweights, aweights) if each is not None]
    if not given:
        apart = x - x.mean(1, keepdim=True)
        return (apart @ apart.T / max(x.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = total if aweights is None else (weights * aweights).sum()
    apart = x - (x * weights).sum(1, keepdim=True) / total
    return (apart @ (apart * weights).T / (total - correction * lost / total).clamp(min=0)).squeeze()


def correlation(input: torch.Tensor) -> torch.Tensor:
    """`torch.corrcoef`."""
    found = covariance(input)
    if found.dim() == 0:
        return found / found
    scale = torch.diagonal(found).sqrt()
    return (found / scale[:, None] / scale).clamp(-1, 1)


def max_pool1d(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`max_pool1d`, for any length."""
    width, step, around, apart = (
        (first, each[0] if isinstance(each, list | tuple) else each)
        for first, each in ((1, kernel_size), (1, stride or kernel_size), (0, padding), (1, dilation))
    )
    given = input.unsqueeze(-2), width, step, around, apart, ceil_mode
    if return_indices:
        found, places = torch.nn.functional.max_pool2d_with_indices(*given)
        return found.squeeze(-2), places.squeeze(-2)
    return torch.nn.functional.max_pool2d(*given).squeeze(-2)


def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.bilinear`, as a product of three tensors."""
    found = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.embedding_bag` of bags that are equally long, as a reduction of an embedding."""
    if input.dim() != 2 or max_norm is not None:
        raise Unsupported("embedding_bag with offsets or max_norm (pass bags as rows of a matrix)")
    rows = torch.nn.functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.amax(1)
    kept = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    count = kept.sum(1)
    if mode == "max":
        return torch.where(count > 0, torch.where(kept, rows, -math.inf).amax(1), 0.0)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total if mode == "sum" else total / count.clamp(min=1)


def fill_diagonal(input: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """`Tensor.fill_diagonal_` of a matrix."""
    if wrap or input.dim() != 2:
        raise Unsupported("fill_diagonal_ with wrap, or of more than two dimensions")
    input.diagonal().fill_(fill_value)
    return input


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, without its look at the numbers of the variance."""
    given = torch.as_tensor(var, dtype=input.dtype)
    if given.dim() and given.dim() == input.dim() - 1:
        given = given.unsqueeze(-1)
    held = given + (given.clamp(min=eps) - given).detach()
    each = 0.5 * (held.log() + (input - target) ** 2 / held)
    each = each + 0.5 * math.log(2 * math.pi) if full else each
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def quantile(
    input: torch.Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> torch.Tensor:
    """`torch.quantile` for a number `q`: between two sorted numbers, or NaN where there is any."""
    if not isinstance(q, int | float) or not 0 <= q <= 1 or interpolation != "linear":
        raise Unsupported("quantile of more than one number, or with another interpolation than linear")
    x, along = (input.flatten(), 0) if dim is None else (input, dim)
    last = int(x.shape[along]) - 1
    rank = min(int(q * last), last)
    ordered, part = x.sort(along).values, q * last - rank
    found = ordered.narrow(along, rank, 1)
    if part:
        found = found + (ordered.narrow(along, rank + 1, 1) - found) * part
    found = torch.where(x.isnan().any(along, keepdim=True), math.nan, found)
    if dim is None and keepdim:
        return found.reshape([1] * input.dim())
    return found if keepdim else found.squeeze(along)


def pairwise_distances(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """`torch.pdist`: distances of all pairs of rows."""
    count = input.shape[0]
    each = torch.arange(count, device=input.device)
    before = each * (2 * count - 1 - each) // 2  # pairs whose first row is an earlier one
    pairs = torch.arange(count * (count - 1) // 2, device=input.device)
    rows = torch.bucketize(pairs, before, right=True) - 1
    others = pairs - before[rows] + rows + 1
    found: torch.Tensor = torch.linalg.vector_norm(input[rows] - input[others], p, -1)
    return found


def masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`torch.masked_scatter`: where the mask holds for the k-th time, the k-th number of the source."""
    held, x = torch.broadcast_tensors(mask, input)  # type: ignore[no-untyped-call]
    before = held.flatten().cumsum(0).reshape(x.shape) - 1
    return torch.where(held, source.flatten()[before.clamp(min=0)], x)


def put(
    input: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """`torch.put`, as a write to the flattened tensor."""
    places = (index.flatten(),)
    return input.flatten().index_put(places, source.flatten(), accumulate).reshape(input.shape)


def sum_of_products(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """`torch.addbmm`, which rounds the scales of integers towards 0."""
    if not input.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    found = alpha * torch.einsum("bij,bjk->ik", batch1, batch2)
    return found + beta * input if beta else found


def multilabel_margin_loss(*_: Any, **__: Any) -> Any:
    """Refuses a loss in which torch's decomposition counts positions behind the first -1."""
    raise Unsupported("multilabel_margin_loss, which torch decomposes into another function")


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    torch.cov: covariance,
    torch.Tensor.cov: covariance,
    torch.corrcoef: correlation,
    torch.Tensor.corrcoef: correlation,
    torch.max_pool1d: max_pool1d,
    torch.quantile: quantile,
    torch.Tensor.quantile: quantile,
    torch.Tensor.fill_diagonal_: fill_diagonal,
    torch.pdist: pairwise_distances,
    torch.masked_scatter: masked_scatter,
    torch.Tensor.masked_scatter: masked_scatter,
    torch.put: put,
    torch.Tensor.put: put,
    torch.addbmm: sum_of_products,
    torch.Tensor.addbmm: sum_of_products,
    torch.nn.functional.embedding_bag: embedding_bag,
    torch.nn.functional.gaussian_nll_loss: gaussian_nll_loss,
    torch.nn.functional.bilinear: bilinear,
    torch.nn.functional.max_pool1d: max_pool1d,
    torch.nn.functional.multilabel_margin_loss: multilabel_margin_loss,
    torch.nn.functional.max_pool1d_with_indices: partial(max_pool1d, return_indices=True),
}
"""Functions that torch cannot export, or decomposes into less plain ones, and the same in its other functions."""


def _place(error: BaseException) -> str:
    """The line of the user's code where torch stopped."""
    own = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith(own) and (code := linecache.getline(file, line).strip()):
            return f"\n    {file}, line {line}: {code}"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from printing graphs that it could not export: the error says what is wrong."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was = logger.disabled
    logger.disabled = True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = was


KEPT = (
    "detach", "scaled_dot_product_attention", "linear", "matmul", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "softmax.int", "log_softmax.int", "silu", "masked_fill.Scalar", "masked_fill.Tensor", "tril", "triu",
    "logsumexp", "gelu", "index_select", "index_add", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "var.correction", "std.correction", "stack", "square", "nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss", "select_scatter", "einsum", "roll", "hardswish", "hardsigmoid",
    *(f"{name}{count}d.vec" for name in ("upsample_nearest", "_upsample_nearest_exact") for count in (1, 2, 3)),
    "upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_bicubic2d.vec", "upsample_trilinear3d.vec",
)  # fmt: skip
"""Operators that are translated as they are, not as what torch makes of them."""


DECOMPOSED = (
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats", "addmv", "dist", "view_copy", "permute_copy",
    "unbind_copy.int", "narrow_copy", "triu_indices", "tril_indices",
)  # fmt: skip
"""Operators besides those of its own list that torch writes with core ATen."""


def decompositions() -> dict[Any, Any]:
    """torch's decompositions to core ATen, but for what is translated as it is."""
    table = torch.export.default_decompositions()
    for operator in map(_operator, DECOMPOSED):
        table[operator] = decomposition_table[operator]
    for operator in map(_operator, KEPT):
        table.pop(operator, None)  # type: ignore[no-untyped-call]
    return table


def _operator(name: str) -> Any:
    """An operator of ATen by its name and, where there is more than one, overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _tensor(fn: Any, exported: Any, target: str) -> Callable[[], torch.Tensor]:
    """Reads a parameter or a buffer where it is now."""
    module: Any = fn if isinstance(fn, torch.nn.Module) else None
    owner, _, name = target.rpartition(".")
    if module is None and target.startswith("function."):
        module, owner = fn, owner.removeprefix("function").removeprefix(".")
    if isinstance(module, torch.nn.Module):
        try:
            found = module.get_submodule(owner)
            if isinstance(getattr(found, name, None), torch.Tensor):
                return lambda: getattr(found, name)
        except AttributeError:
            pass
    held = exported.state_dict.get(target, exported.constants.get(target))
    return lambda: held


def _written(
    translation: Translation, graph: Any, changes: int, taken: list[Any], names: Mapping[str, str]
) -> tuple[Text, tuple[Any, ...]]:
    """The text, and where each output of the function comes from. The first ones, so many `changes`, are new numbers of
    buffers, which no gradient passes."""
    (last,) = [node for node in graph.nodes if node.op == "output"]
    arguments = {name: place for place, (name, _, _) in enumerate(taken)}
    values: list[Value] = []
    found: list[Any] = []
    for place, given in enumerate(last.args[0]):
        made = translation.made[given] if hasattr(given, "meta") else given
        if place < changes and isinstance(made, Value):
            made = detached(made)
        if (
            isinstance(made, Value)
            and hasattr(given, "op")
            and given.op == "placeholder"
            and names[given.name] in arguments
        ):
            found.append(("argument", arguments[names[given.name]]))
        elif isinstance(made, Value):
            found.append(("result", len(values), made.shape, made.dtype))
            values.append(made)
        elif isinstance(made, torch.SymInt | torch.SymFloat):
            found.append(("number", size_of(made)))
        elif made is None or isinstance(made, bool | int | float | str):
            found.append(("constant", made))
        else:
            found.append(("number", made))
    if not values:
        is_given = any(kind == "argument" for kind, *_ in found)
        what = "it returns its arguments, and computes no tensor" if is_given else "it computes no tensor"
        raise EqfuseError(what, hint="return what is computed")
    writer = translation.writer
    outputs = [writer.names.definition("out") for _ in values] if len(values) > 1 else [_single(writer)]
    return text_of(translation, values, outputs), tuple(found)


def _single(writer: Writer) -> str:
    if "out" in writer.names.taken or "out" in writer.names.sizes:
        return writer.names.definition("out")
    writer.names.taken.add("out")
    return "out"
