"""Pushing a model that a job made to a repository of the Hub, with a card of its figures."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from django.contrib.auth.models import User

from planner.specs.base import PlannerError
from runners.hub.names import parse, reason_of
from runners.hub.settings import HUB_TOKEN, HubSettingsError, from_environment
from runners.jobspec import ArtefactModel, PublishSpec
from runners.jobspec.compress import LONGEST_CARD
from runners.jobspec.kinds import KINDS
from webapp.accounts.models import Team
from webapp.accounts.secrets import secrets_open
from webapp.core.display import capitalised, sentence
from webapp.core.problems import InvalidProblem
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import TeamModel

ASK_SECONDS = 5.0
LONGEST_CHAIN = 20  # jobs from a model back to what it began with
USUAL_ARTEFACT = "model"
USUAL_OBJECTIVE = "next_token"
NO_BASE = "a model without a repository"
NOT_OF_A_JOB = (
    "{} was not made by a job of the team, or its host was removed: only a model whose files a "
    "host keeps can be pushed. Make it here first."
)


def model_publish(
    *,
    model: TeamModel,
    repository: str,
    by: User,
    revision: str = "",
    is_private: bool = True,
    idempotency_key: str | None = None,
) -> Job:
    """Queue the push of a model on the host that stores it, and return its job.

    Raises:
        InvalidProblem: the model has no files on a host, the repository is none, or the team's
            token is missing or may not write to it.
    """
    maker = _maker_of(model)
    if model.source != "job" or maker is None or model.host is None:
        raise InvalidProblem("model", NOT_OF_A_JOB.format(model.name))
    try:
        named = parse(repository)
    except PlannerError as error:
        raise InvalidProblem("repository", sentence(reason_of(error))) from None
    if named.hub:
        raise InvalidProblem(
            "repository",
            f"repository is {repository[:80]!r}: models are pushed to the Hugging Face Hub alone; "
            "name the repository as owner/name there.",
        )
    if named.file:
        raise InvalidProblem(
            "repository",
            f"repository is {repository[:80]!r}: name the repository alone, as owner/name.",
        )
    _check_token(model.team, named.repository)
    spec = PublishSpec(
        model=ArtefactModel(
            attempt_id=model.attempt_id, name=model.artefact_name or USUAL_ARTEFACT
        ),
        repository=named.repository,
        revision=revision or named.revision,
        is_private=is_private,
        card=card_of(model, maker)[:LONGEST_CARD],
        secrets=(HUB_TOKEN,),
    )
    job = job_create(
        team=model.team,
        owner=by,
        host=model.host,
        spec=spec,
        name=f"Push {model.name} to {named.repository}",
        model_name=model.name,
        idempotency_key=idempotency_key,
    )
    return job_submit(job=job, by=by.get_username())


def may_publish(model: TeamModel) -> bool:
    """Return whether a model has files on a host, made by a job of the team."""
    return model.source == "job" and model.host_id is not None and _maker_of(model) is not None


def _artefact_of(model: TeamModel) -> str:
    return model.artefact_name or USUAL_ARTEFACT


def _maker_of(model: TeamModel) -> Job | None:
    rows = Job.objects.filter(team=model.team, pk=model.facts.get("job") or "")
    return rows.select_related("current_attempt__host").first()


def _check_token(team: Team, repository: str) -> None:
    """Check the token's account before the job; where the hub is out of reach the job does.

    Raises:
        InvalidProblem: there is no token, or it may not write to the repository.
    """
    # Here: httpx and the hub's errors are of no other use to this module.
    from runners.hub.errors import HubError
    from runners.hub.publishing import check_token

    token = secrets_open(team_id=team.pk, names=[HUB_TOKEN]).get(HUB_TOKEN, "")
    try:
        settings = dataclasses.replace(from_environment(os.environ), token=token)
        if token and settings.is_offline:
            return
        check_token(settings, repository, ASK_SECONDS)
    except HubSettingsError:
        return
    except HubError as error:
        if not error.is_out_of_reach:
            raise InvalidProblem("repository", f"{capitalised(str(error))}.") from None


# The card: https://huggingface.co/docs/hub/model-cards says which fields of its YAML are read.


def card_of(model: TeamModel, maker: Job) -> str:
    """Return a model's card: its base model, data and method, and every measured figure."""
    jobs = [*([maker] if maker.deleted_at is None else []), *_evaluations(model)]
    specs = _chain(maker)
    base = _base_of(specs[-1])
    data = list(dict.fromkeys(each for spec in specs for each in _data_sets(spec)))
    methods = [_method_of(spec) for spec in reversed(specs)]
    is_adapter = model.facts.get("kind") == "adapter"
    head = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    head += [f"base_model: {base}"] * bool(base)
    head += ["datasets:", *(f"- {each}" for each in data)] if data else []
    head += ["tags:", "- slipway", *(f"- {each}" for each in dict.fromkeys(methods)), "---"]
    on_data = f" on {', '.join(data)}" if data else ""
    lines = [
        *head,
        f"# {_plain(model.name)}",
        "",
        f"Made from {base or NO_BASE} by {', then '.join(methods)}{on_data}, with Slipway.",
        "The licence of the base model applies." if base else "",
        "",
        "## Measured figures",
        "",
        "Each was measured by a job on the named host; none is a prediction.",
        "",
        "| Figure | Value | How it was measured |",
        "|---|---|---|",
    ]
    lines += [row for job in jobs for row in _rows(job)]
    return "\n".join(lines) + "\n"


