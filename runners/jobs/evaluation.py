"""Perplexity and speed of a loaded model, with confidence intervals."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from runners.jobs.corpus import Corpus, TokenIds, load_corpus, tokenize_documents
from runners.jobs.events import Stages
from runners.jobs.loading import LoadedModel, quantised_matrices
from runners.jobs.memory import Peak, PeakMeter, cache_bytes, model_bytes, tensor_bytes, terms_held
from runners.jobs.runtime import Job
from runners.jobspec.compress import window_of

# Measures prefill and decode speed separately with a custom greedy loop.


WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Workload:
    """The workload of one repetition."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclass(frozen=True)
class Repetition:
    """One measured prefill and the decode steps after it."""

    prefill_seconds: float
    step_seconds: tuple[float, ...]

    @property
    def mean_step_seconds(self) -> float:
        """Return the mean seconds between two output tokens, 0 for a single token."""
        return statistics.fmean(self.step_seconds) if self.step_seconds else 0.0


@dataclass
class Speed:
    """Repetitions of one workload; every figure is a median over them."""

    workload: Workload
    repetitions: list[Repetition] = field(default_factory=list)
    kv_cache_bytes: int = 0

    @property
    def ttft_seconds(self) -> float:
        """Return the seconds to the first token."""
        return statistics.median(each.prefill_seconds for each in self.repetitions)

    @property
    def tpot_seconds(self) -> float:
        """Return the seconds per further output token of one request."""
        return statistics.median(each.mean_step_seconds for each in self.repetitions)

    def result_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the figures under the names of a job's result; speeds are of the whole batch."""
        load = self.workload
        figures = {
            "ttft_seconds": self.ttft_seconds,
            "prefill_tokens_per_second": load.batch_size * load.prompt_tokens / self.ttft_seconds,
            "kv_cache_bytes": float(self.kv_cache_bytes),
        }
        if self.tpot_seconds:
            figures["tpot_seconds"] = self.tpot_seconds
            figures["decode_tokens_per_second"] = load.batch_size / self.tpot_seconds
        return {f"{prefix}{name}": value for name, value in figures.items()}

    def note(self) -> str:
        """Return a text on how the figures were measured."""
        load = self.workload
        return (
            f"median of {len(self.repetitions)} repetitions after a warm-up: batch "
            f"{load.batch_size}, {load.prompt_tokens} prompt tokens, "
            f"{load.output_tokens} output tokens"
        )


def measure_speed(
    model: PreTrainedModel,
    workload: Workload,
    repetitions: int,
    on_repetition: Callable[[int, Repetition], None] | None = None,
) -> Speed:
    """Return the speed of ``repetitions`` greedy generations after a short warm-up."""
    prompt = random_prompt(model, workload)
    _generate(model, prompt, min(WARM_UP_TOKENS, workload.output_tokens))
    speed = Speed(workload)
    for index in range(repetitions):
        repetition, cache = _generate(model, prompt, workload.output_tokens)
        speed.repetitions.append(repetition)
        speed.kv_cache_bytes = cache_bytes(cache)
        if on_repetition:
            on_repetition(index + 1, repetition)
    return speed


def random_prompt(model: PreTrainedModel, workload: Workload) -> torch.Tensor:
    """Return token ids [batch_size, prompt_tokens]: speed does not depend on their meaning."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch_size, workload.prompt_tokens)
    vocab_size = int(model.config.vocab_size)
    return torch.randint(0, vocab_size, shape, generator=generator).to(_device(model))


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, prompt: torch.Tensor, output_tokens: int
) -> tuple[Repetition, Cache]:
    """Generate ``output_tokens``; the first is the prefill's."""
    cache = DynamicCache(config=model.config)
    began = _now(prompt.device)
    token = next_token(model, prompt, cache)
    ended = _now(prompt.device)
    prefill_seconds = ended - began
    steps: list[float] = []
    for _ in range(output_tokens - 1):
        token = next_token(model, token, cache)
        began, ended = ended, _now(prompt.device)
        steps.append(ended - began)
    return Repetition(prefill_seconds, tuple(steps)), cache


