"""The queue page, as people see it, and what operators change in a queue."""

import re
from datetime import timedelta

import pytest

from tests.webapp.conftest import client_of, make_beat, make_job
from tests.webapp.jobs.undone import undone
from tests.webapp.queue.conftest import gpu_host
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Device, Host
from webapp.jobs.models import Job
from webapp.jobs.queue_order import job_move, job_prioritise, order_digest
from webapp.jobs.services import job_submit
from webapp.jobs.waiting import lines_of
from webapp.pages import queue

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def waiting(submit, node_a) -> list[Job]:
    submit(node_a, devices_per_host=4, name="Long run", max_duration_seconds=7200)
    return [submit(node_a, name=f"Job {name}") for name in "ab"]


def page(user, path: str = "/queue/") -> str:
    answer = client_of(user).get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_the_page_says_who_holds_what_who_is_next_why_and_when(alice, olga, waiting):
    html = page(alice)
    words = text(html)
    assert "2 queued · 0 of 4 devices free" in words
    assert "Job a alice It needs 1 device on one host; node-a has 0 of 4 free" in words
    assert "≈" in words
    assert "GPU 0 Long run until ≈" in words
    assert "/up/" not in html
    assert "/up/" in page(olga)  # operators alone get buttons


def test_an_empty_queue_says_so_and_why_a_device_is_not_free(alice, node_a):
    Device.objects.filter(uuid="node-a-1").update(cordoned_at=now(), cordon_reason="ECC errors")
    load = {"uuid": "node-a-2", "memory_used_bytes": 1, "utilization": 0.5}
    host_beat(host=node_a, beat=make_beat(gpus=[{**load, "foreign_pids": (4321,)}]))
    html = page(alice)
    assert "The queue is empty." in html
    assert "GPU 1 cordoned: ECC errors" in text(html)
    assert "GPU 2 used by process 4321, which is not a Slipway job" in text(html)


def test_what_is_free_on_a_host_that_takes_no_job_is_not_offered(alice, node_a):
    assert "of 4 free GPU 0 free" in text(page(alice))
    for change in (
        {"state": "draining"},
        {"state": "ready", "last_seen_at": now() - timedelta(1)},
    ):
        Host.objects.filter(pk=node_a.pk).update(**change)
        assert "0 of 4 free GPU 0 no job starts" in text(page(alice)), change


def test_a_person_without_pools_is_led_to_the_first_host(charlie):
    assert "There is no pool yet" in page(charlie)


def test_another_teams_job_is_counted_and_not_named(charlie, other_team, node_a, waiting):
    node_a.pool.shared_with.add(other_team)
    html = page(charlie)
    assert "a job of Alice" in text(html)
    assert "Job b" not in html
    assert "Long run" not in html


def press(user, pool, action: str, **sent):
    return client_of(user).post(f"/queue/{pool.pk}/{action}/", sent, follow=True)


def seen(user, pool) -> str:
    moves = page(user, f"/queue/{pool.pk}/").partition('id="moves-')[2]
    return re.search(r'name="seen" value="(\w+)"', moves)[1]


def test_a_job_moves_by_a_button_and_the_page_comes_back_to_it(olga, waiting):
    pool = waiting[0].pool
    for action, job in (("up", waiting[1]), ("down", waiting[0])):
        with undone(action):
            answer = press(olga, pool, action, job=job.pk, seen=seen(olga, pool))
            assert f"{job.name} moved {action}." in answer.content.decode()
            assert answer.redirect_chain[0][0].endswith(f"#job-{job.pk}")
            assert [line.job for line in lines_of(pool)] == waiting[::-1]


def test_a_page_that_is_out_of_date_moves_nothing_and_says_so(olga, waiting):
    pool = waiting[0].pool
    answer = press(olga, pool, "up", job=waiting[1].pk, seen="0123456789abcdef")
    assert "The queue has changed" in answer.content.decode()
    assert [line.job for line in lines_of(pool)] == waiting


def test_a_priority_is_set_by_a_form_and_an_odd_form_refused_in_words(olga, waiting):
    answer = press(olga, waiting[0].pool, "priority", job="x" * 500, priority="9")
    assert "it can be -1 (Low), 0 (Normal), 1 (High)" in answer.content.decode()
    press(olga, waiting[1].pool, "priority", job=waiting[1].pk, priority="1")
    assert lines_of(waiting[1].pool)[0].job == waiting[1]


def test_a_practitioner_and_a_member_of_a_guest_team_move_nothing(
    alice, charlie, other_team, waiting
):
    charlie.memberships.update(role="admin")
    waiting[0].pool.shared_with.add(other_team)
    for user in (alice, charlie):
        answer = press(user, waiting[0].pool, "up", job=waiting[1].pk, seen="")
        assert answer.status_code == 403, user


def test_the_job_page_leads_to_its_place_in_the_queue(alice, waiting):
    html = page(alice, f"/jobs/{waiting[1].pk}/")
    assert "It is number 2 in the queue." in html
    link = f"/queue/{waiting[1].pool_id}/?job={waiting[1].pk}"
    assert link in html
    answer = client_of(alice).get(link)
    assert answer.headers["Location"] == f"/queue/{waiting[1].pool_id}/#job-{waiting[1].pk}"


def test_a_guests_job_waits_in_the_hosts_queue(charlie, other_team, node_a, waiting):
    node_a.pool.shared_with.add(other_team)
    job = make_job(other_team, charlie, None, pool=node_a.pool, devices_per_host=1, name="Guest")
    job_submit(job=job, by="charlie")
    assert "Guest" in page(charlie)


