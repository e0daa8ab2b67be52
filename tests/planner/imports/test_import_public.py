"""Commands and files in the form of their tools' public documentation, and what they state.

Written for these tests after the pages of vLLM, SGLang, llama.cpp, TensorRT-LLM, Ollama, MLX LM,
TRL, Axolotl, LLaMA-Factory, ms-swift, Unsloth, torchtitan, Megatron-LM, DeepSpeed and nanoGPT.
"""

import pytest

from planner.imports import read_paste
from tests.planner.imports.test_import_commands import LLAMA, flat

UNSLOTH = """
%%capture
!pip install unsloth
from unsloth import FastLanguageModel
from trl import SFTTrainer
from transformers import TrainingArguments
length = 4096
projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length=length, dtype=None,
    load_in_4bit=True, token=TOKEN)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=projections,
    lora_alpha=32, use_gradient_checkpointing="unsloth", random_state=3407)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=data, packing=True,
    args=TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4,
        max_steps=60, bf16=is_bf16(), optim="adamw_8bit", output_dir="out"))
trainer.train()
"""
TITAN = """
[model]
name = "deepseek_v3"
flavor = "671B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 4
global_batch_size = 1024
seq_len = 4096
steps = 10_000
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 32
tensor_parallel_degree = 8
expert_parallel_degree = 8
fsdp_reshard_after_forward = "default"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[job]
description = "x"
"""
AXOLOTL_FFT = """
base_model: Qwen/Qwen3-8B
plugins: [axolotl.integrations.liger.LigerPlugin]
sequence_len: 8192
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_8bit
bf16: auto
gradient_checkpointing: true
activation_offloading: true
attn_implementation: flash_attention_2
dp_shard_size: 4
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {reshard_after_forward: true, cpu_ram_efficient_loading: true}
special_tokens:
"""
FACTORY_QLORA = f"""
model_name_or_path: {LLAMA}
quantization_bit: 4
quantization_method: bnb
flash_attn: fa2
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
template: llama3
cutoff_len: 4096
max_length: 128
per_device_train_batch_size: 1
bf16: true
"""
MODELFILE = '''# a comment
FROM qwen3:14b-q8_0
PARAMETER num_ctx 16384
PARAMETER num_gpu 20
PARAMETER stop "<|im_end|>"
PARAMETER stop "</s>"
TEMPLATE """{{ .System }}
FROM nowhere
{{ .Prompt }}"""
'''
COMPOSE = """
services:
  redis:
    image: redis:7
  sglang:
    image: lmsysorg/sglang:v0.5.23
    shm_size: 32g
    entrypoint: python3 -m sglang.launch_server
    command: --model-path Qwen/Qwen3-32B --tp 4 --host 0.0.0.0
    environment:
      HF_TOKEN: secret-value
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 4, capabilities: [gpu]}]
"""
POD = """
apiVersion: v1
kind: Pod
spec:
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.33.0
      args: [--model, Qwen/Qwen3-32B, --tensor-parallel-size, '2']
      resources: {limits: {nvidia.com/gpu: 2}}
      env: [{name: HF_TOKEN, value: secret-value}]
"""
# A text, and the fields of the request that it states.
PUBLIC = {
    "vllm serve deepseek-ai/DeepSeek-V3.2 -dp 8 --enable-expert-parallel --kv-cache-dtype fp8 "
    "--attention_config.use_fp4_indexer_cache=True --block-size 256 --compilation-config "
    """'{"cudagraph_mode": "FULL_AND_PIECEWISE"}' --reasoning-parser deepseek_v3""": {
        "pins.attention_data_parallel_size": 8,
        "pins.expert_parallel_size": 8,
        "pins.kv_cache_dtype": "fp8",
    },
    f"vllm serve {LLAMA} -sc.model meta-llama/Llama-3.2-1B --speculative-config.method draft_model "
    "-sc.num_speculative_tokens 3 -tp 2": {
        "pins.speculative": {"draft_model": "meta-llama/Llama-3.2-1B", "tokens": 3},
        "pins.tensor_parallel_size": 2,
    },
    f"CUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model {LLAMA} --tensor-parallel-size 2 "
    "--data-parallel-size 2": {
        "workload.kind": "serve",
        "pins.data_parallel_size": 2,
        "cluster.devices_per_node": 4,
    },
    "docker run --gpus all --shm-size 32g --ipc=host --env HF_TOKEN=abc lmsysorg/sglang:latest "
    "python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 "
    "--enable-dp-attention --trust-remote-code": {
        "pins.attention_data_parallel_size": 8,
        "pins.tensor_parallel_size": 1,
    },
    "python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --speculative-algorithm STANDALONE "
    "--speculative-draft-model-path Qwen/Qwen3-0.6B --speculative-num-steps 4 --tp-size 2": {
        "pins.speculative": {"draft_model": "Qwen/Qwen3-0.6B", "tokens": 4},
    },
    "llama-server -hf ggml-org/gpt-oss-120b-GGUF --ctx-size 0 --jinja --flash-attn on "
    "--n-gpu-layers 99 --n-cpu-moe 3": {
        "model": "openai/gpt-oss-120b",
        "pins.weight_dtype": "mxfp4",
        "workload.concurrency": 4,
    },
    "llama-server -hf unsloth/gpt-oss-120b-GGUF:F16 -np 1": {
        "pins.weight_dtype": "mxfp4",
        "workload.concurrency": 1,
    },
    "llama serve -hf unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL -c 65536": {
        "pins.quantization": "gguf:ud-q4_k_xl",
        "workload.max_request_tokens": 40960,
    },
    "trtllm-serve nvidia/DeepSeek-R1-NVFP4 --tp_size 8 --ep_size 8 "
    "--kv_cache_free_gpu_memory_fraction 0.85": {"pins.gpu_memory_utilization": 0.85},
    "OLLAMA_CONTEXT_LENGTH=32768 OLLAMA_NUM_PARALLEL=2 OLLAMA_KV_CACHE_TYPE=q8_0 "
    "ollama run gpt-oss:20b --verbose": {
        "model": "openai/gpt-oss-20b",
        "pins.weight_dtype": "mxfp4",
        "pins.kv_cache_dtype": "int8",
        "workload.concurrency": 2,
        "workload.max_request_tokens": 32768,
    },
    "ollama run hf.co/unsloth/Qwen3-8B-GGUF:Q6_K 'why is the sky blue'": {
        "model": "Qwen/Qwen3-8B",
        "pins.quantization": "gguf:q6_k",
        "workload.concurrency": 1,
    },
    "ollama run llama3.2": {"model": "meta-llama/Llama-3.2-3B"},
    MODELFILE: {
        "model": "Qwen/Qwen3-14B",
        "pins.quantization": "gguf:q8_0",
        "pins.offload": {"weights_cpu": 0.512},
        "workload.max_request_tokens": 16384,
    },
    "mlx_lm.server --model mlx-community/Qwen3-30B-A3B-4bit --port 8080": {
        "workload.kind": "serve",
        "model": "mlx-community/Qwen3-30B-A3B-4bit",
    },
    "python -m mlx_lm generate --model mlx-community/Qwen3-8B-4bit --prompt hi -m 200": {
        "workload.kind": "generate",
        "workload.output_tokens": 200,
    },
    "mlx_lm.lora --train --model mlx-community/Qwen3-8B-4bit --data d --iters 600 "
    "--batch-size 2 --grad-checkpoint": {
        "workload.method": "qlora",
        "pins.micro_batch_size": 2,
        "workload.sequence_length": 2048,
        "workload.tokens": 600 * 2 * 2048,
        "pins.activation_recomputation": "full",
    },
    "NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift sft --model Qwen/Qwen2.5-32B "
    "--tuner_type full --dataset 'a/b' --torch_dtype bfloat16 --max_steps 2000 --streaming true "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --packing true "
    "--max_length 8192 --deepspeed zero3 --use_liger_kernel true --attn_impl flash_attn": {
        "workload.method": "full",
        "workload.global_batch_size": 16,
        "workload.sequence_length": 8192,
        "pins.zero_stage": 3,
        "pins.packed": True,
        "pins.attention": "flash",
        "pins.compute_dtype": "bf16",
    },
    "CUDA_VISIBLE_DEVICES=0 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct "
    "--train_type lora --num_generations 8 --reward_funcs accuracy format": {
        "workload.method": "lora",
    },
    "accelerate launch --num_processes 8 --mixed_precision bf16 src/train_bash.py --stage sft "
    "--model_name_or_path mistralai/Mixtral-8x7B-v0.1 --do_train --finetuning_type lora "
    "--lora_target q_proj,v_proj --cutoff_len 1024 --per_device_train_batch_size 2 --fp16": {
        "workload.method": "lora",
        "workload.lora_targets": "query_value",
        "workload.sequence_length": 1024,
        "workload.global_batch_size": 16,
    },
    "uv run torchrun --standalone --nproc-per-node gpu -m trl.scripts.sft --model_name_or_path "
    f"{LLAMA} --use_peft --lora_target_modules all-linear --gradient_checkpointing "
    "--activation_offloading true": {
        "workload.method": "lora",
        "pins.offload": {"activations_cpu": 1.0},
    },
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 128 --use-distributed-optimizer --bf16 --num-layers 32": {
        "pins.tensor_parallel_size": 4,
        "pins.pipeline_parallel_size": 2,
        "pins.zero_stage": 1,
    },
    "torchrun --standalone --nproc_per_node=8 train.py --batch_size=12 --block_size=1024 "
    "--gradient_accumulation_steps=40 --max_iters=600000 --dtype=bfloat16 --compile=True": {
        "model": "openai-community/gpt2",
        "workload.method": "pretrain",
        "pins.micro_batch_size": 12,
        "pins.gradient_accumulation_steps": 5,
        "workload.global_batch_size": 480,
        "pins.compute_dtype": "bf16",
    },
    "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b "
    "--training.local_batch_size 2 --training.seq_len 4096 "
    "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 4": {
        "model": LLAMA,
        "pins.tensor_parallel_size": 2,
        "pins.zero_stage": 3,
        "workload.global_batch_size": 8,
        "cluster.devices_per_node": 8,
    },
    UNSLOTH: {
        "model": "unsloth/Meta-Llama-3.1-8B-bnb-4bit",
        "workload.method": "qlora",
        "workload.lora_rank": 32,
        "workload.lora_targets": "all",
        "workload.sequence_length": 4096,
        "workload.global_batch_size": 8,
        "workload.optimizer": "adamw_8bit",
        "pins.packed": True,
        "pins.activation_recomputation": "full",
    },
    TITAN: {
        "model": "deepseek-ai/DeepSeek-V3",
        "workload.method": "pretrain",
        "pins.tensor_parallel_size": 8,
        "pins.expert_parallel_size": 8,
        "pins.gradient_accumulation_steps": 8,
        "workload.global_batch_size": 1024,
        "pins.activation_recomputation": "full",
    },
    AXOLOTL_FFT: {
        "workload.optimizer": "adamw_8bit",
        "pins.offload": {"activations_cpu": 1.0},
        "pins.data_parallel_size": 4,
        "workload.global_batch_size": 8,
        "cluster.devices_per_node": 8,
    },
    FACTORY_QLORA: {
        "workload.method": "qlora",
        "pins.attention": "flash",
        "workload.sequence_length": 4096,
    },
    COMPOSE: {"engine": "sglang", "pins.tensor_parallel_size": 4, "cluster.devices_per_node": 4},
    POD: {"engine": "vllm", "pins.tensor_parallel_size": 2, "cluster.devices_per_node": 2},
}


