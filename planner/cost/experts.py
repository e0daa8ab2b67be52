"""Expert load imbalance: the experts read and the work of the busiest rank.

Expert popularity is assumed gamma-distributed with shape ``evenness`` (1 is exponential, large
values are even). The busiest rank limits a pass; with fewer tokens, its load is further above the
mean.
"""

import math

from planner.cost.columns import maximum, minimum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity

# Blom's expected largest of n normal values, and Shore's closed form of the normal quantile.
BLOM_SHIFT, BLOM_WIDTH = 0.375, 0.25
SHORE_SCALE, SHORE_POWER = 5.5556, 0.1186
ROUTING = "experts of gamma-distributed popularity, chosen by each token independently"


def excess_of_busiest(ranks: Quantity) -> Quantity:
    """Return the load of the busiest of ``ranks`` in standard deviations above the mean.

    >>> round(excess_of_busiest(8.0), 2), excess_of_busiest(1.0)
    (1.43, 0.0)
    """
    below = (ranks - BLOM_SHIFT) / (ranks + BLOM_WIDTH)
    return SHORE_SCALE * (1 - ((1 - below) / below) ** SHORE_POWER)


@equation(
    "n = min(E/x, m + z(x) · √(m · (1-p))), m = p·E/x, p = max(k/E, 1-(1-T·ln(1-k/E)/a)^-a)",
    unit="experts",
    symbols={
        "num_experts": "E",
        "experts_per_token": "k",
        "num_tokens": "T",
        "expert_ranks": "x",
        "evenness": "a",
    },
    source=ROUTING,
)
def experts_read(
    *,
    num_experts: float,
    experts_per_token: float,
    num_tokens: Quantity,
    expert_ranks: Quantity,
    evenness: float,
) -> Quantity:
    """Return the number of distinct experts that the busiest rank reads in one layer."""
    if experts_per_token >= num_experts:
        return num_experts / expert_ranks
    visits = -num_tokens * math.log(1 - experts_per_token / num_experts)
    read_share = maximum(experts_per_token / num_experts, 1 - (1 + visits / evenness) ** -evenness)
    mean = read_share * num_experts / expert_ranks
    spread = maximum(0.0, mean * (1 - read_share)) ** 0.5
    return minimum(num_experts / expert_ranks, mean + excess_of_busiest(expert_ranks) * spread)


@equation(
    "n = min(T · min(k, E/x), μ + z(x) · √(μ · (1-1/x) · ((E-k)/(E-1) + μ·x/(a·E)))), μ = T·k/x",
    unit="tokens",
    symbols={
        "num_experts": "E",
        "experts_per_token": "k",
        "num_tokens": "T",
        "expert_ranks": "x",
        "evenness": "a",
    },
    source=ROUTING,
)
def expert_visits(
    *,
    num_experts: float,
    experts_per_token: float,
    num_tokens: Quantity,
    expert_ranks: Quantity,
    evenness: float,
) -> Quantity:
    """Return the number of routed (token, expert) pairs of the busiest rank in one layer."""
    mean = num_tokens * experts_per_token / expert_ranks
    others = (num_experts - experts_per_token) / max(1.0, num_experts - 1)
    popular = mean * expert_ranks / (evenness * num_experts)
    spread = (mean * (1 - 1 / expert_ranks) * (others + popular)) ** 0.5
    most = num_tokens * minimum(experts_per_token, num_experts / expert_ranks)
    return minimum(most, mean + excess_of_busiest(expert_ranks) * spread)


@equation(
    "s = 1-(1-1/x)^k",
    unit="",
    symbols={"expert_ranks": "x", "experts_per_token": "k"},
    source=ROUTING,
)
def dispatch_share(*, expert_ranks: Quantity, experts_per_token: Quantity) -> Quantity:
    """Return the share of all tokens that are routed to one group of experts."""
    return 1 - (1 - 1 / expert_ranks) ** experts_per_token
