"""Evaluation of a model against the original that its job started from."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from django.contrib.auth.models import User
from pydantic import TypeAdapter, ValidationError

from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    EvaluateSpec,
    FolderModel,
    HubModel,
    ModelSpec,
)
from runners.jobspec.compress import EvaluationTasks
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Job
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import TeamModel
from webapp.plans.predicting import evaluation_prediction

_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)
AGAINST = "Evaluate against the original"
ALONE = "Evaluate this model"
NO_WEIGHTS = (
    "{} was not made by a job, so there is no original to compare it with. Compress or train "
    "a model here and evaluate the result."
)
NO_HOST = "The host that stored {} was removed, and its weights with it. Create the model again."
ONE_FILE = (
    "{} is a GGUF file for llama.cpp, which a job does not load again. The compression that wrote "
    "it has read it back and evaluated it: see its page."
)

TASK_LIMITS = {
    "names": (
        "“Task names” contains an invalid name. Use letters, digits, '_', '-' and '.'; at most 64 "
        "names of 100 characters, separated by commas."
    ),
    "folder": "“Folder of tasks” is longer than 1000 characters; choose a shorter path.",
    "documents": (
        "“Maximum documents per task” is not a whole number from 1 to 1,000,000; leave the field "
        "empty for all documents."
    ),
}


class LeftModel(NamedTuple):
    """A model made by a job, with its button label; empty if it cannot be evaluated."""

    model: TeamModel
    evaluation: str


def left_model(model: TeamModel) -> LeftModel:
    """Return a model with the label of its evaluation button."""
    try:
        spec = evaluation_of(model)
    except InvalidProblem:
        return LeftModel(model, "")
    return LeftModel(model, AGAINST if spec.original else ALONE)


def evaluation_of(model: TeamModel) -> EvaluateSpec:
    """Return the spec that evaluates a model against the model its job started from.

    A model trained from scratch has no original and is evaluated alone.

    Raises:
        InvalidProblem: no job made the model, its host is gone, or no job can load the model.
    """
    maker = _maker_of(model)
    if model.source != "job" or maker is None:
        raise InvalidProblem("no_original", NO_WEIGHTS.format(model.name))
    if model.host_id is None:
        raise InvalidProblem("no_host", NO_HOST.format(model.name))
    made_by = _SPEC.validate_python(maker.spec)
    if isinstance(made_by, CompressSpec) and made_by.is_exported:
        raise InvalidProblem("one_file", ONE_FILE.format(model.name))
    began_with = made_by.model
    return EvaluateSpec.model_validate(
        {
            "model": ArtefactModel(
                attempt_id=model.attempt_id, name=model.artefact_name or "model"
            ),
            "weight_dtype": model.weight_dtype,
            "original": began_with
            if isinstance(began_with, FolderModel | ArtefactModel | HubModel)
            else None,
        }
    )


def _maker_of(model: TeamModel) -> Job | None:
    return Job.objects.filter(team=model.team, pk=model.facts.get("job") or "").first()


def tasks_of(posted: Mapping[str, str]) -> EvaluationTasks | None:
    """Return the evaluation tasks of a form, None if it requests none.

    Raises:
        InvalidProblem: a field is invalid.
    """
    kind = posted.get("tasks", "")
    if not kind:
        return None
    folder = posted.get("task_folder", "").strip()
    if kind == "folder" and not folder:
        raise InvalidProblem(
            "task_folder", "“Folder of tasks” is empty; give a folder of the host."
        )
    names = [each for each in re.split(r"[\s,;]+", posted.get("task_names", "")) if each]
    try:
        return EvaluationTasks.model_validate(
            {
                "names": names,
                "folder": folder if kind == "folder" else None,
                "documents": posted.get("documents", "").strip() or None,
            }
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise InvalidProblem(field, TASK_LIMITS[field]) from None


def evaluation_submit(
    *,
    model: TeamModel,
    by: User,
    tasks: EvaluationTasks | None = None,
    name: str = "",
    idempotency_key: str | None = None,
) -> Job:
    """Queue the evaluation of a model on the host that stores it, and return its job.

    ``name``: of the job; "" for that of the model.

    Raises:
        Problem: the model cannot be evaluated, or the job service refuses.
    """
    spec = evaluation_of(model).model_copy(update={"tasks": tasks})
    maker = _maker_of(model)
    planned = maker.plan_request.get("model") if maker else None
    shape = planned if isinstance(planned, str | dict) else cast("dict[str, Any]", model.config)
    job = job_create(
        team=model.team,
        owner=by,
        host=model.host,
        spec=spec,
        name=name or f"Evaluate {model.name}",
        model_name=model.name,
        prediction=evaluation_prediction(spec, model, shape),
        idempotency_key=idempotency_key,
    )
    return job_submit(job=job, by=by.get_username())


def models_of(job: Job) -> list[LeftModel]:
    """Return the models that the job's current attempt added to the team's models."""
    attempt = job.current_attempt_id
    models = TeamModel.objects.filter(attempt_id=attempt) if attempt else []
    return [left_model(model) for model in models]
