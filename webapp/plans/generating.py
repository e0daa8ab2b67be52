"""The batch-generate goal as a job: which prompts, worked on in which batches."""

from typing import Any

from runners.jobspec import (
    DemoPrompts,
    FilePrompts,
    GenerateSpec,
    ModelRef,
    PromptLookup,
    Prompts,
    RandomModel,
)
from webapp.plans.errors import DraftProblem

Draft = dict[str, Any]


def generate_spec(draft: Draft, model: ModelRef, weight_dtype: str) -> GenerateSpec:
    """Return the typed document that the host runs.

    Raises:
        DraftProblem: prompts of text for a model that has no weights on the host.
    """
    values = draft["workload"]["generate"]
    path = str(values.get("prompts_path") or "")
    if path and isinstance(model, RandomModel):
        raise DraftProblem(
            "A prompts file needs trained weights, and this model has none on the host. Leave "
            "the file empty, or choose a model whose weights are there.",
            "prompts_path",
        )
    return GenerateSpec.model_validate(
        {
            "model": model,
            "prompts": prompts_of(values, path),
            "weight_dtype": weight_dtype,
            "batch_size": values["batch_size"],
            "output_tokens": values["output_tokens"],
            "stop_at_end": bool(path),
            "batching": values.get("batching") or "given",
            "kv_cache": values.get("kv_cache") or "plain",
            "speculation": PromptLookup() if values.get("guessing") == "lookup" else None,
        }
    )


def prompts_of(values: dict[str, Any], path: str) -> Prompts:
    """Return the file that the step names, else one batch of the host's own text."""
    if path:
        return FilePrompts(path=path)
    return DemoPrompts(count=values["batch_size"], input_tokens=values["input_tokens"])
