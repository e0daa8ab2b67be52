"""Engines of a plan: the chosen one, the hosts that can run it, and its options."""

import re
from typing import Any

from planner.catalog.engines import DEFAULT_ENGINE, engines_by_work
from planner.specs.estimate import PlannedStrategy
from planner.specs.workload import Strategy
from runners.engines import ENGINES, Engine
from runners.jobspec.serve import (
    LEAST_MEMORY_RATIO,
    MOST_MEMORY_RATIO,
    ON_GPUS,
    EngineName,
    EngineOptions,
    PhaseSplit,
)
from webapp.hosts.models import Host
from webapp.plans.errors import DraftProblem
from webapp.plans.sharing import TRAININGS, Spread

# The engine that a plan is for: the chosen one, else the usual one of its goal and hardware.


Draft = dict[str, Any]
# The engine of an endpoint -> the planner's.
PLANNED_AS: dict[EngineName, str] = {
    "slipway": DEFAULT_ENGINE,
    "llamacpp": "llama_cpp",
    "vllm": "vllm",
    "sglang": "sglang",
}
OWN_TITLE = "Slipway's own, on PyTorch"
WORD = re.compile(r"\w+")


def engine_choices(goal: str) -> dict[str, str]:
    """Return the titles of the engines that can be chosen for a goal, by key."""
    if goal == "compress":
        return {}
    return engines_by_work(training=goal in TRAININGS) | {DEFAULT_ENGINE: OWN_TITLE}


def chosen_engine(draft: Draft) -> str | None:
    """Return the engine that a draft names, None to leave it to the goal and the hardware.

    An engine that was chosen for another goal does not count.
    """
    chosen = draft["hardware"].get("engine")
    return chosen if chosen in engine_choices(draft["goal"]["goal"]) else None


def engine_words(draft: Draft) -> str:
    """Return for which engine a plan is if one was chosen, "" otherwise."""
    title = engine_choices(draft["goal"]["goal"]).get(chosen_engine(draft) or "")
    return f"Planned for {title}." if title else ""


def engines_named(sentence: str, draft: Draft) -> dict[str, str]:
    """Return the titles of the engines that the remedy at the end of a refusal names, by key."""
    words = WORD.findall(sentence.rpartition(";")[2])
    choices = engine_choices(draft["goal"]["goal"])
    return {key: title for key, title in choices.items() if key in words}


def check_engine(draft: Draft, endpoint: EngineName | None) -> None:
    """Refuse to start a plan on another engine than the one that was chosen for it.

    Raises:
        DraftProblem: with a remedy.
    """
    chosen = chosen_engine(draft)
    if chosen in {None, PLANNED_AS[endpoint or "slipway"]}:
        return
    title = engine_choices(draft["goal"]["goal"])[chosen or ""]
    runs = " or start it as an endpoint of that engine," if chosen in PLANNED_AS.values() else ""
    raise DraftProblem(
        f"This plan is for {title}, which jobs do not start: take its export,{runs} or choose the "
        "engine “Automatic” under hardware.",
        "engine",
    )


ROOM = 1.1
WIDE = ("fp32", "bf16", "fp16")
SPLIT_PHASES = (
    "Prefill and decode on different GPUs run on vLLM alone: it hands the cache of a prompt from "
    "one of its processes to another. Choose vLLM, or leave the split out."
)
SPLIT_CONTEXT = (
    "Engines on GPUs split the context inside their tensor ranks only. Pin context parallel to 1."
)
DRAFT_BY_NAME = (
    "A draft model is planned and exported; an endpoint is not started with one from here, "
    "because the plan names it and no folder of the host. Leave it out."
)


def engines_for(host: Host) -> list[tuple[EngineName, Engine]]:
    """Return the engines that a host can run: GPU engines only if it reports GPUs."""
    has_gpus = bool(host.facts.get("gpus"))
    return [(name, each) for name, each in ENGINES.items() if has_gpus or name not in ON_GPUS]


