"""The planner's request of a document: a pure function, without a database."""

import re

import pytest
from pydantic import ValidationError

from planner.catalog.devices import get_device
from planner.catalog.engines import AUTO, DEFAULT_ENGINE
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import (
    HostCalibration,
    MemoryAnswer,
    PlannedStrategy,
    PlanRequest,
)
from planner.specs.on_policy import RolloutSpec
from planner.specs.workload import ServeWorkload, Strategy
from planner.workload.rollouts import generator_reason
from runners.jobspec import FolderModel
from runners.plans.document import PLANS, PlanDocument
from runners.plans.fields import shown_of
from runners.plans.refusals import DraftProblem
from runners.plans.request import (
    Surroundings,
    catalog_cluster,
    recomputations_of,
    request_of,
    shared_processor,
)
from runners.plans.training_spec import train_spec
from runners.plans.workloads import FinetuneWork, ServeWork

MODEL = "HuggingFaceTB/SmolLM2-135M"
HOST = Surroundings(MODEL, ClusterSpec(device="h100-sxm5-80gb"), runs_jobs=True)
POOL = Surroundings(MODEL, ClusterSpec(device="a100-80gb", nodes=2), runs_jobs=True, is_pool=True)
CATALOG = Surroundings(MODEL)
PLANNED_FOR = Surroundings(MODEL, HOST.cluster)  # a host of which only the plans are wanted


def plan(goal: str, workload=None, hardware=None, **fields) -> PlanDocument:
    return PLANS[goal](goal=goal, workload=workload or {}, hardware=hardware or {}, **fields)


def planner_request(goal: str, workload=None, surroundings=HOST, **fields) -> PlanRequest:
    return request_of(plan(goal, workload, **fields), surroundings)


def differs(part, expected: dict) -> dict:
    """Return the fields of a part that differ from those expected."""
    return {name: each for name in expected if (each := getattr(part, name)) != expected[name]}


def test_the_workload_of_each_goal_is_the_planners():
    for goal, values, expected in [
        (
            "serve",
            {"input_tokens": 70, "concurrency": 3, "prefix_share_ratio": 0.5},
            {"input_tokens": 70, "concurrency": 3, "prefix_share_ratio": 0.5}
            | {"ttft_slo_seconds": 1.0, "tpot_slo_seconds": 0.05},
        ),
        (
            "generate",
            {"batch_size": 5, "output_tokens": 9, "prompts_path": "a.txt"},
            {"batch_size": 5, "input_tokens": 1024, "output_tokens": 9},
        ),
        ("pretrain", {"tokens": 4000}, {"method": "pretrain", "lora_rank": None, "tokens": 4000}),
        ("finetune", {"lora_rank": 24}, {"method": "lora", "lora_rank": 24}),
        ("finetune", {"method": "full", "lora_rank": 24}, {"method": "full", "lora_rank": None}),
        ("finetune", {"method": "qlora", "lora_rank": 24}, {"method": "qlora", "lora_rank": 24}),
        ("finetune", {"method": "classification"}, {"method": "full", "lora_rank": None}),
        ("finetune", {}, {"objective": "supervised", "precompute_reference": False}),
        (
            "finetune",
            {"objective": "kto", "precompute_reference": True},
            {"objective": "kto", "precompute_reference": True, "sequences_per_record": 1},
        ),
        (
            "finetune",
            {"objective": "grpo", "reward_function": "exact_match", "max_prompt_length": 100}
            | {"global_batch_size": 3, "num_generations": 4, "max_completion_length": 28},
            {"objective": "grpo", "global_batch_size": 12, "num_generations": 4}
            | {"max_prompt_length": 100, "max_completion_length": 28, "beta": 0.0},
        ),
        (
            "finetune",
            {"objective": "distillation", "teacher_model": " Qwen/Qwen3-8B ", "beta": 0.5}
            | {"global_batch_size": 3, "max_completion_length": 28, "generator": "colocated"},
            {"objective": "distillation", "teacher_model": "Qwen/Qwen3-8B", "beta": 0.0}
            | {"global_batch_size": 3, "max_completion_length": 28, "generator": "colocated"},
        ),
        ("finetune", {"objective": "reward"}, {"sequences_per_record": 2, "method": "lora"}),
        ("pretrain", {}, {"method": "pretrain", "lora_rank": None, "tokens": None}),
        (
            "pretrain",
            {"length_schedule": "grow", "tokens": 4000, "sequence_length": 16},
            {"length_schedule": ((2, 0.25), (4, 0.25), (8, 0.25), (16, 0.25))},
        ),
    ]:
        assert differs(planner_request(goal, values).workload, expected) == {}, (goal, values)


