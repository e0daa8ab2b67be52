"""Weight offload: by layers, by experts, by policy, or by accelerate's device map."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runners.generate_options import (
    ExpertCache,
    LayerStreaming,
    MappedWeights,
    PolicyOffload,
)
from runners.jobs.generate.chain import Chain
from runners.jobs.generate.experts import CachedExperts
from runners.jobs.generate.policy.zigzag import ZigZag
from runners.jobs.layers import LayerwiseModel
from runners.jobs.loading import (
    BASE_DTYPE,
    TORCH_DTYPES,
    LoadedModel,
    load_tokenizer,
    pick_device,
)
from runners.jobs.memory import free_host_bytes, tensor_bytes
from runners.jobs.model_folders import opened_model
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.stored import StoredTensors, Tensors, check_finite, in_host
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec

HOST_SHARE = 0.8  # of the free host memory; the rest is for the activations and other programs


@dataclass(frozen=True)
class Placed:
    """A model whose weights may be partly offloaded, with a note on where they are."""

    loaded: LoadedModel
    where: str
    figures: Callable[[], Mapping[str, float]] = dict  # measurements of the offload itself
    chain: Chain | None = None  # set if several processes compute the model
    zigzag: ZigZag | None = None  # set with an offload policy, which runs whole blocks

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in this process's memory now."""
        if self.zigzag:
            return held_bytes(self.loaded.model) + self.zigzag.packed_bytes
        return self.chain.weight_bytes if self.chain else held_bytes(self.loaded.model)


def place_model(job: Job, spec: GenerateSpec) -> Placed:
    """Load a job's model with its weights offloaded as requested.

    Raises:
        MissingModelError: the folder is missing, incomplete or outside the model roots.
        BadInputError: the model has no folder, or does not support this offload.
    """
    offload, ref = spec.offload, spec.model
    if not isinstance(ref, FolderModel | ArtefactModel):
        msg = f"offload reads weights from a model folder; source {ref.source} has none"
        raise BadInputError(msg)
    folder, device = opened_model(ref, job.host_dir), pick_device()
    dtype = TORCH_DTYPES.get(spec.weight_dtype, BASE_DTYPE)
    if isinstance(offload, PolicyOffload):
        return _by_policy(job, spec, offload, LayerwiseModel(folder, device, dtype), folder)
    if isinstance(offload, MappedWeights):
        model, where = mapped(folder, dtype, offload.memory_bytes, job.scratch_dir())
    elif isinstance(offload, LayerStreaming):
        streamed = StreamedLayers(LayerwiseModel(folder, device, dtype), folder, offload)
        model, where = streamed.model, streamed.where
    elif isinstance(offload, ExpertCache):
        cached = CachedExperts(folder, device, dtype, offload)
        loaded = LoadedModel(cached.model, load_tokenizer(folder), device)
        return Placed(loaded, cached.where, cached.cache.figures.measured)
    else:
        msg = "the job requests no offload"
        raise BadInputError(msg)
    return Placed(LoadedModel(model, load_tokenizer(folder), device), where)


def _by_policy(
    job: Job, spec: GenerateSpec, policy: PolicyOffload, skeleton: LayerwiseModel, folder: Path
) -> Placed:
    zigzag = ZigZag(
        skeleton,
        folder,
        policy,
        job.scratch_dir(),
        kv_cache=spec.kv_cache,
        is_narrow=spec.weight_dtype == "int4",
    )
    loaded = LoadedModel(skeleton.model, load_tokenizer(folder), skeleton.device)
    return Placed(loaded, zigzag.where, zigzag.figures.measured, zigzag=zigzag)


def held_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the parameters and buffers in memory now."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(tensor_bytes(each) for each in tensors.values() if not each.is_meta)


