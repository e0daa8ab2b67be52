"""Beats that arrive together are stored together, and each gets its own answer."""

import asyncio

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext

from runners.messages import BeatReply
from tests.webapp.conftest import enrol, make_beat, make_facts, make_job
from webapp.core.problems import UnauthorizedProblem
from webapp.hosts import heartbeats
from webapp.hosts.heartbeats import (
    HeartbeatBatcher,
    HostHeartbeat,
    ReceivedHeartbeat,
    answers_to,
    host_beats,
)
from webapp.hosts.models import Host
from webapp.hosts.services import credential_revoke
from webapp.jobs.services import job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def crowd(team) -> list[tuple[Host, str]]:
    """Five hosts with their credentials."""
    return [enrol(team, name=f"node-{number}") for number in range(5)]


def together(desk: HeartbeatBatcher, *heard: ReceivedHeartbeat) -> list:
    """Return what each of several beats gets that arrive in the same instant."""

    async def knock() -> list:
        return await asyncio.gather(*(desk.take(*each) for each in heard), return_exceptions=True)

    return async_to_sync(knock)()


def turns_of(monkeypatch) -> list[int]:
    """Return a list that grows by the size of each turn."""
    sizes: list[int] = []

    def counted(heard):
        sizes.append(len(heard))
        return answers_to(heard)

    monkeypatch.setattr(heartbeats, "answers_to", counted)
    return sizes


def test_beats_of_one_instant_share_a_turn(crowd, monkeypatch):
    sizes = turns_of(monkeypatch)

    answers = together(
        HeartbeatBatcher(), *(ReceivedHeartbeat(key, make_beat()) for _, key in crowd)
    )

    assert sizes == [5]
    assert all(isinstance(answer, BeatReply) for answer in answers)


def test_a_beat_after_a_pause_waits_for_nobody(crowd):
    desk = HeartbeatBatcher(window_seconds=60.0)

    [answer] = together(desk, ReceivedHeartbeat(crowd[0][1], make_beat()))

    assert isinstance(answer, BeatReply)


def test_beats_of_one_window_share_its_end(crowd, monkeypatch):
    sizes, desk = turns_of(monkeypatch), HeartbeatBatcher(window_seconds=0.2)

    async def one_and_then_the_others() -> None:
        await desk.take(crowd[0][1], make_beat())
        others = []
        for _, key in crowd[1:]:
            others.append(asyncio.create_task(desk.take(key, make_beat())))
            await asyncio.sleep(0.01)
        await asyncio.gather(*others)

    async_to_sync(one_and_then_the_others)()

    assert sizes == [1, 4]


def test_every_host_of_a_turn_was_heard(crowd):
    together(
        HeartbeatBatcher(),
        *(ReceivedHeartbeat(key, make_beat(boot_id=host.slug)) for host, key in crowd),
    )

    heard = Host.objects.exclude(last_seen_at=None)
    assert {host.slug: host.boot_id for host in heard} == {h.slug: h.slug for h, _ in crowd}


def test_a_stranger_in_a_turn_is_refused_and_holds_nobody_up(crowd):
    answers = together(
        HeartbeatBatcher(),
        ReceivedHeartbeat(crowd[0][1], make_beat()),
        ReceivedHeartbeat("guessed", make_beat()),
        ReceivedHeartbeat("", make_beat()),
        ReceivedHeartbeat(crowd[1][1], make_beat()),
    )

    kinds = [type(answer) for answer in answers]
    assert kinds == [BeatReply, UnauthorizedProblem, UnauthorizedProblem, BeatReply]


def test_a_revoked_credential_is_refused_at_its_next_beat(crowd):
    host, key = crowd[0]
    credential_revoke(host=host, by="olga")

    [answer] = together(HeartbeatBatcher(), ReceivedHeartbeat(key, make_beat()))

    assert isinstance(answer, UnauthorizedProblem)
    assert answer.code == "unknown_credential"


def test_what_befalls_a_turn_is_told_to_each_of_its_beats(crowd, monkeypatch):
    def lost(_heard):
        raise DatabaseError("database is locked")

    monkeypatch.setattr(heartbeats, "answers_to", lost)
    answers = together(
        HeartbeatBatcher(), *(ReceivedHeartbeat(key, make_beat()) for _, key in crowd)
    )

    assert [str(answer) for answer in answers] == ["database is locked"] * 5


def test_a_turn_after_a_failed_one_is_served(crowd, monkeypatch):
    desk = HeartbeatBatcher(window_seconds=0.0)
    with monkeypatch.context() as broken:
        broken.setattr(heartbeats, "answers_to", lambda _heard: 1 / 0)
        together(desk, ReceivedHeartbeat(crowd[0][1], make_beat()))

    [answer] = together(desk, ReceivedHeartbeat(crowd[0][1], make_beat()))

    assert isinstance(answer, BeatReply)


def test_somebody_who_hung_up_takes_no_answer_from_the_others(crowd):
    async def one_leaves() -> BeatReply:
        desk = HeartbeatBatcher()
        gone = asyncio.create_task(desk.take(crowd[0][1], make_beat()))
        stays = asyncio.create_task(desk.take(crowd[1][1], make_beat()))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    assert isinstance(async_to_sync(one_leaves)(), BeatReply)


def test_each_host_of_a_turn_takes_its_own_work_home(crowd, team, alice):
    hosts = [host for host, _ in crowd[:2]]
    Host.objects.update(state="ready", microbench={"duration_seconds": 1})
    jobs = [job_submit(job=make_job(team, alice, host), by="alice") for host in hosts]

    replies = host_beats([HostHeartbeat(host.pk, make_beat()) for host in hosts])

    wanted = [[each.attempt_id for each in reply.wanted] for reply in replies]
    for job in jobs:
        job.refresh_from_db()
    assert wanted == [[job.current_attempt_id] for job in jobs]


def test_of_two_beats_of_one_host_the_later_stays(crowd):
    host, _ = crowd[0]

    host_beats([HostHeartbeat(host.pk, make_beat(boot_id=boot)) for boot in ("before", "after")])

    assert Host.objects.get(pk=host.pk).boot_id == "after"


def test_new_facts_in_a_turn_leave_the_other_hosts_theirs(crowd):
    (first, _), (second, _) = crowd[:2]

    host_beats(
        [
            HostHeartbeat(first.pk, make_beat(facts=make_facts(cpu_count=64))),
            HostHeartbeat(second.pk, make_beat()),
        ]
    )

    counts = {host.pk: host.facts["cpu_count"] for host in Host.objects.all()}
    assert (counts[first.pk], counts[second.pk]) == (64, 2)


def test_a_host_more_costs_no_statement_more(crowd):
    def statements(hosts) -> int:
        with CaptureQueriesContext(connection) as seen:
            answers_to([ReceivedHeartbeat(key, make_beat()) for _, key in hosts])
        return len(seen)

    statements(crowd)  # the first beat of each changes its state

    assert statements(crowd) == statements(crowd[:1])
