"""Test a host's queue: time a signed ping through Redis to its worker and back."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import structlog

from runners.shared.messages import Doorbell
from runners.shared.redis_address import pong_key
from runners.shared.timing import PONG_WAIT_SECONDS, scale_duration
from webapp.core.ids import new_ulid
from webapp.core.outages import is_of_one_host
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.hosts.services import Contact, checks_update, contact_of, publish_host_checks

log = structlog.get_logger(__name__)
REST_SECONDS = scale_duration(10.0, least=0.5)
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
        deadline = self._clock() + PONG_WAIT_SECONDS
        while waiting and (left := deadline - self._clock()) > 0:
            num_answered += self._take_one(waiting, left)
        for host, _, _ in waiting.values():
            self._back_off(host)
            _store_result(host, {"problem": SILENT.format(seconds=PONG_WAIT_SECONDS)})
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
        """Take one answer and return 1 if it was expected; ignore answers to earlier pings.

        Redis takes from the first list that has one: a host of which an answer was ignored comes
        last, so that one that answers without end holds back no other.
        """
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
            waiting[key] = waiting.pop(key)
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
