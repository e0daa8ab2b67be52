"""Host lifecycle: enrolment tokens, enrolment, credentials, states, findings."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.utils.text import slugify

from runners.messages import (
    PROTOCOL_VERSION,
    EnrollReply,
    EnrollRequest,
    RotateReply,
    RotateRequest,
)
from runners.redis_address import bare, is_encrypted
from webapp.accounts.models import Team
from webapp.core.clock import now, now_ms
from webapp.core.problems import ConflictProblem, InvalidProblem, UnauthorizedProblem
from webapp.hosts import redis_users
from webapp.hosts.contact import BEAT_SECONDS
from webapp.hosts.epoch import epoch_advance
from webapp.hosts.models import EnrolmentToken, Host, HostState
from webapp.hosts.pools import DEFAULT, devices_sync, kind_of, pool_ensure
from webapp.jobs.models import Event
from webapp.live.publish import publish_host_checks

# Server-side findings about a host: the JSON of ``Host.checks``.


WANTS_RECHECK = "wants_recheck"


def checks_update(host_id: str, **changes: Any) -> dict[str, Any]:
    """Update keys of ``Host.checks`` and return the whole; None deletes a key."""
    with transaction.atomic():
        host = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host_id)
        merged = host.checks | changes
        checks = {name: value for name, value in merged.items() if value is not None}
        Host.objects.filter(pk=host_id).update(checks=checks)
    return checks


def recheck_request(*, host: Host, by: str) -> None:
    """Request new facts from a host at its next heartbeat and a new round trip of its queue."""
    with transaction.atomic():
        host.checks = checks_update(host.pk, **{WANTS_RECHECK: True, "queue": None})
        Event.objects.create(
            at=now(), team_id=host.team_id, kind="host.rechecked", subject=host.pk, actor=by
        )
    publish_host_checks(host)


ROTATED = ("credential_hash", "redis_secret_hash", "command_salt", "rotation_asked_at")
TOKEN_LIFETIME = timedelta(hours=1)
UNKNOWN_CREDENTIAL = (
    "unknown_credential",
    "No host has this credential. It was rotated or revoked; enrol the host again.",
)


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret in hexadecimal: only this is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


def token_create(
    *,
    team: Team,
    by: User | None,
    name: str,
    pool: str = DEFAULT,
    labels: Mapping[str, str] | None = None,
) -> tuple[EnrolmentToken, str]:
    """Return a one-time enrolment token, valid for an hour, and its text, shown only now."""
    text = f"slt_{secrets.token_urlsafe(32)}"  # never starts with "-", which would be an option
    token = EnrolmentToken.objects.create(
        team=team,
        created_by=by,
        name=name,
        pool=pool,
        labels=dict(labels or {}),
        token_hash=digest(text),
        expires_at=now() + TOKEN_LIFETIME,
    )
    return token, text


def token_revoke(*, token: EnrolmentToken) -> bool:
    """Revoke an unused token; return whether it was still usable."""
    rows = EnrolmentToken.objects.filter(pk=token.pk, used_at=None, revoked_at=None)
    return bool(rows.update(revoked_at=now()))


def host_enroll(request: EnrollRequest, *, is_same_machine: bool = False) -> EnrollReply:
    """Enrol a host with a one-time token; a known host gets a new credential.

    Raises:
        InvalidProblem: the agent has another protocol version.
        UnauthorizedProblem: the token is unknown, used, expired or revoked.
    """
    if request.protocol_version != PROTOCOL_VERSION:
        raise InvalidProblem(
            "version_incompatible",
            f"The agent speaks protocol {request.protocol_version}, this server "
            f"{PROTOCOL_VERSION}. Install the same version on both.",
        )
    credential, redis_secret = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    with transaction.atomic():
        token = _use_token(request.token)
        host = _host_of(token, request)
        _write_identity(host, request, digest(credential), digest(redis_secret))
        token.host = host
        token.save(update_fields=["host"])
        _record_enrolment(host)
        epoch_advance()  # a known host's credential was replaced
    redis_url = _grant_redis(host, is_same_machine=is_same_machine)
    return EnrollReply(
        host_id=host.pk,
        name=host.name,
        credential=credential,
        command_key=command_key(host),
        redis_url=redis_url,
        redis_secret=redis_secret if redis_url else None,
        redis_ca_pem=_redis_ca(redis_url),
        server_time_ms=now_ms(),
        beat_seconds=BEAT_SECONDS,
    )


def _grant_redis(host: Host, *, is_same_machine: bool) -> str | None:
    """Create a host's Redis users; return the Redis URL for it, or None for HTTP only."""
    url = settings.REDIS_URL if is_same_machine else settings.HOST_REDIS_URL
    refusal = redis_users.grant(host)
    checks = {"redis_refusal": refusal, "has_redis": bool(url) and not refusal, "queue": None}
    host.checks = checks_update(host.pk, **checks)
    publish_host_checks(host)
    return bare(url) if url and not refusal else None


def _redis_ca(redis_url: str | None) -> str | None:
    if redis_url is None or not is_encrypted(redis_url) or settings.REDIS_CA is None:
        return None
    return Path(settings.REDIS_CA).read_text("ascii")


def _use_token(text: str) -> EnrolmentToken:
    """Mark the token as used with one conditional UPDATE, so that only one host can use it."""
    usable = EnrolmentToken.objects.filter(
        token_hash=digest(text), used_at=None, revoked_at=None, expires_at__gt=now()
    )
    if not usable.update(used_at=now()):
        raise UnauthorizedProblem(
            "token_refused",
            "The enrolment token is unknown, used, revoked or older than an hour. "
            "Make a new one under Hosts, Add a host.",
        )
    return EnrolmentToken.objects.get(token_hash=digest(text))


