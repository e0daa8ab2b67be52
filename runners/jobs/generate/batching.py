"""Ways to decode: static and continuous batches, speculative and compiled decoding."""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions untyped.
from itertools import count
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

from runners.jobs.corpus import tokenizer_digest
from runners.jobs.generate.stage_model import cache_size
from runners.jobs.generate.static import (
    PLAIN,
    Answer,
    AnswerLimits,
    BatchRun,
    BatchSetup,
    Ids,
    PaddedBatch,
    StopRequestedError,
    check_packable,
    decode_greedily,
    now,
    run_batch,
)
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import first_line
from runners.jobspec import Batching

# ---------------------------------------------------------------------------
# Plans batches from prompt lengths in tokens, with costs calibrated on this host.
# ---------------------------------------------------------------------------


Batch = list[int]


@dataclass(frozen=True)
class CostModel:
    """The cost of a padded batch on this host, in seconds."""

    fixed_seconds: float
    seconds_per_token: float

    def of(self, count: int, longest: int) -> float:
        """Return the seconds of ``count`` prompts padded to ``longest`` tokens."""
        return self.fixed_seconds + self.seconds_per_token * count * longest


def given_batches(lengths: Sequence[int], batch_size: int, _cost: CostModel) -> list[Batch]:
    """Return full batches in the given order."""
    return _cut(range(len(lengths)), batch_size)


def sorted_batches(lengths: Sequence[int], batch_size: int, _cost: CostModel) -> list[Batch]:
    """Return full batches of prompts of similar length."""
    return _cut(_by_length(lengths), batch_size)


def turbo_batches(lengths: Sequence[int], batch_size: int, cost: CostModel) -> list[Batch]:
    """Return the cheapest batches of prompts adjacent in length, by dynamic programming.

    Source: Fang et al. 2021 (TurboTransformers), arXiv:2010.05680, algorithm 3.
    """
    order = _by_length(lengths)
    best = [0.0]  # minimal seconds of the shortest prompts up to here
    begins = [0]  # start of the last of their batches
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        options = [
            (best[begin] + cost.of(end - begin, longest), begin)
            for begin in range(max(0, end - batch_size), end)
        ]
        seconds, begin = min(options)
        best.append(seconds)
        begins.append(begin)
    return _traced(order, begins)


POLICIES: Mapping[Batching, Callable[[Sequence[int], int, CostModel], list[Batch]]] = {
    "given": given_batches,
    "sorted": sorted_batches,
    "turbo": turbo_batches,
    "packed": sorted_batches,  # no padding in the prefill, and little when decoding
}


def padding_ratio(batches: Sequence[Batch], lengths: Sequence[int]) -> float:
    """Return the share of padding in the padded prompts."""
    padded = sum(len(each) * max(lengths[at] for at in each) for each in batches)
    return 1.0 - sum(lengths[at] for each in batches for at in each) / padded if padded else 0.0


def _by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda at: (lengths[at], at))


def _cut(order: Sequence[int], batch_size: int) -> list[Batch]:
    return [list(order[at : at + batch_size]) for at in range(0, len(order), batch_size)]


def _traced(order: Sequence[int], begins: Sequence[int]) -> list[Batch]:
    batches: list[Batch] = []
    end = len(order)
    while end:
        batches.append(list(order[begins[end] : end]))
        end = begins[end]
    return batches[::-1]


# Calibration of the batch cost model on this host, by short runs before the first batch.


ROUNDS = 2
STEPS = 3  # tokens of a short run: one from the prefill, two decoded


def warm_up(model: PreTrainedModel, prompts: Sequence[Ids], setup: BatchSetup = PLAIN) -> None:
    """Generate a few tokens for the shortest prompt, to exclude lazy loading from the timing."""
    run_batch(model, [min(prompts, key=len)], AnswerLimits(STEPS), setup)


