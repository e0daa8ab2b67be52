"""Command lines as people write them: which field each option became, and what was left out."""

import json
import time

import pytest

from planner.api import plan
from planner.imports import read_paste
from planner.specs.estimate import PlanRequest

LLAMA = "meta-llama/Llama-3.1-8B"
# A command, and the fields of the request that it states, by their dotted names.
LINES = {
    # vLLM: its documentation's "Parallelism and scaling", "Engine arguments", "Docker".
    f"vllm serve {LLAMA}": {"model": LLAMA, "engine": "vllm", "workload.kind": "serve"},
    f"vllm serve {LLAMA} --tensor-parallel-size 4 --pipeline-parallel-size 2": {
        "pins.tensor_parallel_size": 4,
        "pins.pipeline_parallel_size": 2,
        "cluster.devices_per_node": 8,
    },
    f"vllm serve {LLAMA} -tp 16 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1": {
        "cluster.devices_per_node": 8,
        "cluster.nodes": 2,
    },
    f"vllm serve {LLAMA} -dp 4 -dpl 2 --data-parallel-address 10.0.0.1": {
        "pins.data_parallel_size": 4,
        "cluster.devices_per_node": 2,
        "cluster.nodes": 2,
    },
    "vllm serve Qwen/Qwen3-30B-A3B --data-parallel-size=8 --enable-expert-parallel": {
        "pins.attention_data_parallel_size": 8,
        "pins.expert_parallel_size": 8,
    },
    f"vllm serve {LLAMA} --dtype half --kv-cache-dtype fp8_e5m2 --max-model-len 16k": {
        "pins.weight_dtype": "fp16",
        "pins.kv_cache_dtype": "fp8",
        "workload.max_request_tokens": 16_000,
    },
    f"vllm serve {LLAMA} --max-num-seqs 32 -dp 2 --max_num_batched_tokens 8192": {
        "workload.concurrency": 64,
        "pins.max_batch_tokens": 8192,
    },
    f"vllm serve {LLAMA} --gpu-memory-util .95 --no-enable-prefix-caching": {
        "pins.gpu_memory_utilization": 0.95,  # a beginning that one option alone has
        "workload.prefix_share_ratio": 0.0,
    },
    f"vllm serve {LLAMA} --dtype bfloat16": {"pins.weight_dtype": "bf16"},
    f"sglang serve {LLAMA} --scheduler-recv-interval 10": {"pins.scheduler_recv_interval": 10},
    f"vllm serve {LLAMA} --quantization fp8 --no-enable-chunked-prefill": {
        "pins.weight_dtype": "fp8",
        "pins.chunked_prefill": False,
    },
    f"vllm serve {LLAMA}>log2 --quantization bitsandbytes -O3": {
        "model": LLAMA,
        "pins.weight_dtype": "nf4",
    },
    f"vllm serve {LLAMA} --cpu-offload-gb 7.5": {"pins.offload": {"weights_cpu": 0.501}},
    f"vllm serve {LLAMA} -tp 2 --cpu-offload-gb 3 --max-model-len 4K": {
        "pins.offload": {"weights_cpu": 0.401},  # of two devices
        "workload.max_request_tokens": 4096,
    },
    "vllm serve meta-llama/Llama-3.1-70B --speculative-config "
    """'{"model": "meta-llama/Llama-3.1-8B", "num_speculative_tokens": 5}'""": {
        "pins.speculative": {"draft_model": LLAMA, "tokens": 5}
    },
    f"python -m vllm.entrypoints.openai.api_server --model {LLAMA} --swap-space 16": {
        "model": LLAMA
    },
    f"docker run --runtime nvidia --gpus 2 -v ~/.cache:/cache -p 8000:8000 --ipc=host "
    f"vllm/vllm-openai:v0.33.0 --model {LLAMA} -tp 2": {
        "model": LLAMA,
        "pins.tensor_parallel_size": 2,
        "cluster.devices_per_node": 2,
    },
    f"CUDA_VISIBLE_DEVICES=0,1,2,3 HF_TOKEN=abc vllm serve '{LLAMA}' > log 2>&1 &": {
        "cluster.devices_per_node": 4
    },
    f"$ vllm serve {LLAMA} \\\n  --tensor-parallel-size 2 \\\n  --max-model-len 4096  # short": {
        "pins.tensor_parallel_size": 2,
        "workload.max_request_tokens": 4096,
    },
    "vllm serve /models/models--meta-llama--Llama-3.1-8B/snapshots/0f4a/": {"model": LLAMA},
    # SGLang: its documentation's "Server arguments".
    f"python3 -m sglang.launch_server --model-path {LLAMA} --tp 2 --dp 2 --mem-fraction 0.7": {
        "engine": "sglang",
        "pins.tensor_parallel_size": 2,
        "pins.data_parallel_size": 2,
        "pins.gpu_memory_utilization": 0.7,
        "cluster.devices_per_node": 4,
    },
    "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 16 --dp 16 --ep 16 "
    "--enable-dp-attention --nnodes 2 --dist-init-addr 10.0.0.1:5000": {
        "pins.tensor_parallel_size": 1,
        "pins.attention_data_parallel_size": 16,
        "pins.expert_parallel_size": 16,
        "cluster.nodes": 2,
    },
    f"sglang serve {LLAMA} --context-length 8192 --max-running-requests 48 "
    "--chunked-prefill-size -1 --disable-radix-cache": {
        "workload.max_request_tokens": 8192,
        "workload.concurrency": 48,
        "pins.chunked_prefill": False,
        "workload.prefix_share_ratio": 0.0,
    },
    # llama.cpp: tools/server/README.md and its discussions.
    "./llama-server -m models/7B/Llama-3.1-8B-Instruct-Q4_K_M.gguf -c 16384 -np 4 -ngl 99 -fa on": {
        "engine": "llama_cpp",
        "model": f"{LLAMA}-Instruct",
        "pins.quantization": "gguf:q4_k_m",
        "workload.concurrency": 4,
        "workload.max_request_tokens": 4096,
        "pins.attention": "flash",
    },
    "llama-server -hf unsloth/Qwen3-30B-A3B-GGUF:Q8_0 --n-cpu-moe 24 -ctk q8_0 -ctv q8_0": {
        "model": "Qwen/Qwen3-30B-A3B",
        "pins.quantization": "gguf:q8_0",
        "pins.offload": {"weights_cpu": 0.475},
        "pins.kv_cache_dtype": "int8",
    },
    """llama-server -hf unsloth/Qwen3-30B-A3B-GGUF -ngl 999 -ot '.ffn_.*_exps.=CPU'""": {
        "pins.quantization": "gguf:q4_k_m",  # llama.cpp's default
        "pins.offload": {"weights_cpu": 0.95},
    },
    "llama-server -hf unsloth/Qwen3-8B-GGUF -hff Qwen3-8B-Q6_K.gguf": {
        "pins.quantization": "gguf:q6_k"
    },
    "llama-server.exe -m C:\\models\\Qwen3-8B-Q5_K_M-00001-of-00002.gguf -ts 1,1 -sm row 2>log1": {
        "model": "Qwen/Qwen3-8B",
        "cluster.devices_per_node": 2,
        "pins.tensor_parallel_size": 2,
    },
    "llama-cli -m Llama-3.1-8B-Q8_0.gguf -ngl 16 -n 256 -p 'Once upon'": {
        "workload.kind": "generate",
        "workload.batch_size": 1,
        "workload.output_tokens": 256,
        "pins.offload": {"weights_cpu": 0.515},
    },
    # TensorRT-LLM: docs/source/commands/trtllm-serve.
    f"trtllm-serve {LLAMA} --tp_size 8 --max_batch_size 128 --max_num_tokens 8192": {
        "engine": "tensorrt_llm",
        "pins.tensor_parallel_size": 8,
        "workload.concurrency": 128,
        "pins.max_batch_tokens": 8192,
    },
    # Launchers around the Hugging Face trainers and TRL's examples.
    f"torchrun --nproc_per_node=8 --nnodes 2 sft.py --model_name_or_path {LLAMA} --bf16 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 4096 "
    "--gradient_checkpointing --fsdp 'full_shard auto_wrap' --max_steps 100 --optim adamw_8bit": {
        "workload.global_batch_size": 128,
        "workload.sequence_length": 4096,
        "workload.tokens": 100 * 128 * 4096,
        "workload.optimizer": "adamw_8bit",
        "pins.micro_batch_size": 2,
        "pins.zero_stage": 3,
        "pins.activation_recomputation": "full",
        "pins.compute_dtype": "bf16",
        "pins.data_parallel_size": 16,
        "cluster.devices_per_node": 8,
        "cluster.nodes": 2,
    },
    "accelerate launch --num_processes 4 --mixed_precision bf16 --config_file "
    f"examples/accelerate_configs/deepspeed_zero3.yaml trl/scripts/sft.py --model_name_or_path "
    f"{LLAMA} --use_peft --lora_r 32 --lora_target_modules all-linear --load_in_4bit "
    "--per_device_train_batch_size 1 --max_seq_length 2048": {
        "workload.method": "qlora",
        "workload.lora_rank": 32,
        "workload.lora_targets": "all",
        "workload.global_batch_size": 4,
        "pins.zero_stage": 3,
        "pins.compute_dtype": "bf16",
    },
    "accelerate launch --num_processes 16 --num_machines 2 sft.py --per_device_train_batch_size 1 "
    "--use_peft --lora_target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj": {
        "cluster.devices_per_node": 8,
        "cluster.nodes": 2,
        "workload.global_batch_size": 16,
        "workload.lora_targets": "all",
    },
    f"deepspeed --num_gpus 2 train.py --deepspeed ds_z2_offload.json --model_name_or_path {LLAMA} "
    "--per_device_train_batch_size 1 --block_size 1024": {
        "pins.zero_stage": 2,
        "pins.offload": {"optimizer": "cpu"},
        "workload.global_batch_size": 2,
        "workload.sequence_length": 1024,
    },
    f"trl sft --model_name_or_path {LLAMA} --use_peft --lora_r 8 --packing "
    "--num_processes 4 --accelerate_config zero2 --per_device_train_batch_size 2": {
        "cluster.devices_per_node": 4,
        "pins.zero_stage": 2,
        "workload.global_batch_size": 8,
        "workload.method": "lora",
        "workload.lora_rank": 8,
        "pins.packed": True,
    },
    "python run_clm.py --config_name openai-community/gpt2 --block_size 512 "
    "--per_device_train_batch_size 8": {
        "workload.method": "pretrain",
        "workload.global_batch_size": 8,
    },
    f"llamafactory-cli api --model_name_or_path {LLAMA} --infer_backend vllm": {
        "workload.kind": "serve",
        "engine": "vllm",
    },
    "llamafactory-cli train --stage sft --finetuning_type lora --quantization_bit 4 "
    f"--model_name_or_path {LLAMA} --lora_target q_proj,v_proj --cutoff_len 2048": {
        "workload.method": "qlora",
        "workload.lora_targets": "query_value",
        "workload.sequence_length": 2048,
    },
}


