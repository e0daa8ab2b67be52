"""TorchAO's casts in torchtitan's steps, NVFP4's wide last layers, and rows asked as they ran."""

import pytest

from planner.catalog.engines import get_engine
from planner.catalog.models import get_model
from planner.fitting import unfitted
from planner.fitting.answered_rows import AnsweredRows
from planner.fitting.evidence import table, training_request
from planner.workload import torchao_casts as casts
from tests.planner.asking import LLAMA_8B, TRAIN, ask

ROWS, TOKENS = 4, 4 * 2048
WORK = {**TRAIN, "method": "pretrain", "sequence_length": 2048, "global_batch_size": 4 * ROWS}
LAYOUT = {"data_parallel_size": 4, "zero_stage": 3, "micro_batch_size": ROWS}
LAST = "Matrix products of the last layers: forward"


def step(compute, device="b200-sxm", engine="torchtitan", model=LLAMA_8B):
    strategy = {**LAYOUT, "compute_dtype": compute, "weight_dtype": "bf16"}
    return ask(
        model=model, device=device, devices=4, engine=engine, workload=WORK, strategy=strategy
    )


def cast_terms(answer):
    return {term.name: term for term in answer.terms if term.key == "torchao_casts"}


def moved(term):
    return next(each.value for each in term.inputs if each.name == "moved bytes")


def test_each_tensor_is_cast_once_for_each_direction_that_a_product_reads():
    model = get_model(LLAMA_8B)
    inputs, outputs = 3 * 4096 + 14336, 3 * 4096 + 2 * 1024 + 2 * 14336
    assert casts.input_elements(model) == inputs
    assert casts.gradient_elements(model) == outputs
    again = 0.37  # key, output and up of every layer
    eight = cast_terms(step("fp8"))
    for name, elements, times in (
        ("inputs, along rows", TOKENS * inputs, 1 + again),
        ("inputs, along columns", TOKENS * inputs, 1),
        ("gradients, along rows", TOKENS * outputs, 1),
        ("gradients, along columns", TOKENS * outputs, 1),
    ):
        read_and_written = 32 * elements * times * (2 + 1 + 1 / 32)
        assert moved(eight[f"Casting {name}"]) == pytest.approx(read_and_written, rel=0.01), name
    four = cast_terms(step("nvfp4"))
    name = "Casting gradients, both ways, rounded at random"
    assert moved(four[name]) == pytest.approx(27 * TOKENS * outputs * 3.125)
    assert len(eight) == len(four) == 6


def test_only_torchao_on_units_with_block_scales_has_these_casts():
    for compute, device, engine, expected in (
        ("fp8", "b200-sxm", "torchtitan", True), ("nvfp4", "gb200-nvl72", "torchtitan", True),
        ("bf16", "b200-sxm", "torchtitan", False), ("fp8", "h100-sxm5-80gb", "torchtitan", False),
        ("fp8", "b200-sxm", "nemo", False),
    ):  # fmt: skip
        answer = step(compute, device, engine)
        assert bool(cast_terms(answer)) == expected, (compute, device, engine)
        generic = any(term.name == "Casting to narrow formats" for term in answer.terms)
        assert generic == (not expected and compute != "bf16"), (compute, device, engine)


def test_the_last_layers_of_nvfp4_stay_in_16_bits_and_the_others_keep_codes():
    # torchtitan, components/quantization/nvfp4.md: layers 0 to 26 of 32, 0 to 29 of 36.
    for model, layers, narrow in ((LLAMA_8B, 32, 27), ("Qwen/Qwen3-8B", 36, 30)):
        flops = {term.name: term.value for term in step("nvfp4", model=model).terms}
        wide = flops[LAST] / (flops[LAST] + flops["Matrix products: forward"])
        assert wide == pytest.approx(1 - narrow / layers), model
    eight, four = (step(compute) for compute in ("fp8", "nvfp4"))
    assert all(term.name != LAST for term in eight.terms)
    # A layer's input, the attention core's output, and 4.5 bits of each product's input.
    codes = 27 * (2 * 4096 + 2 * 4096 + 26624 * 4.5 / 8) + 5 * 63_488
    held = [each.memory.breakdown_bytes["activations"] for each in (eight, four)]
    assert held[0] - held[1] == pytest.approx(TOKENS * (32 * 63_488 - codes), rel=0.01)


def test_adapters_without_dropout_move_fewer_bytes():
    work = {**TRAIN, "method": "lora", "sequence_length": 2048, "global_batch_size": 8}
    found = []
    for engine in ("nemo_automodel", "torchtitan"):
        layout = {"activation_recomputation": "full", "micro_batch_size": 1}
        answer = ask(model=LLAMA_8B, engine=engine, workload=work, strategy=layout)
        named = "Norms, activations, residuals, loss"
        found.append(moved(next(term for term in answer.terms if term.name == named)))
    # Inputs and outputs of the seven matrices, in three passes and the recomputed one.
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert found[1] - found[0] == pytest.approx(4 * 3 * 2048 * widths * 32)


def test_unfitted_trainings_are_asked_as_their_sources_say():
    rows = {row["row_id"]: row for row in table("unfitted_training")}
    for row_id, field, expected in (
        ("e1-tr-00029", "offload", {"weights_cpu": 1.0, "optimizer": "cpu"}),
        ("e1-tr-00027", "offload", None), ("e1-tr-00012", "fused_norms", True),
        ("e1-tr-00009", "expert_parallel_size", 64),
        ("e1-tr-00016", "activation_recomputation", "full"),
    ):  # fmt: skip
        asked = training_request(rows[row_id])
        assert asked["strategy"].get(field) == expected, (row_id, field)
    assert training_request(rows["e1-tr-00027"])["workload"]["lora_rank"] == 64
    assert not get_engine("fsdp_qlora", "gpu", training=True).fp32_beside_packed


def test_what_an_allocator_reserved_holds_no_context():
    row = next(row for row in table("unfitted_training") if row["row_id"] == "e1-tr-00102")
    held = []
    for definition in ("reserved", "device"):
        own = {**row, "memory_definition": definition}
        _, answer = next(AnsweredRows().among([own], training_request))
        found = unfitted._compared(own, answer, "peak_memory_bytes", 1.0)
        held.append(found.ratio)
    assert held[1] - held[0] == 2**30
