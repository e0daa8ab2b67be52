"""Pools of hosts, and the limits of a host."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import F, Q, QuerySet

from planner.specs.units import HOUR, MIB
from runners.shared.facts import HostFacts, SchedulerFacts
from webapp.accounts.models import Team, team_ids_of
from webapp.accounts.services import membership_of
from webapp.core.clock import now
from webapp.core.pace import Limit, Pace
from webapp.core.problems import BusyProblem
from webapp.hosts.models import Device, Host, Pool, RefusedMessage

DEFAULT = "default"
CPU_UUID = "cpu"


def pool_ensure(*, team: Team, slug: str = DEFAULT) -> Pool:
    """Return the team's pool of that name, created if missing."""
    return Pool.objects.get_or_create(team=team, slug=slug, defaults={"name": slug})[0]


def teams_of(pool: Pool) -> set[str]:
    """Return the ids of the teams whose jobs a pool takes: its own and those it is shared with."""
    return {pool.team_id, *pool.shared_with.values_list("pk", flat=True)}


def visible_pools(user: User | AnonymousUser) -> QuerySet[Pool]:
    """Return the pools in which one of the person's teams may launch."""
    teams = team_ids_of(user)
    accessible = Q(team__in=teams) | Q(shared_with__in=teams)
    return Pool.objects.filter(accessible).select_related("team").distinct()


def devices_sync(host: Host, facts: HostFacts) -> None:
    """Update a host's devices from its facts; missing devices stay, marked as not present.

    A host without a GPU has its processor as its only device. A host that submits to a scheduler
    has one slot per job that may be in the scheduler at once.
    """
    reported = _slots(facts.scheduler) if facts.scheduler else _hardware(facts)
    for device in reported:
        names = ("kind", "index", "name", "memory_bytes", "hardware", "unix_user")
        Device.objects.update_or_create(
            host=host,
            uuid=device.uuid,
            defaults={name: getattr(device, name) for name in names} | {"is_present": True},
        )
    missing = Device.objects.filter(~Q(uuid__in=[device.uuid for device in reported]), host=host)
    missing.update(is_present=False)


def kind_of(facts: HostFacts) -> str:
    """Return the kind of a host with these facts."""
    return facts.scheduler.kind if facts.scheduler else "agent"


def _slots(scheduler: SchedulerFacts) -> list[Device]:
    options = [f"{name} {value}" for name, value in sorted(scheduler.options.items())]
    name = ", ".join([f"One job in {scheduler.title}", *options])
    return [
        Device(kind="slot", index=index, uuid=f"slot-{index}", name=name[:120], memory_bytes=0)
        for index in range(scheduler.max_jobs)
    ]


def _hardware(facts: HostFacts) -> list[Device]:
    gpus = [
        Device(
            kind="gpu",
            index=gpu.index,
            uuid=gpu.uuid[:80],
            name=gpu.name[:120],
            memory_bytes=gpu.memory_bytes,
            hardware=gpu.uuid[:80],
            unix_user=facts.user_id,
        )
        for gpu in facts.gpus
    ]
    cpu = Device(
        kind="cpu",
        index=0,
        uuid=CPU_UUID,
        name=facts.cpu_model[:120],
        memory_bytes=facts.memory_bytes,
        hardware=facts.machine_id or "",
        unix_user=facts.user_id,
    )
    return gpus or [cpu]


# Visibility of hosts that another team shares: enough to run jobs there.
#
# The name is shown wherever a job ran; the host's page, addresses and disks are visible to its own
# team only.


SHARED_FACTS = frozenset(
    {
        "agent_version",
        "architecture",
        "cpu_count",
        "cpu_model",
        "cuda_version",
        "driver_version",
        "gpus",
        "job_memory_bytes",
        "kernel",
        "memory_bytes",
        "os",
        "packages",
        "python_version",
        "torch_cuda_version",
    }
)


def is_team_host(user: User | AnonymousUser, host: Host) -> bool:
    """Return whether a host belongs to one of the user's teams."""
    return membership_of(user, host.team) is not None


