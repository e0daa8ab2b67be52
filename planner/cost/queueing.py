"""Queueing delays between requests, replicas of different speed, and speculative decoding."""

from typing import NamedTuple

import numpy as np

from planner.cost.quantity import Quantity, equation, maximum, minimum, where

BATCHING = "Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310: prefill beside decode"

MAX_BUSY_RATIO = 0.98  # the mean wait of an infinite queue diverges at 1


class ArrivalParameters(NamedTuple):
    """How arrivals coincide and how the engine admits them; independent arrivals have no burst.

    ``burst_ratio`` is the share of requests that arrive in a burst with all others;
    ``prompts_ahead`` the number of prompts queued before each of the rest; ``withheld_slots`` the
    number of callers that the engine delays despite free memory; ``company_ratio`` the share of
    the free places in a prefill pass that other prompts fill; ``steps_awaited`` the number of
    decode steps before a decoding engine makes the first token of a new request.
    """

    burst_ratio: Quantity = 0.0
    prompts_ahead: Quantity = 0.0
    withheld_slots: Quantity = 0.0
    company_ratio: Quantity = 0.0
    steps_awaited: Quantity = 1.5


@equation(
    "TPOT = t_decode + (b-1)/s_out · (1 - f/2) · t_slot",
    unit="s",
    symbols={
        "decode_s": "t_decode",
        "running": "b",
        "output_tokens": "s_out",
        "slot_s": "t_slot",
        "burst_ratio": "f",
    },
    source=f"{BATCHING}; of a burst only the later half is prefilled beside a request's decode",
)
def mean_token_gap(
    *,
    decode_s: Quantity,
    running: Quantity,
    output_tokens: Quantity,
    slot_s: Quantity,
    burst_ratio: Quantity,
) -> Quantity:
    """Return the mean seconds between two tokens of a request in a continuous batch."""
    return decode_s + (running - 1) / output_tokens * (1 - burst_ratio / 2) * slot_s


@equation(
    "t_slot = t_beside + (t_alone - t_beside) / (1 + q · (k-1))",
    unit="s",
    symbols={
        "beside_s": "t_beside",
        "alone_s": "t_alone",
        "company_ratio": "q",
        "prompts_per_pass": "k",
    },
    source=f"{BATCHING}; the prompts of one pass read the weights and issue the operators once",
)
def prompt_slot(
    *, beside_s: Quantity, alone_s: Quantity, company_ratio: Quantity, prompts_per_pass: Quantity
) -> Quantity:
    """Return the delay in seconds that one prefill adds to the other requests.

    ``alone_s`` is the time of a pass with only this prompt, ``beside_s`` its extra time in a
    shared pass; ``prompts_per_pass`` is the number of such prompts in the token budget of a step.
    """
    prompts = 1 + company_ratio * (prompts_per_pass - 1)
    return beside_s + (alone_s - beside_s) / prompts


@equation(
    "n = f · (b-1)/2 + (1-f) · min(a, (b-1)/2)",
    unit="prompts",
    symbols={"running": "b", "burst_ratio": "f", "prompts_ahead": "a"},
    source="mean place in a burst of b; otherwise the prompts that fell into the steps before",
)
def prompts_waited_for(
    *, running: Quantity, burst_ratio: Quantity, prompts_ahead: Quantity
) -> Quantity:
    """Return the mean number of prefills queued before a request's own."""
    burst = (running - 1) / 2
    return burst_ratio * burst + (1 - burst_ratio) * minimum(prompts_ahead, burst)


