"""Text samples from the current weights during training.

The lead continues prompts with the whole model, which sharded layouts gather as for a validation.
Modules run in evaluation mode without gradients, and sampling has its own generator, so that the
losses are bit-identical with and without samples.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.artefacts import publish_report
from runners.jobs.corpus import TokenIds
from runners.jobs.runtime import Job
from runners.jobs.train.labelled import LabelEvaluator
from runners.jobs.train.rows import IGNORED, Batch
from runners.jobs.train.sources import HeldOutRows
from runners.jobspec.base import MOST_PROMPTS, TextSamples

NAME = "samples"
FIRST_WORDS = 16  # tokens of held-out text per prompt
SHOWN_STEPS = 8  # the first step, and the newest ones
PATIENCE_SECONDS = 20.0  # for all prompts together: other ranks wait meanwhile


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation by the weights of a step."""

    step: int
    prompt: str
    continuation: str
    is_final: bool = False  # from the exported weights


class Sampler:
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
        self._job, self._options, self._tokenizer = job, options, tokenizer
        self._prompts = [list(each)[-max(1, longest - 1) :] for each in prompts]
        self._longest = longest
        self.taken = _taken_before(job.output_dir(NAME))

    def is_due(self, step: int) -> bool:
        """Return whether samples are due after this step."""
        return step % self._options.every_steps == 0

    def take(self, model: PreTrainedModel, step: int, *, is_final: bool = False) -> None:
        """Continue every prompt, and publish the texts with the step."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        samples = []
        for prompt in self._prompts:
            room = min(self._options.max_tokens, self._longest - len(prompt))
            written = continued(model, prompt, room, self._options, deadline)
            prompt_text, continuation = (
                str(self._tokenizer.decode(each)) for each in (prompt, written)
            )
            samples.append(Sample(step, prompt_text, continuation, is_final))
        at = (is_final, step)  # after a restart the same step comes again
        others = [each for each in self.taken if (each.is_final, each.step) != at]
        self.taken = _shown(
            sorted([*others, *samples], key=lambda each: (each.is_final, each.step))
        )
        document = {"samples": [asdict(each) for each in self.taken], "how": self.note()}
        publish_report(self._job, NAME, document)

    def note(self) -> str:
        """Return a note on how the samples are generated."""
        options = self._options
        method = "the likeliest token each time"
        if options.temperature:
            method = f"drawn at temperature {options.temperature:g}, seed {options.seed}"
        return f"at most {options.max_tokens} tokens, {method}, by the weights after the step"


@torch.no_grad()
def continued(
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
    """Sample a token from logits [vocabulary]."""
    if not temperature:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def prompts_of(
    options: TextSamples,
    tokenizer: PreTrainedTokenizerFast,
    judged: HeldOutRows | LabelEvaluator | None,
    held_out: TokenIds,
) -> list[list[int]]:
    """Return the prompts in tokens: the requested ones, or the beginnings of held-out text."""
    if options.prompts:
        return [list(tokenizer(each)["input_ids"]) for each in options.prompts]
    if isinstance(judged, HeldOutRows):
        return [_first_words(judged, at) for at in range(min(MOST_PROMPTS, len(judged.rows)))]
    return [[int(each) for each in held_out[:FIRST_WORDS]]]


def _first_words(held_out: HeldOutRows, source: int) -> list[int]:
    rows = held_out.rows[source]
    shape = (1, int(rows.lengths[0]))
    batch = Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED))
    rows.fill(0, batch, 0)
    return [int(each) for each in batch.input_ids[0, :FIRST_WORDS]]


def _shown(samples: list[Sample]) -> list[Sample]:
    """Return the samples of the first step, the newest steps and the final ones."""
    steps = sorted({each.step for each in samples if not each.is_final})
    shown_steps = {*steps[:1], *steps[1 - SHOWN_STEPS :]}
    return [each for each in samples if each.is_final or each.step in shown_steps]


def _taken_before(folder: Path) -> list[Sample]:
    """Return this attempt's samples from before a restart."""
    try:
        document = json.loads((folder / f"{NAME}.json").read_text())
    except OSError:
        return []
    return [Sample(**each) for each in document["samples"]]
