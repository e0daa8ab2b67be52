"""Benchmark of a host's overhead for one job that writes a log: supervisor and event shipper.

The job writes lines at a steady rate and does nothing else, under the normal job supervisor. A
separate process ships the events to a running site.
"""

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from runners.host.overhead_bench import make_attempt, run_supervisor, ship
from runners.shared.config import HostDir
from webapp.bench import site
from webapp.bench.live_ends import FENCE

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


LINES_PER_SECOND = 66
MEASURED_SECONDS = 30.0
SETTLE_SECONDS = 8.0  # the control process detects new hosts after five seconds
Row = tuple[str, float, str, str]


def supervising_metrics(data: Path) -> Iterator[Row]:
    """Yield the CPU time of supervisor and shipper, in cores."""
    with site.running(data) as up:
        yield from supervision_rows(up, SETTLE_SECONDS, MEASURED_SECONDS)


def supervision_rows(up: site.Site, settle: float, seconds: float) -> Iterator[Row]:
    """Supervise one job of a running site; measure for ``seconds`` after ``settle`` seconds."""
    ((host_id, attempt_id),) = up.call("fill(1, 1)")["attempts"]
    host_dir = HostDir(up.data / "bench-host")
    host_dir.make()
    folder = make_attempt(host_dir, attempt_id, FENCE, LINES_PER_SECOND)
    context = multiprocessing.get_context("spawn")
    spent: Queue[float] = context.Queue()
    shipping = context.Process(
        target=ship, args=(host_dir.path, up.redis_url, host_id, (settle, seconds), spent)
    )
    with run_supervisor(folder) as pid, site.in_background(shipping):
        supervisor = psutil.Process(pid)
        time.sleep(settle)
        before, acked, began = _cpu_seconds(supervisor), folder.acked_seq(), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        used = (_cpu_seconds(supervisor) - before) / elapsed
        shipped = folder.acked_seq() - acked
        shipper = spent.get(timeout=60) / seconds
    what = f"at {LINES_PER_SECOND} lines a second"
    yield f"supervisor {what}", used, "cores", "at most 0.01"
    yield f"shipper {what}", shipper, "cores", ""
    yield "events that the site stored meanwhile", shipped / elapsed, "1/s", ""


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
