"""Where a serving job answers, as its host told; its keys; whether this server may ask it."""

import json
import secrets
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.http import HttpRequest
from django.utils.crypto import salted_hmac
from pydantic import ValidationError

from runners.endpoint_spec import LOOPBACK, key_hash
from runners.messages import EndpointBody
from webapp.hosts.models import Host
from webapp.jobs.models import AttemptEvent, Job, JobState

SALT = "slipway.playground"
SESSION_KEYS = "endpoint-keys"  # session key: job id -> its endpoint's key, until it was shown


class Endpoint(NamedTuple):
    """A running endpoint; ``is_local``: it listens on this very machine's own loopback."""

    host: str
    port: int
    model: str
    has_keys: bool
    is_local: bool

    @property
    def url(self) -> str:
        """Return the base address, as OpenAI's clients take it."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/v1"

    @property
    def is_loopback(self) -> bool:
        """Return whether only programs of its own host reach it."""
        return self.host == LOOPBACK


def endpoint_of(job: Job) -> Endpoint | None:
    """Return where a running job answers; None before it is ready and after its end."""
    attempt = job.current_attempt
    if job.kind != "serve" or job.state != JobState.RUNNING or attempt is None:
        return None
    told = AttemptEvent.objects.filter(attempt=attempt, kind="endpoint").order_by("-seq").first()
    try:
        body = EndpointBody.model_validate(told.body if told else {})
    except ValidationError:
        return None
    is_local = body.host == LOOPBACK and is_this_machine(attempt.host)
    return Endpoint(body.host, body.port, body.model, body.has_keys, is_local)


def is_this_machine(host: Host) -> bool:
    """Return whether ``up`` enrolled the host here: what a host says of itself does not count."""
    try:
        told = json.loads((Path(settings.DATA_DIR) / "host" / "credential.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("host_id") == host.pk


# Keys


def new_key() -> str:
    """Return a key for one endpoint; only hashes of it are kept."""
    return f"sk-slipway-{secrets.token_urlsafe(32)}"


def keep_for_session(request: HttpRequest, job: Job, key: str) -> None:
    """Keep a key until its job's page is opened, where the job is the one made with it."""
    if job.spec.get("key_hashes", [""])[:1] == [key_hash(key)]:
        request.session[SESSION_KEYS] = {job.pk: key}


def key_shown_once(request: HttpRequest, job: Job) -> str:
    """Return the key that this session made for the job, and forget it."""
    kept = request.session.get(SESSION_KEYS) or {}
    if job.pk not in kept:
        return ""
    del request.session[SESSION_KEYS]
    return str(kept[job.pk])


def playground_key(first_hash: str) -> str:
    """Return the key with which this server itself asks the endpoint of that first key."""
    return salted_hmac(SALT, first_hash, algorithm="sha256").hexdigest()


def hashes_of(key: str) -> tuple[str, str]:
    """Return what an endpoint keeps: the hash of its owner's key, and of this server's own."""
    first = key_hash(key)
    return first, key_hash(playground_key(first))
