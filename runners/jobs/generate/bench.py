"""What each technique brings, as ratios of one run: ``python -m runners.jobs.generate.bench``.

Prints JSON lines of name, value and unit, for `manage.py bench generate`. The model has random
weights and is small; only the direction of a ratio means anything, and only within this run.
Seconds are the process's own, so that whoever else works on the machine does not count.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.generate_options import LayerStreaming
from runners.jobs.generate.batching import POLICIES
from runners.jobs.generate.caches import cache_size, new_cache
from runners.jobs.generate.continuous import PAGE_TOKENS, Pages, run_continuous
from runners.jobs.generate.placement import StreamedLayers, mapped
from runners.jobs.generate.speculative import Guesser, guess_one
from runners.jobs.generate.static import Ids, Limits, Padded, Setup, run_batch
from runners.jobs.generate.warmup import measured_cost
from runners.jobs.layers import LayerwiseModel
from runners.jobs.loading import demo_config, fresh_model, ready
from runners.jobs.memory import model_bytes, tensor_bytes
from runners.jobs.runtime import prepare_process
from runners.jobspec import Batching, DemoModel, KvCache

SHAPE = DemoModel(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    vocab_size=4096,
    max_position_embeddings=1024,
)
SLOTS = 8  # prompts at once
ENDS = 512  # of the vocabulary end an answer: lengths then differ as in real text
CPU = torch.device("cpu")
KINDS: tuple[KvCache, ...] = ("fp8", "int4", "int2")
Row = tuple[str, float, str]


@dataclass(frozen=True)
class Effort:
    """How much each ratio is measured on."""

    rounds: int = 2
    num_prompts: int = 24
    longest: int = 192
    output_tokens: int = 32


def rows(effort: Effort = Effort()) -> Iterator[Row]:
    """Yield every ratio."""
    torch.manual_seed(17)
    model = ready(fresh_model(demo_config(SHAPE), torch.float32))
    bench = Bench(model, effort.rounds)
    count, longest = effort.num_prompts, effort.longest
    pile = prompts(count, 8, longest)
    ends = np.random.default_rng(5).integers(0, SHAPE.vocab_size, ENDS)
    run_batch(model, pile[:2], Limits(4))
    yield from bench.packed(prompts(2 * SLOTS, 4, 2 * longest))
    yield from bench.batches(prompts(count, 4, 2 * longest), Limits(4))
    yield from bench.guessed(pile[:2], Limits(2 * effort.output_tokens))
    yield from bench.caches(pile[:SLOTS])
    yield from bench.offloaded(pile[:SLOTS], Limits(4))
    uneven = Limits(4 * effort.output_tokens, frozenset(ends.tolist()))
    yield from bench.continuous(prompts(2 * count, 8, longest), uneven)


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return random prompts, many short ones and few long ones, as piles of text have."""
    generator = np.random.default_rng(11)
    shares = generator.beta(0.7, 2.0, count)
    lengths = (shortest + shares * (longest - shortest)).astype(int)
    return [generator.integers(0, SHAPE.vocab_size, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Bench:
    """Each pair is run in turns, and the best of its rounds counts."""

    model: PreTrainedModel
    rounds: int

    def continuous(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Row]:
        """Compare batches that wait for their longest, and pages that are kept or shared."""
        lengths = [len(each) for each in pile]
        planned = Pages.of(lengths, limits.output_tokens, SLOTS)
        reserved = Pages(planned.num_blocks, planned.max_batch_tokens, SLOTS)
        shared = Pages(planned.num_blocks, planned.max_batch_tokens, 3 * SLOTS)

        def static() -> None:
            for at in range(0, len(pile), SLOTS):
                run_batch(self.model, pile[at : at + SLOTS], limits)

        def paged(pages: Pages) -> Callable[[], None]:
            return lambda: run_continuous(self.model, pile, pages, limits, lambda _done: None)

        one, two, three = self._best(static, paged(reserved), paged(shared))
        yield ("continuous over static batches, speed", one / two, "ratio")
        yield ("paged over reserved cache of the same bytes, speed", two / three, "ratio")
        yield ("page", float(PAGE_TOKENS), "tokens")

    def batches(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Row]:
        """Compare ways of cutting a pile; few tokens are written, so that the prompts count."""
        lengths = [len(each) for each in pile]
        cost = measured_cost(self.model, pile, SLOTS, limits.output_tokens)

        def by(policy: Batching) -> Callable[[], None]:
            batches = POLICIES[policy](lengths, SLOTS, cost)
            return lambda: _run_all(
                self.model, [[pile[at] for at in batch] for batch in batches], limits
            )

        given, by_length, turbo = self._best(by("given"), by("sorted"), by("turbo"))
        yield ("sorted over given order, speed", given / by_length, "ratio")
        yield ("TurboTransformers over given order, speed", given / turbo, "ratio")
        yield ("TurboTransformers over sorted, speed", by_length / turbo, "ratio")

    def packed(self, pile: Sequence[Ids]) -> Iterator[Row]:
        """Compare reading the same prompts with padding and without."""
        padded, packed = self._best(
            lambda: run_batch(self.model, pile, Limits(1)),
            lambda: run_batch(self.model, pile, Limits(1), Setup(is_packed=True)),
        )
        yield ("padding-free over padded prefill, speed", padded / packed, "ratio")

    def guessed(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Row]:
        """Guess from the text so far; random weights repeat themselves, which makes it easy."""
        found = [guess_one(self.model, ids, Guesser(5), limits) for ids in pile]
        plain, guessed = self._best(
            lambda: [run_batch(self.model, [ids], limits) for ids in pile],
            lambda: [guess_one(self.model, ids, Guesser(5), limits) for ids in pile],
        )
        accepted = sum(each.accepted for each in found) / sum(each.drafted for each in found)
        yield ("prompt lookup over plain decoding, speed", plain / guessed, "ratio")
        yield ("prompt lookup, guesses that were right", accepted, "ratio")

    def caches(self, pile: Sequence[Ids]) -> Iterator[Row]:
        """Compare what the caches hold of the same tokens."""
        whole = _held(self.model, pile, "plain")
        for kind in KINDS:
            yield (
                f"plain over {kind} cache, bytes",
                whole / _held(self.model, pile, kind),
                "ratio",
            )

    def offloaded(self, pile: Sequence[Ids], limits: Limits) -> Iterator[Row]:
        """Compare weights that come from disk: by our layers and by accelerate's map.

        Both may hold the same bytes of weights: what stands around the layers and two of them,
        one that stays and one that comes and goes.
        """
        first = self.model.get_submodule("model.layers.0")
        layer_bytes = sum(tensor_bytes(each) for each in first.parameters())
        cap = model_bytes(self.model) - (SHAPE.num_hidden_layers - 2) * layer_bytes
        with tempfile.TemporaryDirectory(prefix="slipway-bench-") as place:
            folder = Path(place) / "model"
            self.model.save_pretrained(str(folder))
            skeleton = LayerwiseModel(folder, CPU, torch.float32)
            asked = LayerStreaming(layers_resident=1, look_ahead=False)
            ours = StreamedLayers(skeleton, folder, asked).model
            theirs, _where = mapped(folder, torch.float32, cap, Path(place))
            one_by_one, together, map_of_theirs = self._best(
                lambda: _run_all(ours, [[ids] for ids in pile], limits),
                lambda: run_batch(ours, pile, limits),
                lambda: run_batch(theirs, pile, limits),
            )
        yield ("streamed layers over accelerate's map, speed", map_of_theirs / together, "ratio")
        yield ("streamed for a batch over one by one, speed", one_by_one / together, "ratio")

    def _best(self, *runs: Callable[[], object]) -> list[float]:
        """Return the processor seconds of each run at its best."""
        taken: list[list[float]] = [[] for _ in runs]
        for _ in range(self.rounds):
            for run, seconds in zip(runs, taken, strict=True):
                began = time.process_time()
                run()
                seconds.append(time.process_time() - began)
        return [min(each) for each in taken]


@torch.inference_mode()
def _held(model: PreTrainedModel, pile: Sequence[Ids], kind: KvCache) -> int:
    cache, batch = new_cache(kind, model), Padded.of(pile, CPU)
    tokens = batch.step(model, batch.ids, cache)
    batch.step(model, tokens[:, None], cache)
    return cache_size(cache)


def _run_all(model: PreTrainedModel, batches: Sequence[Sequence[Ids]], limits: Limits) -> None:
    for batch in batches:
        run_batch(model, batch, limits)


if __name__ == "__main__":
    prepare_process()
    for row in rows():
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
