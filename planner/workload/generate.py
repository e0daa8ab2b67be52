"""Generate offline in one fixed batch: one prefill, then a decode step per further token."""

from planner.cost.columns import any_of, both, ceil, maximum, where
from planner.cost.compute import layer_pairs, read_pairs
from planner.cost.equation import Ledger, equation
from planner.cost.kv_cache import layer_tokens, read_tokens
from planner.cost.quantity import Quantity
from planner.specs.workload import GenerateWorkload
from planner.workload.forward import PassCost
from planner.workload.inference_memory import Load, inference_memory
from planner.workload.offloading import attends_on_host, cache_away
from planner.workload.operators import Pass
from planner.workload.outcome import Outcome, performance_of
from planner.workload.setting import Setting
from planner.workload.staged import forward_pass

ROUNDING = 1e-6  # a quotient of whole numbers may end a hair above one


def prefill_pass(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of reading ``tokens`` tokens of each of ``sequences`` new sequences.

    ``cached`` tokens before them are kept already: they are attended to, not computed. The
    ``sequences`` are those of one replica, spread over its data-parallel attention ranks.
    """
    return forward_pass(setting, ledger, prefill_work(setting, sequences, tokens, cached))


def prefill_work(setting: Setting, sequences: float, tokens: float, cached: float = 0.0) -> Pass:
    """Return what reading prompts works on."""
    model, ranks = setting.model, setting.layout.context
    own = _per_rank(setting, sequences)
    steps = _chunks(setting, own * tokens)
    # The k-th of n chunks attends to what is cached and to k/n of the prompt.
    seen = cached + tokens * (steps + 1) / (2 * steps)
    pairs = layer_pairs(model, cached + tokens)
    if cached:
        pairs = pairs + -1 * layer_pairs(model, cached)
    return Pass(
        group="prefill",
        sequences=own,
        new_tokens=own * tokens / ranks,
        token_pairs=own / ranks * pairs,
        read_layer_tokens=own * steps * layer_tokens(model, seen, paged=False),
        sampled_tokens=own,
        routed_tokens=sequences * tokens,
        steps=steps,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=own * layer_tokens(model, tokens, paged=False),
        stored_layer_tokens=own * layer_tokens(model, tokens, paged=False),
    )


@equation(
    "o = (m + p - 1) / (m · p)",
    unit="",
    symbols={"chunks": "m", "stages": "p"},
    source="Huang et al. 2019 (GPipe), arXiv:1811.06965, section 2.3",
)
def pipeline_share(*, chunks: Quantity, stages: Quantity) -> Quantity:
    """Return the share of one device's time that chunks take which stages work on in turn."""
    return (chunks + stages - 1) / (chunks * stages)


def decode_pass(
    setting: Setting, ledger: Ledger, sequences: float, context: float, drafted: float = 0.0
) -> PassCost:
    """Return the cost of one more token of each of ``sequences`` sequences at mean context.

    With ``drafted`` guesses of each sequence to check, the pass works on one token more than that.
    """
    return forward_pass(setting, ledger, decode_work(setting, sequences, context, drafted))


def decode_work(setting: Setting, sequences: float, context: float, drafted: float = 0.0) -> Pass:
    """Return what one decode step works on."""
    checked = 1 + drafted
    ranks = setting.layout.context
    own = _per_rank(setting, sequences)
    read = own / ranks * read_tokens(setting.model, context)
    # The host attends to what it holds: the device is left with the rest.
    kept = 1 - cache_away(setting) if attends_on_host(setting) else 1.0
    tokens = checked * where(ranks > 1, maximum(1.0, own / ranks), own)
    return Pass(
        group="decode",
        sequences=own,
        new_tokens=tokens,
        token_pairs=checked * own / ranks * kept * read_pairs(setting.model, context),
        read_layer_tokens=kept * read,
        sampled_tokens=tokens,
        routed_tokens=checked * sequences,
        absorbed=True,
        batches=_blocks(setting, sequences),
        cached_layer_tokens=read,
        stored_layer_tokens=own * layer_tokens(setting.model, 1.0, paged=False),
    )


def micro_batches(setting: Setting, batch: float) -> float:
    """Return how many micro-batches a generated batch is split into: one, unless it is told."""
    micro = setting.strategy.micro_batch_size
    return 1.0 if micro is None else ceil(batch / micro)


def _blocks(setting: Setting, sequences: float) -> float:
    """Return how many micro-batches of this size one load of streamed weights serves."""
    workload = setting.workload
    if not isinstance(workload, GenerateWorkload) or setting.strategy.micro_batch_size is None:
        return 1.0
    return ceil(workload.batch_size / setting.layout.data / sequences - ROUNDING)


def _per_rank(setting: Setting, sequences: float) -> float:
    """Return the sequences of the busiest data-parallel attention rank."""
    ranks = setting.layout.attention_data
    return where(ranks > 1, maximum(1.0, sequences / ranks), sequences)


def _chunks(setting: Setting, tokens: float) -> float:
    """Return in how many steps a rank takes prompts in: within the step's token budget."""
    layout, most = setting.layout, setting.engine.prompt_chunk_tokens
    own = maximum(1.0, ceil(tokens / most)) if most else 1.0
    if not any_of(layout.chunked):
        return own
    cut = maximum(1.0, ceil(tokens / maximum(1.0, layout.batch_tokens)))
    return where(layout.chunked, cut, own)


def _prefill(setting: Setting, ledger: Ledger, batch: float, tokens: float) -> PassCost:
    """Return the cost of the prompts: stages of a pipeline work on different chunks at once."""
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
    """Return what generating one batch costs."""
    batch = workload.batch_size / setting.layout.data
    micro = batch / micro_batches(setting, batch)
    memory = inference_memory(setting, ledger, batch_load(setting, workload))
    prefill = _prefill(setting, ledger, micro, workload.input_tokens)
    context = workload.input_tokens + workload.output_tokens / 2
    decode = decode_pass(setting, ledger, micro, context)
    steps = workload.output_tokens - 1
    latency = prefill.total_s + steps * decode.total_s
    produced = workload.batch_size * workload.output_tokens / latency
    decodes = steps * decode.total_s > prefill.total_s
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class={
            name: where(decodes, seconds, prefill.by_class[name])
            for name, seconds in decode.by_class.items()
        },
        phases={"prefill": prefill.by_class, "decode": decode.by_class},
        energy_tokens_per_second=produced,
        performance=performance_of(
            tokens_per_second=produced,
            output_tokens_per_second=produced,
            prefill_tokens_per_second=workload.batch_size
            * workload.input_tokens
            / prefill.total_s,
            decode_tokens_per_second=workload.batch_size / decode.total_s if steps else None,
            tokens_per_second_per_device=produced / setting.layout.devices,
            requests_per_second=workload.batch_size / latency,
            ttft_seconds=prefill.total_s,
            tpot_seconds=decode.total_s if steps else None,
            latency_seconds=latency,
            prefill_seconds=prefill.total_s,
            communication_ratio=_communication_ratio(prefill, decode, steps),
        ),
    )


def batch_load(setting: Setting, workload: GenerateWorkload) -> Load:
    """Return what one replica holds of a batch, all of its sequences at once."""
    batch = workload.batch_size / setting.layout.data
    own = _per_rank(setting, batch)
    working = own / micro_batches(setting, batch)
    return Load(
        own,
        workload.input_tokens + workload.output_tokens,
        working * workload.input_tokens,
        working,
        paged=False,
        waiting_tokens=(own - working) * workload.input_tokens,
        prompt_tokens=workload.input_tokens if setting.engine.grows_cache else None,
    )


def _communication_ratio(prefill: PassCost, decode: PassCost, steps: int) -> float:
    total = prefill.total_s + steps * decode.total_s
    return (prefill.communication_s + steps * decode.communication_s) / total
