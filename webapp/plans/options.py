"""Convert a strategy's cache and attention options to those of jobs, or refuse them.

A plan that a job would silently run differently is refused by name, with a remedy.
"""

from planner.specs.strategy import Strategy
from runners.jobspec import KvCache
from webapp.plans.errors import DraftProblem

CACHES: dict[str, KvCache] = {"fp8": "fp8", "int4": "int4"}
CHOICES: dict[str, KvCache] = {**CACHES, "int2": "int2"}
WIDE = ("fp32", "bf16", "fp16")


def cache_of(strategy: Strategy, chosen: str) -> KvCache:
    """Return the KV-cache format: of the workload step if set, else of the plan.

    Raises:
        DraftProblem: jobs do not support the format, or step and plan disagree.
    """
    planned, cache = _planned_cache(strategy), CHOICES.get(chosen)
    if cache is None:
        return planned
    if planned in {"plain", cache}:
        return cache
    raise DraftProblem(
        f"The plan keeps keys and values in {planned}, the workload step in {cache}. Pin the KV "
        "cache to the same, or leave one of them to the other.",
        "kv_cache",
    )


def _planned_cache(strategy: Strategy) -> KvCache:
    dtype, compute_dtype = strategy.kv_cache_dtype, _compute_dtype(strategy)
    if dtype is None or dtype == compute_dtype:
        return "plain"
    if dtype in CACHES:
        return CACHES[dtype]
    raise DraftProblem(
        f"Keys and values in {dtype} are planned but no job keeps them so: jobs keep them in "
        f"{compute_dtype}, or in {' or '.join(CACHES)}. Pin the KV cache to one of these.",
        "kv_cache_dtype",
    )


def _compute_dtype(strategy: Strategy) -> str:
    """Return the compute dtype of layers: narrow activations are widened before caching."""
    dtype = strategy.activation_dtype
    return dtype if dtype in WIDE else "bf16"


def check_serving(strategy: Strategy) -> None:
    """Refuse options that neither an endpoint nor its benchmark supports.

    Raises:
        DraftProblem: names the option and a remedy.
    """
    own = _compute_dtype(strategy)
    if strategy.kv_cache_dtype not in {None, own}:
        raise DraftProblem(
            f"Endpoints keep keys and values in {own}; a cache in {strategy.kv_cache_dtype} is "
            f"planned only. Pin the KV cache to {own}, or generate in batches instead.",
            "kv_cache_dtype",
        )
    if strategy.speculative is not None:
        raise DraftProblem(
            f"A draft by {strategy.speculative.draft_model} is planned only: endpoints have no "
            "speculative decoding yet. Leave it out, or use batch generation.",
            "speculative",
        )
    if strategy.attention == "eager":
        raise DraftProblem(
            "Endpoints attend with fused kernels; eager attention is planned only. Leave it out.",
            "attention",
        )
