"""Drafts of plans, and drafts of compression."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from planner.specs.estimate import Estimate
from planner.specs.model import ModelSpec as ModelShape
from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    DraftModelSpeculation,
    FolderModel,
    GenerateSpec,
    ModelRef,
    RandomModel,
    ServeSpec,
)
from runners.jobspec.compress import GgufType
from runners.jobspec.serve import ON_GPUS, Draft, EngineName, EngineOptions
from runners.plans.methods import COMPRESSIONS
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.workloads import PATTERN, CompressWork
from webapp.core.display import TIMES, memory, number, signed_percent
from webapp.hosts.models import Host, Pool
from webapp.modelhub.models import TeamModel

# ---------------------------------------------------------------------------
# Launch options that save work: speculative decoding and prefix caching.
#
# Options that an engine does not support are refused by name, never ignored.
# ---------------------------------------------------------------------------


MOST_OFFERED = 50
LOOKUP = "lookup"  # prompt lookup instead of a draft model
LOOKUP_TOKENS = 4  # per step, as with a draft model
DRAFT_OR_SPLIT = (
    "Prefill and decode on different GPUs cannot use a draft model, whose KV cache is not "
    "transferred. Choose “None”, or prompt lookup."
)
OWN_WAYS: Mapping[EngineName, str] = {
    "slipway": "Slipway's own engine has no prefix cache",
    "llamacpp": "llama.cpp always reuses the last prompt of a slot",
}


def team_model_ref(model: TeamModel, host: Host | None, pool: Pool | None) -> ModelRef:
    """Return a job's reference to a team model.

    Raises:
        DraftProblem: the model's weights are on another host.
    """
    if model.host_id and host and model.host_id != host.pk:
        raise DraftProblem(
            f"The weights of {model.name} are on another host. Choose {model.host}, or copy the "
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


def check_prefix_caching(chosen: bool | None, engine: EngineName) -> None:  # noqa: FBT001
    """Refuse a choice about prefix caching for an engine that has no such option.

    Raises:
        DraftProblem: the sentence names the engines that have it.
    """
    if chosen is not None and engine not in ON_GPUS:
        raise DraftProblem(
            f"“Prefix caching” is {'yes' if chosen else 'no'}, and {OWN_WAYS[engine]}. Choose "
            f"“Engine default”, or {' or '.join(ON_GPUS)}.",
            "prefix_caching",
        )


def with_draft(spec: GenerateSpec, known: Sequence[TeamModel], chosen: str) -> GenerateSpec:
    """Return a generation with a draft model; with "" the spec is unchanged.

    Raises:
        DraftProblem: the draft model is not on the host, or is incompatible with other options.
    """
    if not chosen:
        return spec
    guess = DraftModelSpeculation(model=_ref_of(known, chosen))
    try:
        return GenerateSpec.model_validate(spec.model_dump() | {"speculation": guess})
    except ValidationError as error:
        why = first_message(error)
        raise DraftProblem(
            f"The draft model is incompatible with the other options: {why}.", "draft_model"
        ) from error


def with_engine_draft(
    spec: ServeSpec,
    known: Sequence[TeamModel],
    chosen: str,
    prefix_caching: bool | None,  # noqa: FBT001
) -> ServeSpec:
    """Return an endpoint with speculative decoding and prefix caching as chosen.

    Raises:
        DraftProblem: the draft model is not on the host, or the engine does not support it.
    """
    if chosen and spec.engine not in ON_GPUS:
        raise DraftProblem(
            f"“Speculative decoding” is for {' and '.join(ON_GPUS)}, and the engine is "
            f"{spec.engine}, which supports no draft model. Choose one of these engines, or "
            "“None”.",
            "draft_model",
        )
    changes: dict[str, Any] = {}
    if chosen == LOOKUP:
        if spec.engine != "vllm":
            raise DraftProblem(
                f"Only vLLM supports prompt lookup, and the engine is {spec.engine}. Choose vLLM, "
                "or the draft “None”.",
                "draft_model",
            )
        changes["lookup_tokens"] = LOOKUP_TOKENS
    elif chosen:
        if spec.engine_options and spec.engine_options.split:
            raise DraftProblem(DRAFT_OR_SPLIT, "draft_model")
        changes["draft"] = Draft(model=_ref_of(known, chosen))
    check_prefix_caching(prefix_caching, spec.engine)
    if prefix_caching is not None:
        changes["has_prefix_cache"] = prefix_caching
    if not changes:
        return spec
    options = (spec.engine_options or EngineOptions()).model_copy(update=changes)
    return spec.model_copy(update={"engine_options": options})


def _ref_of(known: Sequence[TeamModel], chosen: str) -> ArtefactModel | FolderModel:
    for each in known:
        ref = team_model_ref(each, each.host, None)
        if str(each.pk) == chosen and isinstance(ref, ArtefactModel | FolderModel):
            return ref
    names = ", ".join(each.name for each in known) or "none"
    raise DraftProblem(
        f"The chosen draft model is not available for this model and host; available: {names}. A "
        "draft model must be on the same host and have the same tokenizer.",
        "draft_model",
    )


# ---------------------------------------------------------------------------
# Convert a compression to a job spec, and state its gains and losses.
# ---------------------------------------------------------------------------


GGUF_TYPES: dict[int, GgufType] = {4: "Q4_K_M", 8: "Q8_0"}


def compress_spec(values: CompressWork, model: ModelRef) -> CompressSpec:
    """Return the job spec of a compression.

    Raises:
        DraftProblem: no job runs the method, or it does not support the options.
    """
    method = COMPRESSIONS[values.method]
    if method.job is None:
        runs = ", ".join(each.name for each in COMPRESSIONS.values() if each.job)
        raise DraftProblem(
            f"{method.name} can be planned, but no job runs it yet. Choose one of these methods: "
            f"{runs}.",
            "method",
        )
    fields: dict[str, Any] = {"method": method.job, "group_size": values.group_size}
    if method.job == "gguf":
        if values.bits not in GGUF_TYPES:
            raise DraftProblem(
                f"GGUF files are written here with 4 bits (Q4_K_M) or 8 (Q8_0), not "
                f"{values.bits}. Choose one of them.",
                "bits",
            )
        fields["gguf_type"] = GGUF_TYPES[values.bits]
    elif "bits" in method.options:
        fields["bits"] = values.bits
    if "recovery_steps" in method.options:
        fields["recovery_steps"] = values.recovery_steps
    is_pattern = values.sparsity == PATTERN
    pruned = {"pattern": PATTERN} if is_pattern else {"sparsity": int(values.sparsity) / 100}
    return CompressSpec.model_validate({"model": model, **fields, **pruned})


# Gains and losses of a compression as text: size, quality, speed.
#
# The same text is used for predicted values of plans and measured values of jobs.


NEARLY = 0.02  # smaller changes of speed or size count as none
MANY_TIMES = 1.5  # from here a change of speed is shown as a factor, below as per cent
SAME_QUALITY = 0.0005  # smaller changes of perplexity count as none
SAME_PERPLEXITY = "same perplexity"


def size_words(ratio: float) -> str:
    """Return a size ratio (after ÷ before) as text."""
    if abs(ratio - 1) < NEARLY:
        return "the same size"
    return f"{_whole_percent(ratio)} {'smaller' if ratio < 1 else 'larger'}"


def speed_words(ratio: float) -> str:
    """Return a speed ratio (after ÷ before) as text."""
    if not ratio or abs(ratio - 1) < NEARLY:
        return "as fast"
    side, factor = ("faster", ratio) if ratio > 1 else ("slower", 1 / ratio)
    if factor < MANY_TIMES:
        return f"{_whole_percent(ratio)} {side}"
    return f"{number(factor, 2)}{TIMES} {side}"


def perplexity_words(ratio: float) -> str:
    """Return a perplexity ratio (after ÷ before) as text."""
    if abs(ratio - 1) < SAME_QUALITY:
        return SAME_PERPLEXITY
    change = signed_percent(abs(ratio - 1) * 100).removeprefix("+")
    return f"{change} {'higher' if ratio > 1 else 'lower'} perplexity"


def planned_gains(best: Estimate, speed: str = "") -> str:
    """Return the gains of a planned compression; empty for other goals."""
    usage = best.memory
    if not usage.checkpoint_bytes or not usage.disk_bytes:
        return ""
    original = usage.disk_bytes - usage.checkpoint_bytes
    sizes = f"{memory(usage.checkpoint_bytes)} instead of {memory(original)}"
    parts = [f"{size_words(usage.checkpoint_bytes / original)} ({sizes})"]
    if best.quality and best.quality.perplexity_ratio:
        words = perplexity_words(best.quality.perplexity_ratio[1])
        parts.append(words if words == SAME_PERPLEXITY else f"about {words}")
    return ", ".join([*parts, *([speed] if speed else [])])


def _whole_percent(ratio: float) -> str:
    return f"{round(abs(ratio - 1) * 100)} %"
