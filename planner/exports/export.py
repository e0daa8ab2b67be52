"""Input and output of an export: the plan, its predicted figures, text and notes."""

import re
import shlex
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from planner.catalog.engine_limits import sixteen_bit_dtype
from planner.catalog.engines import EngineRole, get_engine
from planner.cost.weights import WIDE
from planner.specs.base import Dtype, JsonObject
from planner.specs.cluster import DeviceSpec
from planner.specs.estimate import Estimate, PlannedStrategy
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.workload.device_groups import groups_of
from planner.workload.formats import is_stored_as
from planner.workload.inference_memory import longest_request
from planner.workload.resolve import resolve_cluster, resolve_device

# Input of an export: the model by name and shape, the plan, the workload, the device.


GIB = 1024**3
# Every node has its rank, and connects to the first node at this address and port.
MASTER, PORT, RANK = "$MASTER_ADDR", 29500, "$NODE_RANK"
# Port of a started server, also used by its measurement.
SERVING_PORT = 8000
# How published checkpoints of a format are usually named.
CHECKPOINT_LABELS = {"int4": "AWQ", "int8": "W8A8", "fp8": "FP8", "nvfp4": "NVFP4"}
SERVED_SHARE = 0.9  # share of device memory that servers use by default


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
    def role(self) -> EngineRole:
        """Return the kind of engine that the figures are for."""
        training = isinstance(self.workload, TrainWorkload)
        return get_engine(self.plan.engine, self.device.kind, training=training).role

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
            groups = groups_of(resolve_cluster(self.plan.cluster))
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
        label = (self.strategy.quantization or CHECKPOINT_LABELS.get(weight, weight)).upper()
        return f"./{name}-{label.replace(':', '-')}"

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
        context and by the plan's cache plus free memory. A fixed batch has no longer request.
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
        """Return the maximum tokens of one request, at most the context of the model's config."""
        tokens = self.context_tokens
        return None if tokens is None else min(tokens, self.shape.max_position_embeddings)

    @property
    def _cache_capacity_tokens(self) -> int | None:
        """Return the tokens that fit in a replica's cache, including free memory."""
        cached = self.plan.memory.breakdown_bytes.get("kv_cache", 0)
        requests = self.sequences_per_replica
        if not cached or not requests or not self.typical_tokens:
            return None
        planned_tokens = -(-requests // self.attention_ranks) * self.typical_tokens
        memory = self.plan.memory
        served = self.strategy.gpu_memory_utilization or SERVED_SHARE
        spare = memory.capacity_bytes * served - memory.per_device_peak_bytes
        return int(planned_tokens * (1 + max(0.0, spare) / cached))

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
    def offloaded_weight_bytes(self) -> float:
        """Return one device's weights in host memory, in bytes."""
        share = self.offload.weights_cpu
        on_device = self.plan.memory.breakdown_bytes.get("weights", 0)
        if share < 1:
            return on_device * share / (1 - share)
        copies = get_engine(self.plan.engine, self.device.kind).host_copy_ratio
        return (self.plan.memory.host_bytes or 0) / self.devices / copies


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


def claim_words(case: ExportCase) -> str:
    """Return the prediction as one line, for the header of an export."""
    memory = case.plan.memory
    figures = [
        f"{name} {claim['value']:.4g}{_bounds(claim)}"
        for name, claim in claims_of(case.plan, case.workload.kind).items()
    ]
    peak = f"{memory.per_device_peak_bytes / 1024**3:.1f} GiB"
    limit = f"{memory.capacity_bytes / 1024**3:.1f} GiB"
    return "; ".join([*figures, f"peak {peak} of {limit} per device"])


def _bounds(claim: JsonObject) -> str:
    if claim["low"] is None:
        return ""
    return f" (80 %: {claim['low']:.4g} to {claim['high']:.4g})"


Notes = tuple[str, ...]
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
    """An export format; ``comment`` is its comment prefix, None without comments."""

    key: str
    title: str
    file_name: str
    body: Callable[[ExportCase], str]
    notes: Callable[[ExportCase], Notes]
    comment: str | None = "# "

    def text(self, case: ExportCase, more: Notes = ()) -> str:
        """Return the complete file for a plan."""
        return self.with_body(case, self.body(case), (*more, *self.notes(case)))

    def with_body(self, case: ExportCase, body: str, notes: Notes) -> str:
        """Return the complete file: header with prediction and notes, then the body."""
        if self.comment is None:
            return body
        return with_head(body, head_lines(case, notes), self.comment)


def head_lines(case: ExportCase, notes: Notes) -> list[str]:
    """Return the header lines of an export: model, hardware, prediction, notes."""
    device = case.device.name or case.device.id
    used = case.hardware if case.devices > 1 else device
    return [
        f"{case.model} on {used}, planned for {case.plan.engine}",
        f"predicted: {claim_words(case)}",
        *(f"note: {note}" for note in notes),
    ]


def with_head(body: str, lines: Iterable[str], comment: str) -> str:
    """Return a text with comment lines at its top, below a shebang if there is one."""
    # A line break in a name must not end the comment and start a command.
    head = "".join(f"{comment}{' '.join(line.splitlines())}\n" for line in lines)
    if body.startswith("#!"):
        shebang, rest = body.split("\n", 1)
        return f"{shebang}\n{head}{rest}"
    return head + body


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