def _host_of(token: EnrolmentToken, request: EnrollRequest) -> Host:
    if request.host_id:
        host = Host.objects.filter(pk=request.host_id, team=token.team).first()
        if host is not None:
            return host
    name = request.name or token.name or request.facts.hostname
    return Host(
        team=token.team,
        name=name,
        slug=free_slug(name),
        pool=pool_ensure(team=token.team, slug=token.pool),
        labels=token.labels,
    )


def free_slug(name: str) -> str:
    """Return a slug of the name that no host has yet."""
    base = slugify(name)[:70] or "host"
    taken = set(Host.objects.filter(slug__startswith=base).values_list("slug", flat=True))
    candidates = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 3)))
    return next(slug for slug in candidates if slug not in taken)


def _write_identity(
    host: Host, request: EnrollRequest, credential_hash: str, redis_secret_hash: str
) -> None:
    host.credential_hash = credential_hash
    host.redis_secret_hash = redis_secret_hash
    host.rotation_asked_at = None
    host.command_salt = secrets.token_hex(16)
    host.protocol_version = request.protocol_version
    host.agent_version = request.facts.agent_version
    host.facts = request.facts.model_dump(mode="json")
    host.kind = kind_of(request.facts)
    host.boot_id = request.facts.boot_id
    host.clock_offset_ms = request.sent_at_ms - now_ms()
    host.enrolled_at = now()
    if host.state in {HostState.PENDING, HostState.RETIRED}:
        host.state = HostState.CHECKING
    host.save()
    devices_sync(host, request.facts)


def _record_enrolment(host: Host) -> None:
    Event.objects.create(
        at=now(),
        team_id=host.team_id,
        kind="host.enrolled",
        subject=host.pk,
        to_state=host.state,
        actor=f"host:{host.slug}",
    )


def command_key(host: Host) -> str:
    """Return the key that signs this host's wake signals; it needs the site's secret key."""
    text = f"doorbell:{host.pk}:{host.command_salt}".encode()
    return hmac.new(settings.SECRET_KEY.encode(), text, hashlib.sha256).hexdigest()


def host_by_credential(credential: str) -> Host | None:
    """Return the host that has this credential, or None."""
    if not credential:
        return None
    return Host.objects.filter(credential_hash=digest(credential)).first()


def credential_revoke(*, host: Host, by: str) -> None:
    """Revoke a host's credential until it is enrolled again; its running jobs continue."""
    with transaction.atomic():
        Host.objects.filter(pk=host.pk).update(
            credential_hash="", command_salt="", redis_secret_hash="", rotation_asked_at=None
        )
        _record(host, "host.revoked", by)
        epoch_advance()
    redis_users.withdraw(host)


def rotation_request(*, host: Host, by: str) -> None:
    """Request rotation of a host's secrets at its next heartbeat.

    Raises:
        ConflictProblem: the host's credential is revoked.
    """
    with transaction.atomic():
        rows = Host.objects.filter(pk=host.pk).exclude(credential_hash="")
        if not rows.update(rotation_asked_at=now()):
            raise ConflictProblem("revoked", f"{host.name} is locked out; enrol it again.")
        _record(host, "host.rotation_asked", by)


def host_rotate(
    *, host: Host, request: RotateRequest, is_same_machine: bool = False
) -> RotateReply:
    """Replace a host's secrets by those whose digests it sends; the old ones end now.

    The host generated them, so after a lost reply one of the two pairs it has is valid.

    Raises:
        ConflictProblem: another host has this credential digest.
    """
    with transaction.atomic():
        others = Host.objects.filter(credential_hash=request.credential_hash).exclude(pk=host.pk)
        if others.exists():
            raise ConflictProblem("secret_taken", "Make another secret: this one is taken.")
        host.credential_hash = request.credential_hash
        host.redis_secret_hash = request.redis_secret_hash
        host.command_salt = secrets.token_hex(16)
        host.rotation_asked_at = None
        host.save(update_fields=[*ROTATED])
        _record(host, "host.rotated", f"host:{host.slug}")
        epoch_advance()
    redis_url = _grant_redis(host, is_same_machine=is_same_machine)
    return RotateReply(
        command_key=command_key(host), redis_url=redis_url, has_redis_user=redis_url is not None
    )


def _record(host: Host, kind: str, by: str) -> None:
    Event.objects.create(at=now(), team_id=host.team_id, kind=kind, subject=host.pk, actor=by)


def _check_ready(host: Host, before: str, to: HostState) -> None:
    if to != HostState.READY:
        return
    if before == HostState.RETIRED:
        raise ConflictProblem("retired", f"{host.name} is retired; enrol it again.")
    if not host.microbench:
        raise ConflictProblem(
            "not_measured", f"{host.name} is ready as soon as its agent has measured it."
        )


def host_set_state(*, host: Host, to: HostState, by: str) -> None:
    """Move a host between ready, draining, maintenance and retired.

    Raises:
        ConflictProblem: the new state is ready, but the host is retired or was never measured.
    """
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).state
        _check_ready(host, before, to)
        Host.objects.filter(pk=host.pk).update(state=to)
        Event.objects.create(
            at=now(),
            team_id=host.team_id,
            kind="host.state",
            subject=host.pk,
            from_state=before,
            to_state=to,
            actor=by,
        )
    if to == HostState.RETIRED:
        credential_revoke(host=host, by=by)
    host.refresh_from_db()
