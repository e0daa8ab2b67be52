"""Validation, early stopping, the best weights and text samples during a training."""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.chat_template import num_repeated_bos
from runners.jobs.corpus import TokenIds
from runners.jobs.evaluation import evaluate
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import Job
from runners.jobs.train.checkpoint import (
    CheckpointWriter,
    StagedCheckpoint,
    Tensors,
    TrainState,
    checkpoint_parts,
    checkpoints,
    load_trained_weights,
    publish_checkpoint,
    trained_weights,
)
from runners.jobs.train.layout import Layout
from runners.jobs.train.rows import IGNORED, Batch
from runners.jobs.train.run_progress import RunProgress
from runners.jobs.train.sources import HeldOutRows, LabelEvaluator, Mixture
from runners.jobs.train.text_samples import SampleReport, TextSample
from runners.jobspec import TrainSpec
from runners.jobspec.base import MOST_PROMPTS, TextSamples
from runners.jobspec.compress import EVALUATING, TRAINING

# Text samples from the current weights during training.
#
# The lead continues prompts with the whole model, which sharded layouts gather as for a
# validation. Modules run in evaluation mode without gradients, and sampling has its own generator,
# so that the losses are bit-identical with and without samples.


FIRST_WORDS = 16  # tokens of held-out text per prompt
SAMPLING_TIMEOUT_SECONDS = 20.0  # for all prompts together: other ranks wait meanwhile


class TextSampler:
    """Generates samples when they are due; on the lead only."""

    def __init__(
        self,
        job: Job,
        options: TextSamples,
        tokenizer: PreTrainedTokenizerFast,
        prompts: Sequence[Sequence[int]],
        longest: int,
    ) -> None:
        """Continue ``prompts`` (token ids) to at most ``longest`` tokens in total."""
        self._options, self._tokenizer = options, tokenizer
        self._prompts = [list(each)[-max(1, longest - 1) :] for each in prompts]
        self._longest = longest
        self.report = SampleReport(job, self.note())

    def is_due(self, step: int) -> bool:
        """Return whether samples are due after this step."""
        return step % self._options.every_steps == 0

    def take(self, model: PreTrainedModel, step: int, *, is_final: bool = False) -> None:
        """Continue every prompt, and publish the texts with the step."""
        deadline = time.monotonic() + SAMPLING_TIMEOUT_SECONDS
        samples = []
        for prompt in self._prompts:
            room = min(self._options.max_tokens, self._longest - len(prompt))
            written = continuation_tokens(model, prompt, room, self._options, deadline)
            prompt_text, continuation = (
                str(self._tokenizer.decode(each)) for each in (prompt, written)
            )
            samples.append(TextSample(step, prompt_text, continuation, is_final))
        self.report.add(step, samples, is_final=is_final)

    def note(self) -> str:
        """Return a note on how the samples are generated."""
        options = self._options
        method = "the likeliest token each time"
        if options.temperature:
            method = f"drawn at temperature {options.temperature:g}, seed {options.seed}"
        return f"at most {options.max_tokens} tokens, {method}, by the weights after the step"


@torch.no_grad()
def continuation_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    options: TextSamples,
    deadline: float,
) -> list[int]:
    """Return at most ``count`` tokens after the prompt; stops at an end token or the deadline.

    ``deadline``: on the monotonic clock, in seconds.
    """
    modes = {module: module.training for module in model.modules()}
    torch.nn.Module.eval(model)
    generator = torch.Generator().manual_seed(options.seed)
    ends = {model.config.eos_token_id} if isinstance(model.config.eos_token_id, int) else set()
    cache, generated = DynamicCache(config=model.config), list[int]()
    next_ids = torch.tensor([list(prompt)], device=model.device)
    try:
        while len(generated) < count and time.monotonic() < deadline:
            logits = model(input_ids=next_ids, past_key_values=cache, use_cache=True).logits[0, -1]
            token = _sampled(logits.float().cpu(), options.temperature, generator)
            if token in ends:
                break
            generated.append(token)
            next_ids = torch.tensor([[token]], device=model.device)
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    return generated


