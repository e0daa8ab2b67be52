"""Commands to hosts until they are acknowledged, claims of attempts, and deadlines."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import structlog
from celery import Celery
from django import db
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport.redis import PrefixedStrictRedis
from pydantic import SecretStr

from runners.host.app import QUEUE, sign
from runners.host.redis_access import celery_options
from runners.hub.repository import COMMIT
from runners.hub.settings import SOURCES
from runners.jobspec.compress import LIBRARY_DTYPES
from runners.jobspec.serve import EngineOptions
from runners.launchers.launch import engine_of, environment_of
from runners.shared.messages import (
    ClaimReply,
    ClaimRequest,
    Doorbell,
    ExitRecord,
    Needs,
    PreflightCheck,
    RunRequest,
)
from runners.shared.reasons import Reason
from runners.shared.redis_address import key_prefix
from runners.shared.timing import (
    CLAIM_TIMEOUT_SECONDS,
    LONGEST_GAP_SECONDS,
    WORKER_PING_SECONDS,
    scale_duration,
)
from webapp.accounts.secrets import secrets_open
from webapp.audit.models import Event
from webapp.core import outages
from webapp.core.clock import now, now_ms
from webapp.core.problems import BusyProblem, ConflictProblem
from webapp.core.vault import VaultError
from webapp.hosts.epoch import RESTORED, is_restored
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, Host, Pool
from webapp.hosts.services import (
    ClockWatch,
    Contact,
    command_key,
    contact_of,
)
from webapp.jobs.allocation import allocate_pool, send_back
from webapp.jobs.cached_models import uses_in
from webapp.jobs.gangs import (
    all_claimed,
    devices_release,
    gang_of,
    member_ended,
    members_of,
    missing_words,
    place_move,
    release_unstarted,
)
from webapp.jobs.models import LIVE_STATES, Allocation, Attempt, Command, Job, JobState
from webapp.jobs.transitions import transition
from webapp.modelhub.remote_code import trusted_among

# ---------------------------------------------------------------------------
# Wake hosts: send due commands from the outbox as signed Celery messages.
#
# A command is repeated until the host acknowledges it. Messages only reduce latency: heartbeats
# carry the same commands.
# ---------------------------------------------------------------------------


log = structlog.get_logger(__name__)
BATCH = 100
LONGEST_REST_SECONDS = scale_duration(60, least=2)
DEAD_AFTER = timedelta(hours=1)
TASK_PREFIX = "runners."
ALL_HOSTS = "host:"  # common prefix of all queues
# No connection check before each message: it would double the cost of a ping, and a message
# that meets a dead connection is sent again over a new one.
TRANSPORT = {
    "global_keyprefix": ALL_HOSTS,
    "max_retries": 1,
    "interval_start": 0,
    "socket_timeout": 2,
    "socket_connect_timeout": 1,
    "health_check_interval": 0,
}

Ring = Callable[[Host, Doorbell], None]


@cache
def celery_app(url: str) -> Celery:
    """Return a Celery app that only publishes."""
    app = Celery("slipway-control")
    app.conf.update(
        celery_options(url, settings.REDIS_CA),
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_send_sent_event=False,
        task_default_queue=QUEUE,
    )
    return app


class Publisher:
    """One broker connection for the queues of all hosts, for one thread at a time.

    The queues differ only in their key prefix. A connection per host would cost a socket, a
    handshake and a log-in each, and a thousand hosts exceed a process's file limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def send(self, url: str, prefix: str, task: str, words: Sequence[str]) -> None:
        """Put a task into the queue below ``prefix``; retry once if a kept connection is dead.

        Raises:
            OperationalError: the broker is unreachable.
        """
        with self._lock:
            is_new = url not in self._connections
            try:
                self._send(url, prefix, task, words)
            except OperationalError:
                if connection := self._connections.pop(url, None):
                    connection.release()
                if is_new:
                    raise
                self._send(url, prefix, task, words)

    def _send(self, url: str, prefix: str, task: str, words: Sequence[str]) -> None:
        app = celery_app(url)
        if url not in self._connections:
            self._connections[url] = app.connection_for_write(transport_options=TRANSPORT)
        connection = self._connections[url]
        channel: Any = connection.default_channel  # Redis's; its clients write below the prefix
        channel.Client = partial(PrefixedStrictRedis, global_keyprefix=prefix)
        # kombu's own retry would create a channel without the prefix.
        app.send_task(task, args=list(words), queue=QUEUE, connection=connection, retry=False)


