"""What a generation measured, under the names that the planner predicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from runners.jobs.generate.static import BatchRun
from runners.jobs.memory import Peak


@dataclass
class Figures:
    """Sums over what this process generated; what was done before it is not timed."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: list[float] = field(default_factory=list)  # of each prompt's batch
    prefill_sum_seconds: float = 0.0
    decode_sum_seconds: float = 0.0
    num_steps: int = 0
    kv_cache_bytes: int = 0

    def add(self, run: BatchRun, prompt_tokens: int) -> dict[str, float]:
        """Take one batch and return its speeds as the live charts name them."""
        outputs = sum(len(each.ids) for each in run.answers)
        self.prompt_tokens += prompt_tokens
        self.output_tokens += outputs
        self.prefill_seconds += [run.prefill_seconds] * len(run.answers)
        self.prefill_sum_seconds += run.prefill_seconds
        self.decode_sum_seconds += run.decode_seconds
        self.num_steps += run.num_steps
        self.kv_cache_bytes = max(self.kv_cache_bytes, run.kv_cache_bytes)
        seconds = run.prefill_seconds + run.decode_seconds
        speeds = {
            "tokens_per_second": outputs / seconds,
            "prefill_tokens_per_second": prompt_tokens / run.prefill_seconds,
        }
        if run.num_steps:
            decoded = outputs - len(run.answers)
            speeds["decode_tokens_per_second"] = max(0, decoded) / run.decode_seconds
        return speeds

    def measured(self, peak: Peak, parameter_bytes: int) -> dict[str, float]:
        """Return the figures of the job's result."""
        found = {
            "peak_memory_bytes": float(peak.bytes),
            "runtime_memory_bytes": float(peak.start_bytes),
            "parameter_bytes": float(parameter_bytes),
            "prompt_tokens": float(self.prompt_tokens),
            "output_tokens": float(self.output_tokens),
        }
        if not self.prefill_seconds:
            return found
        total = self.prefill_sum_seconds + self.decode_sum_seconds
        found |= {
            "kv_cache_bytes": float(self.kv_cache_bytes),
            "tokens_per_second": self.output_tokens / total,
            "ttft_seconds": _middle(self.prefill_seconds),
            "prefill_tokens_per_second": self.prompt_tokens / self.prefill_sum_seconds,
        }
        decoded = self.output_tokens - len(self.prefill_seconds)
        if self.num_steps and decoded > 0:
            found["tpot_seconds"] = self.decode_sum_seconds / self.num_steps
            found["decode_tokens_per_second"] = decoded / self.decode_sum_seconds
        return found


def notes_of(peak: Peak, num_before: int) -> dict[str, str]:
    """Return in words how the figures were taken."""
    notes = {
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was loaded: interpreter and libraries",
        "tokens_per_second": "written tokens over the seconds of all batches, prefill included",
        "ttft_seconds": "median over prompts of the prefill of their batch",
        "tpot_seconds": "mean of all decode steps",
    }
    if num_before:
        notes["resumed"] = f"{num_before} prompts were answered before; they are not timed"
    return notes


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
