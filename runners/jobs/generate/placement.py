"""Weights that need not all be in memory: read layer by layer, or mapped by accelerate.

Bytes are read into memory that is given back, not mapped from the file: a mapped file counts
as the process's own memory as soon as it was read once, and no limit would hold.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runners.jobs.layers import LayerwiseModel
from runners.jobs.loading import (
    TORCH_DTYPES,
    LoadedModel,
    load_tokenizer,
    opened_model,
    pick_device,
)
from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError, Job
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec, LayerStreaming, MappedWeights

STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_BYTES = struct.Struct("<Q")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Placed:
    """A model whose weights are partly elsewhere, and where they are, in words."""

    loaded: LoadedModel
    where: str


def place_model(job: Job, spec: GenerateSpec) -> Placed:
    """Return the model of a job with its weights where the job wants them.

    Raises:
        MissingModelError: the folder is absent, incomplete or outside the model roots.
        BadInputError: the model has no folder, or its weights cannot be placed this way.
    """
    asked, ref = spec.offload, spec.model
    if not isinstance(ref, FolderModel | ArtefactModel):
        msg = f"offload reads weights from a model folder; source {ref.source} has none"
        raise BadInputError(msg)
    folder, device = opened_model(ref, job.host_dir), pick_device()
    dtype = TORCH_DTYPES[spec.weight_dtype]
    if isinstance(asked, MappedWeights):
        model, where = mapped(folder, dtype, asked.memory_bytes, job.scratch_dir())
    elif isinstance(asked, LayerStreaming):
        streamed = StreamedLayers(LayerwiseModel(folder, device, dtype), folder, asked)
        model, where = streamed.model, streamed.where
    else:
        msg = "the job asks for no offload"
        raise BadInputError(msg)
    return Placed(LoadedModel(model, load_tokenizer(folder), device), where)


def held_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the parameters and buffers that are in memory now."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(tensor_bytes(each) for each in tensors.values() if not each.is_meta)


class StreamedLayers:
    """Decoder layers of which the first stay; each other is read when its turn comes.

    With a look ahead a thread reads the next layer while this one computes, so that at most
    two of them are in memory.
    """

    def __init__(self, skeleton: LayerwiseModel, folder: Path, asked: LayerStreaming) -> None:
        """Load what stays and hook what comes and goes.

        Raises:
            BadInputError: more layers are to stay than there are, or a stored dtype is unknown.
        """
        self._skeleton = skeleton
        count = len(skeleton.layers)
        if asked.layers_resident > count:
            msg = f"layers_resident is {asked.layers_resident}; the model has {count} layers"
            raise BadInputError(msg)
        self._files = StoredTensors(folder)
        self._host: dict[int, Tensors] = {}
        self._from = asked.layers_from
        for index in range(asked.layers_resident):
            skeleton.load_layer(index)
        self._first, self._count = asked.layers_resident, count
        self._thread = ThreadPoolExecutor(1, "next-layer") if asked.look_ahead else None
        self._ahead: tuple[int, Future[Tensors]] | None = None
        for index in range(self._first, count):
            tensors = self._read(index)
            check_finite(tensors, skeleton.name_of(index, ""))
            if asked.layers_from == "host_memory":
                self._host[index] = {name: in_host(each) for name, each in tensors.items()}
            self._hook(index)

    @property
    def model(self) -> PreTrainedModel:
        """Return the model that is called like any other."""
        return self._skeleton.model

    @property
    def where(self) -> str:
        """Say in words where the weights are."""
        streamed = self._count - self._first
        ahead = ", the next one while one computes" if self._thread else ""
        return (
            f"{self._first} of {self._count} layers stay, {streamed} come from "
            f"{self._from.replace('_', ' ')} in every pass{ahead}"
        )

    def _hook(self, index: int) -> None:
        layer = self._skeleton.layers[index]

        def fill(*_given: Any) -> None:
            layer.load_state_dict(self._take(index), strict=False, assign=True)

        def drop(*_given: Any) -> None:
            self._skeleton.drop_layer(index)

        layer.register_forward_pre_hook(fill)
        layer.register_forward_hook(drop)

    def _take(self, index: int) -> Tensors:
        """Return a layer's tensors, and let the next layer's be read."""
        expected, ahead = self._ahead or (None, None)
        found = ahead.result() if ahead and expected == index else self._read(index)
        if self._thread is not None:
            following = index + 1 if index + 1 < self._count else self._first
            self._ahead = (following, self._thread.submit(self._read, following))
        return found

    def _read(self, index: int) -> Tensors:
        if index in self._host:
            device = self._skeleton.device
            return {
                name: each.to(device, non_blocking=True)
                for name, each in self._host[index].items()
            }
        own = f"{self._skeleton.prefix}.{index}."
        names = [name for name in self._files.names if name.startswith(own)]
        device, dtype = self._skeleton.device, self._skeleton.dtype
        return {name.removeprefix(own): self._files.read(name).to(device, dtype) for name in names}


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, from where a GPU can fetch it by itself."""
    held = tensor.cpu()
    return held.pin_memory() if tensor.is_cuda else held


def check_finite(tensors: Tensors, prefix: str) -> None:
    """Raise BadInputError for a tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            msg = f"{prefix}{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)


class StoredTensors:
    """The tensors of a folder's safetensors files, each read into memory of its own."""

    def __init__(self, folder: Path) -> None:
        """Open the files and read what is where.

        Raises:
            BadInputError: a tensor is stored as something else than a float of 16 or 32 bits.
        """
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= _places(path)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        place = self._places[name]
        data = bytearray(place.num_bytes)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = os.preadv(place.file, [view[done:]], place.offset + done)
            if not count:
                msg = f"the file of {name} became shorter while it was read; copy it again"
                raise BadInputError(msg)
            done += count
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path) -> dict[str, _Place]:
    """Return where a file's tensors are; its header was read by safetensors before."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            msg = f"{name} is stored as {entry['dtype']}; layers are streamed from {known}"
            raise BadInputError(msg)
        begin, end = entry["data_offsets"]
        dtype, shape = STORED_DTYPES[entry["dtype"]], tuple(entry["shape"])
        found[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return found


def mapped(
    folder: Path, dtype: torch.dtype, memory_bytes: int, scratch: Path
) -> tuple[PreTrainedModel, str]:
    """Return the model as accelerate places it below a limit, and in words where that is.

    Raises:
        BadInputError: accelerate cannot place it there.
    """
    key = 0 if torch.cuda.is_available() else "cpu"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            device_map="auto",
            max_memory={key: memory_bytes},
            offload_folder=str(scratch),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        msg = f"accelerate cannot place {folder.name} in {memory_bytes} bytes: {error}"
        raise BadInputError(msg) from error
    torch.nn.Module.eval(model)
    places = list(getattr(model, "hf_device_map", {"": key}).values())
    told = ", ".join(
        f"{places.count(place)} parts on {place}" for place in sorted(set(places), key=str)
    )
    return model, f"accelerate's map for {memory_bytes} bytes: {told}"