_publisher = Publisher()


def ring(host: Host, doorbell: Doorbell) -> None:
    """Put a signed message into the host's queue.

    Raises:
        OperationalError: the broker is unreachable.
    """
    # In the host's time, from its last heartbeat: it refuses messages too old or in the future.
    host_time = time.time() + (host.clock_offset_ms or 0) / 1000
    signed = sign(doorbell, host_id=host.pk, key=command_key(host), now=host_time)
    url = outages.url_for(outages.DISPATCHER)
    _publisher.send(url, key_prefix(host.pk), TASK_PREFIX + doorbell.kind, signed)


def dispatch_due(ring_host: Ring = ring) -> int:
    """Send every due command and return the number sent.

    Sending does not complete a command: it is repeated with exponential backoff until a claim,
    an event or an exit acknowledges it.
    """
    due = Command.objects.filter(state__in=["new", "sent"], next_at__lte=now())
    rung = 0
    for command in due.select_related("host", "attempt").order_by("pk")[:BATCH]:
        failure = _send_command(command, ring_host)
        if failure is not None and not outages.is_of_one_host(failure):
            break  # the broker is unreachable: the other sends would fail too
        rung += failure is None
    return rung


def _send_command(command: Command, ring_host: Ring) -> Exception | None:
    """Send one command and return the error, if any."""
    attempt = command.attempt
    doorbell = Doorbell.model_validate(
        {
            "command_id": command.pk,
            "kind": command.kind,
            "attempt_id": attempt.pk if attempt else None,
            "fence": attempt.fence if attempt else None,
        }
    )
    failure = _try_ring(ring_host, command.host, doorbell)
    seconds = scale_duration(2 ** min(command.tries, 10), least=0.25)
    delay = timedelta(seconds=min(seconds, LONGEST_REST_SECONDS))
    Command.objects.filter(pk=command.pk, state__in=["new", "sent"]).update(
        state=command.state if failure else "sent",
        tries=F("tries") + 1,
        next_at=now() + delay,
    )
    return failure


def _try_ring(ring_host: Ring, host: Host, doorbell: Doorbell) -> Exception | None:
    try:
        ring_host(host, doorbell)
    except Exception as error:  # noqa: BLE001 (whatever a broker client raises, beats carry on)
        log.info("doorbell waits", host=host.slug, kind=doorbell.kind, cause=str(error))
        return error
    return None


def ping_hosts(ring_host: Ring = ring) -> int:
    """Ping every host in contact, so that its worker notices missing messages."""
    enrolled = Host.objects.defer(*DOCUMENTS).exclude(credential_hash="")
    hosts = [host for host in enrolled if _is_reachable(host)]
    return sum(
        _try_ring(ring_host, host, Doorbell(command_id=f"ping-{host.pk}", kind="ping")) is None
        for host in hosts
    )


def _is_reachable(host: Host) -> bool:
    return contact_of(host) in {Contact.LIVE, Contact.DEGRADED}


def expire_stuck_commands() -> int:
    """Give up commands whose attempt has ended or that no host acknowledged for an hour."""
    open_commands = Command.objects.filter(state__in=["new", "sent"])
    over = open_commands.filter(attempt__ended_at__isnull=False).update(state="dead")
    stale = open_commands.filter(created_at__lt=now() - DEAD_AFTER).update(state="dead")
    return over + stale


