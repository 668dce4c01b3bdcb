"""Models with programs of the library in place of their own norms, gates, rotary positions, attention and loss: `eq.patch(model)`.

What is replaced is found by what it does, not by its name alone: a norm, an activation, rotary positions or a loss is called beside the program that would
take its place, and left where they differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from eqfuse.errors import EqfuseError
from eqfuse.ops.deferred_logits import DeferredLogits, deferred_logits
from eqfuse.ops.gates import geglu, swiglu
from eqfuse.ops.losses import cross_entropy, linear_cross_entropy
from eqfuse.ops.norms import layer_norm, rms_norm
from eqfuse.ops.rotary import rotary
from eqfuse.torch.attention import NAME, register_attention

ROWS = 3
"""Rows that a module and its replacement are compared on."""

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Replaced:
    """A part of a model, and the program in its place; `why` it was left, where it was."""

    place: str
    kind: str
    program: str = ""
    why: str = ""


@dataclass
class Patched:
    """What `patch` has `replaced`, and what it has `left` and why: `print(patched)` shows a table. `undo()` puts the model's own parts back; so does the end
    of a `with` block."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Replaced] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows: dict[tuple[str, str], list[str]] = {}
        for each in (*self.replaced, *self.left):
            rows.setdefault((each.kind, each.program or f"left: {each.why}"), []).append(each.place)
        width = max((len(kind) for kind, _ in rows), default=0)
        lines = []
        for (kind, what), places in rows.items():
            first = f"  ({places[0]}{', ...' if len(places) > 1 else ''})" if places[0] else ""
            lines.append(f"{kind:{width}}  {len(places):4} x  {what}{first}")
        return "\n".join(lines) or "nothing was replaced"


def patch(model: nn.Module) -> Patched:
    """Puts programs of eqfuse.ops in place of a model's norms (RMSNorm, LayerNorm), gated feed-forward activations, and, of models of transformers, rotary
    positions, attention and the loss of the next token. Weights stay where they are, and gradients reach them.

    In training that loss is computed from the hidden states and the weights of the last linear layer. The logits of the output are computed where something
    reads them, which `left` then says; after the optimizer's step they cannot be. Undo it before the model is pickled. Raises EqfuseError for what is no
    module.
    """
    if not isinstance(model, nn.Module):
        raise EqfuseError(f"{type(model).__name__} is no nn.Module", hint="give a model")
    found = Patched()
    try:
        for place, module in model.named_modules():
            for kind, make in _parts(module):
                forward = make(module)
                if isinstance(forward, str):
                    found.left.append(Replaced(place, kind, why=forward))
                else:
                    program, function = forward
                    _set(found, module, "forward", MethodType(function, module))
                    found.replaced.append(Replaced(place, kind, program))
        _attention(model, found)
        _loss(model, found)
    except BaseException:
        found.undo()
        raise
    return found


Made = str | tuple[str, Forward]
"""A program and what runs it as a method of a module; or why there is none."""


def _parts(module: nn.Module) -> Iterator[tuple[str, Callable[[Any], Made]]]:
    """What a module is, by what it has."""
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm):
        yield "LayerNorm", _layer_norm
    elif name.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), torch.Tensor):
        yield name, _rms_norm
    elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        yield name, _gated
    elif all(hasattr(module, part) for part in ("gate_up_proj", "down_proj", "activation_fn")):
        yield name, _gated_halves
    elif isinstance(own := _forward_of(module), FunctionType) and ROTARY in own.__code__.co_names:
        yield ROTARY, _rotary


def _forward_of(module: Any) -> Any:
    """The forward of a class, without decorators."""
    return inspect.unwrap(type(module).forward)


