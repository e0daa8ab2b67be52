"""A sparse mixture of experts of which the device holds the experts that were used last.

Each layer keeps its last used ones. While a layer computes, a thread brings those that the next
layer's router would choose for what this layer sees. Guesses have room of their own: with a
small cache they would drive out what is used again.
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

Key = tuple[int, int]  # which sparse layer, which of its experts
Fetch = Callable[[int, int], Expert]


@dataclass
class ExpertFigures:
    """What the cache did, warm-up included."""

    wanted: int = 0
    hits: int = 0
    guessed: int = 0
    right: int = 0
    brought: int = 0
    expert_bytes: int = 0

    def measured(self) -> dict[str, float]:
        """Return the figures of the job's result."""
        found = {
            "expert_hit_ratio": self.hits / max(1, self.wanted),
            "experts_brought": float(self.brought),
            "expert_bytes_brought": float(self.brought * self.expert_bytes),
        }
        if self.guessed:
            found["expert_guess_ratio"] = self.right / self.guessed
        return found


class Shelf:
    """The experts on the device: of each layer the last used ones, and those that were guessed."""

    def __init__(self, fetch: Fetch, resident: int, guesses: int) -> None:
        self._fetch = fetch
        self._resident, self._guesses = resident, guesses
        self._held: dict[int, OrderedDict[int, Expert]] = defaultdict(OrderedDict)
        self._coming: dict[Key, Future[Expert]] = {}
        self._thread = ThreadPoolExecutor(1, "next-experts")
        self.figures = ExpertFigures()

    def guess(self, layer: int, experts: Iterable[int]) -> None:
        """Bring experts of a layer that may be wanted next, the likeliest first."""
        for each in self._coming.values():
            if each.cancel():  # was not begun with
                self.figures.brought -= 1
        new = [each for each in experts if each not in self._held[layer]][: self._guesses]
        self._coming = {
            (layer, each): self._thread.submit(self._fetch, layer, each) for each in new
        }
        self.figures.guessed += len(new)
        self.figures.brought += len(new)

    def take(self, layer: int, expert: int) -> Expert:
        """Return an expert, from the device where it is there."""
        held = self._held[layer]
        self.figures.wanted += 1
        if expert in held:
            self.figures.hits += 1
            held.move_to_end(expert)
            return held[expert]
        found = held[expert] = self._bring(layer, expert)
        if len(held) > self._resident:
            held.popitem(last=False)
        return found

    def _bring(self, layer: int, expert: int) -> Expert:
        coming = self._coming.pop((layer, expert), None)
        if coming is None:
            self.figures.brought += 1
            return self._fetch(layer, expert)
        self.figures.right += 1
        return coming.result()


class ShelvedExperts(nn.Module):
    """Stands where a layer had its stacked experts and takes each from the shelf."""

    def __init__(self, layer: int, shelf: Shelf, act: nn.Module, after: nn.Module | None) -> None:
        """``after``: the next layer's router, which returns each token's experts last."""
        super().__init__()
        self._layer, self._shelf, self._act = layer, shelf, act
        self._after = (after,)  # in a tuple: it stays a part of its own layer

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what the chosen experts make of ``hidden`` [tokens, width], weighted."""
        (after,) = self._after
        if after is not None:
            guessed = after(hidden)[-1].flatten().bincount()
            self._shelf.guess(self._layer + 1, guessed.argsort(descending=True).tolist())
        found = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            gate_up, down = self._shelf.take(self._layer, expert)
            gate, up = nn.functional.linear(hidden[tokens], gate_up).chunk(2, dim=-1)
            done = nn.functional.linear(self._act(gate) * up, down)
            done = done * weights[tokens, places, None]
            found.index_add_(0, tokens, done.to(found.dtype))
        return found


class CachedExperts:
    """A model folder as a model whose experts are on a shelf."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, asked: ExpertCache
    ) -> None:
        """Load everything but the experts.

        Raises:
            BadInputError: the model has no experts of the kind that are cached, or more are to
                stay than there are, or its weights are not those of its config.
        """
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        self.model: PreTrainedModel = skeleton(config, dtype, folder)
        places = _sparse_places(self.model)
        self._asked, self._device, self._places = asked, device, places
        self._tensors = ModelTensors(folder, device, dtype)
        self._host: dict[Key, Expert] = {}
        self._check(config.model_type)
        guesses = asked.guessed_experts
        self.shelf = Shelf(self._fetch, asked.experts_resident, guesses)
        blocks: list[Any] = [self.model.get_submodule(each) for each in places]
        for index, block in enumerate(blocks):
            after = blocks[index + 1].gate if guesses and index + 1 < len(blocks) else None
            act = block.experts.act_fn
            block.experts = ShelvedExperts(index, self.shelf, act, after)
        names = [name for name in self._tensors.names if not name.endswith((GATE_UP, DOWN))]
        fill(self.model, names, self._tensors.read, device)
        self._look_at_all()

    @property
    def where(self) -> str:
        """Say in words where the experts are."""
        asked = self._asked
        ahead = f", at most {asked.guessed_experts} guessed ones" if asked.guessed_experts else ""
        return (
            f"{asked.experts_resident} of {self.num_experts} experts of each layer stay{ahead}; "
            f"the others come from {asked.experts_from.replace('_', ' ')}"
        )

    @property
    def num_experts(self) -> int:
        """Return how many experts a layer has."""
        return len(self._tensors.experts[f"{self._places[0]}.experts"])

    def _check(self, model_type: str) -> None:
        for place in self._places:
            if not self._tensors.experts.get(f"{place}.experts"):
                msg = f"the files of this '{model_type}' model hold no single experts of {place}"
                raise BadInputError(f"{msg}; run it without offload")
        if self._asked.experts_resident > self.num_experts:
            msg = f"experts_resident is {self._asked.experts_resident}; a layer has "
            raise BadInputError(f"{msg}{self.num_experts} experts")

    def _look_at_all(self) -> None:
        """Read every expert once: none may hold NaN, and host memory keeps them where asked."""
        for layer, place in enumerate(self._places):
            for index in range(self.num_experts):
                found = self._tensors.expert(f"{place}.experts", index)
                check_finite(found._asdict(), f"{place}.experts.{index}.")
                self.shelf.figures.expert_bytes = sum(map(tensor_bytes, found))
                if self._asked.experts_from == "host_memory":
                    self._host[layer, index] = Expert(*map(in_host, found))

    def _fetch(self, layer: int, index: int) -> Expert:
        if (kept := self._host.get((layer, index))) is not None:
            return Expert(*(each.to(self._device, non_blocking=True) for each in kept))
        return self._tensors.expert(f"{self._places[layer]}.experts", index)


def _sparse_places(model: PreTrainedModel) -> list[str]:
    """Return the names of the blocks that have a router and stacked experts, in their order."""
    found = [
        name
        for name, module in model.named_modules()
        if {"gate", "experts"} <= dict(module.named_children()).keys()
        and {each for each, _ in module.experts.named_parameters()} == {GATE_UP, DOWN}
    ]
    if not found:
        msg = f"a '{model.config.model_type}' model has no experts that could be cached; stream "
        raise BadInputError(f"{msg}its layers instead")
    return found
