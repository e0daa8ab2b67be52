"""Everything a result card says of one loaded model: perplexity, speed, memory, bytes."""

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
    """The figures of one model as it was loaded."""

    perplexity: Perplexity | None  # None: random weights, whose text means nothing
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
        """Return in words how the figures were taken."""
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


def repetition_speeds(workload: Workload, repetition: Repetition) -> dict[str, float]:
    """Return one repetition's speeds as the live charts name them."""
    prompt = workload.batch_size * workload.prompt_tokens
    values = {"prefill_tokens_per_second": prompt / repetition.prefill_seconds}
    if repetition.step_seconds:
        mean = repetition.mean_step_seconds
        values["decode_tokens_per_second"] = workload.batch_size / mean
        values["step_seconds"] = mean
    return values


def held_out_ids(job: Job, loaded: LoadedModel, corpus: Corpus | None = None) -> TokenIds | None:
    """Return the held-out text in the model's own tokens, None when it knows no text."""
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
) -> Assessment:
    """Measure speed, peak memory and, for a model that knows text, perplexity.

    The peak is read before perplexity, whose windows of logits are no part of serving.
    """

    def chart(done: int, repetition: Repetition) -> None:
        job.emitter.metric(repetition_speeds(sampling.workload, repetition), step=done)
        stages.advance(SPEED_SHARE * done / sampling.repetitions)

    held = {"weights": model_bytes(loaded.model), "runtime_overhead": meter.read().start_bytes}
    job.emitter.metric(terms_held(held))
    speed = measure_speed(loaded.model, sampling.workload, sampling.repetitions, chart)
    job.emitter.metric(terms_held({"kv_cache": speed.kv_cache_bytes}))
    peak = meter.read()
    perplexity = None
    if (ids := held_out_ids(job, loaded)) is not None:
        perplexity = evaluate(
            loaded.model,
            ids,
            sampling.evaluation_tokens,
            lambda fraction: stages.advance(SPEED_SHARE + (1.0 - SPEED_SHARE) * fraction),
        )
        job.emitter.metric({"perplexity": perplexity.value})
    matrices = quantised_matrices(loaded.model)
    return Assessment(
        perplexity,
        speed,
        peak,
        parameter_bytes=model_bytes(loaded.model),
        matrices_bytes=sum(tensor_bytes(each) for each in matrices.values()),
    )
