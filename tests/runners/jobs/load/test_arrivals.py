"""Who asks when: how many at once, at which instants, and that nobody asks a dead endpoint."""

import asyncio
import statistics
import time

import pytest

from runners.jobs.load.client import RequestOutcome
from runners.jobs.load.figures import repetition
from runners.jobspec.benchmark import Burst, ClosedLoop, OpenLoop

CLOSED = ClosedLoop(concurrency=(3,))
PROMPTS = [(at,) for at in range(12)]


class Counted:
    """An endpoint that counts who asks at once, and dies after so many."""

    def __init__(self, lives: int = 10**6) -> None:
        self.now = self.most = self.asked = 0
        self.dues: list[float] = []
        self.lives = lives

    async def ask(self, _prompt, due: float) -> RequestOutcome:
        self.now, self.asked = self.now + 1, self.asked + 1
        self.most = max(self.most, self.now)
        self.dues.append(due)
        await asyncio.sleep(0.001)
        self.now -= 1
        return RequestOutcome(due, due, time.monotonic(), due, 2)

    def alive(self) -> bool:
        return self.asked < self.lives


def run(arrivals, endpoint, prompts=PROMPTS, seed="s"):
    point = arrivals.points[0]
    return asyncio.run(repetition(arrivals, point, prompts, endpoint.ask, endpoint.alive, seed))


def test_a_closed_loop_keeps_its_clients_busy_and_sends_each_prompt_once():
    endpoint = Counted()

    found = run(CLOSED, endpoint)

    assert (endpoint.most, len(found.answered)) == (3, 12)
    assert found.ended > found.began


def test_a_burst_is_due_at_one_moment():
    endpoint = Counted()

    run(Burst(burst_requests=(12,)), endpoint)

    assert len(set(endpoint.dues)) == 1
    assert endpoint.most == 12


def test_an_open_loop_comes_at_its_rate_whoever_is_answered():
    endpoint = Counted()

    run(OpenLoop(request_rate_per_second=(2000.0,)), endpoint, [(1,)] * 400)

    gaps = [b - a for a, b in zip(endpoint.dues, endpoint.dues[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 2000, rel=0.25)
    assert statistics.stdev(gaps) == pytest.approx(1 / 2000, rel=0.35)  # as Poisson's have it


def test_the_same_seed_comes_at_the_same_instants_and_another_at_others():
    def gaps(seed):
        run(OpenLoop(request_rate_per_second=(500.0,)), endpoint := Counted(), seed=seed)
        return [each - endpoint.dues[0] for each in endpoint.dues]

    first, again, other = gaps("a"), gaps("a"), gaps("b")

    assert first == pytest.approx(again, abs=1e-6)
    assert first != pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize(
    "arrivals", [CLOSED, OpenLoop(request_rate_per_second=(5000.0,))], ids=lambda one: one.kind
)
def test_once_the_endpoint_is_gone_nobody_asks_any_more(arrivals):
    endpoint = Counted(lives=4)

    found = run(arrivals, endpoint, [(1,)] * 500)

    assert len(found.answered) < 500
