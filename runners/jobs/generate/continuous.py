"""Continuous batching over a paged cache, by transformers' own manager in this process.

The manager would take its cache from the machine's total memory; here it always gets as many
pages as the planned batch needs. Its results come from a thread that may die: that is asked.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from runners.jobs.generate.static import Answer, Ids, Limits, StopRequestedError

PAGE_TOKENS = 16
STEP_TOKENS = 512  # prompts are read in pieces of so many tokens, beside what is decoding
POLL_SECONDS = 0.2
NO_END = -1


class ManagerDiedError(Exception):
    """The manager's thread ended while prompts were waiting for it."""


@dataclass(frozen=True)
class Pages:
    """How large the paged cache is, and how much goes into one step."""

    num_blocks: int
    max_batch_tokens: int
    max_requests: int

    @classmethod
    def of(cls, lengths: Sequence[int], output_tokens: int, batch_size: int) -> "Pages":
        """Return the pages of ``batch_size`` of the longest sequences at once."""
        each = math.ceil((max(lengths) + output_tokens) / PAGE_TOKENS)
        return cls(batch_size * each, max(STEP_TOKENS, batch_size), batch_size)

    def bytes(self, model: PreTrainedModel) -> int:
        """Return what the pages of keys and values hold."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        tokens = self.num_blocks * PAGE_TOKENS
        width = next(model.parameters()).element_size()
        return int(2 * config.num_hidden_layers * heads * size * tokens * width)


@dataclass(frozen=True)
class Finished:
    """One answered prompt and how long it took, from its own first step."""

    at: int
    answer: Answer
    first_seconds: float
    later_seconds: float


def run_continuous(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    pages: Pages,
    limits: Limits,
    on_finished: Callable[[Finished], None],
) -> None:
    """Answer all prompts and hand each over as it is done.

    Raises:
        StopRequestedError: the job is to stop; answers that were not handed over are lost.
        ManagerDiedError: the manager failed, with its own words.
    """
    ends = sorted(limits.end_ids) or [NO_END]
    generation = GenerationConfig(
        max_new_tokens=limits.output_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    batcher: Any = model  # transformers types its methods as tensors
    with batcher.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=_config(pages)
    ) as manager:
        for at, ids in enumerate(prompts):
            manager.add_request(list(ids), str(at), limits.output_tokens, record_timestamps=True)
        left = len(prompts)
        while left:
            if limits.should_stop():
                manager.stop(hard_stop=True)
                raise StopRequestedError
            result = manager.get_result(timeout=POLL_SECONDS)
            if result is not None:
                on_finished(_finished(result, limits))
                left -= 1
            elif not manager.is_running():
                why = manager.background_thread_status.fatal_error
                raise ManagerDiedError(f"continuous batching ended with {left} left: {why}")


def _config(pages: Pages) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=pages.num_blocks,
        max_batch_tokens=pages.max_batch_tokens,
        max_requests_per_batch=pages.max_requests,
        use_cuda_graph=False,
    )


def _finished(result: GenerationOutput, limits: Limits) -> Finished:
    if result.error:
        raise ManagerDiedError(f"prompt {result.request_id}: {result.error}")
    answer = Answer()
    for token in result.generated_tokens:
        answer.take(int(token), limits)
    times = result.timestamps or [result.lifespan[1]]
    first = max(0.0, times[0] - result.lifespan[0])
    return Finished(int(result.request_id), answer, first, times[-1] - times[0])
