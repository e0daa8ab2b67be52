"""The generation job: prompts in, one output record for each, and the planned figures."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from transformers import PreTrainedModel

from runners.jobs.adapters import attach_adapters
from runners.jobs.energy import Work
from runners.jobs.events import Stages
from runners.jobs.generate.answering import (
    JOURNAL,
    GenerationRun,
    Journal,
    Prompt,
    Record,
    TextPrompt,
    answer_all,
    check_lengths,
    earlier_journals,
    notes_of,
    prompts_digest,
    publish_outputs,
    read_texts,
    remarks_of,
    tokenise_prompts,
)
from runners.jobs.generate.batching import DraftSource, check_draft
from runners.jobs.generate.chained import run_chain
from runners.jobs.generate.placement import PlacedModel, place_model
from runners.jobs.generate.stage_model import Chain, check_cache, run_rank
from runners.jobs.generate.static import AnswerLimits, StopRequestedError, check_packable
from runners.jobs.inputs import digest_of_model
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
    check_compiler,
    checkpoint_on_sigterm,
    end_by_sigterm,
    job_telemetry,
    num_threads,
)
from runners.jobspec import Attention, DraftModelSpeculation, GenerateSpec
from runners.jobspec.generate import PolicyOffload, StageChain

LOADING = "Loading the model"
GENERATING = "Answering the prompts"
STAGE_SHARES = {LOADING: 1.0, GENERATING: 9.0}


def work(job: Job) -> None:
    """GenerationRun one generation attempt."""
    checkpoint_on_sigterm(job)
    spec = job.spec_of(GenerateSpec)
    if spec.split is None:
        is_stopped = _answer(job, spec)
    elif isinstance(spec.split, StageChain):
        is_stopped = run_chain(job, spec, spec.split, partial(_answer, job, spec))
    else:
        is_stopped = run_rank(job, spec, partial(_answer, job, spec))
    if is_stopped:
        end_by_sigterm(job)


def _answer(job: Job, spec: GenerateSpec, opened: Callable[[], Chain] | None = None) -> bool:
    """Answer the prompts, by a chain if ``opened`` is given; return whether it was stopped."""
    if spec.compiled_step:
        check_compiler(job.scratch_dir(), "compiled_step")
    texts = read_texts(job, spec.prompts)
    if not isinstance(spec.offload, PolicyOffload):  # an offload policy quantises to 4 bits itself
        preload_library(spec.weight_dtype)
    with job_telemetry(job):
        run = _prepare(job, spec, texts, opened)
        num_before = len(run.journal.records)
        is_stopped = _answer_open(run)
        _publish(run, num_before)
    if run.chain:
        run.chain.finish(is_stopped=is_stopped)
    return is_stopped


def _prepare(
    job: Job,
    spec: GenerateSpec,
    texts: Sequence[TextPrompt],
    opened: Callable[[], Chain] | None,
) -> GenerationRun:
    stages = Stages(job.emitter, STAGE_SHARES)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    placed = _placed(job, spec, opened)
    loaded = placed.loaded
    attention = _attention(loaded.model, spec.attention)
    check_cache(spec.kv_cache, loaded.model)
    if spec.batching == "packed":
        check_packable(loaded.model)
    draft_source = _draft_source(job, spec, loaded)
    sizes = {"weights": placed.weight_bytes, "runtime_overhead": meter.read().start_bytes}
    adapters = attach_adapters(loaded.model, spec.model, spec.adapters, job.host_dir)
    if adapters is not None:
        sizes["adapters"] = adapters.bytes
    job.emitter.metric(terms_held(sizes))
    names = adapters.names if adapters else ()
    prompts = tokenise_prompts(job, loaded, spec.prompts, texts, names)
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    check_lengths(prompts, spec.output_tokens, positions)
    model = digest_of_model(spec.model, job.host_dir)
    journal = Journal(job.checkpoint_dir / JOURNAL, _digest(spec, prompts), model)
    journal.take_over(earlier_journals(job))
    if remark := journal.remark():
        job.emitter.log(remark)
    ends = end_ids(loaded) if spec.stop_at_end else frozenset()
    limits = AnswerLimits(spec.output_tokens, ends, job.stop_requested.is_set)
    run = GenerationRun(
        job, spec, placed, prompts, journal, limits, meter, stages, draft_source, adapters
    )
    run.notes |= {"attention": attention, **remarks_of(texts, loaded.model)}
    if names:
        run.notes["adapters"] = f"{', '.join(names)}: one batch holds prompts of all of them"
    if placed.where:
        run.notes["split" if placed.chain else "offload"] = placed.where
    return run


def _placed(job: Job, spec: GenerateSpec, opened: Callable[[], Chain] | None) -> PlacedModel:
    """Load the model as requested: on the device, partly offloaded, or divided."""
    if opened is not None:
        chain = opened()
        loaded = LoadedModel(chain.model, chain.tokenizer, chain.device)
        return PlacedModel(loaded, chain.where, chain.result_metrics, chain)
    if spec.offload:
        return place_model(job, spec)
    return PlacedModel(load_model(job, spec.model, spec.weight_dtype), "")


def _answer_open(run: GenerationRun) -> bool:
    """Answer the open prompts; return whether the job was stopped before the end."""
    run.stages.begin(GENERATING)
    run.stages.advance(len(run.journal.records) / len(run.prompts))
    if not run.open_positions:
        return False
    try:
        answer_all(run)
    except StopRequestedError:
        return True
    return False


def _publish(run: GenerationRun, num_before: int) -> None:
    """Publish the outputs, and the figures if every prompt is answered."""
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
    measured = run.figures.result_metrics(peak, run.placed.weight_bytes)
    run.job.emitter.result(
        {**measured, **run.placed.figures(), "prompts": float(len(records))},
        {**notes_of(peak, num_before), **run.notes, **_context(run.spec)},
        Work((GENERATING,), run.figures.output_tokens),
    )


def _draft_source(job: Job, spec: GenerateSpec, loaded: LoadedModel) -> DraftSource | None:
    speculation = spec.speculation
    if speculation is None:
        return None
    if not isinstance(speculation, DraftModelSpeculation):
        return DraftSource(speculation.tokens)
    draft = load_model(job, speculation.model, spec.weight_dtype)
    check_draft(loaded.tokenizer, draft.tokenizer)
    return DraftSource(speculation.tokens, draft.model)


def _attention(model: PreTrainedModel, requested: Attention) -> str:
    """Set the model's attention, and return its name in transformers.

    A model without fused attention keeps its own.
    """
    if requested == "eager":
        model.set_attn_implementation("eager")
    return str(model.config._attn_implementation)  # noqa: SLF001 - no public name


def _digest(spec: GenerateSpec, prompts: Sequence[Prompt]) -> str:
    """Return a digest of everything that determines the outputs."""
    decisive = {"model", "weight_dtype", "output_tokens", "stop_at_end", "kv_cache", "seed"}
    adapter_fields = {"adapters"} if spec.adapters else set()
    settings = spec.model_dump_json(include=decisive | adapter_fields)
    return hashlib.sha256(f"{settings}{prompts_digest(prompts)}".encode()).hexdigest()


def _context(spec: GenerateSpec) -> dict[str, str]:
    context = {"device": str(pick_device()), "threads": str(num_threads())}
    if isinstance(spec.offload, PolicyOffload):
        size = spec.offload.group_size
        if spec.weight_dtype == "int4":
            context["weight_dtype"] = (
                f"4 bit, a scale and an offset for {size} weights; lm_head and embedding bf16"
            )
    elif spec.weight_dtype in HOW_QUANTISED:
        context["weight_dtype"] = HOW_QUANTISED[spec.weight_dtype]
    return context
