"""Inference memory per device: weights, KV cache, working set, graphs and runtime overhead."""

from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from planner.catalog.devices import unified_memory
from planner.cost.communication import StageShare
from planner.cost.kv_cache import (
    block_bytes,
    cache_bytes,
    cached_tokens_by_layer_group,
    page_pool,
    pooled_cache_bytes,
    step_tokens_outside_window,
)
from planner.cost.memory import MemoryUse, StageMemory, fullest_of
from planner.cost.quantity import (
    Ledger,
    NullLedger,
    PerLayerGroup,
    Quantity,
    any_of,
    ceil,
    is_column,
    largest,
    maximum,
    minimum,
    where,
)
from planner.cost.training import (
    FP32_BYTES,
    captured_graph_bytes,
    fused_experts_elements,
    inference_activation_bytes,
    inference_elements,
    rotary_table_bytes,
    score_bytes,
    split_workspace_bytes,
)
from planner.cost.weights import (
    WIDE,
    WeightFormat,
    element_bytes,
    key_value_share,
    linear_bytes,
    linear_parameters_per_rank,
    weight_bytes,
)
from planner.specs.model import AttentionLayers, ModelSpec
from planner.specs.units import GIB
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.offloading import (
    DISK,
    HOST,
    double_buffer,
    offloaded_bytes,
    waiting_bytes,
)
from planner.workload.setting import Setting

# The workspace of SGLang's attention kernels on AMD, sized by the cache that it serves.
#
# Source: sgl-project/sglang, python/sglang/srt/layers/attention/aiter_backend.py (AITER, the
# default on CDNA 3 and 4) and model_executor/model_runner.py: requests are 512 times the contexts
# that the cache holds, 2,048 to 4,096 of them. Latents and sliding windows take other kernels.
# Pull request 18263 of sglang measured 51.75 GiB.


DEFAULT_CONTEXT_MULTIPLE = 4  # default longest request, as a multiple of the typical one
REQUESTS_PER_CONTEXT, MIN_REQUESTS, MAX_REQUESTS = 512, 2048.0, 4096.0
AITER_CHIPS = "mi3"  # CDNA 3 and 4


def longest_request(model: ModelSpec, workload: ServeWorkload) -> int:
    """Return the context that the engine is started with: the stated one, or a multiple."""
    typical = workload.input_tokens + workload.output_tokens
    return workload.max_request_tokens or min(
        DEFAULT_CONTEXT_MULTIPLE * typical, model.max_position_embeddings
    )


