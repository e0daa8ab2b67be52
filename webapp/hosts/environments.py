"""What an operator starts on a host: environments, proofs, round trips."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from csp.constants import NONE, UNSAFE_INLINE
from csp.decorators import csp
from django.contrib.auth.models import User
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from runners.jobspec import ProveSpec
from runners.prove.report import Report, render
from runners.shared.messages import MAIN, Doorbell, EnvironmentOrder, EnvironmentState
from runners.shared.redis_address import pong_key
from runners.shared.timing import scaled
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.core.outages import is_of_one_host
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.hosts.services import Contact, checks_update, contact_of
from webapp.jobs.artefacts import folder_of
from webapp.jobs.lookup import load_job
from webapp.jobs.models import Artefact, Event, Job
from webapp.jobs.services import job_create, job_submit
from webapp.live.stream import publish_host_checks

# ---------------------------------------------------------------------------
# The named environments of a host: their reported states and the operators' orders.
# ---------------------------------------------------------------------------


SAID, ORDERS = "environments", "environment_orders"  # keys of Host.checks
ACTIONS = ("build", "remove")
Findings = dict[str, Any]


@dataclass(frozen=True)
class EnvironmentRow:
    """One environment on the host's page."""

    state: EnvironmentState
    wanted: str  # pending order: "build", "remove" or ""

    @property
    def is_own(self) -> bool:
        """Return whether it is the agent's own environment, which cannot be removed."""
        return self.state.name == MAIN

    @property
    def is_built(self) -> bool:
        """Return whether a build of it is on the host's disk."""
        return self.state.stage in {"ready", "outdated"}

    @property
    def share(self) -> float | None:
        """Return the completed fraction of a running build, or None if none runs."""
        is_building = self.state.stage == "building" and self.state.total
        return self.state.done / self.state.total if is_building else None


def environments_of(host: Host) -> list[EnvironmentRow]:
    """Return the environments that a host reported, the agent's own first.

    States that another version of this server stored may not parse: they are skipped until the
    host reports them again.
    """
    orders = host.checks.get(ORDERS, {})
    states = []
    for each in host.checks.get(SAID, ()):
        with suppress(ValidationError):
            states.append(EnvironmentState.model_validate(each))
    return [EnvironmentRow(each, orders.get(each.name, {}).get("action", "")) for each in states]


def orders_of(host: Host) -> tuple[EnvironmentOrder, ...]:
    """Return the pending environment orders of a host."""
    orders: Mapping[str, Findings] = host.checks.get(ORDERS, {})
    return tuple(
        EnvironmentOrder(name=name, action=each["action"], order_id=each["order_id"])
        for name, each in orders.items()
    )


def findings_after(checks: Findings, said: Iterable[EnvironmentState]) -> Findings:
    """Return a host's checks with the reported environments and without completed orders."""
    states = list(said)
    done, names = {each.order_id for each in states}, {each.name for each in states}
    orders = {
        name: order
        for name, order in checks.get(ORDERS, {}).items()
        if name in names and order["order_id"] not in done
    }
    return {**checks, SAID: [each.model_dump(mode="json") for each in states], ORDERS: orders}


def environment_order(*, host: Host, name: str, action: str, by: str) -> None:
    """Order a host to build or remove an environment; a later order replaces this one.

    Raises:
        InvalidProblem: the agent's own environment cannot be built or removed.
        NotFoundProblem: the host reported no environment of that name.
    """
    if action not in ACTIONS or name == MAIN:
        raise InvalidProblem(
            "environment", f"The environment {name} stays as it is: the agent runs in it."
        )
    if name not in {row.state.name for row in environments_of(host)}:
        raise NotFoundProblem(
            "environment",
            f"{host.name} has no environment {name}. Its page lists the environments.",
        )
    with transaction.atomic():
        checks = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host.pk).checks
        order = {"action": action, "order_id": new_ulid(), "by": by}
        host.checks = checks_update(host.pk, **{ORDERS: {**checks.get(ORDERS, {}), name: order}})
        Event.objects.create(
            at=now(),
            team_id=host.team_id,
            kind=f"host.environment_{action}",
            subject=host.pk,
            actor=by,
            detail={"environment": name},
        )
    publish_host_checks(host)


# ---------------------------------------------------------------------------
# Proofs of a host: launched as a job on all its devices, with a report that the job leaves.
# ---------------------------------------------------------------------------


ARTEFACT, REPORT_FILE = "proof", "report.json"
MAX_REPORT_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Proof:
    """The newest proof of a host: its job, and its verdict once the report has arrived."""

    job: Job
    facts: dict[str, Any] | None


def prove_host(*, host: Host, owner: User) -> Job:
    """Queue a proof on every device of a host.

    Raises:
        Problem: the host takes no jobs, or a quota does not allow it.
    """
    job = job_create(
        team=host.team,
        owner=owner,
        host=host,
        spec=ProveSpec(),
        name=f"Proof of {host.name}",
        model_name="",
    )
    return job_submit(job=job, by=owner.get_username())


def latest_proof(host: Host) -> Proof | None:
    """Return the newest proof of a host, or None."""
    job = (
        Job.objects.filter(requested_host=host, kind="prove", deleted_at=None)
        .select_related("current_attempt")
        .order_by("-pk")
        .first()
    )
    if job is None:
        return None
    report = Artefact.objects.filter(attempt=job.current_attempt, name=ARTEFACT).first()
    return Proof(job, report.facts if report else None)


