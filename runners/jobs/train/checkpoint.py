"""Training checkpoints: complete or absent, written while steps go on."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runners.jobs.memory import free_host_bytes
from runners.jobs.ranks import Ranks
from runners.jobs.train.optimizers import OffloadedAdamW
from runners.jobs.train.quantized import integer_matrices, trained_tensors
from runners.jobs.weights import HostBuffers

# Optimizer states as named tensors, to be saved, loaded and shared between ranks.
#
# All state of a weight is taken as it is, so that any optimizer resumes bit-exactly: 8-bit moments
# with their scales, factored moments, step counts, moments in a mapped file.


NUMBERS = {"int": int, "float": float}  # plain numbers are restored as such


def optimizer_state_tensors(
    optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the states as ``<weight name>.<state name>``; none shares memory with another.

    ``names`` are the weights' names, in the optimizer's order.
    """
    tensors: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for weight, parameter in zip(names, _weights(optimizer), strict=True):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensor = value.detach().contiguous()
                address = tensor.data_ptr()
                tensors[f"{weight}.{name}"] = tensor.clone() if address in addresses else tensor
                addresses.add(address)
            elif value is not None:
                kind = type(value).__name__
                tensors[f"{weight}.{name}#{kind}"] = torch.tensor(NUMBERS[kind](value))
    return tensors


def load_optimizer_states(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: dict[str, torch.Tensor]
) -> None:
    """Load optimizer states into an optimizer of the same weights."""
    weights = dict(zip(names, _weights(optimizer), strict=True))
    for key, value in tensors.items():
        weight, _, state_key = key.rpartition(".")
        name, _, kind = state_key.partition("#")
        state = _state(optimizer, weights[weight])
        if kind:
            state[name] = NUMBERS[kind](value.item())
        elif isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.to(weights[weight].device)