def flat(request, prefix=""):
    """Return a request's fields by dotted names; a nested strategy field stays whole."""
    found = {}
    for name, value in request.items():
        inner = isinstance(value, dict) and name in {"workload", "cluster", "pins"}
        found |= flat(value, f"{name}.") if inner else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("line", LINES)
def test_a_line_becomes_the_request_that_it_states(line):
    draft = read_paste(line)
    fields = flat(draft.request)
    assert {name: fields.get(name) for name in LINES[line]} == LINES[line]
    assert draft.unknown == ()
    told = {item.field for item in draft.understood}
    assert {name for name in LINES[line] if name not in {"engine", "workload.kind"}} <= told
    assert all(item.reason for item in draft.ignored)


def test_a_line_that_lacks_hardware_and_lengths_is_planned_once_they_are_given():
    draft = read_paste(f"vllm serve {LLAMA} -tp 2 --max-num-seqs 16 --gpu-memory-utilization 0.9")
    assert [each.split(":")[0] for each in draft.missing] == [
        "workload.input_tokens",
        "workload.output_tokens",
        "cluster.device",
    ]
    request = draft.request | {
        "cluster": {**draft.request["cluster"], "device": "h100-sxm5-80gb"},
        "workload": {**draft.request["workload"], "input_tokens": 500, "output_tokens": 100},
    }
    best = plan(PlanRequest.model_validate(request)).plans[0]
    assert (best.strategy.tensor_parallel_size, best.engine) == (2, "vllm")


