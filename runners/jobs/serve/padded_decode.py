"""Decode steps of fixed row counts, with sampling on the device."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.jobs.memory import release_free_memory, tensor_bytes
from runners.jobs.serve.contract import Choice, Limits, Sampling
from runners.jobs.serve.fused import fuse_kernels
from runners.jobs.serve.paging import (
    PAGE_TOKENS,
    PagedCache,
    TokenRow,
    decode_attention,
    decode_mask,
    pages_for,
)
from runners.jobs.weights import first_line

if TYPE_CHECKING:
    from runners.jobs.serve.grammars import AnswerMatcher

# ---------------------------------------------------------------------------
# Sampling of next tokens on the device, for all rows at once; only the chosen ids come back.
#
# Each answer has a random generator of its own on the host, which gives one number per token: its
# text depends on its seed, not on the answers beside it. A token is the one at which the cumulated
# probabilities pass that number. The order is vLLM's: penalties, temperature, ``min_p``,
# ``top_k``, ``top_p`` of what is left; tokens as likely as the last one that is kept are kept
# too. An answer that is held to a grammar has only its tokens, after the penalties.
# ---------------------------------------------------------------------------


LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
BLOCK = 128  # tokens whose weights are summed first
CANDIDATES = 1024  # sorted at first on a CPU: they usually hold the whole nucleus
SMALLEST_TEMPERATURE = 1e-37  # above fp32's denormal numbers


class Sampler:
    """The sampling of one answer: its parameters, its generator, its tokens so far.

    With a ``matcher`` the answer is held to a grammar.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        matcher: "AnswerMatcher | None" = None,
    ) -> None:
        self.sampling = sampling
        self.matcher = matcher
        self.has_penalty = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
            or bool(sampling.logit_bias)
        )
        self._generator = np.random.default_rng(
            None if sampling.seed is None else sampling.seed % 2**63
        )
        self._counts: Counter[int] = Counter()  # of the answer's tokens; 0 for the prompt's
        if self.has_penalty:
            self._counts.update(dict.fromkeys(prompt, 0))

    def draw(self) -> float:
        """Return the next random number, in [0, 1)."""
        return 0.0 if self.sampling.temperature == 0.0 else float(self._generator.random())

    def add(self, token: int) -> None:
        """Count a token of the answer, and go on in its grammar."""
        if self.has_penalty:
            self._counts[token] += 1
        if self.matcher is not None:
            self.matcher.add(token)

    def counts(self) -> Counter[int]:
        """Return how often each token was generated; the prompt's have 0."""
        return self._counts


class SamplingFilters(NamedTuple):
    """The filters of each row, [rows, 1]."""

    min_p: torch.Tensor  # fp32
    top_k: torch.Tensor  # int64; the whole vocabulary if there is none
    top_p: torch.Tensor  # fp32


@torch.inference_mode()
def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice]:
    """Choose a token for each row of logits [rows, vocabulary]; one copy to the host."""
    requests = [each.sampling for each in samplers]
    penalised = _held(_penalised(_biased(logits, requests), samplers), samplers)
    ids = penalised.argmax(dim=-1)
    if any(each.temperature for each in requests):
        draws = torch.tensor([each.draw() for each in samplers], dtype=torch.float64)
        is_drawn = _column(
            [each.temperature > 0.0 for each in requests], logits.device, torch.bool
        )
        drawn = _drawn(penalised, requests, draws.to(logits.device, non_blocking=True))
        ids = torch.where(is_drawn[:, 0], drawn, ids)
    choices = _choices(logits, ids, requests)
    for sampler, choice in zip(samplers, choices, strict=True):
        sampler.add(choice.token)
    return choices


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return one value per row, [rows, 1]."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)[:, None]