def _sampled(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def prompts_of(
    options: TextSamples,
    tokenizer: PreTrainedTokenizerFast,
    evaluated_on: HeldOutRows | LabelEvaluator | None,
    held_out: TokenIds,
) -> list[list[int]]:
    """Return the prompts in tokens: the requested ones, or the beginnings of held-out text."""
    if options.prompts:
        prompts = [list(tokenizer(each)["input_ids"]) for each in options.prompts]
        return [each[num_repeated_bos(each, tokenizer.bos_token_id) :] for each in prompts]
    if isinstance(evaluated_on, HeldOutRows):
        return [
            _first_words(evaluated_on, at)
            for at in range(min(MOST_PROMPTS, len(evaluated_on.rows)))
        ]
    return [[int(each) for each in held_out[:FIRST_WORDS]]]


def _first_words(held_out: HeldOutRows, source: int) -> list[int]:
    rows = held_out.rows[source]
    shape = (1, int(rows.lengths[0]))
    batch = Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED))
    rows.fill(0, batch, 0)
    return [int(each) for each in batch.input_ids[0, :FIRST_WORDS]]


# The weights of a training with the lowest held-out loss, kept on disk until it ends.
#
# They are stored next to the checkpoints, so that a restart and the job's next attempt find them.
# Source: Prechelt 1998, Early Stopping - But When?, LNCS 1524.


FOLDER = "best"
WEIGHTS, FACTS = "model.safetensors", "loss.json"


@dataclass(frozen=True)
class EvaluatedStep:
    """The held-out loss of a step's weights, in nats."""

    step: int
    loss: float


class BestWeights:
    """The best weights of one training so far; used by the lead only."""

    def __init__(self, folder: Path) -> None:
        """Use a subfolder of the checkpoint folder."""
        self._folder = folder / FOLDER
        self.exported: EvaluatedStep | None = (
            None  # the step whose weights the training exports; set at the end
        )
        self.last: EvaluatedStep | None = None
        self._lowest: EvaluatedStep | None = None  # of all steps, on disk or being written

    def stored_step(self) -> EvaluatedStep | None:
        """Return the step on disk; None before the first validation."""
        return min(self._complete_folders().values(), key=lambda each: each.loss, default=None)

    def take(
        self, model: torch.nn.Module, step: EvaluatedStep, writer: CheckpointWriter | None = None
    ) -> None:
        """Keep a model's weights if their loss is the lowest so far.

        With a writer they are copied and written in the background; the previous ones stay on disk
        until the new ones are complete.

        Raises:
            OSError: the write failed, for example on a full disk; the previous weights remain.
                A writer raises it at its next call.
        """
        self.last = step
        self._lowest = previous = self._lowest or self.stored_step()
        if not math.isfinite(step.loss) or (previous and previous.loss <= step.loss):
            return

        weights = trained_weights(model)
        if writer is None:
            self._publish(weights, step)
        else:
            parts = checkpoint_parts(weights, {})
            writer.begin(StagedCheckpoint(parts, publish=lambda kept: self._publish(kept, step)))
        self._lowest = step

    def _publish(self, weights: Tensors, evaluated: EvaluatedStep) -> None:
        from safetensors.torch import save_file

        def write(building: Path) -> None:
            tensors = {name: each.contiguous() for name, each in weights.items()}
            save_file(tensors, building / WEIGHTS)
            (building / FACTS).write_text(json.dumps(asdict(evaluated)))

        newest = publish_checkpoint(self._folder, evaluated.step, write)
        for other in checkpoints(self._folder):
            if other != newest:
                shutil.rmtree(other, ignore_errors=True)

    def restore_best(self, model: torch.nn.Module, last: EvaluatedStep) -> None:
        """Load the weights with the lowest loss, counting the last step, into the model."""
        from safetensors.torch import load_file

        lowest = self.stored_step()
        self.last = self.exported = last
        if lowest is None or (math.isfinite(last.loss) and last.loss <= lowest.loss):
            return
        self.exported = lowest
        (folder,) = (
            each for each, evaluated in self._complete_folders().items() if evaluated == lowest
        )
        load_trained_weights(model, load_file(folder / WEIGHTS))

    def note(self) -> str:
        """Return a note on which step's weights are exported, and why."""
        if self.exported is None or self.last is None:
            return "the last step's: there was no evaluation before it"
        text = (
            f"held-out loss {self.exported.loss:.4f} nats on the tokens read at each evaluation "
            "(the perplexity of the result reads more), the lowest of all evaluations"
        )
        if self.exported == self.last:
            return f"the last step's: {text}"
        return (
            f"those of step {self.exported.step}: {text}; the last step's was {self.last.loss:.4f}"
        )

    def _complete_folders(self) -> dict[Path, EvaluatedStep]:
        """Return each complete step folder; an interrupted removal may have left partial ones."""
        return {
            folder: EvaluatedStep(**json.loads((folder / FACTS).read_text()))
            for folder in checkpoints(self._folder)
            if (folder / FACTS).exists() and (folder / WEIGHTS).exists()
        }


