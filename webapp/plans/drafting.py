"""What a launch may add to save work: a smaller model that guesses ahead, earlier prompts reused.

What an engine cannot be told is refused by its name, never left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from planner.specs.model import ModelSpec as ModelShape
from runners.endpoint_spec import ON_GPUS, EngineName
from runners.jobspec import (
    ArtefactModel,
    DraftGuess,
    FolderModel,
    GenerateSpec,
    ModelRef,
    RandomModel,
    ServeSpec,
)
from runners.jobspec.engine import Draft, EngineOptions
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.errors import DraftProblem

Reuse = Literal["", "yes", "no"]  # of earlier prompts' keys and values; "" leaves it to the engine
MOST_OFFERED = 50
LOOKUP = "lookup"  # instead of a model: the prompt's own words
LOOKUP_TOKENS = 4  # at a time, as with a guessing model
DRAFT_OR_SPLIT = (
    "A guessing model does not go with prefill and decode on different GPUs: its own cache does "
    "not travel. Choose none, or the prompt's own words."
)
OWN_WAYS: Mapping[EngineName, str] = {
    "slipway": "Slipway's own engine reads every prompt anew",
    "llamacpp": "llama.cpp reuses what a slot read last, always",
}


def team_model_ref(model: TeamModel, host: Host | None, pool: Pool | None) -> ModelRef:
    """Return where a job finds a model of the team.

    Raises:
        DraftProblem: its weights lie on another host.
    """
    if model.host_id and host and model.host_id != host.pk:
        raise DraftProblem(
            f"The weights of {model.name} lie on another host. Choose {model.host}, or copy the "
            f"model's folder to {pool.name if pool else host.name}.",
            "choice",
        )
    if model.source == "job":
        return ArtefactModel(attempt_id=model.attempt_id, name=model.artefact_name or "model")
    if model.source == "folder":
        return FolderModel(path=model.path)
    return RandomModel(config=model.config)


def drafts_for(host: Host, model: ModelRef, shape: ModelShape | None) -> list[TeamModel]:
    """Return the team's other models on a host that read as many tokens as a job's model."""
    if shape is None or isinstance(model, RandomModel):
        return []
    known = TeamModel.objects.filter(team=host.team, host=host).exclude(source="config")
    found = [
        each
        for each in known
        if each.config.get("vocab_size") == shape.vocab_size
        and team_model_ref(each, host, None) != model
    ]
    return found[:MOST_OFFERED]


def reuse_of(posted: Mapping[str, str], engine: EngineName) -> Reuse:
    """Return whether an engine is told to reuse earlier prompts.

    Raises:
        InvalidProblem: there is no such choice, or the engine cannot be told.
    """
    for choice in ("", "yes", "no"):
        if posted.get("reuse", "") == choice:
            if choice and engine not in ON_GPUS:
                raise InvalidProblem(
                    "reuse",
                    f"“Reuse earlier prompts” is {choice}, and {OWN_WAYS[engine]}. Leave it as "
                    f"the engine has it, or choose {' or '.join(ON_GPUS)}.",
                )
            return choice
    raise InvalidProblem(
        "reuse", f"“Reuse earlier prompts” is {posted['reuse'][:20]}; it can be yes, no or empty."
    )


def with_draft(spec: GenerateSpec, known: Sequence[TeamModel], chosen: str) -> GenerateSpec:
    """Return a generation whose next tokens a smaller model guesses, "" for the spec as it is.

    Raises:
        DraftProblem: there is no such model here, or it does not go with the rest.
    """
    if not chosen:
        return spec
    guess = DraftGuess(model=_ref_of(known, chosen))
    try:
        return GenerateSpec.model_validate(spec.model_dump() | {"speculation": guess})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DraftProblem(
            f"A guessing model does not go with the rest: {said}.", "draft"
        ) from error


def with_engine_draft(
    spec: ServeSpec, known: Sequence[TeamModel], chosen: str, reuse: Reuse
) -> ServeSpec:
    """Return an endpoint whose engine is told of a guessing model and of earlier prompts.

    Raises:
        DraftProblem: there is no such model here, or the engine takes none.
    """
    if chosen and spec.engine not in ON_GPUS:
        raise DraftProblem(
            f"“Guess ahead with” is for {' and '.join(ON_GPUS)}, and the engine is {spec.engine}, "
            "which takes no guessing model here. Choose none, or that engine.",
            "draft",
        )
    changes: dict[str, Any] = {}
    if chosen == LOOKUP:
        changes["lookup_tokens"] = _lookup_tokens(spec.engine)
    elif chosen:
        if spec.engine_options and spec.engine_options.split:
            raise DraftProblem(DRAFT_OR_SPLIT, "draft")
        changes["draft"] = Draft(model=_ref_of(known, chosen))
    if reuse:
        changes["has_prefix_cache"] = reuse == "yes"
    if not changes:
        return spec
    options = (spec.engine_options or EngineOptions()).model_copy(update=changes)
    return spec.model_copy(update={"engine_options": options})


def _lookup_tokens(engine: EngineName) -> int:
    if engine != "vllm":
        raise DraftProblem(
            f"Guesses from the prompt's own words are vLLM's here, and the engine is {engine}. "
            "Choose vLLM, or no guesses.",
            "draft",
        )
    return LOOKUP_TOKENS


def _ref_of(known: Sequence[TeamModel], chosen: str) -> ArtefactModel | FolderModel:
    for each in known:
        found = team_model_ref(each, each.host, None)
        if str(each.pk) == chosen and isinstance(found, ArtefactModel | FolderModel):
            return found
    names = ", ".join(each.name for each in known) or "none"
    raise DraftProblem(
        f"No such model of your team guesses for this one here; there is {names}. A guessing "
        "model lies on the same host and reads the same tokens.",
        "draft",
    )
