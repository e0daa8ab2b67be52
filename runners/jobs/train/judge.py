"""What a training's model is asked on its way: how it does, what it writes, what it lacks.

All ranks come to each question after the same step, since a model in parts is put together for
it; the lead alone asks the whole model. What the steps draw is moved by the mixture alone.
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
from runners.jobs.train.best import BestWeights, JudgedStep
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.checkpoint_writing import CheckpointWriter
from runners.jobs.train.labelled import JudgedLabels
from runners.jobs.train.layout import Layout
from runners.jobs.train.mixture import Mixture
from runners.jobs.train.patience import Patience
from runners.jobs.train.schedule import Pace
from runners.jobs.train.sources import Judged
from runners.jobs.train.text_samples import Sampler
from runners.jobspec import TrainSpec

VALIDATION_TOKENS = 4096
VALIDATIONS_PER_RUN = 8

Aside = Callable[[PreTrainedModel], AbstractContextManager[None]]


@dataclass
class HeldOut:
    """Text that no step learns from."""

    ids: TokenIds  # the host's own
    judged: Judged | JudgedLabels | None = None  # what was kept of the data, where there is any

    def validation(self, model: PreTrainedModel) -> dict[str, float]:
        """Return how a model does on it: its mean loss in nats, and more."""
        if self.judged is not None:
            return self.judged.validation(model)
        perplexity = evaluate(model, self.ids, VALIDATION_TOKENS)
        return {"validation_loss": math.log(perplexity.value)}


@dataclass
class Judge:
    """Asks the model of one training, each thing when it is due."""

    job: Job
    spec: TrainSpec
    layout: Layout
    ranks: Ranks
    pace: Pace
    held_out: HeldOut
    aside: Aside  # runs a model as it will be loaded, within the block
    writer: CheckpointWriter | None  # of the best weights; None writes them within a step
    sampler: Sampler | None = None
    mixture: Mixture | None = None
    patience: Patience = field(init=False)
    best: BestWeights = field(init=False)
    next_validation: float = 1.0 / VALIDATIONS_PER_RUN  # at this fraction of the run
    is_over: bool = False  # validations brought nothing any more: the ranks agreed on it

    def __post_init__(self) -> None:
        self.patience = Patience(self.spec.early_stop_validations)
        self.best = BestWeights(self.job.checkpoint_dir)

    def resume(self, state: TrainState) -> None:
        """Go on with what is asked when, as a checkpoint has it."""
        if self.mixture is not None:
            self.mixture.go_on(state)
        done = math.floor(self.pace.fraction(state) * VALIDATIONS_PER_RUN)
        self.next_validation = max(self.next_validation, (done + 1) / VALIDATIONS_PER_RUN)

    def begin(self, state: TrainState) -> None:
        """Ask what the first step wants to know.

        Raises:
            RankLostError: another rank was silent for longer than the job allows.
        """
        self._move_mixture_when_due(state)

    def after_step(self, state: TrainState) -> None:
        """Ask what is due once a step was made.

        Raises:
            RankLostError: another rank was silent for longer than the job allows.
            OSError: the best weights could not be written, as on a full disk.
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
            judged = self._judged(model, state)
        self.patience.take(state, judged.loss)
        if self.spec.keep_best:
            self.best.take(model, judged, self.writer)

    def _sample_when_due(self, state: TrainState) -> None:
        """Have the whole model write, as it is: copies that part do not meet for it."""
        if self.sampler is None or not self.sampler.is_due(state.step):
            return
        model = self.layout.whole()
        if model is not None:
            with self.aside(model):
                self.sampler.take(model, state.step)

    def _move_mixture_when_due(self, state: TrainState) -> None:
        """Have all ranks draw by the weights that follow from the lead's losses on each source."""
        mixture = self.mixture
        if mixture is None or not mixture.is_due(state) or self.pace.fraction(state) >= 1.0:
            return
        self.layout.synchronise()
        model, found = self.layout.whole(), [0.0] * len(mixture.judged)
        if model is not None:
            with self.aside(model):
                found = mixture.losses(model)
        figures = mixture.move(state, self.ranks.total(found))
        self.job.emitter.metric(figures if self.ranks.is_lead else {}, step=state.step)

    def _judged(self, model: PreTrainedModel, state: TrainState) -> JudgedStep:
        found = self.held_out.validation(model)
        self.job.emitter.metric(found, step=state.step)
        return JudgedStep(state.step, found["validation_loss"])

    def finish(self, model: PreTrainedModel, state: TrainState) -> None:
        """Judge the last weights too, and go back to the best ones; have those write a last time.

        The lead asks, at the end; ``model`` holds the whole weights as they will be loaded.
        """
        self._leave_best(model, state)
        if self.sampler is not None:
            step = (self.best.exported or state).step
            self.sampler.take(model, step, is_final=True)

    def _leave_best(self, model: PreTrainedModel, state: TrainState) -> None:
        if not self.spec.keep_best or self.best.kept() is None:
            return
        last = self.best.last
        if last is None or last.step != state.step:
            last = self._judged(model, state)
        self.best.put_back(model, last)
        self.job.emitter.say(f"{self.ranks.name}the weights are {self.best.note()}")

    def notes(self, state: TrainState) -> dict[str, str]:
        """Return in words what followed from the answers."""
        notes = {}
        if self.mixture is not None:
            notes["mixture"] = self.mixture.note(state)
        if self.best.exported is not None:
            notes["exported_step"] = f"the weights are {self.best.note()}"
        if self.is_over:
            notes["early_stop"] = self.patience.note(state)
        return notes
