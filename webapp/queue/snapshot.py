"""Input and output of a queue decision, as plain values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Device:
    """One device; ``free_seconds`` is 0 if free, else the forecast time until release.

    ``FOREVER`` if the holder's end is unknown or overdue.
    """

    id: str
    index: int
    kind: str
    model: str
    memory_bytes: int
    free_seconds: float = 0.0
    is_held: bool = False
    held_by: str | None = None  # the job
    is_usable: bool = True  # present and not cordoned


@dataclass(frozen=True, slots=True)
class Host:
    """One host; its state and contact decide which jobs it accepts now."""

    id: str
    devices: tuple[Device, ...]
    takes_singles: bool = True
    takes_gangs: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """The request of one queued job; ``devices_per_host`` None means all devices of a host."""

    job: str
    team: str
    queued_at: float
    priority: int = 0
    rank: int | None = None
    num_hosts: int = 1
    devices_per_host: int | None = 1
    min_memory_bytes: int = 0
    host: str | None = None  # the only allowed host
    seconds: float | None = None  # upper bound with margin; None: unknown
    held_back: str = ""  # reason if a rule holds the job back

    @property
    def is_single(self) -> bool:
        """Return whether the job requests a single device."""
        return self.num_hosts == 1 and self.devices_per_host == 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one instant; ``used`` is each team's device-seconds divided by its share."""

    hosts: tuple[Host, ...]
    demands: tuple[Demand, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


Place = tuple[str, tuple[str, ...]]  # a host and some of its devices


@dataclass(frozen=True, slots=True)
class Grant:
    """A job with all its devices, the leader's host first."""

    job: str
    places: tuple[Place, ...]


class Why(StrEnum):
    """The reason why a job waits."""

    HELD_BACK = "held_back"  # a rule of the service, in ``Demand.held_back``
    IMPOSSIBLE = "impossible"  # the pool has too few such devices in total
    HOSTS = "hosts"  # hosts that have them accept no such job now
    DEVICES = "devices"  # devices are held
    RESERVED = "reserved"  # devices are free, but reserved for an earlier job


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits: figures of ``host``, the nearest to enough, and the forecast."""

    job: str
    why: Why
    host: str | None = None
    num_free: int = 0
    num_ready_hosts: int = 0  # hosts with enough free devices, for a gang
    start_seconds: float | None = None
    after: str | None = None  # the job whose end frees the devices
    behind: str | None = None  # the job that reserves the free devices


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a queue: grants, waits, and the order of the jobs."""

    grants: tuple[Grant, ...]
    waits: tuple[Wait, ...]
    order: tuple[str, ...]
