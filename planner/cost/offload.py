"""Offload costs: overlap of memory tiers, expert cache hits, streaming buffers, host updates.

Shares are of a tensor class's bytes; the rest is in device memory.
"""

from planner.cost.columns import largest, maximum, minimum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity

FLEXGEN = "Sheng et al. 2023 (FlexGen), arXiv:2303.06865, section 4"
MOE_CACHE = "Eliseev and Mazur 2023, arXiv:2312.17238, section 3"
ZERO_OFFLOAD = "Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840"
ZERO_INFINITY = "Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857"


@equation(
    "t = max(t_work, t_load, t_store, t_disk)",
    unit="s",
    symbols={
        "work_s": "t_work",
        "load_s": "t_load",
        "store_s": "t_store",
        "disk_s": "t_disk",
    },
    source=FLEXGEN,
)
def overlapped_seconds(
    *, work_s: Quantity, load_s: Quantity, store_s: Quantity, disk_s: Quantity
) -> Quantity:
    """Return the seconds of a pass whose computation overlaps with loads and stores."""
    return largest((work_s, load_s, store_s, disk_s))


@equation(
    "Q = D · a_d + E · a_e · (1 - h)",
    unit="B",
    symbols={
        "dense_bytes": "D",
        "dense_share": "a_d",
        "expert_bytes": "E",
        "expert_share": "a_e",
        "hit_ratio": "h",
    },
    source=MOE_CACHE,
)
def fetched_weight_bytes(
    *,
    dense_bytes: Quantity,
    dense_share: Quantity,
    expert_bytes: Quantity,
    expert_share: Quantity,
    hit_ratio: Quantity,
) -> Quantity:
    """Return the weight bytes that one pass fetches: dense weights and uncached experts.

    ``expert_bytes`` are those of the pass's routed experts; ``expert_share`` is 0 if all experts
    are on the device, else 1.
    """
    return dense_bytes * dense_share + expert_bytes * expert_share * (1 - hit_ratio)


@equation(
    "h = c^(1 - z)",
    unit="",
    symbols={"cached_share": "c", "skew_ratio": "z"},
    source=MOE_CACHE + "; cached experts are the most visited of a power law of skew z",
)
def expert_hit_ratio(*, cached_share: Quantity, skew_ratio: Quantity) -> Quantity:
    """Return the hit ratio of a device cache that holds a share of all experts.

    Without skew it equals the share; it rises with the skew of expert popularity.
    """
    return cached_share ** (1 - skew_ratio)


@equation(
    "a_e = min(1, a · (D + E) / E), a_d = (a · (D + E) - a_e · E) / D",
    unit="",
    symbols={"away_share": "a", "dense_bytes": "D", "expert_bytes": "E"},
    source="experts leave the device first: a token visits few of them",
)
def offloaded_dense_share(
    *, away_share: Quantity, dense_bytes: Quantity, expert_bytes: Quantity
) -> Quantity:
    """Return the offloaded share of the dense weights, after all experts are offloaded."""
    offloaded = away_share * (dense_bytes + expert_bytes)
    return maximum(0.0, offloaded - expert_bytes) / dense_bytes


@equation(
    "B = 2 · W / (2 · L) · a",
    unit="B",
    symbols={"weight_bytes": "W", "num_layers": "L", "away_share": "a"},
    source=FLEXGEN
    + ": half a layer, attention or feed-forward, works while the next half is loaded",
)
def double_buffer_bytes(
    *, weight_bytes: Quantity, num_layers: Quantity, away_share: Quantity
) -> Quantity:
    """Return the bytes of the device double buffer for streamed layers."""
    return 2 * weight_bytes / (2 * num_layers) * away_share


@equation(
    "t = k · t_batch",
    unit="s",
    symbols={"batches": "k", "batch_s": "t_batch"},
    source=FLEXGEN + ": a layer serves every batch of the block before the next is loaded",
)
def block_seconds(*, batches: Quantity, batch_s: Quantity) -> Quantity:
    """Return the seconds of all micro-batches per load of the weights."""
    return batches * batch_s


@equation(
    "t = n · B · r / (BW · e)",
    unit="s",
    symbols={
        "parameters": "n",
        "bytes_per_element": "B",
        "sharers": "r",
        "tier_bytes_per_s": "BW",
        "efficiency": "e",
    },
    source=ZERO_OFFLOAD + ", section 5: an update streams gradient, weight and states once",
)
def update_seconds(
    *,
    parameters: Quantity,
    bytes_per_element: Quantity,
    sharers: Quantity,
    tier_bytes_per_s: Quantity,
    efficiency: Quantity = 1.0,
) -> Quantity:
    """Return the seconds of an optimiser update in a memory tier shared by a node's ranks."""
    return parameters * bytes_per_element * sharers / (tier_bytes_per_s * efficiency)


@equation(
    "BW_link = min(BW_pcie, BW_host / r)",
    unit="B/s",
    symbols={"link_bytes_per_s": "BW_pcie", "tier_bytes_per_s": "BW_host", "sharers": "r"},
    source=ZERO_INFINITY + ", section 6: every rank fetches its own shard over its own link",
)
def shared_link_rate(
    *, link_bytes_per_s: Quantity, tier_bytes_per_s: Quantity, sharers: Quantity
) -> Quantity:
    """Return the bandwidth of one rank's host link while all ranks of the node use theirs."""
    return minimum(link_bytes_per_s, tier_bytes_per_s / sharers)


@equation(
    "A_dev = A · (1 - a) + a · 2 · A / L",
    unit="B",
    symbols={"kept_bytes": "A", "away_share": "a", "num_layers": "L"},
    source="one layer's activations leave while the next ones are made: two stay on the device",
)
def kept_on_device_bytes(
    *, kept_bytes: Quantity, away_share: Quantity, num_layers: Quantity
) -> Quantity:
    """Return the saved activation bytes on the device with a share of them offloaded."""
    return minimum(
        kept_bytes, kept_bytes * (1 - away_share) + away_share * 2 * kept_bytes / num_layers
    )


@equation(
    "G_dev = min(G, bucket)",
    unit="B",
    symbols={"gradient_bytes": "G", "bucket_bytes": "bucket"},
    source=ZERO_OFFLOAD + ", section 4: gradients leave bucket by bucket as they are made",
)
def gradient_bucket_bytes(*, gradient_bytes: Quantity, bucket_bytes: Quantity) -> Quantity:
    """Return the gradient bytes on the device when gradients are offloaded by bucket."""
    return minimum(gradient_bytes, bucket_bytes)
