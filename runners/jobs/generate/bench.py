"""Speedups of the generation techniques, as ratios: ``python -m runners.jobs.generate.bench``.

Prints ratios as JSON lines, for `manage.py bench generate`. The model is small and has random
weights, so only whether a ratio is above or below 1 is meaningful, within one run.
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

from runners.host.bench import Ratio
from runners.jobs.generate.batching import (
    POLICIES,
    CompiledStep,
    DraftSource,
    PagePlan,
    decode_speculatively,
    measured_cost,
    run_continuous,
)
from runners.jobs.generate.placement import StreamedLayers, load_with_device_map
from runners.jobs.generate.stage_model import cache_size, new_cache
from runners.jobs.generate.static import AnswerLimits, BatchSetup, Ids, PaddedBatch, run_batch
from runners.jobs.loading import LayerwiseModel, demo_config, fresh_model, ready
from runners.jobs.memory import model_bytes, tensor_bytes
from runners.jobs.ratios import ratio_of, seconds_in_alternating_rounds
from runners.jobs.runtime import prepare_process
from runners.jobspec import Batching, DemoModel, KvCache
from runners.jobspec.generate import LayerStreaming

SHAPE = DemoModel(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    vocab_size=4096,
    max_position_embeddings=1024,
)
SLOTS = 8  # concurrent prompts
MAX_BATCH_SIZE = 16  # batch size when batches are cut by length: larger batches may pad more
ENDS = 512  # number of end tokens in the vocabulary, so that lengths vary as in real text
CPU = torch.device("cpu")
KINDS: tuple[KvCache, ...] = ("fp8", "int4", "int2")


@dataclass(frozen=True)
class Effort:
    """The workload that each ratio is measured on."""

    rounds: int = 5
    num_prompts: int = 24
    longest: int = 192
    output_tokens: int = 32
    compiles: bool = True  # takes a minute or more


def ratios(effort: Effort = Effort()) -> Iterator[Ratio]:
    """Yield every ratio."""
    torch.manual_seed(17)
    model = ready(fresh_model(demo_config(SHAPE), torch.float32))
    bench = Bench(model, effort.rounds)
    count, longest = effort.num_prompts, effort.longest
    all_prompts = prompts(count, 8, longest)
    yield from bench.cached(all_prompts[:4], AnswerLimits(effort.output_tokens // 2))
    yield from bench.packed(prompts(2 * SLOTS, 4, 2 * longest))
    yield from bench.batches(prompts(2 * count, 4, 2 * longest), AnswerLimits(1))
    if effort.compiles:
        yield from bench.compiled(all_prompts[:4], AnswerLimits(effort.output_tokens))
    yield from bench.speculative(all_prompts[:2], AnswerLimits(2 * effort.output_tokens))
    yield from bench.caches(all_prompts[:SLOTS])
    yield from bench.offloaded(all_prompts[:SLOTS], AnswerLimits(4))
    yield from bench.continuous(
        prompts(2 * count, 8, longest), AnswerLimits(4 * effort.output_tokens, ends())
    )


def ends() -> frozenset[int]:
    """Return the end tokens."""
    drawn = np.random.default_rng(5).integers(0, SHAPE.vocab_size, ENDS)
    return frozenset(drawn.tolist())


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return random prompts with a realistic length distribution: many short, few long."""
    generator = np.random.default_rng(11)
    shares = generator.beta(0.7, 2.0, count)
    lengths = (shortest + shares * (longest - shortest)).astype(int)
    return [generator.integers(0, SHAPE.vocab_size, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Bench:
    """Comparisons; the variants of each are timed alternately."""

    model: PreTrainedModel
    rounds: int

    def cached(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Compare no cache, a KV cache, and one batch with KV caches."""
        uncached, alone, together = self._seconds(
            lambda: [without_cache(self.model, ids, limits) for ids in pile],
            lambda: run_batches(self.model, [[ids] for ids in pile], limits),
            lambda: run_batch(self.model, pile, limits),
        )
        yield ratio_of("no cache / KV cache", uncached, alone)
        yield ratio_of("one by one / one batch", alone, together)

    def continuous(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Compare static batching with continuous batching over reserved or shared pages."""
        reserved, shared = page_plans([len(each) for each in pile], limits.output_tokens)

        def paged(pages: PagePlan) -> Callable[[], None]:
            return lambda: run_continuous(self.model, pile, pages, limits, lambda _done: None)

        static, whole, pages = self._seconds(
            lambda: run_batches(self.model, static_batches(pile), limits),
            paged(reserved),
            paged(shared),
        )
        yield ratio_of("static / continuous batching", static, whole)
        yield ratio_of("contiguous / paged cache of the same bytes", whole, pages)

    def batches(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Compare batching policies; few output tokens, so that the prompts dominate."""
        cost = measured_cost(self.model, pile, MAX_BATCH_SIZE, limits.output_tokens)
        lengths = [len(each) for each in pile]

        def by(policy: Batching) -> Callable[[], None]:
            batches = POLICIES[policy](lengths, MAX_BATCH_SIZE, cost)
            return lambda: run_batches(
                self.model, [[pile[at] for at in batch] for batch in batches], limits
            )

        given_order, by_length, turbo = self._seconds(by("given"), by("sorted"), by("turbo"))
        yield ratio_of("given order / sorted", given_order, by_length)
        yield ratio_of("given order / TurboTransformers", given_order, turbo)
        yield ratio_of("sorted / TurboTransformers", by_length, turbo)

    def packed(self, pile: Sequence[Ids]) -> Iterator[Ratio]:
        """Compare the prefill of the same prompts with and without padding."""
        padded, packed = self._seconds(
            lambda: run_batch(self.model, pile, AnswerLimits(1)),
            lambda: run_batch(self.model, pile, AnswerLimits(1), BatchSetup(is_packed=True)),
        )
        yield ratio_of("padded / padding-free prefill", padded, packed)

    def compiled(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Compare the eager and the compiled decode step; compile time is not counted."""
        length = max(map(len, pile)) + limits.output_tokens
        step = CompiledStep(self.model, len(pile), length)
        eager, compiled = self._seconds(
            lambda: run_batch(self.model, pile, limits), lambda: step.run_batch(pile, limits)
        )
        yield ratio_of("eager / compiled decode step", eager, compiled)

    def speculative(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Measure prompt lookup; random weights repeat themselves, so drafts are easy."""
        plain, speculative = self._seconds(
            lambda: run_batches(self.model, [[ids] for ids in pile], limits),
            lambda: [
                decode_speculatively(self.model, ids, DraftSource(5), limits) for ids in pile
            ],
        )
        yield ratio_of("plain / speculative decoding", plain, speculative)

    def caches(self, pile: Sequence[Ids]) -> Iterator[Ratio]:
        """Compare the cache sizes for the same tokens."""
        plain_size = _cache_bytes(self.model, pile, "plain")
        for kind in KINDS:
            size = _cache_bytes(self.model, pile, kind)
            yield Ratio.exact(f"plain / {kind} cache", plain_size, size, "bytes")

    def offloaded(self, pile: Sequence[Ids], limits: AnswerLimits) -> Iterator[Ratio]:
        """Compare offload to disk: streamed layers and accelerate's device map.

        Both have the same memory for weights: everything outside the layers, plus two layers: one
        resident and one in transfer.
        """
        cap = cap_of_two_layers(self.model)
        with tempfile.TemporaryDirectory(prefix="slipway-bench-") as place:
            folder = Path(place) / "model"
            self.model.save_pretrained(str(folder))
            skeleton = LayerwiseModel(folder, CPU, torch.float32)
            options = LayerStreaming(layers_resident=1, look_ahead=False)
            streamed_model = StreamedLayers(skeleton, folder, options).model
            accelerate_model, _where = load_with_device_map(
                folder, torch.float32, cap, Path(place)
            )
            one_by_one, together, mapped_seconds = self._seconds(
                lambda: run_batches(streamed_model, [[ids] for ids in pile], limits),
                lambda: run_batch(streamed_model, pile, limits),
                lambda: run_batch(accelerate_model, pile, limits),
            )
        yield ratio_of("accelerate's map / streamed layers", mapped_seconds, together)
        yield ratio_of("streamed one by one / for a batch", one_by_one, together)

    def _seconds(self, *variants: Callable[[], object]) -> list[list[float]]:
        return seconds_in_alternating_rounds(variants, self.rounds)


def cap_of_two_layers(model: PreTrainedModel) -> int:
    """Return a model's bytes with only two of its layers."""
    layers = list(model.get_submodule("model.layers").children())
    each = sum(tensor_bytes(tensor) for tensor in layers[0].parameters())
    return model_bytes(model) - (len(layers) - 2) * each


def static_batches(pile: Sequence[Ids]) -> list[Sequence[Ids]]:
    """Return the prompts in their order, cut into batches."""
    return [pile[at : at + SLOTS] for at in range(0, len(pile), SLOTS)]


def page_plans(lengths: Sequence[int], output_tokens: int) -> tuple[PagePlan, PagePlan]:
    """Return pages reserved per prompt for the longest answer, and the same number shared."""
    planned = PagePlan.of(lengths, output_tokens, SLOTS)
    reserved = PagePlan(planned.num_blocks, planned.max_batch_tokens, SLOTS)
    return reserved, PagePlan(planned.num_blocks, planned.max_batch_tokens, 3 * SLOTS)


@torch.inference_mode()
def without_cache(model: PreTrainedModel, ids: Ids, limits: AnswerLimits) -> list[int]:
    """Return the tokens after a prompt, recomputing all of it for each token."""
    text = list(ids)
    while len(text) < len(ids) + limits.output_tokens:
        logits = model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=1).logits
        text.append(int(logits[0, -1].argmax()))
    return text[len(ids) :]


def run_batches(
    model: PreTrainedModel, batches: Sequence[Sequence[Ids]], limits: AnswerLimits
) -> None:
    """Run the batches in sequence."""
    for batch in batches:
        run_batch(model, batch, limits)


@torch.inference_mode()
def _cache_bytes(model: PreTrainedModel, prompt_ids: Sequence[Ids], kind: KvCache) -> int:
    cache, batch = new_cache(kind, model), PaddedBatch.of(prompt_ids, CPU)
    tokens = batch.step(model, batch.ids, cache)
    batch.step(model, tokens[:, None], cache)
    return cache_size(cache)


if __name__ == "__main__":
    prepare_process()
    for ratio in ratios():
        sys.stdout.write(json.dumps(ratio) + "\n")
        sys.stdout.flush()
