"""Training checkpoints: complete or absent, written while steps go on."""

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from runners.jobs.memory import free_host_bytes
from runners.jobs.ranks import ALONE, Ranks, naming_rank_failures
from runners.jobs.train.checkpoint_files import (
    OPTIMIZER,
    Part,
    Parts,
    load_parts,
    save_parts,
    stored_tensors,
    whole,
)
from runners.jobs.train.optimizers import OffloadedAdamW
from runners.jobs.train.quantized import integer_matrices, trained_tensors
from runners.jobs.weights import HostBuffers

# Optimizer states as named tensors, to be saved, loaded and shared between ranks.
#
# All state of a weight is taken as it is, so that any optimizer resumes bit-exactly: 8-bit moments
# with their scales, factored moments, step counts, moments in a mapped file.


Tensors = Mapping[str, torch.Tensor]
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
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Tensors
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


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.state_of(weight)
    state: dict[str, Any] = optimizer.state[weight]
    return state


PREFIX = "step-"
STATE_FILE = "state.json"


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


def checkpoint_parts(weights: Tensors, optimizer: Tensors) -> dict[str, Part]:
    """Return whole tensors as the parts of a checkpoint."""
    states = {f"{OPTIMIZER}{name}": each for name, each in optimizer.items()}
    return {name: whole(each) for name, each in {**weights, **states}.items()}


def building_folder(folder: Path, number: int) -> Path:
    """Return the folder in which a checkpoint is written, until it is whole."""
    return folder / f".{PREFIX}{number:08d}-building"


