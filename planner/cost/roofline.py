"""Time of an operator by the roofline model, and its energy."""

import math

from planner.cost.kv_cache import cached_tokens, mean_dim, window_and_entries
from planner.cost.quantity import (
    Equation,
    Ledger,
    Line,
    PerLayerGroup,
    Quantity,
    ceil,
    equation,
    floor,
    maximum,
    minimum,
)
from planner.specs.model import (
    AttentionLayers,
    CompressedLayers,
    IndexLayers,
    LatentLayers,
    LayerGroup,
    ModelSpec,
    RecurrentLayers,
)

# ---------------------------------------------------------------------------
# Roofline model: arithmetic of each operator, and the slower resource determines its time.
# ---------------------------------------------------------------------------


# Arithmetic of matrix products, attention and recurrences in FLOP (a multiply-add is 2).


FLEX_ATTENTION = "Dong et al. 2024 (FlexAttention), arXiv:2412.05496"
FLOP_SOURCE = "Kaplan et al. 2020, arXiv:2001.08361, section 2.1"


@equation(
    "F = 2 · n · T",
    unit="FLOP",
    symbols={"parameters": "n", "num_tokens": "T"},
    source=FLOP_SOURCE,
)
def matmul_flops(*, parameters: Quantity, num_tokens: Quantity) -> Quantity:
    """Return the FLOP of passing tokens forward through ``parameters`` of matrix weights."""
    return 2 * parameters * num_tokens


@equation(
    "F_a = 4 · a · d · L · pairs",
    unit="FLOP",
    symbols={"num_heads": "a", "head_dim": "d", "num_layers": "L", "token_pairs": "pairs"},
    source="scores and weighted sum, two products of a · d multiply-adds per pair",
)
def attention_flops(
    *, num_heads: Quantity, head_dim: Quantity, num_layers: Quantity, token_pairs: Quantity
) -> Quantity:
    """Return the forward FLOP of attention over (query, key) pairs."""
    return 4 * num_heads * head_dim * num_layers * token_pairs


@equation(
    "F_a = 2 · a · (2 · r + d_rope) · L · pairs",
    unit="FLOP",
    symbols={
        "num_heads": "a",
        "kv_lora_rank": "r",
        "rope_dim": "d_rope",
        "num_layers": "L",
        "token_pairs": "pairs",
    },
    source="DeepSeek-V2, arXiv:2405.04434, section 2.1.2: decompression absorbed by the queries",
)
def absorbed_attention_flops(
    *,
    num_heads: Quantity,
    kv_lora_rank: Quantity,
    rope_dim: Quantity,
    num_layers: Quantity,
    token_pairs: Quantity,
) -> Quantity:
    """Return the FLOP of attention over cached latents without decompressing them."""
    return 2 * num_heads * (2 * kv_lora_rank + rope_dim) * num_layers * token_pairs


@equation(
    "F_i = 2 · a_i · d_i · L · pairs",
    unit="FLOP",
    symbols={"num_heads": "a_i", "head_dim": "d_i", "num_layers": "L", "token_pairs": "pairs"},
    source="DeepSeek-V3.2, arXiv:2512.02556, section 2.1",
)
def index_flops(
    *, num_heads: Quantity, head_dim: Quantity, num_layers: Quantity, token_pairs: Quantity
) -> Quantity:
    """Return the FLOP of the indexer's scores over all cached tokens."""
    return 2 * num_heads * head_dim * num_layers * token_pairs


@equation(
    "F_r = 6 · S · L · T",
    unit="FLOP",
    symbols={"state_elements": "S", "num_layers": "L", "num_tokens": "T"},
    source="decay, update and read-out: three multiply-adds an element of the state",
)
def recurrent_flops(
    *, state_elements: Quantity, num_layers: Quantity, num_tokens: Quantity
) -> Quantity:
    """Return the FLOP of passing tokens through the states of recurrent layers."""
    return 6 * state_elements * num_layers * num_tokens


def attention_work(
    model: ModelSpec,
    pairs: PerLayerGroup,
    ranks: Quantity,
    record: tuple[Ledger, Line],
    *,
    absorbed: bool = False,
) -> float:
    """Return the FLOP of attention and of recurrent states on one of ``ranks`` ranks.

    ``pairs`` are (query, key) pairs, or the tokens of recurrent layers. Each group is one term.
    ``absorbed`` passes attend to cached latents without decompressing them.
    """
    ledger, line = record
    total = 0.0
    for group, group_pairs_total in zip(model.layers_by_attention, pairs.values, strict=True):
        formula_of_group = _formula_of(group, ranks, absorbed=absorbed)
        if formula_of_group is None:
            continue
        formula, name, values = formula_of_group
        values |= {"num_layers": group.count, name: group_pairs_total / group.count}
        total = total + ledger.term(formula, line, **values)
    return total


