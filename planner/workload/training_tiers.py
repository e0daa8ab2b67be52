"""What a training run keeps off its devices: the bytes of each tier, and the time they take.

Weights are fetched for the forward and again for the backward pass; gradients and activations
leave as they are made; an update whose states are away runs on the host. All of it works beside
the device, layer by layer, so that only what outlasts the device's own work is exposed.

Sources: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
arXiv:2104.07857.
"""

from dataclasses import dataclass

from planner.cost.columns import any_of, maximum, minimum
from planner.cost.communication import transfer_seconds
from planner.cost.dtypes import element_bytes
from planner.cost.equation import Ledger, Line
from planner.cost.offload import (
    gradient_bucket_bytes,
    kept_on_device_bytes,
    overlapped_seconds,
    shared_link_rate,
    update_seconds,
)
from planner.specs.base import OperatorClass
from planner.specs.strategy import OffloadSpec
from planner.workload.setting import Setting

GROUP = "train_step"
# DeepSpeed's default bucket is of 500 million elements.
BUCKET_ELEMENTS = 5e8
# DeepSpeedCPUAdam moves 28 bytes a parameter: 1, 4 and 10 billion take 0.22, 1.03 and 2.57 s on
# a DGX-2 host, hence 109 to 127 GB/s of the 200 GB/s that a server is taken to stream.
# Source: arXiv:2101.06840, table 4.
HOST_UPDATE_EFFICIENCY = 0.55
# A step reads and writes each state once.
READS_AND_WRITES = 2
NOWHERE = "none"


@dataclass(frozen=True)
class StageBytes:
    """What one device of a stage would hold if nothing left it, by tensor class."""

    weights: float
    gradients: float
    optimizer_states: float
    activations: float


@dataclass(frozen=True)
class Traffic:
    """What one rank moves in a micro-batch if all of a class is away: its own shards."""

    weights: float
    gradients: float
    activations: float


def anything_away(offload: OffloadSpec) -> bool:
    """Return whether a strategy keeps anything of a training run off the device."""
    shares = offload.weights_cpu + offload.weights_disk + offload.activations_cpu
    return shares > 0 or offload.optimizer != NOWHERE


def gradients_leave(setting: Setting) -> bool:
    """Return whether gradients follow the optimiser states off the device."""
    return setting.offload.optimizer != NOWHERE and not setting.engine.keeps_gradients


def weights_share(offload: OffloadSpec) -> float:
    """Return the share of the weights that is off the device."""
    return offload.weights_cpu + offload.weights_disk


def gradients_left(setting: Setting, ledger: Ledger, gradients: float) -> float:
    """Return the bytes of gradients on the device: a bucket of them, if they leave."""
    if not gradients_leave(setting):
        return gradients
    return ledger.term(
        gradient_bucket_bytes,
        setting.line("memory", "Gradients on their way to the host", key="gradient_bucket"),
        gradient_bytes=gradients,
        bucket_bytes=BUCKET_ELEMENTS * element_bytes(setting.strategy.gradient_dtype or "bf16"),
    )


def activations_left(setting: Setting, ledger: Ledger, kept: float, layers: float) -> float:
    """Return the bytes of kept activations on the device."""
    share = setting.offload.activations_cpu
    if not share:
        return kept
    return ledger.term(
        kept_on_device_bytes,
        setting.line("memory", "Activations that stay on the device", key="kept_on_device"),
        kept_bytes=kept,
        away_share=share,
        num_layers=layers,
    )


def tier_bytes(setting: Setting, stage: StageBytes) -> tuple[float, float]:
    """Return what host memory and disk hold for one device of a stage."""
    offload = setting.offload
    states = stage.optimizer_states + (stage.gradients if gradients_leave(setting) else 0.0)
    host = stage.weights * offload.weights_cpu + stage.activations * offload.activations_cpu
    disk = stage.weights * offload.weights_disk
    host = host + (states if offload.optimizer == "cpu" else 0.0)
    return host, disk + (states if offload.optimizer == "nvme" else 0.0)


