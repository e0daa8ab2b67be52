"""FLOP against torch's own counter, run over the real implementations of tiny models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planner.asking import CPU, ask
from tests.plugins.extent import sample

BATCH, PROMPT = 2, 96
SHAPE = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
GPT2 = {"n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": 256, "vocab_size": 512}
DENSE = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama-tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SHAPE, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SHAPE},
    "qwen3": {"model_type": "qwen3", **SHAPE, "head_dim": 32},
    "phi3": {"model_type": "phi3", **SHAPE, "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", **SHAPE, "head_dim": 32},
    "gpt2": {"model_type": "gpt2", **GPT2},
}


def counted(config, *, backward=False):
    """Return the FLOP of one pass over the batch as torch counts them, by kind of product."""
    given = {name: value for name, value in config.items() if name != "model_type"}
    real = AutoConfig.for_model(config["model_type"], **given)
    model = AutoModelForCausalLM.from_config(real, attn_implementation="eager")
    ids = torch.zeros((BATCH, PROMPT), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            torch.autograd.backward(logits.sum())
    by_operator = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in by_operator.items() if "bmm" not in str(name))
    scores = sum(n for name, n in by_operator.items() if "bmm" in str(name))
    return products, scores


def planned(config, workload):
    """Return the planner's FLOP of matrix products and of attention, and of the head per token."""
    found = ask(model=config, device=CPU, workload=workload, strategy={"weight_dtype": "fp32"})
    by_key = {}
    for term in found.terms:
        if term.group in {"prefill", "train_step"}:
            by_key[term.key] = by_key.get(term.key, 0.0) + term.value
    return by_key


GENERATE = {"kind": "generate", "batch_size": BATCH, "input_tokens": PROMPT, "output_tokens": 1}


def test_a_prefill_multiplies_as_the_real_model_and_half_of_an_eager_kernels_attention():
    causal = (PROMPT + 1) / (2 * PROMPT)
    for config in DENSE.values():
        products, scores = counted(config)
        terms = planned(config, GENERATE)
        # The real pass computes logits of every token; an engine of the last one of a sequence.
        whole_head = terms["output_head_flops"] * PROMPT
        assert terms["linear_flops"] + whole_head == pytest.approx(products, rel=1e-9)
        assert terms["attention_flops"] == pytest.approx(scores * causal, rel=0.02)


def test_a_training_step_multiplies_three_times_the_forward_pass():
    for name in sample(["llama", "qwen3", "gpt2"]):
        config = DENSE[name]
        step = {
            "kind": "train",
            "sequence_length": PROMPT,
            "global_batch_size": BATCH,
            "method": "full",
        }
        products, _ = counted(config, backward=True)
        terms = planned(config, step)
        assert 3 * terms["matmul_flops"] == pytest.approx(products, rel=1e-9)


def test_a_token_visits_its_experts_and_no_other():
    config = {
        "model_type": "qwen3_moe",
        **SHAPE,
        "head_dim": 16,
        **EXPERTS,
        "decoder_sparse_step": 1,
    }
    tokens, layers, hidden = BATCH * PROMPT, SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
    terms = planned(config, GENERATE)
    heads = (8 + 2 + 2 + 8) * 16 * hidden
    visited = EXPERTS["num_experts_per_tok"] * 3 * EXPERTS["moe_intermediate_size"] * hidden
    by_hand = 2 * tokens * layers * (heads + visited)
    assert terms["linear_flops"] + terms["expert_flops"] == pytest.approx(by_hand, rel=1e-9)
