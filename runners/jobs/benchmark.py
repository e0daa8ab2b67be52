"""Measure a model as planned: ``python -m runners.jobs.benchmark ATTEMPT_DIR``."""

from functools import partial

from runners.jobs.artefacts import publish_report
from runners.jobs.evaluation import (
    Assessment,
    Perplexity,
    Sampling,
    assess,
    evaluate,
    held_out_ids,
    perplexity_ratio,
)
from runners.jobs.events import Stages
from runners.jobs.generation import Workload
from runners.jobs.load.job import measure_under_load
from runners.jobs.loading import (
    HOW_QUANTISED,
    load_model,
    pick_device,
    preload_library,
    require_tokenizer,
    stored_quantisation,
)
from runners.jobs.memory import PeakMeter
from runners.jobs.model_files import opened_model
from runners.jobs.profiling import profile_model
from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import BadInputError, Job, num_threads, run_job
from runners.jobs.telemetry import job_telemetry
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel
from runners.jobspec.benchmark import MEASURING, OPERATORS_ARTEFACT, ProfileReport
from runners.jobspec.compress import QUANTISED_DTYPES

LOADING = "Loading the model"
PROFILING = "Profiling the operators"
ORIGINAL = "Evaluating the original"


def work(job: Job) -> None:
    """Run one benchmark attempt."""
    spec = job.spec_of(BenchmarkSpec)
    if spec.load is not None:
        measure_under_load(job, spec, spec.load)
        return
    preload_library(spec.weight_dtype)
    with job_telemetry(job):
        stages = Stages(job.emitter, _stage_shares(job, spec))
        assessment, profiled = run_isolated(job, partial(_assess, spec, stages))
        measured = assessment.measured()
        notes = {**assessment.notes(), **_context(spec)}
        if assessment.perplexity and _has_original(job, spec):
            original = run_isolated(job, partial(_original_perplexity, spec, stages))
            ratio, low, high = perplexity_ratio(assessment.perplexity, original)
            measured |= original.measured("original_")
            measured |= {
                "perplexity_ratio": ratio,
                "perplexity_ratio_low": low,
                "perplexity_ratio_high": high,
            }
            notes["perplexity_ratio"] = f"{spec.weight_dtype} / bf16, same windows pair by pair"
    if profiled is not None:
        publish_report(job, OPERATORS_ARTEFACT, profiled.model_dump(mode="json"))
    job.emitter.result(measured, notes)


def _stage_shares(job: Job, spec: BenchmarkSpec) -> dict[str, float]:
    profiling = {PROFILING: 1.0} if spec.profile else {}
    original = {ORIGINAL: 2.0} if _has_original(job, spec) else {}
    return {LOADING: 2.0, MEASURING: 5.0, **profiling, **original}


def _assess(
    spec: BenchmarkSpec, stages: Stages, job: Job
) -> tuple[Assessment, ProfileReport | None]:
    stages = stages.via(job.emitter)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    loaded = load_model(job, spec.model, spec.weight_dtype)
    if isinstance(spec.model, FolderModel | ArtefactModel):
        require_tokenizer(loaded, "perplexity")
    workload = Workload(spec.batch_size, spec.prompt_tokens, spec.output_tokens, spec.seed)
    stages.begin(MEASURING)
    sampling = Sampling(workload, spec.repetitions, spec.evaluation_tokens)
    assessment = assess(job, loaded, sampling, meter, stages)
    if not spec.profile:
        return assessment, None
    stages.begin(PROFILING)  # last: a profiled pass is slow and uses additional memory
    return assessment, profile_model(loaded.model, workload)


def _has_original(job: Job, spec: BenchmarkSpec) -> bool:
    """Return whether this run quantises a folder of plain weights."""
    if spec.weight_dtype not in QUANTISED_DTYPES or not isinstance(
        spec.model, FolderModel | ArtefactModel
    ):
        return False
    return stored_quantisation(opened_model(spec.model, job.host_dir)) is None


def _original_perplexity(spec: BenchmarkSpec, stages: Stages, job: Job) -> Perplexity:
    stages = stages.via(job.emitter)
    stages.begin(ORIGINAL)
    loaded = load_model(job, spec.model, "bf16")
    ids = held_out_ids(job, loaded)
    if ids is None:
        msg = "the model lost its tokenizer while the job ran; put tokenizer.json back"
        raise BadInputError(msg)
    return evaluate(loaded.model, ids, spec.evaluation_tokens, stages.advance)


def _context(spec: BenchmarkSpec) -> dict[str, str]:
    context = {"device": str(pick_device()), "threads": str(num_threads())}
    if spec.weight_dtype in QUANTISED_DTYPES:
        context["weight_dtype"] = HOW_QUANTISED[spec.weight_dtype]
    return context


if __name__ == "__main__":
    run_job("benchmark", work)
