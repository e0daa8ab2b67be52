"""The looks of the control process at observed servers, and what is stored of them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from webapp.accounts.secrets import secrets_open
from webapp.core.clock import now, now_ms
from webapp.core.vault import VaultError
from webapp.live.stream import publish_all
from webapp.metrics.store import Delivery, Point, append
from webapp.servers.figures import History, Progress, Window
from webapp.servers.models import MOST_PROBLEM, ObservedServer
from webapp.servers.reading import Look, Target, UnreadableError, look_at

log = structlog.get_logger(__name__)
EVERY_SECONDS = 15.0
MOST_AT_ONCE = 32
SOURCE = "server"  # of the points in the metrics database
Answer = Look | UnreadableError
Reader = Callable[[Sequence[Target]], list[Answer]]


def read_all(targets: Sequence[Target]) -> list[Answer]:
    """Look at servers side by side, and return what each answered, or why it could not be read."""
    return asyncio.run(_read_all(targets))


async def _read_all(targets: Sequence[Target]) -> list[Answer]:
    room = asyncio.Semaphore(MOST_AT_ONCE)

    async def read(target: Target) -> Answer:
        async with room:
            try:
                return await look_at(target)
            except UnreadableError as error:
                return error
            except Exception as error:  # what one server answers stops no other
                log.warning("server not read", url=target.url, exc_info=True)
                return UnreadableError(f"Its answer could not be read ({type(error).__name__}).")

    return list(await asyncio.gather(*map(read, targets)))


class Observer:
    """Looks at every observed server; what only two looks together show is kept in memory."""

    def __init__(
        self, read: Reader = read_all, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._histories: dict[str, History] = {}

    def step(self) -> int:
        """Look at all servers once; return how many answered."""
        rows = list(ObservedServer.objects.order_by("pk"))
        known = {row.pk for row in rows}
        self._histories = {key: kept for key, kept in self._histories.items() if key in known}
        targets, ready, found = [], [], []
        for row in rows:
            try:
                targets.append(target_of(row))
                ready.append(row)
            except UnreadableError as error:
                found.append((row, error))
        answers: list[Answer] = self._read(targets) if targets else []
        at = self._clock()
        for row, answer in [*found, *zip(ready, answers, strict=True)]:
            self._keep(row, answer, at)
        if rows:
            publish_all(_messages(rows))
        return sum(isinstance(each, Look) for each in answers)

    def _keep(self, row: ObservedServer, answer: Answer, at: float) -> None:
        """Store what a look found; a server that was removed meanwhile is left alone."""
        history = self._histories.setdefault(row.pk, History())
        rows, instant = ObservedServer.objects.filter(pk=row.pk), now()
        if isinstance(answer, UnreadableError):
            history.clear()
            since = row.silent_since or instant
            rows.update(
                looked_at=instant,
                silent_since=since,
                problem=str(answer)[:MOST_PROBLEM],
                figures={},
                window=Window().model_dump(),
            )
            return
        if answer.reading is None:
            history.clear()
            progress = Progress({}, Window())
        else:
            progress = history.add(answer.reading, at)
        is_there = rows.update(
            looked_at=instant,
            answered_at=instant,
            silent_since=None,
            problem=answer.note[:MOST_PROBLEM],
            engine=answer.engine,
            release=answer.release,
            served_models=[each.as_json() for each in answer.models],
            figures=dict(progress.figures),
            window=progress.window.model_dump(),
        )
        if is_there and progress.figures:
            t_ms = now_ms()
            append([Delivery(row.pk, [Point(t_ms, t_ms, SOURCE, progress.figures)])])


def target_of(row: ObservedServer) -> Target:
    """Return what is looked at, with the key of the server's secret.

    Raises:
        UnreadableError: the team has no such secret, or it cannot be decrypted.
    """
    if not row.secret:
        return Target(row.url, engine=row.engine)
    try:
        key = secrets_open(team_id=row.team_id, names=[row.secret]).get(row.secret)
    except VaultError as error:
        raise UnreadableError(f"Its secret {row.secret} cannot be opened: {error}") from error
    if key is None:
        raise UnreadableError(
            f"Your team has no secret {row.secret} any more: store it again, or name another one."
        )
    return Target(row.url, key, row.engine)


def topic(server_id: str) -> str:
    """Return the topic of a server's page."""
    return f"{ObservedServer._meta.model_name}:{server_id}"


def _messages(rows: Iterable[ObservedServer]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(topic(row.pk), "server.look", {"server": row.pk}) for row in rows]