def test_what_is_not_used_is_named_with_its_reason_and_a_wrong_name_with_the_nearest():
    draft = read_paste(
        f"export OMP_NUM_THREADS=8\nvllm serve {LLAMA} --port 80 --max-modl-len 5 --enable-lora "
        '--api-key sk-1 -tp 1 -tp 2 --dtype auto --model-loader-extra-config "$X"\necho done'
    )
    reasons = {item.source: item.reason for item in draft.ignored}
    for source, words in (
        ("OMP_NUM_THREADS=8", "environment variable"),
        ("--port 80", "no effect on the plan"),
        ("--enable-lora", "Slipway does not model adapters"),
        ("--api-key ***", "no effect on the plan"),
        ("-tp 1", "stands there again"),
        ("--dtype auto", "the model's own"),
        ("echo done", "another command"),
    ):
        assert words in reasons[source], source
    (unknown,) = draft.unknown
    assert (unknown.source, "--max-model-len" in unknown.reason) == ("--max-modl-len 5", True)
    assert "sk-1" not in draft.model_dump_json()


def test_a_variable_is_not_expanded_and_a_quoted_dollar_is_a_letter():
    draft = read_paste("vllm serve $MODEL -tp $TP --served-model-name 'a$b' --quantization 'f$8'")
    assert "model" not in draft.request
    assert "pins" not in draft.request
    assert any(each.startswith("model:") for each in draft.missing)
    reasons = {item.source: item.reason for item in draft.ignored}
    assert reasons["-tp $TP"].startswith("its value is a shell variable")
    assert reasons["--quantization f$8"] == "the checkpoint states its format itself"


