"""A callback of transformers' trainer that reports, saves and stops as our own trainer does."""

import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from runners.jobs.memory import PeakMeter
from runners.jobs.runtime import Job
from runners.jobs.train.checkpoint import (
    STATE_FILE,
    TrainState,
    publish_checkpoint,
    remove_older_checkpoints,
)
from runners.jobs.train.run_progress import DivergedError, RunProgress
from runners.jobs.train.trainer import SAY_INTERVAL_SECONDS, steady, step_line
from runners.jobspec import TrainSpec

# Names of TRL's reward trainer, and those of its other trainers for the same.
RENAMED = {
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "mean_reward": "rewards/mean",
    "min_reward": "rewards/min",
    "max_reward": "rewards/max",
}
NO_METRICS = frozenset({"epoch", "num_tokens", "total_flos", "step_time"})
TOKENS = "num_tokens"  # read so far by this process, as TRL counts them


@dataclass
class Course(TrainerCallback):
    """The course of one training: its events, checkpoints and end.

    ``state`` goes on from a checkpoint; ``read_tokens``: of this process, for trainers that do not
    count them.
    """

    job: Job
    spec: TrainSpec
    meter: PeakMeter
    state: TrainState
    max_steps: int = 0
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    read_tokens: int = 0
    trained_tokens: int = 0
    num_written: int = 0
    written_seconds: float = 0.0
    is_stopped: bool = False
    began: float = 0.0  # of the step, on the monotonic clock
    _tokens_before: int = 0  # that TRL had counted before this process
    _last_checkpoint_at: float = field(default_factory=time.monotonic)
    _next_line_at: float = 0.0

    @property
    def pace(self) -> RunProgress:
        """Return the limits of the run."""
        return RunProgress(self.max_steps or None, self.spec.time_budget_seconds)

    # What transformers' trainer calls, in this order within a step.

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the library's own
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the library's own
        **kwargs: Any,  # noqa: ARG002 - the library's own
    ) -> None:
        """Note what a checkpoint has counted."""
        self._tokens_before = int(state.num_input_tokens_seen)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note when a step begins."""
        self.began = time.monotonic()

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the library's own
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002 - the library's own
    ) -> None:
        """Decide whether to save and to stop after a step."""
        seconds = time.monotonic() - self.began
        self.step_seconds.append(seconds)
        self.state.step = state.global_step
        self.state.elapsed_seconds += seconds
        since = time.monotonic() - self._last_checkpoint_at
        self.is_stopped = self.job.stop_requested.is_set()
        is_over = self.pace.fraction(self.state) >= 1.0
        is_due = since >= self.spec.checkpoint_every_seconds and not is_over
        control.should_save = self.spec.keeps_model and (self.is_stopped or is_due)
        control.should_training_stop = self.is_stopped or is_over

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the library's own
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the library's own
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,  # noqa: ARG002 - the library's own
    ) -> None:
        """Report a step's metrics under their usual names.

        Raises:
            DivergedError: the loss is not finite.
        """
        if logs is None or "loss" not in logs:  # the summary of a whole training
            return
        values = metrics_of(logs)
        seconds = self.step_seconds[-1]
        if TOKENS in logs:
            self.read_tokens = int(logs[TOKENS]) - self._tokens_before
        tokens = self.read_tokens - self.trained_tokens
        self.trained_tokens += tokens
        self.state.tokens += tokens
        self.last_loss = values["loss"]
        peak = float(self.meter.read().bytes)
        speed = {"tokens_per_second": tokens / seconds, "step_seconds": seconds}
        step = state.global_step
        self.job.emitter.metric({**values, **speed, "peak_memory_bytes": peak}, step=step)
        if not math.isfinite(self.last_loss):
            raise DivergedError(
                f"the loss became {self.last_loss} at step {step}; the checkpoint before it is "
                f"kept. Start again with a learning rate below {self.spec.learning_rate:g}"
            )
        now = time.monotonic()
        if now >= self._next_line_at or step >= self.max_steps > 0:
            self._next_line_at = now + SAY_INTERVAL_SECONDS
            defaults = {"grad_norm": math.nan, "learning_rate": math.nan}
            self.job.emitter.log(step_line(step, {**defaults, **values, **speed}))
        self._report_progress()

    def _report_progress(self) -> None:
        """Report what is done, and the seconds left with the checkpoints between and saving."""
        left = self.pace.seconds_left(self.state, self.step_seconds)
        if left is not None and self.num_written:
            write = self.written_seconds / self.num_written
            left += write * (1.0 + left / self.spec.checkpoint_every_seconds)
        self.job.emitter.progress(*self.pace.progress(self.state), left)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the library's own
        **kwargs: Any,  # noqa: ARG002 - the library's own
    ) -> None:
        """Move what the trainer saved to the checkpoints of the job, complete or not at all."""
        began = time.monotonic()
        saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"

        def write(building: Path) -> None:
            for path in saved.iterdir():
                path.rename(building / path.name)
            (building / STATE_FILE).write_text(json.dumps(asdict(self.state)))

        publish_checkpoint(self.job.checkpoint_dir, state.global_step, write)
        shutil.rmtree(saved, ignore_errors=True)
        remove_older_checkpoints(self.job.checkpoint_dir, self.spec.keep_checkpoints)
        self._last_checkpoint_at = time.monotonic()
        seconds = self._last_checkpoint_at - began
        self.num_written += 1
        self.written_seconds += seconds
        self.job.emitter.metric({"checkpoint_write_seconds": seconds}, step=state.global_step)

    def figures(self) -> dict[str, float]:
        """Return the figures of the run for its result."""
        peak = self.meter.read()
        seconds = statistics.median(steady(self.step_seconds or [0.0]))
        tokens = self.state.tokens / max(1, self.state.step)
        written = {
            "checkpoints_written": float(self.num_written),
            "checkpoint_write_seconds": self.written_seconds,
        }
        return {
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "step_seconds": seconds,
            "peak_memory_bytes": float(peak.bytes),
            "runtime_memory_bytes": float(peak.start_bytes),
            "final_loss": self.last_loss,
            "tokens": float(self.state.tokens),
            "steps": float(self.state.step),
            "training_seconds": self.state.elapsed_seconds,
            **(written if self.num_written else {}),
        }


def metrics_of(logs: Mapping[str, float]) -> dict[str, float]:
    """Return what a trainer logged of a step under the names that charts have."""
    return {
        RENAMED.get(name, name): float(value)
        for name, value in logs.items()
        if name not in NO_METRICS and isinstance(value, int | float)
    }
