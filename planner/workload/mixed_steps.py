"""Steps that read prompts beside decoding: how often requests meet them, and what they cost."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.catalog.engines import client_of_sweeps
from planner.cost.kv_cache import cached_tokens_by_layer_group
from planner.cost.quantity import Ledger, NullLedger, any_of, ceil, maximum, minimum, where
from planner.cost.queueing import (
    MAX_BUSY_RATIO,
    Client,
    Schedule,
    arrival_window,
    mixed_share,
    steps_in_burst,
    tokens_ahead,
    tokens_until_first,
)
from planner.cost.roofline import pairs_by_layer_group
from planner.specs.workload import ServeWorkload
from planner.workload.forward import forward_pass
from planner.workload.generate import (
    decode_cost,
    decode_pass,
    decode_work,
    draft_of,
    engine_chunks,
    prefill_cost,
    prefill_pass,
)
from planner.workload.operators import ForwardPass
from planner.workload.setting import (
    BETWEEN_TOKENS,
    BURST_STEP,
    DECODING,
    UNTIL_FIRST_TOKEN,
    Setting,
)

MIXED = "mixed"
GROUP = "schedule"
UNCROWDED = 1e12  # others, of which any number may come at once
UNIFORM_RANGE = 12**0.5  # of a uniform distribution over its standard deviation
WHOLE = 1e-9  # tolerance for quotients of whole numbers
LEAST_BUDGET_RATIO = 0.5  # of a step's tokens, which prompts have however many requests decode


class Load(NamedTuple):
    """The requests in one lane of a replica: a stage or an attention rank with its own batch.

    ``others`` are in flight in the lane beside a request, ``callers_others`` all others of the
    replica, over its ``lanes``; ``prompt`` are the uncached prompt tokens of a request and
    ``answer`` the steps that its answer takes. A share of the requests decodes, others wait to be
    read. In an open loop ``arrivals`` prompts come to a lane
    in a step, of which reading takes ``busy_ratio`` of the time; in a closed one the schedule says
    so.
    """

    others: float
    callers_others: float
    lanes: float
    prompt: float
    answer: float
    decoding_share: float
    client: Client
    arrivals: float | None = None
    busy_ratio: float | None = None


@dataclass(frozen=True)
class MixedSteps:
    """The schedule of a request and the seconds of the mixed steps in it."""

    schedule: Schedule
    until_first_s: float
    between_s: float
    burst_s: float

    def waited_s(self, prompt: float) -> float:
        """Return the mean seconds until the first token in which others' prompts are read."""
        plan = self.schedule
        foreign = 1 - prompt / maximum(prompt, plan.steps * plan.step_tokens)
        usual = (1 - plan.burst_ratio) * foreign * plan.steps * self.until_first_s
        if not any_of(plan.burst_ratio > 0):
            return usual
        in_burst = maximum(0.0, plan.burst_steps - maximum(1.0, prompt / plan.burst_tokens))
        return usual + plan.burst_ratio * in_burst * self.burst_s


def step_budget(setting: Setting, prompt: float) -> float:
    """Return the token budget of a step: at least 2, or a whole prompt if not configured."""
    configured = setting.layout.batch_tokens
    return maximum(2.0, where(configured > 0, configured, prompt))


def uncached_prompt(workload: ServeWorkload) -> float:
    """Return the prompt tokens that no earlier request left in the cache."""
    return workload.input_tokens * (1 - workload.prefix_share_ratio)


def decoding_share(setting: Setting, workload: ServeWorkload, running: float) -> float:
    """Return the share of their lives in which ``running`` requests decode.

    Where prompts take longer to read than an answer takes steps, the rest of a life is waiting.
    """
    lanes = setting.layout.pipeline * setting.layout.attention_data
    prompt, answer = uncached_prompt(workload), workload.output_tokens
    life = maximum(answer, running / lanes * prompt / step_budget(setting, prompt))
    return (answer - 1) / life


def load_of(
    setting: Setting,
    workload: ServeWorkload,
    running: float,
    alone: tuple[float, float, float],
) -> Load:
    """Return the load of one lane with ``running`` requests on the replica.

    ``alone`` are the seconds of a prompt that nothing delays and of a decode step, and the tokens
    that a step makes of an answer. In an open loop a request meets as many others as are in flight
    on average: below one by its rate.
    """
    prompt_s, step_s, step_tokens = alone
    layout = setting.layout
    lanes = layout.pipeline * layout.attention_data
    answer = workload.output_tokens / step_tokens
    share = decoding_share(setting, workload, running)
    rate, client = workload.request_rate_per_second, client_of(workload)
    if rate is None:
        others = maximum(0.0, running / lanes - 1), maximum(0.0, running - 1)
        return Load(*others, lanes, uncached_prompt(workload), answer, share, client)
    in_lane = rate / layout.data / lanes
    few = minimum(1.0, in_lane * lanes * (prompt_s + answer * step_s))
    in_flight = where(running > 1, running, few)
    added_s = prompt_s - share * step_s  # those who decode share a step with it
    busy = minimum(in_lane * maximum(0.0, added_s), MAX_BUSY_RATIO)
    return Load(
        others=in_flight / lanes,
        callers_others=in_flight,
        lanes=lanes,
        prompt=uncached_prompt(workload),
        answer=answer,
        decoding_share=share,
        client=client,
        arrivals=in_lane * step_s / (1 - busy),
        busy_ratio=busy,
    )