def broadcast_optimizer_states(
    ranks: Ranks, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> None:
    """Copy the lead's optimizer states to every rank.

    Raises:
        RankFailedError: not every rank responded in time.
    """
    tensors = optimizer_state_tensors(optimizer, names) if ranks.is_lead else {}
    described = {
        name: (str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in tensors.items()
    }
    shapes = _from_lead(ranks, described)
    if not ranks.is_lead:
        tensors = {name: _empty(*shape) for name, shape in shapes.items()}
    ranks.copy_from_lead([tensors[name] for name in sorted(tensors)])
    if not ranks.is_lead:
        load_optimizer_states(optimizer, names, tensors)


def _from_lead(ranks: Ranks, document: dict[str, Any]) -> dict[str, Any]:
    """Broadcast the lead's JSON document: its length first, then its bytes."""
    text = bytearray(json.dumps(document).encode())
    length = torch.tensor([len(text)])
    ranks.copy_from_lead([length])
    data = torch.zeros(int(length), dtype=torch.uint8)
    if ranks.is_lead:
        data = torch.frombuffer(text, dtype=torch.uint8)
    ranks.copy_from_lead([data])
    received: dict[str, Any] = json.loads(bytes(data.tolist()))
    return received


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.state_of(weight)
    state: dict[str, Any] = optimizer.state[weight]
    return state


PREFIX = "step-"
STATE_FILE = "state.json"
FILES = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors"}


@dataclass
class TrainState:
    """Training progress; the data position follows from it and is not stored.

    ``loss_scale`` is the scale of fp16 gradients, 0 without one, and ``scaled_steps`` the steps
    without overflow since it changed. ``best_validation_loss`` is the lowest so far, 0 before the
    first, and ``validations_without_gain`` counts the validations since. ``mixture`` is the
    history of mixture weights: per entry the first row they apply to, then one weight per source.
    ``mixture_reference`` holds the reference losses in nats. ``inputs`` has what the training
    read with its digest, in pairs; empty in checkpoints of older versions.
    """

    step: int = 0
    tokens: int = 0
    elapsed_seconds: float = 0.0
    loss_scale: float = 0.0
    scaled_steps: int = 0
    best_validation_loss: float = 0.0
    validations_without_gain: int = 0
    mixture: tuple[tuple[float, ...], ...] = ()
    mixture_reference: tuple[float, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Convert the lists of JSON to tuples, so that a copy shares nothing mutable."""
        self.mixture = tuple(tuple(each) for each in self.mixture)
        self.mixture_reference = tuple(self.mixture_reference)
        self.inputs = tuple((name, digest) for name, digest in self.inputs)


class CheckpointContent(NamedTuple):
    """The content of a checkpoint: weights by name, optimizer states by name and state."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: TrainState


def tensor_tables(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the trained weights and the optimizer states by name, as they are now."""
    return trained_weights(model), optimizer_state_tensors(optimizer, _names(model, optimizer))


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's trained weights by name, as they are now."""
    return {name: value.detach() for name, value in _trained(model).items()}


def load_trained_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy trained weights into a model."""
    with torch.no_grad():
        for name, parameter in _trained(model).items():
            parameter.copy_(weights[name])


def write_checkpoint(folder: Path, saved: CheckpointContent) -> Path:
    """Write one checkpoint and return its folder."""
    from safetensors.torch import save_file

    def write(building: Path) -> None:
        for name in ("weights", "optimizer"):
            tensors = {key: each.contiguous() for key, each in getattr(saved, name).items()}
            save_file(tensors, building / FILES[name])
        (building / STATE_FILE).write_text(json.dumps(asdict(saved.state)))

    return publish_checkpoint(folder, saved.state.step, write)


def publish_checkpoint(folder: Path, number: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint folder atomically; older ones may be removed afterwards.

    If ``write`` fails, for example on a full disk, the partial folder is removed.
    """
    final = folder / f"{PREFIX}{number:08d}"
    building = folder / f".{final.name}-building"
    for partial in folder.glob(f".{PREFIX}*-building"):  # killed writes, of this step or another
        shutil.rmtree(partial, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        write(building)
        for path in building.iterdir():
            _sync(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    _sync(folder)
    return final


def remove_older_checkpoints(folder: Path, keep: int = 1) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for older in checkpoints(folder)[:-keep]:
        shutil.rmtree(older, ignore_errors=True)


def read_latest(folder: Path) -> CheckpointContent | None:
    """Return the newest checkpoint, or None."""
    from safetensors.torch import load_file

    folders = checkpoints(folder)
    if not folders:
        return None
    weights, optimizer = (load_file(folders[-1] / file) for file in FILES.values())
    return CheckpointContent(weights, optimizer, _state_of(folders[-1]))


def read_latest_state(folder: Path) -> TrainState | None:
    """Return the progress of the newest checkpoint without its tensors, or None."""
    return next((_state_of(each) for each in checkpoints(folder)[-1:]), None)


def _state_of(checkpoint: Path) -> TrainState:
    return TrainState(**json.loads((checkpoint / STATE_FILE).read_text()))


def load_latest(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState | None:
    """Fill model and optimizer from the newest checkpoint; return its state, or None."""
    saved = read_latest(folder)
    if saved is None:
        return None
    load_trained_weights(model, saved.weights)
    load_optimizer_states(optimizer, _names(model, optimizer), saved.optimizer)
    return saved.state


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained weights; tied ones appear once, frozen ones not at all."""
    matrices = integer_matrices(model).items()
    return trained_tensors(model) | {f"{name}.scale": each.scale for name, each in matrices}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's weights, in its order."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [names[id(each)] for group in optimizer.param_groups for each in group["params"]]


def broadcast_progress(
    ranks: Ranks,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState | None,
) -> TrainState | None:
    """Copy the lead's weights to every rank, and its optimizer and progress if it resumed."""
    progress = json.loads(ranks.broadcast_from_lead(json.dumps(state and asdict(state)).encode()))
    ranks.copy_from_lead(list(model.parameters()))
    if progress is None:
        return None
    broadcast_optimizer_states(ranks, optimizer, _names(model, optimizer))
    return TrainState(**progress)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Asynchronous checkpoints: a step waits only for a copy to host memory.
#
# The file holds the state at the time of the copy. One checkpoint is written at a time, and
# gathered in a process group of its own, so that its messages never mix with those of a step.
# Source: Mohan et al. 2021 (CheckFreq), FAST: snapshot first, then write in the background.


FREE_MEMORY_FACTOR = 1.25  # times the copy's size has to be free, since the steps go on allocating
Tensors = dict[Any, torch.Tensor]  # by name, or by the position of a shard in its tensor


@dataclass(frozen=True)
class StagedCheckpoint:
    """One rank's part of a checkpoint: tables of tensors, and how to assemble the whole.

    Every rank calls ``collect`` once; only the lead gets the whole. It returns None if it has
    stored the parts elsewhere itself, as for the best weights.
    """

    parts: Mapping[str, Tensors]
    collect: Callable[[Mapping[str, Tensors]], CheckpointContent | None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part."""
        return sum(each.nbytes for table in self.parts.values() for each in table.values())

    def copy_to_host(self, buffers: HostBuffers) -> "StagedCheckpoint":
        """Return a copy in host memory that no step changes, in buffers of former ones."""
        parts = {
            part: {name: _host_copy(each.detach(), buffers) for name, each in table.items()}
            for part, table in self.parts.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # device copies are asynchronous
        return replace(self, parts=parts)

    def has_room(self, held_bytes: int = 0) -> bool:
        """Return whether the host has memory for a copy, beside buffers that are held already."""
        free = free_host_bytes()
        return free is None or self.nbytes * FREE_MEMORY_FACTOR - held_bytes <= free


def _host_copy(tensor: torch.Tensor, buffers: HostBuffers) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return buffers.empty_like(tensor).copy_(tensor, non_blocking=True)


@dataclass
class CheckpointWriter:
    """Writes one rank's checkpoints, one at a time, synchronously or in the background."""

    folder: Path
    keep: int  # newest ones
    waited_seconds: float = 0.0  # time that steps waited for copies and writes
    written_seconds: float = 0.0  # total write time, synchronous or not
    copied_bytes: int = 0  # peak of the host copies
    num_written: int = 0
    no_room: str = ""  # why a background write was done synchronously
    # Pinning takes longer than a copy: buffers stay for the next checkpoint.
    _buffers: HostBuffers = field(default_factory=lambda: HostBuffers(is_pinned=True))
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    last_seconds: float = 0.0
    _num_told: int = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a write is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def mean_wait(self) -> float:
        """Return the mean seconds that training waited for a checkpoint; 0 before the first."""
        return self.waited_seconds / self.num_written if self.num_written else 0.0

    def write(self, staged: StagedCheckpoint) -> None:
        """Write one synchronously, after any write that is running.

        Raises:
            RankFailedError: another rank did not send its part in time.
            OSError: the write failed; the previous checkpoint remains.
        """
        began = time.monotonic()
        self._await()
        self._write(staged)
        self.waited_seconds += time.monotonic() - began
        self.check()

    def begin(self, staged: StagedCheckpoint) -> None:
        """Copy a checkpoint and write it in the background; without memory for it, write it now.

        Raises:
            RankFailedError, OSError: as in ``write``, also of the previous write.
        """
        self.check()
        if not staged.has_room(self._buffers.nbytes):
            size = staged.nbytes / 2**30
            self.no_room = f"host memory had no room for a copy of {size:.1f} GiB"
            self.write(staged)
            return
        began = time.monotonic()
        self._await()
        self.check()
        copied = staged.copy_to_host(self._buffers)
        self.copied_bytes = max(self.copied_bytes, copied.nbytes)
        self._thread = threading.Thread(
            target=self._write, args=(copied,), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.waited_seconds += time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a background write, if any.

        Raises:
            RankFailedError, OSError: as in ``write``.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until the running write is complete.

        Raises:
            RankFailedError, OSError: as in ``write``.
        """
        began = time.monotonic()
        self._await()
        self.waited_seconds += time.monotonic() - began
        self.check()

    def abandon(self, timeout_seconds: float) -> None:
        """Wait at most ``timeout_seconds`` for the running write, after the training failed."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def news(self) -> dict[str, float]:
        """Return the duration of the newest write as a metric, once."""
        if self.is_busy or self.num_written == self._num_told:
            return {}
        self._num_told = self.num_written
        return {"checkpoint_write_seconds": self.last_seconds}

    def figures(self) -> dict[str, float]:
        """Return the totals of all writes for the result; empty if there was none."""
        if not self.num_written:
            return {}
        return {
            "checkpoints_written": float(self.num_written),
            "checkpoint_wait_seconds": self.waited_seconds,
            "checkpoint_write_seconds": self.written_seconds,
            "checkpoint_copy_bytes": float(self.copied_bytes),
        }

    def note(self) -> str:
        """Return a note on how the checkpoints were written."""
        if self.no_room:
            return f"written in the step that they are of: {self.no_room}"
        if self.copied_bytes:
            return "copied to host memory in the step, and written in the background"
        return "written in the step that they are of"

    def _await(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, staged: StagedCheckpoint) -> None:
        began = time.monotonic()
        try:
            saved = staged.collect(staged.parts)
            if saved is not None:
                write_checkpoint(self.folder, saved)
                remove_older_checkpoints(self.folder, self.keep)
                self.num_written += 1
                self.last_seconds = time.monotonic() - began
                self.written_seconds += self.last_seconds
        except Exception as error:  # noqa: BLE001 - raised by check() in the training thread
            self._error = error
