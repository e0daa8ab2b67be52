"""Heartbeats: what one changes, how many are stored at once, contact, the queue's round trip."""

import asyncio
import time
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext

from runners.jobspec import DemoModel, ServeSpec
from runners.shared.messages import AttemptStatus, BeatReply, Doorbell
from runners.shared.redis_address import pong_key
from tests.webapp.conftest import (
    EXIT_OK,
    batch_of,
    claim,
    enrol,
    make_beat,
    make_facts,
    make_job,
    make_microbench,
    new_attempt,
)
from webapp.agents import heartbeats
from webapp.agents.heartbeats import (
    HeartbeatBatcher,
    HostHeartbeat,
    ReceivedHeartbeat,
    answers_to,
    host_beat,
    host_beats,
)
from webapp.agents.ingest import events_accept
from webapp.agents.round_trips import RoundTrips
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import UnauthorizedProblem
from webapp.hosts.models import Host
from webapp.hosts.services import (
    Contact,
    ContactSweep,
    checks_update,
    contact_of,
    credential_revoke,
    expire_tokens,
)
from webapp.jobs.models import Job
from webapp.jobs.services import job_stop, job_submit

# A beat brings news and takes the desired state home.


pytestmark = pytest.mark.django_db(databases="__all__")


def status(attempt, phase: str = "running") -> AttemptStatus:
    return AttemptStatus(
        attempt_id=attempt.pk, fence=attempt.fence, phase=phase, last_seq=3, acked_seq=0
    )


def test_its_measurement_makes_a_host_ready(enrolled):
    host, _ = enrolled
    assert host_beat(host=host, beat=make_beat()).run_microbench
    assert host.state == "checking"
    host, _ = enrolled
    reply = host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert (host.state, reply.run_microbench) == ("ready", False)


def test_a_draining_host_stays_draining(host):
    Host.objects.filter(pk=host.pk).update(state="draining")
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    assert Host.objects.get(pk=host.pk).state == "draining"


def test_new_facts_replace_the_old_and_the_beat_is_kept_without_them(host):
    host_beat(host=host, beat=make_beat(facts=make_facts(cpu_count=64)))
    assert host.facts["cpu_count"] == 64
    host_beat(host=host, beat=make_beat(problems=("disk",), facts=make_facts()))
    assert host.last_beat["problems"] == ["disk"]
    assert "facts" not in host.last_beat


def test_the_beat_wants_what_is_neither_claimed_nor_superseded(host, job):
    wanted = host_beat(host=host, beat=make_beat()).wanted
    assert [item.attempt_id for item in wanted] == [job.current_attempt_id]
    newer = new_attempt(job)
    wanted = host_beat(host=host, beat=make_beat()).wanted
    assert [item.attempt_id for item in wanted] == [newer.pk]


def test_the_beat_wants_nothing_that_is_claimed_and_orders_its_stop(attempt):
    assert host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).wanted == ()
    job_stop(job=attempt.job, by="alice")
    stop = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).stop
    assert [(order.attempt_id, order.reason) for order in stop] == [
        (attempt.pk, "stopped_by_user")
    ]


def test_the_beat_gives_a_free_host_its_next_job(team, alice, host):
    Host.objects.filter(pk=host.pk).update(last_seen_at=None)
    host.refresh_from_db()
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert job.state == "queued"
    assert len(host_beat(host=host, beat=make_beat()).wanted) == 1


def test_the_beat_orders_the_stop_of_a_superseded_attempt_until_it_exited(attempt):
    new_attempt(attempt.job)
    stop = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),))).stop
    assert [order.reason for order in stop] == ["superseded"]
    beat = make_beat(attempts=(status(attempt, "exited"),))
    assert host_beat(host=attempt.host, beat=beat).stop == ()


def test_the_beat_names_gateways_while_an_endpoint_starts_or_runs(team, alice, host, settings):
    draft = make_job(team, alice, host, spec=ServeSpec(model=DemoModel()))
    job = job_submit(job=draft, by="alice")
    assert host_beat(host=host, beat=make_beat()).tunnels == ("/tunnel/",)
    settings.GATEWAYS = ("wss://gateway.lan/tunnel/",)
    attempt = job.current_attempt
    claim(attempt)
    for phase, tunnels in (
        ("claimed", settings.GATEWAYS),
        ("running", settings.GATEWAYS),
        ("exited", ()),
    ):
        beat = make_beat(attempts=(status(attempt, phase),))
        assert host_beat(host=host, beat=beat).tunnels == tunnels, phase


