"""Offline generation in fixed batches, and decoding with speculation by a draft model."""

from dataclasses import dataclass, replace

from planner.catalog.engine_limits import refusal
from planner.catalog.models import get_model
from planner.cost.kv_cache import layer_tokens, read_tokens
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.parameters import count_parameters
from planner.cost.quantity import (
    Ledger,
    Quantity,
    Unrecorded,
    any_of,
    both,
    ceil,
    equation,
    maximum,
    minimum,
    where,
)
from planner.cost.queueing import speculative_gap, tokens_per_round
from planner.cost.roofline import layer_pairs, read_pairs
from planner.cost.weights import WIDE
from planner.errors import NotCoveredError, NotPossibleError
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload, SpeculativeSpec, Strategy
from planner.workload.formats import default_activation_dtype, default_group
from planner.workload.forward import PassCost, forward_pass
from planner.workload.inference_memory import Load, inference_memory
from planner.workload.layouts import Layout
from planner.workload.offloading import attends_on_host, offloaded_cache_share
from planner.workload.operators import Pass
from planner.workload.outcome import Outcome, performance_of
from planner.workload.setting import Setting

ROUNDING = 1e-6  # tolerance for quotients of whole numbers


def prefill_pass(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of reading ``tokens`` tokens of each of ``sequences`` new sequences.

    ``cached`` earlier tokens are in the KV cache: they are attended to, not computed. The
    ``sequences`` of one replica are split over its data-parallel attention ranks.
    """
    return forward_pass(setting, ledger, prefill_work(setting, sequences, tokens, cached))


def prefill_work(setting: Setting, sequences: float, tokens: float, cached: float = 0.0) -> Pass:
    """Return the work of a prefill pass."""
    model, ranks = setting.model, setting.layout.context
    per_rank = _per_rank(setting, sequences)
    steps = _chunks(setting, per_rank * tokens)
    # The k-th of n chunks attends to the cached tokens and to k/n of the prompt.
    context = cached + tokens * (steps + 1) / (2 * steps)
    pairs = layer_pairs(model, cached + tokens)
    if cached:
        pairs = pairs + -1 * layer_pairs(model, cached)
    return Pass(
        group="prefill",
        sequences=per_rank,
        new_tokens=per_rank * tokens / ranks,
        token_pairs=per_rank / ranks * pairs,
        read_layer_tokens=per_rank * steps * layer_tokens(model, context, paged=False),
        sampled_tokens=per_rank,
        routed_tokens=sequences * tokens,
        steps=steps,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=per_rank * layer_tokens(model, tokens, paged=False),
        stored_layer_tokens=per_rank * layer_tokens(model, tokens, paged=False),
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


def decode_work(setting: Setting, sequences: float, context: float, drafted: float = 0.0) -> Pass:
    """Return the work of one decode step."""
    tokens_each = 1 + drafted
    ranks = setting.layout.context
    per_rank = _per_rank(setting, sequences)
    read = per_rank / ranks * read_tokens(setting.model, context)
    # Attention over the offloaded cache runs on the host, the rest on the device.
    device_share = 1 - offloaded_cache_share(setting) if attends_on_host(setting) else 1.0
    tokens = tokens_each * where(ranks > 1, maximum(1.0, per_rank / ranks), per_rank)
    return Pass(
        group="decode",
        sequences=per_rank,
        new_tokens=tokens,
        token_pairs=tokens_each
        * per_rank
        / ranks
        * device_share
        * read_pairs(setting.model, context),
        read_layer_tokens=device_share * read,
        sampled_tokens=tokens,
        routed_tokens=tokens_each * sequences,
        host_token_pairs=tokens_each
        * per_rank
        / ranks
        * (1 - device_share)
        * read_pairs(setting.model, context),
        absorbed=True,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=read,
        stored_layer_tokens=per_rank * layer_tokens(setting.model, 1.0, paged=False),
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
    layout, most = setting.layout, setting.engine.prompt_chunk_tokens
    engine_chunks = maximum(1.0, ceil(tokens / most)) if most else 1.0
    if not any_of(layout.chunked):
        return engine_chunks
    budget_chunks = maximum(1.0, ceil(tokens / maximum(1.0, layout.batch_tokens)))
    return where(layout.chunked, budget_chunks, engine_chunks)


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
        stages=whole.turns(stages),
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
            communication_ratio=_communication_ratio(prefill, decode, steps),
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


def batch_load(setting: Setting, workload: GenerateWorkload) -> Load:
    """Return the memory load of one replica with all sequences of its batch.

    A step holds at most the token budget of an engine that computes prompts in chunks.
    """
    batch = replica_batch(setting, workload)
    per_rank = _per_rank(setting, batch)
    micro = per_rank / micro_batches(setting, batch)
    prompts, budget = micro * workload.input_tokens, setting.layout.batch_tokens
    return Load(
        per_rank,
        workload.input_tokens + workload.output_tokens,
        where(budget > 0, maximum(micro, minimum(prompts, budget)), prompts),
        micro,
        paged=False,
        waiting_tokens=(per_rank - micro) * workload.input_tokens,
        prompt_tokens=workload.input_tokens if setting.engine.grows_cache else None,
    )


def _communication_ratio(prefill: PassCost, decode: PassCost, steps: int) -> float:
    total = prefill.total_s + steps * decode.total_s
    return (prefill.communication_s + steps * decode.communication_s) / total


# Decoding with or without speculation by a draft model: time per token and memory.
#
# The draft model runs on the devices of the target, token by token; then one pass of the target
# verifies the drafted tokens of all requests and adds one token. Draft weights and KV cache are in
# device memory in addition to the target's.


GROUP = "speculation"
VOCABULARY_SLACK = 0.02  # padded vocabularies of one tokenizer differ by less


@dataclass(frozen=True)
class Decoding:
    """The cost of a token of each sequence and the seconds of the whole step."""

    per_token: PassCost
    step_s: float


def decoding(setting: Setting, ledger: Ledger, sequences: float, context: float) -> Decoding:
    """Return the cost of decoding: one pass per token, or draft and verify rounds."""
    guess = setting.strategy.speculative
    if guess is None:
        plain = decode_pass(setting, ledger, sequences, context)
        return Decoding(plain, plain.total_s)
    verify = decode_pass(setting, ledger, sequences, context, drafted=float(guess.tokens))
    draft = decode_pass(draft_of(setting, guess), Unrecorded(), sequences, context)
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
    return Decoding(
        _combined_cost(verify, draft, float(guess.tokens), 1 / round_tokens), gap * round_tokens
    )


def prefilling(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of prefill, with that of the draft model."""
    target = prefill_pass(setting, ledger, sequences, tokens, cached)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = prefill_pass(draft_of(setting, guess), Unrecorded(), sequences, tokens, cached)
    return _combined_cost(target, draft, 1.0, 1.0)


def held_memory(setting: Setting, ledger: Ledger, load: Load) -> MemoryUse:
    """Return the memory of a replica, with the draft's weights and KV cache."""
    target = inference_memory(setting, ledger, load)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = inference_memory(draft_of(setting, guess), Unrecorded(), load).stages[0].by_class
    draft_bytes = {name: draft[name] for name in ("weights", "kv_cache")}
    stages = tuple(_with_draft(stage, draft_bytes) for stage in target.stages)
    return replace(target, stages=stages)


def draft_of(setting: Setting, guess: SpeculativeSpec) -> Setting:
    """Return the setting of the draft model: the target's devices and split, its own weights.

    A draft whose name or config states a format has the weights of its checkpoint, any other has
    16 bits.

    Raises:
        UnknownModelError: the catalog has no such draft model.
        NotPossibleError: its vocabulary differs from the target's, or the engine refuses its
            format.
        NotCoveredError: the target is split into pipeline stages.
    """
    model, target = get_model(guess.draft_model), setting.model
    field = "strategy.speculative.draft_model"
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


def _with_draft(stage: StageMemory, draft_bytes: dict[str, float]) -> StageMemory:
    by_class = {name: size + draft_bytes.get(name, 0.0) for name, size in stage.by_class.items()}
    return StageMemory(by_class)


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
