"""Ships events from the spool to the server until they are acknowledged.

Two transports with one contract: a Redis stream if there is one, otherwise HTTP. Both may
lose, repeat or reorder events; the server accepts only the next expected number, and the
shipper returns to the acknowledged number when acknowledgements stall.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

import redis

from runners import redis_access, stream
from runners.attempts import AttemptFolder
from runners.client import RefusedError, ServerClient, ServerError
from runners.messages import MAX_BATCH_EVENTS, EventBatch, RunEvent
from runners.spool import Event, SpoolReader, trim
from runners.supervision import record
from runners.timing import scaled

STALL_SECONDS = scaled(2.0, least=0.5)
STALLS_BEFORE_HTTP = 2
STREAM_REST_SECONDS = scaled(30.0, least=1.0)  # how long a stalled stream is not used
MAX_IN_FLIGHT = 5_000
MAX_STREAM_ENTRIES = 10_000
SAVE_SECONDS = scaled(2.0, least=0.2)
REFUSED_REST_SECONDS = scaled(10.0, least=0.5)

log = logging.getLogger(__name__)


class EventStream(Protocol):
    """The fast transport: write without a reply, and read acknowledgements separately."""

    def add(self, batch: EventBatch) -> bool:
        """Send a batch; return False if the stream is full or unreachable."""

    def acked(self, attempt_id: str) -> int | None:
        """Return the acknowledged number, or None when it cannot be read."""


class RedisStream:
    """Sends events to the host's stream and reads acknowledgements from its hash."""

    def __init__(self, url: str, host_id: str, ca_file: Path | None = None) -> None:
        self._redis = _client(url, ca_file)
        self._events = stream.events_key(host_id)
        self._acks = stream.ack_key(host_id)
        self._num_waiting = 0  # stream length when acknowledgements were last read

    def add(self, batch: EventBatch) -> bool:
        """Send a batch; return False if the stream is full or unreachable."""
        try:
            if self._num_waiting >= MAX_STREAM_ENTRIES:
                return False
            self._redis.xadd(self._events, stream.encode(batch))  # type: ignore[arg-type]  # dict is invariant there
        except redis.RedisError:
            return False
        return True

    def acked(self, attempt_id: str) -> int | None:
        """Return the acknowledged number, or None when it cannot be read."""
        both = self._redis.pipeline(transaction=False)
        both.hget(self._acks, attempt_id)
        both.xlen(self._events)
        try:
            value, self._num_waiting = both.execute()
        except redis.RedisError:
            return None
        return int(str(value)) if value is not None else 0

    def use(self, url: str, ca_file: Path | None = None) -> None:
        """Reconnect with another address or secret."""
        before, self._redis = self._redis, _client(url, ca_file)
        before.close()

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _client(url: str, ca_file: Path | None) -> redis.Redis:
    return redis_access.connect(
        url, ca_file, socket_timeout=2.0, socket_connect_timeout=1.0, decode_responses=True
    )