def _formula_of(
    group: LayerGroup, ranks: Quantity, *, absorbed: bool
) -> tuple[Equation[...], str, dict[str, Quantity]] | None:
    """Return a group's formula, the name of its count argument, and its shape on one rank."""
    if isinstance(group, LatentLayers) and absorbed:
        shape: dict[str, Quantity] = {
            "num_heads": group.heads / ranks,
            "kv_lora_rank": group.kv_lora_rank,
            "rope_dim": group.qk_rope_head_dim,
        }
        return absorbed_attention_flops, "token_pairs", shape
    if isinstance(group, AttentionLayers | LatentLayers):
        return (
            attention_flops,
            "token_pairs",
            {"num_heads": group.heads / ranks, "head_dim": mean_dim(group)},
        )
    if isinstance(group, CompressedLayers):
        shape = {"num_heads": group.num_attention_heads / ranks, "head_dim": group.head_dim}
        return attention_flops, "token_pairs", shape
    if isinstance(group, IndexLayers):
        shape = {"num_heads": group.num_heads, "head_dim": group.head_dim}
        return index_flops, "token_pairs", shape
    if isinstance(group, RecurrentLayers):
        return recurrent_flops, "num_tokens", {"state_elements": group.state_elements / ranks}
    return None


def causal_pairs(sequence: Quantity, window: int | None = None) -> Quantity:
    """Return the number of (query, key) pairs of a causal pass over a sequence.

    Each query attends to at most ``window`` keys.
    """
    reach = sequence if window is None else minimum(sequence, float(window))
    return reach * (reach + 1) / 2 + (sequence - reach) * reach


def chunked_pairs(sequence: Quantity, chunk: int) -> Quantity:
    """Return the pairs if each query attends only to the keys of its own chunk."""
    whole = floor(sequence / chunk)
    rest = sequence - whole * chunk
    return whole * causal_pairs(float(chunk)) + causal_pairs(rest)


@equation(
    "P = b² · n · min((n + 1) / 2, 1 + (b · q · (q + 1) / 2 + (d - 1 - q · b) · (q + 1)) / d), "
    "n = ceil(s / b), q = floor((d - 1) / b)",
    unit="pairs",
    symbols={"row_tokens": "s", "document_tokens": "d", "block_tokens": "b"},
    source=FLEX_ATTENTION + ", section 3.2: of a mask's blocks those that are empty are skipped",
)
def block_pairs(
    *, row_tokens: Quantity, document_tokens: Quantity, block_tokens: Quantity
) -> Quantity:
    """Return the (query, key) pairs of one row in the unmasked blocks of FlexAttention.

    Attention is causal within a document. The document at the start of a query block began
    uniformly within the last ``document_tokens`` tokens; the block computes its keys from there.
    """
    blocks = ceil(row_tokens / block_tokens)
    whole = floor((document_tokens - 1) / block_tokens)
    rest = document_tokens - 1 - whole * block_tokens
    before = (block_tokens * whole * (whole + 1) / 2 + rest * (whole + 1)) / document_tokens
    key_blocks = minimum((blocks + 1) / 2, 1 + before)
    return block_tokens * block_tokens * blocks * key_blocks


def attended_pairs(group: LayerGroup, sequence: Quantity) -> Quantity:
    """Return the pairs of a causal pass in one layer, or the tokens of a recurrent layer."""
    if isinstance(group, AttentionLayers):
        if group.kind == "chunked" and group.window:
            return chunked_pairs(sequence, group.window)
        return causal_pairs(sequence, group.window or group.top_k)
    if isinstance(group, LatentLayers):
        return causal_pairs(sequence, group.top_k)
    if isinstance(group, IndexLayers):
        return causal_pairs(sequence) / group.ratio
    if isinstance(group, CompressedLayers):
        window = group.top_k * group.ratio if group.top_k and group.ratio else None
        entries = causal_pairs(sequence, window) / group.ratio if group.ratio else 0.0
        return causal_pairs(sequence, group.window) + entries
    return sequence if isinstance(group, RecurrentLayers) else sequence * 0.0


