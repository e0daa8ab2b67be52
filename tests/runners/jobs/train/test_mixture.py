"""Weights of sources that move by the published rule, and text that weights write on the way."""

import json
import math
import time

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from runners.jobs.corpus import updated_weights
from runners.jobs.loading import fresh_model
from runners.jobs.ranks import ALONE
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.evaluator import (
    FIRST_WORDS,
    TextSampler,
    continuation_tokens,
    prompts_of,
)
from runners.jobs.train.rows import BLOCK_ROWS, rows_of, windows_of
from runners.jobs.train.sources import Data, HeldOutRows, mixture_of
from runners.jobs.train.text_samples import SHOWN_STEPS
from runners.jobspec import FileData, HostText, MixedData, TrainSpec, WeightedData
from runners.jobspec.base import TextSamples
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.system.jobs.train.forked import run_script
from tests.system.jobs.train.laid_out import spec_of
from tests.system.jobs.train.mixed import MIXED, PADDED, STEPS, mixture, run_case
from tests.system.jobs.train.sampled import CASES, word_tokenizer

ROWS_A_STEP = 8


def test_weights_follow_the_published_rule_however_high_a_loss_is():
    behind = [0.5, -1.0, 0.25]
    found = updated_weights([0.2, 0.3, 0.5], behind)
    grown = [0.2 * math.exp(0.5), 0.3, 0.5 * math.exp(0.25)]
    assert found == pytest.approx([each / sum(grown) for each in grown])
    assert updated_weights([0.2, 0.3, 0.5], [-1.0, 0.0, -2.0]) == pytest.approx([0.2, 0.3, 0.5])

    for behind in ([2000.0, 0.0], [math.inf, 0.0], [0.0, math.nan]):
        found = updated_weights([0.25, 0.75], behind)
        assert sum(found) == pytest.approx(1.0), behind
        assert found == ([1.0, 0.0] if behind[0] == 2000.0 else [0.25, 0.75]), behind


def drawn_of(batches, steps):
    """Return the first numbers of the rows of each source; the second source's are above 999."""
    rows = [row for step in steps for row in batches.micro_batch(step, 0).input_ids.tolist()]
    return [tuple(row) for row in rows]


def test_from_its_row_on_a_set_of_weights_holds_and_no_row_is_lost_or_told_twice():
    spec = spec_of(
        None, data=MIXED, samples=PADDED, max_steps=STEPS, gradient_accumulation_steps=1
    )
    fixed, moved = mixture(spec)[0], mixture(spec)[0]
    even = {tuple(row) for row in np.lib.stride_tricks.sliding_window_view(
        np.tile(np.arange(24) * 5, 4), 16).tolist()}  # fmt: skip

    moved.follow([(20.0, 0.25, 0.75), (60.0, 1.0, 0.0)])
    before, after = (drawn_of(each, range(600)) for each in (fixed, moved))

    assert after[:20] == before[:20]
    noise = [[row for row in rows if row not in even] for rows in (before, after)]
    fewer = min(map(len, noise))
    assert noise[0][:fewer] == noise[1][:fewer]  # in the source's own order, whoever draws
    assert len([row for row in after[20:60] if row not in even]) > 20
    last = [row for row in after[60 : 60 + BLOCK_ROWS] if row not in even]
    assert len(last) == 1  # one row of a block stays to each
    moved.follow([(0.0, 0.0, 1.0)])  # and those that hold from the first row on hold at once
    assert len([row for row in drawn_of(moved, range(100)) if row in even]) <= 1


