"""Weight offload: by layers, by experts, by policy, or by accelerate's device map."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from runners.jobs.generate.stage_model import Chain
from runners.jobs.generate.zigzag import ZigZag
from runners.jobs.loading import (
    BASE_DTYPE,
    DOWN,
    GATE_UP,
    TORCH_DTYPES,
    Expert,
    LayerwiseModel,
    LoadedModel,
    ModelTensors,
    fill,
    load_tokenizer,
    pick_device,
    require_plain,
    skeleton,
)
from runners.jobs.memory import free_host_bytes, tensor_bytes
from runners.jobs.model_files import opened_model
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.weights import (
    StoredTensors,
    Tensors,
    check_finite_tensors,
    check_loaded,
    config_of,
    in_host,
    own_config,
)
from runners.jobspec import ArtefactModel, FolderModel, GenerateSpec
from runners.jobspec.generate import ExpertCache, LayerStreaming, MappedWeights, PolicyOffload

# Expert offloading: an LRU cache of experts on the device, with speculative prefetch.
#
# Each layer keeps its most recently used experts. While a layer computes, a thread prefetches
# those that the next layer's router would choose for this layer's input. Prefetched experts have
# separate room: in a small cache they would evict experts that are reused. Source: Eliseev and
# Mazur, arXiv:2312.17238.


Key = tuple[int, int]  # (sparse layer, expert)
Fetch = Callable[[int, int], Expert]


@dataclass
class ExpertFigures:
    """Statistics of the expert cache, including the warm-up."""

    requests: int = 0
    hits: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
    brought: int = 0
    expert_bytes: int = 0

    def result_metrics(self) -> dict[str, float]:
        """Return the figures of the job's result."""
        figures = {
            "expert_hit_ratio": self.hits / max(1, self.requests),
            "experts_brought": float(self.brought),
            "expert_bytes_brought": float(self.brought * self.expert_bytes),
        }
        if self.prefetched:
            figures["expert_guess_ratio"] = self.prefetch_hits / self.prefetched
        return figures


class DeviceExperts:
    """The experts on the device: an LRU cache per layer, and the prefetched ones."""

    def __init__(self, fetch: Fetch, resident: int, max_prefetched: int) -> None:
        self._fetch = fetch
        self._resident, self._max_prefetched = resident, max_prefetched
        self._cached: dict[int, OrderedDict[int, Expert]] = defaultdict(OrderedDict)
        self._prefetches: dict[Key, Future[Expert]] = {}
        self._thread = ThreadPoolExecutor(1, "next-experts")
        self.figures = ExpertFigures()

    def prefetch(self, layer: int, experts: Iterable[int]) -> None:
        """Prefetch experts of a layer that may be used next, the most likely first."""
        for each in self._prefetches.values():
            if each.cancel():  # had not started
                self.figures.brought -= 1
        missing = [each for each in experts if each not in self._cached[layer]][
            : self._max_prefetched
        ]
        self._prefetches = {
            (layer, each): self._thread.submit(self._fetch, layer, each) for each in missing
        }
        self.figures.prefetched += len(missing)
        self.figures.brought += len(missing)

    def take(self, layer: int, expert: int) -> Expert:
        """Return an expert, from the cache if possible."""
        cached = self._cached[layer]
        self.figures.requests += 1
        if expert in cached:
            self.figures.hits += 1
            cached.move_to_end(expert)
            return cached[expert]
        loaded = cached[expert] = self._load(layer, expert)
        if len(cached) > self._resident:
            cached.popitem(last=False)
        return loaded

    def _load(self, layer: int, expert: int) -> Expert:
        prefetch = self._prefetches.pop((layer, expert), None)
        if prefetch is None:
            self.figures.brought += 1
            return self._fetch(layer, expert)
        self.figures.prefetch_hits += 1
        return prefetch.result()


