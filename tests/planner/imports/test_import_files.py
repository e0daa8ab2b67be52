"""Configuration files in the style of their tools' examples: each key is understood or named.

Key names are those of axolotl-ai-cloud/axolotl ``examples/`` and ``src/axolotl/utils/schemas``,
hiyouga/LLaMA-Factory ``examples/`` and ``src/llamafactory/hparams``, Hugging Face Accelerate's
``config_args.py`` and DeepSpeed's ``docs/_pages/config-json.md``; the files are written for these
tests.
"""

import json

import pytest

from planner.catalog.models import get_entry, get_model
from planner.catalog.reading import data_text
from planner.imports import read_paste
from planner.workload.resolve import resolve_model
from tests.planner.imports.test_import_commands import LLAMA, flat

AXOLOTL = f"""
base_model: {LLAMA}
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: my-org/alpaca
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_steps: 10
dp_shard_size: 4
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""
LLAMA_FACTORY = f"""
### model
model_name_or_path: {LLAMA}
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: examples/deepspeed/ds_z2_config.json
### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local"},
        "overlap_comm": True,
    },
}
FILES = {
    "Axolotl": (
        AXOLOTL,
        {
            "model": LLAMA,
            "workload.method": "qlora",
            "workload.lora_rank": 32,
            "workload.lora_targets": "all",
            "workload.sequence_length": 4096,
            "workload.global_batch_size": 32,
            "workload.optimizer": "adamw",
            "pins.zero_stage": 3,
            "pins.offload": {"optimizer": "cpu", "weights_cpu": 1.0},
            "pins.activation_recomputation": "full",
            "pins.attention": "flash",
            "pins.packed": True,
            "cluster.devices_per_node": 4,
        },
    ),
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        {
            "model": LLAMA,
            "workload.method": "lora",
            "workload.lora_rank": 8,
            "workload.lora_targets": "all",
            "workload.sequence_length": 2048,
            "pins.micro_batch_size": 1,
            "pins.gradient_accumulation_steps": 8,
            "pins.zero_stage": 2,
            "pins.compute_dtype": "bf16",
            "pins.activation_recomputation": "full",  # its default
        },
    ),
    "LLaMA-Factory as an API": (
        (
            f"model_name_or_path: {LLAMA}\ntemplate: llama3\ninfer_backend: vllm\n"
            "vllm_maxlen: 8192\nvllm_enforce_eager: true\n"
        ),
        {"workload.kind": "serve", "engine": "vllm", "workload.max_request_tokens": 8192},
    ),
    "LLaMA-Factory's export": (
        (
            f"model_name_or_path: {LLAMA}\ntemplate: llama3\nexport_dir: out\n"
            "export_quantization_bit: 4\nexport_quantization_nsamples: 128\n"
            "export_quantization_maxlen: 1024\nexport_quantization_dataset: data/c4.jsonl\n"
        ),
        {
            "workload.kind": "compress",
            "workload.method": "gptq",
            "workload.bits": 4,
            "workload.calibration_tokens": 128 * 1024,
        },
    ),
    "LLaMA-Factory, version 1": (
        (
            f"model: {LLAMA}\nmodel_class: llm\npeft_config:\n  name: lora\n  r: 16\n"
            "quant_config:\n  name: bnb\n  quantization_bit: 4\ndist_config:\n  name: fsdp2\n"
            "train_dataset: data/v1_sft_demo.yaml\nmicro_batch_size: 2\ncutoff_len: 1024\nbf16: true\n"
        ),
        {
            "workload.method": "qlora",
            "workload.lora_rank": 16,
            "pins.micro_batch_size": 2,
            "pins.zero_stage": 3,
        },
    ),
    "TRL": (
        (
            f"model_name_or_path: {LLAMA}\nper_device_train_batch_size: 4\nmax_length: 512\n"
            "use_peft: true\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\noptim: adamw_torch\n"
        ),
        {"workload.lora_targets": "query_value", "workload.optimizer": "adamw"},
    ),
    "Accelerate": (
        (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
            "num_machines: 2\nnum_processes: 16\nfsdp_config:\n  fsdp_sharding_strategy: "
            "SHARD_GRAD_OP\n  fsdp_offload_params: true\n  fsdp_use_orig_params: true\n"
        ),
        {
            "cluster.devices_per_node": 8,
            "cluster.nodes": 2,
            "pins.zero_stage": 2,
            "pins.offload": {"optimizer": "cpu", "weights_cpu": 1.0},
            "pins.compute_dtype": "bf16",
        },
    ),
    "DeepSpeed": (
        json.dumps(DEEPSPEED),
        {
            "workload.global_batch_size": 64,
            "pins.zero_stage": 3,
            "pins.offload": {"optimizer": "cpu", "weights_disk": 1.0},
            "pins.data_parallel_size": 8,
            "cluster.devices_per_node": 8,
        },
    ),
    "vLLM's --config": (
        (
            f"model: {LLAMA}\ntensor-parallel-size: 4\nenable-prefix-caching: false\nport: 8000\n"
            "speculative-config: {model: meta-llama/Llama-3.2-1B, num_speculative_tokens: 3}\n"
        ),
        {
            "workload.kind": "serve",
            "pins.tensor_parallel_size": 4,
            "workload.prefix_share_ratio": 0.0,
            "pins.speculative": {"draft_model": "meta-llama/Llama-3.2-1B", "tokens": 3},
        },
    ),
    "Docker Compose": (
        (
            "services:\n  llm:\n    image: vllm/vllm-openai:latest\n    command: --model "
            f"{LLAMA} --tensor-parallel-size 2\n    ports: ['8000:8000']\n"
        ),
        {"model": LLAMA, "pins.tensor_parallel_size": 2},
    ),
    "Kubernetes": (
        (
            "apiVersion: apps/v1\nkind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n"
            "        - name: llm\n          image: vllm/vllm-openai:latest\n"
            f"          command: [vllm, serve, {LLAMA}]\n          args: ['-tp', '4', '--port', "
            "'$(PORT)']\n"
        ),
        {"model": LLAMA, "pins.tensor_parallel_size": 4},
    ),
}


