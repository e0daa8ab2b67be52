"""Enrols this machine as a host, rotates its secrets, and stores the server's epoch."""

import contextlib
import hashlib
import logging
import secrets
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from pydantic import ValidationError

from runners.host import inventory
from runners.host.schedulers import SCHEDULERS
from runners.host.shipping import RefusedError, ServerClient
from runners.launchers.launch import NoSuchAddressError, interface_of
from runners.shared.addresses import AddressError, host_name, web_address
from runners.shared.config import (
    Credential,
    HostConfigError,
    HostDir,
    SchedulerSettings,
    write_secret,
)
from runners.shared.messages import (
    BeatReply,
    EnrollReply,
    EnrollRequest,
    EpochShown,
    RotateReply,
    RotateRequest,
)
from runners.supervision import child

# Stores the highest epoch received from the server, to detect a restored backup.
#
# A lower epoch means that the server lost state: until it sends a higher one, this host starts,
# stops and forgets nothing on its orders. Running jobs continue and ship events.


EPOCH = "epoch.json"


class EpochMemory:
    """The content of ``epoch.json`` in the host's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPOCH
        self.seen = self._read()

    def without_unsafe_orders(self, reply: BeatReply) -> tuple[BeatReply, str]:
        """Return the reply without unsafe orders, and a message if the epoch is behind."""
        epoch = reply.epoch
        if epoch is None or (self.seen is not None and epoch.number == self.seen.number):
            return reply, ""
        if self.seen is not None and epoch.number < self.seen.number:
            suspended = dict.fromkeys(
                ("wanted", "stop", "forget", "environments", "delete_files"), ()
            ) | {"rotate": False}
            return reply.model_copy(update=suspended), (
                f"The server shows epoch {epoch.number}, but this host has seen "
                f"{self.seen.number}: it was restored from a backup. Nothing is started, "
                "stopped or deleted for it until `manage.py epoch raise` was run there."
            )
        write_secret(self._path, epoch.model_dump_json())
        self.seen = epoch
        return reply, ""

    def forget(self) -> None:
        """Delete the stored epoch after a new enrolment."""
        self._path.unlink(missing_ok=True)
        self.seen = None

    def _read(self) -> EpochShown | None:
        try:
            return EpochShown.model_validate_json(self._path.read_bytes(), extra="ignore")
        except (OSError, ValidationError):
            return None


log = logging.getLogger(__name__)
ENROLMENT_TIMEOUT_SECONDS = 900.0
MAX_SPREAD = 8


class EnrolmentError(Exception):
    """The enrolment failed; the text gives the reason and the remedy."""


def enroll(
    host_dir: HostDir,
    server: str,
    token: str,
    name: str | None = None,
    address: str | None = None,
    scheduler: SchedulerSettings | None = None,
) -> Credential:
    """Exchange the token for a credential, write it, and return it.

    An enrolled host sends its id, so that the server rotates its credential instead of creating
    a second host. A busy server is retried after its Retry-After delay.

    Raises:
        EnrolmentError: an address is invalid or not this host's, the scheduler does not answer, or
            the server rejected the token.
        UnreachableError: the server does not answer.
    """
    try:
        server = web_address(server).url
    except AddressError as error:
        raise EnrolmentError(
            f"--server {server!r} is not a valid address: {error}; give one such as "
            "http://127.0.0.1:8000"
        ) from None
    host_dir.make()
    if address:
        _choose_address(host_dir, address)
    if scheduler:
        if problem := SCHEDULERS[scheduler.KIND].problem(scheduler):
            raise EnrolmentError(f"--{scheduler.KIND}: {problem}")
        host_dir.save_scheduler(scheduler)
    known = _known(host_dir)
    client = ServerClient(server, known.credential if known else None)
    request = EnrollRequest(
        token=token.strip(),
        name=name,
        host_id=known.host_id if known else None,
        facts=inventory.host_facts(host_dir.path, host_dir.config()),
        sent_at_ms=time.time_ns() // 1_000_000,
    )
    try:
        reply = _enroll_with_retries(client, request)
    except RefusedError as refusal:
        raise EnrolmentError(f"{refusal}\n{_remedy(refusal, server)}") from None
    finally:
        client.close()
    credential = Credential(
        server=client.server,
        host_id=reply.host_id,
        name=reply.name,
        credential=reply.credential,
        command_key=reply.command_key,
        redis_url=reply.redis_url,
        redis_secret=reply.redis_secret,
        beat_seconds=reply.beat_seconds,
    )
    if reply.redis_ca_pem:
        host_dir.save_redis_ca(reply.redis_ca_pem)
    host_dir.save_credential(credential)
    EpochMemory(host_dir.path).forget()
    return credential


def _remedy(refusal: RefusedError, server: str) -> str:
    """Return what to do about a refused enrolment; only 401 and 403 are about the token."""
    status, unused = refusal.status, "The token was not used"
    if refusal.is_unauthorized:
        return (
            "Tokens hold for a short time and for one use: "
            "make a new one on the server's Hosts page and run this command with it again."
        )
    if status == HTTPStatus.BAD_REQUEST and refusal.code in ("", "unknown_host"):
        return (
            f"{unused}: the server does not take {server} for its own address. There, start "
            "`python3 manage.py up --host 0.0.0.0`, which answers at every address of the "
            "machine, or add the name to SLIPWAY_ALLOWED_HOSTS; or give another address of it as "
            "--server."
        )
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"{unused}: give the address to which the server sends on as --server."
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return f"{unused}: no Slipway answers at {server}; give the address of its first page."
    if status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return f"{unused}: give the proxy's user and password in its variable."
    return f"{unused}: correct the cause and run this command with it again."


def _enroll_with_retries(client: ServerClient, request: EnrollRequest) -> EnrollReply:
    """Enrol, retrying after the Retry-After delay of a busy server; the token stays unused."""
    give_up_at = time.monotonic() + ENROLMENT_TIMEOUT_SECONDS
    spread = 0
    while True:
        now = request.model_copy(update={"sent_at_ms": time.time_ns() // 1_000_000})
        try:
            return client.enroll(now)
        except RefusedError as refusal:
            wait = refusal.retry_after_seconds
            if wait is None:
                raise
            if time.monotonic() + wait > give_up_at:
                raise EnrolmentError(
                    f"{refusal}\nThe token was not used: run this command with it again later."
                ) from None
            # Jitter: hosts with the same delay do not retry simultaneously.
            spread = min(spread + 1, MAX_SPREAD)
            wait *= 1 + spread * secrets.randbelow(1000) / 1000
            log.warning("%s Trying again in %.0f s; the token stays unused.", refusal, wait)
        time.sleep(wait)


def _choose_address(host_dir: HostDir, address: str) -> None:
    try:
        address = host_name(address).strip("[]")
        interface_of(address)
    except (AddressError, NoSuchAddressError) as error:
        raise EnrolmentError(f"--address: {error}") from None
    host_dir.save_address(address)


def _known(host_dir: HostDir) -> Credential | None:
    with contextlib.suppress(HostConfigError):
        return host_dir.credential()
    return None


# Rotates a host's secrets: generated here; the server receives only their digests.
#
# New secrets are written to disk before the request. If the reply is lost, the next try finds out
# which of the two secrets the server accepts.


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
        with child.locked(host_dir.path / "rotate.lock"):
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
    except child.LockedError:
        raise RotationError("another process is replacing this host's secrets now") from None
    return rotated


def _read(pending: Path) -> Credential | None:
    with suppress(OSError, ValidationError):
        return Credential.model_validate_json(pending.read_bytes(), extra="ignore")
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
