"""What a host reports of itself: inventory, scheduler, micro-benchmark results."""

import ipaddress
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from runners.jobspec.base import (
    SCHEDULER_OPTIONS,
    Message,
    Name,
    Names,
    Port,
    Rate,
    SchedulerKind,
    SchedulerOption,
    Seconds,
    Sentence,
    TimestampMs,
    Watts,
    truncate,
)
from runners.shared.schedulers import SCHEDULER_TERMS, gpus_of_gres

# Facts about the scheduler to which a host submits its jobs.


MAX_JOBS = 256  # in the scheduler at once; the server stores one device per job


class PartitionFacts(Message):
    """One partition of a cluster, or one kind of node in it."""

    name: str  # "": Ray's nodes without an accelerator type
    is_up: bool
    # As Slurm writes it: days-hours:minutes:seconds, or infinite; "" in Kubernetes and Ray.
    time_limit: str
    nodes: NonNegativeInt
    cpus_per_node: str = ""
    memory_mib: str = ""
    gres: str = ""
    # From here on unknown to sites before 0.1's release: see BEFORE_VENDORS.
    is_default: bool = False
    max_nodes: PositiveInt | None = None  # of one job
    accounts: tuple[Name, ...] = Field(default=(), max_length=256)  # empty: all
    qos: tuple[Name, ...] = Field(default=(), max_length=256)  # empty: all

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs a node has, by its GRES."""
        return gpus_of_gres(self.gres)


class ReservationFacts(Message):
    """Nodes that are kept for some users or accounts for a time, as Slurm writes the times."""

    name: Name
    starts: str = ""
    ends: str = ""
    partition: str = ""
    nodes: str = ""


class AccountFacts(Message):
    """An account that the agent's user may charge, and the QOS that go with it."""

    name: Name
    partition: str = ""  # empty: every one
    qos: tuple[Name, ...] = Field(default=(), max_length=256)


MOST_OTHER_JOBS = 100  # that a host reports


class OtherJobFacts(Message):
    """A job that somebody else gave to the scheduler: Slipway reads it, and never ends it."""

    job_id: Name  # such as 17, 17_3 and 17_[4-9] of an array, or a pod's name
    name: Name = ""
    user: Name = ""  # or what owns a pod, such as Job/train
    state: Name  # the scheduler's own word
    detail: Sentence = ""  # why it waits
    place: Name = ""  # its partition, or a pod's namespace
    nodes: Sentence = ""  # as the scheduler writes them; "" before it runs
    num_nodes: NonNegativeInt | None = None
    devices: NonNegativeInt | None = None  # GPUs that it has or asks for; None: not told
    elapsed_seconds: NonNegativeInt | None = None  # when it was read; None: it does not run
    time_limit_seconds: NonNegativeInt | None = None  # None: there is none, or it is not told


