"""What jobs can run of a planned strategy: dtypes and offload."""

from planner.specs.estimate import PlannedStrategy
from planner.specs.workload import Strategy
from runners.plans.refusals import DraftProblem

WIDE = ("fp32", "bf16", "fp16")
RUNNABLE_DTYPES = (*WIDE, "fp8", "int8", "int4")


def refuse_offloaded(best: PlannedStrategy, allowed: frozenset[str] = frozenset()) -> None:
    """Refuse a plan with offload that a job does not have; ``allowed``: the places that it has.

    Raises:
        DraftProblem: the sentence names what is offloaded, and where.
    """
    if away := [each for each in best.strategy.offload_places if each not in allowed]:
        raise DraftProblem(
            f"This plan has {', '.join(away)}. The planner covers this, but of the jobs only "
            "batch generation supports it. Choose fewer bits, a smaller batch or a smaller model.",
            "weight_dtype",
        )


def runnable_dtype(best: PlannedStrategy) -> str:
    """Return the dtype of a plan's weights.

    Raises:
        DraftProblem: no job loads weights of this dtype.
    """
    dtype = best.strategy.weight_dtype or "bf16"
    if dtype not in RUNNABLE_DTYPES:
        raise DraftProblem(
            f"Slipway's own engine and trainer do not load {dtype} weights. Set the weight dtype "
            f"in the Hardware step to one of {', '.join(RUNNABLE_DTYPES)}, or choose an engine "
            "that loads the files as they are stored.",
            "weight_dtype",
        )
    return dtype


def compute_dtype(strategy: Strategy) -> str:
    """Return the compute dtype of layers: narrow activations are widened before caching."""
    dtype = strategy.activation_dtype
    return dtype if dtype in WIDE else "bf16"
