"""Each launcher with each tool's script: read as what it trains, or refused or warned by name."""

import itertools

import pytest

from planner.api import plan
from planner.imports import read_paste
from planner.imports.programs import tool_of
from planner.imports.trainers import SUPERVISED
from planner.specs.base import PlannerError
from planner.specs.estimate import PlanRequest
from tests.planner.imports.test_import_commands import LLAMA

# How people start a script; ``{}`` is it with its arguments.
LAUNCHERS = (
    "python {}",
    "python3 -u {}",
    "uv run {}",
    "uv run python {}",
    "CUDA_VISIBLE_DEVICES=0,1 python {}",
    "torchrun --nproc_per_node 8 {}",
    "python -m torch.distributed.run --nproc_per_node=8 {}",
    "accelerate launch --num_processes 8 {}",
    "accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml {}",
    "uv run accelerate launch {}",
    "deepspeed --num_gpus 8 {}",
    "srun torchrun --nproc_per_node 8 {}",
)
MODULES = ("python -m {}", "accelerate launch -m {}", "torchrun --nproc_per_node 8 -m {}",
           "uv run python -m {}", "deepspeed --module {}")  # fmt: skip
HF = f"--model_name_or_path {LLAMA} --per_device_train_batch_size 2 --max_length 1024"
FACTORY = f"--model_name_or_path {LLAMA} --do_train --cutoff_len 10000 --template llama3"
# What a plan has an objective for; other methods are left out by name.
OBJECTIVES = {
    "DPO": "dpo",
    "KTO": "kto",
    "ORPO": "orpo",
    "GRPO": "grpo",
    "a reward model": "reward",
    "on-policy distillation": "distillation",
}
# A script and its arguments: the method of the draft, and its objective or what it leaves out.
SCRIPTS = {
    f"trl/scripts/sft.py {HF}": ("full", None),
    f"examples/scripts/sft.py {HF} --use_peft": ("lora", None),
    f"trl/scripts/dpo.py {HF}": ("full", "DPO"),
    f"examples/scripts/dpo.py {HF} --use_peft": ("lora", "DPO"),
    f"examples/scripts/dpo_vlm.py {HF}": ("full", "DPO"),
    f"trl/scripts/grpo.py {HF}": ("full", "GRPO"),
    f"trl/scripts/distillation.py {HF}": ("full", "on-policy distillation"),
    f"trl/scripts/kto.py {HF}": ("full", "KTO"),
    f"examples/scripts/orpo.py {HF}": ("full", "ORPO"),
    f"examples/scripts/cpo.py {HF}": ("full", "CPO"),
    f"examples/scripts/gkd.py {HF}": ("full", "distillation"),
    f"examples/scripts/rloo/rloo.py {HF}": ("full", "RLOO"),
    f"examples/scripts/ppo/ppo.py {HF}": ("full", "PPO"),
    f"examples/scripts/reward_modeling.py {HF}": ("full", "a reward model"),
    f"scripts/run_dpo.py {HF}": ("full", "DPO"),
    f"train.py {HF} --beta 0.1": ("full", "preference training"),
    f"train.py {HF} --num_generations 8": ("full", "GRPO"),
    f"train.py {HF}": ("full", "what it sets itself is not known"),
    f"src/train.py --stage sft --finetuning_type lora {FACTORY}": ("lora", None),
    f"src/train_bash.py --stage sft --finetuning_type full {FACTORY}": ("full", None),
    f"src/train.py --stage dpo --finetuning_type lora --lora_rank 16 {FACTORY}": ("lora", "DPO"),
    f"src/train.py --stage ppo --finetuning_type lora {FACTORY}": ("lora", "PPO"),
    f"src/train.py --stage sft --finetuning_type freeze {FACTORY}": (None, "does not model freeze"),
    f"src/train.py --stage sft --finetuning_type lora --quantization_bit 8 {FACTORY}":
        ("lora", "16-bit or 4-bit"),
    f"swift/cli/sft.py --model {LLAMA} --train_type full": ("full", None),
    f"swift/cli/rlhf.py --model {LLAMA} --rlhf_type dpo": ("lora", "DPO"),
    "pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 64":
        ("pretrain", None),
    "pretrain_mamba.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --swiglu":
        ("pretrain", "is read as Megatron-LM's pretrain_gpt.py"),
    "train.py --batch_size=12 --block_size=1024": ("pretrain", None),
    "torchtitan/train.py --module llama3 --config llama3_8b --training.seq_len 8192":
        ("pretrain", None),
}  # fmt: skip
MODULE_SCRIPTS = {
    f"trl.scripts.dpo {HF}": ("full", "DPO"),
    f"trl.scripts.sft {HF}": ("full", None),
    f"llamafactory.launcher --stage sft --finetuning_type lora {FACTORY}": ("lora", None),
    f"swift.cli.sft --model {LLAMA}": ("lora", None),
    "torchtitan.train --module llama3 --config llama3_8b": ("pretrain", None),
}
REFUSED = {
    "python -m openrlhf.cli.train_dpo --pretrain x": "OpenRLHF",
    "deepspeed --module openrlhf.cli.train_sft --pretrain x": "OpenRLHF",
    "python3 -m verl.trainer.main_ppo data.train_files=x": "verl",
    "torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer model.x=1": "verl",
    "tune run --nproc_per_node 4 lora_finetune_distributed --config x": "torchtune",
    "text-generation-launcher --model-id x --num-shard 2": "Text Generation Inference",
    "docker run --gpus all ghcr.io/x text-generation-launcher --model-id x": "Text Generation",
    "docker run --gpus all -p 8080:80 ghcr.io/huggingface/text-generation-inference:3.3 "
    "--model-id x --num-shard 2": "Text Generation Inference",
    "lmdeploy serve api_server internlm/internlm2_5-7b-chat --tp 2": "LMDeploy",
    "python -m ktransformers.server.main --model_path x": "KTransformers",
    "nemo llm finetune --factory llama3_8b": "NeMo",
    "litgpt finetune x --data Alpaca": "LitGPT",
    "xtuner train internlm2_chat_7b_qlora_oasst1_e3": "XTuner",
    "swift export --model x": "swift sft",
    "ollama create mine -f Modelfile": "ollama run",
    "mlx_lm.convert --hf-path x": "no command of a known tool",
    "./build/bin/llama-quantize in.gguf out.gguf Q5_K_M": "state one of them in its place",
    "llama-quantize in.gguf out.gguf": "has no type of files",
    "auto-round --model x/y --scheme MXFP4": "no compression of Slipway's writes MXFP4",
    "auto-round --model x/y --bits 3 --iters 0": "for 3 choose gptq or autoround",
    "auto-round list format": "compresses nothing",
    'from llmcompressor import oneshot\noneshot(model="x/y", recipe="r.yaml")': "content of the file",
    'from llmcompressor import oneshot\noneshot(model="x/y")': "no modifier that states a method",
    'import llmcompressor\nr = GPTQModifier(scheme="NVFP4")': "writes NVFP4; choose one of W2A16",
    "import llmcompressor\nr = GPTQModifier(config_groups=groups)": "states no scheme by name",
    "import llmcompressor\nr = WandaPruningModifier(sparsity=0.5)": "none that Slipway has",
    "vllm bench throughput --model x/y": "start its load test",
    "pip install auto-round": "no command of a known tool",
}


