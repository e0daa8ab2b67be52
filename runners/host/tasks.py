"""The host's Celery tasks: verify a wake-up message once and wake the agent."""

import contextlib
import functools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from celery.signals import worker_ready

from runners.host.app import SignatureRefusedError, SignedDoorbell, app, verify
from runners.host.companions import HOST_DIR_VARIABLE
from runners.host.redis_access import connect
from runners.host.wake import wake_agent
from runners.shared.config import Credential, HostDir
from runners.shared.messages import Doorbell
from runners.shared.redis_address import pong_key
from runners.shared.timing import (
    PONG_LIFETIME_SECONDS,
    WORKER_SILENCE_SECONDS,
    scale_duration,
)

# Stores doorbell nonces until they expire, across processes and restarts.


class NonceStore:
    """A table of unique nonces: exactly one process sees a nonce as new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS nonce (value TEXT PRIMARY KEY, until REAL NOT NULL)"
            )

    def is_new(self, nonce: str, until: float) -> bool:
        """Store a nonce until an instant; return whether it is new."""
        with self._open() as database:
            database.execute("DELETE FROM nonce WHERE until < ?", (time.time(),))
            try:
                database.execute("INSERT INTO nonce VALUES (?, ?)", (nonce, until))
            except sqlite3.IntegrityError:
                return False
        return True

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=5.0)) as database, database:
            yield database


EXIT_STALLED = 70
WATCH_SECONDS = scale_duration(5.0, least=0.5)
LOST_ACK = "Couldn't ack"

log = logging.getLogger(__name__)


@functools.cache
def _host() -> tuple[HostDir, Credential, NonceStore]:
    host_dir = HostDir(Path(os.environ[HOST_DIR_VARIABLE]))
    return host_dir, host_dir.credential(), NonceStore(host_dir.nonces)


def ring(body: str, mac: str) -> Doorbell | None:
    """Wake the agent for a valid doorbell and return it; otherwise log and return None."""
    host_dir, credential, nonces = _host()
    try:
        doorbell = verify(
            SignedDoorbell(body, mac),
            host_id=credential.host_id,
            key=credential.command_key,
            now=time.time(),
            is_new_nonce=nonces.is_new,
        )
    except SignatureRefusedError as refusal:
        log.warning("a doorbell was refused: %s", refusal)
        return None
    host_dir.pings.touch()
    wake_agent(host_dir.wake)
    return doorbell


@app.task(name="runners.start")
def start(body: str, mac: str) -> None:
    """Wake the agent because an attempt can be claimed."""
    ring(body, mac)


@app.task(name="runners.stop")
def stop(body: str, mac: str) -> None:
    """Wake the agent because an attempt must end."""
    ring(body, mac)


@app.task(name="runners.ping")
def ping(body: str, mac: str) -> None:
    """Wake the agent as a connectivity test, and reply through Redis if requested."""
    doorbell = ring(body, mac)
    if doorbell and doorbell.is_echoed:
        echo(doorbell.command_id)


def echo(command_id: str) -> None:
    """Push a ping's id to the Redis list that the server reads."""
    host_dir, credential, _ = _host()
    key = pong_key(credential.host_id)
    with connect(credential.worker_url or "", host_dir.redis_ca(), socket_timeout=2.0) as client:
        pipe = client.pipeline(transaction=True)
        pipe.lpush(key, command_id).pexpire(key, 1000 * PONG_LIFETIME_SECONDS)
        pipe.execute()


class LostAckHandler(logging.Handler):
    """Ends a worker that lost an acknowledgement, which would otherwise hang forever."""

    def emit(self, record: logging.LogRecord) -> None:
        """Exit at once; the agent restarts the worker."""
        if LOST_ACK in record.getMessage():
            os._exit(EXIT_STALLED)


@worker_ready.connect
def watch(**_signal: object) -> None:
    """Start the watchdog thread of the worker's main process."""
    logging.getLogger().addHandler(LostAckHandler())
    host_dir = _host()[0]
    host_dir.pings.touch()
    threading.Thread(target=_watch, args=(host_dir.pings, os.getppid()), daemon=True).start()


def _watch(pings: Path, parent: int) -> None:
    """Exit when the agent has ended, or when pings have stopped arriving."""
    started_at, has_received = time.time(), False
    while os.getppid() == parent:
        last = pings.stat().st_mtime
        has_received = has_received or last > started_at + WATCH_SECONDS
        if has_received and time.time() - last > WORKER_SILENCE_SECONDS:
            os._exit(EXIT_STALLED)
        time.sleep(WATCH_SECONDS)
    os._exit(0)
