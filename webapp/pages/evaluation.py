"""Evaluate a model made by a job against the original, and show the effect."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST
from pydantic import TypeAdapter, ValidationError

from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    EvaluateSpec,
    FolderModel,
    ModelSpec,
)
from runners.jobspec.compress import EvaluationTasks
from webapp.accounts.models import Role
from webapp.accounts.services import has_role, signed_in
from webapp.core.display import Quantity, number, signed_percent
from webapp.core.figures import REGISTRY
from webapp.core.problems import InvalidProblem, Problem
from webapp.jobs.measured_figures import JobFigures
from webapp.jobs.models import Job, Measurement
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import TeamModel
from webapp.plans.drafting import perplexity_words, size_words, speed_words
from webapp.plans.predicting import evaluation_prediction

# The effect of a compression, or of an evaluation against an original, as text and table.


LEAST_PERCENT = 0.05  # smaller changes are shown as unchanged


@dataclass(frozen=True)
class Change:
    """One line of the before/after table."""

    label: str
    before: Quantity
    after: Quantity
    words: str


def before_after(figures: JobFigures) -> list[Change]:
    """Return every figure measured on both the original and the compressed model."""
    rows = []
    for name, definition in REGISTRY.items():
        pair = _pair(figures, name)
        before, after = figures.get(f"original_{name}"), figures.get(name)
        if pair is None or before is None or after is None or not (before.shown and after.shown):
            continue
        rows.append(Change(definition.label, before.shown, after.shown, _change(*pair)))
    return rows


def won_words(job: Job, figures: JobFigures) -> str:
    """Return a compression's gains and losses in one sentence, all measured.

    Empty before both models are measured. Size is of the weight files, quality is perplexity
    per window, speed is decoding on the job's own host. A speed that does not count, for example
    because other programs took the processor, is not compared.
    """
    size, speed = _pair(figures, "disk_bytes"), _pair(figures, "decode_tokens_per_second")
    if job.kind != "compress" or size is None:
        return ""
    parts = [size_words(size[1] / size[0]), _quality_words(job)]
    why = _why_speed_is_left_out(job) if speed is not None else ""
    if speed is not None and not why:
        parts.append(f"{speed_words(speed[1] / speed[0])} here")
    sentence = ", ".join(part for part in parts if part)
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    return f"{sentence} The speeds are not compared: {why}" if why else sentence


def _why_speed_is_left_out(job: Job) -> str:
    """Return why the job's speeds and times are excluded, as a sentence; "" if they count."""
    rows = Measurement.objects.filter(job_id=job.pk, is_excluded=True).exclude(
        metric__endswith="bytes"
    )
    row = rows.order_by("pk").first()
    if row is None:
        return ""
    why = row.invalid_reason or "their measurements are excluded"
    return f"{why.rstrip('.')}."


def _pair(figures: JobFigures, name: str) -> tuple[float, float] | None:
    before, after = figures.get(f"original_{name}"), figures.get(name)
    if before is None or after is None or not before.measured or after.measured is None:
        return None
    return before.measured, after.measured


def _quality_words(job: Job) -> str:
    interval = _perplexity_interval(job)
    if interval is None:
        return "quality not measured"
    ratio, low, high = interval
    if low <= 1 <= high:
        return "same quality"
    return perplexity_words(ratio)


def _perplexity_interval(job: Job) -> tuple[float, float, float] | None:
    measured: Mapping[str, Any] = job.result.get("measured", {})
    names = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    if not all(measured.get(name) for name in names):
        return None
    ratio, low, high = (float(measured[name]) for name in names)
    return ratio, low, high


def significance_note(job: Job) -> str:
    """Return whether the evaluated text suffices to distinguish the model from its original."""
    interval = _perplexity_interval(job)
    if interval is None:
        return ""
    ratio, low, high = interval
    verdict = "no difference that this amount of text can show"
    if low > 1 or high < 1:
        verdict = f"{'worse' if low > 1 else 'better'} than the original beyond chance"
    spread = f"{number(ratio, 4)}, 95 % interval {number(low, 4)} to {number(high, 4)}"
    return f"Perplexity over the original's is {spread}, window by window: {verdict}."


def _change(before: float, after: float) -> str:
    """Return a change in percent with a typographic minus; small changes with one decimal."""
    percent = (after / before - 1) * 100
    return "unchanged" if abs(percent) < LEAST_PERCENT else signed_percent(percent)


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
            if isinstance(began_with, FolderModel | ArtefactModel)
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


def evaluation_submit(*, model: TeamModel, by: User, tasks: EvaluationTasks | None = None) -> Job:
    """Queue the evaluation of a model on the host that stores it, and return its job.

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
        name=f"Evaluate {model.name}",
        model_name=model.name,
        prediction=evaluation_prediction(spec, model, shape),
    )
    return job_submit(job=job, by=by.get_username())


@require_POST
def model_evaluate(request: HttpRequest, model_id: str) -> HttpResponse:
    """Queue an evaluation of one of the team's models and show its job."""
    model = get_object_or_404(TeamModel.objects.visible_to(request.user), pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise PermissionDenied("To evaluate a model you need the role Practitioner or higher.")
    try:
        job = evaluation_submit(model=model, by=signed_in(request), tasks=tasks_of(request.POST))
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("model-detail", model.pk)
    return redirect("job-detail", job.pk)