def _rows(job: Job) -> Iterator[str]:
    host = job.current_attempt.host.name if job.current_attempt else job.place
    date = f"{job.ended_at:%Y-%m-%d}" if job.ended_at else ""
    for figure in figures_of(job).values():
        if figure.state == "measured" and (shown := figure.shown) is not None:
            where = f"{KINDS[job.kind].title} on {host}, {date}, job {job.pk}"
            how = f"{figure.how}; {where}" if figure.how else where
            cells = (figure.definition.label, f"{shown.value} {shown.unit}", how)
            yield f"| {' | '.join(map(_plain, cells))} |"


def _evaluations(model: TeamModel) -> list[Job]:
    """Return the evaluations of a model that succeeded, the oldest first.

    An attempt may have made several models, and a deleted job says nothing any more.
    """
    return list(
        Job.objects.filter(
            team=model.team,
            kind="evaluate",
            state=JobState.SUCCEEDED,
            deleted_at=None,
            spec__model__attempt_id=model.attempt_id,
            spec__model__name=_artefact_of(model),
        )
        .select_related("current_attempt__host")
        .order_by("created_at")
    )


def _chain(job: Job) -> list[Mapping[str, Any]]:
    """Return the specs of a job and of those whose models it began with, the last one first."""
    specs: list[Mapping[str, Any]] = [job.spec]
    while len(specs) < LONGEST_CHAIN:
        named = specs[-1].get("model") or {}
        if named.get("source") != "artefact":
            break
        rows = Attempt.objects.filter(pk=named["attempt_id"], job__team=job.team_id)
        before = rows.values_list("job__spec", flat=True).first()
        if before is None:
            break
        specs.append(before)
    return specs


def _base_of(spec: Mapping[str, Any]) -> str:
    """Return the repository that a spec's model is, "" if it is none."""
    named = spec.get("model") or {}
    return str(named["repository"]) if named.get("source") == "hub" else ""


def _data_sets(spec: object) -> Iterator[str]:
    """Yield the Hub's data sets of a job; a team's own files are not named."""
    if isinstance(spec, dict):
        repository = spec.get("repository")
        if isinstance(repository, str) and repository.startswith("datasets/"):
            yield repository.removeprefix("datasets/")
        for value in spec.values():
            yield from _data_sets(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _data_sets(value)


def _method_of(spec: Mapping[str, Any]) -> str:
    """Return the word for what a job does to its model."""
    if spec["kind"] != "train":
        return str(spec.get("method") or spec["kind"]).replace("_", "-")
    objective = spec.get("objective", USUAL_OBJECTIVE)
    words = [objective] * (objective != USUAL_OBJECTIVE) + ["lora"] * bool(spec.get("lora"))
    return "-".join(words).replace("_", "-") or "fine-tuning"


def _plain(text: object) -> str:
    """Return text that stays in its cell of a table."""
    return re.sub(r"[|\s]+", " ", str(text)).strip()