def test_who_compares_answers_gets_trl_everywhere_unless_another_engine_is_named():
    for objective, engine, planned in [
        ("supervised", None, (None, "torch")),
        ("supervised", "trl", ("trl", "trl")),
        ("supervised", "torch", ("torch", "torch")),
        ("dpo", None, ("trl", "trl")),
        ("dpo", "torch", ("torch", "torch")),
    ]:
        found = tuple(
            planner_request(
                "finetune", {"objective": objective}, where, hardware={"engine": engine}
            ).engine
            for where in (CATALOG, HOST)
        )
        assert found == planned, (objective, engine)


def test_a_supervised_training_by_trl_is_planned_for_one_device_of_its_engine():
    found = planner_request("finetune", {}, HOST, hardware={"engine": "trl"})
    assert (found.engine, found.pins.data_parallel_size) == ("trl", 1)


def test_answers_are_generated_as_a_job_does_on_a_host_and_left_open_for_catalog_hardware():
    rewarded = {"objective": "grpo", "reward_function": "exact_match"}
    by_job, by_person = "as jobs here do", "as pins.rollout.engine states"
    for where, pinned, engine, why in [
        (HOST, None, "transformers", by_job),
        (
            HOST,
            {"sleep": "generator"},
            "transformers",
            by_job,
        ),  # which the planner refuses by name
        (HOST, {"engine": "transformers"}, "transformers", by_person),
        (HOST, {"engine": "vllm"}, "vllm", by_person),  # which the launch refuses by name
        (CATALOG, None, None, "no engine is pinned, and on GPUs a server generates"),
        (CATALOG, {"engine": "sglang"}, "sglang", by_person),
    ]:
        pins = {"rollout": pinned} if pinned else {}
        found = planner_request("finetune", rewarded, where, pins=pins)
        rollout = found.pins.rollout
        assert (rollout.engine if rollout else None) == engine, (where, pinned)
        planned = RolloutSpec(engine=engine or "vllm")
        assert generator_reason(planned, found, get_device("h100-sxm5-80gb")).endswith(why), (
            where,
            pinned,
        )
        assert found.workload.generator is None
    for named in ("colocated", "separate"):
        found = planner_request("finetune", rewarded | {"generator": named}, CATALOG)
        assert found.workload.generator == named


def test_lengths_that_grow_with_an_objective_and_a_reward_model_by_qlora_are_refused_by_name():
    for workload, said in [
        (
            {"objective": "dpo", "length_schedule": "grow", "tokens": 4000},
            "Lengths grow in superv",
        ),
        ({"objective": "reward", "method": "qlora"}, "QLoRA leaves a reward model no head"),
    ]:
        with pytest.raises(ValidationError, match=said):
            planner_request("finetune", workload)
    with pytest.raises(DraftProblem, match=r"choose at least 2\.$") as refused:
        planner_request("finetune", {"objective": "kto", "global_batch_size": 1})
    assert refused.value.field == "global_batch_size"


def test_slipways_own_trainer_never_runs_a_comparison_as_supervised_steps():
    memory = MemoryAnswer.model_construct(per_stage_layers=())
    best = PlannedStrategy.model_construct(strategy=Strategy(), memory=memory)
    for objective in ("dpo", "kto", "orpo", "reward"):
        values = FinetuneWork(objective=objective)
        with pytest.raises(DraftProblem, match=f"objective {objective} is one of TRL's trainers"):
            train_spec(values, FolderModel(path="m"), best, trainer="slipway")


