"""Forms of deployments: keep a plan under a name, change it, make a key."""

from collections.abc import Mapping
from typing import Any, ClassVar

from django import forms
from django.utils.text import slugify
from pydantic import ValidationError

from planner.specs.units import MINUTE
from runners.jobspec.base import NAME_LENGTH
from webapp.core.numbers import DecimalField, WholeField
from webapp.core.problems import InvalidProblem
from webapp.core.refusals import RefusableForm
from webapp.deployments.keys import (
    DEFAULT_HOLD_SECONDS,
    DEFAULT_OVERLAP_HOURS,
    MOST_DAYS,
    MOST_HOLD_SECONDS,
    MOST_OVERLAP_HOURS,
    KeyOptions,
)
from webapp.deployments.models import MODEL_NAME_LENGTH, Deployment
from webapp.deployments.services import (
    DEFAULT_IDLE_SECONDS,
    LEAST_IDLE_SECONDS,
    MOST_IDLE_SECONDS,
    MOST_REPLICAS,
    NAME,
    launch_of,
)
from webapp.deployments.warm_hours import EXAMPLE
from webapp.plans.models import Plan

RUN = "deployment"  # what the button of the review page is called


def idle_field() -> DecimalField:
    """Return the field of how long a deployment may be idle."""
    return DecimalField(
        label="Sleep when idle, after minutes",
        help_text="Empty: never. The next request wakes it, and waits.",
        min_value=LEAST_IDLE_SECONDS / MINUTE,
        max_value=MOST_IDLE_SECONDS / MINUTE,
        initial=int(DEFAULT_IDLE_SECONDS / MINUTE),
        required=False,
    )


class DeployForm(forms.Form):
    """A plan to serve, kept under a name."""

    deploy_name = forms.RegexField(
        NAME,
        label="Name for clients",
        max_length=MODEL_NAME_LENGTH,
        help_text="Clients give it as their model.",
        error_messages={
            "invalid": "Use letters, digits and any of . _ : -, and begin with a letter or digit."
        },
    )
    deploy_idle = idle_field()
    deploy_awake = forms.BooleanField(
        label="Keep it awake: start it now, and again whenever it ends", required=False
    )

    def options(self) -> dict[str, Any]:
        """Return what a valid form asks for.

        Raises:
            InvalidProblem: a field is not valid.
        """
        if not self.is_valid():
            name, texts = next(iter(self.errors.items()))
            raise InvalidProblem(name, f"“{self[name].label}”: {texts[0]}")
        chosen = self.cleaned_data
        return {
            "name": chosen["deploy_name"],
            "idle_seconds": _seconds(chosen["deploy_idle"]),
            "is_kept_awake": chosen["deploy_awake"],
        }


def deploy_form(
    plan: Plan,
    model_words: str,
    data: Any = None,  # noqa: ANN401 -- a QueryDict or None, as Django has it
) -> DeployForm | None:
    """Return the form that keeps a plan as a deployment; None where the plan serves nothing.

    ``model_words``: the model's name, which suggests the one for clients.
    """
    if plan.document.goal != "serve":
        return None
    name = slugify(model_words.rpartition("/")[2].replace(".", "-"))
    bound = data if data is not None and data.get("run") == RUN else None
    return DeployForm(bound, initial={"deploy_name": name[:MODEL_NAME_LENGTH]})


