"""Serving with every place taken: steps that read prompts and decode at the same time.

As soon as one request ends the next one begins, and its prompt is read beside the others' tokens
in chunks that fill the step's token budget. Weights are read once for both, so that a request
costs less than a prefill and its decode steps apart from each other.
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
    """One replica with every place taken: how long a request takes, how many leave per second."""

    tpot_s: float
    ttft_s: float
    requests_per_s: float


@dataclass(frozen=True)
class _Cycle:
    """All places served once: how many decode, the steps that read, what each step takes."""

    running: float
    reading: float
    mixed_s: float
    packed_s: float
    cycle_s: float
    prompt_steps: float


def saturation(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float
) -> Saturation:
    """Return what one replica serves when each place is taken anew as soon as it is free.

    Callers beyond those who decode wait for their prompt to be read (Little).
    """
    found = _cycle(setting, workload, ledger, places)
    rate = found.running / found.cycle_s
    ttft = ledger.term(
        first_token_of_many,
        setting.line(GROUP, "Time to first token", key="full_ttft"),
        waited_s=maximum(0.0, places / rate - found.cycle_s),
        own_steps=found.prompt_steps,
        mixed_s=found.mixed_s,
    )
    return Saturation(found.cycle_s / workload.output_tokens, ttft, rate)


def burst_rate(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> float:
    """Return the requests per second of one replica from the first prompt to the last token.

    Waves of equal size follow each other.
    """
    each = maximum(1.0, (workload.burst_requests or 1) / setting.layout.data)
    found = _cycle(setting, workload, ledger, each / ceil(each / minimum(places, each)))
    seconds = ledger.term(
        waves_seconds,
        setting.line(GROUP, "The whole burst", key="burst"),
        waves=each / found.running,
        cycle_s=found.cycle_s,
        mixed_steps=found.reading,
        packed_s=found.packed_s,
    )
    return each / seconds


def _cycle(setting: Setting, workload: ServeWorkload, ledger: Ledger, places: float) -> _Cycle:
    """Return what it takes to serve so many places once, no more than the step's tokens feed."""
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    answer = workload.output_tokens
    ranks = setting.layout.pipeline * setting.layout.attention_data
    budget = step_budget(setting, prompt)
    own = minimum(places / ranks, budget * answer / (prompt + answer))
    chunk = budget - own
    work = decode_work(
        setting, own * setting.layout.attention_data, workload.input_tokens + answer / 2
    )
    both = (
        (replace(work, group=PACKED), None),
        (
            mixed_work(setting, workload, own, chunk),
            replace(work, group=BESIDE),
        ),
    )
    packed, mixed = (
        paced(
            setting,
            ledger,
            forward_pass(setting, ledger, one, beside),
            one.group,
            setting.layout.pipeline,
        ).total_s
        for one, beside in both
    )
    reading = ledger.term(
        mixed_steps,
        setting.line(GROUP, "Steps that read prompts", key="mixed_steps"),
        running=own,
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
    return _Cycle(own * ranks, reading, mixed, packed, cycle, maximum(1.0, prompt / chunk))


def step_budget(setting: Setting, prompt: float) -> float:
    """Return how many tokens one step takes in: at least two, or a whole prompt if uncut."""
    told = setting.layout.batch_tokens
    return maximum(2.0, where(told > 0, told, prompt))


def mixed_work(setting: Setting, workload: ServeWorkload, own: float, chunk: float) -> Pass:
    """Return what a step works on with tokens of those who decode and of prompts, on one rank.

    The caches of those who decode are read beside it.
    """
    model, layout = setting.model, setting.layout
    cached = workload.input_tokens * workload.prefix_share_ratio
    prompt = workload.input_tokens - cached
    prompts = chunk / prompt
    pairs = layer_pairs(model, workload.input_tokens)
    if cached:
        pairs = pairs + -1 * layer_pairs(model, cached)
    pieces = maximum(1.0, prompt / chunk)
    seen = cached + prompt * (pieces + 1) / (2 * pieces)
    return Pass(
        group=MIXED,
        sequences=own + prompts,
        new_tokens=(own + chunk) / layout.context,
        token_pairs=prompts / layout.context * pairs,
        read_layer_tokens=prompts * pieces * layer_tokens(model, seen, paged=False),
        sampled_tokens=own + prompts,
        routed_tokens=(own + chunk) * layout.attention_data,
        stored_layer_tokens=prompts * layer_tokens(model, prompt, paged=False),
    )
