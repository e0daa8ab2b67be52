"""The formats that can express a strategy, determined without loading the formats.

The search uses this for every plan; the formats are loaded only for an export.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.catalog.engine_limits import refusal
from planner.catalog.engines import engine_name, get_engine
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.techniques.registry import Case
from planner.workload.device_groups import group_replicas, groups_of
from planner.workload.layouts import (
    degree_rules,
    has_separate_replicas,
    requested_layout,
    weight_blocks,
    width_rules,
)
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.training_memory import FUSED_METHODS

SERVER_NAMES = ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
STAGED = "vllm"  # the only server that supports an uneven split of the layers
WHOLE_WEIGHTS = frozenset({"pretrain", "full"})
# Methods without a public trainer: only the product's jobs run them.
OWN_METHODS = frozenset({"qft", "alphatuning"})
PIPELINED_ZERO_STAGES = 2  # DeepSpeed's pipeline refuses this ZeRO stage and those above
# Models with a full-size configuration in torchtitan 0.3: module and function.
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


def formats_for(case: Case, strategy: Strategy, engine: str | None = None) -> tuple[str, ...]:
    """Return the formats that can express a strategy and run on its device."""
    if case.workload.kind == "compress":
        return ()
    if is_unlike(case.cluster, case.workload):
        return unlike_servers(case, strategy, _servers)
    training = isinstance(case.workload, TrainWorkload)
    named = _trainers(case, strategy) if training else accepting_servers(case, strategy)
    managers = ["slurm", "kubernetes", *(["compose"] if case.cluster.nodes == 1 else [])]
    if (case.device.vendor or "").lower() == "apple":
        managers = []  # they give Linux processes their devices
    started = {"torchrun", "megatron"} if training else {server_of(engine, case.device)}
    return (*named, *(managers if started & set(named) else ()))


def server_of(engine: str | None, device: DeviceSpec) -> str:
    """Return the serving engine that a cluster manager starts: the plan's, or the usual one."""
    name = engine_name(engine)
    if name in SERVER_NAMES:
        return name
    return "llama_cpp" if device.kind in {"cpu", "uma"} else "vllm"


def accepting_servers(case: Case, strategy: Strategy) -> list[str]:
    """Return the servers that accept a strategy on the devices of a case."""
    return [name for name in _servers(case) if _accepts(name, case, strategy)]


def _accepts(name: str, case: Case, strategy: Strategy) -> bool:
    engine = get_engine(name, case.device.kind)
    dtype = strategy.weight_dtype or "bf16"
    activation = strategy.activation_dtype or "bf16"
    formats = (dtype, activation, strategy.kv_cache_dtype)
    if refusal(engine, case.device, case.model, formats, strategy.quantization):
        return False
    layout = requested_layout(strategy, case.cluster.num_devices)
    separate = has_separate_replicas(strategy, case.cluster)
    blocks = weight_blocks(case.model, strategy)
    rules = (
        *degree_rules(case.model, engine, layout, separate=separate),
        *width_rules(case.model, engine, layout, blocks, case.device),
    )
    return all(rule.holds for rule in rules)


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
    is_split = any((getattr(strategy, f"{axis}_parallel_size") or 1) > 1 for axis in sizes)
    method = case.workload.method if isinstance(case.workload, TrainWorkload) else ""
    trains_all_weights = method in WHOLE_WEIGHTS
    on_gpu, is_public = case.device.kind == "gpu", method not in OWN_METHODS
    applicable = {
        "torchrun": is_public and not is_split and _script_runs(method, strategy),
        "accelerate": is_public and not is_split,
        "deepspeed": on_gpu and is_public and _deepspeed_runs(method, strategy, is_split=is_split),
        "torchtitan": on_gpu and trains_all_weights and case.model.id.lower() in CONFIGURATIONS,
        "megatron": on_gpu and trains_all_weights,
    }
    return [name for name, applies in applicable.items() if applies]


def _script_runs(method: str, strategy: Strategy) -> bool:
    """Return whether the torchrun export's script runs a layout: quantised weights unsharded.

    It offloads by FSDP alone, which moves sharded weights with their states.
    """
    is_sharded = bool(strategy.zero_stage) and (strategy.data_parallel_size or 1) > 1
    offload = strategy.offload
    if method == "qlora":
        return not is_sharded and not strategy.offload_places
    if offload is None or not strategy.offload_places:
        return True
    moves = offload.weights_cpu > 0 and offload.optimizer != "nvme" and not offload.weights_disk
    return is_sharded and moves and not offload.activations_cpu


def _deepspeed_runs(method: str, strategy: Strategy, *, is_split: bool) -> bool:
    """Return whether DeepSpeed runs a layout.

    Adapters run under ZeRO alone: a PipelineModule of them is a program of its own. A pipeline
    goes with ZeRO 0 and 1.

    Sources: DeepSpeed, runtime/pipe/engine.py; PEFT's documentation on DeepSpeed.
    """
    if method not in WHOLE_WEIGHTS | FUSED_METHODS:
        return not is_split
    staged = (strategy.pipeline_parallel_size or 1) > 1
    return not staged or (strategy.zero_stage or 0) < PIPELINED_ZERO_STAGES


def is_unlike(cluster: ClusterSpec, workload: Workload) -> bool:
    """Return whether a plan serves on mixed nodes."""
    return bool(cluster.other_nodes) and isinstance(workload, ServeWorkload | GenerateWorkload)


def unlike_servers(
    case: Case, strategy: Strategy, servers_of: Callable[[Case], list[str]]
) -> tuple[str, ...]:
    """Return the servers that can express a plan on mixed nodes; cluster managers cannot."""
    try:
        setting = setting_of(case.model, case.cluster, case.workload, strategy)
    except PlannerError:
        return ()
    groups = group_replicas(setting)
    kinds = {place.device.id: place.device for one in groups for place in one.places}
    servers_by_kind = [servers_of(replace(case, device=device)) for device in kinds.values()]
    common = [name for name in servers_by_kind[0] if all(name in one for one in servers_by_kind)]
    if not any(one.is_uneven for one in groups):
        return tuple(common)
    is_single_pipeline = len(groups) == 1 and groups[0].replicas == 1 and _in_equal_nodes(setting)
    return tuple(name for name in common if name == STAGED and is_single_pipeline)


def _in_equal_nodes(setting: Setting) -> bool:
    """Return whether a pipeline uses the same number of devices on each of its nodes.

    Source: vLLM, vllm/config/parallel.py (the ranks of a world are assigned evenly to its nodes).
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
    """Return a strategy on a cluster with resolved names."""
    return resolve(
        EstimateRequest(
            model=model, cluster=cluster, workload=workload, strategy=strategy, engine=engine
        )
    )
