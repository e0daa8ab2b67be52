"""Text that the current weights write on the way, and that no step notices.

The lead continues prompts on the whole model, which a divided training gathers as it does for a
validation: so every layout has samples. Modules run as in evaluation, without gradients, and
draws come from a generator of their own, so that losses are the same to the bit without them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.artefacts import publish_report
from runners.jobs.runtime import Job
from runners.jobs.tokenizer import TokenIds
from runners.jobs.train.batches import IGNORED, Batch
from runners.jobs.train.labelled import JudgedLabels
from runners.jobs.train.sources import Judged
from runners.jobspec.text_samples import MOST_PROMPTS, TextSamples

NAME = "samples"
FIRST_WORDS = 16  # tokens of held-out text that are a prompt
SHOWN_STEPS = 8  # the first one, and the newest
PATIENCE_SECONDS = 20.0  # of all prompts together: other ranks wait meanwhile


@dataclass(frozen=True)
class Sample:
    """A prompt and what the weights of a step made of it."""

    step: int
    prompt: str
    continuation: str
    is_final: bool = False  # of the weights that the training leaves


class Sampler:
    """Writes samples when they are due; the lead alone."""

    def __init__(
        self,
        job: Job,
        options: TextSamples,
        tokenizer: PreTrainedTokenizerFast,
        prompts: Sequence[Sequence[int]],
        longest: int,
    ) -> None:
        """Continue ``prompts`` (token ids) to at most ``longest`` tokens in all."""
        self._job, self._options, self._tokenizer = job, options, tokenizer
        self._prompts = [list(each)[-max(1, longest - 1) :] for each in prompts]
        self._longest = longest
        self.taken = _taken_before(job.output_dir(NAME))

    def is_due(self, step: int) -> bool:
        """Tell whether the weights after this step write."""
        return step % self._options.every_steps == 0

    def take(self, model: PreTrainedModel, step: int, *, is_final: bool = False) -> None:
        """Have the model continue every prompt, and publish what it wrote with the step."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        found = []
        for prompt in self._prompts:
            room = min(self._options.max_tokens, self._longest - len(prompt))
            written = continued(model, prompt, room, self._options, deadline)
            said, made = (str(self._tokenizer.decode(each)) for each in (prompt, written))
            found.append(Sample(step, said, made, is_final))
        at = (is_final, step)  # after a restart the same step comes again
        kept = [each for each in self.taken if (each.is_final, each.step) != at]
        self.taken = _shown(sorted([*kept, *found], key=lambda each: (each.is_final, each.step)))
        document = {"samples": [asdict(each) for each in self.taken], "how": self.note()}
        publish_report(self._job, NAME, document)

    def note(self) -> str:
        """Return in words how they are written."""
        asked = self._options
        how = "the likeliest token each time"
        if asked.temperature:
            how = f"drawn at temperature {asked.temperature:g}, seed {asked.seed}"
        return f"at most {asked.max_tokens} tokens, {how}, by the weights after the step"


@torch.no_grad()
def continued(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    options: TextSamples,
    deadline: float,
) -> list[int]:
    """Return at most ``count`` tokens after the prompt, fewer at an end of text or the deadline.

    ``deadline`` is of the monotonic clock, in seconds.
    """
    modes = {module: module.training for module in model.modules()}
    torch.nn.Module.eval(model)
    generator = torch.Generator().manual_seed(options.seed)
    ends = {model.config.eos_token_id} if isinstance(model.config.eos_token_id, int) else set()
    cache, found = DynamicCache(config=model.config), list[int]()
    given = torch.tensor([list(prompt)], device=model.device)
    try:
        while len(found) < count and time.monotonic() < deadline:
            logits = model(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1]
            token = _chosen(logits.float().cpu(), options.temperature, generator)
            if token in ends:
                break
            found.append(token)
            given = torch.tensor([[token]], device=model.device)
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    return found


def _chosen(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return a token for logits [vocabulary]."""
    if not temperature:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))


def prompts_of(
    options: TextSamples,
    tokenizer: PreTrainedTokenizerFast,
    judged: Judged | JudgedLabels | None,
    held_out: TokenIds,
) -> list[list[int]]:
    """Return the prompts in tokens: those asked for, or first words of held-out text."""
    if options.prompts:
        return [list(tokenizer(each)["input_ids"]) for each in options.prompts]
    if isinstance(judged, Judged):
        return [_first_words(judged, at) for at in range(min(MOST_PROMPTS, len(judged.rows)))]
    return [[int(each) for each in held_out[:FIRST_WORDS]]]


def _first_words(judged: Judged, source: int) -> list[int]:
    rows = judged.rows[source]
    shape = (1, int(rows.lengths[0]))
    batch = Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED))
    rows.fill(0, batch, 0)
    return [int(each) for each in batch.input_ids[0, :FIRST_WORDS]]


def _shown(samples: list[Sample]) -> list[Sample]:
    """Return those of the first step, of the newest ones and the final ones."""
    steps = sorted({each.step for each in samples if not each.is_final})
    kept = {*steps[:1], *steps[1 - SHOWN_STEPS :]}
    return [each for each in samples if each.is_final or each.step in kept]


def _taken_before(folder: Path) -> list[Sample]:
    """Return what this attempt had written before it was started again."""
    try:
        found = json.loads((folder / f"{NAME}.json").read_text())
    except OSError:
        return []
    return [Sample(**each) for each in found["samples"]]
