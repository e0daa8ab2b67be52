"""The staff site, and its pages of every table."""

from typing import TYPE_CHECKING, Any, TypeVar, cast

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.forms import AdminPasswordChangeForm, UserChangeForm
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.contrib.contenttypes.models import ContentType
from django.contrib.messages import ERROR
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import QuerySet
from django.forms import ModelForm, model_to_dict
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html

from webapp.accounts.initial_passwords import initial_password_mark
from webapp.accounts.models import (
    AccessToken,
    InitialPassword,
    LoginTry,
    Membership,
    OpenSession,
    Quota,
    Role,
    StoredReply,
    Team,
)
from webapp.accounts.services import (
    LAST_ADMIN,
    OWN_RIGHTS,
    OWN_ROLE,
    is_administrator,
    is_last_administrator,
    may_hold,
)
from webapp.accounts.sign_in import event_write, link_path
from webapp.audit.models import Cut, Event, Link
from webapp.core.middleware import uncompressed
from webapp.core.queries import SEEN, changed_words, mark_of
from webapp.datasets.models import Dataset
from webapp.deployments.models import (
    Deployment,
    DeploymentCost,
    DeploymentDraft,
    KeyAlarm,
    Replica,
    ServingKey,
    Usage,
    UsageJournal,
)
from webapp.hosts.models import (
    Device,
    Distinction,
    EnrolmentToken,
    Epoch,
    Host,
    HostState,
    ModelCopy,
    Pool,
    RefusedMessage,
)
from webapp.hosts.services import host_set_state, token_create, token_revoke
from webapp.jobs.models import (
    Allocation,
    Artefact,
    Attempt,
    AttemptEvent,
    CalibrationChange,
    Command,
    Job,
    LaunchRequest,
    Measurement,
    ObservedJob,
    TokenLaunch,
)
from webapp.metrics.models import MetricSource
from webapp.modelhub.models import TeamModel, TrustedCode
from webapp.operations.staff_site import KeyFields
from webapp.plans.models import Plan
from webapp.servers.models import ObservedServer
from webapp.tunings.models import Tuning, TuningTrial
from webapp.workflows.models import Workflow, WorkflowStep

# ---------------------------------------------------------------------------
# Base classes of admin pages: read-only records, and optimistic locking of forms.
# ---------------------------------------------------------------------------


# Read-only admin for tables of records.