def pairs_by_layer_group(model: ModelSpec, sequence: Quantity) -> PerLayerGroup:
    """Return the (query, key) pairs of a pass over one sequence, per group of layers.

    The pass is causal, except in an encoder, where queries attend to all keys.
    """
    if model.is_encoder:
        return PerLayerGroup.of(model, lambda _group: sequence * sequence)
    return PerLayerGroup.of(model, lambda group: attended_pairs(group, sequence))


def decode_pairs_by_layer_group(model: ModelSpec, context: Quantity) -> PerLayerGroup:
    """Return the pairs of one new token with a cached context, per group of layers."""
    return PerLayerGroup.of(model, lambda group: _decode_pairs(group, context))


def _decode_pairs(group: LayerGroup, context: Quantity) -> Quantity:
    if isinstance(group, AttentionLayers):
        return cached_tokens(context, group.window or group.top_k, paged=False)
    if isinstance(group, LatentLayers):
        return cached_tokens(context, group.top_k, paged=False)
    if isinstance(group, IndexLayers):
        return context / group.ratio
    if isinstance(group, CompressedLayers):
        return window_and_entries(group, context, group.top_k, paged=False)
    return context * 0 + (1.0 if isinstance(group, RecurrentLayers) else 0.0)


# Expert load imbalance: the experts read and the work of the busiest rank.
#
# Expert popularity is assumed gamma-distributed with shape ``evenness`` (1 is exponential, large
# values are even). The busiest rank limits a pass; with fewer tokens, its load is further above
# the mean.


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


ROOFLINE = "Williams et al. 2009, Roofline, CACM 52(4)"


@equation(
    "t = max(F / (peak · e_c), Q / (bandwidth · e_m))",
    unit="s",
    symbols={
        "work_flops": "F",
        "peak_flops_per_s": "peak",
        "compute_efficiency": "e_c",
        "moved_bytes": "Q",
        "memory_bytes_per_s": "bandwidth",
        "memory_efficiency": "e_m",
    },
    source=ROOFLINE,
)
def roofline_seconds(
    *,
    work_flops: Quantity,
    peak_flops_per_s: Quantity,
    compute_efficiency: Quantity,
    moved_bytes: Quantity,
    memory_bytes_per_s: Quantity,
    memory_efficiency: Quantity,
) -> Quantity:
    """Return the seconds of an operator whose compute and memory traffic overlap."""
    return maximum(
        compute_seconds(
            work_flops=work_flops,
            peak_flops_per_s=peak_flops_per_s,
            compute_efficiency=compute_efficiency,
        ),
        memory_seconds(
            moved_bytes=moved_bytes,
            memory_bytes_per_s=memory_bytes_per_s,
            memory_efficiency=memory_efficiency,
        ),
    )


@equation(
    "t = F / (peak · e_c)",
    unit="s",
    symbols={"work_flops": "F", "peak_flops_per_s": "peak", "compute_efficiency": "e_c"},
    source=ROOFLINE,
)
def compute_seconds(
    *, work_flops: Quantity, peak_flops_per_s: Quantity, compute_efficiency: Quantity
) -> Quantity:
    """Return the seconds of arithmetic at a share of the peak rate."""
    return work_flops / (peak_flops_per_s * compute_efficiency)


@equation(
    "t = Q / (bandwidth · e_m)",
    unit="s",
    symbols={
        "moved_bytes": "Q",
        "memory_bytes_per_s": "bandwidth",
        "memory_efficiency": "e_m",
    },
    source=ROOFLINE,
)
def memory_seconds(
    *, moved_bytes: Quantity, memory_bytes_per_s: Quantity, memory_efficiency: Quantity
) -> Quantity:
    """Return the seconds of moving bytes at a share of the memory bandwidth."""
    return moved_bytes / (memory_bytes_per_s * memory_efficiency)


OVERHEAD = "inference-sim docs/guide/latency-models.md (form of the overhead terms)"


@equation(
    "t = L · (ops · c_op + c_layer) · passes",
    unit="s",
    symbols={
        "num_layers": "L",
        "ops_per_layer": "ops",
        "op_overhead_s": "c_op",
        "layer_overhead_s": "c_layer",
        "passes": "passes",
    },
    source=OVERHEAD,
)
def overhead_seconds(
    *,
    num_layers: Quantity,
    ops_per_layer: Quantity,
    op_overhead_s: Quantity,
    layer_overhead_s: Quantity,
    passes: Quantity = 1.0,
) -> Quantity:
    """Return the kernel launch seconds of all layers, without the kernels' own time."""
    return num_layers * (ops_per_layer * op_overhead_s + layer_overhead_s) * passes


