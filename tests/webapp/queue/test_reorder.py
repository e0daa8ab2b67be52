"""What an operator changes in a queue."""

import pytest

from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.jobs.models import Event, Job
from webapp.queue.actions import job_move, job_prioritise, order_digest
from webapp.queue.words import lines_of

pytestmark = pytest.mark.django_db(databases="__all__")


def order(pool) -> list[str]:
    return [line.job.name for line in lines_of(pool)]


def seal(pool) -> str:
    return order_digest([line.job.pk for line in lines_of(pool)])


@pytest.fixture
def waiting(submit, node_a) -> dict[str, Job]:
    """Four jobs in the queue of a pool that is full."""
    submit(node_a, devices_per_host=4, name="running")
    return {name: submit(node_a, name=name) for name in "abcd"}


def move(waiting, name: str, *, is_up: bool, seen: str | None = None) -> None:
    pool = waiting[name].pool
    seen = seal(pool) if seen is None else seen
    job_move(pool=pool, job_id=waiting[name].pk, is_up=is_up, seen=seen, by="olga")


def test_a_job_moves_up(waiting):
    move(waiting, "c", is_up=True)
    assert order(waiting["a"].pool) == ["a", "c", "b", "d"]


def test_a_job_moves_down(waiting):
    move(waiting, "a", is_up=False)
    assert order(waiting["a"].pool) == ["b", "a", "c", "d"]


def test_moves_add_up(waiting):
    move(waiting, "d", is_up=True)
    move(waiting, "d", is_up=True)
    move(waiting, "d", is_up=True)
    assert order(waiting["a"].pool) == ["d", "a", "b", "c"]


def test_who_comes_later_stands_behind_those_that_were_ranked(waiting, submit, node_a):
    move(waiting, "b", is_up=True)
    submit(node_a, name="late")
    assert order(node_a.pool) == ["b", "a", "c", "d", "late"]


@pytest.mark.parametrize(("name", "is_up", "word"), [("a", True, "first"), ("d", False, "last")])
def test_the_edge_is_named(waiting, name, is_up, word):
    with pytest.raises(ConflictProblem, match=f"{name} is {word} of its priority"):
        move(waiting, name, is_up=is_up)


def test_a_queue_that_changed_meanwhile_is_left_as_it_is(waiting):
    seen = seal(waiting["a"].pool)
    move(waiting, "c", is_up=True)
    with pytest.raises(ConflictProblem, match="has changed"):
        move(waiting, "d", is_up=True, seen=seen)
    assert order(waiting["a"].pool) == ["a", "c", "b", "d"]


def test_a_job_that_got_its_turn_meanwhile_is_not_moved(waiting):
    Job.objects.filter(name="b").update(state="running")
    with pytest.raises(ConflictProblem, match="has changed"):
        move(waiting, "b", is_up=True)


def test_no_job_passes_one_of_higher_priority(waiting):
    job_prioritise(pool=waiting["d"].pool, job_id=waiting["d"].pk, priority="1", by="olga")
    with pytest.raises(ConflictProblem, match="change the priority"):
        move(waiting, "a", is_up=True)


def test_a_priority_changes_the_order_and_drops_the_rank(waiting):
    move(waiting, "b", is_up=True)
    job = job_prioritise(pool=waiting["b"].pool, job_id=waiting["b"].pk, priority="-1", by="olga")
    assert (order(job.pool), job.queue_rank) == (["a", "c", "d", "b"], None)


@pytest.mark.parametrize("priority", ["2", "high", "", "1.0"])
def test_an_unknown_priority_is_refused_with_the_known_ones(waiting, priority):
    with pytest.raises(InvalidProblem, match=r"0 \(Normal\)"):
        job_prioritise(
            pool=waiting["a"].pool, job_id=waiting["a"].pk, priority=priority, by="olga"
        )


def test_a_job_that_left_the_queue_keeps_its_priority(waiting):
    Job.objects.filter(name="a").update(state="running")
    with pytest.raises(ConflictProblem, match="left the queue"):
        job_prioritise(pool=waiting["a"].pool, job_id=waiting["a"].pk, priority="1", by="olga")


def test_who_moved_what_is_on_record(waiting):
    move(waiting, "c", is_up=True)
    event = Event.objects.get(kind="job.moved")
    assert (event.subject, event.actor, event.detail) == (
        waiting["c"].pk,
        "olga",
        {"from": 3, "to": 2},
    )
