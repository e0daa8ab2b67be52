"""Ring hosts: the outbox of commands becomes signed Celery messages.

A command is rung until the host shows that it heard. A doorbell only saves time: beats
carry the same news.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import structlog
from celery import Celery
from django.conf import settings
from django.db.models import F
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.transport.redis import PrefixedStrictRedis

from runners.app import QUEUE
from runners.messages import Doorbell
from runners.redis_access import celery_options
from runners.redis_address import key_prefix
from runners.signing import sign
from runners.timing import scaled
from webapp.core import broker
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import DOCUMENTS, Host
from webapp.hosts.services import command_key
from webapp.jobs.models import Command

log = structlog.get_logger(__name__)
BATCH = 100
LONGEST_REST_SECONDS = scaled(60, least=2)
DEAD_AFTER = timedelta(hours=1)
PING_SECONDS = scaled(60.0, least=2.0)
TASK_PREFIX = "runners."
ALL_HOSTS = "host:"  # what every queue's prefix begins with
# Without a look at the connection before each doorbell: it would double what a ping costs, and
# one that finds its connection dead is sent again over a new one.
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
    """Return the app that publishes, and only publishes."""
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
    """One connection for the queues of all hosts, for one thread at a time.

    The queues differ in the prefix of their keys alone. A connection for each host would cost a
    socket, a handshake and a log-in each, and a thousand hosts are more than a process may open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def send(self, url: str, prefix: str, task: str, words: Sequence[str]) -> None:
        """Put a task into the queue below ``prefix``; over a new connection when one was dead.

        Raises:
            OperationalError: the broker is away.
        """
        with self._lock:
            is_fresh = url not in self._connections
            try:
                self._send(url, prefix, task, words)
            except OperationalError:
                self._drop(url)
                if is_fresh:
                    raise
                self._send(url, prefix, task, words)

    def _send(self, url: str, prefix: str, task: str, words: Sequence[str]) -> None:
        app = celery_app(url)
        if url not in self._connections:
            self._connections[url] = app.connection_for_write(transport_options=TRANSPORT)
        connection = self._connections[url]
        channel: Any = connection.default_channel  # Redis's; its clients write below the prefix
        channel.Client = partial(PrefixedStrictRedis, global_keyprefix=prefix)
        # kombu's own retry would meet a new channel, which knows nothing of the prefix.
        app.send_task(task, args=list(words), queue=QUEUE, connection=connection, retry=False)

    def _drop(self, url: str) -> None:
        if connection := self._connections.pop(url, None):
            connection.release()


_publisher = Publisher()


def ring(host: Host, doorbell: Doorbell) -> None:
    """Put a signed doorbell into the host's queue.

    Raises:
        OperationalError: the broker is away.
    """
    # By the host's clock, as its last beat told it: it refuses what seems old or not yet made.
    host_time = time.time() + (host.clock_offset_ms or 0) / 1000
    signed = sign(doorbell, host_id=host.pk, key=command_key(host), now=host_time)
    url = broker.url_for(broker.DISPATCHER)
    _publisher.send(url, key_prefix(host.pk), TASK_PREFIX + doorbell.kind, signed)


def dispatch_due(ring_host: Ring = ring) -> int:
    """Ring for every command that is due and return how many rang.

    A command is never done by being sent: it is rung again, ever more rarely, until a claim,
    an event or an exit proves it.
    """
    due = Command.objects.filter(state__in=["new", "sent"], next_at__lte=now())
    rung = 0
    for command in due.select_related("host", "attempt").order_by("pk")[:BATCH]:
        if not _ring_one(command, ring_host):
            break
        rung += 1
    return rung


def _ring_one(command: Command, ring_host: Ring) -> bool:
    """Ring once; return False when the broker is away, so that nothing waits behind it."""
    attempt = command.attempt
    doorbell = Doorbell.model_validate(
        {
            "command_id": command.pk,
            "kind": command.kind,
            "attempt_id": attempt.pk if attempt else None,
            "fence": attempt.fence if attempt else None,
        }
    )
    is_sent = _try(ring_host, command.host, doorbell)
    seconds = scaled(2 ** min(command.tries, 10), least=0.25)
    rest = timedelta(seconds=min(seconds, LONGEST_REST_SECONDS))
    Command.objects.filter(pk=command.pk, state__in=["new", "sent"]).update(
        state="sent" if is_sent else command.state,
        tries=F("tries") + 1,
        next_at=now() + rest,
    )
    return is_sent


def _try(ring_host: Ring, host: Host, doorbell: Doorbell) -> bool:
    try:
        ring_host(host, doorbell)
    except Exception as error:  # noqa: BLE001 (whatever a broker client raises, beats carry on)
        log.info("doorbell waits", host=host.slug, kind=doorbell.kind, cause=str(error))
        return False
    return True


def ping_hosts(ring_host: Ring = ring) -> int:
    """Ring every host in contact, so that its worker notices when messages stop coming."""
    enrolled = Host.objects.defer(*DOCUMENTS).exclude(credential_hash="")
    hosts = [host for host in enrolled if _is_heard(host)]
    return sum(
        _try(ring_host, host, Doorbell(command_id=f"ping-{host.pk}", kind="ping"))
        for host in hosts
    )


def _is_heard(host: Host) -> bool:
    return contact_of(host) in {Contact.LIVE, Contact.DEGRADED}


def bury_stuck() -> int:
    """Give up commands whose attempt is over or that nobody heard for an hour."""
    open_commands = Command.objects.filter(state__in=["new", "sent"])
    over = open_commands.filter(attempt__ended_at__isnull=False).update(state="dead")
    stale = open_commands.filter(created_at__lt=now() - DEAD_AFTER).update(state="dead")
    return over + stale


class Dispatcher:
    """The loop's body: ring what is due, ping once a minute."""

    def __init__(
        self, ring_host: Ring = ring, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ring = ring_host
        self._clock = clock
        self._pinged_at = clock() - PING_SECONDS + 5.0

    def step(self) -> int:
        """Do one round and return how many doorbells rang."""
        rung = dispatch_due(self._ring)
        if self._clock() - self._pinged_at >= PING_SECONDS:
            self._pinged_at = self._clock()
            rung += ping_hosts(self._ring)
        return rung
