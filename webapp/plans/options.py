"""What a strategy says beside formats of weights and places, as jobs have it, or why they do not.

A plan that a job would silently run otherwise is refused by name, with the way out.
"""

from planner.specs.strategy import Strategy
from runners.jobspec import KvCache
from webapp.plans.errors import DraftProblem

CACHES: dict[str, KvCache] = {"fp8": "fp8", "int4": "int4"}
CHOICES: dict[str, KvCache] = {**CACHES, "int2": "int2"}
WIDE = ("fp32", "bf16", "fp16")


def cache_of(strategy: Strategy, chosen: str) -> KvCache:
    """Return how keys and values are kept: as the workload step says, else as the plan has it.

    Raises:
        DraftProblem: no job keeps them so, or the step and the plan disagree.
    """
    planned, found = _planned_cache(strategy), CHOICES.get(chosen)
    if found is None:
        return planned
    if planned in {"plain", found}:
        return found
    raise DraftProblem(
        f"The plan keeps keys and values in {planned}, the workload step in {found}. Pin the KV "
        "cache to the same, or leave one of them to the other.",
        "kv_cache",
    )


def _planned_cache(strategy: Strategy) -> KvCache:
    dtype, own = strategy.kv_cache_dtype, _computed(strategy)
    if dtype is None or dtype == own:
        return "plain"
    if dtype in CACHES:
        return CACHES[dtype]
    raise DraftProblem(
        f"Keys and values in {dtype} are planned but no job keeps them so: jobs keep them in "
        f"{own}, or in {' or '.join(CACHES)}. Pin the KV cache to one of these.",
        "kv_cache_dtype",
    )


def _computed(strategy: Strategy) -> str:
    """Return what layers compute in: narrow activations are widened before they are kept."""
    dtype = strategy.activation_dtype
    return dtype if dtype in WIDE else "bf16"


def check_serving(strategy: Strategy) -> None:
    """Refuse what neither an endpoint nor its measurement does.

    Raises:
        DraftProblem: with the strategy's own word for it, and the way out.
    """
    own = _computed(strategy)
    if strategy.kv_cache_dtype not in {None, own}:
        raise DraftProblem(
            f"Endpoints keep keys and values in {own}; a cache in {strategy.kv_cache_dtype} is "
            f"planned only. Pin the KV cache to {own}, or generate in batches instead.",
            "kv_cache_dtype",
        )
    if strategy.speculative is not None:
        raise DraftProblem(
            f"A draft by {strategy.speculative.draft_model} is planned only: endpoints do not "
            "guess ahead yet. Leave it out, or generate in batches, which can.",
            "speculative",
        )
    if strategy.attention == "eager":
        raise DraftProblem(
            "Endpoints attend with fused kernels; eager attention is planned only. Leave it out.",
            "attention",
        )
