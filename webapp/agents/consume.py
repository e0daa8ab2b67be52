"""Consume the hosts' Redis streams into the database, many attempts per transaction."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import redis
import structlog
from django.db import InterfaceError, OperationalError
from pydantic import ValidationError
from redis.typing import EncodableT, FieldT, KeyT, StreamIdT

from runners.host.redis_access import CONSUMER_GROUP, ack_key, decode, events_key
from runners.jobspec.base import excerpt
from runners.shared.messages import ReceivedBatch, first_fault
from runners.shared.timing import scale_duration
from webapp.agents.ingest import HostBatch, events_accept, events_accept_together, is_routine
from webapp.core.outages import is_of_one_host
from webapp.core.problems import Problem
from webapp.hosts.models import DOCUMENTS, RUNS_JOBS, Host
from webapp.hosts.pools import QuotaProblem, Refusal, refusals_record
from webapp.jobs.models import Attempt

log = structlog.get_logger(__name__)
CONSUMER = "control"
COUNT = 20  # entries per host and round
BLOCK_MS = 1000
REST_MS = 50  # while some hosts are delayed
HOST_SECONDS = 0.25  # per round; a slower host is delayed by the time it used
HOSTS_SECONDS = scale_duration(5.0, least=0.5)
ROUND_SECONDS = 0.1  # minimum interval of rounds: reports gathered meanwhile share a transaction
SHARED_BATCHES = 100  # per transaction
SHARED_BYTES = 64 * 1024  # per host and round; larger entries are stored alone
SHARED_EVENTS = 200
ALONE_SECONDS = 60.0  # how long a host's batches are stored alone after a failed one
MAX_STREAM_BYTES = 512 * 1024**2  # per host; its shipper stops far below
OTHER_KIND = "its keys in Redis hold another kind of value; they were deleted"
TOO_LONG = f"its stream in Redis holds more than {MAX_STREAM_BYTES // 1024**2} MiB; it was deleted"
ASIDE_SECONDS = scale_duration(30.0, least=1.0)  # pause after deleting a host's unreadable keys
NEW = ">"
PENDING = "0"

Fields = Mapping[bytes | str, bytes | str]


class Entry(NamedTuple):
    """One entry of a host's stream."""

    host: Host
    key: bytes
    id: bytes
    fields: Fields | None


class BatchableEntry(NamedTuple):
    """An entry that may share a transaction, with its batch."""

    entry: Entry
    batch: ReceivedBatch


class _Share:
    """Limits of one host's part in the shared transactions of a round."""

    def __init__(self) -> None:
        self._room_bytes = SHARED_BYTES
        self._room_events = SHARED_EVENTS
        self._alone: set[object] = set()  # attempts with a batch that is stored alone

    def take_if_batchable(self, fields: Fields) -> ReceivedBatch | None:
        """Return the batch of an entry if it may share a transaction, else None.

        Later batches of the same attempt are then stored alone too, to keep their order.
        """
        attempt_id = fields.get(b"a", fields.get("a"))
        batch = None if attempt_id in self._alone else self._routine(fields)
        if batch is None:
            self._alone.add(attempt_id)
        return batch

    def _routine(self, fields: Fields) -> ReceivedBatch | None:
        self._room_bytes -= size_of(fields)
        if self._room_bytes < 0:
            return None
        try:
            batch = decode(fields)
        except ValueError:  # logged and recorded when it is stored alone
            return None
        self._room_events -= len(batch.events)
        return batch if self._room_events >= 0 and is_routine(batch) else None


