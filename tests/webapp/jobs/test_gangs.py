"""A job on several hosts: they start together, and their policy says how they end."""

import pytest

from runners.shared.messages import AttemptStatus
from runners.shared.reasons import Reason
from tests.webapp.conftest import STARTED, claim, make_beat, make_job
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, silence, start, tell
from webapp.agents.dispatch import CLAIM_TIMEOUT, GRACE_BEATS, end_unclaimed, end_unknown_attempts
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.gangs import settle_all
from webapp.jobs.models import Allocation, Attempt, Job
from webapp.jobs.services import job_stop

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def hosts(team):
    return make_hosts(team, 3)


@pytest.fixture
def gang(team, alice, hosts) -> Job:
    """A job over three hosts that stops when a part is lost."""
    return make_gang(team, alice, hosts)


@pytest.fixture
def elastic(team, alice, hosts) -> Job:
    """A job over three hosts that goes on with two."""
    return make_gang(team, alice, hosts, on_lost_rank="shrink", min_hosts=2)


def state(job: Job) -> tuple[str, str]:
    job.refresh_from_db()
    return job.state, job.reason


def num_held() -> int:
    return Allocation.objects.filter(released_at=None).count()


def last_event(job: Job) -> Event:
    return Event.objects.filter(subject=job.pk).latest("id")


# Starting


def test_every_host_has_a_part_of_its_own_and_they_start_and_run_together(gang, hosts):
    assert [member.host.name for member in members(gang)] == ["Box 1", "Box 2", "Box 3"]
    assert len({member.fence for member in members(gang)}) == 3
    assert num_held() == 3
    reply = host_beat(host=hosts[1], beat=make_beat())
    assert [each.attempt_id for each in reply.wanted] == [members(gang)[1].pk]
    seen = []
    for member in members(gang):
        claim(member)
        seen.append(state(gang)[0])
    for member in reversed(members(gang)):
        tell(member, ("started", STARTED))
        seen.append(state(gang)[0])
    assert seen == ["preflight", "preflight", "starting", "starting", "starting", "running"]


def test_a_gang_whose_hosts_are_not_all_free_takes_none(team, alice, hosts):
    make_job(team, alice, hosts[0])
    Host.objects.filter(pk=hosts[2].pk).update(state="draining")
    assert make_gang(team, alice, hosts).state == "queued"
    assert num_held() == 0


def test_a_host_that_never_claims_is_named_and_releases_all_of_which_none_starts(gang):
    for member in members(gang)[:2]:
        claim(member)
    first = members(gang)[0]
    Event.objects.filter(subject=gang.pk).update(at=now() - CLAIM_TIMEOUT * 2)
    end_unclaimed()
    assert state(gang) == ("error", "start_timeout")
    assert "Box 3 did not claim its part" in last_event(gang).detail["sentence"]
    assert num_held() == 0
    with pytest.raises(Exception, match="withdrawn"):
        claim(first)


def test_stopped_before_the_start_signal_it_releases_every_host(gang):
    claim(members(gang)[0])
    job_stop(job=gang, by="alice")
    assert state(gang) == ("stopped", "stopped_by_user")
    assert num_held() == 0


# Ending well


def test_it_has_succeeded_once_every_part_has_ended_well_whatever_stands_beside(gang, hosts):
    gpus = [{"uuid": "GPU-0", "memory_used_bytes": 1, "utilization": 0.5}]
    Host.objects.filter(pk=hosts[0].pk).update(last_beat={"gpus": gpus})
    seen = []
    for member in start(gang):
        end(member)
        seen.append(state(gang))
    assert seen == [("running", ""), ("running", ""), ("succeeded", "ok")]
    assert num_held() == 0


def test_a_silent_host_does_not_hold_up_a_success(gang, hosts):
    start(gang)
    end(members(gang)[0])
    end(members(gang)[1])
    silence(hosts[2])
    settle_all()
    assert state(gang) == ("succeeded", "ok")
    assert num_held() == 1


# Ending by the policy


def test_a_part_that_fails_stops_the_others_and_is_named(gang, hosts):
    first, failing, third = start(gang)
    end(failing, "oom_gpu", at_ms=50)
    assert state(gang) == ("stopping", "oom_gpu")
    reply = host_beat(host=hosts[2], beat=beat_of(members(gang)[2]))
    assert [order.reason for order in reply.stop] == [Reason.PEER_ENDED]
    end(first, "rank_lost", at_ms=60)
    end(third, "peer_ended", at_ms=70)
    assert state(gang) == ("failed", "oom_gpu")
    assert last_event(gang).detail["sentence"] == "It ended first on Box 2, host 2 of 3."