class ChangeForm(RefusableForm):
    """What may change of a deployment while it keeps its name."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {"idle_seconds": "idle_minutes"}

    plan = forms.ChoiceField(
        label="Plan",
        help_text="Another version is started beside the one that runs, and takes over once it is "
        "ready.",
    )
    idle_minutes = idle_field()
    aliases = forms.CharField(
        label="Also answers to",
        required=False,
        max_length=2600,
        help_text="Further names that clients may give, apart by blanks, such as gpt-4o",
    )
    fallbacks = forms.CharField(
        label="Falls back to",
        required=False,
        max_length=1000,
        help_text="Deployments that answer when it fails, is full or cannot load, in their order",
    )
    min_replicas = WholeField(
        label="Replicas, at least",
        min_value=1,
        max_value=MOST_REPLICAS,
        help_text="Jobs that serve it at once, while it is awake",
        required=False,
    )
    max_replicas = WholeField(
        label="Replicas, at most",
        min_value=1,
        max_value=MOST_REPLICAS,
        help_text="More are started for many requests, one at a time.",
        required=False,
    )
    warm_hours = forms.CharField(
        label="Keep it awake in these hours",
        required=False,
        max_length=400,
        help_text=f"Such as {EXAMPLE}",
    )
    is_kept_awake = forms.BooleanField(label="Keep it awake", required=False)
    is_paused = forms.BooleanField(
        label="Pause it: what runs is stopped, and no request wakes it", required=False
    )

    def __init__(
        self,
        deployment: Deployment,
        data: Any = None,  # noqa: ANN401
        *,
        drafted: Deployment | None = None,
    ) -> None:
        self.deployment = deployment
        self.drafted = drafted = drafted or deployment  # with the values of its draft
        idle = drafted.idle_seconds
        super().__init__(
            data,
            initial={
                "plan": drafted.plan_id,
                "idle_minutes": None if idle is None else f"{idle / MINUTE:g}",
                "aliases": " ".join(drafted.aliases),
                "fallbacks": " ".join(drafted.fallbacks),
                "is_kept_awake": drafted.is_kept_awake,
                "warm_hours": drafted.warm_hours,
                "min_replicas": drafted.min_replicas,
                "max_replicas": drafted.max_replicas,
                "is_paused": drafted.is_paused,
            },
        )
        rows = Plan.objects.filter(series=deployment.plan.series, deleted_at=None)
        versions = list(rows.defer("answer").order_by("-version")[:50])
        known = {each.pk for each in versions}
        more = {each.pk: each for each in (deployment.plan, drafted.plan)}
        versions += [each for key, each in more.items() if key not in known]
        choices = [(each.pk, f"Version {each.version}: {each.name}") for each in versions]
        self.fields["plan"].choices = choices  # type: ignore[attr-defined]
        self.plans = {each.pk: each for each in versions}

    def changes(self) -> dict[str, Any]:
        """Return the fields of a valid form that differ from the deployment's."""
        chosen, row = self.cleaned_data, self.deployment
        found = {
            "idle_seconds": _seconds(chosen["idle_minutes"]),
            "aliases": sorted(set(chosen["aliases"].replace(",", " ").split())),
            "fallbacks": list(dict.fromkeys(chosen["fallbacks"].replace(",", " ").split())),
            "is_kept_awake": chosen["is_kept_awake"],
            "warm_hours": " ".join(chosen["warm_hours"].split()),
            "min_replicas": chosen["min_replicas"] or row.min_replicas,
            "max_replicas": chosen["max_replicas"] or row.max_replicas,
            "is_paused": chosen["is_paused"],
        }
        changed = {name: value for name, value in found.items() if value != getattr(row, name)}
        if chosen["plan"] != row.plan_id:
            changed["plan"] = self.plans[chosen["plan"]]
        if self.drafted.launch != row.launch:  # no field shows it
            changed["launch"] = launch_of(self.drafted)
        return changed


class KeyForm(forms.Form):
    """A new key, and its limits; an empty one is none."""

    name = forms.CharField(
        label="Name", max_length=NAME_LENGTH, help_text="Where it will be used", strip=True
    )
    is_service = forms.BooleanField(
        label="For a service",
        required=False,
        help_text="Of the team: it stays valid when you leave, and operators rotate it.",
    )
    models = forms.MultipleChoiceField(
        label="For these deployments",
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="None chosen: for all, also those made later.",
    )
    requests_per_minute = WholeField(label="Requests a minute", min_value=1, required=False)
    max_concurrency = WholeField(label="Requests at once", min_value=1, required=False)
    tokens_per_day = WholeField(
        label="Tokens a day", min_value=1, required=False, help_text="Prompts and answers, UTC"
    )
    tokens_per_month = WholeField(
        label="Tokens a month", min_value=1, required=False, help_text="Of the calendar, UTC"
    )
    hold_seconds = DecimalField(
        label="Wait for a model, in seconds",
        min_value=0,
        max_value=MOST_HOLD_SECONDS,
        initial=int(DEFAULT_HOLD_SECONDS),
        help_text="Then the answer is 503, with the time after which to try again.",
    )
    days = DecimalField(
        label="Valid for, in days",
        min_value=0.01,
        max_value=MOST_DAYS,
        required=False,
        help_text="Empty: until it is revoked",
    )

    def __init__(self, names: list[str], data: Any = None) -> None:  # noqa: ANN401
        super().__init__(data)
        self.fields["models"].choices = [(each, each) for each in names]  # type: ignore[attr-defined]

    def options(self) -> KeyOptions:
        """Return what a valid form asks for.

        Raises:
            InvalidProblem: a number is beyond what can be stored.
        """
        try:
            return KeyOptions.model_validate(self.cleaned_data)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidProblem(str(first["loc"][0]), first["msg"]) from error


class RotationForm(forms.Form):
    """A new secret for a key."""

    overlap_hours = DecimalField(
        label="Hours in which the present secret still opens",
        min_value=0,
        max_value=MOST_OVERLAP_HOURS,
        initial=int(DEFAULT_OVERLAP_HOURS),
    )


class ConversationForm(forms.Form):
    """A message to a model, with what goes along; the page's script sends it."""

    prompt = forms.CharField(
        label="Message", widget=forms.Textarea(attrs={"rows": 3, "required": True})
    )
    system = forms.CharField(
        label="System prompt",
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text="Empty: none is sent.",
    )
    model = forms.ChoiceField()
    temperature = DecimalField(min_value=0, max_value=2, initial=0.7)
    max_tokens = WholeField(label="Max tokens", min_value=1, max_value=100_000, initial=512)

    def __init__(self, name: str, adapters: list[str]) -> None:
        super().__init__()
        names = [name, *(f"{name}/{each}" for each in adapters)]
        self.fields["model"].choices = [(each, each) for each in names]  # type: ignore[attr-defined]


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else minutes * MINUTE
