"""An operator mended something: the host says at once what it is now."""

import pytest

from runners.agent import Agent
from tests.runners.test_agent import MICROBENCH


@pytest.fixture
def agent(acceptor, host_dir, credential):
    acceptor.microbench = MICROBENCH
    host_dir.save_credential(credential)
    now = [1000.0]
    made = Agent(host_dir, credential, clock=lambda: now[0])
    made.now = now
    yield made
    made.client.close()


def step_after(agent: Agent, seconds: float) -> None:
    agent.now[0] += seconds
    agent.step()


def has_facts(acceptor) -> list[bool]:
    return [beat.facts is not None for beat in acceptor.beats]


def test_the_first_beat_says_what_the_host_is_and_the_next_does_not(acceptor, agent):
    step_after(agent, 0)
    step_after(agent, 11)

    assert has_facts(acceptor) == [True, False]


def test_a_host_that_is_asked_says_it_again_without_waiting(acceptor, agent):
    step_after(agent, 0)
    acceptor.wants_recheck = True
    step_after(agent, 11)
    step_after(agent, 0)
    step_after(agent, 11)

    assert has_facts(acceptor) == [True, False, True, False]


def test_a_host_says_it_again_every_ten_minutes(acceptor, agent):
    step_after(agent, 0)
    step_after(agent, 590)
    step_after(agent, 11)

    assert has_facts(acceptor) == [True, False, True]


def test_a_benchmark_that_failed_runs_again_when_asked(acceptor, agent):
    step_after(agent, 0)
    agent.bench._not_before = float("inf")
    acceptor.wants_recheck = True

    step_after(agent, 11)

    assert agent.bench._not_before == 0.0
