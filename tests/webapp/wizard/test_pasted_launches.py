"""A pasted line ends in a job of its model, or in a refusal that names what the host lacks."""

import json

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
GGUF = "acme/tiny-GGUF:Q8_0"
# The source of a job's model, by the text that was pasted for a host without a GPU.
RUNS = {
    f"llama-server -hf {GGUF} -c 512 --jinja": {"repository": "acme/tiny-GGUF", "weights": "gguf"},
    f"ollama run hf.co/{GGUF}": {"repository": "acme/tiny-GGUF", "weights": "gguf"},
    "llama-server --hf-repo acme/tiny-GGUF --hf-file tiny-Q8_0.gguf -c 300": {
        "file": "tiny-Q8_0.gguf"
    },
    "docker run -v /m:/models ghcr.io/ggml-org/llama.cpp:server --port 80 "
    f"-hf {GGUF} -ctk q8_0 -ctv q8_0": {"repository": "acme/tiny-GGUF"},
    "base_model: acme/tiny\nadapter: lora\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n"
    "sequence_len: 128\nfsdp_config:\n  offload_params: true": {"repository": "acme/tiny"},
    "swift sft --model acme/tiny --train_type lora --deepspeed zero1 --max_length 128 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 16": {
        "repository": "acme/tiny"
    },
    "vllm serve acme/tiny --max-model-len 512": {"repository": "acme/tiny"},
    "vllm bench serve --model acme/tiny --input-len 200 --output-len 50 --request-rate 4": {
        "repository": "acme/tiny"
    },
    "auto-round --model acme/tiny --scheme W4A16 --group_size 64": {"repository": "acme/tiny"},
    'from llmcompressor import oneshot\noneshot(model="acme/tiny", recipe=AWQModifier('
    'scheme="W4A16"), max_seq_length=64, num_calibration_samples=8)': {"repository": "acme/tiny"},
    "genai-perf profile -m tiny --tokenizer acme/tiny --isl 100 --osl 20 --concurrency 3": {
        "repository": "acme/tiny"
    },
}
GRPO = (
    "trl grpo --model_name_or_path acme/tiny --num_generations 4 --max_completion_length 32 "
    "--max_prompt_length 64 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--reward_funcs think_format_reward"
)
TAUGHT = "trl distillation --model_name_or_path acme/tiny --max_completion_length 32 "
REFUSED = {
    GRPO: ("a data set of the Hub",),
    f"{TAUGHT} --per_device_train_batch_size 4 --teacher_model_name_or_path acme/large "
    "--max_prompt_length 64": ("teacher acme/large", "to the models of your team"),
    "python -m sglang.launch_server --model-path acme/tiny --context-length 512": (
        "runs on NVIDIA GPUs",
        "reports none",
    ),
    "vllm run-batch -i in.jsonl -o out.jsonl --model acme/tiny": ("vLLM", "“Automatic”"),
    "vllm serve acme/tiny -tp 4": ("take 4 devices", "has 1", "choose hardware with 4 devices"),
    "vllm serve ./model --max-model-len 512": ("./model", "weights to load are not known"),
    "llama-quantize /models/7B/ggml-model-f16.gguf Q4_K_M": ("7B", "choose a"),
    "llama-server -m /models/7B/ggml-model-q4_0.gguf -c 512": ("ggml-model-q4_0.gguf", "choose a"),
    f"vllm serve {GGUF}": ("reads safetensors files", "GGUF files"),
    "vllm serve meta-llama/Llama-3.1-405B": ("Nothing fits on", "GiB"),
    "ollama run llama3.1": ("reads GGUF files", "meta-llama/Llama-3.1-8B-GGUF"),
    # Of public model cards and scripts, as they stand there.
    "llama-server -hf ggml-org/gpt-oss-20b-GGUF --ctx-size 0 --jinja -ub 2048 -b 2048 -ngl 99 -fa": (
        "has no repository 'ggml-org/gpt-oss-20b-GGUF'",
    ),
    "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-1.7B --train_type "
    "lora --lora_rank 16 --lora_alpha 64 --max_length 8192 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 16 --deepspeed zero1": ("take 4 devices", "has 1"),
    "vllm serve zai-org/GLM-4.7 --tensor-parallel-size 4 --speculative-config.method mtp "
    "--speculative-config.num_speculative_tokens 1": ("take 4 devices", "has 1"),
    "torchrun --standalone --nproc_per_node=8 train.py --batch_size=12 --block_size=1024": (
        "take 8 devices", "has 1",
    ),
    "deepspeed --num_gpus 8 src/train.py --stage sft --model_name_or_path Qwen/Qwen3-8B "
    "--finetuning_type full --cutoff_len 10000": ("take 8 devices", "has 1"),
    "trtllm-serve Qwen/Qwen3-8B --tp_size 8": ("take 8 devices", "has 1"),
    "mlx_lm.server --model mlx-community/Qwen3-32B-4bit": ("Nothing fits on", "GiB"),
    "python -m sglang.bench_serving --backend sglang --model acme/tiny --num-prompts 5 "
    "--random-input-len 64 --random-output-len 16": ("SGLang", "“Automatic”"),
}  # fmt: skip