class SchedulerFacts(Message):
    """The scheduler of a host, its partitions and the options of the host's jobs.

    Without accounting Slurm names no accounts; ``unread`` then says which facts are missing, and
    why. Kubernetes' and Ray's partitions are their kinds of nodes; of Ray's one is up on which a
    job fits.
    """

    kind: SchedulerKind = "slurm"
    version: str = ""
    options: dict[str, str] = Field(default_factory=dict)  # of every job
    time_limit_minutes: PositiveInt
    max_jobs: PositiveInt = Field(le=MAX_JOBS)
    partitions: tuple[PartitionFacts, ...] = Field(default=(), max_length=256)
    problem: str = ""  # why it did not answer
    reservations: tuple[ReservationFacts, ...] = Field(default=(), max_length=256)
    accounts: tuple[AccountFacts, ...] = Field(default=(), max_length=256)
    unread: tuple[Sentence, ...] = Field(default=(), max_length=16)
    queues: tuple[Name, ...] = Field(default=(), max_length=256)  # of Kueue, that take jobs
    priority_classes: tuple[Name, ...] = Field(default=(), max_length=256)  # of pods
    # What the agent's user sees of others; those that run come first.
    other_jobs: tuple[OtherJobFacts, ...] = Field(default=(), max_length=MOST_OTHER_JOBS)
    num_other_jobs: NonNegativeInt = 0  # also those not in the list; of an array each task
    autoscaling: bool = False  # it adds nodes by itself, also of kinds that it has none of now

    @property
    def title(self) -> str:
        """Return the scheduler's name."""
        return SCHEDULER_TERMS[self.kind].title

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs the options give a job on a node; 0: they do not say."""
        return SCHEDULER_TERMS[self.kind].gpus_per_node(self.options)

    @property
    def offered(self) -> dict[SchedulerOption, tuple[str, ...] | None]:
        """Return the options that a launch may state, with their values; None: any value.

        Where the scheduler does not check what it did not list, a launch has only what the agent
        may list; of a cluster that adds nodes, any kind of them.
        """
        qos = [name for each in self.accounts for name in each.qos]
        told: dict[SchedulerOption, Sequence[str]] = {
            "account": [each.name for each in self.accounts],
            "partition": [each.name for each in self.partitions if each.is_up and each.name],
            "qos": qos,
            "reservation": [each.name for each in self.reservations],
            "queue": self.queues,
            "priority_class": self.priority_classes,
        }
        values = {name: tuple(dict.fromkeys(told[name])) for name in SCHEDULER_OPTIONS[self.kind]}
        unlisted = None if SCHEDULER_TERMS[self.kind].checks_values else ()
        offered = {name: found or unlisted for name, found in values.items()}
        return {**offered, "partition": None} if self.autoscaling else offered


# Limited to the lengths of the database columns; longer values are truncated, not rejected,
# because stored facts are read by the same models.
Version = Annotated[str, BeforeValidator(lambda text: truncate(text, 40))]
BootId = Annotated[str, BeforeValidator(lambda text: truncate(text, 64))]
DeviceUuid = Annotated[str, BeforeValidator(lambda text: truncate(text, 80))]
DeviceName = Annotated[str, BeforeValidator(lambda text: truncate(text, 120))]


class GpuFacts(Message):
    """One GPU, MIG instance or partition as its vendor's library describes it; None: unknown."""

    index: NonNegativeInt = Field(le=65_535)
    uuid: DeviceUuid
    name: DeviceName
    memory_bytes: NonNegativeInt
    compute_capability: Name | None = None
    power_limit_watts: Watts | None = None
    pci_bus_id: Name | None = None
    pcie_width: int | None = None  # lanes in use now
    pcie_max_width: int | None = None  # lanes that board and slot support
    numa_node: int | None = None
    has_ecc: bool | None = None
    ecc_corrected_errors: int | None = None  # since the driver was loaded
    ecc_uncorrected_errors: int | None = None
    needs_reset: bool | None = None  # a reset is pending to remap memory rows
    is_worn_out: bool | None = None  # no spare memory rows are left
    is_partitioned: bool | None = None  # multi-instance mode (MIG)
    xids: tuple[int, ...] | None = None  # the driver's errors since boot; None: not readable
    # From here on unknown to sites before 0.1's release: see BEFORE_VENDORS.
    vendor: Name = "nvidia"  # nvidia, amd, intel, apple
    architecture: Name | None = None  # "Hopper", "gfx942"
    parent_uuid: DeviceUuid | None = None  # the GPU that this MIG instance is a part of
    partition: Name | None = None  # AMD's compute and memory partitioning: "CPX/NPS4"
    shares_host_memory: bool = False  # memory_bytes is the host's: DGX Spark, Jetson, Apple
    usable_memory_bytes: NonNegativeInt | None = None  # an operator's limit: macOS' wired limit
    is_persistent: bool | None = None  # the driver stays loaded without a client
    fabric_state: Name | None = None  # of a GPU on NVSwitches: "completed", "not started"
    compute_mode: Name | None = None  # "default", "exclusive process", "prohibited"
    max_clock_hertz: Rate | None = None  # of the multiprocessors
    max_memory_clock_hertz: Rate | None = None
    default_power_limit_watts: Watts | None = None
    pcie_generation: int | None = None  # now; lower while idle
    pcie_max_generation: int | None = None
    num_links: int | None = None  # active NVLinks
    link_bytes_per_second: Rate | None = None  # of one NVLink, in one direction
    # What the driver did not tell, each with its reason.
    unread: tuple[Name, ...] = Field(default=(), max_length=64, fail_fast=True)


class DiskFacts(Message):
    """One mounted file system on a disk."""

    path: Sentence
    filesystem: Name
    total_bytes: NonNegativeInt
    free_bytes: NonNegativeInt


class NicFacts(Message):
    """One network interface that is up; speed None if unknown."""

    name: Name
    addresses: tuple[Name, ...] = Field(max_length=256, fail_fast=True)
    bytes_per_second: Rate | None = None


MAX_ADDRESS_CHARACTERS = 45  # the width of the column of a gang's addresses


def numeric_addresses(values: object) -> object:
    """Return the numeric addresses of a list; other types unchanged for pydantic to reject.

    The others are left out, not rejected: the jobs of other hosts would be told to meet there.
    """
    if not isinstance(values, list | tuple):
        return values
    return [each for each in values if not isinstance(each, str) or _is_numeric_address(each)]


def _is_numeric_address(text: str) -> bool:
    try:
        return len(text) <= MAX_ADDRESS_CHARACTERS and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


