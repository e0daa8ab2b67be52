"""Models of teams, roles, quotas, secrets and sessions; every object belongs to a team."""

import re
from typing import Self, TypeVar

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import models

from webapp.core.ids import UlidModel

# Display names of browsers from their User-Agent.


# User-Agents contain the names of older browsers, so the most specific name comes first.
NAMES = (
    ("Edge", r"Edg(?:e|A|iOS)?/(\d+)"),
    ("Opera", r"OPR/(\d+)"),
    ("Firefox", r"(?:Firefox|FxiOS)/(\d+)"),
    ("Chrome", r"(?:Chrome|CriOS)/(\d+)"),
    ("Safari", r"Version/(\d+)[\d.]* (?:Mobile/\w+ )?Safari/"),
)
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("macOS", "Mac OS X"),
    ("Linux", "Linux"),
)
LONGEST = 40


def browser_words(user_agent: str) -> str:
    """Return a browser's name, version and system; for an unknown one, the first characters."""
    for name, pattern in NAMES:
        if match := re.search(pattern, user_agent):
            system = next((words for words, mark in SYSTEMS if mark in user_agent), "")
            return f"{name} {match[1]} on {system}" if system else f"{name} {match[1]}"
    return user_agent[:LONGEST] or "unknown"


class Role(models.TextChoices):
    """Permissions of a member; each role includes the ones before it."""

    VIEWER = "viewer", "Viewer"
    PRACTITIONER = "practitioner", "Practitioner"
    OPERATOR = "operator", "Operator"
    ADMIN = "admin", "Admin"


ROLE_ORDER = (Role.VIEWER, Role.PRACTITIONER, Role.OPERATOR, Role.ADMIN)


class Team(UlidModel):
    """People who share plans, jobs and hosts."""

    name = models.CharField(max_length=80, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """One person's role in one team."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships"
    )
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role, default=Role.PRACTITIONER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "team"], name="one_role_per_team")]

    def __str__(self) -> str:
        return f"{self.user} is {self.role} of {self.team}"


class Quota(models.Model):
    """Limits on a team's use of devices; null means no limit."""

    team = models.OneToOneField(
        Team, primary_key=True, on_delete=models.CASCADE, related_name="quota"
    )
    max_devices = models.PositiveIntegerField(null=True, blank=True)  # held at the same time
    max_gpu_hours_per_month = models.FloatField(null=True, blank=True)
    max_duration_seconds = models.FloatField(null=True, blank=True)  # per job
    max_queued_per_user = models.PositiveIntegerField(default=100)
    share = models.FloatField(default=1.0)  # fair-share weight relative to other teams

    def __str__(self) -> str:
        return f"quota of {self.team_id}"


_KEPT = "_memberships"  # of a request's user, who is read anew with each request


def memberships_keep(user: User, memberships: list[Membership]) -> None:
    """Keep the memberships, with their teams and oldest first, that were read with a user."""
    for each in memberships:
        each.user = user
    setattr(user, _KEPT, memberships)


def memberships_of(user: AbstractBaseUser | AnonymousUser) -> list[Membership]:
    """Return the memberships that count for a user, with their teams, oldest first.

    None for an anonymous user. For one who came with a token those of its team alone:
    ``webapp.api.auth`` sets ``token_team_id`` on the user of such a request, whose memberships
    are read once.
    """
    if not user.is_authenticated:
        return []
    team_id = getattr(user, "token_team_id", None)
    memberships: list[Membership] | None = getattr(user, _KEPT, None)
    if memberships is None:
        stored = Membership.objects.filter(user_id=user.pk)
        memberships = list(stored.select_related("team").order_by("pk"))
        if team_id is not None:
            setattr(user, _KEPT, memberships)
    return [each for each in memberships if team_id in {None, each.team_id}]


def team_ids_of(user: AbstractBaseUser | AnonymousUser) -> list[str]:
    """Return the ids of a user's teams; none for an anonymous user."""
    return sorted(each.team_id for each in memberships_of(user))


Owned_co = TypeVar("Owned_co", bound="TeamOwned", covariant=True)


class TeamQuerySet(models.QuerySet[Owned_co]):
    """Rows that belong to teams."""

    def visible_to(self, user: AbstractBaseUser | AnonymousUser) -> Self:
        """Return the rows of teams that ``user`` belongs to.

        The team ids are queried first: with literals instead of a join, an index that begins with
        the team yields the rows in its order.
        """
        return self.filter(team__in=team_ids_of(user))


class TeamOwned(UlidModel):
    """A model whose rows belong to a team; every query of a view starts with ``visible_to``."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="+")

    objects = TeamQuerySet.as_manager()

    class Meta:
        abstract = True


class Secret(TeamOwned):
    """A named, encrypted value for jobs of the team; never shown again."""

    name = models.CharField(max_length=40)
    sealed = models.TextField()  # webapp.core.vault: team, name and value
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    changed_at = models.DateTimeField()
    last_given_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["team", "name"], name="one_secret_name")]

    def __str__(self) -> str:
        return self.name


class LoginTry(models.Model):
    """A failed login attempt, or one that is being checked now."""

    account = models.CharField(max_length=64)  # SHA-256 hex of the typed name
    address = models.CharField(max_length=64)
    at = models.DateTimeField()

    class Meta:
        indexes = [
            models.Index(fields=["account", "address", "at"], name="tries_of_account"),
            models.Index(fields=["at"], name="tries_at"),
        ]
        verbose_name_plural = "login tries"

    def __str__(self) -> str:
        return f"try from {self.address}"


class InitialPassword(models.Model):
    """Marks an account whose password somebody else chose; deleted when it is changed."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, primary_key=True, on_delete=models.CASCADE, related_name="+"
    )
    given_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"initial password of {self.user_id}"


