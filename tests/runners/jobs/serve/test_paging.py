"""Attention from pages gives what the whole model gives: windows, sinks, rows of any length."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runners.jobs.runtime import BadInputError
from runners.jobs.serve import paging
from runners.jobs.serve.padded_decode import PaddedStep
from runners.jobs.serve.paging import (
    PAGE_TOKENS,
    PagedCache,
    TokenRow,
    check_layers,
    check_paging,
    forward,
    pages_for,
)

VOCABULARY, WINDOW = 97, 7
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
KINDS = {
    "llama": {},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 8},
    "gpt_oss": WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": WINDOWS | {"use_sliding_window": True},
}


def made(kind: str, **fields):
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **(SHAPE | KINDS.get(kind, {}) | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, value in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(value, std=2.0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_in_pages_have_the_logits_of_each_alone(kind, monkeypatch):
    monkeypatch.setattr(paging, "TOLERANCE", 1e-4)
    model = made(kind)
    check_layers(model)
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in (5, 33, 18)]
    expected = [model(input_ids=torch.tensor([each])).logits[0].detach() for each in prompts]

    check_paging(model, cache := PagedCache(16), VOCABULARY)
    pages = [cache.allocate(pages_for(len(each) + 1)) for each in prompts]
    # Each prompt without its last two tokens, then these as two decode steps.
    rows = []
    for left in (2, 1, 0):
        begins = [0 if left == 2 else len(each) - 1 - left for each in prompts]
        rows = [
            TokenRow(each[begin : len(each) - left], begin, own)
            for each, begin, own in zip(prompts, begins, pages, strict=True)
        ]
        ends = torch.stack([whole[-1 - left] for whole in expected])
        torch.testing.assert_close(forward(model, cache, rows), ends, atol=1e-4, rtol=1e-3)

    # The step of fixed shapes that CUDA graphs replay reads the same.
    longest = max(map(len, pages))
    table = torch.tensor([[*own, *[0] * (longest - len(own))] for own in pages])
    lengths = torch.tensor([len(each) for each in prompts])
    slots = torch.cat([row.slots(row.start) for row in rows])
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([[each[-1] for each in prompts]]),
            position_ids=(lengths - 1)[None],
            use_cache=False,
            step=PaddedStep(cache, slots, table, lengths),
        )
    torch.testing.assert_close(output.logits[0], ends, atol=1e-4, rtol=1e-3)


def test_a_window_is_no_longer_than_it_says():
    """With the window ignored, the logits of a long prompt are others."""
    model, wide = made("gemma3_text"), made("gemma3_text", sliding_window=200)
    ids = torch.randint(3, VOCABULARY, (1, 4 * PAGE_TOKENS))
    assert not torch.allclose(model(ids).logits[0, -1], wide(ids).logits[0, -1], atol=1e-3)


def test_layers_that_attend_by_chunks_are_refused_by_name():
    model = made("llama")
    model.config.layer_types = ["chunked_attention"] * 4
    with pytest.raises(BadInputError, match=r"chunked_attention; choose llama\.cpp"):
        check_layers(model)