def test_every_field_of_serving_is_one_that_the_planner_costs():
    unknown = ServeWork.model_fields.keys() - ServeWorkload.model_fields.keys()
    assert not unknown, (
        f"{sorted(unknown)} of ServeWork would change no plan: let planner/specs/workload.py: "
        "ServeWorkload have them and planner/cost or planner/workload cost them, or make them "
        "options of Launch (recipe: an option of a training, a generation or an endpoint)"
    )


def test_a_compression_is_asked_in_its_bits_and_groups():
    for method, bits, group_size in [
        ("int8_weight_only", 8, None),
        ("int8_dynamic", 8, None),
        ("fp8", None, None),
        ("qmoe", None, None),
        ("gguf", 3, 32),
        ("sparsegpt", 16, None),
        ("llm_pruner", 16, None),
        ("int4_weight_only", 4, 32),
        ("nf4", 4, 32),
        ("gptq", 3, 32),
        ("awq", 3, 32),
    ]:
        workload = planner_request(
            "compress", {"method": method, "bits": 3, "group_size": 32}
        ).workload
        assert (workload.bits, workload.group_size) == (bits, group_size), method


def test_a_latency_target_asks_what_its_words_promise_and_belongs_to_serving_alone():
    words = shown_of(PlanDocument.model_fields["latency_target"]).choices
    for target in ["chat", "code"]:
        first, rate = re.findall(r"within ([\d.]+) s, then (\d+) tokens a second", words[target])[
            0
        ]
        workload = planner_request("serve", latency_target=target).workload
        assert workload.ttft_slo_seconds == float(first), target
        assert round(1 / workload.tpot_slo_seconds) == int(rate), target
    workload = planner_request("serve", latency_target="none").workload
    assert (workload.ttft_slo_seconds, workload.tpot_slo_seconds) == (None, None)
    generation = planner_request("generate", latency_target="code")
    assert "slo" not in generation.model_dump_json(exclude_none=True)


def test_a_document_without_an_engine_gets_one_by_its_goal_and_hardware():
    for goal, surroundings, hardware, engine in [
        ("serve", HOST, {}, None),
        ("finetune", HOST, {}, DEFAULT_ENGINE),
        ("serve", HOST, {"engine": "sglang"}, "sglang"),
        ("finetune", HOST, {"engine": "sglang"}, DEFAULT_ENGINE),
        ("serve", PLANNED_FOR, {}, AUTO),
        ("serve", CATALOG, {}, AUTO),
        ("generate", CATALOG, {"device": "apple-m3-max"}, AUTO),
        ("generate", CATALOG, {"engine": "vllm"}, "vllm"),
        ("serve", CATALOG, {"engine": "deepspeed"}, AUTO),
        ("compress", CATALOG, {}, None),
        ("finetune", CATALOG, {}, None),
    ]:
        request = planner_request(goal, surroundings=surroundings, hardware=hardware)
        assert request.engine == engine, (goal, hardware)


def test_limits_objective_and_surroundings_reach_the_request():
    calibration = HostCalibration(host="box", factors={})
    place = Surroundings({"model_type": "llama"}, HOST.cluster, calibration=calibration)
    document = plan(
        "serve",
        hardware={"memory_limit_gib": 0.5},
        objective="cost",
        latency_target="code",
        percentile="p99",
    )
    request = request_of(document, place)
    assert (request.objective, request.model) == ("cost", {"model_type": "llama"})
    assert (request.cluster, request.host_calibration) == (HOST.cluster, calibration)
    limits = {name: each.max for name, each in request.constraints.items()}
    assert limits == {
        "per_device_peak_bytes": 2**29,
        "ttft_p99_seconds": 0.5,
        "tpot_p99_seconds": 0.03,
    }
    for fields in [
        {"percentile": "mean"},
        {"latency_target": "none"},
        {"pins": {"disaggregated": {"prefill_devices": 1, "decode_devices": 1}}},
    ]:
        assert planner_request("serve", **fields).constraints == {}, fields
    cluster = planner_request("serve", hardware={"nodes": 3}, surroundings=CATALOG).cluster
    assert (cluster.device, cluster.nodes) == ("rtx-4090", 3)


