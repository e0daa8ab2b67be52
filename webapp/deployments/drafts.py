"""Drafts of changes: kept beside a deployment, shown against what runs, rolled out or discarded.

A deployment has at most one draft, which those share who may change it. Nothing of it counts
before it is rolled out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import transaction

from planner.specs.estimate import PlannedStrategy
from planner.specs.units import MINUTE
from runners.plans.launch import Launch
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.display import DASH, about, counted, memory
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.deployments.models import Deployment, DeploymentDraft, Replica
from webapp.deployments.services import changes_checked, deployment_change, launch_of
from webapp.jobs.models import JobState
from webapp.plans.engine_words import engine_title
from webapp.plans.explanation import strategy_words
from webapp.plans.models import Plan
from webapp.plans.planning import stored_answer

WEIGHTS = "weights"  # planner.cost.memory: the part of a device's memory
LOADS = 20  # of a version, the last ones


class Difference(NamedTuple):
    """What a draft changes: a label, what counts now, and what would."""

    label: str
    running: str
    drafted: str


@dataclass(frozen=True)
class LoadForecast:
    """How long a model takes to load; ``basis`` is where the figure is from."""

    seconds: float | None = None
    basis: str = "not loaded yet"

    def __str__(self) -> str:
        return self.basis if self.seconds is None else f"{about(self.seconds)} ({self.basis})"


def draft_of(deployment: Deployment) -> DeploymentDraft:
    """Return a deployment's draft.

    Raises:
        NotFoundProblem: it has none.
    """
    row = DeploymentDraft.objects.filter(deployment=deployment).select_related("plan", "by")
    draft = row.first()
    if draft is None:
        words = f"{deployment.name} has no draft of a change."
        raise NotFoundProblem("no_draft", words)
    return draft


def draft_keep(
    *,
    deployment: Deployment,
    by: User,
    plan: Plan | None = None,
    launch: Launch | None = None,
    **fields: Any,
) -> DeploymentDraft:
    """Keep a change of a deployment as its draft, in place of the one before.

    A plan that is itself a draft is saved as a version.

    Raises:
        InvalidProblem: a field is not valid, or nothing differs from what counts now.
        DraftProblem: the plan cannot be launched as an endpoint.
    """
    row, changed = changes_checked(
        deployment=deployment, by=by, plan=plan, launch=launch, fields=fields
    )
    if not changed:
        words = f"{row.name} has these values already: change one, or discard its draft."
        raise InvalidProblem("draft", words)
    chosen = changed.pop("plan", None)
    with transaction.atomic():
        draft, _ = DeploymentDraft.objects.update_or_create(
            deployment=row,
            defaults={"plan": chosen, "fields": changed, "by": by, "saved_at": now()},
        )
        detail = dict(changed)
        if chosen is not None:
            detail |= {"plan": chosen.pk, "version": chosen.version}
        event_record(row, "deployment.drafted", by.get_username(), detail=detail)
    return draft


def draft_discard(*, deployment: Deployment, by: User) -> None:
    """Discard a deployment's draft.

    Raises:
        NotFoundProblem: it has none.
    """
    with transaction.atomic():
        if not DeploymentDraft.objects.filter(deployment=deployment).delete()[0]:
            draft_of(deployment)
        event_record(deployment, "deployment.draft_discarded", by.get_username())


def draft_roll_out(
    *, deployment: Deployment, by: User, seen_at: datetime | None = None
) -> Deployment:
    """Change a deployment as its draft says, which is gone then; what runs is replaced.

    ``seen_at``: when the draft was kept that the caller has seen.

    Raises:
        NotFoundProblem: it has none.
        ConflictProblem: the draft is another one than that which was seen, or its plan is deleted.
        InvalidProblem: a value is not valid any more.
        DraftProblem: the plan cannot be launched any more.
    """
    draft = draft_of(deployment)
    if seen_at is not None and seen_at != draft.saved_at:
        words = f"The draft was changed at {draft.saved_at:%H:%M:%S}. Look at it again."
        raise ConflictProblem("draft_changed", words)
    if draft.plan is not None and draft.plan.deleted_at is not None:
        words = f"{draft.plan.name}, version {draft.plan.version}, is deleted. Choose another one."
        raise ConflictProblem("plan_deleted", words)
    changed = deployment_change(
        deployment=deployment, by=by, plan=draft.plan, launch=_launch_of(draft), **_others(draft)
    )
    DeploymentDraft.objects.filter(pk=draft.pk, saved_at=draft.saved_at).delete()
    return changed


def _launch_of(draft: DeploymentDraft) -> Launch | None:
    stored = draft.fields.get("launch")
    return None if stored is None else Launch.model_validate({"run": "endpoint", **stored})


def _others(draft: DeploymentDraft) -> dict[str, Any]:
    return {name: value for name, value in draft.fields.items() if name != "launch"}


def as_drafted(deployment: Deployment) -> Deployment:
    """Return a deployment, not stored, with the values of its draft if it has one."""
    row = Deployment.objects.select_related("plan", "team").get(pk=deployment.pk)
    draft = DeploymentDraft.objects.filter(deployment=row).select_related("plan").first()
    if draft is not None:
        for name, value in draft.fields.items():
            setattr(row, name, value)
        row.plan = draft.plan or row.plan
    return row


# What a draft changes


def differences(deployment: Deployment) -> list[Difference]:
    """Return what the draft of a deployment changes, by the fields and by what plans say."""
    drafted = as_drafted(deployment)
    found = [
        Difference(label, words(deployment), words(drafted)) for label, words in FIELDS.items()
    ]
    found += _launch_differences(launch_of(deployment), launch_of(drafted))
    if drafted.plan_id != deployment.plan_id:
        found += _plan_differences(deployment, drafted)
    return [each for each in found if each.running != each.drafted]


def _idle_words(row: Deployment) -> str:
    if row.is_kept_awake:
        return "kept awake"
    return DASH if row.idle_seconds is None else f"after {row.idle_seconds / MINUTE:g} min"


def _replica_words(row: Deployment) -> str:
    least, most = row.min_replicas, row.max_replicas
    return str(least) if least == most else f"{least} to {most}"


def _plan_words(row: Deployment) -> str:
    return f"{row.plan.name}, version {row.plan.version}"


FIELDS: Mapping[str, Callable[[Deployment], str]] = {
    "Plan": _plan_words,
    "Replicas": _replica_words,
    "Sleeps when idle": _idle_words,
    "Hours kept awake": lambda row: row.warm_hours or DASH,
    "Also answers to": lambda row: ", ".join(row.aliases) or DASH,
    "Falls back to": lambda row: ", ".join(row.fallbacks) or DASH,
    "Paused": lambda row: "yes" if row.is_paused else "no",
}


def _launch_differences(running: Launch, drafted: Launch) -> list[Difference]:
    before, after = running.model_dump(mode="json"), drafted.model_dump(mode="json")
    titles = {name: each.title or name for name, each in Launch.model_fields.items()}
    return [
        Difference(titles[name], _value_words(before[name]), _value_words(after[name]))
        for name in before
    ]


def _value_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(str, value)) or DASH
    return DASH if value in {None, ""} else str(value)


def _plan_differences(running: Deployment, drafted: Deployment) -> list[Difference]:
    before, after = _best(running.plan), _best(drafted.plan)
    loads = loads_expected(running, drafted.plan)
    rows = [(label, words(before), words(after)) for label, words in PLANNED.items()]
    rows += [(label, words(running.plan), words(drafted.plan)) for label, words in LIMITS.items()]
    rows.append(("Load", str(loads[0]), str(loads[1])))
    return [Difference(*each) for each in rows]


def _best(plan: Plan) -> PlannedStrategy | None:
    answer = stored_answer(plan)
    return answer.plans[0] if answer is not None and answer.plans else None


def _of_plan(words: Callable[[PlannedStrategy], str]) -> Callable[[PlannedStrategy | None], str]:
    return lambda best: DASH if best is None else words(best)


PLANNED: Mapping[str, Callable[[PlannedStrategy | None], str]] = {
    "Engine": _of_plan(lambda best: engine_title(best.engine)),
    "Layout": _of_plan(lambda best: strategy_words(best.strategy)),
    "Memory of each device": _of_plan(lambda best: str(memory(best.memory.per_device_peak_bytes))),
}


def _request_words(plan: Plan) -> str:
    work = plan.document.workload
    tokens = getattr(work, "input_tokens", None), getattr(work, "output_tokens", None)
    return " + ".join(f"{each:,}" for each in tokens if each is not None) + " tokens"


LIMITS: Mapping[str, Callable[[Plan], str]] = {
    "Requests at once, each replica": lambda plan: str(
        getattr(plan.document.workload, "concurrency", DASH)
    ),
    "Prompt and answer, planned": _request_words,
}


def loads_expected(deployment: Deployment, plan: Plan) -> tuple[LoadForecast, LoadForecast]:
    """Return how long a deployment loads now, and with another plan.

    That is measured where replicas of the team have loaded that version; else what the present
    one takes, by the bytes of the weights on a device.
    """
    now_taken = LoadForecast()
    if deployment.load_seconds is not None:
        words = f"median of {counted(len(deployment.loads), 'load')}"
        now_taken = LoadForecast(deployment.load_seconds, words)
    if measured := _loads_of(plan):
        words = f"median of {counted(len(measured), 'load')}"
        return now_taken, LoadForecast(median(measured), words)
    before, after = _weights_of(deployment.plan), _weights_of(plan)
    if now_taken.seconds is None or not before or not after:
        return now_taken, LoadForecast()
    seconds = now_taken.seconds * after / before
    return now_taken, LoadForecast(seconds, "modelled, by the bytes of the weights")


def _loads_of(plan: Plan) -> list[float]:
    rows = Replica.objects.filter(plan=plan, ready_at__isnull=False, job__state__in=LOADED)
    rows = rows.select_related("job__current_attempt").order_by("-created_at")[:LOADS]
    return [seconds for each in rows if each.is_ready and (seconds := each.load_seconds)]


LOADED = (JobState.RUNNING, JobState.STOPPING, JobState.STOPPED, JobState.SUCCEEDED)


def _weights_of(plan: Plan) -> float | None:
    best = _best(plan)
    return None if best is None else best.memory.breakdown_bytes.get(WEIGHTS)
