"""Measures memory: a process's peak, and the exact bytes of live tensors."""

import contextlib
import ctypes
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from planner.specs.units import KIB
from runners.supervision.procfs import memory_headroom

PROC = Path("/proc/self")
M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 4 * 2**20  # mapping smaller blocks in every step took 5 % of its time
RESET_PEAK_RSS = "5"  # proc(5): writing 5 to clear_refs resets VmHWM


def terms_held(held: Mapping[str, int]) -> dict[str, float]:
    """Return metric names and values of measured bytes per planner tensor class.

    They are reported as soon as they are allocated, so that they are known if the rest does not
    fit.
    """
    return {f"held_{term}_bytes": float(size) for term, size in held.items()}


@dataclass(frozen=True)
class Peak:
    """The peak memory since the meter's start, and the memory at its start."""

    bytes: int
    start_bytes: int
    how: str


class PeakMeter:
    """Meter of peak memory: CUDA's allocator on a GPU, the process's RSS on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        release_free_memory()
        self._is_reset = self._reset()
        self._start = self._held()
        self._highest = 0  # per-core page counters: a reading may be some pages too low

    def read(self) -> Peak:
        """Return the peak so far in bytes."""
        if self._on_cuda:
            peak = int(torch.cuda.max_memory_allocated(self._device))
            return Peak(peak, self._start, "CUDA allocator's peak since the model began to load")
        since = "this part began" if self._is_reset else "the process began"
        self._highest = max(self._highest, proc_self_status_bytes("VmHWM"))
        return Peak(self._highest, self._start, f"peak resident memory since {since}")

    def _reset(self) -> bool:
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            (PROC / "clear_refs").write_text(RESET_PEAK_RSS)
        except (
            OSError
        ):  # forbidden in some containers: the peak then covers the process's lifetime
            return False
        return True

    def _held(self) -> int:
        if self._on_cuda:
            return int(torch.cuda.memory_allocated(self._device))
        return resident_bytes()


def used_device_bytes(device: torch.device) -> int:
    """Return the most memory of a GPU in use since its peak statistics were reset, in bytes.

    The allocator's reserved blocks at their peak, and what lies outside of it now: contexts,
    libraries' workspaces and other processes. This is what has to be below the device's capacity.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(torch.cuda.max_memory_reserved(device) + outside)


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    return proc_self_status_bytes("VmRSS")


def free_host_bytes() -> int | None:
    """Return the available host memory in bytes, or None if unknown."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = [int(each.split()[1]) * KIB for each in lines if each.startswith("MemAvailable:")]
    room = memory_headroom()
    return min(available if room is None else [*available, room], default=None)


def map_large_blocks() -> None:
    """Make malloc map large blocks separately, so that freed ones are returned to the system.

    By default glibc raises its mmap threshold with each large freed block, up to 32 MiB; later
    blocks come from its heap, whose fragmentation cost 40 to 80 MiB in a small training.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def release_free_memory() -> None:
    """Return freed memory to the system, so that it does not count in the next peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc: nothing to trim
        return


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes, including scales if it is quantised."""
    return sum(each.numel() * each.element_size() for each in parts_of(tensor))


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's plain parts: itself, or codes and scales."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None:
        names, _context = inner()
        for name in names:
            yield from parts_of(getattr(tensor, name))
        return
    yield tensor
    for each in _quant_state_tensors(tensor):
        yield from parts_of(each)


def gradient_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the present gradients."""
    return sum(tensor_bytes(each.grad) for each in model.parameters() if each.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimiser's states."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor_bytes(each) for each in states if isinstance(each, torch.Tensor))


def model_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all parameters and buffers; shared tensors count once."""
    tensors = {id(each): each for each in _tensors(model)}
    return sum(tensor_bytes(each) for each in tensors.values())


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of a generation cache's keys and values."""
    return sum(
        tensor_bytes(each)
        for layer in cache.layers
        for each in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(each, torch.Tensor)
    )


def _tensors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _quant_state_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Yield bitsandbytes' scales and code books of packed weights."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        for name in ("absmax", "code", "offset"):
            value = getattr(state, name, None)
            if isinstance(value, torch.Tensor):
                yield value
        state = getattr(state, "state2", None)


def proc_self_status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes, or 0 if missing."""
    for line in (PROC / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    return 0


# Counts the exact bytes of live tensors during a step, independent of the allocator.
#
# Tracks every operator's outputs and each storage's release: unlike process memory, the figure
# excludes malloc caches and libraries and is the same on any machine.


# mypy: disable-error-code="no-untyped-call"
# torch leaves its dispatch modes and hooks without types.


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators create while it is active, but no earlier ones.

    ``now`` and ``peak`` are bytes. On a CPU the backward pass is counted too, since it runs in
    the calling thread.
    """

    def __init__(
        self, before: Iterable[torch.Tensor] = (), *, follows_resizing: bool = False
    ) -> None:
        """Exclude the tensors in ``before``.

        With ``follows_resizing`` storages are measured again after each operator, because gathered
        weights are resized in place.
        """
        super().__init__()
        self._follows_resizing = follows_resizing
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[object]] = {}
        self._sizes: dict[int, int] = {}
        self._known = {id(each.untyped_storage()) for each in before}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's protocol
        """Run the operator and count its outputs."""
        del types
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._note(each)
        if self._follows_resizing:
            for key, alive in list(self._alive.items()):
                storage = alive()
                if isinstance(storage, torch.UntypedStorage):
                    self._sizes[key] = storage.nbytes()
            self.now = sum(self._sizes.values())
            self.peak = max(self.peak, self.now)
        return made

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a live tensor."""
        key = id(tensor.untyped_storage())
        if key in self._alive:
            self._forget(key)
            self._known.add(key)

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in self._alive:
            return
        self._sizes[key] = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _gone: self._forget(key))
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]


@contextlib.contextmanager
def activations_counted(
    model: torch.nn.Module, *, follows_resizing: bool = False
) -> Iterator[LiveBytes]:
    """Count the tensors of a forward and backward pass, without weights and gradients."""
    gradients = (each.grad for each in model.parameters() if each.grad is not None)
    excluded = itertools.chain(model.parameters(), model.buffers(), gradients)

    def arrived(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            live.leave_out(parameter.grad)

    with LiveBytes(excluded, follows_resizing=follows_resizing) as live:
        hooks = [
            each.register_post_accumulate_grad_hook(arrived)
            for each in model.parameters()
            if each.requires_grad
        ]
        try:
            yield live
        finally:
            for hook in hooks:
                hook.remove()
