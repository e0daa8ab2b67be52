"""Plan a tuning: the ways to run a plan on its host, as the planner and the jobs allow them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.contrib.auth.models import User
from pydantic import BaseModel, ConfigDict, ValidationError

from planner import api
from planner.specs.base import PlannerError
from planner.specs.estimate import PlanAnswer, PlannedStrategy, PlanRequest
from planner.specs.workload import Strategy
from runners.plans.document import PlanDocument
from runners.plans.job_specs import spec_of
from runners.plans.launch import LaunchOptionError
from runners.plans.refusals import DraftProblem
from runners.plans.tuning import (
    MORE_IS_BETTER,
    MOST_CANDIDATES,
    STRATEGY,
    Combination,
    FigureKey,
    Trial,
    TuningOptions,
    combinations_of,
    figure_of,
    predicted_of,
    trial_document,
    trial_launch,
    trial_of,
    with_settings,
)
from runners.shared.tuning import Candidate
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs.launching import LaunchContext, launch_context
from webapp.plans.explanation import strategy_words
from webapp.plans.models import Plan
from webapp.plans.planning import plan_answer, verdict_answer
from webapp.plans.verdict import verdict_of
from webapp.tunings.models import document_without_names

LOADING_SECONDS = 20.0  # of a trial, assumed until one has ended
AS_PLANNED = "As planned"
WORDS = {  # of a setting with its value
    "max_batch_tokens": "{} tokens a step",
    "micro_batch_size": "micro-batch {}",
    "activation_recomputation": "{} recomputation",
    "compute_dtype": "products in {}",
    "compiled": "compiled layers",
}


class PlannedCandidate(BaseModel):
    """A candidate as it is stored: what the planner says of it, and how it is planned again.

    ``settings``: what differs from the plan's own choice. ``pins``: its whole strategy.
    ``workload``: values of the workload that differ.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    words: str
    settings: dict[str, Any]
    pins: dict[str, Any]
    workload: dict[str, Any]
    predicted: float
    low: float | None = None
    high: float | None = None
    peak_bytes: int

    @property
    def candidate(self) -> Candidate:
        """Return the candidate for the decisions of a tuning."""
        return Candidate(self.number, self.settings, self.predicted, self.peak_bytes)


@dataclass(frozen=True)
class PlannedTuning:
    """A tuning as it is planned: nothing is stored."""

    options: TuningOptions
    document: PlanDocument
    host: Host
    figure: FigureKey
    trial: Trial
    candidates: list[PlannedCandidate]

    @property
    def seconds(self) -> float:
        """Return how long it takes at most, with an assumed time to load."""
        each = self.trial.seconds + LOADING_SECONDS
        return min(self.options.max_seconds, self.options.trials * each)


def tuning_plan(team: Team, owner: User, plan: Plan, options: TuningOptions) -> PlannedTuning:
    """Return the candidates of a plan's tuning, its own choice first; nothing is stored.

    Raises:
        DraftProblem: the plan cannot be tuned or launched; ``field`` is what to change.
        InvalidProblem: the host is unknown.
    """
    draft = _on_host(team, owner, plan, options)
    document = draft.document
    answer = verdict_answer(plan) if document == plan.document else plan_answer(draft)
    draft.request, draft.answer = plan.request or draft.request, answer.model_dump(mode="json")
    space = _space_of(draft, answer, options)
    return PlannedTuning(
        options=options,
        document=document,
        host=space.context.host,
        figure=space.figure,
        trial=space.trial,
        candidates=space.candidates(answer.plans[0]),
    )


def tuning_refusal(plan: Plan, answer: PlanAnswer) -> str:
    """Return why a plan cannot be tuned on its own host, "" if it can; the Hub is not asked."""
    try:
        _space_of(plan, answer, TuningOptions())
    except (DraftProblem, LaunchOptionError) as problem:
        return str(problem)
    return ""


def _space_of(plan: Plan, answer: PlanAnswer, options: TuningOptions) -> "_Space":
    """Return what a plan's tuning may try, of its stored answer.

    Raises:
        DraftProblem: the plan cannot be tuned or launched; ``field`` is what to change.
    """
    document = plan.document
    figure = figure_of(document, options)
    if document.hardware.pool:
        raise DraftProblem(
            "The plan runs on a pool, and a tuning measures one host. Name a host of the pool.",
            "host",
        )
    if not answer.plans:
        verdict = verdict_of(answer, document)
        raise DraftProblem(f"{verdict.sentence.rstrip('.')}. {verdict.detail}".strip(), "host")
    context = launch_context(plan)
    trial = trial_of(document, options, answer.plans[0])
    launch = trial_launch(document, trial, options.max_seconds)
    spec_of(trial_document(document, trial), launch, context.case(launch))  # or it says why not
    request = context.question.request.without_targets()
    return _Space(document, figure, options, context, request, trial)