def _set(found: Patched, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of an instance, until that is undone."""
    own = vars(owner)
    before = own.get(name)

    def back() -> None:
        if before is None:
            own.pop(name, None)
        else:
            own[name] = before

    found._undo.append(back)
    own[name] = value


def _is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(wanted.dtype, 3e-2)
    return found.shape == wanted.shape and torch.allclose(
        found.double(), wanted.double(), rtol=tolerance, atol=tolerance
    )


def _sample(like: torch.Tensor, size: int) -> torch.Tensor:
    """Rows for a comparison."""
    return _drawn(ROWS, size).to(like.device, like.dtype)


def _device_of(module: nn.Module) -> torch.device:
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers at every call, of no generator of the user's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layer_norm(module: nn.LayerNorm) -> Made:
    if len(module.normalized_shape) != 1:
        return f"it is over {len(module.normalized_shape)} dimensions"
    eps = module.eps

    def forward(self: Any, x: torch.Tensor) -> Any:
        return layer_norm(x, self.weight, self.bias, eps=eps)

    return "ops.layer_norm", forward


def _rms_norm(module: Any) -> Made:
    eps = next(
        (getattr(module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name)),
        None,
    )
    weight = module.weight
    if not isinstance(eps, float) or weight.ndim != 1:
        return "it has no epsilon, or weights that are no vector"
    with torch.no_grad():
        x = _sample(weight, weight.shape[0])
        wanted = module(x)
        offset = next(
            (at for at in (0.0, 1.0) if _is_near(rms_norm(x, weight, eps=eps, offset=at), wanted)), None
        )
    if offset is None:
        return "it computes something else"

    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms_norm(x, self.weight, eps=eps, offset=offset)

    return f"ops.rms_norm{f'(offset={offset})' if offset else ''}", forward


GATES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ops.swiglu": (swiglu, {}),
    "ops.geglu": (geglu, {}),
    "ops.geglu(approximate=True)": (geglu, {"approximate": True}),
}


def _gate_of(activation: Callable[[torch.Tensor], Any], like: torch.Tensor) -> str | None:
    """The program whose gate an activation is."""
    with torch.no_grad():
        x = _sample(like, 64)
        wanted = activation(x)
        for name, (op, options) in GATES.items():
            if _is_near(op(x, torch.ones_like(x), **options), wanted):
                return name
    return None


def _gated(module: Any) -> Made:
    return _by_gate(module, module.act_fn, lambda self, x: (self.gate_proj(x), self.up_proj(x)))


def _gated_halves(module: Any) -> Made:
    return _by_gate(module, module.activation_fn, lambda self, x: (self.gate_up_proj(x),))


def _by_gate(
    module: Any, activation: Callable[[torch.Tensor], Any], projected: Callable[..., tuple[Any, ...]]
) -> Made:
    name = _gate_of(activation, module.down_proj.weight)
    if name is None:
        return "its activation is neither SiLU nor GELU"
    op, options = GATES[name]

    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(op(*projected(self, x), **options))

    return name, forward


def _attention(model: Any, found: Patched) -> None:
    """Attention as models of transformers call it."""
    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        return
    if not getattr(model, "_supports_sdpa", False):
        found.left.append(Replaced("", "attention", why="its layers call no attention of torch's form"))
        return
    register_attention()
    found._undo.append(lambda: model.set_attn_implementation(before))
    model.set_attn_implementation(NAME)
    found.replaced.append(Replaced("", "attention", f"attn_implementation={NAME!r} in place of {before!r}"))


def _loss(model: Any, found: Patched) -> None:
    """The loss of the next token, as models of transformers call it."""
    if not (type(model).__name__.endswith("ForCausalLM") and hasattr(model, "loss_function")):
        return
    device = _device_of(model)
    labels = torch.tensor([[3, 0, -100, 6]], device=device)
    sample: dict[str, Any] = {"logits": _drawn(1, 4, 7).to(device), "labels": labels, "vocab_size": 7}
    wanted = None
    with suppress(Exception):  # it takes something else
        wanted = model.loss_function(**sample)
    if not isinstance(wanted, torch.Tensor) or not _is_near(next_token_loss(**sample), wanted):
        found.left.append(Replaced("loss_function", "loss", why="it computes something else"))
        return
    _set(found, model, "_loss_function", next_token_loss)  # what the property of the model reads
    head = model.get_output_embeddings()
    why = _why_no_deferral(head)
    if why:
        found.replaced.append(Replaced("loss_function", "loss", "ops.cross_entropy"))
        found.left.append(Replaced("loss_function", "loss without logits", why=why))
        return

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and torch.is_grad_enabled()) or is_compiling() or _has_hooks(self):
            return F.linear(x, self.weight, self.bias)
        x, w, bias = (_cast(tensor, x.device.type) for tensor in (x, self.weight, self.bias))
        return deferred_logits(x, w, bias, read)

    def read(reader: str) -> None:
        each = Replaced("loss_function", "loss without logits", why=f"the logits are read, by {reader}")
        if each not in found.left:
            found.left.append(each)

    _set(found, head, "forward", MethodType(forward, head))
    found.replaced.append(
        Replaced("loss_function", "loss", "ops.linear_cross_entropy in training, else ops.cross_entropy")
    )


def _why_no_deferral(head: Any) -> str:
    """Why the loss cannot be computed without logits; nothing where it can."""
    if type(head) is not nn.Linear:
        return f"the logits are made by a {type(head).__name__}, not by nn.Linear"
    return "forward of the layer that makes the logits is replaced" if "forward" in vars(head) else ""


def _has_hooks(module: nn.Module) -> bool:
    """Whether something is called with what a module takes or makes, as sharded weights are."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _cast(tensor: Any, device: str) -> Any:
    """A tensor, or None, as a linear layer takes it under autocast."""
    if tensor is None or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def next_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """The cross-entropy of logits: [batch, tokens, vocabulary] with the labels one token on, as transformers' `ForCausalLMLoss` computes it: the mean, or the
    sum over `num_items_in_batch`, in float32 for half-precision logits. Deferred logits are not stored."""
    if shift_labels is None:
        if labels is None:
            raise EqfuseError("the loss of the next token is given no labels", hint="give labels=")
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    options: dict[str, Any] = {"ignore_index": ignore_index}
    if logits.dtype in (torch.bfloat16, torch.float16):
        options["dtype"] = "f32"
    if num_items_in_batch is not None:
        options["reduction"] = "sum"
    label = shift_labels.reshape(-1).to(logits.device)
    if isinstance(logits, DeferredLogits) and logits.is_capped:
        source, options["soft_cap"] = logits.source, logits.soft_cap
        rows = source.x.reshape(-1, source.x.shape[-1])
        loss = linear_cross_entropy(rows, source.w, label, source.bias, **options)
    else:
        loss = cross_entropy(logits.reshape(-1, vocab_size), label, **options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


ROTARY = "apply_rotary_pos_emb"
"""The function of a model's module, with q: [batch, heads, positions, features], k, cos and sin: [batch, positions, ...]."""


def _rotary(module: Any) -> Made:
    forward, own = type(module).forward, _forward_of(module)
    original = own.__globals__.get(ROTARY)
    if not callable(original):
        return "its module has no such function"
    if forward is not own:
        return "its forward is decorated"
    if "forward" in vars(module):
        return "its forward is replaced"
    forms = _rotary_forms(original, _device_of(module))
    if not forms:
        return "it computes something else"

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        width = cos.shape[-1] / q.shape[-1]
        if more or named or q.ndim != 4 or cos.ndim != 3 or width not in forms:
            return original(q, k, cos, sin, *more, **named)
        return tuple(rotary(x, cos, sin, interleaved=forms[width]) for x in (q, k))

    # Without a module's name, torch.compile takes globals for what they are.
    names = {name: value for name, value in own.__globals__.items() if name != "__name__"}
    made = FunctionType(
        own.__code__, {**names, ROTARY: turned}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return "ops.rotary", made


def _rotary_forms(original: Callable[..., Any], device: torch.device) -> dict[float, bool]:
    """Whether features are turned in neighbouring pairs, by the width of the angles over that of the heads: what was called beside the original."""
    found: dict[float, bool] = {}
    q, k = (_drawn(2, heads, ROWS, 8, seed=heads).to(device) for heads in (2, 1))
    for width in (4, 8):
        cos, sin = (_drawn(2, ROWS, width, seed=seed).to(device) for seed in (3, 4))
        wanted = None
        with suppress(Exception):  # it takes no angles of this width
            wanted = original(q, k, cos, sin)
        for is_interleaved in (False, True):
            made = tuple(rotary(x, cos, sin, interleaved=is_interleaved) for x in (q, k))
            if wanted is not None and all(map(_is_near, made, wanted)):
                found.setdefault(width / 8, is_interleaved)
    return found
