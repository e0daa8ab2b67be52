"""Giving a job up, on one host and on several: what is known, asked, freed and said."""

import pytest

from runners.shared.messages import AttemptStatus
from tests.webapp.conftest import batch_of, claim, client_of, enrol, make_beat, make_microbench
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, silence, start
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.gangs import settle_all
from webapp.jobs.models import Allocation, Job
from webapp.jobs.progress import state_label_of
from webapp.jobs.services import job_abandon

pytestmark = pytest.mark.django_db(databases="__all__")

STOPPED = {
    "exit_code": None,
    "signal": 15,
    "reason": "lost_and_abandoned_by_user",
    "by": "supervisor",
    "started_at_ms": 1,
    "ended_at_ms": 2,
}


@pytest.fixture
def lost(attempt) -> Job:
    """A running job whose host has not been heard for four minutes."""
    started = {"pid": 7, "boot_id": "boot-1", "argv": ["python"]}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", started)))
    silence(attempt.host, minutes=4)
    return Job.objects.get(pk=attempt.job_id)


def page(user, job, tab: str = "") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")


def give_up(user, job, name: str = "Box", **more: str):
    return client_of(user).post(f"/jobs/{job.pk}/abandon/", {"host_name": name, **more})


def test_the_page_says_what_is_known_and_the_job_page_leads_there(lost, alice):
    text = page(alice, lost, "abandon/")
    assert "Last known: running, host unreachable for 4 min" in text
    assert "1 events stored" in text
    assert f"/jobs/{lost.pk}/abandon/" in page(alice, lost)


def test_a_host_in_contact_leads_nowhere(attempt, alice):
    assert "/abandon/" not in page(alice, attempt.job)
    assert "This job cannot be given up" in page(alice, attempt.job, "abandon/")


def test_the_right_name_alone_ends_the_job_and_frees_its_devices(lost, alice):
    answer = give_up(alice, lost, "box")
    lost.refresh_from_db()
    assert (answer.status_code, lost.state) == (422, "running")
    assert b"Type the host" in answer.content
    give_up(alice, lost)
    lost.refresh_from_db()
    assert (lost.state, lost.reason) == ("stopped", "lost_and_abandoned_by_user")
    assert not Allocation.objects.filter(released_at=None).exists()
    text = page(alice, lost)
    assert "Its attempt may still run there" in text
    assert "told to stop the attempt at its next heartbeat" in text


def report(host: Host, attempt, phase: str):
    """Have the host come back with the old attempt on its disk, and return the stop orders."""
    status = {"attempt_id": attempt.pk, "fence": attempt.fence, "phase": phase}
    status |= {"last_seq": 1, "acked_seq": 1}
    return host_beat(host=host, beat=make_beat(attempts=(status,))).stop


def test_a_host_that_returns_is_told_to_stop_it_and_the_page_confirms_its_end(
    lost, attempt, alice
):
    give_up(alice, lost)
    (order,) = report(attempt.host, attempt, "running")
    assert (order.attempt_id, order.reason) == (attempt.pk, "lost_and_abandoned_by_user")
    assert "was told to stop the attempt, but has not confirmed yet" in page(alice, lost)
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", STOPPED), first=2))
    assert "Confirmed by Box: no process of it is running" in page(alice, lost)
    lost.refresh_from_db()
    assert lost.state == "stopped"


def test_an_attempt_that_ended_well_meanwhile_changes_nothing_but_is_told(lost, attempt, alice):
    give_up(alice, lost)
    well = STOPPED | {"exit_code": 0, "signal": None, "reason": "ok"}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", well), first=2))
    assert "The attempt had succeeded before it could be stopped" in page(alice, lost)
    assert Job.objects.get(pk=lost.pk).state == "stopped"


@pytest.fixture
def second(team) -> Host:
    host, _ = enrol(team, name="Second")
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    return Host.objects.get(pk=host.pk)


def test_it_starts_anew_on_another_host_of_the_pool(lost, alice, second):
    give_up(alice, lost, elsewhere=second.pk)
    copy = Job.objects.exclude(pk=lost.pk).get()
    assert (copy.state, copy.host, copy.current_attempt.number) == ("preflight", second, 1)
    assert claim(copy.current_attempt).spec.kind == "train"


def test_a_host_that_cannot_take_it_is_not_offered(lost, alice, second):
    silence(second, minutes=4)
    give_up(alice, lost, elsewhere=second.pk)
    assert Job.objects.count() == 1
    assert "restart it on" not in page(alice, lost, "abandon/")


