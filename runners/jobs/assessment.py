"""Measures one loaded model: perplexity, speed, peak memory, weight bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from runners.jobs.corpus import Corpus, load_corpus
from runners.jobs.evaluation import Perplexity, evaluate
from runners.jobs.generation import Repetition, Speed, Workload, measure_speed
from runners.jobs.loading import LoadedModel, quantised_matrices
from runners.jobs.memory import Peak, PeakMeter, model_bytes, tensor_bytes, terms_held
from runners.jobs.runtime import Job
from runners.jobs.stages import Stages
from runners.jobs.tokenizer import TokenIds, tokenized

SPEED_SHARE = 0.5  # of an assessment's time; the rest goes to perplexity


@dataclass(frozen=True)
class Assessment:
    """The measurements of one loaded model."""

    perplexity: Perplexity | None  # None: random weights
    speed: Speed
    peak: Peak
    parameter_bytes: int
    matrices_bytes: int

    def measured(self, prefix: str = "") -> dict[str, float]:
        """Return the figures under the names of a job's result."""
        memory = {
            "peak_memory_bytes": self.peak.bytes,
            "runtime_memory_bytes": self.peak.start_bytes,
            "parameter_bytes": self.parameter_bytes,
            "matrices_bytes": self.matrices_bytes,
            "model_and_cache_bytes": self.parameter_bytes + self.speed.kv_cache_bytes,
        }
        quality = self.perplexity.measured(prefix) if self.perplexity else {}
        named = {f"{prefix}{name}": float(value) for name, value in memory.items()}
        return {**named, **quality, **self.speed.measured(prefix)}

    def notes(self) -> dict[str, str]:
        """Return texts that describe how the figures were measured."""
        notes = {
            "peak_memory_bytes": self.peak.how,
            "runtime_memory_bytes": "held before the model was loaded: interpreter and libraries",
            "parameter_bytes": "all weights and buffers as held, scales included",
            "matrices_bytes": "linear layers without lm_head, scales included",
            "model_and_cache_bytes": "parameter_bytes plus the keys and values of one run",
            "speed": self.speed.note(),
        }
        if self.perplexity:
            notes["perplexity"] = self.perplexity.note()
        return notes


@dataclass(frozen=True)
class Sampling:
    """How much of each measurement an assessment takes."""

    workload: Workload
    repetitions: int
    evaluation_tokens: int


def repetition_speeds(
    workload: Workload, repetition: Repetition, prefix: str = ""
) -> dict[str, float]:
    """Return one repetition's speeds under the names of the live charts."""
    prompt = workload.batch_size * workload.prompt_tokens
    values = {"prefill_tokens_per_second": prompt / repetition.prefill_seconds}
    if repetition.step_seconds:
        mean = repetition.mean_step_seconds
        values["decode_tokens_per_second"] = workload.batch_size / mean
        values["step_seconds"] = mean
    return {f"{prefix}{name}": value for name, value in values.items()}


def held_out_ids(job: Job, loaded: LoadedModel, corpus: Corpus | None = None) -> TokenIds | None:
    """Return the held-out text in the model's tokens, or None without tokenizer."""
    return None if loaded.tokenizer is None else text_ids(job, loaded.tokenizer, corpus)


def text_ids(
    job: Job, tokenizer: PreTrainedTokenizerFast, corpus: Corpus | None = None
) -> TokenIds:
    """Return the held-out text in a tokenizer's tokens."""
    corpus = corpus or load_corpus()
    return tokenized(tokenizer, corpus.held_out, f"{corpus.digest}/held-out", job.cache_dir)


def assess(
    job: Job,
    loaded: LoadedModel,
    sampling: Sampling,
    meter: PeakMeter,
    stages: Stages,
    prefix: str = "",
) -> Assessment:
    """Measure speed, peak memory and, for a model with tokenizer, perplexity.

    ``prefix`` is prepended to metric names, so that two models of a job have separate charts.
    The peak is read before perplexity, whose logits are not part of serving.
    """

    def report_held(held: Mapping[str, int]) -> None:
        terms = terms_held(held)
        job.emitter.metric({f"{prefix}{name}": size for name, size in terms.items()})

    def chart(done: int, repetition: Repetition) -> None:
        speeds = repetition_speeds(sampling.workload, repetition, prefix)
        memory = {f"{prefix}peak_memory_bytes": float(meter.read().bytes)}
        job.emitter.metric(speeds | memory, step=done)
        stages.advance(SPEED_SHARE * done / sampling.repetitions)

    report_held(
        {"weights": model_bytes(loaded.model), "runtime_overhead": meter.read().start_bytes}
    )
    speed = measure_speed(loaded.model, sampling.workload, sampling.repetitions, chart)
    report_held({"kv_cache": speed.kv_cache_bytes})
    peak = meter.read()
    perplexity = None
    if (ids := held_out_ids(job, loaded)) is not None:
        perplexity = evaluate(
            loaded.model,
            ids,
            sampling.evaluation_tokens,
            lambda fraction: stages.advance(SPEED_SHARE + (1.0 - SPEED_SHARE) * fraction),
        )
        job.emitter.metric({f"{prefix}perplexity": perplexity.value})
    matrices = quantised_matrices(loaded.model)
    return Assessment(
        perplexity,
        speed,
        peak,
        parameter_bytes=model_bytes(loaded.model),
        matrices_bytes=sum(tensor_bytes(each) for each in matrices.values()),
    )
