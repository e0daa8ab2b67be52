"""Communication time of collectives: latency plus volume over bandwidth.

Ring collectives move ``(n-1)/n`` of the payload per pass; an all-reduce is a reduce-scatter and
an all-gather. With one rank, every collective is free.
"""

from planner.cost.quantity import Quantity, equation, where

RING = "Thakur et al. 2005, optimisation of collective communication in MPICH"
SYMBOLS = {
    "payload_bytes": "S",
    "ranks": "n",
    "link_bytes_per_s": "B",
    "latency_s": "l",
    "count": "m",
}


@equation("t = m · (2 · (n-1)/n · S/B + l) for n > 1", unit="s", symbols=SYMBOLS, source=RING)
def all_reduce_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of ``count`` all-reduces of ``payload_bytes`` over ``ranks``."""
    volume = 2 * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation("t = m · ((n-1)/n · S/B + l) for n > 1", unit="s", symbols=SYMBOLS, source=RING)
def all_gather_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of ``count`` all-gathers (or reduce-scatters) of the whole payload."""
    volume = (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation("t = (n-1) · m · (S/B + l)", unit="s", symbols=SYMBOLS)
def point_to_point_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of passing a payload through ``ranks`` pipeline stages."""
    return (ranks - 1) * count * (payload_bytes / link_bytes_per_s + latency_s)


@equation(
    "t = S / B",
    unit="s",
    symbols={"payload_bytes": "S", "link_bytes_per_s": "B"},
)
def transfer_seconds(*, payload_bytes: Quantity, link_bytes_per_s: Quantity) -> Quantity:
    """Return the seconds of moving bytes between a device, its host and its disk."""
    return payload_bytes / link_bytes_per_s


@equation(
    "t = m · (2 · (n-1)/n · S/B + l) for n > 1",
    unit="s",
    symbols=SYMBOLS,
    source="two all-to-alls, dispatch and combine",
)
def all_to_all_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    count: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of dispatching tokens to experts and combining their outputs."""
    volume = 2 * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, count * (volume / link_bytes_per_s + latency_s), 0.0)


@equation(
    "t = c · (n-1)/n · S/B + k · l for n > 1",
    unit="s",
    symbols={
        **{name: symbol for name, symbol in SYMBOLS.items() if name != "count"},
        "ring_passes": "c",
        "starts": "k",
    },
    source=RING,
)
def ring_seconds(
    *,
    payload_bytes: Quantity,
    ranks: Quantity,
    link_bytes_per_s: Quantity,
    latency_s: Quantity,
    ring_passes: Quantity,
    starts: Quantity,
) -> Quantity:
    """Return the seconds of ``ring_passes`` around a ring, in ``starts`` collectives."""
    volume = ring_passes * (ranks - 1) / ranks * payload_bytes
    return where(ranks > 1, volume / link_bytes_per_s + starts * latency_s, 0.0)
