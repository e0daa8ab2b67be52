"""Launches of serving and generation jobs, and their engines."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from planner.cost.parameters import count_parameters
from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.workload import Strategy
from runners.jobspec import (
    DataParallel,
    DemoPrompts,
    FilePrompts,
    GenerateSpec,
    KvCache,
    ModelRef,
    NamedAdapter,
    PromptLookup,
    Prompts,
    RandomModel,
    ServeSpec,
)
from runners.jobspec.compress import QUANTISED_DTYPES
from runners.jobspec.generate import (
    ExpertCache,
    LayerStreaming,
    PipelineSplit,
    PolicyOffload,
    Source,
    StageChain,
)
from runners.jobspec.serve import (
    LEAST_MEMORY_RATIO,
    MOST_MEMORY_RATIO,
    ON_GPUS,
    EngineName,
    EngineOptions,
    PhaseSplit,
)
from runners.launchers.launch import ENGINES, Engine
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem, first_message
from runners.plans.workloads import GenerateWork, ServeWork
from webapp.hosts.models import Host
from webapp.plans.sharing import Spread, split_of

# ---------------------------------------------------------------------------
# Convert the serve goal to an endpoint spec: limits, keys, cache and attention options.
# ---------------------------------------------------------------------------


# Convert a strategy's cache and attention options to those of jobs, or refuse them.
#
# A plan that a job would silently run differently is refused by name, with a remedy.


CACHES: dict[str, KvCache] = {"fp8": "fp8", "int4": "int4"}
WIDE = ("fp32", "bf16", "fp16")


def cache_of(strategy: Strategy, chosen: KvCache) -> KvCache:
    """Return the KV-cache format: of the workload step if set, else of the plan.

    Raises:
        DraftProblem: jobs do not support the format, or step and plan disagree.
    """
    planned = _planned_cache(strategy)
    if chosen == "plain":
        return planned
    if planned in {"plain", chosen}:
        return chosen
    raise DraftProblem(
        f"The KV cache format is {planned} in the plan and {chosen} in the workload step. Set "
        "both to the same format, or set only one of them.",
        "kv_cache",
    )


def _planned_cache(strategy: Strategy) -> KvCache:
    dtype, compute_dtype = strategy.kv_cache_dtype, _compute_dtype(strategy)
    if dtype is None or dtype == compute_dtype:
        return "plain"
    if dtype in CACHES:
        return CACHES[dtype]
    raise DraftProblem(
        f"The planned KV cache dtype is {dtype}, which no job supports; jobs support "
        f"{compute_dtype} or {' or '.join(CACHES)}. Pin the KV cache to one of these.",
        "kv_cache_dtype",
    )


def _compute_dtype(strategy: Strategy) -> str:
    """Return the compute dtype of layers: narrow activations are widened before caching."""
    dtype = strategy.activation_dtype
    return dtype if dtype in WIDE else "bf16"


def check_serving(strategy: Strategy) -> None:
    """Refuse options that neither an endpoint nor its benchmark supports.

    Raises:
        DraftProblem: an option is not supported; the message names it and a remedy.
    """
    own = _compute_dtype(strategy)
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


ROOM_TOKENS = 4096  # maximum request length, if the planned one is shorter
NAME_LENGTH = 100


def serve_spec(
    values: ServeWork,
    model: ModelRef,
    fields: Mapping[str, Any],
    launch: Launch,
    key_hashes: tuple[str, ...] = (),
) -> ServeSpec:
    """Return the endpoint's spec; it holds only hashes of the endpoint's keys.

    ``fields``: ``name``, ``weight_dtype``, ``positions`` (the model's context length, if known),
    ``max_batch_tokens`` (per step, if planned) and ``engine_options``. The KV cache is sized for
    the planned concurrency, and at least for one request of maximum length. llama.cpp reserves
    the maximum length for every request, so that there the maximum is the planned length.
    """
    planned = values.input_tokens + values.output_tokens
    limits: dict[str, int] = {}
    if positions := fields["positions"]:
        room = planned if launch.engine == "llamacpp" else max(planned, ROOM_TOKENS)
        longest = min(int(positions), room)
        together = values.concurrency * min(planned, longest)
        limits = {"max_length": longest, "kv_cache_tokens": max(longest, together)}
    if step := fields["max_batch_tokens"]:
        limits["max_batch_tokens"] = int(step)
    return ServeSpec.model_validate(
        {
            "model": model,
            "engine": launch.engine,
            "weight_dtype": fields["weight_dtype"],
            "served_name": served_name(str(fields["name"])),
            "max_concurrency": values.concurrency,
            **limits,
            "engine_options": fields.get("engine_options"),
            "key_hashes": key_hashes,
            "idle_stop_seconds": launch.idle_stop_seconds,
        }
    )


def served_name(name: str) -> str:
    """Return a model's name in the form that clients use."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/-]+", "-", name).strip("-._:/")[:NAME_LENGTH]
    return cleaned.lower() or "model"


# ---------------------------------------------------------------------------
# Engines of a plan: the chosen one, the hosts that can run it, and its options.
# ---------------------------------------------------------------------------


ROOM = 1.1
SPLIT_PHASES = (
    "Only vLLM supports prefill and decode on different GPUs, because it transfers the KV cache "
    "of a prompt between its processes. Choose the engine vLLM, or plan without separate prefill "
    "devices."
)
SPLIT_CONTEXT = (
    "Engines on GPUs divide the context only over their tensor-parallel ranks. Pin context "
    "parallel to 1."
)
DRAFT_BY_NAME = (
    "The plan names a draft model but no folder with its weights on the host, so an endpoint "
    "cannot start with it. Plan without a draft model and choose a model of your team under "
    "“Speculative decoding”, or download the plan's export."
)


def engines_for(host: Host) -> list[tuple[EngineName, Engine]]:
    """Return the engines that a host can run: GPU engines only if it reports GPUs."""
    has_gpus = bool(host.facts.get("gpus"))
    return [(name, each) for name, each in ENGINES.items() if has_gpus or name not in ON_GPUS]


def check_host(engine: EngineName, host: Host) -> None:
    """Refuse an engine that the host cannot run.

    Raises:
        DraftProblem: the host has no GPU for the engine; the message names a remedy.
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
        DraftProblem: the engine cannot run the plan's phase split; the message names a remedy.
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
    share = ROOM * best.memory.per_device_peak_bytes / best.memory.capacity_bytes
    return round(min(MOST_MEMORY_RATIO, max(LEAST_MEMORY_RATIO, share)), 3)


# ---------------------------------------------------------------------------
# Convert the batch-generate goal to a job spec: prompts, batches, offload, split.
# ---------------------------------------------------------------------------


Away = LayerStreaming | ExpertCache | PolicyOffload
SHARES = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk", "activations_cpu")
GROUP_SIZE = 64  # FlexGen's value
ROUNDING = 1e-9  # tolerance for products such as 8 layers * (1 - 0.25)


def generate_spec(
    values: GenerateWork,
    model: ModelRef,
    weight_dtype: str,
    strategy: Strategy,
    offload: Away | None = None,
) -> GenerateSpec:
    """Return the job spec of a batch generation.

    Raises:
        DraftProblem: a prompts file for a model without weights on the host; streamed layers
            without a folder or with quantised weights; a split model without a folder; or
            incompatible options.
    """
    if offload is not None:
        _check_streamable(model, weight_dtype, offload)
    split = split_of(strategy)
    if split is not None and isinstance(model, RandomModel):
        raise DraftProblem(
            "This plan divides the model between devices, each of which reads its part, and this "
            "model has no weights on the host. Choose a model with weights on the host.",
            "source",
        )
    path = values.prompts_path
    if path and isinstance(model, RandomModel):
        raise DraftProblem(
            "A prompts file needs trained weights, and this model has none on the host. Remove "
            "the prompts file, or choose a model with weights on the host.",
            "prompts_path",
        )
    return _validated(
        {
            "model": model,
            "prompts": prompts_of(values),
            "weight_dtype": weight_dtype,
            "batch_size": values.batch_size,
            "output_tokens": values.output_tokens,
            "stop_at_end": bool(path),
            "batching": values.batching,
            "kv_cache": cache_of(strategy, values.kv_cache),
            "attention": strategy.attention or "flash",
            "compiled_step": values.compiled_step,
            "speculation": PromptLookup() if values.speculation else None,
            "offload": offload,
            "split": split,
        }
    )


def _validated(fields: dict[str, Any]) -> GenerateSpec:
    """Return the validated spec; incompatible options raise a DraftProblem."""
    try:
        return GenerateSpec.model_validate(fields)
    except ValidationError as error:
        message = f"The chosen options are incompatible: {first_message(error)}."
        raise DraftProblem(message, "batching") from error


ALL_ADAPTERS = "all"


def with_adapters(spec: GenerateSpec, known: Sequence[NamedAdapter], chosen: str) -> GenerateSpec:
    """Return a job with the chosen adapter: one by name, all, or none for "".

    Raises:
        DraftProblem: the model has no adapter of that name, or the adapter is incompatible.
    """
    if not chosen:
        return spec
    adapters = [each for each in known if chosen in {ALL_ADAPTERS, each.name}]
    if not adapters:
        names = ", ".join(each.name for each in known) or "none"
        raise DraftProblem(
            f"No adapter {chosen[:120]} was trained on this model by your team; available: "
            f"{names}.",
            "adapter",
        )
    return _validated(spec.model_dump() | {"adapters": adapters})


def offload_of(strategy: Strategy, shape: ModelSpec) -> Away | None:
    """Return the job's offload of a plan, None if everything stays on the device.

    The planner's fraction is of the layers' bytes. For weights alone, whole layers stay resident,
    so that no more memory is used than planned; with cache, activations, micro-batches or 4-bit
    weights the job applies the full policy. For a mixture of experts only experts are offloaded.

    Raises:
        DraftProblem: more of a mixture of experts is offloaded than its experts.
    """
    offload = strategy.offload
    if offload is None or not strategy.offload_places:
        return None
    share = min(1.0, offload.weights_cpu + offload.weights_disk)
    place: Source = "disk" if offload.weights_disk > 0 else "host_memory"
    is_plain = is_weights_only(strategy)
    if shape.num_experts and not is_plain:
        raise DraftProblem(
            f"This plan has {', '.join(offload.places)}: for a mixture of experts, jobs offload "
            "only experts. Choose fewer bits, a smaller batch or a smaller model.",
            "weight_dtype",
        )
    if shape.num_experts:
        return _expert_cache(shape, share, place)
    if not is_plain or strategy.micro_batch_size or strategy.weight_dtype == "int4":
        return PolicyOffload(
            **{name: getattr(offload, name) for name in SHARES},
            micro_batch_size=strategy.micro_batch_size,
            group_size=strategy.group_size or GROUP_SIZE,
        )
    layers = shape.num_hidden_layers
    stays = int(layers * (1.0 - share) + ROUNDING)
    in_host = int(layers * offload.weights_cpu + ROUNDING) if place == "disk" else 0
    return LayerStreaming(layers_resident=stays, layers_in_host=in_host, layers_from=place)


def _expert_cache(shape: ModelSpec, share: float, place: Source) -> ExpertCache:
    """Return an expert cache within the planned memory, including room for guessed experts."""
    counts = count_parameters(shape)
    offloaded = share * counts.layer_linear / counts.experts
    num_layers, visited = shape.num_moe_layers, shape.num_experts_per_tok
    room = int(num_layers * shape.num_experts * (1.0 - offloaded) + ROUNDING)
    guesses = visited if room >= num_layers + visited else 0
    if room < num_layers:
        raise DraftProblem(
            "This plan keeps less than one expert of each layer on the device. Jobs keep at least "
            "one: allow more of the device's memory, fewer bits, or a smaller batch.",
            "weight_dtype",
        )
    resident = (room - guesses) // num_layers
    return ExpertCache(experts_resident=resident, experts_from=place, guessed_experts=guesses)


def with_chained_stages(spec: GenerateSpec, policy: DataParallel) -> GenerateSpec:
    """Return a job that survives a lost host by running its pipeline stages as a chain."""
    if policy.on_lost_rank != "shrink" or not isinstance(spec.split, PipelineSplit):
        return spec
    chain = StageChain(stages=spec.split.size)
    return spec.model_copy(update={"split": chain, "parallel": policy})


def is_weights_only(strategy: Strategy) -> bool:
    """Return whether only weights are offloaded."""
    offload = strategy.offload
    if offload is None:
        return True
    weights = offload.model_copy(update={"weights_cpu": 0.0, "weights_disk": 0.0})
    return not weights.places


def _check_streamable(model: ModelRef, weight_dtype: str, offload: Away) -> None:
    if isinstance(model, RandomModel):
        raise DraftProblem(
            "This plan streams layers to the device in every pass, and this model has no weights "
            "on the host. Choose a model with weights on the host.",
            "source",
        )
    packs = isinstance(offload, PolicyOffload) and weight_dtype == "int4"
    if weight_dtype in QUANTISED_DTYPES and not packs:
        raise DraftProblem(
            f"This plan streams {weight_dtype} layers in every pass; jobs stream only fp32, "
            "bf16, fp16 and, of dense models, int4 layers. Pin the weights to one of these, or "
            "choose a smaller batch.",
            "weight_dtype",
        )


def prompts_of(values: GenerateWork) -> Prompts:
    """Return the prompts file of a generation, else a batch of the host's own text."""
    if values.prompts_path:
        return FilePrompts(path=values.prompts_path)
    return DemoPrompts(count=values.batch_size, input_tokens=values.input_tokens)
