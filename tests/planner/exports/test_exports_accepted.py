"""What the planner answers to a list of questions is exported in words that the tools take."""

import itertools
import json
import re
import tomllib
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from planner.api import plan
from planner.exports.launch import launch_files
from planner.exports.registry import FORMATS, export, export_case
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_70B, MIXTRAL
from tests.planner.exports.making import SERVE, made, trained
from tests.planner.exports.parsers import PROGRAMS, commands, refusals

QUESTIONS = tomllib.loads((Path(__file__).parent / "plans.toml").read_text())
DEEPSEEK = "deepseek-ai/DeepSeek-V2-Lite"
NOTHING_TO_EXPORT = {name for name in QUESTIONS if name.startswith("compress-")}


@cache
def cases(name):
    """Return the best plans of a question, as exports read them."""
    request = PlanRequest.model_validate({**QUESTIONS[name], "top": 3})
    return [(export_case(request, one), one.exports) for one in plan(request).plans]


def refused(tool, case):
    text = export(tool, case).text
    found = commands(tool, text)
    assert found, text
    return {words for command in found for words in refusals(tool, command)}


def test_the_questions_cover_every_kind_of_work_and_device():
    kinds = {
        (one["workload"]["kind"], one["workload"].get("method")) for one in QUESTIONS.values()
    }
    devices = {one["cluster"]["device"] for one in QUESTIONS.values()}

    assert len(QUESTIONS) - len(NOTHING_TO_EXPORT) >= 30
    assert {"serve", "generate", "train", "compress"} == {kind for kind, _ in kinds}
    assert {"qlora", "lora", "full", "lomo", "pretrain"} <= {method for _, method in kinds}
    assert {"mi300x", "rtx-4090", "h100-sxm5-80gb", "core-ultra-7-258v"} <= devices


def test_every_export_of_a_plan_is_one_that_its_tool_takes():
    for name in sorted(set(QUESTIONS) - NOTHING_TO_EXPORT):
        tried = [(case, tool) for case, offered in cases(name) for tool in offered]

        assert tried, name
        for case, tool in tried:
            made_one = export(tool, case)
            assert made_one.text, name
            if tool in PROGRAMS:
                assert refused(tool, case) == set(), made_one.text
            if tool == "deepspeed":
                config = json.loads(made_one.text)
                each = (
                    config["train_micro_batch_size_per_gpu"]
                    * config["gradient_accumulation_steps"]
                )
                assert config["train_batch_size"] == each * case.size("data"), name


def test_a_compression_is_planned_and_runs_as_a_job_alone():
    for name in sorted(NOTHING_TO_EXPORT):
        assert [offered for _, offered in cases(name)] == [()], name


DTYPES = ("bf16", "fp16", "fp8", "int8", "int4", "nf4", "nvfp4", "mxfp4")
LAYOUTS = (
    {"tensor_parallel_size": 8},
    {"data_parallel_size": 8},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
    {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nodes": 2},
    {"tensor_parallel_size": 2, "data_parallel_size": 8, "nodes": 2},
    {"tensor_parallel_size": 16, "data_parallel_size": 2, "nodes": 4},
    {"attention_data_parallel_size": 8},
    {"attention_data_parallel_size": 4, "data_parallel_size": 4, "nodes": 2},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 8, "nodes": 2},
)
DRAFT = {"draft_model": "org/tiny", "tokens": 4}


def test_a_server_takes_every_layout_with_every_format_and_draft():
    for tool, layout, speculative in itertools.product(
        ("vllm", "sglang", "tensorrt_llm", "llama_cpp"), LAYOUTS, (None, DRAFT)
    ):
        for weight, cache_dtype in product(DTYPES, ("bf16", "fp8", "int8")):
            case = made(
                model=MIXTRAL, weight_dtype=weight, kv_cache_dtype=cache_dtype, chunked_prefill=False,
                max_batch_tokens=8192, speculative=speculative, **layout,
            )  # fmt: skip
            assert refused(tool, case) == set(), (tool, layout, speculative)


def test_megatron_takes_every_stage_optimiser_and_place_of_the_states():
    for model, optimizer, stage, place in itertools.product(
        (LLAMA_70B, MIXTRAL, DEEPSEEK),
        ("adamw", "sgd", "lion", "adafactor", "adamw_8bit"),
        (0, 1, 2, 3),
        ("none", "cpu", "nvme"),
    ):
        for tensor, context, pipeline in ((1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 1)):
            case = trained(
                model=model, tensor_parallel_size=tensor, context_parallel_size=context,
                pipeline_parallel_size=pipeline, data_parallel_size=2, nodes=2, zero_stage=stage,
                offload={"optimizer": place}, workload={"optimizer": optimizer},
            )  # fmt: skip
            assert refused("megatron", case) == set(), (model, optimizer, stage, place)


