"""Generate offline in one fixed batch: one prefill, then a decode step per further token."""

from planner.cost.columns import any_of, both, ceil, maximum, minimum, where
from planner.cost.compute import layer_pairs, read_pairs
from planner.cost.equation import Ledger, equation
from planner.cost.kv_cache import layer_tokens, read_tokens
from planner.cost.quantity import Quantity
from planner.specs.workload import GenerateWorkload
from planner.workload.forward import PassCost
from planner.workload.inference_memory import Load, inference_memory
from planner.workload.offloading import attends_on_host, offloaded_cache_share
from planner.workload.operators import Pass
from planner.workload.outcome import Outcome, performance_of
from planner.workload.setting import Setting
from planner.workload.staged import forward_pass

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
