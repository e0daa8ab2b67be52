"""The training loop: AdamW on one or many ranks, paced by a time budget, a step limit or both."""

import contextlib
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.checkpoint import TrainState, load_latest, save_checkpoint, share_progress
from runners.jobs.evaluation import evaluate
from runners.jobs.memory import gradient_bytes, optimizer_bytes, terms_held
from runners.jobs.ranks import ALONE, Ranks, lost_rank_named
from runners.jobs.runtime import Job
from runners.jobs.tokenizer import TokenIds
from runners.jobspec import TrainSpec

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
WARMUP_FRACTION = 0.04
FINAL_LEARNING_RATE_RATIO = 0.02
METRIC_INTERVAL_SECONDS = 0.25  # at most four points a second reach the charts
SAY_INTERVAL_SECONDS = 2.0  # a person reads one line of log in two seconds
VALIDATION_TOKENS = 4096
VALIDATIONS_PER_RUN = 8
FIRST_STEPS_SKIPPED = 2  # allocation and kernel selection, not the speed of training


class DivergedError(Exception):
    """The loss is no longer a number."""


def learning_rate_ratio(fraction: float) -> float:
    """Return the share of the peak learning rate at a fraction of the run.

    Linear warm-up, then linear decay to a few percent: fitted to whatever ends the run.
    """
    if fraction < WARMUP_FRACTION:
        return max(fraction, 0.01 * WARMUP_FRACTION) / WARMUP_FRACTION
    left = (1.0 - min(fraction, 1.0)) / (1.0 - WARMUP_FRACTION)
    return FINAL_LEARNING_RATE_RATIO + (1.0 - FINAL_LEARNING_RATE_RATIO) * left


def sample_batch(ids: TokenIds, spec: TrainSpec, step: int, micro_step: int) -> torch.Tensor:
    """Return one micro-batch [micro_batch_size, sequence_length + 1] of token ids.

    It depends on the seed and the step alone: a resumed run sees what an unbroken one would.
    """
    generator = np.random.default_rng((spec.seed, step, micro_step))
    length = min(spec.sequence_length, len(ids) - 1)
    starts = generator.integers(0, len(ids) - length, size=spec.micro_batch_size)
    return torch.from_numpy(
        np.stack([ids[at : at + length + 1] for at in starts]).astype(np.int64)
    )


@dataclass
class Pace:
    """How far a run is, by whichever limit comes first."""

    max_steps: int | None
    budget_seconds: float | None

    def fraction(self, state: TrainState) -> float:
        """Return the share of the run that is done, 1 at its end."""
        by_steps = state.step / self.max_steps if self.max_steps else 0.0
        by_time = state.elapsed_seconds / self.budget_seconds if self.budget_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def eta_seconds(self, state: TrainState) -> float | None:
        """Return the seconds left, None before the first step tells."""
        fraction = self.fraction(state)
        if fraction <= 0.0:
            return self.budget_seconds
        return state.elapsed_seconds * (1.0 - fraction) / fraction

    def progress(self, state: TrainState) -> tuple[float, float, str]:
        """Return done, total and unit in the terms of the limit that rules."""
        if self.budget_seconds is None:
            return float(state.step), float(self.max_steps or 0), "steps"
        return self.fraction(state) * self.budget_seconds, self.budget_seconds, "seconds"


