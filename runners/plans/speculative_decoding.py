"""Speculative decoding of a generation or an endpoint: a draft model, or prompt lookup.

What an engine does not support is refused by name, never ignored.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from planner.specs.workload import Strategy
from runners.jobspec import (
    ArtefactModel,
    DraftModelSpeculation,
    FolderModel,
    GenerateSpec,
    ServeSpec,
)
from runners.jobspec.engines import Feature, has_feature, names, with_feature
from runners.jobspec.serve import MOST_DRAFT_TOKENS, Draft, EngineOptions
from runners.plans.document import ModelChoice
from runners.plans.launch_case import DraftModel
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.weights import repository_of

LOOKUP = "lookup"  # prompt lookup instead of a draft model
LOOKUP_TOKENS = 4  # per step, as with a draft model
DRAFT_BY_NAME = (
    "The plan's draft model is {}, which names no repository, so no endpoint can start with it. "
    "Name its repository as owner/name, or plan without a draft model and choose a model of your "
    "team under “Speculative decoding”."
)
DRAFT_OR_SPLIT = (
    "Prefill and decode on different GPUs cannot use a draft model, whose KV cache is not "
    "transferred. Choose “None”, or prompt lookup."
)


def with_draft(spec: GenerateSpec, known: Sequence[DraftModel], chosen: str) -> GenerateSpec:
    """Return a generation with a draft model; with "" the spec is unchanged.

    Raises:
        DraftProblem: the draft model is not on the host, or is incompatible with other options.
    """
    if not chosen:
        return spec
    speculation = DraftModelSpeculation(model=_ref_of(known, chosen))
    try:
        return GenerateSpec.model_validate(spec.model_dump() | {"speculation": speculation})
    except ValidationError as error:
        why = first_message(error)
        raise DraftProblem(
            f"The draft model is incompatible with the other options: {why}.", "draft_model"
        ) from error


def draft_by_name(strategy: Strategy) -> Draft | None:
    """Return the draft model that a plan names, by its repository; None where it names none.

    Raises:
        DraftProblem: the name stands for no repository.
    """
    planned = strategy.speculative
    if planned is None:
        return None
    name = ModelChoice(source="catalog", catalog_id=planned.draft_model)
    model = repository_of(name)
    if model is None:
        raise DraftProblem(DRAFT_BY_NAME.format(planned.draft_model), "speculative")
    return Draft(model=model, tokens=min(planned.tokens, MOST_DRAFT_TOKENS))


def with_engine_draft(spec: ServeSpec, known: Sequence[DraftModel], chosen: str) -> ServeSpec:
    """Return an endpoint with a draft model or prompt lookup; with "" the spec is unchanged.

    Raises:
        DraftProblem: the draft model is not on the host, or the engine does not support it.
    """
    if not chosen:
        return spec
    feature: Feature = "prompt_lookup" if chosen == LOOKUP else "draft_model"
    if not has_feature(spec.engine, feature):
        having = with_feature(feature)
        way = "prompt lookup" if chosen == LOOKUP else "a draft model"
        raise DraftProblem(
            f"“Speculative decoding” by {way} is for {names(having)}, and the engine is "
            f"{spec.engine}. Choose {names(having, 'or')}, or “None”.",
            "draft_model",
        )
    drafting: dict[str, Any] = {}
    if chosen == LOOKUP:
        drafting["lookup_tokens"] = LOOKUP_TOKENS
    elif spec.engine_options and spec.engine_options.split:
        raise DraftProblem(DRAFT_OR_SPLIT, "draft_model")
    else:
        drafting["draft"] = Draft(model=_ref_of(known, chosen))
    options = (spec.engine_options or EngineOptions()).model_copy(update=drafting)
    return spec.model_copy(update={"engine_options": options})


def _ref_of(known: Sequence[DraftModel], chosen: str) -> ArtefactModel | FolderModel:
    for each in known:
        if each.id == chosen:
            return each.model
    available = ", ".join(each.name for each in known) or "none"
    raise DraftProblem(
        "The chosen draft model is not available for this model and host; available: "
        f"{available}. A "
        "draft model must be on the same host and have the same tokenizer.",
        "draft_model",
    )
