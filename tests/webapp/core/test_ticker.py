"""Duties, each at its time; loops that outlive what goes wrong."""

import threading

import pytest

from webapp.core.ticker import Duty, Stopper, Ticker, all_duties, run_loop


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_each_duty_is_done_at_its_own_period():
    done: list[str] = []
    clock = Clock()
    duties = [Duty("a", 1.0, lambda: done.append("a")), Duty("b", 3.0, lambda: done.append("b"))]
    ticker = Ticker(duties, clock)
    for second in range(6):
        clock.at = float(second)
        ticker.step()
    assert (done.count("a"), done.count("b")) == (6, 2)


def test_a_duty_that_fails_does_not_stop_the_others():
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    ticker = Ticker([Duty("bad", 1.0, fail), Duty("good", 1.0, lambda: done.append("x"))])
    assert (ticker.step(), done) == (1, ["x"])


@pytest.mark.django_db(databases="__all__")
def test_every_real_duty_runs_on_an_empty_database():
    assert Ticker(all_duties()).step() == len(all_duties())


@pytest.mark.django_db
def test_a_loop_survives_what_a_round_raises():
    stop = Stopper()
    rounds: list[int] = []

    def step() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise RuntimeError("once")
        stop.event.set()

    run_loop("test", step, 0.0, stop)
    assert len(rounds) == 2


@pytest.mark.django_db
def test_a_loop_ends_while_it_rests():
    stop = Stopper()
    thread = threading.Thread(target=run_loop, args=("test", lambda: None, 60.0, stop))
    thread.start()
    stop.event.set()
    thread.join(5)
    assert not thread.is_alive()
