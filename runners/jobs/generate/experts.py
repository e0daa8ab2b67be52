"""Expert offloading: an LRU cache of experts on the device, with speculative prefetch.

Each layer keeps its most recently used experts. While a layer computes, a thread prefetches those
that the next layer's router would choose for this layer's input. Prefetched experts have separate
room: in a small cache they would evict experts that are reused.
Source: Eliseev and Mazur, arXiv:2312.17238.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from runners.generate_options import ExpertCache
from runners.jobs.memory import tensor_bytes
from runners.jobs.runtime import BadInputError
from runners.jobs.skeleton import DOWN, GATE_UP, Expert, ModelTensors, fill, skeleton
from runners.jobs.stored import check_finite, in_host

Key = tuple[int, int]  # (sparse layer, expert)
Fetch = Callable[[int, int], Expert]


@dataclass
class ExpertFigures:
    """Statistics of the expert cache, including the warm-up."""

    wanted: int = 0
    hits: int = 0
    guessed: int = 0
    right: int = 0
    brought: int = 0
    expert_bytes: int = 0

    def measured(self) -> dict[str, float]:
        """Return the figures of the job's result."""
        figures = {
            "expert_hit_ratio": self.hits / max(1, self.wanted),
            "experts_brought": float(self.brought),
            "expert_bytes_brought": float(self.brought * self.expert_bytes),
        }
        if self.guessed:
            figures["expert_guess_ratio"] = self.right / self.guessed
        return figures


class DeviceExperts:
    """The experts on the device: an LRU cache per layer, and the prefetched ones."""

    def __init__(self, fetch: Fetch, resident: int, guesses: int) -> None:
        self._fetch = fetch
        self._resident, self._guesses = resident, guesses
        self._cached: dict[int, OrderedDict[int, Expert]] = defaultdict(OrderedDict)
        self._prefetches: dict[Key, Future[Expert]] = {}
        self._thread = ThreadPoolExecutor(1, "next-experts")
        self.figures = ExpertFigures()

    def guess(self, layer: int, experts: Iterable[int]) -> None:
        """Prefetch experts of a layer that may be used next, the most likely first."""
        for each in self._prefetches.values():
            if each.cancel():  # had not started
                self.figures.brought -= 1
        missing = [each for each in experts if each not in self._cached[layer]][: self._guesses]
        self._prefetches = {
            (layer, each): self._thread.submit(self._fetch, layer, each) for each in missing
        }
        self.figures.guessed += len(missing)
        self.figures.brought += len(missing)

    def take(self, layer: int, expert: int) -> Expert:
        """Return an expert, from the cache if possible."""
        cached = self._cached[layer]
        self.figures.wanted += 1
        if expert in cached:
            self.figures.hits += 1
            cached.move_to_end(expert)
            return cached[expert]
        loaded = cached[expert] = self._bring(layer, expert)
        if len(cached) > self._resident:
            cached.popitem(last=False)
        return loaded

    def _bring(self, layer: int, expert: int) -> Expert:
        prefetch = self._prefetches.pop((layer, expert), None)
        if prefetch is None:
            self.figures.brought += 1
            return self._fetch(layer, expert)
        self.figures.right += 1
        return prefetch.result()


class ShelvedExperts(nn.Module):
    """Replaces a layer's stacked experts; takes each expert from the cache."""

    def __init__(
        self, layer: int, shelf: DeviceExperts, act: nn.Module, after: nn.Module | None
    ) -> None:
        """``after``: the next layer's router, whose last output is each token's experts."""
        super().__init__()
        self._layer, self._shelf, self._act = layer, shelf, act
        self._after = (after,)  # in a tuple, so that it is not registered as a submodule

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted outputs of the chosen experts for ``hidden`` [tokens, width]."""
        (after,) = self._after
        if after is not None:
            guessed = after(hidden)[-1].flatten().bincount()
            self._shelf.guess(self._layer + 1, guessed.argsort(descending=True).tolist())
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            gate_up, down = self._shelf.take(self._layer, expert)
            gate, up = nn.functional.linear(hidden[tokens], gate_up).chunk(2, dim=-1)
            expert_output = nn.functional.linear(self._act(gate) * up, down)
            expert_output = expert_output * weights[tokens, places, None]
            output.index_add_(0, tokens, expert_output.to(output.dtype))
        return output


class CachedExperts:
    """A model from a folder with cached experts."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, asked: ExpertCache
    ) -> None:
        """Load everything except the experts.

        Raises:
            BadInputError: the model has no experts of a supported kind, fewer than are to be
                resident, or its weights do not match its config.
        """
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        self.model: PreTrainedModel = skeleton(config, dtype, folder)
        places = _sparse_places(self.model)
        self._asked, self._device, self._places = asked, device, places
        self._tensors = ModelTensors(folder, device, dtype)
        self._host: dict[Key, Expert] = {}
        self._check(config.model_type)
        guesses = asked.guessed_experts
        self.cache = DeviceExperts(self._fetch, asked.experts_resident, guesses)
        blocks: list[Any] = [self.model.get_submodule(each) for each in places]
        for index, block in enumerate(blocks):
            after = blocks[index + 1].gate if guesses and index + 1 < len(blocks) else None
            act = block.experts.act_fn
            block.experts = ShelvedExperts(index, self.cache, act, after)
        names = [name for name in self._tensors.names if not name.endswith((GATE_UP, DOWN))]
        fill(self.model, names, self._tensors.read, device)
        self._check_all()

    @property
    def where(self) -> str:
        """Return a note on where the experts are."""
        options = self._asked
        ahead = (
            f", at most {options.guessed_experts} guessed ones" if options.guessed_experts else ""
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
        if self._asked.experts_resident > self.num_experts:
            msg = f"experts_resident is {self._asked.experts_resident}; a layer has "
            raise BadInputError(f"{msg}{self.num_experts} experts")

    def _check_all(self) -> None:
        """Read every expert once to check for NaN, and store it in host memory if requested."""
        for layer, place in enumerate(self._places):
            for index in range(self.num_experts):
                expert = self._tensors.expert(f"{place}.experts", index)
                check_finite(expert._asdict(), f"{place}.experts.{index}.")
                self.cache.figures.expert_bytes = sum(map(tensor_bytes, expert))
                if self._asked.experts_from == "host_memory":
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