class TrainingTiers:
    """The seconds that a training step spends between the tiers, each term recorded."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self.setting, self.ledger, self.offload = setting, ledger, setting.offload
        layout, cluster = setting.layout, setting.cluster
        self.sharers = minimum(cluster.devices_per_node, layout.devices)

    def _rate(self) -> float:
        """Return the rate of a rank's link while all ranks of its node use theirs."""
        return self.ledger.term(
            shared_link_rate,
            self.setting.line(GROUP, "Link of one rank to its host", key="link"),
            link_bytes_per_s=self.setting.host_link_bytes_per_s,
            tier_bytes_per_s=self.setting.host_memory_bytes_per_s,
            sharers=self.sharers,
        )

    def micro_batch(self, own_s: float, forward_share: float, whole: Traffic) -> float:
        """Return by how many seconds fetching and storing lengthen a micro-batch."""
        if not anything_away(self.offload):
            return 0.0
        rate, share = self._rate(), self.offload.activations_cpu
        weights = whole.weights * weights_share(self.offload)
        gradients = whole.gradients if gradients_leave(self.setting) else 0.0
        disk_s = self._disk("Weights from disk", whole.weights * self.offload.weights_disk)
        kept = whole.activations * share
        forward = self._phase(
            "Forward", own_s * forward_share, (weights / rate, kept / rate, disk_s)
        )
        backward = self._phase(
            "Backward",
            own_s * (1 - forward_share),
            ((weights + kept) / rate, gradients / rate, disk_s),
        )
        return maximum(0.0, forward + backward - own_s)

    def _phase(self, name: str, work_s: float, channels: tuple[float, float, float]) -> float:
        load_s, store_s, disk_s = channels
        return self.ledger.term(
            overlapped_seconds,
            self._line(f"{name} beside loads and stores", f"overlap_{name.lower()}"),
            work_s=work_s,
            load_s=load_s,
            store_s=store_s,
            disk_s=disk_s,
        )

    def _disk(self, name: str, moved_bytes: float) -> float:
        if not any_of(moved_bytes > 0):
            return 0.0
        return self.ledger.term(
            transfer_seconds,
            self._line(name, "disk"),
            payload_bytes=moved_bytes * self.sharers,
            link_bytes_per_s=self.setting.disk_bytes_per_s,
        )

    def update(self, parameters: float, states_each: float) -> float:
        """Cost an update on the host: states and gradients stream, weights go back up meanwhile.

        ``parameters`` are those of one rank; ``states_each`` are the bytes of their states.
        """
        setting, offload = self.setting, self.offload
        gradient = element_bytes(setting.strategy.gradient_dtype or "bf16")
        weight = setting.plain_element_bytes
        worked = self.ledger.term(
            update_seconds,
            self._line("Update in host memory", "update", "memory_bandwidth"),
            parameters=parameters,
            bytes_per_element=READS_AND_WRITES * states_each + gradient + weight,
            sharers=self.sharers,
            tier_bytes_per_s=setting.host_memory_bytes_per_s,
            efficiency=HOST_UPDATE_EFFICIENCY,
        )
        stays = parameters * weight * (1 - weights_share(offload))
        late = 0.0 if gradients_leave(setting) else parameters * gradient
        on_disk = parameters * weight * offload.weights_disk
        if offload.optimizer == "nvme":
            on_disk = on_disk + parameters * READS_AND_WRITES * (states_each + gradient)
        rate = self._rate()
        return self.ledger.term(
            overlapped_seconds,
            self._line("Update beside its loads and stores", "overlap_update"),
            work_s=worked,
            load_s=stays / rate,
            store_s=late / rate,
            disk_s=self._disk("States from and to disk", on_disk),
        )

    def _line(self, name: str, key: str, kind: OperatorClass = "communication") -> Line:
        return self.setting.line(GROUP, name, kind, key)