def test_pins_are_a_persons_own_and_what_options_and_hardware_leave():
    whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0}
    for goal, values, surroundings, pins, expected in [
        ("serve", {}, HOST, {"weight_dtype": "fp8"}, {"weight_dtype": "fp8"}),
        ("compress", {}, HOST, {}, {"weight_dtype": "bf16"}),
        ("compress", {}, HOST, {"weight_dtype": "fp32"}, {"weight_dtype": "fp32"}),
        ("finetune", {}, POOL, {}, whole),
        ("pretrain", {}, POOL, {"zero_stage": 2}, whole | {"zero_stage": 2}),
        ("serve", {}, POOL, {}, {"zero_stage": None}),
        ("finetune", {"qat_bits": 8, "method": "full"}, HOST, {}, whole),
        ("pretrain", {"compute_dtype": "fp8"}, HOST, {}, {"compute_dtype": "fp8"}),
        ("pretrain", {"attention": "flash"}, HOST, {}, {"attention": "flash"}),
        (
            "pretrain",
            {"checkpoint_writing": "in_step"},
            HOST,
            {},
            {"checkpoint_writing": "in_step"},
        ),
        (
            "generate",
            {},
            HOST,
            {"disaggregated": {"prefill_devices": 1, "decode_devices": 1}},
            {"disaggregated": None},
        ),
    ]:
        request = planner_request(goal, values, surroundings, pins=pins)
        assert differs(request.pins, expected) == {}, (goal, values, pins)
    offload = planner_request(
        "pretrain", {"optimizer_offload": "disk", "activation_offload": "cpu"}
    ).pins
    assert (offload.offload.optimizer, offload.offload.activations_cpu) == ("nvme", 1.0)


def test_a_refusal_names_the_field():
    for goal, values, surroundings, fields, field in [
        ("serve", {}, Surroundings(3), {}, "model"),
        ("finetune", {"qat_bits": 8}, HOST, {"pins": {"zero_stage": 3}}, "zero_stage"),
        (
            "pretrain",
            {"optimizer": "lion"},
            HOST,
            {"pins": {"tensor_parallel_size": 2}},
            "tensor_parallel_size",
        ),
    ]:
        with pytest.raises(DraftProblem) as caught:
            planner_request(goal, values, surroundings, **fields)
        assert caught.value.field.startswith(field), (goal, str(caught.value))


def test_a_recomputation_is_asked_for_where_options_leave_one_out():
    for values, pins, expected in [
        ({}, {}, ()),
        ({"compiled": True}, {}, ("none", "full")),
        ({"attention": "flex"}, {}, ("none", "full")),
        ({"compiled": True}, {"activation_recomputation": "full"}, ()),
    ]:
        assert recomputations_of(plan("pretrain", values, pins=pins)) == expected, values
    assert recomputations_of(plan("serve")) == ()


def test_catalog_hardware_has_the_topology_that_it_states_and_else_none():
    plain = catalog_cluster(plan("serve", hardware={"device": "h100-sxm5-80gb"}).hardware)
    assert plain.model_fields_set == {"device", "devices_per_node", "nodes"}
    rack = {"device": "gb200-nvl72", "nodes": 18, "topology": "GB200-NVL72"}
    found = catalog_cluster(plan("serve", hardware=rack).hardware)
    assert (found.topology, found.devices_per_node) == ("gb200-nvl72", 4)
    pods = {"nvlink_domain_devices": 64, "nodes_per_pod": 32, "oversubscription_ratio": 2.0}
    found = catalog_cluster(plan("serve", hardware={**rack, **pods}).hardware)
    assert {name: getattr(found, name) for name in pods} == pods
    with pytest.raises(ValidationError, match="no topology 'nvl72000'"):
        plan("serve", hardware={"topology": "nvl72000"})


def test_ranks_on_a_processor_share_its_memory_and_speed():
    cpu = get_device("cpu-epyc-9654-2s")
    cluster = ClusterSpec(device=cpu)
    shared = shared_processor(cluster, plan("pretrain", hardware={"ranks_per_host": 4}).hardware)
    assert shared.devices_per_node == 4
    assert shared.device.memory_bytes == cpu.memory_bytes // 4
    assert shared_processor(cluster, plan("pretrain").hardware) == cluster
    gpu = HOST.cluster
    assert shared_processor(gpu, plan("serve", hardware={"ranks_per_host": 4}).hardware) == gpu
