"""What the command line prints of a plan."""

from planner.api import plan
from planner.specs.estimate import PlanRequest
from runners.cli.report import print_plan

WORK = {
    "kind": "train", "objective": "grpo", "sequence_length": 4096, "global_batch_size": 512,
    "max_completion_length": 3072, "max_prompt_length": 1024, "generator": "separate",
}  # fmt: skip


def printed(capsys, **work):
    cluster = {"device": "h100-sxm-80gb", "nodes": 2, "devices_per_node": 8}
    request = {"model": "Qwen/Qwen3-8B", "cluster": cluster, "workload": {**WORK, **work}}
    answer = plan(PlanRequest.model_validate(request))
    print_plan(answer)
    return answer.plans[0].strategy.rollout, " ".join(capsys.readouterr().out.split())


def test_a_plan_of_grpo_says_where_it_generates_who_waits_and_which_lengths_it_assumes(capsys):
    rollout, text = printed(capsys)
    assert f"{rollout.devices} devices generate (vllm" in text
    assert "Generating devices wait" in text
    assert "Training devices wait" in text
    assert (
        "completions of up to 3,072 tokens: all have the longest (mean_completion_length" in text
    )
    assert "prompts of up to 1,024 tokens: all have the longest (mean_prompt_length" in text
    assert "8 completions of each prompt" in text
    _, text = printed(capsys, mean_completion_length=900)
    assert "completions of up to 3,072 tokens: 900 in the mean" in text
