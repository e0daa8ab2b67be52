"""Models that a job made, for the team to plan and run with."""

from typing import Any

from webapp.jobs.models import Artefact, Attempt, Job
from webapp.modelhub.models import TeamModel


def register_models(job: Job, attempt: Attempt) -> list[TeamModel]:
    """Register each model that the attempt left on its host, and return them."""
    models = Artefact.objects.filter(attempt=attempt, kind="model")
    return [_register(job, attempt, artefact) for artefact in models]


def _register(job: Job, attempt: Attempt, artefact: Artefact) -> TeamModel:
    facts = dict(artefact.facts)
    model, _ = TeamModel.objects.update_or_create(
        attempt_id=attempt.pk,
        artefact_name=artefact.name,
        defaults={
            "team": job.team,
            "name": _name(job, facts),
            "source": "job",
            "config": facts.get("config") or {},
            "num_parameters": int(facts.get("num_parameters") or 0),
            "host": attempt.host,
            "weight_dtype": str(facts.get("weight_dtype") or ""),
            "facts": {**facts, "measured": job.result.get("measured") or {}, "job": job.pk},
        },
    )
    return model


def _name(job: Job, facts: dict[str, Any]) -> str:
    base = job.model_name or job.name
    dtype = facts.get("weight_dtype")
    return f"{base} ({dtype})" if job.kind == "quantize" and dtype else base