class ReadOnlyAdmin(admin.ModelAdmin[Any]):
    """ModelAdmin that lists and shows rows, without add, change or delete."""

    def has_add_permission(self, _request: HttpRequest) -> bool:
        """Return False."""
        return False

    def has_change_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False."""
        return False


# Optimistic locking of admin forms: reject a save if the row changed since the form opened.
#
# A change form carries the version mark of its values, as the site's own forms do
# (``webapp.core.queries``). ``templates/admin/change_form.html`` renders it.


Row = TypeVar("Row", bound=models.Model)
SET_BY_THE_SITE = frozenset({"last_login", "password"})  # changes of these are ignored


class FreshAdmin(admin.ModelAdmin[Row]):
    """ModelAdmin that rejects a save over a change that the form did not show."""

    def get_form(
        self,
        request: HttpRequest,
        obj: Row | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form, which compares its initial values with the current ones."""
        form = super().get_form(request, obj, change=change, **kwargs)
        seen = request.POST.get(SEEN, "")
        if obj is None or not seen:
            return form
        owner, shown = self, obj

        class FreshForm(form):  # type: ignore[misc, valid-type]  # made anew for each request
            def clean(self) -> Any:  # noqa: ANN401 (Django's signature)
                cleaned = super().clean()
                owner.refuse_stale(request, shown, seen, self)
                return cleaned

        return FreshForm

    def shown_values(self, obj: Row, fields: list[str]) -> object:
        """Return the values of a form as JSON."""
        chosen = [name for name in fields if name not in SET_BY_THE_SITE]
        values = model_to_dict(obj, fields=chosen)
        return {name: _plain(value) for name, value in values.items()}

    def refuse_stale(
        self, request: HttpRequest, obj: Row, seen: str, form: ModelForm[Row]
    ) -> None:
        """Compare the marks under the row's lock, which is held until the form is stored.

        Raises:
            ValidationError: somebody changed the row; the message says who and when.
        """
        now_there = self.model._default_manager.select_for_update().get(pk=obj.pk)  # noqa: SLF001 (documented)
        if mark_of(self.shown_values(now_there, list(form.base_fields))) == seen:
            return
        entries = LogEntry.objects.filter(
            content_type=ContentType.objects.get_for_model(self.model), object_id=str(obj.pk)
        )
        last = entries.select_related("user").order_by("-action_time").first()
        by = last.user.get_username() if last else ""
        reader = request.user.get_username()
        words = changed_words("It was", by, last.action_time if last else None, reader=reader)
        raise ValidationError(
            f"{words} Your change was not saved. Open the page again to see the current values, "
            "then repeat your change."
        )

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Render the form with the version mark of its values."""
        obj = kwargs.get("obj")
        if obj is not None:
            fields = list(context["adminform"].form.base_fields)
            posted = request.POST.get(SEEN, "")
            context[SEEN] = posted or mark_of(self.shown_values(cast("Row", obj), fields))
        return super().render_change_form(request, context, *args, **kwargs)


def _plain(value: object) -> object:
    """Return the sorted keys of a list of rows; any other value unchanged."""
    if isinstance(value, list) and all(isinstance(each, models.Model) for each in value):
        return sorted(str(each.pk) for each in value)
    return value


# ---------------------------------------------------------------------------
# Admin of accounts, teams, roles, quotas and sessions; nobody raises their own rights.
# ---------------------------------------------------------------------------


# Admin of accounts and roles; nobody can raise their own rights.


Form = type[forms.ModelForm[Any]]
NO_LINK = (
    "the account is closed, or belongs to a superuser, whose password another superuser changes."
)
FLAGS = ("is_staff", "is_superuser", "is_active")
RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")


class RoleForm(forms.ModelForm[Membership]):
    """A membership, edited by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Reject a role that the user may not assign to themselves."""
        values: dict[str, Any] = super().clean() or {}
        user = values.get("user") or getattr(self.instance, "user", None)
        team = values.get("team") or getattr(self.instance, "team", None)
        role = values.get("role")
        if user and team and role and not may_hold(self.asker, user, team, Role(role)):
            self.add_error("role", OWN_ROLE)
        return values


def form_for_admin(request: HttpRequest, form: Form) -> Form:
    """Return the form class bound to the user of the request."""
    return cast("Form", type(form.__name__, (form,), {"asker": request.user}))


class AccountForm(UserChangeForm[User]):
    """An account, edited by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Reject closing the last administrator, and new rights for one's own account."""
        values: dict[str, Any] = super().clean() or {}
        after = User(**{name: values.get(name, getattr(self.instance, name)) for name in FLAGS})
        if not is_administrator(after) and is_last_administrator(self.instance):
            raise ValidationError(LAST_ADMIN)
        is_own = self.instance.pk == self.asker.pk
        raised = [name for name in ("is_staff", "is_superuser") if values.get(name)]
        before = User.objects.get(pk=self.instance.pk)
        if is_own and any(not getattr(before, name) for name in raised):
            raise ValidationError(OWN_RIGHTS)
        return values


if TYPE_CHECKING:
    _PasswordForm = AdminPasswordChangeForm[User]
else:
    _PasswordForm = AdminPasswordChangeForm  # generic only in the stubs


class GivenPasswordForm(_PasswordForm):
    """A password that somebody else chooses for an account, an initial one."""

    def save(self, commit: bool = True) -> User:  # noqa: FBT001, FBT002 (Django's signature)
        """Store the password, and mark it as initial."""
        user = super().save(commit)
        initial_password_mark(user)
        return user


