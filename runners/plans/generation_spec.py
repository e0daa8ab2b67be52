"""The spec of a batch generation's job: prompts, batches, KV cache, offload and split."""

from collections.abc import Sequence
from typing import Any

from planner.cost.parameters import count_parameters
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
from runners.plans.refusals import DraftProblem, validated
from runners.plans.spread import split_of
from runners.plans.strategy_checks import compute_dtype
from runners.plans.workloads import GenerateWork

CACHES: dict[str, KvCache] = {"fp8": "fp8", "int4": "int4"}
Offload = LayerStreaming | ExpertCache | PolicyOffload
SHARES = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk", "activations_cpu")
GROUP_SIZE = 64  # FlexGen's value
ROUNDING = 1e-9  # tolerance for products such as 8 layers * (1 - 0.25)


def generate_spec(
    values: GenerateWork,
    model: ModelRef,
    weight_dtype: str,
    strategy: Strategy,
    offload: Offload | None = None,
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
    if values.data_repository and isinstance(model, RandomModel):
        raise DraftProblem(
            "The prompts of a data set need trained weights, and this model has none on the host. "
            "Leave the data set out, or choose a model with weights on the host.",
            "data_repository",
        )
    return _validated(
        {
            **values.fields_of(GenerateSpec),
            "model": model,
            "prompts": prompts_of(values),
            "weight_dtype": weight_dtype,
            "stop_at_end": bool(path or values.data_repository),
            "kv_cache": cache_of(strategy, values.kv_cache),
            "attention": strategy.attention or "flash",
            "speculation": PromptLookup() if values.speculation else None,
            "offload": offload,
            "split": split,
        }
    )


def _validated(fields: dict[str, Any]) -> GenerateSpec:
    return validated(GenerateSpec, fields, "The chosen options are incompatible", "batching")


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


def offload_of(strategy: Strategy, shape: ModelSpec) -> Offload | None:
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


def _check_streamable(model: ModelRef, weight_dtype: str, offload: Offload) -> None:
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
    """Return the data set or prompts file of a generation, else a batch of the host's text."""
    if values.data_repository:
        return values.hub_data()
    if values.prompts_path:
        return FilePrompts(path=values.prompts_path)
    return DemoPrompts(count=values.batch_size, input_tokens=values.input_tokens)


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
    dtype, computed = strategy.kv_cache_dtype, compute_dtype(strategy)
    if dtype is None or dtype == computed:
        return "plain"
    if dtype in CACHES:
        return CACHES[dtype]
    raise DraftProblem(
        f"The planned KV cache dtype is {dtype}, which no job supports; jobs support "
        f"{computed} or {' or '.join(CACHES)}. Pin the KV cache to one of these.",
        "kv_cache_dtype",
    )
