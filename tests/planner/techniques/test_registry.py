"""The registry: each technique has its source, its test of applicability and a worked example."""

import re

import pytest

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from planner.errors import UnknownTechniqueError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
)
from planner.techniques.registry import TECHNIQUES, Case, get, inapplicable, used_by
from tests.planner.asking import CPU, LLAMA_8B, MIXTRAL, search

SERVING = ServeWorkload(input_tokens=1024, output_tokens=128, concurrency=8)
TRAINING = TrainWorkload(sequence_length=2048, global_batch_size=16)
LORA = TRAINING.model_copy(update={"method": "lora"})
OFFLINE = GenerateWorkload(batch_size=4, input_tokens=64, output_tokens=64)


def case(workload=SERVING, model=LLAMA_8B, device="b200", devices=8):
    found = DeviceSpec.model_validate(CPU) if device == "cpu" else get_device(device)
    cluster = ClusterSpec(device=found, devices_per_node=devices)
    return Case(get_model(model), found, cluster, workload)


def test_a_technique_says_what_it_does_and_who_published_it():
    for key in sorted(TECHNIQUES):
        technique = TECHNIQUES[key]
        assert technique.key == key, key
        assert technique.title, key
        assert technique.effect, key
        assert technique.source, key
        assert technique.phases, key


def test_a_techniques_example_is_a_strategy():
    for key in sorted(TECHNIQUES):
        Strategy.model_validate(TECHNIQUES[key].settings)


def test_a_technique_of_another_phase_says_so():
    for key in sorted(TECHNIQUES):
        technique = TECHNIQUES[key]
        others = {
            "inference": SERVING,
            "training": TRAINING,
            "compression": CompressWorkload(method="gptq"),
        }
        for phase, workload in others.items():
            if phase not in technique.phases:
                assert f"this is {phase}" in technique.reason_against(case(workload)), key


def test_what_cannot_apply_says_why_by_name():
    cases = (
        ("expert_parallel", {}, "this one is dense"),
        ("tensor_parallel", {"devices": 1}, "at least 2 devices"),
        ("data_parallel", {"devices": 1}, "at least 2 devices"),
        ("pipeline_parallel", {"devices": 1}, "at least 2 devices"),
        ("pcc", {"model": MIXTRAL}, "at least 2 nodes: this cluster has 1"),
        ("powerinfer", {}, "this model's are gated"),
        ("int8_dynamic", {"device": "p100-pcie-16gb"}, "p100-pcie-16gb has none"),
        ("lora", {"workload": TRAINING}, "this is full"),
        ("cramming", {"workload": TRAINING}, "training from scratch: this is full"),
        ("sheared_llama", {"workload": LORA}, "lora trains adapters"),
        ("paged_attention", {"workload": OFFLINE}, "requests that come and go"),
        ("dfx", {}, "b200-sxm is a gpu"),
        ("instance_selection", {"device": "p40"}, "the catalog has none for p40"),
        ("fp8", {"device": "a100"}, "a100-sxm4-80gb has none"),
        ("nvfp4", {"device": "h100"}, "needs nvfp4"),
        ("zero_offload", {"device": "cpu", "workload": TRAINING}, "this one is the host"),
        (
            "zero_1",
            {"workload": TRAINING.model_copy(update={"global_batch_size": 1})},
            "at least 2 sequences",
        ),
    )
    wrong = [
        (key, situation, reason)
        for key, situation, reason in cases
        if reason not in get(key).reason_against(case(**situation))
    ]
    assert not wrong, wrong


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


def test_a_plan_names_every_technique_that_does_not_apply_to_it():
    rejected = search().rejected
    for key, reason in inapplicable(case(device="h100", devices=1)).items():
        assert rejected[key].reason.split(":")[0] == reason.split(":")[0]


PLACE = re.compile(
    r"guide|(review|survey), [IVX]+-[A-H]\w*( and ([IVX]+-[A-H]\w*|Table \d+))*", re.ASCII
)


def test_where_the_papers_tell_of_a_technique_is_a_section_of_one():
    told = [one.reviewed for one in TECHNIQUES.values() if one.reviewed]
    assert len(told) >= 80
    assert all(PLACE.fullmatch(place) for text in told for place in text.split("; "))


def test_a_technique_that_no_paper_of_the_project_tells_of_has_its_own_source():
    silent = [one for one in TECHNIQUES.values() if not one.reviewed]
    assert len(silent) < 10
    assert all(one.source for one in silent)
