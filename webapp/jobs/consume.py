"""Take events from the hosts' Redis streams into the database, and tell the hosts how far.

Redis may be killed, emptied or restarted at any moment, and so may this process: an entry
leaves the stream only after its commit, whatever is pending is read first after any trouble,
and the acknowledgements are written anew from the database.
"""

import time
from collections.abc import Callable, Mapping

import redis
import structlog
from pydantic import ValidationError
from redis.typing import EncodableT, FieldT, KeyT, StreamIdT

from runners.messages import EventBatch
from runners.stream import CONSUMER_GROUP, ack_key, decode, events_key
from runners.timing import scaled
from webapp.core.problems import Problem
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, Host
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt

log = structlog.get_logger(__name__)
CONSUMER = "control"
COUNT = 50
BLOCK_MS = 1000
HOSTS_SECONDS = scaled(5.0, least=0.5)
NEW = ">"
PENDING = "0"

Fields = Mapping[bytes | str, bytes | str]


class StreamConsumer:
    """One reader of all hosts' streams; ``step`` does one round."""

    def __init__(self, client: redis.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = client
        self._clock = clock
        self._hosts: dict[str, Host] = {}
        self._hosts_at = -HOSTS_SECONDS
        self._needs_recovery = True

    def step(self) -> int:
        """Take what the streams hold and return how many batches were stored.

        Raises:
            RedisError: Redis is away; the next call starts with recovery.
        """
        try:
            self._refresh_hosts()
            if not self._hosts:
                return 0
            if self._needs_recovery:
                self._recover()
            return self._take(NEW, BLOCK_MS)
        except redis.RedisError:
            self._needs_recovery = True
            raise

    def _refresh_hosts(self) -> None:
        if self._clock() - self._hosts_at < HOSTS_SECONDS:
            return
        enrolled = Host.objects.filter(kind__in=RUNS_JOBS).exclude(credential_hash="")
        present = set(enrolled.order_by().values_list("pk", flat=True))
        if new := present - self._hosts.keys():
            self._needs_recovery = True
            self._hosts |= Host.objects.defer(*DOCUMENTS).in_bulk(new)
        for gone in self._hosts.keys() - present:
            del self._hosts[gone]
        self._hosts_at = self._clock()

    def _recover(self) -> None:
        """Make the groups, tell every host what is stored, take what was read but not done."""
        for host_id in self._hosts:
            self._make_group(host_id)
            self._publish_acks(host_id)
        while self._take(PENDING, None):
            pass
        self._needs_recovery = False

    def _make_group(self, host_id: str) -> None:
        try:
            self._redis.xgroup_create(events_key(host_id), CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _publish_acks(self, host_id: str) -> None:
        open_attempts = Attempt.objects.filter(host=host_id, acked_seq__gt=0).order_by("-pk")
        acks: dict[FieldT, EncodableT] = dict(open_attempts.values_list("pk", "acked_seq")[:1000])
        if acks:
            self._redis.hset(ack_key(host_id), mapping=acks)

    def _take(self, start: str, block_ms: int | None) -> int:
        streams: dict[KeyT, StreamIdT] = {events_key(host_id): start for host_id in self._hosts}
        try:
            reply = self._redis.xreadgroup(
                CONSUMER_GROUP, CONSUMER, streams, count=COUNT, block=block_ms
            )
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._needs_recovery = True  # the stream was emptied under us
            return 0
        taken = 0
        for key, entries in _pairs(reply):
            host = self._hosts[_host_id(key)]
            for entry_id, fields in entries:
                self._take_entry(host, key, entry_id, fields)
                taken += 1
        return taken

    def _take_entry(self, host: Host, key: bytes, entry_id: bytes, fields: Fields | None) -> None:
        batch = _read(fields, host)
        if batch is not None:
            self._accept(host, batch)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xack(key, CONSUMER_GROUP, entry_id)
        pipeline.xdel(key, entry_id)
        pipeline.execute()

    def _accept(self, host: Host, batch: EventBatch) -> None:
        try:
            ack = events_accept(host=host, batch=batch)
        except (Problem, ValidationError) as error:
            log.warning("batch refused", host=host.slug, attempt=batch.attempt_id, why=str(error))
            return
        self._redis.hset(ack_key(host.pk), batch.attempt_id, str(ack.acked_seq))


def _read(fields: Fields | None, host: Host) -> EventBatch | None:
    """Return the batch of an entry; a damaged one is told and dropped, the host sends again."""
    try:
        return decode(fields or {})
    except ValueError as error:
        log.warning("stream entry is damaged", host=host.slug, why=str(error))
        return None


def _pairs(reply: object) -> list[tuple[bytes, list[tuple[bytes, Fields | None]]]]:
    """Return stream and entries of a reply, which RESP3 gives as a mapping of nested lists."""
    if isinstance(reply, dict):
        return [(key, [entry for part in parts for entry in part]) for key, parts in reply.items()]
    return list(reply) if isinstance(reply, list) else []


def _host_id(key: bytes | str) -> str:
    text = key.decode() if isinstance(key, bytes) else key
    return text.split(":")[1]
