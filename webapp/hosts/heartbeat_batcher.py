"""Batching of concurrent heartbeats, so that one transaction stores all of them.

The first heartbeat after a pause is stored at once; those within ``WINDOW_SECONDS`` of it form
the next batch. The database gets one write per window, for any number of hosts.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog
from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from runners.messages import Beat, BeatReply
from runners.timing import scaled
from runners.wire import excerpt
from webapp.core.problems import InvalidProblem, Problem, UnauthorizedProblem
from webapp.hosts.heartbeats import HostHeartbeat, host_beats
from webapp.hosts.models import Host
from webapp.hosts.refused import Refusal, refusals_record
from webapp.hosts.services import UNKNOWN_CREDENTIAL, digest

WINDOW_SECONDS = scaled(1.0, least=0.1)
Answer = BeatReply | Problem
log = structlog.get_logger(__name__)


class ReceivedHeartbeat(NamedTuple):
    """One heartbeat and the credential of its request."""

    credential: str
    beat: Beat


def answers_to(heard: Sequence[ReceivedHeartbeat]) -> list[Answer]:
    """Store the heartbeats with known credentials and return the reply to each."""
    digests = [digest(each.credential) for each in heard]
    rows = Host.objects.filter(credential_hash__in=set(digests) - {digest("")})
    hosts = dict(rows.values_list("credential_hash", "pk"))
    known_flags = [key in hosts for key in digests]
    heartbeats = [
        HostHeartbeat(hosts[key], each.beat)
        for key, each in zip(digests, heard, strict=True)
        if key in hosts
    ]
    replies = iter(_store(heartbeats))
    return [
        next(replies) if is_known else UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        for is_known in known_flags
    ]


def _store(heartbeats: Sequence[HostHeartbeat]) -> Sequence[Answer]:
    """Store heartbeats in one transaction; if that fails, each in its own.

    A heartbeat that the server cannot store affects only the host that sent it.
    """
    try:
        return host_beats(heartbeats)
    except (OperationalError, InterfaceError):  # database unavailable: no heartbeat is at fault
        raise
    except Exception:
        log.exception("heartbeats failed together; each is stored by itself", num=len(heartbeats))
    return [_store_one(each) for each in heartbeats]


def _store_one(heartbeat: HostHeartbeat) -> Answer:
    try:
        return host_beats([heartbeat])[0]
    except (OperationalError, InterfaceError):
        raise
    except Exception as error:
        log.exception("heartbeat failed", host=heartbeat.host_id)
        reason = f"{type(error).__name__} in the server"
        sample = excerpt(heartbeat.beat.model_dump(mode="json"))
        refusals_record(heartbeat.host_id, [Refusal("heartbeat", reason, sample)])
        sentence = (
            "The server cannot store this heartbeat; its operators see it on the host's page."
        )
        return InvalidProblem("not_stored", sentence)


def heartbeat_refused(credential: str, reason: str) -> None:
    """Record a heartbeat that could not be parsed, if a host has this credential.

    If the database rejects the record, the host still gets the reason in its reply.
    """
    hosts = Host.objects.filter(credential_hash=digest(credential)).exclude(credential_hash="")
    try:
        if host_id := hosts.values_list("pk", flat=True).first():
            refusals_record(host_id, [Refusal("heartbeat", reason)])
    except DatabaseError:
        log.warning("refused heartbeat not recorded", reason=reason, exc_info=True)


def _answers_now(heartbeats: Sequence[ReceivedHeartbeat]) -> list[Answer]:
    """Close dead database connections, then answer: no request end does it in this thread."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
    return answers_to(heartbeats)


class HeartbeatBatcher:
    """Batches the heartbeats of one event loop."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._waiting: list[tuple[ReceivedHeartbeat, asyncio.Future[Answer]]] = []
        self._turn: asyncio.Task[None] | None = None
        self._last_at = float("-inf")

    async def take(self, credential: str, beat: Beat) -> Answer:
        """Return the reply to a heartbeat once it is stored.

        Raises:
            Exception: the database failed; the agent retries.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((ReceivedHeartbeat(credential, beat), answer))
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Store batch after batch until none is waiting."""
        while self._waiting:
            await asyncio.sleep(self._last_at + self._window_seconds - time.monotonic())
            batch, self._waiting = self._waiting, []
            self._last_at = time.monotonic()
            await _settle(batch)


async def _settle(batch: Sequence[tuple[ReceivedHeartbeat, asyncio.Future[Answer]]]) -> None:
    """Set the reply, or the exception, of every heartbeat of a batch."""
    futures = [answer for _, answer in batch]
    try:
        answers = await sync_to_async(_answers_now)([heartbeat for heartbeat, _ in batch])
    except Exception as error:  # noqa: BLE001 (the batch's failure is each heartbeat's failure)
        for future in futures:
            if not future.done():
                future.set_exception(error)
        return
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)
