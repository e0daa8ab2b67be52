"""Training memory by moment: what layers keep, when the logits are there, what loading takes."""

from dataclasses import replace

import numpy as np
import pytest

from planner.catalog.engines import get_engine
from planner.catalog.models import get_model
from planner.cost.activations import (
    UNFUSED_LOSS_FP32_COPIES,
    SavedTensors,
    feed_forward_width,
    hidden_tensors,
    loss_bytes,
)
from planner.cost.memory import StageMemory, fullest_of
from planner.cost.training import lora_widths
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


def test_the_answer_is_the_fullest_moment():
    fullest = max(moment.peak_bytes for moment in moments_of(engine="litgpt"))

    assert peak(engine="litgpt") == pytest.approx(fullest, abs=2)


def test_no_moment_holds_the_logits_and_a_recomputed_layer():
    redone = {"activation_recomputation": "full"}
    loss, layer, update = (m.by_class["activations"] for m in moments_of(strategy=redone)[:3])

    assert ask(workload=LORA, strategy=redone).memory.breakdown_bytes["activations"] == round(
        max(loss, layer)
    )
    assert update == 0


@pytest.mark.parametrize(("wide", "inputs", "tensors"), [(0, 1, 4), (1, 1, 8), (1, 0, 5)])
def test_norms_and_linear_inputs_are_kept_as_the_kernels_need_them(wide, inputs, tensors):
    assert hidden_tensors(LLAMA, SavedTensors(bool(wide), bool(inputs))) == tensors


def test_a_frozen_down_projection_keeps_no_input():
    with_input = feed_forward_width(LLAMA, SavedTensors(inputs=True))

    assert feed_forward_width(LLAMA, SavedTensors(inputs=False)) == with_input * 3 / 4


def test_a_block_with_one_norm_keeps_half_of_what_two_keep():
    falcon = get_model("tiiuae/falcon-7b")

    assert hidden_tensors(falcon, SavedTensors()) * 2 == hidden_tensors(LLAMA, SavedTensors())


def test_adapters_on_queries_and_values_keep_less_than_on_all_matrices():
    two, every = (
        ask(workload={**LORA, "lora_targets": targets}, engine="litgpt")
        for targets in ("query_value", "all")
    )

    assert held(two, "activations") < held(every, "activations")
    assert held(two, "adapters") < held(every, "adapters")


def test_queries_and_values_take_the_widths_of_the_lora_paper():
    """arXiv:2106.09685, table 4: GPT-3 at rank 4 on both has 18.9 million a pair of ranks."""
    model = LLAMA.model_copy(update={"num_key_value_heads": LLAMA.num_attention_heads})

    assert lora_widths(model, every=False) == 4 * model.hidden_size


def test_a_quantised_base_keeps_the_inputs_that_a_frozen_one_drops():
    plain, quantised = (
        ask(workload={**LORA, "method": method}, engine="litgpt") for method in ("lora", "qlora")
    )

    assert held(quantised, "activations") > held(plain, "activations")


def test_fused_norms_hold_less():
    written_out = {"fused_norms": False}

    assert peak(engine="megatron") < peak(engine="megatron", strategy=written_out)


def test_an_engine_that_loads_before_it_shards_holds_the_whole_model_once():
    strategy = {"zero_stage": 3, "activation_recomputation": "full"}
    moments = moments_of(engine="litgpt", devices=4, strategy=strategy)
    loading = moments[3].by_class

    vocabulary = 2 * 2 * LLAMA.vocab_size * LLAMA.hidden_size

    assert loading["buffers"] == pytest.approx(4 * loading["weights"] + vocabulary)


def test_an_engine_that_unties_holds_a_second_vocabulary():
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


def test_the_fullest_of_columns_is_chosen_row_by_row():
    early = StageMemory({"weights": 1.0, "activations": np.array([5.0, 1.0])})
    late = StageMemory({"weights": 1.0, "buffers": np.array([2.0, 2.0])})
    fullest = fullest_of([early, late])

    assert list(fullest.peak_bytes) == [6.0, 3.0]
    assert list(fullest.by_class["buffers"]) == [0.0, 2.0]


def test_copies_while_updating_stand_beside_no_activation():
    setting = resolve(EstimateRequest.model_validate(document(workload=FULL, engine="megatron")))
    engine = setting.engine.model_copy(update={"update_copies": 25.0})
    fatter = stage_moments(replace(setting, engine=engine), setting.workload)[2]

    assert fatter.by_class["buffers"] == pytest.approx(100 * setting.counts.total)
    assert fatter.by_class["activations"] == 0


def test_litgpt_trains_in_pure_16_bits():
    assert not get_engine("litgpt", "gpu").master_weights


@pytest.mark.parametrize(("kernel", "fused"), [("flash_attention2 + RMS kernel", 1), ("fused", 0)])
def test_a_rows_kernel_says_whether_its_norms_are_fused(kernel, fused):
    row = next(row for row in table("memory_fit") if row["kernel"] == kernel)

    assert strategy_of(row)["fused_norms"] == bool(fused)


def test_rows_that_accumulate_in_fp32_say_so():
    said = [row for row in table("memory") if "fp32 gradient accumulation" in row["notes"]]

    assert said
    assert all(strategy_of(row)["gradient_dtype"] == "fp32" for row in said)


def test_a_row_names_the_matrices_that_its_adapters_sit_on():
    targets = {
        row["row_id"]: training_request(row)["workload"]["lora_targets"]
        for row in usable(table("memory"))
        if row["method"] == "lora" and row["source_id"] == "litgpt-config-hub"
    }

    assert targets["mem-00021"] == "query_value"
    assert targets["mem-00045"] == "all"
