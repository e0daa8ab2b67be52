"""The technique list: sources, tests of applicability, and worked examples that come out."""

import re

import pytest

from planner.catalog.devices import get_device
from planner.catalog.models import get_model
from planner.specs.base import NotCoveredError, UnknownTechniqueError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import (
    CompressWorkload,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
)
from planner.techniques.registry import (
    CONDITIONS,
    TECHNIQUES,
    Case,
    Example,
    Technique,
    both_estimates,
    changes,
    figure,
    get,
    inapplicable,
    overlaid,
    technique_row,
    used_by,
)
from planner.workload.resolve import resolve
from tests.planner.asking import CPU, GENERATE, LLAMA_8B, MIXTRAL, TRAIN, ask, document, search

SERVING = ServeWorkload(input_tokens=1024, output_tokens=128, concurrency=8)
TRAINING = TrainWorkload(sequence_length=2048, global_batch_size=16)
LORA = TRAINING.model_copy(update={"method": "lora"})
OFFLINE = GenerateWorkload(batch_size=4, input_tokens=64, output_tokens=64)


def case(workload=SERVING, model=LLAMA_8B, device="b200", devices=8):
    found = DeviceSpec.model_validate(CPU) if device == "cpu" else get_device(device)
    cluster = ClusterSpec(device=found, devices_per_node=devices)
    return Case(get_model(model), found, cluster, workload)


def test_a_technique_says_what_it_does_and_who_published_it_with_a_strategy():
    for key in sorted(TECHNIQUES):
        technique = TECHNIQUES[key]
        assert technique.key == key, key
        assert technique.title, key
        assert technique.effect, key
        assert technique.source, key
        assert technique.phases, key

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


def test_what_applies_has_no_reason_against_it_and_what_is_used_is_listed():
    reasons = inapplicable(case(model=MIXTRAL))
    assert "tensor_parallel" not in reasons
    assert "expert_parallel" not in reasons
    assert "fp8" not in reasons

    with pytest.raises(UnknownTechniqueError, match="gptq"):
        get("gptqq")

    strategy = Strategy(weight_dtype="fp8", tensor_parallel_size=8, attention="flash")
    used = used_by(strategy, case())
    assert {"fp8", "tensor_parallel", "flash_attention", "kv_cache"} <= set(used)
    assert "pipeline_parallel" not in used


def test_a_plan_names_techniques_of_the_registry_used_or_rejected():
    for plan in search(devices=8, engine="vllm", top=20).plans:
        assert set(plan.techniques) <= set(TECHNIQUES)
    rejected = search().rejected
    for key, reason in inapplicable(case(device="h100", devices=1)).items():
        assert rejected[key].reason.split(":")[0] == reason.split(":")[0]


PLACE = re.compile(
    r"guide|(review|survey), [IVX]+-[A-H]\w*( and ([IVX]+-[A-H]\w*|Table \d+))*", re.ASCII
)


def test_every_row_of_the_list_is_in_the_registry_with_a_paper_or_its_own_source():
    told = [one.reviewed for one in TECHNIQUES.values() if one.reviewed]
    assert len(told) >= 80
    assert all(PLACE.fullmatch(place) for text in told for place in text.split("; "))
    silent = [one for one in TECHNIQUES.values() if not one.reviewed]
    assert len(silent) < 10
    assert all(one.source for one in silent)

    for key in ROWS:
        technique = get(key)
        assert technique.applicability[0].startswith("the work is"), key
        assert technique.terms, key


ROWS = [
    "fp16_bf16", "int8_weight_only", "int8_dynamic", "int4_weight_only",
    "quantization_aware_training", "gptq", "awq", "fptq_w4a8", "norm_tweaking", "finequant",
    "quantease", "fp8", "qmoe", "sparsegpt", "llm_pruner", "sheared_llama", "model_pruning",
    "lora", "qlora", "alphatuning", "qft", "lomo", "adalomo", "cramming", "growlength",
    "mixed_precision", "gradient_checkpointing", "data_parallel", "zero_1", "zero_2", "zero_3",
    "tensor_parallel", "sequence_parallel", "pipeline_gpipe", "pipeline_1f1b",
    "pipeline_interleaved", "pipeline_zero_bubble", "ptd_p", "expert_parallel", "pcc",
    "colossal_ai", "collie", "automatic_parallelism", "zero_offload", "zero_infinity",
    "swapadvisor", "swarm", "elastic_training", "gradient_compression", "decentralized_training",
    "overlap", "hierarchical_collectives", "topology_mapping", "lightseq2", "fused_kernels",
    "flash_attention", "bytetransformer", "padding_free", "kv_cache", "paged_attention",
    "continuous_batching", "dynamic_batching", "turbotransformers", "tensor_parallel_inference",
    "pipeline_parallel_inference", "expert_parallel_inference", "zero_inference",
    "accelerate_offload", "flexgen", "petals", "splitwise", "powerinfer", "moe_offload", "pets",
    "lightseq", "eet", "nlp_fast", "speculative_decoding", "quantized_kv_cache", "dfx",
    "llmcompass", "tier_local_machine", "tier_local_server", "tier_cloud", "tier_hpc",
    "instance_selection", "energy_cost", "distilbert_validation",
]  # fmt: skip
COSTED = [key for key, one in TECHNIQUES.items() if one.example]


def test_an_examples_figures_move_as_published_and_the_rest_stays():
    for key in COSTED:
        found = changes(get(key))
        assert [change.to_json() for change in found if not change.holds] == [], key
        assert any(change.expected != (1.0, 1.0) for change in found), key


