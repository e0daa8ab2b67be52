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
}


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
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        refuse(name, f"has r {str(rank)[:40]!r}; 1 to {MAX_RANK} is possible")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        refuse(name, f"has lora_alpha {str(alpha)[:40]!r}, which is not a finite number")
    if config.get("rank_pattern") not in (None, {}):
        refuse(name, "has a rank_pattern, which is not applied here")
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
