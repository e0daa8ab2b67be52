"""Which formats a plan can be exported to, and the door to all of them."""

from collections.abc import Callable

from planner.catalog.engines import Engine
from planner.errors import BadRequestError
from planner.exports.torchrun import export_torchrun
from planner.exports.vllm import export_vllm
from planner.specs.plan import PlannedStrategy
from planner.specs.workload import Workload

Exporter = Callable[[str, PlannedStrategy, Workload], str]
EXPORTERS: dict[str, Exporter] = {"vllm": export_vllm, "torchrun": export_torchrun}


def formats_for(workload: Workload, engine: Engine) -> tuple[str, ...]:
    """Return the formats that make sense for a workload on an engine."""
    if workload.kind == "train":
        return ("torchrun",)
    if workload.kind == "serve" and engine.role == "serving":
        return ("vllm",)
    return ()


def export(format_name: str, model: str, plan: PlannedStrategy, workload: Workload) -> str:
    """Return a plan in another tool's words.

    Raises:
        BadRequestError: there is no such format.
    """
    if format_name not in EXPORTERS:
        raise BadRequestError(
            f"no export format {format_name!r}: choose among {', '.join(EXPORTERS)}", "format"
        )
    return EXPORTERS[format_name](model, plan, workload)