def cases():
    for launcher, script in itertools.product(LAUNCHERS, SCRIPTS):
        yield launcher.format(script), SCRIPTS[script]
    for launcher, script in itertools.product(MODULES, MODULE_SCRIPTS):
        yield launcher.format(script), MODULE_SCRIPTS[script]
    yield from (
        (f"accelerate launch --num_processes 8 trl dpo {HF}", ("full", "DPO")),
        (f"trl grpo {HF} --use_peft", ("lora", "GRPO")),
        (f"uvx trl kto {HF}", ("full", "KTO")),
    )


def test_a_script_is_read_as_what_it_trains_under_every_launcher():
    wrong = []
    for line, (method, left_out) in cases():
        draft = read_paste(line)
        said = " ".join(draft.assumptions)
        if method and draft.request["workload"].get("method") != method:
            wrong.append((line, "method", draft.request["workload"]))
        objective = OBJECTIVES.get(left_out)
        if draft.request["workload"].get("objective") != objective:
            wrong.append((line, "objective", draft.request["workload"]))
        is_whole = left_out is None or objective is not None
        if SUPERVISED in said if is_whole else left_out not in said:
            wrong.append((line, "said", said))
        if draft.unknown:
            wrong.append((line, "unknown", draft.unknown))
        if "cutoff_len" in line and draft.request["workload"].get("sequence_length") != 10_000:
            wrong.append((line, "length", draft.request["workload"]))
    assert wrong == []


