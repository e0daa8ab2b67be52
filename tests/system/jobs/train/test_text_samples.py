"""Samples are what the weights of their step write, in every layout, and no step notices them."""

import pytest
import torch

from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.train import job as train
from runners.jobs.train.evaluator import continuation_tokens
from runners.jobspec.base import TextSamples
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.test_mixture import (  # noqa: F401 -- some are fixtures
    far,
    found,
)
from tests.system.jobs.train.sampled import CASES, DROPS, EVERY, LOCAL, STEPS


def test_a_job_leaves_what_its_published_weights_write(host):
    asked = TextSamples(every_steps=8, max_tokens=6, prompts=("import os", "<b>&\n"))
    ran = host.run_here("writes", tiny_training(max_steps=24, text_samples=asked), train.work)
    announced = [each for each in ran.bodies("artefact") if each["name"] == "samples"]
    facts = announced[-1]["facts"]["samples"]

    assert [each["kind"] for each in announced] == ["report"] * 3  # steps 8 and 16, and the end
    assert [each["step"] for each in facts[:4]] == [8, 8, 16, 16]
    assert [each["is_final"] for each in facts] == [False] * 4 + [True] * 2
    assert facts[4]["step"] == ran.measured["exported_step"]
    folder = ran.folder / "output" / "model"
    tokenizer = load_tokenizer(folder)
    published = load_folder(folder, "fp32", torch.device("cpu"))
    for said in facts[4:]:
        tokens = continuation_tokens(
            published, tokenizer(said["prompt"])["input_ids"], 6, asked, far()
        )
        assert tokenizer.decode(tokens) == said["continuation"]


@pytest.mark.equality
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same_to_the_bit_with_samples_and_validations(found, name):
    for rank in found[name]:
        plain, looked_at = rank["plain"], rank["looked at"]
        assert len(plain["losses"]) == STEPS
        assert looked_at["losses"] == plain["losses"]
        assert looked_at["draw"] == plain["draw"]  # of the generator that dropout draws from


@pytest.mark.equality
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - {DROPS, LOCAL, "experts"}))
def test_every_layout_writes_what_one_process_writes(found, name):
    alone, lead = (found[each][0]["looked at"] for each in ("alone", name))

    assert lead["samples"] == alone["samples"]
    steps = [each["step"] for each in lead["samples"] if not each["is_final"]]
    assert steps == [each for each in range(EVERY, STEPS, EVERY) for _prompt in range(2)]
    assert all(len(each["continuation"].split()) == 6 for each in lead["samples"])
    assert lead["best"]["step"] == alone["best"]["step"]
    assert lead["best"]["loss"] == pytest.approx(alone["best"]["loss"], abs=1e-5)
    assert lead["is_back"] == (lead["best"]["step"] != STEPS)
