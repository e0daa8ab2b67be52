"""Continuous batching over a paged cache, with transformers' manager in this process.

By default the manager sizes its cache by the machine's total memory; here it gets the pages that
the planned batch needs. Its results come from a thread, so its liveness is checked.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from runners.jobs.generate.static import Answer, Ids, Limits, StopRequestedError

PAGE_TOKENS = 16
STEP_TOKENS = 512  # token budget of a step: prefill chunks and decoding tokens together
POLL_SECONDS = 0.2
NO_END = -1


class ManagerDiedError(Exception):
    """The manager's thread ended before all prompts were answered."""


@dataclass(frozen=True)
class Pages:
    """The size of the paged cache and of a step."""

    num_blocks: int
    max_batch_tokens: int
    max_requests: int

    @classmethod
    def of(cls, lengths: Sequence[int], output_tokens: int, batch_size: int) -> "Pages":
        """Return the pages for ``batch_size`` of the longest sequences at once."""
        pages_each = math.ceil((max(lengths) + output_tokens) / PAGE_TOKENS)
        return cls(batch_size * pages_each, max(STEP_TOKENS, batch_size), batch_size)

    def bytes(self, model: PreTrainedModel) -> int:
        """Return the bytes of the pages of keys and values."""
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
    """One answered prompt and its timing, from its own first step."""

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
    """Answer all prompts, and call ``on_finished`` for each as it completes.

    Raises:
        StopRequestedError: the job is to stop; unfinished answers are lost.
        ManagerDiedError: the manager failed; the message is its own.
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
        num_open = len(prompts)
        while num_open:
            if limits.should_stop():
                manager.stop(hard_stop=True)
                raise StopRequestedError
            result = manager.get_result(timeout=POLL_SECONDS)
            if result is not None:
                on_finished(_finished(result, limits))
                num_open -= 1
            elif not manager.is_running():
                error = manager.background_thread_status.fatal_error
                raise ManagerDiedError(f"continuous batching ended with {num_open} left: {error}")


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
