"""What each technique brings, as ratios of one run: ``python -m runners.jobs.generate.bench``.

Prints ratios as JSON lines, for `manage.py bench generate`. The model has random weights and is
small; only the direction of a ratio means anything, and only within this run.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.generate_options import LayerStreaming
from runners.jobs.generate.batching import POLICIES
from runners.jobs.generate.caches import cache_size, new_cache
from runners.jobs.generate.compiled import CompiledStep
from runners.jobs.generate.continuous import Pages, run_continuous
from runners.jobs.generate.placement import StreamedLayers, mapped
from runners.jobs.generate.speculative import Guesser, guess_one
from runners.jobs.generate.static import Ids, Limits, Padded, Setup, run_batch
from runners.jobs.generate.warmup import measured_cost
from runners.jobs.layers import LayerwiseModel
from runners.jobs.loading import demo_config, fresh_model, ready
from runners.jobs.memory import model_bytes, tensor_bytes
from runners.jobs.ratios import ratio_of, seconds_in_turns
from runners.jobs.runtime import prepare_process
from runners.jobspec import Batching, DemoModel, KvCache
from runners.ratios import Ratio

SHAPE = DemoModel(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    vocab_size=4096,
    max_position_embeddings=1024,
)
SLOTS = 8  # prompts at once
MOST = 16  # where batches are cut by length: the longer a batch may be, the more it may pad
ENDS = 512  # of the vocabulary end an answer: lengths then differ as in real text
CPU = torch.device("cpu")
KINDS: tuple[KvCache, ...] = ("fp8", "int4", "int2")


@dataclass(frozen=True)
class Effort:
    """How much each ratio is measured on."""

    rounds: int = 5
    num_prompts: int = 24
    longest: int = 192
    output_tokens: int = 32
    compiles: bool = True  # a minute or more


def ratios(effort: Effort = Effort()) -> Iterator[Ratio]:
    """Yield every ratio."""
    torch.manual_seed(17)
    model = ready(fresh_model(demo_config(SHAPE), torch.float32))
    bench = Bench(model, effort.rounds)
    count, longest = effort.num_prompts, effort.longest
    pile = prompts(count, 8, longest)
    yield from bench.cached(pile[:4], Limits(effort.output_tokens // 2))
    yield from bench.packed(prompts(2 * SLOTS, 4, 2 * longest))
    yield from bench.batches(prompts(2 * count, 4, 2 * longest), Limits(1))
    if effort.compiles:
        yield from bench.compiled(pile[:4], Limits(effort.output_tokens))
    yield from bench.guessed(pile[:2], Limits(2 * effort.output_tokens))
    yield from bench.caches(pile[:SLOTS])
    yield from bench.offloaded(pile[:SLOTS], Limits(4))
    yield from bench.continuous(
        prompts(2 * count, 8, longest), Limits(4 * effort.output_tokens, ends())
    )


def ends() -> frozenset[int]:
    """Return tokens that end an answer."""
    found = np.random.default_rng(5).integers(0, SHAPE.vocab_size, ENDS)
    return frozenset(found.tolist())


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return random prompts, many short ones and few long ones, as piles of text have."""
    generator = np.random.default_rng(11)
    shares = generator.beta(0.7, 2.0, count)
    lengths = (shortest + shares * (longest - shortest)).astype(int)
    return [generator.integers(0, SHAPE.vocab_size, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Bench:
    """The ways of each comparison are run in turns."""

    model: PreTrainedModel
    rounds: int

    def cached(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Compare reading everything again for each token, keeping it, and keeping it for many."""
        anew, alone, together = self._seconds(
            lambda: [without_cache(self.model, ids, limits) for ids in pile],
            lambda: run_batches(self.model, [[ids] for ids in pile], limits),
            lambda: run_batch(self.model, pile, limits),
        )
        yield ratio_of("no cache / KV cache", anew, alone)
        yield ratio_of("one by one / one batch", alone, together)

    def continuous(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Compare batches that wait for their longest, and pages that are kept or shared."""
        reserved, shared = page_plans([len(each) for each in pile], limits.output_tokens)

        def paged(pages: Pages) -> Callable[[], None]:
            return lambda: run_continuous(self.model, pile, pages, limits, lambda _done: None)

        static, whole, pages = self._seconds(
            lambda: run_batches(self.model, static_batches(pile), limits),
            paged(reserved),
            paged(shared),
        )
        yield ratio_of("static / continuous batching", static, whole)
        yield ratio_of("contiguous / paged cache of the same bytes", whole, pages)

    def batches(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Compare ways of cutting a pile; few tokens are written, so that the prompts count."""
        cost = measured_cost(self.model, pile, MOST, limits.output_tokens)
        lengths = [len(each) for each in pile]

        def by(policy: Batching) -> Callable[[], None]:
            batches = POLICIES[policy](lengths, MOST, cost)
            return lambda: run_batches(
                self.model, [[pile[at] for at in batch] for batch in batches], limits
            )

        given, by_length, turbo = self._seconds(by("given"), by("sorted"), by("turbo"))
        yield ratio_of("given order / sorted", given, by_length)
        yield ratio_of("given order / TurboTransformers", given, turbo)
        yield ratio_of("sorted / TurboTransformers", by_length, turbo)

    def packed(self, pile: Sequence[Ids]) -> Iterator[Ratio]:
        """Compare reading the same prompts with padding and without."""
        padded, packed = self._seconds(
            lambda: run_batch(self.model, pile, Limits(1)),
            lambda: run_batch(self.model, pile, Limits(1), Setup(is_packed=True)),
        )
        yield ratio_of("padded / padding-free prefill", padded, packed)

    def compiled(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Compare the step of one token as it is and compiled; compiling is not counted."""
        length = max(map(len, pile)) + limits.output_tokens
        step = CompiledStep(self.model, len(pile), length)
        eager, compiled = self._seconds(
            lambda: run_batch(self.model, pile, limits), lambda: step.run_batch(pile, limits)
        )
        yield ratio_of("eager / compiled decode step", eager, compiled)

    def guessed(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Guess from the text so far; random weights repeat themselves, which makes it easy."""
        plain, guessed = self._seconds(
            lambda: run_batches(self.model, [[ids] for ids in pile], limits),
            lambda: [guess_one(self.model, ids, Guesser(5), limits) for ids in pile],
        )
        yield ratio_of("plain / speculative decoding", plain, guessed)

    def caches(self, pile: Sequence[Ids]) -> Iterator[Ratio]:
        """Compare what the caches hold of the same tokens."""
        whole = _held(self.model, pile, "plain")
        for kind in KINDS:
            held = _held(self.model, pile, kind)
            yield Ratio.exact(f"plain / {kind} cache", whole, held, "bytes")

    def offloaded(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Ratio]:
        """Compare weights that come from disk: by our layers and by accelerate's map.

        Both may hold the same bytes of weights: what stands around the layers and two of them,
        one that stays and one that comes and goes.
        """
        cap = cap_of_two_layers(self.model)
        with tempfile.TemporaryDirectory(prefix="slipway-bench-") as place:
            folder = Path(place) / "model"
            self.model.save_pretrained(str(folder))
            skeleton = LayerwiseModel(folder, CPU, torch.float32)
            asked = LayerStreaming(layers_resident=1, look_ahead=False)
            ours = StreamedLayers(skeleton, folder, asked).model
            theirs, _where = mapped(folder, torch.float32, cap, Path(place))
            one_by_one, together, map_of_theirs = self._seconds(
                lambda: run_batches(ours, [[ids] for ids in pile], limits),
                lambda: run_batch(ours, pile, limits),
                lambda: run_batch(theirs, pile, limits),
            )
        yield ratio_of("accelerate's map / streamed layers", map_of_theirs, together)
        yield ratio_of("streamed one by one / for a batch", one_by_one, together)

    def _seconds(self, *ways: Callable[[], object]) -> list[list[float]]:
        return seconds_in_turns(ways, self.rounds)


def cap_of_two_layers(model: PreTrainedModel) -> int:
    """Return the bytes of a model but for all of its layers but two."""
    layers = list(model.get_submodule("model.layers").children())
    each = sum(tensor_bytes(tensor) for tensor in layers[0].parameters())
    return model_bytes(model) - (len(layers) - 2) * each


def static_batches(pile: Sequence[Ids]) -> list[Sequence[Ids]]:
    """Return a pile in its order, cut into batches."""
    return [pile[at : at + SLOTS] for at in range(0, len(pile), SLOTS)]


def page_plans(lengths: Sequence[int], output_tokens: int) -> tuple[Pages, Pages]:
    """Return pages that are each prompt's own up to the longest answer, and as many shared."""
    planned = Pages.of(lengths, output_tokens, SLOTS)
    reserved = Pages(planned.num_blocks, planned.max_batch_tokens, SLOTS)
    return reserved, Pages(planned.num_blocks, planned.max_batch_tokens, 3 * SLOTS)


@torch.inference_mode()
def without_cache(model: PreTrainedModel, ids: Ids, limits: Limits) -> list[int]:
    """Return what follows a prompt, all of it read again for each token."""
    text = list(ids)
    while len(text) < len(ids) + limits.output_tokens:
        logits = model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1).logits
        text.append(int(logits[0, -1].argmax()))
    return text[len(ids) :]


def run_batches(model: PreTrainedModel, batches: Sequence[Sequence[Ids]], limits: Limits) -> None:
    """Answer one batch after the other."""
    for batch in batches:
        run_batch(model, batch, limits)


@torch.inference_mode()
def _held(model: PreTrainedModel, pile: Sequence[Ids], kind: KvCache) -> int:
    cache, batch = new_cache(kind, model), Padded.of(pile, CPU)
    tokens = batch.step(model, batch.ids, cache)
    batch.step(model, tokens[:, None], cache)
    return cache_size(cache)


if __name__ == "__main__":
    prepare_process()
    for ratio in ratios():
        sys.stdout.write(json.dumps(ratio) + "\n")
        sys.stdout.flush()
