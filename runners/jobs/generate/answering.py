"""Answering of the open prompts: in padded or packed batches, continuously, or one by one."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from runners.jobs.adapter_files import MixedAdapters
from runners.jobs.events import Stages
from runners.jobs.generate.batching import (
    POLICIES,
    STEPS,
    Batch,
    CostModel,
    measured_cost,
    padding_ratio,
    warm_up,
)
from runners.jobs.generate.compiled import CompiledStep
from runners.jobs.generate.continuous import Finished, Pages, run_continuous
from runners.jobs.generate.outputs import Figures, Journal, Record
from runners.jobs.generate.placement import Placed
from runners.jobs.generate.prompts import Prompt
from runners.jobs.generate.speculative import Guesser, guess_one
from runners.jobs.generate.stage_model import Chain
from runners.jobs.generate.static import (
    Answer,
    BatchRun,
    Ids,
    Limits,
    Setup,
    StopRequestedError,
    run_batch,
)
from runners.jobs.loading import LoadedModel
from runners.jobs.memory import PeakMeter
from runners.jobs.runtime import Job
from runners.jobspec import GenerateSpec
from runners.jobspec.serve import NO_ADAPTER

Answering = Callable[[Sequence[Ids]], BatchRun]
NO_COST = CostModel(0.0, 1.0)  # for policies without a cost model
WARM_UP_TOKENS = 4  # a CUDA graph is run once, recorded, then replayed


@dataclass
class Run:
    """The state of an attempt once the model is loaded."""

    job: Job
    spec: GenerateSpec
    placed: Placed
    prompts: list[Prompt]
    journal: Journal
    limits: Limits
    meter: PeakMeter
    stages: Stages
    guesser: Guesser | None = None
    adapters: MixedAdapters | None = None
    figures: Figures = field(default_factory=Figures)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def loaded(self) -> LoadedModel:
        """Return the model, or this process's part of it."""
        return self.placed.loaded

    @property
    def chain(self) -> Chain | None:
        """Return the chain that computes a divided model, if any."""
        return self.placed.chain

    @property
    def setup(self) -> Setup:
        """Return the batch settings."""
        is_packed = self.spec.batching == "packed"
        return Setup(self.spec.kv_cache, is_packed=is_packed, chain=self.chain)

    def through_adapters(self, batch: Sequence[int]) -> AbstractContextManager[None]:
        """Use each row's own adapter within the block."""
        if self.adapters is None:
            return nullcontext()
        owners = [[self.prompts[at].adapter] for at in batch]
        return self.adapters.serving(torch.tensor(owners))

    @property
    def open_positions(self) -> list[int]:
        """Return the positions of the prompts without an answer."""
        return [at for at in range(len(self.prompts)) if at not in self.journal.records]

    def keep(self, answers: Mapping[int, Answer], speeds: Mapping[str, float]) -> None:
        """Store answers by position, and report progress and speeds."""
        self.journal.add({at: record_of(self, at, each) for at, each in answers.items()})
        self.stages.advance(len(self.journal.records) / len(self.prompts))
        memory = {"peak_memory_bytes": float(self.meter.read().bytes)}
        self.job.emitter.metric({**speeds, **memory}, step=len(self.journal.records))

    def check_stop(self) -> None:
        """Raise StopRequestedError if the job was asked to stop."""
        if self.limits.should_stop():
            raise StopRequestedError


def record_of(run: Run, at: int, answer: Answer) -> Record:
    """Return the output record of an answered prompt."""
    prompt, tokenizer = run.prompts[at], run.loaded.tokenizer
    record: Record = {"id": prompt.name, "prompt": prompt.text}
    if tokenizer is None:
        record["output_ids"] = answer.ids
    else:
        record["text"] = tokenizer.decode(answer.ids)
    if run.adapters is not None:
        adapter = prompt.adapter
        record["adapter"] = None if adapter == NO_ADAPTER else run.adapters.names[adapter]
    return record | {
        "prompt_tokens": len(prompt.ids),
        "output_tokens": len(answer.ids),
        "finish_reason": answer.finish_reason,
    }


def answer_all(run: Run) -> None:
    """Answer every open prompt.

    Raises:
        StopRequestedError: the job is to stop; finished answers are stored.
    """
    positions = run.open_positions
    _warm_up(run, [run.prompts[at].ids for at in positions])
    if run.guesser is not None:
        _one_by_one(run, positions, run.guesser)
    elif run.spec.batching == "continuous":
        _continuously(run, positions)
    else:
        _in_batches(run, positions)


def _warm_up(run: Run, prompts: Sequence[Ids]) -> None:
    """Run the shortest prompt; an offload policy's figures start afterwards."""
    engine = run.placed.zigzag
    if engine is None:
        warm_up(run.loaded.model, prompts, Setup(chain=run.chain))
        return
    engine.run_batch([min(prompts, key=len)], Limits(STEPS))
    engine.figures.begin()


