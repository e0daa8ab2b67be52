"""DeepSpeed's published runs beyond device memory, compared with the planner's figures."""

from dataclasses import dataclass, field
from functools import cached_property

from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.workload.estimator import estimate_request

TERA, GIGA = 1e12, 1e9
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
class Trained:
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
    Trained("1.4 B on the device", 40, 1536, 8, ZERO_OFFLOAD, flops_per_s=30e12),
    Trained("10 B, states on the host", 50, 4096, 8, ZERO_OFFLOAD, ON_HOST, flops_per_s=40e12),
    Trained("13 B on the device", 65, 4096, 1, ZERO_OFFLOAD, fits=False),
    Trained("13 B, states on the host", 65, 4096, 1, ZERO_OFFLOAD, ON_HOST),
    Trained("16 B, states on the host", 80, 4096, 1, ZERO_OFFLOAD, ON_HOST, fits=False),
    Trained("40 B, all states on the host", 50, 8192, 4, ZERO_3_OFFLOAD, ALL_ON_HOST),
    Trained("1 T on the devices", 128, 25600, 7, ZERO_INFINITY, devices=16, fits=False),
    Trained("1 T, all states on NVMe", 128, 25600, 7, ZERO_INFINITY, ALL_ON_DISK, devices=16),
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


def _row(run: Trained) -> str:
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
