"""Decoder layers with weights divided over device, host memory and disk by a policy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from runners.jobs.generate.caches import Packed
from runners.jobs.memory import tensor_bytes
from runners.jobs.skeleton import LayerwiseModel
from runners.jobs.weights import (
    BYTES_TOO,
    Room,
    StoredTensors,
    Tensors,
    check_finite_tensors,
    in_host,
)
from runners.jobspec.generate import PolicyOffload

# Group-wise 4-bit weight quantisation: a scale and an offset per group of a row's values.
#
# Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 5: asymmetric, groups of 64.


# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.


BITS = 4
MATRIX = 2  # dimensions
PARTS = Packed._fields


def packed(tensors: Tensors, group_size: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with each matrix of whole groups quantised to packed parts.

    A part is named ``<matrix>.<part>``; other tensors are unchanged.
    """
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != MATRIX or tensor.shape[-1] % group_size:
            tensors_out[name] = tensor
            continue
        groups = Packed.of(tensor.unflatten(-1, (-1, group_size)), BITS)
        tensors_out |= {f"{name}.{part}": value for part, value in groups._asdict().items()}
    return tensors_out


def unpacked(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with dequantised matrices."""
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part not in PARTS:
            tensors_out[name] = tensor
        elif part == PARTS[0]:
            parts = Packed(*(tensors[f"{matrix}.{each}"] for each in PARTS))
            tensors_out[matrix] = parts.unpacked(BITS, dtype).flatten(-2)
    return tensors_out


# Division of tensors over device, host memory and disk by shares, and their bytes.


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


class DealtLayers:
    """Each layer on the device, in host memory or on disk; the next one is prefetched.

    At most two non-resident layers are on the device: the computing one and the prefetched one.
    With 4 bits a layer is packed in every place, and dequantised only while it computes.
    """

    def __init__(
        self,
        skeleton: LayerwiseModel,
        folder: Path,
        asked: PolicyOffload,
        scratch: Path,
        figures: PolicyFigures,
        *,
        is_narrow: bool,
    ) -> None:
        """Read every layer once and store it in its place; ``is_narrow``: in 4 bits.

        Raises:
            BadInputError: a tensor contains NaN, or is stored as no float of 16 or 32 bits.
        """
        self._skeleton, self._figures, self._is_narrow = skeleton, figures, is_narrow
        sizes = [sum(each.numel() for each in layer.parameters()) for layer in skeleton.layers]
        self.places: list[Place] = dealt(sizes, asked.weights_cpu, asked.weights_disk)
        self._source = StoredTensors(folder)
        self._files: dict[int, StoredTensors] = {}
        self._stored: dict[int, Tensors] = {}
        self._sizes: dict[int, int] = {}
        self._rooms = [Room(self._within) for _ in range(2)]
        self._reads = 0
        self._thread = ThreadPoolExecutor(1, "next-layer")
        self._ahead: tuple[int, Future[Tensors]] | None = None
        for index, place in enumerate(self.places):
            self._store(index, place, asked.group_size, scratch)
        self._nonresident = [index for index, place in enumerate(self.places) if place != "device"]

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of the layers that are resident on the device in 4 bits."""
        resident = [at for at, place in enumerate(self.places) if place == "device"]
        return sum(self._sizes[at] for at in resident) if self._is_narrow else 0

    def take(self, index: int) -> None:
        """Load the layer's weights into it, and start to prefetch the next non-resident layer."""
        if index in self._nonresident:
            self._fill(index, self._prefetched(index))
        elif index in self._stored:
            self._fill(index, self._stored[index])

    def drop(self, index: int) -> None:
        """Free the weights of a non-resident layer."""
        if index in self._nonresident or index in self._stored:
            self._skeleton.drop_layer(index)

    def _fill(self, index: int, tensors: Tensors) -> None:
        whole = unpacked(tensors, self._skeleton.dtype) if self._is_narrow else tensors
        self._skeleton.layers[index].load_state_dict(whole, strict=False, assign=True)

    def _prefetched(self, index: int) -> Tensors:
        expected, prefetched = self._ahead or (None, None)
        tensors = prefetched.result() if prefetched and expected == index else self._load(index)
        at = self._nonresident.index(index) + 1
        next_index = self._nonresident[at % len(self._nonresident)]
        self._ahead = (next_index, self._thread.submit(self._load, next_index))
        self._figures.loads[index] += 1
        self._figures.weight_bytes += self._sizes[index]
        return tensors

    def _load(self, index: int) -> Tensors:
        device = self._skeleton.device
        if index in self._stored:
            stored = self._stored[index]
            return {name: each.to(device, non_blocking=True) for name, each in stored.items()}
        room = self._rooms[self._reads % 2]
        self._reads += 1
        if self._is_narrow:
            files = self._files[index]
            return {name: files.read(name, room).to(device) for name in files.names}
        return self._read(index, room)

    def _read(self, index: int, room: Room | None = None) -> dict[str, torch.Tensor]:
        layer_prefix = self._skeleton.name_of(index, "")
        device, dtype = self._skeleton.device, self._skeleton.dtype
        return {
            name.removeprefix(layer_prefix): self._source.read(name, room).to(device, dtype)
            for name in self._source.names
            if name.startswith(layer_prefix)
        }

    def _store(self, index: int, place: Place, group_size: int, scratch: Path) -> None:
        """Read a layer, quantise it if requested, and store it in its place."""
        tensors: Mapping[str, torch.Tensor] = self._read(index)
        check_finite_tensors(tensors, self._skeleton.name_of(index, ""))
        if self._is_narrow:
            tensors = packed(tensors, group_size)
        self._sizes[index] = sum(map(tensor_bytes, tensors.values()))
        self._figures.weights.add(place, self._sizes[index])
        if place == "host_memory":
            self._stored[index] = {name: in_host(each) for name, each in tensors.items()}
        elif place == "device" and self._is_narrow:
            self._stored[index] = dict(tensors)
        elif place == "device":
            self._skeleton.layers[index].load_state_dict(tensors, strict=False, assign=True)
        elif self._is_narrow:
            folder = scratch / f"layer-{index}"
            folder.mkdir()
            contiguous = {name: each.cpu().contiguous() for name, each in tensors.items()}
            save_file(contiguous, str(folder / "narrow.safetensors"))
            self._files[index] = StoredTensors(folder, BYTES_TOO)

    def _within(self, name: str) -> str:
        """Return a stored tensor's name within its layer, so that layers can share buffers."""
        prefix = f"{self._skeleton.prefix}."
        return name.removeprefix(prefix).partition(".")[2] if name.startswith(prefix) else name
