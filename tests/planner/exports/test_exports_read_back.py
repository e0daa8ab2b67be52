"""Exports taken apart again with their readers' own grammar, and held against the plan."""

import ast
import itertools
import json
import re
import shlex

import pytest
import yaml

from planner.exports.registry import export
from planner.exports.train_script import torchrun_text
from tests.planner.exports.making import GIB, SERVE, made, trained

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


def test_a_server_is_told_sizes_that_multiply_to_the_plans_devices():
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


def test_tensorrt_gets_one_replica_and_is_told_of_the_others():
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


def test_a_request_may_be_as_long_as_the_stated_maximum():
    work = {**SERVE, "input_tokens": 1000, "output_tokens": 24, "max_request_tokens": 4096}
    for key, longest in (
        ("vllm", "--max-model-len"),
        ("sglang", "--context-length"),
        ("tensorrt_llm", "--max_seq_len"),
    ):
        assert options(export(key, made(work)).text)[longest] == "4096", (key, longest)


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


def test_no_length_is_written_beyond_the_models_context():
    """vLLM refuses the start (issue 16757); SGLang and TensorRT-LLM do so too."""
    for key in ("vllm", "sglang", "tensorrt_llm"):
        made_one = export(key, made({**SERVE, "input_tokens": 139_976, "output_tokens": 24}))
        written = {"vllm": "--max-model-len", "sglang": "--context-length"}
        assert options(made_one.text)[written.get(key, "--max_seq_len")] == "131072", key
        assert any("context is 131072 tokens" in note for note in made_one.notes), key


def test_a_maximum_is_never_more_than_the_planned_cache_and_what_is_left_hold():
    held = {"breakdown_bytes": {"kv_cache": 8 * GIB}, "per_device_peak_bytes": 71 * GIB}
    case = made(
        {**SERVE, "input_tokens": 1000, "output_tokens": 24, "concurrency": 2}, memory=held
    )
    tokens = int(options(export("vllm", case).text)["--max-model-len"])
    assert tokens == int(2 * 1024 * (1 + (0.9 * 80 - 71) / 8))


def test_a_maximum_below_the_typical_request_is_refused():
    with pytest.raises(ValueError, match=r"max_request_tokens is 1000, less than .* 1200 tokens"):
        made({**SERVE, "max_request_tokens": 1000})


def test_llama_cpps_slots_share_a_pool_that_holds_all_of_them():
    case = made({**SERVE, "input_tokens": 500, "output_tokens": 12, "concurrency": 3})
    found = options(export("llama_cpp", case).text)
    assert int(found["--ctx-size"]) == max(3 * 512, 4 * 512)
    assert "--kv-unified" in found


def test_narrow_weights_keep_the_width_in_which_they_are_computed():
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


def test_wide_weights_are_not_quantised():
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


def test_pods_and_their_limits_multiply_to_the_plans_devices():
    for layout in LAYOUTS:
        case = made(engine="vllm", **sized(layout))
        objects = list(yaml.safe_load_all(export("kubernetes", case).text))
        spec = next(o for o in objects if o["kind"] in {"Deployment", "StatefulSet"})["spec"]
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert spec["replicas"] * limits["nvidia.com/gpu"] == case.devices, layout


def test_compose_reserves_every_device_of_the_plan():
    for layout in ONE_NODE:
        tensor, pipeline, data = layout
        document = yaml.safe_load(export("compose", made(**sized(layout))).text)
        resources = document["services"]["serve"]["deploy"]["resources"]
        (reserved,) = resources["reservations"]["devices"]
        assert reserved["count"] == tensor * pipeline * data, layout


def test_torchruns_ranks_are_the_plans_devices():
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


def test_megatron_leaves_the_replicas_to_the_ranks_that_the_other_sizes_do_not_fill():
    case = trained(tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2, nodes=2)
    found = options(export("megatron", case).text)
    ranks = int(found["--nnodes"]) * int(found["--nproc-per-node"])
    tensor = int(found["--tensor-model-parallel-size"])
    assert ranks // tensor // int(found["--pipeline-model-parallel-size"]) == 2
    assert "--data-parallel-size" not in found


def test_a_run_ends_with_the_first_whole_step_that_has_seen_all_tokens():
    for tokens in (1, 64 * 4096, 64 * 4096 + 1, 10**9):
        case = trained(workload={"tokens": tokens})
        steps = int(options(export("megatron", case).text)["--train-iters"])
        assert (steps - 1) * 64 * 4096 < tokens <= steps * 64 * 4096, tokens


def test_the_head_says_which_figures_it_predicts_and_every_note():
    for key in ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "slurm"):
        made_one = export(key, made(data_parallel_size=2, weight_dtype="int4"))
        head = [line[2:] for line in made_one.text.splitlines() if re.match(r"# ", line)]
        assert head[0].startswith("meta-llama/Llama-3.1-8B on 2 x NVIDIA H100"), key
        assert "ttft_seconds 0.25 (80 %: 0.2 to 0.3125)" in head[1], key
        assert head[2:] == [f"note: {note}" for note in made_one.notes], key
