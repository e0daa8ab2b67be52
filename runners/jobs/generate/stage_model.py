"""The layers of one stage, their KV cache, and the ranks that run them."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import itertools

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    DynamicLayer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    QuantizedCache,
)
from transformers.distributed.configuration_utils import DistributedConfig

from runners.jobs.loading import (
    TORCH_DTYPES,
    ModelTensors,
    fill,
    load_tokenizer,
    pick_device,
    skeleton,
)
from runners.jobs.memory import tensor_bytes
from runners.jobs.model_files import opened_model
from runners.jobs.ranks import RankFailedError, Ranks, joined_ranks, naming_rank_failures
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.weights import check_loaded, config_of, own_config
from runners.jobspec import ArtefactModel, DataParallel, FolderModel, GenerateSpec, KvCache
from runners.jobspec.generate import ExpertSplit, PipelineSplit, TensorSplit

# ---------------------------------------------------------------------------
# KV caches of a batch: plain, fp8, or packed to 4 or 2 bits.
#
# fp8 is transformers' own quantised cache. 4 and 2 bits are implemented here: integers with one
# scale and one offset per token and head, packed into bytes; the only library for it depends on a
# package whose module name collides with the web server's.
# ---------------------------------------------------------------------------


BITS = {"int4": 4, "int2": 2}
BYTE = 8


class PackedTensor(NamedTuple):
    """Packed integers; a number represents ``offset + scale * number``."""

    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, bits: int) -> "PackedTensor":
        """Quantise [..., size] values with one scale per vector of the last dimension."""
        low, high = values.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float16).tiny)
        numbers = ((values - low) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
        parts = numbers.unflatten(-1, (-1, BYTE // bits)) << _shifts(bits, values.device)
        return cls(parts.sum(dim=-1, dtype=torch.uint8), scale.half(), low.half())

    def dequantise(self, bits: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised values."""
        parts = self.numbers[..., None] >> _shifts(bits, self.numbers.device)
        numbers = (parts & (2**bits - 1)).flatten(-2).float()
        values: torch.Tensor = numbers * self.scale.float() + self.offset.float()
        return values.to(dtype)

    def with_more(self, newer: "PackedTensor") -> "PackedTensor":
        """Return these tokens followed by the newer ones."""
        pairs = zip(self, newer, strict=True)
        return PackedTensor(*(torch.cat(pair, dim=-2) for pair in pairs))


class PackedLayer(DynamicLayer):
    """One layer's cache in few bits; each token is packed once, when it arrives."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.packed: tuple[PackedTensor, ...] = ()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values and return all; the first call returns its input unquantised."""
        newer = tuple(PackedTensor.of(each, self.bits) for each in (key_states, value_states))
        if not self.packed:
            self.is_initialized = True
            self.packed = newer
            return key_states, value_states
        pairs = zip(self.packed, newer, strict=True)
        self.packed = tuple(older.with_more(new) for older, new in pairs)
        keys, values = (each.dequantise(self.bits, key_states.dtype) for each in self.packed)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return int(self.packed[0].numbers.shape[-2]) if self.packed else 0


def check_cache(kind: KvCache, model: PreTrainedModel) -> None:
    """Check that the model supports this cache.

    Raises:
        BadInputError: a layer's cache is unsupported; the message names an alternative.
    """
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if kind != "plain" and layers != {DynamicLayer}:
        names = ", ".join(sorted(each.__name__ for each in layers))
        msg = f"a cache in {kind} needs full attention in every layer, here is {names}"
        raise BadInputError(f"{msg}; choose the plain cache")


def new_cache(kind: KvCache, model: PreTrainedModel) -> Cache:
    """Return an empty cache."""
    if kind == "plain":
        return DynamicCache(config=model.config)
    if kind == "fp8":
        return QuantizedCache("fp8", model.config)
    count = model.config.get_text_config().num_hidden_layers
    return Cache(layers=[PackedLayer(BITS[kind]) for _ in range(count)])


