"""The doorbell's Celery tasks: verify the signature and wake the agent, in milliseconds.

They carry no authority: orders come with the reply to the following heartbeat, and an attempt
runs only after its claim.
"""

import functools
import logging
import os
import threading
import time
from pathlib import Path

from celery.signals import worker_ready

from runners.app import HOST_DIR_VARIABLE, app
from runners.config import Credential, HostDir
from runners.messages import Doorbell
from runners.nonces import NonceStore
from runners.redis_access import connect
from runners.redis_address import pong_key
from runners.signing import SignatureRefusedError, SignedDoorbell, verify
from runners.timing import scaled
from runners.wake import wake_agent

EXIT_STALLED = 70
WATCH_SECONDS = scaled(5.0, least=0.5)
SILENCE_SECONDS = scaled(180.0, least=6.0)  # the server pings each minute
PONG_LIFETIME_MS = 60_000
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
        pipe.lpush(key, command_id).pexpire(key, PONG_LIFETIME_MS)
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
        if has_received and time.time() - last > SILENCE_SECONDS:
            os._exit(EXIT_STALLED)
        time.sleep(WATCH_SECONDS)
    os._exit(0)
