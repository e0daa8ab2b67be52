"""Takes events from the spool to the server until the server says that it has stored them.

Two ways, one contract: a Redis stream where there is one, HTTP always. Both may lose, repeat
or reorder what they carry; the server accepts only the number after the last one that it
holds, and this end goes back to the acknowledged number whenever nothing moves.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
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
STREAM_REST_SECONDS = scaled(30.0, least=1.0)  # how long a stream that led nowhere is left alone
MAX_IN_FLIGHT = 5_000
MAX_STREAM_ENTRIES = 10_000
REFUSED_REST_SECONDS = scaled(10.0, least=0.5)

log = logging.getLogger(__name__)


class EventStream(Protocol):
    """The quick way: write without an answer, read the acknowledgements elsewhere."""

    def add(self, batch: EventBatch) -> bool:
        """Put a batch on its way; False when there is no room or no server."""

    def acked(self, attempt_id: str) -> int | None:
        """Return what the server has stored, or None when it cannot be asked."""


class RedisStream:
    """Events through the host's stream, acknowledgements from the host's hash."""

    def __init__(self, url: str, host_id: str, ca_file: Path | None = None) -> None:
        self._redis = _client(url, ca_file)
        self._events = stream.events_key(host_id)
        self._acks = stream.ack_key(host_id)

    def add(self, batch: EventBatch) -> bool:
        """Put a batch on its way; False when there is no room or no server."""
        try:
            if self._redis.xlen(self._events) >= MAX_STREAM_ENTRIES:
                return False
            self._redis.xadd(self._events, stream.encode(batch))  # type: ignore[arg-type]  # dict is invariant there
        except redis.RedisError:
            return False
        return True

    def acked(self, attempt_id: str) -> int | None:
        """Return what the server has stored, or None when it cannot be asked."""
        try:
            value = self._redis.hget(self._acks, attempt_id)
        except redis.RedisError:
            return None
        return int(str(value)) if value is not None else 0

    def use(self, url: str, ca_file: Path | None = None) -> None:
        """Go on under another address or with another secret."""
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
    """Ships one attempt's events; only one process at a time can."""

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
        self._stream_rests_until = 0.0
        self._http_rests_until = 0.0
        self._lock: AbstractContextManager[None] = record.locked(folder.ship_lock)
        self._lock.__enter__()

    def close(self) -> None:
        """Let another process ship this attempt."""
        self._lock.__exit__(None, None, None)

    @property
    def is_done(self) -> bool:
        """Tell whether the server holds everything up to the exit."""
        return self.folder.is_settled and self.acked_seq >= self._reader.last_seq()

    def learn(self, acked_seq: int) -> None:
        """Take in what the server says that it has stored, by whatever way it came."""
        if acked_seq == self.acked_seq:
            return
        if acked_seq < self.acked_seq:  # the server lost something: a restored backup
            self._sent_seq = acked_seq
        self.acked_seq = acked_seq
        self._sent_seq = max(self._sent_seq, acked_seq)
        self._moved_at, self._stalls = self._clock(), 0
        self.folder.save_acked_seq(acked_seq)

    def pump(self) -> int:
        """Send what is due by the better way and return how many events went out."""
        if self._is_stream_usable():
            return self._pump_stream()
        return self._pump_http()

    def finish(self) -> None:
        """Free the disk space of the events that the server holds."""
        trim(self.folder.spool, self.acked_seq)

    def _is_stream_usable(self) -> bool:
        return self._stream is not None and self._clock() >= self._stream_rests_until

    def _rest_stream(self, seconds: float) -> None:
        self._stream_rests_until = self._clock() + seconds
        self._sent_seq, self._stalls = self.acked_seq, 0

    def _pump_stream(self) -> int:
        way = self._stream
        if way is None:
            return 0
        acked = way.acked(self.folder.attempt_id)
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
        if not way.add(batch):
            self._rest_stream(STALL_SECONDS)
            return 0
        if self._sent_seq == self.acked_seq:
            self._moved_at = self._clock()
        self._note_sent(batch)
        return len(batch.events)

    def _notice_stall(self) -> None:
        """Go back to the acknowledged number when nothing moved for too long."""
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
        claim = self.folder.claim()
        if not events or claim is None:
            return None
        return EventBatch(
            attempt_id=self.folder.attempt_id,
            fence=claim.fence,
            events=tuple(RunEvent(**event) for event in events),
        )

    def _note_sent(self, batch: EventBatch) -> None:
        self._sent_seq = batch.events[-1].seq
