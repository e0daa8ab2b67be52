"""Which formats can say a strategy: what a plan offers, without the formats themselves.

Every plan asks this; a format's own words are loaded once somebody exports.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload, Workload
from planner.techniques.case import Case
from planner.workload.dealing import deal, groups_of
from planner.workload.resolve import resolve
from planner.workload.setting import Setting

STAGED = "vllm"  # the one server that takes an uneven split of the layers
WHOLE_WEIGHTS = frozenset({"pretrain", "full"})
# The models that torchtitan 0.3 has a full-size configuration for: its module and function.
CONFIGURATIONS = {
    "meta-llama/llama-3.1-8b": ("llama3", "llama3_8b"),
    "meta-llama/llama-3.1-70b": ("llama3", "llama3_70b"),
    "meta-llama/llama-3.1-405b": ("llama3", "llama3_405b"),
    "meta-llama/meta-llama-3-8b": ("llama3", "llama3_8b"),
    "meta-llama/meta-llama-3-70b": ("llama3", "llama3_70b"),
    "qwen/qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen/qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen/qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen/qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen/qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-ai/deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "deepseek-ai/deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b"),
}


def formats_for(case: Case, strategy: Strategy) -> tuple[str, ...]:
    """Return the formats that can say a strategy and run on its device."""
    if case.workload.kind == "compress":
        return ()
    if is_unlike(case.cluster, case.workload):
        return unlike_servers(case, strategy, _servers)
    training = isinstance(case.workload, TrainWorkload)
    named = _trainers(case, strategy) if training else _servers(case)
    managers = ["slurm", "kubernetes", *(["compose"] if case.cluster.nodes == 1 else [])]
    return (*named, *managers)


def _servers(case: Case) -> list[str]:
    kind, vendor = case.device.kind, (case.device.vendor or "").lower()
    runs = {
        "vllm": kind != "uma",
        "sglang": kind == "gpu",
        "tensorrt_llm": kind == "gpu" and vendor == "nvidia",
        "llama_cpp": kind != "accelerator",
    }
    return [name for name, applies in runs.items() if applies]


def _trainers(case: Case, strategy: Strategy) -> list[str]:
    sizes = ("tensor", "pipeline", "context", "expert")
    split = any((getattr(strategy, f"{axis}_parallel_size") or 1) > 1 for axis in sizes)
    whole = isinstance(case.workload, TrainWorkload) and case.workload.method in WHOLE_WEIGHTS
    on_gpu = case.device.kind == "gpu"
    says = {
        "torchrun": True,
        "accelerate": not split,
        "deepspeed": on_gpu,
        "torchtitan": on_gpu and whole and case.model.id.lower() in CONFIGURATIONS,
        "megatron": on_gpu and whole,
    }
    return [name for name, applies in says.items() if applies]


def is_unlike(cluster: ClusterSpec, workload: Workload) -> bool:
    """Return whether a plan serves on nodes of several kinds."""
    return bool(cluster.other_nodes) and isinstance(workload, ServeWorkload | GenerateWorkload)


def unlike_servers(
    case: Case, strategy: Strategy, servers_of: Callable[[Case], list[str]]
) -> tuple[str, ...]:
    """Return the servers that can say a plan over unlike nodes; no cluster manager can."""
    try:
        setting = setting_of(case.model, case.cluster, case.workload, strategy)
    except PlannerError:
        return ()
    dealt = deal(setting)
    kinds = {place.device.id: place.device for one in dealt for place in one.places}
    runs = [servers_of(replace(case, device=device)) for device in kinds.values()]
    everywhere = [name for name in runs[0] if all(name in one for one in runs)]
    if not any(one.is_uneven for one in dealt):
        return tuple(everywhere)
    whole = len(dealt) == 1 and dealt[0].replicas == 1 and _in_equal_nodes(setting)
    return tuple(name for name in everywhere if name == STAGED and whole)


def _in_equal_nodes(setting: Setting) -> bool:
    """Return whether a pipeline takes as many devices of each node that it reaches.

    Source: vLLM, vllm/config/parallel.py (the ranks of a world are dealt evenly to its nodes).
    """
    widths = {group.devices_per_node for group in groups_of(setting.cluster)}
    return len(widths) == 1 and setting.layout.devices % widths.pop() == 0


def setting_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    strategy: Strategy,
    engine: str | None = None,
) -> Setting:
    """Return a strategy on a cluster with every name looked up."""
    return resolve(
        EstimateRequest(
            model=model, cluster=cluster, workload=workload, strategy=strategy, engine=engine
        )
    )