def measured_cost(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    batch_size: int,
    output_tokens: int,
    setup: BatchSetup = PLAIN,
) -> CostModel:
    """Return the constants of ``cost = fixed + per_token * count * longest``.

    The prefill is timed for one short prompt and for a full batch of the longest; the part of a
    decode step that does not depend on the batch size is in ``fixed``.
    """
    ordered = sorted(prompts, key=len)
    small, large = ordered[:1], ordered[-batch_size:]
    few, many = _best(model, small, setup), _best(model, large, setup)
    prefill = line(
        (len(small[0]), few.prefill_seconds),
        (len(large) * len(large[-1]), many.prefill_seconds),
    )
    decode = line((1, _step(few)), (len(large), _step(many)))
    fixed = prefill[0] + decode[0] * (output_tokens - 1)
    return CostModel(fixed, prefill[1])


def line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Return intercept and slope through two points, neither negative."""
    (x1, y1), (x2, y2) = first, second
    if x1 == x2:
        return 0.0, min(y1, y2) / x1
    slope = max(0.0, (y2 - y1) / (x2 - x1))
    return max(0.0, y1 - slope * x1), slope


def _best(model: PreTrainedModel, prompts: Sequence[Ids], setup: BatchSetup) -> BatchRun:
    runs = [run_batch(model, prompts, AnswerLimits(STEPS), setup) for _ in range(ROUNDS)]
    return min(runs, key=lambda run: run.prefill_seconds + run.decode_seconds)


def _step(run: BatchRun) -> float:
    return run.decode_seconds / run.num_steps


# ---------------------------------------------------------------------------
# Continuous batching over a paged cache, with transformers' manager in this process.
#
# By default the manager sizes its cache by the machine's total memory; here it gets the pages that
# the planned batch needs. Its results come from a thread, so its liveness is checked.
# ---------------------------------------------------------------------------


PAGE_TOKENS = 16
STEP_TOKENS = 512  # token budget of a step: prefill chunks and decoding tokens together
POLL_SECONDS = 0.2
NO_END = -1


class ManagerDiedError(Exception):
    """The manager's thread ended before all prompts were answered."""


@dataclass(frozen=True)
class PagePlan:
    """The size of the paged cache and of a step."""

    num_blocks: int
    max_batch_tokens: int
    max_requests: int

    @classmethod
    def of(cls, lengths: Sequence[int], output_tokens: int, batch_size: int) -> "PagePlan":
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
class FinishedAnswer:
    """One answered prompt and its timing, from its own first step."""

    at: int
    answer: Answer
    first_seconds: float
    later_seconds: float


def run_continuous(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    pages: PagePlan,
    limits: AnswerLimits,
    on_finished: Callable[[FinishedAnswer], None],
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


def _config(pages: PagePlan) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=pages.num_blocks,
        max_batch_tokens=pages.max_batch_tokens,
        max_requests_per_batch=pages.max_requests,
        use_cuda_graph=False,
    )


def _finished(result: GenerationOutput, limits: AnswerLimits) -> FinishedAnswer:
    if result.error:
        raise ManagerDiedError(f"prompt {result.request_id}: {result.error}")
    answer = Answer()
    for token in result.generated_tokens:
        answer.take(int(token), limits)
    times = result.timestamps or [result.lifespan[1]]
    first = max(0.0, times[0] - result.lifespan[0])
    return FinishedAnswer(int(result.request_id), answer, first, times[-1] - times[0])


# ---------------------------------------------------------------------------
# Speculative decoding of one prompt at a time, with transformers' generate.
#
# Drafts come from a smaller model with the same tokenizer, or by prompt lookup. A hook counts the
# model's passes: a pass over n + 1 tokens verifies n drafts, and each pass adds one token of its
# own to the accepted drafts.
# ---------------------------------------------------------------------------


@dataclass
class VerificationPasses:
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
class SpeculativeResult:
    """One answer with its draft statistics and timing."""

    answer: Answer
    drafted: int
    accepted: int
    first_seconds: float
    later_seconds: float


