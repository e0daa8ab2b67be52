"""Try a host's queue: a signed ping through Redis to its worker and back, timed here.

The worker answers with the ping's own id into a list of the host's, so what is timed is the
whole way: signature, Redis, Celery, the check on the host, Redis again.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import structlog

from runners.messages import Doorbell
from runners.redis_address import pong_key
from runners.timing import scaled
from webapp.core.ids import new_ulid
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.findings import checks_update
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.live.publish import publish_host_checks

log = structlog.get_logger(__name__)
WAIT_SECONDS = 3.0
REST_SECONDS = scaled(10.0, least=0.5)
LONGEST_REST_SECONDS = 600.0  # each try leaves a message where nobody listens
MAX_AT_ONCE = 50
SILENT = "no answer within {seconds:.0f} s"

Ring = Callable[[Host, Doorbell], None]


class RoundTrips:
    """Tries the queues that nobody has tried yet; one that failed is tried again after a rest."""

    def __init__(
        self, client: redis.Redis, ring: Ring, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = client
        self._ring = ring
        self._clock = clock
        self._not_before: dict[str, float] = {}
        self._rests: dict[str, float] = {}

    def step(self) -> int:
        """Try every queue that is due and return how many answered.

        Raises:
            RedisError: Redis is away.
        """
        hosts = [host for host in _untried() if self._clock() >= self._due_at(host)]
        waiting = self._ring_all(hosts[:MAX_AT_ONCE])
        num_answered = 0
        deadline = self._clock() + WAIT_SECONDS
        while waiting and (left := deadline - self._clock()) > 0:
            num_answered += self._take_one(waiting, left)
        for host, _, _ in waiting.values():
            self._rest(host)
            _note(host, {"problem": SILENT.format(seconds=WAIT_SECONDS)})
        return num_answered

    def _due_at(self, host: Host) -> float:
        """Return when to try: at once where a person asked for it."""
        return self._not_before.get(host.pk, 0.0) if "queue" in host.checks else 0.0

    def _rest(self, host: Host) -> None:
        rest = self._rests.get(host.pk, REST_SECONDS) if "queue" in host.checks else REST_SECONDS
        self._not_before[host.pk] = self._clock() + rest
        self._rests[host.pk] = min(2 * rest, LONGEST_REST_SECONDS)

    def _ring_all(self, hosts: Sequence[Host]) -> dict[str, tuple[Host, str, float]]:
        """Ring the hosts and return by the key of the answer whom, with which id, and when."""
        rung = {}
        for host in hosts:
            ping = Doorbell(command_id=new_ulid(), kind="ping", is_echoed=True)
            try:
                self._ring(host, ping)
            except Exception as error:  # noqa: BLE001 (whatever a broker client raises)
                self._rest(host)
                _note(host, {"problem": f"the ping could not be sent: {error}"})
                continue
            rung[pong_key(host.pk)] = (host, ping.command_id, self._clock())
        return rung

    def _take_one(self, waiting: dict[str, tuple[Host, str, float]], left: float) -> int:
        """Take one answer; one to an earlier ping counts for nothing."""
        answer: Any = self._redis.blpop(list(waiting), timeout=min(left, 1.0))
        if answer is None:
            return 0
        key, ping_id = (_text(part) for part in answer)
        host, expected, rung_at = waiting[key]
        if ping_id != expected:
            return 0
        del waiting[key]
        _note(host, {"seconds": self._clock() - rung_at})
        return 1


def _untried() -> list[Host]:
    """Return the hosts in contact whose queue has not answered yet."""
    enrolled = Host.objects.filter(kind__in=RUNS_JOBS, checks__has_redis=True)
    rows = enrolled.exclude(credential_hash="").order_by("pk")
    return [
        host
        for host in rows.filter(checks__queue__seconds__isnull=True)
        if contact_of(host) is Contact.LIVE
    ]


def _note(host: Host, found: dict[str, Any]) -> None:
    if host.checks.get("queue") == found:
        return
    host.checks = checks_update(host.pk, queue=found)
    publish_host_checks(host)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
