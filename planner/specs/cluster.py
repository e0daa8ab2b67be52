"""Hardware: the kind of device, the number of devices, and their interconnect.

All rates are in bytes or FLOP per second and per direction; all peaks are dense.
"""

from functools import lru_cache
from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from planner.specs.base import Dtype, Ratio, SparseSpec

ARCHITECTURES = {
    "volta": frozenset({"v100"}),
    "ampere": frozenset({"a100", "a800"}),
    "hopper": frozenset({"h100", "h200", "h800", "gh200"}),
    "blackwell": frozenset({"b200", "b300", "gb200", "gb300"}),
}
# Finer than the architecture: chips with similar kernels and memory, by the prefix of the id.
FAMILIES = (
    ("ada", ("l4", "l20", "l40", "rtx-40", "rtx-2000-ada", "rtx-4000-ada")),
    ("ada", ("rtx-4500-ada", "rtx-5000-ada", "rtx-6000-ada")),
    ("blackwell-graphics", ("rtx-50", "rtx-pro")),
    ("ampere-graphics", ("a10-", "a10g", "a16", "a2-", "a40", "rtx-a", "rtx-30")),
    ("turing", ("t4", "rtx-20", "titan-rtx")),
    ("pascal", ("p4-", "p40", "p100", "gtx-10")),
    ("rdna", ("rx-", "radeon", "w7900")),
    ("cdna", ("mi50", "mi100", "mi2", "mi3")),
    ("arc", ("arc",)),
    ("apple", ("apple",)),
)
# Families of one instruction set, whose kernels are compiled from the same code.
KERNELS = {"strix": "rdna"}
# The devices of a cluster are listed one by one; ten times the largest clusters known in 2025.
MAX_DEVICES = 2_000_000
# CUDA compute capability by family, else by chip; source: developer.nvidia.com/cuda-gpus.
CAPABILITIES = {
    "pascal": 6.1,
    "volta": 7.0,
    "turing": 7.5,
    "quadro": 7.5,
    "ampere": 8.0,
    "a30": 8.0,
    "ampere-graphics": 8.6,
    "jetson": 8.7,
    "ada": 8.9,
    "hopper": 9.0,
    "h20": 9.0,
    "blackwell": 10.0,
    "blackwell-graphics": 12.0,
    "gb10": 12.1,
}
# Of a device that is not in the catalog: the newest units that its peaks name.
CAPABILITY_OF_PEAKS: tuple[tuple[Dtype, float], ...] = (
    ("nvfp4", 10.0),
    ("fp8", 8.9),
    ("bf16", 8.0),
)
GEFORCE = ("rtx-20", "rtx-30", "rtx-40", "rtx-50")
DeviceKind = Literal["gpu", "cpu", "uma", "accelerator"]


@lru_cache(maxsize=1024)
def _architecture_of(device_id: str) -> str:
    chip = device_id.split("-", maxsplit=1)[0]
    return next((name for name, chips in ARCHITECTURES.items() if chip in chips), chip)


@lru_cache(maxsize=1024)
def _named_family_of(device_id: str) -> str | None:
    slug = f"{device_id}-"
    return next((name for name, starts in FAMILIES if slug.startswith(starts)), None)


