"""Keys of clients for a team's deployments: make, rotate, revoke."""

import secrets
from base64 import urlsafe_b64encode
from datetime import timedelta
from typing import Annotated

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.utils.crypto import salted_hmac
from django.views.decorators.debug import sensitive_variables
from pydantic import BaseModel, ConfigDict, Field

from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.serve import key_hash
from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.names import checked_name
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.deployments.models import Deployment, EarlierSecret, ServingKey

PREFIX = "sk-slipway-"
HINT_LENGTH = len(PREFIX) + 4
MOST_KEYS = 500  # of one team, valid at the same time
DEFAULT_HOLD_SECONDS, MOST_HOLD_SECONDS = 120.0, 1800.0
MOST_DAYS = 3660
DEFAULT_OVERLAP_HOURS, MOST_OVERLAP_HOURS = 24.0, 720.0
MOST_EARLIER = 10  # secrets of one key that open at the same time
PLAYGROUND, PLAYGROUND_SALT = "Playground", "slipway.conversation"
PLAYGROUND_HOLD_SECONDS = 900.0
Limit = Annotated[int | None, Field(ge=1, le=2**31 - 1)]
TokenLimit = Annotated[int | None, Field(ge=1, le=10**15)]


class KeyOptions(BaseModel):
    """What a key opens, and within which limits; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[
        str, Field(min_length=1, max_length=NAME_LENGTH, description="Where it will be used")
    ]
    is_service: Annotated[
        bool,
        Field(description="Of a program, no person: it outlasts who made it. Operators make it"),
    ] = False
    models: Annotated[
        tuple[str, ...], Field(max_length=200, description="Names of deployments; empty: all")
    ] = ()
    requests_per_minute: Annotated[Limit, Field(description="At each gateway")] = None
    max_concurrency: Annotated[Limit, Field(description="Requests at the same time")] = None
    tokens_per_day: Annotated[
        TokenLimit, Field(description="Of prompts and answers, from midnight UTC")
    ] = None
    tokens_per_month: Annotated[
        TokenLimit, Field(description="Of prompts and answers, from the first of the month UTC")
    ] = None
    hold_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=MOST_HOLD_SECONDS,
            description="A request waits so long for a model to wake",
        ),
    ] = DEFAULT_HOLD_SECONDS
    days: Annotated[
        float | None, Field(gt=0, le=MOST_DAYS, description="Until it expires; null: never")
    ] = None


@sensitive_variables("text")
def key_make(*, team: Team, by: User, options: KeyOptions) -> tuple[ServingKey, str]:
    """Return a new key and its text, which is not shown again.

    Raises:
        PermissionDenied: it is for a service, and they are no operator.
        InvalidProblem: the name is not valid, or a model is not the team's.
        ConflictProblem: the team has ``MOST_KEYS`` valid keys.
    """
    if options.is_service and not has_role(by, team, Role.OPERATOR):
        raise PermissionDenied(
            "Only operators make keys of services, which outlast who made them. Make a key of "
            f"your own, or ask an operator of {team.name}."
        )
    name = checked_name(options.name.strip(), "name")
    known = Deployment.objects.filter(team=team, deleted_at=None, name__in=options.models)
    if unknown := set(options.models) - set(known.values_list("name", flat=True)):
        raise InvalidProblem(
            "models", f"{team.name} has no deployment named {min(unknown)[:60]!r}."
        )
    if valid_keys(team).count() >= MOST_KEYS:
        raise ConflictProblem(
            "too_many_keys",
            f"{team.name} has {MOST_KEYS} valid keys, the most. Revoke one that is not used.",
        )
    text = _new_text()
    with transaction.atomic():
        key = ServingKey.objects.create(
            team=team,
            owner=None if options.is_service else by,
            is_service=options.is_service,
            name=name,
            digest=key_hash(text),
            hint=text[:HINT_LENGTH],
            model_names=sorted(set(options.models)),
            requests_per_minute=options.requests_per_minute,
            max_concurrency=options.max_concurrency,
            tokens_per_day=options.tokens_per_day,
            tokens_per_month=options.tokens_per_month,
            hold_seconds=options.hold_seconds,
            created_at=now(),
            expires_at=now() + timedelta(days=options.days) if options.days else None,
        )
        event_record(key, "serving_key.created", by.get_username(), detail={"name": name})
    return key, text


@sensitive_variables("text")
def playground_key_of(*, team: Team, by: User) -> str:
    """Return the text of a person's key for playgrounds of a team; made if there is none.

    It is derived from the key's id and the site's secret, so that it can be told again and is
    not stored.

    Raises:
        ConflictProblem: the team has ``MOST_KEYS`` valid keys.
    """
    for key in valid_keys(team).filter(owner=by, name=PLAYGROUND):
        text = _derived(key.pk)
        if key.digest == key_hash(text):  # else somebody made a key of this name
            return text
    options = KeyOptions(name=PLAYGROUND, hold_seconds=PLAYGROUND_HOLD_SECONDS, days=30.0)
    with transaction.atomic():
        key, _ = key_make(team=team, by=by, options=options)
        text = _derived(key.pk)
        key.digest, key.hint = key_hash(text), text[:HINT_LENGTH]
        key.save(update_fields=["digest", "hint"])
    return text


def _new_text() -> str:
    return PREFIX + secrets.token_urlsafe(32)


class Rotation(BaseModel):
    """How long a key's present secret is still valid beside the new one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overlap_hours: Annotated[
        float,
        Field(
            ge=0,
            le=MOST_OVERLAP_HOURS,
            description="In which the present secret still opens; 0: it ends now",
        ),
    ] = DEFAULT_OVERLAP_HOURS


