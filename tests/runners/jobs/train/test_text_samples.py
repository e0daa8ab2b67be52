"""Samples are what the weights of their step write, in every layout, and no step notices them."""

import json
import time

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from runners.jobs.loading import fresh_model
from runners.jobs.train.evaluator import FIRST_WORDS, SHOWN_STEPS, Sampler, continued, prompts_of
from runners.jobspec import TrainSpec
from runners.jobspec.base import TextSamples
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.sampled import CASES, word_tokenizer

GREEDY = TextSamples(every_steps=5, prompts=("w1 w2",), max_tokens=8)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return fresh_model(TINY_CONFIG, torch.float32)


def far() -> float:
    return time.monotonic() + 600.0


def test_greedy_tokens_are_those_of_the_librarys_own_generation(model):
    prompt = [5, 9, 12]

    found = continued(model, prompt, 10, GREEDY, far())

    given = torch.tensor([prompt])
    expected = model.generate(given, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert found == expected[0, len(prompt) :].tolist()


def test_draws_are_seeded_and_leave_every_generator_and_mode_alone(model):
    drawn = TextSamples(temperature=1.0, seed=4)
    model.train()
    model.model.layers[0].eval()
    torch.manual_seed(1)
    first = continued(model, [1], 12, drawn, far())
    after = torch.rand(3)
    torch.manual_seed(1)

    assert torch.equal(after, torch.rand(3))
    assert first == continued(model, [1], 12, drawn, far())
    assert first != continued(model, [1], 12, drawn.model_copy(update={"seed": 5}), far())
    modes = [each.training for each in model.model.layers]
    assert (model.training, modes) == (True, [False, True])
    assert all(each.grad is None and each.requires_grad for each in model.parameters())


def test_an_end_of_text_and_a_deadline_end_a_continuation(model):
    found = continued(model, [5, 9, 12], 10, GREEDY, far())
    model.config.eos_token_id = found[4]

    assert continued(model, [5, 9, 12], 10, GREEDY, far()) == found[: found.index(found[4])]
    assert continued(model, [5], 10, GREEDY, time.monotonic() - 1.0) == []
    assert continued(model, [5], 0, GREEDY, far()) == []


def test_without_prompts_the_first_words_of_held_out_text_are_continued():
    held_out = np.arange(100, dtype=np.int32)

    assert prompts_of(TextSamples(), word_tokenizer(), None, held_out) == [
        list(range(FIRST_WORDS))
    ]
    assert prompts_of(GREEDY, word_tokenizer(), None, held_out) == [[1, 2]]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"prompts": ("a", "b", "c", "d")}, "prompts"),
        ({"prompts": ("  ",)}, "prompts"),
        ({"prompts": ("x" * 501,)}, "prompts"),
        ({"max_tokens": 257}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_what_cannot_be_written_is_refused_by_its_field(fields, field):
    with pytest.raises(ValidationError, match=field):
        TextSamples(**fields)


def test_a_classifier_writes_nothing():
    with pytest.raises(ValidationError, match="text_samples is for models that predict text"):
        TrainSpec(objective="classification", text_samples=TextSamples(), model={
            "source": "random", "config": {}})  # fmt: skip


def test_the_first_step_and_the_newest_stay_and_a_restart_writes_a_step_anew(make_job, model):
    job = make_job(tiny_training())
    made = Sampler(job, GREEDY, word_tokenizer(512), [[1, 2]], 64)
    assert [step for step in range(1, 12) if made.is_due(step)] == [5, 10]
    for step in range(5, 65, 5):
        made.take(model, step)
    again = Sampler(job, GREEDY, word_tokenizer(512), [[1, 2]], 64)
    assert again.taken == made.taken
    again.take(model, 60)
    again.take(model, 40, is_final=True)

    steps = [each.step for each in again.taken]
    assert steps == [5, *range(30, 65, 5), 40]
    assert len(set(steps)) == SHOWN_STEPS
    assert again.taken[-1].is_final
    written = json.loads((job.output_dir("samples") / "samples.json").read_text())
    assert [each["step"] for each in written["samples"]] == steps
    assert (
        written["how"]
        == "at most 8 tokens, the likeliest token each time, by the weights after the step"
    )


def test_a_prompt_longer_than_the_model_reads_keeps_its_end(make_job, model):
    made = Sampler(make_job(tiny_training()), GREEDY, word_tokenizer(512), [range(100)], 64)

    made.take(model, 5)

    (found,) = made.taken
    assert found.prompt.split() == [f"w{at}" for at in range(37, 100)]
    assert len(found.continuation.split()) == 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    run_script("sampled", folder, seconds=420)
    return {
        name: [json.loads(each.read_text()) for each in sorted((folder / name).glob("*.json"))]
        for name in CASES
    }
