"""Admin of hosts: adding one creates an enrolment token; machine facts are read-only."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html

from webapp.core.admin_base import FreshAdmin, ReadOnlyAdmin
from webapp.hosts.models import (
    Device,
    Distinction,
    EnrolmentToken,
    Epoch,
    Host,
    HostState,
    Pool,
    RefusedMessage,
)
from webapp.hosts.services import host_set_state, token_create, token_revoke

SECRETS = ("credential_hash", "command_salt", "redis_secret_hash")
CHANGEABLE = ["name", "pool", "labels", "state"]


@admin.register(Host)
class HostAdmin(FreshAdmin[Host]):
    """Hosts as their agents reported them; only name, pool, labels and state can be edited."""

    list_display = ["name", "team", "state", "contact", "pool", "last_seen_at", "agent_version"]
    list_filter = ["state", "pool", "team"]
    search_fields = ["name", "slug"]

    def get_readonly_fields(self, _request: HttpRequest, _obj: Host | None = None) -> list[str]:
        """Return every field that the agent reports."""
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
        messages.info(request, "A host adds itself: run the command, watch the check-list.")
        return HttpResponseRedirect(reverse("host-add"))


@admin.register(Pool)
class PoolAdmin(FreshAdmin[Pool]):
    """Pools of hosts that share one job queue, and the teams that may launch there."""

    list_display = ["name", "slug", "team"]
    list_filter = ["team"]
    filter_horizontal = ["shared_with"]


@admin.register(Device)
class DeviceAdmin(ReadOnlyAdmin):
    """Compute devices that hosts reported."""

    list_display = ["host", "kind", "index", "name", "memory_bytes", "is_present", "cordoned_at"]
    list_filter = ["kind", "is_present"]
    search_fields = ["uuid", "host__name"]


@admin.register(Distinction)
class DistinctionAdmin(ReadOnlyAdmin):
    """Pairs of hosts that look like one machine and that an operator marked as different."""

    list_display = ["host", "other", "said_by", "said_at"]
    search_fields = ["host__name", "other__name"]


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


@admin.register(Epoch)
class EpochAdmin(ReadOnlyAdmin):
    """The site's credential epoch."""

    list_display = ["number", "highest_seen"]


@admin.register(RefusedMessage)
class RefusedMessageAdmin(ReadOnlyAdmin):
    """Messages of hosts that the server rejected."""

    list_display = ["last_at", "host", "kind", "reason", "count"]
    list_filter = ["kind"]
    search_fields = ["reason", "host__slug"]
