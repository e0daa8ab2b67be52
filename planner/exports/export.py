"""What exports share: files, replicas behind a router, formats an engine loads."""

import math
import re
import shlex
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.catalog.engines import engine_name, get_engine, refusal, sixteen_bit_dtype
from planner.catalog.model_names import find
from planner.cost.weights import WIDE
from planner.specs.base import Dtype, JsonObject, PlannerError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import Estimate, EstimateRequest, PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.units import HOUR
from planner.specs.workload import (
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.techniques.registry import Case
from planner.workload.cluster import resolve_cluster, resolve_device
from planner.workload.device_groups import group_replicas, node_groups_of
from planner.workload.disaggregate import ReplicaShare, replica_shares
from planner.workload.inference_memory import longest_request
from planner.workload.layouts import (
    has_separate_replicas,
    requested_layout,
    shard_width_rules,
    supported_size_rules,
    weight_blocks,
)
from planner.workload.option_rules import option_rules
from planner.workload.resolve import filled_layout, is_stored_as, resolve
from planner.workload.setting import Setting
from planner.workload.training_memory import FUSED_METHODS

# ---------------------------------------------------------------------------
# Input and output of an export: the plan, its predicted figures, text and notes.
# ---------------------------------------------------------------------------


# Input of an export: the model by name and shape, the plan, the workload, the device.


# Every node has its rank, and connects to the first node at this address and port.
MASTER, PORT, RANK = "$MASTER_ADDR", 29500, "$NODE_RANK"
# Port of a started server, also used by its measurement.
SERVING_PORT = 8000
# Of the tokens that the cache is predicted to hold, those that one request may take: a server
# refuses to start if the cache is smaller than its longest request.
POOL_SHARE = 0.8
LENGTH_STEP, SHORT_STEP = 1024, 256
# How published checkpoints of a format are usually named.
CHECKPOINT_LABELS = {"int4": "AWQ", "int8": "W8A8", "fp8": "FP8", "nvfp4": "NVFP4"}
# Types of models whose repositories bring their configuration or tokenizer as Python, which tools
# run with --trust-remote-code alone. Source: vLLM, tests/models/registry.py (2026-03,
# trust_remote_code=True), without those that transformers 5 loads itself; for Kimi-K2 also its
# docs/deploy_guidance.md.
REMOTE_CODE = frozenset(
    {
        *("kimi_k2", "kimi_linear", "qwen", "baichuan", "chatglm", "internlm", "internlm2"),
        *("bailing_moe_v2", "bailing_hybrid", "hunyuan_v1_moe", "minimax_m2", "mimo"),
        *("mimo_v2_flash", "nemotron-nas", "interns1", "internvl_chat"),
    }
)


@dataclass(frozen=True)
class ExportCase:
    """One plan to export; ``model`` is the name or path that the tool loads."""

    model: str
    shape: ModelSpec
    device: DeviceSpec
    plan: PlannedStrategy
    workload: Workload

    @property
    def strategy(self) -> Strategy:
        """Return the plan's strategy with all fields filled."""
        return self.plan.strategy

    @property
    def offload(self) -> OffloadSpec:
        """Return the plan's offloading, nothing by default."""
        return self.strategy.offload or OffloadSpec()

    @property
    def devices(self) -> int:
        """Return the number of devices that the plan uses."""
        size = self.size
        model = size("tensor") * size("pipeline") * size("context") * self.attention_ranks
        return size("data") * model

    @property
    def hardware(self) -> str:
        """Return the number of devices of each kind, by name."""
        counts = [(self.devices, self.device.name or self.device.id)]
        if self.plan.cluster.other_nodes:
            groups = node_groups_of(resolve_cluster(self.plan.cluster))
            sized = [(group.num_devices, resolve_device(group.device)) for group in groups]
            counts = [(number, device.name or device.id) for number, device in sized]
        return " + ".join(f"{number} x {name}" for number, name in counts)

    @property
    def nodes(self) -> int:
        """Return the number of nodes for the used devices."""
        return -(-self.devices // self.plan.cluster.devices_per_node)

    @property
    def devices_per_node(self) -> int:
        """Return the number of used devices per node."""
        return -(-self.devices // self.nodes)

    def size(self, axis: str) -> int:
        """Return a parallel size by axis (``tensor``, ``data`` …), at least 1."""
        return getattr(self.strategy, f"{axis}_parallel_size") or 1

    def memory_share(self, engine: str) -> float | None:
        """Return the share of memory that the plan sets, if its figures are for this engine."""
        return self.strategy.gpu_memory_utilization if self.plan.engine == engine else None

    @property
    def is_stored(self) -> bool:
        """Return whether the plan runs the checkpoint in the format of its files."""
        named = self.strategy.quantization
        known = (
            not named or named == self.shape.quantization or self.shape.weight_dtype not in WIDE
        )
        return known and is_stored_as(self.shape, self.strategy.weight_dtype or "bf16")

    def checkpoint(self, at_load: Container[str]) -> str:
        """Return the model to start: as named, or the path of a checkpoint in another format.

        ``at_load`` are the weight formats that the engine makes while it loads the model.
        """
        weight = self.strategy.weight_dtype or "bf16"
        if self.is_stored or (weight in at_load and self.shape.weight_dtype in {None, *WIDE}):
            return self.model
        name = self.model.rstrip("/").rsplit("/", 1)[-1]
        if self.gguf_type:
            return f"./{name}-{self.gguf_type}.gguf"
        label = (self.strategy.quantization or CHECKPOINT_LABELS.get(weight, weight)).upper()
        return f"./{name}-{label.replace(':', '-')}"

    @property
    def gguf_type(self) -> str:
        """Return the type of the GGUF file that the plan names, as ``Q4_K_M``, else nothing."""
        method, _, kind = (self.strategy.quantization or "").partition(":")
        return kind.upper() if method == "gguf" else ""

    @property
    def runs_remote_code(self) -> bool:
        """Return whether the model loads only with the Python of its repository."""
        return self.shape.model_type in REMOTE_CODE

    @property
    def half(self) -> Dtype:
        """Return the dtype of what is not quantised."""
        for dtype in (self.strategy.weight_dtype, self.strategy.activation_dtype):
            if dtype in WIDE and dtype is not None:
                return dtype
        return sixteen_bit_dtype(self.device)

    @property
    def attention_ranks(self) -> int:
        """Return the attention data-parallel ranks of a replica."""
        return self.strategy.attention_data_parallel_size or 1

    @property
    def typical_tokens(self) -> int | None:
        """Return the tokens of one typical request, prompt and answer together."""
        if isinstance(self.workload, ServeWorkload | GenerateWorkload):
            return self.workload.input_tokens + self.workload.output_tokens
        return None

    @property
    def context_tokens(self) -> int | None:
        """Return the maximum tokens of one request.

        Without a stated maximum it is four times the typical request, limited by the model's
        context and by what the plan's cache holds. A fixed batch has no longer request.
        """
        typical = self.typical_tokens
        if typical is None or not isinstance(self.workload, ServeWorkload):
            return typical
        longest = longest_request(self.shape, self.workload)
        if self.workload.max_request_tokens:
            return longest
        return max(typical, min(longest, self._cache_capacity_tokens or longest))

    @property
    def accepted_tokens(self) -> int | None:
        """Return the maximum tokens of one request at a server with one pool of cache blocks.

        It is the stated one, else what the pool holds, at most the context of the model's config.
        With chunked prefill off a step holds the longest request.
        """
        tokens = self.context_tokens
        if tokens is None:
            return None
        context, held = self.shape.max_position_embeddings, self._cache_capacity_tokens
        if held is not None and self._takes_what_memory_holds:
            tokens = max(self.typical_tokens or 1, min(context, _rounded(POOL_SHARE * held)))
            step = self.strategy.max_batch_tokens
            if self.strategy.chunked_prefill is False and step:
                tokens = min(tokens, step)
        return min(tokens, context)

    @property
    def _takes_what_memory_holds(self) -> bool:
        """Return whether the longest request is open: the figures depend on it nowhere.

        A workspace of split attention grows with the context that the server is started with.
        """
        if not isinstance(self.workload, ServeWorkload) or self.workload.max_request_tokens:
            return False
        splits = get_engine(self.plan.engine, self.device.kind).attention_partition
        return not (splits and (self.device.vendor or "").lower() == "amd")

    @property
    def held_per_replica(self) -> int | None:
        """Return the typical requests that one replica's memory holds at once, if known."""
        most = self.plan.performance.max_concurrency
        return None if most is None else max(1, most // self.size("data"))

    @property
    def _cache_capacity_tokens(self) -> int | None:
        """Return the tokens that one rank's cache holds at least: those of its whole requests.

        A prefix that requests share is held once.
        """
        held, typical = self.held_per_replica, self.typical_tokens
        if held is None or typical is None or not isinstance(self.workload, ServeWorkload):
            return None
        shared = int(self.workload.input_tokens * self.workload.prefix_share_ratio)
        return shared + max(1, held // self.attention_ranks) * (typical - shared)

    @property
    def sequences(self) -> int | None:
        """Return the concurrent requests over all replicas, if decided."""
        if isinstance(self.workload, ServeWorkload):
            return self.workload.concurrency
        return getattr(self.workload, "batch_size", None)

    @property
    def sequences_per_replica(self) -> int | None:
        """Return the concurrent requests of one data-parallel replica."""
        return None if self.sequences is None else -(-self.sequences // self.size("data"))

    @property
    def sequences_per_rank(self) -> int | None:
        """Return the concurrent requests of one attention data-parallel rank of a replica."""
        requests = self.sequences_per_replica
        return None if requests is None else -(-requests // self.attention_ranks)

    @property
    def running_per_rank(self) -> int | None:
        """Return the requests that one rank is told to run at once: at most a step's tokens.

        Servers refuse to start with more; a larger batch queues.
        """
        requests, step = self.sequences_per_rank, self.strategy.max_batch_tokens
        return requests if requests is None or not step else min(requests, step)

    @property
    def offloaded_weight_bytes(self) -> float:
        """Return one device's weights in host memory, in bytes."""
        share = self.offload.weights_cpu
        on_device = self.plan.memory.breakdown_bytes.get("weights", 0)
        if share < 1:
            return on_device * share / (1 - share)
        copies = get_engine(self.plan.engine, self.device.kind).host_copy_ratio
        return (self.plan.memory.host_bytes or 0) / self.devices / copies


def _rounded(tokens: float) -> int:
    """Return tokens as whole steps of a length that people write.

    >>> _rounded(100_000.0), _rounded(900.0)
    (99328, 768)
    """
    step = LENGTH_STEP if tokens >= LENGTH_STEP else SHORT_STEP
    return int(tokens // step) * step


# A plan's predicted figures with intervals, for comparison with a measurement.


SERVING = (
    "ttft_seconds",
    "tpot_seconds",
    "output_tokens_per_second",
    "requests_per_second",
)
CLAIMS = {
    "serve": SERVING,
    "generate": ("ttft_seconds", "tpot_seconds", "latency_seconds", "output_tokens_per_second"),
    "train": ("step_seconds", "tokens_per_second"),
    "compress": ("duration_seconds",),
}
# Alternative names, used if the first figure is absent.
ALIASES = {"output_tokens_per_second": "tokens_per_second"}


def claims_of(estimate: Estimate, kind: str) -> JsonObject:
    """Return each predicted figure with the bounds of its 80 % interval, if any."""
    claims: JsonObject = {}
    for name in CLAIMS[kind]:
        for attribute in (name, ALIASES.get(name, name)):
            value = getattr(estimate.performance, attribute)
            if value is not None and name not in claims:
                low, high = estimate.interval.get(attribute, (None, None))
                claims[name] = {"value": value, "low": low, "high": high}
    return claims


# Names and units of the figures, as people write them.
WORDS = {
    "ttft_seconds": ("time to first token", "s"),
    "tpot_seconds": ("time per output token", "s"),
    "output_tokens_per_second": ("output", "tokens/s"),
    "requests_per_second": ("throughput", "requests/s"),
    "latency_seconds": ("whole batch", "s"),
    "step_seconds": ("step", "s"),
    "tokens_per_second": ("training", "tokens/s"),
    "duration_seconds": ("duration", "s"),
}


def prediction_line(case: ExportCase) -> str:
    """Return the prediction as one line, for the header of an export."""
    memory = case.plan.memory
    figures = [
        f"{WORDS[name][0]} {claim['value']:.4g} {WORDS[name][1]}{_bounds(claim)}"
        for name, claim in claims_of(case.plan, case.workload.kind).items()
    ]
    peak = f"{memory.per_device_peak_bytes / 1024**3:.1f} GiB"
    limit = f"{memory.capacity_bytes / 1024**3:.1f} GiB"
    return "; ".join([*figures, f"peak {peak} of {limit} per device"])


Notes = tuple[str, ...]


def failure_lines(case: ExportCase) -> Notes:
    """Return what failures cost a long training and the save interval to set, for a header."""
    found = case.plan.reliability
    if found is None:
        return ()
    mtbf, wall = found.mean_time_between_failures_seconds / HOUR, found.wall_seconds / HOUR
    low, high = (end / HOUR for end in found.wall_interval)
    every = f"{found.checkpoint_interval_steps} steps ({found.checkpoint_interval_seconds:.0f} s)"
    bounds = f"80 %: {low:.4g} to {high:.4g}"
    return (
        f"failures: 1 in {mtbf:.3g} h, goodput {found.goodput_ratio:.1%}, {wall:.4g} h ({bounds})",
        f"save a checkpoint every {every}",
    )


def _bounds(claim: JsonObject) -> str:
    if claim["low"] is None:
        return ""
    return f" (80 %: {claim['low']:.4g} to {claim['high']:.4g})"


LINE_CHARACTERS = 96
PLAIN = r"[\w+=:,./-]*"
OWN_VARIABLE = re.compile(rf"{PLAIN}(?:\$(?:MASTER_ADDR|NODE_RANK|@){PLAIN})+", re.ASCII)


@dataclass(frozen=True)
class Export:
    """A plan in another tool's format; ``notes`` state assumptions and omissions."""

    key: str
    title: str
    file_name: str
    text: str
    notes: Notes
    measure: str


@dataclass(frozen=True)
class Format:
    """An export format; ``comment`` is its comment prefix, None without comments.

    ``at_load`` are the formats that a server makes of a 16-bit checkpoint while loading it, None
    of a tool that starts no checkpoint as it is stored.
    """

    key: str
    title: str
    file_name: str
    body: Callable[[ExportCase], str]
    notes: Callable[[ExportCase], Notes]
    comment: str | None = "# "
    at_load: Container[str] | None = None

    def text(self, case: ExportCase, more: Notes = ()) -> str:
        """Return the complete file for a plan."""
        return self.with_body(case, self.body(case), (*more, *self.notes(case)))

    def with_body(self, case: ExportCase, body: str, notes: Notes) -> str:
        """Return the complete file: header with prediction and notes, then the body."""
        if self.comment is None:
            return body
        device = case.device.name or case.device.id
        used = case.hardware if case.devices > 1 else device
        lines = [
            f"{case.model} on {used}, planned for {case.plan.engine}",
            f"predicted: {prediction_line(case)}",
            *failure_lines(case),
            *(f"note: {note}" for note in notes),
        ]
        return with_header(body, lines, self.comment)


def with_header(body: str, lines: Iterable[str], comment: str) -> str:
    """Return a text with comment lines at its top, below a shebang if there is one."""
    # A line break in a name must not end the comment and start a command.
    head = "".join(f"{comment}{' '.join(line.splitlines())}\n" for line in lines)
    if body.startswith("#!"):
        shebang, rest = body.split("\n", 1)
        return f"{shebang}\n{head}{rest}"
    return head + body


def size_flags(*sizes: tuple[str, int]) -> list[str]:
    """Return the flags of the sizes beyond 1, which is every tool's default."""
    return [word for flag, size in sizes if size > 1 for word in (flag, str(size))]


def shell_lines(command: list[str]) -> str:
    """Return a command as shell text, one option per line; only known variables are expanded.

    Any other text with a dollar comes from a name or a path and is quoted literally.
    """
    lines: list[str] = []
    for word in command:
        quoted = f'"{word}"' if OWN_VARIABLE.fullmatch(word) else shlex.quote(word)
        starts = word.startswith("--") or not lines or "=" in lines[-1].split()[-1]
        value_fits = not starts and len(lines[-1]) + len(quoted) < LINE_CHARACTERS
        if value_fits:
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n  ".join(lines) + "\n"


# ---------------------------------------------------------------------------
# The formats that can express a strategy, determined without loading the formats.
#
# The search uses this for every plan; the formats are loaded only for an export.
# ---------------------------------------------------------------------------


SERVER_NAMES = ("vllm", "sglang", "tensorrt_llm", "llama_cpp")
STAGED = "vllm"  # the only server that supports an uneven split of the layers
WHOLE_WEIGHTS = frozenset({"pretrain", "full"})
# Methods without a public trainer: only the product's jobs run them.
OWN_METHODS = frozenset({"qft", "alphatuning"})
FULLY_SHARDED = 3  # ZeRO's last stage
# The engine of each trainer whose name differs.
ENGINE_OF_TRAINER = {"torchrun": "torch", "accelerate": "transformers"}
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


def configuration_of(model_id: str) -> tuple[str, str] | None:
    """Return torchtitan's module and function for a model of the same shape, None without one."""
    found = find(model_id)
    if found is None or found.stated is not None:
        return None
    return CONFIGURATIONS.get(found.entry.id.lower())


def formats_for(case: Case, strategy: Strategy, engine: str | None = None) -> tuple[str, ...]:
    """Return the formats that can express a strategy and run on its device, its engine's first."""
    if case.workload.kind == "compress":
        return ()
    if is_heterogeneous(case.cluster, case.workload):
        return heterogeneous_servers(case, strategy, _servers)
    training = isinstance(case.workload, TrainWorkload)
    if isinstance(case.workload, TrainWorkload) and case.workload.compares:
        return ()  # the trainers of these formats are supervised
    if training:
        named = _trainers(case, strategy)
    else:
        named = [name for name in _servers(case) if _accepts(name, case, strategy)]
        named.sort(key=lambda name: name != engine_name(engine))
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
        *supported_size_rules(case.model, engine, layout, separate=separate),
        *shard_width_rules(case.model, engine, layout, blocks, case.device),
    )
    return all(rule.holds for rule in rules) and _pairs_hold(name, case, strategy)


def _pairs_hold(name: str, case: Case, strategy: Strategy) -> bool:
    """Return whether an engine's own validation takes the options of a strategy together."""
    engine = get_engine(name, case.device.kind, training=isinstance(case.workload, TrainWorkload))
    layout = filled_layout(requested_layout(strategy, case.cluster.num_devices), strategy)
    rules = option_rules(case.model, case.workload, engine, strategy, layout)
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
        "deepspeed": on_gpu and is_public and _deepspeed_runs(method, is_split=is_split),
        "torchtitan": on_gpu and trains_all_weights and bool(configuration_of(case.model.id)),
        "megatron": on_gpu and trains_all_weights,
    }
    return [
        name
        for name, applies in applicable.items()
        if applies and _pairs_hold(ENGINE_OF_TRAINER.get(name, name), case, strategy)
    ]


def _script_runs(method: str, strategy: Strategy) -> bool:
    """Return whether the torchrun export's script runs a layout.

    It offloads by FSDP alone, which moves sharded weights with their states; quantised weights are
    sharded in ZeRO 3 alone.
    """
    is_sharded = bool(strategy.zero_stage) and (strategy.data_parallel_size or 1) > 1
    offload = strategy.offload
    if method == "qlora" and strategy.zero_stage != FULLY_SHARDED:
        return not is_sharded and not strategy.offload_places
    if offload is None or not strategy.offload_places:
        return True
    moves = offload.weights_cpu > 0 and offload.optimizer != "nvme" and not offload.weights_disk
    return is_sharded and moves and not offload.activations_cpu


def _deepspeed_runs(method: str, *, is_split: bool) -> bool:
    """Return whether DeepSpeed runs a layout.

    Adapters run under ZeRO alone: a PipelineModule of them is a program of its own.

    Source: PEFT's documentation on DeepSpeed.
    """
    return method in WHOLE_WEIGHTS | FUSED_METHODS or not is_split


def is_heterogeneous(cluster: ClusterSpec, workload: Workload) -> bool:
    """Return whether a plan serves on mixed nodes."""
    return bool(cluster.other_nodes) and isinstance(workload, ServeWorkload | GenerateWorkload)


def heterogeneous_servers(
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
    widths = {group.devices_per_node for group in node_groups_of(setting.cluster)}
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


# ---------------------------------------------------------------------------
# Serving plans as several servers: replicas, and one server or stage per kind of node.
# ---------------------------------------------------------------------------


# The variable that shows a process its devices, by vendor.
VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
VISIBLE |= {"intel": "ZE_AFFINITY_MASK"}
PORT_WORD = "SERVER_PORT"
BALANCER = "put a balancer before them"


def servers_per_node(case: ExportCase, servers: int) -> int:
    """Return how many of the plan's servers one node runs, at least 1."""
    return max(1, servers // case.nodes)


def servers_text(case: ExportCase, command: Sequence[str], servers: int) -> str:
    """Return the shell text that starts a node's servers, numbered from the first port on.

    ``command`` starts one of them, without its port; a single server keeps the usual port.
    """
    here = servers_per_node(case, servers)
    if here <= 1:
        return shell_lines([*command, "--port", str(SERVING_PORT)])
    devices = case.devices_per_node // here
    variable = VISIBLE.get((case.device.vendor or "").lower())
    start = shell_lines([*command, "--port", PORT_WORD]).rstrip("\n")
    start = start.replace(PORT_WORD, f"$(({SERVING_PORT} + server))")
    own = f"$(seq -s , $((server * {devices})) $((server * {devices} + {devices - 1})))"
    shown = [f"export {variable}={own}"] if variable and case.device.kind == "gpu" else []
    numbers = " ".join(str(number) for number in range(here))
    return "\n".join([f"for server in {numbers}; do", *shown, f"{start} &", "done", "wait", ""])


def servers_notes(case: ExportCase, servers: int) -> tuple[str, ...]:
    """Return how to reach several servers."""
    if servers <= 1:
        return ()
    here = servers_per_node(case, servers)
    last = SERVING_PORT + here - 1
    where = f"on ports {SERVING_PORT} to {last}" if here > 1 else f"on port {SERVING_PORT}"
    on_nodes = f" of each of {case.nodes} nodes" if case.nodes > 1 else ""
    return (f"{servers} servers, {where}{on_nodes}: {BALANCER}",)


# Export a serving plan on mixed nodes: one server per kind of node, or one pipeline.
#
# Replicas of different speed are separate servers behind a router that distributes the requests.
# One file starts all of them, and a variable selects the kind on each node. Only vLLM supports a
# pipeline over several kinds, because it accepts the layers of each stage.


COUNTED = ("concurrency", "burst_requests", "batch_size")


def heterogeneous_parts(case: ExportCase) -> tuple[ReplicaShare, ...]:
    """Return the replicas of a plan by kind of node; empty for uniform clusters."""
    plan, workload = case.plan, case.workload
    if not is_heterogeneous(plan.cluster, workload):
        return ()
    setting = setting_of(case.shape, plan.cluster, workload, plan.strategy, plan.engine)
    return replica_shares(setting, setting.workload)  # type: ignore[arg-type]  # see is_heterogeneous


def heterogeneous_body(chosen: Format, case: ExportCase, parts: tuple[ReplicaShare, ...]) -> str:
    """Return the body of a file: one server per kind, selected on each node."""
    if len(parts) <= 1:  # a pipeline over both kinds is one server
        return chosen.body(case)
    return "".join(
        f'if [ "$KIND" = {number} ]; then\n{chosen.body(_part_case(case, part))}fi\n'
        for number, part in enumerate(parts, start=1)
    )


def heterogeneous_notes(
    chosen: Format, case: ExportCase, parts: tuple[ReplicaShare, ...]
) -> Notes:
    """Return notes on settings that the export leaves to the user."""
    if len(parts) <= 1:  # a pipeline over both kinds is one server
        return chosen.notes(case)
    kinds = (
        f"KIND={number} starts {part.title} for {part.share:.0%} of the requests"
        for number, part in enumerate(parts, start=1)
    )
    part_notes = (note for part in parts for note in chosen.notes(_part_case(case, part)))
    start = "start it on every node as its kind, behind a router that shares the requests"
    return (f"{start}: {'; '.join(kinds)}", *dict.fromkeys(part_notes))


def _part_case(case: ExportCase, part: ReplicaShare) -> ExportCase:
    """Return the replicas of one kind as their own plan."""
    plan, setting = case.plan, part.setting
    layers = tuple(int(float(share.layers)) for share in setting.shares)
    staged = {"per_stage_layers": layers if len(layers) > 1 else None}
    own: JsonObject = {
        "cluster": setting.cluster,
        "strategy": plan.strategy.model_copy(update={"data_parallel_size": part.dealt.replicas}),
        "memory": plan.memory.model_copy(update=staged),
    }
    load = part.load(case.workload)  # type: ignore[type-var]  # only what serves has parts
    counts = {name: math.ceil(n) for name in COUNTED if (n := getattr(load, name, None))}
    return replace(
        case,
        device=setting.device,
        plan=plan.model_copy(update=own),
        workload=load.model_copy(update=counts),
    )