@pytest.mark.parametrize("line", REFUSED)
def test_a_tool_that_no_reader_knows_is_refused_by_name(line):
    with pytest.raises(PlannerError) as refused:
        read_paste(line)
    assert REFUSED[line] in str(refused.value)


def test_a_script_of_no_known_trainer_has_no_method_and_no_defaults():
    draft = read_paste("torchrun --nproc_per_node 8 my_run.py --gradient-steps 4 --layers 3")
    assert "method" not in draft.request["workload"]
    assert "micro_batch_size" not in draft.request.get("pins", {})
    assert any(
        each.startswith("workload.method: no argument of my_run.py") for each in draft.missing
    )
    other = read_paste(
        "torchrun --nproc_per_node 8 x.py --gradient_accumulation_steps 4 --packing"
    )
    assert "micro_batch_size" not in other.request["pins"]


def test_arguments_of_one_tool_alone_name_it():
    for arguments, tool in (
        (["--finetuning_type", "lora", "--model_name_or_path", "x"], "llama_factory"),
        (["--train_type", "lora", "--model", "x"], "swift"),
        (["--tensor-model-parallel-size", "2", "--seq-length", "4"], "megatron"),
        (["--batch_size=12", "--n_layer=6", "--n_head=6"], "nanogpt"),
        (["--model_name_or_path", "x", "--learning_rate", "1"], "transformers"),
    ):
        assert tool_of("train.py", arguments) == tool, arguments


def test_what_compresses_or_measures_beside_a_server_leaves_the_server_read():
    for other in ("llama-quantize in.gguf out.gguf Q4_K_M", "vllm bench serve --model x/y"):
        draft = read_paste(f"{other}\nllama-server -hf x/y-GGUF -c 512")
        assert draft.request["workload"]["kind"] == "serve", other
        assert any(other in each.source for each in draft.ignored), draft.ignored


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 "
    "data.max_prompt_length=512 data.max_response_length=1024 data.truncation='error' "
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct "
    "actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 "
    "trainer.nnodes=2 trainer.logger=[console]"
)


def test_grpo_of_verl_counts_completions_and_is_planned():
    draft = read_paste(VERL)
    assert draft.request["workload"] == {
        "kind": "train", "objective": "grpo", "method": "full", "num_generations": 5,
        "max_prompt_length": 512, "max_completion_length": 1024, "sequence_length": 1536,
        "generation_batch_size": 5120, "global_batch_size": 1280, "beta": 0.001,
        "generator": "colocated",
    }  # fmt: skip
    assert draft.request["pins"]["rollout"] == {
        "engine": "vllm", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.6,
        "sleep": "generator",
    }  # fmt: skip
    assert draft.request["cluster"] == {"devices_per_node": 8, "nodes": 2}
    assert draft.unknown == draft.assumptions == ()
    assert draft.missing == ("cluster.device: the device; python -m planner devices lists them",)
    cluster = {**draft.request["cluster"], "device": "nvidia-h100-sxm"}
    answer = plan(PlanRequest.model_validate({**draft.request, "cluster": cluster}))
    assert answer.plans
    megatron = read_paste(
        f"{VERL} actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.actor.fsdp_config.param_offload=True "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    )
    assert megatron.request["pins"]["tensor_parallel_size"] == 4
    assert "zero_stage" not in megatron.request["pins"]
    assert megatron.request["pins"]["rollout"]["sleep"] == "both"
