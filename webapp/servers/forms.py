"""The form of an observed server: its address, what it is called, what stands beside it."""

from typing import Any

from django import forms

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.core.names import shown_name
from webapp.core.problems import Problem
from webapp.hosts.models import Host
from webapp.plans.models import Plan, PlanState
from webapp.servers.models import MOST_URL, ObservedServer
from webapp.servers.services import EXAMPLE, ServerLinks

MOST_PLANS = 200


class ServerForm(forms.Form):
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
    secret = forms.ChoiceField(
        label="Key",
        required=False,
        help_text="A secret of the team, sent to this address alone.",
    )
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
                "secret": server.secret,
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
        names = secret_names(team)
        if server is not None and server.secret and server.secret not in names:
            names.append(server.secret)
        self._choose("secret", "None", {each: each for each in names})
        labels = {key: f"{each}, version {each.version}" for key, each in self.plans.items()}
        self._choose("plan", "None", labels)
        self._choose("host", "None", {key: each.name for key, each in self.hosts.items()})
        if server is not None:
            del self.fields["url"]

    def _choose(self, field: str, empty: str, labels: dict[str, str]) -> None:
        self.fields[field].choices = [("", empty), *labels.items()]  # type: ignore[attr-defined]

    @property
    def links(self) -> ServerLinks:
        """Return what a valid form names beside the server."""
        chosen = self.cleaned_data
        return ServerLinks(
            self.plans.get(chosen["plan"]), self.hosts.get(chosen["host"]), chosen["secret"]
        )

    def refuse(self, problem: Problem) -> None:
        """Show a refusal at the field that it names, else above them all."""
        self.add_error(problem.code if problem.code in self.fields else None, problem.detail)