def test_megatron_has_one_connection_where_layers_are_split_and_not_sharded():
    wrong = []
    for (tensor, context, stage, is_set), key in itertools.product(
        ((8, 1, 1, True), (1, 4, 0, True), (1, 1, 1, False), (8, 1, 3, False)),
        ("megatron", "slurm", "kubernetes", "compose"),
    ):
        case = trained(
            tensor_parallel_size=tensor, context_parallel_size=context, pipeline_parallel_size=2,
            zero_stage=stage,
        )  # fmt: skip
        if ("CUDA_DEVICE_MAX_CONNECTIONS" in export(key, case).text) is not is_set:
            wrong.append((tensor, context, stage, is_set, key))
    assert not wrong, wrong


def test_latent_attention_and_dense_layers_reach_megatron():
    text = export("megatron", trained(model=DEEPSEEK)).text
    assert "--multi-latent-attention" in text
    assert "--kv-lora-rank 512" in text
    assert "--q-lora-rank" not in text  # the small model has none
    assert "'([0]*1+[1]*26)'" in text


def test_a_server_in_a_container_answers_from_outside():
    for (engine, binds), key in itertools.product(
        (("sglang", True), ("tensorrt_llm", True), ("llama_cpp", True), ("vllm", False)),
        ("kubernetes", "compose"),
    ):
        text = export(key, made(engine=engine)).text
        assert ("0.0.0.0" in text) is binds, (engine, binds, key)
        assert "0.0.0.0" not in export(engine, made(engine=engine)).text, (engine, binds, key)


def test_llama_cpps_images_have_the_server_where_no_shell_looks():
    for key, path in (
        ("compose", "/app/"),
        ("kubernetes", "/app/"),
        ("slurm", ""),
        ("llama_cpp", ""),
    ):
        text = export(key, made(engine="llama_cpp")).text
        assert re.search(r"(\S*)llama-server", text)[1] == path, (key, path)


def test_llama_cpp_is_asked_for_no_more_slots_than_it_has():
    for requests, slots in ((256, 256), (257, 256), (512, 256)):
        made_one = export(
            "llama_cpp", made({**SERVE, "concurrency": requests}, engine="llama_cpp")
        )
        assert f"--parallel {slots} " in made_one.text, (requests, slots)
        said = f"at once, the plan {requests}" in " ".join(made_one.notes)
        assert said is (requests > slots), (requests, slots)


def test_each_node_has_a_server_of_sglang_with_the_replicas_that_stand_there():
    case = made(tensor_parallel_size=2, data_parallel_size=16, nodes=4, engine="sglang")
    made_one = export("sglang", case)
    assert "--dp-size 4" in made_one.text
    assert "--nnodes" not in made_one.text
    assert any("4 servers, on port 8000 of each of 4 nodes" in note for note in made_one.notes)


def test_sglang_says_where_it_leaves_the_draft_out():
    for layout in ({"pipeline_parallel_size": 2}, {"attention_data_parallel_size": 2}):
        made_one = export("sglang", made(speculative=DRAFT, engine="sglang", **layout))
        assert "speculative" not in made_one.text.split("launch_server")[1], layout
        assert any("draft is left out" in note for note in made_one.notes), layout


def test_a_cache_that_a_server_has_no_format_for_is_said():
    for tool, dtype, is_said in (
        ("vllm", "int8", False),
        ("sglang", "int8", True),
        ("tensorrt_llm", "int4", True),
        ("sglang", "fp8", False),
        ("vllm", "bf16", False),
        ("vllm", "nvfp4", True),
    ):
        notes = export(tool, made(kv_cache_dtype=dtype)).notes
        assert any(f"no cache in {dtype}" in note for note in notes) is is_said


def test_tensorrt_reads_the_draft_under_its_own_names():
    case = made(speculative=DRAFT, engine="tensorrt_llm")
    options = yaml.safe_load(launch_files(case)["trtllm-options.yaml"])
    assert options["speculative_config"] == {
        "decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "org/tiny",
    }  # fmt: skip


def test_torchtitan_trains_the_largest_llama_in_the_plans_format():
    case = trained(model="meta-llama/Llama-3.1-405B", tensor_parallel_size=8, nodes=8)
    text = export("torchtitan", case).text
    assert "llama3_405b" not in text  # its own configuration computes in float8
    assert 'config.model_spec = model_registry("405B")' in text


def test_a_request_is_taken_by_every_server_that_has_no_layout():
    for tool in PROGRAMS:
        case = trained() if tool == "megatron" else made({**SERVE, "concurrency": 1})
        assert refused(tool, case) == set()
    assert set(PROGRAMS) <= set(FORMATS)
