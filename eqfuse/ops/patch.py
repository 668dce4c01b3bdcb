"""Models with programs of the library in place of their own norms, gates, attention and loss: `eq.patch(model)`.

What is replaced is found by what it does, not by its name alone: a norm or an activation is called beside the program that would take its place, and left
where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from eqfuse.errors import EqfuseError
from eqfuse.ops.gates import geglu, swiglu
from eqfuse.ops.losses import cross_entropy
from eqfuse.ops.norms import layer_norm, rms_norm
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
    """Puts programs of eqfuse.ops in place of a model's norms (RMSNorm, LayerNorm), gated feed-forward activations, and, of models of transformers, attention
    and the loss of the next token. Weights stay where they are, and gradients reach them.

    Undo it before the model is pickled. Raises EqfuseError for what is no module.
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
    """Rows for a comparison, the same at every call and of no generator of the user's."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, size, generator=generator).to(like.device, like.dtype)


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
    _set(found, model, "_loss_function", next_token_loss)  # what the property of the model reads
    found.replaced.append(Replaced("loss_function", "loss", "ops.cross_entropy"))


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
    sum over `num_items_in_batch`."""
    if shift_labels is None:
        if labels is None:
            raise EqfuseError("the loss of the next token is given no labels", hint="give labels=")
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, label = logits.float().reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(rows, label, ignore_index=ignore_index)
    return cross_entropy(rows, label, ignore_index=ignore_index, reduction="sum") / num_items_in_batch