@equation(
    "t = n · c_step",
    unit="s",
    symbols={"steps": "n", "step_overhead_s": "c_step"},
    source=OVERHEAD,
)
def scheduling_seconds(*, steps: Quantity, step_overhead_s: Quantity) -> Quantity:
    """Return the scheduling seconds of an engine's steps."""
    return steps * step_overhead_s


@equation(
    "t = b · c_request",
    unit="s",
    symbols={"requests": "b", "request_overhead_s": "c_request"},
    source=f"{OVERHEAD}; the host visits each request in turn: its blocks, its token, its stream",
)
def attending_seconds(*, requests: Quantity, request_overhead_s: Quantity) -> Quantity:
    """Return the host seconds per step for the requests in the batch."""
    return requests * request_overhead_s


@equation(
    "t = max(0, F / (W · g) - t_products)",
    unit="s",
    symbols={
        "work_flops": "F",
        "power_watts": "W",
        "flops_per_joule": "g",
        "products_s": "t_products",
    },
    source="published prompt speeds of 14 cards: in a chip family they go with the power limit",
)
def power_wait_seconds(
    *,
    work_flops: Quantity,
    power_watts: Quantity,
    flops_per_joule: Quantity,
    products_s: Quantity,
) -> Quantity:
    """Return the seconds by which a GPU's power limit slows its matrix products."""
    return maximum(0.0, work_flops / (power_watts * flops_per_joule) - products_s)


# ---------------------------------------------------------------------------
# Energy, cost and carbon per token and per run, from power, prices and grid data.
# ---------------------------------------------------------------------------


MILLION = 1e6
SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3.6e6
POLCA = "Patel et al. 2023 (POLCA), arXiv:2308.12908: power by phase; hosts and cooling apart"


@equation(
    "P = P_tdp · (idle + (1 - idle) · u)",
    unit="W",
    symbols={"power_watts": "P_tdp", "idle_ratio": "idle", "active_ratio": "u"},
    source=POLCA,
)
def drawn_watts(
    *, power_watts: Quantity, idle_ratio: Quantity, active_ratio: Quantity
) -> Quantity:
    """Return a device's mean power, with ``active_ratio`` of its power above idle."""
    return power_watts * (idle_ratio + (1 - idle_ratio) * active_ratio)


@equation(
    "E = n · P / rate",
    unit="J/token",
    symbols={"num_devices": "n", "power_watts": "P", "tokens_per_s": "rate"},
    source="mean drawn power of the devices, hosts and cooling not counted",
)
def joules_per_token(
    *, num_devices: Quantity, power_watts: Quantity, tokens_per_s: Quantity
) -> Quantity:
    """Return the joules per token of devices with a mean power."""
    return num_devices * power_watts / tokens_per_s


@equation(
    "E_run = n · P · t",
    unit="J",
    symbols={"num_devices": "n", "power_watts": "P", "duration_s": "t"},
)
def run_joules(*, num_devices: Quantity, power_watts: Quantity, duration_s: Quantity) -> Quantity:
    """Return the joules of a whole run."""
    return num_devices * power_watts * duration_s


@equation(
    "c = n · price / 3600 / rate · 10^6",
    unit="USD per million tokens",
    symbols={"num_devices": "n", "hourly_usd": "price", "tokens_per_s": "rate"},
)
def usd_per_million_tokens(
    *, num_devices: Quantity, hourly_usd: Quantity, tokens_per_s: Quantity
) -> Quantity:
    """Return the dollars per million tokens of devices rented by the hour."""
    return num_devices * hourly_usd / SECONDS_PER_HOUR / tokens_per_s * MILLION


@equation(
    "c_run = n · price / 3600 · t",
    unit="USD",
    symbols={"num_devices": "n", "hourly_usd": "price", "duration_s": "t"},
)
def run_usd(*, num_devices: Quantity, hourly_usd: Quantity, duration_s: Quantity) -> Quantity:
    """Return the dollars of a whole run on devices rented by the hour."""
    return num_devices * hourly_usd / SECONDS_PER_HOUR * duration_s


@equation(
    "x = E / 3.6·10^6 · per_kwh",
    unit="g or USD",
    symbols={"energy_joules": "E", "per_kwh": "per_kwh"},
    source="1 kWh = 3.6 MJ",
)
def of_electricity(*, energy_joules: Quantity, per_kwh: Quantity) -> Quantity:
    """Return the grams or dollars of an amount of energy, at ``per_kwh`` of them."""
    return energy_joules / JOULES_PER_KWH * per_kwh
