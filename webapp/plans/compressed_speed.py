"""Predicted speed of a compressed model relative to its original."""

from planner.specs.estimate import PlanRequest
from planner.specs.workload import GenerateWorkload, Strategy
from runners.jobspec import CompressSpec
from runners.jobspec.base import RandomModel
from webapp.plans.compressing import compress_spec, speed_words
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.planning import estimate_as_planned

# Speed on catalog hardware is predicted for the engine commonly used there.
CATALOG_ENGINE, CATALOG_NAME = "vllm", "vLLM"
NOT_SERVED = ("gguf", "qmoe")  # vLLM has no kernels for these


def planned_speed(plan: Plan) -> str:
    """Return the single-user speed of a plan's compressed model relative to the original.

    On a host it is what the job will measure; on catalog hardware it is vLLM's speed with the
    format. Empty if the planner cannot predict it, and for other goals.
    """
    if plan.draft["goal"]["goal"] != "compress" or not plan.request:
        return ""
    request = PlanRequest.model_validate(plan.request)
    try:
        spec = compress_spec(plan.draft, RandomModel(config={}))
    except DraftProblem:
        return ""
    if isinstance(request.cluster.device, str):
        return _in_engine(request, spec)
    formats = dict(spec.predictable_phases)
    ratio = _ratio(request, spec, *(formats.get(each) for each in ("original_", "")))
    return f"{speed_words(ratio)} here" if ratio else ""


def _in_engine(request: PlanRequest, spec: CompressSpec) -> str:
    if spec.is_structural or spec.rounds_inputs or spec.method in NOT_SERVED:
        return ""
    engine_request = request.model_copy(update={"engine": CATALOG_ENGINE})
    ratio = _ratio(engine_request, spec, "bf16", spec.weight_dtype)
    return f"{speed_words(ratio)} in {CATALOG_NAME}" if ratio else ""


def _ratio(
    request: PlanRequest, spec: CompressSpec, before: str | None, after: str | None
) -> float | None:
    """Return the single-user decode speed with ``after`` weights over that with ``before``."""
    times = [_seconds_per_token(request, spec, dtype) for dtype in (before, after)]
    return times[0] / times[1] if times[0] and times[1] else None


def _seconds_per_token(
    request: PlanRequest, spec: CompressSpec, dtype: str | None
) -> float | None:
    if dtype is None:
        return None
    workload = GenerateWorkload(
        batch_size=1, input_tokens=spec.prompt_tokens, output_tokens=spec.output_tokens
    )
    strategy = Strategy.model_validate({"weight_dtype": dtype})
    estimate = estimate_as_planned(request, workload, strategy)
    return estimate.performance.tpot_seconds if estimate else None
