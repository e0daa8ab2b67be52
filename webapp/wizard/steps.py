"""The five steps of the wizard: order, questions, forms and storage."""

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
from webapp.plans.engines import chosen_engine, engine_choices
from webapp.plans.models import Plan
from webapp.plans.sharing import pool_words, pools_among, reachable_hosts
from webapp.plans.targets import PERCENTILES, percentile_of
from webapp.plans.words import (
    GOAL_WORDS,
    SLO_WORDS,
    hardware_words,
    model_words,
    workload_words,
)
from webapp.wizard.forms import GoalForm, HardwareForm, ModelForm, PinsForm, StepForm
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
    """The hosts, pools, models and datasets a draft can choose from, each loaded once on demand.

    ``has_documents`` loads the hosts' JSON columns, which only the hardware step shows.
    """

    team: Team
    has_documents: bool = False

    @cached_property
    def reachable(self) -> list[Host]:
        """Return the hosts on which the team may run jobs, single or in a pool."""
        return reachable_hosts(self.team, has_documents=self.has_documents)

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """Return the team's own hosts, neither pending nor retired; virtual ones last."""
        unready = {HostState.RETIRED, HostState.PENDING}
        own = [host for host in self.reachable if host.team_id == self.team.pk]
        return tuple(host for host in own if host.state not in unready)

    @cached_property
    def pools(self) -> tuple[tuple[Pool, list[Host]], ...]:
        """Return the pools that the team may use, with their hosts."""
        return tuple(pools_among(self.reachable, self.team))

    @cached_property
    def team_models(self) -> tuple[TeamModel, ...]:
        """Return the team's models."""
        return tuple(TeamModel.objects.filter(team=self.team).select_related("host"))

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        """Return the team's uploaded datasets."""
        return tuple(Dataset.objects.filter(team=self.team))

    def host_of(self, draft: Draft) -> Host | None:
        """Return the chosen host of a draft, or None if it is not available."""
        choice = draft["hardware"]["choice"] or ""
        if not choice.startswith("host:"):
            return None
        return next((host for host in self.hosts if f"host:{host.pk}" == choice), None)

    def place_of(self, draft: Draft) -> str:
        """Return the name of the chosen host or pool of a draft, or "" if not available."""
        choice = draft["hardware"]["choice"] or ""
        if host := self.host_of(draft):
            return host.name
        if not choice.startswith("pool:"):
            return ""
        chosen = [pool for pool, _ in self.pools if f"pool:{pool.pk}" == choice]
        return " ".join(f"pool {pool_words(pool, self.team)}" for pool in chosen)

    def team_model_of(self, draft: Draft) -> TeamModel | None:
        """Return the chosen team model of a draft, or None if it is not available."""
        chosen = draft["model"].get("team_model")
        if not chosen:
            return None
        return next((model for model in self.team_models if model.pk == chosen), None)


def options_for(plan: Plan, slug: str = "") -> Options:
    """Return the options of a plan's team for a step."""
    return Options(plan.team, has_documents=slug == "hardware")


def step_form(
    slug: str,
    draft: Draft,
    options: Options,
    data: QueryDict | None = None,
    files: MultiValueDict[str, Any] | None = None,
) -> StepForm | None:
    """Return a step's form, filled from ``data`` or else from the draft; None for review."""
    bound: dict[str, Any] = {"data": data, "files": files} if data is not None else {}
    if slug == "goal":
        initial = {**draft["goal"], "percentile": percentile_of(draft)}
        return GoalForm(initial=initial, **bound)
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
        bound |= {"hosts": options.hosts, "engines": engine_choices(draft["goal"]["goal"])}
        return HardwareForm(initial=draft["hardware"], pools=pools, **bound)
    return None


def pins_form(draft: Draft, data: QueryDict | None = None) -> PinsForm:
    """Return the form of the strategy pins, part of the hardware step."""
    bound: dict[str, Any] = {"data": data} if data is not None else {}
    initial = {**draft["pins"], **(draft["pins"].get("disaggregated") or {})}
    is_serving = draft["goal"]["goal"] == "serve"
    return PinsForm(initial=initial, prefix="pin", is_serving=is_serving, **bound)


def store(slug: str, draft: Draft, values: Mapping[str, Any]) -> None:
    """Store a step's cleaned values in the draft; other goals' workloads stay unchanged."""
    if slug == "workload":
        draft["workload"][draft["goal"]["goal"]].update(values)
    elif slug == "pins":
        draft["pins"] = _merged_pins(draft["pins"], values)
    else:
        draft[slug].update(values)
    draft["is_touched"] = True


def fit_context(draft: Draft, context: int) -> bool:
    """Shorten every workload that exceeds ``context`` tokens; return whether any did."""
    is_shorter = False
    for values in draft["workload"].values():
        if "input_tokens" in values:
            total = values["input_tokens"] + values["output_tokens"]
            if total > context:
                values["output_tokens"] = max(1, min(values["output_tokens"], context // 4))
                values["input_tokens"] = max(1, context - values["output_tokens"])
                is_shorter = True
            if (values.get("max_request_tokens") or 0) > context:
                values["max_request_tokens"] = context
                is_shorter = True
        elif values.get("sequence_length", 0) > context:
            values["sequence_length"] = context
            is_shorter = True
    return is_shorter


def _merged_pins(old: Draft, new: Mapping[str, Any]) -> Draft:
    """Merge the form's pins; a suggestion's other pins stay while the weight dtype is the same."""
    is_same = old.get("weight_dtype") == new.get("weight_dtype")
    return {**(old if is_same else {}), **new}


def neighbours(slug: str) -> tuple[Step | None, Step | None]:
    """Return the previous and the next step of a step."""
    at = SLUGS.index(slug)
    return (STEPS[at - 1] if at else None, STEPS[at + 1] if at + 1 < len(STEPS) else None)


def summaries(draft: Draft, options: Options) -> dict[str, str]:
    """Return a short summary of each step's values."""
    goal = draft["goal"]["goal"]
    slo = f" · {SLO_WORDS[draft['goal']['slo']]}" if goal == "serve" else ""
    if goal == "serve" and draft["goal"]["slo"] != "none":
        slo += f" at {PERCENTILES[percentile_of(draft)]}"
    team_model = options.team_model_of(draft)
    engine = engine_choices(goal).get(chosen_engine(draft) or "")
    return {
        "goal": GOAL_WORDS[goal] + slo,
        "model": model_words(draft, team_model.name if team_model else ""),
        "workload": workload_words(draft),
        "hardware": hardware_words(draft, options.place_of(draft))
        + (f" · {engine}" if engine else ""),
        "review": "",
    }


def stepper(plan: Plan, current: str, said: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the entries of the stepper; steps before the current one are done."""
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
