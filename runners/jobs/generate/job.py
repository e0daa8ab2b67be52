"""One generation attempt: prompts in, a line of output for each, figures as planned."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runners.jobs.generate.batching import POLICIES, Batch, CostModel, padding_ratio
from runners.jobs.generate.figures import Figures, notes_of
from runners.jobs.generate.outputs import (
    JOURNAL,
    Journal,
    Record,
    earlier_journals,
    publish_outputs,
)
from runners.jobs.generate.prompts import (
    Prompt,
    check_lengths,
    pile_digest,
    read_texts,
    tokenised,
)
from runners.jobs.generate.static import Answer, Limits, StopRequestedError, run_batch
from runners.jobs.generate.warmup import measured_cost, warm_up
from runners.jobs.loading import (
    HOW_QUANTISED,
    LoadedModel,
    load_model,
    pick_device,
    preload_library,
)
from runners.jobs.memory import PeakMeter, model_bytes, terms_held
from runners.jobs.runtime import (
    BadInputError,
    Job,
    checkpoint_on_sigterm,
    end_by_sigterm,
    num_threads,
)
from runners.jobs.stages import Stages
from runners.jobs.telemetry import gpu_telemetry
from runners.jobspec import GenerateSpec

LOADING = "Loading the model"
GENERATING = "Answering the prompts"
STAGE_SHARES = {LOADING: 1.0, GENERATING: 9.0}


@dataclass
class Run:
    """Everything that an attempt works with once the model stands."""

    job: Job
    spec: GenerateSpec
    loaded: LoadedModel
    prompts: list[Prompt]
    journal: Journal
    limits: Limits
    meter: PeakMeter
    stages: Stages
    figures: Figures = field(default_factory=Figures)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def open_positions(self) -> list[int]:
        """Return the positions of the prompts that have no answer yet."""
        return [at for at in range(len(self.prompts)) if at not in self.journal.records]

    def keep(self, batch: Batch, answers: Sequence[Answer]) -> None:
        """Write a batch's answers down and say how far the pile is."""
        pairs = zip(batch, answers, strict=True)
        self.journal.add({at: record_of(self, at, answer) for at, answer in pairs})
        self.stages.advance(len(self.journal.records) / len(self.prompts))


def work(job: Job) -> None:
    """Run one generation attempt."""
    checkpoint_on_sigterm(job)
    spec = job.spec
    if not isinstance(spec, GenerateSpec):
        msg = f"kind '{spec.kind}' is not 'generate'"
        raise BadInputError(msg)
    texts = read_texts(job, spec.prompts)
    preload_library(spec.weight_dtype)
    with gpu_telemetry(job.emitter):
        run = _prepare(job, spec, texts)
        before = len(run.journal.records)
        is_stopped = _stopped(run)
        _publish(run, before)
    if is_stopped:
        end_by_sigterm(job)


def record_of(run: Run, at: int, answer: Answer) -> Record:
    """Return the line of the outputs for one answered prompt."""
    prompt, tokenizer = run.prompts[at], run.loaded.tokenizer
    record: Record = {"id": prompt.name, "prompt": prompt.text}
    if tokenizer is None:
        record["output_ids"] = answer.ids
    else:
        record["text"] = tokenizer.decode(answer.ids)
    return record | {
        "prompt_tokens": len(prompt.ids),
        "output_tokens": len(answer.ids),
        "finish_reason": answer.finish_reason,
    }


def _prepare(job: Job, spec: GenerateSpec, texts: Sequence[tuple[str, str]]) -> Run:
    stages = Stages(job.emitter, STAGE_SHARES)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    loaded = load_model(job, spec.model, spec.weight_dtype)
    held = {"weights": model_bytes(loaded.model), "runtime_overhead": meter.read().start_bytes}
    job.emitter.metric(terms_held(held))
    prompts = tokenised(job, loaded, spec.prompts, texts)
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    check_lengths(prompts, spec.output_tokens, positions)
    journal = Journal(job.checkpoint_dir / JOURNAL, _digest(spec, prompts))
    journal.take_over(earlier_journals(job))
    ends = _end_ids(loaded) if spec.stop_at_end else frozenset()
    limits = Limits(spec.output_tokens, ends, job.stop_requested.is_set)
    return Run(job, spec, loaded, prompts, journal, limits, meter, stages)


