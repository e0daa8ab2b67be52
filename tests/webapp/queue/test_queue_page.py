"""The queue page, as people see it and as operators use it."""

import re

import pytest

from tests.webapp.conftest import client_of, make_beat, make_job
from tests.webapp.queue.conftest import gpu_host
from webapp.core.clock import now
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Device
from webapp.jobs.models import Job
from webapp.jobs.services import job_submit
from webapp.queue import views
from webapp.queue.words import lines_of

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


def test_the_page_says_who_is_next_why_and_when(alice, waiting):
    words = text(page(alice))
    assert "2 queued · 0 of 4 devices free" in words
    assert "Job a alice It needs 1 device on one host; node-a has 0 of 4 free" in words
    assert "≈" in words


def test_the_page_says_who_holds_what(alice, waiting):
    assert "GPU 0 Long run until ≈" in text(page(alice))


def test_a_cordoned_device_is_shown_with_its_reason(alice, node_a):
    Device.objects.filter(uuid="node-a-1").update(cordoned_at=now(), cordon_reason="ECC errors")
    assert "GPU 1 cordoned: ECC errors" in text(page(alice))


def test_an_empty_queue_says_so(alice, node_a):
    assert "The queue is empty." in page(alice)


def test_a_person_without_pools_is_led_to_the_first_host(charlie):
    assert "There is no pool yet" in page(charlie)


def test_only_operators_get_buttons(alice, olga, waiting):
    assert "/up/" not in page(alice)
    assert "/up/" in page(olga)


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
    answer = press(olga, pool, "up", job=waiting[1].pk, seen=seen(olga, pool))
    assert "Job b moved up." in answer.content.decode()
    assert answer.redirect_chain[0][0].endswith(f"#job-{waiting[1].pk}")
    assert [line.job for line in lines_of(pool)] == waiting[::-1]


def test_a_job_moves_down_by_a_button(olga, waiting):
    pool = waiting[0].pool
    press(olga, pool, "down", job=waiting[0].pk, seen=seen(olga, pool))
    assert [line.job for line in lines_of(pool)] == waiting[::-1]


def test_a_page_that_is_out_of_date_moves_nothing_and_says_so(olga, waiting):
    pool = waiting[0].pool
    answer = press(olga, pool, "up", job=waiting[1].pk, seen="0123456789abcdef")
    assert "The queue has changed" in answer.content.decode()
    assert [line.job for line in lines_of(pool)] == waiting


def test_a_priority_is_set_by_a_form(olga, waiting):
    press(olga, waiting[1].pool, "priority", job=waiting[1].pk, priority="1")
    assert lines_of(waiting[1].pool)[0].job == waiting[1]


def test_an_odd_form_is_refused_in_words(olga, waiting):
    answer = press(olga, waiting[0].pool, "priority", job="x" * 500, priority="9")
    assert "it can be -1 (Low), 0 (Normal), 1 (High)" in answer.content.decode()


def test_a_practitioner_moves_nothing(alice, waiting):
    answer = press(alice, waiting[0].pool, "up", job=waiting[1].pk, seen="")
    assert answer.status_code == 403


def test_a_member_of_a_guest_team_moves_nothing_either(charlie, other_team, waiting):
    charlie.memberships.update(role="admin")
    waiting[0].pool.shared_with.add(other_team)
    answer = press(charlie, waiting[0].pool, "up", job=waiting[1].pk, seen="")
    assert answer.status_code == 403


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


def test_a_stranger_on_a_device_is_named_by_its_process(alice, node_a):
    load = {"uuid": "node-a-2", "memory_used_bytes": 1, "utilization": 0.5}
    host_beat(host=node_a, beat=make_beat(gpus=[{**load, "foreign_pids": (4321,)}]))
    assert "GPU 2 used by process 4321, which is no job of ours" in text(page(alice))


def test_a_long_queue_is_shown_in_pages(alice, waiting, monkeypatch):
    monkeypatch.setattr(views, "NUM_TURNS", 1)
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


@pytest.mark.parametrize("offset", ["-1", "x", "9" * 40, "٣", "1.5", "100"])
def test_an_invalid_or_too_large_offset_shows_an_existing_page(alice, waiting, offset):
    assert "Job b" in page(alice, f"/queue/?offset={offset}")


@pytest.mark.parametrize("job", ["x", "9" * 300, ""])
def test_a_link_to_a_job_that_is_not_queued_shows_the_first_page(alice, waiting, job):
    answer = client_of(alice).get(f"/queue/{waiting[0].pool_id}/?job={job}", follow=True)
    assert "Job b" in answer.content.decode()


def test_of_many_hosts_those_with_something_taken_are_shown(alice, team, submit, monkeypatch):
    gpu_host(team, "idle", 4)
    host = gpu_host(team, "taken", 4)
    submit(host, is_pinned=True, name="Long run")
    monkeypatch.setattr(views, "NUM_HOSTS", 1)
    html = page(alice)
    assert "GPU 0 Long run until ≈" in text(html)
    assert ">idle<" not in html
    assert "1 of 2 hosts, those with something taken first; of the others 4 of 4" in text(html)
    assert ">idle<" in page(alice, f"/queue/{host.pool_id}/?hosts=all")
