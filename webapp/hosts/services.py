"""Operations on hosts: enrol, revoke access, contact, cordon, drain."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.utils.text import slugify

from runners.shared.messages import (
    MAX_NAME_CHARACTERS,
    PROTOCOL_VERSION,
    EnrollReply,
    EnrollRequest,
    RotateReply,
    RotateRequest,
)
from runners.shared.redis_address import bare, is_encrypted
from runners.shared.timing import (
    BEAT_SECONDS,
    CONTACT_PAUSE_SECONDS,
    DEGRADED_AFTER_SECONDS,
    LONGEST_GAP_SECONDS,
    UNREACHABLE_AFTER_SECONDS,
)
from webapp.accounts.models import Team
from webapp.audit.models import Event, event_record
from webapp.core.clock import now, now_ms
from webapp.core.display import counted
from webapp.core.problems import ConflictProblem, InvalidProblem, UnauthorizedProblem
from webapp.core.queries import refuse_stale
from webapp.hosts import epoch
from webapp.hosts.epoch import epoch_advance
from webapp.hosts.models import RUNS_JOBS, Device, EnrolmentToken, Host, HostState
from webapp.hosts.pools import DEFAULT, devices_sync, kind_of, pool_ensure
from webapp.live.stream import hosts_topic, publish_all

# ---------------------------------------------------------------------------
# Contact status of hosts: seconds since the last heartbeat, and what follows a change.
# ---------------------------------------------------------------------------


class Contact(StrEnum):
    """Liveness of a host, from its heartbeats; it limits which new jobs the host gets."""

    UNKNOWN = "unknown"  # no heartbeat yet
    LIVE = "live"
    DEGRADED = "degraded"
    UNREACHABLE = "unreachable"


def silent_seconds(host: Host) -> float | None:
    """Return the seconds since the host's last heartbeat, or None before the first."""
    if host.last_seen_at is None:
        return None
    return max(0.0, (now() - host.last_seen_at).total_seconds())


def contact_of(host: Host) -> Contact:
    """Return the contact status of a host now."""
    silent = silent_seconds(host)
    if silent is None:
        return Contact.UNKNOWN
    if silent < DEGRADED_AFTER_SECONDS:
        return Contact.LIVE
    return Contact.DEGRADED if silent < UNREACHABLE_AFTER_SECONDS else Contact.UNREACHABLE


# Detect hosts that lose or regain contact; record an event and notify open pages.


ACTOR = "system:contact"
KEEP_TOKENS = timedelta(days=30)


class ClockWatch:
    """Notices that the server's clock was set, by comparing it with one that nobody sets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._difference = now().timestamp() - clock()

    def jump_seconds(self) -> float:
        """Return by how much the clock was set since the last call; 0.0 if by little.

        A jump of less than half a minute makes no host that reports look silent.
        """
        difference = now().timestamp() - self._clock()
        jump, self._difference = difference - self._difference, difference
        return jump if abs(jump) > DEGRADED_AFTER_SECONDS else 0.0


class ContactSweep:
    """Announces changes of contact; pauses after a start and after a suspended server.

    A suspended server received no heartbeats, which says nothing about the hosts; nor does a
    clock that was set.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watch = ClockWatch(clock)
        self._is_first = True
        self._last_at = clock()
        self._paused_until = clock() + CONTACT_PAUSE_SECONDS

    def step(self) -> list[Host]:
        """Return the hosts whose contact changed."""
        instant = self._clock()
        jump = self._watch.jump_seconds()
        if jump or instant - self._last_at > LONGEST_GAP_SECONDS:
            self._paused_until = instant + CONTACT_PAUSE_SECONDS
        if jump < 0:
            _bring_back(jump)
        if self._is_first:
            _bound_tokens()
            self._is_first = False
        self._last_at = instant
        is_paused = instant < self._paused_until
        enrolled = Host.objects.filter(kind__in=RUNS_JOBS).exclude(state=HostState.RETIRED)
        hosts = enrolled.only("team", "state", "contact", "last_seen_at")
        changes = [(host, contact_of(host)) for host in hosts]
        return _announce(
            [
                (host, contact)
                for host, contact in changes
                if contact != host.contact and (not is_paused or contact is Contact.LIVE)
            ]
        )