def facts_for(
    user: User | AnonymousUser, host: Host | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the facts a user may see: of a shared host, those that affect results."""
    if host is None or is_team_host(user, host):
        return dict(facts)
    return {name: value for name, value in facts.items() if name in SHARED_FACTS}


# Refused messages of hosts: stored, counted and bounded, for operators.


MAX_ROWS_PER_HOST = 100  # distinct reasons; the oldest are deleted first
MAX_REASONS_AT_ONCE = 10  # each costs three queries; the rarer ones of a batch share one row
OTHER_REASONS = "other reasons, too many for a row each"
MAX_REASON_CHARACTERS = 300
MAX_EXCERPT_CHARACTERS = 500
RefusedKind = Literal["heartbeat", "event", "stream"]


class Refusal(NamedTuple):
    """One rejected message or part of a message."""

    kind: RefusedKind
    reason: str
    excerpt: str = ""
    attempt_id: str = ""


def refusals_record(host_id: str, refusals: Iterable[Refusal]) -> None:
    """Count a host's refusals by kind and reason; store an excerpt of the last of each.

    A reason may contain a name that the host chose, so their number is limited too.
    """
    truncated = [
        each._replace(
            reason=each.reason[:MAX_REASON_CHARACTERS],
            excerpt=each.excerpt[:MAX_EXCERPT_CHARACTERS],
            attempt_id=each.attempt_id[:64],
        )
        for each in refusals
    ]
    by_reason = [list(group) for _, group in groupby(sorted(truncated, key=_key), key=_key)]
    by_reason.sort(key=len, reverse=True)
    for group in by_reason[:MAX_REASONS_AT_ONCE]:
        _count_refused(host_id, group)
    if rest := [each for group in by_reason[MAX_REASONS_AT_ONCE:] for each in group]:
        _count_refused(host_id, [each._replace(reason=OTHER_REASONS) for each in rest])


def _key(refusal: Refusal) -> tuple[str, str]:
    return refusal.kind, refusal.reason


def _count_refused(host_id: str, refusals: list[Refusal]) -> None:
    last, instant = refusals[-1], now()
    existing = RefusedMessage.objects.filter(host=host_id, kind=last.kind, reason=last.reason)
    fields = {"attempt_id": last.attempt_id, "excerpt": last.excerpt, "last_at": instant}
    if existing.update(count=F("count") + len(refusals), **fields):
        return
    RefusedMessage.objects.bulk_create(
        [
            RefusedMessage(
                host_id=host_id, kind=last.kind, reason=last.reason, count=len(refusals),
                first_at=instant, **fields,
            )
        ],
        ignore_conflicts=True,
    )  # fmt: skip
    rows = RefusedMessage.objects.filter(host=host_id)
    oldest = rows.values_list("pk", flat=True)[MAX_ROWS_PER_HOST:]
    rows.filter(pk__in=list(oldest)).delete()


# Hourly quotas on what one host may send; the excess waits on the host and is not lost.
#
# Each quota is twice the need of a host with 200 jobs that report once a second. It may be used in
# one burst and refills over an hour. Every process of the site counts separately, in memory
# (``webapp.core.pace``).


TOLD_EVERY = Limit("One refusal for the operators", 1 / 60, 1)


class Quota(NamedTuple):
    """Number of messages or bytes that one host, or one attempt, may send within an hour."""

    code: str
    whose: str
    things: str
    per_hour: int
    way_out: str

    @property
    def limit(self) -> Limit:
        """Return the quota as a rate limit: a burst of the whole quota, refilled in an hour."""
        return Limit(self.code, self.per_hour / HOUR, self.per_hour)

    @property
    def reason(self) -> str:
        """Return which quota was exceeded, in the same words for every refusal."""
        return f"{self.whose} sent more than {self.per_hour:,} {self.things} in an hour"


HEARTBEATS = Quota(
    "too_many_heartbeats", "One host", "heartbeats", 18_000,
    "Check for a second agent with this host's credential, and rotate its secrets",
)  # fmt: skip
EVENTS = Quota(
    "too_many_events", "One host", "events", 4_500_000,
    "Have its jobs report and write less often, or spread them over more hosts",
)  # fmt: skip
EVENTS_OF_ATTEMPT = Quota(
    "too_many_events_of_attempt", "One attempt", "events", 450_000,
    "Have the job report and write less often",
)  # fmt: skip
EVENT_MEBIBYTES = Quota(
    "too_many_event_bytes", "One host", "MiB of events", 8192,
    "Have its jobs write less output, or spread them over more hosts",
)  # fmt: skip


class QuotaProblem(BusyProblem):
    """A host exceeded an hourly quota; its agent keeps the rest and retries."""

    def __init__(self, quota: Quota, wait_seconds: int) -> None:
        sentence = (
            f"{quota.reason}. The remaining messages stay on the host and are sent in "
            f"{wait_seconds} s. {quota.way_out}."
        )
        super().__init__(quota.code, sentence, retry_after_seconds=wait_seconds)
        self.quota, self.wait_seconds = quota, wait_seconds


_counts = Pace()
_reports = Pace()


def keep_heartbeat(caller: str) -> None:
    """Count a heartbeat of a caller, given as the digest of its credential.

    Raises:
        QuotaProblem: the quota is exceeded; this heartbeat is not counted.
    """
    _count(HEARTBEATS, caller)


def keep_events(host_id: str, attempt_id: str, *, num_events: int, num_bytes: int) -> None:
    """Count a batch of events of an attempt that belongs to the host.

    Raises:
        QuotaProblem: a quota is exceeded.
    """
    _count(EVENTS, host_id, num_events)
    _count(EVENTS_OF_ATTEMPT, attempt_id, num_events)
    if wait := _counts.count(_IN_BYTES, host_id, num_bytes):
        raise QuotaProblem(EVENT_MEBIBYTES, wait)


def quota_refusal_record(host_id: str, problem: QuotaProblem) -> None:
    """Record an exceeded quota among a host's refused messages, at most once a minute."""
    if is_first_in_a_minute(host_id, problem):
        refusals_record(host_id, [Refusal("event", f"{problem.quota.reason}: it waits")])


def is_first_in_a_minute(caller: str, problem: QuotaProblem) -> bool:
    """Return whether this is the caller's first such refusal within a minute."""
    return not _reports.count(TOLD_EVERY, f"{problem.code} {caller}")


def forget() -> None:
    """Reset all counts."""
    _counts.forget()
    _reports.forget()


_IN_BYTES = Limit(
    EVENT_MEBIBYTES.code,
    EVENT_MEBIBYTES.per_hour * MIB / HOUR,
    EVENT_MEBIBYTES.per_hour * MIB,
)


def _count(quota: Quota, caller: str, num: int = 1) -> None:
    if wait := _counts.count(quota.limit, caller, num):
        raise QuotaProblem(quota, wait)
