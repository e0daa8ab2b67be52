"""Figures of tasks held to their formulas, and changes called changes only beyond chance."""

import math

import numpy as np
import pytest

from runners.jobs.tasks.scores import Score, change, figures, notes, weighted_mean

RIGHT = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
WRONG = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])


def accuracy(values) -> Score:
    ones = np.ones(len(values))
    return Score("t", "acc", float(values.mean()), "mean", True, len(values), values, ones)


def perplexity(sums, weights) -> Score:
    value = math.exp(-sums.sum() / weights.sum())
    return Score("t", "ppl", value, "weighted_perplexity", False, len(sums), sums, weights)


def test_the_error_of_a_mean_is_the_sample_deviation_over_the_root_of_the_number():
    mean, error = weighted_mean(RIGHT, np.ones(6))

    assert mean == pytest.approx(4 / 6)
    assert error == pytest.approx(RIGHT.std(ddof=1) / math.sqrt(6))
    assert accuracy(RIGHT).stderr == pytest.approx(error)


def test_the_error_of_a_perplexity_is_near_that_of_drawing_the_documents_anew():
    chance = np.random.default_rng(3)
    weights = chance.integers(50, 150, 400).astype(float)
    sums = -weights * chance.normal(1.2, 0.3, 400)
    picks = chance.integers(0, 400, (2000, 400))
    drawn = np.exp(-sums[picks].sum(axis=1) / weights[picks].sum(axis=1))

    assert perplexity(sums, weights).stderr == pytest.approx(drawn.std(), rel=0.1)


def test_a_change_pairs_the_documents():
    scale, middle, low, high = change(accuracy(RIGHT), accuracy(WRONG))

    differences = RIGHT - WRONG
    spread = 1.96 * differences.std(ddof=1) / math.sqrt(6)
    assert (scale, middle) == ("difference", pytest.approx(differences.mean()))
    assert (low, high) == pytest.approx((middle - spread, middle + spread))


def test_a_perplexity_changes_by_a_factor():
    weights = np.array([10.0, 20.0, 30.0])
    before, after = perplexity(-weights, weights), perplexity(-1.5 * weights, weights)

    assert change(after, before) == ("ratio", *[pytest.approx(math.exp(0.5))] * 3)
    told = notes([after], [before])["t/ppl_ratio"]
    assert told.startswith("worse than the original beyond chance")


@pytest.mark.parametrize(
    ("better", "words"),
    [(40, "better than the original beyond chance"), (1, "no difference that")],
)
def test_a_difference_is_one_only_beyond_chance(better, words):
    before = np.zeros(100)
    after = before.copy()
    after[:better] = 1.0

    assert notes([accuracy(after)], [accuracy(before)])["t/acc_difference"].startswith(words)


def test_a_figure_of_another_kind_has_a_value_and_no_error():
    score = Score("t", "f1", 0.4, "another", True, 9, RIGHT, np.ones(6))

    assert figures([score], [score]) == {"t/f1": 0.4, "original_t/f1": 0.4}
    assert "no standard error" in notes([score], [score])["t/f1"]


def test_alone_a_model_has_figures_and_no_change():
    assert set(figures([accuracy(RIGHT)], [])) == {"t/acc", "t/acc_stderr"}