class DeviceSpec(SparseSpec):
    """One device. ``provenance`` states whether its rates are measured or published.

    Measured rates come from a microbenchmark. Published rates are datasheet peaks, of which an
    engine achieves a part (``achieved_flops_per_second`` is the best published matrix product, if
    any). ``op_overhead_seconds`` is the time to issue one small operator.
    ``weight_stream_bytes_per_second`` is the rate at which a matrix-vector product reads stored
    weights of a dtype, if measured separately from the memory bandwidth.
    ``runtime_overhead_bytes`` is the measured memory of a process of the product's runner before
    it loads a model. ``training_overhead_bytes`` is its measured memory in addition to tensors
    during training: kernel workspaces and unused allocator blocks.
    """

    id: str = "custom"
    name: str | None = None
    vendor: str | None = None
    kind: DeviceKind = "gpu"
    memory_bytes: PositiveInt
    memory_bandwidth_bytes_per_second: PositiveFloat
    peak_flops_per_second: dict[Dtype, PositiveFloat] = Field(default_factory=dict)
    achieved_flops_per_second: dict[Dtype, PositiveFloat] = Field(default_factory=dict)
    intra_node_bandwidth_bytes_per_second: PositiveFloat | None = None
    host_to_device_bandwidth_bytes_per_second: PositiveFloat | None = None
    link: str | None = None
    tdp_watts: PositiveFloat | None = None
    price_usd_per_hour: NonNegativeFloat | None = None
    price_source: str | None = None
    op_overhead_seconds: NonNegativeFloat | None = None
    weight_stream_bytes_per_second: dict[Dtype, PositiveFloat] = Field(default_factory=dict)
    usable_memory_ratio: Ratio | None = None
    runtime_overhead_bytes: NonNegativeInt | None = None
    training_overhead_bytes: NonNegativeInt | None = None
    provenance: Literal["measured", "published"] = "published"
    source: str | None = None
    as_of: str | None = None
    aliases: tuple[str, ...] = ()
    notes: str | None = None

    @property
    def architecture(self) -> str:
        """Return the chip family that a measurement applies to, or the device's own id.

        >>> DeviceSpec(id="gb200-nvl72", memory_bytes=1,
        ...            memory_bandwidth_bytes_per_second=1).architecture
        'blackwell'
        """
        return _architecture_of(self.id)

    @property
    def family(self) -> str:
        """Return the chips with similar memory and kernels: the architecture, or a finer class.

        >>> DeviceSpec(id="rtx-6000-ada", memory_bytes=1,
        ...            memory_bandwidth_bytes_per_second=1).family
        'ada'
        """
        named = _named_family_of(self.id)
        return named or (self.kind if self.kind == "cpu" else self.architecture)

    @property
    def kernels(self) -> str:
        """Return the chips whose kernels are alike: NVIDIA's discrete GPUs, RDNA, else the family.

        >>> DeviceSpec(id="strix-halo-395", kind="uma", memory_bytes=1,
        ...            memory_bandwidth_bytes_per_second=1).kernels
        'rdna'
        """
        is_discrete = self.kind == "gpu" and (self.vendor or "NVIDIA").upper() == "NVIDIA"
        return "gpu" if is_discrete else KERNELS.get(self.family, self.family)

    @property
    def compute_capability(self) -> float | None:
        """Return the CUDA compute capability of an NVIDIA device, None for others or if unknown.

        >>> DeviceSpec(id="t4", vendor="NVIDIA", memory_bytes=1,
        ...            memory_bandwidth_bytes_per_second=1).compute_capability
        7.5
        """
        if (self.vendor or "").upper() != "NVIDIA" or self.kind == "cpu":
            return None
        if self.family in CAPABILITIES:
            return CAPABILITIES[self.family]
        peaks = self.peak_flops_per_second
        return next((value for dtype, value in CAPABILITY_OF_PEAKS if dtype in peaks), None)

    @property
    def runs_cuda(self) -> bool:
        """Return whether torch uses ``cuda``: a GPU, or an NVIDIA chip with unified memory.

        >>> DeviceSpec(kind="uma", vendor="NVIDIA", memory_bytes=1,
        ...            memory_bandwidth_bytes_per_second=1).runs_cuda
        True
        """
        return self.kind == "gpu" or (self.kind == "uma" and (self.vendor or "") == "NVIDIA")

    @property
    def halves_wide_sums(self) -> bool:
        """Return whether tensor cores run at half rate with 32-bit accumulation."""
        return self.id.startswith(GEFORCE) and not self.id.endswith("-ada")


class NodeGroup(SparseSpec):
    """Nodes of another device in the same cluster."""

    device: str | DeviceSpec = Field(description="Catalog id of the device, or its figures")
    devices_per_node: PositiveInt = Field(default=1, description="Devices of a node")
    nodes: PositiveInt = Field(default=1, description="Nodes")
    nvlink_domain_devices: PositiveInt | None = Field(
        default=None, description="Devices of one NVLink domain; without it those of a node"
    )

    @property
    def num_devices(self) -> int:
        """Return the total number of devices of the group."""
        return self.devices_per_node * self.nodes

    @property
    def domain_devices(self) -> int:
        """Return the devices that NVLink, or a like link, joins: at least those of a node."""
        return max(self.devices_per_node, self.nvlink_domain_devices or 1)