def sent(user, path: str, body: dict) -> dict:
    """Return the API's answer to a POST."""
    return (
        client_of(user).post(f"/api/v1/plans/{path}", json.dumps(body), "application/json").json()
    )


def pasted(alice, host, text: str) -> tuple[dict, dict]:
    """Paste a text for a host and start what it says: the draft, and the answer to the launch."""
    made = sent(alice, "import", {"text": text, "host": host.slug})
    launch = made["launch"] or {"run": "job"}
    return made, sent(alice, f"{made['plan']['id']}/launch", launch)


def plan_of(made: dict) -> Plan:
    return Plan.objects.get(pk=made["plan"]["id"])


def test_a_line_of_a_model_that_the_host_holds_becomes_its_job(alice, host, own_hub):
    for text, model in RUNS.items():
        _, answer = pasted(alice, host, text)
        assert "job" in answer, (text, answer)
        spec = Job.objects.get(pk=answer["job"]["id"]).spec
        assert model.items() <= spec["model"].items(), text


def test_another_line_is_refused_by_what_the_host_or_the_text_lacks(alice, host, own_hub):
    for text, said in REFUSED.items():
        _, answer = pasted(alice, host, text)
        for words in said:
            assert words.lower() in answer["detail"].lower(), (text, words, answer["detail"])
    assert not Job.objects.exists()


def test_what_a_text_leaves_open_is_settled_by_the_host_and_said(alice, host, own_hub):
    text = next(each for each in RUNS if each.startswith("base_model"))
    made, _ = pasted(alice, host, text)
    document, notes = plan_of(made).document, " ".join(made["plan"]["notes"])
    assert document.workload.global_batch_size == 4
    assert document.pins.zero_stage is None
    for words in ("global batch of 4", "pins.zero_stage = 3"):
        assert words in notes, (words, notes)

    text = "llama-server -hf unsloth/gpt-oss-20b-GGUF --n-cpu-moe 12"
    made = sent(alice, "import", {"text": text, "host": host.slug})
    assert plan_of(made).document.pins.offload is None
    assert any("computes already" in each for each in made["plan"]["notes"])

    made, _ = pasted(alice, host, "vllm serve acme/tiny --max-model-len 512")
    work = plan_of(made).document.workload
    assert (work.input_tokens, work.output_tokens, work.max_request_tokens) == (410, 102, 512)


