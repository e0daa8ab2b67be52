"""Giving up a job on several hosts: which are silent, what is freed, and what the others do."""

import pytest

from runners.messages import AttemptStatus
from tests.webapp.conftest import client_of, make_beat
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, silence, start
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.heartbeats import host_beat
from webapp.jobs.gangs import settle_all
from webapp.jobs.models import Allocation, Event, Job
from webapp.jobs.progress import state_label_of
from webapp.jobs.services import job_abandon

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def hosts(team):
    return make_hosts(team, 3)


@pytest.fixture
def gang(team, alice, hosts) -> Job:
    """A training that runs on three hosts."""
    job = make_gang(team, alice, hosts)
    start(job)
    return job


@pytest.fixture
def half_lost(gang, hosts) -> Job:
    """The same, with two of its hosts silent."""
    for host in hosts[1:]:
        silence(host, minutes=4)
    return Job.objects.get(pk=gang.pk)


def held() -> list[str]:
    rows = Allocation.objects.filter(released_at=None).order_by("attempt__node_rank")
    return list(rows.values_list("attempt__host__name", flat=True))


def page(user, job, tab: str = "abandon/") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")


def give_up(user, job, names: str, **more: str):
    return client_of(user).post(f"/jobs/{job.pk}/abandon/", {"host_name": names, **more})


def orders(host, member) -> list[str]:
    status = AttemptStatus(
        attempt_id=member.pk, fence=member.fence, phase="running", last_seq=1, acked_seq=1
    )
    reply = host_beat(host=host, beat=make_beat(attempts=(status,)))
    return [order.reason for order in reply.stop]


def test_every_silent_host_is_named_with_what_would_be_freed(half_lost, alice):
    text = page(alice, half_lost)

    assert "Counts as free: its processor of Box 2." in text
    assert "Counts as free: its processor of Box 3." in text
    assert "Type the hosts' names, Box 2, Box 3, to confirm" in text


def test_a_host_that_answers_is_said_to_be_stopped(half_lost, alice):
    assert "is stopped, then frees what it holds" in page(alice, half_lost)


def test_the_job_page_names_the_silent_hosts_and_leads_there(half_lost, alice):
    text = page(alice, half_lost, "")

    assert "No heartbeat from Box 2 and Box 3 for 4 min" in text
    assert f"/jobs/{half_lost.pk}/abandon/" in text


def test_a_job_whose_first_host_speaks_is_not_called_lost(half_lost):
    standing = state_label_of(half_lost)

    assert (standing.state, standing.word) == ("running", "")
    assert standing.note == "2 hosts silent 4 min"


def test_a_job_whose_first_host_is_silent_is_last_known_running(gang, hosts):
    silence(hosts[0], minutes=4)

    standing = state_label_of(Job.objects.get(pk=gang.pk))

    assert (standing.state, standing.word) == ("lost", "Last known: running")


@pytest.mark.parametrize("typed", ["", "Box 2", "Box 1, Box 2, Box 3", "box 2, box 3"])
def test_only_the_names_of_all_silent_hosts_give_it_up(half_lost, typed):
    with pytest.raises(InvalidProblem, match="Box 2, Box 3"):
        job_abandon(job=half_lost, by="alice", typed_host_name=typed)

    assert held() == ["Box 1", "Box 2", "Box 3"]


def test_given_up_it_frees_the_silent_hosts_and_stops_the_others(half_lost, alice, hosts):
    give_up(alice, half_lost, "Box 3 , Box 2")

    half_lost.refresh_from_db()
    assert (half_lost.state, half_lost.reason) == ("stopped", "lost_and_abandoned_by_user")
    assert held() == ["Box 1"]
    assert orders(hosts[0], members(half_lost)[0]) == ["peer_ended"]


def test_what_was_freed_is_in_the_history(half_lost, alice):
    give_up(alice, half_lost, "Box 2, Box 3")

    event = Event.objects.filter(subject=half_lost.pk, to_state="stopped").get()
    assert event.detail["freed"] == {"Box 2": 1, "Box 3": 1}
    assert event.detail["sentence"] == "Counted as free: 1 device of Box 2 and 1 device of Box 3."


def test_the_page_waits_for_each_of_them_by_name(half_lost, alice, hosts):
    give_up(alice, half_lost, "Box 2, Box 3")
    assert "Its attempt may still run on Box 2 and Box 3" in page(alice, half_lost, "")

    end(members(half_lost)[1], "lost_and_abandoned_by_user")
    assert "Its attempt may still run on Box 3" in page(alice, half_lost, "")

    end(members(half_lost)[2], "lost_and_abandoned_by_user")
    assert "Confirmed by Box 2 and Box 3: nothing of it runs any more" in page(
        alice, half_lost, ""
    )


def test_a_host_that_returns_is_told_to_stop_its_part(half_lost, alice, hosts):
    give_up(alice, half_lost, "Box 2, Box 3")

    assert orders(hosts[2], members(half_lost)[2]) == ["lost_and_abandoned_by_user"]


# Before the start, and after the end


def test_before_the_start_signal_every_host_is_free_at_once(team, alice, hosts):
    job = make_gang(team, alice, hosts)
    silence(hosts[1])

    job_abandon(job=job, by="alice", typed_host_name="Box 2")

    assert (job.state, held()) == ("stopped", [])


@pytest.fixture
def ended(gang, hosts) -> Job:
    """Failed by what two hosts reported; the third is silent and keeps its device."""
    silence(hosts[2], minutes=4)
    end(members(gang)[0], "rank_lost")
    end(members(gang)[1], "rank_lost")
    settle_all()
    return Job.objects.get(pk=gang.pk)


def test_a_job_that_is_over_says_which_host_still_holds_devices(ended, alice):
    assert "Box 3 still held for this job" in page(alice, ended, "")
    assert "Free what Box 3 holds?" in page(alice, ended)


def test_freeing_them_leaves_the_job_as_it_ended(ended, alice):
    give_up(alice, ended, "Box 3")

    ended.refresh_from_db()
    assert (ended.state, ended.reason, held()) == ("failed", "rank_lost", [])
    assert Event.objects.filter(subject=ended.pk, kind="job.devices_freed").count() == 1


def test_what_is_free_already_cannot_be_freed_again(ended):
    job_abandon(job=ended, by="alice", typed_host_name="Box 3")

    with pytest.raises(ConflictProblem):
        job_abandon(job=ended, by="alice", typed_host_name="Box 3")


def test_it_starts_anew_where_enough_other_hosts_are_left(half_lost, alice, team):
    assert "Its pool has fewer than 3 hosts" in page(alice, half_lost)
    make_hosts(team, 2, first=4)

    give_up(alice, half_lost, "Box 2, Box 3", elsewhere="pool")

    copy = Job.objects.exclude(pk=half_lost.pk).get()
    assert (copy.num_hosts, copy.requested_host, copy.state) == (3, None, "queued")