def attention_workspace(
    setting: Setting, ledger: Ledger, free_bytes: Quantity, bytes_per_token: Quantity
) -> float:
    """Return the bytes of the split workspace, which shares ``free_bytes`` with the cache."""
    size, workload, model = setting.engine.attention_partition, setting.workload, setting.model
    if not size or not isinstance(workload, ServeWorkload):
        return 0.0
    if not setting.device.id.startswith(AITER_CHIPS) or not _is_split(model):
        return 0.0
    context = longest_request(model, workload)
    requests_per_token = REQUESTS_PER_CONTEXT / context
    heads = model.num_attention_heads / setting.layout.tensor
    partitions = float(-(-context // size))
    each = split_workspace_bytes(
        num_requests=1.0, num_heads=heads, num_partitions=partitions, head_dim=model.head_dim
    )
    tokens = maximum(0.0, free_bytes) / (bytes_per_token + requests_per_token * each)
    requests = minimum(MAX_REQUESTS, maximum(MIN_REQUESTS, requests_per_token * tokens))
    if workload.concurrency is not None:
        ranks = setting.layout.data * setting.layout.attention_data
        requests = minimum(requests, maximum(1.0, workload.concurrency / ranks))
    return ledger.term(
        split_workspace_bytes,
        setting.line("memory", "Attention workspace", key="buffers"),
        num_requests=requests,
        num_heads=heads,
        num_partitions=partitions,
        head_dim=model.head_dim,
    )


def _is_split(model: ModelSpec) -> bool:
    """Return whether decode attention is split over partitions of the context."""
    groups = [g for g in model.layers_by_attention if isinstance(g, AttentionLayers)]
    return bool(groups) and not any(group.window for group in groups)


# The step whose memory an engine sets aside: the current one, or the largest it may run.


# vLLM, vllm/engine/arg_utils.py (get_batch_defaults).
LARGE_MEMORY_BYTES, SMALL_STEP_CHIPS = 70 * GIB, frozenset({"a100"})


class StepSizes(NamedTuple):
    """The sizes of a step: tokens, sampled tokens, logits of a sampled token."""

    tokens: float
    sampled: float
    vocabulary: float
    bytes_per_logit: float
    experts_elements: float = 0.0


def largest_step(setting: Setting, tokens: float, sampled: float) -> StepSizes:
    """Return the step that memory is set aside for, at least one of these tokens.

    An engine that profiles a start runs as many tokens and requests as it may take at once. Its
    sampler has the whole vocabulary on each tensor rank.
    """
    model, layout, engine = setting.model, setting.layout, setting.engine
    wide = setting.activation_element_bytes + FP32_BYTES
    if not engine.reserves_largest_step:
        return StepSizes(tokens, sampled, model.vocab_size / layout.tensor, wide)
    tokens = maximum(tokens, layout.batch_tokens)
    return StepSizes(
        tokens,
        maximum(sampled, minimum(tokens, reserved_requests(setting))),
        model.vocab_size,
        engine.bytes_per_logit or wide,
        fused_experts_elements(model, layout.expert_group / layout.expert),
    )


def default_requests(setting: Setting) -> int:
    """Return the most requests of a rank that the engine takes unless told otherwise."""
    device = setting.device
    is_large = device.memory_bytes >= LARGE_MEMORY_BYTES
    is_large = is_large and device.id.split("-")[0] not in SMALL_STEP_CHIPS
    return setting.engine.default_max_requests[is_large]


def reserved_requests(setting: Setting) -> float:
    """Return the most requests of a rank: as many as are stated, else the engine's default."""
    workload, layout = setting.workload, setting.layout
    default = float(default_requests(setting))
    if isinstance(workload, ServeWorkload):
        stated = workload.concurrency
    else:
        stated = getattr(workload, "batch_size", None)
    if stated is None:
        return default
    return minimum(default, ceil(stated / (layout.data * layout.attention_data)))


# CUDA graphs that an engine captures at its start, inside its share of memory or beside it.


SMALL_SIZES, STEP, COARSE_STEP = 3, 8, 16
# vllm/distributed/device_communicators/custom_all_reduce.py: not for more than two cards on PCIe.
MOST_ON_PCIE = 2


def graph_bytes(setting: Setting, ledger: Ledger, layers: Quantity) -> float:
    """Return the bytes of the captured graphs of a stage's layers on one device."""
    graphs, device = setting.engine.graphs, setting.device
    if graphs is None or device.kind != "gpu" or not isinstance(setting.workload, ServeWorkload):
        return 0.0
    requests = reserved_requests(setting)
    # Piecewise graphs reach twice the requests, those of decode steps the requests alone.
    sizes = _num_captured_sizes(minimum(2 * requests, graphs.most_tokens), graphs.coarse_from)
    if graphs.modes > 1:
        sizes = sizes + _num_captured_sizes(
            minimum(requests, graphs.most_tokens), graphs.coarse_from
        )
    each = graphs.bytes_per_layer
    if graphs.collective_bytes_per_layer and (device.link or "PCIe").startswith("PCIe"):
        by_nccl = setting.layout.tensor > MOST_ON_PCIE
        each = where(by_nccl, graphs.collective_bytes_per_layer, each)
    return ledger.term(
        captured_graph_bytes,
        setting.line("memory", "CUDA graphs", key="buffers"),
        num_graphs=sizes,
        num_layers=layers,
        bytes_per_layer=each,
    )


def graph_bytes_outside_budget(setting: Setting) -> float:
    """Return the bytes of the graphs of the largest stage that lie outside the share of memory."""
    graphs = setting.engine.graphs
    if graphs is None or graphs.in_budget:
        return 0.0
    layers = largest(stage.layers for stage in setting.shares)
    return graph_bytes(setting, NullLedger(), layers)


def _num_captured_sizes(most: Quantity, coarse_from: int) -> Quantity:
    """Return the number of captured sizes up to ``most`` tokens.

    >>> tuple(_num_captured_sizes(*each) for each in ((256, 1024), (512, 1024), (512, 256)))
    (35.0, 67.0, 51.0)
    """
    fine, coarse = minimum(most, coarse_from), maximum(0.0, most - coarse_from)
    return SMALL_SIZES + fine / STEP + coarse / COARSE_STEP


GROUP = "memory"
PCIE = "PCIe"


@dataclass(frozen=True)
class MemoryLoad:
    """The load of one attention rank: its sequences, their length and its largest step.

    Context parallelism splits the tokens of a sequence further. ``waiting_tokens`` are those of
    other micro-batches whose residual streams are in memory. ``prompt_tokens`` is the initial
    length of a growing KV cache; if None, the whole cache is allocated at the start.
    """

    sequences: float
    tokens_per_sequence: float
    step_tokens: float
    sampled_tokens: float
    paged: bool
    shared_tokens: float = 0.0
    waiting_tokens: float = 0.0
    prompt_tokens: float | None = None

    @property
    def prompt(self) -> "MemoryLoad":
        """Return the load during prefill."""
        read = self.tokens_per_sequence if self.prompt_tokens is None else self.prompt_tokens
        return replace(self, tokens_per_sequence=read)


def usable_bytes(setting: Setting) -> float:
    """Return the bytes of a device's memory that the engine may use."""
    engine, given = setting.engine, setting.strategy.gpu_memory_utilization
    visible, most = _limits(setting)
    if given is None or engine.memory_share_of == "device":
        share = engine.memory_utilisation if given is None else given
        return minimum(most, visible * share + graph_bytes_outside_budget(setting))
    weights, working = _without_cache(setting)
    if engine.memory_share_of == "weights_and_cache":
        return minimum(most, visible * given + working)
    loaded = weights + working
    return minimum(most, loaded + given * maximum(0.0, visible - loaded))


def _limits(setting: Setting) -> tuple[float, float]:
    """Return the bytes that an engine sees of the device's memory, and the most usable."""
    device, share = setting.device, setting.device.usable_memory_ratio
    unified = unified_memory(device)
    if share is None and unified is not None:
        return unified.visible_bytes, unified.usable_bytes
    if share is None:
        share = setting.engine.usable_memory_ratio
    return device.memory_bytes, device.memory_bytes * share


def _without_cache(setting: Setting) -> tuple[float, float]:
    """Return the weights, and the other bytes without a cache, of the fullest stage."""
    workload, budget = setting.workload, setting.layout.batch_tokens
    prompt = float(getattr(workload, "input_tokens", 1))
    load = MemoryLoad(0.0, 0.0, where(budget > 0, budget, prompt), 1.0, paged=True)
    stages = [_stage(setting, NullLedger(), load, share) for share in setting.shares]
    fullest = fullest_of(stages)
    weights = fullest.by_class["weights"]
    return weights, fullest.peak_bytes - weights


def stage_limits(setting: Setting) -> tuple[tuple[int, float], ...]:
    """Return the capacity and usable bytes of each stage; empty if all devices are equal."""
    stages = (replace(setting, device=place.device) for place in setting.places)
    return tuple(
        (stage.device.memory_bytes, usable_bytes(stage) - _uncounted_overhead(stage))
        for stage in stages
    )


def inference_memory(setting: Setting, ledger: Ledger, load: MemoryLoad) -> MemoryUse:
    """Return the memory of every pipeline stage; the ledger records the fullest one.

    Without a record, identical stages appear once.
    """
    shares = setting.shares
    stages = _unrecorded_stages(setting, load, shares, every=ledger.records)
    limits = stage_limits(setting)
    if ledger.records:
        usable_by_stage = [usable for _, usable in limits] or [1.0] * len(shares)
        fullest = max(
            range(len(shares)), key=lambda at: stages[at].peak_bytes / usable_by_stage[at]
        )
        stages[fullest] = _stage(setting, ledger, load, shares[fullest])
    return MemoryUse(
        stages=tuple(stages),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting) - _uncounted_overhead(setting),
        host_bytes=_offloaded_bytes(setting, load, HOST),
        disk_bytes=_offloaded_bytes(setting, load, DISK),
        limits=limits,
    )


def _unrecorded_stages(
    setting: Setting, load: MemoryLoad, shares: tuple[StageShare, ...], *, every: bool
) -> list[StageMemory]:
    """Return the memory of each stage, or of each distinct stage unless ``every``."""
    if setting.places or is_column(setting.layout.pipeline):
        return [_stage(setting, NullLedger(), load, share) for share in shares]
    costed = {share: _stage(setting, NullLedger(), load, share) for share in dict.fromkeys(shares)}
    return [costed[share] for share in (shares if every else costed)]


def _offloaded_bytes(setting: Setting, load: MemoryLoad, shares: tuple[str, ...]) -> float:
    return offloaded_bytes(
        setting,
        shares,
        lambda stage: stage_weight_bytes(setting, NullLedger(), stage),
        lambda stage: stage_kv_bytes(setting, NullLedger(), load, stage),
        _all_stages(setting),
        load.step_tokens + load.waiting_tokens,
    )


def _all_stages(setting: Setting) -> tuple[StageShare, ...]:
    """Return stages that hold the model once; a column of stage counts has only the fullest."""
    shares, stages = setting.shares, setting.layout.pipeline
    if not is_column(stages):
        return shares
    first, last = shares[0].vocabulary, shares[-1].vocabulary
    layers = float(setting.model.num_hidden_layers)
    return (StageShare(layers, where(stages > 1, first + last, first), is_last=True),)


def stage_weight_bytes(setting: Setting, ledger: Ledger, stage: StageShare) -> float:
    """Return the bytes of the weights on one device of a pipeline stage."""
    counts, layout, model = setting.counts, setting.layout, setting.model
    portion = cast("float", stage.layers / model.num_hidden_layers)
    main, *others = setting.weight_formats
    total = ledger.term(
        weight_bytes,
        setting.line(GROUP, "Weights", key="weights"),
        linear=_stage_linear(setting, ledger, main, portion),
        small=counts.small * portion,
        vocabulary=stage.vocabulary,
        tensor_parallel_size=layout.tensor,
        weight_bytes_per_element=main.element_bytes,
        plain_bytes_per_element=setting.small_element_bytes,
        vocabulary_bytes_per_element=_vocabulary_bytes(setting),
    )
    for other in others:
        kept = other.dtype if other.dtype != main.dtype else "another mix: experts"
        total = total + ledger.term(
            linear_bytes,
            setting.line(GROUP, f"Weights kept in {kept}", key="weights"),
            linear=_stage_linear(setting, ledger, other, portion),
            weight_bytes_per_element=other.element_bytes,
        )
    return total


def _vocabulary_bytes(setting: Setting) -> float:
    """Return the mean bytes of a vocabulary weight; some engines keep fp32 embeddings."""
    if setting.widens_the_rest:
        has_wide_head = setting.engine.role == "runner"
        head = element_bytes("fp32") if has_wide_head else setting.vocabulary_element_bytes
        return (head + element_bytes("fp32")) / 2
    return setting.vocabulary_element_bytes


def _stage_linear(setting: Setting, ledger: Ledger, stored: WeightFormat, portion: float) -> float:
    """Return the linear weights in one format on one device of a stage."""
    counts, layout = setting.counts, setting.layout
    attention, dense = stored.contains("attention"), stored.contains("feed_forward")
    split = attention * counts.query_output + dense * counts.feed_forward
    return ledger.term(
        linear_parameters_per_rank,
        setting.line(GROUP, "Linear weights per device"),
        split=split * portion,
        key_value=attention * counts.key_value * portion,
        experts=stored.contains("experts") * counts.experts * setting.expert_padding * portion,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=attention * counts.replicated * portion,
    )


def stage_kv_bytes(setting: Setting, ledger: Ledger, load: MemoryLoad, stage: StageShare) -> float:
    """Return the bytes of the KV cache on one device of a pipeline stage."""
    model, layout = setting.model, setting.layout
    unshared = load.tokens_per_sequence - load.shared_tokens
    pooled = setting.engine.pools_blocks and load.paged
    pool = page_pool(model.layers_by_attention) if pooled else None
    if pool is not None:
        return ledger.term(
            pooled_cache_bytes,
            setting.line(GROUP, "KV cache", key="kv_cache"),
            bytes_per_block=block_bytes(pool, setting.kv_element_bytes)
            * (stage.layers / model.num_hidden_layers),
            num_requests=load.sequences,
            num_tokens=unshared / layout.context,
            shared_tokens=load.shared_tokens / layout.context,
            window_blocks=pool.window_blocks,
            blocks_per_step_token=pool.blocks_per_step_token,
            step_tokens=load.step_tokens,
        )
    tokens = load.sequences * cached_tokens_by_layer_group(model, unshared, paged=load.paged)
    if load.shared_tokens:
        tokens += cached_tokens_by_layer_group(model, load.shared_tokens, paged=load.paged)
    if pooled:
        tokens += PerLayerGroup.of(
            model, lambda group: step_tokens_outside_window(group, load.step_tokens)
        )
    return cache_bytes(
        model,
        tokens / layout.context,
        layout.tensor,
        setting.kv_element_bytes,
        (ledger, setting.line(GROUP, "KV cache", key="kv_cache")),
        stage.layers / model.num_hidden_layers,
    )


def step_cache_bytes(setting: Setting, load: MemoryLoad) -> float:
    """Return the bytes of cache that the tokens of a step hold beside those of its requests.

    They are those of all layers; a pipeline stage has them in proportion to its layers.
    """
    if not (setting.engine.pools_blocks and load.paged):
        return 0.0
    whole = StageShare(layers=float(setting.model.num_hidden_layers), vocabulary=0.0, is_last=True)
    without = replace(load, step_tokens=0.0)
    held, beside = (stage_kv_bytes(setting, NullLedger(), each, whole) for each in (load, without))
    return (held - beside) * (1 - setting.offload.kv_share)


def _stage(setting: Setting, ledger: Ledger, load: MemoryLoad, stage: StageShare) -> StageMemory:
    """Return the peak memory of a stage: during prefill or at the last decode step."""
    weights = stage_weight_bytes(setting, ledger, stage)
    factor = setting.factor("memory")
    kept = weights * (1 - setting.offload.weights_share)
    by_class = {
        "weights": kept,
        "buffers": double_buffer(setting, ledger, weights, stage)
        + _rotary_tables(setting, ledger, stage)
        + graph_bytes(setting, ledger, stage.layers)
        + _workspace(setting, ledger, kept, stage),
        "runtime_overhead": (_overhead(setting) + _communicators(setting)) * factor,
    }
    if load.prompt_tokens is None:
        moments = [(load, _working_set(setting, ledger, load))]
    else:
        end = replace(load, step_tokens=load.sampled_tokens)  # when every cache is full
        moments = [
            (load.prompt, _working_set(setting, ledger, load.prompt)),
            (load.prompt, _prompt_logits(setting, ledger, load, stage)),
            (end, _working_set(setting, NullLedger(), end)),
        ]
    loading = _loading(setting, weights, stage)
    return fullest_of(
        [
            *loading,
            *(
                StageMemory(
                    {
                        **by_class,
                        "kv_cache": stage_kv_bytes(setting, ledger, moment, stage)
                        * (1 - setting.offload.kv_share),
                        "activations": _activation_bytes(setting, load, working),
                    }
                )
                for moment, working in moments
            ),
        ]
    )


def step_activation_bytes(setting: Setting, load: MemoryLoad) -> float:
    """Return the bytes of activations of a step, which are the same on every stage."""
    return _activation_bytes(setting, load, _working_set(setting, NullLedger(), load))


def _activation_bytes(setting: Setting, load: MemoryLoad, working_set: float) -> float:
    """Return the bytes of a working set as the engine allocates it, and of what waits."""
    allocated = working_set * setting.engine.working_set_ratio * setting.factor("memory")
    return allocated + waiting_bytes(setting, load.waiting_tokens)


def _workspace(setting: Setting, ledger: Ledger, weights: float, stage: StageShare) -> float:
    """Return the bytes of split attention, beside a cache that fills the engine's memory."""
    engine, workload = setting.engine, setting.workload
    if not engine.attention_partition or not isinstance(workload, ServeWorkload):
        return 0.0
    tokens = float(workload.input_tokens + workload.output_tokens)
    one = MemoryLoad(1.0, tokens, 0.0, 0.0, paged=False)
    share = setting.strategy.gpu_memory_utilization or engine.memory_utilisation
    visible, _ = _limits(setting)
    return attention_workspace(
        setting,
        ledger,
        visible * share - weights - _overhead(setting),
        stage_kv_bytes(setting, NullLedger(), one, stage) / tokens,
    )


def _loading(setting: Setting, weights: float, stage: StageShare) -> list[StageMemory]:
    """Return the moment of loading if it needs more than the device has.

    An engine that makes FP8 of a 16-bit checkpoint may first hold that, whatever its share is.
    """
    when, strategy, model = setting.engine.fp8_at_load, setting.strategy, setting.model
    if when == "in_place" or strategy.weight_dtype != "fp8" or strategy.quantization:
        return []
    if model.weight_dtype not in WIDE and model.weight_dtype is not None:
        return []
    wide = strategy.model_copy(update={"weight_dtype": "bf16", "group_size": None})
    loaded = stage_weight_bytes(replace(setting, strategy=wide), NullLedger(), stage)
    if when == "beside":
        loaded = loaded + weights
    _, most = _limits(setting)
    return [StageMemory({"weights": where(loaded > most, loaded, 0.0)})]


def _overhead(setting: Setting) -> float:
    """Return the runtime overhead: the engine's measured one for generation, else its default."""
    measured = setting.engine.generation_overhead_bytes
    if measured is None or not isinstance(setting.workload, GenerateWorkload):
        return setting.engine.runtime_overhead_bytes
    return measured


def _communicators(setting: Setting) -> float:
    """Return the bytes of an engine's communicators and all-reduce buffers on fast links."""
    each, link = setting.engine.communicator_bytes, setting.device.link or PCIE
    if not each or link.startswith(PCIE):
        return 0.0
    return where(setting.layout.tensor * setting.layout.attention_data > 1, each, 0.0)


def _uncounted_overhead(setting: Setting) -> float:
    """Return the runtime overhead missing from published peaks that count only tensors."""
    return max(0.0, setting.engine.runtime_overhead_bytes - _overhead(setting))


def _rotary_tables(setting: Setting, ledger: Ledger, stage: StageShare) -> float:
    """Return the bytes of rotary tables of an engine that keeps them per layer."""
    model = setting.model
    if not setting.engine.rotary_tables_per_layer:
        return 0.0
    return ledger.term(
        rotary_table_bytes,
        setting.line(GROUP, "Rotary tables", key="buffers"),
        num_layers=stage.layers,
        positions=model.max_position_embeddings,
        head_dim=model.head_dim,
        bytes_per_element=setting.activation_element_bytes,
    )


def _prompt_logits(setting: Setting, ledger: Ledger, load: MemoryLoad, stage: StageShare) -> float:
    """Return the bytes of prompt logits in engines that compute them for every token."""
    model, tensor = setting.model, setting.layout.tensor
    if not setting.engine.prompt_logits or not any_of(stage.is_last):
        return 0.0
    logits = ledger.term(
        inference_activation_bytes,
        setting.line(GROUP, "Logits of the whole prompts", key="activations"),
        num_tokens=0.0,
        elements=0.0,
        hidden_size=0.0,
        bytes_per_element=setting.activation_element_bytes,
        sampled_tokens=load.step_tokens,
        vocab_per_rank=model.vocab_size / tensor,
        bytes_per_logit=setting.activation_element_bytes + FP32_BYTES,
    )
    return where(stage.is_last, logits, 0.0)


def _working_set(setting: Setting, ledger: Ledger, load: MemoryLoad) -> float:
    """Return the bytes of the largest live tensors of one step."""
    model, tensor = setting.model, setting.layout.tensor
    step = largest_step(setting, load.step_tokens, load.sampled_tokens)
    activations = ledger.term(
        inference_activation_bytes,
        setting.line(GROUP, "Working set of one step", key="activations"),
        num_tokens=step.tokens / setting.layout.context,
        elements=maximum(inference_elements(model, tensor), step.experts_elements),
        hidden_size=model.hidden_size,
        bytes_per_element=setting.activation_element_bytes,
        sampled_tokens=step.sampled,
        vocab_per_rank=step.vocabulary,
        bytes_per_logit=step.bytes_per_logit,
    )
    if setting.strategy.attention == "eager":
        activations += ledger.term(
            score_bytes,
            setting.line(GROUP, "Eager attention scores", key="activations"),
            num_heads=model.num_attention_heads,
            tensor_parallel_size=tensor,
            num_tokens=load.step_tokens / setting.layout.context,
            sequence_length=load.tokens_per_sequence,
            bytes_per_element=setting.activation_element_bytes,
        )
    return activations
