"""The product's own runner on a CPU, held against what it measured there.

Two quiet cores of an AMD EPYC (AMX), PyTorch 2.13, 2026-11-21; the device's rates are those
of its own micro-benchmark on the same day.
"""

import pytest

from planner.workload.training_kernels import ROUNDING_BYTES, ROUNDINGS
from tests.planner.asking import TRAIN, ask

MEASURED_HOST = {
    "id": "two-quiet-cores",
    "kind": "cpu",
    "memory_bytes": 25_276_502_016,
    "memory_bandwidth_bytes_per_second": 66.3e9,
    "peak_flops_per_second": {"fp32": 192.7e9, "bf16": 428.8e9, "int8": 739.1e9},
    "op_overhead_seconds": 2.62e-6,
    "runtime_overhead_bytes": 408_719_360,
    "provenance": "measured",
    "as_of": "2026-11-21",
}
DEMO = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def step_of(batch, compute):
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}
    return ask(
        model=DEMO,
        device=MEASURED_HOST,
        workload={**workload, "global_batch_size": batch},
        strategy={"compute_dtype": compute},
    )


@pytest.mark.parametrize(
    ("batch", "compute", "measured_seconds"),
    [
        pytest.param(2, "bf16", 0.0617, id="2-bf16"),
        pytest.param(8, "bf16", 0.1932, id="8-bf16"),
        pytest.param(2, "fp32", 0.0991, id="2-fp32"),
        pytest.param(8, "fp32", 0.2864, id="8-fp32"),
    ],
)
def test_a_measured_training_step_lies_in_its_interval(batch, compute, measured_seconds):
    low, high = step_of(batch, compute).interval["step_seconds"]

    assert low < measured_seconds < high


def test_the_measured_peak_of_the_demos_training_lies_in_its_interval():
    # The demo job on the same quiet cores, libraries included; its text was tokenised before.
    host = {**MEASURED_HOST, "training_overhead_bytes": 101_056_000}
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}

    found = ask(
        model=DEMO,
        device=host,
        workload={**workload, "global_batch_size": 2},
        strategy={"compute_dtype": "bf16"},
    )
    low, high = found.interval["per_device_peak_bytes"]

    assert low < 645_554_176 < high


def test_products_in_8_bit_floats_are_emulated_where_no_unit_has_them():
    """Rounded operands are multiplied in fp32, and the output layer alone is copied to bf16."""
    wide, narrow = (step_of(2, compute) for compute in ("bf16", "fp8"))
    held = {name: each.memory.breakdown_bytes for name, each in (("w", wide), ("n", narrow))}

    assert any("products in fp8 are emulated: two-quiet-cores" in said for said in narrow.warnings)
    assert not any("emulated" in said for said in wide.warnings)
    assert narrow.performance.step_seconds > wide.performance.step_seconds
    assert held["n"]["buffers"] == 2 * 4096 * 192
    assert held["w"]["buffers"] > 2 * held["n"]["buffers"]
    for term in ("weights", "gradients", "optimizer_states", "activations"):
        assert held["n"][term] == held["w"][term]


def rounding_of(estimate):
    name = "Rounding operands to 8-bit floats"
    return next((one for one in estimate.terms if one.name == name), None)


def test_a_step_of_emulated_products_takes_the_rounding_of_its_operands_too():
    """On two cores of an AMD EPYC the demo's step took 2.3 times as long as bf16's."""
    wide, narrow = (step_of(2, compute) for compute in ("bf16", "fp8"))
    low, high = narrow.interval["step_seconds"]
    term = rounding_of(narrow)

    assert low < 2.3 * 0.0617 < high
    assert low < 2.52 * 0.0617 < high  # with other work beside it
    assert narrow.performance.step_seconds / wide.performance.step_seconds == pytest.approx(
        2.3, rel=0.1
    )
    assert term.value > 0.3 * narrow.performance.step_seconds
    assert (term.unit, term.operator_class) == ("s", "memory_bandwidth")
    operands = 512 * 4 * 3456 + 4 * (2 * 192 * 192 + 2 * 192 * 96 + 3 * 192 * 512)
    assert term.inputs[0].value == ROUNDING_BYTES * ROUNDINGS * operands
    assert rounding_of(wide) is None


@pytest.mark.parametrize(("how", "more"), [("selective", 1), ("full", 4 / 3)])
def test_what_runs_again_rounds_its_inputs_and_matrices_again(how, more):
    plain, again = (
        rounding_of(
            ask(
                model=DEMO,
                device=MEASURED_HOST,
                workload={**TRAIN, "sequence_length": 256, "global_batch_size": 2},
                strategy={"compute_dtype": "fp8", "activation_recomputation": kept},
            )
        ).value
        for kept in ("none", how)
    )

    assert again == pytest.approx(more * plain)


def test_products_in_8_bit_floats_run_at_their_own_peak_where_units_have_them():
    workload = {"kind": "train", "sequence_length": 256, "method": "pretrain"}
    found = [
        ask(
            model="meta-llama/Llama-3.1-8B",
            device="h100-sxm5-80gb",
            engine="torch",
            workload={**workload, "global_batch_size": 16},
            strategy={"compute_dtype": compute},
        )
        for compute in ("bf16", "fp8")
    ]

    assert found[1].performance.step_seconds < found[0].performance.step_seconds
    assert not any("emulated" in said for said in found[1].warnings)
    assert rounding_of(found[1]) is None


def test_what_training_adds_is_not_charged_to_a_generation():
    host = {**MEASURED_HOST, "training_overhead_bytes": 10**9}
    generate = {"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 32}

    found = ask(model=DEMO, device=host, workload=generate)

    assert found.memory.breakdown_bytes["runtime_overhead"] == 408_719_360


@pytest.mark.parametrize(
    ("dtype", "measured_tpot"),
    [  # median over five repetitions of 32 tokens after a prompt of 128, one job each
        pytest.param("int8", 0.0068, id="int8"),
        pytest.param("int4", 0.0049, id="int4"),
    ],
)
def test_a_measured_decode_step_lies_in_its_interval(dtype, measured_tpot):
    found = ask(
        model=DEMO,
        device=MEASURED_HOST,
        workload={"kind": "generate", "batch_size": 1, "input_tokens": 128, "output_tokens": 32},
        strategy={"weight_dtype": dtype},
    )
    low, high = found.interval["tpot_seconds"]

    assert low < measured_tpot < high