class StreamedLayers:
    """Decoder layers of which the first are resident; others are loaded when they run.

    With ``look_ahead`` a thread loads the next layer while one computes, so that at most two of
    them are in memory.
    """

    def __init__(self, skeleton: LayerwiseModel, folder: Path, asked: LayerStreaming) -> None:
        """Load the resident layers and hook the others.

        Raises:
            BadInputError: the model has fewer layers, or a stored dtype is unsupported.
        """
        self._skeleton = skeleton
        count = len(skeleton.layers)
        num_kept = asked.layers_resident + asked.layers_in_host
        if num_kept > count:
            named = (
                "layers_resident and layers_in_host" if asked.layers_in_host else "layers_resident"
            )
            raise BadInputError(f"{named} is {num_kept}; the model has {count} layers")
        self._files = StoredTensors(folder)
        self._host: dict[int, Tensors] = {}
        self._in_host = count if asked.layers_from == "host_memory" else num_kept
        for index in range(asked.layers_resident):
            skeleton.load_layer(index)
        self._first, self._count = asked.layers_resident, count
        self._thread = ThreadPoolExecutor(1, "next-layer") if asked.look_ahead else None
        self._ahead: tuple[int, Future[Tensors]] | None = None
        for index in range(self._first, count):
            tensors = self._read(index)
            check_finite(tensors, skeleton.name_of(index, ""))
            if index < self._in_host:
                self._host[index] = {name: in_host(each) for name, each in tensors.items()}
            self._hook(index)

    @property
    def model(self) -> PreTrainedModel:
        """Return the model; it is called like any other."""
        return self._skeleton.model

    @property
    def where(self) -> str:
        """Return a note on where the weights are."""
        counts = {
            "host memory": self._in_host - self._first,
            "disk": self._count - self._in_host,
        }
        parts = [f"{count} come from {place}" for place, count in counts.items() if count]
        loading = " and ".join(parts) or "none comes"
        prefetch = ", the next one while one computes" if self._thread else ""
        return f"{self._first} of {self._count} layers stay, {loading} in every pass{prefetch}"

    def _hook(self, index: int) -> None:
        layer = self._skeleton.layers[index]

        def fill(*_given: Any) -> None:
            layer.load_state_dict(self._take(index), strict=False, assign=True)

        def drop(*_given: Any) -> None:
            self._skeleton.drop_layer(index)

        layer.register_forward_pre_hook(fill)
        layer.register_forward_hook(drop)

    def _take(self, index: int) -> Tensors:
        """Return a layer's tensors, and start loading the next layer's."""
        expected, prefetched = self._ahead or (None, None)
        tensors = prefetched.result() if prefetched and expected == index else self._read(index)
        if self._thread is not None:
            following = index + 1 if index + 1 < self._count else self._first
            self._ahead = (following, self._thread.submit(self._read, following))
        return tensors

    def _read(self, index: int) -> Tensors:
        if index in self._host:
            device = self._skeleton.device
            return {
                name: each.to(device, non_blocking=True)
                for name, each in self._host[index].items()
            }
        layer_prefix = f"{self._skeleton.prefix}.{index}."
        names = [name for name in self._files.names if name.startswith(layer_prefix)]
        device, dtype = self._skeleton.device, self._skeleton.dtype
        return {
            name.removeprefix(layer_prefix): self._files.read(name).to(device, dtype)
            for name in names
        }


def mapped(
    folder: Path, dtype: torch.dtype, memory_bytes: int, scratch: Path
) -> tuple[PreTrainedModel, str]:
    """Load the model with accelerate's device map under a memory limit; also return a note.

    Raises:
        BadInputError: accelerate cannot place it.
    """
    room = device_room(memory_bytes)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            device_map="auto",
            max_memory=room,
            offload_folder=str(scratch),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        msg = f"accelerate cannot place {folder.name} in {memory_bytes} bytes: {error}"
        raise BadInputError(msg) from error
    torch.nn.Module.eval(model)
    places = list(getattr(model, "hf_device_map", {"": next(iter(room))}).values())
    parts = ", ".join(
        f"{places.count(place)} parts on {place}" for place in sorted(set(places), key=str)
    )
    return model, f"accelerate's map for {memory_bytes} bytes: {parts}"


def device_room(memory_bytes: int) -> dict[int | str, int]:
    """Return accelerate's ``max_memory``: of the GPU, then of the host, before the disk.

    A map without ``cpu`` goes from the GPU to the disk. Without a GPU the limit is the host's.
    """
    if not torch.cuda.is_available():
        return {"cpu": memory_bytes}
    return {0: memory_bytes, "cpu": int((free_host_bytes() or 0) * HOST_SHARE)}
