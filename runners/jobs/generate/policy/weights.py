"""Decoder layers with weights divided over the places of a policy, prefetched for their turn."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from runners.generate_options import PolicyOffload
from runners.jobs.generate.policy.groupwise import packed, unpacked
from runners.jobs.generate.policy.places import Place, PolicyFigures, dealt
from runners.jobs.layers import LayerwiseModel
from runners.jobs.memory import tensor_bytes
from runners.jobs.stored import BYTES_TOO, Room, StoredTensors, Tensors, check_finite, in_host


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
        check_finite(tensors, self._skeleton.name_of(index, ""))
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
