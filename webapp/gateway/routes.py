"""What a gateway knows of keys and deployments: read beside the requests, never for one.

A thread reads the database and publishes a snapshot; requests look into it. While the database
does not answer, the last snapshot stays.
"""

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import structlog
from django.db import DatabaseError, close_old_connections
from django.db.models.functions import Coalesce

from runners.shared.timing import scale_duration
from webapp.accounts.models import Membership, Role
from webapp.accounts.services import is_at_least
from webapp.core.clock import now
from webapp.deployments.models import (
    Deployment,
    EarlierSecret,
    GatewayLoad,
    Replica,
    ServingKey,
)
from webapp.deployments.services import deployment_wake, reachable
from webapp.deployments.states import DeploymentState, DeploymentView, views_of
from webapp.deployments.usage import tokens_used
from webapp.jobs.endpoints import playground_key
from webapp.jobs.models import Job

REFRESH_SECONDS = scale_duration(1.0, least=0.2)
FORGOTTEN = timedelta(hours=1.0)  # what a gateway reported that is gone
WAKE_SECONDS = 2.0  # between two wakes of one deployment, however many requests ask
log = structlog.get_logger(__name__)


class Target(NamedTuple):
    """A replica that takes requests: its host, the attempt there, and this server's key to it."""

    replica_id: str
    host_id: str
    attempt_id: str
    key: str


@dataclass(frozen=True)
class Route:
    """A deployment as requests see it.

    ``adapters`` are what its jobs serve beside its model, ``aliases`` its further names.
    """

    id: str
    team_id: str
    name: str
    state: DeploymentState
    created_at: datetime
    problem: str = ""
    next_try_at: datetime | None = None
    seconds_to_go: float | None = None
    load_seconds: float | None = None
    targets: tuple[Target, ...] = ()
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_scaled: bool = False  # replicas are added by its requests
    fallbacks: tuple[str, ...] = ()  # names of deployments that answer when it cannot
    has_chat_template: bool | None = None  # None: it was never loaded, or its host does not say


@dataclass(frozen=True)
class Key:
    """A client's key with its limits; ``used`` are the tokens that the database has, by period."""

    id: str
    team_id: str
    model_names: frozenset[str]
    requests_per_minute: int | None
    max_concurrency: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    hold_seconds: float
    expires_at: datetime | None
    used: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def opens(self, name: str) -> bool:
        """Return whether the key is for a deployment of this name."""
        return not self.model_names or name in self.model_names


@dataclass(frozen=True)
class Snapshot:
    """All keys by the digests of their secrets, and all deployments by team and each name."""

    keys: Mapping[str, Key] = field(default_factory=lambda: MappingProxyType({}))
    routes: Mapping[tuple[str, str], Route] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def key_ids(self) -> frozenset[str]:
        """Return the ids of the keys."""
        return frozenset(each.id for each in self.keys.values())

    def route_of(self, key: Key, name: str) -> Route | None:
        """Return the deployment of a key's team by a name, or that before an adapter's name."""
        names = (name, name.partition("/")[0])
        found = (self.routes.get((key.team_id, each)) for each in names)
        return next((each for each in found if each is not None), None)

    def routes_of(self, key: Key) -> list[Route]:
        """Return the deployments that a key opens, by name."""
        found = {each.name: each for (team, _), each in self.routes.items() if team == key.team_id}
        return [each for name, each in sorted(found.items()) if key.opens(name)]

    def with_fallbacks(self, key: Key, route: Route) -> list[Route]:
        """Return a deployment and those that a key opens of its fall-backs, in their order."""
        if not route.fallbacks:
            return [route]

        def after(name: str) -> tuple[str, ...]:
            found = self.routes.get((route.team_id, name))
            return found.fallbacks if found is not None else ()

        names = reachable(route.name, after)[1:]
        found = (self.routes.get((route.team_id, each)) for each in names)
        others = {each.id: each for each in found if each is not None and key.opens(each.name)}
        return list(({route.id: route} | others).values())


def load_snapshot(used: Mapping[str, Mapping[str, int]]) -> Snapshot:
    """Return what the database says; ``used`` are the tokens by key and period."""
    rows = Deployment.objects.filter(deleted_at=None).only(
        "team", "name", "aliases", "idle_seconds", "is_paused", "asked_at", "problem", "failed_at",
        "failures", "loads", "created_at", "max_replicas", "fallbacks", "has_chat_template",
    )  # fmt: skip
    routes: dict[tuple[str, str], Route] = {}
    replicas = list(Replica.objects.live())
    specs = _specs(replicas)
    for view in views_of(list(rows), replicas):
        try:
            route = _route(view, specs)
        except (AttributeError, LookupError, TypeError, ValueError):  # the others stay served
            log.exception("a deployment has no route", deployment=view.deployment.pk)
            continue
        for name in route.aliases:
            routes.setdefault((route.team_id, name), route)
        routes[route.team_id, route.name] = route
    instant, members = now(), _members()
    keys = {
        row.digest: Key(
            row.pk,
            row.team_id,
            frozenset(row.model_names),
            row.requests_per_minute,
            row.max_concurrency,
            row.tokens_per_day,
            row.tokens_per_month,
            row.hold_seconds,
            row.expires_at,
            used.get(row.pk, {}),
        )
        for row in ServingKey.objects.filter(revoked_at=None)
        if (row.expires_at is None or row.expires_at > instant)
        and (row.is_service or (row.team_id, row.owner_id) in members)
    }
    by_id = {each.id: each for each in keys.values()}
    for digest, key_id, until in _earlier_secrets(instant):
        if key := by_id.get(key_id):
            ends = min(until, key.expires_at or until)  # also while the database does not answer
            keys.setdefault(digest, replace(key, expires_at=ends))
    return Snapshot(keys, routes)


