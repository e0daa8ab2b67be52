"""TRL's trainers as jobs: the losses of TRL's own scripts, killed and resumed, and results."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch

from runners.environments.builder import Store
from runners.jobs.corpus import Corpus, Document, demo_tokenizer
from runners.jobs.loading import fresh_model
from runners.jobs.train.tokenised_samples import DEFAULT_TEMPLATE
from runners.jobspec import ArtefactModel, EvaluateSpec, FileData, FolderModel, TrainSpec
from runners.jobspec.base import LoraOptions
from runners.jobspec.objectives import GENERATING, OBJECTIVES
from runners.shared.config import HostDir
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.environments import build_environment
from tests.system.jobs.harness import wait_until

pytestmark = pytest.mark.slow
STEPS, BATCH, LENGTH, RATE, SEED = 20, 4, 128, 1e-3, 17
SHORT = 32  # tokens of packed rows, than which some texts are longer
SCRIPT = Path(__file__).with_name("trl_script.py")
WORDS = [
    "it",
    "is",
    "said",
    "that",
    "a",
    "cat",
    "and",
    "a",
    "dog",
    "say",
    "more",
    "of",
    "it",
    "to",
    "us",
    "than",
    "we",
    "do",
    "to",
    "them",
]


def _text(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def records(name: str) -> list[dict[str, object]]:
    """Return records of an objective: texts, and messages where the pairs hold their prompt."""
    source = random.Random(3)  # noqa: S311 - of a test's texts
    made: list[dict[str, object]] = []
    for number in range(48):
        prompt, good, bad = (_text(source, source.randint(2, 9)) for _ in range(3))
        if name == "next_token":
            made.append({"messages": [_message("user", prompt), _message("assistant", good)]})
        elif name == "kto":
            made.append({"prompt": prompt, "completion": f" {good}", "label": number % 2 == 0})
        elif name in GENERATING:
            made.append({"prompt": prompt, "answer": good})
        elif name == "reward":
            question = _message("user", prompt)
            answers = (_message("assistant", each) for each in (good, bad))
            chosen, rejected = ([question, answer] for answer in answers)
            made.append({"chosen": chosen, "rejected": rejected})
        else:
            made.append({"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"})
    return made


@pytest.fixture(scope="module")
def python(host):
    """The interpreter of TRL's environment, built once; skip where no package index is reached."""
    build_environment(host.path, "trl")
    store = Store(HostDir(host.path))
    return store.python(store.pins("trl"))


@pytest.fixture(scope="module")
def model(host):
    """A random llama with a tokenizer that has a chat template and a padding token."""
    folder = host.path / "models" / "tiny-llama"
    corpus = Corpus((Document("prose", " ".join(WORDS) * 50),))
    tokenizer = demo_tokenizer(corpus, 300, host.path / "cache")
    tokenizer.chat_template = DEFAULT_TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(5)
    config = TINY_CONFIG | {"max_position_embeddings": LENGTH}
    wider = {"hidden_size": 2 * TINY_CONFIG["hidden_size"], "initializer_range": 0.1}
    shapes = {"tiny-llama": {}, "tiny-teacher": wider, "unlike-teacher": {"vocab_size": 640}}
    for name, changes in shapes.items():
        place = str(folder.parent / name)
        fresh_model(config | changes, torch.float32).save_pretrained(place)
        tokenizer.save_pretrained(place)
    for name in OBJECTIVES:
        lines = "".join(f"{json.dumps(each)}\n" for each in records(name))
        (folder.parent / f"{name}.jsonl").write_text(lines)
    (host.path / "rewards").mkdir(exist_ok=True)
    (host.path / "rewards" / "mine.py").write_text(REWARDS)
    return FolderModel(path="tiny-llama")


def training(model: FolderModel, objective: str, **changes: object) -> TrainSpec:
    fields = {
        "engine": "trl",
        "objective": objective,
        "model": model,
        "data": FileData(path=f"{objective}.jsonl"),
        "micro_batch_size": BATCH,
        "sequence_length": LENGTH,
        "learning_rate": RATE,
        "max_steps": STEPS,
        "time_budget_seconds": None,
        "compute_dtype": "fp32",
        "seed": SEED,
    }
    own = {"grpo": GRPO, "distillation": DISTILLATION}.get(objective, {})
    return TrainSpec.model_validate({**fields, **own, **changes})


def of_trl_itself(host, python: Path, objective: str, **more: object) -> list[float]:
    """Return the losses that TRL's own script has, in a process of its own."""
    given = {
        "model": str(host.path / "models" / "tiny-llama"),
        "data": str(host.path / "models" / f"{objective}.jsonl"),
        "output": str(host.path / f"script-{objective}"),
        "objective": objective,
        "steps": STEPS,
        "seed": SEED,
        "batch": BATCH,
        "learning_rate": RATE,
        "lengths": {"max_length": LENGTH},
        **more,
    }
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [python, SCRIPT, json.dumps(given)],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])["losses"]


