"""Hosts: registered here by making an enrolment token, never by typing a machine's facts."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html

from webapp.core.read_only import ReadOnlyAdmin
from webapp.hosts.models import (
    Device,
    Distinction,
    EnrolmentToken,
    Epoch,
    Host,
    HostState,
    Pool,
)
from webapp.hosts.services import host_set_state, token_create, token_revoke

SECRETS = ("credential_hash", "command_salt", "redis_secret_hash")
CHANGEABLE = ["name", "pool", "labels", "state"]


@admin.register(Host)
class HostAdmin(admin.ModelAdmin[Host]):
    """Machines as they described themselves; only names, pools and states are a person's."""

    list_display = ["name", "team", "state", "contact", "pool", "last_seen_at", "agent_version"]
    list_filter = ["state", "pool", "team"]
    search_fields = ["name", "slug"]

    def get_readonly_fields(self, _request: HttpRequest, _obj: Host | None = None) -> list[str]:
        """Lock everything that the machine reports."""
        secret = set(SECRETS)
        names = [field.name for field in Host._meta.fields]
        return [name for name in names if name not in {*CHANGEABLE, *secret}]

    def get_exclude(self, _request: HttpRequest, _obj: Host | None = None) -> list[str]:
        """Show no secret, not even as a digest."""
        return list(SECRETS)

    def save_model(
        self,
        request: HttpRequest,
        obj: Host,
        form: ModelForm[Host],
        change: bool,  # noqa: FBT001 (Django's signature)
    ) -> None:
        """Save names and pools; a new state goes through the service, which records it."""
        to = obj.state
        if change and "state" in form.changed_data:
            obj.state = Host.objects.values_list("state", flat=True).get(pk=obj.pk)
        super().save_model(request, obj, form, change)
        if obj.state != to:
            host_set_state(host=obj, to=HostState(to), by=request.user.get_username())

    def add_view(self, request: HttpRequest, *_args: Any, **_kwargs: Any) -> HttpResponseRedirect:
        """Lead to the page with the command and the check-list: a host adds itself."""
        messages.info(request, "A host adds itself: run the command, watch the check-list.")
        return HttpResponseRedirect(reverse("host-add"))


@admin.register(Pool)
class PoolAdmin(admin.ModelAdmin[Pool]):
    """Hosts that take jobs from one queue, and the teams that may launch there."""

    list_display = ["name", "slug", "team"]
    list_filter = ["team"]
    filter_horizontal = ["shared_with"]


@admin.register(Device)
class DeviceAdmin(ReadOnlyAdmin):
    """What hosts say they compute on."""

    list_display = ["host", "kind", "index", "name", "memory_bytes", "is_present", "cordoned_at"]
    list_filter = ["kind", "is_present"]
    search_fields = ["uuid", "host__name"]


@admin.register(Distinction)
class DistinctionAdmin(ReadOnlyAdmin):
    """Hosts that look like one machine and are not, by an operator's word on their page."""

    list_display = ["host", "other", "said_by", "said_at"]
    search_fields = ["host__name", "other__name"]


@admin.register(EnrolmentToken)
class EnrolmentTokenAdmin(admin.ModelAdmin[EnrolmentToken]):
    """One-time tokens; the text is shown once, right after it was made."""

    list_display = ["name", "team", "pool", "created_by", "expires_at", "used_at", "revoked_at"]
    list_filter = ["team"]
    fields = ["team", "name", "pool", "labels"]
    actions = ["revoke"]

    def has_change_permission(
        self, _request: HttpRequest, _obj: EnrolmentToken | None = None
    ) -> bool:
        """Refuse: a token is made, used or revoked."""
        return False

    def save_model(
        self,
        request: HttpRequest,
        obj: EnrolmentToken,
        _form: ModelForm[EnrolmentToken],
        _change: bool,  # noqa: FBT001 (Django's signature)
    ) -> None:
        """Make the token through the service and show its text and the command."""
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
        """Make unused tokens worthless."""
        revoked = sum(token_revoke(token=token) for token in queryset)
        messages.success(request, f"{revoked} tokens revoked.")


@admin.register(Epoch)
class EpochAdmin(ReadOnlyAdmin):
    """How far the site has come."""

    list_display = ["number", "highest_seen"]
