"""Storage and compute formats and group sizes of named quantisations."""

from planner.catalog.engines import Engine
from planner.specs.base import Dtype
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy

RUNNER_INT4_GROUP = 64
USUAL_GROUP = 128
# Default storage and compute dtypes by quantisation.
FORMAT_BY_QUANTIZATION: dict[str, tuple[Dtype, Dtype]] = {
    "gptq": ("int4", "bf16"),
    "awq": ("int4", "bf16"),
    "nf4": ("nf4", "bf16"),
    "bnb.nf4": ("nf4", "bf16"),
    "w4a16": ("int4", "bf16"),
    "w4a8": ("int4", "int8"),
    "fptq": ("int4", "int8"),
    "finequant": ("int4", "bf16"),
    "quantease": ("int4", "bf16"),
    "qat": ("int4", "bf16"),
    "w8a16": ("int8", "bf16"),
    "w8a8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
# Published checkpoints of these methods have groups of 128 on every engine.
GROUPS_OF_128 = frozenset({"gptq", "awq"})


def default_group(given: Strategy, model: ModelSpec, weight: Dtype, engine: Engine) -> int | None:
    """Return the default group size: the number of weights per scale."""
    if model.group_size and weight == model.weight_dtype:
        return model.group_size
    if given.quantization in GROUPS_OF_128 and weight in {"int4", "int8"}:
        return USUAL_GROUP
    if weight in {"int4", "nf4"}:
        runner = engine.role == "runner" or weight == "nf4"
        return RUNNER_INT4_GROUP if runner else USUAL_GROUP
    return None
