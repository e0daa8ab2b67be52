"""What hosts call: enrol, beat."""

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
from webapp.api.problems import REFUSALS
from webapp.core.pace import STRANGER, calls
from webapp.core.problems import TooLargeProblem
from webapp.hosts.beats import host_beat
from webapp.hosts.services import host_enroll, host_rotate

router = Router(tags=["hosts"])
MAX_ECHO_BYTES = 2 * 1024**2
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@router.post("/enroll", response={200: EnrollReply, **REFUSALS}, auth=None)
def enroll(request: HttpRequest, body: EnrollRequest) -> EnrollReply:
    """Exchange a one-time token for a credential of the host's own."""
    calls.keep(STRANGER, address_of(request))
    return host_enroll(body, is_same_machine=is_same_machine(request, body.facts.boot_id))


@router.post("/beat", response={200: BeatReply, **REFUSALS}, auth=HostAuth())
def beat(request: HttpRequest, body: Beat) -> BeatReply:
    """Say how the host is; the reply is its desired state."""
    return host_beat(host=calling_host(request), beat=body)


@router.post("/rotate", response={200: RotateReply, **REFUSALS}, auth=HostAuth())
def rotate(request: HttpRequest, body: RotateRequest) -> RotateReply:
    """Replace the host's secrets; those it called with end at once."""
    host = calling_host(request)
    is_here = is_same_machine(request, host.boot_id)
    return host_rotate(host=host, request=body, is_same_machine=is_here)


@router.post("/echo", response={200: None, **REFUSALS}, auth=HostAuth())
def echo(request: HttpRequest, num_bytes: int = 0) -> HttpResponse:
    """Take any bytes and send some back: so a host measures its way to this server."""
    if not 0 <= num_bytes <= MAX_ECHO_BYTES or len(request.body) > MAX_ECHO_BYTES:
        raise TooLargeProblem("too_large", f"At most {MAX_ECHO_BYTES} bytes each way.")
    return HttpResponse(os.urandom(num_bytes), content_type="application/octet-stream")


def is_same_machine(request: HttpRequest, boot_id: str) -> bool:
    """Return whether a caller runs on this machine, and can reach a Redis on its socket."""
    if request.META.get("REMOTE_ADDR") not in {"127.0.0.1", "::1"} or not BOOT_ID.exists():
        return False
    return BOOT_ID.read_text().strip() == boot_id.strip()