class StreamConsumer:
    """One reader of all hosts' streams; ``step`` does one round."""

    def __init__(self, client: redis.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = client
        self._clock = clock
        self._hosts: dict[str, Host] = {}
        self._waits_until: dict[str, float] = {}  # hosts that exceeded HOST_SECONDS
        self._alone_until: dict[str, float] = {}  # hosts that sent invalid batches
        self._aside_until: dict[str, float] = {}  # hosts with unreadable keys
        self._gathers_until = 0.0
        self._hosts_at = -HOSTS_SECONDS
        self._needs_recovery = True

    def step(self) -> int:
        """Read the streams once and return the number of entries processed.

        Raises:
            RedisError: Redis is unreachable; the next call starts with recovery.
        """
        try:
            self._refresh_hosts()
            if not self._hosts:  # before the first one is enrolled
                time.sleep(REST_MS / 1000)
                return 0
            if self._needs_recovery:
                self._recover()
            self._gather()
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
        for removed in self._hosts.keys() - present:
            del self._hosts[removed]
        self._hosts_at = self._clock()
        self._cut_streams()

    def _cut_streams(self) -> None:
        """Delete streams longer than any shipper makes: Redis has no quota of its own."""
        with self._redis.pipeline(transaction=False) as pipe:
            for pk in self._hosts:
                pipe.memory_usage(events_key(pk))
            sizes = pipe.execute()
        for host, size in zip(list(self._hosts.values()), sizes, strict=True):
            if (size or 0) > MAX_STREAM_BYTES:
                self._set_aside(host, TOO_LONG)

    def _recover(self) -> None:
        """Create the consumer groups, publish acknowledgements, and process pending entries."""
        for host in self._hosts.values():
            try:
                self._make_group(host.pk)
                self._publish_acks(host.pk)
            except redis.ResponseError as error:
                self._handle_bad_keys(host, error)
        self._waits_until.clear()
        while self._take(PENDING, None):
            self._waits_until.clear()
        self._needs_recovery = False

    def _make_group(self, host_id: str) -> None:
        try:
            self._redis.xgroup_create(events_key(host_id), CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _handle_bad_keys(self, host: Host, error: redis.ResponseError) -> None:
        """Set a host aside if its Redis user replaced its keys with another kind.

        Raises:
            ResponseError: the error does not concern the keys of one host.
        """
        if not is_of_one_host(error):
            raise error
        self._set_aside(host, OTHER_KIND)

    def _set_aside(self, host: Host, reason: str) -> None:
        """Delete a host's keys and pause reading its stream.

        No data is lost: unacknowledged events are sent again, meanwhile by HTTP.
        """
        self._redis.delete(events_key(host.pk), ack_key(host.pk))
        self._aside_until[host.pk] = self._clock() + ASIDE_SECONDS
        self._needs_recovery = True  # its consumer group must be created again
        self._refuse(host, reason, {})

    def _publish_acks(self, host_id: str) -> None:
        open_attempts = Attempt.objects.filter(host=host_id, acked_seq__gt=0).order_by("-pk")
        acks: dict[FieldT, EncodableT] = dict(open_attempts.values_list("pk", "acked_seq")[:1000])
        if acks:
            self._redis.hset(ack_key(host_id), mapping=acks)

    def _gather(self) -> None:
        """Sleep so that reports accumulate: the cost per report falls with their number."""
        time.sleep(min(max(self._gathers_until - self._clock(), 0.0), ROUND_SECONDS))

    def _take(self, start: str, block_ms: int | None) -> int:
        instant = self._clock()
        due = [pk for pk in self._hosts if self._paused_until(pk) <= instant]
        streams: dict[KeyT, StreamIdT] = {events_key(host_id): start for host_id in due}
        if not streams:
            time.sleep(REST_MS / 1000)
            return 0
        is_complete = len(due) == len(self._hosts)
        try:
            reply = self._redis.xreadgroup(
                CONSUMER_GROUP,
                CONSUMER,
                streams,
                count=COUNT,
                block=block_ms if is_complete or block_ms is None else REST_MS,
            )
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error) and not is_of_one_host(error):
                raise
            self._needs_recovery = True  # a stream was emptied or replaced
            return 0
        streams_read = _pairs(reply)
        entries = [
            Entry(self._hosts[_host_id(key)], key, entry_id, fields)
            for key, stream_entries in streams_read
            for entry_id, fields in stream_entries
        ]
        is_full = len(entries) >= SHARED_BATCHES or any(
            len(stream_entries) >= COUNT for _, stream_entries in streams_read
        )
        self._gathers_until = 0.0 if is_full else self._clock() + ROUND_SECONDS
        routine, others = self._partition(entries)
        for first in range(0, len(routine), SHARED_BATCHES):
            self._take_together(routine[first : first + SHARED_BATCHES])
        self._take_alone(others)
        return len(entries)

    def _partition(self, entries: Sequence[Entry]) -> tuple[list[BatchableEntry], list[Entry]]:
        """Split entries into those that share a transaction and those stored alone.

        A host's share of a transaction is limited. Entries of an attempt after one stored alone
        are stored alone too: sequence numbers must stay in order.
        """
        instant = self._clock()
        routine: list[BatchableEntry] = []
        others: list[Entry] = []
        shares: dict[str, _Share] = defaultdict(_Share)
        for entry in entries:
            share = shares[entry.host.pk]
            is_suspended = self._alone_until.get(entry.host.pk, instant) > instant
            batch = None if is_suspended else share.take_if_batchable(entry.fields or {})
            if batch is None:
                others.append(entry)
            else:
                routine.append(BatchableEntry(entry, batch))
        return routine, others

    def _take_together(self, routine: Sequence[BatchableEntry]) -> None:
        """Store batches of many hosts in one transaction, or one by one if that fails.

        Raises:
            RedisError, OperationalError, InterfaceError: Redis or the database is unreachable.
        """
        try:
            stored = events_accept_together(
                [
                    HostBatch(each.entry.host.pk, each.batch, size_of(each.entry.fields))
                    for each in routine
                ]
            )
        except Exception:  # one batch is invalid: stored alone, it affects only its host
            log.warning("batches are stored one by one", exc_info=True)
            self._take_alone([each.entry for each in routine])
            return
        results = list(zip(routine, stored, strict=True))
        self._acknowledge([(each, seq) for each, seq in results if seq is not None])
        self._take_alone([each.entry for each, seq in results if seq is None])

    def _acknowledge(self, stored: Sequence[tuple[BatchableEntry, int]]) -> None:
        """Acknowledge stored batches and delete their entries from the streams."""
        pipeline = self._redis.pipeline(transaction=True)
        hosts = []
        for (entry, batch), acked_seq in stored:
            pipeline.hset(ack_key(entry.host.pk), batch.attempt_id, str(acked_seq))
            pipeline.xack(entry.key, CONSUMER_GROUP, entry.id)
            pipeline.xdel(entry.key, entry.id)
            hosts += [entry.host] * 3
        answers = pipeline.execute(raise_on_error=False)
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, redis.ResponseError):
                self._handle_bad_keys(host, answer)

    def _take_alone(self, entries: Iterable[Entry]) -> None:
        """Store entries one by one; delay hosts that took longer than their share."""
        for _, group in groupby(entries, key=lambda entry: entry.host.pk):
            host_entries = list(group)
            host, started = host_entries[0].host, self._clock()
            try:
                for _, key, entry_id, fields in host_entries:
                    self._take_entry(host, key, entry_id, fields)
            except redis.ResponseError as error:
                self._handle_bad_keys(host, error)
            ended = self._clock()
            if ended - started > HOST_SECONDS:
                self._delay(host, until=ended + (ended - started))

    def _paused_until(self, host_id: str) -> float:
        """Return until when a host's stream is not read; 0.0 if it is read."""
        return max(self._waits_until.get(host_id, 0.0), self._aside_until.get(host_id, 0.0))

    def _delay(self, host: Host, until: float) -> None:
        self._waits_until[host.pk] = max(until, self._waits_until.get(host.pk, until))

    def _take_entry(self, host: Host, key: bytes, entry_id: bytes, fields: Fields | None) -> None:
        """Delete an entry from the stream once it is stored or recorded as refused.

        Raises:
            RedisError, OperationalError, InterfaceError: Redis or the database is unreachable.
        """
        try:
            batch = decode(fields or {})
        except ValidationError as error:
            self._refuse(host, first_fault(error), fields)
        except ValueError as error:
            self._refuse(host, str(error), fields)
        else:
            self._accept(host, batch, fields)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xack(key, CONSUMER_GROUP, entry_id)
        pipeline.xdel(key, entry_id)
        pipeline.execute()

    def _accept(self, host: Host, batch: ReceivedBatch, fields: Fields | None) -> None:
        try:
            ack = events_accept(host=host, batch=batch, num_bytes=size_of(fields))
        except (redis.RedisError, OperationalError, InterfaceError):
            raise
        except QuotaProblem as problem:  # the shipper sends the batch again, by HTTP if necessary
            self._delay(host, until=self._clock() + problem.wait_seconds)
        except Problem as error:
            log.warning("batch refused", host=host.slug, attempt=batch.attempt_id, why=str(error))
        except Exception as error:  # one host's message must not stop the other hosts' streams
            log.exception("batch failed", host=host.slug, attempt=batch.attempt_id)
            self._refuse(host, f"{type(error).__name__} in the server", fields)
        else:
            self._redis.hset(ack_key(host.pk), batch.attempt_id, str(ack.acked_seq))

    def _refuse(self, host: Host, reason: str, fields: Fields | None) -> None:
        self._alone_until[host.pk] = self._clock() + ALONE_SECONDS
        log.warning("stream entry refused", host=host.slug, why=reason)
        refusals_record(
            host.pk, [Refusal("stream", reason.split("\n", maxsplit=1)[0], excerpt(fields))]
        )


def size_of(fields: Fields | None) -> int:
    """Return the size of an entry's fields in bytes."""
    return sum(map(len, (fields or {}).values()))


def _pairs(reply: object) -> list[tuple[bytes, list[tuple[bytes, Fields | None]]]]:
    """Return (stream, entries) pairs of a reply; RESP3 returns a mapping of nested lists."""
    if isinstance(reply, dict):
        return [(key, [entry for part in parts for entry in part]) for key, parts in reply.items()]
    return list(reply) if isinstance(reply, list) else []


def _host_id(key: bytes | str) -> str:
    text = key.decode() if isinstance(key, bytes) else key
    return text.split(":")[1]
