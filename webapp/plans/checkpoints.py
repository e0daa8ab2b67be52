"""What an engine starts for a plan: the checkpoint as it is stored, or another one."""

from typing import NamedTuple

from planner.catalog.engines import get_engine
from planner.errors import PlannerError
from planner.exports import sglang, vllm
from planner.exports.export import CHECKPOINT_LABELS, ExportCase
from planner.exports.llama_cpp import gguf_type
from planner.exports.registry import export_case
from planner.specs.plan import PlanAnswer, PlannedStrategy
from webapp.plans.words import dtype_words

# Formats that an engine makes of a 16-bit checkpoint while loading it.
AT_LOAD = {"vllm": vllm.AT_LOAD, "sglang": sglang.AT_LOAD, "tensorrt_llm": {}}
GGUF_ENGINE = "llama_cpp"
LEAD = " than the first plan"


class Start(NamedTuple):
    """An engine's title, and what a plan needs besides the checkpoint as it is stored, or ""."""

    engine: str
    need: str


def start_of(answer: PlanAnswer, plan: PlannedStrategy) -> Start | None:
    """Return what a plan starts, None for engines that convert any checkpoint by themselves."""
    if answer.request is None or plan.engine not in {*AT_LOAD, GGUF_ENGINE}:
        return None
    try:
        case = export_case(answer.request, plan)
        title = get_engine(plan.engine, case.device.kind).title
    except PlannerError:  # an answer older than the current catalogs
        return None
    return Start(title, _need(case, plan.engine or ""))


def _need(case: ExportCase, engine: str) -> str:
    if engine == GGUF_ENGINE:
        return f"needs a GGUF file of type {gguf_type(case)}"
    if case.is_stored:
        return ""
    weights = dtype_words(case.strategy.weight_dtype)
    if case.checkpoint(AT_LOAD[engine]) == case.model:
        return f"quantised to {weights} while loading"
    label = CHECKPOINT_LABELS.get(case.strategy.weight_dtype or "", weights)
    return f"needs a checkpoint in {weights}" + (f" ({label})" if label != weights else "")


def start_words(answer: PlanAnswer) -> str:
    """Return what the first plan starts, and a faster one that needs something else, or ""."""
    start = start_of(answer, answer.plans[0])
    if start is None:
        return ""
    if start.need:
        return f"Planned for {start.engine}: {start.need}."
    words = f"Planned for {start.engine}, which starts the checkpoint as it is stored."
    return words + _faster(answer)


def _faster(answer: PlanAnswer) -> str:
    """Return the next plan that is faster than the first one and needs something else, or ""."""
    for plan in answer.plans[1:]:
        faster = next((each for each in plan.reasons if each.endswith(f"faster{LEAD}")), "")
        start = start_of(answer, plan) if faster else None
        if start is not None and start.need:
            weights = f"{dtype_words(plan.strategy.weight_dtype)} weights"
            return f" {weights} would be {faster.removesuffix(LEAD)} ({start.need})."
    return ""
