"""The form of an observed server: its address, what it is called, what stands beside it."""

from typing import Any

from django import forms

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import Team
from webapp.core.names import shown_name
from webapp.core.refusals import RefusableForm
from webapp.hosts.models import Host
from webapp.plans.models import Plan, PlanState
from webapp.servers.keys import LONGEST_KEY
from webapp.servers.models import MOST_URL, ObservedServer
from webapp.servers.services import EXAMPLE, ServerLinks

MOST_PLANS = 200


class ServerForm(RefusableForm):
    """A server to watch, or what changes of one: its address stays."""

    url = forms.CharField(
        label="Address",
        max_length=MOST_URL,
        help_text=f"Such as {EXAMPLE}. It is only read: /v1/models, /metrics and its release.",
    )
    name = forms.CharField(
        label="Name",
        max_length=NAME_LENGTH,
        required=False,
        validators=[shown_name],
        help_text="Empty: its address",
    )
    key = forms.CharField(
        label="Key",
        required=False,
        max_length=LONGEST_KEY,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="If it asks for one. Stored encrypted, sent to this address alone, never shown.",
    )
    forgets_key = forms.BooleanField(label="Ask it without a key", required=False)
    plan = forms.ChoiceField(
        label="Plan",
        required=False,
        help_text="Its prediction stands beside what is measured.",
    )
    host = forms.ChoiceField(label="Host", required=False, help_text="The machine that it runs on")

    def __init__(
        self,
        team: Team,
        data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
        server: ObservedServer | None = None,
    ) -> None:
        initial = {}
        if server is not None:
            initial = {
                "name": server.name,
                "plan": server.plan_id,
                "host": server.host_id,
            }
        super().__init__(data, initial=initial)
        rows = Plan.objects.filter(
            team=team, deleted_at=None, state=PlanState.COMPUTED, draft__goal="serve"
        ).order_by("-created_at", "-id")
        plans = list(rows.only("name", "version")[:MOST_PLANS])
        if server is not None and server.plan is not None and server.plan not in plans:
            plans.append(server.plan)
        self.plans = {each.pk: each for each in plans}
        self.hosts = {each.pk: each for each in Host.objects.filter(team=team).order_by("name")}
        labels = {key: f"{each}, version {each.version}" for key, each in self.plans.items()}
        self._choose("plan", "None", labels)
        self._choose("host", "None", {key: each.name for key, each in self.hosts.items()})
        if server is not None:
            del self.fields["url"]
        if server is None or not server.has_key:
            del self.fields["forgets_key"]
        else:
            self.fields["key"].help_text = "Empty: the one that is stored."

    def _choose(self, field: str, empty: str, labels: dict[str, str]) -> None:
        self.fields[field].choices = [("", empty), *labels.items()]  # type: ignore[attr-defined]

    @property
    def links(self) -> ServerLinks:
        """Return what a valid form names beside the server."""
        chosen = self.cleaned_data
        return ServerLinks(self.plans.get(chosen["plan"]), self.hosts.get(chosen["host"]))

    @property
    def new_key(self) -> str | None:
        """Return the key of a valid form, "" to forget it, None to keep it."""
        chosen = self.cleaned_data
        return chosen["key"] or ("" if chosen.get("forgets_key") else None)
