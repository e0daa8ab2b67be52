"""The spec of a compression's job."""

from typing import Any

from runners.jobspec import CompressSpec, ModelRef
from runners.jobspec.compress import WITHOUT_CALIBRATION, GgufType
from runners.plans.methods import COMPRESSIONS
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import PATTERN, CompressWork

GGUF_TYPES: dict[int, GgufType] = {4: "Q4_K_M", 8: "Q8_0"}


def compress_spec(values: CompressWork, model: ModelRef) -> CompressSpec:
    """Return the job spec of a compression.

    Raises:
        DraftProblem: the method does not support the options.
    """
    method = COMPRESSIONS[values.method]
    fields: dict[str, Any] = {"method": method.job, "group_size": values.group_size}
    if method.job == "gguf":
        if values.bits not in GGUF_TYPES:
            raise DraftProblem(
                f"GGUF files are written here with 4 bits (Q4_K_M) or 8 (Q8_0), not "
                f"{values.bits}. Choose one of them.",
                "bits",
            )
        fields["gguf_type"] = GGUF_TYPES[values.bits]
    elif "bits" in method.options:
        fields["bits"] = values.bits
    if "recovery_steps" in method.options:
        fields["recovery_steps"] = values.recovery_steps
    is_pattern = values.sparsity == PATTERN
    pruned = {"pattern": PATTERN} if is_pattern else {"sparsity": int(values.sparsity) / 100}
    if values.data_repository:
        if method.job in WITHOUT_CALIBRATION:
            calibrated = [
                each.name for each in COMPRESSIONS.values() if each.job not in WITHOUT_CALIBRATION
            ]
            raise DraftProblem(
                f"{method.name} calibrates on no data set. Leave the data set out, or choose "
                f"{', '.join(calibrated[:-1])} or {calibrated[-1]}.",
                "data_repository",
            )
        fields["calibration_data"] = values.hub_data()
    return CompressSpec.model_validate({"model": model, **fields, **pruned})
