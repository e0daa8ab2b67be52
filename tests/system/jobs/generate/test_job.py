"""The generation job on the demo model: plain greedy text, figures, kills, stops, bad input."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from runners.jobs.generate.job import work
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import (
    DemoPrompts,
    FilePrompts,
    GenerateSpec,
    InlinePrompts,
    RandomModel,
)
from tests.runners.jobs.tiny import TINY_CONFIG
from tests.system.jobs.generate.reading import outputs
from tests.system.jobs.harness import wait_until

PILE = DemoPrompts(count=7, input_tokens=24, shortest=3)
DEFAULTS = {"prompts": PILE, "batch_size": 3, "output_tokens": 12}
TEXTS = InlinePrompts(texts=("import os\n", "def", "class Path(", "    return self"))


@pytest.fixture(scope="module")
def given(generate):
    return generate("given")


def wait_for_answers(folder: Path, process: subprocess.Popen[str]) -> int:
    """Wait until the job has written down two answers; return how many there are."""
    journal = folder / "checkpoint" / "outputs.jsonl"
    wait_until(folder / "checkpoint", "outputs.jsonl", process)
    deadline = time.monotonic() + 600
    while (lines := journal.read_bytes().count(b"\n")) < 3:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return lines - 1


def plain_greedy(host, prompt: str, tokens: int) -> str:
    """What transformers' own generate writes after one prompt alone."""
    folder = host.path / "attempts" / "trained" / "output" / "model"
    model = load_folder(folder, "fp32", torch.device("cpu"))
    tokenizer = load_tokenizer(folder)
    asked = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**asked, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("batching", ["given", "sorted", "turbo"])
def test_every_policy_writes_what_plain_greedy_generation_writes(host, generate, batching):
    run = generate(f"text-{batching}", prompts=TEXTS, batching=batching)

    for line, prompt in zip(outputs(run), TEXTS.texts, strict=True):
        assert line["prompt"] == prompt
        assert line["text"] == plain_greedy(host, prompt, 12)


def test_each_line_says_how_long_it_is_and_why_it_ended(given):
    for line in outputs(given):
        assert line["finish_reason"] == ("length" if line["output_tokens"] == 12 else "stop")
        assert 3 <= line["prompt_tokens"] <= 24


def test_the_figures_have_the_names_that_the_planner_predicts(given):
    measured = given.measured

    assert measured["tokens_per_second"] > 0
    assert measured["ttft_seconds"] > 0
    assert measured["peak_memory_bytes"] > measured["parameter_bytes"]
    assert measured["output_tokens"] == sum(line["output_tokens"] for line in outputs(given))


def test_the_answers_are_announced_with_size_and_digest(given):
    (artefact,) = given.bodies("artefact")

    path = given.folder / "output" / "outputs" / "outputs.jsonl"
    assert artefact["kind"] == "report"
    assert artefact["files"] == {"outputs.jsonl": path.stat().st_size}
    assert artefact["facts"]["answered"] == 7


def test_the_measured_cost_of_a_batch_is_told(generate):
    notes = generate("turbo", batching="turbo").bodies("result")[0]["notes"]

    assert "s a batch" in notes["batching_cost"]
    assert notes["batching"].startswith("turbo: ")


def test_a_plan_of_equal_lengths_writes_exactly_what_it_says(host):
    model = RandomModel(config=TINY_CONFIG)
    pile = DemoPrompts(count=4, input_tokens=16)
    spec = GenerateSpec(
        model=model, prompts=pile, batch_size=4, output_tokens=8, stop_at_end=False
    )

    run = host.run_here("random", spec, work)

    assert run.measured["output_tokens"] == 32
    assert run.measured["decode_tokens_per_second"] * run.measured["tpot_seconds"] == (
        pytest.approx(4)
    )
    assert {len(line["output_ids"]) for line in outputs(run)} == {8}


@pytest.mark.slow
def test_prompts_that_were_answered_before_a_kill_are_not_answered_again(host, trained_model):
    spec = GenerateSpec(
        model=trained_model, prompts=PILE, batch_size=1, output_tokens=30, stop_at_end=False
    )
    folder = host.attempt("generate-killed", spec)
    process = host.start(folder)
    before = wait_for_answers(folder, process)
    process.kill()
    process.communicate()

    run = host.run_here("generate-killed", spec, work)

    again = run.measured["output_tokens"] / 30
    assert again <= 7 - before
    assert len(outputs(run)) == 7
    assert "answered before" in run.bodies("result")[-1]["notes"]["resumed"]


@pytest.mark.slow
def test_a_job_that_is_tried_again_takes_over_what_its_first_attempt_wrote(host, trained_model):
    spec = GenerateSpec(model=trained_model, prompts=PILE, output_tokens=4)
    host.attempt("first-try", spec, job_id="tried-twice")
    first = host.finish(folder := host.path / "attempts/first-try", host.start(folder))
    host.attempt("second-try", spec, job_id="tried-twice")

    second = host.finish(folder := host.path / "attempts/second-try", host.start(folder))

    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert second.measured["output_tokens"] == 0
    assert outputs(second) == outputs(first)


@pytest.mark.slow
def test_a_stopped_job_leaves_what_it_has_and_ends_by_the_signal(host, trained_model):
    pile = DemoPrompts(count=2000, input_tokens=8)
    spec = GenerateSpec(model=trained_model, prompts=pile, batch_size=2, output_tokens=50)
    folder = host.attempt("generate-stopped", spec)
    process = host.start(folder)
    wait_for_answers(folder, process)
    process.send_signal(signal.SIGTERM)

    run = host.finish(folder, process)

    assert run.returncode == -signal.SIGTERM
    assert 2 <= len(outputs(run)) < 2000
    assert run.bodies("artefact")[0]["facts"]["answered"] == len(outputs(run))
    assert not run.bodies("result")


def test_text_for_a_model_that_reads_none_is_refused(host):
    spec = GenerateSpec(model=RandomModel(config=TINY_CONFIG), prompts=TEXTS)

    with pytest.raises(MissingModelError, match=r"no tokenizer\.json.*choose the demo prompts"):
        host.run_here("no-tokenizer", spec, work)


def test_a_prompt_that_does_not_fit_the_model_is_refused(generate):
    with pytest.raises(BadInputError, match="the model knows 64 positions"):
        generate("too-long", output_tokens=60)


def test_a_prompts_file_is_worked_through(host, generate):
    (host.path / "models" / "mine.jsonl").write_text('{"id": "a", "prompt": "import"}\n')

    (line,) = outputs(generate("file", prompts=FilePrompts(path="mine.jsonl")))

    assert (line["id"], line["prompt"]) == ("a", "import")


@pytest.mark.slow
def test_a_missing_prompts_file_ends_the_job_by_name_before_a_model_is_loaded(host):
    spec = GenerateSpec(
        model=RandomModel(config=TINY_CONFIG), prompts=FilePrompts(path="none.txt")
    )

    run = host.run("no-file", spec)

    assert run.returncode == 3
    assert run.stderr.startswith("MODEL_OR_DATA_MISSING: prompts file none.txt")
    assert not run.bodies("phase")