def check_host(engine: EngineName, host: Host) -> None:
    """Refuse an engine that the host cannot run.

    Raises:
        DraftProblem: names the missing hardware and a remedy.
    """
    if engine not in dict(engines_for(host)):
        raise DraftProblem(
            f"“Engine” is {engine}, which runs on NVIDIA GPUs, and {host.name} reports none. "
            "Choose a host with a GPU, or one of the other engines.",
            "engine",
        )


def spread_on(best: PlannedStrategy, engine: EngineName) -> Spread:
    """Return the number of GPUs on which an engine runs a plan, on one host.

    Raises:
        DraftProblem: the plan needs more than one host has, or the engine cannot split it.
    """
    check_split(engine, best.strategy)
    count, each = options_of(best).num_devices, best.cluster.devices_per_node
    if count > each:
        raise DraftProblem(
            f"This plan takes {count} GPUs, and an engine of its own runs on one host, which has "
            f"{each}. Pin smaller parallel sizes, or choose a larger host.",
            "tensor_parallel_size",
        )
    return Spread(1, count)


def options_of(best: PlannedStrategy) -> EngineOptions:
    """Return a plan's layout and limits as engine options.

    Raises:
        DraftProblem: names an option of the plan that engines are not started with.
    """
    strategy = best.strategy
    _refuse_unsupported(strategy)
    replicas = strategy.attention_data_parallel_size or 1
    tensor = strategy.tensor_parallel_size or 1
    pools = strategy.disaggregated
    copies = 1 if pools else strategy.data_parallel_size or 1  # else one engine per copy
    options = EngineOptions(
        tensor_parallel_size=max(1, tensor // replicas),
        pipeline_parallel_size=strategy.pipeline_parallel_size or 1,
        data_parallel_size=copies * replicas,
        has_expert_parallel=(strategy.expert_parallel_size or 1) > 1 or replicas > 1,
        memory_ratio=_memory_ratio(best),
        kv_cache_dtype="fp8" if strategy.kv_cache_dtype == "fp8" else "auto",
        has_chunked_prefill=strategy.chunked_prefill,
    )
    if pools is None:
        return options
    each = options.devices_each  # an engine is as large as a replica of the plan
    split = PhaseSplit(
        prefill_engines=pools.prefill_devices // each, decode_engines=pools.decode_devices // each
    )
    return options.model_copy(update={"split": split})


def check_split(engine: EngineName, strategy: Strategy) -> None:
    """Refuse a plan with disaggregated prefill for engines that do not support it.

    Raises:
        DraftProblem: with a remedy.
    """
    if strategy.disaggregated is not None and engine != "vllm":
        raise DraftProblem(SPLIT_PHASES, "disaggregated")


def _refuse_unsupported(strategy: Strategy) -> None:
    if (strategy.context_parallel_size or 1) > 1:
        raise DraftProblem(SPLIT_CONTEXT, "context_parallel_size")
    if strategy.speculative is not None:
        raise DraftProblem(DRAFT_BY_NAME, "speculative")
    if strategy.offload_places:
        raise DraftProblem(
            f"This plan has {', '.join(strategy.offload_places)}; endpoints keep everything on "
            "their GPUs. Choose fewer bits, or more GPUs.",
            "weight_dtype",
        )
    if strategy.kv_cache_dtype not in {None, "fp8", *WIDE}:
        raise DraftProblem(
            f"Engines on GPUs keep keys and values in 16 bit or fp8, not in "
            f"{strategy.kv_cache_dtype}. Pin the KV cache to fp8.",
            "kv_cache_dtype",
        )


def _memory_ratio(best: PlannedStrategy) -> float:
    """Return the plan's peak as a share of a GPU: weights, cache, activations, workspace.

    Includes a 10 % margin: an engine with too little memory does not start.
    """
    share = ROOM * best.memory.per_device_peak_bytes / best.memory.capacity_bytes
    return round(min(MOST_MEMORY_RATIO, max(LEAST_MEMORY_RATIO, share)), 3)
