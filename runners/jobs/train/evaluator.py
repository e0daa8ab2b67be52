"""Validation, text samples and mixture updates during a training.

All ranks take part after the same step, because a sharded model is gathered for it; only the
lead evaluates the whole model. Only the mixture changes which rows later steps draw.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from runners.jobs.evaluation import evaluate
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import Job
from runners.jobs.tokenizer import TokenIds
from runners.jobs.train.best import BestWeights, EvaluatedStep
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.checkpoint_writing import CheckpointWriter
from runners.jobs.train.labelled import LabelEvaluator
from runners.jobs.train.layout import Layout
from runners.jobs.train.mixture import Mixture
from runners.jobs.train.patience import Patience
from runners.jobs.train.schedule import Pace
from runners.jobs.train.sources import HeldOutRows
from runners.jobs.train.text_samples import Sampler
from runners.jobspec import TrainSpec

VALIDATION_TOKENS = 4096
VALIDATIONS_PER_RUN = 8

Aside = Callable[[PreTrainedModel], AbstractContextManager[None]]


@dataclass
class HeldOut:
    """Held-out text, never trained on."""

    ids: TokenIds  # the host's own text
    judged: HeldOutRows | LabelEvaluator | None = (
        None  # what was kept of the data, where there is any
    )

    def validation(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the validation metrics of a model: mean loss in nats, and more."""
        if self.judged is not None:
            return self.judged.validation(model)
        perplexity = evaluate(model, self.ids, VALIDATION_TOKENS)
        return {"validation_loss": math.log(perplexity.value)}


@dataclass
class Evaluator:
    """Runs validation, sampling and mixture updates of one training when they are due."""

    job: Job
    spec: TrainSpec
    layout: Layout
    ranks: Ranks
    pace: Pace
    held_out: HeldOut
    aside: Aside  # context in which the model runs as it will be loaded
    writer: CheckpointWriter | None  # of the best weights; None writes them within a step
    sampler: Sampler | None = None
    mixture: Mixture | None = None
    patience: Patience = field(init=False)
    best: BestWeights = field(init=False)
    next_validation: float = 1.0 / VALIDATIONS_PER_RUN  # fraction of the run
    is_over: bool = False  # early stop: the ranks have agreed on it

    def __post_init__(self) -> None:
        self.patience = Patience(self.spec.early_stop_validations)
        self.best = BestWeights(self.job.checkpoint_dir)

    def resume(self, state: TrainState) -> None:
        """Restore the evaluation schedule from a checkpoint."""
        if self.mixture is not None:
            self.mixture.go_on(state)
        done = math.floor(self.pace.fraction(state) * VALIDATIONS_PER_RUN)
        self.next_validation = max(self.next_validation, (done + 1) / VALIDATIONS_PER_RUN)

    def begin(self, state: TrainState) -> None:
        """Run the evaluations that are due before the first step.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
        """
        self._move_mixture_when_due(state)

    def is_due(self, state: TrainState) -> bool:
        """Return whether an evaluation is due after a step; the same on every rank."""
        return self.pace.fraction(state) < 1.0 and (
            self.pace.fraction(state) >= self.next_validation
            or (self.sampler is not None and self.sampler.is_due(state.step))
            or (self.mixture is not None and self.mixture.is_due(state))
        )

    def after_step(self, state: TrainState) -> None:
        """Run the evaluations that are due after a step.

        Raises:
            RankFailedError: another rank did not respond within the job's timeout.
            OSError: the best weights could not be written, for example on a full disk.
        """
        if self.pace.fraction(state) >= 1.0:
            return
        self._validate_when_due(state)
        self._sample_when_due(state)
        self._move_mixture_when_due(state)

    def _validate_when_due(self, state: TrainState) -> None:
        if self.pace.fraction(state) < self.next_validation:
            return
        self.next_validation += 1.0 / VALIDATIONS_PER_RUN
        self.layout.synchronise()
        model = self.layout.whole()
        if model is None:
            return
        with self.aside(model):
            evaluated = self._evaluated(model, state)
        self.patience.take(state, evaluated.loss)
        if self.spec.keep_best:
            self.best.take(model, evaluated, self.writer)

    def _sample_when_due(self, state: TrainState) -> None:
        """Generate text with the whole model; diverged replicas are not synchronised first."""
        if self.sampler is None or not self.sampler.is_due(state.step):
            return
        model = self.layout.whole()
        if model is not None:
            with self.aside(model):
                self.sampler.take(model, state.step)

    def _move_mixture_when_due(self, state: TrainState) -> None:
        """Update the mixture weights on all ranks from the lead's loss on each source."""
        mixture = self.mixture
        if mixture is None or not mixture.is_due(state) or self.pace.fraction(state) >= 1.0:
            return
        self.layout.synchronise()
        model, losses = self.layout.whole(), [0.0] * len(mixture.judged)
        if model is not None:
            with self.aside(model):
                losses = mixture.losses(model)
        figures = mixture.move(state, self.ranks.total(losses))
        self.job.emitter.metric(figures if self.ranks.is_lead else {}, step=state.step)

    def _evaluated(self, model: PreTrainedModel, state: TrainState) -> EvaluatedStep:
        metrics = self.held_out.validation(model)
        self.job.emitter.metric(metrics, step=state.step)
        return EvaluatedStep(state.step, metrics["validation_loss"])

    def finish(self, model: PreTrainedModel, state: TrainState) -> None:
        """Evaluate the last weights, restore the best ones, and generate the final samples.

        Only the lead calls this, at the end; ``model`` holds the whole weights as they will be
        loaded.
        """
        self._restore_best(model, state)
        if self.sampler is not None:
            step = (self.best.exported or state).step
            self.sampler.take(model, step, is_final=True)

    def _restore_best(self, model: PreTrainedModel, state: TrainState) -> None:
        if not self.spec.keep_best or self.best.kept() is None:
            return
        last = self.best.last
        if last is None or last.step != state.step:
            last = self._evaluated(model, state)
        self.best.put_back(model, last)
        self.job.emitter.log(f"{self.ranks.name}the weights are {self.best.note()}")

    def notes(self, state: TrainState) -> dict[str, str]:
        """Return notes on the mixture, the exported step and the early stop."""
        notes = {}
        if self.mixture is not None:
            notes["mixture"] = self.mixture.note(state)
        if self.best.exported is not None:
            notes["exported_step"] = f"the weights are {self.best.note()}"
        if self.is_over:
            notes["early_stop"] = self.patience.note(state)
        return notes