def _earlier_secrets(instant: datetime) -> Iterable[tuple[str, str, datetime]]:
    """Return the digests of rotated keys' earlier secrets that still open, their keys and ends."""
    rows = EarlierSecret.objects.filter(valid_until__gt=instant, key__revoked_at=None)
    return rows.values_list("digest", "key", "valid_until")


def _members() -> set[tuple[str, int | None]]:
    """Return the teams and active accounts whose keys open anything: practitioners and above."""
    roles = [role for role in Role if is_at_least(role, Role.PRACTITIONER)]
    rows = Membership.objects.filter(role__in=roles, user__is_active=True)
    return set(rows.values_list("team", "user"))


class Served(NamedTuple):
    """What requests need of a job's document."""

    key_hashes: tuple[str, ...]
    adapters: tuple[str, ...]


def _specs(replicas: Iterable[Replica]) -> dict[str, Served]:
    """Return what requests need of the jobs of replicas, by job."""
    rows = Job.objects.filter(pk__in=[each.job_id for each in replicas])
    found = rows.order_by().values_list("pk", "spec__key_hashes", "spec__adapters")
    return {
        key: Served(tuple(hashes or ("",)), tuple(each["name"] for each in adapters or ()))
        for key, hashes, adapters in found
    }


def _route(view: DeploymentView, specs: Mapping[str, Served]) -> Route:
    row = view.deployment
    return Route(
        row.pk,
        row.team_id,
        row.name,
        view.state,
        row.created_at,
        row.problem,
        view.next_try_at,
        view.seconds_to_go,
        view.load_seconds,
        tuple(_target(each, specs[each.job_id]) for each in view.serving),
        specs[view.serving[0].job_id].adapters if view.serving else (),
        tuple(row.aliases),
        row.max_replicas > 1,
        tuple(row.fallbacks),
        row.has_chat_template,
    )


def _target(replica: Replica, served: Served) -> Target:
    attempt = replica.job.current_attempt
    if attempt is None:
        raise ValueError(replica.pk)  # a running job has one
    return Target(replica.pk, attempt.host_id, attempt.pk, playground_key(served.key_hashes[0]))