@pytest.mark.parametrize("title", FILES)
def test_a_file_becomes_the_request_that_it_states(title):
    text, stated = FILES[title]
    draft = read_paste(text)
    fields = flat(draft.request)
    assert {name: fields.get(name) for name in stated} == stated
    assert draft.unknown == ()
    assert all(item.reason for item in draft.ignored)


def test_every_key_of_a_file_is_understood_ignored_or_unknown():
    for text in (AXOLOTL, LLAMA_FACTORY):
        draft = read_paste(text + "no_such_key: 1\n")
        named = " ".join(
            item.source for item in (*draft.understood, *draft.ignored, *draft.unknown)
        )
        keys = [line.split(":")[0] for line in text.splitlines() if line[:1].isalpha()]
        null = {"lora_model_dir", "resume_from_checkpoint"}
        assert [key for key in keys if key not in named and key not in null] == []
        assert [item.source for item in draft.unknown] == ["no_such_key: 1"]


def test_a_file_without_devices_says_how_the_batch_follows_from_them():
    (batch,) = (each for each in read_paste(LLAMA_FACTORY).missing if "batch" in each)
    assert batch == (
        "workload.global_batch_size: 1 x 8 sequences of a data-parallel device, times the number "
        "of these devices"
    )


def test_methods_that_are_more_than_supervised_steps_say_so():
    for text in (
        AXOLOTL + "rl: dpo\n",
        LLAMA_FACTORY.replace("stage: sft", "stage: dpo"),
        f"trl dpo --model_name_or_path {LLAMA}",
    ):
        reasons = [item.reason for item in read_paste(text).ignored]
        assert any(reason.startswith("Slipway plans supervised steps") for reason in reasons)


def test_a_models_config_becomes_an_inline_model():
    text = data_text(f"configs/{get_entry(LLAMA).config}.json")
    config = json.loads(text)
    draft = read_paste(text)
    assert (draft.kind, draft.goal, draft.model) == ("hf_config", None, config)
    assert resolve_model(draft.request["model"]).shape == get_model(LLAMA).shape
    assert any(each.startswith("workload:") for each in draft.missing)
