"""Load test with simulated hosts: they enrol, then send a heartbeat every ten seconds.

The hosts run in one separate process. The cost is the CPU time of the server's processes during
the load, and the number of database transactions.
"""

import asyncio
import itertools
import math
import multiprocessing
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

import httpx
import psutil

from planner.specs.units import GIB
from runners.shared.facts import GpuFacts, HostFacts, Microbench
from runners.shared.messages import Beat, EnrollRequest, GpuLoad
from webapp.bench import site
from webapp.boot.front import APPLICATIONS

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


HOSTS = 500
GPUS = 8
BEAT_SECONDS = 10.0
MEASURED_SECONDS = 40.0
SETTLE_SECONDS = 12.0  # the first heartbeat of each host carries its micro-benchmark
AT_ONCE = 16
ANSWER_SECONDS = 15.0
SERVER_PARTS = (*APPLICATIONS.values(), "control", "ticker")


def host_load_metrics(data: Path, hosts: int = HOSTS) -> Iterator[tuple[str, float, str]]:
    """Yield the server's cost of many hosts, each figure with its unit."""
    with site.running(data) as up:
        tokens = up.manage("enrol_token", "--count", str(hosts)).split()
        started = time.perf_counter()
        credentials = asyncio.run(_enrol(up.url, tokens))
        yield "hosts enrolled", hosts / (time.perf_counter() - started), "1/s"
        yield from _measured_load(up, credentials)


def _measured_load(up: site.Site, credentials: list[str]) -> Iterator[tuple[str, float, str]]:
    results = multiprocessing.get_context("spawn").Queue()
    speaking = multiprocessing.get_context("spawn").Process(
        target=speak, args=(up.url, credentials, SETTLE_SECONDS + MEASURED_SECONDS, results)
    )
    speaking.start()
    time.sleep(SETTLE_SECONDS)
    # The server's processes, without the host agent and its jobs.
    children = psutil.Process(up.process.pid).children(recursive=True)
    parts = [child for child in children if any(part in child.cmdline() for part in SERVER_PARTS)]
    log = CommitCount(up.data / "slipway.sqlite3-wal")
    before, started = _cpu_seconds(parts), time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS:
        log.update()
        time.sleep(0.2)
    used = _cpu_seconds(parts) - before
    replies, failures, slowest = results.get(timeout=60)
    speaking.join()
    yield f"beats of {len(credentials)} hosts x {GPUS} GPUs", replies, "in all"
    yield "beats not answered", failures, "in all"
    yield "slowest answer", slowest, "s"
    yield "one core that the server uses (goal 0.1)", used / seconds, "ratio"
    yield "database transactions (goal 2)", log.commits / seconds, "1/s"


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


class CommitCount:
    """Counts transactions by the commit frames in SQLite's write-ahead log.

    A frame header contains the database size after a commit, else zero; the salts in the log's
    header change whenever the log restarts.
    """

    HEADER_BYTES, FRAME_BYTES = 32, 24

    def __init__(self, path: Path) -> None:
        self._path = path
        self._salts = b""
        self._frames = 0
        self.commits = 0
        self.update()
        self.commits = 0

    def update(self) -> None:
        """Count the commits since the last update."""
        with self._path.open("rb") as log:
            header = log.read(self.HEADER_BYTES)
            if len(header) < self.HEADER_BYTES:
                return
            page_bytes = struct.unpack(">I", header[8:12])[0]
            if header[16:24] != self._salts:
                self._salts, self._frames = header[16:24], 0
            while self._is_frame(frame := self._frame(log, page_bytes)):
                self._frames += 1
                self.commits += struct.unpack(">I", frame[4:8])[0] > 0

    def _frame(self, log: BinaryIO, page_bytes: int) -> bytes:
        log.seek(self.HEADER_BYTES + self._frames * (self.FRAME_BYTES + page_bytes))
        return log.read(self.FRAME_BYTES)

    def _is_frame(self, frame: bytes) -> bool:
        """Return whether a frame belongs to the current log, not to an earlier one."""
        return len(frame) == self.FRAME_BYTES and frame[8:16] == self._salts


# Simulated hosts


