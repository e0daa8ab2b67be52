"""The training loop on one or many ranks, with a time budget, a step limit or both."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.jobs.corpus import TokenIds
from runners.jobs.events import Emitter
from runners.jobs.loading import attention, fresh_model, ready
from runners.jobs.memory import PeakMeter, activations_counted, optimizer_bytes, terms_held
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import BadInputError, Job
from runners.jobs.train.activations import offloaded_activations, recompute
from runners.jobs.train.checkpoint import CheckpointWriter, TrainState
from runners.jobs.train.communication import MessagesWatch
from runners.jobs.train.evaluator import Evaluator, HeldOut
from runners.jobs.train.guard import LossScale, Pace, Reading, SpikeGuard, learning_rate_ratio
from runners.jobs.train.kernels import JUDGED, PLAIN_STEPS, BlockAttention, CompiledLayers
from runners.jobs.train.layout import StepLoss
from runners.jobs.train.layouts.divided import chosen_layout
from runners.jobs.train.optimizers import FusedUpdate, build_optimizer
from runners.jobs.train.quantized import hold_as_integers
from runners.jobs.train.rows import Batch, Batches, TextBatches, with_growing_lengths
from runners.jobspec import RandomModel, TrainSpec
from runners.jobspec.benchmark import FIRST_STEPS_SKIPPED
from runners.messages import RunRequest

MAX_GRAD_NORM = 1.0
METRIC_INTERVAL_SECONDS = 0.25  # at most four chart points per second
SAY_INTERVAL_SECONDS = 2.0  # one log line every two seconds


@dataclass
class Trainer:
    """One training run: model, data, optimizer and progress."""

    job: Job
    spec: TrainSpec
    model: PreTrainedModel
    batches: Batches
    held_out: HeldOut
    device: torch.device
    ranks: Ranks = ALONE
    blocks: BlockAttention | None = None  # set if the attention is block-sparse
    state: TrainState = field(default_factory=TrainState)
    step_seconds: list[float] = field(default_factory=list)
    resumed_at_step: int | None = None
    meter: PeakMeter | None = None  # of the training, started before the model was built
    trained_tokens: int = 0  # by this process alone, as its energy measurement

    def __post_init__(self) -> None:
        spec, scratch = self.spec, self.job.scratch_dir()
        self.attention = str(self.model.config._attn_implementation)  # noqa: SLF001 - no public name
        if spec.optimizer == "qft":
            hold_as_integers(self.model)
        if spec.compute_dtype == "fp8":
            from runners.jobs.train.kernels import narrow_products  # torchao is large

            narrow_products(self.model, self.device)
        recompute(self.model, spec.activation_recomputation)
        self.layout = chosen_layout(self.model, spec, self.device, self.ranks)
        trained, states = self.layout.trained, (spec.optimizer_offload, scratch)
        self.compiled = CompiledLayers(self.model, scratch) if spec.compiled else None
        self.optimizer = build_optimizer(trained, spec.learning_rate, spec.optimizer, states)
        check_fused(self.optimizer, self.ranks)
        self.pace = Pace(spec.max_steps, spec.time_budget_seconds)
        self._swap = offloaded_activations(
            spec.activation_offload, self.model, self.device, scratch
        )
        is_classifier = spec.objective == "classification"
        config = self.model.config
        self.guard = SpikeGuard(
            int(config.num_labels or 1) if is_classifier else config.vocab_size,
            spec.spike_loss_ratio,
            spec.learning_rate,
            skips=spec.on_spike == "skip",
        )
        self.scale = LossScale() if spec.compute_dtype == "fp16" else None
        # A guard that may skip an update has to read before it; one that ends the run need not.
        self.checks_late = (
            self.device.type == "cuda" and not self.guard.skips and self.scale is None
        )
        self._unchecked: Reading | None = None
        self._last: Reading | None = None
        self.watch = MessagesWatch(self.ranks, self.layout.axes_of_groups)
        self.writer = CheckpointWriter(self.job.checkpoint_dir, spec.keep_checkpoints)
        self._writes_beside = spec.writes_checkpoints_in_background(self.device.type)
        self.evaluator = Evaluator(
            self.job, spec, self.layout, self.ranks, self.pace, self.held_out, self.aside,
            self.writer if self._writes_beside else None,
        )  # fmt: skip
        self._data_seconds = 0.0  # of the step under way
        self._next_metric_at = 0.0
        self._next_line_at = 0.0
        self._last_checkpoint_at = time.monotonic()

    @property
    def last_loss(self) -> float:
        """Return the loss of the last step, in nats."""
        return math.nan if self._last is None else self._last.figures.loss

    def resume(self) -> None:
        """Resume from the lead's newest checkpoint, if any, with equal weights on all ranks."""
        state = self.layout.resume(self.job.checkpoint_dir, self.optimizer)
        if state is not None:
            self.state = state
            self.resumed_at_step = state.step
            if self.scale is not None and state.loss_scale:
                self.scale.value, self.scale.good_steps = state.loss_scale, state.scaled_steps
            self.evaluator.resume(state)

    def run(self) -> bool:
        """Train to the end; return False if stopped after a checkpoint.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
            DivergedError: the loss spiked or is not finite.
        """
        try:
            return self._train()
        finally:
            self.writer.abandon(self.spec.parallel.rank_timeout_seconds)

    def _train(self) -> bool:
        self.model.train()
        self.layout.begin()
        self.evaluator.begin(self.state)
        while True:
            is_stopped, is_due = self._synchronise_flags()
            self._report_checkpoint()
            if is_due and not is_stopped:
                self.checkpoint(beside_steps=self._writes_beside)
            is_over = self.evaluator.is_over
            if is_over:
                self.job.emitter.log(self.ranks.name + self.evaluator.patience.note(self.state))
            if self.pace.fraction(self.state) >= 1.0 or is_over:
                self._check_last()
                if self.compiled is not None:
                    self.compiled.end()
                self.writer.finish()
                return True
            if is_stopped:
                self.checkpoint()
                return False
            began = time.monotonic()
            with self.watch.step():
                values = self.make_step()
            values |= self.watch.news()
            if not self.step_seconds:
                self.ranks.settle(self.spec.parallel)
                self.layout.settled(self.spec.parallel.rank_timeout_seconds)
            self._after_step(values, began)

    def _synchronise_flags(self) -> tuple[bool, bool]:
        """Broadcast the lead's clock; return whether to stop, and whether a checkpoint is due."""
        counts = self.ranks.is_lead or self.spec.parallel.on_lost_rank != "shrink"
        stops = counts and self.job.stop_requested.is_set()
        elapsed = self.state.elapsed_seconds if self.ranks.is_lead else 0.0
        since_checkpoint = time.monotonic() - self._last_checkpoint_at
        is_due = since_checkpoint >= self.spec.checkpoint_every_seconds and not self.writer.is_busy
        is_over = self.ranks.is_lead and self.evaluator.patience.is_over(self.state)
        flags = [float(stops), float(is_due and self.ranks.is_lead), float(is_over), elapsed]
        num_stopping, due, over, self.state.elapsed_seconds = self.ranks.total(flags)
        self.evaluator.is_over = over > 0
        return num_stopping > 0, due > 0

    def checkpoint(self, *, beside_steps: bool = False) -> None:
        """Save model, optimizer and progress; the lead writes for all ranks.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
            OSError: the write failed, for example on a full disk; the previous checkpoint remains.
        """
        self._check_last()
        waited_before = self.writer.waited_seconds
        self.layout.synchronise()
        if self.scale is not None:
            scale = self.scale
            self.state.loss_scale, self.state.scaled_steps = scale.value, scale.good_steps
        staged = self.layout.staged(self.optimizer, self.state)
        if beside_steps:
            self.writer.begin(staged)
        else:
            self.writer.write(staged)
        self._last_checkpoint_at = time.monotonic()
        seconds = self.writer.waited_seconds - waited_before
        self.job.emitter.metric({"checkpoint_wait_seconds": seconds}, step=self.state.step)

    def _report_checkpoint(self) -> None:
        """Report how long the newest background checkpoint took, or raise its error.

        Raises:
            RankFailedError, OSError: as in ``checkpoint``.
        """
        self.writer.check()
        if news := self.writer.news():
            self.job.emitter.metric(news, step=self.state.step)

    def make_step(self) -> dict[str, float | torch.Tensor]:
        """Run one optimizer step on its micro-batches, and return its metrics, unread."""
        if self.compiled is not None and len(self.step_seconds) == PLAIN_STEPS:
            self.compiled.begin()
        rate = self.spec.learning_rate * learning_rate_ratio(self.pace.fraction(self.state))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = self.layout.share(self._micro_steps)
        began = time.monotonic()
        batches = [self.batches.micro_batch(self.state.step, index) for index in indices]
        self._data_seconds = time.monotonic() - began
        step_loss = self._gradients(batches)
        norm = self._clipped_norm()
        if norm is not None and self._may_update(Reading(self.state.step + 1, *step_loss, norm)):
            self.optimizer.step()
        if not self.step_seconds:
            self.report_held(optimizer_states=optimizer_bytes(self.optimizer))
        self.optimizer.zero_grad(set_to_none=not self.layout.keeps_gradients)
        self.layout.updated()
        loss = step_loss.loss if self.ranks.is_lead else step_loss.own_loss
        skipped = {} if norm is not None else {"loss_scale_overflow": 1.0}
        figures = {**skipped, **self.layout.figures()}
        shown_norm = 0.0 if norm is None else norm
        return {"loss": loss, "grad_norm": shown_norm, "learning_rate": rate, **figures}

    def _may_update(self, reading: Reading) -> bool:
        """Return whether the guard allows the step; checked later, the device is not waited for.

        Raises:
            DivergedError: the loss of this step, or of the last one, spiked or is not finite.
        """
        self._last = reading
        self._check_last()
        if self.checks_late:
            self._unchecked = reading
            return True
        return self._is_allowed(reading)

    def _check_last(self) -> None:
        """Check the step that was updated unread, if any: before its weights are used or kept.

        Raises:
            DivergedError: as in ``run``.
        """
        reading, self._unchecked = self._unchecked, None
        if reading is not None:
            self._is_allowed(reading)

    def _is_allowed(self, reading: Reading) -> bool:
        loss, _own, norm = reading.figures
        return self.guard.allows(reading.step, loss, norm)

    def _clipped_norm(self) -> torch.Tensor | None:
        """Clip the gradients; return the norm before clipping, None if fp16 ones overflowed."""
        if isinstance(self.optimizer, FusedUpdate):
            return self.optimizer.norm()
        if self.scale is not None:
            trained = self.layout.trained.parameters()
            if not self.scale.unscale(trained, self.ranks):
                return None
        return self.layout.clip(MAX_GRAD_NORM)

    def _gradients(self, batches: list[Batch]) -> StepLoss:
        """Compute the step's gradients; in the first step, measure the activation memory."""
        is_counted = not self.step_seconds and self.ranks.is_alone
        counting = activations_counted(self.model) if is_counted else contextlib.nullcontext()
        if self.scale is not None:
            self.layout.loss_scale = self.scale.value
        with counting as live, self._swap.step():
            step_loss = self.layout.gradients(batches)
        if not self.step_seconds:  # report before the next allocation, which may fail
            activations = {} if live is None else {"activations": live.peak}
            self.report_held(gradients=self.gradients_held(), **activations)
        return step_loss

    def gradients_held(self) -> int:
        """Return the bytes of the gradients in memory; of a fused update, the peak."""
        if isinstance(self.optimizer, FusedUpdate):
            return self.optimizer.peak_gradient_bytes
        return self.layout.gradient_bytes()

    def report_held(self, **held: int) -> None:
        """Report which bytes are held from the next step on."""
        self.job.emitter.metric(terms_held(held), step=self.state.step + 1)

    @property
    def _micro_steps(self) -> int:
        return self.spec.gradient_accumulation_steps

    def _after_step(self, values: Mapping[str, float | torch.Tensor], began: float) -> None:
        seconds = time.monotonic() - began
        tokens = self._num_tokens(range(self._micro_steps))
        own = self._num_tokens(self.layout.share(self._micro_steps))
        self.state.step += 1
        self.state.tokens += tokens
        self.trained_tokens += tokens
        self.step_seconds.append(seconds)
        reported_tokens = tokens if self.ranks.is_lead else own
        speed = {
            "tokens_per_second": reported_tokens / seconds,
            "step_seconds": seconds,
            "data_wait_ratio": self._data_seconds / seconds,
        }
        self._emit({**values, **speed})
        if self.evaluator.is_due(self.state):
            self._check_last()
        self.evaluator.after_step(self.state)
        self.state.elapsed_seconds += time.monotonic() - began

    def _num_tokens(self, micro_steps: range) -> int:
        return sum(self.batches.num_tokens(self.state.step, each) for each in micro_steps)

    def _emit(self, unread: Mapping[str, float | torch.Tensor]) -> None:
        now = time.monotonic()
        is_last = self.pace.fraction(self.state) >= 1.0 or "communication_ratio" in unread
        if now < self._next_metric_at and not is_last:
            return
        self._next_metric_at = now + METRIC_INTERVAL_SECONDS
        values = {name: float(value) for name, value in unread.items()}
        memory = (
            {} if self.meter is None else {"peak_memory_bytes": float(self.meter.read().bytes)}
        )
        self.job.emitter.metric({**values, **memory}, step=self.state.step)
        if now >= self._next_line_at or is_last:
            self._next_line_at = now + SAY_INTERVAL_SECONDS
            self.job.emitter.log(self.ranks.name + step_line(self.state.step, values))
        self.job.emitter.progress(
            *self.pace.progress(self.state), self.pace.eta_seconds(self.state)
        )

    @contextlib.contextmanager
    def aside(self, model: PreTrainedModel) -> Iterator[None]:
        """Run the model within the block as it will be loaded, without compilation."""
        with contextlib.ExitStack() as contexts:
            if self.compiled is not None:
                contexts.enter_context(self.compiled.aside())
            if self.blocks is not None:
                contexts.enter_context(attention(model, JUDGED))
            yield