def _biased(logits: torch.Tensor, requests: Sequence[Sampling]) -> torch.Tensor:
    """Return the logits plus the biases of the few tokens that have one."""
    entries = [(row, *each) for row, own in enumerate(requests) for each in own.logit_bias]
    if not entries:
        return logits
    rows, tokens, biases = (
        torch.tensor(each).to(logits.device) for each in zip(*entries, strict=True)
    )
    return logits.index_put((rows, tokens), biases.to(logits.dtype), accumulate=True)


def _penalised(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Return the logits less their penalties; the tokens that have any are few.

    ``repetition_penalty`` counts the prompt, the others do not.
    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1; OpenAI's API reference.
    """
    entries = [
        (row, token, count, each.sampling)
        for row, each in enumerate(samplers)
        for token, count in each.counts().items()
    ]
    if not entries:
        return logits
    rows, tokens = (torch.tensor([each[at] for each in entries]) for at in (0, 1))
    terms = [
        (
            each.repetition_penalty,
            each.frequency_penalty * count + each.presence_penalty * bool(count),
        )
        for _row, _token, count, each in entries
    ]
    places = tuple(each.to(logits.device, non_blocking=True) for each in (rows, tokens))
    factor, term = torch.tensor(terms, dtype=logits.dtype).to(logits.device).unbind(dim=1)
    found = logits[places]
    changed = torch.where(found > 0, found / factor, found * factor) - term
    most = torch.finfo(logits.dtype).max  # of a factor near 0: an infinite logit has no weight
    return logits.index_put(places, changed.clamp(-most, most))


def _held(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Return the logits, minus infinity for tokens that an answer's grammar does not have next."""
    held = [(row, each.matcher) for row, each in enumerate(samplers) if each.matcher is not None]
    if not held:
        return logits
    from runners.jobs.serve.grammars import allowed_tokens

    rows = torch.tensor([row for row, _ in held]).to(logits.device, non_blocking=True)
    some = logits[rows]
    allowed = allowed_tokens([matcher for _, matcher in held], some)
    return logits.index_copy(0, rows, some.masked_fill(~allowed, -torch.inf))


def _drawn(
    logits: torch.Tensor, requests: Sequence[Sampling], draws: torch.Tensor
) -> torch.Tensor:
    """Return a token per row, drawn at its temperature from what its filters leave."""
    device = logits.device
    scaled, weights = _weighted(logits, _column([each.temperature for each in requests], device))
    filtered = [
        row
        for row, each in enumerate(requests)
        if each.temperature and (each.top_p < 1.0 or each.top_k > 0 or each.min_p > 0.0)
    ]
    if filtered:
        rows = torch.tensor(filtered).to(device, non_blocking=True)
        is_all = len(filtered) == len(requests)
        some, theirs = (scaled, weights) if is_all else (scaled[rows], weights[rows])
        lowest = _lowest_kept(some, theirs, [requests[row] for row in filtered])
        theirs.masked_fill_(some < lowest, 0.0)
        if not is_all:
            weights[rows] = theirs
    return _passed(weights, draws[:, None])


def draw_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    draws: torch.Tensor,
    filters: SamplingFilters | None,
) -> torch.Tensor:
    """Return a token per row as ``choose`` does without penalties, from device tensors alone.

    ``temperature`` (0: greedy) and ``draws`` are [rows, 1] in fp64. Which operations run does not
    depend on the values, so that a CUDA graph can hold them.
    """
    scaled, weights = _weighted(logits, temperature.float())
    if filters is not None:
        lowest, _is_enough = _least_of(
            scaled, weights, filters, size=scaled.shape[-1], has_cut=True
        )
        weights = weights.masked_fill(scaled < lowest, 0.0)
    return torch.where(temperature[:, 0] > 0.0, _passed(weights, draws), logits.argmax(dim=-1))


