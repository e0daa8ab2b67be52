"""A checkpoint written beside the steps copies what it writes: how many bytes, and where to."""

import pytest

from planner.api import estimate, plan
from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.errors import NotCoveredError
from planner.specs.estimate import EstimateRequest, PlanRequest
from tests.planner.asking import CPU, SERVE, TINY, TRAIN, ask, document

MODEL = "HuggingFaceTB/SmolLM2-135M"
PARAMETERS = count_parameters(get_model(MODEL)).total
TERM = "Checkpoint copy in host memory"
WIDE = {"weight_dtype": "fp32", "compute_dtype": "bf16"}
BESIDE, IN_STEP = {"checkpoint_writing": "background"}, {"checkpoint_writing": "in_step"}


def held(strategy=None, **fields):
    fields = {"model": MODEL, "workload": TRAIN, **fields}
    return ask(**fields, strategy={**WIDE, **(strategy or {})})


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw", 12), ("adamw_8bit", 6), ("lion", 8), ("adafactor", 4)]
)
def test_on_a_gpu_the_copy_of_weights_and_states_lies_in_host_memory(optimizer, each):
    workload = {**TRAIN, "optimizer": optimizer}
    usual, waits = held(workload=workload), held(IN_STEP, workload=workload)

    assert usual.memory.host_bytes == pytest.approx(each * PARAMETERS)
    assert waits.memory.host_bytes is None
    assert usual.memory.breakdown_bytes == waits.memory.breakdown_bytes
    (term,) = (one for one in usual.terms if one.name == TERM)
    assert (term.unit, term.equation) == ("B", "C = n · (B_w + B_s) · (p + g)")
    assert "CheckFreq" in term.source
    assert [one.value for one in term.inputs] == [PARAMETERS, 4, each - 4, 1, 0]


def test_parts_of_ranks_are_gathered_beside_them_and_whole_copies_are_copied_once():
    copies, shards = (
        held({"data_parallel_size": 4, "zero_stage": stage}, devices=4).memory.host_bytes
        for stage in (0, 2)
    )
    assert (copies, shards) == (12 * PARAMETERS, 2 * 12 * PARAMETERS)


def test_an_adapters_copy_is_the_adapters_alone():
    lora = held(workload={**TRAIN, "method": "lora", "lora_rank": 8})
    (term,) = (one for one in lora.terms if one.name == TERM)

    assert 0 < lora.memory.host_bytes < 0.25 * PARAMETERS
    assert term.inputs[1].value == 4  # adapters learn in fp32


@pytest.mark.parametrize(
    ("ranks", "stage", "share"), [(1, 0, 1), (2, 0, 1), (2, 3, 1.5), (4, 1, 1.25)]
)
def test_on_a_processor_it_lies_beside_the_states_and_only_where_it_is_chosen(ranks, stage, share):
    layout = {"data_parallel_size": ranks, "zero_stage": stage}
    usual, waits, beside = (
        held({**layout, **how}, device=CPU, devices=ranks, model=TINY).memory
        for how in ({}, IN_STEP, BESIDE)
    )
    whole = next(
        one.inputs[0].value
        for one in held({**layout, **BESIDE}, device=CPU, devices=ranks, model=TINY).terms
        if one.name == TERM
    )

    assert usual == waits
    assert beside.host_bytes is None
    more = beside.per_device_peak_bytes - usual.per_device_peak_bytes
    assert more == pytest.approx(12 * whole * share, rel=0.01)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_engines_of_others_copy_where_it_is_asked_and_states_on_disk_never(engine):
    usual, asked = (held(how, engine=engine).memory.host_bytes for how in ({}, BESIDE))
    away = held({**BESIDE, "offload": {"optimizer": "nvme"}}, engine=engine)

    assert usual is None
    assert asked > 8 * PARAMETERS
    assert not any(one.name == TERM for one in away.terms)


def test_a_host_too_small_for_the_copy_is_warned_of():
    asked = document(model=MODEL, workload=TRAIN, strategy=WIDE)
    asked["cluster"]["host_memory_bytes"] = 2**30
    found = estimate(EstimateRequest.model_validate(asked))

    said = f"what is offloaded needs {12 * PARAMETERS / 2**30:.1f} GiB of host memory"
    assert any(warning.startswith(said) for warning in found.warnings)


def test_a_search_counts_what_is_pinned_and_serving_knows_no_checkpoints():
    fields = {"model": TINY, "device": CPU, "workload": TRAIN}
    best = {
        how: plan(PlanRequest.model_validate(document(**fields, pins={"checkpoint_writing": how})))
        for how in ("in_step", "background")
    }
    peaks = {how: found.plans[0].memory.per_device_peak_bytes for how, found in best.items()}

    assert peaks["background"] > peaks["in_step"]
    assert best["background"].plans[0].strategy.checkpoint_writing == "background"
    with pytest.raises(NotCoveredError, match="checkpoints, which training writes; leave it out"):
        ask(workload=SERVE, strategy=BESIDE)
