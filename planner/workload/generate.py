"""Batch generation, and the sequences that fit in memory at once."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import cycle
from typing import NamedTuple, cast

from planner.catalog.engines import refusal
from planner.catalog.models import get_model
from planner.cost.communication import StageShare
from planner.cost.kv_cache import cached_tokens_by_layer_group, read_tokens_by_layer_group
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.parameters import count_parameters
from planner.cost.quantity import (
    Flag,
    Ledger,
    NullLedger,
    Quantity,
    any_of,
    both,
    ceil,
    equation,
    floor,
    maximum,
    minimum,
    negate,
    where,
)
from planner.cost.queueing import speculative_gap, tokens_per_round
from planner.cost.roofline import decode_pairs_by_layer_group, pairs_by_layer_group
from planner.cost.weights import WIDE
from planner.specs.base import NotCoveredError, NotPossibleError, UnknownModelError
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload, ServeWorkload, SpeculativeSpec, Strategy
from planner.workload.forward import PassCost, forward_pass
from planner.workload.inference_memory import (
    MemoryLoad,
    default_requests,
    inference_memory,
    stage_limits,
    step_activation_bytes,
    step_cache_bytes,
    usable_bytes,
)
from planner.workload.layouts import Layout
from planner.workload.offloading import attends_on_host
from planner.workload.operators import ForwardPass
from planner.workload.outcome import Outcome, performance_of
from planner.workload.resolve import default_activation_dtype, default_group
from planner.workload.setting import Setting

# ---------------------------------------------------------------------------
# Offline generation in fixed batches, and decoding with speculation by a draft model.
# ---------------------------------------------------------------------------


ROUNDING = 1e-6  # tolerance for quotients of whole numbers


def prefill_pass(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of reading ``tokens`` tokens of each of ``sequences`` new sequences.

    ``cached`` earlier tokens are in the KV cache: they are attended to, not computed. The
    ``sequences`` of one replica are split over its data-parallel attention ranks.
    """
    return forward_pass(setting, ledger, prefill_work(setting, sequences, tokens, cached))


def prefill_work(
    setting: Setting, sequences: float, tokens: float, cached: float = 0.0
) -> ForwardPass:
    """Return the work of a prefill pass."""
    model, ranks = setting.model, setting.layout.context
    per_rank = _per_rank(setting, sequences)
    steps = _chunks(setting, per_rank * tokens)
    # The k-th of n chunks attends to the cached tokens and to k/n of the prompt.
    context = cached + tokens * (steps + 1) / (2 * steps)
    pairs = pairs_by_layer_group(model, cached + tokens)
    if cached:
        pairs = pairs + -1 * pairs_by_layer_group(model, cached)
    return ForwardPass(
        group="prefill",
        sequences=per_rank,
        new_tokens=per_rank * tokens / ranks,
        token_pairs=per_rank / ranks * pairs,
        read_layer_tokens=per_rank
        * steps
        * cached_tokens_by_layer_group(model, context, paged=False),
        sampled_tokens=per_rank,
        routed_tokens=sequences * tokens,
        steps=steps,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=per_rank * cached_tokens_by_layer_group(model, tokens, paged=False),
        stored_layer_tokens=per_rank * cached_tokens_by_layer_group(model, tokens, paged=False),
    )


@equation(
    "o = (m + p - 1) / (m · p)",
    unit="",
    symbols={"chunks": "m", "stages": "p"},
    source="Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2.3",
)
def pipeline_share(*, chunks: Quantity, stages: Quantity) -> Quantity:
    """Return the time of pipelined chunks as a share of one device's time for all of them."""
    return (chunks + stages - 1) / (chunks * stages)


def decode_pass(
    setting: Setting, ledger: Ledger, sequences: float, context: float, drafted: float = 0.0
) -> PassCost:
    """Return the cost of one decode step of ``sequences`` sequences at the mean context.

    To verify ``drafted`` tokens per sequence, the pass computes ``drafted`` + 1 tokens each.
    """
    return forward_pass(setting, ledger, decode_work(setting, sequences, context, drafted))