def cache_size(cache: Cache) -> int:
    """Return the bytes of a cache, including packed numbers and scales."""
    return sum(tensor_bytes(each) for layer in cache.layers for each in _tensors(vars(layer)))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, BYTE, bits, dtype=torch.uint8, device=device)


# ---------------------------------------------------------------------------
# Consecutive decoder layers of a model, and the interface of a model that processes share.
# ---------------------------------------------------------------------------


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.


# Rotary embeddings, one final norm, nothing added to the hidden states in between.
DIVISIBLE = (
    "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
LAYERS = "model.layers."


class PassArguments(NamedTuple):
    """The arguments of one pass for every stage: session, token positions and mask."""

    session: int
    positions: torch.Tensor  # [rows, new]
    mask: torch.Tensor | None  # [rows, all]; None: no padding


class Stage(Protocol):
    """Some layers, in this process or another."""

    def run(self, call: PassArguments, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' output for ``hidden`` [rows, new, width]."""

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""


def even_layer_ranges(num_layers: int, count: int) -> list[range]:
    """Return ``count`` ranges of layers, as even as possible; the first ones are longer.

    Raises:
        BadInputError: there are fewer layers than ranges.
    """
    if count > num_layers:
        msg = f"{count} stages are requested, and the model has {num_layers} layers"
        raise BadInputError(f"{msg}; choose at most {num_layers} stages")
    layers_each, num_longer = divmod(num_layers, count)
    starts = [at * layers_each + min(at, num_longer) for at in range(count + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def divisible_config(folder: Path) -> PretrainedConfig:
    """Return a folder's config.

    Raises:
        BadInputError: stages do not support the model.
    """
    config: PretrainedConfig = config_of(folder)
    if config.model_type not in DIVISIBLE:
        msg = f"a '{config.model_type}' model is not divided into stages; those that are: "
        raise BadInputError(msg + ", ".join(DIVISIBLE))
    if getattr(config, "decoder_sparse_step", 1) != 1:
        msg = f"decoder_sparse_step is {config.decoder_sparse_step}; stages run models where it is"
        raise BadInputError(f"{msg} 1")
    return config


class Layers:
    """Consecutive layers of a model folder, with their sessions."""

    def __init__(
        self, folder: Path, which: range, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Load only these layers.

        Raises:
            BadInputError: the model is not divisible, or its weights do not match its config.
        """
        self.which, self.device = which, device
        self._config = _config_of(divisible_config(folder), which)
        self.model: PreTrainedModel = skeleton(self._config, dtype, folder)
        self._base: Any = self.model.base_model
        self._base.norm = nn.Identity()  # the process with the ends applies the norm
        tensors = ModelTensors(folder, device, dtype)
        ours = {f"{LAYERS}{at}.": f"{at - which.start}." for at in which}
        stored = {
            new + name.removeprefix(old): name
            for name in tensors.names
            for old, new in ours.items()
            if name.startswith(old)
        }
        layers: Any = self._base.layers
        fill(layers, stored, lambda name: tensors.read(stored[name]), device)
        self._base.rotary_emb.to(device)
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def run(self, call: PassArguments, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' output for ``hidden`` [rows, new, width]."""
        cache = self._caches.setdefault(call.session, DynamicCache(config=self._config))
        output = self._base(
            inputs_embeds=hidden.to(self.device),
            attention_mask=None if call.mask is None else call.mask.to(self.device),
            position_ids=call.positions.to(self.device),
            past_key_values=cache,
            use_cache=True,
        )
        output_hidden: torch.Tensor = output.last_hidden_state
        return output_hidden

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""
        self._caches.pop(session, None)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the layers' weights."""
        return sum(map(tensor_bytes, self._base.layers.parameters()))

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of all sessions' KV caches."""
        return sum(map(cache_size, self._caches.values()))


class EmbeddingAndHead:
    """A model's embedding, final norm and head."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load the embedding, the final norm and the head.

        Raises:
            BadInputError: the model is not divisible, or its weights do not match its config.
        """
        self.model: PreTrainedModel = skeleton(divisible_config(folder), dtype, folder)
        self.device = device
        base: Any = self.model.base_model
        base.layers = nn.ModuleList()
        tensors = ModelTensors(folder, device, dtype)
        names = [name for name in tensors.names if not name.startswith(LAYERS)]
        fill(self.model, names, tensors.read, device)
        self._embed, self._norm = base.embed_tokens, base.norm
        self._head = self.model.get_output_embeddings()

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input for tokens [rows, new]."""
        hidden: torch.Tensor = self._embed(ids.to(self.device))
        return hidden

    @torch.inference_mode()
    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely next token of each row."""
        logits = self._head(self._norm(hidden[:, -1:].to(self.device)))
        tokens: torch.Tensor = logits[:, -1].argmax(dim=-1)
        return tokens


def run_stages(stages: Sequence[Stage], call: PassArguments, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of all stages in sequence."""
    for stage in stages:
        hidden = stage.run(call, hidden)
    return hidden


def _config_of(whole: PretrainedConfig, which: range) -> PretrainedConfig:
    fields = whole.to_dict()
    kinds = fields.get("layer_types")
    cut: dict[str, Any] = {"num_hidden_layers": len(which)}
    if kinds:
        cut["layer_types"] = kinds[which.start : which.stop]
    if dense := fields.get("mlp_only_layers"):
        cut["mlp_only_layers"] = [at - which.start for at in dense if at in which]
    config: PretrainedConfig = whole.__class__(**{**fields, **cut})
    config._attn_implementation = whole._attn_implementation  # noqa: SLF001 - to_dict leaves it out
    return config


# The interface of a model that several processes compute.


class Chain(ABC):
    """Several processes that together compute a model, led by this process."""

    model: PreTrainedModel  # this process's part, with the config of the whole model
    tokenizer: PreTrainedTokenizerFast | None
    device: torch.device
    where: str  # a description for people
    weight_bytes: int  # of this process's part

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def begin(self) -> "Session":
        """Start a batch's session; the processes keep its KV cache."""
        return Session(self, next(self._numbers))

    @abstractmethod
    def next_tokens(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""

    @abstractmethod
    def forget(self, session: int) -> None:
        """Drop a session's KV cache in every process."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes of the KV caches in this process."""

    @abstractmethod
    def finish(self, *, is_stopped: bool) -> None:
        """Stop the other processes, and tell them whether the job was stopped."""

    def result_metrics(self) -> dict[str, float]:
        """Return additional figures of the chain."""
        return {}


@dataclass(frozen=True)
class Session:
    """One batch that is computed by a chain."""

    chain: Chain
    number: int

    def next_tokens(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""
        return self.chain.next_tokens(PassArguments(self.number, positions, mask), ids)

    def close(self) -> int:
        """End the session; return the bytes of its KV cache in this process."""
        cache_bytes = self.chain.cache_bytes
        self.chain.forget(self.number)
        return cache_bytes


# ---------------------------------------------------------------------------
# Generation over ranks: tensor, expert or pipeline parallel.
#
# The lead runs the generation; before each pass it broadcasts a header, and the other ranks
# compute their part until it broadcasts the end.
# ---------------------------------------------------------------------------


STEP, FORGET, END, STOP = range(4)
HEADS = ("num_attention_heads", "num_key_value_heads")
WIDTHS = ("intermediate_size", "moe_intermediate_size")
RunLead = Callable[[Callable[[], Chain]], bool]  # the lead's work; returns if it was stopped


class RankPart(Protocol):
    """One rank's part of the model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    weight_bytes: int

    def compute(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Compute this rank's part of a pass; the lead's returns each row's next token."""

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""


def run_rank(job: Job, spec: GenerateSpec, run_lead: RunLead) -> bool:
    """Run this rank's part of a generation; return whether it was stopped.

    Raises:
        BadInputError: the model cannot be divided so, or over this number of ranks.
    """
    try:
        with joined_ranks(job, spec.parallel) as ranks:
            if ranks.is_lead:
                return run_lead(lambda: RankChain(ranks, load_rank_part(job, spec, ranks), spec))
            return run_broadcast_passes(ranks, load_rank_part(job, spec, ranks), spec.parallel)
    except RankFailedError as error:
        sys.exit(f"RANK_LOST: {error}")


def load_rank_part(job: Job, spec: GenerateSpec, ranks: Ranks) -> RankPart:
    """Load this rank's part of the job's model."""
    split = spec.split
    if not isinstance(split, TensorSplit | ExpertSplit | PipelineSplit):
        raise BadInputError("the job requests no split over ranks")
    if split.size != ranks.size:
        msg = f"split {split.method} has size {split.size}, but {ranks.size} ranks were started"
        raise BadInputError(f"{msg}; launch the job on {split.size} devices")
    if not isinstance(spec.model, FolderModel | ArtefactModel):
        msg = f"ranks read their part from a model folder; source {spec.model.source} has none"
        raise BadInputError(f"{msg}; choose a model that has one")
    folder, dtype = opened_model(spec.model, job.host_dir), TORCH_DTYPES[spec.weight_dtype]
    if isinstance(split, PipelineSplit):
        return PipelinePart(folder, dtype, ranks)
    return TensorPart(folder, dtype, ranks.size, by_experts=split.method == "expert")


class RankChain(Chain):
    """All ranks, as used by the lead."""

    def __init__(self, ranks: Ranks, part: RankPart, spec: GenerateSpec) -> None:
        super().__init__()
        self._ranks, self._part, self._parallel = ranks, part, spec.parallel
        self.model, self.weight_bytes = part.model, part.weight_bytes
        self.tokenizer, self.device = part.tokenizer, pick_device()
        method = spec.split.method if spec.split else ""
        self.where = f"{method} parallel over {ranks.size} ranks; the figures are the lead's"
        self._is_settled = False

    def next_tokens(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Run a pass on every rank; return the next token of each row."""
        masks = [] if call.mask is None else [call.mask]
        self._send(STEP, call.session, *ids.shape, *(each.shape[1] for each in masks))
        self._ranks.copy_from_lead([ids, call.positions, *masks])
        with naming_rank_failures(self._ranks):
            tokens = self._part.compute(call, ids)
        if not self._is_settled:
            self._ranks.settle(self._parallel)
            self._is_settled = True
        return tokens

    def forget(self, session: int) -> None:
        """Drop a session's KV cache on every rank."""
        self._send(FORGET, session)
        self._part.forget(session)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the lead's KV caches."""
        return self._part.cache_bytes

    def finish(self, *, is_stopped: bool) -> None:
        """Stop the other ranks."""
        self._send(STOP if is_stopped else END)

    def _send(self, *words: int) -> None:
        header = [*words, 0, 0, 0, 0][:5]
        self._ranks.copy_from_lead([torch.tensor(header)])


def run_broadcast_passes(ranks: Ranks, part: RankPart, parallel: DataParallel) -> bool:
    """Run the passes that the lead broadcasts; return whether it ended by a stop.

    Raises:
        RankFailedError: the lead or another rank did not respond in time.
    """
    is_settled = False
    while True:
        (header,) = _received(ranks, (5,))
        order, session, rows, new, width = header.tolist()
        if order in (END, STOP):
            return bool(order == STOP)
        if order == FORGET:
            part.forget(session)
            continue
        shapes = [(rows, new), (rows, new), *([(rows, width)] if width else [])]
        ids, positions, *mask = _received(ranks, *shapes)
        with naming_rank_failures(ranks):
            part.compute(PassArguments(session, positions, mask[0] if mask else None), ids)
        if not is_settled:
            ranks.settle(parallel)
            is_settled = True


def _received(ranks: Ranks, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    tensors = [torch.zeros(shape, dtype=torch.long) for shape in shapes]
    ranks.copy_from_lead(tensors)
    return tensors


class PipelinePart:
    """Pipeline parallel: consecutive layers; the lead also has the embedding and the head."""

    def __init__(self, folder: Path, dtype: torch.dtype, ranks: Ranks) -> None:
        """Load this rank's layers."""
        self._config = divisible_config(folder)
        device = pick_device()
        self._ranks, self._device, self._dtype = ranks, device, dtype
        self._place = (ranks.rank - ranks.lead) % ranks.size
        which = even_layer_ranges(self._config.num_hidden_layers, ranks.size)[self._place]
        self.tokenizer = load_tokenizer(folder)
        self._layers = Layers(folder, which, device, dtype)
        self._ends = EmbeddingAndHead(folder, device, dtype) if ranks.is_lead else None
        self.model = self._ends.model if self._ends else self._layers.model
        self.weight_bytes = self._layers.weight_bytes
        if self._ends:
            self.weight_bytes += sum(map(tensor_bytes, self._ends.model.parameters()))

    def compute(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Receive hidden states from the previous rank, run the layers, and send on."""
        rows, new = ids.shape
        previous = (self._ranks.rank - 1) % self._ranks.size
        following = (self._ranks.rank + 1) % self._ranks.size
        hidden = self._ends.embed(ids) if self._ends else self._received(previous, rows, new)
        hidden = self._layers.run(call, hidden)
        is_last = self._place == self._ranks.size - 1
        self._ranks.send(hidden[:, -1:] if is_last else hidden, following)
        return self._ends.choose(self._received(previous, rows, 1)) if self._ends else ids

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""
        self._layers.forget(session)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""
        return self._layers.cache_bytes

    def _received(self, sender: int, rows: int, new: int) -> torch.Tensor:
        shape = (rows, new, self._config.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._ranks.receive(hidden, sender)
        return hidden


class TensorPart:
    """Tensor parallel by transformers' plan for the architecture.

    ``by_experts``: expert parallel; all other matrices are divided as before.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, size: int, *, by_experts: bool = False
    ) -> None:
        """Load this rank's shards.

        Raises:
            BadInputError: the ranks do not divide the model, it has no plan, or the weights do
                not match the config.
        """
        check_divides(divisible_config(folder), size, by_experts=by_experts)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            **own_config(folder),
            dtype=dtype,
            output_loading_info=True,
            distributed_config=DistributedConfig(tp_size=size, ep_size=size if by_experts else 1),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        self.model: PreTrainedModel = loaded[0]
        check_loaded(folder, loaded[1])
        torch.nn.Module.eval(self.model)
        self.tokenizer = load_tokenizer(folder)
        self.weight_bytes = sum(
            tensor_bytes(each.to_local() if isinstance(each, DTensor) else each)
            for each in self.model.parameters()
        )
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def compute(self, call: PassArguments, ids: torch.Tensor) -> torch.Tensor:
        """Run the model; its layers communicate with the other ranks."""
        cache = self._caches.setdefault(call.session, DynamicCache(config=self.model.config))
        device = pick_device()
        output = self.model(
            input_ids=ids.to(device),
            attention_mask=None if call.mask is None else call.mask.to(device),
            position_ids=call.positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""
        self._caches.pop(session, None)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of this rank's KV caches."""
        return sum(map(cache_size, self._caches.values()))


def check_divides(config: PretrainedConfig, size: int, *, by_experts: bool = False) -> None:
    """Check that the ranks divide the heads or the experts.

    Raises:
        BadInputError: a count is not divisible; the message names the field.
    """
    if by_experts and not getattr(config, "num_experts", None):
        msg = f"a '{config.model_type}' model has no experts to divide"
        raise BadInputError(f"{msg}; choose tensor or pipeline parallel")
    for name in (*HEADS, "num_experts") if by_experts else (*HEADS, *WIDTHS):
        value = getattr(config, name, None)
        if isinstance(value, int) and value % size:
            msg = f"{name} is {value}, which is not divisible by {size} ranks"
            raise BadInputError(
                f"{msg}; choose a split size that divides it, or pipeline parallel"
            )
