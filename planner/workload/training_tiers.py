"""Offload in training: the bytes in each memory tier and the time of their transfers.

Weights are fetched for the forward and the backward pass, gradients and activations are stored as
they are produced, and offloaded optimiser states are updated on the host. Transfers overlap with
computation layer by layer; only the excess is exposed.

Sources: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
arXiv:2104.07857.
"""

from dataclasses import dataclass

from planner.cost.communication import transfer_seconds
from planner.cost.memory import (
    gradient_bucket_bytes,
    kept_on_device_bytes,
    overlapped_seconds,
    shared_link_rate,
    update_seconds,
)
from planner.cost.quantity import Ledger, Line, any_of, maximum, minimum, where
from planner.cost.weights import element_bytes
from planner.specs.base import OperatorClass
from planner.specs.workload import OffloadSpec
from planner.workload.setting import Setting

GROUP = "train_step"
# DeepSpeed's default bucket has 500 million elements.
BUCKET_ELEMENTS = 5e8
# DeepSpeedCPUAdam moves 28 bytes a parameter: 1, 4 and 10 billion take 0.22, 1.03 and 2.57 s on
# a DGX-2 host, hence 109 to 127 GB/s of the 200 GB/s assumed for a server.
# Source: arXiv:2101.06840, table 4.
HOST_UPDATE_EFFICIENCY = 0.55
# A step reads and writes each state once.
READS_AND_WRITES = 2
NOWHERE = "none"
FULL_SHARDING = 3


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one device of a stage by tensor class, without offload."""

    weights: float
    gradients: float
    optimizer_states: float
    activations: float
    updated: float  # parameters that one rank updates


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank moves per micro-batch if a class is fully offloaded."""

    weights: float
    gradients: float
    activations: float


def is_offloading(offload: OffloadSpec) -> bool:
    """Return whether any weights, activations or optimiser states are offloaded."""
    shares = offload.weights_cpu + offload.weights_disk + offload.activations_cpu
    return shares > 0 or offload.optimizer != NOWHERE


def gradients_leave(setting: Setting) -> bool:
    """Return whether gradients are offloaded together with the optimiser states."""
    return setting.offload.optimizer != NOWHERE and not setting.engine.keeps_gradients


def weights_share(offload: OffloadSpec) -> float:
    """Return the offloaded share of the weights."""
    return offload.weights_cpu + offload.weights_disk


def gradients_left(setting: Setting, ledger: Ledger, gradients: float) -> float:
    """Return the bytes of gradients on the device; one bucket if they are offloaded."""
    if not gradients_leave(setting):
        return gradients
    return ledger.term(
        gradient_bucket_bytes,
        setting.line("memory", "Gradients in transfer to the host", key="gradient_bucket"),
        gradient_bytes=gradients,
        bucket_bytes=BUCKET_ELEMENTS * element_bytes(setting.strategy.gradient_dtype or "bf16"),
    )


def activations_left(setting: Setting, ledger: Ledger, kept: float, layers: float) -> float:
    """Return the bytes of saved activations on the device."""
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
    """Return the bytes in host memory and on disk for one device of a stage."""
    offload = setting.offload
    gradients = stage.gradients if gradients_leave(setting) else 0.0
    host = stage.weights * offload.weights_cpu + stage.activations * offload.activations_cpu
    disk = stage.weights * offload.weights_disk
    if offload.optimizer == "cpu":
        host = host + stage.optimizer_states + _host_gradients(setting, gradients, stage.updated)
    if offload.optimizer == "nvme":
        disk = disk + stage.optimizer_states + gradients
    return host, disk


def _host_gradients(setting: Setting, gradients: float, updated: float) -> float:
    """Return the bytes of gradients, their copies and buffers beside states in host memory."""
    each = setting.engine.host_gradient_bytes
    if not each:
        return gradients
    return updated * where(setting.layout.zero_stage >= FULL_SHARDING, each["3"], each["2"])


class TrainingTiers:
    """The offload transfer times of a training step, recorded in the ledger."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self.setting, self.ledger, self.offload = setting, ledger, setting.offload
        layout, cluster = setting.layout, setting.cluster
        self.sharers = minimum(cluster.devices_per_node, layout.devices)

    def _rate(self) -> float:
        """Return the bandwidth of a rank's host link while all ranks of its node use theirs."""
        return self.ledger.term(
            shared_link_rate,
            self.setting.line(GROUP, "Link of one rank to its host", key="link"),
            link_bytes_per_s=self.setting.host_link_bytes_per_s,
            tier_bytes_per_s=self.setting.host_memory_bytes_per_s,
            sharers=self.sharers,
        )

    def micro_batch(self, own_s: float, forward_share: float, whole: Traffic) -> float:
        """Return the exposed seconds of offload transfers per micro-batch."""
        if not is_offloading(self.offload):
            return 0.0
        rate, share = self._rate(), self.offload.activations_cpu
        weights = whole.weights * weights_share(self.offload)
        gradients = whole.gradients if gradients_leave(self.setting) else 0.0
        disk_s = self._disk("Weights from disk", whole.weights * self.offload.weights_disk)
        activations = whole.activations * share
        forward = self._phase(
            "Forward", own_s * forward_share, (weights / rate, activations / rate, disk_s)
        )
        backward = self._phase(
            "Backward",
            own_s * (1 - forward_share),
            ((weights + activations) / rate, gradients / rate, disk_s),
        )
        return maximum(0.0, forward + backward - own_s)

    def _phase(self, name: str, work_s: float, channels: tuple[float, float, float]) -> float:
        load_s, store_s, disk_s = channels
        return self.ledger.term(
            overlapped_seconds,
            self._line(f"{name} during loads and stores", f"overlap_{name.lower()}"),
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
        """Cost an optimiser update on the host, overlapped with loading the weights back.

        ``parameters`` are those of one rank; ``states_each`` is the state bytes per parameter.
        """
        setting, offload = self.setting, self.offload
        gradient = element_bytes(setting.strategy.gradient_dtype or "bf16")
        weight = setting.plain_element_bytes
        update_s = self.ledger.term(
            update_seconds,
            self._line("Update in host memory", "update", "memory_bandwidth"),
            parameters=parameters,
            bytes_per_element=READS_AND_WRITES * states_each + gradient + weight,
            sharers=self.sharers,
            tier_bytes_per_s=setting.host_memory_bytes_per_s,
            efficiency=HOST_UPDATE_EFFICIENCY,
        )
        loaded = parameters * weight * (1 - weights_share(offload))
        stored = 0.0 if gradients_leave(setting) else parameters * gradient
        on_disk = parameters * weight * offload.weights_disk
        if offload.optimizer == "nvme":
            on_disk = on_disk + parameters * READS_AND_WRITES * (states_each + gradient)
        rate = self._rate()
        return self.ledger.term(
            overlapped_seconds,
            self._line("Update during its loads and stores", "overlap_update"),
            work_s=update_s,
            load_s=loaded / rate,
            store_s=stored / rate,
            disk_s=self._disk("States from and to disk", on_disk),
        )

    def _line(self, name: str, key: str, kind: OperatorClass = "communication") -> Line:
        return self.setting.line(GROUP, name, kind, key)