async def _enrol(url: str, tokens: list[str]) -> list[str]:
    """Exchange every token for a credential, at most ``AT_ONCE`` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def enrol_one(number: int, token: str) -> str:
            request = EnrollRequest(
                token=token, name=f"node-{number:03}", facts=facts_of(number), sent_at_ms=_now_ms()
            )
            async with gate:
                reply = await _enroll(client, request)
            return str(reply.raise_for_status().json()["credential"])

        return await asyncio.gather(*itertools.starmap(enrol_one, enumerate(tokens)))


JSON = {"Content-Type": "application/json"}
TOO_MANY = 429


async def _enroll(client: httpx.AsyncClient, request: EnrollRequest) -> httpx.Response:
    """Enrol; retry after a 429, because all hosts have one address and share its rate limit."""
    body = request.model_dump_json()
    while True:
        reply = await client.post("/api/v1/hosts/enroll", content=body, headers=JSON)
        if reply.status_code != TOO_MANY:
            return reply
        await asyncio.sleep(float(reply.headers["Retry-After"]))


def speak(
    url: str, credentials: list[str], seconds: float, heard: "Queue[tuple[int, int, float]]"
) -> None:
    """Send the heartbeats of all hosts; report replies, failures and the slowest reply."""
    heard.put(asyncio.run(_send_all_heartbeats(url, credentials, seconds)))


async def _send_all_heartbeats(
    url: str, credentials: list[str], seconds: float
) -> tuple[int, int, float]:
    ends_at = time.monotonic() + seconds

    async def host(number: int, credential: str) -> list[float]:
        await asyncio.sleep(BEAT_SECONDS * number / len(credentials))
        latencies: list[float] = []
        while (begins_at := time.monotonic()) < ends_at:
            latencies.append(
                await _send_heartbeat(url, credential, number, is_first=not latencies)
            )
            await asyncio.sleep(BEAT_SECONDS - (time.monotonic() - begins_at))
        return latencies

    rounds = await asyncio.gather(*itertools.starmap(host, enumerate(credentials)))
    answers = [seconds for latencies in rounds for seconds in latencies]
    answered = [seconds for seconds in answers if math.isfinite(seconds)]
    return len(answered), len(answers) - len(answered), max(answered, default=0.0)


async def _send_heartbeat(url: str, credential: str, number: int, *, is_first: bool) -> float:
    """Return the seconds until the reply, or infinity without one.

    Each heartbeat uses a new connection, as an agent's does: idle connections are closed before
    the next heartbeat. Raw sockets are used because 500 clients of an HTTP library in one process
    would be slower than the server.
    """
    address = urlsplit(url)
    body = beat_of(number, with_microbench=is_first).model_dump_json()
    head = (
        f"POST /api/v1/hosts/beat HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {credential}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    started = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write((head + body).encode())
            answer = await reader.read()
            writer.close()
    except OSError:  # includes TimeoutError
        return math.inf
    is_success = answer.startswith(b"HTTP/1.1 200 ")
    return time.perf_counter() - started if is_success else math.inf


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _uuid(number: int, gpu: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-{gpu:012x}"


def facts_of(number: int) -> HostFacts:
    """Return the facts of the host with that number."""
    gpus = tuple(
        GpuFacts(
            index=gpu,
            uuid=_uuid(number, gpu),
            name="NVIDIA H100 80GB HBM3",
            memory_bytes=80 * GIB,
            compute_capability="9.0",
            power_limit_watts=700.0,
        )
        for gpu in range(GPUS)
    )
    return HostFacts(
        hostname=f"node-{number:03}",
        os="Debian GNU/Linux 12",
        kernel="6.1.0",
        architecture="x86_64",
        cpu_model="simulated",
        cpu_count=96,
        memory_bytes=1024 * GIB,
        disk_total_bytes=4096 * GIB,
        disk_free_bytes=2048 * GIB,
        boot_id=f"boot-{number}",
        python_version="3.11.7",
        agent_version="0.1.0",
        gpus=gpus,
    )


def beat_of(number: int, *, with_microbench: bool) -> Beat:
    """Return one heartbeat of the host with that number."""
    loads = tuple(
        GpuLoad(
            uuid=_uuid(number, gpu),
            memory_used_bytes=(20 + gpu) * GIB,
            utilization=0.9,
            power_watts=612.5,
            temperature_celsius=61.0,
        )
        for gpu in range(GPUS)
    )
    return Beat(
        boot_id=f"boot-{number}",
        sent_at_ms=_now_ms(),
        agent_version="0.1.0",
        cpu_utilization=0.3,
        memory_available_bytes=900 * GIB,
        disk_free_bytes=2048 * GIB,
        gpus=loads,
        microbench=Microbench(
            measured_at_ms=_now_ms(),
            duration_seconds=20.0,
            torch_version="2.13.0",
            num_threads=96,
            devices=(),
            disk_write_bytes_per_second=2e9,
        )
        if with_microbench
        else None,
    )
