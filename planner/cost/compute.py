"""How much arithmetic the work takes, in FLOP (one multiply-add is two)."""

from planner.cost.columns import minimum
from planner.cost.equation import equation
from planner.cost.quantity import Quantity

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


def causal_pairs(sequence: Quantity, window: int | None = None) -> Quantity:
    """Return how many (query, key) pairs a causal pass over a sequence has.

    A window cuts the triangle off: each query sees at most ``window`` keys.
    """
    reach = sequence if window is None else minimum(sequence, float(window))
    return reach * (reach + 1) / 2 + (sequence - reach) * reach