@sensitive_variables("text")
def key_rotate(*, key: ServingKey, by: User, rotation: Rotation) -> tuple[ServingKey, str]:
    """Give a key a new secret; return the key and the secret, which is not shown again.

    It stays the same key, with its limits and its usage. All earlier secrets open until the end
    of the overlap, or of their own if that comes first.

    Raises:
        ConflictProblem: it is revoked or expired, or has ``MOST_EARLIER`` earlier secrets.
    """
    text, instant = _new_text(), now()
    until = instant + timedelta(hours=rotation.overlap_hours)
    with transaction.atomic():
        row = ServingKey.objects.select_for_update().get(pk=key.pk)
        if row.revoked_at or (row.expires_at and row.expires_at <= instant):
            raise ConflictProblem(
                "key_ended", f"{row.name} is revoked or expired. Make another key instead."
            )
        earlier = EarlierSecret.objects.filter(key=row)
        earlier.filter(valid_until__gt=until).update(valid_until=until)
        earlier.filter(valid_until__lte=instant).delete()
        if until > instant:
            if earlier.count() >= MOST_EARLIER:
                raise ConflictProblem(
                    "too_many_secrets",
                    f"{row.name} has {MOST_EARLIER} earlier secrets that still open, the most. "
                    "Rotate it without an overlap, which ends them.",
                )
            EarlierSecret.objects.create(key=row, digest=row.digest, valid_until=until)
        row.digest, row.hint, row.rotated_at = key_hash(text), text[:HINT_LENGTH], instant
        row.earlier_until = until if until > instant else None
        row.save(update_fields=["digest", "hint", "rotated_at", "earlier_until"])
        detail = {"name": row.name, "overlap_hours": rotation.overlap_hours}
        event_record(row, "serving_key.rotated", by.get_username(), detail=detail)
    return row, text


def _derived(key_id: str) -> str:
    digest = salted_hmac(PLAYGROUND_SALT, key_id, algorithm="sha256").digest()
    return PREFIX + urlsafe_b64encode(digest).rstrip(b"=").decode()


def valid_keys(team: Team) -> QuerySet[ServingKey]:
    """Return the keys of a team that are neither revoked nor expired."""
    rows = ServingKey.objects.filter(team=team, revoked_at=None)
    return rows.exclude(expires_at__lte=now())


def key_revoke(*, key: ServingKey, by: User) -> bool:
    """Revoke a key; gateways end its streams within a second. Return whether it was valid."""
    with transaction.atomic():
        rows = ServingKey.objects.filter(pk=key.pk, revoked_at=None)
        is_revoked = bool(rows.update(revoked_at=now()))
        if is_revoked:
            event_record(key, "serving_key.revoked", by.get_username(), detail={"name": key.name})
    return is_revoked