def test_a_host_without_an_endpoint_keeps_no_tunnel(attempt, other_host):
    assert host_beat(host=attempt.host, beat=make_beat()).tunnels == ()
    for each in (attempt.host, other_host):
        beat = make_beat(attempts=(status(attempt),))
        assert host_beat(host=each, beat=beat).tunnels == ()


def test_a_folder_of_another_server_is_left_alone(host):
    stranger = AttemptStatus(
        attempt_id="elsewhere", fence="f", phase="running", last_seq=1, acked_seq=0
    )
    assert host_beat(host=host, beat=make_beat(attempts=(stranger,))).stop == ()


def test_the_beat_says_what_is_stored(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("phase", {"name": "a"})))
    reply = host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),)))
    assert (reply.acked, reply.forget) == ({attempt.pk: 1}, ())


def test_what_has_its_exit_stored_may_be_forgotten(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    beat = make_beat(attempts=(status(attempt, "exited"),))
    assert host_beat(host=attempt.host, beat=beat).forget == (attempt.pk,)


# An attempt that its host no longer knows


def beat_without(attempt, times: int) -> Job:
    for _ in range(times):
        host_beat(host=attempt.host, beat=make_beat())
    return Job.objects.get(pk=attempt.job_id)


def test_the_third_beat_ends_an_attempt_that_never_reported(attempt):
    assert beat_without(attempt, 2).state == "starting"
    job = beat_without(attempt, 1)
    assert (job.state, job.reason) == ("error", "never_started")


def test_an_attempt_that_had_reported_lost_its_supervisor(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("phase", {"name": "a"})))
    assert beat_without(attempt, 3).reason == "supervisor_lost"


def test_being_seen_again_starts_the_grace_anew(attempt):
    beat_without(attempt, 2)
    host_beat(host=attempt.host, beat=make_beat(attempts=(status(attempt),)))
    assert beat_without(attempt, 2).state == "starting"


def test_an_unclaimed_attempt_cannot_be_lost(host, job):
    for _ in range(5):
        host_beat(host=host, beat=make_beat())
    claim(job.current_attempt)
    assert Job.objects.get(pk=job.pk).state == "starting"


# Beats that arrive together are stored together, and each gets its own answer.


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


def test_beats_of_one_instant_share_a_turn_and_every_host_was_heard(crowd, monkeypatch):
    sizes = turns_of(monkeypatch)
    answers = together(
        HeartbeatBatcher(), *(ReceivedHeartbeat(key, make_beat()) for _, key in crowd)
    )
    assert sizes == [5]
    assert all(isinstance(answer, BeatReply) for answer in answers)
    together(
        HeartbeatBatcher(),
        *(ReceivedHeartbeat(key, make_beat(boot_id=host.slug)) for host, key in crowd),
    )
    heard = Host.objects.exclude(last_seen_at=None)
    assert {host.slug: host.boot_id for host in heard} == {h.slug: h.slug for h, _ in crowd}


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


def test_a_stranger_or_revoked_host_in_a_turn_is_refused_and_holds_nobody_up(crowd):
    answers = together(
        HeartbeatBatcher(),
        ReceivedHeartbeat(crowd[0][1], make_beat()),
        ReceivedHeartbeat("guessed", make_beat()),
        ReceivedHeartbeat("", make_beat()),
        ReceivedHeartbeat(crowd[1][1], make_beat()),
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [BeatReply, UnauthorizedProblem, UnauthorizedProblem, BeatReply]
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


def test_of_two_beats_the_later_stays_and_others_keep_their_facts(crowd):
    host, _ = crowd[0]
    host_beats([HostHeartbeat(host.pk, make_beat(boot_id=boot)) for boot in ("before", "after")])
    assert Host.objects.get(pk=host.pk).boot_id == "after"
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


# Silence is judged by the server's clock, and never ends a job.


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def silent_for(host: Host, seconds: float) -> Host:
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(seconds=seconds))
    host.refresh_from_db()
    return host


def test_contact_fades_with_silence(host):
    for seconds, contact in (
        (0, "live"), (29, "live"), (31, "degraded"), (89, "degraded"), (91, "unreachable"),
    ):  # fmt: skip
        assert contact_of(silent_for(host, seconds)) == contact, seconds


def test_a_host_that_never_spoke_is_unknown(enrolled):
    assert contact_of(enrolled[0]) is Contact.UNKNOWN


@pytest.fixture
def awake(host) -> ContactSweep:
    """A sweep that is past its pause after the start."""
    clock = Clock()
    sweep = ContactSweep(clock)
    for _ in range(10):
        clock.at += 10
        sweep.step()
    sweep.clock = clock
    return sweep


