"""Measures prefill and decode speed separately with a custom greedy loop."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from runners.jobs.memory import cache_bytes

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

    def measured(self, prefix: str = "") -> dict[str, float]:
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
    settled(device)
    return time.perf_counter()


def settled(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device