class HostFacts(Message):
    """The inventory of a host, read at enrolment and at each agent start."""

    hostname: Name
    os: Name
    kernel: Name
    architecture: Name
    cpu_model: Name
    cpu_count: PositiveInt = Field(le=1_000_000)
    memory_bytes: NonNegativeInt
    disk_total_bytes: NonNegativeInt
    disk_free_bytes: NonNegativeInt
    boot_id: BootId
    machine_id: str | None = Field(default=None, max_length=64)  # runners.shared.machine: a digest
    user_id: NonNegativeInt | None = None  # the Unix user of the agent and its jobs
    python_version: Name
    agent_version: Version
    driver_version: Name | None = None
    driver_problem: Sentence | None = None  # why NVML fails although a GPU is on the bus
    cuda_version: Name | None = None  # the newest that the driver supports
    torch_cuda_version: Name | None = None  # None: a CPU build of torch
    # Distribution -> version.
    packages: Names = Field(default_factory=dict, max_length=5000)
    gpus: tuple[GpuFacts, ...] = Field(default=(), max_length=256, fail_fast=True)
    # GPU by GPU: NV<links>, PIX, PXB, PHB, NODE, SYS.
    topology: tuple[tuple[Name, ...], ...] = Field(default=(), max_length=256, fail_fast=True)
    disks: tuple[DiskFacts, ...] = Field(default=(), max_length=1000, fail_fast=True)
    nics: tuple[NicFacts, ...] = Field(default=(), max_length=1000, fail_fast=True)
    # For other hosts to reach it, the operator's choice first.
    addresses: Annotated[tuple[Name, ...], BeforeValidator(numeric_addresses)] = Field(
        default=(), max_length=1000, fail_fast=True
    )
    first_gang_port: Port = 29400  # ports for gangs
    last_gang_port: Port = 29499
    job_memory_bytes: PositiveInt | None = None  # memory limit of a job on this host
    scheduler: SchedulerFacts | None = None  # None: jobs run on the host itself
    rocm_version: Name | None = None  # of the host's ROCm
    torch_rocm_version: Name | None = None  # None: torch is not built for ROCm
    # GPUs that jobs here do not use: of another vendor than torch is built for.
    other_gpus: tuple[GpuFacts, ...] = Field(default=(), max_length=256, fail_fast=True)
    # Which GPU or library does not answer, and why.
    device_problems: tuple[Sentence, ...] = Field(default=(), max_length=256, fail_fast=True)
    # GPU by GPU: whether one reads the other's memory directly.
    peer_access: tuple[tuple[bool | None, ...], ...] = Field(
        default=(), max_length=256, fail_fast=True
    )


# What an agent leaves out for a site that refuses it, as pydantic's ``exclude``.
BEFORE_VENDORS: dict[str, Any] = {
    "scheduler": {
        "reservations": True,
        "accounts": True,
        "unread": True,
        "queues": True,
        "priority_classes": True,
        "other_jobs": True,
        "num_other_jobs": True,
        "autoscaling": True,
        "partitions": {"__all__": {"is_default", "max_nodes", "accounts", "qos"}},
    },
    "rocm_version": True,
    "torch_rocm_version": True,
    "other_gpus": True,
    "device_problems": True,
    "peer_access": True,
    "gpus": {
        "__all__": {
            *("vendor", "architecture", "parent_uuid", "partition", "shares_host_memory"),
            *("usable_memory_bytes", "link_bytes_per_second", "unread"),
            *("is_persistent", "compute_mode", "max_clock_hertz", "max_memory_clock_hertz"),
            *("default_power_limit_watts", "pcie_generation", "pcie_max_generation"),
            *("num_links", "fabric_state"),
        }
    },
}


class DeviceMeasurement(Message):
    """Micro-benchmark results of one device; rates are achieved, not peak."""

    device: Name  # "cpu", "cuda:0", ...
    memory_bandwidth_bytes_per_second: Rate
    flops_per_second: dict[Name, Rate]  # by dtype: fp32, bf16, fp16, int8
    op_overhead_seconds: Seconds  # wall time of one tiny operator
    runtime_memory_bytes: NonNegativeInt | None = None  # a job process without its model
    training_memory_bytes: NonNegativeInt | None = None  # overhead of training besides its tensors
    host_to_device_bytes_per_second: Rate | None = None  # None: the device is the host
    device_to_host_bytes_per_second: Rate | None = None


class LinkMeasurement(Message):
    """Copy bandwidth from one device to another."""

    source: Name  # "cuda:0"
    target: Name
    bytes_per_second: Rate


class NetworkMeasurement(Message):
    """Round trip and bandwidth between this host and its server over HTTP."""

    round_trip_seconds: Seconds
    upload_bytes_per_second: Rate
    download_bytes_per_second: Rate


class Microbench(Message):
    """Results of one run of the host's micro-benchmark."""

    measured_at_ms: TimestampMs
    duration_seconds: Seconds
    torch_version: Name
    num_threads: PositiveInt
    devices: tuple[DeviceMeasurement, ...] = Field(max_length=256, fail_fast=True)
    disk_write_bytes_per_second: Rate
    links: tuple[LinkMeasurement, ...] = Field(default=(), max_length=65_536, fail_fast=True)
    network: NetworkMeasurement | None = None
