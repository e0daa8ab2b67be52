"""Plans made by hand, so that what an export says depends on nothing but the plan."""

from planner.exports.export import ExportCase
from planner.exports.registry import export_case
from planner.specs.estimate import PlannedStrategy, PlanRequest
from planner.specs.workload import Strategy
from tests.planner.asking import LLAMA_8B

SERVE = {"kind": "serve", "input_tokens": 1000, "output_tokens": 200, "concurrency": 64}
TRAIN = {"kind": "train", "sequence_length": 4096, "global_batch_size": 64, "method": "full"}
TRAINED = {
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "compute_dtype": "bf16",
    "activation_recomputation": "none",
}
GIB = 1024**3
SERVED = {"ttft_seconds": 0.25, "tpot_seconds": 0.02, "tokens_per_second": 2500.0}
STEPPED = {"step_seconds": 4.0, "tokens_per_second": 65536.0, "duration_seconds": 86400.0}


def made(
    workload: dict | None = None,
    *,
    model: str = LLAMA_8B,
    engine: str = "vllm",
    device: str = "h100-sxm-80gb",
    nodes: int = 1,
    devices_per_node: int = 8,
    memory: dict | None = None,
    holds: int | None = None,
    **strategy,
) -> ExportCase:
    """Return a case with the given strategy and figures that nobody computed.

    ``holds`` is the number of requests that its memory holds at once.
    """
    work = workload or SERVE
    cluster = {"device": device, "nodes": nodes, "devices_per_node": devices_per_node}
    speeds = STEPPED if work["kind"] == "train" else SERVED
    held = {"per_device_peak_bytes": 40 * GIB, "capacity_bytes": 80 * GIB}
    plan = PlannedStrategy(
        fits=True,
        memory={**held, "breakdown_bytes": {"weights": 15 * GIB}, "per_stage_peak_bytes": [1]}
        | (memory or {}),
        performance={**speeds, "max_concurrency": holds},
        interval={name: (value * 0.8, value * 1.25) for name, value in speeds.items()},
        error_class="same family",
        bound_by="compute",
        strategy=Strategy.model_validate(strategy),
        engine=engine,
        calibration="test",
        cluster=cluster,
    )
    request = PlanRequest(model=model, cluster=cluster, workload=work)
    return export_case(request, plan)


def trained(**fields) -> ExportCase:
    """Return a training case; the strategy's sizes are the caller's."""
    workload = {**TRAIN, **fields.pop("workload", {})}
    return made(workload, **{"engine": "torch", **TRAINED, **fields})
