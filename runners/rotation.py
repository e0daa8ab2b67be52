"""Rotates a host's secrets: generated here; the server receives only their digests.

New secrets are written to disk before the request. If the reply is lost, the next try finds
out which of the two secrets the server accepts.
"""

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from runners.client import RefusedError, ServerClient
from runners.config import Credential, HostDir, write_secret
from runners.messages import RotateReply, RotateRequest
from runners.supervision import record

SECRET_BYTES = 32


class RotationError(Exception):
    """The rotation failed; the text gives the reason and the remedy."""


def rotate(host_dir: HostDir) -> Credential:
    """Replace this host's secrets, write them and return them; the old ones expire at once.

    Raises:
        RotationError: the server accepts neither the old secret nor the new one.
        UnreachableError: the server does not answer; a retry is safe.
    """
    pending = host_dir.path / "credential.next.json"
    try:
        with record.locked(host_dir.path / "rotate.lock"):
            current = host_dir.credential()
            fresh = _read(pending) or _fresh(current)
            write_secret(pending, fresh.model_dump_json(indent=2))
            reply = _request_rotation(current, fresh)
            rotated = fresh.model_copy(
                update={
                    "command_key": reply.command_key,
                    "redis_url": reply.redis_url,
                    "redis_secret": fresh.redis_secret if reply.has_redis_user else None,
                }
            )
            host_dir.save_credential(rotated)
            pending.unlink()
    except record.LockedError:
        raise RotationError("another process is replacing this host's secrets now") from None
    return rotated


def _read(pending: Path) -> Credential | None:
    with suppress(OSError, ValidationError):
        return Credential.model_validate_json(pending.read_bytes())
    return None


def _fresh(current: Credential) -> Credential:
    made = {name: secrets.token_urlsafe(SECRET_BYTES) for name in ("credential", "redis_secret")}
    return current.model_copy(update=made)


def _request_rotation(current: Credential, fresh: Credential) -> RotateReply:
    """Request the rotation; after a lost reply the server may already expect the new secret."""
    request = RotateRequest(
        credential_hash=_digest(fresh.credential),
        redis_secret_hash=_digest(fresh.redis_secret or ""),
    )
    try:
        return _request_rotation_as(current.credential, current.server, request)
    except RefusedError as refusal:
        if not refusal.is_unauthorized:
            raise
    try:
        return _request_rotation_as(fresh.credential, current.server, request)
    except RefusedError as refusal:
        raise RotationError(f"{refusal}; enrol this host again with a new token") from None


def _request_rotation_as(secret: str, server: str, request: RotateRequest) -> RotateReply:
    client = ServerClient(server, secret)
    try:
        return client.rotate(request)
    finally:
        client.close()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
