"""Consecutive decoder layers of a model, and the interface of a model that processes share."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import (
    AutoConfig,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from runners.jobs.generate.caches import cache_size
from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import ModelTensors, fill, skeleton

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.


# Rotary embeddings, one final norm, nothing added to the hidden states in between.
DIVISIBLE = (
    "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
LAYERS = "model.layers."


class Call(NamedTuple):
    """The arguments of one pass for every stage: session, token positions and mask."""

    session: int
    positions: torch.Tensor  # [rows, new]
    mask: torch.Tensor | None  # [rows, all]; None: no padding


class Stage(Protocol):
    """Some layers, in this process or another."""

    def run(self, call: Call, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' output for ``hidden`` [rows, new, width]."""

    def forget(self, session: int) -> None:
        """Drop a session's KV cache."""


def divided(num_layers: int, count: int) -> list[range]:
    """Return ``count`` ranges of layers, as even as possible; the first ones are longer.

    Raises:
        BadInputError: there are fewer layers than ranges.
    """
    if count > num_layers:
        msg = f"{count} stages are requested, and the model has {num_layers} layers"
        raise BadInputError(f"{msg}; ask for at most as many")
    layers_each, num_longer = divmod(num_layers, count)
    starts = [at * layers_each + min(at, num_longer) for at in range(count + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def divisible_config(folder: Path) -> PretrainedConfig:
    """Return a folder's config.

    Raises:
        BadInputError: stages do not support the model.
    """
    config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True)
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
    def run(self, call: Call, hidden: torch.Tensor) -> torch.Tensor:
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


class Ends:
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


def through(stages: Sequence[Stage], call: Call, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of all stages in sequence."""
    for stage in stages:
        hidden = stage.run(call, hidden)
    return hidden


def _config_of(whole: PretrainedConfig, which: range) -> PretrainedConfig:
    """Return the config of a model with only these layers."""
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
    def next_tokens(self, call: Call, ids: torch.Tensor) -> torch.Tensor:
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

    def measured(self) -> dict[str, float]:
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
        return self.chain.next_tokens(Call(self.number, positions, mask), ids)

    def close(self) -> int:
        """End the session; return the bytes of its KV cache in this process."""
        cache_bytes = self.chain.cache_bytes
        self.chain.forget(self.number)
        return cache_bytes