def beat_of(member: Attempt):
    status = AttemptStatus(
        attempt_id=member.pk, fence=member.fence, phase="running", last_seq=1, acked_seq=1
    )
    return make_beat(attempts=(status,))


def test_a_cause_that_is_told_late_still_is_the_cause(gang):
    first, failing, third = start(gang)
    end(first, "rank_lost", at_ms=60)
    end(third, "rank_lost", at_ms=61)
    assert state(gang)[0] == "stopping"
    end(failing, "exit_nonzero", at_ms=59)
    assert state(gang) == ("failed", "exit_nonzero")


def test_clocks_that_differ_do_not_swap_causes(gang, hosts):
    Host.objects.filter(pk=hosts[0].pk).update(clock_offset_ms=-60_000)
    first, second, third = start(gang)
    end(third, "peer_ended")
    end(first, "exit_nonzero", at_ms=1_000_000)  # 1,060,000 on the server's clock
    end(second, "signal", at_ms=1_050_000)
    assert state(gang) == ("failed", "signal")


def test_silence_alone_ends_nothing(gang, hosts):
    start(gang)
    for host in hosts:
        silence(host, minutes=600)
    settle_all()
    assert state(gang) == ("running", "")
    assert num_held() == 3


def test_what_the_living_parts_report_ends_the_job_beside_a_silent_host(gang, hosts):
    first, second, silent = start(gang)
    end(first, "rank_lost")
    end(second, "rank_lost")
    assert state(gang)[0] == "stopping"
    silence(silent.host)
    settle_all()
    assert state(gang) == ("failed", "rank_lost")


def test_the_silent_host_keeps_its_devices_and_is_told_to_stop_when_heard(gang, hosts):
    first, second, silent = start(gang)
    silence(silent.host)
    end(first, "rank_lost")
    end(second, "rank_lost")

    assert num_held() == 1
    reply = host_beat(host=hosts[2], beat=beat_of(members(gang)[2]))
    assert [order.attempt_id for order in reply.stop] == [silent.pk]
    end(silent, "peer_ended")
    assert (state(gang), num_held()) == (("failed", "rank_lost"), 0)


def test_a_job_that_may_shrink_goes_on_without_a_part(elastic):
    first, second, third = start(elastic)
    end(third, "killed_externally")
    assert state(elastic) == ("running", "")
    assert last_event(elastic).kind == "job.rank_lost"
    assert last_event(elastic).detail == {"host": "Box 3", "node_rank": 2}
    end(first)
    end(second)
    assert state(elastic) == ("succeeded", "ok")


def test_with_too_few_left_it_stops(elastic):
    _, second, third = start(elastic)
    end(third, "killed_externally", at_ms=5)
    end(second, "signal", at_ms=9)
    assert state(elastic)[0] == "stopping"


def test_without_its_lead_it_stops(elastic):
    first, second, third = start(elastic)
    end(first, "signal", at_ms=5)
    end(second, "peer_ended")
    end(third, "peer_ended")
    assert state(elastic) == ("failed", "signal")


def test_a_shrunk_job_with_a_silent_lead_stays_last_known_running(elastic, hosts):
    start(elastic)
    for member in members(elastic)[2:]:
        end(member, "signal")
    for host in hosts[:2]:
        silence(host)
    settle_all()
    assert state(elastic)[0] == "running"


def test_a_person_stops_every_part(gang, hosts):
    start(gang)
    job_stop(job=gang, by="alice")
    assert {member.stop_reason for member in members(gang)} == {Reason.STOPPED_BY_USER}
    for member in members(gang):
        end(member, "stopped_by_user")
    assert state(gang) == ("stopped", "stopped_by_user")


def test_a_part_that_breaks_while_a_person_stops_the_job_is_not_the_reason(gang):
    first, second, third = start(gang)
    job_stop(job=gang, by="alice")
    end(second, "rank_lost")
    end(third, "stopped_by_user")
    end(first, "stopped_by_user")
    assert state(gang) == ("stopped", "stopped_by_user")


def test_a_host_that_forgot_its_part_stops_the_others(gang, hosts):
    start(gang)
    for _ in range(GRACE_BEATS + 1):
        end_unknown_attempts({hosts[1].pk: []})
    assert state(gang) == ("stopping", "supervisor_lost")
    assert num_held() == 2


def test_only_the_lead_moves_the_jobs_progress(gang):
    first, second, _ = start(gang)
    progress = {"done": 5, "total": 10, "unit": "steps", "eta_seconds": None}
    tell(second, ("progress", progress | {"done": 9}))
    tell(first, ("progress", progress))
    gang.refresh_from_db()
    assert gang.progress_done == 5
