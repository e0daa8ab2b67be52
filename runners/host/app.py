"""The Celery app of one host, and the signatures of the wake-up messages that it receives."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from celery.signals import worker_init, worker_process_init
from pydantic import BaseModel, ConfigDict, ValidationError

from runners.host.companions import AGENT_VARIABLE, HOST_DIR_VARIABLE
from runners.host.redis_access import celery_options
from runners.jobspec.base import key_id
from runners.shared.config import Credential, HostDir
from runners.shared.messages import Doorbell, first_fault
from runners.shared.redis_address import key_prefix
from runners.shared.timing import (
    CLOCK_SKEW_SECONDS,
    DOORBELL_LIFETIME_SECONDS,
    scale_duration,
)
from runners.supervision.child import die_with

# Signs and verifies doorbells, the wake-up messages in a host's queue.
#
# An attacker with write access to the queue can delay or drop a doorbell, but not forge, replay or
# redirect it. The task's two arguments are ``SignedDoorbell.body`` and ``.mac``.


VERSION = 1
MAX_BODY_BYTES = 64 * 1024


class SignatureRefusedError(Exception):
    """A doorbell failed verification; ``code`` names the failed check."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class SignedDoorbell(NamedTuple):
    """Canonical JSON and the hexadecimal HMAC-SHA256 over its exact bytes."""

    body: str
    mac: str


class _Envelope(BaseModel):
    """The signed body: command, host, issue time and expiry.

    A host ignores unknown fields: a server may be newer than its hosts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: int
    kid: str
    host: str
    cmd: Doorbell
    nonce: str
    iat: float
    exp: float
    seq: int


def sign(
    doorbell: Doorbell, *, host_id: str, key: str, now: float, seq: int = 0
) -> SignedDoorbell:
    """Return the signed wake-up message of one host; ``now`` is in seconds since the epoch."""
    envelope = {
        "v": VERSION,
        "kid": key_id(key),
        "host": host_id,
        "cmd": doorbell.model_dump(mode="json"),
        "nonce": secrets.token_hex(16),
        "iat": now,
        "exp": now + DOORBELL_LIFETIME_SECONDS,
        "seq": seq,
    }
    body = json.dumps(envelope, sort_keys=True, separators=(",", ":"))
    return SignedDoorbell(body, _mac(body, key))


def verify(
    signed: SignedDoorbell,
    *,
    host_id: str,
    key: str,
    now: float,
    is_new_nonce: Callable[[str, float], bool],
) -> Doorbell:
    """Return the wake-up message after verifying its signature.

    The checks, in order: size, MAC, form, host, expiry, issue time, nonce. ``is_new_nonce`` gets
    the nonce and its expiry, and returns whether the nonce is new.

    Raises:
        SignatureRefusedError: with the code ``too_large``, ``bad_mac``, ``malformed``,
            ``other_host``, ``expired``, ``from_the_future`` or ``replayed``.
    """
    if len(signed.body.encode()) > MAX_BODY_BYTES:
        raise SignatureRefusedError("too_large", f"the body exceeds {MAX_BODY_BYTES} bytes")
    if not hmac.compare_digest(_mac(signed.body, key).encode(), signed.mac.encode()):
        raise SignatureRefusedError("bad_mac", "the signature does not match this host's key")
    try:
        envelope = _Envelope.model_validate_json(signed.body, extra="ignore")
    except ValidationError as error:
        raise SignatureRefusedError("malformed", f"the body: {first_fault(error)}") from None
    _check_aim(envelope, host_id, now)
    if not is_new_nonce(envelope.nonce, envelope.exp + CLOCK_SKEW_SECONDS):
        raise SignatureRefusedError("replayed", f"nonce {envelope.nonce} was used before")
    return envelope.cmd


def _check_aim(envelope: _Envelope, host_id: str, now: float) -> None:
    if envelope.v != VERSION:
        raise SignatureRefusedError("malformed", f"version {envelope.v}, expected {VERSION}")
    if envelope.host != host_id:
        raise SignatureRefusedError("other_host", f"signed for host {envelope.host}")
    if now > envelope.exp + CLOCK_SKEW_SECONDS:
        raise SignatureRefusedError("expired", f"{now - envelope.exp:.0f} s past its end")
    if now < envelope.iat - CLOCK_SKEW_SECONDS:
        raise SignatureRefusedError(
            "from_the_future",
            f"issued {envelope.iat - now:.0f} s ahead of this clock; compare the clocks",
        )


def _mac(body: str, key: str) -> str:
    return hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()


QUEUE = "jobs"
TASK_MODULE = "runners.host.tasks"


def settings(credential: Credential, ca_file: Path | str | None = None) -> dict[str, Any]:
    """Return the worker's settings, which were tested against kills of broker and worker.

    Raises:
        UnsafeAddressError: the address disables certificate verification.
    """
    broker = celery_options(credential.worker_url or "", ca_file)
    is_socket = broker["broker_url"].startswith("redis+socket")
    return broker | {
        "broker_transport_options": {
            "visibility_timeout": scale_duration(120, least=2),
            "unacked_restore_interval": scale_duration(5, least=0.5),
            "unacked_restore_throttle": 1,
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "socket_keepalive": not is_socket,
            "health_check_interval": 10,
            "global_keyprefix": key_prefix(credential.host_id),
        },
        "task_default_queue": QUEUE,
        "imports": (TASK_MODULE,),
        # If off, a message acknowledged during an outage blocks its slot forever; if on, the
        # worker may exit after an outage, and the agent restarts it.
        "worker_enable_remote_control": True,
        "worker_send_task_events": False,
        "task_send_sent_event": False,
        "task_acks_late": True,
        "task_reject_on_worker_lost": False,
        "worker_prefetch_multiplier": 1,
        "task_time_limit": 30,
        "task_soft_time_limit": 20,
        "worker_soft_shutdown_timeout": 5,
        "worker_max_tasks_per_child": 200,
        "task_ignore_result": True,
        "result_backend": None,
        "accept_content": ["json"],
        "task_serializer": "json",
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_hijack_root_logger": False,
    }


def make_app() -> Celery:
    """Return the app of the host folder in ``SLIPWAY_HOST_DIR``."""
    celery = Celery("slipway-host")
    if folder := os.environ.get(HOST_DIR_VARIABLE):
        host_dir = HostDir(Path(folder))
        celery.conf.update(settings(host_dir.credential(), host_dir.redis_ca()))
    return celery


@worker_init.connect
def end_with_agent(**_: object) -> None:
    """Make the worker die with its agent."""
    if agent := os.environ.get(AGENT_VARIABLE):
        die_with(int(agent))


@worker_process_init.connect
def end_with_worker(**_: object) -> None:
    """Make each pool process die with the worker."""
    die_with(os.getppid())


app = make_app()
