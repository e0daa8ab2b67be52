"""Speculative decoding of one prompt at a time, with transformers' generate.

Drafts come from a smaller model with the same tokenizer, or by prompt lookup. A hook counts the
model's passes: a pass over n + 1 tokens verifies n drafts, and each pass adds one token of its own
to the accepted drafts.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from runners.jobs.corpus import tokenizer_digest
from runners.jobs.generate.static import Answer, Ids, Limits, now
from runners.jobs.runtime import BadInputError

NO_END = -1


@dataclass
class Passes:
    """The verifying model's passes over one prompt."""

    read: list[int] = field(default_factory=list)  # tokens per pass
    first_seconds: float = 0.0

    def drafted(self, prompt_tokens: int) -> int:
        """Return the number of verified drafts; the first pass also reads the prompt."""
        return sum(self.read) - (prompt_tokens - 1) - len(self.read)

    def accepted(self, output_tokens: int) -> int:
        """Return the number of accepted drafts: each pass adds one token of its own."""
        return max(0, output_tokens - len(self.read))


@dataclass(frozen=True)
class Guessed:
    """One answer with its draft statistics and timing."""

    answer: Answer
    drafted: int
    accepted: int
    first_seconds: float
    later_seconds: float


@dataclass(frozen=True)
class Guesser:
    """The source of drafts: a draft model, or prompt lookup without one."""

    tokens: int  # drafted per pass
    draft: PreTrainedModel | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of ``generate``."""
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
    """Check that the draft model has the model's tokenizer.

    Raises:
        BadInputError: it has not; the message names an alternative.
    """
    if target is None or draft is None or tokenizer_digest(target) != tokenizer_digest(draft):
        msg = (
            "the draft model has another tokenizer than the model, so it cannot guess its "
            "tokens; choose a draft of the same family, or prompt lookup"
        )
        raise BadInputError(msg)


@torch.inference_mode()
def guess_one(model: PreTrainedModel, ids: Ids, guesser: Guesser, limits: Limits) -> Guessed:
    """Answer one prompt with the same tokens as greedy generation, in fewer passes."""
    device = next(model.parameters()).device
    prompt = torch.tensor([list(ids)], device=device)
    passes = Passes()
    generator: Any = model  # transformers types its methods as tensors
    start = now(device)

    def watch(_module: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(passes.read) == 1:
            passes.first_seconds = now(device) - start
        input_ids: torch.Tensor = options["input_ids"] if "input_ids" in options else args[0]
        passes.read.append(int(input_ids.shape[1]))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        output = generator.generate(
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
    seconds = now(device) - start
    first = passes.first_seconds or seconds
    answer = Answer()
    output_ids = output[0, len(ids) :].tolist()
    for token in output_ids:
        answer.take(int(token), limits)
    drafted, accepted = passes.drafted(len(ids)), passes.accepted(len(output_ids))
    return Guessed(answer, drafted, accepted, first, seconds - first)
