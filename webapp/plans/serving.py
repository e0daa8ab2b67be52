"""Convert the serve goal to an endpoint spec: limits, keys, cache and attention options."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.specs.workload import Strategy
from runners.engines import ENGINES
from runners.jobspec import ArtefactModel, KvCache, ModelRef, NamedAdapter, ServeSpec
from runners.jobspec.serve import EngineName
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Artefact, Attempt
from webapp.plans.drafting import Reuse, reuse_of
from webapp.plans.errors import DraftProblem

# Convert a strategy's cache and attention options to those of jobs, or refuse them.
#
# A plan that a job would silently run differently is refused by name, with a remedy.


CACHES: dict[str, KvCache] = {"fp8": "fp8", "int4": "int4"}
CHOICES: dict[str, KvCache] = {**CACHES, "int2": "int2"}
WIDE = ("fp32", "bf16", "fp16")


def cache_of(strategy: Strategy, chosen: str) -> KvCache:
    """Return the KV-cache format: of the workload step if set, else of the plan.

    Raises:
        DraftProblem: jobs do not support the format, or step and plan disagree.
    """
    planned, cache = _planned_cache(strategy), CHOICES.get(chosen)
    if cache is None:
        return planned
    if planned in {"plain", cache}:
        return cache
    raise DraftProblem(
        f"The plan keeps keys and values in {planned}, the workload step in {cache}. Pin the KV "
        "cache to the same, or leave one of them to the other.",
        "kv_cache",
    )


def _planned_cache(strategy: Strategy) -> KvCache:
    dtype, compute_dtype = strategy.kv_cache_dtype, _compute_dtype(strategy)
    if dtype is None or dtype == compute_dtype:
        return "plain"
    if dtype in CACHES:
        return CACHES[dtype]
    raise DraftProblem(
        f"Keys and values in {dtype} are planned but no job keeps them so: jobs keep them in "
        f"{compute_dtype}, or in {' or '.join(CACHES)}. Pin the KV cache to one of these.",
        "kv_cache_dtype",
    )


def _compute_dtype(strategy: Strategy) -> str:
    """Return the compute dtype of layers: narrow activations are widened before caching."""
    dtype = strategy.activation_dtype
    return dtype if dtype in WIDE else "bf16"


def check_serving(strategy: Strategy) -> None:
    """Refuse options that neither an endpoint nor its benchmark supports.

    Raises:
        DraftProblem: names the option and a remedy.
    """
    own = _compute_dtype(strategy)
    if strategy.kv_cache_dtype not in {None, own}:
        raise DraftProblem(
            f"Endpoints keep keys and values in {own}; a cache in {strategy.kv_cache_dtype} is "
            f"planned only. Pin the KV cache to {own}, or generate in batches instead.",
            "kv_cache_dtype",
        )
    if strategy.speculative is not None:
        raise DraftProblem(
            f"A draft by {strategy.speculative.draft_model} is planned only: endpoints have no "
            "speculative decoding yet. Leave it out, or use batch generation.",
            "speculative",
        )
    if strategy.attention == "eager":
        raise DraftProblem(
            "Endpoints attend with fused kernels; eager attention is planned only. Leave it out.",
            "attention",
        )


Draft = dict[str, Any]
ROOM_TOKENS = 4096  # maximum request length, if the planned one is shorter
LEAST_MINUTES, MOST_MINUTES = 0.1, 10_080.0
NAME_LENGTH = 100
MOST_ADAPTERS = 64
ADAPTER_ID_LENGTH = 6


class EndpointOptions(NamedTuple):
    """Options of an endpoint; only hashes of its keys are stored."""

    key_hashes: tuple[str, ...] = ()
    idle_stop_seconds: float | None = None
    has_adapters: bool = False  # adapters trained by the team's jobs on the model
    engine: EngineName = "slipway"
    reuse: Reuse = ""
    draft: str = ""  # id of the team's draft model, or "lookup"


def endpoint_options_of(posted: Mapping[str, str], key_hashes: tuple[str, ...]) -> EndpointOptions:
    """Return the endpoint options of a launch form.

    Raises:
        InvalidProblem: the minutes or the engine are invalid, or the engine does not support
            an option.
    """
    engine = _engine_of(posted.get("engine", "slipway"))
    reuse, draft = reuse_of(posted, engine), posted.get("draft", "").strip()
    text, has_adapters = posted.get("idle", "").strip(), posted.get("adapters") == "yes"
    if not text:
        return EndpointOptions(key_hashes, None, has_adapters, engine, reuse, draft)
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise InvalidProblem(
            "idle",
            f"“Stop when idle” is {text[:20]}; it can be {LEAST_MINUTES:g} to "
            f"{MOST_MINUTES:g} minutes, or empty.",
        )
    return EndpointOptions(key_hashes, minutes * 60.0, has_adapters, engine, reuse, draft)


def adapters_of(team: Team, model: ModelRef) -> tuple[NamedAdapter, ...]:
    """Return the adapters that the team's jobs trained on a model, newest first.

    A GGUF file has the adapters of its source model: llama.cpp applies them to it.
    """
    base = _base_of(team, model)
    if base is None:
        return ()
    adapters = Artefact.objects.filter(
        kind="adapter", attempt__job__team=team, facts__base__attempt_id=base.attempt_id
    ).order_by("-created_at")
    fitting = [
        each for each in adapters.select_related("attempt__job") if _is_trained_on(each, base)
    ]
    return tuple(
        NamedAdapter(
            name=_adapter_name(each),
            adapter=ArtefactModel(attempt_id=each.attempt_id, name=each.name),
        )
        for each in fitting[:MOST_ADAPTERS]
    )


def _base_of(team: Team, model: ModelRef) -> ArtefactModel | None:
    """Return the base model of adapters; for a GGUF file its source model."""
    if not isinstance(model, ArtefactModel):
        return None
    producers = Attempt.objects.filter(pk=model.attempt_id, job__team=team, job__kind="compress")
    spec = producers.values_list("job__spec", flat=True).first()
    if spec is None or spec.get("method") != "gguf":
        return model
    source = spec["model"]
    return ArtefactModel.model_validate(source) if source["source"] == "artefact" else None


def _is_trained_on(adapter: Artefact, model: ArtefactModel) -> bool:
    return bool(adapter.facts["base"] == model.model_dump())


def _adapter_name(adapter: Artefact) -> str:
    """Return the name of an adapter: its job's, made unique by the end of the attempt id."""
    end = adapter.attempt_id[-ADAPTER_ID_LENGTH:].lower()
    return f"{served_name(adapter.attempt.job.name)}-{end}"


