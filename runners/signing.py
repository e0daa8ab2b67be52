"""Signs and verifies doorbells, the wake-up messages in a host's queue.

An attacker with write access to the queue can delay or drop a doorbell, but not forge, replay
or redirect it. The task's two arguments are ``SignedDoorbell.body`` and ``.mac``.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from runners.messages import Doorbell
from runners.wire import key_id

VERSION = 1
MAX_BODY_BYTES = 64 * 1024
LIFETIME_SECONDS = 300
SKEW_SECONDS = 30


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
    """The signed body: command, host, issue time and expiry."""

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
    """Return the doorbell signed for one host; ``now`` is in seconds since the Unix epoch."""
    envelope = {
        "v": VERSION,
        "kid": key_id(key),
        "host": host_id,
        "cmd": doorbell.model_dump(mode="json"),
        "nonce": secrets.token_hex(16),
        "iat": now,
        "exp": now + LIFETIME_SECONDS,
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
    """Return the doorbell after verifying it.

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
        envelope = _Envelope.model_validate_json(signed.body)
    except ValidationError as error:
        raise SignatureRefusedError("malformed", str(error)) from None
    _check_aim(envelope, host_id, now)
    if not is_new_nonce(envelope.nonce, envelope.exp + SKEW_SECONDS):
        raise SignatureRefusedError("replayed", f"nonce {envelope.nonce} was used before")
    return envelope.cmd


def _check_aim(envelope: _Envelope, host_id: str, now: float) -> None:
    if envelope.v != VERSION:
        raise SignatureRefusedError("malformed", f"version {envelope.v}, expected {VERSION}")
    if envelope.host != host_id:
        raise SignatureRefusedError("other_host", f"signed for host {envelope.host}")
    if now > envelope.exp + SKEW_SECONDS:
        raise SignatureRefusedError("expired", f"{now - envelope.exp:.0f} s past its end")
    if now < envelope.iat - SKEW_SECONDS:
        raise SignatureRefusedError(
            "from_the_future",
            f"issued {envelope.iat - now:.0f} s ahead of this clock; compare the clocks",
        )


def _mac(body: str, key: str) -> str:
    return hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()
