"""Both ends of the benchmark of live events: hosts that report, browsers that follow.

Each end is a process of its own that is spawned: this module imports no models of Django, which
such a process has not set up.
"""

import asyncio
import math
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import redis

from runners.host import redis_access
from runners.shared.messages import EventBatch, RunEvent

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


FENCE = "f" * 32  # fence of every attempt of a benchmark
EVENTS = 3  # per job and second: progress, a log line, a metric point
SHOWN = 1  # of them, that reach a page with their send time: the line
INSTANT = re.compile(rb'"t_ms":(\d{13})')

Attempts = Sequence[tuple[str, str]]


# The hosts


def send(
    url: str,
    attempts: Attempts,
    span: tuple[float, float],
    done: "Queue[int]",
    *,
    num_gpus: int = 0,
    history_seconds: int = 0,
) -> None:
    """Send each attempt's events once a second, in turn, until the end of ``span``.

    Those of ``history_seconds`` before come first, at once. Report the number of batches that
    were sent within ``span`` (Unix seconds).
    """
    begins_at, ends_at = span
    client = redis.Redis.from_url(url)
    for second in range(history_seconds):
        for host_id, attempt_id in attempts:
            age = history_seconds - second
            batch = batch_of(attempt_id, second, num_gpus, age_seconds=age)
            client.xadd(redis_access.events_key(host_id), redis_access.encode(batch))  # type: ignore[arg-type]  # as below
    began, sent, before = time.time() - history_seconds, history_seconds * len(attempts), 0
    while time.time() < ends_at:
        second, number = divmod(sent, len(attempts))
        time.sleep(max(0.0, began + sent / len(attempts) - time.time()))
        host_id, attempt_id = attempts[number]
        batch = batch_of(attempt_id, second, num_gpus)
        client.xadd(redis_access.events_key(host_id), redis_access.encode(batch))  # type: ignore[arg-type]  # dict is invariant there
        sent += 1
        before = sent if time.time() < begins_at else before
    client.close()
    done.put(sent - before)


def batch_of(
    attempt_id: str, second: int, num_gpus: int = 0, *, age_seconds: int = 0
) -> EventBatch:
    """Return the events of a job in one second, now or some seconds ago."""
    instant = time.time_ns() // 1_000_000 - 1000 * age_seconds
    values = {"loss": 2.0 / (second + 1), "tokens_per_second": 512.0 + second, "step_seconds": 0.5}
    progress = {"done": second, "total": 10_000, "unit": "steps", "eta_seconds": 60.0}
    text = f"step {second}: loss {values['loss']:.4f}\n"
    share = 0.5 + 0.4 * math.sin(second / 20)
    sampled: dict[str, dict[str, float]] = {}
    if num_gpus:
        sampled["host"] = {"rss_bytes": 4e9 * share, "cpu_utilization": 8 * share}
        sampled["gpu"] = {
            f"gpu{gpu}_{what}": (1 + gpu / 10) * share * scale
            for gpu in range(num_gpus)
            for what, scale in (("memory_bytes", 4e10), ("utilization", 0.5))
        }
    bodies = (
        ("progress", progress),
        ("log", {"stream": "stdout", "text": text}),
        ("metric", {"source": "job", "values": values, "step": second}),
        *(("metric", {"source": source, "values": each}) for source, each in sampled.items()),
    )
    first = second * len(bodies) + 1
    return EventBatch(
        attempt_id=attempt_id,
        fence=FENCE,
        events=tuple(
            RunEvent(seq=seq, t_ms=instant, kind=kind, body=body)
            for seq, (kind, body) in enumerate(bodies, start=first)
        ),
    )


# The browsers


def watch(
    url: str, tickets: list[str], ends_at: float, seen: "Queue[list[tuple[int, int]]]"
) -> None:
    """Follow one live stream per ticket and report (sent, received) times in Unix ms."""
    seen.put(asyncio.run(_watch(url, tickets, ends_at)))


async def _watch(url: str, tickets: list[str], ends_at: float) -> list[tuple[int, int]]:
    arrivals: list[tuple[int, int]] = []
    async with asyncio.TaskGroup() as group:
        for ticket in tickets:
            group.create_task(_follow(url, ticket, ends_at, arrivals))
    return arrivals


async def _follow(url: str, ticket: str, ends_at: float, arrivals: list[tuple[int, int]]) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = ["GET /live/ HTTP/1.1", f"Host: {address.netloc}", f"Live-Ticket: {ticket}", "", ""]
    writer.write("\r\n".join(head).encode())
    unfinished = b""
    try:
        async with asyncio.timeout(ends_at - time.time()):
            while data := await reader.read(65_536):
                instant = time.time_ns() // 1_000_000
                lines, _, unfinished = (unfinished + data).rpartition(b"\n")
                arrivals += [(int(sent), instant) for sent in INSTANT.findall(lines)]
    except TimeoutError:
        pass
    finally:
        writer.close()
