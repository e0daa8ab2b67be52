"""Queueing delays between requests, replicas of different speed, and speculative decoding."""

from typing import NamedTuple

import numpy as np

from planner.cost.quantity import Quantity, equation, maximum, minimum, where

BATCHING = "Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310: prefill beside decode"

MAX_BUSY_RATIO = 0.98  # the mean wait of an infinite queue diverges at 1


class Client(NamedTuple):
    """How requests are sent, and how their lengths differ.

    ``calls`` is the number of requests of each caller of a closed loop, one after the other; the
    first calls of all callers are sent at once. ``length_range`` is the difference between the
    longest and the shortest answer over the mean, if all lengths between are as likely, and
    ``length_variance`` the variance of the lengths over their squared mean.
    """

    calls: float
    length_range: float
    length_variance: float = 0.0

    @property
    def variability(self) -> float:
        """Return the sum of the squared variations of Poisson arrivals, 1, and of lengths."""
        return 1 + self.length_variance


class Schedule(NamedTuple):
    """The steps that a request takes part in, in a continuous batch.

    ``steps`` mixed steps of ``step_tokens`` prompt tokens each pass until its first token. Of the
    steps that make its further tokens, a share ``mixed_ratio`` also reads ``mixed_tokens`` of
    other prompts. A share ``burst_ratio`` of the requests is sent together with those of all
    others: they wait for ``burst_steps`` steps of ``burst_tokens``. A request takes part in
    ``life_steps`` steps in all.
    """

    life_steps: float
    steps: float
    step_tokens: float
    mixed_ratio: float
    mixed_tokens: float
    burst_ratio: float = 0.0
    burst_steps: float = 0.0
    burst_tokens: float = 0.0


@equation(
    "w = min(L, sqrt((b·p/C)² + (c-2)/2 · (d·s_out)²))",
    unit="steps",
    symbols={
        "life_steps": "L",
        "running": "b",
        "prompt_steps": "p/C",
        "calls": "c",
        "spread_steps": "d·s_out",
    },
    source="callers who start at once stay as far apart as their first prompts took to read, and "
    "drift apart by the differences of their answers; checked against the simulation of all steps",
)
def arrival_window(
    *,
    life_steps: Quantity,
    running: Quantity,
    prompt_steps: Quantity,
    calls: Quantity,
    spread_steps: Quantity,
) -> Quantity:
    """Return the steps over which the next calls of all callers are spread, at most a life."""
    drift = maximum(0.0, calls - 2) / 2 * spread_steps**2
    return minimum(life_steps, ((running * prompt_steps) ** 2 + drift) ** 0.5)


@equation(
    "V = max(min(k·u/(2·(1-u)), sqrt(k·o)/2) · p · (h where p < C), q·C)",
    unit="tokens",
    symbols={
        "variability": "k",
        "busy_ratio": "u",
        "others": "o",
        "prompt_tokens": "p",
        "step_tokens": "C",
        "queued_steps": "q",
        "met_ratio": "h",
    },
    source="Kingman 1961 with k the variances of arrivals and lengths, 1 of Poisson arrivals of "
    "one length, limited by how far o arrivals can crowd by chance; a closed loop whose prompts "
    "take longer to read than an answer to make waits the q steps more. Who calls again when a "
    "step ends does not wait for the rest of one: h is 1 where calls come at any time, else u",
)
def tokens_ahead(
    *,
    busy_ratio: Quantity,
    others: Quantity,
    prompt_tokens: Quantity,
    step_tokens: Quantity,
    queued_steps: Quantity = 0.0,
    variability: Quantity = 1.0,
    met_ratio: Quantity = 1.0,
) -> Quantity:
    """Return the mean prompt tokens queued before a request that does not share its step."""
    busy = minimum(busy_ratio, MAX_BUSY_RATIO)
    crowd = (variability * maximum(0.0, others)) ** 0.5 / 2
    queue = minimum(variability * busy / (2 * (1 - busy)), crowd) * prompt_tokens
    queue = queue * where(prompt_tokens < step_tokens, met_ratio, 1.0)
    return maximum(queue, queued_steps * step_tokens)


@equation(
    "r = p + V + min(a·p, n·C - p)",
    unit="tokens",
    symbols={
        "prompt_tokens": "p",
        "ahead_tokens": "V",
        "arrivals_per_step": "a",
        "own_steps": "n",
        "step_tokens": "C",
    },
    source=f"{BATCHING}; the room of one's own steps goes to those who arrive in them",
)
def tokens_until_first(
    *,
    prompt_tokens: Quantity,
    ahead_tokens: Quantity,
    arrivals_per_step: Quantity,
    own_steps: Quantity,
    step_tokens: Quantity,
) -> Quantity:
    """Return the mean prompt tokens that the engine reads until a request's first token."""
    room = maximum(0.0, own_steps * step_tokens - prompt_tokens)
    return prompt_tokens + ahead_tokens + minimum(arrivals_per_step * prompt_tokens, room)


