"""Launch options that save work: speculative decoding and prefix caching.

Options that an engine does not support are refused by name, never ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from planner.specs.model import ModelSpec as ModelShape
from runners.jobspec import (
    ArtefactModel,
    DraftGuess,
    FolderModel,
    GenerateSpec,
    ModelRef,
    RandomModel,
    ServeSpec,
)
from runners.jobspec.serve import ON_GPUS, Draft, EngineName, EngineOptions
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel
from webapp.plans.errors import DraftProblem

Reuse = Literal["", "yes", "no"]  # prefix caching; "" is the engine's default
MOST_OFFERED = 50
LOOKUP = "lookup"  # prompt lookup instead of a draft model
LOOKUP_TOKENS = 4  # per step, as with a draft model
DRAFT_OR_SPLIT = (
    "A draft model does not go with prefill and decode on different GPUs: its own cache does "
    "not travel. Choose none, or the prompt's own words."
)
OWN_WAYS: Mapping[EngineName, str] = {
    "slipway": "Slipway's own engine has no prefix cache",
    "llamacpp": "llama.cpp reuses what a slot read last, always",
}


def team_model_ref(model: TeamModel, host: Host | None, pool: Pool | None) -> ModelRef:
    """Return a job's reference to a team model.

    Raises:
        DraftProblem: its weights are on another host.
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
    """Return the team's other models on a host with the same vocabulary size."""
    if shape is None or isinstance(model, RandomModel):
        return []
    models = TeamModel.objects.filter(team=host.team, host=host).exclude(source="config")
    candidates = [
        each
        for each in models
        if each.config.get("vocab_size") == shape.vocab_size
        and team_model_ref(each, host, None) != model
    ]
    return candidates[:MOST_OFFERED]


def reuse_of(posted: Mapping[str, str], engine: EngineName) -> Reuse:
    """Return the prefix-caching choice of a launch form.

    Raises:
        InvalidProblem: the choice is unknown, or the engine has no such option.
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
    """Return a generation with a draft model; with "" the spec is unchanged.

    Raises:
        DraftProblem: there is no such model here, or it is incompatible with other options.
    """
    if not chosen:
        return spec
    guess = DraftGuess(model=_ref_of(known, chosen))
    try:
        return GenerateSpec.model_validate(spec.model_dump() | {"speculation": guess})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DraftProblem(
            f"A draft model does not go with the rest: {message}.", "draft"
        ) from error


def with_engine_draft(
    spec: ServeSpec, known: Sequence[TeamModel], chosen: str, reuse: Reuse
) -> ServeSpec:
    """Return an endpoint with speculative decoding and prefix caching as chosen.

    Raises:
        DraftProblem: there is no such model here, or the engine does not support it.
    """
    if chosen and spec.engine not in ON_GPUS:
        raise DraftProblem(
            f"“Speculative decoding” is for {' and '.join(ON_GPUS)}, and the engine is "
            f"{spec.engine}, which takes no draft model here. Choose none, or that engine.",
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
            f"Prompt lookup is vLLM's here, and the engine is {engine}. Choose vLLM, or no draft.",
            "draft",
        )
    return LOOKUP_TOKENS


def _ref_of(known: Sequence[TeamModel], chosen: str) -> ArtefactModel | FolderModel:
    for each in known:
        ref = team_model_ref(each, each.host, None)
        if str(each.pk) == chosen and isinstance(ref, ArtefactModel | FolderModel):
            return ref
    names = ", ".join(each.name for each in known) or "none"
    raise DraftProblem(
        f"No such model of your team can draft for this one here; there is {names}. A draft "
        "model lies on the same host and reads the same tokens.",
        "draft",
    )
