"""A point's row: its means, intervals and percentiles, and what it tells its reader to beware."""

import pytest

from runners.jobs.load.client import RequestOutcome
from runners.jobs.load.figures import Repetition, percentile, row_of
from runners.jobspec.benchmark import ClosedLoop, LoadOptions, OpenLoop

CLOSED = LoadOptions(arrivals=ClosedLoop(concurrency=(2,)))
OPEN = LoadOptions(arrivals=OpenLoop(request_rate_per_second=(40.0,)))


def answer(at=0, ttft=0.1, tokens=11, late=0.0, error="") -> RequestOutcome:
    """One that takes 10 ms a token after its first."""
    first = at + ttft
    return RequestOutcome(at, at + late, first + 0.01 * (tokens - 1), first, tokens, error)


def repeated(*lists, lags=(0.0,), seconds=2.0):
    return [Repetition(0.0, seconds, list(each), list(lags)) for each in lists]


def row(*lists, options=CLOSED, point=2.0, **fields):
    return row_of(options, point, repeated(*lists, **fields), 11)


def notes(*lists, **fields) -> str:
    return " | ".join(row(*lists, **fields).notes)


def test_means_have_the_planners_names_and_units():
    found = row([answer(at) for at in range(20)])

    assert found.measured["tokens_per_second"] == pytest.approx(110)
    assert found.measured["requests_per_second"] == pytest.approx(10)
    assert found.measured["ttft_seconds"] == pytest.approx(0.1)
    assert found.measured["tpot_seconds"] == pytest.approx(0.01)
    assert found.measured["latency_seconds"] == pytest.approx(0.2)


def test_the_interval_is_students_over_the_repetitions():
    found = row(*([answer(ttft=each)] * 20 for each in (0.1, 0.2, 0.3)))

    low, high = found.interval["ttft_seconds"]
    half = 1.886 * 0.1 / 3**0.5
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))


def test_percentiles_are_values_that_were_measured():
    values = [each / 100 for each in range(1, 101)]

    assert [percentile(values, each) for each in (50, 90, 99)] == [0.5, 0.9, 0.99]
    assert percentile([7.0], 99) == 7.0


def test_a_percentiles_interval_is_over_what_it_was_in_each_repetition():
    found = row(*([answer(ttft=each)] * 20 for each in (0.1, 0.2, 0.3)))

    low, high = found.interval["ttft_p95_seconds"]
    half = 1.886 * 0.1 / 3**0.5
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))
    assert "ttft_p95_seconds" not in row([answer()] * 20).interval


def test_failures_count_and_stay_out_of_the_figures():
    bad = answer(ttft=9, error="ReadError")

    found = row([answer(), bad], [answer(), bad])

    assert (found.requests, found.failed, found.errors) == (4, 2, {"ReadError": 2})
    assert found.measured["ttft_p99_seconds"] == pytest.approx(0.1)
    assert "2 of 4 requests failed, and no figure has them: ReadError (2)" in found.notes[0]


@pytest.mark.parametrize(("count", "words"), [(19, "p50: 20"), (99, "p90: 100"), (999, "p99: 1,")])
def test_too_few_answers_for_a_percentile_are_told_with_how_many_it_takes(count, words):
    assert f"{count} answers are few for a {words}" in notes([answer()] * count)


def test_enough_answers_in_steady_repetitions_need_no_word():
    assert row([answer()] * 500, [answer()] * 500).notes == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"lags": (0.5,)}, "its clock ran up to 0.500 s late"), ({"lags": (0.004,)}, "")],
)
def test_a_generator_that_fell_behind_says_by_how_much(fields, words):
    told = notes([answer()] * 20, **fields)

    assert words in told
    assert ("fell behind" in told) == bool(words)


def test_requests_that_went_out_late_are_told():
    assert "requests went out up to 0.300 s late" in notes([answer(late=0.3)] * 20)


def test_an_open_loop_that_outruns_the_endpoint_is_told():
    told = notes([answer()] * 20, options=OPEN, point=40.0)

    assert "did not keep up: 10 of 40 requests a second" in told


def test_answers_that_ended_early_and_one_repetition_are_told():
    told = notes([answer(tokens=5)] * 3)

    assert "3 answers ended before their 11 tokens" in told
    assert "one repetition has no interval" in told


def test_repetitions_that_differ_are_told_with_the_figure():
    told = notes([answer(ttft=0.1)] * 20, [answer(ttft=0.4)] * 20)

    assert "repetitions differ by more than 20% in time to first token" in told
