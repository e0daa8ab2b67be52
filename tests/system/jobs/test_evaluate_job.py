"""Judging a model alone and beside its original: intervals, divergence, and a word on chance."""

import math

import numpy as np
import pytest
import torch

from runners.jobs import evaluate
from runners.jobs.evaluate import TextScores, evaluate_windows, figures, significance
from runners.jobs.evaluation import Windows
from runners.jobs.loading import load_folder
from runners.jobs.runtime import BadInputError, MissingModelError
from runners.jobspec import ArtefactModel, EvaluateSpec, RandomModel, TrainSpec
from runners.shared.messages import ResultBody
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
WINDOWS = Windows(np.zeros((3, 8), dtype=np.int64), 4)


@pytest.fixture(scope="module")
def compared(host, int4, trained_model):
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id="int4"),
        weight_dtype="int4",
        original=trained_model,
        evaluation_tokens=1024,
    )
    return host.run_here("evaluate-int4", spec, evaluate.work)


def test_the_result_has_every_figure_with_its_interval(compared):
    measured = ResultBody.model_validate(compared.bodies("result")[0]).measured

    names = ("perplexity", "next_token_accuracy", "kl_divergence_nats", "top_token_agreement")
    for name in (*names, "original_perplexity", "perplexity_ratio"):
        assert measured[f"{name}_low"] <= measured[name] <= measured[f"{name}_high"]
    assert measured["evaluation_tokens"] == 1024


def test_the_result_has_what_was_predicted_of_it(compared):
    weights = compared.measured["peak_memory_bytes"]

    assert compared.measured["duration_seconds"] > 0
    assert weights > 10 * 2**20  # an interpreter with torch at least
    assert "tasks_seconds" not in compared.measured


def test_a_quantised_model_is_near_its_original_but_diverges_from_it(compared):
    assert 0 < compared.measured["kl_divergence_nats"] < 0.1
    assert 0.8 < compared.measured["top_token_agreement"] <= 1.0


def test_the_job_agrees_with_the_compression_that_made_the_model(compared, host, int4):
    ratio = int4.measured["perplexity_ratio"]

    assert compared.measured["perplexity_ratio"] == pytest.approx(ratio, abs=0.02)
    assert "the original" in compared.bodies("result")[0]["notes"]["perplexity_ratio"] or (
        "no difference" in compared.bodies("result")[0]["notes"]["perplexity_ratio"]
    )


def test_an_original_that_is_quantised_itself_is_read_as_it_is_stored(host, int8, int4):
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id="int4"),
        weight_dtype="int4",
        original=ArtefactModel(attempt_id="int8"),
        evaluation_tokens=1024,
    )

    finished = host.run_here("evaluate-int4-by-int8", spec, evaluate.work)

    measured = finished.measured
    assert (int8.returncode, int4.returncode) == (0, 0)
    ratio = measured["perplexity"] / measured["original_perplexity"]
    assert measured["perplexity_ratio"] == pytest.approx(ratio, rel=1e-6)
    assert 0 < measured["kl_divergence_nats"] < 0.1


def test_a_model_beside_itself_has_no_divergence(host, trained):
    model = load_folder(trained.folder / "output" / "model", "bf16", CPU)
    batch = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(1))

    found = evaluate_windows(model, batch, 16, model)

    assert found.divergence == pytest.approx([0.0, 0.0], abs=1e-6)
    assert list(found.agreement) == [1.0, 1.0]
    assert list(found.nlls) == list(found.original_nlls)


def test_accuracy_and_divergence_are_those_of_the_formula(host, trained):
    model = load_folder(trained.folder / "output" / "model", "bf16", CPU)
    other = load_folder(trained.folder / "output" / "model", "fp32", CPU)
    other.lm_head.weight.data *= 1.3
    batch = torch.randint(0, 512, (1, 32), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        ours, theirs = (each(batch).logits[0, 15:-1].float() for each in (model, other))

    found = evaluate_windows(model, batch, 16, other)

    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert found.divergence[0] == pytest.approx(expected.item(), rel=1e-4)
    assert found.correct[0] == (ours.argmax(-1) == batch[0, 16:]).double().mean().item()


def test_alone_it_reports_nothing_of_an_original():
    measured = figures(TextScores(np.ones(3), np.array([0.0, 0.5, 1.0])), WINDOWS)

    assert measured["perplexity"] == pytest.approx(math.e)
    assert measured["next_token_accuracy"] == 0.5
    assert not [name for name in measured if "original" in name or "ratio" in name]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(1.01, 1.03, "worse than"), (0.9, 0.99, "better than"), (0.99, 1.02, "no difference")],
)
def test_a_difference_is_called_one_only_beyond_chance(low, high, words):
    told = significance({"perplexity_ratio_low": low, "perplexity_ratio_high": high})

    assert told.startswith(words)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model": RandomModel(config=TINY_CONFIG)}, MissingModelError, r"no tokenizer\.json"),
        (
            {"original": RandomModel(config=TINY_CONFIG)},
            BadInputError,
            "the original's vocabulary differs",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(
    host, trained_model, make_job, fields, error, message
):
    job = make_job(EvaluateSpec(**{"model": trained_model} | fields))

    with pytest.raises(error, match=message):
        evaluate.work(job)


def test_another_kind_is_refused(make_job):
    with pytest.raises(BadInputError, match="kind 'train' is not 'evaluate'"):
        evaluate.work(make_job(TrainSpec()))