class AccountAdmin(FreshAdmin[User], UserAdmin[User]):
    """Accounts; only superusers can grant rights and change superusers.

    A password that is set here for somebody else is an initial one.
    """

    form = AccountForm
    change_password_form = GivenPasswordForm
    actions = ("password_link",)

    @admin.action(
        description="Create a link that sets a new password", permissions=["password_link"]
    )
    def password_link(self, request: HttpRequest, chosen: QuerySet[User]) -> HttpResponse | None:
        """Show a password reset link for one account, once; for sites without e-mail."""
        user = chosen.first()
        if chosen.count() != 1 or user is None:
            self.message_user(request, "Choose exactly one account for the link.", ERROR)
            return None
        if not self.has_change_permission(request, user) or not user.is_active:
            self.message_user(request, f"No link was created for {user}: {NO_LINK}", ERROR)
            return None
        actor = request.user.get_username()
        event_write(kind="account.password-link", user=user, actor=actor, way="administration")
        link = request.build_absolute_uri(link_path(user))
        hours = settings.PASSWORD_RESET_TIMEOUT // 3600
        context = {**self.admin_site.each_context(request), "title": "New password"}
        context |= {"account": user, "link": link, "hours": hours}
        response = TemplateResponse(request, "admin/password_link.html", context)
        return uncompressed(response)

    def save_model(
        self,
        request: HttpRequest,
        obj: User,
        form: Any,  # noqa: ANN401 (Django's signature)
        change: bool,  # noqa: FBT001 (Django's signature)
    ) -> None:
        """Store the account; the password of a new one is initial."""
        super().save_model(request, obj, form, change)
        if not change:
            initial_password_mark(obj)

    def user_change_password(
        self,
        request: HttpRequest,
        id: str,  # noqa: A002 (Django's signature)
        form_url: str = "",
    ) -> HttpResponse:
        """Set the password of an account; one's own does not become initial."""
        response = super().user_change_password(request, id, form_url)
        if id == str(request.user.pk):
            InitialPassword.objects.filter(user_id=id).delete()
        return response

    def has_password_link_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may change accounts, and so create links."""
        return super().has_change_permission(request)

    def get_form(
        self,
        request: HttpRequest,
        obj: User | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form with the user's restrictions."""
        return form_for_admin(request, super().get_form(request, obj, change=change, **kwargs))

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the names of the form fields that the user may read but not change.

        Only superusers may change an account's rights (``RIGHTS``).
        """
        fields = tuple(super().get_readonly_fields(request, obj))
        return fields if is_superuser(request) else (*fields, *RIGHTS)

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Return whether the user may change the account; superusers' only by superusers."""
        return super().has_change_permission(request, obj) and _may_touch(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Return whether the user may delete the account; never the last administrator."""
        if obj is not None and is_last_administrator(obj):
            return False
        return super().has_delete_permission(request, obj) and _may_touch(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:  # noqa: ANN401 (Django's signature)
        """Allow deletion of an account's read-only rows together with it."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)
        own = (AccessToken, InitialPassword, OpenSession, TokenLaunch)
        return deleted, counts, needed - {each._meta.verbose_name for each in own}, protected


def is_superuser(request: HttpRequest) -> bool:
    """Return whether the user is a superuser."""
    return bool(getattr(request.user, "is_superuser", False))


def _may_touch(request: HttpRequest, obj: User | None) -> bool:
    return obj is None or not obj.is_superuser or is_superuser(request)


admin.site.unregister(User)
admin.site.register(User, AccountAdmin)


class MembershipInline(KeyFields, admin.TabularInline[Membership, Team]):
    """A team's members on the team's own page."""

    model = Membership
    form = RoleForm
    extra = 1
    autocomplete_fields = ["user"]

    def get_formset(self, request: HttpRequest, obj: Team | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the formset with the user's restrictions."""
        return super().get_formset(
            request, obj, **{**kwargs, "form": form_for_admin(request, RoleForm)}
        )


@admin.register(Team)
class TeamAdmin(FreshAdmin[Team]):
    """Teams with their members."""

    list_display = ["name", "created_at"]
    search_fields = ["name__folded_contains"]
    inlines = [MembershipInline]

    def shown_values(self, obj: Team, fields: list[str]) -> object:
        """Return the team's values with its members, which the same page edits."""
        members = Membership.objects.filter(team=obj).order_by("pk")
        return [super().shown_values(obj, fields), list(members.values_list("user", "role"))]


@admin.register(Quota)
class QuotaAdmin(FreshAdmin[Quota]):
    """Quotas per team."""

    list_display = ["team", "max_devices", "max_gpu_hours_per_month", "max_duration_seconds"]


@admin.register(Membership)
class MembershipAdmin(FreshAdmin[Membership]):
    """All memberships."""

    list_display = ["user", "team", "role"]
    list_filter = ["role", "team"]
    autocomplete_fields = ["user", "team"]

    def get_form(
        self,
        request: HttpRequest,
        obj: Membership | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form with the user's restrictions."""
        form = form_for_admin(request, RoleForm)
        return super().get_form(request, obj, change=change, **{**kwargs, "form": form})


# ---------------------------------------------------------------------------
# Admin of hosts: adding one creates an enrolment token; machine facts are read-only.
# ---------------------------------------------------------------------------


SECRETS = ("credential_hash", "command_salt", "redis_secret_hash")
CHANGEABLE = ["name", "pool", "labels", "state"]


@admin.register(Host)
class HostAdmin(FreshAdmin[Host]):
    """Hosts as their agents reported them; only name, pool, labels and state can be edited."""

    list_display = ["name", "team", "state", "contact", "pool", "last_seen_at", "agent_version"]
    list_filter = ["state", "pool", "team"]
    search_fields = ["name__folded_contains", "slug"]

    def get_readonly_fields(self, _request: HttpRequest, _obj: Host | None = None) -> list[str]:
        """Return the names of the host's columns that the form shows but does not change.

        These are the columns that the agent reports: all but ``CHANGEABLE`` and the secrets.
        """
        secret = set(SECRETS)
        names = [field.name for field in Host._meta.fields]
        return [name for name in names if name not in {*CHANGEABLE, *secret}]

    def get_exclude(self, _request: HttpRequest, _obj: Host | None = None) -> list[str]:
        """Return the secret fields: not even their digests are shown."""
        return list(SECRETS)

    def save_model(
        self,
        request: HttpRequest,
        obj: Host,
        form: ModelForm[Host],
        change: bool,  # noqa: FBT001 (Django's signature)
    ) -> None:
        """Save the host; change its state through the service, which records an event."""
        to = obj.state
        if change and "state" in form.changed_data:
            obj.state = Host.objects.values_list("state", flat=True).get(pk=obj.pk)
        super().save_model(request, obj, form, change)
        if obj.state != to:
            host_set_state(host=obj, to=HostState(to), by=request.user.get_username())

    def add_view(self, request: HttpRequest, *_args: Any, **_kwargs: Any) -> HttpResponseRedirect:
        """Redirect to the enrolment page: a host adds itself."""
        messages.info(
            request, "A host enrols itself: run the command on the host, then follow the checks."
        )
        return HttpResponseRedirect(reverse("host-add"))


@admin.register(Pool)
class PoolAdmin(FreshAdmin[Pool]):
    """Pools of hosts that share one job queue, and the teams that may launch there."""

    list_display = ["name", "slug", "team"]
    list_filter = ["team"]
    filter_horizontal = ["shared_with"]


@admin.register(EnrolmentToken)
class EnrolmentTokenAdmin(admin.ModelAdmin[EnrolmentToken]):
    """One-time enrolment tokens; the text is shown once, right after creation."""

    list_display = ["name", "team", "pool", "created_by", "expires_at", "used_at", "revoked_at"]
    list_filter = ["team"]
    fields = ["team", "name", "pool", "labels"]
    actions = ["revoke"]

    def has_change_permission(
        self, _request: HttpRequest, _obj: EnrolmentToken | None = None
    ) -> bool:
        """Return False: a token is created, used or revoked, never edited."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: EnrolmentToken,
        _form: ModelForm[EnrolmentToken],
        _change: bool,  # noqa: FBT001 (Django's signature)
    ) -> None:
        """Create the token through the service and show its text and the enrolment command."""
        by = request.user if isinstance(request.user, User) else None
        token, text = token_create(
            team=obj.team, by=by, name=obj.name, pool=obj.pool, labels=obj.labels
        )
        obj.pk, obj.token_hash, obj.expires_at = token.pk, token.token_hash, token.expires_at
        server = request.build_absolute_uri("/").rstrip("/")
        words = "Run this on the host within an hour; it is shown only now: {}"
        command = f"python -m runners enroll --server {server} --token {text}"
        messages.success(request, format_html(words, command))

    @admin.action(description="Revoke the chosen tokens")
    def revoke(self, request: HttpRequest, queryset: Any) -> None:  # noqa: ANN401 (Django's signature)
        """Revoke unused tokens."""
        revoked = sum(token_revoke(token=token) for token in queryset)
        messages.success(request, f"{revoked} tokens revoked.")


# ---------------------------------------------------------------------------
# Admin of team models.
# ---------------------------------------------------------------------------


@admin.register(TeamModel)
class TeamModelAdmin(FreshAdmin[TeamModel]):
    """Team models: pasted configs, folders on hosts, outputs of jobs."""

    list_display = ["name", "team", "source", "weight_dtype", "host", "created_at"]
    list_filter = ["source", "team"]
    search_fields = ["name__folded_contains"]


# ---------------------------------------------------------------------------
# Tables of records, which the staff site shows and does not change.
# ---------------------------------------------------------------------------


READ_ONLY: dict[type[models.Model], dict[str, Any]] = {
    AccessToken: {
        "list_display": ["name", "user", "team", "scope", "expires_at", "last_used_at"],
        "list_filter": ["scope", "is_service", "team"],
        "search_fields": ["name__folded_contains", "user__username__folded_contains"],
        "exclude": ["digest"],
    },
    StoredReply: {"list_display": ["at", "key", "status"], "exclude": ["sealed", "caller"]},
    TokenLaunch: {"list_display": ["token", "job", "gpu_hours"]},
    LaunchRequest: {
        "list_display": ["plan", "team", "asked_by", "token_name", "state", "asked_at"],
        "list_filter": ["state", "team"],
    },
    Workflow: {
        "list_display": ["name", "team", "owner", "state", "created_at", "ended_at"],
        "list_filter": ["state", "team"],
    },
    WorkflowStep: {
        "list_display": ["workflow", "position", "variant", "goal", "state", "job"],
        "exclude": ["key_hashes"],
    },
    Tuning: {
        "list_display": ["name", "team", "owner", "host", "state", "created_at", "ended_at"],
        "list_filter": ["state", "team"],
    },
    TuningTrial: {"list_display": ["tuning", "number", "candidate", "state", "ending", "job"]},
    Deployment: {
        "list_display": ["name", "team", "owner", "plan", "is_kept_awake", "is_paused"],
        "list_filter": ["team"],
    },
    DeploymentDraft: {"list_display": ["deployment", "plan", "by", "saved_at"]},
    ObservedServer: {
        "list_display": ["name", "team", "owner", "url", "engine", "answered_at", "silent_since"],
        "list_filter": ["team", "engine"],
        "exclude": ["sealed_key"],
    },
    ObservedJob: {
        "list_display": ["job_id", "team", "owner", "host", "has_ended", "reported_at"],
        "list_filter": ["team", "has_ended"],
    },
    Replica: {"list_display": ["deployment", "job", "created_at", "ready_at", "ended_at"]},
    ServingKey: {
        "list_display": ["name", "team", "owner", "hint", "last_used_at", "revoked_at"],
        "list_filter": ["team", "is_service"],
        "exclude": ["digest"],
    },
    KeyAlarm: {"list_display": ["at", "key", "period", "percent", "used_tokens"]},
    DeploymentCost: {"list_display": ["day", "deployment", "usd", "device_seconds"]},
    Usage: {"list_display": ["day", "deployment", "key", "requests", "completion_tokens"]},
    UsageJournal: {"list_display": ["name", "counted_bytes", "at"]},
    InitialPassword: {"list_display": ["user", "given_at"]},
    LoginTry: {"list_display": ["at", "address"]},
    OpenSession: {
        "list_display": ["user", "address", "browser", "began_at", "seen_at"],
        "exclude": ["session_key"],
    },
    Device: {
        "list_display": [
            "host",
            "kind",
            "index",
            "name",
            "memory_bytes",
            "is_present",
            "cordoned_at",
        ],
        "list_filter": ["kind", "is_present"],
        "search_fields": ["uuid", "host__name__folded_contains"],
    },
    Distinction: {
        "list_display": ["host", "other", "said_by", "said_at"],
        "search_fields": ["host__name__folded_contains", "other__name__folded_contains"],
    },
    Epoch: {"list_display": ["number", "highest_seen"]},
    RefusedMessage: {
        "list_display": ["last_at", "host", "kind", "reason", "count"],
        "list_filter": ["kind"],
        "search_fields": ["reason", "host__slug"],
    },
    Job: {
        "list_display": [
            "name",
            "state",
            "reason",
            "kind",
            "pool",
            "host",
            "owner",
            "team",
            "created_at",
        ],
        "list_filter": ["state", "kind", "host", "team"],
        "search_fields": ["id", "name__folded_contains", "model_name__folded_contains"],
    },
    Attempt: {
        "list_display": [
            "id",
            "job",
            "number",
            "node_rank",
            "host",
            "acked_seq",
            "claimed_at",
            "ended_at",
        ],
        "list_filter": ["host"],
        "exclude": ["fence", "claim_id"],
    },
    Allocation: {
        "list_display": ["device", "attempt", "taken_at", "released_at"],
        "list_select_related": ["device", "attempt"],
    },
    AttemptEvent: {
        "list_display": ["attempt", "seq", "kind", "received_at"],
        "list_filter": ["kind"],
        "search_fields": ["attempt__id"],
    },
    Event: {
        "list_display": ["at", "kind", "subject", "from_state", "to_state", "reason", "actor"],
        "list_filter": ["kind", "to_state"],
        "search_fields": ["subject", "actor"],
    },
    Command: {
        "list_display": ["id", "host", "kind", "state", "tries", "next_at"],
        "list_filter": ["state", "kind"],
    },
    Artefact: {
        "list_display": ["name", "kind", "attempt", "total_bytes", "is_complete"],
        "list_filter": ["kind", "is_complete"],
    },
    Measurement: {
        "list_display": [
            "metric",
            "ratio",
            "is_excluded",
            "invalid_reason",
            "host",
            "job",
            "measured_at",
        ],
        "list_filter": ["metric", "is_excluded", "decision", "host"],
    },
    CalibrationChange: {
        "list_display": ["at", "cause", "host", "job", "actor", "why"],
        "list_filter": ["cause", "host"],
    },
    Plan: {
        "list_display": ["name", "state", "team", "owner", "created_at", "computed_at"],
        "list_filter": ["state", "team"],
        "search_fields": ["id", "name__folded_contains"],
    },
    Dataset: {
        "list_display": ["name", "team", "format", "num_records", "size_bytes", "created_at"],
        "list_filter": ["format", "team"],
        "search_fields": ["name__folded_contains", "sha256"],
    },
    ModelCopy: {
        "list_display": ["repository", "commit", "host", "source", "state", "created_at"],
        "list_filter": ["state", "host"],
        "search_fields": ["repository", "commit"],
    },
    TrustedCode: {
        "list_display": ["repository", "commit", "team", "allowed_by", "created_at"],
        "list_filter": ["team"],
        "search_fields": ["repository", "commit"],
    },
    Link: {"list_display": ["position", "event_id", "digest"]},
    Cut: {"list_display": ["position", "num_events", "at", "digest"]},
    MetricSource: {
        "list_display": ["attempt_id", "source", "sealed_through_seq", "last_received_at"],
        "search_fields": ["attempt_id"],
    },
}
for model, options in READ_ONLY.items():
    admin.site.register(model, ReadOnlyAdmin, **options)
