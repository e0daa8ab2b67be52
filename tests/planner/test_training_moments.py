"""Training memory by moment and tensor by tensor: what layers keep, what loading takes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.catalog.engines import get_engine
from planner.catalog.models import get_model
from planner.cost.memory import StageMemory, fullest_of
from planner.cost.training import (
    UNFUSED_LOSS_FP32_COPIES,
    Operators,
    SavedTensors,
    chunked_loss_bytes,
    feed_forward_elements_per_token,
    gradient_elements_per_token,
    hidden_tensors,
    layer_at_work_bytes,
    lora_widths,
    loss_bytes,
    product_output_elements_per_token,
    product_residuals,
    saved_operand_elements_per_token,
    saved_residual_tensors,
    score_element_bytes,
)
from planner.fitting.evidence import strategy_of, table, training_request, usable
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve
from planner.workload.training_memory import stage_moments
from tests.planner.asking import LLAMA_8B, TRAIN, ask, document, held

LORA = {**TRAIN, "method": "lora", "global_batch_size": 4, "sequence_length": 4096}
FULL = {**TRAIN, "method": "pretrain", "global_batch_size": 8}
LLAMA = get_model(LLAMA_8B)
TIED = "meta-llama/Llama-3.2-1B"


def moments_of(**fields):
    request = EstimateRequest.model_validate(document(**{"workload": LORA, **fields}))
    setting = resolve(request)
    return stage_moments(setting, setting.workload)


def peak(**fields):
    return ask(**{"workload": LORA, **fields}).memory.per_device_peak_bytes


def row_of(name, row_id):
    return next(row for row in table(name) if row["row_id"] == row_id)


def test_the_answer_is_the_fullest_moment_and_none_holds_logits_and_a_recomputed_layer():
    fullest = max(moment.peak_bytes for moment in moments_of(engine="litgpt"))
    assert peak(engine="litgpt") == pytest.approx(fullest, abs=2)
    redone = {"activation_recomputation": "full"}
    loss, layer, update = (m.by_class["activations"] for m in moments_of(strategy=redone)[:3])
    assert ask(workload=LORA, strategy=redone).memory.breakdown_bytes["activations"] == round(
        max(loss, layer)
    )
    assert update == 0


def test_norms_and_inputs_are_kept_as_kernels_and_frozen_matrices_need_them():
    for wide, inputs, tensors in ((0, 1, 4), (1, 1, 8), (1, 0, 5)):
        assert hidden_tensors(LLAMA, SavedTensors(bool(wide), bool(inputs))) == tensors

    with_input = feed_forward_elements_per_token(LLAMA, SavedTensors(inputs=True))
    assert feed_forward_elements_per_token(LLAMA, SavedTensors(inputs=False)) == with_input * 3 / 4

    falcon = get_model("tiiuae/falcon-7b")
    assert hidden_tensors(falcon, SavedTensors()) * 2 == hidden_tensors(LLAMA, SavedTensors())

    plain, quantised = (
        ask(workload={**LORA, "method": method}, engine="litgpt") for method in ("lora", "qlora")
    )
    assert held(quantised, "activations") > held(plain, "activations")

    written_out = {"fused_norms": False}
    assert peak(engine="megatron") < peak(engine="megatron", strategy=written_out)


def test_adapters_on_queries_and_values_keep_less_at_the_widths_of_the_paper():
    two, every = (
        ask(workload={**LORA, "lora_targets": targets}, engine="litgpt")
        for targets in ("query_value", "all")
    )
    assert held(two, "activations") < held(every, "activations")
    assert held(two, "adapters") < held(every, "adapters")

    # arXiv:2106.09685, table 4: GPT-3 at rank 4 on both has 18.9 million a pair of ranks.
    model = LLAMA.model_copy(update={"num_key_value_heads": LLAMA.num_attention_heads})
    assert lora_widths(model, every=False) == 4 * model.hidden_size


def test_an_engine_that_loads_whole_or_unties_holds_what_that_takes():
    strategy = {"zero_stage": 3, "activation_recomputation": "full"}
    moments = moments_of(engine="litgpt", devices=4, strategy=strategy)
    loading = moments[3].by_class
    vocabulary = 2 * 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert loading["buffers"] == pytest.approx(4 * loading["weights"] + vocabulary)

    tied, untied = (
        ask(model=TIED, workload=LORA, engine=engine) for engine in ("megatron", "litgpt")
    )
    model = get_model(TIED)

    assert held(untied, "weights") - held(tied, "weights") == 2 * model.vocab_size * (
        model.hidden_size
    )


def test_gathered_logits_are_computed_in_single_operators():
    fused = loss_bytes(num_tokens=8, vocab_size=10, tensor_parallel_size=1, bytes_per_element=2)
    unfused = loss_bytes(
        num_tokens=8,
        vocab_size=10,
        tensor_parallel_size=1,
        bytes_per_element=2,
        fp32_copies=UNFUSED_LOSS_FP32_COPIES,
    )

    assert (fused, unfused) == (8 * 10 * 10, 8 * 10 * 18)


def test_a_loss_in_chunks_is_the_whole_one_up_to_a_chunk_and_grows_by_logits_and_gradient_after():
    sizes = {"vocab_size": 10, "tensor_parallel_size": 1, "bytes_per_element": 2}
    for tokens, expected in ((8, 8 * 10 * 10), (10, 10 * 10 * 10), (30, 1000 + 200 * (2 + 2))):
        found = chunked_loss_bytes(num_tokens=tokens, chunk_logits=100, **sizes)
        assert found == expected, tokens


def test_the_fullest_of_columns_is_chosen_and_copies_stand_beside_no_activation():
    early = StageMemory({"weights": 1.0, "activations": np.array([5.0, 1.0])})
    late = StageMemory({"weights": 1.0, "buffers": np.array([2.0, 2.0])})
    fullest = fullest_of([early, late])
    assert list(fullest.peak_bytes) == [6.0, 3.0]
    assert list(fullest.by_class["buffers"]) == [0.0, 2.0]

    setting = resolve(EstimateRequest.model_validate(document(workload=FULL, engine="megatron")))
    engine = setting.engine.model_copy(update={"update_copies": 25.0})
    fatter = stage_moments(replace(setting, engine=engine), setting.workload)[2]
    assert fatter.by_class["buffers"] == pytest.approx(100 * setting.counts.total)
    assert fatter.by_class["activations"] == 0


def test_a_row_says_its_kernel_its_precision_and_its_adapters_matrices():
    assert not get_engine("litgpt", "gpu").master_weights

    for kernel, fused in (("flash_attention2 + RMS kernel", 1), ("fused", 0)):
        row = next(row for row in table("memory_fit") if row["kernel"] == kernel)
        assert strategy_of(row)["fused_norms"] == bool(fused), (kernel, fused)

    said = [row for row in table("memory") if "fp32 gradient accumulation" in row["notes"]]
    assert said
    assert all(strategy_of(row)["gradient_dtype"] == "fp32" for row in said)

    targets = {
        row["row_id"]: training_request(row)["workload"]["lora_targets"]
        for row in usable(table("memory"))
        if row["method"] == "lora" and row["source_id"] == "litgpt-config-hub"
    }

    assert targets["mem-00021"] == "query_value"
    assert targets["mem-00045"] == "all"


WIDE, HEADS, KEYS, INNER = 4096, 4096, 1024, 14_336
FP32 = Operators(residual_bytes=4, product_bytes=4)
AUTOCAST = Operators(residual_bytes=4, product_bytes=2)
LORA_ALL = Operators(residual_bytes=2, product_bytes=2, adapted="all", rank=16)
LORA_QV = Operators(residual_bytes=2, product_bytes=2, adapted="query_value", rank=16)


def kept_bytes(how):
    residuals = saved_residual_tensors(LLAMA, how) * WIDE * how.residual_bytes
    return residuals + saved_operand_elements_per_token(LLAMA, how) * how.product_bytes


def test_tensors_are_kept_once_in_fp32_and_narrow_or_frozen_inputs_beside():
    norms = 2 * 3 * WIDE  # input, normalised, and the output that all matrices behind it read
    attention = 3 * HEADS + HEADS  # queries, repeated keys and values, and the output
    gates = 4 * INNER  # gate, its activation, up, and the product that is the last one's input
    assert kept_bytes(FP32) == 4 * (norms + attention + gates)

    norms = 2 * 2 * WIDE * 4
    inputs = (3 + 2) * WIDE * 2
    assert kept_bytes(AUTOCAST) == norms + inputs + 2 * (4 * HEADS + 4 * INNER)

    norms = 2 * WIDE * 4  # the inputs in fp32: no weight of theirs learns
    inputs = (5 * WIDE + HEADS + INNER) * 2
    between = 7 * 16 * 2
    assert kept_bytes(LORA_ALL) == norms + inputs + between + 2 * (3 * HEADS + 3 * INNER)
    assert kept_bytes(LORA_QV) == norms + 2 * (2 * WIDE + 2 * 16 + 3 * HEADS + 3 * INNER)


def test_recomputation_and_fused_attention_keep_what_they_need():
    projected, outputs = HEADS + 2 * KEYS + 2 * INNER, 2 * WIDE
    fused = Operators(residual_bytes=4, product_bytes=4, writes_scores=False)
    assert product_residuals(FP32) * WIDE + product_output_elements_per_token(LLAMA, FP32) == (
        WIDE + outputs + projected
    )
    assert (
        product_output_elements_per_token(LLAMA, fused)
        - product_output_elements_per_token(LLAMA, FP32)
        == HEADS
    )
    with_adapters = product_residuals(LORA_ALL) * WIDE + product_output_elements_per_token(
        LLAMA, LORA_ALL
    )
    assert with_adapters == WIDE + 2 * (outputs + projected) + 7 * 16
    assert saved_operand_elements_per_token(LLAMA, FP32) - saved_operand_elements_per_token(
        LLAMA, fused
    ) == 2 * (HEADS - KEYS)


def test_gradients_of_scores_come_when_those_of_the_feed_forward_block_are_gone():
    fields = {"num_tokens": 10, "rebuilt_bytes": 100, "scores": 50, "gradient_bytes": 30}
    early = layer_at_work_bytes(**fields, score_gradients=400, feed_forward_bytes=20)
    late = layer_at_work_bytes(**fields, score_gradients=900, feed_forward_bytes=20)
    assert (early, late) == (1050 + 300, 1050 + 700)
    columns = {**fields, "score_gradients": np.array([400, 900]), "feed_forward_bytes": 20}
    assert list(layer_at_work_bytes(**columns)) == [early, late]
    assert gradient_elements_per_token(LLAMA) == 3 * INNER
    assert [score_element_bytes(each) for each in (4, 2)] == [4, 6]


def test_our_trainer_keeps_less_the_more_it_computes_again():
    for dtype, attention in itertools.product(("fp32", "bf16"), ("eager", "flash")):
        options = {"compute_dtype": dtype, "attention": attention, "micro_batch_size": 1}

        def kept(how, engine, options=options):
            strategy = {**options, "activation_recomputation": how}
            return held(ask(workload=TRAIN, engine=engine, strategy=strategy), "activations")

        none, selective, full = (kept(how, "torch") for how in ("none", "selective", "full"))
        assert none > selective > full, (dtype, attention)
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