def _bring_back(jump_seconds: float) -> None:
    """Adapt stored times to a clock that was set back by ``jump_seconds`` < 0.

    Heartbeats of the future would have silent hosts look live, and enrolment tokens would be
    valid for longer than an hour.
    """
    instant = now()
    Host.objects.filter(last_seen_at__gt=instant).update(last_seen_at=instant)
    expires_at = F("expires_at") + timedelta(seconds=jump_seconds)
    EnrolmentToken.objects.filter(used_at=None).update(expires_at=expires_at)


def _bound_tokens() -> None:
    """End tokens within an hour from now: the clock may have been set back before the start."""
    latest = now() + TOKEN_LIFETIME
    EnrolmentToken.objects.filter(used_at=None, expires_at__gt=latest).update(expires_at=latest)


def _announce(changes: Sequence[tuple[Host, Contact]]) -> list[Host]:
    """Store all changes in one transaction; return the hosts not announced by another process."""
    if not changes:
        return []
    with transaction.atomic():
        announced = [(host, contact) for host, contact in changes if _is_first(host, contact)]
        Event.objects.bulk_create(_event(host, contact) for host, contact in announced)
        transaction.on_commit(lambda: publish_host_states(announced))
    return [host for host, _ in announced]


def _is_first(host: Host, contact: Contact) -> bool:
    """Return whether no other process announced the change meanwhile."""
    rows = Host.objects.filter(pk=host.pk, contact=host.contact)
    return bool(rows.update(contact=contact))


def _event(host: Host, contact: Contact) -> Event:
    return Event(
        at=now(),
        team_id=host.team_id,
        kind="host.contact",
        subject=host.pk,
        from_state=host.contact,
        to_state=contact,
        actor=ACTOR,
        detail={"silent_seconds": silent_seconds(host)},
    )


def expire_tokens() -> int:
    """Delete enrolment tokens that expired more than ``KEEP_TOKENS`` ago."""
    rows, _ = EnrolmentToken.objects.filter(expires_at__lt=now() - KEEP_TOKENS).delete()
    return rows


# ---------------------------------------------------------------------------
# Host lifecycle: enrolment tokens, enrolment, credentials, states, findings.
# ---------------------------------------------------------------------------


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
        event_record(host, "host.rechecked", by)
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
        event_record(host, "host.enrolled", f"host:{host.slug}", to_state=host.state)
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
    refusal = epoch.grant(host)
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
            "The enrolment token is unknown, used, revoked or older than an hour. Create a new "
            "token under Hosts, Add a host.",
        )
    return EnrolmentToken.objects.get(token_hash=digest(text))


def _host_of(token: EnrolmentToken, request: EnrollRequest) -> Host:
    if request.host_id:
        host = Host.objects.filter(pk=request.host_id, team=token.team).first()
        if host is not None:
            return host
    name = request.name or token.name or request.facts.hostname[:MAX_NAME_CHARACTERS]
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
        event_record(host, "host.revoked", by)
        epoch_advance()
    epoch.withdraw(host)


def rotation_request(*, host: Host, by: str) -> None:
    """Request rotation of a host's secrets at its next heartbeat.

    Raises:
        ConflictProblem: the host's credential is revoked.
    """
    with transaction.atomic():
        rows = Host.objects.filter(pk=host.pk).exclude(credential_hash="")
        if not rows.update(rotation_asked_at=now()):
            raise ConflictProblem(
                "revoked", f"The access of {host.name} is revoked; enrol it again."
            )
        event_record(host, "host.rotation_asked", by)


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
            raise ConflictProblem(
                "secret_taken", "Another host has this credential. Generate a new one."
            )
        host.credential_hash = request.credential_hash
        host.redis_secret_hash = request.redis_secret_hash
        host.command_salt = secrets.token_hex(16)
        host.rotation_asked_at = None
        host.save(update_fields=[*ROTATED])
        event_record(host, "host.rotated", f"host:{host.slug}")
        epoch_advance()
    redis_url = _grant_redis(host, is_same_machine=is_same_machine)
    return RotateReply(
        command_key=command_key(host), redis_url=redis_url, has_redis_user=redis_url is not None
    )


