"""Reward functions: what they return, what ends their process, and how a document names them."""

import pytest
from pydantic import ValidationError

from runners.jobs.runtime import BadInputError
from runners.jobs.train.trl.reward_worker import _last_number
from runners.jobs.train.trl.rewards import RewardProcess
from runners.jobspec import FileData, FolderModel, TrainSpec
from runners.jobspec.rewards import parse_rewards
from runners.launchers.launch import LaunchRefusedError, refuse_unlisted_tracker, render_argv
from runners.plans.workloads import FinetuneWork

FILE = """
import os, time
def brevity(completions, **_): print("said"); return [-len(each) for each in completions]
def judged(prompts, completions, completion_ids, answer, level=None, **_):
    return [len(ids) + (answer[0] == completion) for ids, completion in zip(completion_ids, completions)]
def abstains(completions, **_): return [None, 1]
def nan(completions, **_): return [0.0, float("nan")]
def one(completions, **_): return [1]
def text(completions, **_): return ["good", "bad"]
def raises(completions, **_): return [each["score"] for each in completions]
def exits(completions, **_): raise SystemExit(4)
def crashes(completions, **_): os.kill(os.getpid(), 11)
def hangs(completions, **_): time.sleep(60)
def hungry(completions, **_): return [len(bytearray(10**10))]
def secret(completions, **_): return [float(name in os.environ) for name in ("HF_TOKEN", "PATH")]
"""