def check_fused(optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Reject fused updates on several ranks: they run before gradients are reduced.

    Raises:
        BadInputError: the optimizer is fused and there are several ranks.
    """
    if isinstance(optimizer, FusedUpdate) and not ranks.is_alone:
        msg = (
            f"{type(optimizer).__name__} updates each weight as its gradient comes, before the "
            f"gradients of {ranks.size} ranks could meet; use one device, or adamw_8bit"
        )
        raise BadInputError(msg)


def step_line(step: int, values: Mapping[str, float]) -> str:
    """Return the log line of a step."""
    return (
        f"step {step}  loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}  "
        f"grad_norm {values['grad_norm']:.2f}  {values['tokens_per_second']:,.0f} tok/s"
    )


def steady(values: list[float]) -> list[float]:
    """Return the step times without the first ones, unless there are no others."""
    return values[FIRST_STEPS_SKIPPED:] or values


# The trainer on a fresh model without reporting: for benchmarks and measurements.


RANDOM_TOKENS = 100_000


def quiet_trainer(
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    ranks: Ranks = ALONE,
    ids: TokenIds | None = None,
    model: PreTrainedModel | None = None,
    device: torch.device | None = None,
) -> Trainer:
    """Return a trainer with these spec ``fields`` that works in ``folder``, on random tokens.

    ``ids`` and ``model`` replace the random tokens and the fresh model. The same seed gives the
    same weights on every rank. ``device`` is where it trains; by default the CPU.
    """
    device = device or torch.device("cpu")
    spec = TrainSpec.model_validate({"model": RandomModel(config={}), **fields})
    torch.manual_seed(spec.seed)
    model = ready(model or fresh_model(dict(config), torch.float32), device=device)
    if device.type == "cpu":
        model.set_attn_implementation("eager")  # as the job does
    if ids is None:
        vocabulary = int(model.config.vocab_size)
        random_ids = np.random.default_rng(spec.seed).integers(0, vocabulary, RANDOM_TOKENS)
        ids = random_ids.astype(np.int32)
    text = ids
    request = RunRequest(attempt_id="quiet", job_id="quiet", number=1, fence="quiet", spec=spec)
    emitter = Emitter(os.open(os.devnull, os.O_WRONLY))
    job = Job(folder, folder, request, emitter, threading.Event())
    batches = with_growing_lengths(spec, lambda each: TextBatches(text, each))
    return Trainer(job, spec, model, batches, HeldOut(ids), device, ranks)
