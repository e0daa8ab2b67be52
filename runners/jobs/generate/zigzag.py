"""FlexGen's zig-zag schedule: weights, cache and activations over GPU, host and disk."""

import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel

from runners.jobs.generate.stage_model import BITS, PackedLayer, PackedTensor, cache_size
from runners.jobs.generate.static import (
    Answer,
    AnswerLimits,
    BatchRun,
    Ids,
    PaddedBatch,
    StopRequestedError,
    append_tokens,
    now,
)
from runners.jobs.loading import Extra, LayerwiseModel
from runners.jobs.memory import tensor_bytes
from runners.jobs.model_files import SINGLE
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import (
    BYTES_TOO,
    Room,
    StoredTensors,
    Tensors,
    check_finite_tensors,
    host_empty,
    in_host,
)
from runners.jobspec import KvCache
from runners.jobspec.generate import PolicyOffload

# ---------------------------------------------------------------------------
# Decoder layers with weights divided over device, host memory and disk by a policy.
# ---------------------------------------------------------------------------


# Group-wise 4-bit weight quantisation: a scale and an offset per group of a row's values.
#
# Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 5: asymmetric, groups of 64.


# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.


STORED_BITS = 4
MATRIX = 2  # dimensions
PARTS = PackedTensor._fields


def pack_layer(tensors: Tensors, group_size: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with each matrix of whole groups quantised to packed parts.

    A part is named ``<matrix>.<part>``; other tensors are unchanged.
    """
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != MATRIX or tensor.shape[-1] % group_size:
            tensors_out[name] = tensor
            continue
        groups = PackedTensor.of(tensor.unflatten(-1, (-1, group_size)), STORED_BITS)
        tensors_out |= {f"{name}.{part}": value for part, value in groups._asdict().items()}
    return tensors_out


def unpack_layer(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with dequantised matrices."""
    tensors_out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part not in PARTS:
            tensors_out[name] = tensor
        elif part == PARTS[0]:
            parts = PackedTensor(*(tensors[f"{matrix}.{each}"] for each in PARTS))
            tensors_out[matrix] = parts.dequantise(STORED_BITS, dtype).flatten(-2)
    return tensors_out


# Division of tensors over device, host memory and disk by shares, and their bytes.


Place = Literal["device", "host_memory", "disk"]
PLACES: tuple[Place, ...] = ("device", "host_memory", "disk")


def interleaved_places(sizes: Sequence[int], host: float, disk: float) -> list[Place]:
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
class BytesByPlace:
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

    weights: BytesByPlace = field(default_factory=BytesByPlace)
    cache: BytesByPlace = field(default_factory=BytesByPlace)
    activations: BytesByPlace = field(default_factory=BytesByPlace)
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

    def result_metrics(self) -> dict[str, float]:
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


class PlacedLayers:
    """Each layer on the device, in host memory or on disk; the next one is prefetched.

    At most two non-resident layers are on the device: the computing one and the prefetched one.
    With 4 bits a layer is packed in every place, and dequantised only while it computes.
    """

    def __init__(
        self,
        skeleton: LayerwiseModel,
        folder: Path,
        policy: PolicyOffload,
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
        self.places: list[Place] = interleaved_places(
            sizes, policy.weights_cpu, policy.weights_disk
        )
        self._source = StoredTensors(folder)
        self._files: dict[int, StoredTensors] = {}
        self._stored: dict[int, Tensors] = {}
        self._sizes: dict[int, int] = {}
        self._rooms = [Room(self._within) for _ in range(2)]
        self._reads = 0
        self._thread = ThreadPoolExecutor(1, "next-layer")
        self._ahead: tuple[int, Future[Tensors]] | None = None
        for index, place in enumerate(self.places):
            self._store(index, place, policy.group_size, scratch)
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
        whole = unpack_layer(tensors, self._skeleton.dtype) if self._is_narrow else tensors
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
            tensors = pack_layer(tensors, group_size)
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
            save_file(contiguous, str(folder / SINGLE))
            self._files[index] = StoredTensors(folder, BYTES_TOO)

    def _within(self, name: str) -> str:
        """Return a stored tensor's name within its layer, so that layers can share buffers."""
        prefix = f"{self._skeleton.prefix}."
        return name.removeprefix(prefix).partition(".")[2] if name.startswith(prefix) else name


# ---------------------------------------------------------------------------
# FlexGen's zig-zag block schedule, with an offloaded KV cache per layer.
# ---------------------------------------------------------------------------


# An offloaded KV cache of one layer, in host memory or a file, prefetched for its turn.
#
# Tokens are the first dimension, so that new ones are appended contiguously.


# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.


Parts = tuple[torch.Tensor, ...]


class Store(Protocol):
    """Storage for the tokens of one layer and micro-batch; parts are [tokens, ...]."""

    place: Place

    def add(self, newer: Parts) -> None:
        """Append tokens."""

    def prefetch(self) -> None:
        """Start to prefetch the stored tokens."""

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""


class HostStore:
    """Tokens in host memory; without an accelerator that is the device's memory, used in place."""

    place: Place = "host_memory"

    def __init__(self, capacity: int, figures: PolicyFigures) -> None:
        """``capacity``: the maximum number of tokens."""
        self._capacity, self._figures = capacity, figures
        self._tokens: Parts = ()
        self._count = 0

    def add(self, newer: Parts) -> None:
        """Append tokens."""
        if not self._tokens:
            self._tokens = tuple(_host_room(each, self._capacity) for each in newer)
        count = len(newer[0])
        for buffer, new in zip(self._tokens, newer, strict=True):
            buffer[self._count : self._count + count].copy_(new)
        self._count += count

    def prefetch(self) -> None:
        """Do nothing: copies from host memory are made on use."""

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""
        self.add(newer)
        tokens = tuple(each[: self._count].to(newer[0].device) for each in self._tokens)
        self._figures.cache_bytes += sum(each.nbytes for each in tokens)
        return tokens


class DiskStore:
    """Tokens in an unnamed file; one thread reads and writes, in order."""

    place: Place = "disk"

    def __init__(
        self, folder: Path, capacity: int, thread: ThreadPoolExecutor, figures: PolicyFigures
    ) -> None:
        self._capacity, self._thread, self._figures = capacity, thread, figures
        self._owner = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives on
        weakref.finalize(self, self._owner.close)
        self.file = self._owner.fileno()
        self._templates: Parts = ()  # one token of each part, empty
        self._count = 0
        self._prefetch: Future[Parts] | None = None
        self._written: list[Future[None]] = []

    def add(self, newer: Parts) -> None:
        """Append tokens; the thread writes them.

        Raises:
            OSError: an earlier write failed.
        """
        if not self._templates:
            self._templates = tuple(torch.empty_like(each[:0], device="cpu") for each in newer)
        for each in self._written:
            if each.done():
                each.result()
        buffer = tuple(each.cpu().contiguous() for each in newer)
        pending = [each for each in self._written if not each.done()]
        self._written = [*pending, self._thread.submit(self._write, buffer, self._count)]
        self._count += len(newer[0])

    def prefetch(self) -> None:
        """Start to read the stored tokens."""
        if self._count and self._prefetch is None:
            self._prefetch = self._thread.submit(self._read, self._count)

    def all_with(self, newer: Parts) -> Parts:
        """Append tokens, and return all of them on the device."""
        self.prefetch()
        old = self._count
        tokens = self._prefetch.result() if self._prefetch else ()
        self._prefetch = None
        self.add(newer)
        for whole, new in zip(tokens, newer, strict=True):
            whole[old : self._count].copy_(new)
        self._figures.cache_bytes += sum(each[:old].nbytes for each in tokens)
        device = newer[0].device
        return tuple(each[: self._count].to(device) for each in tokens)

    def _read(self, count: int) -> Parts:
        parts = []
        for part, offset in zip(self._templates, self._offsets(), strict=True):
            whole = part.new_empty((count + 1, *part.shape[1:]))  # room for the next token
            _read_whole(self.file, _bytes_of(whole[:count]), offset)
            parts.append(whole)
        return tuple(parts)

    def _write(self, newer: Parts, at: int) -> None:
        for part, offset in zip(newer, self._offsets(), strict=True):
            begin = offset + at * _token_bytes(part)
            _write_whole(self.file, _bytes_of(part), begin)

    def _offsets(self) -> list[int]:
        sizes = [self._capacity * _token_bytes(each) for each in self._templates]
        return [sum(sizes[:at]) for at in range(len(sizes))]


class OffloadedCacheLayer(DynamicLayer):
    """The offloaded cache of one layer and micro-batch, plain or in few bits.

    The layer gets the same as from a cache on the device: the first keys and values unquantised,
    later all of them as stored.
    """

    def __init__(self, store: Store, bits: int | None) -> None:
        """``bits``: 4 or 2; None: not quantised."""
        super().__init__()
        self.store, self._bits = store, bits
        self._length = 0
        self.num_bytes = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [rows, heads, tokens, width] and return all."""
        newer = self._stored_form(key_states, value_states)
        is_first = not self._length
        self._length += key_states.shape[-2]
        self.num_bytes += sum(each.nbytes for each in newer)
        if is_first:
            self.is_initialized = True
            self.store.add(newer)
            return key_states, value_states
        whole = [each.permute(1, 2, 0, 3) for each in self.store.all_with(newer)]
        return self._restored(whole, key_states.dtype)

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self._length

    def _stored_form(self, *states: torch.Tensor) -> Parts:
        """Return keys and values as they are stored, tokens first."""
        bits = self._bits
        stored = [
            part for each in states for part in (PackedTensor.of(each, bits) if bits else (each,))
        ]
        return tuple(each.permute(2, 0, 1, 3).contiguous() for each in stored)

    def _restored(
        self, parts: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._bits:
            return parts[0], parts[1]
        half = len(PackedTensor._fields)
        keys, values = PackedTensor(*parts[:half]), PackedTensor(*parts[half:])
        return keys.dequantise(self._bits, dtype), values.dequantise(self._bits, dtype)


def _host_room(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Allocate host memory for tokens, pinned if the source is on a GPU."""
    shape = (capacity, *like.shape[1:])
    return host_empty(shape, like.dtype, is_pinned=like.is_cuda)


def _token_bytes(part: torch.Tensor) -> int:
    return prod(part.shape[1:]) * part.element_size()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().reshape(-1).data


def _read_whole(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            msg = f"the cache's file ends {len(view) - done} bytes early"
            raise OSError(msg)
        done += count


def _write_whole(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


@dataclass
class MicroBatch:
    """Some prompts of a block: their inputs, cache, hidden states and answers."""

    padded: PaddedBatch
    cache: Cache
    waits_in: Place
    ids: torch.Tensor  # [rows, new]: the next input
    answers: list[Answer]
    open_rows: list[int]
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    extras: list[Extra] = field(default_factory=list)


class ZigZag:
    """A model with an offload policy, run block by block."""

    def __init__(
        self,
        skeleton: LayerwiseModel,
        folder: Path,
        policy: PolicyOffload,
        scratch: Path,
        *,
        kv_cache: KvCache = "plain",
        is_narrow: bool = False,
    ) -> None:
        """Divide the layers; ``scratch``: folder for disk offload, ``is_narrow``: 4-bit weights.

        Raises:
            BadInputError: a layer's cache cannot be offloaded, or the weights cannot be read.
        """
        self._skeleton, self._policy, self._scratch = skeleton, policy, scratch
        self._kv_cache: KvCache = kv_cache
        _check_cache(skeleton.model, policy, kv_cache)
        self.figures = PolicyFigures()
        self.layers = PlacedLayers(
            skeleton, folder, policy, scratch, self.figures, is_narrow=is_narrow
        )
        self._is_narrow = is_narrow
        self._cache_thread = ThreadPoolExecutor(1, "next-cache")

    @property
    def model(self) -> PreTrainedModel:
        """Return the model around the layers."""
        return self._skeleton.model

    @property
    def where(self) -> str:
        """Return a note on where weights, cache and activations are."""
        policy, count = self._policy, len(self.layers.places)
        host, disk = (self.layers.places.count(place) for place in ("host_memory", "disk"))
        notes = [
            f"{count - host - disk} of {count} layers stay",
            f"{host} come from host memory and {disk} from disk in every pass over a block",
            f"cache {policy.kv_cpu:.0%} in host memory and {policy.kv_disk:.0%} on disk",
            f"waiting activations {policy.activations_cpu:.0%} in host memory",
        ]
        if self._is_narrow:
            notes.append(f"layers' matrices in 4 bits, groups of {policy.group_size}")
        if self._skeleton.device.type == "cpu":
            notes.append("no accelerator: host memory is the device's own, used in place")
        return "; ".join(notes)

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of the layers that are resident on the device in 4 bits."""
        return self.layers.packed_bytes

    @torch.inference_mode()
    def run_batch(self, prompts: Sequence[Ids], limits: AnswerLimits) -> BatchRun:
        """Answer a block of prompts, each micro-batch left-padded to its longest.

        Raises:
            StopRequestedError: the job is to stop; nothing of this block is kept.
        """
        micro_batches = self._cut(prompts, limits)
        began = now(self._skeleton.device)
        self._run_pass(micro_batches, limits)
        prefilled = now(self._skeleton.device)
        steps = 0
        while any(each.open_rows for each in micro_batches):
            if limits.should_stop():
                raise StopRequestedError
            self._run_pass([each for each in micro_batches if each.open_rows], limits)
            steps += 1
        ended = now(self._skeleton.device)
        for place, size in (sizes for each in micro_batches for sizes in _sizes(each.cache)):
            self.figures.cache.add(place, size)
        self.figures.cache.now.clear()
        device_bytes = sum(cache_size(each.cache) for each in micro_batches)
        answers = [answer for each in micro_batches for answer in each.answers]
        return BatchRun(answers, prefilled - began, ended - prefilled, steps, device_bytes)

    def _cut(self, prompts: Sequence[Ids], limits: AnswerLimits) -> list[MicroBatch]:
        size = self._policy.micro_batch_size or len(prompts)
        rows = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        sizes = [len(each) * (max(map(len, each)) + limits.output_tokens) for each in rows]
        layer_sizes = sizes * len(self._skeleton.layers)
        places = interleaved_places(layer_sizes, self._policy.kv_cpu, self._policy.kv_disk)
        waits = interleaved_places(sizes, self._policy.activations_cpu, 0.0)
        micro_batches = []
        for at, batch_prompts in enumerate(rows):
            padded = PaddedBatch.of(batch_prompts, self._skeleton.device)
            capacity = padded.ids.shape[1] + limits.output_tokens
            cache = self._cache(places[at :: len(rows)], capacity)
            answers = [Answer() for _ in batch_prompts]
            micro_batches.append(
                MicroBatch(
                    padded, cache, waits[at], padded.ids, answers, list(range(len(batch_prompts)))
                )
            )
        return micro_batches

    def _cache(self, places: Sequence[Place], capacity: int) -> Cache:
        """Return an empty cache with its layers in these places."""
        cache, bits = DynamicCache(config=self.model.config), BITS.get(self._kv_cache)
        for index, place in enumerate(places):
            if place == "host_memory":
                cache.layers[index] = OffloadedCacheLayer(HostStore(capacity, self.figures), bits)
            elif place == "disk":
                store = DiskStore(self._scratch, capacity, self._cache_thread, self.figures)
                cache.layers[index] = OffloadedCacheLayer(store, bits)
            elif bits:
                cache.layers[index] = PackedLayer(bits)
        return cache

    def _run_pass(self, micro_batches: Sequence[MicroBatch], limits: AnswerLimits) -> None:
        """Run every micro-batch through every layer once, and append its next tokens."""
        self.figures.passes += 1
        for each in micro_batches:
            self._enter(each)
        turns = [(at, each) for at in range(len(self._skeleton.layers)) for each in micro_batches]
        following = iter(turns)
        _prefetch_cache(next(following, None))
        for index in range(len(self._skeleton.layers)):
            self.layers.take(index)
            for each in micro_batches:
                _prefetch_cache(next(following, None))
                hidden = each.hidden.to(self._skeleton.device)
                self.figures.activations.add(each.waits_in, -each.hidden.nbytes)
                output = self._skeleton.layers[index](hidden, **each.extras[index])
                self._store_hidden(each, output[0] if isinstance(output, tuple) else output)
            self.layers.drop(index)
        for each in micro_batches:
            self._leave(each, limits)

    def _enter(self, micro: MicroBatch) -> None:
        padded = micro.padded
        hidden, micro.extras = self._skeleton.enter(
            input_ids=micro.ids,
            attention_mask=padded.mask,
            position_ids=padded.positions,
            past_key_values=micro.cache,
            use_cache=True,
        )
        padded.advance()
        self._store_hidden(micro, hidden)

    def _store_hidden(self, micro: MicroBatch, hidden: torch.Tensor) -> None:
        """Store hidden states in their place until the next layer."""
        micro.hidden = hidden.cpu() if micro.waits_in == "host_memory" else hidden
        self.figures.activations.add(micro.waits_in, hidden.nbytes)

    def _leave(self, micro: MicroBatch, limits: AnswerLimits) -> None:
        last = micro.hidden[:, -1:].to(self._skeleton.device)
        self.figures.activations.add(micro.waits_in, -micro.hidden.nbytes)
        logits = self._skeleton.logits(last, micro.ids[:, -1:], 1)
        tokens = logits[:, -1].argmax(dim=-1)
        micro.ids, micro.extras = tokens[:, None], []
        micro.open_rows = append_tokens(micro.answers, micro.open_rows, tokens.tolist(), limits)


def _prefetch_cache(turn: tuple[int, MicroBatch] | None) -> None:
    if turn is not None:
        layer = turn[1].cache.layers[turn[0]]
        if isinstance(layer, OffloadedCacheLayer):
            layer.store.prefetch()


def _sizes(cache: Cache) -> Iterator[tuple[Place, int]]:
    for layer in cache.layers:
        if isinstance(layer, OffloadedCacheLayer):
            yield layer.store.place, layer.num_bytes
        else:
            yield "device", cache_size(Cache(layers=[layer]))


def _check_cache(model: PreTrainedModel, policy: PolicyOffload, kind: KvCache) -> None:
    if kind == "fp8" and policy.kv_cpu + policy.kv_disk:
        msg = "kv_cache fp8 stays on the device; choose plain or int4, or no kv_cpu and kv_disk"
        raise BadInputError(msg)
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if policy.kv_cpu + policy.kv_disk and layers != {DynamicLayer}:
        names = ", ".join(sorted(each.__name__ for each in layers))
        msg = f"kv_cpu and kv_disk need full attention in every layer, here is {names}"
        raise BadInputError(f"{msg}; plan the cache on the device")
