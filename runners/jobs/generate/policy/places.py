"""Division of tensors over device, host memory and disk by shares, and their bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Place = Literal["device", "host_memory", "disk"]
PLACES: tuple[Place, ...] = ("device", "host_memory", "disk")


def dealt(sizes: Sequence[int], host: float, disk: float) -> list[Place]:
    """Return the place of each piece with these sizes, interleaved so that shares are met.

    Each piece goes to the place that is furthest below its share, so that transfers alternate with
    resident pieces; no place deviates from its share by more than the largest piece.
    """
    shares = dict(zip(PLACES, (1.0 - host - disk, host, disk), strict=True))
    assigned: Counter[Place] = Counter()
    places: list[Place] = []
    for total in accumulate(sizes):
        deficits = {place: share * total - assigned[place] for place, share in shares.items()}
        place = max(PLACES, key=lambda each: deficits[each])
        assigned[place] += sizes[len(places)]
        places.append(place)
    return places


@dataclass
class Held:
    """The bytes of one class of tensors by place: now, and at the peak."""

    now: Counter[Place] = field(default_factory=Counter)
    most: Counter[Place] = field(default_factory=Counter)

    def add(self, place: Place, size: int) -> None:
        """Add ``size`` bytes, which may be negative, to a place."""
        self.now[place] += size
        if self.now.total() > self.most.total():
            self.most = Counter(self.now)

    def share(self, place: Place) -> float:
        """Return a place's share of all bytes at the peak."""
        return self.most[place] / self.most.total() if self.most.total() else 0.0


@dataclass
class PolicyFigures:
    """The bytes by place, and the bytes transferred."""

    weights: Held = field(default_factory=Held)
    cache: Held = field(default_factory=Held)
    activations: Held = field(default_factory=Held)
    passes: int = 0
    loads: Counter[int] = field(default_factory=Counter)  # per layer
    weight_bytes: int = 0
    cache_bytes: int = 0

    def begin(self) -> None:
        """Reset all figures except the weights', which stay loaded."""
        fresh = PolicyFigures(weights=self.weights)
        self.__dict__.update(fresh.__dict__)

    def bytes_in(self, place: Place) -> int:
        """Return the peak bytes of all classes in a place."""
        return sum(each.most[place] for each in (self.weights, self.cache, self.activations))

    def measured(self) -> dict[str, float]:
        """Return the figures of the job's result; shares have the planner's names."""
        shares = {
            "weights_cpu": self.weights.share("host_memory"),
            "weights_disk": self.weights.share("disk"),
            "kv_cpu": self.cache.share("host_memory"),
            "kv_disk": self.cache.share("disk"),
            "activations_cpu": self.activations.share("host_memory"),
        }
        return shares | {
            "host_bytes": float(self.bytes_in("host_memory")),
            "offloaded_disk_bytes": float(self.bytes_in("disk")),
            "layer_loads": float(self.loads.total()),
            "weight_bytes_brought": float(self.weight_bytes),
            "kv_bytes_brought": float(self.cache_bytes),
        }