def test_moves_begin_with_the_references_that_were_not_given():
    spec = spec_of(None, data=MIXED, samples=PADDED, max_steps=STEPS)
    state, mixed = TrainState(), mixture(spec)[1]

    first = mixed.move(state, [5.0, 4.5])
    state.step = 2
    mixed.move(state, [6.0, 4.0])

    assert state.mixture_reference == (5.0, 4.0)
    weight = 0.25 * math.exp(0.5) / (0.75 + 0.25 * math.exp(0.5))
    assert first["source2_weight"] == pytest.approx(weight)
    assert (first["source1_reference"], first["source2_loss"]) == (5.0, 4.5)
    assert [each[0] for each in state.mixture] == [0.0, 2.0 * ROWS_A_STEP]
    back = (1 - weight) * math.e
    assert state.mixture[1][1] == pytest.approx(back / (back + weight))
    assert not mixed.is_due(state)  # this step's are in force already


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mixture")


@pytest.fixture(scope="module")
def unbroken(folder):
    return run_case(None, ALONE, folder / "alone")


def test_more_is_drawn_of_what_is_behind_and_the_rest_is_learnt(unbroken):
    first, *_, last = unbroken["history"]
    assert [each[0] for each in unbroken["history"]] == [0.0, 16.0, 32.0]
    assert 0.25 < first[2] < last[2]
    assert last[1] + last[2] == pytest.approx(1.0)
    assert len(unbroken["losses"]) == STEPS


def test_a_training_that_was_stopped_goes_on_bit_by_bit(folder, unbroken):
    for stop_at in range(1, STEPS):
        broken_off = run_case(None, ALONE, folder / f"stop {stop_at}", stop_at)
        resumed = run_case(None, ALONE, folder / f"stop {stop_at}")
        assert [*broken_off["losses"], *resumed["losses"]] == unbroken["losses"], stop_at
        assert resumed["history"] == unbroken["history"], stop_at
        assert resumed["reference"] == unbroken["reference"], stop_at
        assert broken_off["rows"] | resumed["rows"] == unbroken["rows"], stop_at


@pytest.fixture(scope="module", autouse=True)
def files(host):
    folder = host.path / "models" / "mixture"
    folder.mkdir()
    text = "".join(f"Number {n} is followed by {n + 1}.\n" * 80 + "\n" for n in range(40))
    (folder / "numbers.txt").write_text(text)


def two_sources(name, **changes):
    parts = (HostText(), FileData(path=f"mixture/{name}"))
    fields = {"weights": "dynamic", "update_every_steps": 10, **changes}
    references = fields.pop("references", (None, 2.0))
    weighted = (
        WeightedData(data=each, weight=1.0, reference_loss=reference)
        for each, reference in zip(parts, references, strict=True)
    )
    return MixedData(parts=tuple(weighted), **fields)


def test_a_source_that_nothing_judges_is_refused_by_name():
    spec = spec_of(None, data=MIXED, samples=PADDED, max_steps=STEPS)
    documents, pieces = windows_of(np.arange(40, dtype=np.int32), 16)
    none = pieces._replace(begins=pieces.begins[:0], lengths=pieces.lengths[:0])
    some, empty = (HeldOutRows([rows_of(documents, each, 16, PADDED)]) for each in (pieces, none))
    data = Data(mixture(spec)[0], by_source=[("own", some), ("asked.jsonl", empty)])
    with pytest.raises(BadInputError, match=r"asked\.jsonl: .* sequence_length, which is 16"):
        mixture_of(data, spec)


def test_what_cannot_be_followed_is_refused_by_its_field():
    for changes, said in (
        ({"weights": "fixed"}, "parts.1.reference_loss is 2 and weights is fixed"),
        ({"update_every_steps": 0}, "update_every_steps\n.*greater than 0"),
        ({"references": (None, -1.0)}, "reference_loss\n.*greater than or equal to 0"),
        ({"references": (None, 30.0)}, "reference_loss\n.*less than or equal to 20"),
    ):
        with refused(ValidationError, said, (changes, said)):
            two_sources("numbers.txt", **changes)


# Samples are what the weights of their step write, in every layout, and no step notices them.

GREEDY = TextSamples(every_steps=5, prompts=("w1 w2",), max_tokens=8)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return fresh_model(TINY_CONFIG, torch.float32)


def far() -> float:
    return time.monotonic() + 600.0