def check_equal(name: str, ours: list[float], theirs: list[float]) -> None:
    """Print and compare the losses of two runs."""
    assert len(ours) == len(theirs) == STEPS, (name, len(ours), len(theirs))
    apart = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    print(f"{name}: {theirs[0]:.4f} .. {theirs[-1]:.4f}, apart {apart:.1e}")  # noqa: T201 - kept
    assert apart <= 1e-3, (name, ours, theirs)


USUAL = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
# Rewards of random weights: the share of even tokens, which a policy learns within 20 steps.
REWARDS = """
def even(completions, completion_ids, **columns):
    assert len(columns["answer"]) == len(completions)
    return [sum(each % 2 == 0 for each in ids) / len(ids) for ids in completion_ids]
"""
GRPO = {
    "micro_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 12,
    "learning_rate": 1e-2,
    "reward_functions": ({"path": "mine.py", "function": "even"},),
    "text_samples": {"every_steps": 10},
}
DISTILLATION = {
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 12,
    "learning_rate": 1e-2,
    "temperature": 0.9,
    "beta": 0.5,
    "teacher": FolderModel(path="tiny-teacher"),
}
METRICS = {
    "next_token": ("entropy",),
    "dpo": (*USUAL, "logps/chosen", "logps/rejected"),
    "kto": ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen"),
    "orpo": (*USUAL, "logps/chosen"),
    "reward": ("rewards/accuracies", "rewards/margins", "rewards/mean"),
    "grpo": (
        "reward",
        "reward_std",
        "rewards/even/mean",
        "entropy",
        "clip_ratio/region_mean",
        "completions/mean_length",
        "generation_seconds",
        "reward_seconds",
        "update_seconds",
    ),
    "distillation": ("entropy", "completions/mean_length", "completions/clipped_ratio"),
}