class Dispatcher:
    """The dispatcher loop's body: send due commands, and ping hosts once a minute."""

    def __init__(
        self, ring_host: Ring = ring, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ring = ring_host
        self._clock = clock
        self._pinged_at = clock() - WORKER_PING_SECONDS + 5.0

    def step(self) -> int:
        """Run one round and return the number of messages sent."""
        rung = dispatch_due(self._ring)
        if self._clock() - self._pinged_at >= WORKER_PING_SECONDS:
            self._pinged_at = self._clock()
            rung += ping_hosts(self._ring)
        return rung


# ---------------------------------------------------------------------------
# Claims of attempts by hosts, after the host's preflight: exactly one receives the spec.
# ---------------------------------------------------------------------------


# The host's preflight before a claim: the requested checks and the effect of their result.


STORED = frozenset({"folder", "artefact", "hub"})  # sources of models that the host checks


def needs_of(attempt: Attempt) -> Needs:
    """Return what an attempt requires of its host."""
    spec: dict[str, Any] = attempt.job.spec
    peak = attempt.job.prediction.get("peak_memory_bytes") or {}
    model, teacher = spec.get("model") or {}, spec.get("teacher") or {}
    allocations = Allocation.objects.filter(attempt=attempt, device__kind="gpu", released_at=None)
    gpus = tuple(allocations.order_by("device__index").values_list("device__uuid", flat=True))
    return Needs.model_validate(
        {
            "kind": attempt.job.kind,
            "weight_dtype": _dtype(spec),
            "compute_dtype": str(spec.get("compute_dtype") or ""),
            "attention": str(spec.get("attention") or ""),
            "environment": environment_of(spec),
            "memory_bytes": int(peak.get("low") or peak.get("value") or 0),
            "context_tokens": _context(spec),
            "model": model if model.get("source") in STORED else None,
            "teacher": teacher if teacher.get("source") in STORED else None,
            "data": _data_sets(spec.get("data") or {}),
            "gpus": gpus,
            **_disaggregation(spec.get("engine_options") or {}),
            "compiles": _compiles(spec),
            # Of several hosts one is enough that keeps the checkpoint: the job itself looks.
            "resume_from": spec.get("resume_from") or "" if attempt.job.num_hosts == 1 else "",
            "trusted_code": _trusted_code(attempt.job, attempt),
            "ports": [port for port in (attempt.master_port, spec.get("port")) if port],
        }
    )


def _data_sets(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data sets of the Hub among a training's sources."""
    sources = [part["data"] for part in data.get("parts", ())] or [data]
    return [each for each in sources if each.get("source") == "hub"]


def _context(spec: dict[str, Any]) -> int:
    """Return the tokens of an endpoint's KV cache, if its host counts them for a GGUF file.

    0: the model's length sets them.
    """
    engine = engine_of(spec)
    if engine is None or "gguf" not in engine.weights:
        return 0
    per_slot = int(spec.get("max_length") or 0)
    return int(spec.get("kv_cache_tokens") or per_slot * int(spec.get("max_concurrency") or 0))


def _compiles(spec: dict[str, Any]) -> bool:
    """Return whether a job compiles kernels at its start."""
    is_requested = spec.get("compiled_step") or spec.get("compiled")
    is_on_cpu = (spec.get("engine_options") or {}).get("device") == "cpu"  # vLLM: torch.compile
    return bool(is_requested or is_on_cpu or spec.get("attention") == "flex")


def _disaggregation(options: dict[str, Any]) -> dict[str, Any]:
    """Return the requirements of disaggregated engines: GPUs and a transfer package."""
    if not options.get("split"):
        return {}
    return {"num_gpus": EngineOptions.model_validate(options).num_devices, "packages": ["nixl"]}


def _dtype(spec: dict[str, Any]) -> str:
    if (spec.get("lora") or {}).get("base_dtype") == "nf4":  # of the frozen weights
        return "int4"
    return str(spec.get("weight_dtype") or LIBRARY_DTYPES.get(spec.get("method", ""), ""))


def details(checks: Sequence[PreflightCheck]) -> dict[str, Any]:
    """Return the checks as the detail of an event; empty if there are none."""
    return {"checks": [check.model_dump(mode="json") for check in checks]} if checks else {}


def only_port_is_taken(request: ClaimRequest) -> bool:
    """Return whether the reserved port is the only failed check."""
    return {check.name for check in request.checks if not check.ok} == {"ports"}


def give_back(*, attempt_id: str, host: Host, request: ClaimRequest) -> bool:
    """Requeue a job whose host failed its preflight, with all checks; False if it passed.

    The attempt ends: the host marks its folder as rejected, and the next attempt has a new one.
    """
    if all(check.ok for check in request.checks):
        return False
    claimed = Attempt.objects.filter(pk=attempt_id, host=host, claimed_at__isnull=False)
    if claimed.filter(Q(leader__isnull=False) | Q(master_port__isnull=False)).exists():
        return False  # already claimed; it polls whether the other hosts have too
    with transaction.atomic():
        attempt = (
            Attempt.objects.filter(
                pk=attempt_id, host=host, fence=request.fence, claimed_at=None, ended_at=None
            )
            .select_related("leader")
            .first()
        )
        if attempt is None:
            return True
        job = Job.objects.select_for_update().get(pk=attempt.job_id)
        if job.state == JobState.PREFLIGHT:
            failed = details(request.checks)["checks"]
            leader = attempt.leader or attempt
            send_back(job, failed, attempt=leader, actor=f"host:{host.slug}")
    return True


def attempt_claim(*, attempt_id: str, host: Host, request: ClaimRequest) -> ClaimReply:
    """Return the run request of an attempt to the claim that owns it; repeated calls are safe.

    A host whose preflight failed returns the attempt with its claim; if only the gang's port is
    in use, another port is reserved. A gang may start once every host has claimed.

    Raises:
        ConflictProblem: another claim has the attempt, or the attempt was returned or must not
            run any more.
        BusyProblem: the database is a restored backup.
    """
    if is_restored():
        raise BusyProblem("restored", RESTORED, retry_after_seconds=30)
    if leader := _leader_with_new_port(attempt_id, host, request):
        return ClaimReply(request=_run_request(leader.job, leader), may_start=False)
    if give_back(attempt_id=attempt_id, host=host, request=request):
        raise ConflictProblem("preflight_failed", "The attempt was given back to the queue.")
    with transaction.atomic():
        job = Job.objects.select_for_update().filter(attempts=attempt_id, attempts__host=host)
        locked = job.first()
        if locked is None or not _claim(attempt_id, request):
            return _reply(_claimed_before(attempt_id, host, request))
        attempt = Attempt.objects.get(pk=attempt_id)
        attempt.facts = _facts_of_attempt(host.facts)
        attempt.save(update_fields=["facts"])
        actor = f"host:{host.slug}"
        detail = details(request.checks)
        leader = attempt.head
        if all_claimed(leader):
            transition(locked, JobState.STARTING, actor=actor, attempt=leader, detail=detail)
        Command.objects.filter(attempt=attempt, kind="start").update(state="acked")
        return _reply(attempt)


OF_OTHERS = frozenset({"other_jobs", "num_other_jobs"})


def _facts_of_attempt(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what an attempt keeps of its host: all but the jobs that others ran there then."""
    if not (scheduler := facts.get("scheduler")):
        return facts
    kept = {name: value for name, value in scheduler.items() if name not in OF_OTHERS}
    return {**facts, "scheduler": kept}


def _leader_with_new_port(attempt_id: str, host: Host, request: ClaimRequest) -> Attempt | None:
    """Return a gang's leader after reserving another port, if the first one was in use."""
    if not only_port_is_taken(request):
        return None
    with transaction.atomic():
        Job.objects.select_for_update().filter(attempts=attempt_id).first()
        attempts = Attempt.objects.filter(pk=attempt_id, host=host, fence=request.fence)
        leader = attempts.filter(master_port__isnull=False, ended_at=None).first()
        if leader is None or not place_move(leader=leader):
            return None
        leader.refresh_from_db()
        return leader


def _reply(attempt: Attempt) -> ClaimReply:
    may_start = attempt.job.state != JobState.PREFLIGHT
    return ClaimReply(request=_run_request(attempt.job, attempt), may_start=may_start)


def _claim(attempt_id: str, request: ClaimRequest) -> bool:
    """Claim with one guarded UPDATE, so that two claims cannot both succeed."""
    unclaimed = Attempt.objects.filter(
        pk=attempt_id,
        fence=request.fence,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
    )
    current = unclaimed.filter(
        Q(job__current_attempt=attempt_id) | Q(job__current_attempt=F("leader"))
    )
    rows = current.update(claimed_at=now(), claim_id=request.claim_id, boot_id=request.boot_id)
    return bool(rows)


def _claimed_before(attempt_id: str, host: Host, request: ClaimRequest) -> Attempt:
    """Return the attempt to the same claim again (its reply was lost); refuse any other claim."""
    attempt = (
        Attempt.objects.filter(pk=attempt_id, host=host, fence=request.fence)
        .select_related("job")
        .first()
    )
    if attempt is None:
        raise ConflictProblem("unknown_attempt", "This host has no such attempt with this fence.")
    if attempt.claim_id != request.claim_id or not attempt.claim_id:
        raise ConflictProblem(
            "not_claimable", "The attempt was claimed by another folder or is not to be run."
        )
    if attempt.ended_at is not None and attempt.started_at is None and not attempt.exit_record:
        raise ConflictProblem("not_claimable", "The attempt was withdrawn before it started.")
    return attempt


def _run_request(job: Job, attempt: Attempt) -> RunRequest:
    return RunRequest.model_validate(
        {
            "attempt_id": attempt.pk,
            "job_id": job.pk,
            "number": attempt.number,
            "fence": attempt.fence,
            "spec": job.spec,
            "devices": [
                {
                    "kind": allocation.device.kind,
                    "index": allocation.device.index,
                    "uuid": allocation.device.uuid,
                }
                for allocation in attempt.allocations.select_related("device")
            ],
            "max_duration_seconds": job.max_duration_seconds,
            "gang": gang_of(attempt),
            "trusted_code": _trusted_code(job, attempt),
        }
    )


def _trusted_code(job: Job, attempt: Attempt) -> tuple[str, ...]:
    """Return the models of a job whose own code may run, as administrators say now.

    What they allow are commits of the Hugging Face Hub: a model of another hub has no part in it.
    """
    without = [each.name for each in SOURCES.values() if not each.runs_own_code]
    uses = uses_in(job.spec, but_hubs=without)
    at_commits = {use.key for use in uses if COMMIT.fullmatch(use.revision)}
    return trusted_among(at_commits, {job.team_id, attempt.host.team_id}) if at_commits else ()


def attempt_secrets(run: RunRequest) -> dict[str, SecretStr]:
    """Return the secrets of a claimed attempt, and record that they were handed out.

    Secrets that cannot be decrypted are left out: the host then refuses the attempt and names
    the missing secret.
    """
    if not run.spec.secrets:
        return {}
    job = Job.objects.get(pk=run.job_id)
    try:
        opened = secrets_open(team_id=job.team_id, names=run.spec.secrets)
    except VaultError as error:
        log.warning("secrets do not open", job=job.pk, why=str(error))
        return {}
    Event.objects.get_or_create(  # idempotent: the claim is repeated if its reply was lost
        kind="job.secrets",
        subject=job.pk,
        attempt_id=run.attempt_id,
        defaults={
            "at": now(),
            "team_id": job.team_id,
            "actor": "system:claims",
            "detail": {"names": sorted(opened)},
        },
    )
    return {name: SecretStr(value) for name, value in opened.items()}


# ---------------------------------------------------------------------------
# Ends of attempts without a report: not claimed in time, or missing from heartbeats.
# ---------------------------------------------------------------------------


# End claimed attempts that are missing from two consecutive heartbeats of their host.


GRACE_BEATS = 2
Row = TypeVar("Row", bound=db.models.Model)
Outcome = TypeVar("Outcome")


def by_itself(act: Callable[[Row], Outcome], row: Row) -> Outcome | None:
    """Return the result of an action on a row, or None if it fails, so that the others go on.

    Raises:
        OperationalError, InterfaceError: the database is unavailable; no row is at fault.
    """
    try:
        return act(row)
    except (db.OperationalError, db.InterfaceError):
        raise
    except Exception:
        log.exception("failed by itself", what=act.__name__.strip("_"), row=row.pk)
        return None


def end_unknown_attempts(seen: Mapping[str, Collection[str]]) -> list[Attempt]:
    """Count heartbeats that miss a claimed attempt, and end those missed too often.

    ``seen`` maps host ids to the attempts found on the host's disk. Only received heartbeats
    count; a silent host loses no attempt.
    """
    claimed = Attempt.objects.filter(
        Q(job__state__in=LIVE_STATES) | Q(job__num_hosts__gt=1),
        host__in=seen,
        claimed_at__isnull=False,
        ended_at=None,
    )
    missed: list[Attempt] = []
    present: list[Attempt] = []
    for attempt in claimed.select_related("job"):
        (present if attempt.pk in seen[attempt.host_id] else missed).append(attempt)
    if recovered := [attempt.pk for attempt in present if attempt.missed_beats]:
        Attempt.objects.filter(pk__in=recovered).update(missed_beats=0)
    if missed:
        rows = Attempt.objects.filter(pk__in=[attempt.pk for attempt in missed])
        rows.update(missed_beats=F("missed_beats") + 1)
    lost = [each for each in missed if each.missed_beats >= GRACE_BEATS]
    return [each for each in lost if by_itself(_end_lost, each)]


def _end_lost(attempt: Attempt) -> bool:
    reason = Reason.SUPERVISOR_LOST if attempt.acked_seq else Reason.NEVER_STARTED
    if attempt.job.is_shared_out:
        record = ExitRecord(
            exit_code=None, signal=None, reason=reason, by="reaper",
            started_at_ms=None, ended_at_ms=now_ms(),
        )  # fmt: skip
        with transaction.atomic():
            Job.objects.select_for_update().get(pk=attempt.job_id)
            attempt.ended_at, attempt.exit_record = now(), record.model_dump(mode="json")
            attempt.save(update_fields=["ended_at", "exit_record"])
            devices_release(attempt)
            member_ended(attempt, record)
        return True
    with transaction.atomic():
        moved = transition(
            attempt.job, JobState.ERROR, actor="system:reconcile", attempt=attempt, reason=reason
        )
        if moved:
            Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
            devices_release(attempt)
    return moved


CLAIM_TIMEOUT = timedelta(seconds=CLAIM_TIMEOUT_SECONDS)


def allocate_all() -> list[Job]:
    """Allocate in every pool with queued jobs; return the jobs that received devices."""
    waiting = Pool.objects.filter(jobs__state=JobState.QUEUED, jobs__deleted_at=None).distinct()
    return allocate_each(waiting)


def allocate_each(pools: Iterable[Pool]) -> list[Job]:
    """Allocate in pools, each by itself; return the jobs that received devices."""
    return [job for pool in pools for job in by_itself(allocate_pool, pool) or ()]


class StartDeadline:
    """End jobs that hosts in contact left unclaimed; a silent host ends none.

    Counts only hosts in contact for the whole timeout: after a gap of the host or of this
    server, or a jump of its clock, the timeout starts again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._looked_at = clock()
        self._heard_since: dict[str, float] = {}

    def step(self) -> list[Job]:
        """End overdue jobs and return them."""
        instant = self._clock()
        if self._watch.jump_seconds() or instant - self._looked_at > LONGEST_GAP_SECONDS:
            self._heard_since.clear()
        self._looked_at = instant
        hosts = Host.objects.filter(kind__in=RUNS_JOBS).only("last_seen_at")
        reachable = [host.pk for host in hosts if contact_of(host) is Contact.LIVE]
        self._heard_since = {pk: self._heard_since.get(pk, instant) for pk in reachable}
        timeout = CLAIM_TIMEOUT_SECONDS
        return end_unclaimed(
            [pk for pk, since in self._heard_since.items() if instant - since >= timeout]
        )


def end_unclaimed(hosts: Collection[str] | None = None) -> list[Job]:
    """End jobs that their hosts did not all claim in time; later claims are refused.

    With ``hosts``, only jobs with a part on one of them. A gang does not start while a claim is
    missing, so that a silent host no longer blocks the others.
    """
    waiting = Job.objects.filter(state=JobState.PREFLIGHT).select_related("current_attempt")
    unclaimed = [job for job in waiting if hosts is None or _has_part(job, hosts)]
    return [job for job in unclaimed if by_itself(_end_if_overdue, job)]


def _has_part(job: Job, hosts: Collection[str]) -> bool:
    leader = job.current_attempt
    return leader is not None and any(each.host_id in hosts for each in members_of(leader))


def _end_if_overdue(job: Job) -> bool:
    return _is_overdue(job) and _end(job)


def _is_overdue(job: Job) -> bool:
    since = (
        Event.objects.filter(kind="job.state", subject=job.pk, to_state=JobState.PREFLIGHT)
        .order_by("-id")
        .values_list("at", flat=True)
        .first()
    )
    return since is not None and now() - since > CLAIM_TIMEOUT


def _end(job: Job) -> bool:
    attempt = job.current_attempt
    if attempt is None:
        return False
    with transaction.atomic():
        moved = transition(
            job,
            JobState.ERROR,
            actor="system:ticker",
            attempt=attempt,
            reason=Reason.START_TIMEOUT,
            detail={"sentence": missing_words(attempt)},
        )
        if moved:
            release_unstarted(attempt)
    return moved
