"""Speculative decoding: a draft model proposes tokens, one target pass verifies them."""

from planner.cost.columns import where
from planner.cost.equation import equation
from planner.cost.quantity import Quantity

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
