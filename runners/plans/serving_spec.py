"""The specs of a plan to serve: its endpoint on one of the engines, and its benchmark."""

import re
from collections.abc import Collection, Mapping
from math import ceil

from planner.exports.llama_cpp import CACHE_TYPES
from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from runners.jobspec import BenchmarkSpec, ServeSpec
from runners.jobspec.engine_args import EngineArgsError, check_engine_args
from runners.jobspec.engines import (
    ENGINES,
    OWN,
    Engine,
    EngineName,
    has_feature,
    names,
    running_on,
    titles,
    with_feature,
)
from runners.jobspec.serve import (
    LEAST_MEMORY_RATIO,
    MOST_MEMORY_RATIO,
    EndpointSettings,
    EngineOptions,
    PhaseSplit,
)
from runners.plans.launch import Launch
from runners.plans.launch_case import LaunchCase
from runners.plans.load_levels import PlannedLoad, load_options
from runners.plans.model_checks import needs_weights
from runners.plans.refusals import DraftProblem, validated
from runners.plans.speculative_decoding import (
    DRAFT_OR_SPLIT,
    draft_by_name,
    with_engine_draft,
)
from runners.plans.spread import Spread, is_on_processor
from runners.plans.strategy_checks import (
    RUNNABLE_DTYPES,
    WIDE,
    compute_dtype,
    refuse_offloaded,
    runnable_dtype,
)
from runners.plans.workloads import ServeWork

LEAST_LENGTH_TOKENS = 4096  # of the longest request, if the planned one is shorter
NAME_LENGTH = 100
MEMORY_MARGIN = 1.1  # over the plan's peak
CPU_BLOCK_TOKENS = 128  # of vLLM's KV cache on processors (vllm/platforms/cpu.py, 0.32)
SPLIT_PHASES = (
    "Prefill and decode on different GPUs need an engine that transfers the KV cache of a prompt "
    f"between its processes. Choose the engine {titles(with_feature('disaggregation'), 'or')}, or "
    "plan without separate prefill devices."
)
SPLIT_CONTEXT = (
    "Engines on GPUs divide the context only over their tensor-parallel ranks. Pin context "
    "parallel to 1."
)


def benchmark_spec(
    values: ServeWork, launch: Launch, case: LaunchCase, targets: Mapping[str, float]
) -> BenchmarkSpec:
    """Return the benchmark of a plan to serve on Slipway's engine, or its load test.

    ``targets``: the longest seconds of the plan's latencies, which a search for the highest load
    meets.

    Raises:
        DraftProblem: Slipway's engine does not run the plan.
        LaunchOptionError: the load levels of a load test are invalid.
    """
    _check_own_engine(case.best)
    dtype = runnable_dtype(case.best)
    is_load = launch.run == "load"
    if is_load:
        needs_weights(case.model, "Load on an endpoint")
    return BenchmarkSpec(
        model=case.model,
        weight_dtype=dtype,
        batch_size=values.concurrency,
        prompt_tokens=values.input_tokens,
        output_tokens=values.output_tokens,
        load=load_options(launch, _planned_load(values, case.best, targets)),
        max_batch_tokens=(case.best.strategy.max_batch_tokens or None) if is_load else None,
        profile=launch.profile and launch.run == "job",
    )


def _planned_load(
    values: ServeWork, best: PlannedStrategy, targets: Mapping[str, float]
) -> PlannedLoad:
    """Return where a search for the highest load begins, and the targets that are measured."""
    said = best.performance
    has_gaps = values.output_tokens > 1  # without one there is no time per token
    measured = {
        name: limit for name, limit in targets.items() if has_gaps or not name.startswith("tpot")
    }
    return PlannedLoad(
        targets=measured,
        concurrency=values.concurrency,
        max_concurrency=said.max_concurrency or 0,
        requests_per_second=(said.tokens_per_second or 0.0) / values.output_tokens,
    )