@dataclass(frozen=True)
class DraftSource:
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
        BadInputError: the tokenizers differ; the message names an alternative.
    """
    if target is None or draft is None or tokenizer_digest(target) != tokenizer_digest(draft):
        msg = (
            "the draft model has another tokenizer than the model, so it cannot draft its "
            "tokens; choose a draft of the same family, or prompt lookup"
        )
        raise BadInputError(msg)


@torch.inference_mode()
def decode_speculatively(
    model: PreTrainedModel, ids: Ids, draft_source: DraftSource, limits: AnswerLimits
) -> SpeculativeResult:
    """Answer one prompt with the same tokens as greedy generation, in fewer passes."""
    device = next(model.parameters()).device
    prompt = torch.tensor([list(ids)], device=device)
    passes = VerificationPasses()
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
            **draft_source.options(),
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
    return SpeculativeResult(answer, drafted, accepted, first, seconds - first)


# ---------------------------------------------------------------------------
# A compiled decode step with a static cache.
#
# Prefill is not compiled, because each length would be compiled again. Incomplete batches are
# filled with copies of the first prompt, whose answers are dropped. On a GPU the step is one
# CUDA graph: positions are tensors, and cache and chosen tokens stay on the device.
#
# Source: Wang et al. 2021 (LightSeq), arXiv:2010.13887; Li et al. 2021 (EET), arXiv:2104.12470.
# ---------------------------------------------------------------------------


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CompiledStep:
    """Batches of at most ``rows`` prompts and ``length`` tokens with one compiled step.

    Raises:
        BadInputError: a layer's cache is not a plain KV cache.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        check_packable(model)
        self.model, self.rows, self.length = model, rows, length
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.plain_reason = ""  # why the step is not compiled after all
        self._has_graph = next(model.parameters()).device.type == "cuda"
        self._compiled: Step = torch.compile(
            self.forward,
            fullgraph=True,
            dynamic=False,
            mode="reduce-overhead" if self._has_graph else None,
        )

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [rows, new] through the model and return the next one of each row."""
        output: Any = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: torch.Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens

    @torch.inference_mode()
    def run_batch(self, prompts: Sequence[Ids], limits: AnswerLimits) -> BatchRun:
        """Answer the prompts as one padded batch.

        Raises:
            StopRequestedError: the job is to stop; nothing of this batch is kept.
        """
        device = next(self.model.parameters()).device
        filled = [*prompts, *[prompts[0]] * (self.rows - len(prompts))]
        padded = PaddedBatch.of(filled, device)
        self._reset_cache()
        began = now(device)
        is_text, at = self._text_places(filled, device), padded.ids.shape[1]
        tokens = self.forward(padded.ids, self._mask(is_text, 0, at), padded.positions)
        prefilled = now(device)
        places = count(at)

        def step(last: torch.Tensor) -> torch.Tensor:
            padded.advance()
            mask = self._mask(is_text, next(places), 1)
            return self._step(last, mask, padded.positions)

        answers, steps = decode_greedily(
            tokens, len(prompts), limits, step, queues_ahead=tokens.is_cuda
        )
        ended = now(device)
        size = cache_size(self.cache)
        return BatchRun(answers, prefilled - began, ended - prefilled, steps, size)

    def _step(
        self, last: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run the compiled step; if it does not compile, the plain one from now on."""
        if self._has_graph:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            tokens = self._compiled(last, mask, positions)
        except TorchDynamoException as error:  # before the step has changed the cache
            self.plain_reason = first_line(getattr(error, "inner_exception", error))
            self._compiled, self._has_graph = self.forward, False
            return self.forward(last, mask, positions)
        # A graph writes each step's tokens to one place.
        return tokens.clone() if self._has_graph else tokens

    def _reset_cache(self) -> None:
        layers: list[Any] = list(self.cache.layers)  # all of them StaticLayer, as checked
        for layer in layers:
            if layer.is_initialized:
                layer.reset()

    def _text_places(self, prompts: Sequence[Ids], device: torch.device) -> torch.Tensor:
        """Return which cache positions [rows, length] will hold text."""
        longest = max(map(len, prompts))
        begins = torch.tensor([[longest - len(each)] for each in prompts], device=device)
        return torch.arange(self.length, device=device)[None] >= begins

    def _mask(self, is_text: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return the mask of ``count`` new tokens [rows, 1, count, length]: causal, no padding.

        Padding attends to itself, because a softmax over nothing is NaN.
        """
        places = torch.arange(self.length, device=is_text.device)
        new_places = places[begin : begin + count, None]
        causal = (places[None] <= new_places)[None, None] & is_text[:, None, None]
        return causal | (places[None] == new_places)[None, None]
