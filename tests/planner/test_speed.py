"""The bench's figures exist and are counted; how large they are is not a test's business."""

import pytest

from planner import speed


def test_the_bench_shows_a_rate_and_the_seconds_of_three_plans():
    rows = list(speed.figures(rounds=1))

    assert [unit for _, _, unit in rows] == ["1/s", "s", "s", "s"]
    assert all(value > 0 for _, value, _ in rows)


def test_a_rate_is_only_known_of_training():
    with pytest.raises(TypeError, match="training space"):
        speed.scoring_rate(speed.SERVING, rounds=1)