class Routes:
    """The current snapshot, and the thread that renews it.

    Another thread stores which deployments have requests at their replicas, so that one without
    any can give way to another: not the first one, for which a slow database may take many
    seconds, in which a busy deployment would look idle. Others carry out the wakes that requests
    ask for.
    """

    def __init__(self, load: Callable[..., Snapshot] = load_snapshot) -> None:
        self.snapshot = Snapshot()
        # Runs around each look: tokens that are counted before it are in the snapshot after it.
        self.while_read: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_known = False
        self._load = load
        self._num_begun, self._num_read = 0, 0  # looks at the database
        self._soon, self._stop = threading.Event(), threading.Event()
        self._waking: set[str] = set()
        self._woken_at: dict[str, float] = {}
        self._wakers = ThreadPoolExecutor(4, "wakes")  # a plan or the Hub may be slow
        self._open: Counter[str] = Counter()  # requests, by replica
        self._ended: set[str] = set()  # replicas of which one ended since the last report
        self._silent: set[str] = set()  # replicas that took no connection when they last should
        self._id = secrets.token_hex(16)
        self._load_of: Counter[str] = Counter()  # requests, also held ones, by deployment
        self._reported: set[str] = set()  # deployments with requests at the last report
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed, self._keys_changed = asyncio.Event(), asyncio.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=arguments, name=name, daemon=True)
            for name, *arguments in (
                ("routes", self.refresh, self._soon, "routes are not renewed"),
                ("use", self.report, self._stop, "use is not stored"),
            )
        ]

    def start(self) -> None:
        """Read from now on; snapshots are announced in the running event loop."""
        self._loop = asyncio.get_running_loop()
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """End the threads."""
        self._wakers.shutdown(wait=False, cancel_futures=True)
        self._stop.set()
        self._soon.set()

    async def change(self, seconds: float) -> None:
        """Wait for the next snapshot, at most for so long."""
        changed = self._changed
        waiting = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait((waiting,), timeout=seconds)
        finally:
            waiting.cancel()

    async def renewed(self, seconds: float) -> None:
        """Wait for a snapshot that is read from now on, at most for so long."""
        wanted = self._num_begun + 1
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._num_read < wanted:
                    await self._changed.wait()

    async def key_gone(self, key_id: str) -> None:
        """Return once the snapshot has a key no more, by none of its secrets."""
        while key_id in self.snapshot.key_ids:
            await self._keys_changed.wait()

    def wake(self, deployment_id: str) -> None:
        """Have a deployment woken, and read again then; many calls are one."""
        instant = time.monotonic()
        with self._lock:
            is_recent = self._woken_at.get(deployment_id, -WAKE_SECONDS) + WAKE_SECONDS > instant
            if is_recent or deployment_id in self._waking:
                return
            self._waking.add(deployment_id)
            self._woken_at[deployment_id] = instant
        with suppress(RuntimeError):  # the gateway ends
            self._wakers.submit(self._wake, deployment_id)

    def _wake(self, deployment_id: str) -> None:
        try:
            row = Deployment.objects.filter(pk=deployment_id, deleted_at=None).first()
            if row is not None:
                deployment_wake(row)
        except Exception:  # the next request asks again
            log.warning("not woken", deployment=deployment_id, exc_info=True)
        finally:
            close_old_connections()
            with self._lock:
                self._waking.discard(deployment_id)
            self._soon.set()

    @contextmanager
    def use(self, replica_id: str) -> Iterator[None]:
        """Report a replica, and its deployment, as used while the block runs."""
        with self._lock:
            self._open[replica_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[replica_id] -= 1
                self._open += Counter()  # without the zeros
                self._ended.add(replica_id)

    def meet(self, replica_id: str, *, is_silent: bool) -> None:
        """Note whether a replica took a request; it is stored with the next report."""
        with self._lock:
            if is_silent:
                self._silent.add(replica_id)
            else:
                self._silent.discard(replica_id)

    @contextmanager
    def count(self, route: Route) -> Iterator[None]:
        """Count a request for a deployment, answered or held, while the block runs."""
        if not route.is_scaled:
            yield
            return
        with self._lock:
            self._load_of[route.id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._load_of[route.id] -= 1

    def report(self) -> None:
        """Store when replicas were used, and how many requests there are for each deployment."""
        with self._lock:
            used = self._ended | set(self._open)
            silent, load = used & self._silent, +self._load_of
            gone, self._load_of = self._reported - load.keys(), load.copy()
        if load or gone:
            self._report_load(load, gone)
        if used:
            rows = Replica.objects.filter(pk__in=used)
            rows.exclude(pk__in=silent).update(last_used_at=now(), silent_since=None)
            rows.filter(pk__in=silent).update(
                last_used_at=now(), silent_since=Coalesce("silent_since", now())
            )
            Deployment.objects.filter(replicas__in=used).update(last_used_at=now())
        with self._lock:
            self._ended -= used
            self._silent &= {
                target.replica_id
                for route in self.snapshot.routes.values()
                for target in route.targets
            }

    def _report_load(self, load: Mapping[str, int], gone: Collection[str]) -> None:
        known = Deployment.objects.filter(pk__in=load).values_list("pk", flat=True)
        instant = now()
        GatewayLoad.objects.bulk_create(
            [
                GatewayLoad(gateway=self._id, deployment_id=pk, requests=load[pk], at=instant)
                for pk in known
            ],
            update_conflicts=True,
            unique_fields=["gateway", "deployment"],
            update_fields=["requests", "at"],
        )
        GatewayLoad.objects.filter(gateway=self._id, deployment__in=gone).delete()
        GatewayLoad.objects.filter(at__lt=instant - FORGOTTEN).delete()
        self._reported = set(load)

    def refresh(self) -> None:
        """Read the database once."""
        self._soon.clear()  # a wake from now on is seen by the next look
        self._num_begun += 1
        with self.while_read():
            self._publish(self._load(tokens_used()))

    def _publish(self, snapshot: Snapshot) -> None:
        has_fewer_keys = bool(self.snapshot.key_ids - snapshot.key_ids)
        self.snapshot, self.is_known = snapshot, True
        self._num_read = self._num_begun
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._announce, has_fewer_keys)

    def _announce(self, has_fewer_keys: bool) -> None:  # noqa: FBT001 -- called by the loop
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if has_fewer_keys:
            keys_changed, self._keys_changed = self._keys_changed, asyncio.Event()
            keys_changed.set()

    def _repeat(self, step: Callable[[], None], pause: threading.Event, failed: str) -> None:
        """Take a step each ``REFRESH_SECONDS``, or when the pause is cut short."""
        fault = ""
        while not self._stop.is_set():
            try:
                step()
                fault = ""
            except (DatabaseError, OSError) as error:
                if str(error) != fault:
                    log.warning(failed, cause=str(error))
                fault = str(error)
            except Exception:
                log.exception(failed)
            close_old_connections()
            pause.wait(REFRESH_SECONDS)
