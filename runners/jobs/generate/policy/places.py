"""Which piece of what lies where: shares dealt to whole pieces, and the bytes that came of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Place = Literal["device", "host_memory", "disk"]
PLACES: tuple[Place, ...] = ("device", "host_memory", "disk")


def dealt(sizes: Sequence[int], host: float, disk: float) -> list[Place]:
    """Return the place of each piece of these sizes, spread as evenly as shares allow.

    Each piece goes where most is owed, so that what is brought is brought beside what stays;
    no place is more than the largest piece away from its share.
    """
    shares = dict(zip(PLACES, (1.0 - host - disk, host, disk), strict=True))
    given: Counter[Place] = Counter()
    found: list[Place] = []
    for done in accumulate(sizes):
        owed = {place: share * done - given[place] for place, share in shares.items()}
        place = max(PLACES, key=lambda each: owed[each])
        given[place] += sizes[len(found)]
        found.append(place)
    return found


@dataclass
class Held:
    """The bytes of one class of tensors by place: now, and when they were most."""

    now: Counter[Place] = field(default_factory=Counter)
    most: Counter[Place] = field(default_factory=Counter)

    def add(self, place: Place, size: int) -> None:
        """Count ``size`` bytes more, or fewer, in a place."""
        self.now[place] += size
        if self.now.total() > self.most.total():
            self.most = Counter(self.now)

    def share(self, place: Place) -> float:
        """Return a place's part of all bytes when they were most."""
        return self.most[place] / self.most.total() if self.most.total() else 0.0


@dataclass
class PolicyFigures:
    """What lay where and what was moved."""

    weights: Held = field(default_factory=Held)
    cache: Held = field(default_factory=Held)
    activations: Held = field(default_factory=Held)
    passes: int = 0
    loads: Counter[int] = field(default_factory=Counter)  # of each layer
    weight_bytes: int = 0
    cache_bytes: int = 0

    def begin(self) -> None:
        """Forget what was moved and held so far, but for the weights, which stay."""
        fresh = PolicyFigures(weights=self.weights)
        self.__dict__.update(fresh.__dict__)

    def bytes_in(self, place: Place) -> int:
        """Return the bytes of all classes that a place held."""
        return sum(each.most[place] for each in (self.weights, self.cache, self.activations))

    def measured(self) -> dict[str, float]:
        """Return the figures of the job's result; shares have the planner's names."""
        found = {
            "weights_cpu": self.weights.share("host_memory"),
            "weights_disk": self.weights.share("disk"),
            "kv_cpu": self.cache.share("host_memory"),
            "kv_disk": self.cache.share("disk"),
            "activations_cpu": self.activations.share("host_memory"),
        }
        return found | {
            "host_bytes": float(self.bytes_in("host_memory")),
            "offloaded_disk_bytes": float(self.bytes_in("disk")),
            "layer_loads": float(self.loads.total()),
            "weight_bytes_brought": float(self.weight_bytes),
            "kv_bytes_brought": float(self.cache_bytes),
        }
