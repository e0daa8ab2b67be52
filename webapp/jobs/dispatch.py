"""Wake hosts: send due commands from the outbox as signed Celery messages.

A command is repeated until the host acknowledges it. Messages only reduce latency: heartbeats
carry the same commands.
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

from runners.app import QUEUE, sign
from runners.messages import Doorbell
from runners.redis_access import celery_options
from runners.redis_address import key_prefix
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
                self._drop(url)
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

    def _drop(self, url: str) -> None:
        if connection := self._connections.pop(url, None):
            connection.release()


_publisher = Publisher()


def ring(host: Host, doorbell: Doorbell) -> None:
    """Put a signed message into the host's queue.

    Raises:
        OperationalError: the broker is unreachable.
    """
    # In the host's time, from its last heartbeat: it refuses messages too old or in the future.
    host_time = time.time() + (host.clock_offset_ms or 0) / 1000
    signed = sign(doorbell, host_id=host.pk, key=command_key(host), now=host_time)
    url = broker.url_for(broker.DISPATCHER)
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
        if failure is not None and not broker.is_of_one_host(failure):
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
    seconds = scaled(2 ** min(command.tries, 10), least=0.25)
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
        self._pinged_at = clock() - PING_SECONDS + 5.0

    def step(self) -> int:
        """Run one round and return the number of messages sent."""
        rung = dispatch_due(self._ring)
        if self._clock() - self._pinged_at >= PING_SECONDS:
            self._pinged_at = self._clock()
            rung += ping_hosts(self._ring)
        return rung
