"""The bench of layouts: real ranks that are forked, timed in turns, and judged."""

import pytest

from runners.bench_cases import LayoutBenchRequest, StepTime
from runners.jobs.layouts_bench import regret
from runners.jobspec.train import LayoutOptions


def times(**seconds):
    return [
        StepTime(layout=name, round=at, seconds=each)
        for name, own in seconds.items()
        for at, each in enumerate(own)
    ]


def test_the_regret_is_against_the_fastest_other_of_all_rounds():
    found = regret("chosen", times(chosen=[1.1, 1.1], other=[1.0, 1.0], slow=[2.0, 2.0]))

    assert found.name == "other"
    assert found.value == pytest.approx(1 / 1.1)
    assert (found.n, found.of) == (2, "step seconds")


def test_a_layout_that_was_left_out_early_is_no_rival():
    found = regret("chosen", times(chosen=[1.0, 1.0], lucky=[0.9], other=[1.2, 1.3]))

    assert found.name == "other"
    assert found.low < found.value < found.high
    assert found.value == pytest.approx((1.2 * 1.3) ** 0.5)


def test_where_all_were_left_out_the_one_that_stayed_longest_is_the_rival():
    found = regret("chosen", times(chosen=[1.0, 1.0, 1.0], early=[2.0], late=[1.5, 1.6]))

    assert (found.name, found.n) == ("late", 2)


def test_one_process_takes_one_rank_and_a_layout_its_own():
    layouts = {"alone": None, "pair": LayoutOptions(data_parallel_size=2)}
    asked = LayoutBenchRequest(config={}, training={}, layouts=layouts, first_choice="pair")

    assert (asked.ranks_of("alone"), asked.ranks_of("pair")) == (1, 2)
    assert asked.always == {"pair"}