def _weighted(
    logits: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled logits, of which the largest is 0, and the weights of the tokens."""
    warmth = temperature.clamp(min=SMALLEST_TEMPERATURE)
    # Relative to the largest, which avoids overflow at a small temperature.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(warmth)
    return scaled, scaled.exp()


def _passed(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulated weights pass its draw in [0, 1).

    First by blocks, then within one: to cumulate a whole vocabulary takes several times longer.
    """
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % BLOCK))
    blocks = padded.view(len(weights), -1, BLOCK)
    block, rest = _step(blocks.sum(dim=-1, dtype=torch.float64), draws)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    token, _rest = _step(within.double(), rest)
    return (block * BLOCK + token)[:, 0].clamp(max=weights.shape[-1] - 1)  # not in the padding


def _step(weights: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index that each draw passes, and what of its weight is before it, in [0, 1)."""
    cumulated = weights.cumsum(dim=-1)
    below_one = 1.0 - torch.finfo(torch.float64).eps
    goal = cumulated[:, -1:] * draws.clamp(max=below_one)
    index = torch.searchsorted(cumulated, goal, right=True)
    index.clamp_(max=weights.shape[-1] - 1)  # not beyond the end if a logit is NaN
    own = weights.gather(1, index)
    return index, ((goal - (cumulated.gather(1, index) - own)) / own).clamp(0.0, below_one)


def _lowest_kept(
    scaled: torch.Tensor, weights: torch.Tensor, requests: Sequence[Sampling]
) -> torch.Tensor:
    """Return the lowest kept value of each row, [rows, 1]; the largest is 0, its weight 1."""
    device, vocabulary = scaled.device, scaled.shape[-1]
    counts = [each.top_k if 0 < each.top_k < vocabulary else vocabulary for each in requests]
    filters = SamplingFilters(
        _column([each.min_p for each in requests], device),
        _column(counts, device, torch.int64),
        _column([each.top_p for each in requests], device),
    )
    needed = max([count for count in counts if count < vocabulary], default=1)
    # A CPU sorts few at first; a GPU sorts all, since looking at the sum would wait for it.
    has_cut = needed > 1 or min(counts) == 1 or any(each.min_p for each in requests)
    pairs = zip(requests, counts, strict=True)
    is_sure = all(each.top_p == 1.0 or count < vocabulary for each, count in pairs)
    at_first = CANDIDATES if device.type == "cpu" else vocabulary
    size = min(needed if is_sure else max(needed, at_first), vocabulary)
    lowest, is_enough = _least_of(scaled, weights, filters, size=size, has_cut=has_cut)
    if is_sure or size == vocabulary or bool(is_enough):
        return lowest
    return _least_of(scaled, weights, filters, size=vocabulary, has_cut=has_cut)[0]


def _least_of(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    filters: SamplingFilters,
    *,
    size: int,
    has_cut: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest kept value of each row by its ``size`` largest, [rows, 1].

    Also returns whether these hold every nucleus. Without ``has_cut`` no row has ``min_p`` or
    ``top_k``.
    """
    values = scaled.topk(size, dim=-1).values
    lowest = filters.min_p.log()  # -inf without it
    at_count = values.gather(1, (filters.top_k - 1).clamp(max=size - 1))
    is_cut = filters.top_k < scaled.shape[-1]
    least = torch.where(is_cut, torch.maximum(lowest, at_count), lowest)
    kept = values.exp().double().masked_fill(values < least, 0.0)
    kept_weights = weights.masked_fill(scaled < least, 0.0) if has_cut else weights
    total = kept_weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    wanted = total * filters.top_p.double()
    cumulated = kept.cumsum(dim=-1)
    in_nucleus = (cumulated - kept < wanted) & (kept > 0.0)
    last = (in_nucleus.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    nucleus = torch.maximum(least, values.gather(1, last))
    return (
        torch.where(filters.top_p < 1.0, nucleus, least),
        (cumulated[:, -1:] >= wanted).all(),
    )


def _choices(
    logits: torch.Tensor, ids: torch.Tensor, requests: Sequence[Sampling]
) -> list[Choice]:
    """Return the chosen tokens with the logprobs that were asked for, in one copy."""
    logprob_rows = [row for row, each in enumerate(requests) if each.top_logprobs is not None]
    if not logprob_rows:
        return [Choice(token) for token in ids.tolist()]
    rows = torch.tensor(logprob_rows).to(logits.device, non_blocking=True)
    most = min(max(requests[row].top_logprobs or 0 for row in logprob_rows), logits.shape[-1])
    logprobs = torch.log_softmax(logits[rows], dim=-1).clamp(min=LOWEST_LOGPROB)
    own = logprobs.gather(1, ids[rows][:, None])
    values, top = logprobs.topk(most, dim=-1)
    padding = ids.new_zeros(1 + 2 * most, dtype=torch.float64)
    packed = torch.cat([own, values, top], dim=1).double()  # ids below 2^53 are exact
    table = padding.repeat(len(requests), 1).index_copy_(0, rows, packed)
    columns = torch.cat([ids[:, None].double(), table], dim=1).tolist()
    choices = []
    for (token, logprob, *rest), each in zip(columns, requests, strict=True):
        if each.top_logprobs is None:
            choices.append(Choice(int(token)))
            continue
        pairs = zip(map(int, rest[most:]), rest[:most], strict=True)
        choices.append(Choice(int(token), logprob, tuple(pairs)[: each.top_logprobs]))
    return choices


# ---------------------------------------------------------------------------
# Decode steps of fixed row counts, captured as CUDA graphs on a GPU.
# ---------------------------------------------------------------------------


# CUDA graphs of functions without arguments, in one memory pool.
#
# The graphs never run at once, so that each may use the memory of the others' intermediate
# tensors; what a function gives back, it writes to a tensor that was made outside of it.
#
# Source: docs.pytorch.org, CUDA semantics, "CUDA Graphs".


# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.


class CaptureError(Exception):
    """A function could not be captured; the message is the first line of the cause."""


class GraphPool:
    """Captures functions on a GPU, and runs them from their graphs; a CPU calls them."""

    def __init__(self, device: torch.device) -> None:
        self._is_capturing = device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.bytes = 0  # what the graphs have added to the device's reserved memory

    def __len__(self) -> int:
        """Return the number of captured functions."""
        return len(self._graphs)

    def capture(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture a function, unless its key is known.

        It runs once before, so its effects must not add up.

        Raises:
            CaptureError: memory does not suffice, or an operation cannot be captured.
        """
        if not self._is_capturing or key in self._graphs:
            return
        try:
            self._graphs[key] = self._captured(function)
        except RuntimeError as error:  # of memory, of the device, of a missing operation
            raise CaptureError(first_line(error)) from error

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run a function: from its graph, which is captured if it is not yet.

        Raises:
            CaptureError: memory does not suffice, or an operation cannot be captured.
        """
        if not self._is_capturing:
            function()
            return
        self.capture(key, function)
        self._graphs[key].replay()

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function()  # libraries choose kernels and make workspaces, which a capture may not
        current.wait_stream(stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        cause: list[RuntimeError] = []  # the end of a failed capture raises another error
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                try:
                    function()
                except RuntimeError as error:
                    cause.append(error)
                    raise
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own
            raise cause[0] if cause else error from None
        self.bytes += torch.cuda.memory_reserved(self._device) - before
        return graph


LEAST_PAGES = 16  # of a padded context
# The most pages that one step gathers, over those of the cache. Rows of equal length stay below
# it: both sizes of a step at most double. A long sequence and many short ones may not.
GATHERED_RATIO = 4
ALL_TOKENS = 2**31  # as top_k: beyond every vocabulary
Drawing = Literal["greedy", "drawn", "filtered"]


class StepShape(NamedTuple):
    """The size of a step: its rows, and the pages of each one's context."""

    rows: int
    pages: int


def doubling(least: int, most: int) -> tuple[int, ...]:
    """Return ``least``, doubled as long as it is below ``most``, then ``most``."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


class PaddedDecode:
    """One decode step for all running sequences, whatever their number.

    On a CPU it computes the same without a graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        limits: Limits,
        log: Callable[[str], None] = lambda _line: None,
        *,
        fuses: bool = False,
    ) -> None:
        """Reserve the buffers for the limits; ``log`` receives why steps run eagerly after all.

        With ``fuses`` norms and rotary embeddings are compiled, unless that fails.
        """
        device = next(model.parameters()).device
        max_rows = limits.max_concurrency
        most_pages = min(pages_for(limits.max_length), cache.num_pages)
        self.model, self.cache, self.log = model, cache, log
        self._fuses, self._undo_fusion = fuses, _nothing
        self.graphs = GraphPool(device)
        self.row_sizes = doubling(1, max_rows)
        self.page_sizes = doubling(min(LEAST_PAGES, most_pages), most_pages)
        self._room = max(GATHERED_RATIO * cache.num_pages, max_rows * self.page_sizes[0])
        self._inputs = StepInputs(max_rows, self._room, cache.scratch_page, device)
        self._sampling = SamplingInputs(max_rows, device)
        vocabulary = int(model.config.get_text_config().vocab_size)
        self._logits = torch.zeros(max_rows, vocabulary, device=device)
        self._ids = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """Return the bytes of the buffers and the captured graphs."""
        buffers = (self._inputs.device, self._sampling.device, self._logits, self._ids)
        return self.graphs.bytes + sum(map(tensor_bytes, buffers))

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture every number of rows with the shortest contexts; longer ones when they occur.

        Raises:
            CaptureError: a step cannot be captured.
        """
        if self._fuses:
            self._undo_fusion = fuse_kernels(self.model)
        try:
            self._capture_shortest()
        except CaptureError as error:
            if not self._fuses:
                raise
            self.log(f"norms and rotary embeddings are not compiled: {error}")
            self.release()
            self.graphs = GraphPool(self._ids.device)
            self._capture_shortest()

    def release(self) -> None:
        """Leave the model as it was before norms and rotary embeddings were compiled."""
        self._undo_fusion()
        self._undo_fusion = _nothing

    def _capture_shortest(self) -> None:
        for rows in reversed(self.row_sizes):  # smaller ones then fit into the pool's memory
            shape = StepShape(rows, self.page_sizes[0])
            self._inputs.fill((), shape)
            self.graphs.capture(shape, partial(self._forward, shape))
            for drawing in ("drawn", "filtered"):
                self._capture_draw(rows, drawing)

    @torch.inference_mode()
    def step(self, rows: Sequence[TokenRow], samplers: Sequence[Sampler]) -> list[Choice] | None:
        """Return the next token of each row of one token; None: the contexts exceed the buffers.

        The list of a row's pages may only grow from step to step.

        Raises:
            CaptureError: this shape cannot be captured; nothing has changed.
        """
        shape = self.shape_of(rows)
        if shape is None:
            return None
        drawing = _sampling_mode(samplers)
        if drawing is not None:
            self._capture_draw(shape.rows, drawing)  # before a random number is taken
        self._inputs.fill(rows, shape)
        self.graphs.run(shape, partial(self._forward, shape))
        if drawing is None:
            return choose(self._logits[: len(rows)], samplers)
        if drawing != "greedy":
            self._sampling.fill(samplers)
            self.graphs.run((shape.rows, drawing), partial(self._draw, shape.rows, drawing))
        return [Choice(token) for token in self._ids[: len(rows)].tolist()]

    def shape_of(self, rows: Sequence[TokenRow]) -> StepShape | None:
        """Return the smallest shape that holds the rows, or None if there is none."""
        longest = max(pages_for(row.length) for row in rows)
        count = next((size for size in self.row_sizes if size >= len(rows)), None)
        pages = next((size for size in self.page_sizes if size >= longest), None)
        if count is None or pages is None or count * pages > self._room:
            return None
        return StepShape(count, pages)

    def _capture_draw(self, rows: int, drawing: Drawing) -> None:
        if drawing != "greedy":
            self.graphs.capture((rows, drawing), partial(self._draw, rows, drawing))

    def _forward(self, shape: StepShape) -> None:
        """Run the model on the inputs; write the logits and the most likely tokens."""
        tokens, lengths, slots, table = self._inputs.views(shape)
        output: Any = self.model(
            input_ids=tokens[None],
            position_ids=(lengths - 1)[None],
            use_cache=False,
            step=PaddedStep(self.cache, slots, table, lengths),
        )
        logits = self._logits[: shape.rows]
        logits.copy_(output.logits[0])
        self._ids[: shape.rows].copy_(logits.argmax(dim=-1))

    def _draw(self, rows: int, drawing: Drawing) -> None:
        """Write a drawn token for each row of logits."""
        temperature, draws, min_p, top_k, top_p = self._sampling.views(rows)
        filters = SamplingFilters(min_p.float(), top_k.long(), top_p.float())
        has_filters = drawing == "filtered"
        tokens = draw_rows(
            self._logits[:rows], temperature, draws, filters if has_filters else None
        )
        self._ids[:rows].copy_(tokens)


def _nothing() -> None:
    """Do nothing."""


def prepared_decode(
    model: PreTrainedModel,
    cache: PagedCache,
    limits: Limits,
    log: Callable[[str], None],
    *,
    fuses: bool = False,
) -> PaddedDecode | None:
    """Return decode steps with their first graphs captured; None: log why there are none."""
    try:
        decode = PaddedDecode(model, cache, limits, log, fuses=fuses)
        decode.prepare()
    except (CaptureError, torch.OutOfMemoryError) as error:
        log(eager_line(error))
    else:
        log(f"decode steps have {len(decode.graphs)} CUDA graphs and {decode.bytes} bytes")
        return decode
    release_free_memory()
    return None


def eager_line(error: Exception) -> str:
    """Return the log line of a failed capture."""
    return f"decode steps run eagerly, since no CUDA graph could be captured: {first_line(error)}"


class PaddedStep:
    """The attention inputs of a decode step, from the buffers of one shape."""

    def __init__(
        self, cache: PagedCache, slots: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        self.cache, self.slots = cache, slots
        offsets = torch.arange(PAGE_TOKENS, device=table.device)
        self.contexts = (table[:, :, None] * PAGE_TOKENS + offsets).flatten(1)
        self._places = torch.arange(self.contexts.shape[1], device=table.device)
        self._lengths = lengths

    def attend(
        self, layer: int, qkv: Sequence[torch.Tensor], options: dict[str, Any]
    ) -> torch.Tensor:
        """Return [1, rows, heads, size] of queries, keys and values [1, heads, rows, size]."""
        query, key, value = qkv
        keys, values = self.cache.write(layer, self.slots, key, value)
        context = (keys[self.contexts], values[self.contexts])
        mask = decode_mask(self._places, self._lengths, options.get("sliding_window"))
        return decode_attention(query[0].transpose(0, 1), *context, mask, options).contiguous()


class StepInputs:
    """The inputs of a step in one buffer: tokens, lengths and slots of rows, and page tables."""

    def __init__(
        self, max_rows: int, table_pages: int, scratch_page: int, device: torch.device
    ) -> None:
        self._max_rows, self._scratch_page = max_rows, scratch_page
        size = 3 * max_rows + table_pages
        self._host = _host_buffer(size, torch.int64, device)
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        self._columns: np.ndarray[Any, Any] = self._host.numpy()[: 3 * max_rows].reshape(3, -1)
        self._table: np.ndarray[Any, Any] = np.empty((0, 0))
        self._shape = StepShape(0, 0)
        self._pages: list[Sequence[int] | None] = []  # whose pages a row of the table has
        self._counts: list[int] = []  # how many of them

    def views(self, shape: StepShape) -> tuple[torch.Tensor, ...]:
        """Return tokens, lengths and slots [rows] and the page table [rows, pages]."""
        begin = 3 * self._max_rows
        tokens, lengths, slots = self.device[:begin].view(3, -1)[:, : shape.rows]
        table = self.device[begin : begin + shape.rows * shape.pages]
        return tokens, lengths, slots, table.view(shape)

    def fill(self, rows: Sequence[TokenRow], shape: StepShape) -> None:
        """Copy the rows to the device; those after them are padding."""
        if shape != self._shape:
            self._reshape(shape)
        for at, row in enumerate(rows):
            page, offset = divmod(row.start, PAGE_TOKENS)
            slot = row.pages[page] * PAGE_TOKENS + offset
            self._columns[:, at] = row.tokens[0], row.length, slot
            self._write_pages(at, row.pages)
        for at in range(len(rows), shape.rows):
            if self._pages[at] is not None:
                self._pad(at)
        end = 3 * self._max_rows + shape.rows * shape.pages
        self.device[:end].copy_(self._host[:end], non_blocking=True)

    def _reshape(self, shape: StepShape) -> None:
        begin = 3 * self._max_rows
        end = begin + shape.rows * shape.pages
        self._table = self._host.numpy()[begin:end].reshape(shape)
        self._pages, self._counts = [None] * shape.rows, [0] * shape.rows
        self._shape = shape
        self._pad(slice(shape.rows))

    def _pad(self, at: int | slice) -> None:
        columns = np.array([0, 1, self._scratch_page * PAGE_TOKENS])
        self._columns[:, at] = columns[:, None] if isinstance(at, slice) else columns
        self._table[at] = self._scratch_page
        if isinstance(at, int):
            self._pages[at] = None

    def _write_pages(self, at: int, pages: Sequence[int]) -> None:
        """Write what the table's row lacks: all pages of another sequence, else the new ones."""
        if self._pages[at] is not pages:
            self._table[at] = pages[0]  # beyond the length, and masked
            self._pages[at], self._counts[at] = pages, 0
        end = min(len(pages), self._shape.pages)
        if end > (begin := self._counts[at]):
            self._table[at, begin:end] = pages[begin:end]
            self._counts[at] = end


class SamplingInputs:
    """Temperature, random number, ``min_p``, ``top_k`` and ``top_p`` of each row, in fp64."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._host = _host_buffer(5 * max_rows, torch.float64, device).view(max_rows, 5)
        self._host.copy_(torch.tensor([0.0, 0.0, 0.0, ALL_TOKENS, 1.0]))  # padding: greedy
        self.device = self._host.to(device, copy=True)

    def views(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Return each parameter as [rows, 1]."""
        return tuple(self.device[:rows, each : each + 1] for each in range(5))

    def fill(self, samplers: Sequence[Sampler]) -> None:
        """Copy the parameters to the device, with the next random number of each row."""
        table = self._host.numpy()
        for at, sampler in enumerate(samplers):
            request = sampler.sampling
            top_k = request.top_k if request.top_k > 0 else ALL_TOKENS
            table[at] = request.temperature, sampler.draw(), request.min_p, top_k, request.top_p
        count = len(samplers)
        self.device[:count].copy_(self._host[:count], non_blocking=True)


def _sampling_mode(samplers: Sequence[Sampler]) -> Drawing | None:
    """Return the operations that draw every row, or None if some need more than buffers hold."""
    requests = [each.sampling for each in samplers]
    if any(each.has_penalty or each.matcher is not None for each in samplers):
        return None
    if any(each.top_logprobs is not None for each in requests):
        return None
    drawn = [each for each in requests if each.temperature]
    if any(each.top_p < 1.0 or each.top_k > 0 or each.min_p > 0.0 for each in drawn):
        return "filtered"
    return "drawn" if drawn else "greedy"


def _host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros in host memory from which the device copies without waiting."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
