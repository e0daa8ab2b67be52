"""What a decision about a pool is made of, and what it comes out as: plain values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class Device:
    """One device: ``free_seconds`` is 0 when it is free, else when its holder is forecast to end.

    A holder of unknown end, or one that has outlasted its forecast, is ``FOREVER``.
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
    """One host: what it may be given now depends on its state and on how well it is heard."""

    id: str
    devices: tuple[Device, ...]
    takes_singles: bool = True
    takes_gangs: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """What one queued job asks for; ``devices_per_host`` None is all devices of a host."""

    job: str
    team: str
    queued_at: float
    priority: int = 0
    rank: int | None = None
    num_hosts: int = 1
    devices_per_host: int | None = 1
    min_memory_bytes: int = 0
    host: str | None = None  # the only one that will do
    seconds: float | None = None  # no longer than this, with margin; None: unknown
    held_back: str = ""  # why it may not be tried now, whatever is free

    @property
    def is_single(self) -> bool:
        """Return whether it asks for no more than one device."""
        return self.num_hosts == 1 and self.devices_per_host == 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one instant; ``used`` is each team's device-seconds over its share."""

    hosts: tuple[Host, ...]
    demands: tuple[Demand, ...]
    used: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)


Place = tuple[str, tuple[str, ...]]  # a host and devices of it


@dataclass(frozen=True, slots=True)
class Grant:
    """A job and everything that it asked for, the leading host first."""

    job: str
    places: tuple[Place, ...]


class Why(StrEnum):
    """What keeps a job waiting."""

    HELD_BACK = "held_back"  # a rule of the service, in ``Demand.held_back``
    IMPOSSIBLE = "impossible"  # the pool has too little of it altogether
    HOSTS = "hosts"  # hosts that have it take no such job now
    DEVICES = "devices"  # devices are held
    RESERVED = "reserved"  # devices are free, but kept for an earlier job


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits, in figures: of ``host``, the nearest to enough, and of the forecast."""

    job: str
    why: Why
    host: str | None = None
    num_free: int = 0
    num_ready_hosts: int = 0  # hosts with enough free devices, of those that a gang asks for
    start_seconds: float | None = None
    after: str | None = None  # the job whose end makes room
    behind: str | None = None  # the job for which free devices are kept


@dataclass(frozen=True, slots=True)
class Decision:
    """Everybody's turn: grants, waits, and the order in which jobs were considered."""

    grants: tuple[Grant, ...]
    waits: tuple[Wait, ...]
    order: tuple[str, ...]