def _on_host(team: Team, owner: User, plan: Plan, options: TuningOptions) -> Plan:
    """Return an unsaved draft of a plan, on the tuning's host."""
    draft = Plan(team=team, owner=owner, draft=document_without_names(plan.draft))
    if not options.host:
        return draft
    rows = Host.objects.filter(team=team, kind__in=RUNS_JOBS)
    host = rows.filter(pk=options.host).first() or rows.filter(name=options.host).first()
    if host is None:
        known = ", ".join(rows.order_by("name").values_list("name", flat=True)[:10]) or "none"
        raise InvalidProblem(
            "host",
            f"There is no host {options.host!r} in your team that runs jobs. There are: {known}.",
        )
    document = draft.document
    document.hardware = document.hardware.with_values(host=host.pk, pool=None)
    draft.document = document
    return draft


@dataclass(frozen=True)
class _Space:
    """The candidates of one tuning, as the planner and the jobs allow them."""

    document: PlanDocument
    figure: FigureKey
    options: TuningOptions
    context: LaunchContext
    request: PlanRequest
    trial: Trial

    def candidates(self, own: PlannedStrategy) -> list[PlannedCandidate]:
        """Return the plan's own choice, and the best of the others, in the order of their trials.

        The best value of each setting by itself is among them, whatever is predicted of it.
        """
        own = self._best(own.strategy.stated) or own  # with today's measurements of the host
        first = self._candidate(Combination({}, own.strategy.stated, {}), own)
        if first is None:
            raise DraftProblem(
                f"The planner predicts no {self.figure} of this plan. Choose another figure.",
                "figure",
            )
        sign = 1.0 if self.figure in MORE_IS_BETTER else -1.0
        seen, found = {self._spec_text(first, own)}, []
        for combination, best in self._planned(own):
            each = self._candidate(combination, best)
            text = self._spec_text(each, best) if each else ""
            if each and text and text not in seen:
                seen.add(text)
                found.append(each)
        found.sort(key=lambda each: (-sign * each.predicted, len(each.settings)))
        alone: dict[str, PlannedCandidate] = {}
        for each in found:
            if len(each.settings) == 1:
                alone.setdefault(next(iter(each.settings)), each)
        chosen = [*alone.values()]
        chosen += [each for each in found if each not in chosen]
        rows = [first, *chosen[: MOST_CANDIDATES - 1]]
        return [each.model_copy(update={"number": at}) for at, each in enumerate(rows)]

    def _planned(self, own: PlannedStrategy) -> Iterator[tuple[Combination, PlannedStrategy]]:
        """Yield what the planner allows of the combinations, each with its estimate."""
        others = api.plan(self.request).plans
        planned = [own, *(each for each in others if each.strategy != own.strategy)]
        planned = [each for each in planned if self._keeps_quality(each, own)]
        for combination in combinations_of(self.document, planned):
            best = self._best(combination.pins)
            if best is not None and self._keeps_quality(best, own):
                yield combination, best

    def _best(self, pins: Mapping[str, Any]) -> PlannedStrategy | None:
        try:
            asked = self.request.model_copy(
                update={"pins": Strategy.model_validate(dict(pins)), "top": 1}
            )
            plans: Sequence[PlannedStrategy] = api.best_plan(asked).plans
        except (PlannerError, ValidationError):
            return None
        return plans[0] if plans else None

    def _keeps_quality(self, each: PlannedStrategy, own: PlannedStrategy) -> bool:
        """Return whether a strategy loses no more quality than the plan's own choice."""
        if self.options.formats:
            return True
        loss = 0.0 if each.quality is None else each.quality.loss_ratio
        most = 0.0 if own.quality is None else own.quality.loss_ratio
        is_same = each.strategy.weight_dtype == own.strategy.weight_dtype
        return is_same or (loss is not None and loss <= (most or 0.0))

    def _candidate(
        self, combination: Combination, best: PlannedStrategy
    ) -> PlannedCandidate | None:
        predicted = predicted_of(best, self.figure)
        if not predicted or predicted <= 0:
            return None
        low, high = best.interval.get(self.figure, (None, None))
        return PlannedCandidate(
            number=0,
            words=words_of(combination.settings, best),
            settings=dict(combination.settings),
            pins=best.strategy.model_dump(mode="json", exclude_none=True),
            workload=dict(combination.workload),
            predicted=predicted,
            low=low,
            high=high,
            peak_bytes=best.memory.per_device_peak_bytes,
        )

    def _spec_text(self, candidate: PlannedCandidate, best: PlannedStrategy) -> str:
        """Return what a candidate's job runs, "" if no job runs it."""
        try:
            document = with_settings(self.document, candidate.pins, candidate.workload)
            document = trial_document(document, self.trial)
            launch = trial_launch(document, self.trial, self.options.max_seconds)
            case = replace(self.context, best=best).case(launch)
            return spec_of(document, launch, case).model_dump_json()
        except (DraftProblem, LaunchOptionError, ValidationError):
            return ""


def words_of(settings: Mapping[str, Any], best: PlannedStrategy) -> str:
    """Return what a candidate does differently, in short."""
    parts = []
    for name, value in settings.items():
        if name == STRATEGY:
            parts.append(strategy_words(best.strategy))
        else:
            parts.append(WORDS[name].format(value))
    return ", ".join(parts) or AS_PLANNED
