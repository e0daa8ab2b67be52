"""What a host is and what was measured on it, as it says so over the wire."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from runners.addresses import Port
from runners.scheduler_messages import SchedulerFacts
from runners.wire import Message


class GpuFacts(Message):
    """One GPU as NVML describes it."""

    index: NonNegativeInt
    uuid: str
    name: str
    memory_bytes: NonNegativeInt
    compute_capability: str | None = None
    power_limit_watts: float | None = None
    pci_bus_id: str | None = None
    pcie_width: int | None = None  # lanes in use now
    pcie_max_width: int | None = None  # lanes that board and slot could use
    numa_node: int | None = None
    has_ecc: bool | None = None
    ecc_corrected_errors: int | None = None  # since the driver was loaded
    ecc_uncorrected_errors: int | None = None
    needs_reset: bool | None = None  # memory rows wait for a reset to be replaced
    is_worn_out: bool | None = None  # no spare memory rows are left
    is_partitioned: bool | None = None  # multi-instance mode (MIG)
    xids: tuple[int, ...] | None = None  # the driver's errors since boot; None: not readable


class DiskFacts(Message):
    """One mounted file system on a disk."""

    path: str
    filesystem: str
    total_bytes: NonNegativeInt
    free_bytes: NonNegativeInt


class NicFacts(Message):
    """One network interface that is up; speed None where the driver does not tell."""

    name: str
    addresses: tuple[str, ...]
    bytes_per_second: NonNegativeFloat | None = None


class HostFacts(Message):
    """The inventory of a host, read at enrolment and at each agent start."""

    hostname: str
    os: str
    kernel: str
    architecture: str
    cpu_model: str
    cpu_count: PositiveInt
    memory_bytes: NonNegativeInt
    disk_total_bytes: NonNegativeInt
    disk_free_bytes: NonNegativeInt
    boot_id: str
    machine_id: str | None = Field(default=None, max_length=64)  # runners.machine: a digest
    user_id: NonNegativeInt | None = None  # of the Unix user that the agent and its jobs run as
    python_version: str
    agent_version: str
    driver_version: str | None = None
    driver_problem: str | None = None  # why NVML does not answer though a GPU is on the bus
    cuda_version: str | None = None  # the newest that the driver runs
    torch_cuda_version: str | None = None  # None: torch is built for the processor alone
    packages: dict[str, str] = Field(default_factory=dict)  # distribution -> version
    gpus: tuple[GpuFacts, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()  # GPU by GPU: NV<links>, PIX, PXB, PHB, NODE, SYS
    disks: tuple[DiskFacts, ...] = ()
    nics: tuple[NicFacts, ...] = ()
    addresses: tuple[str, ...] = ()  # by which others may reach it, the operator's choice first
    first_gang_port: Port = 29400  # what may be reserved for jobs over several hosts
    last_gang_port: Port = 29499
    job_memory_bytes: PositiveInt | None = None  # what this host lets a job take at most
    scheduler: SchedulerFacts | None = None  # None: jobs run on the host itself


class DeviceMeasurement(Message):
    """What the micro-benchmark measured on one device; rates are achieved, not peak."""

    device: str  # "cpu", "cuda:0", ...
    memory_bandwidth_bytes_per_second: float
    flops_per_second: dict[str, float]  # by dtype: fp32, bf16, fp16, int8
    op_overhead_seconds: NonNegativeFloat  # wall time of one tiny operator
    runtime_memory_bytes: NonNegativeInt | None = None  # a job's libraries, before its model
    training_memory_bytes: NonNegativeInt | None = None  # what training adds beside its tensors
    host_to_device_bytes_per_second: float | None = None  # None: the device is the host
    device_to_host_bytes_per_second: float | None = None


class LinkMeasurement(Message):
    """How fast one device copies to another."""

    source: str  # "cuda:0"
    target: str
    bytes_per_second: float


class NetworkMeasurement(Message):
    """How fast this host and its server exchange bytes over HTTP."""

    round_trip_seconds: NonNegativeFloat
    upload_bytes_per_second: float
    download_bytes_per_second: float


class Microbench(Message):
    """One run of the host's micro-benchmark, with when and with what it was measured."""

    measured_at_ms: int
    duration_seconds: NonNegativeFloat
    torch_version: str
    num_threads: PositiveInt
    devices: tuple[DeviceMeasurement, ...]
    disk_write_bytes_per_second: float
    links: tuple[LinkMeasurement, ...] = ()
    network: NetworkMeasurement | None = None
