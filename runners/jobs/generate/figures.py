"""What a generation measured, under the names that the planner predicts."""

import statistics
from dataclasses import dataclass, field

from runners.jobs.generate.static import BatchRun
from runners.jobs.memory import Peak


@dataclass
class Figures:
    """Sums over what this process generated; what was done before it is not timed."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    wall_seconds: float = 0.0
    first_seconds: list[float] = field(default_factory=list)  # of each prompt
    gap_seconds: list[float] = field(default_factory=list)  # mean between tokens, of each prompt
    prefill_seconds: float = 0.0  # of whole batches, where they have a prefill of their own
    decode_seconds: float = 0.0
    decoded_tokens: int = 0
    kv_cache_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add_one(self, prompt: int, output: int, first: float, later: float) -> None:
        """Take one prompt: its tokens, the seconds to its first token and of those after it."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.first_seconds.append(first)
        if output > 1:
            self.gap_seconds.append(later / (output - 1))

    def add_batch(self, run: BatchRun, prompt_tokens: int) -> dict[str, float]:
        """Take one batch and return its speeds as the live charts name them."""
        outputs = sum(len(each.ids) for each in run.answers)
        decoded = max(0, outputs - len(run.answers))
        seconds = run.prefill_seconds + run.decode_seconds
        self.prompt_tokens += prompt_tokens
        self.output_tokens += outputs
        self.wall_seconds += seconds
        self.first_seconds += [run.prefill_seconds] * len(run.answers)
        self.prefill_seconds += run.prefill_seconds
        self.decode_seconds += run.decode_seconds
        self.decoded_tokens += decoded
        self.kv_cache_bytes = max(self.kv_cache_bytes, run.kv_cache_bytes)
        speeds = {
            "tokens_per_second": outputs / seconds,
            "prefill_tokens_per_second": prompt_tokens / run.prefill_seconds,
        }
        if run.num_steps:
            self.gap_seconds += [run.decode_seconds / run.num_steps] * len(run.answers)
            speeds["decode_tokens_per_second"] = decoded / run.decode_seconds
        return speeds

    @property
    def tokens_per_second(self) -> float:
        """Return the written tokens per second so far."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def measured(self, peak: Peak, parameter_bytes: int) -> dict[str, float]:
        """Return the figures of the job's result."""
        found = {
            "peak_memory_bytes": float(peak.bytes),
            "runtime_memory_bytes": float(peak.start_bytes),
            "parameter_bytes": float(parameter_bytes),
            "prompt_tokens": float(self.prompt_tokens),
            "output_tokens": float(self.output_tokens),
        }
        if self.kv_cache_bytes:
            found["kv_cache_bytes"] = float(self.kv_cache_bytes)
        return found | self._speeds() | self._guesses()

    def _speeds(self) -> dict[str, float]:
        if not self.first_seconds:
            return {}
        found = {
            "tokens_per_second": self.tokens_per_second,
            "ttft_seconds": statistics.median(self.first_seconds),
        }
        if self.gap_seconds:
            found["tpot_seconds"] = statistics.median(self.gap_seconds)
        if self.prefill_seconds:
            found["prefill_tokens_per_second"] = self.prompt_tokens / self.prefill_seconds
        if self.decode_seconds and self.decoded_tokens:
            found["decode_tokens_per_second"] = self.decoded_tokens / self.decode_seconds
        return found

    def _guesses(self) -> dict[str, float]:
        if not self.drafted_tokens:
            return {}
        return {
            "drafted_tokens": float(self.drafted_tokens),
            "accepted_tokens": float(self.accepted_tokens),
            "acceptance_ratio": self.accepted_tokens / self.drafted_tokens,
        }


def notes_of(peak: Peak, num_before: int) -> dict[str, str]:
    """Return in words how the figures were taken."""
    notes = {
        "peak_memory_bytes": peak.how,
        "runtime_memory_bytes": "held before the model was loaded: interpreter and libraries",
        "tokens_per_second": "written tokens over the seconds of all prompts, prefill included",
        "ttft_seconds": "median over prompts, from when each was begun with",
        "tpot_seconds": "median over prompts of the mean between two of its tokens",
    }
    if num_before:
        notes["resumed"] = f"{num_before} prompts were answered before; they are not timed"
    return notes