class AttemptShipper:
    """Ships one attempt's events; a lock admits one process at a time."""

    def __init__(
        self,
        folder: AttemptFolder,
        client: ServerClient,
        event_stream: EventStream | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.acked_seq = folder.acked_seq()
        self._client = client
        self._stream = event_stream
        self._clock = clock
        self._reader = SpoolReader(folder.spool)
        self._sent_seq = self.acked_seq
        self._moved_at = clock()
        self._stalls = 0
        self._fence: str | None = None
        self._saved_seq = self.acked_seq
        self._saved_at = -math.inf
        self._stream_rests_until = 0.0
        self._http_rests_until = 0.0
        self._lock: AbstractContextManager[None] = record.locked(folder.ship_lock)
        self._lock.__enter__()

    def close(self) -> None:
        """Store the acknowledged number and release the lock."""
        with suppress(OSError):  # its folder was removed
            self._save(at_once=True)
        self._lock.__exit__(None, None, None)

    @property
    def is_done(self) -> bool:
        """Return whether the server has acknowledged every event up to the exit."""
        return self.folder.is_settled and self.acked_seq >= self._reader.last_seq()

    def learn(self, acked_seq: int) -> None:
        """Update the acknowledged number, from either transport."""
        if acked_seq == self.acked_seq:
            return
        if acked_seq < self.acked_seq:  # the server lost something: a restored backup
            self._sent_seq = acked_seq
        self.acked_seq = acked_seq
        self._sent_seq = max(self._sent_seq, acked_seq)
        self._moved_at, self._stalls = self._clock(), 0
        self._save()

    def _save(self, *, at_once: bool = False) -> None:
        """Store the acknowledged number for the next shipper; a stale one causes only repeats."""
        is_due = at_once or self._clock() - self._saved_at >= SAVE_SECONDS
        if is_due and self.acked_seq != self._saved_seq:
            self.folder.save_acked_seq(self.acked_seq)
            self._saved_seq, self._saved_at = self.acked_seq, self._clock()

    def pump(self) -> int:
        """Send the next batch by the better transport; return the number of events sent."""
        self._save()
        if self._is_stream_usable():
            return self._pump_stream()
        return self._pump_http()

    def finish(self) -> None:
        """Delete acknowledged segments of the spool."""
        self._save(at_once=True)
        trim(self.folder.spool, self.acked_seq)

    def _is_stream_usable(self) -> bool:
        return self._stream is not None and self._clock() >= self._stream_rests_until

    def _rest_stream(self, seconds: float) -> None:
        self._stream_rests_until = self._clock() + seconds
        self._sent_seq, self._stalls = self.acked_seq, 0

    def _pump_stream(self) -> int:
        event_stream = self._stream
        if event_stream is None:
            return 0
        acked = event_stream.acked(self.folder.attempt_id)
        if acked is None:
            self._rest_stream(STALL_SECONDS)
            return 0
        if acked > self.acked_seq:
            self.learn(acked)
        self._notice_stall()
        if self._sent_seq - self.acked_seq >= MAX_IN_FLIGHT:
            return 0
        batch = self._batch(self._sent_seq)
        if batch is None:
            return 0
        if not event_stream.add(batch):
            self._rest_stream(STALL_SECONDS)
            return 0
        if self._sent_seq == self.acked_seq:
            self._moved_at = self._clock()
        self._note_sent(batch)
        return len(batch.events)

    def _notice_stall(self) -> None:
        """Return to the acknowledged number after a stall; after repeated stalls, use HTTP."""
        is_waiting = self._sent_seq > self.acked_seq
        if is_waiting and self._clock() - self._moved_at > STALL_SECONDS:
            self._sent_seq, self._moved_at = self.acked_seq, self._clock()
            self._stalls += 1
            if self._stalls >= STALLS_BEFORE_HTTP:
                self._rest_stream(STREAM_REST_SECONDS)

    def _pump_http(self) -> int:
        if self._clock() < self._http_rests_until:
            return 0
        batch = self._batch(self.acked_seq)
        if batch is None:
            return 0
        try:
            ack = self._client.send_events(batch)
        except ServerError as error:
            is_final = isinstance(error, RefusedError) and not error.is_passing
            level = logging.WARNING if is_final else logging.INFO
            log.log(level, "attempt %s waits: %s", self.folder.attempt_id, error)
            rest = REFUSED_REST_SECONDS if is_final else STALL_SECONDS
            self._http_rests_until = self._clock() + rest
            return 0
        self._note_sent(batch)
        self.learn(ack.acked_seq)
        return len(batch.events)

    def _batch(self, after_seq: int) -> EventBatch | None:
        events: list[Event] = self._reader.read_after(after_seq, limit=MAX_BATCH_EVENTS)
        if events and self._fence is None and (claim := self.folder.claim()):
            self._fence = claim.fence
        if not events or self._fence is None:
            return None
        return EventBatch(
            attempt_id=self.folder.attempt_id,
            fence=self._fence,
            events=tuple(RunEvent(**event) for event in events),
        )

    def _note_sent(self, batch: EventBatch) -> None:
        self._sent_seq = batch.events[-1].seq
