"""Serving at saturation: every slot is taken and steps mix prefill and decode.

When one request ends, the next begins; its prompt is read in chunks that fill the step's token
budget next to the decode tokens. Weights are read once for both, so a request costs less than a
separate prefill and decode steps.
"""

from dataclasses import dataclass, replace

from planner.cost.columns import ceil, maximum, minimum, where
from planner.cost.compute import layer_pairs
from planner.cost.equation import Ledger
from planner.cost.kv_cache import layer_tokens
from planner.cost.queueing import cycle_seconds, first_token_of_many, mixed_steps, waves_seconds
from planner.specs.workload import ServeWorkload
from planner.workload.generate import decode_work
from planner.workload.operators import Pass
from planner.workload.setting import Setting
from planner.workload.staged import forward_pass, paced

GROUP = "saturation"
MIXED, PACKED, BESIDE = "mixed", "packed", "beside"


@dataclass(frozen=True)
class Saturation:
    """The latencies and request rate of one replica with every slot taken."""

    tpot_s: float
    ttft_s: float
    requests_per_s: float


@dataclass(frozen=True)
class _Cycle:
    """One cycle that serves every slot once: decoding requests, step counts and step times."""

    running: float
    reading: float
    mixed_s: float
    packed_s: float
    cycle_s: float
    prompt_steps: float


def saturation(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float
) -> Saturation:
    """Return the performance of one replica whose slots are refilled immediately.

    Requests that do not decode wait for their prefill (Little's law).
    """
    cycle = _cycle(setting, workload, ledger, places)
    rate = cycle.running / cycle.cycle_s
    ttft = ledger.term(
        first_token_of_many,
        setting.line(GROUP, "Time to first token", key="full_ttft"),
        waited_s=maximum(0.0, places / rate - cycle.cycle_s),
        own_steps=cycle.prompt_steps,
        mixed_s=cycle.mixed_s,
    )
    return Saturation(cycle.cycle_s / workload.output_tokens, ttft, rate)


def burst_rate(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> float:
    """Return the requests per second of one replica from the first prompt to the last token.

    Waves of equal size follow each other.
    """
    requests = maximum(1.0, (workload.burst_requests or 1) / setting.layout.data)
    cycle = _cycle(
        setting, workload, ledger, requests / ceil(requests / minimum(places, requests))
    )
    seconds = ledger.term(
        waves_seconds,
        setting.line(GROUP, "The whole burst", key="burst"),
        waves=requests / cycle.running,
        cycle_s=cycle.cycle_s,
        mixed_steps=cycle.reading,
        packed_s=cycle.packed_s,
    )
    return requests / seconds


def _cycle(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> _Cycle:
    """Return one cycle over ``places`` slots, limited by the step's token budget."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    answer = workload.output_tokens
    ranks = setting.layout.pipeline * setting.layout.attention_data
    budget = step_budget(setting, prompt)
    decoding = minimum(places / ranks, budget * answer / (prompt + answer))
    chunk = budget - decoding
    work = decode_work(
        setting, decoding * setting.layout.attention_data, workload.input_tokens + answer / 2
    )
    steps = (
        (replace(work, group=PACKED), None),
        (
            mixed_work(setting, workload, decoding, chunk),
            replace(work, group=BESIDE),
        ),
    )
    packed, mixed = (
        paced(
            setting,
            ledger,
            forward_pass(setting, ledger, main, extra),
            main.group,
            setting.layout.pipeline,
        ).total_s
        for main, extra in steps
    )
    reading = ledger.term(
        mixed_steps,
        setting.line(GROUP, "Steps that read prompts", key="mixed_steps"),
        running=decoding,
        prompt_tokens=prompt,
        chunk_tokens=chunk,
    )
    cycle = ledger.term(
        cycle_seconds,
        setting.line(GROUP, "All places once", key="cycle"),
        mixed_steps=reading,
        mixed_s=mixed,
        output_tokens=answer,
        packed_s=packed,
    )
    return _Cycle(decoding * ranks, reading, mixed, packed, cycle, maximum(1.0, prompt / chunk))


def step_budget(setting: Setting, prompt: float) -> float:
    """Return the token budget of a step: at least 2, or a whole prompt if not configured."""
    configured = setting.layout.batch_tokens
    return maximum(2.0, where(configured > 0, configured, prompt))


def mixed_work(setting: Setting, workload: ServeWorkload, own: float, chunk: float) -> Pass:
    """Return the work of a mixed step on one rank: decode tokens and prompt chunks.

    The KV cache of the decoding requests is read in a separate pass.
    """
    model, layout = setting.model, setting.layout
    cached = workload.input_tokens * workload.prefix_share_ratio
    prompt = workload.input_tokens - cached
    prompts = chunk / prompt
    pairs = layer_pairs(model, workload.input_tokens)
    if cached:
        pairs = pairs + -1 * layer_pairs(model, cached)
    chunks = maximum(1.0, prompt / chunk)
    context = cached + prompt * (chunks + 1) / (2 * chunks)
    return Pass(
        group=MIXED,
        sequences=own + prompts,
        new_tokens=(own + chunk) / layout.context,
        token_pairs=prompts / layout.context * pairs,
        read_layer_tokens=prompts * chunks * layer_tokens(model, context, paged=False),
        sampled_tokens=own + prompts,
        routed_tokens=(own + chunk) * layout.attention_data,
        cached_layer_tokens=prompts * layer_tokens(model, prompt, paged=False),
        stored_layer_tokens=prompts * layer_tokens(model, prompt, paged=False),
    )