@equation(
    "TTFT = t_prefill + n · t_slot + s · p · t_decode + wait + intake",
    unit="s",
    symbols={
        "prefill_s": "t_prefill",
        "prompts_before": "n",
        "slot_s": "t_slot",
        "decode_s": "t_decode",
        "decoding_ratio": "p",
        "steps_awaited": "s",
        "wait_s": "wait",
        "intake_s": "intake",
    },
    source=f"{BATCHING}; s = 3/2: half a running step passes, the own prefill shares its step",
)
def time_to_first_token(
    *,
    prefill_s: Quantity,
    prompts_before: Quantity,
    slot_s: Quantity,
    decode_s: Quantity,
    decoding_ratio: Quantity,
    wait_s: Quantity,
    intake_s: Quantity,
    steps_awaited: Quantity = 1.5,
) -> Quantity:
    """Return the mean seconds from a request's arrival to its first token.

    ``decoding_ratio`` is the probability that other requests decode on arrival.
    """
    decode_delay = steps_awaited * decoding_ratio * decode_s
    return prefill_s + prompts_before * slot_s + decode_delay + wait_s + intake_s


@equation(
    "wait = (c - b + min(w, b-1)) / b · T",
    unit="s",
    symbols={
        "offered": "c",
        "running": "b",
        "withheld_slots": "w",
        "life_s": "T",
    },
    source="Little 1961: callers beyond the slots wait until a request of b leaves",
)
def slot_wait(
    *, offered: Quantity, running: Quantity, withheld_slots: Quantity, life_s: Quantity
) -> Quantity:
    """Return the mean seconds that a request waits for a slot."""
    withheld = minimum(withheld_slots, running - 1)  # the last slot is never withheld
    return (offered - running + withheld) / running * life_s


@equation(
    "wait = max(0, c · t_service - T)",
    unit="s",
    symbols={"callers": "c", "service_s": "t_service", "latency_s": "T"},
    source="Little 1961: c callers get one answer per t_service seconds at best",
)
def device_wait(*, callers: Quantity, service_s: Quantity, latency_s: Quantity) -> Quantity:
    """Return the seconds missing from a latency that the devices could not reach."""
    return maximum(0.0, callers * service_s - latency_s)


@equation(
    "n = u / (2 · (1-u)), u at most 0.98",
    unit="prompts",
    symbols={"busy_ratio": "u"},
    source="Pollaczek-Khinchine: Poisson arrivals, prefills of one length (M/D/1)",
)
def poisson_prompts_before(*, busy_ratio: Quantity) -> Quantity:
    """Return the mean number of prefills queued before a request in an open loop."""
    busy = minimum(busy_ratio, MAX_BUSY_RATIO)
    return busy / (2 * (1 - busy))


@equation(
    "p = 1 - exp(-n)",
    unit="share",
    symbols={"in_flight": "n"},
    source="Poisson arrivals: how often at least one other request is in flight",
)
def chance_of_decode_overlap(*, in_flight: Quantity) -> Quantity:
    """Return the probability that another request decodes when one arrives independently."""
    return 1 - np.exp(-1 * in_flight)


@equation(
    "k = b · s_in / c",
    unit="steps",
    symbols={"running": "b", "prompt_tokens": "s_in", "chunk_tokens": "c"},
    source=f"{BATCHING}; prompts are cut into chunks that fill the step",
)
def mixed_steps(*, running: Quantity, prompt_tokens: Quantity, chunk_tokens: Quantity) -> Quantity:
    """Return the number of mixed steps that read the prompts of all running requests."""
    return running * prompt_tokens / chunk_tokens


@equation(
    "T = k · t_mixed + (s_out - k) · t_packed",
    unit="s",
    symbols={
        "mixed_steps": "k",
        "mixed_s": "t_mixed",
        "output_tokens": "s_out",
        "packed_s": "t_packed",
    },
    source="each request gets a token a step; its place is taken anew when it ends",
)
def cycle_seconds(
    *, mixed_steps: Quantity, mixed_s: Quantity, output_tokens: Quantity, packed_s: Quantity
) -> Quantity:
    """Return the seconds in which every slot of a full batch serves one request."""
    return mixed_steps * mixed_s + (output_tokens - mixed_steps) * packed_s