class OffloadedExperts(nn.Module):
    """Replaces a layer's stacked experts; takes each expert from the cache."""

    def __init__(
        self, layer: int, experts: DeviceExperts, act: nn.Module, after: nn.Module | None
    ) -> None:
        """``after``: the next layer's router, whose last output is each token's experts."""
        super().__init__()
        self._layer, self._experts, self._act = layer, experts, act
        self._after = (after,)  # in a tuple, so that it is not registered as a submodule

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted outputs of the chosen experts for ``hidden`` [tokens, width]."""
        (after,) = self._after
        if after is not None:
            predicted = after(hidden)[-1].flatten().bincount()
            self._experts.prefetch(self._layer + 1, predicted.argsort(descending=True).tolist())
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            gate_up, down = self._experts.take(self._layer, expert)
            gate, up = nn.functional.linear(hidden[tokens], gate_up).chunk(2, dim=-1)
            expert_output = nn.functional.linear(self._act(gate) * up, down)
            expert_output = expert_output * weights[tokens, places, None]
            output.index_add_(0, tokens, expert_output.to(output.dtype))
        return output


class CachedExperts:
    """A model from a folder with cached experts."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, options: ExpertCache
    ) -> None:
        """Load everything except the experts.

        Raises:
            BadInputError: the model has no experts of a supported kind, fewer than are to be
                resident, or its weights do not match its config.
        """
        config = config_of(folder)
        self.model: PreTrainedModel = skeleton(config, dtype, folder)
        places = _sparse_places(self.model)
        self._options, self._device, self._places = options, device, places
        self._tensors = ModelTensors(folder, device, dtype)
        self._host: dict[Key, Expert] = {}
        self._check(config.model_type)
        max_prefetched = options.guessed_experts
        self.cache = DeviceExperts(self._fetch, options.experts_resident, max_prefetched)
        blocks: list[Any] = [self.model.get_submodule(each) for each in places]
        for index, block in enumerate(blocks):
            after = blocks[index + 1].gate if max_prefetched and index + 1 < len(blocks) else None
            act = block.experts.act_fn
            block.experts = OffloadedExperts(index, self.cache, act, after)
        names = [name for name in self._tensors.names if not name.endswith((GATE_UP, DOWN))]
        fill(self.model, names, self._tensors.read, device)
        self._check_all()

    @property
    def where(self) -> str:
        """Return a note on where the experts are."""
        options = self._options
        ahead = (
            f", at most {options.guessed_experts} prefetched" if options.guessed_experts else ""
        )
        return (
            f"{options.experts_resident} of {self.num_experts} experts of each layer stay{ahead}; "
            f"the others come from {options.experts_from.replace('_', ' ')}"
        )

    @property
    def num_experts(self) -> int:
        """Return the number of experts per layer."""
        return len(self._tensors.experts[f"{self._places[0]}.experts"])

    def _check(self, model_type: str) -> None:
        for place in self._places:
            if not self._tensors.experts.get(f"{place}.experts"):
                msg = f"the files of this '{model_type}' model hold no single experts of {place}"
                raise BadInputError(f"{msg}; run it without offload")
        if self._options.experts_resident > self.num_experts:
            msg = f"experts_resident is {self._options.experts_resident}; a layer has "
            raise BadInputError(
                f"{msg}{self.num_experts} experts; choose at most {self.num_experts}"
            )

    def _check_all(self) -> None:
        """Read every expert once to check for NaN, and store it in host memory if requested."""
        for layer, place in enumerate(self._places):
            for index in range(self.num_experts):
                expert = self._tensors.expert(f"{place}.experts", index)
                check_finite_tensors(expert._asdict(), f"{place}.experts.{index}.")
                self.cache.figures.expert_bytes = sum(map(tensor_bytes, expert))
                if self._options.experts_from == "host_memory":
                    self._host[layer, index] = Expert(*map(in_host, expert))

    def _fetch(self, layer: int, index: int) -> Expert:
        if (stored := self._host.get((layer, index))) is not None:
            return Expert(*(each.to(self._device, non_blocking=True) for each in stored))
        return self._tensors.expert(f"{self._places[layer]}.experts", index)


def _sparse_places(model: PreTrainedModel) -> list[str]:
    """Return the names of the blocks with a router and stacked experts, in order."""
    blocks = [
        name
        for name, module in model.named_modules()
        if {"gate", "experts"} <= dict(module.named_children()).keys()
        and {each for each, _ in module.experts.named_parameters()} == {GATE_UP, DOWN}
    ]
    if not blocks:
        msg = f"a '{model.config.model_type}' model has no experts that could be cached; stream "
        raise BadInputError(f"{msg}its layers instead")
    return blocks


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.


HOST_SHARE = 0.8  # of the free host memory; the rest is for the activations and other programs


@dataclass(frozen=True)
class PlacedModel:
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