def test_a_model_that_is_chosen_ends_the_refusal_of_a_text_without_one(alice, host, own_hub):
    made, answer = pasted(alice, host, "python -m vllm.entrypoints.openai.api_server --seed 1")
    assert "names no model" in answer["detail"]
    change = {"model": "acme/tiny", "hardware": {"engine": None}}
    path = f"/api/v1/plans/{made['plan']['id']}"
    client_of(alice).patch(path, json.dumps(change), "application/json")
    answer = sent(alice, f"{made['plan']['id']}/launch?dry_run=true", {"run": "endpoint"})
    assert "job" in answer, answer


def test_engine_flags_that_no_plan_has_go_with_the_launch(alice, host, own_hub):
    flags = "-ub 256 --jinja --reasoning-format none"
    made, answer = pasted(
        alice, host, f"llama-server -hf {GGUF} {flags} --port 80 -ctk q8_0 -ctv q8_0"
    )
    assert sorted(made["launch"]["engine_args"]) == sorted(flags.split())
    for words in ("-ub 256", "--jinja", "--cache-type-k q8_0 --cache-type-v q8_0"):
        assert words in answer["command"], answer
    assert "--port 80" not in answer["command"]


def test_a_pasted_rotary_scaling_stretches_the_plan_and_its_endpoint(alice, host, own_hub):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    line = f"vllm serve acme/tiny --max-model-len 4096 --rope-scaling '{json.dumps(yarn)}'"
    made, answer = pasted(alice, host, line)
    assert "model.rope_scaling.rope_theta" in answer["detail"]

    made, answer = pasted(alice, host, f"{line} --rope-theta 10000")
    work = plan_of(made).document.workload
    assert (work.input_tokens + work.output_tokens, work.max_request_tokens) == (1280, 4096)
    spec = Job.objects.get(pk=answer["job"]["id"]).spec
    flag, value = spec["engine_args"][-2:]
    assert (flag, json.loads(value)) == (
        "--hf-overrides", {"rope_parameters": {"rope_theta": 10000.0, **yarn}},
    )  # fmt: skip
    assert spec["max_length"] == 4096

    line = f"llama-server -hf {GGUF} -c 4096 -np 1 --rope-scaling yarn --rope-scale 8"
    _, answer = pasted(alice, host, line)
    assert "--rope-scaling yarn --rope-scale 8" in answer["command"], answer


def test_a_pasted_load_test_sends_what_the_text_sends(alice, host, own_hub):
    line = "vllm bench serve --model acme/tiny --input-len 200 --output-len 50"
    for arrivals, point, options in (
        ("open", 4.0, "--request-rate 4"),
        ("closed", 3.0, "--max-concurrency 3"),
        ("burst", 20.0, "--num-prompts 20"),
    ):
        made, answer = pasted(alice, host, f"{line} {options}")
        assert made["launch"]["run"] == "load", options
        sent = Job.objects.get(pk=answer["job"]["id"]).spec["load"]["arrivals"]
        assert sent["kind"] == arrivals, options
        assert [point] in sent.values(), sent
        assert any("load test sends" in each for each in made["plan"]["notes"]) == (
            arrivals != "closed"
        )


def test_a_pasted_grpo_counts_prompts_and_has_rewards_that_jobs_have(alice, host, own_hub):
    for options, prompts, rewards, said in (
        ("", 2, "think_format", "batch of 2 prompts"),
        (" my.reward", 2, "think_format", "jobs do not have: my.reward"),
    ):
        made, _ = pasted(alice, host, f"{GRPO}{options}")
        work = plan_of(made).document.workload
        assert (work.objective, work.num_generations) == ("grpo", 4), options
        assert (work.global_batch_size, work.reward_function) == (prompts, rewards), options
        assert said in " ".join(made["plan"]["notes"]), made["plan"]["notes"]
    made, _ = pasted(
        alice, host, f"accelerate launch --num_processes 1 {GRPO.partition(' --reward')[0]}"
    )
    work = plan_of(made).document.workload
    assert (work.global_batch_size, work.reward_function) == (2, "exact_match")
    assert "names no reward function" in " ".join(made["plan"]["notes"])
