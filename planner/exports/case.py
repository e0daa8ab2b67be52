"""What an export reads: the model by name and shape, the plan, the workload, the device."""

from dataclasses import dataclass

from planner.catalog.engines import EngineRole, get_engine
from planner.specs.cluster import DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.plan import PlannedStrategy
from planner.specs.strategy import OffloadSpec, Strategy
from planner.specs.workload import GenerateWorkload, ServeWorkload, TrainWorkload, Workload
from planner.workload.dealing import groups_of
from planner.workload.resolve import resolve_cluster, resolve_device

GIB = 1024**3
# Every node knows its number, and meets the first one at this address and port.
MASTER, PORT, RANK = "$MASTER_ADDR", 29500, "$NODE_RANK"
# Where a started server answers, so that its measurement finds it.
SERVING_PORT = 8000


@dataclass(frozen=True)
class ExportCase:
    """One plan to be said in another tool's words; ``model`` is what that tool loads."""

    model: str
    shape: ModelSpec
    device: DeviceSpec
    plan: PlannedStrategy
    workload: Workload

    @property
    def strategy(self) -> Strategy:
        """Return the plan's strategy, every gap filled."""
        return self.plan.strategy

    @property
    def role(self) -> EngineRole:
        """Return what kind of engine the figures are for."""
        training = isinstance(self.workload, TrainWorkload)
        return get_engine(self.plan.engine, self.device.kind, training=training).role

    @property
    def offload(self) -> OffloadSpec:
        """Return what lives off the device; nothing unless told."""
        return self.strategy.offload or OffloadSpec()

    @property
    def devices(self) -> int:
        """Return how many devices the plan uses."""
        size = self.size
        return size("data") * size("tensor") * size("pipeline") * size("context")

    @property
    def hardware(self) -> str:
        """Return how many devices there are of each kind, by name."""
        counts = [(self.devices, self.device.name or self.device.id)]
        if self.plan.cluster.other_nodes:
            groups = groups_of(resolve_cluster(self.plan.cluster))
            found = [(one.num_devices, resolve_device(one.device)) for one in groups]
            counts = [(number, device.name or device.id) for number, device in found]
        return " + ".join(f"{number} x {name}" for number, name in counts)

    @property
    def nodes(self) -> int:
        """Return how many nodes the used devices fill."""
        return -(-self.devices // self.plan.cluster.devices_per_node)

    @property
    def devices_per_node(self) -> int:
        """Return how many devices of each node are used."""
        return -(-self.devices // self.nodes)

    def size(self, axis: str) -> int:
        """Return a parallel size of the plan by its axis (``tensor``, ``data`` …), at least 1."""
        return getattr(self.strategy, f"{axis}_parallel_size") or 1

    @property
    def context_tokens(self) -> int | None:
        """Return the tokens that one request may hold."""
        if isinstance(self.workload, ServeWorkload | GenerateWorkload):
            return self.workload.input_tokens + self.workload.output_tokens
        return None

    @property
    def sequences(self) -> int | None:
        """Return the requests in flight at once, over all replicas, where that is decided."""
        if isinstance(self.workload, ServeWorkload):
            return self.workload.concurrency
        return getattr(self.workload, "batch_size", None)

    @property
    def sequences_per_replica(self) -> int | None:
        """Return the requests in flight in one data-parallel replica."""
        return None if self.sequences is None else -(-self.sequences // self.size("data"))

    @property
    def offloaded_weight_bytes(self) -> float:
        """Return the weights of one device that live in its host's memory, in bytes."""
        share = self.offload.weights_cpu
        kept = self.plan.memory.breakdown_bytes.get("weights", 0)
        if share < 1:
            return kept * share / (1 - share)
        return (self.plan.memory.host_bytes or 0) / self.devices
