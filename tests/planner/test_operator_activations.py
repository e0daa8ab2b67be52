"""What layers of PyTorch's operators keep, tensor by tensor, and what their backward pass adds."""

import numpy as np
import pytest

from planner.catalog.models import get_model
from planner.cost.activations import (
    Operators,
    gradient_width,
    kept_residuals,
    kept_width,
    layer_at_work_bytes,
    product_residuals,
    product_width,
    score_element_bytes,
)
from tests.planner.asking import LLAMA_8B, TRAIN, ask, held

LLAMA = get_model(LLAMA_8B)  # 4096 wide, 32 heads and 8 of keys, 14,336 in the feed-forward block
WIDE, HEADS, KEYS, INNER = 4096, 4096, 1024, 14_336
FP32 = Operators(residual_bytes=4, product_bytes=4)
AUTOCAST = Operators(residual_bytes=4, product_bytes=2)
LORA = Operators(residual_bytes=2, product_bytes=2, adapted="all", rank=16)
LORA_QV = Operators(residual_bytes=2, product_bytes=2, adapted="query_value", rank=16)


def kept_bytes(how):
    residuals = kept_residuals(LLAMA, how) * WIDE * how.residual_bytes
    return residuals + kept_width(LLAMA, how) * how.product_bytes


def test_in_fp32_each_tensor_is_kept_once():
    norms = 2 * 3 * WIDE  # input, normalised, and the output that all matrices behind it read
    attention = 3 * HEADS + HEADS  # queries, repeated keys and values, and the output
    gates = 4 * INNER  # gate, its activation, up, and the product that is the last one's input

    assert kept_bytes(FP32) == 4 * (norms + attention + gates)


def test_autocast_gives_each_matrix_a_narrow_input_of_its_own():
    norms = 2 * 2 * WIDE * 4
    inputs = (3 + 2) * WIDE * 2

    assert kept_bytes(AUTOCAST) == norms + inputs + 2 * (4 * HEADS + 4 * INNER)


def test_an_adapter_keeps_what_its_frozen_matrix_does_not():
    norms = 2 * WIDE * 4  # the inputs in fp32: no weight of theirs learns
    inputs = (5 * WIDE + HEADS + INNER) * 2
    between = 7 * 16 * 2

    assert kept_bytes(LORA) == norms + inputs + between + 2 * (3 * HEADS + 3 * INNER)
    assert kept_bytes(LORA_QV) == norms + 2 * (2 * WIDE + 2 * 16 + 3 * HEADS + 3 * INNER)


def test_selective_recomputation_keeps_a_layers_input_and_what_products_gave():
    projected, outputs = HEADS + 2 * KEYS + 2 * INNER, 2 * WIDE
    fused = Operators(residual_bytes=4, product_bytes=4, writes_scores=False)

    assert product_residuals(FP32) * WIDE + product_width(LLAMA, FP32) == (
        WIDE + outputs + projected
    )
    assert product_width(LLAMA, fused) - product_width(LLAMA, FP32) == HEADS
    with_adapters = product_residuals(LORA) * WIDE + product_width(LLAMA, LORA)
    assert with_adapters == WIDE + 2 * (outputs + projected) + 7 * 16


def test_fused_attention_keeps_no_repeated_keys():
    fused = Operators(residual_bytes=4, product_bytes=4, writes_scores=False)

    assert kept_width(LLAMA, FP32) - kept_width(LLAMA, fused) == 2 * (HEADS - KEYS)


def test_gradients_of_scores_come_when_those_of_the_feed_forward_block_are_gone():
    fields = {"num_tokens": 10, "rebuilt_bytes": 100, "scores": 50, "gradient_bytes": 30}

    early = layer_at_work_bytes(**fields, score_gradients=400, feed_forward_bytes=20)
    late = layer_at_work_bytes(**fields, score_gradients=900, feed_forward_bytes=20)

    assert (early, late) == (1050 + 300, 1050 + 700)
    columns = {**fields, "score_gradients": np.array([400, 900]), "feed_forward_bytes": 20}
    assert list(layer_at_work_bytes(**columns)) == [early, late]
    assert gradient_width(LLAMA) == 3 * INNER
    assert [score_element_bytes(each) for each in (4, 2)] == [4, 6]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_our_trainer_keeps_less_the_more_it_computes_again(dtype, attention):
    def kept(how, engine):
        options = {"compute_dtype": dtype, "attention": attention, "micro_batch_size": 1}
        strategy = {**options, "activation_recomputation": how}
        return held(ask(workload=TRAIN, engine=engine, strategy=strategy), "activations")

    none, selective, full = (kept(how, "torch") for how in ("none", "selective", "full"))

    assert none > selective > full
    assert selective / none < kept("selective", "megatron") / kept("none", "megatron")


def test_copies_that_gather_micro_batches_hold_them_beside_the_buckets():
    def buffers(times, stage):
        strategy = {
            "micro_batch_size": 8 // times,
            "gradient_accumulation_steps": times,
            "zero_stage": stage,
        }
        found = ask(devices=2, workload=TRAIN, strategy=strategy)
        return held(found, "buffers"), held(found, "gradients")

    at_once, gradients = buffers(1, 0)
    gathered, same = buffers(2, 0)

    assert same == gradients
    assert gathered - at_once == pytest.approx(gradients)
    assert buffers(2, 1)[0] == at_once
