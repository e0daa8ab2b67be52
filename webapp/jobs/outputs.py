"""Register the models that a job made with its team."""

from typing import Any

from pydantic import TypeAdapter

from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    DemoModel,
    ModelSpec,
    RandomModel,
    TrainSpec,
)
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.modelhub.demo import demo_config
from webapp.modelhub.models import TeamModel

_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


def register_models(job: Job, attempt: Attempt) -> list[TeamModel]:
    """Register each model that the attempt saved on its host, and return them."""
    models = Artefact.objects.filter(attempt=attempt, kind="model")
    return [_register(job, attempt, artefact) for artefact in models]


def _register(job: Job, attempt: Attempt, artefact: Artefact) -> TeamModel:
    spec = _SPEC.validate_python(job.spec)
    source = _source_model(job, spec)
    measured = job.result.get("measured") or {}
    source_parameters = source.num_parameters if source else 0
    model, _ = TeamModel.objects.update_or_create(
        attempt_id=attempt.pk,
        artefact_name=artefact.name,
        defaults={
            "team": job.team,
            "name": _name(job, spec, source),
            "source": "job",
            "config": _config(job, spec, source),
            "num_parameters": int(measured.get("parameters") or source_parameters),
            "host": attempt.host,
            "weight_dtype": _dtype(spec),
            "facts": {**artefact.facts, "measured": measured, "job": job.pk},
        },
    )
    return model


def _source_model(job: Job, spec: ModelSpec) -> TeamModel | None:
    """Return the team's model that the job started from, if any."""
    if not isinstance(spec.model, ArtefactModel):
        return None
    return TeamModel.objects.filter(
        team=job.team, attempt_id=spec.model.attempt_id, artefact_name=spec.model.name
    ).first()


def _config(job: Job, spec: ModelSpec, source: TeamModel | None) -> dict[str, Any]:
    """Return the config of the new model: that of the job's source model."""
    if isinstance(spec.model, DemoModel):
        return _trained_demo(spec.model, spec)
    if isinstance(spec.model, RandomModel):
        return dict(spec.model.config)
    if source is not None:
        return dict(source.config)
    planned = job.plan_request.get("model")
    return planned if isinstance(planned, dict) else {}


def _trained_demo(model: DemoModel, spec: ModelSpec) -> dict[str, Any]:
    """Return the demo model's config, limited to the positions it was trained on."""
    positions = model.max_position_embeddings
    if isinstance(spec, TrainSpec):
        positions = min(positions, spec.sequence_length)
    return {**demo_config(model), "max_position_embeddings": positions}


def _dtype(spec: ModelSpec) -> str:
    return spec.published_dtype if isinstance(spec, TrainSpec) else spec.weight_dtype


def _name(job: Job, spec: ModelSpec, source: TeamModel | None) -> str:
    base = source.name if source else job.model_name or job.name
    if isinstance(spec, TrainSpec):
        return f"{base}, LoRA {spec.lora.rank}"[:120] if spec.lora else base
    made = spec.title if isinstance(spec, CompressSpec) else spec.weight_dtype
    return f"{base}, {made}"[:120]