@require_GET
@csp({"default-src": [NONE], "style-src": [UNSAFE_INLINE]})  # type: ignore[arg-type]  # takes arguments of the URL, too
def proof_report(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the report of a proof, made anew from the host's data."""
    job = load_job(request, job_id)
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=ARTEFACT, is_complete=True
    ).first()
    path = folder_of(artefact) / REPORT_FILE if artefact else None
    if path is None or not path.is_file():
        raise Http404(
            "This job has no finished proof report; wait for its end or run the proof again."
        )
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise Http404("The report of this proof is too large to show; download it.")
    try:
        report = Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise Http404("The report of this proof is damaged; prove the host again.") from error
    return HttpResponse(render(report))


# ---------------------------------------------------------------------------
# Test a host's queue: time a signed ping through Redis to its worker and back.
#
# The worker pushes the ping's id to a Redis list of the host, so the time covers the signature,
# Redis, Celery, the verification on the host, and Redis again.
# ---------------------------------------------------------------------------


log = structlog.get_logger(__name__)
WAIT_SECONDS = 3.0
REST_SECONDS = scaled(10.0, least=0.5)
LONGEST_REST_SECONDS = 600.0  # each failed ping leaves a message in the queue
MAX_AT_ONCE = 50
SILENT = "no answer within {seconds:.0f} s"
NO_LIST = "the answer's key in Redis holds another kind of value; it was deleted"

Ring = Callable[[Host, Doorbell], None]


class RoundTrips:
    """Tests queues without a result yet; retries a failed one with exponential back-off."""

    def __init__(
        self, client: redis.Redis, ring: Ring, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = client
        self._ring = ring
        self._clock = clock
        self._not_before: dict[str, float] = {}
        self._rests: dict[str, float] = {}

    def step(self) -> int:
        """Test every queue that is due and return how many answered.

        Raises:
            RedisError: Redis is unavailable.
        """
        hosts = [host for host in _untested_hosts() if self._clock() >= self._due_at(host)]
        waiting = self._ping_all(hosts[:MAX_AT_ONCE])
        num_answered = 0
        deadline = self._clock() + WAIT_SECONDS
        while waiting and (left := deadline - self._clock()) > 0:
            num_answered += self._take_one(waiting, left)
        for host, _, _ in waiting.values():
            self._back_off(host)
            _store_result(host, {"problem": SILENT.format(seconds=WAIT_SECONDS)})
        return num_answered

    def _due_at(self, host: Host) -> float:
        """Return when to test a host: at once after a person requested it."""
        return self._not_before.get(host.pk, 0.0) if "queue" in host.checks else 0.0

    def _back_off(self, host: Host) -> None:
        rest = self._rests.get(host.pk, REST_SECONDS) if "queue" in host.checks else REST_SECONDS
        self._not_before[host.pk] = self._clock() + rest
        self._rests[host.pk] = min(2 * rest, LONGEST_REST_SECONDS)

    def _ping_all(self, hosts: Sequence[Host]) -> dict[str, tuple[Host, str, float]]:
        """Ping the hosts; return host, ping id and send time by the key of the answer."""
        pings = {}
        for host in hosts:
            ping = Doorbell(command_id=new_ulid(), kind="ping", is_echoed=True)
            try:
                self._ring(host, ping)
            except Exception as error:  # noqa: BLE001 (whatever a broker client raises)
                self._back_off(host)
                _store_result(host, {"problem": f"the ping could not be sent: {error}"})
                continue
            pings[pong_key(host.pk)] = (host, ping.command_id, self._clock())
        return pings

    def _take_one(self, waiting: dict[str, tuple[Host, str, float]], left: float) -> int:
        """Take one answer and return 1 if it was expected; ignore answers to earlier pings."""
        try:
            answer: Any = self._redis.blpop(list(waiting), timeout=min(left, 1.0))
        except redis.ResponseError as error:
            if not is_of_one_host(error):
                raise
            self._drop_unreadable(waiting)
            return 0
        if answer is None:
            return 0
        key, ping_id = (_text(part) for part in answer)
        host, expected, sent_at = waiting[key]
        if ping_id != expected:
            return 0
        del waiting[key]
        _store_result(host, {"seconds": self._clock() - sent_at})
        return 1

    def _drop_unreadable(self, waiting: dict[str, tuple[Host, str, float]]) -> None:
        """Drop hosts whose answer key is not a list, and delete that key."""
        for key, (host, _, _) in list(waiting.items()):
            try:
                self._redis.llen(key)
            except redis.ResponseError:
                del waiting[key]
                self._redis.delete(key)
                self._back_off(host)
                _store_result(host, {"problem": NO_LIST})


def _untested_hosts() -> list[Host]:
    """Return the hosts in contact whose queue has no measured round trip yet."""
    enrolled = Host.objects.filter(kind__in=RUNS_JOBS, checks__has_redis=True)
    rows = enrolled.exclude(credential_hash="").order_by("pk")
    return [
        host
        for host in rows.filter(checks__queue__seconds__isnull=True)
        if contact_of(host) is Contact.LIVE
    ]


def _store_result(host: Host, result: dict[str, Any]) -> None:
    if host.checks.get("queue") == result:
        return
    host.checks = checks_update(host.pk, queue=result)
    publish_host_checks(host)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
