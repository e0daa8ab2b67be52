"""The post-mortem of a job on several hosts: who ended first, and what each of them said."""

import pytest
from django.utils.timezone import localtime

from runners.messages import ExitRecord
from tests.webapp.conftest import EXIT_OK, client_of
from tests.webapp.jobs.gangs import make_gang, make_hosts, members, silence, start, tell
from tests.webapp.jobs.test_memory_terms import tell as tell_metrics
from tests.webapp.jobs.test_rank_lines import KILLED
from webapp.hosts.models import Host
from webapp.jobs.gangs import settle_all
from webapp.jobs.memory_terms import stories_of, story_of
from webapp.jobs.models import Job
from webapp.jobs.postmortem import part_ends

pytestmark = pytest.mark.django_db(databases="__all__")

GIB = 2**30
NOON_MS = 1_800_000_000_000
ANSWER = {
    "per_device_peak_bytes": 11 * GIB,
    "capacity_bytes": 16 * GIB,
    "breakdown_bytes": {"weights": 4 * GIB, "activations": 6 * GIB, "runtime_overhead": 1 * GIB},
}


@pytest.fixture
def hosts(team):
    return make_hosts(team, 3)


@pytest.fixture
def gang(team, alice, hosts) -> Job:
    """A training that runs on three hosts."""
    job = make_gang(team, alice, hosts)
    for member in start(job):
        tell(member, ("log", {"stream": "stdout", "text": f"[rank {member.node_rank}] step 7\n"}))
    return job


def end(member, reason: str, at_ms: int, *lines: str, **changes) -> None:
    record = EXIT_OK | {"reason": reason, "exit_code": 1, "ended_at_ms": at_ms}
    record |= {"last_lines": lines, **changes}
    tell(member, ("exited", ExitRecord(**record).model_dump(mode="json")))


@pytest.fixture
def killed(gang) -> Job:
    """One rank was killed on the second host; the others lost it or were stopped."""
    first, second, third = members(gang)
    end(second, "exit_nonzero", NOON_MS, "[rank 1] step 8", *KILLED)
    end(first, "rank_lost", NOON_MS + 2000, "[rank 0] step 8", "RANK_LOST: rank 0 of 3: closed")
    end(third, "peer_ended", NOON_MS + 3000, "[rank 2] step 8", exit_code=None, signal=15)
    gang.refresh_from_db()
    return gang


def page(user, job, tab: str = "post-mortem/") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")


def test_the_host_and_the_rank_that_ended_first_are_named_with_time_and_signal(killed, alice):
    at = localtime(part_ends(killed)[0].at)
    text = page(alice, killed)

    assert f"Ended first on Box 2, rank 1, {at.day} {at:%b, %H:%M:%S}." in text
    assert "Ended by signal 9 (SIGKILL): the system or a person killed it" in text


def test_every_host_has_its_row_the_first_one_first(killed, alice):
    parts = part_ends(killed)

    assert [part.host_name for part in parts] == ["Box 2", "Box 1", "Box 3"]
    assert [part.rank for part in parts] == [1, 0, 2]
    assert "A part of the job lost its connection to the others." in page(alice, killed)


def test_every_hosts_last_lines_are_there_by_rank(killed, alice):
    text = page(alice, killed)

    assert text.count('<pre class="log last" tabindex="0" aria-label="Box') == 3
    assert "RANK_LOST: rank 0 of 3: closed" in text


def test_torchruns_report_is_folded_away_from_the_last_lines(killed, alice):
    (first,) = [part for part in part_ends(killed) if part.is_first]

    assert [rank.lines for rank in first.ranks] == [["step 8"]]
    assert "What torchrun reported" in page(alice, killed)


def test_the_overview_shows_the_end_of_the_host_that_failed(killed, alice):
    text = page(alice, killed, "")

    assert "Exit code 1, on Box 2" in text
    assert "Root Cause (first observed failure)" in text


def test_a_clock_that_is_wrong_does_not_change_when_it_was(gang, hosts):
    Host.objects.filter(pk=hosts[1].pk).update(clock_offset_ms=60_000)
    end(members(gang)[1], "exit_nonzero", NOON_MS + 60_000)

    (first, *_) = part_ends(gang)

    assert first.at.timestamp() * 1000 == NOON_MS


@pytest.fixture
def cut_off(gang, hosts) -> Job:
    """Two hosts lost the third, which has been silent since."""
    first, second, _ = members(gang)
    end(first, "rank_lost", NOON_MS, "RANK_LOST: rank 0 of 3: closed")
    end(second, "rank_lost", NOON_MS + 50)
    silence(hosts[2], minutes=4)
    settle_all()
    gang.refresh_from_db()
    return gang


def test_a_host_that_never_reported_is_named_as_what_the_others_may_have_lost(cut_off, alice):
    text = page(alice, cut_off)

    assert "No end was reported by Box 3 (silent for 4 min)." in text
    assert "It may be the cause: the others only lost it." in text


def test_the_last_lines_of_a_silent_host_come_from_what_it_had_sent(cut_off):
    silent = part_ends(cut_off)[-1]

    assert (silent.host_name, silent.at) == ("Box 3", None)
    assert [rank.lines for rank in silent.ranks] == [["step 7"]]


# Memory


@pytest.fixture
def starved(gang) -> Job:
    """Every host told its memory; the third ran out."""
    Job.objects.filter(pk=gang.pk).update(estimate={"memory": ANSWER})
    first, second, third = members(gang)
    for member, peak in ((first, 9.0), (second, 10.0), (third, 15.0)):
        tell_metrics(member, "host", {"rss_bytes": 2.0 * GIB}, {"rss_bytes": peak * GIB})
    end(third, "oom_host", NOON_MS, "Unable to allocate 2.00 GiB for an array")
    end(first, "rank_lost", NOON_MS + 9)
    end(second, "peer_ended", NOON_MS + 10)
    return Job.objects.get(pk=gang.pk)


def test_the_memory_told_first_is_that_of_the_host_that_ran_out(starved):
    assert [member.host.name for member, _ in stories_of(starved)] == ["Box 3", "Box 2", "Box 1"]
    assert story_of(starved).needed_bytes == 17 * GIB


def test_only_the_host_that_ran_out_is_said_to_have(starved):
    assert [story.is_oom for _, story in stories_of(starved)] == [True, False, False]


def test_each_host_has_a_chart_before_the_predicted_terms(starved, alice):
    text = page(alice, starved)

    assert "Memory of Box 3 against its prediction" in text
    assert [f'id="figure-memory-timeline-{rank}"' in text for rank in range(3)] == [True] * 3
    assert text.count('class="layer term-activations"') == 3


def test_each_chart_draws_its_own_hosts_points(starved, alice):
    found = client_of(alice).get(f"/jobs/{starved.pk}/post-mortem/").context["found"]
    tops = [max(part.figure["data"][-1]["y"]) for part in (found.memory, *found.other_memory)]

    assert tops == [15.0, 10.0, 9.0]
