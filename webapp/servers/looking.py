"""The looks of the control process at observed servers, and what is stored of them."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import F

from webapp.core.clock import now, now_ms
from webapp.core.vault import VaultError
from webapp.live.stream import publish_all
from webapp.metrics.models import MetricSource
from webapp.metrics.store import Delivery, Point, append, forget
from webapp.servers.figures import History, Progress, Window
from webapp.servers.keys import key_of
from webapp.servers.models import MOST_PROBLEM, ObservedServer
from webapp.servers.reading import Clock, ProbeResult, Target, UnreadableError, probe

log = structlog.get_logger(__name__)
EVERY_SECONDS = 15.0
STEP_SECONDS = 12.0  # of all looks of a step: who has not answered then, is looked at in the next
MOST_AT_ONCE = 32
MOST_OF_TEAM = 8  # at once, so that no team's servers keep those of others waiting
MOST_SILENT = 8  # of a team in one step: a dead address takes the whole time of a look
LONGEST_WAIT = 240.0  # seconds between two looks at a silent server
SOURCE = "server"  # of the points in the metrics database
Answer = ProbeResult | UnreadableError | None  # None: not looked at in this step
Reader = Callable[[Sequence[Target], Clock], list[Answer]]


def read_all(targets: Sequence[Target], clock: Clock) -> list[Answer]:
    """Look at servers side by side, and return what each answered, or why it could not be read."""
    return asyncio.run(_read_all(targets, clock))


async def _read_all(targets: Sequence[Target], clock: Clock) -> list[Answer]:
    room = asyncio.Semaphore(MOST_AT_ONCE)
    shares: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MOST_OF_TEAM))

    async def read(target: Target) -> Answer:
        async with shares[target.team], room:
            try:
                return await probe(target, clock=clock)
            except UnreadableError as error:
                return error
            except Exception as error:  # what one server answers stops no other
                log.warning("server not read", url=target.url, exc_info=True)
                return UnreadableError(f"Its answer could not be read ({type(error).__name__}).")

    tasks = [asyncio.create_task(read(each)) for each in targets]
    _, late = await asyncio.wait(tasks, timeout=STEP_SECONDS)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [None if task in late else task.result() for task in tasks]


class Observer:
    """Looks at every observed server; what only two looks together show is kept in memory."""

    def __init__(self, read: Reader = read_all, clock: Clock = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._histories: dict[str, History] = {}

    def step(self) -> int:
        """Look once at all servers that are due; return how many answered."""
        rows = list(ObservedServer.objects.order_by(F("looked_at").asc(nulls_first=True), "pk"))
        known = {row.pk for row in rows}
        self._histories = {key: kept for key, kept in self._histories.items() if key in known}
        targets, ready, found = [], [], []
        for row in self._due(rows):
            try:
                targets.append(target_of(row))
                ready.append(row)
            except UnreadableError as error:
                found.append((row, error))
        answers = self._read(targets, self._clock) if targets else []
        looked = []
        for row, answer in [*found, *zip(ready, answers, strict=True)]:
            if answer is None:
                continue
            looked.append(row)
            try:
                with transaction.atomic():
                    self._store_result(row, answer)
            except Exception:  # what is stored of one server stops no other
                log.exception("server not stored", server=row.pk)
        if looked:
            publish_all(_messages(looked))
        return sum(isinstance(each, ProbeResult) for each in answers)

    def _due(self, rows: Iterable[ObservedServer]) -> list[ObservedServer]:
        """Return the servers of this step: all that answer, and some of those that do not."""
        instant, silent, due = now(), Counter[str](), []
        for row in rows:
            if not is_due(row, instant):
                continue
            if row.silent_since is not None or row.answered_at is None:
                silent[row.team_id] += 1
                if silent[row.team_id] > MOST_SILENT:
                    continue
            due.append(row)
        return due

    def _store_result(self, row: ObservedServer, answer: ProbeResult | UnreadableError) -> None:
        """Store what a look found, unless the server was removed or got another key meanwhile."""
        history = self._histories.setdefault(row.pk, History())
        rows = ObservedServer.objects.filter(pk=row.pk, sealed_key=row.sealed_key)
        instant = now()
        if isinstance(answer, UnreadableError):
            history.clear()
            rows.update(
                looked_at=instant,
                silent_since=row.silent_since or instant,
                problem=str(answer)[:MOST_PROBLEM],
                figures={},
                window=Window().model_dump(),
            )
            return
        if answer.reading is None or answer.engine != row.engine:
            history.clear()
        progress = Progress({}, Window())
        if answer.reading is not None:
            progress = history.add(answer.reading, answer.read_at)
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
            t_ms = now_ms() - round(1000 * max(0.0, self._clock() - answer.read_at))
            append([Delivery(row.pk, [Point(t_ms, t_ms, SOURCE, progress.figures)])])


def is_due(row: ObservedServer, instant: datetime) -> bool:
    """Return whether a server is looked at now: one that is silent after ever longer waits.

    Each wait is as long as the silence before it and a step, so twice the last one, and at most
    ``LONGEST_WAIT``.
    """
    if row.silent_since is None or row.looked_at is None:
        return True
    silent_seconds = (row.looked_at - row.silent_since).total_seconds()
    wait_seconds = min(LONGEST_WAIT, EVERY_SECONDS + silent_seconds)
    passed_seconds = (instant - row.looked_at).total_seconds()
    # A little less: steps do not begin to the millisecond. After the clock was set back, at once.
    return passed_seconds < 0 or passed_seconds >= wait_seconds - EVERY_SECONDS / 2


def target_of(row: ObservedServer) -> Target:
    """Return what is looked at, with the server's key.

    Raises:
        UnreadableError: the key cannot be decrypted for this server and address.
    """
    try:
        key = key_of(row)
    except VaultError as error:
        raise UnreadableError(f"Its key cannot be decrypted; give it again. {error}") from error
    return Target(
        row.url, key, row.engine, team=row.team_id, allows_loopback=settings.IS_ON_ONE_MACHINE
    )


def forget_removed() -> int:
    """Delete the points of servers that are gone, as with their team; return of how many."""
    stored = set(MetricSource.objects.filter(source=SOURCE).values_list("attempt_id", flat=True))
    gone = stored - set(ObservedServer.objects.values_list("pk", flat=True))
    for server_id in gone:
        forget(server_id)
    return len(gone)


def topic(server_id: str) -> str:
    """Return the topic of a server's page."""
    return f"{ObservedServer._meta.model_name}:{server_id}"


def _messages(rows: Iterable[ObservedServer]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(topic(row.pk), "server.look", {"server": row.pk}) for row in rows]
