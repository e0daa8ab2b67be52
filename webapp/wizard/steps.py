"""The five steps: their order, their questions, their forms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.http import QueryDict
from django.urls import reverse
from django.utils.datastructures import MultiValueDict

from webapp.accounts.models import Team
from webapp.datasets.models import Dataset
from webapp.hosts.models import Host, HostState, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.sharing import pool_words, pools_among, reachable_hosts
from webapp.plans.words import (
    GOAL_WORDS,
    SLO_WORDS,
    hardware_words,
    model_words,
    workload_words,
)
from webapp.wizard.fields import StepForm
from webapp.wizard.forms import GoalForm, HardwareForm, ModelForm, PinsForm
from webapp.wizard.workload_forms import TRAINING_FORMS, WORKLOAD_FORMS

Draft = dict[str, Any]


class Step(NamedTuple):
    """One page of the wizard."""

    slug: str
    name: str
    question: str


STEPS = (
    Step("goal", "Goal", "What should the model do?"),
    Step("model", "Model", "Which model?"),
    Step("workload", "Workload", "How much work is it?"),
    Step("hardware", "Hardware", "Where should it run?"),
    Step("review", "Review", "Is this what you want?"),
)
SLUGS = tuple(step.slug for step in STEPS)


@dataclass(frozen=True)
class Options:
    """What a draft can choose from: read once per request, uploads when they are asked for."""

    team: Team
    hosts: tuple[Host, ...]
    team_models: tuple[TeamModel, ...]
    pools: tuple[tuple[Pool, list[Host]], ...] = ()

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        """Return the team's uploads, which only the step that offers them asks for."""
        return tuple(Dataset.objects.filter(team=self.team))

    def host_of(self, draft: Draft) -> Host | None:
        """Return the host that the draft chose, if it is one of these."""
        choice = draft["hardware"]["choice"]
        return next((host for host in self.hosts if f"host:{host.pk}" == choice), None)

    def place_of(self, draft: Draft) -> str:
        """Return the name of the host or pool that the draft chose, if it is one of these."""
        host, choice = self.host_of(draft), draft["hardware"]["choice"]
        chosen = [pool for pool, _ in self.pools if f"pool:{pool.pk}" == choice]
        named = [f"pool {pool_words(pool, self.team)}" for pool in chosen]
        return host.name if host else " ".join(named)

    def team_model_of(self, draft: Draft) -> TeamModel | None:
        """Return the team's model that the draft chose, if it is one of these."""
        chosen = draft["model"].get("team_model")
        return next((model for model in self.team_models if model.pk == chosen), None)


def options_for(plan: Plan) -> Options:
    """Return the team's hosts, those that are only planned for last, its pools and its models."""
    found = reachable_hosts(plan.team)
    unready = {HostState.RETIRED, HostState.PENDING}
    hosts = [one for one in found if one.team_id == plan.team_id and one.state not in unready]
    models = TeamModel.objects.filter(team=plan.team).select_related("host")
    pools = tuple(pools_among(found, plan.team))
    return Options(plan.team, tuple(hosts), tuple(models), pools)


def step_form(
    slug: str,
    draft: Draft,
    options: Options,
    data: QueryDict | None = None,
    files: MultiValueDict[str, Any] | None = None,
) -> StepForm | None:
    """Return a step's form, filled from ``data`` or else from the draft; review has none."""
    bound: dict[str, Any] = {"data": data, "files": files} if data is not None else {}
    if slug == "goal":
        return GoalForm(initial=draft["goal"], **bound)
    if slug == "model":
        initial = draft["model"]
        return ModelForm(initial=initial, team_models=options.team_models, **bound)
    if slug == "workload":
        goal = draft["goal"]["goal"]
        if goal in TRAINING_FORMS:
            host = options.host_of(draft)
            is_known = host is not None and host.kind != "virtual"
            has_gpus = not is_known or bool(host and host.facts.get("gpus"))
            bound |= {"datasets": options.datasets, "has_gpus": has_gpus}
        return WORKLOAD_FORMS[goal](initial=draft["workload"][goal], **bound)
    if slug == "hardware":
        pools = [pool for pool, _ in options.pools]
        return HardwareForm(initial=draft["hardware"], hosts=options.hosts, pools=pools, **bound)
    return None


def pins_form(draft: Draft, data: QueryDict | None = None) -> PinsForm:
    """Return the form of what the planner must keep; it stands on the hardware step."""
    bound: dict[str, Any] = {"data": data} if data is not None else {}
    initial = {**draft["pins"], **(draft["pins"].get("disaggregated") or {})}
    is_serving = draft["goal"]["goal"] == "serve"
    return PinsForm(initial=initial, prefix="pin", is_serving=is_serving, **bound)


def store(slug: str, draft: Draft, values: Mapping[str, Any]) -> None:
    """Put a step's cleaned values into the draft; other goals' workloads stay as they are."""
    if slug == "workload":
        draft["workload"][draft["goal"]["goal"]].update(values)
    elif slug == "pins":
        draft["pins"] = _kept_pins(draft["pins"], values)
    else:
        draft[slug].update(values)
    draft["is_touched"] = True


def fit_context(draft: Draft, context: int) -> bool:
    """Shorten every workload that reads more than ``context`` tokens at once; say if any did."""
    is_shorter = False
    for values in draft["workload"].values():
        if "input_tokens" in values:
            total = values["input_tokens"] + values["output_tokens"]
            if total > context:
                values["output_tokens"] = max(1, min(values["output_tokens"], context // 4))
                values["input_tokens"] = max(1, context - values["output_tokens"])
                is_shorter = True
        elif values.get("sequence_length", 0) > context:
            values["sequence_length"] = context
            is_shorter = True
    return is_shorter


def _kept_pins(old: Draft, new: Mapping[str, Any]) -> Draft:
    """Return the pins of the form; what a suggestion pinned beside them stays with the weights."""
    is_same = old.get("weight_dtype") == new.get("weight_dtype")
    return {**(old if is_same else {}), **new}


def neighbours(slug: str) -> tuple[Step | None, Step | None]:
    """Return the steps before and after one."""
    at = SLUGS.index(slug)
    return (STEPS[at - 1] if at else None, STEPS[at + 1] if at + 1 < len(STEPS) else None)


def summaries(draft: Draft, options: Options) -> dict[str, str]:
    """Return what each step holds now, in a few words."""
    goal = draft["goal"]["goal"]
    slo = f" · {SLO_WORDS[draft['goal']['slo']]}" if goal == "serve" else ""
    team_model = options.team_model_of(draft)
    return {
        "goal": GOAL_WORDS[goal] + slo,
        "model": model_words(draft, team_model.name if team_model else ""),
        "workload": workload_words(draft),
        "hardware": hardware_words(draft, options.place_of(draft)),
        "review": "",
    }


def stepper(plan: Plan, current: str, said: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the steps as the stepper draws them: those before the current one are done."""
    at = SLUGS.index(current)
    return [
        {
            "name": step.name,
            "url": reverse("plan-step", args=[plan.pk, step.slug]),
            "summary": said[step.slug],
            "is_current": index == at,
            "is_done": index < at,
        }
        for index, step in enumerate(STEPS)
    ]
