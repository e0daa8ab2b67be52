"""Benchmark of the tunnel between a gateway and a host, against direct calls, on loopback.

Client, gateway, host and endpoint are processes of their own, as on a site; the host's is the
agent's. The gateway passes every request on, without keys and routing.
"""

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import psutil
import uvicorn
from django.core.management.base import CommandError

from planner.specs.units import MIB
from runners.host.overhead_bench import run_tunnel
from runners.shared.config import Credential
from runners.shared.messages import EndpointBody
from webapp.bench import site
from webapp.core.problems import Receive, Scope, Send, send_answer
from webapp.gateway.tunnels import TunnelError, TunnelResponse, Tunnels

HOST = ATTEMPT = "bench"
CHUNK = b"data: " + b"x" * 120 + b"\n\n"  # a token of a chat completion
REQUESTS = 400  # each way
STREAMS, CHUNKS_PER_SECOND = 50, 20.0  # of a stream: an LLM at reading speed
HELD_STREAMS = 500
SETTLE_SECONDS, MEASURED_SECONDS = 2.0, 10.0
START_SECONDS = 60.0
Row = tuple[str, float, str, str]
Ends = Mapping[str, psutil.Process]  # the processes of gateway and host


# The endpoint: a server of few instructions, so that it costs little of what is measured.


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests to ``/v1/first`` (one chunk) and ``/v1/stream`` (one each interval)."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
            writer.write(chunk)
            while head.startswith(b"GET /v1/stream"):
                await asyncio.sleep(1 / CHUNKS_PER_SECOND)
                writer.write(chunk)
                await writer.drain()
            if head.startswith(b"GET /v1/hold"):
                await reader.read()
            writer.write(b"0\r\n\r\n")
    writer.close()


async def _serve_endpoint(port: int) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def serve_endpoint(port: int) -> None:
    """Serve until killed."""
    asyncio.run(_serve_endpoint(port))


# The gateway


tunnels = Tunnels()


async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of the gateway's process."""
    if scope["type"] == "websocket":
        await tunnels.serve(HOST, receive, send)
    else:
        await _pass_on(scope, receive, send)


def serve_gateway(port: int) -> None:
    """Serve until killed, as ``up`` starts the site."""
    http = "webapp.core.connections:HeaderDeadlineProtocol"
    uvicorn.run(gateway, port=port, http=http, lifespan="off", log_level="warning")


async def _pass_on(scope: Scope, receive: Receive, send: Send) -> None:
    tunnel = tunnels.of(HOST)
    if tunnel is None:
        await send_answer(send, HTTPStatus.SERVICE_UNAVAILABLE, [], b"")
        return
    response = await tunnel.request(ATTEMPT, "GET", scope["path"], scope["headers"], b"")
    leaving = asyncio.create_task(_close_when_left(response, receive))
    try:
        start = {"status": response.status, "headers": response.headers}
        await send({"type": "http.response.start", **start})
        with contextlib.suppress(TunnelError):  # closed
            async for chunk in response.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
    finally:
        leaving.cancel()
        await response.close()


