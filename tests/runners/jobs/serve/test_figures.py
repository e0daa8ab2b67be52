"""What an endpoint measures of itself, over its life and since it was asked last."""

import pytest

from runners.jobs.serve.figures import TTFT_BOUNDS, Figures, Histogram


def histogram(*values: float) -> Histogram:
    found = Histogram(TTFT_BOUNDS)
    for value in values:
        found.add(value)
    return found


@pytest.mark.parametrize(
    ("values", "percent", "low", "high"),
    [
        ([0.3] * 100, 95, 0.25, 0.5),
        ([0.3] * 94 + [2.0] * 6, 95, 1.0, 2.5),
        ([0.3] * 95 + [2.0] * 5, 95, 0.25, 0.5),
        ([100.0], 50, 60.0, 60.0),
    ],
)
def test_a_percentile_lies_in_the_bucket_of_its_rank(values, percent, low, high):
    assert low <= histogram(*values).percentile(percent) <= high


def test_at_a_bound_a_percentile_says_exactly_whether_so_many_stay_below_it():
    for within in range(90, 101):
        found = histogram(*[0.8] * within, *[1.2] * (100 - within))

        assert (found.percentile(95) <= 1.0) == (within >= 95)


def test_the_points_of_the_life_end_as_the_result():
    figures = Figures()
    for seconds in (0.1, 0.2, 0.9):
        figures.first_token(seconds, 10)
        figures.later_token(0.02)
    figures.step(2.0, 30, {})

    point, result = figures.since_last(1.0), figures.measured()

    assert point["answered_requests"] == 3
    assert point["ttft_mean_seconds"] == result["ttft_seconds"] == pytest.approx(0.4)
    assert point["ttft_p95_seconds"] == result["ttft_p95_seconds"]
    assert point["tpot_p95_seconds"] == result["tpot_p95_seconds"]
    assert point["busy_tokens_per_second"] == result["tokens_per_second"] == 15.0


def test_nobody_who_asks_leaves_no_time():
    found = Figures().since_last(1.0)

    assert found["answered_requests"] == 0
    assert not any(name.startswith(("ttft", "tpot")) for name in found)
