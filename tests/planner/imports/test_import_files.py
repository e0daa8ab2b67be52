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
from planner.imports.trainers import SUPERVISED
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
    "Axolotl from scratch over groups": (
        (
            f"base_model: {LLAMA}\nreinit_weights: true\nsequence_len: 8192\nmicro_batch_size: 1\n"
            "dp_shard_size: 2\ndp_replicate_size: 2\ncontext_parallel_size: 2\n"
            "optimizer: adamw_bnb_8bit\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n"
            "  reshard_after_forward: true\n  activation_checkpointing: true\n"
        ),
        {
            "workload.method": "pretrain",
            "workload.optimizer": "adamw_8bit",
            "pins.zero_shard_size": 2,
            "pins.zero_stage": 3,
            "pins.context_parallel_size": 2,
            "pins.data_parallel_size": 4,
            "pins.activation_recomputation": "full",
            "workload.global_batch_size": 4,
            "cluster.devices_per_node": 8,
        },
    ),
    "LLaMA-Factory from scratch": (
        (
            f"model_name_or_path: {LLAMA}\nstage: pt\ntrain_from_scratch: true\npure_bf16: true\n"
            "disable_gradient_checkpointing: true\ncutoff_len: 512\n"
        ),
        {
            "workload.method": "pretrain",
            "pins.compute_dtype": "bf16",
            "pins.optimizer_dtype": "bf16",
            "pins.activation_recomputation": "none",
        },
    ),
    "LLaMA-Factory with SGLang": (
        (
            f"model_name_or_path: {LLAMA}\ntemplate: llama3\ninfer_backend: sglang\n"
            "sglang_maxlen: 4096\nsglang_mem_fraction: 0.8\nsglang_tp_size: 2\n"
        ),
        {
            "engine": "sglang",
            "workload.max_request_tokens": 4096,
            "pins.gpu_memory_utilization": 0.8,
            "pins.tensor_parallel_size": 2,
            "cluster.devices_per_node": 2,
        },
    ),
    "Accelerate with DeepSpeed": (
        (
            "distributed_type: DEEPSPEED\nnum_processes: 16\nnum_machines: 2\nmixed_precision: fp16\n"
            "deepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n"
            "  offload_param_device: none\n  gradient_accumulation_steps: 4\n"
            "  zero3_init_flag: false\n"
        ),
        {
            "pins.zero_stage": 2,
            "pins.offload": {"optimizer": "cpu"},
            "pins.gradient_accumulation_steps": 4,
            "pins.compute_dtype": "fp16",
            "cluster.nodes": 2,
        },
    ),
    "DeepSpeed with tensor parallelism": (
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 1},
                "tensor_parallel": {"autotp_size": 2},
                "sequence_parallel_size": 4,
                "data_types": {"grad_accum_dtype": "fp32"},
                "activation_checkpointing": {"cpu_checkpointing": True},
            }
        ),
        {
            "pins.tensor_parallel_size": 2,
            "pins.context_parallel_size": 4,
            "pins.gradient_dtype": "fp32",
            "pins.activation_recomputation": "full",
            "pins.offload": {"activations_cpu": 1.0},
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
            f"{LLAMA} --tensor-parallel-size 2 --port $$PORT\n    ports: ['8000:8000']\n"
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


def test_merging_an_adapter_is_no_work_of_a_plan():
    text = f"model_name_or_path: {LLAMA}\ntemplate: llama3\nexport_dir: out\nexport_size: 5\n"
    draft = read_paste(text)
    assert (draft.goal, draft.model) == (None, LLAMA)
    assert draft.missing[0] == "workload: merging an adapter is no work that Slipway plans"


TRL_LINE = f"trl dpo --model_name_or_path {LLAMA} "
COMPARES = [
    (TRL_LINE, "dpo", None),
    (TRL_LINE.replace("dpo", "orpo"), "orpo", None),
    (TRL_LINE.replace("dpo", "reward"), "reward", None),
    (f"{TRL_LINE}--loss_type ipo", "dpo", "usual loss of DPO"),
    (TRL_LINE.replace("dpo", "grpo"), "grpo", None),
    (TRL_LINE.replace("dpo", "rloo"), None, "trains by RLOO"),
    (f"{TRL_LINE.replace('dpo', 'grpo')} --loss_type vespo", "grpo", "usual loss of GRPO"),
    (f"swift rlhf --rlhf_type grpo --model {LLAMA}", "grpo", None),
    (AXOLOTL + "rl: grpo\n", "grpo", None),
    (AXOLOTL + "rl: dpo\n", "dpo", None),
    (AXOLOTL + "rl: kto\n", "kto", None),
    (AXOLOTL + "rl: ipo\n", "dpo", "usual loss of DPO"),
    (AXOLOTL + "rl: simpo\n", None, "trains by SimPO"),
    (AXOLOTL + "reward_model: true\n", "reward", None),
    (AXOLOTL + "process_reward_model: true\n", None, "a process reward model"),
    (LLAMA_FACTORY.replace("stage: sft", "stage: dpo"), "dpo", None),
    (LLAMA_FACTORY.replace("stage: sft", "stage: kto"), "kto", None),
    (LLAMA_FACTORY.replace("stage: sft", "stage: rm"), "reward", None),
    (LLAMA_FACTORY.replace("stage: sft", "stage: ppo"), None, "trains by PPO"),
    (LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_loss: orpo"), "orpo", None),
    (LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_loss: hinge"), "dpo", "usual loss"),
    (LLAMA_FACTORY.replace("stage: sft", "stage: dpo\npref_loss: simpo"), None, "SimPO"),
    (f"model_name_or_path: {LLAMA}\nmax_length: 512\ndesirable_weight: 1.0\nbeta: 0.1\n", "kto",
     None),
    (f"model_name_or_path: {LLAMA}\nmax_length: 512\nbeta: 0.1\n", None, "preference training"),
    (f"{TRL_LINE}--loss_type sigmoid ipo --bf16", "dpo", "--loss_type sigmoid ipo"),
    (f"torchrun train.py --model_name_or_path {LLAMA} --precompute_ref_log_probs", None,
     "preference training"),
    (f"torchrun train.py --model_name_or_path {LLAMA} --beta 0.1 --desirable_weight 1.0", "kto",
     None),
    (f"model_name_or_path: {LLAMA}\nbeta: 0.1\nnum_generations: 8\n", "grpo", None),
    (f"swift rlhf --rlhf_type kto --model {LLAMA}", "kto", None),
    (f"swift rlhf --rlhf_type simpo --model {LLAMA}", None, "SimPO"),
]  # fmt: skip


def test_what_compares_answers_has_its_objective_or_says_what_it_leaves_out():
    for text, objective, left_out in COMPARES:
        draft = read_paste(text)
        said = " ".join(draft.assumptions)
        assert draft.request["workload"].get("objective") == objective, text
        assert (SUPERVISED in said) == (objective is None), text
        assert (left_out or "") in said, text


def test_grpo_states_its_completions_their_place_and_its_rewards():
    line = (
        "accelerate launch --num_processes 4 trl grpo --model_name_or_path Qwen/Qwen3-8B "
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_generations 16 "
        "--max_prompt_length 512 --max_completion_length 1024 --beta 0.04 --num_iterations 2 "
        "--steps_per_generation 4 --use_vllm --vllm_gpu_memory_utilization 0.3 "
        "--vllm_enable_sleep_mode --reward_funcs accuracy_reward my.own "
    )
    draft = read_paste(line)
    assert draft.request["workload"] == {
        "kind": "train", "objective": "grpo", "method": "full", "num_generations": 16,
        "num_iterations": 2, "beta": 0.04, "max_prompt_length": 512,
        "max_completion_length": 1024, "sequence_length": 1536, "global_batch_size": 64,
        "generation_batch_size": 128, "generator": "colocated",
    }  # fmt: skip
    assert draft.request["pins"]["rollout"] == {
        "engine": "vllm", "gpu_memory_utilization": 0.3, "sleep": "generator",
    }  # fmt: skip
    assert draft.rewards == ("accuracy_reward", "my.own")
    assert draft.assumptions == ()
    apart = read_paste(f"{line}--vllm_mode server")
    assert apart.request["workload"]["generator"] == "separate"
    assert any(each.startswith("workload.rollout_devices") for each in apart.missing)
    axolotl = read_paste(
        f"{AXOLOTL}rl: grpo\ntrl:\n  use_vllm: true\n  vllm_server_host: h\n"
        "  num_generations: 4\n  max_completion_length: 128\n  temperature: 0.7\n"
    )
    work = axolotl.request["workload"]
    assert (work["num_generations"], work["max_completion_length"]) == (4, 128)
    assert work["generator"] == "separate"
    assert any(each.source == "trl.temperature: 0.7" for each in axolotl.ignored)
    alone = read_paste(line.replace("--use_vllm ", "")).request["pins"]["rollout"]
    assert alone == {"engine": "transformers"}


def test_a_distillation_states_its_teacher_or_needs_one():
    line = (
        "trl distillation --model_name_or_path Qwen/Qwen3-0.6B --beta 0.5 --temperature 0.9 "
        "--per_device_train_batch_size 4 --max_completion_length 256 "
    )
    draft = read_paste(f"{line}--teacher_model_name_or_path Qwen/Qwen3-8B")
    assert draft.request["workload"] == {
        "kind": "train", "objective": "distillation", "method": "full", "beta": 0.5,
        "teacher_model": "Qwen/Qwen3-8B", "max_completion_length": 256,
    }  # fmt: skip
    assert draft.request["pins"]["rollout"] == {"engine": "transformers"}
    assert [each.partition(":")[0] for each in draft.assumptions] == [
        "no --dtype (float32 by default)", "--temperature 0.9"
    ]  # fmt: skip
    for other in ("", "--teacher_model_name_or_path acme/x"):
        draft = read_paste(f"{line}{other}")
        needs = any(each.startswith("workload.teacher_model") for each in draft.missing)
        assert needs == (not other), draft.missing
    for option, where in (
        ("--lmbda 0.5", "unknown"),
        ("--num_generations 4", "unknown"),
        ("--num_iterations 2", "unknown"),
        ("--generation_batch_size 32", "unknown"),
        ("--beta 1.5", "ignored"),
    ):
        draft = read_paste(f"{line}--teacher_model_name_or_path Qwen/Qwen3-8B {option}")
        assert option in [each.source for each in getattr(draft, where)], option
        assert not {"num_generations", "num_iterations"} & set(draft.request["workload"]), option
    for dtype, is_wide in (("bfloat16", False), ("float32", True)):
        assumed = read_paste(f"{line}--dtype {dtype}").assumptions
        assert any("fp32" in each for each in assumed) == is_wide, dtype


def test_a_pairs_batch_counts_both_answers_and_its_reference_may_answer_ahead():
    more = "--per_device_train_batch_size 4 --max_length 512 --max_steps 10 --packing "
    text = f"accelerate launch --num_processes 2 {TRL_LINE}{more}--precompute_ref_log_probs"
    draft = read_paste(text)
    work = draft.request["workload"]
    assert (work["global_batch_size"], work["tokens"]) == (8, 10 * 8 * 2 * 512)
    assert work["precompute_reference"] is True
    assert "packed" not in draft.request["pins"]
    reward = read_paste(text.replace("trl dpo", "trl reward")).request["workload"]
    assert "precompute_reference" not in reward


def test_trls_way_to_pack_is_kept_where_it_is_not_the_usual_one():
    line = f"trl sft --model_name_or_path {LLAMA} --packing --packing_strategy "
    for text, packed, data in (
        (f"{line}wrapped", True, {"packing_strategy": "wrapped"}),
        (f"{line}bfd", True, {}),
        (f"{line}ffd", True, {}),
        (f"{line}wrapped".replace("--packing ", ""), None, {}),
        (f"{line}wrapped".replace("trl sft", "trl dpo"), None, {}),
    ):
        draft = read_paste(text)
        assert (draft.request.get("pins", {}).get("packed"), draft.data) == (packed, data), text
        assert any("bfd is used" in each for each in draft.assumptions) == ("ffd" in text), text
        stated = [each.source for each in (*draft.understood, *draft.ignored)]
        assert any("packing_strategy" in each for each in stated), text


def test_a_models_config_becomes_an_inline_model():
    text = data_text(f"configs/{get_entry(LLAMA).config}.json")
    config = json.loads(text)
    draft = read_paste(text)
    assert (draft.kind, draft.goal, draft.model) == ("hf_config", None, config)
    assert resolve_model(draft.request["model"]).shape == get_model(LLAMA).shape
    assert any(each.startswith("workload:") for each in draft.missing)


# A text, the source of one of its settings, and the words of why a plan does not use it.
NOT_USED = [
    (f"base_model: {LLAMA}\nload_in_4bit: true", "load_in_4bit: true", "no adapter"),
    (f"base_model: {LLAMA}\nadapter: ia3", "adapter: ia3", "Slipway plans lora and qlora"),
    (f"base_model: {LLAMA}\noptimizer: muon", "optimizer: muon", "does not model its states"),
    (f"base_model: {LLAMA}\nlora_r: 8", "lora_r: 8", "method full has no adapters"),
    (
        f"base_model: {LLAMA}\nadapter: lora\nlora_target_modules: [q_proj]",
        'lora_target_modules: ["q_proj"]',
        "all linear layers, or on queries and values",
    ),
    (f"base_model: {LLAMA}\nattn_implementation: sage", "attn_implementation: sage", "eager"),
    (f"base_model: {LLAMA}\nflash_attention: false", "flash_attention: false", "off"),
    (f"base_model: {LLAMA}\ngradient_checkpointing: offload", "gradient_checkpointing: offload",
     "on the device"),
    (f"base_model: {LLAMA}\ndeepspeed: my.json", "deepspeed: my.json", "the file is not read"),
    (f"base_model: {LLAMA}\nmax_steps: -1", "max_steps: -1", "no limit"),
    (f"base_model: {LLAMA}\nfp16: true\nbf16: true", "fp16: true", "takes precedence"),
    (f"{LLAMA_FACTORY}quantization_bit: 8", "quantization_bit: 8", "16-bit or 4-bit"),
    (LLAMA_FACTORY.replace("type: lora", "type: freeze"), "finetuning_type: freeze",
     "does not model freeze"),
    (LLAMA_FACTORY + "disable_gradient_checkpointing: false",
     "disable_gradient_checkpointing: false", "off"),
    (f"model_name_or_path: {LLAMA}\ntemplate: x\ninfer_backend: ktransformers",
     "infer_backend: ktransformers", "does not know this engine"),
    (f"model_name_or_path: {LLAMA}\nload_in_8bit: true\nuse_peft: true", "load_in_8bit: true",
     "16-bit or 4-bit"),
    ('{"zero_optimization": {"stage": 1}, "fp16": {"enabled": "auto"}}',
     "fp16.enabled: auto", "the trainer fills it in"),
    ('{"zero_optimization": {"stage": 1}, "steps_per_print": 10}', "steps_per_print: 10", "logs"),
    ("distributed_type: MULTI_GPU\nmixed_precision: 'no'", "mixed_precision: no", "decide"),
    ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}",
     'fsdp_config: {"fsdp_version": 2}', "not FSDP"),
    (f"vllm serve {LLAMA} --cpu-offload-gb 0", "--cpu-offload-gb 0", "nothing is offloaded"),
    ("vllm serve my/model --cpu-offload-gb 4", "--cpu-offload-gb 4", "size is not known"),
    (f"vllm serve {LLAMA} --kv-cache-dtype x", "--kv-cache-dtype x", "not model a cache in x"),
    (f"vllm serve {LLAMA} --enable-expert-parallel", "--enable-expert-parallel", "no experts"),
    (f"vllm serve {LLAMA} --spec-method ngram", "--spec-method ngram", "not this method"),
    (f"vllm serve {LLAMA}-AWQ -q awq", "-q awq", "states its format itself"),
    (f"sglang serve {LLAMA} --speculative-algorithm EAGLE", "--speculative-algorithm EAGLE",
     "not this method"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -ngl 99", "-ngl 99", "all layers are on the device"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -ngl 0", "-ngl 0", "runs on the CPU"),
    ("llama-server -m nobody-9b-Q8_0.gguf -ngl 9", "-ngl 9", "number is not known"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf --cpu-moe", "--cpu-moe", "no experts"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -sm layer", "-sm layer", "is not stated"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -ts 3,1", "-ts 3,1", "by the speed of the devices"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -dev none", "-dev none", "on the CPU"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -ctk q8_0", "-ctk q8_0", "keys and values of one type"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -c 0 -np -1", "-c 0", "the model's own context"),
    ("llama-server -m Qwen3-8B-Q8_0.gguf -fa auto", "-fa auto", "the engine's default"),
    ("llama-server -m Qwen3-8B-IQ9_X.gguf", "-m Qwen3-8B-IQ9_X.gguf", "is not known"),
    (f"trtllm-serve {LLAMA} --extra_llm_api_options a.yaml", "--extra_llm_api_options a.yaml",
     "paste it above"),
    ("torchrun --nnodes 1:4 --nproc_per_node 8 x.py --bf16", "--nnodes 1:4", "a range of nodes"),
    ("torchrun --nproc_per_node gpu x.py --bf16", "--nproc_per_node gpu", "is not stated"),
    ("accelerate launch --num_machines 2 x.py --bf16", "--num_machines 2", "are not stated"),
    ("deepspeed --num_nodes 2 x.py --bf16", "--num_nodes 2", "are not stated"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "source", "words"), NOT_USED, ids=lambda part: part[-40:])
def test_a_setting_that_a_plan_does_not_use_says_why(text, source, words):
    draft = read_paste(text)
    items = (*draft.ignored, *draft.understood)
    reasons = [item.reason for item in items if item.source == source and item.reason]
    assert any(words in reason for reason in reasons), reasons


def test_sharding_is_read_as_the_zero_stage_that_it_equals():
    line = f"torchrun --nproc_per_node 4 --nnodes 2 x.py --model_name_or_path {LLAMA} --bf16 "
    for words, stage, others in (
        ("--fsdp full_shard", 3, {}),
        ("--fsdp 'shard_grad_op auto_wrap'", 2, {}),
        ("--fsdp no_shard", 0, {}),
        ("--fsdp 'hybrid_shard offload'", 3,
         {"zero_shard_size": 4, "offload": {"optimizer": "cpu", "weights_cpu": 1.0}}),
        ("""--fsdp_config '{"reshard_after_forward": false}'""", 2, {}),
        ("""--fsdp_config '{"activation_checkpointing": true}'""", 3,
         {"activation_recomputation": "full"}),
        ("--deepspeed zero_stage_1.json", 1, {}),
        ("--deepspeed ds_z3_offload.json", 3,
         {"offload": {"optimizer": "cpu", "weights_cpu": 1.0}}),
    ):  # fmt: skip
        pins = read_paste(line + words).request["pins"]
        assert pins["zero_stage"] == stage, words
        assert {name: pins.get(name) for name in others} == others, words
    launched = "accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 "
    launched += "--offload_optimizer_device cpu --gradient_accumulation_steps 4 x.py --bf16"
    assert read_paste(launched).request["pins"] == {
        "zero_stage": 2,
        "offload": {"optimizer": "cpu"},
        "compute_dtype": "bf16",
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "data_parallel_size": 2,
    }
    fsdp = "accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP x.py --bf16"
    assert read_paste(fsdp).request["pins"]["zero_stage"] == 2


def test_a_data_set_of_the_hub_is_carried_over_and_nothing_else_is_taken_for_one():
    file = f"model_name_or_path: {LLAMA}\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\n"
    base, trl = f"base_model: {LLAMA}\n", f"trl sft --model_name_or_path {LLAMA} "
    of_ultrachat = {"data_repository": "trl-lib/ultrachat"}
    for text, data in (
        (f"{trl} --dataset_name trl-lib/ultrachat", of_ultrachat),
        (
            f"{trl} --dataset_name trl-lib/ultrachat --dataset_train_split b --dataset_config c",
            {**of_ultrachat, "data_subset": "c", "data_split": "b"},
        ),
        (f"{trl} --dataset_name imdb --dataset_train_split b", {}),
        (f"{trl} --dataset_name data/a.jsonl", {}),
        (
            f"{base}datasets:\n- {{path: tatsu-lab/alpaca, name: a, split: b, type: alpaca}}\n",
            {"data_repository": "tatsu-lab/alpaca", "data_subset": "a", "data_split": "b"},
        ),
        (f"{base}datasets:\n- {{path: a/b, type: alpaca}}\n- {{path: c/d, type: alpaca}}\n", {}),
        (f"{base}datasets:\n- {{path: json, data_files: a.json, type: alpaca}}\n", {}),
        (f"{base}datasets:\n- {{path: a/b, data_files: c.json, type: alpaca}}\n", {}),
        (
            f"{base}datasets:\n- {{path: a/b, revision: v2, type: alpaca}}\n",
            {"data_repository": "a/b@v2"},
        ),
        (f"{file}dataset: trl-lib/ultrachat\n", of_ultrachat),
        (f"{file}dataset: identity,alpaca_en_demo\n", {}),
        (f"swift sft --model {LLAMA} --dataset swift/notes", {}),  # of ModelScope
    ):
        found = read_paste(text)
        assert found.data == data, text
        told = {each.field for each in found.understood if each.field}
        assert {f"workload.{name}" for name in data} <= told, text