def _stopped(run: Run) -> bool:
    """Answer what is open; return whether the job was told to stop before the end."""
    run.stages.begin(GENERATING)
    run.stages.advance(len(run.journal.records) / len(run.prompts))
    if not run.open_positions:
        return False
    try:
        _answer_in_batches(run)
    except StopRequestedError:
        return True
    return False


def _answer_in_batches(run: Run) -> None:
    model, spec = run.loaded.model, run.spec
    at = run.open_positions
    open_ids = [run.prompts[each].ids for each in at]
    lengths = [len(each) for each in open_ids]
    warm_up(model, open_ids)
    cost = CostModel(0.0, 1.0)
    if spec.batching == "turbo":
        cost = measured_cost(model, open_ids, spec.batch_size, spec.output_tokens)
        run.notes["batching_cost"] = (
            f"{cost.fixed_seconds:.3g} s a batch + {cost.seconds_per_token:.3g} s a padded "
            "token, measured before the first batch"
        )
    batches = POLICIES[spec.batching](lengths, spec.batch_size, cost)
    run.notes["batching"] = (
        f"{spec.batching}: {len(batches)} batches of at most {spec.batch_size}, "
        f"{padding_ratio(batches, lengths):.1%} of the padded prompts is padding"
    )
    for batch in batches:
        _answer(run, [at[each] for each in batch])


def _answer(run: Run, batch: Batch) -> None:
    if run.limits.should_stop():
        raise StopRequestedError
    ids = [run.prompts[at].ids for at in batch]
    done = run_batch(run.loaded.model, ids, run.limits)
    speeds = run.figures.add(done, sum(map(len, ids)))
    run.keep(batch, done.answers)
    run.job.emitter.metric(speeds, step=len(run.journal.records))


def _publish(run: Run, before: int) -> None:
    """Leave the outputs; the figures only where the pile is done."""
    records: Mapping[int, Record] = run.journal.records
    facts = {
        "prompts": len(run.prompts),
        "answered": len(records),
        "output_tokens": sum(int(each["output_tokens"]) for each in records.values()),
    }
    publish_outputs(run.job, records, facts)
    peak = run.meter.read()
    if len(records) < len(run.prompts):
        return
    run.job.emitter.metric(terms_held({"kv_cache": run.figures.kv_cache_bytes}))
    measured = run.figures.measured(peak, model_bytes(run.loaded.model))
    run.job.emitter.result(
        measured | {"prompts": float(len(records))},
        {**notes_of(peak, before), **run.notes, **_context(run.spec)},
    )


def _end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens that end an answer: the model's own, and its tokenizer's."""
    found = getattr(loaded.model.generation_config, "eos_token_id", None)
    ids = set(found if isinstance(found, list) else [found])
    if loaded.tokenizer is not None:
        ids.add(loaded.tokenizer.eos_token_id)
    return frozenset(each for each in ids if isinstance(each, int))


def _digest(spec: GenerateSpec, prompts: Sequence[Prompt]) -> str:
    """Return a digest of everything that decides what is written."""
    settings = spec.model_dump_json(
        include={"model", "weight_dtype", "output_tokens", "stop_at_end", "seed"}
    )
    return hashlib.sha256(f"{settings}{pile_digest(prompts)}".encode()).hexdigest()


def _context(spec: GenerateSpec) -> dict[str, str]:
    context = {"device": str(pick_device()), "threads": str(num_threads())}
    if spec.weight_dtype in HOW_QUANTISED:
        context["weight_dtype"] = HOW_QUANTISED[spec.weight_dtype]
    return context
