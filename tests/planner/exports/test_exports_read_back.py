"""Exports are taken by their tools, and say the plan in their readers' own grammar."""

import ast
import itertools
import json
import re
import shlex
import tomllib
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import yaml

from planner.api import plan
from planner.exports.launch import launch_files
from planner.exports.registry import FORMATS, export, export_case
from planner.exports.train_script import torchrun_text
from planner.imports.paste import read_paste
from planner.specs.estimate import PlanRequest
from tests.planner.asking import LLAMA_70B, MIXTRAL
from tests.planner.exports.making import GIB, SERVE, made, trained
from tests.planner.exports.parsers import PROGRAMS, commands, refusals
from tests.plugins.extent import sample

# Tensor, pipeline, data: layouts that fill one node of eight, or two of them.
LAYOUTS = [(1, 1, 1), (2, 1, 1), (8, 1, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 1, 8), (8, 2, 1)]
ONE_NODE = [layout for layout in LAYOUTS if layout[0] * layout[1] * layout[2] <= 8]


def sized(layout):
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = dict(zip(names, layout, strict=True))
    return {**sizes, "nodes": -(-layout[0] * layout[1] * layout[2] // 8)}


def options(text):
    """Return a shell command's options by name as a shell splits them; the last command wins."""
    words = shlex.split(text, comments=True)
    found = {}
    for word, following in zip(words, [*words[1:], "--end"], strict=True):
        if word.startswith("--"):
            name, is_joined, value = word.partition("=")
            has_value = is_joined or not following.startswith("--")
            found[name] = value if is_joined else following if has_value else True
    return found


def number(found, name):
    return int(found.get(name, 1))


def test_a_server_is_told_the_sizes_of_the_plan_or_of_the_other_replicas():
    for layout, (key, names) in itertools.product(
        LAYOUTS,
        (
            (
                "vllm",
                ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
            ),
            ("sglang", ("--tp-size", "--pp-size", "--dp-size")),
        ),
    ):
        case = made(**sized(layout))
        found = options(export(key, case).text)
        told = tuple(number(found, name) for name in names)
        assert told == layout, (layout, key, names)
        assert told[0] * told[1] * told[2] == case.devices, (layout, key, names)

    for layout in LAYOUTS:
        tensor, pipeline, data = layout
        made_one = export("tensorrt_llm", made(engine="tensorrt_llm", **sized(layout)))
        found = options(made_one.text)
        assert (number(found, "--tp_size"), number(found, "--pp_size")) == (tensor, pipeline)
        said = [note for note in made_one.notes if note.startswith(f"{data} servers, on port")]
        assert len(said) == (data > 1), layout


def test_the_replicas_together_take_every_request():
    for (requests, data, share), (key, batch) in itertools.product(
        ((64, 1, 64), (64, 8, 8), (65, 8, 9)),
        (
            ("vllm", "--max-num-seqs"),
            ("sglang", "--max-running-requests"),
            ("tensorrt_llm", "--max_batch_size"),
            ("llama_cpp", "--parallel"),
        ),
    ):
        case = made({**SERVE, "concurrency": requests}, data_parallel_size=data)
        found = options(export(key, case).text)
        assert int(found[batch]) == share, (requests, data, share, key, batch)
        assert data * share >= requests > data * (share - 1), (requests, data, share, key, batch)


def test_a_request_may_be_as_long_as_stated_within_the_models_context():
    work = {**SERVE, "input_tokens": 1000, "output_tokens": 24, "max_request_tokens": 4096}
    for key, longest in (
        ("vllm", "--max-model-len"),
        ("sglang", "--context-length"),
        ("tensorrt_llm", "--max_seq_len"),
    ):
        assert options(export(key, made(work)).text)[longest] == "4096", (key, longest)

    # vLLM refuses the start (issue 16757); SGLang and TensorRT-LLM do so too.
    for key in ("vllm", "sglang", "tensorrt_llm"):
        made_one = export(key, made({**SERVE, "input_tokens": 139_976, "output_tokens": 24}))
        written = {"vllm": "--max-model-len", "sglang": "--context-length"}
        assert options(made_one.text)[written.get(key, "--max_seq_len")] == "131072", key
        assert any("context is 131072 tokens" in note for note in made_one.notes), key


def test_without_a_maximum_four_typical_requests_are_taken_in_one():
    for tokens, held, longest in (
        (1024, {}, 4096),
        (60000, {}, 131072),
        (1024, {"kv_cache": GIB}, 4096),
    ):
        memory = {"breakdown_bytes": {"weights": 15 * GIB, **held}}
        case = made({**SERVE, "input_tokens": tokens - 24, "output_tokens": 24}, memory=memory)
        made_one = export("vllm", case)
        assert options(made_one.text)["--max-model-len"] == str(longest), (tokens, held, longest)
        assert any(f"up to {longest} tokens are taken" in note for note in made_one.notes)


def test_a_maximum_is_what_the_cache_holds_and_slots_share_one_pool():
    # Four fifths of what the cache is predicted to hold, at least the typical 1,024 tokens.
    lengths = {"input_tokens": 1000, "output_tokens": 24}
    for concurrency, sizes, shared, held, tokens in (
        (16, {}, 0.0, 2, 1024),
        (16, {}, 0.0, 9, 7 * 1024),
        (16, {}, 0.0, 1852, 131_072),
        (None, {}, 0.0, 3, 2 * 1024),
        (16, {"data_parallel_size": 2}, 0.0, 8, 3 * 1024),
        (16, {"attention_data_parallel_size": 4}, 0.0, 4, 1024),
        (16, {}, 0.5, 4, 2 * 1024),
        (16, {"chunked_prefill": False, "max_batch_tokens": 4096}, 0.0, 99, 4096),
    ):
        load = {**lengths, "concurrency": concurrency, "prefix_share_ratio": shared}
        case = made({**SERVE, **load}, holds=held, **sizes)
        found = options(export("vllm", case).text)["--max-model-len"]
        assert int(found) == tokens, (concurrency, sizes, shared, held)
    case = made({**SERVE, **lengths, "concurrency": 16}, engine="llama_cpp", holds=3)
    found = options(export("llama_cpp", case).text)
    assert (found["--parallel"], found["--ctx-size"]) == ("3", str(3 * 1024))
    with pytest.raises(ValueError, match=r"max_request_tokens is 1000, less than .* 1200 tokens"):
        made({**SERVE, "max_request_tokens": 1000})

    case = made({**SERVE, "input_tokens": 500, "output_tokens": 12, "concurrency": 3})
    found = options(export("llama_cpp", case).text)
    assert int(found["--ctx-size"]) == max(3 * 512, 4 * 512)
    assert "--kv-unified" in found


def test_notes_of_llama_cpp_say_what_its_command_does():
    """The longest request is that of the pool, and a GGUF type of the plan is no substitute."""
    load = {**SERVE, "input_tokens": 1000, "output_tokens": 24, "concurrency": 16}
    for key, fields, told in (
        ("llama_cpp", {"quantization": "gguf:q5_k_m", "weight_dtype": "int4"}, False),
        ("llama_cpp", {"weight_dtype": "int4"}, True),
        ("sglang", {"weight_dtype": "bf16"}, False),
    ):
        made_one = export("llama_cpp", made(load, engine=key, holds=1852, **fields))
        pool = options(made_one.text)["--ctx-size"]
        assert any(f"up to {pool} tokens are taken" in note for note in made_one.notes), fields
        assert any("GGUF has no" in note for note in made_one.notes) is told, fields


def test_narrow_weights_keep_the_width_in_which_they_compute_and_wide_ones_are_not_cut():
    for dtype, vllm, sglang in (
        ("fp8", "fp8_per_tensor", "fp8"),
        ("nf4", "bitsandbytes", "bitsandbytes"),
        ("int8", None, None),  # checkpoints of their own, which name their format
        ("mxfp4", None, None),
    ):
        case = made(weight_dtype=dtype, activation_dtype="fp16")
        texts = [options(export(key, case).text) for key in ("vllm", "sglang")]
        assert [found.get("--quantization") for found in texts] == [vllm, sglang]
        assert {found["--dtype"] for found in texts} == {"float16"}, (dtype, vllm, sglang)

    for key, dtype in itertools.product(("vllm", "sglang"), ("bf16", "fp16", "fp32")):
        found = options(export(key, made(weight_dtype=dtype)).text)
        assert "--quantization" not in found, (key, dtype)
        assert (
            found["--dtype"] == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
        )


def test_weights_on_the_host_are_counted_from_what_the_device_keeps():
    """15 GiB stay when a quarter lives on the host: 20 GiB in all, 5 GiB of them there."""
    case = made(offload={"weights_cpu": 0.25}, memory={"breakdown_bytes": {"weights": 15 * GIB}})
    told = [float(options(export(k, case).text)["--cpu-offload-gb"]) for k in ("vllm", "sglang")]
    assert told == [5.0, 5.0]


def test_a_server_listens_where_compose_publishes_and_kubernetes_probes():
    for key in ("sglang", "llama_cpp"):
        case = made(engine=key)
        port = int(options(export(key, case).text)["--port"])
        service = next(iter(yaml.safe_load(export("compose", case).text)["services"].values()))
        objects = list(yaml.safe_load_all(export("kubernetes", case).text))
        pod = next(o for o in objects if o["kind"] == "Deployment")["spec"]["template"]["spec"]
        door = next(o for o in objects if o["kind"] == "Service")["spec"]["ports"]
        assert service["ports"] == [f"{port}:{port}"], key
        assert pod["containers"][0]["readinessProbe"]["httpGet"]["port"] == port, key
        assert [one["port"] for one in door] == [port], key


def test_pods_reservations_and_ranks_are_the_plans_devices():
    for layout in LAYOUTS:
        case = made(engine="vllm", **sized(layout))
        objects = list(yaml.safe_load_all(export("kubernetes", case).text))
        spec = next(o for o in objects if o["kind"] in {"Deployment", "StatefulSet"})["spec"]
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert spec["replicas"] * limits["nvidia.com/gpu"] == case.devices, layout

    for layout in ONE_NODE:
        tensor, pipeline, data = layout
        document = yaml.safe_load(export("compose", made(**sized(layout))).text)
        resources = document["services"]["serve"]["deploy"]["resources"]
        (reserved,) = resources["reservations"]["devices"]
        assert reserved["count"] == tensor * pipeline * data, layout

    for layout in LAYOUTS:
        case = trained(**sized(layout))
        found = options(torchrun_text(case).splitlines()[-1])
        assert int(found["--nnodes"]) * int(found["--nproc-per-node"]) == case.devices, layout


def test_deepspeeds_batch_is_micro_batches_times_steps_times_ranks():
    """DeepSpeed stops at start when the three numbers do not multiply up."""
    for data in (1, 2, 4, 8):
        micro, steps = 2, 64 // data // 2
        plan = {"micro_batch_size": micro, "gradient_accumulation_steps": steps}
        found = json.loads(export("deepspeed", trained(data_parallel_size=data, **plan)).text)
        product = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
        assert product * data == found["train_batch_size"] == 64, data


def test_torchtitans_degrees_multiply_to_the_plans_devices():
    for layout, stage in itertools.product(LAYOUTS, (0, 1, 3)):
        case = trained(zero_stage=stage, **sized(layout))

        module = ast.parse(export("torchtitan", case).text)

        told = {
            ast.unparse(node.targets[0]).rsplit(".", 1)[-1]: ast.literal_eval(node.value)
            for node in ast.walk(module)
            if isinstance(node, ast.Assign) and "degree" in ast.unparse(node.targets[0])
        }
        told.pop("expert_parallel_degree")  # experts are spread over the ranks of the others
        product = 1
        for degree in told.values():
            product *= degree
        assert product == case.devices, (layout, stage)
        assert told["data_parallel_shard_degree"] == (layout[2] if stage else 1), (layout, stage)


def test_megatron_leaves_replicas_to_the_ranks_and_ends_with_the_first_whole_step():
    case = trained(tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2, nodes=2)
    found = options(export("megatron", case).text)
    ranks = int(found["--nnodes"]) * int(found["--nproc-per-node"])
    tensor = int(found["--tensor-model-parallel-size"])
    assert ranks // tensor // int(found["--pipeline-model-parallel-size"]) == 2
    assert "--data-parallel-size" not in found

    for tokens in (1, 64 * 4096, 64 * 4096 + 1, 10**9):
        case = trained(workload={"tokens": tokens})
        steps = int(options(export("megatron", case).text)["--train-iters"])
        assert (steps - 1) * 64 * 4096 < tokens <= steps * 64 * 4096, tokens


def test_the_head_says_which_figures_it_predicts_and_every_note():
    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "slurm"):
        made_one = export(key, made(data_parallel_size=2, weight_dtype="int4"))
        head = [line[2:] for line in made_one.text.splitlines() if re.match(r"# ", line)]
        assert head[0].startswith("meta-llama/Llama-3.1-8B on 2 x NVIDIA H100"), key
        assert "time to first token 0.25 s (80 %: 0.2 to 0.3125)" in head[1], key
        assert head[2:] == [f"note: {note}" for note in made_one.notes], key


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
    names = sorted(set(QUESTIONS) - NOTHING_TO_EXPORT)
    for name in sample(names, kind=lambda name: QUESTIONS[name]["workload"]["kind"]):
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
SERVED_LAYOUTS = (
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
    tools = ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
    ways = product(tools, SERVED_LAYOUTS, (None, DRAFT))
    for tool, layout, speculative in sample(
        ways, share=0.4, kind=lambda way: (way[0], way[2] is None)
    ):
        if tool == "vllm" and speculative and layout.get("pipeline_parallel_size"):
            continue  # no plan has both: tests/planner/test_option_pairs.py
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
                sequence_parallel=tensor > 1,
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


def test_megatron_and_torchtitan_get_the_models_shape_and_format():
    text = export("megatron", trained(model=DEEPSEEK)).text
    assert "--multi-latent-attention" in text
    assert "--kv-lora-rank 512" in text
    assert "--q-lora-rank" not in text  # the small model has none
    assert "'([0]*1+[1]*26)'" in text

    case = trained(model="meta-llama/Llama-3.1-405B", tensor_parallel_size=8, nodes=8)
    text = export("torchtitan", case).text
    assert "llama3_405b" not in text  # its own configuration computes in float8
    assert 'config.model_spec = model_registry("405B")' in text


def test_a_server_in_a_container_answers_from_outside_from_where_its_image_has_it():
    for (engine, binds), key in itertools.product(
        (("sglang", True), ("tensorrt_llm", True), ("llama_cpp", True), ("vllm", False)),
        ("kubernetes", "compose"),
    ):
        text = export(key, made(engine=engine)).text
        assert ("0.0.0.0" in text) is binds, (engine, binds, key)
        assert "0.0.0.0" not in export(engine, made(engine=engine)).text, (engine, binds, key)

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


def test_sglang_has_a_server_on_each_node_and_says_where_the_draft_is_left_out():
    case = made(tensor_parallel_size=2, data_parallel_size=16, nodes=4, engine="sglang")
    made_one = export("sglang", case)
    assert "--dp-size 4" in made_one.text
    assert "--nnodes" not in made_one.text
    assert any("4 servers, on port 8000 of each of 4 nodes" in note for note in made_one.notes)

    for layout in ({"pipeline_parallel_size": 2}, {"attention_data_parallel_size": 2}):
        made_one = export("sglang", made(speculative=DRAFT, engine="sglang", **layout))
        assert "speculative" not in made_one.text.split("launch_server")[1], layout
        assert any("draft is left out" in note for note in made_one.notes), layout


def test_a_cache_format_that_is_missing_is_said_and_a_draft_has_tensorrts_names():
    for tool, dtype, is_said in (
        ("vllm", "int8", False), ("sglang", "int8", True), ("tensorrt_llm", "int4", True),
        ("sglang", "fp8", False), ("vllm", "bf16", False), ("vllm", "nvfp4", True),
    ):  # fmt: skip
        notes = export(tool, made(kv_cache_dtype=dtype)).notes
        assert any(f"no cache in {dtype}" in note for note in notes) is is_said

    case = made(speculative=DRAFT, engine="tensorrt_llm")
    options = yaml.safe_load(launch_files(case)["trtllm-options.yaml"])
    assert options["speculative_config"] == {
        "decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "org/tiny",
    }  # fmt: skip


def test_a_request_is_taken_by_every_server_that_has_no_layout():
    for tool in PROGRAMS:
        case = trained() if tool == "megatron" else made({**SERVE, "concurrency": 1})
        assert refused(tool, case) == set()
    assert set(PROGRAMS) <= set(FORMATS)


def test_a_command_states_the_cache_that_its_plan_counts_and_none_means_the_engines_own():
    # 31 of 36 scripts of vLLM on B200 and B300 in InferenceX state an FP8 cache.
    for engine, device, model, held in (
        ("vllm", "b200-sxm", "nvidia/Llama-3.3-70B-Instruct-FP8", "fp8"),
        ("vllm", "b200-sxm", "openai/gpt-oss-120b", "bf16"),
        ("vllm", "b200-sxm", LLAMA_70B, "bf16"),
        ("vllm", "h100-sxm-80gb", "nvidia/Llama-3.3-70B-Instruct-FP8", "bf16"),
        ("sglang", "b200-sxm", "nvidia/Llama-3.3-70B-Instruct-FP8", "fp8"),
    ):
        cluster = {"device": device, "devices_per_node": 4}
        asked = {"model": model, "cluster": cluster, "workload": SERVE, "engine": engine}
        request = PlanRequest.model_validate(asked)
        best = plan(request).plans[0]
        assert best.strategy.kv_cache_dtype == held, (engine, device, model)
        text = export(engine, export_case(request, best)).text
        stated = options(text).get("--kv-cache-dtype", "auto")
        assert stated.startswith("fp8") == (held == "fp8"), text
    for command in ("vllm serve", "python -m sglang.launch_server --model-path"):
        pasted = f"{command} Qwen/Qwen3-32B-FP8"
        assert read_paste(pasted).request["pins"]["kv_cache_dtype"] == "bf16"
        assert (
            read_paste(f"{pasted} --kv-cache-dtype auto").request["pins"]["kv_cache_dtype"]
            == "bf16"
        )
        assert "kv_cache_dtype" not in read_paste(f"{command} Qwen/Qwen3-32B").request.get(
            "pins", {}
        )
