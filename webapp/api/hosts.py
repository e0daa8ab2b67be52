"""Operations of hosts: enrol, send heartbeats, rotate secrets, measure the network."""

import os
from pathlib import Path

from django.http import HttpRequest, HttpResponse
from ninja import Router

from runners.messages import (
    Beat,
    BeatReply,
    EnrollReply,
    EnrollRequest,
    RotateReply,
    RotateRequest,
)
from webapp.accounts.session_signals import address_of
from webapp.api.auth import HostAuth, calling_host
from webapp.api.problems import BYTES_TYPE, REFUSALS, bytes_in, bytes_out
from webapp.core.pace import STRANGER, calls
from webapp.core.problems import TooLargeProblem
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.hourly import keep_heartbeat
from webapp.hosts.services import host_enroll, host_rotate

router = Router(tags=["hosts"])
MAX_ECHO_BYTES = 2 * 1024**2
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@router.post("/enroll", response={200: EnrollReply, **REFUSALS}, auth=None)
def enroll(request: HttpRequest, body: EnrollRequest) -> EnrollReply:
    """Enrol a host: exchange a one-time token for the host's own credential."""
    calls.keep(STRANGER, address_of(request))
    return host_enroll(body, is_same_machine=is_same_machine(request, body.facts.boot_id))


@router.post("/beat", response={200: BeatReply, **REFUSALS}, auth=HostAuth())
def beat(request: HttpRequest, body: Beat) -> BeatReply:
    """Report the state of the host; the reply is its desired state."""
    host = calling_host(request)
    keep_heartbeat(host.credential_hash)
    return host_beat(host=host, beat=body)


@router.post("/rotate", response={200: RotateReply, **REFUSALS}, auth=HostAuth())
def rotate(request: HttpRequest, body: RotateRequest) -> RotateReply:
    """Replace the host's secrets; the ones of this request become invalid at once."""
    host = calling_host(request)
    is_here = is_same_machine(request, host.boot_id)
    return host_rotate(host=host, request=body, is_same_machine=is_here)


@router.post(
    "/echo",
    response={200: None, **REFUSALS},
    auth=HostAuth(),
    openapi_extra=bytes_in() | bytes_out("The bytes"),
)
def echo(request: HttpRequest, num_bytes: int = 0) -> HttpResponse:
    """Receive any bytes and return some, so that a host can measure its network bandwidth."""
    if not 0 <= num_bytes <= MAX_ECHO_BYTES or len(request.body) > MAX_ECHO_BYTES:
        raise TooLargeProblem("too_large", f"At most {MAX_ECHO_BYTES} bytes each way.")
    return HttpResponse(os.urandom(num_bytes), content_type=BYTES_TYPE)


def is_same_machine(request: HttpRequest, boot_id: str) -> bool:
    """Return whether the caller runs on this machine, and can reach Redis on its loopback."""
    if request.META.get("REMOTE_ADDR") not in {"127.0.0.1", "::1"} or not BOOT_ID.exists():
        return False
    return BOOT_ID.read_text().strip() == boot_id.strip()
