"""The options of ``slipway plan GOAL``: each is its names and the field of the request it sets.

How a text is read, and the help, come from the field. ``--set FIELD=VALUE`` reaches all fields.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, get_args

from runners.cli.option_fields import MAX, FieldOption

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


class Goal(NamedTuple):
    """A goal: the kind of its workload, its help, and the workload's defaults."""

    kind: str
    words: str
    defaults: Mapping[str, object]


TRAINING_DEFAULTS = {"sequence_length": 2048, "global_batch_size": 16}
GOALS: dict[str, Goal] = {
    "serve": Goal(
        "serve",
        "Plan an endpoint: which engine, format and layout, how fast, at what price.",
        {"input_tokens": 1024, "output_tokens": 256, "concurrency": 16},
    ),
    "generate": Goal(
        "generate",
        "Plan the answers to one batch of prompts.",
        {"input_tokens": 1024, "output_tokens": 256, "batch_size": 16},
    ),
    "tune": Goal("train", "Plan a fine-tuning.", {**TRAINING_DEFAULTS, "method": "lora"}),
    "train": Goal("train", "Plan a pre-training.", {**TRAINING_DEFAULTS, "method": "pretrain"}),
    "compress": Goal("compress", "Plan a compression.", {"method": "gptq"}),
}

# Of each goal whose workload has the field.
WORKLOAD = (
    FieldOption(("--input-len", "--prompt-tokens"), "workload.input_tokens"),
    FieldOption(("--output-len", "--output-tokens"), "workload.output_tokens"),
    FieldOption(("--concurrency",), "workload.concurrency"),
    FieldOption(("--rate", "--request-rate"), "workload.request_rate_per_second"),
    FieldOption(("--burst",), "workload.burst_requests"),
    FieldOption(("--prefix-share",), "workload.prefix_share_ratio"),
    FieldOption(("--length-variation",), "workload.length_variation"),
    FieldOption(("--max-model-len",), "workload.max_request_tokens"),
    FieldOption(("--ttft",), "workload.ttft_slo_seconds"),
    FieldOption(("--itl", "--tpot"), "workload.tpot_slo_seconds"),
    FieldOption(("--batch-size",), "workload.batch_size"),
    FieldOption(("--seq-len", "--sequence-length"), "workload.sequence_length"),
    FieldOption(("--batch-size", "--global-batch-size"), "workload.global_batch_size"),
    FieldOption(("--tokens",), "workload.tokens"),
    FieldOption(("--time-budget",), "workload.time_budget_seconds"),
    FieldOption(("--method",), "workload.method"),
    FieldOption(("--training-objective",), "workload.objective"),
    FieldOption(("--lora-rank",), "workload.lora_rank"),
    FieldOption(("--lora-targets",), "workload.lora_targets"),
    FieldOption(("--optimizer",), "workload.optimizer"),
    FieldOption(("--bits",), "workload.bits"),
    FieldOption(("--group-size",), "workload.group_size"),
    FieldOption(("--calibration-tokens",), "workload.calibration_tokens"),
)
PERCENTILES = tuple(
    FieldOption(
        tuple(f"--{name}-{percentile}" for name in names),
        f"constraints.{names[-1]}_{percentile}_seconds{MAX}",
    )
    for names in (("ttft",), ("itl", "tpot"), ("latency",))
    for percentile in ("p50", "p90", "p95", "p99")
)
STEPS = (
    FieldOption(("--kv-cache-dtype",), "pins.kv_cache_dtype"),
    FieldOption(("--gpu-memory-utilization",), "pins.gpu_memory_utilization"),
    FieldOption(("--max-num-batched-tokens",), "pins.max_batch_tokens"),
)
MICRO_BATCH = FieldOption(("--micro-batch-size",), "pins.micro_batch_size")
UPDATES = (
    FieldOption(("--gradient-accumulation-steps",), "pins.gradient_accumulation_steps"),
    FieldOption(("--zero-stage",), "pins.zero_stage"),
    FieldOption(("--activation-recomputation",), "pins.activation_recomputation"),
)
SEARCH = (
    FieldOption(("--objective",), "objective"),
    FieldOption(("--top",), "top"),
    FieldOption(("--engine",), "engine"),
    FieldOption(("--dtype", "--weight-dtype"), "pins.weight_dtype"),
    FieldOption(("--quantization",), "pins.quantization"),
    FieldOption(("--data-parallel-size", "--dp"), "pins.data_parallel_size"),
)
QUALITY = FieldOption(("--max-quality-loss",), f"constraints.quality_loss_ratio{MAX}")
LAYOUT = (
    FieldOption(("--tensor-parallel-size", "--tp"), "pins.tensor_parallel_size"),
    FieldOption(("--pipeline-parallel-size", "--pp"), "pins.pipeline_parallel_size"),
    FieldOption(("--context-parallel-size", "--cp"), "pins.context_parallel_size"),
    FieldOption(("--expert-parallel-size", "--ep"), "pins.expert_parallel_size"),
)
OF_KIND: Mapping[str, tuple[FieldOption, ...]] = {
    "serve": (*PERCENTILES, *STEPS, *SEARCH, QUALITY, *LAYOUT),
    "generate": (*STEPS, MICRO_BATCH, *SEARCH, QUALITY, *LAYOUT),
    "train": (MICRO_BATCH, *UPDATES, *SEARCH, *LAYOUT),
    "compress": (*SEARCH, QUALITY),
}


@cache
def options_of(goal_name: str) -> tuple[FieldOption, ...]:
    """Return the options of a goal: those that its plans depend on.

    Fields of one training objective are set with ``--set``.
    """
    from planner.specs.on_policy import ON_POLICY

    kind = GOALS[goal_name].kind
    fields = _workload_of(kind).model_fields.keys() - (ON_POLICY if kind == "train" else ())
    return (*(each for each in WORKLOAD if each.name in fields), *OF_KIND[kind])


def field_of(goal_name: str, option: FieldOption) -> "FieldInfo":
    """Return the field of a goal's request that an option sets, of a constraint its figure.

    Raises:
        KeyError: there is no such field.
    """
    from planner.specs.estimate import FIGURES, PlanRequest
    from planner.specs.workload import Strategy

    part, _, name = option.field.removesuffix(MAX).partition(".")
    if part == "constraints":
        return FIGURES[name]
    parts: Mapping[str, type[BaseModel]] = {
        "workload": _workload_of(GOALS[goal_name].kind),
        "pins": Strategy,
    }
    return parts[part].model_fields[name] if name else PlanRequest.model_fields[part]


def _workload_of(kind: str) -> "type[BaseModel]":
    """Return the model of a kind of workload."""
    from planner.specs.workload import Workload

    kinds: tuple[type[BaseModel], ...] = get_args(get_args(Workload)[0])
    return next(each for each in kinds if each.model_fields["kind"].default == kind)