@equation(
    "m = w/L · max(u, 1 - exp(-a·n))",
    unit="share",
    symbols={
        "window_steps": "w",
        "life_steps": "L",
        "busy_ratio": "u",
        "arrivals_per_step": "a",
        "own_steps": "n",
    },
    source="Poisson arrivals within the window: how often at least one prompt is read in a step",
)
def mixed_share(
    *,
    window_steps: Quantity,
    life_steps: Quantity,
    busy_ratio: Quantity,
    arrivals_per_step: Quantity,
    own_steps: Quantity,
) -> Quantity:
    """Return the share of an engine's steps that read prompts beside decoding."""
    read: Quantity = 1 - np.exp(-1 * arrivals_per_step * own_steps)
    return window_steps / life_steps * maximum(minimum(busy_ratio, 1.0), read)


@equation(
    "n_b = max(1, min(b·p/C, max(p/C, (b+1)/2 · p/C + 1/2)))",
    unit="steps",
    symbols={"running": "b", "prompt_steps": "p/C"},
    source="mean place in a burst of b prompts, which are read in steps of C tokens",
)
def steps_in_burst(*, running: Quantity, prompt_steps: Quantity) -> Quantity:
    """Return the mean number of steps until a request's first token if all are sent at once."""
    mean = maximum(prompt_steps, (running + 1) / 2 * prompt_steps + 0.5)
    return maximum(1.0, minimum(running * prompt_steps, mean))


@equation(
    "TPOT = t_decode + m · (t_mixed - t_step) / e",
    unit="s",
    symbols={
        "decode_s": "t_decode",
        "mixed_ratio": "m",
        "mixed_s": "t_mixed",
        "step_s": "t_step",
        "tokens_per_step": "e",
    },
    source=f"{BATCHING}; e tokens a step with speculation, else 1",
)
def mean_token_gap(
    *,
    decode_s: Quantity,
    mixed_ratio: Quantity,
    mixed_s: Quantity,
    step_s: Quantity,
    tokens_per_step: Quantity = 1.0,
) -> Quantity:
    """Return the mean seconds between two tokens of a request in a continuous batch."""
    return decode_s + mixed_ratio * maximum(0.0, mixed_s - step_s) / tokens_per_step


@equation(
    "t_usual = n · t_read + s · q · t_step",
    unit="s",
    symbols={
        "steps": "n",
        "read_s": "t_read",
        "steps_awaited": "s",
        "decoding_ratio": "q",
        "step_s": "t_step",
    },
    source=f"{BATCHING}; s steps pass until the engine has the request and its answer is sent",
)
def usual_time_to_first_token(
    *,
    steps: Quantity,
    read_s: Quantity,
    steps_awaited: Quantity,
    decoding_ratio: Quantity,
    step_s: Quantity,
) -> Quantity:
    """Return the seconds to the first token of a request that is not sent with all others.

    ``decoding_ratio`` is the probability that other requests decode on arrival.
    """
    return steps * read_s + steps_awaited * decoding_ratio * step_s


@equation(
    "TTFT = (1-f) · t_usual + f · n_b · t_burst + wait + intake",
    unit="s",
    symbols={
        "usual_s": "t_usual",
        "burst_ratio": "f",
        "burst_steps": "n_b",
        "burst_s": "t_burst",
        "wait_s": "wait",
        "intake_s": "intake",
    },
    source="mean over the requests, of which a share f is sent at once with all others",
)
def time_to_first_token(
    *,
    usual_s: Quantity,
    burst_ratio: Quantity,
    burst_steps: Quantity,
    burst_s: Quantity,
    wait_s: Quantity,
    intake_s: Quantity,
) -> Quantity:
    """Return the mean seconds from a request's arrival to its first token."""
    together = burst_ratio * burst_steps * burst_s
    return (1 - burst_ratio) * usual_s + together + wait_s + intake_s


@equation(
    "wait = (c - b) / b · T",
    unit="s",
    symbols={"offered": "c", "running": "b", "life_s": "T"},
    source="Little 1961: callers beyond the slots wait until a request of b leaves",
)
def slot_wait(*, offered: Quantity, running: Quantity, life_s: Quantity) -> Quantity:
    """Return the mean seconds that a request waits for a slot."""
    return (offered - running) / running * life_s


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
    "TPOT = (1 - q) · t_first + q · t_full",
    unit="s",
    symbols={"first_s": "t_first", "full_s": "t_full", "waiting_ratio": "q"},
    source="mean over a burst: a share q waits for a place and then runs in a full batch",
)
def token_gap_of_waves(
    *, first_s: Quantity, full_s: Quantity, waiting_ratio: Quantity
) -> Quantity:
    """Return the mean seconds between two tokens of the requests of a burst."""
    return (1 - waiting_ratio) * first_s + waiting_ratio * full_s


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
