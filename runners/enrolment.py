"""Enrols this machine as a host: exchanges a one-time token for a credential on disk."""

import contextlib
import logging
import secrets
import time
from urllib.parse import urlsplit

from runners import probe
from runners.client import RefusedError, ServerClient
from runners.config import Credential, HostConfigError, HostDir
from runners.epoch import EpochMemory
from runners.gangs import NoSuchAddressError, interface_of
from runners.launchers import slurm_commands
from runners.launchers.slurm_commands import SlurmError
from runners.messages import EnrollReply, EnrollRequest
from runners.slurm_options import SlurmConfig

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 900.0
MOST_SPREAD = 8


class EnrolmentError(Exception):
    """The enrolment failed; the text gives the reason and the remedy."""


def enroll(
    host_dir: HostDir,
    server: str,
    token: str,
    name: str | None = None,
    address: str | None = None,
    slurm: SlurmConfig | None = None,
) -> Credential:
    """Exchange the token for a credential, write it, and return it.

    An enrolled host sends its id, so that the server rotates its credential instead of creating
    a second host. A busy server is retried after its Retry-After delay.

    Raises:
        EnrolmentError: an address is invalid or not this host's, Slurm does not answer, or the
            server rejected the token.
        UnreachableError: the server does not answer.
    """
    if urlsplit(server).scheme not in ("http", "https"):
        raise EnrolmentError(
            f"--server {server!r} is no address; give one such as http://127.0.0.1:8000"
        )
    host_dir.make()
    if address:
        _choose_address(host_dir, address)
    if slurm:
        _choose_slurm(host_dir, slurm)
    known = _known(host_dir)
    client = ServerClient(server, known.credential if known else None)
    request = EnrollRequest(
        token=token,
        name=name,
        host_id=known.host_id if known else None,
        facts=probe.host_facts(host_dir.path, host_dir.config()),
        sent_at_ms=time.time_ns() // 1_000_000,
    )
    try:
        reply = _enroll_with_retries(client, request)
    except RefusedError as refusal:
        raise EnrolmentError(
            f"{refusal}\nTokens hold for a short time and for one use: "
            "make a new one on the server's Hosts page and run this command with it again."
        ) from None
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


def _enroll_with_retries(client: ServerClient, request: EnrollRequest) -> EnrollReply:
    """Enrol, retrying after the Retry-After delay of a busy server; the token stays unused."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
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
            spread = min(spread + 1, MOST_SPREAD)
            wait *= 1 + spread * secrets.randbelow(1000) / 1000
            log.warning("%s Trying again in %.0f s; the token stays unused.", refusal, wait)
        time.sleep(wait)


def _choose_address(host_dir: HostDir, address: str) -> None:
    try:
        interface_of(address)
    except NoSuchAddressError as error:
        raise EnrolmentError(f"--address: {error}") from None
    host_dir.save_address(address)


def _choose_slurm(host_dir: HostDir, slurm: SlurmConfig) -> None:
    try:
        slurm_commands.partitions()
    except SlurmError as error:
        raise EnrolmentError(
            f"--slurm: {error}\n"
            "Run this on a machine on which `sinfo` answers, such as a login node."
        ) from None
    host_dir.save_slurm(slurm)


def _known(host_dir: HostDir) -> Credential | None:
    with contextlib.suppress(HostConfigError):
        return host_dir.credential()
    return None