def killed_and_resumed(host, spec: TrainSpec, name: str):
    """Kill a training with SIGKILL after its fifth step, and return its resumed attempt."""
    often = spec.model_copy(update={"checkpoint_every_seconds": 1e-6, "keep_checkpoints": 2})
    folder = host.attempt(name, often)
    process = host.start(folder)
    wait_until(folder, "checkpoint/step-00000005", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return host.finish(folder, host.start(folder))


def of_trl(host, python: Path, objective: str) -> list[float]:
    """Return the losses of TRL's script with the options of ``training``."""
    if objective == "distillation":
        names = ("beta", "temperature", "max_completion_length", "gradient_accumulation_steps")
        return of_trl_itself(
            host, python, objective, batch=DISTILLATION["micro_batch_size"],
            learning_rate=DISTILLATION["learning_rate"],
            lengths={name: DISTILLATION[name] for name in names},
            teacher=str(host.path / "models" / "tiny-teacher"),
        )  # fmt: skip
    if objective != "grpo":
        return of_trl_itself(host, python, objective)
    lengths = {name: GRPO[name] for name in ("num_generations", "max_completion_length")}
    return of_trl_itself(
        host, python, objective, batch=GRPO["micro_batch_size"],
        learning_rate=GRPO["learning_rate"], lengths=lengths,
        rewards=str(host.path / "rewards" / "mine.py"),
    )  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_losses_are_those_of_trls_own_script_killed_or_not(host, python, model, objective):
    spec = training(model, objective)
    job = host.run(f"trl-{objective}", spec)

    assert job.returncode == 0, job.stderr
    check_equal(objective, job.metric("loss"), of_trl(host, python, objective))
    for name in ("grad_norm", "learning_rate", "tokens_per_second", *METRICS[objective]):
        assert job.metric(name), name
    assert min(job.metric("tokens_per_second")) > 0
    assert job.measured["steps"] == STEPS
    assert job.measured["peak_memory_bytes"] > 0
    report = json.loads((job.folder / "output" / "data" / "data.json").read_text())
    assert (report["records"], len(report["first"])) == (48, 20)
    resumed = killed_and_resumed(host, spec, f"trl-killed-{objective}")
    assert resumed.returncode == 0, resumed.stderr
    at = {body["step"]: body["values"]["loss"] for body in losses_of(resumed)}
    losses = [at[step + 1] for step in range(STEPS)]
    check_equal(f"{objective}, killed", losses, job.metric("loss"))
    assert "from the checkpoint at step" in resumed.bodies("result")[0]["notes"]["resumed"]
    assert same_weights(job.folder, resumed.folder)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_have_the_losses_of_trls_own_script(host, python, model, strategy):
    source = random.Random(7)  # noqa: S311 - of a test's texts
    texts = [json.dumps({"text": _text(source, source.randint(2, 40))}) for _ in range(48)]
    (host.path / "models" / "texts.jsonl").write_text("\n".join(texts))
    spec = training(
        model,
        "next_token",
        data=FileData(path="texts.jsonl"),
        samples={"packing_strategy": strategy},
        sequence_length=SHORT,
    )
    job = host.run(f"trl-{strategy}", spec)

    assert job.returncode == 0, job.stderr
    script = of_trl_itself(
        host,
        python,
        "next_token",
        data=str(host.path / "models" / "texts.jsonl"),
        output=str(host.path / strategy),
        lengths={"max_length": SHORT, "packing": True, "packing_strategy": strategy},
    )
    check_equal(strategy, job.metric("loss"), script)
    report = json.loads((job.folder / "output" / "data" / "data.json").read_text())
    assert report["rows"] < report["records"]
    assert report["left_out"] == 0
    assert (report["sequences_cut"] > 0) == (strategy == "bfd")
    assert f"packed by TRL's {strategy}" in job.bodies("result")[0]["notes"]["samples"]


def test_rewards_rise_and_answers_are_shown_and_a_wrong_function_ends_the_job(host, python, model):
    job = host.run("trl-rewarded", training(model, "grpo", max_steps=30))

    assert job.returncode == 0, job.stderr
    rewards = job.metric("reward")
    print(f"reward {rewards[0]:.2f} .. {rewards[-1]:.2f}")  # noqa: T201 - kept
    assert job.measured["final_reward"] > statistics.fmean(rewards[:3]) + 0.2
    shown = [body["facts"] for body in job.bodies("artefact") if body["name"] == "samples"][-1]
    assert sorted({each["step"] for each in shown["samples"]}) == [1, 10, 20, 30]
    assert all(each["note"].startswith("reward 0.") for each in shown["samples"][:4])
    wrong = host.path / "rewards" / "wrong.py"
    wrong.write_text("def even(completions, **_): return [1.0]\n")
    spec = training(model, "grpo", reward_functions=({"path": "wrong.py", "function": "even"},))
    ended = host.run("trl-wrong-rewards", spec)
    assert ended.returncode == 3
    assert "reward function even: it returned 1 rewards for 32 completions" in ended.stderr


def test_a_teacher_with_another_vocabulary_or_other_tokens_ends_the_job_by_its_name(
    host, python, model
):
    other = host.path / "models" / "renamed-teacher"
    shutil.copytree(other.parent / "tiny-teacher", other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    ids = tokens["model"]["vocab"]
    one, two = sorted(ids, key=ids.__getitem__)[-2:]
    ids[one], ids[two] = ids[two], ids[one]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    size = TINY_CONFIG["vocab_size"]
    for name, said in (
        ("unlike-teacher", f"has 640 tokens in its vocabulary (vocab_size), and tiny-llama has {size}"),
        ("renamed-teacher", "has another tokenizer than tiny-llama: 2 ids stand for other"),
    ):  # fmt: skip
        spec = training(model, "distillation", teacher=FolderModel(path=name))
        ended = host.run(f"trl-{name}", spec)
        assert (ended.returncode, said in ended.stderr) == (3, True), ended.stderr


def test_lora_has_the_losses_of_trls_own_script_and_its_model_is_evaluated(host, python, model):
    lora = LoraOptions(rank=4, alpha=8)
    job = host.run("trl-lora", training(model, "dpo", lora=lora, learning_rate=1e-2))

    assert job.returncode == 0, job.stderr
    script = of_trl_itself(host, python, "dpo", lora_rank=4, learning_rate=1e-2)
    check_equal("dpo, LoRA", job.metric("loss"), script)
    assert (job.folder / "output" / "adapter" / "adapter_model.safetensors").is_file()
    judged = host.run(
        "trl-judged",
        EvaluateSpec(
            model=ArtefactModel(attempt_id="trl-lora"), weight_dtype="fp32", evaluation_tokens=256
        ),
    )
    assert judged.returncode == 0, judged.stderr
    assert judged.measured["perplexity"] > 1


def losses_of(job):
    return [body for body in job.bodies("metric") if "loss" in body["values"]]


def same_weights(one: Path, other: Path) -> bool:
    name = "output/model/model.safetensors"
    return (one / name).read_bytes() == (other / name).read_bytes()


def test_a_stop_leaves_a_checkpoint_within_seconds_and_other_data_is_refused(host, python, model):
    spec = training(model, "dpo", max_steps=100_000, learning_rate=1e-6)
    folder = host.attempt("trl-stopped", spec)
    process = host.start(folder)
    deadline = time.monotonic() + 300
    while '"loss"' not in (folder / "events.jsonl").read_text():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=60)

    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 15
    assert list((folder / "checkpoint").glob("step-*"))

    data = host.path / "models" / "dpo.jsonl"
    text = data.read_text()
    try:
        data.write_text("".join(text.splitlines(keepends=True)[1:]))
        refused = host.finish(folder, host.start(folder))
    finally:
        data.write_text(text)
    assert refused.returncode == 3
    assert "training data (sha256" in refused.stderr
    assert "changed since the checkpoint at step" in refused.stderr


def test_a_record_of_another_objective_is_refused_by_its_line(host, python, model):
    spec = training(model, "dpo", data=FileData(path="kto.jsonl"))

    refused = host.run("trl-refused", spec)

    assert refused.returncode == 3
    said = "line 1: its fields are of the format kto, and DPO learns from preference; choose KTO"
    assert said in refused.stderr