def decode_work(
    setting: Setting, sequences: float, context: float, drafted: float = 0.0
) -> ForwardPass:
    """Return the work of one decode step."""
    tokens_each = 1 + drafted
    ranks = setting.layout.context
    per_rank = _per_rank(setting, sequences)
    read = per_rank / ranks * read_tokens_by_layer_group(setting.model, context)
    # Attention over the offloaded cache runs on the host, the rest on the device.
    device_share = 1 - setting.offload.kv_share if attends_on_host(setting) else 1.0
    queries, pairs = (
        tokens_each * per_rank / ranks,
        decode_pairs_by_layer_group(setting.model, context),
    )
    tokens = tokens_each * where(ranks > 1, maximum(1.0, per_rank / ranks), per_rank)
    return ForwardPass(
        group="decode",
        sequences=per_rank,
        new_tokens=tokens,
        token_pairs=queries * device_share * pairs,
        read_layer_tokens=device_share * read,
        sampled_tokens=tokens,
        routed_tokens=tokens_each * sequences,
        host_token_pairs=queries * (1 - device_share) * pairs,
        absorbed=True,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=read,
        stored_layer_tokens=per_rank
        * cached_tokens_by_layer_group(setting.model, 1.0, paged=False),
    )


def micro_batches(setting: Setting, batch: float) -> float:
    """Return the number of micro-batches of a batch, 1 unless configured."""
    micro = setting.strategy.micro_batch_size
    return 1.0 if micro is None else ceil(batch / micro)


def _blocks(setting: Setting, sequences: float) -> float:
    """Return the number of micro-batches per load of streamed weights."""
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload) or setting.strategy.micro_batch_size is None:
        return 1.0
    return ceil(replica_batch(setting, workload) / sequences - ROUNDING)


def _per_rank(setting: Setting, sequences: float) -> float:
    """Return the sequences of the busiest data-parallel attention rank."""
    ranks = setting.layout.attention_data
    return where(ranks > 1, maximum(1.0, sequences / ranks), sequences)


def _chunks(setting: Setting, tokens: float) -> float:
    """Return the number of prefill steps of a rank, given the token budget per step."""
    layout = setting.layout
    if not any_of(layout.chunked):
        return engine_chunks(setting, tokens)
    budget_chunks = maximum(1.0, ceil(tokens / maximum(1.0, layout.batch_tokens)))
    return where(layout.chunked, budget_chunks, engine_chunks(setting, tokens))


def engine_chunks(setting: Setting, tokens: float) -> float:
    """Return the parts in which an engine computes the prompt tokens of one step."""
    most = setting.engine.prompt_chunk_tokens
    return maximum(1.0, ceil(tokens / most)) if most else 1.0


def _prefill(setting: Setting, ledger: Ledger, batch: float, tokens: float) -> PassCost:
    """Return the cost of prefill; pipeline stages process different chunks in parallel."""
    whole = prefill_pass(setting, ledger, batch, tokens)
    chunks = _chunks(setting, _per_rank(setting, batch) * tokens)
    stages = setting.layout.pipeline
    if not any_of(both(stages > 1, chunks > 1)):
        return whole
    share = ledger.term(
        pipeline_share,
        setting.line("prefill", "Chunks in a pipeline"),
        chunks=chunks,
        stages=whole.concurrent_passes(stages),
    )
    return whole.scaled(share)


