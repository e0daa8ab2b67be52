"""The registry: each technique has its source, its test of applicability and a worked example."""

import pytest

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from planner.errors import UnknownTechniqueError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import CompressWorkload, ServeWorkload, TrainWorkload
from planner.techniques.registry import TECHNIQUES, get, inapplicable, used_by
from planner.techniques.technique import Case
from tests.planner.asking import CPU, LLAMA_8B, MIXTRAL, TRAIN, ask, held, search

SERVING = ServeWorkload(input_tokens=1024, output_tokens=128, concurrency=8)
TRAINING = TrainWorkload(sequence_length=2048, global_batch_size=16)


def case(workload=SERVING, model=LLAMA_8B, device="b200", devices=8):
    found = DeviceSpec.model_validate(CPU) if device == "cpu" else get_device(device)
    cluster = ClusterSpec(device=found, devices_per_node=devices)
    return Case(get_model(model), found, cluster, workload)


@pytest.mark.parametrize("key", sorted(TECHNIQUES))
def test_a_technique_says_what_it_does_and_who_published_it(key):
    technique = TECHNIQUES[key]

    assert technique.key == key
    assert technique.title
    assert technique.effect
    assert technique.source
    assert technique.phases


@pytest.mark.parametrize("key", sorted(TECHNIQUES))
def test_a_techniques_example_is_a_strategy(key):
    Strategy.model_validate(TECHNIQUES[key].settings)


@pytest.mark.parametrize("key", [key for key in sorted(TECHNIQUES) if TECHNIQUES[key].settings])
def test_a_techniques_example_uses_the_technique(key):
    technique = TECHNIQUES[key]
    workload = SERVING if "inference" in technique.phases else TRAINING
    if technique.key == "qlora":
        workload = TRAINING.model_copy(update={"method": "qlora"})
    if technique.key in {"gptq", "awq"}:
        workload = CompressWorkload(method=technique.key)

    example = Strategy.model_validate(technique.settings)

    assert technique.is_used(example, case(workload, model=MIXTRAL))


@pytest.mark.parametrize("key", sorted(TECHNIQUES))
def test_a_technique_of_another_phase_says_so(key):
    technique = TECHNIQUES[key]
    others = {
        "inference": SERVING,
        "training": TRAINING,
        "compression": CompressWorkload(method="gptq"),
    }
    for phase, workload in others.items():
        if phase not in technique.phases:
            assert f"this is {phase}" in technique.reason_against(case(workload))


@pytest.mark.parametrize(
    ("key", "situation", "reason"),
    [
        ("expert_parallel", {}, "this one is dense"),
        ("tensor_parallel", {"devices": 1}, "at least 2 devices"),
        ("data_parallel", {"devices": 1}, "at least 2 devices"),
        ("pipeline_parallel", {"devices": 1}, "at least 2 devices"),
        ("fp8", {"device": "a100"}, "a100-sxm4-80gb has none"),
        ("nvfp4", {"device": "h100"}, "needs nvfp4"),
        ("zero_offload", {"device": "cpu", "workload": TRAINING}, "this one is the host"),
        (
            "zero_1",
            {"workload": TRAINING.model_copy(update={"global_batch_size": 1})},
            "at least 2 sequences",
        ),
    ],
)
def test_what_cannot_apply_says_why_by_name(key, situation, reason):
    assert reason in get(key).reason_against(case(**situation))


def test_what_applies_has_no_reason_against():
    reasons = inapplicable(case(model=MIXTRAL))

    assert "tensor_parallel" not in reasons
    assert "expert_parallel" not in reasons
    assert "fp8" not in reasons


def test_an_unknown_technique_is_refused_with_the_nearest():
    with pytest.raises(UnknownTechniqueError, match="gptq"):
        get("gptqq")


def test_a_strategy_lists_the_techniques_that_it_uses():
    strategy = Strategy(weight_dtype="fp8", tensor_parallel_size=8, attention="flash")

    used = used_by(strategy, case())

    assert {"fp8", "tensor_parallel", "flash_attention", "kv_cache"} <= set(used)
    assert "pipeline_parallel" not in used


def test_every_technique_of_a_plan_is_in_the_registry():
    for plan in search(devices=8, engine="vllm", top=20).plans:
        assert set(plan.techniques) <= set(TECHNIQUES)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ({"weight_dtype": "int8"}, "weights"),
        ({"weight_dtype": "int4"}, "weights"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache"),
    ],
)
def test_quantisation_has_the_effect_that_it_promises(strategy, name):
    assert held(ask(strategy=strategy), name) < held(ask(), name)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ({"zero_stage": 1}, "optimizer_states"),
        ({"zero_stage": 2}, "gradients"),
        ({"zero_stage": 3}, "weights"),
        ({"activation_recomputation": "full"}, "activations"),
    ],
)
def test_a_training_technique_has_the_effect_that_it_promises(strategy, name):
    base = {"devices": 4, "workload": TRAIN, "engine": "megatron"}

    assert held(ask(**base, strategy=strategy), name) < held(ask(**base), name)
