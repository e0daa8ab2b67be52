"""Facts about the scheduler to which a host submits its jobs."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from runners.wire import Message

MAX_JOBS = 256  # in the scheduler at once; the server stores one device per job


class PartitionFacts(Message):
    """One partition of a cluster, or one node type in it."""

    name: str
    is_up: bool
    time_limit: str  # as Slurm writes it: days-hours:minutes:seconds, or infinite
    nodes: NonNegativeInt
    cpus_per_node: str = ""
    memory_mib: str = ""
    gres: str = ""


class SchedulerFacts(Message):
    """The scheduler of a host, its partitions and the options of the host's jobs."""

    kind: Literal["slurm"] = "slurm"
    version: str = ""
    options: dict[str, str] = Field(default_factory=dict)  # of every job
    time_limit_minutes: PositiveInt
    max_jobs: PositiveInt = Field(le=MAX_JOBS)
    partitions: tuple[PartitionFacts, ...] = Field(default=(), max_length=256)
    problem: str = ""  # why it did not answer