def generate(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of generating one batch."""
    batch = replica_batch(setting, workload)
    micro = batch / micro_batches(setting, batch)
    memory = inference_memory(setting, ledger, batch_load(setting, workload))
    prefill = _prefill(setting, ledger, micro, workload.input_tokens)
    context = workload.input_tokens + workload.output_tokens / 2
    decode = decode_pass(setting, ledger, micro, context)
    steps = workload.output_tokens - 1
    latency = prefill.total_s + steps * decode.total_s
    token_rate = workload.batch_size * workload.output_tokens / latency
    decodes = steps * decode.total_s > prefill.total_s
    communication_s = prefill.communication_s + steps * decode.communication_s
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class={
            name: where(decodes, seconds, prefill.by_class[name])
            for name, seconds in decode.by_class.items()
        },
        phases={"prefill": prefill.by_class, "decode": decode.by_class},
        energy_tokens_per_second=token_rate,
        performance=performance_of(
            tokens_per_second=token_rate,
            output_tokens_per_second=token_rate,
            prefill_tokens_per_second=workload.batch_size
            * workload.input_tokens
            / prefill.total_s,
            decode_tokens_per_second=workload.batch_size / decode.total_s if steps else None,
            tokens_per_second_per_device=token_rate / setting.layout.devices,
            requests_per_second=workload.batch_size / latency,
            ttft_seconds=prefill.total_s,
            tpot_seconds=decode.total_s if steps else None,
            latency_seconds=latency,
            prefill_seconds=prefill.total_s,
            communication_ratio=communication_s / latency,
        ),
    )


def replica_batch(setting: Setting, workload: GenerateWorkload) -> float:
    """Return the sequences of the busiest replica; each of its attention ranks has whole ones.

    The share of unlike replicas is a fraction of the batch, which stays as it is.
    """
    size: float = workload.batch_size
    batch = size / setting.layout.data
    if not isinstance(size, int):
        return batch
    ranks = setting.layout.attention_data
    return ranks * ceil(batch / ranks - ROUNDING)


def batch_load(setting: Setting, workload: GenerateWorkload) -> MemoryLoad:
    """Return the memory load of one replica with all sequences of its batch.

    A step holds at most the token budget of an engine that computes prompts in chunks.
    """
    batch = replica_batch(setting, workload)
    per_rank = _per_rank(setting, batch)
    micro = per_rank / micro_batches(setting, batch)
    prompts, budget = micro * workload.input_tokens, setting.layout.batch_tokens
    return MemoryLoad(
        per_rank,
        workload.input_tokens + workload.output_tokens,
        where(budget > 0, maximum(micro, minimum(prompts, budget)), prompts),
        micro,
        paged=False,
        waiting_tokens=(per_rank - micro) * workload.input_tokens,
        prompt_tokens=workload.input_tokens if setting.engine.grows_cache else None,
    )


# Decoding with or without speculation by a draft model: time per token and memory.
#
# The draft model runs on the devices of the target, token by token; then one pass of the target
# verifies the drafted tokens of all requests and adds one token. Draft weights and KV cache are in
# device memory in addition to the target's.


GROUP = "speculation"
VOCABULARY_SLACK = 0.02  # padded vocabularies of one tokenizer differ by less


@dataclass(frozen=True)
class DecodeCost:
    """The cost of a token of each sequence, the seconds of the whole step, and its tokens."""

    per_token: PassCost
    step_s: float
    tokens: float = 1.0


def decode_cost(setting: Setting, ledger: Ledger, sequences: float, context: float) -> DecodeCost:
    """Return the cost of decoding: one pass per token, or draft and verify rounds."""
    guess = setting.strategy.speculative
    if guess is None:
        plain = decode_pass(setting, ledger, sequences, context)
        return DecodeCost(plain, plain.total_s)
    verify = decode_pass(setting, ledger, sequences, context, drafted=float(guess.tokens))
    draft = decode_pass(draft_of(setting, guess), NullLedger(), sequences, context)
    round_tokens = ledger.term(
        tokens_per_round,
        setting.line(GROUP, "Tokens made in a round", key="round_tokens"),
        acceptance_ratio=guess.acceptance_ratio,
        drafted_tokens=guess.tokens,
    )
    gap = ledger.term(
        speculative_gap,
        setting.line(GROUP, "Seconds per token of a round", key="speculative_gap"),
        drafted_tokens=guess.tokens,
        draft_s=draft.total_s,
        verify_s=verify.total_s,
        round_tokens=round_tokens,
    )
    return DecodeCost(
        _combined_cost(verify, draft, float(guess.tokens), 1 / round_tokens),
        gap * round_tokens,
        round_tokens,
    )


def prefill_cost(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of prefill, with that of the draft model."""
    target = prefill_pass(setting, ledger, sequences, tokens, cached)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = prefill_pass(draft_of(setting, guess), NullLedger(), sequences, tokens, cached)
    return _combined_cost(target, draft, 1.0, 1.0)


def held_memory(setting: Setting, ledger: Ledger, load: MemoryLoad) -> MemoryUse:
    """Return the memory of a replica, with the draft's weights and KV cache."""
    target = inference_memory(setting, ledger, load)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = inference_memory(draft_of(setting, guess), NullLedger(), load).stages[0].by_class
    draft_bytes = {name: draft[name] for name in ("weights", "kv_cache")}
    stages = tuple(
        StageMemory({name: size + draft_bytes.get(name, 0.0) for name, size in by_class.items()})
        for by_class in (stage.by_class for stage in target.stages)
    )
    return replace(target, stages=stages)


# Heads that are trained on the states of one target. Sources: the methods of vLLM's
# speculative_config (vllm/config/speculative.py) and SGLang's --speculative-algorithm.
DRAFT_HEADS = re.compile(
    r"eagle|medusa|hydra|nextn|mlp.?speculator|(?<![a-z])mtp(?![a-z])", re.IGNORECASE
)
DRAFTS = "name a smaller model of the target's family in the catalog, or leave speculative out"


def draft_of(setting: Setting, guess: SpeculativeSpec) -> Setting:
    """Return the setting of the draft model: the target's devices and split, its own weights.

    A draft whose name or config states a format has the weights of its checkpoint, any other has
    16 bits.

    Raises:
        UnknownModelError: the catalog has no such draft model.
        NotCoveredError: it is a draft head.
        NotPossibleError: the draft's vocabulary differs from the target's, or the engine refuses
            the draft's format.
        NotCoveredError: the target is split into pipeline stages.
    """
    target, field = setting.model, "strategy.speculative.draft_model"
    if DRAFT_HEADS.search(guess.draft_model):
        raise NotCoveredError(
            f"draft_model is {guess.draft_model!r}: draft heads (EAGLE, MTP, Medusa), which read "
            f"the states of their target, are not modelled; {DRAFTS}",
            field,
        )
    try:
        model = get_model(guess.draft_model)
    except UnknownModelError as error:
        nearest = ", ".join(error.nearest) or "none"
        raise UnknownModelError(
            f"draft_model is {guess.draft_model!r}, which is no model of the catalog (nearest: "
            f"{nearest}); {DRAFTS}",
            field,
            nearest=error.nearest,
        ) from error
    if abs(model.vocab_size / target.vocab_size - 1) > VOCABULARY_SLACK:
        raise NotPossibleError(
            f"draft_model {model.id} has {model.vocab_size} tokens in its vocabulary, {target.id} "
            f"has {target.vocab_size}: choose a draft of the target's family",
            field,
        )
    if any_of(setting.layout.pipeline > 1):
        raise NotCoveredError(
            f"a draft model with pipeline_parallel_size {setting.layout.pipeline} cannot be "
            "costed yet: use tensor_parallel_size instead",
            "strategy.pipeline_parallel_size",
        )
    plain = {"sparsity": None, "offload": None, "speculative": None}
    strategy = setting.strategy.model_copy(update={**plain, **_draft_formats(setting, model)})
    whole = setting.layout
    layout = Layout(
        data=whole.data,
        tensor=whole.tensor,
        batch_tokens=whole.batch_tokens,
        chunked=whole.chunked,
    )
    return replace(
        setting,
        model=model,
        counts=count_parameters(model),
        strategy=strategy,
        layout=layout,
    )


def _draft_formats(setting: Setting, model: ModelSpec) -> dict[str, object]:
    """Return the weight format of a draft's checkpoint, and the activations that follow from it.

    Raises:
        NotPossibleError: the engine refuses them.
    """
    weight = model.weight_dtype or "bf16"
    if weight in WIDE:
        wide = {"weight_dtype": "bf16", "activation_dtype": "bf16"}
        return {**wide, "quantization": None, "group_size": None}
    activation = default_activation_dtype(weight, setting.device)
    formats = (weight, activation, setting.strategy.kv_cache_dtype)
    refused = refusal(setting.engine, setting.device, model, formats)
    if refused is not None:
        named = "" if refused.field == "model" else f"draft_model {model.id}: "
        raise NotPossibleError(f"{named}{refused.message}", "strategy.speculative.draft_model")
    stored = model.quantization or ""
    own = Strategy(weight_dtype=weight, quantization=stored if ":" in stored else None)
    return {
        "weight_dtype": weight,
        "activation_dtype": activation,
        "quantization": own.quantization,
        "group_size": default_group(own, model, weight, setting.engine),
    }


def _combined_cost(first: PassCost, second: PassCost, times: float, scale: float) -> PassCost:
    """Return ``first`` plus ``times`` passes of ``second``, multiplied by ``scale``."""
    return PassCost(
        compute_s=(first.compute_s + times * second.compute_s) * scale,
        memory_s=(first.memory_s + times * second.memory_s) * scale,
        communication_s=(first.communication_s + times * second.communication_s) * scale,
        overhead_s=(first.overhead_s + times * second.overhead_s) * scale,
        total_s=(first.total_s + times * second.total_s) * scale,
        flops=(first.flops + times * second.flops) * scale,
    )


# ---------------------------------------------------------------------------
# The number of concurrent requests of a serving workload that fit in memory.
# ---------------------------------------------------------------------------


MAX_SEARCHED_CONCURRENCY = 4096
UNLIMITED = 1e9  # requests, where each takes no memory of a tier
LAST_SEGMENT = 3  # of a step's bytes by requests
CHORDS = 4  # steps to the limit of a convex peak
CAPACITY_ROUNDING = 1e-9  # tolerance for quotients of whole numbers


class HeldRequests(NamedTuple):
    """The full-length requests of one replica that fit in memory.

    ``whole`` has whole requests on every data-parallel attention rank: it is a multiple of the
    ranks, or 0. ``mean`` is the mean over the ranks, which a queue that is never empty fills.
    """

    whole: float
    mean: float


def max_concurrency(setting: Setting, workload: ServeWorkload) -> float:
    """Return the number of full-length requests that fit in one replica's memory."""
    return held_at_once(setting, workload).whole


def fits_one_request(setting: Setting, workload: ServeWorkload) -> Flag:
    """Return whether ``max_concurrency`` is at least 1, at a fraction of its cost."""
    one = _memory_use(setting, workload, 1.0)
    fits = _is_within_limits(setting, one)
    if workload.max_request_tokens:
        fits = both(fits, _is_within_limits(setting, _longest_use(setting, workload)))
    if any_of(one.host_bytes > 0) or any_of(one.disk_bytes > 0):
        uses = [one, _memory_use(setting, workload, 2.0)]
        fits = both(fits, _room_in_tiers(setting, uses) >= 1)
    return fits


def _is_within_limits(setting: Setting, use: MemoryUse) -> Flag:
    """Return whether every stage of a use stays within the memory that the engine may use."""
    fits: Flag = True
    limits = [usable for _, usable in stage_limits(setting)] or [usable_bytes(setting)]
    for stage, usable in zip(use.stages, cycle(limits), strict=False):
        fits = both(fits, stage.peak_bytes <= usable)
    return fits


def _longest_use(setting: Setting, workload: ServeWorkload) -> MemoryUse:
    """Return the memory with one request of the stated maximum length on each rank.

    An engine does not start with a longer maximum than its cache holds: vllm-project/vllm, pull
    request 2163 and issue 2418.
    """
    return held_memory(setting, NullLedger(), longest_load(setting, workload))


def longest_load(setting: Setting, workload: ServeWorkload) -> MemoryLoad:
    """Return the memory load of one request of the longest stated length on each rank."""
    load = memory_load(setting, workload, setting.layout.attention_data)
    longest = float(workload.max_request_tokens or load.tokens_per_sequence)
    return replace(load, tokens_per_sequence=longest)


def held_at_once(setting: Setting, workload: ServeWorkload) -> HeldRequests:
    """Return the full-length requests that fit in one replica's memory.

    The result is cached, because a search needs it twice per setting: to check the fit and to cost
    it.
    """
    if workload is not setting.workload:
        return _held(setting, workload)
    return setting.cached_cost("held_at_once", lambda: _held(setting, workload))


def _held(setting: Setting, workload: ServeWorkload) -> HeldRequests:
    ranks = setting.layout.attention_data
    room = reduce(minimum, max_concurrency_by_stage(setting, workload))
    if workload.max_request_tokens:
        room = where(_is_within_limits(setting, _longest_use(setting, workload)), room, 0.0)
    whole = ranks * floor(maximum(0.0, room) / ranks + CAPACITY_ROUNDING)
    return HeldRequests(whole, where(whole > 0, floor(room), 0.0))


def max_concurrency_by_stage(setting: Setting, workload: ServeWorkload) -> Iterator[float]:
    """Yield the full-length requests that fit on each stage, as a mean over the ranks.

    The peak of a stage grows linearly from the first request on: by its cache and by the logits of
    one more sampled token. Steps grow too once more requests run than a prompt has tokens.
    """
    ranks = setting.layout.attention_data
    uses = [_memory_use(setting, workload, requests) for requests in (1.0, 2.0)]
    steps = Steps(setting, workload)
    offloaded = ranks * _room_in_tiers(setting, uses)
    stages = zip(uses[0].stages, uses[1].stages, _layer_shares(setting, uses[0]), strict=True)
    uniform = [(setting.device.memory_bytes, usable_bytes(setting))] * len(uses[0].stages)
    limits = stage_limits(setting) or uniform
    for (one, two, share), (_, usable) in zip(stages, limits, strict=True):
        first = one.peak_bytes
        start = steps.segment(0)
        cache = two.peak_bytes - first - start.each.of(share)
        peaks = Peaks(first - start.at_start.of(share) - cache, cache, share, steps)
        yield minimum(offloaded, ranks * _requests(usable, peaks))


class StepBytes(NamedTuple):
    """The bytes that depend on the tokens of a step, on one device.

    ``activations`` are the same on every stage; ``cache`` are those of all layers.
    """

    activations: float
    cache: float

    def of(self, layers: float) -> float:
        """Return the bytes on a stage with this share of the layers."""
        return self.activations + layers * self.cache

    def less(self, other: "StepBytes") -> "StepBytes":
        """Return the difference of both."""
        return StepBytes(self.activations - other.activations, self.cache - other.cache)


class Segment(NamedTuple):
    """Requests of one rank between which the tokens of a step grow alike, or not at all.

    ``at_start`` are a step's bytes there, and ``each`` those of one more request.
    """

    start: float
    end: float
    at_start: StepBytes
    each: StepBytes
    is_linear: bool


class Steps:
    """The bytes of a step by the requests of one rank."""

    def __init__(self, setting: Setting, workload: ServeWorkload) -> None:
        self._setting, self._workload = setting, workload
        most, prompt = float(step_requests(setting, workload)), float(workload.input_tokens)
        # Beyond its prompt's tokens a step of requests has a token of each, up to its budget.
        grown = minimum(most, maximum(prompt, setting.layout.batch_tokens))
        self._ends = (1.0, maximum(1.0, minimum(prompt, most)), grown, most, UNLIMITED)
        self._segments: dict[int, Segment] = {}

    def of(self, requests: float) -> StepBytes:
        """Return the bytes with this many requests on each rank."""
        setting = self._setting
        load = memory_load(setting, self._workload, requests * setting.layout.attention_data)
        return StepBytes(step_activation_bytes(setting, load), step_cache_bytes(setting, load))

    def segment(self, at: int) -> Segment:
        """Return the segment of this number, computed once; the last has no end."""
        if at not in self._segments:
            start, end = self._ends[at], self._ends[at + 1]
            first = self.of(start)
            each = self.of(start + 1.0).less(first)
            is_linear = at == LAST_SEGMENT or all(
                not any_of(abs(last - begun - more * (end - start)) > CAPACITY_ROUNDING * last)
                for last, begun, more in zip(self.of(end), first, each, strict=True)
            )
            self._segments[at] = Segment(start, end, first, each, is_linear)
        return self._segments[at]


class Peaks(NamedTuple):
    """The peak bytes of a stage by the requests of one rank.

    ``empty`` are the bytes without requests and steps, ``cache`` those of one request's cache and
    ``layers`` the stage's share of the layers.
    """

    empty: float
    cache: float
    layers: float
    steps: Steps


def _layer_shares(setting: Setting, use: MemoryUse) -> list[float]:
    """Return the share of the layers on each stage of a use; equal stages appear once in it."""
    shares: Iterable[StageShare] = setting.shares
    if len(use.stages) < len(setting.shares):
        shares = dict.fromkeys(setting.shares)
    layers = setting.model.num_hidden_layers
    return [cast("float", share.layers / layers) for share in shares]


def _memory_use(setting: Setting, workload: ServeWorkload, requests: float) -> MemoryUse:
    """Return the memory with this many requests on each rank."""
    load = memory_load(setting, workload, requests * setting.layout.attention_data)
    return held_memory(setting, NullLedger(), load)


def _room_in_tiers(setting: Setting, uses: list[MemoryUse]) -> float:
    """Return the requests per rank whose offloaded cache host memory and disks hold."""
    cluster = setting.cluster
    return minimum(
        _room_in_tier(cluster.host_memory_bytes, cluster.nodes, [use.host_bytes for use in uses]),
        _room_in_tier(
            cluster.disk_capacity_bytes, cluster.nodes, [use.disk_bytes for use in uses]
        ),
    )


def _requests(limit: float, peaks: Peaks) -> float:
    """Return the requests of one rank that fit into a stage's limit, 0 if not even one does.

    Within a segment the peak is convex in the requests, because the fullest moment of a step
    changes: a chord never holds too many.
    """
    fits: Flag = True
    held = 0.0
    for at in range(LAST_SEGMENT + 1):
        start, end, step, step_each, is_linear = peaks.steps.segment(at)
        peak = peaks.empty + start * peaks.cache + step.of(peaks.layers)
        each = peaks.cache + step_each.of(peaks.layers)
        if at == 0:
            fits = peak <= limit
            held = where(fits, 1.0, 0.0)
        tried = minimum(end, start + _quotient(limit - peak, each))
        if is_linear:
            held = where(fits, maximum(held, tried), held)
        else:
            held = _along_chords(limit, peaks, (start, peak), (tried, fits, held))
        fits = both(fits, held >= end)
        if not any_of(fits):
            break
    return held


def _along_chords(
    limit: float,
    peaks: Peaks,
    feasible_point: tuple[float, float],
    first_try: tuple[float, Flag, float],
) -> float:
    """Return the requests that fit on a convex segment, from a count and its peak that do.

    ``first_try`` are the requests to try first, where they may be tried, and those held already.
    """
    start, peak = feasible_point
    tried, fits, held = first_try
    for _ in range(CHORDS):
        step = peaks.steps.of(tried).of(peaks.layers)
        at_tried = peaks.empty + tried * peaks.cache + step
        inside = both(fits, at_tried <= limit * (1 + CAPACITY_ROUNDING))
        held = where(inside, maximum(held, tried), held)
        if not any_of(both(fits, negate(inside))):
            break
        chord = start + _quotient((limit - peak) * (tried - start), at_tried - peak)
        tried = where(inside, tried, chord)
    return held


def _quotient(room: float, each: float) -> float:
    """Return how many times ``each`` byte count fits, ``UNLIMITED`` if it is 0."""
    return where(each > 0, room / where(each > 0, each, 1.0), UNLIMITED)


def _room_in_tier(per_node: int | None, nodes: int, needed: list[float]) -> float:
    """Return the requests per rank whose offloaded cache fits in host memory, or on the disks.

    ``needed`` are the bytes there with one and with two requests per rank.
    """
    available, (first, second) = (per_node or 0) * nodes, needed
    if not available or not any_of(second > first):
        return UNLIMITED
    requests = where(first <= available, 1 + _quotient(available - first, second - first), 0.0)
    return where(second > first, requests, UNLIMITED)


def step_requests(setting: Setting, workload: ServeWorkload) -> int:
    """Return the most requests that one rank runs at once, by the engine's default.

    A launch for a stated concurrency tells the engine to take that.
    """
    default = default_requests(setting) if workload.concurrency is None else 0
    return default or MAX_SEARCHED_CONCURRENCY


def batch_limit(setting: Setting, workload: ServeWorkload) -> float:
    """Return the most requests that a replica runs at once, whatever its memory holds."""
    return step_requests(setting, workload) * setting.layout.attention_data


def replica_requests(setting: Setting, requests: float) -> float:
    """Return the requests of a replica if each attention rank holds as many as the busiest."""
    ranks = setting.layout.attention_data
    return maximum(1.0, ceil(requests / ranks - CAPACITY_ROUNDING)) * ranks


def memory_load(setting: Setting, workload: ServeWorkload, sequences: float) -> MemoryLoad:
    """Return the memory load of a replica with ``sequences`` full-length requests."""
    prompt = workload.input_tokens
    budget = where(setting.layout.batch_tokens > 0, setting.layout.batch_tokens, prompt)
    sequences = sequences / setting.layout.attention_data
    decoded = minimum(sequences, float(step_requests(setting, workload)))
    return MemoryLoad(
        sequences=sequences,
        tokens_per_sequence=prompt + workload.output_tokens,
        step_tokens=minimum(budget, maximum(prompt, decoded)),
        sampled_tokens=maximum(1.0, decoded),
        paged=setting.engine.role == "serving",
        shared_tokens=prompt * workload.prefix_share_ratio,
    )
