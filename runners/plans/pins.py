"""The parts of a strategy that the wizard lets a person fix, and the words of every field."""

from collections.abc import Mapping
from itertools import chain

from runners.plans.document import PLANS, HardwareChoice, ModelChoice, PlanDocument
from runners.plans.fields import Key, Part, Shown, shown_of
from runners.plans.launch import Launch
from runners.plans.workloads import TRAINING_GOALS, WORKLOADS

POOLS = ("prefill_devices", "decode_devices")  # both or none: the pin ``disaggregated``
DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4", "nvfp4")


def _open(*names: str) -> dict[Key, str]:
    return {None: "Let the planner choose", **{name: name for name in names}}


PINS: Mapping[str, Shown] = {
    "weight_dtype": Shown("Weights", choices=_open(*DTYPES)),
    "kv_cache_dtype": Shown("KV cache", choices=_open("bf16", "fp16", "fp8", "int8")),
    "tensor_parallel_size": Shown("Tensor parallel"),
    "pipeline_parallel_size": Shown("Pipeline parallel"),
    "micro_batch_size": Shown("Micro-batch"),
    "activation_recomputation": Shown(
        "Recompute activations", choices=_open("none", "selective", "full")
    ),
    "prefill_devices": Shown("Prefill devices", "Set with “Decode devices”: two separate pools"),
    "decode_devices": Shown("Decode devices", "The KV cache is transferred between the pools"),
}
_ANSWERS, _SHARDED = frozenset({"serve", "generate"}), frozenset(WORKLOADS) - {"compress"}
GOALS_OF: Mapping[str, frozenset[str]] = {  # of the pins that change nothing for other goals
    "kv_cache_dtype": _ANSWERS,
    "tensor_parallel_size": _SHARDED,
    "pipeline_parallel_size": _SHARDED,
    "micro_batch_size": _SHARDED - {"serve"},
    "activation_recomputation": TRAINING_GOALS,
    **dict.fromkeys(POOLS, frozenset({"serve"})),
}
MOST_OF: Mapping[str, int] = {"micro_batch_size": 100_000}
MOST = 1024  # of the other sizes


def _fields() -> dict[str, Shown]:
    fields = dict(PINS)
    parts: list[type[Part]] = [PlanDocument, ModelChoice, HardwareChoice, Launch]
    parts += [*WORKLOADS.values(), *PLANS.values()]
    for name, info in chain.from_iterable(part.model_fields.items() for part in parts):
        try:
            fields.setdefault(name, shown_of(info))
        except LookupError:  # a part, not a value
            continue
    return fields


FIELDS: Mapping[str, Shown] = _fields()
FIELD_TITLES: Mapping[str, str] = {name: shown.title for name, shown in FIELDS.items()}