class ClusterSpec(SparseSpec):
    """``nodes`` times ``devices_per_node`` of one device; given fields override the catalog.

    A cluster that only has an instance may be given as that id.
    """

    device: str | DeviceSpec = Field(description="Catalog id of the device, or its figures")
    instance: str | None = Field(
        default=None,
        description="Id of a cloud offer, which sets the device, the devices of a node, the "
        "memory and the price",
    )
    devices_per_node: PositiveInt = Field(default=1, description="Devices of a node")
    nodes: PositiveInt = Field(default=1, description="Nodes")
    other_nodes: tuple[NodeGroup, ...] = Field(
        default=(),
        description="Nodes of other devices, which follow the first ones: pipeline stages are "
        "assigned in this order",
    )
    topology: str | None = Field(
        default=None,
        description="Id of a published topology, which sets the devices of a node, the NVLink "
        "domain, the pods and the bandwidth between nodes where they are not given",
    )
    nvlink_domain_devices: PositiveInt | None = Field(
        default=None,
        description="Devices of one NVLink domain, or of a like link, that spans nodes: 72 of a "
        "GB200 NVL72, or those that a job is given of each; without it the devices of a node",
    )
    nodes_per_pod: PositiveInt | None = Field(
        default=None,
        description="Nodes that reach each other at full bandwidth: those of a leaf switch, of a "
        "rail-optimised scalable unit or of a pod; without it all",
    )
    oversubscription_ratio: float | None = Field(
        default=None,
        ge=1.0,
        description="Bandwidth of the nodes of a pod over that of its links to other pods, such "
        "as 7; without it 1, a network that does not block",
    )
    intra_node_bandwidth_bytes_per_second: PositiveFloat | None = Field(
        default=None,
        description="Bandwidth between the devices of a node or NVLink domain",
    )
    inter_node_bandwidth_bytes_per_second: PositiveFloat | None = Field(
        default=None, description="Bandwidth between nodes, of each device and direction"
    )
    collective_latency_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="Measured time of a collective within a node in addition to its transfer; "
        "with it the bandwidth is a measured one",
    )
    hand_over_latency_seconds: NonNegativeFloat | None = Field(
        default=None,
        description="Measured time of a message between two devices in addition to its transfer",
    )
    ranks_per_core: PositiveFloat | None = Field(
        default=None,
        description="Ranks that share each core of one CPU, so that a waiting rank yields the "
        "core to another",
    )
    host_memory_bytes: PositiveInt | None = Field(
        default=None, description="Memory of the host of a node"
    )
    host_memory_bandwidth_bytes_per_second: PositiveFloat | None = Field(
        default=None, description="Bandwidth of the host's memory"
    )
    host_to_device_bandwidth_bytes_per_second: PositiveFloat | None = Field(
        default=None, description="Bandwidth between the host's memory and a device"
    )
    disk_bandwidth_bytes_per_second: PositiveFloat | None = Field(
        default=None, description="Bandwidth of the disk of a node"
    )
    disk_capacity_bytes: PositiveInt | None = Field(
        default=None, description="Capacity of the disk of a node"
    )
    mean_time_between_failures_hours: PositiveFloat | None = Field(
        default=None,
        description="Mean time between failures of one device with its share of host and network; "
        "without it the median of published trainings, if the run is long enough",
    )
    grid_gco2_per_kwh: NonNegativeFloat | None = Field(
        default=None, description="CO2 of the electricity at the location, in grams"
    )
    electricity_usd_per_kwh: NonNegativeFloat | None = Field(
        default=None, description="Price of the electricity at the location"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_instance_id(cls, data: object) -> object:
        fields: object = {"instance": data} if isinstance(data, str) else data
        if isinstance(fields, dict) and fields.get("instance") and not fields.get("device"):
            return {**fields, "device": ""}
        return fields

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(
                f"the nodes have {self.num_devices} devices in all, "
                f"a cluster has at most {MAX_DEVICES}: lower devices_per_node or nodes"
            )
        return self

    @property
    def num_nodes(self) -> int:
        """Return the total number of nodes."""
        return self.nodes + sum(group.nodes for group in self.other_nodes)

    @property
    def widest_node(self) -> int:
        """Return the largest number of devices in a node."""
        return max(
            self.devices_per_node, *(group.devices_per_node for group in self.other_nodes), 1
        )

    @property
    def domain_devices(self) -> int:
        """Return the devices that NVLink, or a like link, joins: at least those of a node.

        Of unlike nodes it is the smallest domain of all, at least a node of the first kind.
        """
        own = max(self.devices_per_node, self.nvlink_domain_devices or 1)
        others = (group.domain_devices for group in self.other_nodes)
        return max(self.devices_per_node, min(own, *others, own))

    @property
    def widest_domain(self) -> int:
        """Return the largest number of devices that NVLink, or a like link, joins."""
        own = max(self.devices_per_node, self.nvlink_domain_devices or 1)
        return max(own, *(group.domain_devices for group in self.other_nodes), 1)

    @property
    def pod_devices(self) -> int | None:
        """Return the devices of a pod with oversubscribed links to others, None without such."""
        is_blocking = self.nodes_per_pod and (self.oversubscription_ratio or 1.0) > 1.0
        return self.devices_per_node * (self.nodes_per_pod or 1) if is_blocking else None

    @property
    def num_devices(self) -> int:
        """Return the total number of devices."""
        others = sum(group.num_devices for group in self.other_nodes)
        return self.devices_per_node * self.nodes + others

    def as_ranks_of_cpu(self, ranks: int, cores: int) -> Self:
        """Return one CPU as ``ranks`` ranks that share its cores and memory.

        Each rank has an equal share of every rate and of the memory. If there are more ranks than
        cores, issuing an operator takes proportionally longer. Assumes a CPU with given rates, not
        only a catalog id.

        Raises:
            ValueError: the device is only a catalog id or not a CPU, or there are several.
        """
        device = self.device
        if not isinstance(device, DeviceSpec) or device.kind != "cpu" or self.num_devices != 1:
            raise ValueError(
                f"cannot share {device} between ranks: it must be a single CPU with measured rates"
            )
        ranks_per_core = max(1.0, ranks / cores)
        issue = device.op_overhead_seconds
        shared = device.model_copy(
            update={
                "memory_bytes": device.memory_bytes // ranks,
                "memory_bandwidth_bytes_per_second": device.memory_bandwidth_bytes_per_second
                / ranks,
                "peak_flops_per_second": {
                    dtype: rate / ranks for dtype, rate in device.peak_flops_per_second.items()
                },
                "op_overhead_seconds": None if issue is None else issue * ranks_per_core,
            }
        )
        fields = {"device": shared, "devices_per_node": ranks, "ranks_per_core": ranks_per_core}
        return self.model_copy(update=fields)