def test_greedy_tokens_are_those_of_generation_until_an_end_or_a_deadline(model):
    prompt = [5, 9, 12]
    found = continuation_tokens(model, prompt, 10, GREEDY, far())
    given = torch.tensor([prompt])
    expected = model.generate(given, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert found == expected[0, len(prompt) :].tolist()

    found = continuation_tokens(model, [5, 9, 12], 10, GREEDY, far())
    model.config.eos_token_id = found[4]
    assert (
        continuation_tokens(model, [5, 9, 12], 10, GREEDY, far()) == found[: found.index(found[4])]
    )
    assert continuation_tokens(model, [5], 10, GREEDY, time.monotonic() - 1.0) == []
    assert continuation_tokens(model, [5], 0, GREEDY, far()) == []


def test_draws_are_seeded_and_leave_every_generator_and_mode_alone(model):
    drawn = TextSamples(temperature=1.0, seed=4)
    model.train()
    model.model.layers[0].eval()
    torch.manual_seed(1)
    first = continuation_tokens(model, [1], 12, drawn, far())
    after = torch.rand(3)
    torch.manual_seed(1)

    assert torch.equal(after, torch.rand(3))
    assert first == continuation_tokens(model, [1], 12, drawn, far())
    assert first != continuation_tokens(
        model, [1], 12, drawn.model_copy(update={"seed": 5}), far()
    )
    modes = [each.training for each in model.model.layers]
    assert (model.training, modes) == (True, [False, True])
    assert all(each.grad is None and each.requires_grad for each in model.parameters())


def test_without_prompts_the_first_words_of_held_out_text_are_continued():
    held_out = np.arange(100, dtype=np.int32)
    assert prompts_of(TextSamples(), word_tokenizer(), None, held_out) == [
        list(range(FIRST_WORDS))
    ]
    assert prompts_of(GREEDY, word_tokenizer(), None, held_out) == [[1, 2]]


def test_what_cannot_be_written_is_refused_by_its_field():
    for fields, field in (
        ({"every_steps": 0}, "every_steps"),
        ({"prompts": ("a", "b", "c", "d")}, "prompts"),
        ({"prompts": ("  ",)}, "prompts"),
        ({"prompts": ("x" * 501,)}, "prompts"),
        ({"max_tokens": 257}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
    ):
        with refused(ValidationError, field, (fields, field)):
            TextSamples(**fields)

    with pytest.raises(ValidationError, match="text_samples is for models that predict text"):
        TrainSpec(objective="classification", text_samples=TextSamples(), model={
            "source": "random", "config": {}})  # fmt: skip


def test_the_first_step_and_the_newest_stay_and_a_restart_writes_a_step_anew(make_job, model):
    job = make_job(tiny_training())
    made = TextSampler(job, GREEDY, word_tokenizer(512), [[1, 2]], 64)
    assert [step for step in range(1, 12) if made.is_due(step)] == [5, 10]
    for step in range(5, 65, 5):
        made.take(model, step)
    again = TextSampler(job, GREEDY, word_tokenizer(512), [[1, 2]], 64)
    assert again.report.taken == made.report.taken
    again.take(model, 60)
    again.take(model, 40, is_final=True)

    steps = [each.step for each in again.report.taken]
    assert steps == [5, *range(30, 65, 5), 40]
    assert len(set(steps)) == SHOWN_STEPS
    assert again.report.taken[-1].is_final
    written = json.loads((job.output_dir("samples") / "samples.json").read_text())
    assert [each["step"] for each in written["samples"]] == steps
    assert (
        written["how"]
        == "at most 8 tokens, the likeliest token each time, by the weights after the step"
    )


def test_a_prompt_longer_than_the_model_reads_keeps_its_end(make_job, model):
    made = TextSampler(make_job(tiny_training()), GREEDY, word_tokenizer(512), [range(100)], 64)
    made.take(model, 5)
    (found,) = made.report.taken
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
