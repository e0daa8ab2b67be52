"""A long queue: its first turns are decided from the first jobs of each team alone."""

import pytest

from tests.webapp.conftest import make_job
from webapp.jobs.models import Job
from webapp.jobs.services import job_submit
from webapp.jobs.views import waiting_sentence
from webapp.queue import words
from webapp.queue.actions import is_sealed, order_digest
from webapp.queue.pool_state import first_waiting, pool_state_of, waiting_jobs
from webapp.queue.rules import Rules
from webapp.queue.words import lines_of, waiting_line

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def mixed(submit, node_a, other_team, charlie) -> list[Job]:
    """Fourteen jobs of two teams in a full pool, of unlike lengths, priorities and ranks."""
    submit(node_a, devices_per_host=4, name="running", max_duration_seconds=3600)
    node_a.pool.shared_with.add(other_team)
    for number in range(7):
        submit(node_a, name=f"ours {number}", max_duration_seconds=600 * (1 + number % 3))
        job = make_job(
            other_team,
            charlie,
            None,
            pool=node_a.pool,
            devices_per_host=1 + number % 2,
            name=f"theirs {number}",
        )
        job_submit(job=job, by="charlie")
    Job.objects.filter(name="ours 5").update(priority=1)
    Job.objects.filter(name__in=["theirs 4", "ours 3"]).update(queue_rank=1)
    return waiting_jobs(node_a.pool)


def decided(pool, jobs, turns):
    """Return the first turns, and why each of them waits."""
    decision = pool_state_of(pool, jobs, Rules(jobs)).decide(lambda turn, _job: turn >= turns)
    waits = [(one.job, one.why, one.num_free, one.after, one.behind) for one in decision.waits]
    return decision.order[:turns], waits


@pytest.mark.parametrize("turns", [1, 2, 5, 9, 13, 14, 20])
def test_the_first_turns_are_those_of_the_whole_queue(mixed, node_a, turns):
    found = first_waiting(node_a.pool, turns)

    assert found.num_waiting == 14
    assert len(found.jobs) <= min(2 * turns, 14)
    assert decided(node_a.pool, found.jobs, turns) == decided(node_a.pool, mixed, turns)


def test_every_jobs_own_place_is_that_in_the_whole_queue(mixed, node_a):
    lines = lines_of(node_a.pool)

    assert [waiting_line(line.job).position for line in lines] == list(range(1, 15))


def test_far_behind_a_job_is_told_its_place_and_no_forecast(submit, node_a, monkeypatch):
    monkeypatch.setattr(words, "FORESEEN_TURNS", 2)
    submit(node_a, devices_per_host=4, name="running")
    *_, last = [submit(node_a, name=f"job {number}") for number in range(5)]

    assert waiting_sentence(last) == (
        "It needs 1 device on one host; 4 jobs go before it, and a start is forecast for the "
        "first 2 only. It is number 5 in the queue."
    )


def test_behind_jobs_of_several_teams_no_place_is_told(mixed, node_a, monkeypatch):
    monkeypatch.setattr(words, "FORESEEN_TURNS", 2)
    last = lines_of(node_a.pool)[-1].job

    told = waiting_sentence(last)

    assert "more than 2 jobs go before it" in told
    assert "number" not in told


def test_what_nobody_before_it_changes_is_told_however_far_behind(submit, node_a, monkeypatch):
    submit(node_a, devices_per_host=4, name="running")
    for number in range(4):
        submit(node_a, name=f"job {number}")
    large = submit(node_a, name="large", devices_per_host=9)
    near = waiting_sentence(large)

    monkeypatch.setattr(words, "FORESEEN_TURNS", 2)

    assert "the pool default has too few of them" in near
    assert waiting_sentence(large) == near


def test_a_seal_is_of_the_turns_that_a_page_showed():
    seen = order_digest(["a", "b"])

    assert is_sealed(["a", "b", "new"], seen)
    assert not is_sealed(["b", "a", "new"], seen)
    assert not is_sealed(["a"], seen)
    for odd in ("", "0123456789abcdef", "2", "999999999999_x", "\u0662_x"):
        assert not is_sealed(["a", "b"], odd)
