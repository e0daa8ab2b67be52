"""What inference holds on each device: weights, KV cache, working set and the runtime itself."""

from dataclasses import dataclass

from planner.cost.activations import inference_activation_bytes, inference_elements, score_bytes
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.kv_cache import cache_bytes, layer_tokens
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.weight_formats import WeightFormat
from planner.cost.weights import (
    alike_stages,
    key_value_share,
    linear_bytes,
    linear_parameters_per_rank,
    stage_layers,
    stage_vocabulary,
    weight_bytes,
)
from planner.workload.offloaded_memory import (
    DISK,
    HOST,
    away_bytes,
    double_buffer,
    waiting_bytes,
)
from planner.workload.offloading import cache_away, weights_away
from planner.workload.setting import Setting

GROUP = "memory"


@dataclass(frozen=True)
class Load:
    """What one attention rank holds at once: sequences of a length, and its widest step's tokens.

    Context parallelism splits the tokens of a sequence further. ``waiting_tokens`` belong to other
    micro-batches: their residual streams wait for the layer.
    """

    sequences: float
    tokens_per_sequence: float
    step_tokens: float
    sampled_tokens: float
    paged: bool
    shared_tokens: float = 0.0
    waiting_tokens: float = 0.0


def usable_bytes(setting: Setting) -> float:
    """Return the part of a device's memory that the engine may fill."""
    engine, device = setting.engine, setting.device
    share = device.usable_memory_ratio
    if share is None:
        share = engine.usable_memory_ratio
    return device.memory_bytes * min(share, engine.memory_utilisation)


def inference_memory(setting: Setting, ledger: Ledger, load: Load) -> MemoryUse:
    """Return what every pipeline stage holds; the fullest stage is the one in the ledger.

    Without a record, stages that hold the same appear once.
    """
    stages = setting.layout.pipeline
    alike = alike_stages(setting.model.num_hidden_layers, stages)
    costed = {stage: _stage(setting, Unrecorded(), load, stage) for stage in set(alike)}
    drafts = [costed[stage] for stage in (alike if ledger.records else sorted(set(alike)))]
    if ledger.records:
        fullest = max(range(stages), key=lambda stage: drafts[stage].peak_bytes)
        drafts[fullest] = _stage(setting, ledger, load, fullest)
    return MemoryUse(
        stages=tuple(drafts),
        capacity_bytes=setting.device.memory_bytes,
        usable_bytes=usable_bytes(setting),
        host_bytes=_away(setting, load, HOST),
        disk_bytes=_away(setting, load, DISK),
    )


def _away(setting: Setting, load: Load, shares: tuple[str, ...]) -> float:
    return away_bytes(
        setting,
        shares,
        lambda stage: stage_weight_bytes(setting, Unrecorded(), stage),
        lambda stage: stage_kv_bytes(setting, Unrecorded(), load, stage),
        load.step_tokens + load.waiting_tokens,
    )


def stage_weight_bytes(setting: Setting, ledger: Ledger, stage: int) -> float:
    """Return the bytes of the weights on one device of a pipeline stage."""
    counts, layout, model = setting.counts, setting.layout, setting.model
    share = stage_layers(model.num_hidden_layers, layout.pipeline)[stage]
    portion = share / model.num_hidden_layers
    main, *others = setting.weight_formats
    held = ledger.term(
        weight_bytes,
        setting.line(GROUP, "Weights", key="weights"),
        linear=_stage_linear(setting, ledger, main, portion),
        small=counts.small * portion,
        vocabulary=stage_vocabulary(model, stage, layout.pipeline),
        tensor_parallel_size=layout.tensor,
        weight_bytes_per_element=setting.weight_element_bytes,
        plain_bytes_per_element=setting.plain_element_bytes,
        vocabulary_bytes_per_element=setting.vocabulary_element_bytes,
    )
    for other in others:
        held = held + ledger.term(
            linear_bytes,
            setting.line(GROUP, f"Weights kept in {other.dtype}", key="weights"),
            linear=_stage_linear(setting, ledger, other, portion),
            weight_bytes_per_element=other.element_bytes,
        )
    return held


def _stage_linear(setting: Setting, ledger: Ledger, stored: WeightFormat, portion: float) -> float:
    """Return the linear weights in one format on one device of a stage."""
    counts, layout = setting.counts, setting.layout
    attention, dense = stored.share("attention"), stored.share("feed_forward")
    split = attention * counts.query_output + dense * counts.feed_forward
    return ledger.term(
        linear_parameters_per_rank,
        setting.line(GROUP, "Linear weights per device"),
        split=split * portion,
        key_value=attention * counts.key_value * portion,
        experts=stored.share("experts") * counts.experts * portion,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=attention * counts.replicated * portion,
    )


def stage_kv_bytes(setting: Setting, ledger: Ledger, load: Load, stage: int) -> float:
    """Return the bytes of the KV cache on one device of a pipeline stage."""
    model, layout = setting.model, setting.layout
    share = stage_layers(model.num_hidden_layers, layout.pipeline)[stage]
    own = load.tokens_per_sequence - load.shared_tokens
    kept = load.sequences * layer_tokens(model, own, paged=load.paged)
    if load.shared_tokens:
        kept += layer_tokens(model, load.shared_tokens, paged=load.paged)
    return cache_bytes(
        model,
        kept / layout.context,
        layout.tensor,
        setting.kv_element_bytes,
        (ledger, setting.line(GROUP, "KV cache", key="kv_cache")),
        share / model.num_hidden_layers,
    )


def _stage(setting: Setting, ledger: Ledger, load: Load, stage: int) -> StageMemory:
    model, tensor = setting.model, setting.layout.tensor
    weights = stage_weight_bytes(setting, ledger, stage)
    kv_cache = stage_kv_bytes(setting, ledger, load, stage)
    activations = ledger.term(
        inference_activation_bytes,
        setting.line(GROUP, "Working set of one step", key="activations"),
        num_tokens=load.step_tokens / setting.layout.context,
        elements=inference_elements(model, tensor),
        bytes_per_element=setting.activation_element_bytes,
        sampled_tokens=load.sampled_tokens,
        vocab_per_rank=model.vocab_size / tensor,
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
    factor = setting.factor("memory")
    return StageMemory(
        {
            "weights": weights * (1 - weights_away(setting)),
            "kv_cache": kv_cache * (1 - cache_away(setting)),
            "activations": activations * setting.engine.working_set_ratio * factor
            + waiting_bytes(setting, load.waiting_tokens),
            "buffers": double_buffer(setting, ledger, weights, stage),
            "runtime_overhead": setting.engine.runtime_overhead_bytes * factor,
        }
    )