class OpenSession(UlidModel):
    """A browser in which a user is logged in, for the list of the user's sessions."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="open_sessions"
    )
    session_key = models.CharField(max_length=40, unique=True)
    address = models.CharField(max_length=64)
    browser = models.CharField(max_length=200)
    began_at = models.DateTimeField()
    seen_at = models.DateTimeField()

    class Meta:
        ordering = ["-seen_at"]

    def __str__(self) -> str:
        return f"session of {self.user_id}"

    @property
    def words(self) -> str:
        """The display name of the browser."""
        return browser_words(self.browser)


# Access to the API without a browser.


class Scope(models.TextChoices):
    """What a token permits; each scope includes the ones before it."""

    READ = "read", "Read"
    PLAN = "plan", "Plan"
    LAUNCH = "launch", "Launch"
    ADMIN = "admin", "Administer"


SCOPE_ORDER = (Scope.READ, Scope.PLAN, Scope.LAUNCH, Scope.ADMIN)


class AccessToken(TeamOwned):
    """A bearer token of a person for the API of one team; only its digest is stored.

    It permits what its scope and the person's role in the team both permit. A token of a service
    belongs to an account without a password, which was made for it.
    """

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="access_tokens"
    )
    name = models.CharField(max_length=60)
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 hex
    hint = models.CharField(max_length=16)  # its first characters, to recognise it by
    scope = models.CharField(max_length=8, choices=Scope)
    is_service = models.BooleanField(default=False)
    # GPU-hours that its launches may take altogether; null: no limit of its own.
    budget_gpu_hours = models.FloatField(null=True, blank=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return self.name


class StoredReply(models.Model):
    """The reply to a request with an ``Idempotency-Key``, given again to its repetitions.

    A row without a reply is a request that is being carried out.
    """

    caller = models.CharField(max_length=64)  # SHA-256 hex of the credential
    key = models.CharField(max_length=64)
    request_digest = models.CharField(max_length=64)  # of method, address and body
    status = models.PositiveSmallIntegerField(null=True, blank=True)
    sealed = models.TextField(blank=True)  # media type and body: a reply may hold a new key
    at = models.DateTimeField(db_index=True)

    class Meta:
        verbose_name_plural = "stored replies"
        constraints = [models.UniqueConstraint(fields=["caller", "key"], name="one_reply_per_key")]

    def __str__(self) -> str:
        return f"reply {self.key}"
