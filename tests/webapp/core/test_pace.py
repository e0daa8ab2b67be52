"""How often one caller may call, by a clock that the test moves."""

import threading

import pytest

from webapp.core import pace
from webapp.core.pace import BEAT, HOST, Limit, Pace
from webapp.core.problems import BusyProblem

SMALL = Limit("One caller", 2.0, 4)


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(clock) -> Pace:
    return Pace(clock)


def count(kept: Pace, limit: Limit, tries: int, caller: str = "a") -> int:
    """Return how many of some calls at once are taken."""
    taken = 0
    for _ in range(tries):
        try:
            kept.keep(limit, caller)
        except BusyProblem:
            continue
        taken += 1
    return taken


def test_a_burst_is_taken_and_what_goes_beyond_it_is_not(kept):
    assert count(kept, SMALL, 10) == 4


def test_the_refusal_names_the_limit_and_the_wait(kept):
    count(kept, SMALL, 4)
    with pytest.raises(BusyProblem) as refused:
        kept.keep(SMALL, "a")
    assert "2 times a second, and 4 times at once" in refused.value.detail
    assert refused.value.facts == {"retry_after_seconds": 1}


def test_after_the_wait_that_was_named_one_more_is_taken(kept, clock):
    count(kept, SMALL, 4)
    clock.at += 1
    assert count(kept, SMALL, 10) == 2


def test_refused_calls_do_not_lengthen_the_wait(kept, clock):
    count(kept, SMALL, 1000)
    clock.at += 0.5
    assert count(kept, SMALL, 1) == 1


def test_the_rate_holds_over_time(kept, clock):
    taken = 0
    for _ in range(1000):
        taken += count(kept, SMALL, 3)
        clock.at += 0.1
    assert 200 <= taken <= 204


def test_callers_and_limits_do_not_count_against_each_other(kept):
    count(kept, SMALL, 10)
    assert count(kept, SMALL, 10, caller="b") == 4
    assert count(kept, HOST, 10) == 10


def test_a_host_that_beats_a_hundred_times_too_often_is_not_limited(kept, clock):
    for _ in range(1000):
        kept.keep(BEAT, "host")
        clock.at += 0.1


def test_names_without_end_take_no_memory_without_end(kept, clock, monkeypatch):
    monkeypatch.setattr(pace, "MOST_KNOWN", 100)
    for number in range(1000):
        kept.keep(SMALL, f"caller {number}")
        clock.at += 0.001
    assert len(kept._free_at) <= 101


def test_threads_together_get_no_more_than_one(kept):
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.append(count(kept, HOST, 500))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == HOST.burst