def client_of(workload: ServeWorkload) -> Client:
    """Return the client of published sweeps, with the lengths that a workload states."""
    client = client_of_sweeps()
    if workload.length_variation is None:
        return client
    uniform = UNIFORM_RANGE * workload.length_variation
    return client._replace(length_range=uniform, length_variance=workload.length_variance)


def mixed_steps_of(
    setting: Setting, workload: ServeWorkload, ledger: Ledger, load: Load
) -> MixedSteps:
    """Return the schedule of a lane's requests with the seconds of its mixed steps."""
    is_burst = workload.burst_requests is not None and workload.request_rate_per_second is None
    schedule = _burst(setting, ledger, load) if is_burst else _schedule(setting, ledger, load)
    decoding = load.others * load.decoding_share
    reading = minimum(load.callers_others + 1, setting.layout.attention_data)
    until_first = between = burst = 0.0
    if not is_burst:
        step = UNTIL_FIRST_TOKEN, decoding, schedule.step_tokens
        until_first = _seconds(setting, workload, ledger, step, reading)
    if any_of(load.callers_others > 0):
        step = BETWEEN_TOKENS, decoding, schedule.mixed_tokens
        between = _seconds(setting, workload, ledger, step, reading)
    if any_of(schedule.burst_ratio > 0):
        unread = maximum(0.0, load.others + 1 - schedule.burst_tokens / load.prompt)
        step = BURST_STEP, load.decoding_share * unread / 2, schedule.burst_tokens
        burst = _seconds(setting, workload, ledger, step, reading)
    return MixedSteps(schedule, until_first, between, burst)


def _room(setting: Setting, load: Load) -> float:
    """Return the prompt tokens that a step reads at most beside the decoding requests.

    An engine without a budget reads a whole prompt.
    """
    budget = step_budget(setting, load.prompt)
    decoding = load.others * load.decoding_share
    room = maximum(budget - decoding, LEAST_BUDGET_RATIO * budget)
    return where(setting.layout.batch_tokens > 0, room, load.prompt)


def _schedule(setting: Setting, ledger: Ledger, load: Load) -> Schedule:
    """Return the schedule of closed and open loops."""
    client, room = load.client, _room(setting, load)
    prompt_steps = load.prompt / room
    own_steps = maximum(1.0, ceil(prompt_steps - WHOLE))
    alone = load.answer + own_steps - 1
    prompts = load.callers_others / load.lanes  # of others, that a lane's steps read in a life
    life = maximum(alone, (prompts + 1 / load.lanes) * prompt_steps)
    window, read_ratio, crowd, met = life, 1.0, UNCROWDED, 1.0
    if load.arrivals is None or load.busy_ratio is None:
        window = ledger.term(
            arrival_window,
            setting.line(GROUP, "Steps over which calls are spread", key="window"),
            life_steps=life,
            running=load.others + 1,
            prompt_steps=prompt_steps,
            calls=client.calls,
            spread_steps=client.length_range * load.answer,
        )
        read_ratio = 1 - 1 / (2 * client.calls)  # nobody calls after the last call
        arrivals, crowd = prompts / window, prompts
        busy = arrivals * prompt_steps
        met = minimum(busy, MAX_BUSY_RATIO)
    else:
        life = window = maximum(alone, 1.0)
        # No more arrive than are in flight, if that is all that the engine has room for.
        arrivals, busy = minimum(load.arrivals, (prompts + 1) / life), load.busy_ratio
    ahead = ledger.term(
        tokens_ahead,
        setting.line(GROUP, "Prompt tokens ahead of one's own", key="tokens_ahead"),
        busy_ratio=busy,
        others=crowd,
        prompt_tokens=load.prompt,
        step_tokens=room,
        queued_steps=life - alone,
        variability=client.variability,
        met_ratio=met,
    )
    read = ledger.term(
        tokens_until_first,
        setting.line(GROUP, "Prompt tokens read until the first token", key="tokens_read"),
        prompt_tokens=load.prompt,
        ahead_tokens=ahead,
        arrivals_per_step=arrivals,
        own_steps=own_steps,
        step_tokens=room,
    )
    steps = maximum(own_steps, read / room)
    mixed = ledger.term(
        mixed_share,
        setting.line(GROUP, "Steps that read prompts", key="mixed_share"),
        window_steps=window,
        life_steps=life,
        busy_ratio=busy,
        arrivals_per_step=arrivals,
        own_steps=own_steps,
    )
    reading = read_ratio * arrivals * window / life * load.prompt
    mixed_tokens = where(mixed > 0, reading / where(mixed > 0, mixed, 1.0), load.prompt)
    mixed_tokens = minimum(mixed_tokens, room)
    if load.arrivals is not None:
        return Schedule(life, steps, read / steps, mixed, mixed_tokens)
    return Schedule(
        life_steps=life,
        steps=steps,
        step_tokens=read / steps,
        mixed_ratio=mixed,
        mixed_tokens=mixed_tokens,
        burst_ratio=1 / client.calls,
        burst_steps=_steps_in_burst(setting, ledger, load, room),
        burst_tokens=minimum(room, (load.others + 1) * load.prompt),
    )


