"""One generation attempt: prompts in, a line of output for each, figures as planned."""

import hashlib
from collections.abc import Mapping, Sequence

from runners.jobs.generate.answering import Run, answer_all
from runners.jobs.generate.caches import check_cache
from runners.jobs.generate.figures import notes_of
from runners.jobs.generate.outputs import (
    JOURNAL,
    Journal,
    Record,
    earlier_journals,
    publish_outputs,
)
from runners.jobs.generate.packed import check_packable
from runners.jobs.generate.placement import held_bytes, place_model
from runners.jobs.generate.prompts import (
    Prompt,
    check_lengths,
    pile_digest,
    read_texts,
    tokenised,
)
from runners.jobs.generate.speculative import Guesser, check_draft
from runners.jobs.generate.static import Limits, StopRequestedError
from runners.jobs.loading import (
    HOW_QUANTISED,
    LoadedModel,
    end_ids,
    load_model,
    pick_device,
    preload_library,
)
from runners.jobs.memory import PeakMeter, terms_held
from runners.jobs.runtime import (
    Job,
    checkpoint_on_sigterm,
    end_by_sigterm,
    num_threads,
)
from runners.jobs.stages import Stages
from runners.jobs.telemetry import gpu_telemetry
from runners.jobspec import DraftGuess, GenerateSpec

LOADING = "Loading the model"
GENERATING = "Answering the prompts"
STAGE_SHARES = {LOADING: 1.0, GENERATING: 9.0}


def work(job: Job) -> None:
    """Run one generation attempt."""
    checkpoint_on_sigterm(job)
    spec = job.spec_of(GenerateSpec)
    texts = read_texts(job, spec.prompts)
    preload_library(spec.weight_dtype)
    with gpu_telemetry(job.emitter):
        run = _prepare(job, spec, texts)
        before = len(run.journal.records)
        is_stopped = _stopped(run)
        _publish(run, before)
    if is_stopped:
        end_by_sigterm(job)


def _prepare(job: Job, spec: GenerateSpec, texts: Sequence[tuple[str, str]]) -> Run:
    stages = Stages(job.emitter, STAGE_SHARES)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    placed = place_model(job, spec) if spec.offload else None
    loaded = placed.loaded if placed else load_model(job, spec.model, spec.weight_dtype)
    check_cache(spec.kv_cache, loaded.model)
    if spec.batching == "packed":
        check_packable(loaded.model)
    guesser = _guesser(job, spec, loaded)
    held = {"weights": held_bytes(loaded.model), "runtime_overhead": meter.read().start_bytes}
    job.emitter.metric(terms_held(held))
    prompts = tokenised(job, loaded, spec.prompts, texts)
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    check_lengths(prompts, spec.output_tokens, positions)
    journal = Journal(job.checkpoint_dir / JOURNAL, _digest(spec, prompts))
    journal.take_over(earlier_journals(job))
    ends = end_ids(loaded) if spec.stop_at_end else frozenset()
    limits = Limits(spec.output_tokens, ends, job.stop_requested.is_set)
    run = Run(job, spec, loaded, prompts, journal, limits, meter, stages, guesser)
    if placed:
        run.notes["offload"] = placed.where
        run.placing_figures = placed.figures
    return run


def _stopped(run: Run) -> bool:
    """Answer what is open; return whether the job was told to stop before the end."""
    run.stages.begin(GENERATING)
    run.stages.advance(len(run.journal.records) / len(run.prompts))
    if not run.open_positions:
        return False
    try:
        answer_all(run)
    except StopRequestedError:
        return True
    return False


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
    measured = run.figures.measured(peak, held_bytes(run.loaded.model))
    run.job.emitter.result(
        {**measured, **run.placing_figures(), "prompts": float(len(records))},
        {**notes_of(peak, before), **run.notes, **_context(run.spec)},
    )


def _guesser(job: Job, spec: GenerateSpec, loaded: LoadedModel) -> Guesser | None:
    """Return where guesses come from, None where nothing is guessed."""
    asked = spec.speculation
    if asked is None:
        return None
    if not isinstance(asked, DraftGuess):
        return Guesser(asked.tokens)
    draft = load_model(job, asked.model, spec.weight_dtype)
    check_draft(loaded.tokenizer, draft.tokenizer)
    return Guesser(asked.tokens, draft.model)


def _digest(spec: GenerateSpec, prompts: Sequence[Prompt]) -> str:
    """Return a digest of everything that decides what is written."""
    settings = spec.model_dump_json(
        include={"model", "weight_dtype", "output_tokens", "stop_at_end", "kv_cache", "seed"}
    )
    return hashlib.sha256(f"{settings}{pile_digest(prompts)}".encode()).hexdigest()


def _context(spec: GenerateSpec) -> dict[str, str]:
    context = {"device": str(pick_device()), "threads": str(num_threads())}
    if spec.weight_dtype in HOW_QUANTISED:
        context["weight_dtype"] = HOW_QUANTISED[spec.weight_dtype]
    return context
