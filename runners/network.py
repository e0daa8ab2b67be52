"""Measures round trip and bandwidth between this host and its server over HTTP."""

import os
import statistics
import time

from runners.client import ServerClient
from runners.facts import NetworkMeasurement

FIRST_BYTES = 64 * 1024
MAX_BYTES = 2 * 1024**2  # the server's limit per request
LONG_ENOUGH_SECONDS = 0.25
NUM_ROUND_TRIPS = 5
MOSTLY = 4  # a transfer shorter than this many round trips includes the round trip


def measure(client: ServerClient) -> NetworkMeasurement:
    """Return round trip and both bandwidths; slow connections get smaller transfers.

    Raises:
        ServerError: the server does not answer, or rejects the request.
    """
    client.echo(b"", 0)  # opens the connection
    round_trip = statistics.median(_seconds(client, 0, 0) for _ in range(NUM_ROUND_TRIPS))
    return NetworkMeasurement(
        round_trip_seconds=round_trip,
        upload_bytes_per_second=_rate(client, round_trip, is_up=True),
        download_bytes_per_second=_rate(client, round_trip, is_up=False),
    )


def _rate(client: ServerClient, round_trip: float, *, is_up: bool) -> float:
    """Return bytes per second of the largest transfer; long ones exclude the round trip."""
    num_bytes = FIRST_BYTES
    while True:
        up, down = (num_bytes, 0) if is_up else (0, num_bytes)
        seconds = _seconds(client, up, down)
        if seconds >= LONG_ENOUGH_SECONDS or num_bytes >= MAX_BYTES:
            is_mostly_waiting = seconds < MOSTLY * round_trip
            return num_bytes / (seconds if is_mostly_waiting else seconds - round_trip)
        num_bytes = min(num_bytes * 4, MAX_BYTES)


def _seconds(client: ServerClient, up: int, down: int) -> float:
    data = os.urandom(up)  # incompressible for proxies
    began = time.perf_counter()
    client.echo(data, down)
    return time.perf_counter() - began