def _burst(setting: Setting, ledger: Ledger, load: Load) -> Schedule:
    """Return the schedule of requests that are all sent at once; later prompts delay a token."""
    room = _room(setting, load)
    all_steps = (load.others + 1) * load.prompt / room
    own_steps = maximum(1.0, ceil(load.prompt / room - WHOLE))
    later = maximum(0.0, all_steps - own_steps) / 2
    return Schedule(
        life_steps=maximum(load.answer + own_steps - 1, all_steps),
        steps=own_steps,
        step_tokens=load.prompt / own_steps,
        mixed_ratio=minimum(1.0, later / load.answer),
        mixed_tokens=room,
        burst_ratio=1.0,
        burst_steps=_steps_in_burst(setting, ledger, load, room),
        burst_tokens=minimum(room, (load.others + 1) * load.prompt),
    )


def _steps_in_burst(setting: Setting, ledger: Ledger, load: Load, room: float) -> float:
    return ledger.term(
        steps_in_burst,
        setting.line(GROUP, "Steps until the first token in a burst", key="burst_steps"),
        running=load.others + 1,
        prompt_steps=load.prompt / room,
    )


def _seconds(
    setting: Setting,
    workload: ServeWorkload,
    ledger: Ledger,
    step: tuple[str, float, float],
    reading_ranks: float,
) -> float:
    """Return the seconds of a mixed step: its group, decoding requests and prompt tokens.

    Of the attention ranks of a replica ``reading_ranks`` read prompts. A step with offloaded
    weights reads prompts alone, then decodes.
    """
    group, decoding, tokens = step
    context = workload.decoding_context_tokens
    ranks = setting.layout.attention_data
    prompt, cached = uncached_prompt(workload), workload.input_tokens * workload.prefix_share_ratio
    prompts = reading_ranks * tokens / prompt
    if setting.strategy.offload:
        decoded = decode_cost(setting, NullLedger(), ranks * decoding, context).step_s
        read = prefill_cost(setting, NullLedger(), prompts, prompt, cached).total_s
        return read + where(decoding > 0, decoded, 0.0)
    guess = setting.strategy.speculative
    drafted = float(guess.tokens) if guess else 0.0
    work = mixed_work(setting, workload, decoding * (1 + drafted), tokens, group)
    routed = ranks * decoding * (1 + drafted) + reading_ranks * tokens
    work = replace(work, steps=engine_chunks(setting, tokens), routed_tokens=routed)
    decode = decode_work(setting, ranks * maximum(1.0, decoding), context, drafted)
    share = minimum(1.0, decoding)  # of a request, where less than one decodes
    attended = replace(
        decode,
        group=f"{group}{DECODING}",
        token_pairs=share * decode.token_pairs,
        read_layer_tokens=share * decode.read_layer_tokens,
    )
    seconds = forward_pass(setting, ledger, work, attended).total_s
    if guess is None:
        return seconds
    draft = draft_of(setting, guess)
    drafting = decode_pass(draft, NullLedger(), ranks * maximum(1.0, decoding), context).total_s
    seconds = seconds + share * drafted * drafting
    return seconds + prefill_pass(draft, NullLedger(), prompts, prompt, cached).total_s


def mixed_work(
    setting: Setting, workload: ServeWorkload, decoding: float, chunk: float, group: str = MIXED
) -> ForwardPass:
    """Return the work of a mixed step on one rank: decode tokens and prompt chunks.

    The KV cache of the decoding requests is read in a separate pass. Where lengths vary, most
    tokens are of long prompts: each attends to as many as in one of the mean and variance.
    """
    model, layout = setting.model, setting.layout
    cached = workload.input_tokens * workload.prefix_share_ratio
    prompt = workload.input_tokens - cached
    prompts = chunk / prompt
    longer = 1 + workload.length_variance
    pairs = pairs_by_layer_group(model, workload.input_tokens * longer)
    pairs = 1 / longer * pairs
    if cached:
        pairs = pairs + -1 * pairs_by_layer_group(model, cached)
    chunks = maximum(1.0, prompt / chunk)
    context = cached + prompt * (chunks + 1) / (2 * chunks)
    return ForwardPass(
        group=group,
        sequences=decoding + prompts,
        new_tokens=(decoding + chunk) / layout.context,
        token_pairs=prompts / layout.context * pairs,
        read_layer_tokens=prompts
        * chunks
        * cached_tokens_by_layer_group(model, context, paged=False),
        sampled_tokens=decoding + prompts,
        routed_tokens=(decoding + chunk) * layout.attention_data,
        cached_layer_tokens=prompts * cached_tokens_by_layer_group(model, prompt, paged=False),
        stored_layer_tokens=prompts * cached_tokens_by_layer_group(model, prompt, paged=False),
    )