def test_a_model_that_the_catalog_lacks_stays_a_repository_and_is_missing():
    for name, in_request in (("my-org/my-model-9b", True), ("/data/my-model-9b", False)):
        draft = read_paste(f"vllm serve {name}")
        assert draft.model == name
        assert (draft.request.get("model") == name) is in_request, name
        assert any("paste its config.json" in each for each in draft.missing), name


def test_a_line_takes_at_most_20_ms():
    for line in (max(LINES, key=len), "vllm serve my-org/my-model-9b --port 80"):
        read_paste(line)  # the catalog is read once
        times = []
        for _ in range(5):
            start = time.perf_counter()
            read_paste(line)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.020, line


def test_a_trainer_without_adapters_trains_all_weights():
    line = f"torchrun --nproc_per_node 8 train.py --model_name_or_path {LLAMA} "
    for words, method in (
        ("--per_device_train_batch_size 4 --fsdp 'full_shard auto_wrap'", "full"),
        ("--use_peft False", "full"),
        ("--use_peft", "lora"),
        ("--lora_r 8", "lora"),  # a script of its own adapters, such as FastChat's train_lora.py
        ("--use_peft --load_in_4bit", "qlora"),
    ):
        assert read_paste(line + words).request["workload"]["method"] == method, words
    axolotl = read_paste(f"base_model: {LLAMA}\nmicro_batch_size: 2\n")
    assert axolotl.request["workload"]["method"] == "full"
    launcher = read_paste("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    assert "method" not in launcher.request["workload"]


def test_experts_are_cut_unless_expert_parallelism_is_asked():
    sparse = "Qwen/Qwen3-235B-A22B"
    sglang = f"python -m sglang.launch_server --model-path {sparse} --tp 8 "
    for line, size in (
        (sglang + "--enable-dp-attention --dp 8", 1),
        (sglang + "--ep-size 4", 4),
        (f"vllm serve {sparse} -tp 8", 1),
        (f"vllm serve {sparse} -tp 8 --enable-expert-parallel", 8),
        (f"trtllm-serve {sparse} --tp_size 8", 1),
        (f"vllm serve {LLAMA} -tp 8", None),
    ):
        assert read_paste(line).request["pins"].get("expert_parallel_size") == size, line


# A command, the model of its request, and where its weights are if not in the model's own.
REPOSITORIES = {
    "llama-server -hf bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M": (
        "meta-llama/Llama-3.2-1B-Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    ),
    "llama-server -hf unsloth/Qwen3-8B-GGUF -hff Qwen3-8B-Q6_K.gguf": (
        "Qwen/Qwen3-8B", "unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q6_K.gguf",
    ),
    "ollama run hf.co/acme/unheard-GGUF:Q8_0": ("acme/unheard-GGUF:Q8_0", None),
    "llama-server --hf-repo acme/files --hf-file tiny/stories.gguf": (
        "acme/files/tiny/stories.gguf", None,
    ),
    "llama-server -m ./acme/Qwen3-8B-Q8_0.gguf": ("Qwen/Qwen3-8B", None),
    "llama-server -m acme/unheard-Q8_0.gguf": (None, None),
    "vllm serve /models/Qwen3-8B": ("Qwen/Qwen3-8B", None),
    "vllm serve ~/models/qwen3.6-35b-a3b-awq": ("qwen3.6-35b-a3b-awq", None),
    "vllm serve ./model": (None, None),
    "python run_clm.py --config_name openai-community/gpt2 --do_train "
    "--per_device_train_batch_size 2": ("openai-community/gpt2", None),
}  # fmt: skip


def test_a_repository_is_kept_by_its_name_and_a_folder_is_none():
    for line, expected in REPOSITORIES.items():
        found = read_paste(line)
        assert (found.request.get("model"), found.repository) == expected, line


def test_a_rotary_scaling_that_an_endpoint_can_have_stays_with_the_model():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaling = json.dumps(yarn)
    vllm = "vllm serve Qwen/Qwen3-8B --max-model-len 131072"
    llama = "llama-server -hf Qwen/Qwen3-8B-GGUF:Q8_0 -np 1 -c 131072 --rope-scaling yarn"
    for line, more in (
        (f"{vllm} --rope-scaling '{scaling}'", {}),
        (f"{vllm} --rope-scaling '{scaling}' --rope-theta 5000", {"rope_theta": 5000.0}),
        (f"{vllm} --hf-overrides '{{\"rope_parameters\": {scaling}}}'", {}),
        (f"{llama} --rope-scale 4 --yarn-orig-ctx 32768", {}),
    ):
        draft = read_paste(line)
        assert draft.rope_scaling == yarn | more, line
        assert draft.request["workload"]["max_request_tokens"] == 131_072, line
        assert draft.assumptions == (), line
    assert read_paste(f'{vllm} --rope-scaling \'{{"rope_type": "llama3"}}\'').rope_scaling is None


def test_another_rotary_scaling_says_what_it_stretches_and_the_plan_keeps_to_the_models_own():
    scaling = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
    more = '{"max_position_embeddings": 40960, "rope_scaling": '
    vllm = f"vllm serve Qwen/Qwen3-8B --max-model-len 131072 --hf-overrides '{more}{scaling}}}'"
    sglang = "sglang serve Qwen/Qwen3-8B --context-length 131072 --json-model-override-args"
    llama = "llama-server -hf Qwen/Qwen3-8B-GGUF:Q8_0 -np 1 -c 163840 --rope-scaling linear"
    for line in (
        vllm,
        f"{sglang} '{{\"rope_scaling\": {scaling}}}'",
        f"{llama} --rope-scale 3.2",
    ):
        draft = read_paste(line)
        assert draft.request["workload"]["max_request_tokens"] == 40_960, line
        assert "stretches the context of 40,960 tokens to 131,072" in draft.assumptions[0], line
    short = read_paste('vllm serve Qwen/Qwen3-8B --rope-scaling \'{"rope_type": "default"}\'')
    assert short.assumptions == ()
    wrong = read_paste(f"vllm serve Qwen/Qwen3-8B --rope-scaling '{scaling.replace('4.0', '[]')}'")
    assert "a rope_scaling of transformers" in wrong.assumptions[0]
