"""Activation memory: recomputation (gradient checkpointing), and offload between the passes."""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from runners.jobs.pinned import HostBuffers, activations_in_host
from runners.jobs.runtime import BadInputError
from runners.jobspec.train import Away, Recomputation

# Activation recomputation (gradient checkpointing).
#
# Per layer: ``full`` saves only its input, ``selective`` also the outputs of its matrix products,
# so that only norms, activation functions and attention scores are recomputed.
#
# Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198, section 5.


_ATEN = torch.ops.aten
KEPT_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 - SDPA on a CPU
        _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001 - SDPA on a GPU
        _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001 - the same
    }
)


def recompute(model: PreTrainedModel, how: Recomputation) -> None:
    """Enable recomputation in the model's layers.

    Raises:
        BadInputError: the architecture does not support it.
    """
    if how == "none":
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:  # transformers before 5.18
            older: Any = model
            older.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    except ValueError as error:
        msg = (
            f"activation_recomputation {how}: {type(model).__name__} has no layers that can be "
            "computed again; choose none, or a smaller micro_batch_size"
        )
        raise BadInputError(msg) from error


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> object:
    """Save what is expensive: one product costs more than everything between two."""
    if operator in KEPT_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# Activation offload between forward and backward pass.
#
# On a GPU activations go to host memory, on a CPU to a file; weights stay.
#
# Source: Huang et al. 2020 (SwapAdvisor), ASPLOS.


SMALLEST_BYTES = 4096  # smaller tensors stay: one page of memory


class Place(NamedTuple):
    """The location of a tensor in the file, and its metadata."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class DiskSwap:
    """A file of one step's activations; each step overwrites it."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        """Open an unnamed file in the folder; it vanishes with the process."""
        self._model = model
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - for the job
        weakref.finalize(self, self._file.close)
        self._end = 0
        self.written_bytes = 0
        self._known: dict[tuple[object, ...], tuple[weakref.ref[object], Place]] = {}
        self._kept: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Save the block's activations to the file; the backward passes run in the block, too."""
        self._end = 0
        self._known.clear()
        self._kept = _storages(self._model)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Place:
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST_BYTES or storage.data_ptr() in self._kept:
            return tensor
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage.data_ptr(), view, tensor._version)  # noqa: SLF001 - torch's own count
        saved = self._known.get(key)
        if saved is not None and saved[0]() is storage:
            return saved[1]  # several operators save one tensor: a norm's output, three products
        dense = _dense(tensor.detach().cpu())
        place = Place(self._end, tensor.shape, dense.stride(), tensor.dtype, tensor.device)
        data = _bytes_of(dense)
        while data:
            done = os.pwrite(self._file.fileno(), data, self._end)
            self._end += done
            data = data[done:]
        self.written_bytes = max(self.written_bytes, self._end)
        self._known[key] = (weakref.ref(storage), place)
        return place

    def _unpack(self, packed: torch.Tensor | Place) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = torch.empty_strided(packed.shape, packed.strides, dtype=packed.dtype)
        data, at = _bytes_of(tensor), packed.offset
        while data:
            done = os.preadv(self._file.fileno(), [data], at)
            if not done:
                msg = f"the swap file ends at {at}, inside an activation"
                raise OSError(msg)
            at += done
            data = data[done:]
        return tensor.to(packed.device)


def offloaded_activations(
    where: Away, model: torch.nn.Module, device: torch.device, folder: Path
) -> "Swap":
    """Return the context factory that offloads each step's activations.

    Raises:
        BadInputError: a CPU's activations are in host memory already.
    """
    if where == "disk":
        return Swap(model, DiskSwap(model, folder))
    if where == "cpu" and device.type == "cpu":
        msg = (
            "activation_offload cpu: this host computes on its CPU, whose activations are in its "
            "memory already; choose disk, or activation_recomputation full"
        )
        raise BadInputError(msg)
    return Swap(model, to_host=where == "cpu")


class Swap:
    """Offloads one step's activations to disk or host memory, or not at all."""

    def __init__(
        self, model: torch.nn.Module, disk: DiskSwap | None = None, *, to_host: bool = False
    ) -> None:
        self.disk = disk
        self._model = model
        self._to_host = to_host
        self._buffers = HostBuffers(is_pinned=torch.cuda.is_available())

    def step(self) -> AbstractContextManager[object]:
        """Return the context of one step's forward and backward passes."""
        if self.disk is not None:
            return self.disk.swapped()
        if self._to_host:
            kept = _storages(self._model)
            return activations_in_host(self._buffers, kept, SMALLEST_BYTES)
        return contextlib.nullcontext()


def _storages(model: torch.nn.Module) -> frozenset[int]:
    """Return the addresses of the weights, which stay where they are."""
    return frozenset(each.untyped_storage().data_ptr() for each in model.parameters())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor densely stored; keep its strides if it is dense already.

    The product of a transposed matrix and that of its contiguous copy may differ in the last bit.
    """
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor if tensor.stride() == strides else torch.empty_like(tensor).copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a dense tensor's own memory."""
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)