@equation(
    "T = w · T_cycle + k · t_packed",
    unit="s",
    symbols={"waves": "w", "cycle_s": "T_cycle", "mixed_steps": "k", "packed_s": "t_packed"},
    source="requests of one length end together; the last to be read still decode when no one is",
)
def waves_seconds(
    *, waves: Quantity, cycle_s: Quantity, mixed_steps: Quantity, packed_s: Quantity
) -> Quantity:
    """Return the seconds from the first prompt of a burst to its last token."""
    return waves * cycle_s + mixed_steps * packed_s


@equation(
    "TTFT = wait + n · t_mixed",
    unit="s",
    symbols={"waited_s": "wait", "own_steps": "n", "mixed_s": "t_mixed"},
    source="Little 1961 for the wait; then the steps that read one's own prompt and those before",
)
def first_token_of_many(*, waited_s: Quantity, own_steps: Quantity, mixed_s: Quantity) -> Quantity:
    """Return the mean seconds to the first token with every slot taken."""
    return waited_s + own_steps * mixed_s


# Replicas of different speed behind one endpoint: request shares and combined performance.


@equation(
    "w = n · X_1 / X",
    unit="",
    symbols={"replicas": "n", "own_rate": "X_1", "total_rate": "X"},
    source="each replica gets requests in proportion to the most that it serves",
)
def request_share(*, replicas: Quantity, own_rate: Quantity, total_rate: Quantity) -> Quantity:
    """Return the request share of the replicas of one kind; rates are per second."""
    return replicas * own_rate / total_rate


@equation(
    "T = w · T_1 + (1 - w) · T_2",
    unit="s",
    symbols={"first_s": "T_1", "second_s": "T_2", "first_ratio": "w"},
    source="the mean over all requests, of which a share w is served by the first",
)
def mean_over_replica_kinds(
    *, first_s: Quantity, second_s: Quantity, first_ratio: Quantity
) -> Quantity:
    """Return the mean of a time over the requests of two kinds of replica."""
    return first_ratio * first_s + (1 - first_ratio) * second_s


@equation(
    "X = X_1 + X_2",
    unit="requests/s",
    symbols={"first_rate": "X_1", "second_rate": "X_2"},
    source="replicas do not wait for each other",
)
def rate_of_both(*, first_rate: Quantity, second_rate: Quantity) -> Quantity:
    """Return the requests per second of two kinds of replica."""
    return first_rate + second_rate


# Speculative decoding: a draft model proposes tokens, one target pass verifies them.


LEVIATHAN = "Leviathan et al. 2023, arXiv:2211.17192, section 3.1 (chain of guesses)"
CERTAIN = 1 - 1e-9


@equation(
    "E = (1 - a^(k+1)) / (1 - a)",
    unit="tokens",
    symbols={"acceptance_ratio": "a", "drafted_tokens": "k"},
    source=LEVIATHAN,
)
def tokens_per_round(*, acceptance_ratio: Quantity, drafted_tokens: Quantity) -> Quantity:
    """Return the mean tokens per round: accepted draft tokens plus one of the target.

    Assumes that each draft token is accepted independently with the same probability.
    """
    chance = where(acceptance_ratio >= CERTAIN, 0.0, acceptance_ratio)
    made = (1 - chance ** (drafted_tokens + 1)) / (1 - chance)
    return where(acceptance_ratio >= CERTAIN, drafted_tokens + 1.0, made)


@equation(
    "t = (k · t_draft + t_verify) / E",
    unit="s",
    symbols={
        "drafted_tokens": "k",
        "draft_s": "t_draft",
        "verify_s": "t_verify",
        "round_tokens": "E",
    },
    source=f"{LEVIATHAN}; Miao et al. 2024 (SpecInfer), arXiv:2305.09781: one pass checks all",
)
def speculative_gap(
    *, drafted_tokens: Quantity, draft_s: Quantity, verify_s: Quantity, round_tokens: Quantity
) -> Quantity:
    """Return the seconds per token of rounds of sequential drafting and one verification."""
    return (drafted_tokens * draft_s + verify_s) / round_tokens
