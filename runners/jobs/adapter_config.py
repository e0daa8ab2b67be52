"""Validates an adapter's config in peft's format; without torch, for every engine.

Unsupported options of adapter_config.json are rejected by name, so that no adapter behaves
differently than in peft.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from runners.jobs.runtime import BadInputError

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
MAX_RANK = 1024
PREFIX = "base_model.model."
SIDES = {".lora_A.weight": 0, ".lora_B.weight": 1}
# Options that change an adapter's output, with the values that do not.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "rank_pattern": (None, {}),
}
# Options of training only, and those that say which layers there are: the tensors say it too.
WITHOUT_EFFECT = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path",
    "revision", "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core",
    "init_lora_weights", "qalora_group_size", "runtime_config", "eva_config",
})  # fmt: skip
# Initialisations that change the base's weights too: the matrices alone are not the adapter.
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
UNSET: tuple[object, ...] = (None, False, "", [], {})


def scale_of(name: str, config: Mapping[str, Any]) -> float:
    """Return alpha over rank.

    Raises:
        BadInputError: the config has an unsupported option.
    """
    if config.get("peft_type") != "LORA":
        refuse(name, f"is of peft_type {str(config.get('peft_type'))[:40]!r}, not LORA")
    for field, neutral in NEUTRAL.items():
        if config.get(field) not in neutral:
            refuse(name, f"has {field} {str(config[field])[:40]!r}, which is not applied here")
    for field, value in config.items():
        if field not in NEUTRAL and field not in WITHOUT_EFFECT and value not in UNSET:
            shown = f"{field[:40]} {str(value)[:40]!r}"
            refuse(name, f"has {shown}, an option that is not known here; merge it with peft")
    if str(config.get("init_lora_weights")).startswith(CHANGED_BASES):
        refuse(
            name,
            f"began as {str(config['init_lora_weights'])[:40]!r}, which changed its base; convert "
            "it with peft's path_initial_model_for_weight_conversion",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        refuse(name, f"has r {str(rank)[:40]!r}; 1 to {MAX_RANK} is possible")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        refuse(name, f"has lora_alpha {str(alpha)[:40]!r}, which is not a finite number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def place_of(name: str, key: str) -> tuple[str, int]:
    """Return the layer and the side (0 down, 1 up) of a tensor name.

    Raises:
        BadInputError: the name is not that of a LoRA matrix.
    """
    suffix = next((each for each in SIDES if key.endswith(each)), None)
    if suffix is None or not key.startswith(PREFIX):
        refuse(name, f"holds {key[:120]}, which is not a LoRA matrix")
    return key.removeprefix(PREFIX).removesuffix(suffix), SIDES[suffix]


def refuse(name: str, what: str) -> NoReturn:
    """Reject an adapter, naming it.

    Raises:
        BadInputError: always.
    """
    raise BadInputError(f"adapter {name} {what}")