@pytest.mark.parametrize("text", PUBLIC, ids=lambda text: " ".join(text.split())[:60])
def test_a_public_text_is_read_as_what_it_states(text):
    draft = read_paste(text)
    fields = flat(draft.request)
    assert {name: fields.get(name) for name in PUBLIC[text]} == PUBLIC[text]
    assert draft.unknown == ()
    assert "secret-value" not in draft.model_dump_json()


def test_a_container_file_lists_its_image_devices_and_other_settings():
    items = read_paste(COMPOSE)
    named = [each.source for each in (*items.ignored, *items.understood)]
    for words in ("lmsysorg/sglang:v0.5.23", "devices.count: 4", "shm_size: 32g", "HF_TOKEN=***",
                  "another container: redis:7"):  # fmt: skip
        assert sum(words in each for each in named) == 1, (words, named)


def test_a_python_script_is_read_by_its_syntax_and_never_run(tmp_path):
    mark = tmp_path / "mark"
    draft = read_paste(
        f"import pathlib\nfrom trl import SFTConfig, DPOTrainer\npathlib.Path({str(mark)!r}).touch()\n"
        f"size = len(open('/etc/passwd').read())\n"
        f"args = SFTConfig(per_device_train_batch_size=size, max_length=512)\n"
        f"model = AutoModelForCausalLM.from_pretrained({LLAMA!r})\n"
        "trainer = DPOTrainer(model, args=args, beta=0.1)\n"
    )
    assert not mark.exists()
    reasons = {item.source: item.reason for item in draft.ignored}
    assert "is not run" in reasons["SFTConfig.per_device_train_batch_size=size"]
    assert draft.request["workload"]["objective"] == "dpo"
    assert draft.request["model"] == LLAMA