# Early stopping after validations without a better loss.


@dataclass
class EarlyStopping:
    """Counts validations without a gain, in the training state that checkpoints store."""

    most: int | None  # consecutive validations without a better loss; None: no early stop

    def take(self, state: TrainState, loss: float) -> None:
        """Record the loss of a validation, in nats."""
        if not state.best_validation_loss or loss < state.best_validation_loss:
            state.best_validation_loss, state.validations_without_gain = loss, 0
        else:
            state.validations_without_gain += 1

    def is_over(self, state: TrainState) -> bool:
        """Return whether the limit has been reached."""
        return self.most is not None and state.validations_without_gain >= self.most

    def note(self, state: TrainState) -> str:
        """Return a note on why the training ended early."""
        return (
            f"ended after step {state.step}: {state.validations_without_gain} validations in a "
            f"row brought no loss below {state.best_validation_loss:.4f} nats"
        )


VALIDATION_TOKENS = 4096
FINAL_EVALUATION_TOKENS = 8192  # the default of the other jobs, for comparable figures
VALIDATIONS_PER_RUN = 8
RECENT_VALIDATIONS = 3  # that say how long the next ones take: a machine's load changes

Aside = Callable[[PreTrainedModel], AbstractContextManager[None]]


@dataclass
class HeldOutData:
    """Held-out text, never trained on."""

    ids: TokenIds  # the host's own text
    # What was kept of the data, where there is any.
    evaluated_on: HeldOutRows | LabelEvaluator | None = None

    def validation(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the validation metrics of a model: mean loss in nats, and more."""
        if self.evaluated_on is not None:
            return self.evaluated_on.validation(model)
        perplexity = evaluate(model, self.ids, VALIDATION_TOKENS)
        return {"validation_loss": math.log(perplexity.value)}


@dataclass
class Evaluator:
    """Runs validation, sampling and mixture updates of one training when they are due."""

    job: Job
    spec: TrainSpec
    layout: Layout
    ranks: Ranks
    pace: RunProgress
    held_out: HeldOutData
    aside: Aside  # context in which the model runs as it will be loaded
    report_progress: Callable[[], None]
    writer: CheckpointWriter | None  # of the best weights; None writes them within a step
    sampler: TextSampler | None = None
    mixture: Mixture | None = None
    patience: EarlyStopping = field(init=False)
    best: BestWeights = field(init=False)
    next_validation: float = 1.0 / VALIDATIONS_PER_RUN  # fraction of the run
    is_over: bool = False  # early stop: the ranks have agreed on it
    has_finished: bool = False  # the last weights are compared with the best
    validation_seconds: list[float] = field(default_factory=list)  # of each so far

    def __post_init__(self) -> None:
        self.patience = EarlyStopping(self.spec.early_stop_validations)
        self.best = BestWeights(self.job.checkpoint_dir)

    def resume(self, state: TrainState) -> None:
        """Restore the evaluation schedule from a checkpoint."""
        if self.mixture is not None:
            self.mixture.restore_history(state)
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
            (self.spec.keeps_model and self.pace.fraction(state) >= self.next_validation)
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
        if not self.spec.keeps_model or self.pace.fraction(state) < self.next_validation:
            return
        self.next_validation += 1.0 / VALIDATIONS_PER_RUN
        self.layout.synchronise()
        model = self.layout.gathered_model()
        if model is None:
            return
        began = time.monotonic()
        with self._phase(), self.aside(model):
            evaluated = self._evaluated(model, state)
        self.validation_seconds.append(time.monotonic() - began)
        self.patience.take(state, evaluated.loss)
        if self.spec.keep_best:
            self.best.take(model, evaluated, self.writer)

    @contextmanager
    def _phase(self) -> Iterator[None]:
        """Report the evaluation as a phase, with the time left by the pace so far."""
        self.job.emitter.phase(EVALUATING)
        self.report_progress()
        yield
        self.job.emitter.phase(TRAINING)

    def _sample_when_due(self, state: TrainState) -> None:
        """Generate text with the whole model; diverged replicas are not synchronised first."""
        if self.sampler is None or not self.sampler.is_due(state.step):
            return
        model = self.layout.gathered_model()
        if model is not None:
            with self.aside(model):
                self.sampler.take(model, state.step)

    def _move_mixture_when_due(self, state: TrainState) -> None:
        """Update the mixture weights on all ranks from the lead's loss on each source."""
        mixture = self.mixture
        if mixture is None or not mixture.is_due(state) or self.pace.fraction(state) >= 1.0:
            return
        self.layout.synchronise()
        model, losses = self.layout.gathered_model(), [0.0] * len(mixture.evaluated_on)
        if model is not None:
            with self.aside(model):
                losses = mixture.losses(model)
        figures = mixture.move(state, self.ranks.total(losses))
        self.job.emitter.metric(figures if self.ranks.is_lead else {}, step=state.step)

    def _evaluated(self, model: PreTrainedModel, state: TrainState) -> EvaluatedStep:
        metrics = self.held_out.validation(model)
        self.job.emitter.metric(metrics, step=state.step)
        return EvaluatedStep(state.step, metrics["validation_loss"])

    @property
    def recent_seconds(self) -> float:
        """Return the usual seconds of the newest validations, 0 before the first."""
        return statistics.median(self.validation_seconds[-RECENT_VALIDATIONS:] or [0.0])

    @property
    def between_seconds(self) -> float:
        """Return the expected seconds of all validations between the steps of a whole run."""
        return VALIDATIONS_PER_RUN * self.recent_seconds

    @property
    def final_seconds(self) -> float:
        """Return the expected seconds of the evaluations still to come after the last step.

        They take a validation's time for each of its tokens; 0 until one was measured.
        """
        if not self.spec.keeps_model:
            return 0.0
        compares_last = self.spec.keep_best and not self.has_finished
        return (FINAL_EVALUATION_TOKENS / VALIDATION_TOKENS + compares_last) * self.recent_seconds

    def finish(self, model: PreTrainedModel, state: TrainState) -> None:
        """Evaluate the last weights, restore the best ones, and generate the final samples.

        Only the lead calls this, at the end; ``model`` holds the whole weights as they will be
        loaded.
        """
        self._restore_best(model, state)
        self.has_finished = True
        if self.sampler is not None:
            step = (self.best.exported or state).step
            self.sampler.take(model, step, is_final=True)

    def _restore_best(self, model: PreTrainedModel, state: TrainState) -> None:
        if not self.spec.keep_best or self.best.stored_step() is None:
            return
        last = self.best.last
        if last is None or last.step != state.step:
            self.job.emitter.phase(EVALUATING)
            self.report_progress()
            last = self._evaluated(model, state)
        self.best.restore_best(model, last)
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
