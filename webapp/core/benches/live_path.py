"""Benchmark of event delivery from hosts to browsers, with both ends in own processes."""

import asyncio
import multiprocessing
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import psutil
import redis

from runners import redis_access
from runners.messages import EventBatch, RunEvent
from webapp.core.benches import site

# Both ends of the live path, each in its own process: reporting hosts, following browsers.
#
# A spawned process imports only this module, which needs neither Django nor a database.


if TYPE_CHECKING:
    from multiprocessing.queues import Queue

FENCE = "f" * 32  # fence of every attempt of a benchmark
EVENTS = 3  # per job and second: progress, a log line, a metric point
INSTANT = re.compile(rb'"t_ms":(\d{13})')

Attempts = Sequence[tuple[str, str]]


# The hosts


def send(url: str, attempts: Attempts, ends_at: float) -> None:
    """Send each attempt's events once a second, in turn, until ``ends_at`` (Unix seconds)."""
    client = redis.Redis.from_url(url)
    began, sent = time.time(), 0
    while time.time() < ends_at:
        second, number = divmod(sent, len(attempts))
        time.sleep(max(0.0, began + sent / len(attempts) - time.time()))
        host_id, attempt_id = attempts[number]
        batch = batch_of(attempt_id, second)
        client.xadd(redis_access.events_key(host_id), redis_access.encode(batch))  # type: ignore[arg-type]  # dict is invariant there
        sent += 1
    client.close()


def batch_of(attempt_id: str, second: int) -> EventBatch:
    """Return the events of a job in one second."""
    instant = time.time_ns() // 1_000_000
    values = {"loss": 2.0 / (second + 1), "tokens_per_second": 512.0 + second, "step_seconds": 0.5}
    progress = {"done": second, "total": 10_000, "unit": "steps", "eta_seconds": 60.0}
    text = f"step {second}: loss {values['loss']:.4f}\n"
    bodies = (
        ("progress", progress),
        ("log", {"stream": "stdout", "text": text}),
        ("metric", {"source": "job", "values": values, "step": second}),
    )
    first = second * EVENTS + 1
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
    head = f"GET /live/?ticket={quote(ticket)} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
    writer.write(head.encode())
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


if TYPE_CHECKING:
    from multiprocessing.queues import Queue

JOBS = 200
JOBS_PER_VIEWER = 8
SETTLE_SECONDS = 12.0  # the control process detects new hosts after five seconds
MEASURED_SECONDS = 30.0
SHOWN = 2  # events per job and second that reach a page with their send time
PARTS = ("control", "uvicorn", "redis")

Row = tuple[str, float, str, str]


def figures(data: Path) -> Iterator[Row]:
    """Yield backlog, CPU time and latency for many jobs that report once a second."""
    with site.running(data) as up:
        yield from measured(up, JOBS, SETTLE_SECONDS, MEASURED_SECONDS)


def measured(up: site.Site, jobs: int, settle: float, seconds: float) -> Iterator[Row]:
    """Let jobs report on a running site; measure for ``seconds`` after ``settle`` seconds."""
    data = up.call(f"fill({jobs}, {JOBS_PER_VIEWER})")
    attempts: Attempts = data["attempts"]
    url, context = up.redis_url, multiprocessing.get_context("spawn")
    seen: Queue[list[tuple[int, int]]] = context.Queue()
    begins_at = time.time() + settle
    ends_at = begins_at + seconds
    others = [
        context.Process(target=watch, args=(up.url, data["tickets"], ends_at + 2.0, seen)),
        context.Process(target=send, args=(url, attempts, ends_at)),
    ]
    for process in others:
        process.start()
    time.sleep(settle)
    parts = {name: up.part(name) for name in PARTS}
    before = {name: _cpu_seconds(part) for name, part in parts.items()}
    backlog = _backlog(url, attempts, ends_at)
    used = {name: _cpu_seconds(part) - before[name] for name, part in parts.items()}
    arrivals = seen.get(timeout=60)
    for process in others:
        process.join()
    waits = sorted(at - sent for sent, at in arrivals if sent >= begins_at * 1000)
    yield from _backlog_rows(f"{jobs} jobs x 1 Hz", backlog, seconds)
    yield from _cost_rows(used, jobs * EVENTS * seconds, seconds)
    yield (
        "events with an instant that browsers saw",
        len(waits) / (jobs * SHOWN * seconds),
        "ratio",
        "1",
    )
    yield "host to browser, median", statistics.median(waits) / 1000, "s", ""
    yield "host to browser, p99", waits[int(len(waits) * 0.99)] / 1000, "s", "at most 0.5"
    yield "host to browser, slowest", waits[-1] / 1000, "s", ""


def _backlog_rows(what: str, backlog: list[int], seconds: float) -> Iterator[Row]:
    quarter = max(len(backlog) // 4, 1)
    grown = statistics.mean(backlog[-quarter:]) - statistics.mean(backlog[:quarter])
    yield f"{what}: batches waiting, median", statistics.median(backlog), "", ""
    yield f"{what}: batches waiting, most", max(backlog), "", ""
    yield f"{what}: growth of what waits", grown / (seconds * 3 / 4), "1/s", "none"


def _cost_rows(used: dict[str, float], num_events: float, seconds: float) -> Iterator[Row]:
    yield "control process, an event", used["control"] / num_events, "s", ""
    for name, spent in used.items():
        yield f"{name} process", spent / seconds, "cores", ""


def _backlog(url: str, attempts: Attempts, ends_at: float) -> list[int]:
    """Return the number of waiting batches in all hosts' streams, sampled twice a second."""
    client = redis.Redis.from_url(url)
    samples = []
    while time.time() < ends_at:
        pipeline = client.pipeline(transaction=False)
        for host_id, _ in attempts:
            pipeline.xlen(redis_access.events_key(host_id))
        samples.append(sum(pipeline.execute()))
        time.sleep(0.5)
    client.close()
    return samples


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