def endpoint_spec(values: ServeWork, launch: Launch, case: LaunchCase) -> ServeSpec:
    """Return the endpoint of a plan to serve; it holds only hashes of the endpoint's keys.

    Raises:
        DraftProblem: the engine does not run the plan or support an option, or the model has no
            weights for it.
    """
    best, has_layout = case.best, has_feature(launch.engine, "parallel_sizes")
    cache = _cache_type(launch, best.strategy)
    if not has_layout:
        _check_own_engine(best, has_cache=bool(cache))
    dtype = _endpoint_dtype(case, launch.engine)
    needs_weights(case.model, "An endpoint")
    if needs_gguf(launch.engine) and case.lacks_gguf:
        raise DraftProblem(
            f"“Engine” is {launch.engine}, which serves GGUF files, and the model has none. "
            "Compress the model with the method GGUF and serve what that makes, or choose "
            "another engine.",
            "engine",
        )
    step = best.strategy.max_batch_tokens
    endpoint = validated(
        ServeSpec,
        {
            "model": case.model,
            **launch.fields_of(EndpointSettings),
            "weight_dtype": dtype,
            "served_name": served_name(case.model_name),
            "max_concurrency": values.concurrency,
            **_lengths(values, launch.engine, case.shape),
            **({"max_batch_tokens": step} if step else {}),
            "adapters": case.adapters if launch.adapters else (),
            "engine_options": options_of(best) if has_layout else None,
            "key_hashes": case.key_hashes,
            "engine_args": (*_checked_args(launch), *_cache_args(launch, cache)),
        },
        "The endpoint cannot be started as chosen",
        "engine",
    )
    endpoint = with_planned_cache(endpoint, values, best)
    endpoint = with_engine_draft(endpoint, case.draft_models, launch.draft_model)
    return with_prefix_caching(endpoint, launch.prefix_caching)


def _cache_type(launch: Launch, strategy: Strategy) -> str:
    """Return llama.cpp's type for a plan's quantised KV cache, "" for any other cache."""
    stored = CACHE_TYPES.get(strategy.kv_cache_dtype or "", "")
    return stored if needs_gguf(launch.engine) and stored.startswith("q") else ""


def _cache_args(launch: Launch, stored: str) -> tuple[str, ...]:
    """Return the arguments for a quantised KV cache, unless the launch states its own.

    Quantised values need flash attention.
    """
    own = ("-ctk", "-ctv", "--cache-type")
    if not stored or any(each.startswith(own) for each in launch.engine_args):
        return ()
    has_flash = any(each in {"-fa", "--flash-attn"} for each in launch.engine_args)
    flash = () if has_flash else ("--flash-attn", "on")
    return ("--cache-type-k", stored, "--cache-type-v", stored, *flash)


def _checked_args(launch: Launch) -> tuple[str, ...]:
    """Return the further arguments of the engine.

    Raises:
        DraftProblem: the engine's release does not know one, or a launch cannot have it.
    """
    try:
        check_engine_args(launch.engine, launch.engine_args)
    except EngineArgsError as error:
        raise DraftProblem(f"“Further engine arguments”: {error}.", "engine_args") from error
    return tuple(launch.engine_args)


def _endpoint_dtype(case: LaunchCase, engine: EngineName) -> str:
    """Return the dtype in which an engine is to load weights.

    Formats that only files have, such as the MXFP4 of gpt-oss, are loaded as they are stored by
    engines that run other programs; those compute in bf16.

    Raises:
        DraftProblem: the engine does not load weights of the planned dtype.
    """
    planned, stored = case.best.strategy.weight_dtype, case.shape and case.shape.weight_dtype
    is_as_stored = needs_gguf(engine) or (engine != OWN and planned == stored)
    if planned not in {None, *RUNNABLE_DTYPES} and is_as_stored:
        return "bf16"
    return runnable_dtype(case.best)


def needs_gguf(engine: EngineName) -> bool:
    """Return whether an engine serves GGUF files alone."""
    return ENGINES[engine].weights == {"gguf"}


def _check_own_engine(best: PlannedStrategy, *, has_cache: bool = False) -> None:
    """Refuse what neither Slipway's engine nor llama.cpp runs of a plan.

    ``has_cache``: the engine stores the plan's KV cache in fewer bits.
    """
    refuse_offloaded(best)
    check_split(OWN, best.strategy)
    unset = {"kv_cache_dtype": None} if has_cache else {}
    check_serving(best.strategy.model_copy(update=unset))