def _in_batches(run: Run, positions: Sequence[int]) -> None:
    lengths = [len(run.prompts[at].ids) for at in positions]
    policy = run.spec.batching
    cost = _measured_cost(run, positions) if policy == "turbo" else NO_COST
    batches = POLICIES[policy](lengths, run.spec.batch_size, cost)
    padding = 0.0 if policy == "packed" else padding_ratio(batches, lengths)
    run.notes["batching"] = (
        f"{policy}: {len(batches)} batches of at most {run.spec.batch_size}, "
        f"{padding:.1%} of the prompts' tokens are padding"
    )
    answer_batch = _compiled(run, positions) if run.spec.compiled_step else _as_set_up(run)
    for batch in batches:
        run.check_stop()
        _one_batch(run, [positions[at] for at in batch], answer_batch)


def _as_set_up(run: Run) -> Answering:
    if zigzag := run.placed.zigzag:
        return lambda ids: zigzag.run_batch(ids, run.limits)
    return lambda ids: run_batch(run.loaded.model, ids, run.limits, run.setup)


def _compiled(run: Run, positions: Sequence[int]) -> Answering:
    """Return a function that answers batches with a compiled step, compiled before any timing."""
    longest = max(len(run.prompts[at].ids) for at in positions)
    began = time.perf_counter()
    length = longest + run.spec.output_tokens
    step = CompiledStep(run.loaded.model, run.spec.batch_size, length)
    warm_up = max(2, min(WARM_UP_TOKENS, run.spec.output_tokens))
    step.run_batch([run.prompts[positions[0]].ids], Limits(warm_up))
    if step.plain_reason:
        run.notes["compiled_step"] = f"not compiled, run plainly: {step.plain_reason}"
        run.job.emitter.log(f"the decode step is {run.notes['compiled_step']}")
        return lambda ids: step.run_batch(ids, run.limits)
    run.notes["compiled_step"] = (
        f"compiled for {run.spec.batch_size} prompts of {length} tokens in "
        f"{time.perf_counter() - began:.0f} s before the first batch"
    )
    return lambda ids: step.run_batch(ids, run.limits)


def _one_batch(run: Run, batch: Batch, answer_batch: Answering) -> None:
    ids = [run.prompts[at].ids for at in batch]
    with run.through_adapters(batch):
        done = answer_batch(ids)
    speeds = run.figures.add_batch(done, sum(map(len, ids)))
    run.keep(dict(zip(batch, done.answers, strict=True)), speeds)


def _measured_cost(run: Run, positions: Sequence[int]) -> CostModel:
    ids = [run.prompts[at].ids for at in positions]
    setup, spec = Setup(chain=run.chain), run.spec
    cost = measured_cost(run.loaded.model, ids, spec.batch_size, spec.output_tokens, setup)
    run.notes["batching_cost"] = (
        f"{cost.fixed_seconds:.3g} s a batch + {cost.seconds_per_token:.3g} s a padded token, "
        "measured before the first batch"
    )
    return cost


def _continuously(run: Run, positions: Sequence[int]) -> None:
    ids = [run.prompts[at].ids for at in positions]
    pages = Pages.of([len(each) for each in ids], run.spec.output_tokens, run.spec.batch_size)
    run.figures.kv_cache_bytes = pages.bytes(run.loaded.model)
    run.notes["batching"] = (
        f"continuous: at most {pages.max_requests} prompts at once over {pages.num_blocks} "
        f"pages, at most {pages.max_batch_tokens} tokens a step"
    )
    began = time.perf_counter()

    def keep(done: Finished) -> None:
        at, count = positions[done.at], len(done.answer.ids)
        figures = run.figures
        figures.add_one(len(ids[done.at]), count, done.first_seconds, done.later_seconds)
        figures.wall_seconds = time.perf_counter() - began
        run.keep({at: done.answer}, {"tokens_per_second": figures.tokens_per_second})

    run_continuous(run.loaded.model, ids, pages, run.limits, keep)


def _one_by_one(run: Run, positions: Sequence[int], guesser: Guesser) -> None:
    figures = run.figures
    for at in positions:
        run.check_stop()
        ids = run.prompts[at].ids
        with run.through_adapters([at]):
            done = guess_one(run.loaded.model, ids, guesser, run.limits)
        figures.add_one(len(ids), len(done.answer.ids), done.first_seconds, done.later_seconds)
        figures.wall_seconds += done.first_seconds + done.later_seconds
        figures.drafted_tokens += done.drafted
        figures.accepted_tokens += done.accepted
        speeds = {"tokens_per_second": figures.tokens_per_second}
        if figures.drafted_tokens:
            speeds["acceptance_ratio"] = figures.accepted_tokens / figures.drafted_tokens
        run.keep({at: done.answer}, speeds)
