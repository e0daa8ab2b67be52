"""Where beats that arrive together wait for each other, so that one transaction takes them all.

The first beat after a pause is served at once; those that come within ``WINDOW_SECONDS`` of it
share the next turn. However many hosts speak, the database sees one writer, about once a second.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from asgiref.sync import sync_to_async
from django.db import connections

from runners.messages import Beat, BeatReply
from runners.timing import scaled
from webapp.core.problems import Problem, UnauthorizedProblem
from webapp.hosts.beats import Spoken, host_beats
from webapp.hosts.models import Host
from webapp.hosts.services import UNKNOWN_CREDENTIAL, digest

WINDOW_SECONDS = scaled(1.0, least=0.1)
Answer = BeatReply | Problem


class Heard(NamedTuple):
    """One beat and the credential that it came with."""

    credential: str
    beat: Beat


def answers_to(heard: Sequence[Heard]) -> list[Answer]:
    """Store the beats of every known credential and return what each gets."""
    digests = [digest(each.credential) for each in heard]
    rows = Host.objects.filter(credential_hash__in=set(digests) - {digest("")})
    hosts = dict(rows.values_list("credential_hash", "pk"))
    known = [key in hosts for key in digests]
    spoken = [
        Spoken(hosts[key], each.beat)
        for key, each in zip(digests, heard, strict=True)
        if key in hosts
    ]
    replies = iter(host_beats(spoken))
    return [
        next(replies) if is_known else UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        for is_known in known
    ]


def _answers_now(heard: Sequence[Heard]) -> list[Answer]:
    """Answer with connections that work: here no request ends, which lets go of dead ones."""
    for connection in connections.all(initialized_only=True):
        if connection.errors_occurred and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
    return answers_to(heard)


class BeatDesk:
    """Takes the beats of one event loop."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._waiting: list[tuple[Heard, asyncio.Future[Answer]]] = []
        self._turn: asyncio.Task[None] | None = None
        self._last_at = float("-inf")

    async def take(self, credential: str, beat: Beat) -> Answer:
        """Return the answer to a beat once it is stored.

        Raises:
            Exception: the database did not take it; whoever beats tries again.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((Heard(credential, beat), answer))
        if self._turn is None or self._turn.done():
            self._turn = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Serve turn after turn until nobody waits."""
        while self._waiting:
            await asyncio.sleep(self._last_at + self._window_seconds - time.monotonic())
            turn, self._waiting = self._waiting, []
            self._last_at = time.monotonic()
            await _settle(turn)


async def _settle(turn: Sequence[tuple[Heard, asyncio.Future[Answer]]]) -> None:
    """Answer everybody of a turn, or let everybody know why not."""
    waiting = [answer for _, answer in turn]
    try:
        answers = await sync_to_async(_answers_now)([heard for heard, _ in turn])
    except Exception as error:  # noqa: BLE001 (what befell the turn befell each of its beats)
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        return
    for future, answer in zip(waiting, answers, strict=True):
        if not future.done():
            future.set_result(answer)