def _engine_of(text: str) -> EngineName:
    for name in ENGINES:
        if name == text:
            return name
    raise InvalidProblem("engine", f"“Engine” is {text[:20]}; choose {' or '.join(ENGINES)}.")


def serve_spec(
    draft: Draft, model: ModelRef, fields: Mapping[str, Any], wish: EndpointOptions
) -> ServeSpec:
    """Return the endpoint's spec.

    ``fields``: ``name``, ``weight_dtype``, ``positions`` (the model's context length, if known),
    ``max_batch_tokens`` (per step, if planned) and ``engine_options``. The KV cache is sized for
    the planned concurrency, and at least for one request of maximum length. llama.cpp reserves
    the maximum length for every request, so that there the maximum is the planned length.
    """
    values = draft["workload"]["serve"]
    planned = values["input_tokens"] + values["output_tokens"]
    limits: dict[str, int] = {}
    if positions := fields["positions"]:
        room = planned if wish.engine == "llamacpp" else max(planned, ROOM_TOKENS)
        longest = min(int(positions), room)
        together = values["concurrency"] * min(planned, longest)
        limits = {"max_length": longest, "kv_cache_tokens": max(longest, together)}
    if step := fields["max_batch_tokens"]:
        limits["max_batch_tokens"] = int(step)
    return ServeSpec.model_validate(
        {
            "model": model,
            "engine": wish.engine,
            "weight_dtype": fields["weight_dtype"],
            "served_name": served_name(str(fields["name"])),
            "max_concurrency": values["concurrency"],
            **limits,
            "engine_options": fields.get("engine_options"),
            "key_hashes": wish.key_hashes,
            "idle_stop_seconds": wish.idle_stop_seconds,
        }
    )


def served_name(name: str) -> str:
    """Return a model's name in the form that clients use."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/-]+", "-", name).strip("-._:/")[:NAME_LENGTH]
    return cleaned.lower() or "model"
