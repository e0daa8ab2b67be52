"""Published offload runs compared with the planner's figures, for the accuracy page."""

from dataclasses import dataclass, field
from functools import cache, cached_property

from planner.fitting.evidence import Row, number, table
from planner.search.placement import Placement, best_batch
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.units import GIGA, TERA
from planner.workload.costing import estimate_request

SOURCE = "flexgen-readme"
# The host of these rows, n1-standard-32; disk rate from the paper's section 6.
T4_HOST: JsonObject = {
    "device": "t4",
    "host_memory_bytes": 208_000_000_000,
    "host_memory_bandwidth_bytes_per_second": 100e9,
    "disk_bandwidth_bytes_per_second": 2e9,
    "disk_capacity_bytes": 1_500_000_000_000,
}
# The policies of the rows (FlexLLMGen benchmark/flexgen/bench_suite.py): micro-batch, shares.
POLICIES: dict[tuple[str, str], JsonObject] = {
    ("flexgen", "facebook/opt-6.7b"): {"micro_batch_size": 2},
    ("flexgen", "facebook/opt-30b"): {
        "micro_batch_size": 48,
        "offload": {"weights_cpu": 0.8, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
    ("flexgen", "facebook/opt-175b"): {
        "micro_batch_size": 32,
        "offload": {
            "weights_cpu": 0.5,
            "weights_disk": 0.5,
            "kv_disk": 1.0,
            "activations_cpu": 1.0,
        },
    },
    ("flexgen_with_compression", "facebook/opt-6.7b"): {"micro_batch_size": 72},
    ("flexgen_with_compression", "facebook/opt-30b"): {
        "micro_batch_size": 64,
        "weight_dtype": "fp16",
        "offload": {"weights_cpu": 1.0, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
    ("flexgen_with_compression", "facebook/opt-175b"): {
        "micro_batch_size": 48,
        "offload": {"weights_cpu": 1.0, "kv_cpu": 1.0, "activations_cpu": 1.0},
    },
}
# Weight placement of the other engines, by the tier named in the row.
TIERS = {"GPU": {}, "CPU": {"weights_cpu": 1.0}, "disk": {"weights_disk": 1.0}}
OVER_HOSTS = "petals"  # several servers over a network, not a placement on one host
BLOCKS = {"facebook/opt-6.7b": (2, 8, 16), "facebook/opt-30b": (96, 144, 192, 256)}
LARGEST_BLOCKS = (64, 128, 192, 256)


@dataclass(frozen=True)
class ReproducedRow:
    """One published row and its estimate."""

    engine: str
    model: str
    batch: int
    measured: float
    estimate: Estimate

    @property
    def predicted(self) -> float:
        """Return the predicted tokens per second."""
        return self.estimate.performance.tokens_per_second or 0.0

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.measured - 1

    def line(self) -> str:
        """Return the row of the accuracy page."""
        fits = "yes" if self.estimate.fits else "no"
        return (
            f"| {self.engine} | {self.model} | {self.batch} | {self.measured:.2f} | "
            f"{self.predicted:.2f} | {self.error:+.0%} | {fits} |"
        )


def offload_request(row: Row) -> JsonObject:
    """Return a row as a request with its published policy."""
    packed = row["engine"] == "flexgen_with_compression"
    tier = row["mode"].rpartition(": ")[2]
    own = POLICIES.get((row["engine"], row["model"]), {"offload": TIERS.get(tier, {})})
    narrow: JsonObject = {"weight_dtype": "int4", "group_size": 64} if packed else {}
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": T4_HOST,
        "workload": {
            "kind": "generate",
            "batch_size": int(number(row, "batch_or_concurrency")),
            "input_tokens": int(row["input_len"]),
            "output_tokens": int(row["output_len"]),
        },
        "strategy": {
            "weight_dtype": "fp16",
            "kv_cache_dtype": "int4" if packed else "fp16",
            **narrow,
            **own,
        },
        "engine": row["engine"],
    }


@cache
def reproduced_rows() -> tuple[ReproducedRow, ...]:
    """Return every single-host row of the source with its estimate."""
    rows = []
    for row in table("inference_other"):
        if row["source_id"] != SOURCE or row["engine"] == OVER_HOSTS:
            continue
        request = EstimateRequest.model_validate(offload_request(row))
        batch = int(number(row, "batch_or_concurrency"))
        answer = estimate_request(request, explain=False)
        rows.append(
            ReproducedRow(row["engine"], row["model"], batch, number(row, "value"), answer)
        )
    return tuple(rows)


def own_policy(model: str) -> Placement | None:
    """Return the planner's choice of block, micro-batch and shares on the same host."""
    request = EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": T4_HOST,
            "workload": {
                "kind": "generate",
                "batch_size": 1,
                "input_tokens": 512,
                "output_tokens": 32,
            },
            "strategy": {"weight_dtype": "fp16", "kv_cache_dtype": "fp16"},
            "engine": "flexgen",
        }
    )
    return best_batch(request, BLOCKS.get(model, LARGEST_BLOCKS))


def flexgen_table() -> str:
    """Return published rows, predictions and the planner's own policies, as Markdown."""
    lines = [
        "## Offloading on one T4\n",
        "Generated tokens per second of 512 + 32 tokens; arXiv:2303.06865, FlexLLMGen README.",
        "Three figures of the engine were set on these rows (`flexgen` in",
        "`planner/catalog/data/engines.toml`): they show what the formulas express. The rows of",
        "the other engines were not looked at.\n",
        "| Engine | Model | Batch | Published | Predicted | Error | Fits |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [each.line() for each in reproduced_rows()]
    lines.append("\nThe planner's own policy, by linear programme, on the same host:\n")
    lines.append(
        "| Model | Block | Micro-batch | Weights host, disk | Cache host, disk | Token/s |"
    )
    lines.append("|---|---|---|---|---|---|")
    lines += [_policy_row(model) for model in sorted({each.model for each in reproduced_rows()})]
    return "\n".join(lines) + "\n"


def _policy_row(model: str) -> str:
    chosen = own_policy(model)
    if chosen is None:
        return f"| {model} | none fits | | | | |"
    speed, offload = chosen.estimate.performance, chosen.offload
    block = round((speed.requests_per_second or 0.0) * (speed.latency_seconds or 0.0))
    return (
        f"| {model} | {block} | {chosen.micro_batch_size} | {offload.weights_cpu:.0%}, "
        f"{offload.weights_disk:.0%} | {offload.kv_cpu:.0%}, {offload.kv_disk:.0%} | "
        f"{speed.tokens_per_second:.2f} |"
    )


# DeepSpeed's published runs beyond device memory, compared with the planner's figures.


ZERO_OFFLOAD = "arXiv:2101.06840"
ZERO_3_OFFLOAD = "DeepSpeed, ZeRO-3 Offload, 2021-03"
ZERO_INFINITY = "arXiv:2104.07857"
# A DGX-2: 16 V100 of 32 GB, 1.5 TB of host memory, 28 TB of NVMe at 25 GB/s.
DGX_2: JsonObject = {
    "device": "v100-sxm2-32gb",
    "host_memory_bytes": 1_649_267_441_664,
    "disk_bandwidth_bytes_per_second": 25e9,
    "disk_capacity_bytes": 28_000_000_000_000,
}
HALF = {"weight_dtype": "fp16", "compute_dtype": "fp16", "attention": "eager"}
ON_HOST: JsonObject = {"optimizer": "cpu"}
ALL_ON_HOST: JsonObject = {"optimizer": "cpu", "weights_cpu": 1.0}
ALL_ON_DISK: JsonObject = {"optimizer": "nvme", "weights_disk": 1.0, "activations_cpu": 1.0}


@dataclass(frozen=True)
class PublishedRun:
    """One published run: a GPT-2 shape, its offloading, and whether and how fast it ran."""

    title: str
    layers: int
    hidden: int
    micro_batch: int
    source: str
    offload: JsonObject = field(default_factory=dict)
    devices: int = 1
    fits: bool = True
    flops_per_s: float | None = None

    @property
    def request(self) -> JsonObject:
        """Return the run as a request: 64 micro-batches per step, full recomputation."""
        model = {
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.hidden,
            "n_head": min(self.hidden // 128, 128),
            "vocab_size": 50257,
            "n_positions": 1024,
            "activation_function": "gelu",
        }
        return {
            "model": model,
            "cluster": {**DGX_2, "devices_per_node": self.devices},
            "workload": {
                "kind": "train",
                "method": "pretrain",
                "sequence_length": 1024,
                "global_batch_size": 64 * self.micro_batch * self.devices,
            },
            "strategy": {
                **HALF,
                "micro_batch_size": self.micro_batch,
                "activation_recomputation": "full",
                "offload": self.offload,
                **({} if self.offload else {"zero_stage": 3 if self.devices > 1 else 0}),
            },
            "engine": "deepspeed",
        }

    @cached_property
    def estimate(self) -> Estimate:
        """Return the estimate of the run."""
        return estimate_request(EstimateRequest.model_validate(self.request), explain=False)


RUNS = (
    PublishedRun("1.4 B on the device", 40, 1536, 8, ZERO_OFFLOAD, flops_per_s=30e12),
    PublishedRun(
        "10 B, states on the host", 50, 4096, 8, ZERO_OFFLOAD, ON_HOST, flops_per_s=40e12
    ),
    PublishedRun("13 B on the device", 65, 4096, 1, ZERO_OFFLOAD, fits=False),
    PublishedRun("13 B, states on the host", 65, 4096, 1, ZERO_OFFLOAD, ON_HOST),
    PublishedRun("16 B, states on the host", 80, 4096, 1, ZERO_OFFLOAD, ON_HOST, fits=False),
    PublishedRun("40 B, all states on the host", 50, 8192, 4, ZERO_3_OFFLOAD, ALL_ON_HOST),
    PublishedRun("1 T on the devices", 128, 25600, 7, ZERO_INFINITY, devices=16, fits=False),
    PublishedRun("1 T, all states on NVMe", 128, 25600, 7, ZERO_INFINITY, ALL_ON_DISK, devices=16),
)


def training_offload_table() -> str:
    """Return the published runs and their predictions, as Markdown."""
    lines = [
        "## Training beyond the devices' memory\n",
        "GPT-2 shapes on one V100 of 32 GB, or on the 16 of a DGX-2. No figure was set on these",
        "rows but the rate of an update on the host, which is that of DeepSpeedCPUAdam",
        "(arXiv:2101.06840, table 4).\n",
        "| Run | Published | Predicted | GB per device, host, disk | Source |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(run) for run in RUNS)]) + "\n"


def _row(run: PublishedRun) -> str:
    estimate = run.estimate
    reached = estimate.performance.model_flops_per_second_per_device
    published = _result_text(run.flops_per_s, fits=run.fits)
    predicted = _result_text(reached if estimate.fits else None, fits=estimate.fits)
    memory = estimate.memory
    tiers = (memory.per_device_peak_bytes, memory.host_bytes or 0, memory.disk_bytes or 0)
    sizes = ", ".join(f"{size / GIGA:,.0f}" for size in tiers)
    return f"| {run.title} | {published} | {predicted} | {sizes} | {run.source} |"


def _result_text(flops_per_s: float | None, *, fits: bool) -> str:
    speed = f" at {flops_per_s / TERA:.0f} TFLOP/s a device" if flops_per_s else ""
    return f"{'fits' if fits else 'does not fit'}{speed}"
