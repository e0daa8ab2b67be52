"""Benchmark of event delivery from hosts to browsers, with many jobs that report every second.

Events pass through the site's Redis and control process to the live streams of viewers, each of
whom watches some of the jobs. Senders and viewers run in separate processes.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import redis

from runners import redis_access
from webapp.core.benches import site
from webapp.core.benches.live_ends import EVENTS, Attempts, send, watch

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