async def _close_when_left(response: TunnelResponse, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await response.close()


# The client


class _Call(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    first_byte_seconds: float  # from the request to the first byte of the body


@contextlib.asynccontextmanager
async def _call(port: int, path: str) -> AsyncIterator[_Call]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = time.perf_counter()
        writer.write(b"GET %b HTTP/1.1\r\nHost: bench\r\n\r\n" % path.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise CommandError(f"the gateway answered {head[:60]!r}")
        await reader.readuntil(b"data: ")
        yield _Call(reader, writer, time.perf_counter() - began)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _first_bytes(port: int) -> float:
    async with _call(port, "/v1/first") as call:
        return call.first_byte_seconds


async def _compare(direct: int, tunnelled: int) -> dict[int, list[float]]:
    """Return the times to the first byte by port, of requests in turn."""
    seconds: dict[int, list[float]] = {direct: [], tunnelled: []}
    for _ in range(REQUESTS):
        for port, found in seconds.items():
            found.append(await _first_bytes(port))
    return seconds


@contextlib.asynccontextmanager
async def _open(port: int, path: str, num_streams: int) -> AsyncIterator[list[int]]:
    """Keep streams open; yield a list whose only number is the chunks that came on them."""
    received = [0]

    async def count(call: _Call) -> None:
        while data := await call.reader.read(65536):
            received[0] += data.count(b"data: ")

    async with contextlib.AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(_call(port, path)) for _ in range(num_streams)]
        tasks = [asyncio.create_task(count(call)) for call in calls]
        yield received
        for task in tasks:
            task.cancel()


def _latency_rows(seconds: dict[int, list[float]], what: str) -> Iterator[Row]:
    direct, tunnelled = seconds.values()
    for name, index, goal in (("p50", 49, "at most 0.005"), ("p99", 98, "at most 0.02")):
        one, other = (statistics.quantiles(each, n=100)[index] for each in (direct, tunnelled))
        yield f"added time to first byte, {what}: {name}", other - one, "s", goal
        yield f"tunnel / direct, {what}: {name}", other / one, "ratio", ""


async def _measure(direct: int, tunnelled: int, ends: Ends) -> list[Row]:
    await _compare(direct, tunnelled)  # imports and connections
    rows = list(_latency_rows(await _compare(direct, tunnelled), "one at a time"))
    async with _open(tunnelled, "/v1/stream", STREAMS) as received:
        await asyncio.sleep(SETTLE_SECONDS)
        before, num, began = _cpu_seconds(ends), received[0], time.perf_counter()
        await asyncio.sleep(MEASURED_SECONDS)
        after, num, ended = _cpu_seconds(ends), received[0] - num, time.perf_counter()
        latencies = await _compare(direct, tunnelled)
    what = f"beside {STREAMS} streams of {CHUNKS_PER_SECOND:g}/s"
    rows += _latency_rows(latencies, what)
    rows.append(("chunks that arrived", num / (ended - began), "1/s", ""))
    for name, seconds in after.items():
        goal = "at least 2000" if name == "gateway" else ""
        rate = num / (seconds - before[name])
        rows.append((f"chunks for each second of CPU: {name}", rate, "1/s", goal))
    idle = {name: end.memory_info().rss for name, end in ends.items()}
    async with _open(tunnelled, "/v1/hold", HELD_STREAMS):
        held = {name: end.memory_info().rss for name, end in ends.items()}
        latencies = await _compare(direct, tunnelled)
    rows += _latency_rows(latencies, f"beside {HELD_STREAMS} that wait")
    for name, num_bytes in held.items():
        goal = "at most 300" if name == "gateway" else ""
        rows.append((f"memory with {HELD_STREAMS} streams: {name}", num_bytes / MIB, "MiB", goal))
        each = (num_bytes - idle[name]) / HELD_STREAMS / 1024
        rows.append((f"memory of one more stream: {name}", each, "KiB", ""))
    return rows


def gateway_metrics(data: Path) -> Iterator[Row]:
    """Yield latency, throughput and memory of a tunnel; its processes keep files in ``data``."""
    tunnelled, direct = _free_port(), _free_port()
    credential = Credential(
        server=f"http://127.0.0.1:{tunnelled}", host_id=HOST, name=HOST, credential=HOST,
        command_key=HOST, redis_url=None, beat_seconds=1.0,
    )  # fmt: skip
    body = EndpointBody(host="127.0.0.1", port=direct, model=HOST, has_keys=False)
    with (
        _running(f"endpoint({direct})", data),
        _running(f"gateway({tunnelled})", data) as gateway_pid,
        run_tunnel(credential, data / "host", body) as host_pid,
    ):
        ends = {"gateway": psutil.Process(gateway_pid), "host": psutil.Process(host_pid)}
        yield from asyncio.run(_measured(direct, tunnelled, ends))


async def _measured(direct: int, tunnelled: int, ends: Ends) -> list[Row]:
    """Measure once every part answers."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                await asyncio.gather(_first_bytes(direct), _first_bytes(tunnelled))
            except (OSError, CommandError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
            else:
                break
    return await _measure(direct, tunnelled, ends)


@contextlib.contextmanager
def _running(part: str, data: Path) -> Iterator[int]:
    """Run ``serve_...`` of this module in a process of its own; yield its pid."""
    code = f"import django; django.setup(); from {__name__} import *; serve_{part}"
    own = {"SLIPWAY_DATA_DIR": str(data), "DJANGO_SETTINGS_MODULE": "webapp.settings"}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=site.ROOT, env=os.environ | own)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _cpu_seconds(ends: Ends) -> dict[str, float]:
    times = {name: end.cpu_times() for name, end in ends.items()}
    return {name: float(each.user + each.system) for name, each in times.items()}