@dataclass
class Trainer:
    """One run of training: model, data, optimizer and how far it is."""

    job: Job
    spec: TrainSpec
    model: PreTrainedModel
    train_ids: TokenIds
    held_out_ids: TokenIds
    device: torch.device
    ranks: Ranks = ALONE
    state: TrainState = field(default_factory=TrainState)
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    resumed_at_step: int | None = None

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.spec.learning_rate)
        self.pace = Pace(self.spec.max_steps, self.spec.time_budget_seconds)
        self._replica: PreTrainedModel | DistributedDataParallel = self.model
        self._next_metric_at = 0.0
        self._next_line_at = 0.0
        self._next_validation = 1.0 / VALIDATIONS_PER_RUN
        self._last_checkpoint_at = time.monotonic()

    def resume(self) -> None:
        """Continue from the lead's newest checkpoint, if it has one, with weights like its own."""
        state = None
        if self.ranks.is_lead:
            state = load_latest(self.job.checkpoint_dir, self.model, self.optimizer)
        if not self.ranks.is_alone:
            state = share_progress(self.ranks, self.model, self.optimizer, state)
        if state is not None:
            self.state = state
            self.resumed_at_step = state.step
            done = math.floor(self.pace.fraction(state) * VALIDATIONS_PER_RUN)
            self._next_validation = (done + 1) / VALIDATIONS_PER_RUN

    def run(self) -> bool:
        """Train to the end; return False when a stop was asked for and a checkpoint stands.

        Raises:
            RankLostError: another rank was silent for longer than the job allows.
            DivergedError: the loss is no number any more.
        """
        self.model.train()
        self._replica = self.ranks.join(self.model)
        while True:
            is_stopped = self._agree()
            if self.pace.fraction(self.state) >= 1.0:
                return True
            if is_stopped:
                self.checkpoint()
                return False
            began = time.monotonic()
            values = self._step()
            if not self.step_seconds:
                self.ranks.settle(self.spec.parallel)
            self._after_step(values, began)

    def _agree(self) -> bool:
        """Take the lead's clock for everybody's, and return whether a stop was asked for."""
        counts = self.ranks.is_lead or self.spec.parallel.on_lost_rank == "stop"
        asks = counts and self.job.stop_requested.is_set()
        elapsed = self.state.elapsed_seconds if self.ranks.is_lead else 0.0
        num_asking, self.state.elapsed_seconds = self.ranks.total([float(asks), elapsed])
        return num_asking > 0

    def checkpoint(self) -> None:
        """Save model, optimizer and progress, which the lead does for all."""
        if self.ranks.is_lead:
            save_checkpoint(self.job.checkpoint_dir, self.model, self.optimizer, self.state)
        self._last_checkpoint_at = time.monotonic()

    def _step(self) -> dict[str, float]:
        rate = self.spec.learning_rate * learning_rate_ratio(self.pace.fraction(self.state))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        mine = self._own_loss()
        (self.last_loss,) = self.ranks.total([mine])
        if not self.step_seconds:  # told in this order: the next allocation may be one too many
            self.tell_held(gradients=gradient_bytes(self.model))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        if not self.step_seconds:
            self.tell_held(optimizer_states=optimizer_bytes(self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(self.last_loss):
            msg = (
                f"the loss became {self.last_loss} at step {self.state.step + 1}; start again "
                f"with a learning rate below {self.spec.learning_rate:g}"
            )
            raise DivergedError(msg)
        loss = self.last_loss if self.ranks.is_lead else mine * self._micro_steps / len(self._own)
        return {"loss": loss, "grad_norm": float(norm), "learning_rate": rate}

    @property
    def _own(self) -> range:
        """Return the micro-batches of a step that this rank computes."""
        return self.ranks.share(self._micro_steps)

    def _own_loss(self) -> float:
        """Return this rank's share of the mean loss; its last part exchanges the gradients."""
        *others, last = self._own
        with self._unsynced():
            loss = sum(self._backward(index) for index in others)
        with lost_rank_named(self.ranks):
            return loss + self._backward(last)

    def _unsynced(self) -> AbstractContextManager[None]:
        if isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return contextlib.nullcontext()

    def tell_held(self, **held: int) -> None:
        """Say which bytes are held from the step on that comes next."""
        self.job.emitter.metric(terms_held(held), step=self.state.step + 1)

    def _backward(self, micro_step: int) -> float:
        batch = sample_batch(self.train_ids, self.spec, self.state.step, micro_step)
        batch = batch.to(self.device)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.spec.compute_dtype)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            logits = self._replica(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten()
        )
        # The ranks' gradients are averaged, so each counts for as many as there are.
        torch.autograd.backward(loss * self.ranks.size / self._micro_steps)
        return float(loss.detach()) / self._micro_steps

    @property
    def _micro_steps(self) -> int:
        return self.spec.gradient_accumulation_steps

    def _after_step(self, values: Mapping[str, float], began: float) -> None:
        seconds = time.monotonic() - began
        tokens = self.spec.micro_batch_size * self.spec.sequence_length * self._micro_steps
        self.state.step += 1
        self.state.tokens += tokens
        self.step_seconds.append(seconds)
        said = tokens if self.ranks.is_lead else tokens * len(self._own) / self._micro_steps
        speed = {"tokens_per_second": said / seconds, "step_seconds": seconds}
        self._emit({**values, **speed})
        if self.ranks.is_lead:
            self._validate_when_due()
        if time.monotonic() - self._last_checkpoint_at >= self.spec.checkpoint_every_seconds:
            self.checkpoint()
        self.state.elapsed_seconds += time.monotonic() - began

    def _emit(self, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        is_last = self.pace.fraction(self.state) >= 1.0
        if now < self._next_metric_at and not is_last:
            return
        self._next_metric_at = now + METRIC_INTERVAL_SECONDS
        self.job.emitter.metric(values, step=self.state.step)
        if now >= self._next_line_at or is_last:
            self._next_line_at = now + SAY_INTERVAL_SECONDS
            self.job.emitter.say(self.ranks.name + step_line(self.state.step, values))
        self.job.emitter.progress(
            *self.pace.progress(self.state), self.pace.eta_seconds(self.state)
        )

    def _validate_when_due(self) -> None:
        fraction = self.pace.fraction(self.state)
        if fraction < self._next_validation or fraction >= 1.0:
            return
        self._next_validation += 1.0 / VALIDATIONS_PER_RUN
        found = evaluate(self.model, self.held_out_ids, VALIDATION_TOKENS)
        self.job.emitter.metric({"validation_loss": math.log(found.value)}, step=self.state.step)


def step_line(step: int, values: Mapping[str, float]) -> str:
    """Return one line of log about a step."""
    return (
        f"step {step}  loss {values['loss']:.4f}  lr {values['learning_rate']:.2e}  "
        f"grad_norm {values['grad_norm']:.2f}  {values['tokens_per_second']:,.0f} tok/s"
    )


def build_optimizer(model: PreTrainedModel, learning_rate: float) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves norms, biases and frozen weights alone."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def steady(values: list[float]) -> list[float]:
    """Return the step times without the first ones, unless there are no others."""
    return values[FIRST_STEPS_SKIPPED:] or values