def place_model(job: Job, spec: GenerateSpec) -> PlacedModel:
    """Load a job's model with its weights offloaded as requested.

    Raises:
        MissingModelError: the folder is missing, incomplete or outside the model roots.
        BadInputError: the model has no folder, or does not support this offload.
    """
    offload, ref = spec.offload, spec.model
    if not isinstance(ref, FolderModel | ArtefactModel):
        msg = f"offload reads weights from a model folder; source {ref.source} has none"
        raise BadInputError(f"{msg}; choose a model that has one")
    folder, device = opened_model(ref, job.host_dir), pick_device()
    dtype = TORCH_DTYPES.get(spec.weight_dtype, BASE_DTYPE)
    if isinstance(offload, PolicyOffload):
        return _by_policy(job, spec, offload, LayerwiseModel(folder, device, dtype), folder)
    if isinstance(offload, MappedWeights):
        model, where = load_with_device_map(folder, dtype, offload.memory_bytes, job.scratch_dir())
    elif isinstance(offload, LayerStreaming):
        streamed = StreamedLayers(LayerwiseModel(folder, device, dtype), folder, offload)
        model, where = streamed.model, streamed.where
    elif isinstance(offload, ExpertCache):
        cached = CachedExperts(folder, device, dtype, offload)
        loaded = LoadedModel(cached.model, load_tokenizer(folder), device)
        return PlacedModel(loaded, cached.where, cached.cache.figures.result_metrics)
    else:
        msg = "the job requests no offload"
        raise BadInputError(msg)
    return PlacedModel(LoadedModel(model, load_tokenizer(folder), device), where)


def _by_policy(
    job: Job, spec: GenerateSpec, policy: PolicyOffload, skeleton: LayerwiseModel, folder: Path
) -> PlacedModel:
    zigzag = ZigZag(
        skeleton,
        folder,
        policy,
        job.scratch_dir(),
        kv_cache=spec.kv_cache,
        is_narrow=spec.weight_dtype == "int4",
    )
    loaded = LoadedModel(skeleton.model, load_tokenizer(folder), skeleton.device)
    return PlacedModel(loaded, zigzag.where, zigzag.figures.result_metrics, zigzag=zigzag)


def held_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the parameters and buffers in memory now."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(tensor_bytes(each) for each in tensors.values() if not each.is_meta)


class StreamedLayers:
    """Decoder layers of which the first are resident; others are loaded when they run.

    With ``look_ahead`` a thread loads the next layer while one computes, so that at most two of
    them are in memory.
    """

    def __init__(self, skeleton: LayerwiseModel, folder: Path, options: LayerStreaming) -> None:
        """Load the resident layers and hook the others.

        Raises:
            BadInputError: the model has fewer layers, or a stored dtype is unsupported.
        """
        self._skeleton = skeleton
        count = len(skeleton.layers)
        num_kept = options.layers_resident + options.layers_in_host
        if num_kept > count:
            named = (
                "layers_resident and layers_in_host"
                if options.layers_in_host
                else "layers_resident"
            )
            raise BadInputError(
                f"{named} is {num_kept}, and the model has {count} layers; choose at most {count}"
            )
        self._files = StoredTensors(folder)
        self._host: dict[int, Tensors] = {}
        self._in_host = count if options.layers_from == "host_memory" else num_kept
        for index in range(options.layers_resident):
            skeleton.load_layer(index)
        self._first, self._count = options.layers_resident, count
        self._thread = ThreadPoolExecutor(1, "next-layer") if options.look_ahead else None
        self._ahead: tuple[int, Future[Tensors]] | None = None
        for index in range(self._first, count):
            tensors = self._read(index)
            check_finite_tensors(tensors, skeleton.name_of(index, ""))
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


def load_with_device_map(
    folder: Path, dtype: torch.dtype, memory_bytes: int, scratch: Path
) -> tuple[PreTrainedModel, str]:
    """Load the model with accelerate's device map under a memory limit; also return a note.

    Raises:
        BadInputError: accelerate cannot place it, or the weights do not match the config.
    """
    room = max_memory_of_device_map(memory_bytes)
    require_plain(folder)
    config_of(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            **own_config(folder),
            dtype=dtype,
            output_loading_info=True,
            device_map="auto",
            max_memory=room,
            offload_folder=str(scratch),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        msg = f"accelerate cannot place {folder.name} in {memory_bytes} bytes: {error}"
        raise BadInputError(msg) from error
    model: PreTrainedModel = loaded[0]
    check_loaded(folder, loaded[1])
    torch.nn.Module.eval(model)
    places = list(getattr(model, "hf_device_map", {"": next(iter(room))}).values())
    parts = ", ".join(
        f"{places.count(place)} parts on {place}" for place in sorted(set(places), key=str)
    )
    return model, f"accelerate's map for {memory_bytes} bytes: {parts}"


def max_memory_of_device_map(memory_bytes: int) -> dict[int | str, int]:
    """Return accelerate's ``max_memory``: of the GPU, then of the host, before the disk.

    A map without ``cpu`` goes from the GPU to the disk. Without a GPU the limit is the host's.
    """
    if not torch.cuda.is_available():
        return {"cpu": memory_bytes}
    return {0: memory_bytes, "cpu": int((free_host_bytes() or 0) * HOST_SHARE)}
