"""Generate offline in one fixed batch: one prefill, then a decode step per further token."""

from planner.cost.compute import layer_pairs, read_pairs
from planner.cost.equation import Ledger
from planner.cost.kv_cache import layer_tokens, read_tokens
from planner.specs.estimate import Performance
from planner.specs.workload import GenerateWorkload
from planner.workload.forward import PassCost, forward_pass
from planner.workload.inference_memory import Load, inference_memory
from planner.workload.operators import Pass
from planner.workload.outcome import Outcome
from planner.workload.setting import Setting


def prefill_pass(setting: Setting, ledger: Ledger, sequences: float, tokens: float) -> PassCost:
    """Return the cost of reading ``tokens`` tokens of each of ``sequences`` new sequences."""
    model = setting.model
    work = Pass(
        group="prefill",
        sequences=sequences,
        new_tokens=sequences * tokens,
        token_pairs=sequences * layer_pairs(model, tokens),
        read_layer_tokens=sequences * layer_tokens(model, tokens, paged=False),
        sampled_tokens=sequences,
    )
    return forward_pass(setting, ledger, work)


def decode_pass(setting: Setting, ledger: Ledger, sequences: float, context: float) -> PassCost:
    """Return the cost of one more token of each of ``sequences`` sequences at mean context."""
    work = Pass(
        group="decode",
        sequences=sequences,
        new_tokens=sequences,
        token_pairs=sequences * read_pairs(setting.model, context),
        read_layer_tokens=sequences * read_tokens(setting.model, context),
        sampled_tokens=sequences,
        absorbed=True,
    )
    return forward_pass(setting, ledger, work)


def generate(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return what generating one batch costs."""
    batch = workload.batch_size / setting.layout.data
    total_tokens = workload.input_tokens + workload.output_tokens
    memory = inference_memory(
        setting,
        ledger,
        Load(batch, total_tokens, batch * workload.input_tokens, batch, paged=False),
    )
    prefill = prefill_pass(setting, ledger, batch, workload.input_tokens)
    context = workload.input_tokens + workload.output_tokens / 2
    decode = decode_pass(setting, ledger, batch, context)
    steps = workload.output_tokens - 1
    latency = prefill.total_s + steps * decode.total_s
    produced = workload.batch_size * workload.output_tokens / latency
    mean_step = decode if steps * decode.total_s > prefill.total_s else prefill
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class=mean_step.by_class,
        phases={"prefill": prefill.by_class, "decode": decode.by_class},
        energy_tokens_per_second=produced,
        performance=Performance(
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


def _communication_ratio(prefill: PassCost, decode: PassCost, steps: int) -> float:
    total = prefill.total_s + steps * decode.total_s
    return (prefill.communication_s + steps * decode.communication_s) / total
