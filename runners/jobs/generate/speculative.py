"""One prompt at a time with guessed tokens that the model checks, through transformers' generate.

A guess comes from a smaller model with the same tokenizer, or from the prompt's own repetitions.
The model's passes are watched: one that reads n + 1 tokens checks n guesses, and each pass
writes one token of its own besides the guesses that it accepts.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.generate.static import Answer, Ids, Limits, now
from runners.jobs.runtime import BadInputError
from runners.jobs.tokenizer import tokenizer_digest

NO_END = -1


@dataclass
class Passes:
    """The passes of the checking model over one prompt."""

    read: list[int] = field(default_factory=list)  # tokens that each pass took in
    first_seconds: float = 0.0

    def drafted(self, prompt_tokens: int) -> int:
        """Return how many guesses were checked; the first pass reads the prompt besides."""
        return sum(self.read) - (prompt_tokens - 1) - len(self.read)

    def accepted(self, output_tokens: int) -> int:
        """Return how many written tokens were guessed: each pass wrote one of its own."""
        return max(0, output_tokens - len(self.read))


@dataclass(frozen=True)
class Guessed:
    """One answer with how it came about."""

    answer: Answer
    drafted: int
    accepted: int
    first_seconds: float
    later_seconds: float


@dataclass(frozen=True)
class Guesser:
    """Where guesses come from: a draft model, or without one the text so far."""

    tokens: int  # guessed at a time
    draft: PreTrainedModel | None = None

    def options(self) -> dict[str, Any]:
        """Return what generate is told."""
        if self.draft is None:
            return {"prompt_lookup_num_tokens": self.tokens}
        config = self.draft.generation_config
        config.num_assistant_tokens = self.tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.draft}


def check_draft(
    target: PreTrainedTokenizerFast | None, draft: PreTrainedTokenizerFast | None
) -> None:
    """Refuse a draft model that cuts text into other tokens.

    Raises:
        BadInputError: with the way out.
    """
    if target is None or draft is None or tokenizer_digest(target) != tokenizer_digest(draft):
        msg = (
            "the draft model has another tokenizer than the model, so it cannot guess its "
            "tokens; choose a draft of the same family, or prompt lookup"
        )
        raise BadInputError(msg)


@torch.inference_mode()
def guess_one(model: PreTrainedModel, ids: Ids, guesser: Guesser, limits: Limits) -> Guessed:
    """Answer one prompt as plain greedy generation would, with fewer passes."""
    device = next(model.parameters()).device
    prompt = torch.tensor([list(ids)], device=device)
    passes = Passes()
    writer: Any = model  # transformers types its methods as tensors
    began = now(device)

    def watch(_module: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(passes.read) == 1:
            passes.first_seconds = now(device) - began
        given: torch.Tensor = options["input_ids"] if "input_ids" in options else args[0]
        passes.read.append(int(given.shape[1]))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        found = writer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=limits.output_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(limits.end_ids) or [NO_END],
            **guesser.options(),
        )
    finally:
        handle.remove()
    seconds = now(device) - began
    first = passes.first_seconds or seconds
    answer = Answer()
    written = found[0, len(ids) :].tolist()
    for token in written:
        answer.take(int(token), limits)
    drafted, accepted = passes.drafted(len(ids)), passes.accepted(len(written))
    return Guessed(answer, drafted, accepted, first, seconds - first)