@pytest.fixture
def rewards_of(tmp_path, monkeypatch):
    """Score two completions by functions of a file, or built-in ones."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setenv("HF_TOKEN", "hf_x")

    def score(text: str, completions=("so 1,024.0", "7"), record='{"answer": "#### 1024"}'):
        named = parse_rewards(text.replace("mine.py", f"{tmp_path}/mine.py"))
        process = RewardProcess(named, tmp_path / "s", timeout_seconds=1.0, memory_gib=1.0)
        try:
            return [
                function(
                    prompts=["p", "p"],
                    completions=list(completions),
                    completion_ids=[[1, 2], [3]],
                    record=[record] * 2,
                    trainer_state=None,
                )
                for function in process.functions
            ]
        finally:
            process.close()

    return score


def test_functions_score_by_what_they_are_given_and_see_no_secret(rewards_of):
    answers = [[{"role": "assistant", "content": each}] for each in ("<think>a</think> b", "b")]
    for text, expected in [
        ("last_number", [[1.0, 0.0]]),
        ("mine.py:brevity 0.5\nmine.py:judged", [[-10.0, -1.0], [2.0, 1.0]]),
        ("exact_match\nmine.py:abstains", [[0.0, 0.0], [None, 1.0]]),
        ("mine.py:secret", [[0.0, 1.0]]),
    ]:
        assert rewards_of(text) == expected, text
    for answer, number in [
        ("3-5", 5), ("it is -5", -5), ("(-1,234.5)", -1234.5), ("1,2,3", 3), ("12,345,678", 12345678),
        ("in 2020,2021", 2021), ("1,2345", 2345), ("7.", 7), ("none", None),
    ]:  # fmt: skip
        assert _last_number(answer) == number, answer
    assert rewards_of("think_format", answers) == [[1.0, 0.0]]
    assert rewards_of("exact_match", (" a  b\n", "a"), '{"solution": "a b"}') == [[1.0, 0.0]]


def test_what_a_function_does_wrong_is_said_by_its_name(rewards_of):
    for name, said in [
        ("mine.py:nan", "nan: it returned nan for completion 2; a reward is finite"),
        ("mine.py:one", "one: it returned 1 rewards for 2 completions"),
        ("mine.py:text", "text: ValueError: could not convert"),
        ("mine.py:raises", "raises: TypeError: .*, line 10 of mine.py"),
        ("mine.py:exits", "exits: SystemExit: 4"),
        ("mine.py:crashes", r"\(crashes\) ended with SIGSEGV"),
        ("mine.py:hangs", "took more than 1 s to score 2 completions; .*reward_timeout_seconds"),
        ("mine.py:hungry", "hungry: it needs more memory than reward_memory_gib allows"),
        ("mine.py:abstains", "abstains: it returned None for completion 1, and no other"),
        ("mine.py:absent", "absent: it has no function absent; it defines os, time, brevity"),
        ("other/mine.py", "reward: FileNotFoundError"),
    ]:
        with pytest.raises(BadInputError, match=said):
            rewards_of(name)
    with pytest.raises(BadInputError, match="exact_match: it compares with “answer”"):
        rewards_of("exact_match", record="{}")


GRPO = {
    "engine": "trl",
    "objective": "grpo",
    "model": FolderModel(path="m"),
    "data": FileData(path="a.jsonl"),
    "micro_batch_size": 8,
    "reward_functions": parse_rewards("exact_match"),
    "sequence_length": 512,
}


def test_a_tracker_has_an_environment_beside_the_trainers_and_an_address_only_with_a_server(
    tmp_path,
):
    tracked = TrainSpec(**GRPO, tracker={"name": "mlflow", "url": "https://m.example.org"})
    assert render_argv(tracked, tmp_path)[3:5] == ["trl,mlflow", "runners.jobs.train"]
    own = TrainSpec(tracker={"name": "tensorboard"})
    assert render_argv(own, tmp_path)[3:5] == ["main,tensorboard", "runners.jobs.train"]
    for tracker, problem in [
        ({"name": "tensorboard", "url": "https://m.example.org"}, "no server; leave url out"),
        ({"name": "mlflow", "url": "file:///etc"}, "should match pattern"),
        ({"name": "neptune"}, "'tensorboard', 'mlflow', 'wandb' or 'trackio'"),
        *(
            ({"name": "tensorboard", field: name}, "is no name of a project or run")
            for field in ("project", "run_name")
            for name in ("/etc/cron.d", "..", "../../x", "a/../../b", ".hidden", "a\0", "a\\b")
        ),
        ({"name": "mlflow", "url": "https://u:p@m.example.org"}, "team's secret MLFLOW_TRACKING"),
        ({"name": "mlflow", "url": "https://m.example.org:x"}, "url is no address: Port"),
        ({"name": "mlflow", "url": "https://?a"}, "which names no host"),
    ]:
        with pytest.raises(ValidationError, match=problem):
            TrainSpec(tracker=tracker)


def test_a_secret_goes_only_encrypted_and_only_to_addresses_that_the_operator_listed():
    def spec(url, secrets=("MLFLOW_TRACKING_TOKEN",)):
        return TrainSpec(tracker={"name": "mlflow", "url": url}, secrets=secrets)

    listed = ("https://m.example.org/", "http://127.0.0.1:5000")
    for url in ("https://m.example.org", "http://127.0.0.1:5000/"):
        refuse_unlisted_tracker(spec(url), listed)
        with pytest.raises(LaunchRefusedError, match=r'"tracker_urls" in config\.json') as refusal:
            refuse_unlisted_tracker(spec(url), ["https://m.example.org.evil.net"])
        assert f"MLFLOW_TRACKING_TOKEN would go to {url}, " in str(refusal.value)
    for url in ("http://m.example.org", "http://127.0.0.1.evil.net", "http://localhost.evil.net"):
        refuse_unlisted_tracker(spec(url, ()), ())  # no secret goes there
        with pytest.raises(
            ValidationError, match="would travel unencrypted; give an address with"
        ):
            spec(url)
    refuse_unlisted_tracker(spec(""), ())  # files


def test_a_spec_and_a_document_that_cannot_be_rewarded_are_refused_with_the_way_out():
    for changes, said in [
        ({"reward_functions": ()}, "reward_functions is empty"),
        ({"reward_functions": parse_rewards("exact_match 0")}, "every weight is 0"),
        (
            {"reward_functions": [{"path": f"{each}.py", "function": "f"} for each in "ab"]},
            "two reward functions have the name f",
        ),
        ({"micro_batch_size": 6}, "a step has 6 answers .* no multiple of num_generations, 8"),
        ({"max_completion_length": 512}, "sequence_length 512 leaves no token for a prompt"),
        ({"max_prompt_length": 300}, "max_prompt_length is 300, and sequence_length leaves 256"),
        ({"objective": "dpo", "num_generations": 4}, "num_generations is no option"),
        ({"objective": "dpo", "beta": 0.0, "reward_functions": ()}, "beta is 0, with which DPO"),
        ({"data": FileData(path="a.jsonl", format="chat")}, "GRPO learns from records of prompt"),
    ]:
        with pytest.raises(ValidationError, match=said):
            TrainSpec(**(GRPO | changes))
    with pytest.raises(ValidationError, match=r"data\.format is prompt, which has no answers"):
        TrainSpec(data=FileData(path="a.jsonl", format="prompt"))
    spec = TrainSpec(**GRPO)
    assert (spec.beta, spec.longest_prompt, spec.prompts_per_step) == (0.0, 256, 1)
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec

    for text, said in [
        ("", "GRPO learns from rewards. Name a function"),
        ("length", "length is no built-in reward function"),
        ("a.py:f x", "'x', the weight of a.py:f, is no number"),
        ("a.py:f-g", "should match pattern"),
        ("../a.py", "may not contain “..”"),
        ("a.py:f\nb.py:f", "two reward functions have the name f"),
        ("a.py:f 1 2", "is no function and its weight"),
        ("\n".join(f"a.py:f{at}" for at in range(9)), "there are 9 reward functions; give 8"),
    ]:
        with pytest.raises(ValidationError, match=said):
            FinetuneWork(objective="grpo", reward_function=text)
    work = FinetuneWork(objective="grpo", reward_function="r/a.py 0.5\n\nlast_number")
    assert [(each.path, each.function, each.weight) for each in work.reward_functions] == [
        ("r/a.py", "reward", 0.5),
        ("", "last_number", 1.0),
    ]