def test_a_host_that_falls_silent_is_announced_once(awake, host):
    silent_for(host, 100)
    assert [awake.step(), awake.step()] == [[host], []]
    assert Event.objects.filter(kind="host.contact").last().to_state == "unreachable"


def test_silence_never_moves_a_job(awake, attempt):
    silent_for(attempt.host, 10_000)
    awake.step()
    assert Job.objects.get(pk=attempt.job_id).state == "starting"


def test_a_server_that_just_started_accuses_nobody(host):
    silent_for(host, 100)
    assert ContactSweep(Clock()).step() == []


def test_a_server_that_slept_accuses_nobody(awake, host):
    silent_for(host, 100)
    awake.clock.at += 3600
    assert awake.step() == []


def test_good_news_is_not_held_back_by_the_pause(host):
    assert ContactSweep(Clock()).step() == [host]


def test_a_retired_host_is_not_watched(awake, host):
    Host.objects.update(state="retired")
    silent_for(host, 100)
    assert awake.step() == []


def test_tokens_that_ended_long_ago_are_deleted(host):
    host.enrolmenttoken_set.update(expires_at=now() - timedelta(days=31))
    assert expire_tokens() == 1


# A signed ping through Redis to a host's worker and back, timed; and what happens without one.


class Bell:
    """A host's worker in this process: it answers each ping as it is told."""

    def __init__(self, client, *answers: str) -> None:
        self.client = client
        self.answers = list(answers)
        self.rung: list[Doorbell] = []

    def __call__(self, host, doorbell: Doorbell) -> None:
        self.rung.append(doorbell)
        for answer in self.answers:
            words = doorbell.command_id if answer == "right" else answer
            self.client.lpush(pong_key(host.pk), words)


@pytest.fixture
def live(redis_client, enrolled):
    """A host in contact that was given Redis users."""
    found, _ = enrolled
    host_beat(host=found, beat=make_beat(facts=make_facts()))
    checks_update(found.pk, has_redis=True)
    found.refresh_from_db()
    return found


@pytest.fixture
def at(monkeypatch):
    monkeypatch.setattr("webapp.agents.round_trips.PONG_WAIT_SECONDS", 0.2)


def queue_of(found) -> dict:
    found.refresh_from_db()
    return found.checks["queue"]


def test_an_answer_is_timed(live, redis_client, at):
    bell = Bell(redis_client, "right")
    trips = RoundTrips(redis_client, bell)
    assert trips.step() == 1
    assert queue_of(live)["seconds"] >= 0
    assert bell.rung[0].is_echoed
    assert trips.step() == 0  # a queue that answered is not tried again
    assert len(bell.rung) == 1


def test_an_answer_to_an_earlier_ping_counts_for_nothing(live, redis_client, at):
    redis_client.lpush(pong_key(live.pk), "an-earlier-one")
    assert RoundTrips(redis_client, Bell(redis_client)).step() == 0
    assert queue_of(live) == {"problem": "no answer within 0 s"}


def test_no_answer_is_a_problem_and_is_tried_again_ever_more_rarely(live, redis_client, at):
    skipped = [0.0]
    bell = Bell(redis_client)
    trips = RoundTrips(redis_client, bell, clock=lambda: time.monotonic() + skipped[0])
    for _ in range(80):
        skipped[0] += 5.0
        trips.step()
    assert 4 <= len(bell.rung) <= 8  # at 0, 10, 30, 70, 150 and 310 seconds


def test_asking_again_does_not_wait_for_the_rest(live, redis_client, at):
    bell = Bell(redis_client)
    trips = RoundTrips(redis_client, bell)
    trips.step()
    checks_update(live.pk, queue=None)
    trips.step()
    assert len(bell.rung) == 2


def test_a_ping_that_cannot_be_sent_says_why(live, redis_client):
    def broken(*_: object) -> None:
        raise ConnectionError("refused")

    RoundTrips(redis_client, broken).step()

    assert queue_of(live) == {"problem": "the ping could not be sent: refused"}


@pytest.mark.parametrize("why", ["no users", "silent", "locked out"])
def test_hosts_without_a_queue_are_not_tried(live, redis_client, at, why):
    if why == "no users":
        checks_update(live.pk, has_redis=False)
    elif why == "silent":
        type(live).objects.update(last_seen_at=None)
    else:
        type(live).objects.update(credential_hash="")
    bell = Bell(redis_client)
    RoundTrips(redis_client, bell).step()
    assert bell.rung == []