def next_token(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Return the likeliest token after ``ids`` and add their keys and values to the cache."""
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token: torch.Tensor = output.logits[:, -1:].argmax(dim=-1)
    return token


def _now(device: torch.device) -> float:
    synchronise_device(device)
    return time.perf_counter()


def synchronise_device(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


LOGITS_BUDGET_BYTES = 16 * 2**20  # in fp32: the evaluation must not determine a job's peak memory
Z_95 = 1.96  # two-sided 95 % quantile of the normal distribution

OWN_TEXT = "held-out tokens of this host's text"

Nlls = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood per token, in nats, over equal segments."""

    segment_nlls: Nlls
    tokens: int
    window: int
    text: str = OWN_TEXT

    @property
    def value(self) -> float:
        """Return the perplexity."""
        return math.exp(float(self.segment_nlls.mean()))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval, with segments (not tokens) taken as independent."""
        mean, error = mean_and_error(self.segment_nlls)
        return math.exp(mean - Z_95 * error), math.exp(mean + Z_95 * error)

    def result_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the figures under the names of a job's result."""
        low, high = self.interval
        return {
            f"{prefix}perplexity": self.value,
            f"{prefix}perplexity_low": low,
            f"{prefix}perplexity_high": high,
        }

    def note(self) -> str:
        """Return a text on how the figure was measured."""
        return (
            f"{self.tokens} {self.text} in {len(self.segment_nlls)} "
            f"windows of {self.window}; 95 % interval over windows"
        )


def perplexity_ratio(after: Perplexity, before: Perplexity) -> tuple[float, float, float]:
    """Return after / before with its 95 % interval, paired over the same windows.

    Pairing cancels the difficulty of the text, so the ratio is more precise than either value.
    """
    mean, error = mean_and_error(after.segment_nlls - before.segment_nlls)
    return math.exp(mean), math.exp(mean - Z_95 * error), math.exp(mean + Z_95 * error)


def evaluate(
    model: PreTrainedModel,
    ids: TokenIds,
    num_tokens: int,
    on_progress: Callable[[float], None] | None = None,
) -> Perplexity:
    """Return the model's perplexity on about ``num_tokens`` tokens spread evenly over ``ids``.

    Every scored token has at least half a window of context. For all tokens of the stream this is
    the usual sliding window with a stride of half its length.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    windows = windows_of(model.config, ids, num_tokens)
    stride, count = windows.stride, len(windows.ids)
    per_batch = max(1, LOGITS_BUDGET_BYTES // (4 * stride * int(model.config.vocab_size)))
    was_training = model.training
    torch.nn.Module.eval(model)
    parts: list[Nlls] = []
    for begin in range(0, count, per_batch):
        batch = torch.from_numpy(windows.ids[begin : begin + per_batch])
        parts.append(_segment_nlls(model, batch, stride))
        if on_progress:
            on_progress(min(1.0, (begin + per_batch) / count))
    torch.nn.Module.train(model, was_training)
    return Perplexity(np.concatenate(parts), count * stride, windows.length)


@dataclass(frozen=True)
class Windows:
    """Windows of text [count, length]; the last ``stride`` tokens of each are scored."""

    ids: npt.NDArray[np.int64]
    stride: int
    text: str = OWN_TEXT

    @property
    def length(self) -> int:
        """Return the tokens per window."""
        return int(self.ids.shape[1])


def windows_of(config: PretrainedConfig, ids: TokenIds, num_tokens: int) -> Windows:
    """Return the windows to evaluate a model on about ``num_tokens`` tokens.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    length, stride = window_of(min(int(config.max_position_embeddings), len(ids)))
    starts = segment_starts(len(ids), length, stride, num_tokens)
    return Windows(np.stack([ids[at : at + length] for at in starts]).astype(np.int64), stride)


def segment_starts(length: int, window: int, stride: int, num_tokens: int) -> list[int]:
    """Return the windows' start positions, with scored halves that do not overlap."""
    available = (length - window) // stride + 1
    if stride < 1 or available < 1:
        msg = f"{length} held-out tokens are fewer than one window of {window}"
        raise ValueError(msg)
    count = min(available, max(1, num_tokens // stride))
    return [(index * available // count) * stride for index in range(count)]


@torch.inference_mode()
def _segment_nlls(model: PreTrainedModel, batch: torch.Tensor, stride: int) -> Nlls:
    batch = batch.to(next(model.parameters()).device)
    logits = model(input_ids=batch, use_cache=False, logits_to_keep=stride + 1).logits
    means: Nlls = token_nlls(logits, batch, stride).mean(dim=1).numpy()
    return means


def token_nlls(logits: torch.Tensor, batch: torch.Tensor, stride: int) -> torch.Tensor:
    """Return each scored token's negative log-likelihood in nats [windows, stride], on the CPU.

    ``logits`` are those of the last ``stride`` + 1 positions.
    """
    targets = batch[:, -stride:].to(logits.device)
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    return nll.view(targets.shape).double().cpu()


def mean_and_error(values: Nlls) -> tuple[float, float]:
    """Return the mean over windows and its standard error, 0 for a single window."""
    if len(values) == 1:
        return float(values[0]), 0.0
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


# Measures one loaded model: perplexity, speed, peak memory, weight bytes.


SPEED_SHARE = 0.5  # of an assessment's time; the rest goes to perplexity


@dataclass(frozen=True)
class Assessment:
    """The measurements of one loaded model."""

    perplexity: Perplexity | None  # None: random weights
    speed: Speed
    peak: Peak
    parameter_bytes: int
    matrices_bytes: int

    def result_metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the figures under the names of a job's result."""
        memory = {
            "peak_memory_bytes": self.peak.bytes,
            "runtime_memory_bytes": self.peak.start_bytes,
            "parameter_bytes": self.parameter_bytes,
            "matrices_bytes": self.matrices_bytes,
            "model_and_cache_bytes": self.parameter_bytes + self.speed.kv_cache_bytes,
        }
        quality = self.perplexity.result_metrics(prefix) if self.perplexity else {}
        named = {f"{prefix}{name}": float(value) for name, value in memory.items()}
        return {**named, **quality, **self.speed.result_metrics(prefix)}

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
    return tokenize_documents(
        tokenizer, corpus.held_out, f"{corpus.digest}/held-out", job.cache_dir
    )


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