def _lengths(values: ServeWork, engine: EngineName, shape: ModelSpec | None) -> dict[str, int]:
    """Return the longest request and the KV cache, in tokens; none without a known context.

    The cache is sized for the planned concurrency, and at least for one request of maximum
    length. Where the engine reserves the maximum length for every request, the maximum is the
    planned length.
    """
    positions = shape.max_position_embeddings if shape else None
    if not positions:
        return {}
    planned = values.input_tokens + values.output_tokens
    reserves = ENGINES[engine].reserves_longest
    longest = min(int(positions), planned if reserves else max(planned, LEAST_LENGTH_TOKENS))
    together = values.concurrency * min(planned, longest)
    return {"max_length": longest, "kv_cache_tokens": max(longest, together)}


def served_name(name: str) -> str:
    """Return a model's name in the form that clients use."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/-]+", "-", name).strip("-._:/")[:NAME_LENGTH]
    return cleaned.lower() or "model"


def check_serving(strategy: Strategy) -> None:
    """Refuse options that neither an endpoint nor its benchmark supports.

    Raises:
        DraftProblem: an option is not supported; the message names it and a remedy.
    """
    own = compute_dtype(strategy)
    if strategy.kv_cache_dtype not in {None, own}:
        raise DraftProblem(
            f"The planned KV cache dtype is {strategy.kv_cache_dtype}, which endpoints do not "
            f"support; they use {own}. Pin the KV cache to {own}, or choose the goal “Generate in "
            "batch”.",
            "kv_cache_dtype",
        )
    if strategy.speculative is not None:
        raise DraftProblem(
            f"The plan has the draft model {strategy.speculative.draft_model}, and endpoints of "
            "this engine do not support speculative decoding yet. Plan without a draft model, or "
            "choose the goal “Generate in batch”.",
            "speculative",
        )
    if strategy.attention == "eager":
        raise DraftProblem(
            "The pinned attention kernel is “eager”, which endpoints do not support; they use "
            "fused kernels. Remove the pin of the attention kernel.",
            "attention",
        )


def engines_on(best: PlannedStrategy, gpu_vendors: Collection[str]) -> tuple[Engine, ...]:
    """Return the engines that can start a plan on a host with GPUs of these vendors.

    An engine that takes the plan's layout starts it on the planned kind of device alone.
    """
    layout_kinds = ("cpu",) if is_on_processor(best) else tuple(gpu_vendors)
    with_layout = with_feature("parallel_sizes")
    return tuple(
        each
        for each in running_on("cpu", *gpu_vendors)
        if each not in with_layout or each in running_on(*layout_kinds)
    )


def check_host(engine: EngineName, case: LaunchCase) -> None:
    """Refuse an engine that the host cannot run.

    Raises:
        DraftProblem: the host has no device of the plan for the engine; the message names a
            remedy.
    """
    row = ENGINES[engine]
    if row in running_on("cpu", *case.gpu_vendors) and row not in engines_on(
        case.best, case.gpu_vendors
    ):
        planned = "its processors" if is_on_processor(case.best) else "GPUs that are none of those"
        raise DraftProblem(
            f"“Engine” is {engine}, which runs on {row.device_words}, and this plan is for "
            f"{case.host_name} with {planned}. Plan for other hardware of the host, or choose one "
            "of the other engines.",
            "engine",
        )
    if row not in running_on("cpu", *case.gpu_vendors):
        raise DraftProblem(
            f"“Engine” is {engine}, which runs on {row.device_words}, and {case.host_name} "
            "reports none. Choose a host with a GPU, or one of the other engines.",
            "engine",
        )


def engine_spread(best: PlannedStrategy, engine: EngineName) -> Spread:
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
    """Return a plan's layout and limits as engine options; ``with_planned_cache`` adds a cache's.

    Raises:
        DraftProblem: an engine cannot be started with an option of the plan, which the message
            names.
    """
    strategy = best.strategy
    _refuse_unsupported(strategy)
    replicas = strategy.attention_data_parallel_size or 1
    tensor = strategy.tensor_parallel_size or 1
    pools = strategy.disaggregated
    copies = 1 if pools else strategy.data_parallel_size or 1  # else one engine per copy
    options = EngineOptions(
        device="cpu" if is_on_processor(best) else "gpu",
        tensor_parallel_size=max(1, tensor // replicas),
        pipeline_parallel_size=strategy.pipeline_parallel_size or 1,
        data_parallel_size=copies * replicas,
        has_expert_parallel=(strategy.expert_parallel_size or 1) > 1 or replicas > 1,
        memory_ratio=_memory_ratio(best),
        kv_cache_dtype="fp8" if strategy.kv_cache_dtype == "fp8" else "auto",
        has_chunked_prefill=strategy.chunked_prefill,
        draft=draft_by_name(strategy),
    )
    if pools is None:
        return options
    if options.draft is not None:
        raise DraftProblem(DRAFT_OR_SPLIT, "speculative")
    each = options.devices_each  # an engine is as large as a replica of the plan
    split = PhaseSplit(
        prefill_engines=pools.prefill_devices // each, decode_engines=pools.decode_devices // each
    )
    return options.model_copy(update={"split": split})


def check_split(engine: EngineName, strategy: Strategy) -> None:
    """Refuse a plan with disaggregated prefill for engines that do not support it.

    Raises:
        DraftProblem: the engine cannot run the plan's phase split; the message names a remedy.
    """
    if strategy.disaggregated is not None and not has_feature(engine, "disaggregation"):
        raise DraftProblem(SPLIT_PHASES, "disaggregated")


def _refuse_unsupported(strategy: Strategy) -> None:
    if (strategy.context_parallel_size or 1) > 1:
        raise DraftProblem(SPLIT_CONTEXT, "context_parallel_size")
    if strategy.offload_places:
        raise DraftProblem(
            f"This plan has {', '.join(strategy.offload_places)}; endpoints support no offload. "
            "Choose fewer bits, or more GPUs.",
            "weight_dtype",
        )
    if strategy.kv_cache_dtype not in {None, "fp8", *WIDE}:
        raise DraftProblem(
            "Engines on GPUs support a KV cache in 16 bit or fp8, not in "
            f"{strategy.kv_cache_dtype}. Pin the KV cache to fp8.",
            "kv_cache_dtype",
        )


def _memory_ratio(best: PlannedStrategy) -> float:
    """Return the plan's peak as a fraction of a GPU's memory.

    Includes a 10 % margin: an engine with too little memory does not start.
    """
    share = MEMORY_MARGIN * best.memory.per_device_peak_bytes / best.memory.capacity_bytes
    return round(min(MOST_MEMORY_RATIO, max(LEAST_MEMORY_RATIO, share)), 3)


def with_planned_cache(spec: ServeSpec, values: ServeWork, best: PlannedStrategy) -> ServeSpec:
    """Return an endpoint on processors with the KV cache of its plan, in bytes.

    A share of the memory, as on GPUs, would give the engine whatever other processes of the host
    leave of it. The blocks are vLLM's, rounded up for each request, and one that it never uses.
    """
    options, longest = spec.engine_options, spec.max_length
    planned_bytes = best.memory.breakdown_bytes.get("kv_cache", 0)
    if options is None or options.device != "cpu" or not longest or not planned_bytes:
        return spec
    planned = min(longest, values.input_tokens + values.output_tokens)
    each, most = ceil(planned / CPU_BLOCK_TOKENS), ceil(longest / CPU_BLOCK_TOKENS)
    blocks = 1 + max(most, values.concurrency * each)
    per_token = planned_bytes / (values.concurrency * planned)
    sizes = {"memory_ratio": None, "kv_cache_bytes": ceil(blocks * CPU_BLOCK_TOKENS * per_token)}
    return spec.model_copy(update={"engine_options": options.model_copy(update=sizes)})


def with_prefix_caching(spec: ServeSpec, chosen: bool | None) -> ServeSpec:  # noqa: FBT001
    """Return an endpoint with prefix caching as chosen; None leaves it to the engine.

    Raises:
        DraftProblem: the engine has no such option; the sentence names the engines that have it.
    """
    if chosen is None:
        return spec
    if not has_feature(spec.engine, "prefix_caching"):
        row, others = ENGINES[spec.engine], names(with_feature("prefix_caching"), "or")
        raise DraftProblem(
            f"“Prefix caching” is {'yes' if chosen else 'no'}, and {row.title} "
            f"{row.prompt_reuse}. Choose “Engine default”, or {others}.",
            "prefix_caching",
        )
    options = (spec.engine_options or EngineOptions()).model_copy(
        update={"has_prefix_cache": chosen}
    )
    return spec.model_copy(update={"engine_options": options})