def test_only_its_owner_or_an_operator_gives_a_job_up(lost, bob, olga):
    assert give_up(bob, lost).status_code == 403
    give_up(olga, lost)
    assert Job.objects.get(pk=lost.pk).state == "stopped"


# Giving up a job on several hosts: which are silent, what is freed, and what the others do.


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


def orders(host, member) -> list[str]:
    status = AttemptStatus(
        attempt_id=member.pk, fence=member.fence, phase="running", last_seq=1, acked_seq=1
    )
    reply = host_beat(host=host, beat=make_beat(attempts=(status,)))
    return [order.reason for order in reply.stop]


def test_the_pages_name_every_silent_host_and_say_what_is_freed_and_stopped(half_lost, alice):
    text = page(alice, half_lost, "abandon/")
    assert "Counts as free: its processor of Box 2." in text
    assert "Counts as free: its processor of Box 3." in text
    assert "Type the hosts' names, Box 2, Box 3, to confirm" in text
    assert "freed when the attempt has stopped" in text
    standing = state_label_of(half_lost)  # its first host speaks: it is not called lost
    assert (standing.state, standing.word) == ("running", "")
    assert standing.note == "2 hosts: no heartbeat for 4 min"
    text = page(alice, half_lost, "")
    assert "No heartbeat from Box 2 and Box 3 for 4 min" in text
    assert f"/jobs/{half_lost.pk}/abandon/" in text


def test_a_job_whose_first_host_is_silent_is_last_known_running(gang, hosts):
    silence(hosts[0], minutes=4)
    standing = state_label_of(Job.objects.get(pk=gang.pk))
    assert (standing.state, standing.word) == ("lost", "Last known: running")


def test_only_the_names_of_all_silent_hosts_give_it_up(half_lost):
    for typed in ["", "Box 2", "Box 1, Box 2, Box 3", "box 2, box 3"]:
        with pytest.raises(InvalidProblem, match="Box 2, Box 3"):
            job_abandon(job=half_lost, by="alice", typed_host_name=typed)
        assert held() == ["Box 1", "Box 2", "Box 3"], typed


def test_given_up_it_frees_the_silent_hosts_and_stops_the_others(half_lost, alice, hosts):
    give_up(alice, half_lost, "Box 3 , Box 2")
    half_lost.refresh_from_db()
    assert (half_lost.state, half_lost.reason) == ("stopped", "lost_and_abandoned_by_user")
    assert held() == ["Box 1"]
    event = Event.objects.filter(subject=half_lost.pk, to_state="stopped").get()
    assert event.detail["freed"] == {"Box 2": 1, "Box 3": 1}
    assert event.detail["sentence"] == "Counted as free: 1 device of Box 2 and 1 device of Box 3."
    assert orders(hosts[0], members(half_lost)[0]) == ["peer_ended"]
    assert orders(hosts[2], members(half_lost)[2]) == ["lost_and_abandoned_by_user"]


def test_the_page_waits_for_each_of_them_by_name(half_lost, alice, hosts):
    give_up(alice, half_lost, "Box 2, Box 3")
    assert "Its attempt may still run on Box 2 and Box 3" in page(alice, half_lost, "")
    end(members(half_lost)[1], "lost_and_abandoned_by_user")
    assert "Its attempt may still run on Box 3" in page(alice, half_lost, "")
    end(members(half_lost)[2], "lost_and_abandoned_by_user")
    assert "Confirmed by Box 2 and Box 3: no process of it is running" in page(
        alice, half_lost, ""
    )


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


def test_a_job_that_is_over_says_which_host_holds_devices_and_frees_them_once(ended, alice):
    assert "Box 3 still held for this job" in page(alice, ended, "")
    assert "Free what Box 3 holds?" in page(alice, ended, "abandon/")
    give_up(alice, ended, "Box 3")
    ended.refresh_from_db()
    assert (ended.state, ended.reason, held()) == ("failed", "rank_lost", [])
    assert Event.objects.filter(subject=ended.pk, kind="job.devices_freed").count() == 1
    with pytest.raises(ConflictProblem):
        job_abandon(job=ended, by="alice", typed_host_name="Box 3")


def test_it_starts_anew_where_enough_other_hosts_are_left(half_lost, alice, team):
    assert "The job's pool has fewer than 3 hosts" in page(alice, half_lost, "abandon/")
    make_hosts(team, 2, first=4)
    give_up(alice, half_lost, "Box 2, Box 3", elsewhere="pool")
    copy = Job.objects.exclude(pk=half_lost.pk).get()
    assert (copy.num_hosts, copy.requested_host, copy.state) == (3, None, "queued")