def test_a_technique_applies_to_its_own_example_and_is_seen_in_use():
    for key in COSTED:
        technique = get(key)
        example = technique.example
        request = EstimateRequest.model_validate(overlaid(example.request, example.on))
        setting = resolve(request)
        case = Case(setting.model, setting.device, setting.cluster, setting.workload)
        assert technique.reason_against(case) == "", key
        is_seen = technique.used and "model" not in example.on
        assert not is_seen or key in used_by(setting.strategy, case), key


def test_few_techniques_are_only_named_and_none_without_alternatives_is_seen():
    named = [one for one in TECHNIQUES.values() if not one.example]
    assert all(one.only_named for one in named)
    assert all(one.planned == "applicability only" for one in named)
    assert not any(one.only_named for one in TECHNIQUES.values() if one.example)
    needed = {name for one in TECHNIQUES.values() for name in one.needs}
    assert needed == set(CONDITIONS)

    technique = Technique(
        key="a", title="A", phases=frozenset({"inference"}), effect="none", source="us"
    )
    assert not technique.is_used(ask().strategy, None)


def test_terms_are_figures_of_an_estimate_and_others_are_refused():
    answer = ask()
    for key in sorted(TECHNIQUES):
        for name in TECHNIQUES[key].terms:
            figure(answer, name)

    with pytest.raises(KeyError, match="speed"):
        figure(ask(), "speed")
    answer = ask()
    term = answer.terms[0]
    assert figure(answer, f"term_{term.key}") >= term.value


def test_an_overlay_replaces_values_and_keeps_the_rest_of_an_object():
    base = {"strategy": {"zero_stage": 1, "micro_batch_size": 2}, "model": "a"}
    laid = overlaid(base, {"strategy": {"zero_stage": 3}, "model": {"b": 1}})
    assert laid == {"strategy": {"zero_stage": 3, "micro_batch_size": 2}, "model": {"b": 1}}
    assert base["strategy"]["zero_stage"] == 1


def test_a_figure_or_tensor_class_that_moves_otherwise_is_told():
    example = get("zero_1").example.model_copy(update={"expect": {"optimizer_states": (2.0, 3.0)}})
    wrong = get("zero_1").model_copy(update={"example": example})
    (change, *_) = changes(wrong)
    assert not change.holds
    example = get("zero_3").example.model_copy(update={"also": ()})
    wrong = get("zero_3").model_copy(update={"example": example})
    assert [one.figure for one in changes(wrong) if not one.holds] == ["buffers"]


def test_a_row_shows_applicability_and_figures_unless_it_is_only_named():
    row = technique_row(get("zero_1"))
    assert row["planned"] == "costed"
    assert "the cluster has at least 2 devices" in row["applicability"]
    assert row["example"]["figures"][0]["ratio"] == pytest.approx(1 / 64)

    told = {"example": None, "only_named": "nobody measured it"}
    row = technique_row(get("dfx").model_copy(update=told))
    assert row["planned"] == "applicability only"
    assert "example" not in row
    assert row["only_named"]


def test_examples_without_and_with_differ_in_what_is_laid_over():
    example = Example(
        request={
            "model": "facebook/opt-125m",
            "cluster": {"device": "t4"},
            "workload": {
                "kind": "generate",
                "batch_size": 1,
                "input_tokens": 8,
                "output_tokens": 8,
            },
        },
        on={"workload": {"batch_size": 2}},
        published="definition",
    )

    without, with_ = both_estimates(example)

    assert figure(with_, "kv_cache") == 2 * figure(without, "kv_cache")


AWAY = {"weights_cpu": 0.65}


def offloaded(active=None, **workload):
    offload = AWAY if active is None else {**AWAY, "weights_active_ratio": active}
    return ask(
        model="facebook/opt-30b",
        device="rtx-4090",
        engine="llama_cpp",
        workload={**GENERATE, **workload},
        strategy={"weight_dtype": "fp16", "offload": offload},
    )


def test_quiet_neurons_spare_reads_and_no_memory_until_many_tokens_need_them():
    steps = [offloaded(active).performance.tpot_seconds for active in (None, 0.5, 0.1, 0.01)]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] < 0.6 * steps[0]

    assert offloaded(1.0).performance.tpot_seconds == pytest.approx(
        offloaded().performance.tpot_seconds
    )

    one, many = (
        offloaded(0.1, batch_size=batch).performance.tpot_seconds
        / offloaded(batch_size=batch).performance.tpot_seconds
        for batch in (1, 64)
    )

    assert one < 0.2
    assert many > 0.9

    quiet, loud = offloaded(0.1).memory, offloaded().memory
    assert quiet.host_bytes == loud.host_bytes
    assert quiet.breakdown_bytes == loud.breakdown_bytes


def test_training_reads_all_weights():
    with pytest.raises(NotCoveredError, match="weights_active_ratio"):
        ask(
            workload=TRAIN,
            engine="deepspeed",
            strategy={"offload": {"optimizer": "cpu", "weights_active_ratio": 0.1}},
        )


def case_of(**device):
    given = {
        "kind": "accelerator",
        "memory_bytes": 2**36,
        "memory_bandwidth_bytes_per_second": 4.6e11,
        "peak_flops_per_second": {"fp16": 4.1e11},
        **device,
    }
    setting = resolve(EstimateRequest.model_validate(document(device=given)))
    return Case(setting.model, setting.device, setting.cluster, setting.workload)


def test_an_appliance_is_known_by_its_id_alone():
    assert get("dfx").reason_against(case_of(id="alveo-u280-fpga")) == ""
    for device in ({"id": "asic"}, {"id": "fpga", "kind": "gpu"}):
        assert "needs an FPGA appliance" in get("dfx").reason_against(case_of(**device)), device
