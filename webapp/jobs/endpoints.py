"""The endpoint of a serving job: its address, its keys, and whether this server may call it."""

import json
import secrets
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.http import HttpRequest
from django.utils.crypto import salted_hmac
from pydantic import ValidationError

from runners.jobspec import ServeSpec
from runners.jobspec.serve import LOOPBACK, key_hash
from runners.shared.engine_commands import shown_command
from runners.shared.messages import EndpointBody
from webapp.accounts.sign_in import session_secret_keep, session_secret_of
from webapp.hosts.models import Host
from webapp.jobs.models import AttemptEvent, Job, JobState

SALT = "slipway.playground"
SESSION_KEYS = "endpoint-keys"  # session key: job id -> the endpoint's key, encrypted, until shown


class Endpoint(NamedTuple):
    """A running endpoint; ``is_local``: it listens on this machine's own loopback."""

    host: str
    port: int
    model: str
    has_keys: bool
    is_local: bool
    has_chat_template: bool | None = None  # None: its host does not say

    @property
    def url(self) -> str:
        """Return the base URL for OpenAI clients."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/v1"

    @property
    def is_loopback(self) -> bool:
        """Return whether only programs on its own host can reach it."""
        return self.host == LOOPBACK


def endpoint_of(job: Job) -> Endpoint | None:
    """Return a running job's endpoint; None before it is ready and after its end."""
    attempt = job.current_attempt
    if job.kind != "serve" or job.state != JobState.RUNNING or attempt is None:
        return None
    event = AttemptEvent.objects.filter(attempt=attempt, kind="endpoint").order_by("-seq").first()
    try:
        body = EndpointBody.model_validate(event.body if event else {})
    except ValidationError:
        return None
    is_local = body.host == LOOPBACK and is_this_machine(attempt.host)
    return Endpoint(
        body.host, body.port, body.model, body.has_keys, is_local, body.has_chat_template
    )


def planned_command(job: Job) -> str:
    """Return the engine's command line as the job's spec says it; "" for other jobs."""
    if job.kind != "serve":
        return ""
    try:
        return shown_command(ServeSpec.model_validate(job.spec))
    except ValidationError:  # written by an older release
        return ""


def command_run(job: Job) -> str:
    """Return the command line that the job's host reported; "" before its engine answered."""
    attempt = job.current_attempt
    if job.kind != "serve" or attempt is None:
        return ""
    event = AttemptEvent.objects.filter(attempt=attempt, kind="endpoint").order_by("-seq").first()
    return str(event.body.get("command", "")) if event else ""


def is_this_machine(host: Host) -> bool:
    """Return whether ``up`` enrolled the host on this machine; the host's own claim is ignored."""
    try:
        credential = json.loads((Path(settings.DATA_DIR) / "host" / "credential.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(credential, dict) and credential.get("host_id") == host.pk


# Keys


def new_key() -> str:
    """Return a key for one endpoint; only its hashes are stored."""
    return f"sk-slipway-{secrets.token_urlsafe(32)}"


def keep_for_session(request: HttpRequest, job: Job, key: str) -> None:
    """Keep a key in the session until its job's page is opened, if the job was made with it."""
    if job.spec.get("key_hashes", [""])[:1] == [key_hash(key)]:
        session_secret_keep(request, SESSION_KEYS, job.pk, key)


def key_shown_once(request: HttpRequest, job: Job) -> str:
    """Return the key that this session made for the job, and delete it."""
    key = session_secret_of(request, SESSION_KEYS, job.pk)
    if key:
        del request.session[SESSION_KEYS]
    return key


def playground_key(first_hash: str) -> str:
    """Return this server's own key for an endpoint, derived from the owner key's hash."""
    return salted_hmac(SALT, first_hash, algorithm="sha256").hexdigest()


def hashes_of(key: str) -> tuple[str, str]:
    """Return the hashes that an endpoint stores: of its owner's key, and of this server's."""
    first = key_hash(key)
    return first, key_hash(playground_key(first))