def publish_checkpoint(folder: Path, number: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint folder atomically; older ones may be removed afterwards.

    If ``write`` fails, for example on a full disk, the partial folder is removed.
    """
    final = folder / f"{PREFIX}{number:08d}"
    building = building_folder(folder, number)
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
    """Return the whole newest checkpoint, of any layout, or None.

    Raises:
        BadInputError: a file is damaged or missing.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    stored = stored_tensors(newest)
    weights, optimizer = (
        {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in table.items()}
        for table in (stored.weights, stored.optimizer)
    )
    parts = {name: whole(each) for name, each in weights.items()}
    load_parts(
        newest, parts | {f"{stored.prefix}{name}": whole(each) for name, each in optimizer.items()}
    )
    return CheckpointContent(weights, optimizer, state_of(newest))


def read_latest_state(folder: Path) -> TrainState | None:
    """Return the progress of the newest checkpoint without its tensors, or None."""
    newest = newest_checkpoint(folder)
    return None if newest is None else state_of(newest)


def state_of(checkpoint: Path) -> TrainState:
    """Return the progress that a checkpoint's folder holds."""
    return TrainState(**json.loads((checkpoint / STATE_FILE).read_text()))


def load_latest(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState | None:
    """Fill model and optimizer from the newest checkpoint; return its state, or None.

    Raises:
        BadInputError: a file is damaged or missing, or is of another model.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    stored = stored_tensors(newest)
    states = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in stored.optimizer.items()
    }
    parts = {name: whole(each) for name, each in trained_weights(model).items()}
    load_parts(
        newest, parts | {f"{stored.prefix}{name}": whole(each) for name, each in states.items()}
    )
    load_optimizer_states(optimizer, _names(model, optimizer), states)
    return state_of(newest)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return next(iter(checkpoints(folder)[-1:]), None)


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained weights; tied ones appear once, frozen ones not at all."""
    matrices = integer_matrices(model).items()
    return trained_tensors(model) | {f"{name}.scale": each.scale for name, each in matrices}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's weights, in its order."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [names[id(each)] for group in optimizer.param_groups for each in group["params"]]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Which ranks write a checkpoint, and where.
#
# Ranks that share a folder write one checkpoint there, each its own slices. Hosts with folders of
# their own then exchange their files, so that each keeps all of it: the training goes on without
# any of them, and on a host that is new.


EXCHANGE_BYTES = 2**24  # sent at once


@dataclass(frozen=True)
class Keepers:
    """The first rank of each group of ranks that share a folder; it completes a checkpoint there.

    ``group``: of all ranks, for messages that never mix with those of a step; ``between``: of the
    keepers, None if there is one.
    """

    ranks: Ranks = ALONE
    keepers: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None

    @property
    def is_keeper(self) -> bool:
        """Return whether this rank completes checkpoints in its folder."""
        return self.ranks.rank in self.keepers

    def write(self, folder: Path, staged: "StagedCheckpoint", state: TrainState) -> bool:
        """Write a checkpoint; return whether this rank completed one.

        Raises:
            RankFailedError: another rank did not send its part in time.
            OSError: a rank could not write; the previous checkpoint remains.
        """
        group = self.group if staged.is_divided else None
        if group is None and not self.is_keeper:
            return False

        def write(building: Path) -> None:
            self._meet(group)  # the folder is there, and empty
            with naming_rank_failures(self.ranks):
                save_parts(building, staged.parts, group)
                if group is not None and self.between is not None and self.is_keeper:
                    names = sorted(each.name for each in building.iterdir())
                    for keeper in self.keepers:
                        self._send_files(keeper, building, names, building)
            if self.is_keeper:
                (building / STATE_FILE).write_text(json.dumps(asdict(state)))

        if self.is_keeper:
            publish_checkpoint(folder, state.step, write)
        else:
            write(building_folder(folder, state.step))
        return self.is_keeper

    def share_newest(self, folder: Path) -> None:
        """Send the newest checkpoint of all hosts to those that lack it; every rank calls it.

        Raises:
            RankFailedError: a rank did not answer in time.
        """
        if self.between is not None and self.is_keeper:
            newest = newest_checkpoint(folder)
            own = ("", "") if newest is None else (newest.name, (newest / STATE_FILE).read_text())
            told: list[tuple[str, str]] = [own for _ in self.keepers]
            with naming_rank_failures(self.ranks):
                dist.all_gather_object(told, own, group=self.between)
                name = max(name for name, _ in told)
                at = next(at for at, each in enumerate(told) if each[0] == name)
                if any(each != told[at] for each in told):
                    self._share(self.keepers[at], folder, name, is_owner=own == told[at])
        self._meet(self.group)

    def _share(self, keeper: int, folder: Path, name: str, *, is_owner: bool) -> None:
        names = sorted(each.name for each in (folder / name).iterdir()) if is_owner else []
        if is_owner:
            self._send_files(keeper, folder / name, names, None)
            return
        step = int(name.removeprefix(PREFIX))
        publish_checkpoint(folder, step, lambda at: self._send_files(keeper, at, [], at))

    def _send_files(
        self, keeper: int, source: Path, names: Sequence[str], target: Path | None
    ) -> None:
        """Send a keeper's named files to the others, which write them into ``target``."""
        is_sender = keeper == self.ranks.rank
        files = [(each, (source / each).stat().st_size) for each in names if is_sender]
        told = [files]
        dist.broadcast_object_list(told, src=keeper, group=self.between)
        folder = source if is_sender else target
        for name, size in told[0]:
            how = "rb" if is_sender else "wb"
            with contextlib.nullcontext() if folder is None else (folder / name).open(how) as file:
                for at in range(0, size, EXCHANGE_BYTES):
                    self._send_piece(keeper, file, min(EXCHANGE_BYTES, size - at))

    def _send_piece(self, keeper: int, file: IO[Any] | None, size: int) -> None:
        content = bytearray(size)
        if keeper == self.ranks.rank and file is not None:
            content[:] = file.read(size)
        piece = torch.frombuffer(content, dtype=torch.uint8)  # of the same memory
        dist.broadcast(piece, src=keeper, group=self.between)
        if keeper != self.ranks.rank and file is not None:
            file.write(content)

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            with naming_rank_failures(self.ranks):
                dist.barrier(group)


def keepers_of(ranks: Ranks, folder: Path) -> Keepers:
    """Return which ranks share this folder, which each looks for in its own files.

    Raises:
        RankFailedError: not every rank answered in time.
    """
    if ranks.is_alone:
        return Keepers(ranks, (ranks.rank,))
    mark = ranks.broadcast_from_lead(secrets.token_hex(16).encode()).decode()
    own = folder / f"{mark}-{ranks.rank}"
    own.touch()
    ranks.total([0.0])  # every rank's file is there
    first = next(each for each in range(ranks.size) if (folder / f"{mark}-{each}").exists())
    firsts = ranks.total([float(first if at == ranks.rank else 0) for at in range(ranks.size)])
    own.unlink()
    keepers = tuple(sorted({int(each) for each in firsts}))
    with naming_rank_failures(ranks):
        group = dist.new_group(backend="gloo")
        between = dist.new_group(list(keepers), backend="gloo") if len(keepers) > 1 else None
    return Keepers(ranks, keepers, group, between)


# Asynchronous checkpoints: a step waits only for a copy to host memory.
#
# The file holds the state at the time of the copy. One checkpoint is written at a time, beside
# the steps. torch's ``async_save`` does the same without a limit to the memory of the copy, and
# without its buffers for the best weights, which are written by the same thread.
# Source: Mohan et al. 2021 (CheckFreq), FAST: snapshot first, then write in the background.


FREE_MEMORY_FACTOR = 1.25  # times the copy's size has to be free, since the steps go on allocating


@dataclass(frozen=True)
class StagedCheckpoint:
    """One rank's parts of a checkpoint of a state, or of the best weights with ``publish``.

    ``is_divided``: every rank has parts; otherwise each that writes has whole tensors.
    """

    parts: Parts
    state: TrainState | None = None
    publish: Callable[[Tensors], None] | None = None
    is_divided: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part."""
        return sum(each.tensor.nbytes for each in self.parts.values())

    def copy_to_host(self, buffers: HostBuffers) -> "StagedCheckpoint":
        """Return a copy in host memory that no step changes, in buffers of former ones."""
        parts = {
            name: replace(each, tensor=_host_copy(each.tensor.detach(), buffers))
            for name, each in self.parts.items()
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
    keepers: Keepers = field(default_factory=Keepers)
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
            if staged.publish is not None:
                staged.publish({name: each.tensor for name, each in staged.parts.items()})
            elif staged.state is not None and self.keepers.write(
                self.folder, staged, staged.state
            ):
                remove_older_checkpoints(self.folder, self.keep)
                self.num_written += 1
                self.last_seconds = time.monotonic() - began
                self.written_seconds += self.last_seconds
        except Exception as error:  # noqa: BLE001 - raised by check() in the training thread
            self._error = error