def test_a_long_queue_is_shown_in_pages(alice, waiting, monkeypatch):
    monkeypatch.setattr(queue, "NUM_TURNS", 1)
    pool = waiting[0].pool
    first, second = page(alice), page(alice, f"/queue/{pool.pk}/?offset=1")
    assert "Turns 1 to 1 of 2." in text(first)
    rows = [f'id="job-{job.pk}"' for job in waiting]
    assert [row in first for row in rows] == [True, False]
    assert f"/queue/{pool.pk}/?offset=1" in first
    assert "Turns 2 to 2 of 2." in text(second)
    assert [row in second for row in rows] == [False, True]
    assert f"/queue/{pool.pk}/?offset=0" in second
    answer = client_of(alice).get(f"/queue/{pool.pk}/?job={waiting[1].pk}")
    assert answer.headers["Location"] == f"/queue/{pool.pk}/?offset=1#job-{waiting[1].pk}"


def test_an_offset_beyond_the_end_or_a_link_to_a_job_that_is_not_queued_shows_an_existing_page(
    alice, waiting
):
    for offset in ["9" * 40, "100", ""]:
        assert "Job b" in page(alice, f"/queue/?offset={offset}"), offset
    for job in ["x", "9" * 300, ""]:
        answer = client_of(alice).get(f"/queue/{waiting[0].pool_id}/?job={job}", follow=True)
        assert "Job b" in answer.content.decode(), job


def test_of_many_hosts_those_with_something_taken_are_shown(alice, team, submit, monkeypatch):
    gpu_host(team, "idle", 4)
    host = gpu_host(team, "taken", 4)
    submit(host, is_pinned=True, name="Long run")
    monkeypatch.setattr(queue, "NUM_HOSTS", 1)
    html = page(alice)
    assert "GPU 0 Long run until ≈" in text(html)
    assert ">idle<" not in html
    assert (
        "Showing 1 of 2 hosts, those with allocated devices first. The hosts not shown have 4 of 4"
        in text(html)
    )
    assert ">idle<" in page(alice, f"/queue/{host.pool_id}/?hosts=all")


# What an operator changes in a queue.


def order(pool) -> list[str]:
    return [line.job.name for line in lines_of(pool)]


def seal(pool) -> str:
    return order_digest([line.job.pk for line in lines_of(pool)])


@pytest.fixture
def four(submit, node_a) -> dict[str, Job]:
    """Four jobs in the queue of a pool that is full."""
    submit(node_a, devices_per_host=4, name="running")
    return {name: submit(node_a, name=name) for name in "abcd"}


def move(four, name: str, *, is_up: bool, seen: str | None = None) -> None:
    pool = four[name].pool
    seen = seal(pool) if seen is None else seen
    job_move(pool=pool, job_id=four[name].pk, is_up=is_up, seen=seen, by="olga")


def test_a_job_moves_up_and_down_and_moves_add_up(four):
    for moves, found in (
        ([("c", True)], ["a", "c", "b", "d"]),
        ([("a", False)], ["b", "a", "c", "d"]),
        ([("d", True)] * 3, ["d", "a", "b", "c"]),
    ):
        with undone(moves):
            for name, is_up in moves:
                move(four, name, is_up=is_up)
            assert order(four["a"].pool) == found


def test_who_comes_later_stands_behind_those_that_were_ranked(four, submit, node_a):
    move(four, "b", is_up=True)
    submit(node_a, name="late")
    assert order(node_a.pool) == ["b", "a", "c", "d", "late"]


def test_the_edge_is_named_and_an_unknown_priority_refused_with_the_known_ones(four):
    for name, is_up, word in [("a", True, "first"), ("d", False, "last")]:
        with pytest.raises(ConflictProblem, match=f"{name} is {word} of its priority"):
            move(four, name, is_up=is_up)

    for priority in ["2", "high", "", "1.0"]:
        with pytest.raises(InvalidProblem, match=r"0 \(Normal\)"):
            job_prioritise(pool=four["a"].pool, job_id=four["a"].pk, priority=priority, by="olga")


def test_a_queue_that_changed_meanwhile_is_left_as_it_is_and_the_move_on_record(four):
    seen = seal(four["a"].pool)
    move(four, "c", is_up=True)
    with pytest.raises(ConflictProblem, match="has changed"):
        move(four, "d", is_up=True, seen=seen)
    assert order(four["a"].pool) == ["a", "c", "b", "d"]
    event = Event.objects.get(kind="job.moved")
    assert (event.subject, event.actor) == (four["c"].pk, "olga")
    assert event.detail == {"from": 3, "to": 2}


def test_a_job_that_got_its_turn_meanwhile_is_not_moved_and_keeps_its_priority(four):
    Job.objects.filter(name="b").update(state="running")
    with pytest.raises(ConflictProblem, match="has changed"):
        move(four, "b", is_up=True)
    with pytest.raises(ConflictProblem, match="left the queue"):
        job_prioritise(pool=four["b"].pool, job_id=four["b"].pk, priority="1", by="olga")


def test_a_priority_changes_the_order_drops_the_rank_and_is_passed_by_no_lower_one(four):
    move(four, "b", is_up=True)
    job = job_prioritise(pool=four["b"].pool, job_id=four["b"].pk, priority="-1", by="olga")
    assert (order(job.pool), job.queue_rank) == (["a", "c", "d", "b"], None)

    job_prioritise(pool=four["d"].pool, job_id=four["d"].pk, priority="1", by="olga")
    with pytest.raises(ConflictProblem, match="change the priority"):
        move(four, "a", is_up=True)
