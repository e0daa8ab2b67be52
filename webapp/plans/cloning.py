"""Clone a job as a draft: its plan's version, and the fields of its launch form."""

import copy
from typing import Any

from django.contrib.auth.models import User
from pydantic import TypeAdapter, ValidationError

from runners.jobspec import (
    BenchmarkSpec,
    DraftGuess,
    GenerateSpec,
    JobSpec,
    ModelRef,
    ServeSpec,
)
from runners.jobspec.benchmark import LoadOptions
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.plans.drafting import LOOKUP, team_model_ref
from webapp.plans.errors import DraftProblem
from webapp.plans.generating import ALL_ADAPTERS
from webapp.plans.launching import max_duration_of
from webapp.plans.models import Plan, PlanState
from webapp.plans.saving import draft_begun_from

HOUR, MINUTE = 3600.0, 60.0
_SPEC: TypeAdapter[JobSpec] = TypeAdapter(JobSpec)


def clone_begin(*, job: Job, owner: User) -> Plan:
    """Return a draft of the version that a job ran, with its launch form filled in.

    An unchanged clone of the same job by the same person is reused.

    Raises:
        DraftProblem: the job was not launched from a plan, or the plan is deleted.
    """
    plan = job.plan
    if plan is None:
        raise DraftProblem("This job was not launched from a plan that is still there.")
    clones = Plan.objects.filter(base=plan, owner=owner, state=PlanState.DRAFT, revision=0)
    if existing := clones.filter(draft__launch__job=job.pk).first():
        return existing
    draft = {**copy.deepcopy(plan.draft), "launch": launch_fields(job)}
    return draft_begun_from(plan, owner, draft=draft)


def launch_fields(job: Job) -> dict[str, Any]:
    """Return the launch form's values that correspond to a job, by field name."""
    fields: dict[str, Any] = {
        "job": job.pk,
        "job_name": job.name,
        "priority": str(job.priority),
        "retries": str(job.max_retries),
        "secrets": list(job.spec.get("secrets") or ()),
    }
    try:
        spec = _SPEC.validate_python(job.spec)
    except ValidationError:  # written by an older release; the plan's own fields are still usable
        return fields
    limit = job.max_duration_seconds
    if limit is not None and limit != max_duration_of(spec):
        fields["hours"] = f"{limit / HOUR:g}"
    if isinstance(spec, ServeSpec):
        fields |= _endpoint_fields(spec, job)
    elif isinstance(spec, BenchmarkSpec):
        fields |= {"profile": spec.profile, **(_load_fields(spec.load) if spec.load else {})}
    elif isinstance(spec, GenerateSpec):
        fields |= _generate_fields(spec, job)
    return fields


def _endpoint_fields(spec: ServeSpec, job: Job) -> dict[str, Any]:
    idle, options = spec.idle_stop_seconds, spec.engine_options
    fields: dict[str, Any] = {
        "idle": f"{idle / MINUTE:g}" if idle else "",
        "engine": spec.engine,
        "adapters": bool(spec.adapters),
    }
    if options is None:
        return fields
    if options.has_prefix_cache is not None:
        fields["reuse"] = "yes" if options.has_prefix_cache else "no"
    if options.lookup_tokens is not None:
        fields["draft"] = LOOKUP
    elif options.draft is not None:
        fields["draft"] = _team_model_id(options.draft.model, job)
    return fields


def _load_fields(load: LoadOptions) -> dict[str, Any]:
    return {
        "arrivals": load.arrivals.kind,
        "points": ", ".join(f"{point:g}" for point in load.arrivals.points),
        "requests": str(load.requests_per_repetition),
        "repetitions": str(load.repetitions),
    }


def _generate_fields(spec: GenerateSpec, job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if len(spec.adapters) > 1:
        fields["adapter"] = ALL_ADAPTERS
    elif spec.adapters:
        fields["adapter"] = spec.adapters[0].name
    if isinstance(spec.speculation, DraftGuess):
        fields["draft"] = _team_model_id(spec.speculation.model, job)
    return fields


def _team_model_id(ref: ModelRef, job: Job) -> str:
    """Return the id of the team model that a job's spec refers to, "" if it is gone."""
    models = TeamModel.objects.filter(team=job.team).exclude(source="config")
    same = (each for each in models if team_model_ref(each, each.host, None) == ref)
    return str(next((each.pk for each in same), ""))