def _check_ready(host: Host, before: str, to: HostState) -> None:
    if to != HostState.READY:
        return
    if before == HostState.RETIRED:
        raise ConflictProblem("retired", f"{host.name} is retired; enrol it again.")
    if not host.microbench:
        raise ConflictProblem(
            "not_measured", f"{host.name} becomes ready once its agent has measured it."
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
        event_record(host, "host.state", by, from_state=before, to_state=to)
    if to == HostState.RETIRED:
        credential_revoke(host=host, by=by)
    host.refresh_from_db()


# ---------------------------------------------------------------------------
# Cordon devices, each with a reason; put hosts into maintenance or retire them.
# ---------------------------------------------------------------------------


LONGEST_REASON = 200


def device_words(device: Device) -> str:
    """Return the display name of a device: "GPU 0", "Slot 2", "The processor"."""
    numbered = {"gpu": "GPU", "slot": "Slot"}.get(device.kind)
    return f"{numbered} {device.index}" if numbered else "The processor"


def device_cordon(*, device: Device, by: str, reason: str) -> None:
    """Cordon a device: it takes no new jobs; jobs that run on it continue.

    Raises:
        InvalidProblem: the reason is empty or too long.
        ConflictProblem: the device is cordoned already; the earlier reason stays.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise InvalidProblem("reason", "reason is empty; give one, such as “ECC errors”.")
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason",
            f"reason has {len(reason)} characters; the limit is {LONGEST_REASON}. Shorten it.",
        )
    with transaction.atomic():
        free = Device.objects.filter(pk=device.pk, cordoned_at=None)
        if not free.update(cordoned_at=now(), cordoned_by=by[:80], cordon_reason=reason):
            device.refresh_from_db()
            raise ConflictProblem(
                "cordoned",
                f"{device_words(device)} is cordoned already, by {device.cordoned_by}: "
                f"{device.cordon_reason}. To change the reason, uncordon the device, then cordon "
                "it again.",
            )
        _record_cordon(device, "device.cordoned", by, reason)
    device.refresh_from_db()


def device_uncordon(*, device: Device, by: str, seen: str = "") -> None:
    """Uncordon a device; ``seen`` is the version mark of the cordon that the page showed.

    Raises:
        ConflictProblem: the cordon was replaced meanwhile.
    """
    with transaction.atomic():
        current = Device.objects.select_for_update(no_key=True).get(pk=device.pk)
        refuse_stale(
            seen,
            current.cordoned_at,
            f"The cordon of {device_words(device)} was",
            current.cordoned_by,
            current.cordoned_at,
            reader=by,
        )
        rows = Device.objects.filter(pk=device.pk, cordoned_at__isnull=False)
        if rows.update(cordoned_at=None, cordoned_by="", cordon_reason=""):
            _record_cordon(device, "device.uncordoned", by, "")
    device.refresh_from_db()


def _record_cordon(device: Device, kind: str, by: str, reason: str) -> None:
    host: Host = device.host
    event_record(
        host,
        kind,
        by,
        detail={"device": device_words(device), "uuid": device.uuid, "reason": reason},
    )


def host_take_out(*, host: Host, to: HostState, by: str) -> None:
    """Put a host into maintenance or retire it, if no job holds one of its devices.

    Raises:
        ConflictProblem: jobs still hold devices of the host.
    """
    held = host.devices.filter(allocations__isnull=False, allocations__released_at=None)
    num_jobs = held.values("allocations__attempt__job").distinct().count()
    if num_jobs:
        raise ConflictProblem(
            "host_in_use",
            f"{host.name} still runs {counted(num_jobs, 'job')}. Drain it and "
            "wait until they have ended, or stop them.",
        )
    host_set_state(host=host, to=to, by=by)


def publish_host_states(hosts: Iterable[tuple[Host, str]]) -> None:
    """Publish hosts' states and contacts to their pages and their teams' lists."""
    publish_all(message for host, contact in hosts for message in _host_messages(host, contact))


def publish_host_checks(host: Host) -> None:
    """Publish that a host's check-list may have changed; pages reload it."""
    data = {"host": host.pk}
    topics = (f"host:{host.pk}", hosts_topic(host.team_id))
    publish_all((topic, "host.check", data) for topic in topics)


def _host_messages(host: Host, contact: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    data = {
        "host": host.pk,
        "state": host.state,
        "label": host.get_state_display(),
        "contact": contact,
    }
    yield f"host:{host.pk}", "host.state", data
    yield hosts_topic(host.team_id), "host.state", data
